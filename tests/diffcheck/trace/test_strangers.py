"""Traces from strangers: damage, contradictions and sizes that lie are refused by name, at once, and never obeyed."""

from __future__ import annotations

import io
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffcheck.base.console import Terminal
from diffcheck.base.errors import ExitCode, RlkError, TraceError
from diffcheck.localize import localize
from diffcheck.report.html import write_report
from diffcheck.report.terminal import print_verdict
from diffcheck.trace import reader
from diffcheck.trace.reader import Trace
from diffcheck.trace.schema import HEADER, HEADER_LIMIT, SEAL, UNSEALED, seal
from tests.diffcheck.in_process import refused, rlk
from tests.diffcheck.synthetic import values, write

Data = dict[str, Any]
#: Seconds of the fuzzer; `make test-exhaustive` gives it more.
SECONDS = 60.0


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    write(tmp_path / "t", values())
    write(tmp_path / "u", values())
    return tmp_path / "t"


def rewrite(folder: Path, change: Callable[[Data], object]) -> None:
    """Change a header and seal it again, as a stranger can who writes traces."""
    path = folder / HEADER
    data = json.loads(path.read_text())
    change(data)
    data.pop(SEAL)
    path.write_text(seal(data))


def judge(left: Path, right: Path) -> str:
    return localize(Trace(left), Trace(right)).verdict


def test_every_flipped_bit_of_the_header_is_found(trace: Path) -> None:
    good = (trace / HEADER).read_bytes()
    rng = random.Random(0)
    for _ in range(1500):
        bad = bytearray(good)
        bad[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        (trace / HEADER).write_bytes(bad)
        with pytest.raises(TraceError):
            Trace(trace)
    (trace / HEADER).write_bytes(good)
    assert judge(trace, trace.with_name("u")) == "equal"


def test_every_flipped_bit_of_a_file_is_found(trace: Path) -> None:
    """Row numbers and names of tensors among them."""
    (path,) = trace.glob("*.safetensors")
    good = path.read_bytes()
    size = int.from_bytes(good[:8], "little")
    rng = random.Random(0)
    places = [
        *range(8),
        *(rng.randrange(8, 8 + size) for _ in range(100)),
        *(rng.randrange(len(good)) for _ in "a" * 100),
    ]
    for at in places:
        bad = bytearray(good)
        bad[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        reader._verified.clear()
        with pytest.raises(TraceError):
            judge(trace, trace.with_name("u"))


def test_a_trace_without_a_seal_is_read_with_a_warning(trace: Path) -> None:
    data = json.loads((trace / HEADER).read_text())
    del data[SEAL]
    data["schema"] = UNSEALED
    del data["object"]["unknown"]
    # As schema 1 wrote what is no number.
    text = json.dumps(data, indent=1).replace(
        '"prompt_token_ids"', '"rollout_logprobs": [NaN, -1.5],"prompt_token_ids"', 1
    )
    (trace / HEADER).write_text(text)
    assert judge(trace, trace.with_name("u")) == "equal"
    done = rlk("compare", str(trace), str(trace.with_name("u")))
    assert done.code == ExitCode.EQUAL and "damage there goes unseen" in " ".join(done.out.replace("│", "").split())
    # A seal cannot be had by claiming to be of the old schema.
    rewrite(trace.with_name("u"), lambda d: d.update(schema=UNSEALED))
    with pytest.raises(TraceError, match=SEAL):
        Trace(trace.with_name("u"))


def test_a_logprob_that_is_no_number_is_written_as_json(trace: Path) -> None:
    head = Trace(trace).header
    head.samples[0] = {**head.samples[0], "rollout_logprobs": [float("nan"), float("-inf")]}
    again = write(trace.with_name("v"), values(), head)
    assert again.header.samples[0]["rollout_logprobs"] == ["nan", "-inf"]
    json.loads((again.folder / HEADER).read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "name", ["../u/{}", "{absolute}", "sub/{}", "link.safetensors", "..", ".hidden.safetensors", "pipe.safetensors"]
)
def test_nothing_outside_the_folder_is_read(trace: Path, name: str) -> None:
    (path,) = trace.glob("*.safetensors")
    (trace / "sub").mkdir()
    (trace / "sub" / path.name).write_bytes(path.read_bytes())
    (trace / ".hidden.safetensors").write_bytes(path.read_bytes())
    (trace / "link.safetensors").symlink_to(trace.with_name("u") / path.name)
    os.mkfifo(trace / "pipe.safetensors")
    given = name.format(path.name, absolute=trace.with_name("u") / path.name)

    def change(data: Data) -> None:
        data["files"] = {given: next(iter(data["files"].values()))}
        for entry in data["boundaries"].values():
            entry["file"] = given

    rewrite(trace, change)
    done = rlk("compare", str(trace), str(trace.with_name("u")))
    assert done.code == ExitCode.USAGE and "remedy:" in done.err and str(trace) in done.err


def test_a_linked_header_is_refused(trace: Path) -> None:
    (trace / HEADER).unlink()
    (trace / HEADER).symlink_to(trace.with_name("u") / HEADER)
    with pytest.raises(TraceError, match="is a link"):
        Trace(trace)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["object"]["model"].update(num_hidden_layers=10**8), "num_hidden_layers"),
        (lambda d: d["object"]["model"].update(vocab_size=10**12), "vocab_size"),
        (lambda d: d["object"]["model"].update(num_hidden_layers=-1), "num_hidden_layers"),
        (lambda d: d["object"]["model"].update(num_hidden_layers=2.0), "num_hidden_layers"),
        (lambda d: d["object"]["model"].update(head_dim=True), "head_dim"),
        (lambda d: d["object"]["model"].update(num_key_value_heads=0), "num_key_value_heads"),
        (lambda d: d["object"]["model"].update(colour=1), "colour"),
        (lambda d: d["object"].update(model={}), "model is empty"),
        (lambda d: d.update(tensor_parallel=10**9), "tensor_parallel"),
        (lambda d: d.update(tensor_parallel=True), "tensor_parallel"),
        (lambda d: d.update(schema=True), "schema True"),
        (lambda d: d.update(engine=["vllm"]), "engine"),
        (lambda d: d.update(boundaries=[]), "boundaries"),
        (lambda d: d.update(samples={}), "samples"),
        (lambda d: d.update(object=None), "object"),
        (lambda d: d.update(changed="no"), "changed"),
        (lambda d: d["object"].update(kv={"layout": "paged"}, positions=[]), "positions"),
        (lambda d: d["object"]["positions"].pop(), "positions of 1 samples"),
        (lambda d: d["object"].update(temperature="hot"), "temperature"),
        (lambda d: d["object"].update(temperature=-1.0), "temperature"),
        (lambda d: d["object"].update(shards={"q_proj": [[1]]}), "shards"),
        (lambda d: d["object"].update(real_vocab=99), "real_vocab"),
        (lambda d: d["object"]["token_ids"][0].__setitem__(0, 10**30), "token_ids"),
        (lambda d: d["samples"][0].update(prompt_token_ids=[-3]), "prompt_token_ids"),
        (lambda d: d["samples"][0].update(temperature=0), "temperature"),
        (lambda d: d["boundaries"]["norm"].update(shape=[10**11, 8]), "boundary norm"),
        (lambda d: d["boundaries"]["norm"].update(shape=[-1, 8]), "shape"),
        (lambda d: d["boundaries"].update(nurm=d["boundaries"].pop("norm")), "'nurm' is none of the model's"),
        (lambda d: d["boundaries"].update(norm=d["boundaries"]["logits"]), "boundary norm"),
    ],
)
def test_sizes_and_types_are_checked_before_any_work(trace: Path, change: Callable[[Data], object], words: str) -> None:
    rewrite(trace, change)
    start = time.process_time()
    refused(rlk("compare", str(trace), str(trace.with_name("u"))), words)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"schema": 2, "schema": 2}', "comes twice"),
        (b'{"schema": NaN, "header_sha256": 1}', "NaN is not JSON"),
        (b"[" * 10**5, "nested too deeply"),
        (b'{"schema": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"schema": "\xff"}', "not UTF-8"),
        (b"[]", "'schema' is missing"),
    ],
)
def test_what_is_no_document_is_refused(trace: Path, text: bytes, words: str) -> None:
    (trace / HEADER).write_bytes(text)
    refused(rlk("compare", str(trace), str(trace)), words)


