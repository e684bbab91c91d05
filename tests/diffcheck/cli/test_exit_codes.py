"""Every exit code that a command's help promises occurs, and no other command line of the table ends otherwise."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from diffcheck.cli import commands, gate, twice
from diffcheck.faults import FAULTS
from diffcheck.faults import cli as faults_cli
from diffcheck.infer import cli as infer_cli
from diffcheck.localize import localize
from diffcheck.trace.reader import Trace
from diffcheck.twice import runs as twice_runs
from tests.diffcheck.in_process import rlk
from tests.diffcheck.synthetic import flip, header, pair, values, write

#: Commands whose help lists their exit codes.
COMMANDS = {
    "localize": commands.localize,
    "compare": commands.compare,
    "infer": infer_cli.infer,
    "faults": faults_cli.faults,
    "gate": gate.gate,
    "twice": twice.twice,
}
ENGINE = ("--engine", "reference")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces by what comes of comparing them with ``left``, of an engine and of one with a bit flipped."""
    made = tmp_path_factory.mktemp("codes")
    pair(made, flip("norm", 1))
    head = header()
    head.object.temperature = 0.7
    write(made / "other", values(), head)
    for name in ("norm", "logits"):
        write(made / name, {name: values()[name]})
    (made / "s.jsonl").write_text('{"prompt_token_ids": [5, 6, 7], "response_token_ids": [8, 9]}\n')
    for name, more in (("whole", ()), ("bent", ("--override", "layers.0.mlp.act: flip=0,1,5,3"))):
        line = ("capture", *ENGINE, "--samples", str(made / "s.jsonl"), "--out", str(made / name), *more)
        assert rlk(*line).code == 0
    (made / "p.py").write_text(
        "import random\nfrom reference import operators as ops\n\n"
        "def unsteady(weights):\n    norm = ops.rms_norm\n"
        "    def noisy(*given):\n        found = norm(*given)\n"
        "        found.output[0, 0] *= random.choice([-1, 1])\n        return found\n"
        "    ops.rms_norm = noisy\n"
    )
    return made


def lines(folder: Path) -> dict[tuple[str, int], tuple[str, ...]]:
    at = {name: str(folder / name) for name in ("left", "right", "other", "norm", "logits", "whole", "bent")}
    pairs = {
        0: (at["left"], at["left"]),
        1: (at["left"], at["right"]),
        2: (at["left"], str(folder / "none")),
        3: (at["left"], at["other"]),
        4: (at["norm"], at["logits"]),
    }
    act, repeat = ("--boundary", "layers.0.mlp.act"), ("twice", *ENGINE, "--samples", str(folder / "s.jsonl"))
    return {
        **{("compare", code): ("compare", *two) for code, two in pairs.items()},
        **{("localize", code): ("localize", "--rollout", a, "--train", b) for code, (a, b) in pairs.items()},
        **{("gate", code): ("gate", "--rollout", a, "--train", b) for code, (a, b) in pairs.items()},
        # The logprobs of this pair are equal, and a gate asks for them alone by itself.
        ("gate", 1): ("gate", "--max-boundaries", "0", "--rollout", at["left"], "--train", at["right"]),
        ("infer", 0): ("infer", at["whole"], *act),
        ("infer", 2): ("infer", at["whole"], "--boundary", "layers.0.mlp.akt"),
        ("infer", 3): ("infer", at["whole"], *act, "--model", "tiny-qwen3-tied"),
        ("infer", 4): ("infer", at["bent"], *act),
        ("faults", 0): ("faults", "silu-rounded"),
        ("faults", 2): ("faults", "no-such"),
        ("twice", 0): repeat,
        ("twice", 1): (*repeat, "--patch", f"{folder / 'p.py'}:unsteady"),
        ("twice", 2): (*repeat, "--condition", "seldom"),
    }


def test_every_documented_exit_code_occurs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = lines(folder)
    for (command, code), line in table.items():
        done = rlk(*line)
        assert done.code == code, (command, code, done.code, done.out[-500:], done.err[-500:])
        assert "internal error" not in done.err and (code != 2 or "remedy:" in done.err), done.err
    # A fault that is expected elsewhere than where it is.
    wrong = replace(FAULTS["silu-rounded"], where="layers.0.self_attn.o_proj")
    monkeypatch.setitem(FAULTS, "silu-rounded", wrong)
    assert rlk("faults", "silu-rounded").code == 1
    # An engine of ours is always observed: what cannot be told is put in the place of the comparison.
    undecided = localize(Trace(folder / "norm"), Trace(folder / "logits"))
    monkeypatch.setattr(twice_runs, "localize", lambda *_: undecided)
    assert rlk(*table["twice", 0]).code == 4
    occurred = {*table, ("faults", 1), ("twice", 4)}
    for command, function in COMMANDS.items():
        said = re.search(r"Exit codes: (.*?)\.\n", f"{function.__doc__}\n".replace("\n    ", " ").replace(" \n", "\n"))
        assert said, f"{command} --help does not say its exit codes"
        documented = {int(code) for code in re.findall(r"(?:^|, )(\d)(?= |,|$)", said[1])}
        assert documented == {code for name, code in occurred if name == command}, (command, documented)
