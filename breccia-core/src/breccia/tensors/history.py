"""AmaxHistory: the policy of delayed scaling, as a plain value that the training loop keeps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..arrays.frameworks import ops_of
from ..codecs import F32_INF, MAGNITUDE, NORMAL
from ..errors import UnsupportedError
from ..recipes import DelayedScaling
from ..specs import as_recipe


@dataclass(frozen=True, eq=False)
class AmaxHistory:
    """Recent amax values of one tensor, and the scale derived from them for the next cast.

        history = AmaxHistory(DelayedScaling(amax_history_len=16))
        for x in steps:
            st = breccia.cast(x, history.recipe, scale=history.scale)
            history = history.update(x)

    The scale is 1.0 before the first update; then the largest recorded amax over the format's largest value, times 2^margin. A
    history whose largest amax is 0, NaN or Inf keeps the scale it had (TransformerEngine 2.x, delayed scaling, "max").
    `amaxes`, oldest first, is an array of `x`'s framework of shape (n,), `scale` one of shape (). Nothing is read to the host.
    """

    recipe: DelayedScaling = field(default_factory=DelayedScaling)
    amaxes: Any = ()
    scale: Any = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.recipe, str):
            object.__setattr__(self, "recipe", as_recipe(self.recipe))
        if not isinstance(self.recipe, DelayedScaling):
            raise UnsupportedError(f"AmaxHistory needs a DelayedScaling recipe, got {self.recipe!r}.")

    def update(self, x: Any) -> AmaxHistory:
        """A history with the amax of `x` appended; the oldest value is dropped beyond `amax_history_len`.

        The number of operations does not depend on the length of the history.
        """
        ops = ops_of(x)
        y = ops.f32(x)
        every = tuple(range(len(y.shape)))
        newest = ops.reshape(ops.bitcast_to_float(ops.amax(ops.bitcast_to_int(y) & MAGNITUDE, every)), (1,))
        kept = self.amaxes[max(len(self.amaxes) + 1 - self.recipe.amax_history_len, 0) :]
        amaxes = ops.concat([kept, newest]) if len(kept) else newest
        largest = ops.amax(ops.bitcast_to_int(amaxes), (0,))
        level, fmt = self.recipe.format.scale, self.recipe.format
        usable = (largest < F32_INF) & (largest >= NORMAL)
        statistic = ops.bitcast_to_float(ops.where(usable, largest, 0))
        codes = self.recipe.rules[0].scale(ops, statistic, level.codec, fmt.element, fmt.qmax(level), None)
        before = self.scale if hasattr(self.scale, "shape") else ops.constant(float(self.scale), x)
        after = ops.where(usable, ops.bitcast_to_float(codes), ops.reshape(before, (1,)))
        return replace(self, amaxes=amaxes, scale=ops.reshape(after, ()))
