"""Golden vectors match the oracle, every backend writes and decodes them, and a C program written from the pages agrees."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import long_but
from paths import ROOT
from recipes import recipe_id

import breccia
from breccia import targets
from breccia.arrays import frameworks
from breccia.arrays.frameworks import Device, ops_of
from breccia.codecs import CODECS, Codec
from breccia.dispatch.registry import Plugin, Registry, _installed, registry
from breccia.formats import OFFSETS, ORDERS
from breccia.recipes import RECIPES, choices_of
from breccia.rules import RULES
from breccia.testing import __main__ as program
from breccia.testing import steps, two_codecs, vector_inputs, vectors
from breccia.testing.laws import trying
from breccia.testing.two_codecs import TwoCodecs
from breccia.testing.vectors import PARTS, Vector

SETS = ROOT / "docs" / "spec" / "vectors"
FOLDER = SETS / "1"
#: SHA-256 of the index of each published set, which holds those of its other files. A line is added, never changed.
PUBLISHED = {
    1: "2e4d15f2a1ff722cf844d7b62fc3207cd7482aa6616aa2cbca86611c629837b6",
    2: "e569eef811098dfa7934348cbe447cb5846416c1efe33f2f3057f744c6826ac5",
    3: "5ad42777bdf1a1f2654a911c8e8d7f4349da945a1d06601107e57f0380fbdf7a",
    4: "a9a47b76828ce7dea267f47654b4dfca3620180d44d7c51d14d4e7739ea35773",
    5: "6db8dfddd2d2ce2d3ae38a89340086f8b0131158ed84dc0e25a3ca20c824649e",
    6: "db9fd36fc895c7d8f4d21436838f9333b0bc1b19285993f49571ef8fcf5587f0",
    7: "6cbfaec675f4f153d05e002c85d6212d0ad8b096542d488700bdf75a617408dc",
}
of_each_set = pytest.mark.parametrize("version", PUBLISHED)


@pytest.fixture(scope="module", autouse=True)
def recipes_of_the_kit_registered() -> Iterator[None]:
    """torch's operators find a recipe by its name, so those of sets 4 and 7 are registered here."""
    modules = {"two_codecs": two_codecs, "steps": steps}
    plugins = [(Plugin(name, "breccia-core", breccia.__version__, of.__name__), of) for name, of in modules.items()]
    with pytest.MonkeyPatch.context() as patch:
        made = [(plugin, partial(_itself, module)) for plugin, module in plugins]
        patch.setattr(frameworks, "current", Registry([*_installed(), *made], {**os.environ}))
        yield


def _itself(module: Any) -> Any:
    return module


@pytest.fixture(scope="module")
def published() -> list[Vector]:
    """The vectors of all sets."""
    return [v for version in PUBLISHED for v in vectors.read(SETS / str(version))]


def name_of(v: Vector) -> str:
    return f"{recipe_id(v.recipe)} {v.edge}"


def parts_of(v: Vector) -> dict[str, bytes | None]:
    return {name: None if (part := getattr(v, name)) is None else part.tobytes() for name in PARTS}


# -- the files -------------------------------------------------------------------------------------------------------


@of_each_set
def test_a_published_set_never_changes(version: int) -> None:
    raw = (SETS / str(version) / vectors.INDEX).read_bytes()
    assert hashlib.sha256(raw).hexdigest() == PUBLISHED[version]
    for name, facts in json.loads(raw)["files"].items():
        held = (SETS / str(version) / name).read_bytes()
        assert (len(held), hashlib.sha256(held).hexdigest()) == (facts["bytes"], facts["sha256"]), name


def test_every_set_is_known_here() -> None:
    assert {p.name for p in SETS.iterdir()} == set(map(str, PUBLISHED)) and max(PUBLISHED) == vectors.VERSION


def test_inputs_and_options_match_the_generator(published: list[Vector]) -> None:
    inputs = ("input", "supplied", "importance", "group_index")
    for found, wanted in zip(published, vectors.inputs(), strict=True):
        options = ("recipe", "edge", "dtype", "axis", "rounding", "seed", "shape")
        assert [getattr(found, name) for name in options] == [getattr(wanted, name) for name in options]
        for name in inputs:
            a, b = getattr(found, name), getattr(wanted, name)
            assert (a is None) == (b is None) and (a is None or np.array_equal(a, b)), name_of(found)


