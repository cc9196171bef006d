"""Weights by the own code of other libraries, for bench_board.py: each decodes what it has quantized, and names its format.

A function takes a weight, FP32 (rows, columns), and the importance of its columns, and returns the decoded weight and the spec
of the recipe that has the format's codes and scales, from which sizes are counted. GPTQ of other libraries takes inputs of a
layer, (sequences, tokens, columns), instead of the importance.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

#: (decoded, spec of the format) of a weight and the importance of its columns, which may be None, or the inputs of its layer.
Quantize = Callable[[torch.Tensor, Any], tuple[torch.Tensor, str]]
#: Where llama.cpp's libraries are, as bench_generation.py has it.
LLAMA = "BRECCIA_LLAMA"
#: ggml_type of ggml.h, and the recipe of the format.
GGML = {
    "Q4_0": (2, "q4_0", 32),
    "Q4_1": (3, "q4_1", 32),
    "Q5_0": (6, "q5_0", 32),
    "Q4_K": (12, "q4_k", 256),
    "IQ4_NL": (20, "gguf,type=IQ4_NL", 32),
}
#: What llama-quantize takes where a row is no multiple of the block: `tensor_type_fallback` of llama-quant.cpp.
FALLBACK = {"Q4_K": "Q5_0"}


def torchao_hqq(group: int) -> Quantize:
    """torchao's HQQ, with scales and zero-points in BF16, as its INT4 layers have them."""
    from torchao.quantization.quant_primitives import _choose_qparams_and_quantize_affine_hqq as choose

    def quantize(weight: torch.Tensor, importance: Any) -> tuple[torch.Tensor, str]:
        codes, scale, zero, _ = choose(weight, 4, group, compute_dtype=torch.bfloat16, device="cpu", raw_output=True)
        codes, scale, zero = (part.float().reshape(-1, n) for part, n in ((codes, group), (scale, 1), (zero, 1)))
        spec = f"int4,symmetric=false,group_size={group},scale_dtype=bf16,offset=float_zero_point"
        return ((codes - zero) * scale).reshape(weight.shape), spec

    return quantize


def torchao_nvfp4(weight: torch.Tensor, importance: Any) -> tuple[torch.Tensor, str]:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    scale = per_tensor_amax_to_scale(weight.abs().max())
    return NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale).dequantize(torch.float32), "nvfp4"


def torchao_mxfp4(weight: torch.Tensor, importance: Any) -> tuple[torch.Tensor, str]:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32).dequantize(torch.float32), "mxfp4"


def mlx(group: int, mode: str = "affine") -> Quantize:
    """mlx.core.quantize; scales and biases in FP16, the dtype of a converted model."""
    import mlx.core as mx

    specs = {
        "affine": f"int4,group_size={group},offset=bias,scale_dtype=fp16",
        "mxfp4": "mxfp4",
        "nvfp4": "nvfp4,two_level=false",
    }

    def quantize(weight: torch.Tensor, importance: Any) -> tuple[torch.Tensor, str]:
        x = mx.array(weight.numpy()).astype(mx.float16)
        parts = mx.quantize(x, group_size=group, bits=4, mode=mode)
        decoded = mx.dequantize(*parts, group_size=group, bits=4, mode=mode).astype(mx.float32)
        return torch.from_numpy(np.array(decoded)), specs[mode]

    return quantize


def compressed_tensors(group: int) -> Quantize:
    """The least and largest value of each group: `calculate_qparams`, `fake_quantize`."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    def quantize(weight: torch.Tensor, importance: Any) -> tuple[torch.Tensor, str]:
        size = group if weight.shape[1] % group == 0 else 32
        args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=size)
        blocks = weight.reshape(len(weight), -1, size)
        scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
        return fake_quantize(weight, scale.half().float(), zero, args), f"int4,group_size={size}"

    return quantize


def auto_round(kind: str, group: int) -> Quantize:
    """AutoRound without tuning (iters=0): its search for scales, weighed by the importance of columns. kind: its data type."""
    from auto_round.data_type import int as integers
    from auto_round.data_type import mxfp, nvfp

    ways = {
        "int": lambda w, q: integers.quant_tensor_opt_rtn_sym(w, 4, _group(w, group), imatrix=q)[0],
        "nvfp4": lambda w, q: nvfp.opt_rtn_fast_nvfp4(w, 4, 16, imatrix=q)[0],
        "mxfp4": lambda w, q: mxfp.quant_mx_opt_rtn(w, 4, 32, data_type="mx_fp4", imatrix=q)[0],
    }

    def quantize(weight: torch.Tensor, importance: Any) -> tuple[torch.Tensor, str]:
        found = ways[kind](weight.clone(), None if importance is None else importance.clone())
        return found, f"int4,group_size={_group(weight, group)}" if kind == "int" else kind

    return quantize


def _group(weight: torch.Tensor, group: int) -> int:
    return group if weight.shape[1] % group == 0 else 32


def llm_compressor(kind: str, observer: str) -> Quantize:
    """Scales by an observer of llm-compressor, a search for the least error. kind: int4 in groups of 32, or nvfp4."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    def quantize(weight: torch.Tensor, importance: Any) -> tuple[torch.Tensor, str]:
        args, found = _observed(kind, observer, weight, importance)
        return fake_quantize(weight, found["scale"], found["zero_point"], args, global_scale=found["global_scale"]), COMPRESSED[
            kind
        ]

    return quantize


