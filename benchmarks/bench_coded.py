"""On a CUDA device: decoding, and products of few rows, of weights of any width of codes and of coded scales.

First `dequantize` of random bits, NaN and Inf among the scales, is compared with NumPy's reference. Each sample of a time
replays a CUDA graph of calls with copies of the weight that together exceed the L2 cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import torch
import typer
from bench_weight_only import BF16, OURS, Products, copy_of
from harness import Benchmark, Device, Result, Seconds, command, known, progress, sizes, three
from harness.device import Arms, beyond_cache, check_device, graphed, message, rotating, sampled, where
from harness.tables import ABSENT, Table, median, over, table

import breccia
from breccia import ScaledTensor
from breccia.backend import checks, components, ops_of, part_shapes, reference

#: Weights by name.
FORMATS = {
    "q4_k": "gguf", "q6_k": "gguf,type=Q6_K", "int3": "int3,group_size=128", "int4": "int4,group_size=128",
    "int5": "int5,group_size=128", "q8_0": "q8_0",
}  # fmt: skip
_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0")
_ZERO = "symmetric=false,signed=false"
#: Formats whose decoded bits are compared.
COMPARED = (
    *(f"gguf,type={kind}" for kind in _TYPES),
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"),
    *(f"int,bits={bits},group_size=32,signed={'false' if bits == 1 else 'true'}" for bits in range(1, 9)),
    *(f"int,bits={bits},group_size=64,{_ZERO}" for bits in range(1, 9)),
    *(f"int,bits={bits},group_size=64,{_ZERO},offset=float_zero_point" for bits in (2, 3, 4, 8)),
    *("nvfp4,order=scales_first", "int,bits=5,group_size=48,symmetric=false,signed=false,offset=bias"),
)
#: Shapes of what is compared: whole blocks and tiles, and neither.
SHAPES = ((64, 2048), (33, 1288))
#: Arms besides those of `bench_weight_only`: a copy of a BF16 matrix, and torch's ops one after the other.
COPY, PLAIN = "copy", "torch"
ROWS = (1, 16)


def times(result: Result) -> Table:
    rows = {(row["format"], row["m"]): row for row in result["rows"]}

    def cell(m: int, rivals: tuple[str, ...]) -> Any:
        def shown(name: str) -> str:
            row = rows.get((name, m))
            if row is None or not (ours := median(row, OURS)):
                return ABSENT
            return f"{three(1e6 * ours)}; {' / '.join(over(median(row, rival), ours) for rival in rivals)}"

        return shown

    products = {f"M = {m}": cell(m, (BF16, PLAIN)) for m in result["options"]["rows"]}
    columns = {"weight": str, "dequantize": cell(0, (COPY, PLAIN)), **products}
    n, k = result["options"]["shape"]
    note = (
        f"Weights of {n}×{k}. Microseconds of a call in a CUDA graph, median; times faster than a copy of BF16 / torch's ops "
        "(dequantize, to BF16), and than torch's BF16 product / torch's ops and its product. Weights rotate, so that they are "
        f"not in the L2 cache. Decoded bits of {result['compared']} tensors were compared with NumPy's: "
        f"{len(result['different'])} differ."
    )
    names = list(dict.fromkeys(name for name, _ in rows))
    return table("weights of any width of codes and of coded scales", columns, names, note)


BENCHMARK = Benchmark("gpu-coded", {"gpu-coded": times})

# ------------------------------------------------------------------------------------------------ bits


def drawn(recipe: breccia.ScalingRecipe, shape: tuple[int, int]) -> ScaledTensor:
    """A NumPy tensor of random bits. K is a multiple of 8."""
    rng, layout = np.random.default_rng(0), checks.fitted_layout(recipe, shape, -1)
    dtypes = ops_of(np.empty(0)).dtypes(recipe.format)
    parts: dict[str, Any] = {}
    for name, lengths in part_shapes(recipe.format, layout, shape, -1).items():
        dtype = np.dtype(dtypes[name])
        parts[name] = rng.integers(0, 256, (math.prod(lengths), dtype.itemsize), np.uint8).view(dtype).reshape(lengths)
    return ScaledTensor.from_parts(**parts, recipe=recipe, layout=layout, axis=-1, padding=0)


def moved(st: ScaledTensor, device: str) -> ScaledTensor:
    """The tensor in torch's dtypes, on a device."""
    from breccia_torch.ops import TORCH

    dtypes, parts = TORCH.dtypes(st.recipe.format), dict[str, Any]()
    for name, part in components(st).items():
        words = torch.from_numpy(part.reshape(-1).view(np.uint8)).to(device)
        parts[name] = words.view(getattr(torch, dtypes[name])).reshape(part.shape)
    return ScaledTensor.from_parts(**parts, recipe=st.recipe, layout=st.layout, axis=-1, padding=0)


