"""One call for the products of one row by several weights in graphs that Inductor compiles, such as an attention's projections.

A product of one row by a small weight costs little beside its call, its threads and the rounding of its input.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from operator import getitem
from typing import Any, TypeGuard

import torch
from torch import fx

from .operators import PARTS, SEVERAL, facts_text, repeats_in_c

#: Of the arguments of `breccia::linear`, those that each weight has: the row comes before them, and facts after.
_OF_WEIGHT = slice(1, 1 + PARTS)
_registered = False


def facts_in_graphs(*facts: Any) -> str:
    """`facts_text` for graphs in which layers may be multiplied together.

    It differs from that of versions without the operators for several weights, so that these do not load such graphs from
    Inductor's cache.
    """
    register()
    return facts_text(*facts, "shared")


def register() -> None:
    """Let Inductor multiply a row together, if Inductor is loaded and the operators for it are compiled."""
    global _registered
    if _registered or not repeats_in_c() or "torch._inductor" not in sys.modules:
        return
    _registered = True
    with suppress(ImportError, AttributeError):  # of another torch, whose graphs keep one call for each layer
        from torch._inductor import pattern_matcher as matching
        from torch._inductor.fx_passes.post_grad import pass_patterns

        pattern = matching.CallFunction(torch.ops.breccia.linear.default, *(matching.Arg() for _ in range(1 + PARTS + 1)))
        register_pattern: Callable[..., Any] = matching.register_graph_pattern
        register_pattern(pattern, pass_dict=pass_patterns[-1])(_shared)


def _shared(match: Any, *_: Any) -> None:
    """Replace a product, and others of the same row, by one call."""
    node: fx.Node = match.output_node()
    alike = _alike(node)
    if len(alike) in SEVERAL:
        _merge(alike)


def _alike(node: fx.Node) -> list[fx.Node]:
    """The products, `node` among them, that one call can compute, in the order of the graph."""
    x, facts = node.args[0], node.args[-1]
    if not _is_row(x):
        return []
    users = {
        user
        for user in x.users
        if user.target is node.target and user.args[0] is x and user.args[-1] == facts and _when(user) == _when(node)
    }
    ordered = [
        each for each in node.graph.find_nodes(op="call_function", target=node.target) if each in users and _is_ready(each)
    ]
    most = max(SEVERAL)
    groups = [ordered[start : start + most] for start in range(0, len(ordered), most)]
    return next((group for group in groups if node in group), [])


def _when(node: fx.Node) -> Any:
    """What changes where an operation of the graph writes to a tensor, as Inductor's matcher counts them."""
    return node.meta.get("mutation_region_id")


def _is_row(x: Any) -> TypeGuard[fx.Node]:
    """Whether an argument is a row on the CPU, of a shape that is known."""
    row = x.meta.get("val") if isinstance(x, fx.Node) else None
    if not isinstance(row, torch.Tensor) or row.ndim < 2 or row.device.type != "cpu":
        return False
    return all(type(length) is int for length in row.shape) and all(length == 1 for length in row.shape[:-1])


def _is_ready(node: fx.Node) -> bool:
    """Whether all that a product needs besides its row is an input or a constant of the graph, and repeats in C.

    Constants may come later in the graph; Inductor sorts it after its passes.
    """
    parts = node.args[_OF_WEIGHT]
    bias: Any = parts[-1]
    return all(part is None or (isinstance(part, fx.Node) and part.op in ("placeholder", "get_attr")) for part in parts) and (
        bias is None or getattr(bias.meta.get("val"), "dtype", None) is torch.float32
    )


def _merge(nodes: list[fx.Node]) -> None:
    graph, first = nodes[0].graph, nodes[0]
    operator = getattr(torch.ops.breccia, SEVERAL[len(nodes)]).default
    arguments = (first.args[0], *(part for node in nodes for part in node.args[_OF_WEIGHT]), first.args[-1])
    with graph.inserting_before(first):
        products = graph.call_function(operator, arguments)
        products.meta["val"] = tuple(node.meta["val"] for node in nodes)
        for i, node in enumerate(nodes):
            product = graph.call_function(getitem, (products, i))
            product.meta.update(node.meta)
            node.replace_all_uses_with(product)
    for node in nodes:
        graph.erase_node(node)
