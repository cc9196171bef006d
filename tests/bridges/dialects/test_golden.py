"""Checkpoints that other libraries wrote, against the values that their own code decodes (tests/golden/dialects/README.md).

tests/dialects/check.py compares larger ones with the same functions and the same table.
"""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialect_values import digest, scales_first, to_bf16
from paths import GOLDEN

import breccia
from breccia_bridges.checkpoint import checkpoint_files
from breccia_bridges.recognition import Stored, recognized
from breccia_bridges.safetensors_file import Container

GOLDEN = GOLDEN / "dialects"
EXACT = "exact"  # breccia decodes the library's values, bit for bit; those that it rounds to BF16 after the same rounding
CODES = "codes exact"  # codes and scales are those of the file; the library multiplies the two scales first
REFUSED = "refused: "  # the words that follow are in the message

EXPECTED = {
    "autoround_gptq_int4": EXACT,
    "awq_gemm_int4": EXACT,
    "bnb_fp4": EXACT,
    "bnb_int8": EXACT,
    "bnb_nf4": EXACT,
    "bnb_nf4_double": EXACT,
    "ct_fp8_block": EXACT,
    "ct_fp8_channel": EXACT,
    "ct_fp8_tensor": EXACT,
    "ct_int8_channel_w8a8": EXACT,
    "ct_mxfp4": EXACT,
    "ct_mxfp8": EXACT,
    "ct_nvfp4": EXACT,
    "ct_pack_int4_g128_actorder": EXACT,
    "ct_pack_int4_g128_asym": EXACT,
    "ct_pack_int4_g128_sym": EXACT,
    "ct_pack_int4_g_idx": EXACT,
    "ct_pack_int8_channel": EXACT,
    "deepseek_v3_fp32": EXACT,
    "deepseek_v3_ue8m0": EXACT,
    "deepseek_v4_fp4": EXACT,
    "fbgemm_fp8": EXACT,
    "fp8_per_tensor_hf": EXACT,
    "gpt_oss_mxfp4": EXACT,
    "gptq_v1_int4_asym_desc_act": EXACT,
    "gptq_v1_int4_sym": EXACT,
    "gptq_v1_int8_sym": EXACT,
    "gptq_v2_int2_asym": EXACT,
    "gptq_v2_int3_sym": EXACT,
    "gptq_v2_int4_asym": EXACT,
    "hqq_2bit_axis1": REFUSED + "a float zero",
    "hqq_3bit_axis1": REFUSED + "a float zero",
    "hqq_4bit_axis0": REFUSED + "a float zero",
    "hqq_4bit_axis1": REFUSED + "a float zero",
    "hqq_8bit_axis1": REFUSED + "a float zero",
    "mlx_affine_2": EXACT,
    "mlx_affine_3": EXACT,
    "mlx_affine_4": EXACT,
    "mlx_affine_5": EXACT,
    "mlx_affine_6": EXACT,
    "mlx_affine_8": EXACT,
    "mlx_affine_mixed_4_6": EXACT,
    "mlx_mxfp4": EXACT,
    "mlx_mxfp8": EXACT,
    "mlx_nvfp4": EXACT,
    "modelopt_fp8": EXACT,
    "modelopt_fp8_2d": EXACT,
    "modelopt_int4_awq": EXACT,
    "modelopt_mxfp4": EXACT,
    "modelopt_mxfp8": EXACT,
    "modelopt_nvfp4": CODES,
    "quanto_qfloat8": EXACT,
    "quanto_qint4": REFUSED + "rounds after each step",
    "quanto_qint8": EXACT,
    "quark_mxfp4": EXACT,
    "torchao_float8_row": EXACT,
    "torchao_float8_tensor": EXACT,
    "torchao_int8": EXACT,
    "torchao_intx4": EXACT,
    "torchao_mxfp4": EXACT,
    "torchao_mxfp8": EXACT,
    "torchao_nvfp4": CODES,
}


