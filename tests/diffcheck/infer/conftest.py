"""The small model whose boundaries these tests explain."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffcheck.base.models import make_random_model

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 61,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_random_model(folder, **SHAPE)
    return folder
