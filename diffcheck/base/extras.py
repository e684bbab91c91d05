"""Which command brings what is not installed: the reference and all comparing need no extra."""

from __future__ import annotations

_ENGINES = "run `make setup` in a clone, which installs requirements/engines-cpu.txt"
#: Module -> what it is for, and the command that brings it.
EXTRAS = {
    "torch": ("the engines", _ENGINES),
    "vllm": ("engine vllm", _ENGINES),
    "megatron": ("engine megatron", _ENGINES),
    "transformers": ("engine transformers", _ENGINES),
    "tokenizers": ("text for smollm2-135m", _ENGINES),
    "gguf": ("model smollm2-135m", _ENGINES),
    "numba": ("the strict path", _ENGINES),
    "triton": ("compiled kernels", "pip install 'rlk[fastpath]'"),
    "jinja2": ("HTML pages", "pip install 'rlk[report]'"),
    "markupsafe": ("HTML pages", "pip install 'rlk[report]'"),
    "matplotlib": ("figures", "pip install 'rlk[report]'"),
    "tensorboard": ("TensorBoard events", "pip install 'rlk[report]'"),
    "ray": ("engines as Ray actors", "pip install 'rlk[ray]'"),
    "nbclient": ("notebooks", "pip install 'rlk[notebooks]'"),
}


def missing(error: ImportError) -> tuple[str, str]:
    """Cause and remedy of an import that failed."""
    module = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and module in EXTRAS:
        purpose, remedy = EXTRAS[module]
        return f"{module} is not installed; it is needed for {purpose}", remedy
    return f"{module or 'a module'} cannot be imported: {error}", "see rlk-diff doctor"
