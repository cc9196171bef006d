"""What a tensor holds in place of its components."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .tensor import ScaledTensor


class Held(Protocol):
    """What a tensor holds in place of its components; for frameworks that pass other arrays around."""

    @property
    def leaves(self) -> tuple[Any, ...]:
        """Arrays of the shapes of data, scale, zero_point and global_scale, in place of them."""
        ...

    @property
    def sources(self) -> tuple[Any, ...]:
        """One for each component: the component itself, or what it is made from. The first one has the shape of data."""
        ...

    @property
    def dtypes(self) -> tuple[str | None, ...]:
        """The names of the dtypes of components that may be other arrays than their leaves; None for the others."""
        ...

    @property
    def is_transposed(self) -> bool:
        """Whether the leaves are the transposes of the leaves in memory, which `transposed` gives back."""
        ...

    def replaces(self, n: int) -> bool:
        """Whether component `n` is another array than its leaf."""
        ...

    def component(self, n: int) -> Any:
        """Component `n`, made from its leaf."""
        ...

    def dtype(self, n: int) -> Any:
        """The dtype of component `n`."""
        ...

    def moved(self, leaves: tuple[Any, ...]) -> Held:
        """What a tensor with these leaves holds."""
        ...

    def transposed(self, leaves: tuple[Any, ...]) -> Held:
        """What the transposed tensor holds, whose leaves are `leaves`."""
        ...

    def run(self, structural: Callable[[ScaledTensor, Any], ScaledTensor], st: ScaledTensor, argument: Any) -> ScaledTensor:
        """`structural(st, argument)`, which a framework may compile."""
        ...
