"""Switches of the engines: what is asked for reaches the live engine, and what cannot is refused before it starts."""

from __future__ import annotations

import pytest

from diffcheck.base.errors import ExitCode, InputError
from diffcheck.base.samples import UNSUPPORTED_SAMPLING
from diffcheck.capture.adapter import ENGINES
from diffcheck.capture.overrides import apply_overrides, parse_override
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.switches import Switch, defaults, parse_switches, table_of
from diffcheck.runs import RunSettings, run_localize
from tests.diffcheck.cli.test_cli import refused, rlk


def test_every_engine_lists_its_switches() -> None:
    done = rlk("engines")
    assert done.returncode == ExitCode.EQUAL
    for engine in ENGINES:
        assert engine in done.stdout
        for name, switch in table_of(engine).items():
            assert name in done.stdout and switch.kind.__name__ in done.stdout and switch.meaning
            assert switch.default is None or isinstance(switch.default, switch.kind)


def test_values_are_parsed_by_type() -> None:
    given = ["block_size=32", "enable_prefix_caching=True", "gpu_memory_utilization=0.5", "custom_ops=none, +x"]
    assert parse_switches("vllm", given, "--option") == {
        "block_size": 32,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.5,
        "custom_ops": ["none", "+x"],
    }
    assert defaults({"a": Switch(int, 1, "x"), "b": Switch(str, None, "y")}, {"b": "z"}, "e") == {"a": 1, "b": "z"}


@pytest.mark.parametrize(
    ("engine", "pair", "words"),
    [
        ("vllm", "block_size", "malformed"),
        ("vllm", "block_size=", "malformed"),
        ("vllm", "block_size=x", "'x' is not an integer"),
        ("vllm", "block_size=0", "'0' is not at least 1"),
        ("vllm", "enable_prefix_caching=maybe", "not true or false"),
        ("vllm", "logprobs_mode=cooked", "not one of raw_logprobs"),
        ("vllm", "micro_batch=2", "'micro_batch' is unknown; megatron has it"),
        ("megatron", "enable_prefix_caching=true", "vllm has it"),
        ("reference", "min_p=0.1", "min_p is not supported: it drops tokens"),
        ("vllm", "repetition_penalty=1.05", "scales the logits"),
    ],
)
def test_what_an_engine_does_not_have_is_named(engine: str, pair: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_switches(engine, [pair], "--rollout-option")
    assert words in caught.value.cause and caught.value.remedy


def test_a_switch_given_twice_or_for_no_engine_is_refused() -> None:
    with pytest.raises(InputError, match="given twice"):
        parse_switches("megatron", ["micro_batch=2", "micro_batch=3"], "--train-option")
    refused(rlk("localize", "--train-option", "block_size=1"), "megatron: option 'block_size' is unknown")
    assert not any(name in table_of(engine) for name in UNSUPPORTED_SAMPLING for engine in ENGINES)


def test_an_override_that_is_a_switch_says_so(tmp_path: object) -> None:
    override = parse_override("rollout/object: max_num_batched_tokens=64")
    options = EngineOptions("vllm", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(InputError) as caught:
        apply_overrides([override], options, CapturePlan((), tmp_path))  # type: ignore[arg-type]
    assert caught.value.remedy == "give it as --rollout-option max_num_batched_tokens=64"


def test_each_side_gets_its_own() -> None:
    settings = RunSettings(options=("block_size=8", "chunk=3"), train_options=("block_size=4",), generate=2)
    verdict, _ = run_localize(settings, "reference", "reference", lambda *_: None)
    left, right = (verdict.evidence[side]["evidence"] for side in ("left", "right"))
    assert (left["block_size"], left["chunk"], right["block_size"], right["chunk"]) == (8, 3, 4, None)
    assert verdict.exit_code is ExitCode.EQUAL
