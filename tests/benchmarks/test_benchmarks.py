"""Benchmarks run at any size and record what they measured and where; the documents show their results."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT

BENCHMARKS = ROOT / "benchmarks"

#: A matrix of 128 rows is cast in microseconds, whose medians say nothing about the machine.
ONCE = ["--runs", "1", "--seconds", "0", "--attempts", "1", "--drift", "1000"]
TINY = {
    "cast": ["--size", "128", *ONCE, "--rivals", "ml_dtypes"],
    "cast-torch": ["--framework", "torch", "--size", "128", *ONCE, "--rivals", "breccia-on-numpy"],
    "memory": ["--size", "128", "--recipes", "nvfp4"],
    "accuracy": ["--size", "64", "--seeds", "2", "--recipes", "mxfp8", "--no-weights", "--jobs", "1"],
    "parity": ["--values", "20000", "--recipes", "mxfp8", "--ways", "eager"],
    "parity-jax": ["--framework", "jax", "--values", "20000", "--recipes", "mxfp4", "--ways", "jit", "--turns", "20"],
    "parity-mlx": ["--framework", "mlx", "--values", "20000", "--recipes", "mxfp8", "--ways", "eager,generic"],
    "mlx": ["--size", "128", "--layer", "128", "--rows", "1", "--runs", "1", "--seconds", "0", "--recipes", "int8 mxfp8"],
    "encoder": ["--recipes", "nvfp4"],
    "gpu-casts": [
        "casts",
        "--device",
        "cpu",
        "--shapes",
        "128x256",
        "--shapes",
        "8x128",
        "--samples",
        "2",
        "--rivals",
        "eager-torch",
        "--recipes",
        "fp8_block,block_m=128",
        "--recipes",
        "nvfp4",
    ],
    "gpu-host": ["host", "--device", "cpu", "--side", "128", "--samples", "2", "--rivals", "none"],
    "gpu-quantize": ["quantize", "--device", "cpu", "--tiny", "--runs", "1", "--recipes", "mxfp8"],
    "matmul-gpu": ["--device", "cpu", "--samples", "1", "--shapes", "32x128x256", "--kinds", "tiles", "--kinds", "tensor fast"],
    "training": ["--framework", "torch", "--seeds", "2", "--steps", "2", "--recipes", "nvfp4", "--jobs", "1"],
}


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCHMARKS / script), *options], capture_output=True, text=True)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A copy of the pages and plots."""
    return Path(shutil.copytree(ROOT / "docs", tmp_path / "docs"))


