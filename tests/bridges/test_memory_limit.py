"""`convert(..., max_memory=...)`: what it refuses, and the peak of a process that converts under the limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT

import breccia
from breccia.bridges import convert, save_safetensors
from breccia.internal import measuring
from breccia_bridges.jobs import Job
from breccia_bridges.memory import Estimates
from breccia_bridges.source import Source
from breccia_bridges.text import byte_count_of

NAME = "model.layers.0.mlp.up_proj.weight"


def model(folder: Path, rows: int, columns: int) -> Path:
    folder.mkdir()
    x = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    save_safetensors({NAME: x}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def peak(source: Path, out: Path, *words: str, group: Path | None = None, **environment: str) -> int:
    """The largest RssAnon + RssShmem of a process that converts. group: the control group that it runs in."""
    command = [sys.executable, str(ROOT / "tests" / "tools" / "anonymous.py"), str(source), str(out), *words]
    if group is not None:
        command = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return int(done.stderr.splitlines()[-1])


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("nvfp4", {}), ("mxfp8", {"dialect": "compressed_tensors"}), ("none", {})],
    ids=["slabs", "a dialect", "codes that are kept"],
)
def test_a_value_that_takes_more_than_the_limit_is_refused_before_a_byte(
    recipe: str, options: dict[str, Any], tmp_path: Path
) -> None:
    source, out = model(tmp_path / "m", 1024, 1024), tmp_path / "out"
    if recipe == "none":
        convert(source, tmp_path / "q", "mxfp8")
        source = tmp_path / "q"
    before = sorted(tmp_path.iterdir())
    for dry_run in (True, False):
        with pytest.raises(
            breccia.OptionError, match=rf"^the conversion takes about \d+\.\d\d MB .* while it converts {NAME},"
        ) as refused:
            convert(source, out, recipe, max_memory="100MB", dry_run=dry_run, **options)
    found = refused.value.found
    assert found["needed"] > found["max_memory"] == 100_000_000 and sorted(tmp_path.iterdir()) == before
    give = str(refused.value).split("(--max-memory ")[1].split(")")[0]
    assert f"the limit is 100.00 MB. Give max_memory='{give}' (--max-memory {give}), or exclude it." in str(refused.value)
    convert(source, out, recipe, max_memory=give, **options)
    assert out.is_dir()


def test_memory_grows_with_a_value_only_where_it_is_taken_whole(tmp_path: Path) -> None:
    small, large = (Source.open(model(tmp_path / f"m{rows}", rows, 2048)).values[NAME] for rows in (1024, 4096))
    recipe = breccia.MXFP8BlockScaling()
    needed = Estimates().needed
    assert needed(Job.casting(small, recipe)) == needed(Job.casting(large, recipe))
    assert needed(Job.copying(large, "")) < needed(Job.casting(small, recipe))


def test_slabs_are_smaller_under_a_small_limit_and_the_bytes_are_the_same(tmp_path: Path) -> None:
    source = model(tmp_path / "m", 1024, 2048)
    jobs = [Job.casting(Source.open(source).values[NAME], breccia.NVFP4BlockScaling())]
    assert Estimates().slab(jobs, 1 << 30) == 4 * measuring.SLAB > Estimates().slab(jobs, 150_000_000) >= 1 << 16
    for out, limit in (("one", "1GiB"), ("two", "150MB")):
        convert(source, tmp_path / out, "nvfp4", max_memory=limit)
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (tmp_path / "two" / "model.safetensors").read_bytes()


def test_what_is_taken_whole_is_counted(tmp_path: Path) -> None:
    """Values tried for exactness, words of AutoRound that are decoded to verify them, rows of GGUF that change places."""
    source, out = model(tmp_path / "m", 2048, 2048), tmp_path / "out"
    convert(source, tmp_path / "q", "mxfp4")
    limit, words = "150MB", {"recipe": "int4,signed=false,symmetric=false,scale_dtype=fp16", "dialect": "auto_round"}
    with pytest.raises(
        breccia.OptionError, match=rf"takes about 4\d\d\.\d\d MB of memory while it converts {NAME}, and the limit"
    ):
        convert(tmp_path / "q", out, "nvfp4", exact=True, max_memory=limit)
    with pytest.raises(
        breccia.OptionError, match=rf"takes about 1\d\d\.\d\d MB of memory while it converts {NAME}, and the limit"
    ):
        convert(source, out, **words, max_memory=limit)
    for verify in ("bytes", "none"):
        convert(source, out, **words, max_memory=limit, verify=verify, force=True)
    convert(source, out, "int4,signed=false,symmetric=false", dialect="awq", max_memory=limit, force=True)
    job = Job.casting(Source.open(source).values[NAME], breccia.MXFP8BlockScaling())
    moved = Estimates(moved=list(job.described[0]))
    assert moved.needed(job) == Estimates().needed(job) + 3 * job.nbytes


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_the_peak_of_a_process_stays_below_the_limit(tmp_path: Path) -> None:
    """By slabs, a tensor four times as large takes as much; a tensor that is taken whole, what the refusal says."""
    small, large = model(tmp_path / "m", 1024, 4096), model(tmp_path / "l", 4096, 4096)
    # By default, glibc's arenas keep what a thread freed, up to twice the largest piece, and in each run another part of it;
    # above this threshold, freed pieces go back to the system at once.
    at_once = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    peaks = [
        peak(one, tmp_path / f"s{n}", "-r", "nvfp4", "--max-memory", "256MiB", **at_once)
        for n, one in enumerate((small, large))
    ]
    assert max(peaks) < 256 << 20
    # Slabs of both have the same size. At the moment of the peak each of two threads has a slab, or none: 12 bytes per element,
    # as the limit counts them. A copy of the further rows in FP32 would be twice as large.
    assert abs(peaks[1] - peaks[0]) < 2 * 12 * measuring.SLAB == (4096 - 1024) * 4096 * 4 / 2
    for n, (recipe, dialect) in enumerate(
        {
            "mxfp8": "compressed_tensors",
            "int4,signed=false,symmetric=false": "awq",
            "nvfp4,order=scales_first": "modelopt",
        }.items()
    ):
        words, out = ("-r", recipe, "--dialect", dialect), tmp_path / f"d{n}"
        limit = least_limit(large, out, recipe, dialect)
        assert peak(large, out, *words, "--max-memory", limit) < byte_count_of(limit, "limit")


def least_limit(source: Path, out: Path, recipe: str, dialect: str) -> str:
    """The least limit that is not refused, up to 64 MiB: that which the refusal of a smaller one says."""
    with pytest.raises(breccia.OptionError) as refused:
        convert(source, out, recipe, dialect=dialect, max_memory="100MB", dry_run=True)
    return str(refused.value).split("(--max-memory ")[1].split(")")[0]


@pytest.mark.long
def test_a_conversion_runs_in_a_control_group_of_its_limit_and_256_mb(tmp_path: Path) -> None:
    """There the system counts the pages of files, too, and gives them back, and ends a process that takes more."""
    limit = 192 << 20
    with control_group(limit + 256_000_000) as group:
        source = model(tmp_path / "m", 16384, 8192)  # 537 MB of FP32, more than the group may have
        found = peak(source, tmp_path / "out", "-r", "nvfp4", "--max-memory", f"{limit}B", group=group)
    assert found < limit and (tmp_path / "out").is_dir()


@contextmanager
def control_group(nbytes: int) -> Iterator[Path]:
    """A new control group of so much memory, of either version. Skips where none can be made."""
    listed = Path("/proc/self/cgroup")
    lines = [line.split(":", 2) for line in listed.read_text().splitlines()] if listed.exists() else []
    of = next((path for _, kinds, path in lines if "memory" in kinds.split(",")), None)
    if of is not None:  # version 1
        parent, limit = Path("/sys/fs/cgroup/memory" + of), "memory.limit_in_bytes"
    else:
        parent, limit = Path("/sys/fs/cgroup" + next((path for n, _, path in lines if n == "0"), "/none")), "memory.max"
    group = parent / f"breccia-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as e:
        pytest.skip(f"no control group can be made here: {e}")
    try:
        try:
            (group / limit).write_text(str(nbytes))
        except OSError as e:
            pytest.skip(f"the memory of a control group cannot be limited here: {e}")
        yield group
    finally:
        group.rmdir()
