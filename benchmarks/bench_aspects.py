"""Time of casts, of their inverse, and of products over all aspect ratios, compared with the obvious way in two lines.

An array has as many elements at every ratio, from a row to a column, and as a stack of small matrices. The obvious way to cast
or decode along an axis is to do so along the other one of a transposed copy, or by the generic algorithm, whichever is faster.
Codes of a byte are also decoded by a conversion of all at once, times scales that are repeated over their blocks. The obvious
way to multiply many matrices is to decode them and multiply the values, in one call for batches and one by one for groups of
rows. No case may take more than LIMIT times as long. `BRECCIA_BLOCK=native` leaves the compiled kernels out.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import typer
from harness import Benchmark, Call, Recipes, Result, Table, known, normal, program, progress, rows_of, table, three, trio
from harness.tables import ratio, sides

import breccia

FRAMEWORKS = ("numpy", "torch")
RECIPES = (
    *("fp8_current", "fp8_row", "fp8_block", "fp8_block,block_m=128", "mxfp8", "mxfp6"),
    *("mxfp4", "nvfp4", "int4", "int8", "nf4"),
)
#: Shapes of the small matrices of stacks.
SMALL = ((1, 1), (2, 3), (3, 2), (1, 8), (8, 1), (17, 33), (3, 130), (130, 3), (130, 100), (100, 130))
#: The most that a case may take, in times of the obvious way, and how many of the worst cases are shown.
LIMIT, SHOWN = 3.0, 20
KEYS = ("min_s", "median_s", "max_s")
#: Products: rows of activations, rows of each matrix, and K.
MATRICES = ((1, 32, 64), (32, 32, 64), (1, 256, 256), (16, 128, 128))
#: Where a case is compared with the generic algorithm too, which takes long and much memory.
EXTREME = 16


def worst(result: Result) -> Table:
    rows = sorted(result["rows"], key=lambda row: -row["ratio"])
    columns = {
        "case": lambda row: f"{row['op']}, {row['shape']}, {row['recipe']}, {row['framework']}",
        "breccia": lambda row: spread(row, "breccia"),
        "the obvious way": lambda row: spread(row, row["against"]),
        "which": "against",
        "ratio": lambda row: ratio(row["ratio"]),
    }
    options = result["options"]
    blocked = f", without {options['blocked']}" if options["blocked"] else ""
    note = (
        f"The {min(SHOWN, len(rows))} worst of the worst cases of each op and recipe. Of all {options['cases']} cases, "
        f"{options['above']} are above {three(options['limit'])}. Milliseconds: min / median / max of {options['runs']} "
        f"interleaved runs or more; the ratio is of minima. Arrays of 2^{options['bits']} elements; products are of matrices × "
        f"rows × N × K. {options['threads']} threads{blocked}."
    )
    return table("aspect ratios", columns, rows[:SHOWN], note)


def spread(row: Any, arm: str) -> str:
    return trio((row["time"][arm][key] for key in KEYS), 1e3)


BENCHMARK = Benchmark("aspects", {"aspects": worst})


def array(framework: str, shape: tuple[int, ...]) -> Any:
    x = normal(shape, 0)
    return x if framework == "numpy" else __import__("torch").from_numpy(x)


def turned(x: Any) -> Any:
    """A transposed copy."""
    return np.ascontiguousarray(x.swapaxes(-1, -2)) if isinstance(x, np.ndarray) else x.mT.contiguous()


def converted(st: Any) -> Call | None:
    """Decodes by a conversion of all codes, times scales repeated over blocks; None unless codes are bytes and scales FP32."""
    if st.axis == -2:
        values: Any = converted(st.mT)
        return None if values is None else lambda: values().swapaxes(-1, -2)
    fmt, block, numpy = st.recipe.format, st.layout.block(), isinstance(st.data, np.ndarray)
    if fmt.element.bits != 8 or fmt.scale.codec.bits != 32 or fmt.offset != "none":
        return None
    table = np.array(fmt.element.table, np.uint32).view(np.float32)
    along = [axis for axis in (-2, -1) if st.scale.ndim == st.ndim and st.scale.shape[axis] > 1]  # one scale is broadcast

    def repeated() -> Any:
        values, scale = (table[st.data.view(np.uint8)] if numpy else st.data.float()), st.scale
        for axis in along:
            scale = scale.repeat(block[axis], axis=axis) if numpy else scale.repeat_interleave(block[axis], axis)
            scale = scale[..., : st.shape[-2], :] if axis == -2 else scale[..., : st.shape[-1]]
        return values * scale

    return repeated


def casts(framework: str, recipe: Any, shape: tuple[int, ...]) -> Iterator[tuple[str, dict[str, Call]]]:
    """(op, arms) of a cast along both axes, of its inverse, and of both casts at once."""
    x, copy = array(framework, shape), turned(array(framework, shape))
    extreme = len(shape) > 2 or max(shape) >= EXTREME * EXTREME * min(shape)
    for axis, other in ((-1, -2), (-2, -1)):
        st, of_copy = breccia.cast(x, recipe, axis=axis), breccia.cast(copy, recipe, axis=other)
        arms: dict[str, Call] = {
            "breccia": lambda axis=axis: breccia.cast(x, recipe, axis=axis),
            "transposed": lambda other=other: breccia.cast(turned(x), recipe, axis=other).mT,
        }
        back: dict[str, Call] = {
            "breccia": lambda st=st: breccia.dequantize(st),
            "transposed": lambda st=of_copy: turned(breccia.dequantize(st)),
        }
        if (at_once := converted(st)) is not None:
            back["converted"] = at_once
        if extreme:
            arms["generic"] = lambda axis=axis: breccia.cast(x, recipe, axis=axis, prefer="reference.cast")
            back["generic"] = lambda st=st: breccia.dequantize(st, prefer="reference.dequantize")
        yield f"cast along {axis}", arms
        yield f"dequantize along {axis}", back
    both: dict[str, Call] = {
        "breccia": lambda: breccia.cast_pair(x, recipe),
        "transposed": lambda: (breccia.cast(turned(x), recipe, axis=-2).mT, breccia.cast(turned(x), recipe).mT),
    }
    yield "cast_pair", both


def products(framework: str, recipe: Any, count: int, size: tuple[int, int, int]) -> Iterator[tuple[str, dict[str, Call]]]:
    """(op, arms) of products of as many matrices: as a batch, and of groups of rows, of all matrices and of the first eight."""
    m, n, k = size
    x, w = array(framework, (count, m, k)), breccia.cast(array(framework, (count, n, k)), recipe).mT
    yield "matmul", {"breccia": lambda: breccia.matmul(x, w), "decoded": lambda: x @ breccia.dequantize(w)}
    for op, active in (("grouped_matmul", count), ("grouped_matmul of 8", min(count, 8))):
        rows = x.reshape(-1, k)[: active * m]
        ends = np.minimum(np.arange(1, count + 1), active).astype(np.int32) * np.int32(m)
        offsets = ends if framework == "numpy" else __import__("torch").from_numpy(ends)

        def one_by_one(rows: Any = rows, active: int = active) -> list[Any]:
            return [rows[i * m : (i + 1) * m] @ breccia.dequantize(w[i]) for i in range(active)]

        yield op, {"breccia": lambda x=rows, ends=offsets: breccia.grouped_matmul(x, w, ends), "decoded": one_by_one}


def cases(framework: str, recipe: Any, bits: int, step: int) -> Iterator[tuple[dict[str, Any], dict[str, Call]]]:
    """(fields, arms) of every case of a recipe, one after the other, so that few arrays exist at a time."""
    shapes: list[tuple[int, ...]] = [(1 << log, 1 << (bits - log)) for log in range(0, bits + 1, step)]
    shapes += [((1 << bits) // (rows * columns), rows, columns) for rows, columns in SMALL if rows * columns <= 1 << bits]
    for shape in shapes:
        for op, arms in casts(framework, recipe, shape):
            yield {"op": op, "shape": sides(shape)}, arms
    for size in MATRICES:
        for log in range(0, bits - 9, step):
            if (count := 1 << log) * size[1] * size[2] <= 1 << (bits + 2):
                for op, arms in products(framework, recipe, count, size):
                    yield {"op": op, "shape": sides((count, *size))}, arms


def measured(fields: dict[str, Any], arms: dict[str, Call], runs: int) -> dict[str, Any]:
    """A row; a case above the limit is measured again, for longer, as another process may have disturbed it."""
    for repeats in (1, 5):
        (row,) = rows_of([(fields, arms)], runs * repeats)
        least = {arm: found["min_s"] for arm, found in row["time"].items()}
        against = min((arm for arm in least if arm != "breccia"), key=least.__getitem__)
        row |= {"against": against, "ratio": round(least["breccia"] / least[against], 3)}
        if row["ratio"] <= LIMIT:
            break
    times = {arm: {key: found[key] for key in KEYS} for arm, found in row["time"].items()}
    return {**row, "time": times}


@program
def main(
    bits: Annotated[int, typer.Option(min=10, help="Arrays have 2 to the power of so many elements.")] = 20,
    step: Annotated[int, typer.Option(min=1, help="Powers of two between the lengths of two cases.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Interleaved runs of each arm.")] = 3,
    frameworks: Annotated[list[str] | None, typer.Option(help="Frameworks; repeat for several. Default: all.")] = None,
    limit: Annotated[float, typer.Option(help="Fail above so many times the obvious way.")] = LIMIT,
    recipes: Recipes = None,
) -> Result:
    """Time casts and products over all aspect ratios, and of stacks of small matrices."""
    worst_of, count = dict[Any, dict[str, Any]](), Counter[bool]()
    for framework in known(frameworks, FRAMEWORKS, "--frameworks"):
        for spec in progress(recipes or RECIPES, framework):
            recipe = breccia.recipe(spec)
            for fields, arms in cases(framework, recipe, bits, step):
                row = measured({"framework": framework, "recipe": spec, **fields}, arms, runs)
                count[row["ratio"] > limit] += 1
                group = framework, spec, row["op"]
                worst_of[group] = max(row, worst_of.get(group, row), key=lambda one: one["ratio"])
    options = {"bits": bits, "step": step, "runs": runs, "cases": count.total(), "above": count[True], "limit": limit}
    options |= {"threads": breccia.get_num_threads(), "blocked": os.environ.get("BRECCIA_BLOCK", "")}
    failed = f"{count[True]} of {count.total()} cases take more than {three(limit)} times the obvious way."
    return BENCHMARK.result(list(worst_of.values()), options, failed=failed if count[True] else "")
