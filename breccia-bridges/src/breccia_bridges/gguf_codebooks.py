"""IQ1 to IQ3 of GGUF, whose elements are entries of tables of vectors: the library `gguf`, which has the tables, decodes them.

Four or eight elements are an entry of a table, so that no code belongs to one element, and no ScaledTensor holds them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from breccia import UnsupportedError
from breccia.internal import install, printable

from .safetensors_file import shown


def decoded(path: Path, name: str, kind: str, blocks: np.ndarray) -> np.ndarray:
    """The values of rows of blocks, in FP32. Raises UnsupportedError without the library."""
    try:
        from gguf import GGMLQuantizationType, dequantize
    except ImportError as e:
        raise UnsupportedError(
            f"{shown(path)}: {printable(name)} is {kind}, which breccia decodes with the tables of the library gguf: "
            f"{install('breccia-bridges[gguf]')}.",
            path=str(path),
            name=name,
            type=kind,
        ) from e
    return np.asarray(dequantize(blocks, GGMLQuantizationType[kind]))
