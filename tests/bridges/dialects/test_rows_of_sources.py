"""Values whose codes a dialect arranges anew are read by slabs of rows, with the bytes of one that is read whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden_dialects import EXPECTED, REFUSED, read, unpacked

import breccia
from breccia.backend import components, registry
from breccia.bridges import convert, save_safetensors
from breccia.internal import measuring
from breccia_bridges.jobs import Job
from breccia_bridges.measure import FileTensor, RowsOfFile
from breccia_bridges.memory import Estimates, remembered
from breccia_bridges.source import Source, Value

NAME = "model.layers.0.mlp.up_proj.weight"
#: Recipes that `rows` reads as each dialect writes them: codes of all widths; the last item of 3 bits has fewer codes.
RECIPES = [
    ("bitsandbytes", "nf4"),
    ("bitsandbytes", "bnb_fp4,block_size=128"),
    ("hqq", "int4,symmetric=false,group_size=64,offset=float_zero_point"),
    ("hqq", "int8,symmetric=false,scale_dtype=bf16,offset=float_zero_point"),
    *(("hqq", f"int,bits={bits},symmetric=false,group_size=64,offset=float_zero_point") for bits in (1, 2, 3, 5)),
    *(("compressed_tensors", spec) for spec in ("int4", "int4,signed=false,symmetric=false", "int,bits=3")),
    *(("gptq", spec) for spec in ("int4", "int4,symmetric=false", "int8,symmetric=false,scale_dtype=bf16")),
    ("gptq_v2", "int4,symmetric=false,group_size=32,scale_dtype=bf16"),
    ("awq", "int4,symmetric=false"),
    ("quanto", "int_rounded,bits=4,scale_dtype=bf16"),
    ("quanto", "int,bits=2,symmetric=false,offset=bias,scale_dtype=fp32"),
]
GOLDEN = [
    name
    for name, expected in EXPECTED.items()
    if name.startswith(("bnb", "hqq", "quanto", "ct_pack", "gptq", "awq")) and not expected.startswith(REFUSED)
]


def stored(where: Path, dialect: str, spec: str, rows: int) -> Path:
    """A checkpoint in a dialect."""
    folder = where / f"m{rows}"
    folder.mkdir(parents=True)
    x = np.random.default_rng(rows).standard_normal((rows, 512), dtype=np.float32)
    save_safetensors({NAME: x}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama", "torch_dtype": "float32"}')
    convert(folder, where / f"q{rows}", spec, dialect=dialect)
    return where / f"q{rows}"


def value_of(folder: Path) -> Value:
    value = Source.open(folder).values[NAME]
    assert value.stored is not None
    return value


@pytest.mark.parametrize(("dialect", "spec"), RECIPES)
def test_slabs_of_rows_decode_as_the_whole_value_does(dialect: str, spec: str, tmp_path: Path) -> None:
    value = value_of(stored(tmp_path, dialect, spec, 440))
    whole, numbers = breccia.dequantize(value.loaded()), value.numbers()
    assert isinstance(numbers, RowsOfFile) and numbers.unit == FileTensor(value.loaded()).unit == 1
    for start, stop in ((0, 440), (0, 1), (109, 111), (219, 221), (300, 440)):
        assert numbers.values((slice(0, 1), slice(start, stop))).tobytes() == whole[start:stop].tobytes()


@pytest.mark.parametrize("name", GOLDEN)
def test_rows_of_golden_checkpoints_have_the_components_of_the_whole_value(name: str, tmp_path: Path) -> None:
    """Those of other libraries, whose scales may be quantized themselves; of some, rows are not apart."""
    folder, _ = unpacked(name, tmp_path)
    for each in read(folder).values():
        rows, whole = each.rows(), each.tensor()
        as_they_are = name == "bnb_int8" or name.startswith(("quanto_qfloat", "quanto_qint8"))
        assert (rows is None) == (as_they_are or name == "hqq_4bit_axis0" or isinstance(whole.layout, breccia.PerGroupIndex))
        if rows is not None:
            assert whole.ndim == 2
            for start in range(0, whole.shape[0], 3):
                part = slice(start, min(start + 3, whole.shape[0]))
                assert breccia.bytes_equal(rows(part), whole[part])


@pytest.mark.parametrize(("dialect", "spec"), RECIPES[:1] + RECIPES[2:3] + RECIPES[-11:-1])
def test_a_conversion_by_slabs_writes_the_bytes_of_one_slab(
    dialect: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = stored(tmp_path, dialect, spec, 440)
    for recipe in ("nvfp4", "bf16"):
        convert(source, tmp_path / f"whole-{recipe}", recipe)
        with monkeypatch.context() as patch:
            patch.setattr(measuring, "SLAB", 1 << 12)
            report = convert(source, tmp_path / f"slabs-{recipe}", recipe)
        files = [(tmp_path / f"{kind}-{recipe}" / "model.safetensors").read_bytes() for kind in ("whole", "slabs")]
        assert files[0] == files[1] and len(report.tensors) == 1


def test_experts_are_read_by_slabs_of_several_matrices_and_of_rows_of_one(tmp_path: Path) -> None:
    """A value of three axes, as bitsandbytes' blocks over all numbers allow it."""
    x = np.random.default_rng(0).standard_normal((4, 24, 128), dtype=np.float32)
    st = breccia.cast(x, "nf4")

    def rows(part: slice) -> breccia.ScaledTensor:
        return breccia.cast(x.reshape(96, 128), "nf4")[part]

    numbers, whole = RowsOfFile(st.recipe, st.shape, rows), breccia.dequantize(st)
    for slab in ((slice(0, 4), slice(0, 24)), (slice(1, 3), slice(0, 24)), (slice(2, 3), slice(5, 9))):
        assert numbers.values(slab).tobytes() == np.ascontiguousarray(whole[slab]).tobytes()
        codes = numbers.codes(slab)
        assert codes is not None and all(part.ndim == 3 for part in components(codes).values())


