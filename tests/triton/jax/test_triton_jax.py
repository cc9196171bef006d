"""The Triton kernels on JAX arrays: in Triton's interpreter at small sizes, compiled for GPUs that are not here, and on a GPU.

Expected bytes come from the generic algorithm on NumPy arrays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from fresh import printed

jax = pytest.importorskip("jax")
pytest.importorskip("triton")
pytest.importorskip("breccia_triton")
pytest.importorskip("breccia_jax")
torch = pytest.importorskip("torch")  # the interpreter's memory

import jax.numpy as jnp  # noqa: E402
from in_frameworks import moved  # noqa: E402
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec  # noqa: E402
from marks import slow_but  # noqa: E402
from triton_casts import SPECS  # noqa: E402

import breccia  # noqa: E402
from breccia import Device, ScaledTensor  # noqa: E402
from breccia.backend import Call, CastOptions, Described, components, reference  # noqa: E402
from breccia.internal import install  # noqa: E402
from breccia.kernels import bounds  # noqa: E402
from breccia.operations import OPERATIONS  # noqa: E402
from breccia.options import product_options  # noqa: E402
from breccia_jax import primitive  # noqa: E402
from breccia_triton import availability, plugin  # noqa: E402
from breccia_triton.casts import plans  # noqa: E402
from breccia_triton.facts import Hardware  # noqa: E402
from breccia_triton.jax import calls as jax_calls  # noqa: E402
from breccia_triton.jax import launch as jax_launch  # noqa: E402
from breccia_triton.jax import matmul as jax_products  # noqa: E402
from breccia_triton.launch.triton_launch import Launch  # noqa: E402

ON_GPU = jax.default_backend() == "gpu"
if ON_GPU and find_spec("jax_triton") is None:
    pytest.skip("jax-triton is not installed", allow_module_level=True)
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("JAX uses no GPU here, and Triton does not interpret kernels", allow_module_level=True)
pytestmark = [
    pytest.mark.covering(1, 1),  # the interpreter takes seconds for some cases; `make slow` and a GPU run all
    *([pytest.mark.gpu] if ON_GPU else []),  # where there is one, every test runs on it
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.long,  # `make test` runs the kernels on torch tensors
]

#: One recipe of each family of kernels, and one of each kind of scale.
FAMILIES = ["fp8_block", "fp8_current", "fp8_row", "mxfp8", "nvfp4", "mxfp6", "int4,symmetric=false,signed=false,group_size=32"]
#: The kernels are tested with all of SPECS on tensors of torch; JAX only passes them what they take.
EVERY = slow_but(FAMILIES, SPECS)
#: Recipes to decode and to cast into.
CHANGED = ["fp8_block mxfp8", "mxfp4 nvfp4", "nvfp4 fp8_block", "fp8_current fp8_row,fp8_format=E5M2", "nf4 mxfp6"]
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def numbers(shape: tuple[int, ...], seed: int = 0, dtype: Any = np.float32) -> Any:
    """Rows of very different magnitude, and special numbers, as a NumPy array."""
    made = np.random.default_rng(seed)
    x = made.standard_normal(shape) * np.exp2(made.integers(-20, 20, (*shape[:-1], 1)))
    special = [0.0, -0.0, 1e-40, -1e-40, 2.0**-126, np.nan, np.inf, -np.inf, 3.4e38, -3.4e38]
    x.reshape(-1)[made.choice(x.size // 2, len(special), replace=False)] = special
    x[..., -1, :] = 0
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(dtype)


def bits(a: Any) -> Any:
    a = np.asarray(a)
    return a.view(_INTEGERS[a.dtype.itemsize])


def same(found: ScaledTensor, expected: ScaledTensor) -> None:
    """Compare all components byte by byte, and the metadata."""
    a, b = components(found), components(expected)
    assert list(a) == list(b)
    assert (found.layout, found.axis, found.padding) == (expected.layout, expected.axis, expected.padding)
    for part in a:
        x, y = bits(a[part]), bits(b[part])
        assert x.shape == y.shape and np.array_equal(x, y), f"{part}: {np.count_nonzero(x != y)} of {x.size} differ"


def same_values(found: Any, expected: Any) -> None:
    """Compare numbers bit by bit, all NaNs as equal."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    different = (bits(found) != bits(expected)) & ~(np.isnan(found) & np.isnan(expected))
    assert not different.any(), f"{np.count_nonzero(different)} of {different.size} values differ"


