"""Engines as Ray actors: rollout replicas that share the prompts of a step, and one trainer group.

The objects are those of the child processes, `Rollout` and `Trainer`, behind the same calls. One machine or many: all
of them see the run's folder and the model under the same paths, and have this project installed. Without RAY_ADDRESS a
cluster of this machine is started, which ends with the run.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import shutil
import socket
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from diffcheck.base.errors import EngineDiedError, EngineError, InputError, RlkError
from diffcheck.base.serving import describe_error
from diffcheck.base.workers import ENVIRONMENT, told_error
from diffcheck.trace.reader import Trace
from integration.grpo.config import GrpoConfig
from integration.grpo.workers.actors import Actor
from integration.grpo.workers.engines import Role

Handle = Any
#: Seconds that an actor gets to be placed on a machine, and to end by itself.
_PLACING, _ENDING = 300, 10


class Host:
    """Runs in a Ray worker: holds an engine's object, answers calls, and tells errors as data."""

    def __init__(self) -> None:
        self._served: Any = None

    def place(self) -> tuple[str, int, int]:
        """(address of this machine, a free port of it, process id)."""
        import ray.util

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1]), os.getpid()

    def open(self, made_by: str, options: dict[str, Any], environment: dict[str, str], log: str) -> dict[str, Any]:
        """Make the object: ``made_by`` is ``module:class``. What it prints goes to ``log`` from here on."""
        os.environ.update(environment)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.close(descriptor)
        module, _, name = made_by.partition(":")
        try:
            self._served = getattr(importlib.import_module(module), name)(options)
        except Exception as error:
            return {"error": describe_error(error), "is_usable": False}
        return {"result": "{}"}

    def handle(self, method: str, arguments: str) -> dict[str, Any]:
        """``{"result": ...}`` or ``{"error": ...}``; after an error that is none of ours the object is not usable.

        Arguments and result are JSON, as they are between processes: the object must not notice who carries them.
        """
        try:
            return {"result": json.dumps(getattr(self._served, method)(**json.loads(arguments)) or {})}
        except Exception as error:
            return {"error": describe_error(error), "is_usable": isinstance(error, RlkError)}

    def close(self) -> None:
        if self._served is not None:
            self._served.close()


