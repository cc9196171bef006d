"""MLX models with quantized weights: replaced layers, saving, loading, training, and refused input."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.optimizers import SGD
from mlx.utils import tree_flatten
from recipes import as_mlx

import breccia
import breccia_mlx
from breccia.tensors.components import components
from breccia_mlx.nn import ScaledEmbedding, ScaledLinear, ScaledWeight

NVFP4, MXFP8 = breccia.NVFP4BlockScaling(), breccia.MXFP8BlockScaling()
INT4 = breccia.INT4Scaling(group_size=32, signed=False, symmetric=False)
IDS = mx.array([[1, 2, 3], [39, 0, -1]])


class Model(nn.Module):
    """An embedding, a list of layers in a dict, and a head without a bias. No length is a multiple of a block."""

    def __init__(self, dims: int = 72) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, dims)
        self.blocks = [{"up": nn.Linear(dims, 50), "norm": nn.LayerNorm(50), "down": nn.Linear(50, dims)} for _ in range(2)]
        self.head = nn.Linear(dims, 8, bias=False)

    def __call__(self, ids: Any) -> Any:
        x = self.embed(ids)
        for b in self.blocks:
            x = x + b["down"](nn.gelu(b["norm"](b["up"](x))))
        return self.head(x)


@pytest.fixture
def model() -> Model:
    mx.random.seed(0)
    return Model()


def parameters(model: nn.Module) -> dict[str, Any]:
    return dict(tree_flatten(model.parameters()))


def equal(a: nn.Module, b: nn.Module) -> bool:
    left, right = parameters(a), parameters(b)
    return left.keys() == right.keys() and all(
        p.dtype == right[n].dtype and mx.array_equal(p, right[n]) for n, p in left.items()
    )


def test_linear_and_embedding_layers_are_replaced_and_compute_with_the_decoded_weights(
    recipe: breccia.ScalingRecipe, model: Model
) -> None:
    """Against the same model with the decoded weights in its own layers.

    Its sums are in another order: each is within K roundings of the exact one, so the two within twice that, and one more
    for the bias.
    """
    plain = copy.deepcopy(model)
    for _, m in plain.named_modules():
        if isinstance(m, nn.Linear | nn.Embedding):
            m.weight = breccia.dequantize(breccia.cast(m.weight, recipe))
    breccia_mlx.quantize(model, as_mlx(recipe))
    kinds = {path: type(m) for path, m in model.named_modules() if isinstance(m, ScaledLinear | ScaledEmbedding)}
    linear = {f"blocks.{n}.{name}": ScaledLinear for n in (0, 1) for name in ("up", "down")}
    assert kinds == {"embed": ScaledEmbedding, "head": ScaledLinear} | linear
    assert mx.array_equal(model.embed(IDS), plain.embed(IDS)), "rows alone decode to what the whole decodes to"
    x = mx.random.normal((2, 3, 72))
    layers = [(m.blocks[1]["up"], m.embed.as_linear) for m in (model, plain)]
    weights = plain.blocks[1]["up"].weight, plain.embed.weight
    for ours, theirs, weight in zip(*layers, weights, strict=True):
        size = np.abs(np.array(x, np.float64)) @ np.abs(np.array(weight, np.float64)).T + 1
        assert (np.abs(np.array(ours(x)) - np.array(theirs(x))) <= 2 * 74 * 2.0**-24 * size).all()
    assert model(IDS).shape == (2, 3, 8)


def test_the_predicate_chooses_the_options_of_a_layer(model: Model) -> None:
    asked: list[str] = []

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        asked.append(path)
        if path == "head":
            return {"recipe": NVFP4, "activation": None, "prefer": None}
        return isinstance(module, nn.Linear) and "up" in path

    breccia_mlx.quantize(model, MXFP8, activation=MXFP8, class_predicate=predicate)
    assert sorted(asked) == sorted({"embed", "head"} | {f"blocks.{n}.{m}" for n in (0, 1) for m in ("up", "norm", "down")})
    assert type(model.embed) is nn.Embedding and type(model.blocks[0]["down"]) is nn.Linear
    assert (model.head.weight.recipe, model.head.activation) == (NVFP4, None)
    assert (model.blocks[1]["up"].weight.recipe, model.blocks[1]["up"].activation) == (MXFP8, MXFP8)


def test_activations_are_cast_row_by_row_and_gradients_pass(model: Model) -> None:
    x = mx.random.normal((2, 3, 72))
    linear = model.head
    layer = ScaledLinear.from_linear(linear, MXFP8, activation=MXFP8)
    rows = breccia.cast(mx.reshape(x, (6, 72)), MXFP8)
    w = breccia.cast(linear.weight, MXFP8)
    assert mx.array_equal(layer(x), mx.reshape(breccia.matmul(rows, w.mT), (2, 3, 8)))
    gradient = mx.grad(lambda x: layer(x).sum())(x)
    assert np.allclose(np.array(gradient), np.array(breccia.dequantize(w).sum(0)), rtol=1e-6, atol=1e-6), "8 terms in any order"


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_results_have_the_input_dtype_and_are_rounded_once(kind: str, model: Model) -> None:
    linear, dtype = model.blocks[0]["up"], getattr(mx, kind)
    linear.set_dtype(dtype)
    layer = ScaledLinear.from_linear(linear, MXFP8)
    x = mx.random.normal((4, 72)).astype(dtype)
    y = breccia.matmul(x, layer.weight.tensor.mT) + linear.bias.astype(mx.float32)
    assert layer(x).dtype == dtype and mx.array_equal(layer(x), y.astype(dtype))
    model.embed.set_dtype(dtype)
    embedding = ScaledEmbedding.from_embedding(model.embed, MXFP8)
    assert embedding(IDS).dtype == dtype and embedding.to_embedding().weight.dtype == dtype


def test_layers_accept_a_single_vector_and_an_empty_batch(model: Model) -> None:
    layer = ScaledLinear.from_linear(model.head, MXFP8)
    x = mx.random.normal((5, 72))
    assert layer(x[0]).shape == (8,) and mx.allclose(layer(x[0]), layer(x)[0], rtol=1e-6)
    assert layer(x[:0]).shape == (0, 8) and layer(mx.zeros((2, 0, 72))).shape == (2, 0, 8)


def test_dequantizing_a_layer_gives_a_layer_with_the_decoded_weights(model: Model) -> None:
    linear = model.blocks[0]["up"]
    back = ScaledLinear.from_linear(linear, NVFP4).to_linear()
    assert type(back) is nn.Linear and mx.array_equal(back.weight, breccia.dequantize(breccia.cast(linear.weight, NVFP4)))
    assert back.bias is linear.bias and "bias" not in ScaledLinear.from_linear(model.head, NVFP4).to_linear()
    embedding = ScaledEmbedding.from_embedding(model.embed, NVFP4).to_embedding("float16")
    assert type(embedding) is nn.Embedding and embedding.weight.dtype == mx.float16
    assert ScaledLinear(64, 8, recipe=MXFP8)(mx.ones((1, 64))).shape == (1, 8)
    assert ScaledEmbedding(9, 64, recipe=MXFP8)(mx.array(3)).shape == (64,)


# -- parameters ------------------------------------------------------------------------------------------------------


def test_components_are_parameters_named_after_the_recipe(recipe: breccia.ScalingRecipe, model: Model) -> None:
    breccia_mlx.quantize(model, as_mlx(recipe))
    assert breccia.recipe(recipe.spec) == recipe
    st = breccia.cast(mx.ones((8, 72)), recipe)
    names = {n for n in parameters(model) if n.startswith("head")}
    assert names == {f"head.weight.{recipe.spec}.{part}" for part in components(st)}
    kept = {name: p.dtype for name, p in components(model.head.weight.tensor).items()}
    assert kept == {name: p.dtype for name, p in components(st).items()}


def test_weights_save_and_load(recipe: breccia.ScalingRecipe, model: Model, tmp_path: Path) -> None:
    other = Model()
    for m in (model, other):
        breccia_mlx.quantize(m, as_mlx(recipe))
    assert not equal(other, model)
    for name in ("w.safetensors", "w.npz"):
        model.save_weights(str(tmp_path / name))
        fresh = copy.deepcopy(other)
        fresh.load_weights(str(tmp_path / name))
        assert equal(fresh, model) and mx.array_equal(fresh(IDS), model(IDS))


def test_weights_of_another_recipe_are_refused_by_name(model: Model, tmp_path: Path) -> None:
    """Codes of equal shapes with different meanings: signed and unsigned."""
    signed, unsigned = breccia.INT4Scaling(group_size=32), breccia.INT4Scaling(group_size=32, signed=False)
    other = copy.deepcopy(model)
    breccia_mlx.quantize(model, as_mlx(signed))
    breccia_mlx.quantize(other, as_mlx(unsigned))
    model.save_weights(str(tmp_path / "w.safetensors"))
    with pytest.raises(ValueError, match=r"(?s)parameters not in model.*head\.weight\.int4,group_size=32\.data"):
        other.load_weights(str(tmp_path / "w.safetensors"))
    before = other.head.weight.tensor
    other.load_weights(str(tmp_path / "w.safetensors"), strict=False)
    assert breccia.bytes_equal(other.head.weight.tensor, before), "what does not fit is left out"


def test_changing_the_dtype_of_a_model_keeps_codes_and_scales(recipe: breccia.ScalingRecipe, model: Model) -> None:
    breccia_mlx.quantize(model, as_mlx(recipe))
    before = {n: breccia.dequantize(m.tensor) for n, m in model.named_modules() if isinstance(m, ScaledWeight)}
    model.set_dtype(mx.bfloat16)
    assert model.blocks[0]["up"].bias.dtype == mx.bfloat16
    after = {n: breccia.dequantize(m.tensor) for n, m in model.named_modules() if isinstance(m, ScaledWeight)}
    assert len(before) == 6 and all(mx.array_equal(before[n], after[n]) for n in before)


def test_weights_stay_frozen_and_biases_train(model: Model) -> None:
    model.blocks[0]["up"].freeze()
    breccia_mlx.quantize(model, as_mlx(INT4))

    def trained() -> set[str]:
        return {name for name, _ in tree_flatten(model.trainable_parameters())}

    norms = {f"blocks.{n}.norm.{p}" for n in (0, 1) for p in ("weight", "bias")}
    biases = {f"blocks.{n}.{layer}.bias" for n in (0, 1) for layer in ("up", "down")}
    assert trained() == norms | biases - {"blocks.0.up.bias"}, "as they were"
    model.freeze()
    assert trained() == set()
    model.unfreeze()
    assert trained() == norms | biases


@pytest.mark.parametrize("compiled", [False, True])
def test_a_quantized_model_trains_its_remaining_parameters(compiled: bool, model: Model) -> None:
    breccia_mlx.quantize(model, as_mlx(MXFP8), activation=MXFP8)
    optimizer = SGD(learning_rate=0.5)
    target = mx.random.normal((2, 3, 8))
    loss_and_gradients = nn.value_and_grad(model, lambda ids: ((model(ids) - target) ** 2).mean())
    codes = model.head.weight.tensor.data

    def step(ids: Any) -> Any:
        loss, gradients = loss_and_gradients(ids)
        optimizer.update(model, gradients)
        return loss

    state = [model.state, optimizer.state]
    run = mx.compile(step, inputs=state, outputs=state) if compiled else step
    losses = []
    for _ in range(4):
        losses.append(run(IDS).item())
        mx.eval(state)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert mx.array_equal(model.head.weight.tensor.data, codes)


def test_a_compiled_model_uses_newly_loaded_weights(model: Model) -> None:
    """Compared with other compiled functions: eager calls may run other kernels, whose sums are in another order."""
    breccia_mlx.quantize(model, as_mlx(NVFP4))
    run = mx.compile(lambda ids: model(ids), inputs=model.state)
    first = run(IDS)
    other = Model()
    breccia_mlx.quantize(other, as_mlx(NVFP4))
    model.load_weights(list(tree_flatten(other.parameters())))
    assert mx.array_equal(run(IDS), mx.compile(lambda ids: other(ids), inputs=other.state)(IDS))
    assert not mx.allclose(run(IDS), first)


def test_a_layer_keeps_its_transposed_weight_until_new_weights_are_loaded(model: Model) -> None:
    breccia_mlx.quantize(model, as_mlx(MXFP8))
    weight = model.head.weight
    first = weight.transposed
    assert weight.transposed is first and breccia.bytes_equal(first.mT, weight.tensor)
    again = copy.deepcopy(weight)
    assert "_known" in vars(weight) and "_known" not in vars(again) and breccia.bytes_equal(again.tensor, weight.tensor)
    other = Model()
    breccia_mlx.quantize(other, as_mlx(MXFP8))
    model.load_weights(list(tree_flatten(other.parameters())))
    assert weight.transposed is not first and breccia.bytes_equal(weight.transposed.mT, other.head.weight.tensor)


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("recipe", [MXFP8, NVFP4, INT4], ids=lambda r: r.name)
def test_compiled_layers_multiply_as_eager_ones(recipe: breccia.ScalingRecipe, rows: int) -> None:
    """With the weight among the inputs MLX multiplies few rows by its codes; with a captured weight the default kernel runs."""
    layer = ScaledLinear.from_linear(nn.Linear(96, 40), recipe)
    x = mx.random.normal((rows, 96))
    weight = np.array(breccia.dequantize(layer.weight.tensor), np.float64)
    size = np.abs(np.array(x, np.float64)) @ np.abs(weight).T + np.abs(np.array(layer.bias))
    exact = np.array(x, np.float64) @ weight.T + np.array(layer.bias)
    for y in (
        layer(x),
        mx.compile(lambda x: layer(x), inputs=layer.state)(x),
        mx.compile(lambda x: layer(x))(x),
        mx.vmap(lambda x: layer(x))(x),
    ):
        assert (np.abs(np.array(y) - exact) <= 99 * 2.0**-24 * size).all(), "96 products, a tensor scale and a bias are rounded"


def test_a_shared_layer_stays_shared() -> None:
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    breccia_mlx.quantize(model, as_mlx(MXFP8))
    assert model.layers[0] is model.layers[2] and isinstance(model.layers[0], ScaledLinear)


def test_training_mode_and_copies_are_kept(model: Model) -> None:
    model.eval()
    breccia_mlx.quantize(model, as_mlx(MXFP8))
    assert not model.head.training and model.blocks[0]["norm"].training is False
    again = copy.deepcopy(model)
    assert equal(again, model) and again.head.weight is not model.head.weight
    assert "ScaledLinear(input_dims=72, output_dims=8, bias=False" in repr(model) and "MXFP8BlockScaling(" in repr(model)
    assert "ScaledEmbedding(40, 72" in repr(model)


# -- refused ---------------------------------------------------------------------------------------------------------


def test_if_one_layer_cannot_be_replaced_nothing_changes(model: Model) -> None:
    model.head.weight = model.head.weight.astype(mx.int32)
    before = {path: m for path, m in model.named_modules()}
    with pytest.raises(breccia.UnsupportedError, match=r"^quantize: head\.weight: cast takes float32, .*; got int32"):
        breccia_mlx.quantize(model, as_mlx(MXFP8))
    model.head.weight = mx.ones((72,))
    with pytest.raises(breccia.ShapeError, match=r"^quantize: head\.weight: MXFP8BlockScaling requires x\.ndim >= 2"):
        breccia_mlx.quantize(model, as_mlx(MXFP8))
    assert {path: m for path, m in model.named_modules()}.items() == before.items()


def test_unsupported_models_and_layers_are_refused(model: Model) -> None:
    with pytest.raises(breccia.UnsupportedError, match=r"layers of a model; got a Linear: breccia_mlx\.nn has from_linear"):
        breccia_mlx.quantize(nn.Linear(4, 4), MXFP8)
    with pytest.raises(breccia.UnsupportedError, match=r"layers of a model; got a dict\."):
        breccia_mlx.quantize({}, MXFP8)  # type: ignore[arg-type]
    with pytest.raises(breccia.UnsupportedError, match=r"blocks\.0\.norm is a LayerNorm, but only Linear and Embedding have a"):
        breccia_mlx.quantize(model, MXFP8, class_predicate=lambda path, _: path == "blocks.0.norm")
    with pytest.raises(
        breccia.OptionError,
        match=r"must return True, False, or a dict of recipe, activation, prefer; for .* returned \{'bits': 4\}",
    ):
        breccia_mlx.quantize(model, MXFP8, class_predicate=lambda *_: {"bits": 4})
    with pytest.raises(
        breccia.OptionError, match=r"no parameter is chosen: left out by class_predicate: embed\.weight, blocks\.0\.up\.weight"
    ):
        breccia_mlx.quantize(model, MXFP8, class_predicate=lambda *_: False)
    with pytest.raises(breccia.OptionError, match=r"no parameter is chosen: the model has no floating parameter"):
        breccia_mlx.quantize(nn.Sequential(nn.ReLU()), MXFP8)
    with pytest.raises(
        breccia.UnsupportedError, match=r"recipe must be a ScalingRecipe instance, got MXFP8BlockScaling; did you"
    ):
        breccia_mlx.quantize(model, breccia.MXFP8BlockScaling)  # type: ignore[arg-type]
    for how in ({"activation": 8}, {"class_predicate": lambda *_: {"activation": 8}}):
        with pytest.raises(breccia.UnsupportedError, match="activation is a ScalingRecipe instance or None; got 8"):
            breccia_mlx.quantize(model, MXFP8, **how)
    assert type(model.head) is nn.Linear


def test_layers_refuse_unsupported_tensors_and_inputs() -> None:
    with pytest.raises(
        breccia.UnsupportedError, match=r"ScaledWeight takes a ScaledTensor of mlx, got array; breccia\.cast makes one"
    ):
        ScaledWeight(mx.ones(3))  # type: ignore[arg-type]
    with pytest.raises(breccia.UnsupportedError, match="takes a ScaledTensor of mlx, got numpy; convert it by"):
        ScaledWeight(breccia.cast(np.ones((2, 32), np.float32), MXFP8))
    layer = ScaledLinear(64, 8, recipe=MXFP8)
    with pytest.raises(breccia.ShapeError, match=r"the layer takes inputs of shape \(\.\.\., 64\); got \(2, 32\)"):
        layer(mx.ones((2, 32)))
    with pytest.raises(breccia.UnsupportedError, match="matmul takes ScaledTensors and .* a is int32"):
        layer(mx.ones((2, 64), mx.int32))
    cube = nn.Linear(64, 8)
    cube.weight = mx.ones((2, 8, 64))
    with pytest.raises(
        breccia.ShapeError, match=r"a weight of two axes with blocks along the last one; got shape \(2, 8, 64\)"
    ):
        ScaledLinear.from_linear(cube, MXFP8)
    with pytest.raises(
        AttributeError,
        match=r"module 'breccia_mlx' has no attribute 'quantise'; it has QuantizeSummary, export_function, from_tree",
    ):
        breccia_mlx.quantise  # noqa: B018


def test_missing_attributes_of_a_weight_get_the_call_to_make() -> None:
    weight = ScaledLinear(64, 8, recipe=MXFP8).weight
    for name in ("T", "mT", "dtype"):
        with pytest.raises(
            AttributeError, match=rf"'{name}': st = weight\.tensor, .* has st\.{name}; breccia\.matmul\(x, st\.mT\)"
        ):
            getattr(weight, name)
    with pytest.raises(
        AttributeError, match=r"'astype': codes have .* breccia\.dequantize\(st, out_dtype='float16'\).* weight\.tensor"
    ):
        weight.astype(mx.float16)
    with pytest.raises(AttributeError, match=r"no attribute 'unknown'$"):
        weight.unknown  # noqa: B018


def test_operators_of_mlx_refuse_a_scaled_tensor_and_name_the_call_to_make() -> None:
    """`@` and functions with typed arguments do not dispatch to the other operand, so MLX raises its TypeError."""
    st = breccia.cast(mx.ones((8, 64)), MXFP8)
    for call in (lambda: mx.array(st), lambda: mx.ones((8, 64)) * st, lambda: st + mx.ones((8, 64))):
        with pytest.raises(breccia.UnsupportedError, match=r"breccia\.dequantize\(st\) returns its values"):
            call()
    with pytest.raises(TypeError, match="incompatible function arguments"):
        mx.ones((2, 64)) @ st.mT


def test_a_layer_can_name_quantized_matmul(model: Model) -> None:
    plain = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    named = copy.deepcopy(plain)
    breccia_mlx.quantize(plain, MXFP8)
    breccia_mlx.quantize(named, MXFP8, prefer="mlx.quantized_matmul")
    x = mx.random.normal((3, 64))
    product = breccia.matmul(x, named.layers[0].weight.tensor.mT, prefer="mlx.quantized_matmul") + named.layers[0].bias
    assert mx.array_equal(named.layers[0](x), product)
    assert mx.allclose(named(x), plain(x), rtol=1e-4, atol=1e-5), "sums in another order"


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "int4"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_a_change_of_dtype_over_all_parameters_is_refused_by_the_layer(recipe: str, dtype: Any) -> None:
    model = nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 128))
    breccia_mlx.quantize(model, as_mlx(recipe))
    model.apply(lambda p: p.astype(dtype))
    for layer, x in zip(model.layers, (mx.array([3]), mx.ones((2, 64))), strict=True):
        with pytest.raises(breccia.UnsupportedError, match=rf"parameter {recipe}.data has dtype mlx.core.*model.set_dtype"):
            layer(x)
