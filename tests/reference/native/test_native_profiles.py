"""The engines' profiles against what the engines call: PyTorch's own kernels, bit for bit in bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reference.contract import profile
from reference.operators import (
    DenseKeyValues,
    RopeTable,
    attention,
    linear,
    logprob,
    logsumexp,
    processed_logits,
    qk_norm,
    residual_add,
    rms_norm,
    rope,
    rope_table,
    swiglu,
)
from tests.reference.exact import assert_same_bits, bits
from tests.reference.native.processor import modelled_processor

torch = pytest.importorskip("torch")

VLLM, MEGATRON, TRANSFORMERS = (profile(n) for n in ("vllm-0.32-cpu", "megatron-0.16-local", "transformers-5-eager"))
EPSILON = 1e-6


def draw(seed: int, *shape: int, dtype: str = "bfloat16", scale: float = 1.0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(getattr(torch, dtype))


def numpy(tensor: Any) -> Any:
    return tensor.detach().float().numpy()


def cast_norm(x: Any, weight: Any) -> Any:
    """What vLLM and transformers compute from float32 ``x``: a cast to the weight's dtype, then the multiply."""
    normalised = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)
    return normalised.to(weight.dtype) * weight


@pytest.mark.parametrize("size", [64, 576, 1024, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_norms(size: int, dtype: str) -> None:
    x, residual = draw(1, 16, size, dtype=dtype, scale=2.0), draw(2, 16, size, dtype=dtype)
    weight = 1 + draw(3, size, dtype=dtype, scale=0.2)
    for engine in (VLLM, TRANSFORMERS):
        contract: Any = engine.contract("rms_norm", dtype)
        got = rms_norm(numpy(x), numpy(weight), EPSILON, contract).output
        assert_same_bits(got, numpy(cast_norm(x.float(), weight)))
    contract = VLLM.contract("rms_norm", dtype)
    fused = rms_norm(numpy(x), numpy(weight), EPSILON, contract, numpy(residual))
    assert_same_bits(fused.output, numpy(cast_norm(x.float() + residual.float(), weight)))
    assert fused.residual is not None
    assert_same_bits(fused.residual, numpy(x + residual))
    module = torch.nn.RMSNorm(size, eps=EPSILON, dtype=getattr(torch, dtype))
    module.weight.data = weight
    contract = MEGATRON.contract("rms_norm", dtype)
    assert_same_bits(rms_norm(numpy(x), numpy(weight), EPSILON, contract).output, numpy(module(x)))


def test_the_engines_norms_differ() -> None:
    """vLLM casts x/rms to bfloat16 before the weight multiply, torch.nn.RMSNorm does not: the first norm differs."""
    x, weight = numpy(draw(1, 16, 256)), numpy(1 + draw(3, 256, scale=0.2))
    outputs = [rms_norm(x, weight, EPSILON, e.contract("rms_norm")).output for e in (VLLM, MEGATRON)]  # type: ignore[arg-type]
    assert 0.05 < (bits(outputs[0]) != bits(outputs[1])).mean() < 0.6


def test_qk_norm() -> None:
    x, weight = draw(1, 8, 3, 64), 1 + draw(2, 64, scale=0.2)
    vllm: Any = VLLM.contract("qk_norm")
    assert_same_bits(qk_norm(numpy(x), numpy(weight), EPSILON, vllm), numpy(cast_norm(x.float(), weight)))
    module = torch.nn.RMSNorm(64, eps=EPSILON, dtype=torch.bfloat16)
    module.weight.data = weight
    megatron: Any = MEGATRON.contract("qk_norm")
    assert_same_bits(qk_norm(numpy(x), numpy(weight), EPSILON, megatron), numpy(module(x)))


def test_residual_add_and_swiglu() -> None:
    x, y = draw(1, 64, 256, scale=4.0), draw(2, 64, 256)
    for engine in (VLLM, MEGATRON, TRANSFORMERS):
        add: Any = engine.contract("residual_add")
        assert_same_bits(residual_add(numpy(x), numpy(y), add), numpy(x + y))
        gated: Any = engine.contract("swiglu")
        assert_same_bits(swiglu(numpy(x), numpy(y), gated), numpy(torch.nn.functional.silu(x) * y))


def torch_table(head_dim: int, length: int, theta: float) -> tuple[Any, Any]:
    inv_freq = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim))
    angle = torch.outer(torch.arange(length, dtype=torch.float), inv_freq)
    return angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 1e6), (128, 1e4)])
