"""TransformerEngine's tensors and breccia's: the same buffers both ways.

Stand-ins hold them here; test_gpu_bridges.py runs the library itself.

What a tensor decodes to is computed here, item by item, from the layouts that TransformerEngine documents.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import te_standins as te  # noqa: E402
from broken import MISSING, untyped  # noqa: E402

import breccia  # noqa: E402
from breccia import DialectError, OptionError, ScaledTensor, TensorPair, UnsupportedError, bytes_equal  # noqa: E402
from breccia.bridges import from_te_recipe, from_transformer_engine  # noqa: E402
from breccia_bridges.transformer_engine import to_transformer_engine  # noqa: E402
from breccia_bridges.transformer_engine_recipes import to_te_recipe  # noqa: E402

pytestmark = pytest.mark.covering(1, 2)

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
FP8 = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def random_bytes(*shape: int, seed: int = 0, high: int = 256) -> Any:
    return torch.randint(0, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def padded(scale: Any, rows: int, columns: int) -> Any:
    found = torch.zeros(up(scale.shape[0], rows), up(scale.shape[1], columns), dtype=scale.dtype)
    found[: scale.shape[0], : scale.shape[1]] = scale
    return found


def floats(*shape: int, seed: int = 0) -> Any:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 2.0**-10


def blocks(scale: Any, m: int, k: int, shape: tuple[int, int]) -> Any:
    """One scale per element."""
    return scale.repeat_interleave(m, 0).repeat_interleave(k, 1)[: shape[0], : shape[1]]


def swizzled(scale: Any) -> Any:
    """A padded matrix of scales as TransformerEngine swizzles it: the shape of the matrix, the bytes of tiles of 128 x 4."""
    rows, columns = scale.shape
    found = torch.zeros(scale.numel(), dtype=scale.dtype)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * (columns // 4) + c // 4
            found[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = scale[r, c]
    return found.reshape(rows, columns)


Made = tuple[Any, Any]


def build(name: str, storage: bool, shape: tuple[int, ...], **buffers: Any) -> Any:
    if storage:
        return te.CLASSES[f"{name}Storage"](**buffers)
    return te.CLASSES[name](shape=shape, dtype=torch.bfloat16, **buffers)


def float8(shape: tuple[int, ...] = (64, 96), dtype: Any = E4M3, storage: bool = False, turned: bool = False) -> Made:
    """(the tensor, its values) with one scale."""
    data, scale = random_bytes(*shape), torch.tensor([0.037])
    held = {"data": data, "fp8_scale_inv": scale, "fp8_dtype": dtype}
    transpose = data.movedim(-1, 0).contiguous() if turned else None
    kind = te.quantizer("Float8CurrentScalingQuantizer")
    return build("Float8Tensor", storage, shape, data_transpose=transpose, quantizer=kind, **held), data.view(
        FP8[dtype]
    ).float() * scale


def blockwise(
    shape: tuple[int, ...] = (256, 512), tiles: bool = True, both: bool = True, dtype: Any = E4M3, storage: bool = False
) -> Made:
    """(the tensor, its values) with FP32 scales of 128 x 128 tiles, or of blocks 1 x 128, in both orientations."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    data = random_bytes(*shape)
    flat = data.reshape(rows, columns)
    m = 128 if tiles else 1
    scale = floats(-(-rows // m), -(-columns // 128))
    other = scale.mT if tiles else floats(columns, -(-rows // 128), seed=1)
    lay = (lambda s: padded(s, 1, 4)) if tiles else (lambda s: padded(s.mT.contiguous(), 1, 4))
    kind = te.quantizer("Float8BlockQuantizer", force_pow_2_scales=False, block_scaling_dim=2 if tiles else 1)
    found = build(
        "Float8BlockwiseQTensor",
        storage,
        shape,
        rowwise_data=data,
        rowwise_scale_inv=lay(scale),
        columnwise_data=data.movedim(-1, 0).contiguous() if both else None,
        columnwise_scale_inv=lay(other) if both else None,
        fp8_dtype=dtype,
        quantizer=kind,
        is_2D_scaled=tiles,
    )
    values = flat.view(FP8[dtype]).float() * blocks(scale, m, 128, (rows, columns))
    return found, values.reshape(shape)


def mxfp8(shape: tuple[int, ...] = (128, 256), both: bool = True, swizzle: bool = False, storage: bool = False) -> Made:
    rows, columns = math.prod(shape[:-1]), shape[-1]
    data, turned = random_bytes(*shape, high=120), random_bytes(*shape, seed=1, high=120)
    scale, other = random_bytes(rows, columns // 32, seed=2, high=130), random_bytes(rows // 32, columns, seed=3, high=130)
    lay = (lambda s: swizzled(padded(s, 128, 4))) if swizzle else (lambda s: padded(s, 128, 4))
    found = build(
        "MXFP8Tensor",
        storage,
        shape,
        rowwise_data=data,
        rowwise_scale_inv=lay(scale),
        columnwise_data=turned if both else None,
        columnwise_scale_inv=padded(other, 4, 128) if both else None,
        fp8_dtype=E4M3,
        quantizer=te.quantizer("MXFP8Quantizer"),
        with_gemm_swizzled_scales=swizzle,
    )
    multipliers = torch.exp2(scale.double() - 127).float()
    values = data.reshape(rows, columns).view(FP8[E4M3]).float() * blocks(multipliers, 1, 32, (rows, columns))
    return found, values.reshape(shape)


def nvfp4(shape: tuple[int, ...] = (64, 128), both: bool = True, swizzle: bool = False, storage: bool = False) -> Made:
    rows, columns = math.prod(shape[:-1]), shape[-1]
    data, turned = random_bytes(*shape[:-1], columns // 2), random_bytes(columns, rows // 2, seed=1)
    scale, other = random_bytes(rows, columns // 16, seed=2, high=127), random_bytes(columns, rows // 16, seed=3, high=127)
    lay = (lambda s: swizzled(padded(s, 128, 4))) if swizzle else (lambda s: padded(s, 128, 4))
    amax = torch.tensor([2688.0])
    found = build(
        "NVFP4Tensor",
        storage,
        shape,
        rowwise_data=data,
        rowwise_scale_inv=lay(scale),
        columnwise_data=turned if both else None,
        columnwise_scale_inv=lay(other) if both else None,
        amax_rowwise=amax,
        amax_columnwise=amax.clone() if both else None,
        fp4_dtype=te.DType.kFloat4E2M1,
        quantizer=te.quantizer("NVFP4Quantizer", with_rht=False),
        with_gemm_swizzled_scales=swizzle,
    )
    flat = data.reshape(rows, columns // 2).int()
    codes = torch.stack((flat & 15, flat >> 4), -1).reshape(rows, columns)
    values = FP4[codes] * blocks(scale.view(torch.float8_e4m3fn).float(), 1, 16, (rows, columns))
    return found, values.reshape(shape)


#: Every class, in every form of its scales: what makes one, and the recipe that breccia finds.
MADE: dict[str, tuple[Callable[[], Made], breccia.ScalingRecipe]] = {
    "float8": (float8, breccia.Float8CurrentScaling(scale_rule="te")),
    "float8_e5m2": (lambda: float8(dtype=E5M2), breccia.Float8CurrentScaling("E5M2", "te")),
    "float8_transpose": (lambda: float8(turned=True), breccia.Float8CurrentScaling(scale_rule="te")),
    "float8_3d": (lambda: float8((2, 3, 32)), breccia.Float8CurrentScaling(scale_rule="te")),
    "float8_storage": (lambda: float8(storage=True), breccia.Float8CurrentScaling(scale_rule="te")),
    "tiles": (blockwise, breccia.Float8BlockScaling(block_m=128, scale_rule="te")),
    "tiles_partial": (lambda: blockwise((200, 328)), breccia.Float8BlockScaling(block_m=128, scale_rule="te")),
    "tiles_rows_only": (lambda: blockwise(both=False), breccia.Float8BlockScaling(block_m=128, scale_rule="te")),
    "tiles_e5m2": (lambda: blockwise(dtype=E5M2), breccia.Float8BlockScaling("E5M2", block_m=128, scale_rule="te")),
    "tiles_storage": (lambda: blockwise(storage=True), breccia.Float8BlockScaling(block_m=128, scale_rule="te")),
    "blocks": (lambda: blockwise(tiles=False), breccia.Float8BlockScaling(scale_rule="te")),
    "blocks_partial": (lambda: blockwise((198, 326), tiles=False), breccia.Float8BlockScaling(scale_rule="te")),
    "mxfp8": (mxfp8, breccia.MXFP8BlockScaling()),
    "mxfp8_padded": (lambda: mxfp8((96, 160)), breccia.MXFP8BlockScaling()),
    "mxfp8_swizzled": (lambda: mxfp8((160, 96), both=False, swizzle=True), breccia.MXFP8BlockScaling()),
    "mxfp8_storage": (lambda: mxfp8(storage=True), breccia.MXFP8BlockScaling()),
    "nvfp4": (nvfp4, breccia.NVFP4BlockScaling(global_sense="amax")),
    "nvfp4_whole": (lambda: nvfp4((128, 256)), breccia.NVFP4BlockScaling(global_sense="amax")),
    "nvfp4_swizzled": (lambda: nvfp4((160, 96), swizzle=True), breccia.NVFP4BlockScaling(global_sense="amax")),
    "nvfp4_storage": (lambda: nvfp4(storage=True), breccia.NVFP4BlockScaling(global_sense="amax")),
}
every = pytest.mark.parametrize("kind", MADE)


def buffers(te_t: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(te_t).items() if name.startswith("_") and isinstance(value, torch.Tensor)}


def assert_same(a: Any, b: Any, shared: bool = False) -> None:
    """Equal classes, attributes and buffers, which are at one address if `shared`."""
    assert type(a) is type(b)
    assert getattr(a, "shape", None) == getattr(b, "shape", None) and getattr(a, "dtype", None) == getattr(b, "dtype", None)
    left, right = buffers(a), buffers(b)
    assert left.keys() == right.keys()
    for name, x in left.items():
        y = right[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape) and torch.equal(x.view(torch.uint8), y.view(torch.uint8)), name
        assert not shared or x.data_ptr() == y.data_ptr(), name
    others = vars(a).keys() - left.keys() - {"_quantizer"}
    assert all(getattr(a, name) == getattr(b, name) for name in others)
    assert vars(a._quantizer) == vars(b._quantizer)


def same_floats(a: Any, b: Any) -> bool:
    nan = torch.isnan(b)
    return bool(torch.equal(torch.isnan(a), nan) and torch.equal(a[~nan], b[~nan]))


@every
def test_tensors_decode_to_the_documented_values_under_the_recipe_of_their_quantizer(kind: str) -> None:
    make, recipe = MADE[kind]
    theirs, values = make()
    ours = breccia.from_foreign(theirs)
    assert isinstance(ours, ScaledTensor) and ours.recipe == recipe and ours.axis == -1
    assert same_floats(breccia.dequantize(ours), values)


@every
def test_tensors_come_back_as_the_same_buffers(kind: str) -> None:
    theirs, _ = MADE[kind][0]()
    both = (kind not in ("tiles_rows_only", "mxfp8_swizzled") and "float8" not in kind) or kind == "float8_transpose"
    ours = from_transformer_engine(theirs, usage="both" if both else "rowwise")
    assert isinstance(ours, TensorPair) is both
    assert_same(to_transformer_engine(ours, like=theirs), theirs, shared=True)
    assert_same(breccia.to_foreign(ours, "transformer_engine", like=theirs), theirs)


@every
def test_buffers_are_shared_with_breccia(kind: str) -> None:
    theirs, _ = MADE[kind][0]()
    ours = from_transformer_engine(theirs)
    data, scale = (theirs._data, theirs._scale_inv) if "float8" in kind else (theirs._rowwise_data, theirs._rowwise_scale_inv)
    assert ours.data.data_ptr() == data.data_ptr() and ours.scale.data_ptr() == scale.data_ptr()


@pytest.mark.parametrize("kind", [k for k in MADE if "3d" not in k and k not in ("mxfp8_swizzled",)])
def test_columnwise_data_have_blocks_along_the_other_axis(kind: str) -> None:
    theirs, values = MADE[kind][0]()
    rows, columns = from_transformer_engine(theirs, usage="both")
    alone = from_transformer_engine(theirs, usage="columnwise")
    assert (rows.axis, columns.axis) == (-1, -2) and rows.shape == columns.shape == values.shape
    assert bytes_equal(columns, alone)
    if "float8" in kind or "tiles" in kind:
        assert same_floats(breccia.dequantize(columns), values), "one scale, or tiles: the same values"
    else:
        assert not same_floats(breccia.dequantize(columns), values), "other blocks: quantized again"
    if "mxfp8" in kind:
        expected = theirs._columnwise_data.view(torch.float8_e4m3fn).float()
        scale = theirs._columnwise_scale_inv[: values.shape[0] // 32, : values.shape[1]].double()
        expected = expected * torch.exp2(scale - 127).float().repeat_interleave(32, 0)
        assert same_floats(breccia.dequantize(columns), expected)
    if kind.startswith("blocks"):
        scale = theirs._columnwise_scale_inv[:, : values.shape[1]].mT
        turned = theirs._columnwise_data.view(torch.float8_e4m3fn).float() * blocks(scale, 1, 128, values.shape[::-1])
        assert same_floats(breccia.dequantize(columns), turned.mT)


@pytest.mark.parametrize("kind", ("float8", "tiles", "tiles_partial"))
def test_columnwise_data_are_derived_where_that_is_exact(kind: str) -> None:
    theirs, values = MADE[kind][0]()
    made = to_transformer_engine(from_transformer_engine(theirs), like=theirs, columnwise=True)
    if kind == "float8":
        assert torch.equal(made._transpose, theirs._data.mT) and made._transpose.is_contiguous() and not made._transpose_invalid
    else:
        assert_same(made, theirs)
    again = from_transformer_engine(made, usage="columnwise")
    assert same_floats(breccia.dequantize(again), values)


def test_columnwise_data_alone_are_a_tensor_of_the_other_axis() -> None:
    for make in (lambda: blockwise(tiles=False)[0], lambda: mxfp8()[0], lambda: nvfp4()[0]):
        theirs, full = make(), make()
        for name in ("data", "scale_inv"):
            setattr(theirs, f"_rowwise_{name}", None)
        if hasattr(theirs, "_amax_rowwise"):
            theirs._amax_rowwise = None
        ours = from_transformer_engine(theirs)
        assert ours.axis == -2
        assert bytes_equal(ours, from_transformer_engine(full, usage="columnwise"))
        assert_same(to_transformer_engine(ours, like=theirs), theirs, shared=True)
    theirs, full = float8(turned=True)[0], float8()[0]
    theirs._data = None
    ours = from_transformer_engine(theirs)
    assert same_floats(breccia.dequantize(ours), breccia.dequantize(from_transformer_engine(full)))
    assert ours.axis == -2
    assert_same(to_transformer_engine(ours, like=theirs), theirs, shared=True)


@pytest.mark.parametrize(
    "make", (lambda: mxfp8((2, 64, 64)), lambda: nvfp4((2, 32, 64)), lambda: blockwise((3, 40, 256), False))
)
def test_blocks_within_rows_may_have_leading_axes(make: Callable[[], Made]) -> None:
    theirs, values = make()
    ours = from_transformer_engine(theirs, usage="rowwise")
    assert ours.shape == values.shape and same_floats(breccia.dequantize(ours), values)
    made = to_transformer_engine(ours, like=theirs)
    for name in ("_rowwise_data", "_rowwise_scale_inv"):
        assert torch.equal(getattr(made, name), getattr(theirs, name))


def test_tiles_that_reach_across_matrices_are_refused_and_others_are_not() -> None:
    theirs, values = blockwise((2, 128, 256))
    assert same_floats(breccia.dequantize(from_transformer_engine(theirs)), values)
    with pytest.raises(DialectError, match=r"tiles of 128 rows that reach across matrices of 100; pass"):
        from_transformer_engine(blockwise((2, 100, 256))[0])
    with pytest.raises(DialectError, match="columnwise blocks along all its leading axes"):
        from_transformer_engine(theirs, usage="columnwise")


@pytest.mark.parametrize(
    ("recipe", "kind"),
    (
        ("fp8_current,scale_rule=te", "float8"),
        ("fp8_delayed", "float8"),
        ("fp8_block,block_m=128", "tiles"),
        ("fp8_block", "blocks"),
        ("mxfp8", "mxfp8"),
        ("nvfp4,global_sense=amax", "nvfp4"),
    ),
)
def test_what_breccia_casts_becomes_a_tensor_and_returns(recipe: str, kind: str) -> None:
    x = torch.randn(160, 320, generator=torch.Generator().manual_seed(0))
    like = MADE[kind][0]()[0]
    pair = breccia.cast_pair(x, recipe)
    for given in (pair, pair.rowwise, pair.columnwise):
        made = to_transformer_engine(given, like=like, dtype=torch.float32)
        assert made.shape == x.shape and made.dtype == torch.float32
        usage = "both" if given is pair else "rowwise" if given is pair.rowwise else "columnwise"
        again = from_transformer_engine(made, breccia.recipe(recipe), usage=usage)
        if given is pair:
            assert all(bytes_equal(a, b) for a, b in zip(again, pair, strict=True))
        else:
            assert bytes_equal(again, given)


# ------------------------------------------------------------------------------------------------ the library itself


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    te.put_in_place(monkeypatch)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("recipe", "name", "quantizer"),
    (
        ("fp8_current", "Float8Tensor", "Float8CurrentScalingQuantizer"),
        ("fp8_delayed,fp8_format=E5M2", "Float8Tensor", "Float8Quantizer"),
        ("fp8_block,block_m=128", "Float8BlockwiseQTensor", "Float8BlockQuantizer"),
        ("fp8_block,power_of_two_scale=true", "Float8BlockwiseQTensor", "Float8BlockQuantizer"),
        ("mxfp8", "MXFP8Tensor", "MXFP8Quantizer"),
        ("nvfp4,global_sense=amax", "NVFP4Tensor", "NVFP4Quantizer"),
    ),
)
def test_without_like_the_librarys_class_dtype_and_quantizer_are_built(recipe: str, name: str, quantizer: str) -> None:
    st = breccia.cast(torch.randn(64, 128), recipe)
    made = to_transformer_engine(st, dtype=torch.bfloat16)
    assert type(made) is te.CLASSES[name] and made.dtype == torch.bfloat16 and type(made._quantizer).__name__ == quantizer
    dtype = made._fp4_dtype if name == "NVFP4Tensor" else made._fp8_dtype
    assert dtype.name.endswith(st.recipe.format.element.name)
    assert bytes_equal(from_transformer_engine(made, st.recipe), st)
    if quantizer == "Float8BlockQuantizer":
        options = {
            "force_pow_2_scales": st.recipe.power_of_two_scale,
            "block_scaling_dim": 2 if st.recipe.block_m == 128 else 1,
        }
        assert options.items() <= vars(made._quantizer).items()


def test_without_the_library_the_error_says_what_to_install() -> None:
    if "transformer_engine" in sys.modules:
        pytest.skip("TransformerEngine is loaded")
    st = breccia.cast(torch.randn(64, 128), "mxfp8")
    with pytest.raises(ImportError, match=r"TransformerEngine 2\.x, whose Float8Tensor cannot be imported .*pip install"):
        to_transformer_engine(st)


def te_recipe(name: str, fmt: str, **attributes: Any) -> Any:
    kind = type(name, (SimpleNamespace,), {"__module__": "transformer_engine.common.recipe"})
    return kind(fp8_format=SimpleNamespace(name=fmt), **attributes)


DELAYED = {"amax_compute_algo": "max", "scaling_factor_compute_algo": None, "amax_history_len": 1024, "margin": 1}
BLOCK = {"x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1, "use_f32_scales": False}


@pytest.mark.parametrize(
    ("theirs", "role", "ours"),
    (
        (te_recipe("DelayedScaling", "HYBRID", **DELAYED), "weight", breccia.DelayedScaling("E4M3", 1024, 1, "te")),
        (te_recipe("DelayedScaling", "HYBRID", **DELAYED), "grad", breccia.DelayedScaling("E5M2", 1024, 1, "te")),
        (te_recipe("Float8CurrentScaling", "E4M3"), "grad", breccia.Float8CurrentScaling("E4M3", "te")),
        (te_recipe("Float8BlockScaling", "E4M3", **BLOCK), "weight",
            breccia.Float8BlockScaling(block_m=128, power_of_two_scale=True, scale_rule="te")),
        (te_recipe("Float8BlockScaling", "E4M3", **BLOCK | {"use_f32_scales": True}), "input",
            breccia.Float8BlockScaling(scale_rule="te")),
        (te_recipe("MXFP8BlockScaling", "E4M3", margin=0), "input", breccia.MXFP8BlockScaling()),
        (te_recipe("NVFP4BlockScaling", "E4M3"), "weight", breccia.NVFP4BlockScaling(global_sense="amax")),
    ),
)  # fmt: skip
def test_recipes_map_by_role(theirs: Any, role: str, ours: breccia.ScalingRecipe) -> None:
    assert from_te_recipe(theirs, role) == ours


@pytest.mark.usefixtures("library")
def test_recipes_map_back() -> None:
    made = to_te_recipe(breccia.DelayedScaling("E4M3", 32, 2), grad=breccia.DelayedScaling("E5M2", 32, 2))
    assert type(made).__name__ == "DelayedScaling" and made.fp8_format.name == "HYBRID"
    assert (made.margin, made.amax_history_len) == (2, 32)
    assert to_te_recipe(breccia.Float8BlockScaling(power_of_two_scale=True)).use_f32_scales is False
    assert type(to_te_recipe(breccia.NVFP4BlockScaling())).__name__ == "NVFP4BlockScaling"
    with pytest.raises(DialectError, match="HYBRID"):
        to_te_recipe(breccia.MXFP8BlockScaling("E5M2"), grad=breccia.MXFP8BlockScaling())
    with pytest.raises(DialectError, match="no recipe with E5M2 inputs and weights; .* as grad="):
        to_te_recipe(breccia.DelayedScaling("E5M2"))
    with pytest.raises(DialectError, match="of one kind for all roles"):
        to_te_recipe(breccia.MXFP8BlockScaling(), grad=breccia.Float8CurrentScaling())
    with pytest.raises(DialectError, match="no counterpart of INT4Scaling"):
        to_te_recipe(breccia.INT4Scaling())
    for recipe in (breccia.Float8CurrentScaling("E4M3FNUZ"), breccia.NVFP4BlockScaling(scale_format="UE5M3")):
        with pytest.raises(DialectError, match="has FP8 in E4M3 and E5M2, and NVFP4 with E4M3 scales; got .*(E4M3FNUZ|UE5M3)"):
            to_te_recipe(recipe)


@pytest.mark.parametrize(
    ("theirs", "message"),
    (
        (
            te_recipe("DelayedScaling", "E4M3", **DELAYED | {"amax_compute_algo": "most_recent"}),
            "amax_compute_algo 'most_recent'",
        ),
        (te_recipe("MXFP8BlockScaling", "E4M3", margin=1), "margin=1, which only DelayedScaling"),
        (te_recipe("Float8CurrentScaling", "E4M3", use_power_2_scales=True), "rounds its scales to powers of two"),
        (te_recipe("NVFP4BlockScaling", "E4M3", row_scaled_activation=True), "row-scaled activations"),
        (te_recipe("CustomRecipe", "HYBRID"), "has no counterpart"),
        (te_recipe("MXFP8BlockScaling", "E8M7"), "fp8_format E8M7"),
    ),
)
def test_recipes_without_a_counterpart_are_refused(theirs: Any, message: str) -> None:
    with pytest.raises(DialectError, match=message):
        from_te_recipe(theirs)


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(OptionError, match="role is"):
        from_te_recipe(te_recipe("MXFP8BlockScaling", "E4M3"), "bias")


# ------------------------------------------------------------------------------------------------ bad input


def changed(make: Callable[[], Made], **values: Any) -> Any:
    theirs = make()[0]
    for name, value in values.items():
        setattr(theirs, name, value(getattr(theirs, name)))
    return theirs


def poisoned(scale: Any) -> Any:
    scale = scale.clone()
    scale[-1, -1] = 9
    return scale


@pytest.mark.parametrize(
    ("theirs", "message"),
    (
        (lambda: changed(float8, _scale_inv=lambda s: s.repeat(2)), r"Float8Tensor \(transformer_engine.*shape \(1,\); found"),
        (lambda: changed(float8, _data=lambda d: None), "neither _data nor a valid _transpose"),
        (lambda: changed(float8, _fp8_dtype=lambda d: "kFloat8E8M7"), "a recipe exists for E4M3 and E5M2"),
        (
            lambda: changed(lambda: float8(turned=True), _transpose=lambda t: t[:5]),
            r"_transpose of shape \(5, 64\) does not fit",
        ),
        (lambda: changed(blockwise, _rowwise_scale_inv=lambda s: s[:, :3]), r"need scales of shape \(2, 4\) .* found \(2, 3\)"),
        (lambda: changed(blockwise, _is_2D_scaled=lambda _: False), r"need scales of shape \(4, 256\) .* found \(2, 4\)"),
        (lambda: changed(mxfp8, _rowwise_scale_inv=lambda s: s.float()), "a torch.uint8 matrix; found"),
        (lambda: changed(nvfp4, _amax_rowwise=lambda a: a.repeat(64)), r"one FP32 number, of shape \(1,\); found \(64,\)"),
        (lambda: changed(nvfp4, _row_scaled_nvfp4=lambda _: True), "one amax per row"),
        (lambda: changed(nvfp4, _nvfp4_e4m3_max=lambda _: 256), "scales blocks to 256 instead of 448"),
        (
            lambda: changed(lambda: mxfp8((96, 160)), _rowwise_scale_inv=poisoned),
            r"MXFP8Tensor .*padding of _rowwise_scale_inv .* holds 9; padding is zero.*padding=.drop",
        ),
    ),
)
def test_contradictions_are_errors_that_name_tensor_value_and_version(theirs: Callable[[], Any], message: str) -> None:
    with pytest.raises(DialectError, match=message):
        from_transformer_engine(theirs())


@pytest.mark.long
@every
def test_an_attribute_that_is_missing_or_changed_is_a_typed_error_that_names_class_and_version(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace(__version__="2.9.1"))  # need not be installed
    make = MADE[kind][0]
    theirs = make()[0]
    title = f"{type(theirs).__name__} (transformer_engine 2.9.1)"
    assert untyped(lambda: make()[0], vars(theirs), from_transformer_engine, title) == []


@pytest.mark.parametrize(
    ("make", "name", "value", "message"),
    (
        (float8, "_data", lambda d: "codes", r"has _data='codes', where this bridge reads an array"),
        (float8, "_data", lambda d: d[:5], r"has shape \(64, 96\), and its codes are those of a matrix of shape \(5, 96\)"),
        (blockwise, "_rowwise_data", lambda d: d[:-1], r"Float8BlockwiseQTensor \(.* has shape \(256, 512\), .* \(255, 512\)"),
        (nvfp4, "_rowwise_data", lambda d: d.repeat(2, 1), r"NVFP4Tensor .*has shape \(64, 128\), .*shape \(128, 128\)"),
        (nvfp4, "_fp4_dtype", lambda d: "kFloat4E3M0", r"has FP4 dtype KFLOAT4E3M0; a recipe exists for E2M1"),
        (nvfp4, "_amax_rowwise", lambda a: a.double(), r"one FP32 number, .*; found \(1,\) in torch.float64"),
        (
            mxfp8,
            "_rowwise_scale_inv",
            MISSING,
            r"MXFP8Tensor \(trans.*has no attribute '_rowwise_scale_inv', which this bridge",
        ),
    ),
)
def test_values_that_contradict_the_tensor_are_named(make: Callable[[], Made], name: str, value: Any, message: str) -> None:
    theirs = make()[0]
    if value is MISSING:
        delattr(theirs, name)
    else:
        setattr(theirs, name, value(getattr(theirs, name)))
    with pytest.raises(DialectError, match=message):
        from_transformer_engine(theirs)


def test_padding_that_is_not_zero_can_be_dropped() -> None:
    clean, values = mxfp8((96, 160))
    theirs = changed(lambda: mxfp8((96, 160)), _rowwise_scale_inv=poisoned)
    ours = from_transformer_engine(theirs, padding="drop")
    assert ours.storage == "plain" and bytes_equal(ours, from_transformer_engine(clean))
    assert_same(to_transformer_engine(TensorPair(ours, from_transformer_engine(clean, usage="columnwise")), like=clean), clean)
    assert same_floats(breccia.dequantize(ours), values)


@pytest.mark.parametrize(("shape", "tiles"), [((256, 640), True), ((198, 326), False)])
def test_padding_that_transformer_engine_leaves_uninitialized_is_shared_as_it_is(shape: tuple[int, int], tiles: bool) -> None:
    clean, values = blockwise(shape, tiles)
    theirs = changed(lambda: blockwise(shape, tiles), _rowwise_scale_inv=poisoned)
    ours = from_transformer_engine(theirs)
    assert ours.scale.data_ptr() == theirs._rowwise_scale_inv.data_ptr() and ours.storage != "plain"
    assert same_floats(breccia.dequantize(ours), values) and bytes_equal(ours, from_transformer_engine(clean, padding="refuse"))
    assert from_transformer_engine(theirs, padding="drop").storage == "plain"
    with pytest.raises(DialectError, match=r"padding of _rowwise_scale_inv .* holds 9\.0"):
        from_transformer_engine(theirs, padding="refuse")


def test_a_missing_orientation_is_named_and_never_guessed() -> None:
    theirs = blockwise(tiles=False, both=False)[0]
    with pytest.raises(DialectError, match=r"has no columnwise data, and they cannot be derived"):
        from_transformer_engine(theirs, usage="columnwise")
    with pytest.raises(DialectError, match="columnwise data of 'mxfp8' have other blocks"):
        to_transformer_engine(from_transformer_engine(mxfp8()[0]), like=mxfp8()[0], columnwise=True)


def test_rotated_columnwise_data_are_refused() -> None:
    theirs = nvfp4()[0]
    theirs._quantizer.with_rht = True
    from_transformer_engine(theirs, usage="rowwise")
    with pytest.raises(DialectError, match="rotated values"):
        from_transformer_engine(theirs, usage="both")


def test_swizzled_columnwise_scales_of_mxfp8_are_refused() -> None:
    with pytest.raises(DialectError, match="columnwise scales swizzled for a GEMM"):
        from_transformer_engine(mxfp8(swizzle=True)[0], usage="columnwise")


def test_other_classes_and_options_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"converts Float8Tensor, .*; got Tensor \(torch"):
        from_transformer_engine(torch.zeros(2))
    with pytest.raises(OptionError, match="usage is one of rowwise, columnwise, both; got 'rows'"):
        from_transformer_engine(mxfp8()[0], usage="rows")
    with pytest.raises(OptionError, match="padding is one of refuse, keep, drop; got 'zero'"):
        from_transformer_engine(mxfp8()[0], padding="zero")
    with pytest.raises(UnsupportedError, match="takes a ScaledTensor of torch, or a TensorPair of two, got numpy"):
        to_transformer_engine(breccia.cast(torch.zeros(32, 32).numpy(), "mxfp8"), like=mxfp8()[0])


@pytest.mark.parametrize(
    ("recipe", "message"),
    (
        ("int4,group_size=32", r"TransformerEngine has FP8 \(E4M3 or E5M2\) with one scale"),
        ("mxfp4", r"TransformerEngine has FP8 \(E4M3 or E5M2\) with one scale"),
        ("fp8_block,block_k=64", r"TransformerEngine has FP8 \(E4M3 or E5M2\) with one scale"),
        ("fp8_current,fp8_format=E4M3FNUZ", r"FP8 \(E4M3 or E5M2\).* this tensor is .*E4M3FNUZ"),
        ("fp8_block,fp8_format=E5M2FNUZ", r"FP8 \(E4M3 or E5M2\).* this tensor is .*E5M2FNUZ"),
        ("nvfp4,scale_format=UE5M3,global_sense=amax", r"NVFP4 with two levels and E4M3 scales; this tensor is .*UE5M3"),
        ("nvfp4", "stores an NVFP4 tensor's amax; this tensor has its scale as a multiplier"),
        ("nvfp4,two_level=false", "NVFP4 with two levels"),
    ),
)
def test_formats_without_a_class_are_refused_with_a_remedy(recipe: str, message: str) -> None:
    with pytest.raises(DialectError, match=message):
        to_transformer_engine(breccia.cast(torch.zeros(64, 64), recipe), like=mxfp8()[0])


def test_like_must_be_of_the_same_class_and_format() -> None:
    st = breccia.cast(torch.zeros(128, 128), "mxfp8")
    with pytest.raises(DialectError, match=r"for a MXFP8Tensor; like= is NVFP4Tensor"):
        to_transformer_engine(st, like=nvfp4()[0])
    with pytest.raises(DialectError, match=r"has E5M2 codes; like= has E4M3"):
        to_transformer_engine(breccia.cast(torch.zeros(128, 128), "mxfp8,fp8_format=E5M2"), like=mxfp8()[0])


def test_a_pair_is_one_matrix_in_both_orientations() -> None:
    rows = breccia.cast(torch.ones(64, 64), "mxfp8")
    with pytest.raises(DialectError, match="a TensorPair has one matrix"):
        to_transformer_engine(TensorPair(rows, rows), like=mxfp8()[0])
    with pytest.raises(DialectError, match="multiples of 32"):
        to_transformer_engine(breccia.cast(torch.ones(64, 40), "mxfp8"), like=mxfp8()[0])


def test_the_recipe_is_the_callers_if_it_decodes_alike() -> None:
    theirs = float8()[0]
    assert from_transformer_engine(theirs, breccia.DelayedScaling()).recipe == breccia.DelayedScaling()
    with pytest.raises(DialectError, match="decodes differently than Float8Tensor"):
        from_transformer_engine(theirs, breccia.MXFP8BlockScaling())
    theirs._quantizer = None
    assert from_transformer_engine(theirs).recipe == breccia.DelayedScaling(scale_rule="te"), "TransformerEngine's most common"
