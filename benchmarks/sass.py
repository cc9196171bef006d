"""Instructions of a cast kernel for each element, counted in its machine code: no GPU needed.

    python benchmarks/sass.py nvfp4 mxfp4 --dtype bfloat16 --axis -1
    python benchmarks/sass.py --table [--out RESULTS]

A multiprocessor issues 128 lanes a clock; integer and comparison instructions take two slots of these 128 (`alu`), and pass
beside FP32 ones, so that the larger of `issue` and `alu` bounds the rate. `weighted` adds up all, as if nothing overlapped.
Counts are of the whole kernel divided by the elements of a thread: prologues and rare branches count as if they ran.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import common
import torch
import triton
from triton.backends.compiler import GPUTarget

import breccia
from breccia.backend import CastOptions, components, reference
from breccia_torch.ops import TORCH
from breccia_triton.facts import Array, Codes, Hardware, Operand
from breccia_triton.launch import Launcher
from breccia_triton.plans import readable
from breccia_triton.prepare import Launch, Options, Prepared, decoding, needed

#: (class, slots, opcodes): the first that matches.
CLASSES = (
    ("fp32", 1, r"(FADD|FMUL|FFMA|FSWZADD|MOV32I)$"),
    ("imad", 2, r"IMAD$"),
    ("fp16", 1, r"(HADD2|HMUL2|HFMA2|HADD2_32|HFMA2_32)$"),
    ("convert", 8, r"(F2F|F2I|I2F|MUFU|FRND|POPC|FLO|BREV)$"),
    ("shared", 8, r"(LDS|STS|LDSM|STSM|ATOMS|SHFL|MOVM|R2UR|VOTE|VOTEU|BAR|REDUX|MATCH)$"),
    ("global", 8, r"(LDG|STG|LD|ST|LDC|ATOM|ATOMG|RED)$"),
    ("control", 1, r"(BRA|EXIT|NOP|BSSY|BSYNC|WARPSYNC|DEPBAR|CALL|RET|BREAK|S2R|S2UR|CS2R|YIELD|ERRBAR|MEMBAR|CCTL)$"),
    ("uniform", 0, r"(U[A-Z0-9]+)$"),
    ("integer", 2, r".*"),
)


def disassembled(cubin: bytes) -> list[str]:
    """The opcodes of a kernel in their order."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*[.\w]*)[^;]*;", text)
    end = len(found)
    while end and found[end - 1] in ("NOP", "BRA"):
        end -= 1
    return found[:end]


def compiled(
    op: str, spec: str, dtype: torch.dtype, axis: int, shape: tuple[int, int], capability: int
) -> list[tuple[Any, Any, int]]:
    """(compiled kernel, tile, warps) of `dequantize`, or of each pass of a cast."""
    recipe, hardware = breccia.recipe(spec), Hardware(True, capability >= 89)
    given, dtypes = Array.dense(shape, str(dtype).removeprefix("torch.")), TORCH.dtypes(recipe.format)
    launches: list[Launch | None]
    if op == "dequantize":
        st = reference.cast(torch.zeros(shape, dtype=dtype, device="meta"), recipe, CastOptions(axis=axis))
        parts: dict[str, Operand | None] = {
            name: Operand(tuple(part.shape), dtypes[name]) for name, part in components(st).items()
        }
        codes = Codes(st, needed(readable(recipe, st.layout)), parts, dtypes, hardware, True)
        launches = [decoding(codes, given.dtype)]
    else:
        made = Prepared(op, recipe, given, axis, Options(), dtypes, hardware)
        launches = [*(each.launch for each in made.passes.values()), made.launch]
    target = GPUTarget("cuda", capability, 32)
    return [
        (Launcher(each, target).compiled, each.constants.get("L") or each.constants["G"], each.warps)
        for each in launches
        if each is not None
    ]


