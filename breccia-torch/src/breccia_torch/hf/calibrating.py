"""Quantize the layers of a model of transformers by the inputs that they have on a text, one block of the model at a time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import breccia
from breccia import OptionError, ScaledTensor, ScalingRecipe, bridges
from breccia.internal import size

from ..calibration.feedback import Correction, corrected, output_error
from ..calibration.folding import TOLERANCE, Folded, candidates, change, folds
from ..calibration.moments import Moments, Products, watching
from ..quantize import expert_parameters, experts_axis
from .blocks import Arguments, Blocks
from .experts import OBSERVER
from .spots import Spot
from .texts import PROGRAM, as_texts, check_device

#: The name of the stage of what is outside the blocks.
OUTSIDE = "outside the blocks"
#: Copies of a weight in FP32 while it is quantized.
_OF_WEIGHT = 12
#: FP64 matrices of a layer's inputs while it is quantized: the second moment, damped, its inverse and the factors.
_OF_MOMENT = 4
#: The dtypes of torch, by the names of a file.
_DTYPES = {"F16": "float16", "BF16": "bfloat16"}
#: What is said of layers that calibration does not reach.
_UNREACHED = "the text does not reach it, so it is cast without calibration"


class Target(Protocol):
    """A value to quantize. together: the values that share its scale of the whole tensor, itself among them; or none."""

    recipe: ScalingRecipe
    together: Sequence[str]

    def cast(self, x: np.ndarray, among: Sequence[np.ndarray], importance: np.ndarray | None) -> ScaledTensor:
        """`x`, FP32, under the recipe. among: the values of `together`. importance: of each column; None for none."""
        ...


class Method(Protocol):
    """How codes are chosen: "importance", "gptq" or "awq", with its options."""

    name: str
    spec: str


@dataclass
class Stage:
    """The values of one block, quantized. plain: other values that changed, FP32. records: what is known of each value."""

    name: str
    tensors: dict[str, ScaledTensor] = field(default_factory=dict[str, ScaledTensor])
    plain: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    records: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])


class Key(NamedTuple):
    """A matrix of the model whose inputs are observed: a layer's weight, or one expert's part of a parameter."""

    owner: str
    leaf: str
    expert: int | None = None


def calibrate(
    source: Path,
    ids: np.ndarray,
    targets: Mapping[str, Target],
    method: Method,
    *,
    device: str = "cpu",
    limit: int | None = None,
    source_dialect: str | None = None,
    finished: Callable[[str], Stage | None] = lambda name: None,
) -> Iterator[Stage]:
    """Quantize values of a checkpoint by the inputs of their layers, block by block; each sees the quantized ones before it.

    source: the folder of a model of transformers, or a GGUF file. ids: token ids, (texts, length), or (tokens,), which are cut.
    targets: by names of values.
    method: see `breccia convert`. device: what the model runs on, in torch's spelling; matrices are inverted there, too.
    limit: bytes of memory, beside what the process holds already. finished: the stage of that name, if it was made before.

    Everything is checked before the first stage is asked for. Sums are FP64, in the order of the texts: the same machine and
    number of threads give the same bytes. Raises OptionError for ids that the model does not have, and for a limit that the
    largest layer exceeds; NonFiniteError for NaN or Inf in the inputs of a layer, naming it; UnsupportedError for a model that
    cannot run block by block.
    """
    return _Run(source, ids, targets, method, device, limit, source_dialect, finished).stages()


class _Run:
    def __init__(
        self, source: Path, ids: np.ndarray, targets: Mapping[str, Target], method: Method, device: str, limit: int | None,
        source_dialect: str | None, finished: Callable[[str], Stage | None],
    ) -> None:  # fmt: skip
        check_device(device)
        self.checkpoint = checkpoint = bridges.load_checkpoint(source, framework="torch", source_dialect=source_dialect)
        self.blocks = Blocks(source, checkpoint, torch.device(device))
        self.model: Any = self.blocks.model
        self.ids, self.targets, self.method, self.finished = as_texts(self.model, ids), targets, method, finished
        self.shapes = {name: tuple(checkpoint.header(name).shape) for name in targets if name in checkpoint}
        self.keys: dict[str, list[Key]] = {}
        self.reasons: dict[str, str] = {}
        for name in targets:
            self.keys[name], reason = self._keys(name)
            if reason:
                self.reasons[name] = reason
        self.names_of = [[name for name in targets if self._is_in(name, block)] for block in self.blocks.names]
        inside = {name for names in self.names_of for name in names}
        self.outside = [name for name in targets if name not in inside]
        self.room = self._room(limit)
        #: The values whose columns or rows are scaled, and the one that the scales are folded into.
        self.folded: dict[str, str] = {}

    # -- what is observed ------------------------------------------------------------------------------------------

    def _keys(self, name: str) -> tuple[list[Key], str]:
        """The matrices of a value, and why its inputs cannot be observed."""
        spot = self.blocks.spots.get(name)
        if spot is None:
            return [], "the model has no place for it"
        module, linear = self.model.get_submodule(spot.owner), self._linear(spot)
        if linear is not None:
            keys, contracts_last = [Key(linear, "weight")], not spot.turned
        elif spot.leaf in expert_parameters(module):
            contracts_last = (experts_axis(module) == -1) != spot.turned
            experts = range(self.shapes[name][0]) if spot.expert is None else [spot.expert]
            keys = [Key(spot.owner, spot.leaf, expert) for expert in experts]
            if not hasattr(module, "_apply_gate"):
                return [], f"the inputs of {type(module).__name__} cannot be observed"
        else:
            return [], f"{type(module).__name__} is not a linear layer whose inputs can be observed"
        return (keys, "") if contracts_last else ([], "its blocks do not run along the inputs of its layer")

    def _linear(self, spot: Spot) -> str | None:
        """The linear layer whose weight a value is: its own, or one that is tied to it, as a head is to the embedding."""
        for owner, _, leaf in (target.rpartition(".") for target in self.blocks.tied(spot.target)):
            if leaf == "weight" and isinstance(self.model.get_submodule(owner), nn.Linear):
                return owner
        return None

    def _is_in(self, name: str, block: str) -> bool:
        spot = self.blocks.spots.get(name)
        return spot is not None and f"{spot.owner}.".startswith(f"{block}.")

    def _columns(self, key: Key) -> int:
        parameter = getattr(self.model.get_submodule(key.owner), key.leaf)
        module = self.model.get_submodule(key.owner)
        return parameter.shape[-1 if key.expert is None else experts_axis(module)]

    def _room(self, limit: int | None) -> int:
        """The bytes for the second moments of a block. Raises OptionError where the largest does not fit."""
        if limit is None:
            return 1 << 62
        rows, length = self.ids.shape
        hidden = rows * length * self.model.get_input_embeddings().embedding_dim * 4
        blocks = [sum(4 * p.numel() for p in block.parameters()) for block in self.blocks.blocks]
        inside = f"{self.blocks.path}."
        outer = max((4 * p.numel() for n, p in self.model.named_parameters() if not n.startswith(inside)), default=0)
        widths = max(sum(getattr(m, "out_features", 0) for m in block.modules()) for block in self.blocks.blocks)
        fixed = PROGRAM + hidden + max(outer, max(blocks)) + 8 * length * widths
        solving = {
            name: _OF_WEIGHT * 4 * math.prod(self.shapes[name]) + (_OF_MOMENT + 1) * 8 * self._columns(keys[0]) ** 2
            for name, keys in self.keys.items()
            if keys
        }
        largest = max(solving, key=lambda name: solving[name], default=None)
        if largest is None:
            return limit
        needed = fixed + solving[largest]
        if needed > limit:
            give = f"{math.ceil(needed / (64 << 20)) * 64}MiB"
            raise OptionError(
                f"calibration takes about {size(needed)} of memory for {largest} ({self._columns(self.keys[largest][0])} "
                f"inputs), and the limit is {size(limit)}. Give max_memory={give!r} (--max-memory {give}), fewer tokens, or "
                "leave it out (--exclude).",
                name=largest,
                max_memory=limit,
                needed=needed,
            )
        return limit - needed + 8 * self._columns(self.keys[largest][0]) ** 2

    # -- stages ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def stages(self) -> Iterator[Stage]:
        with self.blocks.outside():
            hidden, arguments = self.blocks.embed(self.ids)
        yield from self._in_blocks(hidden, arguments)
        observed = [name for name in self.outside if self.keys[name]]
        made = Stage(OUTSIDE, records={name: self._record(0, note=self.reasons.get(name)) for name in self.outside})
        if observed:
            before = self.finished(OUTSIDE)
            if before is not None:
                return
            with self.blocks.outside():
                self._solve(
                    observed, made, lambda keys: self._observed(keys, [lambda: _consumed(self.blocks.finish(self.ids, hidden))])
                )
        yield made

    def _in_blocks(self, hidden: Tensor, arguments: list[Arguments]) -> Iterator[Stage]:
        for n, (name, block) in enumerate(zip(self.blocks.names, self.blocks.blocks, strict=True)):
            self.blocks.fill(block, name)
            made = self.finished(name)
            if made is None:
                made = Stage(name)

                def runs(n: int = n) -> list[Callable[[], Any]]:
                    return [lambda x=x: self.blocks.run(n, x, arguments[n]) for x in hidden]

                if self.method.name == "awq":
                    self._fold(n, made, runs())
                self._solve(self.names_of[n], made, lambda keys: self._observed(keys, runs()))
                yield made
            for value, tensor in made.tensors.items():
                self._part(value).copy_(torch.from_numpy(breccia.dequantize(tensor)))
            for value, array in made.plain.items():
                self._part(value).copy_(torch.from_numpy(array))
            for row in range(len(hidden)):
                hidden[row] = self.blocks.run(n, hidden[row], arguments[n])
            self.blocks.empty(block)

    def _part(self, name: str) -> Tensor:
        spot: Spot = self.blocks.spots[name]
        return spot.of(self.model, tuple(self.checkpoint.header(name).shape))

    # -- observing -------------------------------------------------------------------------------------------------

    def _observed(self, keys: Sequence[Key], runs: Sequence[Callable[[], Any]]) -> dict[Key, Moments]:
        """The moments of the inputs of these matrices."""
        moments = {key: Moments(_spelled(key), self._columns(key), self.blocks.device) for key in keys}
        products = Products()
        observers: dict[nn.Module, Any] = {}
        experts: dict[str, dict[tuple[str, int], Moments]] = {}
        for key, of in moments.items():
            if key.expert is None:
                for owner in {key.owner, *(name.rpartition(".")[0] for name in self.blocks.tied(f"{key.owner}.{key.leaf}"))}:
                    if isinstance(module := self.model.get_submodule(owner), nn.Linear):
                        observers[module] = products.observer(of)
            else:
                experts.setdefault(key.owner, {})[key.leaf, key.expert] = of
        with watching(observers), ExitStack() as stack:
            for owner, by_leaf in experts.items():
                stack.enter_context(_observing(self.model.get_submodule(owner), by_leaf))
            for run in runs:
                run()
                products.clear()
        return moments

    def _solve(self, names: Sequence[str], stage: Stage, observe: Callable[[Sequence[Key]], dict[Key, Moments]]) -> None:
        """Quantize values into the stage: as many at a time as there is room for the moments of their inputs."""
        for part in self._parts(names):
            moments = observe(list(dict.fromkeys(key for name in part for key in self.keys[name])))
            for name in part:
                self._quantize(name, [moments[key] for key in self.keys[name]], stage)

    def _fold(self, n: int, stage: Stage, runs: Sequence[Callable[[], Any]]) -> None:
        """Move scales of columns into the layers before, where that lowers the error of outputs and changes nothing else."""
        for fold in folds(self.blocks.blocks[n], self.blocks.names[n], runs[0]):
            names = [self._value_of(layer) for layer in fold.layers]
            source = self._value_of(fold.source)
            module: Any = self.model.get_submodule(fold.source)
            layers = [self.model.get_submodule(layer) for layer in fold.layers]
            if source is None or None in names or (isinstance(module, nn.Linear) and source not in self.targets):
                continue
            known = [name for name in names if name is not None]
            moments = self._observed([self.keys[name][0] for name in known], runs)
            found = self._best_scales(known, [moments[self.keys[name][0]] for name in known])
            if found is None:
                continue
            before = runs[0]()
            dtype = getattr(torch, _DTYPES.get(self.checkpoint.header(source).dtype or "F32", "float32"))
            for offset in (0.0,) if isinstance(module, nn.Linear) else (0.0, 1.0):
                folded = Folded(module, layers, found, dtype, offset)
                if change(before, runs[0]()) <= TOLERANCE:
                    self.folded |= dict.fromkeys(known, source)
                    if isinstance(module, nn.Linear):
                        self.folded.setdefault(source, source)
                    else:
                        stage.plain[source] = self._part(source).cpu().clone().numpy()
                        tokens = moments[self.keys[known[0]][0]].count
                        stage.records[source] = self._record(tokens) | {"folded_into": source}
                    break
                folded.undo()

    def _value_of(self, layer: str) -> str | None:
        """The value of a layer's weight, if it is a whole parameter whose inputs can be observed, or of a norm."""
        spots = self.blocks.spots_at(f"{layer}.weight")
        name = spots[0].name if len(spots) == 1 else None
        if name is None or (isinstance(self.model.get_submodule(layer), nn.Linear) and not self.keys.get(name)):
            return None
        return name

    def _best_scales(self, names: Sequence[str], moments: Sequence[Moments]) -> Tensor | None:
        """The scales under which the outputs of layers have the least error; None for no scales, or no inputs."""
        if not all(of.count and float(of.second.diagonal().sum()) > 0 for of in moments):
            return None
        best, least = None, self._error_under(names, moments, None)
        for scales in candidates(moments[0].magnitude / moments[0].count, int(self.method.grid)):  # type: ignore[attr-defined]
            error = self._error_under(names, moments, scales)
            if error < least:
                best, least = scales, error
        return best

    def _error_under(self, names: Sequence[str], moments: Sequence[Moments], scales: Tensor | None) -> float:
        by: Any = 1.0 if scales is None else scales
        weights = {name: self._part(name) * by for name in names}
        total = 0.0
        for name, of in zip(names, moments, strict=True):
            target = self.targets[name]
            among = [weights.get(other, self._part(other)).cpu().numpy() for other in target.together]
            importance = _importance([of if scales is None else of.scaled(scales)])
            scaled = target.cast(weights[name].cpu().numpy(), among, importance)
            decoded = torch.from_numpy(breccia.dequantize(scaled)).to(of.second.device)
            total += output_error(decoded / by - self._part(name), of.second)
        return total

    def _parts(self, names: Sequence[str]) -> Iterator[list[str]]:
        part: list[str] = []
        keys: set[Key] = set()
        for name in names:
            wanted = keys | set(self.keys[name])
            if part and sum(8 * self._columns(key) ** 2 for key in wanted) > self.room:
                yield part
                part, wanted = [], set(self.keys[name])
            part.append(name)
            keys = wanted
        if part:
            yield part

    # -- choosing codes --------------------------------------------------------------------------------------------

    def _quantize(self, name: str, moments: list[Moments], stage: Stage) -> None:
        target, weight, count = self.targets[name], self._part(name), sum(of.count for of in moments)
        if weight.device.type == "meta":  # outside the blocks, and not called
            stage.records[name] = self._record(0, note=_UNREACHED)
            return
        x = weight.cpu().contiguous().numpy()
        among = [self._part(other).cpu().contiguous().numpy() for other in target.together]
        importance = _importance(moments) if count else None
        scaled = target.cast(x, among, importance)
        corrections: list[Correction] = []
        note = self.reasons.get(name) or ("" if count else _UNREACHED)
        if count and self.method.name == "gptq":
            method: Any = self.method
            if scaled.recipe.format.alternative is None:
                scaled, corrections = corrected(
                    weight.contiguous(), scaled, [*moments], method.damping, method.order == "importance"
                )
                note = _note(moments, corrections)
            else:
                note = "its blocks choose between two codecs: codes are those of a cast"
        stage.tensors[name] = scaled
        used = [one.damping for one in corrections if one.damping is not None]
        stage.records[name] = self._record(
            count, self._sqnr(weight, scaled, moments) if count else None, max(used, default=None), note
        )
        if name in self.folded:
            stage.records[name]["folded_into"] = self.folded[name]

    def _record(
        self, tokens: int, sqnr: float | None = None, damping: float | None = None, note: str | None = None
    ) -> dict[str, Any]:
        method = self.method.spec if tokens else None
        return {"method": method, "tokens": tokens, "damping": damping, "output_sqnr": sqnr, "note": note or None}

    def _sqnr(self, weight: Tensor, scaled: ScaledTensor, moments: list[Moments]) -> float | None:
        """The SQNR of the layer's outputs on the text, in dB; None where nothing is lost, or there is nothing."""
        difference = weight - torch.from_numpy(breccia.dequantize(scaled)).to(weight.device)
        shape = (len(moments), *weight.shape[-2:])
        pairs = zip(weight.reshape(shape), difference.reshape(shape), moments, strict=True)
        errors = [(output_error(w, of.second), output_error(d, of.second)) for w, d, of in pairs]
        signal, noise = (sum(each) for each in zip(*errors, strict=True))
        return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None


