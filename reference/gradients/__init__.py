"""The gradients of the operators: one file each, with the contract that drives it, named as what is differentiated.

The derivative is that of the mathematical operator: roundings pass gradients on unchanged, so residual_add hands its
gradient on as it is. A gradient of activations is rounded once. One of a parameter is a float32 sum over tokens that
goes on from sequence to sequence and from micro-batch to micro-batch, so its bits do not depend on how sequences are
batched; it is not rounded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from reference.contract.base import BACKWARD, GRADIENTS, Contract, Value, fields
from reference.contract.profiles import Profile
from reference.gradients._sums import bias_gradient
from reference.gradients.attention import AttentionBackwardContract, AttentionGradients, attention_backward
from reference.gradients.embedding import EmbeddingBackwardContract, embedding_backward
from reference.gradients.entropy import EntropyBackwardContract, entropy_backward
from reference.gradients.linear import (
    LinearBackwardContract,
    linear_input_gradient,
    linear_input_merge,
    linear_input_partial,
    linear_weight_gradient,
    rank_segments,
)
from reference.gradients.lm_head import LmHeadBackwardContract
from reference.gradients.logprob import LogprobBackwardContract, logprob_backward
from reference.gradients.processed_logits import ProcessedLogitsBackwardContract, processed_logits_backward
from reference.gradients.qk_norm import QkNormBackwardContract, merge_heads, qk_norm_backward
from reference.gradients.rms_norm import RmsNormBackwardContract, RmsNormGradients, rms_norm_backward
from reference.gradients.rope import RopeBackwardContract, rope_backward
from reference.gradients.row_linear import RowLinearBackwardContract
from reference.gradients.swiglu import SwigluBackwardContract, swiglu_backward

#: What a gradient takes from its operator's contract: field here -> field there.
_TAKEN: Mapping[str, str] = {
    "domain.input": "domain.input",
    "domain.mask": "domain.mask",
    "domain.pairing": "domain.pairing",
    "primitives.unit": "primitives.unit",
    "primitives.rotate": "primitives.rotate",
    "primitives.temperature": "primitives.temperature",
    "rounding.input": "rounding.output",
}


@lru_cache(maxsize=256)
def gradient_contract(contract: Contract) -> Contract:
    """The gradient's contract that goes with an operator's strict contract: its formats, mask and matrix unit.

    Raises:
        ValueError: an operator without a gradient.
    """
    kind = GRADIENTS.get(contract.operator + BACKWARD)
    if kind is None:
        raise ValueError(f"{contract.operator} has no gradient contract; known: {', '.join(sorted(GRADIENTS))}")
    own, theirs = fields(kind), fields(type(contract))
    taken: dict[str, Value] = {
        here: contract.get(there) for here, there in _TAKEN.items() if here in own and there in theirs
    }
    if "domain.input" in own:
        dtype = str(contract.get("domain.input"))
        taken["rounding.input"] = dtype  # the head's output is wider than what its gradient is rounded to
    for path in ("rounding.probabilities", "rounding.scores"):
        if path in own:
            taken[path] = dtype
    return kind().replace(taken)


__all__ = [
    "AttentionBackwardContract",
    "AttentionGradients",
    "EmbeddingBackwardContract",
    "EntropyBackwardContract",
    "LinearBackwardContract",
    "LmHeadBackwardContract",
    "LogprobBackwardContract",
    "ProcessedLogitsBackwardContract",
    "QkNormBackwardContract",
    "RmsNormBackwardContract",
    "RmsNormGradients",
    "RopeBackwardContract",
    "RowLinearBackwardContract",
    "SwigluBackwardContract",
    "attention_backward",
    "bias_gradient",
    "embedding_backward",
    "entropy_backward",
    "gradient_contract",
    "gradient_contracts",
    "linear_input_gradient",
    "linear_input_merge",
    "linear_input_partial",
    "linear_weight_gradient",
    "logprob_backward",
    "merge_heads",
    "processed_logits_backward",
    "qk_norm_backward",
    "rank_segments",
    "rms_norm_backward",
    "rope_backward",
    "swiglu_backward",
]


def gradient_contracts(profile: Profile, dtype: str = "bfloat16") -> dict[str, Contract]:
    """Every gradient's contract of ``profile``, under the operator's name and ``_backward``.

    Raises:
        ValueError: a profile that describes an engine: how it computes gradients is not modelled.
    """
    if not profile.is_strict:
        raise ValueError(f"profile {profile.name!r} describes an engine; only strict profiles specify gradients")
    operators = (name.removesuffix(BACKWARD) for name in sorted(GRADIENTS))
    return {name + BACKWARD: gradient_contract(profile.contract(name, dtype)) for name in operators}
