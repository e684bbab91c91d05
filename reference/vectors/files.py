"""The conformance vectors on disk: a safetensors file per profile and operator, and an index.

Profiles that give an operator the same contracts share its file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, deserialize, serialize

from reference.contract.base import CONTRACTS, Contract, from_json
from reference.contract.profiles import names, profile
from reference.formats import FORMATS, decode, encode
from reference.vectors.cases import Arrays, Case, cases, run, run_unrounded

#: Version of the vectors: a change of any bit, name or input raises it.
VERSION = 1
DTYPES = ("bfloat16", "float32")
INDEX = "index.json"
DATA = Path(__file__).parent / "data"


def vector_files() -> Iterator[tuple[str, bytes]]:
    """(path relative to the data folder, content) of every file, made from the operators; the index comes last."""
    paths: dict[tuple[str, ...], str] = {}  # contracts -> the file that has their vectors
    index: dict[str, dict[str, str]] = {}
    for name in names():
        for operator in sorted(CONTRACTS):
            ids = tuple(profile(name).contract(operator, dtype).contract_id for dtype in DTYPES)
            if ids not in paths:
                paths[ids] = f"{name}/{operator}.safetensors"
                yield paths[ids], vector_file(name, operator)
            index.setdefault(name, {})[operator] = paths[ids]
    yield INDEX, (json.dumps({"version": VERSION, "profiles": index}, indent=1, sort_keys=True) + "\n").encode()


def vector_file(profile_name: str, operator: str) -> bytes:
    """One file: tensors ``<dtype>/<case>/in/<name>`` and ``.../out/<name>``; contracts and attributes in the metadata.

    Where the contract rounds its output, ``.../unrounded/<name>`` is what it rounds: a cast hides most differences.
    Values that all belong to bfloat16 under a bfloat16 contract are stored as bfloat16, others as float32 or int64.
    """
    arrays: dict[str, tuple[str, NDArray[Any]]] = {}
    about: dict[str, Any] = {"version": VERSION, "profile": profile_name, "operator": operator}
    for dtype in DTYPES:
        contract = profile(profile_name).contract(operator, dtype)
        attributes = {}
        for case in cases(operator, dtype):
            attributes[case.name] = dict(case.attributes)
            for name, array in case.inputs.items():
                arrays[f"{dtype}/{case.name}/in/{name}"] = _pack(array, dtype)
            for name, array in run(case, contract).items():
                arrays[f"{dtype}/{case.name}/out/{name}"] = _pack(array, dtype)
            for name, array in run_unrounded(case, contract).items():
                arrays[f"{dtype}/{case.name}/unrounded/{name}"] = _pack(array, dtype)
        about[dtype] = {"contract": contract.as_dict(), "contract_id": contract.contract_id, "attributes": attributes}
    # the order of metadata entries is not fixed, so there is one entry
    metadata = {"vectors": json.dumps(about, sort_keys=True)}
    tensors = {
        name: TensorSpec(dtype=kind, shape=a.shape, data_ptr=a.ctypes.data, data_len=a.nbytes)
        for name, (kind, a) in arrays.items()
    }
    return bytes(serialize(tensors, metadata))


def read_vectors(path: Path) -> Iterator[tuple[Case, Contract, Arrays, Arrays]]:
    """(case, contract, expected outputs, expected outputs before rounding) of everything in a file.

    Raises:
        ValueError: not such a file, another version, or a contract without the id written beside it.
    """
    content = path.read_bytes()
    about = _about(path, content)
    tensors = {name: _unpack(entry) for name, entry in deserialize(content)}  # type: ignore[no-untyped-call]
    for dtype in DTYPES:
        contract = from_json(json.dumps(about[dtype]["contract"]))
        if contract.contract_id != about[dtype]["contract_id"]:
            raise ValueError(f"{path}: the {dtype} contract does not have the contract_id written beside it")
        for name, attributes in about[dtype]["attributes"].items():
            inputs, outputs, unrounded = (
                {k.rpartition("/")[2]: v for k, v in tensors.items() if k.startswith(f"{dtype}/{name}/{side}/")}
                for side in ("in", "out", "unrounded")
            )
            yield Case(about["operator"], name, inputs, attributes), contract, outputs, unrounded


def _about(path: Path, content: bytes) -> dict[str, Any]:
    """The description in a file's metadata."""
    size = int.from_bytes(content[:8], "little")
    try:
        about: dict[str, Any] = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["vectors"])
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}: not a file of conformance vectors ({error!r})") from None
    if about.get("version") != VERSION:
        raise ValueError(f"{path}: version must be {VERSION}, got {about.get('version')!r}")
    return about


def _pack(array: NDArray[Any], dtype: str) -> tuple[str, NDArray[Any]]:
    """(safetensors dtype, little-endian array) that stores ``array``."""
    if array.dtype.kind == "i":
        return "int64", np.ascontiguousarray(array, "<i8")
    # a NaN has no contracted pattern: the canonical one keeps files equal on every machine
    values = np.where(np.isnan(array), np.float32(np.nan), np.ascontiguousarray(array, np.float32))
    if dtype == "bfloat16" and not (values.view(np.uint32) & np.uint32(0xFFFF)).any():
        return "bfloat16", encode(values, FORMATS["bfloat16"]).astype("<u2")
    return "float32", values.astype("<f4")


def _unpack(entry: dict[str, Any]) -> NDArray[Any]:
    kind, shape, data = entry["dtype"], entry["shape"], entry["data"]
    if kind == "BF16":
        return decode(np.frombuffer(data, "<u2").astype(np.uint16), FORMATS["bfloat16"]).reshape(shape)
    dtype: Any = {"F32": "<f4", "I64": "<i8"}[kind]
    return np.frombuffer(data, dtype).astype(dtype[1:]).reshape(shape)
