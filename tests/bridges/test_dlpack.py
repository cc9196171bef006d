"""DLPack: what is shared, copied or refused, and how consumers without breccia read a bundle."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from fresh import printed
from marks import on_cuda
from paths import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode

import breccia
from breccia import DialectError, Framework, OptionError, ScaledTensor, UnknownNameError, UnsupportedError, targets
from breccia.bridges import from_dlpack, to_dlpack
from breccia.dispatch.registry import registry
from breccia.siblings import install
from breccia.tensors.components import components
from breccia.tensors.equality import stored_parts
from breccia.testing.examples import wide
from breccia_bridges import capsules, dlpack
from breccia_bridges.capsules import CODES, HostRoute
from breccia_bridges.dlpack import Bundle

#: `make test` runs every recipe and every framework; `make test-all` runs all combinations.
pytestmark = pytest.mark.covering(1, 2)

mx = pytest.importorskip("mlx.core")  # a machine with CUDA may lack it

FRAMEWORKS = ("numpy", "torch", "jax", "mlx")
#: Each library's `from_dlpack`.
CONSUMERS: dict[str, Callable[[Any], Any]] = {
    "numpy": np.from_dlpack,
    "torch": torch.from_dlpack,
    "jax": jnp.from_dlpack,
    "mlx": mx.from_dlpack,
}
#: The memory address of an array in each library.
ADDRESS: dict[str, Callable[[Any], int]] = {
    "numpy": lambda a: a.ctypes.data,
    "torch": lambda a: a.data_ptr(),
    "jax": lambda a: a.unsafe_buffer_pointer(),
    "mlx": lambda a: np.array(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a, copy=False).ctypes.data,
}
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="what MLX shares was measured on Linux CPUs")
X = wide((32, 256), seed=51, exponents=4)
MXFP8 = breccia.cast(X, breccia.MXFP8BlockScaling())
#: FP8 codes, E8M0, E4M3 and BF16 scales, a 0-d scale, a zero-point, a bias.
RECIPES = [
    breccia.MXFP8BlockScaling("E5M2"),
    breccia.NVFP4BlockScaling(),
    breccia.Float8CurrentScaling(),
    breccia.INT4Scaling(group_size=16, scale_dtype="bf16"),
    breccia.INT8Scaling(signed=False, symmetric=False),
    breccia.INT4Scaling(group_size=8, signed=False, symmetric=False, scale_dtype="bf16", offset="bias"),
]


def aligned(array: np.ndarray, past: int = 0) -> np.ndarray:
    """A copy whose address is `past` bytes after a multiple of 64."""
    raw = np.empty(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + past
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def changed(st: ScaledTensor, **parts: Any) -> ScaledTensor:
    fields = {"recipe": st.recipe, "layout": st.layout, "axis": st.axis, "padding": st.padding}
    return ScaledTensor.from_parts(**(fields | components(st) | parts))


def at(st: ScaledTensor, past: int = 0) -> ScaledTensor:
    return changed(st, **{name: aligned(part, past) for name, part in components(st).items()})


def made(framework: str, recipe: breccia.ScalingRecipe) -> ScaledTensor:
    """A cast whose components are aligned to 64 bytes, except on MLX, which allocates its own memory."""
    source = at(breccia.cast(X, recipe))
    return source if framework == "numpy" else from_dlpack(source, framework)


def addresses(st: ScaledTensor) -> dict[str, int]:
    return {name: ADDRESS[st.framework](part) for name, part in components(st).items()}


# -- which pairs of frameworks share memory: the table of docs/bridges/frameworks.md --------------------------------------


def table() -> dict[tuple[str, str], str]:
    """(from, to) -> the entry of the table."""
    lines = (ROOT / "docs" / "bridges" / "frameworks.md").read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| from, to |"))
    rows = [[cell.strip().lower() for cell in line.strip("|").split("|")] for line in lines[start : start + 6]]
    return {(row[0], to): cell for row in rows[2:] for to, cell in zip(rows[0][1:], row[1:], strict=True)}


PAIRS = [
    pytest.param(a, b, marks=ON_LINUX if "mlx" in (a, b) and a != b else (), id=f"{a}-{b}")
    for a in FRAMEWORKS
    for b in FRAMEWORKS
]


def test_the_table_has_every_pair() -> None:
    assert set(table()) == {(a, b) for a in FRAMEWORKS for b in FRAMEWORKS}
    assert {cell.partition(" ")[0].rstrip(",") for cell in table().values()} == {"itself", "shared", "copied"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_a_pair_shares_memory_as_the_table_says(a: str, b: str, recipe: breccia.ScalingRecipe) -> None:
    said, source = table()[a, b], made(a, recipe)
    taken = from_dlpack(source, b)
    assert (taken.framework, breccia.bytes_equal(taken, source)) == (b, True)
    if said == "itself":
        assert taken is source and from_dlpack(source, b, copy=False) is source
    elif said.startswith("shared"):
        assert addresses(taken) == addresses(source)
        assert addresses(from_dlpack(source, b, copy=False)) == addresses(source)
        assert addresses(from_dlpack(to_dlpack(source), b, copy=False)) == addresses(source)
        if b == "numpy":
            assert {part.flags.writeable for part in components(taken).values()} == {"read-only" not in said}
    else:
        assert not set(addresses(taken).values()) & set(addresses(source).values())
        with pytest.raises(OptionError, match=f"^from_dlpack: {b} cannot share data: .*copy=None copies it"):
            from_dlpack(source, b, copy=False)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_the_integers_that_jax_holds_for_numbers_are_shared(recipe: breccia.ScalingRecipe) -> None:
    st = breccia.cast(jnp.asarray(X), recipe)
    assert st.held is not None
    held = {leaf.unsafe_buffer_pointer() for leaf in st.held.leaves if leaf is not None}
    for source in (st, to_dlpack(st)):
        taken = from_dlpack(source, "numpy")
        assert set(addresses(taken).values()) == held and breccia.bytes_equal(taken, st)
        assert breccia.bytes_equal(from_dlpack(source, "jax"), st)


@pytest.mark.parametrize("elsewhere", [AttributeError("no such function"), lambda *arguments: jnp.zeros(3)])
def test_jax_takes_memory_by_its_public_function_where_its_compiled_part_is_elsewhere(
    elsewhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, source = targets.load, made("numpy", breccia.NVFP4BlockScaling())

    def changed_jax(name: str) -> Any:
        if name != "jaxlib._jax:dlpack_managed_tensor_to_buffer":
            return load(name)
        if isinstance(elsewhere, Exception):
            raise elsewhere
        return elsewhere

    assert capsules.host_take("jax") is not None
    monkeypatch.setattr(targets, "load", changed_jax)
    assert capsules.host_take("jax") is None
    monkeypatch.setattr(dlpack, "_transfers", {})
    taken = from_dlpack(source, "jax")
    assert dlpack._transfer("jax").route is None
    assert addresses(taken) == addresses(source) and breccia.bytes_equal(taken, source)


@pytest.mark.parametrize("bundled", [False, True])
@pytest.mark.parametrize(("a", "b"), [(a, b) for a in FRAMEWORKS for b in FRAMEWORKS if a != b])
def test_host_memory_takes_the_shortest_way(a: str, b: str, bundled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And arrives as it does on the longer one."""
    for recipe in RECIPES:
        source = made(a, recipe)
        with monkeypatch.context() as patched:
            patched.setattr(HostRoute, "taken", lambda *arguments: None)
            wanted = from_dlpack(to_dlpack(source) if bundled else source, b)
        with monkeypatch.context() as patched:
            patched.setattr(dlpack._Transfer, "taken", None)
            patched.setattr(dlpack.Part, "__dlpack__", None)
            found = [from_dlpack(to_dlpack(source) if bundled else source, b) for _ in range(2)]
        for taken in found:
            assert (taken.framework, taken.digest()) == (b, wanted.digest())
            assert {n: p.dtype for n, p in components(taken).items()} == {n: p.dtype for n, p in components(wanted).items()}
            assert {n: p.shape for n, p in components(taken).items()} == {n: p.shape for n, p in components(wanted).items()}
            if a != "jax":  # it makes its arrays when they are read
                shared, expected = (addresses(st) == addresses(source) for st in (taken, wanted))
                assert shared == expected
            if b == "numpy":
                assert {p.flags.writeable for p in components(taken).values()} == {a == "torch"}


