"""Which (sample, position) each row of a forward is, read from the scheduler's and the runner's own metadata."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from diffcheck.base.errors import EngineError
from diffcheck.rows import IntArray, Rows

Mask = npt.NDArray[np.bool_]
#: Key of a request's `SamplingParams.extra_args` that carries its sample number to the workers.
SAMPLE = "rlk_sample"


@dataclass(frozen=True)
class Step:
    """One forward over the scheduled tokens of several requests."""

    #: One entry a token.
    rows: Rows
    #: Flat cache slot of each token, by the block table: [tokens].
    slots: IntArray
    #: The last token of each request; sample -1 where the engine throws the draw away (more of the prompt is to come).
    head: Rows
    #: Tokens whose K and V a request found in the prefix cache when it came in, with ids and slots.
    cached: Rows
    cached_ids: IntArray
    cached_slots: IntArray

    def padded(self, rows: int) -> Rows:
        """Rows of a tensor that may have been padded at the end.

        Raises:
            EngineError: the tensor has fewer rows than tokens were scheduled.
        """
        extra = rows - len(self.rows)
        if extra < 0:
            raise EngineError(
                f"a tensor of {rows} rows in a step of {len(self.rows)} tokens", "report this engine configuration"
            )
        if extra == 0:
            return self.rows
        return Rows.join([self.rows, Rows.of(-1, range(extra))])


@dataclass
class Facts:
    """What the scheduler really did in one capture."""

    steps: int = 0
    #: Most requests computed in one step, and most that decoded (one new token each) in one step.
    max_requests_in_step: int = 0
    max_decoding_in_step: int = 0
    #: Steps in which some requests were prefilled while others decoded.
    mixed_steps: int = 0
    #: Forwards of a part of a prompt that left another part for later.
    prefill_chunks: int = 0
    preemptions: int = 0
    #: Tokens computed again after a preemption.
    recomputed_tokens: int = 0
    #: Tokens whose K and V came from the prefix cache.
    prefix_cached_tokens: int = 0
    #: Mode of CUDA graphs that vLLM chose for a forward -> forwards.
    graph_modes: dict[str, int] = field(default_factory=dict)

    def graph_mode(self, name: str) -> None:
        """Count one forward of this mode."""
        self.graph_modes[name] = self.graph_modes.get(name, 0) + 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Schedule:
    """Follows a live model runner through the steps of one capture."""

    runner: Any
    facts: Facts = field(default_factory=Facts)
    #: The `SchedulerOutput` of the step being run.
    output: Any = None
    #: Sample -> tokens of it computed so far.
    _computed: dict[int, int] = field(default_factory=dict)

    @property
    def block_size(self) -> int:
        """Tokens a block of the attention kernel's cache holds."""
        return int(self.runner.input_batch.block_table[0].block_size)

    def begin_step(self) -> Step:
        """Read the step that the runner is about to compute. To be called when its inputs are prepared.

        Raises:
            EngineError: the runner's batch is not the one the scheduler asked for, or holds a foreign request.
        """
        batch = self.runner.input_batch
        ids = batch.req_ids[: batch.num_reqs]
        starts = self.runner.query_start_loc.np[: len(ids) + 1].astype(np.int64)
        computed = batch.num_computed_tokens_cpu[: len(ids)].astype(np.int64)
        counts = np.diff(starts)
        asked = [self.output.num_scheduled_tokens[i] for i in ids]
        if counts.tolist() != asked:
            raise EngineError(f"the runner prepared {counts.tolist()} tokens, the scheduler asked for {asked}")
        sample = np.array([self._sample(i) for i in ids], np.int64)
        request = np.repeat(np.arange(len(ids)), counts)
        position = computed[request] + np.arange(starts[-1]) - starts[request]
        rows = Rows(sample[request], position)
        total = np.array([self.runner.requests[i].num_tokens for i in ids], np.int64)
        partial = computed + counts < total
        head = Rows(np.where(partial, -1, sample), computed + counts - 1)
        hits = [r for r in range(len(ids)) if computed[r] and int(sample[r]) not in self._computed]
        cached = [Rows.of(int(sample[r]), range(int(computed[r]))) for r in hits]
        step = Step(
            rows=rows,
            slots=self._slots(request, position),
            head=head,
            cached=Rows.join(cached) if cached else Rows.of(-1, range(0)),
            cached_ids=_joined([batch.token_ids_cpu[r, : computed[r]] for r in hits]),
            cached_slots=_joined([self._slots(np.full(int(computed[r]), r), np.arange(computed[r])) for r in hits]),
        )
        decoding = computed >= batch.num_prompt_tokens[: len(ids)]
        self._count(sample, computed, counts, partial, decoding & ~partial, step)
        return step

    def _sample(self, request_id: str) -> int:
        extra = self.runner.requests[request_id].sampling_params.extra_args or {}
        if SAMPLE not in extra:
            raise EngineError(
                f"request {request_id} is not of this capture", "run nothing else on the engine meanwhile"
            )
        return int(extra[SAMPLE])

    def _slots(self, request: IntArray, position: IntArray) -> IntArray:
        table = self.runner.input_batch.block_table[0]
        block = table.get_numpy_array()[request, position // table.block_size].astype(np.int64)
        slots: IntArray = block * table.block_size + position % table.block_size
        return slots

    def _count(
        self, sample: IntArray, computed: IntArray, counts: IntArray, partial: Mask, decoding: Mask, step: Step
    ) -> None:
        facts = self.facts
        facts.steps += 1
        facts.max_requests_in_step = max(facts.max_requests_in_step, len(sample))
        facts.max_decoding_in_step = max(facts.max_decoding_in_step, int(decoding.sum()))
        facts.mixed_steps += int(decoding.any() and not decoding.all())
        facts.prefill_chunks += int(partial.sum())
        facts.preemptions += len(getattr(self.output, "preempted_req_ids", None) or ())
        facts.prefix_cached_tokens += len(step.cached)
        for number, first, count in zip(sample.tolist(), computed.tolist(), counts.tolist(), strict=True):
            known = self._computed.get(number, 0)
            facts.recomputed_tokens += max(0, min(known, first + count) - first)
            self._computed[number] = max(known, first + count)


def _joined(parts: list[Any]) -> IntArray:
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)
