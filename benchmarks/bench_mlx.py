"""Time of casts, of their inverse and of linear layers on MLX's CPU arrays, interleaved with MLX's own.

    python benchmarks/bench_mlx.py [--size 4096] [--layer 2048] [--out benchmarks/results]

MLX lacks most recipes, so each is compared with the mode of `mx.quantize` of the same width. `compiled` arms run inside
`mx.compile`: layers have their weights among the inputs of the compiled function, or as its constants in `captured` arms.
`--generic` adds the generic algorithm, which takes minutes. Samples of all arms are interleaved, since the speed of a machine
varies: compare ratios, not milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import common
import mlx.core as mx
import tables
import typer
from mlx import nn

import breccia
from breccia.backend import ScaledTensor, components
from breccia_mlx import from_tree, to_tree
from breccia_mlx.nn import ScaledLinear

#: Recipe -> options of `mx.quantize`: the same format, or one of the same width.
RIVALS: dict[str, dict[str, Any]] = {
    "mxfp8": {"mode": "mxfp8"},
    "mxfp4": {"mode": "mxfp4"},
    "nvfp4": {"mode": "nvfp4"},
    "nvfp4,two_level=false": {"mode": "nvfp4"},
    "int4": {"bits": 4},
    "int4,group_size=64,signed=false,symmetric=false,offset=bias,scale_dtype=fp32": {"bits": 4},
    "mlx_affine,bits=2,scale_dtype=fp32": {"bits": 2},
    "mlx_affine,bits=3,scale_dtype=fp32": {"bits": 3},
    "mlx_affine,bits=5,scale_dtype=fp32": {"bits": 5},
    "mlx_affine,bits=6,scale_dtype=fp32": {"bits": 6},
    "int8": {"bits": 8},
    "int8,group_size=64,signed=false,symmetric=false,offset=bias": {"bits": 8},
    "nf4": {"bits": 4},
    "mxfp6": {"bits": 6},
    "mxint8": {"bits": 8},
    "fp8_block": {"mode": "mxfp8"},
    "fp8_row": {"mode": "mxfp8"},
    "fp8_current": {"mode": "mxfp8"},
}
#: Recipes without layers: those of activations.
_NO_LAYERS = ("fp8_current",)
#: Seconds in which the arms of a cast, and of a layer, take further samples after `--runs`.
_CAST_S, _LAYER_S = 2.0, 1.0


def evaluated(found: Any) -> None:
    mx.eval(components(found) if isinstance(found, ScaledTensor) else found)


def casts(w: Any, spec: str, generic: bool) -> dict[str, dict[str, Callable[[], None]]]:
    """The arms of both directions, by the name of the direction."""
    recipe, options = breccia.recipe(spec), RIVALS[spec]
    st, theirs = breccia.cast(w, recipe), mx.quantize(w, **options)
    evaluated(st)
    mx.eval(theirs)
    # mx.dequantize takes the dtype from float scales, and FP32 has to be asked for where scales are codes.
    wide = {"dtype": mx.float32} if "mode" in options else {}
    found: dict[str, dict[str, Callable[[], None]]] = {
        "cast": {
            "breccia": lambda: evaluated(breccia.cast(w, recipe)),
            "MLX": lambda: mx.eval(mx.quantize(w, **options)),
        },
        "dequantize": {
            "breccia": lambda: evaluated(breccia.dequantize(st)),
            "MLX": lambda: mx.eval(mx.dequantize(*theirs, **options, **wide)),
        },
    }
    cast, decode = "reference.cast", "reference.dequantize"
    tree = to_tree(st)

    def compiled(prefer: str | None) -> Callable[[], None]:
        function = mx.compile(lambda x: to_tree(breccia.cast(x, recipe, prefer=prefer)))
        return lambda: mx.eval(function(w))

    def decoded(prefer: str | None) -> Callable[[], None]:
        function = mx.compile(lambda tree: breccia.dequantize(from_tree(tree), prefer=prefer))
        return lambda: mx.eval(function(tree))

    found["cast"]["compiled"], found["dequantize"]["compiled"] = compiled(None), decoded(None)
    if generic:
        found["cast"] |= {
            "generic": lambda: evaluated(breccia.cast(w, recipe, prefer=cast)),
            "generic compiled": compiled(cast),
        }
        found["dequantize"] |= {
            "generic": lambda: evaluated(breccia.dequantize(st, prefer=decode)),
            "generic compiled": decoded(decode),
        }
    return found


def layers(size: int, spec: str, x: Any, generic: bool) -> dict[str, Callable[[], None]]:
    """The arms of a linear layer of that size."""
    linear = nn.Linear(size, size)
    ours = ScaledLinear.from_linear(linear, spec)
    theirs = nn.QuantizedLinear.from_linear(linear, **{"group_size": None, **RIVALS[spec]})
    mx.eval(ours.parameters(), theirs.parameters())
    found = {"breccia": lambda: mx.eval(ours(x)), "MLX": lambda: mx.eval(theirs(x))}
    if generic:
        decoding = ScaledLinear.from_linear(linear, spec, prefer="reference.matmul")
        found["generic"] = lambda: mx.eval(decoding(x))
    for name, inputs in (("compiled", True), ("captured", False)):
        for arm, layer in ((name, ours), (f"MLX {name}", theirs)):
            function = mx.compile(lambda x, layer=layer: layer(x), inputs=layer.state if inputs else None)
            found[arm] = lambda function=function: mx.eval(function(x))
    return found


def main(
    size: Annotated[int, typer.Option(min=128, help="Rows and columns of the arrays that are cast.")] = 4096,
    layer: Annotated[int, typer.Option(min=128, help="Input and output lengths of the layers.")] = 2048,
    rows: Annotated[str, typer.Option(help="Rows of activations, separated by commas.")] = "1,4",
    recipes: Annotated[str, typer.Option(help="Recipes to cast with, separated by spaces; all by default.")] = "",
    runs: Annotated[int, typer.Option(min=1, help="Least number of samples.")] = 7,
    generic: Annotated[bool, typer.Option(help="Time the generic algorithm too.")] = False,
    seconds: Annotated[float, typer.Option(min=0, help="Factor of the time for further samples.")] = 1.0,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time breccia on MLX's CPU arrays beside MLX."""
    mx.set_default_device(mx.cpu)
    w = mx.array(common.normal((size, size), 0))
    found: list[dict[str, Any]] = []
    for spec in recipes.split() or RIVALS:
        for op, arms in casts(w, spec, generic).items():
            for arm, times in zip(arms, common.swept(list(arms.values()), runs, _CAST_S * seconds), strict=True):
                found.append({"op": op, "recipe": spec, "arm": arm, **times})
    for spec in [s for s in recipes.split() or RIVALS if s not in _NO_LAYERS]:
        for m in map(int, rows.split(",")):
            arms = layers(layer, spec, mx.array(common.normal((m, layer), m)), generic)
            for arm, times in zip(arms, common.swept(list(arms.values()), runs, _LAYER_S * seconds), strict=True):
                found.append({"op": f"layer, M = {m}", "recipe": spec, "arm": arm, **times})
    result: dict[str, Any] = {"benchmark": "mlx", "schema": common.SCHEMA, "provenance": common.provenance()}
    options = {"size": size, "layer": layer, "mlx": version("mlx"), "rivals": {k: _named(v) for k, v in RIVALS.items()}}
    tables.tell({**result, "options": options, "rows": found}, out, as_json)


def _named(options: dict[str, Any]) -> str:
    return options.get("mode") or f"affine, {options['bits']} bits"


if __name__ == "__main__":
    typer.run(main)
