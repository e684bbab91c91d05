"""What can go wrong, and how it ends: one line of cause, one of remedy, an exit code."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of ``rlk-diff``. Comparing zero boundaries or zero tokens is never EQUAL."""

    EQUAL = 0
    DIVERGED = 1
    USAGE = 2
    NOT_COMPARABLE = 3
    INCONCLUSIVE = 4


class RlkError(Exception):
    """A fault the user can act on. ``cause`` names the file, field or value; ``remedy`` says what to do."""

    def __init__(self, cause: str, remedy: str = "", exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy
        self.exit_code = exit_code


class InputError(RlkError):
    """An argument, model folder or samples file is unusable."""


class TraceError(RlkError):
    """A trace folder is truncated, damaged, foreign, or of another schema."""


class EngineError(RlkError):
    """An engine could not start, ran out of memory, or failed in the middle."""


class EngineDiedError(EngineError):
    """The process of an engine is gone: it was killed, or it ended itself. A new one may do what this one did not."""
