"""The rows of `bench_gpu.py casts` and the calls of `bench_gpu.py host`: what breccia and its rivals do in each of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cast_tables import GOALS, SMALL_ELEMENTS
from rivals import EAGER, TILES, TORCH_COMPILED, Rival

RECIPES = (
    "fp8_block",
    TILES,
    "fp8_row",
    "fp8_current",
    "fp8_delayed",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "mxint8",
    "nvfp4",
    "nvfp4,two_level=false",
    "int4",
    "int4,symmetric=false,signed=false",
    "int8",
    "nf4",
)
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: What is requantized, and to what: the first keeps its codes, the others are decoded and cast.
REQUANTIZED = {TILES: "fp8_block", "mxfp8": "nvfp4", "fp8_block": "mxfp8"}
#: Recipes that are also cast from FP16 and FP32: one for each kind of scale.
OTHER_DTYPES = ("fp8_block", "fp8_current", "mxfp8", "nvfp4")
#: The supplied scale of fp8_delayed. Standard normal numbers stay below 448 times it.
SCALE = 1 / 64

Call = Callable[[], object]


@dataclass(frozen=True)
class Op:
    """The call of a row.

    function: breccia's op. dtype: the input's dtype, if it is not the run's. recipes: the recipes to measure. large: measure
    large matrices only.
    """

    function: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    dtype: str = ""
    recipes: tuple[str, ...] = RECIPES
    large: bool = False


OPS = {
    "cast": Op("cast"),
    "cast-axis-2": Op("cast", {"axis": -2}),
    # cast_pair has no scale=, so fp8_delayed would be the same as fp8_current.
    "cast_pair": Op("cast_pair", recipes=tuple(recipe for recipe in RECIPES if recipe != "fp8_delayed")),
    "dequantize": Op("dequantize"),
    "requantize": Op("requantize", recipes=tuple(REQUANTIZED)),
    "cast_ste": Op("cast_ste"),
    "AmaxHistory.cast": Op("cast_and_record", recipes=("fp8_delayed",)),
    "AmaxHistory.update": Op("record_amax", recipes=("fp8_delayed",)),
    "cast-fp16": Op("cast", dtype="float16", recipes=OTHER_DTYPES, large=True),
    "cast-fp32": Op("cast", dtype="float32", recipes=OTHER_DTYPES, large=True),
}


def is_large(shape: tuple[int, int]) -> bool:
    """Whether a cast of the matrix takes the device many times longer than the launch takes the host."""
    return math.prod(shape) > SMALL_ELEMENTS


def cases(recipes: list[str], ops: list[str], shapes: list[tuple[int, int]]) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """(recipe, op, shape) of every row, shape by shape; rows with a goal come first. Recipes that are not in RECIPES run the
    ops that are measured for all recipes."""
    for shape in shapes:
        found = [
            (spec, op, shape)
            for spec, op in itertools.product(recipes, ops)
            if (spec in OPS[op].recipes or (spec not in RECIPES and len(OPS[op].recipes) >= len(RECIPES) - 1))
            and (is_large(shape) or not OPS[op].large)
        ]
        yield from sorted(found, key=lambda row: row[:2] not in GOALS)


def rotating(call: Callable[[Any], object], operands: list[Any]) -> Call:
    """A call that takes the next operand each time."""
    following = itertools.cycle(operands)
    return lambda: call(next(following))


def matrices(shape: tuple[int, int], dtype: str, device: str) -> list[Any]:
    """Standard normal matrices, enough of them that the last one evicts the first from the device's cache."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape, device=device, generator=generator).to(getattr(torch, dtype))
    cache = torch.cuda.get_device_properties().L2_cache_size if device == "cuda" else 0
    return [x, *(x.clone() for _ in range(math.ceil(2 * cache / x.nbytes) - 1))]


def copying(xs: list[Any]) -> Call:
    """The copy of a matrix into another."""
    import torch

    to = torch.empty_like(xs[0])
    return rotating(to.copy_, xs)


@dataclass(frozen=True)
class Work:
    """breccia's call, the bytes that it has to read and write, and the kernel that runs. to: what is requantized to."""

    call: Call
    nbytes: int
    kernel: str
    to: str = ""

    def functions(self) -> list[str]:
        """Names of the Triton functions that the call launches, in order; empty if breccia-triton does not run it."""
        try:
            from breccia_triton import cast, decode, launch
        except ImportError:
            return []
        launch.Remembered.forget()  # then the next call is the only one that is remembered
        self.call()
        made = [*cast._calls.values(), *decode._calls.values()]
        return [each.function.__name__ for call in made for each in getattr(call, "launches", ())]


def work(op: str, spec: str, xs: list[Any], dtype: str) -> Work:
    """What a row measures: `op` under the recipe `spec`. Operands of dequantize and requantize are casts of `xs`."""
    import torch

    import breccia

    recipe, name = breccia.recipe(spec), OPS[op].function
    supplied: dict[str, Any] = {"scale": torch.tensor(SCALE, device=xs[0].device)} if spec == "fp8_delayed" else {}
    if name in ("record_amax", "cast_and_record"):
        return _history(name, recipe, xs)
    to = breccia.recipe(REQUANTIZED.get(spec, spec))
    arguments: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "cast": ([recipe], supplied),
        "cast_pair": ([recipe], {}),
        "dequantize": ([], {"out_dtype": dtype}),
        "requantize": ([to], {}),
        "cast_ste": ([recipe], supplied),
    }
    extras, options = arguments[name]
    options = {**options, **OPS[op].options}
    casts = name not in ("dequantize", "requantize")
    operands = xs if casts else [breccia.cast(x, recipe, **supplied) for x in xs]
    function = getattr(breccia, name)
    results = function(operands[0], *extras, **options)
    # A scale of the whole tensor takes one more read, before the cast.
    reads = 2 if not supplied and ((casts and _tensor_wide(recipe)) or (name == "requantize" and _tensor_wide(to))) else 1
    written = sum(result.nbytes for result in (results if isinstance(results, tuple) else [results]))
    kernel = breccia.explain(name, operands[0], *extras, **options).running
    call = rotating(lambda x: function(x, *extras, **options), operands)
    return Work(call, reads * operands[0].nbytes + written, kernel, REQUANTIZED.get(spec, "") if name == "requantize" else "")


