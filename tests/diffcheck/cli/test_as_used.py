"""Nothing that a user hands in is dropped in silence, and nothing from outside is obeyed by the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diffcheck.base.console import plain
from diffcheck.base.errors import ExitCode
from diffcheck.trace.reader import Trace
from tests.diffcheck.in_process import refused, rlk
from tests.diffcheck.synthetic import flip, header, pair, values, write

SCORED = '{"prompt_token_ids": [5, 6, 7], "response_token_ids": [8, 9]}\n'
BOTH = ("--rollout", "reference", "--train", "reference")


@pytest.fixture
def samples(tmp_path: Path) -> str:
    path = tmp_path / "s.jsonl"
    path.write_text(SCORED)
    return str(path)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--override", "layers.9.mlp.act: flip=0,3,5"], "no boundary of the model matches 'layers.9.mlp.act'"),
        (["--override", "layers.*.mlp.akt: flip=0,3,5"], "no boundary of the model matches"),
        (["--override", "layers.1.mlp.act: flip=999,3,5"], "sample 999 is not there"),
        (["--override", "layers.1.mlp.act: flip=0,4,5"], "position 4 is not there"),
        (["--override", "logits: flip=0,1,5"], "position 1 is not there"),
        (["--override", "layers.1.mlp.act: flip=0,3,256"], "element 256 is not there"),
        (["--override", "layers.1.mlp.act: flip=0,3,5,32"], "bit 32 is not there"),
        (["--override", "layers.1.mlp.act: flip=0,3,5,16"], "256 elements of 16 bits"),
        (["--override", "layers.9.*: rounding.silu=bfloat16"], "no boundary of the model matches"),
        (["--override", "object: temperature=nan"], "is not a finite float"),
        (["--override", "object: top_p=2"], "top_p is out of range"),
        (["--layers", "50:60"], "the model has 3 layers"),
        (["--layers", "2:4"], "the model has 3 layers"),
        (["--temperature", "nan"], "is not positive and finite"),
        (["--generate", "5"], "--generate would change nothing"),
        (["--seed", "5"], "--seed would change nothing"),
    ],
)
def test_what_matches_nothing_stops_the_run(more: list[str], words: str, samples: str) -> None:
    refused(rlk("localize", *BOTH, "--samples", samples, *more), words)


def test_only_what_fired_is_listed_as_changed(samples: str, tmp_path: Path) -> None:
    def changed(*overrides: str) -> list[str]:
        out = tmp_path / "t"
        words = [word for text in overrides for word in ("--override", text)]
        done = rlk("capture", "--engine", "reference", "--samples", samples, "--out", str(out), "--overwrite", *words)
        assert done.code == 0, done.err
        return Trace(out).header.changed

    assert changed("layers.1.mlp.act: flip=0,3,5") == ["layers.1.mlp.act: flip=0,3,5,0"]
    assert changed("object: temperature=1") == []
    assert changed("object: temperature=0.5", "object: top_k=7") == ["object: temperature = 0.5", "object: top_k = 7"]
    assert changed("object: swap_tokens=0,1,1") == []


def test_options_of_an_engine_are_refused_where_the_side_is_a_trace(tmp_path: Path) -> None:
    pair(tmp_path, flip("norm", 1))
    traces = ("--rollout", str(tmp_path / "left"), "--train", str(tmp_path / "right"))
    assert rlk("localize", *traces).code == ExitCode.DIVERGED
    for option, value in (("--seed", "1"), ("--tp", "2"), ("--layers", "0:1"), ("--model", "smollm2-135m")):
        refused(rlk("localize", *traces, option, value), f"{option} would change nothing")
    refused(rlk("localize", *traces, "--override", "norm: flip=0,3,5"), "no live engine")
    one = ("--rollout", "reference", "--train", str(tmp_path / "right"))
    refused(rlk("localize", *one, "--train-profile", "strict-v1"), "--train-profile would change nothing")


def test_infer_refuses_a_named_model_that_is_not_the_traced_one(samples: str, tmp_path: Path) -> None:
    out = str(tmp_path / "t")
    assert rlk("capture", "--engine", "reference", "--samples", samples, "--out", out, "--layers", "0:1").code == 0
    done = rlk("infer", out, "--boundary", "embed_tokens", "--model", "tiny-qwen3-tied")
    refused(done, "tiny-qwen3-tied does not hold the weights", ExitCode.NOT_COMPARABLE)


def test_a_reader_who_leaves_early_changes_no_exit_code(tmp_path: Path) -> None:
    pair(tmp_path, lambda _: None)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    compare = ["compare", str(tmp_path / "left"), str(tmp_path / "right"), "--all"]
    for command in (compare, ["contract", "show", "rms_norm"]):
        read, write_end = os.pipe()
        os.close(read)
        words = [sys.executable, "-m", "diffcheck.cli", *command]
        done = subprocess.run(words, stdout=write_end, stderr=subprocess.PIPE, env=environment, text=True, check=False)
        os.close(write_end)
        assert done.returncode == ExitCode.EQUAL and "Error" not in done.stderr


EVIL = "[/x] [bold]b[/] \x1b[2J\x9b31m \u202e \ud800 :smile:"


def test_text_from_outside_is_neither_markup_nor_control_text(tmp_path: Path) -> None:
    """Paths, keys, engine names and whatever else a message may hold."""
    folder = tmp_path / "[/x] [bold]b[/] \x1b[2J"
    for done in (
        rlk("compare", str(folder), str(folder)),
        rlk("localize", *BOTH, "--model", str(folder)),
        rlk("localize", *BOTH, "--samples", str(folder)),
        rlk("localize", *BOTH, "--override", "[/x] [bold]b[/] \x1b[2J: flip=0,0,0"),
        rlk("localize", *BOTH, "--profile", str(folder)),
        rlk("localize", "--rollout", str(folder)),
    ):
        refused(done, "[/x] [bold]b[/] ")
        assert "\x1b" not in done.err
    for name in ("left", "right"):
        head = header(engine=EVIL.replace("\ud800", ""))
        head.changed, head.unobserved = [EVIL[:20]], {"logsumexp": EVIL[:30]}
        write(tmp_path / name, {n: v for n, v in values().items() if n != "logsumexp"}, head)
    done = rlk("compare", str(tmp_path / "left"), str(tmp_path / "right"))
    assert done.code == ExitCode.EQUAL
    assert "[/x] [bold]b[/]" in done.out.replace("\n", "") and ":smile:" in done.out
    assert not set(done.out) & set("\x1b\x9b\u202e")


def test_every_control_character_has_a_sign() -> None:
    everything = "".join(map(chr, range(0x3000))) + "\ud800"
    shown = plain(everything)
    assert len(shown) == len(everything) and shown.isascii() is False
    assert [c for c in shown if not c.isprintable() and c != "\n" and ord(c) < 0x20] == []
    assert plain("a\x1bb\x00") == "a\u241bb\u2400" and plain("Δ 中 é\n") == "Δ 中 é\n"


def test_resuming_what_is_no_run_is_refused(tmp_path: Path) -> None:
    from integration.grpo.config import GrpoConfig
    from integration.grpo.loop import Run

    (tmp_path / "empty").mkdir()
    for name in ("typo", "empty"):
        with pytest.raises(Exception, match="holds no run that could go on"):
            Run(GrpoConfig(), tmp_path / name, lambda *_: None, resume=True)  # type: ignore[arg-type,return-value]
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]
