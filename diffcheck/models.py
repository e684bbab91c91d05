"""Public name of the built-in models, for scripts: `make_random_model` writes a small Hugging Face folder."""

from diffcheck.base.models import BUILT_IN, built_in_samples, make_random_model, resolve_model

__all__ = ["BUILT_IN", "built_in_samples", "make_random_model", "resolve_model"]
