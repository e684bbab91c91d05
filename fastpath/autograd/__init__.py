"""The operators as `torch.library` operators, with shapes for tracing and gradients for training."""

from fastpath.autograd.products import linear, lm_head_logprob
from fastpath.autograd.rows import (
    attention,
    embedding,
    paged_attention,
    qk_norm,
    residual_add,
    rms_norm,
    rms_norm_residual,
    rope,
    swiglu,
)

__all__ = [
    "attention",
    "embedding",
    "linear",
    "lm_head_logprob",
    "paged_attention",
    "qk_norm",
    "residual_add",
    "rms_norm",
    "rms_norm_residual",
    "rope",
    "swiglu",
]
