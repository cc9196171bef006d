"""Products across the blocks of a stored weight, dL/dx = dL/dy @ w: the CUDA source on the host, its plans, and on a GPU."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_kernels import Decoding
from marks import on_cuda, slow_but
from weights import FORMATS, in_torch, replaced, tensor

from breccia.backend import reference
from breccia.kernels import bounds
from breccia.options import product_options

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from triton_casts import ON_GPU  # noqa: E402
from triton_products import call_of  # noqa: E402

from breccia_triton.gemm.bf16 import matmul as bf16_matmul  # noqa: E402
from breccia_triton.gemm.bf16 import plans as bf16_plans  # noqa: E402
from breccia_triton.gemm.weight_only import dgrad  # noqa: E402
from breccia_triton.gemm.weight_only import plans as weight_plans  # noqa: E402
from breccia_triton.gemm.weight_only.problem import Weight  # noqa: E402
from breccia_triton.launch import compiler, program  # noqa: E402

pytestmark = [pytest.mark.gpu] if ON_GPU else []
STORAGE = "mma_16x128"
K = bf16_plans.SHORTEST_OF_TWO
OF_EACH_KIND = {"int4-128", "uint4-zero-128", "mxfp4", "nvfp4", "e4m3-block", "int8-row", "mxint8"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None or ON_GPU:
        pytest.skip("it runs on CPUs, with a C++ compiler")
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Run the source on the host, and the product of BF16 numbers in FP32."""
    monkeypatch.setattr(program, "function", lambda source, entry, macros, *rest: Decoding(entry, macros, folder))
    for module in (dgrad, bf16_matmul):
        monkeypatch.setattr(module, "multiply", lambda x, y, to: to.copy_(torch.matmul(x.float(), y.float())))
    for calls in (bf16_matmul._calls, bf16_matmul._rounded_calls):
        calls.clear()


