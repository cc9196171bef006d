"""TransformerEngine: its reference quantizers in Python, which run on a CPU, and outputs of its kernels recorded on an H200."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import lzma
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from breccia import Codec, Float8BlockScaling, Float8CurrentScaling, NVFP4BlockScaling
from breccia.backend import E4M3, E5M2, NUMPY

from . import Library, Quantizer, Setting, Written, installed

#: Only in the repository; its README documents how it was made.
RECORDING = Path(__file__).parents[4] / "tests" / "golden" / "transformer_engine_2_20_2" / "tiles.safetensors.xz"

# ------------------------------------------------------------------------------------------------ reference quantizers

_PACKAGE = "transformer_engine"
_PARENTS = ("", ".pytorch", ".pytorch.custom_recipes", ".pytorch.tensor")


@cache
def _reference(module: str) -> Any:
    """A module of `custom_recipes`. It needs torch and two base classes; its package needs the compiled library.

    Stubs replace the package while the module is loaded, unless it is already loaded.
    """
    name = f"{_PACKAGE}.pytorch.custom_recipes.{module}"
    if _PACKAGE in sys.modules:
        return import_module(name)
    spec = util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ImportError(f"{_PACKAGE} is not installed")
    try:
        for parent in _PARENTS:
            package = sys.modules[_PACKAGE + parent] = ModuleType(_PACKAGE + parent)
            package.__path__ = [str(Path(spec.origin).parent.joinpath(*parent.split(".")[1:]))]
        base = sys.modules[f"{_PACKAGE}.pytorch.quantized_tensor"] = ModuleType("quantized_tensor")
        vars(base).update(QuantizedTensorStorage=_Storage, Quantizer=_Quantizer)
        tools = sys.modules[f"{_PACKAGE}.pytorch.tensor.utils"] = ModuleType("utils")
        vars(tools)["is_custom"] = lambda _: True
        return import_module(name)
    finally:
        for loaded in [m for m in sys.modules if m.partition(".")[0] == _PACKAGE]:
            del sys.modules[loaded]


class _Storage:
    """Stub of QuantizedTensorStorage."""


class _Quantizer:
    """Stub of Quantizer."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


def _current(element: str, power_of_two: bool = False) -> Callable[[np.ndarray], Written]:
    def write(x: np.ndarray) -> Written:
        import torch

        quantizer_class = _reference("reference_current_scaling").CurrentScalingQuantizerRef
        quantizer = quantizer_class(getattr(torch, element), columnwise=False, pow_2_scales=power_of_two)
        t = quantizer.quantize(torch.from_numpy(x))
        decoded = quantizer.dequantize(t.data, t.scale)
        return Written(t.data.view(torch.uint8).numpy(), decoded.numpy(), t.scale.reshape(()).numpy())

    return write


def _nvfp4(x: np.ndarray) -> Written:
    """It decodes codes but not scales; breccia's rule is used for these: the global scale is amax / 2688."""
    import torch

    module = _reference("reference_nvfp4")
    t = module.NVFP4QuantizerRef(_reference("reference_utils").Fp4Formats.E2M1, columnwise=False).quantize(torch.from_numpy(x))
    values = module.cast_from_fp4x2(t.data, torch.float32).reshape(*t.scale.shape, 16)
    decoded = (values * t.scale.to(torch.float32)[..., None] * (t.global_amax_row / 2688.0)).reshape(x.shape)
    return Written(t.data.numpy(), decoded.numpy(), t.scale.view(torch.uint8).numpy())


# ------------------------------------------------------------------------------------------------ recorded kernels


@cache
def _recording() -> dict[str, np.ndarray]:
    from safetensors.numpy import load

    return load(lzma.decompress(RECORDING.read_bytes()))


def _matrices() -> dict[str, np.ndarray]:
    return {case: _recording()[f"{case}.float32.input"] for case in ("randn", "wide", "rowwide", "edge", "tiny")}


