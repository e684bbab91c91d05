"""Objects for Ray actors that are no engines: what an actor must carry, without waiting for one."""

from __future__ import annotations

import os
import signal
from typing import Any

from diffcheck.base.errors import EngineError


class Rank:
    """One rank, which says where it is and fails as told."""

    def __init__(self, options: dict[str, Any]) -> None:
        if options.get("broken"):
            raise EngineError("cannot start", "mend it")
        print("a line for the log", flush=True)
        self._count = 0

    def where(self) -> dict[str, Any]:
        names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "VLLM_LOGGING_LEVEL", "OMP_NUM_THREADS", "RLK_TEST_VARIABLE")
        return {name: os.environ.get(name) for name in names}

    def together(self) -> dict[str, Any]:
        """Sum of all ranks' numbers, through a process group."""
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        value = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(value)
        dist.destroy_process_group()
        return {"sum": float(value)}

    def count(self, by: int) -> dict[str, Any]:
        self._count += by
        return {"count": self._count, "rank": os.environ["RANK"]}

    def kinds(self, value: Any) -> dict[str, Any]:
        return {"kind": type(value).__name__, "value": value}

    def refuse(self, rank: int) -> None:
        if int(os.environ["RANK"]) == rank:
            raise EngineError("no", "ask for something else")

    def break_down(self) -> None:
        raise KeyError("what")

    def die(self, rank: int) -> None:
        if int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        return None


class Drawer:
    """A rollout replica whose draws are told by the request alone."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._versions: list[int] = []

    def sync(self, version: int) -> None:
        self._versions.append(version)

    def generate(self, requests: list[dict[str, Any]], version: int) -> dict[str, Any]:
        assert self._versions[-1] == version
        return {"records": [{"id": r["id"], "tokens": [r["seed"]], "pid": os.getpid()} for r in requests]}

    def evidence(self) -> dict[str, Any]:
        return {
            "engine": "drawer",
            "forwards": 2,
            "scheduler": {"tokens": 5, "requests_at_once": 3},
            "operators": {"linear": {"calls": 4, "contract_id": "c"}},
            "fallbacks": 0,
        }

    def close(self) -> None:
        return None
