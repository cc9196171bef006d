"""Quantized layers in compiled graphs that need no gradient: one operator each, which repeats products as eager layers do."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import breccia
from breccia.dispatch import registry as registries
from breccia_torch import cpu, operators
from breccia_torch.nn import ScaledConv1D, ScaledLinear

RECIPES = ("nvfp4", "q4_1", "q6_k")


def layer_of(recipe: str, bias: bool = True, dtype: torch.dtype = torch.float32, k: int = 256) -> ScaledLinear:
    torch.manual_seed(0)
    return ScaledLinear.from_linear(torch.nn.Linear(k, 48, bias, dtype=dtype), recipe).eval().requires_grad_(False)


def compiled(layer: Any) -> tuple[Any, list[torch.fx.GraphModule]]:
    """A layer traced as one graph, which runs as it is, and its graphs."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(layer, backend=backend, fullgraph=True), graphs


def called(graphs: list[torch.fx.GraphModule]) -> list[str]:
    """The operators of breccia in graphs."""
    names = (str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function")
    return [name.removesuffix(".default") for name in names if name.startswith("breccia")]


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("bias", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)])
def test_a_layer_is_one_operator_with_the_bits_of_the_eager_layer(recipe: str, bias: bool, dtype: torch.dtype) -> None:
    layer = layer_of(recipe, bias, dtype)
    function, graphs = compiled(layer)
    with torch.no_grad():
        for shape in ((1, 1, 256), (256,), (5, 256)):
            x = torch.randn(shape, dtype=dtype)
            for _ in range(3):  # the later ones repeat the first
                y = function(x)
                assert y.dtype == dtype and torch.equal(y, layer(x))
    assert set(called(graphs)) == {"breccia.linear"}


def facts_of(weight: Any, dtype: str = "float32") -> str:
    """What the operator is told besides tensors."""
    return operators.facts_text(weight.recipe.to_json(), weight.layout.to_json(), 0, dtype)


def transformers_conv1d() -> ScaledConv1D:
    """A layer whose weight is (in_features, out_features)."""
    linear = torch.nn.Linear(48, 256, False)  # its weight, (256, 48), is that of the layer
    linear.bias = torch.nn.Parameter(torch.zeros(48))
    return ScaledConv1D.in_place_of(linear, ScaledConv1D.quantized(linear.weight, "int4")).eval().requires_grad_(False)


def test_gradients_exports_activations_and_conv1d_keep_the_operators_of_ops() -> None:
    layer, x = layer_of("int4"), torch.randn(3, 256, requires_grad=True)
    function, graphs = compiled(layer)
    function(x).sum().backward()
    assert x.grad is not None and called(graphs) == ["breccia.matmul"]
    exported = torch.export.export(layer, (torch.randn(3, 256),))  # which a caller may differentiate
    assert "breccia.matmul" in str(exported.graph) and "breccia.linear" not in str(exported.graph)
    with torch.no_grad():
        cast = ScaledLinear.from_linear(torch.nn.Linear(256, 48), "mxfp4", activation="mxfp8").eval()
        function, graphs = compiled(cast)
        function(torch.randn(3, 256))
        assert called(graphs) == ["breccia.cast_matmul"]
        conv = transformers_conv1d()
        function, graphs = compiled(conv)
        function(torch.randn(3, 256))
        assert called(graphs) == ["breccia.matmul"]


def test_other_tensors_in_the_place_of_kept_ones_are_multiplied() -> None:
    layer = layer_of("q4_1")
    function, _ = compiled(layer)
    with torch.no_grad():
        x = torch.randn(1, 256)
        for _ in range(2):
            function(x)
        weight: Any = layer.weight
        weight.scale = weight.scale * 2
        assert torch.equal(function(x), layer(x))
        weight.data.copy_(weight.data.flip(0))  # the same memory
        assert torch.equal(function(x), layer(x))
        weight.zero_point.data = weight.zero_point.data.clone()
        assert torch.equal(function(x), layer(x))
        layer.bias = torch.nn.Parameter(torch.randn(48), requires_grad=False)
        assert torch.equal(function(x), layer(x))
        many = torch.randn(1, 512)[:, ::2]
        assert torch.equal(function(many), layer(many))


