"""Storages rearrange codes and scales and change nothing else: a stored tensor behaves like the plain one, bit by bit.

What a storage holds is found anew below, item by item, from the words of its documentation.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import recipes
from hypothesis import given, settings
from hypothesis import strategies as some
from marks import here
from recipes import recipe_id

import breccia
from breccia import (
    BrecciaError,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    InStorage,
    INT4Scaling,
    INT8Scaling,
    Kernel,
    Layout,
    LayoutError,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    PerBlockMN,
    PerChannel,
    PerGroupIndex,
    PluginError,
    ScaledTensor,
    ScalingRecipe,
    UnknownNameError,
    UnsupportedError,
    bytes_equal,
    hookimpl,
)
from breccia.arrays import frameworks
from breccia.dispatch import registry
from breccia.dispatch.registry import Plugin, Registry, _installed
from breccia.formats import TENSOR
from breccia.options import FLOAT32, ProductOptions
from breccia.tensors.components import components
from breccia.tensors.grids import packing
from breccia.tensors.storage import Storage
from breccia.testing.examples import special_rows, wide
from breccia.testing.laws.recipes import moved
from breccia.testing.places import Place, words

#: Warnings that torch's own modules raise on import.
pytestmark = [pytest.mark.filterwarnings("ignore:`torch.jit"), pytest.mark.covering(1, 2)]

FRAMEWORKS = ("numpy", "torch", "jax", "mlx")
#: Frameworks that compile nothing by themselves.
EAGER = ("numpy", "torch", "mlx")
STORAGES = ("swizzle_128x4", "column_major", "transposed", "padded_1x4", "padded_128x4", "interleaved")
#: What rows and columns of padded scales are multiples of.
PADDED = {"padded_1x4": (1, 4), "padded_128x4": (128, 4)}
MXFP8, NVFP4 = MXFP8BlockScaling(), NVFP4BlockScaling()
quick = settings(max_examples=8, deadline=None)
#: One recipe for each arrangement of components.
RECIPES = list({(recipe.format, recipe.layout): recipe for recipe in reversed(recipes.RECIPES)}.values())


def _slow_on_jax(*few: str) -> list[Any]:
    """All (storage, framework) pairs. JAX compiles for seconds, so it runs `few` storages here and all in the slow suite."""
    return [
        pytest.param(storage, framework, marks=[pytest.mark.slow] if framework == "jax" and storage not in few else [])
        for framework in FRAMEWORKS
        for storage in STORAGES
    ]


#: A storage that moves scales, and one that also moves codes; compiled tests use the latter if one is enough.
EVERYWHERE = _slow_on_jax("swizzle_128x4", "interleaved")
ALMOST = _slow_on_jax("interleaved")
ELSEWHERE = _slow_on_jax()
FEW = [storage if storage == "interleaved" else pytest.param(storage, marks=pytest.mark.slow) for storage in STORAGES]


@pytest.fixture(params=FRAMEWORKS)
def place(request: pytest.FixtureRequest) -> Place:
    return here(request.param)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Reset the compiler, so that tests do not share graphs."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"]._dynamo.reset()


# -- what each storage holds, item by item ---------------------------------------------------------------------------


def can_hold(storage: str, recipe: ScalingRecipe) -> bool:
    """As documented: scales of blocks; for the swizzle of one byte; beside codes, of parts of one row in whole bytes."""
    m, k = recipe.layout.block(-1)
    if (m, k) == TENSOR:
        return False
    if storage == "swizzle_128x4":
        return recipe.format.scale.codec.bits == 8
    if storage != "interleaved":
        return True
    return m == 1 and recipe.format.offset == "none" and (k is None or k * recipe.format.element.bits % 8 == 0)


PAIRS = [
    pytest.param(storage, recipe, id=f"{storage}-{recipe_id(recipe)}")
    for storage in STORAGES
    for recipe in RECIPES
    if can_hold(storage, recipe)
]


def swizzled(scale: np.ndarray) -> np.ndarray:
    """cuBLAS, "1D block scaling factors layout": tiles of 128 x 4 scales, row by row of tiles, each of 512 bytes."""
    *lead, rows, columns = scale.shape
    found = np.zeros((*lead, -(-rows // 128), -(-columns // 4), 512), scale.dtype)
    for *at, r, c in np.ndindex(*scale.shape):
        row, column = r % 128, c % 4
        found[*at, r // 128, c // 4, (row % 32) * 16 + (row // 32) * 4 + column] = scale[*at, r, c]
    return found


def by_columns(scale: np.ndarray, unit: int) -> np.ndarray:
    """Columns of scales, one after the other, each padded to a multiple of so many bytes."""
    *lead, rows, columns = scale.shape
    items = unit // scale.itemsize or 1
    found = np.zeros((*lead, columns, -(-rows // items) * items), scale.dtype)
    for *at, r, c in np.ndindex(*scale.shape):
        found[*at, c, r] = scale[*at, r, c]
    return found


def padded(scale: np.ndarray, down: int, along: int) -> np.ndarray:
    """Scales in the corner of zeros, whose rows and columns are multiples."""
    *lead, rows, columns = scale.shape
    found = np.zeros((*lead, -(-rows // down) * down, -(-columns // along) * along), scale.dtype)
    for *at, r, c in np.ndindex(*scale.shape):
        found[*at, r, c] = scale[*at, r, c]
    return found


def beside(data: np.ndarray, scale: np.ndarray, size: int) -> np.ndarray:
    """Blocks of `size` bytes of codes, each before the bytes of its scale, the lowest first."""
    found = np.zeros((*scale.shape, size + scale.itemsize), np.uint8)
    for *at, row, block in np.ndindex(*scale.shape):
        codes = data[*at, row, block * size : (block + 1) * size]
        found[*at, row, block, : len(codes)] = codes
        found[*at, row, block, size:] = list(int(scale[*at, row, block]).to_bytes(scale.itemsize, "little"))
    return found


def expected_parts(storage: str, st: ScaledTensor) -> dict[str, np.ndarray]:
    """The words that a storage holds for a plain NumPy tensor; blocks along the rows are those of the transpose."""
    st = st if st.axis == -1 else st.mT
    parts = {name: words(np.asarray(part)) for name, part in components(st).items()}
    changed = [name for name in ("scale", "zero_point") if name in parts]
    if storage == "swizzle_128x4":
        return parts | {name: swizzled(parts[name]) for name in changed}
    if storage in PADDED:
        return parts | {name: padded(parts[name], *PADDED[storage]) for name in changed}
    if storage != "interleaved":
        return parts | {name: by_columns(parts[name], 16 if storage == "column_major" else 0) for name in changed}
    k = st.layout.block(-1)[1]
    group, size = packing(st.recipe.format.element)
    length = st.data.shape[-1] if k is None else k // group * size
    return parts | {"data": beside(parts["data"], parts["scale"], length), "scale": np.zeros(0, np.uint8)}


def assert_stored(place: Place, stored: ScaledTensor, storage: str, plain: ScaledTensor) -> None:
    """`stored`, of a place, holds what the storage has for `plain`, of NumPy, and is that in every other way."""
    assert (stored.storage, stored.framework) == (storage, place.framework)
    lying = stored if stored.axis == -1 else stored.mT
    expected = expected_parts(storage, plain)
    assert set(components(stored)) == set(expected)
    for name, theirs in expected.items():
        ours = place.words(getattr(lying, name))
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (name, ours.shape, theirs.shape)
        assert np.array_equal(ours, theirs), name
    assert (stored.shape, stored.ndim, len(stored)) == (plain.shape, plain.ndim, len(plain))
    assert (stored.recipe, stored.axis, stored.layout.plain) == (plain.recipe, plain.axis, plain.layout)
    back = stored.to_plain()
    assert back.storage == "plain" and bytes_equal(back, plain) and bytes_equal(stored, plain)
    for name, part in components(plain).items():
        assert np.array_equal(place.words(getattr(back, name)), words(np.asarray(part))), name


def cube(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Numbers of every clause in the first matrix, and ordinary ones."""
    x = wide(shape, seed=seed, exponents=3)
    special = special_rows(shape[-1])
    flat = x.reshape(-1, shape[-1])
    n = min(len(special), len(flat))
    flat[:n] = special[:n]
    return x


