"""The `breccia::` operators: ops over flat tensors and a recipe's JSON. `graphs` has the functions that call them.

A compiler sees one operator per op and none of its Python; the operator selects the kernel at run time, as in eager mode.
Schemas, fake implementations and rules follow from the declarations of ops. Schemas are append-only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from breccia import Layout, ScaledTensor, ScalingRecipe
from breccia.backend import (
    DEFAULT,
    OPERATIONS,
    TENSOR,
    CastOptions,
    Kind,
    Operation,
    ProductOptions,
    Result,
    calls,
    checks,
    components,
    composites,
    packing,
    part_shapes,
    product_options,
    targets,
)
from breccia.internal import layout_of_tensor

from .cpu import linear as _multiply_on_cpu
from .cpu import operate
from .frontend import grouped_gradients, product_gradients
from .ops import TORCH

#: The sign of a seed of 64 bits.
SIGN = 1 << 63


# ------------------------------------------------------------------------------------------------ schemas

#: The arguments of an operator for each option. The trailing ones may be left out of calls.
_OPTIONS = {
    "axis": "int axis",
    "scale": "Tensor? scale",
    "rounding": "str rounding",
    "seed": "int? seed",
    "nonfinite": "str nonfinite",
    "clip": "str clip, float low, float high",
    "out_dtype": "str dtype",
    "bias": "Tensor? bias",
    "importance": "Tensor? importance",
}
_TRAILING = ("scale", "bias", "importance")


def schema_of(op: Operation) -> str:
    """The schema of an op's operator.

    An operand that may be a ScaledTensor is a list of components with the texts of its recipe and layout, its axis and its
    padding; with recipe "", an array is the only item of the list. An absent array is None, and a number has an argument of its
    own. A seed has 64 bits; its sign is the highest. The results of an op with one array are this array, else a list of the
    components of tensors and of arrays, in order.
    """
    declared: list[str] = []
    first = op.arguments[0][1]
    for name, kind in op.arguments:
        if kind is Kind.TENSOR:
            declared.append("Tensor[] parts, str recipe, str layout, int axis, int padding")
        elif kind is Kind.EITHER:
            declared.append(f"Tensor[] {name}, str {name}_recipe, str {name}_layout, int {name}_axis, int {name}_tail")
        elif kind is Kind.RECIPE:
            declared.append("str into" if first is Kind.TENSOR else "str recipe")
        elif kind is Kind.BESIDE:
            declared.append(f"Tensor? {name}")
        elif kind is Kind.NUMBER:
            declared.append(f"Tensor? {name}, float {'number' if name == 'scale' else f'{name}_number'}")
        else:
            declared.append(f"Tensor {name}")
    options = [name for name in op.options if name in _OPTIONS]
    for n, name in enumerate(options):
        optional = name in _TRAILING and n == len(options) - 1
        declared.append(_OPTIONS[name] + ("=None" if optional else ""))
    return f"({', '.join(declared)}) -> {'Tensor' if _is_one_array(op) else 'Tensor[]'}"


def _is_one_array(op: Operation) -> bool:
    return [result.tensor for result in op.results] == [False]


def _arguments(op: Operation, flat: Iterator[Any]) -> tuple[Any, ...]:
    """The arguments of an op, its options last, from those of its operator."""
    arguments: list[Any] = []
    for _, kind in op.arguments:
        if kind in (Kind.TENSOR, Kind.EITHER):
            arguments.append(_operand(*(next(flat) for _ in range(5))))
        elif kind is Kind.RECIPE:
            arguments.append(recipe_of(next(flat)))
        elif kind is Kind.BESIDE:
            array = next(flat)
            arguments.append(() if array is None else array)
        elif kind is Kind.NUMBER:
            array, number = next(flat), next(flat)
            arguments.append(number if array is None else array)
        else:
            arguments.append(next(flat))
    return (*arguments, _options(op, flat)) if op.options else tuple(arguments)


def _options(op: Operation, flat: Iterator[Any]) -> CastOptions | ProductOptions:
    fields: dict[str, Any] = {}
    for name in op.options:
        if name == "clip":
            clip, low, high = next(flat), next(flat), next(flat)
            fields["clip"] = None if not clip else clip if clip == "scale" else (low, high)
        elif name == "seed":
            seed = next(flat)
            fields["seed"] = None if seed is None else seed % (2 * SIGN)
        elif name in _OPTIONS:
            fields[name] = next(flat, None)
    if isinstance(op.default, ProductOptions):
        return product_options(**fields)
    plain = all(fields.get(name, default) == default for name, default in (("axis", -1), ("rounding", "nearest"))) and (
        all(fields.get(name) is None for name in ("scale", "clip", "importance")) and fields["nonfinite"] == "propagate"
    )
    return DEFAULT if plain else CastOptions(**fields)


# ------------------------------------------------------------------------------------------------ operators


_operators: dict[str, Callable[..., Any]] = {}


def operator_of(op: Operation) -> Callable[..., Any]:
    """The operator of an op, which is registered when it is first asked for."""
    if op.name not in _operators:
        _operators[op.name] = _register(op)
    return _operators[op.name]


def _register(op: Operation) -> Callable[..., Any]:
    one, keeps = _is_one_array(op), op.arguments[0][1] is Kind.TENSOR

    def run(*flat: Any) -> Any:
        arguments = _arguments(op, iter(flat))
        constants = [_constant(x) for x in arguments]
        output = getattr(calls, op.name)(*constants)
        if one:
            return output.contiguous()
        parts: list[Tensor] = []
        for result, x in zip(op.results, output if len(op.results) > 1 else (output,), strict=True):
            parts += (_parts(x) if keeps else _cast_parts(x)) if result.tensor else [x]
        taken = {x.data_ptr() for x in flat[0]} if keeps else set[int]()  # an operator must not return a view of an input
        return [part.clone() if part.data_ptr() in taken else part for part in parts]

    def fake(*flat: Any) -> Any:
        arguments = _arguments(op, iter(flat))
        inputs = arguments[: len(op.arguments)]
        if op.validate is not None:
            targets.load(op.validate)(*arguments)
        like = flat[0][0] if isinstance(flat[0], list) else flat[0]
        if keeps and op.results[0].tensor:  # components may be kept, in another layout than that of a cast
            st, function = arguments[0], targets.load(op.reference)
            row = st.ndim == 1 and st.layout.block() != TENSOR
            tensor = composites.of_row(function, arguments) if row else function(*arguments)
            return [torch.empty_like(part, memory_format=torch.contiguous_format) for part in _parts(tensor)]
        parts = [part for result in op.results for part in _fakes(op, result, like, arguments, inputs)]
        return parts[0] if one else parts

    name = f"breccia::{op.name}"
    operator: Any = torch.library.custom_op(name, run, mutates_args=(), schema=schema_of(op))
    operator.register_fake(fake)
    rules = _PRODUCT_RULES.get(op.name) or (None if op.derivative is None else _elementwise_rules(op))
    if rules is not None:
        operator.register_autograd(rules[0], setup_context=rules[1])
    if one:
        operator.register_vmap(_each(getattr(torch.ops.breccia, op.name)))
    return getattr(torch.ops.breccia, op.name)


def _constant(x: Any) -> Any:
    """An argument without its gradient.

    Tensors that take no gradient stay the same objects: a kernel may keep on a weight that it has multiplied by it before.
    """
    if isinstance(x, Tensor):
        return x.detach() if x.requires_grad else x
    if isinstance(x, ProductOptions):
        return x if x.bias is None else x._replace(bias=_constant(x.bias))
    if isinstance(x, ScaledTensor) and any(part.requires_grad for part in components(x).values()):
        parts = {name: part.detach() for name, part in components(x).items()}
        return ScaledTensor.from_parts(recipe=x.recipe, layout=x.layout, axis=x.axis, padding=x.padding, **parts)
    return x


def _fakes(op: Operation, result: Result, like: Tensor, arguments: tuple[Any, ...], inputs: tuple[Any, ...]) -> list[Tensor]:
    """Tensors of the shapes and dtypes of a result's components."""
    shape = result.shape_of(inputs)
    if not result.tensor:
        if result.dtype == "first":
            return [like.new_empty(shape)]
        dtype = op.options_of(arguments).out_dtype if result.dtype == "option" else result.dtype
        return [like.new_empty(shape, dtype=getattr(torch, dtype))]
    assert op.target is not None
    of, axis = inputs[op.target], op.axis_of(result, arguments)
    scale = getattr(arguments[-1], "scale", None)
    supplied = tuple(scale.shape) if isinstance(scale, Tensor) else None
    shapes = part_shapes(of.format, checks.fitted_layout(of, shape, axis), shape, axis, supplied)
    dtypes = TORCH.dtypes(of.format)
    parts = [like.new_empty(shape, dtype=getattr(torch, dtypes[name])) for name, shape in shapes.items()]
    return [like.new_empty(parts[0].mT.shape, dtype=parts[0].dtype).mT, *parts[1:]] if axis == -2 else parts


