"""GRPO with real engines: Megatron-core trains, vLLM rolls out, and every step counts where their logprobs differ."""
