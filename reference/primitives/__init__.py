"""Numerical primitives as exact sequences of IEEE operations, selectable by the name that a contract carries.

`PRIMITIVES[function][variant]`: variant `rlk` is this project's portable sequence; the others exist to describe what
engines compute: `correctly-rounded`; `uncompensated`, IEEE square root and division without a correction step; and
`sleef-u10`, what PyTorch's vectorised CPU kernels call; `fast-u20`, what vLLM's CPU attention computes.
"""

from reference.primitives.correctly_rounded import (
    exp2_correctly_rounded,
    exp_correctly_rounded,
    log_correctly_rounded,
    rsqrt_correctly_rounded,
    sigmoid_correctly_rounded,
    silu_correctly_rounded,
)
from reference.primitives.elementwise import Primitive
from reference.primitives.exp import exp
from reference.primitives.exp2 import exp2
from reference.primitives.exp2_nonpositive import exp2_nonpositive
from reference.primitives.fast_exp import fast_exp
from reference.primitives.log import log
from reference.primitives.rope_scaling import RopeParameters
from reference.primitives.rope_table import RopeTable, inverse_frequencies, rope_table, table_of_angles
from reference.primitives.rsqrt import rsqrt, rsqrt_uncompensated
from reference.primitives.sigmoid import sigmoid
from reference.primitives.silu import silu
from reference.primitives.sleef import exp_sleef, silu_sleef

#: Every variant of every elementwise primitive.
PRIMITIVES: dict[str, dict[str, Primitive]] = {
    "exp": {"rlk": exp, "correctly-rounded": exp_correctly_rounded, "sleef-u10": exp_sleef, "fast-u20": fast_exp},
    "exp2": {"rlk": exp2, "correctly-rounded": exp2_correctly_rounded},
    "exp2_nonpositive": {"rlk": exp2_nonpositive, "correctly-rounded": exp2_correctly_rounded},
    "log": {"rlk": log, "correctly-rounded": log_correctly_rounded},
    "rsqrt": {
        "rlk": rsqrt,
        "uncompensated": rsqrt_uncompensated,
        "correctly-rounded": rsqrt_correctly_rounded,
    },
    "sigmoid": {"rlk": sigmoid, "correctly-rounded": sigmoid_correctly_rounded},
    "silu": {"rlk": silu, "correctly-rounded": silu_correctly_rounded, "sleef-u10": silu_sleef},
}

__all__ = [
    "PRIMITIVES",
    "Primitive",
    "RopeParameters",
    "RopeTable",
    "exp",
    "exp2",
    "exp2_nonpositive",
    "inverse_frequencies",
    "log",
    "rope_table",
    "rsqrt",
    "rsqrt_uncompensated",
    "sigmoid",
    "silu",
    "table_of_angles",
]