def llm_compressor_gptq(kind: str, observer: str) -> Quantize:
    """llm-compressor's GPTQ with the defaults of its GPTQModifier, under scales by an observer."""
    from compressed_tensors.quantization import ActivationOrdering
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
    from llmcompressor.modifiers.gptq.helpers import accumulate_hessian, make_empty_hessian

    def quantize(weight: torch.Tensor, inputs: Any) -> tuple[torch.Tensor, str]:
        layer = _linear(weight)
        moment, count = accumulate_hessian(inputs, layer, make_empty_hessian(layer), torch.zeros(()))
        args, found = _observed(kind, observer, weight, inputs.reshape(-1, inputs.shape[-1]).square().mean(0))
        args.actorder = ActivationOrdering.STATIC
        scale, zero, coarse = (None if part is None else part[None] for part in found.values())
        coarse = None if coarse is None else coarse.reshape(-1)
        decoded, _, _ = quantize_weight(weight.clone()[None], moment[None] / count, scale, zero, coarse, args)
        return decoded[0], COMPRESSED[kind]

    return quantize


#: The recipes of what llm-compressor writes.
COMPRESSED = {"int4": "int4,group_size=32", "nvfp4": "nvfp4"}


def _observed(kind: str, observer: str, weight: torch.Tensor, importance: Any) -> tuple[Any, dict[str, Any]]:
    """The arguments of the format, and scale, zero-point and tensor-level scale of a weight; scales of INT4 in FP16."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from llmcompressor.observers import Observer

    if kind == "int4":
        args: Any = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    else:
        args = preset_name_to_scheme("NVFP4A16", ["Linear"]).weights
    observing: Any = Observer.load_from_registry(observer, base_name="weight", args=args)
    if observer == "imatrix_mse":  # what its hook on the layer sums
        observing._imatrix_sum, observing._imatrix_count = importance, torch.tensor(1)
    found = observing(weight).get_qparams()
    scale = found["scale"].half().float() if kind == "int4" else found["scale"]
    return args, {"scale": scale, "zero_point": found["zero_point"], "global_scale": found["global_scale"]}


def gptq_model(group: int) -> Quantize:
    """GPTQModel's GPTQ with the defaults of its QuantizeConfig but the group; scales in FP16, as it stores them."""
    from gptqmodel.quantization import GPTQ, QuantizeConfig

    def quantize(weight: torch.Tensor, inputs: Any) -> tuple[torch.Tensor, str]:
        worker = GPTQ(_linear(weight), QuantizeConfig(bits=4, group_size=group))
        worker.quantizer.configure(perchannel=True)
        for x in inputs:
            worker.add_batch(x[None], None)
        decoded, scale, _, groups = worker.quantize()[:4]
        scale = scale[:, groups.long()]
        return (decoded / scale).round() * scale.half().float(), f"int4,group_size={group}"

    return quantize


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    return layer


def ggml(kind: str) -> Quantize:
    """ggml_quantize_chunk and dequantize_row of llama.cpp; the importance is its imatrix."""

    def quantize(weight: torch.Tensor, importance: Any) -> tuple[torch.Tensor, str]:
        of = kind if weight.shape[1] % GGML[kind][2] == 0 else FALLBACK[kind]
        return _by_ggml(of, weight, importance), GGML[of][1]

    _library()
    return quantize


def _by_ggml(kind: str, weight: torch.Tensor, importance: Any) -> torch.Tensor:
    library, (number, _, _) = _library(), GGML[kind]
    rows, columns = weight.shape
    x = np.ascontiguousarray(weight.numpy(), np.float32)
    weights = None if importance is None else np.ascontiguousarray(importance.numpy(), np.float32)
    data = np.empty(rows * library.ggml_row_size(number, columns), np.uint8)
    library.ggml_quantize_chunk(
        number, x.ctypes.data, data.ctypes.data, 0, rows, columns, None if weights is None else weights.ctypes.data
    )
    decoded = np.empty_like(x)
    decode = getattr(library, f"dequantize_row_{kind.lower().replace('_k', '_K')}")
    decode.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    decode(data.ctypes.data, decoded.ctypes.data, x.size)
    return torch.from_numpy(decoded)


@cache
def _library() -> Any:
    folder = os.environ.get(LLAMA)
    if not folder:
        raise ImportError(f"{LLAMA} names no folder of llama.cpp's libraries")
    library = ctypes.CDLL(str(Path(folder, "libggml-base.so").resolve()))
    library.ggml_row_size.restype, library.ggml_row_size.argtypes = ctypes.c_size_t, (ctypes.c_int, ctypes.c_int64)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = (ctypes.c_int, pointer, pointer, number, number, number, pointer)
    library.ggml_version.restype = ctypes.c_char_p
    return library


def llama_version() -> str:
    return _library().ggml_version().decode()
