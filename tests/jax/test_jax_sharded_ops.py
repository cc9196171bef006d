"""Every op on every kind of mesh axis: each shard has the bits of the results on one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from eight_devices import failures

import breccia
from breccia.tensors.components import components
from breccia.testing.examples import wide

#: The checks run in a separate process with eight devices.
pytestmark = pytest.mark.long

#: Blocks of 32 or less, so that each of two shards of rows has whole ones along both axes.
RECIPES = ("mxfp8", "nvfp4", "fp8_block,block_m=4,block_k=32", "int4,group_size=32")
X = wide((64, 128), seed=1, exponents=4)
#: Two experts, of which the first is the weight.
W = wide((2, 24, 128), seed=2, exponents=2)


def results(x: Any, w: Any, experts: Any, offsets: Any, spec: str) -> dict[str, Any]:
    """Results by name. Each is an array whose rows are sharded."""
    found: dict[str, Any] = {}

    def tensor(name: str, st: Any) -> None:
        for part, array in components(st).items():
            found[f"{name}.{part}"] = array.reshape(1) if part == "global_scale" else array

    st = breccia.cast(x, spec)
    rows, columns = breccia.cast_pair(x, spec)
    for name, made in {
        "cast": st,
        "cast_pair": rows,
        "cast_pair of columns": columns,
        "requantize": breccia.requantize(st, "mxint8"),
    }.items():
        tensor(name, made)
    found["dequantize"] = breccia.dequantize(st)
    found["cast_ste"] = breccia.cast_ste(x, spec)
    found["cast_ste_clipped"] = breccia.cast_ste_clipped(x, spec, -1.0, 1.0)
    found["matmul"] = breccia.matmul(x, w.mT)
    found["matmul of two"] = breccia.matmul(st, w.mT)
    found["cast_matmul"] = breccia.cast_matmul(x, spec, w.mT)
    found["grouped_matmul"] = breccia.grouped_matmul(x, experts.mT, offsets)
    return found


#: Results that are sums, which are compared by a bound, and whether their x is quantized. All others are compared by bits.
PRODUCTS = {"matmul": False, "matmul of two": True, "cast_matmul": True, "grouped_matmul": False}


def agree(found: dict[str, Any], shards: int, offsets: np.ndarray, spec: str, case: Any) -> None:
    """Compare with results of NumPy arrays for each shard of rows."""
    weights = [np.asarray(breccia.dequantize(breccia.cast(w, spec)), np.float64) for w in W]
    expected: list[dict[str, Any]] = []
    for x in np.split(X, shards):
        made = results(x, breccia.cast(W[0], spec), breccia.stack([breccia.cast(w, spec) for w in W]), offsets, spec)
        expected.append({name: np.asarray(a) for name, a in made.items()})
    for name, array in found.items():
        if name not in PRODUCTS:
            whole = np.concatenate([each[name] for each in expected])
            bits = np.asarray(array).view(np.uint8 if array.dtype.itemsize == 1 else f"u{array.dtype.itemsize}")
            assert np.array_equal(bits, whole.view(bits.dtype)), (name, case)
            continue
        for got, x in zip(np.split(np.asarray(array), shards), np.split(X, shards), strict=True):
            rows = np.asarray(breccia.dequantize(breccia.cast(x, spec)) if PRODUCTS[name] else x, np.float64)
            parts = np.split(rows, offsets[:-1]) if name == "grouped_matmul" else [rows]
            exact = np.concatenate([part @ w.T for part, w in zip(parts, weights, strict=False)])
            # Sums of K products in FP32, in any order, are within about K * 2^-24 of the sum of magnitudes.
            size = np.concatenate([np.abs(part) @ np.abs(w).T for part, w in zip(parts, weights, strict=False)])
            assert (np.abs(got - exact) <= 2 * X.shape[1] * 2.0**-24 * size + 1e-30).all(), (name, case)


def every_op(kind: str, spec: str) -> None:
    import jax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    types = (AxisType.Auto if "auto" in kind else AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=types)
    manual, shards = "manual" in kind, 2 if "manual" in kind else 1
    offsets = np.array([20, 64 // shards], np.int32)

    def ops(*operands: Any) -> Any:
        return results(*operands, spec)

    if manual:
        names = {"a", "b"} if "all" in kind else {"a"}
        ops = jax.shard_map(ops, mesh=mesh, in_specs=(P("a"), P(), P(), P()), out_specs=P("a"), axis_names=names)
    for set_mesh in (True, False):
        with jax.set_mesh(mesh) if set_mesh else nullcontext():
            x = jax.device_put(X, NamedSharding(mesh, P("a", None)))
            experts = breccia.stack([breccia.cast(jax.numpy.asarray(w), spec) for w in W])
            experts = experts.to(NamedSharding(mesh, P()))
            w = breccia.cast(jax.device_put(W[0], NamedSharding(mesh, P())), spec)
            run = jax.jit(ops) if set_mesh or manual else ops
            found = run(x, w, experts, jax.device_put(offsets, NamedSharding(mesh, P())))
            agree(found, shards, offsets, spec, (kind, spec, set_mesh))
            for name in ("cast.data", "dequantize", "matmul"):
                assert found[name].sharding.spec[0] in ("a", ("a",)), (name, kind, spec, set_mesh)


def check_of(kind: str, spec: str) -> Callable[[], None]:
    def check() -> None:
        every_op(kind, spec)

    check.__name__ = f"{kind} {spec}"
    return check


KINDS = ("auto", "explicit", "manual of auto, all", "manual of explicit, all", "manual of explicit, one")
#: Each kind of mesh axis with one of the recipes, in turn; and with all.
CHECKS = [check_of(kind, RECIPES[n % len(RECIPES)]) for n, kind in enumerate(KINDS)]
ALL_CHECKS = [check_of(kind, spec) for kind in KINDS for spec in RECIPES]


@pytest.mark.parametrize("checks", ["CHECKS", pytest.param("ALL_CHECKS", marks=pytest.mark.slow)])
def test_every_op_gives_each_shard_the_results_of_one_device(checks: str) -> None:
    """All checks at once: as tests of their own, each of pytest's processes would run all of them."""
    pytest.importorskip("jax")
    failed = failures(__file__, checks)
    assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())
