"""Megatron-core as the trainer runs it: whole sequences scored in one pass, on the ranks of one host."""

from diffcheck.capture.megatron.adapter import Adapter

__all__ = ["Adapter"]
