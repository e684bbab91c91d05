"""Numbers and switches that live modules compute with, read from every layer: what `ObjectRecord.layers` holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Kind of the attention mask that every supported model has.
CAUSAL = "causal"
#: Attributes under which the norms of the engines keep their epsilon.
_EPSILON = ("variance_epsilon", "eps", "epsilon")


class Facts:
    """Collects facts by field and boundary."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}

    def add(self, field: str, boundary: str, value: Any) -> None:
        """Note a number, switch or text. Numbers keep nine digits: more than any operator here can tell apart."""
        if isinstance(value, float):
            value = float(f"{value:.9g}")
        self.found.setdefault(field, {})[boundary] = value

    def norm(self, boundary: str, module: Any) -> None:
        """Epsilon of a norm, and the dtype of its weight."""
        for name in _EPSILON:
            if isinstance(getattr(module, name, None), int | float):
                self.add("epsilon", boundary, float(getattr(module, name)))
                break
        self._dtype(boundary, module)

    def linear(self, boundary: str, module: Any) -> None:
        """Whether a projection adds a bias, and the dtype of its weight."""
        self.add("bias", boundary, getattr(module, "bias", None) is not None)
        self._dtype(boundary, module)

    def _dtype(self, boundary: str, module: Any) -> None:
        weight = getattr(module, "weight", None)
        if weight is not None:
            self.add("dtype", boundary, str(weight.dtype).removeprefix("torch."))


def mask_of(windows: Sequence[int | None], kinds: Sequence[str] = ()) -> str:
    """Kind of the attention mask in words, by layer where layers differ.

    Args:
        windows: per layer, how many newest keys a query sees; None sees all.
        kinds: per layer, what the mask is besides; default: causal everywhere.
    """
    words = []
    for n, window in enumerate(windows):
        kind = kinds[n] if kinds else CAUSAL
        words.append(kind if window is None else f"{kind}, window {window}")
    return str(fold({f"layer {n}": word for n, word in enumerate(words)}))


def window_size(window: Any) -> int | None:
    """How many newest keys a query sees, of an engine's window: a count, or a pair (earlier keys, later keys); negative
    or None is no window.
    """
    if isinstance(window, tuple | list):
        return None if window[0] is None or window[0] < 0 else int(window[0]) + 1
    return None if window is None or int(window) < 0 else int(window)


def fold(values: dict[str, Any]) -> Any:
    """One value of many that agree, else the commonest one and where others are, for a person."""
    groups: dict[str, list[str]] = {}
    kept: dict[str, Any] = {}
    for name, value in values.items():
        groups.setdefault(repr(value), []).append(name)
        kept[repr(value)] = value
    if len(groups) == 1:
        return next(iter(kept.values()))
    ordered = sorted(groups, key=lambda key: -len(groups[key]))
    parts = [f"{kept[ordered[0]]}"]
    for key in ordered[1:]:
        names = groups[key]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        parts.append(f"{kept[key]} in {', '.join(names[:4])}{more}")
    return "; ".join(parts)


def live_mask(hidden: Any, window: int | None) -> tuple[str, int | None]:
    """(kind, window) of a live mask.

    Args:
        hidden: bool [queries, keys], True where a query must not look; queries are the last of the keys' positions.
        window: what the module says it keeps to; believed where the mask is that one.
    """
    import torch

    queries, keys = hidden.shape
    at = torch.arange(keys - queries, keys, device=hidden.device)[:, None]
    key = torch.arange(keys, device=hidden.device)[None, :]
    causal = key > at

    def windowed(size: int) -> Any:
        return causal | (key <= at - size)

    if window is not None and hidden.equal(windowed(window)):
        return CAUSAL, window
    if hidden.equal(causal):
        # A window that is longer than the sequence hides nothing.
        return CAUSAL, window if window is not None and window >= keys else None
    if not hidden.any():
        return ("none", None) if queries > 1 else (CAUSAL, None)
    size = int((~hidden[-1]).sum())
    if size and hidden.equal(windowed(size)):
        return CAUSAL, size
    return "neither causal nor none", None
