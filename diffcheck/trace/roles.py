"""What the two sides of a comparison are called."""

from __future__ import annotations

ROLES = ("rollout", "train")


def side_names(left: str, right: str) -> tuple[str, str]:
    """Names of the sides by their engines; by role too where both run the same one."""
    if left != right:
        return left, right
    return f"{ROLES[0]} {left}", f"{ROLES[1]} {right}"
