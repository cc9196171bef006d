"""Draws docs/img/report-desktop.png and report-phone.png: the report, as a browser with a wide and a narrow screen shows it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "img"
MARGIN = 24
#: The browser's settings for each picture, and what of the page it shows: the first of these and all to the end of the last.
PICTURES: dict[str, tuple[dict[str, Any], str, str]] = {
    "report-desktop.png": ({"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"}, "header", "#all"),
    "report-phone.png": (
        {
            "viewport": {"width": 390, "height": 844},
            "color_scheme": "dark",
            "device_scale_factor": 2,
            "is_mobile": True,
            "has_touch": True,
        },
        "#histogram-side",
        "#histogram",
    ),
}


def main(report: Path) -> None:
    """Draw both of one report."""
    browsers = ("chromium", "chromium-browser", "google-chrome")
    browser_path = next((path for path in map(shutil.which, browsers) if path), None)
    if browser_path is None:
        sys.exit(f"screenshots need a browser; none of {', '.join(browsers)} is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        for name, (settings, first, last) in PICTURES.items():
            context = browser.new_context(**settings)
            page = context.new_page()
            page.goto(report.resolve().as_uri())
            page.locator("#drawn").wait_for()
            top = page.locator(first).evaluate("node => node.getBoundingClientRect().top + scrollY") - MARGIN
            bottom = page.locator(last).evaluate("node => node.getBoundingClientRect().bottom + scrollY") + MARGIN
            width = settings["viewport"]["width"]
            clip = {"x": 0, "y": top, "width": width, "height": bottom - top}
            page.screenshot(path=IMAGES / name, full_page=True, clip=clip)
            context.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".demo" / "report.html")
