"""One dump in, one file of samples or one trace out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffcheck.base.errors import InputError
from diffcheck.base.files import check_writable
from diffcheck.base.models import BUILT_IN, resolve_model
from diffcheck.base.samples import Sample, load_samples, save_samples
from diffcheck.foreign.hf_debugger import read_hf_debugger
from diffcheck.foreign.msprobe import read_msprobe
from diffcheck.foreign.rl_kernel import read_rl_kernel
from diffcheck.foreign.sequences import Sequences, read_slime, read_trl, read_verl, tokenizer_of
from diffcheck.foreign.sglang import read_sglang
from diffcheck.foreign.trace import Dump

#: Format -> (what it becomes, what it is).
FORMATS = {
    "verl": ("samples", "verl's trainer.rollout_data_dir, STEP.jsonl"),
    "slime": ("samples", "slime's --save-debug-rollout-data, .pt"),
    "miles": ("samples", "miles' --save-debug-rollout-data, .pt"),
    "vime": ("samples", "vime's --save-debug-rollout-data, .pt"),
    "trl": ("samples", "TRL's log_completions, completions_STEP.parquet"),
    "sglang": ("trace", "SGLang's --debug-tensor-dump-output-folder"),
    "msprobe": ("trace", "msProbe's dump, level L0 or mix, task tensor"),
    "rl-kernel": ("trace", "RL-Kernel's capture bundle, one --side"),
    "hf-debugger": ("trace", "transformers' model_addition_debugger, use_repr=False"),
}
_TEXT = ("verl", "trl")


@dataclass(frozen=True)
class Imported:
    """What came of a dump, in words."""

    out: Path
    summary: str
    notes: list[str] = field(default_factory=list)


def import_dump(
    kind: str,
    path: Path,
    out: Path,
    *,
    model: str | None = None,
    samples: Path | None = None,
    retokenize: str | None = None,
    side: str | None = None,
    overwrite: bool = False,
) -> Imported:
    """Make samples or a trace of another project's dump.

    Args:
        kind: a key of `FORMATS`.
        model: of a dump of tensors: the model that was run, for its sizes.
        samples: of a dump of tensors: the sequences that were run; where None the dump must hold them.
        retokenize: of a dump of text: the model whose tokenizer makes the tokens.
        side: of a bundle of RL-Kernel.

    Raises:
        InputError: an unknown format, an option it does not read, or a dump that is damaged, foreign or too large; the
            file is named, and nothing is written.
        TraceError: ``out`` cannot be written.
    """
    if kind not in FORMATS:
        raise InputError(f"format {kind!r} is none of {', '.join(FORMATS)}", "rlk-diff import --help lists them")
    becomes = FORMATS[kind][0]
    unread: dict[str, object] = {
        "--retokenize": retokenize if kind not in _TEXT else None,
        "--side": side if kind != "rl-kernel" else None,
    }
    if becomes == "samples":
        unread |= {"--model": model, "--samples": samples}
    for option, value in unread.items():
        if value is not None:
            raise InputError(f"{option} would change nothing: {kind} dumps do not need it", "leave it out")
    if becomes == "samples":
        return _samples(kind, path, out, retokenize, overwrite)
    if model is None:
        raise InputError(f"a dump of {kind} does not say its model's sizes", "give the model's folder with --model")
    given = load_samples(samples) if samples is not None else None
    return _trace(kind, path, out, model, given, side, overwrite)


def _samples(kind: str, path: Path, out: Path, retokenize: str | None, overwrite: bool) -> Imported:
    check_writable(out)
    if out.exists() and not overwrite:
        raise InputError(f"{out}: already exists", "give another --out, or --overwrite to replace it")
    tokenise = None
    if retokenize is not None:
        tokenise = tokenizer_of(resolve_model(retokenize)[0] if retokenize in BUILT_IN else Path(retokenize))
    found: Sequences
    if kind == "verl":
        found = read_verl(path, tokenise)
    elif kind == "trl":
        found = read_trl(path, tokenise)
    else:
        found = read_slime(path)
    if not found.samples:
        why = "; ".join(f"{n} left out: {reason}" for reason, n in found.left_out.items())
        raise InputError(f"{path}: no sample can be taken of it{': ' + why if why else ''}", "give another dump")
    save_samples(out, found.samples)
    tokens = sum(len(s.response_token_ids) for s in found.samples)
    recorded = sum(s.rollout_logprobs is not None for s in found.samples)
    notes = [f"{n} samples left out: {reason}" for reason, n in found.left_out.items()] + found.notes
    return Imported(
        out, f"{len(found.samples)} samples, {tokens} response tokens, {recorded} with recorded logprobs", notes
    )


def _trace(
    kind: str, path: Path, out: Path, model: str, samples: Sequence[Sample] | None, side: str | None, overwrite: bool
) -> Imported:
    folder, config = resolve_model(model)
    dump: Dump
    tokens: list[list[int]] | None = None
    positions: list[list[int]] | None = None
    evidence: dict[str, Any] = {"format": kind}
    if kind == "sglang":
        dump = read_sglang(path, folder, config, samples)
        tokens = [list(s.token_ids[:-1]) for s in dump.samples]
        positions = [list(range(s.forward_length)) for s in dump.samples]
    elif kind == "hf-debugger":
        dump, tokens = read_hf_debugger(path, folder, config, samples)
    elif kind == "msprobe":
        dump, tokens = read_msprobe(path, folder, config, samples)
    else:
        dump, more = read_rl_kernel(path, folder, config, samples, side)
        evidence |= more
    observed = dump.write(out, overwrite=overwrite, tokens=tokens, positions=positions, versions={}, evidence=evidence)
    expected = len(dump.recorder.boundaries)
    notes = [f"{name}: {reason}" for name, reason in sorted(dump.refused.items())]
    if dump.unused:
        shown = ", ".join(sorted(dump.unused)[:3])
        notes.append(f"{len(dump.unused)} entries of the dump are no boundary of the model: {shown}, ...")
    return Imported(out, f"{len(observed)} of {expected} boundaries, {len(dump.samples)} samples", notes)
