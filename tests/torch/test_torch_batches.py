"""Batches and groups of matrices on torch's CPU tensors: NumPy's kernels, on the same memory, with their bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import breccia


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4", "int4", "int8"])
@pytest.mark.parametrize("matrices, m, n, k", [(40, 1, 32, 64), (5, 33, 256, 256), (1, 2, 16, 64)])
def test_products_of_many_matrices_have_the_bits_of_numpy(recipe: str, matrices: int, m: int, n: int, k: int) -> None:
    w, x = normal(matrices, n, k), normal(matrices, m, k)
    st, ours = breccia.cast(torch.from_numpy(w), recipe), breccia.cast(w, recipe)
    y = breccia.matmul(torch.from_numpy(x), st.mT)
    np.testing.assert_allclose(y.numpy(), breccia.matmul(x, ours.mT), rtol=0, atol=1e-3)
    ends = (m * np.arange(1, matrices + 1)).astype(np.int32)
    ends[: matrices // 2] = 0  # groups without rows
    rows = x.reshape(-1, k)
    found = breccia.grouped_matmul(torch.from_numpy(rows), st.mT, torch.from_numpy(ends))
    assert np.array_equal(found.numpy(), breccia.grouped_matmul(rows, ours.mT, ends))


def test_groups_of_torch_run_on_numpys_kernels_for_every_operand() -> None:
    w, x = breccia.cast(torch.from_numpy(normal(3, 16, 64)), "mxfp8"), torch.from_numpy(normal(9, 64))
    ends = torch.tensor([2, 2, 8], dtype=torch.int32)
    expected = breccia.grouped_matmul(x, w.mT, ends, prefer="reference.grouped_matmul")
    for a, b in ((x, w.mT), (x.bfloat16().float(), w.mT), (x[:, ::1], w.mT), (breccia.cast(x, "mxfp8"), w.mT)):
        found = breccia.explain("grouped_matmul", a, b)
        assert found.winner is not None and found.winner.name == "torch.cpu.grouped_matmul"
    assert torch.allclose(breccia.grouped_matmul(x, w.mT, ends), expected, rtol=0, atol=1e-3)
    dense = breccia.dequantize(w).mT
    assert torch.allclose(breccia.grouped_matmul(breccia.cast(x, "mxfp8"), dense, ends), expected, rtol=0, atol=2)
    low = breccia.grouped_matmul(x.bfloat16(), w.mT, ends, out_dtype="bfloat16")
    assert low.dtype == torch.bfloat16 and not low[8:].any()


def test_gradients_of_groups_are_those_of_the_generic_algorithm() -> None:
    w, ends = breccia.cast(torch.from_numpy(normal(3, 16, 64)), "int8"), torch.tensor([2, 2, 8], dtype=torch.int32)
    grads = []
    for prefer in (None, "reference.grouped_matmul"):
        x = torch.from_numpy(normal(9, 64)).requires_grad_()
        breccia.grouped_matmul(x, w.mT, ends, prefer=prefer).square().sum().backward()
        grads.append(x.grad)
    assert torch.allclose(*grads, rtol=1e-3, atol=1e-2)
