"""How far the logprobs of rollout and trainer are apart: the measures, and the names other frameworks give them."""
