"""What a layer in training carries from step to step: amax histories, and counters that random numbers derive from.

Both are integer buffers of a `StepState`, so `.to(bfloat16)`, `state_dict`, checkpoints and copies keep every bit. They advance
when an optimizer that has the layer's weight has made a step, or in `end_of_step`. Between steps only `pending` changes, which
is in no state: a step that is skipped leaves the state as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from breccia import DelayedScaling, TrainingRecipe
from breccia.backend import calls
from breccia.internal import TENSORS

#: Writes in this context are no changes to autograd: nothing that it differentiates reads the tensor.
_quietly: Any = torch.autograd._unsafe_preserve_version_counter  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
#: FP32 infinity as an integer: larger words of absolute values are NaN.
_INFINITY = 0x7F800000
#: How many steps of optimizers have ended in this process. What is kept for a step is valid for one number.
generation = 0


class StepState(nn.Module):
    """The histories and counters of a layer; it has buffers alone.

    amaxes: (3, length) int32, the bits of FP32 amaxes of input, weight and gradient, oldest first; 0 where there is none yet.
        None without delayed scaling. One entry is the largest amax of a step.
    pending: (3,) int32, the amaxes of the present step. It is not saved.
    draws: (2,) int64: the layer's seed, and the number of steps that have ended.
    """

    amaxes: Tensor | None
    pending: Tensor | None
    draws: Tensor

    def __init__(self, recipe: TrainingRecipe, seed: int = 0, device: Any = None) -> None:
        super().__init__()
        lengths = [of.amax_history_len for of in recipe.delayed.values()]
        amaxes = torch.zeros(3, max(lengths), dtype=torch.int32, device=device) if lengths else None
        self.register_buffer("amaxes", amaxes)
        self.register_buffer("pending", amaxes[:, 0].clone() if amaxes is not None else None, persistent=False)
        self.register_buffer("draws", torch.tensor([seed, 0], device=device))

    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """What the layer's operators take: amaxes, pending, draws."""
        return self.amaxes, self.pending, self.draws

    def reset(self, seed: int = 0) -> None:
        """Start again: no history, no step."""
        for buffer in (self.amaxes, self.pending):
            if buffer is not None:
                buffer.zero_()
        self.draws.copy_(torch.tensor([seed, 0]))

    @torch.no_grad()
    def advance(self) -> None:
        """End a step: each pending amax becomes the newest entry of its history. Histories without a pending one stay."""
        if self.amaxes is not None and self.pending is not None:
            shifted = torch.cat([self.amaxes[:, 1:], self.pending[:, None]], 1)
            self.amaxes.copy_(torch.where(self.pending[:, None] > 0, shifted, self.amaxes))
            self.pending.zero_()
        counter = counter_of(self.draws)
        self.draws[1].add_(1)
        _counters[self.draws] = _Counter(self.draws, (counter.seed, counter.step + 1))


# ------------------------------------------------------------------------------------------------ delayed scaling


def delayed_scale(
    amaxes: Tensor | None, pending: Tensor | None, tensor: str, recipe: DelayedScaling, x: Tensor, *, record: bool
) -> Tensor:
    """The scale of `x` from the steps before, by the rule of `AmaxHistory`; from its own amax while its history is empty.

    record: add the amax of `x` to the pending ones. A gradient with NaN or Inf removes them instead: its step will be skipped.
    Nothing is read to the host.
    """
    assert amaxes is not None and pending is not None
    n = TENSORS.index(tensor)
    newest, own = calls.record_amax(x, recipe, (), 1.0)
    longest = amaxes[n, -recipe.amax_history_len :].max().view(torch.float32).reshape(1)
    _, scale = calls.record_amax(longest, recipe, (), own)  # `own` where the largest is 0
    if record:
        amax = newest.view(torch.int32)
        finite = amax < _INFINITY
        with _quietly(pending):
            if tensor == "gradient":
                pending.mul_(finite)
            pending[n : n + 1].copy_(torch.maximum(pending[n : n + 1], torch.where(finite, amax, 0)))
    return scale


# ------------------------------------------------------------------------------------------------ random numbers


class _Counter:
    """The numbers of a buffer `draws`, read once, and what happened since the last step: how often gradients were cast."""

    def __init__(self, draws: Tensor, numbers: Iterable[int]) -> None:
        self.version = draws._version
        self.seed, self.step = numbers
        self.passes = 0
        self.weight_version: int | None = None


_counters: Any = WeakTensorKeyDictionary()


def counter_of(draws: Tensor) -> _Counter:
    """The counter of a buffer. It is read again where something other than `advance` wrote it, as `load_state_dict` does."""
    counter: _Counter | None = _counters.get(draws)
    if counter is None or counter.version != draws._version:
        counter = _counters[draws] = _Counter(draws, draws.tolist())
    return counter


def next_seed(draws: Tensor) -> int:
    """The seed of the next backward pass: different for each layer, step, pass of a step, and rank."""
    counter = counter_of(draws)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    text = f"{counter.seed} {counter.step} {counter.passes} {rank}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def count_pass(draws: Tensor, weight: Tensor) -> None:
    """Note a backward pass. Warns where the weight has changed since the one before, and no step has ended between them."""
    counter = counter_of(draws)
    if counter.passes and counter.weight_version != weight._version:
        warnings.warn(
            "a layer's weight has changed between two backward passes, and no step has ended: its amax histories and random "
            "numbers stand still. Optimizers of torch.optim end steps by themselves; in other loops call "
            "breccia_torch.end_of_step(model) after each change of the weights.",
            stacklevel=2,
        )
    counter.passes += 1
    counter.weight_version = weight._version


# ------------------------------------------------------------------------------------------------ the end of a step


def end_generation() -> None:
    """Let what is kept for a step be made anew."""
    global generation
    generation += 1


#: The layers that have a state.
layers: WeakSet[nn.Module] = WeakSet()


def _stepped(optimizer: Any, *_: Any) -> None:
    """End the step of the layers whose weight the optimizer has, or whose weight is frozen, if they had a backward pass."""
    skipped = getattr(optimizer, "found_inf", None)  # a GradScaler's, of fused optimizers, which skip steps themselves
    if skipped is not None and bool(skipped):
        return
    end_generation()
    if not layers:
        return
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for layer in list(layers):
        weight: Any = layer.weight
        state: Any = layer.state
        if (id(weight) in own or not weight.requires_grad) and counter_of(state.draws).passes:
            state.advance()


register_optimizer_step_post_hook(_stepped)
