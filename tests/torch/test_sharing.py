"""One call for the products of a row by several layers: with the bits of layers that multiply alone."""

from __future__ import annotations

import zipfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import breccia
import breccia_torch
from breccia_torch import operators, sharing

K = 256
NAMES = ("q_proj", "k_proj", "v_proj")
RECIPES = ("q4_1", "q6_k", "int8", "nvfp4", "mxfp8")

pytestmark = pytest.mark.skipif(not operators.repeats_in_c(), reason="the operators in C need torch 2.10 and breccia-native")


class Attention(nn.Module):
    """Three projections of one input, of different sizes."""

    q_proj: Any
    k_proj: Any
    v_proj: Any

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        for name, rows in zip(NAMES, (100, 32, 50), strict=True):
            setattr(self, name, nn.Linear(K, rows, bias))

    @property
    def layers(self) -> list[Any]:
        return [getattr(self, name) for name in NAMES]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in self.layers]


def attention(recipe: Any = "q4_1", dtype: torch.dtype = torch.float32, bias: bool = False, **options: Any) -> Attention:
    torch.manual_seed(0)
    module = Attention(bias).to(dtype).eval().requires_grad_(False)
    breccia_torch.quantize_(module, recipe, **options)
    return module


def assert_same(ours: Any, theirs: Any, x: torch.Tensor) -> None:
    for y, wanted in zip(ours(x), theirs(x), strict=True):
        assert y.dtype == wanted.dtype and y.is_contiguous() and torch.equal(y, wanted)


# ------------------------------------------------------------------------------------------------ the operators