# ------------------------------------------------------------------------------------------------ gradients


def _elementwise_rules(op: Operation) -> tuple[Callable[..., Any], ...]:
    """The gradient of an op whose derivative is declared, and what is kept for it."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.count = len(inputs)
        ctx.straight = op.is_straight(_arguments(op, iter(inputs))[-1])
        if not ctx.straight:
            ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
            ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))

    def gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if ctx.straight:
            return gradient, *(None,) * (ctx.count - 1)
        flat = [other if x is None else x for x, other in zip(ctx.saved_tensors, ctx.others, strict=True)]
        arguments = _arguments(op, iter(flat))
        by = targets.load("breccia_torch.exporting:Operators")()
        input_gradients: list[Any] = [None] * ctx.count
        for n, x in enumerate(arguments):
            if isinstance(x, Tensor):
                position = next(i for i, y in enumerate(flat) if y is x)
                if ctx.needs_input_grad[position]:
                    input_gradients[position] = targets.load(op.derivative)(by, gradient, n, *arguments)
        return tuple(input_gradients)

    return gradients, keep


# Gradients in graphs are those of the frontend, over operators. Operands are lists of components and their metadata.


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias = inputs[0], inputs[5], inputs[11] if len(inputs) > 11 else None
    ctx.save_for_backward(*a, *b, bias)
    ctx.split, ctx.operand_metadata = len(a), (inputs[1:5], inputs[6:10])


def _product_gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    *saved, bias = ctx.saved_tensors
    first, second = ctx.operand_metadata
    a, b = _operand(saved[: ctx.split], *first), _operand(saved[ctx.split :], *second)
    needed = _any(ctx.needs_input_grad[0]), _any(ctx.needs_input_grad[5]), bias is not None
    left, right, added = product_gradients(_product, gradient, a, b, bias, needed)
    lists = [[None] * ctx.split if left is None else [left], [None] * (len(saved) - ctx.split) if right is None else [right]]
    return (lists[0], *(None,) * 4, lists[1], *(None,) * 5, added)[: len(ctx.needs_input_grad)]


def _any(needed: Any) -> bool:
    return any(needed) if isinstance(needed, list | tuple) else bool(needed)


def _product(a: Any, b: Any, out_dtype: str = "float32") -> Tensor:
    """A product as an operator."""
    return torch.ops.breccia.matmul(*_listed(a), *_listed(b), out_dtype)


def _listed(x: Any) -> tuple[Any, ...]:
    """The operator arguments that describe an operand."""
    if not isinstance(x, ScaledTensor):
        return [x], "", "", -1, 0
    return list(components(x).values()), text_of(x.recipe), text_of(x.layout), x.axis, x.padding


def _keep_cast_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.recipe, b, *ctx.operand_metadata = inputs[:7]
    ctx.save_for_backward(x, *b, inputs[8] if len(inputs) > 8 else None)  # older graphs omit a bias, and so its gradient


def _cast_product_gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, *b, bias = ctx.saved_tensors
    right, wanted = _operand(b, *ctx.operand_metadata), _any(ctx.needs_input_grad[2])
    written = x
    if wanted:
        parts = torch.ops.breccia.cast(x, ctx.recipe, -1, None, "nearest", None, "propagate")
        of = recipe_of(ctx.recipe)
        layout = checks.fitted_layout(of, tuple(x.shape), -1)
        written = _from_parts(parts, ctx.recipe, text_of(layout), -1, -x.shape[-1] % packing(of.format.element)[0])
    needed = ctx.needs_input_grad[0], wanted, bias is not None
    first, second, added = product_gradients(_product, gradient, x, right, bias, needed, written)
    return (first, None, [None] * len(b) if second is None else [second], *(None,) * 5, added)[: len(ctx.needs_input_grad)]


def _keep_groups(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, offsets = inputs[0], inputs[5], inputs[10]
    ctx.save_for_backward(*a, *b, offsets)
    ctx.split, ctx.operand_metadata = len(a), (inputs[1:5], inputs[6:10])


def _group_gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    *saved, offsets = ctx.saved_tensors
    first, second = ctx.operand_metadata
    a, b = _operand(saved[: ctx.split], *first), _operand(saved[ctx.split :], *second)
    needed = _any(ctx.needs_input_grad[0]), _any(ctx.needs_input_grad[5])
    left, right = grouped_gradients(_grouped, gradient, a, b, offsets, needed, _values)
    lists = [[None] * ctx.split if left is None else [left], [None] * (len(saved) - ctx.split) if right is None else [right]]
    return lists[0], *(None,) * 4, lists[1], *(None,) * 6


def _grouped(a: Any, b: Any, offsets: Tensor, out_dtype: str = "float32") -> Tensor:
    return torch.ops.breccia.grouped_matmul(*_listed(a), *_listed(b), offsets, out_dtype)


def _values(x: Any) -> Tensor:
    """An operand in FP32."""
    return torch.ops.breccia.dequantize(*_listed(x), "float32") if isinstance(x, ScaledTensor) else x.float()


def _each(operator: Any) -> Any:
    """The vmap rule of operators that see one example at a time: per-tensor scales are per example."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        def at(argument: Any, axis: Any, i: int) -> Any:
            if isinstance(argument, list):
                return [at(item, axis[n], i) for n, item in enumerate(argument)] if axis is not None else argument
            return argument if axis is None else argument.select(axis, i)

        def example(i: int) -> list[Any]:
            return [at(a, axis, i) for a, axis in zip(arguments, in_dims, strict=True)]

        return torch.stack([operator(*example(i)) for i in range(info.batch_size)]), 0

    return rule


