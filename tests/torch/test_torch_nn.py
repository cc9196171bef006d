"""ScaledLinear, quantize_, and whole quantized models in state_dicts and files."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import on_cuda
from products import assert_same_product
from safetensors import safe_open
from torch import nn
from torch.nn import functional

import breccia
import breccia_torch
from breccia.testing.examples import wide
from breccia_torch.nn import ScaledLinear, ScaledWeight
from breccia_torch.ops import WORDS

pytestmark = [pytest.mark.filterwarnings("ignore:`torch.jit"), pytest.mark.covering(1, 2)]

MXFP8 = breccia.MXFP8BlockScaling()
NVFP4 = breccia.NVFP4BlockScaling()
IDS = torch.tensor([[1, 5, 9, 0], [3, 3, 2, 8]])


class Encoder(nn.Module):
    """Tied, nested and externally read layers of every kind; K = 40 leaves partial last blocks of 16 and 32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 40)
        self.first = nn.Linear(40, 40)
        self.second = nn.Linear(40, 40, bias=False)
        self.second.weight = self.first.weight
        self.again = self.first
        self.attention = nn.MultiheadAttention(40, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(40, 48), nn.GELU(), nn.Linear(48, 40))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(40, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Any) -> Any:
        x = self.again(self.second(self.first(self.embedding(ids))))
        x = x + self.attention(x, x, x)[0]
        return self.head(self.mlp(self.norm(x)))


QUANTIZED = ["first", "second", "again", "mlp.0", "mlp.2"]


def encoder(seed: int = 0) -> Encoder:
    torch.manual_seed(seed)
    return Encoder().eval()


def quantized(recipe: breccia.ScalingRecipe = NVFP4, seed: int = 0, **options: Any) -> Encoder:
    model = encoder(seed)
    breccia_torch.quantize_(model, recipe, **options)
    return model


def scaled(model: nn.Module) -> dict[str, ScaledLinear]:
    return {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, ScaledLinear)}


def linear(rows: int = 6, columns: int = 72, **options: Any) -> nn.Linear:
    made = nn.Linear(columns, rows, **options)
    with torch.no_grad():
        made.weight.copy_(torch.from_numpy(wide((rows, columns), seed=1, exponents=1)))
    return made


# -- one layer -------------------------------------------------------------------------------------------------------


def test_a_layer_computes_with_its_decoded_weight(recipe: breccia.ScalingRecipe) -> None:
    plain = linear()
    if recipe.name == "fp8_delayed":  # margins that hold no number of this size are for a history to find
        recipe = breccia.DelayedScaling()
    layer = ScaledLinear.from_linear(plain, recipe)
    assert breccia.bytes_equal(layer.weight.tensor, breccia.cast(plain.weight, recipe))
    weight = breccia.dequantize(breccia.cast(plain.weight.detach(), recipe))
    for shape in ((5, 72), (2, 3, 72), (72,), (0, 72)):
        x = torch.from_numpy(wide(shape, seed=2, exponents=1)) if shape != (72,) else torch.ones(72)
        expected = x.reshape(-1, 72).matmul(weight.mT).reshape(*shape[:-1], 6) + plain.bias
        assert_same_product(layer(x), expected, x, weight.mT, rest=plain.bias)
    assert (layer.in_features, layer.out_features, layer.bias is plain.bias) == (72, 6, True)


def test_an_activation_is_cast_with_its_rows_as_tokens() -> None:
    for activation in (MXFP8, breccia.Float8BlockScaling(), breccia.Float8CurrentScaling(), NVFP4):
        plain = linear()
        layer = ScaledLinear.from_linear(plain, NVFP4, activation=activation)
        cube = torch.from_numpy(wide((2, 3, 72), seed=3, exponents=1))
        tokens = breccia.cast(cube.reshape(6, 72), activation)
        expected = breccia.matmul(tokens, breccia.cast(plain.weight, NVFP4).mT).reshape(2, 3, 6) + plain.bias
        values = breccia.dequantize(tokens).reshape(2, 3, 72), breccia.dequantize(breccia.cast(plain.weight.detach(), NVFP4)).mT
        assert_same_product(layer(cube), expected, *values, rest=plain.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_output_has_the_dtype_of_the_input_or_of_autocast(dtype: torch.dtype) -> None:
    plain = linear()
    x = torch.from_numpy(wide((5, 72), seed=4, exponents=1))
    for activation in (None, MXFP8):
        layer = ScaledLinear.from_linear(plain, NVFP4, activation=activation)
        y = layer(x.to(dtype))
        rows = x.to(dtype) if activation is None else breccia.cast(x.to(dtype), MXFP8)
        product = breccia.matmul(rows, layer.weight.tensor.mT)
        assert y.dtype == dtype and torch.equal(y, (product + plain.bias).to(dtype)), "rounded once"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x).dtype == plain(x).dtype == torch.bfloat16
            assert torch.equal(layer(x), layer(x.bfloat16()))


