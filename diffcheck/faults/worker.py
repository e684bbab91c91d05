"""A live engine in its own process, whose insides may be changed for the length of one capture.

Started by `diffcheck.faults.engines.ChangeableEngine`; requests are ``{"capture": plan, "changes": [[name, arguments],
...]}``.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from diffcheck.base.progress import Progress
from diffcheck.base.serving import end, serve
from diffcheck.capture.adapter import open_adapter
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.faults.changes import Live, find


class _Changeable:
    """An adapter, and changes around its captures."""

    def __init__(self, options: Any, progress: Progress) -> None:
        self._progress = progress
        self._adapter = open_adapter(EngineOptions.from_json(options), progress)

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        plan = CapturePlan.from_json(request["capture"])
        live = Live(self._adapter, plan, self._progress)
        with ExitStack() as stack:
            for name, arguments in request.get("changes", ()):
                stack.enter_context(find(name)(live, **arguments))
            return self._adapter.capture(plan, self._progress).to_json()

    def close(self) -> None:
        self._adapter.close()


if __name__ == "__main__":
    serve(_Changeable)
    end()
