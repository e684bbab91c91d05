"""Weights in one piece of memory that another process of the same machine maps: CUDA IPC on a GPU, a mapped file on a
CPU. The owner fills it, the other side copies out of it, and nothing passes through the host's memory on the way.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffcheck.base.errors import EngineError

Tensor = Any
#: Each weight begins at a multiple of so many bytes.
_ALIGNMENT = 256


class SharingError(EngineError):
    """This machine does not let two processes share a GPU's memory."""


class SharedWeights:
    """The owner's side.

    Args:
        like: HF name -> a tensor of the shape and dtype that the weight has.
        device: of the memory. path: of the file, on a CPU.
    """

    def __init__(self, like: Mapping[str, Tensor], device: Any, path: Path) -> None:
        import torch

        self._path, self._table, size = path, [], 0
        for name, tensor in like.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._table.append([name, dtype, list(tensor.shape), size])
            bytes_ = tensor.numel() * tensor.element_size()
            size += -(-bytes_ // _ALIGNMENT) * _ALIGNMENT
        self._size = size
        if torch.device(device).type == "cpu":
            path.parent.mkdir(parents=True, exist_ok=True)
            self._memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        else:
            self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        #: HF name -> the place of this weight.
        self.tensors = _views(self._memory, self._table)

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Copy ``weights`` in; done when this returns."""
        import torch

        for name, tensor in weights.items():
            self.tensors[name].copy_(tensor)
        if self._memory.is_cuda:
            torch.cuda.synchronize(self._memory.device)

    def describe(self) -> dict[str, Any]:
        """What `open_shared` needs, as JSON. To be asked anew for every opening: CUDA counts them.

        Raises:
            SharingError: CUDA gives no handle.
        """
        place: dict[str, Any] = {"bytes": self._size, "weights": self._table}
        if not self._memory.is_cuda:
            return {**place, "file": str(self._path.absolute())}
        try:
            handle = self._memory.untyped_storage()._share_cuda_()
        except RuntimeError as error:
            raise SharingError(f"CUDA IPC: {_line(error)}", "set transport = 'file'") from None
        return {**place, "cuda": [_text(part) for part in handle]}


def open_shared(place: dict[str, Any]) -> dict[str, Tensor]:
    """HF name -> the weight where its owner put it. Drop them before the owner fills it anew.

    Raises:
        SharingError: the memory cannot be mapped.
    """
    import torch

    size = int(place["bytes"])
    try:
        if "file" in place:
            memory = torch.from_file(place["file"], shared=True, size=size, dtype=torch.uint8)
        else:
            device, *rest = (_value(part) for part in place["cuda"])
            torch.cuda.init()
            storage = torch.UntypedStorage._new_shared_cuda(device, *rest)
            memory = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage, 0, (size,))
    except RuntimeError as error:
        what = place.get("file", "CUDA IPC")
        raise SharingError(f"{what}: cannot be mapped: {_line(error)}", "set transport = 'file'") from None
    return _views(memory, place["weights"])


def _views(memory: Tensor, table: list[list[Any]]) -> dict[str, Tensor]:
    import torch

    found = {}
    for name, dtype, shape, offset in table:
        kind = getattr(torch, dtype)
        count = 1
        for extent in shape:
            count *= extent
        found[name] = memory[offset : offset + count * kind.itemsize].view(kind).view(shape)
    return found


def _text(part: Any) -> Any:
    return {"base64": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def _value(part: Any) -> Any:
    return base64.b64decode(part["base64"]) if isinstance(part, dict) else part


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
