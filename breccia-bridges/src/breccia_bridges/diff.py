"""Which tensors of two checkpoints differ, and why: the walk over both, and its report."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from breccia import ScaledTensor
from breccia.backend import components
from breccia.internal import measuring, with_parts

from .beside import left_behind
from .causes import Pair, explain
from .compare import same_bytes
from .hypotheses import PART_NAMES, Side
from .measure import FileTensor, first_row, measure, same_values
from .remote_path import path_of
from .results import Advance, no_progress
from .safetensors_file import Shape, read
from .source import Source, Value
from .text import spelled

#: What became of a tensor: the same bytes; the same numbers in other bytes; other numbers; or it is in one checkpoint only.
SAME, EQUAL, DIFFERENT, ONLY_A, ONLY_B = "same bytes", "same values", "different", "only in A", "only in B"
#: The cause of a difference that no test explains.
UNKNOWN = "unknown"


@dataclass(frozen=True)
class TensorDifference:
    """One tensor of two checkpoints.

    state: "same bytes", "same values", "different", "only in A" or "only in B".
    stored_as: in A and in B, as a dtype of the file or a recipe's name; None in the one that lacks it.
    cause: the name of the cause that was proved, "unknown", or "" for no difference. why: the cause in a sentence.
    """

    name: str
    state: str
    shape: Shape
    stored_as: tuple[str | None, str | None]
    cause: str = ""
    why: str = ""

    @property
    def differs(self) -> bool:
        return self.state not in (SAME, EQUAL)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "state": self.state,
            "shape": list(self.shape),
            "stored_as": list(self.stored_as),
            "cause": self.cause or None,
            "why": self.why or None,
        }


@dataclass(frozen=True)
class Differences:
    """What `diff` found. a, b, original: the paths. tensors: those of A in its order, then those of B alone."""

    a: str
    b: str
    original: str | None = None
    tensors: list[TensorDifference] = field(default_factory=list[TensorDifference])

    @property
    def different(self) -> list[TensorDifference]:
        """Tensors with other values, or in one checkpoint only."""
        return [t for t in self.tensors if t.differs]

    @property
    def equal(self) -> bool:
        """Whether both have the same tensors with the same values."""
        return not self.different

    @property
    def causes(self) -> dict[str, int]:
        """The number of tensors by the cause of their difference, most common first."""
        return dict(Counter(t.cause for t in self.different if t.cause).most_common())

    @property
    def verdict(self) -> str:
        """What was found, in one sentence."""
        if self.equal:
            other = sum(t.state == EQUAL for t in self.tensors)
            stored = f", {other} of {len(self.tensors)} in other bytes" if other else ""
            return f"equal: all tensors have the same {'values' if other else 'bytes'}{stored}"
        counts = {DIFFERENT: "with other values", ONLY_A: "only in A", ONLY_B: "only in B"}
        found = Counter(t.state for t in self.different)
        said = ", ".join(f"{found[state]} {words}" for state, words in counts.items() if found[state])
        causes = ", ".join(f"{count} {cause}" for cause, count in self.causes.items())
        return f"different: {said}, of {len(self.tensors)} tensors{f'; causes: {causes}' if causes else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        return {
            "a": self.a,
            "b": self.b,
            "original": self.original,
            "equal": self.equal,
            "verdict": self.verdict,
            "causes": self.causes,
            "tensors": [t.to_dict() for t in self.tensors],
        }


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    original: str | os.PathLike[str] | None = None,
    advance: Advance | None = None,
    source_dialect: str | tuple[str | None, str | None] | None = None,
) -> Differences:
    """Say which tensors of two checkpoints differ, and why: the cause is tested on all values, never guessed.

    Each is a `.safetensors` or `.gguf` file or a folder: plain, quantized by breccia, or in any dialect that breccia reads, in
    any mixture. Tensors of one name are equal if their values are, whatever their bytes. Values are read slab by slab, and
    tensor by tensor where one scale spans them.

    original: the checkpoint that both were quantized from. It tells by which rule of scales and by which rounding each was
        written; quantized values alone tell it in few cases.
    source_dialect: as in `compare`.
    advance: called with a tensor's name and its bytes in `a`.

    Raises as `compare` does, except for checkpoints that have no tensor in common.

        >>> st = breccia.cast(np.array([[0.125, 1.0, 3.0, 6.0]], np.float32), "mxfp4")
        >>> swapped = breccia.from_buffer(st.data >> 4 | st.data << 4, st.scale, "mxfp4", st.layout)
        >>> breccia.bridges.save_safetensors({"w": st}, tmp / "a.safetensors")
        >>> breccia.bridges.save_safetensors({"w": swapped}, tmp / "b.safetensors")
        >>> [(t.name, t.cause, t.why) for t in breccia.bridges.diff(tmp / "a.safetensors", tmp / "b.safetensors").different]
        [('w', 'nibble_order', 'The codes of 4 bits within each byte are in reverse.')]
    """
    of_a, of_b = source_dialect if isinstance(source_dialect, tuple) else (source_dialect, source_dialect)
    sources = {"A": Source.open(path_of(a), of_a), "B": Source.open(path_of(b), of_b)}
    known = None if original is None else Source.open(path_of(original))
    walk = _Walk(sources["A"], sources["B"], known)
    report = Differences(str(a), str(b), None if original is None else str(original))
    for name, value in sources["A"].values.items():
        found = walk.compared(name)
        if found is not None:
            report.tensors.append(found)
        (advance or no_progress)(name, value.nbytes)
    report.tensors.extend(found for name in sources["B"].values if (found := walk.only_in_b(name)) is not None)
    for source in (*sources.values(), *([] if known is None else [known])):
        source.check_unchanged()
    return report


class _Walk:
    """The tensors of two checkpoints, one after the other."""

    def __init__(self, a: Source, b: Source, original: Source | None) -> None:
        self.a, self.b, self.original = a.values, b.values, {} if original is None else original.values
        self.left_behind = {*left_behind(a), *left_behind(b)}
        self.known = {"A": _Known(a.values.values()), "B": _Known(b.values.values())}

    def compared(self, name: str) -> TensorDifference | None:
        """A tensor of A; None for one that says how its library quantizes activations, which is no value of the model."""
        x, y = self.a[name], self.b.get(name)
        if y is None:
            return self._only(x, ONLY_A)
        stored_as = x.stored_as, y.stored_as
        if same_bytes(x, y):
            return TensorDifference(name, SAME, x.shape, stored_as)
        if not (x.is_readable and y.is_readable):
            unread = next(value.stored_as for value in (x, y) if not value.is_readable)
            return TensorDifference(name, DIFFERENT, x.shape, stored_as, UNKNOWN, _not_floating(x, y, unread))
        if same_values(x.numbers(), y.numbers()):
            return TensorDifference(name, EQUAL, x.shape, stored_as)
        a, b = _side("A", x), _side("B", y)
        known = self.original.get(name)
        original = _side("original", known) if known is not None and known.is_readable else None
        pair = Pair(a, b, original, partial(self._elsewhere, name=name))
        cause, why = explain(pair) or (UNKNOWN, unexplained(a, b, original is not None))
        return TensorDifference(name, DIFFERENT, x.shape, stored_as, cause, why)

    def only_in_b(self, name: str) -> TensorDifference | None:
        return None if name in self.a else self._only(self.b[name], ONLY_B)

    def _only(self, x: Value, state: str) -> TensorDifference | None:
        """A tensor of one checkpoint, which may be in the other under another name."""
        if x.name in self.left_behind:
            return None
        here, there = ("A", "B") if state == ONLY_A else ("B", "A")
        stored_as = (x.stored_as, None) if state == ONLY_A else (None, x.stored_as)
        other = self.known[there].find(x.numbers(), {*self.a} & {*self.b}) if x.is_readable else None
        if other is None:
            return TensorDifference(x.name, state, x.shape, stored_as)
        return TensorDifference(x.name, state, x.shape, stored_as, "renamed", f"{there} has what {here} has here as {other}.")

    def _elsewhere(self, label: str, name: str, numbers: FileTensor) -> str | None:
        """Another tensor of A or B that has the numbers of `name`."""
        return self.known[label].find(numbers, {name})


class _Known:
    """The tensors of a checkpoint, found by their numbers: a digest of the first row leads to those worth comparing."""

    def __init__(self, values: Iterable[Value]) -> None:
        self._by_shape: dict[Shape, list[Value]] = {}
        for value in values:
            if value.is_readable:
                self._by_shape.setdefault(value.shape, []).append(value)
        self._by_row: dict[Shape, dict[bytes, list[Value]]] = {}

    def find(self, numbers: FileTensor, besides: set[str]) -> str | None:
        """The name of the first tensor with these numbers, except some; None if there is none."""
        shape = numbers.shape
        if shape not in self._by_row:
            rows = self._by_row[shape] = {}
            for value in self._by_shape.get(shape, ()):
                rows.setdefault(first_row(value.numbers()).tobytes(), []).append(value)
        likely = self._by_row[shape].get(first_row(numbers).tobytes(), ()) if self._by_row[shape] else ()
        return next((v.name for v in likely if v.name not in besides and same_values(v.numbers(), numbers)), None)


def _side(label: str, value: Value) -> Side:
    """A value with its scales in memory, and its codes read by slabs."""
    if not value.is_scaled:
        entry = value.container.entries[value.name]
        return Side(label, value.plain().reshape(entry.shape), entry.dtype)
    st = value.tensor()
    return Side(label, with_parts(st, {n: part if n == "data" else read(part) for n, part in components(st).items()}))


def _not_floating(x: Value, y: Value, unread: str) -> str:
    shapes = "" if x.shape == y.shape else f"Shapes differ: {spelled(x.shape)} and {spelled(y.shape)}. "
    return f"{shapes}Bytes differ, and {unread} is not floating: no cause was tested."


def unexplained(a: Side, b: Side, has_original: bool) -> str:
    """What is known of a difference that has none of the causes."""
    x, y = a.numbers, b.numbers
    if x.shape != y.shape:
        return f"Shapes differ: {spelled(x.shape)} and {spelled(y.shape)}."
    metrics = measure(x, y)
    said = f"No tested cause explains it; SQNR {metrics.sqnr:.2f} dB, largest difference {metrics.max_error:.3g}."
    if isinstance(a.x, ScaledTensor) and isinstance(b.x, ScaledTensor):
        if a.x.recipe.format == b.x.recipe.format:
            parts = [_changed(part, components(b.x).get(name), PART_NAMES[name]) for name, part in components(a.x).items()]
            said += f" By component: {', '.join(parts)}."
        if not has_original:
            said += " Give the original to test rules of scales and rounding too."
    return said


def _changed(x: np.ndarray, y: np.ndarray | None, name: str) -> str:
    """How much of a component differs."""
    if y is None or x.shape != y.shape or x.dtype != y.dtype:
        return f"{name} of another shape or dtype"
    a, b, step = x.reshape(-1), y.reshape(-1), measuring.SLAB
    count = sum(int((read(a[i : i + step]) != read(b[i : i + step])).sum()) for i in range(0, a.size, step))
    return f"{name} {f'differ in {count} of {x.size} items' if count else 'equal'}"
