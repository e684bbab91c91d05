"""What a live vLLM model's modules compute with, read from every layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from diffcheck.live_model.facts import Facts, mask_of, window_size
from diffcheck.live_model.rope import kept_positions, live_entry, patterns, table_entry
from reference.checks import Float32Array

Tensor = Any
Module = Any
#: Rows of a table in which a guess of its frequencies is tried.
_TRIED = 256


def attention_mask(model: Module) -> str:
    """Kind of the mask that the live attention of every layer applies, in words."""
    return mask_of([window_size(getattr(a.impl, "sliding_window", None)) for a in _attentions(model)])


def module_facts(model: Module, config: Any, ranks: int) -> dict[str, dict[str, Any]]:
    """Epsilons, scales, biases, head counts and cache scales of every layer."""
    facts = Facts()
    for n, layer in enumerate(model.model.layers):
        name, attention, mlp = f"layers.{n}", layer.self_attn, layer.mlp
        facts.norm(f"{name}.input_layernorm", layer.input_layernorm)
        facts.norm(f"{name}.post_attention_layernorm", layer.post_attention_layernorm)
        if config.qk_norm:
            facts.norm(f"{name}.self_attn.q_norm", attention.q_norm)
            facts.norm(f"{name}.self_attn.k_norm", attention.k_norm)
        for x in "qkv":
            facts.linear(f"{name}.self_attn.{x}_proj", attention.qkv_proj)
        facts.linear(f"{name}.self_attn.o_proj", attention.o_proj)
        if config.is_sparse(n):
            facts.add("experts_per_token", f"{name}.mlp", int(mlp.experts.router.top_k))
        else:
            for x in ("gate", "up"):
                facts.linear(f"{name}.mlp.{x}_proj", mlp.gate_up_proj)
            facts.linear(f"{name}.mlp.down_proj", mlp.down_proj)
        core, own = attention.attn, f"{name}.self_attn.attention"
        # A strict implementation keeps the scale that it passes on apart from vLLM's.
        facts.add("scale", own, float(getattr(core.impl, "_scale", None) or core.impl.scale))
        kv_heads = int(core.num_kv_heads) * ranks
        facts.add("heads", own, [int(core.num_heads) * ranks, min(kv_heads, config.num_key_value_heads)])
        cap = getattr(core.impl, "logits_soft_cap", None)
        facts.add("soft_cap", own, float(cap) if cap else None)
        facts.add("sinks", own, getattr(core.impl, "sinks", None) is not None)
        for x in "kv":
            scale = getattr(core, f"_{x}_scale_float", None)
            if scale is not None:
                facts.add("kv_scale", f"{name}.self_attn.{x}_cache", float(scale))
    facts.norm("norm", model.model.norm)
    head = model.logits_processor
    facts.add("scale", "logits", float(getattr(head, "scale", 1.0)))
    cap = getattr(head, "soft_cap", None)
    facts.add("soft_cap", "logits", float(cap) if cap else None)
    return facts.found


def rope_tables(model: Module, length: int, strict: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The tables of the live rotary embeddings, one entry a distinct module.

    Args:
        length: positions that were fed forward. strict: what a strict path says it rotated with.
    """
    modules: dict[int, tuple[Module, list[int]]] = {}
    for n, layer in enumerate(model.model.layers):
        modules.setdefault(id(layer.self_attn.rotary_emb), (layer.self_attn.rotary_emb, []))[1].append(n)
    found = []
    for rotary, layers in modules.values():
        if strict is not None:
            entry = live_entry(layers, strict)
            if entry["frequencies"] is None:
                frequencies, _ = _frequencies(rotary)
                entry["frequencies"] = None if frequencies is None else patterns(frequencies)
            found.append(entry)
            continue
        cache = rotary.cos_sin_cache
        kept = kept_positions(min(length, cache.shape[0]))
        cos, sin = cache[kept].float().cpu().chunk(2, dim=-1)
        frequencies, factor = _frequencies(rotary)
        found.append(
            table_entry(
                layers,
                frequencies=frequencies,
                attention_factor=factor,
                positions=kept,
                cos=cos.numpy(),
                sin=sin.numpy(),
                dtype=str(cache.dtype).removeprefix("torch."),
            )
        )
    return found


def _attentions(model: Module) -> list[Module]:
    return [layer.self_attn.attn for layer in model.model.layers]


def _frequencies(rotary: Module) -> tuple[Float32Array | None, float | None]:
    """Effective inverse frequencies and attention factor of the live table, which vLLM keeps as cosines and sines only:
    those of which the whole beginning of the table is made; (None, None) where no guess makes it.
    """
    import torch

    cache = rotary.cos_sin_cache
    rows = cache[:_TRIED].cpu()
    factor = float(getattr(rotary, "mscale", 1.0))
    scaling = getattr(rotary, "scaling_factors", None)
    made = rotary._compute_inv_freq(rotary.scaling_factor if hasattr(rotary, "mscale") else rotary.base).cpu().float()
    at = torch.arange(rows.shape[0], dtype=torch.float32)
    if scaling:
        at = at / float(scaling[0])

    def gives(frequencies: Tensor, scale: float) -> bool:
        angles = torch.outer(at, frequencies)
        table = torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1).to(rows.dtype)
        # einsum, which vLLM multiplies by, may round like outer or not at all differently; cosines may differ in a bit.
        near = (table.float() - rows.float()).abs() <= 2 ** (-7 if rows.dtype != torch.float32 else -22)
        return bool(near.all()) and float((table == rows).float().mean()) > 0.99

    guesses = [made, made.bfloat16().float(), made.half().float()]
    dim = 2 * made.numel()
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    guesses += [1.0 / theta**exponents for theta in _thetas(rows.float().numpy())]
    for scale in dict.fromkeys((factor, 1.0)):
        for frequencies in guesses:
            if gives(frequencies, scale):
                effective = frequencies / float(scaling[0]) if scaling else frequencies
                return np.asarray(effective.numpy(), np.float32), scale
    return None, None


def _thetas(rows: Float32Array) -> list[float]:
    """Candidates for the theta of a table [positions, cosines and sines]: to be confirmed on the whole of it."""
    half = rows.shape[1] // 2
    found: dict[float, None] = {}
    for pair in range(1, half):
        cos, sin = rows[:, pair].astype(np.float64), rows[:, half + pair].astype(np.float64)
        frequency = float(np.arctan2(sin[1], cos[1]))
        position = 2
        while position < len(rows):
            # The estimate so far says how often the angle has gone round.
            turns = np.round((frequency * position - np.arctan2(sin[position], cos[position])) / (2 * np.pi))
            frequency = float((np.arctan2(sin[position], cos[position]) + 2 * np.pi * turns) / position)
            position *= 2
        if 1e-4 < frequency < 1:
            theta = frequency ** (-half / pair)
            for digits in (1, 2, 3):
                if 1 < (rounded := float(f"{theta:.{digits}g}")) < 1e12:
                    found[rounded] = None
    return list(found)