def assert_has_the_oracles_results(v: Vector) -> None:
    again = vectors.with_results(Vector(**{f.name: getattr(v, f.name) for f in fields(v) if f.name not in PARTS[2:]}))
    assert parts_of(again) == parts_of(v), name_of(v)


@pytest.mark.long
def test_a_sample_matches_the_oracle(published: list[Vector]) -> None:
    """Every eleventh vector, which includes each recipe and each edge, and all that are only decoded or have an index."""
    sample = [v for n, v in enumerate(published) if n % 11 == 0 or v.recipe.decode_only or v.group_index is not None]
    assert {v.recipe for v in sample} == {v.recipe for v in published}
    assert {v.edge for v in sample} == {*vectors.EDGES, vectors.STORED, vectors.IMPORTANCE, vectors.GROUP_INDEX}
    for v in sample:
        assert_has_the_oracles_results(v)


@pytest.mark.slow
def test_all_vectors_match_the_oracle(published: list[Vector]) -> None:
    for v in published:
        assert_has_the_oracles_results(v)


@of_each_set
def test_the_files_follow_from_the_vectors(version: int) -> None:
    folder = SETS / str(version)
    for name, raw in vectors.files(vectors.read(folder), version).items():
        assert raw == (folder / name).read_bytes(), name


@of_each_set
def test_the_text_index_matches_the_json_index(version: int) -> None:
    """Read as words, by the fields that docs/spec/vectors.md lists."""
    folder = SETS / str(version)
    index = json.loads((folder / vectors.INDEX).read_text())
    words = iter((folder / vectors.TEXT).read_text().split())

    def number(value: Any) -> int:
        return -1 if value is None else value

    assert [next(words) for _ in range(4)] == [
        "breccia-vectors",
        str(version),
        str(len(index["codecs"])),
        str(len(index["cases"])),
    ]
    for c in index["codecs"]:
        first = c["values"][0] if c["kind"] == "table" else c.get("mantissa_bits", c.get("fraction_bits", 0))
        kind = c["kind"] if c.get("signed", True) else "magnitude"
        said = [c["name"], kind, c["bits"], first, c.get("bias", 0), number(c.get("nan")), number(c.get("inf"))]
        assert [next(words) for _ in said] == [str(fact) for fact in said]
    for place, case in enumerate(index["cases"]):
        r = index["recipes"][case["recipe"]]
        block = [side or 0 for side in r["format"]["levels"][-1]["block"]]
        shape = case["shape"] if case["axis"] == -1 else [case["shape"][1], case["shape"][0]]
        said = [place, r["recipe"]["name"], case["edge"], r["format"]["element"], r["format"]["levels"][-1]["codec"]]
        said += [r["format"]["offset"], r["rules"][-1], *block, case["axis"]]
        said += [shape[0] if len(shape) == 3 else 1, *shape[-2:], case["dtype"], case["rounding"], case["seed"] or 0]
        said += [case[part][0] if part in case else -1 for part in PARTS]
        if version > 2:
            levels = r["format"]["levels"][r["format"]["levels"][0]["block"] == [None, None] :]
            coarse = (levels[0]["codec"], levels[0]["block"][1]) if len(levels) > 1 else (-1, -1)
            said += [*coarse, int("offset_levels" in r["format"]), r["format"].get("order", "codes_first")]
            said += [r["format"]["levels"][0].get("convention", "multiplier")]
        if version > 3:
            said.append(r["format"].get("alternative", -1))
        if version > 4:
            said.append(case.get("importance", [-1])[0])
        if version > 5:
            said += r["format"].get("rotation", [0, 0])
        if version > 6:
            said += [r["format"].get("factor", 0x3F800000), r["format"].get("precision", "fp32")]
            said += [case.get("group_index", [-1])[0], case.get("groups", 0)]
        assert [next(words) for _ in said] == [str(fact) for fact in said]
    assert next(words, None) is None


