"""Run by test_kernel_operators.py in a process with TRITON_INTERPRET=1: the kernels behind an engine's interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fastpath import launches
from integration.backends import BackendError, operators_for
from integration.backends.arrays import ArrayOperators
from integration.backends.kernels import KernelOperators

Tensor = Any
PROFILE = "strict-v1/fma32-seq"
ARRAYS, KERNELS = ArrayOperators(PROFILE, torch.float32), KernelOperators(PROFILE, torch.float32)
HEADS, KV_HEADS, DIM, EPSILON = 4, 2, 16, 1e-6
POSITIONS = torch.tensor([0, 3, 1, 2, 9])


def random(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(shape).standard_normal(shape).astype(np.float32))


def rotated(own: Any, x: Tensor) -> Tensor:
    return own.rotate(x, POSITIONS, own.rope_table(POSITIONS, DIM, 1e4, 10))


def packed(own: Any) -> Tensor:
    qkv, weights = random(5, (HEADS + 2 * KV_HEADS) * DIM), random(2, DIM)
    if own is KERNELS:
        table = own.whole_table(DIM, 1e4, 64)
        return own.packed_qk_norm_rope(qkv, *weights, EPSILON, POSITIONS, table, HEADS, KV_HEADS)
    parts = qkv[:, : (HEADS + KV_HEADS) * DIM].reshape(5, -1, DIM).split([HEADS, KV_HEADS], dim=1)
    return torch.cat([rotated(own, own.qk_norm(p, w, EPSILON)) for p, w in zip(parts, weights, strict=True)], dim=1)


def logprobs(own: Any, top_k: Any, top_p: Any) -> Tensor:
    temperature = torch.tensor([1.0, 0.7, 1.0, 2.0, 1.0, 0.3])
    logits = own.processed_logits(own.processed_logits(random(6, 50) * 4, temperature), 1.0, top_k, top_p)
    lse = own.logsumexp(logits)
    chosen = own.logprob(logits, torch.arange(6), lse)
    nats = own.entropy(logits, lse)
    slopes = own.entropy_backward(torch.arange(6.0) - 2.5, logits, lse[0], nats)
    rows = (part[:, None] for part in (*lse, chosen, nats))
    return torch.cat([logits, own.all_logprobs(logits, lse), slopes, *rows], dim=1)


def paged(own: Any) -> Tensor:
    """Two sequences in shared pages, the first one chunk of a prefill, the second a decode step."""
    q, k, v = random(24, 1, HEADS, DIM), random(24, 1, KV_HEADS, DIM), random(2, 24, 1, KV_HEADS, DIM)[1]
    whole = own.causal_attention(q, k, v)[:, 0]
    if own is ARRAYS:
        return torch.cat([whole[16:20], whole[23:24]])
    cache, out = torch.full((2, 4, 16, KV_HEADS, DIM), torch.nan), torch.empty(5, HEADS, DIM)
    for pages in ([3, 0], [1, 2]):
        slots = (torch.tensor(pages)[:, None] * 16 + torch.arange(16)).flatten()[:24]
        own.write_cache(k[:, 0], v[:, 0], cache, slots)
    tables, lengths = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32), torch.tensor([20, 24], dtype=torch.int32)
    starts = torch.tensor([0, 4, 5], dtype=torch.int32)
    own.paged_attention(torch.cat([q[16:20, 0], q[23:24, 0]]), starts, 4, cache, tables, lengths, None, out)
    return out


def product_and_norm(own: Any) -> Tensor:
    """A row-parallel product and the norm after it; of the kernels in one operator, merged where the norm reads."""
    x, weight, residual, norm = random(5, 64), random(48, 64), random(5, 48), random(48)
    if own is ARRAYS:
        return torch.cat(own.rms_norm_residual(own.row_linear(x, own.weight(weight)), residual, norm, EPSILON))
    texts = [own.contracts[name].to_json() for name in ("row_linear", "rms_norm")]
    return torch.cat(torch.ops.rlk.row_linear_norm(x, weight, residual, norm, EPSILON, *texts))


CASES: dict[str, Any] = {
    "rms_norm": lambda own: own.rms_norm(random(5, 64), random(64), EPSILON),
    "rms_norm_residual": lambda own: torch.cat(
        own.rms_norm_residual(random(5, 64), random(2, 5, 64)[1], random(64), EPSILON)
    ),
    "qk_norm": lambda own: own.qk_norm(random(5, HEADS, DIM), random(DIM), EPSILON),
    "residual_add": lambda own: own.residual_add(random(5, 64), random(2, 5, 64)[1]),
    "linear": lambda own: own.linear(random(5, 64), own.weight(random(48, 64)), random(48)),
    "row_linear": lambda own: own.row_linear(random(5, 64), own.weight(random(48, 64)), random(48)),
    "row_linear_merge": lambda own: own.row_linear_merge(
        [own.row_linear_partial(random(5, 64), own.weight(random(48, 64)), 1)], random(48)
    ),
    "row_linear_norm": product_and_norm,
    "lm_head": lambda own: own.lm_head(random(5, 64), own.weight(random(48, 64))),
    "rope": lambda own: rotated(own, random(5, HEADS, DIM)),
    "packed_qk_norm_rope": packed,
    "swiglu": lambda own: own.swiglu(random(5, 64), random(2, 5, 64)[1]),
    "embedding": lambda own: own.embedding(POSITIONS, random(48, 64)),
    "logprobs": lambda own: logprobs(own, None, None),
    "logprobs, one limit": lambda own: logprobs(own, 7, 0.8),
    "logprobs, limits by row": lambda own: logprobs(
        own, torch.tensor([50, 5, 50, 3, 1, 50], dtype=torch.int32), torch.tensor([1.0, 0.9, 0.5, 1.0, 1.0, 0.2])
    ),
    "causal_attention": lambda own: own.causal_attention(
        random(7, 2, HEADS, DIM), random(7, 2, KV_HEADS, DIM), random(2, 7, 2, KV_HEADS, DIM)[1]
    ),
    "paged_attention": paged,
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_have_the_bits_of_the_arrays(name: str) -> None:
    left, right = (CASES[name](own).contiguous() for own in (ARRAYS, KERNELS))
    assert left.shape == right.shape and left.numel()
    same = (left.view(torch.int32) == right.view(torch.int32)) | (left.isnan() & right.isnan())
    assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} differ"


@pytest.fixture
def counted() -> Iterator[None]:
    KERNELS.clear()
    yield
    KERNELS.clear()


def test_launches_are_counted_and_a_replay_counts_what_its_capture_launched(counted: None) -> None:
    before = launches.snapshot()
    CASES["swiglu"](KERNELS)
    inside = launches.since(before)
    launches.add(inside, -1)  # what a capture launches is not executed
    assert not +KERNELS.calls
    launches.add(inside, 3)
    assert KERNELS.calls["swiglu"] == 3
    entry = KERNELS.evidence()["operators"]["swiglu"]
    assert entry == {
        "calls": 3,
        "contract_id": KERNELS.contracts["swiglu"].contract_id,
        "kernels": {"swiglu_kernel": 3},
    }


def test_what_no_kernel_computes_is_refused_by_name() -> None:
    with pytest.raises(BackendError, match="needs the matrix unit mfma-cdna3-g8, and this device"):
        KernelOperators("strict-v1/mfma-cdna3-g8", torch.float32)
    with pytest.raises(BackendError, match=r"torch.float16 has no kernels; use bfloat16 or float32"):
        KernelOperators(PROFILE, torch.float16)
    with pytest.raises(BackendError, match="nothing computes it on device xpu"):
        operators_for(PROFILE, torch.float32, "xpu")


def test_a_product_and_its_norm_become_one_operator_only_where_nobody_else_reads_the_product() -> None:
    from integration.vllm.fusion import fuse

    texts = [KERNELS.contracts[name].to_json() for name in ("row_linear", "rms_norm", "linear")]

    def graph_of(product: int, shown: bool) -> Any:
        graph = torch.fx.Graph()
        x, weight, residual, norm = (graph.placeholder(name) for name in ("x", "weight", "residual", "norm"))
        y = graph.call_function(torch.ops.rlk.linear_bias.default, (x, weight, None, texts[product]))
        y = graph.call_function(torch.ops.aten.view.default, (y, [5, 48]))
        found = graph.call_function(torch.ops.rlk.rms_norm_residual.default, (y, residual, norm, EPSILON, texts[1]))
        graph.output((found, y) if shown else (found,))
        return graph

    operands = (random(5, 64), random(48, 64), random(5, 48), random(48))
    for product, shown, fused in ((0, False, True), (0, True, False), (2, False, False)):
        graph = graph_of(product, shown)
        plain = torch.fx.GraphModule({}, graph)(*operands)[0]
        fuse(graph)
        graph.lint()
        names = [str(node.target) for node in graph.nodes]
        assert ("rlk.row_linear_norm.default" in names) is fused
        for left, right in zip(plain, torch.fx.GraphModule({}, graph)(*operands)[0], strict=True):
            assert torch.equal(left.view(torch.int32), right.view(torch.int32))
