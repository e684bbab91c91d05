"""The door of a strict path: what is not what an adapter calls is refused by name, before an engine starts."""

from __future__ import annotations

import types
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from diffcheck.base.errors import EngineError
from diffcheck.capture import strict
from diffcheck.capture.plan import EngineOptions

OPTIONS = EngineOptions("vllm", Path("model"), profile="strict-v1")


def test_a_path_without_a_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = types.SimpleNamespace(prepare=print, live_operators=print, begin=print, evidence=print)
    entry = types.SimpleNamespace(load=lambda: path, value="another.plugin")
    monkeypatch.setattr(strict, "entry_points", lambda **_: [entry])
    assert strict.strict_path(OPTIONS) is path
    with pytest.raises(EngineError, match=r"another\.plugin has no weight_digests") as caught:
        strict.vllm_path(OPTIONS)
    assert "VllmStrictPath" in caught.value.remedy


@pytest.mark.parametrize(("engine", "kind"), [("vllm", strict.VllmStrictPath), ("megatron", strict.MegatronStrictPath)])
def test_ours_offer_all_that_is_called(engine: str, kind: type) -> None:
    path = EntryPoint(engine, f"integration.{engine}.plugin", strict.GROUP).load()
    needed = {name for base in kind.__mro__ for name in vars(base) if not name.startswith("_")}
    assert needed >= {"prepare", "begin", "evidence", "live_operators"} and all(hasattr(path, name) for name in needed)
