"""AmaxHistory: the policy of delayed scaling, as a plain value that the training loop keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import targets
from ..errors import UnsupportedError
from ..recipes import DelayedScaling
from ..specs import as_recipe
from ..tracing import traced_by_framework
from .pair import TensorPair

if TYPE_CHECKING:
    from .tensor import ScaledTensor


@dataclass(frozen=True, eq=False)
class AmaxHistory:
    """Recent amax values of one tensor, and the scale derived from them for the next cast.

    The scale is 1.0 before the first update; then the largest recorded amax over the format's largest value, times 2^margin. A
    history whose largest amax is 0, NaN or Inf keeps the scale it had (TransformerEngine 2.x, delayed scaling, "max").
    `amaxes`, oldest first, is an array of `x`'s framework of shape (n,), `scale` one of shape (). Nothing is read to the host.
    Zeros before the first values keep the shape of `amaxes` fixed, as compiled functions need it. A pytree of JAX.

    `update`, `cast` and `cast_pair` raise UnsupportedError for arrays of another dtype than FP32, or of another framework or
    device than `x`, and ShapeError for other shapes.

        >>> history = breccia.AmaxHistory(breccia.DelayedScaling(amax_history_len=16))
        >>> for amax in (56.0, 224.0, 7.0):
        ...     st, history = history.cast(np.array([amax], np.float32))
        >>> history.amaxes, history.scale  # 224 / 448, the largest value of E4M3
        (array([ 56., 224.,   7.], dtype=float32), array(0.5, dtype=float32))
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
        """A history with the amax of `x` appended; the oldest value is dropped beyond `amax_history_len`."""
        amaxes, scale = record_amax(x, self.recipe, self.amaxes, self.scale)
        return AmaxHistory(self.recipe, amaxes, scale)

    def cast(self, x: Any, **options: Any) -> tuple[ScaledTensor, AmaxHistory]:
        """(`breccia.cast(x, self.recipe, scale=self.scale, **options)`, `self.update(x)`).

        A kernel may read `x` once for both. options: those of `breccia.cast` except for `scale`.
        """
        st, amaxes, scale = cast_and_record(x, self.recipe, self.amaxes, self.scale, **options)
        return st, AmaxHistory(self.recipe, amaxes, scale)

    def cast_pair(self, x: Any, **options: Any) -> tuple[TensorPair, AmaxHistory]:
        """(`breccia.cast_pair(x, self.recipe, scale=self.scale, **options)`, `self.update(x)`).

        A kernel may read `x` once for all. options: those of `breccia.cast_pair` except for `scale`.
        """
        rows, columns, amaxes, scale = cast_pair_and_record(x, self.recipe, self.amaxes, self.scale, **options)
        return TensorPair(rows, columns), AmaxHistory(self.recipe, amaxes, scale)


@traced_by_framework
def record_amax(x: Any, recipe: DelayedScaling, amaxes: Any, scale: Any) -> tuple[Any, Any]:
    """The op of that name; module-level, so that torch.compile can substitute it."""
    return targets.load("breccia.api:record_amax")(x, recipe, amaxes, scale)


@traced_by_framework
def cast_and_record(x: Any, recipe: DelayedScaling, amaxes: Any, scale: Any, **options: Any) -> tuple[ScaledTensor, Any, Any]:
    """The op of that name; module-level, so that torch.compile can substitute it."""
    return targets.load("breccia.api:cast_and_record")(x, recipe, amaxes, scale, **options)


@traced_by_framework
def cast_pair_and_record(
    x: Any, recipe: DelayedScaling, amaxes: Any, scale: Any, **options: Any
) -> tuple[ScaledTensor, ScaledTensor, Any, Any]:
    """The op of that name; module-level, so that torch.compile can substitute it."""
    return targets.load("breccia.api:cast_pair_and_record")(x, recipe, amaxes, scale, **options)