def memory(a: Any) -> Any:
    """A copy of a NumPy array as a tensor, which Triton's interpreter takes."""
    a = np.array(a)
    return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) if a.dtype == jnp.bfloat16 else torch.from_numpy(a)


#: A thread of this test's own: XLA's flush subnormals to zero, in NumPy too.
_apart = ThreadPoolExecutor(1)
_apart.submit(int).result()


def interpreted(
    launch: Launch, inputs: Mapping[str, Any], outputs: Mapping[str, Any], zeroed: Collection[str] = (),
    integers: Sequence[int] = (),
) -> dict[str, Any]:  # fmt: skip
    """In place of `launched`: the kernel in Triton's interpreter. Outputs that are not zeroed hold arbitrary bytes before."""
    constants = launch.constants | jax_launch.numbers_of(launch, (*inputs, *outputs), integers)
    given = {name: a for name, a in inputs.items() if name in launch.arguments}

    def run(*arrays: Any) -> list[Any]:
        return _apart.submit(here, *arrays).result()

    def here(*arrays: Any) -> list[Any]:
        made: dict[str, Any] = {}
        for name, a in outputs.items():
            before = np.full((*a.shape, a.dtype.itemsize), 0 if name in zeroed else 0xA5, np.uint8)
            made[name] = memory(before.view(a.dtype)[..., 0])
        values = {name: None for name in launch.function.arg_names} | constants | made
        launch.function[launch.programs](**values | {name: memory(a) for name, a in zip(given, arrays, strict=True)})
        found = [t.view(torch.int16) if t.dtype == torch.bfloat16 else t for t in made.values()]
        return [t.numpy().view(outputs[name].dtype) for name, t in zip(made, found, strict=True)]

    return dict(zip(outputs, jax.pure_callback(run, list(outputs.values()), *given.values()), strict=True))


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that run, in the interpreter where there is no GPU."""
    made: list[str] = []
    run = jax_launch.launched if ON_GPU else interpreted

    def launched(launch: Launch, *arguments: Any) -> Any:
        made.append(launch.function.__name__)
        return run(launch, *arguments)

    monkeypatch.setattr(jax_calls, "launched", launched)
    monkeypatch.setattr(jax_products, "launched", launched)
    if not ON_GPU:
        monkeypatch.setattr(primitive, "runs_kernels", lambda context, platform: True)
        monkeypatch.setattr(jax_launch, "capability", lambda: (9, 0))
        monkeypatch.setattr(jax_launch, "hardware", Hardware)
    return made


def compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function that JAX has not compiled before."""
    return jax.jit(lambda *a: function(*a))(*arguments)


def check(x: Any, spec: str, launches: list[str], generic: bool = False, **options: Any) -> None:
    """The kernel and the generic algorithm write the same; `generic` says whether no kernel runs."""
    recipe, given = breccia.recipe(spec), CastOptions(**options)
    launches.clear()
    found = compiled(lambda x: jax_calls.cast(x, recipe, given), jnp.asarray(x))
    assert bool(launches) != generic
    same(found, reference.cast(x, recipe, given))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", EVERY)
def test_every_recipe_is_cast_bit_for_bit(spec: str, axis: int, launches: list[str]) -> None:
    if not ON_GPU:
        check(numbers((36, 72), seed=1), spec, launches, axis=axis)
        return
    columns = axis == -2 and spec.startswith("int8,symmetric=false")  # whole columns have to fit a tile here
    check(numbers((1030, 784), seed=1), spec, launches, generic=columns, axis=axis)
    check(numbers((3, 256, 384), seed=2, dtype=jnp.bfloat16), spec, launches, axis=axis)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", FAMILIES)
def test_leading_axes_and_halves_are_cast(spec: str, axis: int, dtype: str, launches: list[str]) -> None:
    check(numbers((2, 3, 33, 64), seed=3, dtype=jnp.dtype(dtype)), spec, launches, axis=axis)


