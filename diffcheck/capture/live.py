"""What the adapters of torch engines share: changes to a live model that are always undone, rows of a batch, and the
object record of what the modules really received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from diffcheck.base.bits import DTYPES, to_float32
from diffcheck.base.checkpoint import read_checkpoint
from diffcheck.base.errors import InputError
from diffcheck.base.record import ObjectRecord, model_fields
from diffcheck.base.samples import Sample
from diffcheck.capture.adapter import with_logprobs
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.recorder import Recorder
from diffcheck.capture.switches import Switch, defaults
from diffcheck.live_model.facts import CAUSAL
from diffcheck.live_model.rope import rope_fields
from diffcheck.rows import Index, IntArray, Rows, expected_rows
from reference.models.config import ModelConfig

#: Fields of the model that may be overridden without changing the shape of a weight.
OVERRIDABLE = ("rope_theta", "rms_norm_eps")


class Taps:
    """Hooks and wraps on a live model. Leaving the context removes every one of them, in reverse order."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def output(self, module: Any, function: Callable[[Any], Any]) -> None:
        """The callers of ``module`` get ``function(output)`` in place of ``output``."""
        handle = module.register_forward_hook(lambda _module, _args, output: function(output))
        self._stack.callback(handle.remove)

    def input(
        self, module: Any, function: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> None:
        """``module`` runs on ``function(args, kwargs)`` in place of what it was called with."""
        handle = module.register_forward_pre_hook(
            lambda _module, args, kwargs: function(args, kwargs), with_kwargs=True
        )
        self._stack.callback(handle.remove)

    def attribute(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``make(original)``."""
        own, original = name in vars(owner), getattr(owner, name)
        setattr(owner, name, make(original))
        self._stack.callback(lambda: setattr(owner, name, original) if own else delattr(owner, name))

    def item(self, mapping: Any, key: str, make: Callable[[Any], Any]) -> None:
        """Replace ``mapping[key]`` by ``make(original)`` in a mapping whose deletion uncovers the original."""
        mapping[key] = make(mapping[key])
        self._stack.callback(lambda: mapping.__delitem__(key))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def observe(recorder: Recorder, boundary: str, rows: Rows, tensor: Any, *, whole: bool = False) -> Any:
    """Show ``recorder`` a tensor whose first two axes are rows; return the tensor the engine must go on with.

    Args:
        rows: one entry an element of the first two axes, in row-major order.
        tensor: [a, b, ...].
    """
    changed = recorder.observe(boundary, rows, tensor.flatten(0, 1), whole=whole)
    return tensor if changed is None else changed.reshape(tensor.shape)


def batch_rows(samples: Sequence[int], lengths: Sequence[int], width: int, *, sequence_first: bool) -> Rows:
    """Rows of a right-padded batch [batch, width], or [width, batch] when ``sequence_first``; padding is sample -1."""
    position = np.broadcast_to(np.arange(width, dtype=np.int64), (len(samples), width))
    number = np.asarray(samples, np.int64)[:, None]
    sample = np.where(position < np.asarray(lengths, np.int64)[:, None], number, -1)
    if sequence_first:
        sample, position = sample.T, position.T
    return Rows(sample.ravel(), position.ravel())


class LiveInputs:
    """Integers that a live module received (token ids, positions), put back into (sample, position) order."""

    def __init__(self) -> None:
        self._rows: list[Rows] = []
        self._values: list[IntArray] = []

    def see(self, rows: Rows, values: Any) -> None:
        """Note ``values`` [rows], a tensor or array of integers (or of floats that hold integers)."""
        flat = values.detach().cpu().reshape(-1).numpy() if hasattr(values, "detach") else np.ravel(values)
        if flat.size != len(rows):
            raise ValueError(f"{flat.size} values for {len(rows)} rows")
        # A copy: engines write their next step into the same buffer.
        self._rows.append(Rows(rows.sample.copy(), rows.position.copy()))
        self._values.append(flat.astype(np.int64))

    def lists(self, samples: Sequence[Sample]) -> list[list[int]]:
        """One list a sample, over the positions fed forward; -1 where the module never saw one."""
        return self._at([Rows.of(i, range(s.forward_length)) for i, s in enumerate(samples)])

    def responses(self, samples: Sequence[Sample]) -> list[list[int]]:
        """As `lists`, over the positions that predict a response token."""
        return self._at([Rows.of(i, s.response_positions) for i, s in enumerate(samples)])

    def _at(self, wanted: Sequence[Rows]) -> list[list[int]]:
        index, values = Index(Rows.join(self._rows)), np.concatenate([*self._values, np.full(1, -1, np.int64)])
        found = [index.find(rows) for rows in wanted]
        # Row number -1, of a row that was never seen, is that of the -1 at the end.
        return [values[at].tolist() for at in found]


def torch_dtype(options: EngineOptions) -> Any:
    """The torch dtype that ``options.dtype`` names.

    Raises:
        InputError: a name that is no dtype of a boundary.
    """
    import torch

    if options.dtype not in DTYPES:
        raise InputError(f"{options.engine}: dtype {options.dtype!r} is unknown", f"choose one of {', '.join(DTYPES)}")
    return getattr(torch, options.dtype)


class Checkpoint(Mapping[str, Any]):
    """The weights of a model folder by HF name, read one at a time, in the engine's dtype and with bits flipped on
    purpose.

    Args:
        dtype: torch dtype.

    Raises:
        InputError: a flip names a weight or a bit that is not there.
    """

    def __init__(self, folder: Path, dtype: Any, flips: Sequence[tuple[str, int, int]] = ()) -> None:
        self._folder, self._dtype, self._flips = folder, dtype, flips
        self._file = {name: weight.file for name, weight in read_checkpoint(folder).weights.items()}
        for name, _, _ in flips:
            if name not in self._file:
                raise InputError(
                    f"weight flip: {folder} has no weight {name!r}", "give a name of its safetensors files"
                )

    def __getitem__(self, name: str) -> Any:
        if name not in self._file:
            raise InputError(f"{self._folder}: weight {name} is missing", "save the whole model with safetensors")
        with _open(self._file[name]) as handle:
            return flip_bits(name, handle.get_tensor(name).to(self._dtype), self._flips)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: {error}", "the file is damaged: copy the model again") from None


def effective_config(config: ModelConfig, options: EngineOptions) -> ModelConfig:
    """``config`` with the overrides of ``options``.

    Raises:
        InputError: an override that is no field of `OVERRIDABLE`.
    """
    for name in options.model_overrides:
        if name not in OVERRIDABLE:
            raise InputError(
                f"model override {name!r} would not be the same model",
                f"fields that can be overridden: {', '.join(OVERRIDABLE)}",
            )
    overrides: dict[str, Any] = {name: float(value) for name, value in options.model_overrides.items()}
    return replace(config, **overrides)


def check_extra(options: EngineOptions, known: Mapping[str, Switch]) -> dict[str, Any]:
    """The engine-specific switches: defaults of ``known``, overridden by ``options.extra``.

    Raises:
        InputError: a switch that the engine does not have.
    """
    return defaults(known, options.extra, options.engine)


def flip_bits(name: str, tensor: Any, flips: Sequence[tuple[str, int, int]]) -> Any:
    """``tensor`` (a weight in HF layout and in the engine's dtype) with the bits inverted that ``flips`` names for it.

    Raises:
        InputError: an index or bit outside the tensor.
    """
    import torch

    for target, index, bit in flips:
        if target != name:
            continue
        width = tensor.element_size() * 8
        if not (0 <= index < tensor.numel() and 0 <= bit < width):
            raise InputError(
                f"weight flip {name}[{index}] bit {bit} is outside the tensor",
                f"it has {tensor.numel()} elements of {width} bits",
            )
        tensor = tensor.detach().clone().contiguous()
        patterns = tensor.view(-1).view({16: torch.int16, 32: torch.int32}[width])
        # The top bit is the sign of the integer type, which has no positive value of its own.
        patterns[index] ^= (1 << bit) if bit < width - 1 else -(1 << bit)
    return tensor


def object_record(
    config: ModelConfig,
    plan: CapturePlan,
    samples: Sequence[Sample],
    *,
    weights: dict[str, str],
    tokens: LiveInputs,
    positions: LiveInputs,
    rope_tables: list[dict[str, Any]],
    layers: dict[str, dict[str, Any]],
    padded_vocab: int,
    tensor_parallel: int = 1,
    targets: LiveInputs | None = None,
    attention_mask: str = CAUSAL,
) -> ObjectRecord:
    """The object record of a finished capture; the caller adds the KV mapping and what it sampled with, if it did.

    Args:
        samples: responses included.
        weights: HF name -> digest of the live parameter.
        rope_tables: of the live rotary embeddings, see `diffcheck.live_model.rope`.
        layers: facts of the live modules, see `diffcheck.live_model.facts`.
        targets: tokens whose logprobs the engine really took, where it can be asked; else the samples' own.
        attention_mask: kind of the live mask.
    """
    model = model_fields(config)
    active = []
    for sample in samples:
        first = len(sample.prompt_token_ids) - 1
        active.append([int(p >= first) for p in range(sample.forward_length)])
    return ObjectRecord(
        model=model,
        weights=weights,
        weight_version=plan.weight_version,
        token_ids=tokens.lists(samples),
        target_ids=[list(s.response_token_ids) for s in samples] if targets is None else targets.responses(samples),
        positions=positions.lists(samples),
        active=active,
        attention_mask=attention_mask,
        rope=rope_fields(config, rope_tables),
        rope_tables=rope_tables,
        layers=layers,
        real_vocab=config.vocab_size,
        padded_vocab=padded_vocab,
        shards=shard_map(config, padded_vocab, tensor_parallel),
        temperature=plan.temperature,
    )


def shard_map(config: ModelConfig, padded_vocab: int, tensor_parallel: int) -> dict[str, list[list[int]]]:
    """HF projection -> [start, stop) of the features (of the padded vocabulary for the embedding) on each rank."""
    widths = {
        "embed_tokens": padded_vocab,
        "q_proj": config.q_size,
        "k_proj": config.kv_size,
        "v_proj": config.kv_size,
        "o_proj": config.q_size,
        "gate_proj": config.intermediate_size,
        "up_proj": config.intermediate_size,
        "down_proj": config.intermediate_size,
        "lm_head": padded_vocab,
    }
    n = tensor_parallel
    return {name: [[r * width // n, (r + 1) * width // n] for r in range(n)] for name, width in widths.items()}


def finished_samples(recorder: Recorder, samples: Sequence[Sample]) -> list[Sample]:
    """``samples`` (responses included) with the logprobs that ``recorder`` saw. Call it before the trace is written.

    Raises:
        EngineError: the engine gave no logprob for some response token.
    """
    rows = expected_rows(samples)["response"]
    bits, dtype = recorder.values("logprobs", rows)
    values = to_float32(bits, dtype)[:, 0]
    prompts = recorder.prompt_logprobs(samples)
    done = []
    for i, sample in enumerate(samples):
        mine = values[rows.sample == i]
        done.append(with_logprobs(sample, sample.response_token_ids, tuple(float(x) for x in mine), prompts[i]))
    return done
