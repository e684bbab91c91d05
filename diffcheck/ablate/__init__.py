"""Ablation: put one side's operators into the other side's live forward, and see which of them part the logprobs."""

from diffcheck.ablate.ablation import ablate
from diffcheck.ablate.result import Ablation
from diffcheck.ablate.sides import Side

__all__ = ["Ablation", "Side", "ablate"]
