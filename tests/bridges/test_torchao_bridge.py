"""torchao's tensors and breccia's: the same bytes, and the same floats as torchao's own `dequantize`, both ways."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")
F = torch.nn.functional

from broken import untyped  # noqa: E402

import breccia  # noqa: E402
from breccia import DialectError, ScaledTensor, UnsupportedError, bytes_equal  # noqa: E402
from breccia.bridges import from_torchao, to_torchao, torchao_activation  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.covering(1, 2)]

from torchao.prototype.mx_formats.config import ScaleCalculationMode  # noqa: E402
from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs  # noqa: E402
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale  # noqa: E402
from torchao.quantization import (  # noqa: E402
    Float8Tensor,
    Int8Tensor,
    IntxUnpackedToInt8Tensor,
    MappingType,
    PerRow,
    PerTensor,
)
from torchao.quantization.granularity import PerBlock  # noqa: E402


def special(*shape: int, dtype: Any = None, seed: int = 0) -> Any:
    """Values over many binades, with zeros of both signs, a zero row, subnormals and the largest codes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * torch.exp2(torch.randint(-20, 20, shape, generator=generator).float())
    flat = x.reshape(-1, shape[-1])
    flat[0, :4] = torch.tensor([0.0, -0.0, 448.0, -6.0])
    flat[-1] = 1e-30
    return x.to(dtype or torch.float32)


def plain(*shape: int, dtype: Any = None, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype or torch.float32)


def _fp8(granularity: Any, dtype: Any = torch.float8_e4m3fn) -> Callable[[Any], Any]:
    return lambda x: Float8Tensor.from_hp(x, dtype, granularity)


def _int8(granularity: Any, mapping: Any = None) -> Callable[[Any], Any]:
    return lambda x: Int8Tensor.from_hp(x, granularity, mapping or MappingType.SYMMETRIC)


def _intx(bits: int, group: int, mapping: Any = None) -> Callable[[Any], Any]:
    def quantize(x: Any) -> Any:
        block = (*(1 for _ in x.shape[:-1]), group)
        return IntxUnpackedToInt8Tensor.from_hp(
            x, block, getattr(torch, f"int{bits}"), mapping_type=mapping or MappingType.SYMMETRIC
        )

    return quantize


def _mx(element: Any, swizzled: bool = False, mode: Any = ScaleCalculationMode.FLOOR) -> Callable[[Any], Any]:
    return lambda x: MXTensor.to_mx(x, element, 32, mode, is_swizzled_scales=swizzled)


def _nvfp4(two_level: bool, swizzled: bool = False) -> Callable[[Any], Any]:
    def quantize(x: Any) -> Any:
        scale = per_tensor_amax_to_scale(x.abs().max().float()) if two_level else None
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale, is_swizzled_scales=swizzled)

    return quantize


