"""An extension of Griffe, which reads the sources for the API pages: it turns docstrings into Markdown.

Docstrings are plain prose. Parameters, fields and the values of options are explained by lines that begin with their name
and a colon; an editor shows them as they are, and Markdown would run them together: they become a list. Examples are indented,
which Markdown would take for a part of the list before them: they become blocks of code.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

#: `name: text` or `"value": text`.
_ITEM = re.compile(r'^(?P<indent> *)(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*|"[\w-]+"): (?P<text>.+)$')
#: Examples: from a prompt to the next blank line.
_EXAMPLES = re.compile(r"^ *>>> .*(?:\n.+)*", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites docstrings as they are read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            known = {p.name for p in getattr(obj, "parameters", ())} | set(obj.members)
            obj.docstring.value = markdown(obj.docstring.value, known)


def markdown(text: str, known: set[str]) -> str:
    """The docstring in Markdown. known: names that an item may be about."""
    examples = [f"```pycon\n{textwrap.dedent(found)}\n```" for found in _EXAMPLES.findall(text)]
    prose = [listed(part.strip("\n"), known) for part in _EXAMPLES.split(text)]
    return "\n\n".join(part for pair in zip(prose, [*examples, ""], strict=True) for part in pair if part)


def listed(text: str, known: set[str]) -> str:
    """Prose with its items as a list."""
    lines: list[str] = []
    inside = False  # an item: lines that are indented go on with it
    for line in apart(text, known).splitlines():
        item = _ITEM.match(line)
        if item and (item["names"].startswith('"') or set(item["names"].split(", ")) <= known):
            if not inside and lines and lines[-1]:
                lines.append("")
            names = ", ".join(f"`{name}`" for name in item["names"].split(", "))
            lines.append(f"{item['indent']}- {names}: {item['text']}")
            inside = True
        else:
            if inside and line.strip() and not line.startswith(" "):
                lines.append("")
            inside = inside and line.startswith(" ")
            lines.append(line)
    return "\n".join(lines)


def apart(text: str, known: set[str]) -> str:
    """Two items that share a line, each on a line of its own."""
    names = "|".join(map(re.escape, sorted(known)))
    return re.sub(rf"(?m)^((?:{names}): .*?[.?]) (?=(?:{names}): )", r"\1\n", text) if names else text
