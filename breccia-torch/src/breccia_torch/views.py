"""Methods of a ScaledTensor inside `torch.compile`: the steps that `recording` finds, on the tensors of the graph."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import breccia
from breccia import ScaledTensor, UnsupportedError
from breccia.backend import dtype_name
from breccia.internal import fill

from .describing import constant, keep, known, layout_text, named, recall, recipe_text
from .operators import layout_of, recipe_of
from .recording import Facts, Numbers, Output, Step, record

# ------------------------------------------------------------------------------------------------ while tracing


def _called(method: str, sts: list[ScaledTensor], *arguments: Any) -> Any:
    """What the method of that name returns for arguments that are constants of a graph: tuples in place of slices and lists."""
    st = sts[0]
    match method:
        case "index":
            (cuts,) = arguments
            return st[tuple(slice(*cut) if isinstance(cut, tuple) else ... if cut == "..." else cut for cut in cuts)]
        case "select":
            axis, index = arguments
            return st.select(axis, list(index) if isinstance(index, tuple) else index)
        case "reshape":
            return st.reshape(*arguments[0])
        case "concat" | "stack":
            return getattr(breccia, method)(sts, *arguments)
        case "mT" | "T":
            return getattr(st, method)
        case _:
            return getattr(st, method)(*arguments)


@constant
def _recorded(
    method: str, facts: tuple[Facts, ...], numbers: tuple[Numbers, ...], arguments: tuple[Any, ...]
) -> tuple[tuple[Step, ...], tuple[Output, ...]]:
    try:
        return record(partial(_called, method), facts, numbers, *arguments)
    except UnsupportedError as e:
        raise UnsupportedError(f"{method} inside torch.compile: {e}") from e


@constant
def _checked(facts: Facts, shape: tuple[int, ...] | None) -> tuple[str, int, int]:
    """The name of the layout, the axis and the padding of a constructed tensor. Raises what the constructor raises."""
    recipe, layout, axis, padding, shapes, dtypes = facts
    data, scale, zero_point, global_scale = (
        None if size is None or name is None else torch.empty(size, dtype=getattr(torch, name), device="meta")
        for size, name in zip(shapes, dtypes, strict=True)
    )
    others = zero_point, global_scale, axis, shape
    st = ScaledTensor(data, scale, recipe_of(recipe), layout_of(layout), *others, padding=padding)
    return keep(st.layout), st.axis, st.padding


@constant
def _name_of(dtype: torch.dtype) -> str:
    return dtype_name(dtype)


@constant
def _refuse_storage(name: str) -> None:
    raise UnsupportedError(f"to_storage({name!r}) is not supported inside torch.compile; convert the tensor before.")


# ------------------------------------------------------------------------------------------------ traced


def _parts(st: Any) -> list[Any]:
    return [st.data, st.scale, st.zero_point, st.global_scale]


def _shape(part: Any) -> Any:
    return None if part is None else tuple([known(n) for n in part.shape])


def _facts(st: Any) -> tuple[Any, ...]:
    parts = _parts(st)
    shapes, dtypes = [_shape(part) for part in parts], [None if part is None else _name_of(part.dtype) for part in parts]
    return recipe_text(st.recipe), layout_text(st.layout), st.axis, st.padding, tuple(shapes), tuple(dtypes)


def _applied(method: str, sts: list[Any], *arguments: Any, positions: Any = None) -> tuple[ScaledTensor, ...]:
    """The tensors that a method returns."""
    operands: list[Any] = []
    input_numbers = tuple([tuple([_numbered(part, operands) for part in _parts(st)]) for st in sts])
    steps, outputs = _recorded(method, tuple([_facts(st) for st in sts]), input_numbers, arguments)
    operands = _replayed(steps, operands, positions)
    results: list[ScaledTensor] = []
    for numbers, layout, axis, padding in outputs:
        data, scale, zero_point, global_scale = [None if number is None else operands[number] for number in numbers]
        results.append(
            ScaledTensor.from_parts(data, scale, sts[0].recipe, recall(layout), zero_point, global_scale, axis, padding)
        )
    return tuple(results)


def _numbered(part: Any, operands: list[Any]) -> int | None:
    """The place of a component among the operands, which get it where they lack it."""
    if part is None:
        return None
    for number in range(len(operands)):
        if operands[number] is part:
            return number
    operands.append(part)
    return len(operands) - 1


def _replayed(steps: tuple[Step, ...], operands: list[Any], positions: Any = None) -> list[Any]:
    """The operands, then the result of each step. positions: an index tensor in place of the recorded one."""
    for kind, numbers, argument in steps:
        x = operands[numbers[0]]
        if kind == "mT":
            result = x.mT
        elif kind == "index":
            result = x[tuple([slice(*cut) if isinstance(cut, tuple) else ... if cut == "..." else cut for cut in argument])]
        elif kind == "reshape":
            result = x.reshape(argument)
        elif kind == "broadcast":
            result = x.expand(argument)
        else:  # not every torch function takes float8
            narrow = x.dtype.itemsize == 1
            words = [operands[number].view(torch.uint8) if narrow else operands[number] for number in numbers]
            if kind == "concat":
                result = torch.cat(words, dim=argument)
            else:
                index = torch.tensor(argument[0], device=x.device) if positions is None else positions
                result = words[0].index_select(argument[1], index)
            result = result.view(x.dtype) if narrow else result
        operands.append(result)
    return operands


def __init__(
    self: Any,
    data: Any,
    scale: Any,
    recipe: Any,
    layout: Any,
    zero_point: Any = None,
    global_scale: Any = None,
    axis: int = -1,
    shape: Any = None,
    *,
    padding: int | None = None,
) -> None:
    """`ScaledTensor(...)` under a compiler."""
    recipe = named(recipe)
    parts = [data, scale, zero_point, global_scale]
    shapes, dtypes = [_shape(part) for part in parts], [None if part is None else _name_of(part.dtype) for part in parts]
    facts = (recipe_text(recipe), layout_text(layout), known(axis), known(padding), tuple(shapes), tuple(dtypes))
    layout, axis, tail = _checked(facts, None if shape is None else tuple([known(n) for n in shape]))
    fill(self, data, scale, recipe, recall(layout), zero_point, global_scale, axis, tail)


def mT(self: Any) -> ScaledTensor:
    """`ScaledTensor.mT` under a compiler."""
    return _applied("mT", [self])[0]


def T(self: Any) -> ScaledTensor:
    """`ScaledTensor.T` under a compiler."""
    return _applied("T", [self])[0]


def to_plain(self: Any) -> ScaledTensor:
    """`ScaledTensor.to_plain` under a compiler."""
    return _applied("to_plain", [self])[0]


def to_storage(self: Any, name: str) -> ScaledTensor:
    """`ScaledTensor.to_storage` under a compiler: refused, unless the tensor has that storage."""
    if name != storage(self):
        _refuse_storage(name)
    return self


def storage(self: Any) -> str:
    """`ScaledTensor.storage` under a compiler."""
    return _storage(layout_text(self.layout))


@constant
def _storage(layout: str) -> str:
    return layout_of(layout).storage


def __getitem__(self: Any, index: Any) -> ScaledTensor:
    """`ScaledTensor.__getitem__` under a compiler."""
    items = index if isinstance(index, tuple) else (index,)
    cuts: list[Any] = []
    for item in items:
        if isinstance(item, slice):
            cuts.append((known(item.start), known(item.stop), known(item.step)))
        else:
            cuts.append("..." if item is Ellipsis else known(item))
    return _applied("index", [self], tuple(cuts))[0]


def __iter__(self: Any) -> Iterator[ScaledTensor]:
    """`ScaledTensor.__iter__` under a compiler."""
    return iter([self[n] for n in range(known(self.shape[0]))])


def select(self: Any, axis: int, index: Any) -> ScaledTensor:
    """`ScaledTensor.select` under a compiler, which gathers by positions that it does not know."""
    if not isinstance(index, Tensor):
        index = known(index) if isinstance(index, int) else tuple([known(n) for n in index])
        return _applied("select", [self], known(axis), index)[0]
    length = self.shape[axis]
    positions = torch.where(index < 0, index + length, index).reshape(-1)
    selection = _applied("select", [self], known(axis), (0,) * known(positions.shape[0]), positions=positions)[0]
    return selection if index.ndim else _applied("select", [selection], known(axis), 0)[0]


def split(self: Any, size: Any, axis: int = 0) -> tuple[ScaledTensor, ...]:
    """`ScaledTensor.split` under a compiler."""
    return _applied("split", [self], known(size) if isinstance(size, int) else tuple([known(n) for n in size]), known(axis))


def reshape(self: Any, *shape: Any) -> ScaledTensor:
    """`ScaledTensor.reshape` under a compiler."""
    lengths = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    return _applied("reshape", [self], tuple([known(n) for n in lengths]))[0]


def to(self: Any, device: Any) -> ScaledTensor:
    """`ScaledTensor.to` under a compiler."""
    data, scale, zero_point, global_scale = [None if part is None else part.to(device) for part in _parts(self)]
    return ScaledTensor.from_parts(data, scale, self.recipe, self.layout, zero_point, global_scale, self.axis, self.padding)


def concat(tensors: Any, axis: int = 0) -> ScaledTensor:
    """`breccia.concat` under a compiler."""
    return _applied("concat", list(tensors), known(axis))[0]


def stack(tensors: Any, axis: int = 0) -> ScaledTensor:
    """`breccia.stack` under a compiler."""
    return _applied("stack", list(tensors), known(axis))[0]


def ndim(self: Any) -> int:
    """`ScaledTensor.ndim` under a compiler."""
    return len(self.shape)


def dtype(self: Any) -> torch.dtype:
    """`ScaledTensor.dtype` under a compiler."""
    return torch.float32


def nbytes(self: Any) -> int:
    """`ScaledTensor.nbytes` under a compiler."""
    return sum([part.numel() * part.dtype.itemsize for part in _parts(self) if part is not None])


def framework(self: Any) -> str:
    """`ScaledTensor.framework` under a compiler."""
    return "torch"
