"""Preflight: every field of the object record is checked, and physical freedom is not mistaken for another object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from diffcheck.base.errors import ExitCode
from diffcheck.base.record import KvMapping, ObjectRecord
from diffcheck.localize import localize
from diffcheck.localize.preflight import compare_objects
from tests.diffcheck.synthetic import header, record, values, write

Change = Callable[[ObjectRecord], object]

#: One fault for every field of the record that can make two sides incomparable.
FAULTS: dict[str, Change] = {
    "model.rms_norm_eps": lambda r: r.model.update(rms_norm_eps=1e-5),
    "weights.lm_head.weight": lambda r: r.weights.update({"lm_head.weight": "cc"}),
    "weights.model.norm.weight": lambda r: r.weights.pop("model.norm.weight"),
    "weight_version": lambda r: setattr(r, "weight_version", 8),
    "token_ids[sample 1][0]": lambda r: r.token_ids[1].__setitem__(0, 4),
    "target_ids[sample 0][1]": lambda r: r.target_ids[0].__setitem__(1, 9),
    "positions[sample 0][0]": lambda r: r.positions.__setitem__(0, [p + 1 for p in r.positions[0]]),
    "active[sample 0][1]": lambda r: r.active[0].__setitem__(1, 1),
    "attention_mask": lambda r: setattr(r, "attention_mask", "full"),
    "rope.theta": lambda r: r.rope.update(theta=5e5),
    "epsilon": lambda r: r.layers["epsilon"].update({"layers.1.input_layernorm": 1e-5}),
    "kv[sample 0]": lambda r: r.kv.slots[0].__setitem__(0, r.kv.slots[0][1]),
    "real_vocab": lambda r: setattr(r, "real_vocab", 12),
    "shards.q_proj": lambda r: r.shards.update(q_proj=[[0, 4], [5, 8]]),
    "temperature": lambda r: setattr(r, "temperature", 0.7),
    "top_p": lambda r: setattr(r, "top_p", 0.9),
    "top_k": lambda r: setattr(r, "top_k", 50),
    "random_state.seed": lambda r: setattr(r, "random_state", {"seed": 2}),
}


def pair() -> tuple[ObjectRecord, ObjectRecord]:
    left, right = record(), record()
    for side in (left, right):
        side.weight_version = 7
        side.random_state = {"seed": 1}
        side.layers = {
            "epsilon": {f"layers.{n}.input_layernorm": 1e-6 for n in range(3)},
            "dtype": {"norm": "bfloat16"},
        }
    return left, right


@pytest.mark.parametrize("field", FAULTS)
def test_a_changed_field_is_named(field: str) -> None:
    left, right = pair()
    FAULTS[field](right)
    found = [m.field for m in compare_objects(left, right)]
    assert found == [field]


def test_every_field_of_the_record_has_a_fault_or_a_reason() -> None:
    """A field that nothing checks would be a hole; padded_vocab is the one that may differ, what a side cannot know is
    compared with nothing, layers has its fault by its parts, and tables differ where they are read.
    """
    names = {name.split(".")[0].split("[")[0] for name in FAULTS} - {"epsilon"}
    covered = names | {"padded_vocab", "unknown", "layers", "rope_tables"}
    assert covered == {f.name for f in fields(ObjectRecord)}


def test_physical_choices_do_not_matter() -> None:
    left, right = pair()
    right.kv = KvMapping("contiguous")
    right.padded_vocab = 128
    right.shards = {"q_proj": [[0, 4], [4, 8]]}
    right.random_state = None
    right.weight_version = None
    assert compare_objects(left, right) == []


def test_another_block_table_is_the_same_object() -> None:
    left, right = pair()
    right.kv = KvMapping("paged", 32, [[s + 1000 for s in slots] for slots in left.kv.slots])
    assert compare_objects(left, right) == []


def test_fewer_samples_is_one_mismatch() -> None:
    left, right = pair()
    right.token_ids.pop()
    assert [m.field for m in compare_objects(left, right)] == ["samples"]


def test_no_kernel_is_blamed_for_another_object(tmp_path: Path) -> None:
    """The floats differ everywhere, and still the verdict is about the object alone."""
    head = header("megatron")
    head.object.temperature = 0.7
    verdict = localize(write(tmp_path / "a", values(0)), write(tmp_path / "b", values(1), head))
    assert verdict.exit_code is ExitCode.NOT_COMPARABLE
    assert verdict.first_divergence is None and verdict.boundaries == []
    assert verdict.to_json()["not_comparable"] == [{"field": "temperature", "left": 1.0, "right": 0.7}]


def test_what_differs_in_one_layer_is_shown_by_layer() -> None:
    left, right = pair()
    right.layers["epsilon"]["layers.1.input_layernorm"] = 1e-5
    right.layers["dtype"]["norm"] = "float32"
    (found,) = compare_objects(left, right)
    assert (found.field, found.left, found.right) == ("epsilon", 1e-6, "1e-06; 1e-05 in layers.1.input_layernorm")


def test_parameters_that_a_table_does_not_confirm_are_not_compared() -> None:
    left, right = pair()
    del right.rope["theta"]
    assert compare_objects(left, right) == []
