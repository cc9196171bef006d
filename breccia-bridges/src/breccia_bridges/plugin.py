"""Everything breccia-bridges adds to breccia: one line per bridge and command."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from breccia import (
    Bridge,
    Codec,
    Command,
    Dialect,
    Foreign,
    Format,
    Integer,
    Level,
    Lookup,
    RecipeError,
    ScalingRecipe,
    hookimpl,
)
from breccia.backend import F16, F32, INT4, INT8, TENSOR, TensorGroup
from breccia.internal import FLOAT_CODECS, cached_property, check_choices, check_positive, one_of

api = 1


@dataclass(frozen=True)
class SignedInt4Scaling(ScalingRecipe):
    """Signed 4-bit integers with a float bias, `x = scale * code + bias`: what torchao's Int4Tensor holds.

    It is for reading such tensors. A cast measures codes from the bias up and so writes 0..7 only: to quantize, use
    `INT4Scaling(signed=False, symmetric=False, offset="bias")`.
    """

    name: ClassVar[str] = "int4_bias"
    source: ClassVar[str] = "torchao 0.18, torchao.quantization.Int4Tensor"
    group_size: int = 128
    scale_dtype: str = field(default="bf16", metadata=one_of(FLOAT_CODECS))

    def __post_init__(self) -> None:
        check_positive("SignedInt4Scaling", "group_size", self.group_size)
        check_choices(self)

    @cached_property
    def format(self) -> Format:
        return Format(INT4, (Level(FLOAT_CODECS[self.scale_dtype], (1, self.group_size)),), "bias")


#: Unsigned integers by width. Core has those of 4 and 8 bits.
_UNSIGNED = {bits: Integer(f"UINT{bits}", bits, None, "unsigned binary", False) for bits in (2, 3, 5, 6)}


@dataclass(frozen=True)
class AffineScaling(ScalingRecipe):
    """Unsigned integers of 2, 3, 5 or 6 bits with a float bias, `x = scale * code + bias`: MLX's mode "affine".

    Those of 4 and 8 bits are `INT4Scaling` and `INT8Scaling` with `signed=False, symmetric=False, offset="bias"`. Codes are
    packed from the lowest bit up, without gaps: 8 codes of 3 bits in 3 bytes.
    """

    name: ClassVar[str] = "mlx_affine"
    source: ClassVar[str] = "MLX 0.32, mlx.core.quantize, mode 'affine'"
    bits: int = field(default=3, metadata=one_of(_UNSIGNED))
    group_size: int = field(default=64, metadata=one_of((32, 64, 128)))
    scale_dtype: str = field(default="fp16", metadata=one_of(FLOAT_CODECS))

    def __post_init__(self) -> None:
        if self.bits in (4, 8):
            fields = f"group_size={self.group_size},signed=false,symmetric=false,offset=bias,scale_dtype={self.scale_dtype}"
            raise RecipeError(
                f"mlx_affine has 2, 3, 5 and 6 bits, got bits={self.bits}; MLX's arrays of {self.bits} bits are the recipe "
                f"'int{self.bits},{fields}'.",
                bits=self.bits,
            )
        check_choices(self)

    @cached_property
    def format(self) -> Format:
        return Format(_UNSIGNED[self.bits], (Level(FLOAT_CODECS[self.scale_dtype], (1, self.group_size)),), "bias")


#: Twelfths of 0, 1/16, 8, 12, 4, 6, 2, 3, as FP32 numbers.
_FP4 = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
#: bitsandbytes' table of FP4. Codes 0 and 8 both stand for +0.
BNB_FP4 = Lookup("BNB_FP4", 4, None, "bitsandbytes 0.50, functional.get_4bit_type", (*_FP4, 0.0, *(-v for v in _FP4[1:])))


@dataclass(frozen=True)
class BnbFP4Scaling(ScalingRecipe):
    """4-bit codes of bitsandbytes' table "fp4", which is not E2M1, with an FP32 absmax per `block_size` elements along K.

    It is for weights that bitsandbytes wrote or will read. To quantize for others, `NF4Scaling` is more accurate on normally
    distributed weights, and hardware multiplies the codes of `MXFP4BlockScaling` and `NVFP4BlockScaling`.
    """

    name: ClassVar[str] = "bnb_fp4"
    source: ClassVar[str] = "bitsandbytes 0.50, bitsandbytes.nn.Params4bit, quant_type 'fp4'"
    block_size: int = 64

    def __post_init__(self) -> None:
        check_positive("BnbFP4Scaling", "block_size", self.block_size)

    @cached_property
    def format(self) -> Format:
        return Format(BNB_FP4, (Level(F32, (1, self.block_size)),))


@dataclass(frozen=True)
class BnbINT8Scaling(ScalingRecipe):
    """Signed 8-bit integers, an FP16 absmax per row and one FP32 scale for all: `x = code * absmax * scale`, rounded twice.

    It is for reading weights of bitsandbytes' LLM.int8(), whose scale is FP32(1 / 127). A cast chooses another one: to
    quantize, use `INT8Scaling`.
    """

    name: ClassVar[str] = "bnb_int8"
    source: ClassVar[str] = "bitsandbytes 0.50, bitsandbytes.nn.Int8Params"

    @cached_property
    def format(self) -> Format:
        return Format(INT8, (Level(F32, TENSOR), Level(F16, (1, None))))


@hookimpl
def breccia_codecs() -> Iterable[Codec]:
    return [*_UNSIGNED.values(), BNB_FP4]


@hookimpl
def breccia_recipes() -> Iterable[type[ScalingRecipe]]:
    return [SignedInt4Scaling, AffineScaling, BnbFP4Scaling, BnbINT8Scaling]


@hookimpl
def breccia_bridges() -> Iterable[Bridge]:
    safetensors = "breccia_bridges.safetensors"
    deepseek = "breccia_bridges.deepseek"
    engine = "breccia_bridges.transformer_engine"
    return [
        Bridge("save_safetensors", f"{safetensors}:save_safetensors"),
        Bridge("load_safetensors", f"{safetensors}:load_safetensors"),
        Bridge("load_checkpoint", "breccia_bridges.loading:load_checkpoint"),
        Bridge("safetensors_metadata", f"{safetensors}:safetensors_metadata"),
        Bridge("refuse_in_transformers", "breccia_bridges.huggingface:refuse_in_transformers"),
        Bridge("convert", "breccia_bridges.convert:convert"),
        Bridge("compare", "breccia_bridges.compare:compare"),
        Bridge("from_deepseek_v3", f"{deepseek}:from_deepseek_v3"),
        Bridge("to_deepseek_v3", f"{deepseek}:to_deepseek_v3"),
        Bridge("from_dlpack", "breccia_bridges.dlpack:from_dlpack"),
        Bridge("to_dlpack", "breccia_bridges.dlpack:to_dlpack"),
        *_both("torchao"),
        *_both("transformer_engine"),
        *_both("bitsandbytes"),
        Bridge("from_te_recipe", f"{engine}:from_te_recipe", ("torch",), "torch"),
        Bridge("to_te_recipe", f"{engine}:to_te_recipe", ("torch",), "torch"),
        Bridge("torchao_activation", "breccia_bridges.torchao:torchao_activation", ("torch",), "torch"),
        *_both("compressed_tensors"),
        Bridge("from_qwix", "breccia_bridges.qwix:from_qwix", ("jax",), "jax"),
        Bridge("to_qwix", "breccia_bridges.qwix:to_qwix", ("jax", "qwix"), "qwix"),
        Bridge("from_mlx_layer", "breccia_bridges.mlx:from_mlx_layer", requires=("mlx",), install="breccia-mlx"),
        Bridge("to_mlx_layer", "breccia_bridges.mlx:to_mlx_layer", requires=("mlx",), install="breccia-mlx"),
        Bridge("from_mlx", "breccia_bridges.mlx:from_mlx", requires=("mlx",), install="breccia-mlx"),
        Bridge("to_mlx", "breccia_bridges.mlx:to_mlx", requires=("mlx",), install="breccia-mlx"),
    ]


def _both(library: str) -> Iterable[Bridge]:
    """`from_library`, and `to_library`, which says what to install when it is called: with `like=` it imports nothing."""
    for name in (f"from_{library}", f"to_{library}"):
        yield Bridge(name, f"breccia_bridges.{library}:{name}", ("torch",), "torch")


@hookimpl
def breccia_foreign() -> Iterable[Foreign]:
    torchao, engine = "breccia_bridges.torchao", "breccia_bridges.transformer_engine"
    return [
        Foreign(
            "transformer_engine",
            tuple(
                f"transformer_engine:{name}{storage}"
                for name in ("Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor", "NVFP4Tensor")
                for storage in ("", "Storage")
            ),
            f"{engine}:from_transformer_engine",
            f"{engine}:to_transformer_engine",
        ),
        Foreign(
            "torchao",
            tuple(
                f"torchao:{name}"
                for name in (
                    "Float8Tensor",
                    "Int8Tensor",
                    "IntxUnpackedToInt8Tensor",
                    "Int4Tensor",
                    "MXTensor",
                    "NVFP4Tensor",
                    "AffineQuantizedTensor",
                )
            ),
            f"{torchao}:from_torchao",
            f"{torchao}:to_torchao",
            requires=("torchao",),
            install="torchao",
        ),
        Foreign(
            "bitsandbytes",
            ("bitsandbytes:Params4bit",),
            "breccia_bridges.bitsandbytes:from_bitsandbytes",
            "breccia_bridges.bitsandbytes:to_bitsandbytes",
            requires=("bitsandbytes",),
            install="bitsandbytes",
        ),
        Foreign(
            "mlx",
            ("mlx.nn:QuantizedLinear", "mlx.nn:QuantizedEmbedding"),
            "breccia_bridges.mlx:from_mlx_layer",
            "breccia_bridges.mlx:to_mlx_layer",
            requires=("mlx",),
            install="breccia-mlx",
        ),
        Foreign(
            "qwix",
            ("qwix:QArray",),
            "breccia_bridges.qwix:from_qwix",
            "breccia_bridges.qwix:to_qwix",
            requires=("qwix",),
            install="qwix",
        ),
    ]


_FP8 = ("F8_E4M3", "F8_E5M2")
_FLOATS = ("F32", "BF16", "F16")
_POWERS = ("F8_E8M0", "U8")
#: The parts of GPTQ and AWQ.
_QWEIGHT = {"qweight": ("I32",), "qzeros": ("I32",), "scales": _FLOATS}
#: AutoRound's packings that are as those of GPTQ and AWQ.
_AUTO_ROUND = ("auto_round", *(f"auto_round:{name}" for name in ("auto_awq", "auto_gptq", "awq", "gptq", "gptqmodel")))
_ORIGINAL = "Breccia does not read it: convert the checkpoint that it was made from, in BF16, FP16 or FP32."
_DEQUANTIZE = (
    "Breccia does not read it: load it with transformers, call model.dequantize() and save the model; or convert the "
    "checkpoint that it was made from, in BF16, FP16 or FP32."
)
_HQQ = (
    "Breccia does not read it, because (code - zero) * scale with a float zero has no exact form in a ScaledTensor: save "
    "HQQLinear.dequantize() of each layer with hqq, or convert the checkpoint that it was made from, in BF16, FP16 or FP32."
)


def _dialect(name: str, title: str, module: str, configs: Any, *groups: TensorGroup, settings: bool = False) -> Dialect:
    """A dialect with the functions of a module of `breccia_bridges.dialects`."""
    home = f"breccia_bridges.dialects.{module}"
    of = f"{home}:settings" if settings else None
    return Dialect(name, title, configs, groups, f"{home}:form", f"{home}:read", settings=of)


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
#: Parts of ComfyUI's weights that only some formats have.
_COMFY = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")


def _bnb_groups() -> Iterable[TensorGroup]:
    """A 4-bit weight is looked for by three of its parts, so that one that lacks others is not taken for plain bytes."""
    for first in _BNB[:3]:
        yield TensorGroup({first: (), "": ()}, {end: () for end in _BNB if end != first}, value="")
    yield TensorGroup({"SCB": (), "weight": ("I8",)}, {"weight_format": ()})


def _refused(name: str, title: str, *groups: TensorGroup, methods: tuple[str, ...] = (), remedy: str = _ORIGINAL) -> Dialect:
    """A dialect that is recognized only, by a config of one of `methods` or by its tensors."""
    return Dialect(name, title, _method(*methods) if methods else (), groups, remedy=remedy)


@hookimpl
def breccia_dialects() -> Iterable[Dialect]:
    gptq = "breccia_bridges.dialects.gptq"
    return [
        _refused("aqlm", "AQLM", TensorGroup({"codebooks": (), "codes": (), "scales": ()}), methods=("aqlm",)),
        _refused("bitnet", "BitNet", methods=("bitnet",)),
        _dialect("bitsandbytes", "bitsandbytes", "bitsandbytes", _method("bitsandbytes"), *_bnb_groups()),
        _dialect(
            "comfy_quant",
            "ComfyUI",
            "comfyui",
            (),
            TensorGroup({"comfy_quant": ("U8",), "weight": ()}, dict.fromkeys(_COMFY, ())),
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
        ),
        _dialect(
            "deepseek_v3",
            "block FP8, as DeepSeek-V3",
            "fp8",
            _method("fp8", "mxfp8"),
            TensorGroup({"_scale_inv": (*_FLOATS, *_POWERS), "": _FP8}, value=""),
        ),
        _dialect(
            "fp8_scale",
            "FP8 with weight_scale",
            "fp8",
            _method("fp8", "fbgemm_fp8"),
            TensorGroup({"weight_scale": _FLOATS, "weight": _FP8}),
        ),
        _dialect(
            "deepseek_v4",
            "DeepSeek-V4",
            "deepseek_v4",
            _method("fp8"),
            TensorGroup({"scale": ("F8_E8M0",), "weight": (*_FP8, "I8")}),
        ),
        _dialect(
            "gpt_oss",
            "MXFP4, as gpt-oss",
            "gpt_oss",
            _method("mxfp4"),
            TensorGroup({"_blocks": ("U8",), "_scales": ("U8",)}, value=""),
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
                f"{gptq}:form",
                f"{gptq}:{read}",
                settings=f"{gptq}:settings",
            )
            for name, title, formats, absent, read in (
                ("gptq", "GPTQ", ("gptq",), (None,), "read_v1"),
                ("gptq_v2", "GPTQ version 2", ("gptq_v2", "gptq_p"), (), "read_v2"),
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
        ),
        _refused("eetq", "EETQ", TensorGroup({"weight_scales": (), "weight": ("I8",)}), methods=("eetq",)),
        _refused("exl2", "EXL2", TensorGroup({"q_weight": (), "q_scale": (), "q_scale_max": ()}), methods=("exl2",)),
        _refused("exl3", "EXL3", TensorGroup({"trellis": ("I16",)}), methods=("exl3",)),
        _refused("fouroversix", "Four Over Six", methods=("fouroversix",)),
        _refused("fp_quant", "FP-Quant", methods=("fp_quant",)),
        _refused("gemma", "Gemma's integers", methods=("gemma",)),
        _refused("gguf", "GGUF", methods=("gguf",)),
        _refused("higgs", "HIGGS", methods=("higgs",), remedy=_DEQUANTIZE),
        _refused("hqq", "HQQ or SINQ", TensorGroup({"W_q": ("U8", "I8", "I16", "I32")}), methods=("hqq", "sinq"), remedy=_HQQ),
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
        ),
        _refused("spqr", "SpQR", methods=("spqr",)),
        _dialect(
            "torchao",
            "torchao",
            "torchao",
            _method("torchao"),
            TensorGroup({"_qdata": ()}, dict.fromkeys(_TORCHAO, ()), value="", prefix="_"),
        ),
        Dialect(
            "unknown",
            "codes with scales, of an unknown program",
            groups=(
                TensorGroup({"_scale": (), "": (*_FP8, "I8", "U8")}, value=""),
                TensorGroup({"scale": (), "weight": (*_FP8, "I8", "U8")}),
                TensorGroup({"scales": (), "weight": (*_FP8, "I8", "U8")}),
                TensorGroup({"qweight": (), "scales": ()}),
            ),
            remedy=_ORIGINAL,
        ),
        _refused("vptq", "VPTQ", methods=("vptq",)),
    ]


@hookimpl
def breccia_cli() -> Iterable[Command]:
    return [
        Command("convert", "breccia_bridges.commands:convert", "Quantize a checkpoint: a .safetensors file or a folder."),
        Command("compare", "breccia_bridges.commands:compare", "Compare checkpoints tensor by tensor."),
        Command("inspect", "breccia_bridges.commands:inspect", "List a checkpoint's tensors, and suspicious scales."),
    ]
