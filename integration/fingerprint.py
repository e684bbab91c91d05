"""Digests of weights where they lie: the same 128 bits from a GPU and from a CPU, without a copy to the host.

The bytes of a tensor are words w_i of 64 bits, zeros after the last one; its fingerprint is, for two keys,
sum_i w_i * r_i mod 2^64 with odd pseudo-random r_i (splitmix64: Steele, Lea & Flood, "Fast splittable pseudorandom
number generators"), a multilinear hash (Lemire & Kaser, "Strongly universal string hashing is fast"). Addition wraps,
so that no order of summation matters. One changed word is always seen, any other change but for 2^-126. It guards
against weights that were lost, torn or mixed up, not against an adversary: the public record is the SHA-256 of
`weight_digest`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tensor = Any
#: What a fingerprint begins with, so that none is taken for a SHA-256.
PREFIX = "m128:"
#: Words that share one table of multipliers.
_BLOCK = 1 << 20
_GOLDEN, _MIX1, _MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_tables: dict[str, list[Tensor]] = {}


def fingerprints(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> fingerprint of each tensor: of shape, dtype and bits. The devices are waited for once, at the end."""
    import torch

    if not weights:
        return {}
    found = torch.stack([_sums(tensor) for tensor in weights.values()]).cpu().tolist()
    mask = (1 << 64) - 1
    return {
        name: f"{PREFIX}{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}:"
        + "".join(f"{value & mask:016x}" for value in row)
        for (name, tensor), row in zip(weights.items(), found, strict=True)
    }


def _sums(tensor: Tensor) -> Tensor:
    """Both sums of one tensor: int64 [2]."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    size = flat.numel()
    words = -(-size // 8)
    rows = max(1, -(-words // _BLOCK))
    width = words if rows == 1 else _BLOCK
    if size != rows * width * 8 or flat.storage_offset() % 8:
        padded = flat.new_zeros(rows * max(1, width) * 8)
        padded[:size] = flat
        flat = padded
    data = flat.view(torch.int64).reshape(rows, -1)
    sums = []
    for key, table in enumerate(_multipliers(flat.device)):
        each = (data * table[: data.shape[1]]).sum(1)
        sums.append((each * (splitmix(torch.arange(rows, device=flat.device) + (key << 40)) | 1)).sum())
    return torch.stack(sums)


def _multipliers(device: Any) -> list[Tensor]:
    """One table of odd numbers a key, int64 [_BLOCK]."""
    import torch

    name = str(device)
    if name not in _tables:
        index = torch.arange(_BLOCK, device=device)
        _tables[name] = [splitmix(index + ((key + 2) << 40)) | 1 for key in range(2)]
    return _tables[name]


def splitmix(index: Tensor) -> Tensor:
    """splitmix64's output for each number, as int64."""
    x = (index + 1) * _GOLDEN
    x = (x ^ _right(x, 30)) * _MIX1
    x = (x ^ _right(x, 27)) * _MIX2
    return x ^ _right(x, 31)


def _right(x: Tensor, bits: int) -> Tensor:
    """Shift without sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