def test_rope(head_dim: int, theta: float) -> None:
    cos, sin = torch_table(head_dim, 300, theta)
    contract: Any = MEGATRON.contract("rope")
    table = rope_table(np.arange(300), head_dim, theta, contract)
    assert_same_bits(table.cos, numpy(cos))
    assert_same_bits(table.sin, numpy(sin))
    x = draw(1, 300, 2, head_dim)
    a, b = x.chunk(2, dim=-1)
    rotated = x * torch.cat([cos, cos], -1)[:, None] + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)[:, None]
    for engine in (MEGATRON, TRANSFORMERS):
        contract = engine.contract("rope")
        assert_same_bits(rope(numpy(x), table, contract), numpy(rotated))


@pytest.mark.engines
@pytest.mark.parametrize(("dtype", "rotate"), [("bfloat16", "mul_add"), ("float32", "fma_sin")])
def test_rope_of_vllm(dtype: str, rotate: str) -> None:
    """The C++ kernel keeps products in float32; its float32 form was compiled into FMAs."""
    platforms = pytest.importorskip("vllm.platforms")
    platforms.current_platform.import_kernels()
    cos, sin = (t.to(getattr(torch, dtype)) for t in torch_table(64, 200, 1e6))
    x = draw(1, 200, 4 * 64, dtype=dtype)
    rotated = x.clone()
    torch.ops._C.rotary_embedding(torch.arange(200), rotated, None, 64, torch.cat([cos, sin], -1).contiguous(), True)
    contract: Any = VLLM.contract("rope", dtype).override("primitives.rotate", rotate)
    got = rope(numpy(x).reshape(200, 4, 64), RopeTable(numpy(cos), numpy(sin)), contract)
    assert_same_bits(got.reshape(200, -1), numpy(rotated))


@pytest.mark.parametrize("vocabulary", [503, 1000])
def test_logprob(vocabulary: int) -> None:
    """Orders are exact; the logarithm, and MKL's exponential behind torch.exp, are correctly rounded in most cases."""
    logits, target = draw(1, 400, vocabulary, dtype="float32", scale=4.0), torch.arange(400)
    log_softmax = torch.log_softmax(logits, dim=-1)[target, target]
    shifted = logits - logits.max(-1, keepdim=True).values
    cross_entropy = -(shifted.exp().sum(-1).log() - shifted[target, target])
    for engine, expected, share in ((VLLM, log_softmax, 0.005), (MEGATRON, cross_entropy, 0.05)):
        sums: Any = engine.contract("logsumexp")
        formula: Any = engine.contract("logprob")
        got = logprob(logits.numpy(), target.numpy(), logsumexp(logits.numpy(), sums), formula)
        assert (bits(got) != bits(expected.numpy())).mean() <= share
        assert np.abs(got - expected.numpy()).max() < 2e-6


