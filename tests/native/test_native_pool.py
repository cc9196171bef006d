"""The threads of the compiled kernels: shared work, callers at once, forks, and the end of the interpreter."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fresh import printed

import breccia
from breccia.arrays.frameworks import Device
from breccia.kernels import threads
from breccia_native import availability

pool = pytest.importorskip("breccia_native.pool", reason="breccia-native was built without POSIX threads")
if reason := availability.missing_products(Device("cpu")):
    pytest.skip(reason, allow_module_level=True)

SUM = sum(range(100_000))
#: Begin programs: in which the pool has threads of its own, and in which torch lends it three.
OWN = "from breccia_native import pool\n"
LENT = f"import torch, breccia_torch.cpu\ntorch.set_num_threads(3)\n{OWN}"


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """Threads of the pool work, also where torch was imported by another test and lends its own."""
    pool.borrow(0, 0)
    yield
    if cpu := sys.modules.get("breccia_torch.cpu"):
        cpu.lend_threads()


@pytest.mark.parametrize("number", [-1, 0, 1, 2, 3, 8, 1000])
def test_threads_take_each_part_of_the_work_once(number: int) -> None:
    for _ in range(20):
        found, callers = pool.add(100_000, number)
        assert found == SUM and 1 <= callers <= max(number, 1)
    assert pool.add(0, number)[0] == 0


def test_threads_that_slept_work_again() -> None:
    """Threads of the pool look for work for 50 microseconds and then sleep."""
    pool.add(1, 3)
    assert pool.size() >= 2
    deadline, seen = time.monotonic() + 60, 0
    while seen < 3 and time.monotonic() < deadline:
        time.sleep(0.002)
        found, callers = pool.add(1_000_000, 3)
        assert found == sum(range(1_000_000))
        seen = max(seen, callers)
    assert seen == 3


def test_many_callers_at_once_each_get_their_own_result() -> None:
    wrong: list[int] = []

    def call(number: int) -> None:
        for i in range(200):
            count = 1000 * number + i
            found, callers = pool.add(count, 4)
            if found != count * (count - 1) // 2 or not 1 <= callers <= 4:
                wrong.append(found)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_starts_threads_of_its_own() -> None:
    """Also where another thread of the parent has the pool at the moment of the fork."""
    assert printed(
        "import os, threading\n"
        "from breccia_native import pool\n"
        "pool.add(10, 3)\n"
        "other = threading.Thread(target=lambda: [pool.add(3_000_000, 3) for _ in range(20)])\n"
        "other.start()\n"
        "for _ in range(10):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        before = pool.size()\n"
        "        found = pool.add(100_000, 3)[0]\n"
        "        os._exit(0 if (before, pool.size(), found) == (0, 2, sum(range(100_000))) else 1)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "other.join()\n"
        "print('done')"
    ) == "done\n"  # fmt: skip


@pytest.mark.parametrize("begin", [OWN, LENT], ids=["own", "lent"])
def test_no_thread_is_left_when_the_interpreter_ends(begin: str) -> None:
    """A function of `atexit` may still use the pool, and a daemon thread may be using it."""
    if begin == LENT:
        pytest.importorskip("torch")
    assert printed(
        f"{begin}import atexit, threading\n"
        "def forever():\n"
        "    while True: pool.add(100_000, 3)\n"
        "threading.Thread(target=forever, daemon=True).start()\n"
        "atexit.register(lambda: print(pool.add(10, 3)[0]))\n"
        "pool.add(10, 3)"
    ) == "45\n"  # fmt: skip


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="this system does not list threads")
def test_one_thread_is_enough_for_a_limit_of_one() -> None:
    assert printed(
        "import os, numpy as np, breccia\n"
        "breccia.set_num_threads(1)\n"
        "st = breccia.cast(np.ones((2048, 1024), np.float32), 'int4')\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "breccia.matmul(np.ones((8, 1024), np.float32), st.mT)\n"
        "one = len(os.listdir('/proc/self/task'))\n"
        "breccia.set_num_threads(3)\n"
        "breccia.matmul(np.ones((8, 1024), np.float32), st.mT)\n"
        "print(one - before, len(os.listdir('/proc/self/task')) - before)"
    ) == "0 2\n"  # fmt: skip


def test_torch_lends_its_threads_where_they_are_enough() -> None:
    """Where torch may use fewer, and after addresses of 0, the pool starts its own. Each part of the work is done once."""
    pytest.importorskip("torch")
    assert printed(
        f"{LENT}sums = [pool.add(100_000, 3)[0] for _ in range(100)]\n"
        "print({*sums} == {sum(range(100_000))}, pool.size())\n"
        "print(pool.add(100_000, 4)[0] == sums[0], pool.size())\n"
        "torch.set_num_threads(1)\n"
        "pool.borrow(0, 0)\n"
        "print(pool.add(100_000, 5)[0] == sums[0], pool.size())"
    ) == "True 0\nTrue 3\nTrue 4\n"  # fmt: skip


def test_callers_at_once_and_callers_in_a_loop_of_torch_get_their_own_results() -> None:
    """One caller has the threads; the others work alone."""
    pytest.importorskip("torch")
    assert printed(
        f"{LENT}import threading\n"
        "found = []\n"
        "def call(number):\n"
        "    found.extend(pool.add(1000 * number + i, 3)[0] == sum(range(1000 * number + i)) for i in range(100))\n"
        "callers = [threading.Thread(target=call, args=(number,)) for number in range(6)]\n"
        "for caller in callers: caller.start()\n"
        "for _ in range(100): torch.ones(200_000).add_(1)\n"
        "for caller in callers: caller.join()\n"
        "print(len(found), all(found))"
    ) == "600 True\n"  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_not_use_threads_of_torch() -> None:
    """Those of OpenMP do not exist in the child, and a loop there would wait for them."""
    pytest.importorskip("torch")
    assert printed(
        f"{LENT}import os\n"
        "pool.add(100_000, 3)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    found = pool.add(100_000, 3)[0]\n"
        "    os._exit(0 if (found, pool.size()) == (sum(range(100_000)), 2) else 1)\n"
        "print(os.waitpid(child, 0)[1], pool.size())"
    ) == "0 0\n"  # fmt: skip


def test_a_failing_loop_leaves_the_work_to_the_pool() -> None:
    """The types of the functions are those that pool.c names."""
    loop_type = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * 3, ctypes.c_void_p, ctypes.c_void_p)
    threads_type = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(ctypes.c_uint32))
    calls: list[tuple[int, int, int]] = []

    @loop_type
    def fails(first: int, end: int, grain: int, part: int, context: int) -> int:
        calls.append((first, end, grain))
        return 1

    @threads_type
    def eight(number: Any) -> int:
        number[0] = 8
        return 0

    @threads_type
    def unknown(number: Any) -> int:
        return 1

    loop, number, failing = (ctypes.cast(f, ctypes.c_void_p).value for f in (fails, eight, unknown))
    assert loop and number and failing
    pool.borrow(loop, number)
    assert pool.add(100_000, 3)[0] == SUM and calls == [(0, 3, 1)]
    pool.borrow(loop, failing)
    assert pool.add(100_000, 3)[0] == SUM and len(calls) == 1
    with pytest.raises(TypeError, match="borrow"):
        pool.borrow(loop)  # type: ignore[call-arg]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "recipe", ["nvfp4", "int4,symmetric=False,signed=False", "mxfp6", "fp8_block,block_m=128", "fp8_current"]
)
@pytest.mark.parametrize("shape", [(300, 777), (3, 40_000), (20_000, 33), (2, 150, 544)])
def test_bytes_of_dequantize_do_not_depend_on_the_number_of_threads(shape: tuple[int, ...], recipe: str, dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    st = breccia.cast(x, recipe)
    expected = breccia.dequantize(st, out_dtype=dtype, prefer="reference.dequantize")
    before = threads.get_num_threads()
    try:
        for number in (1, 2, 3):
            breccia.set_num_threads(number)
            found = breccia.dequantize(st, out_dtype=dtype, prefer="native.dequantize")
            assert found.dtype == expected.dtype and found.tobytes() == expected.tobytes()
    finally:
        breccia.set_num_threads(before)
