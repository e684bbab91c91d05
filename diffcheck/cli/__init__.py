"""The command ``rlk-diff``."""

from diffcheck.cli import gate, imports, probe, twice  # noqa: F401 - they add their commands
from diffcheck.cli.commands import app, guard, main

__all__ = ["app", "guard", "main"]
