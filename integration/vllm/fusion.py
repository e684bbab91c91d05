"""A pass over vLLM's compiled graph: a row-parallel product and the norm that alone reads it become one operator.

It is a change of launches only: `fastpath.products.row_linear_norm` has the bits of the two one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Node = Any
#: Operators that only look at a tensor in another shape.
_VIEWS = ("aten.view", "aten.reshape", "aten._unsafe_view")


def fuse(graph: Any) -> None:
    """Rewrite ``graph`` (`torch.fx.Graph`, after gradients) in place."""
    import torch

    norm, product = torch.ops.rlk.rms_norm_residual.default, torch.ops.rlk.linear_bias.default
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not norm:
            continue
        x, residual, weight, epsilon, contract = node.args
        between, source = _behind_views(x)
        if source is None or source.target is not product or source.args[2] is not None:
            continue
        if '"row_linear"' not in source.args[3]:
            continue
        arguments = (source.args[0], source.args[1], residual, weight, epsilon, source.args[3], contract)
        with graph.inserting_before(node):
            fused = graph.call_function(torch.ops.rlk.row_linear_norm.default, arguments)
        fused.meta = dict(node.meta)
        if "eager_input_vals" in node.meta:  # the strides that the compiler keeps arguments in
            (of_norm, _), (of_product, _) = (each.meta["eager_input_vals"] for each in (node, source))
            seen = (*of_product[:2], *of_norm[1:4], of_product[3], of_norm[4])
            fused.meta["eager_input_vals"] = (seen, {})
        node.replace_all_uses_with(fused)
        for dead in (node, *between, source):
            graph.erase_node(dead)


def _behind_views(node: Node) -> tuple[list[Node], Node | None]:
    """Views from ``node`` back to what they look at, and that; None where somebody else reads one of them too."""
    views: list[Node] = []
    while getattr(node, "op", None) == "call_function" and len(node.users) == 1:
        if not str(node.target).startswith(_VIEWS):
            return views, node
        views.append(node)
        node = node.args[0]
    return views, None


def configured(original: Callable[..., None]) -> Callable[..., None]:
    """vLLM's ``PostGradPassManager.configure``, with `fuse` at the end."""

    def configure(self: Any, config: Any) -> None:
        from vllm.compilation.passes.inductor_pass import CallableInductorPass

        original(self, config)
        self.add(CallableInductorPass(fuse))

    return configure
