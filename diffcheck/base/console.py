"""What reaches a terminal: text that came from outside is neither markup nor control text, and a reader who leaves
early changes no exit code.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

#: C0 and C1 controls (a line feed is rich's own), marks that reverse or hide text, halves of surrogates.
_RAW = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)

#: Columns of a line that nothing breaks.
_UNBROKEN = 10_000


def listing(*headings: str, names: int = 1, title: str | None = None) -> Table:
    """An empty table whose first ``names`` columns hold names, which are never broken."""
    table = Table(title=title, title_justify="left", box=None)
    for number, heading in enumerate(headings):
        table.add_column(heading, no_wrap=number < names)
    return table


def _shown(match: re.Match[str]) -> str:
    """A sign for a character that must not reach a terminal: Unicode's picture of it, where there is one."""
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def plain(text: str) -> str:
    """``text`` with a visible sign in place of every character that a terminal would obey."""
    return _RAW.sub(_shown, text)


class Terminal(Console):
    """A console on which square brackets are square brackets: styles are given as `rich.text.Text`, never as markup."""

    def __init__(self, *, stderr: bool = False, **more: Any) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, **more)

    def print_list(self, table: Table) -> None:
        """Print a table of names: no line is broken in a pipe, and no word on a terminal, where a table that is too
        wide becomes one paragraph a row.
        """
        before = self.width
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _UNBROKEN
        needed = Measurement.get(self, self.options.update(width=_UNBROKEN), table).minimum
        if needed <= self.width:
            self.print(table)
        else:
            self._print_paragraphs(table)
        self.width = before

    def _print_paragraphs(self, table: Table) -> None:
        for row in zip(*(column.cells for column in table.columns), strict=True):
            for number, (column, cell) in enumerate(zip(table.columns, row, strict=True)):
                text = cell if isinstance(cell, Text) else Text(str(cell))
                if text.plain:
                    label = f"  {column.header}: " if number and column.header else "  " * bool(number)
                    self.print(Text.assemble(label, text), soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich's; everything that is printed comes by here."""
        for segment in super().render(renderable, options):
            if segment.control is None and _RAW.search(segment.text):
                yield Segment(plain(segment.text), segment.style)
            else:
                yield segment


class _Unbroken:
    """A text stream that goes quiet when its reader is gone, and that can write every character."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            return self._leave(len(text))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._leave(0)

    def _leave(self, count: int) -> int:
        """Send the rest to nowhere: also what the interpreter flushes at its end."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        return count


@contextmanager
def unbroken_output() -> Iterator[None]:
    """Within, ``rlk-diff ... | head -1`` has the exit code of its verdict, and a terminal of another encoding gets
    question marks for what it cannot show.
    """
    before = sys.stdout, sys.stderr
    for stream in before:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    sys.stdout, sys.stderr = _Unbroken(before[0]), _Unbroken(before[1])
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
