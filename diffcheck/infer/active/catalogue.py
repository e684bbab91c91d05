"""Kernels of torch that can be probed by name, as the engines call them on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diffcheck.base.errors import InputError
from diffcheck.infer.active.kernel import Kernel, torch_kernel


def _torch() -> Any:
    import torch

    return torch


def _attention(x: Any) -> Any:
    """Equal scores: every probability is 1/n, exact for a power of two; the order is that of the weighted values."""
    torch = _torch()
    n, width = x.shape[0], 64
    q, k = x.new_zeros(1, 1, 1, width), x.new_zeros(1, 1, n, width)
    v = x.new_ones(1, 1, n, width)
    v[0, 0, :, 0] = x
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)[0, 0, 0, 0]


def _rows_of_one(x: Any, add: Callable[[Any, Any], Any]) -> Any:
    """``add(target [1], index [n])`` with every index 0."""
    torch = _torch()
    return add(x.new_zeros(1), torch.zeros(x.shape[0], dtype=torch.int64, device=x.device))[0]


#: name -> (form, function, what differs from `torch_kernel`'s defaults).
KERNELS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "sum": ("sum", lambda x: x.sum(), {"length": 256}),
    "sum-1024": ("sum", lambda x: x.sum(), {"length": 1024}),
    "sum-bfloat16": ("sum", lambda x: x.sum(), {"length": 256, "dtype": "bfloat16"}),
    "sum-float64": ("sum", lambda x: x.sum(), {"length": 256, "dtype": "float64"}),
    "sum-rows": ("sum", lambda x: x[None].expand(4, -1).contiguous().sum(1)[0], {"length": 256}),
    "sum-columns": ("sum", lambda x: x[:, None].expand(-1, 64).contiguous().sum(0)[0], {"length": 256}),
    "mean": ("sum", lambda x: x.mean(), {"length": 256}),
    "nansum": ("sum", lambda x: x.nansum(), {"length": 256}),
    "cumsum": ("sum", lambda x: x.cumsum(0)[-1], {"length": 128}),
    "index_add": (
        "sum",
        lambda x: _rows_of_one(x, lambda target, index: target.index_add(0, index, x)),
        {"length": 128},
    ),
    "scatter_add": (
        "sum",
        lambda x: _rows_of_one(x, lambda target, index: target.scatter_add(0, index, x)),
        {"length": 128},
    ),
    "avg_pool1d": (
        "sum",
        lambda x: _torch().nn.functional.avg_pool1d(x[None, None], x.shape[0])[0, 0, 0],
        {"length": 128},
    ),
    "attention-values": ("sum", _attention, {"length": 128}),
    "dot": ("dot", lambda x, y: _torch().dot(x, y), {"length": 256}),
    "vecdot": ("dot", lambda x, y: _torch().linalg.vecdot(x, y), {"length": 256}),
    "einsum": ("dot", lambda x, y: _torch().einsum("i,i->", x, y), {"length": 256}),
    "conv1d": (
        "dot",
        lambda x, y: _torch().nn.functional.conv1d(x[None, None], y[None, None])[0, 0, 0],
        {"length": 128},
    ),
    "mv": ("dot", lambda x, y: (x[None].expand(8, -1).contiguous() @ y)[0], {"length": 256}),
    "matmul": ("matmul", lambda a, b: a @ b, {"length": 256, "rows": 16, "columns": 64}),
    "linear": ("linear", lambda x, w: _torch().nn.functional.linear(x, w), {"length": 256, "rows": 16, "columns": 64}),
    "linear-1": ("linear", lambda x, w: _torch().nn.functional.linear(x, w), {"length": 256, "columns": 64}),
    "bmm": ("matmul", lambda a, b: _torch().bmm(a[None], b[None])[0], {"length": 256, "rows": 16, "columns": 64}),
    "linear-bfloat16": (
        "linear",
        lambda x, w: _torch().nn.functional.linear(x, w),
        {"length": 256, "rows": 16, "columns": 64, "dtype": "bfloat16"},
    ),
    "linear-bfloat16-1": (
        "linear",
        lambda x, w: _torch().nn.functional.linear(x, w),
        {"length": 256, "columns": 64, "dtype": "bfloat16"},
    ),
}


def named(name: str, device: str = "cpu", **changes: Any) -> Kernel:
    """The kernel ``name``; ``changes`` go before its own settings (`torch_kernel`'s arguments).

    Raises:
        InputError: no such kernel.
    """
    if name not in KERNELS:
        raise InputError(
            f"kernel {name!r} is none of {', '.join(KERNELS)}", "choose one of these, or name module:function"
        )
    form, function, settings = KERNELS[name]
    return torch_kernel(name, function, form, **{**settings, **changes}, device=device)