@of_each_set
def test_fingerprints_in_the_index_match_its_recipes(version: int) -> None:
    for r in json.loads((SETS / str(version) / vectors.INDEX).read_text())["recipes"]:
        recipe = vectors.recipe_of(r["recipe"])
        assert (recipe.fingerprint(), recipe.format.fingerprint()) == (r["fingerprint"], r["format"]["fingerprint"])


# -- coverage --------------------------------------------------------------------------------------------------------


def test_every_scale_rule_of_every_recipe_is_covered_at_every_edge(published: list[Vector]) -> None:
    found = {(type(v.recipe), v.recipe.rules[-1].name, v.edge) for v in published}
    for kind in RECIPES:
        taken = {kind().rules[-1].name}
        for rule in RULES:
            try:
                taken.add(kind(scale_rule=rule.name).rules[-1].name)  # type: ignore[call-arg]
            except (breccia.RecipeError, TypeError):  # a rule, or a field, that this recipe does not have
                continue
        # INT8's rules are there in groups; by rows it differs in the blocks alone. Coded scales are not supplied.
        coded = kind().format.scale_record is not None
        edges = [edge for edge, (_, options) in vectors.EDGES.items() if not (coded and "supplied" in options)]
        assert {(kind, rule, edge) for rule in taken for edge in edges} <= found, kind


def test_every_type_of_gguf_is_covered(published: list[Vector]) -> None:
    kinds = {v.recipe.type: v.edge for v in published if isinstance(v.recipe, breccia.GGUFScaling)}
    assert set(kinds) == set(choices_of(breccia.GGUFScaling, "type")[0])
    assert {kind for kind, edge in kinds.items() if edge == vectors.STORED} == {"IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0"}


def test_every_codec_and_offset_is_covered(published: list[Vector]) -> None:
    """Except UE4M3, which no built-in recipe declares."""
    formats = {v.recipe.format for v in published}
    scales = {breccia.codecs.E8M0, breccia.codecs.UE4M3, breccia.codecs.UE5M3}
    assert {f.element for f in formats} == {c for c in CODECS if c.bits <= 8} - scales
    one_level = {f.scale.codec.name for f in formats if f.scale_record is None}
    assert one_level == {"F32", "F16", "BF16", "E8M0", "E4M3", "E5M2", "UE5M3"}
    assert {f.scale.codec.name for f in formats if f.scale_record is not None} == {"UINT4", "UINT6", "INT6", "INT8"}
    assert {f.offset for f in formats} == set(OFFSETS) and any(f.global_scale for f in formats)
    assert {f.order for f in formats} == set(ORDERS) and any(f.offset_record for f in formats)


def test_factors_precisions_and_groups_are_covered(published: list[Vector]) -> None:
    """Those of bitsandbytes, quanto and HQQ, with each offset, and with an index that has an empty group."""
    formats = {v.recipe.format for v in published}
    assert {(f.offset, f.precision) for f in formats if f.precision != "fp32"} == {
        ("none", "bf16"), ("bias", "bf16"), ("bias", "fp16"), ("float_zero_point", "bf16"), ("float_zero_point", "fp16"),
    }  # fmt: skip
    factors = {(f.offset, bool(f.global_scale), bool(f.scale_record)) for f in formats if f.factor != 1}
    assert factors == {("none", False, False), ("none", True, False), ("bias", False, False), ("none", False, True)}
    indexed = [v for v in published if v.group_index is not None]
    assert {v.recipe.format.offset for v in indexed} == set(OFFSETS)
    assert {v.axis for v in indexed} == {-1, -2}
    assert all(set(v.group_index.tolist()) == {0, 1, 3} for v in indexed if v.group_index is not None)


def test_formats_of_other_libraries_are_those_of_their_recipes(published: list[Vector]) -> None:
    recipes = pytest.importorskip("breccia_bridges.recipes")
    found = {v.recipe.format for v in published}
    for wanted in (
        recipes.BnbINT8Scaling("fp32"),
        recipes.RoundedIntScaling(4, 16),
        recipes.RoundedIntScaling(4, 16, "bf16", "float_zero_point"),
        recipes.RoundedIntScaling(3, 16, "fp16", "float_zero_point"),
    ):
        assert wanted.format in found, wanted