ASYMMETRIC = MappingType.ASYMMETRIC
#: How torchao writes each class, and the recipe that breccia finds.
WRITTEN: dict[str, tuple[Callable[[Any], Any], breccia.ScalingRecipe]] = {
    "float8_tensor": (_fp8(PerTensor()), breccia.Float8CurrentScaling()),
    "float8_row": (_fp8(PerRow()), breccia.Float8RowScaling()),
    "float8_row_e5m2": (_fp8(PerRow(), torch.float8_e5m2), breccia.Float8RowScaling("E5M2")),
    "float8_block_1d": (_fp8(PerBlock([1, 128])), breccia.Float8BlockScaling()),
    "float8_block_2d": (_fp8(PerBlock([128, 128])), breccia.Float8BlockScaling(block_m=128)),
    "int8_row": (_int8(PerRow()), breccia.INT8Scaling()),
    "int8_tensor": (_int8(PerTensor()), breccia.INT8Scaling()),
    "int8_asymmetric": (_int8(PerRow(), ASYMMETRIC), breccia.INT8Scaling(signed=False, symmetric=False)),
    "int4_group": (_intx(4, 32), breccia.INT4Scaling(group_size=32, scale_dtype="fp32")),
    "int4_asymmetric": (
        _intx(4, 64, ASYMMETRIC),
        breccia.INT4Scaling(group_size=64, scale_dtype="fp32", signed=False, symmetric=False),
    ),
    "int3_group": (_intx(3, 32), breccia.INT8Scaling(group_size=32)),
    "int8_group": (_intx(8, 32, ASYMMETRIC), breccia.INT8Scaling(group_size=32, signed=False, symmetric=False)),
    "mxfp8": (_mx(torch.float8_e4m3fn), breccia.MXFP8BlockScaling()),
    "mxfp8_e5m2": (_mx(torch.float8_e5m2), breccia.MXFP8BlockScaling("E5M2")),
    "mxfp8_swizzled": (_mx(torch.float8_e4m3fn, True), breccia.MXFP8BlockScaling()),
    "mxfp6_e2m3": (_mx("fp6_e2m3"), breccia.MXFP6BlockScaling("E2M3")),
    "mxfp6_e3m2": (_mx("fp6_e3m2"), breccia.MXFP6BlockScaling("E3M2")),
    "mxfp4": (_mx(torch.float4_e2m1fn_x2), breccia.MXFP4BlockScaling()),
    "mxfp4_rceil": (_mx(torch.float4_e2m1fn_x2, True, ScaleCalculationMode.RCEIL), breccia.MXFP4BlockScaling()),
    "nvfp4": (_nvfp4(False), breccia.NVFP4BlockScaling(two_level=False)),
    "nvfp4_swizzled": (_nvfp4(False, True), breccia.NVFP4BlockScaling(two_level=False)),
    "nvfp4_two_level": (_nvfp4(True), breccia.NVFP4BlockScaling(order="scales_first")),
    "nvfp4_two_level_swizzled": (_nvfp4(True, True), breccia.NVFP4BlockScaling(order="scales_first")),
}
SHAPES = ((128, 256), (256, 384), (384, 640))
every = pytest.mark.parametrize("kind", WRITTEN)


def inner(t: Any) -> dict[str, Any]:
    """Every tensor and attribute of a torchao tensor, by torchao's own lists of them."""
    kind = type(t)
    names = [*kind.tensor_data_names, *getattr(kind, "optional_tensor_data_names", ())]
    names += [*kind.tensor_attribute_names, *getattr(kind, "optional_tensor_attribute_names", ())]
    return {name: getattr(t, name) for name in names}


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype
    left, right = inner(a), inner(b)
    for name, x in left.items():
        y = right[name]
        if isinstance(x, torch.Tensor):
            assert (x.dtype, x.shape) == (y.dtype, y.shape), name
            assert torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)), name
        else:
            assert x == y, (name, x, y)


def assert_same_floats(ours: Any, theirs: Any) -> None:
    """Equal bits, any NaN for any NaN."""
    assert ours.shape == theirs.shape
    nan = torch.isnan(theirs)
    assert torch.equal(torch.isnan(ours), nan)
    assert torch.equal(ours.contiguous().view(torch.int32)[~nan], theirs.contiguous().view(torch.int32)[~nan])


def decoded(t: Any) -> Any:
    return t.dequantize() if isinstance(t, IntxUnpackedToInt8Tensor) else t.dequantize(torch.float32)


@every
@pytest.mark.parametrize("values", (special, plain))
def test_tensors_that_torchao_makes_decode_to_its_own_floats(kind: str, values: Any) -> None:
    quantize, recipe = WRITTEN[kind]
    for shape in SHAPES:
        theirs = quantize(values(*shape))
        ours = from_torchao(theirs)
        assert ours.recipe == recipe and ours.shape == shape
        assert_same_floats(breccia.dequantize(ours), decoded(theirs))


@every
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_every_class_comes_back_with_equal_bytes_and_attributes(kind: str, dtype: Any) -> None:
    theirs = WRITTEN[kind][0](special(128, 256, dtype=dtype))
    ours = from_torchao(theirs)
    assert_same(to_torchao(ours, like=theirs), theirs)
    assert bytes_equal(from_torchao(to_torchao(ours, dtype=dtype)), ours)


@every
def test_stacks_of_experts_convert_too(kind: str) -> None:
    theirs = WRITTEN[kind][0](special(3, 128, 256))
    ours = from_torchao(theirs)
    assert ours.shape == (3, 128, 256)
    assert_same_floats(breccia.dequantize(ours), decoded(theirs))
    assert_same(to_torchao(ours, like=theirs), theirs)


def test_a_tensor_scale_for_each_expert_converts() -> None:
    x = plain(3, 128, 256)
    scale = per_tensor_amax_to_scale(x.abs().amax((1, 2), keepdim=True).float())
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)
    ours = from_torchao(theirs)
    assert tuple(ours.global_scale.shape) == (3,)
    assert_same(to_torchao(ours, like=theirs), theirs)
    assert_same_floats(breccia.dequantize(ours), theirs.dequantize(torch.float32))


