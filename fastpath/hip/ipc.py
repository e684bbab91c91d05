"""The all-reduce of `all_reduce.hip` from Python: ranks of one host read each other's memory and add in one tree.

Runs where nvcc built it. For ROCm the kernels are compiled and checked; their host side awaits a machine.
"""

from __future__ import annotations

import ctypes
import tempfile
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from fastpath.backend import UnsupportedError, current_target, note, require_tensor
from fastpath.collectives.all_reduce import require_merge
from fastpath.hip.build import SOURCES, compile_cuda
from reference.operators.all_reduce import AllReduceContract

HANDLE_BYTES = 64
#: Blocks of 256 threads: enough to fill NVLink, few enough to be resident together, which their meeting needs.
BLOCKS = 64


@cache
def library() -> ctypes.CDLL:
    """The host functions of `all_reduce.hip`, built once per process.

    Raises:
        UnsupportedError: no nvcc.
    """
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(compile_cuda("all_reduce.hip", Path(folder) / "all_reduce.so")))


class IpcAllReduce:
    """Buffers of ``size`` float32 elements on every rank of ``group``, mapped by all; 2, 4 or 8 ranks of one host.

    Every rank makes it, and calls it, in the same order. :meth:`close` unmaps.

    Raises:
        UnsupportedError: not CUDA, another number of ranks, or no nvcc.
        RuntimeError: a CUDA call failed, with its number.
    """

    def __init__(self, size: int, group: dist.ProcessGroup | None = None) -> None:
        if current_target().runtime != "cuda":
            raise UnsupportedError(f"{current_target().arch}: the host side of all_reduce.hip is built by nvcc only")
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if self.ranks not in (2, 4, 8):
            raise UnsupportedError(f"group: {self.ranks} ranks; the tree is built for 2, 4 or 8")
        self._library, self._group, self.size, self.epoch = library(), group, size, 0
        # the library holds a CUDA runtime of its own, whose device is 0 until it is told
        self._check("rlk_use", torch.cuda.current_device())
        self._own = [self._allocate(4 * size), self._allocate(4 * BLOCKS * self.ranks)]
        handles = [self._export(pointer) for pointer in self._own]
        gathered: list[list[bytes]] = [[] for _ in range(self.ranks)]
        dist.all_gather_object(gathered, handles, group=group)
        self._data = [self._map(rank, gathered[rank][0], 0) for rank in range(self.ranks)]
        self._signals = [self._map(rank, gathered[rank][1], 1) for rank in range(self.ranks)]
        dist.barrier(group)

    def __call__(self, x: torch.Tensor, contract: AllReduceContract) -> torch.Tensor:
        """The sum of every rank's ``x``: float32 [rows, features] with a multiple of 4 elements, at most ``size``.

        Raises:
            TypeError, ValueError: dtype, shape, layout, device or size.
            UnsupportedError: a contract without a kernel.
        """
        require_tensor(x, "x", "rows, features", torch.float32)
        require_merge(contract)
        if x.numel() > self.size or x.numel() % 4:
            raise ValueError(f"x: {x.numel()} elements; a multiple of 4 up to {self.size} is expected")
        out = torch.empty_like(x)
        self.epoch += 1
        array = ctypes.c_void_p * self.ranks
        self._check(
            "rlk_all_reduce",
            self.ranks,
            self.rank,
            array(*self._data),
            array(*self._signals),
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_long(x.numel()),
            ctypes.c_uint(self.epoch),
            BLOCKS,
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        note("tree_all_reduce", contract, {"ranks": self.ranks}, (SOURCES / "all_reduce.hip").read_bytes())
        return out

    def close(self) -> None:
        """Unmap the other ranks' buffers and free the own; every rank calls it, after its last all-reduce."""
        torch.cuda.synchronize()
        for rank in set(range(self.ranks)) - {self.rank}:
            for pointer in (self._data[rank], self._signals[rank]):
                self._check("rlk_close", ctypes.c_void_p(pointer))
        dist.barrier(self._group)  # nobody frees what another still maps
        for pointer in self._own:
            self._check("rlk_free", ctypes.c_void_p(pointer))

    def _allocate(self, size: int) -> int:
        pointer = ctypes.c_void_p()
        self._check("rlk_allocate", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value or 0

    def _export(self, pointer: int) -> bytes:
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        self._check("rlk_export", ctypes.c_void_p(pointer), handle)
        return handle.raw

    def _map(self, rank: int, handle: bytes, which: int) -> int:
        if rank == self.rank:
            return self._own[which]
        pointer = ctypes.c_void_p()
        self._check("rlk_import", ctypes.c_char_p(handle), ctypes.byref(pointer))
        return pointer.value or 0

    def _check(self, function: str, *arguments: object) -> None:
        error = getattr(self._library, function)(*arguments)
        if error:
            raise RuntimeError(f"{function}: CUDA error {error}")
