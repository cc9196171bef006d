"""Weight-only matmul without a GPU: the storage of weights, the decoding of the CUDA source on the host, plans, compilation."""

from __future__ import annotations

import ctypes
import functools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from compiling import compiled_with_log
from host_kernels import built, decoding_text
from marks import long_but
from weights import FORMATS, Drawn, in_torch, tensor

import breccia
from breccia.backend import reference
from breccia.codecs import E2M1, E4M3, E4M3FNUZ, F16, F32, INT4, INT8, NF4, UE4M3, UE5M3, UINT4, UINT8
from breccia.formats import Format, Level
from breccia.internal import fragments
from breccia.options import product_options
from breccia.tensors.equality import bytes_equal
from breccia.tensors.tensor import ScaledTensor
from breccia_triton.gemm import wgmma
from breccia_triton.gemm.weight_only import plans
from breccia_triton.launch import compiler
from breccia_triton.tuning import choices, measurements

STORAGE = "mma_16x128"
# -- the storage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 128), (1, 1), (65, 129), (16, 300), (200, 513)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_the_storage_keeps_every_bit_of_every_pattern(name: str, shape: tuple[int, int]) -> None:
    st = tensor(name, *shape, wild=True)
    stored = st.to_storage(STORAGE)
    assert stored.shape == shape
    assert bytes_equal(stored.to_plain(), st)
    assert stored.data.shape[:2] == (-(-shape[0] // 64), -(-shape[1] // 128))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "e4m3-tensor"])
def test_the_storage_holds_the_weights_of_experts(name: str) -> None:
    each = [tensor(name, 70, 200, seed=seed, wild=True) for seed in range(3)]
    st = breccia.stack(each)
    stored = st.to_storage(STORAGE)
    assert stored.shape == (3, 70, 200)
    assert bytes_equal(stored.to_plain(), st)
    for i, one in enumerate(each):
        alone = one.to_storage(STORAGE)
        assert (stored.data[i] == alone.data).all() and (stored.scale[i] == alone.scale).all()
        assert bytes_equal(stored[i], one)
    two = breccia.stack([st, st])
    assert bytes_equal(two.to_storage(STORAGE).to_plain(), two)


def test_one_scale_for_each_expert_has_no_order() -> None:
    st = breccia.stack([tensor("e4m3-tensor", 64, 128, seed=seed) for seed in range(2)])
    with pytest.raises(breccia.errors.UnsupportedError, match="one scale for each matrix"):
        st.to_storage(STORAGE)


def _fragment(lane: int, i: int) -> tuple[int, int]:
    """Row and column of element i of operand A of mma.m16n8k16 in a lane, as the PTX ISA defines it."""
    group, thread = lane >> 2, lane % 4
    row = group if (0 <= i < 2) or (4 <= i < 6) else group + 8
    column = thread * 2 + (i & 1) if i < 4 else thread * 2 + (i & 1) + 8
    return row, column


@pytest.mark.parametrize("name", ["int4-128", "mxfp4", "e4m3-block", "int8-32"])
def test_codes_and_scales_are_where_the_fragments_of_the_isa_need_them(name: str) -> None:
    st = tensor(name, 80, 200, seed=3)
    plain, fmt = st, FORMATS[name]
    stored = st.to_storage(STORAGE).data
    codes = plain.data if fmt.element.bits == 8 else np.stack([plain.data & 15, plain.data >> 4], -1).reshape(80, -1)
    codes = np.pad(codes.view(np.uint8), ((0, 48), (0, 56)))
    group = fmt.scale.block[1] or 0
    scale = np.pad(plain.scale, ((0, 48), (0, 256 // group - plain.scale.shape[1])))
    places = (6, 3, 0, 9) if fmt.element == E2M1 else (0, 4, 8, 12)
    signs = (15, 12, 13, 14) if fmt.element == E2M1 else (3, 7, 11, 15)
    bytes_ = 1024 * fmt.element.bits // 4
    for block, chunk, tile in np.ndindex(2, 2, 4):
        row0, column0 = block * 64 + tile * 16, chunk * 128
        piece = stored[block, chunk].reshape(4, -1)[tile]
        for lane, step, i in np.ndindex(32, 8, 8):
            row, column = _fragment(lane, i)
            expected = codes[row0 + row, column0 + 16 * step + column]
            register, half = i // 2, i % 2
            if fmt.element.bits == 8:
                found = piece[step // 2 * 512 + lane * 16 + step % 2 * 8 + register // 2 * 4 + half * 2 + register % 2]
            else:
                at = step // 4 * 512 + lane * 16 + step % 4 * 4 + half * 2
                word = int(piece[at]) | int(piece[at + 1]) << 8
                found = (word >> places[register]) & 7 | (word >> signs[register] & 1) << 3
            assert found == expected
        words = piece[bytes_:].view(scale.dtype).reshape(8, 128 // group, 2)
        for g, j, upper in np.ndindex(8, 128 // group, 2):
            assert words[g, j, upper] == scale[row0 + g + 8 * upper, column0 // group + j]


def test_every_e4m3_scale_has_a_name_of_its_own_and_positive_ones_keep_their_value() -> None:
    assert sorted(fragments.UE5M3_OF) == list(range(256))
    for code in range(1, 127):
        name = fragments.UE5M3_OF[code]
        assert 2.0 ** ((name >> 3) - 10) * (1 + (name & 7) / 8) == E4M3.value(code)


def test_rows_that_the_fast_decoding_does_not_take_are_flagged() -> None:
    def flags(name: str, change: Any) -> list[int]:
        st = tensor(name, 130, 256, seed=1)
        change(st)
        return st.to_storage(STORAGE).scale[:, 0].tolist()

    def nothing(st: ScaledTensor) -> None: ...

    def codes(row: int, code: int) -> Any:
        def change(st: ScaledTensor) -> None:
            st.data[row, 5] = code

        return change

    def scale(row: int, code: Any) -> Any:
        def change(st: ScaledTensor) -> None:
            st.scale[row, 0] = code

        return change

    assert flags("mxfp4", nothing) == flags("e4m3-block", nothing) == [0, 0, 0]
    assert flags("e4m3-block", codes(70, 0x7F)) == flags("e4m3-block", codes(70, 0xFF)) == [0, 3, 0]
    assert flags("mxfp8-e5m2", codes(129, 0x7C)) == [0, 0, 3]
    assert flags("int8-row", codes(0, -128)) == [0, 0, 0]
    assert flags("mxfp4", scale(3, 255)) == flags("mxfp4", scale(3, 254)) == [3, 0, 0]
    assert flags("mxfp4", scale(3, 1)) == [7, 0, 0]
    assert flags("mxfp8", nothing) == flags("mxfp8-e5m2", nothing) == flags("mxfp8", scale(3, 150)) == [0, 0, 0]
    assert flags("mxfp8", scale(3, 20)) == flags("mxfp8-e5m2", scale(3, 151)) == [1, 0, 0]
    assert flags("mxfp8", scale(3, 16)) == [5, 0, 0]
    assert flags("mxfp8", scale(3, 255)) == [3, 0, 0]
    assert flags("mxfp4", scale(3, 90)) == [2, 0, 0]
    assert flags("nvfp4", scale(3, 0x80)) == flags("nvfp4", scale(3, 0xC0)) == [3, 0, 0]
    assert flags("nvfp4", scale(3, 0)) == flags("nvfp4", scale(3, 127)) == [0, 0, 0]
    assert flags("int4-128", scale(3, np.inf)) == flags("int4-64", scale(3, 0x7FC0)) == [3, 0, 0]

    def zeros(st: Any) -> None:
        st.data[3, :16], st.scale[3, 0] = 0, 0

    assert flags("mxfp4", zeros) == [0, 0, 0]

    def low(st: Any) -> None:
        st.scale[:] = 17

    def lower(st: Any) -> None:
        st.scale[:] = 16

    assert flags("mxfp8-e5m2", low) == flags("mxfp4", low) == [0, 0, 0]
    assert flags("mxfp8-e5m2", lower) == [4, 4, 4]

    def nothing_but_zeros(st: Any) -> None:
        st.data[:], st.scale[:] = 0, 0

    assert flags("mxfp4", nothing_but_zeros) == flags("mxfp8", nothing_but_zeros) == [0, 0, 0]


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxfp8-e5m2", "nvfp4-one"])
def test_bfloat16_holds_what_is_decoded_to_memory(name: str) -> None:
    operand = plans.weight_format_of(FORMATS[name], FORMATS[name].scale.block)
    assert isinstance(operand, plans.WeightFormat) and operand.exact
    st = tensor(name, 64, 256, seed=1)
    if name != "nvfp4-one":
        st.scale[:] = np.random.default_rng(3).integers(17, 158, st.scale.shape)
        assert not st.to_storage(STORAGE).scale[0, 0] & fragments.SUBNORMAL
    bits = reference.dequantize(st).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    exponents = bits >> 23 & 0xFF
    assert ((exponents > 0) | (bits << 1 == 0)).all()
    for other in ("int4-128", "nvfp4", "e4m3-block", "e2m1-f32", "mxint8"):
        operand = plans.weight_format_of(FORMATS[other], FORMATS[other].scale.block)
        assert isinstance(operand, plans.WeightFormat) and not operand.exact


def test_the_storage_refuses_what_it_has_no_order_for() -> None:
    x = np.ones((64, 256), np.float32)
    for recipe in (breccia.MXFP6BlockScaling(), breccia.INT4Scaling(48)):
        with pytest.raises(breccia.errors.UnsupportedError, match=STORAGE):
            breccia.cast(x, recipe).to_storage(STORAGE)


# -- decoding, of the CUDA source itself -----------------------------------------------------------------------------

#: Every element of a chunk by the fast decoding, times its scale and the factor of its rows; and by the slow path.
_PROGRAM = """
extern "C" void decoded(const u8* chunk, int largest, float* fast, float* slow) {
    host_memory = chunk;
    for (int row = 0; row < 64; row++)
        for (int column = 0; column < 128; column++) slow[row * 128 + column] = element(chunk, row, column);
    for (int tile = 0; tile < 4; tile++)
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane >> 2, t = lane & 3, slice = tile * SLICE;
            Codes codes;
            Rows rows = {};
            load_codes(slice, lane, codes);
            for (int j = 0; j < UNITS; j++) {
                u32 a[4];
                float s[2] = {1.f, 1.f};
                decode_tile(codes, slice, g, j, largest, rows, a);
                if (!AT_DECODE) load_scales(slice, g, j * 16 / GROUP, s[0], s[1]);
                for (int i = 0; i < 8; i++) {
                    const int upper = i / 2 % 2, column = j * 16 + 2 * t + i % 2 + i / 4 * 8;
                    const float code = host_of(a[i / 2] >> i % 2 * 16);
                    fast[(tile * 16 + g + 8 * upper) * 128 + column] = code * factor_of_rows(largest) * s[upper];
                }
            }
        }
}
"""


#: A whole product, by the slow path.
_PRODUCT = """
extern "C" void multiplied(const Weight* w, const u16* x, const void* bias, void* y, int M, int N, int K, int ldx, int ldy) {
    threadIdx.x = 0;
    blockDim.x = 1;
    slow_rows(*w, x, bias, y, 0, M, 0, N, N, K, ldx, ldy);
}
"""

#: Where the parts of groups are; and a grouped product, by the slow path.
_GROUPED = """
#if GROUPED
extern "C" void parts(const int* ends, int count, int M, int batch, int number, int* found) {
    const Groups groups = {ends, 0, 0, 0, count};
    std::vector<std::thread> lanes;
    for (int lane = 0; lane < 32; lane++)
        lanes.emplace_back([=] {
            host_lane = lane;
            for (int i = 0; i < number; i++) {
                const Part part = part_of(groups, i, batch, M, lane);
                if (lane == 31) { found[3 * i] = part.group; found[3 * i + 1] = part.first; found[3 * i + 2] = part.last; }
            }
        });
    for (auto& lane : lanes) lane.join();
}
extern "C" void multiplied_groups(int batch, int number, const Weight* w, const Groups* groups, const u16* x,
                                  const void* bias, void* y, int M, int N, int K, int ldx, int ldy) {
    std::vector<int> found(3 * number);
    parts(groups->ends, groups->count, M, batch, number, found.data());
    threadIdx.x = 0;
    blockDim.x = 1;
    for (int i = 0; i < number; i++) {
        const int group = found[3 * i], first = found[3 * i + 1], last = found[3 * i + 2];
        if (group == groups->count) write_zeros(y, first, last, 0, N, N, ldy);
        else if (group >= 0) slow_rows(weight_of(*w, *groups, group), x, bias, y, first, last, 0, N, N, K, ldx, ldy);
    }
}
#endif
"""


@functools.cache
def _built(folder: Path, macros: tuple[tuple[str, int], ...]) -> Any:
    name = "-".join(f"{value}" for _, value in macros)
    return built(decoding_text() + _PROGRAM + _PRODUCT + _GROUPED, macros, folder, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decoding")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("wild", [False, True], ids=["finite", "every pattern"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_cuda_source_decodes_every_element_exactly(name: str, act: str, wild: bool, folder: Path) -> None:
    st = tensor(name, 64 * 6, 256, seed=5, wild=wild)
    fmt = FORMATS[name]
    if name.startswith("mxfp"):  # rows with scales close enough, and, in wild tensors, rows without
        st.scale[:192] = np.random.default_rng(1).integers(110, 128, (192, 8))
        st.scale[0, 0], st.data[0, : 32 * FORMATS[name].element.bits // 8] = 0, 0
        if not wild:
            st.scale[192:256] = np.random.default_rng(2).integers(61, 151, (64, 8))
    operand = plans.weight_format_of(fmt, fmt.scale.block)
    assert isinstance(operand, plans.WeightFormat)
    macros = {**operand.macros, "ACT": plans.DTYPES[act], "OUT": 2, "BIAS": 3}
    decoded = _built(folder, tuple(sorted(macros.items()))).decoded
    values = reference.dequantize(_without_global(st)).astype(np.float64) / operand.factor
    if fmt.global_scale is not None and fmt.global_scale.convention == "amax":
        values *= operand.factor
    stored, flag = st.to_storage(STORAGE), 1 << plans.DTYPES[act]
    taken = 0
    for block, chunk in np.ndindex(*stored.data.shape[:2]):
        fast, slow = np.empty((2, 64, 128), np.float32)
        piece = np.ascontiguousarray(stored.data[block, chunk])
        flags, largest = stored.scale[block].tolist()
        pointers = [ctypes.c_void_p(part.ctypes.data) for part in (piece, fast, slow)]
        decoded(pointers[0], largest, *pointers[1:])
        with np.errstate(over="ignore"):  # a MXINT8 code times 2^127
            expected = values[64 * block : 64 * (block + 1), 128 * chunk : 128 * (chunk + 1)].astype(np.float32)
        np.testing.assert_array_equal(slow, expected)
        if not flags & flag:
            np.testing.assert_array_equal(fast, expected)
            taken += 1
    assert taken or wild


def _without_global(st: ScaledTensor) -> ScaledTensor:
    """Its codes and block scales alone: the kernel multiplies sums by the tensor's scale."""
    fmt = st.recipe.format
    if fmt.global_scale is None:
        return st
    alone = Drawn(fmt=Format(fmt.element, fmt.levels[1:], fmt.offset))
    return ScaledTensor.from_parts(st.data, st.scale, alone, st.layout, st.zero_point, None, st.axis, st.padding)


# -- calls -----------------------------------------------------------------------------------------------------------


class _HostKernel:
    """Stands in for a kernel on a device: a launch reads its arguments as the kernel does, and computes by the slow path.

    batch: rows of a part, for groups.
    """

    def __init__(self, library: Any, wide: bool, batch: int = 0) -> None:
        self.library, self.wide, self.batch, self.streams = library, wide, batch, list[tuple[int, bool]]()

    def prepare(self, grid: Any, threads: int, values: Any, slots: Any, cluster: int, dependent: bool) -> Any:
        from breccia_triton.launch.driver import writing

        def launched(stream: int) -> None:
            self.streams.append((stream, dependent))
            weight, *others = values
            if self.batch:
                pointers = ctypes.byref(weight), ctypes.byref(others.pop(0))
                self.library.multiplied_groups(self.batch, grid[1], *pointers, *others[self.wide :])
            else:
                self.library.multiplied(ctypes.byref(weight), *others[self.wide :])

        return SimpleNamespace(run=writing(slots, ["launched(stream)"], launched=launched))


def test_zero_points_of_other_dtypes_are_multiplied_on_the_plain_weight() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from breccia_triton.gemm.weight_only import matmul as weight_only

    st = breccia.cast(torch.randn(64, 128), breccia.INT4Scaling(64, signed=False, symmetric=False))
    other = ScaledTensor(st.data, st.scale, st.recipe, st.layout, st.zero_point.to(torch.int32), None)
    stored = other.to_storage(STORAGE)
    assert stored.to_plain().zero_point.equal(other.zero_point)
    x = torch.randn(3, 128).bfloat16()
    assert weight_only.weight_only_matmul(x, stored.mT).equal(breccia.matmul(x, other.mT))


def _on_the_host(monkeypatch: Any, folder: Path) -> tuple[list[_HostKernel], list[Any]]:
    """(The kernels that calls prepare from here on, what they describe to TMA.)"""
    import torch

    from breccia_triton.gemm.weight_only import matmul as weight_only
    from breccia_triton.launch import executable
    from breccia_triton.launch.driver import TensorMap

    made: list[_HostKernel] = []
    described: list[Any] = []

    def function(problem: Any, config: Any, grouped: bool = False) -> Any:
        numbers = {"ACT": plans.DTYPES[problem.act], "OUT": plans.DTYPES[problem.out], "GROUPED": int(grouped)}
        macros = {**problem.format.macros, **numbers}
        macros["BIAS"] = plans.NO_BIAS if problem.bias is None else plans.DTYPES[problem.bias]
        library = _built(folder, tuple(sorted(macros.items())))
        made.append(_HostKernel(library, config.wide, config.batch if grouped else 0))
        return made[-1]

    def encoder(*facts: Any) -> Any:
        described.append(facts)
        return lambda address: TensorMap()

    monkeypatch.setattr(weight_only, "function", function)
    monkeypatch.setattr(executable, "stream_of", lambda index: 7)
    monkeypatch.setattr(weight_only, "driver", lambda: SimpleNamespace(encoder=encoder, address_word=None))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    monkeypatch.setattr(weight_only, "name_of", lambda properties: "")
    weight_only._calls.clear()
    return made, described


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "name",
    long_but(
        ["uint4-zero-16", "nvfp4"],
        ["int4-128", "uint4-zero-16", "nvfp4", "nvfp4-divisor", "nvfp4-amax", "mxint8", "e4m3-square"],
    ),
)
def test_a_call_passes_its_arguments_as_the_kernel_reads_them(name: str, monkeypatch: Any, folder: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from breccia_triton.gemm.weight_only import matmul as weight_only

    made, described = _on_the_host(monkeypatch, folder)
    n, k = 70, 132
    plain = tensor(name, n, k, seed=2)
    w = in_torch(plain).to_storage(STORAGE).mT
    values = torch.from_numpy(reference.dequantize(plain).astype(np.float64))
    torch.manual_seed(0)
    for m in (1, 5, 20):
        x = torch.randn(m, k).bfloat16()
        bias = torch.randn(n).half()
        exact = x.double() @ values.mT
        size = x.double().abs() @ values.mT.abs()
        found = weight_only.weight_only_matmul(x, w)
        assert found.dtype == torch.float32
        assert ((found - exact).abs() <= k * 2.0**-24 * size).all()
        assert weight_only.weight_only_matmul(x, w).equal(found)
        assert made[-1].streams == [(7, m != 1), (7, True)]  # first without an early start: the weight was just written
        found = weight_only.weight_only_matmul(x[None].expand(2, m, k), w, product_options("bfloat16", bias=bias))
        assert found.shape == (2, m, n) and found.dtype == torch.bfloat16
        assert ((found[1] - (exact + bias)).abs() <= 2.0**-8 * (size + bias.abs())).all()
        wide = torch.full((m, 100), 7.0)
        out = wide[:, :n]
        assert weight_only.weight_only_matmul(x, w, product_options("float32", out=out)) is out
        assert ((out - exact).abs() <= k * 2.0**-24 * size).all() and (wide[:, n:] == 7).all()
        turned = torch.zeros(n, m).mT
        assert weight_only.weight_only_matmul(x, w, product_options("float32", out=turned)) is turned
        assert turned.equal(out)
        sliced = torch.randn(m, 2 * k).bfloat16()[:, ::2]
        assert ((weight_only.weight_only_matmul(sliced, w) - sliced.double() @ values.mT).abs() <= 0.01 * size.max()).all()
    if name == "int4-128":
        assert {(facts[0], facts[1], facts[3]) for facts in described} == {
            ("bfloat16", (20, k), (32, 64)),
            ("bfloat16", (40, k), (64, 64)),
        }
        assert all(facts[2][0] % 8 == 0 for facts in described)
    # Also where a call of these shapes is prepared:
    x, bias = torch.randn(5, k).bfloat16(), torch.randn(n)
    weight_only.weight_only_matmul(x, w, product_options("float32", bias=bias))
    with pytest.raises(breccia.UnsupportedError, match="a is on meta, and b's codes on cpu"):
        weight_only.weight_only_matmul(x.to("meta"), w)
    with pytest.raises(breccia.UnsupportedError, match="a is on cpu, and bias on meta"):
        weight_only.weight_only_matmul(x, w, product_options("float32", bias=bias.to("meta")))
    if w.global_scale is not None:
        elsewhere = w.global_scale.to("meta")
        stray = ScaledTensor.from_parts(w.data, w.scale, w.recipe, w.layout, None, elsewhere, w.axis, w.padding)
        with pytest.raises(breccia.UnsupportedError, match="a is on cpu, and b's global scale on meta"):
            weight_only.weight_only_matmul(torch.randn(5, k).bfloat16(), stray)
    weight_only._calls.clear()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_layer_starts_early_once_its_weight_was_multiplied(backend: str, monkeypatch: Any, folder: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from breccia_torch import nn, operators
    from breccia_triton.gemm.weight_only import matmul as weight_only

    made, _ = _on_the_host(monkeypatch, folder)
    monkeypatch.setattr(operators, "calls", SimpleNamespace(matmul=weight_only.weight_only_matmul))
    layer = nn.ScaledLinear(128, 64, False, recipe=breccia.INT4Scaling(128)).eval()
    layer.weight.take(layer.weight.tensor.to_storage(STORAGE))
    torch.compiler.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(3, 128).bfloat16()
    with torch.no_grad():
        compiled(x)
        compiled(x)
        layer.weight.data.add_(0)  # written: not before the kernel ahead
        compiled(x)
        compiled(x)
    assert made[-1].streams == [(7, False), (7, True), (7, False), (7, True)]
    weight_only._calls.clear()
    torch.compiler.reset()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_layer_may_keep_the_prepared_call_which_serves_no_other_operands(monkeypatch: Any, folder: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from breccia.dispatch.table import Chosen
    from breccia_torch import repeating
    from breccia_triton.gemm.weight_only import matmul as weight_only
    from breccia_triton.plugin import breccia_kernels

    _on_the_host(monkeypatch, folder)
    kernel = next(k for k in breccia_kernels() if k.name == "cuda.weight_only")
    chosen = Chosen(weight_only.weight_only_matmul, kernel, False, False, "")
    table = SimpleNamespace(choose=lambda *of: chosen)
    known = SimpleNamespace(table=table, operation=lambda name: name)
    monkeypatch.setattr(repeating, "registry", lambda: known)
    w = in_torch(tensor("int4-128", 64, 128)).to_storage(STORAGE).mT
    x, bias = torch.randn(3, 128).bfloat16(), torch.randn(64)
    repeat = repeating.repeated(x, w, bias, "bfloat16")
    assert repeat is not None
    for other in (x, -x):
        expected = weight_only.weight_only_matmul(other, w, product_options("bfloat16", bias))
        assert torch.equal(repeat(other, w, bias), expected)
    others = {
        "another shape": x[:1],
        "other strides": x.mT.contiguous().mT,
        "another dtype": x.float(),
        "another device": x.to("meta"),
        "torch's negative bit": torch.complex(torch.zeros(3, 128), torch.ones(3, 128)).conj().imag,
        "a subclass": torch.nn.Parameter(x),
    }
    assert {why: repeat(other, w, bias) for why, other in others.items()} == dict.fromkeys(others)
    assert repeat(x, w, None) is None and repeat(x, w, bias.clone()) is None
    assert repeat(x, in_torch(tensor("int4-128", 64, 128)).to_storage(STORAGE).mT, bias) is None
    bias.data = bias.half()
    assert repeat(x, w, bias) is None
    bias.data = bias.float()
    assert repeat(x, w, bias) is not None
    known.table = None
    assert repeat(x, w, bias) is None
    known.table = table
    for changed in ({"checked": True}, {"traced": "matmul runs ..."}, {"kernel": replace(kernel, prepare=None)}):
        chosen = chosen._replace(**changed)
        assert repeating.repeated(x, w, bias, "bfloat16") is None
        chosen = Chosen(weight_only.weight_only_matmul, kernel, False, False, "")
    weight_only._calls.clear()


#: Rows of groups: uneven, with empty ones at either end and between; more groups than a warp has lanes; none.
_SIZES = ((5, 0, 40, 3), (0, 1, 17, 0), (9,), (0, 0), (3, 0, 1, 0, 2) * 8, (1,) * 33)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.long
@pytest.mark.parametrize("sizes", _SIZES, ids=lambda sizes: f"{len(sizes)} of {sum(sizes)}")
def test_parts_of_groups_cover_every_row_once(sizes: tuple[int, ...], folder: Path) -> None:
    operand = plans.weight_format_of(FORMATS["int4-128"], (1, 128))
    assert isinstance(operand, plans.WeightFormat)
    library = _built(folder, tuple(sorted({**operand.macros, "ACT": 0, "OUT": 2, "BIAS": 3, "GROUPED": 1}.items())))
    ends, count = np.cumsum(sizes).astype(np.int32), len(sizes)
    groups = np.repeat(np.arange(count + 1), (*sizes, 4))
    config = plans.Config(8, 4, 8, 2)
    for batch, rows in ((8, len(groups)), (16, len(groups)), (8, int(ends[-1]))):
        config = plans.Config(batch, 4, 8, 2)
        number = config.grid_of_groups(rows, count, 64)[1] if rows else 1
        found = np.empty((number + 2, 3), np.int32)
        library.parts(ctypes.c_void_p(ends.ctypes.data), count, rows, batch, number + 2, ctypes.c_void_p(found.ctypes.data))
        covered = np.full(rows, -1)
        for group, first, last in found[:number]:
            assert 0 <= last - first <= batch
            assert (covered[first:last] == -1).all()
            covered[first:last] = group
        assert (covered == groups[:rows]).all()
        assert (found[number:, 0] == -1).all()


def test_ends_that_are_out_of_range_or_order_stay_within_the_rows(folder: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    operand = plans.weight_format_of(FORMATS["int4-128"], (1, 128))
    assert isinstance(operand, plans.WeightFormat)
    library = _built(folder, tuple(sorted({**operand.macros, "ACT": 0, "OUT": 2, "BIAS": 3, "GROUPED": 1}.items())))
    ends = np.array([-5, 7, 3, 900], np.int32)
    found = np.empty((8, 3), np.int32)
    library.parts(ctypes.c_void_p(ends.ctypes.data), 4, 20, 8, 8, ctypes.c_void_p(found.ctypes.data))
    assert found[:4].tolist() == [[1, 0, 7], [3, 7, 15], [3, 15, 20], [-1, 0, 0]]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "name", ["uint4-zero-16", *(pytest.param(name, marks=pytest.mark.long) for name in ("int4-128", "nvfp4", "e4m3-square"))]
)
def test_a_grouped_call_passes_its_arguments_as_the_kernel_reads_them(name: str, monkeypatch: Any, folder: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from breccia_triton.gemm.weight_only import matmul as weight_only

    made, _ = _on_the_host(monkeypatch, folder)
    n, k = 70, 136
    each = [tensor(name, n, k, seed=seed) for seed in range(4)]
    plain = breccia.stack(each)
    if plain.global_scale is not None:  # one for each expert
        plain.global_scale[:] = 3.7 * (1 + np.arange(4, dtype=np.float32))
    stored = in_torch(plain).to_storage(STORAGE)
    values = torch.from_numpy(reference.dequantize(plain).astype(np.float64))
    for sizes in ((2, 0, 4, 1), (0, 41, 60, 3)):
        ends = np.cumsum(sizes)
        m = int(ends[-1]) + 3
        offsets, x = torch.from_numpy(ends), torch.randn(m, k).bfloat16()

        def check(found: Any, values: Any = values, x: Any = x, sizes: Any = sizes) -> None:
            groups = torch.repeat_interleave(torch.arange(5), torch.tensor((*sizes, 3)))
            for group in range(4):
                rows, w = x[groups == group].double(), values[group].mT
                assert ((found[groups == group] - rows @ w).abs() <= k * 2.0**-24 * (rows.abs() @ w.abs())).all()
            assert not found[groups == 4].any()

        found = weight_only.weight_only_grouped(x, stored.mT, offsets)
        assert found.dtype == torch.float32
        check(found)
        check(weight_only.weight_only_grouped(x, stored.mT, offsets.int()))
        out = torch.full((m, 100), 7.0)[:, :n]
        assert weight_only.weight_only_grouped(x, stored.mT, offsets, product_options("float32", out=out)) is out
        assert out.equal(found)
        turned = torch.full((n, m), 7.0).mT
        assert weight_only.weight_only_grouped(x, stored.mT, offsets, product_options("float32", out=turned)).equal(found)
        order = [1, 2, 3, 0]
        fused = breccia.stack([in_torch(plain), in_torch(plain).select(0, order)], axis=1).to_storage(STORAGE)
        part = ScaledTensor.from_parts(  # every second matrix
            fused.data[:, 1], fused.scale[:, 1], fused.recipe, fused.layout, fused.zero_point,
            None if fused.global_scale is None else fused.global_scale[:, 1], -1, fused.padding,
        )  # fmt: skip
        check(weight_only.weight_only_grouped(x, part.mT, offsets), values[order])
        for given, what in (((x.to("meta"), offsets), "b's codes on cpu"), ((x, offsets.to("meta")), "offsets on meta")):
            with pytest.raises(breccia.UnsupportedError, match=f"matmul: a is on .*, and {what}"):
                weight_only.weight_only_grouped(given[0], stored.mT, given[1])
    assert {kernel.wide for kernel in made} == {False, True}
    weight_only._calls.clear()


# -- plans and compilation -------------------------------------------------------------------------------------------


def test_every_call_has_a_configuration_that_fits() -> None:
    for fmt in FORMATS.values():
        operand = plans.weight_format_of(fmt, fmt.scale.block)
        assert isinstance(operand, plans.WeightFormat)
        for m in (1, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 5000):
            for n in (1, 64, 4096, 8192, 28672):
                for k in (128, 200, 4096, 28672):
                    config = plans.config_of(operand, "", m, n, k)
                    assert config.fits(operand, m, k)
                    if not isinstance(config, plans.Config):  # decoded to memory, by another kernel
                        assert m >= plans.MANY
                        continue
                    assert m > 8 if config.wide else m <= 16
                    grid = config.grid(m, n)
                    assert grid[0] % config.split == 0 and grid[0] // config.split * config.rows >= n
                    assert grid[1] * config.batch >= m


def test_groups_of_rows_have_a_configuration_that_fits() -> None:
    for fmt in FORMATS.values():
        operand = plans.weight_format_of(fmt, fmt.scale.block)
        assert isinstance(operand, plans.WeightFormat)
        for m in (1, 8, 9, 40, 128, 129, 5000):
            for groups in (1, 8, 128):
                for n, k in ((64, 128), (4096, 14336)):
                    config = plans.grouped_config_of(operand, m, groups, n, k)
                    assert config.fits(operand, config.batch, k)
                    _, parts, _ = config.grid_of_groups(m, groups, n)
                    assert parts <= m and parts >= min(m, -(-m // config.batch) + groups - 1)
    assert not plans.grouped_config_of(plans.WeightFormat(0, 0, 128, False), 32, 8, 4096, 4096).wide
    assert plans.grouped_config_of(plans.WeightFormat(0, 0, 128, False), 4096, 8, 4096, 4096).batch == 128


@pytest.mark.parametrize(
    "given",
    [
        {"batch": 256, "high": 2, "deep": 2, "stages": 2, "wide": True},  # more sums than registers
        {"batch": 64, "high": 1, "deep": 2, "stages": 2, "wide": True},  # each warpgroup would wait for the stage that it holds
    ],
    ids=str,
)
def test_configurations_without_a_kernel_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="has no kernel"):
        plans.Config(**given)


def test_explain_says_why_experts_are_decoded_first() -> None:
    x, plain = np.ones((4, 256), np.float32), breccia.stack([tensor("int4-128", 64, 256)] * 2)

    def reason(b: Any, dtype: str = "bfloat16") -> str | None:
        a = SimpleNamespace(dtype=dtype, shape=x.shape, empty=False)
        facts = {"recipe": b.recipe, "layout": b.layout, "storage": b.storage, "axis": b.axis, "ndim": b.ndim, "shape": b.shape}
        call: Any = SimpleNamespace(
            op="grouped_matmul", a=a, b=SimpleNamespace(**facts, empty=False), option=lambda _, default: default
        )
        return plans.accepts(call)

    stored = plain.to_storage(STORAGE)
    assert reason(stored.mT) is None
    assert "'mma_16x128'" in str(reason(plain.mT))
    assert "the weights have to be transposed matrices, w.mT" in str(reason(stored))
    assert "float32" in str(reason(stored.mT, "float32"))
    narrow = breccia.stack([tensor("int4-16", 64, 112)]).to_storage(STORAGE)
    assert "112 columns are too few" in str(reason(narrow.mT))
    found = str(breccia.explain("grouped_matmul", "array", "int4", on="torch:cuda"))
    assert "cuda.weight_only_grouped" in found


@pytest.mark.parametrize(
    ("fmt", "reason"),
    [
        (Format(NF4, (Level(F32, (1, 64)),)), "NF4"),
        (Format(UINT4, (Level(F16, (1, 64)),), "bias"), "bias"),
        (Format(UINT8, (Level(F16, (1, 64)),), "zero_point"), "UINT8"),
        (Format(INT4, (Level(F16, (1, 48)),)), "48"),
        (Format(E4M3, (Level(F32, (1, 128), "amax"),)), "amax"),
        (Format(E2M1, (Level(UE4M3, (1, 16)),)), "UE4M3"),
        (Format(INT8, (Level(E4M3, (1, 32)),)), "E4M3"),
        (Format(E4M3FNUZ, (Level(F32, (1, 128)),)), "E4M3FNUZ"),
        (Format(E2M1, (Level(UE5M3, (1, 16)),)), "UE5M3"),
    ],
)
def test_formats_that_the_kernels_do_not_take_have_a_reason(fmt: Format, reason: str) -> None:
    found = plans.weight_format_of(fmt, fmt.scale.block)
    assert isinstance(found, str) and reason in found


def test_explain_says_why_a_plain_weight_is_decoded_first() -> None:
    found = str(breccia.explain("matmul", "array", "int4", on="torch:cuda"))
    assert "cuda.weight_only" in found


def test_measured_configurations_are_read_and_faulty_files_are_left_out(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(measurements, "SHIPPED", tmp_path)
    measurements.measured.cache_clear()
    path = tmp_path / f"weight_only_{measurements.file_name('Some GPU')}"
    config = plans.Config(8, 4, 8, 3, split=2)
    operand = plans.WeightFormat(0, 0, 128, False)
    key = plans.key_of("INT4/F16", 128, 3, 8192, 8192)
    measurements.merge(path, "Some GPU", {key: plans.entry_of(config)}, {})
    for m in (2, 3, 4):
        assert plans.config_of(operand, "INT4/F16", m, 8192, 8192, "Some GPU") == config
    assert plans.config_of(operand, "INT4/F16", 1, 8192, 8192, "Some GPU") != config
    assert plans.config_of(operand, "INT4/F16", 5, 8192, 8192, "Some GPU") != config
    many = plans.weight_format_of(FORMATS["mxfp4"], (1, 32))
    assert isinstance(many, plans.WeightFormat)
    fused, decoded = plans.Config(256, 2, 1, 3, wide=True), plans.Decoded()
    entries = {plans.key_of("E2M1/E8M0", 32, m, 8192, 8192): c for m, c in ((4096, fused), (512, decoded))}
    written = {key: plans.entry_of(c) for key, c in entries.items()}
    path.unlink()
    measurements.merge(path, "Some GPU", written, {})
    measurements.measured.cache_clear()

    def found(m: int, direct: bool = True, k: int = 8192) -> Any:
        return plans.config_of(many, "E2M1/E8M0", m, 8192, k, "Some GPU", direct=direct)

    assert found(5000) == found(2049) == found(1025) == found(1024) == fused
    assert found(300) == found(129) == decoded and found(128) != decoded
    assert found(300, direct=False) == found(300, direct=False, k=4096)
    assert found(2048) == fused and found(plans.MANY, k=4096) == decoded
    assert found(2048, direct=False, k=4096) == plans.DecodedCodes() and isinstance(found(2048, k=4095), plans.Config)
    assert plans.config_of(operand, "INT4/F16", 4096, 8192, 8192, "", direct=True) == plans.DecodedCodes()
    head = '"schema": 2, "device": "Some GPU"'
    for text in ("{", '{"schema": 0}', f'{{{head}, "entries": {{"x": {{"batch": 7}}}}}}', f'{{{head}, "entries": {{"x": 1}}}}'):
        path.write_text(text)
        measurements.measured.cache_clear()
        with pytest.warns(UserWarning, match="breccia ignores"):
            assert plans.measured_on("Some GPU") == {}
    measurements.measured.cache_clear()


def test_every_shipped_configuration_fits_its_shape() -> None:
    specs = ("int4", "int4,group_size=32", "int4,symmetric=false,signed=false", "mxfp4", "nvfp4", "fp8_block", "mxfp8", "int8")
    operands: dict[str, plans.WeightFormat] = {}
    for recipe in map(breccia.recipe, specs):
        operand = plans.weight_format_of(recipe.format, recipe.layout.block(-1))
        assert isinstance(operand, plans.WeightFormat)
        operands[f"{choices.codecs_of(recipe.format)} {operand.group}"] = operand
    files = list(measurements.SHIPPED.glob("weight_only_*.json"))
    assert files
    for path in files:
        found = json.loads(path.read_text(encoding="utf-8"))
        assert path.name == f"weight_only_{measurements.file_name(found['device'])}"
        measured = plans.measured_on(found["device"])
        assert measured.keys() == found["entries"].keys()
        for key, config in measured.items():
            codecs, group, m, n, k = key.split(" ")
            operand = operands[f"{codecs} {group}"]
            assert config.fits(operand, int(m), int(k)), key
            assert plans.config_of(operand, codecs, int(m), int(n), int(k), found["device"], direct=True) == config


def test_the_wheel_has_the_cuda_sources() -> None:
    names = {f"weight_only{name}" for name in (".cuh", "_small.cu", "_wide.cu", "_decode.cu")}
    assert names <= {path.name for path in plans.SOURCES.iterdir()}


@pytest.mark.skipif(compiler.missing() is not None, reason="no NVRTC")
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_compiles_without_spilling(name: str, wide: bool) -> None:
    fmt = FORMATS[name]
    operand = plans.weight_format_of(fmt, fmt.scale.block)
    assert isinstance(operand, plans.WeightFormat)
    config = next(c for c in plans.configs(operand, 32 if wide else 8, 8192, 8192) if c.fits(operand, 8, 8192))
    _compiled(operand, config, grouped=False)


@pytest.mark.skipif(compiler.missing() is not None, reason="no NVRTC")
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("int4-128", plans.Config(8, 4, 8, 2, split=2)),
        ("int4-128", plans.Config(128, 2, 1, 4, wide=True)),
        ("mxfp4", plans.Config(256, 2, 1, 3, wide=True)),
        ("nvfp4", plans.Config(256, 2, 1, 3, wide=True)),
        ("e4m3-block", plans.Config(128, 2, 1, 3, split=2, wide=True)),
        ("mxfp8", plans.Config(128, 2, 1, 3, wide=True)),
    ],
    ids=str,
)
def test_kernels_of_groups_and_of_many_rows_compile_without_spilling(name: str, config: plans.Config) -> None:
    fmt = FORMATS[name]
    operand = plans.weight_format_of(fmt, fmt.scale.block)
    assert isinstance(operand, plans.WeightFormat) and config.fits(operand, config.batch, 8192)
    _compiled(operand, config, grouped=False)
    _compiled(operand, config, grouped=True)


@pytest.mark.skipif(compiler.missing() is not None, reason="no NVRTC")
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxfp8-e5m2", "nvfp4-one"])
def test_the_pass_that_decodes_to_memory_compiles_without_spilling(name: str) -> None:
    operand = plans.weight_format_of(FORMATS[name], FORMATS[name].scale.block)
    assert isinstance(operand, plans.WeightFormat)
    source = compiler.CudaSource.read(plans.SOURCES / "weight_only_decode.cu")
    _, log = compiled_with_log(source, plans.macros_of_decoding(operand))
    assert set(re.findall(r"(\d+) bytes spill stores", log)) == {"0"}
    assert "warning" not in log


def _compiled(operand: Any, config: Any, grouped: bool) -> None:
    headers = {"wgmma.cuh": wgmma.header_for_registers(config.batch)} if config.wide else {}
    source = compiler.CudaSource.read(plans.SOURCES / f"weight_only_{config.kind}.cu", headers)
    macros = plans.macros_of(operand, config, "bfloat16", "bfloat16", None, grouped)
    _, log = compiled_with_log(source, macros)
    assert set(re.findall(r"(\d+) bytes spill stores", log)) == {"0"}
    assert "warning" not in log and "serialized" not in log
