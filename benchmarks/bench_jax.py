"""Time of compiled casts, products, layers, slices and new shapes in JAX on the CPU, beside plain JAX, interleaved.

The arm `generic` is the generic algorithm, compiled by XLA, which runs where breccia-native is not installed; for layers, it
multiplies decoded values. Calls of new shapes are eager, but plain JAX is compiled there too. Compare ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from harness import Benchmark, Call, Result, Table, normal, often, program, ratio, rows_of, spread, table, version_of
from plain import InJax

import breccia

#: Recipes of the products, and of the casts of BF16 and under vmap; recipes of layers; rows of products.
WEIGHTS, LAYERS, ROWS = ("mxfp8", "fp8_block", "nvfp4", "int4"), ("mxfp8", "nvfp4", "int4"), (1, 16, 64)
ARMS = {"breccia": "breccia", "generic": "generic algorithm", "plain": "plain JAX"}

Array = Any
#: Arms by (what, case).
Cases = dict[tuple[str, str], dict[str, Call]]


def times(result: Result) -> Table:
    titles = {"cast": "cast, {}", "product": "{}", "layer": "{}", "new shape": "eager, a new shape: {}", "slice": "{}"}

    def cell(row: Any, arm: str) -> str:
        unit = 1e6 if row["what"] == "slice" else 1e3
        return spread(row["time"][arm], unit, ("min_s", "median_s")) if arm in row["time"] else ""

    def faster(row: Any) -> str:
        times = row["time"]
        return ratio(times["plain"]["min_s"] / times["breccia"]["min_s"]) if "plain" in times else ""

    columns = {"call": lambda row: titles[row["what"]].format(row["case"])}
    columns |= {name: (lambda row, arm=arm: cell(row, arm)) for arm, name in ARMS.items()}
    note = (
        "Milliseconds (microseconds for st[0:4]), min / median; ratios of the minima. "
        f"Matrices of {result['options']['size']} × {result['options']['size']}, compiled calls, "
        f"jax {result['options']['jax']}, arms interleaved. Plain products and layers have an FP32 weight in the same order; "
        "the generic algorithm's layers multiply decoded values. Calls of new shapes, with at least 64 rows under mxfp8, are "
        "eager; plain JAX is compiled."
    )
    return table("JAX on the CPU", {**columns, "plain JAX / breccia": faster}, result["rows"], note)


BENCHMARK = Benchmark("jax-cpu", {"jax-cpu": times})


def waited(function: Callable[..., Any], *arguments: Any) -> Call:
    import jax

    return lambda: jax.block_until_ready(function(*arguments))


def casts(w: Array) -> Cases:
    """Casts: every recipe along both axes; a few of them also of BF16 numbers, and under vmap."""
    import jax
    import jax.numpy as jnp

    found: Cases = {}
    lines = InJax()

    def add(case: str, name: str, axis: int, x: Array, batch: bool = False) -> None:
        calls = {
            "breccia": lambda x: breccia.cast(x, name, axis=axis),
            "generic": lambda x: breccia.cast(x, name, axis=axis, prefer="reference.cast"),
            **({"plain": lambda x: lines.cast(name, axis)(x)[1:]} if name in lines.recipes() else {}),
        }
        arms = {arm: waited(jax.jit(jax.vmap(call) if batch else call), x) for arm, call in calls.items()}
        found["cast", f"{name}{'' if axis == -1 else ' along axis -2'}{case}"] = arms

    for axis in (-1, -2):
        for name in (*lines.recipes(), "mxfp6"):
            add("", name, axis, w)
        for name in WEIGHTS:
            add(" of BF16", name, axis, w.astype(jnp.bfloat16))
            add(" of four examples under vmap", name, axis, w.reshape(4, -1, w.shape[1]), batch=True)
    return found


def products(w: Array) -> Cases:
    import jax

    def by(x: Array, st: Any, order: str, prefer: str | None) -> Call:
        return waited(jax.jit(lambda x, st: breccia.matmul(x, st.mT if order == "(N, K)" else st, prefer=prefer)), x, st)

    found: Cases = {}
    orders = {"(N, K)": lambda x, w: x @ w.mT, "(K, N)": lambda x, w: x @ w}
    weights = {name: {"(N, K)": breccia.cast(w, name), "(K, N)": breccia.cast(w, name, axis=-2)} for name in WEIGHTS}
    for m in ROWS:
        x = jax.numpy.asarray(normal((m, w.shape[1]), m))
        plain = {order: waited(jax.jit(product), x, w) for order, product in orders.items()}
        for name, by_order in weights.items():
            for order, st in by_order.items():
                arms = {"breccia": by(x, st, order, None), "generic": by(x, st, order, "reference.matmul")}
                found["product", f"{_rows(m)} by {name} {order}"] = {**arms, "plain": plain[order]}
    return found


def flax_layers(w: Array) -> Cases:
    import jax
    from flax import linen, nnx

    import breccia_jax
    from breccia_jax import flax

    found: Cases = {}
    n = w.shape[0]
    dense, variables = linen.Dense(n, use_bias=False), {"params": {"kernel": w}}
    module = nnx.Linear(n, n, use_bias=False, rngs=nnx.Rngs(0))
    module.kernel = nnx.Param(w)
    decoded = jax.jit(lambda quantized, x: dense.apply(breccia_jax.dequantize(quantized), x))
    apply, call = jax.jit(dense.apply), nnx.jit(lambda module, x: module(x))
    for m in ROWS:
        x = jax.numpy.asarray(normal((m, n), m))
        plain = {"linen.Dense": waited(apply, variables, x), "nnx.Linear": waited(call, module, x)}
        for name in LAYERS:
            quantized, _ = flax.quantize(variables, {"*": name})
            layer, _ = flax.quantize(module, {"*": name})
            arms = {"breccia": waited(apply, quantized, x), "generic": waited(decoded, quantized, x)}
            found["layer", f"linen.Dense, {_rows(m)}, {name}"] = {**arms, "plain": plain["linen.Dense"]}
            if m == 1:
                arms = {"breccia": waited(call, layer, x), "plain": plain["nnx.Linear"]}
                found["layer", f"nnx.Linear, {_rows(m)}, {name}"] = arms
    return found


def equinox_layers(w: Array) -> Cases:
    import equinox
    import jax

    from breccia_jax import equinox as quantizing

    found: Cases = {}
    n = w.shape[0]
    linear = equinox.nn.Linear(n, n, use_bias=False, key=jax.random.key(0))
    linear = equinox.tree_at(lambda layer: layer.weight, linear, w)
    x, call = jax.numpy.asarray(normal((n,), 1)), equinox.filter_jit(lambda layer, x: layer(x))
    for name in LAYERS:
        layer, _ = quantizing.quantize(linear, name)
        arms = {"breccia": waited(call, layer, x), "plain": waited(call, linear, x)}
        found["layer", f"equinox.nn.Linear, one row, {name}"] = arms
    return found


def _rows(m: int) -> str:
    return "one row" if m == 1 else f"{m} rows"


def new_shapes(runs: int) -> Cases:
    """Eager casts of arrays whose shape changes with each call."""
    import jax

    lines = InJax()

    def fresh(cast: Callable[[Array], Any], columns: int) -> Call:
        arrays = iter([jax.numpy.asarray(normal((64 + n, columns), n)) for n in range(2 * runs)])
        return lambda: jax.block_until_ready(cast(next(arrays)))

    def gradient(x: Array) -> Any:
        y, back = jax.vjp(lambda x: breccia.cast_ste(x, "mxfp8"), x)
        return y, back(y)

    casts = {
        "breccia": fresh(lambda x: breccia.cast(x, "mxfp8"), 256),
        "generic": fresh(lambda x: breccia.cast(x, "mxfp8", prefer="reference.cast"), 288),
        "plain": fresh(jax.jit(lambda x: lines.cast("mxfp8")(x)[1:]), 320),
    }
    others = {
        "cast_ste and its gradient": fresh(gradient, 352),
        "cast_ste_clipped": fresh(lambda x: breccia.cast_ste_clipped(x, "mxfp8"), 416),
        "requantize to int8": fresh(lambda x: breccia.requantize(breccia.cast(x, "mxfp8"), "int8"), 448),
    }
    return {("new shape", "cast"): casts, **{("new shape", case): {"breccia": call} for case, call in others.items()}}


@program
def main(
    size: Annotated[int, typer.Option(min=512, help="Sides of the matrix, a multiple of 512.")] = 4096,
    runs: Annotated[int, typer.Option(min=1, help="Calls of each arm.")] = 11,
) -> Result:
    """Time casts, products, layers, slices and new shapes in JAX on the CPU."""
    import jax

    w = jax.numpy.asarray(normal((size, size), 1))
    cases = casts(w) | products(w)
    cases |= flax_layers(w) if find_spec("flax") else {}
    cases |= (equinox_layers(w) if find_spec("equinox") else {}) | new_shapes(runs)
    rows = rows_of([({"what": what, "case": case}, arms) for (what, case), arms in cases.items()], runs)
    st = breccia.cast(jax.numpy.asarray(normal((64, min(size, 256)), 2)), "mxfp8")
    leaves = jax.tree.leaves(st)
    slices = {"breccia": often(lambda: st[0:4], runs), "plain": often(lambda: [leaf[0:4] for leaf in leaves], runs)}
    rows.append({"what": "slice", "case": "st[0:4]", "time": slices})
    return BENCHMARK.result(rows, {"size": size, "jax": version_of("jax")})
