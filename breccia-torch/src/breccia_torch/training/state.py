"""What a layer in training carries from step to step: amax histories, and counters that random numbers derive from.

Both are integer buffers of a `StepState`, so `.to(bfloat16)`, `state_dict`, checkpoints and copies keep every bit. They advance
when an optimizer that has the layer's weight has made a step, or in `end_of_step`, by kernels whose number does not
depend on how many layers there are. Between steps only `pending` and `words` change, which no `state_dict` has: a step that is
skipped leaves the state as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from breccia import DelayedScaling, TrainingRecipe
from breccia.backend import calls, checks, registry, targets
from breccia.internal import TENSORS, scales_of_amaxes

from ..ops import is_captured

#: Writes in this context are no changes to autograd: nothing that it differentiates reads the tensor.
_quietly: Any = torch.autograd._unsafe_preserve_version_counter  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


class _foreach:
    """Operations on lists of tensors in one kernel, as optimizers use them."""

    add_: Any = torch._foreach_add_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    copy_: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    zero_: Any = torch._foreach_zero_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


#: What casts take.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: The bits of 2^-126: smaller amaxes, FP32 subnormals, give no scale.
_NORMAL = 1 << 23
#: How many steps of optimizers have ended in this process. What is kept for a step is valid for one number.
generation = 0
#: The tensors with delayed scaling, and their recipes.
Delayed = tuple[tuple[str, DelayedScaling], ...]


class StepState(nn.Module):
    """The histories and counters of a layer; it has buffers alone.

    amaxes: (3, length) int32, the bits of FP32 amaxes of input, weight and gradient, oldest first; 0 where there is none yet.
        None without delayed scaling. One entry is the largest amax of a step.
    scales: (3,) int32, the bits of the FP32 scales that follow from `amaxes`; 0 where the tensor's own amax gives one. They
        are not saved.
    pending: (3,) int32, the amaxes of the present step. It is not saved.
    draws: (2,) int64: the layer's seed, and the number of steps that have ended.
    words: (2,) int32, the seed of the next cast of gradients, as two words. It follows from `draws` and the number of backward
        passes of this step, and is not saved. None without stochastic rounding.

    Buffers on the device meta begin as new ones where they get memory.
    """

    amaxes: Tensor | None
    scales: Tensor | None
    pending: Tensor | None
    draws: Tensor
    words: Tensor | None
    delayed: Delayed
    seed: int

    def __init__(self, recipe: TrainingRecipe, seed: int = 0, device: Any = None) -> None:
        super().__init__()
        self.delayed, self.seed = tuple(recipe.delayed.items()), seed
        lengths = [of.amax_history_len for _, of in self.delayed]
        amaxes = torch.zeros(3, max(lengths), dtype=torch.int32, device=device) if lengths else None
        self.register_buffer("amaxes", amaxes)
        for name in ("scales", "pending"):
            self.register_buffer(name, amaxes[:, 0].clone() if amaxes is not None else None, persistent=False)
        self.register_buffer("draws", torch.tensor([seed, 0], device=device))
        self.register_buffer("words", _words(self.draws, _rank()) if recipe.stochastic else None, persistent=False)

    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor | None]:
        """What the layer's operators take: amaxes, scales, pending, draws, words."""
        return self.amaxes, self.scales, self.pending, self.draws, self.words

    def reset(self, seed: int = 0) -> None:
        """Start again: no history, no step.

        CUDA graphs that were captured before keep the old scales until a step ends.
        """
        self.seed = seed
        for buffer in (self.amaxes, self.pending):
            if buffer is not None:
                buffer.zero_()
        self.draws.copy_(torch.tensor([seed, 0]))
        _begin_words(self)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        meta = self.draws.is_meta
        super()._apply(fn, recurse)
        if meta and not self.draws.is_meta:  # `to_empty` gives memory with whatever it held before
            self.reset(self.seed)
        return self

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        if self.amaxes is not None and self.pending is not None and self.pending.device != self.amaxes.device:
            # `assign=True` put tensors of another device, often in the place of meta's. Scales are computed from them.
            self.scales, self.pending = (torch.zeros_like(self.amaxes[:, 0]) for _ in range(2))
        if self.words is not None and self.words.device != self.draws.device:
            self.words = torch.zeros(2, dtype=torch.int32, device=self.draws.device)
        _begin_words(self)