def test_gradients_reach_the_input_and_the_bias() -> None:
    plain = linear()
    weight = breccia.dequantize(breccia.cast(plain.weight.detach(), NVFP4))
    upstream = torch.from_numpy(wide((5, 6), seed=5, exponents=1))
    for activation in (None, MXFP8):
        layer = ScaledLinear.from_linear(plain, NVFP4, activation=activation)
        x = torch.from_numpy(wide((5, 72), seed=4, exponents=1)).requires_grad_()
        assert layer.bias is not None
        found = torch.autograd.grad(layer(x), (x, layer.bias), upstream)
        assert_same_product(found[0], upstream @ weight, upstream, weight)  # straight through the cast of the activation
        assert torch.equal(found[1], upstream.sum(0))
        with torch.no_grad():
            assert torch.equal(layer(x), layer(x.detach())), "the value does not depend on who wants a gradient"
        assert torch.equal(layer(x), layer(x.detach()))
        assert [name for name, _ in layer.named_parameters()] == ["bias"]


def test_a_layer_is_constructed_like_a_linear_layer() -> None:
    torch.manual_seed(3)
    plain = nn.Linear(64, 8, dtype=torch.bfloat16)
    torch.manual_seed(3)
    layer = ScaledLinear(64, 8, dtype=torch.bfloat16, recipe=MXFP8, activation=NVFP4)
    assert breccia.bytes_equal(layer.weight.tensor, breccia.cast(plain.weight, MXFP8))
    assert layer.bias is not None and torch.equal(layer.bias, plain.bias) and layer.activation == NVFP4
    assert ScaledLinear(64, 8, bias=False, recipe=MXFP8).bias is None
    assert ScaledLinear(64, 8, device="meta", recipe=MXFP8).weight.device.type == "meta"
    assert repr(layer).startswith("ScaledLinear(\n  in_features=64, out_features=8, bias=True, activation=NVFP4BlockScaling(")
    assert f"(weight): ScaledWeight((8, 64), {MXFP8!r})" in repr(layer)


def test_changing_the_dtype_of_a_model_keeps_codes_and_scales(recipe: breccia.ScalingRecipe) -> None:
    layer = ScaledLinear.from_linear(linear(), recipe)
    digest = layer.weight.tensor.digest()
    changes = (nn.Module.half, nn.Module.bfloat16, nn.Module.double, nn.Module.float)
    for change in (*changes, lambda m: m.type(torch.bfloat16), lambda m: m.to(torch.float16)):
        assert change(layer).weight.tensor.digest() == digest
    assert layer.bias is not None and layer.bias.dtype == torch.float16
    copied = copy.deepcopy(layer)
    assert copied.weight.tensor.digest() == digest and copied.weight.data.data_ptr() != layer.weight.data.data_ptr()
    assert {part.device.type for part in layer.to("meta").weight.buffers()} == {"meta"}
    empty = layer.to_empty(device="cpu").weight.tensor
    assert (empty.shape, empty.data.dtype, empty.recipe) == ((6, 72), copied.weight.data.dtype, recipe)


def test_a_layer_trains_in_a_compiled_graph() -> None:
    for activation in (None, MXFP8):
        layer = ScaledLinear.from_linear(linear(), NVFP4, activation=activation)
        fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
        x = torch.from_numpy(wide((5, 72), seed=4, exponents=1))
        weight = breccia.dequantize(layer.weight.tensor)
        rows = x if activation is None else breccia.dequantize(breccia.cast(x, activation))
        with torch.no_grad():
            assert_same_product(fast(x), layer(x), rows, weight.mT, rest=layer.bias)
        pair = [x.clone().requires_grad_() for _ in range(2)]
        fast(pair[0]).sum().backward()
        layer(pair[1]).sum().backward()
        assert_same_product(pair[0].grad, pair[1].grad, torch.ones(5, 6), weight)
        torch._dynamo.reset()


# -- quantize_ -------------------------------------------------------------------------------------------------------


def test_every_plain_linear_layer_is_replaced_and_ties_stay() -> None:
    plain, model = encoder(), quantized()
    assert list(scaled(model)) == QUANTIZED
    assert model.first is model.again and model.first.weight is model.second.weight
    assert model.head.weight is model.embedding.weight, "tied to an embedding, it stays as it is"
    assert isinstance(model.attention.out_proj, nn.Linear), "MultiheadAttention reads its weight"
    for name, layer in scaled(model).items():
        assert breccia.bytes_equal(layer.weight.tensor, breccia.cast(plain.get_submodule(name).weight, NVFP4))
        assert not layer.training
    for module in (plain.first, plain.second, plain.mlp[0], plain.mlp[2]):
        module.weight.data = breccia.dequantize(breccia.cast(module.weight.detach(), NVFP4))
    torch.testing.assert_close(model(IDS), plain(IDS))  # the order of summation is free


def test_a_filter_sees_linear_layers_and_their_names() -> None:
    seen: list[tuple[str, type]] = []

    def only_mlp(module: nn.Module, name: str) -> bool:
        seen.append((name, type(module)))
        return name.startswith("mlp")

    model = quantized(filter_fn=only_mlp, activation=MXFP8)
    assert list(scaled(model)) == ["mlp.0", "mlp.2"] and all(m.activation == MXFP8 for m in scaled(model).values())
    assert [name for name, _ in seen] == ["first", "second", "again", "attention.out_proj", "mlp.0", "mlp.2", "head"]
    assert all(issubclass(kind, nn.Linear) for _, kind in seen)
    breccia_torch.quantize_(model, MXFP8, lambda _, name: name in ("first", "second", "again"))
    found = [layer.weight.recipe.name for layer in scaled(model).values()]
    assert found == ["mxfp8", "mxfp8", "mxfp8", "nvfp4", "nvfp4"]


