"""Samples of other projects' rollouts: verl, slime (and miles and vime, which keep its format), TRL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffcheck.base.errors import InputError, RlkError
from diffcheck.base.recorded import check_recorded
from diffcheck.base.samples import Sample
from diffcheck.foreign.files import TENSOR_LIMIT, check_plain, load_lines, load_pt

#: Text -> token ids.
Tokenise = Callable[[str], list[int]]
_NO_TOKENS = (
    "text and no token ids: the tokens that were drawn are not in the file",
    "give --retokenize MODEL to take those that its tokenizer makes of the text",
)


@dataclass
class Sequences:
    """Samples, and what was left out of them and why."""

    samples: list[Sample] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    #: What a reader must know of the samples.
    notes: list[str] = field(default_factory=list)


def tokenizer_of(folder: Path) -> Tokenise:
    """The tokenizer of a model's folder, without special tokens added.

    Raises:
        InputError: the folder has no tokenizer.json.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    check_plain(path, TENSOR_LIMIT)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        # tokenizers raises bare Exception.
        raise InputError(f"{path}: {error}", "give a folder with a tokenizer.json") from None
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def read_verl(path: Path, tokenise: Tokenise | None) -> Sequences:
    """verl's ``trainer.rollout_data_dir``: ``{step}.jsonl``.

    Format: ``_write_generations`` of ``verl/trainer/ppo/v1/trainer_base.py`` and ``ray_trainer.py``, verl 0.9.1:
    ``input``, ``output`` (text, decoded without special tokens), ``gts``, ``score``, ``step``, and lists of the reward
    function.
    """
    found = Sequences()
    for where, line in load_lines(path):
        for name in ("input", "output"):
            if not isinstance(line.get(name), str):
                raise InputError(f"{where}: field {name!r} is no text", "give what verl's rollout_data_dir holds")
        _add_text(found, where, line["input"], line["output"], tokenise, f"{path.stem}:{len(found.samples)}")
    return found


