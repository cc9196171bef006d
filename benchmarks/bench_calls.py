"""Time of small calls, where nearly all of it is Python: microseconds, and steps of a calibrated loop.

    python benchmarks/bench_calls.py [--before CHECKOUT] [--out benchmarks/results]

A step of the calibrated loop builds a key of four items and looks it up in a dictionary. A loop of steps is timed beside every
loop of calls: ratios can be compared between machines, and between moments of one machine whose clock or neighbours change;
microseconds cannot.
`--before` times a checkout of another version as well, in processes that are interleaved with those of this one.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import common
import tables
import typer

import breccia

RECIPES = ("fp8_current", "fp8_block", "mxfp8", "nvfp4", "int4")


def calls() -> dict[str, Callable[[], Any]]:
    """The calls, by what the table says of them."""
    import torch

    from breccia_torch.nn import ScaledLinear

    torch.set_num_threads(1)
    x = common.normal((16, 128), 0)
    t = torch.from_numpy(x)
    token, square = torch.randn(1, 128), torch.nn.Linear(128, 128)
    found: dict[str, Callable[[], Any]] = {}
    for name in RECIPES:
        recipe = breccia.recipe(name)
        a, b = breccia.cast(x, recipe), breccia.cast(t, recipe)
        found[f"cast 16×128, {name}, NumPy"] = lambda recipe=recipe: breccia.cast(x, recipe)
        found[f"cast 16×128, {name}, torch"] = lambda recipe=recipe: breccia.cast(t, recipe)
        found[f"dequantize 16×128, {name}, NumPy"] = lambda a=a: breccia.dequantize(a)
        found[f"dequantize 16×128, {name}, torch"] = lambda b=b: breccia.dequantize(b)
    weight = breccia.cast(t, breccia.recipe("mxfp8"))
    found[".mT, torch"] = lambda: weight.mT
    found["matmul 1×128 by 128×16, mxfp8, torch"] = lambda w=weight.mT: breccia.matmul(token, w)
    for name in ("fp8_block", "mxfp8", "nvfp4", "int4"):
        layer = ScaledLinear.from_linear(square, breccia.recipe(name))
        found[f"ScaledLinear 128×128 at M = 1, {name}"] = lambda layer=layer: layer(token)
    both = ScaledLinear.from_linear(square, breccia.recipe("mxfp8"), activation=breccia.recipe("mxfp8"))
    found["ScaledLinear 128×128 at M = 1, mxfp8 by mxfp8"] = lambda: both(token)
    found["torch.nn.Linear 128×128 at M = 1"] = lambda: square(token)
    found["torch F.linear 128×128 at M = 1"] = lambda: torch.nn.functional.linear(token, square.weight, square.bias)
    return found


def with_idle_kernels() -> dict[str, Callable[[], Any]]:
    """Calls of kernels that do nothing, from a plug-in: what breccia itself costs on every call, of any device.

    Nothing in a version that has no such table.
    """
    import torch

    from breccia.arrays import frameworks
    from breccia.dispatch.registry import Plugin, Registry, _installed

    if not hasattr(frameworks, "current"):
        return {}
    t, token, recipe = torch.zeros(16, 128), torch.randn(1, 128), breccia.recipe("mxfp8")
    st = breccia.cast(t, recipe)
    weight = st.mT
    IDLE.update(cast=st, dequantize=t, matmul=torch.zeros(1, 16))
    plugin = Plugin("idle", "idle", "1.0", "bench_calls")
    registry = Registry([*_installed(), (plugin, lambda: sys.modules[__name__])], {})

    frameworks.current = registry
    return {
        "cast, kernel that does nothing, torch": lambda: breccia.cast(t, recipe),
        "dequantize, kernel that does nothing, torch": lambda: breccia.dequantize(st),
        "matmul, kernel that does nothing, torch": lambda: breccia.matmul(token, weight),
    }


def with_idle_launches() -> dict[str, Callable[[], Any]]:
    """Casts by the kernels for CUDA on tensors of the CPU, which launch nothing: their cost on the host besides CUDA's own.

    Nothing without Triton, or in a version whose kernels are launched in another way.
    """
    if find_spec("triton") is None:
        return {}
    import torch

    from breccia.arrays import frameworks
    from breccia.dispatch.registry import Plugin, Registry, _installed
    from breccia_triton import cast, launch, operands
    from breccia_triton.plugin import breccia_kernels as declared

    if not hasattr(launch, "elsewhere"):
        return {}

    class Idle:
        def __init__(self, prepared: Any) -> None:
            self.run = "".format  # takes any arguments

    memory = launch._workspace(torch.device("cpu"))
    stand_ins = {"Launcher": Idle, "index_of": lambda device: 0, "elsewhere": bool, "stream_of": int, "INTERPRETED": False}
    for name, value in {**stand_ins, "workspace": lambda device, stream: memory}.items():
        setattr(cast, name, value)
    operands.INTERPRETED = False

    @breccia.hookimpl
    def breccia_kernels() -> Iterable[breccia.Kernel]:
        found = next(kernel for kernel in declared() if kernel.name == "triton.cast")
        yield replace(found, name="idle_launch.cast", device="cpu", available=None, rank=1)

    manifest = ModuleType("idle_launches")
    vars(manifest).update(api=1, breccia_kernels=breccia_kernels)
    others = [found for found in _installed() if found[0].name not in ("triton", "native")]
    plugin = Plugin("triton", "breccia-triton", "1.0", manifest.__name__)  # as breccia's own, whose results are not checked
    frameworks.current = Registry([*others, (plugin, lambda: manifest)], {})
    x = torch.zeros(64, 8192, dtype=torch.bfloat16)
    calls = {f"cast 64×8192, {name}, CUDA without its launches": breccia.recipe(name) for name in RECIPES}
    return {name: lambda recipe=recipe: breccia.cast(x, recipe) for name, recipe in calls.items()}


#: What the idle kernels give, by op.
IDLE: dict[str, Any] = {}
api = 1


def idle_cast(*arguments: Any) -> Any:
    return IDLE["cast"]


def idle_dequantize(*arguments: Any) -> Any:
    return IDLE["dequantize"]


def idle_matmul(*arguments: Any) -> Any:
    return IDLE["matmul"]


@breccia.hookimpl
def breccia_kernels() -> Iterable[breccia.Kernel]:
    for op in ("cast", "dequantize", "matmul"):
        yield breccia.Kernel(
            op, "torch", f"{__name__}:idle_{op}", f"idle.{op}", device="cpu", rank=1, score=f"{__name__}:score"
        )


def score(call: Any) -> float:
    """A kernel's usual questions."""
    return 1.0 if call.a.contiguous and call.a.shape[-1] % 16 == 0 and call.a.address_alignment >= 16 else 2.0


