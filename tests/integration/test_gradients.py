"""One backward: the compiled loops and the kernels against `reference.gradients`, in bits, and sums that go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from integration.backends import reference_gradients as spec  # noqa: E402
from integration.backends.loops import gradients as loops  # noqa: E402
from reference import operators as ops  # noqa: E402
from reference.checks import Float32Array  # noqa: E402
from reference.contract.profiles import profile  # noqa: E402
from reference.gradients import gradient_contracts  # noqa: E402
from reference.operators.attention import attention_result  # noqa: E402
from reference.operators.kv_cache import DenseKeyValues  # noqa: E402
from tests.integration.test_loops import DTYPES, VALUES, maker  # noqa: E402

Run = Callable[[Any], list[Float32Array]]


def contract(operator: str, dtype: str) -> Any:
    return gradient_contracts(profile("strict-v1/fma32-seq"), dtype)[operator + "_backward"]


def runs(dtype: str, kind: str) -> dict[str, tuple[str, Run]]:
    """Name -> (operator, what it gives with one module's functions); rows alone and many, odd widths."""
    make = maker(dtype, kind)
    exact = maker("float32", kind, 5)
    dy, x, w = make(3, 21, 40), make(3, 21, 37), make(40, 37)
    sums, biases = exact(40, 37), exact(40)
    heads, slopes, scales, head_sums = make(7, 2, 3, 32), make(7, 2, 3, 32), make(32), exact(3, 32)
    hidden, hidden_slopes, weight, hidden_sums = make(70, 2, 1, 300), make(70, 2, 1, 300), make(300), exact(1, 300)
    table = ops.rope_table(np.arange(9), 32, 1e6, profile("strict-v1").contract("rope", "float32"))
    q, k, v, out = (maker(dtype, "normal", seed)(70, n, 32) for seed, n in enumerate((4, 2, 2, 4)))
    gate, up, grad = make(5, 77) * np.float32(16), make(5, 77), make(5, 77)
    logits, targets, upstream, lse = exact(5, 509), np.array([0, 7, 508, 3, 3]), exact(5), np.abs(exact(5))
    tokens, rows, embedded = np.array([[3, 0, 3], [9, 3, 0]]), make(2, 3, 33), exact(11, 33)

    def into(sums: Float32Array, add: Callable[[Float32Array], Any]) -> list[Float32Array]:
        kept = sums.copy()
        found = add(kept)
        return [kept] if found is None else [kept, found]

    def attended(module: Any, rules: Any) -> list[Float32Array]:
        forward = profile("strict-v1").contract("attention", dtype)
        result = attention_result(q, np.arange(70), DenseKeyValues(k, v), forward)  # type: ignore[arg-type]
        return list(module.attention_backward(out, q, k, v, result, rules))

    def of(operator: str) -> Any:
        return contract(operator, dtype)

    return {
        **{
            f"input/{op}/{ranks}/{joined}": (
                op,
                lambda m, op=op, ranks=ranks, joined=joined: [
                    m.linear_input_partial(dy[0], w, of(op), ranks, joined=joined)
                ],
            )
            for op, ranks, joined in (("linear", 1, 1), ("linear", 2, 1), ("linear", 4, 2), ("row_linear", 2, 1))
        },
        "weight": ("linear", lambda m: into(sums, lambda s: m.linear_weight_gradient(dy, x, of("linear"), s))),
        "bias": (
            "linear",
            lambda m: into(biases, lambda s: m.bias_gradient(dy.swapaxes(0, 1), of("linear"), s)),
        ),
        "qk_norm": (
            "qk_norm",
            lambda m: into(head_sums, lambda s: m.norm_backward(slopes, heads, scales, 1e-6, of("qk_norm"), s)),
        ),
        "rms_norm": (
            "rms_norm",
            lambda m: into(
                hidden_sums, lambda s: m.norm_backward(hidden_slopes, hidden, weight, 1e-6, of("rms_norm"), s)
            ),
        ),
        "rope": ("rope", lambda m: [m.rope_backward(make(9, 3, 32), table, of("rope"))]),
        "swiglu": ("swiglu", lambda m: list(m.swiglu_backward(grad, gate, up, of("swiglu")))),
        "embedding": (
            "embedding",
            lambda m: into(embedded, lambda s: m.embedding_backward(rows, tokens, of("embedding"), s)),
        ),
        "logprob": ("logprob", lambda m: [m.logprob_backward(upstream, logits, targets, lse, of("logprob"))]),
        "attention": ("attention", lambda m: attended(m, of("attention"))),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", list(runs("float32", "normal")))
def test_loops_have_the_bits_of_the_reference(name: str, kind: str, dtype: str) -> None:
    operator, _ = runs(dtype, kind)[name]
    assert loops.follows(contract(operator, dtype)), "the loops were not even tried"
    # Twice, since the values are drawn in order.
    expected, found = runs(dtype, kind)[name][1](spec), runs(dtype, kind)[name][1](loops)
    for mine, theirs in zip(found, expected, strict=True):
        nan = np.isnan(theirs)
        assert np.array_equal(np.isnan(mine), nan)
        assert np.array_equal(
            np.ascontiguousarray(mine).view(np.uint32)[~nan], np.ascontiguousarray(theirs).view(np.uint32)[~nan]
        )


def megatron_gradients(out: Path, *arguments: str, ranks: int = 1) -> dict[str, Any]:
    """SHA-256 of every gradient of a strict model by setting, in HF names."""
    launcher = ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *launcher, "tests.integration.sums_run", str(out), *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.engines
def test_nothing_but_the_sequences_decides_a_gradient_of_megatron(tmp_path: Path) -> None:
    """Micro-batches of 1, 2, 4 and 8, recomputation, one thread, Megatron's main_grad, one rank and two: one digest."""
    pytest.importorskip("megatron.core")
    one = megatron_gradients(tmp_path / "one.json")["found"]
    two = megatron_gradients(tmp_path / "two.json", ranks=2)["found"]
    assert len(one) == 7 and len(two) == 6
    first = one["micro-batch 1"]
    assert len(first) == 35 and len(set(first.values())) == 35
    for found in (one, two):
        for setting, digests in found.items():
            assert digests == first, setting


@pytest.mark.engines
@pytest.mark.exhaustive
def test_megatrons_own_optimizer_steps(tmp_path: Path) -> None:
    """In float32, through its data-parallel wrapper and gradient buffer."""
    pytest.importorskip("megatron.core")
    found = megatron_gradients(tmp_path / "out.json", "tiny-qwen3-tied", "float32")["found"]
    assert found["main_grad"] == found["micro-batch 8"]


def test_kernels_and_arrays_have_one_backward() -> None:
    """Through the functions that Megatron-core calls, every operator, bfloat16 and float32, in Triton's interpreter."""
    script = Path(__file__).with_name("interpreted_gradients.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(script)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
