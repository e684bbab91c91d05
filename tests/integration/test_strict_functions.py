"""The derivatives of the strict functions, against PyTorch's in float64, and from run to run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from integration.backends.arrays import ArrayOperators  # noqa: E402
from integration.megatron import functions  # noqa: E402

Tensor = Any
OWN = ArrayOperators("strict-v1/fma32-seq", torch.float32)
TOKENS, BATCH, HEADS, KV_HEADS, DIM, HIDDEN, VOCABULARY = 9, 2, 4, 2, 32, 48, 37
EPSILON, THETA, TEMPERATURE = 1e-5, 1e4, 0.7


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    angle = positions[:, None, None] * THETA ** (-torch.arange(DIM // 2, dtype=torch.float64) / (DIM // 2))
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(DIM)).masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3)


POSITIONS = torch.arange(TOKENS)
IDS = torch.tensor([3, 1, 3, 0, 7, 7, 7, 2, 5])
Function = Callable[..., Tensor]
#: Name -> (ours, the same in float64, shapes of what is differentiated).
CASES: dict[str, tuple[Function, Function, list[tuple[int, ...]]]] = {
    "embedding": (
        lambda table: functions.Embedding.apply(OWN, IDS, table, None, None),
        lambda table: table[IDS],
        [(VOCABULARY, HIDDEN)],
    ),
    "rms_norm": (
        lambda x, w: functions.RmsNorm.apply(OWN, x, w, EPSILON, False),
        _norm,
        [(TOKENS, BATCH, HIDDEN), (HIDDEN,)],
    ),
    "qk_norm": (
        lambda x, w: functions.RmsNorm.apply(OWN, x, w, EPSILON, True),
        _norm,
        [(TOKENS, BATCH, HEADS, DIM), (DIM,)],
    ),
    "linear": (
        lambda x, w, b: functions.Linear.apply(OWN, x, w, b, "linear", None),
        lambda x, w, b: x @ w.t() + b,
        [(TOKENS, BATCH, HIDDEN), (24, HIDDEN), (24,)],
    ),
    "row_linear": (
        lambda x, w, b: functions.MergeRanks.apply(OWN, functions.Linear.apply(OWN, x, w, None, "row", None), b, None),
        lambda x, w, b: x @ w.t() + b,
        [(TOKENS, BATCH, HIDDEN), (24, HIDDEN), (24,)],
    ),
    "rope": (
        lambda x: functions.Rope.apply(OWN, x, POSITIONS, THETA),
        lambda x: _rotate(x, POSITIONS),
        [(TOKENS, HEADS, DIM)],
    ),
    "residual_add": (
        lambda x, y: functions.ResidualAdd.apply(OWN, x, y),
        torch.add,
        [(TOKENS, BATCH, HIDDEN)] * 2,
    ),
    "swiglu": (
        lambda g, u: functions.Swiglu.apply(OWN, g, u),
        lambda g, u: torch.nn.functional.silu(g) * u,
        [(TOKENS, BATCH, HIDDEN)] * 2,
    ),
    "attention": (
        lambda q, k, v: functions.Attention.apply(OWN, q, k, v),
        _attend,
        [(TOKENS, BATCH, HEADS, DIM), (TOKENS, BATCH, KV_HEADS, DIM), (TOKENS, BATCH, KV_HEADS, DIM)],
    ),
    "logprob": (
        lambda x: functions.LogProb.apply(
            OWN,
            functions.ProcessedLogits.apply(OWN, x, VOCABULARY - 3, (TEMPERATURE, None, None), None),
            IDS,
            lambda value: value,
        ),
        lambda x: (x[:, : VOCABULARY - 3] / TEMPERATURE).log_softmax(-1).gather(1, IDS[:, None])[:, 0],
        [(TOKENS, VOCABULARY)],
    ),
}


def gradients(function: Function, inputs: list[Tensor], direction: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    (function(*leaves) * direction).sum().backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_float64_and_the_same_bits_each_run(name: str) -> None:
    ours, exact, shapes = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    wide = [torch.randn(shape, generator=generator, dtype=torch.float32).double() for shape in shapes]
    output = exact(*wide)
    direction = torch.randn(output.shape, generator=generator, dtype=torch.float32)
    narrow = [x.float() for x in wide]
    torch.testing.assert_close(ours(*narrow).double(), output, rtol=1e-4, atol=1e-4)
    found = gradients(ours, narrow, direction)
    for mine, expected in zip(found, gradients(exact, wide, direction.double()), strict=True):
        scale = expected.abs().max()
        assert (mine.double() - expected).abs().max() <= 2e-6 * scale, name
    again = gradients(ours, narrow, direction)
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(found, again, strict=True))


def test_a_masked_logit_has_no_gradient() -> None:
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(0)).requires_grad_()
    processed = functions.ProcessedLogits.apply(OWN, logits, 11, (1.0, 3, None), None)
    functions.LogProb.apply(OWN, processed, processed.argmax(-1), lambda value: value).sum().backward()
    assert logits.grad is not None and ((logits.grad != 0).sum(-1) == 3).all()
    assert logits.grad.sum(-1).abs().max() < 1e-6


def test_bfloat16_results_are_rounded_by_the_operator_and_never_by_a_cast() -> None:
    from integration.arrays import to_tensor

    with pytest.raises(ValueError, match="where its contract rounds to bfloat16"):
        to_tensor(torch.tensor([1.0, 1.0 + 2**-20]).numpy(), torch.bfloat16)
