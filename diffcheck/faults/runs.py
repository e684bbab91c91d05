"""An injection into a real engine as data, and the few shapes that most of them have.

The healthy pair is exactly equal, so that the fault is the only difference: both engines on the strict profile, or one
native engine against itself. The right side is the faulty one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from diffcheck.faults.changes import Change
from diffcheck.faults.library import CONTROLS, FAULTS, Expected

Engine = Literal["vllm", "megatron"]
BOTH: tuple[Engine, ...] = ("vllm", "megatron")
STRICT = "strict-v1/fma32-seq"
#: (prompt, response) lengths of a few samples.
Lengths = tuple[tuple[int, int], ...]
#: One sample longer than an attention block, prompts of at least 8 tokens.
LENGTHS: Lengths = ((70, 5), (11, 6), (9, 3))


@dataclass(frozen=True)
class Setup:
    """How the two engines of a pair are started."""

    #: None runs the faulty engine against itself, natively.
    profile: str | None = STRICT
    dtype: str = "bfloat16"
    tied: bool = False
    #: Whether the healthy side is the faulty one's own engine even on the strict profile.
    alone: bool = False
    tensor_parallel: int = 1
    #: Engine options of the right side alone, and its ranks.
    right: dict[str, Any] = field(default_factory=dict)
    right_ranks: int | None = None


@dataclass(frozen=True)
class Run:
    """One injection into one engine."""

    engine: Engine
    #: As in `Fault`.
    where: str
    verdict: Expected = "diverged"
    #: Changes of the right engine, and of the healthy left one.
    changes: tuple[Change, ...] = ()
    healthy: tuple[Change, ...] = ()
    #: As on the command line; the right side's.
    overrides: tuple[str, ...] = ()
    #: Fields of both sides' plans, and of the right one's alone.
    plan: dict[str, Any] = field(default_factory=dict)
    right_plan: dict[str, Any] = field(default_factory=dict)
    setup: Setup = field(default_factory=Setup)
    lengths: Lengths = LENGTHS
    fields: tuple[str, ...] = ()
    unexplained: bool = False
    #: Positions of rows that must stay equal at ``where``, [0, N).
    spared: int = 0
    #: What vLLM's scheduler must have done on the right side, or nothing was injected: a name of `schedule.Facts`.
    happened: str = ""
    #: Whether two runs of the right side must disagree.
    unsteady: bool = False
    #: Changes of the right side that make up the second fault of a pair, and its boundary.
    then: tuple[Change, ...] = ()
    then_where: str = ""


@dataclass(frozen=True)
class RealFault:
    """A fault of the field with its injections into real engines."""

    name: str
    reports: str
    cause: str
    runs: tuple[Run, ...]


#: The pairs that most runs use.
NATIVE = Setup(profile=None, dtype="float32")
ALONE = Setup(alone=True)
TIED = Setup(tied=True)
#: Keys of old weights that a prefix cache hands to a later request.
STALE_PREFIX = Run(
    "vllm",
    "layers.0.self_attn.k_cache",
    changes=(Change("weights.cached_prefixes", {"stale": True}),),
    healthy=(Change("weights.cached_prefixes", {"stale": False}),),
    setup=ALONE,
    happened="prefix_cached_tokens",
)


def known(name: str, *runs: Run) -> RealFault:
    """A fault that the reference engine knows too."""
    known = {**FAULTS, **CONTROLS}[name]
    return RealFault(name, known.reports, known.cause, runs)


def contract_fault(name: str, operator: str, value: str, where: str, *native: Run, **more: Any) -> RealFault:
    """A contract fault in both strict engines (``value``: FIELD=VALUE); ``native`` runs are of native ones."""
    key, _, text = value.partition("=")
    change = Change("strict.contract", {"operator": operator, "fields": {key: text}})
    return known(name, *in_both(change, where, **more), *native)


def in_both(change: Change, where: str, dtype: str = "bfloat16", **more: Any) -> tuple[Run, ...]:
    """The same change of both engines' operators."""
    return tuple(Run(e, where, changes=(change,), setup=Setup(dtype=dtype), **more) for e in BOTH)


def refused(engine: Engine, where: str, *changes: Change, **more: Any) -> Run:
    return Run(engine, where, "not_comparable", changes, **more)