#: Rows of `--table`: casts that instructions may bound, and others for comparison.
TABLE = (
    ("cast", -1, ("fp8_block", "mxfp8", "mxfp4", "int4", "nvfp4,two_level=false", "mxfp6", "mxint8", "nf4")),
    ("cast", -2, ("fp8_block", "fp8_row", "mxfp4", "nvfp4", "int4", "mxfp6", "nf4")),
    ("cast_pair", -1, ("fp8_block", "fp8_block,block_m=128", "mxfp8", "mxint8")),
    ("cast_ste", -1, ("fp8_block", "int4,symmetric=false,signed=false")),
)


def report(
    op: str, spec: str, dtype: torch.dtype, axis: int, shape: tuple[int, int], capability: int, opcodes: int
) -> list[dict[str, Any]]:
    """Print a line for each kernel of a cast, except kernels that only find an amax, and return their numbers."""
    found: list[dict[str, Any]] = []
    for kernel, tile, warps in compiled(op, spec, dtype, axis, shape, capability):
        if kernel.metadata.name == "amax_kernel":
            continue
        elements = getattr(tile, "lane", 0) * getattr(tile, "each", 1) * getattr(
            tile, "steps", 1
        ) or tile.rows * tile.columns / (32 * warps)
        count: Counter[str] = Counter()
        each: Counter[str] = Counter()
        slots = 0.0
        names = disassembled(kernel.asm["cubin"])
        for name in names:
            kind, cost, _ = next(c for c in CLASSES if re.match(c[2], name.split(".")[0]))
            count[kind] += 1
            each[name] += cost
            slots += cost
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
            usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        registers = re.search(r"REG:(\d+)", usage)
        stack = re.search(r"STACK:(\d+)", usage)
        alu, issue = 2 * count["integer"] / elements, len(names) / elements
        print(
            f"{spec:24s} {str(dtype)[6:]:9s}{axis:3d}  weighted {slots / elements:6.2f}  alu {alu:6.2f}  issue {issue:6.2f}",
            end="",
        )
        print(f"  each {elements:3.0f} x {32 * warps} threads  registers {registers and registers[1]}", end="")
        print(f"  spilled {stack and stack[1]}  shared {kernel.metadata.shared}  ", end="")
        print(*(f"{kind}:{count[kind]}" for kind, _, _ in CLASSES if count[kind]))
        numbers = {"issue": round(issue, 3), "alu": round(alu, 3), "registers": int(registers[1]) if registers else None}
        found.append({"op": op, "recipe": spec, "axis": axis, "kernel": kernel.metadata.name, **numbers})
        if opcodes:
            total = sum(each.values())
            for name, cost in each.most_common(opcodes):
                print(f"    {name:24s} {cost / elements:6.2f}  {100 * cost / total:4.1f}%")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", help="recipes to count, by spec")
    parser.add_argument("--table", action="store_true", help="count the kernels of TABLE")
    parser.add_argument("--out", type=Path, help="folder for the JSON result of --table")
    parser.add_argument("--op", default="cast", help="cast, cast_pair, cast_ste or dequantize")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--axis", nargs="+", type=int, default=[-1, -2])
    parser.add_argument("--shape", nargs=2, type=int, default=(16384, 8192))
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--opcodes", type=int, default=0, help="print this many opcodes")
    a = parser.parse_args()
    if bool(a.specs) == a.table or (a.out and not a.table):
        parser.error("give recipes or --table; --out goes with --table only")
    if a.table:
        rows = [
            row
            for op, axis, specs in TABLE
            for spec in specs
            for row in report(op, spec, torch.bfloat16, axis, tuple(a.shape), a.capability, 0)
        ]
        where = common.provenance()
        where["versions"] |= {"torch": torch.__version__, "triton": triton.__version__}
        result = {"benchmark": "gpu-casts-sass", "schema": common.SCHEMA, "provenance": where}
        result |= {"options": {"capability": a.capability, "shape": a.shape}, "rows": rows}
        if a.out:
            common.save(result, a.out, f"sm{a.capability}")
        return
    for spec in a.specs:
        for dtype in a.dtype:
            for axis in a.axis:
                report(a.op, spec, getattr(torch, dtype), axis, tuple(a.shape), a.capability, a.opcodes)


if __name__ == "__main__":
    main()