def operands_of(layers: list[Any], dtype: str = "float32") -> tuple[Any, ...]:
    w = layers[0].weight
    facts = operators.facts_text(w.recipe.to_json(), w.layout.to_json(), w.padding, dtype)
    parts = [[w.data, w.scale, w.zero_point, w.global_scale] for w in (layer.weight for layer in layers)]
    biases = [layer.bias for layer in layers]
    return (*chain.from_iterable([*each, bias] for each, bias in zip(parts, biases, strict=True)), facts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_operators_give_each_layer_the_bits_of_its_product(recipe: str, bias: bool, dtype: str) -> None:
    layers = attention(recipe, bias=bias).layers
    for count, name in operators.SEVERAL.items():
        operator, arguments = getattr(torch.ops.breccia, name), operands_of(layers[:count], dtype)
        for shape in ((1, K), (1, 1, K), (2, 3, K)):
            for _ in range(3):  # the later ones repeat the first
                x = torch.randn(shape, dtype=getattr(torch, dtype))
                products = operator(x, *arguments)
                assert len(products) == count
                for y, layer in zip(products, layers, strict=False):
                    wanted = breccia.matmul(x, layer.weight.tensor.mT, dtype, bias=layer.bias)
                    assert y.dtype == wanted.dtype and y.is_contiguous() and torch.equal(y, wanted)


def test_operators_notice_other_numbers_tensors_and_inputs() -> None:
    layers, x = attention("nvfp4").layers, torch.randn(1, K)

    def check(x: torch.Tensor = x) -> None:
        for _ in range(2):
            products = torch.ops.breccia.three_linears(x, *operands_of(layers))
            for y, layer in zip(products, layers, strict=True):
                assert torch.equal(y, breccia.matmul(x, layer.weight.tensor.mT))

    check()
    weight = layers[1].weight
    weight.data.copy_(weight.data.flip(0))  # the same memory
    check()
    weight.global_scale.mul_(2)
    check()
    layers[2].weight.scale = layers[2].weight.scale.flip(0)
    check()
    check(torch.randn(1, 2 * K)[:, ::2])  # not in one piece
    check(torch.full((1, K), 1e35))  # beyond the limits of the kernel
    check(torch.randn(1 + K)[1:][None])  # not aligned


def test_products_are_repeated_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    multiply = operators._multiply_on_cpu

    def noted(*operands: Any) -> torch.Tensor:
        asked.append(operands)
        return multiply(*operands)

    monkeypatch.setattr(operators, "_multiply_on_cpu", noted)
    arguments = operands_of(attention().layers)
    for count in (3, 3, 3):
        torch.ops.breccia.three_linears(torch.randn(1, K), *arguments)
        assert len(asked) == count  # Python chose a kernel for each weight once


def test_a_bias_that_has_ended_is_another_than_none() -> None:
    *parts, _, facts = operands_of([attention().q_proj])
    x, bias = torch.randn(1, K), torch.full((100,), 1e6)
    for _ in range(2):
        torch.ops.breccia.linear(x, *parts, bias, facts)
    wanted = torch.ops.breccia.linear(x, *(part.clone() if part is not None else None for part in parts), None, facts)
    bias.fill_(torch.nan)
    del bias
    assert torch.equal(torch.ops.breccia.linear(x, *parts, None, facts), wanted)


def test_writes_between_two_products_keep_them_apart() -> None:
    """As in graphs in which Inductor keeps operations that write."""
    w, x = attention().q_proj.weight, torch.randn(1, K)
    graph = torch.fx.Graph()
    row, *parts = (graph.placeholder(name) for name in ("x", "data", "scale", "zeros"))
    facts = operators.facts_text(w.recipe.to_json(), w.layout.to_json(), w.padding, "float32")
    products: list[torch.fx.Node] = []
    for region in range(2):
        arguments = (row, *parts, None, None, facts)
        products.append(graph.call_function(torch.ops.breccia.linear.default, arguments))
        products[-1].meta |= {"val": torch.empty(1, 100), "mutation_region_id": region}
    graph.output(tuple(products))
    for node, value in zip((row, *parts), (x, w.data, w.scale, w.zero_point), strict=True):
        node.meta["val"] = value
    assert sharing._alike(products[0]) == [products[0]]
    products[1].meta["mutation_region_id"] = 0
    assert sharing._alike(products[0]) == products


def test_without_the_operators_no_pattern_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_registered", False)
    monkeypatch.setattr(sharing, "repeats_in_c", lambda: False)
    sharing.register()
    assert not sharing._registered


def test_layers_of_different_kinds_are_multiplied_one_by_one() -> None:
    """The operator gets the same facts, and finds other layers where they were kept."""
    layers, x = [attention(recipe).q_proj for recipe in ("q4_1", "q4_1")], torch.randn(1, K)
    layers[1].weight.scale = layers[1].weight.scale.float()
    layers[1].weight.zero_point = layers[1].weight.zero_point.float()
    for _ in range(3):
        products = torch.ops.breccia.two_linears(x, *operands_of(layers))
        assert all(torch.equal(y, breccia.matmul(x, layer.weight.tensor.mT)) for y, layer in zip(products, layers, strict=True))


def test_errors_of_the_operators_are_reported() -> None:
    *arguments, facts = operands_of(attention().layers)
    with pytest.raises(RuntimeError, match=r"ValueError: cannot reshape"):
        torch.ops.breccia.three_linears(torch.randn(1, 100), *arguments, facts)


def test_operators_keep_the_rules_of_torch() -> None:
    arguments = torch.randn(1, K), *operands_of(attention().layers)
    torch.library.opcheck(torch.ops.breccia.three_linears.default, arguments, test_utils=("test_schema", "test_faketensor"))
    for y, wanted in zip(operators._linears(*arguments), torch.ops.breccia.three_linears(*arguments), strict=True):
        assert torch.equal(y, wanted)


# ------------------------------------------------------------------------------------------------ compiled graphs


def compiled(model: Any, x: torch.Tensor) -> tuple[Any, str]:
    """A model compiled by Inductor for inputs like `x`, and its code."""
    from torch._functorch import config as of_graphs
    from torch._inductor import config as of_code
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    function = torch.compile(model, fullgraph=True)
    with torch.no_grad(), of_code.patch(fx_graph_cache=False), of_graphs.patch(enable_autograd_cache=False):
        _, codes = run_and_get_code(function, x)
    return function, "".join(codes)


def calls_in(code: str) -> list[str]:
    """The operators of layers that code calls, in its order."""
    names = (line.partition("= torch.ops.breccia.")[2].partition(".")[0] for line in code.splitlines())
    return [name for name in names if name]


@pytest.mark.parametrize("recipe", ["q4_1", "nvfp4"])
def test_a_compiled_graph_multiplies_a_row_in_one_call(recipe: str) -> None:
    model = attention(recipe)
    function, code = compiled(model, torch.randn(1, 1, K))
    assert calls_in(code) == ["three_linears"]
    with torch.no_grad():
        for _ in range(3):
            assert_same(function, model, torch.randn(1, 1, K))
        x = torch.randn(1, 1, K)
        model.k_proj.weight.scale = model.k_proj.weight.scale.flip(0)
        assert_same(function, model, x)
        model.v_proj.weight.take(breccia.cast(torch.ones(50, K), recipe))
        assert_same(function, model, x)


class Twice(Attention):
    """Layers with two inputs: the second is the first, changed in place."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone()
        first = self.q_proj(x), self.v_proj(x)
        x.mul_(2)
        return [*first, self.k_proj(x)]


def test_a_compiled_graph_multiplies_another_input_by_itself() -> None:
    torch.manual_seed(0)
    model = breccia_torch.quantize_(found := Twice().eval().requires_grad_(False), "q4_1") and found
    function, code = compiled(model, torch.randn(1, K))
    assert sorted(calls_in(code)) == ["linear", "two_linears"]
    with torch.no_grad():
        assert_same(function, model, torch.randn(1, K))


def test_compiled_graphs_of_more_rows_and_of_other_recipes_have_a_call_for_each_layer() -> None:
    assert calls_in(compiled(attention(), torch.randn(2, K))[1]) == ["linear"] * 3
    mixed = attention({"k_proj.weight": "q8_0", "*": "q4_1"})
    assert sorted(calls_in(compiled(mixed, torch.randn(1, K))[1])) == ["linear", "two_linears"]


@pytest.mark.long
@pytest.mark.parametrize("strict", [False, True])
def test_layers_exported_without_gradients_take_any_batch(strict: bool) -> None:
    rows, model = torch.export.Dim("rows", min=1, max=64), attention(bias=True)
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(4, K),), dynamic_shapes=({0: rows},), strict=strict)
        assert str(program.graph).count("torch.ops.breccia.linear") == 3
        for count in (1, 33):
            assert_same(program.module(), model, torch.randn(count, K))


@pytest.mark.long
@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 crashed where it loaded any program of AOTInductor")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's AOTInductor of its own pytrees
def test_a_model_compiled_ahead_of_time_multiplies_a_row_once(tmp_path: Path) -> None:
    model, rows = attention(bias=True), [torch.randn(1, K) for _ in range(3)]
    with torch.no_grad():
        program = torch.export.export(model, (rows[0],), strict=True)
        assert str(program.graph).count("torch.ops.breccia.linear") == 3
        configs = {"aot_inductor.package_constants_in_so": False}
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2"), inductor_configs=configs
        )
        ahead = torch._inductor.aoti_load_package(package)
        tensors = dict(model.named_buffers()) | dict(model.named_parameters())
        constants = {name: tensors[name] for name in ahead.get_constant_fqns()}
        ahead.load_constants(constants, check_full_update=True, user_managed=True)
        for x in rows:
            assert_same(ahead, model, x)
    with zipfile.ZipFile(package) as files:
        (code,) = (files.read(name).decode() for name in files.namelist() if name.endswith("wrapper.cpp"))
    assert "three_linears" in code
