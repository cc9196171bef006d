"""The quantizer that transformers calls while it loads and saves models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    revert_weight_conversion,
)
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

import breccia
from breccia import OptionError, Policy, ScaledTensor, ScalingRecipe, UnsupportedError, bridges
from breccia.backend import PARTS, Metadata, as_recipe, components

from ..checkpoint import is_floating
from ..nn import STATE, ScaledConv1D, ScaledExperts, ScaledLinear, ScaledWeight
from ..placing import components_of, dispatch_again, need_values, placement
from ..quantize import expert_parameters, is_conv1d, is_linear, quantize_, replace, replace_experts, scaled_class, weights_of
from ..storing import AUTO, arrange, arrange_experts
from ..values import Values, check_all_quantized, stacked
from . import gguf
from .marking import fields_of, watch
from .places import Place, natural, places_of
from .reading import IGNORED, Reader
from .tying import Ties, decode_tables, is_within
from .tying import watch as watch_ties

METHOD = "breccia"

watch()
watch_ties()

logger = logging.get_logger(__name__)


@register_quantization_config(METHOD)
class BrecciaConfig(QuantizationConfigMixin):
    """The `quantization_config` of a model quantized by breccia.

    recipe: a ScalingRecipe, its spec ("nvfp4", "fp8_block,block_m=128"), or what its `to_dict` returns; to quantize a model
        that is loaded, also a `breccia.Policy`, the name of a preset or the path of a YAML file. A quantized model has the
        recipe of most of its weights here; files say which one each weight has. None keeps every code and scale of a
        checkpoint that another library quantized; with a recipe, its values are decoded and quantized again.
    activation: the same for a recipe under which linear layers cast their inputs; None leaves inputs unchanged.
    activations: recipes for the inputs of single layers, by name, where they differ from `activation`.
    modules_to_not_convert: names of modules that keep their precision, whole or from a dot on ("lm_head"), in addition to the
        embeddings, norms, routers and output heads that `breccia_torch.quantize_` leaves.
    source_dialect: how another library stores its quantized values, as for `breccia.bridges.load_checkpoint`, where the files
        leave a choice.

    Raises what `breccia.recipe` raises, and OptionError for a field that this version of breccia does not know.
    """

    def __init__(
        self,
        recipe: Any = None,
        activation: Any = None,
        modules_to_not_convert: list[str] | None = None,
        quant_method: str = METHOD,
        breccia_version: str | None = None,
        activations: dict[str, Any] | None = None,
        source_dialect: str | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise OptionError(
                f"quantization_config has {', '.join(map(repr, unknown))}, unknown to breccia {breccia.__version__}; it was "
                f"written by breccia {breccia_version or 'of an unknown version'}. Upgrade breccia-torch.",
                unknown=tuple(unknown),
            )
        self.quant_method = quant_method  # pyright: ignore[reportAttributeAccessIssue]
        self.policy = None if recipe is None else Policy.of(_recipe(recipe) if isinstance(recipe, dict) else recipe)
        self.recipe = None if self.policy is None else self.policy.recipes[0]
        self.activation, self.source_dialect = _recipe_or_none(activation), source_dialect
        self.activations = {name: _recipe_or_none(description) for name, description in (activations or {}).items()}
        self.modules_to_not_convert = modules_to_not_convert

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds."""
        fields: dict[str, Any] = {"quant_method": METHOD, "breccia_version": breccia.__version__}
        if self.recipe is not None:
            fields["recipe"] = self.recipe.to_dict()
        if self.activation is not None:
            fields["activation"] = self.activation.to_dict()
        if self.activations:
            listed = self.activations.items()
            fields["activations"] = {name: None if recipe is None else recipe.to_dict() for name, recipe in listed}
        for name in ("modules_to_not_convert", "source_dialect"):
            if getattr(self, name):
                fields[name] = getattr(self, name)
        return fields


gguf.watch(BrecciaConfig)


def _recipe(description: Any) -> ScalingRecipe:
    return ScalingRecipe.from_json(json.dumps(description)) if isinstance(description, dict) else as_recipe(description)


