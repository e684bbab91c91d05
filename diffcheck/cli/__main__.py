"""``python -m diffcheck.cli`` is ``rlk-diff``."""

from diffcheck.cli.commands import main

main()
