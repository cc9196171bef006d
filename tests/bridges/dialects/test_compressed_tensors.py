"""Checkpoints of compressed-tensors, packed here by their documentation, are read exactly; what cannot be read is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from stored_folders import RNG, Entry, decoded, floats, folder, fp4, fp8, refusal, spread, values

import breccia
from breccia import CorruptFileError, DialectError, PerGroupIndex, UnsupportedError
from breccia.backend import NUMPY, unpack
from breccia.internal import packed_length

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def words(codes: np.ndarray, bits: int) -> Entry:
    """Unsigned codes (..., K) as int32 words: one large number per row, code i at bit i * bits."""
    rows = codes.reshape(-1, codes.shape[-1])
    size = -(-codes.shape[-1] * bits // 32) * 4
    numbers = [sum(int(code) << bits * i for i, code in enumerate(row)) for row in rows]
    packed = b"".join(number.to_bytes(size, "little") for number in numbers)
    return "I32", np.frombuffer(packed, np.int32).reshape(*codes.shape[:-1], -1)


def shape_of(*shape: int, dtype: Any = np.int64) -> Entry:
    return ("I64" if dtype is np.int64 else "I32"), np.array(shape, dtype)


def group(targets: list[str] | None = None, format: str | None = None, **weights: Any) -> dict[str, Any]:
    return {"targets": targets or ["Linear"], "weights": weights or None, "format": format, "input_activations": None}


def config(*groups: dict[str, Any], ignore: list[str] | None = None, format: str = "mixed-precision") -> dict[str, Any]:
    listed = {f"group_{i}": one for i, one in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": listed,
        "ignore": ignore or ["lm_head"],
        "format": format,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }


def integers(bits: int = 4, group_size: int | None = 16, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    strategy = "channel" if group_size is None else "group"
    settings = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group_size}
    return settings | {"dynamic": False, **more}


def real(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, **more}


def packed(
    name: str, n: int, k: int, bits: int = 4, group_size: int | None = 16, zero: bool = False, dtype: str = "BF16"
) -> tuple[dict[str, Entry], np.ndarray]:
    """The tensors of a pack-quantized weight, and its values."""
    half, size = 1 << bits - 1, group_size or k
    groups = -(-k // size)
    codes = RNG.integers(-half, half, (n, k))
    scale, s = floats(dtype, n, groups)
    tensors = {
        f"{name}.weight_packed": words(codes + half, bits),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": shape_of(n, k),
    }
    z = np.zeros((n, groups), int)
    if zero:
        z = RNG.integers(-half, half, (n, groups))
        dtype_of_words, stored = words(z.T + half, bits)
        tensors[f"{name}.weight_zero_point"] = (dtype_of_words, np.ascontiguousarray(stored.T))
    return tensors, (codes - spread(z, 1, size, (n, k))).astype(np.float32) * spread(s, 1, size, (n, k))


PLAIN: dict[str, Entry] = {
    "lm_head.weight": floats("BF16", 4, 8)[0],
    "model.norm.weight": floats("BF16", 8)[0],
    f"{UP}.input_scale": floats("BF16", 1)[0],
}


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "bits", "size"),
    [
        *((6, 64, 4, 16), (6, 40, 8, 8), (5, 36, 4, None), (3, 7, 4, None), (5, 33, 8, 16), (4, 50, 4, 16)),
        *((5, 64, 2, 16), (3, 50, 2, None), (6, 64, 3, 16), (5, 5, 3, None), (3, 42, 3, 12)),
        *((7, 64, 5, 16), (3, 5, 5, None), (4, 33, 6, 16), (5, 64, 7, 32), (3, 9, 7, None)),
    ],
)
def test_packed_integers_are_read_exactly(
    n: int, k: int, bits: int, size: int | None, zero: bool, dtype: str, tmp_path: Path
) -> None:
    tensors, x = packed(UP, n, k, bits, size, zero, dtype)
    settings = config(group(format="pack-quantized", **integers(bits, size, not zero)))
    listed = values(folder(tmp_path, PLAIN | tensors, settings))
    assert list(listed) == [f"{UP}.weight"]
    assert np.array_equal(decoded(listed[f"{UP}.weight"]), x)
    recipe: Any = listed[f"{UP}.weight"].form.recipe
    names = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
    assert (recipe.bits, recipe.scale_dtype, recipe.symmetric) == (bits, names[dtype], not zero)
    assert recipe.name == (f"int{bits}" if bits in (4, 8) else "int")
    st = listed[f"{UP}.weight"].tensor()
    assert st.data.shape == (n, packed_length(recipe.format.element, k)), "as many bits as in the file"
    assert not unpack(NUMPY, st.data, recipe.format.element, k + st.padding)[:, k:].any(), "padding is zero"


def test_scales_keep_the_bits_that_the_file_has(tmp_path: Path) -> None:
    tensors, _ = packed(UP, 4, 32)
    st = values(folder(tmp_path, tensors, config(group(**integers()))))[f"{UP}.weight"].tensor()
    assert np.array_equal(st.scale, tensors[f"{UP}.weight_scale"][1])


def test_what_follows_an_odd_row_is_zero_in_the_tensor(tmp_path: Path) -> None:
    tensors, _ = packed(UP, 2, 7, 4, None)
    st = values(folder(tmp_path, tensors, config(group(**integers(4, None)))))[f"{UP}.weight"].tensor()
    assert not (np.asarray(st.data)[:, -1] >> 4).any()


@pytest.mark.parametrize("zero", [False, True])
def test_packed_integers_need_no_config(zero: bool, tmp_path: Path) -> None:
    tensors, x = packed(UP, 6, 64, zero=zero)
    assert np.array_equal(decoded(values(folder(tmp_path, tensors))[f"{UP}.weight"]), x)


def test_experts_one_per_name_as_kimi_has_them(tmp_path: Path) -> None:
    """INT4 in groups of 32, the rest ignored by patterns; shapes are I32."""
    names = [f"language_model.model.layers.1.mlp.experts.{i}.{p}_proj" for i in range(3) for p in ("gate", "up", "down")]
    tensors, x = dict[str, Entry](), dict[str, np.ndarray]()
    for name in names:
        own, x[f"{name}.weight"] = packed(name, 4, 64, 4, 32)
        tensors |= own | {f"{name}.weight_shape": shape_of(4, 64, dtype=np.int32)}
    tensors["language_model.model.layers.1.mlp.shared_experts.up_proj.weight"] = floats("BF16", 4, 8)[0]
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    settings = config(group(**integers(4, 32)), ignore=ignore, format="pack-quantized")
    listed = values(folder(tmp_path, tensors, None, config={"text_config": {"quantization_config": settings}}))
    assert list(listed) == list(x) and all(np.array_equal(decoded(listed[name]), x[name]) for name in x)


def test_matrices_of_several_experts_in_one_tensor(tmp_path: Path) -> None:
    codes, z = RNG.integers(0, 16, (2, 5, 32)), RNG.integers(0, 16, (2, 5, 2))
    scale, s = floats("F32", 2, 5, 2)
    dtype, stored = words(np.swapaxes(z, -1, -2), 4)
    tensors = {
        f"{UP}.weight_packed": words(codes, 4),
        f"{UP}.weight_scale": scale,
        f"{UP}.weight_shape": shape_of(2, 5, 32),
        f"{UP}.weight_zero_point": (dtype, np.ascontiguousarray(np.swapaxes(stored, -1, -2))),
    }
    listed = values(folder(tmp_path, tensors, config(group(**integers(symmetric=False)))))
    x = (codes - np.repeat(z, 16, -1)).astype(np.float32) * np.repeat(s, 16, -1)
    assert np.array_equal(decoded(listed[f"{UP}.weight"]), x)


def test_groups_by_index_of_columns(tmp_path: Path) -> None:
    tensors, _ = packed(UP, 4, 64)
    index = RNG.permutation(np.arange(64) // 16).astype(np.int32)
    tensors[f"{UP}.weight_g_idx"] = ("I32", index)
    settings = config(group(**integers(actorder="group")), format="pack-quantized")
    stored = values(folder(tmp_path, tensors, settings))[f"{UP}.weight"]
    assert stored.form.layout == PerGroupIndex(tuple(index.tolist()), 4)
    bits = tensors[f"{UP}.weight_packed"][1].view(np.uint8)
    codes = np.stack([bits & 15, bits >> 4], -1).reshape(4, 64).astype(int) - 8
    scale = tensors[f"{UP}.weight_scale"][1].view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(decoded(stored), codes * scale[:, index])


@pytest.mark.parametrize("k", [64, 16])
def test_an_index_that_is_minus_one_or_of_one_group_leaves_columns_in_order(k: int, tmp_path: Path) -> None:
    tensors, x = packed(UP, 4, k)
    tensors[f"{UP}.weight_g_idx"] = ("I32", np.full(k, -1 if k == 64 else 0, np.int32))
    stored = values(folder(tmp_path, tensors, config(group(**integers()))))[f"{UP}.weight"]
    assert stored.form.layout is None and np.array_equal(decoded(stored), x)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized"])
def test_integers_in_bytes(form: str, zero: bool, strategy: str, tmp_path: Path) -> None:
    n, k = 5, 24
    shape = {"tensor": (1,), "channel": (n, 1), "group": (n, 3)}[strategy]
    codes = RNG.integers(-128, 128, (n, k)).astype(np.int8)
    scale, s = floats("BF16", *shape)
    tensors = PLAIN | {f"{UP}.weight": ("I8", codes), f"{UP}.weight_scale": scale}
    z = np.zeros(shape, np.int8)
    if zero:
        z = RNG.integers(-128, 128, shape).astype(np.int8)
        tensors[f"{UP}.weight_zero_point"] = ("I8", z)
    settings = integers(8, 8 if strategy == "group" else None, not zero) | {"strategy": strategy}
    listed = values(folder(tmp_path, tensors, config(group(format=form, **settings))))
    s, z = (spread(np.broadcast_to(part.reshape(-1, shape[-1]), (n, shape[-1])), 1, k // shape[-1], (n, k)) for part in (s, z))
    assert list(listed) == [f"{UP}.weight"]
    assert np.array_equal(decoded(listed[f"{UP}.weight"]), (codes.astype(np.float32) - z) * s)


def test_four_bits_in_bytes_and_a_tensor_scale_of_packed_ones(tmp_path: Path) -> None:
    codes, (scale, s) = RNG.integers(-8, 8, (4, 16)).astype(np.int8), floats("F16", 4, 2)
    one, s1 = floats("F16", 1)
    tensors = {
        f"{UP}.weight": ("I8", codes),
        f"{UP}.weight_scale": scale,
        f"{DOWN}.weight_packed": words(codes + 8, 4),
        f"{DOWN}.weight_scale": one,
        f"{DOWN}.weight_shape": shape_of(4, 16),
        f"{DOWN}.weight_zero_point": ("I8", np.array([-3], np.int8)),
    }
    settings = config(group([UP], **integers(4, 8)), group([DOWN], **integers(4, None, False) | {"strategy": "tensor"}))
    listed = values(folder(tmp_path, tensors, settings))
    assert np.array_equal(decoded(listed[f"{UP}.weight"]), codes * np.repeat(s, 8, 1))
    assert np.array_equal(decoded(listed[f"{DOWN}.weight"]), (codes + 3).astype(np.float32) * s1)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize(
    ("settings", "shape", "rows", "columns", "name"),
    [
        (real(8, "tensor"), (1,), 20, 40, "fp8_current"),
        (real(8, "channel"), (20, 1), 1, 40, "fp8_row"),
        (real(8, "block", block_structure=[8, 16]), (3, 3), 8, 16, "fp8_block"),
        (real(8, "block", block_structure="8x16"), (3, 3), 8, 16, "fp8_block"),
        (real(8, "group", group_size=8), (20, 5), 1, 8, "fp8_block"),
    ],
)
@pytest.mark.parametrize("form", ["float-quantized", "naive-quantized"])
def test_fp8(
    form: str, settings: Any, shape: tuple[int, ...], rows: int, columns: int, name: str, dtype: str, tmp_path: Path
) -> None:
    (codes, q), (scale, s) = fp8(20, 40), floats(dtype, *shape)
    tensors = PLAIN | {f"{UP}.weight": codes, f"{UP}.weight_scale": scale}
    listed = values(folder(tmp_path, tensors, config(group(format=form, **settings))))
    assert list(listed) == [f"{UP}.weight"]
    assert np.array_equal(decoded(listed[f"{UP}.weight"]), q * spread(s.reshape(-1, shape[-1]), rows, columns, (20, 40)))
    assert listed[f"{UP}.weight"].form.recipe.name == name


@pytest.mark.parametrize("dtype", ["U8", "F8_E8M0"])
def test_mxfp8(dtype: str, tmp_path: Path) -> None:
    (codes, q), (scale, s) = fp8(6, 64), floats(dtype, 6, 2)
    tensors = {f"{UP}.weight": codes, f"{UP}.weight_scale": scale}
    listed = values(folder(tmp_path, tensors, config(group(format="mxfp8-quantized", **real(8, "group", group_size=32)))))
    assert np.array_equal(decoded(listed[f"{UP}.weight"]), q * np.repeat(s, 32, 1))
    assert listed[f"{UP}.weight"].form.recipe == breccia.MXFP8BlockScaling()


@pytest.mark.parametrize("with_config", [True, False])
def test_mxfp4_and_mxfp6(with_config: bool, tmp_path: Path) -> None:
    (data, q), (scale, s) = fp4(6, 64), floats("U8", 6, 2)
    six = RNG.integers(0, 64, (6, 64))
    numbers = six.reshape(6, 16, 4) @ (1 << np.array([0, 6, 12, 18]))
    bytes_ = np.stack([numbers & 255, numbers >> 8 & 255, numbers >> 16], -1).astype(np.uint8).reshape(6, 48)
    tensors = {
        f"{UP}.weight_packed": ("U8", data),
        f"{UP}.weight_scale": scale,
        f"{DOWN}.weight_packed": ("U8", bytes_),
        f"{DOWN}.weight_scale": scale,
    }
    settings = config(
        group([UP], "mxfp4-pack-quantized", **real(4, "group", group_size=32)),
        group([DOWN], "mxfp6-pack-quantized", **real(6, "group", group_size=32)),
    )
    listed = values(folder(tmp_path, tensors, settings if with_config else None))
    assert np.array_equal(decoded(listed[f"{UP}.weight"]), q * np.repeat(s, 32, 1))
    e2m3 = six.astype(np.uint8).view(ml_dtypes.float6_e2m3fn).astype(np.float32)
    assert np.array_equal(decoded(listed[f"{DOWN}.weight"]), e2m3 * np.repeat(s, 32, 1))
    assert [stored.form.recipe.name for stored in listed.values()] == ["mxfp4", "mxfp6"]


def nvfp4(name: str, n: int, k: int) -> tuple[dict[str, Entry], np.ndarray]:
    (data, q), e4m3 = fp4(n, k), RNG.uniform(1, 400, (n, k // 16)).astype(ml_dtypes.float8_e4m3fn)
    divisor = np.array([RNG.uniform(100, 2000)], np.float32)
    tensors = {
        f"{name}.weight_packed": ("U8", data),
        f"{name}.weight_scale": ("F8_E4M3", e4m3.view(np.uint8)),
        f"{name}.weight_global_scale": ("F32", divisor),
        f"{name}.input_global_scale": ("F32", divisor),
    }
    return tensors, q * np.repeat(e4m3.astype(np.float32), 16, 1) / divisor


NVFP4 = real(4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")


@pytest.mark.parametrize("settings", [config(group(format="nvfp4-pack-quantized", **NVFP4)), None])
def test_nvfp4_is_divided_by_its_global_scale(settings: Any, tmp_path: Path) -> None:
    tensors, x = nvfp4(UP, 6, 64)
    stored = values(folder(tmp_path, tensors, settings))[f"{UP}.weight"]
    st = stored.tensor()
    assert st.recipe == breccia.NVFP4BlockScaling(global_sense="divisor")
    assert np.array_equal(st.data, tensors[f"{UP}.weight_packed"][1])
    assert np.array_equal(st.scale, tensors[f"{UP}.weight_scale"][1])
    # The library divides scales by the global scale; the contract divides in another order: one unit in the last place.
    np.testing.assert_allclose(decoded(stored), x, rtol=2**-22)


def test_nvfp4_of_one_level(tmp_path: Path) -> None:
    tensors, x = nvfp4(UP, 6, 64)
    divisor = tensors.pop(f"{UP}.weight_global_scale")[1]
    settings = config(group(format="nvfp4-pack-quantized", **real(4, "group", group_size=16)))
    stored = values(folder(tmp_path, tensors, settings))[f"{UP}.weight"]
    np.testing.assert_allclose(decoded(stored), x * divisor, rtol=2**-22)
    assert stored.form.recipe == breccia.NVFP4BlockScaling(two_level=False)


def test_groups_of_one_config_by_name_pattern_and_class(tmp_path: Path) -> None:
    """Each target is more specific than the next; names that another one ignores keep their plain weights."""
    names = [f"model.layers.{i}.mlp.up_proj" for i in range(5)]
    int4, x0 = packed(names[0], 4, 64)
    asym, x1 = packed(names[1], 4, 64, zero=True)
    nv, x2 = nvfp4(names[2], 4, 64)
    (codes, q), (scale, s) = fp8(4, 64), floats("BF16", 4, 1)
    (codes4, q4), (scale4, s4) = fp8(4, 64), floats("U8", 4, 2)
    tensors = PLAIN | int4 | asym | nv | {f"{names[3]}.weight": codes, f"{names[3]}.weight_scale": scale}
    tensors |= {f"{names[4]}.weight": codes4, f"{names[4]}.weight_scale": scale4, "head.up_proj.weight": floats("F32", 4, 8)[0]}
    settings = config(
        group(["Linear"], "nvfp4-pack-quantized", **NVFP4),
        group([r"re:.*layers\.[13]\..*"], "float-quantized", **real(8, "channel")),
        group([names[1]], "pack-quantized", **integers(symmetric=False)),
        group([names[0]], "pack-quantized", **integers()),
        group(["re:model.layers.4"], "mxfp8-quantized", **real(8, "group", group_size=32)),
        group(["re:.*attn.*"], None),
        ignore=["lm_head", "re:head.*", "re:vision"],
        format="int-quantized",
    )
    listed = values(folder(tmp_path, tensors, settings))
    assert [stored.form.recipe.name for stored in listed.values()] == ["int4", "int4", "nvfp4", "fp8_row", "mxfp8"]
    assert sorted(listed) == sorted(f"{name}.weight" for name in names)
    for i, x in enumerate((x0, x1, x2, q * s, q4 * np.repeat(s4, 32, 1))):
        np.testing.assert_allclose(decoded(listed[f"{names[i]}.weight"]), x, rtol=2**-22 if i == 2 else 0)


def test_classes_of_two_groups_are_told_apart_by_the_tensors(tmp_path: Path) -> None:
    int4, x = packed(UP, 4, 64)
    (codes, q), (scale, s) = fp8(4, 64), floats("BF16", 4, 1)
    tensors = int4 | {"model.embed_tokens.weight": codes, "model.embed_tokens.weight_scale": scale}
    settings = config(group(["Linear"], **integers()), group(["Embedding"], **real(8, "channel")))
    listed = values(folder(tmp_path, tensors, settings))
    assert np.array_equal(decoded(listed[f"{UP}.weight"]), x)
    assert np.array_equal(decoded(listed["model.embed_tokens.weight"]), q * s)


def test_two_groups_that_both_fit_are_refused(tmp_path: Path) -> None:
    tensors, _ = packed(UP, 4, 48, 4, 16)  # three groups of 16, of 20 or of 23
    settings = config(group(["Linear"], **integers(4, 16)), group(["Embedding"], **integers(4, 20)))
    stored = values(folder(tmp_path, tensors, settings))[f"{UP}.weight"]
    with pytest.raises(DialectError, match=r"both config_groups\['group_0'\] and config_groups\['group_1'\] may be its scheme"):
        stored.tensor()


def test_fp8_without_a_config_is_read_as_any_librarys(tmp_path: Path) -> None:
    """Its tensors are those of several dialects, which read them alike: none is a second reading."""
    (codes, q), (scale, s) = fp8(20, 40), floats("BF16", 20, 1)
    path = folder(tmp_path, {f"{UP}.weight": codes, f"{UP}.weight_scale": scale})
    for name, dialect in ((None, "fp8_scale"), ("compressed_tensors", "compressed_tensors")):
        stored = values(path, name)[f"{UP}.weight"]
        assert stored.dialect.name == dialect and np.array_equal(decoded(stored), q * s)


def changed(tensors: dict[str, Entry], end: str, dtype: str, array: Any) -> dict[str, Entry]:
    return tensors | {f"{UP}.{end}": (dtype, np.asarray(array))}


INT4 = packed(UP, 8, 64)[0]
ASYM = packed(UP, 8, 64, zero=True)[0]
FP4 = nvfp4(UP, 4, 64)[0]
BYTES: dict[str, Entry] = {f"{UP}.weight": ("I8", np.full((4, 8), 9, np.int8)), f"{UP}.weight_scale": floats("F32", 4, 1)[0]}
FP8: dict[str, Entry] = {f"{UP}.weight": fp8(4, 64)[0], f"{UP}.weight_scale": floats("BF16", 4, 1)[0]}
MX: dict[str, Entry] = {f"{UP}.weight_packed": ("U8", fp4(4, 64)[0]), f"{UP}.weight_scale": floats("U8", 4, 2)[0]}


def without(tensors: dict[str, Entry], end: str) -> dict[str, Entry]:
    return {name: entry for name, entry in tensors.items() if name != f"{UP}.{end}"}


def nan(tensors: dict[str, Entry], end: str, bits: int) -> dict[str, Entry]:
    dtype, array = tensors[f"{UP}.{end}"]
    array = array.copy()
    array.view(f"u{array.itemsize}").reshape(-1)[1 % array.size] = bits
    return tensors | {f"{UP}.{end}": (dtype, array)}


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        # Settings that contradict the tensors.
        (INT4, group(format="float-quantized", **integers()), "pack-quantized, but config_groups['group_0'] has format"),
        (INT4, group(**real(4, "group", group_size=16)), "has type 'float', not 'int'"),
        (INT4, group(**integers(8)), "'weight_packed' has shape [8, 8]; its other parts need [8, 16]"),
        (INT4, group(**integers(4, 32)), "'weight_scale' has shape [8, 4]; its other parts need [8, 2]"),
        (INT4, group(**integers(4, None)), "'weight_scale' has shape [8, 4]; its other parts need [8, 1]"),
        (INT4, group(**integers(4, 16, False)), "without 'weight_zero_point', but config_groups['group_0'] has sym"),
        (ASYM, group(**integers()), "with 'weight_zero_point', but config_groups['group_0'] has symmetric True"),
        (INT4, group(**integers("4")), "has num_bits '4'; it is 1 to 8"),
        (INT4, group(**integers(4, "16")), "has group_size '16'; it is an integer >= 1, or -1"),
        (INT4, group(**integers(actorder="group")), "has actorder 'group', but no 'weight_g_idx'"),
        (INT4, group(**integers() | {"strategy": "tensor"}), "has strategy 'tensor', not 'group'"),
        (BYTES, group(**integers(16, None)), "has num_bits 16, not 1 or 2"),
        (FP8, group(**real(8, "tensor")), "'weight_scale' has shape [4, 1]; its other parts need [1] or []"),
        (FP8, group(**real(8, "block", block_structure=[2, 0])), "has block_structure [2, 0]; it is two integers"),
        (FP8, group(**real(8, "group", group_size=None)), "has group_size None; it is an integer >= 1"),
        (FP8, group(**real(8, "token")), "has strategy 'token', not 'tensor' or 'channel' or 'block' or 'group'"),
        (FP8, group(**real(8, "channel") | {"symmetric": False}), "has symmetric False, not True"),
        (FP4, group(**real(4, "group", group_size=16)), "NVFP4 with 'weight_global_scale', but"),
        (FP4, group(**real(4, "tensor_group", group_size=32)), "are NVFP4, but config_groups['group_0'] has group_size 32"),
        (MX, group(**NVFP4), "are MXFP4 or MXFP6, but config_groups['group_0'] has group_size 16, not 32"),
        (MX, group(format="mxfp6-pack-quantized", **real(4, "group", group_size=32)), "are MXFP4, but"),
        # Parts of another shape or dtype, or missing.
        (changed(INT4, "weight_shape", "I64", [8, 0]), None, "'weight_shape' is the shape of a matrix or more"),
        (changed(INT4, "weight_shape", "I64", [8, 64, 1]), None, "'weight_shape' has shape [3]; its other parts need [2]"),
        (changed(INT4, "weight_shape", "I64", [8, 65]), None, "which 0 widths fit; the config has no num_bits"),
        (changed(INT4, "weight_scale", "F32", np.ones((7, 4), np.float32)), None, "need 8x(number of groups), or one"),
        (changed(INT4, "weight_scale", "F32", np.ones((8, 5), np.float32)), None, "5 scales for 64 columns, and the con"),
        (changed(ASYM, "weight_zero_point", "I8", np.zeros((8, 4), np.int8)), None, "'weight_zero_point' is I8; it is I32"),
        (changed(ASYM, "weight_zero_point", "I32", np.zeros((2, 4), np.int32)), None, "has shape [2, 4]; its other parts"),
        (changed(INT4, "weight_g_idx", "I32", np.zeros(63, np.int32)), None, "'weight_g_idx' has shape [63]"),
        (changed(INT4, "weight_g_idx", "I32", np.arange(64, dtype=np.int32) // 15), None, "0..3; 4 are others"),
        (without(FP4, "weight_global_scale"), None, "'weight_global_scale' is missing, and no config says"),
        (changed(FP4, "weight_global_scale", "F32", np.ones(2, np.float32)), None, "has shape [2]; its other parts need [1]"),
        (changed(FP4, "weight_scale", "F8_E4M3", np.ones((4, 3), np.uint8)), None, "has shape [4, 3]; its other parts need"),
        (MX | {f"{UP}.weight_global_scale": ("F32", np.ones(1, np.float32))}, None, "have no 'weight_global_scale'"),
        (
            {f"{UP}.weight_packed": ("U8", np.ones((4, 3), np.uint8)), f"{UP}.weight_scale": ("U8", np.ones((4, 1), np.uint8))},
            None,
            "3 bytes of 'weight_packed' and 1 of 'weight_scale' in a row fit MXFP4 and MXFP6",
        ),
        # Values that the library does not write.
        (nan(INT4, "weight_scale", 0x7FC0), None, "'weight_scale' has 1 scales that are not finite; the first is nan"),
        (nan(FP4, "weight_scale", 0x7F), None, "'weight_scale' has 1 scales that are not finite"),
        (nan(MX, "weight_scale", 0xFF), None, "'weight_scale' has 1 scales that are not finite"),
        (nan(FP8, "weight_scale", 0x7F80), group(**real(8, "channel")), "the first is inf at position 1"),
        (nan(FP4, "weight_global_scale", 0), None, "'weight_global_scale' is 0, and scales are divided by it"),
        (nan(BYTES, "weight_scale", 0x7F800000), None, "the first is inf"),
        (BYTES, group(**integers(4, None)), "'weight' has codes 9..9; those of 4 bits are -8..7"),
    ],
)
def test_what_the_library_does_not_write_is_refused(
    tensors: dict[str, Entry], settings: Any, message: str, tmp_path: Path
) -> None:
    stored = values(folder(tmp_path, tensors, config(settings) if settings else None))[f"{UP}.weight"]
    error = refusal(stored, DialectError)
    assert error.found["name"] == f"{UP}.weight" and stored.dialect.title == "compressed-tensors" and message in str(error)
    assert error.found["dialect"] == "compressed_tensors"


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        (packed(UP, 4, 64, 1)[0], group(**integers(1)), "its integers are -1 and 0, of one bit without 'weight_zero_point'"),
        (BYTES, group(**integers(8, None) | {"strategy": "block", "block_structure": [2, 2]}), "per block of [2, 2]"),
        (changed(FP8, "weight_zero_point", "F8_E4M3", np.zeros((4, 1), np.uint8)), group(**real(8, "channel")), "of int"),
        (changed(FP4, "weight_zero_point", "U8", np.zeros((4, 4), np.uint8)), None, "zero-points of integers only"),
        (
            {
                f"{UP}.weight.compressed": ("BF16", np.ones(4, np.uint16)),
                f"{UP}.weight.bitmask": ("U8", np.ones((2, 1), np.uint8)),
            },
            None,
            "it is in a sparse format ('.compressed', '.bitmask')",
        ),
    ],
)
def test_what_no_recipe_holds_is_refused_with_a_way_out(
    tensors: dict[str, Entry], settings: Any, message: str, tmp_path: Path
) -> None:
    stored = values(folder(tmp_path, tensors, config(settings) if settings else None))[f"{UP}.weight"]
    error = refusal(stored, UnsupportedError)
    assert error.found["name"] == f"{UP}.weight" and stored.dialect.title == "compressed-tensors" and message in str(error)
    assert "Convert the checkpoint that it was made from" in str(error)


def test_bits_after_the_codes_of_a_row_are_refused(tmp_path: Path) -> None:
    tensors, _ = packed(UP, 2, 7, 4, None)
    name, settings = f"{UP}.weight_packed", config(group(**integers(4, None)))
    for bit in (28, 31):
        array = (tensors[name][1].view(np.uint32) | np.uint32(1 << bit)).view(np.int32)
        stored = values(folder(tmp_path / str(bit), tensors | {name: ("I32", array)}, settings))[f"{UP}.weight"]
        with pytest.raises(DialectError, match="'weight_packed' has bits after the last of 7 codes of a row; they are 0"):
            stored.tensor()


def test_zero_points_of_more_rows_than_the_weight_has_are_refused(tmp_path: Path) -> None:
    tensors, _ = packed(UP, 5, 64, zero=True)
    name = f"{UP}.weight_zero_point"
    stored = values(folder(tmp_path, tensors | {name: ("I32", tensors[name][1] | (1 << 20))}))[f"{UP}.weight"]
    with pytest.raises(DialectError, match="'weight_zero_point' has bits after the last of 5 codes"):
        stored.tensor()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ignore": [UP]}, f"leaves {UP} as it is, but the files have {UP}.weight_packed"),
        ({"ignore": ["re:.*up_proj"]}, f"leaves {UP} as it is"),
        ({"config_groups": {"a": group(["re:.*attn.*"], **integers())}}, f"leaves {UP} as it is"),
        ({"config_groups": {"a": group(["Linear"])}}, f"leaves {UP} as it is"),
        ({"config_groups": ["a"]}, "config_groups is an object; found ['a']"),
        ({"config_groups": {"a": 3}}, "config_groups['a'] is an object with targets and weights; found 3"),
        (
            {"config_groups": {"a": group(["Linear"], **integers()) | {"targets": "Linear"}}},
            "lists names of modules; found 'Linear'",
        ),
        ({"ignore": "lm_head"}, "ignore lists names of modules; found 'lm_head'"),
    ],
)
def test_a_config_that_the_library_does_not_write_is_refused(changes: Any, message: str, tmp_path: Path) -> None:
    settings = config(group(**integers())) | changes
    stored = values(folder(tmp_path, INT4, settings))[f"{UP}.weight"]
    with pytest.raises(CorruptFileError) as e:
        stored.tensor()
    assert message in str(e.value) and "ownload" in str(e.value)


def test_a_group_may_be_a_preset(tmp_path: Path) -> None:
    tensors, x = packed(UP, 4, 64)
    settings = config() | {"config_groups": {"W4A16": ["Linear"]}}
    assert np.array_equal(decoded(values(folder(tmp_path, tensors, settings))[f"{UP}.weight"]), x)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (without(INT4, "weight_shape"), f"no file has '{UP}.weight_shape'"),
        (changed(INT4, "weight_scale", "F64", np.ones((8, 4))), "is F64; compressed-tensors has F32 or BF16 or F16 there"),
        (without(INT4, "weight_packed"), "is a part of compressed-tensors without the others"),
        (without(FP8, "weight_scale"), "is F8_E4M3 without a scale"),
    ],
)
def test_a_value_without_all_parts_is_refused(tensors: dict[str, Entry], message: str, tmp_path: Path) -> None:
    tensors = tensors | packed(DOWN, 4, 64)[0]
    with pytest.raises(CorruptFileError) as e:
        values(folder(tmp_path, tensors, config(group(**integers()))))
    assert message in str(e.value)


def test_old_sparse_weights_of_quantized_layers_are_recognized(tmp_path: Path) -> None:
    tensors: dict[str, Entry] = {
        f"{UP}.weight_packed": ("I32", np.ones((2, 2), np.int32)),
        f"{UP}.scale_packed": ("F16", np.ones((2, 2), np.float16)),
        f"{UP}.meta": ("I16", np.ones((2, 2), np.int16)),
    }
    stored = values(folder(tmp_path, tensors, config(group(format="marlin-24", **integers()))))[f"{UP}.weight"]
    with pytest.raises(UnsupportedError, match=r"sparse format \('weight_packed', 'scale_packed', 'meta'\)"):
        stored.tensor()


def test_a_target_that_is_no_regular_expression_is_refused(tmp_path: Path) -> None:
    tensors, _ = packed(UP, 8, 64)
    stored = values(folder(tmp_path, tensors, config(group(**integers())) | {"ignore": ["re:(up"]}))[f"{UP}.weight"]
    said = "the target 're:(up' is not a regular expression (missing ), unterminated subpattern at position 0). Fix it, or dow"
    assert said in str(refusal(stored, DialectError))
