"""MindStudio's msProbe, PyTorch, level L0 or mix, task tensor.

Format: ``msprobe/core/dump/data_dump/json_writer.py`` and ``data_processor/{base,pytorch_processor}.py`` of
mindstudio-probe 26.2.0. ``step{n}/rank{r}/dump.json`` (``proc{pid}`` without ranks) has ``task``, ``level``, ``data``,
which maps ``Module.{path}.{Class}.forward.{call}`` to ``input_args``, ``input_kwargs``, ``output``: lists of
descriptions, whose ``data_name`` is a file of ``dump_tensor_data/``. Statistics and checksums hold no values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffcheck.base.errors import InputError
from diffcheck.base.samples import Sample
from diffcheck.foreign.batch import batch_rows
from diffcheck.foreign.files import inside, listed, load_json, load_pt
from diffcheck.foreign.modules import bare, boundaries_of
from diffcheck.foreign.trace import Dump
from reference.models.config import ModelConfig

_CALL = re.compile(r"Module\.(.+)\.([^.]+)\.forward\.(\d+)")
_DATA = "dump_tensor_data"


def read_msprobe(
    path: Path, model: Path, config: ModelConfig, samples: Sequence[Sample] | None
) -> tuple[Dump, list[list[int]]]:
    """The first forward of one rank and step.

    Returns:
        The dump, and the tokens of each sample as they were fed.

    Raises:
        InputError: no such dump, one without values, of several ranks, or a damaged one.
    """
    file = _dump_of(path)
    document = load_json(file)
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, dict):
        raise InputError(f"{file}: field 'data' is missing", "give a dump.json of msProbe")
    if (task := document.get("task")) != "tensor":
        raise InputError(f"{file}: task {task!r} keeps no values", "dump with task 'tensor'")
    calls: dict[str, tuple[list[Any], list[Any]]] = {}
    later = set()
    for key, entry in data.items():
        if (match := _CALL.fullmatch(key)) is None or not isinstance(entry, dict):
            continue
        if int(match[3]):
            later.add(key)
            continue
        calls[bare(match[1])] = (entry.get("input_args") or [], entry.get("output") or [])
    if "embed_tokens" not in calls:
        raise InputError(f"{file}: holds no forward of embed_tokens", "dump with level L0 or mix, of the whole model")
    folder = file.parent / _DATA
    tokens = _tensors(calls["embed_tokens"][0], folder, file)
    if not tokens:
        raise InputError(f"{file}: the input of embed_tokens is not kept", "dump with data_mode 'all'")
    found, rows, fed = batch_rows(tokens[0], None, samples, file)
    dump = Dump("msprobe", path, model, config, found)
    dump.unused |= later
    for name, (inputs, outputs) in calls.items():
        taken = _tensors(inputs, folder, file), _tensors(outputs, folder, file)
        before = len(dump.unused)
        for boundary, tensor in boundaries_of(name, *taken, config):
            dump.put(boundary, rows, tensor, name)
        if len(dump.unused) == before and not any(boundaries_of(name, *taken, config)):
            dump.unused.add(name)
    return dump, fed


def _dump_of(path: Path) -> Path:
    if not path.is_dir():
        return path
    if (path / "dump.json").is_file():
        return path / "dump.json"
    found = [*listed(path, "*/dump.json"), *listed(path, "step*/*/dump.json")]
    if len(found) != 1:
        raise InputError(f"{path}: {len(found)} files dump.json", "give the folder of one rank of one step")
    return found[0]


def _tensors(described: object, folder: Path, where: Path) -> list[Any]:
    """Tensors of a list of descriptions, in order; what is no tensor is passed over."""
    found: list[Any] = []
    for item in described if isinstance(described, list) else []:
        if isinstance(item, list):
            found += _tensors(item, folder, where)
        elif isinstance(item, dict) and "data_name" in item:
            if not str(item["data_name"]).endswith(".pt"):
                raise InputError(f"{where}: {item['data_name']!r} is no file of torch.save", "dump with PyTorch")
            found.append(load_pt(inside(folder, item["data_name"], str(where))))
    return found
