"""Weight-only matmul on a GPU: every format and configuration against FP64, within the bound of the contract for products."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from gpu_weights import GROUPED, NAME, STORAGE, activations, check, weight
from marks import on_cuda
from weights import FORMATS, in_torch, tensor

import breccia
from breccia.backend import reference
from breccia_triton.gemm.weight_only import plans

#: (N, K): whole chunks; rows and columns that end within a chunk; columns that are no multiple of 8; many chunks.
SHAPES = ((128, 512), (70, 200), (33, 130), (192, 3072))
#: Rows of x, around every batch of the kernels.
ROWS = (1, 3, 8, 9, 16, 17, 33, 64, 65, 128, 130)


@on_cuda
@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS)
def test_products_of_every_format_are_within_the_bound(name: str, act: str) -> None:
    for n, k in SHAPES:
        w, values = weight(name, n, k)
        for m in ROWS:
            x = activations(m, k, act)
            explained = breccia.explain("matmul", x, w)
            assert explained.running == NAME, str(explained)
            found = breccia.matmul(x, w)
            check(found, x, values)
            assert found.equal(breccia.matmul(x, w)), "two calls differ"


@on_cuda
@pytest.mark.parametrize("name", ["int4-128", "uint4-zero-128", "mxfp4", "nvfp4", "e4m3-block", "int8-32"])
def test_every_configuration_gives_products_within_the_bound(name: str) -> None:
    import torch

    from breccia_triton.gemm.weight_only.matmul import executable

    fmt, (n, k) = FORMATS[name], (320, 2048)
    operand = plans.weight_format_of(fmt, fmt.scale.block)
    assert isinstance(operand, plans.WeightFormat)
    w, values = weight(name, n, k)
    for m in (5, 13, 29, 61, 128, 140):
        x, bias = activations(m, k, "bfloat16"), torch.randn(n, device="cuda")
        sizes = {(n, k), (16384, k), (4096, k), (8448, k)}
        configs = {c for size in sizes for c in plans.configs(operand, m, *size) if c.fits(operand, m, k)}
        configs |= {plans.Config(8, 2, 8, 2, per_sm=2)} if m <= 8 else set()
        for config in configs:
            found = executable(x, w, bias, "float32", config)(x, w, bias, None)
            check(found, x, values, bias)


#: What only many rows use, also with few rows and beside blocks along K.
WIDE = [
    plans.Config(batch, high, deep, stages, split=split, wide=True)
    for batch, high, deep, stages in ((32, 2, 1, 4), (64, 1, 2, 3), (128, 2, 1, 2), (128, 1, 2, 3), (256, 2, 1, 3))
    for split in (1, 2)
]


@on_cuda
@pytest.mark.parametrize("name", ["int4-128", "int4-16", "mxfp4", "nvfp4", "e4m3-block", "mxfp8"])
def test_blocks_of_many_rows_give_products_within_the_bound(name: str) -> None:
    from breccia_triton.gemm.weight_only.matmul import executable

    fmt = FORMATS[name]
    operand = plans.weight_format_of(fmt, fmt.scale.block)
    assert isinstance(operand, plans.WeightFormat)
    for n, k in ((320, 1024), (70, 648), (1024, 2048)):
        w, values = weight(name, n, k)
        for m in (20, 130, 300):
            x = activations(m, k, "bfloat16")
            for config in WIDE:
                if config.fits(operand, m, k):
                    call = executable(x, w, None, "float32", config)
                    found = call(x, w, None, None)
                    check(found, x, values)
                    assert found.equal(call(x, w, None, None)), f"two calls differ: {config}"


@on_cuda
def test_a_flagged_row_takes_the_slow_path_alone_in_blocks_of_many_rows() -> None:
    import torch

    from breccia_triton.gemm.weight_only.matmul import executable

    st = tensor("mxfp4", 320, 512, seed=4)
    st.scale[70, 3] = 255  # NaN, in the second of five row blocks
    values = torch.from_numpy(reference.dequantize(st).astype(np.float64)).cuda()
    w, x = in_torch(st, "cuda").to_storage(STORAGE).mT, activations(200, 512, "bfloat16")
    for config in WIDE:
        found = executable(x, w, None, "float32", config)(x, w, None, None)
        assert found[:, 70].isnan().all()
        keep = [i for i in range(320) if i != 70]
        check(found[:, keep], x, values[keep])


@on_cuda
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
def test_results_have_any_dtype_bias_and_memory(out_dtype: str) -> None:
    import torch

    w, values = weight("int4-128", 70, 200)
    dtype = getattr(torch, out_dtype)
    for m in (1, 12, 40):
        x = activations(m, 200, "bfloat16")
        for bias_dtype in (torch.float32, torch.bfloat16, torch.float16):
            bias = torch.randn(140, device="cuda").to(bias_dtype)[::2]
            check(breccia.matmul(x, w, dtype, bias=bias), x, values, bias)
        out = torch.full((m, 70), 7.0, dtype=dtype, device="cuda")
        assert breccia.matmul(x, w, dtype, out=out) is out
        check(out, x, values)
        wide = torch.full((m, 100), 7.0, dtype=dtype, device="cuda")
        breccia.matmul(x, w, dtype, out=wide[:, :70])
        check(wide[:, :70], x, values)
        assert (wide[:, 70:] == 7).all()
        strided = torch.randn(m, 400, device="cuda").bfloat16()[:, ::2]
        check(breccia.matmul(strided, w, dtype), strided, values)
        odd = torch.randn(m * 200 + 1, device="cuda").bfloat16()[1:].view(m, 200)
        check(breccia.matmul(odd, w, dtype), odd, values)
        batched = breccia.matmul(x[None].expand(3, m, 200), w, dtype)
        assert batched.shape == (3, m, 70)
        check(batched[2], x, values)


@on_cuda
def test_long_sums_of_numbers_of_many_sizes_are_within_the_bound() -> None:
    import torch

    from breccia_triton.gemm.weight_only.matmul import executable

    for name in ("int4-128", "nvfp4", "e4m3-block"):
        w, values = weight(name, 64, 8192)
        for m in (1, 16, 64):
            x = torch.randn(m, 8192, device="cuda") * 2.0**-10
            x[:, 0] = 2.0**10  # one large, many small
            x[:, 4096] = -(2.0**10)
            check(breccia.matmul(x.bfloat16(), w), x.bfloat16(), values)
            alone = executable(x.bfloat16(), w, None, "float32", plans.Config(64, 1, 1, 4, wide=True))  # one chain of additions
            check(alone(x.bfloat16(), w, None, None), x.bfloat16(), values)


@on_cuda
@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS)
def test_any_bits_of_codes_and_scales_decode_as_the_contract_says(name: str, act: str) -> None:
    import torch

    st = tensor(name, 192, 256, seed=9, wild=True)
    calm = tensor(name, 192, 256, seed=9)
    if st.scale.shape == calm.scale.shape and st.scale.ndim and st.scale.shape[0] == 192:
        st.scale[:64] = calm.scale[:64]  # rows with wild codes alone
        if st.zero_point is not None:
            st.zero_point[:64] = calm.zero_point[:64]
    values = torch.from_numpy(reference.dequantize(st).astype(np.float64)).cuda()
    w = in_torch(st, "cuda").to_storage(STORAGE).mT
    for m in (2, 20):
        x = activations(m, 256, act)
        found, exact = breccia.matmul(x, w), x.double() @ values.mT
        size = x.double().abs() @ values.mT.abs()
        assert torch.equal(found.isnan() | found.isinf(), exact.isnan() | (size > 3e38)) or (size > 1e37).any()
        inside = (size < 1e37) & ~exact.isnan()
        bound = 256 * 2.0**-24 * size + 256 * 2.0**-126
        assert ((found.double() - exact).abs() <= bound)[inside].all()
        assert not found[exact.isnan()].isfinite().any()


@on_cuda
def test_activations_that_are_not_finite_reach_their_row_alone() -> None:
    for name in ("int4-128", "nvfp4", "e4m3-block"):
        w, values = weight(name, 128, 512)
        for m in (4, 16, 50):
            x = activations(m, 512, "bfloat16")
            x[1, 7], x[2, 9] = float("nan"), float("inf")
            found, expected = breccia.matmul(x, w), x.double() @ values.mT
            assert found[1].isnan().all()
            assert not found[2].isfinite().any() or not expected[2].isfinite().all()
            keep = [i for i in range(m) if i not in (1, 2)]
            check(found[keep], x[keep], values)


@on_cuda
def test_graphs_replay_layers_that_depend_on_each_other() -> None:
    import torch

    first, second = weight("int4-128", 512, 512)[0], weight("nvfp4", 512, 512)[0]
    for m in (1, 16, 64):
        x = activations(m, 512, "bfloat16")

        def run(x: Any) -> Any:
            for _ in range(4):
                x = breccia.matmul(x, first, torch.bfloat16) * 0.05
                x = breccia.matmul(x, second, torch.bfloat16)
                x = x / (1 + x.abs().amax())
            return x

        expected = run(x)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            assert torch.equal(run(x), expected)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(x)
        for seed in range(3):
            x.copy_(activations(m, 512, "bfloat16", seed))
            graph.replay()
            assert torch.equal(y, run(x))


@on_cuda
def test_a_weight_is_read_only_after_it_is_written() -> None:
    import torch

    w, _ = weight("int4-128", 512, 512)
    other = weight("int4-128", 512, 512, 1)[0]
    x = activations(4, 512, "bfloat16")
    expected = breccia.matmul(x, other)
    breccia.matmul(x, w)
    kept = w.data.clone(), w.scale.clone()
    for _ in range(50):
        w.data.copy_(kept[0])
        breccia.matmul(x, w)
        w.data.copy_(other.data)
        assert torch.equal(breccia.matmul(x, w), expected)
    w.data.copy_(kept[0])


@on_cuda
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch 2.11's own
def test_layers_of_a_model_use_the_kernel_and_files_stay_plain(tmp_path: Any) -> None:
    import torch
    from torch import nn

    import breccia_torch

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256, bias=False)).cuda().bfloat16().eval()
    recipe = breccia.INT4Scaling(128)
    plain = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256, bias=False)).cuda().bfloat16().eval()
    plain.load_state_dict(model.state_dict())
    breccia_torch.quantize_(model, recipe)
    breccia_torch.quantize_(plain, recipe, storage="plain")

    def storages(model: Any) -> list[str]:
        return [layer.weight.layout.storage for layer in (model[0], model[2])]

    assert storages(model) == [STORAGE] * 2
    assert storages(plain) == ["plain"] * 2
    for m in (1, 5, 30):
        x = torch.randn(m, 256, device="cuda").bfloat16()
        found, expected = model(x), plain(x)
        assert (found - expected).abs().max() <= 0.02 * expected.abs().max()
    states = model.state_dict(), plain.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    breccia_torch.save_model(model, tmp_path / "a.safetensors")
    breccia_torch.save_model(plain, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    fresh = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256, bias=False)).cuda().bfloat16().eval()
    breccia_torch.load_model(fresh, tmp_path / "a.safetensors")
    assert storages(fresh) == [STORAGE] * 2
    assert torch.equal(fresh(x), model(x))
    compiled = torch.compile(model, fullgraph=True)
    assert torch.equal(compiled(x), model(x))


@on_cuda
@pytest.mark.parametrize("recipe", ["int4", "nvfp4", "mxfp8"])
def test_a_layer_repeats_its_product_and_notices_what_differs(recipe: str) -> None:
    import torch
    from torch import nn

    import breccia_torch

    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(256, 512)).cuda().bfloat16().eval().requires_grad_(False)
    breccia_torch.quantize_(layer, recipe)
    layer, x = layer[0], torch.randn(4, 256, device="cuda").bfloat16()

    def expected(x: torch.Tensor) -> torch.Tensor:
        return breccia.matmul(x, layer.weight.tensor.mT, out_dtype=x.dtype, bias=layer.bias)

    for _ in range(3):
        layer(x)
    assert layer.weight.__dict__["_kept_repeat"] is not None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(layer(x), expected(x))
    others = -x, x[:1].clone(), x.mT.contiguous().mT, x.half(), x.clone().requires_grad_(), x[None]
    for other in others:
        for _ in range(3):
            layer(x)
        y = layer(other)
        assert torch.equal(y, expected(other))
        assert y.dtype == other.dtype and y.requires_grad == other.requires_grad
    for _ in range(3):
        layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.neg_()
    graph.replay()
    assert torch.equal(y, expected(x))
    for change in (lambda: layer.bias.data.neg_(), lambda: layer.half(), lambda: layer.weight.data.view(torch.uint8).zero_()):
        for _ in range(3):
            layer(x)
        change()
        assert torch.equal(layer(x), expected(x))


@on_cuda
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxfp8-e5m2", "nvfp4-one"])
def test_products_of_weights_that_are_decoded_to_memory_are_within_the_bound(name: str) -> None:
    import torch

    from breccia_triton.gemm.weight_only.matmul import executable

    for n, k in ((128, 512), (70, 648), (1024, 2048)):
        st = tensor(name, n, k)
        if name != "nvfp4-one":
            st.scale[:] = np.random.default_rng(n).integers(100, 130, st.scale.shape)
        values = torch.from_numpy(reference.dequantize(st).astype(np.float64)).cuda()
        w = in_torch(st, "cuda").to_storage(STORAGE).mT
        for m in (1, 70, 300):
            x = activations(m, k, "bfloat16")
            found = executable(x, w, None, "bfloat16", plans.Decoded())(x, w, None, None)
            check(found, x, values)
            wide = torch.full((m, n + 30), 7.0, dtype=torch.bfloat16, device="cuda")
            executable(x, w, None, "bfloat16", plans.Decoded())(x, w, None, wide[:, :n])
            check(wide[:, :n], x, values)
            assert (wide[:, n:] == 7).all()


@on_cuda
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxfp8-e5m2"])
def test_rows_that_bfloat16_does_not_hold_are_mended(name: str) -> None:
    import torch

    from breccia_triton.gemm.weight_only.matmul import executable

    st = tensor(name, 320, 256, seed=3)
    rng = np.random.default_rng(0)
    st.scale[64:128] = rng.integers(0, 20, (64, 8))  # subnormal values and less
    st.scale[130, 2] = 255  # NaN
    st.scale[200, 1] = 1  # far from the others
    if name == "mxfp8":
        st.data[260, 7] = 0x7F  # NaN
    values = torch.from_numpy(reference.dequantize(st).astype(np.float64)).cuda()
    w, x = in_torch(st, "cuda").to_storage(STORAGE).mT, activations(150, 256, "bfloat16")
    found = executable(x, w, None, "bfloat16", plans.Decoded())(x, w, None, None)
    check(found, x, values)
    assert found[:, 130].isnan().all() and not found[:, :130].isnan().any()
    large = (x.float() * 2.0**100).bfloat16()
    found = executable(large, w, None, "bfloat16", plans.Decoded())(large, w, None, None)
    check(found[:, 64:128], large, values[64:128])
    assert found[:, 64:128].any()


@on_cuda
def test_many_rows_take_the_weight_decoded_to_memory_in_graphs_too() -> None:
    import torch

    from breccia_triton.gemm.weight_only import matmul as weight_only

    w, values = weight("mxfp4", 512, 640)
    x = activations(plans.MANY, 640, "bfloat16")
    weight_only._calls.clear()
    check(breccia.matmul(x, w, torch.bfloat16), x, values)
    assert [call.plan for call in weight_only._calls.values()] == [plans.Decoded()]
    bias = torch.randn(512, device="cuda")
    check(breccia.matmul(x, w, torch.bfloat16, bias=bias), x, values, bias)
    check(breccia.matmul(x, w), x, values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = breccia.matmul(x, w, torch.bfloat16)
    x.copy_(activations(plans.MANY, 640, "bfloat16", 5))
    graph.replay()
    check(y, x, values)


@on_cuda
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-e5m2"])
def test_scales_of_mxfp8_that_are_far_apart_keep_the_bound(name: str) -> None:
    import torch

    st = tensor(name, 192, 512, seed=6)
    st.scale[:64] = np.random.default_rng(1).integers(60, 150, (64, 16))  # as far apart as the fast decoding takes
    st.scale[64:128] = np.random.default_rng(1).integers(40, 150, (64, 16))  # farther
    values = torch.from_numpy(reference.dequantize(st).astype(np.float64)).cuda()
    w = in_torch(st, "cuda").to_storage(STORAGE)
    assert w.scale[:, 0].tolist() == [0, 1, 0]
    for m in (3, 20, 130):
        for act in ("bfloat16", "float16"):
            x = activations(m, 512, act)
            check(breccia.matmul(x, w.mT), x, values)


# -- groups ----------------------------------------------------------------------------------------------------------

#: Rows of each group: uneven and empty ones, one that has all rows, none at all, and more groups than a warp has lanes.
SIZES = ((5, 0, 40, 3), (1, 1, 1, 1), (0, 300, 0, 0), (0, 0, 0, 0), (130, 64, 1, 17), (2, 0, 1) * 14)


@functools.cache
def experts(name: str, count: int, n: int, k: int) -> tuple[Any, Any]:
    """(The weights' transposes on the GPU in the kernel's storage, their values in FP64.)"""
    import torch

    st = breccia.stack([tensor(name, n, k, seed) for seed in range(count)])
    if st.global_scale is not None:  # one for each expert
        st.global_scale[:] = 3.7 * (1 + np.arange(count, dtype=np.float32))
    values = torch.from_numpy(reference.dequantize(st).astype(np.float64)).cuda()
    return in_torch(st, "cuda").to_storage(STORAGE).mT, values


def check_groups(found: Any, x: Any, values: Any, sizes: tuple[int, ...]) -> None:
    start = 0
    for group, size in enumerate(sizes):
        if size:
            check(found[start : start + size], x[start : start + size], values[group])
        start += size
    assert not found[start:].any(), "rows of no group are not zeros"


def ends_of(sizes: tuple[int, ...], dtype: str = "int32") -> Any:
    import torch

    return torch.from_numpy(np.cumsum(sizes).astype(dtype)).cuda()


@on_cuda
@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "e4m3-tensor"])
def test_groups_multiply_their_own_weights_within_the_bound(name: str, act: str) -> None:
    for n, k in ((128, 512), (70, 200)):
        for sizes in SIZES:
            w, values = experts(name, len(sizes), n, k)
            x = activations(sum(sizes) + 7, k, act)
            explained = breccia.explain("grouped_matmul", x, w)
            assert explained.running == GROUPED, str(explained)
            for ends in (ends_of(sizes), ends_of(sizes, "int64")):
                found = breccia.grouped_matmul(x, w, ends)
                check_groups(found, x, values, sizes)
            assert found.equal(breccia.grouped_matmul(x, w, ends)), "two calls differ"


@on_cuda
@pytest.mark.parametrize("name", ["int4-128", "nvfp4", "mxfp4", "e4m3-block", "uint4-zero-16"])
def test_every_configuration_multiplies_groups_within_the_bound(name: str) -> None:
    import torch

    from breccia_triton.gemm.weight_only.matmul import grouped

    fmt, (n, k) = FORMATS[name], (320, 1024)
    operand = plans.weight_format_of(fmt, fmt.scale.block)
    assert isinstance(operand, plans.WeightFormat)
    small = [plans.Config(8, 4, 8, 3, per_sm=2), plans.Config(16, 4, 8, 2), plans.Config(16, 2, 8, 2, split=2)]
    small += [plans.Config(8, 4, 4, 2, split=2)]
    sizes = (5, 0, 140, 33)
    w, values = experts(name, len(sizes), n, k)
    x, ends = activations(sum(sizes) + 20, k, "bfloat16"), ends_of(sizes)
    for config in (*small, *WIDE):
        if config.fits(operand, config.batch, k):
            out = torch.full((len(x), n), 7.0, device="cuda")
            assert grouped(x, w, "float32", config)(x, w, ends, out) is out
            check_groups(out, x, values, sizes)


@on_cuda
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
def test_grouped_results_have_any_dtype_and_memory(out_dtype: str) -> None:
    import torch

    sizes = (3, 0, 50, 9)
    w, values = experts("int4-128", len(sizes), 70, 200)
    dtype, ends = getattr(torch, out_dtype), ends_of(sizes)
    x = activations(65, 200, "bfloat16")
    wide = torch.full((65, 100), 7.0, dtype=dtype, device="cuda")
    breccia.grouped_matmul(x, w, ends, dtype, out=wide[:, :70])
    check_groups(wide[:, :70], x, values, sizes)
    assert (wide[:, 70:] == 7).all()
    strided = torch.randn(65, 400, device="cuda").bfloat16()[:, ::2]
    check_groups(breccia.grouped_matmul(strided, w, ends, dtype), strided, values, sizes)
    apart = torch.stack([ends, ends], 1)[:, 0]
    check_groups(breccia.grouped_matmul(x, w, apart, dtype), x, values, sizes)


@on_cuda
@pytest.mark.parametrize("name", ["int4-128", "mxfp4", "nvfp4", "e4m3-block", "mxfp8"])
def test_nan_codes_and_scales_reach_the_rows_of_their_group_alone(name: str) -> None:
    import torch

    each = [tensor(name, 192, 256, seed=seed) for seed in range(3)]
    each[1] = tensor(name, 192, 256, seed=9, wild=True)
    st = breccia.stack(each)
    values = torch.from_numpy(reference.dequantize(st).astype(np.float64)).cuda()
    w = in_torch(st, "cuda").to_storage(STORAGE).mT
    for sizes in ((3, 4, 2), (20, 30, 50)):
        x = activations(sum(sizes), 256, "bfloat16")
        found = breccia.grouped_matmul(x, w, ends_of(sizes))
        a, b = sizes[0], sizes[0] + sizes[1]
        check(found[:a], x[:a], values[0])
        check(found[b:], x[b:], values[2])
        exact = x[a:b].double() @ values[1].mT
        assert not found[a:b][exact.isnan()].isfinite().any()
        size = x[a:b].double().abs() @ values[1].mT.abs()
        inside = (size < 1e37) & ~exact.isnan()
        bound = 256 * 2.0**-24 * size + 256 * 2.0**-126
        assert ((found[a:b].double() - exact).abs() <= bound)[inside].all()


@on_cuda
def test_activations_that_are_not_finite_stay_in_their_row_of_a_group() -> None:
    sizes = (3, 30, 4)
    for name in ("int4-128", "nvfp4"):
        w, values = experts(name, len(sizes), 128, 512)
        x = activations(sum(sizes) + 2, 512, "bfloat16")
        bad = [2, 3, 20, 37]  # the last of a group, the first and one within the next, a row of no group
        x[bad] = float("nan")
        found = breccia.grouped_matmul(x, w, ends_of(sizes))
        assert found[[2, 3, 20]].isnan().all() and not found[37:].any()
        keep = [i for i in range(37) if i not in bad]
        for group, rows in enumerate(([0, 1], [i for i in keep if 3 <= i < 33], [33, 34, 35, 36])):
            check(found[rows], x[rows], values[group])


@on_cuda
def test_graphs_replay_groups_that_the_device_has_just_found() -> None:
    import torch

    count, rows = 6, 40
    first, second = experts("int4-128", count, 512, 512)[0], experts("nvfp4", count, 512, 512)[0]
    x = activations(rows, 512, "bfloat16")
    chosen = torch.randint(0, count + 1, (rows,), device="cuda")

    def run() -> Any:
        expert, order = torch.sort(chosen, stable=True)
        bounds = torch.arange(1, count + 1, device="cuda")
        ends = torch.searchsorted(expert, bounds - 1, right=True).to(torch.int32)
        y = breccia.grouped_matmul(x[order], first, ends, torch.bfloat16) * 0.05
        return breccia.grouped_matmul(y, second, ends, torch.bfloat16)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for seed in range(5):
        x.copy_(activations(rows, 512, "bfloat16", seed))
        chosen.copy_(torch.randint(0, count + 1, (rows,), device="cuda"))
        graph.replay()
        found = y.clone()
        assert torch.equal(found, run())
        assert found.any()


@on_cuda
def test_parts_of_fused_experts_are_read_in_place() -> None:
    import torch

    from breccia_torch.nn import ScaledExperts

    each = [breccia.stack([tensor("nvfp4", 128, 256, seed=2 * e + p) for p in range(2)]) for e in range(3)]
    plain = breccia.stack(each)
    values = torch.from_numpy(reference.dequantize(plain).astype(np.float64)).cuda()
    weights = ScaledExperts(in_torch(plain, "cuda").to_storage(STORAGE), torch.bfloat16)
    sizes = (3, 1, 6)
    x = activations(10, 256, "bfloat16")
    found = weights.grouped_matmul(x, ends_of(sizes), False)
    assert found.shape == (10, 256)
    check_groups(found[:, :128], x, values[:, 0], sizes)
    check_groups(found[:, 128:], x, values[:, 1], sizes)
