"""One of two processes that train the same model on half of each batch: `two_ranks.py RANK WRAPPER RECIPE FOLDER`.

They meet through a file in FOLDER, and write `rank<RANK>.pt` there: what the tests compare with one process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from two_layers import WIDTH, Model, made

import breccia_torch

ROWS, STEPS = 96, 3
WRAPPERS = ("ddp", "fsdp")


def half(step: int, rank: int) -> Tensor:
    """The rows of a rank; those of rank 1 are larger, so that amaxes differ."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank)) * (1 + step + rank)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    return (model(half(step, rank)) - 1).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def full(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Copies of tensors, each of DTensors whole."""
    return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone() for name, v in tensors.items()}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, shared: bool) -> list[dict[str, Tensor]]:
    """The gradients of each step. shared: the ranks have one history of amaxes."""
    gradients: list[dict[str, Tensor]] = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        gradients.append(full({name.removeprefix("module."): p.grad for name, p in model.named_parameters()}))
        if shared:
            breccia_torch.end_of_step(model)
        optimizer.step()
    return gradients


def wrapped(model: Model, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in (model.inner, model.outer):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def resumed(model: Model, optimizer: Any, wrapper: str, recipe: str, folder: Path, rank: int) -> bool:
    """Whether a run that is saved and loaded by torch.distributed.checkpoint has the bits of one that goes on."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    saved, saved_optimizer = get_state_dict(model, optimizer)
    checkpoint.save({"model": saved, "optimizer": saved_optimizer}, checkpoint_id=folder / "checkpoint")
    on = train(model, optimizer, range(STEPS, STEPS + 2), rank, True)
    other = wrapped(made(recipe), wrapper)
    other_optimizer = optimizer_of(other)
    state, state_optimizer = get_state_dict(other, other_optimizer)
    checkpoint.load({"model": state, "optimizer": state_optimizer}, checkpoint_id=folder / "checkpoint")
    set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=state_optimizer)
    again = train(other, other_optimizer, range(STEPS, STEPS + 2), rank, True)
    return all(torch.equal(a[name], b[name]) for a, b in zip(on, again, strict=True) for name in a)


def main(rank: int, wrapper: str, recipe: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    inner = made(recipe)
    model = wrapped(inner, wrapper)
    optimizer = optimizer_of(model)
    gradients = train(model, optimizer, range(STEPS), rank, True)
    found = {"gradients": gradients, "state": full(inner.state_dict())}
    found["resumed"] = resumed(model, optimizer, wrapper, recipe, folder, rank)  # type: ignore[arg-type]
    own = wrapped(made(recipe), wrapper)
    train(own, optimizer_of(own), range(STEPS), rank, False)
    found["own"] = {name: v.clone() for name, v in own.state_dict().items() if ".state." in name}
    torch.save(found, folder / f"rank{rank}.pt")
    dist.barrier()  # a rank that leaves earlier closes the other's connection


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    # Threads of gloo may still release tensors, for which they need the GIL. CPython ends a thread that asks for it while the
    # interpreter shuts down, and C++ then ends the process with SIGABRT.
    sys.stdout.flush()
    os._exit(0)
