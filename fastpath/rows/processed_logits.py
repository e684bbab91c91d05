# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Temperature, top-k and top-p masks before the log-sum-exp: `reference.operators.processed_logits`.

Sorting only moves values, so the library sorts; what adds or divides is ours, in the contract's order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastpath.backend import launch, require_fields, require_tensor
from fastpath.primitives import div_rn, exp, pairs_tree
from reference.gradients import ProcessedLogitsBackwardContract
from reference.operators.processed_logits import ProcessedLogitsContract


@triton.jit
def scale_kernel(
    logits, out, size, columns, temperature, BY_ROW: tl.constexpr, RECIPROCAL: tl.constexpr, BLOCK: tl.constexpr
):
    """out = logits / temperature, or logits * (1 / temperature); BY_ROW: temperature points to one for each row."""
    # a scalar division would be the compiler's own; a block of one value is not
    if BY_ROW:
        row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        offset, inside = row * columns + column, column < columns
        divisor = tl.load(temperature + row + tl.zeros((BLOCK,), tl.int32))
    else:
        offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offset < size
        divisor = tl.zeros((BLOCK,), tl.float32) + temperature
    x = tl.load(logits + offset, mask=inside, other=0.0)
    scaled = x * div_rn(tl.full((BLOCK,), 1.0, tl.float32), divisor) if RECIPROCAL else div_rn(x, divisor)
    tl.store(out + offset, scaled, mask=inside)


@triton.jit
def gradient_kernel(grad, processed, out, size, temperature, RECIPROCAL: tl.constexpr, BLOCK: tl.constexpr):
    """out = grad / temperature (or times its reciprocal), and 0 where the processed logit is -inf."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(grad + offset, mask=offset < size, other=0.0)
    divisor = tl.zeros((BLOCK,), tl.float32) + temperature
    scaled = dy * div_rn(tl.full((BLOCK,), 1.0, tl.float32), divisor) if RECIPROCAL else div_rn(dy, divisor)
    masked = tl.load(processed + offset, mask=offset < size, other=0.0) == float("-inf")
    tl.store(out + offset, tl.where(masked, 0.0, scaled), mask=offset < size)


@triton.jit
def weights_kernel(ordered, weights, maximum, sums, columns, LANES: tl.constexpr):
    """weights = exp(ordered - maximum) of one row, and their sum in the lanes and tree of the contract."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.load(maximum + row)
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.float32)
    for start in range(0, columns, LANES):
        inside = start + lane < columns
        x = tl.load(ordered + row * columns + start + lane, mask=inside, other=0.0)
        weight = exp(x - largest)
        tl.store(weights + row * columns + start + lane, weight, mask=inside)
        total += tl.where(inside, weight, 0.0)
    tl.store(sums + row + tl.arange(0, 1), pairs_tree(tl.reshape(total, [1, LANES]), 1, LANES))


@triton.jit
def kept_kernel(weights, sums, kept, rows, columns, thresholds, ASCENDING: tl.constexpr, BLOCK: tl.constexpr):
    """Which sorted columns stay: weight / sum is cumulated one after the other. Arrays are [columns, rows]."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    total = tl.load(sums + row, mask=inside, other=1.0)
    threshold = tl.load(thresholds + row, mask=inside, other=1.0)
    probability = div_rn(tl.load(weights + row, mask=inside, other=0.0), total)
    cumulated = probability
    for column in range(0, columns):
        if ASCENDING:
            stays = (cumulated > threshold) | (column == columns - 1)
        else:
            stays = (cumulated - probability <= threshold) | (column == 0)
        tl.store(kept + tl.cast(column, tl.int64) * rows + row, stays.to(tl.int8), mask=inside)
        following = min(column + 1, columns - 1)
        probability = div_rn(
            tl.load(weights + tl.cast(following, tl.int64) * rows + row, mask=inside, other=0.0), total
        )
        cumulated += probability


def processed_logits(
    logits: torch.Tensor,
    contract: ProcessedLogitsContract,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor | None = None,
    top_p: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Scale and mask logits.

    Args:
        logits: float32, [tokens, vocabulary].
        temperature: above 0; rounded to float32.
        top_k: number of logits to keep, at least 1; None keeps all.
        top_p: probability mass to keep, in (0, 1]; rounded to float32; None or 1 keeps all.

    A tensor [tokens] (float32, or integers for top_k) gives each row a setting of its own. Its range is not checked:
    that would wait for the device.

    Returns:
        float32, [tokens, vocabulary]; masked columns are -inf. A row with a NaN is scaled and not masked.

    Raises:
        TypeError, ValueError: dtype, shape, layout or device; a setting outside its range; a mask of an empty
            vocabulary.
        UnsupportedError: a contract without a kernel.
    """
    implemented = {"order.sum": tuple(_LANES), "rounding.output": "float32", "primitives.exp": "rlk"}
    require_fields(contract, implemented)
    require_tensor(logits, "logits", "tokens, vocabulary", torch.float32)
    for name, setting in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p)):
        if isinstance(setting, torch.Tensor) and setting.shape != logits.shape[:1]:
            raise ValueError(f"{name}: expected shape [tokens={logits.shape[0]}], got {list(setting.shape)}")
    divisor: Any = temperature.float() if isinstance(temperature, torch.Tensor) else temperature
    by_row = isinstance(temperature, torch.Tensor)
    if not by_row and not 0 < divisor < float("inf"):
        raise ValueError(f"temperature: must be finite and above 0, got {temperature!r}")
    if top_k is not None and (not isinstance(top_k, int | torch.Tensor) or (isinstance(top_k, int) and top_k < 1)):
        raise ValueError(f"top_k: must be an integer of at least 1 or None, got {top_k!r}")
    if isinstance(top_p, int | float) and not 0 < top_p <= 1:
        raise ValueError(f"top_p: must be above 0 and at most 1, or None, got {top_p!r}")
    filters = {"top_k": top_k is not None, "top_p": isinstance(top_p, torch.Tensor) or (top_p or 1) < 1}
    if any(filters.values()) and logits.shape[1] == 0:
        raise ValueError("logits: the vocabulary is empty")
    scaled = torch.empty_like(logits)
    size, block = logits.numel(), 1024
    if size == 0:
        return scaled
    reciprocal = contract.primitives.temperature == "reciprocal"
    columns = logits.shape[1]
    grid = (logits.shape[0], triton.cdiv(columns, block)) if by_row else (triton.cdiv(size, block),)
    arguments = (logits, scaled, size, columns, divisor)
    constants: dict[str, Any] = {"BY_ROW": by_row, "RECIPROCAL": reciprocal, "BLOCK": block}
    launch(scale_kernel, grid, *arguments, contract=contract, **constants)
    # A row with a NaN has no order, so that no mask may hide it.
    corrupted = torch.isnan(scaled).any(dim=1, keepdim=True) if any(filters.values()) else None
    order = ("top_k", "top_p") if contract.order.filters == "top_k_top_p" else ("top_p", "top_k")
    for name in order:
        if filters[name] and name == "top_k":
            scaled = _mask(scaled, _top_k(scaled, top_k, contract) | corrupted)
        elif filters[name]:
            scaled = _mask(scaled, _top_p(scaled, top_p, contract) | corrupted)
    return scaled


