"""Time of compiled casts, products of one row, and slices in JAX on the CPU, beside plain JAX, interleaved.

    python benchmarks/bench_jax.py [--size 4096] [--runs 15] [--out benchmarks/results]

Plain casts are the few lines of jnp that a user would write: no care for NaN, subnormal numbers or exact quotients. Products
multiply one row of FP32 by a weight of either order, (N, K) and (K, N); plain JAX multiplies an FP32 weight. The arm `generic`
is the generic algorithm, which XLA compiles: breccia's only one in JAX without breccia-native. Casts of new shapes are eager,
and the plain lines compiled. All arms take turns, since machines have faster and slower moments: compare ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import tables
import typer
from jax import lax

import breccia

#: Recipes of the products.
WEIGHTS = ("mxfp8", "fp8_block", "nvfp4", "int4")
FP8, FP4 = jnp.float8_e4m3fn, jnp.float4_e2m1fn
Array = Any


def in_blocks(x: Array, block: int) -> tuple[Array, Array]:
    t = x.reshape(x.shape[0], -1, block)
    return t, jnp.max(jnp.abs(t), axis=-1, keepdims=True)


def packed(codes: Array) -> Array:
    """4-bit codes two to a byte."""
    return lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], -1, 2), jnp.uint8)


def fp8_current(x: Array) -> Any:
    scale = jnp.max(jnp.abs(x)) / 448
    return jnp.clip(x * (1 / scale), -448, 448).astype(FP8), scale


def fp8_row(x: Array) -> Any:
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 448
    return jnp.clip(x * (1 / scale), -448, 448).astype(FP8), scale


def fp8_block(x: Array) -> Any:
    t, amax = in_blocks(x, 128)
    scale = amax / 448
    return jnp.clip(t * (1 / scale), -448, 448).astype(FP8).reshape(x.shape), scale[..., 0]


def mx(dtype: Any, largest: float) -> Callable[[Array], Any]:
    def cast(x: Array) -> Any:
        t, amax = in_blocks(x, 32)
        bits = lax.bitcast_convert_type(amax * np.float32(1 / largest), jnp.int32)
        exponent = jnp.clip((bits >> 23) + ((bits & 0x7FFFFF) != 0), 0, 254)
        codes = jnp.clip(t * lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32), -largest, largest).astype(dtype)
        codes = packed(codes) if dtype == FP4 else codes
        return codes.reshape(x.shape[0], -1), exponent[..., 0].astype(jnp.uint8)

    return cast


def nvfp4(x: Array) -> Any:
    tensor = jnp.max(jnp.abs(x)) / (448 * 6)
    t, amax = in_blocks(x, 16)
    scale = (amax / 6 / tensor).astype(FP8)
    codes = jnp.clip(t * (1 / (scale.astype(jnp.float32) * tensor)), -6, 6).astype(FP4)
    return packed(codes).reshape(x.shape[0], -1), scale[..., 0], tensor


def int4(x: Array) -> Any:
    t, amax = in_blocks(x, 128)
    scale = (amax / 7).astype(jnp.float16)
    codes = jnp.clip(jnp.round(t * (1 / scale.astype(jnp.float32))), -7, 7).astype(jnp.int8).reshape(x.shape[0], -1, 2)
    return (codes[..., 0] & 15) | (codes[..., 1] << 4), scale[..., 0]


def int8(x: Array) -> Any:
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    return jnp.clip(jnp.round(x * (1 / scale)), -127, 127).astype(jnp.int8), scale


def fp8_block_of_columns(x: Array) -> Any:
    t = x.reshape(-1, 128, x.shape[1])
    scale = jnp.max(jnp.abs(t), axis=1, keepdims=True) / 448
    return jnp.clip(t * (1 / scale), -448, 448).astype(FP8).reshape(x.shape), scale[:, 0]


def fp8_row_of_columns(x: Array) -> Any:
    scale = jnp.max(jnp.abs(x), axis=0, keepdims=True) / 448
    return jnp.clip(x * (1 / scale), -448, 448).astype(FP8), scale


PLAIN: dict[str, Callable[[Array], Any]] = {
    "fp8_current": fp8_current,
    "fp8_row": fp8_row,
    "fp8_block": fp8_block,
    "mxfp8": mx(FP8, 448.0),
    "mxfp4": mx(FP4, 6.0),
    "nvfp4": nvfp4,
    "int4": int4,
    "int8": int8,
}


#: The same along axis -2, as for the parameters of Flax.
PLAIN_OF_COLUMNS = {"fp8_row": fp8_row_of_columns, "fp8_block": fp8_block_of_columns}


def waited(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(function(*arguments))


def arms(size: int) -> dict[tuple[str, str, str], Callable[[], Any]]:
    """Calls by (what, recipe and order of a weight, whose)."""
    x, w = (jnp.asarray(common.normal((n, size), seed)) for seed, n in enumerate((1, size)))
    found: dict[tuple[str, str, str], Callable[[], Any]] = {}
    for axis, lines in ((-1, PLAIN), (-2, PLAIN_OF_COLUMNS)):
        for name, plain in lines.items():
            case = name if axis == -1 else f"{name} along axis -2"
            for arm, prefer in (("breccia", None), ("generic", "reference.cast")):
                cast = jax.jit(lambda w, name=name, prefer=prefer, axis=axis: breccia.cast(w, name, axis=axis, prefer=prefer))
                found["cast", case, arm] = waited(cast, w)
            found["cast", case, "plain"] = waited(jax.jit(plain), w)
    plain = {"(N, K)": waited(jax.jit(lambda x, w: x @ w.T), x, w), "(K, N)": waited(jax.jit(lambda x, w: x @ w), x, w)}
    for name in WEIGHTS:
        rows, columns = breccia.cast(w, name), breccia.cast(w, name, axis=-2)
        for arm, prefer in (("breccia", None), ("generic", "reference.matmul")):
            by_rows = jax.jit(lambda x, st, prefer=prefer: breccia.matmul(x, st.mT, prefer=prefer))
            by_columns = jax.jit(lambda x, st, prefer=prefer: breccia.matmul(x, st, prefer=prefer))
            found["product", f"{name} (N, K)", arm] = waited(by_rows, x, rows)
            found["product", f"{name} (K, N)", arm] = waited(by_columns, x, columns)
        for order, call in plain.items():
            found["product", f"{name} {order}", "plain"] = call
    return found


def new_shapes(runs: int) -> dict[tuple[str, str, str], Callable[[], Any]]:
    """Eager casts of arrays whose shape changes with each call."""

    def fresh(cast: Callable[[Array], Any], columns: int) -> Callable[[], Any]:
        arrays = iter([jnp.asarray(common.normal((64 + n, columns), n)) for n in range(2 * runs)])
        return lambda: jax.block_until_ready(cast(next(arrays)))

    return {
        ("new shape", "mxfp8", "breccia"): fresh(lambda x: breccia.cast(x, "mxfp8"), 256),
        ("new shape", "mxfp8", "generic"): fresh(lambda x: breccia.cast(x, "mxfp8", prefer="reference.cast"), 288),
        ("new shape", "mxfp8", "plain"): fresh(jax.jit(PLAIN["mxfp8"]), 320),
    }


def slices(size: int, runs: int) -> list[dict[str, Any]]:
    """Eager slices of a tensor of few rows, and of its leaves."""
    st = breccia.cast(jnp.asarray(common.normal((64, min(size, 256)), 2)), "mxfp8")
    leaves = jax.tree.leaves(st)
    calls = {"breccia": lambda: st[0:4], "plain": lambda: [leaf[0:4] for leaf in leaves]}
    return [{"what": "slice", "case": "st[0:4]", "arm": arm, **common.timed_often(call, runs)} for arm, call in calls.items()]


def main(
    size: Annotated[int, typer.Option(min=256, help="Sides of the matrix.")] = 4096,
    runs: Annotated[int, typer.Option(min=1, help="Calls of each arm.")] = 15,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time casts, products and slices in JAX on the CPU."""
    calls = arms(size) | new_shapes(runs)
    taken = common.swept(list(calls.values()), runs, 0)
    rows = [{"what": what, "case": case, "arm": arm, **times} for (what, case, arm), times in zip(calls, taken, strict=True)]
    result: dict[str, Any] = {"benchmark": "jax-cpu", "schema": common.SCHEMA, "provenance": common.provenance()}
    result |= {"options": {"size": size, "jax": jax.__version__}, "rows": [*rows, *slices(size, runs)]}
    tables.tell(result, out, as_json)


if __name__ == "__main__":
    typer.run(main)
