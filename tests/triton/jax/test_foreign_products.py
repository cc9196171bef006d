"""Products of FP8 tensors of JAX by torch's kernels: on a GPU where JAX has one, elsewhere in the host's memory.

Expected bits are those of the same op on tensors of torch with the same bytes.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("breccia_triton")
pytest.importorskip("breccia_jax")
pytest.importorskip("breccia_native.xla_calls", reason="needs breccia-native, built with a C compiler")
torch = pytest.importorskip("torch")

import jax.numpy as jnp  # noqa: E402
from in_frameworks import moved  # noqa: E402

import breccia  # noqa: E402
from breccia import Device, ScaledTensor  # noqa: E402
from breccia.backend import Metadata, product_options  # noqa: E402
from breccia.kernels import bounds  # noqa: E402
from breccia_jax import primitive  # noqa: E402
from breccia_triton import availability  # noqa: E402
from breccia_triton.gemm.fp8 import plans  # noqa: E402
from breccia_triton.jax import foreign, launch  # noqa: E402
from breccia_triton.jax.foreign import TARGET, Enqueued  # noqa: E402

ON_GPU = jax.default_backend() == "gpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
#: What the kernel multiplies: a by b.
PAIRS = {
    "fp8_current": "fp8_current",
    "fp8_row": "fp8_row,fp8_format=E5M2",
    "fp8_block": "fp8_block,block_m=128",
    "fp8_block,block_m=1": "fp8_block",
    "mxfp8": "mxfp8",
}


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, XLA's calls for CPUs run the products, without a stream."""
    if not ON_GPU:
        foreign._register("cpu")
        monkeypatch.setattr(foreign, "_register", lambda platform: None)
        monkeypatch.setattr(primitive, "runs_kernels", lambda context, platform: True)
        monkeypatch.setattr(launch, "capability", lambda: (9, 0))


def operands(first: str, second: str, m: int = 48, n: int = 40, k: int = 256, lead: tuple[int, ...] = ()) -> list[ScaledTensor]:
    """a and b.mT, as NumPy's tensors."""
    made = np.random.default_rng(0)
    a, b = (made.standard_normal((*lead, rows, k)).astype(np.float32) for rows in (m, n))
    return [breccia.cast(a, first), breccia.cast(b, second)]


def in_torch(op: str, a: ScaledTensor, b: ScaledTensor, *added: Any, **options: Any) -> Any:
    device = "cuda" if ON_GPU else "cpu"
    first, second = (moved(st, "torch").to(device) for st in (a, b))
    more = [torch.from_numpy(np.asarray(x)).to(device) for x in added]
    return getattr(breccia, op)(first, second.mT, *more, **options).float().cpu().numpy()


