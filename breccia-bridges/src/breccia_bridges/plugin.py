"""Everything breccia-bridges adds to breccia: one line per bridge and command."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Bridge, Codec, Command, Dialect, Foreign, ScalingRecipe, hookimpl

from .dialects.declared import declared
from .recipes import BNB_FP4, AffineScaling, BnbFP4Scaling, BnbINT8Scaling, RoundedIntScaling, SignedInt4Scaling

api = 1


@hookimpl
def breccia_codecs() -> Iterable[Codec]:
    return [BNB_FP4]


@hookimpl
def breccia_recipes() -> Iterable[type[ScalingRecipe]]:
    return [SignedInt4Scaling, AffineScaling, RoundedIntScaling, BnbFP4Scaling, BnbINT8Scaling]


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
        Bridge("merge", "breccia_bridges.merge:merge"),
        Bridge("compare", "breccia_bridges.compare:compare"),
        Bridge("diff", "breccia_bridges.diff:diff"),
        Bridge("why", "breccia_bridges.why:why"),
        Bridge("from_deepseek_v3", f"{deepseek}:from_deepseek_v3"),
        Bridge("to_deepseek_v3", f"{deepseek}:to_deepseek_v3"),
        Bridge("from_dlpack", "breccia_bridges.dlpack:from_dlpack"),
        Bridge("to_dlpack", "breccia_bridges.dlpack:to_dlpack"),
        *_both("torchao"),
        *_both("transformer_engine"),
        *_both("bitsandbytes"),
        Bridge("from_te_recipe", f"{engine}_recipes:from_te_recipe", ("torch",), "torch"),
        Bridge("to_te_recipe", f"{engine}_recipes:to_te_recipe", ("torch",), "torch"),
        Bridge("torchao_activation", "breccia_bridges.torchao_activations:torchao_activation", ("torch",), "torch"),
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


@hookimpl
def breccia_dialects() -> Iterable[Dialect]:
    return declared()


@hookimpl
def breccia_cli() -> Iterable[Command]:
    return [
        Command("convert", "breccia_bridges.commands:convert", "Quantize a checkpoint: a .safetensors file or a folder."),
        Command("merge", "breccia_bridges.merge_command:merge", "Add a LoRA adapter to a quantized checkpoint."),
        Command("compare", "breccia_bridges.commands:compare", "Compare checkpoints tensor by tensor."),
        Command("why", "breccia_bridges.why_command:why", "Say which layers cost most when quantized, and what helps."),
        Command("diff", "breccia_bridges.diff_command:diff", "Say which tensors of two checkpoints differ, and why."),
        Command("inspect", "breccia_bridges.inspect_command:inspect", "List a checkpoint's tensors, and suspicious scales."),
    ]
