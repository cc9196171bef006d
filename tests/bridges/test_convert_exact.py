"""`convert(..., exact=True)` changes no value, or writes nothing and says why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import breccia
from breccia import InexactError
from breccia.bridges import convert, load_safetensors, save_safetensors
from breccia.cli.main import run

SHAPE = (32, 64)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file with an MXFP4 matrix, whose exponents span few binades, and a plain vector."""
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    path = tmp_path / "mxfp4.safetensors"
    save_safetensors({"mlp.weight": breccia.cast(x, "mxfp4"), "norm": np.ones(64, np.float32)}, path)
    return path


def decoded(path: Path) -> np.ndarray:
    value = load_safetensors(path)["mlp.weight"]
    return breccia.dequantize(value) if isinstance(value, breccia.ScaledTensor) else np.asarray(value, np.float32)


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ("mxfp8", "same codes"),
        ("fp8_block,block_k=32", "new codes"),
        ("nvfp4", "same codes"),  # by the values
        ("fp8_current", "new codes"),  # by the values
    ],
)
def test_values_stay_where_there_is_an_exact_conversion(source: Path, tmp_path: Path, recipe: str, kind: str) -> None:
    report = convert(source, tmp_path / "out.safetensors", recipe, exact=True)
    (kept,) = report.codes_kept
    assert kept.exactness is not None and kept.exactness.kind == kind and not report.requantized
    assert kept.to_dict()["exactness"] == kind
    assert (decoded(source).view(np.uint32) == decoded(tmp_path / "out.safetensors").view(np.uint32)).all()
    assert load_safetensors(tmp_path / "out.safetensors")["mlp.weight"].recipe == breccia.recipe(recipe)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_decoding_is_exact_where_the_dtype_has_the_values(source: Path, tmp_path: Path, dtype: str) -> None:
    convert(source, tmp_path / "out.safetensors", dtype, exact=True)
    assert (decoded(source) == decoded(tmp_path / "out.safetensors")).all()


def test_what_would_change_is_refused_with_the_count_and_nothing_is_written(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    count = breccia.exactness(load_safetensors(source)["mlp.weight"], "int4").changed
    with pytest.raises(InexactError) as caught:
        convert(source, out, "int4", exact=True)
    assert str(caught.value) == (
        f"convert(exact=True): 1 of 2 tensors would change: mlp.weight ({count} of 2048 values: INT4 lacks 3 of the 14 numbers "
        "of E2M1, whatever the power-of-two scale). Leave exact=True (--exact) out to round them, exclude them, or choose a "
        "recipe that `breccia rosetta` calls exact."
    )
    with pytest.raises(InexactError, match="mlp.weight"):
        convert(source, out, "int4", exact=True, dry_run=True)
    assert not out.exists()


def test_quantizing_and_rounding_to_a_dtype_are_refused(tmp_path: Path) -> None:
    plain, fine, out = (tmp_path / f"{name}.safetensors" for name in ("plain", "fine", "out"))
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    save_safetensors({"mlp.weight": x}, plain)
    with pytest.raises(InexactError, match=r"mlp.weight \(it is not quantized in the source, and quantizing rounds\)"):
        convert(plain, out, "mxfp4", exact=True)
    save_safetensors({"mlp.weight": breccia.cast(x, "int8")}, fine)
    with pytest.raises(InexactError, match=r"mlp.weight \(its values are not numbers of BF16\)"):
        convert(fine, out, "bf16", exact=True)
    assert not out.exists()


def test_the_command_says_what_is_exact(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*words: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            run(["convert", str(source), str(tmp_path / "out.safetensors"), "--force", *words])
        captured = capsys.readouterr()
        return ended.value.code, " ".join(captured.out.split()), captured.err

    code, out, _ = printed("--recipe", "fp8_block,block_k=32")
    assert not code and "new codes of 1 tensors that were quantized before: no value changed" in out
    code, out, _ = printed("--recipe", "nvfp4")
    assert not code and "exactness 1 mxfp4 to nvfp4: values decide, exact if exponents of scales span at most 17" in out
    code, out, _ = printed("--recipe", "nvfp4", "--exact")
    assert not code and "codes kept of 1 tensors that were quantized before: no value changed" in out
    code, _, err = printed("--recipe", "int4", "--exact")
    assert code == 1 and err.startswith("error: convert(exact=True): 1 of 2 tensors would change: mlp.weight")
