"""A scalar from a side's own bits: estimated in one dimension, then confirmed in all of them, or not named.

An estimate is only where to look. A value is answered when one contract of the space gives every element of the side
with it; how far the value can move until an element changes is answered with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from diffcheck.base.bits import to_float32
from diffcheck.base.progress import Progress
from diffcheck.infer.arguments import call
from diffcheck.infer.candidates import Candidates
from diffcheck.infer.scalars import Scalar, scalars_of
from diffcheck.infer.search import Clock
from diffcheck.infer.sites import Site
from diffcheck.infer.trial import Trial
from reference.contract import Contract

#: Contracts that are tried with each value, and of them those that a search of a value starts from.
_CONTRACTS = 24
_CLOSEST = 4
#: Points of the logarithmic range, best ones that are refined, and steps of that.
_GRID = 72
_REFINED = 3
_STEPS = 36
#: Elements that the configured value must miss, so that a value which catches them is no chance: each of them is a
#: bit or more that would have to come out right; a number of many digits has about 24 bits of freedom.
_EVIDENCE = {"famous": 8, "any": 40}
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class FoundScalar:
    """A value with which a contract of the space gives every bit of the side."""

    scalar: Scalar
    value: float
    #: Ends of the values that give the same bits, as far as they were looked for.
    lowest: float
    highest: float
    contract: Contract
    elements: int
    #: Elements that the same contract misses with the configured value.
    missed: int

    @property
    def sentence(self) -> str:
        """What the side does in place of what the model's configuration says, with both values and the evidence."""
        evidence = f"0 of {self.elements:,} elements differ"
        if self.scalar.name == "bias":
            return f"computes without the bias that the model has: so {evidence}, with the bias {self.missed:,} do"
        value = _number(self.value)
        if self.lowest < self.highest:
            # A value among others is not the one that the side has: it may not be printed alone.
            value += f" or another from {_number(self.lowest)} to {_number(self.highest)}, which have the same bits,"
        return (
            f"computes with {self.scalar.words} {value} where the model's configuration makes it "
            f"{_number(self.scalar.configured)}: so {evidence}, with the configured one {self.missed:,} do"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.scalar.name,
            "words": self.scalar.words,
            "value": self.value,
            "configured": self.scalar.configured,
            "lowest": self.lowest,
            "highest": self.highest,
            "contract_id": self.contract.contract_id,
            "contract": self.contract.as_dict(),
            "elements": self.elements,
            "missed_by_configured": self.missed,
        }


def find_scalar(
    question: Site,
    candidates: Candidates,
    rows: int,
    hints: Sequence[Contract],
    clock: Clock,
    progress: Progress,
) -> FoundScalar | None:
    """The first scalar that explains a side which no contract explains with the configured ones; None: none does.

    Args:
        hints: contracts to try before those of the known profiles, such as those that fit the other side.
    """
    contracts = [c for c in dict.fromkeys((*hints, *(c for _, c in candidates.known()))) if c is not None]
    for scalar in scalars_of(question):
        if clock.over:
            return None
        progress(f"{question.boundary}: another {scalar.name.replace('_', ' ')}", 0, 0)
        found = _Search(question, scalar, rows, contracts[:_CONTRACTS], clock).run()
        if found is not None:
            return found
    return None


