"""Everything that decides the bits of a run, as one frozen value: from a TOML file and the command line."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from diffcheck.base.errors import InputError
from reference.contract.names import offered

PROFILE = "strict-v1/fma32-seq"
#: Engine -> profile that strict runs follow where none is named: on a GPU that of an H200's matrix unit.
PROFILES = {"cpu": PROFILE, "gpu": "strict-v1/hopper-k16"}
#: File of a run's folder.
CONFIG = "config.json"
#: Fields that may change between a run and its continuation: they decide no bit of a step before the change.
FREE = (
    *("steps", "checkpoint_stride", "keep_checkpoints", "max_restarts", "preflight_stride", "ray", "replicas"),
    "gpu_memory",
)


@dataclass(frozen=True)
class GrpoConfig:
    """A GRPO run. The defaults are the built-in tiny task."""

    #: Built-in model or Hugging Face folder.
    model: str = "tiny-qwen3"
    #: tiny, text or jsonl; see `integration.grpo.tasks`.
    task: str = "tiny"
    #: Keyword arguments of the task, table [task_options] of the file.
    task_options: dict[str, Any] = field(default_factory=dict)
    #: strict: both engines follow the profile; native: both compute as they please.
    mode: str = "strict"
    engine: str = "cpu"
    #: Arithmetic profile of mode strict; empty: that of `PROFILES`.
    profile: str = ""
    dtype: str = "bfloat16"
    seed: int = 0
    steps: int = 200

    prompts_per_step: int = 8
    #: Samples a prompt; advantages are relative to their mean.
    group_size: int = 8
    #: Response tokens, at most.
    max_tokens: int = 16
    temperature: float = 1.0
    #: 0 keeps all tokens.
    top_k: int = 0
    top_p: float = 1.0
    #: Requests that vLLM computes at once.
    max_sequences: int = 64
    #: Tokens of one forward of vLLM; fewer than the prompts have makes chunked prefill. 0: no chunks on a CPU, vLLM's
    #: own choice on a GPU.
    max_batched_tokens: int = 0
    #: Blocks of vLLM's KV cache; fewer than the requests in flight need makes preemption. 0: as memory allows.
    cache_blocks: int = 0
    #: On a GPU: run vLLM without compilation and CUDA graphs. On a CPU it has neither.
    eager: bool = False
    #: Share of a GPU's memory for vLLM; 0: what weights and requests need, so that the trainer fits beside it.
    gpu_memory: float = 0.0

    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    #: Gradients are scaled down to this global norm; 0 leaves them.
    max_grad_norm: float = 1.0
    #: Optimizer steps on one batch.
    epochs: int = 2
    #: Ratios are clipped to [1 - clip, 1 + clip_high]; clip_high = 0 is the same as clip.
    clip: float = 0.2
    clip_high: float = 0.0
    #: Advantages are divided by the group's standard deviation, over the group's size less ddof (0 or 1).
    scale_rewards: bool = True
    ddof: int = 0
    #: token: mean over all response tokens; sequence: mean over responses of their tokens' means; constant: sum over
    #: max_tokens for each response. See `integration.grpo.workers.objective`.
    loss_level: str = "token"
    #: Weight of the KL to the weights that the run began with; 0 computes none.
    kl_coef: float = 0.02
    #: Sequences that Megatron scores together.
    micro_batch: int = 16

    #: Tensor-parallel ranks, of the rollout engine and of the trainer.
    tp: int = 1
    #: CPU threads a trainer rank: gradients depend on it, in their last bits.
    threads: int = 2
    #: 0: a step's rollouts are made with the newest weights. 1: with those before, while the step before trains.
    staleness: int = 0
    #: How new weights reach vLLM. device: copied in place out of memory that both processes map, without a trip over
    #: the host; file: through a file of the run's folder; auto: device on a GPU, between processes of one machine.
    transport: str = "auto"
    #: Engines as Ray actors in place of child processes.
    ray: bool = False
    #: Rollout engines under Ray.
    replicas: int = 1

    #: Preflight before step 1 and after each so many weight syncs; 0 runs none.
    preflight_stride: int = 50
    checkpoint_stride: int = 10
    keep_checkpoints: int = 2
    #: Dead engines that are replaced before the run gives up.
    max_restarts: int = 5

    def __post_init__(self) -> None:
        for name, wanted in _TYPES.items():
            value = getattr(self, name)
            if isinstance(value, int) and wanted is float and not isinstance(value, bool):
                object.__setattr__(self, name, float(value))
            elif type(value) is not wanted:
                raise InputError(
                    f"{name} = {value!r} is of type {type(value).__name__}", f"give a value of type {wanted.__name__}"
                )
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                listed = ", ".join(map(str, allowed))
                raise InputError(f"{name} = {getattr(self, name)!r} is unknown", f"choose one of {listed}")
        for name, (low, high) in _RANGES.items():
            if not low <= getattr(self, name) <= high:
                raise InputError(f"{name} = {getattr(self, name)} is out of range", f"choose from {low} to {high}")
        if self.mode == "native" and (self.top_k or self.top_p < 1):
            raise InputError(
                "top_k and top_p need mode strict: Megatron's own cross-entropy knows neither", "leave them out"
            )
        if self.mode == "native" and self.profile:
            raise InputError(
                f"profile {self.profile!r} needs mode strict: native engines follow none", "leave it out, or set mode"
            )
        if self.engine == "cpu" and (self.eager or self.gpu_memory):
            name = "eager" if self.eager else "gpu_memory"
            raise InputError(f"{name} needs engine gpu: on a CPU it would change nothing", "leave it out")
        if self.transport == "device" and (self.tp > 1 or self.ray):
            other = f"tp {self.tp}" if self.tp > 1 else "ray"
            raise InputError(
                f"transport device with {other}: both engines must be one process each of one machine",
                "use transport file",
            )
        if self.kl_coef and (self.top_k or self.top_p < 1):
            raise InputError(
                "kl_coef with top_k or top_p: the KL is infinite where the two policies keep different tokens",
                "set kl_coef = 0, or keep all tokens",
            )

    @property
    def followed(self) -> str | None:
        """Arithmetic profile that both engines follow; None in mode native."""
        return (self.profile or PROFILES[self.engine]) if self.mode == "strict" else None

    @property
    def shares_memory(self) -> bool:
        """Whether weights go from engine to engine in memory that both map."""
        alone = self.tp == 1 and not self.ray
        return self.transport == "device" or (self.transport == "auto" and self.engine == "gpu" and alone)

    @property
    def device(self) -> str:
        """Device of both engines, as torch names it."""
        return "cuda" if self.engine == "gpu" else "cpu"

    def rollout_version(self, step: int) -> int:
        """Version of the weights that the rollouts of ``step`` (from 1) are made with; version n is step n's result."""
        return max(0, step - 1 - self.staleness)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_TYPES = {name: kind if isinstance(kind, type) else dict for name, kind in get_type_hints(GrpoConfig).items()}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "mode": ("strict", "native"),
    "engine": ("cpu", "gpu"),
    "dtype": ("bfloat16", "float32"),
    "staleness": (0, 1),
    "ddof": (0, 1),
    "loss_level": ("token", "sequence", "constant"),
    "transport": ("auto", "file", "device"),
}
_MANY = 10**9
_RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**31 - 1),
    "steps": (1, _MANY),
    "prompts_per_step": (1, 10**5),
    "group_size": (2, 10**4),
    "max_tokens": (1, 10**6),
    "temperature": (1e-3, 100.0),
    "top_k": (0, _MANY),
    "top_p": (1e-6, 1.0),
    "max_sequences": (1, 4096),
    "max_batched_tokens": (0, 10**6),
    "cache_blocks": (0, _MANY),
    "gpu_memory": (0.0, 0.95),
    "lr": (0.0, 10.0),
    "beta1": (0.0, 1.0),
    "beta2": (0.0, 1.0),
    "epsilon": (1e-30, 1.0),
    "weight_decay": (0.0, 10.0),
    "max_grad_norm": (0.0, 1e9),
    "epochs": (1, 1000),
    "clip": (0.0, 1e9),
    "clip_high": (0.0, 1e9),
    "kl_coef": (0.0, 1e9),
    "micro_batch": (1, 10**5),
    "tp": (1, 64),
    "threads": (1, 1024),
    "replicas": (1, 1024),
    "preflight_stride": (0, _MANY),
    "checkpoint_stride": (1, _MANY),
    "keep_checkpoints": (1, _MANY),
    "max_restarts": (0, _MANY),
}


