"""Products of many rows of BF16 activations by a weight in storage "mma_16x128" that is decoded to BF16 in memory first.

- `decoded`: where BF16 holds the values exactly, cuBLAS multiplies by them.
- `decoded_codes`: BF16 holds codes exactly (less their zero-point: 8 bits). `fp8_matmul.cu` multiplies them in tensor cores.
  It adds the partial sum of a group along K, times the group's scale, to FP32 sums; one scale of a row multiplies the sum.

So no factor is rounded, and the result once. A last launch computes rows with flags in FP32; its blocks end at once where no
row has a flag.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from ...geometry import divided_up
from ...launch import program
from ...launch.device import empty
from ...launch.driver import MovableMap, TensorMap, driver
from ...launch.executable import Executable
from ..bf16.matmul import multiply
from ..fp8 import matmul as fp8_matmul
from ..fp8.plans import ROWS, GemmTile
from . import plans as weight_plans
from .problem import Launches, Problem, Weight, addresses_of, sizes, stored

#: Chunks of a block that decodes, one after the other; blocks along the rows of x that mend.
CHUNKS, TURNS = 4, 8


def decoded(problem: Problem) -> Executable:
    """A pass that decodes the weight to BF16, cuBLAS's product with BF16 activations, and a launch over rows with flags."""
    n, k, device = problem.n, problem.k, problem.device
    decode, mend = _passes(problem, 0, 0)

    def enqueue(stream: int, a: Any, b: Any, added: Any, to: Any) -> None:
        x, ldx = problem.activations(a)
        y, values = to.view(problem.m, n) if to.ndim != 2 else to, empty((n, k), torch.bfloat16, device)
        data, rows, _ = stored(b)
        weight = addresses_of(data, rows, b.global_scale)
        decode(stream, *weight, values.data_ptr(), None)
        multiply(x if x.ndim == 2 else x.view(problem.m, k), values.mT, y)
        mend[ldx, problem.pitch(to)](stream, *weight, x.data_ptr(), to.data_ptr())

    return problem.executable(enqueue, weight_plans.Decoded(), scratch=True)


def decoded_codes(problem: Problem, tile: GemmTile | None = None) -> Executable:
    """A pass that decodes the weight's codes, their product, and a launch over rows with flags. tile: for the one chosen."""
    m, n, k, device = problem.m, problem.n, problem.k, problem.device
    form = weight_plans.scale_application_of(problem.format, problem.block)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    chosen = tile or weight_plans.decoding_tile_of(form, n, m, k, processors)
    levels, pitch = form.levels(k), divided_up(n, 4) * 4  # rows of scales begin at multiples of 16 bytes
    decode, mend = _passes(problem, pitch, levels)
    none, share = TensorMap(), chosen.share

    @Launches
    def product(ldx: int, ldy: int, aligned: bool) -> Any:
        """The launch of the product, by distances of rows and whether 16 divides the address of the result."""

        def described(dtype: str, shape: Any, strides: Any, box: Any, swizzle: int = 0) -> MovableMap:
            return MovableMap(driver(), dtype, (1, *shape), strides, (1, *box), swizzle)

        staged = problem.out != "float32" and ldy % 8 == 0 and aligned
        variant = weight_plans.variant_of(form, chosen, problem.out, problem.bias, staged)
        kernel, width = fp8_matmul.loaded(variant, device), weight_plans.WIDTH
        values, *end = (described("bfloat16", (n, k), (n * k, k), (rows, width), 128) for rows in chosen.boxes(n))
        x = described("bfloat16", (m, k), (m * ldx, ldx), (chosen.columns // share[0], width), 128)
        scales: list[Any] = []
        if form.scales == ROWS:
            scales = [described("float32", (levels, n), (levels * pitch, pitch), (form.pieces, chosen.rows))]
        y = [described(problem.out, (m, n), (m * ldy, ldy), (chosen.columns // chosen.parts, 64), 128)] if staged else []
        args = fp8_matmul.Args(None, None, None, None, None, 0, 0, ldy, 0, n, m, k, 1, 1, 0, 0, 0)
        tiles = divided_up(n, chosen.rows * share[0]) * divided_up(m, chosen.columns * share[1])
        grid = fp8_matmul.grid_of(kernel, chosen, tiles, processors), 1, 1
        added = [] if problem.bias is None else [(args, "bias")]
        slots = [[values, *end], x, [(args, "sa"), *scales], [(args, "out"), *y], *added]
        arguments = [values, *(end or [none]), x, *(scales or [none]), none, *(y or [none]), args]
        return kernel.prepare(grid, chosen.threads, arguments, slots, chosen.cluster, chosen.dependent).run

    def enqueue(stream: int, a: Any, b: Any, added: Any, to: Any) -> None:
        x, ldx = problem.activations(a)
        ldy, y = problem.pitch(to), to.data_ptr()
        values, scales = empty((n, k), torch.bfloat16, device), empty((levels, pitch), torch.float32, device)
        data, rows, _ = stored(b)
        weight = addresses_of(data, rows, b.global_scale)
        bias: Any = None if added is None else added.contiguous()
        last = () if bias is None else (bias.data_ptr(),)
        decode(stream, *weight, values.data_ptr(), scales.data_ptr())
        product[ldx, ldy, y % 16 == 0](stream, values.data_ptr(), x.data_ptr(), scales.data_ptr(), y, *last)
        mend[ldx, ldy](stream, *weight, x.data_ptr(), y, *last)

    return problem.executable(enqueue, (form, chosen), scratch=True)


def _passes(problem: Problem, pitch: int, levels: int) -> tuple[Callable[..., None], Launches]:
    """(The pass that decodes; the launch over rows with flags, by the distances of rows of activations and results.)

    pitch, levels: of the scales that the pass writes; 0 where it multiplies by them.
    """
    m, n, k, weight_format = problem.m, problem.n, problem.k, problem.format
    source = program.source_of(weight_plans.SOURCES / "weight_only_decode.cu")
    macros = weight_plans.macros_of_decoding(weight_format, problem.out, problem.bias)
    decode, mend = (program.function(source, f"weight_only_{name}", macros, 0, problem.device) for name in ("decode", "mend"))
    blocks, chunks = divided_up(n, weight_plans.ROWS), divided_up(k, weight_plans.COLUMNS)
    weight, values, scales = Weight.of(weight_format), ctypes.c_void_p(), ctypes.c_void_p()
    arguments = [weight, values, scales, *sizes(n, k, pitch, levels, CHUNKS)]
    slots = [*weight.slots(weight_format), values, scales]
    first = decode.prepare((blocks, divided_up(chunks, CHUNKS), 1), 128, arguments, slots)

    @Launches
    def last(ldx: int, ldy: int) -> Any:
        weight, x, bias, y = Weight.of(weight_format), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        slots = [*weight.slots(weight_format), x, y, *([] if problem.bias is None else [bias])]
        arguments = [weight, x, bias, y, *sizes(m, n, k, ldx, ldy)]
        return mend.prepare((blocks, min(TURNS, divided_up(m, 64)), 1), 256, arguments, slots).run

    return first.run, last
