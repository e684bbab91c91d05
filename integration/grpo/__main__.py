"""``python -m integration.grpo`` is ``rlk-grpo``."""

from integration.grpo.cli import main

main()
