"""What pages of one recipe or one engine open with: the declaration of the recipe, measured figures, and what ran it.

Figures are those of benchmarks/results/accuracy-*.json; what ran is docs/engines.json, as tests/engines/check.py measured it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from harness.blocks import table
from listings import NONE, SIDE, allowed, either, example, scales, variants

from breccia.cli.recipes import bits_per_value, covered
from breccia.dispatch.registry import registry
from breccia.tensors.grids import packing

ROOT = Path(__file__).resolve().parents[2]
#: What engines are called.
ENGINES = {"vllm": "vLLM", "transformers": "transformers", "mlx_lm": "MLX-LM", "llama_cpp": "llama.cpp"}
#: Data sets of the accuracy benchmark, as the card calls them.
DATA = {"normal x 1": "normal numbers", "student t3": "heavy tails (Student's t)", "all-MiniLM-L6-v2": "a trained encoder"}
#: Parameters of the model whose size a card states.
MODEL = 8e9


@cache
def record(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def accuracy() -> dict[str, Any]:
    """By recipe with its defaults: SQNR by data set."""
    (path,) = (ROOT / "benchmarks" / "results").glob("accuracy-*.json")
    rows = record(path.relative_to(ROOT).as_posix())["rows"]
    return {row["name"]: {name: found["sqnr_db"] for name, found in row["data"].items()} for row in rows if row["default"]}


def recipe(name: str) -> str:
    """The declaration of a recipe, its measured error, its fields, and which engines ran a model under it."""
    kind = registry().recipes[name]
    fmt, every = example(name).format, [variant.format for variant in variants(kind)]
    codes, size = packing(fmt.element)
    bits = bits_per_value(example(name), SIDE)
    packed = "one in a byte" if (codes, size) == (1, 1) else f"{codes} in {size} byte{'s' if size > 1 else ''}"
    wide = list(dict.fromkeys(f"{f.global_scale.codec.name} per tensor" for f in every if f.global_scale))
    offsets = [name for name in dict.fromkeys(f.offset for f in every) if name != "none"]
    rows = [
        ["class", f"`{kind.__name__}`"],
        ["codes", f"{either(f.element.name for f in every)}, {packed}"],
        ["scale", f"{scales(every)}, for each {covered(fmt.scale.block).replace('x', '×')}"],
        *[["tensor-level scale", either(wide)] for _ in wide[:1]],
        *[["offset, on request", either(offset.replace("_", "-") for offset in offsets)] for _ in offsets[:1]],
        ["size", f"{bits:.4g} bits per parameter: 8 billion parameters in {MODEL * bits / 8e9:.3g} GB"],
    ]
    if found := accuracy().get(name):
        rows.append(["SQNR", "; ".join(f"{found[key]:.1f} dB on {said}" for key, said in DATA.items() if key in found)])
    rows += ran(name)
    return f"{table(['', f'`{name}`'], rows)}\n{fields(name)}"


def ran(name: str) -> list[list[str]]:
    """Which engines ran a model under the recipe, and what did not run."""
    rows = [row for row in record("docs/engines.json")["rows"] if base(row["recipe"]) == name]
    linked = {row["name"]: f"[{ENGINES[row['engine']]}](engines/{row['engine'].replace('_', '-')}.md)" for row in rows}
    yes: dict[str, dict[str, None]] = {}
    for row in (row for row in rows if row["ran"]):
        form = "breccia's own folder" if row["dialect"] == "breccia" else f"`--dialect {row['dialect']}`"
        yes.setdefault(linked[row["name"]], {})[form] = None
    no = [f"{linked[row['name']]}: `{options(row)}` of {model(row)}" for row in rows if not row["ran"]]
    said = [["ran in", "; ".join(f"{engine} ({', '.join(forms)})" for engine, forms in yes.items())]] if yes else []
    return [*said, *([["did not run in", "; ".join(no)]] if no else [])]


def base(spec: str | None) -> str | None:
    """The name of the recipe of a spec or a shorthand."""
    return spec and (type(registry_recipe(spec)).name if spec != "none" else None)


@cache
def registry_recipe(spec: str) -> Any:
    import breccia

    return breccia.recipe(spec)


def fields(name: str) -> str:
    kind = registry().recipes[name]
    rows = [
        [
            f"`{f.name}`",
            "`" + repr(getattr(kind(), f.name)).replace("'", '"') + "`",
            re.sub(r"'([^']+)'", r'`"\1"`', allowed(kind, f)),
        ]
        for f in dataclasses.fields(kind)  # type: ignore[arg-type]
    ]
    return table(["field", "default", "takes"], rows)


def recipes() -> str:
    """Every recipe, with its page, size and measured error, the smallest last."""
    found = accuracy()
    rows: list[tuple[float, list[str]]] = []
    for name in registry().recipes:
        bits, sqnr = bits_per_value(example(name), SIDE), found.get(name, {}).get("all-MiniLM-L6-v2")
        ran_in = (row for row in record("docs/engines.json")["rows"] if row["ran"] and base(row["recipe"]) == name)
        engines = dict.fromkeys(ENGINES[row["engine"]] for row in ran_in)
        shown = f"{sqnr:.1f}" if sqnr is not None else NONE
        element = either(dict.fromkeys(variant.format.element.name for variant in variants(registry().recipes[name])[:1]))
        rows.append((bits, [f"[`{name}`](recipes/{name}.md)", element, f"{bits:.4g}", shown, ", ".join(engines) or NONE]))
    rows.sort(key=lambda row: -row[0])
    headings = ["recipe", "codes by default", "bits per parameter", "SQNR in dB, a trained encoder", "engines that ran it"]
    return table(headings, (row for _, row in rows))


def outcome(row: Any) -> str:
    return "no" if not row["ran"] else "ran, equal" if row["equal"] else f"ran, KL {row['kl']:.0e}"


def model(row: Any) -> str:
    said = f"{row['model']}, {row['ranks']} ranks" if row["ranks"] > 1 else row["model"]
    return f"{said}, from {row['source'][1]}" if row["source"] else said


def options(row: Any) -> str:
    return row["command"].removeprefix("breccia convert MODEL OUT").strip()


def engines() -> str:
    """Which engine ran what."""
    found = record("docs/engines.json")
    rows = [[ENGINES[row["engine"]], f"`{options(row)}`", model(row), outcome(row)] for row in found["rows"]]
    versions = ", ".join(f"{ENGINES[engine]} {version}" for engine, version in found["versions"].items())
    return (
        f"{table(['engine', '`breccia convert MODEL OUT`', 'MODEL', ''], rows)}\n{versions}; on a CPU, {found['date_utc']}.\n"
    )


def engine(name: str) -> str:
    """What one engine ran, and below it what it did not."""
    found = record("docs/engines.json")
    rows = [row for row in found["rows"] if row["engine"] == name]
    shown = [[f"`{options(row)}`", model(row), outcome(row)] for row in sorted(rows, key=lambda row: not row["ran"])]
    count = sum(row["ran"] for row in rows)
    said = f"{count} of {len(rows)} ran: {ENGINES[name]} {found['versions'][name]}, on a CPU, {found['date_utc']}."
    return f"{said}\n\n{table(['`breccia convert MODEL OUT`', 'MODEL', ''], shown)}"


BLOCKS: dict[str, Callable[[], str]] = {
    "engines": engines,
    "recipes": recipes,
    **{f"engine-{name}": partial(engine, name) for name in ENGINES},
    **{f"recipe-{name}": partial(recipe, name) for name in registry().recipes},
}
