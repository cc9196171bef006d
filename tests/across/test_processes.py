"""Calls that something disturbs: Ctrl-C, signal handlers, finalizers, forks, the end of the interpreter.

Each runs in a process of its own, which ends with all stacks where a call waits for ever.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fresh import printed
from paths import TESTS

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
#: JAX and MLX may be interrupted in their own code, which takes longer.
FRAMEWORKS = ["numpy", "torch"]
TORCH_LATER = ["numpy", pytest.param("torch", marks=pytest.mark.long)]
LATER = [pytest.param(framework, marks=pytest.mark.slow) for framework in ("jax", "mlx")]
#: More than any call has.
ALL = 1_000_000


def _disturbed(kind: str, framework: str, count: int) -> int:
    """How often the calls of a framework were disturbed, where about `count` was asked for."""
    script = (
        f"import runpy, sys; sys.argv[1:] = {[kind, framework, str(count)]}; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    tool = str(Path(TESTS, "tools", "disturbing.py"))
    return int(printed(f"import sys; sys.argv = [{tool!r}]; {script}", PYTHONWARNINGS="ignore").split()[-1])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.long
def test_calls_work_after_200_interrupts(framework: str) -> None:
    """One fault: a lock of concurrent.futures that the interrupted caller had taken, and for which all later casts waited."""
    assert _disturbed("interrupts", framework, 200) >= 150


@pytest.mark.slow
@pytest.mark.parametrize("framework", [*FRAMEWORKS, *LATER])
def test_calls_work_after_an_interrupt_at_any_moment(framework: str) -> None:
    assert _disturbed("interrupts", framework, ALL) >= 1500


@pytest.mark.long
@pytest.mark.parametrize("framework", [*TORCH_LATER, *LATER])
def test_calls_in_the_middle_of_calls_return_the_same_bytes(framework: str) -> None:
    """Such as those of signal handlers and finalizers. One fault: both wrote into the buffers of their thread."""
    assert _disturbed("nested", framework, 400) >= 200


@FORKS
@pytest.mark.parametrize("framework", TORCH_LATER)
@pytest.mark.long
def test_children_forked_in_the_middle_of_calls_return_the_same_bytes(framework: str) -> None:
    """Another thread has the locks of declarations, of the registry and of its table at the moment of some forks."""
    assert _disturbed("forks", framework, 60) >= 5  # how many depends on what else the machine does


@FORKS
@pytest.mark.parametrize(("framework", "make"), [("jax", "import jax.numpy as m"), ("mlx", "import mlx.core as m")])
def test_a_forked_child_refuses_arrays_of_frameworks_whose_threads_it_lacks(framework: str, make: str) -> None:
    """By themselves, the operations of both would never end."""
    assert printed(
        f"{make}\n"
        "import os, breccia\n"
        "x = m.ones((64, 64))\n"
        "st = breccia.cast(x, 'mxfp8').mT\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    for call in (lambda: breccia.cast(x, 'mxfp8'), lambda: breccia.matmul(x, st)):\n"
        "        try: call()\n"
        "        except breccia.UnsupportedError as e: print(str(e).partition(' in a ')[2], flush=True)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "breccia.cast(x, 'mxfp8')",
        PYTHONWARNINGS="ignore",
    ) == 2 * (
        f"process that was forked after {framework} had started its threads, which do not exist here: the operation would "
        "never end. Start processes by the method 'spawn' or 'forkserver' of multiprocessing, or pass NumPy arrays.\n"
    )


@pytest.mark.long
@pytest.mark.parametrize("prefer", ["numpy.cast", None])
@pytest.mark.parametrize("beside", [True, False])
def test_calls_at_the_end_of_the_interpreter_work(beside: bool, prefer: str | None) -> None:
    """In functions of atexit, in threads that the interpreter waits for, and in finalizers of modules.

    beside: a daemon thread casts meanwhile. It keeps what modules refer to alive, so that no finalizer is called.
    """
    assert printed(
        "import atexit, threading, time, numpy as np, breccia\n"
        "breccia.set_num_threads(3)\n"
        "x = np.ones((1024, 1024), np.float32)\n"
        f"def cast(cast=breccia.cast): return cast(x, 'mxfp8', prefer={prefer!r}).data.tobytes()\n"
        "expected = cast()\n"
        "class Last:\n"
        "    def __init__(self): self.cast, self.expected, self.print = cast, expected, print\n"
        "    def __del__(self): self.print('finalizer', self.cast() == self.expected, flush=True)\n"
        "def forever():\n"
        "    while True: cast()\n"
        "def late():\n"
        "    time.sleep(0.2)\n"
        "    print('thread', cast() == expected, flush=True)\n"
        f"if {beside}: threading.Thread(target=forever, daemon=True).start()\n"
        "threading.Thread(target=late).start()\n"
        "atexit.register(lambda: print('atexit', cast() == expected, flush=True))\n"
        "breccia.kept = Last()"
    ) == "thread True\natexit True\n" + ("" if beside else "finalizer True\n")  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="this system has no interval timer")
def test_a_signal_handler_casts_while_its_thread_casts() -> None:
    assert printed(
        "import signal, numpy as np, breccia\n"
        "breccia.set_num_threads(2)\n"
        "x, y = np.random.default_rng(0).standard_normal((2, 512, 1024), np.float32)\n"
        "def cast(a): return breccia.cast(a, 'nvfp4', prefer='numpy.cast').digest()\n"
        "expected, found = (cast(x), cast(y)), []\n"
        "signal.signal(signal.SIGALRM, lambda *_: found.append(cast(y) == expected[1]))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)\n"
        "while len(found) < 20: assert cast(x) == expected[0]\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "print(all(found))"
    ) == "True\n"  # fmt: skip
