"""`quantize_`: the linear layers and experts of a model, in place, with their weights under a recipe."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from breccia import BrecciaError, OptionError, Policy, ScalingRecipe, UnsupportedError
from breccia.backend import (
    NO_MATRIX,
    Chosen,
    Parameter,
    QuantizeSummary,
    as_recipe,
    checks,
    choose,
    framework_of,
    none_chosen,
    targets,
)

from . import placing
from .experts import training_layer
from .nn import ScaledConv1D, ScaledExperts, ScaledLinear, ScaledWeight
from .storing import AUTO, arrange, arrange_experts

Filter = Callable[[nn.Module, str], bool]

_log = logging.getLogger(__name__)
#: Object references, loaded for models of transformers alone: what `save_pretrained` needs, and a forward function of experts.
_ATTACH = "breccia_torch.hf:attach"
_EXPERTS = "breccia_torch.hf.experts:NAME"
#: What converts the layers of other libraries.
_TAKE_OVER = {
    "torchao": "breccia_torch.from_torchao_model_(model)",
    "bitsandbytes": "breccia.bridges.from_bitsandbytes(layer.weight)",
    "compressed-tensors": "breccia.bridges.from_compressed_tensors(layer)",
}


def quantize_(
    model: nn.Module,
    recipe: ScalingRecipe | str | Policy | Mapping[str, Any],
    filter_fn: Filter | None = None,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    activation: ScalingRecipe | str | None = None,
    storage: str = AUTO,
) -> QuantizeSummary:
    """Quantize the linear layers and the experts of `model` under `recipe`, in place.

    An `nn.Linear` becomes a ScaledLinear, transformers' Conv1D a ScaledConv1D. The 3-D parameters of a module of experts
    (whose class has "Expert" in its name) become ScaledExperts, with each expert cast alone.

    recipe: a recipe or its spec, or a policy: a mapping from patterns to recipes or "keep", or the path of a YAML file with
        one; see `breccia.Policy`.
    filter_fn: called with each such module and its name in the model; true for those to quantize. By default all are, except
        embeddings, norms, routers, output heads and the other kinds of `breccia.backend.KEPT`, as for `breccia convert` and
        every framework; subclasses of nn.Linear; layers that have other tensors than a weight and a bias, or whose weight is
        tied to another kind of module; and weights that would not shrink.
    include, exclude: shell-style globs over names of weights ("lm_head.weight", "*.experts.*"), in place of filter_fn and of
        a policy: `exclude` beats `include`, which beats the default.
    activation: a recipe under which the linear layers cast their inputs.
    storage: the name of a registered storage for the weights; "plain", or by default "auto": the one that the kernel of their
        products reads (on Hopper GPUs, "mma_16x128"), for layers in evaluation mode on a GPU that do not cast their inputs, and
        for experts that transformers multiplies by breccia's grouped products. Values, `state_dict` and files are the same in
        every storage.

    Layers that share a weight keep sharing it. Nothing is replaced unless all chosen layers can be. Returns what was
    quantized, what was left, and why.

    Raises what `breccia.cast` raises, naming the layer; UnsupportedError for a model that is itself a linear layer, and for a
    chosen layer that is tied to an unchosen one, that has hooks, or that has or does more than a linear layer; UnknownNameError
    for a pattern that matches no weight; OptionError if no layer is chosen, for patterns beside filter_fn or a policy, and for
    a policy that says two things of one weight, or has a pattern that decides nothing.

        >>> import torch, breccia_torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
        >>> summary = breccia_torch.quantize_(model, "mxfp8", exclude=["2.*"])
        >>> [type(layer).__name__ for layer in model]
        ['ScaledLinear', 'ReLU', 'Linear']
    """
    if isinstance(model, nn.Linear) or not isinstance(model, nn.Module):
        way = ": breccia_torch.nn.ScaledLinear.from_linear(model, recipe) is its quantized layer." if is_linear(model) else "."
        raise UnsupportedError(f"quantize_ replaces layers of a model; got {_kind(model)}{way}")
    if filter_fn is not None and (include or exclude):
        raise OptionError("quantize_ takes filter_fn or patterns (include=, exclude=), not both.")
    policy = Policy.of(recipe, include, exclude)
    activation = None if activation is None else as_recipe(activation)
    before, placed = _bytes(model), placing.placement(model)
    layers, experts, left = _selected(model, policy, filter_fn)
    for name, (module, chosen) in layers.items():  # before anything changes
        check_replaceable(name, module)
        _check_castable(f"{name}.weight", module.weight, chosen.recipe, scaled_class(module).contraction)
    for name, (module, parameter, chosen) in experts.items():
        if training_layer(module, parameter) is not None:
            raise UnsupportedError(
                f"quantize_: {name} trains in low precision; call breccia_torch.convert_from_training_(model) first.",
                name=name,
            )
        _check_castable(name, getattr(module, parameter)[0], chosen.recipe, experts_axis(module))
    quantized = {f"{name}.weight": chosen for name, (_, chosen) in layers.items()}
    quantized |= {name: chosen for name, (*_, chosen) in experts.items()}
    recipes = _recipes_of_shared(layers)
    names: dict[Any, list[str]] = {}
    for name, (module, _) in layers.items():
        names.setdefault(module, []).append(name)
    owners = Counter(id(module.weight) for module in names)
    shared: dict[int, ScaledWeight] = {}
    del layers
    while names:  # each high-precision weight is freed once its last layer is replaced
        module, places = names.popitem()
        layer_class, key = scaled_class(module), id(module.weight)
        weight = shared.get(key) or layer_class.quantized(placing.tensor_of(module, "weight"), recipes[key])
        if owners[key] > 1:
            shared[key] = weight
        layer = layer_class.in_place_of(module, weight, activation)
        layer.bias = placing.tensor_of(module, "bias")
        arrange(layer, storage, module.weight.dtype)
        for name in places:
            replace(model, name, layer)
    for module, parameter, chosen in experts.values():
        weight = ScaledExperts.quantized(placing.tensor_of(module, parameter), chosen.recipe, experts_axis(module))
        replace_experts(module, parameter, weight)
        arrange_experts(module, weight, storage)
    if placed is not None:
        placing.dispatch_again(model, placed)
    mark(model)
    return QuantizeSummary(quantized, left, before, _bytes(model))


def _recipes_of_shared(layers: Mapping[str, tuple[Any, Chosen]]) -> dict[int, ScalingRecipe]:
    """The recipe of each weight by its id. Raises OptionError where two layers that share one are to have different ones."""
    by_weight: dict[int, tuple[str, ScalingRecipe]] = {}
    for name, (module, chosen) in layers.items():
        first, recipe = by_weight.setdefault(id(module.weight), (name, chosen.recipe))
        if recipe != chosen.recipe:
            raise OptionError(
                f"quantize_: {first}.weight and {name}.weight are one parameter, and the policy has {recipe.spec} for the "
                f"first and {chosen.recipe.spec} for the second. Give both one recipe, or untie them: {name}.weight = "
                f"nn.Parameter({name}.weight.clone()).",
                names=(first, name),
            )
    return {key: recipe for key, (_, recipe) in by_weight.items()}


def mark(model: Any, *, instead_of: str = "breccia") -> None:
    """Make `save_pretrained` and `from_pretrained` work for a quantized model of transformers.

    instead_of: the library whose quantizer the model may have; that of another one stays.
    """
    if not hasattr(model, "save_pretrained") or "transformers" not in sys.modules:
        return
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and getattr(quantizer.quantization_config, "quant_method", None) not in ("breccia", instead_of):
        return
    try:
        attach = targets.load(_ATTACH)
    except ImportError as e:
        _log.warning("%s Save this model with breccia_torch.save_model: save_pretrained would lose how it is quantized.", e)
    else:
        attach(model)


# ------------------------------------------------------------------------------------------------ selection


def parameters_of(model: nn.Module) -> Iterator[Parameter]:
    """The parameters of two axes or more, and weights that other libraries quantized."""
    for name, module in model.named_modules(remove_duplicate=False):
        library = library_of(module)
        axes = {} if library else weights_of(module)
        own: dict[str, Any] = {leaf: getattr(module, leaf) for leaf in axes}  # also where it is parametrized
        own |= {"weight": getattr(module, "weight", None)} if library else dict(module.named_parameters(recurse=False))
        for leaf, parameter in own.items():
            shape, nbytes = tuple(getattr(parameter, "shape", ())), getattr(parameter, "nbytes", 0)
            if library or leaf in axes or len(shape) >= 2:
                contracted = (axes[leaf] % len(shape),) if leaf in axes else None
                kind = "linear" if leaf == "weight" and leaf in axes else "experts" if leaf in axes else _kind_of(module, leaf)
                why = _why_not(module, leaf, library, leaf in axes)
                yield Parameter(f"{name}.{leaf}".lstrip("."), shape, nbytes, kind, contracted, why, module)


def _kind_of(module: nn.Module, leaf: str) -> str:
    """The kind of a parameter that has no quantized form."""
    return "bias" if leaf.endswith("bias") else "embedding" if isinstance(module, nn.Embedding) else NO_MATRIX


def _why_not(module: nn.Module, leaf: str, library: str | None, has_form: bool) -> str:
    """Why a parameter cannot be quantized; empty if it can."""
    if library is not None:
        return f"quantized by {library}: {_TAKE_OVER[library]} takes it over"
    if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
        return f"{type(module).__name__} is a subclass of nn.Linear"
    if leaf == "weight" and (isinstance(module, nn.Linear) or is_conv1d(module)) and (others := _of_its_own(module)):
        return f"its layer has {', '.join(others)} beside weight and bias"
    if training_layer(module, leaf) is not None:
        return f"{leaf} of {type(module).__name__} trains in low precision"
    return "" if has_form else f"{leaf} of {type(module).__name__} is no weight of a linear layer"


def _selected(
    model: nn.Module, policy: Policy, filter_fn: Filter | None
) -> tuple[dict[str, tuple[Any, Chosen]], dict[str, tuple[nn.Module, str, Chosen]], dict[str, str]]:
    """The layers to replace by name, the expert parameters by name, and the reasons for the others."""

    def select(p: Parameter) -> str:
        assert filter_fn is not None
        return p.why if p.axes is None else "" if filter_fn(p.layer, p.name.rpartition(".")[0]) else "left out by filter_fn"

    parameters = {p.name: p for p in parameters_of(model)}
    chosen, left = choose(
        parameters.values(),
        policy,
        "quantize_",
        select=None if filter_fn is None else select,
        what="weight of a linear layer or of experts",
        listed_by="`model.named_parameters()`",
    )
    layers: dict[str, tuple[Any, Chosen]] = {}
    experts: dict[str, tuple[nn.Module, str, Chosen]] = {}
    for full, how in chosen.items():
        name, _, leaf = full.rpartition(".")
        if leaf == "weight":
            layers[name] = parameters[full].layer, how
        else:
            experts[full] = parameters[full].layer, leaf, how
    tied = dict(_ties(model, {name: module for name, (module, _) in layers.items()}))
    if tied and filter_fn:
        name, owners = next(iter(tied.items()))
        raise UnsupportedError(
            f"quantize_: {name}.weight is tied to {', '.join(owners)}, which would not be quantized. Leave {name} out or untie "
            f"its weight first: {name}.weight = nn.Parameter({name}.weight.clone()).",
            name=name,
            tied=owners,
        )
    left |= {f"{name}.weight": f"tied to {owners[0]}" for name, owners in tied.items()}
    layers = {name: layer for name, layer in layers.items() if name not in tied}
    if not layers and not experts:
        done = sum(isinstance(m, ScaledLinear | ScaledExperts) for m in model.modules())
        raise none_chosen("quantize_", left, f"; {done} are quantized already")
    return layers, experts, left


def _check_castable(name: str, weight: Tensor, recipe: ScalingRecipe, axis: int) -> None:
    framework_of(weight, f"quantize_: {name}")
    try:
        checks.check_cast(weight, recipe)
        checks.fitted_layout(recipe, tuple(weight.shape), axis)
    except BrecciaError as e:
        raise type(e)(f"quantize_: {name}: {e}", **e.found) from e


def _bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones counted once."""
    sizes = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return sum(sizes.values())


