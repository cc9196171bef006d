"""Products of decoded codes, without a GPU: the calls they take, how kernels are compiled, and the arguments of a launch."""

from __future__ import annotations

import itertools
import math
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiling import compiled_with_log
from host_kernels import Decoding, Driver, Product
from weights import FORMATS, in_torch, tensor

from breccia.backend import reference

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from breccia_triton.gemm.fp8 import plans as fp8_plans  # noqa: E402
from breccia_triton.gemm.weight_only import plans as weight_plans  # noqa: E402
from breccia_triton.gemm.weight_only.plans import ScaleApplication  # noqa: E402
from breccia_triton.launch import compiler  # noqa: E402

STORAGE = "mma_16x128"


def some(cases: Iterable[Any], first: Callable[[Any], bool] = lambda case: False) -> list[Any]:
    """Cases as parameters, of which `make test` runs those for which `first` is true, and `make slow` the others."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if first(case) else pytest.mark.slow)
        for case in cases
    ]


def operand_of(name: str) -> weight_plans.WeightFormat:
    found = weight_plans.weight_format_of(FORMATS[name], FORMATS[name].scale.block)
    assert isinstance(found, weight_plans.WeightFormat)
    return found


def form_of(name: str) -> ScaleApplication:
    return weight_plans.scale_application_of(operand_of(name), FORMATS[name].scale.block)


def test_scales_of_rows_and_tensors_and_those_in_the_codes_multiply_whole_sums() -> None:
    whole = {name for name in FORMATS if form_of(name).scales == fp8_plans.OUTER}
    assert whole == {
        "int4-row", "int8-row", "e4m3-tensor", "e5m2-row", "mxfp4", "mxfp8", "mxfp8-e5m2",
        "nvfp4", "nvfp4-one", "nvfp4-divisor", "nvfp4-amax",
    }  # fmt: skip
    for name, group in (
        ("int4-128", 128),
        ("int4-256", 128),
        ("e4m3-square", 128),
        ("int4-64", 64),
        ("uint4", 32),
        ("int4-16", 16),
    ):
        form = form_of(name)
        assert form.group == group
        # A promotion of a step's part sees the columns of one scale.
        assert form.step == group * form.pieces and form.levels(648) == -(-648 // group)
    assert form_of("nvfp4").levels(648) == 1


def test_global_scales_beside_scales_of_sums_and_rows_of_odd_lengths_do_not_fit() -> None:
    from breccia.codecs import E2M1, F16, F32
    from breccia.formats import TENSOR, Format, Level

    codes = weight_plans.DecodedCodes()
    assert codes.fits(operand_of("int4-128"), 600, 256) and not codes.fits(operand_of("int4-64"), 600, 132)
    assert codes.fits(operand_of("nvfp4"), 600, 256)
    found = weight_plans.weight_format_of(Format(E2M1, (Level(F32, TENSOR), Level(F16, (1, 32)))), (1, 32))
    assert isinstance(found, weight_plans.WeightFormat) and not codes.fits(found, 600, 256)


def test_many_rows_of_bf16_activations_are_multiplied_by_codes_decoded_to_memory() -> None:
    def chosen(name: str, m: int, act: str = "bfloat16", k: int = 1024, direct: bool = True) -> Any:
        return weight_plans.config_of(operand_of(name), "any", m, 1024, k, "", act, direct)

    codes = weight_plans.DecodedCodes()
    assert chosen("uint4", 2048) == chosen("int4-128", 4096, direct=False) == chosen("nvfp4", 4096) == codes
    assert chosen("mxfp4", 2048) == weight_plans.Decoded()
    others = chosen("uint4", 1024), chosen("uint4", 2048, "float16"), chosen("uint4", 2048, k=1028)
    assert {type(config) for config in others} == {weight_plans.Config}


def test_measured_configurations_say_which_products_decode_to_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, of = weight_plans.DecodedCodes(), operand_of("int4-128")
    assert weight_plans.config_from(weight_plans.entry_of(codes)) == codes
    assert weight_plans.config_from(weight_plans.entry_of(weight_plans.Decoded())) == weight_plans.Decoded()
    key = weight_plans.key_of("any", 128, 4096, 1024, 1024)
    monkeypatch.setattr(weight_plans, "measured_on", lambda device: {key: codes})
    assert weight_plans.config_of(of, "any", 4000, 1024, 1024) == codes
    # Tensor cores take both operands in one dtype.
    assert isinstance(weight_plans.config_of(of, "any", 4000, 1024, 1024, "", "float16"), weight_plans.Config)


@pytest.mark.parametrize("k", [128, 136, 512, 8192])
def test_tiles_have_a_step_for_each_part_of_k_and_stages_for_two_steps(k: int) -> None:
    for name in ("int8-row", "int4-128", "int4-64", "uint4", "int4-16"):
        form = form_of(name)
        for n in (64, 200, 4096, 28672):
            for m in (1, 64, 512, 4096):
                tile = weight_plans.decoding_tile_of(form, n, m, k, 132)
                assert tile.split <= -(-k // form.step)
                for out, staged in (("bfloat16", True), ("float32", False)):
                    variant = weight_plans.variant_of(form, tile, out, "float32", staged)
                    assert variant.stages >= 2 * form.span and variant.shared <= fp8_plans.SHARED
    assert weight_plans.decoding_tile_of(form_of("int4-128"), 8192, 4096, 8192, 132).name == "256x128"


@pytest.mark.skipif(compiler.missing() is not None, reason="no NVRTC")
@pytest.mark.parametrize("name", some(FORMATS, lambda name: name in ("int4-128", "uint4-zero-16", "nvfp4")))
def test_the_pass_that_decodes_codes_and_scales_compiles_without_spilling(name: str) -> None:
    source = compiler.CudaSource.read(weight_plans.SOURCES / "weight_only_decode.cu")
    macros = weight_plans.macros_of_decoding(operand_of(name), "float32", "float16")
    _, log = compiled_with_log(source, macros)
    assert set(re.findall(r"(\d+) bytes spill stores", log)) == {"0"}
    assert "warning" not in log


# -- the sources themselves, on the host -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Any]:
    """Let products of CPU tensors run the sources on the host. Returns a list of planted mistakes in that of the product."""
    from breccia_triton.gemm.fp8 import matmul as fp8_matmul
    from breccia_triton.gemm.weight_only import decoded as decoded_matmul
    from breccia_triton.launch import program

    changes: list[Any] = []
    seeds = itertools.count()
    monkeypatch.setattr(program, "function", lambda source, entry, macros, *rest: Decoding(entry, macros, folder))
    monkeypatch.setattr(
        fp8_matmul, "loaded", lambda variant, device: Product(variant, folder, tuple(changes), next(seeds))
    )  # fmt: skip
    monkeypatch.setattr(decoded_matmul, "driver", Driver)
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return changes


def multiplied(name: str, n: int, k: int, m: int, dtype: str, biased: bool, tile: Any) -> Any:
    """(The product on the host, the largest error over the bound of the contract.)"""
    from breccia_triton.gemm.weight_only.decoded import decoded_codes
    from breccia_triton.gemm.weight_only.problem import Problem

    plain = tensor(name, n, k, seed=2)
    w = in_torch(plain).to_storage(STORAGE).mT
    g = torch.Generator().manual_seed(m)
    x = torch.randn(m, k, generator=g).bfloat16()
    bias = torch.randn(n, generator=g).to(getattr(torch, dtype)) if biased else None
    found = decoded_codes(Problem.of(x, w, bias, dtype), tile)(x, w, bias, None)
    values = torch.from_numpy(reference.dequantize(plain).astype(np.float64))
    added = torch.zeros(n).double() if bias is None else bias.double()
    exact, size = x.double() @ values.mT + added, x.double().abs() @ values.mT.abs() + added.abs()
    assert found.shape == exact.shape and str(found.dtype) == f"torch.{dtype}"
    terms = (k + biased) * 2.0**-24
    bound = terms / (1 - terms) * size
    bound = bound + {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype] * (exact.abs() + bound)
    return found, ((found.double() - exact).abs() / bound).nan_to_num(nan=math.inf).max().item()


@pytest.mark.long
@pytest.mark.parametrize("name", some(FORMATS, lambda name: name == "nvfp4"))
def test_products_of_every_format_are_within_the_bound_on_the_host(name: str, on_the_host: list[Any]) -> None:
    for (n, k, m), dtype in (((72, 200, 50), "bfloat16"), ((70, 136, 20), "float32")):
        assert multiplied(name, n, k, m, dtype, dtype == "float32", None)[1] <= 1


@pytest.mark.parametrize(
    ("tile", "name"), some(itertools.product(fp8_plans.TABLE, ("int8-row", "int4-128", "int4-64", "uint4", "int4-16")))
)
def test_every_tile_multiplies_every_form_on_the_host(tile: Any, name: str, on_the_host: list[Any]) -> None:
    at = fp8_plans.TABLE.index(tile)
    dtype = ("bfloat16", "float32", "float16")[(at + len(name)) % 3]
    assert multiplied(name, 328, 648, 200, dtype, at % 2 == 0, tile)[1] <= 1


#: Mistakes in the source, which results or a deadlock have to show.
MISTAKES = {
    "a stage is released while products read it": ("release(here);\n", "release(here); release(here + 1);\n"),
    "a row of the transposed output in another's place": ("^ (r & 7)) * 16)", "^ (r & 3)) * 16)"),
    "the second half's scales": ("sa_ring + stage * SA_BYTES + (group * 64 * H + low)", "sa_ring + stage * SA_BYTES + (low)"),
    "sums that begin with the product before": ("!PROMOTE || !first || i != 0", "!PROMOTE || !first || i != 0 || k > 0"),
    "the wrong turn": ("group_arrive(1 + (group + 1) % NWG, 256)", "group_arrive(1 + group, 256)"),
    "a block that ends before others have released its stages": ("CM * CN > 1 && s < STAGES", "false && s < STAGES"),
    "bytes that nobody copies": ("128 * all + W_BYTES", "128 * all + W_BYTES + 16"),
}


@pytest.mark.parametrize("mistake", some(MISTAKES))
def test_mistakes_in_the_source_are_found_on_the_host(mistake: str, on_the_host: list[Any]) -> None:
    on_the_host.append(MISTAKES[mistake])
    assert wrong("int4-128", fp8_plans.TABLE[0])


def wrong(name: str, tile: Any) -> bool:
    """Whether a product on the host does not end, or not within the bound."""
    try:
        return multiplied(name, 328, 1160, 200, "bfloat16", False, tile)[1] > 1
    except AssertionError as e:
        return "a deadlock" in str(e)
