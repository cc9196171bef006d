"""Checkpoints that other libraries wrote, as golden files: what is expected of each, and how they are unpacked."""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from pathlib import Path
from typing import Any

from paths import GOLDEN as ROOT

from breccia_bridges.checkpoint import checkpoint_files, opened
from breccia_bridges.recognition import recognized
from breccia_bridges.stored import Stored

GOLDEN = ROOT / "dialects"
EXACT = "exact"  # breccia decodes the library's values, bit for bit; those that it rounds to BF16 after the same rounding
REFUSED = "refused: "  # the words that follow are in the message
ACROSS = "hqq_4bit_axis0"  # groups run across rows, which no linear layer takes

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
    "hqq_2bit_axis1": EXACT,
    "hqq_3bit_axis1": EXACT,
    "hqq_4bit_axis0": EXACT,
    "hqq_4bit_axis1": EXACT,
    "hqq_8bit_axis1": EXACT,
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
    "modelopt_nvfp4": EXACT,
    "quanto_qfloat8": EXACT,
    "quanto_qint4": REFUSED + "no file says how long its rows are",
    "quanto_qint8": EXACT,
    "quark_mxfp4": EXACT,
    "torchao_float8_row": EXACT,
    "torchao_float8_tensor": EXACT,
    "torchao_int8": EXACT,
    "torchao_intx4": EXACT,
    "torchao_mxfp4": EXACT,
    "torchao_mxfp8": EXACT,
    "torchao_nvfp4": EXACT,
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


def spoil(file: Path) -> None:
    """Overwrite every byte of the tensors of a safetensors file with 0xFF: scales are NaN. The header stays."""
    size, header = file.stat().st_size, int.from_bytes(file.read_bytes()[:8], "little")
    with file.open("r+b") as damaged:
        damaged.seek(8 + header)
        damaged.write(b"\xff" * (size - 8 - header))


def read(folder: Path) -> dict[str, Stored]:
    """The values of a checkpoint, by name."""
    return recognized(folder, [opened(path) for path in checkpoint_files(folder)])
