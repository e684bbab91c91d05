"""RL-Kernel's portable capture bundle (``rlk debug``), schema ``rlkernel.capture.v1``.

Format: ``rl_engine/alignment/debug/{evidence,core,auto}.py`` of RL-Kernel, commits 82fd031 and 4d39c20.
``capture-manifest.json`` with ``schema_version``, ``scope``, ``boundaries`` (``id``, ``positions``, ``width``,
``module_path`` where captured automatically); ``captures/{side}-rank{r}-call{n}.pt``, each a dict with ``boundary``,
``side``, ``identity``, ``tensors.value`` [rows, local features],
``metadata.{stage_positions,feature_offsets}.value``. A ``.lock`` without its ``.pt`` is a capture that was interrupted.
One sequence; of its tokens there is a fingerprint only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffcheck.base.errors import InputError
from diffcheck.base.samples import Sample
from diffcheck.foreign.files import listed, load_json, load_pt, plain_tensor
from diffcheck.foreign.modules import bare, boundaries_of
from diffcheck.foreign.trace import Dump
from diffcheck.rows import Rows
from reference.models.config import ModelConfig

_SCHEMA = "rlkernel.capture.v1"
SIDES = ("rollout", "training")
_FILE = re.compile(r"(rollout|training)-rank(\d+)-call(\d+)")
_AUTOMATIC = re.compile(r"auto\..+\.(input|output)")


def read_rl_kernel(
    folder: Path, model: Path, config: ModelConfig, samples: Sequence[Sample] | None, side: str | None
) -> tuple[Dump, dict[str, Any]]:
    """One side of a bundle.

    Args:
        samples: the sequence that was run, exactly one.

    Returns:
        The dump, and what the bundle says of the object in words of its own.

    Raises:
        InputError: no such bundle, an interrupted capture, ranks that disagree, or tokens that are not the bundle's.
    """
    manifest = load_json(folder / "capture-manifest.json")
    if not isinstance(manifest, dict) or manifest.get("schema_version") != _SCHEMA:
        found = manifest.get("schema_version") if isinstance(manifest, dict) else None
        raise InputError(f"{folder}/capture-manifest.json: schema {found!r}", f"this rlk reads {_SCHEMA}")
    specs = {
        s["id"]: s for s in manifest.get("boundaries") or () if isinstance(s, dict) and isinstance(s.get("id"), str)
    }
    if side not in SIDES:
        raise InputError("a bundle has two sides", f"give one of them with --side: {', '.join(SIDES)}")
    if samples is None or len(samples) != 1:
        raise InputError(
            "a bundle holds a fingerprint of its tokens and not the tokens", "give its one sequence with --samples"
        )
    records = list(_records(folder, side))
    identity = records[0][1].get("identity")
    if any(record.get("identity") != identity for _, record in records):
        raise InputError(f"{folder}: captures of {side} name several objects", "capture one forward")
    _check_tokens(samples[0], identity, folder)
    dump = Dump("rl-kernel", folder, model, config, list(samples))
    shards: dict[str, dict[int, list[tuple[int, Any, Path]]]] = {}
    for path, record in records:
        name = record.get("boundary")
        if name not in specs:
            raise InputError(f"{path}: boundary {name!r} is not in the manifest", "the bundle is damaged")
        for position, offset, row in _rows(record, path):
            shards.setdefault(str(name), {}).setdefault(position, []).append((offset, row, path))
    for name, by_position in shards.items():
        _put(dump, specs[name], by_position)
    return dump, {"side": side, "scope": str(manifest.get("scope"))[:500]}


def _records(folder: Path, side: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    captures = folder / "captures"
    for lock in listed(captures, "*.lock"):
        if not lock.with_suffix(".pt").is_file():
            raise InputError(f"{lock}: a capture that was interrupted", "capture again")
    files = [path for path in listed(captures, "*.pt") if (m := _FILE.fullmatch(path.stem)) and m[1] == side]
    if not files:
        raise InputError(f"{captures}: nothing of side {side}", f"sides are {', '.join(SIDES)}")
    for path in files:
        record = load_pt(path)
        if not isinstance(record, dict) or record.get("schema_version") != _SCHEMA or record.get("side") != side:
            raise InputError(f"{path}: is no capture of {side} in {_SCHEMA}", "the bundle is damaged")
        yield path, record


def _check_tokens(sample: Sample, identity: object, folder: Path) -> None:
    given = identity.get("tokens") if isinstance(identity, dict) else None
    ids = [np.array(tokens, np.int64) for tokens in (sample.token_ids, sample.token_ids[:-1])]
    known = {
        hashlib.sha256(str((shape, f"torch.{kind}")).encode().replace(b"'", b"") + i.astype(kind).tobytes()).hexdigest()
        for i in ids
        for shape in ((i.size,), (1, i.size))
        for kind in ("int64", "int32")
    }
    if given not in known:
        raise InputError(
            f"{folder}: the sample's tokens have not the fingerprint that the bundle names", "give the sequence it ran"
        )


def _rows(record: dict[str, Any], path: Path) -> Iterator[tuple[int, int, Any]]:
    """(position, first feature, row) of one capture."""
    try:
        value = plain_tensor(record["tensors"]["value"], str(path))
        positions = plain_tensor(record["metadata"]["stage_positions"]["value"], str(path)).tolist()
        offset = record["metadata"]["feature_offsets"]["value"]
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: field {error} is missing", "the bundle is damaged") from None
    if value.ndim != 2 or len(positions) != value.shape[0] or type(offset) is not int or offset < 0:
        raise InputError(f"{path}: {len(positions)} positions for a tensor of {tuple(value.shape)}", "it is damaged")
    for i, position in enumerate(positions):
        if type(position) is not int or not 0 <= position < 1 << 31:
            raise InputError(f"{path}: position {position!r}", "the bundle is damaged")
        yield position, offset, value[i]


def _put(dump: Dump, spec: dict[str, Any], by_position: dict[int, list[tuple[int, Any, Path]]]) -> None:
    import torch

    rows, values = [], []
    for position in sorted(by_position):
        pieces: dict[int, Any] = {}
        for offset, row, path in by_position[position]:
            if offset in pieces and not torch.equal(pieces[offset].view(torch.uint8), row.view(torch.uint8)):
                raise InputError(f"{path}: {spec['id']}: ranks disagree at position {position}", "capture again")
            pieces[offset] = row
        cursor = 0
        for offset in sorted(pieces):
            if offset != cursor:
                dump.refused[_names(spec)[0]] = f"{spec['id']}: a gap at position {position}, feature {cursor}"
                return
            cursor += pieces[offset].numel()
        rows.append(position)
        values.append(torch.cat([pieces[offset] for offset in sorted(pieces)]))
    if len({v.numel() for v in values}) != 1:
        dump.refused[_names(spec)[0]] = f"{spec['id']}: rows of several widths"
        return
    whole = torch.stack(values)
    at = Rows(np.zeros(len(rows), np.int64), np.array(rows, np.int64))
    module, stage = _names(spec)
    if stage:
        tensors: tuple[Sequence[Any], Sequence[Any]] = ((whole,), ()) if stage == "input" else ((), (whole,))
        # Of a norm's tensors only the first is kept, which with one input is the stream, and with two is not.
        known = dict(boundaries_of(module, *tensors, dump.config)) if module.rpartition(".")[2] != "act_fn" else {}
    else:
        known = {module: whole}
    for boundary, tensor in known.items():
        dump.put(boundary, at, tensor, str(spec["id"]))
    if not known:
        dump.unused.add(str(spec["id"]))


def _names(spec: dict[str, Any]) -> tuple[str, str]:
    """(module path, "input" or "output") of an automatic boundary, else (the boundary's own name, "")."""
    match = _AUTOMATIC.fullmatch(spec["id"])
    if match is not None and isinstance(spec.get("module_path"), str):
        return bare(spec["module_path"]), match[1]
    return bare(spec["id"]), ""