def test_a_sparse_header_of_any_size_is_not_read(trace: Path) -> None:
    with (trace / HEADER).open("r+b") as stream:
        stream.truncate(20 << 30)
    refused(rlk("compare", str(trace), str(trace)), f"more than the {HEADER_LIMIT:,}")
    path = trace / "s.jsonl"
    with path.open("wb") as stream:
        stream.truncate(20 << 30)
    refused(rlk("localize", "--rollout", "reference", "--train", "reference", "--samples", str(path)), "more than the")


def _damage(rng: random.Random, data: Any) -> None:
    """Replace, drop, double or rename something at a random place."""
    place, key = data, None
    while isinstance(place, dict | list) and place and rng.random() < 0.85:
        holder = place
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        place = place[key]
    if key is None:
        return
    strange = [None, True, -1, 0, 10**40, 1e308, 0.5, "", "x", "../../x", [], {}, [[]], {"a": 1}, "\x1b[2J", [1, "2"]]
    action = rng.randrange(4)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        holder[rng.choice(["x", "layers.0", "", "norm"])] = holder.pop(key)
    elif action == 2 and isinstance(holder, list):
        holder.append(holder[key])
    else:
        holder[key] = rng.choice(strange)


def fuzz(folder: Path, seconds: float, seed: int) -> dict[str, int]:
    """Damage sealed headers for ``seconds`` and compare; how it ended, counted.

    Raises:
        AssertionError: something else than a verdict or a refusal came of it; the seed and number are named.
    """
    rng, counts, end, number = (
        random.Random(seed),
        dict.fromkeys(("refused", "verdict"), 0),
        time.monotonic() + seconds,
        0,
    )
    good = (folder / HEADER).read_text()
    while time.monotonic() < end:
        number += 1
        data = json.loads(good)
        del data[SEAL]
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            _damage(rng, data)
        (folder / HEADER).write_text(seal(data))
        try:
            left, right = Trace(folder), Trace(folder.with_name("u"))
            verdict = localize(left, right)
            json.dumps(verdict.to_json(), allow_nan=False)
            print_verdict(verdict, Terminal(file=io.StringIO()))
            write_report(folder.with_name("page.html"), verdict, left, right)
            counts["verdict"] += 1
        except RlkError as error:
            assert error.remedy and folder.name in error.cause, (seed, number, error.cause)
            counts["refused"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, trace {number}: {type(error).__name__}: {error}") from error
    return counts


def test_whatever_a_header_holds_ends_as_a_verdict_or_a_refusal(trace: Path) -> None:
    counts = fuzz(trace, SECONDS, seed=0)
    assert counts["refused"] > 100 and counts["verdict"] > 0, counts


@pytest.mark.exhaustive
def test_whatever_a_header_holds_for_longer(trace: Path) -> None:
    counts = fuzz(trace, 600, seed=random.SystemRandom().randrange(2**31))
    assert counts["refused"] > 5000, counts
