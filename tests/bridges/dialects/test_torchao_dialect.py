"""torchao's tensors in safetensors: each class written here, read exactly, and every fault named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialect_folders import E2M1, PLAIN, Tensor, decoded, floats, folder, numbers, quantized, untyped, values

import breccia
from breccia import BrecciaError, DialectError, PluginError, UnsupportedError
from breccia.backend import TensorGroup

RNG = np.random.default_rng(3)
UP = "model.layers.0.mlp.up_proj.weight"


@dataclass(frozen=True)
class Case:
    """A tensor of a class of torchao, its recipe, and its numbers."""

    kind: str
    recipe: str
    parts: dict[str, Tensor]
    attributes: dict[str, Any]
    expected: np.ndarray = field(repr=False)

    def tensors(self, name: str = UP) -> dict[str, Tensor]:
        module, _, leaf = name.rpartition(".")
        return {f"{module}._{leaf}_{part}": tensor for part, tensor in self.parts.items()}

    def entry(self, **changes: Any) -> str:
        listed = {"_type": self.kind, "_data": self.attributes, "_tensor_data_names": list(self.parts)} | changes
        return json.dumps(listed)

    def change(self, parts: dict[str, Tensor | None] | None = None, **attributes: Any) -> Case:
        """With other parts and attributes; None removes one."""
        new = {n: tensor for n, tensor in (self.parts | (parts or {})).items() if tensor is not None}
        data = {n: item for n, item in (self.attributes | attributes).items() if item != "absent"}
        return Case(self.kind, self.recipe, new, data, self.expected)


def save(path: Path, **cases: Case) -> Path:
    """A folder of tensors by the names of their values, with underscores for dots, among plain ones."""
    tensors, metadata = dict(PLAIN), {"format": "pt", "norm.weight": '{"_type": "Tensor"}'}
    for name, case in cases.items():
        tensors |= case.tensors(name)
        metadata[name] = case.entry()
    return folder(path, tensors, quantized("torchao", quant_type={"default": {}}), metadata)


def only(path: Path, case: Case) -> np.ndarray:
    (stored,) = values(save(path, **{UP: case})).values()
    return decoded(stored)


def dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def fp8_codes(*shape: int, fmt: str = "F8_E4M3") -> Tensor:
    codes = RNG.integers(0, 256, shape, np.uint8)
    return fmt, np.where((codes & 0x7F) >= 0x7C, codes & 0xF0 & 0xBF, codes).astype(np.uint8)


def scales(*shape: int, kind: str = "F32") -> Tensor:
    if kind == "F8_E8M0":
        return kind, RNG.integers(118, 130, shape, np.uint8)
    return floats(kind, RNG.uniform(0.01, 2, shape))


def spread(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A number per block as one per element."""
    for axis, (n, s) in enumerate(zip(shape, scale.shape, strict=True)):
        scale = np.repeat(scale, n // s, axis)
    return scale


def float8(recipe: str, shape: tuple[int, ...], block: list[int], fmt: str = "F8_E4M3") -> Case:
    codes, scale = fp8_codes(*shape, fmt=fmt), scales(*(n // b for n, b in zip(shape, block, strict=True)))
    attributes = {"block_size": block, "mm_config": None, "dtype": dtype("bfloat16")}
    return Case(
        "Float8Tensor", recipe, {"qdata": codes, "scale": scale}, attributes, numbers(codes) * spread(numbers(scale), shape)
    )


def integers(
    recipe: str, shape: tuple[int, ...], block: list[int], bits: int = 8, zero: str | None = None, scale: str = "F32"
) -> Case:
    """zero: the dtype of zero-points; "none" for zero-points that are all 0."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    codes = RNG.integers(low, high + 1, shape, np.int8)
    codes.reshape(-1)[:2] = low, high
    blocks = tuple(n // b for n, b in zip(shape, block, strict=True))
    parts: dict[str, Tensor] = {"qdata": ("I8", codes), "scale": scales(*blocks, kind=scale)}
    zeros = np.zeros(blocks, np.float32)
    if zero == "none":
        parts["zero_point"] = "I8", zeros.astype(np.int8)
    elif zero is not None:
        zeros = RNG.integers(low, high + 1, blocks).astype(np.float32)
        zeros.reshape(-1)[0] = low
        parts["zero_point"] = ("I8", zeros.astype(np.int8)) if zero == "I8" else floats(zero, zeros)
    expected = (codes - spread(zeros, shape)) * spread(numbers(parts["scale"]), shape)
    attributes: dict[str, Any] = {"block_size": block, "dtype": dtype("bfloat16")}
    kind = "Int8Tensor" if bits == 8 else "IntxUnpackedToInt8Tensor"
    if bits < 8:
        attributes |= {"target_dtype": dtype(f"int{bits}"), "activation_quantization": None}
    return Case(kind, recipe, parts, attributes, expected.astype(np.float32))


def int4(shape: tuple[int, ...] = (4, 16), group: int = 8) -> Case:
    codes, rows = RNG.integers(-8, 8, shape, np.int8), shape[0]
    scale, bias = scales(shape[1] // group, rows, kind="BF16"), scales(shape[1] // group, rows, kind="BF16")
    data = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    expected = codes * spread(numbers(scale).T, shape) + spread(numbers(bias).T, shape)
    return Case(
        "Int4Tensor",
        f"int4_bias,group_size={group}",
        {"qdata": ("I8", data), "scale": scale, "zero_point": bias},
        {"block_size": [1, group], "shape": list(shape), "activation_dtype": dtype("bfloat16")},
        expected.astype(np.float32),
    )


def swizzled(scale: Tensor) -> Tensor:
    """Scales (rows, columns) in tiles of 128 x 4, by the formula of cuBLAS."""
    rows, tiles = scale[1].shape[0], -(-scale[1].shape[1] // 4)
    out = np.zeros(-(-rows // 128) * tiles * 512, np.uint8)
    for (r, c), code in np.ndenumerate(scale[1]):
        out[((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4] = code
    return scale[0], out.reshape(-(-rows // 128) * 32, -1)


def fp6(codes: np.ndarray, fmt: str) -> np.ndarray:
    sign, rest = np.where(codes & 32, -1.0, 1.0), codes.astype(int) & 31
    mantissa = 3 if fmt == "fp6_e2m3" else 2
    exponent, fraction = rest >> mantissa, (rest & (1 << mantissa) - 1) / (1 << mantissa)
    bias = 1 if fmt == "fp6_e2m3" else 3
    return sign * np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))


def mx(recipe: str, element: str, shape: tuple[int, ...] = (3, 64), swizzle: bool = False) -> Case:
    scale = scales(*shape[:-1], shape[-1] // 32, kind="F8_E8M0")
    name: Any = element if element.startswith("fp6") else dtype(element)
    if element.startswith("float8"):
        codes = fp8_codes(*shape, fmt="F8_E4M3" if "e4m3" in element else "F8_E5M2")
        x = numbers(codes)
    elif element.startswith("fp6"):
        codes = "U8", RNG.integers(0, 64, shape, np.uint8)
        x = fp6(codes[1], element).astype(np.float32)
    else:
        nibbles = RNG.integers(0, 16, shape, np.uint8)
        codes, x = ("U8", nibbles[..., ::2] | nibbles[..., 1::2] << 4), E2M1[nibbles]
    return Case(
        "MXTensor",
        recipe,
        {"qdata": codes, "scale": swizzled(scale) if swizzle else scale},
        {"elem_dtype": name, "block_size": 32, "orig_dtype": dtype("bfloat16"), "is_swizzled_scales": swizzle},
        x * spread(numbers(scale), shape),
    )


def nvfp4(recipe: str, shape: tuple[int, ...] = (3, 32), whole: np.ndarray | None = None, swizzle: bool = False) -> Case:
    nibbles, scale = RNG.integers(0, 16, shape, np.uint8), fp8_codes(*shape[:-1], shape[-1] // 16)
    parts: dict[str, Tensor] = {
        "qdata": ("U8", nibbles[..., ::2] | nibbles[..., 1::2] << 4),
        "scale": swizzled(scale) if swizzle else scale,
    }
    of_blocks = numbers(scale)
    if whole is not None:
        parts["per_tensor_scale"] = "F32", whole
        of_blocks = of_blocks * whole
    expected = E2M1[nibbles] * spread(of_blocks, shape)
    attributes = {"block_size": 16, "orig_dtype": dtype("bfloat16"), "is_swizzled_scales": swizzle}
    return Case("NVFP4Tensor", recipe, parts, attributes, expected)


ONE, EACH = np.asarray(0.37, np.float32), np.array([0.37, 1.9], np.float32).reshape(2, 1, 1)
CASES: dict[str, Callable[[], Case]] = {
    "fp8 per row": lambda: float8("fp8_row", (6, 8), [1, 8]),
    "fp8 per column": lambda: float8("fp8_row", (6, 8), [6, 1]),
    "fp8 per tensor": lambda: float8("fp8_current", (6, 8), [6, 8]),
    "fp8 per block": lambda: float8("fp8_block,block_k=4,block_m=2", (6, 8), [2, 4]),
    "fp8 per group": lambda: float8("fp8_block,block_k=4", (6, 8), [1, 4]),
    "fp8 per matrix": lambda: float8("fp8_current", (2, 6, 8), [1, 6, 8]),
    "fp8 per row of experts": lambda: float8("fp8_row", (2, 6, 8), [1, 1, 8]),
    "fp8 per column of experts": lambda: float8("fp8_row", (2, 6, 8), [1, 6, 1]),
    "e5m2": lambda: float8("fp8_row,fp8_format=E5M2", (6, 8), [1, 8], "F8_E5M2"),
    "int8 per row": lambda: integers("int8", (5, 8), [1, 8]),
    "int8 per tensor": lambda: integers("int8", (5, 8), [5, 8]),
    "int8 per matrix": lambda: integers("int8", (2, 5, 8), [1, 5, 8]),
    "int8 per column": lambda: integers("int8", (5, 8), [5, 1], zero="none"),
    "int8 asymmetric": lambda: integers("int8,signed=false,symmetric=false", (5, 8), [1, 8], zero="I8"),
    "int8 asymmetric per tensor": lambda: integers("int8,signed=false,symmetric=false", (5, 8), [5, 8], zero="I8"),
    "int8 asymmetric per column": lambda: integers("int8,signed=false,symmetric=false", (5, 8), [5, 1], zero="I8"),
    "int8 in fp16": lambda: integers("int8,scale_dtype=fp16", (5, 8), [1, 8], scale="F16"),
    "int8 with float zero-points": lambda: integers("int8,signed=false,symmetric=false", (5, 8), [1, 8], zero="F32"),
    "int4": lambda: integers("int4,group_size=4,scale_dtype=bf16", (5, 8), [1, 4], 4, "none", "BF16"),
    "int4 asymmetric": lambda: integers(
        "int4,group_size=4,scale_dtype=bf16,signed=false,symmetric=false", (5, 8), [1, 4], 4, "I8", "BF16"
    ),
    "int4 per column": lambda: integers("int4,group_size=6,scale_dtype=fp32", (6, 5), [6, 1], 4, "none"),
    "int4 of odd rows": lambda: integers("int4,group_size=5,scale_dtype=fp32", (6, 5), [1, 5], 4, "none"),
    "int3": lambda: integers("int8,group_size=4", (5, 8), [1, 4], 3, "none"),
    "int5 asymmetric": lambda: integers("int8,group_size=4,signed=false,symmetric=false", (5, 8), [1, 4], 5, "I8"),
    "Int4Tensor": int4,
    "mxfp8": lambda: mx("mxfp8", "float8_e4m3fn"),
    "mxfp8 in e5m2": lambda: mx("mxfp8,fp8_format=E5M2", "float8_e5m2"),
    "mxfp8 swizzled": lambda: mx("mxfp8", "float8_e4m3fn", (130, 160), True),
    "mxfp6": lambda: mx("mxfp6", "fp6_e2m3"),
    "mxfp6 in e3m2": lambda: mx("mxfp6,fp6_format=E3M2", "fp6_e3m2"),
    "mxfp4": lambda: mx("mxfp4", "float4_e2m1fn_x2"),
    "mxfp4 of experts": lambda: mx("mxfp4", "float4_e2m1fn_x2", (2, 3, 64)),
    "mxfp4 swizzled": lambda: mx("mxfp4", "float4_e2m1fn_x2", (5, 160), True),
    "nvfp4 alone": lambda: nvfp4("nvfp4,two_level=false"),
    "nvfp4": lambda: nvfp4("nvfp4,order=scales_first", whole=ONE),
    "nvfp4 of experts": lambda: nvfp4("nvfp4,order=scales_first", (2, 3, 32), EACH),
    "nvfp4 swizzled": lambda: nvfp4("nvfp4,order=scales_first", (3, 96), ONE, True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_is_read_exactly(tmp_path: Path, name: str) -> None:
    case = CASES[name]()
    (stored,) = values(save(tmp_path, **{UP: case})).values()
    assert stored.form.recipe == breccia.recipe(case.recipe)
    assert stored.shape == case.expected.shape
    assert np.array_equal(decoded(stored), case.expected)


def test_parts_beside_plain_tensors_are_found_by_any_name_of_a_parameter(tmp_path: Path) -> None:
    names = ("model.experts.gate_up_proj", "model.experts.down_proj", "head.weight", "root")
    cases = {name: float8("fp8_row", (2, 4, 8), [1, 1, 8]) for name in names[:2]} | {"head.weight": CASES["int4"]()}
    found = values(save(tmp_path, **cases))
    assert set(found) == set(cases)
    for name, case in cases.items():
        assert np.array_equal(decoded(found[name]), case.expected)


def test_a_file_without_a_config_is_recognized_by_its_tensors(tmp_path: Path) -> None:
    case = CASES["mxfp4"]()
    path = folder(tmp_path, case.tensors(), None, {UP: case.entry()})
    assert np.array_equal(decoded(values(path / "model.safetensors")[UP]), case.expected)


def test_codes_that_need_no_packing_stay_mapped(tmp_path: Path) -> None:
    for name in ("fp8 per row", "int8 per row", "mxfp4", "nvfp4", "Int4Tensor", "mxfp4 swizzled"):
        (stored,) = values(save(tmp_path, **{UP: CASES[name]()})).values()
        data: Any = stored.tensor().data
        while isinstance(data, np.ndarray):
            data = data.base
        assert type(data).__name__ == "mmap", name


def test_how_a_layer_quantizes_its_inputs_is_not_part_of_the_value(tmp_path: Path) -> None:
    case = CASES["int8 per row"]()
    static = case.change({"act_quant_scale": scales(1, 1), "act_quant_zero_point": ("I8", np.zeros((1, 1), np.int8))})
    assert np.array_equal(only(tmp_path, static), case.expected)


BROKEN: dict[str, tuple[Callable[[], Case], type[BrecciaError], str]] = {
    "a smoothing factor": (
        lambda: CASES["int8 per row"]().change({"act_pre_scale": scales(8)}),
        UnsupportedError,
        "it has act_pre_scale, by which its layer multiplies the inputs: the weight alone is not that of the model",
    ),
    "no scale": (lambda: CASES["fp8 per row"]().change({"scale": None}), DialectError, "a Float8Tensor has the part '_scale'"),
    "codes of another dtype": (
        lambda: CASES["fp8 per row"]().change({"qdata": ("I8", np.ones((6, 8), np.int8))}),
        DialectError,
        "'_qdata' is I8; a Float8Tensor has F8_E4M3 or F8_E5M2 or F8_E4M3FNUZ or F8_E5M2FNUZ there",
    ),
    "no block": (
        lambda: CASES["fp8 per row"]().change(block_size=None),
        DialectError,
        "block_size is a list of lengths; got ",
    ),
    "an odd block": (lambda: CASES["fp8 per row"]().change(block_size=[1, 5]), DialectError, "which does not divide it"),
    "another block": (
        lambda: CASES["fp8 per row"]().change(block_size=[1, 4]),
        DialectError,
        "with block_size [1, 4] has scales of shape (6, 2); found (6, 1)",
    ),
    "an older version": (
        lambda: CASES["mxfp8"]().change(is_swizzled_scales="absent"),
        DialectError,
        "its MXTensor has no attribute 'is_swizzled_scales': it is of a version of torchao that breccia does not know",
    ),
    "a swizzle of text": (
        lambda: CASES["mxfp8"]().change(is_swizzled_scales="no"),
        DialectError,
        "is_swizzled_scales is true or false; got 'no'",
    ),
    "NaN": (
        lambda: CASES["fp8 per row"]().change({"scale": ("F32", np.array([[1], [np.nan], [1], [1], [1], [1]], np.float32))}),
        DialectError,
        "'_scale' has 1 scales that are not finite; the first is nan at position 1",
    ),
    "NaN in E8M0": (
        lambda: CASES["mxfp4"]().change({"scale": ("F8_E8M0", np.full((3, 2), 255, np.uint8))}),
        DialectError,
        "'_scale' has 6 scales that are not finite",
    ),
    "Inf for the tensor": (
        lambda: CASES["nvfp4"]().change({"per_tensor_scale": ("F32", np.asarray(np.inf, np.float32))}),
        DialectError,
        "'_per_tensor_scale' has 1 scales that are not finite",
    ),
    "a wide code": (
        lambda: CASES["int4"]().change({"qdata": ("I8", np.full((5, 8), 8, np.int8))}),
        DialectError,
        "'_qdata' of int4 lies in -8..7; got 8..8",
    ),
    "a wide zero-point": (
        lambda: CASES["int4"]().change({"zero_point": ("I8", np.full((5, 2), -9, np.int8))}),
        DialectError,
        "'_zero_point' of int4 lies in -8..7; got -9..-9",
    ),
    "a wide code of FP6": (
        lambda: CASES["mxfp6"]().change({"qdata": ("U8", np.full((3, 64), 64, np.uint8))}),
        DialectError,
        "'_qdata' has codes of FP6, one to a byte, below 64; got 64",
    ),
    "a float zero-point that rounds": (
        lambda: CASES["int8 per row"]().change({"zero_point": ("F32", np.full((5, 1), 1e-9, np.float32))}),
        DialectError,
        "float zero-points that cannot be moved to unsigned codes without rounding",
    ),
    "zero-points of another shape": (
        lambda: CASES["int8 per row"]().change({"zero_point": ("I8", np.ones((5,), np.int8))}),
        DialectError,
        "'_zero_point' has shape [5]; its other parts need [5, 1]",
    ),
    "blocks of integers": (
        lambda: integers("int8", (4, 8), [2, 4]),
        DialectError,
        "Int8Tensor has one scale per 2 x 4 integers; recipes have one per row, or group of a row",
    ),
    "a width beyond int8": (
        lambda: CASES["int4"]().change(target_dtype=dtype("int9")),
        DialectError,
        "target_dtype is 'int9'; torchao's integers are int1 to int8",
    ),
    "a dtype that is a number": (
        lambda: CASES["int4"]().change(target_dtype=4),
        DialectError,
        "target_dtype is a dtype; got 4",
    ),
    "elements of integers": (
        lambda: CASES["mxfp8"]().change(elem_dtype=dtype("int8")),
        DialectError,
        "MXTensor has elements int8, which no MX recipe has",
    ),
    "blocks of 16 in MX": (
        lambda: CASES["mxfp8"]().change(block_size=16),
        UnsupportedError,
        "its MXTensor has blocks of 16 codes; recipes of this format have 32",
    ),
    "a partial block": (
        lambda: CASES["mxfp8"]().change({"qdata": fp8_codes(3, 63)}),
        DialectError,
        "it has shape 3x63; torchao has matrices whose rows are whole blocks of 32",
    ),
    "plain scales called swizzled": (
        lambda: CASES["mxfp8"]().change(is_swizzled_scales=True),
        DialectError,
        "'_scale' has shape [3, 2]; its other parts need [32, 16]",
    ),
    "a scale per half of the experts": (
        lambda: CASES["nvfp4 of experts"]().change({"per_tensor_scale": scales(1, 1)}),
        DialectError,
        "'_per_tensor_scale' has shape [1, 1]; its other parts need [] or [2, 1, 1]",
    ),
    "groups that rows lack": (
        lambda: CASES["Int4Tensor"]().change(block_size=[1, 5]),
        DialectError,
        "its shape 4x16 has block_size [1, 5]; an Int4Tensor has whole groups of a row",
    ),
    "scales that are not transposed": (
        lambda: CASES["Int4Tensor"]().change({"scale": scales(4, 2, kind="BF16")}),
        DialectError,
        "'_scale' has shape [4, 2]; its other parts need [2, 4]",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_is_named(tmp_path: Path, name: str) -> None:
    case, kind, message = BROKEN[name]
    with pytest.raises(kind) as e:
        only(tmp_path, case())
    assert f"{UP} (torchao): " in str(e.value)
    assert message in str(e.value)


def test_padding_of_swizzled_scales_is_zero(tmp_path: Path) -> None:
    case = CASES["mxfp4 swizzled"]()
    scale = case.parts["scale"][1].copy()
    scale[-1, -1] = 7
    with pytest.raises(
        DialectError, match=r"MXTensor: the padding of scale \(shape \(1, 2, 512\), uint8\) holds 7; padding is"
    ):
        only(tmp_path, case.change({"scale": ("F8_E8M0", scale)}))


def test_metadata_that_torchao_does_not_write_is_named(tmp_path: Path) -> None:
    case = CASES["fp8 per row"]()

    def message(text: str | None) -> str:
        path = folder(tmp_path, case.tensors(), quantized("torchao"), {} if text is None else {UP: text})
        with pytest.raises((DialectError, UnsupportedError)) as e:
            decoded(values(path)[UP])
        return str(e.value).partition(f"{UP} (torchao): ")[2]

    assert message(None).startswith(f"the file's metadata has no entry {UP!r} with the class of the tensor: a program that dro")
    assert message("{").startswith("its entry in the file's metadata is not JSON (")
    assert message("[]").startswith(
        "its entry in the file's metadata is an object with _type, _data and _tensor_data_names; go"
    )
    assert message(case.entry(_type="Int4TilePackedTo4dTensor")).startswith(
        "its class is torchao's Int4TilePackedTo4dTensor, which packs codes for the kernels of one device. Float8Tensor, "
    )
    assert message(case.entry(_type="OddTensor")).startswith("its class is torchao's OddTensor, which is none that breccia kno")
    assert "lists the parts qdata, scale, zero_point; no file has zero_point." in message(
        case.entry(_tensor_data_names=["qdata", "scale", "zero_point"])
    )
    assert "lists the parts qdata; the files have _scale, too." in message(case.entry(_tensor_data_names=["qdata"]))


def test_the_prefix_of_a_group_is_text_that_names_of_parts_start_with() -> None:
    group = TensorGroup({"_qdata": ()}, value="", prefix="_")
    assert [group.named(stem) for stem in ("up._weight", "_root", "up.weight", "up._")] == ["up.weight", "root", None, None]
    group.check("it")
    with pytest.raises(PluginError, match=r"^it: prefix is the start of a name, like '_'; got 3\."):
        TensorGroup({"_qdata": ()}, prefix=_three()).check("it")


def _three() -> Any:
    return 3


@pytest.mark.parametrize("name", ("fp8 per row", "int4 asymmetric", "Int4Tensor", "mxfp6", "nvfp4 swizzled"))
def test_faults_of_files_are_typed_errors(tmp_path: Path, name: str) -> None:
    case = CASES[name]()
    assert untyped(case.tensors(), lambda tensors: folder(tmp_path, tensors, quantized("torchao"), {UP: case.entry()})) == []