def read_trl(path: Path, tokenise: Tokenise | None) -> Sequences:
    """TRL's ``log_completions``: ``completions/completions_{step}.parquet``.

    Format: ``log`` of ``trl/trainer/grpo_trainer.py``, TRL 1.16.0: ``step``, ``prompt`` and ``completion`` (text, or
    lists of messages), a column a reward function, ``advantage``, and what ``log_extra`` was given. Columns
    ``prompt_ids``, ``completion_ids`` and ``logprobs``, where the user logged them so, are taken as what they say.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_plain(path, TENSOR_LIMIT)
    found = Sequences()
    try:
        with pq.ParquetFile(path) as file:
            names = set(file.schema_arrow.names)
            if not {"prompt", "completion"} <= names:
                raise InputError(f"{path}: no columns prompt and completion", "give a file of TRL's log_completions")
            has_ids = {"prompt_ids", "completion_ids"} <= names
            wanted = ["prompt", "completion", *(("prompt_ids", "completion_ids") if has_ids else ())]
            wanted += ["logprobs"] if has_ids and "logprobs" in names else []
            # Sizes are what the file says they are: a few bytes can stand for terabytes.
            group_sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
            if file.metadata.num_rows > 10_000_000 or sum(group_sizes) > TENSOR_LIMIT:
                raise InputError(f"{path}: {file.metadata.num_rows:,} rows", "split the file")
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=wanted):
                for row in batch.to_pylist():
                    where = f"{path}: row {number}"
                    number += 1
                    if has_ids:
                        data = {"prompt_token_ids": row["prompt_ids"], "response_token_ids": row["completion_ids"],
                                "rollout_logprobs": row.get("logprobs"), "id": f"{path.stem}:{number - 1}"}  # fmt: skip
                        _add(found, where, {k: v for k, v in data.items() if v is not None})
                    else:
                        _add_text(found, where, row["prompt"], row["completion"], tokenise, f"{path.stem}:{number - 1}")
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise InputError(f"{path}: {(str(error).splitlines() or ['damaged'])[0][:200]}", "give a whole file") from None
    return found


def read_slime(path: Path) -> Sequences:
    """``--save-debug-rollout-data`` of slime, miles and vime.

    Format: ``save_debug_rollout_data`` of ``slime/observability/rollout_data_utils.py`` (commit 4c4adbb) and
    ``Sample.to_dict`` of ``slime/utils/types.py`` (commit 0d234f3): ``{"rollout_id", "samples"}``, each sample with
    ``tokens`` (prompt and response), ``response_length``, ``rollout_log_probs``, ``loss_mask``, ``weight_versions``,
    ``index``, ``status``. miles and vime are forks that keep the writer; theirs was not read.
    """
    data = load_pt(path)
    samples = data.get("samples") if isinstance(data, dict) else None
    if not isinstance(samples, list):
        raise InputError(f"{path}: field 'samples' is missing", "give a file of --save-debug-rollout-data")
    found = Sequences()
    for i, one in enumerate(samples):
        where = f"{path}: samples[{i}]"
        if not isinstance(one, dict):
            raise InputError(f"{where} is no dict", "give a file of --save-debug-rollout-data")
        tokens, length = _list(one.get("tokens"), f"{where}.tokens"), one.get("response_length")
        if type(length) is not int or not 0 <= length <= len(tokens):
            raise InputError(f"{where}.response_length = {length!r} for {len(tokens)} tokens", "the file is damaged")
        mask = one.get("loss_mask")
        if mask is not None and not all(_list(mask, f"{where}.loss_mask")):
            found.left_out["some of its response was not drawn (loss_mask 0)"] += 1
            continue
        logprobs = one.get("rollout_log_probs")
        record = {
            "prompt_token_ids": tokens[: len(tokens) - length],
            "response_token_ids": tokens[len(tokens) - length :],
            "rollout_logprobs": None if logprobs is None else _list(logprobs, f"{where}.rollout_log_probs"),
            "weight_version": _version(one.get("weight_versions")),
            "id": one.get("index") if isinstance(one.get("index"), int | str) else None,
        }
        _add(found, where, {k: v for k, v in record.items() if v is not None})
    if len({s.id for s in found.samples}) < len(found.samples):
        found.samples = [Sample(**{**s.__dict__, "id": None}) for s in found.samples]
        found.notes.append("indices come twice, so samples are told apart by their tokens")
    return found


def _version(versions: object) -> int | None:
    """The version of the weights, where all of a response was drawn under one that is a number."""
    if isinstance(versions, list) and versions and len({str(v) for v in versions}) == 1 and str(versions[0]).isdigit():
        return int(str(versions[0]))
    return None


def _list(value: Any, where: str) -> list[Any]:
    """A list, or a tensor of one dimension as one."""
    if hasattr(value, "tolist") and hasattr(value, "ndim"):
        if value.ndim != 1 or value.numel() > max(1, value.untyped_storage().nbytes() // value.element_size()):
            raise InputError(f"{where} has {value.ndim} dimensions", "expected a list")
        value = value.tolist()
    if not isinstance(value, list):
        raise InputError(f"{where} is no list", "give what the project wrote")
    return value


def _add_text(found: Sequences, where: str, prompt: Any, response: Any, tokenise: Tokenise | None, name: str) -> None:
    if not isinstance(prompt, str) or not isinstance(response, str):
        raise InputError(
            f"{where}: prompt and completion are messages, whose chat template is not in the file",
            "log token ids, or log prompts as text",
        )
    if tokenise is None:
        raise InputError(f"{where}: {_NO_TOKENS[0]}", _NO_TOKENS[1])
    if not found.notes:
        found.notes.append("tokens are a tokenizer's of the text, not those that were drawn; special tokens are lost")
    _add(found, where, {"prompt_token_ids": tokenise(prompt), "response_token_ids": tokenise(response), "id": name})


def _add(found: Sequences, where: str, data: dict[str, Any]) -> None:
    if not data["response_token_ids"]:
        found.left_out["it has no response"] += 1
        return
    if not data["prompt_token_ids"]:
        found.left_out["it has no prompt"] += 1
        return
    try:
        sample = Sample.from_json(data, where)
        check_recorded(sample.rollout_logprobs, f"{where}: rollout_logprobs")
    except RlkError as error:
        raise InputError(error.cause, "the dump is damaged, or of another version of its project") from None
    found.samples.append(sample)