@some.composite
def tensors(draw: Any, recipe: ScalingRecipe) -> ScaledTensor:
    """Partial blocks, padding codes, several tiles of the swizzle, leading axes, either axis; NaN and Inf among the numbers."""
    lead = draw(some.lists(some.integers(1, 2), max_size=2))
    rows, k = draw(some.sampled_from([1, 3, 8, 33])), draw(some.sampled_from([1, 15, 64, 77, 140]))
    x = cube((*lead, rows, k), seed=draw(some.integers(0, 5)))
    return breccia.cast(x.swapaxes(-1, -2), recipe, axis=-2) if draw(some.booleans()) else breccia.cast(x, recipe)


@pytest.mark.parametrize(("storage", "recipe"), PAIRS)
@quick
@given(data=some.data())
def test_a_storage_has_its_documented_form_and_round_trips_every_bit(storage: str, recipe: ScalingRecipe, data: Any) -> None:
    st = data.draw(tensors(recipe))
    stored = st.to_storage(storage)
    assert_stored(Place("numpy"), stored, storage, st)
    assert stored.to_storage(storage) is stored and bytes_equal(stored.to_storage("plain"), st)
    assert Layout.from_json(stored.layout.to_json()) == stored.layout
    assert bytes_equal(stored.mT.to_plain(), st.mT) and bytes_equal(stored.mT.mT, st)
    assert (stored.mT.shape, stored.mT.axis, stored.mT.layout.plain) == (st.mT.shape, st.mT.axis, st.mT.layout)


