"""What inference answers: the class of contracts that fit, or the nearest one, and how two sides' classes differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from diffcheck.infer.scalar_search import FoundScalar
from diffcheck.trace.roles import side_names
from reference.contract import Contract, Value, diff, fields

#: match: at least one contract gives all bits. no_match: none of the space does. inconclusive: the trace, the rows or
#: the time did not suffice to say.
Status = Literal["match", "no_match", "inconclusive"]
#: Contracts of a class that are compared with those of another, and listed in JSON by id.
_PAIRED = 2048
_LISTED = 64


@dataclass(frozen=True)
class Undecided:
    """A field for which several values give the same bits on the rows at hand."""

    path: str
    values: tuple[Value, ...]
    #: Why, or what would decide it.
    reason: str
    #: Generated input that tells two of the values apart: kind, seed, rows, differing elements. None if none was found.
    probe: Mapping[str, Any] | None = None


@dataclass
class Inference:
    """The answer for one side at one boundary."""

    boundary: str
    operator: str
    engine: str
    status: Status
    #: What keeps the answer from being whole; empty if nothing does.
    reason: str = ""
    #: Every contract that fits, the likeliest first. The first stands for the class.
    fits: list[Contract] = field(default_factory=list)
    #: Contracts that fit so far, where time ran out before they were confirmed on all rows.
    pending: list[Contract] = field(default_factory=list)
    #: Names of profiles whose contract is in the class.
    profiles: list[str] = field(default_factory=list)
    #: Where nothing fits: the contract with the most matching elements.
    nearest: Contract | None = None
    #: Its fields that were searched.
    nearest_fields: dict[str, Value] = field(default_factory=dict)
    #: Fields on which the whole class agrees.
    decided: dict[str, Value] = field(default_factory=dict)
    undecided: list[Undecided] = field(default_factory=list)
    #: Where nothing fits: another scalar than the configured one with which a contract gives every bit.
    scalar: FoundScalar | None = None
    rows: int = 0
    total_rows: int = 0
    #: Outputs looked at in each row, and outputs there are: of a large matrix product some stand for all.
    columns: int = 0
    width: int = 0
    elements: int = 0
    matching: int = 0
    max_ulp: int = 0
    rows_failing: int = 0
    #: Different computations tried, and that the space has here.
    tried: int = 0
    space: int = 0
    complete: bool = False
    seconds: float = 0.0

    @property
    def contract(self) -> Contract | None:
        """The class's first contract, else the nearest."""
        return self.fits[0] if self.fits else self.nearest

    def to_json(self) -> dict[str, Any]:
        """Plain data; of a large class only the first contracts are named."""
        stands = self.contract
        return {
            "boundary": self.boundary,
            "operator": self.operator,
            "engine": self.engine,
            "status": self.status,
            "reason": self.reason,
            "fits": len(self.fits),
            "pending": len(self.pending),
            "contract_ids": [c.contract_id for c in self.fits[:_LISTED]],
            "contract": stands.as_dict() if stands is not None else None,
            "nearest_fields": self.nearest_fields,
            "profiles": self.profiles,
            "decided": self.decided,
            "undecided": [
                {"field": u.path, "values": list(u.values), "reason": u.reason, "probe": u.probe and dict(u.probe)}
                for u in self.undecided
            ],
            "scalar": self.scalar and self.scalar.to_json(),
            "cause": self.scalar.sentence if self.scalar else "",
            "rows": self.rows,
            "total_rows": self.total_rows,
            "columns": self.columns,
            "width": self.width,
            "elements": self.elements,
            "matching": self.matching,
            "max_ulp": self.max_ulp,
            "rows_failing": self.rows_failing,
            "tried": self.tried,
            "space": self.space,
            "complete": self.complete,
            "seconds": round(self.seconds, 2),
        }


def differences(left: Inference, right: Inference) -> list[dict[str, Any]]:
    """The fields in which the two sides must differ, in words; empty unless both sides have a match.

    Of all pairs of contracts that fit, one a side, the pair that agrees in most fields is described: nothing is called
    a difference that the data leave open. No difference means that one contract fits both sides. Where a side's search
    was not complete, it is what is known so far.
    """
    if not (left.fits and right.fits) or left.operator != right.operator:
        return []
    a, b = closest([*left.fits, *left.pending][:_PAIRED], [*right.fits, *right.pending][:_PAIRED])
    names = side_names(left.engine, right.engine)
    return [
        {"boundary": left.boundary, "field": d.path, "left": d.left, "right": d.right, "sentence": d.sentence}
        for d in diff(a, b, *names)
    ]


def closest(left: Sequence[Contract], right: Sequence[Contract]) -> tuple[Contract, Contract]:
    """The pair that differs in fewest fields; of equals, the earliest."""
    paths = list(fields(type(left[0])))
    codes: dict[tuple[str, Value], int] = {}

    def coded(contracts: Sequence[Contract]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        table = [[codes.setdefault((p, c.get(p)), len(codes)) for p in paths] for c in contracts]
        return np.array(table, np.int32)

    x, y = coded(left), coded(right)
    best, pair = len(paths) + 1, (0, 0)
    for i, row in enumerate(x):
        distance = (y != row).sum(axis=1)
        j = int(distance.argmin())
        if distance[j] < best:
            best, pair = int(distance[j]), (i, j)
    return left[pair[0]], right[pair[1]]
