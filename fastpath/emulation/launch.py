"""One launch executed: arguments laid out as the compiler's metadata says, work-groups run, faults named."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from numpy.typing import NDArray

from fastpath.emulation.build import library, operations
from fastpath.emulation.code_object import Kernel, kernels
from fastpath.emulation.translate import RECORD, translate

#: Instructions of one work-group's wavefronts before it counts as endless.
MOST_STEPS = 200_000_000
LANES = 64
#: observe(size, a, b, c, d): operands and result of an MFMA, pointers to 32-bit words.
Observer = ctypes.CFUNCTYPE(None, ctypes.c_int32, *[ctypes.POINTER(ctypes.c_uint32)] * 4)


class ExecutionError(RuntimeError):
    """The code did something that no correct kernel does: the message says what, where, in which work-group."""


@dataclass(frozen=True)
class Execution:
    """What one launch did."""

    instructions: int
    #: Hardware approximations among the lanes' results (v_rcp, v_sqrt, ...).
    approximations: int


class _Setup(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in (
                *("kernarg_at", "dispatch_at", "preload_at", "preload_words", "group_x", "group_y", "group_z"),
                *("scratch_wave", "size_x", "size_y", "size_z", "flat_scratch"),
            )
        ),
        ("kernarg", ctypes.c_uint64),
    ]


class _Range(ctypes.Structure):
    _fields_ = [
        ("first", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("writable", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


@lru_cache(maxsize=512)
def translated(binary: bytes) -> tuple[Kernel, NDArray[Any]]:
    """The only kernel of a code object, and its records."""
    found = kernels(binary)
    if len(found) != 1:
        raise ExecutionError(f"expected one kernel, found {', '.join(found)}")
    kernel = next(iter(found.values()))
    return kernel, translate(kernel.text, operations())


def _scalar_registers(kernel: Kernel, setup: _Setup) -> None:
    """Where the hardware puts what a kernel asks for: user registers in order, then system registers."""
    properties, second = kernel.properties, kernel.resources[1]
    at = 0
    setup.kernarg_at = setup.dispatch_at = -1
    for bit, words in enumerate((4, 2, 2, 2, 2, 2, 1)):  # private buffer, dispatch, queue, kernarg, id, scratch, size
        if not properties >> bit & 1:
            continue
        if bit == 3:
            setup.kernarg_at = at
        elif bit in (0, 5):
            pass  # scratch is addressed by lane here; its base registers stay zero
        else:
            raise ExecutionError(f"{kernel.name}: asks for user register {bit}, which is not set up")
        at += words
    length, offset = kernel.preloaded
    setup.preload_at, setup.preload_words = at, length
    if length and offset:
        raise ExecutionError(f"{kernel.name}: preloads arguments from word {offset}")
    at = second >> 1 & 0x1F
    for bit, name in ((7, "group_x"), (8, "group_y"), (9, "group_z")):
        present = second >> bit & 1
        setattr(setup, name, at if present else -1)
        at += present


def execute(
    binary: bytes,
    grid: tuple[int, ...],
    threads: int,
    arguments: Iterable[bytes],
    memory: Iterable[tuple[int, int, bool]],
    *,
    local_bytes: int = 0,
    groups: range | None = None,
    approximate: int = 0,
    descending: bool = False,
    observe: Callable[..., None] | None = None,
) -> Execution:
    """Run a code object's kernel.

    Args:
        grid: work-groups along x, y, z.
        threads: work-items of a work-group, along x.
        arguments: bytes of the explicit arguments, in order.
        memory: (address, bytes, whether it may be written) of everything that the kernel may touch.
        local_bytes: LDS beside what the code declares.
        groups: linear numbers of the work-groups to run; default: all.
        approximate: hardware approximations are this many units in the last place off.
        descending: run the last wavefront first.

    Raises:
        ExecutionError: a fault of the kernel.
        TranslationError: an instruction that is not known.
    """
    kernel, records = translated(binary)
    assert records.dtype.itemsize == library().instruction_bytes() == RECORD.itemsize
    block = bytearray(max(kernel.argument_bytes, 8) + 256)
    given = list(arguments)
    explicit = [argument for argument in kernel.arguments if not argument.kind.startswith("hidden_")]
    if len(given) > len(explicit):
        raise ExecutionError(f"{kernel.name}: {len(given)} arguments for {len(explicit)}")
    for argument, value in zip(explicit, given, strict=False):
        if len(value) != argument.size:
            raise ExecutionError(
                f"{kernel.name}: argument of {len(value)} bytes at {argument.offset}, not {argument.size}"
            )
        block[argument.offset : argument.offset + argument.size] = value
    _hidden(kernel, block, (*grid, 1, 1)[:3], threads)
    buffer = (ctypes.c_uint8 * len(block)).from_buffer(block)
    setup = _Setup(size_x=threads, size_y=1, size_z=1, kernarg=ctypes.addressof(buffer))
    _scalar_registers(kernel, setup)
    allowed = [*memory, (ctypes.addressof(buffer), len(block), False)]
    ranges = (_Range * len(allowed))(*(_Range(first, first + size, int(writes), 0) for first, size, writes in allowed))
    size = (ctypes.c_int32 * 3)(*(*grid, 1, 1)[:3])
    chosen = groups if groups is not None else range(size[0] * size[1] * size[2])
    counts, fault = (ctypes.c_uint64 * 2)(), ctypes.create_string_buffer(600)
    failed = library().execute(
        ctypes.c_void_p(records.ctypes.data),
        ctypes.c_int64(0),
        ctypes.byref(setup),
        size,
        ctypes.c_int64(chosen.start),
        ctypes.c_int64(len(chosen)),
        ranges,
        ctypes.c_int32(len(allowed)),
        ctypes.c_int32(max(local_bytes, kernel.local_bytes)),
        ctypes.c_int32(kernel.scratch_bytes),
        ctypes.c_int32(approximate),
        ctypes.c_int32(descending),
        ctypes.c_uint64(MOST_STEPS),
        Observer(observe) if observe else None,
        counts,
        fault,
    )
    if failed:
        raise ExecutionError(f"{kernel.name}: {fault.value.decode()}")
    return Execution(counts[0], counts[1])


def _hidden(kernel: Kernel, block: bytearray, grid: tuple[int, ...], threads: int) -> None:
    values = {
        "hidden_block_count_x": grid[0], "hidden_block_count_y": grid[1], "hidden_block_count_z": grid[2],
        "hidden_group_size_x": threads, "hidden_group_size_y": 1, "hidden_group_size_z": 1, "hidden_grid_dims": 3,
    }  # fmt: skip
    for argument in kernel.arguments:
        if argument.kind in values:
            size = argument.size
            block[argument.offset : argument.offset + size] = values[argument.kind].to_bytes(size, "little")


def packed_argument(value: Any, kind: str) -> tuple[bytes, tuple[int, int, bool] | None]:
    """Bytes of one argument of a Triton kernel, and the memory that it points to."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        return struct.pack("<Q", value.data_ptr()), (storage.data_ptr(), storage.nbytes(), True)
    formats = {"i1": "<B", "i32": "<i", "i64": "<q", "fp32": "<f", "u64": "<Q"}
    if kind not in formats:
        raise ExecutionError(f"an argument of type {kind}")
    return struct.pack(formats[kind], value), None


def execute_plan(code: Any, arguments: tuple[Any, ...], grid: tuple[int, ...], **options: Any) -> Execution:
    """Run one launch of a compiled Triton kernel (`fastpath.machine_code.code.Code`) on tensors of the CPU."""
    values, memory = [], []
    for value, kind in zip(arguments, code.signature, strict=False):  # constants follow
        if kind == "constexpr":
            continue
        packed, region = packed_argument(value, kind)
        values.append(packed)
        if region is not None and region[1]:
            memory.append(region)
    threads = LANES * int(code.options["num_warps"])
    return execute(code.binary, grid, threads, values, memory, local_bytes=code.resources.shared, **options)


__all__ = ["Execution", "ExecutionError", "Observer", "execute", "execute_plan"]
