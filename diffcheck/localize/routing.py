"""How far two sides of a mixture of experts agree on which experts a token passes through, and how near the choice was.

A choice that differs because the router's input differs already has its cause above; one that differs on equal inputs
has it in the router. A margin of few ulp says that the last bits of the logits decided.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffcheck.base.bits import ordinal, to_float32
from diffcheck.base.boundaries import Boundary
from diffcheck.localize.compare import why_unobserved
from diffcheck.trace.reader import Trace


@dataclass(frozen=True)
class LayerRouting:
    """One layer with experts; every token that both sides stored."""

    layer: int
    tokens: int
    #: Tokens with the same experts on both sides, in whatever order.
    agreeing: int
    #: Tokens whose router input differs in some bit, and those of the others whose choice differs; None: not observed.
    inputs_differing: int | None
    differing_on_equal_inputs: int | None
    #: Distance in ulp of the logits' format from the last chosen logit to the first one left out, on the left: of the
    #: nearest token, the median of all, and the median of those whose choice differs. None: not observed.
    margin_least: int | None
    margin_median: float | None
    margin_differing: float | None


def routing(nodes: list[Boundary], left: Trace, right: Trace) -> list[LayerRouting]:
    """Agreement by layer, for every layer whose choice both traces store whole; empty for a dense model."""
    by_name = {node.name: node for node in nodes}
    found = []
    for node in nodes:
        if not node.name.endswith(".mlp.topk_experts") or not _whole(node, left, right):
            continue
        assert node.layer is not None
        layer = f"layers.{node.layer}"
        a, b = (_choice(trace, node.name) for trace in (left, right))
        differ = (a != b).any(axis=1)
        source, inputs = by_name[f"{layer}.post_attention_layernorm"], None
        if not why_unobserved(source, left, right) and left.entry(source.name).dtype == right.entry(source.name).dtype:
            inputs = (left.digests(source.name) != right.digests(source.name)).any(axis=1)
        margins = _margins(by_name[f"{layer}.mlp.gate"], node.width, left)
        found.append(
            LayerRouting(
                layer=node.layer,
                tokens=len(differ),
                agreeing=int((~differ).sum()),
                inputs_differing=None if inputs is None else int(inputs.sum()),
                differing_on_equal_inputs=None if inputs is None else int((differ & ~inputs).sum()),
                margin_least=None if margins is None else int(margins.min()),
                margin_median=None if margins is None else float(np.median(margins)),
                margin_differing=float(np.median(margins[differ])) if margins is not None and differ.any() else None,
            )
        )
    return found


def in_words(layers: list[LayerRouting]) -> list[str]:
    """The sentence about where inputs and where decisions first differ; none for a dense model."""
    if not layers:
        return []
    tokens, agreeing = (sum(getattr(x, name) for x in layers) for name in ("tokens", "agreeing"))
    said = f"Routing: {agreeing:,} of {tokens:,} choices of experts agree ({100 * agreeing / max(1, tokens):.1f} %)"
    decision = next((x.layer for x in layers if x.agreeing < x.tokens), None)
    inputs = next((x.layer for x in layers if x.inputs_differing), None)
    if inputs is not None:
        said += f"; a router's input first differs in layer {inputs}"
    if decision is not None:
        said += f"; a decision first differs in layer {decision}"
        own = sum(x.differing_on_equal_inputs or 0 for x in layers)
        said += f", {own:,} of them on equal inputs" if own else ", never on equal inputs"
    return [said + "."]


def _whole(node: Boundary, left: Trace, right: Trace) -> bool:
    return not why_unobserved(node, left, right) and all(t.entry(node.name).level == "full" for t in (left, right))


def _choice(trace: Trace, name: str) -> NDArray[np.int64]:
    return to_float32(trace.values(name), trace.entry(name).dtype).astype(np.int64)


def _margins(gate: Boundary, k: int, trace: Trace) -> NDArray[np.int64] | None:
    """[tokens]: ulp between the k-th and the next logit; None where they were not stored, or no expert is left out."""
    if gate.name not in trace or trace.entry(gate.name).level != "full" or k >= gate.width:
        return None
    ranks = np.sort(ordinal(trace.values(gate.name)).astype(np.int64), axis=1)
    return np.asarray(ranks[:, -k] - ranks[:, -k - 1], dtype=np.int64)
