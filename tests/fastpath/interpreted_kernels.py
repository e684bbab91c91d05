"""Run by test_kernels.py in a process with TRITON_INTERPRET=1: row kernels and attention as PyTorch sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from fastpath import autograd
from fastpath.attention import attention as attention_module
from fastpath.attention.attention import Packed, Pages, attention
from fastpath.attention.attention_backward import attention_backward
from fastpath.attention.kv_cache import write_cache
from fastpath.backend import UnsupportedError, record
from fastpath.rows.embedding import embedding, embedding_backward
from fastpath.rows.qk_norm import merge_heads, qk_norm, qk_norm_backward
from fastpath.rows.qk_norm_rope import qk_norm_rope
from fastpath.rows.residual_add import residual_add
from fastpath.rows.rms_norm import rms_norm, rms_norm_backward
from fastpath.rows.rope import rope, rope_table
from fastpath.rows.swiglu import swiglu, swiglu_backward
from reference.contract.profiles import profile
from reference.gradients import gradient_contract


def contract(operator: str, dtype: str = "float32") -> Any:
    return profile("strict-v1").contract(operator, dtype)


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def close(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_gradients_are_those_of_the_function() -> None:
    """Bits are the conformance cases' matter; this asks whether the stated formulas differentiate the function."""
    x, residual, weight = leaf(4, 96), leaf(4, 96, seed=1), leaf(96, seed=2)
    y, total = autograd.rms_norm_residual(x, residual, weight, 1e-6, contract("rms_norm"))
    plain = x + residual
    z = functional.rms_norm(plain, (96,), weight, 1e-6)
    operands = (x, residual, weight)
    close(
        torch.autograd.grad((y.square() + total.sin()).sum(), operands),
        torch.autograd.grad((z.square() + plain.sin()).sum(), operands),
    )
    y = autograd.swiglu(x, residual, contract("swiglu"))
    z = functional.silu(x) * residual
    close(torch.autograd.grad(y.square().sum(), (x, residual)), torch.autograd.grad(z.square().sum(), (x, residual)))
    q, head_weight = leaf(6, 2, 16), leaf(16)
    y = autograd.qk_norm(q, head_weight, 1e-6, contract("qk_norm"))
    z = functional.rms_norm(q, (16,), head_weight, 1e-6)
    close(
        torch.autograd.grad(y.square().sum(), (q, head_weight)), torch.autograd.grad(z.square().sum(), (q, head_weight))
    )


def test_gradient_of_rope() -> None:
    x, of = leaf(6, 2, 16), contract("rope")
    table = rope_table(8, 16, 1e4, of, "cpu")
    y = autograd.rope(x, torch.arange(6), table, of)
    cos, sin = (torch.cat([part[:6], part[:6]], 1)[:, None] for part in table)
    a, b = x.chunk(2, -1)
    z = x * cos + torch.cat([-b, a], -1) * sin
    close(torch.autograd.grad(y.sin().sum(), (x,)), torch.autograd.grad(z.sin().sum(), (x,)))


def test_gradient_of_attention() -> None:
    q, k, v = leaf(6, 2, 16), leaf(6, 1, 16, seed=1), leaf(6, 1, 16, seed=2)
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    y = autograd.attention(q, k, v, starts, starts, 4, 4, contract("attention"))
    parts = []
    for a, b in ((0, 2), (2, 6)):
        heads = (part[a:b].transpose(0, 1)[None] for part in (q, k, v))
        parts.append(
            functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        )
    z = torch.cat(parts)
    close((y,), (z,))
    close(torch.autograd.grad(y.sin().sum(), (q, k, v)), torch.autograd.grad(z.sin().sum(), (q, k, v)))


def test_operators_are_registered_well_and_compile() -> None:
    x, weight, of = leaf(3, 64), leaf(64), contract("rms_norm")
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.rlk.rms_norm.default, (x, weight, 1e-6, of.to_json()), test_utils=utilities)

    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return autograd.swiglu(autograd.rms_norm(x, weight, 1e-6, of), x, contract_swiglu) * 2

    contract_swiglu = contract("swiglu")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, weight), model(x, weight))


def test_spread_decode_agrees_with_the_single_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's matrix product has an order of its own, so only values can be compared here."""
    page, lengths = 16, (70, 130, 1)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(20, page, 2, 16, generator=generator) for _ in range(2))
    tables = torch.randperm(20, generator=generator)[:18].view(2, 9).int().repeat(2, 1)[:3].contiguous()
    pages = Pages(keys, values, tables, torch.tensor(lengths, dtype=torch.int32))
    q, starts = torch.randn(3, 4, 16, generator=generator), torch.arange(4, dtype=torch.int32)
    single = attention(q, starts, 1, pages, contract("attention")).output
    monkeypatch.setattr(attention_module, "spreads", lambda *_: True)
    with record() as launches:
        spread = attention(q, starts, 1, pages, contract("attention")).output
    assert [launch.kernel for launch in launches] == ["scores_kernel", "probabilities_kernel", "values_kernel"]
    torch.testing.assert_close(spread, single, rtol=1e-5, atol=1e-6)


def test_indices_outside_read_nothing() -> None:
    rows = embedding(torch.tensor([0, 5, -1]), torch.ones(3, 8), contract("embedding"))
    assert torch.isnan(rows).tolist() == [[False] * 8, [True] * 8, [True] * 8]
    of = contract("rope")
    turned = rope(torch.ones(2, 1, 4), torch.tensor([1, 9]), rope_table(4, 4, 1e4, of, "cpu"), of)
    assert not torch.isnan(turned[0]).any() and torch.isnan(turned[1]).all()
    cache = torch.zeros(2, 16, 1, 16)
    token = torch.ones(3, 1, 16)
    write_cache(token, token, torch.tensor([-1, 32, 3]), cache, cache.clone(), contract("kv_cache"))
    assert cache.sum() == 16 and cache[0, 3].sum() == 16


