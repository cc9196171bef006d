"""TrainingExperts: grouped GEMMs both ways, with rows of zeros between experts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from training_operands import FROM_CODES

import breccia
from breccia import LayoutError, ScaledTensor, ShapeError, TrainingRecipe, UnsupportedError
from breccia.kernels import bounds, composites
from breccia.training import PRESETS
from breccia_torch.nn import TrainingExperts
from breccia_torch.training.experts import Places, step_of

IN, OUT = 144, 80
#: Experts without rows at the start, in the middle and at the end; the last rows belong to none.
OFFSETS = torch.tensor([0, 10, 10, 150, 190, 190], dtype=torch.int32)
ROWS = 200
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")])
RECIPES = [*map(TrainingRecipe, PRESETS), TrainingRecipe("nvfp4", high_precision=("grad_weight",)), *FROM_CODES]


@pytest.fixture(autouse=True)
def seeded() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def exact(x: Any) -> Tensor:
    return (breccia.dequantize(x) if isinstance(x, ScaledTensor) else x.detach()).double()


def within(found: Tensor, a: Any, b: Any, cores: bool = False) -> bool:
    """Whether a product is as near to that of FP64 as docs/spec/numerics.md, section 9, allows. cores: as of `in_cores`."""
    left, right = exact(a), exact(b)
    k = left.shape[-1]
    bound = bounds.accumulated(left.abs() @ right.abs(), k, k, cores)
    return bool(((found.double() - left @ right).abs() <= bound).all())


def in_cores(a: Any, b: Any, device: str) -> bool:
    """Whether FP8 tensor cores may add up the products of the operands."""
    return bounds.in_tensor_cores(*(x.recipe if isinstance(x, ScaledTensor) else None for x in (a, b)), device)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_each_expert_multiplies_its_own_rows(recipe: TrainingRecipe, device: str) -> None:
    layer, offsets = TrainingExperts(len(OFFSETS), IN, OUT, recipe=recipe, seed=1, device=device), OFFSETS.to(device)
    x, dy = torch.randn(ROWS, IN, requires_grad=True, device=device), torch.randn(ROWS, OUT, device=device)
    operands = layer.gemm_operands(x, dy, offsets)
    y = layer(x, offsets)
    y.backward(dy)
    assert x.grad is not None and layer.weight.grad is not None
    ends = [0, *OFFSETS.tolist()]
    spread = [0, *operands["grouped_offsets"][0].tolist()]
    for e, ((start, end), (first, last)) in enumerate(zip(pairwise(ends), pairwise(spread), strict=True)):
        assert first % step_of(recipe, device) == 0 and last - first >= end - start
        for found, gemm in ((y, "output"), (x.grad, "grad_input")):
            a, b = operands[gemm]
            rows = exact(a)[first : first + end - start]
            assert within(found[start:end].detach(), rows, exact(b)[e], in_cores(a, b, device))
        a, b = operands["grad_weight"][0][e], operands["grad_weight"][1][e]
        assert within(layer.weight.grad[e], a, b, in_cores(a, b, device))
        if start == end:
            assert not layer.weight.grad[e].any()
    assert not y[OFFSETS[-1] :].any() and not x.grad[OFFSETS[-1] :].any()


@pytest.mark.parametrize("preset", ["fp8_row", "fp8_block", "mxfp8"])
def test_an_expert_has_the_gradient_of_a_layer_of_its_own(preset: str) -> None:
    """Blocks begin at each expert's first row, so the operands are those of a TrainingLinear on these rows alone.

    Not so where a scale spans the rows of all experts: of columns under fp8_row, and of tensors."""
    from breccia_torch.nn import TrainingLinear

    layer = TrainingExperts(2, IN, OUT, recipe=preset)
    x, dy, offsets = torch.randn(100, IN), torch.randn(100, OUT), torch.tensor([37, 100], dtype=torch.int32)
    operands = layer.gemm_operands(x, dy, offsets)
    for e, (start, end) in enumerate(((0, 37), (37, 100))):
        single = TrainingLinear(IN, OUT, recipe=preset)
        single.weight = torch.nn.Parameter(layer.weight[e].detach())
        alone = single.gemm_operands(x[start:end], dy[start:end])
        row = int(operands["grouped_offsets"][0][e - 1]) if e else 0
        assert torch.equal(exact(operands["output"][0])[row : row + end - start], exact(alone["output"][0]))
        assert torch.equal(exact(operands["output"][1])[e], exact(alone["output"][1]))
        if preset != "fp8_row":
            assert torch.equal(exact(operands["grad_weight"][1][e])[: end - start], exact(alone["grad_weight"][1]))


def test_no_rotation_mixes_the_rows_of_two_experts() -> None:
    recipe = TrainingRecipe("mxfp8", hadamard=128)  # blocks of scales, of 32, would let an expert begin at row 64
    layer = TrainingExperts(2, IN, OUT, recipe=recipe)
    x, dy, offsets = torch.randn(100, IN), torch.randn(100, OUT), torch.tensor([37, 100], dtype=torch.int32)
    x[37:] = 0.0
    dy[:37] = 0.0
    gradients, inputs = layer.gemm_operands(x, dy, offsets)["grad_weight"]
    assert exact(inputs[0]).any() and exact(gradients[1]).any()
    assert not exact(inputs[1]).any() and not exact(gradients[0]).any()
    layer(x, offsets).backward(dy)
    assert layer.weight.grad is not None and not layer.weight.grad.any()


def test_rows_come_back_from_their_places() -> None:
    recipe = TrainingRecipe("fp8_block")
    places = Places.of(ROWS, OFFSETS, recipe)
    x = torch.randn(ROWS, 3)
    spread = places.spread(x)
    assert spread.shape == (places.total, 3) and places.total % 128 == 0
    assert torch.equal(places.gathered(spread)[:190], x[:190]) and not places.gathered(spread)[190:].any()
    assert spread.count_nonzero() == x[:190].count_nonzero()
    assert places.offsets.tolist() == [0, 128, 128, 384, 512, 512]


def test_grad_weight_decodes_its_operands_once_for_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = TrainingExperts(len(OFFSETS), IN, OUT, recipe="mxfp8")
    layer(torch.randn(ROWS, IN), OFFSETS).backward(torch.randn(ROWS, OUT))  # x has no gradient
    y = layer(torch.randn(ROWS, IN), OFFSETS)
    decoded: list[tuple[int, ...]] = []
    original = composites.SELECTED.dequantize
    counted = composites.SELECTED._replace(dequantize=lambda st: decoded.append(tuple(st.shape)) or original(st))
    monkeypatch.setattr(composites, "SELECTED", counted)
    y.backward(torch.randn(ROWS, OUT))
    total = Places.of(ROWS, OFFSETS, layer.recipe).total
    assert decoded == [(OUT, total), (total, IN)]


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_no_rows_at_all(device: str) -> None:
    layer = TrainingExperts(3, IN, OUT, recipe="fp8_block", device=device)
    x = torch.randn(0, IN, requires_grad=True, device=device)
    y = layer(x, torch.zeros(3, dtype=torch.int32, device=device))
    y.sum().backward()
    assert y.shape == (0, OUT) and layer.weight.grad is not None and not layer.weight.grad.any()


def test_optimizers_and_states_are_those_of_layers() -> None:
    layer = TrainingExperts(3, IN, OUT, recipe="fp8_delayed")
    optimizer = torch.optim.AdamW(layer.parameters())
    offsets = torch.tensor([5, 5, 20], dtype=torch.int32)
    x = torch.randn(20, IN)
    layer(x, offsets).sum().backward()
    optimizer.step()
    assert layer.state is not None and layer.state.draws[1] == 1
    assert layer.state.amaxes[0, -1].view(torch.float32) == x.abs().max()  # zeros between do not count


def test_the_gradient_accumulates_in_main_grad() -> None:
    layer = TrainingExperts(3, IN, OUT, recipe="fp8_block")
    x, offsets = torch.randn(20, IN), torch.tensor([5, 5, 20], dtype=torch.int32)
    layer(x, offsets).sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    for _ in range(2):
        layer(x, offsets).sum().backward()
    assert layer.weight.grad is None and torch.equal(layer.weight.main_grad, 2 * expected)


@pytest.mark.parametrize(
    ("shape", "offsets", "error", "says"),
    [
        ((4, 3), torch.zeros(3, dtype=torch.int32), ShapeError, r"experts take x of shape \(M, 144\); got \(4, 3\)"),
        ((4, IN), torch.zeros(2, dtype=torch.int32), ShapeError, "offsets of shape"),
        ((4, IN), torch.zeros(3), UnsupportedError, "offsets are int32"),
    ],
)
def test_errors_name_the_layer(shape: tuple[int, ...], offsets: Tensor, error: type[Exception], says: str) -> None:
    layer = TrainingExperts(3, IN, OUT, recipe="fp8_block")
    layer.name = "blocks.0.experts"
    with pytest.raises(error, match=f"blocks.0.experts: .*{says}"):
        layer(torch.randn(shape), offsets)


def test_tiles_of_rows_are_refused() -> None:
    layer = TrainingExperts(3, IN, OUT, recipe=TrainingRecipe("fp8_block", input="fp8_block,block_m=128"))
    with pytest.raises(LayoutError, match="blocks are one row high"):
        layer(torch.randn(4, IN), torch.tensor([1, 2, 4], dtype=torch.int32))