def test_memory_that_jax_cannot_read_is_copied_after_others_of_its_dtype_were_shared() -> None:
    """JAX's own checks of strides take the place of breccia's for arrays of a type and dtype met before."""
    for source in (at(MXFP8), TORCH):
        assert addresses(from_dlpack(source, "jax")) == addresses(source)
    spread = np.zeros((*MXFP8.data.shape, 2), np.uint8)
    spread[..., 0] = MXFP8.data
    backwards = np.ascontiguousarray(MXFP8.data[::-1])[::-1]
    for codes in (spread[..., 0], backwards):
        source = changed(MXFP8, data=codes)
        assert breccia.bytes_equal(from_dlpack(source, "jax"), MXFP8)
    strided = torch.from_numpy(spread).view(TORCH.data.dtype)[..., 0]
    assert breccia.bytes_equal(from_dlpack(changed(TORCH, data=strided), "jax"), MXFP8)
    freed = torch.zeros(MXFP8.data.shape, dtype=TORCH.data.dtype)
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedError, match="data: it has no values in memory"):
        from_dlpack(changed(TORCH, data=freed), "jax")


def test_parameters_and_mapped_arrays_take_the_shortest_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = np.memmap(tmp_path / "codes", np.uint8, "w+", shape=MXFP8.data.shape)
    codes[...] = MXFP8.data
    mapped = changed(MXFP8, data=codes)
    frozen = changed(TORCH, scale=torch.nn.Parameter(TORCH.scale, requires_grad=False))
    monkeypatch.setattr(dlpack._Transfer, "taken", None)
    assert breccia.bytes_equal(from_dlpack(mapped, "torch"), MXFP8)
    assert addresses(from_dlpack(frozen, "numpy")) == addresses(frozen)