#: The gradient of each product, and what is kept for it.
_PRODUCT_RULES = {
    "matmul": (_product_gradients, _keep_operands),
    "cast_matmul": (_cast_product_gradients, _keep_cast_operands),
    "grouped_matmul": (_group_gradients, _keep_groups),
}


def _parts(st: ScaledTensor) -> list[Tensor]:
    """Contiguous, as the fake implementations promise: compilers rely on strides."""
    return [part.contiguous() for part in components(st).values()]


def _cast_parts(st: ScaledTensor) -> list[Tensor]:
    """As `_parts`, but codes of a block are next to each other, as products read them: along axis -2 columns are contiguous."""
    data, *parts = components(st).values()
    data = data.mT.contiguous().mT if st.axis == -2 else data.contiguous()
    return [data, *(part.contiguous() for part in parts)]


def _from_parts(parts: list[Tensor], recipe: str, layout: str, axis: int, padding: int) -> ScaledTensor:
    of = recipe_of(recipe)
    named = dict(zip(of.format.parts, parts, strict=True))
    return ScaledTensor.from_parts(recipe=of, layout=layout_of(layout), axis=axis, padding=padding, **named)


def _operand(parts: list[Tensor], recipe: str, layout: str, axis: int, padding: int) -> ScaledTensor | Tensor:
    return _from_parts(parts, recipe, layout, axis, padding) if recipe else parts[0]


