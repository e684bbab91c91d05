"""Where the gradients of parameters add up: float32 sums that go on from one micro-batch to the next.

Three ways, chosen per parameter:

- its sums are kept (`keep`): every use of a parameter has sums of its own, so that bits depend neither on the size of
  micro-batches nor, head norms included, on the number of ranks; `gradient` makes one gradient of them;
- it has a float32 ``main_grad`` of Megatron's, to which the sums are added in place, as its fused accumulation does;
- else the gradient of one backward is rounded to the parameter's dtype, and PyTorch adds those up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

Tensor = Any
#: Attribute of a parameter: use -> float32 sums.
KEPT = "rlk_sums"
#: Uses of a parameter in the order in which their sums are added.
USES = ("head", "embedding", "")


def keep(parameters: Iterable[Tensor]) -> None:
    """Begin sums of their own for ``parameters``; earlier ones are forgotten."""
    for parameter in parameters:
        setattr(parameter, KEPT, {})


def release(parameters: Iterable[Tensor]) -> None:
    """Give gradients of ``parameters`` back to PyTorch or Megatron."""
    for parameter in parameters:
        if hasattr(parameter, KEPT):
            delattr(parameter, KEPT)


def gradient(parameter: Tensor) -> Tensor | None:
    """The kept sums of all uses as one float32 gradient, like ``parameter``; None if it was not used.

    Of a head norm on several ranks it is this rank's share: add the ranks' in a tree.
    """
    total = None
    kept = getattr(parameter, KEPT)
    for use in USES:
        if use in kept:
            sums, merge = kept[use]
            merged = merge(sums).reshape(parameter.shape)
            total = merged if total is None else total + merged
    return total


def into_main_grads(parameters: Iterable[Tensor]) -> None:
    """Add kept sums to Megatron's ``main_grad``, once all micro-batches are done, and begin new ones.

    Call it before Megatron finalises gradients (``config.finalize_model_grads_func``).
    """
    for parameter in parameters:
        if getattr(parameter, KEPT, None):
            parameter.main_grad.add_(gradient(parameter))
            setattr(parameter, KEPT, {})


def _as_they_are(sums: Tensor) -> Tensor:
    return sums


def accumulate(
    parameter: Tensor,
    add: Callable[[Tensor], Any],
    shape: tuple[int, ...] | None = None,
    *,
    use: str = "",
    merge: Callable[[Tensor], Tensor] = _as_they_are,
) -> tuple[Any, Tensor | None]:
    """Let ``add`` add a gradient to the sums of ``parameter``.

    Args:
        add: is given float32 sums, contiguous, to which it adds in place.
        shape: of the sums, if not the parameter's.
        use: one of `USES`, where a parameter has several.
        merge: makes a gradient of sums that have another shape.

    Returns:
        What ``add`` returned, and what the backward function returns for the parameter.
    """
    shape = tuple(parameter.shape) if shape is None else shape
    kept = getattr(parameter, KEPT, None)
    if kept is not None:
        if use not in kept:
            kept[use] = torch.zeros(shape, dtype=torch.float32, device=parameter.device), merge
        return add(kept[use][0]), None
    main = getattr(parameter, "main_grad", None)
    if main is not None and main.dtype == torch.float32 and hasattr(parameter, "grad_added_to_main_grad"):
        if main.numel() == torch.Size(shape).numel() and main.is_contiguous():
            found = add(main.view(shape))
        else:
            sums = torch.zeros(shape, dtype=torch.float32, device=parameter.device)
            found = add(sums)
            main.add_(merge(sums).reshape(main.shape))
        parameter.grad_added_to_main_grad = True
        # Megatron's hooks want to see a gradient; they look at its values only of parameters that they say so of.
        return found, (torch.zeros_like if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like)(parameter)
    sums = torch.zeros(shape, dtype=torch.float32, device=parameter.device)
    found = add(sums)
    return found, merge(sums).reshape(parameter.shape).to(parameter.dtype)
