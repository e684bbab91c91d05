"""Which files and tensors are a model's weights: what its index names, as Hugging Face's loader decides, or a refusal.

Libraries look into a folder in different ways (transformers takes ``model.safetensors``, else what the index names;
vLLM takes every file, less those that an index does not name). A folder in which that makes a difference is no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diffcheck.base.bits import to_float32, uint_type
from diffcheck.base.errors import InputError
from reference.checks import Float32Array
from reference.formats import FORMATS, decode, encode
from reference.models.config import ModelConfig
from reference.models.weights import weight_shapes
from reference.rounding import round_to

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: safetensors' names of the formats that weights may have.
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
#: Ends of names that every library passes over: tables that are made anew from the configuration.
_INERT = ("rotary_emb.inv_freq",)
_REMEDY = "copy or save the whole model again"


@dataclass(frozen=True)
class StoredWeight:
    """Where one tensor lies."""

    file: Path
    #: As safetensors names it.
    dtype: str
    shape: tuple[int, ...]
    #: First and last byte (excluded) in the file.
    start: int
    stop: int

    def same_bits(self, other: StoredWeight) -> bool:
        """Whether two stored tensors hold the same bytes in the same form."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        mine, theirs = (np.memmap(w.file, np.uint8, "r", w.start, (w.stop - w.start,)) for w in (self, other))
        return bool(np.array_equal(mine, theirs))

    def values(self) -> Float32Array:
        """The values, exactly. The dtype is one of `DTYPES`."""
        dtype = DTYPES[self.dtype]
        return to_float32(
            np.ascontiguousarray(np.memmap(self.file, uint_type(dtype), "r", self.start, self.shape)), dtype
        )


@dataclass(frozen=True)
class StoredModel:
    """The weights of a folder by Hugging Face name, and the files that were not read."""

    folder: Path
    weights: dict[str, StoredWeight]
    files: tuple[Path, ...]
    unread: tuple[Path, ...]

    @property
    def dtypes(self) -> list[str]:
        """Formats of the stored weights."""
        return sorted({DTYPES.get(w.dtype, w.dtype) for w in self.weights.values()})


class FloatWeights:
    """The weights of a model folder by Hugging Face name, rounded to the engine's dtype, as float32: without torch.

    Args:
        dtype: of the engine.
        flips: (name, flat index, bit of the engine's dtype) of bits inverted on purpose.

    Raises:
        InputError: a damaged file, or a flip of a weight or bit that is not there.
    """

    def __init__(self, folder: Path, dtype: str, flips: Sequence[tuple[str, int, int]] = ()) -> None:
        self._folder, self._format, self._flips = folder, FORMATS[dtype], flips
        self._stored = read_checkpoint(folder).weights
        for name, _, _ in flips:
            if name not in self._stored:
                remedy = "give a name of its safetensors files"
                raise InputError(f"weight flip: {folder} has no weight {name!r}", remedy)

    def __getitem__(self, name: str) -> Float32Array:
        if name not in self._stored:
            raise InputError(f"{self._folder}: weight {name} is missing", "save the whole model with safetensors")
        bits = encode(round_to(self._stored[name].values(), self._format), self._format)
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
        return decode(bits, self._format)


def read_checkpoint(folder: Path) -> StoredModel:
    """Find the weights of a model folder; reads headers only.

    Raises:
        InputError: no weights, a damaged file, an index that names what is not there, a tensor in two files, or files
            of which libraries would take different ones.
    """
    present = sorted(folder.glob("*.safetensors"))
    if not present:
        raise InputError(f"{folder}: no *.safetensors in it", "save the model with safetensors")
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"{folder / 'adapter_config.json'}: an adapter beside the weights, which some libraries would add to them",
            "merge it into the weights, or move it elsewhere",
        )
    if (folder / INDEX).is_file():
        named = _read_index(folder / INDEX)
        files = sorted({folder / file for file in named.values()})
        if (single := folder / SINGLE) in present and single not in files:
            raise InputError(
                f"{folder}: {SINGLE} lies beside {INDEX}, which does not name it: transformers loads the one, vLLM "
                "what the other names",
                "move away the one that is not the model",
            )
        for file in files:
            if not file.is_file():
                raise InputError(f"{file}: named by {INDEX}, but missing", _REMEDY)
        return _stored(folder, files, present, named)
    if folder / SINGLE not in present:
        raise InputError(
            f"{folder}: {', '.join(p.name for p in present[:3])} without {INDEX}: nothing says that this is the model",
            f"save the model again, or call its only file {SINGLE}",
        )
    stored = _stored(folder, [folder / SINGLE], present, None)
    for file in stored.unread:
        if both := sorted(stored.weights.keys() & _header(file).keys()):
            raise InputError(
                f"{folder}: {both[0]} is in {SINGLE} and in {file.name}, and no index says which it is: "
                "transformers loads the first file, vLLM both",
                "move away the file that is not the model",
            )
    return stored


