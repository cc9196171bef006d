"""Digests by which bytes that were written are known again: XXH3 of 128 bits where `xxhash` is installed, else SHA-256.

They tell bytes that a disk has lost or changed, and are compared with nothing that others give. Each names its function, so
that a process without xxhash can go on with what one that has it has written, and the other way round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from typing import Any

#: Before the hexadecimal digits of XXH3; those of SHA-256 stand alone.
_XXH3 = "xxh3_128:"


class Hash:
    """The digest of bytes that come in pieces. is_quick: it takes less time than to have another thread compute it."""

    def __init__(self, function: Any, prefix: str = "") -> None:
        self._hash, self._prefix, self.is_quick = function(), prefix, bool(prefix)

    @classmethod
    def best(cls) -> Hash:
        """The quickest that is installed."""
        return cls(xxh3(), _XXH3) if xxh3() else cls(hashlib.sha256)

    @classmethod
    def like(cls, digest: str) -> Hash | None:
        """One of the same function as a digest; None where its library is not installed."""
        if not digest.startswith(_XXH3):
            return cls(hashlib.sha256)
        return cls.best() if xxh3() else None

    @classmethod
    def agrees(cls, digest: str, pieces: Iterable[Any]) -> bool:
        """Is a digest that of these pieces? Not where the library of its function is not installed."""
        function = cls.like(digest)
        return function is not None and function.of(pieces) == digest

    def update(self, raw: Any) -> None:
        self._hash.update(raw)

    def of(self, pieces: Iterable[Any]) -> str:
        """The digest of these pieces, after those before."""
        for piece in pieces:
            self.update(piece)
        return self.text

    @property
    def text(self) -> str:
        """The digest of all pieces so far."""
        return self._prefix + self._hash.hexdigest()


@cache
def xxh3() -> Any:
    """XXH3 of 128 bits; None without the library."""
    try:
        from xxhash import xxh3_128
    except ImportError:
        return None
    return xxh3_128
