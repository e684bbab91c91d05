"""vLLM as the rollout engine runs it: prompts are prefilled and responses decoded by its own scheduler, several
requests at once; or whole sequences are scored through its prompt logprobs.

- `engine`: starts it; `adapter`: drives requests through it.
- `worker`: the part that lives in vLLM's workers; `taps`, `head_taps`: the hooks; `schedule`: whose row is which.
- `cache`: the paged KV cache; `loader`: weights as loaded; `evidence`: what really ran.
"""

from diffcheck.capture.vllm.adapter import Adapter

__all__ = ["Adapter"]
