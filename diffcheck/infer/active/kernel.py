"""What is probed: something that adds n numbers, or n products, seen from outside as one function of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffcheck.base.errors import InputError
from reference.formats import FORMATS

Float64Array = NDArray[np.float64]
#: Format -> (M, unit): counts of units are lost in M in any accumulator up to float64's 53 bits (float16's range ends
#: before: up to float32's 24), and exact without it.
MARKS = {
    "float64": (2.0**200, 1.0),
    "float32": (2.0**100, 1.0),
    "bfloat16": (2.0**100, 1.0),
    "float16": (2.0**15, 2.0**-24),
}
#: Significant bits: counts up to two to this power are exact.
PRECISION = {"float64": 53} | {name: FORMATS[name].mantissa_bits + 1 for name in MARKS if name != "float64"}
#: How a function of torch tensors is called. name -> (what it gets, whether it adds products).
FORMS = {
    "sum": ("f(x[n]): one number, the sum or a multiple of it", False),
    "dot": ("f(x[n], y[n]): one number", True),
    "matmul": ("f(x[rows, n], y[n, columns]): [rows, columns]", True),
    "linear": ("f(x[rows, n], w[columns, n]): [rows, columns]", True),
}


@dataclass(frozen=True)
class Kernel:
    """One element of a kernel's output as a function of the numbers, or pairs of numbers, that it adds."""

    name: str
    #: Summands.
    length: int
    #: Format of the operands.
    dtype: str
    #: Whether summands are products of x and y.
    products: bool
    #: x float64 [n], y float64 [n] or None, values of ``dtype``: the output, and its format.
    run: Callable[[Float64Array, Float64Array | None], tuple[float, str]]
    #: How it is called, in words.
    form: str = ""


def torch_kernel(
    name: str,
    function: Callable[..., Any],
    form: str,
    *,
    length: int,
    dtype: str = "float32",
    rows: int = 1,
    columns: int = 1,
    element: tuple[int, int] = (0, 0),
    device: str = "cpu",
) -> Kernel:
    """A torch function as a kernel.

    Args:
        form: one of `FORMS`.
        rows, columns: shape of the other axes (matmul, linear): kernels choose their order by it.
        element: the output element that is probed.

    Raises:
        InputError: an unknown form or dtype, a length below 2, an element outside of the output.
    """
    import torch

    for what, value, allowed in (("form", form, FORMS), ("dtype", dtype, MARKS)):
        if value not in allowed:
            raise InputError(f"{what} {value!r} is none of {', '.join(allowed)}", f"choose one of {', '.join(allowed)}")
    if length < 2:
        raise InputError(f"length {length}: one summand has no order", "choose 2 or more")
    row, column = element
    if not (0 <= row < rows and 0 <= column < columns):
        raise InputError(
            f"element {row},{column} is outside of an output of {rows} x {columns}", "choose one inside, or more rows"
        )
    torch_dtype = getattr(torch, dtype)

    def tensor(values: Float64Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=torch_dtype)

    def call(x: Float64Array, y: Float64Array | None) -> Any:
        if form == "sum":
            return function(tensor(x))
        if form == "dot":
            return function(tensor(x), tensor(_given(y)))
        left, right = np.ones((rows, length)), np.ones((columns, length))
        left[row], right[column] = x, _given(y)
        return function(tensor(left), tensor(right) if form == "linear" else tensor(right).t().contiguous())

    def run(x: Float64Array, y: Float64Array | None) -> tuple[float, str]:
        try:
            out = call(x, y)
        except Exception as error:  # whatever a stranger's function raises
            text = str(error).strip().splitlines() or [""]
            raise InputError(
                f"{name}: called with --as {form} it raised {type(error).__name__}: {text[0]}",
                "choose another --as, --dtype or --length, or wrap the function",
            ) from error
        expected = [rows, columns] if form in ("matmul", "linear") else []
        found = list(out.shape) if isinstance(out, torch.Tensor) else None
        if found != expected and not (found is not None and not expected and out.numel() == 1):
            raise InputError(
                f"{name}: its output is {type(out).__name__ if found is None else found}, where --as {form} expects "
                f"{expected or 'one number in a tensor'}",
                "choose another --as, or wrap the function",
            )
        out = out[row, column] if expected else out.reshape(())
        return float(out.double()), str(out.dtype).removeprefix("torch.")

    shape = {"sum": f"[{length}]", "dot": f"[{length}] . [{length}]"}.get(
        form, f"[{rows}, {length}] x [{length}, {columns}], element {row},{column}"
    )
    return Kernel(name, length, dtype, FORMS[form][1], run, f"{form}, {shape}, {dtype}, {device}")


def _given(y: Float64Array | None) -> Float64Array:
    assert y is not None
    return y


def load(path: str) -> Callable[..., Any]:
    """The function that ``module:name`` names; ``name`` may have dots.

    Raises:
        InputError: no such module or name, or one that cannot be called.
    """
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{path}: {module} cannot be imported: {error}", "name an installed module, as module:function"
        ) from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise InputError(f"{path}: {module} has no {name}", "name a function of it, as module:function")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{path} is no function but {type(found).__name__}", "name a function, as module:function")
    function: Callable[..., Any] = found
    return function
