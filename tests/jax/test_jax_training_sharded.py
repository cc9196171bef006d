"""JAX in training: shards of `shard_map` and `pmap` share the scales of whole tensors over `axis_name`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from eight_devices import failures
from training_operands import operands, values

import breccia
from breccia import TrainingRecipe
from breccia.testing.examples import wide

#: The checks run in a separate process with eight devices.
pytestmark = pytest.mark.long

#: Each of four shards has whole blocks of 16 and 32 rows.
M, K, N, SHARDS = 256, 64, 48, 4
X, W, DY = (wide(shape, seed=n, exponents=3) for n, shape in enumerate([(M, K), (N, K), (M, N)]))
#: The largest values of the first shard are the largest of all by far: scales of other shards alone would be smaller.
X[0, 0], DY[3, 5] = 1e3, 3e2
#: Nearest: random numbers differ between shards.
RECIPES = {name: TrainingRecipe(name, gradient_rounding="nearest") for name in ("fp8_current", "fp8_delayed", "nvfp4", "mxfp8")}


def trained(recipe: TrainingRecipe, reduce: bool, axis_name: Any = "data") -> Callable[..., Any]:
    """(operands as arrays, dw, the gradient of the state) of a shard of rows. reduce: gradients are summed by hand."""
    import jax

    import breccia_jax

    dot = breccia_jax.DotGeneral(recipe, axis_name=axis_name)

    def step(x: Any, w: Any, dy: Any, state: Any) -> Any:
        found = dot.gemm_operands(x, w, dy, state=state)
        rows = [breccia.dequantize(found[gemm][0]) for gemm in ("output", "grad_input")]
        columns = [breccia.dequantize(found["grad_weight"][0]).T, breccia.dequantize(found["grad_weight"][1])]

        def loss(w: Any, state: Any) -> Any:
            return (dot.product(x, w, state=state) * dy).sum()

        dw, recorded = jax.grad(loss, (0, 1))(w, state)
        return (*rows, *columns), jax.lax.psum(dw, "data") if reduce else dw, recorded

    return step


def agree(found: Any, name: str) -> None:
    """Compare with the results of one device."""
    arrays, dw, recorded = found
    expected = operands(RECIPES[name], X, W, DY)
    wanted = [expected["output"][0], expected["grad_input"][0], expected["grad_weight"][1], expected["grad_weight"][0].mT]
    for n, (array, st) in enumerate(zip(arrays, wanted, strict=True)):
        assert np.array_equal(np.asarray(array, np.float64).reshape(values(st).shape), values(st)), (name, n)
    a, b = map(values, expected["grad_weight"])
    # Sums of M products in FP32 in any order, those of shards too.
    bound = 2 * M * 2.0**-24 * (np.abs(a) @ np.abs(b))
    assert (np.abs(np.asarray(dw, np.float64).T - a @ b) <= bound).all(), name
    amaxes = {tensor: float(history.scale) for tensor, history in recorded.items()}
    largest = {"input": np.abs(X).max(), "weight": np.abs(W).max(), "gradient": np.abs(DY).max()}
    assert amaxes == ({tensor: float(v) for tensor, v in largest.items()} if name == "fp8_delayed" else {}), name


def mesh_of_shards() -> Any:
    import jax

    return jax.make_mesh((SHARDS,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:SHARDS])


def mapped(name: str, check_vma: bool) -> Any:
    import jax
    from jax.sharding import PartitionSpec as P

    import breccia_jax

    mesh = mesh_of_shards()
    # JAX sums gradients of what is the same in all shards only where it checks that.
    step = trained(RECIPES[name], reduce=not check_vma)
    specs = {"in_specs": (P("data"), P(), P("data"), P()), "out_specs": (P("data"), P(), P())}
    state = breccia_jax.histories(RECIPES[name])
    return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=check_vma, **specs))(X, W.T, DY, state)


def check_of(name: str, check_vma: bool) -> Callable[[], None]:
    def check() -> None:
        agree(mapped(name, check_vma), name)

    check.__name__ = f"{name}, check_vma={check_vma}"
    return check


def pmapped() -> None:
    import jax

    import breccia_jax

    name = "fp8_delayed"
    x, dy = (a.reshape(SHARDS, M // SHARDS, -1) for a in (X, DY))
    step = trained(RECIPES[name], reduce=True)
    run = jax.pmap(step, "data", in_axes=(0, None, 0, None), devices=jax.devices()[:SHARDS])
    arrays, dw, recorded = run(x, W.T, dy, breccia_jax.histories(RECIPES[name]))
    agree((arrays, dw[0], {t: breccia.AmaxHistory(h.recipe, h.amaxes[0], h.scale[2]) for t, h in recorded.items()}), name)


def silent_scales_of_shards_are_refused() -> None:
    import jax
    from jax.sharding import PartitionSpec as P

    import breccia_jax

    mesh = mesh_of_shards()
    spec = {"mesh": mesh, "in_specs": (P("data"), P()), "out_specs": P("data")}
    for name in ("fp8_current", "nvfp4"):
        product = breccia_jax.DotGeneral(RECIPES[name]).product
        with pytest.raises(
            breccia.OptionError, match=r"inside shard_map over 'data', .* has one scale for a tensor, which shards"
        ):
            jax.shard_map(product, **spec)(X, W.T)
    jax.shard_map(breccia_jax.DotGeneral(RECIPES["mxfp8"]).product, **spec)(X, W.T)
    local = jax.shard_map(breccia_jax.DotGeneral(RECIPES["fp8_current"], axis_name=()).product, **spec)(X, W.T)
    shared = jax.shard_map(breccia_jax.DotGeneral(RECIPES["fp8_current"], axis_name="data").product, **spec)(X, W.T)
    assert not np.array_equal(local, shared)


def keys_of_shards_differ() -> None:
    import jax
    from jax.sharding import PartitionSpec as P

    import breccia_jax

    mesh = mesh_of_shards()
    recipe = TrainingRecipe("nvfp4", hadamard=0)
    dot = breccia_jax.DotGeneral(recipe, axis_name="data")

    def rows(dy: Any) -> Any:
        found = dot.gemm_operands(X[:64], W.T, dy, key=jax.random.key(1))["grad_input"][0]
        return breccia.dequantize(found)

    found = np.asarray(jax.shard_map(rows, mesh=mesh, in_specs=P(), out_specs=P("data"))(DY[:64]))
    shards = found.reshape(SHARDS, 64, N)
    assert not any(np.array_equal(shards[0], other) for other in shards[1:])


def nan_in_one_shard_is_nan_in_all() -> None:
    import jax
    from jax.sharding import PartitionSpec as P

    import breccia_jax

    mesh = mesh_of_shards()
    x = X.copy()
    x[70, 3] = np.nan
    product = breccia_jax.DotGeneral(RECIPES["fp8_current"], axis_name="data").product
    y = jax.shard_map(product, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))(x, W.T)
    assert np.isnan(np.asarray(y)).all()


CHECKS = [
    *(check_of(name, check_vma) for name in RECIPES for check_vma in (True, False)),
    pmapped,
    silent_scales_of_shards_are_refused,
    keys_of_shards_differ,
    nan_in_one_shard_is_nan_in_all,
]


def test_shards_have_the_scales_of_whole_tensors() -> None:
    """All checks at once: as tests of their own, each of pytest's processes would run all of them."""
    pytest.importorskip("jax")
    failed = failures(__file__)
    assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())
