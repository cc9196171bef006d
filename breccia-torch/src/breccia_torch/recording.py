"""What a method of a ScaledTensor does to its components, recorded on stand-ins that have shapes and no numbers.

Inside `torch.compile`, `views` replays the record on the tensors of the graph. So any layout's cuts and joins are those of
eager mode, and none of their Python is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from breccia import Framework, ScaledTensor, UnsupportedError
from breccia.backend import PARTS, Metadata, registry

from .describing import keep
from .operators import layout_of, recipe_of

#: (recipe, layout, axis, padding, shapes of components, names of their dtypes); None for an absent component.
Facts = tuple[str, str, int, int, tuple[tuple[int, ...] | None, ...], tuple[str | None, ...]]
#: The number of each component of a tensor among the inputs. Tensors may share components.
Numbers = tuple[int | None, ...]
#: (kind, numbers of the operands, argument): see `views.replayed`.
Step = tuple[str, tuple[int, ...], Any]


#: (numbers of the components, name of the layout, axis, padding) of a result. The recipe is that of the first tensor.
Output = tuple[Numbers, str, int, int]


class _Record:
    """The steps so far. Operands are numbered: first the inputs, then the result of each step."""

    def __init__(self) -> None:
        self.count = 0
        self.steps: list[Step] = []

    def array(self, shape: tuple[int, ...], dtype: str) -> _Array:
        self.count += 1
        return _Array(self, self.count - 1, np.broadcast_to(np.uint8(0), shape), dtype)

    def step(self, kind: str, operands: tuple[_Array, ...], argument: Any, shape: tuple[int, ...]) -> _Array:
        self.steps.append((kind, tuple(operand.number for operand in operands), argument))
        return self.array(shape, operands[0].dtype)


class _Array:
    """A component without numbers."""

    device = "cpu"

    def __init__(self, record: _Record, number: int, like: Any, dtype: str) -> None:
        self.record, self.number, self.like, self.dtype = record, number, like, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.like.shape

    @property
    def ndim(self) -> int:
        return self.like.ndim

    @property
    def mT(self) -> _Array:
        return self.record.step("mT", (self,), None, self.like.swapaxes(-1, -2).shape)

    def __getitem__(self, key: tuple[Any, ...]) -> _Array:
        cuts = tuple(
            "..." if k is Ellipsis else (k.start, k.stop, k.step) if isinstance(k, slice) else int(k)
            for k in (key if isinstance(key, tuple) else (key,))
        )
        return self.record.step("index", (self,), cuts, self.like[key].shape)


class _Recording:
    """The backend primitives that move items; any other would read numbers."""

    def reshape(self, a: _Array, shape: tuple[int, ...]) -> _Array:
        return a.record.step("reshape", (a,), tuple(shape), a.like.reshape(shape).shape)

    def broadcast(self, a: _Array, shape: tuple[int, ...]) -> _Array:
        return a.record.step("broadcast", (a,), tuple(shape), tuple(shape))

    def gather(self, a: _Array, index: Any, axis: int) -> _Array:
        axis %= a.ndim
        return a.record.step("gather", (a,), (tuple(index), axis), (*a.shape[:axis], len(index), *a.shape[axis + 1 :]))

    def concat(self, parts: list[_Array], axis: int = -1) -> _Array:
        axis %= parts[0].ndim
        length = sum(part.shape[axis] for part in parts)
        shape = (*parts[0].shape[:axis], length, *parts[0].shape[axis + 1 :])
        return parts[0].record.step("concat", tuple(parts), axis, shape)

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(f"it reads the numbers of components ({name}), which a compiled function does not have.")


RECORDING = _Recording()
#: Stand-ins count as arrays of torch, whose errors they get.
_STAND_INS = Framework("torch", "breccia_torch.recording", ("_Array",), "breccia_torch.recording:RECORDING")


def record(
    method: Callable[..., Any], facts: tuple[Facts, ...], numbers: tuple[Numbers, ...], *arguments: Any
) -> tuple[tuple[Step, ...], tuple[Output, ...]]:
    """The steps of `method(tensors, *arguments)` for tensors of these facts, and the tensors that it returns.

    Raises what the method raises, and UnsupportedError where it needs numbers.
    """
    registry().types[_Array] = _STAND_INS
    record, tensors, inputs = _Record(), list[ScaledTensor](), dict[int, _Array]()
    for (recipe, layout, axis, padding, shapes, dtypes), places in zip(facts, numbers, strict=True):
        parts: dict[str, _Array] = {}
        for name, shape, dtype, place in zip(PARTS, shapes, dtypes, places, strict=True):
            if shape is not None and dtype is not None and place is not None:
                if place not in inputs:
                    inputs[place] = record.array(shape, dtype)
                parts[name] = inputs[place]
        tensors.append(Metadata(recipe_of(recipe), layout_of(layout), axis, padding).assembled(**parts))
    returned = method(tensors, *arguments)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    return tuple(record.steps), tuple((_numbers(st), keep(st.layout), st.axis, st.padding) for st in outputs)


def _numbers(st: ScaledTensor) -> Numbers:
    return tuple(None if part is None else part.number for part in (getattr(st, name) for name in PARTS))
