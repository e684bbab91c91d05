"""What is loaded into a live vLLM later is digested too, and what a torn update leaves behind is called undefined."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from diffcheck.base.record import weight_digest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from diffcheck.capture.vllm.loader import DIGESTS, _digesting, fused_with  # noqa: E402

pytestmark = pytest.mark.engines
LAYER = "model.layers.0"
Q, K, V = (f"{LAYER}.self_attn.{x}_proj.weight" for x in "qkv")


def test_names_that_share_a_module() -> None:
    assert fused_with(Q) == fused_with(V) == {Q, K, V}
    assert fused_with(f"{LAYER}.self_attn.k_proj.bias") == {f"{LAYER}.self_attn.{x}_proj.bias" for x in "qkv"}
    assert fused_with(f"{LAYER}.mlp.up_proj.weight") == {f"{LAYER}.mlp.{x}_proj.weight" for x in ("gate", "up")}
    for alone in (f"{LAYER}.mlp.down_proj.weight", f"{LAYER}.self_attn.q_norm.weight", "lm_head.weight"):
        assert fused_with(alone) == {alone}


def test_digests_follow_what_is_loaded() -> None:
    model = SimpleNamespace(**{DIGESTS: dict.fromkeys((Q, K, V, "lm_head.weight"), "old")})
    received = []

    def load(weights: object) -> set[str]:
        received.extend(weights)  # type: ignore[arg-type]
        return {name for name, _ in received}

    reload = _digesting(model, load, torch.bfloat16)
    one, head = torch.full((2, 2), 1.0), torch.full((2, 2), 1.001)
    assert reload([(name, one) for name in (Q, K, V)] + [("lm_head.weight", head), ("not.a.weight", one)]) == {
        Q,
        K,
        V,
        "lm_head.weight",
        "not.a.weight",
    }
    digests = getattr(model, DIGESTS)
    # The head is digested as the engine holds it: 1.001 is 1 in bfloat16.
    assert digests == dict.fromkeys((Q, K, V, "lm_head.weight"), weight_digest(one)) and len(received) == 5
    reload([(Q, 2 * one)])
    assert digests[Q] == weight_digest(2 * one) and digests["lm_head.weight"] == weight_digest(one)
    assert digests[K] == digests[V] == f"undefined: {Q} was sent without it"
