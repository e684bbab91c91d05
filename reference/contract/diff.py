"""The difference of two contracts, one sentence per field."""

from __future__ import annotations

from dataclasses import dataclass

from reference.contract.base import Contract, Value, fields


@dataclass(frozen=True)
class Difference:
    """One field in which two contracts of an operator differ."""

    path: str
    left: Value
    right: Value
    #: Both sides in words, e.g. "vllm-0.32-cpu normalises the unrounded float32 residual sum; strict-v1 rounds ...".
    sentence: str


def diff(a: Contract, b: Contract, left: str = "left", right: str = "right") -> list[Difference]:
    """Every field in which ``a`` and ``b`` differ, in the order of declaration; empty if they are equal.

    Args:
        left, right: what the sentences call ``a`` and ``b``.

    Raises:
        ValueError: contracts of two different operators.
    """
    if a.operator != b.operator:
        raise ValueError(f"contracts of two operators have no common fields: {a.operator} and {b.operator}")
    found = []
    for path, allowed in fields(type(a)).items():
        x, y = a.get(path), b.get(path)
        if x != y:
            sentence = f"{left} {allowed.words(x)}; {right} {allowed.words(y)}."
            found.append(Difference(path, x, y, sentence))
    return found
