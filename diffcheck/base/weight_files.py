"""Weights of a model folder as float32 arrays: read without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffcheck.base.bits import to_float32, uint_type
from diffcheck.base.errors import InputError
from reference.checks import Float32Array
from reference.formats import FORMATS, decode, encode
from reference.rounding import round_to

#: safetensors' names of the formats that a checkpoint may have.
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
#: (file, dtype, shape, offset in bytes) of a tensor.
Place = tuple[Path, str, tuple[int, ...], int]


class WeightFiles(Mapping[str, Float32Array]):
    """The weights of a model folder by Hugging Face name, rounded to the engine's dtype, float32, bits flipped on
    purpose.

    Args:
        dtype: of the engine.
        flips: (name, flat index, bit of the engine's dtype).

    Raises:
        InputError: a damaged file, or a flip of a weight or bit that is not there.
    """

    def __init__(self, folder: Path, dtype: str, flips: Sequence[tuple[str, int, int]] = ()) -> None:
        self._folder, self._dtype, self._flips = folder, dtype, flips
        self._places = places_in(folder)
        for name, _, _ in flips:
            if name not in self._places:
                raise InputError(
                    f"weight flip: {folder} has no weight {name!r}", "give a name of its safetensors files"
                )

    def __getitem__(self, name: str) -> Float32Array:
        if name not in self._places:
            raise InputError(f"{self._folder}: weight {name} is missing", "save the whole model with safetensors")
        fmt = FORMATS[self._dtype]
        bits = encode(round_to(read_weight(self._places[name]), fmt), fmt)
        flat, width = bits.reshape(-1), bits.itemsize * 8
        for target, index, bit in self._flips:
            if target != name:
                continue
            if not (0 <= index < flat.size and 0 <= bit < width):
                raise InputError(
                    f"weight flip {name}[{index}] bit {bit} is outside the tensor",
                    f"it has {flat.size} elements of {width} bits",
                )
            flat[index] ^= flat.dtype.type(1 << bit)
        return decode(bits, fmt)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def places_in(folder: Path) -> dict[str, Place]:
    """Where each weight of a folder's safetensors files lies.

    Raises:
        InputError: a file is damaged.
    """
    found: dict[str, Place] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(_index(path))
    return found


def read_weight(place: Place) -> Float32Array:
    """The values of a weight, exactly."""
    path, dtype, shape, offset = place
    return to_float32(np.ascontiguousarray(np.memmap(path, uint_type(dtype), "r", offset, shape)), dtype)


def _index(path: Path) -> dict[str, Place]:
    """Name -> place, from the header of a safetensors file."""
    try:
        total = path.stat().st_size
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > total:
                raise ValueError("its header is longer than the file")
            header: dict[str, Any] = json.loads(stream.read(size))
        found = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, stop = (8 + size + int(n) for n in entry["data_offsets"])
            if stop > total:
                raise ValueError(f"{name} reaches past its end")
            if entry["dtype"] in _DTYPES:
                found[name] = (path, _DTYPES[entry["dtype"]], tuple(entry["shape"]), start)
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a safetensors file: {error}", "copy the model again") from None