def _importance(moments: list[Moments]) -> np.ndarray | None:
    """The mean square of each input, by its mean over all; None where all are zero."""
    square = sum(of.second.diagonal() for of in moments)
    assert isinstance(square, Tensor)
    mean = square.mean()
    return (square / mean).float().cpu().numpy() if float(mean) > 0 else None


def _note(moments: list[Moments], corrections: list[Correction]) -> str:
    """What is to be said of the moments of a value."""
    columns, counts = len(moments[0].second), [of.count for of in moments]
    kept = sum(one.damping is None for one in corrections)
    said: list[str] = []
    if min(counts) < columns:
        few = str(counts[0]) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
        said.append(f"{few} tokens for {columns} inputs: damped more")
    spanned = [
        one.rank for one, n in zip(corrections, counts, strict=True) if one.rank is not None and one.rank < min(columns, n)
    ]
    if spanned:
        of = "" if len(counts) == 1 else f" of {len(spanned)} experts"
        few = str(spanned[0]) if min(spanned) == max(spanned) else f"{min(spanned)} to {max(spanned)}"
        said.append(
            f"inputs{of} span {few} of {columns} dimensions: their second moment is singular, and inverted by damping alone"
        )
    if grown := [one.damping for one in corrections if one.damping is not None and one.grown]:
        said.append(f"damping grew to {max(grown):g}, since the second moment could not be inverted under less")
    if kept:
        said.append("codes are those of a cast" if len(counts) == 1 else f"codes of {kept} experts are those of a cast")
    return "; ".join(said)


def _consumed(outputs: Iterator[Any]) -> None:
    """Make all outputs, and keep none."""
    deque(outputs, maxlen=0)


def _spelled(key: Key) -> str:
    expert = "" if key.expert is None else f" of expert {key.expert}"
    return f"{key.owner}.{key.leaf}{expert}"


@contextmanager
def _observing(module: nn.Module, moments: Mapping[tuple[str, int], Moments]) -> Generator[None]:
    """Let moments read the inputs of experts."""

    def observe(leaf: str, rows: Tensor, offsets: Tensor) -> None:
        start = 0
        for expert, end in enumerate(offsets.tolist()):
            of = moments.get((leaf, expert))
            if of is not None and end > start:
                precise = rows[start:end].double()
                of.add(rows[start:end], precise.T @ precise)
            start = end

    setattr(module, OBSERVER, observe)
    try:
        yield
    finally:
        delattr(module, OBSERVER)