def test_products_and_unaligned_inputs_repeat_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph may write into the memory of a product what the next layer reads."""
    from breccia.arrays.frameworks import Device
    from breccia_native import availability

    if reason := availability.missing_products(Device("cpu")):
        pytest.skip(reason)
    layer, x, made = layer_of("q4_1"), torch.randn(1, 256), list[Any]()
    room = torch.empty(300)
    start = next(i for i in range(16) if room[i:].data_ptr() % 64)
    unaligned = room[start : start + 256].view(1, 256).copy_(x)
    weight: Any = layer.weight
    arguments = weight.data, weight.scale, weight.zero_point, None, layer.bias, facts_of(weight)
    with torch.no_grad():
        product = torch.ops.breccia.linear(x, *arguments)
        again = cpu._again
        monkeypatch.setattr(cpu, "_again", lambda *operands: made.append(operands) or again(*operands))
        for _ in range(9):
            found = torch.ops.breccia.linear(unaligned, *arguments)
            assert torch.equal(found, product) and found.data_ptr() % 64 == 0
    assert not made


def test_what_is_kept_goes_with_the_weight() -> None:
    cpu._kept.clear()
    cpu._layers.clear()
    layer = layer_of("int4")
    weight, x = layer.weight, torch.randn(1, 256)
    parts = weight.data, weight.scale, weight.zero_point, weight.global_scale, None
    found = [torch.ops.breccia.linear(x, *parts, facts_of(weight)) for _ in range(2)]
    assert torch.equal(*found) and len(cpu._kept) == 1
    assert torch.ops.breccia.linear(x, *parts, facts_of(weight, "bfloat16")).dtype == torch.bfloat16
    del layer, weight, parts
    gc.collect()
    assert not cpu._kept and not cpu._layers


# ------------------------------------------------------------------------------------------------ the compiled operator


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The operands for which the compiled operator asks Python. Skips where the operator is Python's."""
    if not hasattr(torch.ops.breccia, "linear_by_choice"):
        pytest.skip("the operator in C needs torch 2.10 and breccia-native's products")
    found, choose = list[Any](), operators._multiply_on_cpu
    monkeypatch.setattr(operators, "_multiply_on_cpu", lambda *operands: found.append(operands[0]) or choose(*operands))
    return found