class RayGroup:
    """The ranks of one engine, an actor each; every rank runs every call, and rank 0 answers.

    Args:
        name: for messages.
        made_by: ``module:class`` of the object.
        ranks: actors. resources: of each, as Ray's options.
        log: file for what the engine prints.

    Raises:
        InputError: the cluster is too small.
    """

    def __init__(
        self, name: str, made_by: str, ranks: int, resources: dict[str, float], options: dict[str, Any], log: Path
    ) -> None:
        import ray

        self.name, self.log = name, log
        self._is_busy = self._is_usable = True
        remote = ray.remote(Host)
        self._hosts: list[Handle] = []
        for rank in range(ranks):
            variables = {**ENVIRONMENT, "OMP_NUM_THREADS": _threads(), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
            variables |= {"LOCAL_RANK": str(rank), "RAY_kill_child_processes_on_worker_exit": "1"}
            # What the user has set wins, on every machine.
            variables |= {key: os.environ[key] for key in os.environ if key in ENVIRONMENT or key.startswith("RLK_")}
            settings = {"runtime_env": {"env_vars": variables}, "scheduling_strategy": "SPREAD", **resources}
            self._hosts.append(remote.options(**settings).remote())
        places = self._get([host.place.remote() for host in self._hosts], _PLACING)
        address, port, _ = places[0]
        alone = len({place[0] for place in places}) == 1
        where = {"MASTER_ADDR": "127.0.0.1" if alone else address, "MASTER_PORT": str(port)}
        if not alone:
            # The loopback interface reaches no other machine.
            where["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "")
        self._calls = [host.open.remote(made_by, options, where, str(log)) for host in self._hosts]

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [place[2] for place in self._get([host.place.remote() for host in self._hosts])]

    @property
    def is_idle(self) -> bool:
        if self._is_busy or not self._is_usable:
            return False
        try:
            return bool(self.pids)
        except EngineDiedError:
            return False

    def wait_ready(self) -> None:
        self.result()

    def start(self, method: str, **arguments: Any) -> None:
        self._is_busy = True
        text = json.dumps(arguments)
        self._calls = [host.handle.remote(method, text) for host in self._hosts]

    def result(self) -> dict[str, Any]:
        answers = self._get(self._calls)
        self._is_busy = False
        for answer in answers:
            if "error" in answer:
                self._is_usable &= answer["is_usable"]
                raise told_error(self.name, answer["error"], self.log)
        found: dict[str, Any] = json.loads(answers[0]["result"])
        return found

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self.start(method, **arguments)
        return self.result()

    def close(self, *, hurry: bool = False) -> None:
        import ray

        if not hurry and not self._is_busy:
            with suppress(ray.exceptions.RayError):
                ray.get([host.close.remote() for host in self._hosts], timeout=_ENDING)
        for host in self._hosts:
            with suppress(ray.exceptions.RayError):
                ray.kill(host)
        self._hosts = []
        self._is_usable = False

    def _get(self, calls: list[Handle], timeout: float | None = None) -> list[Any]:
        """All answers; the first death or error ends the wait, as its neighbours may wait for it for ever."""
        import ray

        left = list(calls)
        while left:
            ready, left = ray.wait(left, num_returns=1, timeout=timeout)
            if not ready:
                raise EngineError(
                    f"{self.name}: Ray found no place for its actors in {timeout:.0f} s",
                    "free the cluster's CPUs and GPUs, or add machines",
                )
            try:
                answer = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                self._is_usable = False
                cause = f"{self.name} ended unexpectedly: {str(error).strip().splitlines()[0]}"
                raise EngineDiedError(cause, f"read its log: {self.log}") from None
            if isinstance(answer, dict) and "error" in answer:
                return [answer]
        return list(ray.get(calls))


class Replicas:
    """Several rollout engines as one: weights go to all of them, and each draws for a part of the prompts.

    Args:
        groups: the replicas.
        strict: they follow a profile, so that captures must be equal in every bit.
    """

    def __init__(self, groups: list[RayGroup], strict: bool) -> None:
        self._groups, self._strict = groups, strict
        self._method = ""
        self._asked = list(groups)
        self._plan: dict[str, Any] = {}

    @property
    def pids(self) -> list[int]:
        return [pid for group in self._groups for pid in group.pids]

    @property
    def is_idle(self) -> bool:
        return all(group.is_idle for group in self._groups)

    def wait_ready(self) -> None:
        for group in self._groups:
            group.wait_ready()

    def start(self, method: str, **arguments: Any) -> None:
        self._method, self._asked = method, list(self._groups)
        if method == "generate":
            shares = share(arguments.pop("requests"), len(self._groups))
            asked = [(group, part) for group, part in zip(self._groups, shares, strict=True) if part]
            for group, part in asked:
                group.start(method, requests=part, **arguments)
            self._asked = [group for group, _ in asked]
        elif method == "capture":
            for group, plan in zip(self._groups, _plans(arguments["plan"], len(self._groups)), strict=True):
                group.start(method, plan=plan)
            self._plan = arguments["plan"]
        else:
            for group in self._groups:
                group.start(method, **arguments)

    def result(self) -> dict[str, Any]:
        answers = [group.result() for group in self._asked]
        if self._method == "generate":
            return {"records": [record for answer in answers for record in answer["records"]]}
        if self._method == "capture":
            self._compare_captures()
        if self._method == "evidence":
            return together(answers)
        return answers[0]

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self.start(method, **arguments)
        return self.result()

    def close(self, *, hurry: bool = False) -> None:
        for group in self._groups:
            group.close(hurry=hurry)

    def _compare_captures(self) -> None:
        """Hold the captures of all replicas to the first one's, and remove them.

        Raises:
            EngineError: two strict replicas differ.
        """
        plans = _plans(self._plan, len(self._groups))
        first, *others = (Trace(Path(plan["out"])).header.boundaries for plan in plans)
        for plan in plans[1:]:
            shutil.rmtree(plan["out"], ignore_errors=True)
        for number, other in enumerate(others, start=1):
            unequal = [name for name in first if name not in other or other[name].sha256 != first[name].sha256]
            if unequal and self._strict:
                raise EngineError(
                    f"rollout replica {number} differs from replica 0 at {unequal[0]}",
                    "run rlk-diff doctor on both machines: they do not compute the same",
                )


def share(requests: list[dict[str, Any]], replicas: int) -> list[list[dict[str, Any]]]:
    """The part of each replica, in order: whole prompts, as evenly as that goes. A part may be empty."""
    prompts = [list(group) for _, group in itertools.groupby(requests, key=lambda r: r["id"].rpartition("-g")[0])]
    bounds = [len(prompts) * i // replicas for i in range(replicas + 1)]
    return [list(itertools.chain(*prompts[a:b])) for a, b in itertools.pairwise(bounds)]


def together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Evidence of several replicas: counts added, the rest of the first, and how many there were."""
    operators: dict[str, dict[str, Any]] = {}
    scheduler: Counter[str] = Counter()
    most = max(answer["scheduler"].get("requests_at_once", 0) for answer in answers)
    for answer in answers:
        scheduler.update(answer["scheduler"])
        for name, entry in answer["operators"].items():
            total = operators.setdefault(name, {**entry, "calls": 0})
            if total["contract_id"] != entry["contract_id"]:
                raise EngineError(f"rollout replicas follow two contracts of {name}", "give all machines one release")
            total["calls"] += entry["calls"]
    return {
        **answers[0],
        "replicas": len(answers),
        "forwards": sum(answer["forwards"] for answer in answers),
        "scheduler": {**scheduler, "requests_at_once": most},
        "operators": operators,
        "fallbacks": sum(answer["fallbacks"] for answer in answers),
    }


def open_ray(
    role: Role,
    config: GrpoConfig,
    options: dict[str, Any],
    logs: Path,
    *,
    rollout: str = "integration.grpo.workers.rollout:Rollout",
    trainer: str = "integration.grpo.workers.trainer:Trainer",
) -> Actor:
    """The engine of ``role`` in Ray actors: ``config.replicas`` rollout engines, or a trainer of ``config.tp`` ranks.

    Args:
        rollout, trainer: ``module:class`` of the objects.

    Raises:
        InputError: Ray is not installed, or its cluster cannot be joined or is too small.
    """
    _join(config)
    on_gpu = config.engine == "gpu"
    if role == "trainer":
        resources = {"num_cpus": 1.0, **({"num_gpus": 1.0} if on_gpu else {})}
        return RayGroup("megatron", trainer, config.tp, resources, options, logs.absolute() / "trainer.log")
    resources = {"num_cpus": 1.0, **({"num_gpus": float(config.tp)} if on_gpu else {})}
    names = ["vllm"] if config.replicas == 1 else [f"vllm replica {i}" for i in range(config.replicas)]
    files = ["rollout.log"] if config.replicas == 1 else [f"rollout-{i}.log" for i in range(config.replicas)]
    groups = [
        RayGroup(name, rollout, 1, resources, options, logs.absolute() / file)
        for name, file in zip(names, files, strict=True)
    ]
    return groups[0] if len(groups) == 1 else Replicas(groups, strict=config.followed is not None)


def _join(config: GrpoConfig) -> None:
    """Join the cluster of RAY_ADDRESS, or start one on this machine; once a process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By default Ray's workers yield to everything else on a machine; here they are the work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray
    except ImportError:
        raise InputError("--ray needs ray, which is not installed", "pip install 'rlk[ray]'") from None
    needed = config.replicas + config.tp
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS")
        own = {"num_cpus": max(needed, os.cpu_count() or 1), "include_dashboard": False}
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **({} if address else own))
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InputError(f"Ray: {error}", "unset RAY_ADDRESS, or set it to a cluster that runs") from None
    found = ray.cluster_resources()
    if found.get("CPU", 0) < needed:
        raise InputError(
            f"Ray's cluster has {found.get('CPU', 0):.0f} CPUs, {needed} actors need one each",
            "add machines, or use fewer replicas or ranks",
        )
    gpus = config.tp * (config.replicas + 1)
    if config.engine == "gpu" and found.get("GPU", 0) < gpus:
        raise InputError(f"Ray's cluster has {found.get('GPU', 0):.0f} GPUs, {gpus} are needed", "add machines")


def _plans(plan: dict[str, Any], replicas: int) -> list[dict[str, Any]]:
    """The same capture for each replica, beside one another."""
    out = Path(plan["out"])
    return [plan] + [{**plan, "out": str(out.with_name(f"{out.name}-{i}"))} for i in range(1, replicas)]


def _threads() -> str:
    """Threads that a child process would use; Ray would give its workers one."""
    return os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
