"""A Triton kernel: FP16 activations (M, K) by an INT8 weight (N, K) with one scale for each row."""

import torch
import triton
import triton.language as tl

from breccia.backend import checks


@triton.jit
def product(x, codes, scale, y, m, n, k: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, k, STEP):
        along = start + tl.arange(0, STEP)
        a = tl.load(x + rows[:, None] * k + along[None, :], (rows[:, None] < m) & (along[None, :] < k), 0.0)
        w = tl.load(codes + columns[None, :] * k + along[:, None], (columns[None, :] < n) & (along[:, None] < k), 0)
        total += tl.dot(a, w.to(tl.float16))  # exact products: a code has at most 8 bits; FP32 sums
    total *= tl.load(scale + columns, columns < n, 0.0)[None, :]
    tl.store(y + rows[:, None] * n + columns[None, :], total, (rows[:, None] < m) & (columns[None, :] < n))


def matmul(a, b, options):
    out_dtype, bias, out = options
    checks.check_matmul(a, b, bias)
    weight = b.mT
    n, k = weight.shape
    x, codes, scale = a.reshape(-1, k).contiguous(), weight.data.contiguous(), weight.scale.contiguous()
    y = torch.empty((len(x), n), dtype=torch.float32, device=a.device)
    product[triton.cdiv(len(x), 16), triton.cdiv(n, 64)](x, codes, scale, y, len(x), n, k, 16, 64, 64)
    if bias is not None:
        y += bias.float()
    y = y.reshape(*a.shape[:-1], n).to(getattr(torch, out_dtype))
    return y if out is None else out.copy_(y)
