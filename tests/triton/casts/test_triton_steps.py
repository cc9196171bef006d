"""The Triton kernels for histories in training: the bits of torch's operations, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from triton_casts import DEVICE, ON_GPU

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("breccia_triton")

import torch

from breccia import DelayedScaling, TrainingRecipe
from breccia_torch.nn import TrainingLinear
from breccia_torch.training import state
from breccia_triton.casts import steps
from breccia_triton.launch.cache import Remembered

pytestmark = [
    pytest.mark.covering(1, 1),
    *([pytest.mark.gpu] if ON_GPU else []),
    # The interpreter computes with NumPy, which warns of numbers that are not used.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

E4M3, E5M2 = DelayedScaling(amax_history_len=3), DelayedScaling(fp8_format="E5M2", amax_history_len=5, margin=2)
DELAYED = {
    "all": {"input": E4M3, "weight": E4M3, "gradient": E5M2},
    "input alone": {"input": DelayedScaling(amax_history_len=1)},
    "gradient alone": {"gradient": DelayedScaling(amax_history_len=6, scale_rule="te")},
    "other rules": {
        "input": DelayedScaling(amax_history_len=4, scale_rule="recip"),
        "weight": DelayedScaling(amax_history_len=2, margin=-3),
    },
}
#: Zero, a subnormal number, ordinary ones, the smallest and the largest normal number.
PENDING = (0.0, 1e-40, 0.37, 448.0, 1.1754943508222875e-38, 3.4028234663852886e38, 7.25)


def bits(numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32).view(torch.int32).to(DEVICE)


def buffers(layers: int, length: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Amaxes, scales, pending amaxes and draws of each layer."""
    for n in range(layers):
        newest = bits([PENDING[(n + 2 * t) % len(PENDING)] for t in range(3)])
        yield bits([[0.0] * length] * 3), bits([9.0] * 3), newest, torch.tensor([5, n], device=DEVICE)


@pytest.mark.parametrize("case", DELAYED)
def test_the_kernel_ends_steps_bit_for_bit(case: str) -> None:
    recipes, layers = DELAYED[case], 3
    delayed = tuple(recipes.items())
    length = max(recipe.amax_history_len for recipe in recipes.values())
    kernels: Any = steps.histories(
        [recipes.get(tensor) for tensor in ("input", "weight", "gradient")], length, torch.device(DEVICE)
    )
    mine, other = ([list(of) for of in zip(*buffers(layers, length), strict=True)] for _ in range(2))
    scales: set[int] = set()
    for step in range(length + 3):
        before = [buffer._version for buffer in mine[0]]
        assert kernels.end(*mine)
        assert all(buffer._version > version for buffer, version in zip(mine[0], before, strict=True))
        state.end_histories(*other, delayed)
        assert all(torch.equal(a, b) for lists in zip(mine, other, strict=True) for a, b in zip(*lists, strict=True)), step
        for layer, (pending, same) in enumerate(zip(mine[2], other[2], strict=True)):
            assert not pending.any()
            values = bits([torch.inf if step == length else PENDING[(layer + step + t) % len(PENDING)] / 3 for t in range(3)])
            pending.copy_(values)
            same.copy_(values)
        scales |= {int(scale) for layer in mine[1] for scale in layer}
    assert len(scales) >= 4


@pytest.mark.parametrize("tensors", [("weight",), ("input",), ("gradient",), ("input", "gradient")], ids="+".join)
def test_the_kernel_notes_amaxes_bit_for_bit(tensors: tuple[str, ...]) -> None:
    device = torch.device(DEVICE)
    recipe = TrainingRecipe("fp8_delayed")
    kernels: Any = steps.histories([recipe.delayed[tensor] for tensor in ("input", "weight", "gradient")], 16, device)
    mine, other = (TrainingLinear(32, 32, recipe=recipe, device=DEVICE) for _ in range(2))
    histories = [state._history_of(layer.context)._replace(kernels=of) for layer, of in ((mine, kernels), (other, None))]
    found: set[tuple[int, ...]] = set()
    for numbers in (
        (1.5, 2.5),
        (9.0, 7.0),
        (torch.inf, 30.0),
        (torch.nan, 1.0),
        (40.0, torch.nan),
        (1e-40, 0.5),
        (90.0, torch.inf),
    ):
        amaxes = {name: torch.tensor([value], device=DEVICE) for name, value in zip(tensors, numbers, strict=False)}
        for history in histories:
            history.pending.copy_(bits([2.0, 4.0, 8.0]))
            history.note(**amaxes)
        assert torch.equal(histories[0].pending, histories[1].pending), numbers
        found.add(tuple(histories[0].pending.tolist()))
    assert len(found) > 2


def test_what_the_kernel_cannot_write_is_left_to_torch() -> None:
    kernels: Any = steps.histories([E4M3, None, None], 3, torch.device(DEVICE))
    amaxes, scales, pending, draws = next(buffers(1, 3))
    strided = amaxes.T.contiguous().T
    assert not kernels.end([strided], [scales], [pending], [draws])
    assert pending.any() and draws.tolist() == [5, 0]


def test_a_graph_needs_a_step_before_it_and_keeps_the_addresses_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_captured", {})
    lists = [list(of) for of in zip(*buffers(2, 3), strict=True)]
    kernels: Any = steps.histories([E4M3, None, None], 3, torch.device(DEVICE))
    monkeypatch.setattr(steps, "is_captured", lambda of: True)
    assert not kernels.end(*lists) and not steps._captured
    assert [draws[1].item() for draws in lists[3]] == [0, 1]
    monkeypatch.setattr(steps, "is_captured", lambda of: False)
    assert kernels.end(*lists) and not steps._captured
    monkeypatch.setattr(steps, "is_captured", lambda of: True)
    assert kernels.end(*lists)
    assert [draws[1].item() for draws in lists[3]] == [2, 3]
    Remembered.forget()  # as when tuning begins
    ((places, _),) = steps._captured.values()
    assert places.tolist() == [buffer.data_ptr() for layer in zip(*lists, strict=True) for buffer in layer]


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_layers_on_a_gpu_end_their_steps_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a CUDA graph, whose replays have the bits of steps outside of it."""

    def trained(captured: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [TrainingLinear(64, 64, recipe=TrainingRecipe("fp8_delayed"), device="cuda", seed=n) for n in range(3)]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        x = torch.randn(32, 64, device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        for _ in range(2):
            step()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            step = graph.replay
        for _ in range(4):
            step()
        states: Any = [layer.state for layer in layers]
        return [*model.parameters(), *(of.amaxes for of in states), *(of.scales for of in states)]

    ends: list[bool] = []
    end = steps.Histories.end

    def noted(self: steps.Histories, *lists: Any) -> bool:
        ends.append(end(self, *lists))
        return ends[-1]

    def refuses(*_: Any) -> bool:
        return False

    monkeypatch.setattr(steps.Histories, "end", noted)
    mine, graphs = trained(False), trained(True)
    assert ends == [True] * 9
    monkeypatch.setattr(steps.Histories, "end", refuses)
    for other in (graphs, trained(False)):
        assert all(map(torch.equal, mine, other))
