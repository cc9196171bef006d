"""`breccia diff` names planted differences by their cause, and is silent about equal checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from golden_dialects import unpacked
from planted_differences import PLANTED, Planted, W, of, spoiled, weights
from program import Run
from recipes import RECIPES, recipe_id

import breccia
from breccia import ScaledTensor
from breccia.backend import components, registry
from breccia.bridges import convert, diff, save_safetensors
from breccia.internal import measuring, with_parts
from breccia_bridges.causes import CAUSES


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_named_by_its_cause(name: str, tmp_path: Path) -> None:
    one = PLANTED[name]
    found = one.found(tmp_path)
    assert (found.cause, found.why) == (one.cause, one.why)


@pytest.mark.parametrize("name", PLANTED)
def test_the_same_difference_is_found_from_the_other_side(name: str, tmp_path: Path) -> None:
    """Letters change places in the sentence, and nothing else does, but where it names a place."""
    one = PLANTED[name]
    found = Planted(one.b, one.a, one.cause, one.why, one.original).found(tmp_path)
    assert found.cause == one.cause


@pytest.mark.parametrize("name", PLANTED)
def test_a_cause_that_leaves_one_value_different_is_not_named(name: str, tmp_path: Path) -> None:
    one = PLANTED[name]
    changed = {n: spoiled(x) for n, x in one.b.items()}
    found = Planted(one.a, changed, one.cause, one.why, one.original).found(tmp_path)
    assert (found.cause, found.state) == ("unknown", "different")


def test_every_cause_is_planted() -> None:
    assert {one.cause for one in PLANTED.values()} == {cause.name for cause in CAUSES}


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_equal_checkpoints_have_no_difference(recipe: breccia.ScalingRecipe, tmp_path: Path) -> None:
    """The same bytes in two files, and the decoded values in FP32."""
    st = breccia.cast(weights(shape=(16, 96)), recipe)
    norm = weights(shape=(16,))
    save_safetensors({W: st, "norm": norm}, tmp_path / "a.safetensors")
    save_safetensors({"norm": norm, W: st}, tmp_path / "b.safetensors")
    save_safetensors({W: breccia.dequantize(st), "norm": norm}, tmp_path / "plain.safetensors")
    for b, state in (("b", "same bytes"), ("plain", "same values")):
        report = diff(tmp_path / "a.safetensors", tmp_path / f"{b}.safetensors")
        assert report.equal and {t.name: t.state for t in report.tensors} == {W: state, "norm": "same bytes"}
        assert not any(t.cause or t.why for t in report.tensors)


#: Every dialect with its own recipe; gpt_oss has blocks along the other axis, and its experts' shapes.
WRITTEN = [
    (name, spec)
    for name, dialect in registry().dialects.items()
    if dialect.write is not None and dialect.file is None and name != "gpt_oss"
    for spec in dialect.recipes[:1]
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    names = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "down"))
    tensors = {name: weights(n, (256, 256)).astype(ml_dtypes.bfloat16) for n, name in enumerate(names)}
    save_safetensors(tensors | {"model.norm.weight": np.ones(256, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.mark.parametrize(("dialect", "spec"), WRITTEN, ids=lambda text: text)
def test_a_model_that_another_dialect_stores_is_equal(dialect: str, spec: str, model: Path, tmp_path: Path) -> None:
    """As the dialect writes it, and the same codes in breccia's own files."""
    convert(model, tmp_path / "theirs", spec, dialect=dialect)
    convert(tmp_path / "theirs", tmp_path / "ours", "none")
    report = diff(tmp_path / "theirs", tmp_path / "ours")
    assert report.equal, report.different
    assert report.verdict.startswith("equal: all tensors have the same values, 2 of 3 in other bytes")


@pytest.mark.parametrize("axis", [-1, -2])
def test_blocks_along_either_axis_are_explained(axis: int, tmp_path: Path) -> None:
    x = weights()
    st, other = (breccia.cast(x, f"mxfp4,scale_rule={rule}", axis=axis) for rule in ("rceil", "floor"))
    missing = with_parts(st, components(st) | {"scale": np.full_like(st.scale, 127)})
    assert of(st, missing, "", "").found(tmp_path).cause == "scale_missing"
    for n, (planted, cause) in enumerate(
        ((of(x, other, "", ""), "quantized"), (of(st, other, "", "", x), "scale_rule"), (of(st, x[0], "", ""), "unknown"))
    ):
        folder = tmp_path / str(n)
        folder.mkdir()
        assert planted.found(folder).cause == cause


