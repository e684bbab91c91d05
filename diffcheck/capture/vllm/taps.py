"""Hooks on the modules of a live vLLM model: every boundary from the embedding to the logits.

The module tree is the same for Qwen3, Qwen2 and Llama. Fused places are taken apart: one projection gives q, k
and v (gate and up), and the fused add + norm returns the new residual next to the normalised value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from diffcheck.base.errors import EngineError
from diffcheck.capture.live import LiveInputs, Taps
from diffcheck.capture.plan import CapturePlan
from diffcheck.capture.recorder import Recorder
from diffcheck.capture.vllm.cache import CacheLayout, Store, learn_layout
from diffcheck.capture.vllm.experts import tap_experts
from diffcheck.capture.vllm.schedule import Schedule, Step
from diffcheck.rows import Rows
from reference.models.config import ModelConfig

Tensor = Any
Module = Any


@dataclass
class Live:
    """State of one capture in one worker: what the hooks share."""

    plan: CapturePlan
    config: ModelConfig
    recorder: Recorder
    schedule: Schedule
    ranks: int = 1
    step: Step | None = None
    #: Layer whose attention runs now: the rotary embedding is one module for all of them.
    layer: int = 0
    #: Output of the last forward, [tokens, hidden].
    hidden: Tensor = None
    #: Rows of the logits computed last.
    head: Rows | None = None
    tokens: LiveInputs = field(default_factory=LiveInputs)
    positions: LiveInputs = field(default_factory=LiveInputs)
    #: Tokens whose logprobs the sampler gathered.
    targets: LiveInputs = field(default_factory=LiveInputs)
    slots: LiveInputs = field(default_factory=LiveInputs)
    layout: CacheLayout | None = None
    #: The first fault in a hook. The engine goes on untouched, so that it can be used again; the capture fails at its
    #: end.
    failure: Exception | None = None

    def safely(self, function: Callable[[Any], Any], value: Any) -> Any:
        """``function(value)``, or ``value`` itself once something has gone wrong."""
        if self.failure is not None:
            return value
        try:
            return function(value)
        except Exception as error:
            self.failure = error
            return value

    def replaced(
        self, boundary: str, tensor: Tensor, rows: Rows | None = None, *, whole: bool = False
    ) -> Tensor | None:
        """Show the recorder ``tensor``; the tensor to go on with if an intervention changed it, else None."""
        if not self.recorder.wants(boundary):
            return None
        if rows is None:
            assert self.step is not None
            rows = self.step.padded(tensor.shape[0])
        return self.recorder.observe(boundary, rows, tensor, whole=whole)

    def seen(self, boundary: str, tensor: Tensor, rows: Rows | None = None, *, whole: bool = False) -> Tensor:
        """As `replaced`, but always the tensor to go on with."""
        changed = self.replaced(boundary, tensor, rows, whole=whole)
        return tensor if changed is None else changed

    @property
    def whole_kv(self) -> bool:
        """Whether every rank holds all of K and V: fewer heads than ranks."""
        return self.config.num_key_value_heads < self.ranks


def tap_forward(taps: Taps, live: Live, runner: Any, *, eager: bool) -> None:
    """Follow the steps: needed even when nothing but logprobs is observed. Replayed graphs run no hook of the model's,
    so that it is done where the runner calls the model.

    Args:
        eager: run the model module by module, whatever was compiled and captured: the hooks inside are to run.
    """

    def begin(call: Any) -> Any:
        live.step = live.schedule.begin_step()
        live.slots.see(live.step.rows, live.step.slots)
        live.slots.see(live.step.cached, live.step.cached_slots)
        live.tokens.see(live.step.cached, live.step.cached_ids)
        live.positions.see(live.step.cached, live.step.cached.position + live.plan.position_offset)
        live.recorder.will_not_see(live.step.cached, "was not computed: its K and V were in the prefix cache")
        return call

    def end(hidden: Tensor) -> Tensor:
        live.hidden = hidden
        return hidden

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def model_forward(*args: Any, **kwargs: Any) -> Any:
            from vllm.forward_context import get_forward_context

            context = get_forward_context()
            live.schedule.facts.graph_mode(context.cudagraph_runtime_mode.name)
            if eager:
                context.skip_compiled = True
            live.safely(begin, None)
            return live.safely(end, original(*args, **kwargs))

        return model_forward

    taps.attribute(runner, "_model_forward", make)
    if eager and getattr(runner, "cudagraph_dispatcher", None) is not None:

        def without_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
            from vllm.config import CUDAGraphMode

            return lambda *args, **kwargs: original(*args, **{**kwargs, "valid_modes": {CUDAGraphMode.NONE}})

        taps.attribute(runner.cudagraph_dispatcher, "dispatch", without_graphs)


def tap_model(taps: Taps, live: Live, model: Module) -> None:
    """Observe the embedding, every layer, the final norm and the logits of a causal language model."""
    body = model.model
    _tap_embedding(taps, live, body.embed_tokens)
    for n, layer in enumerate(body.layers):
        residual = f"layers.{n - 1}.mlp_residual" if n else None
        _tap_norm(taps, live, layer.input_layernorm, f"layers.{n}.input_layernorm", residual)
        _tap_attention(taps, live, layer.self_attn, n)
        name = f"layers.{n}.post_attention_layernorm"
        _tap_norm(taps, live, layer.post_attention_layernorm, name, f"layers.{n}.attn_residual")
        (tap_experts if live.config.is_sparse(n) else _tap_mlp)(taps, live, layer.mlp, f"layers.{n}.mlp")
    _tap_norm(taps, live, body.norm, "norm", f"layers.{len(body.layers) - 1}.mlp_residual")
    for rotary in {id(layer.self_attn.rotary_emb): layer.self_attn.rotary_emb for layer in body.layers}.values():
        _tap_rotary(taps, live, rotary)


def _output(taps: Taps, live: Live, module: Module, function: Callable[[Any], Any]) -> None:
    taps.output(module, lambda output: live.safely(function, output))


def _tap_embedding(taps: Taps, live: Live, module: Module) -> None:
    def received(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        ids = call[0][0]
        assert live.step is not None
        live.tokens.see(live.step.padded(ids.shape[0]), ids)
        return call

    taps.input(module, lambda args, kwargs: live.safely(received, (args, kwargs)))
    _output(taps, live, module, lambda output: live.seen("embed_tokens", output))


def _tap_norm(taps: Taps, live: Live, module: Module, name: str, residual: str | None) -> None:
    def function(output: Any) -> Any:
        if not isinstance(output, tuple):
            return live.seen(name, output)
        assert residual is not None
        normed, summed = output
        changed = live.replaced(residual, summed)
        if changed is not None:
            normed = _renormed(module, normed, summed, changed)
            summed = changed
        return live.seen(name, normed), summed

    _output(taps, live, module, function)


def _renormed(module: Module, normed: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """The fused kernel has normalised the sum before the intervention: do the changed rows again, from what the
    residual is now.
    """
    import torch

    view = torch.int32 if before.element_size() == 4 else torch.int16
    rows = (before.contiguous().view(view) != after.contiguous().view(view)).any(dim=-1)
    normed = normed.clone()
    normed[rows] = module.forward(after[rows].contiguous())
    return normed


def _tap_split(
    taps: Taps, live: Live, module: Module, names: Sequence[str], sizes: Sequence[int], whole: Sequence[bool]
) -> None:
    """A fused projection whose output holds several boundaries side by side."""

    def function(output: Any) -> Any:
        fused, bias = output
        parts = fused.split(list(sizes), dim=-1)
        shown = [live.replaced(name, part, whole=w) for name, part, w in zip(names, parts, whole, strict=True)]
        if all(part is None for part in shown):
            return output
        import torch

        return torch.cat([old if new is None else new for old, new in zip(parts, shown, strict=True)], dim=-1), bias

    _output(taps, live, module, function)


def _tap_attention(taps: Taps, live: Live, module: Module, n: int) -> None:
    prefix = f"layers.{n}.self_attn"

    def enter(call: Any) -> Any:
        live.layer = n
        return call

    taps.input(module, lambda args, kwargs: live.safely(enter, (args, kwargs)))
    sizes = (module.q_size, module.kv_size, module.kv_size)
    names = [f"{prefix}.{x}_proj" for x in "qkv"]
    _tap_split(taps, live, module.qkv_proj, names, sizes, (False, live.whole_kv, live.whole_kv))
    if live.config.qk_norm:
        _output(taps, live, module.q_norm, lambda output: live.seen(f"{prefix}.q_norm", output))
        _output(taps, live, module.k_norm, lambda output: live.seen(f"{prefix}.k_norm", output, whole=live.whole_kv))
    _tap_cache(taps, live, module.attn, n)
    _output(taps, live, module.attn, lambda output: live.seen(f"{prefix}.attention", output))
    _tap_row_parallel(taps, live, module.o_proj, f"{prefix}.o_proj")


def _tap_rotary(taps: Taps, live: Live, module: Module) -> None:
    def received(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        (positions, *rest), kwargs = call
        if live.plan.position_offset:
            positions = positions + live.plan.position_offset
        # Every layer gets the same tensor.
        if live.layer == 0:
            assert live.step is not None
            live.positions.see(live.step.padded(positions.shape[-1]), positions)
        return (positions, *rest), kwargs

    def rotated(output: Any) -> Any:
        q, k = output
        prefix = f"layers.{live.layer}.self_attn"
        return live.seen(f"{prefix}.q_rope", q), live.seen(f"{prefix}.k_rope", k, whole=live.whole_kv)

    taps.input(module, lambda args, kwargs: live.safely(received, (args, kwargs)))
    _output(taps, live, module, rotated)


def _tap_row_parallel(taps: Taps, live: Live, module: Module, name: str) -> None:
    if live.ranks > 1:
        partial = f"{name}.partial"

        def make(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def apply(*args: Any, **kwargs: Any) -> Tensor:
                output = original(*args, **kwargs)
                return live.safely(lambda value: live.seen(partial, value), output)

            return apply

        # The one place between the local product and the all-reduce.
        taps.attribute(module.quant_method, "apply", make)

    _output(taps, live, module, lambda output: (live.seen(name, output[0]), output[1]))


def _tap_mlp(taps: Taps, live: Live, module: Module, prefix: str) -> None:
    size = live.config.intermediate_size // live.ranks
    names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
    _tap_split(taps, live, module.gate_up_proj, names, (size, size), (False, False))
    _output(taps, live, module.act_fn, lambda output: live.seen(f"{prefix}.act", output))
    _tap_row_parallel(taps, live, module.down_proj, f"{prefix}.down_proj")


def _tap_cache(taps: Taps, live: Live, attention: Module, n: int) -> None:
    """Look into the paged cache right after K and V were stored, before attention reads them."""
    names = (f"layers.{n}.self_attn.k_cache", f"layers.{n}.self_attn.v_cache")
    if not any(live.recorder.wants(name) for name in names):
        return
    impl = attention.impl
    if hasattr(impl, "do_kv_cache_update") and not attention.attn_backend.forward_includes_kv_cache_update:

        def make(original: Callable[..., None]) -> Callable[..., None]:
            def update(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
                original(layer, key, value, cache, slots)
                store: Store = lambda k, v, c, s: original(layer, k, v, c, s)  # noqa: E731
                live.safely(lambda c: _observe_cache(live, names, c, attention, store), cache)

            return update

        taps.attribute(impl, "do_kv_cache_update", make)
    elif type(impl).__name__ == "CPUAttentionBackendImpl":
        # vLLM 0.22 on a CPU stores inside the attention's forward, through this operator.
        from vllm import _custom_ops

        def make_operator(original: Callable[..., None]) -> Callable[..., None]:
            def reshape_and_cache(
                key: Tensor, value: Tensor, k: Tensor, v: Tensor, slots: Tensor, *a: Any, **kw: Any
            ) -> None:
                original(key, value, k, v, slots, *a, **kw)
                store: Store = lambda x, y, c, s: original(x, y, *c.unbind(0), s, *a, **kw)  # noqa: E731
                if live.layer == n:
                    live.safely(lambda c: _observe_cache(live, names, c, attention, store), attention.kv_cache)

            return reshape_and_cache

        taps.attribute(_custom_ops, "cpu_attn_reshape_and_cache", make_operator)
    else:
        for name in names:
            why = f"{type(impl).__name__} stores K and V inside its attention kernel"
            live.recorder.cannot_observe(name, why)


def _observe_cache(live: Live, names: Sequence[str], cache: Tensor, attention: Module, store: Store) -> None:
    import numpy as np
    import torch

    assert live.step is not None
    if live.layout is None:
        blocks = _cache_blocks(live.schedule)
        live.layout = learn_layout(store, cache, blocks, attention.num_kv_heads, attention.head_size)
        if live.layout.block_size != live.schedule.block_size:
            raise EngineError(f"KV cache blocks hold {live.layout.block_size} tokens, not {live.schedule.block_size}")
    rows = Rows.join([live.step.rows, live.step.cached])
    slots = torch.from_numpy(np.concatenate([live.step.slots, live.step.cached_slots])).to(cache.device)
    for which, name in enumerate(names):
        if live.recorder.wants(name):
            changed = live.replaced(name, live.layout.read(cache, which, slots), rows, whole=live.whole_kv)
            if changed is not None:
                live.layout.write(cache, which, slots, changed)


def _cache_blocks(schedule: Schedule) -> int:
    """Blocks of the cache as the attention kernel counts them; the manager's blocks may be several of them."""
    config = schedule.runner.kv_cache_config
    spec = config.kv_cache_groups[0].kv_cache_spec
    return int(config.num_blocks) * (int(spec.block_size) // schedule.block_size)
