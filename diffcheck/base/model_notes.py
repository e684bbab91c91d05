"""What a reader of a verdict must know of a model folder: what of it was not used, and what was cast."""

from __future__ import annotations

import json
from pathlib import Path

from diffcheck.base.checkpoint import read_checkpoint

#: Keys of ``generation_config.json`` that shape the distribution, with the values that do nothing.
_SAMPLING: dict[str, tuple[object, ...]] = {
    "temperature": (None, 1, 1.0),
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "typical_p": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "sequence_bias": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "guidance_scale": (None, 1, 1.0),
}
#: Significant bits of each format.
_BITS = {"bfloat16": 8, "float16": 11, "float32": 24}


def model_notes(folder: Path, dtype: str) -> list[str]:
    """Sentences on the model of ``folder``, which live engines run in ``dtype``."""
    stored = read_checkpoint(folder)
    notes = []
    others = [d for d in stored.dtypes if d != dtype]
    if others:
        rounds = any(_BITS[d] > _BITS[dtype] or (d, dtype) == ("float16", "bfloat16") for d in others if d in _BITS)
        how = ", which rounds them" if rounds else ""
        notes.append(
            f"The checkpoint is stored in {' and '.join(stored.dtypes)}: its weights were cast to {dtype}{how}."
        )
    if stored.unread:
        names = ", ".join(path.name for path in stored.unread)
        notes.append(f"Not part of the model, and not read: {names}.")
    if asked := sampling_asked(folder):
        listed = ", ".join(f"{name} {value}" for name, value in asked.items())
        notes.append(
            f"generation_config.json asks for {listed}: servers apply that by default; here the command line decides."
        )
    return notes


def sampling_asked(folder: Path) -> dict[str, object]:
    """What ``generation_config.json`` asks of a sampler that changes the distribution; empty without such a file."""
    try:
        asked = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(asked, dict):
        return {}
    return {name: asked[name] for name, inert in _SAMPLING.items() if name in asked and asked[name] not in inert}
