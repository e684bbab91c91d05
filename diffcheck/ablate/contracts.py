"""Which contract stands for a side's operator: one that gives all its traced bits, at every boundary of a unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffcheck.ablate.recompute import Operator
from diffcheck.ablate.sides import Side
from diffcheck.base.errors import InputError
from diffcheck.base.progress import Progress
from diffcheck.infer import Inference, differences, infer
from diffcheck.infer.sites import Site, UnknowableError, operator_inputs, site
from diffcheck.infer.trial import Trial
from diffcheck.infer.weights import TracedWeights
from diffcheck.trace.roles import side_names
from reference.contract import Contract, diff, fields, profile, profiles

#: Rows looked at first: nearly every wrong contract fails on them.
_ROWS = 64
#: Inferred contracts of one boundary that are tried on a unit's others.
_TRIED = 16


@dataclass(frozen=True)
class Known:
    """One side's operator over a unit's boundaries, and what gives all its bits there, if that was found."""

    engine: str
    #: The side's calls; empty where the trace does not hold them.
    sites: Sequence[Site] = ()
    operator: Operator | None = None
    #: The profile that it is from, or "inferred"; empty where there is none.
    source: str = ""

    def gives(self, operator: Operator) -> bool:
        """Whether ``operator`` gives every bit of every call."""
        # The last layers first: a first norm has no residual to add, so it refutes less.
        return all(_gives(operator, question) for question in reversed(self.sites))


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
    try:
        weights = TracedWeights(model, side.trace.header.object.weights, side.trace.header.dtype)
        calls = Known(side.name, [site(side.trace, name, weights) for name in boundaries])
    except (UnknowableError, InputError):
        return nothing
    if any(not set(operator_inputs(side.trace, name).values()) <= {*shared} for name in boundaries):
        return nothing
    for source, operator in _candidates(side, calls.sites[-1], answer):
        if calls.gives(operator):
            return Known(side.name, calls.sites, operator, source)
    return nothing


def _candidates(side: Side, question: Site, answer: Inference | None) -> Iterator[tuple[str, Operator]]:
    """The engine's own profile first, then the others, then what was inferred."""
    arguments, dtype = question.arguments, question.model_dtype
    fused = arguments.operator == "logprob" and "lse" not in arguments.rows
    seen = set()
    for name in sorted(profiles.names(), key=lambda name: not name.startswith(side.trace.header.engine)):
        contract = profile(name).contract(arguments.operator, dtype).replace(question.given)
        operator = Operator(contract, profile(name).contract("logsumexp", dtype) if fused else None)
        if operator not in seen:
            seen.add(operator)
            yield name, operator
    if not fused:
        # Which log-sum-exp an inferred log-probability had inside is not part of the answer.
        for contract in (answer.fits if answer else [])[:_TRIED]:
            yield "inferred", Operator(contract)


def _gives(operator: Operator, question: Site) -> bool:
    facts = {**question.arguments.facts, "logsumexp": operator.logsumexp}
    trial = Trial(replace(question, arguments=replace(question.arguments, facts=facts)), _ROWS)
    for level in trial.levels:
        score = trial.score(operator.contract, level)
        if score is None or not score.fits:
            return False
    return True


def parted(left: Known, right: Known, boundary: str) -> list[dict[str, Any]]:
    """In what two known operators differ: no field that could have one value on both sides.

    A field in which the two contracts differ is given the other side's value wherever a side's bits allow that; what
    is left must differ, given the rest.
    """
    if left.operator is None or right.operator is None or left.operator.logsumexp != right.operator.logsumexp:
        # Where a log-sum-exp is formed inside, its fields would be mixed up with the log-probability's.
        return []
    a, b = left.operator.contract, right.operator.contract
    for path in fields(type(a)):
        if a.get(path) == b.get(path):
            continue
        if (moved := _with(a, path, b)) is not None and left.gives(replace(left.operator, contract=moved)):
            a = moved
        elif (moved := _with(b, path, a)) is not None and right.gives(replace(right.operator, contract=moved)):
            b = moved
    names = side_names(left.engine, right.engine)
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
    for answer, side in zip(answers, (left, right), strict=True):
        answer.engine = side.name
    found = differences(*answers)
    if found:
        searched = all(a.complete for a in answers)
        return found, "" if searched else "not every contract was tried: the smallest difference found", answers
    missing = [f"{a.engine}: {a.reason}" for a in answers if not a.fits]
    return [], "; ".join(missing) or "one contract fits both sides on these inputs", answers
