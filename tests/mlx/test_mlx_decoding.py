"""The inverse of the cast in compiled functions on MLX's CPU: NumPy's bits, in slabs, and what it leaves to others."""

from __future__ import annotations

import sys
from dataclasses import astuple
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from recipes import RECIPES, declared, recipe_id

import breccia
from breccia.arrays.frameworks import ops_of
from breccia.codecs import E4M3, F32, Lookup, Minifloat
from breccia.formats import Level
from breccia.kernels import bounds
from breccia.kernels.reference.packing import pack
from breccia.tensors.components import components
from breccia.tensors.metadata import Metadata
from breccia.testing.examples import special_rows, wide
from breccia_mlx import compiled, decoding, from_tree, to_tree

NAME = "mlx.compiled.dequantize"
MXFP8 = breccia.MXFP8BlockScaling()
K = 384
X = np.concatenate([wide((24, K), seed=2, exponents=60), special_rows(K)[:8]])


def in_mlx(st: breccia.ScaledTensor) -> breccia.ScaledTensor:
    """NumPy's tensor in MLX, byte for byte."""
    parts = {name: mx.array(np.asarray(part, order="C")) for name, part in components(st).items()}
    parts = {name: part.view(mx.bfloat16) if part.dtype == mx.uint16 else part for name, part in parts.items()}
    return Metadata.of(st).assembled(**parts)


def scrambled(st: breccia.ScaledTensor) -> breccia.ScaledTensor:
    """A tensor of all codes, under scales of every kind: NaN, Inf, zeros, subnormal and negative numbers among them."""
    rng = np.random.default_rng(7)
    parts = {name: rng.integers(0, 256, part.nbytes, np.uint8) for name, part in components(st).items()}
    made = {name: parts[name].view(part.dtype).reshape(part.shape) for name, part in components(st).items()}
    return Metadata.of(st).assembled(**made)


def same_bits(found: Any, wanted: np.ndarray) -> bool:
    """Equal dtype, shape and bits, all NaNs equal."""
    a, b = (np.where(np.isnan(x), np.float32(np.nan), x) for x in (np.array(found), wanted))
    return a.dtype == b.dtype == np.float32 and a.shape == b.shape and np.array_equal(a.view(np.int32), b.view(np.int32))


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_every_slab_has_numpys_bits(recipe: breccia.ScalingRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "SLAB", 9 * K)  # several slabs, of several rows of blocks
    for x, axis in ((X, -1), (np.ascontiguousarray(X.T), -2)):
        for st in (written := breccia.cast(x, recipe, axis=axis), scrambled(written)):
            expected = breccia.dequantize(st, prefer="reference.dequantize")
            assert same_bits(breccia.dequantize(in_mlx(st), prefer=NAME), expected)