@pytest.mark.parametrize("shape", [(7,), (1, 32), (129, 2), (32, 1)])
def test_shapes_of_few_elements_are_cast(shape: tuple[int, ...], launches: list[str]) -> None:
    """Triton compiles an integer argument of 1 as a constant."""
    x = np.linspace(-3, 5, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    check(x, "fp8_current", launches)
    if len(shape) > 1:
        for spec in ("mxfp8", "mxfp4", "nvfp4"):
            check(x, spec, launches)
            check(x, spec, launches, axis=-2)


@pytest.mark.parametrize("spec", ["fp8_block", "nvfp4", "int4,group_size=32"])
def test_stochastic_rounding_draws_the_same_numbers(spec: str, launches: list[str]) -> None:
    recipe, x = breccia.recipe(spec), numbers((2, 33, 64), seed=7)
    check(x, spec, launches, rounding="stochastic", seed=2**40 + 5)

    def drawn(x: Any, seed: Any) -> ScaledTensor:
        return jax_calls.cast(x, recipe, CastOptions(axis=-2, rounding="stochastic", seed=seed))

    for seed in (1, 2**31 + 9):
        expected = reference.cast(x, recipe, CastOptions(axis=-2, rounding="stochastic", seed=seed))
        same(compiled(drawn, jnp.asarray(x), jnp.uint32(seed)), expected)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", ["nvfp4,scale_rule=mse", "int4,group_size=32,scale_rule=mse"])
def test_scales_are_searched_for(spec: str, axis: int, launches: list[str]) -> None:
    x = numbers((36, 72), seed=3)
    check(x, spec, launches, axis=axis)
    weights = np.random.default_rng(4).random(x.shape[axis]).astype(np.float32)
    recipe, given = breccia.recipe(spec), CastOptions(axis=axis, importance=weights)
    launches.clear()
    found = compiled(
        lambda x, w: jax_calls.cast(x, recipe, CastOptions(axis=axis, importance=w)), jnp.asarray(x), jnp.asarray(weights)
    )
    assert launches[-1] == "cast_kernel"
    same(found, reference.cast(x, recipe, given))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", ["fp8_block", "mxfp4", "nvfp4", "fp8_current"])
def test_supplied_scales_are_used_and_faults_marked(spec: str, axis: int, launches: list[str]) -> None:
    x, recipe = numbers((40, 96), seed=8), breccia.recipe(spec)
    made = moved(reference.cast(np.nan_to_num(x, nan=1.0, posinf=2.0, neginf=-2.0), recipe, CastOptions(axis=axis)), "jax")
    supplied = made.scale if made.global_scale is None else made.global_scale
    options = CastOptions(axis=axis)
    found = compiled(lambda x, s: jax_calls.cast(x, recipe, options.replace(scale=s)), jnp.asarray(x), supplied)
    assert launches
    expected = np.asarray(supplied)
    same(found, reference.cast(x, recipe, options.replace(scale=expected if expected.dtype == np.float32 else bits(expected))))


@pytest.mark.parametrize("storage", plugin.STORAGES)
@pytest.mark.parametrize("spec", ["mxfp8", "nvfp4"])
def test_scales_are_written_and_read_in_storages(spec: str, storage: str, launches: list[str]) -> None:
    recipe, x = breccia.recipe(spec), numbers((130, 96), seed=32)
    for axis in (-1, -2):
        options = CastOptions(axis=axis, storage=storage)
        stored = compiled(lambda x, o=options: jax_calls.cast(x, recipe, o), jnp.asarray(x))
        plain = reference.cast(x, recipe, CastOptions(axis=axis))
        same(stored, plain.to_storage(storage))
        same_values(compiled(jax_calls.dequantize, stored), reference.dequantize(plain))
    assert launches.count("dequantize_kernel") == 2 and len(launches) >= 4


def test_other_calls_go_to_the_generic_algorithm(launches: list[str]) -> None:
    check(np.ones((4, 0), np.float32), "mxfp8", launches, generic=True)
    check(numbers((40, 128)), "int4,group_size=31", launches, generic=True)
    with pytest.raises(breccia.UnsupportedError, match="cast takes float32, float16, bfloat16; got int32"):
        jax_calls.cast(jnp.ones((4, 32), jnp.int32), breccia.recipe("mxfp8"))
    with pytest.raises(breccia.NonFiniteError, match="x holds NaN or Inf"):
        jax_calls.cast(jnp.asarray(numbers((33, 64))), breccia.recipe("mxfp8"), CastOptions(nonfinite="raise"))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", EVERY)
def test_every_recipe_is_decoded_bit_for_bit(spec: str, axis: int, launches: list[str]) -> None:
    st = reference.cast(numbers((256, 784) if ON_GPU else (40, 72), seed=21), breccia.recipe(spec), CastOptions(axis=axis))
    for dtype in ("float32", "bfloat16"):
        launches.clear()
        found = compiled(lambda st, d=dtype: jax_calls.dequantize(st, product_options(d)), moved(st, "jax"))
        assert launches == ["dequantize_kernel"]
        expected = reference.dequantize(st)
        same_values(found, expected if dtype == "float32" else expected.astype(jnp.bfloat16))


def factors(shape: tuple[int, ...], seed: int) -> Any:
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    x[..., 0] *= 256
    return x


def check_product(found: Any, a: Any, b: Any, bias: Any = None, fp8: bool = False) -> None:
    """The bound of docs/spec/numerics.md, section 9, and half a unit of BF16 (2^-8) where the result has that dtype."""
    exact, size = (f(a.astype(np.float64)) @ f(b.astype(np.float64)) for f in (np.asarray, np.abs))
    if bias is not None:
        exact, size = exact + bias, size + np.abs(bias)
    k = a.shape[-1]
    bound = bounds.accumulated(size, k + (bias is not None), k, fp8)
    bound = bound + (2.0**-8 * (np.abs(exact) + bound) if found.dtype == jnp.bfloat16 else 0.0)
    assert found.shape == exact.shape
    assert (np.abs(np.asarray(found, np.float64) - exact) <= bound).all()


@pytest.mark.parametrize("act", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "spec", ["int4", "int4,symmetric=false,signed=false,group_size=32", "mxfp4", "nvfp4", "nf4", "fp8_block"]
)
def test_arrays_are_multiplied_by_weights_that_are_decoded_in_registers(
    spec: str, transposed: bool, act: str, launches: list[str]
) -> None:
    w = factors((72, 256), 2)
    w = w if transposed else np.ascontiguousarray(w.T)
    st = reference.cast(w, breccia.recipe(spec), CastOptions(axis=-1 if transposed else -2))
    x, bias = jnp.asarray(factors((2, 5, 256), 1), jnp.dtype(act)), np.linspace(-5, 5, 72).astype(np.float32)
    values = reference.dequantize(st.mT if transposed else st)

    def product(x: Any, st: Any, bias: Any = None, dtype: str = "float32") -> Any:
        return jax_products.fused_matmul(x, st.mT if transposed else st, product_options(dtype, bias=bias))

    check_product(compiled(product, x, moved(st, "jax")), np.asarray(x, np.float32), values)
    assert launches[0] == "fused_kernel"
    found = compiled(lambda x, st, b: product(x, st, b, "bfloat16"), x, moved(st, "jax"), jnp.asarray(bias))
    check_product(found, np.asarray(x, np.float32), values, bias)


@pytest.mark.parametrize("spec", ["fp8_current", "fp8_block", "mxfp8"])
def test_fp8_tensors_are_multiplied_by_each_other(spec: str, launches: list[str]) -> None:
    a, b = (reference.cast(factors(shape, n), breccia.recipe(spec)) for n, shape in enumerate(((40, 256), (24, 256))))
    found = compiled(lambda a, b: jax_products.fused_matmul(a, b.mT), moved(a, "jax"), moved(b, "jax"))
    assert launches[0] == "fused_kernel"
    check_product(found, reference.dequantize(a), reference.dequantize(b).T, fp8=ON_GPU)


def test_other_products_go_to_the_generic_algorithm(launches: list[str]) -> None:
    st = reference.cast(factors((62, 8), 2), breccia.recipe("int4,group_size=31"), CastOptions(axis=-2))
    x = jnp.asarray(factors((4, 62), 1))
    check_product(jax_products.fused_matmul(x, moved(st, "jax")), np.asarray(x), reference.dequantize(st))
    assert launches == ["dequantize_kernel"] * ON_GPU
    with pytest.raises(breccia.ShapeError, match="matmul shape mismatch"):
        jax_products.fused_matmul(x[:, :32], moved(st, "jax"))


@pytest.mark.parametrize("spec", FAMILIES)
@pytest.mark.parametrize("axis", [-1, -2])
def test_every_round_trip_is_that_of_cast_and_dequantize(spec: str, axis: int, launches: list[str]) -> None:
    x, recipe, options = numbers((40, 72), seed=25), breccia.recipe(spec), CastOptions(axis=axis)
    found = compiled(lambda x: jax_calls.cast_ste(x, recipe, options), jnp.asarray(x))
    assert launches[-1] == "cast_kernel"
    same_values(found, reference.cast_ste(x, recipe, options))
    same_values(compiled(lambda x: jax_calls.cast_ste(x, recipe, options), jnp.asarray(x)), found)


@pytest.mark.parametrize("spec", ["fp8_block", "fp8_current", "mxfp8", "fp8_row", "nvfp4"])
def test_both_orientations_are_written_from_one_read(spec: str, launches: list[str]) -> None:
    x, recipe = numbers((2, 40, 72), seed=27), breccia.recipe(spec)
    found = compiled(lambda x: jax_calls.cast_pair(x, recipe), jnp.asarray(x))
    assert ("pair_kernel" in launches) == (spec not in ("fp8_row", "nvfp4"))
    for st, expected in zip(found, reference.cast_pair(x, recipe), strict=True):
        same(st, expected)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("pair", CHANGED, ids=lambda pair: pair.replace(" ", "-to-"))
def test_requantize_decodes_and_casts_in_one_kernel(pair: str, axis: int, launches: list[str]) -> None:
    old, recipe = map(breccia.recipe, pair.split())
    st = reference.cast(numbers((2, 40, 96), seed=30), old, CastOptions(axis=axis))
    found = compiled(lambda st: jax_calls.requantize(st, recipe), moved(st, "jax"))
    assert launches[-1] == "cast_kernel" and "dequantize_kernel" not in launches
    same(found, reference.requantize(st, recipe))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", ["fp8_delayed", "fp8_delayed,margin=1,scale_rule=te"])
def test_a_history_is_recorded_in_one_launch_with_or_without_a_cast(spec: str, dtype: str, launches: list[str]) -> None:
    recipe: Any = replace(breccia.recipe(spec), amax_history_len=3)  # type: ignore[type-var]
    ordinary = np.random.default_rng(0).standard_normal((2, 33, 64)).astype(jnp.dtype(dtype))
    faulty = ordinary.copy()
    faulty[1, 2, 3] = float("nan")
    both: tuple[Any, Any] = (), 1.0
    one = expected = both
    for step, x in enumerate((ordinary, ordinary * 4, ordinary * 0, faulty, ordinary / 8)):
        options = CastOptions(axis=-1 - step % 2)
        launches.clear()
        y = jnp.asarray(x)
        st, *recorded = compiled(lambda x, a, s, o=options: jax_calls.cast_and_record(x, recipe, a, s, o), y, *both)
        one = compiled(lambda x, a, s: jax_calls.record_amax(x, recipe, a, s), y, *one)
        assert launches == ["cast_record_kernel", "record_kernel"]
        same(st, reference.cast(x, recipe, options.replace(scale=np.float32(expected[1]))))
        *pair, amaxes, scale = compiled(lambda x, a, s: jax_calls.cast_pair_and_record(x, recipe, a, s), y, *both)
        for found, axis in zip(pair, (-1, -2), strict=True):
            same(found, reference.cast(x, recipe, CastOptions(axis=axis, scale=np.float32(expected[1]))))
        same_values(amaxes, recorded[0])
        same_values(scale, recorded[1])
        both = (recorded[0], recorded[1])
        expected = reference.record_amax(x, recipe, *expected)
        for found in (both, one):
            same_values(found[0], expected[0])
            same_values(found[1], expected[1])


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", EVERY)
def test_both_implementations_return_the_same_types(spec: str, axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, calls = breccia.recipe(spec), []

    def run(call: Any, arrays: list[Any]) -> list[Any]:
        calls.append((call.results, jax.eval_shape(call.generic, *arrays)))
        return [jnp.zeros(shape, dtype) for shape, dtype in call.results]

    monkeypatch.setattr(jax_calls, "run", run)

    def ops(x: Any) -> Any:
        st = jax_calls.cast(x, recipe, CastOptions(axis=axis))
        return (
            jax_calls.cast_pair(x, recipe),
            jax_calls.cast_ste(x, recipe),
            jax_calls.dequantize(st, product_options("bfloat16")),
        )

    jax.eval_shape(ops, jax.ShapeDtypeStruct((40, 72), jnp.float16))
    assert len(calls) >= 4
    for results, found in calls:
        assert [(a.shape, a.dtype.name) for a in found] == list(results)


# -- transformations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["mxfp8", "nvfp4"])
def test_vmap_and_eval_shape_need_no_kernel(spec: str, launches: list[str]) -> None:
    recipe, x = breccia.recipe(spec), numbers((3, 32, 64), seed=40)
    found = compiled(jax.vmap(lambda x: jax_calls.cast(x, recipe)), jnp.asarray(x))
    assert not launches
    for n in range(3):
        same(jax.tree.map(lambda leaf, n=n: leaf[n], found), reference.cast(x[n], recipe))
    shapes = jax.eval_shape(lambda x: jax_calls.cast(x, recipe), x[0])
    expected = reference.cast(x[0], recipe)
    assert not launches and {n: p.shape for n, p in components(shapes).items()} == {
        n: p.shape for n, p in components(expected).items()
    }


def test_eager_calls_run_the_kernels(launches: list[str]) -> None:
    x, recipe = numbers((31, 96), seed=41), breccia.recipe("mxfp8")
    st = jax_calls.cast(jnp.asarray(x), recipe)
    same(st, reference.cast(x, recipe))
    same_values(jax_calls.dequantize(st), reference.dequantize(reference.cast(x, recipe)))
    assert launches == ["cast_kernel", "dequantize_kernel"]


@pytest.mark.parametrize("batched", [False, True])
def test_kernels_are_not_differentiated(batched: bool, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The frontend passes the gradient of a round trip straight through, and kernels see no tangents."""
    from breccia.backend import calls

    def kernel_of(op: Any) -> Any:
        return lambda *arguments, prefer=None: getattr(jax_calls, op.name)(*arguments)

    if not ON_GPU:  # where the table would choose the kernel
        monkeypatch.setattr(calls, "function_of", kernel_of)
        monkeypatch.setattr(calls, "cast", kernel_of(OPERATIONS["cast"]))
    recipe = breccia.recipe("mxfp8")
    x, w = (np.random.default_rng(n).standard_normal((3, 29, 61), np.float32) for n in range(2))

    def loss(x: Any, w: Any) -> Any:
        y = breccia.cast_ste(x, recipe)
        st = breccia.cast(x, recipe)  # codes have no gradient
        return jnp.sum(y * w), st

    gradient = jax.grad(loss, has_aux=True)
    found, st = compiled(jax.vmap(gradient) if batched else gradient, jnp.asarray(x), jnp.asarray(w))
    assert np.array_equal(found, w) and launches == ([] if batched else ["cast_kernel"])
    if not batched:
        same(st, reference.cast(x, recipe))


def test_a_gradient_of_a_history_is_zero(launches: list[str]) -> None:
    recipe: Any = breccia.recipe("fp8_delayed")
    x = jnp.asarray(np.random.default_rng(5).standard_normal((33, 65), np.float32))

    def largest(x: Any) -> Any:
        _, amaxes, _ = jax_calls.cast_and_record(x, recipe, (), jnp.float32(1))
        return amaxes[0]

    value, gradient = compiled(jax.value_and_grad(largest), x)
    assert value == jnp.max(jnp.abs(x)) and not gradient.any() and launches == ["cast_record_kernel"]


# -- which implementation runs, as lowered for a GPU that need not be here ---------------------------------------------


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Lowers a function of arrays of these shapes, and returns the kernels it would run."""
    monkeypatch.undo()
    made: list[str] = []

    def launched(launch: Launch, inputs: Any, outputs: Any, *rest: Any) -> Any:
        made.append(launch.function.__name__)
        return {name: jnp.zeros(a.shape, a.dtype) for name, a in outputs.items()}

    monkeypatch.setattr(jax_calls, "launched", launched)
    monkeypatch.setattr(jax_launch, "capability", lambda: capability[0])

    capability = [(9, 0)]

    def lower(
        function: Any, *arrays: Any, platforms: tuple[str, ...] = ("cuda",), compute: tuple[int, int] = (9, 0)
    ) -> list[str]:
        made.clear()
        capability[0] = compute
        jax.jit(lambda *a: function(*a)).trace(*arrays).lower(lowering_platforms=platforms)
        return list(made)

    return lower


def cast(x: Any) -> ScaledTensor:
    return jax_calls.cast(x, breccia.recipe("mxfp8"))


def test_kernels_run_where_code_is_compiled_for_one_cuda_device(lowered: Callable[..., list[str]]) -> None:
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    assert lowered(cast, x) == ["cast_kernel"]
    assert lowered(cast, x, platforms=("cpu",)) == lowered(cast, x, platforms=("rocm",)) == []
    assert lowered(cast, x, platforms=("cpu", "cuda")) == []
    assert lowered(cast, x, compute=(7, 5)) == []
    assert lowered(jax.vmap(cast), jax.ShapeDtypeStruct((2, 64, 128), jnp.float32)) == []


def test_exported_functions_hold_no_kernels(lowered: Callable[..., list[str]]) -> None:
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: cast(x).data), platforms=("cuda",))(x)
    assert "custom_call" not in exported.mlir_module() and lowered(lambda x: cast(x).data, x) == ["cast_kernel"]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_arrays_over_several_devices_are_left_to_xla(kind: Any, lowered: Callable[..., list[str]]) -> None:
    mesh = AbstractMesh((4,), ("d",), axis_types=(kind,))
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("d")))
    assert lowered(cast, x) == []
    with jax.sharding.use_abstract_mesh(mesh):
        each = jax.shard_map(cast, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))
        assert lowered(each, x) == ["cast_kernel"]


