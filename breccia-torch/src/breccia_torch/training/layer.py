"""What layers in training share, and the end of a step for a whole model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from breccia import BrecciaError, TrainingRecipe, UnsupportedError

from ..operators import text_of
from ..ops import opaque
from . import state as steps
from .operands import Context
from .state import StepState


class TrainingLayer(nn.Module):
    """What layers in training share: a recipe, a state, and a name for errors.

    state: a `StepState` for recipes with delayed scaling or stochastic rounding; None for others, whose `state_dict` is that of
        the plain layer.
    """

    weight: nn.Parameter
    recipe: TrainingRecipe
    #: What compilers are told of the recipe.
    recipe_text: str
    state: StepState | None
    #: The name of the layer in its model.
    name: str = ""

    def begin(self, recipe: TrainingRecipe | str, seed: int | None = None, name: str = "") -> None:
        """Take the recipe, and a state if it needs one. seed: of random numbers; by default torch's generator draws one."""
        self.recipe, self.name, self.state = TrainingRecipe.of(recipe), name, None
        self.recipe_text = text_of(self.recipe)
        if self.recipe.delayed or self.recipe.stochastic:
            if seed is None:
                seed = int(torch.randint(1 << 62, ())) if self.recipe.stochastic else 0
            self.state = StepState(self.recipe, seed, self.weight.device)
            steps.layers.add(self)

    def end(self) -> None:
        """Undo `begin`: drop the recipe and the state."""
        steps.layers.discard(self)
        for name in ("recipe", "recipe_text", "name", "state"):
            delattr(self, name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.state is not None:
            steps.layers.add(self)

    @property
    def context(self) -> Context:
        return Context(self.recipe, *(() if self.state is None else self.state.tensors()))

    def check_plain(self, x: Tensor) -> None:
        """Raise UnsupportedError for tensors without memory of their own, such as DTensors."""
        kind = opaque(x, self.weight)
        if kind is not None:
            raise UnsupportedError(
                f"a layer in training multiplies plain tensors, and its input or weight is {kind}. Data parallelism "
                "(DistributedDataParallel, fully_shard) gives it plain ones; tensor parallelism is not supported."
            )

    def failed(self, e: BrecciaError) -> BrecciaError:
        """The error with the layer's name before it."""
        return type(e)(f"{self.name or type(self).__name__}: {e}", **e.found)


def end_of_step(model: nn.Module, group: Any = None, *, taken: bool = True) -> None:
    """End a step of training for the layers of `model`: for loops without an optimizer of torch.optim, and for several ranks.

    Call it after the backward passes of a step. Amax histories get the step's amaxes, random numbers change, and weights are
    cast anew. Optimizers of torch.optim do this at their step, for the layers whose weights they have.
    With `torch.distributed`, all ranks of `group` (default: all) call it, and one all-reduce gives each the largest amaxes of
    all: call it before `optimizer.step()`, which then finds nothing left to do.

    taken: False for a step that is skipped, since gradients overflowed, say: what its passes recorded is forgotten, and
        training goes on as if they had not been.

    Raises UnsupportedError if the model has no layer in training.

        >>> import torch, breccia_torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> _ = breccia_torch.convert_to_training_(model, "fp8_delayed")
        >>> model(torch.randn(32, 64)).sum().backward()
        >>> breccia_torch.end_of_step(model)
        >>> model[0].state.draws[1]
        tensor(1)
    """
    found = [layer for layer in model.modules() if isinstance(layer, TrainingLayer)]
    if not found:
        raise UnsupportedError(
            f"end_of_step: {type(model).__name__} has no layer in training; breccia_torch.convert_to_training_(model, recipe) "
            "makes them."
        )
    steps.end_generation()
    states = [layer.state for layer in found if isinstance(layer.state, StepState)]
    if not taken:
        steps.forget(states)
        return
    pending = [state.pending for state in states if state.pending is not None]
    if pending and torch.distributed.is_available() and torch.distributed.is_initialized():
        largest = torch.stack(pending)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
        for mine, of_all in zip(pending, largest, strict=True):
            mine.copy_(of_all)
    steps.advance(states)
