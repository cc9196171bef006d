"""Instructions that products of quantized weights spend on each word of codes, counted in their machine code: no GPU needed.

    python benchmarks/weight_sass.py [--out RESULTS]

The kernels are those for up to 8 rows, with the configuration of an H200 for a weight of 8192 x 8192. A thread decodes 8 codes
for one operand of the tensor core: one word of 4-bit codes, or two words of 8-bit codes. The count covers the instructions
between the first and the last product of the unrolled loop. As in sass.py, a multiprocessor issues 128 lanes per clock, and
integer instructions take two of these slots. Conversions and branches count in `all` only.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import common
import sass
import tables
import typer
from weight_arms import FORMATS

#: Rows of activations, and rows and columns of the weight.
ROWS, SIDE = 1, 8192
#: Codes that a thread decodes for one operand.
CODES = 8
#: Columns of the table with their classes in sass.py: shifts and logic, packed arithmetic on two numbers, FP32, shared memory.
CLASSES = {"integer": ("integer", "imad"), "packed": ("fp16",), "fp32": ("fp32",), "shared": ("shared",)}


@dataclass(frozen=True)
class Device:
    """Multiprocessors, and their highest clock in Hz (data sheet)."""

    name: str
    multiprocessors: int
    clock: float


H200 = Device("NVIDIA H200", 132, 1.98e9)


def counted(name: str) -> dict[str, Any]:
    """The row of a format."""
    import breccia
    from breccia_triton import weight_only, weight_plans
    from breccia_triton.choices import codecs_of
    from breccia_triton.cuda import compiler

    recipe = breccia.recipe(FORMATS[name])
    operand: Any = weight_plans.operand_of(recipe.format, recipe.layout.block(-1))
    found = weight_plans.config_of(operand, codecs_of(recipe.format), ROWS, SIDE, SIDE, H200.name, direct=True)
    assert isinstance(found, weight_plans.Config) and not found.wide, found
    macros = weight_plans.macros_of(operand, found, "bfloat16", "bfloat16", None)
    opcodes = sass.disassembled(compiler.cubin(weight_only.source_of(found), "sm_90a", macros, compiler.nvrtc()))
    products = [i for i, opcode in enumerate(opcodes) if opcode.startswith("HMMA")]
    loop = opcodes[products[0] : products[-1] + 1]
    operands = len(products) * 8 / found.batch  # each is multiplied by 8 rows of x at a time
    others = [opcode.split(".")[0] for opcode in loop if not opcode.startswith("HMMA")]
    kinds = Counter(next(kind for kind, _, known in sass.CLASSES if re.match(known, opcode)) for opcode in others)
    each = {column: sum(kinds[kind] for kind in of) / operands for column, of in CLASSES.items()}
    every = len(loop) / operands
    slots = max(every, 2 * kinds["integer"] / operands)
    seconds = slots * SIDE * SIDE / CODES / (128 * H200.multiprocessors * H200.clock)
    counts = {key: round(value, 3) for key, value in {**each, "all": every}.items()}
    return {"format": name, "config": weight_plans.entry_of(found), "instructions": counts, "seconds": round(seconds, 10)}


def main(out: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None) -> None:
    """Count the instructions of products by each format."""
    provenance = common.provenance() | {"device": f"compiled for sm_90a, rates of an {H200.name.removeprefix('NVIDIA ')}"}
    rows = [counted(name) for name in FORMATS]
    result = {"benchmark": "weight-only-sass", "schema": common.SCHEMA, "provenance": provenance, "rows": rows}
    tables.tell(result, out, False)


if __name__ == "__main__":
    typer.run(main)
