"""Stand-ins for TransformerEngine's tensors, where its compiled library cannot be loaded: attributes and constructors of 2.20.

They hold buffers and compute nothing. Their modules have TransformerEngine's names, by which breccia recognizes the classes.
"""

from __future__ import annotations

import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


class DType(enum.IntEnum):
    """TransformerEngine's dtypes; breccia reads their names."""

    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


def quantizer(name: str, **attributes: Any) -> Any:
    """A quantizer of the class with that name; `copy` copies it, as storages do with theirs."""
    kind = type(name, (SimpleNamespace,), {"copy": lambda self: kind(**vars(self))})
    return kind(**attributes)


class _Storage:
    """Buffers as attributes with an underscore."""

    def _hold(self, **buffers: Any) -> None:
        for name, value in buffers.items():
            setattr(self, f"_{name}", value.copy() if name == "quantizer" and value is not None else value)


class _Tensor(torch.Tensor, _Storage):
    """A torch.Tensor without memory, of the given shape and dtype, that holds buffers."""

    @staticmethod
    def __new__(cls: Any, shape: Any, dtype: Any, *, requires_grad: bool = False, device: Any = "cpu", **buffers: Any) -> Any:
        found = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device, requires_grad=requires_grad)
        found._init(**buffers)
        return found

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"a bridge reads buffers, and ran {func}")


class _Float8:
    def _init(
        self: Any, *, data: Any, fp8_scale_inv: Any, fp8_dtype: Any, data_transpose: Any = None, quantizer: Any = None
    ) -> None:
        self._hold(data=data, scale_inv=fp8_scale_inv, fp8_dtype=fp8_dtype, transpose=data_transpose, quantizer=quantizer)
        self._transpose_invalid = data_transpose is None


class _Blockwise:
    def _init(
        self: Any,
        *,
        rowwise_data: Any,
        rowwise_scale_inv: Any,
        columnwise_data: Any,
        columnwise_scale_inv: Any,
        fp8_dtype: Any,
        quantizer: Any,
        is_2D_scaled: bool,
    ) -> None:
        self._hold(rowwise_data=rowwise_data, rowwise_scale_inv=rowwise_scale_inv, fp8_dtype=fp8_dtype, quantizer=quantizer)
        self._hold(columnwise_data=columnwise_data, columnwise_scale_inv=columnwise_scale_inv, is_2D_scaled=is_2D_scaled)


class _MXFP8:
    def _init(
        self: Any,
        *,
        rowwise_data: Any,
        rowwise_scale_inv: Any,
        columnwise_data: Any,
        columnwise_scale_inv: Any,
        fp8_dtype: Any,
        quantizer: Any,
        with_gemm_swizzled_scales: bool,
    ) -> None:
        self._hold(rowwise_data=rowwise_data, rowwise_scale_inv=rowwise_scale_inv, fp8_dtype=fp8_dtype, quantizer=quantizer)
        self._hold(columnwise_data=columnwise_data, columnwise_scale_inv=columnwise_scale_inv)
        self._hold(with_gemm_swizzled_scales=with_gemm_swizzled_scales)


class _NVFP4:
    def _init(
        self: Any,
        *,
        rowwise_data: Any,
        rowwise_scale_inv: Any,
        columnwise_data: Any,
        columnwise_scale_inv: Any,
        amax_rowwise: Any,
        amax_columnwise: Any,
        fp4_dtype: Any,
        quantizer: Any,
        with_gemm_swizzled_scales: bool,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
    ) -> None:
        self._hold(rowwise_data=rowwise_data, rowwise_scale_inv=rowwise_scale_inv, amax_rowwise=amax_rowwise)
        self._hold(columnwise_data=columnwise_data, columnwise_scale_inv=columnwise_scale_inv, amax_columnwise=amax_columnwise)
        self._hold(fp4_dtype=fp4_dtype, quantizer=quantizer, with_gemm_swizzled_scales=with_gemm_swizzled_scales)
        self._hold(row_scaled_nvfp4=row_scaled_nvfp4, nvfp4_use_4over6=nvfp4_use_4over6)
        self._nvfp4_e4m3_max = nvfp4_e4m3_max if nvfp4_use_4over6 else 448


_FILES = {
    "Float8Tensor": ("float8_tensor", _Float8),
    "Float8BlockwiseQTensor": ("float8_blockwise_tensor", _Blockwise),
    "MXFP8Tensor": ("mxfp8_tensor", _MXFP8),
    "NVFP4Tensor": ("nvfp4_tensor", _NVFP4),
}


def _classes() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (file, init) in _FILES.items():
        module = f"transformer_engine.pytorch.tensor.{file}"
        found[name] = type(name, (_Tensor, init), {"__module__": module})
        storage = type(f"{name}Storage", (_Storage, init), {"__module__": module})
        storage.__init__ = lambda self, **buffers: self._init(**buffers)
        found[storage.__name__] = storage
    return found


CLASSES = _classes()

#: The quantizers in the file of each class.
_QUANTIZERS = {
    "float8_tensor": ("Float8Quantizer", "Float8CurrentScalingQuantizer"),
    "float8_blockwise_tensor": ("Float8BlockQuantizer",),
    "mxfp8_tensor": ("MXFP8Quantizer",),
    "nvfp4_tensor": ("NVFP4Quantizer",),
}
_RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the stand-ins importable under TransformerEngine's names: what bridges import without `like=`."""

    def put(name: str, **held: Any) -> None:
        module = ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)

    for name in ("", ".common", ".pytorch", ".pytorch.tensor"):
        put(f"transformer_engine{name}", __path__=[])
    put("transformer_engine.pytorch.constants", DType=DType)
    formats = {name: SimpleNamespace(name=name) for name in ("E4M3", "E5M2", "HYBRID")}
    recipes = {name: type(name, (SimpleNamespace,), {}) for name in _RECIPES}
    put("transformer_engine.common.recipe", Format=SimpleNamespace(**formats), **recipes)
    for name, kind in CLASSES.items():
        file = kind.__module__.rpartition(".")[2]
        found = {q: (lambda *given, q=q, **options: quantizer(q, given=given, **options)) for q in _QUANTIZERS[file]}
        if not name.endswith("Storage"):
            put(kind.__module__, **{name: kind}, **found)
