"""What the live modules of two sides say about their first divergence: a table, a scale that each of them read."""

from __future__ import annotations

from typing import Any

from diffcheck.live_model.facts import fold
from diffcheck.live_model.rope import floats, gives
from diffcheck.localize.rope_cause import rope_cause
from diffcheck.localize.verdict import FirstDivergence
from diffcheck.trace.schema import Header
from reference.models.config import ModelConfig

#: Operator -> fact that its live module reads and that is no part of the object.
_SCALED = {"attention": "scale", "logits": "scale"}


def live_causes(first: FirstDivergence | None, left: Header, right: Header) -> list[str]:
    """Sentences for the head of a verdict: the cause at the first divergence, where live modules show it, and a table
    of RoPE that departs from the configuration wherever the sides part.
    """
    if first is None:
        return []
    a, b = left.object, right.object
    # A record of another system knows no model.
    if not (known := a.model or b.model):
        return []
    config = ModelConfig(**known)
    names = side_names(left, right)
    causes = []
    layer = int(first.boundary.split(".")[1]) if first.boundary.startswith("layers.") else 0
    here = first.boundary.endswith("_rope")
    if here or any(_departs(table, config) for table in (*a.rope_tables, *b.rope_tables)):
        for n in [layer] if here else range(config.num_hidden_layers):
            if cause := rope_cause(a.rope_tables, b.rope_tables, names, config, n):
                causes.append(f"{cause}." if here else f"RoPE of layer {n}: {cause[0].lower()}{cause[1:]}.")
                break
    part = first.boundary.rpartition(".")[2]
    if fact := _SCALED.get(part):
        x, y = (side.layers.get(fact, {}).get(first.boundary) for side in (a, b))
        if x is not None and y is not None and x != y:
            causes.append(_scale(first.boundary, x, y, names, config))
    return causes


def side_names(left: Header, right: Header) -> tuple[str, str]:
    """Names of the sides for sentences: engines, or positions where both are of one engine."""
    if left.engine != right.engine:
        return left.engine, right.engine
    return f"the left {left.engine}", f"the right {right.engine}"


def _departs(table: dict[str, Any], config: ModelConfig) -> bool:
    return table["frequencies"] is None or not gives(config.rope, floats(table["frequencies"]))


def _scale(boundary: str, x: float, y: float, names: tuple[str, str], config: ModelConfig) -> str:
    own = float(f"{1 / config.head_dim**0.5:.9g}") if boundary.endswith("attention") else 1.0
    departs = [name for name, value in zip(names, (x, y), strict=True) if value != own]
    told = f"; {' and '.join(departs)} departs from the model's {own:.9g}" if len(departs) == 1 else ""
    return f"The live scale is {fold({'': x})} in {names[0]} and {fold({'': y})} in {names[1]}{told}."
