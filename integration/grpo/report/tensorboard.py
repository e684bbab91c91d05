"""Steps as TensorBoard events: ours under ``rlk/``, and each framework's names under its own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffcheck.base.errors import InputError
from integration.grpo.buffer import Buffer
from integration.grpo.mismatch.metric_names import Tokens, flat, named
from integration.grpo.report.read import SAMPLES, Run

FOLDER = "tensorboard"


class EventWriter:
    """Writes events to a folder, a step at a time: while a run goes on, or afterwards. Close it.

    Raises:
        InputError: tensorboard is not installed, or ``folder`` cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError("events need tensorboard, which is not installed", "pip install 'rlk[report]'") from None
        try:
            self._writer = SummaryWriter(str(folder))
        except OSError as error:
            raise InputError(f"{folder}: {error.strerror}", "make it writable, or free some space") from None

    def step(self, record: Mapping[str, Any], names: Mapping[str, Mapping[str, float]]) -> None:
        """Write one line of steps.jsonl and the names of its tokens; what is null or text is left out."""
        at = record["step"]
        values = {f"rlk/{name}": value for name, value in record.items() if name not in ("step", "seconds")}
        values |= {f"rlk/seconds/{phase}": value for phase, value in record["seconds"].items()}
        for name, value in {**values, **flat(names)}.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, at)

    def close(self) -> None:
        self._writer.close()


def write_events(run: Run) -> Path:
    """Write all steps of ``run`` into its folder, in place of events that are there.

    Returns:
        The folder of the events.
    """
    final = run.folder / FOLDER
    partial = run.folder / f".{FOLDER}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    writer = EventWriter(partial)
    try:
        with Buffer.open(run.folder / SAMPLES, read_only=True) as buffer:
            for record in run.steps:
                writer.step(record, named(Tokens.of(buffer.samples(record["step"], ("consumed",)))))
    finally:
        writer.close()
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    return final
