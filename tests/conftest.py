"""What tests share: one list of recipes worth testing, and arrays that reach every branch of the contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import pytest

from breccia import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    INT4Scaling,
    INT8Scaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    MXINT8BlockScaling,
    NF4Scaling,
    NVFP4BlockScaling,
    ScaledTensor,
    ScalingRecipe,
    from_buffer,
)
from breccia.kernels import reference
from breccia.ops import NUMPY

#: The program, called: its words, to (exit code, standard output, standard error).
Run = Callable[..., tuple[int, str, str]]

RECIPES: list[ScalingRecipe] = [
    DelayedScaling(),
    DelayedScaling("E5M2", margin=3),
    DelayedScaling(margin=-126),
    DelayedScaling(margin=126),
    DelayedScaling(margin=3, scale_rule="te"),
    Float8CurrentScaling(),
    Float8CurrentScaling("E5M2"),
    Float8CurrentScaling(scale_rule="te"),
    Float8CurrentScaling("E5M2", scale_rule="divide"),
    Float8RowScaling(),
    Float8RowScaling("E5M2", scale_rule="recip"),
    Float8BlockScaling(),
    Float8BlockScaling("E5M2", block_k=16),
    Float8BlockScaling(block_k=16, block_m=4),
    Float8BlockScaling(block_k=8, block_m=2, power_of_two_scale=True),
    Float8BlockScaling(block_k=16, scale_rule="recip"),
    Float8BlockScaling(block_k=16, scale_rule="divide"),
    Float8BlockScaling(block_k=16, scale_rule="te"),
    Float8BlockScaling(block_k=16, block_m=2, power_of_two_scale=True, scale_rule="te"),
    MXFP8BlockScaling(),
    MXFP8BlockScaling("E5M2"),
    MXFP8BlockScaling(scale_rule="floor"),
    MXFP8BlockScaling(scale_rule="even"),
    MXFP6BlockScaling(),
    MXFP6BlockScaling("E3M2"),
    MXFP6BlockScaling("E3M2", scale_rule="floor"),
    MXFP4BlockScaling(),
    MXFP4BlockScaling(scale_rule="even"),
    MXINT8BlockScaling(),
    MXINT8BlockScaling(scale_rule="floor"),
    MXINT8BlockScaling(scale_rule="even"),
    NVFP4BlockScaling(),
    NVFP4BlockScaling(two_level=False),
    INT4Scaling(),
    INT4Scaling(group_size=16, scale_dtype="bf16"),
    INT4Scaling(group_size=16, scale_dtype="fp32"),
    INT4Scaling(group_size=16, signed=False),
    INT4Scaling(group_size=16, signed=False, symmetric=False),
    INT4Scaling(group_size=8, signed=False, symmetric=False, scale_dtype="fp32"),
    INT4Scaling(group_size=16, scale_rule="half_range"),
    INT4Scaling(group_size=16, signed=False, symmetric=False, offset="bias"),
    INT4Scaling(group_size=8, signed=False, symmetric=False, scale_dtype="bf16", offset="bias"),
    INT8Scaling(),
    INT8Scaling(group_size=16, scale_dtype="fp16", scale_rule="half_range"),
    INT8Scaling(group_size=16, scale_dtype="bf16", scale_rule="divide"),
    INT8Scaling(signed=False, symmetric=False),
    INT8Scaling(group_size=16, signed=False, symmetric=False, offset="bias"),
    NF4Scaling(),
    NF4Scaling(block_size=16, scale_dtype="fp16"),
]


def recipe_id(recipe: ScalingRecipe) -> str:
    """A short name: the recipe's, with the fields that are not at their default."""
    default = type(recipe)()
    changed = [f.name for f in dataclasses.fields(recipe) if getattr(recipe, f.name) != getattr(default, f.name)]  # type: ignore[arg-type]
    return "-".join([recipe.name, *(f"{name}={getattr(recipe, name)}" for name in changed)])


