"""A table of RoPE that differs is told apart by how it was made; parameters are reported only where the whole table has
them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from diffcheck.live_model.rope import KEPT, identify, rope_fields, table_entry
from diffcheck.localize.rope_cause import rope_cause
from reference.checks import Float32Array
from reference.formats import FORMATS
from reference.models.config import ModelConfig
from reference.primitives.rope_scaling import RopeParameters, exact_frequencies, float32_frequencies
from reference.rounding import round_to
from tests.reference.models.tiny_model import config

MODEL = config()
DIM = MODEL.rotary_dim
OWN = float32_frequencies(DIM, MODEL.rope)
YARN = (("rope_type", "yarn"), ("factor", 4.0), ("original_max_position_embeddings", 64))


def entry(frequencies: Float32Array | None, *, shift: int = 0, factor: float = 1.0, cast: str = "") -> dict[str, Any]:
    angle = (np.array(KEPT, np.float32) + shift)[:, None] * (OWN if frequencies is None else frequencies)
    cos, sin = (np.float32(factor) * f(angle).astype(np.float32) for f in (np.cos, np.sin))
    if cast:
        cos, sin = round_to(cos, FORMATS[cast]), round_to(sin, FORMATS[cast])
    return table_entry(
        range(2),
        frequencies=frequencies,
        attention_factor=None if frequencies is None else factor,
        positions=KEPT,
        cos=cos,
        sin=sin,
        dtype=cast or "float32",
    )


def bumped(pair: int) -> Float32Array:
    out = OWN.copy()
    out[pair] = np.nextafter(out[pair], np.float32(1))
    return out


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (entry(round_to(OWN, FORMATS["bfloat16"])), "frequencies of B are those of A cast to bfloat16; B departs"),
        (entry(OWN, cast="bfloat16"), "cos/sin table of B is that of A cast to bfloat16"),
        (entry(OWN, factor=1.25), "attention factor is 1 in A, 1.25 in B; the configuration gives 1"),
        (entry(None, factor=1.25), "1.25 times that of A: an attention factor; the table of B departs"),
        (entry(None, shift=1), "Row p of B's cos/sin table is row p+1 of A's: other positions"),
        (entry(bumped(3)), "differ in 1 of 8 pairs by up to 1 ulp, first in pair 3"),
        (entry(OWN * np.float32(0.3)), "inverse frequencies of B are 0.3 times those of the configuration"),
    ],
)
def test_the_cause_is_said_in_words(table: dict[str, Any], said: str) -> None:
    assert said in rope_cause([entry(OWN)], [table], ("A", "B"), MODEL, 1)
    assert rope_cause([entry(OWN)], [entry(OWN)], ("A", "B"), MODEL, 1) == ""


@pytest.mark.parametrize("scaling", [(), YARN])
def test_parameters_are_those_of_the_whole_table(scaling: Any) -> None:
    model = config(rope_scaling=scaling)
    made = float32_frequencies(DIM, model.rope)
    assert identify(made, model) == model.rope
    assert identify(exact_frequencies(DIM, model.rope), model) == model.rope
    assert identify(made, config(rope_scaling=scaling, rope_theta=3.5e4)) == model.rope
    # An infinitely precise theta can be made up from any one entry; the whole table has none.
    assert identify(round_to(made, FORMATS["bfloat16"]), model) is None
    fields = rope_fields(model, [entry(round_to(OWN, FORMATS["bfloat16"]))])
    assert fields == {"dim": DIM, "attention_factor": 1.0}


def test_layers_with_tables_of_their_own_are_shown_by_layer() -> None:
    first, second = entry(OWN), entry(float32_frequencies(DIM, RopeParameters(5e5)))
    first["layers"], second["layers"] = [0], [1]
    assert rope_fields(MODEL, [first, second])["theta"] == "1000000.0 in layers 0; 500000.0 in layers 1"


def test_a_record_from_json_gives_the_model_back() -> None:
    model = config(rope_scaling=YARN, layer_windows=(None, 8))
    plain = {**model.__dict__, "rope_scaling": [list(p) for p in YARN], "layer_windows": [None, 8]}
    assert ModelConfig(**plain) == model
