"""What can go wrong, and how it ends: one line of cause, one of remedy, an exit code."""

from __future__ import annotations

from enum import IntEnum

#: Lines that say only that something went wrong.
_UNTELLING = ("validation error for", "validation errors for", "root cause", "for further information visit")


class ExitCode(IntEnum):
    """Exit codes of ``rlk-diff``. Comparing zero boundaries or zero tokens is never EQUAL."""

    EQUAL = 0
    DIVERGED = 1
    USAGE = 2
    NOT_COMPARABLE = 3
    INCONCLUSIVE = 4


def telling_line(error: BaseException) -> str:
    """The line of an exception that says what went wrong, at most 300 characters.

    Validators put a count first ("1 validation error for ModelConfig") and the reason after it; engines that run
    elsewhere say "see root cause above" and keep the reason in the exception that they came from.
    """
    seen: BaseException | None = error
    best = ""
    while seen is not None:
        lines = [line.strip() for line in str(seen).splitlines() if line.strip()]
        telling = [line for line in lines if not any(word in line.lower() for word in _UNTELLING)]
        if telling:
            # A validator names the field on a line of its own.
            first = ": ".join(telling[:2]) if telling[0].isidentifier() else telling[0]
            best = _without_type(next((line for line in telling if line.startswith("Value error, ")), first))
            if not any("root cause" in line.lower() for line in lines):
                break
        seen = seen.__cause__ or seen.__context__
    return (best or type(error).__name__)[:300]


def _without_type(line: str) -> str:
    return line.removeprefix("Value error, ").partition(" [type=")[0]


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


_ENGINES = "run `make setup` in a clone, which installs requirements/engines-cpu.txt"
#: Module -> what it is for, and the command that brings it.
EXTRAS = {
    "torch": ("the engines", _ENGINES),
    "vllm": ("engine vllm", _ENGINES),
    "megatron": ("engine megatron", _ENGINES),
    "transformers": ("engine transformers", _ENGINES),
    "tokenizers": ("text for smollm2-135m", _ENGINES),
    "gguf": ("model smollm2-135m", _ENGINES),
    "numba": ("the strict path", _ENGINES),
    "triton": ("compiled kernels", "pip install 'rlk[fastpath]'"),
    "jinja2": ("HTML pages", "pip install 'rlk[report]'"),
    "markupsafe": ("HTML pages", "pip install 'rlk[report]'"),
    "matplotlib": ("figures", "pip install 'rlk[report]'"),
    "tensorboard": ("TensorBoard events", "pip install 'rlk[report]'"),
    "ray": ("engines as Ray actors", "pip install 'rlk[ray]'"),
    "pyarrow": ("TRL's parquet files", "pip install 'rlk[parquet]'"),
    "ipywidgets": ("progress bars in notebooks", "pip install 'rlk[notebooks]'"),
    "nbclient": ("notebooks", "pip install 'rlk[notebooks]'"),
}


def missing(error: ImportError) -> tuple[str, str]:
    """Cause and remedy of an import that failed."""
    module = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and module in EXTRAS:
        purpose, remedy = EXTRAS[module]
        return f"{module} is not installed; it is needed for {purpose}", remedy
    return f"{module or 'a module'} cannot be imported: {error}", "see rlk-diff doctor"