def test_ordinary_blocks_of_both_codecs_are_covered(published: list[Vector]) -> None:
    for kind in choices_of(TwoCodecs, "type")[0]:
        found = [v for v in published if v.recipe == TwoCodecs(kind) and v.edge == "ordinary"]
        signs = np.asarray(found[0].scale).reshape(-1) >> 7
        assert len(found) == 1 and 0 < signs.sum() < signs.size, kind


def test_edges_contain_the_inputs_they_are_named_after(published: list[Vector]) -> None:
    """For the default MXFP8 recipe."""
    v = {v.edge: v for v in published if v.recipe == breccia.MXFP8BlockScaling()}
    magnitude = {edge: case.input & 0x7FFFFFFF for edge, case in v.items() if case.dtype == "float32"}
    decoded = {edge: np.asarray(case.decoded) & 0x7FFFFFFF for edge, case in v.items()}
    assert {0, 0x80000000} <= set(v["zeros"].input.ravel().tolist())
    assert ((magnitude["subnormals"] > 0) & (magnitude["subnormals"] < 0x00800000)).sum() > 32
    for edge in ("nan", "inf"):
        assert (magnitude[edge] >= 0x7F800000).any() and 0 < (decoded[edge] > 0x7F800000).sum() < decoded[edge].size
    assert magnitude["largest"].max() == 0x7F7FFFFF and magnitude["smallest"].max() == 0x00800001
    assert np.ptp(magnitude["wide"] >> 23) > 200
    assert np.array_equal(v["stochastic"].input, v["ordinary"].input)
    assert not np.array_equal(np.asarray(v["stochastic"].data), np.asarray(v["ordinary"].data))
    assert v["ragged"].shape == (2, 2, 59) and v["axis=-2"].shape == (59, 3) and v["axis=-2"].axis == -2
    assert 255 in np.asarray(v["faulty"].scale) and 255 not in np.asarray(v["supplied"].scale)
    ties, e4m3 = v["ties"].input.view(np.float32), breccia.codecs.E4M3
    values = {e4m3.value(code) for code in range(256)}
    halfway = {(a + b) / 2 for a, b in zip(sorted(values - {np.nan}), sorted(values - {np.nan})[1:], strict=False)}
    assert len(set(ties[0].tolist()) & halfway) > 50


# -- the backends ----------------------------------------------------------------------------------------------------

#: Framework, kernels of cast (None is whichever serves), and of dequantize; then one in how many vectors the fast suite takes,
#: and the slow one. JAX compiles for each shape and recipe.
BACKENDS: dict[str, tuple[str, tuple[str, ...] | None, str | None, int, int]] = {
    "numpy reference": ("numpy", ("reference.cast",), "reference.dequantize", 1, 1),
    "numpy kernels": ("numpy", ("numpy.cast", "reference.cast"), "numpy.dequantize", 1, 1),
    "numpy native": ("numpy", ("native.cast", "reference.cast"), "native.dequantize", 1, 1),
    "torch": ("torch", None, None, 1, 1),
    "torch reference": ("torch", ("reference.cast",), "reference.dequantize", 3, 1),
    "jax": ("jax", None, None, 181, 7),
    "mlx": ("mlx", None, None, 3, 1),
}


def need(framework: str, kernels: tuple[str, ...] | None) -> Any:
    """The framework's backend primitives. Skips if the framework or the first kernel is not available."""
    pytest.importorskip({"mlx": "mlx.core"}.get(framework, framework))
    declared = registry().frameworks.get(framework)
    if declared is None:
        pytest.skip(f"no plug-in declares {framework}")
    if kernels is not None:
        found = next((k for k in registry().table.kernels if k.name == kernels[0]), None)
        reason = "no plug-in declares it" if found is None else found.available and targets.load(found.available)(Device("cpu"))
        if reason:
            pytest.skip(f"{kernels[0]}: {reason}")
    return targets.load(declared.ops)


def array(ops: Any, bits: np.ndarray, dtype: str) -> Any:
    """Bit patterns as an array of the framework."""
    if ops_of(bits) is ops:
        return bits.view(np.dtype(pytest.importorskip("ml_dtypes").bfloat16) if dtype == "bfloat16" else dtype)
    return ops.from_numpy(bits, "bfloat16") if dtype == "bfloat16" else ops.from_numpy(bits.view(dtype))


