"""Where a boundary of the dataflow graph lives in a Megatron-core GPT model of the local layer specification.

Most boundaries are the output or the input of a module. RoPE is a function that the attention module looks up by
name, the residual adds are functions that the layer holds: both are wrapped where they are looked up, and only while a
capture runs. Megatron keeps no KV cache in training: the logical K and V are what core attention receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from diffcheck.capture.live import LiveInputs, Taps, batch_rows, observe
from diffcheck.capture.megatron.experts import tap_experts
from diffcheck.capture.megatron.weights import interleave_qkv, split_qkv
from diffcheck.capture.recorder import Recorder
from diffcheck.live_model.experts import STRICT_SEE, tap_strict_experts
from diffcheck.live_model.facts import CAUSAL, live_mask, mask_of, window_size
from diffcheck.rows import Rows
from reference.models.config import ModelConfig

Tensor = Any


class MegatronTaps(Taps):
    """All taps of one capture. Tensors are [sequence, batch, features] inside the model.

    Args:
        model: the live ``GPTModel``. ranks: tensor parallelism; above 1 the partial sums are observed too.
    """

    def __init__(self, model: Any, config: ModelConfig, recorder: Recorder, ranks: int, position_offset: int) -> None:
        super().__init__()
        self.tokens, self.positions, self.targets = LiveInputs(), LiveInputs(), LiveInputs()
        #: Angles [length, dim / 2] that the rotary embedding gave for the longest forward, and the factor of cosines
        #: and sines that attention passed on with them.
        self.angles: Tensor = None
        self.attention_factor = 1.0
        #: Per layer: kind and window of the mask that its core attention applies.
        self._masks: list[tuple[str, int | None]] = [(CAUSAL, None)] * config.num_hidden_layers
        self._config, self._recorder, self._ranks = config, recorder, ranks
        self._rope_names: Iterator[str] = iter(())
        self._batch_first = self._sequence_first = Rows.of(0, range(0))
        self._tap_model(model, position_offset)

    @property
    def attention_mask(self) -> str:
        """Kind of the mask of every layer, in words."""
        return mask_of([window for _, window in self._masks], [kind for kind, _ in self._masks])

    def positions_of_angles(self) -> list[int]:
        """Position of each row of `angles`."""
        return [int(p) for p in self._position(self.angles).reshape(-1).tolist()]

    def frequencies(self) -> Any | None:
        """Effective inverse frequencies [dim / 2], float32: the angles of position 1, if it was among them."""
        if self.angles is None or 1 not in (where := self.positions_of_angles()):
            return None
        return self.angles[where.index(1)].float().cpu().numpy()

    def _position(self, angles: Tensor) -> Tensor:
        """Positions [length, 1] of angles [length, pairs]: the first frequency is base**0 = 1 before linear scaling."""
        factor = getattr(self._rotary, "seq_len_interpolation_factor", None) or 1.0
        return (angles[:, :1] * factor / self._rotary.inv_freq[0]).round()

    def begin(self, samples: list[int], lengths: list[int], width: int) -> Rows:
        """Say what the next forward holds: a right-padded batch. Returns its rows, batch first."""
        self._batch_first = batch_rows(samples, lengths, width, sequence_first=False)
        self._sequence_first = batch_rows(samples, lengths, width, sequence_first=True)
        return self._batch_first

    def _tap_model(self, model: Any, position_offset: int) -> None:
        self._tap_rope(model.rotary_pos_emb, position_offset)
        self.input(model.embedding.word_embeddings, self._see_tokens)
        for n, layer in enumerate(model.decoder.layers):
            self._tap_mask(n, layer.self_attention.core_attention)
        if self._recorder.wants("embed_tokens"):
            self.output(
                model.embedding.word_embeddings,
                lambda out: observe(self._recorder, "embed_tokens", self._batch_first, out),
            )
        for n, layer in enumerate(model.decoder.layers):
            self._tap_layer(f"layers.{n}", layer)
        self._observe_output(model.decoder.final_layernorm, "norm")
        self._observe_output(model.output_layer, "logits")

    def _tap_layer(self, name: str, layer: Any) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        attn_name, mlp_name = f"{name}.self_attn", f"{name}.mlp"

        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            # RoPE is applied to the query first, then to the key.
            self._rope_names = iter((f"{attn_name}.q_rope", f"{attn_name}.k_rope"))
            return args, kwargs

        self._observe_output(layer.input_layernorm, f"{name}.input_layernorm")
        self._observe_joined(
            attention.linear_qkv,
            [f"{attn_name}.{x}_proj" for x in "qkv"],
            lambda mixed: split_qkv(mixed, self._config, axis=-1),
            lambda parts: interleave_qkv(parts, self._config, axis=-1),
        )
        if self._config.qk_norm:
            self._observe_output(attention.q_layernorm, f"{attn_name}.q_norm")
            self._observe_output(attention.k_layernorm, f"{attn_name}.k_norm")
        self.input(attention, enter)
        self._observe_inputs(attention.core_attention, {1: f"{attn_name}.k_cache", 2: f"{attn_name}.v_cache"})
        self._observe_output(attention.core_attention, f"{attn_name}.attention")
        self._observe_partial(attention.linear_proj, f"{attn_name}.o_proj.partial")
        self._observe_residual(layer, "self_attn_bda", f"{attn_name}.o_proj", f"{name}.attn_residual")
        self._observe_output(layer.pre_mlp_layernorm, f"{name}.post_attention_layernorm")
        if hasattr(mlp, "router"):
            if hasattr(mlp, STRICT_SEE):
                tap_strict_experts(self, mlp, mlp_name, self._recorder.wants, self._see_flat)
            else:
                tap_experts(self, mlp, mlp_name, self._recorder, self._see_flat)
            self._observe_residual(layer, "mlp_bda", f"{mlp_name}.combine", f"{name}.mlp_residual")
            return
        self._observe_joined(mlp.linear_fc1, [f"{mlp_name}.gate_proj", f"{mlp_name}.up_proj"], _halves, _concatenate)
        # silu(gate) * up is computed inside MLP.forward; its only reader is the second linear layer.
        self._observe_inputs(mlp.linear_fc2, {0: f"{mlp_name}.act"})
        self._observe_partial(mlp.linear_fc2, f"{mlp_name}.down_proj.partial")
        self._observe_residual(layer, "mlp_bda", f"{mlp_name}.down_proj", f"{name}.mlp_residual")

    def _see(self, name: str, tensor: Tensor) -> Tensor:
        return observe(self._recorder, name, self._sequence_first, tensor)

    def _see_flat(self, name: str, tensor: Tensor) -> Tensor:
        """[tokens, width]."""
        changed = self._recorder.observe(name, self._sequence_first, tensor)
        return tensor if changed is None else changed

    def _observe_output(self, module: Any, name: str) -> None:
        if self._recorder.wants(name):
            self.output(module, lambda out: _with_first(out, lambda x: self._see(name, x)))

    def _observe_inputs(self, module: Any, names: dict[int, str]) -> None:
        """Positional arguments of ``module``."""
        if not any(map(self._recorder.wants, names.values())):
            return

        def look(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            seen = [self._see(names[i], x) if i in names else x for i, x in enumerate(args)]
            return tuple(seen), kwargs

        self.input(module, look)

    def _observe_joined(
        self,
        module: Any,
        names: list[str],
        split: Callable[[Tensor], tuple[Tensor, ...]],
        join: Callable[[list[Tensor]], Tensor],
    ) -> None:
        """A linear layer that computes several projections at once."""
        if not any(map(self._recorder.wants, names)):
            return

        def look(joined: Tensor) -> Tensor:
            parts = split(joined)
            seen = [self._see(name, part) for name, part in zip(names, parts, strict=True)]
            unchanged = all(a is b for a, b in zip(seen, parts, strict=True))
            return joined if unchanged else join(seen)

        self.output(module, lambda out: _with_first(out, look))

    def _observe_partial(self, linear: Any, name: str) -> None:
        """This rank's contribution, before the all-reduce inside ``RowParallelLinear.forward``."""
        if self._ranks > 1 and self._recorder.wants(name):
            self.attribute(linear, "_forward_impl", lambda run: lambda *a, **kw: self._see(name, run(*a, **kw)))

    def _observe_residual(self, layer: Any, attribute: str, projection: str, name: str) -> None:
        """bias_dropout_add: the projection's bias, which Megatron adds here, and the residual add."""
        if not (self._recorder.wants(projection) or self._recorder.wants(name)):
            return

        def make(get_function: Callable[..., Any]) -> Callable[..., Any]:
            def get_observed(training: bool, fused: bool) -> Callable[..., Any]:
                add = get_function(training, fused)

                def observed(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
                    x, bias = x_with_bias
                    # The engine's own first step, done here so that the projection is seen with its bias.
                    x = self._see(projection, x if bias is None else x + bias)
                    return self._see(name, add((x, None), residual, prob))

                return observed

            return get_observed

        self.attribute(layer, attribute, make)

    def _tap_rope(self, rotary: Any, position_offset: int) -> None:
        from megatron.core.transformer import attention

        def shifted(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda length, offset=0, **kwargs: forward(length, offset + position_offset, **kwargs)

        def observed(apply: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def run(t: Tensor, freqs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                self.attention_factor = float(kwargs.get("mscale", 1.0))
                return self._see(next(self._rope_names), apply(t, freqs, *args, **kwargs))

            return run

        if position_offset:
            self.attribute(rotary, "forward", shifted)
        self._rotary = rotary
        self.output(rotary, self._see_positions)
        self.attribute(attention, "apply_rotary_pos_emb", observed)

    def _see_positions(self, output: Any) -> Any:
        angles = output[0] if isinstance(output, tuple) else output  # [length, 1, 1, dim]
        width, half = angles.shape[0], angles.shape[-1] // 2
        batch = len(self._sequence_first) // width
        self.positions.see(self._sequence_first, self._position(angles[:, 0, 0]).expand(width, batch))
        if self.angles is None or width > self.angles.shape[0]:
            self.angles = angles[:, 0, 0, :half].detach().clone()
        return output

    def _tap_mask(self, n: int, core: Any) -> None:
        def see(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            """The fourth argument [1, 1, length, length] is True where a query must not look; a window of the module
            takes its place, whatever it says.
            """
            mask = args[3] if len(args) > 3 else kwargs.get("attention_mask")
            window = live_window(core)
            if mask is not None:
                kind, seen = live_mask(mask[0, 0], None)
                found = (kind, window) if window is not None else (kind, seen)
                if found != (CAUSAL, None):
                    self._masks[n] = found
            return args, kwargs

        self.input(core, see)

    def _see_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.tokens.see(self._batch_first, args[0])
        return args, kwargs


def live_window(core: Any) -> int | None:
    """How many newest keys a query of a live core attention sees, strict or Megatron's own; None sees all."""
    owner = getattr(core, "scale_mask_softmax", core)
    return window_size(getattr(owner, "window_size", None))


def _with_first(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply to a module's tensor, which linear layers return as (output, bias)."""
    return (function(output[0]), *output[1:]) if isinstance(output, tuple) else function(output)


def _halves(joined: Tensor) -> tuple[Tensor, ...]:
    return tuple(joined.chunk(2, dim=-1))


def _concatenate(parts: list[Tensor]) -> Tensor:
    import torch

    return torch.cat(parts, dim=-1)
