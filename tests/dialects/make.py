"""Checkpoints in the dialects of other libraries, written and decoded by the libraries' own code.

    python tests/dialects/make.py DATA                                      # all of them; `make dialects` does it
    python tests/dialects/make.py DATA --only 'gptq_*' --rows 128 --columns 256
    python tests/dialects/make.py DATA --golden tests/golden/dialects       # small ones, and archives of them

DATA/<name> is a checkpoint as the library saves it. DATA/expected/<name>.safetensors has the values that the library's own
dequantizer computes for it, by the names of the weights; its metadata say which library that is. Where a library has no packer
that runs on a CPU, or no dequantizer, `packed_by` or `decoded_by` is "facts": the documented packing, or the definition.

A checkpoint has two matrices, `UP` of (rows, columns) and `DOWN` of (columns, rows), an embedding and a norm in BF16, and where
the dialect has them fused experts. Two runs write the same tensors; only the order of metadata in a file may differ.

Runs on a CPU (x86-64 Linux for GGUF), in the environment of requirements.txt. `decode(name, folder)` decodes any folder of a
dialect with the library's code.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fnmatch
import importlib
import importlib.metadata
import io
import json
import logging
import lzma
import os
import shutil
import sys
import tarfile
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# The libraries say much about themselves.
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from dialect_values import digest  # noqa: E402

Tensors = dict[str, torch.Tensor]

LAYER = "model.layers.0."
UP, DOWN = LAYER + "mlp.up_proj.weight", LAYER + "mlp.down_proj.weight"
EXPERTS = LAYER + "mlp.experts.gate_up_proj"
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
#: A matrix whose last blocks are partial, as DeepSeek-V3's own.
PARTIAL = LAYER + "self_attn.kv_a_proj_with_mqa.weight"
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
#: Groups and blocks of the dialects that have them.
GROUP = 128


class Size(NamedTuple):
    """The sizes of the model: `UP` is (rows, columns), `DOWN` (columns, rows)."""

    rows: int
    columns: int
    vocabulary: int = 64

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.columns,
            "intermediate_size": self.rows,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": self.vocabulary,
            "torch_dtype": "bfloat16",
        }

    def weights(self, shift: float = 0.0) -> Tensors:
        """The model in FP32 with BF16 values: some outlier columns, rows of different size, one row of zeros.

        shift: added to the matrices, for asymmetric dialects.
        """
        g = torch.Generator().manual_seed(20261126)
        out: Tensors = {}
        for name, shape in ((UP, (self.rows, self.columns)), (DOWN, (self.columns, self.rows))):
            w = torch.randn(shape, generator=g) * 0.02
            w *= torch.exp2(torch.randint(-3, 4, (shape[0], 1), generator=g).float())
            w[:, ::67] *= 8
            w[5] = 0
            out[name] = (w + shift).to(BF16).float()
        out[EXPERTS] = (torch.randn((2, 64, self.columns), generator=g) * 0.03).to(BF16).float()
        out[EMBEDDING] = torch.randn((self.vocabulary, self.columns), generator=g).to(BF16)
        out[NORM] = torch.ones(self.columns, dtype=BF16)
        return out


#: The default size, and the smallest one with two groups of 64 in a row.
DEFAULT, SMALL = Size(512, 256), Size(64, 128, 4)
#: The smallest ones with one group or block of 128 in a row, and with two.
SQUARE, GROUPS = Size(128, 128, 4), Size(128, 256, 4)


@dataclass(frozen=True)
class Dialect:
    """A checkpoint of a library.

    library: the distribution whose version is recorded. make: writes a folder. decode: the values of a folder.
    packed_by, decoded_by: "library", or "facts": the documented packing, or the definition of the values.
    smallest: the size of its golden file, the smallest that its groups and blocks allow.
    """

    name: str
    library: str
    make: Callable[[Path, Size], None]
    decode: Callable[[Path], Tensors]
    packed_by: str = "library"
    decoded_by: str = "library"
    smallest: Size = SMALL

    @property
    def is_golden(self) -> bool:
        """Is there a golden file of it? Files of GGUF and of pickle are not in safetensors."""
        return not self.name.startswith("gguf_") and not self.name.endswith("_bin")

    @property
    def version(self) -> str:
        """Of the library; of those that are only unpacked, by the name of their folder."""
        if self.library in SOURCES:
            return source_folder(self.library).name.removeprefix(f"{self.library}-")
        return importlib.metadata.version(self.library)


DIALECTS: dict[str, Dialect] = {}


def add(name: str, library: str, make: Any, decode: Any, **options: Any) -> None:
    """Declare a checkpoint."""
    DIALECTS[name] = Dialect(name, library, make, decode, **options)


def unquantized(w: Tensors) -> Tensors:
    """What no dialect quantizes."""
    return {EMBEDDING: w[EMBEDDING], NORM: w[NORM]}


def save(
    folder: Path,
    size: Size,
    tensors: Mapping[str, torch.Tensor],
    quantization: Mapping[str, Any],
    shards: Sequence[Sequence[str]] = (),
    metadata: Mapping[str, str] = types.MappingProxyType({}),
    **config: Any,
) -> None:
    """Write a folder: config.json, and one file, or one for each list of names in `shards` and their index."""
    folder.mkdir(parents=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = {**metadata, "format": "pt"}
    if not shards:
        save_file(tensors, folder / "model.safetensors", metadata)
    else:
        files: dict[str, str] = {}
        for i, names in enumerate(shards):
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            save_file({name: tensors[name] for name in names}, folder / file, metadata)
            files |= {name: file for name in names}
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": files})
    write_json(folder / "config.json", {**size.config, **config, "quantization_config": quantization})


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def load(folder: Path) -> tuple[Tensors, dict[str, str]]:
    """(the tensors of all files, their metadata)."""
    tensors: Tensors = {}
    metadata: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            metadata |= file.metadata() or {}
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    return tensors, metadata


def config_of(folder: Path) -> dict[str, Any]:
    """The config.json of a folder."""
    return json.loads((folder / "config.json").read_text())


def size_of(folder: Path) -> Size:
    """The size of the model in a folder."""
    config = config_of(folder)
    return Size(config["intermediate_size"], config["hidden_size"], config["vocab_size"])


def stems(tensors: Mapping[str, torch.Tensor], end: str) -> list[str]:
    """The beginnings of the names that end so."""
    return [name.removesuffix(end) for name in tensors if name.endswith(end)]


def repeated(scale: torch.Tensor, rows: int, columns: int, block: tuple[int, int] = (GROUP, GROUP)) -> torch.Tensor:
    """Scales of blocks (..., m, k), repeated for each element (..., rows, columns)."""
    return scale.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]


def to_fp8(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E4M3 codes of w / scale."""
    return (w / scale).clamp(-448, 448).to(FP8)


# ---------------------------------------------------------------------------------- libraries whose source is only unpacked

#: Neither builds without a compiler or CUDA, and their Python is all that is used: variables with their unpacked folders.
SOURCES = {"gptqmodel": "GPTQMODEL_SOURCE", "autoawq": "AUTOAWQ_SOURCE"}


