"""The Triton kernel that ends training steps: the bits of torch's operations, in Triton's interpreter or on a GPU."""

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


def buffers(layers: int, length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    for n in range(layers):
        yield bits([[0.0] * length] * 3), bits([9.0] * 3), bits([PENDING[(n + 2 * t) % len(PENDING)] for t in range(3)])


@pytest.mark.parametrize("case", DELAYED)
def test_the_kernel_ends_steps_bit_for_bit(case: str) -> None:
    given, layers = DELAYED[case], 3
    delayed = tuple(given.items())
    length = max(recipe.amax_history_len for recipe in given.values())
    end: Any = steps.ender([given.get(tensor) for tensor in ("input", "weight", "gradient")], length, torch.device(DEVICE))
    mine, other = ([list(of) for of in zip(*buffers(layers, length), strict=True)] for _ in range(2))
    scales: set[int] = set()
    for step in range(length + 3):
        before = [buffer._version for buffer in mine[0]]
        assert end(*mine)
        assert all(buffer._version > version for buffer, version in zip(mine[0], before, strict=True))
        state.end_histories(other[0], other[1], other[2], delayed)
        assert all(torch.equal(a, b) for lists in zip(mine, other, strict=True) for a, b in zip(*lists, strict=True)), step
        for layer, (pending, same) in enumerate(zip(mine[2], other[2], strict=True)):
            assert not pending.any()
            values = bits([torch.inf if step == length else PENDING[(layer + step + t) % len(PENDING)] / 3 for t in range(3)])
            pending.copy_(values)
            same.copy_(values)
        scales |= {int(scale) for layer in mine[1] for scale in layer}
    assert len(scales) >= 4


def test_what_the_kernel_cannot_write_is_left_to_torch() -> None:
    end: Any = steps.ender([E4M3, None, None], 3, torch.device(DEVICE))
    amaxes, scales, pending = next(buffers(1, 3))
    strided = amaxes.T.contiguous().T
    assert not end([strided], [scales], [pending])
    assert pending.any()


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
    end = steps.Ender.__call__

    def noted(self: steps.Ender, *lists: Any) -> bool:
        ends.append(end(self, *lists))
        return ends[-1]

    def refuses(*_: Any) -> bool:
        return False

    monkeypatch.setattr(steps.Ender, "__call__", noted)
    mine, graphs = trained(False), trained(True)
    assert ends == [True] * 9
    monkeypatch.setattr(steps.Ender, "__call__", refuses)
    for other in (graphs, trained(False)):
        assert all(map(torch.equal, mine, other))
