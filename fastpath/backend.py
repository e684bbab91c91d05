"""The one switch between ROCm, CUDA and Triton's interpreter, and the record of what was launched through it.

Everything that decides how a kernel is compiled stands here: no FMA contraction, subnormals kept, K in one order. What
a target cannot compute under its contract raises :class:`UnsupportedError` with the reason; there is no fallback.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import torch
import triton

from fastpath import launches
from fastpath.elf import code_of
from reference.contract.base import Contract, Value

#: First and last Triton release whose generated code was checked.
TRITON_RELEASES = ((3, 6), (3, 9))
#: Whether kernels run in Triton's interpreter: decided by TRITON_INTERPRET=1 before the first import of a kernel.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
#: The target whose compiled code this process executes in emulation instead of launching it: RLK_EMULATE=gfx942.
EMULATED: str = os.environ.get("RLK_EMULATE", "")
#: Whether kernels take tensors of the CPU.
ON_CPU: bool = INTERPRETED or bool(EMULATED)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class UnsupportedError(RuntimeError):
    """The device, version, dtype, shape or contract is outside what the kernels implement; the message says which."""


@dataclass(frozen=True)
class Target:
    """Hardware that the kernels know, with the compile options that its contract needs."""

    #: ``cuda``, ``hip`` or ``interpreter``.
    runtime: str
    #: ``sm_90``, ``gfx942`` or ``cpu``.
    arch: str
    #: Arithmetic profiles it can execute, the portable one first, its fast matrix unit last.
    units: tuple[str, ...]
    #: Options of every compilation. Triton fuses mul and add by default before 3.10.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Tuning options it understands beside num_warps and num_stages; others are dropped: they cannot change bits.
    tuning: tuple[str, ...] = ()


TARGETS: dict[str, Target] = {
    target.arch: target
    for target in (
        Target("cuda", "sm_90", ("fma32-seq", "hopper-k16"), {"enable_fp_fusion": False}, ("maxnreg",)),
        Target(
            "hip",
            "gfx942",
            ("fma32-seq", "mfma-cdna3-g8"),
            # kpack=2 permutes K; 16x16x16 is the instruction of the model
            {"enable_fp_fusion": False, "allow_flush_denorm": False, "kpack": 1, "matrix_instr_nonkdim": 16},
            ("waves_per_eu",),
        ),
        Target("interpreter", "cpu", ("fma32-seq",)),
    )
}


def current_target() -> Target:
    """The target of this process, or the one that is being planned for.

    Raises:
        UnsupportedError: a Triton release that was not checked; no accelerator; one of another architecture.
    """
    return _plans[-1][0] if _plans else _device_target()


@cache
def _device_target() -> Target:
    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    first, last = TRITON_RELEASES
    if not first <= release <= last:
        raise UnsupportedError(
            f"triton {triton.__version__}: its code was not checked; "
            f"install {first[0]}.{first[1]} to {last[0]}.{last[1]}"
        )
    if EMULATED:
        if EMULATED != "gfx942" or INTERPRETED:
            raise UnsupportedError(f"RLK_EMULATE={EMULATED}: only gfx942 is emulated, and not beside TRITON_INTERPRET")
        return TARGETS[EMULATED]
    if INTERPRETED:
        if release < (3, 9):
            raise UnsupportedError(f"triton {triton.__version__}: its interpreter rounds fma twice; install 3.9")
        return TARGETS["cpu"]
    if not torch.cuda.is_available():
        raise UnsupportedError("no GPU found; set TRITON_INTERPRET=1 before the first import to run kernels on the CPU")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    arch = (
        str(properties.gcnArchName).split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    )
    if arch not in TARGETS:
        raise UnsupportedError(f"device {properties.name} ({arch}): kernels are checked on {', '.join(TARGETS)}")
    return TARGETS[arch]


def compile_options(target: Target, **tuning: Any) -> dict[str, Any]:
    """What to pass to Triton for ``target``: its fixed options, and the tuning options that it understands."""
    if target.runtime == "interpreter":
        return {}
    known = ("num_warps", "num_stages", *target.tuning)
    return {**{name: value for name, value in tuning.items() if name in known}, **target.options}


@dataclass(frozen=True)
class Launch:
    """Evidence of one kernel launch: what ran, under which contract, compiled how."""

    kernel: str
    operator: str
    #: ``Contract.contract_id`` of the contract that the kernel was given.
    contract_id: str
    #: ``sm_90``, ``gfx942`` or ``cpu``.
    target: str
    triton: str
    #: Compile options and compile-time constants.
    options: Mapping[str, Value]
    #: SHA-256 of the machine code, debug information aside; of the source text in the interpreter.
    code_sha256: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


# Shared by all threads: autograd runs backward kernels on threads of its own.
_recorders: list[list[Launch]] = []


@contextmanager
def record() -> Iterator[list[Launch]]:
    """Collect every launch of the process: ``with record() as evidence: ...``. Recorders nest."""
    evidence: list[Launch] = []
    _recorders.append(evidence)
    try:
        yield evidence
    finally:
        _recorders[:] = [other for other in _recorders if other is not evidence]


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    contract: Contract,
    options: Mapping[str, Any] | None = None,
    **constants: Any,
) -> None:
    """Launch a Triton kernel on the current target under ``contract``, and record it if anybody records.

    Args:
        kernel: a ``triton.jit`` function.
        arguments: its run-time arguments, in order.
        options: tuning (num_warps, num_stages, ...); what decides bits is added here and cannot be overridden.
        constants: its compile-time constants.

    Raises:
        UnsupportedError: as :func:`current_target`.
    """
    target = current_target()
    merged = compile_options(target, **(options or {}))
    if _plans:
        _plans[-1][1].append(Plan(kernel, arguments, constants, merged, contract, target))
        return
    launches.count(kernel.fn.__name__, contract)
    if EMULATED:
        execute = importlib.import_module("fastpath.emulation.plans").execute
        code = execute(Plan(kernel, arguments, constants, merged, contract, target), grid)
        if _recorders:
            note(kernel.fn.__name__, contract, {**merged, **constants}, code)
        return
    compiled = kernel[grid](*arguments, **constants, **merged)
    if _recorders:
        note(kernel.fn.__name__, contract, {**merged, **constants}, _code(kernel, compiled, target))


@dataclass(frozen=True)
class Plan:
    """A launch that was asked for while planning: what to compile for which target."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    contract: Contract
    target: Target