# ------------------------------------------------------------------------------------------------ modules


def library_of(module: nn.Module) -> str | None:
    """The other library that has quantized a layer, if one has."""
    if getattr(getattr(module, "quantization_scheme", None), "weights", None) is not None:
        return "compressed-tensors"
    weight = getattr(module, "weight", None)
    if type(weight).__module__.startswith("torchao."):
        return "torchao"
    of_bitsandbytes = isinstance(module, nn.Linear) and type(module).__module__.startswith("bitsandbytes.")
    return "bitsandbytes" if of_bitsandbytes else None


def is_conv1d(module: Any) -> bool:
    """Whether it is transformers' Conv1D, a linear layer whose weight is (in_features, out_features)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_linear(module: Any) -> bool:
    """Whether it is an nn.Linear, and of no subclass, or transformers' Conv1D, and has no tensors but a weight and a bias."""
    return (type(module) is nn.Linear or is_conv1d(module)) and not _of_its_own(module)


def _of_its_own(layer: nn.Module) -> list[str]:
    """The parameters and buffers of a linear layer that its quantized layer would lose."""
    tensors = (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))
    return [name for name, _ in tensors if name not in ("weight", "bias")]


def weights_of(module: nn.Module) -> dict[str, int]:
    """Contraction axes by name of the parameters that `quantize_` may quantize: of linear layers and of experts."""
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return {"weight": scaled_class(module).contraction}
    return dict.fromkeys(expert_parameters(module), experts_axis(module))


