"""GRPO with real engines: Megatron-core trains, vLLM rolls out, and every step counts what their logprobs disagree on."""
