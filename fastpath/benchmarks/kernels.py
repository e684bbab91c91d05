"""Contests of the row kernels and of attention, held by `fastpath.benchmarks`.

Row kernels meet a copy of as many bytes as they must move, PyTorch's own operator and, where the package `liger_kernel`
is installed, Liger's. Attention meets PyTorch's scaled
dot-product attention: decode with the keys already gathered out of their pages, an advantage for the peer.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastpath.attention.attention import Packed, Pages, attention
from fastpath.attention.kv_cache import write_cache
from fastpath.backend import current_target
from fastpath.benchmarks.contest import COPIES, ROTATION, Contest
from fastpath.rows.qk_norm import qk_norm
from fastpath.rows.qk_norm_rope import qk_norm_rope
from fastpath.rows.residual_add import residual_add
from fastpath.rows.rms_norm import rms_norm, rms_norm_backward
from fastpath.rows.rope import rope, rope_table
from fastpath.rows.swiglu import swiglu, swiglu_backward
from reference.contract.profiles import profile
from reference.gradients import gradient_contract

HIDDEN, FEATURES, HEADS, KV_HEADS, HEAD_DIM = 4096, 12288, 32, 8, 128
EPSILON = 1e-6
#: Sequences and keys of a decode step.
DECODES = ((1, 512), (1, 4096), (1, 32768), (4, 32768), (8, 4096), (16, 4096), (64, 512), (64, 4096))
PREFILLS = ((1, 4096), (4, 2048))

Makers = Iterator[tuple[str, Callable[[], Contest]]]


def contests() -> Makers:
    """Name and maker of every contest."""
    for tokens in (1, 64, 4096, 16384):
        for operator, (make, peers) in ROWS.items():
            for peer in ("copy", *peers):
                if peer == "liger" and importlib.util.find_spec("liger_kernel") is None:
                    continue
                name = f"Qwen3-8B/{operator}/M={tokens}/{peer}"
                yield name, partial(_row_contest, name, make, tokens, peer)
    for unit in current_target().units:
        if unit != "fma32-seq":
            yield from _attention_contests(unit)


def _attention_contests(unit: str) -> Makers:
    for sequences, length in PREFILLS:
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            name = f"Qwen3-8B/prefill/{unit}/{sequences}x{length}/{backend.name}"
            yield name, partial(_prefill_contest, name, unit, sequences, length, backend)
    for sequences, length in DECODES:
        name = f"Qwen3-8B/decode/{unit}/{sequences}x{length}"
        yield name, partial(_decode_contest, name, unit, sequences, length)


def _contract(operator: str, unit: str = "fma32-seq") -> Any:
    return profile(f"strict-v1/{unit}").contract(operator)


def _gradient(operator: str) -> Any:
    return gradient_contract(_contract(operator))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


#: Bytes per token, ours, and the peers' by name, of copies of operands.
Row = tuple[int, Callable[[int], Any], dict[str, Callable[[int], Any]]]
#: What a report calls a peer.
PEERS = {"copy": "copy of the same bytes", "torch": "PyTorch eager", "liger": "Liger"}


def _liger(module: str) -> Any:
    return importlib.import_module(f"liger_kernel.ops.{module}")


def _rms_norm(tokens: int, copies: int) -> Row:
    x, weight, contract = [_random(tokens, HIDDEN) for _ in range(copies)], _random(HIDDEN), _contract("rms_norm")
    ours = lambda i: rms_norm(x[i], weight, EPSILON, contract)  # noqa: E731
    peers = {
        "torch": lambda i: functional.rms_norm(x[i], (HIDDEN,), weight, EPSILON),
        "liger": lambda i: _liger("rms_norm").rms_norm_forward(x[i], weight, EPSILON, 0.0, "gemma", None),
    }
    return 4 * HIDDEN, ours, peers


def _rms_norm_residual(tokens: int, copies: int) -> Row:
    x, weight, contract = [_random(tokens, HIDDEN) for _ in range(copies)], _random(HIDDEN), _contract("rms_norm")
    residual = [_random(tokens, HIDDEN) for _ in range(copies)]

    def peer(i: int) -> Any:
        total = x[i] + residual[i]
        return functional.rms_norm(total, (HIDDEN,), weight, EPSILON), total

    def liger(i: int) -> Any:
        function = _liger("fused_add_rms_norm").fused_add_rms_norm_forward
        return function(x[i], residual[i], weight, EPSILON, 0.0, "gemma")

    ours = lambda i: rms_norm(x[i], weight, EPSILON, contract, residual[i])  # noqa: E731
    return 8 * HIDDEN, ours, {"torch": peer, "liger": liger}


def _rms_norm_backward(tokens: int, copies: int) -> Row:
    x, weight = [_random(tokens, HIDDEN) for _ in range(copies)], _random(HIDDEN)
    dy, contract = [_random(tokens, HIDDEN) for _ in range(copies)], _gradient("rms_norm")
    return 6 * HIDDEN, lambda i: rms_norm_backward(dy[i], x[i], weight, EPSILON, contract), {}


def _qk_norm(tokens: int, copies: int) -> Row:
    x, weight = [_random(tokens, HEADS, HEAD_DIM) for _ in range(copies)], _random(HEAD_DIM)
    contract = _contract("qk_norm")
    ours = lambda i: qk_norm(x[i], weight, EPSILON, contract)  # noqa: E731
    peer = lambda i: functional.rms_norm(x[i], (HEAD_DIM,), weight, EPSILON)  # noqa: E731
    return 4 * HEADS * HEAD_DIM, ours, {"torch": peer}


def _rope(tokens: int, copies: int) -> Row:
    x, contract = [_random(tokens, HEADS, HEAD_DIM) for _ in range(copies)], _contract("rope")
    table, positions = rope_table(4096, HEAD_DIM, 1e6, contract, "cuda"), torch.arange(tokens, device="cuda") % 4096
    cos, sin = (torch.cat([part, part], 1)[positions][:, None].bfloat16() for part in table)

    def peer(i: int) -> torch.Tensor:
        a, b = x[i].chunk(2, dim=-1)
        return x[i] * cos + torch.cat([-b, a], dim=-1) * sin

    return 4 * HEADS * HEAD_DIM, lambda i: rope(x[i], positions, table, contract), {"torch": peer}


def _rope_pair(tokens: int, copies: int) -> Row:
    """Queries and keys: what Liger rotates, in place, in one launch."""
    contract = _contract("rope")
    heads = [[_random(tokens, count, HEAD_DIM) for count in (HEADS, KV_HEADS)] for _ in range(copies)]
    table, positions = rope_table(4096, HEAD_DIM, 1e6, contract, "cuda"), torch.arange(tokens, device="cuda") % 4096
    cos, sin = (torch.cat([part, part], 1)[positions][None].bfloat16() for part in table)

    def liger(i: int) -> Any:
        q, k = (part[None].transpose(1, 2) for part in heads[i])
        return _liger("rope").rope_forward(q, k, cos, sin)

    ours = lambda i: [rope(part, positions, table, contract) for part in heads[i]]  # noqa: E731
    return 4 * (HEADS + KV_HEADS) * HEAD_DIM, ours, {"liger": liger}


def _qk_norm_rope(tokens: int, copies: int) -> Row:
    x, weight = [_random(tokens, HEADS, HEAD_DIM) for _ in range(copies)], _random(HEAD_DIM)
    norm, rotation = _contract("qk_norm"), _contract("rope")
    table, positions = rope_table(4096, HEAD_DIM, 1e6, rotation, "cuda"), torch.arange(tokens, device="cuda") % 4096
    ours = lambda i: qk_norm_rope(x[i], weight, positions, table, EPSILON, norm, rotation)  # noqa: E731
    return 4 * HEADS * HEAD_DIM, ours, {}


def _swiglu(tokens: int, copies: int) -> Row:
    x, contract = [_random(tokens, 2 * FEATURES).chunk(2, dim=1) for _ in range(copies)], _contract("swiglu")
    apart = [[half.contiguous() for half in halves] for halves in x]
    peers = {
        "torch": lambda i: functional.silu(x[i][0]) * x[i][1],
        "liger": lambda i: _liger("swiglu").swiglu_forward(*apart[i]),
    }
    return 6 * FEATURES, lambda i: swiglu(x[i][0], x[i][1], contract), peers


def _swiglu_backward(tokens: int, copies: int) -> Row:
    x, contract = [_random(tokens, 2 * FEATURES).chunk(2, dim=1) for _ in range(copies)], _gradient("swiglu")
    dy = [_random(tokens, FEATURES) for _ in range(copies)]
    return 10 * FEATURES, lambda i: swiglu_backward(dy[i], x[i][0], x[i][1], contract), {}


def _residual_add(tokens: int, copies: int) -> Row:
    x, y = ([_random(tokens, HIDDEN) for _ in range(copies)] for _ in range(2))
    contract = _contract("residual_add")
    return 6 * HIDDEN, lambda i: residual_add(x[i], y[i], contract), {"torch": lambda i: x[i] + y[i]}


def _kv_cache(tokens: int, copies: int) -> Row:
    keys, others = ([_random(tokens, KV_HEADS, HEAD_DIM) for _ in range(copies)] for _ in range(2))
    cache = [_random(tokens // 16 + 1, 16, KV_HEADS, HEAD_DIM) for _ in range(2)]
    slots, contract = torch.randperm(tokens, device="cuda"), _contract("kv_cache")
    ours = lambda i: write_cache(keys[i], others[i], slots, cache[0], cache[1], contract)  # noqa: E731
    return 8 * KV_HEADS * HEAD_DIM, ours, {}


#: Maker of an operator's contest, and its peers beside the copy.
ROWS: dict[str, tuple[Callable[[int, int], Row], tuple[str, ...]]] = {
    "rms_norm": (_rms_norm, ("torch", "liger")),
    "rms_norm+residual": (_rms_norm_residual, ("torch", "liger")),
    "rms_norm-backward": (_rms_norm_backward, ()),
    "qk_norm": (_qk_norm, ("torch",)),
    "rope": (_rope, ("torch",)),
    "rope of q and k": (_rope_pair, ("liger",)),
    "qk_norm+rope": (_qk_norm_rope, ()),
    "swiglu": (_swiglu, ("torch", "liger")),
    "swiglu-backward": (_swiglu_backward, ()),
    "residual_add": (_residual_add, ("torch",)),
    "kv_cache": (_kv_cache, ()),
}


def _row_contest(name: str, make: Callable[[int, int], Row], tokens: int, peer: str) -> Contest:
    copies = max(2, min(COPIES, ROTATION // (tokens * 6 * FEATURES)))
    per_token, ours, peers = make(tokens, copies)
    least = per_token * tokens
    source, sink = (
        [torch.empty(-(-least // 2), dtype=torch.uint8, device="cuda") for _ in range(copies)] for _ in "ab"
    )
    peers["copy"] = lambda i: sink[i].copy_(source[i])
    functions = {"peer": peers[peer], "ours": ours}
    return Contest(name, PEERS[peer], functions, copies, 0.0, float(least), {"tokens": tokens})


def _prefill_contest(name: str, unit: str, sequences: int, length: int, backend: SDPBackend) -> Contest:
    tokens, contract = sequences * length, _contract("attention", unit)
    q, k, v = (_random(tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    starts = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * length
    kv = Packed(k, v, starts)
    dense = (part.view(sequences, length, -1, HEAD_DIM).transpose(1, 2).contiguous() for part in (q, k, v))
    query, keys, others = dense

    def peer(_: int) -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(query, keys, others, is_causal=True, enable_gqa=True)

    ours = lambda _: attention(q, starts, length, kv, contract)  # noqa: E731
    operations = 2.0 * sequences * length * length * HEADS * HEAD_DIM
    least = 2.0 * tokens * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM
    facts = {"sequences": sequences, "keys": length}
    return Contest(name, f"SDPA {backend.name}", {"peer": peer, "ours": ours}, 1, operations, least, facts)


def _decode_contest(name: str, unit: str, sequences: int, length: int) -> Contest:
    contract, page, copies = _contract("attention", unit), 16, 2
    blocks = length // page
    caches = [[_random(sequences * blocks, page, KV_HEADS, HEAD_DIM) for _ in "kv"] for _ in range(copies)]
    table = torch.randperm(sequences * blocks, device="cuda").view(sequences, blocks).int()
    lengths = torch.full((sequences,), length, dtype=torch.int32, device="cuda")
    starts, q = torch.arange(sequences + 1, dtype=torch.int32, device="cuda"), _random(sequences, HEADS, HEAD_DIM)
    pages = [Pages(cache[0], cache[1], table, lengths) for cache in caches]
    dense = [
        [part.view(sequences, length, KV_HEADS, HEAD_DIM).transpose(1, 2).contiguous() for part in c] for c in caches
    ]
    query = q[:, :, None]

    def peer(i: int) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, dense[i][0], dense[i][1], enable_gqa=True)

    ours = lambda i: attention(q, starts, 1, pages[i], contract)  # noqa: E731
    operations, least = 4.0 * sequences * length * HEADS * HEAD_DIM, 4.0 * sequences * length * KV_HEADS * HEAD_DIM
    facts = {"sequences": sequences, "keys": length}
    return Contest(name, "SDPA, dense keys", {"peer": peer, "ours": ours}, copies, operations, least, facts)