def test_one_checkpoint_read_in_two_versions_of_its_dialect_differs_in_zero_points(tmp_path: Path) -> None:
    """GPTQ's two versions have the same tensors; the first stores zero-points less by one."""
    folder, _ = unpacked("gptq_v1_int4_asym_desc_act", tmp_path)
    report = diff(folder, folder, source_dialect=("gptq", "gptq_v2"))
    assert report.causes == {"zero_point_shift": 2}
    assert {t.why for t in report.different} == {"The zero-points of B are those of A less by one."}


def test_a_factor_beyond_fp32_is_not_named(tmp_path: Path) -> None:
    x = np.array([1e-30, 1e-31], np.float32)
    assert of(x, np.array([1e30, 1e31], np.float32), "", "").found(tmp_path).cause == "unknown"


def test_zeros_of_both_signs_and_nan_are_equal(tmp_path: Path) -> None:
    x = np.array([[0.0, np.nan, 1.0]], np.float32)
    save_safetensors({"w": x}, tmp_path / "a.safetensors")
    save_safetensors({"w": np.array([[-0.0, -np.nan, 1.0]], np.float32)}, tmp_path / "b.safetensors")
    assert diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").equal


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints with a difference of each state."""
    mxfp4, x = breccia.cast(weights(), "mxfp4"), weights()
    both = {"norm": np.ones(8, np.float32)}
    a = {
        "nibbles": mxfp4,
        "ids": np.arange(4),
        "odd": x,
        "shape": x,
        "code": mxfp4,
        "gone": np.ones(3, np.float32),
        "old": weights(1, (5,)),
    }
    b = {
        "nibbles": PLANTED["nibbles"].b[W],
        "ids": np.arange(1, 5),
        "odd": weights(9),
        "shape": x[:8],
        "code": spoiled(mxfp4),
        "new": weights(1, (5,)),
        "more": np.ones(7, np.float32),
    }
    save_safetensors(a | both, tmp_path / "a.safetensors")
    save_safetensors(b | both, tmp_path / "b.safetensors")
    return tmp_path / "a.safetensors", tmp_path / "b.safetensors"


UNEXPLAINED = "No tested cause explains it; SQNR "
VERDICT = (
    "different: 5 with other values, 2 only in A, 2 only in B, of 10 tensors; causes: 4 unknown, 2 renamed, 1 nibble_order"
)


def test_what_no_cause_explains_is_described(pair: tuple[Path, Path]) -> None:
    found = {t.name: t for t in diff(*pair).tensors}
    assert {name: (t.state, t.cause) for name, t in found.items()} == {
        "nibbles": ("different", "nibble_order"),
        "ids": ("different", "unknown"),
        "odd": ("different", "unknown"),
        "shape": ("different", "unknown"),
        "code": ("different", "unknown"),
        "gone": ("only in A", ""),
        "old": ("only in A", "renamed"),
        "norm": ("same bytes", ""),
        "new": ("only in B", "renamed"),
        "more": ("only in B", ""),
    }
    assert found["ids"].why == "Bytes differ, and I64 is not floating: no cause was tested."
    assert found["shape"].why == "Shapes differ: 64x256 and 8x256."
    sqnr = breccia.metrics(weights(), weights(9)).sqnr
    assert found["odd"].why.startswith(f"{UNEXPLAINED}{sqnr:.2f} dB, largest difference ")
    assert found["code"].why.endswith(
        ". By component: codes differ in 1 of 8192 items, scales equal. Give the original to test rules of scales and rounding "
        "too."
    )
    assert (found["old"].why, found["new"].why) == ("B has what A has here as new.", "A has what B has here as old.")
    assert found["old"].stored_as == ("F32", None) and found["new"].stored_as == (None, "F32")


def test_integers_of_other_shapes_are_not_tested(tmp_path: Path) -> None:
    save_safetensors({"ids": np.arange(4)}, tmp_path / "a.safetensors")
    save_safetensors({"ids": np.arange(6)}, tmp_path / "b.safetensors")
    (found,) = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").different
    assert found.why == "Shapes differ: 4 and 6. Bytes differ, and I64 is not floating: no cause was tested."


def test_components_of_another_shape_are_named_and_a_given_original_is_not_asked_for(tmp_path: Path) -> None:
    x = breccia.cast(weights(), "fp8_row")
    other = ScaledTensor(x.data, 2 * x.scale.reshape(64, 1) + weights(3, (64, 1)) ** 2, x.recipe, x.layout)
    flat = ScaledTensor(x.data, x.scale.reshape(-1), x.recipe, x.layout)
    found = of(flat, other, "", "", weights(5)).found(tmp_path)
    assert found.why.endswith(". By component: codes equal, scales of another shape or dtype.")


def test_the_command_prints_a_row_for_each_difference_and_exits_with_1(pair: tuple[Path, Path], run: Run) -> None:
    code, out, err = run("diff", *pair)
    lines = out.splitlines()
    assert (code, err) == (1, "")
    assert lines[:2] == [f"A: {pair[0]}", f"B: {pair[1]}"]
    assert lines[2].split() == ["cause", "in", "A", "in", "B", "tensor", "why"]
    assert lines[3].split(maxsplit=4) == [
        "nibble_order", "mxfp4", "mxfp4", "nibbles", "The codes of 4 bits within each byte are in reverse."
    ]  # fmt: skip
    assert lines[8].split() == ["only", "in", "A", "F32", "–", "gone"]
    assert lines[-2:] == ["same bytes: 1 of 10 tensors, same values: 0 of 10 tensors", f"verdict: {VERDICT}"]
    code, out, _ = run("diff", *pair, "--top", "2")
    assert code == 1 and "2 of 9 tensors" not in out and "7 of 9 tensors not shown; --top 9 shows all" in out


def test_the_command_exits_with_0_for_equal_checkpoints(pair: tuple[Path, Path], tmp_path: Path, run: Run) -> None:
    code, out, _ = run("diff", pair[0], pair[0])
    assert code == 0 and out.splitlines()[2:] == [
        "same bytes: 8 of 8 tensors, same values: 0 of 8 tensors",
        "verdict: equal: all tensors have the same bytes",
    ]
    st = breccia.cast(weights(), "mxfp4")
    save_safetensors({"w": st}, tmp_path / "st.safetensors")
    save_safetensors({"w": breccia.dequantize(st)}, tmp_path / "x.safetensors")
    code, out, _ = run("diff", tmp_path / "st.safetensors", tmp_path / "x.safetensors")
    assert code == 0 and out.splitlines()[2:] == [
        "same bytes: 0 of 1 tensors, same values: 1 of 1 tensors",
        "verdict: equal: all tensors have the same values, 1 of 1 in other bytes",
    ]


def test_the_commands_json_is_the_report(pair: tuple[Path, Path], run: Run) -> None:
    code, out, _ = run("diff", *pair, "--json")
    said = json.loads(out)
    assert code == 1 and said == diff(*pair).to_dict()
    assert (said["equal"], said["verdict"], said["original"]) == (False, VERDICT, None)
    assert said["causes"] == {"unknown": 4, "renamed": 2, "nibble_order": 1}
    assert said["tensors"][5] == {
        "name": "gone",
        "state": "only in A",
        "shape": [3],
        "stored_as": ["F32", None],
        "cause": None,
        "why": None,
    }


def test_the_command_takes_the_original(tmp_path: Path, run: Run) -> None:
    one = PLANTED["scale rule"]
    one.found(tmp_path)
    paths = [tmp_path / f"{name}.safetensors" for name in ("a", "b", "original")]
    code, out, _ = run("diff", *paths[:2], "--original", paths[2], "--json")
    said = json.loads(out)
    assert (code, said["original"]) == (1, str(paths[2])) and [t["why"] for t in said["tensors"]] == [one.why]


def test_the_command_takes_the_dialect_of_both_or_of_each(pair: tuple[Path, Path], run: Run) -> None:
    for option in ("--from", "--a-from", "--b-from"):
        code, _, err = run("diff", *pair, option, "gptq")
        refused = pair[1] if option == "--b-from" else pair[0]
        assert code == 1 and f"{refused}: no tensors are a value of GPTQ" in err
    code, _, err = run("diff", *pair, "--from", "gptq", "--b-from", "gptq")
    assert code == 2 and "--from is for A and B; give it, or --a-from and --b-from." in err


def test_a_missing_checkpoint_is_an_error(pair: tuple[Path, Path], tmp_path: Path, run: Run) -> None:
    for words in ((pair[0], tmp_path / "none"), (*pair, "--original", tmp_path / "none")):
        code, out, err = run("diff", *words)
        assert (code, out) == (1, "") and err.startswith(f"error: no checkpoint {tmp_path / 'none'}")


def test_progress_is_by_the_tensors_of_a(pair: tuple[Path, Path]) -> None:
    seen: list[tuple[str, int]] = []
    diff(*pair, advance=lambda name, count: seen.append((name, count)))
    assert [name for name, _ in seen] == ["nibbles", "ids", "odd", "shape", "code", "gone", "old", "norm"]
    assert dict(seen)["odd"] == 64 * 256 * 4


def test_values_are_read_by_slabs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every planted difference is found also where tensors have several slabs."""
    monkeypatch.setattr(measuring, "SLAB", 2048)
    for name, one in PLANTED.items():
        folder = tmp_path / name.replace("'", "")
        folder.mkdir()
        assert one.found(folder).cause == one.cause, name
