"""Products of JAX by torch's kernels: on a GPU where JAX has one, elsewhere in the host's memory.

On a GPU expected bits are those of the same op on tensors of torch with the same bytes, whose kernel is the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
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
import breccia_jax  # noqa: E402
from breccia import Device, ScaledTensor  # noqa: E402
from breccia.backend import Metadata, product_options, targets  # noqa: E402
from breccia.kernels import bounds  # noqa: E402
from breccia_jax import contraction, ops, primitive  # noqa: E402
from breccia_jax.weights import quantized  # noqa: E402
from breccia_triton import availability  # noqa: E402
from breccia_triton.gemm.bf16 import plans as through_bf16  # noqa: E402
from breccia_triton.gemm.fp8 import plans  # noqa: E402
from breccia_triton.gemm.weight_only import plans as stored_weights  # noqa: E402
from breccia_triton.gemm.weight_only import problem  # noqa: E402
from breccia_triton.jax import foreign, launch  # noqa: E402
from breccia_triton.jax.calls import components  # noqa: E402
from breccia_triton.jax.foreign import TARGET  # noqa: E402
from breccia_triton.plugin import breccia_kernels  # noqa: E402

ON_GPU = jax.default_backend() == "gpu"
TORCH = "cuda" if ON_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
#: The storage of weights that kernels decode in registers.
STORAGE = "mma_16x128"
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
        for each in (launch, foreign):
            monkeypatch.setattr(each, "capability", lambda: (9, 0))


def operands(first: str, second: str, lead: tuple[int, ...] = (), seed: int = 0) -> list[ScaledTensor]:
    """a and b.mT, as NumPy's tensors."""
    m, n, k = 48, 40, 256
    generator = np.random.default_rng(seed)
    a, b = (generator.standard_normal((*lead, rows, k)).astype(np.float32) for rows in (m, n))
    return [breccia.cast(a, first), breccia.cast(b, second)]


def in_torch(op: str, a: ScaledTensor, b: ScaledTensor, *added: Any, **options: Any) -> Any:
    first, second = (moved(st, "torch").to(TORCH) for st in (a, b))
    more = [torch.from_numpy(np.asarray(x)).to(TORCH) for x in added]
    return getattr(breccia, op)(first, second.mT, *more, **options).float().cpu().numpy()


def agree(product: Any, expected: Any, dtype: str = "float32") -> None:
    """Bits on a GPU; elsewhere sums of another order.

    Each is within the bound of FP32 sums, (K + 1) 2^-24 times a sum of magnitudes, which is below 512; BF16 may round it apart.
    """
    apart = 0.0 if ON_GPU else 2 * 257 * 2.0**-24 * 512
    relative = 2.0**-7 if dtype == "bfloat16" and not ON_GPU else 0.0
    assert product.shape == expected.shape and (np.abs(product - expected) <= apart + relative * np.abs(expected)).all()


