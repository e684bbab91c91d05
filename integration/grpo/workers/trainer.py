"""The trainer's side: a real Megatron-core model that scores, learns, and hands out its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from diffcheck.base.errors import EngineError, InputError
from diffcheck.base.progress import silent
from diffcheck.base.record import weight_digest
from diffcheck.capture.megatron import Adapter
from diffcheck.capture.megatron.weights import parameters
from diffcheck.capture.plan import CapturePlan
from integration.fingerprint import fingerprints
from integration.grpo.config import GrpoConfig
from integration.grpo.workers.actors import engine_options, main
from integration.grpo.workers.counts import add_operators
from integration.grpo.workers.objective import objective, token_weights
from integration.grpo.workers.optimizer import MasterOptimizer
from integration.grpo.workers.scoring import Shaping, TokenSequence, batches, response_logprobs
from integration.grpo.workers.weights import joint_digest, write_weights
from integration.shared_weights import SharedWeights

Tensor = Any


class Trainer:
    """A live Megatron-core model on this rank; every rank gets the same calls.

    Version 0 of its weights is the model folder's, version n what the n-th update made. It keeps the versions that
    rollouts of its run still need.

    Args:
        options: ``config`` (a `GrpoConfig`), ``folder`` of the model, ``max_length`` of a sequence, ``hidden`` tokens,
            which rollouts never draw.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._config = config = GrpoConfig(**options["config"])
        self._strict = config.followed is not None
        self._adapter = Adapter(
            engine_options(
                "megatron",
                config,
                options,
                extra={"micro_batch": config.micro_batch, "threads": config.threads},
            ),
            silent,
        )
        top_p = config.top_p if config.top_p < 1 else None
        self._shaping = Shaping(config.temperature, config.top_k or None, top_p, tuple(options["hidden"]))
        self._live = dict(self._adapter.model.named_parameters())
        self._device = next(iter(self._live.values())).device
        shared = [p.megatron for p in parameters(self._adapter.config) if p.layout == "replicated"]
        #: Of whole heads, which ranks hold in part: their gradients are parts of one sum.
        self._per_head = [name for name in shared if "_layernorm" in name and "self_attention" in name]
        self._optimizer = MasterOptimizer(self._live, config, shared, self._gather_float)
        self._version = 0
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._forwards = 0
        self._operators: dict[str, dict[str, Any]] = {}
        self._facts: dict[str, Any] = {}
        self._shared: SharedWeights | None = None
        self._keep()

    def score(self, sequences: list[dict[str, Any]], version: int) -> dict[str, Any]:
        """Logprobs of the responses under ``version``, and under version 0 where the objective wants a KL.

        Returns:
            ``logprobs`` and ``reference`` (or None): a list of exact float32 values a sequence.

        Raises:
            EngineError: these weights are not kept any more, or the strict path is not in place.
        """
        samples = [TokenSequence.from_json(data) for data in sequences]
        scored = {"logprobs": self._score(samples, version), "reference": None}
        if self._config.kl_coef:
            scored["reference"] = self._score(samples, 0)
        return scored

    def update(
        self,
        sequences: list[dict[str, Any]],
        advantages: list[float],
        old: list[list[float]],
        reference: list[list[float]] | None,
    ) -> dict[str, Any]:
        """Learn from one batch: the next version.

        Args:
            advantages: one a sequence.
            old: logprobs of the policy that drew each token. reference: of version 0.

        Returns:
            ``loss`` and ``grad_norm`` of the last epoch, ``clip_fraction`` and ``kl`` (mean over tokens; None where
            the objective has none) over all, and ``version``.

        Raises:
            EngineError: the gradient is not finite, or nothing is to be learned from. That step was not made.
        """
        from integration.megatron import sums

        samples = [TokenSequence.from_json(data) for data in sequences]
        lengths = [sum(sample.learned) for sample in samples]
        if not any(lengths):
            raise EngineError("the loss mask leaves no token of any response", "mend the task's loss_mask; then resume")
        total, weighting = sum(lengths), token_weights(lengths, self._config.loss_level, self._config.max_tokens)
        clipped, kl, loss, norm = 0, 0.0, 0.0, 0.0
        for _ in range(self._config.epochs):
            self._optimizer.clear()
            if self._strict:
                # Sums that go on from micro-batch to micro-batch: their size changes no bit.
                sums.keep(self._live.values())
            loss = 0.0
            with self._counted():
                for batch in batches(len(samples), self._config.micro_batch):
                    part = self._objective([samples[i] for i in batch], batch, advantages, old, reference, weighting)
                    part.loss.backward()
                    self._optimizer.accumulate()
                    loss, clipped, kl = loss + float(part.loss.detach()), clipped + part.clipped, kl + part.kl
            if self._strict:
                self._take_sums()
            self._sum_heads()
            try:
                norm = self._optimizer.step()
            except ArithmeticError as error:
                raise EngineError(f"loss {loss}, {error}", "use a smaller lr, in another folder") from None
        self._version += 1
        self._keep()
        count = total * self._config.epochs
        return {
            "loss": loss,
            "grad_norm": norm,
            "clip_fraction": clipped / count,
            "kl": kl / count if self._config.kl_coef else None,
            "version": self._version,
        }

    def export(self, version: int, path: str) -> dict[str, Any]:
        """Write a kept version for the rollout engines.

        Returns:
            ``digests`` by HF name (SHA-256), ``digest`` of all, and ``fingerprint`` of all.
        """
        with self._as(version):
            weights = {name: weight.detach() for name, weight in self._adapter.hf_weights()}
            if self._adapter.rank == 0:
                write_weights(Path(path), weights)
            digests = {name: weight_digest(weight) for name, weight in weights.items()}
            fingerprint = joint_digest(fingerprints(weights))
        return {"digests": digests, "digest": joint_digest(digests), "fingerprint": fingerprint}

    def share(self, version: int, path: str) -> dict[str, Any]:
        """Put a kept version where a rollout engine of this machine copies it from: on the device, or on a CPU in the
        mapped file ``path``. It stays until the next call.

        Returns:
            ``place`` for `open_shared`, ``digests`` by HF name (fingerprints), and ``fingerprint`` of all.
        """
        with self._as(version):
            weights = {name: weight.detach() for name, weight in self._adapter.hf_weights()}
            if self._shared is None:
                self._shared = SharedWeights(weights, self._device, Path(path))
            self._shared.fill(weights)
        digests = fingerprints(self._shared.tensors)
        return {"place": self._shared.describe(), "digests": digests, "fingerprint": joint_digest(digests)}

    def sha256(self, version: int) -> dict[str, Any]:
        """``digest``: the joint SHA-256 of a kept version, as the record of a run without shared memory has it."""
        with self._as(version):
            digests = {name: weight_digest(weight) for name, weight in self._adapter.hf_weights()}
        return {"digest": joint_digest(digests)}

    def save(self, folder: str) -> None:
        """Write this rank's state into a folder."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors = {name: tensor.contiguous() for name, tensor in self._optimizer.state().items()}
        for version, weights in self._kept.items():
            # A trainer with a KL has version 0 from its start.
            if version != self._version and not (version == 0 and self._config.kl_coef):
                tensors |= {f"kept.{version}.{name}": weight.contiguous() for name, weight in weights.items()}
        path = Path(folder) / f"rank{self._adapter.rank}.safetensors"
        try:
            save_file(tensors, path, metadata={"version": str(self._version)})
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: {error}", "free some space, then resume") from None
        self._barrier()

    def load(self, folder: str, version: int) -> None:
        """Take this rank's state back, as ``version``.

        Raises:
            InputError: the file is damaged, or of another model.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = Path(folder) / f"rank{self._adapter.rank}.safetensors"
        try:
            tensors = load_file(path)
            self._optimizer.load(tensors)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise InputError(f"{path}: {error}", "remove this checkpoint, then resume from the one before") from None
        self._version = version
        self._kept = {v: weights for v, weights in self._kept.items() if v == 0}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "kept":
                number, _, parameter = rest.partition(".")
                self._kept.setdefault(int(number), {})[parameter] = tensor
        self._keep()

    def capture(self, plan: dict[str, Any], version: int) -> dict[str, Any]:
        """Run a capture plan with a kept version."""
        with self._as(version):
            return self._adapter.capture(CapturePlan.from_json(plan), silent).to_json()

    def evidence(self) -> dict[str, Any]:
        """What ran in all forwards of this trainer so far."""
        import torch
        import torch.distributed as dist

        return {
            "engine": f"Megatron-core {self._adapter.version}",
            "forwards": self._forwards,
            "operators": dict(sorted(self._operators.items())),
            "collectives": {"backend": str(dist.get_backend()), "ranks": dist.get_world_size()},
            "threads": torch.get_num_threads(),
            "fallbacks": 0,
            **{name: value for name, value in self._facts.items() if name != "operators"},
        }

    def close(self) -> None:
        self._adapter.close()

    def _score(self, samples: Sequence[TokenSequence], version: int) -> list[list[float]]:
        import torch

        found: list[list[float]] = []
        with self._as(version), torch.no_grad(), self._counted():
            for batch in batches(len(samples), self._config.micro_batch):
                rows = self._logprobs([samples[i] for i in batch])
                # One copy to the host, not one a sample.
                values = iter(torch.cat(rows).tolist())
                found += [list(islice(values, row.numel())) for row in rows]
        return found

    def _logprobs(self, samples: Sequence[TokenSequence]) -> list[Tensor]:
        self._forwards += 1
        return response_logprobs(self._adapter, samples, self._shaping, strict=self._strict)

    def _objective(
        self,
        samples: Sequence[TokenSequence],
        batch: range,
        advantages: list[float],
        old: list[list[float]],
        reference: list[list[float]] | None,
        weighting: tuple[list[float], float],
    ) -> Any:
        import torch

        def tokens(values: list[list[float]]) -> Tensor:
            return torch.tensor([x for i in batch for x in values[i]], dtype=torch.float32, device=self._device)

        def each(values: list[float]) -> Tensor:
            rows = [[values[i]] * len(sample.response) for i, sample in zip(batch, samples, strict=True)]
            return torch.tensor([x for row in rows for x in row], dtype=torch.float32, device=self._device)

        weights, count = weighting
        kept = torch.tensor([bool(x) for sample in samples for x in sample.learned], device=self._device)

        def learned(values: Tensor) -> Tensor:
            return values if all(sample.mask is None for sample in samples) else values[kept]

        return objective(
            learned(torch.cat(self._logprobs(samples))),
            learned(tokens(old)),
            learned(each(advantages)),
            weight=learned(each(weights)),
            count=count,
            clip=self._config.clip,
            clip_high=self._config.clip_high or self._config.clip,
            reference=None if reference is None else learned(tokens(reference)),
            kl_coef=self._config.kl_coef,
        )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Hold the strict operators' counts against the forwards inside."""
        if not self._strict:
            yield
            return
        from integration.megatron import plugin

        before = self._forwards
        _in_place(lambda: plugin.begin(self._adapter.model))
        yield
        facts = _in_place(lambda: plugin.evidence(self._adapter.model, self._forwards - before))
        _in_place(lambda: add_operators(self._operators, facts["operators"]))
        self._facts = facts

    @contextmanager
    def _as(self, version: int) -> Iterator[None]:
        """The model with the weights of a kept version."""
        if version == self._version:
            yield
            return
        if version not in self._kept:
            raise EngineError(
                f"weights of version {version} are gone, kept are {sorted(self._kept)}",
                "resume from a checkpoint",
            )
        self._put(self._kept[version])
        try:
            yield
        finally:
            self._put(self._kept[self._version])

    def _put(self, weights: dict[str, Tensor]) -> None:
        import torch

        with torch.no_grad():
            for name, live in self._live.items():
                live.copy_(weights[name])

    def _keep(self) -> None:
        """Note the live weights as the current version, and forget those that no rollout needs any more."""
        self._kept[self._version] = {name: live.detach().clone() for name, live in self._live.items()}
        needed = {0} if self._config.kl_coef else set()
        oldest = self._version - self._config.staleness
        self._kept = {v: weights for v, weights in self._kept.items() if v >= oldest or v in needed}

    def _take_sums(self) -> None:
        """Hand the kept sums to the optimizer as gradients."""
        from integration.megatron import sums

        self._optimizer.take({name: sums.gradient(parameter) for name, parameter in self._live.items()})
        sums.release(self._live.values())

    def _sum_heads(self) -> None:
        if self._config.tp == 1:
            return
        from megatron.core import parallel_state

        from integration.megatron.functions import sum_ranks

        group = parallel_state.get_tensor_model_parallel_group()
        for name in self._per_head:
            gradient = self._optimizer.gradient(name)
            gradient.copy_(sum_ranks(gradient, group))

    def _gather_float(self, value: float) -> list[float]:
        import torch
        import torch.distributed as dist

        if self._config.tp == 1:
            return [value]
        mine = torch.tensor([value], dtype=torch.float64, device=self._device)
        parts = [torch.empty_like(mine) for _ in range(self._config.tp)]
        dist.all_gather(parts, mine)
        return [float(part) for part in parts]

    def _barrier(self) -> None:
        self._gather_float(0.0)


def _in_place(check: Callable[[], Any]) -> Any:
    try:
        return check()
    except RuntimeError as error:
        raise EngineError(f"{error}", "see rlk-diff doctor; nothing was learned natively") from None


if __name__ == "__main__":
    main(Trainer)
