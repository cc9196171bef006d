"""Layers that multiply a row of input together: with the bits, the states and the copies of layers that multiply alone."""

from __future__ import annotations

import copy
import io
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import breccia
import breccia_torch
from breccia_torch.joining import join

K = 256
NAMES = ("q_proj", "k_proj", "v_proj")
RECIPES = ("q4_1", "q6_k", "int8", "mxfp8")


class Attention(nn.Module):
    """Three projections of one input, of different sizes."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        for name, rows in zip(NAMES, (96, 32, 48), strict=True):
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
    assert are_joined(found)
    return found


def are_joined(model: Attention) -> bool:
    return all(layer.joined is not None for layer in model.layers)


def assert_same(ours: Attention, theirs: Attention, x: torch.Tensor) -> None:
    for y, wanted in zip(ours(x), theirs(x), strict=True):
        assert y.dtype == wanted.dtype and y.is_contiguous() and torch.equal(y, wanted)


def rows_of_products(model: Attention, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of rows of each input that the layers multiply together."""
    whole, counted = model.layers[0].joined[0]._layer, []
    forward = whole.forward
    monkeypatch.setattr(whole, "forward", lambda x: (counted.append(x.numel() // K), forward(x))[1])
    return counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_have_the_bits_of_each_layer_alone(recipe: str, dtype: torch.dtype) -> None:
    ours, theirs = joined(recipe, dtype), attention(recipe, dtype)
    with torch.no_grad():
        for shape in ((K,), (1, K), (1, 1, K), (5, K)):
            for _ in range(3):  # layers keep what repeats a product
                assert_same(ours, theirs, torch.randn(shape, dtype=dtype))


def test_one_row_is_multiplied_once_and_other_inputs_by_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = joined(), attention()
    counted, row = rows_of_products(ours, monkeypatch), torch.randn(1, K)
    with torch.no_grad():
        assert_same(ours, theirs, row)
        assert counted == [1]
        for shape in ((2, K), (0, K)):
            assert_same(ours, theirs, torch.randn(shape))
        assert_same(ours, theirs, row.clone())
        assert counted == [1, 1]
        y = ours.q_proj(row), ours.k_proj(other := torch.randn(1, K)), ours.v_proj(row)
        wanted = theirs.q_proj(row), theirs.k_proj(other), theirs.v_proj(row)
        assert all(map(torch.equal, y, wanted))


def test_inputs_that_need_gradients_or_are_transformed_are_multiplied_by_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = joined(), attention()
    counted = rows_of_products(ours, monkeypatch)
    gradients = []
    for model in (ours, theirs):
        x = torch.linspace(-1, 1, K).requires_grad_()
        torch.cat(model(x)).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    xs = torch.randn(3, 1, K)
    with torch.no_grad():
        for y, wanted in zip(torch.vmap(ours)(xs), torch.vmap(theirs)(xs), strict=True):
            torch.testing.assert_close(y, wanted)
    assert counted == []


def test_weights_are_rows_of_one_memory_and_nothing_is_kept_twice() -> None:
    ours, theirs = joined(), attention()
    for part in ("data", "scale", "zero_point"):
        memory = {getattr(layer.weight, part).untyped_storage().data_ptr() for layer in ours.layers}
        size = sum(getattr(layer.weight, part).nbytes for layer in theirs.layers)
        assert len(memory) == 1 and getattr(ours.q_proj.weight, part).untyped_storage().nbytes() == size
    whole = ours.q_proj.joined[0]._layer.weight
    assert whole.data.data_ptr() == ours.q_proj.weight.data.data_ptr()


def test_states_and_names_are_those_of_the_layers() -> None:
    ours, theirs = joined(), attention()
    assert repr(ours) == repr(theirs)
    states = ours.state_dict(), theirs.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    torch.manual_seed(1)
    fresh = Attention().eval().requires_grad_(False)
    breccia_torch.quantize_(fresh, "q4_1")
    join(fresh)
    fresh.load_state_dict(torch.load(file))  # into the memory that all layers share
    with torch.no_grad():
        assert are_joined(fresh)
        assert_same(fresh, theirs, torch.randn(1, K))


def test_copies_multiply_alone_until_they_are_joined() -> None:
    ours = joined()
    torch.save(ours, file := io.BytesIO())
    file.seek(0)
    for found in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert not any(layer.joined for layer in found.layers)
        with torch.no_grad():
            found.q_proj.weight.data.zero_()
            assert not torch.equal(found.q_proj.weight.data, ours.q_proj.weight.data)
            join(found)
            assert are_joined(found)
            assert torch.equal(found(x := torch.randn(1, K))[1], ours(x)[1])


def test_layers_multiply_alone_once_a_weight_has_another_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = joined(), attention()
    counted, row = rows_of_products(ours, monkeypatch), torch.randn(1, K)
    for model in (ours, theirs):
        model.k_proj.weight.take(breccia.cast(torch.ones(32, K), "q4_1"))
    with torch.no_grad():
        assert_same(ours, theirs, row)
    assert counted == []


def test_a_model_that_moves_keeps_no_memory_of_joined_weights() -> None:
    ours = joined()
    whole = weakref.ref(ours.q_proj.joined[0])
    ours.to("meta")
    assert whole() is None and not are_joined(ours)


def test_a_compiled_graph_has_one_operator_for_a_row() -> None:
    ours, theirs = joined(), attention()
    products: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        products.append(str(graph.graph).count("torch.ops.breccia.linear"))
        return graph.forward

    torch._dynamo.reset()
    function = torch.compile(ours, backend=backend, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(1, 1, K)
            assert all(map(torch.equal, function(x), theirs(x)))
        ours.k_proj.weight.take(theirs.k_proj.weight.tensor)
        assert all(map(torch.equal, function(x), theirs(x)))
    assert products == [1, 3]


def test_layers_of_one_recipe_are_joined_beside_one_of_another() -> None:
    ours, theirs = (attention({"k_proj.weight": "q8_0", "*": "q4_1"}) for _ in range(2))
    join(ours)
    assert [layer.joined is not None for layer in ours.layers] == [True, False, True]
    with torch.no_grad():
        assert_same(ours, theirs, torch.randn(1, K))


@pytest.mark.parametrize(
    "made",
    [
        lambda: attention(bias=True),
        lambda: attention("mxfp8", activation="mxfp8"),
        lambda: attention("nvfp4"),  # each weight has a scale of its own for the whole tensor
        lambda: attention({"k_proj.weight": "q8_0", "v_proj.weight": "keep", "*": "q4_1"}),
    ],
    ids=["biases", "cast inputs", "scales of tensors", "one of each recipe"],
)
def test_other_layers_are_left_alone(made: Any) -> None:
    found = made()
    before = {name: value.data_ptr() for name, value in found.state_dict().items() if "_extra" not in name}
    join(found)
    assert not any(getattr(layer, "joined", None) for layer in found.layers)
    assert before == {name: value.data_ptr() for name, value in found.state_dict().items() if "_extra" not in name}