@pytest.mark.parametrize("framework", ["torch", "mlx", pytest.param("jax", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("storage", "recipe"), PAIRS)
def test_every_framework_stores_the_same_words(framework: str, storage: str, recipe: ScalingRecipe) -> None:
    place = here(framework)
    for x, axis in ((cube((33, 77)), -1), (cube((2, 5, 40), 1).swapaxes(-1, -2), -2), (cube((2, 1, 3, 24), 2), -1)):
        plain = breccia.cast(x, recipe, axis=axis)
        assert_stored(place, moved(plain, place).to_storage(storage), storage, plain)


@pytest.mark.parametrize("storage", FEW)
def test_jax_stores_the_same_words_with_and_without_jit(storage: str) -> None:
    place = here("jax")
    import jax

    plain = breccia.cast(cube((33, 77)), NVFP4)
    st = moved(plain, place)
    assert_stored(place, st.to_storage(storage), storage, plain)
    assert_stored(place, jax.jit(lambda st: st.to_storage(storage))(st), storage, plain)
    assert bytes_equal(jax.jit(lambda st: st.to_plain())(st.to_storage(storage)), plain)


def test_the_swizzle_matches_the_figure_in_the_cublas_documentation() -> None:
    """A tensor of 130 rows of 5 blocks has 2 x 2 tiles; where some of its scales are, counted by hand from the figure."""
    scale = (np.arange(130 * 5) % 251).astype(np.uint8).reshape(130, 5)
    data = np.zeros((130, 160), np.uint8)
    found = np.asarray(breccia.from_buffer(data, scale, MXFP8, PerBlockMN(1, 32)).to_storage("swizzle_128x4").scale)
    assert found.shape == (2, 2, 512)
    assert found[0, 0, :16].tolist() == [*scale[0, :4], *scale[32, :4], *scale[64, :4], *scale[96, :4]]
    assert found[0, 0, 16:20].tolist() == scale[1, :4].tolist() and found[0, 0, 508:].tolist() == scale[127, :4].tolist()
    assert found[0, 1, :4].tolist() == [scale[0, 4], 0, 0, 0] and found[1, 0, 16:20].tolist() == scale[129, :4].tolist()
    assert not found[1, 1, 4:16].any() and found[1, 1, 16] == scale[129, 4]


@pytest.mark.parametrize(("storage", "framework"), ALMOST)
@pytest.mark.parametrize("recipe", [NVFP4, MXFP8], ids=recipe_id)
def test_scales_of_zero_and_of_nan_survive(storage: str, framework: str, recipe: ScalingRecipe) -> None:
    place = here(framework)
    x = np.ones((33, 77), np.float32)
    x[2], x[7, 40], x[9, 3] = 0.0, np.nan, np.inf
    x[11] = 2.0**-120  # under NVFP4 a scale of zero, which the tensor's makes it
    plain = breccia.cast(x, recipe)
    codes = np.asarray(plain.scale).view(np.uint8)
    assert (codes == 0).any() and (codes == recipe.format.scale.codec.nan_code).any()
    stored = moved(plain, place).to_storage(storage)
    assert_stored(place, stored, storage, plain)
    assert np.array_equal(place.words(breccia.dequantize(stored)), place.words(breccia.dequantize(stored.to_plain())))


# -- all that a tensor does ------------------------------------------------------------------------------------------

#: What tensors are given, and give: arrays, tensors, tuples of them, or facts.
Verb = Callable[[ScaledTensor], Any]


def eye(st: ScaledTensor, side: int) -> Any:
    """The identity matrix; products by it are exact in any order of summation."""
    return frameworks.ops_of(st.data).from_numpy(np.eye(side, dtype=np.float32))


def unit(st: ScaledTensor, axis: int) -> int:
    """The smallest length of an axis that fills whole blocks and bytes."""
    m, k = st.layout.block(st.axis)
    if axis == st.axis:
        return math.lcm(k or st.shape[axis], packing(st.recipe.format.element)[0])
    return m or st.shape[axis]


def rest_of(st: ScaledTensor) -> list[int]:
    """What is left of the axis before the last one behind its first unit."""
    left = st.shape[-2] - unit(st, -2)
    return [left] if left > 0 else []


def top(st: ScaledTensor) -> ScaledTensor:
    """The first unit along that axis, in the same storage."""
    return st[..., : unit(st, -2), :].to_storage(st.storage)


VERBS: dict[str, Verb] = {
    "shape": lambda st: (st.shape, st.ndim, len(st), st.axis, st.padding, st.framework, str(st.device)),
    "digest": lambda st: st.digest(),
    "dequantize": lambda st: breccia.dequantize(st),
    "dequantize to 16 bits": lambda st: breccia.dequantize(st, out_dtype="float16"),
    "dequantize of the transpose": lambda st: breccia.dequantize(st.mT),
    "matmul from the left": lambda st: breccia.matmul(st, eye(st, st.shape[-1])),
    "matmul from the right": lambda st: breccia.matmul(eye(st, st.shape[-2]), st),
    "matmul of the transpose": lambda st: breccia.matmul(eye(st, st.shape[-1]), st.mT, "float16"),
    "cast_matmul": lambda st: breccia.cast_matmul(eye(st, st.shape[-1]), MXFP8, st.mT),
    "requantize": lambda st: breccia.requantize(st, INT8Scaling()),
    "requantize to the same": lambda st: breccia.requantize(st, st.recipe),
    "requantize of the transpose": lambda st: breccia.requantize(st.mT, Float8CurrentScaling()),
    "slices": lambda st: (st[..., : unit(st, -2), :], st[..., unit(st, -1) :], st[..., :0, :], st[0], st[-1:]),
    "iteration": tuple,
    "select": lambda st: (st.select(0, -1), st.select(0, [1, 0, 1])),
    "split": lambda st: (*st.split(1), *st.split([st.shape[-2] - sum(rest_of(st)), *rest_of(st)], axis=-2)),
    "concat": lambda st: (
        breccia.concat([st, st]),
        breccia.concat([st, st.to_plain()]),
        breccia.concat([top(st), st], axis=-2),
    ),
    "stack": lambda st: (breccia.stack([st, st]), breccia.stack([st.to_plain(), st], axis=1)),
    "reshape": lambda st: (st.reshape(*st.shape), st.reshape(1, -1, *st.shape[-2:]), st.reshape(-1, 1, *st.shape[-2:])),
    "transpose": lambda st: (st.mT, st.mT.mT, st.mT[0]),
    "to": lambda st: (st.to(None), st.to("cpu")),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda st: pickle.loads(pickle.dumps(st)),
}


def alike(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, tuple):
        return isinstance(ours, tuple) and len(ours) == len(theirs) and all(map(alike, ours, theirs))
    if isinstance(theirs, ScaledTensor):
        return bytes_equal(ours, theirs) and type(ours.data) is type(theirs.data) and ours.shape == theirs.shape
    if hasattr(theirs, "dtype"):
        ops = frameworks.ops_of(theirs)
        left, right = (np.asarray(ops.to_numpy(x)) for x in (ours, theirs))
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    return ours == theirs


#: One for each kind of part: two levels, tiles, a zero-point, groups of three bytes, one scale a row; JAX takes the first.
KINDS: list[ScalingRecipe] = [
    NVFP4,
    Float8BlockScaling(block_m=4, block_k=8),
    INT4Scaling(group_size=8, signed=False, symmetric=False),
    breccia.MXFP6BlockScaling(),
    INT8Scaling(),
]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("framework", [*EAGER, pytest.param("jax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_stored_tensor_behaves_like_the_plain_one(storage: str, framework: str, verb: str) -> None:
    place = here(framework)
    for recipe in KINDS if framework != "jax" else KINDS[:1]:
        if can_hold(storage, recipe):
            for x, axis in ((wide((2, 8, 36), seed=3, exponents=2), -1), (wide((2, 36, 8), seed=4, exponents=2), -2)):
                plain = breccia.cast(place.array(x), recipe, axis=axis)
                assert alike(VERBS[verb](plain.to_storage(storage)), VERBS[verb](plain)), recipe


JITTED = ("dequantize", "matmul of the transpose")


@pytest.mark.long
@pytest.mark.parametrize("storage", FEW)
def test_a_stored_tensor_behaves_like_the_plain_one_inside_jit(storage: str) -> None:
    place = here("jax")
    import jax

    plain = breccia.cast(place.array(wide((2, 8, 36), seed=3, exponents=2)), NVFP4)

    def several(st: ScaledTensor) -> Any:
        return tuple(VERBS[verb](st) for verb in JITTED)

    stored = plain.to_storage(storage)
    assert alike(jax.jit(several)(stored), jax.jit(several)(plain))


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
def test_gradients_work_with_a_stored_operand_inside_jit(storage: str) -> None:
    place = here("jax")
    import jax

    plain, x = (
        breccia.cast(place.array(wide((2, 8, 36), seed=3, exponents=2)), NVFP4),
        place.array(np.zeros((2, 3, 36), np.float32)),
    )
    gradient = jax.jit(jax.grad(lambda x, st: breccia.matmul(x, st.mT).sum()))
    assert alike(gradient(x, plain.to_storage(storage)), gradient(x, plain))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_stored_tensor_is_a_pytree_of_its_components(storage: str) -> None:
    """Tree operations preserve the storage."""
    x = wide((2, 8, 36), seed=5, exponents=2)

    def same(found: ScaledTensor, st: ScaledTensor) -> bool:
        return found.storage == storage and found.layout == st.layout and alike(found, st)

    if not Place("torch").absence:
        from torch.utils import _pytree as pytree

        st = breccia.cast(Place("torch").array(x), NVFP4).to_storage(storage)
        leaves, spec = pytree.tree_flatten([st])
        assert same(pytree.tree_unflatten([leaf if leaf is None else leaf.clone() for leaf in leaves], spec)[0], st)
    if not Place("jax").absence:
        import jax

        st = breccia.cast(Place("jax").array(x), NVFP4).to_storage(storage)
        assert same(jax.tree.map(lambda leaf: leaf + 0, st), st)
        assert same(jax.jit(lambda st: st)(st), st)
    if not Place("mlx").absence:
        import breccia_mlx

        st = breccia.cast(Place("mlx").array(x), NVFP4).to_storage(storage)
        assert same(breccia_mlx.from_tree(breccia_mlx.to_tree({"w": [st]}))["w"][0], st)


@pytest.mark.parametrize(("storage", "framework"), ELSEWHERE)
def test_grouped_matmul_accepts_stored_operands(storage: str, framework: str) -> None:
    place = here(framework)
    x, w = wide((5, 32), seed=6, exponents=1), wide((2, 5, 32), seed=7, exponents=1)
    st, weight = breccia.cast(place.array(x), MXFP8), breccia.cast(place.array(w), MXFP8)
    offsets = place.array(np.array([2, 4], np.int32))
    ones = breccia.cast(place.array(np.broadcast_to(np.eye(5, 32, dtype=np.float32), (5, 32)).copy()), MXFP8)
    found = breccia.grouped_matmul(ones.to_storage(storage), weight.to_storage(storage).mT, offsets)
    assert alike(found, breccia.grouped_matmul(ones, weight.mT, offsets)), "of one term each"
    if place.framework != "jax":
        assert alike(breccia.grouped_matmul(st.to_storage(storage), weight.mT, offsets).shape, (5, 5))


# -- files, DLPack, other frameworks ---------------------------------------------------------------------------------

BRIDGED = [NVFP4, MXFP8, INT4Scaling(group_size=8), Float8BlockScaling(block_k=12), INT8Scaling()]


@pytest.mark.parametrize(("storage", "framework"), ALMOST)
def test_a_stored_tensor_is_saved_as_the_plain_one(storage: str, framework: str, tmp_path: Path) -> None:
    pytest.importorskip("breccia_bridges")
    place, bridges = here(framework), breccia.bridges
    tensors = {}
    for recipe in BRIDGED if framework != "jax" else BRIDGED[:1]:
        if can_hold(storage, recipe):
            for axis in (-1, -2) if framework != "jax" else (-1,):
                tensors[f"{recipe.name}{axis}"] = breccia.cast(place.array(wide((9, 35), seed=8)), recipe, axis=axis)
    bridges.save_safetensors(
        {name: st.to_storage(storage) for name, st in tensors.items()}, tmp_path / "stored.safetensors", {"k": "v"}
    )
    bridges.save_safetensors(tensors, tmp_path / "plain.safetensors", {"k": "v"})
    assert (tmp_path / "stored.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()
    for name, found in bridges.load_safetensors(tmp_path / "stored.safetensors", framework=framework).items():
        assert found.storage == "plain" and alike(found, tensors[name])


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("target", FRAMEWORKS)
@pytest.mark.parametrize("source", FRAMEWORKS)
def test_stored_tensors_convert_between_frameworks(source: str, target: str) -> None:
    pytest.importorskip("breccia_bridges")
    place, bridges = here(source), breccia.bridges
    here(target)
    few = "jax" in (source, target)
    for recipe in BRIDGED[:1] if few else BRIDGED:
        for storage in (storage for storage in STORAGES if can_hold(storage, recipe)):
            for axis in (-1,) if few else (-1, -2):
                st = breccia.cast(place.array(wide((9, 35), seed=9)), recipe, axis=axis)
                stored = st.to_storage(storage)
                bundle = bridges.to_dlpack(stored)
                for taken in (
                    bridges.from_dlpack(stored, target),
                    bridges.from_dlpack(bundle, target),
                    bridges.from_dlpack(stored, target, copy=True),
                ):
                    assert taken.framework == target and bytes_equal(taken, st) and taken.shape == st.shape
                    there = {name: frameworks.dtype_name(part) for name, part in components(taken.to_plain()).items()}
                    assert there == Place(target).ops.dtypes(recipe.format), "the dtypes that the framework stores parts in"


# -- casts that write storages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("storage", "framework"), EVERYWHERE)
def test_a_cast_into_a_storage_equals_cast_then_to_storage(storage: str, framework: str) -> None:
    place = here(framework)
    for recipe in KINDS if place.framework != "jax" else KINDS[:1]:
        if can_hold(storage, recipe):
            for x, axis in ((cube((9, 35)), -1), (cube((35, 10)), -2))[: 1 if place.framework == "jax" else 2]:
                found = breccia.cast(place.array(x), recipe, axis=axis, storage=storage)
                assert_stored(place, found, storage, breccia.cast(x, recipe, axis=axis))


@pytest.mark.parametrize(("storage", "framework"), ELSEWHERE)
def test_a_pair_of_casts_into_a_storage_writes_both(storage: str, framework: str) -> None:
    place = here(framework)
    x = cube((9, 35))
    for found, axis in zip(breccia.cast_pair(place.array(x), NVFP4, storage=storage), (-1, -2), strict=True):
        assert_stored(place, found, storage, breccia.cast(x, NVFP4, axis=axis))


@pytest.mark.parametrize("storage", STORAGES)
def test_options_of_a_cast_work_with_a_storage(storage: str) -> None:
    x = wide((9, 35), seed=10, exponents=2)
    plain = breccia.cast(x, MXFP8, rounding="stochastic", seed=5)
    assert_stored(Place("numpy"), breccia.cast(x, MXFP8, rounding="stochastic", seed=5, storage=storage), storage, plain)
    supplied = breccia.cast(3 * x, MXFP8).scale
    found = breccia.cast(x, MXFP8, scale=supplied, storage=storage)
    assert_stored(Place("numpy"), found, storage, breccia.cast(x, MXFP8, scale=supplied))
    x[3, 4] = np.nan
    with pytest.raises(breccia.NonFiniteError):
        breccia.cast(x, MXFP8, nonfinite="raise", storage=storage)


@pytest.mark.parametrize(("storage", "framework"), ELSEWHERE)
def test_requantize_writes_the_requested_storage(storage: str, framework: str) -> None:
    """For operands in any storage; the result is plain by default, under the same recipe too."""
    place = here(framework)
    x = wide((9, 35), seed=11, exponents=2)
    st = breccia.cast(place.array(x), MXFP8)
    others = ("plain", *STORAGES) if place.framework != "jax" else ("plain",)
    for given_in in others:
        given_one = st.to_storage(given_in)
        host = breccia.cast(x, MXFP8)
        found = breccia.requantize(given_one, NVFP4, storage=storage)
        assert_stored(place, found, storage, breccia.requantize(host, NVFP4))
        assert_stored(place, breccia.requantize(given_one, MXFP8, storage=storage), storage, host)
        plain = breccia.requantize(given_one, MXFP8)
        assert plain.storage == "plain" and bytes_equal(plain, st)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("storage", STORAGES)
def test_out_is_written_in_its_storage(storage: str, framework: str) -> None:
    place, x, y = here(framework), wide((9, 35), seed=12), wide((9, 35), seed=13)
    out = breccia.cast(place.array(x), NVFP4, storage=storage)
    parts = {name: id(part) for name, part in components(out).items()}
    assert breccia.cast(place.array(y), NVFP4, storage=storage, out=out) is out
    assert {name: id(part) for name, part in components(out).items()} == parts
    assert_stored(place, out, storage, breccia.cast(y, NVFP4))
    plain = breccia.cast(place.array(x), NVFP4)
    before = plain.digest()
    for wrong, options in ((plain, {"storage": storage}), (out, {})):
        with pytest.raises(
            LayoutError, match=r"^out= is breccia\.ScaledTensor\(.*, but the cast returns breccia\.ScaledTensor\("
        ):
            breccia.cast(place.array(y), NVFP4, out=wrong, **options)
    assert plain.digest() == before
    again = breccia.cast(place.array(x), MXFP8)
    assert breccia.requantize(again, NVFP4, storage=storage, out=out) is out
    assert bytes_equal(out, breccia.requantize(again, NVFP4))


# -- existing components ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("storage", "framework"), ELSEWHERE)
@pytest.mark.parametrize("recipe", [NVFP4, MXFP8, breccia.MXFP6BlockScaling()], ids=recipe_id)
def test_stored_components_are_wrapped_with_their_logical_shape(storage: str, framework: str, recipe: ScalingRecipe) -> None:
    """Padding codes included: 35 of four bits fill 18 bytes, and of six bits 27."""
    place = here(framework)
    for axis in (-1, -2):
        plain = breccia.cast(wide((35, 35), seed=14), recipe, axis=axis)
        st = moved(plain, place).to_storage(storage)
        parts = (st.data, st.scale, st.recipe, st.layout, st.zero_point, st.global_scale, st.axis)
        found = breccia.from_buffer(*parts, shape=st.shape)
        assert (found.shape, found.padding) == (plain.shape, plain.padding)
        assert_stored(place, found, storage, plain)


#: Data and scale of which one contradicts the other, the layout or the recipe: of storages that move scales, and of one that
#: moves codes too.
CONTRADICTIONS: dict[str, Callable[[ScaledTensor], tuple[Any, Any]]] = {
    "plain scales": lambda st: (st.data, st.to_plain().scale),
    "scales of fewer blocks": lambda st: (st.data, st.scale[..., :1]),
    "scales of more matrices": lambda st: (st.data, np.stack([st.scale, st.scale])),
    "wider scales": lambda st: (st.data, st.scale.astype(np.uint16)),
    "codes of another dtype": lambda st: (st.data.astype(np.int32), st.scale),
}
BESIDE: dict[str, Callable[[ScaledTensor], tuple[Any, Any]]] = {
    "plain parts": lambda st: (st.to_plain().data, st.to_plain().scale),
    "scales twice": lambda st: (st.data, st.to_plain().scale),
    "codes of fewer rows": lambda st: (st.data[:-1], st.scale),
    "codes of fewer blocks": lambda st: (st.data[:, 1:], st.scale),
    "codes without their scales": lambda st: (st.data[..., :-1], st.scale),
    "more bytes a block": lambda st: (np.pad(st.data, [(0, 0), (0, 0), (0, 1)]), st.scale),
    "codes of another dtype": lambda st: (st.data.astype(np.int32), st.scale),
}


@pytest.mark.parametrize("framework", EAGER)
@pytest.mark.parametrize(
    ("storage", "fault"), [*((s, f) for s in STORAGES[:-1] for f in CONTRADICTIONS), *(("interleaved", f) for f in BESIDE)]
)
def test_stored_components_that_contradict_each_other_are_refused(storage: str, fault: str, framework: str) -> None:
    place = here(framework)
    st = breccia.cast(wide((9, 70), seed=15), NVFP4).to_storage(storage)
    data, scale = (BESIDE if storage == "interleaved" else CONTRADICTIONS)[fault](st)
    parts = [place.array(np.asarray(part, order="C")) for part in (data, scale, st.global_scale)]
    with pytest.raises(BrecciaError):
        ScaledTensor(parts[0], parts[1], NVFP4, st.layout, None, parts[2])


# -- what a storage cannot hold --------------------------------------------------------------------------------------


def refused(storage: str, reason: str) -> str:
    return f"storage {storage!r} cannot hold this tensor: {reason}. It stays in plain storage."


ONE_SCALE = "it has one scale for the whole tensor, or for each matrix"
REFUSED: list[tuple[str, ScalingRecipe, str]] = [
    *((storage, Float8CurrentScaling(), ONE_SCALE) for storage in ("column_major", "transposed")),
    *((storage, DelayedScaling("E5M2"), ONE_SCALE) for storage in ("column_major", "transposed")),
    ("swizzle_128x4", Float8CurrentScaling(), "its scales are F32, and the order is one of bytes"),
    ("swizzle_128x4", Float8BlockScaling(), "its scales are F32, and the order is one of bytes"),
    ("swizzle_128x4", INT4Scaling(), "its scales are F16, and the order is one of bytes"),
    ("swizzle_128x4", INT8Scaling(group_size=16, scale_dtype="bf16"), "its scales are BF16, and the order is one of bytes"),
    ("interleaved", Float8CurrentScaling(), "its blocks are all rows high, and this storage needs blocks within one row"),
    ("interleaved", Float8BlockScaling(block_m=4, block_k=8),
        "its blocks are 4 rows high, and this storage needs blocks within one row"),
    ("interleaved", INT4Scaling(group_size=15), "its blocks of 15 INT4 codes do not end on a byte boundary"),
    ("interleaved", INT4Scaling(group_size=16, signed=False, symmetric=False),
        "it has an offset, which this storage does not support"),
    ("interleaved", INT4Scaling(group_size=16, signed=False, symmetric=False, offset="bias"),
        "it has an offset, which this storage does not support"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("storage", "recipe", "reason"), REFUSED, ids=lambda v: recipe_id(v) if isinstance(v, ScalingRecipe) else None
)
def test_a_tensor_that_a_storage_cannot_hold_is_refused_and_unchanged(storage: str, recipe: ScalingRecipe, reason: str) -> None:
    x = wide((8, 48), seed=16)
    st = breccia.cast(x, recipe)
    before = st.digest()
    for verb in (
        lambda: st.to_storage(storage),
        lambda: st.mT.to_storage(storage),
        lambda: breccia.cast(x, recipe, storage=storage),
        lambda: breccia.requantize(st, recipe, storage=storage),
    ):
        with pytest.raises(UnsupportedError) as e:
            verb()
        assert str(e.value) == refused(storage, reason)
    assert st.digest() == before and st.storage == "plain"


def test_scales_that_do_not_form_a_matrix_of_blocks_are_refused(place: Place) -> None:
    array = place.array
    codes = array(np.zeros((4, 16), np.uint8))
    rows = ScaledTensor(codes, array(np.ones(4, np.float32)), INT8Scaling(signed=False), PerChannel())
    index = PerGroupIndex((0, 1) * 8, 2)
    groups = ScaledTensor(codes, array(np.ones((4, 2), np.float32)), INT8Scaling(signed=False, group_size=8), index)
    for st, said in ((rows, "PerChannel() has scales of shape (4,)"), (groups, f"{index} has scales of shape (4, 2)")):
        for storage in ("column_major", "transposed", "interleaved"):
            with pytest.raises(UnsupportedError) as e:
                st.to_storage(storage)
            assert str(e.value) == (
                f"storage {storage!r} needs one scale for each block, in the order of blocks; {said} for a tensor of shape "
                "(4, 16). It stays in plain storage."
            )
    one = breccia.cast(array(np.ones(16, np.float32)), Float8CurrentScaling())
    for storage in STORAGES:
        with pytest.raises(UnsupportedError) as e:
            one.to_storage(storage)
        assert str(e.value) == refused(storage, "a matrix has scales of its own order here")


def test_an_unknown_storage_is_refused_with_the_nearest_name(place: Place) -> None:
    st = breccia.cast(place.array(wide((4, 32))), MXFP8)
    for verb in (
        lambda: st.to_storage("colum_major"),
        lambda: breccia.cast(place.array(wide((4, 32))), MXFP8, storage="colum_major"),
        lambda: breccia.requantize(st, NVFP4, storage="colum_major"),
    ):
        with pytest.raises(UnknownNameError) as e:
            verb()
        assert str(e.value) == (
            "no storage 'colum_major'; did you mean 'column_major'? Known: column_major, interleaved, mma_16x128, "
            "padded_128x4, padded_1x4, swizzle_128x4, transposed."
        )
    # tests/triton/test_weight_only.py has the form of the last one.
    assert {*STORAGES, "mma_16x128"} == set(registry.registry().declared["breccia_storages"])


@dataclass(frozen=True)
class Spiral(PerBlockMN):
    """A layout that no plug-in declares."""

    name = "spiral"


def test_the_transpose_of_a_stored_layout_is_made_once() -> None:
    """Calls are looked up by its key, which takes longer to make than the rest of a call."""
    plain = PerBlockMN(1, 32)
    layout = InStorage(plain, "transposed")
    assert layout.mT is layout.mT == InStorage(plain.mT, "transposed")
    assert pickle.loads(pickle.dumps(layout)).mT == layout.mT


def test_an_undeclared_layout_cannot_be_stored() -> None:
    st = breccia.cast(wide((4, 32)), MXFP8)
    for layout in (Spiral(1, 32), InStorage(Spiral(1, 32), "transposed")):
        with pytest.raises(UnsupportedError, match=r"^no plug-in declares layout Spiral, so its scale order is unknown\. "):
            ScaledTensor(st.data, st.scale, MXFP8, layout)


# -- torch: layers, checkpoints, graphs ------------------------------------------------------------------------------


def layers(storage: str, bias: bool = True, **options: Any) -> tuple[Any, Any]:
    """A layer of a plain weight, and one of the same weight in a storage; odd lengths."""
    import torch

    from breccia_torch.nn import ScaledLinear, ScaledWeight

    linear = torch.nn.Linear(35, 6, bias)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(wide((6, 35), seed=17, exponents=2)))
    st = breccia.cast(linear.weight.detach(), NVFP4)
    plain, stored = (ScaledLinear.in_place_of(linear, ScaledWeight(each), **options) for each in (st, st.to_storage(storage)))
    return plain, stored


def rows(n: int, seed: int = 0) -> Any:
    import torch

    return torch.from_numpy(wide((n, 35), seed=seed, exponents=1))


@pytest.mark.parametrize("activation", [None, MXFP8], ids=["plain input", "cast input"])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_layer_with_a_stored_weight_equals_one_with_the_plain_weight(storage: str, activation: Any) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("breccia_torch")
    plain, stored = layers(storage, activation=activation)
    assert stored.weight.tensor.storage == storage and stored.weight.shape == plain.weight.shape == (6, 35)
    assert repr(stored) == repr(plain)
    for dtype in (torch.float32, torch.bfloat16):
        for x in (rows(5).to(dtype), rows(5).to(dtype)[None], rows(1).to(dtype)[0]):
            assert torch.equal(stored(x), plain(x))
        gradients = []
        for layer in (plain, stored):
            leaf = rows(5).to(dtype).requires_grad_()
            layer(leaf).sum().backward()
            gradients.append((leaf.grad, layer.bias.grad.clone()))
            layer.bias.grad = None
        assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    assert torch.equal(stored.to_linear().weight, plain.to_linear().weight)
    for other in (copy.deepcopy(stored), copy.deepcopy(stored).half().to("cpu")):
        assert other.weight.tensor.storage == storage and bytes_equal(other.weight.tensor, plain.weight.tensor)


@pytest.mark.parametrize("storage", STORAGES)
def test_the_state_dict_of_a_stored_weight_equals_that_of_the_plain_one(storage: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("breccia_torch")
    plain, stored = layers(storage)
    ours, theirs = stored.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    place = Place("torch")
    for key, part in ours.items():
        assert part.dtype == theirs[key].dtype and np.array_equal(place.words(part), place.words(theirs[key])), key
    other_plain, other_stored = layers(storage)
    for taker, state in ((other_plain, ours), (other_stored, theirs), (other_stored, ours)):
        changed = {key: value.clone() for key, value in state.items()}
        changed["weight.data"] = changed["weight.data"] ^ 1
        before = taker.weight.tensor.storage
        assert taker.load_state_dict(changed) == ([], [])
        found = taker.weight.tensor
        assert found.storage == before and torch.equal(found.to_plain().data, changed["weight.data"])
        assert torch.equal(breccia.dequantize(found), breccia.dequantize(found.to_plain()))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_model_with_stored_weights_is_saved_as_one_with_plain_weights(storage: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    breccia_torch = pytest.importorskip("breccia_torch")
    pytest.importorskip("breccia_bridges")
    paths = []
    for n, layer in enumerate(layers(storage, activation=MXFP8)):
        paths.append(tmp_path / f"{n}.safetensors")
        breccia_torch.save_model(torch.nn.Sequential(layer), paths[-1])
        torch.save(layer.state_dict(), tmp_path / f"{n}.pt")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    plain, stored = layers(storage)
    breccia_torch.load_model(torch.nn.Sequential(stored), paths[1])
    assert bytes_equal(stored.weight.tensor, plain.weight.tensor)
    states = [torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in range(2)]
    assert layers(storage, activation=MXFP8)[1].load_state_dict(states[0]) == ([], [])
    assert layers(storage, activation=MXFP8)[0].load_state_dict(states[1]) == ([], [])


@pytest.mark.parametrize("storage", FEW)
@pytest.mark.long
def test_compiled_graphs_accept_stored_tensors(storage: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("breccia_torch")
    plain, stored = layers(storage, activation=MXFP8)
    x = rows(5)
    assert torch.equal(torch.compile(stored, fullgraph=True, backend="aot_eager")(x), plain(x))

    def several(st: ScaledTensor, x: Any) -> Any:
        y = breccia.matmul(x, st.mT, bias=plain.bias)
        return y, breccia.dequantize(st), breccia.requantize(st, MXFP8), st.mT, st.shape

    fast = torch.compile(several, fullgraph=True, backend="aot_eager")
    leaf, other = (rows(5).requires_grad_() for _ in range(2))
    y, values, new, turned, shape = fast(stored.weight.tensor, leaf)
    z, *expected = several(plain.weight.tensor, other)
    assert torch.equal(y, z) and alike((values, new, turned, tuple(shape)), (expected[0], *expected[1:]))
    y.sum().backward()
    z.sum().backward()
    assert torch.equal(leaf.grad, other.grad)


def test_writing_a_storage_inside_a_graph_is_refused() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("breccia_torch")
    for name, verb in (
        ("cast", lambda x: breccia.cast(x, MXFP8, storage="transposed")),
        ("cast_pair", lambda x: breccia.cast_pair(x, MXFP8, storage="transposed")),
        ("requantize", lambda x: breccia.requantize(breccia.cast(x, MXFP8), NVFP4, storage="transposed")),
    ):
        with pytest.raises(Exception, match=f"{name}: storage= is not supported inside torch.compile; leave it out"):
            torch.compile(verb, fullgraph=True, backend="aot_eager")(rows(4))


# -- storages and kernels of a third party ---------------------------------------------------------------------------

#: Calls of each of its kernels, with the storages that it was given.
seen: Counter[str] = Counter()


def backwards(ops: Any, parts: dict[str, Any], plain: Any) -> dict[str, Any]:
    """Scales of each row in reverse order; its own inverse."""
    columns = plain.scale_shape[-1]
    return {**parts, "scale": ops.gather(parts["scale"], tuple(reversed(range(columns))), -1)}


def whole_bytes(plain: Any) -> str | None:
    return None if plain.format.element.bits == 8 else "its codes share bytes"


def panels(ops: Any, parts: dict[str, Any], plain: Any) -> dict[str, Any]:
    """Codes in panels of 16 columns, one below the other: (..., panels, M, 16). An axis more, and padding."""
    *lead, m, k = plain.shape
    n = -(-k // 16)
    codes = ops.pad(ops.load(parts["data"]), (*(0 for _ in lead), 0, n * 16 - k))
    codes = ops.reshape(codes, (*lead, m, n, 16))
    codes = ops.transpose(codes, (*range(len(lead)), len(lead) + 1, len(lead), len(lead) + 2))
    return {**parts, "data": ops.store(codes, "uint8")}


def unpanelled(ops: Any, parts: dict[str, Any], plain: Any) -> dict[str, Any]:
    *lead, m, k = plain.shape
    n = -(-k // 16)
    codes = ops.transpose(ops.load(parts["data"]), (*range(len(lead)), len(lead) + 1, len(lead), len(lead) + 2))
    codes = ops.reshape(codes, (*lead, m, n * 16))[..., :k]
    return {**parts, "data": ops.store(codes, plain.dtypes["data"])}


def reads(name: str) -> Callable[..., Any]:
    """A kernel of `dequantize` or `matmul` that counts the storages it is given."""

    def dequantize(st: ScaledTensor, options: ProductOptions = FLOAT32) -> Any:
        seen[f"{name} {st.storage}"] += 1
        return breccia.kernels.reference.decoding.dequantize(st, options)

    return dequantize


def acme_matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    storages = [x.storage if isinstance(x, ScaledTensor) else "array" for x in (a, b)]
    seen[f"matmul {' '.join(storages)}"] += 1
    return breccia.kernels.reference.products.matmul(a, b, options)


def acme_cast(x: Any, recipe: ScalingRecipe, options: Any) -> ScaledTensor:
    seen[f"cast {options.storage}"] += 1
    return breccia.kernels.reference.casting.cast(x, recipe, options).to_storage(options.storage)


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in with two storages, kernels that read and write one of them, and better ones that do not."""
    npu, manifest = ModuleType("acme_storages"), ModuleType("acme_manifest")
    functions = (backwards, whole_bytes, panels, unpanelled, acme_matmul, acme_cast)
    vars(npu).update({f.__name__: f for f in functions}, reader=reads("reader"), plain_only=reads("plain_only"))
    monkeypatch.setitem(sys.modules, "acme_storages", npu)
    at = "acme_storages:"
    storages = [
        Storage("backwards", f"{at}backwards", f"{at}backwards"),
        Storage("panels", f"{at}panels", f"{at}unpanelled", f"{at}whole_bytes", data_axes=3),
    ]
    kernels = [
        Kernel("dequantize", "*", f"{at}reader", "acme.reader", MXFP8BlockScaling, reads=("backwards",), rank=1, traces=True),
        Kernel("dequantize", "*", f"{at}plain_only", "acme.plain_only", MXFP8BlockScaling, rank=2, traces=True),
        Kernel("matmul", "*", f"{at}acme_matmul", "acme.matmul", None, MXFP8BlockScaling, reads=("backwards",), traces=True),
        Kernel("cast", "*", f"{at}acme_cast", "acme.cast", MXFP8BlockScaling, writes=("backwards",), traces=True),
    ]
    hooks = {"breccia_storages": storages, "breccia_kernels": kernels}
    vars(manifest).update({name: hookimpl(lambda found=found: found, specname=name) for name, found in hooks.items()}, api=1)
    plugin = Plugin("acme", "acme", "1.0", "acme_manifest")
    built = Registry([*_installed(), (plugin, lambda: manifest)], dict(os.environ), pytest.fail)
    assert built.plugins[-1].status == "active", built.plugins[-1].reason
    monkeypatch.setattr(frameworks, "current", built)
    seen.clear()


@pytest.mark.parametrize("framework", EAGER)
@pytest.mark.parametrize("storage", ["backwards", "panels"])
@pytest.mark.usefixtures("acme")
def test_a_storage_of_a_plug_in_works_like_a_built_in_one(storage: str, framework: str) -> None:
    place = here(framework)
    for recipe in (MXFP8, Float8BlockScaling(block_k=16), INT8Scaling()):
        for x, axis in ((cube((2, 9, 40)), -1), (cube((40, 9)), -2)):
            st = breccia.cast(place.array(x), recipe, axis=axis)
            stored = st.to_storage(storage)
            assert stored.storage == storage and stored.shape == st.shape and stored.digest() == st.digest()
            assert alike(stored.to_plain(), st) and alike(breccia.dequantize(stored), breccia.dequantize(st))
            assert alike(copy.deepcopy(stored), st) and alike(pickle.loads(pickle.dumps(stored)), st)
            assert alike(breccia.requantize(stored, NVFP4), breccia.requantize(st, NVFP4))
            assert alike(stored.mT, st.mT) and alike(
                stored[..., :8, :] if axis == -1 else stored[:, :8], st[..., :8, :] if axis == -1 else st[:, :8]
            )
            assert alike(breccia.cast(place.array(x), recipe, axis=axis, storage=storage), st)
            assert Layout.from_json(stored.layout.to_json()) == stored.layout
    lying = breccia.cast(cube((9, 40)), MXFP8).to_storage("panels")
    assert lying.data.shape == (3, 9, 16) and lying.layout.matrix == (9, 40) and not lying.data[2, :, 8:].any()
    with pytest.raises(UnsupportedError) as e:
        breccia.cast(place.array(cube((9, 40))), NVFP4, storage="panels")
    assert str(e.value) == refused("panels", "its codes share bytes")


@pytest.mark.parametrize("framework", [*EAGER, pytest.param("jax", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("acme")
def test_a_kernel_that_reads_a_storage_is_chosen_for_it_and_others_are_not(framework: str) -> None:
    place = here(framework)
    x = wide((4, 64), seed=18, exponents=2)
    plain = breccia.cast(place.array(x), MXFP8)
    expected = breccia.kernels.reference.decoding.dequantize(breccia.kernels.reference.casting.cast(x, MXFP8))

    def ran(verb: Callable[[], Any]) -> Counter[str]:
        seen.clear()
        verb()
        return Counter({name for name in seen})

    def winner(op: str, *operands: Any, **options: Any) -> tuple[str, dict[str, str | None]]:
        found = breccia.explain(op, *operands, **options)
        assert found.winner is not None
        return found.winner.name, {v.kernel.name: v.reason for v in found.verdicts}

    there, elsewhere = plain.to_storage("backwards"), plain.to_storage("transposed")
    name, why = winner("dequantize", there)
    assert name == "acme.reader"
    needed = "; st.to_storage('plain') converts it"
    assert why["acme.plain_only"] == "reads 'plain' storage, an operand is in 'backwards'" + needed
    assert why["reference.dequantize"] == "reads 'plain' storage, an operand is in 'backwards'" + needed
    assert winner("dequantize", plain)[0] == "acme.plain_only", "which ranks higher"
    name, why = winner("dequantize", elsewhere)
    assert name == "storage.dequantize"
    assert why["acme.reader"] == "reads 'plain' and 'backwards' storage, an operand is in 'transposed'" + needed
    assert breccia.explain("dequantize", elsewhere).running == "storage.dequantize (acme.plain_only)"
    assert ran(lambda: breccia.dequantize(there)) == Counter(["reader backwards"])
    assert ran(lambda: breccia.dequantize(plain)) == Counter(["plain_only plain"])
    assert ran(lambda: breccia.dequantize(elsewhere)) == Counter(["plain_only plain"]), "it is given the plain tensor"
    for st in (there, plain, elsewhere):
        assert place.words(breccia.dequantize(st)).tobytes() == expected.tobytes()

    assert winner("matmul", place.array(x), there.mT)[0] == "acme.matmul"
    assert ran(lambda: breccia.matmul(place.array(x), there.mT)) == Counter(["matmul array backwards"])
    assert ran(lambda: breccia.matmul(plain, there.mT)) == Counter(["matmul plain backwards"])
    assert winner("matmul", elsewhere, there.mT)[0] == "storage.matmul", "one operand is enough"
    assert ran(lambda: breccia.matmul(elsewhere, there.mT)) == Counter(["matmul plain plain"])


@pytest.mark.parametrize("framework", [*EAGER, pytest.param("jax", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("acme")
def test_a_kernel_that_writes_a_storage_is_chosen_for_it_and_others_are_not(framework: str) -> None:
    place = here(framework)
    x = wide((4, 64), seed=19, exponents=2)
    plain = breccia.kernels.reference.casting.cast(x, MXFP8)
    for storage, name, given_to in (
        ("backwards", "acme.cast", "cast backwards"),
        ("transposed", "storage.cast", "cast plain"),
        ("plain", "acme.cast", "cast plain"),
    ):
        found = breccia.explain("cast", place.array(x), MXFP8, storage=storage)
        assert found.winner is not None and found.winner.name == name
        if storage == "transposed":
            why = {v.kernel.name: v.reason for v in found.verdicts}
            assert why["acme.cast"] == "writes 'plain' and 'backwards' storage, not 'transposed'"
            assert why["reference.cast"] == "writes 'plain' storage, not 'transposed'"
            assert found.running == "storage.cast (acme.cast)"
        seen.clear()
        st = breccia.cast(place.array(x), MXFP8, storage=storage)
        assert set(seen) == {given_to} and st.storage == storage and bytes_equal(st, plain)
    found = breccia.explain("cast", place.array(x), NVFP4, storage="backwards")
    assert found.winner is not None and found.winner.name == "storage.cast", "of another recipe it is not declared"


@pytest.mark.usefixtures("acme")
def test_a_tensor_whose_storage_is_no_longer_declared_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = breccia.cast(wide((4, 32)), MXFP8).to_storage("backwards")
    pickled = pickle.dumps(stored)
    monkeypatch.setattr(frameworks, "current", Registry(_installed(), dict(os.environ)))
    for verb in (stored.to_plain, stored.digest, lambda: breccia.dequantize(stored), lambda: pickle.loads(pickled)):
        with pytest.raises(UnknownNameError, match=r"^no storage 'backwards'"):
            verb()


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (Storage("plain", "acme:f", "acme:g"), "storage 'plain': the name is reserved by breccia; choose another."),
        (Storage("*", "acme:f", "acme:g"), "storage '*': the name is reserved by breccia; choose another."),
        (
            Storage("s", "acme:f", "acme:g", data_axes=-1),
            "storage 's': data_axes must be 0, or the number of axes of codes; got -1.",
        ),
    ],
    ids=lambda v: v.name if isinstance(v, Storage) else "",
)
def test_a_storage_that_cannot_work_is_refused_when_it_is_declared(declared: Storage, message: str) -> None:
    with pytest.raises(PluginError) as e:
        declared.check()
    assert str(e.value) == message
    for wrong in (Storage("s", "no target", "acme:g"), Storage("s", "acme:f", "g"), Storage("s", "acme:f", "acme:g", "h")):
        with pytest.raises(PluginError, match=r"^storage 's': (from_plain|to_plain|accepts)"):
            wrong.check()


def test_one_scale_per_row_may_be_stored_as_a_column() -> None:
    """PerChannel's (M, 1): one block per row."""
    st = breccia.cast(wide((9, 35), seed=20), Float8RowScaling())
    assert np.array_equal(st.to_storage("transposed").scale, np.asarray(st.scale).T)
    assert st.to_storage("column_major").scale.shape == (1, 12), "nine FP32 scales, padded to sixteen bytes"
    assert st.to_storage("interleaved").data.shape == (9, 1, 35 + 4)


class Reads:
    """A plug-in with kernels for products of arrays and weights: in the order of tensor cores, of up to eight rows; in any."""

    api = 1

    @breccia.hookimpl
    def breccia_kernels(self) -> list[Kernel]:
        target, types = f"{__name__}:refused_rows", (type(None), INT4Scaling)
        named = {"accepts": target, "reads": ("mma_16x128",), "device": "cpu"}
        return [
            Kernel(
                "matmul", "numpy", target, "any.matmul", *types, reads=("column_major", "mma_16x128"), device="cpu", rank=-1
            ),
            Kernel("matmul", "numpy", target, "reads.matmul", *types, **named),
        ]


def refused_rows(call: Any) -> str | None:
    """Why the kernel of `Reads` does not take a call."""
    return None if call.b.storage == "mma_16x128" and call.a.shape[-2] <= 8 else "no"


def test_a_weight_is_stored_as_the_kernel_of_its_products_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from breccia import storing

    plugin = Plugin("reads", "reads", "1.0", "reads")
    monkeypatch.setattr(frameworks, "current", Registry([*_installed(), (plugin, Reads)], dict(os.environ)))
    w, x = breccia.cast(wide((64, 256), seed=3), INT4Scaling()), wide((4, 256), seed=4)
    stored = storing.for_products(w, x)
    assert stored.storage == "mma_16x128" and breccia.bytes_equal(stored, w)
    assert breccia.explain("matmul", x, stored.mT).running == "reads.matmul"
    assert storing.for_products(w.mT, x).storage == "mma_16x128"
    assert storing.for_products(w, wide((16, 256), seed=5)) is w, "the kernel of so many rows reads the plain one too"
    other = breccia.cast(wide((64, 256), seed=3), NVFP4BlockScaling())
    assert storing.for_products(other, x) is other
