"""AdamW in float32 over a model of any dtype: master weights and moments whose bits a resume restores.

PyTorch's own AdamW, one tensor at a time; every operation is elementwise, so that neither ranks nor threads change a
bit of it. The gradient's norm is summed in float64, parameter by parameter, rank by rank.
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
        self._limit = config.max_grad_norm
        self._master = {name: p.detach().float().clone().requires_grad_() for name, p in parameters.items()}
        self._adam = torch.optim.AdamW(
            self._master.values(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            foreach=False,
        )

    def clear(self) -> None:
        """Forget all gradients."""
        for name, master in self._master.items():
            master.grad = None
            self._live[name].grad = None

    def accumulate(self) -> None:
        """Add the model's gradients, of one backward, to the float32 ones."""
        for name, live in self._live.items():
            if live.grad is not None:
                wide, master = live.grad.float(), self._master[name]
                master.grad = wide if master.grad is None else master.grad.add_(wide)
                live.grad = None

    def gradient(self, name: str) -> Tensor:
        """The float32 gradient of a parameter, or None."""
        return self._master[name].grad

    def step(self) -> float:
        """One step; the model gets the rounded weights.

        Returns:
            Norm of the gradient over all ranks, before it was scaled down.

        Raises:
            ArithmeticError: it is not finite. Nothing was changed.
        """
        import torch

        norm = self._norm()
        if not math.isfinite(norm):
            raise ArithmeticError(f"a gradient of norm {norm}")
        if self._limit and norm > self._limit:
            for master in self._master.values():
                if master.grad is not None:
                    master.grad.mul_(self._limit / norm)
        self._adam.step()
        with torch.no_grad():
            for name, live in self._live.items():
                live.copy_(self._master[name])
        return norm

    def _norm(self) -> float:
        own, shared = 0.0, 0.0
        for name, master in self._master.items():
            if master.grad is not None:
                square = float(master.grad.double().square().sum())
                if name in self._shared:
                    shared += square
                else:
                    own += square
        return math.sqrt(sum(self._gather(own)) + shared)

    def state(self) -> dict[str, Tensor]:
        """Everything that decides the next step, as named tensors."""
        import torch

        state = {f"master.{name}": master.detach() for name, master in self._master.items()}
        for name, master in self._master.items():
            moments = self._adam.state.get(master, {})
            for moment in _MOMENTS:
                state[f"{moment}.{name}"] = moments.get(moment, torch.zeros_like(master)).detach()
            # A copy each: safetensors refuses tensors that share memory.
            state[f"step.{name}"] = moments.get("step", torch.tensor(0.0)).detach().clone()
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        """Take the state back; the model gets its weights.

        Raises:
            KeyError, ValueError: a tensor is missing, or of another shape.
        """
        import torch

        with torch.no_grad():
            for name, master in self._master.items():
                for kind in ("master", *_MOMENTS):
                    if state[f"{kind}.{name}"].shape != master.shape:
                        raise ValueError(f"{kind}.{name} has shape {tuple(state[f'{kind}.{name}'].shape)}")
                master.copy_(state[f"master.{name}"])
                self._adam.state[master] = {moment: state[f"{moment}.{name}"].clone() for moment in _MOMENTS}
                self._adam.state[master]["step"] = state[f"step.{name}"].clone()
                self._live[name].copy_(master)
        self.clear()
