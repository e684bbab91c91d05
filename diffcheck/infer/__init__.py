"""Contract inference: which contracts give, from a side's own inputs, the bits that the side gave."""

from diffcheck.infer.answer import Inference, differences
from diffcheck.infer.explain import explain, infer

__all__ = ["Inference", "differences", "explain", "infer"]
