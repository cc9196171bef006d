"""Estimated times of products: from the measurements that ship for a device, or without them from bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import breccia
from breccia.backend import Call
from breccia.operations import OPERATIONS
from breccia.options import FLOAT32

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from breccia_triton.gemm.bf16 import plans as bf16_plans  # noqa: E402
from breccia_triton.gemm.fp8 import plans as fp8_plans  # noqa: E402
from breccia_triton.gemm.weight_only import plans as weight_plans  # noqa: E402
from breccia_triton.tuning import measurements  # noqa: E402


def cast(spec: str, *shape: int) -> Any:
    return breccia.cast(torch.ones(*shape), spec)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in place of the shipped files, on "Some GPU"."""
    monkeypatch.setattr(measurements, "SHIPPED", tmp_path)
    monkeypatch.setattr(fp8_plans, "device_name", lambda device: "Some GPU")
    monkeypatch.setattr(weight_plans, "device_name", lambda device: "Some GPU")
    measurements.measured.cache_clear()
    yield tmp_path
    measurements.measured.cache_clear()


def test_estimated_times_come_from_the_table_of_the_device(tables: Path) -> None:
    a, w = cast("fp8_block", 4, 256), cast("fp8_block,block_m=128", 128, 256)
    call = Call(OPERATIONS["matmul"], "torch", (a, w.mT, None, FLOAT32, None))
    assert fp8_plans.score(call) < fp8_plans.score_of_torch(call)
    st, x = cast("int4", 128, 256), torch.zeros(16, 256, dtype=torch.bfloat16)
    product = Call(OPERATIONS["matmul"], "torch", (x, st.mT, None, FLOAT32, None))
    fmt, block = st.recipe.format, st.layout.block(-1)
    assert weight_plans.time_key_of(fmt, block, 16) == "cuda INT4/F16 1x128 16"
    assert weight_plans.time_key_of(fmt, block, 4096) == "cuda INT4/F16 1x128 more"
    bound = weight_plans.bound(16, 128, 256, 4 + 16 / 128)
    assert weight_plans.score(product) == pytest.approx(1.3 * bound)  # not measured
    times = {"matmul": {"torch 1x128 128x128 4x128x512": 1.5}, "weight_times": {"cuda INT4/F16 1x128 16": 1.25}}
    for kind, entries in times.items():
        measurements.merge(tables / f"{kind}_some_gpu.json", "Some GPU", entries, {"date": "today"})
    measurements.measured.cache_clear()
    assert fp8_plans.score_of_torch(call) == pytest.approx(1.5 * fp8_plans.bound(4, 128, 256))
    assert weight_plans.score(product) == pytest.approx(1.25 * bound)


def test_products_through_bf16_count_the_time_of_the_host_where_the_fp8_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def score(first: str, second: str) -> float:
        a, w = cast(first, 256, 256), cast(second, 128, 256)
        return bf16_plans.score(Call(OPERATIONS["matmul"], "torch", (a, w.mT, None, FLOAT32, None)))

    monkeypatch.setattr(fp8_plans, "available", lambda device: "no GPU")
    assert score("mxfp8", "mxfp8") < 50e-6
    monkeypatch.setattr(fp8_plans, "available", lambda device: None)
    assert score("mxfp8", "mxfp8") == 125e-6
    assert score("mxfp8", "mxfp4") < 50e-6, "no FP8 kernel multiplies these"


def test_measurements_of_several_runs_are_merged_and_faulty_files_replaced(tables: Path) -> None:
    path = tables / "times_some_gpu.json"
    for entries in ({"one": 1.0, "two": 2.0}, {"two": 3.0}):
        measurements.merge(path, "Some GPU", entries, {})
    assert measurements.measured("times", "Some GPU", measurements.times_over_bound) == {"one": 1.0, "two": 3.0}
    path.write_text("{")
    measurements.merge(path, "Some GPU", {"three": 4.0}, {})
    measurements.measured.cache_clear()
    assert measurements.measured("times", "Some GPU", measurements.times_over_bound) == {"three": 4.0}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ('{"schema": 0}', "its schema is 0; this version of breccia-triton reads 2"),
        ('{"schema": 2, "device": "Other"}', "it is for 'Other', not for 'Some GPU'"),
        ('{"schema": 2, "device": "Some GPU"}', "it has no entries"),
        ('{"schema": 2, "device": "Some GPU", "entries": {"cuda row row": "x"}}', "'x' is not a positive number"),
        ('{"schema": 2, "device": "Some GPU", "entries": {"cuda row row": -1}}', "-1 is not a positive number"),
    ],
)
def test_a_faulty_file_is_left_out_with_its_name_and_fault(tables: Path, text: str, reason: str) -> None:
    (tables / "matmul_some_gpu.json").write_text(text)
    with pytest.warns(UserWarning, match="breccia ignores .*matmul_some_gpu.json: .*") as caught:
        assert fp8_plans.slowdowns("Some GPU") == {}
    assert reason in str(caught[0].message)


def test_tables_without_a_file_or_a_device_are_empty(tables: Path) -> None:
    assert fp8_plans.slowdowns("Some GPU") == weight_plans.slowdowns("Some GPU") == weight_plans.measured_on("Some GPU") == {}
    assert fp8_plans.slowdowns("") == {}


def test_shipped_times_have_keys_of_kernels_that_there_are() -> None:
    for path in (each for kind in ("matmul", "weight_times") for each in measurements.SHIPPED.glob(f"{kind}_*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        for key in found["entries"]:
            assert key.partition(" ")[0] in ("cuda", "torch", "bf16"), (path, key)
