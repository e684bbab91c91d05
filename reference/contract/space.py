"""The finite space of contracts of one operator: what contract inference searches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from reference.contract.base import CONTRACTS, Contract, Value, fields

NARROW_FORMATS = ("bfloat16", "float16")


@dataclass(frozen=True)
class Space:
    """All contracts of ``operator`` whose fields take values from ``axes``, impossible combinations left out.

    Iteration changes the last axis fastest and constructs contracts lazily: a space can be large, so narrow it with
    :meth:`restrict` before a full walk.
    """

    operator: str
    #: Path -> values it takes, in the order of the contract's declaration.
    axes: Mapping[str, tuple[Value, ...]]

    def __iter__(self) -> Iterator[Contract]:
        base = CONTRACTS[self.operator]()
        for values in itertools.product(*self.axes.values()):
            try:
                yield base.replace(dict(zip(self.axes, values, strict=True)))
            except ValueError:
                continue  # an impossible combination: Contract.check says which and why

    def __contains__(self, contract: object) -> bool:
        kind = CONTRACTS[self.operator]
        return type(contract) is kind and all(contract.get(path) in values for path, values in self.axes.items())

    @property
    def bound(self) -> int:
        """Number of combinations before the impossible ones are left out."""
        size = 1
        for values in self.axes.values():
            size *= len(values)
        return size

    def restrict(self, axes: Mapping[str, Value | tuple[Value, ...]]) -> Space:
        """The part of the space where the given fields are fixed, or take only the given values.

        Raises:
            ValueError: a field that the operator lacks, or a value that is not in the space.
        """
        narrowed: dict[str, tuple[Value, ...]] = dict(self.axes)
        for path, wanted in axes.items():
            if path not in narrowed:
                raise ValueError(f"{self.operator} has no contract field {path!r}; it has {', '.join(narrowed)}")
            values = wanted if isinstance(wanted, tuple) else (wanted,)
            for value in values:
                if value not in narrowed[path]:
                    raise ValueError(f"{self.operator}: {path} = {value!r} is not in the space {narrowed[path]}")
            narrowed[path] = values
        return Space(self.operator, narrowed)

    def neighbours(self, contract: Contract) -> Iterator[tuple[str, Contract]]:
        """Contracts of the space that differ from ``contract`` in one field, with that field's path."""
        for path, values in self.axes.items():
            for value in values:
                if value != contract.get(path):
                    try:
                        yield path, contract.override(path, value)
                    except ValueError:
                        continue


def space(operator: str, dtype: str = "bfloat16") -> Space:
    """The space of ``operator`` for a model held in ``dtype``.

    Facts of the model or the call (``Choice.given``: the mask, the output format) keep their default for ``dtype``;
    override them in a contract of the space. The other narrow format is left out: no engine rounds a bfloat16 model's
    values to float16 on the way.

    Raises:
        ValueError: unknown operator or dtype.
    """
    if operator not in CONTRACTS:
        raise ValueError(f"unknown operator {operator!r}; known: {', '.join(sorted(CONTRACTS))}")
    if dtype not in (*NARROW_FORMATS, "float32"):
        raise ValueError(f"dtype must be bfloat16, float16 or float32, got {dtype!r}")
    foreign = {name for name in NARROW_FORMATS if name != dtype}
    base = CONTRACTS[operator]().with_dtype(dtype)
    axes: dict[str, tuple[Value, ...]] = {}
    for path, allowed in fields(type(base)).items():
        searched = (base.get(path),) if allowed.given else allowed.values
        axes[path] = tuple(value for value in searched if value not in foreign)
    return Space(operator, axes)
