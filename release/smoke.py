"""Check an installation: it casts the golden vectors to their bytes in every framework that it has. Prints what it found.

    /path/to/environment/bin/python release/smoke.py docs/spec/vectors/1 [--native]

--native: fail unless breccia-native's kernels run. Imports nothing of the repository.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import breccia

#: Framework -> how to make its array of a NumPy array.
FRAMEWORKS: dict[str, Callable[[np.ndarray], Any]] = {
    "numpy": lambda x: x,
    "torch": lambda x: importlib.import_module("torch").from_numpy(x),
    "jax": lambda x: importlib.import_module("jax.numpy").asarray(x),
    "mlx": lambda x: importlib.import_module("mlx.core").array(x),
}


def cases(folder: Path) -> Iterator[tuple[breccia.ScalingRecipe, np.ndarray, bytes, bytes]]:
    """(recipe, input, data, scale) of plain casts in a set of vectors."""
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    buffer = (folder / "vectors.bin").read_bytes()
    known = {recipe.name for recipe in breccia.recipes.RECIPES}  # others are of the conformance kit

    def part(place: list[int]) -> bytes:
        return buffer[place[0] : sum(place)]

    for case in index["cases"]:
        # Other edges need options of cast, and other dtypes need ml_dtypes.
        plain = case["dtype"] == "float32" and case["rounding"] == "nearest" and case["axis"] == -1 and "supplied" not in case
        recipe = index["recipes"][case["recipe"]]["recipe"]
        if plain and case["edge"] == "ordinary" and recipe["name"] in known:
            x = np.frombuffer(part(case["input"]), np.float32).reshape(case["shape"])
            yield breccia.ScalingRecipe.from_json(json.dumps(recipe)), x.copy(), part(case["data"]), part(case["scale"])


def lacks_kernels() -> str | None:
    """Why kernels of breccia-native cannot run, or None. Those of products need GCC or Clang, which wheels for Windows lack."""
    availability = importlib.import_module("breccia_native.availability")
    return availability.missing("cpu") or (None if sys.platform == "win32" else availability.missing_products("cpu"))


def main() -> None:
    """Run the checks. Exits with the first fault."""
    parser = argparse.ArgumentParser(description="Check an installation of breccia against golden vectors.")
    parser.add_argument("vectors", type=Path, help="a set of vectors, such as docs/spec/vectors/1")
    parser.add_argument("--native", action="store_true", help="fail unless the kernels of breccia-native run")
    given = parser.parse_args()
    if not Path(breccia.__file__).resolve().is_relative_to(Path(sys.prefix).resolve()):
        sys.exit(f"smoke: breccia is imported from {breccia.__file__}, which is outside {sys.prefix}.")
    found = [name for name in FRAMEWORKS if name == "numpy" or find_spec(f"breccia_{name}")]
    count = 0
    for recipe, x, data, scale in cases(given.vectors):
        expected = breccia.cast(x, recipe)
        if (expected.data.tobytes(), expected.scale.tobytes()) != (data, scale):
            sys.exit(f"smoke: the cast of {x.shape} to {recipe} on NumPy differs from the golden vector.")
        for name in found[1:]:
            if breccia.cast(FRAMEWORKS[name](x), recipe).digest() != expected.digest():
                sys.exit(f"smoke: the cast of {x.shape} to {recipe} on {name} differs from NumPy's.")
        count += 1
    kernel = breccia.explain("cast", np.zeros((64, 256), np.float32), "mxfp8").winner.name
    if given.native and (reason := lacks_kernels()):
        sys.exit(f"smoke: {kernel} runs: {reason}")
    if not count:
        sys.exit(f"smoke: {given.vectors} has no plain cast.")
    print(f"breccia {breccia.__version__}: {count} golden casts on {', '.join(found)}; {kernel} runs")


if __name__ == "__main__":
    main()
