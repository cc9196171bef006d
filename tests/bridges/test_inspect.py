"""`breccia inspect` reads only headers by default, scales on request, and reports suspicious tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from program import Run
from safetensors.numpy import save_file

import breccia
from breccia.bridges import save_safetensors
from breccia.testing.examples import every_decodable
from breccia_bridges.inspection import inspected, tile
from breccia_bridges.safetensors_file import Container
from breccia_bridges.safetensors_writer import Writer


def rows(path: Path, scales: bool = False) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in inspected(path, scales).rows}


def doubts(path: Path, scales: bool = False) -> dict[str, list[str]]:
    return {name: row["suspicious"] for name, row in rows(path, scales).items() if row["suspicious"]}


def test_converted_tensors_are_not_suspicious(recipe: breccia.ScalingRecipe, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((20, 96), np.float32)
    x[:, 32:64] = 0  # blocks of zeros have scales 0, 1 or the smallest scale
    save_safetensors({"w": breccia.cast(x, recipe), "norm": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    assert doubts(tmp_path / "m.safetensors") == {}
    assert doubts(tmp_path / "m.safetensors", scales=True) == {}


def test_the_range_of_the_stored_scales_is_reported(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((20, 96), np.float32)
    st = breccia.cast(x, breccia.Float8BlockScaling(block_k=32))
    save_safetensors({"w": st, "norm": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    found = rows(tmp_path / "m.safetensors", scales=True)
    expected = {"count": 60, "min": float(st.scale.min()), "median": float(np.median(st.scale)), "max": float(st.scale.max())}
    assert found["w"]["scales"] == expected and found["norm"]["scales"] is None
    assert rows(tmp_path / "m.safetensors")["w"]["scales"] is None


def test_without_scales_no_tensor_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_safetensors({"w": breccia.cast(np.ones((4, 32), np.float32), breccia.MXFP8BlockScaling())}, tmp_path / "m.safetensors")
    monkeypatch.setattr(Container, "array", lambda self, name: pytest.fail(f"read {name}"))
    assert rows(tmp_path / "m.safetensors")["w"]["stored_as"] == "mxfp8"


def test_with_scales_the_codes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_safetensors({"w": breccia.cast(np.ones((4, 32), np.float32), breccia.NVFP4BlockScaling())}, tmp_path / "m.safetensors")
    real, read = Container.read, []
    monkeypatch.setattr(Container, "read", lambda self, name: (read.append(name), real(self, name))[1])
    inspected(tmp_path / "m.safetensors", scales=True)
    assert read == ["w.scale", "w.global_scale"]


def test_unusual_scales_of_every_codec_are_reported(tmp_path: Path) -> None:
    def tensor(scale: np.ndarray) -> breccia.ScaledTensor:
        data = np.zeros((len(scale), 16), np.uint8)
        return breccia.from_buffer(data, scale.astype(np.float32)[:, None], breccia.Float8BlockScaling(block_k=16), LAYOUT)

    x = np.random.default_rng(0).standard_normal((4, 32), np.float32)
    bad = x.copy()
    bad[1, 3] = np.nan
    tensors = {
        "nan": breccia.cast(bad, breccia.MXFP8BlockScaling()),
        "inf": tensor(np.array([1, np.inf, 2])),
        "negative": tensor(np.array([1, -1, 2])),
        "zero": tensor(np.array([1, 0, 0])),
        "subnormal": tensor(np.array([1, 2.0**-130, 2])),
        "outlier": tensor(np.array([3, 3, 2, 3, 15000])),
        "ones": tensor(np.ones(5)),
        "fine": tensor(np.array([1, 2, 900])),
    }
    save_safetensors(tensors, tmp_path / "m.safetensors")
    assert doubts(tmp_path / "m.safetensors", scales=True) == {
        "nan": ["scale: 1 of 4 NaN (their blocks contained NaN or Inf)"],
        "inf": ["scale: 1 of 3 Inf"],
        "negative": ["scale: 1 of 3 negative"],
        "zero": ["scale: 2 of 3 zero"],
        "subnormal": ["scale: 1 of 3 subnormal in FP32, which some hardware reads as zero"],
        "outlier": ["scale: the largest is 5e+03 times the median"],
        "ones": ["scale: all are 1, as for blocks of zeros, or as if none had been computed"],
    }


LAYOUT = breccia.PerBlockK(16)


def test_scales_of_other_libraries_are_found_by_name_and_checked_by_shape(tmp_path: Path) -> None:
    eights = np.zeros((256, 300), np.uint8).view(ml_dtypes.float8_e4m3fn)
    tensors = {
        "deepseek.weight": eights,
        "deepseek.weight_scale_inv": np.full((2, 3), 0.5, np.float32),
        "static.weight": eights,
        "static.weight_scale": np.float32(0.25).reshape(()),
        "row.weight": eights,
        "row.weight_scale": np.full((256, 1), 2.0, np.float32),
        "mx.weight": eights,
        "mx.scales": np.full((256, 10), 127, np.uint8),
        "alone.weight": eights,
        "odd.weight": eights,
        "odd.weight_scale": np.ones((7, 7), np.float32),
        "counted.weight": eights,
        "counted.weight_scale": np.ones((2, 3), np.int32),
        "bias": np.zeros(4, np.uint8).view(ml_dtypes.float8_e4m3fn),
    }
    with Writer(tmp_path / "m.safetensors", {n: (DTYPES[a.dtype.name], a.shape) for n, a in tensors.items()}) as w:
        for name, array in tensors.items():
            w.write(name, array)
    found = rows(tmp_path / "m.safetensors", scales=True)
    assert {n: (r["scaled_by"], r["block"]) for n, r in found.items() if r["scaled_by"]} == {
        "deepseek.weight": ("deepseek.weight_scale_inv", (128, 128)),
        "static.weight": ("static.weight_scale", (256, 300)),
        "row.weight": ("row.weight_scale", (1, 300)),
        "mx.weight": ("mx.scales", (1, 32)),
        "odd.weight": ("odd.weight_scale", None),
        "counted.weight": ("counted.weight_scale", (128, 128)),
    }
    assert {n: r["scales"]["max"] for n, r in found.items() if r["scales"]}["mx.weight"] == 1.0, "U8 is E8M0"
    assert doubts(tmp_path / "m.safetensors") == {
        "alone.weight": ["F8_E4M3 codes without scales under any name that breccia knows"],
        "odd.weight": ["odd.weight_scale of shape 7x7 does not tile shape 256x300"],
        "counted.weight": ["counted.weight_scale is I32, which is not a scale dtype"],
    }


DTYPES = {"float8_e4m3fn": "F8_E4M3", "float32": "F32", "uint8": "U8", "int32": "I32"}


@pytest.mark.parametrize(
    ("shape", "scales", "block"),
    [
        ((256, 256), (2, 2), (128, 128)),
        ((100, 100), (1, 1), (100, 100)),
        ((100, 100), (), (100, 100)),
        ((100, 129), (100, 2), (1, 128)),
        ((100, 96), (100, 3), (1, 32)),
        ((100, 90), (100, 3), (1, 32)),
        ((10, 9), (10,), (1, 9)),
        ((10, 9), (6, 1), None),
        ((10, 9), (20, 1), None),
        ((10, 9), (0, 1), None),
        ((10, 9), (1, 10, 9), None),
        ((12,), (4,), (3,)),
        ((15,), (5,), (3,)),
    ],
)
def test_the_block_follows_from_the_shape_of_the_scales(shape: Any, scales: Any, block: Any) -> None:
    assert tile(shape, scales) == block


def test_float_scales_of_another_dtype_than_the_recipe_has_are_reported(tmp_path: Path) -> None:
    x = breccia.cast(np.random.default_rng(0).standard_normal((4, 32), np.float32), breccia.INT4Scaling(group_size=16))
    kept = breccia.from_buffer(x.data, x.scale.astype(np.float32), x.recipe, x.layout)
    save_safetensors({"w": kept}, tmp_path / "m.safetensors")
    assert doubts(tmp_path / "m.safetensors") == {"w": ["its scales are F32; the recipe writes F16"]}
    assert rows(tmp_path / "m.safetensors", scales=True)["w"]["scales"]["max"] == float(x.scale.max())


def test_inspect_prints_ranges_and_doubts(tmp_path: Path, run: Run) -> None:
    x = np.random.default_rng(0).standard_normal((4, 32), np.float32)
    x[0, 0] = np.inf
    save_safetensors({"w": breccia.cast(x, breccia.Float8BlockScaling(block_k=16))}, tmp_path / "m.safetensors")
    code, out, err = run("inspect", tmp_path / "m.safetensors", "--scales")
    assert (code, err) == (0, "")
    assert "suspicious: w: scale: 1 of 8 NaN (their blocks contained NaN or Inf)" in out
    assert " to " in out and "scales, min to max" in out
    code, out, _ = run("inspect", tmp_path / "m.safetensors")
    assert "suspicious" not in out and "scales, least" not in out
    code, out, _ = run("inspect", tmp_path / "m.safetensors", "--scales", "--json")
    row = json.loads(out)["tensors"][0]
    assert row["suspicious"] and row["scales"]["count"] == 8


def test_a_tensor_of_another_library_is_printed_with_its_blocks(tmp_path: Path, run: Run) -> None:
    with Writer(tmp_path / "m.safetensors", {"a.weight": ("F8_E4M3", (256, 256)), "a.weight_scale_inv": ("F32", (2, 2))}) as w:
        w.write("a.weight", np.zeros((256, 256), np.uint8))
        w.write("a.weight_scale_inv", np.ones((2, 2), np.float32))
    code, out, _ = run("inspect", tmp_path / "m.safetensors")
    assert code == 0 and "fp8_block  " in out and "1 tensors, 1 of them scaled" in out
    assert (
        "block FP8, as DeepSeek-V3 (deepseek_v3): 1 values, recognized by\n  a.weight_scale_inv is F32, a.weight is F8_E4M3\n"
        in out
    )


def test_every_file_that_decodes_can_be_inspected(recipe: breccia.ScalingRecipe, tmp_path: Path) -> None:
    st = every_decodable(recipe)
    save_safetensors({"w": st}, tmp_path / "m.safetensors")
    assert rows(tmp_path / "m.safetensors", scales=True)["w"]["scales"]["count"] == st.scale.size


def test_plain_files_have_no_scales(tmp_path: Path) -> None:
    save_file({"w": np.ones((4, 4), np.float32)}, tmp_path / "m.safetensors")
    assert rows(tmp_path / "m.safetensors", scales=True)["w"] | {"bytes": 0} == {
        "name": "w",
        "file": "m.safetensors",
        "shape": [4, 4],
        "stored_as": "F32",
        "type": None,
        "dialect": None,
        "recipe": None,
        "layout": None,
        "scaled_by": None,
        "block": None,
        "scales": None,
        "parameters": 16,
        "bytes": 0,
        "suspicious": [],
    }


def test_packed_codes_of_other_libraries_are_not_suspicious(tmp_path: Path) -> None:
    fp4, scale = np.zeros((64, 32), np.uint8), np.zeros((64, 4), np.uint8)
    one = np.ones((), np.float32)
    layouts = {
        "a.weight": ("U8", fp4), "a.weight_scale": ("F8_E4M3", scale), "a.weight_scale_2": ("F32", one),
        "b.weight_packed": ("U8", fp4), "b.weight_scale": ("F8_E4M3", scale), "b.weight_global_scale": ("F32", one),
    }  # fmt: skip
    with Writer(tmp_path / "m.safetensors", {name: (dtype, x.shape) for name, (dtype, x) in layouts.items()}) as w:
        for name, (_, x) in layouts.items():
            w.write(name, x)
    assert doubts(tmp_path / "m.safetensors") == {}
    found = rows(tmp_path / "m.safetensors")
    assert {n: (r["scaled_by"], r["block"]) for n, r in found.items() if r["scaled_by"]} == {
        "a.weight": ("a.weight_scale", (1, 16)),
        "b.weight": ("b.weight_scale", (1, 16)),
    }
    assert {row["stored_as"] for row in found.values()} == {"nvfp4"} and sum(
        row["parameters"] for row in found.values()
    ) == 8192


def test_a_config_that_contradicts_its_components_is_found_from_the_header(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((8, 64), np.float32)
    save_safetensors({"w": breccia.cast(x, breccia.NVFP4BlockScaling())}, tmp_path / "m.safetensors")
    whole = (tmp_path / "m.safetensors").read_bytes()
    assert whole.count(b'\\"shape\\":[8,64]') == 1
    (tmp_path / "m.safetensors").write_bytes(whole.replace(b'\\"shape\\":[8,64]', b'\\"shape\\":[9,64]'))
    assert doubts(tmp_path / "m.safetensors") == {
        "w": [
            "its data has shape 8x32; its config says 9x64, which needs 9x32",
            "its scale has shape 8x4; its config says 9x64, which needs 9x4",
        ]
    }


def test_a_tensor_of_an_unknown_recipe_is_shown_with_the_data_in_its_file(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "m.safetensors"
    mine = breccia.cast(np.ones((4, 64), np.float32), breccia.Float8BlockScaling(block_k=32))
    save_safetensors({"known": mine, "w": mine, "norm": np.ones(3, np.float32)}, path)
    opened = Container(path)
    metadata = dict(opened.metadata)
    metadata["w.config"] = metadata["w.config"].replace('"name":"fp8_block"', '"name":"acme6"')
    changed = tmp_path / "acme.safetensors"
    with Writer(changed, {name: (e.dtype, e.shape) for name, e in opened.entries.items()}, metadata) as writer:
        for name in opened.entries:
            writer.write(name, opened.array(name))
    found = rows(changed, scales=True)
    assert list(found) == ["known", "norm", "w"]
    assert (found["w"]["stored_as"], found["w"]["shape"]) == ("acme6", [4, 64])
    assert found["w"]["bytes"] == found["known"]["bytes"] and found["w"]["recipe"]["name"] == "acme6"
    (doubt,) = found["w"]["suspicious"]
    assert doubt.startswith("its recipe 'acme6' is declared by no installed plug-in. Known: ")
    assert "Install the plug-in that declares it; `breccia plugins` lists the installed and the disabled ones" in doubt
    assert found["known"]["suspicious"] == []
    code, out, _ = run("inspect", changed)
    assert code == 0 and "acme6" in out and "suspicious: w: its recipe 'acme6' is declared by no installed plug-in" in out
    code, _, err = run("compare", path, changed)
    assert code == 1 and f"{changed}: tensor 'w': its recipe 'acme6' is declared by no installed plug-in" in err


def test_inspect_sorts_and_shows_the_first_tensors(tmp_path: Path, run: Run) -> None:
    x = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    tensors = {
        "b": breccia.cast(x, breccia.NVFP4BlockScaling()),
        "a": x[:8].copy(),
        "c": breccia.cast(x, breccia.MXFP8BlockScaling()),
        "d": np.zeros((0, 4), np.float32),
    }
    path = tmp_path / "m.safetensors"
    save_safetensors(tensors, path)

    def names(*words: str) -> list[str]:
        code, out, err = run("inspect", path, *words)
        assert (code, err) == (0, "")
        return [line.split()[-1] for line in out.splitlines()[1:] if line[0] != " " and "tensors" not in line]

    assert names() == names("--sort", "name") == ["a", "b", "c", "d"]
    assert names("--sort", "bytes") == ["c", "b", "a", "d"]
    assert names("--sort", "bits") == ["a", "c", "b", "d"], "a tensor without elements has no bits per parameter"
    assert names("--sort", "stored-as") == ["a", "d", "c", "b"]
    assert names("--sort", "bytes", "--top", "2") == ["c", "b"]
    _, out, _ = run("inspect", path, "--top", "3")
    assert "1 of 4 tensors not shown; --top 4 shows all\n4 tensors, 2 of them scaled" in out
    assert run("inspect", path, "--json") == run("inspect", path, "--json", "--sort", "bits", "--top", "1")


@pytest.mark.parametrize("command", ["convert", "compare", "inspect"])
def test_help_speaks_of_checkpoints_of_other_libraries_and_shows_commands_that_parse(command: str, run: Run) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0 and "another library" in " ".join(out.split()) and "--from DIALECT" in out
    examples = [line.split() for line in out.splitlines() if line.startswith("  breccia ")]
    assert examples
    for _, *words in examples:
        assert words[0] == command
        code, _, err = run(*words)
        assert code == 1 and "no checkpoint " in err, "the line is valid, and the file missing"
