"""breccia.bridges.save_safetensors and load_safetensors: exact round trips in every framework, or a clear error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import GOLDEN
from safetensors.numpy import save_file

import breccia
from breccia.arrays.frameworks import dtype_name, ops_of
from breccia.backend import components
from breccia.bridges import compare, convert, load_safetensors, safetensors_metadata, save_safetensors
from breccia_bridges import configs
from breccia_bridges.configs import Config, read_config, read_configs
from breccia_bridges.inspection import inspected
from breccia_bridges.safetensors import describe, open_writer, plan, read_tensor, write_tensor
from breccia_bridges.safetensors_file import Container
from breccia_bridges.safetensors_writer import Writer

#: Every recipe and every framework in `make test`; their products in `make test-all`.
pytestmark = pytest.mark.covering(1, 2)

FRAMEWORKS = ("numpy", "torch", "jax", "mlx")
OLD = GOLDEN / "breccia_0_1_3"
X = np.random.default_rng(11).standard_normal((5, 51)).astype(np.float32)


def converter(framework: str) -> Callable[[np.ndarray], Any]:
    if framework == "numpy":
        return lambda a: a
    module = pytest.importorskip({"torch": "torch", "jax": "jax.numpy", "mlx": "mlx.core"}[framework])
    return {"torch": lambda m: m.from_numpy, "jax": lambda m: m.asarray, "mlx": lambda m: m.array}[framework](module)


def raw(array: Any) -> bytes:
    return np.ascontiguousarray(ops_of(array).to_numpy(array)).tobytes()


def parts(tensor: breccia.ScaledTensor) -> list[bytes | None]:
    held = (tensor.data, tensor.scale, tensor.zero_point, tensor.global_scale)
    return [None if part is None else raw(part) for part in held]


def cast_on(framework: str, x: np.ndarray, recipe: breccia.ScalingRecipe, axis: int = -1) -> breccia.ScaledTensor:
    """The result of `cast` on a framework: cast by NumPy and then moved, because JAX would take minutes to trace every cast."""
    made = breccia.cast(x, recipe, axis=axis)
    ops, fmt = ops_of(converter(framework)(x)), recipe.format

    def moved(part: np.ndarray | None, dtype: str) -> Any:
        view = None if framework == "numpy" or part is None or part.dtype.name == dtype else dtype
        return None if part is None else ops.from_numpy(part, view)

    data, scale = moved(made.data, ops.storage(fmt.element)), moved(made.scale, ops.storage(fmt.scale.codec))
    offset = ops.storage(fmt.scale.codec) if fmt.offset == "bias" else "uint8"
    rest = moved(made.zero_point, offset), moved(made.global_scale, "float32")
    return breccia.from_buffer(data, scale, recipe, made.layout, *rest, axis=made.axis, shape=made.shape)


def assert_same(a: breccia.ScaledTensor, b: breccia.ScaledTensor) -> None:
    assert (a.recipe, a.layout, a.axis, a.padding, a.shape) == (b.recipe, b.layout, b.axis, b.padding, b.shape)
    assert parts(a) == parts(b)


# ------------------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("shape", "axis"), [((5, 51), -1), ((4, 256), -1), ((2, 3, 40), -1), ((51, 5), -2), ((0, 64), -1)], ids=str
)
def test_a_tensor_of_every_recipe_comes_back_byte_for_byte(
    recipe: breccia.ScalingRecipe, framework: str, shape: tuple[int, ...], axis: int, tmp_path: Path
) -> None:
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    tensor = cast_on(framework, x, recipe, axis)
    save_safetensors({"w": tensor}, tmp_path / "f")
    back = load_safetensors(tmp_path / "f", framework=framework)["w"]
    assert_same(back, tensor)
    assert back.framework == framework
    assert (dtype_name(back.data), dtype_name(back.scale)) == (dtype_name(tensor.data), dtype_name(tensor.scale))


@pytest.mark.parametrize("reader", FRAMEWORKS)
@pytest.mark.parametrize("writer", FRAMEWORKS)
def test_every_framework_reads_the_same_bytes_from_every_frameworks_file(
    recipe: breccia.ScalingRecipe, writer: str, reader: str, tmp_path: Path
) -> None:
    converter(reader)
    tensor = cast_on(writer, X, recipe)
    save_safetensors({"w": tensor}, tmp_path / "f")
    assert_same(load_safetensors(tmp_path / "f", framework=reader)["w"], tensor)


def test_all_frameworks_write_identical_files(recipe: breccia.ScalingRecipe, tmp_path: Path) -> None:
    for framework in FRAMEWORKS:
        save_safetensors({"w": cast_on(framework, X, recipe)}, tmp_path / framework)
    files = {(tmp_path / framework).read_bytes() for framework in FRAMEWORKS}
    assert len(files) == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_transposed_view_is_stored_contiguously_with_its_axis(framework: str, tmp_path: Path) -> None:
    tensor = cast_on(framework, X, breccia.NVFP4BlockScaling()).mT
    save_safetensors({"w": tensor}, tmp_path / "f")
    config = read_configs(Container(tmp_path / "f"))["w"]
    assert (config.axis, config.shape) == (-2, (51, 5))
    assert_same(load_safetensors(tmp_path / "f", framework=framework)["w"], tensor)


def test_a_transposed_column_of_elements_comes_back_with_its_layout(tmp_path: Path) -> None:
    """Its JSON names a tile one row high, which is no block along K: `PerBlockMN(4, 1).mT`."""
    tensor = breccia.cast(np.ones((8, 5), np.float32), breccia.Float8BlockScaling(block_m=4, block_k=1)).mT
    save_safetensors({"w": tensor}, tmp_path / "f")
    config = read_configs(Container(tmp_path / "f"))["w"]
    assert config.layout == tensor.layout == breccia.PerBlockMN(4, 1).mT
    assert config.layout.to_dict()["fields"] == {"block_m": 1, "block_n": 4, "partial": False}
    assert_same(load_safetensors(tmp_path / "f")["w"], tensor)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_trees_are_saved_under_joined_names(framework: str, tmp_path: Path) -> None:
    make = converter(framework)
    w, b = cast_on(framework, X, breccia.MXFP8BlockScaling()), make(X[0])
    tree = {"params": {"dense": {"kernel": w, "bias": b}, "layers": [{"w": b}, {"w": w, "none": None}]}, "flat.name": b}
    save_safetensors(tree, tmp_path / "f")
    back = load_safetensors(tmp_path / "f", framework=framework)
    names = ["flat.name", "params.dense.bias", "params.dense.kernel", "params.layers.0.w", "params.layers.1.w"]
    assert sorted(back) == names
    found = load_safetensors(tmp_path / "f", framework=framework, nested=True)
    assert found["params"]["layers"].keys() == {"0", "1"} and raw(found["flat"]["name"]) == raw(b)
    for st_ in (found["params"]["dense"]["kernel"], found["params"]["layers"]["1"]["w"]):
        assert_same(st_, w)


def test_trees_without_flat_names_are_refused(tmp_path: Path) -> None:
    a = np.ones(2, np.float32)
    with pytest.raises(breccia.UnsupportedError, match=r"two tensors of the tree have the name 'a\.b', since keys are joined"):
        save_safetensors({"a": {"b": a}, "a.b": a}, tmp_path / "f")
    with pytest.raises(breccia.UnsupportedError, match=r"keys of a tree of tensors are text or integers; a has \(1, 2\)"):
        save_safetensors({"a": {(1, 2): a}}, tmp_path / "f")
    with pytest.raises(breccia.UnsupportedError, match="keys of a tree of tensors are text or integers; the tree has True"):
        save_safetensors({True: {"a": a}}, tmp_path / "f")
    save_safetensors({"a": a, "a.b": a}, tmp_path / "f")
    with pytest.raises(breccia.UnsupportedError, match=r"'a' is a tensor and the beginning of the name 'a\.b', which nested"):
        load_safetensors(tmp_path / "f", nested=True)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_plain_arrays_are_saved_beside_scaled_tensors(framework: str, tmp_path: Path) -> None:
    convert = converter(framework)
    plain = {
        "f32": X,
        "f16": X.astype(np.float16),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "i8": np.arange(-3, 3, dtype=np.int8).reshape(2, 3),
        "i32": np.arange(6, dtype=np.int32).reshape(2, 3),
        "u16": np.arange(6, dtype=np.uint16),
        "bool": X > 0,
        "c64": (X + 1j * X).astype(np.complex64),
    }
    tensors: dict[str, Any] = {name: convert(a) for name, a in plain.items()}
    tensors["w"] = cast_on(framework, X, breccia.INT4Scaling())
    save_safetensors(tensors, tmp_path / "f", {"author": "me"})
    back = load_safetensors(tmp_path / "f", framework=framework)
    assert list(back) == list(tensors)
    for name, a in plain.items():
        assert tuple(back[name].shape) == a.shape
        assert dtype_name(back[name]).removesuffix("_") == a.dtype.name
        assert np.asarray(back[name].tolist(), a.dtype).tobytes() == a.tobytes()
    assert Container(tmp_path / "f").metadata["author"] == "me"


@pytest.mark.parametrize("framework", ["torch", "jax", "numpy"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_plain_bfloat16_and_float8_keep_their_dtype_and_bytes(framework: str, dtype: str, tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.abs(X).astype(getattr(ml_dtypes, dtype))
    save_safetensors({"a": array, "zero": array[0, 0]}, tmp_path / "f")
    converter(framework)
    back = load_safetensors(tmp_path / "f", framework=framework)
    assert dtype_name(back["a"]) == dtype_name(back["zero"]) == dtype
    assert (raw(back["a"]), raw(back["zero"])) == (array.tobytes(), array[0, 0].tobytes())
    save_safetensors(back, tmp_path / "g")
    assert (tmp_path / "g").read_bytes() == (tmp_path / "f").read_bytes()


def test_mlx_shows_plain_float8_as_its_bytes_and_keeps_bfloat16(tmp_path: Path) -> None:
    converter("mlx")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    f8, bf16 = X.astype(ml_dtypes.float8_e4m3fn), X.astype(ml_dtypes.bfloat16)
    save_safetensors({"f8": f8, "bf16": bf16}, tmp_path / "f")
    back = load_safetensors(tmp_path / "f", framework="mlx")
    assert (dtype_name(back["f8"]), dtype_name(back["bf16"])) == ("uint8", "bfloat16")
    assert (raw(back["f8"]), raw(back["bf16"])) == (f8.tobytes(), bf16.tobytes())


@pytest.mark.parametrize("shape", [(), (3, 5)])
def test_wide_torch_dtypes_are_saved_unchanged(shape: tuple[int, ...], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = {d: torch.ones(shape).to(getattr(torch, d)) for d in ("float64", "int64", "int16", "uint32", "complex64")}
    save_safetensors(tensors, tmp_path / "f")
    back = load_safetensors(tmp_path / "f", framework="torch")
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


def test_scales_keep_a_float_dtype_that_differs_from_the_recipe(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    ours = breccia.cast(torch.from_numpy(X), breccia.INT4Scaling(scale_dtype="fp32"))
    kept = breccia.from_buffer(ours.data, ours.scale.to(torch.bfloat16), ours.recipe, ours.layout, shape=ours.shape)
    save_safetensors({"w": kept}, tmp_path / "f")
    assert Container(tmp_path / "f").entries["w.scale"].dtype == "BF16"
    for framework in ("torch", "numpy"):
        back = load_safetensors(tmp_path / "f", framework=framework)["w"]
        assert_same(back, kept)
        assert dtype_name(back.scale) == "bfloat16"


def test_parameters_and_views_of_torch_are_saved(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save_safetensors({"p": torch.nn.Parameter(torch.from_numpy(X)), "v": torch.from_numpy(X).T}, tmp_path / "f")
    back = load_safetensors(tmp_path / "f")
    assert back["p"].tobytes() == X.tobytes()
    assert back["v"].tobytes() == X.T.tobytes()


def test_device_is_passed_on(tmp_path: Path) -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    pytest.importorskip("mlx.core")
    save_safetensors({"w": breccia.cast(X, breccia.Float8BlockScaling()), "b": X}, tmp_path / "f")
    meta = load_safetensors(tmp_path / "f", framework="torch", device="meta")
    assert {str(p.device) for p in (meta["w"].data, meta["w"].scale, meta["b"])} == {"meta"}
    assert load_safetensors(tmp_path / "f", framework="torch", device=torch.device("cpu"))["w"].device.type == "cpu"
    cpu = jax.devices("cpu")[0]
    assert load_safetensors(tmp_path / "f", framework="jax", device=cpu)["b"].devices() == {cpu}
    assert_same(
        load_safetensors(tmp_path / "f", device="cpu")["w"],
        load_safetensors(tmp_path / "f", framework="torch", device="cpu")["w"],
    )
    with pytest.raises(breccia.UnsupportedError, match=r"NumPy arrays live on 'cpu'; got device='cuda'.*framework='torch'"):
        load_safetensors(tmp_path / "f", device="cuda")
    with pytest.raises(breccia.OptionError, match=r"MLX arrays lie in memory that all devices share, .* got 'gpu'"):
        load_safetensors(tmp_path / "f", framework="mlx", device="gpu")


# ------------------------------------------------------------------------------------------------ the file itself


def test_the_file_has_the_documented_form(tmp_path: Path) -> None:
    save_safetensors({"w": breccia.cast(X, breccia.NVFP4BlockScaling())}, tmp_path / "f")
    opened = Container(tmp_path / "f")
    assert {name: (e.dtype, e.shape) for name, e in opened.entries.items()} == {
        "w.data": ("U8", (5, 26)),
        "w.scale": ("U8", (5, 4)),
        "w.global_scale": ("F32", ()),
    }
    assert opened.metadata["schema"] == "1"
    assert opened.metadata["breccia_version"] == breccia.__version__
    assert json.loads(opened.metadata["w.config"]) == {
        "recipe": {
            "name": "nvfp4",
            "fields": {"fp4_format": "E2M1", "block_size": 16, "scale_format": "E4M3", "two_level": True},
        },
        "layout": {"name": "per_block_k", "fields": {"block_size": 16, "partial": True}},
        "axis": -1,
        "shape": [5, 51],
        "dtypes": {"data": "E2M1", "scale": "E4M3"},
    }


@pytest.mark.parametrize("framework", ["numpy", "pt", "flax", "mlx"])
def test_stock_readers_of_every_framework_open_the_file(framework: str, tmp_path: Path) -> None:
    stock = pytest.importorskip("safetensors")
    converter({"pt": "torch", "flax": "jax"}.get(framework, framework))
    scaled = {
        f"{i}": breccia.cast(X, r)
        for i, r in enumerate(
            [breccia.MXFP8BlockScaling(), breccia.INT4Scaling(scale_dtype="bf16"), breccia.NVFP4BlockScaling()]
        )
    }
    save_safetensors(scaled, tmp_path / "f")
    with stock.safe_open(tmp_path / "f", framework=framework) as f:
        for name, tensor in scaled.items():
            assert raw(f.get_tensor(f"{name}.data")) == raw(tensor.data)
            assert raw(f.get_tensor(f"{name}.scale")) == raw(tensor.scale)


@pytest.mark.parametrize("shape", [(5, 51), (4, 256), (3, 2, 40), (0, 128), (1, 1)], ids=str)
def test_entries_planned_from_a_shape_are_those_of_the_cast(
    recipe: breccia.ScalingRecipe, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = breccia.cast(np.ones(shape, np.float32), recipe)
    assert plan("w", shape, recipe) == describe("w", tensor)
    save_safetensors({"w": tensor}, tmp_path / "f")
    stored = Container(tmp_path / "f").entries
    assert plan("w", shape, recipe)[0] == {name: (e.dtype, e.shape) for name, e in stored.items()}
    assert read_configs(Container(tmp_path / "f")) == {"w": plan("w", shape, recipe)[1]}


def test_configs_of_the_same_text_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of very many tensors have few different configs."""
    tensor, other = (breccia.cast(np.ones(shape, np.float32), "mxfp8") for shape in ((2, 64), (3, 64)))
    save_safetensors({**{f"w{i}": tensor for i in range(5)}, "other": other}, tmp_path / "f")
    texts: list[str] = []

    def listed(text: str, schema: str | None) -> Any:
        texts.append(text)
        return read(text, schema)

    read = configs._listed
    monkeypatch.setattr(configs, "_listed", listed)
    found = read_configs(Container(tmp_path / "f"))
    assert {name: config.shape for name, config in found.items()} == {**{f"w{i}": (2, 64) for i in range(5)}, "other": (3, 64)}
    assert len(texts) == 2


