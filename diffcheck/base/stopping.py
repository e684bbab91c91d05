"""SIGTERM and SIGHUP end a command as Ctrl-C does: in order, with nothing half-written and no engine left."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: What a shell, a scheduler or a closed terminal sends.
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped:
    """Which signal asked for the end, if one did."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def exit_code(self) -> int:
        """The shell's code for a process that a signal ended."""
        return 128 + (self.signal or signal.SIGINT)

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        raise KeyboardInterrupt


@contextmanager
def stopped_in_order() -> Iterator[Stopped]:
    """Within, each of `STOPS` raises KeyboardInterrupt; one that is ignored (``nohup``) stays so."""
    stopped = Stopped()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in STOPS:
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, stopped)
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


#: Run first thing in a child: die with the parent, whose process id is the first argument, also while libraries are
#: being imported; then be the module that is the second. 1 is prctl's PR_SET_PDEATHSIG.
CHILD = f"""
import ctypes, os, runpy, sys
parent, module = int(sys.argv[1]), sys.argv[2]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)})
    if os.getppid() != parent:
        os._exit(1)
sys.argv[:] = [module]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def child_command(python: str, module: str) -> list[str]:
    """The command line of a child of this process that runs ``module`` and ends when this process does."""
    return [python, "-c", CHILD, str(os.getpid()), module]
