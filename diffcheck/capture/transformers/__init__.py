"""Hugging Face transformers as an engine: whole sequences scored, or responses decoded with its own KV cache."""

from diffcheck.capture.transformers.adapter import Adapter

__all__ = ["Adapter"]