def numbers(shape: tuple[int, int], seed: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def check(found: Any, x: Any, plain: Any) -> None:
    """The bound of docs/spec/numerics.md, section 9, and one rounding."""
    values = torch.from_numpy(reference.dequantize(plain).astype(np.float64))
    exact, size = x.double() @ values, x.double().abs() @ values.abs()
    bound = bounds.accumulated(size, x.shape[1], x.shape[1])
    bound = bound + {torch.float32: 0.0, torch.bfloat16: 2.0**-8}[found.dtype] * (exact.abs() + bound)
    assert found.shape == exact.shape
    assert torch.equal(found.isnan(), exact.isnan())
    known = exact.isfinite()
    assert torch.equal(found[~known].double().nan_to_num(7), exact[~known].nan_to_num(7))
    assert ((found.double() - exact).abs()[known] <= bound[known]).all()


def multiplied(x: Any, w: Any, dtype: str = "float32") -> Any:
    found = bf16_matmul.matmul_bf16(x, w, product_options(dtype))
    calls = bf16_matmul._calls.values()
    assert not any(isinstance(call, str) for call in calls), list(calls)
    return found


def decoded(plain: Any, copies: int, rows: int) -> tuple[Any, Any]:
    """(The numbers that the source writes for a weight, (copies, N, K); which columns it flags), on the host."""
    w = in_torch(plain).to_storage(STORAGE)
    n, k = w.shape
    of = weight_plans.weight_format_of(w.recipe.format, w.layout.plain.block(-1))
    assert isinstance(of, weight_plans.WeightFormat)
    kernel = program.function(None, "weight_only_across", {**weight_plans.macros_of_decoding(of), "COPIES": copies})
    values, flags = torch.zeros(copies, n, k).bfloat16(), torch.zeros(1 + rows + k, dtype=torch.int32)
    weight = Weight(w.data.data_ptr(), w.scale.data_ptr(), None, of.factor, int(of.divides))
    if w.global_scale is not None:
        weight.tensor_scale = w.global_scale.data_ptr()
    arrays = (ctypes.c_void_p(x.data_ptr()) for x in (values, flags))
    numbers = map(ctypes.c_int, (rows, n, k, 1))
    kernel.prepare((-(-n // 64), -(-k // 128), 1), 128, [weight, *arrays, *numbers], []).run(0)
    assert flags[0] == flags[1:].any() and not flags[1 : 1 + rows].any()
    return values, flags[1 + rows :].bool()


@pytest.mark.parametrize("name", slow_but({"int4-128"}, FORMATS))
@pytest.mark.usefixtures("on_the_host")
def test_values_become_two_numbers_of_which_the_second_is_what_the_first_one_leaves(name: str) -> None:
    plain = tensor(name, 24, 136, seed=2)  # rows and columns end within a chunk
    exact = torch.from_numpy(reference.dequantize(plain))
    (high, low), flags = decoded(plain, 2, 3)
    # The reciprocal of a global scale that divides, or its share of an amax, is rounded, and the product with it: 2^-22.
    factor = name in ("nvfp4-divisor", "nvfp4-amax")
    if not factor:
        assert torch.equal(high, exact.bfloat16())
        assert torch.equal(low, (exact - high.float()).bfloat16())
    assert not flags.any()
    left = 2.0**-17 + (2.0**-22 if factor else 0.0)
    assert ((high.double() + low.double() - exact.double()).abs() <= left * exact.double().abs()).all()
    assert torch.equal(decoded(plain, 1, 3)[0][0], high)


@pytest.mark.long
@pytest.mark.parametrize("name", slow_but(OF_EACH_KIND, FORMATS))
@pytest.mark.usefixtures("on_the_host")
def test_products_of_every_format_stay_within_the_bound_on_the_host(name: str) -> None:
    plain = tensor(name, K, 136, seed=2)
    w, x = in_torch(plain).to_storage(STORAGE), numbers((20, K), 3)
    for dtype in ("float32", "bfloat16"):
        check(multiplied(x, w, dtype), x, plain)


@pytest.mark.long
@pytest.mark.usefixtures("on_the_host")
def test_inf_nan_and_subnormal_values_are_multiplied_in_fp32_on_the_host() -> None:
    plain = in_torch(tensor("e4m3-block", K, 200, seed=2))
    scale = plain.scale.clone()
    scale[3, 1], scale[5, 0], scale[40, 0] = 2.0**-110, float("nan"), 2.0**119.9
    x = numbers((70, K), 3)
    x[2, 9], x[4, 1] = float("inf"), float("nan")
    x[:, 40] = 2.0**-100
    changed = replaced(plain, scale=scale)
    as_numpy = replaced(tensor("e4m3-block", K, 200, seed=2), scale=scale.numpy())
    check(multiplied(x, changed.to_storage(STORAGE)), x, as_numpy)
    x[:, [5, 40]] = 0
    x[:, 6:] = 0
    x[:, 3] = 2.0**100
    check(multiplied(x, changed.to_storage(STORAGE)), x, as_numpy)


def test_what_is_not_taken_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_plans.compiler, "missing", lambda: None)
    w, x = in_torch(tensor("int4-128", K, 200, seed=2)).to_storage(STORAGE), numbers((20, K), 3)
    assert bf16_plans.accepts(call_of(x, w)) is None and bf16_plans.score(call_of(x, w)) > 0
    for call, reason in (
        (call_of(numbers((20, 200), 3), w.mT), "it multiplies matrices with blocks across K, by arrays from the left"),
        (call_of(x, w, out_dtype="float16"), "writes BF16 and FP32"),
        (call_of(x, w, bias=torch.zeros(200)), "it adds no bias"),
        (call_of(x.float(), w), "the array is float32"),
        (call_of(x[:, :72], in_torch(tensor("int4-128", 72, 200, seed=2)).to_storage(STORAGE)), "take K = 640 and more"),
        (call_of(x, in_torch(tensor("int4-128", K, 204, seed=2)).to_storage(STORAGE)), "multiples of 16 bytes"),
    ):
        assert reason in str(bf16_plans.accepts(call))


@pytest.mark.skipif(compiler.missing() is not None, reason="no NVRTC")
@pytest.mark.parametrize("name", [n if n == "int4-128" else pytest.param(n, marks=pytest.mark.slow) for n in FORMATS])
def test_the_source_compiles_without_spilling(name: str) -> None:
    import re

    from compiling import compiled_with_log

    of = weight_plans.weight_format_of(FORMATS[name], FORMATS[name].scale.block)
    assert isinstance(of, weight_plans.WeightFormat)
    source = compiler.CudaSource.read(weight_plans.SOURCES / "weight_only_across.cu")
    for copies in (1, 2):
        _, log = compiled_with_log(source, {**weight_plans.macros_of_decoding(of), "COPIES": copies})
        assert set(re.findall(r"(\d+) bytes spill stores", log)) == {"0"} and "warning" not in log


@on_cuda
@pytest.mark.parametrize("name", FORMATS)
def test_products_of_every_format_stay_within_the_bound(name: str) -> None:
    for m, n, k in ((1, 640, 128), (70, 1000, 328), (300, 2048, 1024)):
        plain = tensor(name, n, k, seed=2)
        w, x = in_torch(plain).to("cuda").to_storage(STORAGE), numbers((m, n), 3).cuda()
        for dtype in ("float32", "bfloat16"):
            check(multiplied(x, w, dtype).cpu(), x.cpu(), plain)
