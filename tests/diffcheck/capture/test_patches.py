"""A function of the user's changes the live model of one side, and the verdict names what it changed."""

from __future__ import annotations

import colorsys  # noqa: F401  a module that is there before a patch changes it
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diffcheck.base.errors import ExitCode, InputError
from diffcheck.capture.patches import apply_patches, parse_patch
from tests.diffcheck.cli.test_cli import refused, rlk

DOCS = Path(__file__).parents[3] / "docs" / "patches.md"


def example(folder: Path) -> Path:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    path = folder / "gate.py"
    path.write_text(code)
    return path


@pytest.mark.engines
def test_the_documented_example_is_found_where_it_is(tmp_path: Path) -> None:
    path, out = example(tmp_path), tmp_path / "v.json"
    done = rlk(
        *("localize", "--rollout", "megatron", "--train", "megatron"),
        *("--patch", f"{path}:sigmoid_of_1_702", "--json", str(out)),
    )
    assert done.returncode == ExitCode.DIVERGED, done.stderr
    verdict = json.loads(out.read_text())
    assert verdict["first_divergence"]["boundary"] == "layers.1.mlp.act"
    assert [r["name"] for r in verdict["boundaries"] if r["status"] == "origin"] == ["layers.1.mlp.act"]
    assert verdict["evidence"]["left"]["changed"] == []
    assert verdict["evidence"]["right"]["changed"][0].startswith(f"patch {path}:sigmoid_of_1_702 (sha256 ")
    assert "changed on purpose: patch" in done.stdout


@pytest.mark.engines
def test_a_scalar_that_only_a_kernel_knows_is_found_from_its_bits(tmp_path: Path) -> None:
    """Megatron's first norm has the model's epsilon in its module, and computes with another."""
    path, out = tmp_path / "epsilon.py", tmp_path / "v.json"
    path.write_text(
        "def inside(model):\n"
        "    norm = model.decoder.layers[0].input_layernorm\n"
        "    forward = norm.forward\n"
        "    def run(*given):\n"
        "        kept, norm.eps = norm.eps, 1e-3\n"
        "        try:\n"
        "            return forward(*given)\n"
        "        finally:\n"
        "            norm.eps = kept\n"
        "    norm.forward = run\n"
    )
    sides = ("--rollout", "megatron", "--train", "megatron")
    done = rlk("localize", *sides, "--infer", "--patch", f"{path}:inside", "--json", str(out))
    assert done.returncode == ExitCode.DIVERGED, done.stderr
    verdict = json.loads(out.read_text())
    assert verdict["first_divergence"]["boundary"] == "layers.0.input_layernorm"
    (left,), (right,) = verdict["contracts"]["left"], verdict["contracts"]["right"]
    assert left["status"] == "match" and left["scalar"] is None
    scalar = right["scalar"]
    assert (scalar["name"], scalar["value"], scalar["configured"]) == ("epsilon", 1e-3, 1e-6)
    assert scalar["lowest"] <= 1e-3 <= scalar["highest"] and scalar["elements"] == right["elements"]
    assert "departs from the model: it computes with epsilon 0.001" in " ".join(done.stdout.replace("│", " ").split())


def test_a_patched_trace_is_explained_without_an_engine(tmp_path: Path) -> None:
    """`capture --patch`, then `compare --infer`: a bent weight is another object; the same trace is equal."""
    (tmp_path / "p.py").write_text(
        "def bend(weights):\n    weights['model.layers.0.input_layernorm.weight'][3] *= 2\n"
        "def broken(weights):\n    return weights['nowhere']\n"
    )
    for name, more in (("a", ()), ("b", ("--patch", f"rollout/{tmp_path}/p.py:bend"))):
        done = rlk("capture", "--engine", "reference", "--out", str(tmp_path / name), *more)
        assert done.returncode == ExitCode.EQUAL, done.stderr
    done = rlk("compare", str(tmp_path / "a"), str(tmp_path / "b"), "--infer")
    assert done.returncode == ExitCode.NOT_COMPARABLE
    assert "weights.model.layers.0.input_layernorm.weight" in done.stdout
    done = rlk("capture", "--engine", "reference", "--out", str(tmp_path / "c"), "--patch", f"{tmp_path}/p.py:broken")
    refused(done, f"patch broken failed at {tmp_path}/p.py:4: KeyError: 'nowhere'")
    assert not (tmp_path / "c").exists()


