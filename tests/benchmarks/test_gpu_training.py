"""bench_gpu_training: what counts as the peak of a step, and the goals, from results alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import bench_gpu_training
from bench_gpu_training import BF16, GOALS, goals, of_te, peak_of


class Memory:
    """Counts bytes as torch.cuda does."""

    def __init__(self, allocated: int) -> None:
        self.allocated = self.peak = allocated

    def take(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)

    def memory_allocated(self) -> int:
        return self.allocated

    def max_memory_allocated(self) -> int:
        return self.peak

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.allocated

    def synchronize(self) -> None: ...


class Leaf:
    """A tensor whose gradient takes as many bytes as itself."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self.memory, self.nbytes, self._grad = memory, nbytes, 0
        memory.take(nbytes)

    @property
    def grad(self) -> Any:
        return self._grad or None

    @grad.setter
    def grad(self, nbytes: int | None) -> None:
        self.memory.take((nbytes or 0) - self._grad)
        self._grad = nbytes or 0


def test_the_peak_of_a_step_is_what_it_takes_beside_its_leaves_with_what_the_layer_keeps() -> None:
    memory = Memory(5000)  # other arms
    x = Leaf(memory, 100)
    x.grad = 100  # of the arm before
    output, kept, weight_bytes = 70, 30, 400

    def make() -> tuple[Any, Any]:
        weight, codes = Leaf(memory, weight_bytes), SimpleNamespace(nbytes=0)

        def call() -> None:
            x.grad = weight.grad = None
            memory.take(kept - codes.nbytes)
            codes.nbytes = kept
            memory.take(output)
            x.grad, weight.grad = x.nbytes, weight.nbytes
            memory.take(-output)

        return call, weight

    assert peak_of(make, x, memory) == output + kept + x.nbytes + weight_bytes
    assert memory.allocated == 5000 + x.nbytes + weight_bytes + kept  # no gradient is left to the next arm


def row(arm: str, shape: tuple[int, ...], seconds: float, peak: int | None) -> dict[str, Any]:
    """In one thread each takes 0.1 s less."""
    times = {"time": {"median_s": seconds}, "one_thread": {"median_s": seconds - 0.1}}
    return {"arm": arm, "shape": list(shape), "peak_beside_bytes": peak, **times}


def lines(rows: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[str, ...]]:
    return {(work, asked): tuple(rest) for work, asked, *rest in goals({"rows": rows}).rows}


def test_goals_name_the_worst_shape_and_what_is_not_measured() -> None:
    large, small = (64, 32, 16), (8, 32, 16)
    rows = [row(BF16, large, 2.0, 100), row("fp8_tile", large, 1.0, 90), row(of_te("fp8_block"), large, 1.5, None)]
    rows += [row(BF16, small, 1.0, 10), row("fp8_tile", small, 1.25, 12)]
    found = lines(rows)
    assert found["fp8_tile", "≥ 1.50 × BF16"] == ("0.80 to 2.00", "8×32×16", "1 of 2")
    assert found["fp8_tile", "≥ 1.18 × TransformerEngine"] == ("1.50", "64×32×16", "1 of 1; 1 not measured")
    assert found["fp8_tile, in one thread", "≥ 1.50 × BF16"] == ("0.78 to 2.11", "8×32×16", "1 of 2")
    assert found["fp8_current", "≥ 1.50 × BF16"] == ("not measured", "-", "-")
    presets = sum(preset.startswith("fp8") for preset in (*bench_gpu_training.PRESETS, *bench_gpu_training.FAST))
    missing = f"; {2 * presets - 2} not measured"
    assert found["every FP8 recipe", "≥ 0.97 × BF16, everywhere"] == ("0.80 to 2.00", "fp8_tile 8×32×16", f"1 of 2{missing}")
    assert found["peak memory of every FP8 recipe", "≤ 1.00 × BF16's"] == (
        "0.90 to 1.20",
        "fp8_tile 8×32×16",
        f"1 of 2{missing}",
    )
    each = 1 + sum(goal is not None for pair in GOALS.values() for goal in (*pair, 1.0))  # 1.0: torchao
    assert len(found) == 1 + 2 * each


def test_peaks_that_counted_gradients_of_the_step_before_are_not_shown() -> None:
    old = [{"arm": arm, "shape": [8, 32, 16], "time": {"median_s": 1.0}, "peak_bytes": 67} for arm in (BF16, "fp8_tile")]
    assert lines(old)["peak memory of every FP8 recipe", "≤ 1.00 × BF16's"] == ("not measured", "-", "-")
    result = {"rows": old, "options": {"samples": 1}, "rivals": {}}
    assert [line[-1] for line in bench_gpu_training.times(result).rows] == ["-", "-"]
