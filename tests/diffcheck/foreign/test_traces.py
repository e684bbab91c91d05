"""Dumps of tensors: what a project's own writer kept of a forward has the bits that our own capture of it has."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diffcheck.base.errors import ExitCode
from diffcheck.base.models import resolve_model
from diffcheck.base.samples import load_samples
from diffcheck.trace.reader import Trace
from tests.diffcheck.in_process import refused, rlk

torch = pytest.importorskip("torch")
MODEL = "tiny-qwen3"
PROMPT, RESPONSE = [5, 9, 31, 77], [8, 4, 200]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One sequence, and our own capture of it in transformers."""
    folder = tmp_path_factory.mktemp("foreign")
    samples = folder / "s.jsonl"
    samples.write_text(json.dumps({"prompt_token_ids": PROMPT, "response_token_ids": RESPONSE}) + "\n")
    done = rlk("capture", "--engine", "transformers", "--phase", "prefill", "--samples", str(samples),
               "--option", "attn_implementation=eager", "--out", str(folder / "ours"))  # fmt: skip
    assert done.code == 0, done.err
    return folder


#: Runs the same forward in transformers under another project's dumper; argument: where to.
_MODEL = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({model!r}, dtype=torch.bfloat16, attn_implementation="eager").eval()
ids = torch.tensor([{ids}])
out = sys.argv[1]
"""
_DEBUGGER = """
from transformers.model_debugging_utils import model_addition_debugger_context
with model_addition_debugger_context(model, debug_path=out, do_prune_layers={prune}, use_repr={repr}), torch.no_grad():
    model(input_ids=ids, use_cache=False)
"""


def dump_hf(out: Path, *, prune: bool = False, printed: bool = False) -> Path:
    folder, _ = resolve_model(MODEL)
    code = _MODEL.format(model=str(folder), ids=(PROMPT + RESPONSE)[:-1])
    code += _DEBUGGER.format(prune=prune, repr=printed)
    subprocess.run([sys.executable, "-c", code, str(out)], check=True, capture_output=True)
    return out


def same_bits(ours: Trace, theirs: Trace) -> set[str]:
    """Boundaries of ``theirs``, each of which has ``ours``' digest."""
    for name, entry in theirs.header.boundaries.items():
        assert entry.sha256 == ours.entry(name).sha256, name
    return set(theirs.header.boundaries)


def test_hf_debugger_has_the_bits_of_our_capture(home: Path, tmp_path: Path) -> None:
    dump = dump_hf(tmp_path / "dump")
    out = tmp_path / "trace"
    done = rlk("import", "hf-debugger", str(dump), "--model", MODEL, "--samples", str(home / "s.jsonl"),
               "--out", str(out))  # fmt: skip
    assert done.code == 0, done.err
    seen = same_bits(Trace(home / "ours"), Trace(out))
    layers = {f"layers.{n}" for n in range(3)}
    for layer in layers:
        for part in ("input_layernorm", "self_attn.attention", "self_attn.q_norm", "attn_residual", "mlp.act",
                     "mlp_residual", "mlp.down_proj"):  # fmt: skip
            assert f"{layer}.{part}" in seen
    assert {"embed_tokens", "norm", "logits"} <= seen
    header = Trace(out).header
    assert "logprobs" in header.unobserved and "layers.0.self_attn.q_rope" in header.unobserved
    assert "weights" in header.object.unknown and header.phase == "imported"
    verdict = tmp_path / "v.json"
    done = rlk("compare", str(home / "ours"), str(out), "--json", str(verdict))
    assert done.code != ExitCode.DIVERGED, done.out
    assert json.loads(verdict.read_text())["coverage"]["observed"] == len(seen)