def unpacked(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """(the folder of a golden checkpoint, its record)."""
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress((GOLDEN / f"{name}.tar.xz").read_bytes()))) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            path = folder / member.name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(file.read())
    return folder / name, json.loads((folder / "record.json").read_text())


def read(folder: Path) -> dict[str, Stored]:
    """The values of a checkpoint, by name."""
    return recognized(folder, [Container(path) for path in checkpoint_files(folder)])


def outcome(stored: Stored, dtype: str, sha256: str) -> str:
    """How a value agrees with the library's, of that dtype and digest: EXACT, CODES, or "wrong"."""
    st = stored.tensor()
    values = np.asarray(breccia.dequantize(st), np.float32)
    if digest(to_bf16(values) if dtype == "bfloat16" else values) == sha256:
        return EXACT
    if st.recipe.name == "nvfp4" and st.global_scale is not None:
        codes, scale = np.asarray(st.data), np.asarray(st.scale)
        parts = [np.asarray(stored.value[end]).tobytes() for end in stored.value]
        values = scales_first(codes, scale, np.asarray(st.global_scale))
        # ModelOpt decodes the code of -0 as +0, which adding 0 does too.
        if codes.tobytes() in parts and scale.tobytes() in parts and sha256 in (digest(values), digest(values + np.float32(0))):
            return CODES
    return "wrong"


@pytest.mark.parametrize("name", EXPECTED)
def test_the_values_of_a_checkpoint_are_those_that_its_library_decodes(name: str, tmp_path: Path) -> None:
    folder, record = unpacked(name, tmp_path)
    if EXPECTED[name].startswith(REFUSED):
        with pytest.raises((breccia.DialectError, breccia.UnsupportedError)) as caught:
            for stored in read(folder).values():
                stored.tensor()
        assert EXPECTED[name].removeprefix(REFUSED) in str(caught.value)
        return
    values = read(folder)
    assert {n: list(stored.shape) for n, stored in values.items()} == {n: v["shape"] for n, v in record["values"].items()}
    outcomes = {n: outcome(stored, record["dtype"], record["values"][n]["sha256"]) for n, stored in values.items()}
    assert set(outcomes.values()) == {EXPECTED[name]}, outcomes


def test_every_golden_checkpoint_is_in_the_table() -> None:
    assert {path.name.removesuffix(".tar.xz") for path in GOLDEN.glob("*.tar.xz")} == set(EXPECTED)


def test_a_value_of_another_digest_is_wrong(tmp_path: Path) -> None:
    folder, record = unpacked("fbgemm_fp8", tmp_path)
    name, stored = next(iter(read(folder).items()))
    assert outcome(stored, "float32", record["values"][name]["sha256"]) == EXACT
    assert outcome(stored, "float32", digest(np.zeros(stored.shape))) == "wrong"


def test_digests_and_roundings_are_those_of_fp32_and_bf16() -> None:
    x = np.array([1, np.nan, 1 + 2**-8, 1 + 3 * 2**-8, -3.4e38, 0.0, -0.0], np.float32)
    np.testing.assert_array_equal(to_bf16(x), np.array([1, np.nan, 1, 1 + 2**-6, -np.inf, 0, 0], np.float32))
    other_nan = np.where(np.isnan(x), -np.float32(np.nan), x)
    assert digest(x) == digest(other_nan) != digest(np.abs(x))


def test_scales_first_decodes_every_code_and_scale() -> None:
    codes = np.arange(256, dtype=np.uint8).repeat(8).reshape(256, 8)
    scale = np.arange(256, dtype=np.uint8).reshape(256, 1)
    recipe = breccia.NVFP4BlockScaling()
    layout = recipe.layout.fitted((256, 16))
    nvfp4 = breccia.from_buffer(codes, scale, recipe, layout, shape=(256, 16), global_scale=np.float32(0.5))
    finite = (scale[:, 0] & 0x7F) != 0x7F  # by a power of two both orders are exact
    np.testing.assert_array_equal(
        scales_first(codes, scale, np.float32(0.5))[finite], np.asarray(breccia.dequantize(nvfp4))[finite]
    )