def test_the_order_of_nvfp4s_scales_is_torchaos_unless_the_caller_chooses() -> None:
    theirs = NVFP4Tensor.to_nvfp4(plain(128, 256), per_tensor_scale=torch.tensor(0.37))
    first, last = from_torchao(theirs), from_torchao(theirs, breccia.NVFP4BlockScaling())
    assert last.recipe == breccia.NVFP4BlockScaling() and first.recipe.format != last.recipe.format
    assert torch.equal(first.data, last.data) and first.global_scale == last.global_scale
    # Both orders round twice where the exact product is not a code times a power of two: they differ by a unit at most.
    values = breccia.dequantize(last)
    assert not torch.equal(values, decoded(theirs)) and torch.allclose(values, decoded(theirs), rtol=2.0**-23, atol=0)
    assert_same(to_torchao(last, like=theirs), theirs)
    with pytest.raises(breccia.DialectError, match="decodes differently"):
        from_torchao(theirs, breccia.NVFP4BlockScaling(global_sense="amax"))
    with pytest.raises(breccia.DialectError, match="decodes differently"):
        from_torchao(_nvfp4(False)(plain(128, 256)), breccia.NVFP4BlockScaling(order="scales_first"))


@pytest.mark.parametrize("kind", [k for k in WRITTEN if "fp" in k and "fp6" not in k])
def test_transposed_tensors_have_blocks_along_the_other_axis(kind: str) -> None:
    theirs = WRITTEN[kind][0](plain(128, 256)).t()
    ours = from_torchao(theirs)
    assert ours.shape == (256, 128)
    assert ours.axis == -2 or "tensor" in kind or "float8_block" in kind
    assert_same(to_torchao(ours, like=theirs), theirs)
    assert_same_floats(breccia.dequantize(ours), decoded(theirs))


@pytest.mark.parametrize("kind", [k for k in WRITTEN if k.startswith(("float8", "mxfp8", "mxfp4", "nvfp4"))])
def test_codes_and_scales_are_shared_where_the_packing_agrees(kind: str) -> None:
    theirs = WRITTEN[kind][0](plain(128, 256))
    ours = from_torchao(theirs)
    assert ours.data.data_ptr() == theirs.qdata.data_ptr()
    assert ours.scale.data_ptr() == theirs.scale.data_ptr()
    again = to_torchao(ours, like=theirs)
    assert again.qdata.data_ptr() == theirs.qdata.data_ptr()
    assert again.scale.data_ptr() == theirs.scale.data_ptr()


#: Recipes that torchao has a class for, as breccia writes them.
OURS = (
    "fp8_current", "fp8_delayed", "fp8_row", "fp8_row,fp8_format=E5M2", "fp8_block", "fp8_block,block_m=128",
    "mxfp8", "mxfp6", "mxfp4", "nvfp4", "nvfp4,order=scales_first", "nvfp4,two_level=false", "int4,group_size=32",
    "int4,group_size=32,signed=false,symmetric=false", "int8", "int8,group_size=64,scale_dtype=bf16",
    "int8,signed=false,symmetric=false",
)  # fmt: skip


@pytest.mark.parametrize("recipe", OURS)
def test_torchao_decodes_and_multiplies_what_breccia_builds(recipe: str) -> None:
    weight, x, bias = plain(128, 256), plain(16, 256, seed=1), plain(128, seed=2)
    ours = breccia.cast(weight, recipe)
    theirs = to_torchao(ours)
    values = breccia.dequantize(ours)
    assert torch.allclose(decoded(theirs), values, rtol=2.0**-22 if recipe == "nvfp4" else 0, atol=0)
    inputs = x
    if recipe.startswith("mx"):  # torchao multiplies by MX weights only with inputs in MX
        theirs.act_quant_kwargs = QuantizeTensorToMXKwargs(elem_dtype=torch.float8_e4m3fn)
        inputs = MXTensor.to_mx(x, torch.float8_e4m3fn).dequantize(torch.float32)
    expected = F.linear(inputs.double(), values.double(), bias.double()).float()
    assert torch.allclose(F.linear(x, theirs, bias), expected, rtol=1e-4, atol=1e-4)
    assert bytes_equal(from_torchao(theirs, recipe=ours.recipe), ours)


