"""Results: where and when a figure was measured, the files that hold them, and the union of several runs.

A result is a dictionary. "runs" has the provenance of each run, "options" what was asked for, and "rows" what was measured: a
row has fields that identify it, and measures by arm, such as `row["time"]["breccia"]`, a summary of seconds (see `timing`).
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from harness.timing import DRIFT

HERE = Path(__file__).parent.parent
ROOT = HERE.parent
#: Of the files; a change that draw.py cannot read raises it.
SCHEMA = 2

Result = dict[str, Any]
Row = dict[str, Any]

_LIBRARIES = ("breccia-core", "numpy", "ml_dtypes")
_STEERING = ("BRECCIA_", "OMP_", "OPENBLAS_", "MKL_", "NUMPY_", "MALLOC_")
#: Where something lies on this machine says nothing about the figures.
_FOLDERS = ("BRECCIA_GGML", "BRECCIA_LLAMA")


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


def tag_of(run: Mapping[str, Any]) -> str:
    """The device of a run, without what follows a comma, or else the processor and its cores, as a part of a file name."""
    if device := run.get("device", "").partition(",")[0]:
        return "-".join(re.findall(r"[a-z0-9]+", device.lower()))
    words = re.sub(r"\((r|tm)\)|processor|cpu", " ", f"{run['cpu']} {platform.machine()}".lower())
    return "-".join([*re.findall(r"[a-z0-9]+", words), f"{run['cores']}c"])


def provenance(libraries: Iterable[str] = (), **more: Any) -> dict[str, Any]:
    """What a reader must know to rerun the figures, or to doubt them. libraries: packages whose versions matter too."""
    options = sys.argv[1:]
    for name in ("--out", "--resume"):  # paths of the one who ran it say nothing about the figures
        if name in options:
            at = options.index(name)
            del options[at : at + 2]
        options = [option for option in options if not option.startswith(f"{name}=")]
    options = [Path(option).name if Path(option).is_absolute() else option for option in options]
    return {
        "date_utc": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "cpu": cpu_model(),
        "cores": cores(),
        "load_1m": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in (*_LIBRARIES, *libraries)},
        "commit": output("git", "rev-parse", "HEAD") or None,
        "modified": bool(output("git", "status", "--porcelain", "--", *sorted(p.name for p in ROOT.glob("breccia-*")))),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_STEERING) and k not in _FOLDERS},
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *options]),
        **more,
    }


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def output(*command: str) -> str:
    """What the command prints, or nothing where it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def told(run: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name.replace('-core', '')} {v}" for name, v in run["versions"].items() if v)
    if "torch_threads" in run:
        versions += f" on {run['torch_threads']} thread(s)"
    commit = f"commit {run['commit'][:10]}{' with changes' if run['modified'] else ''}" if run["commit"] else "no commit known"
    steering = "".join(f", {k}={v}" for k, v in run["environment"].items())
    device = f"{run['device']}; " if "device" in run else ""
    load = "" if run["load_1m"] is None else f", load {run['load_1m']}"
    machine = f"{device}{run['cpu']}, {run['cores']} core(s){load}, {run['os']}, Python {run['python']}"
    return f"{machine}, {versions}, {commit}, {run['date_utc']} UTC{steering}: `{run['command']}`"


def save(result: Result, out: Path) -> Path:
    """Write the result to `<out>/<benchmark>-<device or machine>.json`, one row per line."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{result['benchmark']}-{tag_of(result['runs'][-1])}.json"
    path.write_text(text_of(result), encoding="utf-8")
    return path


def text_of(result: Result) -> str:
    """The result as JSON: each item of "runs", "rows" and other lists of objects on a line of its own."""
    lines: list[str] = []
    for name, value in result.items():
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            items = ",\n  ".join(json.dumps(item, ensure_ascii=False, allow_nan=False) for item in value)
            text = f"[\n  {items}\n ]"
        lines.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read(path: Path) -> Result:
    return json.loads(path.read_text(encoding="utf-8"))


def load(folder: Path, known: Iterable[str]) -> dict[str, list[tuple[str, Result]]]:
    """Results by benchmark, each with its machine's tag, in order of tags. Exits on one of another schema or benchmark."""
    found: dict[str, list[tuple[str, Result]]] = {name: [] for name in known}
    for path in sorted(folder.glob("*.json")):
        result = read(path)
        name = result.get("benchmark")
        if name not in found or result.get("schema") != SCHEMA:
            sys.exit(
                f"draw: {path.name} holds benchmark {name!r} of schema {result.get('schema')!r}; this version draws "
                f"{', '.join(found)} of schema {SCHEMA}. Rerun that benchmark, or take the file away."
            )
        if result.get("options", {}).get("drift", DRIFT) > DRIFT:
            sys.exit(f"draw: {path.name} was measured with --drift above {DRIFT}; rerun that benchmark without it.")
        found[name].append((path.stem.removeprefix(f"{name}-"), result))
    return found


#: Options in which runs that are joined may differ: which rows they have, and what of them. The joined result has the smallest
#: number of samples.
_EXTENT = ("shapes", "samples", "bursts")


def _told(option: Any) -> Any:
    """A float to six digits: processors order the sums of FP32 numbers in ways of their own, 2^-24 of a number each."""
    return float(f"{option:.6g}") if isinstance(option, float) else option


def joined(results: list[Result], key: Iterable[str]) -> Result:
    """One result of all rows, where a later result's row replaces the same row of an earlier one. No row mixes two runs.

    key: the fields that identify a row. Exits if the results differ in benchmark, schema, device or options.
    """
    first, last, fields = results[0], results[-1], list(key)
    for result in results:
        for what, of in (
            ("benchmark", lambda r: r["benchmark"]),
            ("schema", lambda r: r["schema"]),
            ("device", lambda r: r["runs"][-1].get("device")),
            ("options", lambda r: {k: _told(v) for k, v in r.get("options", {}).items() if k not in _EXTENT}),
        ):
            if of(result) != of(first):
                sys.exit(f"join: the files must agree in their {what}: found {of(result)!r} beside {of(first)!r}.")
    rows: dict[str, tuple[Row, dict[str, Any]]] = {}
    for result in results:
        for row in result["rows"]:
            rows[json.dumps([row.get(field) for field in fields])] = row, result["runs"][row.get("run", 0)]
    used: list[dict[str, Any]] = []
    for _, run in rows.values():
        if run not in used:
            used.append(run)
    made = {**first, **last, "runs": used, "rows": [{**row, "run": used.index(run)} for row, run in rows.values()]}
    made |= {name: {k: v for r in results for k, v in r[name].items()} for name in ("rivals", "notes") if name in last}
    if "absent" in last:
        made["absent"] = {name: why for name, why in last["absent"].items() if name not in made["rivals"]}
    if "left" in first:  # rows that the first run left out, and no later one measured
        made["left"] = max(0, first["left"] - (len(rows) - len(first["rows"])))
    options = made["options"] = dict(first.get("options", {}))
    shapes = [shape for result in results for shape in result.get("options", {}).get("shapes", ())]
    if shapes:
        options["shapes"] = [shape for i, shape in enumerate(shapes) if shape not in shapes[:i]]
    if "samples" in options:
        options["samples"] = min(result["options"]["samples"] for result in results)
    return made
