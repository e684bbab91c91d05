"""Weights on their way from the trainer to the rollout engines: a safetensors file a version, in Hugging Face names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffcheck.base.errors import InputError
from diffcheck.base.record import weight_digest
from reference.files import to_disk

Tensor = Any


def weights_path(folder: Path, version: int) -> Path:
    """File of a version in the run's folder of weights."""
    return folder / f"v{version:06d}.safetensors"


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the file; readers see all of it or none.

    Raises:
        InputError: the disk is full, or the folder cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, staging)
        to_disk(staging)
        staging.replace(path)
        to_disk(path.parent)
    except (OSError, SafetensorError) as error:
        staging.unlink(missing_ok=True)
        raise InputError(f"{path}: {error}", "free some space, or make the folder writable; then resume") from None


def read_weights(path: Path, digests: Mapping[str, str]) -> dict[str, Tensor]:
    """The weights of a file, checked against the ``digests`` of what was to be written.

    Raises:
        InputError: it is missing, torn or damaged; the tensor is named.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    remedy = "the trainer still has these weights: resume the run, it writes them again"
    try:
        weights: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: damaged: {error}", remedy) from None
    for name in dict.fromkeys((*digests, *weights)):
        if name not in digests or name not in weights:
            raise InputError(f"{path}: weight {name} is {'missing' if name in digests else 'foreign'}", remedy)
        if weight_digest(weights[name]) != digests[name]:
            raise InputError(f"{path}: weight {name} is not the one that was written", remedy)
    return weights


def joint_digest(digests: Mapping[str, str]) -> str:
    """One SHA-256 for all weights, by name."""
    return hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()