@torch.no_grad()
def advance(states: Iterable[StepState]) -> None:
    """End a step: each pending amax becomes the newest entry of its history. Histories without one that gives a scale stay."""
    alike: dict[Any, list[StepState]] = {}
    for state in states:
        alike.setdefault((state.draws.device, state.delayed, state.words is None), []).append(state)
    for (_, delayed, nearest), group in alike.items():
        counters = [counter_of(state.draws) for state in group]
        if delayed:
            _roll(group, delayed, counters[0].step)
        else:
            _count_step([state.draws for state in group])
        rank = None if nearest else _rank()
        if rank is not None:
            words = _words(torch.stack([state.draws for state in group]), rank)
            _foreach.copy_([state.words for state in group], words.unbind())
        for state, counter in zip(group, counters, strict=True):
            _counters[state.draws] = _Counter(state.draws, counter.step + 1, state.words, rank)


@torch.no_grad()
def forget(states: Iterable[StepState]) -> None:
    """Begin a step again: what its passes recorded is gone."""
    for state in states:
        if state.pending is not None:
            state.pending.zero_()
        counter_of(state.draws).begin()
        _begin_words(state)


def _count_step(draws: list[Tensor]) -> None:
    _foreach.add_([of[1] for of in draws], 1)


def _roll(group: Sequence[Any], delayed: Delayed, step: int) -> None:
    """End a step of histories of equal length on one device, compute their scales, and count it. step: its number."""
    buffers = [[getattr(state, name) for state in group] for name in ("amaxes", "scales", "pending", "draws")]
    amaxes, scales, pending, draws = buffers
    kernels = _kernels_of(delayed, amaxes[0].shape[1], amaxes[0].device)
    if kernels is None or not kernels.end(*buffers):
        end_histories(amaxes, scales, pending, draws, delayed)
    known: list[_History | None] = [_histories.get(of) for of in amaxes]
    complete = [history is not None and history.complete for history in known]
    # Few steps look at scales on the host: those whose number is a power of two, until every history has an entry.
    if not all(complete) and step.bit_count() < 2 and not _unreadable(scales[0]):
        complete = _complete(torch.stack(scales), delayed).tolist()
    for of, history, whole in zip(amaxes, known, complete, strict=True):
        if history is not None:
            _histories[of] = history._replace(version=of._version, complete=whole)


def end_histories(
    amaxes: list[Tensor], scales: list[Tensor], pending: list[Tensor], draws: list[Tensor], delayed: Delayed
) -> None:
    """End the step of each layer in these buffers: a pending amax of a tensor moves into its history, and its scale follows."""
    newest, before = torch.stack(pending), torch.stack(amaxes)
    moved = torch.cat([before[..., 1:], newest[..., None]], -1)
    now = torch.where((newest >= _NORMAL)[..., None], moved, before)
    _foreach.copy_(amaxes, now.unbind())
    _foreach.copy_(scales, _scales(now, delayed).unbind())
    _foreach.zero_(pending)
    _count_step(draws)


#: The kernels that take the place of `end_histories` and `note`, by what they are for: (the table of kernels, they or None).
_kernels: dict[Any, tuple[Any, Any]] = {}


def _kernels_of(delayed: Delayed, length: int, device: torch.device) -> Any:
    """What the kernel that records amaxes on the device prepares for histories of that length; None if it has nothing.

    Its `end(amaxes, scales, pending, draws)` returns whether it did what `end_histories` does, the versions of all four raised.
    Its `note(pending, **amaxes)` does what `_History.note` does, and leaves the version of `pending`.
    """
    known, key = registry(), (delayed, length, device)
    prepared = _kernels.get(key)
    if prepared is None or prepared[0] is not known.table:
        recipes = [dict(delayed).get(tensor) for tensor in TENSORS]
        like = torch.empty(1, dtype=torch.float32, device=device)
        chosen = known.table.choose(known.operation("record_amax"), "torch", like, None, delayed[0][1])
        prepare = None if chosen.checked or chosen.traced else chosen.kernel.prepare
        prepared = _kernels[key] = known.table, None if prepare is None else targets.load(prepare)(recipes, length, device)
    return prepared[1]


# ------------------------------------------------------------------------------------------------ delayed scaling


class _History(NamedTuple):
    """What is known of a buffer `amaxes`, and FP32 views of the buffers beside it.

    version: of `amaxes` when `scales` were computed. complete: whether each delayed tensor has a scale. scale_of, amax_of: the
    scales and the pending amaxes, of shapes () and (1,). of_batch: the pending amaxes of input and gradient. table, kernels: as
    of `_kernels_of`.
    """

    version: int
    complete: bool
    pending: Tensor
    scale_of: Sequence[Tensor]
    amax_of: Sequence[Tensor]
    of_batch: Tensor
    table: Any
    kernels: Any

    def note(self, **amaxes: Tensor) -> None:
        """Raise the pending amaxes to those (1,) of a pass: weight=, or input= and gradient=, one or both.

        An amax that is NaN or infinite is left out. That of a gradient removes what is of its batch: its step will be skipped.
        """
        if self.kernels is not None:
            self.kernels.note(self.pending, **amaxes)
            return
        both = "input" in amaxes and "gradient" in amaxes
        pending = self.of_batch if both else self.amax_of[TENSORS.index(next(iter(amaxes)))]
        newest = torch.cat([amaxes["input"], amaxes["gradient"]]) if both else next(iter(amaxes.values()))
        with _quietly(self.pending):
            torch.maximum(pending, newest.nan_to_num(0.0, 0.0), out=pending)
            if "gradient" in amaxes:
                self.of_batch.mul_(amaxes["gradient"] < torch.inf)