def odd_rows() -> nn.Module:
    """Its second layer cannot be cast."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float64))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: breccia_torch.quantize_(nn.Linear(8, 8), MXFP8), TypeError, r"got a Linear: .*ScaledLinear\.from_linear"),
        (lambda: breccia_torch.quantize_([nn.Linear(8, 8)], MXFP8), TypeError, r"replaces layers of a model; got a list\."),
        (lambda: breccia_torch.quantize_(encoder(), 8), TypeError, "recipe must be a ScalingRecipe instance, got int"),
        (lambda: breccia_torch.quantize_(encoder(), breccia.INT4Scaling), TypeError, r"did you mean INT4Scaling\(\)\?"),
        (
            lambda: breccia_torch.quantize_(encoder(), MXFP8, lambda _, name: name == "head"),
            TypeError,
            r"head\.weight is tied to embedding\.weight, which would not .* = nn\.Parameter\(head\.weight\.clone\(\)\)",
        ),
        (
            lambda: breccia_torch.quantize_(encoder(), MXFP8, lambda _, name: name == "second"),
            TypeError,
            r"second\.weight is tied to first\.weight, which would not be quantized\. Leave second out",
        ),
        (
            lambda: breccia_torch.quantize_(encoder(), MXFP8, lambda *_: False),
            ValueError,
            "chosen: .*left out by filter_fn: first.weight, ",
        ),
        (
            lambda: breccia_torch.quantize_(nn.ReLU(), MXFP8),
            ValueError,
            "chosen: the model has no floating parameter of two axes; 0 are",
        ),
        (lambda: breccia_torch.quantize_(odd_rows(), MXFP8), TypeError, r"quantize_: 1\.weight: cast takes float32, .*float64"),
        (
            lambda: ScaledWeight(torch.ones(2)),
            TypeError,
            "takes a ScaledTensor of torch, got Tensor; breccia.cast makes one",
        ),
        (lambda: ScaledWeight(breccia.cast(wide((4, 32)), MXFP8)), TypeError, "ScaledTensor of torch, got numpy; convert"),
        (
            lambda: ScaledLinear.in_place_of(nn.Linear(8, 8), ScaledWeight(breccia.cast(torch.ones(8, 16), MXFP8))),
            ValueError,
            r"weight of shape \(8, 8\), and the quantized one is \(8, 16\)",
        ),
        (
            lambda: ScaledLinear.in_place_of(nn.Linear(8, 8), ScaledWeight(breccia.cast(torch.ones(8, 8), MXFP8, axis=-2))),
            ValueError,
            r"with blocks along the last axis; got shape \(8, 8\) and axis -2",
        ),
        (lambda: ScaledLinear(8, 8, recipe=MXFP8, activation=8), TypeError, "recipe must be a ScalingRecipe instance, got int"),
    ],
)
def test_what_cannot_be_quantized_is_named(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_nothing_is_replaced_unless_everything_can_be() -> None:
    model = odd_rows()
    with pytest.raises(TypeError):
        breccia_torch.quantize_(model, MXFP8)
    assert [type(m) for m in model] == [nn.Linear, nn.Linear]


# -- state_dict ------------------------------------------------------------------------------------------------------


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Through `torch.save` and back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_loads_into_another_model(recipe: breccia.ScalingRecipe, assign: bool) -> None:
    model = quantized(recipe, activation=MXFP8)
    state = saved(model.state_dict())
    assert {"mlp.0.weight.data", "mlp.0.weight.scale", "mlp.0.weight._extra_state", "mlp.0.bias"} <= state.keys()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    other = quantized(recipe, seed=1, activation=MXFP8)
    other.load_state_dict(state, assign=assign)
    assert all(breccia.bytes_equal(scaled(other)[n].weight.tensor, m.weight.tensor) for n, m in scaled(model).items())
    assert {m.activation for m in scaled(other).values()} == {MXFP8}
    assert torch.equal(torch.nan_to_num(other(IDS)), torch.nan_to_num(model(IDS)))


def test_a_state_dict_of_a_transposed_column_of_elements_loads() -> None:
    """Its metadata names a tile one row high, which is no block along K: `PerBlockMN(4, 1).mT`."""
    recipe = breccia.Float8BlockScaling(block_m=4, block_k=1)
    ones, twos = (ScaledWeight(breccia.cast(torch.full((8, 4), n), recipe).mT) for n in (1.0, 2.0))
    ones.load_state_dict(twos.state_dict())
    assert ones.tensor.layout == breccia.PerBlockMN(4, 1).mT and torch.equal(
        breccia.dequantize(ones.tensor), torch.full((4, 8), 2.0)
    )


def test_a_state_dict_with_other_metadata_is_refused() -> None:
    state = quantized(MXFP8).state_dict()
    with pytest.raises(RuntimeError, match=r"mlp\.0\.weight: the state has recipe MXFP8.*, and the model recipe NVFP4"):
        quantized(NVFP4).load_state_dict(state)
    other = quantized(breccia.MXFP8BlockScaling("E5M2"))  # parts of equal shapes, whose numbers copying would convert
    digest = other.first.weight.tensor.digest()
    with pytest.raises(RuntimeError, match="quantize the model like the saved one"):
        other.load_state_dict(state)
    assert other.first.weight.tensor.digest() == digest
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "first\._extra_state"'):
        quantized(MXFP8).load_state_dict(encoder().state_dict())


def test_codes_are_accepted_as_bytes_but_not_in_other_dtypes() -> None:
    state = quantized(MXFP8).state_dict()
    as_bytes = {k: v.view(torch.uint8) if v.dtype.is_floating_point and v.itemsize == 1 else v for k, v in state.items()}
    other = quantized(MXFP8, seed=1)
    other.load_state_dict(as_bytes)
    assert other.first.weight.tensor.digest() == quantized(MXFP8).first.weight.tensor.digest()
    as_floats = {k: v.float() if k.endswith("weight.data") else v for k, v in state.items()}
    with pytest.raises(RuntimeError, match=r"first\.weight: data is float32 in the state and float8_e4m3fn in the model"):
        other.load_state_dict(as_floats)


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("activation", [None, MXFP8])
def test_a_file_says_which_layers_are_quantized(activation: breccia.ScalingRecipe | None, tmp_path: Path) -> None:
    model = quantized(activation=activation)
    path = tmp_path / "model.safetensors"
    breccia_torch.save_model(model, path, {"made": "by hand"})
    with safe_open(path, "pt") as file:
        names, metadata = set(file.keys()), file.metadata()
    assert {"first.weight.data", "first.weight.scale", "first.weight.global_scale", "norm.running_mean"} <= names
    assert not any(name.startswith(("second.", "again.w", "head.")) and "_extra" not in name for name in names), "stored once"
    assert metadata["made"] == "by hand" and json.loads(metadata["first.weight.config"])["recipe"]["name"] == "nvfp4"

    with torch.device("meta"):
        empty = Encoder().eval()
        promised = Encoder().eval()
        breccia_torch.quantize_(promised, MXFP8)
    others = (encoder(1), quantized(MXFP8, seed=1), quantized(seed=2, activation=breccia.INT8Scaling()), empty, promised)
    for other in others:
        assert breccia_torch.load_model(other, path) == ([], [])
        assert list(scaled(other)) == QUANTIZED and {m.activation for m in scaled(other).values()} == {activation}
        assert other.first is other.again and other.first.weight is other.second.weight
        assert other.head.weight is other.embedding.weight and isinstance(other.head.weight, nn.Parameter)
        assert torch.equal(other(IDS), model(IDS))
        assert all(breccia.bytes_equal(scaled(other)[n].weight.tensor, m.weight.tensor) for n, m in scaled(model).items())


def test_weights_of_a_plain_file_are_cast_if_the_model_is_quantized(tmp_path: Path) -> None:
    breccia_torch.save_model(encoder(), tmp_path / "plain.safetensors")
    model = quantized(seed=1)
    breccia_torch.load_model(model, tmp_path / "plain.safetensors")
    assert torch.equal(model(IDS), quantized()(IDS))


def test_a_converted_checkpoint_loads_into_the_model_it_came_from(tmp_path: Path) -> None:
    """Embeddings that are quantized in the file get the decoded values."""
    plain = encoder()
    breccia_torch.save_model(plain, tmp_path / "in.safetensors")
    breccia.bridges.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", MXFP8, include=["*"])
    other = encoder(1)
    breccia_torch.load_model(other, tmp_path / "out.safetensors")
    weight = plain.embedding.weight.detach()
    assert torch.equal(other.embedding.weight, breccia.dequantize(breccia.cast(weight, MXFP8)))
    assert other.head.weight is other.embedding.weight
    assert breccia.bytes_equal(scaled(other)["mlp.0"].weight.tensor, breccia.cast(plain.mlp[0].weight, MXFP8))
    read = plain.attention.out_proj.weight.detach()  # by MultiheadAttention itself, as a tensor
    assert torch.equal(other.attention.out_proj.weight, breccia.dequantize(breccia.cast(read, MXFP8)))
    assert other(IDS).shape == plain(IDS).shape


def test_tied_names_share_one_tensor_in_the_file(tmp_path: Path) -> None:
    apart = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    tied = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    tied[1].weight = tied[0].weight
    breccia_torch.save_model(apart, tmp_path / "two.safetensors")
    with pytest.raises(breccia.ShapeError, match=r"the model ties 0\.weight and 1\.weight, but they differ in the file"):
        breccia_torch.load_model(tied, tmp_path / "two.safetensors")
    apart[1].load_state_dict(apart[0].state_dict())
    breccia_torch.save_model(apart, tmp_path / "same.safetensors")
    assert breccia_torch.load_model(tied, tmp_path / "same.safetensors") == ([], [])
    assert torch.equal(tied[1].weight, apart[0].weight)


def test_blocks_along_the_other_axis_are_refused_before_anything_changes(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    weights = {f"{n}.weight": breccia.cast(m.weight.detach(), MXFP8, axis=-1 - n) for n, m in enumerate(plain)}
    biases = {f"{n}.bias": torch.ones(32) for n in range(2)}
    breccia.bridges.save_safetensors(weights | biases, tmp_path / "m.safetensors")
    for model in (plain, nn.Sequential(nn.Linear(32, 32), ScaledLinear(32, 32, recipe=MXFP8))):
        before = [type(m) for m in model]
        with pytest.raises(breccia.ShapeError, match=r"1\.weight has blocks along axis -2 in the file"):
            breccia_torch.load_model(model, tmp_path / "m.safetensors")
        assert [type(m) for m in model] == before and not torch.equal(model[0].bias, torch.ones(32))


def test_a_meta_model_loads_its_own_dtype_onto_the_requested_device(tmp_path: Path) -> None:
    breccia_torch.save_model(nn.Linear(4, 4), tmp_path / "m.safetensors", {"made": "here"})
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt" and file.metadata()["made"] == "here"
    model = nn.Linear(4, 4, device="meta", dtype=torch.bfloat16)
    breccia_torch.load_model(model, tmp_path / "m.safetensors", device="cpu")
    assert (model.weight.dtype, model.weight.device.type) == (torch.bfloat16, "cpu")


def test_a_failed_load_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    breccia_torch.save_model(quantized(), path)
    small = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(40, 48), nn.GELU(), nn.Linear(48, 40)), "extra": nn.Linear(2, 2)})
    before = {name: t.clone() for name, t in small.state_dict().items()}
    with pytest.raises(
        breccia.UnknownNameError, match=r"this ModuleDict: missing: extra\.weight, extra\.bias; unexpected: emb"
    ):
        breccia_torch.load_model(small, path)
    assert all(torch.equal(before[name], t) for name, t in small.state_dict().items())
    missing, unexpected = breccia_torch.load_model(small, path, strict=False)
    assert missing == ["extra.weight", "extra.bias"] and "embedding.weight" in unexpected
    assert list(scaled(small)) == ["mlp.0", "mlp.2"]
    wrong = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(40, 48), nn.GELU(), nn.Linear(40, 48))})
    with pytest.raises(breccia.ShapeError, match=r"mlp\.2\.weight has shape \(40, 48\) in the file and \(48, 40\)"):
        breccia_torch.load_model(wrong, path, strict=False)
    assert not scaled(wrong)


def test_state_other_than_tensors_cannot_be_saved(tmp_path: Path) -> None:
    class Talks(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"words": 3}

    with pytest.raises(breccia.UnsupportedError, match=r"0\._extra_state is a dict, but safetensors stores only tensors"):
        breccia_torch.save_model(nn.Sequential(Talks(2, 2)), tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


@on_cuda
@pytest.mark.parametrize("activation", [None, MXFP8])
def test_a_model_moves_to_cuda_and_back(activation: breccia.ScalingRecipe | None, tmp_path: Path) -> None:
    """Sums of n products in another order: each lies within n * 2^-24 of the sum of magnitudes, and the bias rounds once."""
    model = quantized(activation=activation)
    breccia_torch.save_model(model, tmp_path / "model.safetensors")
    inputs = {name: torch.from_numpy(wide((5, m.in_features), seed=6, exponents=1)) for name, m in scaled(model).items()}
    expected = {name: m(inputs[name]) for name, m in scaled(model).items()}
    bounds: dict[str, Any] = {}
    for name, m in scaled(model).items():
        x = inputs[name] if activation is None else breccia.dequantize(breccia.cast(inputs[name], activation))
        sums = x.abs() @ breccia.dequantize(m.weight.tensor).abs().mT
        bounds[name] = 2 * (m.in_features + 1) * 2.0**-24 * (sums + (0 if m.bias is None else m.bias.abs()))
    model.cuda()
    assert {part.device.type for part in model.buffers()} == {"cuda"}
    for name, m in scaled(model).items():
        for layer in (m, torch.compile(m, fullgraph=True)):
            with torch.no_grad():
                assert bool(((layer(inputs[name].cuda()).cpu() - expected[name]).abs() <= bounds[name]).all())
        torch._dynamo.reset()
    found = model(IDS.cuda())
    other = encoder(1).cuda()
    breccia_torch.load_model(other, tmp_path / "model.safetensors")
    assert all(breccia.bytes_equal(scaled(other)[n].weight.tensor, m.weight.tensor) for n, m in scaled(model).items())
    assert torch.equal(other(IDS.cuda()), found)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert model.first(torch.ones(2, 40, device="cuda")).dtype == torch.bfloat16


def test_the_package_exports_only_its_public_names() -> None:
    assert set(dir(breccia_torch)) == set(breccia_torch.__all__)
    assert all(getattr(breccia_torch, name) is not None for name in breccia_torch.__all__)
    stub = (Path(breccia_torch.__file__).parent / "__init__.pyi").read_text(encoding="utf-8")
    assert all(f"import {name} as {name}" in stub for name in breccia_torch.__all__)
    wanted = "'breccia_torch' has no attribute 'quantise_'; it has convert_from_training_, convert_to_training_, enable_compile"
    with pytest.raises(AttributeError, match=wanted):
        breccia_torch.quantise_  # noqa: B018


class Scaling(nn.Linear):
    """More than a linear layer."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


