"""What a user of NumPy, torch or JAX expects of a tensor: rows, names of recipes and dtypes, attributes, printed forms."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_frameworks import FRAMEWORKS, moved, same_bits, sound, values
from recipes import RECIPES, recipe_id

import breccia
from breccia.arrays.frameworks import ops_of
from breccia.backend import as_recipe, dtype_name, registry
from breccia.internal import output_dtype
from breccia.tensors.advice import ADVICE
from breccia.testing.examples import wide

#: One recipe for each way components are stored, whose blocks are one row high.
ROWS = [r for r in {(r.format, r.layout): r for r in reversed(RECIPES)}.values() if r.format.scale.block[0] in (1, None)]

# ------------------------------------------------------------------------------------------------ rows


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("recipe", ROWS, ids=recipe_id)
def test_an_integer_takes_a_row(recipe: breccia.ScalingRecipe, framework: str, axis: int) -> None:
    x = wide((3, 77), seed=1, exponents=3)
    st = moved(breccia.cast(x if axis == -1 else np.ascontiguousarray(x.T), recipe, axis=axis), framework)
    expected = values(st)
    for i in (0, -1):
        row, wanted = (st[i], expected[i]) if axis == -1 else (st[:, i], expected[:, i])
        assert (sound(row).shape, row.axis, row.framework) == ((77,), -1, framework)
        assert same_bits(values(row), np.ascontiguousarray(wanted))
        assert breccia.bytes_equal(pickle.loads(pickle.dumps(row)), row)


@pytest.mark.parametrize(
    "recipe", [breccia.MXFP8BlockScaling(), breccia.NVFP4BlockScaling(), breccia.Float8CurrentScaling()], ids=recipe_id
)
def test_iteration_gives_as_many_rows_as_len(recipe: breccia.ScalingRecipe) -> None:
    st = breccia.cast(wide((4, 48), seed=2), recipe)
    rows = list(st)
    assert len(rows) == len(st) == 4
    assert all(same_bits(values(row), values(st)[n]) for n, row in enumerate(rows))
    assert same_bits(values(st.select(-2, 3)), values(st)[3])


def test_a_row_is_an_ordinary_tensor() -> None:
    st = breccia.cast(wide((4, 77), seed=3), breccia.NVFP4BlockScaling())
    row = st[1]
    matrix = row.reshape(1, 77)
    assert breccia.bytes_equal(sound(matrix), st[1:2]) and breccia.bytes_equal(matrix[0], row)
    assert breccia.bytes_equal(breccia.concat(row.split(32)), row) and len(row.digest()) == 64
    assert same_bits(values(row[32:64]), values(row)[32:64])
    fp8 = breccia.Float8BlockScaling(block_k=16)
    assert breccia.bytes_equal(sound(breccia.requantize(row, fp8)), breccia.requantize(matrix, fp8)[0])
    half, out = np.empty(77, np.float16), np.empty(77, np.float32)
    assert breccia.dequantize(row, out_dtype="float16", out=half) is half and breccia.dequantize(row, out=out) is out
    assert same_bits(out, values(row)) and same_bits(half, values(row).astype(np.float16))
    with pytest.raises(breccia.ShapeError, match=r"out= must have shape \(77,\)"):
        breccia.dequantize(row, out=np.empty((1, 77), np.float32))
    with pytest.raises(breccia.ShapeError, match="at least two axes"):
        breccia.matmul(row, st.mT)


@pytest.mark.together
def test_a_row_is_saved_and_loaded(tmp_path: Path) -> None:
    row = breccia.cast(wide((4, 77), seed=3), breccia.NVFP4BlockScaling())[1]
    breccia.bridges.save_safetensors({"row": row}, tmp_path / "w.safetensors")
    assert breccia.bytes_equal(breccia.bridges.load_safetensors(tmp_path / "w.safetensors")["row"], row)


def test_a_row_of_a_tensor_in_a_storage_is_the_plain_one() -> None:
    st = breccia.cast(wide((4, 64), seed=4), breccia.MXFP8BlockScaling())
    assert breccia.bytes_equal(st.to_storage("swizzle_128x4")[2], st[2])
    with pytest.raises(breccia.BrecciaError, match="storage 'swizzle_128x4'"):
        st[2].to_storage("swizzle_128x4")


def test_a_row_keeps_its_scale_where_scales_have_their_short_form_or_an_index() -> None:
    data = np.arange(64, dtype=np.uint8).reshape(2, 4, 8)
    flat = breccia.from_buffer(data, np.array([1, 2, 3, 4], np.float32), breccia.Float8BlockScaling(), breccia.PerChannel())
    assert sound(flat[1, 2]).scale.tolist() == [3.0] and sound(flat[:, 2]).scale.tolist() == [[3.0], [3.0]]
    for index in ((1, 2), (slice(None), 2), (slice(1, None), -1)):
        assert same_bits(values(flat[index]), values(flat)[index])
    recipe = breccia.INT4Scaling(group_size=4, scale_dtype="fp32")
    st = breccia.ScaledTensor(data[0], np.arange(1, 9, dtype="f4").reshape(4, 2), recipe, breccia.PerGroupIndex([0, 1] * 8, 2))
    assert same_bits(values(sound(st[3])), values(st)[3])


def test_a_row_of_tiles_of_several_rows_is_refused_with_a_remedy() -> None:
    st = breccia.cast(wide((4, 64), seed=5), breccia.Float8BlockScaling(block_k=32, block_m=2))
    message = r"axis -2 of shape \(4, 64\) cannot be dropped: .* Keep it: st\[..., i:i\+2, :\], i a multiple of 2; or dequ"
    with pytest.raises(breccia.LayoutError, match=message):
        st[0]
    with pytest.raises(breccia.LayoutError, match="cannot be dropped"):
        list(st)
    assert same_bits(values(st[2:4]), values(st)[2:4])
    experts = breccia.cast(wide((2, 4, 48), seed=6), breccia.MXFP8BlockScaling())
    assert sound(experts[:, 2]).shape == (2, 48) and same_bits(values(experts[:, 2]), values(experts)[:, 2])
    scaled = breccia.stack([breccia.cast(wide((3, 32), seed=s), breccia.NVFP4BlockScaling()) for s in (6, 7)])
    with pytest.raises(breccia.LayoutError, match="axis -2 .* cannot be dropped"):  # each matrix has its own global scale
        scaled[:, 1]
    assert sound(scaled[1, 1]).shape == (32,)


def test_a_traced_tensor_gives_its_rows() -> None:
    jax = pytest.importorskip("jax")
    x = wide((3, 64), seed=8)
    row = jax.jit(lambda x: breccia.dequantize(breccia.cast(x, breccia.NVFP4BlockScaling())[1]))(x)
    assert same_bits(np.asarray(row), values(breccia.cast(x, breccia.NVFP4BlockScaling()))[1])


# ------------------------------------------------------------------------------------------------ names of recipes and dtypes

X = wide((4, 64), seed=9, exponents=2)


def test_a_name_is_taken_where_a_recipe_is() -> None:
    mx, spec = breccia.MXFP8BlockScaling(), "fp8_block,block_k=32"
    st = breccia.cast(X, "mxfp8")
    assert st.recipe == mx and breccia.bytes_equal(st, breccia.cast(X, mx))
    assert breccia.cast(X, spec).recipe == breccia.Float8BlockScaling(block_k=32)
    assert [t.recipe for t in breccia.cast_pair(X, "MXFP8")] == [mx, mx]
    assert breccia.requantize(st, "nvfp4").recipe == breccia.NVFP4BlockScaling()
    assert same_bits(breccia.cast_ste(X, "mxfp8"), values(st))
    assert same_bits(breccia.cast_ste_clipped(X, "mxfp8", clip="scale"), values(st))
    assert same_bits(breccia.cast_matmul(X, "mxfp8", st.mT), breccia.matmul(st, st.mT))
    assert breccia.from_buffer(st.data, st.scale, "mxfp8", st.layout).recipe == mx
    assert breccia.AmaxHistory("fp8_delayed,margin=1").recipe == breccia.DelayedScaling(margin=1)  # type: ignore[arg-type]
    with pytest.raises(breccia.UnknownNameError, match="no recipe 'nvfp5'; did you mean 'nvfp4'"):
        breccia.requantize(st, "nvfp5")
    with pytest.raises(breccia.UnsupportedError, match=r"got MXFP8BlockScaling; did you mean MXFP8BlockScaling\(\)"):
        breccia.cast(X, breccia.MXFP8BlockScaling)  # type: ignore[arg-type]


def test_a_name_is_read_once() -> None:
    assert as_recipe("int4,group_size=32") is as_recipe("int4,group_size=32")
    for n in range(300):
        as_recipe(f"int4,group_size={n + 1}")
    assert len(registry().specs) <= 256
    mine = breccia.INT4Scaling()
    assert as_recipe(mine) is mine


@pytest.mark.together
def test_bridges_and_trees_take_names(tmp_path: Path) -> None:
    breccia.bridges.save_safetensors({"w": X}, tmp_path / "w.safetensors")
    report = breccia.bridges.convert(tmp_path / "w.safetensors", tmp_path / "q.safetensors", "mxfp8")
    assert report.recipe == breccia.MXFP8BlockScaling()
    assert "1 tensors quantized under mxfp8, 0 kept; 8.25 bits per parameter, SQNR " in repr(report)
    again = copy.deepcopy(pickle.loads(pickle.dumps(report)))
    assert again == report and again.recipe == report.recipe
    mlx = pytest.importorskip("mlx.nn")
    breccia_mlx = pytest.importorskip("breccia_mlx")
    model = mlx.Sequential(mlx.Linear(64, 32), mlx.Linear(32, 64))
    breccia_mlx.quantize(
        model, "nvfp4", activation="mxfp8", class_predicate=lambda path, _: {"recipe": "int4"} if "0" in path else True
    )
    first, second = model.layers
    assert (first.weight.recipe, second.weight.recipe, first.activation) == (
        breccia.INT4Scaling(),
        breccia.NVFP4BlockScaling(),
        breccia.MXFP8BlockScaling(),
    )


def test_jax_reads_names_under_jit_and_in_trees() -> None:
    jax, breccia_jax = pytest.importorskip("jax"), pytest.importorskip("breccia_jax")
    y = jax.jit(lambda x: breccia.dequantize(breccia.cast(x, "mxfp8"), out_dtype="bf16"))(X)
    assert y.dtype == jax.numpy.bfloat16 and same_bits(np.asarray(y, "f4"), values(breccia.cast(X, "mxfp8")))
    assert breccia_jax.quantize({"w": jax.numpy.asarray(X.repeat(16, 0))}, "mxfp8")["w"].recipe == breccia.MXFP8BlockScaling()


@pytest.mark.long
def test_torch_compiles_calls_with_names() -> None:
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("breccia_torch")
    x = torch.from_numpy(X)

    def call(x: Any) -> Any:
        st = breccia.cast(x, "mxfp8")
        again = breccia.dequantize(breccia.requantize(st, "fp8_block,block_k=32"), out_dtype="bf16")
        return again + breccia.cast_ste(x, "int4")

    def constructing(x: Any) -> Any:
        return breccia.dequantize(breccia.cast(x, breccia.INT4Scaling(group_size=32, scale_dtype="bfloat16")), out_dtype="half")

    for function in (call, constructing):
        assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x))


def spellings(framework: str) -> list[Any]:
    """How users of the framework write BF16."""
    names = {"numpy": "ml_dtypes", "torch": "torch", "jax": "jax.numpy", "mlx": "mlx.core"}
    module = pytest.importorskip(names[framework])
    return ["bf16", "bfloat16", "BF16", module.bfloat16, *([np.dtype(module.bfloat16)] if framework == "numpy" else [])]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_dtypes_are_taken_in_every_spelling(framework: str) -> None:
    for spelling in spellings(framework):
        assert output_dtype(spelling) == "bfloat16"
        assert breccia.INT4Scaling(scale_dtype=spelling) == breccia.INT4Scaling(scale_dtype="bf16")
    assert {output_dtype(d) for d in ("fp16", "half", "float16", np.float16, np.dtype("f2"))} == {"float16"}
    assert {output_dtype(d) for d in ("fp32", "single", "FP32", np.float32)} == {"float32"}
    assert breccia.INT4Scaling(scale_dtype="float32").scale_dtype == "fp32"
    for wrong in ("float", "fp8", np.float64, None):
        with pytest.raises(breccia.UnsupportedError, match="out_dtype is one of float32"):
            output_dtype(wrong)


def test_fields_of_recipes_are_taken_in_any_case_and_stored_in_one() -> None:
    for given, wanted in (
        (breccia.MXFP8BlockScaling("e5m2", scale_rule="EVEN"), breccia.MXFP8BlockScaling("E5M2", scale_rule="even")),
        (breccia.NVFP4BlockScaling(fp4_format="e2m1", global_sense="Amax"), breccia.NVFP4BlockScaling(global_sense="amax")),
        (breccia.INT4Scaling(scale_dtype="bfloat16"), breccia.INT4Scaling(scale_dtype="bf16")),
        (breccia.NF4Scaling(scale_dtype="float16"), breccia.NF4Scaling(scale_dtype="fp16")),
    ):
        assert given == wanted and hash(given) == hash(wanted) and given.to_json() == wanted.to_json()
        assert given.fingerprint() == wanted.fingerprint() and given.spec == wanted.spec


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: breccia.MXFP8BlockScaling("E4M4"), ValueError,
            "fp8_format must be 'E4M3' or 'E5M2', got 'E4M4'; did you mean 'E4M3'?"),
        (lambda: breccia.MXFP8BlockScaling(scale_rule="flor"), ValueError,
            "'rceil', 'floor', 'even', 'mse', got 'flor'; did you mean 'floor'"),
        (lambda: breccia.INT4Scaling(scale_dtype="float64"), ValueError,
            "scale_dtype must be one of 'fp16', 'bf16', 'fp32', got 'float64'"),
        (lambda: breccia.INT4Scaling(scale_dtype=16), ValueError, "scale_dtype must be one of 'fp16', 'bf16', 'fp32', got 16"),  # type: ignore[arg-type]
        (
            lambda: breccia.Float8BlockScaling(blok_k=64),
            TypeError,
            "Float8BlockScaling has no field 'blok_k'; did you mean 'block_k'",
        ),  # type: ignore[call-arg]
        (lambda: breccia.PerBlockK(blok_size=64), TypeError, "PerBlockK has no field 'blok_size'; did you mean 'block_size'"),  # type: ignore[call-arg]
        (lambda: breccia.Float8BlockScaling("E4M3", 1, 2, False, "te", 6), TypeError, "takes from 1 to 6 positional arguments"),  # type: ignore[call-arg]
    ],
)  # fmt: skip
def test_a_misspelled_field_gets_the_nearest_name(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


# ------------------------------------------------------------------------------------------------ attributes and printed forms


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_tensor_has_the_attributes_of_an_array(framework: str) -> None:
    st = moved(breccia.cast(X, breccia.NVFP4BlockScaling()), framework)
    y = breccia.dequantize(st)
    assert st.dtype == y.dtype and st.dtype != st.data_dtype
    assert (st.size, st.numel(), st[0].size) == (256, 256, 64)
    assert breccia.bytes_equal(st.T, st.mT)
    assert same_bits(ops_of(y).to_numpy(st.dequantize()), values(st))
    half = st.dequantize(out_dtype="half")
    assert dtype_name(half) == "float16" and same_bits(ops_of(half).to_numpy(half), values(st).astype("f2"))
    for wrong in (st.reshape(1, *st.shape), st[0]):
        with pytest.raises(breccia.LayoutError, match=r"T is the transpose of a matrix; .* st.mT swaps the last two axes"):
            wrong.T  # noqa: B018


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("numpy", r"breccia.dequantize\(st\).*to_dlpack\(st\), 'numpy'\)"),
        ("cpu", r"st.to\('cpu'\)"),
        ("astype", r"breccia.dequantize\(st, out_dtype='float16'\).*breccia.requantize\(st, recipe\)"),
        ("bfloat16", r"out_dtype='bfloat16'"),
        ("clone", r"copy.deepcopy\(st\)"),
        ("requires_grad", r"breccia.cast_ste\(x, recipe\)"),
        ("view", r"st.reshape\(...\).* st.mT"),
        ("unsqueeze", r"st.reshape\(1, \*st.shape\)"),
    ],
)
def test_an_attribute_of_arrays_that_is_missing_names_the_call_to_make(name: str, call: str) -> None:
    st = breccia.cast(X, breccia.MXFP8BlockScaling())
    assert not hasattr(st, name) and getattr(st, name, None) is None
    with pytest.raises(AttributeError, match=f"^'ScaledTensor' object has no attribute '{name}': .*{call}"):
        getattr(st, name)
    with pytest.raises(AttributeError, match="^'ScaledTensor' object has no attribute 'sape'$"):
        st.sape  # type: ignore[attr-defined]  # noqa: B018


def test_no_advice_hides_an_attribute() -> None:
    assert not [name for name in ADVICE if hasattr(breccia.ScaledTensor, name)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_tensor_prints_in_one_line_with_what_a_reader_asks(framework: str) -> None:
    st = moved(breccia.cast(X, breccia.Float8BlockScaling(block_k=32)), framework)
    assert repr(st) == f"breccia.ScaledTensor('fp8_block,block_k=32', shape=(4, 64), {framework} cpu, 9 bits per value)"
    stored = st.mT.to_storage("column_major")
    assert repr(stored).endswith("9 bits per value, axis=-2, storage='column_major')")
    assert repr(st[:0]).endswith(f"shape=(0, 64), {framework} cpu, - bits per value)")
    html = stored._repr_html_()
    assert html.startswith("<table>") and "<td>fp8_block,block_k=32</td>" in html and "<td>column_major</td>" in html


def test_the_table_of_a_notebook_is_escaped() -> None:
    recipe = breccia.Float8BlockScaling(block_k=32)
    object.__setattr__(recipe, "scale_rule", "<b>")
    st = breccia.cast(X, breccia.Float8BlockScaling(block_k=32))
    other = breccia.ScaledTensor.from_parts(st.data, st.scale, recipe, st.layout)
    assert "<b>" not in other._repr_html_() and "&lt;b&gt;" in other._repr_html_()


def test_a_tracer_prints_too() -> None:
    jax = pytest.importorskip("jax")
    printed: list[str] = []
    jax.jit(lambda x: printed.append(repr(breccia.cast(x, "mxfp8"))))(X)
    assert printed == ["breccia.ScaledTensor('mxfp8', shape=(4, 64), jax cpu, 8.25 bits per value)"]


# ------------------------------------------------------------------------------------------------ error metrics


@pytest.mark.together
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("recipe", ["nvfp4", "int4,group_size=16,signed=false,symmetric=false", "fp8_current", "mxfp6"])
def test_metrics_are_those_of_breccia_compare(recipe: str, framework: str, tmp_path: Path) -> None:
    x = wide((2, 5, 77), seed=10, exponents=4)
    st = breccia.cast(x, recipe)
    breccia.bridges.save_safetensors({"w": x}, tmp_path / "a.safetensors")
    breccia.bridges.save_safetensors({"w": st}, tmp_path / "b.safetensors")
    (compared,) = breccia.bridges.compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors").tensors
    assert repr(breccia.bridges.compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors")).count("\n") == 0
    found = breccia.metrics(x, moved(st, framework))
    assert found == compared.fidelity and found.to_dict() == compared.fidelity.to_dict()
    assert found.sqnr > 0 and found.count == x.size and found.clip_rate is not None
    assert breccia.metrics(x, moved(st.mT, framework).mT) == found
    bf16 = breccia.dequantize(moved(st, framework), out_dtype="bf16")
    assert breccia.metrics(st, bf16).clip_rate is None and breccia.metrics(bf16, bf16).lossless


def test_metrics_add_up_and_print_their_numbers() -> None:
    x = wide((8, 64), seed=11, exponents=2)
    st = breccia.cast(x, "nvfp4")
    whole = breccia.metrics(x, st)
    assert breccia.metrics(x[0], st[0]).count == 64
    assert breccia.metrics(x.astype("f8"), st) == whole
    both = breccia.metrics(x[:4], st[:4]) + breccia.metrics(x[4:], st[4:])
    assert isinstance(both, breccia.ErrorMetrics) and (both.max_error, both.clipped) == (whole.max_error, whole.clipped)
    assert (
        repr(whole)
        == str(whole)
        == (
            f"ErrorMetrics(SQNR {whole.sqnr:.2f} dB, cosine {whole.cosine:.6f}, max error {whole.max_error:.4g}, "
            f"{whole.clip_rate:.3%} clipped, {whole.underflow_rate:.3%} underflowed, of 512 values)"
        )
    )
    assert "clipped" not in repr(breccia.metrics(x, x)) and "SQNR inf dB" in repr(breccia.metrics(x, x))
    assert pickle.loads(pickle.dumps(whole)) == copy.deepcopy(whole) == whole


def test_metrics_refuse_what_cannot_be_compared() -> None:
    with pytest.raises(breccia.ShapeError, match=r"reference has \(4, 64\), quantized \(2, 64\)"):
        breccia.metrics(X, breccia.cast(X[:2], "mxfp8"))
    with pytest.raises(
        breccia.UnsupportedError, match="metrics compares ScaledTensors and floating arrays; reference is int32"
    ):
        breccia.metrics(X.astype("i4"), X)
    with pytest.raises(breccia.UnsupportedError, match="quantized must be an array"):
        breccia.metrics(X, [1.0])


def test_an_explanation_shows_its_text() -> None:
    found = breccia.explain("cast", X, "mxfp8")
    assert repr(found) == str(found) and "numpy.cast" in repr(found)


# ------------------------------------------------------------------------------------------------ weights of layers, and copies


@pytest.mark.parametrize("framework", ["torch", "mlx"])
def test_ops_accept_the_weight_of_a_quantized_layer(framework: str) -> None:
    nn = pytest.importorskip(f"breccia_{framework}").nn
    st = moved(breccia.cast(X, breccia.MXFP8BlockScaling()), framework)
    weight = nn.ScaledWeight(st)
    assert same_bits(ops_of(st.data).to_numpy(breccia.dequantize(weight)), values(st))
    assert breccia.requantize(weight, "nvfp4").recipe == breccia.NVFP4BlockScaling() and breccia.bytes_equal(weight, st)
    assert breccia.metrics(X, weight) == breccia.metrics(X, st)
    product, expected = breccia.matmul(weight, st.mT), breccia.matmul(st, st.mT)
    assert same_bits(ops_of(product).to_numpy(product), ops_of(expected).to_numpy(expected))


def test_an_object_says_which_tensor_it_contains() -> None:
    class Holder:
        __scaled_tensor__ = breccia.cast(X, "mxfp8")

    assert same_bits(breccia.dequantize(Holder()), values(Holder.__scaled_tensor__))  # type: ignore[arg-type]
    for wrong in (object(), X):
        with pytest.raises(breccia.UnsupportedError, match=f"dequantize takes a ScaledTensor, got {type(wrong).__name__}"):
            breccia.dequantize(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "recipe", ["nvfp4", "mxfp8", "int4,group_size=16,scale_dtype=bf16,signed=false,symmetric=false,offset=bias"]
)
def test_tensors_of_every_framework_are_pickled_and_copied(recipe: str, framework: str) -> None:
    st = moved(breccia.cast(X[:, :37], recipe), framework)
    for other in (pickle.loads(pickle.dumps(st)), copy.copy(st), copy.deepcopy(st), pickle.loads(pickle.dumps(st.mT)).mT):
        assert other.framework == framework and breccia.bytes_equal(other, st)
        assert dtype_name(other.data) == dtype_name(st.data) and dtype_name(other.scale) == dtype_name(st.scale)


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_recipes_are_pickled_and_copied(recipe: breccia.ScalingRecipe) -> None:
    assert pickle.loads(pickle.dumps(recipe)) == copy.copy(recipe) == copy.deepcopy(recipe) == recipe == as_recipe(recipe.spec)
