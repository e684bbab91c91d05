"""Progress of long steps on the terminal, quiet where there is none."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from types import TracebackType

from rich import progress as bars
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

#: ``progress(what, done, total)``.
Progress = Callable[[str, int, int], None]


def silent(_what: str, _done: int, _total: int) -> None:
    """For whoever does not watch."""


_quiet = False


def set_quiet(quiet: bool) -> None:
    """Whether the commands of this process say nothing while they work, and of a verdict one line."""
    global _quiet
    _quiet = quiet


def is_quiet() -> bool:
    """As `set_quiet` was told."""
    return _quiet


class ProgressLine:
    """A context manager whose instances are `Progress` callbacks: ``line(what, done, total)``."""

    def __init__(self, console: Console) -> None:
        self._progress = bars.Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._console = console
        # A notebook is no terminal, and shows a bar all the same where it has the widgets for one.
        has_bars = console.is_jupyter and find_spec("ipywidgets") is not None
        self._is_live = (console.is_terminal or has_bars) and not _quiet
        self._task = self._progress.add_task("starting", total=None)
        self._last = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        if _quiet:
            return
        if not self._is_live and what != self._last:
            self._console.print(f"… {what}", highlight=False)
        self._last = what
        self._progress.update(self._task, description=what, completed=done, total=total or None)

    def __enter__(self) -> ProgressLine:
        if self._is_live:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_live:
            self._progress.stop()
