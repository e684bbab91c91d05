"""What CUDA (or HIP) graphs of a vLLM worker ran: captures and replays by mode, and the kernels inside them.

A replay launches from the device what its capture recorded; nothing of Python runs. So the launches of a capture are
remembered, taken back (a capture executes nothing) and counted again at each replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from fastpath import launches

#: "captured" and "replayed" by mode of the graph, and "outside": forwards of a wrapped part without a graph.
counts: Counter[str] = Counter()
_captured: dict[int, launches.Counts] = {}


def counting(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's ``CUDAGraphWrapper.__call__``, followed."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.forward_context import get_forward_context, is_forward_context_available

        context = get_forward_context() if is_forward_context_available() else None
        if context is None or context.cudagraph_runtime_mode != self.runtime_mode:
            return original(self, *args, **kwargs)
        mode = self.runtime_mode.name
        entry = self.concrete_cudagraph_entries.get(context.batch_descriptor)
        if entry is not None and entry.cudagraph is not None:
            launches.add(_captured.get(id(entry.cudagraph), {}))
            counts[f"replayed.{mode}"] += 1
            return original(self, *args, **kwargs)
        before = launches.snapshot()
        output = original(self, *args, **kwargs)
        entry = self.concrete_cudagraph_entries[context.batch_descriptor]
        inside = launches.since(before)
        launches.add(inside, -1)
        _captured[id(entry.cudagraph)] = inside
        counts[f"captured.{mode}"] += 1
        return output

    return call


def clear() -> None:
    """Count replays from zero; what was captured stays."""
    for name in [name for name in counts if name.startswith("replayed")]:
        del counts[name]


def evidence() -> dict[str, int]:
    """Counts by name."""
    return dict(sorted(counts.items()))
