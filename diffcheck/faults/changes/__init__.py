"""What can be changed inside a live engine on purpose, for the length of one capture.

A change is a context manager over `Live`; leaving it puts everything back, so that one engine serves many faults.

- `strict`: of either engine on a strict profile, through the operators that both compute with;
- `vllm`, `megatron`: of that engine, by hooks, attributes and options of its own;
- `weights`: of either, through the engine's own way to load weights.
"""

from diffcheck.faults.changes.live import Change, Live, find

__all__ = ["Change", "Live", "find"]
