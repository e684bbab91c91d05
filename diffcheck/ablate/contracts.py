"""Which contract stands for a side's operator: one that gives all its traced bits, at every boundary of a unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diffcheck.ablate.sides import Side
from diffcheck.errors import InputError
from diffcheck.infer import Inference, differences, infer
from diffcheck.infer.sites import Site, UnknowableError, site
from diffcheck.infer.trial import Trial
from diffcheck.infer.weights import TracedWeights
from diffcheck.localize import Progress
from reference.contract import Contract, profile, profiles

#: Rows looked at first: nearly every wrong contract fails on them.
_ROWS = 64
#: Inferred contracts of one boundary that are tried on a unit's others.
_TRIED = 16


def standing_for(
    side: Side, boundaries: Sequence[str], model: Path, answer: Inference | None = None
) -> tuple[str, Contract | None]:
    """A contract that gives every traced bit of ``side`` at all ``boundaries`` of one operator, and where it is from:
    the profile's name, or "inferred". ("", None) where none is known.

    Args:
        model: folder of the model's weights.
        answer: what inference found at one of the boundaries, if it ran.
    """
    try:
        weights = TracedWeights(model, side.trace.header.object.weights, side.trace.header.dtype)
        sites = [site(side.trace, name, weights) for name in boundaries]
    except (UnknowableError, InputError):
        return "", None
    if sites[0].arguments.operator == "logprob":
        # Its log-sum-exp is another contract's: the engine itself must answer.
        return "", None
    for name, contract in _candidates(side, sites[0], answer):
        if all(_gives(contract, s) for s in reversed(sites)):
            return name, contract
    return "", None


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


def explained(
    left: Side, right: Side, boundary: str, model: Path, budget: float, progress: Progress
) -> tuple[list[dict[str, Any]], str, list[Inference]]:
    """In what the two sides' contracts differ at ``boundary``; what keeps that from being sure; both answers.

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