def text_of(declared: Any) -> str:
    """The JSON of a recipe or layout as operators take it: in single quotes, unless its values have some.

    With cpp_wrapper torch 2.13 writes the texts of a graph into C++ as they are, double quotes included.
    """
    text: str = declared.to_json()
    return text if "'" in text or "\\" in text else text.replace('"', "'")


def json_in(text: str) -> str:
    """The JSON of a text: as it is, or as `text_of` writes it."""
    return text.replace("'", '"') if text.startswith("{'") else text


@lru_cache(maxsize=512)
def recipe_of(text: str) -> ScalingRecipe:
    """The recipe of a text (`text_of`)."""
    return ScalingRecipe.from_json(json_in(text))


@lru_cache(maxsize=512)
def layout_of(text: str) -> Layout:
    """The layout of a text (`text_of`)."""
    return layout_of_tensor(json_in(text))


# ------------------------------------------------------------------------------------------------ registration

for _op in OPERATIONS.values():
    operator_of(_op)


# Of layers in graphs that need no gradients. `matmul` has 12 arguments and passes autograd, which takes longer than a small
# product. Its facts are one text, the hexadecimal digits of a JSON list: recipe, layout, padding, name of a dtype. (Digits,
# since texts in a list have quotes of their own: see `text_of`.)

