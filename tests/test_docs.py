"""Examples and the code blocks of README run as printed; links lead somewhere; documents name only what exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

import breccia

ROOT = Path(__file__).parent.parent
PAGES = [p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]]


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/0*.py")), ids=lambda p: p.stem)
def test_examples_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.count("\n") >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_of_documents_run(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(page), "exec"), {})


def test_the_front_page_example_runs_as_printed() -> None:
    """The example the project started with: a block cast, a 256 x 64 weight in blocks of 128, and their product."""
    x = np.random.randn(8, 256).astype(np.float32)
    st = breccia.cast(x, breccia.Float8BlockScaling(block_k=128))
    assert st.shape == (8, 256) and st.scale.shape == (8, 2)
    A = breccia.cast(np.random.randn(16, 256).astype(np.float32), breccia.Float8CurrentScaling())
    W = breccia.cast(np.random.randn(256, 64).astype(np.float32), breccia.Float8BlockScaling(block_k=128))
    y = breccia.matmul(A, W)
    assert y.shape == (16, 64) and y.dtype == np.float32
    assert W.layout == breccia.PerBlockK(128, ragged=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert link.startswith("http") or (page.parent / link).exists(), link


def test_readme_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^\$ make (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE):
        assert f"\n{target}:" in makefile
