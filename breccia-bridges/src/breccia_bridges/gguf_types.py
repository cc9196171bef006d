"""The types of GGUF tensors: their numbers, names, and how many bytes hold how many elements.

A type other than a plain number stores each row in blocks: `length` elements along the last axis in `size` bytes.

Source: ggml (ggml.h, ggml-common.h), as of gguf 0.19.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Type(NamedTuple):
    """A type of tensors: blocks of `length` elements in `size` bytes. dtype: of a plain number, as safetensors names it."""

    name: str
    length: int
    size: int
    dtype: str = ""


TYPES: dict[int, Type] = {
    0: Type("F32", 1, 4, "F32"),
    1: Type("F16", 1, 2, "F16"),
    2: Type("Q4_0", 32, 18),
    3: Type("Q4_1", 32, 20),
    6: Type("Q5_0", 32, 22),
    7: Type("Q5_1", 32, 24),
    8: Type("Q8_0", 32, 34),
    9: Type("Q8_1", 32, 36),
    10: Type("Q2_K", 256, 84),
    11: Type("Q3_K", 256, 110),
    12: Type("Q4_K", 256, 144),
    13: Type("Q5_K", 256, 176),
    14: Type("Q6_K", 256, 210),
    15: Type("Q8_K", 256, 292),
    16: Type("IQ2_XXS", 256, 66),
    17: Type("IQ2_XS", 256, 74),
    18: Type("IQ3_XXS", 256, 98),
    19: Type("IQ1_S", 256, 50),
    20: Type("IQ4_NL", 32, 18),
    21: Type("IQ3_S", 256, 110),
    22: Type("IQ2_S", 256, 82),
    23: Type("IQ4_XS", 256, 136),
    24: Type("I8", 1, 1, "I8"),
    25: Type("I16", 1, 2, "I16"),
    26: Type("I32", 1, 4, "I32"),
    27: Type("I64", 1, 8, "I64"),
    28: Type("F64", 1, 8, "F64"),
    29: Type("IQ1_M", 256, 56),
    30: Type("BF16", 1, 2, "BF16"),
    34: Type("TQ1_0", 256, 54),
    35: Type("TQ2_0", 256, 66),
    39: Type("MXFP4", 32, 17),
    40: Type("NVFP4", 64, 36),
    41: Type("Q1_0", 128, 18),
}

#: The types by their names.
NAMED = {one.name: one for one in TYPES.values()}

#: Types whose elements are entries of tables of vectors: they are decoded when they are read, since no codes of elements exist.
DECODED = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")

#: What the metadata of a GGUF file say of a value that is the transpose of its tensor of blocks, by its name.
TRANSPOSED = "transposed"


def type_bytes(name: str, shape: tuple[int, ...]) -> int:
    """The bytes of a tensor. shape: of its elements; blocks divide the last axis."""
    kind = NAMED[name]
    return math.prod(shape) // kind.length * kind.size
