"""The first launch of a Triton kernel, without a GPU: what is compiled is a stand-in."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from breccia_triton.launch import launcher  # noqa: E402


class Compiled:
    """As Triton's CompiledKernel: whoever reads `run` first loads the module, and the function's handle comes last."""

    packed_metadata = ()

    def __init__(self) -> None:
        self.function: Any = None
        self._run: Any = None

    @property
    def run(self) -> Any:
        if self._run is None:
            self._run = lambda *arguments: None
            time.sleep(0.05)
            self.function = 7
        return self._run


def test_threads_that_launch_a_kernel_first_wait_for_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, start = Compiled(), threading.Barrier(4)
    monkeypatch.setattr(launcher, "_modules", SimpleNamespace(get=lambda place: compiled))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launcher.Launcher, "_written_out", lambda self, run, fixed: fixed[0])

    def loaded(_: int) -> Any:
        each = object.__new__(launcher.Launcher)
        each.key = "key"
        start.wait(10)
        return each._loaded()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(loaded, range(4))) == [7] * 4