@pytest.mark.long
def test_arrays_on_several_devices_are_refused() -> None:
    """The compiled part of JAX's export would give their first shard."""
    script = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, numpy as np
import breccia
from breccia.bridges import from_dlpack, to_dlpack
from jax.sharding import Mesh, NamedSharding, PartitionSpec
over = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), PartitionSpec("a"))
st = breccia.cast(np.ones((4, 32), "f"), breccia.MXFP8BlockScaling())
parts = {"data": jax.device_put(st.data, over), "scale": jax.device_put(st.scale, over)}
sharded = breccia.ScaledTensor(recipe=st.recipe, layout=st.layout, **parts)
for call in (lambda: to_dlpack(sharded), lambda: from_dlpack(sharded, "torch"), lambda: from_dlpack(sharded, "mlx")):
    try:
        call()
    except breccia.UnsupportedError as e:
        print(e)
"""
    said = printed(script, flags=("-W", "ignore")).splitlines()
    assert len(said) == 3 and all(" data: BufferError: " in line for line in said), said


def test_the_metadata_of_a_bundle_is_checked_for_other_shapes_of_the_same_header() -> None:
    """What was accepted once is remembered by header, shapes and dtypes."""
    bundle = to_dlpack(at(MXFP8))
    for b in ("torch", "mlx"):
        for _ in range(2):
            assert breccia.bytes_equal(from_dlpack(bundle, b), MXFP8)
        with pytest.raises(breccia.LayoutError, match=r"got data of shape \(16, 256\)"):
            from_dlpack(Bundle(bundle.header, data=MXFP8.data[:16], scale=MXFP8.scale), b)
        with pytest.raises(UnsupportedError, match="^scale must hold E8M0 as .*; got dtype float16"):
            from_dlpack(Bundle(bundle.header, data=MXFP8.data, scale=MXFP8.scale.astype(np.float16)), b)


@pytest.mark.parametrize(("a", "b"), [pair for pair in table() if "64" in table()[pair]])
def test_jax_copies_unaligned_memory(a: str, b: str) -> None:
    source = at(MXFP8, past=16)
    source = source if a == "numpy" else from_dlpack(source, a, copy=False)
    taken = from_dlpack(source, b)
    assert breccia.bytes_equal(taken, source) and not set(addresses(taken).values()) & set(addresses(source).values())
    with pytest.raises(
        OptionError, match="jax cannot share data: its address is 16 bytes past a multiple of 64. copy=None copies it."
    ):
        from_dlpack(source, b, copy=False)


@pytest.mark.parametrize("b", FRAMEWORKS)
@pytest.mark.parametrize("a", FRAMEWORKS)
def test_a_copy_shares_nothing_and_can_be_written_to(a: str, b: str) -> None:
    source = made(a, breccia.NVFP4BlockScaling())
    for of in (source, to_dlpack(source)):
        copied = from_dlpack(of, b, copy=True)
        assert breccia.bytes_equal(copied, source)
        assert not set(addresses(copied).values()) & set(addresses(source).values())
    if b == "numpy":
        assert all(part.flags.writeable and part.flags.c_contiguous for part in components(copied).values())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
@pytest.mark.parametrize("b", FRAMEWORKS)
def test_components_have_the_dtypes_of_a_cast_in_the_target_framework(b: str, recipe: breccia.ScalingRecipe) -> None:
    there = breccia.cast({"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray, "mlx": mx.array}[b](X), recipe)
    for a in FRAMEWORKS:
        taken = from_dlpack(made(a, recipe), b)
        assert {n: p.dtype for n, p in components(taken).items()} == {n: p.dtype for n, p in components(there).items()}


def test_scales_and_zero_points_with_another_dtype_keep_it() -> None:
    scale = MXFP8.scale[:, :2].astype(np.float16)
    st = breccia.from_buffer(
        np.zeros((32, 128), np.uint8), scale, breccia.INT4Scaling(scale_dtype="fp32"), breccia.PerBlockK(128)
    )
    zero = np.arange(64, dtype=np.int16).reshape(32, 2)
    recipe = breccia.INT4Scaling(signed=False, symmetric=False)
    asymmetric = breccia.from_buffer(np.zeros((32, 128), np.uint8), scale, recipe, breccia.PerBlockK(128), zero)
    for b in FRAMEWORKS:
        assert breccia.bytes_equal(from_dlpack(st, b), st)
        taken = from_dlpack(to_dlpack(asymmetric), b)
        assert breccia.bytes_equal(taken, asymmetric) and str(taken.zero_point.dtype).endswith("int16")


def test_dtypes_of_ml_dtypes_are_preserved() -> None:
    scale = np.asarray(MXFP8.scale).view(ml_dtypes.float8_e8m0fnu)
    named = changed(MXFP8, data=MXFP8.data.view(ml_dtypes.float8_e4m3fn), scale=scale)
    taken = from_dlpack(named, "torch", copy=False)
    assert (taken.data.dtype, taken.scale.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    assert addresses(taken)["data"] == MXFP8.data.ctypes.data
    assert str(np.from_dlpack(to_dlpack(named).scale).dtype) == "uint8"


@pytest.mark.parametrize("name", CODES)
def test_dlpack_dtype_codes_are_those_of_torch_and_jax(name: str) -> None:
    """A capsule that declares the dtype `name` must arrive in torch and JAX with that dtype."""
    width = jnp.dtype(name).itemsize
    bits = aligned(np.arange(256, dtype={1: "u1", 2: "u2", 4: "i4"}[width]))
    from breccia_bridges.dlpack_parts import CONSUMERS as REQUIREMENTS
    from breccia_bridges.dlpack_parts import Part

    for consumer in ("torch", "jax"):
        found = CONSUMERS[consumer](Part(bits, lambda _: name, REQUIREMENTS[consumer]))
        assert str(found.dtype).removeprefix("torch.") == name
        assert ADDRESS[consumer](found) == bits.ctypes.data


# -- lifetime of shared memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("b", ["torch", "jax"])
def test_writes_to_shared_memory_are_visible(b: str) -> None:
    source = at(MXFP8)
    taken = from_dlpack(source, b)
    source.data[0, 0] ^= 1
    assert breccia.bytes_equal(taken, source)


@pytest.mark.long
@pytest.mark.parametrize("a", FRAMEWORKS)
@pytest.mark.parametrize("b", FRAMEWORKS)
def test_shared_memory_stays_alive_with_its_consumer(a: str, b: str) -> None:
    source = made(a, breccia.NVFP4BlockScaling())
    wanted, bundle = source.digest(), to_dlpack(source)
    taken = from_dlpack(bundle, b)
    del source, bundle
    gc.collect()
    others = [made(a, breccia.NVFP4BlockScaling()) for _ in range(5)]  # these would reuse the memory if it were free
    assert taken.digest() == wanted and len(others) == 5


def test_pending_computations_are_awaited() -> None:
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: jnp.tanh(y @ y), x))
    x = jnp.asarray(wide((400, 400), seed=3, exponents=1))
    st = breccia.cast(slow(x), breccia.MXFP8BlockScaling())
    taken = from_dlpack(st, "torch")
    assert breccia.bytes_equal(taken, st)
    lazy = breccia.cast(mx.array(X) * 2, breccia.MXFP8BlockScaling())
    assert breccia.bytes_equal(from_dlpack(lazy, "numpy"), breccia.cast(X * 2, breccia.MXFP8BlockScaling()))


# -- bundles ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a", FRAMEWORKS)
@pytest.mark.parametrize("b", FRAMEWORKS)
def test_any_consumer_reads_each_component_of_a_bundle_as_a_known_dtype(a: str, b: str) -> None:
    for recipe in RECIPES:
        source = made(a, recipe)
        for name, part in zip(to_dlpack(source).names, to_dlpack(source), strict=True):
            found = np.asarray(CONSUMERS[b](part))
            assert str(found.dtype) in ("uint8", "uint16", "float32", "float16")
            expected = stored_parts(source)[name]
            assert found.tobytes() == expected.tobytes() and found.shape == expected.shape


def test_a_bundle_is_the_tuple_of_its_components() -> None:
    data, scale = to_dlpack(MXFP8)
    assert np.from_dlpack(data).ctypes.data == MXFP8.data.ctypes.data
    assert np.from_dlpack(scale).ctypes.data == MXFP8.scale.ctypes.data
    bundle = to_dlpack(made("numpy", breccia.NVFP4BlockScaling()))
    assert bundle.names == ("data", "scale", "global_scale") and len(bundle) == 3
    assert bundle.data is bundle[0] and bundle.global_scale is bundle[2] and bundle.zero_point is None
    assert repr(bundle) == (
        "Bundle(data=<uint8 (32, 128) on cpu:0>, scale=<uint8 (32, 16) on cpu:0>, global_scale=<float32 () on cpu:0>)"
    )
    assert to_dlpack(made("numpy", RECIPES[4])).names == ("data", "scale", "zero_point")
    with pytest.raises(AttributeError, match="a bundle has no 'scales'; it has header, names, data, scale, zero_point"):
        bundle.scales  # noqa: B018


def test_the_header_is_the_config_stored_in_files() -> None:
    from breccia_bridges.safetensors import describe

    for recipe in RECIPES:
        for framework in FRAMEWORKS:
            st = made(framework, recipe)
            _, config = describe("w", st)
            assert config is not None and to_dlpack(st).header == config.to_json()
    header = json.loads(to_dlpack(made("torch", RECIPES[3])).header)
    assert header["recipe"]["name"] == "int4" and header["dtypes"] == {"data": "INT4", "scale": "BF16"}


def test_a_bundle_made_by_another_library_is_read() -> None:
    """Components from several libraries, with float8 or uint8 dtypes."""
    header = to_dlpack(MXFP8).header
    codes = torch.from_numpy(MXFP8.data).view(torch.float8_e4m3fn)
    for b in FRAMEWORKS:
        taken = from_dlpack(Bundle(header, data=codes, scale=mx.array(MXFP8.scale)), b)
        assert (taken.framework, breccia.bytes_equal(taken, MXFP8)) == (b, True)


class Foreign:
    """An array of an unknown library that implements DLPack as of 2021."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype, self.shape = array, array.dtype, array.shape

    def __dlpack__(self, stream: Any = None) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("copy", [None, True])