def _read_index(path: Path) -> dict[str, str]:
    try:
        named = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not named or any(not isinstance(f, str) or Path(f).name != f for f in named.values()):
            raise ValueError("weight_map does not name files of this folder")
        return dict(named)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not an index of weights: {error}", _REMEDY) from None


def _stored(folder: Path, files: list[Path], present: list[Path], named: dict[str, str] | None) -> StoredModel:
    weights: dict[str, StoredWeight] = {}
    for file in files:
        for name, weight in _header(file).items():
            if name in weights:
                raise InputError(f"{folder}: {name} is in {weights[name].file.name} and in {file.name}", _REMEDY)
            if named is not None and named.get(name) != file.name:
                where = f"says it is in {named[name]}" if name in named else "does not name it"
                raise InputError(f"{file}: holds {name}, but {INDEX} {where}", _REMEDY)
            weights[name] = weight
    for name, holder in sorted((named or {}).items()):
        if name not in weights:
            raise InputError(f"{folder}: {INDEX} says that {name} is in {holder}: it is not", _REMEDY)
    return StoredModel(folder, weights, tuple(files), tuple(p for p in present if p not in files))


def _header(path: Path) -> dict[str, StoredWeight]:
    """Name -> where it lies, from the header of a safetensors file."""
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("truncated")
            header: dict[str, Any] = json.loads(stream.read(size))
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = (int(x) + 8 + size for x in entry["data_offsets"])
                found[name] = StoredWeight(path, str(entry["dtype"]), tuple(entry["shape"]), first, last)
        if any(w.stop > path.stat().st_size for w in found.values()):
            raise ValueError("truncated")
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "the file is damaged: copy the model again"
        raise InputError(f"{path}: not a whole safetensors file: {error}", remedy) from None


def check_checkpoint(stored: StoredModel, config: ModelConfig) -> None:
    """Hold what is stored to what the configuration describes.

    Raises:
        InputError: a weight is missing, of another shape, of no floating format of 16 or 32 bits, or not of this model;
            or the configuration ties the head to the embedding and the checkpoint holds another one.
    """
    folder, shapes = stored.folder, dict(weight_shapes(config))
    for name, shape in shapes.items():
        if name not in stored.weights:
            raise InputError(f"{folder}: weight {name} is missing", "save the whole model with safetensors")
        weight = stored.weights[name]
        if weight.dtype not in DTYPES:
            raise InputError(
                f"{weight.file}: {name} is stored as {weight.dtype}: quantised weights are not supported",
                f"give the model in one of {', '.join(DTYPES.values())}",
            )
        if weight.shape != shape:
            raise InputError(
                f"{weight.file}: weights of {name} have shape {weight.shape}, config.json describes {shape}",
                "config.json and the weights are not of the same model",
            )
    for name in sorted(stored.weights.keys() - shapes.keys()):
        if name.endswith(_INERT):
            continue
        if name == "lm_head.weight":
            if not stored.weights[name].same_bits(stored.weights["model.embed_tokens.weight"]):
                raise InputError(
                    f"{folder}: config.json ties lm_head to the embedding, but the checkpoint has a head of its own, "
                    "with other values: libraries differ in which they take",
                    "set tie_word_embeddings to false, or take lm_head.weight out",
                )
            continue
        raise InputError(
            f"{stored.weights[name].file}: {name} has no place in the model that config.json describes: libraries pass "
            "over it or fail on it",
            "mend config.json, or take the tensor out",
        )
