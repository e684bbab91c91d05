"""One live engine in its own process. Started by `diffcheck.capture.session`."""

from __future__ import annotations

from typing import Any

from diffcheck.base.progress import Progress
from diffcheck.base.serving import end, serve
from diffcheck.capture.adapter import open_adapter
from diffcheck.capture.plan import CapturePlan, EngineOptions


class _Captures:
    """An adapter behind requests ``{"capture": plan}``."""

    def __init__(self, options: Any, progress: Progress) -> None:
        self._progress = progress
        self._adapter = open_adapter(EngineOptions.from_json(options), progress)

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._adapter.capture(CapturePlan.from_json(request["capture"]), self._progress).to_json()

    def close(self) -> None:
        self._adapter.close()


if __name__ == "__main__":
    serve(_Captures)
    end()