def difference(spec: str, shape: tuple[int, int], device: str) -> str:
    """How the values of `dequantize` differ from those of NumPy's reference, all NaNs being equal; empty if they do not."""
    st = drawn(breccia.recipe(spec), shape)
    try:
        prefer = "triton.dequantize" if device == "cuda" else None
        found = breccia.dequantize(moved(st, device), prefer=prefer).cpu().numpy()
    except Exception as e:  # one format that fails must not stop the rest
        return message(e)
    with np.errstate(all="ignore"):
        expected = reference.dequantize(st)
    unlike = (found.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(found) & np.isnan(expected))
    return f"{unlike.sum()} values" if unlike.any() else ""


# ------------------------------------------------------------------------------------------------ torch's ops


def plain(st: ScaledTensor) -> Any:
    """Values of a weight of `FORMATS` in BF16, as a user of torch would write it first."""
    fmt, (n, k) = st.recipe.format, st.shape
    values = _numbers(st.data, fmt.element).view(n, -1, fmt.scale.block[1]) * _levels(st.scale, fmt.scale_record)
    if fmt.offset == "bias":
        values = values + _levels(st.zero_point, fmt.offset_record)
    return values.view(n, k).bfloat16()


def _numbers(data: Any, codec: Any) -> Any:
    """FP32 numbers of packed integers."""
    if codec.bits == 8:
        return data.view(torch.int8 if codec.signed else torch.uint8).float()
    count = 8 // math.gcd(codec.bits, 8)
    size = count * codec.bits // 8
    groups = data.view(*data.shape[:-1], -1, size).to(torch.int32 if size < 4 else torch.int64)
    words = groups[..., 0]
    for byte in range(1, size):
        words = words | (groups[..., byte] << (8 * byte))
    shifts = torch.arange(0, count * codec.bits, codec.bits, device=data.device)
    codes = (words[..., None] >> shifts) & ((1 << codec.bits) - 1)
    half = 1 << (codec.bits - 1)
    return (((codes ^ half) - half) if codec.signed else codes).flatten(-2).float()


def _levels(part: Any, record: Any) -> Any:
    """FP32 scales or biases (N, blocks, 1)."""
    if record is None:
        return part.float()[..., None]
    both = part.view(len(part), -1, record.nbytes)
    coarse = both[..., :2].contiguous().view(torch.float16).float()
    fine = _numbers(both[..., 2:].contiguous(), record.levels[1].codec)
    return (coarse * fine).flatten(1)[..., None]


# ------------------------------------------------------------------------------------------------ times


