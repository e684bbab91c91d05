# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Log-sum-exp over the vocabulary: `reference.operators.logsumexp`, on one rank or with the vocabulary shared by ranks.

The maximum is exact in any order, so it may come from anywhere (a matrix product leaves tile maxima behind). The sum of
exponentials then follows the contract: 256 lanes through each segment, a tree over lanes, a tree over segments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from fastpath.backend import launch, require_fields, require_tensor
from fastpath.collectives.all_reduce import gather
from fastpath.primitives import LOWEST, exp, log, ordered, pairs_tree, unordered
from reference.contract.base import Contract
from reference.operators.logsumexp import LogsumexpContract

LANES = {"lanes-tree-64": 64, "lanes-tree-256": 256, "lanes-tree-1024": 1024}


class LogsumexpResult(NamedTuple):
    """``value`` = ``maximum`` + log(``total``), float32, [tokens] each. The sign of a zero maximum means nothing."""

    value: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor


@triton.jit
def maximum_kernel(logits, maxima, columns, width, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """maxima[row, part]: largest key of ``width`` columns of a row of logits [rows, columns]."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = part * width
    last = min(first + width, columns)
    best = tl.full((BLOCK,), LOWEST, tl.int32)
    for start in range(first, last, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * columns + column, mask=column < last, other=float("-inf"))
        best = tl.maximum(best, ordered(x))
    tl.store(maxima + row * PARTS + part, tl.max(best, axis=0))


@triton.jit
def merge_maxima_kernel(maxima, maximum, parts, BLOCK: tl.constexpr):
    """maximum[row]: the logit behind the largest key of maxima [rows, parts]."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((BLOCK,), LOWEST, tl.int32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(maxima + row * parts + part, mask=part < parts, other=LOWEST))
    tl.store(maximum + row, unordered(tl.max(best, axis=0)))


@triton.jit
def sum_kernel(
    logits,
    maximum,
    sums,
    columns,
    width,
    first_segment,
    segments,
    TERM: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """sums[row, segment]: sum of a term over the segment's columns, in LANES lanes and a tree.

    The term of a logit x, with e = exp(x - maximum), is e (TERM 0), e * (x - maximum) (1) or e * x (2).
    """
    row, segment = tl.program_id(0).to(tl.int64), first_segment + tl.program_id(1)
    first = segment * width
    last = min(first + width, columns)
    largest = tl.load(maximum + row)
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.float32)
    for start in range(first, last, LANES * UNROLL):
        for chunk in tl.static_range(UNROLL):
            column = start + chunk * LANES + lane
            # a missing column adds exp(-inf) = +0, which no sum that began at +0 can tell
            x = tl.load(logits + row * columns + column, mask=column < last, other=float("-inf"))
            shifted = x - largest
            term = exp(shifted)
            if TERM != 0:
                factor = shifted if TERM == 1 else x
                # a masked column adds 0, not 0 * -inf
                term = tl.where(factor == float("-inf"), 0.0, term * factor)
            total += tl.where(column < last, term, 0.0)
    tree = pairs_tree(tl.reshape(total, [1, LANES]), 1, LANES)
    tl.store(sums + row * segments + segment + tl.arange(0, 1), tree)


@triton.jit
def finish_kernel(sums, maximum, value, total, rows, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """total = tree over sums [rows, SEGMENTS]; value = maximum + log(total)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    parts = tl.load(
        sums + row.to(tl.int64)[:, None] * SEGMENTS + tl.arange(0, SEGMENTS)[None, :],
        mask=row[:, None] < rows,
        other=0.0,
    )
    added = pairs_tree(parts, BLOCK, SEGMENTS)
    tl.store(total + row, added, mask=row < rows)
    tl.store(value + row, tl.load(maximum + row, mask=row < rows) + log(added), mask=row < rows)


def logsumexp(
    logits: torch.Tensor, contract: LogsumexpContract, group: dist.ProcessGroup | None = None
) -> LogsumexpResult:
    """Log of the sum of exponentials of each row. A column of -inf (masked) adds exactly 0.

    Args:
        logits: float32, [tokens, vocabulary]; with a ``group``, this rank's equal share of the columns, in rank order.
        group: ranks that share the vocabulary; they must divide the contract's segments.

    Returns:
        The same on every rank. A row of -inf alone, which has no distribution, gives NaN.

    Raises:
        TypeError, ValueError: dtype, shape, layout or device; an empty vocabulary; segments that ranks cannot share.
        UnsupportedError: a contract without a kernel.
    """
    require_tensor(logits, "logits", "tokens, vocabulary", torch.float32)
    require_contract(contract)
    maximum = row_maximum(logits, contract)
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks > 1:
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    sums = segment_sums(logits, maximum, contract, ranks)
    if ranks > 1:
        sums = gather(sums, contract, group).transpose(0, 1).reshape(logits.shape[0], -1)
    return finish(sums, maximum, contract)


def row_maximum(logits: torch.Tensor, contract: LogsumexpContract) -> torch.Tensor:
    """Largest logit of each row, NaN if there is one: float32 [tokens]."""
    rows, columns = logits.shape
    parts = 8
    maxima = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    if rows:
        width = triton.cdiv(columns, parts)
        arguments = (logits, maxima, columns, width)
        launch(maximum_kernel, (rows, parts), *arguments, contract=contract, PARTS=parts, BLOCK=1024)
    return merge_maxima(maxima, contract)


def merge_maxima(maxima: torch.Tensor, contract: LogsumexpContract) -> torch.Tensor:
    """Row maximum of int32 keys [tokens, parts] as the logit it stands for: float32 [tokens]."""
    rows, parts = maxima.shape
    maximum = torch.empty(rows, dtype=torch.float32, device=maxima.device)
    if rows:
        block = min(1024, triton.next_power_of_2(parts))
        launch(merge_maxima_kernel, (rows,), maxima, maximum, parts, contract=contract, BLOCK=block)
    return maximum


def segment_sums(
    logits: torch.Tensor,
    maximum: torch.Tensor,
    contract: LogsumexpContract,
    ranks: int = 1,
    *,
    term: int = 0,
    of: Contract | None = None,
) -> torch.Tensor:
    """Sum of exp(logit - maximum) over each segment of this rank's columns: float32 [tokens, segments / ranks].

    Args:
        term: what is added instead, as `sum_kernel` says.
        of: the contract that is served, where it is not the log-sum-exp's.

    Raises:
        ValueError: an empty vocabulary; segments that the ranks cannot share, or columns that they share unequally.
    """
    rows, columns = logits.shape
    segments = contract.partition.segments
    if columns == 0:
        raise ValueError("logits: the vocabulary is empty")
    if segments % ranks or (ranks > 1 and columns % (segments // ranks)):
        raise ValueError(f"logits: {ranks} ranks cannot share {segments} segments of {columns * ranks} columns equally")
    segments //= ranks
    width = triton.cdiv(columns, segments)
    sums = torch.zeros(rows, segments, dtype=torch.float32, device=logits.device)
    if rows:
        for lanes, first, count in _lane_groups(columns, width, segments, LANES[contract.order.sum]):
            arguments = (logits, maximum, sums, columns, width, first, segments)
            options = {"num_warps": max(1, lanes // 128)}
            constants = {"TERM": term, "LANES": lanes, "UNROLL": 4}
            launch(sum_kernel, (rows, count), *arguments, contract=of or contract, options=options, **constants)
    return sums


def _lane_groups(columns: int, width: int, segments: int, lanes: int) -> list[tuple[int, int, int]]:
    """(lanes, first segment, number of segments): a segment shorter than the lanes uses the power of two below it."""
    groups: list[tuple[int, int, int]] = []
    for segment in range(segments):
        length = min(width, columns - segment * width)
        if length <= 0:
            break
        own = min(lanes, 1 << (length.bit_length() - 1))
        if groups and groups[-1][0] == own:
            groups[-1] = (own, groups[-1][1], groups[-1][2] + 1)
        else:
            groups.append((own, segment, 1))
    return groups


def finish(sums: torch.Tensor, maximum: torch.Tensor, contract: LogsumexpContract) -> LogsumexpResult:
    """Tree over all segments' sums [tokens, segments], then the logarithm."""
    rows, segments = sums.shape
    value, total = torch.empty_like(maximum), torch.empty_like(maximum)
    if rows:
        block = 32
        arguments = (sums, maximum, value, total, rows)
        constants = {"SEGMENTS": segments, "BLOCK": block}
        launch(finish_kernel, (triton.cdiv(rows, block),), *arguments, contract=contract, **constants)
    return LogsumexpResult(value, maximum, total)


def require_result(lse: LogsumexpResult, rows: int) -> None:
    """Check the parts of a log-sum-exp of ``rows`` rows.

    Raises:
        TypeError, ValueError: dtype, shape, layout or device.
    """
    for name, part in lse._asdict().items():
        require_tensor(part, f"lse.{name}", f"tokens={rows}", torch.float32)


def require_contract(contract: LogsumexpContract) -> None:
    """Refuse what the kernels do not compute: UnsupportedError naming the field."""
    require_fields(
        contract,
        {
            "order.sum": tuple(LANES),
            "order.merge": "tree",
            "rounding.logits": "float32",
            "rounding.shifted": "float32",
            "rounding.output": "float32",
            "primitives.exp": "rlk",
            "primitives.log": "rlk",
        },
    )