@pytest.mark.parametrize("recipe", ("fp8_row", "mxfp4", "nvfp4,two_level=false", "fp8_block,block_m=128"))
def test_the_hook_finds_torchao_by_its_classes(recipe: str) -> None:
    ours = breccia.cast(plain(128, 256), recipe)
    theirs = breccia.to_foreign(ours, "torchao", dtype=torch.bfloat16)
    assert type(theirs).__module__.startswith("torchao") and theirs.dtype == torch.bfloat16
    assert bytes_equal(breccia.from_foreign(theirs, recipe=ours.recipe), ours)


def test_a_recipe_of_the_same_format_is_kept_and_another_refused() -> None:
    theirs = WRITTEN["mxfp8"][0](plain(128, 256))
    floor = breccia.MXFP8BlockScaling(scale_rule="floor")
    assert from_torchao(theirs, recipe=floor).recipe == floor
    assert bytes_equal(breccia.cast(plain(128, 256), floor), from_torchao(theirs, floor)), "torchao's default rule is floor"
    with pytest.raises(DialectError, match=r"decodes differently than MXTensor \(torchao 0\.\d+"):
        from_torchao(theirs, recipe=breccia.MXFP8BlockScaling("E5M2"))


# ------------------------------------------------------------------------------------------------ bad input


def test_other_classes_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"from_torchao converts Float8Tensor, .*; got Tensor \(torch"):
        from_torchao(torch.zeros(2, 2))
    with pytest.raises(UnsupportedError, match="to_torchao takes a ScaledTensor of torch, got numpy"):
        to_torchao(breccia.cast(plain(32, 32).numpy(), "mxfp8"))


def broken(kind: str, **changed: Any) -> Any:
    theirs = WRITTEN[kind][0](plain(128, 256))
    for name, value in changed.items():
        setattr(theirs, name, value(getattr(theirs, name)))
    return theirs


@pytest.mark.parametrize(
    ("theirs", "message"),
    (
        (
            lambda: broken("float8_row", scale=lambda s: s[:64]),
            r"Float8Tensor \(torchao .*has scales of shape \(128, 1\); found \(64, 1\)",
        ),
        (lambda: broken("float8_row", block_size=lambda b: [1, 100]), r"block_size \[1, 100\], which does not divide it"),
        (lambda: broken("float8_row", block_size=lambda b: None), r"block_size \[\], which does not divide"),
        (lambda: broken("mxfp8", block_size=lambda b: 16), "block_size=16; the MX recipes have blocks of 32"),
        (lambda: broken("mxfp8", scale=lambda s: s[:, :4]), r"MXTensor \(torchao .*contradict each other"),
        (lambda: broken("nvfp4", block_size=lambda b: 32), "block_size=32; NVFP4 has blocks of 16"),
        (lambda: broken("int4_group", qdata=lambda q: q + 16), r"codes of torch.int4 lie in -8..7; found"),
        (lambda: broken("int8_row", act_pre_scale=lambda _: torch.ones(256)), "has act_pre_scale"),
        (lambda: broken("int8_row", scale=lambda s: s.double()), "scales in torch.float64"),
        (lambda: broken("mxfp8_swizzled", scale=lambda s: s[:31]), r"swizzled scales of shape \(31, 32\)"),
    ),
)
def test_contradictions_are_errors_that_name_tensor_value_and_version(theirs: Any, message: str) -> None:
    with pytest.raises(DialectError, match=message):
        from_torchao(theirs())


@every
def test_an_attribute_that_is_missing_or_changed_is_a_typed_error_that_names_class_and_version(kind: str) -> None:
    def make() -> Any:
        return WRITTEN[kind][0](plain(128, 256))

    assert untyped(make, inner(make()), from_torchao, f"{type(make()).__name__} (torchao 0.") == []


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    (
        ("float8_row", "qdata", lambda q: None, r"Float8Tensor \(torchao .*has qdata=None, where this bridge reads an array"),
        ("mxfp8", "elem_dtype", lambda e: torch.int8, r"MXTensor \(torchao .*has elements torch.int8, which no MX recipe has"),
        ("mxfp6_e2m3", "qdata", lambda q: q | 64, r"FP6 codes in torch.uint8, up to \d+; they are torch.uint8 below 64"),
        ("nvfp4_two_level", "per_tensor_scale", lambda s: s.repeat(3), r"per_tensor_scale of shape \(3,\); it is one number"),
        ("int4_asymmetric", "zero_point", lambda z: z[:5], r"scales of shape \(128, 4\) and zero-points of shape \(5, 4\)"),
        ("int4_group", "target_dtype", lambda t: torch.float32, r"target_dtype=torch.float32; this bridge reads torch.int1 to"),
        ("int8_row", "block_size", lambda b: "row", "has block_size='row'; this bridge reads a list of lengths"),
    ),
)
def test_values_of_another_version_are_named(kind: str, name: str, value: Any, message: str) -> None:
    with pytest.raises(DialectError, match=message):
        from_torchao(broken(kind, **{name: value}))