@pytest.mark.parametrize("bits", range(1, 9))
def test_numbers_of_every_width_are_looked_up(bits: int) -> None:
    """Every pair of codes, in a table of unordered numbers."""
    rng = np.random.default_rng(bits)
    table = rng.permutation(np.float32(np.arange(1 << bits))).tolist()
    codec = Lookup(f"L{bits}", bits, None, "a test", tuple(table))
    pairs = np.stack(np.meshgrid(*[np.arange(1 << bits)] * 2), -1).reshape(-1)
    codes = np.resize(pairs, (-(-len(pairs) // 16), 16))
    data = mx.array(pack(ops_of(codes), codes.astype(np.int32), codec))
    assert np.array_equal(np.array(decoding._numbers(data, codec)), np.float32(table)[codes])


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_leading_axes_are_kept(recipe: breccia.ScalingRecipe) -> None:
    cube = X.reshape(-1, 8, K)
    for x, axis in ((cube, -1), (np.ascontiguousarray(cube.swapaxes(1, 2)), -2)):
        st = breccia.cast(x, recipe, axis=axis)
        assert same_bits(breccia.dequantize(in_mlx(st), prefer=NAME), breccia.dequantize(st))


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_results_of_16_bits_are_rounded_once(kind: str) -> None:
    st = breccia.cast(X, MXFP8)
    found = breccia.dequantize(in_mlx(st), out_dtype=kind, prefer=NAME)
    assert found.dtype == getattr(mx, kind)
    wide_one = mx.array(breccia.dequantize(st)).astype(getattr(mx, kind))
    assert mx.array_equal(found.view(mx.uint16), wide_one.view(mx.uint16)).item()


def test_scales_of_rows_without_their_unit_axis_are_read() -> None:
    st = breccia.cast(X.reshape(4, 8, K)[0], breccia.Float8RowScaling())
    one = breccia.ScaledTensor.from_parts(st.data, st.scale[:, 0], st.recipe, st.layout)
    assert same_bits(breccia.dequantize(in_mlx(one), prefer=NAME), breccia.dequantize(st))


def test_scales_of_several_matrices_are_decoded_by_the_generic_algorithm() -> None:
    x = np.stack([X, X * np.float32(0.5)])
    each = [breccia.cast(matrix, breccia.Float8CurrentScaling()) for matrix in x]
    st = breccia.stack(each)
    assert st.scale.shape == (2,)
    assert same_bits(breccia.dequantize(in_mlx(st), prefer=NAME), breccia.dequantize(st))


def test_transformed_functions_run_it() -> None:
    winners: list[str] = []

    def decode(st: breccia.ScaledTensor) -> Any:
        winner = breccia.explain("dequantize", st).winner
        assert winner is not None
        winners.append(winner.name)
        return breccia.dequantize(st)

    for recipe in (breccia.NVFP4BlockScaling(), breccia.INT4Scaling(64, signed=False, symmetric=False, offset="bias")):
        st = breccia.cast(X, recipe)
        found = mx.compile(lambda tree: decode(from_tree(tree)))(to_tree(in_mlx(st)))
        assert same_bits(found, breccia.dequantize(st))
    mapped = mx.vmap(lambda data: decode(breccia.ScaledTensor.from_parts(data, scale, MXFP8, st.layout)))
    st = breccia.cast(X, MXFP8)
    scale = mx.array(st.scale)
    data = np.stack([st.data, st.data[::-1]])
    for found, codes in zip(mapped(mx.array(data)), data, strict=True):
        assert same_bits(found, breccia.dequantize(breccia.ScaledTensor.from_parts(codes, st.scale, MXFP8, st.layout)))
    assert winners == [NAME] * 3


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_compiled_products_decode_one_slab_at_a_time(recipe: breccia.ScalingRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the bound of `matmul` with a bias, against FP64."""
    monkeypatch.setattr(compiled, "SLAB", 9 * K)
    rng = np.random.default_rng(0)
    x = mx.array(rng.integers(-3, 4, (5, K)).astype(np.float32))
    bias = mx.array(rng.integers(-9, 9, 32).astype(np.float32))
    st = in_mlx(breccia.cast((2.0 ** rng.integers(-1, 2, (32, K))).astype(np.float32), recipe))
    values = np.array(breccia.dequantize(st), np.float64)
    winners: list[str] = []

    def product(x: Any, tree: Any) -> Any:
        w = from_tree(tree).mT
        winner = breccia.explain("matmul", x, w, bias=bias).winner
        winners.append(winner.name if winner else "")
        return breccia.matmul(x, w, "float32", bias=bias)

    exact = np.array(x, np.float64) @ values.T + np.array(bias)
    bound = bounds.accumulated(np.abs(np.array(x, np.float64)) @ np.abs(values).T + np.abs(np.array(bias)), K + 1, K)
    for found in (mx.compile(product)(x, to_tree(st)), mx.vmap(product, in_axes=(0, None))(x[:, None], to_tree(st))[:, 0]):
        assert (np.abs(np.array(found) - exact) <= bound).all()
    assert winners == ["mlx.compiled.matmul"] * 2


def test_compiled_products_take_two_quantized_operands_and_leave_other_orders_of_the_weight() -> None:
    a, b = (in_mlx(breccia.cast(X[:8], MXFP8)) for _ in range(2))
    compiled_one = mx.compile(lambda a, b: breccia.matmul(from_tree(a), from_tree(b).mT, "bfloat16"))(to_tree(a), to_tree(b))
    assert compiled_one.shape == (8, 8) and compiled_one.dtype == mx.bfloat16
    turned = in_mlx(breccia.cast(np.ascontiguousarray(X[:K, :64]), MXFP8))
    for x, w, said in (
        (mx.ones((2, 32)), turned, r"b must be the .mT of one weight (N, K) with blocks along K"),
        (mx.ones((2, K)), mx.ones((K, 2)), "it multiplies by a quantized b"),
        (mx.ones((2, K)), b.mT, "outside transformed functions other kernels decode in less time"),
    ):
        explained = str(breccia.explain("matmul", a[:2] if said.startswith("it mult") else x, w)).splitlines()
        line = next(n for n, line in enumerate(explained) if "mlx.compiled.matmul" in line)
        assert said in explained[line + 1], explained


class OwnScales(Minifloat):
    """A codec that may multiply otherwise."""


def test_explain_says_what_it_leaves_to_the_generic_algorithm() -> None:
    x = mx.ones((8, 128))
    cast = breccia.cast
    indexed = breccia.PerGroupIndex(tuple(n // 32 for n in range(128)), 4)
    codes = cast(x, breccia.INT4Scaling(group_size=32))
    for st, options, said in (
        (cast(x, MXFP8), {"out": x}, "out= is the generic algorithm's"),
        (cast(x, declared(E4M3, Level(OwnScales(*astuple(E4M3)), (1, 32)))), {}, "it does not multiply by E4M3 scales"),
        (cast(x, declared(E4M3, Level(F32, (1, 32), "divisor"))), {}, "scales that divide are the generic algorithm's"),
        (breccia.from_buffer(codes.data, codes.scale, codes.recipe, indexed), {}, "its layouts have a scale per tensor"),
        (cast(x[:, :100], MXFP8), {}, "it decodes whole blocks, and packing groups, of 2^n numbers"),
        (cast(x[:0], MXFP8), {}, "empty tensors, and those of one axis, are"),
    ):
        assert_said(said, str(breccia.explain("dequantize", st, **options)))


def test_explain_says_where_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    st = breccia.ScaledTensor.from_parts(mx.zeros((8, 96), mx.uint8), mx.zeros((8, 3), mx.uint8), MXFP8, MXFP8.layout)
    assert_said("its arithmetic has been tested on MLX's CPU only", str(breccia.explain("dequantize", st)))
    monkeypatch.undo()
    monkeypatch.setattr(sys, "byteorder", "big")
    assert_said("it unpacks codes on little-endian machines", str(breccia.explain("dequantize", st)))


def assert_said(reason: str, explained: str) -> None:
    """The line after the kernel's name has the reason."""
    lines = explained.splitlines()
    assert reason in lines[next(n for n, line in enumerate(lines) if NAME in line) + 1], explained
