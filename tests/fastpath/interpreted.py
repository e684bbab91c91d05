"""Run by test_interpreter.py in a process with TRITON_INTERPRET=1: kernels on the CPU, in exact float32 arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fastpath import primitives
from fastpath.autograd import products as autograd_products
from fastpath.backend import UnsupportedError, current_target, record
from fastpath.collectives.all_reduce import merge_ranks
from fastpath.collectives.merge import left_leaves
from fastpath.products.linear import linear
from fastpath.products.lm_head import lm_head_logprob
from fastpath.products.row_linear import row_linear, row_linear_partial
from fastpath.products.schedules import Schedule
from fastpath.rows.logprob import logprob, logprob_gradient
from fastpath.rows.logsumexp import logsumexp
from fastpath.rows.processed_logits import processed_logits
from reference.contract.profiles import profile
from reference.operators.all_reduce import all_reduce as all_reduce_reference
from reference.operators.linear import linear as linear_reference
from reference.primitives import PRIMITIVES
from reference.reductions.tree import pairs_tree


@triton.jit
def apply(x, out, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, FUNCTION(tl.load(x + offset)))


@triton.jit
def sum_rows(x, out, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.arange(0, ROWS)
    block = tl.load(x + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
    tl.store(out + row, primitives.pairs_tree(block, ROWS, WIDTH))


def contract(operator: str, dtype: str = "float32") -> Any:
    return profile("strict-v1").contract(operator, dtype)


def same_bits(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    equal = (left.view(np.uint32) == right.view(np.uint32)) | (np.isnan(left) & np.isnan(right))
    return bool(equal.all())


@pytest.mark.parametrize("name", ["exp", "exp2", "exp2_nonpositive", "log", "rsqrt", "silu", "sigmoid"])
def test_primitives(name: str) -> None:
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 2**32, 2**14, dtype=np.uint64).astype(np.uint32).view(np.float32)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 2.0**-126], np.float32)
    x = np.concatenate([patterns, rng.uniform(-160, 130, 2**13).astype(np.float32), np.tile(special, 2**10)])
    if name == "exp2_nonpositive":
        x = np.where(x > 0, -x, x)
    out = torch.empty(x.size)
    apply[(x.size // 4096,)](torch.from_numpy(x), out, getattr(primitives, name), 4096)
    assert same_bits(out.numpy(), PRIMITIVES[name]["rlk"](x))


@pytest.mark.parametrize("width", [1, 2, 64, 256])
def test_pairs_tree(width: int) -> None:
    x = np.random.default_rng(0).standard_normal((4, width)).astype(np.float32)
    x[0] = -0.0
    out = torch.empty(4)
    sum_rows[(1,)](torch.from_numpy(x), out, 4, width)
    assert same_bits(out.numpy(), pairs_tree(x))


def test_merge_tree_splits_as_adjacent_pairs_do() -> None:
    def leaves(first: int, count: int) -> Any:
        if count == 1:
            return first
        left = left_leaves.__wrapped__(count) if hasattr(left_leaves, "__wrapped__") else left_leaves(count)
        return (leaves(first, left), leaves(first + left, count - left))

    def pairs(count: int) -> Any:
        level: list[Any] = list(range(count))
        while len(level) > 1:
            merged = [(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
            level = merged + level[2 * len(merged) :]
        return level[0]

    for count in range(1, 17):
        assert leaves(0, count) == pairs(count)


@pytest.mark.parametrize("plan", [Schedule(16, 16, 16), Schedule(16, 32, 16, local=2), Schedule(16, 16, 16, local=8)])
def test_no_schedule_changes_a_bit(plan: Schedule) -> None:
    rng = np.random.default_rng(0)
    x, w = (np.ldexp(rng.standard_normal((9, 64)), rng.integers(-20, 20, (9, 64))).astype(np.float32) for _ in range(2))
    own = contract("row_linear")
    got = linear(torch.from_numpy(x), torch.from_numpy(w), own, plan=plan)
    assert same_bits(got.numpy(), linear_reference(x, w, own))


def test_launches_are_recorded() -> None:
    own = contract("linear")
    with record() as evidence:
        linear(torch.ones(2, 8), torch.ones(3, 8), own)
    linear(torch.ones(2, 8), torch.ones(3, 8), own)
    assert [entry.kernel for entry in evidence] == ["tile_kernel"]
    assert evidence[0].contract_id == own.contract_id
    assert evidence[0].target == current_target().arch == "cpu"
    assert len(evidence[0].code_sha256) == 64


def test_a_unit_of_other_hardware_is_refused() -> None:
    own = profile("strict-v1/hopper-k16").contract("linear")
    with pytest.raises(UnsupportedError, match="hopper-k16 cannot run on cpu"):
        linear(torch.ones(2, 8).bfloat16(), torch.ones(3, 8).bfloat16(), own)  # type: ignore[arg-type]


def test_a_contract_without_a_kernel_is_refused() -> None:
    own = contract("linear").override("order.k", "descending")
    with pytest.raises(UnsupportedError, match=r"order\.k = 'descending' has no kernel"):
        linear(torch.ones(2, 8), torch.ones(3, 8), own)


def test_arguments_are_checked() -> None:
    x, w = torch.ones(2, 8), torch.ones(3, 8)
    with pytest.raises(TypeError, match=r"x: expected torch\.float32, got torch\.float64"):
        linear(x.double(), w, contract("linear"))
    with pytest.raises(ValueError, match=r"weight: expected shape \[outputs, inputs=8\], got \[3, 4\]"):
        linear(x, w[:, :4].contiguous(), contract("linear"))
    with pytest.raises(ValueError, match="not contiguous"):
        linear(torch.ones(8, 2).t(), w, contract("linear"))
    with pytest.raises(ValueError, match="4 inputs cannot be cut into 8 equal segments"):
        linear(x[:, :4].contiguous(), w[:, :4].contiguous(), contract("row_linear"))
    with pytest.raises(ValueError, match="8 segments cannot be shared evenly by 3 ranks"):
        row_linear_partial(x, w, contract("row_linear"), 3)
    with pytest.raises(ValueError, match="temperature: must be finite and above 0"):
        processed_logits(x, contract("processed_logits"), temperature=0.0)


def test_a_target_outside_the_vocabulary_gives_nan() -> None:
    contracts = (contract("lm_head"), contract("logsumexp"), contract("logprob"))
    chosen, _ = lm_head_logprob(torch.ones(2, 8), torch.ones(3, 8), torch.tensor([3, -1]), *contracts)
    assert torch.isnan(chosen).all()


def test_no_tokens_is_no_error() -> None:
    assert linear(torch.ones(0, 8), torch.ones(3, 8), contract("linear")).shape == (0, 3)
    assert logsumexp(torch.ones(0, 8), contract("logsumexp")).value.shape == (0,)
    contracts = (contract("lm_head"), contract("logsumexp"), contract("logprob"))
    empty, _ = lm_head_logprob(torch.ones(0, 8), torch.ones(3, 8), torch.zeros(0, dtype=torch.int64), *contracts)
    assert empty.shape == (0,)


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.5}])
def test_no_tokens_of_the_vocabulary_kernels(settings: dict[str, Any]) -> None:
    empty, targets = torch.ones(0, 8), torch.zeros(0, dtype=torch.int64)
    assert processed_logits(empty, contract("processed_logits"), 0.7, **settings).shape == (0, 8)
    lse = logsumexp(empty, contract("logsumexp"))
    assert logprob(empty, targets, lse, contract("logprob")).shape == (0,)
    slopes = logprob_gradient(empty, targets, lse.value, lse.value, contract("logprob"), torch.float32)
    assert slopes.shape == (0, 8)
    assert row_linear(empty, torch.ones(3, 8), contract("row_linear")).shape == (0, 3)
    assert merge_ranks(torch.ones(2, 0, 3), contract("all_reduce")).shape == (0, 3)
    heads = [contract(name) for name in ("lm_head", "logsumexp", "logprob")]
    for function in (
        lambda x, w: autograd_products.linear(x, w, contract("linear")),
        lambda x, w: autograd_products.lm_head_logprob(x, w, targets, *heads),
    ):
        x, w = torch.ones(0, 8).requires_grad_(), torch.ones(16, 8).requires_grad_()
        function(x, w).sum().backward()
        assert x.grad is not None and w.grad is not None and x.grad.shape == (0, 8) and not w.grad.any()


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.5}, {"top_k": 40, "top_p": 0.5}])
def test_a_nan_in_a_row_gives_a_nan_logprob(settings: dict[str, Any]) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    for column in (0, 17, 49):
        spoilt = logits.clone()
        spoilt[2, column] = float("nan")
        scaled = processed_logits(spoilt, contract("processed_logits"), 0.7, **settings)
        lse = logsumexp(scaled, contract("logsumexp"))
        for target in (0, 25, 49):
            chosen = logprob(scaled, torch.full((4,), target), lse, contract("logprob"))
            assert torch.isnan(chosen).tolist() == [False, False, True, False]


def test_operators_of_torch_library() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((3, 8), (16, 8)))
    own = contract("linear")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.rlk.linear.default, (x, w, own.to_json()), test_utils=checks)
    contracts = [contract(name).to_json() for name in ("lm_head", "logsumexp", "logprob")]
    arguments = (x, w, torch.tensor([0, 5, 15]), *contracts, 2**20)
    torch.library.opcheck(torch.ops.rlk.lm_head_logprob.default, arguments, test_utils=checks)


def test_linear_is_differentiable_under_compile() -> None:
    # Whole numbers: every sum is exact, so its bits are known whatever the order of the machine's own products.
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-8, 9, shape, generator=generator).float() for shape in ((3, 8), (16, 8)))
    own = contract("linear")
    found = []
    for function in (autograd_products.linear, torch.compile(autograd_products.linear, backend="aot_eager")):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        function(a, b, own).sum().backward()
        assert a.grad is not None and b.grad is not None
        found.append((a.grad.numpy(), b.grad.numpy()))
    assert all(same_bits(eager, compiled) for eager, compiled in zip(*found, strict=True))
    of_x, of_w = found[0]
    ones = np.ones((3, 16), np.float32)
    assert same_bits(of_x, ones @ w.numpy()) and same_bits(of_w, ones.T @ x.numpy())


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_merge_of_ranks(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    parts = np.ldexp(rng.standard_normal((ranks, 3, 7)), rng.integers(-20, 20, (ranks, 3, 7))).astype(np.float32)
    own = contract("all_reduce")
    assert same_bits(merge_ranks(torch.from_numpy(parts), own).numpy(), all_reduce_reference(list(parts), own))
