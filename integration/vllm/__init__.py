"""The strict path in vLLM on a CPU.

- `plugin`: the entry point that vLLM calls in each of its processes, and what the capture asks of it.
- `layers`, `attention`, `sampler`: vLLM's layers with the reference operators inside.
"""
