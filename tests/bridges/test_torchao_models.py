"""Models that torchao quantized become models of breccia's layers with the same weights, and return."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")
from torch import nn  # noqa: E402

import breccia  # noqa: E402
from breccia import DialectError, OptionError, UnsupportedError, bytes_equal  # noqa: E402
from breccia_torch import from_torchao_model_, quantize_, to_torchao_model_  # noqa: E402
from breccia_torch.nn import ScaledLinear  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.covering(1, 2)]

from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig  # noqa: E402
from torchao.quantization import (  # noqa: E402
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    PerRow,
)
from torchao.quantization import quantize_ as torchao_quantize_  # noqa: E402


def model(shared: bool = False) -> Any:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.LayerNorm(128), nn.Linear(128, 256, bias=False)
    )
    if shared:
        made[4].weight = made[0].weight.__class__(made[4].weight)
        made.append(made[0])
    return made.eval()


CONFIGS = {
    "float8": Float8WeightOnlyConfig(),
    "int8": Int8WeightOnlyConfig(version=2),
    "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "nvfp4": NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=False),
}


def quantized(config: str) -> Any:
    made = model()
    torchao_quantize_(made, CONFIGS[config])
    return made


@pytest.mark.parametrize("config", CONFIGS)
def test_a_model_keeps_its_weights_and_its_outputs(config: str) -> None:
    theirs, ours = quantized(config), quantized(config)
    names = from_torchao_model_(ours)
    assert names == ("0.weight", "2.weight", "4.weight")
    x = torch.randn(8, 128)
    for i in (0, 2, 4):
        assert isinstance(ours[i], ScaledLinear) and ours[i].activation is None
        assert bytes_equal(ours[i].weight.tensor, breccia.from_foreign(theirs[i].weight))
    assert torch.allclose(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_model_returns_with_the_same_bits(config: str) -> None:
    theirs, ours = quantized(config), quantized(config)
    from_torchao_model_(ours)
    assert to_torchao_model_(ours) == ("0.weight", "2.weight", "4.weight")
    for i in (0, 2, 4):
        a, b = ours[i].weight, theirs[i].weight
        assert type(a) is type(b) and a.dtype == b.dtype
        for name in type(a).tensor_data_names:
            x, y = getattr(a, name), getattr(b, name)
            assert x.dtype == y.dtype and torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)), name
    x = torch.randn(8, 128)
    assert torch.allclose(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "recipe"),
    (
        (Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()), breccia.Float8RowScaling()),
        (Int8DynamicActivationInt8WeightConfig(version=2), breccia.INT8Scaling(scale_rule="half_range")),
    ),
)
def test_quantized_inputs_stay_quantized_by_the_same_recipe(config: Any, recipe: breccia.ScalingRecipe) -> None:
    theirs, ours = model(), model()
    try:
        torchao_quantize_(theirs, config)
    except AssertionError as e:  # torchao quantizes for FP8 products on GPUs that have them only
        pytest.skip(f"torchao refuses this CPU: {e}")
    torchao_quantize_(ours, config)
    from_torchao_model_(ours)
    assert all(ours[i].activation == recipe for i in (0, 2, 4))
    x = torch.randn(8, 128)
    expected = theirs(x)
    assert (ours(x) - expected).norm() < 0.05 * expected.norm()
    to_torchao_model_(ours)
    assert all(type(ours[i].weight.act_quant_kwargs) is type(theirs[i].weight.act_quant_kwargs) for i in (0, 2, 4))
    assert torch.allclose(ours(x), expected, rtol=1e-3, atol=1e-3)


def test_inputs_are_left_alone_or_cast_by_another_recipe_on_demand() -> None:
    ours = quantized("float8")
    from_torchao_model_(ours, activation="mxfp8")
    assert ours[0].activation == breccia.MXFP8BlockScaling()


def test_shared_layers_stay_shared() -> None:
    ours = model()
    ours.append(ours[0])
    torchao_quantize_(ours, CONFIGS["int8"])
    assert from_torchao_model_(ours) == ("0.weight", "2.weight", "4.weight", "5.weight")
    assert ours[5] is ours[0]
    to_torchao_model_(ours)
    assert ours[5] is ours[0]


@pytest.mark.parametrize("recipe", ("fp8_row", "int8", "int4,group_size=32,scale_dtype=fp32"))
def test_a_model_that_breccia_quantized_runs_in_torchao(recipe: str) -> None:
    ours = model()
    quantize_(ours, recipe)
    x = torch.randn(8, 128)
    expected = ours(x)
    to_torchao_model_(ours)
    assert type(ours[0]) is nn.Linear and type(ours[0].weight).__module__.startswith("torchao")
    assert torch.allclose(ours(x), expected, rtol=1e-4, atol=1e-4)


def test_models_without_such_layers_are_refused() -> None:
    with pytest.raises(OptionError, match="no nn.Linear of this model has a torchao tensor"):
        from_torchao_model_(model())
    with pytest.raises(OptionError, match="the model has no ScaledLinear"):
        to_torchao_model_(model())
    with pytest.raises(UnsupportedError, match="takes an nn.Module; got a int"):
        from_torchao_model_(3)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="this model is itself one"):
        from_torchao_model_(quantized("int8")[0])


def test_nothing_is_replaced_if_one_layer_cannot_be() -> None:
    ours = quantized("int8")
    ours[2].weight.act_pre_scale = torch.ones(256)
    with pytest.raises(DialectError, match=r"2\.weight: Int8Tensor .* has act_pre_scale"):
        from_torchao_model_(ours)
    assert type(ours[0]) is nn.Linear
    mixed = model()
    quantize_(mixed, "mxint8")
    with pytest.raises(DialectError, match=r"0\.weight: torchao's classes hold"):
        to_torchao_model_(mixed)
    assert type(mixed[0]) is ScaledLinear