@pytest.mark.parametrize(("dialect", "spec"), [RECIPES[0], RECIPES[2], RECIPES[7], *RECIPES[-4:-1]])
def test_memory_does_not_grow_with_a_value_that_is_read_by_rows(dialect: str, spec: str, tmp_path: Path) -> None:
    small, large = (value_of(stored(tmp_path, dialect, spec, rows)) for rows in (4096, 16384))
    recipe, needed = breccia.NVFP4BlockScaling(), Estimates().needed
    assert needed(Job.casting(small, recipe)) == needed(Job.casting(large, recipe))


def test_groups_across_rows_are_taken_whole_and_counted(tmp_path: Path) -> None:
    folder, _ = unpacked("hqq_4bit_axis0", tmp_path)
    value = next(value for value in Source.open(folder).values.values() if value.stored)
    recipe = breccia.NVFP4BlockScaling()
    assert Estimates().besides(Job.casting(value, recipe)) == 3 * value.nbytes


def test_a_scale_that_is_not_finite_is_named_by_its_position_in_the_whole(tmp_path: Path) -> None:
    source = stored(tmp_path, "bitsandbytes", "nf4", 440)
    value = value_of(source)
    path, entry = value.container.path, value.container.entries[f"{NAME}.absmax"]
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little") + entry.start
    raw[start + 4 * 2000 : start + 4 * 2001] = np.float32(np.inf).tobytes()
    path.write_bytes(raw)
    rows = value_of(source).stored.rows()  # pyright: ignore[reportOptionalMemberAccess]
    assert rows is not None and rows(slice(0, 250)).shape == (250, 512)
    wrong = "'.absmax' has 1 scales that are not finite; the first is inf at position 2000."
    with pytest.raises(breccia.DialectError) as refused:
        rows(slice(250, 251))
    assert str(refused.value) == f"{path}: {NAME} (bitsandbytes): {wrong}"
    with pytest.raises(breccia.DialectError) as refused:
        convert(source, tmp_path / "out", "nvfp4")
    assert wrong in str(refused.value) and not (tmp_path / "out").exists()


def test_a_dialect_without_read_has_no_rows() -> None:
    known = registry().dialects["hqq"]
    alone = replace(known, form=None, read=None, stored=None, write=None, remedy="Ask.")
    with pytest.raises(breccia.PluginError, match="^dialect 'hqq': rows is for a dialect with read.$"):
        alone.check()


def test_a_scale_among_columns_is_named_by_its_position_in_the_whole(tmp_path: Path) -> None:
    source = stored(tmp_path, "awq", "int4,symmetric=false", 440)
    value = value_of(source)
    part = NAME.replace(".weight", ".scales")
    path, entry = value.container.path, value.container.entries[part]
    raw = bytearray(path.read_bytes())
    at = 8 + int.from_bytes(raw[:8], "little") + entry.start + entry.nbytes // entry.shape[0] + 2 * 401  # of the second group
    raw[at : at + 2] = b"\x80\x7f" if entry.dtype == "BF16" else b"\x00\x7c"
    path.write_bytes(raw)
    rows = value_of(source).stored.rows()  # pyright: ignore[reportOptionalMemberAccess]
    assert rows is not None and rows(slice(0, 401)).shape == (401, 512)
    with pytest.raises(breccia.DialectError) as refused:
        rows(slice(400, 402))
    assert str(refused.value).endswith("'scales' has 1 scales that are not finite; the first is inf at position 841.")


def test_groups_out_of_order_are_taken_whole_and_counted_beside_those_in_order(tmp_path: Path) -> None:
    folder, _ = unpacked("gptq_v1_int4_asym_desc_act", tmp_path)
    values = [value for value in Source.open(folder).values.values() if value.stored]
    recipe, estimates = breccia.NVFP4BlockScaling(), Estimates()
    needed = remembered(estimates.besides, frozenset())
    found = {isinstance(value.layout, breccia.PerGroupIndex): needed(Job.casting(value, recipe)) for value in values}
    whole = {3 * value.nbytes for value in values if isinstance(value.layout, breccia.PerGroupIndex)}
    assert found.keys() == {False, True} and found[False] == 0 and found[True] in whole
