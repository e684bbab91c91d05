from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from diffcheck.base.errors import InputError
from integration.grpo.config import FREE, GrpoConfig, changed, check_continues, load_config, stored_config


def test_a_file_is_read_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "smollm2-135m"\nlr = 1\nsteps = 5\n[task_options]\nfiller = 3\n')
    config = load_config(file, {"steps": 7})
    assert (config.model, config.lr, config.steps, config.task_options) == ("smollm2-135m", 1.0, 7, {"filler": 3})
    assert type(config.lr) is float
    assert load_config(None, {}) == GrpoConfig()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"learning_rate": 1.0}, "unknown field 'learning_rate'"),
        ({"steps": "many"}, "steps = 'many' is of type str"),
        ({"steps": True}, "steps = True is of type bool"),
        ({"steps": 2.5}, "steps = 2.5 is of type float"),
        ({"ray": 1}, "ray = 1 is of type int"),
        ({"mode": "exact"}, "mode = 'exact' is unknown"),
        ({"staleness": 2}, "staleness = 2 is unknown"),
        ({"group_size": 1}, "group_size = 1 is out of range"),
        ({"temperature": 0.0}, "temperature = 0.0 is out of range"),
        ({"lr": float("nan")}, "lr = nan is out of range"),
        ({"mode": "native", "top_k": 5}, "top_k and top_p need mode strict"),
        ({"kl_coef": 0.1, "top_p": 0.9}, "kl_coef with top_k or top_p"),
        ({"mode": "native", "profile": "strict-v1/hopper-k16"}, "profile 'strict-v1/hopper-k16' needs mode strict"),
        ({"eager": True}, "eager needs engine gpu"),
        ({"gpu_memory": 0.5}, "gpu_memory needs engine gpu"),
        ({"transport": "device", "tp": 2}, "transport device with tp 2"),
        ({"transport": "device", "ray": True}, "transport device with ray"),
    ],
)
def test_bad_fields_are_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as caught:
        changed(GrpoConfig(), values, "run.toml")
    assert caught.value.cause == f"run.toml: {named}" or caught.value.cause.startswith(f"run.toml: {named}")
    assert caught.value.remedy


def test_files_that_are_no_configuration_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("steps = = 3")
    with pytest.raises(InputError, match=r"broken\.toml: not valid TOML"):
        load_config(broken, {})
    with pytest.raises(InputError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml", {})
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(InputError, match=r"config\.json"):
        stored_config(tmp_path)
    assert stored_config(tmp_path / "nowhere") is None


def test_only_fields_that_decide_no_bit_may_change_in_a_continued_run() -> None:
    check_continues(GrpoConfig(), changed(GrpoConfig(), {"steps": 9, "keep_checkpoints": 5}, ""))
    other = {"bool": True, "int": 2, "float": 0.5, "str": "jsonl", "dict": {"filler": 2}}
    special = {"mode": "native", "engine": "cpu", "dtype": "float32", "staleness": 1, "transport": "file"}
    before = GrpoConfig(kl_coef=0.0, engine="gpu")
    special |= {"scale_rewards": False, "ddof": 1, "loss_level": "sequence"}
    for field in fields(GrpoConfig):
        value = special.get(field.name, other[str(field.type).partition("[")[0]])
        value = value if value != getattr(before, field.name) else 3
        if field.name in FREE:
            continue
        with pytest.raises(InputError, match=f"has {field.name} = "):
            check_continues(before, changed(before, {field.name: value}, ""))


def test_rollout_versions() -> None:
    assert [GrpoConfig().rollout_version(step) for step in (1, 2, 3)] == [0, 1, 2]
    assert [GrpoConfig(staleness=1).rollout_version(step) for step in (1, 2, 3, 4)] == [0, 0, 1, 2]
