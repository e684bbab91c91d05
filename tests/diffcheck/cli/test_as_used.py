"""Nothing that a user hands in is dropped in silence, and nothing from outside is obeyed by the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from diffcheck import runs
from diffcheck.base.console import plain
from diffcheck.base.errors import ExitCode, InputError
from diffcheck.base.models import resolve_model
from diffcheck.capture.plan import EngineOptions
from diffcheck.capture.strict import check_start
from diffcheck.faults import CONTROLS, FAULTS
from diffcheck.faults.real_library import REAL_CONTROLS, REAL_FAULTS
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


CONFIG = 'rollout = "reference"\ntrain = "reference"\nlayers = "0:2"\noverride = ["layers.1.mlp.act: flip=0,3,5"]\n'


def test_a_config_file_is_the_command_line(samples: str, tmp_path: Path) -> None:
    """Before and after the command's name; what the line itself says wins; --quiet leaves one line."""
    path = tmp_path / "c.toml"
    path.write_text(f'{CONFIG}samples = "{samples}"\n')
    done = rlk("localize", "--config", str(path), "--quiet")
    assert (done.code, done.err) == (ExitCode.DIVERGED, ""), done.err
    (line,) = done.out.splitlines()
    assert "first diverge at layers.1.mlp.act (sample 0, position 3)" in line
    done = rlk("-q", "--config", str(path), "localize", "--override", "layers.0.mlp.act: flip=0,2,5")
    assert "layers.0.mlp.act (sample 0, position 2)" in done.out and done.err == ""
    # One that said nothing does not silence the next.
    assert rlk("localize", "--config", str(path)).err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rolout = 'reference'", "localize has no option 'rolout'"),
        ("tp = 2.5", "tp = 2.5 is not an integer"),
        ("layers = 3", "layers = 3 is not a text"),
        ("infer = 'yes'", "infer = 'yes' is not true or false"),
        ("override = 'object: top_k=1'", "is not a list of texts"),
        ("top-k = 1\ntop_k = 2", "'top_k' is given twice"),
        ("[localize]\ntp = 1", "has no option 'localize'"),
        ("config = 'other.toml'", "has no option 'config'"),
        ("tp = ", "not valid TOML"),
        ("phase = 'decod'", "--phase 'decod' is none of"),
    ],
)
def test_a_config_file_with_a_fault_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    for line in (("localize", "--config", str(path)), ("--config", str(path), "localize")):
        refused(rlk(*line), words)
    refused(rlk("localize", "--config", str(tmp_path / "none.toml")), "No such file")
    refused(rlk("--config", str(path), "contract", "list"), "contract has no options of its own")


@pytest.mark.parametrize(
    ("line", "words", "offer"),
    [
        (("localize", *BOTH, "--profile", "strict-v1/fma32"), "unknown profile", "strict-v1/fma32-seq"),
        (("localize", *BOTH, "--override", "layers.*.mlp.akt: flip=0,3,5"), "no boundary", "mlp.act"),
        (("localize", *BOTH, "--override", "layers.*.mlp.akt: rounding.silu=float32"), "no boundary", "mlp.act"),
        (("localize", *BOTH, "--override", "layers.1.mlp.act: rounding.sillu=float32"), "no field", "rounding.silu"),
        (("localize", *BOTH, "--override", "object: temperatur=2"), "no field", "temperature"),
        (("localize", *BOTH, "--rollout-option", "blocksize=2"), "option 'blocksize' is unknown", "block_size"),
        (("localize", *BOTH, "--model", "tiny-qwen"), "no such folder", "tiny-qwen3"),
        (("contract", "show", "rms_nrm"), "unknown operator", "rms_norm"),
        (("faults", "rope-bf16-tabel"), "is unknown", "rope-bf16-table"),
        (("schema", "verdikt"), "is unknown", "verdict"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(line: tuple[str, ...], words: str, offer: str) -> None:
    done = rlk(*line)
    refused(done, words)
    said = "".join(text for text in done.err.splitlines() if not text.startswith("…"))
    assert offer in said.partition("nearest:")[2] and len(said) < 600, said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("--train-profile", "strict-v9"), "unknown profile 'strict-v9'"),
        (("--profile", "vllm-0.32-cpu"), "describes an engine"),
        (("--rollout", "transformers", "--profile", "strict-v1"), "needs a strict path"),
        (("--top-p", "0"), "--top-p 0 keeps no token"),
    ],
)
def test_what_can_be_known_is_refused_before_an_engine_starts(
    line: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(runs, "EngineSession", started)
    refused(rlk("localize", *line), words)


def test_heads_that_vllm_lacks_on_a_cpu_are_refused_before_it_starts() -> None:
    _, config = resolve_model("tiny-qwen3")
    options = EngineOptions(engine="vllm", model=Path("m"))
    check_start(options, config)
    with pytest.raises(InputError, match="heads of 40 elements"):
        check_start(options, replace(config, head_dim=40))
    check_start(replace(options, device="cuda"), replace(config, head_dim=40))


#: Of a first column, which paragraphs do without.
_HEADINGS = {"fault", "option", "what", "name", "profile", "operator"}


def test_lists_break_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in (("faults", "--list"), ("engines",), ("contract", "list"), ("schema",), ("doctor",)):
        monkeypatch.setattr("tests.diffcheck.in_process.WIDTH", "80")
        narrow = rlk(*line).out
        monkeypatch.setattr("tests.diffcheck.in_process.WIDTH", None)
        piped = rlk(*line).out
        assert "…" not in narrow + piped
        words = {word.rstrip(":") for word in narrow.split()}
        assert {word.rstrip(":") for word in piped.split()} - _HEADINGS <= words
    monkeypatch.setattr("tests.diffcheck.in_process.WIDTH", None)
    assert all(line.split()[0] in FAULTS | CONTROLS | REAL_FAULTS | REAL_CONTROLS for line in fault_rows())


def fault_rows() -> list[str]:
    """A row a line, whatever the width: what a pipe's reader counts on."""
    return rlk("faults", "--list").out.splitlines()[1:]


@pytest.mark.parametrize(
    ("program", "words", "found"),
    [
        ("rlk-diff", "rlk-diff loc", "localize"),
        ("rlk-diff", "rlk-diff localize --rollout-o", "--rollout-option"),
        ("rlk-grpo", "rlk-grpo rep", "report"),
    ],
)
def test_a_shell_completes_commands_and_options(program: str, words: str, found: str) -> None:
    script = Path(sys.executable).with_name(program)
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    given = {variable: "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run([script], env={**os.environ, **given}, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [found], (done.stdout, done.stderr)
    shown = subprocess.run(
        [script, "--show-completion", "bash"],
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert variable in shown.stdout, shown.stderr
