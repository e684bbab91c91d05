"""What an unknown name may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

#: Names that are offered in place of one that is unknown.
_OFFERED = 3


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The few of ``known`` that ``name`` may have meant; the first ones where none is alike."""
    names = list(known)
    return get_close_matches(name, names, _OFFERED, 0.0) or names[:_OFFERED]


def offered(name: str, known: Iterable[str]) -> str:
    """The nearest of ``known`` in words, and how many there are."""
    names = list(known)
    if not names:
        return "there are none"
    return f"nearest: {', '.join(nearest(name, names))} (of {len(names)})"