_plans: list[tuple[Target, list[Plan]]] = []


@contextmanager
def plan(arch: str) -> Iterator[list[Plan]]:
    """Collect the launches of ``arch`` without executing any, on a machine without that accelerator.

    Operators then take tensors on the device ``meta`` and return such tensors: what they launch is exactly what they
    would launch for tensors of that dtype and shape.

    Raises:
        UnsupportedError: no such target, or a process that runs kernels in the interpreter.
    """
    if arch not in TARGETS or INTERPRETED:
        known = ", ".join(TARGETS)
        raise UnsupportedError(f"arch: {arch!r} cannot be planned; choose one of {known}, without TRITON_INTERPRET")
    planned = (TARGETS[arch], list[Plan]())
    _plans.append(planned)
    try:
        yield planned[1]
    finally:
        _plans.remove(planned)


def note(kernel: str, contract: Contract, options: Mapping[str, Any], code: bytes) -> None:
    """Record a launch that did not come through :func:`launch` (HIP C++, a collective's transport)."""
    entry = Launch(
        kernel=kernel,
        operator=contract.operator,
        contract_id=contract.contract_id,
        target=current_target().arch,
        triton=triton.__version__,
        options={name: value if isinstance(value, str | int | bool) else str(value) for name, value in options.items()},
        code_sha256=hashlib.sha256(code_of(code)).hexdigest(),
    )
    for evidence in _recorders:
        evidence.append(entry)


def _code(kernel: Any, compiled: Any, target: Target) -> bytes:
    if target.runtime == "interpreter":
        return inspect.getsource(kernel.fn).encode()
    binary: bytes = compiled.asm["cubin" if target.runtime == "cuda" else "hsaco"]
    return binary


def require_unit(contract: Contract, path: str = "primitives.unit") -> str:
    """The contract's arithmetic profile, if this target executes it.

    Raises:
        UnsupportedError: another vendor's matrix unit.
    """
    unit, target = str(contract.get(path)), current_target()
    if unit not in target.units:
        raise UnsupportedError(f"{contract.operator}: {path} {unit} cannot run on {target.arch}: it has {target.units}")
    return unit


def require_fields(contract: Contract, implemented: Mapping[str, Value | Sequence[Value]]) -> None:
    """Refuse a contract that the kernel does not implement.

    Args:
        implemented: contract path -> the value, or the values, that the kernel computes.

    Raises:
        UnsupportedError: naming the field, its value and what is implemented.
    """
    for path, values in implemented.items():
        allowed = (values,) if isinstance(values, str | int | bool) else tuple(values)
        if contract.get(path) not in allowed:
            raise UnsupportedError(
                f"{contract.operator}: {path} = {contract.get(path)!r} has no kernel (only {list(allowed)}); "
                "reference.operators computes it"
            )


def require_tensor(tensor: torch.Tensor, argument: str, axes: str, *dtypes: torch.dtype) -> torch.Tensor:
    """``tensor``, if it is contiguous, on this target's device, of a dtype in ``dtypes``, with the axes that ``axes``
    names ("tokens, hidden"); an axis may be pinned: "tokens, hidden=4096".

    Raises:
        TypeError: dtype, or not a tensor.
        ValueError: shape, layout or device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{argument}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"{argument}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}; convert it explicitly"
        )
    names = axes.split(", ")
    pinned = [int(name.partition("=")[2] or -1) for name in names]
    if tensor.ndim != len(names) or any(size not in (-1, got) for size, got in zip(pinned, tensor.shape, strict=True)):
        raise ValueError(f"{argument}: expected shape [{axes}], got {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{argument}: strides {tensor.stride()} are not contiguous; call .contiguous()")
    expected = "meta" if _plans else "cpu" if ON_CPU else "cuda"
    if tensor.device.type != expected:
        raise ValueError(
            f"{argument}: on {tensor.device}, but this process computes on {expected}; call .to({expected!r})"
        )
    return tensor