def source_folder(library: str) -> Path:
    """The unpacked source of a library. Raises ImportError, naming the variable, if it is not there."""
    folder = os.environ.get(SOURCES[library]) or next(iter(sorted(unpacked().glob(f"{library}-*/"))), None)
    if folder is None:
        raise ImportError(f"{library}: set {SOURCES[library]} to the folder of its unpacked source archive")
    return Path(folder).resolve()


def unpacked() -> Path:
    """Where `make dialects` unpacks archives."""
    return Path(sys.prefix) / "unpacked"


# ------------------------------------------------------------------------------------------------------- FP8, transformers


def _fp8_of_transformers() -> Any:
    return importlib.import_module("transformers.integrations.finegrained_fp8")


def _quantized_blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of blocks of 128 x 128, by transformers."""
    config = types.SimpleNamespace(weight_block_size=[GROUP, GROUP], scale_fmt=None)
    op = _fp8_of_transformers().Fp8Quantize(types.SimpleNamespace(quantization_config=config))
    parts = op.convert({"x.weight": w})
    return parts["x.weight"], parts["x.weight_scale_inv"]


def make_deepseek_v3(folder: Path, size: Size, is_e8m0: bool = False) -> None:
    """Block FP8, with fused experts, a matrix whose last blocks are partial, and a scale in another file than its codes."""
    w = size.weights()
    tensors = unquantized(w)
    for name in (UP, DOWN, EXPERTS):
        rows, columns = w[name].shape[-2:]
        if name == EXPERTS:
            scale = w[name].reshape(2, 1, rows, columns // GROUP, GROUP).abs().amax((2, 4)) / 448
            codes = (w[name] / repeated(scale, rows, columns)).to(FP8)
        else:
            codes, scale = _quantized_blocks(w[name])
        if is_e8m0:
            scale = torch.exp2(torch.ceil(torch.log2(scale.float().clamp_min(2.0**-120))))
            codes = to_fp8(w[name], repeated(scale, rows, columns))
            scale = scale.to(torch.float8_e8m0fnu)
        tensors[name], tensors[name + "_scale_inv"] = codes, scale
    g = torch.Generator().manual_seed(3)
    rows, columns = size.rows + 64, size.columns + 64
    w_partial = torch.randn((rows, columns), generator=g) * 0.02
    scale = torch.rand((-(-rows // GROUP), -(-columns // GROUP)), generator=g) * 1e-3 + 1e-4
    scale = torch.exp2(torch.round(torch.log2(scale))) if is_e8m0 else scale
    tensors[PARTIAL] = to_fp8(w_partial, repeated(scale, rows, columns))
    tensors[PARTIAL + "_scale_inv"] = scale.to(torch.float8_e8m0fnu) if is_e8m0 else scale
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [GROUP, GROUP],
        **({"scale_fmt": "ue8m0"} if is_e8m0 else {}),
    }
    second = [name for name in tensors if name == UP + "_scale_inv" or name.startswith(DOWN)]
    shards = [[name for name in tensors if name not in second], second]
    save(folder, size, tensors, quantization, shards, model_type="deepseek_v3")


def decode_fp8(folder: Path) -> Tensors:
    """FP8 with weight_scale_inv, by transformers."""
    t, _ = load(folder)
    block = config_of(folder)["quantization_config"].get("weight_block_size")
    dequantize = _fp8_of_transformers()._dequantize_fp8_weight
    return {name: dequantize(t[name], t[name + "_scale_inv"].float(), block, F32) for name in stems(t, "_scale_inv")}


# Experts, partial blocks and scales in E8M0 are packed by facts.
add("deepseek_v3_fp32", "transformers", make_deepseek_v3, decode_fp8, smallest=SQUARE)
add(
    "deepseek_v3_ue8m0", "transformers", partial(make_deepseek_v3, is_e8m0=True), decode_fp8, packed_by="facts", smallest=SQUARE
)


def make_fp8_per_tensor(folder: Path, size: Size) -> None:
    """One BF16 scale for each matrix, and one for its activations."""
    w = size.weights()
    tensors = unquantized(w)
    for name in (UP, DOWN):
        scale = (w[name].abs().amax() / 448).to(BF16)
        tensors[name], tensors[name + "_scale_inv"] = to_fp8(w[name], scale.float()), scale
        tensors[name.replace("weight", "activation_scale")] = torch.tensor(0.02, dtype=BF16)
    quantization = {"activation_scheme": "static", "quant_method": "fp8", "weight_block_size": None}
    save(folder, size, tensors, quantization, model_type="ministral3")


add("fp8_per_tensor_hf", "transformers", make_fp8_per_tensor, decode_fp8, packed_by="facts")


def make_deepseek_v4(folder: Path, size: Size) -> None:
    """A dense matrix in block FP8, and one in MXFP4 in the dtype of experts."""
    mx_tensor = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    w = size.weights()
    tensors = unquantized(w)
    rows, columns = w[UP].shape
    blocks = w[UP].reshape(rows // GROUP, GROUP, columns // GROUP, GROUP)
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax((1, 3)) / 448)))
    tensors[UP] = (w[UP] / repeated(scale, rows, columns)).to(FP8)
    tensors[UP.replace("weight", "scale")] = scale.to(torch.float8_e8m0fnu)
    mx = mx_tensor.MXTensor.to_mx(w[DOWN], torch.float4_e2m1fn_x2, 32)
    tensors[DOWN] = mx.qdata.view(torch.int8)
    tensors[DOWN.replace("weight", "scale")] = mx.scale
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [GROUP, GROUP],
    }
    save(folder, size, tensors, quantization, model_type="deepseek_v4")


def decode_deepseek_v4(folder: Path) -> Tensors:
    """By transformers."""
    t, _ = load(folder)
    op = _fp8_of_transformers().Fp8Dequantize(types.SimpleNamespace(quantization_config=None))
    return {
        stem + ".weight": op._dequantize_one(t[stem + ".weight"], t[stem + ".scale"].float(), F32)
        for stem in stems(t, ".scale")
    }


add("deepseek_v4_fp4", "transformers", make_deepseek_v4, decode_deepseek_v4, packed_by="facts", smallest=GROUPS)


def make_fbgemm(folder: Path, size: Size) -> None:
    """FP8 with a scale for each row."""
    w = size.weights()
    tensors = unquantized(w)
    for name in (UP, DOWN):
        scale = (w[name].abs().amax(1, keepdim=True) / 448).clamp_min(1e-12)
        tensors[name], tensors[name + "_scale"] = to_fp8(w[name], scale), scale
        tensors[name.replace("weight", "input_scale_ub")] = torch.tensor([1200.0])
    quantization = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    save(folder, size, tensors, quantization)


def decode_fbgemm(folder: Path) -> Tensors:
    """By its definition."""
    t, _ = load(folder)
    return {name: t[name].float() * t[name + "_scale"] for name in stems(t, "_scale")}


add("fbgemm_fp8", "transformers", make_fbgemm, decode_fbgemm, packed_by="facts", decoded_by="facts")


# ------------------------------------------------------------------------------------------------------ compressed-tensors


class Model(torch.nn.Module):
    """Modules with the names of the checkpoint. w: their weights; in FP32 those of torch's initialization if there are none."""

    def __init__(self, size: Size, w: Tensors | None = None) -> None:
        super().__init__()
        mlp, layer, model = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
        mlp.up_proj = torch.nn.Linear(size.columns, size.rows, bias=False)
        mlp.down_proj = torch.nn.Linear(size.rows, size.columns, bias=False)
        layer.mlp, model.layers = mlp, torch.nn.ModuleList([layer])
        model.embed_tokens = torch.nn.Embedding(size.vocabulary, size.columns)
        model.norm = torch.nn.LayerNorm(size.columns, bias=False)
        self.model = model
        if w is not None:
            mlp.up_proj.weight.data, mlp.down_proj.weight.data = w[UP].to(BF16), w[DOWN].to(BF16)
            model.embed_tokens.weight.data, model.norm.weight.data = w[EMBEDDING], w[NORM]

    @property
    def linears(self) -> dict[str, Any]:
        return {name: module for name, module in self.named_modules() if isinstance(module, torch.nn.Linear)}


