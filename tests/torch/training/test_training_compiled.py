"""Layers in training under torch.compile: one operator each way, with the bits of eager mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_operands import FROM_CODES

import breccia_torch
from breccia import TrainingRecipe
from breccia.training import PRESETS
from breccia_torch.nn import TrainingExperts, TrainingLinear
from breccia_torch.training import operands

RECIPES = [
    *map(TrainingRecipe, PRESETS),
    TrainingRecipe("mxfp8", high_precision=("output", "grad_input")),
    TrainingRecipe("nvfp4", high_precision=("grad_weight",)),
    TrainingRecipe("fp8_delayed", high_precision=("output", "grad_weight")),
    *FROM_CODES,
]
OFFSETS = torch.tensor([10, 10, 50], dtype=torch.int32)


@pytest.fixture(autouse=True)
def seeded() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(before)


def compiled(module: Any) -> tuple[Any, list[str]]:
    """A module as one graph, and the operators of breccia in its forward and backward graphs."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    names: list[str] = []

    def listed(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        names.extend(name.removesuffix(".default") for name in calls if name.startswith("breccia"))
        return make_boxed_func(graph.forward)

    return torch.compile(module, backend=aot_autograd(fw_compiler=listed, bw_compiler=listed), fullgraph=True), names


def results(function: Any, layer: nn.Module, x: Tensor, *others: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = function(x, *others)
    y.backward(torch.ones_like(y) * torch.linspace(-1, 1, y.shape[-1]))
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("experts", [False, True], ids=["linear", "experts"])
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_a_layer_is_one_operator_each_way_with_the_bits_of_eager_mode(recipe: TrainingRecipe, experts: bool) -> None:
    layer = TrainingExperts(3, 64, 80, recipe=recipe, seed=1) if experts else TrainingLinear(64, 80, recipe=recipe, seed=1)
    x, others = torch.randn(60, 64), (OFFSETS,) * experts
    twin = copy.deepcopy(layer)
    function, names = compiled(layer)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (layer, twin)]
    for _ in range(3):
        for a, b in zip(results(function, layer, x, *others), results(twin, twin, x, *others), strict=True):
            assert torch.equal(a, b)
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(layer.buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b)
    # One graph each way, in which only constants differ from step to step.
    assert names == ["breccia.training_linear", "breccia.training_linear_backward"]


def test_inference_in_a_graph_keeps_nothing() -> None:
    layer = TrainingLinear(64, 80, recipe="fp8_delayed")
    function, names = compiled(layer)
    with torch.no_grad():
        assert torch.equal(function(torch.ones(4, 64)), layer(torch.ones(4, 64)))
    assert names == ["breccia.training_linear"] and layer.state is not None and not layer.state.pending[0]


def test_batches_of_other_sizes_reuse_a_dynamic_graph() -> None:
    layer = TrainingLinear(64, 80, recipe="fp8_block")
    function, names = compiled(layer)
    for rows in (48, 33, 80, 7):
        x = torch.randn(rows, 64)
        for a, b in zip(results(function, layer, x), results(layer, layer, x), strict=True):
            assert torch.equal(a, b)
    assert len(names) == 4  # the first size, then any


def test_a_weight_is_cast_once_per_step_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    original = operands.cast_operand

    def counted(how: Any, tensor: str, *arguments: Any, **options: Any) -> Any:
        listed.append(tensor)
        return original(how, tensor, *arguments, **options)

    monkeypatch.setattr(operands, "cast_operand", counted)
    layer = TrainingLinear(64, 80, recipe="fp8_block")
    function, _ = compiled(layer)
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(2):
        for _ in range(3):
            function(torch.randn(32, 64, requires_grad=True)).sum().backward()
        optimizer.step()
    assert listed.count("weight") == 2


def test_main_grad_in_a_graph() -> None:
    layer = TrainingLinear(64, 80, recipe="fp8_block")
    x = torch.randn(32, 64, requires_grad=True)
    layer(x).sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    function, _ = compiled(layer)
    for _ in range(2):
        function(x).sum().backward()
    assert layer.weight.grad is None and torch.equal(layer.weight.main_grad, 2 * expected)
    function(x.detach()).sum().backward()  # an operator without results would be omitted
    assert torch.equal(layer.weight.grad, expected) and torch.equal(layer.weight.main_grad, 2 * expected)


def test_autocast_in_a_graph() -> None:
    layer = TrainingLinear(64, 80, recipe="mxfp8")
    function, _ = compiled(layer)
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(32, 64)
        for a, b in zip(results(function, layer, x), results(layer, layer, x), strict=True):
            assert torch.equal(a, b)


@pytest.mark.long
def test_inductor_compiles_a_model_with_checkpoints_and_a_layer_that_is_called_twice() -> None:
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.twice = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(lambda v: self.first(v).relu(), x, use_reentrant=False)
            return self.twice(self.twice(x).relu())

    model = Model()
    breccia_torch.convert_to_training_(model, "fp8_delayed")
    twin = copy.deepcopy(model)
    function = torch.compile(model, fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for n in range(2):
        x = torch.randn(32, 64) * (n + 1)
        found, expected = results(function, model, x), results(twin, twin, x)
        # The two gradients of the shared weight and those of a bias are FP32 sums, whose order Inductor chooses: of 64 terms at
        # most, each of which may err by 2^-24 of the largest.
        for a, b in zip(found, expected, strict=True):
            assert ((a - b).abs() <= 64 * 2.0**-24 * 64 * b.abs().max()).all()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad.copy_(q.grad)
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b)