def test_hf_debugger_of_printed_values_and_of_hostile_names_is_refused(home: Path, tmp_path: Path) -> None:
    out, printed = tmp_path / "trace", dump_hf(tmp_path / "printed", printed=True)
    common = ("--model", MODEL, "--out", str(out))
    refused(rlk("import", "hf-debugger", str(printed), *common), "printed text")
    tree = tmp_path / "Evil_debug_tree_FULL_TENSORS.json"
    value = {"shape": "[1]", "dtype": "int64", "value": "../../etc/passwd"}
    tree.write_text(json.dumps({"module_path": "Evil", "inputs": {"kwargs": {"input_ids": value}}}))
    refused(rlk("import", "hf-debugger", str(tree), *common), "is no name of a file")
    tree.write_text('{"module_path": "Evil"}')
    refused(rlk("import", "hf-debugger", str(tree), *common), "no input_ids")
    assert not out.exists()


def values_of(trace: Trace, name: str) -> Any:
    import numpy as np

    return torch.from_numpy(trace.values(name).view(np.int16).copy()).view(torch.bfloat16)


def bundle(folder: Path, trace: Trace, tokens: str) -> Path:
    """A bundle of RL-Kernel as its `Capture` writes one: two ranks of down_proj, one of an automatic norm."""
    rows = trace.entry("norm").shape[0]
    specs = [
        {"id": "layers.0.mlp.down_proj", "module": "m", "stage": "out", "positions": list(range(rows)), "width": 128},
        {"id": "auto.model_norm.output", "module": "auto", "stage": "output", "positions": list(range(rows)),
         "width": None, "dynamic_width": True, "module_path": "model.norm"},
    ]  # fmt: skip
    (folder / "captures").mkdir(parents=True)
    manifest = {"schema_version": "rlkernel.capture.v1", "scope": "test", "boundaries": specs}
    (folder / "capture-manifest.json").write_text(json.dumps(manifest))
    down, norm = values_of(trace, "layers.0.mlp.down_proj"), values_of(trace, "norm")
    pieces = [(specs[0]["id"], down[:, :64], 0), (specs[0]["id"], down[:, 64:], 64), (specs[1]["id"], norm, 0)]
    for i, (name, value, offset) in enumerate(pieces):
        record = {
            "schema_version": "rlkernel.capture.v1", "boundary": name, "side": "training",
            "identity": {"tokens": tokens}, "contracts": {}, "route": "r", "tensors": {"value": value.contiguous()},
            "metadata": {"stage_positions": {"value": torch.arange(rows)}, "feature_offsets": {"value": offset},
                         "feature_sizes": {"value": 128}},
        }  # fmt: skip
        torch.save(record, folder / "captures" / f"training-rank0-call{i}.pt")
        (folder / "captures" / f"training-rank0-call{i}.lock").touch()
    return folder