def compiled(function: Any, *arguments: Any) -> Any:
    """The result of a function that calls torch's kernels, in FP32."""
    executable = jax.jit(function).lower(*arguments).compile()
    assert TARGET in executable.as_text()
    return np.asarray(executable(*arguments).astype(jnp.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("first", PAIRS)
def test_products_are_those_of_torch(first: str, dtype: str) -> None:
    a, b = operands(first, PAIRS[first])
    x, y = (moved(st, "jax") for st in (a, b))
    product = compiled(lambda a, b: foreign.matmul(a, b.mT, product_options(dtype)), x, y)
    agree(product, in_torch("matmul", a, b, out_dtype=dtype), dtype)
    bias = np.linspace(-3, 3, 40, dtype=np.float32)
    product = compiled(lambda a, b, c: foreign.matmul(a, b.mT, product_options(dtype, c)), x, y, bias)
    same_bias = torch.from_numpy(bias).to(TORCH)
    agree(product, in_torch("matmul", a, b, out_dtype=dtype, bias=same_bias), dtype)


def test_weights_in_blocks_may_come_first() -> None:
    a, b = operands("fp8_block,block_m=128", "fp8_block")
    product = compiled(lambda a, b: foreign.matmul(a, b.mT), *(moved(st, "jax") for st in (a, b)))
    agree(product, in_torch("matmul", b, a).T)


def test_batches_and_groups_are_multiplied() -> None:
    a, b = operands("fp8_block", "fp8_block,block_m=128", lead=(3,))
    product = compiled(lambda a, b: foreign.matmul(a, b.mT), *(moved(st, "jax") for st in (a, b)))
    agree(product, in_torch("matmul", a, b))
    ends = np.array([16, 16, 48], np.int32)
    rows = a[0]
    product = compiled(lambda a, b, o: foreign.grouped_matmul(a, b.mT, o), moved(rows, "jax"), moved(b, "jax"), ends)
    agree(product, in_torch("grouped_matmul", rows, b, ends))


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("spec", ["int4,signed=false,symmetric=false", "nvfp4", "mxfp4", "int8", "mxfp8"])
def test_products_through_bf16_are_those_of_torch(spec: str, added: bool) -> None:
    """Of BF16 arrays and weights along the axis that layers of JAX keep them, with each component; and of two tensors."""
    generator = np.random.default_rng(1)
    x, w = (generator.standard_normal(shape).astype(np.float32) for shape in ((48, 640), (640, 40)))
    b, numbers = breccia.cast(w, spec, axis=-2), jnp.asarray(x, jnp.bfloat16)
    a = breccia.cast(x, spec) if spec == "mxfp8" else None
    bias = [np.linspace(-3, 3, 40, dtype=np.float32)] if added else []
    first = numbers if a is None else moved(a, "jax")

    def multiplied(a: Any, b: Any, *bias: Any) -> Any:
        return foreign.matmul_bf16(a, b, product_options("float32", *bias))

    product = compiled(multiplied, first, moved(b, "jax"), *bias)
    left = np.asarray(numbers, np.float32) if a is None else breccia.dequantize(a)
    within_the_bound(product, left, breccia.dequantize(b).T, False, *bias)
    if ON_GPU:
        left = torch.from_numpy(x).to("cuda", torch.bfloat16) if a is None else moved(a, "torch").to("cuda")
        same_bias = torch.from_numpy(bias[0]).to("cuda") if bias else None
        expected = breccia.matmul(left, moved(b, "torch").to("cuda"), bias=same_bias, prefer="triton.matmul_bf16")
        assert np.array_equal(product, expected.cpu().numpy())


def test_repeated_calls_read_what_their_buffers_hold_then() -> None:
    product = jax.jit(lambda a, b: foreign.matmul(a, b.mT))
    pairs = [operands("fp8_current", "fp8_current", seed=seed) for seed in range(4)]
    held = [[moved(st, "jax") for st in pair] for pair in pairs]  # at addresses of their own; XLA may copy them to one
    for (a, b), arrays in [*zip(pairs, held, strict=True)] * 2:
        agree(np.asarray(product(*arrays)), in_torch("matmul", a, b))


def within_the_bound(product: Any, a: Any, b: Any, fp8: bool, bias: Any = 0.0) -> None:
    """The bound of docs/spec/numerics.md, section 9, for FP32 results of a by b.mT. fp8: of tensor cores."""
    x, y = ((breccia.dequantize(x) if isinstance(x, ScaledTensor) else x).astype(np.float64) for x in (a, b))
    exact, size = x @ y.swapaxes(-1, -2) + bias, np.abs(x) @ np.abs(y).swapaxes(-1, -2) + np.abs(bias)
    k = x.shape[-1]
    assert (np.abs(np.asarray(product, np.float64) - exact) <= bounds.accumulated(size, k + 1, k, fp8)).all()


@pytest.mark.parametrize("first", PAIRS)
def test_products_are_within_the_bound(first: str) -> None:
    a, b = operands(first, PAIRS[first])
    x, y = (moved(st, "jax") for st in (a, b))
    within_the_bound(compiled(lambda a, b: foreign.matmul(a, b.mT), x, y), a, b, ON_GPU)
    bias = np.linspace(-3, 3, 40, dtype=np.float32)
    product = compiled(lambda a, b, c: foreign.matmul(a, b.mT, product_options("float32", c)), x, y, bias)
    within_the_bound(product, a, b, ON_GPU, bias)


def test_other_operands_go_to_the_generic_algorithm() -> None:
    a, b = operands("fp8_current", "fp8_current")  # NumPy's
    within_the_bound(foreign.matmul(a, b.mT), a, b, False)
    with pytest.raises(breccia.ShapeError, match="matmul shape mismatch"):
        foreign.matmul(moved(a, "jax"), moved(b, "jax"))


@pytest.mark.parametrize("mapped", [(0, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("first", PAIRS)
def test_a_batch_of_vmap_is_one_product(first: str, mapped: tuple[int | None, int | None]) -> None:
    """Each example has its own scales, of tensors too."""
    each = [operands(first, PAIRS[first], seed=seed) for seed in range(3)]
    tensors: list[list[ScaledTensor]] = []  # of a and of b: those of all examples, or the one that they share
    for operand, axis in zip(zip(*each, strict=True), mapped, strict=True):
        tensors.append(list(operand) if axis == 0 else [operand[0]] * 3)
    x, y = (
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *[moved(st, "jax") for st in some])
        if axis == 0
        else moved(some[0], "jax")
        for some, axis in zip(tensors, mapped, strict=True)
    )
    product = compiled(jax.vmap(lambda a, b: foreign.matmul(a, b.mT), in_axes=mapped), x, y)
    agree(product, np.stack([in_torch("matmul", a, b) for a, b in zip(*tensors, strict=True)]))


@pytest.mark.parametrize(
    ("spec", "mapped", "one"),
    [("mxfp8", (0, 0), True), ("mxfp8", (0, None), True), ("nvfp4", (0, None), False), ("nvfp4", (None, 0), False)],
)
def test_batches_through_bf16_have_no_scale_of_the_tensor(spec: str, mapped: tuple[int | None, int | None], one: bool) -> None:
    """Each example of NVFP4 has a global scale of its own."""
    a, b = (
        jax.vmap(lambda x: breccia.cast(x, spec))(
            jnp.asarray(np.random.default_rng(rows).standard_normal((3, rows, 256)), jnp.float32)
        )
        for rows in (48, 40)
    )
    a, b = (jax.tree.map(lambda leaf: leaf[0], st) if axis is None else st for st, axis in zip((a, b), mapped, strict=True))
    product = jax.jit(jax.vmap(lambda a, b: foreign.matmul_bf16(a, b.mT), in_axes=mapped))
    assert (TARGET in product.lower(a, b).compile().as_text()) == one
    x, y = (
        np.stack([np.asarray(breccia.dequantize(jax.tree.map(lambda leaf, n=n: leaf[n], st))) for n in range(3)])
        if axis == 0
        else np.asarray(breccia.dequantize(st))
        for st, axis in zip((a, b), mapped, strict=True)
    )
    within_the_bound(product(a, b), x, y, False)


def test_batches_that_no_call_of_the_kernel_has_go_to_the_generic_algorithm() -> None:
    """A batch of biases; leading axes that do not broadcast; groups."""
    a, b = operands("fp8_block", "fp8_block,block_m=128", lead=(3,))
    x, y = (moved(st, "jax") for st in (a, b))
    biases = np.linspace(-3, 3, 3 * 40, dtype=np.float32).reshape(3, 40)
    with_bias = jax.jit(jax.vmap(lambda a, b, c: foreign.matmul(a, b.mT, product_options("float32", c))))
    assert TARGET not in with_bias.lower(x, y, biases).compile().as_text()
    within_the_bound(with_bias(x, y, biases), a, b, False, biases[:, None])
    shared = jax.jit(jax.vmap(lambda a, b: foreign.matmul(a, b.mT), in_axes=(0, None)))
    assert TARGET not in shared.lower(x, y).compile().as_text()
    within_the_bound(shared(x, y), breccia.dequantize(a)[:, None], b, False)
    ends = np.array([[16, 16, 48]] * 3, np.int32)
    grouped = jax.jit(jax.vmap(lambda a, b, o: foreign.grouped_matmul(a, b.mT, o), in_axes=(0, None, 0)))
    assert TARGET not in grouped.lower(x, y, ends).compile().as_text()
    expected = np.stack([in_torch("grouped_matmul", a[i], b, ends[i]) for i in range(3)])
    assert np.abs(np.asarray(grouped(x, y, ends)) - expected).max() <= 2**-7 * np.abs(expected).max()


#: Weights that the kernels decode in registers: with and without zero-points and a scale of the tensor.
WEIGHTS = ("int4", "int4,signed=false,symmetric=false,group_size=32", "nvfp4", "mxfp4", "int8", "fp8_block,block_m=128")


def stored(w: ScaledTensor, framework: str) -> Any:
    return moved(w, framework).to_storage(STORAGE)


def weight_and_rows(spec: str, rows: int, k: int = 256, lead: tuple[int, ...] = ()) -> tuple[ScaledTensor, Any]:
    """(A weight of 40 rows, BF16 numbers), in NumPy."""
    generator = np.random.default_rng(rows)
    x, w = (generator.standard_normal(shape).astype(np.float32) for shape in ((rows, k), (*lead, 40, k)))
    return breccia.cast(w, spec), np.asarray(jnp.asarray(x, jnp.bfloat16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 48, 2048])  # decoded in registers by two kernels, and to memory
@pytest.mark.parametrize("spec", WEIGHTS)
def test_products_by_stored_weights_are_those_of_torch(spec: str, rows: int, dtype: str) -> None:
    """BF16 results without a bias, and FP32 ones with one."""
    w, x = weight_and_rows(spec, rows, 256 if rows > 1 else 260)  # rows of 260 numbers are copied
    added = [np.linspace(-3, 3, 40, dtype=np.float32)] if dtype == "float32" else []

    def multiplied(x: Any, w: Any, *bias: Any) -> Any:
        return foreign.weight_only_matmul(x, w.mT, product_options(dtype, *bias))

    product = compiled(multiplied, x, stored(w, "jax"), *added)
    rows_of_torch = torch.from_numpy(x.astype(np.float32)).to(TORCH, torch.bfloat16)
    bias = torch.from_numpy(added[0]).to(TORCH) if added else None
    expected = breccia.matmul(rows_of_torch, stored(w, "torch").to(TORCH).mT, out_dtype=dtype, bias=bias)
    agree(product, expected.float().cpu().numpy(), dtype)
    if added:
        within_the_bound(product, x.astype(np.float32), w, ON_GPU, added[0])


def test_zero_points_of_other_dtypes_go_to_the_generic_algorithm() -> None:
    w, x = weight_and_rows("int4,signed=false,symmetric=false", 16)
    plain = moved(w, "jax")
    wide = ScaledTensor(
        plain.data, plain.scale, plain.recipe, plain.layout, zero_point=plain.zero_point.astype(jnp.int32), shape=plain.shape
    ).to_storage(STORAGE)
    product = jax.jit(lambda x, w: foreign.weight_only_matmul(x, w.mT))
    assert TARGET not in product.lower(x, wide).compile().as_text()
    within_the_bound(product(x, wide), x.astype(np.float32), w, False)


def test_groups_of_rows_by_stored_weights_are_those_of_torch() -> None:
    w, x = weight_and_rows("int4", 48, lead=(3,))
    ends = np.array([16, 16, 48], np.int32)
    product = compiled(lambda x, w, o: foreign.grouped_matmul(x, w.mT, o), x, stored(w, "jax"), ends)
    rows = torch.from_numpy(x.astype(np.float32)).to(TORCH, torch.bfloat16)
    expected = breccia.grouped_matmul(rows, stored(w, "torch").to(TORCH).mT, torch.from_numpy(ends).to(TORCH))
    agree(product, expected.cpu().numpy())


def test_a_batch_of_vmap_shares_a_stored_weight() -> None:
    w, x = weight_and_rows("int4", 48)
    weight = stored(w, "jax")
    batch = x.reshape(3, 16, -1)
    product = compiled(jax.vmap(lambda x, w: foreign.weight_only_matmul(x, w.mT), in_axes=(0, None)), batch, weight)
    agree(product, compiled(lambda x, w: foreign.weight_only_matmul(x, w.mT), batch, weight))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), weight, weight, weight)
    each = jax.jit(jax.vmap(lambda x, w: foreign.weight_only_matmul(x, w.mT)))
    assert TARGET not in each.lower(batch, stacked).compile().as_text()


@pytest.mark.parametrize("spec", ["int4", "nvfp4"])
def test_parameters_in_the_storage_of_products_are_multiplied_by_codes(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `to_storage` chooses on a GPU: as layers multiply, and under `scan` and `vmap`."""
    if not ON_GPU:  # no kernel of CPUs reads the storage
        monkeypatch.setattr(contraction.cpu, "multiplies", lambda x, b: b.storage == STORAGE)

        def by_codes(a: Any, b: Any, out_dtype: Any) -> Any:
            return foreign.weight_only_matmul(a, b, product_options(jnp.dtype(out_dtype).name))

        monkeypatch.setattr(contraction, "breccia", SimpleNamespace(matmul=by_codes))
    rows, kernel = (jnp.asarray(np.random.default_rng(n).standard_normal((n, 256)), jnp.bfloat16) for n in (4, 256))
    weight = breccia_jax.to_storage(quantized(kernel, breccia.recipe(spec), (1,)), "auto" if ON_GPU else STORAGE)
    assert weight.tensor.storage == STORAGE and weight.shape == (256, 256)

    def multiplied(weight: Any, x: Any) -> Any:
        return (weight @ x) / 16

    def same(product: Any, other: Any) -> None:
        """Bits on a GPU; elsewhere FP32 sums of another order, whose BF16 may be the next one in each of two products."""
        assert np.array_equal(product, other) if ON_GPU else np.abs(product - other).max() <= 2.0**-6 * np.abs(other).max()

    y, w = compiled(multiplied, weight, rows.T), np.asarray(breccia.dequantize(weight.tensor), np.float64)
    x = np.asarray(rows, np.float64).T
    exact, size = w @ x / 16, np.abs(w) @ np.abs(x) / 16
    assert (np.abs(y - exact) <= bounds.accumulated(size, 257, 256, ON_GPU) + 2.0**-8 * np.abs(exact)).all()
    layers = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), weight)

    def scanned(layers: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, layer: (multiplied(layer, x), None), x, layers)[0]

    twice = compiled(lambda w, x: multiplied(w, multiplied(w, x)), weight, rows[0])
    same(compiled(scanned, layers, rows[0]), twice)
    same(compiled(jax.vmap(multiplied, in_axes=(None, 0)), weight, rows), y.T)


def test_weights_of_xla_count_as_written_just_now() -> None:
    """The kernel ahead may have written them: XLA's buffers return to the same addresses."""
    memory = torch.zeros(4, 4, 4224, dtype=torch.uint8)
    st = stored(weight_and_rows("int4", 1)[0], "torch")
    text = json.dumps(["matmul", [[None, [["x", [1, 256], "bfloat16"]]], [Metadata.of(st).to_json(), described(st)]],
                       [], [1, 40], "bfloat16"])  # fmt: skip
    for _ in range(2):
        _, _, weight, _, _ = foreign._tensors(text, (memory.data_ptr(),) * 4, "cpu")
        assert not problem.stored(weight)[2]


def described(st: ScaledTensor) -> list[Any]:
    return [[name, list(a.shape), str(a.dtype).removeprefix("torch.")] for name, a in components(st).items()]


def test_devices_without_the_instructions_have_the_generic_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (launch, foreign):
        monkeypatch.setattr(each, "capability", lambda: (8, 0))
    a, b = (moved(st, "jax") for st in operands("fp8_block", "fp8_block"))
    assert TARGET not in jax.jit(lambda a, b: foreign.matmul(a, b.mT)).lower(a, b).compile().as_text()


def test_compute_capabilities_are_read_from_devices_of_jax() -> None:
    def of(platform: str, text: Any) -> Any:
        return ops.capability(SimpleNamespace(platform=platform, compute_capability=text))

    assert of("gpu", "9.0") == (9, 0) and of("gpu", "12.1") == (12, 1)
    assert of("gpu", "gfx942") is None and of("cpu", None) is None and ops.capability("cpu") is None


class Fake:
    """An executable: it notes the stream, and whether that is torch's current one."""

    def __init__(self, scratch: bool, calls: list[Any], current: list[Any]) -> None:
        self.scratch, self.calls, self.current = scratch, calls, current

    def enqueue(self, stream: int, a: Any, b: Any, added: Any, out: Any) -> None:
        self.calls.append((stream, list(self.current), added.dtype))


@pytest.mark.parametrize(
    ("op", "scratch"),
    [("matmul", False), ("matmul", True), ("grouped_matmul", False), ("grouped_matmul", True), (foreign.THROUGH_BF16, False)],
)
@pytest.mark.parametrize("weights", [False, True])
def test_executables_run_on_the_stream_of_xla(op: str, scratch: bool, weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    current: list[Any] = []

    @contextmanager
    def entered(stream: int, device: Any) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def prepared(a: Any, b: Any, bias: Any, dtype: str, offsets: Any = None) -> Fake:
        assert current == [7] and dtype == "float32"
        assert (bias is None) == (op == "grouped_matmul") == (offsets is not None)
        return Fake(scratch, calls, current)

    monkeypatch.setattr(foreign, "_current", entered)
    a, b = (moved(st, "torch") for st in operands("fp8_current", "fp8_current"))
    if weights and op != foreign.THROUGH_BF16:
        b = b.to_storage(STORAGE)

        def prepared_weight(a: Any, b: Any, added: Any, dtype: str, of_groups: bool) -> Fake:
            return prepared(a, b, None, dtype, added) if of_groups else prepared(a, b, added, dtype)

        monkeypatch.setattr(foreign.weight_only, "prepared", prepared_weight)
    else:
        monkeypatch.setattr(foreign.fp8, "prepared", prepared)
        monkeypatch.setattr(foreign.bf16, "prepared", prepared)
    added = torch.tensor([16, 48], dtype=torch.int32) if op == "grouped_matmul" else torch.zeros(40)
    enqueue = foreign._on_device(7, op, a, b.mT, added, torch.empty(48, 40))
    enqueue(7)
    enqueue(9)
    allocates = scratch or op == foreign.THROUGH_BF16  # memory of torch's allocator
    assert calls == [(stream, [stream] * allocates, added.dtype) for stream in (7, 9)]


def test_a_product_without_a_kernel_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "_current", lambda stream, device: nullcontext())
    monkeypatch.setattr(foreign.bf16, "prepared", lambda *arguments: "planted")
    a, b = (moved(st, "torch") for st in operands("mxfp8", "mxfp8"))
    with pytest.raises(breccia.KernelError, match="through BF16 that has no kernel: planted. Prefer another kernel."):
        foreign._on_device(7, foreign.THROUGH_BF16, a, b.mT, None, torch.empty(48, 40))


def test_products_through_bf16_are_prepared_once_for_equal_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(foreign, "_current", lambda stream, device: nullcontext())
    monkeypatch.setattr(foreign.bf16, "_calls", foreign.Remembered())
    monkeypatch.setattr(foreign.bf16, "executable", lambda *arguments: made.append(arguments) or Fake(False, [], []))
    for seed in range(3):
        a, b = (moved(st, "torch") for st in operands("mxfp8", "mxfp8", seed=seed))
        foreign._on_device(7, foreign.THROUGH_BF16, a, b.mT, None, torch.empty(48, 40))
    assert len(made) == 1


@dataclass(frozen=True)
class Undeclared(breccia.MXFP8BlockScaling):
    name = "undeclared"


def test_recipes_of_no_plug_in_are_refused_by_name() -> None:
    known, other = (SimpleNamespace(recipe=recipe) for recipe in (breccia.recipe("mxfp8"), Undeclared()))
    array: Any = SimpleNamespace(recipe=None)
    assert availability.refused_by_xla(SimpleNamespace(a=array, b=known)) is None  # pyright: ignore
    for accepts in (
        plans.accepts_in_jax,
        plans.accepts_grouped_in_jax,
        through_bf16.accepts_in_jax,
        stored_weights.accepts_in_jax,
    ):
        why = accepts(SimpleNamespace(a=known, b=other))  # pyright: ignore
        assert why is not None and why.startswith("b: XLA keeps recipes as text, and cannot read this one: ")
        assert "undeclared" in why


def chosen(first: str | None, second: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel with the least score for a product of BF16 or quantized rows by a weight of 8192x8192 on an H200."""

    def described(spec: str | None, shape: tuple[int, int], axis: int) -> Any:
        if spec is None:
            return SimpleNamespace(
                recipe=None, shape=shape, dtype="bfloat16", layout=None, storage="plain", empty=False, axis=-1
            )
        st = breccia.cast(np.zeros((256, 256), np.float32), spec, axis=axis)
        facts = {"storage": "plain", "dtype": None, "empty": False, "axis": axis}
        return SimpleNamespace(recipe=st.recipe, layout=st.layout, shape=shape, **facts)

    for each in (plans, through_bf16):
        monkeypatch.setattr(each, "device_name", lambda device: "NVIDIA H200")
    options = {"out_dtype": "bfloat16"}
    call: Any = SimpleNamespace(op="matmul", framework="jax", device=Device("cuda", 0, (9, 0)), bias=None)
    call.a, call.b = described(first, (rows, 8192), -1), described(second, (8192, 8192), -2)
    call.option = lambda name, default=None: options.get(name, default)
    scores: dict[str, float] = {}
    for kernel in breccia_kernels():
        if (kernel.op, kernel.framework) == ("matmul", "jax") and targets.load(kernel.accepts)(call) is None:
            scores[kernel.name] = targets.load(kernel.score)(call)
    return min(scores, key=scores.__getitem__)


@pytest.mark.parametrize(
    ("first", "second", "few", "some", "many"),
    [
        ("mxfp8", "mxfp8", "cuda.jax.fp8_matmul", "cuda.jax.fp8_matmul", "triton.jax.matmul_bf16"),
        ("fp8_block", "fp8_block,block_m=128", "cuda.jax.fp8_matmul", "cuda.jax.fp8_matmul", "cuda.jax.fp8_matmul"),
        *((None, spec, "triton.jax.matmul", *["triton.jax.matmul_bf16"] * 2) for spec in ("int4", "int8", "nvfp4")),
    ],
)
def test_the_kernel_that_was_measured_to_be_fastest_is_chosen(
    first: str | None, second: str, few: str, some: str, many: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in docs/measured/gpu-jax.md."""
    assert [chosen(first, second, rows, monkeypatch) for rows in (16, 512, 4096)] == [few, some, many]


def test_a_call_without_its_stream_is_refused() -> None:
    with pytest.raises(breccia.KernelError, match="gives a product on CUDA a stream"):
        foreign._enqueue(False, "[]", (), (), None)


def test_errors_of_torch_end_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands("fp8_current", "fp8_current")

    def failing(*arguments: Any) -> Any:
        raise breccia.KernelError("planted")

    foreign._known.clear()
    monkeypatch.setattr(foreign, "_tensors", failing)
    with pytest.raises(Exception, match="KernelError: planted"):
        np.asarray(jax.jit(lambda a, b: foreign.matmul(a, b.mT))(moved(a, "jax"), moved(b, "jax")))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "it has instructions of compute capability 9.0" in (plans.available_to_jax(Device("cuda", 0, (8, 0))) or "")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert plans.available_to_jax(Device("cuda", 0, (9, 0))) == "this torch is built without CUDA"
    assert through_bf16.available_to_jax(Device("cuda", 0, (9, 0))) == "this torch is built without CUDA"
    assert "those of compute capability 9.0 (Hopper)" in (stored_weights.available_to_jax(Device("cuda", 0, (8, 0))) or "")
    monkeypatch.setattr(availability.targets, "installed", lambda module: module != "breccia_native.xla_calls")
    for each in (plans, through_bf16, stored_weights):
        assert "breccia-native is not installed" in (each.available_to_jax(Device("cuda", 0, (9, 0))) or "")


def test_later_versions_of_jax_triton_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.targets, "installed", lambda module: True)
    why = None
    for version, refused in (("0.3.1", False), ("", False), ("0.4rc1", True), ("0.4.1", True)):
        monkeypatch.setattr(availability, "_version", lambda name, version=version: version)
        why = availability.available_to_jax(Device("cuda", 0, (9, 0)))
        assert (why is not None) == refused
    assert why == "it needs jax-triton below 0.4, and 0.4.1 is installed; pip install 'jax-triton<0.4'"


@pytest.mark.skipif(not ON_GPU, reason="JAX has no GPU here")
def test_the_kernel_is_chosen_and_read_from_the_cache_on_disk(tmp_path: Any) -> None:
    text = f"""
import jax, breccia
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
x = jax.random.normal(jax.random.key(0), (64, 256))
a, b = breccia.cast(x, "fp8_block"), breccia.cast(x, "fp8_block,block_m=128")
product = jax.jit(lambda a, b: breccia.matmul(a, b.mT))
print(breccia.explain("matmul", a, b.mT).winner.name, {TARGET!r} in product.lower(a, b).compile().as_text())
exact = breccia.dequantize(a) @ breccia.dequantize(b).T
print(float(abs(product(a, b) - exact).max() / abs(exact).max()) < 2**-8)
"""
    cached: list[set[str]] = []
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
        assert run.stdout == "cuda.jax.fp8_matmul True\nTrue\n"
        cached.append({path.name for path in tmp_path.iterdir() if not path.name.endswith("-atime")})
    assert cached[0] and cached[0] == cached[1]  # the second process has compiled nothing anew