def step() -> Callable[[], int | None]:
    """One step of the calibrated loop."""
    lookup, number = {("cast", int, type(None), "numpy"): 1}, 0
    return lambda: lookup.get(("cast", type(number), type(None), "numpy"))


def measured() -> dict[str, tuple[float, float]]:
    """Of each call the least seconds, and how many steps it takes: the median of loops, each beside one of steps."""
    unit, found = step(), dict[str, tuple[float, float]]()
    for name, call in itertools.chain.from_iterable(make().items() for make in (calls, with_idle_kernels, with_idle_launches)):
        call()
        pairs = [(timeit.timeit(call, number=50) / 50, timeit.timeit(unit, number=5_000) / 5_000) for _ in range(21)]
        found[name] = min(s for s, _ in pairs), statistics.median(s / u for s, u in pairs)
    return found


def child(checkout: Path | None) -> dict[str, Any]:
    """What this script measures in a process of its own, with the packages of a checkout before those installed."""
    path = None if checkout is None else Path(os.pathsep.join(map(str, sorted(checkout.glob("breccia-*/src")))))
    return common.child(Path(__file__).name, "--one-round", python_path=path)


def main(
    before: Annotated[Path | None, typer.Option(help="A checkout of the version to compare with.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Processes of each version.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here.")] = None,
    one_round: Annotated[bool, typer.Option(hidden=True)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time small calls."""
    if one_round:
        print(json.dumps(measured()))
        return
    versions: dict[str, Path | None] = {"before": before.resolve()} if before is not None else {}
    versions["now"] = None
    rows: dict[str, dict[str, list[list[float]]]] = {}
    for _ in range(rounds):
        for version, checkout in versions.items():
            for name, pair in child(checkout).items():
                rows.setdefault(name, {}).setdefault(version, []).append(pair)
    found = [
        {
            "call": name,
            **{
                v: {**common.summary([s for s, _ in pairs]), "steps": round(statistics.median(steps for _, steps in pairs), 2)}
                for v, pairs in by_version.items()
            },
        }
        for name, by_version in rows.items()
    ]
    commit = ["git", "-C", str(before), "rev-parse", "HEAD"]
    options = {"before": None if before is None else subprocess.run(commit, capture_output=True, text=True).stdout.strip()}
    result: dict[str, Any] = {"benchmark": "overhead", "schema": common.SCHEMA, "provenance": common.provenance()}
    if before is not None:  # a folder of the one who ran it says nothing about the figures
        result["provenance"]["command"] = result["provenance"]["command"].replace(str(before), "CHECKOUT")
    tables.tell({**result, "options": options, "rows": found}, out, as_json)


if __name__ == "__main__":
    typer.run(main)