def scaled_class(module: nn.Module) -> type[ScaledLinear]:
    """The class that takes the place of a linear layer."""
    return ScaledConv1D if is_conv1d(module) else ScaledLinear


def expert_parameters(module: nn.Module) -> list[str]:
    """Names of the 3-D floating parameters of a module of experts."""
    if "expert" not in type(module).__name__.lower():
        return []
    parameters = module.named_parameters(recurse=False)
    return [name for name, parameter in parameters if parameter.ndim == 3 and parameter.is_floating_point()]


def experts_axis(module: nn.Module) -> int:
    """The contraction axis of a module's experts: the last, except where transformers marks them as transposed."""
    return -2 if getattr(module, "is_transposed", False) else -1


def replace_experts(module: nn.Module, name: str, weight: ScaledExperts) -> None:
    """Replace a 3-D parameter, and compute with grouped matmuls where transformers lets the implementation be chosen."""
    delattr(module, name)
    setattr(module, name, weight)
    multiply_grouped(module)


def can_multiply_grouped(module: nn.Module) -> bool:
    """Whether transformers lets the implementation of a module of experts be chosen."""
    config = getattr(module, "config", None)
    return "transformers" in sys.modules and hasattr(config, "_experts_implementation") and hasattr(module, "_apply_gate")