def _tensor_wide(recipe: Any) -> bool:
    """Whether the recipe has a scale of the whole tensor."""
    import breccia

    fmt = recipe.format
    return fmt.global_scale is not None or fmt.scale.block == breccia.formats.TENSOR


def _history(name: str, recipe: Any, xs: list[Any]) -> Work:
    """`AmaxHistory.cast` or `AmaxHistory.update`: one read. The history is a few numbers, so its bytes are not counted."""
    import breccia

    history = breccia.AmaxHistory(recipe).update(xs[0])
    kernel = breccia.explain(name, xs[0], recipe).running
    if name == "record_amax":
        return Work(rotating(history.update, xs), xs[0].nbytes, kernel)
    st, _ = history.cast(xs[0])
    return Work(rotating(history.cast, xs), xs[0].nbytes + st.nbytes, kernel)


def rival_call(rival: Rival, op: str, spec: str, xs: list[Any], name: str = "") -> Call | None:
    """The rival's call for the same work; None if it has no such recipe or op.

    name: the rival's. torch.compile takes seconds for each graph, so it runs ops other than `cast` and `dequantize` on large
    matrices only. Plain torch's formulas take only whole blocks.
    """
    down = bool(OPS[op].options) or op == "cast_pair" or spec == TILES
    if name in (EAGER, TORCH_COMPILED) and down and xs[0].shape[0] % 128:
        return None
    if name == TORCH_COMPILED and op not in ("cast", "dequantize") and not is_large(tuple(xs[0].shape)):
        return None
    function = OPS[op].function
    made = {
        "cast": rival.down if OPS[op].options else rival.cast,
        "dequantize": rival.cast,
        "cast_pair": rival.pair,
        "cast_and_record": rival.recorded,
        "record_amax": rival.amax,
    }.get(function)
    if made is None:
        return None
    try:
        cast = made(spec)
    except KeyError:
        return None
    return rotating(rival.dequantize, [cast(x) for x in xs]) if op == "dequantize" else rotating(cast, xs)


# ------------------------------------------------------------------------------------------------ the host

#: Recipes of the casts, layers and products (both operands) whose host time is measured.
HOST_RECIPES = (
    "fp8_block",
    TILES,
    "fp8_row",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "mxint8",
    "int4",
    "int8",
    "nf4",
    "fp8_current",
    "fp8_delayed",
    "nvfp4",
)
HOST_OPS = tuple(op for op in OPS if not OPS[op].large)
HOST_LAYERS = ("int4", "mxfp4", "nvfp4", TILES, "mxfp8")
HOST_PRODUCTS = (("fp8_row", "fp8_row"), ("fp8_block", TILES), ("mxfp8", "mxfp8"))


def host_calls(side: int, device: str, rivals: dict[str, Rival]) -> Iterator[tuple[str, str, Callable[[], Call | None]]]:
    """(name of the call, "breccia", "torch" or a rival, function that prepares the call) for matrices of side x side."""
    import torch

    import breccia
    import breccia_torch

    def numbers(*shape: int) -> Any:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    x, row = numbers(side, side), numbers(1, side)

    def product(a: str, w: str) -> Callable[[], Call]:
        def make() -> Call:
            left, right = breccia.cast(x, a), breccia.cast(x, w).mT
            return lambda: breccia.matmul(left, right, "bfloat16")

        return make

    def layer(spec: str) -> Callable[[], Call]:
        def make() -> Call:
            linear = torch.nn.Linear(side, side, bias=False, device=device, dtype=torch.bfloat16)
            model = torch.nn.Sequential(linear).eval().requires_grad_(False)
            if spec:
                breccia_torch.quantize_(model, spec)  # also stores the weight in the kernel's order
            made = model[0]
            return lambda: made(row)

        return make

    for op, spec in itertools.product(HOST_OPS, HOST_RECIPES):
        if spec in OPS[op].recipes:
            name = f"{op} {spec}" + (f" to {REQUANTIZED[spec]}" if op == "requantize" else "")
            yield name, "breccia", lambda op=op, spec=spec: work(op, spec, [x], "bfloat16").call
            for rival, one in rivals.items():
                yield name, rival, lambda op=op, spec=spec, one=one, rival=rival: rival_call(one, op, spec, [x], rival)
    for a, w in HOST_PRODUCTS:
        yield f"matmul {a} by {w}", "breccia", product(a, w)
    for spec in HOST_LAYERS:
        yield f"ScaledLinear {spec}", "breccia", layer(spec)
    out = torch.empty_like(x)
    yield "torch.nn.Linear", "torch", layer("")
    yield "torch.neg", "torch", lambda: lambda: torch.neg(x, out=out)
    yield "torch.empty", "torch", lambda: lambda: torch.empty((side, side), device=device, dtype=torch.bfloat16)
