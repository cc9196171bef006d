"""Files as breccia 0.1.3 wrote them, and what it read back: run where that release, torch and safetensors are installed.

    python -m venv old && old/bin/pip install breccia==0.1.3 torch safetensors
    old/bin/python tests/golden/make_breccia_0_1_3.py

Never with this repository's packages: it refuses any breccia but 0.1.3. The order of metadata in a file varies from run to
run (safetensors keeps it in a hash map); names, dtypes, shapes and bytes of the tensors do not.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

import breccia
from breccia import recipes as r
from breccia.bridges import save_safetensors

HERE = Path(__file__).parent / "breccia_0_1_3"

CASES = {
    "delayed_e4m3": r.DelayedScaling(),
    "delayed_e5m2": r.DelayedScaling(fp8_format="E5M2", amax_history_len=4, margin=1),
    "current_e4m3": r.Float8CurrentScaling(),
    "current_e5m2": r.Float8CurrentScaling(fp8_format="E5M2"),
    "block_e4m3": r.Float8BlockScaling(block_k=32),
    "block_e5m2": r.Float8BlockScaling(fp8_format="E5M2", block_k=32),
    "mxfp8_e4m3": r.MXFP8BlockScaling(),
    "mxfp8_e5m2": r.MXFP8BlockScaling(fp8_format="E5M2"),
    "nvfp4": r.NVFP4BlockScaling(),
    "int4_fp16": r.INT4Scaling(group_size=32),
    "int4_bf16": r.INT4Scaling(group_size=32, scale_dtype="bf16"),
    "int4_fp32": r.INT4Scaling(group_size=32, scale_dtype="fp32"),
    "int4_unsigned": r.INT4Scaling(group_size=32, signed=False),
    "int4_asymmetric": r.INT4Scaling(group_size=32, signed=False, symmetric=False),
}


def inputs() -> np.ndarray:
    """4 x 64 FP32: ordinary numbers, zeros, tiny numbers, and large ones with an outlier."""
    x = np.random.default_rng(20261121).standard_normal((4, 64)).astype(np.float32)
    x[1] = 0
    x[2] *= np.float32(1e-5)
    x[3] *= np.float32(300)
    x[3, 17] = 40000
    return x


def main() -> None:
    """Write the four files."""
    if breccia.__version__ != "0.1.3":
        raise SystemExit(f"these files are breccia 0.1.3's; this is {breccia.__version__} ({breccia.__file__}).")
    for source, x in (("numpy", inputs()), ("torch", torch.from_numpy(inputs()))):
        tensors = {name: breccia.cast(x, recipe) for name, recipe in CASES.items()}
        save_safetensors(tensors, str(HERE / f"{source}.safetensors"), {"source": f"{source} input"})
        read_back = {f"{name}.expected": np.asarray(breccia.dequantize(st)) for name, st in tensors.items()}
        save_file(read_back, HERE / f"{source}.expected.safetensors")


if __name__ == "__main__":
    main()