@pytest.mark.long
@pytest.mark.parametrize("benchmark", TINY)
def test_each_benchmark_records_its_measurements_and_the_machine(benchmark: str, tmp_path: Path, module) -> None:
    if benchmark == "encoder" and not (find_spec("transformers") and find_spec(module("bench_accuracy").WEIGHTS)):
        pytest.skip("needs transformers and the trained weights; `make bench` sets them up")
    done = run(f"bench_{benchmark.partition('-')[0]}.py", *TINY[benchmark], "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    tables = module("tables")
    assert path.name == f"{benchmark}-{module('common').machine_tag()}.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    assert (result["benchmark"], result["schema"]) == (benchmark, module("common").SCHEMA)
    where = result["provenance"]
    assert all(where[key] for key in ("date_utc", "cpu", "cores", "os", "python", "command"))
    assert where["versions"]["breccia-core"] and where["versions"]["numpy"]
    assert benchmark != "cast-torch" or (where["versions"]["torch"] and where["torch_threads"] >= 1)
    assert str(tmp_path) not in path.read_text(encoding="utf-8")
    for make in tables.TABLES[benchmark].values():
        table = make(result)
        assert table.title in " ".join(done.stdout.split()) and table.note  # narrow tables wrap their title
        # A CPU has one state of the clock and no errors of FP8 products: the notes of these tables say so.
        empty = benchmark == "accuracy" or table.note.startswith("*This result has ")
        assert all(len(row) == len(table.headings) for row in table.rows) and (table.rows or empty)


@pytest.mark.parametrize(("flags", "suffix"), [("fpu avx2", ", AVX2"), ("fpu avx2 avx512f", ""), ("fpu", ""), (None, "")])
def test_results_tell_processors_without_avx512_apart(flags: str | None, suffix: str, module, monkeypatch) -> None:
    common = module("common")
    told = "model name\t: AMD EPYC\n" + (f"flags\t\t: {flags}\n" if flags else "")
    monkeypatch.setattr(common.Path, "exists", lambda self: True)
    monkeypatch.setattr(common.Path, "read_text", lambda self, encoding=None: told)
    assert common.cpu_model() == "AMD EPYC" + suffix


@pytest.mark.long
def test_first_calls_are_measured_in_processes_of_their_own(tmp_path: Path, module) -> None:
    calls = ["--calls", "cast nvfp4", "--calls", "requantize 128x128 tiles to fp8_block"]
    done = run("first_call.py", "--device", "cpu", "--side", "128", "--processes", "2", *calls, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("gpu-first-call-*.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    assert [row["call"] for row in result["rows"]] == calls[1::2]
    for row in result["rows"]:
        assert [row[what]["runs"] for what in ("cold", "warm", "again")] == [1, 2, 2]
        assert row["cold"]["min_s"] > row["again"]["min_s"] > 0 and row["kernel"]
    table = module("tables").first_calls({**result, "rows": [*result["rows"], {"call": "c", "error": "E: no"}]})
    assert table.rows[-1] == ("c", "-", "-", "-", "-") and "c raised E: no." in table.note


@pytest.mark.long
def test_products_on_the_cpu_are_timed_in_two_passes_and_missing_libraries_are_named(
    tmp_path: Path, module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BRECCIA_GGML", raising=False)
    options = ["--size", "256", "--rows", "1,3", "--runs", "2", "--libraries", "read,multiply-adds,torch,numpy,breccia,ggml"]
    done = run("bench_matmul_cpu.py", *options, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    left_out = dict(result["options"]["left_out"])
    assert left_out.pop("ggml") == "KeyError: 'BRECCIA_GGML'"
    assert not left_out or shutil.which("cc") is None
    first, second = result["runs"]
    assert [(row["rows"], row["arm"]) for row in first] == [(row["rows"], row["arm"]) for row in second]
    assert {row["arm"] for row in first} >= {"read", "NumPy FP32", "F.linear FP32", "torch int4", "int4", "int4, INT8 mode"}
    assert all(len(row["seconds"]) == 2 and row["min_s"] > 0 for row in first)
    tables = module("tables")
    table = tables.matmul_cpu(result)
    assert table.headings == ("arm", "M = 1", "M = 3") and "ggml did not run: KeyError" in table.note
    assert ("in registers" in table.note) == (not left_out)
    # The rate of multiply-adds is the best one of any row count.
    without = [row for row in first if row["arm"] != "multiply-adds"]
    added = [{**first[0], "arm": "multiply-adds", "rows": rows, "min_s": 1e-4} for rows in (1, 3)]
    assert "in registers, at best 4 GFLOP/s" in tables.matmul_cpu({**result, "runs": [[*without, *added], without]}).note
    assert "in registers" not in tables.matmul_cpu({**result, "runs": [without, without]}).note
    # Passes that differ are shown as a range, and the note counts them.
    steady = {**result, "runs": [first, first]}
    assert "Both passes agree" in tables.matmul_cpu(steady).note
    slower = [{**row, "median_s": row["median_s"] * (2 if (row["rows"], row["arm"]) == (3, "int4") else 1)} for row in first]
    moved = tables.matmul_cpu({**result, "runs": [first, slower]})
    assert f"**The passes disagree** in 1 of {len(first)} ratios" in moved.note
    assert " to " in next(row for row in moved.rows if row[0] == "int4")[2]
    for words, message in ((["--libraries", "read,jx"], "no library jx"), (["--libraries", "numpy"], "add it to --libraries")):
        refused = run("bench_matmul_cpu.py", *words)
        assert refused.returncode == 1 and message in refused.stderr


@pytest.mark.long
def test_a_decoder_on_the_cpu_is_timed_through_generate(tmp_path: Path, module) -> None:
    if find_spec("transformers") is None:
        pytest.skip("needs transformers")
    options = ["--device", "cpu", "--tiny", "--rounds", "1", "--steps", "3", "--batch", "2", "--recipes", "int4"]
    done = run("bench_decoder.py", *options, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("decoder-cpu-*.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["recipe"], row["batch"]) for row in result["rows"]] == [("fp32", 2), ("bf16", 2), ("int4", 2)]
    full, half, quantized = (row["weight_bytes"] for row in result["rows"])
    assert full == 2 * half and quantized < 0.14 * full
    for row in result["rows"]:
        assert row["tokens_per_second"] == pytest.approx(2 / row["step"]["median_s"]) and row["prompt"]["min_s"] > 0
    table = module("tables").TABLES["decoder-cpu"]["decoder-cpu"](result)
    assert [row[0] for row in table.rows] == ["fp32", "bf16", "int4"] and "Hugging Face" in table.note


@pytest.mark.long
def test_tuning_writes_the_file_of_the_device_and_prints_its_table(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--shapes", "16x128", "--recipes", "fp8_block", "--ops", "cast", "--ops", "dequantize"]
    done = run("tune.py", *options, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split("  ")[0] == "call" and lines[-1] == "2 calls tuned, 0 left for lack of time; written to cpu.json."
    assert [line.split(" axis")[0] for line in lines[1:3]] == ["decode E4M3/F32 1x128", "tile along cast E4M3/F32 1x128"]
    found = json.loads((tmp_path / "cpu.json").read_text(encoding="utf-8"))
    assert (found["schema"], found["device"]) == (1, "cpu") and found["provenance"]["versions"]["torch"]
    assert str(tmp_path) not in (tmp_path / "cpu.json").read_text(encoding="utf-8")
    done = run("tune.py", "--device", "cpu", "--ops", "round")
    assert done.returncode == 1 and "--ops takes cast, cast-axis-2" in done.stderr
    done = run("tune.py", *options, "--seconds", "0", "--out", str(tmp_path))
    assert done.stdout.splitlines()[-1] == "0 calls tuned, 2 left for lack of time; written to cpu.json."


@pytest.mark.long
def test_tuning_tries_products_of_activations_and_weights(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--shapes", "32x256", "--recipes", "nvfp4", "--ops", "matmul-1", "--ops", "matmul-128"]
    done = run("tune.py", *options, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = [line.split(" small")[0] for line in done.stdout.splitlines()[1:-1]]
    assert found == [f"fused bfloat16 E2M1/E4M3/F32 1x16 rows {rows}" for rows in (1, 128)]


@pytest.mark.parametrize("name", ["ml_dtypes", "eager-torch", "torchao"])
def test_rivals_write_the_same_scales_and_values(name: str, module) -> None:
    if why := module("rivals").absence(name):
        pytest.skip(why)
    rivals, bench = module("rivals"), module("bench_cast")
    ours, theirs = rivals.rival(rivals.OURS), rivals.rival(name)
    x = module("common").normal((16, 512), 0)
    for recipe in rivals.SAME_SCALE[name]:
        a, b = ours.cast(recipe)(x), theirs.cast(recipe)(theirs.given(x))
        assert bench.equal_share(ours.scale(a), np.asarray(theirs.scale(b)), 0.0) == 1, recipe
        # The rival divides and breccia multiplies by a reciprocal, so a few ties round the other way.
        assert bench.equal_share(ours.dequantize(a), np.asarray(theirs.dequantize(b)), bench.SAME_VALUE) > 0.999, recipe


def test_plain_torch_rounds_to_fp4_with_ties_to_even(module) -> None:
    # One block with amax 2688 = 6 * 448: the block scale is 448 and the global scale 1, both exact.
    ties = 448 * np.float32([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]])
    even = 448 * np.float32([[0, 1, 1, 2, 2, 4, 4, 6]])
    eager = module("rivals").rival("eager-torch")
    y = eager.dequantize(eager.cast("nvfp4")(eager.given(np.concatenate([ties, -ties], axis=1))))
    assert y.tolist() == np.concatenate([even, -even], axis=1).tolist()


@pytest.mark.parametrize(
    ("name", "library", "kernel"),
    [("breccia", "torch", "torch.cpu.cast"), ("breccia-on-numpy", "numpy", "numpy.cast"), ("eager-torch", "torch", None)],
)
def test_the_torch_benchmark_times_the_named_library_and_kernel(name: str, library: str, kernel: str | None, module) -> None:
    rivals, bench = module("rivals"), module("bench_cast")
    rival = rivals.rival(name, "torch")
    x = rival.given(module("common").normal((4, 128), 0))
    st = rival.cast("nvfp4")(x)
    assert {bench.origin(part) for part in (x, rival.scale(st), rival.dequantize(st))} == {library}
    assert rival.kernel("cast", "nvfp4", x) == kernel


@pytest.mark.long
def test_the_jax_benchmark_times_jax_and_the_numpy_kernel_on_equal_values(module) -> None:
    jax, rivals, bench = pytest.importorskip("jax"), module("rivals"), module("bench_cast")
    ours, on_numpy = (rivals.rival(name, "jax") for name in ("breccia", *rivals.RIVALS["jax"]))
    x = module("common").normal((4, 128), 0)
    written = [(way, way.cast("nvfp4")(way.given(x))) for way in (ours, on_numpy)]
    scales, values = (
        [np.asarray(part(way, st)) for way, st in written] for part in (lambda w, s: w.scale(s), lambda w, s: w.dequantize(s))
    )
    assert np.array_equal(*scales) and np.array_equal(*values)
    assert isinstance(written[0][1].data, jax.Array) and bench.origin(written[1][1].data) == "numpy"
    assert [way.kernel("cast", "nvfp4", way.given(x)) for way, _ in written] == ["jax.cpu.cast", "numpy.cast"]


@pytest.mark.slow
def test_the_compiled_cast_has_the_same_sqnr_and_kernels(tmp_path: Path, module) -> None:
    options = ["--framework", "torch", "--size", "128", "--runs", "1", "--dump", str(tmp_path)]
    ours, compiled = (run("bench_cast.py", "--rival", name, *options) for name in ("breccia", "breccia-compiled"))
    assert compiled.returncode == 0, compiled.stderr
    a, b = json.loads(ours.stdout), json.loads(compiled.stdout)
    assert b["sqnr_db"] == a["sqnr_db"] and set(b["sqnr_db"]) == set(module("rivals").RECIPES)
    assert [row["kernel"] for row in b["rows"]] == [row["kernel"] for row in a["rows"]]


@pytest.mark.parametrize(
    "recipe", ["fp8_block,block_m=128", "fp8_row", "fp8_delayed", "mxfp4", "mxfp6", "int8", "int4", "nvfp4", "mxfp8"]
)
def test_plain_torch_writes_the_codes_and_scales_of_breccia(recipe: str, module) -> None:
    torch = pytest.importorskip("torch")
    bench, plain = module("bench_gpu"), module("rivals").on_device("eager-torch", "cpu", torch.bfloat16)
    (x,) = bench.matrices((128, 512), "bfloat16", "cpu")
    supplied = {"scale": torch.tensor(module("gpu_work").SCALE)} if recipe == "fp8_delayed" else {}
    for axis, cast in ((-1, plain.cast(recipe)), (-2, plain.down(recipe))):
        st, (_, data, scale, *_) = module("breccia").cast(x, recipe, axis=axis, **supplied), cast(x)
        same = scale.reshape(-1).view(torch.uint8) == st.scale.reshape(-1).view(torch.uint8)
        assert same.float().mean() > 0.99  # where log2 is rounded up to an integer, the scale is another power of two
        assert (data.view(torch.uint8) == st.data.view(torch.uint8)).float().mean() > 0.98  # ties, as above
    st, written = module("breccia").cast(x, recipe, **supplied), plain.cast(recipe)(x)
    y = plain.dequantize(written)
    assert y.shape == x.shape and y.dtype == torch.bfloat16
    assert (y == module("breccia").dequantize(st, out_dtype="bfloat16")).float().mean() > 0.97


def test_rivals_take_both_orientations_and_record_an_amax(module) -> None:
    torch = pytest.importorskip("torch")
    work, plain = module("gpu_work"), module("rivals").on_device("eager-torch", "cpu", torch.bfloat16)
    (x,) = work.matrices((128, 256), "bfloat16", "cpu")
    (along, down), parts = work.rival_call(plain, "cast_pair", "mxfp8", [x])(), lambda cast: [y.shape for y in cast[1:]]
    assert parts(along) == [(128, 256), (128, 8, 1)] and parts(down) == [(128, 256), (4, 1, 256)]
    (_, data, _), amax = work.rival_call(plain, "AmaxHistory.cast", "fp8_delayed", [x])()
    assert data.shape == x.shape and amax == x.abs().max() == work.rival_call(plain, "AmaxHistory.update", "fp8_delayed", [x])()
    assert work.rival_call(plain, "AmaxHistory.update", "mxfp8", [x]) is None
    assert work.rival_call(plain, "cast", "nf4", [x]) is None and work.rival_call(plain, "cast_ste", "mxfp8", [x]) is None
    assert work.rival_call(plain, "cast_pair", "mxfp8", [x], "torch-compiled") is None  # small: seconds to compile


def test_rows_with_a_goal_come_first_of_each_shape(module) -> None:
    work, goals = module("gpu_work"), module("cast_tables").GOALS
    shapes = [(16384, 8192), (1024, 1024)]
    rows = list(work.cases(list(work.RECIPES), list(work.OPS), shapes))
    assert {row[:2] for row in rows[: len(goals)]} == set(goals) and all(shape == shapes[0] for *_, shape in rows[: len(goals)])
    assert [shape for *_, shape in rows] == sorted((shape for *_, shape in rows), reverse=True)
    small = {row[:2] for row in rows if row[2] == shapes[1]}
    assert {row[:2] for row in rows} - small == {(spec, op) for op in ("cast-fp16", "cast-fp32") for spec in work.OTHER_DTYPES}
    assert ("fp8_delayed", "cast_pair") not in small and ("fp8_delayed", "AmaxHistory.update") in small
    assert set(work.cases(["int4,group_size=32"], ["cast", "cast_pair", "requantize", "AmaxHistory.cast"], [(1024, 1024)])) == {
        ("int4,group_size=32", "cast", (1024, 1024)),
        ("int4,group_size=32", "cast_pair", (1024, 1024)),
    }


def test_kernels_that_nsight_compute_counts_are_read_and_shown(module) -> None:
    pytest.importorskip("torch")
    ncu, metrics = module("ncu_casts"), list(module("ncu_casts").METRICS.values())

    def line(*cells: object) -> str:
        return ",".join(f'"{cell}"' for cell in cells)

    values = (81_920, "402,653,184", 91.5, 40.2, 33.3, 60.0, 48, "1,755,000,000")
    units = ("ns", "byte", "%", "%", "%", "%", "register/thread", "hz")
    text = "\n".join(
        [
            "==PROF== Connected to process 7",
            line("ID", "Kernel Name", *metrics),
            line("", "", *units),
            line(0, "lanes_kernel", *values),
            line(1, "amax_kernel(int)", *values),
        ]
    )
    found = ncu.read(text)
    assert [row["kernel"] for row in found] == ["lanes_kernel", "amax_kernel"]
    assert found[0] == {**found[1], "kernel": "lanes_kernel"} and found[0]["seconds"] == pytest.approx(81.92e-6)
    rows = [{"call": "cast nf4", "elements": 16384 * 8192, **row} for row in found]
    table = module("tables").profile({"options": {"shape": [16384, 8192]}, "rows": rows})
    assert table.rows[0] == ("cast nf4", "lanes_kernel", "81.9", "3.00", "92 %", "40 %", "33 %", "60 %", "48")
    assert "(1755 to 1755 MHz)" in table.note
    with pytest.raises(SystemExit, match="ncu printed no kernels: ==ERROR== no permission"):
        ncu.read("==ERROR== no permission")
    for op, recipe in ncu.CALLS.values():
        assert recipe in module("gpu_work").OPS[op].recipes


def test_a_size_is_small_whatever_else_is_measured(module) -> None:
    work = module("gpu_work")
    assert [work.is_large(shape) for shape in ((16384, 8192), (4096, 4096), (64, 8192))] == [True, False, False]


def test_gpu_rows_count_the_bytes_that_an_op_has_to_move(module) -> None:
    pytest.importorskip("torch")
    bench = module("bench_gpu")
    xs, n = bench.matrices((128, 256), "bfloat16", "cpu"), 128 * 256
    ops = ("cast", "cast-axis-2", "cast_pair", "dequantize", "cast_ste")
    found = {op: bench.work(op, "fp8_current", xs, "bfloat16").nbytes for op in ops}
    casts = {"cast": 5 * n + 4, "cast-axis-2": 5 * n + 4, "cast_pair": 6 * n + 8}  # two reads of BF16; codes and one scale
    assert found == {**casts, "dequantize": 3 * n + 4, "cast_ste": 6 * n}
    delayed = bench.work("cast", "fp8_delayed", xs, "bfloat16")
    assert delayed.nbytes == 3 * n + 4 and delayed.kernel.startswith("torch.cpu.cast")
    recorded = [bench.work(op, "fp8_delayed", xs, "bfloat16").nbytes for op in ("AmaxHistory.cast", "AmaxHistory.update")]
    assert recorded == [3 * n + 4, 2 * n]
    tiles = bench.work("requantize", "fp8_block,block_m=128", xs, "bfloat16")
    assert tiles.nbytes == 2 * n + 4 * 2 + 4 * 128 * 2 and tiles.to == "fp8_block"
    mx = bench.work("requantize", "mxfp8", xs, "bfloat16")  # the codes and scales twice: the new global scale comes first
    assert mx.nbytes == 2 * (n + n // 32) + n // 2 + n // 16 + 4 and mx.to == "nvfp4"
    assert bench.work("cast", "nvfp4,two_level=false", xs, "bfloat16").nbytes == 2 * n + n // 2 + n // 16
    (y,) = bench.matrices((128, 256), "float32", "cpu")
    assert bench.work("cast-fp32", "mxfp8", [y], "bfloat16").nbytes == 4 * n + n + n // 32


def test_gpu_samples_are_interleaved_and_errors_recorded(module) -> None:
    pytest.importorskip("torch")
    bench, made = module("bench_gpu"), list[str]()

    def slow(name: str) -> None:
        made.append(name)
        time.sleep(0.021)  # longer than a sample may last, so that a sample is one call

    def broken() -> None:
        raise RuntimeError("no kernel image\nand more")

    makers = {name: lambda name=name: lambda: slow(name) for name in "ab"} | {"none": lambda: None, "broken": lambda: broken}
    found, clock = bench.measured(makers, 2, "cpu", False, False)
    assert made[-4:] == ["a", "b"] * 2 and clock is None
    assert found["broken"] == {"error": "RuntimeError: no kernel image"} and "none" not in found
    assert found["a"]["device"]["runs"] == 2 and found["a"]["device"]["min_s"] > 0.02


def test_passes_of_breccia_0_1_3_are_merged_and_compared(module) -> None:
    bench, tables = module("bench_gpu"), module("cast_tables")
    ours = {"runs": 1, "min_s": 1e-6, "median_s": 1e-6, "max_s": 1e-6}
    row = {"recipe": "int4", "op": "cast", "shape": [8, 128], "times": {"breccia": {"device": ours}}}
    old = {"recipe": "int4", "op": "cast", "shape": [8, 128], "part": 1.0}
    bench.merged([row], [[{**old, "device": {"seconds": [s]}}] for s in (1e-6, 3e-6)])
    assert row["times"]["breccia-0.1.3"]["device"]["runs"] == 2
    assert tables.versus(row, "device") == "breccia-0.1.3 2.00 (2.00×)" and tables.versus(row, "graph") == "-"


def test_a_rival_that_returns_arrays_of_another_framework_is_refused(tmp_path: Path, module, monkeypatch) -> None:
    rivals, bench = module("rivals"), module("bench_cast")
    eager = rivals.rival("eager-torch")
    wrong_bit = dataclasses.replace(eager, dequantize=lambda cast: eager.dequantize(cast).numpy())
    monkeypatch.setattr(rivals, "rival", lambda name, framework: wrong_bit)
    with pytest.raises(SystemExit, match="wrong_bit got a matrix of torch and gave values of numpy; leave it out"):
        bench.one("wrong_bit", "torch", 128, 1, 0.0, tmp_path)


def test_breccia_results_that_differ_by_a_bit_are_refused(tmp_path: Path, module) -> None:
    bench, rivals = module("bench_cast"), module("rivals")
    values = {"breccia": np.float32([1.0]), "breccia-on-numpy": np.nextafter(np.float32([1.0]), np.float32(2))}
    for name, found in values.items():
        (tmp_path / name).mkdir()
        for recipe in rivals.RECIPES:
            np.save(tmp_path / name / f"{recipe}-scale.npy", np.float32([1.0]))
            np.save(tmp_path / name / f"{recipe}-values.npy", found)
    passes = [{"rival": name, "sqnr_db": dict.fromkeys(rivals.RECIPES, 30.0)} for name in values]
    with pytest.raises(SystemExit, match="current of breccia-on-numpy has other values than that of breccia"):
        bench.checks(passes, tmp_path)


def test_a_missing_rival_is_skipped_with_a_message(tmp_path: Path, module, monkeypatch, capsys) -> None:
    bench, rivals = module("bench_cast"), module("rivals")
    monkeypatch.setattr(rivals, "old_folder", lambda: tmp_path / "absent")
    assert bench.chosen([]) == ["breccia-on-numpy", "ml_dtypes"]
    assert "skipped breccia-0.1.3: not fetched yet; --rivals breccia-0.1.3 fetches it" in capsys.readouterr().err
    assert bench.chosen(["all"]) == ["breccia-on-numpy", "ml_dtypes", "breccia-0.1.3"] and bench.chosen(["none"]) == []
    theirs = [name for name in ("torchao", "torchao-compiled") if find_spec("torchao")]
    assert bench.chosen([], "torch") == ["breccia-on-numpy", "breccia-compiled", "eager-torch", *theirs]
    monkeypatch.setattr(rivals, "find_spec", lambda name: None)
    assert rivals.absence("torchao") == "torchao is not installed; pip install torchao"
    with pytest.raises(SystemExit, match=r"takes breccia-on-numpy, ml_dtypes, breccia-0\.1\.3, all or none; got 'torch'"):
        bench.chosen(["torch"])


def test_calls_are_timed_in_turns(module) -> None:
    made: list[str] = []
    times = module("common").swept([lambda: made.append("a"), lambda: made.append("b")], 3, 0.0)
    assert made == ["a", "a", "b", "b"] * 3  # one uncounted, one counted
    assert [len(one["seconds"]) for one in times] == [one["runs"] for one in times] == [3, 3]
    longer = module("common").swept([lambda: time.sleep(0.01)], 1, 0.1)
    assert longer[0]["runs"] > 2


def test_a_result_is_written_only_where_both_passes_of_breccia_agree(tmp_path: Path, module, monkeypatch, capsys) -> None:
    bench = module("bench_cast")
    first = bench.one("breccia", "numpy", 128, 1, 0.0, tmp_path)
    checks = [
        {"recipe": recipe, "sqnr_db": {"breccia": 30.0}, "same_scales": {}, "same_values": {}} for recipe in bench.RECIPES
    ]

    def measured(*factors: float) -> None:
        """Later runs of the benchmark find the last pass to be slower by these factors."""
        found = iter(factors)

        def one(names: list[str], flags: list[str]) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
            factor = next(found)
            rows = [{**row, "median_s": factor * row["median_s"]} for row in first["rows"]]
            return json.loads(json.dumps([first, {**first, "rows": rows}])), checks

        monkeypatch.setattr(bench, "measured", one)

    options = {"size": 128, "rivals_": ["none"], "out": tmp_path / "out", "attempts": 2, "drift": 1.15}
    measured(1.3, 0.8)
    with pytest.raises(
        SystemExit, match=r"took 0\.80 to 0\.80 of the time of its first, where 0\.87 to 1\.15 is allowed\. Nothing was"
    ):
        bench.main(**options)
    said = capsys.readouterr()
    assert "attempt 1 of 2: the last pass of breccia took 1.30 to 1.30" in said.err and "The machine was not steady" in said.out
    assert not (tmp_path / "out").exists()
    measured(1.3, 1.1)
    bench.main(**options)
    (written,) = (tmp_path / "out").glob("cast-*.json")
    assert json.loads(written.read_text(encoding="utf-8"))["attempt"] == 2
    assert "not steady" not in capsys.readouterr().out


def test_a_result_of_an_unsteady_machine_is_not_drawn(tmp_path: Path) -> None:
    (found, *_) = (BENCHMARKS / "results").glob("cast-torch-*.json")
    result = json.loads(found.read_text(encoding="utf-8"))
    result["options"]["drift"] = 1.5
    (tmp_path / found.name).write_text(json.dumps(result), encoding="utf-8")
    done = run("draw.py", "--check", "--results", str(tmp_path))
    assert done.returncode and f"{found.name} was measured with --drift above 1.15; rerun that benchmark" in done.stderr


def test_a_rival_is_not_timed_under_the_name_of_another(tmp_path: Path) -> None:
    done = run("bench_cast.py", "--rival", "breccia-0.1.3", "--size", "128", "--dump", str(tmp_path))
    assert done.returncode and "was to time breccia-0.1.3, but `import breccia` gives" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["bench_cast.py", "--size", "100"], "--size must be 128 or a multiple of 256"),
        (["bench_cast.py", "--runs", "0"], "--runs and --attempts must be at least 1, got 0 and 4"),
        (["bench_cast.py", "--framework", "mlx"], "--framework takes numpy, torch, jax; got 'mlx'"),
        (["bench_cast.py", "--framework", "torch", "--rivals", "ml_dtypes"], "--rivals takes breccia-on-numpy,"),
        (["bench_memory.py", "--size", "0"], "--size must be at least 1, got 0"),
        (["bench_memory.py", "--recipes", "mxfp9"], "mxfp9"),
        (["bench_accuracy.py", "--seeds", "0"], "--size and --seeds must be at least 1"),
        (["bench_parity.py", "--values", "0"], "--values and --turns must be at least 1, got 0 and 1"),
        (["bench_parity.py", "--framework", "numpy"], "--framework takes torch, jax, mlx; got 'numpy'"),
        (["bench_parity.py", "--ways", "eager,fast"], "--ways of torch takes eager, generic, compiled; got 'fast'"),
        (["bench_parity.py", "--framework", "jax", "--ways", "compiled"], "--ways of jax takes eager, generic, jit, vmap; got"),
        (["bench_parity.py", "--device", "tpu"], "--device of torch takes cpu or cuda; got 'tpu'"),
        (["bench_parity.py", "--framework", "mlx", "--device", "cuda"], "--device of mlx takes cpu; got 'cuda'"),
        (["bench_parity.py", "--grid", "--framework", "jax"], "--grid compares eager calls of torch; leave --framework"),
        (["bench_parity.py", "--grid", "--ways", "compiled"], "--grid compares eager calls of torch; leave --framework"),
        (["bench_parity.py", "--beyond"], "--beyond needs --device cuda and torch"),
        (["bench_parity.py", "--framework", "jax", "--device", "cuda", "--beyond"], "--beyond needs --device cuda and torch"),
        (["bench_encoder.py", "--recipes", "mxfp9"], "mxfp9"),
        (["bench_gpu.py", "casts", "--device", "cpu", "--recipes", "mxfp9"], "mxfp9"),
        (["bench_gpu.py", "casts", "--device", "tpu"], "--device takes cuda or cpu; got 'tpu'"),
        (
            ["bench_gpu.py", "casts", "--device", "cpu", "--shapes", "64x100"],
            "--shapes takes ROWSxCOLUMNS, columns a multiple of",
        ),
        (["bench_gpu.py", "casts", "--device", "cpu", "--ops", "matmul"], "--ops takes cast, cast-axis-2, cast_pair,"),
        (["first_call.py", "--device", "tpu"], "--device takes cuda or cpu; got 'tpu'"),
        (["bench_gpu.py", "host", "--device", "cpu", "--rivals", "torchao"], "--rivals takes transformer-engine,"),
        (["bench_gpu.py", "casts", "--device", "cpu", "--dtype", "fp8"], "--dtype takes bf16, fp16, fp32; got 'fp8'"),
        (["bench_gpu.py", "casts", "--device", "cpu", "--rivals", "ml_dtypes"], "bench_gpu: --rivals takes eager-torch,"),
        (["bench_gpu.py", "quantize", "--device", "cpu", "--recipes", "mxfp9"], "mxfp9"),
        (["bench_gpu.py", "matmul", "--device", "cpu", "--kinds", "fp9"], "--kinds takes tiles, row, tensor, blocks, mx,"),
        (["bench_gpu.py", "matmul", "--device", "cpu", "--bursts", "fp9"], "--bursts takes tiles, row, tensor, blocks, mx,"),
        (["bench_gpu.py", "matmul", "--device", "cpu", "--rivals", "fp9"], "--rivals takes transformer-engine, humming,"),
        (["bench_gpu.py", "matmul", "--device", "cpu", "--shapes", "8x8x8"], "--shapes takes MxNxK, K a multiple of 128; got"),
        (["bench_gpu.py", "weight_only", "--groups", "-1"], "Invalid value for '--groups'"),
        (["bench_matmul.py", "--from", "result.json"], "--from takes a result and writes its table; name the file by --table"),
        (["old_matmul.py", "--shapes", "256x256x256"], "old_matmul: it times breccia 0.1.3, but `import breccia` gives"),
        (["bench_training.py", "--seeds", "1"], "--seeds must be at least 2"),
        (["bench_training.py", "--framework", "numpy"], "--framework takes torch, jax, mlx; got 'numpy'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_options_are_refused_with_a_message(options: list[str], message: str) -> None:
    done = run(*options)
    assert done.returncode and message in done.stderr and "Traceback" not in done.stderr


def test_plain_rounding_follows_the_formats(module) -> None:
    plain = module("bench_encoder").PLAIN

    def rounded(name: str, *numbers: float) -> list[float]:
        return plain[name](np.resize(np.float32(numbers), (1, 128)))[0, : len(numbers)].tolist()

    assert rounded("fp8_current", 448, 17, 19, 0.3) == [
        448,
        16,
        20,
        0.3125,
    ]  # steps of 2 from 16, ties to even; of 2^-5 from 0.25
    assert rounded("fp8_block", 896, 34, 38, 0.6) == [896, 32, 40, 0.625]
    assert rounded("mxfp8", 449, 34, 38, 0.6) == [448, 32, 40, 0.625]  # above 448 the scale is 2
    assert rounded("mxfp4", 7, 5.0, 1.2, 0.4) == [8, 4, 1, 0]
    assert rounded("nvfp4", 6 * 448, 448, 0.75 * 448, 0.25 * 448) == [6 * 448, 448, 448, 0]
    assert rounded("int4", 7, -2.5, 1.5, 0.4) == [7, -2, 2, 0]
    assert rounded("mxfp6", 7.5, 4.2, 0.07, -1.3) == [7.5, 4, 0.125, -1.25]
    assert rounded("mxint8", 1.984375, 0.02, -0.5, 0) == [1.984375, 0.015625, -0.5, 0]
    # From the table in appendix E of QLoRA: both ends, zero and the values next to it.
    table = [1.0, -1.0, 0.0, 0.07958029955625534, -0.09105003625154495]
    assert rounded("nf4", 1, -0.9, 0.03, 0.08, -0.1) == pytest.approx(table, abs=1e-6)


def test_an_encoder_less_accurate_than_plain_rounding_is_refused(module) -> None:
    bench = module("bench_encoder")
    rows = [
        {"recipe": "near", "cosine": {"weights": [0.97, 0.975], "plain": [0.973, 0.975]}},
        {"recipe": "behind", "cosine": {"weights": [0.97, 0.97], "plain": [0.973, 0.973]}},
        {"recipe": "foreign", "cosine": {"weights": [0.5, 0.5]}},
    ]
    assert bench.faults(rows) == ["behind has a mean cosine of 0.9700, plain rounding 0.9730"]


def test_training_accuracy_far_from_fp32_is_refused(module) -> None:
    bench = module("bench_training")

    def row(recipe: str, held: bool, *accuracy: float) -> dict[str, object]:
        return {"framework": "torch", "recipe": recipe, "held": held, "accuracy": list(accuracy)}

    rows = [row("FP32", False, 0.88, 0.90), row("fp8_block", True, 0.87, 0.895), row("mxfp8", True, 0.90, 0.91)]
    assert bench.faults([*rows, row("int4", False, 0.5)]) == ["mxfp8 on torch is right in 0.9050, FP32 in 0.8900"]
    (fault,) = bench.faults([row("FP32", False, 0.96, 0.99), row("fp8_block", True, 0.97, 0.98)])
    assert fault.startswith("FP32 on torch is right in 0.9750, which must lie in (0.8, 0.95)")


def test_the_training_task_is_harder_with_closer_clusters(module, monkeypatch) -> None:
    bench = module("bench_training")
    problem, found = bench.Problem(0, 1), {}
    for distance in (0, bench.DISTANCE, 40):
        monkeypatch.setattr(bench, "DISTANCE", distance)
        found[distance] = bench.share(problem, problem.best())
    chance, best, certain = found.values()
    # Five standard deviations of a proportion among TEST samples.
    assert abs(chance - 1 / bench.CLASSES) < 5 * (0.1 * 0.9 / bench.TEST) ** 0.5 and certain == 1
    assert bench.LEARNED[1] < best < 1  # no network beats the Bayes-optimal classifier, which is below 1


@pytest.mark.long
@pytest.mark.parametrize("framework", ["jax", "mlx"])
def test_frameworks_train_the_same_network(framework: str, module, monkeypatch) -> None:
    pytest.importorskip(framework)
    # A changed number of threads would persist after the test.
    monkeypatch.setattr(pytest.importorskip("torch"), "set_num_threads", lambda count: None)
    bench = module("bench_training")
    monkeypatch.setattr(bench, "TEST", 2048)
    problem = bench.Problem(0, 5)
    expected, found = (bench.FRAMEWORKS[name](problem, None) for name in ("torch", framework))
    # Another order of summation moves the logits, of order 1, by about 1e-6: this changes the class of about one input in 10^5.
    assert np.count_nonzero(expected != found) <= 1
    assert len(set(expected.tolist())) == bench.CLASSES


@pytest.mark.parametrize("recipe", ["mxfp4", "fp8_current"])
def test_a_grid_of_parity_has_every_dtype_and_axis_and_finds_a_wrong_bit_of_each_op(recipe: str, module, monkeypatch) -> None:
    pytest.importorskip("torch")
    parity, breccia = module("parity"), module("breccia")
    made = breccia.recipe(recipe)
    slabs = parity.grid(0)
    assert sorted((slab.options["axis"], slab.name.split(",")[0]) for slab in slabs) == [
        (axis, dtype) for axis in (-2, -1) for dtype in ("bfloat16", "float16", "float32")
    ]
    assert {slab.columns for slab in slabs} == {slab.columns for slab in parity.grid(1)} == {parity.WHOLE, parity.RAGGED}
    run = {"eager": parity.Way(lambda recipe: lambda x, options: parity.other_ops(x, recipe, options))}

    def compared():
        drawn = parity.draws(made, 6 * 4096, 4096, slabs)
        return parity.parity("torch", made, run, "cpu", drawn, parity.other_ops)[0]["eager"]

    tally = compared()
    assert tally.differing == 0 and not tally.faults and tally.values >= 6 * 4096
    for op in ("cast_pair", "cast_ste", "requantize"):
        function = getattr(breccia, op)

        def wrong(x, *arguments, function=function, **options):
            found = function(x, *arguments, **options)
            first = found[0] if isinstance(found, tuple) else found
            data = first.data if hasattr(first, "recipe") else first
            if type(data).__module__ == "torch":
                data.view(module("torch").uint8)[0, 0] ^= 1
            return found

        with monkeypatch.context() as patch:
            patch.setattr(breccia, op, wrong)
            faults = compared().faults
        assert faults and all(op in fault for fault in faults), op


def test_parity_leaves_out_what_has_not_begun_in_time(module) -> None:
    bench, go = module("bench_parity"), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = [pool.submit(lambda n=n: go.wait(10) and {"n": n}) for n in range(3)]
        threading.Timer(0.2, go.set).start()
        assert bench.finished(waiting, time.perf_counter() + 0.05) == [{"n": 0}]
        waiting = [pool.submit(lambda n=n: {"n": n}) for n in range(3)]
        assert bench.finished(waiting, float("inf")) == [{"n": 0}, {"n": 1}, {"n": 2}]


@pytest.mark.long
def test_strips_are_compared_with_numpy_and_the_last_row_with_the_oracle(module, monkeypatch) -> None:
    """The check for a GPU beyond 2^31 elements, at a small size of three strips, without a fault and with one wrong bit."""
    torch = pytest.importorskip("torch")
    bench, cast = module("bench_parity"), module("breccia").cast
    monkeypatch.setattr(bench, "STRIP", 11)
    rows = bench.beyond_rows("cpu", (31, 261), 5000)
    assert [row["differing"] for row in rows] == [0] * len(rows) and all(row["bytes"] for row in rows)
    assert [row["values"] for row in rows] == [2 * bench.NEAR] + [31 * 261] * len(bench.BEYOND) + [261]

    def wrong_bit(x, *arguments, **options):
        st = cast(x, *arguments, **options)
        if isinstance(x, torch.Tensor):
            st.data.view(torch.uint8)[-1, 7] ^= 1
        return st

    monkeypatch.setattr(module("breccia"), "cast", wrong_bit)
    found = [row["faults"][0] for row in bench.beyond_rows("cpu", (31, 261), 5000)[1:]]
    assert all("rows 22 on: data[8, 7], byte 0: 0x" in fault for fault in found[:-1]), found
    assert "stochastic, last row: data[0, 7], byte 0: 0x" in found[-1]


@pytest.mark.slow
def test_jax_is_measured_beside_plain_jax() -> None:
    pytest.importorskip("jax")
    done = run("bench_jax.py", "--size", "512", "--runs", "1", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    arms = {arm: {(row["what"], row["case"]) for row in rows if row["arm"] == arm} for arm in ("breccia", "generic", "plain")}
    alone = {case for _, case in arms["breccia"] - arms["plain"]}
    assert alone == {
        "mxfp6",
        "mxfp6 along axis -2",
        "cast_ste and its gradient",
        "cast_ste_clipped",
        "requantize to int8",
    }
    assert arms["plain"] <= arms["breccia"] and arms["generic"] <= arms["breccia"]
    casts = [case for what, case in arms["breccia"] if what == "cast"]
    assert len(casts) == 40 and all(row["min_s"] > 0 for row in rows)
    assert {"one row by int4 (K, N)", "64 rows by mxfp8 (N, K)"} <= {
        case for what, case in arms["generic"] if what == "product"
    }


@pytest.mark.long
def test_plain_lines_of_casts_are_near_the_values_of_breccia(module) -> None:
    """A baseline has to do the same work: on normal numbers, nearly all codes are breccia's."""
    pytest.importorskip("jax")
    import jax.numpy as jnp

    import breccia

    x = np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32)
    for name, line in module("jax_lines").LINES.items():
        for axis in (-1, -2):
            codes = np.asarray(line(jnp.asarray(x), axis)[0])
            expected = breccia.cast(x, name, axis=axis).data
            assert codes.shape == expected.shape, name
            assert (codes.view(np.uint8) == expected.view(np.uint8)).mean() > 0.9, (name, axis)


def test_documents_match_the_results() -> None:
    done = run("draw.py", "--check")
    assert done.returncode == 0, done.stderr


def test_every_benchmark_has_a_result_and_every_table_is_shown(module) -> None:
    draw = module("draw")
    results = draw.load(BENCHMARKS / "results")
    without = {name for name, found in results.items() if not found}
    waiting = {"gpu-casts", "gpu-casts-profile", "gpu-first-call", "gpu-quantize", "matmul-gpu"}
    assert without <= waiting  # these wait for a CUDA device: the page says so
    asked = {
        name
        for page in draw.PAGES
        for _, name, _, _ in module("blocks").BLOCK.findall((ROOT / "docs" / page).read_text("utf-8"))
    }
    assert asked == set(draw.blocks_of(results, draw.plots_of(results)))


@pytest.mark.long
@pytest.mark.parametrize("page", ["benchmarks.md", "accuracy.md", "numerics.md"])
def test_a_manual_edit_of_a_table_is_found(page: str, documents: Path) -> None:
    text = (documents / page).read_text(encoding="utf-8")
    head, mark, rest = text.partition("| nvfp4 |")
    assert mark
    (documents / page).write_text(f"{head}{mark} 1{rest}", encoding="utf-8")
    done = run("draw.py", "--check", "--docs", str(documents))
    assert done.returncode and f"{page} differ(s) from the results" in done.stderr


def test_an_outdated_plot_is_found(documents: Path) -> None:
    plot = sorted((documents / "img").glob("sqnr-*.svg"))[0]
    plot.write_text("<svg/>", encoding="utf-8")
    done = run("draw.py", "--check", "--docs", str(documents))
    assert done.returncode and f"img/{plot.name} differ(s)" in done.stderr


def test_an_unknown_or_unterminated_block_is_refused(documents: Path) -> None:
    page = documents / "accuracy.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("<!-- table: published -->", "<!-- table: publshed -->"), encoding="utf-8")
    assert "asks for a block 'publshed'; there are accuracy," in run("draw.py", "--check", "--docs", str(documents)).stderr
    page.write_text(text + "\n<!-- table: published -->\n", encoding="utf-8")
    assert "without its `<!-- end -->`" in run("draw.py", "--check", "--docs", str(documents)).stderr


def test_a_result_with_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cast-old.json").write_text('{"benchmark": "cast", "schema": 0}', encoding="utf-8")
    done = run("draw.py", "--check", "--results", str(tmp_path))
    assert done.returncode and "cast-old.json holds benchmark 'cast' of schema 0" in done.stderr


@pytest.mark.long
def test_drawing_twice_gives_the_same_bytes(documents: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = []
    for _ in range(2):
        done = run("draw.py", "--docs", str(documents))
        assert done.returncode == 0, done.stderr
        drawn.append({path.name: path.read_bytes() for path in documents.rglob("*.*") if path.is_file()})
    assert drawn[0] == drawn[1]


def test_measured_times_of_kernels_are_ratios_to_the_bound_of_their_product(module) -> None:
    pytest.importorskip("torch")
    matmul, weight_only = module("bench_matmul"), module("bench_weight_only")
    from breccia_triton import bf16_plans, weight_times
    from breccia_triton.cuda import fp8_plans

    bound = fp8_plans.bound(4096, 512, 1024)
    arms = {"breccia": 1.2, "torch, plain scales": 1.5, "torch": 1.4, "humming": 2.0, "deep_gemm": 1.25, "bf16": 3.0}
    times = {name: {"graph": {"median_s": over * bound}} for name, over in arms.items()}
    rows = [{"kind": "tiles", "shape": (4096, 512, 1024), "times": times}]
    rows.append({"kind": "row", "shape": (16, 512, 1024), "times": {"breccia": {"error": "none"}}})
    estimate = bf16_plans.estimate(4096, 512, 1024, 1, [module("breccia").recipe("mxfp8").format] * 2, False)
    times = {"breccia": {"graph": {"median_s": 4 * bound}}, "breccia, through BF16": {"graph": {"median_s": 0.9 * estimate}}}
    rows.append({"kind": "mx", "shape": (4096, 512, 1024), "times": times})
    assert matmul.slowdowns(rows) == {
        "bf16 E4M3/E8M0 E4M3/E8M0 4096x512x1024": 0.9,
        "cuda 1x128 128x128 4096x512x1024": 1.2,
        "cuda 1x32 1x32 4096x512x1024": 4.0,
        "deep_gemm 1x128 128x128 4096x512x1024": 1.25,
        "humming 1x128 128x128 4096x512x1024": 2.0,
        "torch 1x128 128x128 4096x512x1024": 1.5,
    }
    bound = weight_times.bound(16, 8192, 4096, 4 + 16 / 128)
    arms = {"breccia": 1.1, "humming": 1.6, "torch-int4": 3.0, "bf16": 2.0}
    row = {"format": "int4", "n": 8192, "k": 4096, "m": 16, "times": {k: {"median_s": v * bound} for k, v in arms.items()}}
    found = {f"{kernel} INT4/F16 1x128 16": over for kernel, over in (("cuda", 1.1), ("humming", 1.6), ("torch", 3.0))}
    assert weight_only.slowdowns([row]) == found
