"""When a run ends before its last step: a time limit is near, or somebody asked for it with SIGTERM."""

from __future__ import annotations

import signal
import time
from typing import Any

#: Seconds that the last checkpoint and the end of the engines take.
_END = 10.0


class Budget:
    """Answers `Run`'s question ``stop_after(step, seconds of that step)``.

    From its making on, the first SIGTERM is a wish to stop after the step in progress; a second one ends the process.

    Args:
        seconds: from now to the end of this process; None sets no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._longest = 0.0
        self._is_asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def __call__(self, step: int, seconds: float) -> bool:
        if self._is_asked:
            return True
        if self._end is None:
            return False
        # The first step of an engine compiles and warms up: others are shorter.
        self._longest = max(self._longest / 2, seconds)
        return time.monotonic() + self._longest + _END > self._end

    def _ask(self, _signal: int, _frame: Any) -> None:
        self._is_asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
