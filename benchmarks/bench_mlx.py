"""Time of casts, of their inverse and of linear layers on MLX's CPU arrays, interleaved with MLX's own.

MLX lacks most recipes, so each is compared with the mode of `mx.quantize` of the same width. Compiled layers have their weights
among the inputs of the function, or as its constants in `captured` arms. Compare ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from harness import Benchmark, Call, Result, Table, normal, program, progress, ratio, rows_of, spread, table, version_of

import breccia

#: Recipe -> options of `mx.quantize`: the same format, or one of the same width.
RIVALS: dict[str, dict[str, Any]] = {
    "mxfp8": {"mode": "mxfp8"},
    "mxfp4": {"mode": "mxfp4"},
    "nvfp4": {"mode": "nvfp4"},
    "nvfp4,two_level=false": {"mode": "nvfp4"},
    "int4": {"bits": 4},
    "int4,group_size=64,signed=false,symmetric=false,offset=bias,scale_dtype=fp32": {"bits": 4},
    **{f"mlx_affine,bits={bits},scale_dtype=fp32": {"bits": bits} for bits in (2, 3, 5, 6)},
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
#: Arms of casts and of layers with their headings. Captured weights are constants of the compiled function.
CASTS = {"breccia": "breccia", "compiled": "breccia in mx.compile", "MLX": "MLX"}
LAYERS = {name: CASTS[name] for name in ("breccia", "MLX", "compiled")} | {
    "MLX compiled": "MLX in mx.compile",
    "captured": "breccia, captured",
    "MLX captured": "MLX, captured",
}


def times(op: str, what: str, arms: dict[str, str]) -> Callable[[Result], Table]:
    def made(result: Result) -> Table:
        rows = [row for row in result["rows"] if row["op"].startswith(op)]
        shown = [arm for arm in arms if any(arm in row["time"] for row in rows)]

        def faster(*pairs: tuple[str, str]) -> Callable[[Any], str]:
            def cell(row: Any) -> str:
                found = [(row["time"][a], row["time"][b]) for a, b in pairs if a in row["time"] and b in row["time"]]
                return ratio(found[0][0]["median_s"] / found[0][1]["median_s"]) if found else ""

            return cell

        columns: dict[str, Any] = {"recipe": "recipe"}
        if len({row["op"] for row in rows}) > 1:
            columns["rows"] = lambda row: row["op"].partition(", ")[2]
        for arm in shown:
            columns[arms[arm]] = lambda row, arm=arm: spread(row["time"].get(arm), 1e3, ("min_s", "median_s"))
        columns["MLX's mode"] = lambda row: result["options"]["rivals"][row["recipe"]]
        columns |= {"ratio": faster(("MLX", "breccia"))}
        columns |= {"ratio, compiled": faster(("MLX compiled", "compiled"), ("MLX", "compiled"))}
        if "captured" in shown:
            columns["ratio, captured"] = faster(("MLX captured", "captured"))
        note = (
            f"Milliseconds, min / median, arms interleaved, MLX {result['options']['mlx']} on the CPU. ratio: MLX's median to "
            "breccia's, and to that of breccia in mx.compile."
        )
        return table(f"MLX: {what}", columns, rows, note)

    return made


BENCHMARK = Benchmark(
    "mlx",
    {
        "mlx-cast": times("cast", "casts", CASTS),
        "mlx-dequantize": times("dequantize", "dequantize", CASTS),
        "mlx-layer": times("layer", "linear layers", LAYERS),
    },
)


def casts(w: Any, spec: str) -> dict[str, dict[str, Call]]:
    import mlx.core as mx

    from breccia.backend import components
    from breccia_mlx import from_tree, to_tree

    recipe, options = breccia.recipe(spec), RIVALS[spec]
    st, theirs = breccia.cast(w, recipe), mx.quantize(w, **options)
    mx.eval(components(st), theirs)
    tree = to_tree(st)
    # mx.dequantize takes the dtype from float scales, and FP32 has to be asked for where scales are codes.
    wide = {"dtype": mx.float32} if "mode" in options else {}

    cast = mx.compile(lambda x: to_tree(breccia.cast(x, recipe)))
    decode = mx.compile(lambda tree: breccia.dequantize(from_tree(tree)))
    return {
        "cast": {
            "breccia": lambda: mx.eval(components(breccia.cast(w, recipe))),
            "MLX": lambda: mx.eval(mx.quantize(w, **options)),
            "compiled": lambda: mx.eval(cast(w)),
        },
        "dequantize": {
            "breccia": lambda: mx.eval(breccia.dequantize(st)),
            "MLX": lambda: mx.eval(mx.dequantize(*theirs, **options, **wide)),
            "compiled": lambda: mx.eval(decode(tree)),
        },
    }


def layers(size: int, spec: str, x: Any) -> dict[str, Call]:
    import mlx.core as mx
    from mlx import nn

    from breccia_mlx.nn import ScaledLinear

    linear = nn.Linear(size, size)
    ours = ScaledLinear.from_linear(linear, spec)
    theirs = nn.QuantizedLinear.from_linear(linear, **{"group_size": None, **RIVALS[spec]})
    mx.eval(ours.parameters(), theirs.parameters())
    found: dict[str, Call] = {"breccia": lambda: mx.eval(ours(x)), "MLX": lambda: mx.eval(theirs(x))}
    for name, inputs in (("compiled", True), ("captured", False)):
        for arm, layer in ((name, ours), (f"MLX {name}", theirs)):
            function = mx.compile(lambda x, layer=layer: layer(x), inputs=layer.state if inputs else None)
            found[arm] = lambda function=function: mx.eval(function(x))
    return found


@program
def main(
    size: Annotated[int, typer.Option(min=128, help="Rows and columns of the arrays that are cast.")] = 4096,
    layer: Annotated[int, typer.Option(min=128, help="Input and output lengths of the layers.")] = 2048,
    rows: Annotated[str, typer.Option(help="Rows of activations, separated by commas.")] = "1,4",
    recipes: Annotated[str, typer.Option(help="Recipes to cast with, separated by spaces; all by default.")] = "",
    runs: Annotated[int, typer.Option(min=1, help="Least number of samples.")] = 7,
    seconds: Annotated[float, typer.Option(min=0, help="Factor of the time for further samples.")] = 1.0,
) -> Result:
    """Time breccia on MLX's CPU arrays beside MLX."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    w, specs = mx.array(normal((size, size), 0)), recipes.split() or list(RIVALS)
    found: list[dict[str, Any]] = []
    for spec in progress(specs, "casts"):
        for op, arms in casts(w, spec).items():
            found += rows_of([({"op": op, "recipe": spec}, arms)], runs, _CAST_S * seconds)
    for spec in progress([spec for spec in specs if spec not in _NO_LAYERS], "layers"):
        for m in map(int, rows.split(",")):
            arms = layers(layer, spec, mx.array(normal((m, layer), m)))
            found += rows_of([({"op": f"layer, M = {m}", "recipe": spec}, arms)], runs, _LAYER_S * seconds)
    modes = {spec: options.get("mode") or f"affine, {options['bits']} bits" for spec, options in RIVALS.items()}
    return BENCHMARK.result(found, {"size": size, "layer": layer, "mlx": version_of("mlx"), "rivals": modes})
