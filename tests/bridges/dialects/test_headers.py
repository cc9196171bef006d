"""What headers and settings say is checked without tensor data: in a dry run, and before anything is written."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_dialects import EXPECTED, REFUSED, read, unpacked
from stored_folders import Entry, floats, folder, fp4, fp8, refusal, values

import breccia
from breccia import BrecciaError, DialectError
from breccia import targets as functions
from breccia.backend import Entry as Header
from breccia.backend import StoredValue
from breccia.bridges import convert
from breccia_bridges.safetensors_file import DTYPES
from breccia_bridges.safetensors_writer import Writer

UP = "model.layers.0.mlp.up_proj"


def array_of(dtype: str, shape: tuple[int, ...], like: np.ndarray) -> np.ndarray:
    """Valid numbers: those of another array, else 1 of floats and 0 of integers."""
    bits = {"BF16": 0x3F80, "F8_E8M0": 127, "F32": 1, "F16": 1, "F64": 1}.get(dtype, 0)
    same = like.dtype == DTYPES[dtype][1] and like.size
    return np.resize(like, shape) if same else np.full(shape, bits, DTYPES[dtype][1])


def changed(entries: dict[str, Header], allowed: dict[str, tuple[str, ...]], rng: random.Random) -> dict[str, Header]:
    """Another shape or dtype of one part or two."""
    new = dict(entries)
    for end in rng.sample(list(new), k=min(len(new), rng.choice((1, 1, 2)))):
        dtype, shape = new[end]
        at = rng.randrange(max(len(shape), 1))
        longer = (*shape[:at], shape[at] + rng.choice((-1, 1)), *shape[at + 1 :]) if shape else (2,)
        shapes = [longer, (1, *shape), (*shape, 1), (*shape[:at], *shape[at + 1 :]), (), shape, (0, *shape[1:])]
        dtype = rng.choice([dtype, dtype, *(allowed[end] or ("F32", "F16", "BF16", "U8", "I8", "I32", "F8_E4M3"))])
        new[end] = Header(dtype, rng.choice(shapes))
    return new


@pytest.mark.parametrize("name", [name for name, words in EXPECTED.items() if not words.startswith(REFUSED)])
def test_what_form_accepts_by_its_headers_read_accepts_where_the_numbers_are_valid(name: str, tmp_path: Path) -> None:
    path, _ = unpacked(name, tmp_path)
    rng = random.Random(name)
    for stored in list(read(path).values())[:3]:
        value, data = stored.value, {end: np.asarray(stored.value[end]) for end in stored.value}
        allowed = {**stored.group.parts, **stored.group.optional}
        for _ in range(60):
            entries = changed(dict(value.entries), allowed, rng)
            arrays = {end: array_of(entry.dtype, entry.shape, data[end]) for end, entry in entries.items()}
            other = StoredValue(value.name, entries, value.settings, arrays.__getitem__, None, value.metadata)
            try:
                form = functions.load(stored.dialect.form or "")(other)
            except BrecciaError:
                continue
            st = functions.load(stored.dialect.read or "")(other, form)
            assert (st.recipe, tuple(st.shape)) == (form.recipe, form.shape), entries


# -- what only the data shows -----------------------------------------------------------------------------------------


def scaled_fp8(scale: float) -> dict[str, Entry]:
    return {f"{UP}.weight": fp8(4, 32)[0], f"{UP}.weight_scale": ("F32", np.array(scale, np.float32))}


def int4_in_bytes(code: int) -> dict[str, Entry]:
    return {f"{UP}.weight": ("I8", np.full((4, 32), code, np.int8)), f"{UP}.weight_scale": floats("F32", 4, 1)[0]}


def words(last: int) -> dict[str, Entry]:
    """Rows of 33 codes, and what follows them in their last word."""
    packed = np.zeros((4, 5), np.int32)
    packed[:, -1] = last
    shape = ("I64", np.array([4, 33]))
    return {f"{UP}.weight_packed": ("I32", packed), f"{UP}.weight_scale": floats("F32", 4, 1)[0], f"{UP}.weight_shape": shape}


def compressed(bits: int, format: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (scaled_fp8(np.nan), {"quant_method": "fp8"}, "'weight_scale' has 1 scales that are not finite; the first is nan"),
        (int4_in_bytes(8), compressed(4, "int-quantized"), r"'weight' has codes 8\.\.8; those of 4 bits are -8\.\.7"),
        (words(1 << 4), compressed(4, "pack-quantized"), "'weight_packed' has bits after the last of 33 codes of a row"),
    ],
)
def test_nothing_appears_where_the_data_of_a_value_is_invalid(tensors: Any, config: Any, message: str, tmp_path: Path) -> None:
    """A dry run, which reads no data, passes."""
    path = folder(tmp_path / "source", tensors, config)
    for recipe in ("none", "bf16", "mxfp8"):
        convert(path, tmp_path / "out", recipe, include=[] if recipe != "mxfp8" else ["*"], dry_run=True)
        with pytest.raises(DialectError, match=message) as e:
            convert(path, tmp_path / "out", recipe)
        assert e.value.found["name"] == f"{UP}.weight" and [p.name for p in tmp_path.iterdir()] == ["source"]


# -- parts of another variant -----------------------------------------------------------------------------------------

U8 = ("U8", fp4(4, 32)[0])
POWERS, ONE, ROWS = floats("U8", 4, 1)[0], ("F32", np.array(1, np.float32)), floats("F32", 4, 1)[0]
I8, E4M3 = ("I8", np.ones((4, 32), np.int8)), fp8(4, 32)[0]
QUARK = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}}
INT8 = {f"{UP}.weight": I8, f"{UP}.weight_scale": ROWS}
GPTQ = {
    f"{UP}.qweight": ("I32", np.zeros((32, 1), np.int32)),
    f"{UP}.qzeros": ("I32", np.zeros((1, 1), np.int32)),
    f"{UP}.scales": ("F16", np.ones((1, 8), np.float16)),
}
G_IDX = ("I32", np.zeros(32, np.int32))
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_awq"}
AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32}


def with_scale(weight: Entry, scale: Entry, end: str = "weight") -> dict[str, Entry]:
    return {f"{UP}.{end}": weight, f"{UP}.weight_scale": scale}


def modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm}


@pytest.mark.parametrize(
    ("tensors", "end", "part", "config", "message"),
    [
        (with_scale(U8, POWERS), "weight_scale_2", ONE, modelopt("MXFP4"), "it has 'weight_scale_2', which MXFP4 has not"),
        (with_scale(E4M3, POWERS), "weight_scale_2", ONE, modelopt("MXFP8"), None),
        (with_scale(E4M3, ONE), "weight_scale_2", ONE, modelopt("FP8"), None),
        (with_scale(I8, ("F32", np.ones(4, np.float32))), "weight_scale_2", ONE, modelopt("W8A16"), None),
        (with_scale(E4M3, ONE), "svdquant_lora_a", ROWS, modelopt("FP8"), None),
        (
            with_scale(U8, POWERS),
            "weight_zero_point",
            ROWS,
            QUARK,
            "it has a 'weight_zero_point', which MXFP4 of Quark has not",
        ),
        (with_scale(E4M3, ONE), "weight_zero_point", ONE, {"quant_method": "fp8"}, None),
        (with_scale(E4M3, ONE), "weight_scale_2", ONE, {"quant_method": "fp8"}, None),
        (INT8, "weight_g_idx", G_IDX, compressed(8, "int-quantized"), None),
        (INT8, "weight_global_scale", ONE, compressed(8, "int-quantized"), None),
        (words(0), "weight_global_scale", ONE, compressed(4, "pack-quantized"), None),
        (GPTQ, "g_idx", G_IDX, AWQ, None),
        (GPTQ, "g_idx", G_IDX, ROUND, "it has a 'g_idx', which the packing of AWQ has not"),
    ],
)
def test_a_part_of_another_variant_is_refused(
    tensors: Any, end: str, part: Entry, config: Any, message: str | None, tmp_path: Path
) -> None:
    assert breccia.dequantize(values(folder(tmp_path / "right", tensors, config))[f"{UP}.weight"].tensor()) is not None
    path = folder(tmp_path / "wrong", tensors | {f"{UP}.{end}": part}, config)
    if message is None:
        with pytest.raises(
            DialectError, match=rf"{UP}.weight \(.*\): '{UP}.{end}' is a part of .* that a value of .* has not"
        ) as e:
            values(path)
        assert e.value.found["name"] == f"{UP}.weight"
    else:
        assert message in str(refusal(values(path)[f"{UP}.weight"], DialectError))
    with pytest.raises(DialectError):
        convert(path, tmp_path / "out", "none", dry_run=True)


def test_tensors_beside_a_value_that_belong_to_its_layer_are_no_parts(tmp_path: Path) -> None:
    beside = {end: ONE for end in ("input_scale", "k_scale", "bias", "scale", "pre_quant_scale")}
    listed = with_scale(E4M3, ONE) | {f"{UP}.{end}": part for end, part in beside.items()}
    assert list(values(folder(tmp_path / "m", listed, modelopt("FP8")))) == [f"{UP}.weight"]


# -- codes of an unknown program --------------------------------------------------------------------------------------


UNKNOWN = [
    *itertools.product(["F8_E4M3FNUZ", "F8_E5M2FNUZ"], ["scale", "scales"]),  # those with weight_scale are read
    *itertools.product(["F6_E2M3", "F6_E3M2", "F4"], ["weight_scale", "scale", "scales"]),
]


@pytest.mark.parametrize(("dtype", "end"), UNKNOWN)
def test_codes_of_every_dtype_with_scales_are_refused(dtype: str, end: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with Writer(path, {f"{UP}.weight": (dtype, (4, 32)), f"{UP}.{end}": ("F32", (4, 1))}) as writer:
        writer.write(f"{UP}.weight", np.zeros(4 * 32 * DTYPES[dtype][0] // 8, np.uint8))
        writer.write(f"{UP}.{end}", ROWS[1])
    said = rf"is already quantized \(codes with scales, of an unknown program\): {UP}.{end} is F32, {UP}.weight is {dtype}"
    with pytest.raises(breccia.UnsupportedError, match=said):
        convert(path, tmp_path / "out.safetensors", "none")
