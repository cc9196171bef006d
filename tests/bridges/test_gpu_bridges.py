"""The bridges to TransformerEngine and torchao on a GPU, with the libraries themselves.

`python tests/bridges/test_gpu_bridges.py` runs every case, whatever fails, and prints a table; pytest runs them as tests.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import breccia  # noqa: E402

SHAPE, PADDED = (256, 512), (384, 640)
Case = Callable[[], None]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def keep(run: Case) -> Case:
        CASES[name] = run
        return run

    return keep


def values(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def library() -> Any:
    return pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)


def quantizers() -> dict[str, Callable[[], Any]]:
    """TransformerEngine's quantizers, by the name of the case."""
    te = library()
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    try:
        from transformer_engine.pytorch.constants import DType
    except ImportError:
        DType = getattr(te, "DType", None) or __import__("transformer_engine_torch").DType
    one, sides = torch.ones(1, device="cuda"), {"rowwise": True, "columnwise": True}
    e4m3, e5m2 = DType.kFloat8E4M3, DType.kFloat8E5M2
    return {
        "current_e4m3": lambda: Float8CurrentScalingQuantizer(e4m3, torch.device("cuda"), **sides),
        "current_e5m2": lambda: Float8CurrentScalingQuantizer(e5m2, torch.device("cuda"), **sides),
        "delayed_e4m3": lambda: Float8Quantizer(64 * one, 0 * one, e4m3, **sides),
        "delayed_e5m2": lambda: Float8Quantizer(64 * one, 0 * one, e5m2, **sides),
        "blocks_1d": lambda: Float8BlockQuantizer(e4m3, block_scaling_dim=1, **sides),
        "tiles_2d": lambda: Float8BlockQuantizer(e4m3, block_scaling_dim=2, **sides),
        "tiles_2d_fp32_scales": lambda: Float8BlockQuantizer(e4m3, block_scaling_dim=2, force_pow_2_scales=False, **sides),
        "blocks_1d_e5m2": lambda: Float8BlockQuantizer(e5m2, block_scaling_dim=1, **sides),
        "mxfp8": lambda: MXFP8Quantizer(e4m3, **sides),
        "nvfp4": lambda: NVFP4Quantizer(**sides),
    }


NAMES = (
    *("current_e4m3", "current_e5m2", "delayed_e4m3", "delayed_e5m2", "blocks_1d", "tiles_2d", "tiles_2d_fp32_scales"),
    *("blocks_1d_e5m2", "mxfp8", "nvfp4"),
)


def made(name: str, shape: tuple[int, int] = SHAPE) -> Any:
    make = quantizers()[name]
    if name in ("mxfp8", "nvfp4") and torch.cuda.get_device_capability() < (10, 0):
        pytest.skip(f"TransformerEngine quantizes and decodes {name} on Blackwell only")
    return make()(values(shape))


def buffers(te_t: Any) -> dict[str, Any]:
    names = (
        "_data",
        "_scale_inv",
        "_transpose",
        *(f"_{s}_{n}" for s in ("rowwise", "columnwise") for n in ("data", "scale_inv")),
    )
    names = (*names, "_amax_rowwise", "_amax_columnwise")
    return {name: found for name in names if (found := getattr(te_t, name, None)) is not None}


def assert_same_buffers(a: Any, b: Any, shared: bool) -> None:
    left, right = buffers(a), buffers(b)
    assert left.keys() == right.keys(), (left.keys(), right.keys())
    for name, x in left.items():
        y = right[name]
        assert x.shape == y.shape and x.dtype == y.dtype, (name, x.shape, y.shape)
        assert torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)), name
        assert not shared or x.data_ptr() == y.data_ptr(), f"{name} was copied"