ALL = """
import os, sys
os.environ["TRITON_CACHE_DIR"] = "here"
import jax, jax.numpy as jnp, breccia
from breccia.backend import CastOptions, product_options, reference
from breccia_jax import primitive  # noqa: E402
from breccia_triton.jax import calls as jax_calls, launch as jax_launch, matmul as jax_products
assert "torch" not in sys.modules and "jax_triton" not in sys.modules
jax_launch.capability = lambda: divmod(int(sys.argv[1]), 10)
count = 0

def lower(function, *arrays):
    global count
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    count += text.count("@triton_kernel_call(")

x, one = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 512), (1, 32)))
other, delayed = breccia.recipe("mxfp8,fp8_format=E5M2"), breccia.recipe("fp8_delayed")
number, seed = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.uint32)
for spec in ("fp8_block", "mxfp6", "nvfp4", "int4,symmetric=false,signed=false", "nf4"):
    recipe = breccia.recipe(spec)
    for axis in (-1, -2):
        lower(lambda x: jax_calls.cast(x, recipe, CastOptions(axis=axis)), x)
    lower(lambda x: jax_calls.cast_ste(x, recipe), one)
    lower(lambda x: jax_calls.cast_pair(x, recipe), one)
    lower(lambda x, seed: jax_calls.cast(x, recipe, CastOptions(rounding="stochastic", seed=seed)), x, seed)
    st = jax.eval_shape(lambda x: reference.cast(x, recipe), x)
    lower(lambda st: jax_calls.dequantize(st, product_options("bfloat16")), st)
    lower(lambda st: jax_calls.requantize(st, other), st)
for amaxes in ((), jax.ShapeDtypeStruct((3,), jnp.float32)):
    lower(lambda x, a, s: jax_calls.cast_and_record(x, delayed, a, s), x, amaxes, number)
    lower(lambda x, a, s: jax_calls.record_amax(x, delayed, a, s), x, amaxes, number)
for spec in ("int4", "nvfp4", "mxfp4", "nf4", "fp8_row"):
    w = jax.eval_shape(lambda x, recipe=breccia.recipe(spec): reference.cast(x, recipe, CastOptions(axis=-2)), x)
    for given in (jax.ShapeDtypeStruct((m, 256), dtype) for m, dtype in ((1, jnp.bfloat16), (64, jnp.float16))):
        lower(jax_products.fused_matmul, given, w)
w = jax.eval_shape(lambda x: reference.cast(x, breccia.recipe("fp8_block")), x)
lower(lambda a, b: jax_products.fused_matmul(a, b.mT), w, w)
assert os.environ["TRITON_CACHE_DIR"] == "here"
print(count, "calls of kernels")
"""
#: The parts of JAX for GPUs that compile without one.
COMPILER = find_spec("jax_triton") and (find_spec("jax_cuda12_plugin") or find_spec("jax_cuda13_plugin"))


