"""Stand-ins for products of other libraries on CPU tensors: arguments of their functions, checks of shapes and dtypes, values.

humming-kernels 0.1.19 (`humming.layer`, `humming.forward`, `humming.tune`), torch's INT4 as CUDA has it, DeepGEMM
(`deep_gemm.fp8_gemm_nt`), `torch.nn.functional.scaled_mm` of torch 2.10 to 2.13.
They compute in FP64, from the documentation of each library, and share no code with breccia.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

#: E2M1's values by code.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SCALES = {"float8e8m0": torch.float8_e8m0fnu, "float8e4m3": torch.float8_e4m3fn}


def nibbles(words: Any) -> Any:
    """Codes of four bits (..., 8 n) of 32-bit words (..., n), the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4)
    return (words.long()[..., None] >> shifts & 15).flatten(-2)


def spread(scale: Any, shape: Any) -> Any:
    """Scales of blocks, repeated to every element of (N, K)."""
    n, k = shape
    return scale.double().repeat_interleave(n // scale.shape[0], 0).repeat_interleave(k // scale.shape[1], 1)


class HummingLayer:
    """A weight that loads and rearranges as humming's layer does. `made` has all of them."""

    made: ClassVar[list[HummingLayer]] = []

    def __init__(
        self, shape_n: int, shape_k: int, weight_config: dict[str, Any], input_config: Any = None, *, torch_dtype: Any = None
    ) -> None:
        self.shape, self.dtype, self.given = (shape_n, shape_k), torch_dtype, dict(weight_config)
        self.activations = dict(input_config or {})
        self.humming_config: Any = None
        HummingLayer.made.append(self)

    def to(self, device: Any) -> HummingLayer:
        return self

    def expected(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each component of a checkpoint."""
        (n, k), config = self.shape, self.given
        bits = 8 if config["dtype"].startswith("float8") else 4
        group = config.get("group_size", 0) or k
        tall = config.get("group_size_n", 1)
        dtype = torch.float32 if tall > 1 else SCALES.get(config.get("scale_dtype", ""), self.dtype)
        found = {"weight": ((n, k * bits // 32), torch.int32), "weight_scale": ((n // tall, k // group), dtype)}
        if config.get("has_zero_point"):
            found["zero_point"] = ((n * 4 // 32, k // group), torch.int32)
        if config.get("scale_2_type") == "tensor":
            found["weight_scale_2"] = ((1,), torch.float32)
        return found

    def load_from_tensors(self, tensors: dict[str, Any]) -> None:
        assert {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()} == self.expected()
        for name, x in tensors.items():
            setattr(self, name, torch.nn.Parameter(x.clone(), requires_grad=False))

    def transform(self) -> None:
        """Rearrange: here, transpose. humming's own order is none of a caller's business."""
        self.weight = torch.nn.Parameter(self.weight.t().contiguous(), requires_grad=False)
        self.humming_config = self


#: For each of humming's kernels for a weight, its rows: more than the first number, at most the second.
ROWS_OF_KERNELS = ((0, 1), (1, 8), (8, 16), (16, 1 << 30))


def get_heuristics_config(layer_config: Any, shape_m: int | None = None, device: Any = None) -> list[list[Any]]:
    """Rows (more than, at most) and the configuration of every kernel for a weight."""
    assert shape_m is None
    return [[*rows, {"kernel": i}] for i, rows in enumerate(ROWS_OF_KERNELS)]


def humming_values(layer: HummingLayer, weight: Any, weight_scale: Any, zero_point: Any, weight_scale_2: Any) -> Any:
    """What humming decodes a weight to, in FP64: rounded to activations of 16 bits where it multiplies by scales."""
    words, dtype = weight.t(), layer.given["dtype"]
    if dtype == "float8e4m3":
        values = words.contiguous().view(torch.float8_e4m3fn).double()
    elif dtype == "float4e2m1":
        values = torch.tensor(E2M1, dtype=torch.float64)[nibbles(words)]
    elif zero_point is None:
        values = nibbles(words).double() - 8
    else:
        points = nibbles(zero_point.t()).t()  # packed along N
        values = nibbles(words).double() - spread(points, layer.shape)
    scale = spread(weight_scale, layer.shape)
    if not layer.activations.get("dtype", "").startswith("float8"):
        scale = scale.to(layer.dtype).double()
        values = (values * scale).to(layer.dtype).double()
    else:
        values = values * scale
    return values if weight_scale_2 is None else values * weight_scale_2.double()


def humming_forward(
    config: Any, inputs: Any, weight: Any, weight_scale: Any = None, zero_point: Any = None, bias: Any = None,
    weight_scale_2: Any = None, outputs: Any = None, input_scale: Any = None, input_scale_2: Any = None, locks: Any = None,
    tuning_config: str | None = None,
) -> Any:  # fmt: skip
    """humming's product: inputs (M, K) of 16 bits, or FP8 with FP32 scales (M, groups).

    tuning_config: JSON of the kernel to compile; None compiles every one of `get_heuristics_config`.
    """
    assert tuning_config is not None
    least, most = ROWS_OF_KERNELS[json.loads(tuning_config)["kernel"]]
    assert least < len(inputs) <= most
    assert inputs.is_contiguous() and locks.dtype == torch.int32 and locks.numel() == 2048 and not locks.any()
    x = inputs.double()
    if config.activations:
        groups = config.shape[1] // (config.activations.get("group_size") or config.shape[1])
        assert inputs.dtype == torch.float8_e4m3fn
        assert (input_scale.dtype, tuple(input_scale.shape)) == (torch.float32, (len(inputs), groups))
        assert input_scale.is_contiguous()
        x = x * spread(input_scale, inputs.shape)
    else:
        assert inputs.dtype == config.dtype and input_scale is None
    y = (x @ humming_values(config, weight, weight_scale, zero_point, weight_scale_2).t()).to(config.dtype)
    if outputs is None:
        return y
    assert outputs.dtype == config.dtype and outputs.is_contiguous() and outputs.shape == y.shape
    return outputs.copy_(y)


def fp8_gemm_nt(
    a: Any, b: Any, d: Any, c: Any = None, recipe: Any = None, recipe_a: Any = None, recipe_b: Any = None,
    compiled_dims: str = "nk", disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    """DeepGEMM's product into d: pairs of E4M3 codes (M, K), (N, K) and FP32 scales (M, K / 128), (N / 128, K / 128)."""
    (x, sx), (w, sw) = a, b
    (m, k), n = x.shape, len(w)
    assert x.is_contiguous() and w.is_contiguous() and x.dtype == w.dtype == torch.float8_e4m3fn
    assert sx.dtype == sw.dtype == torch.float32 and sw.is_contiguous()
    assert sx.shape == (m, -(-k // 128)) and sw.shape == (-(-n // 128), -(-k // 128))
    assert d.shape == (m, n) and d.dtype == torch.bfloat16 and d.stride(1) == 1
    tall = sw.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    d.copy_((x.double() * spread(sx, x.shape)) @ (w.double() * tall).t())


def convert_weight_to_int4pack(codes: Any, tiles: int) -> Any:
    """Codes (N, K / 2), the even element in the high half of a byte; kept as codes, in the shape of CUDA's result."""
    n, k = codes.shape[0], codes.shape[1] * 2
    assert codes.dtype == torch.uint8 and codes.is_contiguous() and n % 8 == 0 and tiles in (2, 4, 8) and k % (tiles * 16) == 0
    return torch.stack([codes >> 4, codes & 15], -1).reshape(n // 8, k // (tiles * 16), 32, -1).to(torch.int32)


def weight_int4pack_mm(x: Any, packed: Any, group: int, numbers: Any) -> Any:
    """x (M, K) by weights `(code - 8) * scale + zero`, rounded to BF16. numbers: (K / group, N, 2)."""
    k, n = x.shape[1], packed.shape[0] * 8
    assert x.dtype == numbers.dtype == torch.bfloat16 and numbers.shape == (k // group, n, 2) and numbers.is_contiguous()
    scale, zero = (part.t().double().repeat_interleave(group, 1) for part in numbers.unbind(-1))
    w = ((packed.reshape(n, k).double() - 8) * scale + zero).bfloat16()
    return (x.double() @ w.double().t()).bfloat16()


def unswizzled(scale: Any, rows: int, columns: int) -> Any:
    """Scales (rows, columns) of cuBLAS's 1D block scaling layout: tiles of 128 x 4, each of 512 bytes in the order below."""
    assert scale.dim() == 1 and scale.is_contiguous()
    down, along = -(-rows // 128), -(-columns // 4)
    assert scale.numel() == down * along * 512
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    return scale[((r // 128) * along + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4]


def block_scaled_values(codes: Any, scales: list[Any], kinds: list[Any], swizzle: list[Any]) -> Any:
    """FP64 values (rows, K) of what `scaled_mm` is given of an operand."""
    kind, order = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
    nvfp4 = codes.dtype == torch.float4_e2m1fn_x2
    assert len(scales) == len(kinds) == len(swizzle) and len(scales) <= 1 + nvfp4
    assert (kinds[0], swizzle[0]) == (kind.BlockWise1x16 if nvfp4 else kind.BlockWise1x32, order.SWIZZLE_32_4_4)
    assert scales[0].dtype == (torch.float8_e4m3fn if nvfp4 else torch.float8_e8m0fnu)
    assert codes.is_contiguous()
    if nvfp4:
        packed = codes.view(torch.uint8)
        values = torch.tensor(E2M1, dtype=torch.float64)[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]
    else:
        assert codes.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        values = codes.double()
    rows, k = values.shape
    block = 16 if nvfp4 else 32
    # float8_e8m0fnu converts to double only through float.
    values = values * unswizzled(scales[0].float().double(), rows, k // block).repeat_interleave(block, 1)
    if len(scales) == 2:
        assert (kinds[1], swizzle[1]) == (kind.TensorWise, order.NO_SWIZZLE)
        assert scales[1].dtype == torch.float32 and scales[1].numel() == 1
        values = values * scales[1].double()
    return values


def scaled_mm(
    mat_a: Any, mat_b: Any, scale_a: Any, scale_recipe_a: Any, scale_b: Any, scale_recipe_b: Any, swizzle_a: Any = None,
    swizzle_b: Any = None, bias: Any = None, output_dtype: Any = torch.bfloat16, contraction_dim: Any = (),
    use_fast_accum: bool = False,
) -> Any:  # fmt: skip
    """torch's product of block-scaled matrices: a (M, K) by rows, b (K, N) by columns."""
    assert len(scale_a) == len(scale_b) and not contraction_dim and not use_fast_accum
    x = block_scaled_values(mat_a, scale_a, scale_recipe_a, swizzle_a)
    w = block_scaled_values(mat_b.t(), scale_b, scale_recipe_b, swizzle_b)
    assert len(w) % 16 == 0 and x.shape[1] % 32 == 0
    assert bias is None or bias.dtype == output_dtype != torch.float32
    y = x @ w.t()
    return (y if bias is None else y + bias.double()).to(output_dtype)


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the stand-ins in the places of the libraries."""
    layer, forward, deep_gemm = ModuleType("humming.layer"), ModuleType("humming.forward"), ModuleType("deep_gemm")
    layer.__dict__["HummingLayer"] = HummingLayer
    forward.__dict__["humming_forward"] = humming_forward
    tune = ModuleType("humming.tune")
    tune.__dict__["get_heuristics_config"] = get_heuristics_config
    deep_gemm.__dict__["fp8_gemm_nt"] = fp8_gemm_nt
    patch.setattr(torch.nn.functional, "scaled_mm", scaled_mm, raising=False)
    for module in (ModuleType("humming"), layer, forward, tune, deep_gemm):
        patch.setitem(sys.modules, module.__name__, module)
    HummingLayer.made.clear()
    aten = SimpleNamespace(
        _convert_weight_to_int4pack=convert_weight_to_int4pack, _weight_int4pack_mm=weight_int4pack_mm
    )  # fmt: skip
    patch.setattr(torch.ops, "aten", aten, raising=False)