def load_config(path: Path | None, overrides: Mapping[str, Any], before: GrpoConfig | None = None) -> GrpoConfig:
    """The configuration of a TOML file (None: that of ``before``, else the defaults), with ``overrides`` on top.

    Args:
        before: of the run that goes on.

    Raises:
        InputError: the file is missing or no TOML, a field is unknown, or a value is of the wrong type or out of range.
    """
    base = GrpoConfig() if path or before is None else before
    return changed(base, {**(_read(path) if path else {}), **overrides}, str(path or "command line"))


def stored_config(out: Path) -> GrpoConfig | None:
    """The configuration of the run in a folder; None where there is none.

    Raises:
        InputError: it is damaged, or of another release.
    """
    path = out / CONFIG
    try:
        if not path.exists():
            return None
        return changed(GrpoConfig(), json.loads(path.read_text()), str(path))
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: {error}", "restore it from a copy, or choose another --out") from None


def changed(config: GrpoConfig, values: Mapping[str, Any], where: str) -> GrpoConfig:
    """``config`` with ``values``, each field known.

    Raises:
        InputError: as `load_config`; ``where`` names the source.
    """
    known = [f.name for f in fields(GrpoConfig)]
    for name in values:
        if name not in known:
            raise InputError(f"{where}: unknown field {name!r}", offered(name, known))
    try:
        return replace(config, **values)
    except InputError as error:
        raise InputError(f"{where}: {error.cause}", error.remedy) from None


def check_continues(before: GrpoConfig, now: GrpoConfig) -> None:
    """Check that a run that began as ``before`` may go on as ``now``.

    Raises:
        InputError: a field that decides bits differs.
    """
    then, wanted = before.to_json(), now.to_json()
    for name, value in then.items():
        if name not in FREE and wanted[name] != value:
            raise InputError(
                f"the run in this folder has {name} = {value!r}, it cannot go on with {wanted[name]!r}",
                "leave the option out, or choose another --out",
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}", "give an existing TOML file with --config") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not valid TOML: {error}", "see docs/grpo.md for an example") from None
