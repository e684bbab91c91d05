"""Draws that are the same on every device: a token is a function of the logits, of its request's seed and of its place.

Gumbel's way to draw from a softmax, argmax(logit - log(-log(u))), with u from splitmix64 (Steele, Lea & Flood, 2014)
over (seed, position, token), and everything in integers: logarithms are a table with linear interpolation, scores are
counts of 2^-20 nats, ties go to the lower token id. So no device's library or contraction has a say, a draw does not
depend on what else is in flight, on chunks or on preemption, and no generator's state has to be kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from integration.fingerprint import splitmix

Tensor = Any
#: Key of a request's `SamplingParams.extra_args`: its seed, 63 bits. Requests without it draw as vLLM does.
SEED = "rlk_seed"
#: Fraction bits of a score, and of the index into the table of logarithms.
_UNIT, _INDEX = 20, 12
#: Bits of u.
_UNIFORM = 52
#: Below every score of a token that can be drawn.
_NEVER = -(1 << 42)
#: Scores are shifted by so many bits, which hold the token id.
_TOKEN = 20
#: ln(2) in units of 2^-32.
_LN2 = 2977044472
_tables: dict[str, Tensor] = {}


def draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One token a row.

    Args:
        logits: float32 [rows, vocabulary], at most 2^20 columns; -inf is never drawn.
        seeds, positions: int64 [rows]; positions of the tokens that are drawn.

    Returns:
        int64 [rows].
    """
    import torch

    columns = logits.shape[1]
    if columns > 1 << _TOKEN:
        raise ValueError(f"a vocabulary of {columns} exceeds {1 << _TOKEN}")
    token = torch.arange(columns, device=logits.device)
    stream = splitmix(splitmix(seeds) ^ positions)
    bits = splitmix(stream[:, None] ^ splitmix(token)[None, :])
    uniform = ((bits >> (64 - _UNIFORM)) & ((1 << _UNIFORM) - 1)) | 1
    # -log(u) of u = uniform / 2^52 is positive: uniform is odd, and below 2^52
    waiting = _times_ln2(_UNIFORM) - _log(uniform)
    noise = _times_ln2(_UNIT) - _log(waiting.clamp_(min=1))
    highest = logits.max(dim=1, keepdim=True).values
    below = (logits - highest).clamp(min=-(2.0**20)).double().mul_(float(1 << _UNIT)).round_().to(torch.int64)
    score = torch.where(logits == float("-inf"), _NEVER, below + noise)
    key = (score << _TOKEN) | ((1 << _TOKEN) - 1 - token)
    chosen: Tensor = (1 << _TOKEN) - 1 - (key.max(dim=1).values & ((1 << _TOKEN) - 1))
    return chosen


def install(worker: Any) -> None:
    """Runs in each worker with a strict sampler: let requests that bring a seed under `SEED` draw by it."""
    import torch

    runner = worker.model_runner
    sampler = runner.sampler.topk_topp_sampler

    def drawn(logits: Tensor) -> Tensor | None:
        batch = runner.input_batch
        names = batch.req_ids[: batch.num_reqs]
        if logits.shape[0] != len(names):
            return None
        seeds = [(runner.requests[name].sampling_params.extra_args or {}).get(SEED) for name in names]
        if None in seeds:
            return None
        counts = np.diff(runner.query_start_loc.np[: len(names) + 1].astype(np.int64))
        positions = batch.num_computed_tokens_cpu[: len(names)].astype(np.int64) + counts
        both = torch.tensor([seeds, positions.tolist()]).to(logits.device, non_blocking=True)
        return draw(logits, both[0], both[1])

    sampler.drawn = drawn


def _times_ln2(count: Any) -> Any:
    """``count`` ln(2) in units of 2^-20; an integer or a tensor of them, none negative."""
    return (count * _LN2) >> 12


def _log(x: Tensor) -> Tensor:
    """ln(x) of integers 1 <= x < 2^53, in units of 2^-20, within 2 of them."""
    import torch

    # The exponent and the fraction of a double that holds x exactly.
    bits = x.double().view(torch.int64)
    index = (bits >> (52 - _INDEX)) & ((1 << _INDEX) - 1)
    rest = (bits >> (52 - _INDEX - 20)) & ((1 << 20) - 1)
    table = _table(x.device)
    low = table[index]
    return _times_ln2((bits >> 52) - 1023) + low + (((table[index + 1] - low) * rest) >> 20)


def _table(device: Any) -> Tensor:
    """ln(1 + i / 4096) in units of 2^-20, int64 [4097]: rounded, and so the same from every machine's logarithm."""
    import torch

    name = str(device)
    if name not in _tables:
        values = np.rint(np.log1p(np.arange((1 << _INDEX) + 1) / (1 << _INDEX)) * (1 << _UNIT)).astype(np.int64)
        _tables[name] = torch.from_numpy(values).to(device)
    return _tables[name]
