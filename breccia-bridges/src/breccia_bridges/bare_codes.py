"""The warning about codes that `load_safetensors` gives as plain arrays, as another program stored them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from breccia import CorruptFileError, DialectError, DialectWarning, UnsupportedError
from breccia.backend import registry
from breccia.internal import abbreviated

from .configs import Config, owners
from .recognition import recognized
from .refusals import is_coded
from .safetensors_file import Container, shown

_AS_STORED = "load_safetensors gives them as they are stored"


def warn_of_codes(
    path: Path,
    containers: Sequence[Container],
    listed: Mapping[str, tuple[Container, Config | None]],
    loaded: Iterable[str],
) -> None:
    """Warn the caller of `load_safetensors` if plain tensors among the loaded ones are codes of a dialect.

    listed: all tensors. Only headers and configs are read, and nothing where no loaded tensor has a dtype of codes.
    """
    plain = [name for name in loaded if name in listed and listed[name][1] is None]
    if not any(is_coded(listed[name][0].entries[name]) for name in plain):
        return
    ours = owners(name for name, (_, config) in listed.items() if config is not None)
    try:
        values = recognized(path, containers, ours=ours)
    except (CorruptFileError, DialectError, UnsupportedError) as e:
        if e.found.get("format") != registry().dialects["unknown"].title:
            said = f"{shown(path)} has codes and scales of another program, and {_AS_STORED}."
            _warn(f"{said} breccia.bridges.load_checkpoint would decode them, but for this: {e}")
        return
    stored = {part: value for value in values.values() for part in value.parts.values()}
    bare = [name for name in plain if name in stored]
    if bare:
        titles = " and ".join(dict.fromkeys(stored[name].dialect.title for name in bare))
        _warn(
            f"{shown(path)}: {abbreviated(bare)} are codes and scales of another program ({titles}), and {_AS_STORED}. "
            "breccia.bridges.load_checkpoint gives the values under the names of the model."
        )


def _warn(message: str) -> None:
    """Warn where `load_safetensors` was called."""
    warnings.warn(message, DialectWarning, stacklevel=4)
