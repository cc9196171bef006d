"""A hook of MkDocs: what pages link to outside docs/ is on the site too.

Pages link as a code host follows them: `../CHANGELOG.md`, `../benchmarks/draw.py#L12`, `../examples`. When MkDocs lists its
files, every such link is followed, and what it leads to is added: the root pages as pages, any other text as a page of
highlighted source with an anchor `#L12` at each line, a folder as a list. When it renders a page, its links are written
anew to lead there. A link to nothing is left as it is, and `mkdocs build --strict` fails on it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pygments.lexers import find_lexer_class_for_filename

# Imported where it is called: how links are rewritten is tested without MkDocs.
if TYPE_CHECKING:
    from mkdocs.structure.files import File, Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]

#: Pages of the repository's root -> where the site shows them.
ROOT_PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
SOURCE = "source"

#: Code, which is skipped, or the target of a link.
_LINK = re.compile(r"^ *(?P<fence>`{3,}|~{3,}).*?^ *(?P=fence)|`[^`\n]*`|(?<=\]\()(?P<link>[^)\s]+)", re.DOTALL | re.MULTILINE)
_ELSEWHERE = re.compile(r"[a-z]+:|#|/")
_CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
#: Code and tags; the text between them is split off.
_NO_TEXT = re.compile(r"(<code\b.*?</code>|<[^>]*>)", re.DOTALL)
#: Spaces that do not break: before the slash of a list and in a range, "98 / 100 / 101"; beside ± and comparisons; in "M = 64";
#: before units.
_TOGETHER = re.compile(
    r" (?=[±/] )|(?<=\d /) (?=\d)|(?<=±) |(?<=[≤≥]) |(?<=\b[A-Z]) (?==)|(?<=\b[A-Z] =) "
    r"|(?<=\d) (?=(?:%|[µm]?s|[kMG]i?B|dB)(?!\w))"
)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the root pages, and all that any page links to outside docs/."""
    from mkdocs.structure.files import File

    for name, uri in ROOT_PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    waiting = [path for file in files.documentation_pages() for path in linked(file.content_string, file.src_uri)]
    while waiting:
        path = waiting.pop()
        if files.get_file_from_path(site_uri(path)) is None:
            waiting += [f"{path}/{name}" for name in entries(path)]
            files.append(generated(path, config))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    """Let links lead to the site's own pages."""
    uri = page.file.src_uri
    return markdown if is_source(uri) else rewritten(markdown, uri)


def on_page_content(html: str, *, page: Page, config: Any, files: Files) -> str:
    """Call the line anchors of source pages as code hosts do, and tell MkDocs, which checks links to them.

    In tables of all other pages, a number stays in one line with its spread and its unit.
    """
    if not is_source(page.file.src_uri):
        return _CELL.sub(lambda cell: kept_together(cell[0]), html)
    html = re.sub(r"__codelineno-0-(\d+)", r"L\1", html)
    page.present_anchor_ids = (page.present_anchor_ids or set()) | set(re.findall(r'id="(L\d+)"', html))
    return html


def on_post_page(output: str, *, page: Page, config: Any) -> str:
    """Name the theme's search dialog, which screen readers announce."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)


# ---------------------------------------------------------------------------------------------------- links


def target_of(link: str, uri: str) -> str | None:
    """The file or folder of the repository, from its root, that a link of page `uri` leads to, or None."""
    if _ELSEWHERE.match(link):
        return None
    home = {site: name for name, site in ROOT_PAGES.items()}.get(uri, f"docs/{uri}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(home), link.partition("#")[0]))
    return path if not path.startswith("..") and path != "." and (ROOT / path).exists() else None


def site_uri(path: str) -> str:
    """Where the site has a file or folder of the repository; a page of docs/ where it always had it."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path.startswith("docs/") and not path.startswith("docs/scripts") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    return f"{SOURCE}/{path}/index.md" if (ROOT / path).is_dir() else f"{SOURCE}/{path}{'.md' if is_text(path) else ''}"


def linked(markdown: str, uri: str) -> Iterator[str]:
    for found in _LINK.finditer(markdown):
        path = found["link"] and target_of(found["link"], uri)
        if path:
            yield path


def rewritten(markdown: str, uri: str) -> str:
    def replaced(found: re.Match[str]) -> str:
        path = found["link"] and target_of(found["link"], uri)
        if not path:
            return found[0]
        _, mark, fragment = found["link"].partition("#")
        return posixpath.relpath(site_uri(path), posixpath.dirname(uri) or ".") + mark + fragment

    return _LINK.sub(replaced, markdown)


def kept_together(cell: str) -> str:
    """A cell of a table with spaces that do not break inside of numbers: "10.6 ± 0.3 µs; 1.2× /", and "M = 64"."""
    parts = _NO_TEXT.split(cell)
    parts[::2] = (_TOGETHER.sub("\N{NO-BREAK SPACE}", text) for text in parts[::2])
    return "".join(parts)


# ---------------------------------------------------------------------------------------------------- pages of source


def is_source(uri: str) -> bool:
    return uri.startswith(f"{SOURCE}/")


def is_text(path: str) -> bool:
    try:
        (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def entries(path: str) -> list[str]:
    """Names in a folder, but for hidden ones and what programs leave behind; of a file none."""
    folder = ROOT / path
    found = sorted(folder.iterdir(), key=lambda p: (p.is_file(), p.name)) if folder.is_dir() else []
    return [p.name for p in found if not p.name.startswith((".", "__pycache__")) and p.suffix != ".egg-info"]


def generated(path: str, config: Any) -> File:
    """The page that shows a file or lists a folder; a file that is no text as it is."""
    from mkdocs.structure.files import File

    if (ROOT / path).is_file() and not is_text(path):
        return File.generated(config, site_uri(path), abs_src_path=str(ROOT / path))
    if (ROOT / path).is_dir():
        shown = "\n".join(f"- [`{name}`]({listed(path, name)})" for name in entries(path))
    else:
        text = (ROOT / path).read_text(encoding="utf-8").rstrip("\n")
        lexer: Any = find_lexer_class_for_filename(path)
        fence = "`" * (3 + max(map(len, re.findall(r"`+", text)), default=0))
        shown = f'{fence}{{.{lexer.aliases[0] if lexer else "text"} linenums="1"}}\n{text}\n{fence}'
    head = f'---\ntitle: "{path}"\nsearch: {{exclude: true}}\nhide: [toc]\n---\n\n# {posixpath.basename(path)}\n\n`{path}`'
    return File.generated(config, site_uri(path), content=f"{head}\n\n{shown}\n")


def listed(folder: str, name: str) -> str:
    """The link to a file or folder from the list of its folder."""
    uri = posixpath.dirname(site_uri(folder))
    return posixpath.relpath(site_uri(f"{folder}/{name}"), uri)
