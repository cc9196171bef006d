"""One call for the products of one row by the weights of several layers, such as an attention's queries, keys and values.

A product of one row by a small weight takes less time than its call, its threads and the rounding of its input. Layers keep
their weights, which know nothing of each other. In a graph that Inductor compiles, layers with one input are found by it
(`register`). In eager mode the first of some layers computes the products of all, and the others take theirs if they get the
same input (`join`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import getitem
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx, nn

from breccia import ScalingRecipe
from breccia.backend import dtype_name

from . import frontend
from .nn import ScaledLinear, ScaledWeight
from .operators import SEVERAL, facts_text, repeats_in_c

# ------------------------------------------------------------------------------------------------ compiled graphs

#: Arguments of `breccia::linear`, and those of them that each weight has.
_ARGUMENTS, _OF_WEIGHT = 7, slice(1, 6)
_registered = False


def facts_in_graphs(*facts: Any) -> str:
    """`facts_text` for graphs in which layers may be multiplied together.

    It differs from that of versions without the operators for several weights: else these would find such graphs in Inductor's
    cache.
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

        pattern = matching.CallFunction(torch.ops.breccia.linear.default, *(matching.Arg() for _ in range(_ARGUMENTS)))
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
    users = {user for user in x.users if user.target is node.target and user.args[0] is x and user.args[-1] == facts}
    ordered = [
        each for each in node.graph.find_nodes(op="call_function", target=node.target) if each in users and _is_ready(each)
    ]
    most = max(SEVERAL)
    groups = [ordered[start : start + most] for start in range(0, len(ordered), most)]
    return next((group for group in groups if node in group), [])


def _is_row(x: Any) -> TypeGuard[fx.Node]:
    """Whether an argument is a row on the CPU, of a shape that is known."""
    row = x.meta.get("val") if isinstance(x, fx.Node) else None
    if not isinstance(row, torch.Tensor) or row.ndim < 2 or row.device.type != "cpu":
        return False
    return all(type(length) is int for length in row.shape) and all(length == 1 for length in row.shape[:-1])


def _is_ready(node: fx.Node) -> bool:
    """Whether all that a product needs besides its row is there when the graph begins, and repeats in C."""
    parts = node.args[_OF_WEIGHT]
    bias: Any = parts[-1]
    return all(part is None or (isinstance(part, fx.Node) and part.op in ("placeholder", "get_attr")) for part in parts) and (
        bias is None or bias.meta["val"].dtype is torch.float32
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


# ------------------------------------------------------------------------------------------------ eager mode

#: Layers of a module that multiply the same input in most models, in the order of their calls.
NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
#: After so many rows in succession whose products some layers did not take, layers multiply by themselves.
_MOST_WASTED = 8
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Shared:
    """The products of a row by the weights of layers that multiply it one after the other.

    The first layer computes all of them. Each of the others takes its own, once, for the same unchanged tensor. They are kept
    until then, or until that tensor ends. More rows, inputs that need gradients or are transformed, and layers with a bias or
    hooks are left to each layer.
    """

    def __init__(self, layers: Sequence[ScaledLinear]) -> None:
        self._layers = [weakref.ref(layer) for layer in layers]
        self._operator = getattr(torch.ops.breccia, SEVERAL[len(layers)]).default
        self._pending: tuple[weakref.ref[Tensor], int, dict[int, Tensor]] | None = None
        self._facts: tuple[tuple[Any, ...], str] | None = None
        self._wasted = 0

    def product(self, layer: ScaledLinear, at: int, x: Tensor) -> Tensor | None:
        """The product of `layer`, which is number `at`; None where it has to multiply by itself."""
        if self._layers[at]() is not layer:  # a copy
            return None
        if at == 0:
            return self._first(x)
        pending = self._pending
        if pending is None or pending[0]() is not x:
            return None
        _, version, products = pending
        product = products.pop(at, None) if x._version == version else None
        if not products:
            self._wasted, self._pending = 0, None
        return product

    def _first(self, x: Tensor) -> Tensor | None:
        self._pending = None
        if self._wasted > _MOST_WASTED or not _may_share(x):
            return None
        operands: list[Any] = [x]
        known = None
        for reference in self._layers:
            layer: Any = reference()
            if layer is None or not _is_plain(layer) or layer.in_features != x.shape[-1]:
                return None
            weight: Any = layer._modules["weight"]
            parts = weight._buffers
            for name in _COMPONENTS:
                part = parts[name]
                if part is not None and (type(part) is not Tensor or not part.is_cpu):
                    return None
                operands.append(part)
            operands.append(None)  # no bias
            facts = weight.recipe, weight.layout, weight.padding
            if known is not None and known != facts:
                return None
            known = facts
        products: Sequence[Tensor] = self._operator(*operands, self._text((known, x.dtype)))
        self._wasted += 1
        pending = weakref.ref(x, self._forget), x._version, dict(enumerate(products))
        self._pending = pending
        return pending[2].pop(0)

    def _text(self, facts: Any) -> str:
        if self._facts is None or self._facts[0] != facts:
            (recipe, layout, padding), dtype = facts
            self._facts = (
                facts,
                facts_text(recipe.to_json(), layout.to_json(), padding, dtype_name(torch.empty(0, dtype=dtype))),
            )
        return self._facts[1]

    def _forget(self, row: Any) -> None:
        """Keep nothing for a tensor that has ended."""
        pending = self._pending
        if pending is not None and pending[0] is row:
            self._pending = None


def join(model: nn.Module) -> None:
    """Let the layers of `NAMES` in each module multiply a row together, those of each recipe.

    Layers that cast their inputs, and those of other classes, are left alone.
    """
    if not repeats_in_c():
        return
    for module in model.modules():
        for names in NAMES:
            alike: dict[ScalingRecipe, list[ScaledLinear]] = {}
            for layer in map(vars(module)["_modules"].get, names):
                if _may_join(layer):
                    alike.setdefault(layer.weight.recipe, []).append(layer)
            for layers in alike.values():
                if len(layers) in SEVERAL:
                    shared = Shared(layers)
                    for at, layer in enumerate(layers):
                        layer.shared = shared, at


def _may_join(layer: Any) -> TypeGuard[ScaledLinear]:
    return type(layer) is ScaledLinear and type(layer.weight) is ScaledWeight and _is_plain(layer)


def _may_share(x: Tensor) -> bool:
    """Whether `x` is a row whose changes are counted, and needs nothing but its product."""
    return (
        type(x) is Tensor
        and x.ndim > 1
        and x.numel() == x.shape[-1]
        and x.is_cpu
        and x.dtype in _DTYPES
        and not torch.is_grad_enabled()
        and not x.is_inference()
        and frontend.is_constant(x)
    )


def _is_plain(layer: Any) -> bool:
    """Whether a call of the layer is its product by a weight that stays where it is."""
    weight, hooked = layer._modules["weight"], layer._forward_hooks or layer._forward_pre_hooks
    return (
        type(layer) is ScaledLinear
        and layer.bias is None
        and layer.activation is None
        and weight.keeps_transpose
        and weight.layout.in_order
        and not hooked
        and "forward" not in layer.__dict__
    )


#: The components of a weight, in the order of the operators' arguments.
_COMPONENTS = ("data", "scale", "zero_point", "global_scale")
