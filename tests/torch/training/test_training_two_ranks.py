"""Converted layers under DistributedDataParallel and fully_shard: two processes, against one that accumulates both halves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

import two_ranks
from two_layers import made

pytestmark = pytest.mark.long
#: One without a state, and one whose histories are to be shared.
RECIPES = ("fp8_block", "fp8_delayed")


def run(wrapper: str, recipe: str, folder: Path) -> list[dict[str, Any]]:
    """What the two ranks wrote."""
    words = [wrapper, recipe, str(folder)]
    ranks = [
        subprocess.Popen(
            [sys.executable, two_ranks.__file__, str(rank), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def alone(recipe: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The gradients of each step and the last state of one process that adds both halves' gradients and halves the sum."""
    model = made(recipe)
    optimizer, gradients = two_ranks.optimizer_of(model), list[dict[str, Any]]()
    for step in range(two_ranks.STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            two_ranks.loss_of(model, step, rank).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return gradients, model.state_dict()


@pytest.mark.parametrize("wrapper", two_ranks.WRAPPERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_train_as_one_that_accumulates(wrapper: str, recipe: str, tmp_path: Path) -> None:
    """Bit by bit: gradients are halved, which is exact, and the sum of two numbers has one order.

    Delayed scaling: a step's amax is the largest of the passes of one process, and of the ranks after `end_of_step`."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ranks, (gradients, state) = run(wrapper, recipe, tmp_path), alone(recipe)
    finally:
        torch.set_num_threads(before)
    for rank in ranks:
        assert len(rank["gradients"]) == len(gradients)
        for found, expected in zip(rank["gradients"], gradients, strict=True):
            assert {name: torch.equal(found[name], expected[name]) for name in expected} == dict.fromkeys(expected, True)
        assert {name: torch.equal(rank["state"][name], state[name]) for name in state} == dict.fromkeys(state, True)
        assert rank["resumed"]


def test_without_end_of_step_each_rank_has_the_history_of_its_own_rows(tmp_path: Path) -> None:
    first, second = (rank["own"] for rank in run("ddp", "fp8_delayed", tmp_path))
    amaxes = [state["module.inner.state.amaxes"].view(torch.float32) for state in (first, second)]
    for rank, of_rank in enumerate(amaxes):
        inputs = [two_ranks.half(step, rank).abs().max().item() for step in range(two_ranks.STEPS)]
        assert of_rank[0, -two_ranks.STEPS :].tolist() == inputs
    assert torch.equal(amaxes[0][1], amaxes[1][1])  # of the weight, which they share
