"""The operators: one file each, with the contract that drives it.

The function and the file have the operator's name; the contract class is that name in capitals plus ``Contract``.
"""

from reference.operators.all_gather import AllGatherContract, all_gather
from reference.operators.all_reduce import AllReduceContract, all_reduce
from reference.operators.attention import AttentionContract, attention
from reference.operators.embedding import EmbeddingContract, embedding
from reference.operators.entropy import EntropyContract, entropy
from reference.operators.kv_cache import (
    DenseKeyValues,
    KeyValues,
    KvCacheContract,
    PagedCache,
    PagedKeyValues,
    empty_cache,
    from_cache,
    to_cache,
    write_cache,
)
from reference.operators.linear import LinearContract, linear
from reference.operators.lm_head import LmHeadContract, lm_head
from reference.operators.logprob import LogprobContract, logprob
from reference.operators.logsumexp import LogsumexpContract, LogsumexpResult, logsumexp
from reference.operators.moe_combine import MoeCombineContract, moe_combine
from reference.operators.moe_router import (
    MoeRouterContract,
    MoeRouterResult,
    MoeScores,
    moe_choice,
    moe_router,
    moe_scores,
    moe_weights,
)
from reference.operators.processed_logits import ProcessedLogitsContract, processed_logits
from reference.operators.qk_norm import QkNormContract, qk_norm
from reference.operators.reduce_scatter import ReduceScatterContract, reduce_scatter
from reference.operators.residual_add import ResidualAddContract, residual_add
from reference.operators.rms_norm import RmsNormContract, RmsNormResult, rms_norm
from reference.operators.rope import RopeContract, RopeTable, rope, rope_table
from reference.operators.row_linear import RowLinearContract, row_linear, row_linear_merge, row_linear_partial
from reference.operators.swiglu import SwigluContract, swiglu

__all__ = [
    "AllGatherContract",
    "AllReduceContract",
    "AttentionContract",
    "DenseKeyValues",
    "EmbeddingContract",
    "EntropyContract",
    "KeyValues",
    "KvCacheContract",
    "LinearContract",
    "LmHeadContract",
    "LogprobContract",
    "LogsumexpContract",
    "LogsumexpResult",
    "MoeCombineContract",
    "MoeRouterContract",
    "MoeRouterResult",
    "MoeScores",
    "PagedCache",
    "PagedKeyValues",
    "ProcessedLogitsContract",
    "QkNormContract",
    "ReduceScatterContract",
    "ResidualAddContract",
    "RmsNormContract",
    "RmsNormResult",
    "RopeContract",
    "RopeTable",
    "RowLinearContract",
    "SwigluContract",
    "all_gather",
    "all_reduce",
    "attention",
    "embedding",
    "empty_cache",
    "entropy",
    "from_cache",
    "linear",
    "lm_head",
    "logprob",
    "logsumexp",
    "moe_choice",
    "moe_combine",
    "moe_router",
    "moe_scores",
    "moe_weights",
    "processed_logits",
    "qk_norm",
    "reduce_scatter",
    "residual_add",
    "rms_norm",
    "rope",
    "rope_table",
    "row_linear",
    "row_linear_merge",
    "row_linear_partial",
    "swiglu",
    "to_cache",
    "write_cache",
]