@pytest.mark.long
@pytest.mark.skipif(ON_GPU or not COMPILER, reason="needs jax-triton and JAX's plug-in for CUDA, and no GPU")
@pytest.mark.parametrize(("capability", "count"), [("80", 64), ("90", 63)])
def test_kernels_compile_for_gpus_that_are_not_here(capability: str, count: int) -> None:
    assert f"{count} calls of kernels" in printed(ALL, capability, TRITON_INTERPRET=None)


def test_kernels_for_jax_do_not_import_torch() -> None:
    script = "import sys, breccia_triton.jax.calls; print('triton' in sys.modules, 'torch' in sys.modules)"
    assert printed(script, TRITON_INTERPRET=None) == "True False\n"


ORDER = """
import re, triton, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from breccia_triton.casts.kernels import dequantize_kernel
from breccia_triton.jax.launch import _ordered
import breccia
from breccia.backend import reference
from breccia_triton import operands
from breccia_triton.casts import plans, prepare
from breccia_triton.specs import spec_of

recipe = breccia.recipe("fp8_block")
st = reference.cast(torch.zeros(32, 256), recipe)
made = prepare.decoding(operands.codes_of(st, spec_of(recipe, decoding=True), True), "float32")
first = ("rows", "x", "columns", "x_scale", "out")
kernel = _ordered(made.function, first)
assert kernel is _ordered(made.function, first) and kernel is not made.function
values = {**made.constants, **{name: None for name in kernel.arg_names if name not in first and name not in made.constants}}
signature = {name: "constexpr" if name in values else made.arguments[name].type for name in kernel.arg_names}
compiled = triton.compile(ASTSource(kernel, signature, values, {}), target=GPUTarget("cuda", 90, 32))
print(re.findall(r"%(\\w+): ", re.search(r"tt.func public .*", compiled.asm["ttir"])[0]))
"""