def _there_and_back(name: str, shape: tuple[int, int]) -> None:
    """Decoded alike, equal buffers back, at the same addresses; and without `like=` a tensor that TransformerEngine decodes."""
    theirs = made(name, shape)
    ours = breccia.from_foreign(theirs, usage="rowwise")
    expected = theirs.dequantize(dtype=torch.float32)
    found = breccia.dequantize(ours)
    assert torch.equal(found, expected), f"{int((found != expected).sum())} of {found.numel()} values differ"
    usage = "both" if name.startswith(("blocks", "tiles", "mxfp8", "nvfp4")) or theirs._transpose is not None else "rowwise"
    both = breccia.from_foreign(theirs, usage=usage)
    back = breccia.to_foreign(both, "transformer_engine", like=theirs)
    assert_same_buffers(back, theirs, shared=True)
    assert torch.equal(back.dequantize(dtype=torch.float32), expected)
    fresh = breccia.to_foreign(ours, "transformer_engine", dtype=torch.bfloat16)
    assert type(fresh) is type(theirs) and torch.equal(fresh.dequantize(dtype=torch.float32), expected)


for _name in NAMES:
    CASES[f"there_and_back/{_name}"] = lambda name=_name: _there_and_back(name, SHAPE)
    CASES[f"there_and_back_padded/{_name}"] = lambda name=_name: _there_and_back(name, PADDED)


def _from_buffers(recipe: str, shape: tuple[int, int]) -> None:
    """The library's class made of breccia's bytes, on any device, and back: equal bytes, rowwise codes at the same address."""
    library()
    ours = breccia.cast_pair(values(shape), recipe)
    theirs = breccia.to_foreign(ours, "transformer_engine", dtype=torch.bfloat16)
    assert type(theirs).__module__.startswith("transformer_engine.") and theirs.shape == shape
    back = breccia.from_foreign(theirs, usage="both")
    assert all(breccia.bytes_equal(before, after) for before, after in zip(ours, back, strict=True))
    assert ours.rowwise.data.data_ptr() == back.rowwise.data.data_ptr()


for _name, _recipe in (("mxfp8", "mxfp8"), ("nvfp4", "nvfp4,global_sense=amax"), ("blocks", "fp8_block,scale_rule=te")):
    CASES[f"from_buffers/{_name}"] = lambda recipe=_recipe: _from_buffers(recipe, SHAPE)
    CASES[f"from_buffers_padded/{_name}"] = lambda recipe=_recipe: _from_buffers(recipe, (96, 160))


def _columnwise(name: str) -> None:
    """Columnwise data alone decode to what TransformerEngine decodes after it dropped the rowwise data."""
    theirs = made(name)
    ours = breccia.from_foreign(theirs, usage="columnwise")
    theirs.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert torch.equal(breccia.dequantize(ours), theirs.dequantize(dtype=torch.float32))


for _name in ("blocks_1d", "tiles_2d", "mxfp8"):
    CASES[f"columnwise/{_name}"] = lambda name=_name: _columnwise(name)


def _breccias_bytes(name: str, recipe: str) -> None:
    """What breccia casts is what TransformerEngine quantizes: equal codes and scales."""
    theirs, x = made(name), values()
    ours = breccia.cast(x, recipe)
    assert breccia.bytes_equal(breccia.from_foreign(theirs, recipe=breccia.recipe(recipe), usage="rowwise"), ours)


for _name, _recipe in (
    ("current_e4m3", "fp8_current,scale_rule=te"),
    ("blocks_1d", "fp8_block,scale_rule=te,power_of_two_scale=true"),
    ("tiles_2d", "fp8_block,block_m=128,scale_rule=te,power_of_two_scale=true"),
    ("mxfp8", "mxfp8"),
):
    CASES[f"breccias_bytes/{_name}"] = lambda name=_name, recipe=_recipe: _breccias_bytes(name, recipe)


