"""Folders as today's models are published: `inspect` counts what their architecture says, and every reader reads them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import model_folders
import numpy as np
import pytest
from paths import ROOT
from program import Run

import breccia
from breccia.bridges import compare, convert, load_checkpoint
from breccia_bridges.inspection import inspected

#: (dialect, recipe or dtype): (tensors, parameters, bytes), counted by hand.
Counts = dict[tuple[str | None, str], tuple[int, int, int]]
Shape = tuple[int, ...]


def total(shapes: Iterable[Shape]) -> int:
    """The sum of the products of lengths."""
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes)


def blocks(shapes: Iterable[Shape], rows: int, columns: int) -> int:
    """The number of blocks of matrices, with partial ones at the ends."""
    return sum(-(-m // rows) * -(-k // columns) for m, k in shapes)


def plain(shapes: list[Shape], width: int) -> tuple[int, int, int]:
    return len(shapes), total(shapes), width * total(shapes)


def deepseek_v4() -> tuple[model_folders.Model, Counts]:
    sizes = {"layers": 2, "hash_layers": 1, "hidden": 256, "vocabulary": 384, "heads": 4, "head": 96, "q_rank": 128}
    sizes |= {"o_rank": 64, "o_groups": 2, "experts": 4, "per_token": 2, "width": 128, "hyper": 4}
    attention = [(128, 256), (4 * 96, 128), (96, 256), (2 * 64, 4 * 96 // 2), (256, 2 * 64)]
    expert = [(128, 256), (256, 128), (128, 256)]
    fp8, fp4 = 2 * (attention + expert), 2 * 4 * expert
    bf16 = [(384, 256), (256,), (384, 256), *(2 * [(128,), (96,), (256,), (256,), (4, 256)])]
    # Sinks, two connections of (2 + 4) * 4 rows, and the bias of the router of the layer that has one.
    f32 = [*(2 * [(4,), *(2 * [(24, 4 * 256), (24,), (3,)])]), (4,)]
    fp8_block = ("deepseek_v4", "fp8_block,block_m=128,power_of_two_scale=true")
    return model_folders.deepseek_v4(**sizes), {
        fp8_block: (16, total(fp8), total(fp8) + blocks(fp8, 128, 128)),
        ("deepseek_v4", "mxfp4"): (24, total(fp4), total(fp4) // 2 + blocks(fp4, 1, 32)),
        (None, "BF16"): plain(bf16, 2),
        (None, "F32"): plain(f32, 4),
        (None, "I32"): plain([(384, 2)], 4),
    }


def gpt_oss() -> tuple[model_folders.Model, Counts]:
    sizes = {"layers": 2, "hidden": 96, "vocabulary": 384, "heads": 4, "kv_heads": 2, "head": 32, "experts": 4, "width": 64}
    experts = 2 * 4 * [(2 * 64, 96), (96, 64)]
    attention = [(128, 96), (128,), (64, 96), (64,), (64, 96), (64,), (96, 128), (96,), (4,)]
    layer = [*attention, (4, 96), (4,), (4, 2 * 64), (4, 96), (96,), (96,)]
    return model_folders.gpt_oss(**sizes), {
        # Two stacks a layer.
        ("gpt_oss", "mxfp4"): (4, total(experts), total(experts) // 2 + blocks(experts, 1, 32)),
        (None, "BF16"): plain([*(2 * layer), (384, 96), (96,), (384, 96)], 2),
    }


def kimi() -> tuple[model_folders.Model, Counts]:
    sizes = {"layers": 3, "dense_layers": 1, "hidden": 128, "vocabulary": 384, "heads": 2, "q_rank": 96, "kv_rank": 64}
    sizes |= {"nope": 32, "rope": 16, "value": 32, "experts": 4, "width": 64, "dense_width": 256}
    experts = 2 * 4 * [(64, 128), (64, 128), (128, 64)]
    attention = [(96, 128), (96,), (2 * 48, 96), (64 + 16, 128), (64,), (2 * 64, 64), (128, 2 * 32), (128,), (128,)]
    mlp, shared = [(256, 128), (256, 128), (128, 256)], [(64, 128), (64, 128), (128, 64)]
    bf16 = [*(3 * attention), *mlp, *(2 * [*shared, (4, 128)]), (384, 128), (128,), (384, 128)]
    # Codes, BF16 scales per 32, and the two lengths of each in I32.
    size = total(experts) // 2 + 2 * blocks(experts, 1, 32) + 8 * len(experts)
    return model_folders.kimi(**sizes), {
        ("compressed_tensors", "int4,group_size=32,scale_dtype=bf16"): (24, total(experts), size),
        (None, "BF16"): plain(bf16, 2),
        (None, "F32"): plain([(4,), (4,)], 4),
    }


LLAMA = {"layers": 2, "hidden": 256, "vocabulary": 384, "heads": 4, "kv_heads": 2, "head": 64}
ATTENTION = 2 * [(256, 256), (128, 256), (128, 256), (256, 256)]
MLP = 2 * [(512, 256), (512, 256), (256, 512)]
LLAMA_PLAIN = [(384, 256), (256,), (384, 256), *(4 * [(256,)])]


def modelopt() -> tuple[model_folders.Model, Counts]:
    return model_folders.modelopt(**LLAMA, width=512), {
        ("modelopt", "fp8_current"): (8, total(ATTENTION), total(ATTENTION) + 4 * 8),
        ("modelopt", "nvfp4,order=scales_first"): (6, total(MLP), total(MLP) // 2 + blocks(MLP, 1, 16) + 4 * 6),
        (None, "BF16"): plain(LLAMA_PLAIN, 2),
        # A scale of the inputs of each matrix, and two of the cache of each layer.
        (None, "F32"): plain([()] * (8 + 6 + 2 * 2), 4),
    }


def compressed_tensors() -> tuple[model_folders.Model, Counts]:
    fp8 = total(ATTENTION), total(ATTENTION) + 2 * blocks(ATTENTION, 128, 128)  # scales in BF16
    return model_folders.compressed_tensors(**LLAMA, width=512), {
        ("compressed_tensors", "fp8_block,block_m=128"): (8, *fp8),
        ("compressed_tensors", "nvfp4,global_sense=divisor"): (6, total(MLP), total(MLP) // 2 + blocks(MLP, 1, 16) + 4 * 6),
        (None, "BF16"): plain(LLAMA_PLAIN, 2),
        (None, "F32"): plain([(1,)] * 6, 4),
    }


def mlx() -> tuple[model_folders.Model, Counts]:
    four = [(384, 256), (384, 256), *(2 * [(256, 256), (128, 256), (256, 256), *(4 * [(128, 256), (128, 256)])])]
    six, eight = 2 * [(128, 256), *(4 * [(256, 128)])], 2 * [(4, 256)]
    integers = "group_size=64,signed=false,scale_dtype=bf16,symmetric=false,offset=bias"

    def size(shapes: list[Shape], bits: int) -> tuple[int, int]:
        return total(shapes), total(shapes) * bits // 8 + 2 * 2 * blocks(shapes, 1, 64)

    return model_folders.mlx(**LLAMA, experts=4, width=128), {
        # A layer has three matrices of attention and two stacks of four experts in 4 bits, one matrix and one stack in 6.
        ("mlx", f"int4,{integers}"): (2 + 2 * (3 + 2), *size(four, 4)),
        ("mlx", "mlx_affine,bits=6,scale_dtype=bf16"): (2 * (1 + 1), *size(six, 6)),
        ("mlx", f"int8,{integers}"): (2, *size(eight, 8)),
        (None, "BF16"): plain([(256,), *(2 * [(256,), (256,), (64,), (64,)])], 2),
    }


MODELS = [deepseek_v4, gpt_oss, kimi, modelopt, compressed_tensors, mlx]


@pytest.mark.parametrize("made", MODELS)
def test_what_inspect_counts_is_what_the_architecture_says(made: Any, tmp_path: Path, run: Run) -> None:
    model, expected = made()
    folder = model.write(tmp_path / "model", 3)
    code, out, err = run("inspect", folder, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["problem"] is None
    counted = {(k["dialect"], k["stored_as"]): (k["tensors"], k["parameters"], k["bytes"]) for k in found["kinds"]}
    assert counted == expected
    scaled = sum(count for (dialect, _), (count, _, _) in expected.items() if dialect)
    assert [d["values"] for d in found["dialects"]] == [scaled]
    assert [row["suspicious"] for row in found["tensors"] if row["suspicious"]] == []
    spread = [row["name"] for row in found["tensors"] if ", " in row["file"]]
    assert len(spread) == 2, "of three shards, two end within a value"
    tensors, parameters, size = (sum(column) for column in zip(*expected.values(), strict=True))
    assert found["bytes"] == size == json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    _, out, _ = run("inspect", folder)
    said = f"{tensors} tensors, {scaled} of them scaled; {parameters:,} parameters in "
    assert said in out and f"{8 * size / parameters:.3f} bits per parameter\n" in out
    for (_, stored_as), (count, of, nbytes) in expected.items():
        (line,) = [line for line in out.splitlines() if line.endswith(f" {stored_as}") and f" {of:,} " in line]
        assert line.split()[0] == str(count) and f" {8 * nbytes / of:.3f} " in line


@pytest.mark.together
def test_the_page_shows_what_inspect_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    page = (ROOT / "docs" / "dialects.md").read_text(encoding="utf-8")
    shown = page.partition("For a small DeepSeek-V4:\n\n```text\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    deepseek_v4()[0].write(Path("v4"), 3)
    _, out, _ = run("inspect", "v4")
    assert shown and out.endswith(shown)


@pytest.mark.parametrize("made", MODELS)
def test_every_value_of_the_folder_is_loaded_and_none_is_suspicious(made: Any, tmp_path: Path) -> None:
    model, expected = made()
    folder = model.write(tmp_path / "model", 3)
    checkpoint = load_checkpoint(folder)
    counts: dict[str, list[int]] = {}
    for value in checkpoint.values():
        scaled = isinstance(value, breccia.ScaledTensor)
        if scaled:
            assert np.isfinite(breccia.dequantize(value)).all()
        one = counts.setdefault(value.recipe.spec if scaled else "plain", [0, 0])
        one[0], one[1] = one[0] + 1, one[1] + int(np.prod(value.shape))
    others = [two for (dialect, _), two in expected.items() if dialect is None]
    wanted = {spec: [count, of] for (dialect, spec), (count, of, _) in expected.items() if dialect}
    assert counts == wanted | {"plain": [sum(count for count, _, _ in others), sum(of for _, of, _ in others)]}
    assert [row for row in inspected(folder, scales=True).rows if row["suspicious"]] == []


@pytest.mark.parametrize("made", [deepseek_v4, *(pytest.param(made, marks=pytest.mark.long) for made in MODELS[1:])])
def test_the_folder_is_converted_and_compared(made: Any, tmp_path: Path) -> None:
    model, expected = made()
    folder = model.write(tmp_path / "model", 3)
    scaled = sum(count for (dialect, _), (count, _, _) in expected.items() if dialect)
    parameters = sum(of for (dialect, _), (_, of, _) in expected.items() if dialect)
    kept = convert(folder, tmp_path / "none", "none")
    assert len(kept.codes_kept) == len(kept.quantized) == scaled
    assert sum(t.parameters for t in kept.quantized) == parameters
    assert compare(folder, tmp_path / "none").verdict.startswith("equal: ")
    dense = convert(folder, tmp_path / "bf16", "bf16")
    assert not dense.quantized and "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    again = convert(folder, tmp_path / "mxfp8", "mxfp8")
    assert again.quantized and compare(folder, tmp_path / "mxfp8").sqnr > 20
    assert {row["dialect"] for row in inspected(tmp_path / "mxfp8").rows} == {"breccia", None}


#: Of processor time: they take 4 and 9 on a small virtual machine; copying all data takes many minutes.
SECONDS = 30


@pytest.mark.slow
def test_a_folder_of_a_terabyte_is_inspected_from_its_headers_in_seconds(tmp_path: Path) -> None:
    deepseek = {"layers": 40, "hash_layers": 3, "hidden": 7168, "vocabulary": 129280, "heads": 128, "head": 512, "q_rank": 1536}
    deepseek |= {"o_rank": 1024, "o_groups": 16, "experts": 256, "per_token": 6, "width": 8704, "hyper": 4}
    kimi = {"layers": 40, "dense_layers": 1, "hidden": 7168, "vocabulary": 163840, "heads": 64, "q_rank": 1536, "kv_rank": 512}
    kimi |= {"nope": 128, "rope": 64, "value": 128, "experts": 192, "width": 11264, "dense_width": 18432}
    models = {"deepseek": model_folders.deepseek_v4(**deepseek), "kimi": model_folders.kimi(**kimi)}
    values = {"deepseek": 40 * (8 + 3 * 256), "kimi": 39 * 3 * 192}
    for name, model in models.items():
        folder = model.write(tmp_path / name, 150, sparse=True)
        assert len(model.tensors) > 60_000 and sum(file.stat().st_size for file in folder.iterdir()) > 1e12
        started = time.process_time()
        found = inspected(folder)
        seconds = time.process_time() - started
        print(f"{name}: {len(model.tensors)} tensors, {sum(row['bytes'] for row in found.rows) / 1e12:.2f} TB: {seconds:.1f} s")
        assert found.problem == "" and found.dialects[0]["values"] == values[name]
        assert seconds < SECONDS