def test_parameters_are_compiled_in_the_order_in_which_jax_triton_passes_them() -> None:
    assert "['rows', 'x', 'columns', 'x_scale', 'out']" in printed(ORDER.replace("\\\\", "\\"), TRITON_INTERPRET=None)


# -- what is declared ------------------------------------------------------------------------------------------------


def test_the_reason_names_what_jax_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = Device("cuda", 0, (9, 0))
    monkeypatch.setattr(availability.targets, "installed", lambda module: module != "jax_triton")
    assert availability.available_to_jax(h200) == f"jax-triton is not installed; {install('breccia-triton[jax]')}"
    assert availability.available(h200) is None
    monkeypatch.setattr(availability.targets, "installed", lambda module: False)
    assert availability.available_to_jax(h200) == "triton is not installed; pip install triton"
    monkeypatch.setattr(availability.targets, "installed", lambda module: True)
    assert availability.available_to_jax(h200) is None


@pytest.mark.parametrize("op", ["cast", "pair", "dequantize", "requantize"])
def test_large_arrays_are_left_to_the_generic_algorithm(op: str) -> None:
    recipe, named = breccia.recipe("fp8_block"), OPERATIONS["cast_pair" if op == "pair" else op]

    def reason(framework: str, rows: int) -> str | None:
        given = Described(recipe, shape=(rows, 65536), layout=recipe.layout, device=Device("cuda"))
        return getattr(plans, f"accepts_{op}")(
            Call(named, framework, (given, None, breccia.recipe("mxfp8"), CastOptions(), None))
        )

    why = "positions in 2146435072 elements or more have 64 bits, and jax-triton passes integers of 32 bits"
    assert reason("jax", 32768) == why
    assert reason("jax", 16384) is None and reason("torch", 32768) is None


