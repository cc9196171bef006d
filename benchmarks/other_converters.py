"""Converters of other libraries, each run as a program: `python other_converters.py NAME SOURCE DESTINATION`.

llama.cpp runs where BRECCIA_LLAMA names the folder of its libraries; see generators.py. mlx_lm is run as its own program.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from generators import FOLDER

#: LLAMA_FTYPE_MOSTLY_Q4_0, in llama.h.
_Q4_0 = 2


class _Parameters(ctypes.Structure):
    """llama_model_quantize_params: threads, the type of the file, and more; larger than theirs, and passed in memory."""

    _fields_ = (("words", ctypes.c_int32 * 64),)


def llama_cpp(source: str, destination: str) -> None:
    """A GGUF file as Q4_0, by the function that llama-quantize calls."""
    folder = Path(os.environ[FOLDER])
    _, _, llama = (
        ctypes.CDLL(str(next(folder.glob(f"lib{name}.*so"))), mode=ctypes.RTLD_GLOBAL)
        for name in ("ggml-base", "ggml", "llama")
    )
    llama.llama_model_quantize_default_params.restype = _Parameters
    llama.llama_model_quantize.argtypes = ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_Parameters)
    llama.llama_model_quantize.restype = ctypes.c_uint32
    parameters = llama.llama_model_quantize_default_params()
    parameters.words[0], parameters.words[1] = len(os.sched_getaffinity(0)), _Q4_0
    if llama.llama_model_quantize(os.fsencode(source), os.fsencode(destination), ctypes.byref(parameters)):
        sys.exit(f"llama_model_quantize failed for {source}")


def compressed_tensors(source: str, destination: str) -> None:
    """A checkpoint of DeepSeek's FP8, decoded to BF16."""
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer, convert_checkpoint

    convert_checkpoint(source, destination, FP8BlockDequantizer.from_pretrained(source))


def in_memory(source: str, recipe: str, rounds: str, threads: str) -> None:
    """Print the least seconds of a cast of a checkpoint's largest tensor, decoded first where it is quantized; those of the
    processors at that; and its bytes.
    """
    import time

    import ml_dtypes

    import breccia
    from breccia_bridges.source import Source

    breccia.set_num_threads(int(threads))
    values = Source.open(Path(source)).values
    value = max(values.values(), key=lambda value: value.nbytes if "embed" not in value.name else 0)
    x: Any = value.loaded() if value.is_scaled else value.plain().reshape(value.shape).copy()
    if value.stored_as == "BF16":
        x = x.view(ml_dtypes.bfloat16)
    taken: list[tuple[float, float]] = []
    for _ in range(int(rounds)):
        start, cpu = time.perf_counter(), time.process_time()
        breccia.cast(breccia.dequantize(x) if value.is_scaled else x, recipe)
        taken.append((time.perf_counter() - start, time.process_time() - cpu))
    print(*min(taken), value.nbytes)


if __name__ == "__main__":
    {"llama.cpp": llama_cpp, "compressed-tensors": compressed_tensors, "in-memory": in_memory}[sys.argv[1]](*sys.argv[2:])
