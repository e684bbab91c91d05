"""Measurements of the strict engines on a GPU, each one command, each against a named peer in the same run.

- `vllm_bits`: a strict vLLM under graphs against the NumPy reference, token by token.
- `vllm_speed`: tokens per second of decode and prefill, native, strict and batch-invariant.
"""
