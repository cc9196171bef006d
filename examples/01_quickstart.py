"""Quantize, look, multiply: the first five minutes with breccia on NumPy.

python examples/01_quickstart.py
"""

from __future__ import annotations

import numpy as np

import breccia


def main() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 256)).astype(np.float32)

    # FP8 codes with one FP32 scale per 128 elements along K.
    st = breccia.cast(x, breccia.Float8BlockScaling(block_k=128))
    print(st)
    print(f"{x.nbytes} bytes -> {st.nbytes} bytes; largest error {np.abs(breccia.dequantize(st) - x).max():.4f}")

    # A scaled matmul. Operands may follow different recipes; here the weight is K x N, so its blocks run along N.
    a = breccia.cast(rng.standard_normal((16, 256)).astype(np.float32), breccia.Float8CurrentScaling())
    w = breccia.cast(rng.standard_normal((256, 64)).astype(np.float32), breccia.Float8BlockScaling(block_k=128))
    print("a @ w:", breccia.matmul(a, w).shape)

    # A weight stored N x K has its blocks along the contraction axis: multiply by its transpose, a free view.
    w = breccia.cast(rng.standard_normal((64, 256)).astype(np.float32), breccia.NVFP4BlockScaling())
    print("a @ w.mT:", breccia.matmul(a, w.mT).shape, w.mT)

    # Another recipe for the same tensor, and the reason a kernel was chosen.
    print(breccia.requantize(st, breccia.MXFP8BlockScaling()))
    print(breccia.explain("cast", x, breccia.MXFP8BlockScaling()))


if __name__ == "__main__":
    main()