class _Search:
    """One scalar at one site."""

    def __init__(self, question: Site, scalar: Scalar, rows: int, contracts: Sequence[Contract], clock: Clock) -> None:
        self._question, self._scalar, self._rows = question, scalar, rows
        self._contracts, self._clock = contracts, clock
        self._some = Trial(question, rows).levels[:-1][-1]

    def run(self) -> FoundScalar | None:
        scalar = self._scalar
        for value in scalar.famous:
            if value != scalar.configured and (found := self._confirmed(value, self._contracts, "famous")):
                return found
        if scalar.low == scalar.high:
            return None
        for estimate in self._estimates():
            closest = self._closest(estimate)
            for value in _simple_near(estimate):
                if found := self._confirmed(value, closest, "famous" if _digits(value) <= 3 else "any"):
                    return self._simplest(found)
        return None

    def _trial(self, value: float) -> Trial:
        arguments = self._scalar.apply(self._question.arguments, value)
        return Trial(replace(self._question, arguments=arguments), self._rows)

    def _fits(self, value: float, contract: Contract) -> bool:
        """Whether every element has the side's bits; most values are refuted by one row."""
        try:
            trial = self._trial(value)
            for level in trial.levels:
                score = trial.score(contract, level)
                if score is None or not score.fits:
                    return False
        except (ValueError, AssertionError):
            return False
        return True

    def _confirmed(self, value: float, contracts: Sequence[Contract], kind: str) -> FoundScalar | None:
        for contract in contracts:
            if self._clock.over:
                return None
            if not self._fits(value, contract):
                continue
            trial = Trial(self._question, self._rows)
            score = trial.score(contract, trial.levels[-1])
            if score is None or score.elements - score.matching < _EVIDENCE[kind]:
                continue
            # Numbers that are counted, or one of two, have no neighbours.
            fits, counted = partial(self._fits, contract=contract), self._scalar.low == self._scalar.high
            low, high = (value, value) if counted else (self._end(value, -1, fits), self._end(value, 1, fits))
            missed = score.elements - score.matching
            return FoundScalar(self._scalar, value, low, high, contract, score.elements, missed)
        return None

    def _end(self, value: float, sign: int, fits: Any) -> float:
        """The last value in one direction with the same bits: doubled steps, then halved ones."""
        good, step = value, max(abs(value), 1e-30) * 2**-24
        while not self._clock.over and step < abs(value) * 4 and good + sign * step > 0 and fits(good + sign * step):
            good, step = good + sign * step, 2 * step
        for _ in range(6):
            step /= 2
            if not self._clock.over and good + sign * step > 0 and fits(good + sign * step):
                good += sign * step
        return good

    def _simplest(self, found: FoundScalar) -> FoundScalar:
        """The shortest number among those with the same bits."""
        for digits in range(1, 9):
            value = float(f"{(found.lowest + found.highest) / 2:.{digits - 1}e}")
            if found.lowest <= value <= found.highest and self._fits(value, found.contract):
                return replace(found, value=value)
        return found

    def _error(self, value: float, contract: Contract) -> float:
        """Mean distance of the side's elements from those that the value gives."""
        rows, columns = np.sort(self._some.rows[:16]), self._some.columns
        try:
            arguments = self._scalar.apply(self._question.arguments, value).take(rows, columns)
            got = call(arguments, contract).astype(np.float64)
        except (ValueError, AssertionError):
            return math.inf
        want = self._want(rows, columns)
        with np.errstate(all="ignore"):
            gap = np.abs(got - want) / (np.abs(want) + 1e-3 * np.nanmax(np.abs(want), initial=1e-30))
        return float(np.mean(np.minimum(np.nan_to_num(gap, nan=4.0, posinf=4.0), 4.0)))

    def _want(self, rows: Any, columns: Any) -> Any:
        target = self._question.target[rows] if columns is None else self._question.target[np.ix_(rows, columns)]
        return to_float32(target, self._question.dtype).astype(np.float64)

    def _estimates(self) -> Iterator[float]:
        """Where the distance is least: of a grid in the logarithm, or of a ratio, refined by golden section."""
        scalar, contract = self._scalar, self._contracts[0]
        if scalar.proportional:
            rows, columns = np.sort(self._some.rows[:16]), self._some.columns
            with np.errstate(all="ignore"):
                base = call(self._question.arguments.take(rows, columns), contract).astype(np.float64)
                ratio = self._want(rows, columns) / base
            big = np.isfinite(ratio) & (np.abs(base) > np.median(np.abs(base)))
            value = float(np.median(ratio[big])) if big.any() else 0.0
            starts = [value**scalar.proportional] if value > 0 else []
            width = 2**-5
        else:
            points = np.geomspace(scalar.low, scalar.high, _GRID)
            errors = [math.inf if self._clock.over else self._error(v, contract) for v in points.tolist()]
            starts = [float(points[i]) for i in np.argsort(errors)[:_REFINED] if math.isfinite(errors[i])]
            width = math.log(points[1] / points[0])
        for start in starts:
            yield self._golden(math.log(start) - width, math.log(start) + width, contract)

    def _golden(self, low: float, high: float, contract: Contract) -> float:
        def error(at: float) -> float:
            return self._error(math.exp(at), contract)

        a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        at_a, at_b = error(a), error(b)
        for _ in range(_STEPS):
            if self._clock.over:
                break
            if at_a <= at_b:
                high, b, at_b = b, a, at_a
                a = high - _GOLDEN * (high - low)
                at_a = error(a)
            else:
                low, a, at_a = a, b, at_b
                b = low + _GOLDEN * (high - low)
                at_b = error(b)
        return math.exp((low + high) / 2)

    def _closest(self, value: float) -> list[Contract]:
        """Contracts by how many elements of the sampled rows they have with ``value``."""
        trial, shares = self._trial(value), []
        for i, contract in enumerate(self._contracts):
            score = None if self._clock.over else trial.score(contract, self._some)
            if score is not None:
                shares.append((-score.share, i, contract))
        return [contract for _, _, contract in sorted(shares, key=lambda s: s[:2])[:_CLOSEST]]


def _number(value: float) -> str:
    """A number as a person writes it."""
    return f"{value:.9g}"


def _digits(value: float) -> int:
    """Significant decimal digits of a number as it is written."""
    return len(f"{value:.17g}".replace(".", "").partition("e")[0].strip("0")) if value else 0


def _simple_near(value: float) -> Iterator[float]:
    """Numbers that a person may have meant by ``value``: short decimals, roots and fractions; then itself."""

    def near(x: float) -> bool:
        return abs(x / value - 1) < 2**-9

    seen = []
    for digits in range(1, 8):
        seen.append(float(f"{value:.{digits - 1}e}"))
    for n in range(2, 257):
        seen += [x for x in (1 / n, math.sqrt(n), 1 / math.sqrt(n), math.log(n) * 0.1 + 1, 1 / math.log(n)) if near(x)]
    # Decimals of a quotient: 1/0.7 was meant as 0.7.
    seen += [1 / float(f"{1 / value:.{digits - 1}e}") for digits in range(1, 6)]
    yield from dict.fromkeys(x for x in (*seen, value) if x > 0 and abs(x / value - 1) < 2**-5)
