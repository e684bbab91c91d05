"""Attention over a paged or packed KV cache: `reference.operators.attention` as Triton kernels.

One contract and one kernel serve decode, prefill, chunked prefill and packed training: the queries are always the last
tokens of their sequences. The contract has no split of the keys: one program walks all keys of its rows or, where that
leaves the device idle, programs share the blocks and the features of a decode step (`fastpath.attention._spread`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from fastpath._tensors import accepted, require_rows
from fastpath.attention._kernel import EXPLICIT, FLOAT32, MATRIX, attention_kernel
from fastpath.attention._spread import (
    FEATURES,
    PROBABILITY_BLOCKS,
    probabilities_kernel,
    scores_kernel,
    values_kernel,
)
from fastpath.backend import UnsupportedError, current_target, launch, require_fields, require_tensor, require_unit
from fastpath.rows.qk_norm import require_head_dim
from reference.operators._online_softmax import LOG2E
from reference.operators.attention import AttentionContract

if TYPE_CHECKING:
    from reference.gradients import AttentionBackwardContract

IMPLEMENTED = (
    ("domain.mask", ("causal", "full")),
    ("domain.block_origin", "sequence"),
    ("partition.block", 64),
    ("partition.split", "none"),
    ("order.keys", "ascending"),
    ("order.k", "ascending"),
    ("order.row_sum", "lanes-tree-256"),
    ("order.accumulate", "chain"),
    ("order.normalise", "after_values"),
    ("rounding.query", "float32"),
    ("rounding.products", "float32"),
    ("rounding.scores", "float32"),
    ("rounding.row_sum", "float32"),
    ("primitives.scale", "folded"),
    ("primitives.exp", "exp2-nonpositive"),
    ("primitives.update", "fma"),
    ("primitives.finish", "divide"),
)


@dataclass(frozen=True)
class Pages:
    """Keys and values in pages, with the table and length of every sequence."""

    #: [pages, page size, KV heads, head_dim].
    keys: torch.Tensor
    values: torch.Tensor
    #: int32, [sequences, blocks]: the page of each run of ``page size`` tokens.
    block_tables: torch.Tensor
    #: int32, [sequences]: tokens in the cache, the queries' own included.
    lengths: torch.Tensor


@dataclass(frozen=True)
class Packed:
    """Keys and values of sequences end to end."""

    #: [tokens, KV heads, head_dim].
    keys: torch.Tensor
    values: torch.Tensor
    #: int32, [sequences + 1]: first key of every sequence, and the number of keys.
    starts: torch.Tensor


class AttentionResult(NamedTuple):
    """``output``, and what the backward pass needs: maximum score (base 2) and row sum, float32, [tokens, heads]."""

    output: torch.Tensor
    maxima: torch.Tensor | None
    sums: torch.Tensor | None


def attention(
    q: torch.Tensor,
    query_starts: torch.Tensor,
    most_queries: int,
    kv: Pages | Packed,
    contract: AttentionContract,
    *,
    scale: float | None = None,
    save: bool = False,
    out: torch.Tensor | None = None,
) -> AttentionResult:
    """Attention of the last tokens of several sequences over their keys.

    Args:
        q: bfloat16 or float32 as the contract says, [tokens, heads, head_dim]; tokens may be strided.
        query_starts: int32, [sequences + 1]: first query of every sequence, and the number of queries.
        most_queries: the largest number of queries of a sequence: one for decode. Known to the host, so that nothing
            waits for the device.
        kv: keys and values; their heads divide ``heads``.
        scale: factor of the scores; None is 1/sqrt(head_dim).
        save: also return what the backward pass needs.
        out: contiguous tensor like ``q`` to write instead of a new one; rows of no sequence stay as they are.

    Returns:
        The output [tokens, heads, head_dim], contiguous, the same dtype. A sequence with queries but without keys gives
        NaN.

    Raises:
        UnsupportedError: a contract field, format, head_dim or matrix unit without kernel.
        TypeError, ValueError: dtype, shape, layout or device of an argument; scale.
    """
    dtype = accepted(contract, IMPLEMENTED)
    require_formats(contract)
    require_rows(q, "q", "tokens, heads, head_dim", dtype)
    tokens, heads, head_dim = q.shape
    require_head_dim(head_dim)
    kv_heads = require_keys(kv, head_dim, dtype)
    if heads % kv_heads:
        raise ValueError(f"q: {heads} heads are not a multiple of the {kv_heads} KV heads")
    if isinstance(kv, Pages):
        sequences, tables, extents, page = kv.lengths.shape[0], kv.block_tables, kv.lengths, int(kv.keys.shape[1])
    else:
        sequences, tables, extents, page = kv.starts.shape[0] - 1, kv.starts[:, None], kv.starts, 0
    require_tensor(query_starts, "query_starts", f"sequences+1={sequences + 1}", torch.int32)
    output = torch.empty(q.shape, dtype=dtype, device=q.device) if out is None else out
    if out is not None:
        require_tensor(out, "out", f"tokens={tokens}, heads={heads}, head_dim={head_dim}", dtype)
    statistics = [torch.empty(tokens, heads, dtype=torch.float32, device=q.device) if save else None for _ in range(2)]
    if not tokens:
        return AttentionResult(output, *statistics)
    group = heads // kv_heads
    step = matrix_step(contract)
    most_keys = int(tables.shape[1]) * page if page else int(kv.keys.shape[0])
    if most_queries == 1 and not save and spreads(step, sequences, kv_heads, group, most_keys):
        factor = folded_scale(scale, head_dim)
        _spread(q, query_starts, kv, tables, extents, output, factor, most_keys, contract, kv_heads, group, page)
        return AttentionResult(output, None, None)
    bulk = current_target().arch == "sm_90" and step == MATRIX and not page and fetches(kv.keys, kv.values)
    tile = schedule(step, most_queries * group, head_dim, bulk)
    boxes = [
        TensorDescriptor.from_tensor(part.view(-1, kv_heads * head_dim), [64, head_dim]) if bulk else part
        for part in (kv.keys, kv.values)
    ]
    launch(
        attention_kernel,
        (triton.cdiv(most_queries * group, tile.rows), kv_heads, sequences),
        *(q, kv.keys, kv.values, *boxes, tables, query_starts, extents),
        *(output, *(output if part is None else part for part in statistics)),
        *(q.stride(0), tables.stride(0), folded_scale(scale, head_dim)),
        contract=contract,
        options={"num_warps": tile.warps, "num_stages": tile.stages},
        GROUP=group,
        D=head_dim,
        KV_HEADS=kv_heads,
        PAGE=page,
        CAUSAL=contract.domain.mask == "causal",
        SAVE=save,
        STEP=step,
        ROWS=tile.rows,
        BULK=bulk,
    )
    return AttentionResult(output, *statistics)


def spreads(step: int, sequences: int, kv_heads: int, group: int, most_keys: int) -> bool:
    """Whether a decode step fills the device better with programs per block and per feature; bits are the same."""
    workspace = 6 * sequences * kv_heads * (8 if group <= 8 else 16) * most_keys
    return step == MATRIX and group <= 16 and sequences * kv_heads < 256 and most_keys > 256 and workspace < 2**30


def fetches(*operands: torch.Tensor) -> bool:
    """Whether Hopper's bulk copies can fetch them: contiguous bfloat16 at a multiple of 16 bytes, not empty."""
    return all(part.dtype == torch.bfloat16 and part.data_ptr() % 16 == 0 and part.numel() for part in operands)


