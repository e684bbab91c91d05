"""The whole forward of Hugging Face's Qwen3 in bfloat16, reproduced bit for bit by NumPy under its profile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reference.contract import profile
from reference.models.qwen3 import forward
from tests.reference.exact import assert_same_bits
from tests.reference.models.tiny_model import batch, config, weights
from tests.reference.native.processor import modelled_processor

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CONFIG = config(num_hidden_layers=3, hidden_size=128, intermediate_size=384, num_key_value_heads=2, head_dim=32)
TOKENS = batch(65)[0]


def hugging_face(weights_: dict[str, Any]) -> Any:
    settings = {k: v for k, v in CONFIG.__dict__.items() if k not in ("architecture", "dtype", "qk_norm", "o_bias")}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings, attn_implementation="eager"))
    inv_freq = model.model.rotary_emb.inv_freq
    model = model.to(torch.bfloat16).eval()
    model.model.rotary_emb.inv_freq = inv_freq  # loading a checkpoint keeps it in float32; a cast of the model does not
    model.load_state_dict({name: torch.from_numpy(w).bfloat16() for name, w in weights_.items()})
    return model


def observed(model: Any) -> dict[str, Any]:
    """Output of every module of one forward, by boundary name, and the log-probabilities of the next tokens."""
    seen: dict[str, Any] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if not torch.is_tensor(value) or value.shape[1] != len(TOKENS) - 1:
                return
            seen[name] = value.detach().float().numpy().reshape(len(TOKENS) - 1, -1)
            source = {"o_proj": "attention", "down_proj": "act"}.get(name.rpartition(".")[2])
            if source:
                before = inputs[0].detach().float().numpy().reshape(len(TOKENS) - 1, -1)
                seen[f"{name.rpartition('.')[0]}.{source}"] = before

        return hook

    for name, module in model.model.named_modules():
        if name.count(".") != 1 or not name.startswith("layers."):
            module.register_forward_hook(keep(name))
        else:
            module.register_forward_hook(keep(f"{name}.mlp_residual"))
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS[:-1]])).logits[0].float()
    seen["logits"] = logits.numpy()
    chosen = torch.log_softmax(logits, dim=-1)[torch.arange(len(TOKENS) - 1), torch.tensor(TOKENS[1:])]
    return {**seen, "logprobs": chosen.numpy()[:, None]}


@modelled_processor
def test_every_boundary_and_logprob_is_equal() -> None:
    w = weights(CONFIG)
    theirs, ours = observed(hugging_face(w)), {}

    def observe(name: str, sample: Any, position: Any, values: Any) -> None:
        ours[name] = values.copy()

    forward(w, CONFIG, [TOKENS], profile("transformers-5-eager"), observe=observe)
    common = [name for name in ours if name in theirs]
    assert len(common) == 3 * 14 + 4  # all but rope, caches, attn_residual (not modules) and what follows the logits
    for name in common:
        assert_same_bits(ours[name], np.ascontiguousarray(theirs[name]))