def _compressor() -> Any:
    path = "compressed_tensors.compressors.model_compressors.model_compressor"
    return importlib.import_module(path).ModelCompressor()


def _compressed_tensors(preset: str, **changes: Any) -> tuple[Any, Any]:
    """make and decode of a preset scheme, with changes to the settings of weights."""

    def make(folder: Path, size: Size) -> None:
        q = importlib.import_module("compressed_tensors.quantization")
        scheme = q.preset_name_to_scheme(preset, ["Linear"])
        for key, value in changes.items():
            setattr(scheme.weights, key, value)
        scheme = q.QuantizationScheme.model_validate(scheme.model_dump())
        model = Model(size, size.weights())
        q.apply_quantization_config(model, q.QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
        for linear in model.linears.values():
            _calibrate(linear)
        _compressor().compress_model(model)
        quantization = q.QuantizationConfig.from_pretrained(model).model_dump(mode="json")
        quantization["quant_method"] = "compressed-tensors"
        save(folder, size, dict(model.state_dict()), quantization)

    def decode(folder: Path) -> Tensors:
        q = importlib.import_module("compressed_tensors.quantization")
        t, _ = load(folder)
        size = size_of(folder)
        settings = dict(config_of(folder)["quantization_config"])
        settings.pop("quant_method", None)
        model = Model(size, size.weights())
        q.apply_quantization_config(model, q.QuantizationConfig.model_validate(settings))
        compressor = _compressor()
        compressor.compress_model(model)  # the parameters of the compressed form, whose data come from the file
        for name, linear in model.linears.items():
            own = {key.rpartition(".")[2]: tensor for key, tensor in t.items() if key.startswith(name + ".")}
            for key, parameter in [*linear.named_parameters(recurse=False), *linear.named_buffers(recurse=False)]:
                if key in own:
                    parameter.data = own[key]
        compressor.decompress_model(model)
        return {name + ".weight": linear.weight.data for name, linear in model.linears.items()}

    return make, decode


def _calibrate(linear: Any) -> None:
    """Set scales and zero-points of a layer by the library's rules from the extremes of its weight."""
    utils = importlib.import_module("compressed_tensors.quantization.utils")
    w, settings = linear.weight.data.float(), linear.quantization_scheme.weights
    strategy = str(getattr(settings.strategy, "value", settings.strategy))
    rows, columns = w.shape
    if strategy == "tensor":
        tiles = w.reshape(1, 1, -1)
    elif strategy == "block":
        m, k = settings.block_structure
        tiles = w.reshape(rows // m, m, columns // k, k).movedim(1, 2).reshape(rows // m, columns // k, -1)
    else:
        tiles = w.reshape(rows, -1, settings.group_size or columns)
    global_scale = None
    if hasattr(linear, "weight_global_scale"):
        global_scale = utils.generate_gparam(w.min().reshape(1), w.max().reshape(1))
        linear.weight_global_scale.data = global_scale
    scale, zero_point = utils.calculate_qparams(tiles.amin(-1), tiles.amax(-1), settings, global_scale=global_scale)
    for name, value in (("weight_scale", scale), *([] if settings.symmetric else [("weight_zero_point", zero_point)])):
        parameter = getattr(linear, name)
        parameter.data = value.reshape(parameter.shape).to(parameter.dtype)
    for name, parameter in linear.named_parameters(recurse=False):
        if name.startswith(("input_scale", "input_global", "input_zero")) and parameter.dtype.is_floating_point:
            parameter.data.fill_(1.0)


for _name, _preset, _changes, _smallest in (
    ("ct_fp8_tensor", "FP8", {}, SMALL),
    ("ct_fp8_channel", "FP8_DYNAMIC", {}, SMALL),
    ("ct_fp8_block", "FP8_BLOCK", {}, GROUPS),
    ("ct_int8_channel_w8a8", "W8A8", {}, SMALL),
    ("ct_pack_int4_g128_sym", "W4A16", {}, GROUPS),
    ("ct_pack_int4_g128_asym", "W4A16_ASYM", {}, GROUPS),
    ("ct_pack_int8_channel", "W8A16", {}, SQUARE),
    ("ct_pack_int4_g128_actorder", "W4A16", {"actorder": "weight"}, GROUPS),
    ("ct_nvfp4", "NVFP4A16", {}, SMALL),
    ("ct_mxfp4", "MXFP4A16", {}, SMALL),
    ("ct_mxfp8", "MXFP8A16", {}, SMALL),
):
    add(_name, "compressed-tensors", *_compressed_tensors(_preset, **_changes), smallest=_smallest)


def _packing() -> Any:
    return importlib.import_module("compressed_tensors.compressors.pack_quantized.helpers")


def _order(columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(a permutation of columns, the group of each column): group i has the i-th 128 columns of the permutation."""
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
    index = torch.empty(columns, dtype=torch.int32)
    index[order] = (torch.arange(columns) // GROUP).int()
    return order, index


def make_compressed_group_index(folder: Path, size: Size) -> None:
    """actorder "group", which compressed-tensors wrote until 0.19 and refuses in 0.20: weight_g_idx maps columns to groups."""
    w = size.weights()
    tensors = unquantized(w)
    for name in (UP, DOWN):
        rows, columns = w[name].shape
        order, index = _order(columns, 1)
        scale = (w[name][:, order].reshape(rows, -1, GROUP).abs().amax(-1) / 7.5).clamp_min(1e-6).to(BF16)
        codes = torch.round(w[name] / scale.float()[:, index.long()]).clamp(-8, 7).to(torch.int8)
        tensors |= {name + "_packed": _packing().pack_to_int32(codes, 4), name + "_scale": scale}
        tensors |= {name + "_shape": torch.tensor(w[name].shape), name + "_g_idx": index}
    settings = {
        "actorder": "group",
        "block_structure": None,
        "dynamic": False,
        "group_size": GROUP,
        "num_bits": 4,
        "observer": "minmax",
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    group = {"targets": ["Linear"], "weights": settings, "input_activations": None, "output_activations": None}
    quantization = {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "version": "0.9.4",
    }
    save(folder, size, tensors, quantization)


def decode_compressed_group_index(folder: Path) -> Tensors:
    """Codes by the library's unpacker, values by the definition."""
    t, _ = load(folder)
    out: Tensors = {}
    for name in stems(t, "_packed"):
        codes = _packing().unpack_from_int32(t[name + "_packed"], 4, torch.Size(t[name + "_shape"].tolist()))
        out[name] = codes.float() * t[name + "_scale"].float()[:, t[name + "_g_idx"].long()]
    return out


add(
    "ct_pack_int4_g_idx",
    "compressed-tensors",
    make_compressed_group_index,
    decode_compressed_group_index,
    packed_by="facts",
    decoded_by="facts",
    smallest=GROUPS,
)


# ------------------------------------------------------------------------------------------------------- ModelOpt and Quark


def _llama(size: Size) -> Any:
    """A transformers model in BF16. Its other matrices repeat rows of `UP`, so that small archives stay small."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {key: value for key, value in size.config.items() if key not in ("torch_dtype", "model_type")}
    model = LlamaForCausalLM(LlamaConfig(**settings, tie_word_embeddings=False)).to(BF16)
    w = size.weights()
    for name, parameter in model.named_parameters():
        if name in w:
            parameter.data = w[name].to(BF16)
        elif parameter.ndim == 2:
            parameter.data = w[UP][torch.arange(1, parameter.shape[0] + 1) % size.rows].to(BF16)
    return model


def _tokens(size: Size) -> torch.Tensor:
    """Input to calibrate on."""
    return (torch.arange(32) % size.vocabulary).reshape(1, 32)


def _modelopt(preset: str) -> tuple[Any, Any]:
    """make and decode of a preset of ModelOpt."""

    def make(folder: Path, size: Size) -> None:
        quantization = importlib.import_module("modelopt.torch.quantization")
        export = importlib.import_module("modelopt.torch.export").export_hf_checkpoint
        model = _llama(size)
        quantization.quantize(model, getattr(quantization, preset), lambda model: model(_tokens(size)))
        with torch.inference_mode():
            export(model, dtype=BF16, export_dir=str(folder))

    def decode(folder: Path) -> Tensors:
        t, _ = load(folder)
        return {
            stem + ".weight": _decoded_modelopt(preset, t[stem + ".weight"], t[stem + ".weight_scale"], t, stem)
            for stem in sorted(stems(t, ".weight_scale"))
        }

    return make, decode


def _decoded_modelopt(preset: str, w: torch.Tensor, scale: torch.Tensor, t: Tensors, stem: str) -> torch.Tensor:
    qtensor = importlib.import_module("modelopt.torch.quantization.qtensor")
    unpacked_shape = torch.Size((w.shape[0], w.shape[-1] * 2))
    if preset.startswith("NVFP4"):
        q = qtensor.NVFP4QTensor(unpacked_shape, F32, w)
        return q.dequantize(dtype=F32, scale=scale, double_scale=t[stem + ".weight_scale_2"], block_sizes={-1: 16})
    if preset.startswith("MXFP8"):
        return qtensor.MXFP8QTensor(w.shape, F32, w).dequantize(dtype=F32, scale=scale)
    if preset.startswith("MXFP4"):
        return qtensor.MXFP4QTensor(unpacked_shape, F32, w).dequantize(dtype=F32, scale=scale, block_sizes={-1: 32})
    if preset.startswith("INT4"):  # two rows to a byte; the library has no unpacker, so this inverts its packer
        low, high = (w & 15).to(torch.int8), (w >> 4).to(torch.int8)
        codes = torch.stack([low, high], 1).reshape(-1, w.shape[1])
        codes = torch.where(codes > 7, codes - 16, codes)
        return codes.float() * scale.repeat_interleave(GROUP, 1)
    if scale.ndim == 4:
        block = w.shape[0] // scale.shape[0], w.shape[1] // scale.shape[2]
        return w.float() * repeated(scale[:, 0, :, 0], *w.shape, block)
    return w.float() * scale


for _name, _preset, _smallest in (
    ("modelopt_nvfp4", "NVFP4_DEFAULT_CFG", SMALL),
    ("modelopt_fp8", "FP8_DEFAULT_CFG", SMALL),
    ("modelopt_mxfp8", "MXFP8_DEFAULT_CFG", SMALL),
    ("modelopt_mxfp4", "MXFP4_DEFAULT_CFG", SMALL),
    ("modelopt_int4_awq", "INT4_AWQ_CFG", Size(256, 128, 4)),
    ("modelopt_fp8_2d", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", Size(256, 128, 4)),
):
    _decoded_by = "library" if _preset.startswith(("NVFP4", "MXFP")) else "facts"
    add(_name, "nvidia-modelopt", *_modelopt(_preset), decoded_by=_decoded_by, smallest=_smallest)


def make_quark(folder: Path, size: Size) -> None:
    """MXFP4 by Quark's exporter."""
    quark = importlib.import_module("quark.torch")
    config = importlib.import_module("quark.torch.quantization.config.config")
    spec = config.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec()
    quantizer = quark.ModelQuantizer(config.QConfig(global_quant_config=config.QLayerConfig(weight=spec), exclude=["lm_head"]))
    model = quantizer.freeze(quantizer.quantize_model(_llama(size), [_tokens(size)]))
    quark.export_safetensors(model, str(folder))


def decode_quark(folder: Path) -> Tensors:
    """By the definition of MXFP4."""
    t, _ = load(folder)
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([positive, -positive])
    out: Tensors = {}
    for stem in stems(t, ".weight_scale"):
        w = t[stem + ".weight"].view(torch.uint8)
        codes = torch.stack([w & 15, w >> 4], -1).reshape(w.shape[0], -1)
        scale = torch.exp2(t[stem + ".weight_scale"].view(torch.uint8).float() - 127)
        out[stem + ".weight"] = values[codes.long()] * scale.repeat_interleave(32, 1)
    return out


add("quark_mxfp4", "amd-quark", make_quark, decode_quark, decoded_by="facts")


# --------------------------------------------------------------------------------------------------- GPTQ, AWQ, AutoRound


def _affine(
    w: torch.Tensor, bits: int, is_symmetric: bool, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale in FP16, zero-point) for each row and group (rows, columns / 128); columns taken in `order`."""
    groups = (w if order is None else w[:, order]).reshape(w.shape[0], -1, GROUP)
    top = 2**bits - 1
    if is_symmetric:
        scale = (groups.abs().amax(-1) / ((top - 1) / 2)).clamp_min(1e-5).half()
        return scale, torch.full(scale.shape, (top + 1) // 2, dtype=torch.int32)
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scale = ((high - low) / top).clamp_min(1e-5).half()
    return scale, torch.round(-low / scale.float()).clamp(0, top).int()


def _gptq(bits: int = 4, sym: bool = True, desc_act: bool = False, is_v1: bool = True) -> tuple[Any, Any]:
    """make and decode of GPTQ; v1 stores zero-points less one."""
    # That one in each code of a word.
    ones = np.uint32(sum(1 << i for i in range(0, 32, bits)) if 32 % bits == 0 else 0)

    def layer(columns: int, rows: int) -> Any:
        if (folder := str(source_folder("gptqmodel"))) not in sys.path:
            sys.path.append(folder)
        return importlib.import_module("gptqmodel.nn_modules.qlinear.torch").TorchLinear(
            bits=bits,
            group_size=GROUP,
            sym=sym,
            desc_act=desc_act,
            in_features=columns,
            out_features=rows,
            bias=False,
            pack_dtype=torch.int32,
            register_buffers=True,
        )

    def make(folder: Path, size: Size) -> None:
        w = size.weights(0.0 if sym else 0.01)
        tensors = unquantized(w)
        for name in (UP, DOWN):
            rows, columns = w[name].shape
            order, index = _order(columns, 2)
            if not desc_act:
                order, index = torch.arange(columns), (torch.arange(columns) // GROUP).int()
            scale, zero = _affine(w[name], bits, sym, order)
            zero = zero.clamp_min(1) if is_v1 else zero  # libraries differ where v1 stores a zero-point of 0
            linear = torch.nn.Linear(columns, rows, bias=False)
            linear.weight.data = w[name].clone()
            packed = layer(columns, rows)
            packed.pack_original(linear=linear, scales=scale.float(), zeros=zero.float(), g_idx=index)
            zeros = packed.qzeros.numpy().view(np.uint32)
            stored = torch.from_numpy((zeros - ones if is_v1 else zeros).view(np.int32))
            stem = name.removesuffix("weight")
            tensors |= {stem + "qweight": packed.qweight, stem + "qzeros": stored}
            tensors |= {stem + "scales": packed.scales, stem + "g_idx": packed.g_idx.int()}
        quantization = {
            "bits": bits,
            "checkpoint_format": "gptq" if is_v1 else "gptq_v2",
            "desc_act": desc_act,
            "group_size": GROUP,
            "lm_head": False,
            "quant_method": "gptq",
            "sym": sym,
            "pack_dtype": "int32",
            "meta": {"quantizer": ["gptqmodel:7.7.0"]},
        }
        save(folder, size, tensors, quantization, torch_dtype="float16")
        write_json(folder / "quantize_config.json", quantization)

    def decode(folder: Path) -> Tensors:
        t, _ = load(folder)
        out: Tensors = {}
        for stem in stems(t, "qweight"):
            packed = layer(t[stem + "g_idx"].shape[0], t[stem + "qweight"].shape[1])
            zeros = t[stem + "qzeros"].numpy().view(np.uint32)
            packed.qweight, packed.g_idx = t[stem + "qweight"], t[stem + "g_idx"]
            packed.qzeros = torch.from_numpy((zeros + ones if is_v1 else zeros).view(np.int32))
            packed.scales = t[stem + "scales"].float()
            packed.qzero_format(format=2)
            packed.post_init()
            out[stem + "weight"] = packed.dequantize_weight().T.contiguous()
        return out

    return make, decode


for _name, _settings in (
    ("gptq_v1_int4_sym", {}),
    ("gptq_v1_int4_asym_desc_act", {"sym": False, "desc_act": True}),
    ("gptq_v2_int4_asym", {"sym": False, "is_v1": False}),
    ("gptq_v1_int8_sym", {"bits": 8}),
    ("gptq_v2_int3_sym", {"bits": 3, "is_v1": False}),
    ("gptq_v2_int2_asym", {"bits": 2, "sym": False, "is_v1": False}),
):
    add(_name, "gptqmodel", *_gptq(**_settings), smallest=SQUARE if _settings.get("bits") == 8 else GROUPS)


def _autoawq(module: str) -> Any:
    """A module of autoawq, whose packages' own __init__ would import its kernels."""
    if "awq" not in sys.modules:
        root = source_folder("autoawq")
        for name in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):
            package = types.ModuleType(name)
            package.__path__ = [str(root / name.replace(".", "/"))]
            sys.modules[name] = package
        functions = {
            "awq.utils.module": ("try_import", lambda _: (None, "")),
            "awq.utils.utils": ("get_best_device", lambda: "cpu"),
        }
        for name, (function, value) in functions.items():
            sys.modules[name] = types.ModuleType(name)
            setattr(sys.modules[name], function, value)
    return importlib.import_module(module)


def make_awq(folder: Path, size: Size) -> None:
    """The gemm packing of AutoAWQ."""
    gemm = _autoawq("awq.modules.linear.gemm")
    w = size.weights(0.01)
    tensors = unquantized(w)
    for name in (UP, DOWN):
        scale, zero = (part[..., None] for part in _affine(w[name], 4, False))
        scale = scale.float()
        rows, columns = w[name].shape
        linear = torch.nn.Linear(columns, rows, bias=False)
        codes = torch.round(w[name].reshape(rows, -1, GROUP) / scale + zero).clamp(0, 15)
        linear.weight.data = ((codes - zero) * scale).reshape(rows, columns)
        packed = gemm.WQLinear_GEMM.from_linear(
            linear, 4, GROUP, scales=scale[..., 0].t().contiguous(), zeros=zero[..., 0].float().t().contiguous()
        )
        stem = name.removesuffix("weight")
        tensors |= {stem + "qweight": packed.qweight, stem + "qzeros": packed.qzeros, stem + "scales": packed.scales}
    quantization = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    save(folder, size, tensors, quantization, torch_dtype="float16")


def decode_awq(folder: Path) -> Tensors:
    """By AutoAWQ, with scales in FP32."""
    dequantize = _autoawq("awq.utils.packing_utils").dequantize_gemm
    t, _ = load(folder)
    return {
        stem + "weight": dequantize(
            t[stem + "qweight"], t[stem + "qzeros"], t[stem + "scales"].float(), 4, GROUP
        ).T.contiguous()
        for stem in stems(t, "qweight")
    }


add("awq_gemm_int4", "autoawq", make_awq, decode_awq, smallest=GROUPS)


def _autoround(columns: int, rows: int) -> Any:
    """The layer of the packing "auto_round:auto_gptq", which stores zero-points less one."""
    module = importlib.import_module("auto_round_extension.torch.qlinear_torch_zp")
    layer = module.QuantLinear(4, GROUP, columns, rows, False)
    layer.device = torch.device("cpu")
    return layer


def make_autoround(folder: Path, size: Size) -> None:
    """AutoRound's packing as GPTQ v1."""
    w = size.weights(0.01)
    tensors = unquantized(w)
    for name in (UP, DOWN):
        rows, columns = w[name].shape
        scale, zero = _affine(w[name], 4, False)
        zero = zero.clamp_min(1)  # it has no zero-point of 0
        linear = torch.nn.Linear(columns, rows, bias=False)
        linear.weight.data = w[name].clone()
        layer = _autoround(columns, rows)
        layer.pack(linear, scale.float(), zero.float(), device="cpu")
        stem = name.removesuffix("weight")
        tensors |= {stem + part: getattr(layer, part) for part in ("qweight", "qzeros", "scales")}
    quantization = {
        "autoround_version": "0.16.1",
        "bits": 4,
        "data_type": "int",
        "group_size": GROUP,
        "packing_format": "auto_round:auto_gptq",
        "quant_method": "auto-round",
        "sym": False,
        "batch_size": 8,
    }
    save(folder, size, tensors, quantization, torch_dtype="float16")


def decode_autoround(folder: Path) -> Tensors:
    """By the product of its layer with the identity."""
    t, _ = load(folder)
    out: Tensors = {}
    for stem in stems(t, "qweight"):
        layer = _autoround(t[stem + "scales"].shape[0] * GROUP, t[stem + "qweight"].shape[1])
        for part in ("qweight", "qzeros", "scales"):
            setattr(layer, part, t[stem + part])
        layer.scales = layer.scales.float()
        out[stem + "weight"] = layer.forward(torch.eye(layer.infeatures)).T.contiguous().float()
    return out


add("autoround_gptq_int4", "auto-round", make_autoround, decode_autoround, smallest=GROUPS)


# ---------------------------------------------------------------------------------------------------------------- gpt-oss


def make_gpt_oss(folder: Path, size: Size) -> None:
    """Fused experts in MXFP4, packed by torchao and named as in gpt-oss."""
    mx_tensor = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    w = size.weights()
    tensors = unquantized(w)
    for name, experts in ((EXPERTS, w[EXPERTS]), (EXPERTS.replace("gate_up_proj", "down_proj"), w[EXPERTS].flip(0))):
        mx = mx_tensor.MXTensor.to_mx(experts, torch.float4_e2m1fn_x2, 32)
        e, rows, columns = experts.shape
        tensors[name + "_blocks"] = mx.qdata.reshape(e, rows, columns // 32, 16)
        tensors[name + "_scales"] = mx.scale.view(torch.uint8).reshape(e, rows, columns // 32)
        tensors[name + "_bias"] = torch.zeros(e, rows, dtype=BF16)
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"modules_to_not_convert": plain, "quant_method": "mxfp4"}
    save(folder, size, tensors, quantization, architectures=["GptOssForCausalLM"], model_type="gpt_oss")


def decode_gpt_oss(folder: Path) -> Tensors:
    """By transformers, as its model has them: (experts, columns, rows), the transpose of what is stored."""
    convert = importlib.import_module("transformers.integrations.mxfp4").convert_moe_packed_tensors
    t, _ = load(folder)
    return {name: convert(t[name + "_blocks"], t[name + "_scales"], dtype=BF16) for name in stems(t, "_blocks")}


add("gpt_oss_mxfp4", "transformers", make_gpt_oss, decode_gpt_oss, packed_by="facts")


# -------------------------------------------------------------------------------------------------------------------- MLX


def _mlx(bits: int = 4, group: int = 64, mode: str = "affine", is_mixed: bool = False) -> tuple[Any, Any]:
    """make and decode of a mode of MLX; is_mixed: `DOWN` has 6 bits, by settings of its own."""

    def make(folder: Path, size: Size) -> None:
        import mlx.core as mx

        def to_mlx(x: torch.Tensor) -> Any:
            return mx.array(x.float().numpy()).astype(mx.bfloat16)

        folder.mkdir(parents=True)
        w = size.weights()
        tensors = {name: to_mlx(w[name]) for name in (EMBEDDING, NORM)}
        by_module: dict[str, Any] = {}
        for name in (UP, DOWN, EXPERTS):
            own = 6 if is_mixed and name == DOWN else bits
            parts = mx.quantize(to_mlx(w[name]), group_size=group, bits=own, mode=mode)
            stem = name.removesuffix(".weight")
            tensors |= {f"{stem}.{end}": part for end, part in zip(("weight", "scales", "biases"), parts, strict=False)}
            if is_mixed:
                by_module[stem] = {"group_size": group, "bits": own}
        mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
        quantization = {"group_size": group, "bits": bits, "mode": mode, **by_module}
        config = {**size.config, "quantization": quantization, "quantization_config": quantization}
        write_json(folder / "config.json", config)

    def decode(folder: Path) -> Tensors:
        import mlx.core as mx

        t: dict[str, Any] = mx.load(str(folder / "model.safetensors"))
        quantization = config_of(folder)["quantization"]
        out: Tensors = {}
        for stem in (name.removesuffix(".scales") for name in t if name.endswith(".scales")):
            settings = {**quantization, **quantization.get(stem, {})}
            scales, biases, options = t[stem + ".scales"], t.get(stem + ".biases"), {"mode": settings["mode"]}
            if settings["mode"] == "affine":
                scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            else:
                options["dtype"] = mx.float32
            values = mx.dequantize(
                t[stem + ".weight"], scales, biases, group_size=settings["group_size"], bits=settings["bits"], **options
            )
            out[stem + ".weight"] = torch.from_numpy(np.array(values.astype(mx.float32)))
        return out

    return make, decode


for _bits in (2, 3, 4, 5, 6, 8):
    add(f"mlx_affine_{_bits}", "mlx", *_mlx(_bits))
add("mlx_affine_mixed_4_6", "mlx", *_mlx(4, is_mixed=True))
add("mlx_mxfp4", "mlx", *_mlx(4, 32, "mxfp4"))
add("mlx_mxfp8", "mlx", *_mlx(8, 32, "mxfp8"))
add("mlx_nvfp4", "mlx", *_mlx(4, 16, "nvfp4"))


# ---------------------------------------------------------------------------------------------------------------- torchao


def _torchao_tensor(kind: str, w: torch.Tensor) -> Any:
    quantization = importlib.import_module("torchao.quantization")
    if kind == "float8_row":
        return quantization.Float8Tensor.from_hp(w, granularity=quantization.PerRow())
    if kind == "float8_tensor":
        return quantization.Float8Tensor.from_hp(w, granularity=quantization.PerTensor())
    if kind == "int8":
        return quantization.Int8Tensor.from_hp(w, granularity=quantization.PerRow())
    if kind == "intx4":
        return quantization.IntxUnpackedToInt8Tensor.from_hp(w, (1, 32), torch.int4)
    if kind in ("mxfp4", "mxfp8"):
        dtype = torch.float4_e2m1fn_x2 if kind == "mxfp4" else FP8
        return importlib.import_module("torchao.prototype.mx_formats.mx_tensor").MXTensor.to_mx(w, dtype, 32)
    module = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    return module.NVFP4Tensor.to_nvfp4(w, per_tensor_scale=module.per_tensor_amax_to_scale(w.abs().amax()))


def _torchao(kind: str, is_pickled: bool = False) -> tuple[Any, Any]:
    """make and decode of a tensor subclass of torchao, flattened to safetensors or pickled."""
    support = "torchao.prototype.safetensors.safetensors_support"

    def make(folder: Path, size: Size) -> None:
        w = size.weights()
        tensors = unquantized(w)
        for name in (UP, DOWN):
            x = w[name].to(BF16).clone()
            x[5] = 0.001  # Float8Tensor gives NaN for a row of zeros
            tensors[name] = _torchao_tensor(kind, x)
        quantization = {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": kind, "_version": 2, "_data": {}}},
            "modules_to_not_convert": None,
        }
        if is_pickled:
            folder.mkdir(parents=True)
            torch.save(tensors, folder / "pytorch_model.bin")
            write_json(folder / "config.json", {**size.config, "quantization_config": quantization})
            return
        flat, metadata = importlib.import_module(support).flatten_tensor_state_dict(tensors)
        save(folder, size, flat, quantization, metadata=metadata)

    def decode(folder: Path) -> Tensors:
        if is_pickled:
            t = torch.load(folder / "pytorch_model.bin", weights_only=False)  # written by `make`
        else:
            t, _ = importlib.import_module(support).unflatten_tensor_state_dict(*load(folder))
        out: Tensors = {}
        for name in (UP, DOWN):
            if kind.startswith(("mx", "nv")):
                out[name] = t[name].dequantize(F32)
            elif kind == "intx4":
                out[name] = t[name].dequantize()
            else:
                out[name] = t[name].dequantize(output_dtype=F32)
        return {name: values.contiguous() for name, values in out.items()}

    return make, decode


for _kind in ("float8_row", "float8_tensor", "int8", "intx4", "mxfp4", "mxfp8", "nvfp4"):
    add(f"torchao_{_kind}", "torchao", *_torchao(_kind))
add("torchao_float8_row_bin", "torchao", *_torchao("float8_row", True))


# ----------------------------------------------------------------------------------------------------------- bitsandbytes


def _bitsandbytes_4bit(kind: str, is_nested: bool = False) -> tuple[Any, Any]:
    """make and decode of a 4-bit type; is_nested: its absmax are quantized too."""

    def make(folder: Path, size: Size) -> None:
        nn = importlib.import_module("bitsandbytes.nn")
        w = size.weights()
        tensors = unquantized(w)
        for name in (UP, DOWN):
            rows, columns = w[name].shape
            options = {"quant_type": kind, "compress_statistics": is_nested}
            linear = nn.Linear4bit(columns, rows, bias=False, compute_dtype=BF16, **options)
            linear.weight = nn.Params4bit(w[name].to(BF16), requires_grad=False, **options)
            linear = linear.to("cpu")
            if linear.weight.quant_state is None:
                linear.weight = linear.weight._quantize("cpu")
            tensors |= {name.removesuffix("weight") + end: part for end, part in linear.state_dict().items()}
        quantization = {
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": is_nested,
            "llm_int8_skip_modules": None,
            "load_in_4bit": True,
            "load_in_8bit": False,
            "quant_method": "bitsandbytes",
        }
        save(folder, size, tensors, quantization)

    def decode(folder: Path) -> Tensors:
        functional = importlib.import_module("bitsandbytes.functional")
        t, _ = load(folder)
        out: Tensors = {}
        for name in (UP, DOWN):
            parts = {key.removeprefix(name + "."): part for key, part in t.items() if key.startswith(name + ".")}
            state = functional.QuantState.from_dict(parts, device="cpu")
            state.dtype = F32
            out[name] = functional.dequantize_4bit(t[name], state).contiguous()
        return out

    return make, decode


add("bnb_nf4", "bitsandbytes", *_bitsandbytes_4bit("nf4"))
# Two blocks of 256 absmax.
add("bnb_nf4_double", "bitsandbytes", *_bitsandbytes_4bit("nf4", True), smallest=GROUPS)
add("bnb_fp4", "bitsandbytes", *_bitsandbytes_4bit("fp4"))


def make_bitsandbytes_int8(folder: Path, size: Size) -> None:
    """LLM.int8()."""
    functional = importlib.import_module("bitsandbytes.functional")
    w = size.weights()
    tensors = unquantized(w)
    for name in (UP, DOWN):
        codes, absmax, _ = functional.int8_vectorwise_quant(w[name].half())
        stem = name.removesuffix("weight")
        tensors |= {name: codes, stem + "SCB": absmax, stem + "weight_format": torch.tensor(0, dtype=torch.uint8)}
    quantization = {"load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": 6.0, "quant_method": "bitsandbytes"}
    save(folder, size, tensors, quantization, torch_dtype="float16")


def decode_bitsandbytes_int8(folder: Path) -> Tensors:
    """By bitsandbytes."""
    dequantize = importlib.import_module("bitsandbytes.functional").int8_vectorwise_dequant
    t, _ = load(folder)
    return {stem + "weight": dequantize(t[stem + "weight"], t[stem + "SCB"]) for stem in stems(t, "SCB")}


add("bnb_int8", "bitsandbytes", make_bitsandbytes_int8, decode_bitsandbytes_int8)


# ---------------------------------------------------------------------------------------------------------- HQQ and quanto


def _hqq(bits: int, group: int, axis: int) -> tuple[Any, Any]:
    """make and decode of HQQ."""

    def make(folder: Path, size: Size) -> None:
        hqq = importlib.import_module("hqq.core.quantize")
        w = size.weights()
        tensors = unquantized(w)
        for name in (UP, DOWN):
            rows, columns = w[name].shape
            linear = torch.nn.Linear(columns, rows, bias=False)
            linear.weight.data = w[name].clone()
            config = hqq.BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
            layer = hqq.HQQLinear(linear, config, compute_dtype=BF16, device="cpu")
            tensors |= {name.removesuffix("weight") + end: part for end, part in layer.state_dict().items()}
        settings = {"nbits": bits, "group_size": group, "axis": axis, "channel_wise": True}
        quantization = {
            "quant_method": "hqq",
            "quant_config": {"weight_quant_params": settings},
            "skip_modules": ["lm_head"],
        }
        save(folder, size, tensors, quantization)

    def decode(folder: Path) -> Tensors:
        hqq = importlib.import_module("hqq.core.quantize")
        t, _ = load(folder)
        out: Tensors = {}
        for name in (UP, DOWN):
            stem = name.removesuffix("weight")
            layer = hqq.HQQLinear(None, None, compute_dtype=F32, device="cpu", initialize=False)
            layer.load_state_dict({key.removeprefix(stem): part for key, part in t.items() if key.startswith(stem)})
            layer.compute_dtype = layer.meta["compute_dtype"] = F32
            for part in ("scale", "zero"):
                layer.meta[part] = layer.meta[part].float()
            out[name] = layer.dequantize().float().contiguous()
        return out

    return make, decode


for _bits, _group, _axis in ((4, 64, 1), (4, 64, 0), (8, 128, 1), (3, 64, 1), (2, 16, 1)):
    _smallest = SQUARE if _group == 128 else SMALL
    add(f"hqq_{_bits}bit_axis{_axis}", "hqq", *_hqq(_bits, _group, _axis), smallest=_smallest)


def _quanto(kind: str) -> tuple[Any, Any]:
    """make and decode of a type of quanto."""

    def make(folder: Path, size: Size) -> None:
        quanto = importlib.import_module("optimum.quanto")
        model = Model(size, size.weights())
        quanto.quantize(model, weights=getattr(quanto, kind), include=["*up_proj", "*down_proj"])
        quanto.freeze(model)
        quantization = {
            "quant_method": "quanto",
            "weights": kind.removeprefix("q"),
            "activations": None,
            "modules_to_not_convert": None,
        }
        save(folder, size, model.state_dict(), quantization)
        write_json(folder / "quanto_qmap.json", quanto.quantization_map(model))

    def decode(folder: Path) -> Tensors:
        quanto = importlib.import_module("optimum.quanto")
        size = size_of(folder)
        model = Model(size, size.weights())
        modules = json.loads((folder / "quanto_qmap.json").read_text())
        quanto.requantize(model, load(folder)[0], modules, device=torch.device("cpu"))
        return {f"{name}.weight": module.weight.dequantize().contiguous() for name, module in model.linears.items()}

    return make, decode


for _kind in ("qint8", "qint4", "qfloat8"):
    add(f"quanto_{_kind}", "optimum-quanto", *_quanto(_kind), smallest=GROUPS if _kind == "qint4" else SMALL)


# ------------------------------------------------------------------------------------------------------------------- GGUF


def _ggml() -> Any:
    """llama.cpp's C quantizers and dequantizers."""
    path = os.environ.get("GGML_BASE") or next(iter(sorted(unpacked().rglob("libggml-base.so"))), None)
    if path is None:
        raise ImportError("libggml-base.so: set GGML_BASE to its path (npm's @node-llama-cpp/linux-x64 has it)")
    library = ctypes.CDLL(str(path))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    return library


def _gguf(kind: str) -> tuple[Any, Any]:
    """make and decode of a type of GGML."""
    names = {"blk.0.ffn_up.weight": UP, "blk.0.ffn_down.weight": DOWN}

    def make(folder: Path, size: Size) -> None:
        import gguf

        qtype = gguf.GGMLQuantizationType[kind]
        block, nbytes = gguf.GGML_QUANT_SIZES[qtype]
        w, library = size.weights(), _ggml()
        folder.mkdir(parents=True)
        writer = gguf.GGUFWriter(str(folder / "model.gguf"), "llama")
        writer.add_block_count(1)
        writer.add_embedding_length(size.columns)
        writer.add_feed_forward_length(size.rows)
        for gguf_name, name in names.items():
            x = np.ascontiguousarray(w[name].numpy(), np.float32)
            rows, columns = x.shape
            codes = np.zeros((rows, columns // block * nbytes), np.uint8)
            # IQ1 and IQ2 need an importance matrix.
            importance = np.ones(columns, np.float32)
            pointer = importance.ctypes.data if kind.startswith(("IQ1", "IQ2")) else None
            written = library.ggml_quantize_chunk(int(qtype), x.ctypes.data, codes.ctypes.data, 0, rows, columns, pointer)
            if written != codes.nbytes:
                raise RuntimeError(f"ggml_quantize_chunk wrote {written} bytes, not {codes.nbytes}")
            writer.add_tensor(gguf_name, codes, raw_dtype=qtype)
        writer.add_tensor("token_embd.weight", w[EMBEDDING].float().numpy().astype(np.float16))
        writer.add_tensor("output_norm.weight", w[NORM].float().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def decode(folder: Path) -> Tensors:
        import gguf

        function = getattr(_ggml(), "dequantize_row_" + kind.lower().replace("_k", "_K"))
        function.restype = None
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        out: Tensors = {}
        for tensor in gguf.GGUFReader(str(folder / "model.gguf")).tensors:
            if tensor.name in names:
                codes = np.ascontiguousarray(tensor.data)
                values = np.zeros(tuple(int(n) for n in reversed(tensor.shape)), np.float32)
                function(codes.ctypes.data, values.ctypes.data, values.size)
                out[names[tensor.name]] = torch.from_numpy(values)
        return out

    return make, decode


for _kind in (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ3_S", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0"),
):
    add(f"gguf_{_kind.lower()}", "gguf", *_gguf(_kind))


# ------------------------------------------------------------------------------------------------------------------- main


def decode(name: str, folder: Path) -> Tensors:
    """The values of a checkpoint folder of the dialect `name`, by the library's own code."""
    return DIALECTS[name].decode(Path(folder))


def record_of(dialect: Dialect, size: Size, values: Tensors) -> dict[str, Any]:
    """Who made a checkpoint, and the shape and the digest of each of its values."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in values.values()}
    return {
        "dialect": dialect.name,
        "library": dialect.library,
        "version": dialect.version,
        "packed_by": dialect.packed_by,
        "decoded_by": dialect.decoded_by,
        "rows": size.rows,
        "columns": size.columns,
        "dtype": dtypes.pop() if len(dtypes) == 1 else sorted(dtypes),
        "values": {
            name: {"shape": list(tensor.shape), "sha256": digest(tensor.float().numpy())} for name, tensor in values.items()
        },
    }


def write_archive(path: Path, folder: Path, record: dict[str, Any]) -> None:
    """Pack the files of a checkpoint and its record; the same bytes for the same files."""
    files = {"record.json": json.dumps(record, indent=2).encode() + b"\n"}
    files |= {f"{folder.name}/{file.name}": file.read_bytes() for file in sorted(folder.iterdir())}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def write(dialect: Dialect, data: Path, size: Size, golden: Path | None) -> str:
    """Make and decode a checkpoint; a line about it."""
    folder = data / dialect.name
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(0)
    np.random.seed(0)
    dialect.make(folder, size)
    values = {name: tensor.detach().contiguous() for name, tensor in dialect.decode(folder).items()}
    if not values:
        raise RuntimeError("nothing is decoded")
    record = record_of(dialect, size, values)
    save_file(values, data / "expected" / f"{dialect.name}.safetensors", {"record": json.dumps(record)})
    if golden is not None:
        write_archive(golden / f"{dialect.name}.tar.xz", folder, record)
    w = size.weights()
    errors = [float((values[n].float() - w[n]).abs().nanmean() / w[n].abs().mean()) for n in (UP, DOWN) if n in values]
    nbytes = sum(file.stat().st_size for file in folder.iterdir())
    by = f"{dialect.library} {record['version']}, packed by {dialect.packed_by}, decoded by {dialect.decoded_by}"
    return f"{by}, {record['dtype']}, {nbytes} B, relative error {max(errors, default=float('nan')):.3f}"


def main() -> int:
    """Exits with 1 if a checkpoint could not be made."""
    parser = argparse.ArgumentParser(description="Write checkpoints in the dialects of other libraries.")
    parser.add_argument("data", type=Path, help="the folder to write to")
    parser.add_argument("--only", default="*", help="names of dialects, as a glob")
    parser.add_argument("--rows", type=int, default=DEFAULT.rows, help="rows of the first matrix, columns of the second")
    parser.add_argument("--columns", type=int, default=DEFAULT.columns, help="columns of the first matrix, rows of the second")
    parser.add_argument("--golden", type=Path, help="make the smallest ones, and write archives of them to this folder")
    options = parser.parse_args()
    dialects = [dialect for dialect in DIALECTS.values() if fnmatch.fnmatch(dialect.name, options.only)]
    if options.golden:
        dialects = [dialect for dialect in dialects if dialect.is_golden]
    (options.data / "expected").mkdir(parents=True, exist_ok=True)
    missing = 0
    for dialect in dialects:
        size = dialect.smallest if options.golden else Size(options.rows, options.columns)
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                line = write(dialect, options.data, size, options.golden)
            print(f"{dialect.name:28} {line}", flush=True)
        except Exception:
            missing += 1
            shutil.rmtree(options.data / dialect.name, ignore_errors=True)
            print(f"{dialect.name:28} NOT MADE\n{said.getvalue()}{traceback.format_exc()}", flush=True)
    print(f"{len(dialects) - missing} of {len(dialects)} checkpoints")
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
