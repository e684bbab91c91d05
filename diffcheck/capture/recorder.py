"""The one place where adapters hand over what they see: rows are attributed, shards gathered, interventions applied,
traces filled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from diffcheck.base.bits import BoolArray, UIntArray, bits_tensor, digest_of_rows, row_digests, tensor_bits, uint_type
from diffcheck.base.boundaries import Boundary
from diffcheck.base.errors import EngineError, InputError
from diffcheck.capture.interventions import Function, Intervention, Interventions
from diffcheck.capture.matching import check_matches, words
from diffcheck.capture.plan import CapturePlan
from diffcheck.rows import Index, IntArray, Rows, planned
from diffcheck.trace.schema import ALWAYS_STORED
from diffcheck.trace.writer import TraceWriter

#: Transport of one rank's slice to all ranks, in rank order. It moves bytes and never adds.
Gather = Callable[[Any], Sequence[Any]]


@dataclass
class _Pieces:
    """What has arrived of one boundary."""

    dtype: str
    width: int
    sample: list[IntArray] = field(default_factory=list)
    position: list[IntArray] = field(default_factory=list)
    digests: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    #: (row numbers within the arrived rows are implied by order) patterns of every arrived row, or of none at level
    #: digest.
    bits: list[UIntArray] = field(default_factory=list)


class Recorder:
    """Collects the boundaries of one capture on one rank.

    Adapters call `observe` from their hooks, in any order and any number of pieces; rows may come back in several steps
    (decode) and any batch composition. Rows outside the plan (the last token of a sequence, padding) are dropped here,
    not in the adapters.

    Args:
        boundaries: the dataflow graph of the model; a name outside it is a programming error.
        gather: transport between tensor-parallel ranks, or None for one rank. Must be called by all ranks alike.

    Raises:
        InputError: the plan names a boundary, row, element or layer that the model or its samples do not have.
    """

    def __init__(
        self, plan: CapturePlan, boundaries: Sequence[Boundary], *, rank: int = 0, gather: Gather | None = None
    ) -> None:
        self.plan = plan
        self.rank = rank
        self._gather = gather
        self.boundaries = tuple(boundaries)
        self._graph = {b.name: b for b in boundaries}
        self._pieces: dict[str, _Pieces] = {}
        #: What the operators gave before anything was aligned, where the plan asks for it.
        self._computed: dict[str, _Pieces] = {}
        check_matches(plan, self.boundaries)
        self._interventions = Interventions(plan.interventions)
        #: Of the plan's interventions, those that met a row of the plan, and those that changed a bit of one.
        self._met: set[int] = set()
        self._fired: set[int] = set()
        self.unobserved: dict[str, str] = {}
        #: Rows and float32 values of logprobs that an engine gave of prompt tokens too.
        self._prompts: list[tuple[Rows, npt.NDArray[np.float32]]] = []
        self._absent: dict[tuple[int, int], str] = {}

    def wants(self, boundary: str) -> bool:
        """Whether observing ``boundary`` is part of the plan: hooks ask before they do any work."""
        node = self._graph.get(boundary)
        if node is None:
            return False
        if self._interventions.at(boundary):
            return True
        if not self.plan.observe:
            return boundary == "logprobs"
        layers = self.plan.layers
        return node.layer is None or layers is None or layers[0] <= node.layer < layers[1]

    def observe(self, boundary: str, rows: Rows, values: Any, *, whole: bool = False) -> Any | None:
        """Record one piece of a boundary; return a replacement when an intervention changed it, else None.

        Args:
            boundary: name in the graph.
            rows: one entry a row of ``values``.
            values: torch tensor or float32 array, [rows, local width] (or [rows, heads, head_dim], flattened here). For
                boundaries of layout "column" under tensor parallelism it is this rank's slice; slices are joined in
                rank order.
            whole: the engine has gathered a "column" boundary itself already.

        Returns:
            A tensor like ``values`` (same shape, device and dtype) that the engine must go on with, or None.

        Raises:
            EngineError: the width is not the boundary's.
        """
        if not self.wants(boundary):
            return None
        node = self._graph[boundary]
        flat = values.reshape(values.shape[0], -1)
        local_width = int(flat.shape[1])
        sharded = node.layout == "column" and self._gather is not None and not whole
        bits, dtype = self._logical(node, flat, sharded)
        if bits.shape != (len(rows), node.width):
            raise EngineError(
                f"{boundary}: observed shape {bits.shape}, expected {(len(rows), node.width)}",
                "this engine version lays the tensor out in a way the adapter does not know",
            )
        if boundary == "logprobs" and dtype == "float32":
            self._prompts.append((rows, bits.view(np.float32)[:, 0].copy()))
        changed = self._intervene(node, rows, bits, dtype)
        self._keep(self._pieces, node, rows, bits if changed is None else changed, dtype)
        if changed is None:
            return None
        return bits_tensor(self._local(changed, flat, local_width if sharded else None), dtype, values)

    def cannot_observe(self, boundary: str, why: str) -> None:
        """Say that a boundary of the plan is out of reach in this engine (fused), and why."""
        if self.wants(boundary):
            self.unobserved[boundary] = why

    def discard(self, boundary: str) -> None:
        """Forget what has arrived of a boundary, because some of it does not fit."""
        self._pieces.pop(boundary, None)

    def will_not_see(self, rows: Rows, why: str) -> None:
        """Say that most operators never compute ``rows`` (an engine took them from a prefix cache), and why."""
        self._absent.update(dict.fromkeys(rows.places(), why))

    def write(self, writer: TraceWriter, expected: dict[str, Rows], *, computed: bool = False) -> None:
        """Put every complete boundary into ``writer`` in logical order. Incomplete ones become unobserved, with the
        first missing row.

        Args:
            expected: rows of the row sets "all" and "response", ordered by (sample, position).
            computed: what the operators gave before anything was aligned, instead of what the engine went on with.
        """
        source = self._computed if computed else self._pieces
        for name, node in self._graph.items():
            pieces = source.pop(name, None)
            if pieces is None:
                if self.wants(name):
                    self.unobserved.setdefault(name, "no hook fired")
                continue
            order, missing = _order(pieces, expected[node.rows])
            if missing is not None:
                why = self._absent.get(missing, "was not seen")
                self.unobserved[name] = f"row (sample {missing[0]}, position {missing[1]}) {why}"
                continue
            digests = np.concatenate(pieces.digests)[order]
            stored = None if name in ALWAYS_STORED else self._stored_rows(order.size)
            values = np.concatenate(pieces.bits)[order] if pieces.bits else None
            if values is not None and stored is not None:
                values = values[stored]
            writer.put_digests(name, digests, pieces.dtype, pieces.width, values, stored)

    def values(self, boundary: str, expected: Rows) -> tuple[UIntArray, str]:
        """Patterns of a boundary seen so far, in logical order (needs level full or sampled). Used for the logprobs.

        Raises:
            EngineError: some expected row was not seen.
        """
        pieces = self._pieces.get(boundary)
        if pieces is None:
            raise EngineError(f"{boundary}: nothing was observed")
        order, missing = _order(pieces, expected)
        if missing is not None:
            raise EngineError(f"{boundary}: row (sample {missing[0]}, position {missing[1]}) was not seen")
        return np.concatenate(pieces.bits)[order], pieces.dtype

    def changed(self) -> list[str]:
        """The interventions that changed a bit of some row, in words and in the plan's order.

        Raises:
            InputError: one that is meant as a change met nothing that it could have changed: the response ended before
                its position, or the engine has no such value. The run would say "equal" of a change that was not made.
        """
        for intervention in self.plan.interventions:
            if not intervention.aligns and id(intervention) not in self._met:
                why = self.unobserved.get(intervention.boundary, "no row of it came by")
                raise InputError(
                    f"{words(intervention)}: nothing was changed: {why}",
                    "choose a row that the samples have, of a boundary that this engine shows",
                )
        return [words(i) for i in self.plan.interventions if id(i) in self._fired]

    def prompt_logprobs(self, samples: Sequence[Any]) -> list[tuple[float, ...] | None]:
        """Per sample the logprobs of its prompt tokens but the first; None where the engine did not give every one."""
        seen = {
            (s, p): float(x)
            for rows, values in self._prompts
            for s, p, x in zip(rows.sample.tolist(), rows.position.tolist(), values.tolist(), strict=True)
            if s >= 0 and p < len(samples[s].prompt_token_ids) - 1
        }
        found: list[tuple[float, ...] | None] = []
        for i, sample in enumerate(samples):
            places = [(i, p) for p in range(len(sample.prompt_token_ids) - 1)]
            found.append(tuple(seen[place] for place in places) if all(place in seen for place in places) else None)
        return found

    def digests(self) -> dict[str, str]:
        """SHA-256 of what has arrived of each boundary, in order of arrival: ranks that agree have the same ones."""
        return {name: digest_of_rows(np.concatenate(pieces.digests)) for name, pieces in self._pieces.items()}

    def _logical(self, node: Boundary, flat: Any, sharded: bool) -> tuple[UIntArray, str]:
        """Patterns at the global width. An engine may pad the vocabulary: columns past the real width belong to
        nobody.
        """
        if not sharded or self._gather is None:
            bits, dtype = tensor_bits(flat)
            return bits[:, : node.width], dtype
        parts = [tensor_bits(part) for part in self._gather(flat)]
        return np.concatenate([bits for bits, _ in parts], axis=1)[:, : node.width], parts[0][1]

    def _local(self, changed: UIntArray, flat: Any, shard_width: int | None) -> UIntArray:
        """The part of changed global patterns that replaces this rank's tensor, its padding columns untouched."""
        start = 0 if shard_width is None else self.rank * shard_width
        local, _ = tensor_bits(flat)
        part = changed[:, start : start + local.shape[1]]
        local[:, : part.shape[1]] = part
        return local

    def _intervene(self, node: Boundary, rows: Rows, bits: UIntArray, dtype: str) -> UIntArray | None:
        changed: UIntArray | None = None
        kept = self.plan.computed is None
        for intervention in self._interventions.at(node.name):
            current = bits if changed is None else changed
            if intervention.aligns and not kept:
                self._keep(self._computed, node, rows, current, dtype)
                kept = True
            new = intervention.apply(node.name, rows.sample, rows.position, current, dtype)
            if isinstance(intervention, Function):
                # It saw these rows: whether to change them is its own affair.
                self._met.add(id(intervention))
            if new is not None:
                if new.shape != bits.shape or new.dtype != bits.dtype:
                    raise EngineError(f"{node.name}: an intervention returned {new.shape} of {new.dtype}")
                self._note(intervention, node, rows, current, new)
                changed = new
        if not kept:
            self._keep(self._computed, node, rows, bits if changed is None else changed, dtype)
        # Putting in what is there already is no change: an engine that fuses operators goes on with what it fused.
        return None if changed is None or np.array_equal(changed, bits) else changed

    def _note(self, intervention: Intervention, node: Boundary, rows: Rows, old: UIntArray, new: UIntArray) -> None:
        if id(intervention) in self._fired:
            return
        asked = self._planned(node, rows)
        if asked.any():
            self._met.add(id(intervention))
        if (old != new)[asked].any():
            self._fired.add(id(intervention))

    def _keep(self, store: dict[str, _Pieces], node: Boundary, rows: Rows, bits: UIntArray, dtype: str) -> None:
        keep = self._planned(node, rows)
        if not keep.any():
            return
        rows, bits = rows.take(keep), bits[keep] if not keep.all() else bits
        pieces = store.setdefault(node.name, _Pieces(dtype, node.width))
        if pieces.dtype != dtype:
            raise EngineError(f"{node.name}: observed as {pieces.dtype} and as {dtype} in one run")
        pieces.sample.append(rows.sample)
        pieces.position.append(rows.position)
        pieces.digests.append(row_digests(bits, dtype))
        if self.plan.level != "digest" or node.name in ALWAYS_STORED:
            pieces.bits.append(bits.astype(uint_type(dtype), copy=False))

    def _planned(self, node: Boundary, rows: Rows) -> BoolArray:
        # A plan whose responses are still to come does not know where they end; the trace takes what is expected then.
        return planned(rows, self.plan.samples, node.rows, finished=False)

    def _stored_rows(self, rows: int) -> IntArray | None:
        if self.plan.level != "sampled":
            return None
        return np.unique(np.linspace(0, rows - 1, min(rows, self.plan.sampled_rows)).astype(np.int64))


def _order(pieces: _Pieces, expected: Rows) -> tuple[IntArray, tuple[int, int] | None]:
    """Where each expected row is among the arrived ones (the last arrival wins: a recomputed row replaces the
    preempted one), and the first that has not arrived.
    """
    arrived = Rows(np.concatenate(pieces.sample), np.concatenate(pieces.position))
    order = Index(arrived).find(expected)
    if not (absent := order < 0).any():
        return order, None
    first = int(absent.argmax())
    return order, (int(expected.sample[first]), int(expected.position[first]))
