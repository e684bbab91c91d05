"""SGLang's tensor dumper (``--debug-tensor-dump-output-folder``).

Format: ``python/sglang/srt/debug_utils/tensor_dump_forward_hook.py`` of SGLang 0.5.23. A folder
``TP{t}_PP{p}_Rank{r}_pid{n}`` a rank; in it ``Pass00000.pt`` a forward, a dict of module name -> output tensor, or list
of them where a module returns several; ``model.forward_batch_info.{input_ids,seq_lens,positions}`` besides. The head's
output comes in the next forward's file, because a file is written when the top module's hook fires.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from diffcheck.base.errors import InputError
from diffcheck.base.samples import Sample
from diffcheck.foreign.files import listed, load_pt, plain_tensor
from diffcheck.foreign.modules import bare, boundaries_of
from diffcheck.foreign.trace import Dump
from diffcheck.rows import Rows
from reference.models.config import ModelConfig

_RANK = re.compile(r"TP(\d+)_PP(\d+)_Rank(\d+)_pid\d+")
_BATCH = ".forward_batch_info."
#: Modules whose outputs are slices of the ranks; all others are whole on every rank.
_SLICED = ("qkv_proj", "q_norm", "k_norm", "rotary_emb", "attn", "gate_up_proj", "act_fn")


def read_sglang(folder: Path, model: Path, config: ModelConfig, samples: Sequence[Sample] | None) -> Dump:
    """Every forward of the dump, its rows found by the token ids and positions that it holds.

    Args:
        samples: the sequences that were run; None: one a prefill that starts at position 0, as the dump holds it.

    Raises:
        InputError: no such dump, of several pipeline stages, or of a sequence that is none of the samples.
    """
    ranks = _ranks(folder)
    passes = _passes(ranks)
    first = _load(passes[0][0])
    batches: list[tuple[Any, Any]] = []
    names = [name for name in first if name.endswith(f"{_BATCH}input_ids")]
    if len(names) != 1:
        raise InputError(f"{passes[0][0]}: holds no forward_batch_info.input_ids", "dump with SGLang 0.5 or newer")
    top = names[0].removesuffix(f"{_BATCH}input_ids")
    contents = [[_load(path) for path in files] for files in passes]
    for files in contents:
        batches.append((_ids(files[0], f"{top}{_BATCH}input_ids"), _ids(files[0], f"{top}{_BATCH}positions")))
    sequences = list(samples) if samples is not None else _prefills(batches)
    dump = Dump("sglang", folder, model, config, sequences)
    rows = [_rows(tokens, positions, sequences, passes[i][0]) for i, (tokens, positions) in enumerate(batches)]
    for i, files in enumerate(contents):
        for name in files[0]:
            if _BATCH in name or name == top:
                continue
            parts = [file[name] for file in files if name in file]
            where = f"{passes[i][0].name}: {name}"
            path = bare(name)
            if path == "logits_processor":
                # Written by the next forward's file: the head runs after the model's own hook.
                if i > 0:
                    _put_logits(dump, rows[i - 1], parts[0], where)
                continue
            found = False
            for boundary, tensor in _joined(path, parts, config, len(rows[i]), where):
                found = True
                dump.put(boundary, rows[i], tensor, where)
            if not found:
                dump.unused.add(name)
    return dump


def _ranks(folder: Path) -> list[Path]:
    found = {}
    for path in listed(folder, "TP*"):
        if (match := _RANK.fullmatch(path.name)) is None or not path.is_dir() or path.is_symlink():
            continue
        if int(match[2]):
            raise InputError(f"{path}: pipeline stage {match[2]}: several stages are not supported", "dump with PP 1")
        if int(match[1]) in found:
            raise InputError(f"{folder}: two dumps of TP rank {match[1]}", "give the folder of one server's run")
        found[int(match[1])] = path
    if not found:
        raise InputError(
            f"{folder}: no folder TP0_PP0_Rank0_pid...: not a dump of SGLang's tensor dumper",
            "give the folder of --debug-tensor-dump-output-folder",
        )
    if sorted(found) != list(range(len(found))):
        raise InputError(f"{folder}: TP ranks {sorted(found)}: one is missing", "copy the folders of all ranks")
    return [found[rank] for rank in sorted(found)]


def _passes(ranks: Sequence[Path]) -> list[list[Path]]:
    """Files of one forward each: one a rank."""
    names = [[path.name for path in listed(rank, "Pass*.pt")] for rank in ranks]
    if not names[0]:
        raise InputError(f"{ranks[0]}: no Pass*.pt", "give the folder of --debug-tensor-dump-output-folder")
    for rank, found in zip(ranks, names, strict=True):
        if found != names[0]:
            raise InputError(f"{rank}: other forwards than {ranks[0].name}", "copy the folders of all ranks, uncut")
    return [[rank / name for rank in ranks] for name in names[0]]


def _load(path: Path) -> dict[str, Any]:
    data = load_pt(path)
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise InputError(f"{path}: is no dict of names", "give what SGLang's tensor dumper wrote")
    return data


def _ids(data: dict[str, Any], name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    if name not in data:
        raise InputError(f"{name} is missing in a forward", "the dump is damaged or foreign")
    tensor = plain_tensor(data[name], name)
    if tensor.is_floating_point() or tensor.ndim != 1:
        raise InputError(f"{name}: is no list of integers", "the dump is damaged or foreign")
    return np.asarray(tensor.numpy(), np.int64)


def _runs(positions: np.ndarray[Any, Any]) -> list[slice]:
    """Parts of a batch in which positions go up by one: one sequence each."""
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    edges = [0, *cuts.tolist(), len(positions)]
    return [slice(a, b) for a, b in pairwise(edges)]


def _prefills(batches: Sequence[tuple[Any, Any]]) -> list[Sample]:
    found = []
    for tokens, positions in batches:
        for run in _runs(positions):
            if positions[run.start] == 0 and run.stop - run.start > 1:
                found.append(Sample(tuple(int(t) for t in tokens[run])))
    if not found:
        raise InputError("the dump holds no prefill from position 0", "give the sequences with --samples")
    return found


def _rows(tokens: Any, positions: Any, samples: Sequence[Sample], where: Path) -> Rows:
    """Which sample each row belongs to: the one that has these tokens at these positions. Padding belongs to none."""
    sample = np.full(len(tokens), -1, np.int64)
    for run in _runs(positions):
        start, ids = int(positions[run.start]), tuple(int(t) for t in tokens[run])
        fits = [i for i, s in enumerate(samples) if s.token_ids[start : start + len(ids)] == ids]
        if len(fits) == 1:
            sample[run] = fits[0]
        elif len(fits) > 1:
            raise InputError(
                f"{where}: tokens at positions {start} to {start + len(ids) - 1} fit samples {fits[0]} and {fits[1]}",
                "import forwards of sequences that can be told apart",
            )
    return Rows(sample, np.asarray(positions, np.int64))


def _joined(path: str, parts: Sequence[Any], config: ModelConfig, rows: int, where: str) -> Iterator[tuple[str, Any]]:
    """Boundaries of one module, its ranks' slices joined."""
    import torch

    each = [dict(boundaries_of(path, (), _tensors(part, where), _local(config, len(parts)))) for part in parts]
    for name, tensor in each[0].items():
        if len(parts) == 1 or path.rpartition(".")[2] not in _SLICED:
            yield name, tensor
        else:
            # Norms of heads come as [rows * heads, head_dim]; slices are joined within a row.
            if any(name not in part or part[name].numel() % rows for part in each):
                raise InputError(f"{where}: ranks of other shapes", "the dump is damaged or foreign")
            yield name, torch.cat([part[name].reshape(rows, -1) for part in each], dim=1)


def _local(config: ModelConfig, ranks: int) -> ModelConfig:
    """The sizes of one rank."""
    if ranks == 1:
        return config
    if config.num_key_value_heads % ranks or config.num_attention_heads % ranks:
        raise InputError(f"{ranks} TP ranks for {config.num_key_value_heads} KV heads", "import a dump of fewer ranks")
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // ranks,
        num_key_value_heads=config.num_key_value_heads // ranks,
        intermediate_size=config.intermediate_size // ranks,
    )


def _tensors(value: Any, where: str) -> list[Any]:
    return [plain_tensor(v, where) for v in (value if isinstance(value, list | tuple) else [value])]


def _put_logits(dump: Dump, rows: Rows, logits: Any, where: str) -> None:
    """One row a sequence of the forward: its last position."""
    last = [run.stop - 1 for run in _runs(rows.position)]
    logits = plain_tensor(logits, where)
    if logits.ndim != 2 or logits.shape[0] != len(last):
        dump.refused["logits"] = f"{where} has shape {tuple(logits.shape)} for {len(last)} sequences"
        return
    dump.put("logits", rows.take(np.array(last)), logits[:, : dump.config.vocab_size], where)
