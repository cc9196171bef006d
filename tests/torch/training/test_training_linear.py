"""TrainingLinear: its GEMMs multiply what `gemm_operands` returns, which is what the recipe declares."""

from __future__ import annotations

import copy
import gc
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef
from training_operands import FROM_CODES

import breccia
from breccia import ScaledTensor, ShapeError, TrainingRecipe, UnsupportedError
from breccia.kernels import bounds
from breccia.rotations import ROTATIONS
from breccia.training import GEMMS, PRESETS
from breccia_torch.nn import TrainingLinear
from breccia_torch.training import linear as module
from breccia_torch.training import operands
from breccia_torch.training import state as steps

#: No side is a multiple of 128, and 72 rows are no multiple of 16.
ROWS, IN, OUT = 72, 144, 80
RECIPES = [
    *map(TrainingRecipe, PRESETS),
    TrainingRecipe("nvfp4", high_precision=("grad_weight",)),
    TrainingRecipe("mxfp8", high_precision=("output", "grad_input")),
    TrainingRecipe(input="mxfp8", weight="mxfp4", gradient=None),
    *FROM_CODES,
]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Matrices as small as these are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def made(recipe: Any, dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[TrainingLinear, Tensor, Tensor]:
    layer = TrainingLinear(IN, OUT, bias, dtype=dtype, recipe=recipe, seed=1)
    return layer, torch.randn(2, ROWS // 2, IN, dtype=dtype, requires_grad=True), torch.randn(2, ROWS // 2, OUT, dtype=dtype)


def exact(x: Any) -> Tensor:
    return (breccia.dequantize(x) if isinstance(x, ScaledTensor) else x.detach()).double()


def step(layer: TrainingLinear, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The results of the three GEMMs in a forward and a backward pass."""
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None and layer.weight.grad is not None
    return {"output": y.detach().flatten(0, 1), "grad_input": x.grad.flatten(0, 1), "grad_weight": layer.weight.grad}


def wrong(results: dict[str, Tensor], expected: dict[str, tuple[Any, Any]], bias: Tensor | None) -> list[str]:
    """The GEMMs whose results are further from FP64 products of the operands than docs/spec/numerics.md, section 9, allows."""
    found: list[str] = []
    for name, (a, b) in expected.items():
        left, right = exact(a), exact(b)
        product, size, k = left @ right, left.abs() @ right.abs(), left.shape[1]
        if name == "output" and bias is not None:
            product, size = product + bias.double(), size + bias.double().abs()
        bound = bounds.accumulated(size, k + 1, k)
        if not isinstance(a, ScaledTensor) and not isinstance(b, ScaledTensor):
            bound = bound + size * 2.0**-8 * (results[name].dtype == torch.bfloat16)  # torch may round before it adds the bias
        if results[name].dtype == torch.bfloat16:
            bound = bound + (product.abs() + bound) * 2.0**-8  # one rounding to the 8 bits of BF16
        if not ((results[name].double() - product).abs() <= bound).all():
            found.append(name)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_each_gemm_multiplies_what_gemm_operands_returns(recipe: TrainingRecipe, dtype: torch.dtype) -> None:
    layer, x, dy = made(recipe, dtype)
    expected = layer.gemm_operands(x, dy)
    assert wrong(step(layer, x, dy), expected, layer.bias) == []


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_gemm_operands_are_the_casts_that_the_recipe_declares(recipe: TrainingRecipe) -> None:
    layer, x, dy = made(recipe)
    tensors = {"input": x.detach().flatten(0, 1), "weight": layer.weight.detach(), "gradient": dy.flatten(0, 1)}
    transposed = {"output": (False, True), "grad_input": (False, False), "grad_weight": (True, False)}
    for gemm, pair in layer.gemm_operands(x, dy).items():
        for found, of, turned in zip(pair, recipe.operands[gemm], transposed[gemm], strict=True):
            found = found.mT if turned else found
            if of.recipe is None:
                assert torch.equal(found, tensors[of.tensor])
            elif of.rounding == "nearest" and of.rotation is None and not of.from_codes:  # others: in tests of their own
                assert breccia.bytes_equal(found, breccia.cast(tensors[of.tensor], of.recipe, axis=of.axis))
            assert not isinstance(found, ScaledTensor) or (found.recipe, found.axis) == (of.recipe, of.axis)


def columns_by_hand(rows: ScaledTensor, of: Any) -> tuple[Tensor, Tensor]:
    """(The values of columns cast from rows (M, K), where they are normal), computed in FP64 without rounding."""
    element, v = of.recipe.format.element, exact(rows)
    m, k = of.recipe.format.block[::-1]  # blocks run along M
    padded = nn.functional.pad(v, (0, -v.shape[1] % k, 0, -v.shape[0] % m)).unfold(0, m, m).unfold(1, k, k)
    amax = padded.abs().amax((-2, -1), keepdim=True)
    scale = torch.where(amax > 0, torch.exp2(torch.ceil(torch.log2(amax / element.max))), 1.0).expand(padded.shape)
    scale = scale.permute(0, 2, 1, 3).reshape(-1, padded.shape[1] * k)[: v.shape[0], : v.shape[1]]
    least = 2.0 ** (1 - element.bias)
    step = scale * least * 2.0**-element.mantissa_bits
    normal = v.abs() >= least * scale
    return torch.where(normal, v, torch.round(v / step) * step), normal


@pytest.mark.parametrize("recipe", FROM_CODES, ids=repr)
def test_columns_from_codes_round_only_what_becomes_subnormal(recipe: TrainingRecipe) -> None:
    layer, x, dy = made(recipe)
    with torch.no_grad():  # rows of many magnitudes in one block of columns, and a row of zeros
        for of in (x, dy):
            of *= torch.exp2(torch.randint(-18, 4, of.shape[:-1])[..., None])
            of[0, 3] = 0.0
    operands = layer.gemm_operands(x, dy)
    tensors = {"input": x.detach().flatten(0, 1), "weight": layer.weight.detach(), "gradient": dy.flatten(0, 1)}
    pairs = {
        "input": (operands["output"][0], operands["grad_weight"][1]),
        "weight": (operands["output"][1].mT, operands["grad_input"][1]),
        "gradient": (operands["grad_input"][0], operands["grad_weight"][0].mT),
    }
    for tensor in recipe.columns_from_codes:
        rows, columns = pairs[tensor]
        expected, normal = columns_by_hand(rows, recipe.uses(tensor)[1])
        assert torch.equal(exact(columns)[normal], exact(rows)[normal])
        if recipe.uses(tensor)[1].rounding == "nearest":
            assert torch.equal(exact(columns), expected)
        if tensor == "input":  # where the order of the two roundings shows
            assert not normal.all() and not torch.equal(exact(columns), exact(rows))
            assert not breccia.bytes_equal(columns, breccia.cast(tensors[tensor], recipe.input_columns, axis=-2))


@pytest.mark.parametrize("size", ROTATIONS)
def test_a_rotation_leaves_grad_weight_and_spreads_an_outlier(size: int) -> None:
    layer, x, dy = made(TrainingRecipe("nvfp4", hadamard=size))
    a, b = layer.gemm_operands(x, dy)["grad_weight"]
    assert a.shape == (OUT, ROWS) and b.shape == (ROWS, IN)  # rows after the last whole block stay as they are
    reference = dy.flatten(0, 1).double().T @ x.detach().flatten(0, 1).double()
    # E2M1 errs by at most a fifth of a normal code. Of operands of which one is rotated, the product has about the same norm
    # and nothing in common with this one: an error of the root of two.
    assert (exact(a) @ exact(b) - reference).norm() <= 0.5 * reference.norm()
    with torch.no_grad():
        x[0, 0, 0] = 1000.0
    largest = exact(layer.gemm_operands(x, dy)["grad_weight"][1])[:, 0].abs().max()
    # Of FP32 1000 becomes 1000 / sqrt(size), beside sums of normal numbers; E2M1 and the scale of the block round them.
    assert largest <= 1.25 * (1000 / max(size if size <= ROWS else 1, 1) ** 0.5 + 5)


# ---------------------------------------------------------------------------------------------------- planted faults


def fault_wrong_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of x have the blocks of its rows."""

    def planted(how: Any, tensor: str, x: Tensor, **options: Any) -> Any:
        found = operands.cast_operand(how, tensor, x, **options)
        if tensor == "input" and found.columns is not None:
            columns = breccia.cast(breccia.dequantize(breccia.cast(x, how.recipe.input)), how.recipe.input_columns, axis=-2)
            found = found._replace(columns=columns)
        return found

    monkeypatch.setattr(module, "cast_operand", planted)


def fault_plain_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is not quantized."""

    def planted(how: Any, tensor: str, x: Tensor, **options: Any) -> Any:
        return operands.CastOperand(x, x) if tensor == "gradient" else operands.cast_operand(how, tensor, x, **options)

    monkeypatch.setattr(module, "cast_operand", planted)


def fault_half_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales of the columns of w are half of what they should be."""

    def planted(how: Any, weight: Tensor, **options: Any) -> Any:
        rows, columns = operands.cast_weight(how, weight, **options)
        if columns is not None:
            columns = ScaledTensor.from_parts(
                columns.data, columns.scale / 2, columns.recipe, columns.layout, axis=columns.axis
            )
        return rows, columns

    monkeypatch.setattr(module, "cast_weight", planted)


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        (fault_wrong_axis, ["grad_weight"]),
        (fault_plain_gradient, ["grad_input", "grad_weight"]),
        (fault_half_scale, ["grad_input"]),
    ],
)
def test_planted_faults_are_caught(fault: Any, caught: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, dy = made("fp8_block")
    expected = layer.gemm_operands(x, dy)
    fault(monkeypatch)
    assert wrong(step(layer, x, dy), expected, layer.bias) == caught


# ------------------------------------------------------------------------------------------------------ as nn.Linear


def test_parameters_stay_and_the_bias_has_its_gradient() -> None:
    layer, x, dy = made("fp8_block")
    assert isinstance(layer, nn.Linear) and [n for n, _ in layer.named_parameters()] == ["weight", "bias"]
    assert list(layer.state_dict()) == ["weight", "bias"]  # a recipe without state
    step(layer, x, dy)
    assert layer.bias.grad is not None and torch.equal(layer.bias.grad, dy.flatten(0, 1).sum(0))


@pytest.mark.parametrize("shape", [(IN,), (1, IN), (3, 2, 5, IN)])
def test_leading_axes_are_those_of_the_input(shape: tuple[int, ...]) -> None:
    layer = TrainingLinear(IN, OUT, recipe="mxfp8")
    y = layer(torch.randn(shape))
    assert y.shape == (*shape[:-1], OUT)


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_no_rows_give_no_output_and_a_gradient_of_zeros(recipe: TrainingRecipe) -> None:
    layer = TrainingLinear(IN, OUT, recipe=recipe)
    x = torch.randn(2, 0, IN, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (2, 0, OUT) and x.grad is not None and x.grad.shape == x.shape
    assert layer.weight.grad is not None and not layer.weight.grad.any()


def test_rows_of_zeros_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs get them, whose GEMMs take multiples of 16."""
    for preset in ("fp8_current", "fp8_block", "mxfp8"):
        layer, x, dy = made(preset)
        before = step(layer, x, dy)
        x.grad = layer.weight.grad = None
        with monkeypatch.context() as m:
            m.setitem(module.ROWS, "cpu", 16)
            after = step(layer, x, dy)
        # The operands are equal but for zeros, so results differ by the order of summation at most.
        expected = layer.gemm_operands(x, dy)
        assert wrong(before, expected, layer.bias) == wrong(after, expected, layer.bias) == []


def test_a_frozen_weight_has_no_gradient_and_keeps_no_input() -> None:
    layer, x, dy = made("fp8_block")
    layer.weight.requires_grad_(False)
    layer.bias.requires_grad_(False)
    y = layer(x)
    assert len(y.grad_fn.next_functions[0][0].saved_tensors) == 1  # the weight, and no components of x
    y.backward(dy)
    assert layer.weight.grad is None and x.grad is not None


def test_the_input_is_kept_in_8_bits() -> None:
    layer, x, _ = made("fp8_block", torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    assert [t.dtype for t in kept if t is not layer.weight] == [torch.float8_e4m3fn, torch.float32]


def test_autocast_sets_the_dtype_of_the_output_and_the_gradient_follows_the_input() -> None:
    layer, x, dy = made("mxfp8")
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.backward(dy.bfloat16())
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    layer.zero_grad()
    plain = layer(x.detach().bfloat16())
    assert torch.equal(plain, y)


def test_the_gradient_accumulates_in_main_grad() -> None:
    layer, x, dy = made("fp8_block", torch.bfloat16)
    other = copy.deepcopy(layer)
    other.float()
    expected = step(other, x.detach().float().requires_grad_(), dy.float())["grad_weight"]
    layer.weight.main_grad = torch.zeros(OUT, IN)
    layer.weight.grad_added_to_main_grad = False
    for _ in range(2):
        layer(x).backward(dy)
    assert layer.weight.grad is None and layer.weight.grad_added_to_main_grad
    assert torch.equal(layer.weight.main_grad, 2 * expected)


def test_another_main_grad_is_refused() -> None:
    layer, x, dy = made("fp8_block")
    layer.weight.main_grad = torch.zeros(OUT, IN, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="main_grad of a weight is an FP32 tensor of its shape"):
        layer(x).backward(dy)


def test_errors_name_the_layer() -> None:
    layer = TrainingLinear.from_linear(nn.Linear(IN, OUT), "fp8_block", name="blocks.3.mlp.up")
    for shape in ((2, 3), ()):
        with pytest.raises(ShapeError, match=re.escape(f"blocks.3.mlp.up: the layer has 144 features; got x of shape {shape}")):
            layer(torch.randn(shape))


@pytest.mark.parametrize("recipe", PRESETS)
def test_other_dtypes_are_refused_by_the_name_of_the_layer(recipe: str) -> None:
    layer = TrainingLinear.from_linear(nn.Linear(IN, OUT), recipe, name="blocks.3.mlp.up")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for _ in range(2):  # of fp8_delayed, without and with a history
        with pytest.raises(UnsupportedError, match=r"blocks.3.mlp.up: cast takes .*; got float64. Convert it first, .*x.float"):
            layer(torch.randn(2, IN, dtype=torch.float64))
        with pytest.raises(UnsupportedError, match="blocks.3.mlp.up: cast takes .*; got int64. Only floating-point numbers"):
            layer(torch.ones(2, IN, dtype=torch.int64))
        layer(torch.randn(2, IN)).sum().backward()
        optimizer.step()
    layer.double()
    with pytest.raises(UnsupportedError, match=r"blocks.3.mlp.up: cast takes .*; got float64"):
        layer(torch.randn(2, IN))


def test_a_weight_that_changes_before_the_backward_pass_is_an_error_as_of_nn_linear() -> None:
    layer, x, dy = made("fp8_block")
    y = layer(x)
    with torch.no_grad():
        layer.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_casts_of_inference_mode_serve_training() -> None:
    for preset in PRESETS:
        layer, x, dy = made(preset)
        with torch.inference_mode():
            layer(x.detach())
        expected = layer.gemm_operands(x, dy)
        assert wrong(step(layer, x, dy), expected, layer.bias) == []


def test_tensors_of_tensor_parallelism_are_refused_by_name() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    layer = TrainingLinear.from_linear(nn.Linear(IN, OUT), "fp8_block", name="blocks.3.mlp.up")
    x = torch.randn(4, IN)
    with pytest.raises(UnsupportedError, match=r"blocks.3.mlp.up: .* plain tensors, and its input or weight is a TwoTensor"):
        layer(TwoTensor(x, x))


# ------------------------------------------------------------------------------------------------------ casts, counted


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that were cast, in order."""
    listed: list[str] = []
    original = operands.cast_operand

    def counted(how: Any, tensor: str, *arguments: Any, **options: Any) -> Any:
        listed.append(tensor)
        return original(how, tensor, *arguments, **options)

    for where in (operands, module):
        monkeypatch.setattr(where, "cast_operand", counted)
    return listed


def test_each_tensor_is_cast_once_and_the_weight_once_per_step(casts: list[str]) -> None:
    layer, x, dy = made("fp8_block")
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(2):
        for _ in range(3):  # accumulation
            layer(x).backward(dy)
        optimizer.step()
    assert casts.count("weight") == 2 and casts.count("input") == casts.count("gradient") == 6


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.add_(1.0),
        lambda layer: layer.weight.copy_(torch.randn(OUT, IN)),
        lambda layer: setattr(layer.weight, "data", torch.randn(OUT, IN)),
        lambda layer: layer.load_state_dict({"weight": torch.randn(OUT, IN), "bias": torch.zeros(OUT)}),
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(OUT, IN))),
        lambda layer: nn.utils.vector_to_parameters(torch.randn(OUT * IN + OUT), layer.parameters()),
    ],
    ids=["add_", "copy_", "data", "load_state_dict", "another Parameter", "vector_to_parameters"],
)
def test_a_weight_that_changed_is_cast_anew(change: Any) -> None:
    layer, x, _ = made("fp8_block")
    layer(x)
    with torch.no_grad():
        change(layer)
        expected = breccia.matmul(*layer.gemm_operands(x, torch.randn(ROWS, OUT))["output"], bias=layer.bias)
        assert torch.equal(layer(x).flatten(0, 1), expected)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=lambda kind: kind.__name__)