def test_a_plan_of_too_few_axes_says_so() -> None:
    with pytest.raises(breccia.ShapeError, match=r"tensor 'b': recipe 'mxfp8' needs at least 2 axes, shape \(64,\) has 1"):
        plan("b", (64,), breccia.MXFP8BlockScaling())
    assert plan("b", (64,), breccia.Float8CurrentScaling())[0] == {"b.data": ("U8", (64,)), "b.scale": ("F32", ())}


def test_tensors_can_be_written_one_by_one(tmp_path: Path) -> None:
    recipe = breccia.INT4Scaling(signed=False, symmetric=False)
    described = {"w": plan("w", X.shape, recipe), "b": ({"b": ("F32", (51,))}, None)}
    with open_writer(tmp_path / "f", described, {"k": "v"}, force=False) as writer:
        write_tensor(writer, "b", X[0])
        write_tensor(writer, "w", breccia.cast(X, recipe))
    save_safetensors({"w": breccia.cast(X, recipe), "b": X[0]}, tmp_path / "g", {"k": "v"})
    assert (tmp_path / "f").read_bytes() == (tmp_path / "g").read_bytes()


def test_a_config_reads_back_as_it_was_written(recipe: breccia.ScalingRecipe) -> None:
    config = plan("w", X.shape, recipe)[1]
    assert isinstance(config, Config)
    assert read_config(config.to_json()) == config


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_tensor_is_read_without_the_others(framework: str, tmp_path: Path) -> None:
    converter(framework)
    save_safetensors({"w": cast_on(framework, X, breccia.NVFP4BlockScaling()), "b": X}, tmp_path / "f")
    opened = Container(tmp_path / "f")
    read = read_tensor(opened, "w", read_configs(opened)["w"], framework=framework)
    assert_same(read, load_safetensors(tmp_path / "f", framework=framework)["w"])
    assert read.framework == framework


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two files."""
    scaled = breccia.cast(X, breccia.NVFP4BlockScaling())
    save_safetensors({"layers.0.weight": scaled, "layers.0.bias": X[0]}, tmp_path / "0.safetensors")
    save_safetensors({"layers.1.weight": scaled, "norm[0]": X[1], "norm0": X[2]}, tmp_path / "1.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["norm0"], ["norm0"]),
        (["layers.*.weight"], ["layers.0.weight", "layers.1.weight"]),
        (["norm[0]"], ["norm0", "norm[0]"]),
        (("layers.1.weight", "*.bias", "layers.1.*"), ["layers.0.bias", "layers.1.weight"]),
        ("*.bias", ["layers.0.bias"]),
        ([], []),
    ],
    ids=str,
)
def test_only_the_named_tensors_are_loaded(names: Any, expected: list[str], folder: Path) -> None:
    every, loaded = load_safetensors(folder), load_safetensors(folder, names=names)
    assert sorted(loaded) == expected and list(loaded) == [name for name in every if name in loaded]
    for name, tensor in loaded.items():
        if isinstance(tensor, breccia.ScaledTensor):
            assert_same(tensor, every[name])
        else:
            assert raw(tensor) == raw(every[name])


def test_of_files_without_the_named_tensors_only_the_header_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[str] = []
    inner = Container._mapped
    monkeypatch.setattr(Container, "_mapped", lambda self: (mapped.append(self.path.name), inner(self))[1])
    load_safetensors(folder, names=["layers.1.*"])
    assert set(mapped) == {"1.safetensors"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["norm0", "layers.0.wieght"], "the pattern 'layers.0.wieght' matches no tensor; did you mean 'layers.0.weight'?"),
        (["layer.*.wait"], "the pattern 'layer.*.wait' matches no tensor; `breccia inspect` lists the names, such as "
            "layers.0.bias, layers.0.weight, layers.1.weight and 2 more."),
        (["norm0,norm1"], "the pattern 'norm0,norm1' matches no tensor; give each pattern separately."),
        (["layers.0.weight.data"], "the pattern 'layers.0.weight.data' matches no tensor; `breccia inspect` lists the names, "
            "such as layers.0.bias, layers.0.weight, layers.1.weight and 2 more."),
    ],
)  # fmt: skip
def test_a_name_without_a_tensor_is_refused_with_close_names(names: list[str], message: str, folder: Path) -> None:
    with pytest.raises(breccia.UnknownNameError) as e:
        load_safetensors(folder, names=names)
    assert str(e.value) == message and e.value.found == {"patterns": names[-1:]}


def test_numpy_loads_are_mapped_and_copy_on_write(tmp_path: Path) -> None:
    save_safetensors({"w": breccia.cast(X, breccia.Float8BlockScaling()), "b": X}, tmp_path / "f")
    before = (tmp_path / "f").read_bytes()
    back = load_safetensors(tmp_path / "f")
    for array in (back["w"].data, back["w"].scale, back["b"]):
        assert type(array.base).__name__ == "mmap"
        array[...] = 1
    assert (tmp_path / "f").read_bytes() == before
    assert load_safetensors(tmp_path / "f")["b"].tobytes() == X.tobytes()


def test_torch_shares_the_mapping(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save_safetensors({"b": X}, tmp_path / "f")
    before = (tmp_path / "f").read_bytes()
    back = load_safetensors(tmp_path / "f", framework="torch")["b"]
    assert torch.equal(back.fill_(1), torch.ones(5, 51))
    assert (tmp_path / "f").read_bytes() == before


def test_saving_over_a_mapped_file_keeps_both_contents_correct(tmp_path: Path) -> None:
    path = tmp_path / "f"
    save_safetensors({"b": X, "c": X + 1}, path)
    mapped = load_safetensors(path)
    save_safetensors({"b": mapped["c"], "c": mapped["b"]}, path, force=True)
    assert mapped["b"].tobytes() == X.tobytes()
    again = load_safetensors(path)
    assert (again["b"].tobytes(), again["c"].tobytes()) == ((X + 1).tobytes(), X.tobytes())


def test_an_existing_file_is_replaced_with_force_only(tmp_path: Path) -> None:
    save_safetensors({"b": X}, tmp_path / "f")
    with pytest.raises(FileExistsError, match=r"exists; choose another name, or replace it: force=True \(--force\)"):
        save_safetensors({}, tmp_path / "f")
    assert load_safetensors(tmp_path / "f")["b"].tobytes() == X.tobytes()
    save_safetensors({}, tmp_path / "f", force=True)
    assert load_safetensors(tmp_path / "f") == {}


@pytest.mark.parametrize(
    ("tensors", "extra", "message"),
    [
        (
            {"a": "scaled", "a.data": "plain"},
            {},
            "the names 'a.data' and 'a' collide: a scaled tensor uses its name with .data",
        ),
        ({"a.zero_point": "plain", "a": "scaled"}, {}, "the names 'a.zero_point' and 'a' collide"),
        ({3: "plain"}, {}, r"a tensor's name must be a str, got 3"),
        ({3: "scaled"}, {}, r"a tensor's name must be a str, got 3"),
        ({}, {"k": 1}, "metadata 'k' must be a str, got 1"),
        (
            {},
            {"schema": "7"},
            "extra_metadata key 'schema' is reserved: schema, breccia_version, breccia_scope and all keys that end",
        ),
        ({}, {"breccia_version": "7"}, "extra_metadata key 'breccia_version' is reserved"),
        ({}, {"x.config": "{}"}, "extra_metadata key 'x.config' is reserved"),
    ],
)
def test_invalid_names_and_metadata_are_refused(tensors: Any, extra: Any, message: str, tmp_path: Path) -> None:
    made = {"plain": X, "scaled": breccia.cast(X, breccia.Float8CurrentScaling())}
    with pytest.raises(breccia.UnsupportedError, match=message):
        save_safetensors({name: made[kind] for name, kind in tensors.items()}, tmp_path / "f", extra)
    assert not (tmp_path / "f").exists()


def test_values_without_a_dtype_on_disk_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(breccia.UnsupportedError, match=r"tensor 'a' must be an array of .* got list"):
        save_safetensors({"a": [1.0]}, tmp_path / "f")
    with pytest.raises(breccia.UnsupportedError, match=r"tensor 'a': safetensors has no dtype for complex128; it has bool, "):
        save_safetensors({"a": X.astype(np.complex128)}, tmp_path / "f")


# ------------------------------------------------------------------------------------------------ frameworks


def test_an_unknown_framework_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(breccia.UnknownNameError, match="no framework 'nunpy'; did you mean 'numpy'"):
        load_safetensors(tmp_path / "f", framework="nunpy")


def test_numpy_loads_import_no_framework(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    save_safetensors({"w": breccia.cast(X, breccia.MXFP8BlockScaling()), "b": X.astype(ml_dtypes.bfloat16)}, tmp_path / "f")
    code = (
        "import sys, breccia.bridges\n"
        f"back = breccia.bridges.load_safetensors({str(tmp_path / 'f')!r})\n"
        "assert set(back) == {'w', 'b'}\n"
        f"breccia.bridges.save_safetensors(back, {str(tmp_path / 'g')!r})\n"
        "assert not {'torch', 'jax', 'mlx', 'safetensors', 'triton'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
    assert (tmp_path / "g").read_bytes() == (tmp_path / "f").read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_without_ml_dtypes_numpy_names_the_tensor_and_both_remedies(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    save_safetensors({"norm.weight": X.astype(getattr(ml_dtypes, dtype))}, tmp_path / "f")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(breccia.UnsupportedError) as refused:
        load_safetensors(tmp_path / "f")
    for said in ("tensor 'norm.weight'", f"NumPy itself has no {dtype}", "breccia-core[ml-dtypes]", "framework='torch'"):
        assert said in str(refused.value)


def test_scaled_tensors_need_no_ml_dtypes(
    recipe: breccia.ScalingRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    tensor = breccia.cast(X, recipe)
    save_safetensors({"w": tensor}, tmp_path / "f")
    assert_same(load_safetensors(tmp_path / "f")["w"], tensor)


@pytest.mark.parametrize("framework", ["jax", "mlx"])
def test_arrays_that_the_framework_would_narrow_stay_numpy_arrays_with_one_warning(framework: str, tmp_path: Path) -> None:
    kind = type(converter(framework)(X))
    wide = {"positions": np.arange(3) / 3, "eps": np.float64(1e-300).reshape(())}
    ids = {"ids": np.array([2**40, -1]), "seeds": np.array([2**63], np.uint64)} if framework == "jax" else {}
    save_safetensors({**wide, **ids, "b": X, "n": np.arange(3, dtype=np.int32)}, tmp_path / "f")
    with pytest.warns(breccia.DtypeWarning) as caught:
        loaded = load_safetensors(tmp_path / "f", framework=framework)
    for name, array in {**wide, **ids}.items():
        assert type(loaded[name]) is np.ndarray and loaded[name].dtype == array.dtype
        assert loaded[name].tobytes() == array.tobytes()
    assert isinstance(loaded["b"], kind) and isinstance(loaded["n"], kind)
    said = {
        "jax": "positions (float64), eps (float64), ids (int64) and 1 more; they stay NumPy arrays. JAX keeps 64-bit dtypes "
        "after jax.config.update('jax_enable_x64', True).",
        "mlx": "positions (float64), eps (float64); they stay NumPy arrays.",
    }
    assert [str(w.message) for w in caught] == [f"{tmp_path / 'f'}: {framework} would narrow {said[framework]}"]
    assert caught[0].filename == __file__


@pytest.mark.filterwarnings("error")
def test_jax_with_64_bits_loads_64_bit_arrays(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    arrays = {"positions": np.arange(3) / 3, "ids": np.array([2**40, -1]), "seeds": np.array([2**63], np.uint64)}
    save_safetensors(arrays, tmp_path / "f")
    with jax.enable_x64(True):
        loaded = load_safetensors(tmp_path / "f", framework="jax")
    for name, array in arrays.items():
        assert isinstance(loaded[name], jax.Array) and loaded[name].dtype == array.dtype and raw(loaded[name]) == raw(array)


def test_plain_elements_of_less_than_a_byte_are_refused_with_the_way_to_their_bytes(tmp_path: Path) -> None:
    with Writer(tmp_path / "f", {"q": ("F4", (2, 4))}) as w:
        w.write("q", b"abcd")
    with pytest.raises(breccia.UnsupportedError, match=r"tensor 'q' is F4.*Container\(path\).array\('q'\)"):
        load_safetensors(tmp_path / "f")
    assert Container(tmp_path / "f").array("q").tobytes() == b"abcd"


# ------------------------------------------------------------------------------------------------ hostile configs


def good() -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    """The config and entries of a valid tensor: 4 x 64, E4M3, blocks of 32."""
    entries, config = plan("w", (4, 64), breccia.Float8BlockScaling(block_k=32))
    assert config is not None
    return json.loads(config.to_json()), entries


def write(path: Path, config: Any, entries: Any, schema: str | None = "1") -> None:
    text = config if isinstance(config, str) else json.dumps(config)
    metadata = {"w.config": text, **({} if schema is None else {"schema": schema, "breccia_version": "0.2.0"})}
    with Writer(path, entries, metadata) as w:
        for name, e in w.entries.items():
            w.write(name, bytes(e.nbytes))


def changed(path: str, value: Any) -> dict[str, Any]:
    config, _ = good()
    *above, last = path.split("/")
    at = config
    for key in above:
        at = at[key]
    at[last] = value
    return config


def without(key: str) -> dict[str, Any]:
    config, _ = good()
    del config[key]
    return config


HOSTILE: dict[str, tuple[Any, str]] = {
    "not JSON": ("{", "its config is not JSON"),
    "too deep": ("[" * 100_000, "its config is not JSON"),
    "a list": ([], "its config is an object with recipe, layout, axis, shape, dtypes; found []"),
    **{f"no {key}": (without(key), "its config is an object with") for key in ("recipe", "layout", "axis", "shape", "dtypes")},
    "recipe a string": (changed("recipe", "fp8_block"), "its recipe is an object with a name and fields; found 'fp8_block'"),
    "unknown recipe": (
        changed("recipe/name", "blok"),
        "its recipe 'blok' is declared by no installed plug-in; did you mean 'fp8_block'",
    ),
    "unknown field": (changed("recipe/fields/block_q", 1), "recipe 'fp8_block' has no field 'block_q'; did you mean 'block_"),
    "field of another type": (changed("recipe/fields/block_k", "32"), "block_k must be int, got '32'"),
    "field that has no hash": (changed("recipe/fields/fp8_format", []), "its recipe cannot be read"),
    "fields a list": (changed("recipe/fields", []), "its recipe is an object with a name and fields"),
    "unknown layout": (
        changed("layout/name", "per_blok_k"),
        "its layout 'per_blok_k' is declared by no installed plug-in; did you mean 'per_block_k'",
    ),
    "layout of another block": (changed("layout/fields/block_size", 64), "scale.shape must be (4, 1), got (4, 2)"),
    "layout of another kind": (
        changed("layout", {"name": "per_tensor", "fields": {}}),
        "PerTensor requires a scalar scale",
    ),
    "axis 0": (changed("axis", 0), "its axis is -1 or -2; found 0"),
    "axis a bool": (changed("axis", True), "its axis is -1 or -2; found True"),
    "axis -2": (changed("axis", -2), "data.shape[-2]=4 must be divisible by block_size=32"),
    "shape of another size": (changed("shape", [4, 65]), "shape=(4, 65) needs data of shape (4, 65)"),
    "shape negative": (changed("shape", [-4, 64]), "its shape is a list of integers >= 0; found [-4, 64]"),
    "shape a string": (changed("shape", "4x64"), "its shape is a list of integers >= 0"),
    "shape of no axes": (
        changed("shape", []),
        "its shape is []; blocks along axis -1 under layout 'per_block_k' need at least 1 axes",
    ),
    "data of another codec": (
        changed("dtypes/data", "E5M2"),
        "has dtypes data E4M3, scale F32 or F16 or BF16; its config says",
    ),
    "scale of another codec": (changed("dtypes/scale", "E8M0"), "has dtypes data E4M3, scale F32 or F16 or BF16"),
    "scale not as stored": (changed("dtypes/scale", "F16"), "w.scale holds F32, stored as F16; the file has F32 there"),
    "dtypes a list": (changed("dtypes", []), "its config says []"),
}


@pytest.mark.parametrize("defect", HOSTILE)
def test_a_config_that_is_wrong_is_refused_naming_file_and_tensor(defect: str, tmp_path: Path) -> None:
    config, message = HOSTILE[defect]
    write(tmp_path / "f", config, good()[1])
    with pytest.raises(breccia.CorruptFileError) as refused:
        load_safetensors(tmp_path / "f")
    assert str(refused.value).startswith(f"{tmp_path / 'f'}: tensor 'w': ")
    assert message in str(refused.value)
    assert refused.value.__cause__ is not None
    assert refused.value.found["name"] == "w"


def test_an_undeclared_recipe_is_named_with_a_remedy(tmp_path: Path) -> None:
    write(tmp_path / "f", changed("recipe/name", "acme6"), good()[1])
    with pytest.raises(breccia.CorruptFileError) as refused:
        load_safetensors(tmp_path / "f")
    said = str(refused.value)
    assert said.startswith(f"{tmp_path / 'f'}: tensor 'w': its recipe 'acme6' is declared by no installed plug-in. Known: ")
    assert said.endswith("Install the plug-in that declares it; `breccia plugins` lists the installed and the disabled ones.")
    found = refused.value.found
    assert (found["undeclared"], found["name"], found["path"]) == ("acme6", "w", str(tmp_path / "f"))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"w.data": None}, "the file has no w.data; the file is incomplete"),
        ({"w.scale": None}, "the file has no w.scale"),
        ({"w.data": None, "w.scale": None}, "the file has no w.data"),
        ({"w.scale": ("F32", (4, 3))}, r"PerBlockK: scale.shape must be \(4, 2\), got \(4, 3\)"),
        ({"w.data": ("I8", (4, 64))}, "w.data holds E4M3, stored as U8 or F8_E4M3; the file has I8 there"),
        ({"w.data": ("F8_E5M2", (4, 64))}, "w.data holds E4M3, stored as U8 or F8_E4M3; the file has F8_E5M2 there"),
        ({"w.scale": ("F64", (4, 2))}, "w.scale holds F32, stored as F32; the file has F64 there"),
        ({"w.zero_point": ("U8", (4, 2))}, "has no zero_point; got one"),
        ({"w.zero_point": ("C64", (4, 2))}, "w.zero_point holds .*, stored as U8 or .* or BF16; the file has C64 there"),
        ({"w.zero_point": ("BOOL", (4, 2))}, "the file has BOOL there"),
        ({"w.zero_point": ("F64", (4, 2))}, "the file has F64 there"),
        ({"w.global_scale": ("F32", ())}, "has one scale level and no global_scale; got one"),
        ({"w": ("F32", (1,))}, "the file has both a scaled and a plain tensor of this name"),
    ],
)
def test_components_that_do_not_fit_their_config_are_refused(entries: Any, message: str, tmp_path: Path) -> None:
    config, there = good()
    write(tmp_path / "f", config, {name: e for name, e in {**there, **entries}.items() if e is not None})
    with pytest.raises(breccia.CorruptFileError, match=f"tensor 'w': .*{message}"):
        load_safetensors(tmp_path / "f")


def test_codes_stored_in_their_float8_dtype_are_read_as_well(tmp_path: Path) -> None:
    config, there = good()
    write(tmp_path / "f", config, {**there, "w.data": ("F8_E4M3", (4, 64))})
    assert load_safetensors(tmp_path / "f")["w"].data.dtype == np.uint8


def test_a_newer_schema_is_refused_with_what_this_version_reads(tmp_path: Path) -> None:
    write(tmp_path / "f", *good(), schema="2")
    with pytest.raises(breccia.CorruptFileError) as refused:
        load_safetensors(tmp_path / "f")
    for said in (f"{tmp_path / 'f'}: the file has schema '2'", "reads '1'", "upgrade breccia-bridges"):
        assert said in str(refused.value)


def test_unrelated_metadata_is_ignored(tmp_path: Path) -> None:
    with Writer(tmp_path / "f", {"b": ("F32", (2,))}, {"schema": "theirs"}) as w:
        w.write("b", bytes(8))
    with Writer(tmp_path / "g", {"b": ("F32", (2,))}, {"model.config": "not JSON"}) as w:
        w.write("b", bytes(8))
    for name in "fg":
        assert load_safetensors(tmp_path / name)["b"].tolist() == [0, 0]


@pytest.fixture(scope="module")
def whole_file() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        recipes = [
            breccia.NVFP4BlockScaling(),
            breccia.INT4Scaling(16, signed=False, symmetric=False),
            breccia.MXFP8BlockScaling(),
        ]
        save_safetensors({f"{i}": breccia.cast(X, r) for i, r in enumerate(recipes)}, Path(folder) / "f")
        return (Path(folder) / "f").read_bytes()


@pytest.mark.long
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_file_loads_or_is_refused_as_corrupt(flips: list[tuple[int, int]], whole_file: bytes, tmp_path: Path) -> None:
    damaged = bytearray(whole_file)
    for position, byte in flips:
        damaged[8 + position % (len(whole_file) - 8)] = byte
    path = tmp_path / "f"
    path.unlink(missing_ok=True)
    path.write_bytes(damaged)
    try:
        load_safetensors(path)
    except breccia.CorruptFileError as e:
        assert str(path) in str(e)
    except breccia.UnsupportedError as e:  # a flip that makes a plain tensor of 4 or 6 bits
        assert "one value per item" in str(e)


# ------------------------------------------------------------------------------------------------ files of breccia 0.1.3


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("source", ["numpy", "torch"])
def test_files_of_breccia_0_1_3_decode_to_what_it_decoded_itself(source: str, framework: str) -> None:
    converter(framework)
    loaded = load_safetensors(OLD / f"{source}.safetensors", framework=framework)
    expected = Container(OLD / f"{source}.expected.safetensors")
    assert {f"{name}.expected" for name in loaded} == set(expected.entries)
    assert len(loaded) == 14
    for name, tensor in loaded.items():
        assert tensor.shape == (4, 64)
        assert raw(breccia.dequantize(tensor)) == expected.array(f"{name}.expected").tobytes(), name


def test_recipes_of_breccia_0_1_3_are_read_with_the_same_meaning() -> None:
    loaded = load_safetensors(OLD / "torch.safetensors")
    found = {name: tensor.recipe for name, tensor in loaded.items()}
    assert found == {
        "delayed_e4m3": breccia.DelayedScaling(),
        "delayed_e5m2": breccia.DelayedScaling("E5M2", 4, 1),
        "current_e4m3": breccia.Float8CurrentScaling(),
        "current_e5m2": breccia.Float8CurrentScaling("E5M2"),
        "block_e4m3": breccia.Float8BlockScaling(block_k=32),
        "block_e5m2": breccia.Float8BlockScaling("E5M2", 32),
        "mxfp8_e4m3": breccia.MXFP8BlockScaling(),
        "mxfp8_e5m2": breccia.MXFP8BlockScaling("E5M2"),
        "nvfp4": breccia.NVFP4BlockScaling(two_level=False),
        "int4_fp16": breccia.INT4Scaling(32),
        "int4_bf16": breccia.INT4Scaling(32, scale_dtype="bf16"),
        "int4_fp32": breccia.INT4Scaling(32, scale_dtype="fp32"),
        "int4_unsigned": breccia.INT4Scaling(32, signed=False),
        "int4_asymmetric": breccia.INT4Scaling(32, signed=False, symmetric=False),
    }
    assert loaded["nvfp4"].data.shape == loaded["int4_fp16"].data.shape == (4, 32)
    assert loaded["int4_bf16"].scale.dtype == np.float32  # as that release stored it
    assert loaded["int4_asymmetric"].zero_point.dtype == np.float16


def test_old_codes_are_packed_with_the_even_index_in_the_low_nibble() -> None:
    codes = Container(OLD / "numpy.safetensors").array("nvfp4.data")
    packed = load_safetensors(OLD / "numpy.safetensors")["nvfp4"].data
    assert (packed & 15).tolist() == codes[:, 0::2].tolist()
    assert (packed >> 4).tolist() == codes[:, 1::2].tolist()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_old_file_saved_again_has_the_current_form(framework: str, tmp_path: Path) -> None:
    converter(framework)
    loaded = load_safetensors(OLD / "torch.safetensors", framework=framework)
    save_safetensors(loaded, tmp_path / "f")
    assert Container(tmp_path / "f").metadata["schema"] == "1"
    back = load_safetensors(tmp_path / "f", framework=framework)
    for name, tensor in loaded.items():
        assert_same(back[name], tensor)


def test_old_files_are_checked_too(tmp_path: Path) -> None:
    config = {
        "recipe": {"name": "int4", "fields": {"group_size": 4}},
        "layout": {"name": "per_block_k", "fields": {"block_size": 4}},
    }
    metadata = {"w.config": json.dumps(config)}

    def write_old(path: Path, codes: bytes, entries: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        with Writer(path, entries, metadata) as w:
            for name, e in w.entries.items():
                w.write(name, codes if name == "w.data" else bytes(e.nbytes))

    shapes: dict[str, tuple[str, tuple[int, ...]]] = {"w.data": ("U8", (1, 4)), "w.scale": ("F16", (1, 1))}
    write_old(tmp_path / "a", bytes([0, 15, 16, 1]), shapes)
    with pytest.raises(breccia.CorruptFileError, match="tensor 'w': its INT4 codes, one per byte, are 0 to 15; found 16"):
        load_safetensors(tmp_path / "a")
    write_old(tmp_path / "b", bytes(4), {"w.data": ("U8", (1, 4))})
    with pytest.raises(breccia.CorruptFileError, match=r"tensor 'w': .*the file has no w\.scale"):
        load_safetensors(tmp_path / "b")
    write_old(tmp_path / "c", bytes([1, 2, 3, 4]), shapes)
    assert load_safetensors(tmp_path / "c")["w"].data.tolist() == [[0x21, 0x43]]


def test_swapped_arguments_of_save_are_reported(tmp_path: Path) -> None:
    with pytest.raises(breccia.UnsupportedError, match=r"takes \(tensors, path\): a mapping of names first; got str"):
        save_safetensors(str(tmp_path / "x.safetensors"), {})  # type: ignore[arg-type]


def test_components_may_be_in_different_files_where_the_configs_are_about_the_checkpoint(tmp_path: Path) -> None:
    """As in shards that transformers writes, which are cut between any two tensors."""
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    scaled = breccia.cast(values, "nvfp4")
    metadata = safetensors_metadata({"w": scaled, "v": scaled})
    assert metadata["breccia_scope"] == "checkpoint"
    held = {part: a.view("u1") if part == "scale" else a for part, a in components(scaled).items()}
    parts = {f"{name}.{part}": a for name in "wv" for part, a in held.items()}
    save_file({"w.data": parts["w.data"], "v.data": parts["v.data"]}, tmp_path / "a.safetensors", metadata)
    rest = {n: a for n, a in parts.items() if not n.endswith("data")}
    save_file(rest, tmp_path / "b.safetensors", metadata)
    save_file({"plain": np.ones(3, np.float32)}, tmp_path / "c.safetensors", metadata)
    found = load_safetensors(tmp_path)
    assert set(found) == {"w", "v", "plain"}
    assert breccia.bytes_equal(found["w"], scaled) and breccia.bytes_equal(found["v"], scaled)
    assert set(load_safetensors(tmp_path / "c.safetensors")) == {"plain"}
    rows = {row["name"]: row for row in inspected(tmp_path).rows}
    assert rows["w"]["file"] == "a.safetensors, b.safetensors" and rows["w"]["bytes"] == scaled.nbytes
    assert rows["plain"]["file"] == "c.safetensors" and set(rows) == {"w", "v", "plain"}
    save_file({"w": values}, tmp_path.with_suffix(".safetensors"))
    (measured,) = compare(tmp_path.with_suffix(".safetensors"), tmp_path).tensors
    assert measured.fidelity == breccia.metrics(values, scaled)
    report = convert(tmp_path, tmp_path.with_suffix(".out"), "none")
    assert {t.name for t in report.codes_kept} == {"w", "v"}
    again = load_safetensors(tmp_path.with_suffix(".out"))
    assert breccia.bytes_equal(again["w"], scaled) and breccia.bytes_equal(again["v"], scaled)
    message = r"a\.safetensors: tensor '[wv]': it has a config, but the file has no .\.scale"
    with pytest.raises(breccia.CorruptFileError, match=message):
        load_safetensors(tmp_path / "a.safetensors")
    save_file({"w.data": parts["w.data"]}, tmp_path / "d.safetensors", metadata)
    with pytest.raises(breccia.CorruptFileError, match=r"tensor 'w\.data' is in both a\.safetensors and d\.safetensors of"):
        load_safetensors(tmp_path)


def test_files_whose_configs_contradict_each_other_are_refused(tmp_path: Path) -> None:
    """As where one shard of a new version of a checkpoint was not downloaded: its scales would be read as of another format."""
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    for file, part, spec in (("a", "data", "mxfp8"), ("b", "scale", "mxfp8,fp8_format=E5M2")):
        scaled = breccia.cast(values, spec)
        held = {f"w.{part}": getattr(scaled, part).view("u1")}
        save_file(held, tmp_path / f"{file}.safetensors", safetensors_metadata({"w": scaled}))
    message = (
        r"a\.safetensors and b\.safetensors have different metadata 'w\.config', so that they are of different checkpoints"
    )
    for read in (load_safetensors, inspected, lambda path: compare(path, path)):
        with pytest.raises(breccia.CorruptFileError, match=message):
            read(tmp_path)


def test_a_tensor_that_two_files_hold_is_refused(tmp_path: Path) -> None:
    scaled = breccia.cast(np.ones((4, 64), np.float32), "nvfp4")
    save_safetensors({"w": scaled}, tmp_path / "a.safetensors")
    save_safetensors({"w": np.ones((4, 64), np.float32)}, tmp_path / "b.safetensors")
    with pytest.raises(
        breccia.CorruptFileError, match=r"tensor 'w' is in both a\.safetensors and b\.safetensors of .*; pass one"
    ):
        load_safetensors(tmp_path)
