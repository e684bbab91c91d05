"""Compiled code as data: a planned launch compiled without its GPU, its instructions counted, its resources read.

Nothing here needs an accelerator, ROCm or CUDA: Triton brings LLVM, the AMD linker and NVIDIA's assembler.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from fastpath.backend import Plan, Target
from fastpath.elf import code_of
from reference.contract.base import Contract

GPU_TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


_vast: list[Set[tuple[torch.dtype, tuple[int, ...]]]] = []


@contextmanager
def as_if_vast(shapes: Set[tuple[torch.dtype, tuple[int, ...]]]) -> Iterator[None]:
    """Code for tensors of these dtypes and shapes as if 32 bits did not reach all of them: to run it on small ones."""
    _vast.append(shapes)
    try:
        yield
    finally:
        _vast.pop()


def within_32_bits(tensor: torch.Tensor) -> bool:
    """What Triton asks of a tensor for AMD before it addresses by 32-bit offsets: its whole storage is below 2 GiB."""
    if _vast and (tensor.dtype, tuple(tensor.shape)) in _vast[-1]:
        return False
    return bool(tensor.untyped_storage().nbytes() < 2**31)


def aligned_to_16(value: object) -> bool:
    """Whether the compiler may take an address, or an integer, for a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return bool(value.data_ptr() % 16 == 0)
    return type(value) is int and value % 16 == 0


@dataclass(frozen=True)
class Resources:
    """What one program takes, and how many fit: ``occupancy`` in waves per SIMD (gfx942) or warps per SM (sm_90)."""

    registers: int
    #: Accumulation registers (gfx942 only).
    accumulators: int
    #: LDS or shared memory of a program, bytes.
    shared: int
    #: Bytes of scratch or local memory per thread; above zero, values were spilled.
    scratch: int
    occupancy: int
    #: What bounds the occupancy: ``registers``, ``shared memory`` or ``hardware``.
    bound: str


@dataclass(frozen=True)
class Code:
    """One kernel compiled for one target, under one contract."""

    kernel: str
    contract: Contract
    target: Target
    options: Mapping[str, Any]
    #: Triton's GPU dialect: layouts of matrix operands.
    ttgir: str
    #: LLVM's intermediate code after its optimisations.
    llir: str
    #: AMD assembly, or PTX.
    assembly: str
    #: What is loaded onto the device.
    binary: bytes
    #: Type of each argument, as Triton spells it; ``constexpr`` for those that are compiled in.
    signature: tuple[str, ...]
    resources: Resources

    @property
    def sha256(self) -> str:
        """SHA-256 of the machine code, debug information aside: the same for one source in two folders."""
        return hashlib.sha256(code_of(self.binary)).hexdigest()

    @cached_property
    def instructions(self) -> Counter[str]:
        """Mnemonics of the assembly, encoding suffixes (_e32, _e64, _dpp, _sdwa) dropped, with their number."""
        names = re.findall(r"^\t(?:@%?\w+ +)?([a-z][a-z0-9_.:]+)(?:[\s;]|$)", self.assembly, re.MULTILINE)
        return Counter(re.sub(r"_(e32|e64|dpp|sdwa)$", "", name) for name in names)

    @cached_property
    def operations(self) -> Counter[str]:
        """Floating-point operations of the LLVM code, elements of a vector one by one; ``fdiv.f64`` of double."""
        found: Counter[str] = Counter()
        for line in self.llir.splitlines():
            call = re.search(r"= (?:tail |musttail |notail )*call [^@]*(?<=[ >])@(llvm\.[a-z0-9_.]+)", line)
            plain = re.search(r"= (f(?:add|sub|mul|div))\b([^,]*)", line)
            if call:
                name, lanes = call[1], re.search(r"\.v(\d+)f\d+", call[1])
                found[re.sub(r"\.v\d+(f\d+)", r".\1", name)] += int(lanes[1]) if lanes else 1
            elif plain:
                lanes = re.search(r"<(\d+) x", plain[2])
                found[plain[1] + (".f64" if "double" in plain[2] else "")] += int(lanes[1]) if lanes else 1
        return found