#: By buffer. Something other than `advance` may write it, as `load_state_dict` does.
_histories: Any = WeakTensorKeyDictionary()


def _scales(amaxes: Tensor, delayed: Delayed) -> Tensor:
    """The bits of the scales (..., 3) of histories (..., 3, length); 0 for tensors that are not delayed."""
    scales = torch.zeros_like(amaxes[..., 0])
    for recipe in dict.fromkeys(recipe for _, recipe in delayed):
        of = [TENSORS.index(tensor) for tensor, own in delayed if own == recipe]
        tensors = slice(of[0], of[-1] + 1, of[1] - of[0] if len(of) > 1 else 1)  # reaches any of three
        scales[..., tensors] = scales_of_amaxes(amaxes[..., tensors, -recipe.amax_history_len :].amax(-1), recipe)
    return scales


def _complete(scales: Tensor, delayed: Delayed) -> Tensor:
    return (scales[..., [TENSORS.index(tensor) for tensor, _ in delayed]] > 0).all(-1)


def _unreadable(x: Tensor) -> bool:
    """Whether the host cannot read it: while a CUDA graph is recorded, and on the device meta."""
    return x.is_meta or is_captured(x)


def _history_of(how: Any) -> _History:
    """What is known of a layer's history. Its scales are computed anew if something else has written to it."""
    found: _History | None = _histories.get(how.amaxes)
    version, table = how.amaxes._version, registry().table
    if found is None or found.version != version or found.pending is not how.pending or found.table is not table:
        delayed = tuple(how.recipe.delayed.items())
        with torch.inference_mode(False), torch.no_grad(), _quietly(how.scales):  # training may follow, with the same views
            how.scales.copy_(_scales(how.amaxes, delayed))
            scales, amaxes = how.scales.view(torch.float32), how.pending.view(torch.float32)
            complete = not _unreadable(scales) and bool(_complete(how.scales, delayed))
            views = scales.unbind(), amaxes.split(1), amaxes[:: TENSORS.index("gradient")]
        kernels = _kernels_of(delayed, how.amaxes.shape[1], how.amaxes.device)
        found = _History(version, complete, how.pending, *views, table, kernels)
        _histories[how.amaxes] = found
    return found


def delayed_scale(how: Any, tensor: str, recipe: DelayedScaling, x: Tensor) -> Tensor:
    """The scale of `x` from the steps before, by the rule of `AmaxHistory`; from its own amax while its history is empty.

    how: a `Context`.
    """
    if x.dtype not in FLOATS:
        checks.check_cast(x, recipe)  # raises: torch's operations would, and would not say what to do
    history = _history_of(how)
    scale = history.scale_of[TENSORS.index(tensor)]
    if not history.complete:
        _, own = calls.record_amax(x, recipe, (), 1.0)
        scale = torch.where(scale > 0, scale, own)
    return scale


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor, FP32 of shape (1,): NaN if there is one, and 0 of no numbers."""
    if not x.numel():
        return x.new_zeros(1, dtype=torch.float32)
    return torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32).view(1)


def note_weight(how: Any, amax: Tensor | None) -> None:
    """Note the amax (1,) of a weight; None, where it has no history."""
    if amax is not None:
        _history_of(how).note(weight=amax)


def note_batch(how: Any, of_input: Tensor | None, of_gradient: Tensor | None) -> None:
    """Note the amaxes (1,) of a batch; None is of a tensor that has no history.

    Both are noted in the backward pass, so that forward passes without one, as where the loss is NaN, leave nothing behind.
    """
    amaxes = {name: amax for name, amax in (("input", of_input), ("gradient", of_gradient)) if amax is not None}
    if amaxes:
        _history_of(how).note(**amaxes)


# ------------------------------------------------------------------------------------------------ random numbers


class _Counter:
    """What is known of a buffer `draws`, and how often gradients were cast since the last step.

    step: the number of steps. words, rank: the buffer that has the words of `draws`, and for which rank.
    """

    def __init__(self, draws: Tensor, step: int, words: Tensor | None = None, rank: int | None = None) -> None:
        self.version = draws._version
        self.step, self.words, self.rank = step, words, rank
        self.begin()

    def begin(self) -> None:
        self.passes = 0
        self.weight_version: int | None = None


_counters: Any = WeakTensorKeyDictionary()


def counter_of(draws: Tensor) -> _Counter:
    """The counter of a buffer. It is read again where something other than `advance` wrote it, as `load_state_dict` does."""
    counter: _Counter | None = _counters.get(draws)
    if counter is None or counter.version != draws._version:
        counter = _counters[draws] = _Counter(draws, int(draws[1]))
    return counter


def _rank() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if distributed else 0


def _words(draws: Tensor, rank: int) -> Tensor:
    """Seeds (..., 2), int32 words, of the steps that `draws` (..., 2) and a rank name.

    They are the outputs of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), one for each step, computed on the device: a CUDA
    graph of a step draws other numbers in each replay. A rank begins elsewhere.
    """
    z = draws[..., 0] + (draws[..., 1] + 1) * _int64(0x9E3779B97F4A7C15) + _int64(rank * 0xD1342543DE82EF95)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * _int64(factor)
    return z[..., None].view(torch.int32)


def _int64(number: int) -> int:
    """The number modulo 2^64 as int64 has it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@torch.no_grad()
