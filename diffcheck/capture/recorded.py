"""What another system recorded, as a side of a comparison: a trace with the logprobs of its samples and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from diffcheck.base.errors import InputError
from diffcheck.base.record import ObjectRecord
from diffcheck.base.recorded import RECORDED, Resolution
from diffcheck.base.samples import Sample
from diffcheck.capture.adapter import CaptureResult
from diffcheck.trace.schema import Header
from diffcheck.trace.writer import TraceWriter, file_sha256

#: What a samples file says nothing of.
_UNKNOWN = [
    "model",
    "weights",
    "positions",
    "attention_mask",
    "rope",
    "kv",
    "real_vocab",
    "padded_vocab",
    "shards",
    "top_p",
    "top_k",
    "random_state",
]


def check_carried(samples: Sequence[Sample], where: Path) -> None:
    """Raises:
    InputError: a sample without response or without a record of it, or several temperatures.
    """
    for i, sample in enumerate(samples):
        if not sample.response_token_ids or not sample.rollout_logprobs:
            missing = "rollout_logprobs" if sample.response_token_ids else "response_token_ids"
            raise InputError(
                f"{where}: sample {i} has no {missing}, and --rollout {RECORDED} compares what was recorded",
                "give every sample its response and its rollout_logprobs, or roll out with an engine",
            )
    if len({s.temperature for s in samples}) > 1:
        raise InputError(f"{where}: samples of several temperatures", "compare samples of one temperature at a time")


def write_recorded(samples: Sequence[Sample], source: Path, out: Path, *, overwrite: bool = False) -> CaptureResult:
    """Write the trace of a record, atomically.

    Args:
        samples: each with a response and ``rollout_logprobs``.
        source: the file they came in.

    Raises:
        InputError: see `check_carried`.
        TraceError: ``out`` exists, or cannot be written.
    """
    check_carried(samples, source)
    done = [replace(s, recorded_logprobs=s.rollout_logprobs) for s in samples]
    values = np.array([x for s in samples for x in s.rollout_logprobs or ()], np.float64)
    active = [[int(p in s.response_positions) for p in range(s.forward_length)] for s in samples]
    versions = {s.weight_version for s in samples}
    temperature = samples[0].temperature
    record = ObjectRecord(
        weight_version=versions.pop() if len(versions) == 1 else None,
        token_ids=[list(s.token_ids[:-1]) for s in samples],
        target_ids=[list(s.response_token_ids) for s in samples],
        active=active,
        temperature=1.0 if temperature is None else temperature,
        unknown=[*_UNKNOWN, *(["temperature"] if temperature is None else [])],
    )
    writer = TraceWriter(out, "full", overwrite=overwrite)
    try:
        # The float32 nearest to what was written down: the very bits where they were written as such.
        bits = values.astype(np.float32).view(np.uint32)[:, None]
        writer.put("logprobs", bits, "float32")
        writer.finish(
            Header(
                engine=RECORDED,
                versions={},
                tensor_parallel=1,
                dtype="float32",
                phase=RECORDED,
                level="full",
                object=record,
                boundaries={},
                samples=[s.to_json() for s in done],
                evidence={
                    "file": str(source),
                    "sha256": file_sha256(source),
                    "values": int(values.size),
                    "written_as": Resolution.of(values).name,
                },
            )
        )
    except BaseException:
        writer.abort()
        raise
    return CaptureResult(done, out)