def compile_plan(plan: Plan) -> Code:
    """Compile a planned launch for its target.

    Raises:
        triton.CompilationError and its kin: the kernel does not compile.
    """
    signature, constants, attributes = _specialise(plan)
    source = ASTSource(fn=plan.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPU_TARGETS[plan.target.arch], options=dict(plan.options))
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    if plan.target.runtime == "hip":
        assembly = compiled.asm["amdgcn"]
        resources = _gfx942_resources(assembly, warps, shared)
    else:
        assembly = compiled.asm["ptx"]
        resources = _sm90_resources(compiled.asm["cubin"], warps, shared)
    return Code(
        kernel=plan.kernel.fn.__name__,
        contract=plan.contract,
        target=plan.target,
        options={**plan.options, "num_warps": warps},
        ttgir=compiled.asm["ttgir"],
        llir=compiled.asm["llir"],
        assembly=assembly,
        binary=compiled.asm["hsaco" if plan.target.runtime == "hip" else "cubin"],
        signature=tuple(signature.values()),
        resources=resources,
    )


def _specialise(plan: Plan) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Types, constants and attributes as Triton's just-in-time compiler derives them from arguments."""
    names: list[str] = plan.kernel.arg_names
    signature = dict.fromkeys(names, "constexpr")
    constants: dict[tuple[int, ...], Any] = {(names.index(name),): value for name, value in plan.constants.items()}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, value in enumerate(plan.arguments):
        kind = _type_of(value)
        if kind == "constexpr":
            constants[(index,)] = value
            continue
        signature[names[index]] = kind
        marks = [["tt.divisibility", 16]] if aligned_to_16(value) else []
        if isinstance(value, torch.Tensor) and plan.target.runtime == "hip" and within_32_bits(value):
            marks.append(["tt.pointer_range", 32])
        if marks:
            attributes[(index,)] = marks
    return signature, constants, attributes


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_POINTERS[value.base.dtype].removeprefix('*')}{list(value.block_shape)}>"
    if value is None or (type(value) is int and value == 1):
        return "constexpr"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _gfx942_resources(assembly: str, warps: int, shared: int) -> Resources:
    def number(pattern: str) -> int:
        return int(re.findall(pattern, assembly)[0])

    waves = number(r"; Occupancy: (\d+)")
    scratch = max(number(r"; ScratchSize: (\d+)"), number(r"\.amdhsa_private_segment_fixed_size (\d+)"))
    # 64 KiB of LDS and four SIMDs per compute unit
    by_shared = max(1, 65536 // max(shared, 1)) * warps // 4
    bound = "shared memory" if by_shared < waves else "registers" if waves < 8 else "hardware"
    vector, accumulation = number(r"; NumVgprs: (\d+)"), number(r"; NumAgprs: (\d+)")
    return Resources(vector, accumulation, shared, scratch, min(waves, max(by_shared, 1)), bound)


def _sm90_resources(cubin: bytes, warps: int, shared: int) -> Resources:
    usage = {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", _resource_usage(cubin))}
    registers, scratch = usage["REG"], usage["STACK"] + usage["LOCAL"]
    # 64 Ki registers in units of 256 per warp, 227 KiB of shared memory, 64 warps per SM
    limits = {
        "registers": 65536 // (-(-registers * 32 // 256) * 256) // warps * warps,
        "shared memory": 232448 // (shared + 1024) * warps,
        "hardware": 64,
    }
    bound = min(limits, key=lambda name: limits[name])
    return Resources(registers, 0, shared, scratch, limits[bound], bound)


def _resource_usage(cubin: bytes) -> str:
    """What NVIDIA's cuobjdump, from Triton's own package, says about registers and local memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
