"""A real vLLM whose answer is spoilt once, when a test asks for it: run as an actor's module."""

from __future__ import annotations

from typing import Any

from integration.grpo.workers.actors import main
from integration.grpo.workers.rollout import Rollout


class FaultyRollout(Rollout):
    """Behaves, until `spoil` is called."""

    _fault: str | None = None

    def spoil(self, fault: str) -> None:
        self._fault = fault

    def generate(self, **arguments: Any) -> dict[str, Any]:
        answer = super().generate(**arguments)
        fault, self._fault = self._fault, None
        record = answer["records"][5]
        if fault == "NaN":
            record["logprobs"][2] = float("nan")
        elif fault == "too few":
            record["logprobs"].pop()
        return answer


if __name__ == "__main__":
    main(FaultyRollout)