def compiled(function: Any, *arguments: Any) -> Any:
    """The result of a function that calls torch's kernels, in FP32."""
    made = jax.jit(function).lower(*arguments).compile()
    assert TARGET in made.as_text()
    return np.asarray(made(*arguments).astype(jnp.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("first", PAIRS)
def test_products_are_those_of_torch(first: str, dtype: str) -> None:
    a, b = operands(first, PAIRS[first])
    x, y = (moved(st, "jax") for st in (a, b))
    found = compiled(lambda a, b: foreign.matmul(a, b.mT, product_options(dtype)), x, y)
    assert np.array_equal(found, in_torch("matmul", a, b, out_dtype=dtype))
    bias = np.linspace(-3, 3, 40, dtype=np.float32)
    found = compiled(lambda a, b, c: foreign.matmul(a, b.mT, product_options(dtype, c)), x, y, bias)
    given = torch.from_numpy(bias).to("cuda" if ON_GPU else "cpu")
    assert np.array_equal(found, in_torch("matmul", a, b, out_dtype=dtype, bias=given))


def test_weights_in_blocks_may_come_first() -> None:
    a, b = operands("fp8_block,block_m=128", "fp8_block")
    found = compiled(lambda a, b: foreign.matmul(a, b.mT), *(moved(st, "jax") for st in (a, b)))
    assert np.array_equal(found, in_torch("matmul", b, a).T)


def test_every_scale_of_mx_formats_is_read() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = np.ldexp(1.0, codes[:255].astype(np.int32) - 127).astype(np.float32)
    found = np.asarray(foreign.powers(jnp.asarray(codes).view(jnp.float8_e8m0fnu)))
    assert np.array_equal(found[:255], values) and np.isnan(found[255])


def test_batches_and_groups_are_multiplied() -> None:
    a, b = operands("fp8_block", "fp8_block,block_m=128", lead=(3,))
    found = compiled(lambda a, b: foreign.matmul(a, b.mT), *(moved(st, "jax") for st in (a, b)))
    assert found.shape == (3, 48, 40) and np.array_equal(found, in_torch("matmul", a, b))
    ends = np.array([16, 16, 48], np.int32)
    rows = a[0]
    found = compiled(lambda a, b, o: foreign.grouped_matmul(a, b.mT, o), moved(rows, "jax"), moved(b, "jax"), ends)
    assert np.array_equal(found, in_torch("grouped_matmul", rows, b, ends))


def test_repeated_calls_take_other_buffers() -> None:
    pairs = [operands("fp8_current", "fp8_current", m=rows) for rows in (48, 48, 48)]
    product = jax.jit(lambda a, b: foreign.matmul(a, b.mT))
    for a, b in pairs * 2:
        scaled = breccia.cast(breccia.dequantize(a) * 2, "fp8_current")
        for each in (a, scaled):
            found = np.asarray(product(moved(each, "jax"), moved(b, "jax")))
            assert np.array_equal(found, in_torch("matmul", each, b))


def within_the_bound(found: Any, a: ScaledTensor, b: ScaledTensor, fp8: bool) -> None:
    """The bound of docs/spec/numerics.md, section 9, for FP32 results. fp8: of tensor cores."""
    x, y = (breccia.dequantize(st).astype(np.float64) for st in (a, b))
    exact, size = x @ y.swapaxes(-1, -2), np.abs(x) @ np.abs(y).swapaxes(-1, -2)
    k = x.shape[-1]
    assert (np.abs(np.asarray(found, np.float64) - exact) <= bounds.accumulated(size, k, k, fp8)).all()


def test_products_are_within_the_bound() -> None:
    a, b = operands("fp8_block", "fp8_block,block_m=128")
    product = compiled(lambda a, b: foreign.matmul(a, b.mT), *(moved(st, "jax") for st in (a, b)))
    within_the_bound(product, a, b, ON_GPU)


def test_other_operands_go_to_the_generic_algorithm() -> None:
    a, b = operands("fp8_current", "fp8_current")  # NumPy's
    within_the_bound(foreign.matmul(a, b.mT), a, b, False)
    with pytest.raises(breccia.ShapeError, match="matmul shape mismatch"):
        foreign.matmul(moved(a, "jax"), moved(b, "jax"))


def test_batches_of_vmap_go_to_the_generic_algorithm() -> None:
    a, b = operands("fp8_block", "fp8_block", lead=(3,))
    x, y = (moved(st, "jax") for st in (a, b))
    within_the_bound(jax.vmap(lambda a, b: foreign.matmul(a, b.mT))(x, y), a, b, False)


def test_errors_of_torch_end_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands("fp8_current", "fp8_current")

    def failing(self: Enqueued, addresses: tuple[int, ...], stream: int | None) -> None:
        raise breccia.KernelError("planted")

    monkeypatch.setattr(Enqueued, "__call__", failing)
    with pytest.raises(Exception, match="KernelError'>: planted"):
        np.asarray(jax.jit(lambda a, b: foreign.matmul(a, b.mT))(moved(a, "jax"), moved(b, "jax")))


def test_few_lists_of_addresses_are_remembered() -> None:
    a, b = operands("fp8_current", "fp8_current")
    scaled = [(Metadata.of(st), [(st.data.shape, "float8_e4m3fn"), (st.scale.shape, "float32")]) for st in (a, b)]
    product = Enqueued("matmul", scaled, [], (48, 40), "float32")
    out = [np.zeros((48, 40), np.float32) for _ in range(140)]
    parts = [np.ascontiguousarray(part) for st in (a, b) for part in (st.data, st.scale)]
    for one in out:
        product(tuple(x.ctypes.data for x in (*parts, one)), None)
    assert len(product._known) == 128
    expected = breccia.matmul(moved(a, "torch"), moved(b, "torch").mT).numpy()
    assert all(np.array_equal(one, expected) for one in out)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans.targets, "installed", lambda module: module != "breccia_native.xla_calls")
    assert "breccia-native is not installed" in (plans.available_to_jax(Device("cuda", (9, 0))) or "")


def test_later_versions_of_jax_triton_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.targets, "installed", lambda module: True)
    for version, refused in (("0.3.1", False), ("0.4.1", True)):
        monkeypatch.setattr(availability, "version", lambda name, version=version: version)
        why = availability.available_to_jax(Device("cuda", (9, 0)))
        assert (why is not None) == refused
    assert why is not None and why.startswith("jax-triton 0.4.1 passes operands in another way; ")


@pytest.mark.skipif(not ON_GPU, reason="JAX has no GPU here")
def test_the_kernel_is_chosen_and_read_from_the_cache_on_disk(tmp_path: Any) -> None:
    text = f"""
import jax, breccia
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
x = jax.random.normal(jax.random.key(0), (64, 256))
a, b = breccia.cast(x, "fp8_block"), breccia.cast(x, "fp8_block,block_m=128")
print(breccia.explain("matmul", a, b.mT).winner.name)
print(float(abs(jax.jit(lambda a, b: breccia.matmul(a, b.mT))(a, b)).sum()))
"""
    run = [sys.executable, "-c", text]
    first, second = (subprocess.run(run, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first == second and first.startswith("cuda.jax.fp8_matmul\n")
