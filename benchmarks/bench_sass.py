"""Instructions of kernels, counted in their machine code: no GPU needed.

`casts`: for each number; prologues and rare branches count as if they ran. `weights`: of products of up to 8 rows, for each 8
codes that a thread decodes, between the first and the last product of the loop, with the configuration of an H200 for a weight
of 8192 x 8192. A multiprocessor issues 128 lanes per clock; integer and comparison instructions take two of these slots
(`alu`), and pass beside FP32 ones, so the larger of `issue` and `alu` bounds the rate.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_weight_only import FORMATS
from harness import Benchmark, Recipes, Result, Table, command, provenance, run, sides, table

import breccia

#: Classes of instructions, with their opcodes: the first that matches.
CLASSES = (
    ("fp32", r"(FADD|FMUL|FFMA|FSWZADD|MOV32I)$"),
    ("imad", r"IMAD$"),
    ("fp16", r"(HADD2|HMUL2|HFMA2|HADD2_32|HFMA2_32)$"),
    ("convert", r"(F2F|F2I|I2F|MUFU|FRND|POPC|FLO|BREV)$"),
    ("shared", r"(LDS|STS|LDSM|STSM|ATOMS|SHFL|MOVM|R2UR|VOTE|VOTEU|BAR|REDUX|MATCH)$"),
    ("global", r"(LDG|STG|LD|ST|LDC|ATOM|ATOMG|RED)$"),
    ("control", r"(BRA|EXIT|NOP|BSSY|BSYNC|WARPSYNC|DEPBAR|CALL|RET|BREAK|S2R|S2UR|CS2R|YIELD|ERRBAR|MEMBAR|CCTL)$"),
    ("uniform", r"(U[A-Z0-9]+)$"),
    ("integer", r".*"),
)
#: Casts that instructions may bound, and others for comparison.
CASTS = (
    ("cast", -1, ("fp8_block", "mxfp8", "mxfp4", "int4", "nvfp4,two_level=false", "mxfp6", "mxint8", "nf4")),
    ("cast", -2, ("fp8_block", "fp8_row", "mxfp4", "nvfp4", "int4", "mxfp6", "nf4")),
    ("cast_pair", -1, ("fp8_block", "fp8_block,block_m=128", "mxfp8", "mxint8")),
    ("cast_ste", -1, ("fp8_block", "int4,symmetric=false,signed=false")),
)
SHAPE, CAPABILITY = (16384, 8192), 90
#: Of products by weights: rows, sides of the weight, codes that a thread decodes for one operand.
ROWS, SIDE, CODES = 1, 8192, 8
#: Columns of the table of products with their classes: shifts and logic, packed arithmetic on two numbers, FP32, shared memory.
COLUMNS = {"integer": ("integer", "imad"), "packed": ("fp16",), "fp32": ("fp32",), "shared": ("shared",)}
#: Multiprocessors of an H200, and their highest clock in Hz (data sheet).
DEVICE, MULTIPROCESSORS, CLOCK = "NVIDIA H200", 132, 1.98e9


def of_casts(result: Result) -> Table:
    columns = {
        "op": lambda row: row["op"] + ("-axis-2" if row["axis"] == -2 else ""),
        "recipe": "recipe",
        "kernel": "kernel",
        "instructions for each number": lambda row: f"{row['issue']:.1f}",
        "slots of the integer pipe": lambda row: f"{row['alu']:.1f}",
        "registers": "registers",
    }
    note = (
        f"{sides(result['options']['shape'])} BF16, compiled for compute capability "
        f"{result['options']['capability'] / 10:.1f}. A multiprocessor issues instructions for 128 threads per clock; an "
        "integer instruction takes two of the 128 slots of its pipe. The larger of the two numbers bounds the rate. Passes for "
        "an amax are left out."
    )
    return table("instructions of casts", columns, result["rows"], note)


def of_weights(result: Result) -> Table:
    headings = {"integer": "integer", "packed": "packed", "FP32": "fp32", "shared memory": "shared", "all": "all"}
    columns: dict[str, Any] = {"weight": "format"}
    columns |= {head: (lambda row, key=key: f"{row['instructions'][key]:.1f}") for head, key in headings.items()}
    note = (
        "Instructions between the first and the last product in the unrolled loop of `weight_only_small.cu` (up to 8 rows), "
        "per 8 codes of a thread. Packed: arithmetic on two 16-bit numbers. The last column is the least time to issue them "
        "for a weight of 8192 × 8192 on an H200 at its highest clock. A multiprocessor has 128 slots per clock, and an integer "
        "instruction takes two."
    )
    columns["µs, M = 1"] = lambda row: f"{row['seconds'] * 1e6:.1f}"
    return table("instructions of a word of codes", columns, result["rows"], note)


CAST_BENCHMARK = Benchmark("gpu-casts-sass", {"gpu-casts-sass": of_casts})
WEIGHT_BENCHMARK = Benchmark("weight-only-sass", {"weight-only-sass": of_weights})


def tool_on(cubin: bytes, tool: str, *options: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


def disassembled(cubin: bytes) -> list[str]:
    text = tool_on(cubin, "nvdisasm", "-c")
    found = re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*[.\w]*)[^;]*;", text)
    end = len(found)
    while end and found[end - 1] in ("NOP", "BRA"):
        end -= 1
    return found[:end]


def classified(opcodes: list[str]) -> Counter[str]:
    return Counter(next(kind for kind, known in CLASSES if re.match(known, opcode.split(".")[0])) for opcode in opcodes)


def compiled(op: str, spec: str, axis: int) -> Iterator[tuple[Any, Any, int]]:
    """(compiled kernel, tile, warps) of each pass of a cast of BF16."""
    from triton.backends.compiler import GPUTarget

    from breccia_torch.ops import TORCH
    from breccia_triton.casts.prepare import Options, Prepared
    from breccia_triton.facts import Array, Hardware
    from breccia_triton.launch.launcher import Launcher

    recipe = breccia.recipe(spec)
    given, hardware = Array.dense(SHAPE, "bfloat16"), Hardware(True, CAPABILITY >= 89)
    made = Prepared(op, recipe, given, axis, Options(), TORCH.dtypes(recipe.format), hardware, turns=True)
    target = GPUTarget("cuda", CAPABILITY, 32)
    for each in (*(each.launch for each in made.passes.values()), made.launch):
        if each is not None:
            yield Launcher(each, target).compiled, each.constants.get("L") or each.constants["G"], each.warps


def counted_cast(op: str, spec: str, axis: int) -> Iterator[dict[str, Any]]:
    """A row for each kernel of a cast, except kernels that only find an amax."""
    for kernel, tile, warps in compiled(op, spec, axis):
        if kernel.metadata.name == "amax_kernel":
            continue
        each = getattr(tile, "lane", 0) * getattr(tile, "each", 1) * getattr(tile, "steps", 1)
        rows, columns = (
            getattr(tile, long, getattr(tile, short, 0)) for long, short in (("rows", "tall"), ("columns", "wide"))
        )
        elements = each or rows * columns / (32 * warps)
        opcodes = disassembled(kernel.asm["cubin"])
        registers = re.search(r"REG:(\d+)", tool_on(kernel.asm["cubin"], "cuobjdump", "-res-usage"))
        alu, issue = 2 * classified(opcodes)["integer"] / elements, len(opcodes) / elements
        numbers = {"issue": round(issue, 3), "alu": round(alu, 3), "registers": int(registers[1]) if registers else None}
        yield {"op": op, "recipe": spec, "axis": axis, "kernel": kernel.metadata.name, **numbers}


def counted_weight(name: str) -> dict[str, Any]:
    from breccia_triton.gemm.weight_only import matmul as weight_only
    from breccia_triton.gemm.weight_only import plans as weight_plans
    from breccia_triton.launch import compiler
    from breccia_triton.tuning.choices import codecs_of

    recipe = breccia.recipe(FORMATS[name])
    operand: Any = weight_plans.weight_format_of(recipe.format, recipe.layout.block(-1))
    found = weight_plans.config_of(operand, codecs_of(recipe.format), ROWS, SIDE, SIDE, DEVICE, direct=True)
    assert isinstance(found, weight_plans.Config) and not found.wide, found
    macros = weight_plans.macros_of(operand, found, "bfloat16", "bfloat16", None)
    opcodes = disassembled(compiler.cubin(weight_only.source_of(found), "sm_90a", macros, compiler.nvrtc()))
    products = [i for i, opcode in enumerate(opcodes) if opcode.startswith("HMMA")]
    loop = opcodes[products[0] : products[-1] + 1]
    operands = len(products) * 8 / found.batch  # each is multiplied by 8 rows of x at a time
    kinds = classified([opcode for opcode in loop if not opcode.startswith("HMMA")])
    each = {column: sum(kinds[kind] for kind in of) / operands for column, of in COLUMNS.items()}
    every = len(loop) / operands
    slots = max(every, 2 * kinds["integer"] / operands)
    seconds = slots * SIDE * SIDE / CODES / (128 * MULTIPROCESSORS * CLOCK)
    counts = {key: round(value, 3) for key, value in {**each, "all": every}.items()}
    return {"format": name, "config": weight_plans.entry_of(found), "instructions": counts, "seconds": round(seconds, 10)}


@command
def casts(recipes: Recipes = None) -> Result:
    """Count the instructions of casts."""
    every = [(op, spec, axis) for op, axis, specs in CASTS for spec in specs if not recipes or spec in recipes]
    rows = [row for case in every for row in counted_cast(*case)]
    return CAST_BENCHMARK.result(rows, {"capability": CAPABILITY, "shape": SHAPE}, provenance(["torch", "triton"]))


@command
def weights() -> Result:
    """Count the instructions of products by each format of weights."""
    run = provenance(device=f"compiled for sm_90a, rates of an {DEVICE.removeprefix('NVIDIA ')}")
    return WEIGHT_BENCHMARK.result([counted_weight(name) for name in FORMATS], run=run)


if __name__ == "__main__":
    run(casts=casts, weights=weights)