_LIBRARY = torch.library.Library("breccia", "FRAGMENT")
_OF_WEIGHT = "Tensor data{0}, Tensor scale{0}, Tensor? zero_point{0}, Tensor? global_scale{0}, Tensor? bias{0}"
_LINEAR = f"(Tensor x, {_OF_WEIGHT.format('')}, str facts) -> Tensor"
_LIBRARY.define(f"linear{_LINEAR}")
#: Operators that multiply one input by several weights with the same facts, by the number of weights.
SEVERAL = {2: "two_linears", 3: "three_linears"}
_SCHEMAS = {
    n: f"(Tensor x, {', '.join(_OF_WEIGHT.format(i) for i in range(n))}, str facts) -> ({', '.join(['Tensor'] * n)})"
    for n in SEVERAL
}
for _number, _name in SEVERAL.items():
    _LIBRARY.define(f"{_name}{_SCHEMAS[_number]}")


def _weight(data: Tensor, scale: Tensor, zero_point: Any, global_scale: Any, facts: str) -> tuple[ScaledTensor, str]:
    """The weight of a layer, (out_features, in_features), and the name of the product's dtype."""
    recipe, layout, padding, dtype = _read_facts(facts)
    parts = recipe_of(recipe), layout_of(layout), zero_point, global_scale
    return ScaledTensor.from_parts(data, scale, *parts, -1, padding), dtype


def facts_text(*facts: Any) -> str:
    """What the operator of a layer is told besides its tensors."""
    return json.dumps(facts, separators=(",", ":")).encode().hex()


@lru_cache(maxsize=512)
def _read_facts(text: str) -> tuple[str, str, int, str]:
    recipe, layout, padding, dtype, *_ = json.loads(bytes.fromhex(text))
    return recipe, layout, padding, dtype


@torch.library.impl(_LIBRARY, "linear", "CompositeExplicitAutograd")
def _linear(
    x: Tensor, data: Tensor, scale: Tensor, zero_point: Any, global_scale: Any, bias: Tensor | None, facts: str
) -> Tensor:
    """x @ dequantize(weight).mT + bias."""
    weight, dtype = _weight(data, scale, zero_point, global_scale, facts)
    return calls.matmul(x, weight.mT, product_options(dtype, bias)).contiguous()


def _linear_on_cpu(
    x: Tensor, data: Tensor, scale: Tensor, zero_point: Any, global_scale: Any, bias: Tensor | None, facts: str
) -> Tensor:
    return _multiply_on_cpu(x, data, scale, zero_point, global_scale, bias, facts, _weight)


