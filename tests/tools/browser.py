"""A browser for tests of pages, and what of a page readers cannot reach in it."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

#: Arguments of a browser that fetches nothing by itself.
CHROMIUM = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
)  # fmt: skip
#: Widths of a phone and of a desktop, in CSS pixels.
WIDTHS = (390, 1440)


@contextmanager
def chromium() -> Generator[Any]:
    """A running browser; skips the test where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is installed")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=list(CHROMIUM))
        yield launched
        launched.close()


def unreachable(page: Any, width: int, wait: float = 5.0) -> list[str]:
    """What readers of an opened page cannot reach in a window of this width: a line for each fault.

    The page must not scroll sideways. A table or a block of code fits, or scrolls in its own container; nothing of it is cut by
    an ancestor that hides what overflows. What is folded is unfolded.
    wait: seconds until a fault counts: plots follow the window some time after it.
    """
    page.set_viewport_size({"width": width, "height": 900})
    faults = page.evaluate(_UNREACHABLE)
    for _ in range(int(wait * 10)):
        if not faults:
            break
        page.wait_for_timeout(100)
        faults = page.evaluate(_UNREACHABLE)
    return [f"{width} px: {fault}" for fault in faults]


_UNREACHABLE = """() => {
    for (const folded of document.querySelectorAll("details")) folded.open = true;
    const faults = [], root = document.documentElement, wide = root.clientWidth;
    const named = (e) => e.tagName.toLowerCase() + (e.id ? "#" + e.id : "") +
        (e.getAttribute("class") ? "." + e.getAttribute("class").trim().split(/\\s+/).join(".") : "") +
        " " + JSON.stringify(e.textContent.trim().slice(0, 40));
    if (root.scrollWidth > wide + 1) {
        const scrolls = (e) => e && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
        const out = [...document.body.querySelectorAll("*")]
            .filter((e) => e.getBoundingClientRect().right > wide + 1 && !scrolls(e.parentElement));
        const last = out.length ? named(out.at(-1)) : "?";
        faults.push(`the page scrolls sideways, ${root.scrollWidth} of ${wide}; sticks out: ${last}`);
    }
    const visible = (e) => e.checkVisibility ? e.checkVisibility() : e.getClientRects().length > 0;
    for (const e of document.querySelectorAll("table, pre")) {
        if (!visible(e)) continue;
        // What must be reachable: the box of the element, or what overflows it.
        let box = e.getBoundingClientRect(), left = box.left, right = Math.max(box.right, box.left + e.scrollWidth);
        for (let p = e; p && p !== root; p = p.parentElement) {
            const style = getComputedStyle(p), edges = p.getBoundingClientRect();
            if (style.display === "inline" || style.display === "contents") continue;
            if (style.overflowX === "auto" || style.overflowX === "scroll") {
                if (left < edges.left - 1 - p.scrollLeft) faults.push(`cut on the left by ${named(p)}: ${named(e)}`);
                left = edges.left;
                right = edges.right;
            } else if (style.overflowX === "hidden" || style.overflowX === "clip") {
                if (right > edges.right + 1 || left < edges.left - 1) faults.push(`cut by ${named(p)}: ${named(e)}`);
                left = Math.max(left, edges.left);
                right = Math.min(right, edges.right);
            }
        }
        if (right > wide + 1 || left < -1) faults.push(`sticks out, ${Math.round(left)} to ${Math.round(right)}: ${named(e)}`);
    }
    for (const e of document.querySelectorAll("td, th, pre, pre > code")) {
        const style = getComputedStyle(e), hides = /hidden|clip/;
        if (hides.test(style.overflowX) && e.scrollWidth > e.clientWidth + 1) faults.push(`cuts its text: ${named(e)}`);
        if (hides.test(style.overflowY) && e.scrollHeight > e.clientHeight + 1) faults.push(`cuts its lines: ${named(e)}`);
    }
    return faults;
}"""
