"""The command line, called in this process."""

from __future__ import annotations

from collections.abc import Callable

#: Calls the program with arguments and returns (exit code, standard output, standard error). The fixture `run` is one.
Run = Callable[..., tuple[int, str, str]]