@pytest.mark.parametrize("b", FRAMEWORKS)
def test_components_of_unknown_libraries_are_read_through_dlpack(b: str, copy: bool | None) -> None:
    parts = {name: Foreign(part) for name, part in components(at(MXFP8)).items()}
    taken = from_dlpack(Bundle(to_dlpack(MXFP8).header, **parts), b, copy=copy)
    assert breccia.bytes_equal(taken, MXFP8)


def test_bundles_that_contradict_their_header_are_refused() -> None:
    header = to_dlpack(MXFP8).header
    with pytest.raises(DialectError, match="^the bundle's header cannot be read: its config is not JSON"):
        from_dlpack(Bundle("{", data=MXFP8.data, scale=MXFP8.scale), "torch")
    with pytest.raises(UnsupportedError, match="^scale must hold E8M0 as float8_e8m0fnu or uint8; got dtype float32"):
        from_dlpack(Bundle(header, data=MXFP8.data, scale=X), "numpy")
    with pytest.raises(breccia.LayoutError, match=r"data of shape \(32, 256\).*got data of shape \(16, 256\)"):
        from_dlpack(Bundle(header, data=MXFP8.data[:16], scale=MXFP8.scale), "jax")
    two_level = to_dlpack(made("numpy", breccia.NVFP4BlockScaling()))
    with pytest.raises(breccia.LayoutError, match="needs a global_scale; got none"):
        from_dlpack(Bundle(two_level.header, data=two_level.data, scale=two_level.scale), "numpy")
    with pytest.raises(DialectError, match="^a bundle has components data and scale, .* has them; got data, scales.$"):
        Bundle(header, data=MXFP8.data, scales=MXFP8.scale)