def _linears(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The products of an input by several weights, each by the operator of one."""
    *weights, facts = rest
    each = range(0, len(weights), PARTS)
    return tuple([torch.ops.breccia.linear(x, *weights[at : at + PARTS], facts) for at in each])


#: The arguments of the operators that each weight has.
PARTS = 5
for _name in SEVERAL.values():
    _LIBRARY.impl(_name, _linears, "CompositeExplicitAutograd")

# Compiled operators repeat products on CPUs, and ask functions in Python for others. Without them, the operators are these.
_IN_C = operate()
if _IN_C:
    _refuse = targets.load("breccia_native.products:refuse")

    def _chosen(choose: Callable[..., Any]) -> Callable[..., Any]:
        """Errors pass torch's interface in C as RuntimeError, without their text."""

        def chosen(*operands: Any) -> Any:
            try:
                return choose(*operands)
            except BaseException as e:
                _refuse(f"{type(e).__name__}: {e}")
                raise

        return chosen

    _LIBRARY.define(f"linear_by_choice{_LINEAR}")
    _LIBRARY.impl("linear_by_choice", _chosen(_linear_on_cpu), "CPU")
    for _number, _name in SEVERAL.items():
        _LIBRARY.define(f"{_name}_by_choice{_SCHEMAS[_number]}")
        _LIBRARY.impl(f"{_name}_by_choice", _chosen(_linears), "CPU")
else:
    _LIBRARY.impl("linear", _linear_on_cpu, "CPU")


def repeats_in_c() -> bool:
    """Whether the operators of layers repeat products without Python."""
    return _IN_C


def _fake_linear(x: Tensor, data: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], data.shape[0]), dtype=getattr(torch, _read_facts(rest[-1])[3]))


def _fake_linears(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple([_fake_linear(x, data, rest[-1]) for data in rest[:-1:PARTS]])


torch.library.register_fake("breccia::linear", _fake_linear)
torch.library.register_vmap("breccia::linear", _each(torch.ops.breccia.linear))
for _name in SEVERAL.values():
    torch.library.register_fake(f"breccia::{_name}", _fake_linears)

# Of older graphs.


@torch.library.custom_op("breccia::biased_matmul", mutates_args=())
def _biased_matmul(
    a: list[Tensor],
    a_recipe: str,
    a_layout: str,
    a_axis: int,
    a_tail: int,
    b: list[Tensor],
    b_recipe: str,
    b_layout: str,
    b_axis: int,
    b_tail: int,
    dtype: str,
    bias: Tensor,
) -> Tensor:
    """`breccia::matmul` with a bias."""
    operands = (a, a_recipe, a_layout, a_axis, a_tail, b, b_recipe, b_layout, b_axis, b_tail)
    return torch.ops.breccia.matmul(*operands, dtype, bias)


@_biased_matmul.register_fake
def _(a: list[Tensor], *rest: Any) -> Tensor:
    return torch.ops.breccia.matmul(a, *rest)


_biased_matmul.register_autograd(_product_gradients, setup_context=_keep_operands)
_biased_matmul.register_vmap(_each(torch.ops.breccia.biased_matmul))


@torch.library.custom_op("breccia::within_scales", mutates_args=())
def _within_scales(
    x: Tensor, recipe: str, axis: int, scale: Tensor | None, rounding: str, seed: int | None, nonfinite: str
) -> Tensor:
    """Mask of elements that do not saturate under the scales of their blocks; False for NaN."""
    options = CastOptions(axis, scale, rounding, None if seed is None else seed % (2 * SIGN), nonfinite)
    low, high = composites.within_scales(x.detach(), recipe_of(recipe), options)
    return ((x >= low) & (x <= high)).contiguous()


@_within_scales.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool, memory_format=torch.contiguous_format)


_within_scales.register_vmap(_each(torch.ops.breccia.within_scales))


def enable_compile() -> None:
    """Deprecated: does nothing. `torch.compile` captures the ops of breccia without it."""
