"""Weight files and the optimizer's state: what comes back is what was written, or an error that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diffcheck.base.errors import EngineError, InputError
from diffcheck.base.record import weight_digest
from integration.grpo.config import GrpoConfig
from integration.grpo.loop import checked_answer
from integration.grpo.workers.weights import joint_digest, read_weights, weights_path, write_weights

torch = pytest.importorskip("torch")


def some(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(40, 30, generator=generator).bfloat16() for name in ("a", "b", "c")}


def digests(weights: dict[str, Any]) -> dict[str, str]:
    return {name: weight_digest(weight) for name, weight in weights.items()}


def test_weights_come_back_to_the_bit(tmp_path: Path) -> None:
    path = weights_path(tmp_path / "weights", 7)
    write_weights(path, some(0))
    assert path.name == "v000007.safetensors" and [p.name for p in path.parent.iterdir()] == [path.name]
    found = read_weights(path, digests(some(0)))
    assert all(torch.equal(found[name].view(torch.int16), some(0)[name].view(torch.int16)) for name in "abc")


@pytest.mark.parametrize("damage", ["cut", "flip", "other", "missing weight", "no file"])
def test_a_file_that_is_not_what_was_written_is_refused(damage: str, tmp_path: Path) -> None:
    path, wanted = tmp_path / "v000001.safetensors", digests(some(0))
    write_weights(path, some(1) if damage == "other" else some(0))
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[:-100])
    elif damage == "flip":
        data[-100] ^= 1
        path.write_bytes(data)
    elif damage == "missing weight":
        wanted["d"] = wanted["a"]
    elif damage == "no file":
        path.unlink()
    with pytest.raises(InputError, match=r"v000001\.safetensors: ") as caught:
        read_weights(path, wanted)
    assert "resume" in caught.value.remedy


def test_the_joint_digest_is_of_names_and_values() -> None:
    one = digests(some(0))
    assert joint_digest(one) == joint_digest(dict(reversed(one.items())))
    assert joint_digest(one) != joint_digest({**one, "a": one["b"]})
    assert joint_digest(one) != joint_digest({"x": one["a"], "b": one["b"], "c": one["c"]})


@pytest.mark.parametrize(
    ("logprobs", "named"),
    [
        ([-1.0], "sample x: 1 logprobs for 2 tokens"),
        ([-1.0, -2.0, -3.0], "sample x: 3 logprobs for 2 tokens"),
        ([-1.0, float("nan")], "the logprob of response token 1 is nan"),
        ([float("-inf"), -1.0], "the logprob of response token 0 is -inf"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_named(logprobs: list[float], named: str) -> None:
    answer = {"id": "x", "tokens": [4, 5], "logprobs": logprobs, "finish_reason": "length", "version": 0}
    with pytest.raises(EngineError) as caught:
        checked_answer(answer)
    assert named in caught.value.cause
    good = checked_answer({**answer, "logprobs": [-1.5, -0.25]})
    assert good.rollout_logprobs.tolist() == [-1.5, -0.25] and good.weight_version == 0


def optimizer(parameters: dict[str, Any], **changes: Any) -> Any:
    from integration.grpo.workers.optimizer import MasterOptimizer

    config = GrpoConfig(**{"lr": 0.05, "max_grad_norm": 1.0, **changes})
    return MasterOptimizer(parameters, config, ["b"], lambda value: [value, value])


def learn(own: Any, parameters: dict[str, Any], steps: range) -> list[float]:
    norms = []
    for step in steps:
        own.clear()
        for half in (0, 1):
            generator = torch.Generator().manual_seed(2 * step + half)
            for parameter in parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
            own.accumulate()
        norms.append(own.step())
    return norms


def fresh() -> dict[str, Any]:
    return {name: torch.nn.Parameter(weight) for name, weight in some(3).items()}


def test_an_optimizer_that_was_saved_goes_on_to_the_bit(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    calm, cut = fresh(), fresh()
    whole = learn(optimizer(calm), calm, range(6))
    first = optimizer(cut)
    norms = learn(first, cut, range(3))
    save_file(first.state(), tmp_path / "state.safetensors")
    again = fresh()
    second = optimizer(again)
    second.load(load_file(tmp_path / "state.safetensors"))
    assert norms + learn(second, again, range(3, 6)) == whole
    assert all(torch.equal(calm[n].view(torch.int16), again[n].view(torch.int16)) for n in calm)
    bad = first.state()
    bad["exp_avg.a"] = bad["exp_avg.a"][:5]
    with pytest.raises(ValueError, match=r"exp_avg\.a has shape"):
        optimizer(fresh()).load(bad)


def test_gradients_are_summed_in_float32_and_the_norm_counts_shared_ones_once() -> None:
    parameters = fresh()
    own = optimizer(parameters, max_grad_norm=0.0)
    parts = {
        name: [torch.full(p.shape, 1.0).bfloat16(), torch.full(p.shape, 2**-9).bfloat16()]
        for name, p in parameters.items()
    }
    for half in (0, 1):
        for name, parameter in parameters.items():
            parameter.grad = parts[name][half]
        own.accumulate()
    # In bfloat16 the small half would be lost.
    assert float(own.gradient("a")[0, 0]) == 1 + 2**-9
    square = 1200 * (1 + 2**-9) ** 2
    # Two ranks hold a part of a and c each; both hold all of b.
    assert own.step() == pytest.approx((2 * 2 * square + square) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9])
def test_a_norm_is_summed_first_half_to_second_half(size: int) -> None:
    from integration.grpo.workers.optimizer import _tree_sum

    values = torch.arange(1, size + 1, dtype=torch.float64).pow(2) / 3
    parts = values.tolist() + [0.0] * ((1 << (size - 1).bit_length()) - size)
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:], strict=True)]
    assert float(_tree_sum(values.reshape(size, 1))) == parts[0]


def test_two_steps_are_those_of_adamw() -> None:
    """PyTorch's, which rounds elsewhere, on the same float32 gradients; and the model gets the rounded weights."""
    parameters = fresh()
    own = optimizer(parameters, max_grad_norm=0.0, weight_decay=0.1, beta1=0.8, beta2=0.9, epsilon=1e-3)
    theirs = {name: torch.nn.Parameter(p.detach().float()) for name, p in parameters.items()}
    adam = torch.optim.AdamW(theirs.values(), lr=0.05, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)
    for step in range(2):
        own.clear()
        for name, parameter in parameters.items():
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
            parameter.grad, theirs[name].grad = gradient, gradient.float()
        own.accumulate()
        own.step()
        adam.step()
    for name, parameter in parameters.items():
        master = own.state()[f"master.{name}"]
        torch.testing.assert_close(master, theirs[name].detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(parameter.detach(), master.bfloat16())


@pytest.mark.parametrize("limit", [0.0, 0.5, 1e9])
def test_a_long_gradient_is_scaled_down_to_the_limit(limit: float) -> None:
    """The first moment is (1 - beta1) of what the optimizer was given: AdamW's own step hides the scale."""
    parameters = fresh()
    own = optimizer(parameters, max_grad_norm=limit)
    for parameter in parameters.values():
        parameter.grad = torch.full(parameter.shape, 0.25).bfloat16()
    own.accumulate()
    norm = own.step()
    scale = limit / norm if limit == 0.5 else 1.0
    assert norm > 1
    for name in parameters:
        moment = own.state()[f"exp_avg.{name}"]
        assert torch.allclose(moment, torch.full_like(moment, 0.25 * 0.1 * scale), rtol=1e-5, atol=0)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    parameters = fresh()
    own = optimizer(parameters)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = torch.full(parameter.shape, float("nan")).bfloat16()
    own.accumulate()
    with pytest.raises(ArithmeticError, match="norm nan"):
        own.step()
    assert all(torch.equal(before[name], parameters[name]) for name in before)