# -- memory that cannot be shared -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("b", FRAMEWORKS)
def test_arrays_with_negative_strides_are_copied_first(b: str) -> None:
    """torch 2.13 aborts the process on a negative stride."""
    source = changed(MXFP8, data=MXFP8.data[::-1], scale=MXFP8.scale[::-1])
    assert breccia.bytes_equal(from_dlpack(source, b), source)
    if b != "numpy":
        with pytest.raises(OptionError, match=r"data: its strides are not supported \(strides \(-256, 1\), shape"):
            from_dlpack(source, b, copy=False)
    with pytest.raises(
        UnsupportedError, match=r"^to_dlpack cannot export data: its strides .*, copy=True\) gives a tensor that"
    ):
        to_dlpack(source)
    data, _ = to_dlpack(from_dlpack(source, "numpy", copy=True))
    assert CONSUMERS[b](data).shape == (32, 256)


@pytest.mark.parametrize("b", FRAMEWORKS)
@pytest.mark.parametrize("a", FRAMEWORKS)
def test_slices_and_transposes_cross_frameworks(a: str, b: str) -> None:
    whole = made(a, breccia.MXFP8BlockScaling())
    for part in (whole[:, :128], whole[4:8], whole.mT, whole[:, 32:96].mT):
        for source in (part, to_dlpack(part)):
            taken = from_dlpack(source, b)
            assert breccia.bytes_equal(taken, part) and taken.shape == part.shape