def test_padding_that_is_not_zero_is_refused() -> None:
    theirs = MXTensor.to_mx(plain(100, 64), torch.float8_e4m3fn, 32, is_swizzled_scales=True)
    from_torchao(theirs)
    theirs.scale.view(torch.uint8)[-1, -1] = 7
    with pytest.raises(DialectError, match=r"MXTensor \(torchao .*the padding of scale .* holds"):
        from_torchao(theirs)


def test_a_missing_attribute_names_the_class_and_its_version() -> None:
    class MXTensor:
        qdata = torch.zeros(32, 32, dtype=torch.float8_e4m3fn)

    with pytest.raises(DialectError, match="has no attribute 'scale', which this bridge reads; it is of a version"):
        from_torchao(MXTensor())


@pytest.mark.parametrize(
    ("recipe", "shape", "message"),
    (
        ("mxint8", (64, 64), "torchao's classes hold FP8"),
        ("nf4", (64, 64), "torchao's classes hold FP8"),
        ("int4,group_size=32,signed=false,symmetric=false,offset=bias", (64, 64), "torchao's classes hold"),
        ("fp8_block", (64, 200), "has whole blocks"),
        ("mxfp8", (64, 40), "has whole blocks"),
        ("nvfp4,global_sense=amax", (64, 64), r"stores the tensor scale of NVFP4 as a multiplier"),
    ),
)
def test_formats_without_a_class_are_refused_with_a_remedy(recipe: str, shape: tuple[int, int], message: str) -> None:
    with pytest.raises(DialectError, match=message):
        to_torchao(breccia.cast(plain(*shape), recipe))


def test_like_must_have_the_tensors_blocks_and_only_its_attributes() -> None:
    row, block = (WRITTEN[k][0](plain(128, 256)) for k in ("float8_row", "float8_block_1d"))
    with pytest.raises(DialectError, match=r"block_size is \[1, 128\] in like= .* and \[1, 256\] in the tensor"):
        to_torchao(from_torchao(row), like=block)
    with pytest.raises(DialectError, match="Float8Tensor does not take these attributes: .*colour"):
        to_torchao(from_torchao(row), colour="red")


# ------------------------------------------------------------------------------------------------ older releases


def affine(data: Any, scale: Any, zero: Any, **attributes: Any) -> Any:
    """An AffineQuantizedTensor as releases before 0.16 have it: the buffers in `tensor_impl.get_plain()`."""
    kind = type("AffineQuantizedTensor", (), {"__module__": "torchao.dtypes.affine_quantized_tensor"})
    found = kind()
    found.tensor_impl = SimpleNamespace(get_plain=lambda: (data, scale, zero))
    vars(found).update({"shape": data.shape, "zero_point_domain": SimpleNamespace(name="INT")} | attributes)
    return found


@pytest.mark.parametrize("unsigned", (False, True))
@pytest.mark.parametrize(("low", "high"), ((-8, 7), (-128, 127)))
def test_affine_tensors_of_older_releases_decode_by_their_formula(unsigned: bool, low: int, high: int) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(low, high + 1, (64, 128), generator=generator, dtype=torch.int16)
    zero = torch.randint(low, high + 1, (64, 4), generator=generator, dtype=torch.int16)
    scale = torch.rand(64, 4, generator=generator) + 0.5
    expected = (data.float() - zero.float().repeat_interleave(32, -1)) * scale.repeat_interleave(32, -1)
    move = -low if unsigned else 0
    theirs = affine(
        (data + move).to(torch.uint8 if unsigned else torch.int8),
        scale,
        zero + move,
        block_size=(1, 32),
        quant_min=low + move,
        quant_max=high + move,
    )
    ours = breccia.from_foreign(theirs)
    assert ours.recipe.format.element.bits == (4 if low == -8 else 8)
    assert torch.equal(breccia.dequantize(ours), expected)


