"""When a run ends before its last step: a time limit is near, or somebody asked for it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from diffcheck.base.stopping import STOPS

#: Seconds that the last checkpoint and the end of the engines take.
_END = 10.0


class Budget:
    """Answers `Run`'s question ``stop_after(step, seconds of that step)``.

    From its making on, the first Ctrl-C, SIGTERM or SIGHUP is a wish to stop after the step in progress; a second one
    ends the run at once.

    Args:
        seconds: from now to the end of this process; None sets no limit.
        announce: is told that somebody asked.
    """

    def __init__(self, seconds: float | None, announce: Callable[[str], None] = lambda _: None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._longest = 0.0
        self._announce = announce
        #: The signal that asked, if one did.
        self.asked: int | None = None
        self._before = {n: signal.getsignal(n) for n in STOPS if signal.getsignal(n) != signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self._ask)

    def __call__(self, step: int, seconds: float) -> bool:
        if self.asked is not None:
            return True
        if self._end is None:
            return False
        # The first step of an engine compiles and warms up: others are shorter.
        self._longest = max(self._longest / 2, seconds)
        return time.monotonic() + self._longest + _END > self._end

    def _ask(self, number: int, _frame: Any) -> None:
        self.asked = number
        self.close()
        self._announce("stopping after the step in progress, with a checkpoint; once more stops at once")

    def close(self) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
