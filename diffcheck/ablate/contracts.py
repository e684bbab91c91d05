"""Which contract stands for a side's operator: one that gives all its traced bits, at every boundary of a unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffcheck.ablate.sides import Side
from diffcheck.errors import InputError
from diffcheck.infer import Inference, differences, infer
from diffcheck.infer.sites import Site, UnknowableError, operator_inputs, site
from diffcheck.infer.trial import Trial
from diffcheck.infer.weights import TracedWeights
from diffcheck.localize import Progress
from reference.contract import Contract, diff, fields, profile, profiles

#: Rows looked at first: nearly every wrong contract fails on them.
_ROWS = 64
#: Inferred contracts of one boundary that are tried on a unit's others.
_TRIED = 16


@dataclass(frozen=True)
class Known:
    """One side's operator over a unit's boundaries, and a contract that gives all its bits there, if one was found."""

    engine: str
    #: The side's calls; empty where the trace does not hold them.
    sites: Sequence[Site] = ()
    contract: Contract | None = None
    #: The profile that it is from, or "inferred"; empty where there is none.
    source: str = ""

    def gives(self, contract: Contract) -> bool:
        """Whether ``contract`` gives every bit of every call."""
        # The last layers first: a first norm has no residual to add, so it refutes less.
        return all(_gives(contract, question) for question in reversed(self.sites))


def known(
    side: Side, boundaries: Sequence[str], shared: Sequence[str], model: Path, answer: Inference | None = None
) -> Known:
    """Look for a contract of ``side``'s operator at all ``boundaries``: the profiles' first, then the inferred ones.

    Args:
        shared: boundaries that the other side has too. An operator that reads others, such as one rank's partial sums,
            cannot be recomputed in it.
        model: folder of the model's weights.
        answer: what inference found at one of the boundaries, if it ran.
    """
    nothing = Known(side.name)
    if any(not set(operator_inputs(side.trace, name).values()) <= {*shared} for name in boundaries):
        return nothing
    try:
        weights = TracedWeights(model, side.trace.header.object.weights, side.trace.header.dtype)
        calls = Known(side.name, [site(side.trace, name, weights) for name in boundaries])
    except (UnknowableError, InputError):
        return nothing
    if calls.sites[0].arguments.operator == "logprob":
        # Its log-sum-exp is another contract's: the engine itself must answer.
        return nothing
    for source, contract in _candidates(side, calls.sites[-1], answer):
        if calls.gives(contract):
            return Known(side.name, calls.sites, contract, source)
    return nothing


def _candidates(side: Side, question: Site, answer: Inference | None) -> Iterator[tuple[str, Contract]]:
    """The engine's own profile first, then the others, then what was inferred."""
    seen = set()
    for name in sorted(profiles.names(), key=lambda name: not name.startswith(side.name)):
        contract = profile(name).contract(question.arguments.operator, question.model_dtype).replace(question.given)
        if contract not in seen:
            seen.add(contract)
            yield name, contract
    for contract in (answer.fits if answer else [])[:_TRIED]:
        yield "inferred", contract


def _gives(contract: Contract, question: Site) -> bool:
    trial = Trial(question, _ROWS)
    for level in trial.levels:
        score = trial.score(contract, level)
        if score is None or not score.fits:
            return False
    return True


def parted(left: Known, right: Known, boundary: str) -> list[dict[str, Any]]:
    """In what two known operators differ: no field that could have one value on both sides.

    A field in which the two contracts differ is given the other side's value wherever a side's bits allow that; what
    is left must differ, given the rest.
    """
    a, b = left.contract, right.contract
    if a is None or b is None:
        return []
    for path in fields(type(a)):
        if a.get(path) == b.get(path):
            continue
        if (moved := _with(a, path, b)) is not None and left.gives(moved):
            a = moved
        elif (moved := _with(b, path, a)) is not None and right.gives(moved):
            b = moved
    names = (left.engine, right.engine) if left.engine != right.engine else ("the left side", "the right side")
    return [
        {"boundary": boundary, "field": d.path, "left": d.left, "right": d.right, "sentence": d.sentence}
        for d in diff(a, b, *names)
    ]


def _with(contract: Contract, path: str, other: Contract) -> Contract | None:
    """``contract`` with ``other``'s value of a field; None where that is impossible."""
    try:
        return contract.replace({path: other.get(path)})
    except ValueError:
        return None


def explained(
    left: Side, right: Side, boundary: str, model: Path, budget: float, progress: Progress
) -> tuple[list[dict[str, Any]], str, list[Inference]]:
    """Search both sides' contracts at ``boundary``: in what they differ; what keeps that from being sure; both answers.

    Args:
        budget: seconds a side.

    Raises:
        InputError, TraceError: see `diffcheck.infer.infer`.
    """
    answers = [
        infer(side.trace, boundary, model, budget=budget, probe=False, progress=progress) for side in (left, right)
    ]
    found = differences(*answers)
    if found:
        searched = all(a.complete for a in answers)
        return found, "" if searched else "not every contract was tried: the smallest difference found", answers
    missing = [f"{a.engine}: {a.reason}" for a in answers if not a.fits]
    return [], "; ".join(missing) or "one contract fits both sides on these inputs", answers
