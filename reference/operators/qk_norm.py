"""Normalisation of query and key heads before RoPE (Qwen3): RMSNorm over the head dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reference.checks import Float32Array
from reference.contract.base import Contract
from reference.operators._arguments import float_array, positive
from reference.operators.rms_norm import NormRounding, Order, Precision, Primitives, check_product, normalise


@dataclass(frozen=True)
class QkNormContract(Contract):
    """y[t, h] = x[t, h] * rsqrt(mean(x[t, h]^2) + epsilon) * weight"""

    operator: ClassVar[str] = "qk_norm"
    order: Order = Order()  # noqa: RUF009 - frozen
    precision: Precision = Precision()  # noqa: RUF009 - frozen
    rounding: NormRounding = NormRounding()  # noqa: RUF009 - frozen
    primitives: Primitives = Primitives()  # noqa: RUF009 - frozen

    def check(self) -> None:
        check_product(self)


def qk_norm(x: Float32Array, weight: Float32Array, epsilon: float, contract: QkNormContract) -> Float32Array:
    """Normalise every head of every token.

    Args:
        x: float32, [tokens, heads, head_dim].
        weight: float32, [head_dim], shared by the heads.
        epsilon: added to the mean square; rounded to float32.

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument; epsilon not above zero.
    """
    x = float_array(x, "x", "tokens, heads, head_dim")
    weight = float_array(weight, "weight", f"head_dim={x.shape[2]}")
    positive(epsilon, "epsilon")
    return normalise(x, weight, epsilon, contract)
