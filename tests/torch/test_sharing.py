"""One call for the products of a row by several layers: with the bits, states and copies of layers that multiply alone."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

import breccia
import breccia_torch
from breccia_torch import operators, sharing
from breccia_torch.sharing import join

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
    found = Attention(bias).to(dtype).eval().requires_grad_(False)
    breccia_torch.quantize_(found, recipe, **options)
    return found


def joined(recipe: str = "q4_1", dtype: torch.dtype = torch.float32) -> Attention:
    found = attention(recipe, dtype)
    join(found)
    assert all(layer.shared is not None for layer in found.layers)
    return found


def assert_same(ours: Any, theirs: Any, x: torch.Tensor) -> None:
    for y, wanted in zip(ours(x), theirs(x), strict=True):
        assert y.dtype == wanted.dtype and y.is_contiguous() and torch.equal(y, wanted)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The inputs that layers multiply together in eager mode."""
    found, first = list[torch.Tensor](), sharing.Shared._first

    def counted(self: sharing.Shared, x: torch.Tensor) -> torch.Tensor | None:
        product = first(self, x)
        found.extend([] if product is None else [x])
        return product

    monkeypatch.setattr(sharing.Shared, "_first", counted)
    return found


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


def test_layers_of_different_kinds_are_multiplied_one_by_one() -> None:
    """The operator is told the same facts, and finds other layers where they were kept."""
    layers, x = [attention(recipe).q_proj for recipe in ("q4_1", "q4_1")], torch.randn(1, K)
    layers[1].weight.scale = layers[1].weight.scale.float()
    layers[1].weight.zero_point = layers[1].weight.zero_point.float()
    for _ in range(3):
        products = torch.ops.breccia.two_linears(x, *operands_of(layers))
        assert all(torch.equal(y, breccia.matmul(x, layer.weight.tensor.mT)) for y, layer in zip(products, layers, strict=True))


def test_errors_of_the_operators_are_told() -> None:
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


def test_an_exported_graph_has_the_operator_of_ops() -> None:
    with torch.no_grad():
        graph = str(torch.export.export(joined(), (torch.randn(1, K),)).graph)
    assert graph.count("torch.ops.breccia.matmul") == 3 and "linears" not in graph


# ------------------------------------------------------------------------------------------------ eager mode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_have_the_bits_of_each_layer_alone(recipe: str, dtype: torch.dtype) -> None:
    ours, theirs = joined(recipe, dtype), attention(recipe, dtype)
    with torch.no_grad():
        for shape in ((K,), (1, K), (1, 1, K), (5, K)):
            for _ in range(3):  # layers keep what repeats a product
                assert_same(ours, theirs, torch.randn(shape, dtype=dtype))


def test_one_row_is_multiplied_once_and_other_inputs_by_each_layer(rows: list[torch.Tensor]) -> None:
    ours, theirs, row = joined(), attention(), torch.randn(1, K)
    with torch.no_grad():
        assert_same(ours, theirs, row)
        assert len(rows) == 1
        for shape in ((2, K), (0, K)):
            assert_same(ours, theirs, torch.randn(shape))
        assert len(rows) == 1
        other = torch.randn(1, K)
        for _ in range(2):
            y = ours.q_proj(row), ours.k_proj(other), ours.v_proj(row)
            assert all(map(torch.equal, y, (theirs.q_proj(row), theirs.k_proj(other), theirs.v_proj(row))))
        assert torch.equal(ours.k_proj(other), theirs.k_proj(other))  # without the first layer
        ours.q_proj(row)
        row.mul_(2)
        assert torch.equal(ours.k_proj(row), theirs.k_proj(row))
        first, second = ours.k_proj(row), ours.k_proj(row)
        assert first.data_ptr() != second.data_ptr()


def test_results_have_memory_of_their_own_and_may_be_changed() -> None:
    ours, theirs, row = joined(), attention(), torch.randn(1, K)
    with torch.no_grad():
        for _ in range(2):
            y = ours(row)
        wanted = theirs(row)
        y[0].zero_()
        assert torch.equal(y[1], wanted[1]) and not any(each._is_view() for each in y)


def test_gradients_transforms_and_inference_tensors_are_left_to_each_layer(rows: list[torch.Tensor]) -> None:
    ours, theirs = joined(), attention()
    gradients = []
    for model in (ours, theirs):
        x = torch.linspace(-1, 1, K)[None].requires_grad_()
        torch.cat(model(x), -1).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    xs = torch.randn(3, 1, K)
    with torch.no_grad():
        for y, wanted in zip(torch.vmap(ours)(xs), torch.vmap(theirs)(xs), strict=True):
            assert torch.equal(y, wanted)
    with torch.inference_mode():  # changes of such tensors are not counted
        x = torch.randn(1, K)
        ours.q_proj(x)
        assert torch.equal(ours.k_proj(x.mul_(2)), theirs.k_proj(x))
    assert rows == []


