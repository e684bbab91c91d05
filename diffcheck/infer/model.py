"""Which model is a trace of? Known by the digests of its weights, never by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from diffcheck.base.errors import ExitCode, InputError
from diffcheck.base.models import BUILT_IN, could_be, resolve_model
from diffcheck.infer.weights import TracedWeights
from diffcheck.trace.schema import Header
from reference.models.config import ModelConfig


def find_model(
    header: Header, named: str | None, announce: Callable[[str], None] = lambda _: None, *, hint: str | None = None
) -> Path:
    """The folder with the traced weights: the one that is named, or else a built-in model or one in Hugging Face's
    cache.

    Args:
        named: what the user gave: it, or none. None: nothing was given.
        hint: tried first where nothing was given.

    Raises:
        InputError: none of them holds a weight of the trace; what to give as --model is said.
    """
    config = ModelConfig(**header.object.model)
    first = [] if hint is None else [hint]
    for name in [named] if named is not None else (*first, *_at_hand(config, hint)):
        try:
            folder, theirs = resolve_model(name, announce)
        except InputError:
            # A model that merely is at hand need not be whole.
            if name == named:
                raise
            continue
        if theirs.tie_word_embeddings == config.tie_word_embeddings and _holds(folder, header):
            return folder
    shape = f"{config.num_hidden_layers} layers of hidden size {config.hidden_size}, vocabulary {config.vocab_size}"
    weight = min(header.object.weights, default="")
    seen = f"{named} does not hold the weights that were traced" if named else "no model at hand is the traced one"
    raise InputError(
        f"{seen}: {config.architecture}, {shape}; {weight} has digest {header.object.weights.get(weight, '')[:16]}",
        "give that model's own folder, of the traced version, as --model",
        ExitCode.NOT_COMPARABLE,
    )


def _at_hand(config: ModelConfig, tried: str | None) -> Iterator[str]:
    """Models that have the traced shape and cost nothing to look at, but for a built-in one's first making."""
    yield from (name for name in BUILT_IN if name != tried and could_be(name, config))
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"
    for path in sorted(hub.glob("models--*/snapshots/*/config.json")):
        try:
            found = ModelConfig.from_folder(path.parent)
        except (ValueError, OSError):
            continue
        same = (found.num_hidden_layers, found.hidden_size, found.vocab_size)
        if same == (config.num_hidden_layers, config.hidden_size, config.vocab_size) and any(
            path.parent.glob("*.safetensors")
        ):
            yield str(path.parent)


def _holds(folder: Path, header: Header) -> bool:
    """Whether one of the small weights is the traced one: others may have been changed on purpose."""
    weights = TracedWeights(folder, header.object.weights, header.dtype)
    for name in header.object.weights:
        if name.endswith("norm.weight"):
            try:
                weights[name]
            except InputError:
                continue
            return True
    return False
