"""Checks of compiled kernels without a GPU: `examine(target)`, and `python -m fastpath.compiled` that prints it."""

from fastpath.machine_code.check import Finding, Report, examine

__all__ = ["Finding", "Report", "examine"]
