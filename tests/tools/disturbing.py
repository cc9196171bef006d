"""Something that happens in the middle of a call, wherever Python looks for signals: an interrupt, another call, a fork.

Python looks for signals when a function begins and when a function written in C has returned. `sys.setprofile` reports these
moments, so each of them can be tried once, without chance.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

import breccia


def disturbed(call: Callable[[], Any], moment: int, disturbance: Callable[[], None]) -> Any:
    """The result of `call`, in which `disturbance` is called at moment number `moment`."""
    seen = 0

    def watch(frame: Any, event: str, arg: Any) -> None:
        nonlocal seen
        if event in ("call", "c_return"):
            seen += 1
            if seen == moment:
                sys.setprofile(None)
                disturbance()

    sys.setprofile(watch)
    try:
        return call()
    finally:
        sys.setprofile(None)


def moments(call: Callable[[], Any]) -> int:
    """How many moments a call has."""
    count = 0

    def watch(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_return")

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def interrupt() -> None:
    """What a signal handler does at Ctrl-C."""
    signal.default_int_handler(signal.SIGINT, None)


def calls(framework: str) -> dict[str, Callable[[], bytes]]:
    """Calls of several ops on arrays of a framework; each returns the bytes of its result."""
    x = np.random.default_rng(0).standard_normal((640, 1024), np.float32)
    if framework == "torch":
        import torch

        a: Any = torch.from_numpy(x)
    elif framework == "jax":
        import jax.numpy as jnp

        a = jnp.asarray(x)
    elif framework == "mlx":
        import mlx.core as mx

        a = mx.array(x)
    else:
        a = x
    st = breccia.cast(a, "nvfp4")
    few = a[:3]

    def prefer(op: str) -> str | None:  # pools of both: threads in Python, and in C
        return f"numpy.{op}" if framework == "numpy" else None

    return {
        "cast": lambda: digest(breccia.cast(a, "mxfp8")),
        "cast in Python's threads": lambda: digest(breccia.cast(a, "mxfp8", prefer=prefer("cast"))),
        "columns": lambda: digest(breccia.cast(a, "int4", axis=-2)),
        "dequantize": lambda: np.asarray(breccia.dequantize(st, prefer=prefer("dequantize"))).tobytes(),
        "matmul": lambda: np.asarray(breccia.matmul(few, st.mT)).tobytes(),
        "requantize": lambda: digest(breccia.requantize(st, breccia.MXFP8BlockScaling())),
    }


def digest(st: breccia.ScaledTensor) -> bytes:
    """The fingerprint of a tensor."""
    return st.digest().encode()


def each(named: dict[str, Callable[[], bytes]], count: int) -> Iterator[tuple[str, int]]:
    """(call, moment) for about `count` moments of all calls together, at equal distances; for all where `count` is more."""
    lengths = {name: moments(call) for name, call in named.items()}
    step = max(sum(lengths.values()) / count, 1.0)
    places = [(name, moment) for name, length in lengths.items() for moment in range(1, length + 1)]
    return (places[int(i * step)] for i in range(int(len(places) / step)))


def interrupts(framework: str, count: int) -> int:
    """Interrupt calls at about `count` moments; this thread and another one call again. Returns how many were interrupted."""
    named, done = calls(framework), 0
    expected = {name: call() for name, call in named.items()}
    for name, moment in each(named, count):
        try:
            disturbed(named[name], moment, interrupt)
        except KeyboardInterrupt:
            done += 1
        need_equal(named[name](), expected[name], name, moment)
        with ThreadPoolExecutor(1) as other:
            need_equal(other.submit(named[name]).result(), expected[name], name, moment)
    return done


def nested(framework: str, count: int) -> int:
    """Run other calls in the middle of calls, as signal handlers and finalizers do. Returns how many were run."""
    named, done = calls(framework), 0
    expected = {name: call() for name, call in named.items()}

    def inner(name: str) -> None:
        nonlocal done
        done += 1
        need_equal(named[name](), expected[name], name, 0)

    for (name, moment), inside in zip(each(named, count), cycle(named), strict=False):
        found = disturbed(named[name], moment, partial(inner, inside))
        need_equal(found, expected[name], name, moment)
    return done


def forks(framework: str, count: int) -> int:
    """Fork in the middle of calls, while another thread makes declarations and registries. Returns how many forks."""
    named, done = calls(framework), 0
    expected = {name: call() for name, call in named.items()}
    stopped = threading.Event()

    def busy() -> None:
        from breccia.dispatch.registry import reload

        n = 0
        while not stopped.is_set():
            n += 1
            breccia.cast(np.ones((2, 64), np.float32), breccia.INT4Scaling(group_size=2 + 2 * (n % 30)))
            if n % 100 == 0:
                reload()

    def fork(name: str, moment: int) -> None:
        nonlocal done
        child = os.fork()
        if child == 0:
            signal.alarm(15)
            os._exit(0 if named[name]() == expected[name] else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            raise AssertionError(f"a child forked at moment {moment} ended with {code} in {name}")
        done += 1

    other = threading.Thread(target=busy)
    other.start()
    try:
        for (name, moment), inside in zip(each(named, count), cycle(named), strict=False):
            found = disturbed(named[name], moment, partial(fork, inside, moment))
            need_equal(found, expected[name], name, moment)
    finally:
        stopped.set()
        other.join()
    return done


def need_equal(found: bytes, expected: bytes, name: str, moment: int) -> None:
    if found != expected:
        raise AssertionError(f"{name}, disturbed at moment {moment}, returned other bytes")


if __name__ == "__main__":
    kind, library, number = sys.argv[1:]
    # Where a call waits for ever, the stacks of all threads are written; this holds in children too.
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(300)
    breccia.set_num_threads(3)
    print({"interrupts": interrupts, "nested": nested, "forks": forks}[kind](library, int(number)))