def _recipe_or_none(description: Any) -> ScalingRecipe | None:
    return None if description is None else _recipe(description)


@register_quantizer(METHOD)
class BrecciaHfQuantizer(HfQuantizer):
    """Loads the folders that `breccia convert` and `save_pretrained` write, and quantizes models after loading."""

    requires_calibration = False
    quantization_config: Any

    def __init__(self, quantization_config: BrecciaConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self._decoded: dict[str, ScaledTensor] = {}
        self._stacked: set[str] = set()
        self._reader: Reader | None = None
        self._ties: Ties | None = None
        self._checkpoint: Any = None  # of a GGUF file

    def is_serializable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return True

    @property
    def is_trainable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """True: gradients pass through the layers to their inputs, and so to adapters."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def update_attn_implementation(self, config: Any) -> Any:
        """The config without the entry that keeps transformers from loading a folder when this module is not imported."""
        if "breccia_torch.hf" in (getattr(config, "transformers_weights", None) or ""):
            config.transformers_weights = None
        return super().update_attn_implementation(config)

    # -- quantized checkpoints -----------------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, device_map: Any = None, **_: Any
    ) -> Any:
        """Give the model layers with empty components of the shapes and dtypes in the files.

        A folder may be quantized although transformers saw no method: config.json named one that it does not know, or the
        caller took that out.
        """
        config = self.quantization_config
        checkpoint = self._checkpoint
        if checkpoint is None:
            if not checkpoint_files or not str(checkpoint_files[0]).endswith(".safetensors"):
                if not self.pre_quantized and config.policy is not None:
                    return model
                raise UnsupportedError(
                    f"breccia loads safetensors files, and GGUF files as gguf_file=; got {checkpoint_files}."
                )
            checkpoint = bridges.load_checkpoint(checkpoint_files, framework="torch", source_dialect=config.source_dialect)
        else:
            gguf.check_config(model, checkpoint)
        folder = Path(checkpoint_files[0]).parent
        places = places_of(model, checkpoint)
        checkpoint.check_codes(place.name for place in places if is_floating(place.parameter))
        if not checkpoint.dialects:
            if self.pre_quantized:
                raise UnsupportedError(f"{folder} has a breccia quantization_config and no tensor that breccia quantized.")
            if config.policy is None:
                raise UnsupportedError(f"{folder} has no quantized tensor: give BrecciaConfig the recipe to quantize under.")
            return model
        keeps = self.pre_quantized = self.pre_quantized or config.policy is None
        # The layers' metadata comes from the files' configs, not from the state.
        model._keys_to_ignore_on_load_missing = [*(model._keys_to_ignore_on_load_missing or ()), rf"\.{STATE}$"]
        checkpoint.check_inputs({place.name for place in places})
        scaled = [place for place in places if checkpoint.header(place.name).recipe is not None]
        for place in scaled:
            place.check()
        kept = config.modules_to_not_convert or ()
        self._ties = ties = Ties(model, (place.target for place in places), device_map, kept)
        if not keeps or checkpoint.dialects != [METHOD] or any(place.transposes for place in scaled):
            self._read(model, checkpoint, scaled, ties)
            return model
        columns: dict[str, dict[str, dict[str, ScaledTensor]]] = {}
        for place in scaled:
            empty = checkpoint[place.name].to("meta")
            if place.pattern is not None:
                columns.setdefault(place.target, {}).setdefault(place.pattern, {})[place.name] = empty
            else:
                self._place(model, place.name, place.target, empty, ties)
        for target, projections in columns.items():
            self._place_experts(model, target, projections)
        return model

    def _read(self, model: Any, checkpoint: Any, places: list[Place], ties: Ties) -> None:
        """Let breccia read these values of the checkpoint: of other dialects than its own, or that are transposed."""
        config = self.quantization_config
        single: dict[str, str] = {}
        columns: dict[str, dict[str, list[str]]] = {}
        turned: set[str] = set()
        for place in places:
            if place.pattern is not None and not place.transposes:
                columns.setdefault(place.target, {}).setdefault(place.pattern, []).append(place.name)
                continue
            single[place.target] = place.name
            if place.turns(checkpoint.header(place.name).shape):
                turned.add(place.name)
        stacks = {target: [sorted(column, key=natural) for column in of.values()] for target, of in columns.items()}
        flipped = {name for target, name in single.items() if is_conv1d(model.get_submodule(target.rpartition(".")[0]))}
        self._reader = reader = Reader(model, checkpoint, Values(checkpoint, stacks, flipped, turned))
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), IGNORED}
        for target, column in stacks.items():
            self._check_experts(model, target, list(columns[target]), sum(map(len, column)))
        for target in (*single, *stacks):
            name = single.get(target, target)
            keeps = self.pre_quantized and not is_within(target, config.modules_to_not_convert or ())
            if reader.add(target, name, ties, keeps=keeps):
                owner = target.rpartition(".")[0]
                layer = model.get_submodule(owner)
                if isinstance(layer, ScaledLinear):
                    layer.activation = self._activation_of(owner)
        for part in [model.config, *(getattr(model.config, key) for key in model.config.sub_configs)]:
            for key in ("quantization", "compression_config"):  # what other libraries than transformers read
                if hasattr(part, key):
                    delattr(part, key)

    def _place(self, model: Any, name: str, target: str, empty: ScaledTensor, ties: Ties) -> None:
        """An empty quantized layer where `target` is the weight of one; else the weight is decoded while loading."""
        owner, _, leaf = target.rpartition(".")
        module = model.get_submodule(owner)
        if leaf in expert_parameters(module):
            replace_experts(module, leaf, ScaledExperts(empty, getattr(module, leaf).dtype))
        elif target in ties:
            if not ties.take(target, empty):
                self._decoded[name] = empty
        elif leaf == "weight" and is_linear(module):
            layer_class: Any = scaled_class(module)
            replace(model, owner, layer_class.in_place_of(module, ScaledWeight(empty), self._activation_of(owner)))
        else:
            self._decoded[name] = empty

    def _activation_of(self, layer: str) -> ScalingRecipe | None:
        """The recipe for the inputs of the layer of that name."""
        config = self.quantization_config
        return config.activations.get(layer, config.activation)

    def _check_experts(self, model: Any, target: str, patterns: list[str], quantized: int) -> None:
        """Raise UnsupportedError unless `target` is a parameter of experts, and that many weights are all of them."""
        owner, _, leaf = target.rpartition(".")
        module = model.get_submodule(owner)
        if leaf not in expert_parameters(module):
            raise UnsupportedError(
                f"{target} of {type(model).__name__} is converted from quantized weights ({', '.join(patterns)}), which "
                "breccia does for experts alone. Convert the checkpoint again, with --exclude for these weights."
            )
        check_all_quantized(target, quantized, len(patterns) * len(getattr(module, leaf)))

    def _place_experts(self, model: Any, target: str, columns: dict[str, dict[str, ScaledTensor]]) -> None:
        self._check_experts(model, target, list(columns), sum(map(len, columns.values())))
        owner, _, leaf = target.rpartition(".")
        module = model.get_submodule(owner)
        parameter = getattr(module, leaf)
        tensor = stacked([[column[name] for name in sorted(column, key=natural)] for column in columns.values()], target)
        weight = ScaledExperts(tensor, parameter.dtype)
        if weight.shape != tuple(parameter.shape):
            raise UnsupportedError(
                f"{target} has shape {tuple(parameter.shape)} in the model, and the experts of the files make {weight.shape}."
            )
        replace_experts(module, leaf, weight)
        self._stacked.add(target)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Load the components of stacked experts by a copy of the conversion of the weight, and decode what has no layer."""
        updated: list[Any] = [
            WeightConverter([f"^{re.escape(f'{name}.{part}')}$" for part in components(st)], name, [_Decode(self, st)])
            for name, st in self._decoded.items()
        ]
        for conversion in weight_conversions if self._stacked else ():
            if isinstance(conversion, WeightConverter):
                sources, targets = conversion.source_patterns, conversion.target_patterns
                if any(target.endswith(targets[0]) for target in self._stacked):
                    updated += [
                        conversion.copy([f"{s}.{part}" for s in sources], [f"{targets[0]}.{part}"], operations=[_Stack(self)])
                        for part in PARTS
                    ]
        return [*(self._reader.conversions if self._reader else ()), *updated, *weight_conversions]

    # -- GGUF files ----------------------------------------------------------------------------------------------

    def read_header(self, gguf_file: str) -> None:
        """Open a GGUF file, of which transformers has made the config."""
        dialect = self.quantization_config.source_dialect
        self._checkpoint = bridges.load_checkpoint(gguf_file, framework="torch", source_dialect=dialect)

    def update_dtype(self, dtype: Any) -> Any:
        """The dtype of the model: that of a GGUF file where neither the caller nor a config names one."""
        return gguf.dtype_of(self._checkpoint) if dtype is None and self._checkpoint is not None else dtype

    def get_state_dict(self, checkpoint_file: str, model: Any) -> dict[str, Any]:
        """The tensors of the GGUF file that was opened."""
        return gguf.state_of(self._checkpoint)

    # -- after loading -------------------------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self.pre_quantized:
            _restore_dtypes(model)
            if self._ties is not None:
                self._ties.install(self._activation_of)
            if (placed := placement(model)) is not None:
                dispatch_again(model, placed)
            for module in model.modules():
                if isinstance(module, ScaledLinear):
                    arrange(module, AUTO, model.dtype)
                for weight in module.children():
                    if isinstance(weight, ScaledExperts):
                        arrange_experts(module, weight, AUTO)
        else:
            config = self.quantization_config
            unconverted = {*(config.modules_to_not_convert or ()), *(model._keep_in_fp32_modules or ())}
            exclude = [name for name in _weights(model) if is_within(name, unconverted)]
            summary = quantize_(model, config.policy.keeping(exclude), activation=config.activation)
            logger.info("%r", summary)
        self._reader = self._checkpoint = self._ties = None
        if not any(isinstance(module, ScaledWeight) for module in model.modules()):  # all values were decoded
            self.remove_quantization_config(model)
        else:
            attach(model, self)
        return model

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        """Replace all quantized layers by their decoded values in `dtype`."""
        need_values("dequantize", model)
        # After `save_pretrained`, the model's config has a name.
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        decode_tables(model, dtype or torch.float32)
        for name, module in list(model.named_modules()):
            if isinstance(module, ScaledConv1D):
                replace(model, name, _conv1d(module, dtype or torch.float32))
            elif isinstance(module, ScaledLinear):
                replace(model, name, module.to_linear(dtype or torch.float32))
            elif isinstance(module, ScaledExperts):
                values = module.decoded().to(dtype or module.dtype)
                owner, _, leaf = name.rpartition(".")
                delattr(model.get_submodule(owner), leaf)
                model.get_submodule(owner).register_parameter(leaf, nn.Parameter(values))
        return model

    def get_state_dict_and_metadata(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model: Any
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The components as `breccia.bridges.save_safetensors` stores them, and the metadata that describes them."""
        weights = {name: _plain(model, name, m) for name, m in model.named_modules() if isinstance(m, ScaledWeight)}
        owned = tuple(f"{name}." for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, ScaledWeight))
        state = {k: v for k, v in model.state_dict().items() if not k.startswith(owned) and not k.endswith(STATE)}
        for name, st in weights.items():
            for part, tensor in components(st).items():
                tensor = tensor.detach().contiguous()
                state[f"{name}.{part}"] = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        saved = {_saved_name(model, name): st for name, st in weights.items()}
        return state, bridges.safetensors_metadata(saved)


class _Stack(ConversionOps):
    """One component of all experts: (experts, ...), or (experts, projections, ...) where a parameter fuses several."""

    def __init__(self, hf_quantizer: HfQuantizer) -> None:
        self.hf_quantizer = hf_quantizer  # transformers casts no input of an operation that has this attribute

    def convert(self, input_dict: dict[str, Any], source_patterns: Any, target_patterns: Any, **_: Any) -> dict[str, Any]:
        each = [torch.stack(input_dict[pattern]) for pattern in source_patterns]
        return {target_patterns[0]: each[0] if len(each) == 1 else torch.stack(each, dim=1)}


class _Decode(ConversionOps):
    """The values of a quantized weight whose module has no quantized layer, such as an embedding."""

    def __init__(self, hf_quantizer: HfQuantizer, like: ScaledTensor) -> None:
        self.hf_quantizer, self.like = hf_quantizer, like

    def convert(self, input_dict: dict[str, Any], source_patterns: Any, target_patterns: Any, **options: Any) -> dict[str, Any]:
        empty = components(self.like)
        loaded = {part: tensors[0] for part, tensors in zip(empty, (input_dict[p] for p in source_patterns), strict=True)}
        like, parts = self.like, {part: loaded[part].view(empty[part].dtype) for part in empty}
        st = ScaledTensor.from_parts(recipe=like.recipe, layout=like.layout, axis=like.axis, padding=like.padding, **parts)
        name = options["full_layer_name"]
        return {name: breccia.dequantize(st, out_dtype=options["model"].get_parameter(name).dtype)}


def _conv1d(layer: ScaledConv1D, dtype: torch.dtype) -> Conv1D:
    """transformers' layer with the decoded weight."""
    conv1d = Conv1D(layer.out_features, layer.in_features)
    conv1d.weight = nn.Parameter(breccia.dequantize(layer.weight.tensor, out_dtype=dtype))
    conv1d.register_parameter("bias", layer.bias)
    return conv1d.train(layer.training)


def attach(model: Any, quantizer: BrecciaHfQuantizer | None = None) -> None:
    """Let `save_pretrained` save a transformers model with quantized layers, in a form that `from_pretrained` loads.

    quantizer: by default the model's, if breccia made it, else a new one. Its config is set to what the layers hold; call
        `attach` again after other layers are quantized.

        >>> import transformers, breccia_torch
        >>> from breccia_torch.hf import attach
        >>> sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, **sizes))
        >>> summary = breccia_torch.quantize_(model, "mxfp8")
        >>> attach(model)
        >>> model.config.quantization_config.recipe.spec
        'mxfp8'
        >>> model.save_pretrained(tmp)
    """
    fields: dict[str, Any] = fields_of(model)
    current = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        new = BrecciaHfQuantizer(BrecciaConfig(**fields), pre_quantized=False)
        quantizer = current if isinstance(current, BrecciaHfQuantizer) else new
    config: Any = quantizer.quantization_config
    quantizer.quantization_config = BrecciaConfig(**{**fields, "modules_to_not_convert": config.modules_to_not_convert})
    model.hf_quantizer, model.config.quantization_config = quantizer, quantizer.quantization_config
    model.is_quantized, model.quantization_method = True, METHOD
    experts = [name for name, module in model.named_modules() if isinstance(module, ScaledExperts)]
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [c for c in conversions if not _about(c, experts)]


def _about(conversion: Any, experts: list[str]) -> bool:
    """Whether it is about quantized weights. They are saved as they are, not as one tensor for each expert again."""
    if not isinstance(conversion, WeightConverter):
        return False
    own = any(isinstance(operation, _Stack | _Decode) for operation in conversion.operations)
    return own or any(target in name for target in conversion.target_patterns for name in experts)


def _saved_name(model: Any, name: str) -> str:
    """The name under which `save_pretrained` stores a weight."""
    (key,) = revert_weight_conversion(model, {f"{name}.data": torch.empty(0)})
    return key.removesuffix(".data")


def _weights(model: nn.Module) -> list[str]:
    """Names of the weights that `quantize_` may quantize."""
    return [f"{name}.{leaf}" for name, module in model.named_modules() for leaf in weights_of(module)]


def _restore_dtypes(model: Any) -> None:
    """View the components as their storage dtypes: files hold all 8-bit codes as uint8."""
    for module in model.modules():
        if isinstance(module, ScaledWeight):
            module.restore_dtypes()


def _plain(model: nn.Module, name: str, weight: ScaledWeight) -> ScaledTensor:
    """The tensor of a weight in plain storage, with its numbers where accelerate has offloaded them."""
    tensor = weight.tensor
    return Metadata.of(tensor).assembled(**components_of(model, name, weight)).to_plain()
