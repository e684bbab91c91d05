"""rlk-diff as its user calls it, without another interpreter's start: exit code and what it printed."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

from diffcheck.base.errors import ExitCode
from diffcheck.cli import app, guard

#: Columns of the terminal that commands believe in; None: they print into a pipe.
WIDTH: str | None = "200"


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def rlk(*arguments: str) -> Done:
    """Run one command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), patch.dict(os.environ):
        os.environ.pop("COLUMNS", None)
        if WIDTH:
            os.environ["COLUMNS"] = WIDTH
        code = guard(lambda: app(args=list(arguments), standalone_mode=False))
    return Done(code, out.getvalue(), err.getvalue())


def refused(done: Done, words: str, code: ExitCode = ExitCode.USAGE) -> None:
    """Check for one line of cause that has ``words``, one of remedy, and the code."""
    assert done.code == code, (done.code, done.out, done.err)
    assert words in done.err and "remedy:" in done.err, done.err
    assert "Traceback" not in done.err + done.out and "internal error" not in done.err
