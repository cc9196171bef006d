"""GGUF files that were cut at any byte, as split(1) cuts: `model.gguf.part00`, `.part1of3`, `-split-a`, `.aa`.

Only the first part has a header, and no part can be read alone; llama.cpp's own parts (`-00001-of-00003.gguf`) can be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from breccia import CorruptFileError, UnsupportedError
from breccia.internal import abbreviated, printable

from .gguf_header import is_gguf, read_header
from .safetensors_file import regular, shown

#: Numbers have a mark before them or two digits; letters are split(1)'s, which start with a.
_PART = re.compile(r"(.+\.gguf)([._-]?(?:part|split)[._-]?|[._-]?)(\d{1,5}|[a-z]{1,2})(of\d{1,5})?", re.DOTALL)
#: More missing parts are not listed: a name may have any number.
_MOST = 1000


class _Part(NamedTuple):
    """The name of a part: that of the whole file, a mark, the number as text, and "of3" where it says how many there are."""

    whole: str
    mark: str
    text: str
    end: str

    @property
    def number(self) -> int:
        if self.text.isdigit():
            return int(self.text)
        return sum((ord(letter) - ord("a")) * 26**n for n, letter in enumerate(reversed(self.text)))

    def named(self, number: int) -> str:
        """The name of another part."""
        if self.text.isdigit():
            text = f"{number:0{len(self.text)}}"
        else:
            text = "".join(chr(ord("a") + number // 26**n % 26) for n in reversed(range(len(self.text))))
        return f"{self.whole}{self.mark}{text}{self.end}"

    @property
    def family(self) -> tuple[str, str, str, bool]:
        return self.whole, self.mark, self.end, self.text.isdigit()


def refuse_raw_parts(files: Iterable[Path]) -> None:
    """Raise UnsupportedError where one of these files is a part of a GGUF file, which says how to join them.

    Raises CorruptFileError, naming them, where parts are missing.
    """
    for file in files:
        part = _part(file.name)
        if part is not None and _wrong(file, file.stat().st_size):
            _refuse(file, part)


def _part(name: str) -> _Part | None:
    found = _PART.fullmatch(name)
    if found is None:
        return None
    part = _Part(found[1], found[2], found[3], found[4] or "")
    is_marked = part.mark.strip("._-") != "" or part.end != ""
    return part if is_marked or (len(part.text) > 1 and (part.text.isdigit() or part.text[0] == "a")) else None


def _refuse(path: Path, part: _Part) -> None:
    parts = {part.number: path}
    for other in path.parent.iterdir():
        one = _part(other.name)
        if one is not None and one.family == part.family and other.is_file():
            parts[one.number] = other
            part = min(part, one, key=lambda one: len(one.text))  # 9 and 10 may have as many digits as they need
    first = parts[min(parts)]
    start = 1 if part.end or (1 in parts and 0 not in parts and is_gguf(first)) else 0
    stop = int(part.end[2:]) if part.end else max(parts)
    missing = [part.named(n) for n in range(start, min(stop, start + _MOST) + 1) if n not in parts]
    whole = shown(part.whole)
    if missing:
        raise CorruptFileError(
            f"{shown(path)} is a part of {whole}, of which {abbreviated(map(shown, missing))} "
            f"{'is' if len(missing) == 1 else 'are'} missing. Download {'it' if len(missing) == 1 else 'them'} into the same "
            f"folder, and join all parts: {_joining(part, range(start, stop + 1))}.",
            path=str(path),
            missing=missing,
        )
    if wrong := _wrong(first, sum(one.stat().st_size for one in parts.values())):
        raise CorruptFileError(
            f"{shown(path)} is a part of {whole}; with all {len(parts)} parts joined, {wrong} The last one is missing, or one "
            "of them is damaged.",
            path=str(path),
        )
    raise UnsupportedError(
        f"{shown(path)} is one of {len(parts)} parts into which {whole} was cut, none of which can be read alone. Join them, "
        f"and give that file: {_joining(part, parts)}.",
        path=str(path),
        files=[parts[n].name for n in sorted(parts)],
    )


def _wrong(path: Path, size: int) -> str:
    """What is wrong with a file of so many bytes that starts as this one does; "" for a GGUF file."""
    try:
        with regular(path) as (file, _):
            read_header(path, file, size)
    except CorruptFileError as e:
        return str(e).partition(": ")[2]
    return ""


def _joining(part: _Part, numbers: Iterable[int]) -> str:
    """A command that joins all parts: by a pattern, where its alphabetic order is theirs."""
    names = [part.named(n) for n in sorted(numbers)]
    stem = quote(f"{part.whole}{part.mark}")
    listed = f"{stem}*{quote(part.end) if part.end else ''}" if names == sorted(names) else " ".join(map(quote, names))
    return printable(f"cat {listed} > {quote(part.whole)}")
