"""The model's weights as the traced engine held them: read without torch, believed only if their digests agree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from diffcheck.base.checkpoint import DTYPES, read_checkpoint
from diffcheck.base.errors import ExitCode, InputError
from diffcheck.base.record import weight_digest
from reference.checks import Float32Array
from reference.formats import FORMATS
from reference.rounding import round_to


class TracedWeights:
    """Weights of a model folder by Hugging Face name, float32, each checked against a trace's object record.

    Args:
        folder: holds ``*.safetensors``.
        digests: Hugging Face name -> digest of the live parameter (`ObjectRecord.weights`).
        dtype: of the traced model: wider weights of the checkpoint were rounded to it when they were loaded.
    """

    def __init__(self, folder: Path, digests: Mapping[str, str], dtype: str) -> None:
        self._folder, self._digests, self._dtype = folder, digests, dtype
        self._where = read_checkpoint(folder).weights

    def __contains__(self, name: str) -> bool:
        return name in self._digests

    def __getitem__(self, name: str) -> Float32Array:
        """The weight as the engine held it.

        Raises:
            InputError: it is missing in the folder, or none of its roundings has the traced digest: another model,
                another version of it, or a weight that was changed after loading.
        """
        if name not in self._where or self._where[name].dtype not in DTYPES:
            raise InputError(f"{self._folder}: weight {name} is missing", "give the traced model's folder with --model")
        values = self._where[name].values()
        # An engine may keep a norm's weight in float32 in a bfloat16 model, so both forms are candidates.
        for held in (values, round_to(values, FORMATS[self._dtype])):
            if weight_digest(held) == self._digests.get(name):
                return held
        raise InputError(
            f"{self._folder}: weight {name} is not the one that the trace was made with",
            "give the traced model's own folder with --model; weights changed on purpose cannot be inferred over",
            ExitCode.NOT_COMPARABLE,
        )
