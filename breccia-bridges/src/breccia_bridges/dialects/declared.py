"""The dialects of checkpoints: their names, configs and tensors, and the modules that read and write them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from breccia import Dialect
from breccia.backend import TensorGroup

_FP8 = ("F8_E4M3", "F8_E5M2")
_FNUZ = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")
#: Dtypes that only codes have, and bytes.
CODES = (*_FP8, *_FNUZ, "F6_E2M3", "F6_E3M2", "F4", "I8", "U8")
_FLOATS = ("F32", "BF16", "F16")
_POWERS = ("F8_E8M0", "U8")
#: The parts of GPTQ and AWQ.
_QWEIGHT = {"qweight": ("I32",), "qzeros": ("I32",), "scales": _FLOATS}
#: Recipes of signed codes, which engines have kernels for in GPTQ.
_SIGNED = ("int4", "int8,group_size=128,scale_dtype=bf16", "int,bits=3", "int,bits=2,group_size=64,scale_dtype=bf16")
#: Recipes of unsigned codes with zero-points, of the widths of GPTQ; 4 bits first, with which also AWQ and AutoRound begin.
_UNSIGNED = (
    "int4,symmetric=false",
    "int4,symmetric=false,group_size=32,scale_dtype=bf16",
    "int8,symmetric=false,group_size=128,scale_dtype=fp16",
    "int8,symmetric=false,scale_dtype=bf16",
    "int,bits=3,symmetric=false",
    "int,bits=2,symmetric=false,group_size=64",
)
#: Recipes of unsigned codes with float zero-points.
_FLOAT_ZERO = (
    *(f"int{of},offset=float_zero_point" for of in ("4,symmetric=false,group_size=64", "8,symmetric=false,scale_dtype=bf16")),
    "int4,symmetric=false,group_size=128,scale_dtype=fp32,offset=float_zero_point",
    *(f"int,bits={bits},symmetric=false,group_size=64,offset=float_zero_point" for bits in (1, 2, 3, 5, 6)),
    *(f"int_rounded,bits=4,group_size=64,scale_dtype={dtype},offset=float_zero_point" for dtype in ("bf16", "fp16")),
)
#: AutoRound's packings that are as those of GPTQ and AWQ.
_AUTO_ROUND = ("auto_round", *(f"auto_round:{name}" for name in ("auto_awq", "auto_gptq", "awq", "gptq", "gptqmodel")))
_ORIGINAL = "Breccia does not read it: convert the checkpoint that it was made from, in BF16, FP16 or FP32."
_DEQUANTIZE = (
    "Breccia does not read it: load it with transformers, call model.dequantize() and save the model; or convert the "
    "checkpoint that it was made from, in BF16, FP16 or FP32."
)


def _dialect(
    name: str, title: str, module: str, configs: Any, *groups: TensorGroup, settings: bool = False, **beside: Any
) -> Dialect:
    """A dialect with the functions of a module of `breccia_bridges.dialects`; those that write, if it has `recipes`."""
    home = f"breccia_bridges.dialects.{module}"
    names = ["form", "read", *(["settings"] if settings else [])]
    names += ["stored", "write", "config"] if "recipes" in beside else []
    declared: dict[str, Any] = {"by_rows": "recipes" in beside, **{name: f"{home}:{name}" for name in names}}
    return Dialect(name, title, configs, groups, **declared | beside)


def _writers(module: str) -> dict[str, Any]:
    """The functions that write, of another module than those that read."""
    return {name: f"breccia_bridges.dialects.{module}:{name}" for name in ("stored", "write", "config")}


#: Tensors of a layer that quantizes its inputs and outputs, and of an attention with a quantized cache.
_ACTIVATIONS = (
    *(f"{of}_{part}" for of in ("input", "output") for part in ("scale", "zero_point", "global_scale")),
    *(f"{of}_{part}" for of in "qkv" for part in ("scale", "zero_point", "global_scale")),
    "activation_scale",
    "input_scale_ub",
    "_input_scale",
)


def _method(*methods: str, **keys: tuple[Any, ...]) -> tuple[dict[str, tuple[Any, ...]], ...]:
    """Configs of a `quant_method`, with the values of other keys."""
    return ({"quant_method": methods, **keys},)


#: Parts of bitsandbytes' 4-bit weights, whose codes have the name of the value, and of torchao's classes beside the codes.
_BNB = (
    ".absmax",
    ".quant_state.bitsandbytes__nf4",
    ".quant_state.bitsandbytes__fp4",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
)
_TORCHAO = (
    "_scale",
    "_zero_point",
    "_scale_and_zero",
    "_per_tensor_scale",
    "_act_pre_scale",
    "_act_quant_scale",
    "_act_quant_zero_point",
    "_act_per_tensor_scale",
)
#: The types of GGUF tensors with blocks of codes.
_GGUF = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q8_K", "Q1_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
#: What they hold and casts write: Q8_0, Q4_0 to Q5_1, the K types, MXFP4 and NVFP4 with and without a scale of the tensor.
_GGUF_RECIPES = (
    "int8,group_size=32,scale_dtype=fp16",
    *(f"int,bits={bits},group_size=32{bias}" for bits in (4, 5) for bias in ("", ",symmetric=false,offset=bias")),
    *(f"gguf,type=Q{bits}_K" for bits in range(2, 7)),
    *("mxfp4", "nvfp4", "nvfp4,two_level=false"),
)
#: The parts of HQQ's weights beside the codes; the last five are those of scales that are quantized themselves.
_HQQ = (
    *("scale", "zero", "nbits", "group_size", "axis", "shape", "packing", "channel_wise", "optimize", "round_zero"),
    *("view_as_float", "unpack_view_dtype", "compute_dtype", "quant_scale", "quant_zero", "offload_meta"),
    *("encoded_state_dict", "stores_quant_config", "scale_q", "zero_q", "meta_scale", "meta_zero", "zero_scale"),
)
#: Parts of ComfyUI's weights that only some formats have.
_COMFY = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")


#: MLX's modes, and its mode "affine" of each width and group size.
_MLX_RECIPES = (
    *(
        f"{kind},group_size={size},offset=bias,scale_dtype={dtype}"
        for kind in ("int4", "int8")
        for size in (64, 32, 128)
        for dtype in ("bf16", "fp16", "fp32")
    ),
    *(f"mlx_affine,bits={bits},group_size={size}" for bits in (2, 3, 5, 6) for size in (32, 64, 128)),
    *("mxfp4", "mxfp8", "nvfp4,two_level=false"),
)


#: bitsandbytes' types; those of 4 bits also with the shortest blocks that it has, and longer ones.
_BNB_RECIPES = (
    *(f"nf4{block}" for block in ("", ",block_size=32", ",block_size=128")),
    *(f"bnb_fp4{block}" for block in ("", ",block_size=32", ",block_size=128")),
    "bnb_int8,scale_dtype=fp32",
)


#: A recipe for each class of torchao's, and each packing of its codes.
_TORCHAO_RECIPES = (
    *("fp8_row", "fp8_current", "fp8_block", "fp8_row,fp8_format=E5M2"),
    *("int8", "int8,group_size=32", "int8,group_size=64,signed=false,symmetric=false,scale_dtype=bf16"),
    *("int4,group_size=32", "int4,signed=false,symmetric=false", "int4_bias,group_size=32"),
    *("mxfp8", "mxfp8,fp8_format=E5M2", "mxfp6", "mxfp6,fp6_format=E3M2", "mxfp4"),
    *("nvfp4,order=scales_first", "nvfp4,two_level=false"),
)


def _bnb_groups() -> Iterable[TensorGroup]:
    """A 4-bit weight is looked for by three of its parts, so that one that lacks others is not taken for plain bytes."""
    for first in _BNB[:3]:
        yield TensorGroup({first: (), "": ()}, {end: () for end in _BNB if end != first}, value="")
    yield TensorGroup({"SCB": (), "weight": ("I8",)}, {"weight_format": ()})


def _refused(name: str, title: str, *groups: TensorGroup, methods: tuple[str, ...] = (), remedy: str = _ORIGINAL) -> Dialect:
    """A dialect that is recognized only, by a config of one of `methods` or by its tensors."""
    return Dialect(name, title, _method(*methods) if methods else (), groups, remedy=remedy)


def declared() -> Iterable[Dialect]:
    """All dialects: those that are read or written, and those that are recognized to be refused."""
    gptq = "breccia_bridges.dialects.gptq"
    return [
        _refused("aqlm", "AQLM", TensorGroup({"codebooks": (), "codes": (), "scales": ()}), methods=("aqlm",)),
        _refused("bitnet", "BitNet", methods=("bitnet",)),
        _dialect(
            "bitsandbytes",
            "bitsandbytes",
            "bitsandbytes",
            _method("bitsandbytes"),
            *_bnb_groups(),
            by_rows=False,
            rows="breccia_bridges.dialects.bitsandbytes:rows",
            recipes=_BNB_RECIPES,
        ),
        _dialect(
            "comfy_quant",
            "ComfyUI",
            "comfyui",
            (),
            TensorGroup({"comfy_quant": ("U8",), "weight": ()}, dict.fromkeys(_COMFY, ())),
            metadata=("_quantization_metadata",),
            recipes=("fp8_current", "fp8_current,fp8_format=E5M2"),
            config=None,
        ),
        _dialect(
            "comfy_scaled",
            "scaled FP8 of ComfyUI",
            "fp8",
            (),
            TensorGroup({"scale_weight": _FLOATS, "weight": _FP8}, {"scale_input": ()}),
        ),
        _dialect(
            "auto_round",
            "AutoRound",
            "auto_round",
            _method("auto-round", packing_format=(None, *_AUTO_ROUND)),
            TensorGroup(_QWEIGHT, {"g_idx": ()}),
            settings=True,
            activations=_ACTIVATIONS,
            recipes=(
                *(spec for spec in _UNSIGNED if "bf16" not in spec),
                *("int,bits=5,symmetric=false,group_size=32", "int,bits=6,symmetric=false", "int,bits=7,symmetric=false"),
            ),
        ),
        _dialect(
            "awq",
            "AWQ",
            "awq",
            (
                *_method("awq", version=("gemm", "GEMM")),
                *_method("awq", version=(None,), format=(None, "gemm"), checkpoint_format=(None, "gemm")),
            ),
            TensorGroup(_QWEIGHT),
            rows="breccia_bridges.dialects.awq:rows",
            recipes=tuple(spec for spec in _UNSIGNED if spec.startswith("int4")),
        ),
        _dialect(
            "compressed_tensors",
            "compressed-tensors",
            "compressed_tensors",
            _method("compressed-tensors"),
            TensorGroup(
                {"weight_packed": ("I32",), "weight_scale": _FLOATS, "weight_shape": ("I64", "I32")},
                {"weight_zero_point": (), "weight_g_idx": ()},
            ),
            TensorGroup(
                {"weight_packed": ("U8",), "weight_scale": ("F8_E4M3", *_POWERS)},
                {"weight_global_scale": (), "weight_zero_point": ()},
            ),
            TensorGroup({"weight_scale": _FLOATS, "weight": ("I8",)}, {"weight_zero_point": ()}),
            TensorGroup(
                {"weight_scale": (*_FLOATS, *_POWERS), "weight": ("F8_E4M3",)}, {"weight_zero_point": ()}, needs_config=True
            ),
            TensorGroup({".compressed": (), ".bitmask": ()}, {".shape": (), ".row_offsets": (), "_scale": ()}, value=""),
            TensorGroup({"weight_packed": (), "scale_packed": (), "meta": ()}),
            settings=True,
            rows="breccia_bridges.dialects.compressed_tensors:rows",
            activations=_ACTIVATIONS,
            **_writers("compressed_tensors_writer"),
            recipes=(
                *("int4", "int8", "int4,signed=false,symmetric=false", "int8,group_size=128,scale_dtype=bf16", "int,bits=3"),
                *("fp8_row", "fp8_current", "fp8_block,block_m=128", "mxfp8", "mxfp4", "mxfp6,fp6_format=E2M3"),
                "nvfp4,global_sense=divisor",
            ),
        ),
        _dialect(
            "deepseek_v3",
            "block FP8, as DeepSeek-V3",
            "fp8",
            _method("fp8", "mxfp8"),
            TensorGroup({"_scale_inv": (*_FLOATS, *_POWERS), "": (*_FP8, *_FNUZ)}, value=""),
            activations=_ACTIVATIONS,
            recipes=("fp8_block,block_m=128", "fp8_block,block_m=128,power_of_two_scale=true", "fp8_current", "mxfp8"),
            **_writers("deepseek_v3"),
        ),
        _dialect(
            "fp8_scale",
            "FP8 with weight_scale",
            "fp8",
            _method("fp8", "fbgemm_fp8"),
            TensorGroup({"weight_scale": _FLOATS, "weight": (*_FP8, *_FNUZ)}),
            activations=_ACTIVATIONS,
            recipes=("fp8_row", "fp8_current"),
            **_writers("fp8_scale"),
        ),
        _dialect(
            "deepseek_v4",
            "DeepSeek-V4",
            "deepseek_v4",
            _method("fp8"),
            TensorGroup({"scale": ("F8_E8M0",), "weight": (*_FP8, "I8")}),
            activations=_ACTIVATIONS,
            recipes=("fp8_block,block_m=128,power_of_two_scale=true", "mxfp4"),
        ),
        _dialect(
            "gpt_oss",
            "MXFP4, as gpt-oss",
            "gpt_oss",
            _method("mxfp4"),
            TensorGroup({"_blocks": ("U8",), "_scales": ("U8",)}, value=""),
            by_rows=False,
            recipes=("mxfp4",),
        ),
        *(
            Dialect(
                name,
                title,
                (
                    *_method("gptq", checkpoint_format=formats),
                    *_method("gptq", checkpoint_format=(None,), format=(*formats, *absent)),
                ),
                (TensorGroup(_QWEIGHT, {"g_idx": ()}),),
                f"{gptq}:form_{version}",
                f"{gptq}:read_{version}",
                f"{gptq}:stored",
                f"{gptq}:write_{version}",
                f"{gptq}:config_{version}",
                by_rows=True,
                rows=f"{gptq}:rows_{version}",
                recipes=(*_SIGNED, *_UNSIGNED),
                settings=f"{gptq}:settings",
            )
            for name, title, formats, absent, version in (
                ("gptq", "GPTQ", ("gptq",), (None,), "v1"),
                ("gptq_v2", "GPTQ version 2", ("gptq_v2", "gptq_p"), (), "v2"),
            )
        ),
        _dialect(
            "mlx",
            "MLX",
            "mlx",
            _method("mlx", "metal"),
            TensorGroup({"weight": ("U32",), "scales": (*_FLOATS, "U8")}, {"biases": _FLOATS}),
            TensorGroup({"weight": ("U32",), "scales": _FLOATS, "qbiases": _FLOATS}),
            settings=True,
            recipes=_MLX_RECIPES,
            embeddings=True,
        ),
        _dialect(
            "modelopt",
            "ModelOpt",
            "modelopt",
            _method("modelopt"),
            TensorGroup(
                {"weight_scale": ("F8_E4M3", *_FLOATS, *_POWERS), "weight": ("U8",)},
                {"weight_scale_2": (), "svdquant_lora_a": (), "svdquant_lora_b": ()},
            ),
            TensorGroup({"weight_scale": (*_FLOATS, *_POWERS), "weight": (*_FP8, "I8")}, needs_config=True),
            TensorGroup({"_weight_scale": (*_FLOATS, *_POWERS), "": _FP8}, value=""),
            TensorGroup(
                {"_weight_scale": ("F8_E4M3", *_FLOATS, *_POWERS), "": ("U8", "I8")}, {"_weight_scale_2": ()}, value=""
            ),
            settings=True,
            activations=_ACTIVATIONS,
            factors=("pre_quant_scale", "_pre_quant_scale"),
            recipes=(
                "nvfp4,order=scales_first",
                "fp8_row",
                "fp8_current",
                "fp8_block,block_m=128",
                "mxfp8",
                "mxfp4",
                "int4,scale_dtype=fp32",
                "int8",
            ),
        ),
        _dialect(
            "quark",
            "AMD Quark",
            "quark",
            _method("quark"),
            TensorGroup(
                {"weight_scale": ("F8_E4M3", *_FLOATS, *_POWERS), "weight": (*_FP8, "U8", "I8", "I16", "I32", "U16", "U32")},
                {"weight_zero_point": ()},
                needs_config=True,
            ),
            settings=True,
            activations=_ACTIVATIONS,
            recipes=("mxfp4", "fp8_row", "fp8_current", "fp8_block,block_m=128"),
        ),
        _refused("eetq", "EETQ", TensorGroup({"weight_scales": (), "weight": ("I8",)}), methods=("eetq",)),
        _refused("exl2", "EXL2", TensorGroup({"q_weight": (), "q_scale": (), "q_scale_max": ()}), methods=("exl2",)),
        _refused("exl3", "EXL3", TensorGroup({"trellis": ("I16",)}), methods=("exl3",)),
        _refused("fouroversix", "Four Over Six", methods=("fouroversix",)),
        _refused("fp_quant", "FP-Quant", methods=("fp_quant",)),
        _refused("gemma", "Gemma's integers", methods=("gemma",)),
        _dialect(
            "gguf",
            "GGUF",
            "gguf",
            _method("gguf"),
            TensorGroup({"": _GGUF}, value=""),
            TensorGroup({"weight": _GGUF}, {"scale": ("F32",)}),
            activations=_ACTIVATIONS,
            recipes=_GGUF_RECIPES,
            embeddings=True,
            config=None,  # what engines expect is in the file itself
            file="breccia_bridges.gguf_plan:GGUFPlan",
        ),
        _refused("higgs", "HIGGS", methods=("higgs",), remedy=_DEQUANTIZE),
        _dialect(
            "hqq",
            "HQQ",
            "hqq",
            _method("hqq"),
            TensorGroup({"W_q": ("U8", "I32")}, dict.fromkeys(_HQQ, ())),
            TensorGroup({"W_q": ()}, dict.fromkeys(_HQQ, ()), needs_config=True),  # bytes of codes as floats
            by_rows=False,
            rows="breccia_bridges.dialects.hqq:rows",
            recipes=_FLOAT_ZERO,
        ),
        _refused("nvfp4", "NVFP4 of transformers", methods=("nvfp4",)),
        _refused(
            "onnx", "ONNX Runtime", TensorGroup({"_quantized": ("U8", "I8"), "_scale": ()}, {"_zero_point": ()}, value="")
        ),
        _dialect(
            "quanto",
            "quanto",
            "quanto",
            _method("quanto"),
            TensorGroup({"._data": (), "._scale": ()}, value=""),
            TensorGroup({"._data._data": (), "._scale": (), "._shift": ()}, value=""),
            settings=True,
            activations=_ACTIVATIONS,
            by_rows=False,
            rows="breccia_bridges.dialects.quanto:rows",
            recipes=(
                *(f"int8,scale_dtype={dtype}" for dtype in ("bf16", "fp16", "fp32")),
                *("fp8_row", "fp8_row,fp8_format=E5M2", "fp8_current"),
                *(f"int_rounded,bits={bits},scale_dtype={dtype}" for bits in (4, 2) for dtype in ("bf16", "fp16")),
                "int4,symmetric=false,offset=bias,scale_dtype=fp32",
                "int,bits=2,symmetric=false,offset=bias,scale_dtype=fp32",
            ),
        ),
        _refused("sinq", "SINQ", methods=("sinq",)),
        _refused("spqr", "SpQR", methods=("spqr",)),
        _dialect(
            "torchao",
            "torchao",
            "torchao",
            _method("torchao"),
            TensorGroup({"_qdata": ()}, dict.fromkeys(_TORCHAO, ()), value="", prefix="_"),
            metadata=("tensor_names",),
            **_writers("torchao_writer"),
            header="breccia_bridges.dialects.torchao_writer:header",
            recipes=_TORCHAO_RECIPES,
        ),
        Dialect(
            "unknown",
            "codes with scales, of an unknown program",
            groups=(
                TensorGroup({"_scale": (), "": CODES}, value=""),
                TensorGroup({"scale": (), "weight": CODES}),
                TensorGroup({"scales": (), "weight": CODES}),
                TensorGroup({"qweight": (), "scales": ()}),
            ),
            remedy=_ORIGINAL,
        ),
        _refused("vptq", "VPTQ", methods=("vptq",)),
    ]
