"""Writes docs/reports/: reports of real runs on the encoder of the demo, and pictures of them in docs/img/.

`make gallery` installs the weights and runs it; a browser takes the pictures.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "examples"))
from demo import PACKAGE, RECIPES  # noqa: E402

#: What the model reads for the report of `why`.
TEXT = ROOT / "README.md"
SHOWN: Any = {"width": 1000, "height": 800}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "device_scale_factor": 2, "is_mobile": True,
    "has_touch": True,
}  # fmt: skip


def breccia(folder: Path, *words: str | Path) -> None:
    """Run the program in a folder. Its errors go to the terminal and end this script."""
    command = [sys.executable, "-m", "breccia", *map(str, words)]
    if subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"gallery: `breccia {' '.join(map(str, words))}` failed.")


def reports(model: Path, out: Path, text: Path | None) -> list[Path]:
    """The reports of `compare`, `convert` and `why` on a model, in a folder.

    text: what `why` has the model read; None ranks layers by their weights alone.
    """
    out.mkdir(exist_ok=True)
    found = [out.resolve() / f"{name}.html" for name in ("compare", "mixed", "why")]
    compare, mixed, why = found
    every = ("--include", "*embed*")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for recipe in RECIPES:
            breccia(work, "convert", model, recipe, "--recipe", recipe, *every)
        breccia(work, "compare", model, *RECIPES, "--report", compare)
        breccia(work, "convert", model, "mixed", "--target-bits", "5", *every, "--report", mixed)
        breccia(work, "why", model, "int4", *(("--calibrate", text) if text else ()), "--report", why)
    return found


def pictures(browser: Browser, found: list[Path], images: Path) -> None:
    """The first screen of each report, light and dark; and a histogram of the first one on a phone."""
    for report in found:
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=SHOWN, color_scheme=scheme)
            page.goto(report.as_uri())
            page.locator("#drawn").wait_for()
            page.screenshot(path=images / f"report-{report.stem}-{scheme}.png")
            page.close()
    page = browser.new_page(**PHONE)
    page.goto(found[0].as_uri())
    page.locator("#histogram-side").screenshot(path=images / "report-phone.png")
    page.close()


def main() -> None:
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit(f"gallery: the package {PACKAGE} is not installed; run `make gallery`, which installs it.")
    chromium = next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)
    if chromium is None:
        sys.exit("gallery: no browser takes the pictures; install chromium.")
    found = reports(Path(spec.origin).parent / "model", DOCS / "reports", TEXT)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        pictures(browser, found, DOCS / "img")
        browser.close()


if __name__ == "__main__":
    main()
