"""A hook of MkDocs: each image gets the width and height of its file, so that a browser leaves room before it has the file.

Without them the text below an image moves when it arrives. The theme lets images shrink with the window, in their proportions.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

# Sizes of images are tested without MkDocs.
if TYPE_CHECKING:
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_IMAGE = re.compile(r"<img\b(?P<attributes>[^>]*?)(?P<end>\s*/?>)")
_ATTRIBUTE = r'(?<![\w-]){}="([^"]*)"'
#: CSS pixels of the units that SVG writers use; a length without a unit is in pixels.
_PIXELS = {"": 1.0, "px": 1.0, "pt": 96 / 72, "in": 96.0, "cm": 96 / 2.54, "mm": 96 / 25.4}
_PNG = b"\x89PNG\r\n\x1a\n"


def on_page_content(html: str, *, page: Page, config: Any, files: Files) -> str:
    """Write width and height into the images of a page that are files of the site."""

    def replaced(found: re.Match[str]) -> str:
        source = attribute(found["attributes"], "src")
        path = source and not urlsplit(source).scheme and unquote(urlsplit(source).path)
        uri = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.dest_uri), path)) if path else ""
        file = files.get_file_from_path(uri)
        size = file and file.abs_src_path and size_of(Path(file.abs_src_path))
        return f"<img{sized(found['attributes'], *size)}{found['end']}" if size else found[0]

    return _IMAGE.sub(replaced, html)


def sized(attributes: str, width: float, height: float) -> str:
    """Attributes of an image with both its width and its height; one that they have in pixels keeps its value."""
    given = {name: attribute(attributes, name) for name in ("width", "height")}
    if all(given.values()) or not all(value is None or value.isdecimal() for value in given.values()):
        return attributes
    if given["width"]:
        return f'{attributes} height="{round(int(given["width"]) * height / width)}"'
    if given["height"]:
        return f'{attributes} width="{round(int(given["height"]) * width / height)}"'
    return f'{attributes} width="{round(width)}" height="{round(height)}"'


def size_of(path: Path) -> tuple[float, float] | None:
    """Width and height of a PNG or an SVG in CSS pixels; None where the file does not say."""
    if path.suffix == ".png":
        head = path.read_bytes()[:24]
        return (int.from_bytes(head[16:20]), int.from_bytes(head[20:24])) if head.startswith(_PNG) else None
    root = re.search(r"<svg\b[^>]*>", path.read_text(encoding="utf-8")) if path.suffix == ".svg" else None
    if root is None:
        return None
    lengths = [re.fullmatch(r"([\d.]+)([a-z]*)", attribute(root[0], name) or "") for name in ("width", "height")]
    pixels = [float(found[1]) * _PIXELS[found[2]] for found in lengths if found and found[2] in _PIXELS]
    return (pixels[0], pixels[1]) if len(pixels) == 2 else None


def attribute(tag: str, name: str) -> str | None:
    found = re.search(_ATTRIBUTE.format(name), tag)
    return found[1] if found else None