def processed_logits_backward(
    grad: torch.Tensor, processed: torch.Tensor, temperature: float, contract: ProcessedLogitsBackwardContract
) -> torch.Tensor:
    """Gradient of the logits: `reference.gradients.processed_logits`.

    Args:
        grad, processed: float32, [tokens, vocabulary]: gradient of the processed logits, and these.
        temperature: above 0; rounded to float32.

    Returns:
        float32, [tokens, vocabulary].

    Raises:
        TypeError, ValueError: dtype, shape, layout or device; the temperature.
    """
    require_tensor(grad, "grad", "tokens, vocabulary", torch.float32)
    rows, columns = grad.shape
    require_tensor(processed, "processed", f"tokens={rows}, vocabulary={columns}", torch.float32)
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature: must be finite and above 0, got {temperature!r}")
    out = torch.empty_like(grad)
    size, block = grad.numel(), 1024
    if size:
        reciprocal = contract.primitives.temperature == "reciprocal"
        arguments = (grad, processed, out, size, temperature)
        launch(
            gradient_kernel, (triton.cdiv(size, block),), *arguments,
            contract=contract, RECIPROCAL=reciprocal, BLOCK=block,
        )  # fmt: skip
    return out


_LANES = {"lanes-tree-64": 64, "lanes-tree-256": 256, "lanes-tree-1024": 1024}


def _mask(logits: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return torch.where(keep, logits, torch.full_like(logits, float("-inf")))


def _top_k(logits: torch.Tensor, k: Any, contract: ProcessedLogitsContract) -> torch.Tensor:
    rows, columns = logits.shape
    kept = _setting(k, rows, torch.int64, logits).clamp(max=columns)[:, None]
    ordered, index = torch.sort(logits, dim=1, descending=True, stable=True)
    if contract.domain.top_k_ties == "keep":
        return logits >= ordered.gather(1, kept - 1)
    among = torch.arange(columns, device=logits.device) < kept
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, index, among)


def _setting(setting: Any, rows: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """A setting as a tensor [rows] on the device of ``like``."""
    if isinstance(setting, torch.Tensor):
        return setting.to(dtype)
    return torch.full((rows,), setting, dtype=dtype, device=like.device)


def _top_p(logits: torch.Tensor, p: Any, contract: ProcessedLogitsContract) -> torch.Tensor:
    rows, columns = logits.shape
    mass = _setting(p, rows, torch.float32, logits)
    ascending = contract.order.top_p == "ascending"
    ordered, index = torch.sort(logits, dim=1, descending=not ascending, stable=True)
    maximum = ordered[:, -1 if ascending else 0].contiguous()
    weights, sums = torch.empty_like(ordered), torch.empty_like(maximum)
    lanes = min(_LANES[contract.order.sum], 1 << (columns.bit_length() - 1))
    launch(weights_kernel, (rows,), ordered, weights, maximum, sums, columns, contract=contract, LANES=lanes)
    limit = 1 - mass if ascending else mass
    kept = torch.empty(columns, rows, dtype=torch.int8, device=logits.device)
    arguments = (weights.t().contiguous(), sums, kept, rows, columns, limit)
    constants = {"ASCENDING": ascending, "BLOCK": 32}
    options = {"num_warps": 1}
    launch(kept_kernel, (triton.cdiv(rows, 32),), *arguments, contract=contract, options=options, **constants)
    # a mass of 1 keeps all, columns without probability too
    among = kept.t().bool() | (mass >= 1)[:, None]
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, index, among)
