"""FP8 codes of AMD MI300 (FNUZ) and UE5M3 scales in files and in other libraries: as they are, or refused, never as OCP's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dialect_folders import PLAIN, Tensor, decoded, folder, numbers, quantized, values

import breccia
from breccia import DialectError, ScaledTensor
from breccia.backend import CODECS
from breccia.bridges import convert, from_dlpack, load_safetensors, save_safetensors, to_dlpack

UP = "model.layers.0.mlp.up_proj"
FNUZ = {"F8_E4M3FNUZ": "E4M3FNUZ", "F8_E5M2FNUZ": "E5M2FNUZ"}
SPECS = [
    "fp8_current,fp8_format=E4M3FNUZ",
    "fp8_row,fp8_format=E5M2FNUZ",
    "fp8_block,fp8_format=E4M3FNUZ,block_m=128",
    "nvfp4,scale_format=UE5M3",
]
X = np.random.default_rng(0).standard_normal((128, 256)).astype(np.float32)


def codes(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """All codes but NaN, of both signs."""
    return dtype, np.resize(np.delete(np.arange(256, dtype=np.uint8), 0x80), shape)


def read(path: Path, weight: Tensor, end: str, scale: Tensor, config: Any) -> Any:
    (stored,) = values(folder(path, PLAIN | {f"{UP}.weight": weight, f"{UP}.{end}": scale}, config)).values()
    return stored


# -- checkpoints of other programs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FNUZ)
@pytest.mark.parametrize(
    ("end", "scale", "spec"),
    [
        ("weight_scale_inv", np.array([[0.5, 3.0], [0.25, 0.1]]), "fp8_block,block_m=128"),
        ("weight_scale", np.linspace(0.1, 2, 200)[:, None], "fp8_row"),
        ("weight_scale", np.array(0.37), "fp8_current"),
    ],
)
def test_checkpoints_are_read_exactly(dtype: str, end: str, scale: np.ndarray, spec: str, tmp_path: Path) -> None:
    weight, scales = codes(dtype, (200, 256)), ("F32", scale.astype(np.float32))
    stored = read(tmp_path, weight, end, scales, quantized("fp8"))
    assert stored.form.recipe == breccia.recipe(spec, fp8_format=FNUZ[dtype])
    each = scales[1] if end == "weight_scale" else scales[1].repeat(128, 0)[:200].repeat(128, 1)
    np.testing.assert_array_equal(decoded(stored), numbers(weight) * each)


@pytest.mark.parametrize("dtype", FNUZ)
def test_powers_of_two_of_32_codes_are_no_mx_and_read_as_blocks(dtype: str, tmp_path: Path) -> None:
    weight, scale = codes(dtype, (4, 64)), ("F8_E8M0", np.array([[120, 127]] * 4, np.uint8))
    stored = read(tmp_path, weight, "weight_scale_inv", scale, quantized("fp8"))
    assert stored.form.recipe == breccia.Float8BlockScaling(FNUZ[dtype], block_k=32, power_of_two_scale=True)
    np.testing.assert_array_equal(decoded(stored), numbers(weight) * np.array([2.0**-7, 1.0]).repeat(32))


def test_convert_keeps_the_codes_that_it_reads(tmp_path: Path) -> None:
    weight, scale = codes("F8_E4M3FNUZ", (4, 64)), ("F32", np.full((4, 1), 0.37, np.float32))
    source = folder(tmp_path, {f"{UP}.weight": weight, f"{UP}.weight_scale": scale}, quantized("fp8"))
    convert(source, tmp_path / "ours", "none")
    (ours,) = (tmp_path / "ours").glob("*.safetensors")
    st = load_safetensors(ours)[f"{UP}.weight"]
    assert isinstance(st, ScaledTensor) and st.recipe == breccia.Float8RowScaling("E4M3FNUZ")
    np.testing.assert_array_equal(np.asarray(st.data), weight[1])
    np.testing.assert_array_equal(np.asarray(st.scale), scale[1])


# -- files and buffers -------------------------------------------------------------------------------------------------


def arrays(framework: str) -> Any:
    if framework == "jax":
        return pytest.importorskip("jax").numpy.asarray(X)
    if framework == "torch":
        return pytest.importorskip("torch").from_numpy(X)
    return pytest.importorskip("mlx.core").array(X) if framework == "mlx" else X


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "mlx"])
def test_tensors_of_every_framework_come_back_from_files_and_dlpack(framework: str, spec: str, tmp_path: Path) -> None:
    st, expected = breccia.cast(arrays(framework), spec), breccia.cast(X, spec)
    assert breccia.bytes_equal(st, expected)
    save_safetensors({"w": st}, tmp_path / "w.safetensors")
    for reader in {"numpy", framework}:
        loaded = load_safetensors(tmp_path / "w.safetensors", framework=reader)["w"]
        assert isinstance(loaded, ScaledTensor) and breccia.bytes_equal(loaded, expected)
        assert type(loaded.data) is type(breccia.cast(arrays(reader), spec).data)
    for target in ("numpy", "torch"):
        moved = from_dlpack(to_dlpack(st), target)
        assert moved.recipe == st.recipe and breccia.bytes_equal(moved, expected)


@pytest.mark.parametrize("given", ["F8_E4M3", "F8_E5M2FNUZ"])
def test_files_with_codes_of_another_kind_than_their_config_says_are_refused(given: str, tmp_path: Path) -> None:
    st = breccia.cast(X, "fp8_row,fp8_format=E4M3FNUZ")
    path = tmp_path / "w.safetensors"
    save_safetensors({"w": st}, path)
    stored = path.read_bytes()
    for dtype in ("U8", "F8_E4M3FNUZ"):
        path.write_bytes(renamed(stored, dtype))
        loaded = load_safetensors(path)["w"]
        assert isinstance(loaded, ScaledTensor) and breccia.bytes_equal(loaded, st)
    path.write_bytes(renamed(stored, given))
    with pytest.raises(breccia.BrecciaError, match=given):
        load_safetensors(path)


def renamed(file: bytes, dtype: str) -> bytes:
    """A file with another dtype of the codes "w.data" in its header."""
    size = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + size])
    header["w.data"]["dtype"] = dtype
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + file[8 + size :]


@pytest.mark.parametrize(
    ("wanted", "given"), [("E4M3FNUZ", "E4M3"), ("E4M3", "E4M3FNUZ"), ("E5M2", "E5M2FNUZ"), ("E5M2FNUZ", "E5M2")]
)
@pytest.mark.parametrize("framework", ["torch", "jax", "numpy"])
def test_codes_of_one_kind_are_no_codes_of_the_other(framework: str, wanted: str, given: str) -> None:
    recipe, dtypes = breccia.Float8RowScaling(wanted), {codec.name: str(codec.dtype) for codec in CODECS}
    dtype = dtypes[given]
    if framework == "torch":
        torch = pytest.importorskip("torch")
        data, scale = torch.zeros(2, 4, dtype=getattr(torch, dtype)), torch.ones(2, 1)
    elif framework == "jax":
        jnp = pytest.importorskip("jax").numpy
        data, scale = jnp.zeros((2, 4), dtype), jnp.ones((2, 1))
    else:
        data, scale = np.zeros((2, 4), getattr(ml_dtypes, dtype)), np.ones((2, 1), np.float32)
    with pytest.raises(breccia.UnsupportedError) as e:
        breccia.from_buffer(data, scale, recipe, recipe.layout)
    assert str(e.value) == (
        f"data must hold {wanted} as {dtypes[wanted]} or uint8; got dtype {dtype}. Those are codes of {given}, which stand for "
        f"other numbers: pass a recipe of {given}, and breccia.requantize to {wanted} if it is wanted."
    )


# -- tensors of other libraries ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS[:3])
def test_torchao_tensors_keep_codes_and_scales(spec: str) -> None:
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("torchao")
    st = breccia.cast(torch.from_numpy(X), spec)
    tensor = breccia.bridges.to_torchao(st)
    assert tensor.qdata.dtype == getattr(torch, str(st.recipe.format.element.dtype))
    back = breccia.bridges.from_torchao(tensor)
    assert back.recipe.format == st.recipe.format and breccia.bytes_equal(breccia.bridges.from_torchao(tensor, st.recipe), st)
    np.testing.assert_array_equal(tensor.dequantize().float().numpy(), breccia.dequantize(st).numpy())


@pytest.mark.parametrize("spec", SPECS[:2])
def test_qwix_arrays_keep_codes_and_scales(spec: str) -> None:
    pytest.importorskip("qwix")
    st = breccia.cast(arrays("jax"), spec)
    array = breccia.bridges.to_qwix(st)
    assert str(array.qvalue.dtype) == st.recipe.format.element.dtype
    assert breccia.bytes_equal(breccia.bridges.from_qwix(array, st.recipe), st)


def test_deepseek_buffers_keep_codes_and_are_read_in_their_format() -> None:
    st = breccia.cast(X, "fp8_block,fp8_format=E4M3FNUZ,block_m=128")
    back = breccia.bridges.from_deepseek_v3(*breccia.bridges.to_deepseek_v3(st), fp8_format="E4M3FNUZ")
    assert breccia.bytes_equal(back, st)


@pytest.mark.parametrize(
    ("bridge", "framework", "module", "specs"),
    [
        ("to_torchao", "torch", "torchao", SPECS[3:]),
        ("to_compressed_tensors", "torch", "compressed_tensors", [*SPECS, "nvfp4,scale_format=UE5M3,global_sense=divisor"]),
        ("to_mlx", "mlx", "mlx", [*SPECS, "nvfp4,scale_format=UE5M3,two_level=false"]),
        ("to_qwix", "jax", "qwix", [*SPECS[3:], "nvfp4,scale_format=UE5M3,two_level=false"]),
    ],
)
def test_libraries_that_have_no_such_format_are_not_given_its_bytes(
    bridge: str, framework: str, module: str, specs: list[str]
) -> None:
    pytest.importorskip(module)
    for spec in specs:
        with pytest.raises(DialectError, match=r"[Tt]his tensor is .*(FNUZ|UE5M3)"):
            getattr(breccia.bridges, bridge)(breccia.cast(arrays(framework), spec))