def test_the_attributes_of_the_first_releases_are_read() -> None:
    data, scale = torch.randint(-128, 128, (64, 128)).to(torch.int8), torch.rand(64) + 0.5
    theirs = SimpleNamespace(int_data=data, scale=scale, zero_point=None, shape=data.shape)
    kind = type("AffineQuantizedTensor", (SimpleNamespace,), {"__module__": "torchao.dtypes.aqt"})
    ours = breccia.from_foreign(kind(**vars(theirs)))
    assert ours.recipe == breccia.INT8Scaling()
    assert torch.equal(breccia.dequantize(ours), data.float() * scale[:, None])


def test_zero_points_as_values_are_refused() -> None:
    theirs = affine(
        torch.zeros(4, 32, dtype=torch.int8),
        torch.ones(4, 1),
        torch.ones(4, 1),
        zero_point_domain=SimpleNamespace(name="FLOAT"),
    )
    with pytest.raises(DialectError, match="zero-points in domain FLOAT"):
        breccia.from_foreign(theirs)


def test_the_recipe_of_inputs_is_found_from_the_weight() -> None:
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import QuantizeTensorToFloat8Kwargs

    weight = WRITTEN["float8_row"][0](plain(128, 256))
    assert torchao_activation(weight) is None
    weight.act_quant_kwargs = QuantizeTensorToFloat8Kwargs(granularity=PerRow())
    assert torchao_activation(weight) == breccia.Float8RowScaling()
    weight.act_quant_kwargs = QuantizeTensorToFloat8Kwargs(granularity=PerTensor())
    assert torchao_activation(copy.copy(weight)) == breccia.Float8CurrentScaling()
    static = WRITTEN["int8_row"][0](plain(128, 256))
    static.act_quant_scale = torch.ones(1)
    with pytest.raises(DialectError, match="act_quant_scale, a fixed scale of the inputs"):
        torchao_activation(static)


def test_codes_with_float_zero_points_decode_to_torchaos_floats() -> None:
    data = torch.randint(-8, 8, (16, 64)).to(torch.int8)
    scale, zero = torch.rand(16, 2) + 0.5, torch.randn(16, 2).bfloat16().float()
    theirs = IntxUnpackedToInt8Tensor(data, scale, zero, torch.int4, (1, 32), torch.float32, None)
    ours = from_torchao(theirs)
    assert isinstance(ours, ScaledTensor)
    assert torch.equal(
        breccia.dequantize(ours), (data.float() - zero.repeat_interleave(32, -1)) * scale.repeat_interleave(32, -1)
    )
    assert_same(to_torchao(ours, like=theirs), theirs)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("lead", ((), (3,)))
def test_int4_tensors_with_a_float_bias_decode_by_their_formula_and_return(dtype: Any, lead: tuple[int, ...]) -> None:
    """torchao decodes them on GPUs alone: by its documentation, code * scale + zero_point."""
    from torchao.quantization import Int4Tensor

    codes = torch.randint(-8, 8, (*lead, 16, 128), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    data = ((codes[..., ::2] & 15) | (codes[..., 1::2] << 4)).to(torch.int8)
    scale, bias = (plain(*lead, 4, 16, dtype=dtype, seed=n) for n in (1, 2))
    block = [*(1 for _ in lead), 1, 32]
    theirs = Int4Tensor(data, scale, bias, block, torch.Size(codes.shape))
    ours = breccia.from_foreign(theirs)
    assert ours.recipe.name == "int4_bias" and ours.storage == "transposed"
    assert ours.data.data_ptr() == data.data_ptr() and ours.scale.data_ptr() == scale.data_ptr()
    wide = (x.mT.float().repeat_interleave(32, -1) for x in (scale, bias))
    assert torch.equal(breccia.dequantize(ours), codes.float() * next(wide) + next(wide))
    assert_same(to_torchao(ours, like=theirs), theirs)
    assert bytes_equal(from_torchao(to_torchao(ours)), ours)
    theirs.scale = theirs.scale[..., :2, :]
    with pytest.raises(DialectError, match=r"Int4Tensor .*shape \(.*4, 16\) and one float dtype; found"):
        from_torchao(theirs)