def test_hooks_and_other_forwards_are_left_to_each_layer(rows: list[torch.Tensor]) -> None:
    ours, theirs, row = joined(), attention(), torch.randn(1, K)
    with torch.no_grad():
        hook = ours.k_proj.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
        assert torch.equal(ours(row)[1], theirs.k_proj(row * 2)) and rows == []
        hook.remove()
        assert_same(ours, theirs, row)
        assert len(rows) == 1
        ours.v_proj.forward = lambda x: x
        assert ours(row)[2] is row and len(rows) == 1


def test_nothing_is_kept_for_an_input_that_has_ended() -> None:
    model = joined()
    shared = model.q_proj.shared[0]
    with torch.no_grad():
        model(row := torch.randn(1, K))
        assert shared._pending is None
        model.q_proj(row)
        ended, product = weakref.ref(row), weakref.ref(shared._pending[2][1])
        del row
        gc.collect()
        assert ended() is None and product() is None and shared._pending is None


def test_layers_whose_products_are_not_taken_multiply_by_themselves(rows: list[torch.Tensor]) -> None:
    """As in attention to another input."""
    ours, theirs = joined(), attention()
    with torch.no_grad():
        for _ in range(40):
            row, other = torch.randn(1, K), torch.randn(1, K)
            assert torch.equal(ours.q_proj(row), theirs.q_proj(row)) and torch.equal(ours.k_proj(other), theirs.k_proj(other))
    assert len(rows) < 12


def test_a_replaced_layer_is_neither_multiplied_nor_kept(rows: list[torch.Tensor]) -> None:
    ours, theirs, row = joined(), attention(), torch.randn(1, K)
    with torch.no_grad():
        before = weakref.ref(ours.k_proj)
        ours.k_proj = copy.deepcopy(theirs.v_proj)
        gc.collect()
        assert before() is None
        y = ours(row)
        assert torch.equal(y[0], theirs.q_proj(row)) and torch.equal(y[1], y[2]) and rows == []


def test_states_copies_and_files_are_those_of_layers_alone(tmp_path: Path) -> None:
    ours, theirs, row = joined(), attention(), torch.randn(1, K)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    with torch.no_grad():
        for found in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(file, weights_only=False)):
            assert not any(layer.shared for layer in found.layers) and repr(found) == repr(theirs)
            found.k_proj.weight.scale.zero_()
            assert not torch.equal(found(row)[1], theirs(row)[1])
            assert_same(ours, theirs, row)
    states = ours.state_dict(), theirs.state_dict()
    assert states[0].keys() == states[1].keys() and all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    save_model(ours, str(tmp_path / "model.safetensors"))
    fresh = joined()
    fresh.q_proj.weight.scale.zero_()
    load_model(fresh, str(tmp_path / "model.safetensors"))
    with torch.no_grad():
        assert_same(fresh, theirs, row)
        assert_same(fresh.to(torch.bfloat16), theirs.to(torch.bfloat16), row.bfloat16())
        fresh.k_proj.to("meta")
        assert torch.equal(fresh.q_proj(row), theirs.q_proj(row))


def test_a_replica_with_a_weight_of_its_own_multiplies_by_itself() -> None:
    """torch.nn.DataParallel copies what layers hold without asking them."""
    ours, row = joined(), torch.randn(1, K)
    replica = ours.k_proj._replicate_for_data_parallel()
    replica._modules["weight"] = ours.v_proj.weight
    with torch.no_grad():
        for _ in range(2):
            ours.q_proj(row)
            assert torch.equal(replica(row), attention().v_proj(row))


def test_accelerate_saves_the_model_as_layers_alone(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from safetensors.torch import load_file

    for model, name in ((joined(), "ours"), (attention(), "theirs")):
        accelerate.Accelerator(cpu=True).save_model(model, tmp_path / name)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_threads_with_inputs_of_their_own_get_their_products() -> None:
    ours, theirs = joined(), attention()
    xs = torch.randn(8, 1, K).unbind()
    with torch.no_grad():
        wanted = [theirs(x) for x in xs]

    def work(n: int) -> bool:
        with torch.no_grad():  # of this thread
            return all(all(map(torch.equal, ours(xs[n]), wanted[n])) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


def test_layers_of_one_recipe_are_joined_beside_one_of_another() -> None:
    ours, theirs = (attention({"k_proj.weight": "q8_0", "*": "q4_1"}) for _ in range(2))
    join(ours)
    assert [layer.shared is not None for layer in ours.layers] == [True, False, True]
    with torch.no_grad():
        assert_same(ours, theirs, torch.randn(1, K))


@pytest.mark.parametrize(
    "made",
    [
        lambda: attention(bias=True),
        lambda: attention("mxfp8", activation="mxfp8"),
        lambda: attention({"k_proj.weight": "q8_0", "v_proj.weight": "keep", "*": "q4_1"}),
    ],
    ids=["biases", "cast inputs", "one of each recipe"],
)
def test_other_layers_are_left_alone(made: Any) -> None:
    found = made()
    join(found)
    assert not any(getattr(layer, "shared", None) for layer in found.layers)
