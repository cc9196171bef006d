"""Pictures of ten pages of the built site, as a phone and a desktop show them, and a page that has them all.

    python tests/tools/screenshots.py site .screenshots

`make screenshots` builds the site before. It needs Chromium and Playwright; the pages are those that Lighthouse scores.
"""

from __future__ import annotations

import shutil
import sys
import threading
from functools import partial
from html import escape
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Annotated

import typer
from lighthouse import PAGES, Quiet
from playwright.sync_api import sync_playwright

#: Widths in CSS pixels, and how much of a page is shown.
WIDTHS, TALL = {"phone": 390, "desktop": 1440}, 4000

SHEET = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Pages of the site</title>
<style>
body { margin: 1rem; font: 1rem/1.5 sans-serif; color-scheme: light dark; }
div { display: flex; flex-wrap: wrap; gap: 1rem; align-items: start; }
img { max-height: 40rem; max-width: 100%; object-fit: cover; object-position: top; border: 1px solid gray; }
</style>
"""


def main(
    site: Annotated[Path, typer.Argument(help="Folder of the built site.")],
    out: Annotated[Path, typer.Argument(help="Folder for the pictures.")],
    scheme: Annotated[str, typer.Option(help="light or dark.")] = "light",
) -> None:
    """Take the pictures."""
    browser_path = next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)
    if browser_path is None:
        sys.exit("screenshots need a browser: install chromium.")
    out.mkdir(parents=True, exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sheet = SHEET
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        for path in PAGES:
            name = path.strip("/").replace("/", "-") or "home"
            sheet += f"<h2>{escape(path or 'home')}</h2>\n<div>\n"
            for device, width in WIDTHS.items():
                page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
                page.goto(f"http://127.0.0.1:{server.server_port}/{path}", wait_until="networkidle")
                tall = min(TALL, page.evaluate("document.documentElement.scrollHeight"))
                file = f"{name}-{device}.png"
                # The window grows for the picture, and the theme's tabs would be taken while they fade in again.
                page.screenshot(
                    path=out / file,
                    full_page=True,
                    animations="disabled",
                    clip={"x": 0, "y": 0, "width": width, "height": tall},
                )
                page.close()
                sheet += f'<a href="{file}"><img src="{file}" alt="{escape(name)}, {width} px wide"></a>\n'
            sheet += "</div>\n"
        browser.close()
    server.shutdown()
    (out / "index.html").write_text(sheet, encoding="utf-8")
    print(f"{2 * len(PAGES)} pictures: {out / 'index.html'}")


if __name__ == "__main__":
    typer.run(main)