def _recorded(of: str, element: Codec) -> Callable[[np.ndarray], Written]:
    def write(x: np.ndarray) -> Written:
        case = next(case for case, recorded in _matrices().items() if np.array_equal(recorded, x))
        data, scale = (_recording()[f"{case}.float32.{of}.{part}"] for part in ("data", "scale_inv"))
        scale = scale.reshape(()) if of.startswith("current") else scale.reshape(-1, 1)
        return Written(data, element.decode(NUMPY, data.astype(np.int32)) * scale, scale)

    return write


def _kernel(name: str, of: str, default: Setting, closest: Setting | None = None) -> Quantizer:
    return Quantizer(name, _recorded(of, E5M2 if of.endswith("e5m2") else E4M3), default, closest, _matrices)


_MULTIPLIER = (
    "The multiplier is largest / amax and the scale its reciprocal; in breccia the scale is amax / largest, and the multiplier "
    "its reciprocal."
)
_NVFP4 = (
    "With G = 2688 / amax of the tensor, block scales are amax · (G / 6) and multipliers 1 / (s · (1 / G)); breccia's come "
    "from g = amax / 2688: (amax / 6) / g, 1 / (s · g). Under a block scale that underflows to 0, elements become codes of ±6."
)
_SUBNORMAL = (
    "Scales may be subnormal in FP32, and subnormal elements are encoded; breccia's scales are at least 2^-126, and such "
    "elements become zeros."
)

LIBRARIES = (
    Library(
        "TransformerEngine",
        installed("transformer-engine"),
        (
            Quantizer(
                "CurrentScalingQuantizerRef, E4M3",
                _current("float8_e4m3fn"),
                Setting(Float8CurrentScaling(), _MULTIPLIER),
                Setting(Float8CurrentScaling(scale_rule="te")),
            ),
            Quantizer(
                "CurrentScalingQuantizerRef, E5M2",
                _current("float8_e5m2"),
                Setting(Float8CurrentScaling("E5M2"), _MULTIPLIER),
                Setting(Float8CurrentScaling("E5M2", scale_rule="te")),
            ),
            Quantizer(
                "NVFP4QuantizerRef",
                _nvfp4,
                Setting(
                    NVFP4BlockScaling(),
                    _NVFP4,
                ),
            ),
        ),
    ),
    Library(
        "TransformerEngine, recorded on an H200",
        lambda: "2.20.2" if RECORDING.is_file() else None,
        (
            _kernel(
                "Float8CurrentScaling, E4M3",
                "current.e4m3",
                Setting(Float8CurrentScaling(), _MULTIPLIER),
                Setting(Float8CurrentScaling(scale_rule="te")),
            ),
            _kernel(
                "Float8CurrentScaling, E5M2",
                "current.e5m2",
                Setting(Float8CurrentScaling("E5M2"), _MULTIPLIER),
                Setting(Float8CurrentScaling("E5M2", scale_rule="te")),
            ),
            _kernel(
                "Float8BlockScaling, 1×128",
                "block1d.fp32",
                Setting(Float8BlockScaling(), _MULTIPLIER),
                Setting(Float8BlockScaling(scale_rule="te"), _SUBNORMAL),
            ),
            _kernel(
                "Float8BlockScaling, 1×128, powers of two",
                "block1d.pow2",
                Setting(Float8BlockScaling(power_of_two_scale=True), _SUBNORMAL),
            ),
            _kernel(
                "Float8BlockScaling, 128×128",
                "block2d.fp32",
                Setting(Float8BlockScaling(block_m=128), _MULTIPLIER),
                Setting(Float8BlockScaling(block_m=128, scale_rule="te")),
            ),
            _kernel(
                "Float8BlockScaling, 128×128, powers of two",
                "block2d.pow2",
                Setting(Float8BlockScaling(block_m=128, power_of_two_scale=True)),
            ),
        ),
    ),
)