@pytest.mark.parametrize("keys", [7, 16, 100, 300])
def test_softmax_of_eager_attention(keys: int) -> None:
    """One head whose scores are its keys: the attention contract's softmax, told apart from its matrix products."""
    scores = draw(1, 1, keys, dtype="float32", scale=3.0)
    contract: Any = MEGATRON.contract("attention", "float32")
    expected = torch.softmax(scores, dim=-1)
    for key in (0, keys // 2, keys - 1):
        chosen = np.zeros((keys, 1, 1), np.float32)
        chosen[key] = 1  # picks one probability
        kv = DenseKeyValues(scores.numpy().reshape(keys, 1, 1), chosen)
        got = attention(np.ones((1, 1, 1), np.float32), np.array([keys - 1]), kv, contract, scale=1.0)
        assert_same_bits(got.ravel(), expected[0, key : key + 1].numpy())


def test_float32_silu() -> None:
    gate, up = draw(1, 64, 256, dtype="float32", scale=4.0), draw(2, 64, 256, dtype="float32")
    contract: Any = MEGATRON.contract("swiglu", "float32")
    assert_same_bits(swiglu(gate.numpy(), up.numpy(), contract), (torch.nn.functional.silu(gate) * up).numpy())


def cancelling(tokens: int, inputs: int, outputs: int, dtype: str) -> tuple[Any, Any]:
    """Operands whose products nearly cancel, so that bfloat16 outputs show the order of the sum."""
    half = inputs // 2
    x = draw(1, tokens, half, dtype="float32") * torch.exp2(draw(2, tokens, half, dtype="float32").mul(4).round())
    x = torch.cat([x, -x * (1 + 2.0**-7 * (draw(3, tokens, half, dtype="float32") > 0))], dim=1)
    w = draw(4, outputs, half, dtype="float32")
    return x.to(getattr(torch, dtype)), torch.cat([w, w], dim=1).to(getattr(torch, dtype))


@modelled_processor
@pytest.mark.parametrize(("inputs", "block"), [(64, 512), (128, 512), (512, 512), (576, 512), (1536, 1024)])
def test_bfloat16_linear(inputs: int, block: int) -> None:
    """FMAs in pairs, the odd element first; a new chain every 512 elements of K, or 1,024 where the library prefers."""
    x, w = cancelling(64, inputs, 96, "bfloat16")
    for engine in (VLLM, MEGATRON, TRANSFORMERS):
        contract: Any = engine.contract("linear").override("partition.block_k", block)
        got = linear(numpy(x), numpy(w), contract)
        assert_same_bits(got, numpy(torch.nn.functional.linear(x, w)))
    ascending = linear(numpy(x), numpy(w), contract.override("order.k", "ascending"))
    assert not np.array_equal(bits(ascending), bits(got))


@modelled_processor
@pytest.mark.parametrize("inputs", [128, 576, 1024])
def test_float32_linear(inputs: int) -> None:
    x, w = cancelling(64, inputs, 96, "float32")
    contract: Any = MEGATRON.contract("linear", "float32")
    assert_same_bits(linear(x.numpy(), w.numpy(), contract), torch.nn.functional.linear(x, w).numpy())


@modelled_processor
@pytest.mark.engines
@pytest.mark.parametrize(("inputs", "dtype"), [(128, "bfloat16"), (576, "bfloat16"), (576, "float32")])
def test_linear_of_vllm(inputs: int, dtype: str) -> None:
    pytest.importorskip("vllm.platforms").current_platform.import_kernels()
    operations = pytest.importorskip("vllm._custom_ops")
    x, w = cancelling(16, inputs, 96, dtype)
    expected = operations.onednn_mm(operations.create_onednn_mm(w.t(), 16), x, None)
    contract: Any = VLLM.contract("linear", dtype)
    assert_same_bits(linear(numpy(x), numpy(w), contract), numpy(expected))


@modelled_processor
@pytest.mark.parametrize(("length", "head_dim"), [(20, 32), (100, 64), (200, 128)])
def test_eager_attention(length: int, head_dim: int) -> None:
    """Megatron's unfused attention, batched product by batched product, and transformers' with its further rounding."""
    heads = 3
    q, k, v = (draw(i, heads, length, head_dim, scale=s) for i, s in ((1, 2.0), (2, 1.0), (3, 1.0)))
    masked = torch.ones(length, length, dtype=torch.bool).triu(1)
    empty = torch.empty(heads, length, length, dtype=torch.bfloat16)
    scaled = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0.0, alpha=head_dim**-0.5)
    rounded = torch.matmul(q, k.transpose(1, 2)) * head_dim**-0.5
    kv = DenseKeyValues(numpy(k.transpose(0, 1)), numpy(v.transpose(0, 1)))
    for engine, scores in ((MEGATRON, scaled), (TRANSFORMERS, rounded)):
        p = torch.softmax(scores.float().masked_fill(masked, float("-inf")), dim=-1).bfloat16()
        contract: Any = engine.contract("attention")
        got = attention(numpy(q.transpose(0, 1)), np.arange(length), kv, contract)
        assert_same_bits(got, numpy(torch.bmm(p, v).transpose(0, 1)))


@pytest.mark.engines
@pytest.mark.parametrize(("top_k", "top_p"), [(50, None), (None, 0.8), (200, 0.9)])
def test_top_k_top_p_of_vllm(top_k: int | None, top_p: float | None) -> None:
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    logits = draw(1, 64, 1000, dtype="float32", scale=2.0)
    k = None if top_k is None else torch.full((64,), top_k)
    p = None if top_p is None else torch.full((64,), top_p)
    expected = sampler.apply_top_k_top_p_pytorch(logits.clone(), k, p)
    contract: Any = VLLM.contract("processed_logits")
    assert_same_bits(processed_logits(logits.numpy(), contract, 1.0, top_k, top_p), expected.numpy())
