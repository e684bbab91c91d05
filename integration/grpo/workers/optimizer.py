"""AdamW in float32 over a model of any dtype: master weights and moments whose bits a resume restores.

Loshchilov & Hutter, "Decoupled weight decay regularization", algorithm 2. Written out in operations of one rounding
each, because PyTorch's own AdamW joins a product and a sum where the device has an instruction for it: so neither ranks
nor threads nor the device change a bit. The gradient's norm is summed in float64 in one tree over each parameter's
elements, parameter by parameter, rank by rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from integration.grpo.config import GrpoConfig

Tensor = Any
_MOMENTS = ("exp_avg", "exp_avg_sq")


class MasterOptimizer:
    """The optimizer of one rank's parameters.

    Args:
        parameters: name -> live parameter of the model.
        shared: names that every rank holds whole; their gradients count once in the norm.
        gather: a float of every rank, in rank order.
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],
        config: GrpoConfig,
        shared: Sequence[str],
        gather: Callable[[float], Sequence[float]],
    ) -> None:
        import torch

        self._live, self._shared, self._gather = parameters, frozenset(shared), gather
        self._config = config
        self._master = {name: p.detach().float().clone() for name, p in parameters.items()}
        self._gradient: dict[str, Tensor] = {}
        self._moments = {
            moment: {name: torch.zeros_like(master) for name, master in self._master.items()} for moment in _MOMENTS
        }
        self._steps = 0

    def clear(self) -> None:
        """Forget all gradients."""
        self._gradient = {}
        for live in self._live.values():
            live.grad = None

    def accumulate(self) -> None:
        """Add the model's gradients, of one backward, to the float32 ones."""
        for name, live in self._live.items():
            if live.grad is not None:
                if name in self._gradient:
                    self._gradient[name].add_(live.grad.float())
                else:
                    # A copy where the model is float32: its gradient is the model's to reuse.
                    self._gradient[name] = live.grad.float().clone()
                live.grad = None

    def take(self, gradients: dict[str, Tensor | None]) -> None:
        """Use these float32 gradients, of all micro-batches together."""
        self._gradient = {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def gradient(self, name: str) -> Tensor:
        """The float32 gradient of a parameter, or None."""
        return self._gradient.get(name)

    def step(self) -> float:
        """One step; the model gets the rounded weights.

        Returns:
            Norm of the gradient over all ranks, before it was scaled down.

        Raises:
            ArithmeticError: it is not finite. Nothing was changed.
        """
        import torch

        config = self._config
        norm = self._norm()
        if not math.isfinite(norm):
            raise ArithmeticError(f"a gradient of norm {norm}")
        scale = config.max_grad_norm / norm if 0 < config.max_grad_norm < norm else None
        self._steps += 1
        # Scalars multiply: PyTorch divides by one on a CPU, and multiplies by its reciprocal on a GPU.
        first = 1.0 / (1.0 - config.beta1**self._steps)
        second = 1.0 / math.sqrt(1.0 - config.beta2**self._steps)
        with torch.no_grad():
            for name, gradient in self._gradient.items():
                if scale is not None:
                    gradient.mul_(scale)
                mean, square = (self._moments[moment][name] for moment in _MOMENTS)
                mean.mul_(config.beta1).add_(gradient.mul(1.0 - config.beta1))
                square.mul_(config.beta2).add_(gradient.square().mul_(1.0 - config.beta2))
                change = mean.div(square.sqrt().mul_(second).add_(config.epsilon)).mul_(config.lr * first)
                master = self._master[name]
                if config.weight_decay:
                    master.mul_(1.0 - config.lr * config.weight_decay)
                master.sub_(change)
            for name, live in self._live.items():
                live.copy_(self._master[name])
        return norm

    def _norm(self) -> float:
        import torch

        if not self._gradient:
            return 0.0
        squares = torch.stack([_tree_sum(gradient.double().square()) for gradient in self._gradient.values()]).tolist()
        own, shared = 0.0, 0.0
        for name, square in zip(self._gradient, squares, strict=True):
            if name in self._shared:
                shared += square
            else:
                own += square
        return math.sqrt(sum(self._gather(own)) + shared)

    def state(self) -> dict[str, Tensor]:
        """Everything that decides the next step, as named tensors."""
        import torch

        state = {f"master.{name}": master for name, master in self._master.items()}
        for moment, values in self._moments.items():
            state |= {f"{moment}.{name}": value for name, value in values.items()}
        state["step"] = torch.tensor(self._steps)
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        """Take the state back; the model gets its weights.

        Raises:
            KeyError, ValueError: a tensor is missing, or of another shape.
        """
        import torch

        kinds = {"master": self._master, **self._moments}
        for kind, own in kinds.items():
            for name, value in own.items():
                if state[f"{kind}.{name}"].shape != value.shape:
                    raise ValueError(f"{kind}.{name} has shape {tuple(state[f'{kind}.{name}'].shape)}")
        steps = int(state["step"])
        with torch.no_grad():
            for kind, own in kinds.items():
                for name, value in own.items():
                    value.copy_(state[f"{kind}.{name}"])
            for name, live in self._live.items():
                live.copy_(self._master[name])
        self._steps = steps
        self.clear()


def _tree_sum(values: Tensor) -> Tensor:
    """Sum of all elements, first half to second half until one is left: the same on every device."""
    import torch

    flat = values.reshape(-1)
    size = 1 << max(0, flat.numel() - 1).bit_length()
    if size != flat.numel():
        flat = torch.nn.functional.pad(flat, (0, size - flat.numel()))
    while flat.numel() > 1:
        left, right = flat.chunk(2)
        flat = left + right
    return flat[0]
