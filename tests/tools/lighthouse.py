"""Lighthouse, headless, on ten pages of the built site: exits with 1 where a category of a page scores below 95.

    npm install --prefix FOLDER lighthouse
    python tests/tools/lighthouse.py site --program FOLDER/node_modules/.bin/lighthouse

`make site-check` does both. It needs Chromium; CHROME_PATH names another browser.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import typer

PAGES = (
    "", "choose/", "number/", "getting-started/", "recipes/", "recipes/nvfp4/", "engines/vllm/", "measured/", "measured/gpu/",
    "agreement-board/",
)  # fmt: skip
CATEGORIES = ("performance", "accessibility", "best-practices", "seo")
LEAST = 95
_FLAGS = "--headless=new --no-sandbox --disable-gpu"


class Quiet(SimpleHTTPRequestHandler):
    """Says nothing of each request, and compresses text as hosts of pages do."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        path = path / "index.html" if path.is_dir() else path
        if path.suffix not in (".html", ".css", ".js", ".svg", ".json", ".xml") or not path.is_file():
            super().do_GET()
            return
        content = gzip.compress(path.read_bytes())
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def measured(program: str, url: str) -> dict[str, Any]:
    """What Lighthouse says of a page, as a desktop sees it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        categories = f"--only-categories={','.join(CATEGORIES)}"
        command = [program, url, "--quiet", "--output=json", f"--output-path={report}", f"--chrome-flags={_FLAGS}", categories]
        done = subprocess.run([*command, "--preset=desktop"], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"lighthouse failed on {url}: {done.stderr.strip()}")
        return json.loads(report.read_text(encoding="utf-8"))


def failed(report: dict[str, Any], category: str) -> list[str]:
    """The audits of a category that cost it points."""
    audits = report["audits"]
    wanted = [one["id"] for one in report["categories"][category]["auditRefs"] if one["weight"]]
    return [audits[name]["title"] for name in wanted if (audits[name]["score"] or 1) < 0.9 or audits[name]["score"] == 0]


def main(
    site: Annotated[Path, typer.Argument(help="Folder of the built site.")],
    program: Annotated[str, typer.Option(help="Lighthouse's program.")] = "lighthouse",
    pages: Annotated[list[str] | None, typer.Option("--page", help="Only these pages; repeatable.")] = None,
    tries: Annotated[int, typer.Option(min=1, help="Runs until a page passes: a busy machine lowers its performance.")] = 3,
) -> None:
    """Score pages of the site."""
    browser = os.environ.get("CHROME_PATH") or shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("lighthouse needs a browser: install chromium, or name one in CHROME_PATH.")
    os.environ["CHROME_PATH"] = browser
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    low, report, scores = 0, dict[str, Any](), dict[str, int]()
    for page in pages or PAGES:
        for _ in range(tries):
            report = measured(program, f"http://127.0.0.1:{server.server_port}/{page}")
            scores = {name: round(100 * (report["categories"][name]["score"] or 0)) for name in CATEGORIES}
            if min(scores.values()) >= LEAST:
                break
        print(f"{page or 'home':18} " + "  ".join(f"{name} {score}" for name, score in scores.items()), flush=True)
        for name in (name for name, score in scores.items() if score < LEAST):
            low += 1
            print(f"    {name}: {'; '.join(failed(report, name))}", flush=True)
    server.shutdown()
    if low:
        sys.exit(f"{low} scores are below {LEAST}.")


if __name__ == "__main__":
    typer.run(main)
