"""Every JSON output is what its schema says, and a schema is not so wide that anything would pass.

The outputs of live vLLM, Megatron-core and transformers are held to the same schemas where the tests have them already:
`tests.diffcheck.engine_cases`, `localize/test_localize_engines.py`, `integration/grpo/test_run.py`.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from diffcheck import schemas
from diffcheck.trace.reader import Trace
from diffcheck.trace.schema import HEADER
from reference.contract import CONTRACTS
from tests.diffcheck.in_process import rlk
from tests.diffcheck.synthetic import flip, header, pair, values, write
from tests.schemas import conforms, faults

ROOT = Path(__file__).parents[2]
BOTH = ("--rollout", "reference", "--train", "reference")
SAMPLES = '{"prompt_token_ids": [5, 6, 7], "response_token_ids": [8, 9], "id": "a", "rollout_logprobs": [-1.5, -2.0]}\n'
#: Committed results and the schema of each.
COMMITTED = {
    "diffcheck/results/faults.json": "faults",
    "diffcheck/results/localize-cpu.json": "benchmarks",
    "diffcheck/results/probe-cpu.json": "probe",
    "integration/results/grpo-bench.json": "benchmarks",
    "fastpath/results/benchmarks-h200.json": "benchmarks",
    "fastpath/results/tuning-h200.json": "benchmarks",
    "fastpath/results/parallel-2xh200.json": "parallel",
    "fastpath/results/conformance-h200.json": "conformance",
    "fastpath/results/compiled-gfx942-triton3.6.json": "machine-code",
    "fastpath/results/compiled-gfx942-triton3.9.json": "machine-code",
    "integration/results/nightly/nightly.json": "nightly",
    "reference/vectors/data/index.json": "vectors",
}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Schema -> what the commands really wrote."""
    folder = tmp_path_factory.mktemp("outputs")
    samples = folder / "s.jsonl"
    samples.write_text(SAMPLES)
    flipped = ("--override", "layers.1.mlp.act: rounding.silu=bfloat16", "--infer", "--keep", str(folder / "kept"))
    commands: dict[str, tuple[str, ...]] = {
        "diverged": ("localize", *BOTH, "--samples", str(samples), *flipped),
        "equal": ("localize", *BOTH, "--samples", str(samples)),
        "not_comparable": ("localize", *BOTH, "--samples", str(samples), "--override", "object: temperature=0.5"),
    }
    verdicts = []
    for kind, words in commands.items():
        out = folder / f"{kind}.json"
        done = rlk(*words, "--json", str(out))
        verdicts.append(read(out))
        assert verdicts[-1]["verdict"] == kind, done.err
    kept = folder / "kept"
    write(folder / "a", {"norm": values()["norm"]})
    write(folder / "b", {"logits": values()["logits"]})
    verdicts.append(json.loads(rlk("compare", str(folder / "a"), str(folder / "b"), "--json", "-").out))
    assert verdicts[-1]["verdict"] == "inconclusive"
    infer = folder / "infer.json"
    for boundary in ("layers.0.input_layernorm", "layers.0.mlp.act"):
        assert rlk("infer", str(kept / "rollout-reference"), "--boundary", boundary, "--json", str(infer)).code == 0
    fault = folder / "faults.json"
    assert rlk("faults", "rope-bf16-table", "--json", str(fault)).code == 0
    judged = [json.loads(rlk("gate", str(folder / f"{kind}.json"), "--json", "-").out) for kind in commands]
    rules = ("--must-equal", "layers.*.mlp.act", "--min-coverage", "1", "--json", "-")
    judged.append(json.loads(rlk("gate", *rules, str(folder / "diverged.json")).out))
    probed = folder / "probe.json"
    assert rlk("probe", "index_add", "--length", "4", "--json", str(probed)).code == 0
    again = folder / "twice.json"
    assert rlk("twice", "--engine", "reference", "--samples", str(samples), "--json", str(again)).code == 0
    found = folder / "doctor.json"
    rlk("doctor", "--json", str(found))
    shown = [rlk("contract", "show", name, "--json").out for name in sorted(CONTRACTS)]
    return {
        "verdict": verdicts,
        "inference": [read(infer)],
        "faults": [read(fault)],
        "doctor": [read(found)],
        "gate": judged,
        "twice": [read(again)],
        "probe": [read(probed)],
        "contract": [json.loads(text) for text in shown],
        "trace": [read(kept / side / HEADER) for side in ("rollout-reference", "train-reference")],
        "sample": [json.loads(line) for line in SAMPLES.splitlines()],
    }


def test_what_the_commands_write_is_what_the_schemas_say(outputs: dict[str, list[Any]]) -> None:
    for name, documents in outputs.items():
        assert documents
        for document in documents:
            conforms(name, document)


