"""The command ``rlk-diff``."""

from diffcheck.cli.commands import app, guard, main

__all__ = ["app", "guard", "main"]
