"""``--patch file.py:function``: a function of the user's that changes the live model of one side before the run."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffcheck.base.errors import InputError
from diffcheck.live_model.changes import ModelState
from reference.contract.names import offered

_FORM = "write it as [rollout/|train/]FILE.py:FUNCTION"
_SIDES = ("rollout", "train")


@dataclass(frozen=True)
class Patch:
    """A function in a file, and the side that it changes."""

    side: str
    file: Path
    function: str

    def in_words(self) -> str:
        """The patch with the digest of its file: what was run, whatever the file holds later."""
        return f"patch {self.file}:{self.function} (sha256 {hashlib.sha256(self.file.read_bytes()).hexdigest()[:16]})"


def parse_patch(text: str, side: str = "train") -> Patch:
    """The patch that ``text`` names.

    Args:
        side: the one it changes where ``text`` names none.

    Raises:
        InputError: malformed, no such file, not Python, or no such function in it.
    """
    path, colon, function = text.rpartition(":")
    if not colon or not path or not function.isidentifier():
        raise InputError(f"--patch {text!r} is malformed", _FORM)
    first, slash, rest = path.partition("/")
    # A folder may be called train, too.
    if slash and first in _SIDES and not (Path(path).is_file() and not Path(rest).is_file()):
        side, path = first, rest
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise InputError(f"--patch {text!r}: {path}: no such file", _FORM)
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (SyntaxError, UnicodeDecodeError) as error:
        raise InputError(f"--patch: {file} is not Python: {error}", "mend the file") from None
    names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    if function not in names:
        raise InputError(f"--patch: {file} has no function {function!r}", offered(function, names))
    return Patch(side, file, function)


def apply_patches(patches: Sequence[tuple[str, str]], model: Any) -> None:
    """Call each (file, function) with the live ``model``, once, in order. Every worker of an engine does so.

    Raises:
        InputError: the function failed, returned something (a model is changed in place), or changed nothing: what is
            listed as changed must have been.
    """
    for number, (file, name) in enumerate(patches):
        spec = importlib.util.spec_from_file_location(f"rlk_patch_{number}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        before = ModelState(model)
        try:
            spec.loader.exec_module(module)
            returned = getattr(module, name)(model)
        except Exception as error:
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
            where = f"{file}:{lines[-1]}" if lines else file
            raise InputError(
                f"patch {name} failed at {where}: {type(error).__name__}: {error}",
                "the function gets the live model (docs/patches.md); mend it",
            ) from error
        if returned is not None:
            raise InputError(
                f"patch {file}:{name} returned {type(returned).__name__}",
                "change the model in place and return nothing: what is returned is not used",
            )
        if not _on_any_rank(before.is_changed(model)):
            raise InputError(
                f"patch {file}:{name} changed nothing of the live model",
                "look for a name that the model lacks, or a value that it had already; print(model) shows its modules",
            )


def _on_any_rank(changed: bool) -> bool:
    """Whether the patch took effect on some rank: one may be meant for a single shard."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return changed
    answers: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(answers, changed)
    return any(answers)