def with_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].register_forward_hook(lambda *_: None)
    return model


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))


def with_buffer() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].register_buffer("input_scale", torch.ones(()))
    return model


def test_a_layer_with_a_buffer_of_its_own_is_left() -> None:
    model = with_buffer()
    summary = breccia_torch.quantize_(model, MXFP8)
    assert summary.left == {"0.weight": "its layer has input_scale beside weight and bias"}
    assert type(model[0]) is nn.Linear and type(model[1]) is ScaledLinear


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: breccia_torch.quantize_(with_hook(), MXFP8),
            TypeError,
            "0 has hooks or a custom forward, .*: quantize first, then add them",
        ),
        (
            lambda: breccia_torch.quantize_(with_buffer(), MXFP8, lambda *_: True),
            TypeError,
            "0 has input_scale beside its weight and bias, which its quantized layer would lose: leave it out",
        ),
        (
            lambda: breccia_torch.quantize_(nn.Sequential(Scaling(8, 8)), MXFP8, lambda *_: True),
            TypeError,
            "0 is a Scaling, which is more than a linear layer; leave it out",
        ),
        (
            lambda: breccia_torch.quantize_(normed(), MXFP8, lambda *_: True),
            TypeError,
            "0 is a ParametrizedLinear, which is",
        ),
        (
            lambda: breccia_torch.quantize_(encoder(), MXFP8, lambda _, name: "out_proj" in name),
            TypeError,
            r"attention\.out_proj is a NonDynamicallyQuantizableLinear, which is more",
        ),
        (lambda: breccia_torch.quantize_(nn.Sequential, MXFP8), TypeError, r"of a model; got the class Sequential\.$"),
        (
            lambda: breccia_torch.quantize_(encoder(), MXFP8, activation=8),
            TypeError,
            "recipe must be a ScalingRecipe instance, got int",
        ),
        (
            lambda: breccia_torch.quantize_(nn.Sequential(ScaledLinear(8, 8, recipe=MXFP8)), MXFP8),
            ValueError,
            r"1 are quantized already\.$",
        ),
        (lambda: ScaledLinear(8, 8, recipe=MXFP8)(torch.ones(2, 9)), ValueError, r"shape \(\.\.\., 8\); got \(2, 9\)"),
        (lambda: ScaledLinear(8, 8, recipe=MXFP8)(torch.ones(())), ValueError, r"shape \(\.\.\., 8\); got \(\)"),
        (lambda: ScaledLinear(8, 8, recipe=MXFP8)(torch.ones(2, 8).long()), TypeError, "float16, bfloat16 arrays; a is int64"),
        (
            lambda: breccia_torch.save_model({}, "m.safetensors"),
            TypeError,
            "takes an nn.Module and a path; got a dict",
        ),
        (
            lambda: breccia_torch.save_model(nn.Linear(2, 2, device="meta"), "m.safetensors"),
            TypeError,
            "save_model: weight is on the meta device and has no values",
        ),
    ],
)
def test_unsupported_calls_raise_with_a_reason(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_a_model_that_is_a_linear_layer_is_not_replaced(tmp_path: Path) -> None:
    breccia_torch.save_model(ScaledLinear(8, 8, recipe=MXFP8), tmp_path / "m.safetensors")
    with pytest.raises(TypeError, match="the model itself is a linear layer, which cannot be replaced in place"):
        breccia_torch.load_model(nn.Linear(8, 8), tmp_path / "m.safetensors")


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_torchs_own_transformers_run_in_evaluation() -> None:
    """Their fused path hands weights to a kernel as tensors."""
    layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
    models = [layer, nn.TransformerEncoder(layer, 2), nn.Transformer(64, 2, 1, 1, 128, 0.0, batch_first=True)]
    x = torch.from_numpy(wide((2, 5, 64), seed=7, exponents=1))
    for model in models:
        model.eval()
        inputs = (x, x) if isinstance(model, nn.Transformer) else (x,)
        breccia_torch.quantize_(model, NVFP4)
        with torch.no_grad():
            found = model(*inputs)
            assert found.shape == x.shape and bool(found.isfinite().all())
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                slow = model(*inputs)
            finally:
                torch.backends.mha.set_fastpath_enabled(True)
        assert torch.equal(slow, model(*inputs)), "no other path than that of training"


@pytest.mark.long
def test_forward_derivatives_pass_through_the_cast_of_an_activation() -> None:
    layer = ScaledLinear.from_linear(linear(), NVFP4, activation=MXFP8)
    x = torch.from_numpy(wide((5, 72), seed=4, exponents=1))
    tangent = torch.ones_like(x)
    weight = breccia.dequantize(layer.weight.tensor)
    assert_same_product(torch.func.jvp(layer, (x,), (tangent,))[1], tangent @ weight.mT, tangent, weight.mT)


def test_a_graph_keeps_no_high_precision_weights() -> None:
    kept: list[Any] = []
    layer = ScaledLinear(256, 512, bias=False, recipe=NVFP4)
    x = torch.ones(4, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    assert sum(t.nbytes for t in kept) <= layer.weight.tensor.nbytes + 4 * x.nbytes
    ones, weight = torch.ones_like(y), breccia.dequantize(layer.weight.tensor)
    assert_same_product(torch.autograd.grad(y.sum(), x)[0], ones @ weight, ones, weight)
    y = layer(x)
    layer.weight.data.fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_activation_that_differs_is_refused() -> None:
    model = quantized(activation=NVFP4)
    with pytest.raises(RuntimeError, match=r"first: the state has activation MXFP8.*, and the model activation NVFP4"):
        model.load_state_dict(quantized(activation=MXFP8).state_dict())
    assert model.first.activation == NVFP4


def test_state_dicts_are_compared_by_meaning() -> None:
    model = ScaledLinear(32, 8, recipe=MXFP8)
    state = model.state_dict()

    def told(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        listed = json.loads(bytes(state["weight._extra_state"].tolist()))
        text = json.dumps(change(listed) or listed, indent=2)
        return state | {"weight._extra_state": torch.tensor(list(text.encode()), dtype=torch.uint8)}

    model.load_state_dict(told(lambda listed: None))
    model.load_state_dict(told(lambda listed: listed["recipe"]["fields"].pop("scale_rule") and None))  # an older writer
    for broken in (told(lambda listed: [1]), state | {"weight._extra_state": torch.tensor([255], dtype=torch.uint8)}):
        with pytest.raises(RuntimeError, match="weight: its metadata cannot be read"):
            model.load_state_dict(broken)


@pytest.mark.long
def test_layers_compile_in_a_new_process() -> None:
    script = """
import torch, breccia, breccia_torch
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
breccia_torch.quantize_(model, breccia.NVFP4BlockScaling(), activation=breccia.MXFP8BlockScaling())
x = torch.randn(3, 64)
with torch.no_grad():
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


@pytest.mark.long
def test_eager_calls_do_not_load_a_compiler() -> None:
    script = """
import sys, torch, breccia, breccia_torch
model = torch.nn.Sequential(torch.nn.Linear(64, 32))
breccia_torch.quantize_(model, breccia.NVFP4BlockScaling(), activation=breccia.MXFP8BlockScaling())
model(torch.randn(3, 64, requires_grad=True)).sum().backward()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_functional_layer_matches_if_nothing_is_rounded() -> None:
    """INT8 represents a weight of integers exactly, so the layer's result is exact."""
    plain = nn.Linear(32, 8)
    with torch.no_grad():
        plain.weight.copy_(torch.arange(256.0).reshape(8, 32) % 11 - 5)
        plain.weight[:, 0] = 127
    layer = ScaledLinear.from_linear(plain, breccia.INT8Scaling())
    x = torch.arange(64.0).reshape(2, 32) - 30
    assert torch.equal(layer(x), functional.linear(x, plain.weight, plain.bias))


def test_the_transpose_that_a_weight_keeps_is_that_of_its_current_buffers() -> None:
    layer = ScaledLinear.from_linear(nn.Linear(64, 32), breccia.INT4Scaling())
    weight = layer.weight
    assert weight.transposed is weight.transposed
    other = breccia.cast(torch.randn(32, 64), breccia.INT4Scaling())
    changes: list[Callable[[], Any]] = [
        lambda: weight.take(other),
        lambda: setattr(weight, "scale", weight.scale * 2),
        lambda: setattr(weight.data, "data", torch.zeros_like(weight.data)),  # the same object, other memory
        lambda: [setattr(part, "data", part.data[:16]) for part in (weight.data, weight.scale)],  # and the same memory, cut
        lambda: weight.take(weight.tensor.to_storage("interleaved")),
        lambda: weight.take(weight.tensor.to_plain()),
        lambda: layer.to("cpu", torch.float64),
    ]
    for change in changes:
        change()
        assert weight.transposed.storage == weight.tensor.storage
        assert breccia.bytes_equal(weight.transposed, weight.tensor.mT)
    weight.data.zero_()  # in place: the transpose is a view
    assert not weight.transposed.data.any()
    copied, restored = copy.deepcopy(layer).weight, pickle.loads(pickle.dumps(layer)).weight
    for made in (copied, restored):
        assert made.transposed.data.data_ptr() == made.data.data_ptr() != weight.data.data_ptr()
    assert not any("transpose" in key for key in layer.state_dict())


@pytest.mark.parametrize("shape", [(16,), (1,), (), (5, 32), (32, 1)])
@pytest.mark.parametrize("trained", ["bias", "input", ""])
def test_a_bias_of_another_shape_is_refused_as_by_matmul(shape: tuple[int, ...], trained: str) -> None:
    layer = ScaledLinear.from_linear(nn.Linear(64, 32), MXFP8)
    layer.bias = nn.Parameter(torch.zeros(shape), trained == "bias")
    x = torch.randn(5, 64, requires_grad=trained == "input")
    with pytest.raises(breccia.ShapeError, match=r"bias has one number for each column of the product, shape \(32,\); got"):
        layer(x)


def test_a_layer_whose_rows_are_cut_computes_with_the_rest() -> None:
    """As pruning does: `parameter.data = parameter.data[:n]`."""
    layer, x = ScaledLinear.from_linear(nn.Linear(64, 32), MXFP8), torch.randn(5, 64)
    with torch.no_grad():
        expected = [layer(x)[:, :16] for _ in range(3)][-1]
        for part in (layer.weight.data, layer.weight.scale, layer.bias):
            part.data = part.data[:16]
        assert torch.equal(layer(x), expected)


def test_a_layer_that_repeats_a_product_notices_other_inputs_biases_and_modes() -> None:
    layer, x = ScaledLinear.from_linear(nn.Linear(64, 32), "int4"), torch.randn(2, 4, 64)
    room = torch.empty(x.nbytes + 1, dtype=torch.uint8)
    room[1:] = x.reshape(-1).view(torch.uint8)
    misaligned = torch.from_numpy(room.numpy()[1:].view("float32")).reshape(x.shape)
    inputs = {
        "other numbers": -x,
        "another shape": x[:1].clone(),
        "other strides": x.mT.contiguous().mT,
        "another dtype": x.bfloat16(),
        "misaligned": misaligned,
        "torch's negative bit": torch.complex(torch.zeros_like(x), x).conj().imag,
        "beyond the limits of the compiled kernel": x * 2.0**120,
        "a gradient": x.clone().requires_grad_(),
    }

    def expected(x: torch.Tensor) -> torch.Tensor:
        return breccia.matmul(x, layer.weight.tensor.mT, out_dtype=x.dtype, bias=layer.bias)

    layer.bias.requires_grad_(False)
    for other in inputs.values():
        for _ in range(3):
            layer(x)
        assert torch.equal(layer(other), expected(other))
        assert layer(other).dtype == other.dtype and layer(other).requires_grad == other.requires_grad
    for _ in range(3):
        layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    mapped, (_, tangent) = torch.func.vmap(layer)(x), torch.func.jvp(layer, (x,), (x,))
    for found, wanted in ((mapped, expected(x)), (tangent, expected(x) - layer.bias)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)  # 64 FP32 terms
    layer.bias.data = torch.ones(32)
    assert torch.equal(layer(x), expected(x))
    layer.bias.requires_grad_()
    assert layer(x).requires_grad
    layer.bias = None
    assert torch.equal(layer(x), expected(x))


def test_what_repeats_a_product_is_dropped_with_the_next_call_and_not_kept_for_weights_that_are_freed() -> None:
    layer, x = ScaledLinear.from_linear(nn.Linear(64, 32, bias=False), "int4"), torch.randn(2, 64)
    kept = layer.weight.__dict__
    for _ in range(3):
        layer(x)
    assert "_kept_transpose" in kept and "_kept_repeat" in kept
    layer(x[:1].clone())
    assert kept["_kept_repeat"] is None
    layer.weight.keeps_transpose = False  # accelerate frees the weight after each call
    for _ in range(3):
        layer(x)
    assert kept["_kept_repeat"] is None


def words(part: torch.Tensor) -> torch.Tensor:
    return part.view(WORDS[part.itemsize])


@pytest.mark.parametrize("how", ["assigned", "data", "load_state_dict", "in place", "set_"])
@pytest.mark.parametrize("part", ["data", "scale", "zero_point", "global_scale"])
def test_a_layer_notices_when_any_component_is_replaced(part: str, how: str) -> None:
    spec = "nvfp4" if part == "global_scale" else "int4,signed=false,symmetric=false"
    layer, x = ScaledLinear.from_linear(nn.Linear(64, 32, bias=False), spec), torch.randn(3, 64)
    other = ScaledLinear.from_linear(nn.Linear(64, 32, bias=False), spec)
    for _ in range(3):
        layer(x)  # keeps what it derives, and at the second call what repeats the product
    new = getattr(other.weight, part).clone()
    held = getattr(layer.weight, part)
    if how == "assigned":
        setattr(layer.weight, part, new)
    elif how == "data":
        held.data = new
    elif how == "load_state_dict":
        layer.load_state_dict(layer.state_dict() | {f"weight.{part}": new}, assign=True)
    elif how == "in place":
        words(held).copy_(words(new))
    else:
        held.set_(new)
    expected = breccia.matmul(x, layer.weight.tensor.mT)
    assert torch.equal(words(getattr(layer.weight.tensor, part)), words(new))
    assert torch.equal(layer(x), expected)
    torch.testing.assert_close(expected, x @ breccia.dequantize(layer.weight.tensor).mT, rtol=0, atol=1e-4)  # 64 FP32 terms


def test_layers_of_every_recipe_are_pickled(recipe: breccia.ScalingRecipe) -> None:
    layer = ScaledLinear.from_linear(nn.Linear(96, 64), recipe)
    for made in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer), copy.copy(layer)):
        assert breccia.bytes_equal(made.weight.tensor, layer.weight.tensor)
        assert [part.dtype for part in made.buffers()] == [part.dtype for part in layer.buffers()]
        assert made.state_dict().keys() == layer.state_dict().keys()
    meta = pickle.loads(pickle.dumps(ScaledLinear.from_linear(nn.Linear(96, 64, device="meta"), recipe)))
    assert meta.weight.tensor.device.type == "meta" and meta.weight.recipe == recipe


def test_a_layer_names_kernels_for_its_backward_pass_and_does_without_those_that_do_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from breccia.dispatch.table import Table

    named: list[Any] = []
    choose = Table.choose

    def recorded(self: Any, op: Any, *facts: Any) -> Any:
        named.append((op.name, facts[-1]))
        return choose(self, op, *facts)

    layer = ScaledLinear(64, 32, bias=False, recipe="fp8_row")
    x = torch.randn(4, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    for prefer in ("reference.matmul", "triton.matmul_bf16_rounded"):  # the second one does not run on CPUs
        layer.prefer_backward = prefer
        y = layer(x)
        with monkeypatch.context() as patch:
            patch.setattr(Table, "choose", recorded)
            (found,) = torch.autograd.grad(y.sum(), x)
        assert named[0] == ("matmul", prefer)
        named.clear()
        assert torch.allclose(found, expected, rtol=2.0**-18)
    assert ScaledLinear.prefer_backward is None