def test_bad_arguments_are_named() -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match="epsilon"):
        rms_norm(x, weight, 1e-45, contract("rms_norm"))
    with pytest.raises(TypeError, match=r"x: expected torch\.bfloat16"):
        rms_norm(x, weight, 1e-6, contract("rms_norm", "bfloat16"))
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, torch.ones(4), 1e-6, contract("rms_norm"))
    with pytest.raises(UnsupportedError, match=r"order\.sum"):
        rms_norm(x, weight, 1e-6, contract("rms_norm").override("order.sum", "chain"))
    with pytest.raises(UnsupportedError, match="hidden"):
        rms_norm(torch.ones(1, 20000), torch.ones(20000), 1e-6, contract("rms_norm"))
    with pytest.raises(UnsupportedError, match="head_dim"):
        qk_norm(torch.ones(1, 1, 96), torch.ones(96), 1e-6, contract("qk_norm"))
    with pytest.raises(ValueError, match="up"):
        swiglu(x, torch.ones(2, 4), contract("swiglu"))
    with pytest.raises(UnsupportedError, match="float16"):
        swiglu(x.half(), x.half(), contract("swiglu", "float16"))


def test_attention_refuses_what_it_cannot_do() -> None:
    q, kv, starts = torch.ones(2, 3, 16), torch.ones(2, 2, 16), torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="not a multiple"):
        attention(q, starts, 2, Packed(kv, kv, starts), contract("attention"))
    with pytest.raises(UnsupportedError, match=r"partition\.split"):
        attention(q, starts, 2, Packed(kv, kv, starts), contract("attention").override("partition.split", "fixed-128"))
    hopper = profile("strict-v1/hopper-k16").contract("attention")
    one = torch.ones(2, 1, 16, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="hopper-k16"):
        attention(one, starts, 2, Packed(one, one, starts), hopper)
    small = torch.ones(1, 8, 1, 16)
    pages = Pages(small, small, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    with pytest.raises(UnsupportedError, match="pages of 8"):
        attention(q[:1, :1].contiguous(), starts, 1, pages, contract("attention"))
    result = attention(q[:, :2].contiguous(), starts, 2, Packed(kv, kv, starts), contract("attention"))
    with pytest.raises(ValueError, match="save=True"):
        operands = (q[:, :2].contiguous(), q[:, :2].contiguous(), starts, 2, Packed(kv, kv, starts), 2)
        attention_backward(*operands, result, gradient_contract(contract("attention")))


def test_launches_are_evidence() -> None:
    of = contract("swiglu")
    with record() as launches:
        swiglu(torch.ones(1, 8), torch.ones(1, 8), of)
    assert [(entry.kernel, entry.operator, entry.contract_id) for entry in launches] == [
        ("swiglu_kernel", "swiglu", of.contract_id)
    ]
    assert np.all([len(entry.code_sha256) == 64 for entry in launches])


def test_no_tokens_give_empty_results_of_the_right_shape() -> None:
    """Forward and backward of every row kernel and of attention."""
    x, flat, heads = torch.empty(0, 32), torch.randn(32), torch.empty(0, 2, 16)
    table = rope_table(8, 16, 1e6, contract("rope"), "cpu")
    none = torch.empty(0, dtype=torch.int32)
    norm = rms_norm(x, flat, 1e-6, contract("rms_norm"), x)
    assert norm.output.shape == norm.residual.shape == (0, 32)  # type: ignore[union-attr]
    slopes = rms_norm_backward(x, x, flat, 1e-6, gradient_contract(contract("rms_norm")))
    assert slopes.x.shape == (0, 32) and slopes.weight.tolist() == [0.0] * 32
    assert qk_norm(heads, flat[:16], 1e-6, contract("qk_norm")).shape == (0, 2, 16)
    back = gradient_contract(contract("qk_norm"))
    slopes = qk_norm_backward(heads, heads, flat[:16], 1e-6, back)
    assert slopes.x.shape == (0, 2, 16) and merge_heads(slopes.weight, back).tolist() == [0.0] * 16
    assert rope(heads, none, table, contract("rope")).shape == (0, 2, 16)
    rotated = qk_norm_rope(heads, flat[:16], none, table, 1e-6, contract("qk_norm"), contract("rope"))
    assert rotated.shape == (0, 2, 16)
    assert swiglu(x, x, contract("swiglu")).shape == (0, 32)
    assert all(part.shape == (0, 32) for part in swiglu_backward(x, x, x, gradient_contract(contract("swiglu"))))
    assert residual_add(x, x, contract("residual_add")).shape == (0, 32)
    assert embedding(none.long(), torch.randn(5, 32), contract("embedding")).shape == (0, 32)
    assert not embedding_backward(x, none.long(), 5, gradient_contract(contract("embedding"))).any()
    cache = torch.zeros(2, 16, 2, 16)
    write_cache(heads, heads, none.long(), cache, cache.clone(), contract("kv_cache"))
    starts = torch.zeros(2, dtype=torch.int32)
    for kv in (
        Packed(heads, heads, starts),
        Pages(cache, cache, torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)),
    ):
        found = attention(heads, starts, 0, kv, contract("attention"), save=isinstance(kv, Packed))
        assert found.output.shape == (0, 2, 16)
        if isinstance(kv, Packed):
            gradients = attention_backward(
                heads, heads, starts, 0, kv, 0, found, gradient_contract(contract("attention"))
            )
            assert all(part.shape == (0, 2, 16) for part in gradients)
