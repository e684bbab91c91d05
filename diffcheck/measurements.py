"""The measurement kit behind ``rlk-diff doctor --measure`` and ``--compare``: its faults as causes and remedies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffcheck.base.errors import ExitCode, InputError, RlkError

if TYPE_CHECKING:
    from fastpath.measure.compare import Difference

_NO_TRITON = "install torch and triton for this GPU: requirements/engines-cpu.txt has the CPU's"


def run_measurement(minutes: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure this machine's GPU; a line for each part that is done.

    Raises:
        InputError: no GPU, or no Triton.
    """
    try:
        from fastpath.backend import UnsupportedError
        from fastpath.measure import measure
    except ImportError as error:
        raise InputError(f"--measure: {error}", _NO_TRITON) from None
    try:
        return measure(minutes, say)
    except UnsupportedError as error:
        remedy = "run it where torch sees a CUDA or ROCm GPU; TRITON_INTERPRET=1 runs a small form on the CPU"
        raise InputError(f"--measure: {error}", remedy) from None


def compare_files(left: Path, right: Path) -> list[Difference]:
    """What two files of ``--measure`` both hold.

    Raises:
        InputError: a file is missing, or damaged.
        RlkError: it is no measurement, or they have nothing in common; not comparable.
    """
    from fastpath.measure.compare import compare

    reports = {"left": _read(left), "right": _read(right)}
    try:
        found = compare(reports["left"], reports["right"])
    except ValueError as error:
        side, _, said = str(error).partition(": ")
        path = {"left": left, "right": right}[side]
        raise RlkError(f"{path}: {said}", "give two files of `rlk-diff doctor --measure`", _CODE) from None
    except (KeyError, TypeError, AttributeError) as error:
        cause = f"{left} or {right}: damaged: {type(error).__name__} {error}"
        raise RlkError(cause, "measure again, or ask the owner for the whole file", _CODE) from None
    if not found:
        cause = f"{left}, {right}: they measured nothing in common"
        raise RlkError(cause, "measure both with the same release of rlk", _CODE)
    return found


_CODE = ExitCode.NOT_COMPARABLE


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "give a file of `rlk-diff doctor --measure`") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}", "the file is damaged: ask its owner for it again") from None
    if not isinstance(report, dict):
        raise InputError(f"{path}: not a JSON object", "give a file of `rlk-diff doctor --measure`")
    return report
