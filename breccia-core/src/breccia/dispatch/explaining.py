"""Reads the arguments of `breccia.explain`: operands, recipes that stand for them, and options by name."""

from __future__ import annotations

from typing import Any

from ..arrays.frameworks import Device, Framework, device_of, framework_of, output_dtype, shape_of
from ..errors import OptionError, UnsupportedError, suggestion
from ..operations import Kind, Operation
from ..options import DEFAULT, PLAIN, CastOptions, product_options
from ..recipes import ScalingRecipe
from ..specs import recipe
from ..tensors.checks import contraction_axis
from ..tensors.tensor import ScaledTensor
from .call import Call
from .explanation import Explanation
from .facts import Described
from .kernel import Prefer
from .registry import registry

#: The name of a plain operand, and its stand-in: an aligned matrix.
PLAIN_OPERAND = "array"
_PLAIN_OPERAND = Described(shape=(256, 256))


def explain(name: str, operands: tuple[Any, ...], on: str | None, prefer: Prefer, options: dict[str, Any]) -> Explanation:
    """The explanation of a call, as `breccia.explain` documents."""
    op = registry().operation(name)
    a, b, new = _values(op, name, [_named_operand(x) if isinstance(x, str) else x for x in operands])
    there = [x for x in (a, b) if x is not None and not isinstance(x, ScalingRecipe) and x is not _PLAIN_OPERAND]
    arrays = [x.data_source if isinstance(x, ScaledTensor) else x for x in there]
    home, _, device = (on or "").partition(":")
    framework = framework_of(arrays[0]).name if arrays else home or "numpy"
    declared: Framework = registry().look_up("breccia_frameworks", home or framework, "framework")
    if device and declared.kinds and device.partition(":")[0] not in declared.kinds:
        raise UnsupportedError(f"{declared.name} arrays are on {' or '.join(declared.kinds)} only; got on={on!r}.", on=on)
    where = f"{framework}:{device_of(arrays[0])}" if arrays else on
    if arrays and on not in (None, framework, where):
        raise UnsupportedError(f"explain: on={on!r}, but the operand is on {where}; omit on=.")
    known = _options(op, name, options, len(shape_of(arrays[0], "the operand")) if arrays else 2)
    kind, _, index = device.partition(":")
    asked = Device(kind or (device_of(arrays[0]) if arrays else "cpu"), int(index) if index.isdigit() else None)
    axis = -1 if op.second is None else -2  # a recipe as second operand of a product stands for a weight w.mT
    first, second = _described(a, asked, -1), _described(b, asked, axis)
    return registry().table.explain(Call(op, framework, (first, second, new, known, declared)), prefer, device)


def _named_operand(name: str) -> Any:
    return _PLAIN_OPERAND if name == PLAIN_OPERAND else recipe(name)


def _values(op: Operation, name: str, operands: list[Any]) -> tuple[Any, Any, ScalingRecipe | None]:
    """(first operand, second operand, recipe to write) of the op's arguments, of which a first array may be left out."""
    wanted = [(argument, kind) for argument, kind in op.arguments if kind not in (Kind.BESIDE, Kind.NUMBER)]
    optional = wanted[0][1] is Kind.ARRAY
    filled = [_PLAIN_OPERAND, *operands] if optional and len(operands) == len(wanted) - 1 else operands
    takes = ", ".join(argument for argument, _ in wanted) + f"; {wanted[0][0]} may be left out" * optional
    if len(filled) != len(wanted):
        raise UnsupportedError(f"explain({name!r}, ...) takes {takes}; got {len(operands)}.", op=name)
    values: list[Any] = []
    new: ScalingRecipe | None = None
    for (argument, kind), x in zip(wanted, filled, strict=True):
        if kind is Kind.RECIPE:
            if not isinstance(x, ScalingRecipe):
                raise UnsupportedError(
                    f"explain({name!r}, ...) takes {takes}; its {argument} is a recipe or the name of one.", op=name
                )
            new = x
            continue
        if kind is Kind.ARRAY and isinstance(x, ScalingRecipe | ScaledTensor):
            raise UnsupportedError(f"explain({name!r}, ...) takes {takes}; {argument} is an array, not scaled.", op=name)
        if kind is Kind.TENSOR and x is _PLAIN_OPERAND:
            raise UnsupportedError(f"{name} takes a ScaledTensor; name its recipe, as in explain({name!r}, 'mxfp8').", op=name)
        values.append(x)
    return values[0], values[1] if len(values) > 1 else None, new


def _options(op: Operation, name: str, options: dict[str, Any], ndim: int) -> Any:
    """Keyword options as the op passes them on. Raises OptionError for unknown ones."""
    clips = ("clip_min", "clip_max", "clip") if name != op.name else ()
    names = [*(option for option in op.options if option != "clip"), *clips]
    for option in options:
        if option not in names:
            raise OptionError(f"{name} has no option {option!r}{suggestion(option, names)}", option=option)
    values = {option: value for option, value in options.items() if value is not None and option not in clips}
    if not op.options:
        return DEFAULT
    if op.default is not DEFAULT:
        return product_options(output_dtype(values.get("out_dtype", "float32")), values.get("bias"), values.get("out"))
    if "axis" in values:
        values["axis"] = contraction_axis(values["axis"], ndim)
    cast_options = CastOptions(**values)
    if cast_options.storage != PLAIN:
        registry().look_up("breccia_storages", cast_options.storage, "storage")
    return cast_options if cast_options.given() else DEFAULT


def _described(x: Any, device: Device, axis: int) -> Any:
    """An operand; an aligned matrix in place of a recipe or of "array"."""
    if isinstance(x, ScalingRecipe):
        return Described(x, x.format.element.dtype or "uint8", (256, 256), x.layout.oriented(axis), axis, device)
    return _PLAIN_OPERAND._replace(device=device) if x is _PLAIN_OPERAND else x
