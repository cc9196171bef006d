"""The examples: each runs alone, as a reader runs it, and prints what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from paths import ROOT

EXAMPLES = sorted(ROOT.glob("examples/[0-9]*.py"))
#: By example: what it needs beside NumPy and breccia-core, and a line that it prints on every machine.
EXPECTED = {
    "01_quickstart": ((), "8192 bytes -> 2112 bytes"),
    "02_training": (("breccia_torch",), "every recipe is within 5 % of BF16: True"),
    "03_checkpoint": (("breccia_bridges",), "quantized: ['mlp.weight'] at 4.50 bits per parameter"),
    "04_te_migration": (("breccia_torch", "breccia_bridges"), "the next scale is TransformerEngine's: True"),
    "05_torch_model": (("breccia_torch", "breccia_bridges"), "the loaded model gives the same outputs: True"),
    "06_jax": (("breccia_jax",), "the loss fell to less than half: True"),
    "07_mlx": (("breccia_mlx",), "the loaded model gives the same outputs: True"),
    "08_hugging_face": (
        ("breccia_torch", "breccia_bridges", "transformers"),
        "quantized 56 tensors at 4.51 bits per parameter",
    ),
    "09_torchao": (("breccia_torch", "breccia_bridges", "torchao"), "the same bytes after a return: True"),
    "10_foreign_checkpoint": (("breccia_bridges",), "decoded as GPTQ does: True"),
    "11_training_jax": (("breccia_jax", "flax"), "FP8 is within 5 % of BF16, NVFP4 within 15 %: True"),
    "12_which_layers": (
        ("breccia_torch", "breccia_bridges", "transformers"),
        "the worst layer is the one with outliers: True",
    ),
    "13_gguf": (("breccia_bridges", "gguf"), "the file has the codes of a cast: True"),
    "14_same_bytes": (("breccia_bridges",), "the adapter survives in the same format: True"),
}
#: Longer than about 2 seconds, most of it imports: torch.optim, JAX's compiler, transformers.
LONG = ("04_te_migration", "05_torch_model", "06_jax", "08_hugging_face", "09_torchao", "12_which_layers")
#: They train several networks, and `make test-all` runs docs/training.md and docs/training-jax.md, which make the same calls.
SLOW = ("02_training", "11_training_jax")
MARKS = dict.fromkeys(LONG, pytest.mark.long) | dict.fromkeys(SLOW, pytest.mark.slow)
#: A framework whose breccia package is installed may itself be missing.
FRAMEWORKS = {"breccia_torch": "torch", "breccia_jax": "jax", "breccia_mlx": "mlx", "breccia_bridges": "safetensors"}
#: Nothing is downloaded, and others want the cores: one thread is enough for models as small as these.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem, marks=MARKS.get(p.stem, ())) for p in EXAMPLES])
def test_an_example_runs_and_prints_what_it_promises(path: Path, tmp_path: Path) -> None:
    needs, line = EXPECTED[path.stem]
    wanted = {*needs, *(FRAMEWORKS[need] for need in needs if need in FRAMEWORKS)}
    missing = sorted(module for module in wanted if find_spec(module) is None)
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert line in printed and len(printed) >= 5, done.stdout
    assert not list(tmp_path.iterdir()), "an example leaves no file behind"


def test_examples_are_numbered_from_one_without_gaps_and_say_how_to_run_them() -> None:
    assert [p.stem.partition("_")[0] for p in EXAMPLES] == [f"{n:02}" for n in range(1, len(EXAMPLES) + 1)]
    assert list(EXPECTED) == [p.stem for p in EXAMPLES]
    for path in EXAMPLES:
        assert f"\n\npython examples/{path.name}\n" in path.read_text(encoding="utf-8"), path.name