def test_jax_copies_strided_rows_and_torch_does_not() -> None:
    source = at(MXFP8)[:, :128]
    assert addresses(from_dlpack(source, "torch", copy=False)) == addresses(source)
    with pytest.raises(
        OptionError, match=r"^from_dlpack: jax cannot share data: its strides .*\(strides \(256, 1\), shape \(32, 128"
    ):
        from_dlpack(source, "jax", copy=False)
    whole = at(MXFP8).mT
    assert addresses(from_dlpack(whole, "jax", copy=False)) == addresses(whole)


@pytest.mark.parametrize("b", ["torch", "jax"])
def test_read_only_memory_is_not_shared_with_frameworks_that_could_write(b: str) -> None:
    source = at(MXFP8)
    source.data.flags.writeable = False
    taken = from_dlpack(source, b)
    assert breccia.bytes_equal(taken, source) and addresses(taken)["data"] != addresses(source)["data"]
    with pytest.raises(OptionError, match=f"^from_dlpack: {b} cannot share data: .*read-?only.* copy=None copies it"):
        from_dlpack(source, b, copy=False)


@pytest.mark.parametrize("b", FRAMEWORKS)
def test_arrays_with_foreign_byte_order_are_byte_swapped(b: str) -> None:
    native = breccia.cast(X, breccia.Float8BlockScaling())
    source = changed(native, scale=native.scale.astype(">f4"))
    assert breccia.bytes_equal(from_dlpack(source, b), native)
    copied = from_dlpack(source, b, copy=True)
    assert breccia.bytes_equal(copied, native)
    assert b != "numpy" or copied.scale.dtype.isnative
    with pytest.raises(UnsupportedError, match=r"^to_dlpack cannot export scale: .*native byte order\. breccia.bridges.from_d"):
        to_dlpack(source)


@pytest.mark.parametrize("copy", [None, True, False])
@pytest.mark.parametrize("b", FRAMEWORKS)
@pytest.mark.parametrize("a", FRAMEWORKS)
def test_empty_tensors_can_be_shared_and_copied(a: str, b: str, copy: bool | None) -> None:
    empty = from_dlpack(breccia.cast(np.zeros((0, 64), np.float32), breccia.MXFP8BlockScaling()), a)
    for source in (empty, to_dlpack(empty)):
        taken = from_dlpack(source, b, copy=copy)
        assert (taken.framework, taken.shape, breccia.bytes_equal(taken, empty)) == (b, (0, 64), True)


def test_numpy_scalars_are_copied() -> None:
    source = breccia.from_buffer(MXFP8.data, np.float32(0.5), breccia.Float8CurrentScaling(), breccia.PerTensor())
    for b in FRAMEWORKS:
        for of in (source, to_dlpack(source)):
            assert breccia.bytes_equal(from_dlpack(of, b), source)


# -- tensors without values -------------------------------------------------------------------------------------------------

NO_VALUES = "Pass arrays with values in memory: outside jit, vmap and compile, on a real device, detached from gradients."
TORCH = from_dlpack(at(MXFP8), "torch")


def assert_refused(st: ScaledTensor, part: str = "data") -> None:
    others = [f for f in FRAMEWORKS if f != st.framework]
    asked = [(f, c) for f in others for c in (None, True, False) if (f, c) != ("mlx", False)]  # refused in any case
    for call in (to_dlpack, *(lambda s, f=f, c=c: from_dlpack(s, f, copy=c) for f, c in asked)):
        with pytest.raises(UnsupportedError) as e:
            call(st)
        said = str(e.value)
        assert f" {part}: " in said and said.endswith(NO_VALUES), said
        assert e.value.found["part"] == part
    assert from_dlpack(st, st.framework) is st