def _begin_words(how: Any) -> None:
    """Compute `words` for the first pass of the step that `draws` names. how: a `StepState` or a `Context`."""
    if how.words is None or how.draws.is_meta:
        return
    counter, rank = counter_of(how.draws), _rank()
    with _quietly(how.words):
        how.words.copy_(_words(how.draws, rank))
    counter.words, counter.rank = how.words, rank


def next_seed(how: Any) -> Tensor:
    """The seed of the next backward pass, as two words: different for each layer, step, pass of a step, and rank.

    how: a `Context`. The tensor is a buffer, which `count_pass` changes.
    """
    counter = counter_of(how.draws)
    if counter.words is not how.words or counter.rank != _rank():
        _begin_words(how)
    return how.words


@torch.no_grad()
def count_pass(how: Any, weight: Tensor) -> None:
    """Note a backward pass: the next one draws other numbers.

    Warns where the weight has changed since the pass before, and no step has ended between them. how: a `Context`.
    """
    if how.words is not None:  # on the device: a CUDA graph of a pass may be replayed several times in a step
        with _quietly(how.words):
            how.words[1].add_(1)
    counter = counter_of(how.draws)
    if counter.passes and counter.weight_version != weight._version:
        warnings.warn(
            "a layer's weight has changed between two backward passes, and no step has ended: its amax histories and random "
            "numbers stand still. Optimizers of torch.optim end steps by themselves; in other loops call "
            "breccia_torch.end_of_step(model) after each change of the weights.",
            stacklevel=2,
        )
    counter.passes += 1
    counter.weight_version = weight._version


# ------------------------------------------------------------------------------------------------ CUDA graphs

#: The weights that a CUDA graph casts or changes.
_captured: Any = WeakTensorKeyDictionary()


def in_graphs(weight: Tensor) -> bool:
    """Whether a CUDA graph is being captured, or one that was captured casts or changes the weight.

    No cast of such a weight may be kept: a cast in a graph has no values before the graph is replayed, and a replay that
    changes the weight leaves its version as it was.
    """
    if is_captured(weight):
        _captured[weight] = True
        return True
    return _was_captured(weight)


def _was_captured(weight: Tensor) -> bool:
    return bool(_captured) and weight in _captured


# ------------------------------------------------------------------------------------------------ the end of a step


def end_generation() -> None:
    """Let what is kept for a step be made anew."""
    global generation
    generation += 1


#: The layers that have a state.
layers: WeakSet[nn.Module] = WeakSet()


def _had_passes(state: StepState, weight: Tensor) -> bool:
    """Whether a step has begun. Nobody counts the passes that a CUDA graph replays."""
    return counter_of(state.draws).passes > 0 or _was_captured(weight)


def _stepped(optimizer: Any, *_: Any) -> None:
    """End the step of the layers whose weight the optimizer has, or whose weight is frozen, if they had a backward pass."""
    skipped = getattr(optimizer, "found_inf", None)  # a GradScaler's, of fused optimizers, which skip steps themselves
    if skipped is not None and bool(skipped):
        return
    end_generation()
    for weight in (p for group in optimizer.param_groups for p in group["params"]):
        if not is_captured(weight):
            break
        _captured[weight] = True
    if not layers:
        return
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    stepped: list[Any] = []
    for layer in list(layers):
        weight: Any = layer.weight
        state: Any = layer.state
        if (id(weight) in own or not weight.requires_grad) and _had_passes(state, weight):
            stepped.append(state)
    advance(stepped)


register_optimizer_step_post_hook(_stepped)