def _linear(kind: str, **options: Any) -> None:
    """`te.Linear` gives the same outputs and input gradients with a weight that came through breccia."""
    te = library()
    from transformer_engine.common import recipe as recipes

    recipe = getattr(recipes, kind)(**options)
    enabled = getattr(te, "autocast", None)
    under = (lambda: enabled(enabled=True, recipe=recipe)) if enabled else (lambda: te.fp8_autocast(True, fp8_recipe=recipe))
    if hasattr(te, "quantized_model_init"):
        init = te.quantized_model_init(enabled=True, recipe=recipe)
    else:
        init = te.fp8_model_init(enabled=True, recipe=recipe)
    torch.manual_seed(0)
    with init:
        layer = te.Linear(512, 256, bias=False, params_dtype=torch.bfloat16, device="cuda")

    def run() -> tuple[Any, Any]:
        x = values().requires_grad_()
        with under():
            y = layer(x)
        y.sum().backward()
        return y.detach().clone(), x.grad.clone()

    run()
    before = run()
    held = layer.weight
    both = "both" if kind != "DelayedScaling" and not hasattr(held, "_data") else "rowwise"
    tensor = breccia.to_foreign(breccia.from_foreign(held, usage=both), "transformer_engine", like=held)
    layer._parameters["weight"] = torch.nn.Parameter(tensor)
    after = run()
    assert torch.equal(before[0], after[0]), "outputs differ"
    assert torch.equal(before[1], after[1]), "gradients differ"


CASES["linear/current"] = lambda: _linear("Float8CurrentScaling")
CASES["linear/delayed"] = lambda: _linear("DelayedScaling")
CASES["linear/block"] = lambda: _linear("Float8BlockScaling")


@case("recipes")
def _recipes() -> None:
    library()
    from transformer_engine.common import recipe as recipes

    for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"):
        theirs = getattr(recipes, name)()
        ours, weight, grad = (breccia.bridges.from_te_recipe(theirs, role) for role in ("input", "weight", "grad"))
        assert type(breccia.bridges.to_te_recipe(weight)).__name__ == name
        back = breccia.bridges.to_te_recipe(ours, grad=grad)
        assert type(back).__name__ == name and getattr(back, "fp8_format", None) == getattr(theirs, "fp8_format", None)


@case("torchao/float8_row_linear")
def _torchao() -> None:
    """A model that torchao quantized for FP8 products gives nearly the same outputs in breccia, and after its return."""
    pytest.importorskip("torchao")
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    from breccia_torch import from_torchao_model_, to_torchao_model_

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 256), torch.nn.Linear(256, 256)).cuda().bfloat16()
    # torchao's default leaves sums in the tensor core, which a layer of breccia has no place to note.
    precise = Float8MMConfig(use_fast_accum=False)
    quantize_(model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), mm_config=precise))
    x = values()
    with torch.no_grad():
        before = model(x)
        from_torchao_model_(model)
        ours = model(x)
        to_torchao_model_(model, dtype=torch.bfloat16)
        after = model(x)
    # torchao divides a BF16 amax by 448 in BF16, so a scale differs by at most 2^-9, relatively. Codes are at least 2^-4 apart,
    # so at most one in 32 is another one, by at most 2^-3: 0.022 of the norm, in each of two layers.
    assert (ours - before).float().norm() < 2 * 0.022 * before.float().norm()
    assert torch.equal(after, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_with_the_library_itself(name: str) -> None:
    CASES[name]()


def main() -> int:
    found: dict[str, str] = {}
    for name, run in CASES.items():
        try:
            run()
            torch.cuda.synchronize()
            found[name] = "ok"
        except pytest.skip.Exception as e:
            found[name] = f"skipped: {e}"
        except Exception as e:
            traceback.print_exc(limit=-4)
            found[name] = f"FAILED: {type(e).__name__}: {str(e).splitlines()[0][:140] if str(e) else ''}"
    print("\n".join(f"{name:44} {said}" for name, said in found.items()))
    return sum(said.startswith("FAILED") for said in found.values())


if __name__ == "__main__":
    sys.exit(main())
