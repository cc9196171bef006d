"""What pages with a program of their own are fed with, as blocks of JSON: codecs, and the figures of the decision helper.

The codecs are those of the golden vectors. Figures are of benchmarks/results, and of docs/engines.json.
"""

from __future__ import annotations

import json
import math
import statistics
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from cards import ENGINES, options, record
from harness.blocks import table

import breccia
from breccia.cli.recipes import bits_per_value
from breccia.dispatch.registry import registry

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT / "docs" / "spec" / "vectors"


def embedded(name: str, data: Any) -> str:
    """JSON in a page, for the program that looks for this id."""
    return f'<script type="application/json" id="{name}">{json.dumps(data, separators=(",", ":"))}</script>\n'


# ---------------------------------------------------------------------------------------------------- codecs


def codecs() -> str:
    """Every codec of the golden vectors of at most 16 bits, once: up to 8 bits with the value of each code."""
    found: dict[str, Any] = {}
    for folder in sorted(VECTORS.iterdir()):
        binary = (folder / "vectors.bin").read_bytes()
        for codec in json.loads((folder / "index.json").read_text(encoding="utf-8"))["codecs"]:
            if codec["bits"] <= 16 and codec["name"] in registry().declared["breccia_codecs"]:
                found.setdefault(codec["name"], declared(codec, binary))
    order = sorted(found.values(), key=lambda codec: (codec["kind"] != "float", -codec["bits"], codec["name"]))
    return embedded("codecs", order)


def declared(codec: Any, binary: bytes) -> Any:
    kept = {key: codec.get(key) for key in ("name", "bits", "kind", "nan")}
    if "values" not in codec:
        return kept | {"mantissa_bits": codec["mantissa_bits"], "bias": codec["bias"]}
    at, size = codec["values"]
    return kept | {"values": [written(value) for (value,) in struct.iter_unpack("<f", binary[at : at + size])]}


def written(value: float) -> float | str | None:
    """JSON for a number: null is NaN."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return (
        "-0"
        if value == 0 and math.copysign(1, value) < 0
        else int(value)
        if value.is_integer() and abs(value) < 2**53
        else value
    )


# ---------------------------------------------------------------------------------------------------- the decision helper

#: What the helper chooses among: specs of the accuracy benchmark, by the formats of the benchmark of products.
SPECS = {
    "int8": "int8", "fp8_row": None, "fp8_block,block_m=128": "fp8", "mxfp8": "mxfp8", "mxfp6": None,
    "int4,group_size=32,signed=false,symmetric=false": None, "nvfp4": "nvfp4", "nf4": None, "int4,group_size=32": "int4-32",
    "mxfp4": "mxfp4", "int4": "int4",
}  # fmt: skip
#: Rows of activations of text that is generated, and of large batches, in that benchmark.
FEW, MANY = (1, 4, 16), (256, 512, 1024, 2048, 4096)
#: Gigabytes of memory for weights.
MEMORIES = (8, 16, 24, 48, 80, 141)
_PARAMETERS = 1 << 20


def size(spec: str) -> float:
    """Bits per parameter of a large matrix."""
    return round(bits_per_value(breccia.recipe(spec), _PARAMETERS), 4)


@cache
def errors() -> dict[str, float]:
    """By spec: SQNR in dB on the matrices of a trained encoder."""
    (path,) = (ROOT / "benchmarks" / "results").glob("accuracy-*.json")
    rows = record(path.relative_to(ROOT).as_posix())["rows"]
    return {row["recipe"]: round(row["data"]["all-MiniLM-L6-v2"]["sqnr_db"], 1) for row in rows}


def products(name: str, rows: tuple[int, ...]) -> float | None:
    """How many times faster than BF16 a product by a weight of this format is on an H200: the median over shapes."""
    found = [
        row["time"]["bf16"]["median_s"] / row["time"]["breccia"]["median_s"]
        for row in record("benchmarks/results/gpu-weight-only-nvidia-h200.json")["rows"]
        if row["format"] == name and row["m"] in rows and {"bf16", "breccia"} <= set(row.get("time", ()))
    ]
    return round(statistics.median(found), 2) if found else None


def tokens(spec: str) -> float | None:
    """How many times more tokens than under BF16 a decoder generates on two cores of an AMD EPYC."""
    rows = record("benchmarks/results/decoder-cpu-amd-epyc-x86-64-2c.json")["rows"]
    rates = {row["recipe"]: row["tokens_per_second"] for row in rows if row["batch"] == 1}
    name = spec.removesuffix(",block_m=128")
    return round(rates[name] / rates["bf16"], 2) if name in rates else None


def served(spec: str) -> dict[str, str]:
    """By engine, the options of `breccia convert` under which a model of this recipe ran in it, the first that did."""
    found: dict[str, str] = {}
    wanted = breccia.recipe(spec).format.element.name, size(spec)
    for row in record("docs/engines.json")["rows"]:
        if row["ran"] and row["recipe"] != "none":
            recipe = breccia.recipe(row["recipe"])
            if (recipe.format.element.name, size(row["recipe"])) == wanted and type(recipe) is type(breccia.recipe(spec)):
                found.setdefault(row["engine"], options(row))
    return found


def choices() -> list[dict[str, Any]]:
    """What the helper knows of each spec."""
    return [
        {
            "spec": spec, "page": breccia.recipe(spec).name, "bits": size(spec), "sqnr": errors()[spec],
            "speed": {
                "hopper": {"few": name and products(name, FEW), "many": name and products(name, MANY)},
                "cpu": {"few": tokens(spec)},
            },
            "engines": served(spec),
        }
        for spec, name in SPECS.items()
    ]  # fmt: skip


def choices_json() -> str:
    return embedded("choices", {"engines": ENGINES, "choices": choices()})


def fits() -> str:
    """By recipe: how many billion parameters fit into so much memory, and the measured error; the most accurate first."""
    rows = [
        [f"[`{c['spec']}`](recipes/{c['page']}.md)", f"{c['bits']:g}", f"{c['sqnr']:.1f}"]
        + [f"{8 * memory / c['bits']:.3g}" for memory in MEMORIES]
        for c in sorted(choices(), key=lambda c: -c["sqnr"])
    ]
    plain = ["BF16, for comparison", "16", "", *(f"{memory / 2:.3g}" for memory in MEMORIES)]
    return table(["recipe", "bits", "SQNR, dB", *(f"{memory} GB" for memory in MEMORIES)], [*rows, plain], numbers=True)


BLOCKS: dict[str, Callable[[], str]] = {"codecs-json": codecs, "choices-json": choices_json, "fits": fits}
