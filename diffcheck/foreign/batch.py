"""Rows of a batch of padded sequences, as Hugging Face models receive them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffcheck.base.errors import InputError
from diffcheck.base.samples import Sample
from diffcheck.foreign.files import plain_tensor
from diffcheck.rows import Rows


def batch_rows(
    tokens: Any, mask: Any | None, samples: Sequence[Sample] | None, where: Path
) -> tuple[list[Sample], Rows, list[list[int]]]:
    """Which row of a [batch, length] forward is which token of which sequence.

    Args:
        tokens: [batch, length], integers. mask: the same shape, 0 where a token is padding; None: none is.
        samples: what was run; each row of the batch must be one of them, or the beginning of one. None: one a row.

    Returns:
        The samples, the rows in the order of the flattened batch, and the tokens of each sample as they were fed.

    Raises:
        InputError: of other shapes, or a sequence that is none of the samples.
    """
    ids = plain_tensor(tokens, f"{where}: input_ids")
    if ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise InputError(f"{where}: input_ids of shape {tuple(ids.shape)}", "expected [batch, length] integers")
    real = np.ones(tuple(ids.shape), np.bool_)
    if mask is not None:
        given = plain_tensor(mask, f"{where}: attention_mask")
        if given.shape != ids.shape:
            raise InputError(
                f"{where}: attention_mask of shape {tuple(given.shape)} for tokens of {tuple(ids.shape)}",
                "import a forward with a mask of padding, or none",
            )
        real = given.numpy().astype(np.bool_)
    fed = [tuple(int(t) for t in row[keep]) for row, keep in zip(ids.numpy(), real, strict=True)]
    found = list(samples) if samples is not None else [Sample(row) for row in fed if row]
    sample = np.full(real.shape, -1, np.int64)
    position = np.maximum(np.cumsum(real, axis=1) - 1, 0)
    free = list(range(len(found)))
    for b, row in enumerate(fed):
        match = next((i for i in free if row and found[i].token_ids[: len(row)] == row), None)
        if match is None:
            raise InputError(f"{where}: row {b} of the batch is none of the samples", "give the samples that were run")
        free.remove(match)
        sample[b][real[b]] = match
    if free:
        raise InputError(f"{where}: sample {free[0]} is no row of the batch", "give the samples that were run")
    order = {int(sample[b].max()): row for b, row in enumerate(fed)}
    rows = Rows(sample.reshape(-1), position.reshape(-1).astype(np.int64))
    fed_to = [list(order[i][: found[i].forward_length]) for i in range(len(found))]
    return found, rows, fed_to