@pytest.mark.parametrize(("path", "name"), COMMITTED.items())
def test_committed_results_are_what_the_schemas_say(path: str, name: str) -> None:
    conforms(name, read(ROOT / path))


def test_the_other_commands_write_what_the_schemas_say(tmp_path: Path) -> None:
    """Those that need a process of their own, in their smallest form."""
    small = "import fastpath.measure.kit as kit\nkit.SMALL = 'logprob/gradient'\nfrom diffcheck.cli import main\n"
    measure = [sys.executable, "-c", f"{small}main(['doctor', '--measure', '--json', '-'])"]
    reference = [sys.executable, "-m", "reference.benchmarks", "elementwise", "--json", "out.json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    for schema, command in (("measure", measure), ("benchmarks", reference)):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), done.stderr[-2000:]
        written = tmp_path / "out.json"
        conforms(schema, read(written) if written.exists() else json.loads(done.stdout))


def test_runs_of_grpo_are_what_the_schemas_say() -> None:
    folders = [path.parent for path in (ROOT / "integration/results").rglob("steps.jsonl")]
    assert len(folders) >= 3
    for folder in folders:
        conforms("grpo-config", read(folder / "config.json"))
        conforms("grpo-evidence", read(folder / "evidence.json"))
        for line in (folder / "steps.jsonl").read_text().splitlines():
            conforms("grpo-step", json.loads(line))


def test_every_schema_is_one_and_is_in_the_documentation() -> None:
    said = (ROOT / "docs/formats.md").read_text()
    for name in schemas.names():
        schema = schemas.read(name)
        Draft202012Validator.check_schema(schema)
        assert schema["$id"].startswith(f"urn:rlk:{name}:") and schema["title"]
        assert f"`{name}`" in said, f"docs/formats.md does not say what {name} is"
    assert rlk("schema").out.split("\n")[0].split()[0] == "name"
    assert json.loads(rlk("schema", "verdict").out) == schemas.read("verdict")
    assert "verdict" in rlk("schema", "verdikt").err


def _places(document: Any) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Every object of a document, with the way to it."""
    waiting: list[tuple[list[Any], Any]] = [([], document)]
    while waiting:
        way, value = waiting.pop()
        if isinstance(value, dict):
            yield way, value
            waiting += [([*way, key], child) for key, child in value.items()]
        elif isinstance(value, list):
            waiting += [([*way, i], child) for i, child in enumerate(value[:2])]


def test_a_field_that_is_dropped_added_or_of_another_type_is_noticed(outputs: dict[str, list[Any]]) -> None:
    """At the top of each document and in the objects that a reader goes by."""
    for name, closed in {
        "verdict": (["first_divergence"], ["coverage"], ["logprobs"], ["boundaries", 0], ["evidence", "repeat"]),
        "trace": (["object"], ["object", "kv"], ["boundaries", "norm"]),
        "inference": (["undecided", 0],),
        "faults": (["engines", "reference"], ["engines", "reference", "outcomes", 0]),
        "doctor": (["findings", 0],),
        "gate": (["subjects", 0], ["subjects", 0, "rules", 0]),
        "twice": (["runs", 0], ["runs", 0, "logprobs"]),
        "probe": (["answers", 0], ["answers", 0, "trials", 0]),
        "contract": (),
        "sample": (),
    }.items():
        document = outputs[name][0]
        reached = {tuple(way): place for way, place in _places(document)}
        for way in ([], *closed):
            for change in ("add", "drop", "retype"):
                other = copy.deepcopy(document)
                place = other
                for key in way:
                    place = place[key]
                assert tuple(way) in reached and isinstance(place, dict)
                key = sorted(place)[0] if name != "sample" else "prompt_token_ids"
                if change == "add":
                    place["colour"] = 1
                elif change == "drop":
                    if key in ("changed", "evidence") and name == "trace":
                        continue
                    del place[key]
                else:
                    place[key] = ["x", {"y": 1}, object()]
                assert faults(name, other), (name, way, change, key)


def test_the_reader_of_traces_and_the_schema_agree(tmp_path: Path) -> None:
    """What the schema refuses of types and ranges the reader refuses too; the schema of an old trace has no seal."""
    pair(tmp_path, flip("norm", 1))
    document = read(tmp_path / "left" / HEADER)
    conforms("trace", document)
    old = copy.deepcopy(document)
    del old["header_sha256"]
    assert faults("trace", old)
    old["schema"] = 1
    conforms("trace", old)
    head = header()
    head.samples[0] = {**head.samples[0], "rollout_logprobs": [float("nan"), float("-inf")]}
    conforms("trace", read(write(tmp_path / "nan", values(), head).folder / HEADER))
    assert Trace(tmp_path / "nan").header.samples[0]["rollout_logprobs"] == ["nan", "-inf"]
