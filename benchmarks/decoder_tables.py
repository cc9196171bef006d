"""Tables of decoders: tokens per second and memory, what a step consists of, goals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from cells import ABSENT, Result, Table, ratio, three
from goals import DECODER_GOALS, HEADINGS, DecoderGoal, judged

#: How a decoder on CUDA runs, as bench_decoder.py writes it: under a CUDA graph, eager or compiled, or through `generate`.
GRAPH, COMPILED, GENERATE, GENERATE_COMPILED = "graph", "compiled", "generate", "generate-compiled"
WAYS = {GRAPH: "eager, a CUDA graph", COMPILED: "compiled, a CUDA graph"}
#: The recipe that the others are compared with.
BASE = "bf16"


def decoder(result: Result, what: str, how: str, way: str | None = None) -> Table:
    """Tokens per second of decoders, by recipe. how: a description of the run. way: the `how` of the rows to show."""
    shown = [row for row in result["rows"] if row.get("how") == way]
    models = dict.fromkeys(row.get("model", "") for row in shown)
    by = {(row.get("model", ""), row["recipe"], row["batch"]): row for row in shown}
    names, batches = dict.fromkeys(name for _, name, _ in by), sorted({batch for *_, batch in by})
    base = next(iter(names))
    prompts = "prompt" in shown[0]

    def cell(model: str, name: str, batch: int) -> str:
        row, first = by.get((model, name, batch)), by.get((model, base, batch))
        if row is None or first is None:
            return ABSENT
        speed = row["tokens_per_second"]
        found = f"{three(speed)}; {ratio(speed / first['tokens_per_second'])}"
        if not prompts:
            return found
        prompt = statistics.median(first["prompt"]["seconds"]) / statistics.median(row["prompt"]["seconds"])
        return f"{found}; {ratio(prompt)}"

    def size(model: str, name: str) -> str:
        row = next((row for key, row in by.items() if key[:2] == (model, name)), None)
        if row is None:
            return ABSENT
        return f"{row['weight_bytes'] / 1e6:,.0f}; {row['model_bytes'] / 1e6:,.0f}"

    def heading(model: str, text: str) -> str:
        return f"{model}: {text}" if model else text

    headings = (heading(model, text) for model in models for text in ("MB", *(f"batch {batch}" for batch in batches)))
    cells = {name: [c for m in models for c in (size(m, name), *(cell(m, name, b) for b in batches))] for name in names}
    sizes = {model: next(row for row in shown if row.get("model", "") == model)["parameters"] for model in models}
    parameters = ", ".join(heading(model, f"{size / 1e6:,.0f}") for model, size in sizes.items())
    return Table(
        what,
        ("weights", *headings),
        tuple((name, *cells[name]) for name in names),
        f"Decoders with random weights, {how}; million parameters: {parameters}. MB of linear layers; of the model. "
        f"Tokens per second{' after the prompt' if prompts else ''}; times faster than {base}"
        f"{'; the same for the prompt of 32 tokens' if prompts else ''}.",
    )


def steps(result: Result) -> Table:
    """The parts of a step, and its speed relative to BF16, as it is and if products by weights took no time."""
    rows = [row for row in result["rows"] if "products" in row]
    bases = {(row["how"], row["model"], row["batch"]): row for row in rows if row["recipe"] == BASE}

    def cells(row: Result) -> tuple[str, ...]:
        step, products = row["step"]["median_s"], row["products"]["median_s"]
        attention = row["attention"]["median_s"] if "attention" in row else None
        base = bases.get((row["how"], row["model"], row["batch"]))
        parts = (step, products, attention, step - products - (attention or 0))
        return (
            row["recipe"],
            WAYS[row["how"]],
            f"{row['model']}, {row['batch']}",
            *(ABSENT if part is None else f"{part * 1e6:,.0f}" for part in parts),
            f"{row['weight_bytes'] / products / 1e12:.2f}",
            *((ratio(base["step"]["median_s"] / step), ratio(base["step"]["median_s"] / (step - products))) if base else ()),
        )

    note = (
        "Microseconds of a step, of its products by weights, of its attention without projections, and of the rest. Products "
        "and attention are measured in CUDA graphs of their own; the attention of a compiled step is part of the rest. TB/s: "
        "bytes of weights over the time of products. × BF16: speed relative to the BF16 step. At most: the same if products "
        "took no time."
        if rows
        else "*This result has no parts of steps.*"
    )
    headings = ("weights", "how", "model, batch", "step", "products", "attention", "rest", "TB/s", "× BF16", "at most")
    return Table("what a step consists of", headings, tuple(map(cells, rows)), note)


def reached(result: Result, goal: DecoderGoal) -> Iterator[tuple[str, float | None]]:
    """(Recipe, way, model and batch, the quantity over BF16's) of every row of a goal."""
    rows = {(row["how"], row["model"], row["batch"], row["recipe"]): row for row in result["rows"]}
    for way, model, batch, recipe in rows:
        if recipe in goal.recipes and model in goal.models:
            base = rows.get((way, model, batch, BASE))
            value = rows[way, model, batch, recipe][goal.quantity]
            yield f"{recipe}, {way}, {model}, batch {batch}", value / base[goal.quantity] if base else None


def goals(result: Result) -> Table:
    """What every goal asks for, and what was measured."""
    rows = tuple(
        judged(
            goal.work,
            f"{'≤' if goal.at_most else '≥'} {goal.bound:.2f} × BF16",
            dict(reached(result, goal)),
            goal.bound,
            goal.at_most,
        )
        for goal in DECODER_GOALS
    )
    note = "The smallest and the largest value among all batches, eager and compiled."
    return Table("goals of decoders", HEADINGS, rows, note)


_GENERATED = "through `generate` with a static cache, in "

TABLES: dict[str, dict[str, Callable[[Result], Table]]] = {
    "decoder-cpu": {
        "decoder-cpu": lambda result: decoder(result, "a decoder on the CPU", "under Hugging Face's `generate`"),
    },
    "gpu-decoder": {
        "gpu-decoder": lambda result: decoder(result, "a decoder on CUDA", "each step a CUDA graph", GRAPH),
        "gpu-decoder-compiled": lambda result: decoder(
            result, "a compiled decoder on CUDA", "compiled by torch.compile, each step a CUDA graph", COMPILED
        ),
        "gpu-decoder-steps": steps,
        "gpu-decoder-goals": goals,
    },
    "gpu-decoder-generate": {
        "gpu-decoder-generate": lambda result: decoder(
            result, "transformers' Llama on CUDA", f"{_GENERATED}eager steps", GENERATE
        ),
        "gpu-decoder-generate-compiled": lambda result: decoder(
            result, "transformers' Llama on CUDA, compiled", f"{_GENERATED}compiled steps", GENERATE_COMPILED
        ),
    },
}
