"""The model's weights as the traced engine held them: read without torch, believed only if their digests agree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from diffcheck.base.bits import to_float32, uint_type
from diffcheck.base.errors import ExitCode, InputError
from diffcheck.base.record import weight_digest
from reference.checks import Float32Array
from reference.formats import FORMATS
from reference.rounding import round_to

#: safetensors' names of the formats that a checkpoint may have.
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class TracedWeights:
    """Weights of a model folder by Hugging Face name, float32, each checked against a trace's object record.

    Args:
        folder: holds ``*.safetensors``.
        digests: Hugging Face name -> digest of the live parameter (`ObjectRecord.weights`).
        dtype: of the traced model: wider weights of the checkpoint were rounded to it when they were loaded.
    """

    def __init__(self, folder: Path, digests: Mapping[str, str], dtype: str) -> None:
        self._folder, self._digests, self._dtype = folder, digests, dtype
        self._where: dict[str, tuple[Path, str, tuple[int, ...], int]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._where.update(_index(path))

    def __contains__(self, name: str) -> bool:
        return name in self._digests

    def __getitem__(self, name: str) -> Float32Array:
        """The weight as the engine held it.

        Raises:
            InputError: it is missing in the folder, or none of its roundings has the traced digest: another model,
                another version of it, or a weight that was changed after loading.
        """
        if name not in self._where:
            raise InputError(f"{self._folder}: weight {name} is missing", "give the traced model's folder with --model")
        path, dtype, shape, offset = self._where[name]
        bits = np.memmap(path, uint_type(dtype), "r", offset, shape)
        values = to_float32(np.ascontiguousarray(bits), dtype)
        # An engine may keep a norm's weight in float32 in a bfloat16 model, so both forms are candidates.
        for held in (values, round_to(values, FORMATS[self._dtype])):
            if weight_digest(held) == self._digests.get(name):
                return held
        raise InputError(
            f"{self._folder}: weight {name} is not the one that the trace was made with",
            "give the traced model's own folder with --model; weights changed on purpose cannot be inferred over",
            ExitCode.NOT_COMPARABLE,
        )


def _index(path: Path) -> dict[str, tuple[Path, str, tuple[int, ...], int]]:
    """Name -> (file, dtype, shape, offset in bytes), from the header of a safetensors file."""
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(size))
        found = {}
        for name, entry in header.items():
            if name != "__metadata__" and entry["dtype"] in _DTYPES:
                start = 8 + size + int(entry["data_offsets"][0])
                found[name] = (path, _DTYPES[entry["dtype"]], tuple(entry["shape"]), start)
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a safetensors file: {error}", "copy the model again") from None
