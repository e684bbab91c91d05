"""The weights are what the index names; a folder that libraries read differently is refused, with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from diffcheck.base.checkpoint import INDEX, SINGLE, read_checkpoint
from diffcheck.base.errors import InputError
from diffcheck.base.model_notes import model_notes
from diffcheck.base.models import resolve_model
from diffcheck.capture.live import Checkpoint
from reference.models.weights import weight_shapes

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 11,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}
Tensors = dict[str, np.ndarray]  # type: ignore[type-arg]
HEAD, LAST = "lm_head.weight", "model.layers.1.mlp.up_proj.weight"


def tensors(seed: int = 0) -> Tensors:
    from reference.models.config import ModelConfig

    rng = np.random.default_rng(seed)
    shapes = weight_shapes(ModelConfig.from_dict(CONFIG))
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes}


def model(folder: Path, **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def sharded(folder: Path) -> Tensors:
    """Two shards and their index; what an engine must read."""
    whole = tensors()
    names = sorted(whole)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, part in parts.items():
        save_file({n: whole[n] for n in part}, folder / file)
    index = {"metadata": {}, "weight_map": {n: file for file, part in parts.items() for n in part}}
    (folder / INDEX).write_text(json.dumps(index))
    return whole


def test_what_the_index_names_is_the_model(tmp_path: Path) -> None:
    """Files of earlier steps and of other names lie beside it, before and after it in the alphabet."""
    import torch

    whole = sharded(model(tmp_path))
    others = ("a.safetensors", "consolidated.safetensors", "model-00003-of-00003.safetensors", "z.safetensors")
    for i, name in enumerate(others):
        save_file(tensors(i + 1), tmp_path / name)
    resolve_model(str(tmp_path))
    checkpoint = Checkpoint(tmp_path, torch.float32)
    assert set(checkpoint) == set(whole)
    assert all(np.array_equal(checkpoint[n].numpy(), whole[n]) for n in whole)
    assert [p.name for p in read_checkpoint(tmp_path).unread] == list(others)


def test_one_file_is_the_model_and_another_of_other_names_is_not(tmp_path: Path) -> None:
    save_file(tensors(), model(tmp_path) / SINGLE)
    save_file({"optimizer.step": np.zeros(1, np.float32)}, tmp_path / "optimizer.safetensors")
    resolve_model(str(tmp_path))
    assert [p.name for p in read_checkpoint(tmp_path).unread] == ["optimizer.safetensors"]


def edit_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = json.loads((folder / INDEX).read_text())
        change(data["weight_map"])
        (folder / INDEX).write_text(json.dumps(data))

    return apply


def edit_shard(number: int, change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / f"model-0000{number}-of-00002.safetensors"
        held = load_file(path)
        change(held)
        save_file(held, path)

    return apply


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: (d / "model-00002-of-00002.safetensors").unlink(), "model-00002-of-00002.safetensors: named by"),
        (edit_shard(2, lambda t: t.update({HEAD: t[LAST]})), f"{HEAD} is in model-00001"),
        (edit_shard(2, lambda t: t.pop(LAST)), f"says that {LAST} is in model-00002"),
        (edit_index(lambda m: m.pop(LAST)), f"holds {LAST}, but {INDEX} does not name it"),
        (edit_index(lambda m: m.update({LAST: m[HEAD]})), "says it is in model-00001"),
        (edit_index(lambda m: m.update({LAST: "../x.safetensors"})), "does not name files of this folder"),
        (lambda d: (d / INDEX).write_text("{}"), "not an index of weights"),
        (lambda d: save_file(tensors(), d / SINGLE), f"{SINGLE} lies beside {INDEX}"),
        (lambda d: (d / INDEX).unlink(), f"without {INDEX}"),
        (lambda d: (d / "adapter_config.json").write_text("{}"), "an adapter beside the weights"),
        (
            lambda d: (d / "model-00001-of-00002.safetensors").write_bytes(
                (d / "model-00001-of-00002.safetensors").read_bytes()[:-4]
            ),
            "not a whole safetensors file: truncated",
        ),
    ],
)
def test_a_folder_of_which_libraries_make_different_models_is_refused(
    change: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    sharded(model(tmp_path))
    change(tmp_path)
    with pytest.raises(InputError) as caught:
        resolve_model(str(tmp_path))
    assert words in caught.value.cause and caught.value.remedy


def test_a_second_file_with_the_same_names_and_no_index_is_refused(tmp_path: Path) -> None:
    save_file(tensors(), model(tmp_path) / SINGLE)
    save_file(tensors(1), tmp_path / "old.safetensors")
    with pytest.raises(InputError, match=r"is in model\.safetensors and in old\.safetensors"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(LAST), f"weight {LAST} is missing"),
        (lambda t: t.update({LAST: t[LAST][:, :4].copy()}), "have shape (12, 4), config.json describes (12, 8)"),
        (lambda t: t.update({LAST: t[LAST].astype(np.int8)}), "is stored as I8: quantised"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[LAST].copy()}),
            "model.layers.2.mlp.up_proj.weight has no",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(8, np.float32)}),
            "q_proj.bias has no place",
        ),
    ],
)
def test_weights_that_are_not_those_of_the_configuration_are_refused(
    change: Callable[[Tensors], object], words: str, tmp_path: Path
) -> None:
    held = tensors()
    change(held)
    save_file(held, model(tmp_path) / SINGLE)
    with pytest.raises(InputError) as caught:
        resolve_model(str(tmp_path))
    assert words in caught.value.cause


def test_a_tied_flag_beside_a_head_of_its_own(tmp_path: Path) -> None:
    """A copy of the embedding is no contradiction, nor is a table that every library makes anew."""
    held = tensors()
    save_file(held, model(tmp_path, tie_word_embeddings=True) / SINGLE)
    with pytest.raises(InputError, match="ties lm_head to the embedding"):
        resolve_model(str(tmp_path))
    held[HEAD] = held["model.embed_tokens.weight"].copy()
    held["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    save_file(held, tmp_path / SINGLE)
    _, config = resolve_model(str(tmp_path))
    assert config.tie_word_embeddings


def test_what_was_cast_or_not_used_is_said(tmp_path: Path) -> None:
    """Exactly what differs: a model in the run's own dtype, read whole, has nothing to say."""
    held = {n: t.astype(np.float16) for n, t in tensors().items()}
    save_file(held, model(tmp_path) / SINGLE)
    (cast,) = model_notes(tmp_path, "bfloat16")
    assert "stored in float16: its weights were cast to bfloat16, which rounds them" in cast
    assert model_notes(tmp_path, "float16") == []
    (widened,) = model_notes(tmp_path, "float32")
    assert widened.endswith("were cast to float32.")
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "x.safetensors")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "top_p": 1.0, "repetition_penalty": 1.05}')
    unread, asked = model_notes(tmp_path, "float16")
    assert "not read: x.safetensors" in unread
    assert "asks for temperature 0.7, repetition_penalty 1.05:" in asked
