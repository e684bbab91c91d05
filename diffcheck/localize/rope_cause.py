"""Why two rotary embeddings rotate differently: read from the tables that both sides rotated with, in words.

The parameters of a table are no longer in question here (other ones make another object); what is left is how the table
was made, and whether it is the one that the model's configuration gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diffcheck.live_model.rope import floats, gives
from reference.checks import Float32Array
from reference.formats import FORMATS
from reference.models.config import ModelConfig
from reference.primitives.rope_scaling import float32_frequencies
from reference.rounding import round_to

#: Formats that a table may have been cast to on the way.
_CASTS = ("bfloat16", "float16")

Table = Mapping[str, Any]


def rope_cause(
    left: Sequence[Table], right: Sequence[Table], names: tuple[str, str], config: ModelConfig, layer: int
) -> str:
    """One sentence on how the tables of ``layer`` differ; empty where a side has none, or they do not differ.

    Args:
        names: of the sides, for the sentence. config: of the model, which says which side departs from it.
    """
    a, b = (next((t for t in tables if layer in t["layers"]), None) for tables in (left, right))
    if a is None or b is None:
        return ""
    found = _frequencies(a, b, names, config) or _factor(a, b, names, config) or _tables(a, b, names)
    return f"{found[0].upper()}{found[1:]}" if found else ""


def _frequencies(a: Table, b: Table, names: tuple[str, str], config: ModelConfig) -> str:
    if a["frequencies"] is None or b["frequencies"] is None:
        return _only_one_known(a, b, names, config)
    x, y = floats(a["frequencies"]), floats(b["frequencies"])
    if x.shape != y.shape:
        return f"{names[0]} rotates {2 * x.size} features of a head, {names[1]} {2 * y.size}"
    if same(x, y):
        return ""
    own = [gives(config.rope, part) for part in (x, y)]
    for form in _CASTS:
        for (name, cast), (other, whole) in (((names[0], x), (names[1], y)), ((names[1], y), (names[0], x))):
            if same(cast, round_to(whole, FORMATS[form])):
                return f"the inverse frequencies of {name} are those of {other} cast to {form}{_theirs(names, own)}"
    made = float32_frequencies(2 * x.size, config.rope)
    for name, mine, fits in ((names[0], x, own[0]), (names[1], y, own[1])):
        if fits:
            continue
        for form in _CASTS:
            if same(mine, round_to(made, FORMATS[form])):
                return f"the inverse frequencies of {name} are the configuration's cast to {form}"
        ratio = mine / made
        if np.isfinite(ratio).all() and ratio.min() > 0 and ratio.max() / ratio.min() < 1 + 1e-5:
            return f"the inverse frequencies of {name} are {ratio.mean():.6g} times those of the configuration"
    pairs = np.flatnonzero(x.view(np.uint32) != y.view(np.uint32))
    first = int(pairs[0])
    ulp = int(np.abs(x.view(np.int32).astype(np.int64) - y.view(np.int32))[pairs].max())
    return (
        f"the inverse frequencies differ in {pairs.size} of {x.size} pairs by up to {ulp} ulp, first in pair {first}: "
        f"{names[0]} {x[first]:.9g}, {names[1]} {y[first]:.9g}{_theirs(names, own)}"
    )


def _only_one_known(a: Table, b: Table, names: tuple[str, str], config: ModelConfig) -> str:
    """Where one side's table is made of no frequencies that anybody could name, its rows are compared."""
    unknown = [name for name, t in zip(names, (a, b), strict=True) if t["frequencies"] is None]
    known = next((t for t in (a, b) if t["frequencies"] is not None), None)
    rest = _tables(a, b, names)
    if not rest or known is None or not gives(config.rope, floats(known["frequencies"])):
        return rest
    return f"{rest}; the table of {unknown[0]} departs from the configuration"


def _factor(a: Table, b: Table, names: tuple[str, str], config: ModelConfig) -> str:
    x, y = a["attention_factor"], b["attention_factor"]
    if x is None or y is None or np.float32(x) == np.float32(y):
        return ""
    own = config.rope.attention_factor
    return f"the attention factor is {x:.9g} in {names[0]}, {y:.9g} in {names[1]}; the configuration gives {own:.9g}"


def _tables(a: Table, b: Table, names: tuple[str, str]) -> str:
    """How cosines and sines of common positions differ."""
    common = [p for p in a["positions"] if p in b["positions"]]
    if not common:
        return ""
    x, y = (np.stack([_row(t, p) for p in common]) for t in (a, b))
    if x.shape != y.shape or same(x, y):
        return ""
    for form in _CASTS:
        for (name, cast), (other, whole) in (((names[0], x), (names[1], y)), ((names[1], y), (names[0], x))):
            if same(cast, round_to(whole, FORMATS[form])):
                return f"the cos/sin table of {name} is that of {other} cast to {form}"
    big = np.abs(x) > 0.05
    ratio = y[big].astype(np.float64) / x[big]
    factor = float(np.median(ratio)) if ratio.size else 1.0
    if abs(factor - 1) > 2**-7 and ratio.min() > 0 and ratio.max() / ratio.min() < 1 + 2**-6:
        return f"the cos/sin table of {names[1]} is {factor:.6g} times that of {names[0]}: an attention factor"
    for shift in range(-16, 17):
        if shift and _shifted(a, b, shift):
            return f"row p of {names[1]}'s cos/sin table is row p{shift:+d} of {names[0]}'s: other positions"
    differing = np.flatnonzero((x.view(np.uint32) != y.view(np.uint32)).any(axis=0))
    pairs = sorted({int(i) % (x.shape[1] // 2) for i in differing})
    which = f"pair {pairs[0]}" if len(pairs) == 1 else f"{len(pairs)} of {x.shape[1] // 2} pairs, first pair {pairs[0]}"
    return (
        f"the cos/sin tables ({a['dtype']} and {b['dtype']}) differ in {which} by up to "
        f"{np.abs(x.astype(np.float64) - y).max():.3g}"
    )


def _row(table: Table, position: int) -> Float32Array:
    at = table["positions"].index(position)
    return np.concatenate([floats(table["cos"][at]), floats(table["sin"][at])])


def _shifted(a: Table, b: Table, shift: int) -> bool:
    """Whether rows of ``b`` are ``a``'s ``shift`` positions on, up to a cast, wherever both are kept (two or more)."""
    pairs = [(p + shift, p) for p in b["positions"] if p + shift in a["positions"]]
    return len(pairs) > 1 and all((np.abs(_row(a, p) - _row(b, q)) <= 2**-7).all() for p, q in pairs)


def _theirs(names: tuple[str, str], own: Sequence[bool]) -> str:
    """Which side departs from the configuration, if one does."""
    if own[0] == own[1]:
        return ""
    return f"; {names[own[0]]} departs from the configuration, {names[own[1]]} has its frequencies"


def same(x: Float32Array, y: Float32Array) -> bool:
    """Equal in every bit."""
    return bool(np.array_equal(np.ascontiguousarray(x).view(np.uint32), np.ascontiguousarray(y).view(np.uint32)))