def multiply_grouped(module: nn.Module) -> None:
    """Let a module of experts compute with grouped matmuls, if its implementation can be chosen."""
    if can_multiply_grouped(module):
        module.config._experts_implementation = targets.load(_EXPERTS)  # type: ignore[union-attr]  # pyright: ignore


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def check_replaceable(name: str, module: nn.Module) -> None:
    """Raise UnsupportedError if a ScaledLinear would lose behaviour of the layer."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    changed = "forward" in vars(module) and not placing.moved_by_accelerate(module)
    if any(getattr(module, attribute, None) for attribute in hooks) or changed:
        raise UnsupportedError(
            f"{name or 'the layer'} has hooks or a custom forward, which its quantized layer would lose: quantize first, "
            "then add them.",
            name=name,
        )
    if others := _of_its_own(module):
        raise UnsupportedError(
            f"{name or 'the layer'} has {', '.join(others)} beside its weight and bias, which its quantized layer would lose: "
            "leave it out.",
            name=name,
        )
    if not name:
        raise UnsupportedError("the model itself is a linear layer, which cannot be replaced in place: put it into a model.")
    read = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)  # nn.MultiheadAttention reads it as a tensor
    changed = not is_conv1d(module) and type(module).forward is not nn.Linear.forward
    if read or changed or next(module.children(), None) is not None:
        raise UnsupportedError(
            f"{name} is a {type(module).__name__}, which is more than a linear layer; leave it out or convert it first.",
            name=name,
        )


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule `name` of the model."""
    owner, _, leaf = name.rpartition(".")
    parent = model.get_submodule(owner)
    setattr(parent, leaf, module)
    if isinstance(parent, nn.TransformerEncoderLayer):
        parent.activation_relu_or_gelu = 0  # else, in evaluation, it passes its weights to a fused kernel as tensors


def _ties(model: nn.Module, chosen: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """The chosen layers whose weight is tied to other modules, and its names there."""
    owners: dict[int, list[str]] = {}
    taken = {id(module) for module in chosen.values()}
    for name, module in model.named_modules():
        if id(module) not in taken:
            for leaf, parameter in module.named_parameters(recurse=False):
                owners.setdefault(id(parameter), []).append(f"{name}.{leaf}".lstrip("."))
    tied = ((name, owners.get(id(m.weight))) for name, m in chosen.items())
    return ((name, others) for name, others in tied if others)