def fingerprint(tensor: Any) -> str:
    """As RL-Kernel's ``debug/core.py`` defines it."""
    digest = hashlib.sha256(str((tuple(tensor.shape), tensor.dtype)).encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_a_bundle_of_rl_kernel(home: Path, tmp_path: Path) -> None:
    ours = Trace(home / "ours")
    tokens = fingerprint(torch.tensor((PROMPT + RESPONSE)[:-1]))
    folder, out = bundle(tmp_path / "b", ours, tokens), tmp_path / "trace"
    common = ("import", "rl-kernel", str(folder), "--model", MODEL, "--out", str(out))
    with_sample = (*common, "--samples", str(home / "s.jsonl"))
    done = rlk(*with_sample, "--side", "training")
    assert done.code == 0, done.err
    assert same_bits(ours, Trace(out)) == {"layers.0.mlp.down_proj", "norm"}
    refused(rlk(*with_sample, "--side", "training"), "already exists")
    refused(rlk(*with_sample), "two sides")
    refused(rlk(*with_sample, "--side", "rollout", "--overwrite"), "nothing of side rollout")
    refused(rlk(*common, "--side", "training", "--overwrite"), "fingerprint")
    (folder / "captures" / "training-rank1-call0.lock").touch()
    refused(rlk(*with_sample, "--side", "training", "--overwrite"), "interrupted")
    other = bundle(tmp_path / "c", ours, "0" * 64)
    refused(
        rlk("import", "rl-kernel", str(other), *with_sample[3:], "--side", "training", "--overwrite"), "fingerprint"
    )


def pass_file(trace: Trace) -> dict[str, Any]:
    """A forward as SGLang's dumper keeps it: fused projections, norms with the residual sum."""
    v = lambda name: values_of(trace, name)  # noqa: E731
    rows = trace.entry("norm").shape[0]
    kept: dict[str, Any] = {
        "model.embed_tokens": v("embed_tokens"),
        "model.norm": [v("norm"), v("layers.2.mlp_residual")],
        "model.forward_batch_info.input_ids": torch.tensor((PROMPT + RESPONSE)[:-1]),
        "model.forward_batch_info.seq_lens": torch.tensor([rows]),
        "model.forward_batch_info.positions": torch.arange(rows),
    }
    for n in range(3):
        layer, mine = f"model.layers.{n}", f"layers.{n}"
        first = v(f"{mine}.input_layernorm")
        kept[f"{layer}.input_layernorm"] = [first, v(f"layers.{n - 1}.mlp_residual")] if n else first
        kept[f"{layer}.self_attn.qkv_proj"] = torch.cat([v(f"{mine}.self_attn.{x}_proj") for x in "qkv"], 1)
        kept[f"{layer}.self_attn.q_norm"] = v(f"{mine}.self_attn.q_norm").reshape(-1, 32)
        kept[f"{layer}.self_attn.rotary_emb"] = [v(f"{mine}.self_attn.{x}_rope") for x in "qk"]
        kept[f"{layer}.self_attn.attn"] = v(f"{mine}.self_attn.attention")
        kept[f"{layer}.self_attn.o_proj"] = v(f"{mine}.self_attn.o_proj")
        kept[f"{layer}.post_attention_layernorm"] = [v(f"{mine}.post_attention_layernorm"), v(f"{mine}.attn_residual")]
        kept[f"{layer}.mlp.gate_up_proj"] = torch.cat([v(f"{mine}.mlp.{x}_proj") for x in ("gate", "up")], 1)
        kept[f"{layer}.mlp.act_fn"] = v(f"{mine}.mlp.act")
        kept[f"{layer}.mlp.down_proj"] = v(f"{mine}.mlp.down_proj")
    return kept


def test_a_dump_of_sglang(home: Path, tmp_path: Path) -> None:
    ours = Trace(home / "ours")
    rank = tmp_path / "dump" / "TP0_PP0_Rank0_pid7"
    rank.mkdir(parents=True)
    torch.save(pass_file(ours), rank / "Pass00000.pt")
    out = tmp_path / "trace"
    common = ("import", "sglang", str(tmp_path / "dump"), "--model", MODEL, "--samples", str(home / "s.jsonl"))
    done = rlk(*common, "--out", str(out))
    assert done.code == 0, done.err
    seen = same_bits(ours, Trace(out))
    assert {"layers.1.self_attn.k_proj", "layers.2.self_attn.q_rope", "layers.1.attn_residual", "layers.0.mlp.act",
            "layers.2.mlp_residual", "layers.0.self_attn.q_norm"} <= seen  # fmt: skip
    assert "layers.0.self_attn.k_cache" not in seen and "logprobs" not in seen
    (tmp_path / "dump" / "TP0_PP1_Rank1_pid8").mkdir()
    refused(rlk(*common, "--out", str(tmp_path / "no")), "pipeline stage 1")


def test_two_ranks_of_sglang_are_joined(home: Path, tmp_path: Path) -> None:
    ours = Trace(home / "ours")
    whole = pass_file(ours)
    for rank in range(2):
        part = dict(whole)
        for name in whole:
            if name.endswith("act_fn"):
                part[name] = whole[name].chunk(2, 1)[rank].clone()
            elif name.endswith("gate_up_proj"):
                part[name] = torch.cat([x.chunk(2, 1)[rank] for x in whole[name].chunk(2, 1)], 1)
            elif name.endswith("qkv_proj"):
                part[name] = torch.cat([x.chunk(2, 1)[rank] for x in whole[name].split((128, 64, 64), 1)], 1)
            elif name.endswith("q_norm"):
                part[name] = whole[name].reshape(-1, 128).chunk(2, 1)[rank].reshape(-1, 32).clone()
            elif name.endswith("rotary_emb"):
                part[name] = [x.chunk(2, 1)[rank].clone() for x in whole[name]]
            elif name.endswith("attn"):
                part[name] = whole[name].chunk(2, 1)[rank].clone()
        folder = tmp_path / "dump" / f"TP{rank}_PP0_Rank{rank}_pid{rank}"
        folder.mkdir(parents=True)
        torch.save(part, folder / "Pass00000.pt")
    out = tmp_path / "trace"
    done = rlk("import", "sglang", str(tmp_path / "dump"), "--model", MODEL, "--out", str(out),
               "--samples", str(home / "s.jsonl"))  # fmt: skip
    assert done.code == 0, done.err
    seen = same_bits(ours, Trace(out))
    assert {"layers.1.self_attn.v_proj", "layers.1.self_attn.q_norm", "layers.0.mlp.up_proj"} <= seen


def test_a_dump_of_msprobe(home: Path, tmp_path: Path) -> None:
    """Written to the format; `docs/import.md` says what was made by its own writer."""
    ours = Trace(home / "ours")
    data = tmp_path / "dump" / "dump_tensor_data"
    data.mkdir(parents=True)
    v = lambda name: values_of(ours, name)[None].clone()  # noqa: E731
    calls = {
        "Module.model.embed_tokens.Embedding.forward.0": (
            [torch.tensor([(PROMPT + RESPONSE)[:-1]])],
            [v("embed_tokens")],
        ),
        "Module.model.layers.0.mlp.down_proj.Linear.forward.0": (
            [v("layers.0.mlp.act")],
            [v("layers.0.mlp.down_proj")],
        ),
        "Module.model.norm.Qwen3RMSNorm.forward.0": ([v("layers.2.mlp_residual")], [v("norm")]),
        "Module.model.norm.Qwen3RMSNorm.forward.1": ([], []),
    }
    entries = {}
    for name, (inputs, outputs) in calls.items():
        described: dict[str, list[Any]] = {"input": [], "output": []}
        for part, tensors in (("input", inputs), ("output", outputs)):
            for i, tensor in enumerate(tensors):
                file = f"{name}.{part}.{i}.pt"
                torch.save(tensor, data / file)
                described[part].append({"type": "torch.Tensor", "data_name": file})
        entries[name] = {"input_args": described["input"], "input_kwargs": {}, "output": described["output"]}
    document = {"task": "tensor", "level": "L0", "framework": "pytorch", "data": entries}
    (tmp_path / "dump" / "dump.json").write_text(json.dumps(document))
    out = tmp_path / "trace"
    common = ("import", "msprobe", str(tmp_path / "dump"), "--model", MODEL, "--samples", str(home / "s.jsonl"))
    done = rlk(*common, "--out", str(out))
    assert done.code == 0, done.err
    assert same_bits(ours, Trace(out)) == {
        "embed_tokens", "layers.0.mlp.act", "layers.0.mlp.down_proj", "layers.2.mlp_residual", "norm",
    }  # fmt: skip
    (tmp_path / "dump" / "dump.json").write_text(json.dumps({**document, "task": "statistics"}))
    refused(rlk(*common, "--out", str(tmp_path / "no")), "keeps no values")


def test_what_is_not_known_is_not_written(home: Path, tmp_path: Path) -> None:
    dump = dump_hf(tmp_path / "dump", prune=True)
    out = tmp_path / "trace"
    assert rlk("import", "hf-debugger", str(dump), "--model", MODEL, "--out", str(out)).code == 0
    # Layer 1 was left out of the tree, and without samples there is no response.
    assert not any(
        name.startswith("layers.1.") and name != "layers.1.mlp_residual" for name in Trace(out).header.boundaries
    )
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt_token_ids": [1, 2], "response_token_ids": [3]}\n')
    refused(rlk("import", "hf-debugger", str(dump), "--model", MODEL, "--out", str(tmp_path / "no"),
                "--samples", str(other)), "none of the samples")  # fmt: skip
    assert load_samples(home / "s.jsonl")[0].token_ids == tuple(PROMPT + RESPONSE)