def test_optimizers_change_the_weight_that_is_multiplied(kind: Any, foreach: bool) -> None:
    layer, x, dy = made("fp8_block")
    optimizer = kind(layer.parameters(), lr=0.5, foreach=foreach)
    before = step(layer, x, dy)["output"]
    optimizer.step()
    expected = breccia.matmul(*layer.gemm_operands(x, dy)["output"], bias=layer.bias.detach())
    after = layer(x).detach().flatten(0, 1)
    assert torch.equal(after, expected) and not torch.equal(after, before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:OptimState8bit does not implement _stable_hash_for_caching:UserWarning")
def test_an_optimizer_with_8_bit_moments_changes_the_weight_that_is_multiplied() -> None:
    low = pytest.importorskip("torchao.optim")
    layer, x, dy = made("fp8_delayed")
    optimizer = low.AdamW8bit(layer.parameters(), lr=0.5)  # it writes to the weight in a compiled function
    before = step(layer, x, dy)["output"]
    optimizer.step()
    assert type(optimizer.state[layer.weight]["exp_avg"]) is not Tensor
    assert layer.state is not None and layer.state.draws[1] == 1
    expected = breccia.matmul(*layer.gemm_operands(x, dy)["output"], bias=layer.bias.detach())
    after = layer(x).detach().flatten(0, 1)
    assert torch.equal(after, expected) and not torch.equal(after, before)


def test_a_cuda_graph_keeps_no_cast_and_what_it_changes_is_cast_anew(monkeypatch: pytest.MonkeyPatch, casts: list[str]) -> None:
    """A device is not needed to capture nothing: replays change a weight and leave its version, as `weight.data` does."""
    capturing = [False]
    monkeypatch.setattr(steps, "is_captured", lambda of: capturing[0])
    layer, x, dy = made("fp8_block")
    other, _, _ = made("fp8_block")
    optimizer = torch.optim.SGD(other.parameters())
    step(other, x, dy)
    x.grad = None
    expected = step(layer, x, dy)["grad_input"].clone()
    x.grad, capturing[0] = None, True
    layer(x).backward(dy)  # cast in the graph though the version is as it was, rows and columns at once
    optimizer.step()
    capturing[0] = False
    assert casts.count("weight") == 3
    assert x.grad is not None and torch.equal(x.grad.flatten(0, 1), expected)
    for each in (layer, other):
        each.weight.data.mul_(2.0)
        expected = breccia.matmul(*each.gemm_operands(x, dy)["output"], bias=each.bias.detach())
        assert torch.equal(each(x).detach().flatten(0, 1), expected)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_steps_end_also_where_a_cuda_graph_replays_the_passes(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays run no Python, so that nobody counts their passes."""
    capturing = [False]
    monkeypatch.setattr(steps, "is_captured", lambda of: capturing[0])
    layer, x, dy = made(recipe)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    layer(x).backward(dy)
    optimizer.step()
    capturing[0] = True
    layer(x).backward(dy)
    capturing[0] = False
    words = None if layer.state.words is None else layer.state.words.tolist()
    for steps_ended in (2, 3, 4):
        optimizer.step()
        assert layer.state.draws[1] == steps_ended
    assert words is None or layer.state.words.tolist() != words


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_tile", "mxfp8", "nvfp4"])
def test_replays_train_as_eager_steps_and_evaluation_sees_their_weights(recipe: str) -> None:
    def begun() -> tuple[TrainingLinear, Tensor, Tensor, Any]:
        torch.manual_seed(0)
        layer = TrainingLinear(256, 512, recipe=recipe, seed=1, device="cuda")
        x, dy = torch.randn(64, 256, device="cuda").requires_grad_(), torch.randn(64, 512, device="cuda")
        return layer, x, dy, torch.optim.AdamW(layer.parameters(), lr=0.1, capturable=True)

    def stepped(layer: TrainingLinear, x: Tensor, dy: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        x.grad = None
        layer(x).backward(dy)
        optimizer.step()

    captured, eager = begun(), begun()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            stepped(*captured)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stepped(*captured)
    for _ in range(4):
        graph.replay()
    for _ in range(7):
        stepped(*eager)
    with torch.no_grad():
        found, expected = (layer(x) for layer, x, *_ in (captured, eager))
    assert torch.equal(captured[0].weight, eager[0].weight) and torch.equal(found, expected)
    assert captured[1].grad is not None and torch.equal(captured[1].grad, eager[1].grad)
    for one, other in zip(
        *(() if layer.state is None else layer.state.buffers() for layer, *_ in (captured, eager)), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("preset", ["fp8_block", "fp8_delayed"])
def test_casts_of_weights_that_are_freed_after_each_pass_are_freed_too(preset: str) -> None:
    """As fully_shard frees them: casts that stayed would take the memory that it saves."""
    layers = [TrainingLinear(IN, IN, recipe=preset) for _ in range(3)]
    whole = [layer.weight.detach().clone() for layer in layers]
    twins = copy.deepcopy(layers)

    def gather(n: int) -> None:
        layers[n].weight.untyped_storage().resize_(whole[n].nbytes)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(layers[n].weight):
            layers[n].weight.copy_(whole[n])

    def free(n: int) -> None:
        layers[n].weight.untyped_storage().resize_(0)

    def kept() -> list[bool]:
        return [id(layer.weight) in operands._weights for layer in layers]

    x = torch.randn(ROWS, IN)
    y = x.clone().requires_grad_()
    for n, layer in enumerate(layers):
        y = layer(y)
        free(n)
    assert kept() == [False, False, True]
    for n, layer in enumerate(layers):
        gather(n)
        layer.weight.register_post_accumulate_grad_hook(lambda _, n=n: free(n))
    y.sum().backward()
    z = x.clone().requires_grad_()
    for twin in twins:
        z = twin(z)
    z.sum().backward()
    for layer, twin in zip(layers, twins, strict=True):
        assert torch.equal(layer.weight.grad, twin.weight.grad)
        assert all(map(torch.equal, layer.buffers(), twin.buffers()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_casts_no_weight_twice_and_gives_the_same_bits(reentrant: bool, casts: list[str]) -> None:
    from torch.utils.checkpoint import checkpoint

    for preset in ("fp8_delayed", "nvfp4"):
        layer, x, dy = made(preset)
        twin, y = copy.deepcopy(layer), x.detach().clone().requires_grad_()
        plain = step(twin, y, dy)
        casts.clear()
        checkpoint(layer, x, use_reentrant=reentrant).backward(dy)
        assert casts.count("weight") == 1 and casts.count("input") == 2
        assert x.grad is not None and torch.equal(x.grad.flatten(0, 1), plain["grad_input"])
        assert layer.weight.grad is not None and torch.equal(layer.weight.grad, plain["grad_weight"])
        for mine, other in zip(layer.buffers(), twin.buffers(), strict=True):
            assert torch.equal(mine, other)


def test_casts_of_earlier_steps_and_of_weights_that_are_gone_take_no_memory() -> None:
    layer = TrainingLinear(IN, IN, recipe="fp8_block")
    codes: list[Any] = []
    for _ in range(3):
        layer(torch.randn(ROWS, IN)).sum().backward()
        rows, _ = operands._weights[id(layer.weight)].casts[layer.recipe, None]
        codes.append(TensorWeakRef(rows.data))
        del rows
        with torch.no_grad():
            layer.weight.mul_(0.5)
    layer(torch.randn(ROWS, IN)).sum().backward()
    assert [each() is None for each in codes] == [True] * 3
    number = id(layer.weight)
    del layer
    gc.collect()
    assert number not in operands._weights


# -------------------------------------------------------------------------------------------------- fast accumulation


def of_fast(*gemms: str) -> TrainingRecipe:
    return TrainingRecipe("fp8_row", fast_accumulation=gemms)


def test_without_products_of_fast_accumulation_sums_are_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    matmul = operands.calls.matmul

    def noted(*arguments: Any, prefer: Any = None) -> Tensor:
        if isinstance(arguments[0].data, Tensor):  # the kernel for CPUs asks for one of NumPy
            asked.append(prefer)
        return matmul(*arguments, prefer=prefer)

    monkeypatch.setattr(operands.calls, "matmul", noted)
    monkeypatch.setattr(operands, "_refused", set())
    results: list[list[Tensor]] = []
    for recipe in (of_fast(*GEMMS), of_fast(*GEMMS), TrainingRecipe("fp8_row")):
        torch.manual_seed(0)
        layer, x = TrainingLinear(32, 64, recipe=recipe), torch.randn(48, 32, requires_grad=True)
        y = layer(x)
        y.backward(torch.ones_like(y))
        assert x.grad is not None and layer.weight.grad is not None
        results.append([y, x.grad, layer.weight.grad])
    assert all(map(torch.equal, results[0], results[2])) and all(map(torch.equal, results[1], results[2]))
    # The CPU has none of these products, which is found out once for each GEMM.
    assert asked == [operands.FAST, None] * 3 + [None] * 6


@pytest.mark.parametrize("gemm", GEMMS)
def test_a_gemm_with_fast_accumulation_asks_for_it(gemm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    multiply = module.multiply

    def noted(*arguments: Any, fast: bool) -> Tensor:
        asked.append(fast)
        return multiply(*arguments, fast=fast)

    monkeypatch.setattr(module, "multiply", noted)
    TrainingLinear(32, 64, recipe=of_fast(gemm))(torch.randn(48, 32, requires_grad=True)).sum().backward()
    assert asked == [gemm == name for name in GEMMS]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("preset", ["fp8_row", "fp8_current", "fp8_delayed"])
def test_fast_accumulation_on_a_gpu_is_that_of_the_named_products(preset: str) -> None:
    torch.manual_seed(0)
    recipe = TrainingRecipe(preset, fast_accumulation=("output",))
    layer = TrainingLinear(8192, 256, bias=False, recipe=recipe, device="cuda", dtype=torch.bfloat16)
    x = torch.rand(128, 8192, device="cuda").bfloat16()  # sums of one sign grow, and lose bits
    torch.nn.init.uniform_(layer.weight)
    a, b = layer.gemm_operands(x, x.new_ones(128, 256))["output"]
    fast = breccia.matmul(a, b, out_dtype="bfloat16", prefer=operands.FAST)
    assert torch.equal(layer(x), fast)
    assert not torch.equal(fast, breccia.matmul(a, b, out_dtype="bfloat16"))