def test_tensors_that_require_gradients_are_refused() -> None:
    st = made("torch", breccia.Float8CurrentScaling())
    assert_refused(changed(st, scale=st.scale.clone().requires_grad_()), "scale")
    with pytest.raises(UnsupportedError, match="require gradient"):
        from_dlpack(changed(st, scale=st.scale.clone().requires_grad_()), "jax", device="cpu")


def test_tensors_without_memory_are_refused() -> None:
    assert_refused(TORCH.to("meta"))
    mode = FakeTensorMode()
    assert_refused(changed(TORCH, data=mode.from_tensor(TORCH.data)))


def test_traced_arrays_are_refused() -> None:
    st = from_dlpack(MXFP8, "jax")
    seen: list[str] = []

    def look(data: Any) -> Any:
        assert_refused(changed(st, data=data))
        seen.append(type(data).__name__)
        return data

    jax.jit(look)(st.data)
    jax.vmap(look)(st.data)
    mlx = from_dlpack(MXFP8, "mlx")

    def look_mlx(data: Any) -> Any:
        assert_refused(changed(mlx, data=data))
        seen.append("mlx")
        return data

    mx.compile(look_mlx)(mlx.data)

    packed = made("torch", breccia.NVFP4BlockScaling())

    def look_torch(data: Any) -> Any:
        assert_refused(changed(packed, data=data))
        seen.append("torch")
        return data

    torch.vmap(look_torch)(packed.data)
    assert len(seen) == 4


def test_donated_arrays_are_refused() -> None:
    st = from_dlpack(MXFP8, "jax", copy=True)
    st.data.delete()
    with pytest.raises(UnsupportedError, match="^from_dlpack: torch cannot take data: "):
        from_dlpack(st, "torch")


# -- options ----------------------------------------------------------------------------------------------------------------


def test_a_device_of_the_same_kind_moves_nothing() -> None:
    source = at(MXFP8)
    for framework, device in (("torch", "cpu"), ("torch", torch.device("cpu")), ("jax", "cpu"), ("jax", jax.devices("cpu")[0])):
        assert addresses(from_dlpack(source, framework, device=device, copy=False)) == addresses(source)
    assert from_dlpack(source, "numpy", device="cpu") is source


def test_moving_to_another_device_is_a_copy() -> None:
    taken = from_dlpack(MXFP8, "torch", device="meta")
    assert (taken.device.type, taken.data.dtype) == ("meta", torch.float8_e4m3fn)
    with pytest.raises(
        OptionError, match="torch cannot share data: it is on cpu, and device='meta' is another device. copy=None copies"
    ):
        from_dlpack(MXFP8, "torch", device="meta", copy=False)
    assert from_dlpack(TORCH, "torch", device="meta").device.type == "meta"
    with pytest.raises(OptionError, match="JAX cannot use device 'nonsense'"):
        from_dlpack(MXFP8, "jax", device="nonsense")
    with pytest.raises(OptionError, match="NumPy arrays are on the 'cpu'; got device 'cuda'"):
        from_dlpack(TORCH, "numpy", device="cuda")


class Spent(Foreign):
    """An array whose capsule was already consumed."""

    def __dlpack__(self, stream: Any = None) -> Any:
        capsule = self.array.__dlpack__()
        torch.from_dlpack(capsule)
        return capsule


class Wrong(Foreign):
    def __dlpack__(self, stream: Any = None) -> Any:
        return "no capsule"


@pytest.mark.parametrize("kind", [Spent, Wrong])
@pytest.mark.parametrize("b", FRAMEWORKS)
def test_an_invalid_capsule_is_refused_and_not_read(b: str, kind: type[Foreign]) -> None:
    bundle = Bundle(to_dlpack(MXFP8).header, data=kind(MXFP8.data), scale=kind(MXFP8.scale))
    with pytest.raises(UnsupportedError, match=f"^from_dlpack: {b} cannot take data: "):
        from_dlpack(bundle, b)


class Elsewhere(Foreign):
    """An array on an unknown kind of device."""

    def __dlpack_device__(self) -> Any:
        return (10, 0)


def test_an_unreachable_device_is_refused_with_a_remedy() -> None:
    bundle = Bundle(to_dlpack(MXFP8).header, data=Elsewhere(MXFP8.data), scale=Elsewhere(MXFP8.scale))
    with pytest.raises(UnsupportedError, match="jax cannot take data: .*Pass device= to move it there, which copies."):
        from_dlpack(bundle, "jax")


