"""What the benchmarks share: where and when a figure was measured, how a call is timed, how good a result is, files."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
ROOT = HERE.parent

#: Of the JSON files; a change that draw.py cannot read raises it.
SCHEMA = 1

_LIBRARIES = ("breccia-core", "numpy", "ml_dtypes")
#: Where something lies on this machine says nothing about the figures.
_FOLDERS = ("BRECCIA_GGML",)
_STEERING = ("BRECCIA_", "OMP_", "OPENBLAS_", "MKL_", "NUMPY_", "MALLOC_")


# ------------------------------------------------------------------------------------------------ where and when


def cpu_model() -> str:
    """The processor as the operating system names it, else the architecture; on x86-64 also whether AVX2 is all it has."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        text = cpuinfo.read_text(encoding="utf-8")
        model, flags = (re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE) for key in ("model name", "flags"))
        has = flags[1].split() if flags else []
        return (model[1] if model else platform.machine()) + (", AVX2" if "avx2" in has and "avx512f" not in has else "")
    if sys.platform == "darwin":
        return output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine()


def cores() -> int:
    """How many cores this process may use; a container or `taskset` can allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_tag() -> str:
    """Processor and cores as a part of a file name."""
    words = re.sub(r"\((r|tm)\)|processor|cpu", " ", f"{cpu_model()} {platform.machine()}".lower())
    return "-".join([*re.findall(r"[a-z0-9]+", words), f"{cores()}c"])


def device_tag(device: str) -> str:
    """The name of an accelerator, without what follows a comma, as a part of a file name; empty for none."""
    return "-".join(re.findall(r"[a-z0-9]+", device.partition(",")[0].lower()))


def provenance() -> dict[str, Any]:
    """What a reader must know to rerun the figures, or to doubt them."""
    options = [a for a in sys.argv[1:]]
    if "--out" in options:  # a folder of the one who ran it says nothing about the figures
        at = options.index("--out")
        del options[at : at + 2]
    return {
        "date_utc": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "cpu": cpu_model(),
        "cores": cores(),
        "load_1m": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _LIBRARIES},
        "commit": output("git", "rev-parse", "HEAD") or None,
        "modified": bool(output("git", "status", "--porcelain", "--", *sorted(p.name for p in ROOT.glob("breccia-*")))),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_STEERING) and k not in _FOLDERS},
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *options]),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def output(*command: str) -> str:
    """What the command prints, or nothing where it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


# ------------------------------------------------------------------------------------------------ time


def timed(call: Callable[[], object], runs: int, warm_up: int = 1) -> dict[str, Any]:
    """Seconds of `runs` calls after `warm_up` uncounted ones. Every result is freed before the next call."""
    for _ in range(warm_up):
        call()
    seconds: list[float] = []
    for _ in range(runs):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
        del result
    return summary(seconds)


def swept(calls: Sequence[Callable[[], object]], runs: int, at_least_s: float) -> list[dict[str, Any]]:
    """Times of several calls, taken in turns, so that a machine that slows down for a while slows all of them.

    Each turn makes every call once uncounted and once counted. Turns go on until there are `runs` of them and `at_least_s`
    seconds have passed.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    until = time.perf_counter() + at_least_s
    while len(seconds[0]) < runs or time.perf_counter() < until:
        for call, taken in zip(calls, seconds, strict=True):
            taken += timed(call, 1)["seconds"]
    return [summary(taken) for taken in seconds]


def timed_often(call: Callable[[], object], runs: int, at_least_s: float = 0.02) -> dict[str, Any]:
    """Seconds per call of a call too short to be timed singly: `runs` loops of `at_least_s` each."""
    timer, calls = timeit.Timer(call), 1
    while (spent := timer.timeit(calls)) < at_least_s:
        calls = max(2 * calls, int(calls * at_least_s / max(spent, 1e-9)))
    return {**summary([s / calls for s in timer.repeat(runs, calls)]), "calls": calls}


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Every run, and their min, median and max."""
    seconds = [round(s, 10) for s in seconds]
    least, median, most = min(seconds), statistics.median(seconds), max(seconds)
    return {"runs": len(seconds), "min_s": least, "median_s": median, "max_s": most, "seconds": seconds}


# ------------------------------------------------------------------------------------------------ quality


class Quality:
    """Cosine, SQNR and largest error of what was decoded against what was cast, over one or more arrays, in FP64."""

    def __init__(self) -> None:
        self.signal = self.decoded = self.product = self.noise = self.error = self.amax = 0.0

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        a, b = x.astype(np.float64).ravel(), y.astype(np.float64).ravel()
        d = a - b
        self._add(float(a @ a), float(b @ b), float(a @ b), float(d @ d), float(np.abs(d).max()), float(np.abs(a).max()))

    def merge(self, other: Quality) -> None:
        """Add the arrays that `other` has seen."""
        self._add(other.signal, other.decoded, other.product, other.noise, other.error, other.amax)

    def _add(self, signal: float, decoded: float, product: float, noise: float, error: float, amax: float) -> None:
        self.signal += signal
        self.decoded += decoded
        self.product += product
        self.noise += noise
        self.error, self.amax = max(self.error, error), max(self.amax, amax)

    @property
    def sqnr_db(self) -> float:
        return float(10 * np.log10(self.signal / self.noise)) if self.noise else float("inf")

    @property
    def cosine(self) -> float:
        """0 where nothing but zeros was decoded."""
        return self.product / float(np.sqrt(self.signal * self.decoded)) if self.decoded else 0.0

    @property
    def max_error(self) -> float:
        """The largest |x - y| as a part of the largest |x|."""
        return self.error / self.amax


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Standard normal FP32."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def recipes(names: Sequence[str]) -> list[Any]:
    """The default instance of every registered recipe, or of those named. Exits on an unknown name."""
    import breccia  # here, since rivals.py imports this module where `breccia` is another package
    from breccia.dispatch.registry import registry

    try:
        return [breccia.recipe(name) for name in names or registry().recipes]
    except breccia.UnknownNameError as e:
        sys.exit(f"--recipes: {e}")


# ------------------------------------------------------------------------------------------------ files


def child(script: str, *options: str, python_path: Path | None = None) -> Any:
    """What the script prints as JSON, in a process of its own; `python_path` goes before everything installed."""
    environment = dict(os.environ)
    if python_path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(python_path), environment.get("PYTHONPATH")]))
    command = [sys.executable, str(HERE / script), *options, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{script} {shlex.join(options)} failed with status {done.returncode}; its own message is above.")
    return json.loads(done.stdout)


def save(result: dict[str, Any], out: Path, tag: str = "") -> Path:
    """Write the result to `<out>/<benchmark>-<machine tag>.json`."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{result['benchmark']}-{tag or machine_tag()}.json"
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path