def test_every_kernel_for_torch_is_declared_for_jax() -> None:
    # The others are products, which are for torch.
    every = [k for k in plugin.breccia_kernels() if k.name.startswith("triton.") and "matmul" not in k.op]
    torch_ops, jax_ops = ({k.op for k in every if k.framework == framework} for framework in ("torch", "jax"))
    assert jax_ops == torch_ops == {k.op for k in every}
    for k in every:
        assert breccia.backend.targets.load(k.target).__name__ == k.op


# -- on a GPU only ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU that JAX uses")
@pytest.mark.parametrize("spec", ["fp8_block", "nvfp4", "fp8_current"])
def test_breccia_chooses_the_kernels_for_arrays_on_a_gpu(spec: str, launches: list[str]) -> None:
    recipe, x = breccia.recipe(spec), numbers((130, 259), seed=60)
    on_gpu, on_cpu = jnp.asarray(x), jax.device_put(x, jax.local_devices(backend="cpu")[0])
    assert "-> triton.jax.cast" in str(breccia.explain("cast", on_gpu, recipe))
    expected = reference.cast(x, recipe)
    same(breccia.cast(on_gpu, recipe), expected)
    assert "cast_kernel" in launches
    same_values(breccia.dequantize(breccia.cast(on_gpu, recipe)), reference.dequantize(expected))
    same_values(jax.jit(lambda x: breccia.cast_ste(x, recipe))(on_gpu), reference.cast_ste(x, recipe))
    count = len(launches)
    same(breccia.cast(on_cpu, recipe), expected)  # the same compiled op, on another platform
    assert len(launches) == count


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU that JAX uses")
def test_a_history_is_kept_on_a_gpu(launches: list[str]) -> None:
    steps = [np.random.default_rng(n).standard_normal((130, 257)).astype(np.float32) * 4.0**n for n in range(6)]
    found, expected = (breccia.AmaxHistory(breccia.DelayedScaling(amax_history_len=3)) for _ in range(2))
    for x in steps:
        st, found = found.cast(jnp.asarray(x))
        other, expected = expected.cast(x)
        same(st, other)
        same_values(found.amaxes, expected.amaxes)
        same_values(found.scale, expected.scale)
    assert launches.count("cast_record_kernel") == 4  # traced once for each length before: 0 to 3
