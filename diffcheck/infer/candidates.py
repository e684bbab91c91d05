"""The contracts that a site could follow, without those that cannot differ there, the likeliest first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from diffcheck.infer.arguments import Arguments
from diffcheck.infer.sites import Site
from reference.contract import CONTRACTS, Contract, Value, profile, profiles, space

#: Spaces up to this many combinations are searched whole; larger ones field by field from the known profiles.
EXHAUSTIVE = 100_000

Values = tuple[Value, ...]


@dataclass(frozen=True)
class Candidates:
    """The space of one site.

    Contracts that are the same computation for the site's shapes (a block longer than the row, a merge of one part)
    are run once and answered once.
    """

    operator: str
    #: What every candidate has in common: the dtype, given facts, hidden fields at their default.
    base: Contract
    #: Path -> the values that are searched, for fields with more than one.
    axes: Mapping[str, Values]
    arguments: Arguments
    #: dtype of the model.
    dtype: str

    @classmethod
    def of(cls, site: Site) -> Candidates:
        """The candidates of ``site``."""
        operator = site.arguments.operator
        searched = space(operator, site.model_dtype).axes
        base = CONTRACTS[operator]().with_dtype(site.model_dtype).replace(site.given)
        axes = {p: v for p, v in searched.items() if len(v) > 1 and p not in site.hidden and p not in site.given}
        return cls(operator, base, axes, site.arguments, site.model_dtype)

    @property
    def bound(self) -> int:
        """Number of combinations of the axes, impossible ones included."""
        size = 1
        for values in self.axes.values():
            size *= len(values)
        return size

    @property
    def exhaustive(self) -> bool:
        return self.bound <= EXHAUSTIVE

    def build(self, values: Values) -> Contract | None:
        """The contract with these values along the axes, or None where the combination is impossible."""
        try:
            return self.base.replace(dict(zip(self.axes, values, strict=True)))
        except ValueError:
            return None

    def values(self, contract: Contract) -> Values:
        """The contract's values along the axes."""
        return tuple(contract.get(path) for path in self.axes)

    def canonical(self, values: Values) -> Values:
        """The values that stand for all that compute the same as ``values`` at this site."""
        named = dict(zip(self.axes, values, strict=True))
        _SAME.get(self.operator, _all_differ)(named, self.arguments)
        return tuple(named.values())

    def contracts(self) -> Iterator[Contract]:
        """One contract of each different computation, those of known profiles first."""
        first = [contract for _, contract in self.known()]
        seen = {self.values(contract) for contract in first}
        yield from dict.fromkeys(first)
        for values in itertools.product(*self.axes.values()):
            if values not in seen and values == self.canonical(values):
                contract = self.build(values)
                if contract is not None:
                    yield contract

    @cached_property
    def count(self) -> int:
        """How many `contracts` yields, impossible combinations included; the bound where that is not counted."""
        if not self.exhaustive:
            return self.bound
        return sum(values == self.canonical(values) for values in itertools.product(*self.axes.values()))

    def known(self) -> list[tuple[str, Contract]]:
        """(profile, the contract that computes the same here) where the space has it."""
        found = []
        for name in profiles.names():
            theirs = profile(name).contract(self.operator, self.dtype)
            values = self.values(theirs)
            if all(v in allowed for v, allowed in zip(values, self.axes.values(), strict=True)):
                contract = self.build(self.canonical(values))
                if contract is not None:
                    found.append((name, contract))
        return found

    def neighbours(self, contract: Contract) -> list[Contract]:
        """Candidates that differ from ``contract`` in one field."""
        found = []
        for path, values in self.axes.items():
            for value in values:
                if value != contract.get(path):
                    try:
                        found.append(contract.override(path, value))
                    except ValueError:
                        continue
        return found


# Each of these moves named values to the ones that stand for them, in place.


def _all_differ(_values: dict[str, Value], _arguments: Arguments) -> None:
    return None


def _same_linear(v: dict[str, Value], a: Arguments) -> None:
    """A block as long as a segment is no block; up to two parts have one order of merging."""
    segments, ranks = int(v["partition.segments"]), int(a.facts.get("ranks", 1))
    width = a.rows["x"].shape[1] // max(ranks, segments)
    if int(v["partition.block_k"]) >= width:
        v["partition.block_k"] = 0
    if segments <= 2:
        v["order.merge"] = "tree"


def _same_logsumexp(v: dict[str, Value], _: Arguments) -> None:
    if int(v["partition.segments"]) <= 2:
        v["order.merge"] = "tree"


def _same_norm(v: dict[str, Value], _: Arguments) -> None:
    """An FMA that ends the mean leaves no mean to round."""
    if v["primitives.mean"] == "reciprocal_fma" and v["primitives.square"] == "fma" and "precision.variance" in v:
        v["precision.variance"] = "float32"


_SAME: dict[str, Callable[[dict[str, Value], Arguments], None]] = {
    "rms_norm": _same_norm,
    "qk_norm": _same_norm,
    "linear": _same_linear,
    "row_linear": _same_linear,
    "lm_head": _same_linear,
    "logsumexp": _same_logsumexp,
}