def scale_array(ops: Any, codes: np.ndarray | None, codec: Codec) -> Any:
    """Codes of scales as the framework stores them."""
    if codes is None:
        return None
    return ops.store(ops.load(ops.from_numpy(codes)), ops.storage(codec))


def differences(v: Vector, framework: str, ops: Any, cast: tuple[str, ...] | None, dequantize: str | None) -> list[str]:
    """The arrays that a backend writes or decodes differently."""
    x, supplied = array(ops, v.input, v.dtype), scale_array(ops, v.supplied, v.recipe.format.levels[0].codec)
    options = {"axis": v.axis, "rounding": v.rounding, "seed": v.seed}
    if v.recipe.decode_only:
        scale = scale_array(ops, v.scale, v.recipe.format.scale_codec)
        st = breccia.from_buffer(
            ops.from_numpy(np.asarray(v.data)), scale, v.recipe, v.recipe.layout.fitted(v.shape), shape=v.shape
        )
    else:
        importance = None if v.importance is None else array(ops, v.importance, "float32")
        if v.group_index is not None:
            index = breccia.PerGroupIndex(tuple(v.group_index.tolist()), vector_inputs.GROUPS)
            options = {"axis": v.axis, "group_index": index}
        st = breccia.cast(x, v.recipe, scale=supplied, importance=importance, prefer=cast, **options)
    assert st.framework == framework and st.shape == v.shape
    wrong: list[str] = []
    for name in ("data", "scale", "zero_point", "global_scale"):
        found, wanted = getattr(st, name), getattr(v, name)
        held = None if found is None else (tuple(found.shape), np.ascontiguousarray(ops.to_numpy(found)).tobytes())
        if held != (None if wanted is None else (wanted.shape, wanted.tobytes())):
            wrong.append(name)
    decoded = np.ascontiguousarray(ops.to_numpy(breccia.dequantize(st, prefer=dequantize))).view(np.uint32)
    return wrong + ["decoded"] * (not same(framework, decoded, np.asarray(v.decoded)))


def same(framework: str, found: np.ndarray, wanted: np.ndarray) -> bool:
    """Any NaN equals any NaN. XLA alone may return signed zeros for results below 2^-126 (the contract, section 4)."""
    a, b = found & 0x7FFFFFFF, wanted & 0x7FFFFFFF
    equal = (found == wanted) | ((a > 0x7F800000) & (b > 0x7F800000))
    if framework == "jax":
        equal |= (b < 0x00800000) & (found == wanted & 0x80000000)
    return bool(equal.all())


def knows(names: tuple[str, ...], v: Vector) -> bool:
    """Whether the kernels named are asked about the format of a vector; without names, any kernel is."""
    return all(trying.knows(k, v.recipe) for k in registry().table.kernels if k.name in names)


def assert_backend_agrees(name: str, chosen: list[Vector]) -> None:
    framework, cast, dequantize, *_ = BACKENDS[name]
    ops = need(framework, cast)
    known = [v for v in chosen if knows(cast[:1] if cast else (), v) and knows((dequantize,) if dequantize else (), v)]
    wrong: dict[str, list[str]] = {}
    for v in known:  # not all kernels take an index: whichever do serve it
        kernels = (cast, dequantize) if v.group_index is None else (None, None)
        if found := differences(v, framework, ops, *kernels):
            wrong[name_of(v)] = found
    assert not wrong


@pytest.mark.parametrize("name", long_but(("numpy kernels", "numpy native", "torch", "mlx"), BACKENDS))
def test_a_backend_writes_and_decodes_the_vectors(published: list[Vector], name: str) -> None:
    assert_backend_agrees(name, published[:: BACKENDS[name][3]])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (*_, fast, slow) in BACKENDS.items() if slow < fast])
def test_a_backend_writes_and_decodes_more_of_the_vectors(published: list[Vector], name: str) -> None:
    assert_backend_agrees(name, published[:: BACKENDS[name][4]])


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "mlx"])
def test_a_supplied_scale_of_2_to_the_minus_127_is_kept(published: list[Vector], framework: str) -> None:
    """E8M0 code 0 is a positive number, also where comparisons flush FP32 subnormals."""
    ops = need(framework, None)
    v = next(v for v in published if v.recipe == breccia.MXFP4BlockScaling() and v.edge == "faulty")
    assert 0 in np.asarray(v.scale) and not differences(v, framework, ops, None, None)


