"""Time of compiled casts, products, layers, slices and new shapes in JAX on the CPU, beside plain JAX, interleaved.

    python benchmarks/bench_jax.py [--size 4096] [--runs 11] [--out benchmarks/results]

Plain casts are the functions of jax_lines.py. Products multiply FP32 rows by a weight in (N, K) or (K, N) order; layers are
those of Flax and Equinox with quantized kernels; plain JAX multiplies by an FP32 weight. The arm `generic` is the generic
algorithm, compiled by XLA, which runs where breccia-native is not installed; for layers, it multiplies decoded values. Calls of
new shapes are eager, but plain JAX is compiled there too. Samples of all arms are interleaved, since the speed of a machine
varies: compare ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import common
import jax
import jax.numpy as jnp
import tables
import typer
from jax_lines import LINES

import breccia
import breccia_jax

#: Recipes of the products, and of the casts of BF16 and under vmap.
WEIGHTS = ("mxfp8", "fp8_block", "nvfp4", "int4")
#: Recipes of layers.
LAYERS = ("mxfp8", "nvfp4", "int4")
#: Rows of products.
ROWS = (1, 16, 64)
Array = Any
#: Calls by (what, case, arm).
Arms = dict[tuple[str, str, str], Callable[[], Any]]


def waited(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(function(*arguments))


def casts(w: Array) -> Arms:
    """Casts: every recipe along both axes; a few of them also of BF16 numbers, and under vmap."""
    found: Arms = {}

    def add(case: str, name: str, axis: int, x: Array, batch: bool = False) -> None:
        def cast(x: Array, prefer: str | None) -> Any:
            return breccia.cast(x, name, axis=axis, prefer=prefer)

        def plain(x: Array) -> Any:
            return LINES[name](x.astype(jnp.float32), axis)

        calls = {"breccia": lambda x: cast(x, None), "generic": lambda x: cast(x, "reference.cast"), "plain": plain}
        for arm, call in calls.items():
            if arm != "plain" or name in LINES:
                found["cast", case, arm] = waited(jax.jit(jax.vmap(call) if batch else call), x)

    for axis in (-1, -2):
        along = "" if axis == -1 else " along axis -2"
        for name in (*LINES, "mxfp6"):
            add(f"{name}{along}", name, axis, w)
        for name in WEIGHTS:
            add(f"{name}{along} of BF16", name, axis, w.astype(jnp.bfloat16))
            add(f"{name}{along} of four examples under vmap", name, axis, w.reshape(4, -1, w.shape[1]), batch=True)
    return found


def products(w: Array) -> Arms:
    """Products of FP32 rows by a weight in either order."""
    found: Arms = {}
    orders = {"(N, K)": lambda x, w: x @ w.mT, "(K, N)": lambda x, w: x @ w}
    weights = {name: {"(N, K)": breccia.cast(w, name), "(K, N)": breccia.cast(w, name, axis=-2)} for name in WEIGHTS}
    for m in ROWS:
        x = jnp.asarray(common.normal((m, w.shape[1]), m))
        plain = {order: waited(jax.jit(product), x, w) for order, product in orders.items()}
        for name, by_order in weights.items():
            for order, st in by_order.items():
                for arm, prefer in (("breccia", None), ("generic", "reference.matmul")):

                    def product(x: Array, st: Any, order: str = order, prefer: str | None = prefer) -> Array:
                        return breccia.matmul(x, st.mT if order == "(N, K)" else st, prefer=prefer)

                    found["product", f"{_rows(m)} by {name} {order}", arm] = waited(jax.jit(product), x, st)
                found["product", f"{_rows(m)} by {name} {order}", "plain"] = plain[order]
    return found


def layers(w: Array) -> Arms:
    """Layers with quantized kernels, of Flax and Equinox where they are installed."""
    return (flax_layers(w) if find_spec("flax") else {}) | (equinox_layers(w) if find_spec("equinox") else {})


def flax_layers(w: Array) -> Arms:
    from flax import linen, nnx

    from breccia_jax import flax

    found: Arms = {}
    n = w.shape[0]
    dense, variables = linen.Dense(n, use_bias=False), {"params": {"kernel": w}}
    module = nnx.Linear(n, n, use_bias=False, rngs=nnx.Rngs(0))
    module.kernel = nnx.Param(w)
    decoded = jax.jit(lambda quantized, x: dense.apply(breccia_jax.dequantize(quantized), x))
    apply, call = jax.jit(dense.apply), nnx.jit(lambda module, x: module(x))
    for m in ROWS:
        x = jnp.asarray(common.normal((m, n), m))
        plain = {"linen.Dense": waited(apply, variables, x), "nnx.Linear": waited(call, module, x)}
        for name in LAYERS:
            quantized, _ = flax.quantize(variables, {"*": name})
            layer, _ = flax.quantize(module, {"*": name})
            case = f"{_rows(m)}, {name}"
            found["layer", f"linen.Dense, {case}", "breccia"] = waited(apply, quantized, x)
            found["layer", f"linen.Dense, {case}", "generic"] = waited(decoded, quantized, x)
            found["layer", f"linen.Dense, {case}", "plain"] = plain["linen.Dense"]
            if m == 1:
                found["layer", f"nnx.Linear, {case}", "breccia"] = waited(call, layer, x)
                found["layer", f"nnx.Linear, {case}", "plain"] = plain["nnx.Linear"]
    return found


def equinox_layers(w: Array) -> Arms:
    import equinox

    from breccia_jax import equinox as quantizing

    found: Arms = {}
    n = w.shape[0]
    linear = equinox.nn.Linear(n, n, use_bias=False, key=jax.random.key(0))
    linear = equinox.tree_at(lambda layer: layer.weight, linear, w)
    x, call = jnp.asarray(common.normal((n,), 1)), equinox.filter_jit(lambda layer, x: layer(x))
    for name in LAYERS:
        layer, _ = quantizing.quantize(linear, name)
        found["layer", f"equinox.nn.Linear, one row, {name}", "breccia"] = waited(call, layer, x)
        found["layer", f"equinox.nn.Linear, one row, {name}", "plain"] = waited(call, linear, x)
    return found


def _rows(m: int) -> str:
    return "one row" if m == 1 else f"{m} rows"


def new_shapes(runs: int) -> Arms:
    """Eager casts of arrays whose shape changes with each call."""

    def fresh(cast: Callable[[Array], Any], columns: int) -> Callable[[], Any]:
        arrays = iter([jnp.asarray(common.normal((64 + n, columns), n)) for n in range(2 * runs)])
        return lambda: jax.block_until_ready(cast(next(arrays)))

    generic = {"prefer": "reference.cast"}
    return {
        ("new shape", "cast", "breccia"): fresh(lambda x: breccia.cast(x, "mxfp8"), 256),
        ("new shape", "cast", "generic"): fresh(lambda x: breccia.cast(x, "mxfp8", **generic), 288),
        ("new shape", "cast", "plain"): fresh(jax.jit(lambda x: LINES["mxfp8"](x, -1)), 320),
        ("new shape", "cast_ste and its gradient", "breccia"): fresh(_gradient, 352),
        ("new shape", "cast_ste_clipped", "breccia"): fresh(lambda x: breccia.cast_ste_clipped(x, "mxfp8"), 416),
        ("new shape", "requantize to int8", "breccia"): fresh(
            lambda x: breccia.requantize(breccia.cast(x, "mxfp8"), "int8"), 448
        ),
    }


def _gradient(x: Array) -> Any:
    y, back = jax.vjp(lambda x: breccia.cast_ste(x, "mxfp8"), x)
    return y, back(y)


def slices(size: int, runs: int) -> list[dict[str, Any]]:
    """Eager slices of a small tensor, and of its leaves."""
    st = breccia.cast(jnp.asarray(common.normal((64, min(size, 256)), 2)), "mxfp8")
    leaves = jax.tree.leaves(st)
    calls = {"breccia": lambda: st[0:4], "plain": lambda: [leaf[0:4] for leaf in leaves]}
    return [{"what": "slice", "case": "st[0:4]", "arm": arm, **common.timed_often(call, runs)} for arm, call in calls.items()]


def main(
    size: Annotated[int, typer.Option(min=512, help="Sides of the matrix, a multiple of 512.")] = 4096,
    runs: Annotated[int, typer.Option(min=1, help="Calls of each arm.")] = 11,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time casts, products, layers, slices and new shapes in JAX on the CPU."""
    w = jnp.asarray(common.normal((size, size), 1))
    calls = casts(w) | products(w) | layers(w) | new_shapes(runs)
    taken = common.swept(list(calls.values()), runs, 0)
    rows = [{"what": what, "case": case, "arm": arm, **times} for (what, case, arm), times in zip(calls, taken, strict=True)]
    result: dict[str, Any] = {"benchmark": "jax-cpu", "schema": common.SCHEMA, "provenance": common.provenance()}
    result |= {"options": {"size": size, "jax": jax.__version__}, "rows": [*rows, *slices(size, runs)]}
    tables.tell(result, out, as_json)


if __name__ == "__main__":
    typer.run(main)