def test_compare_infers_what_localize_infers(tmp_path: Path) -> None:
    """Two traces whose contracts differ in one field: named from the traces alone."""
    override = ("--override", "layers.*.input_layernorm: rounding.normalised=bfloat16")
    for name, more in (("a", ()), ("b", override)):
        done = rlk("capture", "--engine", "reference", "--out", str(tmp_path / name), *more)
        assert done.returncode == ExitCode.EQUAL, done.stderr
    out = tmp_path / "v.json"
    done = rlk("compare", str(tmp_path / "a"), str(tmp_path / "b"), "--infer", "--json", str(out))
    assert done.returncode == ExitCode.DIVERGED, done.stderr
    assert "rounding.normalised" in [d["field"] for d in json.loads(out.read_text())["contracts"]["differs_in"]]
    refused(
        rlk("compare", str(tmp_path / "a"), str(tmp_path / "b"), "--model", "tiny-qwen3"), "--model is read by --infer"
    )


def test_a_side_or_a_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").write_text("def f(model): pass\n")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "q.py").write_text("def f(model): pass\n")
    assert parse_patch("p.py:f").side == "train"
    assert parse_patch("rollout/p.py:f").side == "rollout"
    found = parse_patch("train/q.py:f", "rollout")
    assert (found.side, found.file) == ("rollout", tmp_path / "train" / "q.py")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("p.py", "malformed"),
        ("p.py:", "malformed"),
        ("none.py:f", "none.py: no such file"),
        ("p.py:g", "has no function 'g'"),
        ("torn.py:f", "is not Python"),
    ],
)
def test_what_is_no_patch_is_refused(text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").write_text("def f(model): return model\n")
    (tmp_path / "torn.py").write_text("def f(")
    with pytest.raises(InputError, match=words):
        parse_patch(text)
    with pytest.raises(InputError, match="returned dict"):
        apply_patches([(str(tmp_path / "p.py"), "f")], {})


class Small(torch.nn.Module):
    """A model with what patches change: weights, submodules that share a configuration, a class's method, a hook."""

    def __init__(self) -> None:
        super().__init__()
        shared = SimpleNamespace(eps=1e-6, act=torch.nn.functional.silu, table={"factor": 1})
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.first.config = self.second.config = shared
        self.itself = [self]


@pytest.mark.parametrize(
    "body",
    [
        "pass",
        "model.secnd = None",
        "model.first.config.epsilon = 1e-3",
        "model.first.weight.data.copy_(model.first.weight.clone())",
        "model.first.weight.clone().mul_(2)",
        "import copy; model.second.config = copy.copy(model.second.config)",
        "import colorsys; model.first.bais = colorsys.rgb_to_hsv",
        "model.second.extra = type(model.second)(3, 3)",
    ],
)
def test_a_patch_that_changes_nothing_stops_the_run(body: str, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(f"def f(model):\n    {body}\n")
    with pytest.raises(InputError, match="f changed nothing of the live model"):
        apply_patches([(str(tmp_path / "p.py"), "f")], Small())


@pytest.mark.parametrize(
    "body",
    [
        "model.first.weight.data[0, 0] *= -1",
        "model.first.config.eps = 1e-3",
        "import copy; model.second.config = copy.copy(model.second.config); model.second.config.eps = 1",
        "model.first.config.act = lambda x: x",
        "model.first.config.table['slope'] = 2",
        "model.first.forward = lambda x: x",
        "type(model).forward = lambda self, x: x",
        "model.first.register_forward_hook(lambda *given: None)",
        "import colorsys; colorsys.rgb_to_hsv = lambda *given: given",
        "model.first, model.second = model.second, model.first",
        "model.first = None",
    ],
)
def test_a_patch_that_changes_something_is_let_through(body: str, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(f"def f(model):\n    {body}\n")
    apply_patches([(str(tmp_path / "p.py"), "f")], Small())


def test_no_trace_is_left_of_a_patch_that_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("def f(weights):\n    weights['model.layers.9.mlp.gate_proj.weight'] = 0\n")
    done = rlk("capture", "--engine", "reference", "--out", str(tmp_path / "c"), "--patch", f"{tmp_path}/p.py:f")
    refused(done, "changed nothing of the live model")
    assert not (tmp_path / "c").exists()
