"""Ablation: put one side's operators into the other side's live forward, and see which of them part the logprobs."""