def _spread(
    q: torch.Tensor,
    query_starts: torch.Tensor,
    kv: Pages | Packed,
    tables: torch.Tensor,
    extents: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    most_keys: int,
    contract: AttentionContract,
    kv_heads: int,
    group: int,
    page: int,
) -> None:
    """One token per sequence by three kernels; see `fastpath.attention._spread`."""
    head_dim, sequences = q.shape[2], query_starts.shape[0] - 1
    rows, blocks = 8 if group <= 8 else 16, triton.cdiv(most_keys, 64)
    cells = (sequences, kv_heads, blocks, rows)

    def workspace(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    scores, probabilities = workspace(*cells, 64), workspace(*cells, 64, dtype=q.dtype)
    maxima, alphas, sums = (workspace(*cells) for _ in range(3))
    stride = tables.stride(0)
    sizes = {"KV_HEADS": kv_heads, "PAGE": page, "ROWS": rows}
    launch(
        scores_kernel,
        (blocks, kv_heads, sequences),
        *(q, kv.keys, tables, query_starts, extents, scores, maxima, q.stride(0), stride, scale, blocks),
        contract=contract,
        options={"num_warps": 4, "num_stages": 2},
        GROUP=group,
        D=head_dim,
        **sizes,
    )
    launch(
        probabilities_kernel,
        (triton.cdiv(blocks, PROBABILITY_BLOCKS), kv_heads, sequences),
        *(scores, maxima, tables, extents, probabilities, alphas, sums, stride, blocks),
        contract=contract,
        options={"num_warps": 4, "num_stages": 2},
        COUNT=PROBABILITY_BLOCKS,
        SCAN=128,
        **sizes,
    )
    # asynchronous copies need many blocks in flight; without them a second block a step only costs registers
    stages, unroll = (9, 2) if current_target().runtime == "cuda" else (2, 1)
    features = min(FEATURES, head_dim)
    launch(
        values_kernel,
        (head_dim // features, kv_heads, sequences),
        *(probabilities, alphas, sums, kv.values, tables, query_starts, extents, output, stride, blocks),
        contract=contract,
        options={"num_warps": features // 16, "num_stages": stages},
        GROUP=group,
        D=head_dim,
        COLUMNS=features,
        STAGES=stages,
        UNROLL=unroll,
        **sizes,
    )


def folded_scale(scale: float | None, head_dim: int) -> float:
    """The factor of the products, log2(e) included, rounded to float32.

    Raises:
        ValueError: scale not finite and above zero.
    """
    factor = 1.0 / math.sqrt(head_dim) if scale is None else scale
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"scale: must be finite and above 0, got {scale!r}")
    return float(np.float32(factor * LOG2E))


@lru_cache(maxsize=64)
def require_formats(contract: AttentionContract) -> None:
    """Refuse formats that differ between operands, probabilities and output.

    Raises:
        UnsupportedError: naming the field.
    """
    dtype = str(contract.get("rounding.output"))
    require_fields(contract, {"domain.input": dtype, "rounding.probabilities": dtype})


def require_keys(kv: Pages | Packed, head_dim: int, dtype: torch.dtype) -> int:
    """Check keys and values; their number of heads.

    Raises:
        UnsupportedError: a page size below 16 or above 256.
        TypeError, ValueError: dtype, shape, layout or device.
    """
    if isinstance(kv, Packed):
        require_tensor(kv.keys, "kv.keys", f"tokens, KV heads, head_dim={head_dim}", dtype)
        tokens, heads = kv.keys.shape[:2]
        require_tensor(kv.values, "kv.values", f"tokens={tokens}, KV heads={heads}, head_dim={head_dim}", dtype)
        require_tensor(kv.starts, "kv.starts", "sequences+1", torch.int32)
        return int(heads)
    require_tensor(kv.keys, "kv.keys", f"pages, page size, KV heads, head_dim={head_dim}", dtype)
    pages, page, heads = kv.keys.shape[:3]
    if not 16 <= page <= 256:
        raise UnsupportedError(f"kv.keys: pages of {page} tokens have no kernel; choose 16 to 256")
    shape = f"pages={pages}, page={page}, KV heads={heads}, head_dim={head_dim}"
    require_tensor(kv.values, "kv.values", shape, dtype)
    require_tensor(kv.lengths, "kv.lengths", "sequences", torch.int32)
    require_tensor(kv.block_tables, "kv.block_tables", f"sequences={kv.lengths.shape[0]}, blocks", torch.int32)
    return int(heads)


def matrix_step(contract: AttentionContract | AttentionBackwardContract) -> int:
    """How this target makes the contract's matrix products.

    Raises:
        UnsupportedError: another vendor's matrix unit.
    """
    unit = require_unit(contract)
    if current_target().runtime == "interpreter":
        return EXPLICIT
    return FLOAT32 if unit == "fma32-seq" else MATRIX


@dataclass(frozen=True)
class Tile:
    """Query rows of a program, and how it is compiled. No field can change a bit."""

    rows: int
    warps: int
    stages: int


def schedule(step: int, rows: int, head_dim: int, bulk: bool) -> Tile:
    """The tile for a sequence with ``rows`` query rows (tokens times heads that share a KV head).

    ``bulk``: keys and values come by bulk copies, which leave registers for two programs on a multiprocessor.
    """
    if current_target().runtime == "hip":  # four waves can use the whole register file
        if step != MATRIX or rows <= 16:
            return Tile(16, 4, 1)
        if head_dim > 128:
            return Tile(32, 4, 1)
        return Tile(64, 4, 1) if rows <= 64 else Tile(128, 8, 1)
    if step != MATRIX:
        return Tile(16, 8, 1)
    if rows <= 16:
        return Tile(16, 2 if head_dim <= 128 else 8, 2)  # of 1, 2, 4 and 8 warps, 2 read a cache fastest on an H200
    if head_dim > 128:
        return Tile(32, 8, 2)
    if bulk:
        return Tile(64, 4, 3)
    return Tile(64, 4 if head_dim <= 64 else 8, 2) if rows <= 64 else Tile(128, 8, 3)