def test_invalid_sources_and_options_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="^from_dlpack takes a ScaledTensor, or what to_dlpack gave; got ndarray"):
        from_dlpack(X, "torch")
    with pytest.raises(
        UnsupportedError, match="^to_dlpack takes a ScaledTensor, got ndarray; use a framework's own from_dlpack for"
    ):
        to_dlpack(X)
    with pytest.raises(OptionError, match="^copy is None, True or False; got 1."):
        from_dlpack(MXFP8, "torch", copy=1)
    with pytest.raises(UnknownNameError, match="^no framework 'troch'; did you mean 'torch'?"):
        from_dlpack(MXFP8, "troch")


def test_a_framework_of_a_plug_in_gets_contiguous_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limits are unknown, so only contiguous and writable memory is shared."""
    acme = Framework("acme", "acme", ("Tensor",), "breccia_torch.ops:TORCH")
    monkeypatch.setitem(sys.modules, "acme", SimpleNamespace(from_dlpack=torch.from_dlpack))
    monkeypatch.setitem(registry().declared["breccia_frameworks"], "acme", acme)
    assert addresses(from_dlpack(MXFP8, "acme", copy=False)) == addresses(MXFP8)
    rows = MXFP8[:, :128]
    assert breccia.bytes_equal(from_dlpack(rows, "acme"), rows)
    with pytest.raises(OptionError, match="acme cannot share data: its strides are not supported"):
        from_dlpack(rows, "acme", copy=False)


def test_operands_of_two_frameworks_are_refused_with_a_remedy() -> None:
    with pytest.raises(
        UnsupportedError, match=r"numpy array .* torch array; .*: breccia\.bridges\.from_dlpack\(x, 'numpy'\) takes"
    ):
        breccia.matmul(MXFP8, TORCH.mT)
    assert breccia.matmul(MXFP8, from_dlpack(TORCH, "numpy").mT).shape == (32, 32)


# -- plug-ins that are missing ------------------------------------------------------------------------------------------------

ARRAYS = {"torch": "__import__('torch').ones(2, 32)", "jax": "__import__('jax').numpy.ones((2, 32))"}
ARRAYS["mlx"] = "__import__('mlx.core').core.ones((2, 32))"


@pytest.mark.long
@pytest.mark.covering(1, 1)
@pytest.mark.parametrize(("absent", "present"), [(a, b) for a in ARRAYS for b in FRAMEWORKS if a != b])
def test_an_array_whose_plug_in_is_missing_names_the_package(absent: str, present: str) -> None:
    """With only the plug-in of another framework, for every kind of call."""
    script = f"""
import breccia, breccia.bridges
x = {ARRAYS[absent]}
st = breccia.cast(__import__("numpy").ones((2, 32), "f"), breccia.MXFP8BlockScaling())
for call in (
    lambda: breccia.cast(x, breccia.MXFP8BlockScaling()),
    lambda: breccia.matmul(st, x),
    lambda: breccia.bridges.from_dlpack(st, "{absent}"),
    lambda: breccia.ScaledTensor(x, x, breccia.MXFP8BlockScaling(), breccia.PerTensor()),
):
    try:
        call()
    except (breccia.UnsupportedError, breccia.UnknownNameError) as e:
        print(e)
"""
    blocked = ",".join(f for f in ("torch", "jax", "mlx") if f != present)
    said = printed(script, flags=("-W", "ignore"), BRECCIA_BLOCK=blocked).splitlines()
    assert len(said) == 4
    remedy = install(f"breccia-{absent}")
    assert all(f"{remedy}. It is installed but blocked: named in BRECCIA_BLOCK." in line for line in said), said


# -- CUDA ------------------------------------------------------------------------------------------------------------------


@on_cuda
def test_cuda_tensors_are_shared_with_jax_and_moved_when_asked() -> None:
    st = breccia.cast(torch.from_numpy(X).cuda(), breccia.NVFP4BlockScaling())
    taken = from_dlpack(st, "jax", copy=False)
    assert addresses(taken) == addresses(st) and breccia.bytes_equal(taken, st)
    assert addresses(from_dlpack(taken, "torch", copy=False)) == addresses(st)
    host = from_dlpack(st, "numpy", device="cpu")
    assert breccia.bytes_equal(host, st)
    assert breccia.bytes_equal(from_dlpack(host, "torch", device="cuda"), st)
    copied = from_dlpack(st, "torch", copy=True)
    assert copied.device == st.device and breccia.bytes_equal(copied, st) and addresses(copied) != addresses(st)
    with pytest.raises(
        UnsupportedError, match="numpy cannot take data: .*device= says where it is to be; moving it there copies"
    ):
        from_dlpack(st, "numpy")
