"""A live engine in another process, as seen from here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffcheck.base.progress import Progress
from diffcheck.base.workers import Workers
from diffcheck.capture.adapter import CaptureResult
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.trace.writer import remove_staging


class EngineSession(Workers):
    """One engine that captures traces.

    Args:
        module: what its processes run.

    Raises:
        EngineError: the engine could not start, ran out of memory, or died.
    """

    def __init__(
        self,
        options: EngineOptions,
        progress: Progress,
        log: Path | None = None,
        module: str = "diffcheck.capture.worker",
    ) -> None:
        self.options = options
        self._opened = False
        #: Trace of the request in progress: an engine that is killed cannot clean up itself.
        self._writing: Path | None = None
        # Megatron's ranks are processes of ours; the other engines spawn their own.
        ranks = options.tensor_parallel if options.engine == "megatron" else 1
        super().__init__(options.engine, module, ranks, progress, log)
        self.send({"open": options.to_json()})

    def wait_ready(self) -> None:
        """Block until the engine is up. `capture` does it too; calling it earlier overlaps start-ups."""
        if not self._opened:
            self.receive()
            self._opened = True

    def capture(self, plan: CapturePlan, **more: Any) -> CaptureResult:
        """Run one plan.

        Args:
            more: what else the request holds, for a worker that knows more than captures.

        Raises:
            RlkError: as the adapter raised it, with its remedy and exit code.
        """
        self.wait_ready()
        self._writing = plan.out
        self.send({"capture": plan.to_json(), **more})
        result = CaptureResult.from_json(self.receive())
        self._writing = None
        return result

    def close(self, *, hurry: bool = False) -> None:
        """End the engine; what it was writing is removed."""
        super().close(hurry=hurry)
        if self._writing is not None:
            remove_staging(self._writing)
