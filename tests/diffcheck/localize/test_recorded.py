"""Recorded logprobs: what is none is refused, what agrees is equal, what is wrong with a record is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diffcheck.base.errors import ExitCode, InputError
from diffcheck.base.recorded import Resolution, check_recorded
from diffcheck.base.samples import Sample, load_samples, save_samples
from diffcheck.capture.recorded import write_recorded
from diffcheck.localize import localize
from diffcheck.localize.verdict import Verdict
from diffcheck.runs import RunSettings, run_capture, run_localize
from diffcheck.trace.reader import Trace
from tests.diffcheck.cli.test_cli import refused, rlk
from tests.diffcheck.synthetic import SAMPLES, header, values, write

#: Logprobs as bfloat16, three decimals, float32 and float64 write them down.
FLOAT32 = [float(np.float32(x)) for x in (-0.1234567, -2.7182817, -7.0000005, -1e-7)]


def computed(record: list[list[float]]) -> dict[str, tuple[np.ndarray, str]]:
    """Boundaries of an engine whose logprobs are these."""
    flat = np.array([x for r in record for x in r], np.float32)
    return {**values(), "logprobs": (flat.view(np.uint32)[:, None], "float32")}


def compared(folder: Path, record: list[list[float]], engine: list[list[float]], **changes: object) -> Verdict:
    samples = [replace(s, rollout_logprobs=tuple(r), **changes) for s, r in zip(SAMPLES, record, strict=True)]  # type: ignore[arg-type]
    save_samples(folder / "s.jsonl", samples)
    write_recorded(load_samples(folder / "s.jsonl"), folder / "s.jsonl", folder / "recorded")
    return localize(Trace(folder / "recorded"), write(folder / "engine", computed(engine), header("megatron")))


ENGINE = [[-0.25, -1.125], [-3.5, -0.0625, -2.0000012]]


def test_a_record_with_the_engines_bits_is_equal(tmp_path: Path) -> None:
    """However the float32 was written: as a double, or as its shortest decimal."""
    short = [[float(str(np.float32(x))) for x in r] for r in ENGINE]
    for i, record in enumerate((ENGINE, short)):
        (tmp_path / str(i)).mkdir()
        verdict = compared(tmp_path / str(i), record, ENGINE)
        assert verdict.exit_code is ExitCode.EQUAL, verdict.summary
        assert verdict.logprobs is not None and verdict.logprobs.compared == 5
        assert "no weight was compared" in verdict.summary and len(verdict.coverage.unobserved) == 43


def test_one_bit_of_a_record_is_found(tmp_path: Path) -> None:
    record = [ENGINE[0], [*ENGINE[1][:2], float(np.nextafter(np.float32(ENGINE[1][2]), np.float32(0)))]]
    verdict = compared(tmp_path, record, ENGINE)
    assert verdict.exit_code is ExitCode.DIVERGED
    first, recorded = verdict.first_divergence, verdict.recorded
    assert first is not None and (first.sample, first.position) == (1, 2)
    assert recorded is not None and recorded.agreements[0].worst == (1, 2)
    assert recorded.agreements[0].stats.mismatch_count == 1


@pytest.mark.parametrize(
    ("wrote", "name"),
    [
        (lambda x: round(x, 3), "3 decimals"),
        (lambda x: float((np.float32(x).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)), "bfloat16"),
        (lambda x: float(np.float16(x)), "float16"),
    ],
)
def test_a_record_that_agrees_as_far_as_it_goes_is_inconclusive(tmp_path: Path, wrote: object, name: str) -> None:
    """Neither equal, for bits are missing, nor diverged; a value outside the rounding diverges."""
    # Values that bfloat16 cuts off as it rounds.
    engine = [[-0.2501, -1.1257], [-3.5003, -0.06251, -2.0002]]
    record = [[wrote(x) for x in r] for r in engine]  # type: ignore[operator]
    verdict = compared(tmp_path, record, engine)
    assert verdict.verdict == "inconclusive" and name in verdict.summary
    (tmp_path / "off").mkdir()
    record[1][0] -= 0.25
    verdict = compared(tmp_path / "off", record, engine)
    assert verdict.verdict == "diverged" and "1 of them by more than their rounding" in verdict.summary


def test_the_resolution_is_the_coarsest_that_fits() -> None:
    as_array = np.array(FLOAT32)
    assert Resolution.of(as_array).name == "float32"
    assert Resolution.of(np.array([float(str(np.float32(x))) for x in FLOAT32])).name == "float32"
    assert Resolution.of(as_array * (1 + 1e-12)).name == "float64"
    assert not Resolution("float64").is_coarse


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (float("nan"), "[1] is NaN"),
        (float("-inf"), "[1] is -inf"),
        (1e-9, "positive"),
        (-9999.0, "stands for a missing value"),
        (-104.0, "stands for a missing value"),
    ],
)
def test_what_is_no_logprob_is_refused(bad: float, words: str) -> None:
    with pytest.raises(InputError) as caught:
        check_recorded((-1.0, bad), "x")
    assert words in caught.value.cause
    check_recorded((-0.0, -103.2), "x")


def test_padding_and_a_shift_are_said(tmp_path: Path) -> None:
    verdict = compared(tmp_path, [[-0.25, 0.0], [-3.5, 0.0, 0.0]], ENGINE)
    assert verdict.verdict == "diverged"
    assert any("3 recorded logprobs are exactly 0 (samples 0, 1)" in note for note in verdict.notes)
    assert any("padding, not logprobs" in note for note in verdict.notes)
    (tmp_path / "constant").mkdir()
    verdict = compared(tmp_path / "constant", [[-0.25, -1.125], [-1.5, -1.5, -1.5]], ENGINE)
    assert any("its last 3 recorded logprobs are all -1.5" in note for note in verdict.notes)
    (tmp_path / "shift").mkdir()
    moved = [[-9.0, -0.2501], [-8.0, -3.5001, -0.0626]]
    verdict = compared(tmp_path / "shift", moved, ENGINE)
    assert any("of the previous token better" in note for note in verdict.notes)


def test_contradicting_versions_are_another_object(tmp_path: Path) -> None:
    record = [replace(s, rollout_logprobs=tuple(r)) for s, r in zip(SAMPLES, ENGINE, strict=True)]
    mixed = [replace(s, weight_version=v) for s, v in zip(record, (3, 4), strict=True)]
    save_samples(tmp_path / "s.jsonl", mixed)
    write_recorded(load_samples(tmp_path / "s.jsonl"), tmp_path / "s.jsonl", tmp_path / "recorded")
    verdict = localize(Trace(tmp_path / "recorded"), write(tmp_path / "engine", computed(ENGINE)))
    assert verdict.exit_code is ExitCode.NOT_COMPARABLE
    assert verdict.not_comparable[0].field == "weight_version of the samples"
    assert "version 3: samples 0; version 4: samples 1" in verdict.not_comparable[0].left
    # A single version that the engine's own contradicts.
    (tmp_path / "one").mkdir()
    head = header("megatron")
    head.object.weight_version = 8
    samples = [replace(s, weight_version=7) for s in record]
    save_samples(tmp_path / "one.jsonl", samples)
    write_recorded(load_samples(tmp_path / "one.jsonl"), tmp_path / "one.jsonl", tmp_path / "one" / "recorded")
    verdict = localize(Trace(tmp_path / "one" / "recorded"), write(tmp_path / "one" / "engine", computed(ENGINE), head))
    assert "weight_version" in [m.field for m in verdict.not_comparable]


def test_a_run_says_how_the_record_agrees_with_its_own_rollout(tmp_path: Path) -> None:
    """On a live engine: its own record is equal, as a side and beside one; a changed one is told by token."""
    prompts = [Sample((5, 6, 7), (8, 9, 2), id="a"), Sample((50, 60), (80, 90), id="b")]
    save_samples(tmp_path / "p.jsonl", prompts)
    settings = RunSettings(samples=tmp_path / "p.jsonl")
    done = run_capture(settings, "reference", tmp_path / "trace", lambda *_: None, overwrite=False)
    save_samples(tmp_path / "s.jsonl", reversed(done.samples))
    verdict, _ = run_localize(
        replace(settings, samples=tmp_path / "s.jsonl", html=tmp_path / "v.html"),
        "recorded",
        "reference",
        lambda *_: None,
    )
    assert verdict.exit_code is ExitCode.EQUAL and verdict.logprobs is not None and verdict.logprobs.compared == 5
    assert "5 logprobs of" in (tmp_path / "v.html").read_text()
    first, *others = (s.to_json() for s in done.samples)
    first["rollout_logprobs"] = (
        first["rollout_logprobs"][0],
        first["rollout_logprobs"][1] - 0.5,
        first["rollout_logprobs"][2],
    )
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(s) + "\n" for s in (*others, first)))
    out = tmp_path / "v.json"
    told = rlk(
        "localize",
        *("--rollout", str(tmp_path / "trace"), "--train", str(tmp_path / "trace")),
        *("--samples", str(tmp_path / "c.jsonl"), "--json", str(out), "--html", str(tmp_path / "c.html")),
    )
    assert told.returncode == ExitCode.EQUAL
    assert "against the rollout side (reference): 1 of 5 differ" in told.stdout
    recorded = json.loads(out.read_text())["recorded"]
    assert recorded["agreements"][0]["worst"] == [0, 1] and recorded["agreements"][0]["stats"]["max_abs_diff"] == 0.5
    assert "recorded logprobs differ from those of the rollout side" in (tmp_path / "c.html").read_text()
    (tmp_path / "other.jsonl").write_text('{"prompt_token_ids": [5, 6], "response_token_ids": [7]}\n')
    foreign = rlk(
        "localize",
        *("--rollout", str(tmp_path / "trace"), "--train", str(tmp_path / "trace")),
        *("--samples", str(tmp_path / "other.jsonl")),
    )
    refused(foreign, "sample 0 is none of")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rollout", "recorded", "--train", "reference"], "needs a file with rollout_logprobs"),
        (["--rollout", "reference", "--train", "recorded"], "--train recorded"),
        (["--rollout", "recorded", "--train", "reference", "--infer", "--samples", "s.jsonl"], "--infer: a record"),
        (
            ["--rollout", "recorded", "--train", "reference", "--samples", "s.jsonl"],
            "sample 0 has no rollout_logprobs",
        ),
    ],
)
def test_what_a_record_cannot_do_is_refused(arguments: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text('{"prompt_token_ids": [5], "response_token_ids": [7]}\n')
    given = [str(tmp_path / a) if a == "s.jsonl" else a for a in arguments]
    refused(rlk("localize", *given), words)
