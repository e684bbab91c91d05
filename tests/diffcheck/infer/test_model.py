"""The model of a trace is found by its weights, or the error says what to give."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from diffcheck.base.errors import ExitCode, InputError
from diffcheck.base.models import resolve_model
from diffcheck.base.samples import Sample
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.reference import Adapter
from diffcheck.faults.laboratory import Laboratory
from diffcheck.infer.model import find_model
from diffcheck.trace.reader import Trace


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def trace(lab: Laboratory) -> Trace:
    return lab.run(())


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path / "hub"


def test_a_built_in_model_is_found_by_its_weights(tmp_path: Path) -> None:
    for name in ("tiny-qwen3", "tiny-qwen3-tied"):
        folder, _ = resolve_model(name)
        plan = CapturePlan((Sample((5, 6), (7,)),), tmp_path / name, "prefill")
        traced = Trace(
            Adapter(EngineOptions("reference", folder), lambda *_: None).capture(plan, lambda *_: None).trace
        )
        assert find_model(traced.header, None) == folder
        assert find_model(traced.header, None, hint="tiny-qwen3") == folder, "a default that is not it is passed over"


def test_a_named_folder_and_the_cache_of_the_hub_are_looked_at(lab: Laboratory, trace: Trace, no_hub: Path) -> None:
    assert find_model(trace.header, str(lab.model)) == lab.model.resolve()
    folder = no_hub / "models--some--one" / "snapshots" / "abc"
    shutil.copytree(lab.model, folder)
    (no_hub / "models--foreign" / "snapshots" / "x").mkdir(parents=True)
    (no_hub / "models--foreign" / "snapshots" / "x" / "config.json").write_text("{}")
    assert find_model(trace.header, None) == folder.resolve()


def test_weights_changed_on_purpose_do_not_hide_the_model(lab: Laboratory) -> None:
    changed = lab.run((), weight_flips=(("model.norm.weight", 0, 3),))
    assert find_model(changed.header, str(lab.model)) == lab.model.resolve()


def test_what_to_give_is_said(lab: Laboratory, trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"no model at hand is the traced one: Qwen3.*2 layers of hidden size 64"
    ) as no:
        find_model(trace.header, None)
    assert "--model" in no.value.remedy and no.value.exit_code == ExitCode.NOT_COMPARABLE
    other = Laboratory(tmp_path / "other", tensor_parallel=1)
    (other.model / "model.safetensors").write_bytes(_with_other_norms(other.model / "model.safetensors"))
    with pytest.raises(InputError, match="does not hold the weights that were traced"):
        find_model(trace.header, str(other.model))


def _with_other_norms(path: Path) -> bytes:
    from safetensors.torch import load_file, save

    return save({name: w + 1 if name.endswith("norm.weight") else w for name, w in load_file(path).items()})