def wide(shape: tuple[int, ...], seed: int = 0, exponents: int = 60) -> np.ndarray:
    """FP32 normal numbers times 2^uniform(-exponents, exponents) by row, with the awkward values sprinkled in."""
    rng = np.random.default_rng(seed)
    scale = np.exp2(rng.uniform(-exponents, exponents, (*shape[:-1], 1)))
    x = (rng.standard_normal(shape) * scale).astype(np.float32)
    flat = x.reshape(-1)
    if flat.size >= 16:
        flat[rng.integers(0, flat.size, flat.size // 16)] = 0.0
        flat[rng.integers(0, flat.size, flat.size // 32)] = -0.0
    return x


def special_rows(columns: int) -> np.ndarray:
    """Rows that each reach one clause of the contract; FP32, shape (rows, columns)."""
    rng = np.random.default_rng(7)
    smooth = rng.standard_normal(columns).astype(np.float32)
    tiny, largest = np.float32(2.0**-126), np.finfo(np.float32).max
    rows = [np.zeros(columns), np.full(columns, -0.0), smooth]
    for value in (np.nan, np.inf, -np.inf, largest, -largest, tiny, 2.0**-127, -(2.0**-149), 448.0, 480.0, 6.0, 7.5):
        row = smooth.copy()
        row[columns // 3] = value
        rows.append(row)
    rows += [smooth * tiny, smooth * np.float32(2.0**-120), np.full(columns, tiny), np.full(columns, largest)]
    rows += [np.abs(smooth) + 10, -np.abs(smooth) - 10, np.full(columns, largest) * np.sign(smooth)]
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5, 6.0], np.float32)
    rows.append(np.resize(ties, columns))
    return np.array(rows, np.float32)


def every_decodable(recipe: ScalingRecipe, scales: int = 300) -> ScaledTensor:
    """Every element code under many scale codes, foreign NaN and Inf codes included.

    All scale codes of at most 8 bits, or of 16 where `scales` is 2^16; else that many random ones.
    """
    fmt = recipe.format
    codes = np.arange(1 << fmt.element.bits, dtype=np.int32)
    m, k = fmt.scale.block
    if fmt.scale.codec.bits == 8:
        stored = np.arange(256, dtype=np.uint8)
    else:
        size = fmt.scale.codec.bits
        random = np.random.default_rng(0).integers(0, 1 << size, scales, dtype=np.uint64)
        patterns = np.arange(1 << size) if scales == 1 << size else random
        stored = NUMPY.store(NUMPY.load(patterns.astype(f"u{size // 8}")), NUMPY.storage(fmt.scale.codec))
    columns = len(codes) if k is None else -(-len(codes) // k) * k
    rows = np.resize(codes, (len(stored) * (m or 1), columns))
    data = reference.pack(NUMPY, rows, fmt.element)
    if m is None:  # one scale per matrix of one row
        data, scale = data[:, None], stored
    else:
        scale = np.repeat(stored[:, None], columns // (k or columns), axis=1)
    offsets = {"none": None, "zero_point": np.arange(16, dtype=np.uint8), "bias": stored[::-1]}
    zero = None if offsets[fmt.offset] is None else np.resize(offsets[fmt.offset], scale.shape)
    coarse = np.float32(0.0173) if fmt.global_scale is not None else None
    shape = (len(stored), 1, columns) if m is None else rows.shape
    return from_buffer(data, scale, recipe, recipe.layout, zero, coarse, shape=shape)


def on_cuda(test: Any) -> Any:
    """For `tests/gpu.sh`; elsewhere it is skipped."""
    torch = pytest.importorskip("torch")
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")(test))


@pytest.fixture(params=RECIPES, ids=recipe_id)
def recipe(request: pytest.FixtureRequest) -> ScalingRecipe:
    return request.param


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The program in this process: (exit code, standard output, standard error)."""
    from breccia.cli import run as program

    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: Any) -> tuple[int, str, str]:
        try:
            program([str(w) for w in words])
            code: Any = 0
        except SystemExit as e:
            code = e.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return call


def pytest_report_header() -> list[str]:
    """Versions of everything whose bytes are compared."""

    def found(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"{name} absent"

    names = ("breccia-core", "numpy", "torch", "jax", "mlx", "ml_dtypes", "safetensors")
    return ["breccia: " + ", ".join(found(n) for n in names)]