def test_a_wrong_bit_in_any_array_is_detected(published: list[Vector]) -> None:
    v = next(v for v in published if v.recipe == breccia.NVFP4BlockScaling() and v.edge == "ordinary")
    ops = ops_of(v.input)
    assert differences(v, "numpy", ops, None, None) == []
    for name in ("data", "scale", "global_scale", "decoded"):
        changed = np.array(getattr(v, name))
        changed.reshape(-1).view(np.uint8)[0] ^= 1
        other = Vector(**{f.name: changed if f.name == name else getattr(v, f.name) for f in fields(v)})
        assert differences(other, "numpy", ops, None, None) == [name]


# -- the package -----------------------------------------------------------------------------------------------------


def test_the_package_reads_the_same_cases(published: list[Vector]) -> None:
    """breccia_vectors works out shapes, bits and unpacked codes from the index, without recipes."""
    package = pytest.importorskip("breccia_vectors", reason="breccia-vectors reads the same files")
    for case, v in zip(package.cases(), published, strict=True):
        facts = (case.edge, case.dtype, case.shape, case.axis, case.rounding, case.seed, case.format.fingerprint)
        assert facts == (v.edge, v.dtype, v.shape, v.axis, v.rounding, v.seed, v.recipe.fingerprint()), case.name
        for name in (*PARTS, vectors.IMPORTANCE, vectors.GROUP_INDEX):
            found, wanted = getattr(case, name), getattr(v, name)
            assert found == (None if wanted is None else wanted.tobytes()), (case.name, name)
            if wanted is not None:
                assert case.stored(name) == (wanted.shape, 8 * wanted.itemsize), (case.name, name)
                array = np.asarray(case.array(name))
                assert array.shape == wanted.shape and array.tobytes() == wanted.tobytes()
        codes = np.frombuffer(case.codes, np.uint8).reshape(case.k_last if v.axis == -1 else case.shape)
        k_last = codes if v.axis == -1 else codes.swapaxes(-1, -2)
        data = np.asarray(v.data) if v.axis == -1 else np.asarray(v.data).swapaxes(-1, -2)
        assert vectors.packed(k_last, v.recipe.format.element).tobytes() == data.tobytes(), case.name


# -- reading and writing ---------------------------------------------------------------------------------------------


def test_reading_refuses_a_file_that_was_changed(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "1")
    raw = bytearray((folder / vectors.BYTES).read_bytes())
    raw[5000] ^= 1
    (folder / vectors.BYTES).write_bytes(raw)
    with pytest.raises(breccia.CorruptFileError, match="vectors.bin does not match its hash in index.json; fetch") as e:
        vectors.read(folder)
    assert e.value.found == {"file": "vectors.bin"}


def test_writing_never_changes_a_set(tmp_path: Path, published: list[Vector]) -> None:
    made = vectors.files(published[:3])
    assert vectors.write(tmp_path, made) == tmp_path / str(vectors.VERSION) and vectors.write(
        tmp_path, made
    )  # the same bytes again
    other = vectors.files(published[:4])
    with pytest.raises(FileExistsError, match="vectors.bin differs from what .* A published set never changes: set VERSION"):
        vectors.write(tmp_path, other)
    assert {p.name: p.read_bytes() for p in (tmp_path / str(vectors.VERSION)).iterdir()} == made


def test_the_command_writes_the_golden_vectors(
    tmp_path: Path, published: list[Vector], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vectors, "inputs", lambda version: iter(published[:2]))
    monkeypatch.setattr(sys, "argv", ["breccia.testing", "vectors", str(tmp_path)])
    program.main()
    assert capsys.readouterr().out == f"{tmp_path / '7'}\n"
    assert [parts_of(v) for v in vectors.read(tmp_path / str(vectors.VERSION))] == [parts_of(v) for v in published[:2]]
    (tmp_path / str(vectors.VERSION) / vectors.TEXT).write_text("mine")
    with pytest.raises(SystemExit, match=r"error: .*index.txt differs from what"):
        program.main()