def operands_of(layer: ScaledLinear, dtype: str = "float32") -> tuple[Any, ...]:
    w: Any = layer.weight
    return w.data, w.scale, w.zero_point, w.global_scale, layer.bias, facts_of(w, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_repeated_products_ask_nothing_of_python(recipe: str, dtype: str, asked: list[Any]) -> None:
    layer = layer_of(recipe)
    arguments, kind = operands_of(layer, dtype), getattr(torch, dtype)
    with torch.no_grad():
        for shape in ((1, 256), (1, 1, 256), (2, 3, 256)):
            asked.clear()
            for _ in range(4):
                x = torch.randn(shape, dtype=kind)
                expected = breccia.matmul(x, layer.weight.tensor.mT, dtype, bias=layer.bias)
                found = torch.ops.breccia.linear(x, *arguments)
                assert found.dtype == kind and found.is_contiguous() and torch.equal(found, expected)
            assert len(asked) == 1


def test_python_is_asked_when_anything_has_changed(asked: list[Any]) -> None:
    layer, x = layer_of("nvfp4"), torch.randn(1, 256)
    weight: Any = layer.weight

    def check(asks: bool, x: torch.Tensor = x) -> None:
        for again in (False, False, True):
            asked.clear()
            found = torch.ops.breccia.linear(x, *operands_of(layer))
            assert torch.equal(found, breccia.matmul(x, weight.tensor.mT, bias=layer.bias))
            assert not again or bool(asked) is asks

    with torch.no_grad():
        check(False)
        weight.data.copy_(weight.data.flip(0))  # other numbers in the same memory
        asked.clear()
        check(False)
        weight.global_scale.mul_(2)  # the number is part of the call
        torch.ops.breccia.linear(x, *operands_of(layer))
        assert len(asked) == 1
        weight.scale = weight.scale.clone()
        check(False)
        layer.bias = torch.nn.Parameter(torch.randn(48), requires_grad=False)
        check(False)
        registries.reload()
        asked.clear()
        torch.ops.breccia.linear(x, *operands_of(layer))
        assert len(asked) == 1
        check(True, torch.randn(1, 512)[:, ::2])  # not in one piece
        check(True, torch.full((1, 256), 1e35))  # beyond the limits of the kernel
        check(False, torch._neg_view(torch.randn(1, 256)))  # torch resolves it first


def test_the_number_of_threads_changes_neither_bits_nor_what_is_kept(asked: list[Any]) -> None:
    layer = ScaledLinear.from_linear(torch.nn.Linear(4096, 1024, False), "int4").eval().requires_grad_(False)
    x, arguments, before = torch.randn(1, 4096), operands_of(layer), breccia.get_num_threads()
    expected = torch.ops.breccia.linear(x, *arguments)
    try:
        for number in (1, 3, before):
            breccia.set_num_threads(number)
            assert torch.equal(torch.ops.breccia.linear(x, *arguments), expected)
    finally:
        breccia.set_num_threads(before)
    assert len(asked) == 1


def test_errors_of_the_choice_are_told(asked: list[Any]) -> None:
    *arguments, facts = operands_of(layer_of("int4"))
    with pytest.raises(RuntimeError, match=r"ValueError: cannot reshape"):
        torch.ops.breccia.linear(torch.randn(2, 100), *arguments, facts)
    with pytest.raises(RuntimeError, match=r"ValueError: non-hexadecimal number"):
        torch.ops.breccia.linear(torch.randn(2, 256), *arguments, "facts")
    assert len(asked) == 2


def test_threads_of_python_multiply_and_forget_side_by_side(asked: list[Any]) -> None:
    layers = [layer_of("q4_1") for _ in range(4)]
    x = torch.randn(1, 256)
    expected = breccia.matmul(x, layers[0].weight.tensor.mT, bias=layers[0].bias)

    def work(n: int) -> bool:
        with torch.no_grad():
            found = [torch.ops.breccia.linear(x, *operands_of(layers[(n + i) % 4])) for i in range(200)]
            cpu._layers.clear()
        return all(torch.equal(each, expected) for each in found)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(16)))


def test_without_its_functions_the_operator_is_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_FUNCTIONS", ("torch_of_another_version",))
    assert cpu.operate() is False


def test_the_operator_keeps_the_rules_of_torch() -> None:
    layer = layer_of("int4")
    weight: Any = layer.weight
    arguments = (
        *(torch.randn(2, 3, 256), weight.data, weight.scale, None, None, layer.bias.detach()),
        facts_of(weight, "float16"),
    )
    torch.library.opcheck(torch.ops.breccia.linear.default, arguments, test_utils=("test_schema", "test_faketensor"))
    each = torch.vmap(lambda row: torch.ops.breccia.linear(row, *arguments[1:]))(arguments[0])
    assert torch.equal(each, torch.ops.breccia.linear(*arguments))
    elsewhere = operators._linear(*arguments)
    assert torch.equal(elsewhere, torch.ops.breccia.linear(*arguments))


def test_graphs_multiply_by_the_kernel_that_the_environment_prefers(monkeypatch: pytest.MonkeyPatch) -> None:
    from breccia.arrays.frameworks import Device
    from breccia_native import availability

    if reason := availability.missing_products(Device("cpu")):
        pytest.skip(reason)
    layer, x = layer_of("q8_0", False), torch.randn(1, 256)
    function, _ = compiled(layer)
    named = breccia.matmul(x, layer.weight.tensor.mT, prefer="torch.cpu.matmul_int8")
    try:
        with torch.no_grad():
            exact = [function(x) for _ in range(2)][1]
            monkeypatch.setenv("BRECCIA_PREFER", "torch.cpu.matmul_int8")
            registries.reload()
            for _ in range(3):
                assert torch.equal(function(x), named) and torch.equal(layer(x), named)
            assert not torch.equal(named, exact)
    finally:
        monkeypatch.delenv("BRECCIA_PREFER")
        registries.reload()