def decoding(copies: list[ScaledTensor], bf16: list[Any], samples: int) -> dict[str, Any]:
    """The times of `dequantize` to BF16."""
    device, expected = copies[0].data.device.type, reference.dequantize(copies[0]).bfloat16()

    def checked(arm: str, found: Any) -> None:
        if arm != COPY and not torch.equal(found, expected):
            raise ValueError("the values are wrong")

    arms = Arms(device, checked)
    arms.add({OURS: lambda: rotating(lambda st: breccia.dequantize(st, out_dtype="bfloat16"), copies)}, graphed)
    arms.add({COPY: lambda: rotating(torch.clone, bf16), PLAIN: lambda: rotating(plain, copies)}, graphed)
    sampled(arms.timers.values(), samples)
    kernel = breccia.explain("dequantize", copies[0], out_dtype="bfloat16").running
    return {"m": 0, "kernel": kernel, **arms.times()}


def product(m: int, copies: list[ScaledTensor], bf16: list[Any], samples: int) -> dict[str, Any]:
    """The times of products of m rows of BF16."""
    x = torch.randn(m, copies[0].shape[1], device=bf16[0].device, dtype=torch.bfloat16)
    row = Products(x, [reference.dequantize(copies[0]).double()], [m])
    row.add(OURS, lambda w: breccia.matmul(x, w, torch.bfloat16, out=row.y), [st.mT for st in copies])
    row.add(BF16, lambda w: torch.mm(x, w, out=row.y), [w.mT for w in bf16])
    row.add(PLAIN, lambda st: torch.mm(x, plain(st).mT, out=row.y), copies)
    kernel = breccia.explain("matmul", x, copies[0].mT, out_dtype=torch.bfloat16).running
    return {"m": m, "kernel": kernel, **row.measures(samples)}


@command
def coded(
    formats: Annotated[list[str] | None, typer.Option(help=f"Weights: {', '.join(FORMATS)}; repeatable. Default: all.")] = None,
    shape: Annotated[str, typer.Option(help="Shape of weights, NxK.")] = "4096x4096",
    rows: Annotated[list[int] | None, typer.Option(help="Rows of activations, M; repeatable. Default: 1 and 16.")] = None,
    compared: Annotated[int, typer.Option(help="Compare so many formats' bits, at most.")] = len(COMPARED),
    samples: Annotated[int, typer.Option(min=1, help="Samples of each arm.")] = 7,
    seconds: Seconds = 100.0,
    device: Device = "cuda",
) -> Iterator[Result]:
    """Compare bits of `dequantize`, then time it and products of BF16 activations."""
    check_device(device)
    chosen, (n, k), counts = known(formats, FORMATS, "--formats"), sizes(shape), rows or list(ROWS)
    start, run = time.perf_counter(), where(device)
    cases = [(spec, each) for spec in COMPARED[:compared] for each in SHAPES]
    done, unlike = 0, dict[str, str]()
    for spec, (a, b) in progress(cases, "bits"):
        if time.perf_counter() < start + seconds / 2:  # the rest of the time is for the times
            done += 1
            if how := difference(spec, (a, b), device):
                unlike[f"{spec} {a}x{b}"] = how
    found: list[dict[str, Any]] = []

    def result() -> Result:
        wrong = {f"{row['format']} {row['m']}": row["errors"] for row in found if "errors" in row} | unlike
        options = {"shape": (n, k), "rows": counts, "samples": samples}
        failed = {"failed": f"wrong or raised: {wrong}"} if wrong else {}
        return BENCHMARK.result(found, options, run, compared=done, different=unlike, **failed)

    for name in progress(chosen, "weights"):
        torch.manual_seed(0)
        numbers = torch.randn(n, k, device=device, dtype=torch.bfloat16) * 0.02
        st = breccia.cast(numbers, FORMATS[name])
        copies = [st, *(copy_of(st) for _ in range(beyond_cache(st.nbytes, device) - 1))]
        bf16 = [numbers, *(numbers.clone() for _ in range(beyond_cache(numbers.nbytes, device) - 1))]
        for m in (0, *counts):
            if time.perf_counter() < start + seconds:
                made = product(m, copies, bf16, samples) if m else decoding(copies, bf16, samples)
                found.append({"format": name, **made})
                yield result()
    yield result()
