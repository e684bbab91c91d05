"""Where a boundary of the dataflow graph lives in a Hugging Face transformers decoder.

Modules are hooked. RoPE and attention are functions that the modelling file looks up by name; they are wrapped where
they are looked up, only while a capture runs. The residual adds are inline: their results are seen where the next norm,
or the layer's caller, receives them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from diffcheck.capture.live import LiveInputs, Taps, observe
from diffcheck.capture.recorder import Recorder
from diffcheck.capture.transformers.experts import tap_experts
from diffcheck.live_model.facts import CAUSAL, live_mask, mask_of
from diffcheck.live_model.rope import KEPT, table_entry
from diffcheck.rows import Rows
from reference.models.config import ModelConfig

Tensor = Any


class TransformersTaps(Taps):
    """All taps of one capture of a batch of one sequence at a time.

    Args:
        model: the live ``*ForCausalLM``. implementation: its attention implementation ("eager", "sdpa").
    """

    def __init__(self, model: Any, config: ModelConfig, recorder: Recorder, implementation: str) -> None:
        super().__init__()
        self.tokens, self.positions = LiveInputs(), LiveInputs()
        self._config, self._recorder = config, recorder
        self._rows = self._head_rows = Rows.of(0, range(0))
        self._layer = 0
        #: Position -> cosines and sines [dim / 2] that the rotary embedding gave, first come, and the table's dtype.
        self._rope: dict[int, tuple[Any, Any]] = {}
        self._rope_dtype = ""
        #: Per layer: kind and window of the mask that its attention received.
        self._masks: list[tuple[str, int | None]] = [(CAUSAL, None)] * config.num_hidden_layers
        self._implementation = implementation
        self._tap_inputs(model.model)
        self._observe_output(model.model.embed_tokens, "embed_tokens")
        for n, layer in enumerate(model.model.layers):
            self._tap_layer(n, layer)
        self._observe_output(model.model.norm, "norm")
        if recorder.wants("logits"):
            self.output(model.lm_head, lambda out: observe(recorder, "logits", self._head_rows, out))
        self._tap_functions(model.model.layers[0].self_attn, implementation)

    @property
    def attention_mask(self) -> str:
        """Kind of the mask of every layer, in words."""
        return mask_of([window for _, window in self._masks], [kind for kind, _ in self._masks])

    def rope_tables(self, rotary: Any) -> list[dict[str, Any]]:
        """The table that all layers rotated with."""
        if not self._rope:
            return []
        last = max(self._rope)
        kept = [p for p in sorted(self._rope) if p in KEPT or p == last]
        return [
            table_entry(
                range(self._config.num_hidden_layers),
                frequencies=rotary.inv_freq.detach().cpu().float().numpy(),
                attention_factor=float(getattr(rotary, "attention_scaling", 1.0)),
                positions=kept,
                cos=[self._rope[p][0] for p in kept],
                sin=[self._rope[p][1] for p in kept],
                dtype=self._rope_dtype,
            )
        ]

    def begin(self, rows: Rows, head_rows: Rows) -> None:
        """Say what the next forward holds, and for which of its rows the head will compute logits."""
        self._rows, self._head_rows = rows, head_rows

    def _tap_inputs(self, decoder: Any) -> None:
        def see_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            self.tokens.see(self._rows, args[0])
            return args, kwargs

        def see_positions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            self.positions.see(self._rows, kwargs["position_ids"] if "position_ids" in kwargs else args[1])
            return args, kwargs

        self.input(decoder.embed_tokens, see_tokens)
        last: list[Any] = [None]

        def positions_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            last[0] = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
            return args, kwargs

        def see_table(output: Any) -> Any:
            cos, sin = output
            half = cos.shape[-1] // 2
            self._rope_dtype = str(cos.dtype).removeprefix("torch.")
            for row, position in enumerate(last[0][0].tolist()):
                if position not in self._rope:
                    rows = (part[0, row, :half].detach().float().cpu().numpy() for part in (cos, sin))
                    self._rope[position] = next(rows), next(rows)
            return output

        self.input(decoder.rotary_emb, see_positions)
        self.input(decoder.rotary_emb, positions_of)
        self.output(decoder.rotary_emb, see_table)

    def _tap_layer(self, n: int, layer: Any) -> None:
        name, attention, mlp = f"layers.{n}", layer.self_attn, layer.mlp
        attn_name, mlp_name = f"{name}.self_attn", f"{name}.mlp"

        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            self._layer = n
            return args, kwargs

        self._observe_output(layer.input_layernorm, f"{name}.input_layernorm")
        self.input(attention, enter)
        for x in "qkv":
            self._observe_output(getattr(attention, f"{x}_proj"), f"{attn_name}.{x}_proj")
        if self._config.qk_norm:
            self._observe_output(attention.q_norm, f"{attn_name}.q_norm")
            self._observe_output(attention.k_norm, f"{attn_name}.k_norm")
        self._observe_input(attention.o_proj, f"{attn_name}.attention")
        self._observe_output(attention.o_proj, f"{attn_name}.o_proj")
        self._observe_input(layer.post_attention_layernorm, f"{name}.attn_residual", in_place=True)
        self._observe_output(layer.post_attention_layernorm, f"{name}.post_attention_layernorm")
        if self._config.is_sparse(n):
            tap_experts(self, mlp, mlp_name, self._recorder, lambda: self._rows)
        else:
            self._observe_output(mlp.gate_proj, f"{mlp_name}.gate_proj")
            self._observe_output(mlp.up_proj, f"{mlp_name}.up_proj")
            self._observe_input(mlp.down_proj, f"{mlp_name}.act")
            self._observe_output(mlp.down_proj, f"{mlp_name}.down_proj")
        self._observe_output(layer, f"{name}.mlp_residual")

    def _tap_functions(self, attention: Any, implementation: str) -> None:
        modelling = sys.modules[type(attention).__module__]
        self.attribute(modelling, "apply_rotary_pos_emb", self._observed_rope)
        if implementation == "eager":
            self.attribute(modelling, "eager_attention_forward", self._observed_attention)
        else:
            self.item(modelling.ALL_ATTENTION_FUNCTIONS, implementation, self._observed_attention)

    def _observed_rope(self, apply: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            q, k = apply(*args, **kwargs)
            name = f"layers.{self._layer}.self_attn"
            return self._see_heads(f"{name}.q_rope", q), self._see_heads(f"{name}.k_rope", k)

        return run

    def _observed_attention(self, attend: Callable[..., Any]) -> Callable[..., Any]:
        """K and V as attention receives them; with a cache, these are its own tensors, earlier positions first."""

        def run(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            name = f"layers.{self._layer}.self_attn"
            self._see_mask(module, query, key, args[0] if args else kwargs.get("attention_mask"))
            for boundary, cached in ((f"{name}.k_cache", key), (f"{name}.v_cache", value)):
                new = cached[:, :, cached.shape[2] - len(self._rows) :]
                seen = self._see_heads(boundary, new)
                if seen is not new:
                    # In place, so that a change is still in the cache when later tokens read it.
                    new.copy_(seen)
            return attend(module, query, key, value, *args, **kwargs)

        return run

    def _see_mask(self, module: Any, query: Tensor, key: Tensor, mask: Tensor | None) -> None:
        """``mask`` [1, 1, queries, keys]: True, or 0 of an added one, where a query may look."""
        window = getattr(module, "sliding_window", None)
        if mask is None:
            # sdpa is causal by itself; one query sees all keys that there are.
            causal = query.shape[2] == 1 or (self._implementation == "sdpa" and getattr(module, "is_causal", True))
            found = (CAUSAL, window if window is not None and window >= key.shape[2] else None)
            found = found if causal else ("none", None)
        else:
            part = mask[0, 0, :, : key.shape[2]]
            hidden = ~part if str(part.dtype) == "torch.bool" else part < 0
            found = live_mask(hidden, window)
        if found != (CAUSAL, None):
            self._masks[self._layer] = found

    def _see_heads(self, name: str, tensor: Tensor) -> Tensor:
        """[1, heads, positions, head_dim]."""
        by_position = tensor.transpose(1, 2)
        seen = observe(self._recorder, name, self._rows, by_position)
        return tensor if seen is by_position else seen.transpose(1, 2)

    def _observe_output(self, module: Any, name: str) -> None:
        if self._recorder.wants(name):
            self.output(module, lambda out: observe(self._recorder, name, self._rows, out))

    def _observe_input(self, module: Any, name: str, *, in_place: bool = False) -> None:
        """First argument of ``module``. ``in_place`` where the same tensor has other readers too."""
        if not self._recorder.wants(name):
            return

        def look(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            seen = observe(self._recorder, name, self._rows, args[0])
            if in_place and seen is not args[0]:
                seen = args[0].copy_(seen)
            return (seen, *args[1:]), kwargs

        self.input(module, look)
