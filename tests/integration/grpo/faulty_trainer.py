"""A real Megatron whose weight file of version 2 is torn once: run as an actor's module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from integration.grpo.workers.actors import main
from integration.grpo.workers.trainer import Trainer


class FaultyTrainer(Trainer):
    def export(self, version: int, path: str) -> dict[str, Any]:
        answer = super().export(version, path)
        if version == 2:
            data = Path(path).read_bytes()
            Path(path).write_bytes(data[: len(data) // 2])
        return answer


if __name__ == "__main__":
    main(FaultyTrainer)
