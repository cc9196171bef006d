"""What the program writes to pipes and files: no trailing blanks, and no write error that is lost.

On a terminal nothing changes. Elsewhere a `Piped` stands in place of `sys.stdout` and `sys.stderr` while a command runs, so
that this holds for all commands, however they print.
"""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO

#: Sequences that change the color.
_COLORS = r"(?:\x1b\[[\d;]*m)*"
#: Blanks at the end of a line, and at the end of a text, whose line may go on.
_TRAILING = re.compile(rf"(?<![ \t])[ \t]++({_COLORS})(?=\r?\n)")
_OPEN = re.compile(rf"(?<![ \t])[ \t]++({_COLORS})\Z")


class OutputError(Exception):
    """Standard output cannot be written. No OSError, which Typer and Rich would answer with an exit of their own."""

    def __init__(self, reason: OSError) -> None:
        why = "it is closed" if reason.errno == errno.EBADF else reason.strerror or str(reason)
        super().__init__(f"cannot write to standard output: {why}; send it to a file or a program that takes it.")
        self.found = {"reason": why}
        self.nobody_reads = reason.errno == errno.EPIPE


class Piped(io.TextIOBase):
    """A text stream without blanks at the end of lines.

    stream: None for a standard output that is closed. needed: is a write error an OutputError? Else the stream writes nothing
        from then on.
    """

    def __init__(self, stream: TextIO | None, needed: bool) -> None:
        self._stream, self._needed, self._pending = stream, needed, ""

    def write(self, text: str) -> int:
        """Write all but blanks that may turn out to end a line; these wait for the next text."""
        stripped = _TRAILING.sub(r"\1", self._pending + text)
        match = _OPEN.search(stripped)
        self._pending = match[0] if match else ""
        self._send(stripped[: match.start()] if match else stripped)
        return len(text)

    def flush(self) -> None:
        """Write what the stream below holds."""
        self._send("")

    def finish(self) -> None:
        """Write everything; no text follows."""
        colors, self._pending = self._pending.lstrip(" \t"), ""
        if colors:
            self._send(colors)
        self.flush()

    def _send(self, text: str) -> None:
        try:
            if self._stream is None:
                if text:
                    raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            elif text:
                self._stream.write(text)
            else:
                self._stream.flush()
        except OSError as e:
            self._abandon()
            if self._needed:
                raise OutputError(e) from e

    def _abandon(self) -> None:
        """Send what the stream below still holds nowhere; Python would fail to write it when it exits."""
        if self._stream is not None:
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("a closed stream has no descriptor")
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self._stream, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self._stream, "errors", None) or "backslashreplace"

    def __getattr__(self, name: str) -> Any:
        """Everything else, such as `buffer`, is the stream's."""
        return getattr(self.__dict__["_stream"], name)


@contextmanager
def streams(failed: Callable[[OutputError], NoReturn]) -> Generator[None]:
    """Put `Piped` streams in place of those that are no terminals, and write all before the old ones return.

    If nobody reads standard output any more (`| head`), end as other programs do; for other write errors call `failed`.
    """
    before = sys.stdout, sys.stderr
    for stream in before:  # do not fail on characters that the stream's encoding lacks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout = _piped(sys.stdout, needed=True)
    sys.stderr = sys.stderr and _piped(sys.stderr, needed=False)
    try:
        try:
            yield
        except SystemExit:
            _finish(sys.stdout)
            raise
        except OutputError:
            raise
        except BaseException:
            with suppress(OutputError):  # there is another error to report
                _finish(sys.stdout)
            raise
        else:
            _finish(sys.stdout)
    except OutputError as e:
        if e.nobody_reads:
            _finish(sys.stderr)
            _end_as_by_sigpipe()
        failed(e)
    finally:
        _finish(sys.stderr)
        sys.stdout, sys.stderr = before


def _piped(stream: TextIO | None, needed: bool) -> Any:
    return stream if stream is not None and stream.isatty() else Piped(stream, needed)


def _finish(stream: Any) -> None:
    if isinstance(stream, Piped):
        stream.finish()


def _end_as_by_sigpipe() -> NoReturn:
    """End as programs do that ignore no signals: killed by SIGPIPE, which shells report as 141."""
    number = getattr(signal, "SIGPIPE", None)
    if number is not None:
        with suppress(ValueError):  # not in the main thread
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
    sys.exit(141)


def reserve_descriptors() -> None:
    """Open the null device for closed descriptors 0 to 2, so that no file that a command opens gets one of these numbers."""
    with suppress(OSError):
        while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(opened)
