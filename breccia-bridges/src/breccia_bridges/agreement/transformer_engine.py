"""TransformerEngine: its reference quantizers in Python, which run on a CPU, and outputs of its kernels recorded on an H200."""

# Neighbours are not always there, and declare few types.
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

from breccia import Float8BlockScaling, Float8CurrentScaling, NVFP4BlockScaling
from breccia.backend import E4M3, E5M2, NUMPY, Codec

from . import Neighbour, Ours, Quantizer, Written, installed

#: In the repository only; its README says how it was made.
RECORDING = Path(__file__).parents[4] / "tests" / "golden" / "transformer_engine_2_20_2" / "tiles.safetensors.xz"

# ------------------------------------------------------------------------------------------------ reference quantizers

_PACKAGE = "transformer_engine"
_PARENTS = ("", ".pytorch", ".pytorch.custom_recipes", ".pytorch.tensor")


@cache
def _reference(module: str) -> Any:
    """A module of `custom_recipes`. It needs torch and two base classes; the package around it needs the compiled library.

    So that is stood in for while the module is loaded, unless it is loaded already.
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
    """In the place of QuantizedTensorStorage."""


class _Quantizer:
    """In the place of Quantizer."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


def _current(element: str, power_of_two: bool = False) -> Callable[[np.ndarray], Written]:
    def write(x: np.ndarray) -> Written:
        import torch

        made = _reference("reference_current_scaling").CurrentScalingQuantizerRef
        quantizer = made(getattr(torch, element), columnwise=False, pow_2_scales=power_of_two)
        t = quantizer.quantize(torch.from_numpy(x))
        decoded = quantizer.dequantize(t.data, t.scale)
        return Written(t.data.view(torch.uint8).numpy(), decoded.numpy(), t.scale.reshape(()).numpy())

    return write


def _nvfp4(x: np.ndarray) -> Written:
    """Decoded are its codes; it has no decoding of the scales, and ours stands in: amax / 2688 is the tensor's."""
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


def _kernel(name: str, of: str, default: Ours, closest: Ours | None = None) -> Quantizer:
    return Quantizer(name, _recorded(of, E5M2 if of.endswith("e5m2") else E4M3), default, closest, _matrices)


_MULTIPLIER = "The multiplier is largest / amax and the scale its reciprocal; ours is amax / largest, and the other way round."
_NVFP4 = (
    "With G = 2688 / amax of the tensor, block scales are amax · (G / 6) and multipliers 1 / (s · (1 / G)); ours come from "
    "g = amax / 2688: (amax / 6) / g, 1 / (s · g). Under a block scale that underflows to 0 elements become codes of ±6."
)
_SUBNORMAL = (
    "Scales may be subnormal numbers of FP32, and subnormal elements have codes; our scales are 2^-126 at least, and such "
    "elements zeros."
)

NEIGHBOURS = (
    Neighbour(
        "TransformerEngine",
        installed("transformer-engine"),
        (
            Quantizer(
                "CurrentScalingQuantizerRef, E4M3",
                _current("float8_e4m3fn"),
                Ours(Float8CurrentScaling(), _MULTIPLIER),
                Ours(Float8CurrentScaling(scale_rule="te")),
            ),
            Quantizer(
                "CurrentScalingQuantizerRef, E5M2",
                _current("float8_e5m2"),
                Ours(Float8CurrentScaling("E5M2"), _MULTIPLIER),
                Ours(Float8CurrentScaling("E5M2", scale_rule="te")),
            ),
            Quantizer(
                "NVFP4QuantizerRef",
                _nvfp4,
                Ours(
                    NVFP4BlockScaling(),
                    _NVFP4,
                ),
            ),
        ),
    ),
    Neighbour(
        "TransformerEngine, recorded on an H200",
        lambda: "2.20.2" if RECORDING.is_file() else None,
        (
            _kernel(
                "Float8CurrentScaling, E4M3",
                "current.e4m3",
                Ours(Float8CurrentScaling(), _MULTIPLIER),
                Ours(Float8CurrentScaling(scale_rule="te")),
            ),
            _kernel(
                "Float8CurrentScaling, E5M2",
                "current.e5m2",
                Ours(Float8CurrentScaling("E5M2"), _MULTIPLIER),
                Ours(Float8CurrentScaling("E5M2", scale_rule="te")),
            ),
            _kernel(
                "Float8BlockScaling, 1×128",
                "block1d.fp32",
                Ours(Float8BlockScaling(), _MULTIPLIER),
                Ours(Float8BlockScaling(scale_rule="te"), _SUBNORMAL),
            ),
            _kernel(
                "Float8BlockScaling, 1×128, powers of two",
                "block1d.pow2",
                Ours(Float8BlockScaling(power_of_two_scale=True), _SUBNORMAL),
            ),
            _kernel(
                "Float8BlockScaling, 128×128",
                "block2d.fp32",
                Ours(Float8BlockScaling(block_m=128), _MULTIPLIER),
                Ours(Float8BlockScaling(block_m=128, scale_rule="te")),
            ),
            _kernel(
                "Float8BlockScaling, 128×128, powers of two",
                "block2d.pow2",
                Ours(Float8BlockScaling(block_m=128, power_of_two_scale=True)),
            ),
        ),
    ),
)
