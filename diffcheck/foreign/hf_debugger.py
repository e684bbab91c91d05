"""``model_addition_debugger`` of transformers, with ``use_repr=False``.

Format: ``transformers/model_debugging_utils.py`` of transformers 5.19.0. ``{Class}_debug_tree_FULL_TENSORS.json``
holds the tree of calls: ``module_path`` (``Class.model.layers.0...``), ``inputs`` (``args``, ``kwargs``), ``outputs``
of leaves, ``children``. A tensor is ``{"shape", "dtype", "value"}``, whose value is ``./NAME.safetensors`` with tensor
``data``; with ``use_repr=True``, the default there, it is printed text, and no bits are left. By default the layers
between the first and the last are left out of the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diffcheck.base.errors import InputError
from diffcheck.base.samples import Sample
from diffcheck.foreign.batch import batch_rows
from diffcheck.foreign.files import inside, listed, load_json, load_tensors
from diffcheck.foreign.modules import bare, boundaries_of
from diffcheck.foreign.trace import Dump
from reference.models.config import ModelConfig

_SUFFIX = "_debug_tree_FULL_TENSORS.json"
#: Depth of a tree of modules that nobody builds.
_DEEPEST = 100


def read_hf_debugger(
    path: Path, model: Path, config: ModelConfig, samples: Sequence[Sample] | None
) -> tuple[Dump, list[list[int]]]:
    """One forward of a batch.

    Returns:
        The dump, and the tokens of each sample as they were fed.

    Raises:
        InputError: no such dump, one of printed values, or a damaged one.
    """
    tree_file = _tree_of(path)
    folder = tree_file.parent
    tree = load_json(tree_file)
    if not isinstance(tree, dict) or not isinstance(tree.get("module_path"), str):
        raise InputError(f"{tree_file}: field 'module_path' is missing", "give what model_addition_debugger wrote")
    root = tree["module_path"]
    given = _field(tree.get("inputs"), "kwargs") or {}
    tokens = given.get("input_ids") if isinstance(given, dict) else None
    arguments = _field(tree.get("inputs"), "args")
    if tokens is None and isinstance(arguments, list) and arguments:
        tokens = arguments[0]
    if tokens is None:
        raise InputError(f"{tree_file}: the model's inputs hold no input_ids", "call the model with input_ids")
    mask = given.get("attention_mask") if isinstance(given, dict) else None
    found, rows, fed = batch_rows(
        _value(tokens, folder, tree_file),
        None if not isinstance(mask, dict) else _value(mask, folder, tree_file),
        samples,
        tree_file,
    )
    dump = Dump("transformers", path, model, config, found)
    for node, depth in _walk(tree, 0):
        if depth == 0 or not isinstance(module := node.get("module_path"), str):
            continue
        name = module.removeprefix(f"{root}.")
        inputs = _tensors(_field(node.get("inputs"), "args"), folder, tree_file)
        outputs = _tensors(node.get("outputs"), folder, tree_file)
        for boundary, tensor in boundaries_of(bare(name), inputs, outputs, config):
            dump.put(boundary, rows, tensor, name)
    return dump, fed


def _tree_of(path: Path) -> Path:
    if path.is_dir():
        found = listed(path, f"*{_SUFFIX}")
        if len(found) != 1:
            raise InputError(
                f"{path}: {len(found)} files *{_SUFFIX}", "give the folder of one model's dump, or its file"
            )
        return found[0]
    return path


def _walk(node: object, depth: int) -> Iterator[tuple[dict[str, Any], int]]:
    if not isinstance(node, dict) or depth > _DEEPEST:
        return
    yield node, depth
    children = node.get("children")
    for child in children if isinstance(children, list) else []:
        yield from _walk(child, depth + 1)


def _field(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _tensors(value: object, folder: Path, where: Path) -> list[Any]:
    if isinstance(value, list):
        return [_value(v, folder, where) for v in value if _is_tensor(v)]
    return [_value(value, folder, where)] if _is_tensor(value) else []


def _is_tensor(value: object) -> bool:
    return isinstance(value, dict) and {"shape", "dtype", "value"} <= set(value)


def _value(described: Any, folder: Path, where: Path) -> Any:
    value = _field(described, "value")
    if isinstance(value, list):
        raise InputError(
            f"{where}: values are printed text, which holds no bits",
            "dump with model_addition_debugger(use_repr=False)",
        )
    path = inside(folder, value, str(where))
    tensors = load_tensors(path)
    if set(tensors) != {"data"}:
        raise InputError(f"{path}: holds {sorted(tensors)[:3]}, not 'data'", "the dump is damaged or foreign")
    return tensors["data"]
