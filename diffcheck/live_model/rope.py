"""What a live rotary embedding computes with: its frequencies, its table, and the parameters that really give them.

A theta is never inferred from a single entry: parameters are reported where the whole table is the one that they give,
and a table that no parameters give is reported as what it is, its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from reference.checks import Float32Array
from reference.models.config import ModelConfig
from reference.primitives.rope_scaling import RopeParameters, float32_frequencies

#: Positions whose table rows are kept: enough to tell a cast, a factor and a shift.
KEPT = (1, 2, 3, 5, 8, 13)
#: Units in the last place that two makers of one float32 frequency may be apart: each has its own power function.
_ULP = 4


def table_entry(
    layers: Sequence[int],
    *,
    frequencies: Any | None,
    attention_factor: float | None,
    positions: Sequence[int],
    cos: Any,
    sin: Any,
    dtype: str,
) -> dict[str, Any]:
    """One distinct table as plain data, values as float32 patterns.

    Args:
        layers: that rotate with it.
        frequencies: effective inverse frequencies [dim / 2], radians a position, or None where the engine keeps none.
        positions: whose rows are given.
        cos, sin: [positions, dim / 2], as the rotation reads them, widened to float32.
        dtype: format that the rotation reads them in.
    """
    return {
        "layers": list(layers),
        "frequencies": None if frequencies is None else patterns(frequencies),
        "attention_factor": attention_factor,
        "positions": [int(p) for p in positions],
        "cos": [patterns(row) for row in cos],
        "sin": [patterns(row) for row in sin],
        "dtype": dtype,
    }


def live_entry(layers: Sequence[int], live: dict[str, Any]) -> dict[str, Any]:
    """`table_entry` of what a strict path says it rotated with (``live_rope``)."""
    where = [int(p) for p in live["positions"]]
    kept = [row for row, p in enumerate(where) if p in KEPT or p == max(where)] or [0]
    cos, sin = live["cos"][kept], live["sin"][kept]
    return table_entry(
        layers,
        frequencies=live["frequencies"],
        attention_factor=live["attention_factor"],
        positions=[where[row] for row in kept],
        cos=cos,
        sin=sin,
        dtype="float32",
    )


def patterns(values: Any) -> list[int]:
    """Float32 values as the integers of their bits."""
    return [int(x) for x in np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)]


def floats(bits: Sequence[int]) -> Float32Array:
    """Inverse of `patterns`."""
    return np.array(bits, np.uint32).view(np.float32)


def kept_positions(length: int) -> list[int]:
    """Which of ``length`` positions' table rows are kept: some first ones and the last."""
    return sorted({p for p in (*KEPT, length - 1) if 0 <= p < length}) or [0]


def rope_fields(config: ModelConfig, tables: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`ObjectRecord.rope` of live tables: what all layers have in common, or by layer."""
    found = [_fields(config, table) for table in tables]
    out: dict[str, Any] = {}
    for name in dict.fromkeys(key for fields in found for key in fields):
        values = [(fields.get(name, "(not confirmed)"), t["layers"]) for fields, t in zip(found, tables, strict=True)]
        if len({repr(v) for v, _ in values}) == 1:
            out[name] = values[0][0]
        else:
            out[name] = "; ".join(f"{v} in layers {', '.join(map(str, layers))}" for v, layers in values)
    return out


def _fields(config: ModelConfig, table: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"dim": 2 * len(table["cos"][0])}
    if table["attention_factor"] is not None:
        fields["attention_factor"] = float(np.float32(table["attention_factor"]))
    if table["frequencies"] is not None:
        found = identify(floats(table["frequencies"]), config)
        if found is not None:
            fields |= {"theta": found.theta, "scaling": found.describe()}
    return fields


def identify(frequencies: Float32Array, config: ModelConfig) -> RopeParameters | None:
    """The parameters that give ``frequencies``, every one of them up to a few units in the last place; the model's own
    if those do, else plain or linearly scaled RoPE of another theta; None where nothing does.
    """
    dim = 2 * frequencies.size
    own = config.rope
    candidates = [own, RopeParameters(own.theta)]
    if dim > 2 and np.isfinite(frequencies).all() and (frequencies > 0).all():
        first, last = float(frequencies[0]), float(frequencies[-1])
        theta = (last / first) ** (-dim / (dim - 2))
        factor = 1 / first
        for digits in (3, 6, 9):
            rounded = float(f"{theta:.{digits}g}")
            if rounded > 1:
                candidates.append(RopeParameters(rounded))
                if factor > 1.0001:
                    candidates.append(RopeParameters(rounded, "linear", float(f"{factor:.6g}")))
            if own.kind in ("llama3", "yarn"):
                # Of the longest waves these kinds divide the frequency by the factor.
                scaled = (last * own.factor / first) ** (-dim / (dim - 2))
                if (rounded := float(f"{scaled:.{digits}g}")) > 1:
                    candidates.append(replace(own, theta=rounded))
    return next((rope for rope in candidates if gives(rope, frequencies)), None)


def gives(rope: RopeParameters, frequencies: Float32Array) -> bool:
    """Whether ``rope`` gives every one of ``frequencies`` up to a few units in the last place."""
    made = float32_frequencies(2 * frequencies.size, rope)
    return bool(
        np.isfinite(frequencies).all()
        and (np.abs(made.view(np.int32).astype(np.int64) - frequencies.view(np.int32)) <= _ULP).all()
    )
