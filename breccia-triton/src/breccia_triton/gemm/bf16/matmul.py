"""`matmul` through BF16 on CUDA tensors of torch, for quantized operands and BF16 arrays.

1. One pass over each quantized operand decodes it to BF16, without its global scale, and flags lines along K with values that
   are subnormal: BF16 does not hold some of them, and tensor cores may take the others as zeros.
   Where values of one operand have more significant bits than BF16 (FP32 scales, zero-points, NF4), each becomes two BF16
   numbers, one behind the other along K; a pass writes the other operand twice. `matmul_rounded` rounds them to one instead.
2. cuBLAS multiplies BF16 numbers with FP32 sums.
3. Where there is a bias, a global scale or an FP16 result, one pass finishes FP32 sums: it rounds once.
4. One launch computes tiles of the result in FP32, from the codes, that have a flag. Most often there is none.

Global scales multiply sums: values of E2M1 x E4M3 have 6 significant bits, and under an FP32 scale up to 24, too many for BF16.
Nothing waits for the device, so calls can be captured in CUDA graphs.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from breccia import ScaledTensor
from breccia.backend import FLOAT32, ProductOptions, checks, dtype_name, targets
from breccia.internal import reentrant
from breccia_torch.ops import autocast_dtype

from ...casts.plans import readable
from ...casts.prepare import decoding
from ...facts import LARGE, NUMBERS, Argument, Codes, Hardware, grid_of
from ...geometry import Source, Tile, divided_up, plain_tile
from ...launch.cache import Remembered
from ...launch.device import empty
from ...launch.executable import Executable
from ...launch.launcher import Launcher
from ...launch.triton_launch import Launch
from ...operands import addresses, codes_of, hardware, leading
from ...specs import Unsupported, needed
from ...tuning.choices import Choose, choices_of
from .. import contiguous
from ..contiguous import ContiguousOperand, multiplied, need_one_device_for
from .kernels import DecodedOperand, exact_kernel, finishing_kernel, mending_kernel
from .plans import STORED, numbers_of, range_of

#: The sides of a tile that is mended, its steps along K, its warps, and the most programs: a few for each processor.
TILE, DEPTH, WARPS, PROGRAMS = 64, 32, 4, 512


def matmul_bf16(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` as `breccia.matmul` documents it."""
    return _multiplied(_calls, a, b, options, False)


def matmul_rounded(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` of values that are rounded to BF16, an error of up to 2^-8 of each: less than the contract of products."""
    return _multiplied(_rounded_calls, a, b, options, True)


def _multiplied(calls: Remembered, a: Any, b: Any, options: ProductOptions, rounds: bool) -> Any:
    checks.check_matmul(a, b, options.bias)
    if isinstance(b, ScaledTensor) and b.storage == STORED:
        call = targets.load("breccia_triton.gemm.weight_only.dgrad:executable")
        return multiplied(
            calls, partial(call, rounds=rounds), ContiguousOperand(a, False, False), ContiguousOperand(b, True), options
        )
    return multiplied(
        calls, partial(executable, rounds=rounds), ContiguousOperand(a, False), ContiguousOperand(b, True), options
    )


#: Prepared calls; for calls that the kernels do not support, the reason.
_calls, _rounded_calls = Remembered(), Remembered()


def prepared(a: ContiguousOperand, b: ContiguousOperand, bias: Any, out_dtype: str) -> Executable | str:
    """The product of operands with these facts, made where no earlier call had them; or why the kernels do not support it."""
    return contiguous.prepared(_calls, executable, a, b, bias, out_dtype)


def executable(a: ContiguousOperand, b: ContiguousOperand, bias: Any, out_dtype: str, rounds: bool = False) -> Executable:
    """The product of operands with these facts. rounds: values that BF16 does not hold are rounded. Raises Unsupported."""
    left, right = tuple(a.original.shape), tuple(b.original.shape)
    device, dtype = a.data.device, getattr(torch, out_dtype)
    shape = (*leading(left, right), left[-2], right[-1])
    if 0 in shape or not left[-1]:
        raise Unsupported("an empty tensor")
    need_one_device_for(a, b, bias)
    device_hardware = hardware(device)
    copies = 1 if rounds else max(numbers_of(side.x.recipe.format) for side in (a, b) if side.scaled)
    first = Decoding(a, device_hardware, 0, math.prod(right[:-2]) == 1, copies)
    second = Decoding(b, device_hardware, first.matrices * first.lines, False, copies)
    if 1 < first.matrices != second.matrices > 1:
        raise Unsupported("leading axes broadcast in both directions")
    global_scale = any(side.global_scale is not None for side in (first, second))
    direct = bias is None and not global_scale and out_dtype != "float16"  # cuBLAS writes the result itself
    result = _Result(max(first.matrices, second.matrices), first.lines, second.lines, out_dtype, device_hardware.ptx)
    added = {} if bias is None else {"bias": Argument(NUMBERS[dtype_name(bias)])}
    finish = None if direct else Launcher(result.finishing(first, second, added))
    mend = None if rounds else Launcher(result.mending(first, second, added))
    count = 1 + second.first + second.matrices * second.lines

    def enqueue(stream: int, a: ContiguousOperand, b: ContiguousOperand, bias: Any, to: Any) -> None:
        # The sums of an FP32 result become the result in place.
        sums = to if direct or dtype == torch.float32 else empty(shape, torch.float32, device)
        flags = empty((count,), torch.int32, device) if mend is None else torch.zeros(count, dtype=torch.int32, device=device)
        _multiply(first(a, flags, stream), second(b, flags, stream), sums)
        added = [] if bias is None else [bias.contiguous()]
        marks, ends = addresses([flags]), addresses([*added, to], 2)
        if finish is not None:
            scales = addresses([x for x in (a.global_scale, b.global_scale) if x is not None])
            finish.run(stream, *addresses([sums], 1), *scales, *ends, *marks)
        if mend is not None:
            mend.run(stream, *a.components, *b.components, *marks, *ends)

    return Executable(device, shape, out_dtype, enqueue)


def _multiply(x: Any, y: Any, to: Any) -> None:
    """cuBLAS's products of matrices of BF16 numbers."""
    if x.ndim == y.ndim == 2:
        return multiply(x, y, to)
    *lead, m, n = to.shape
    k = x.shape[-1]
    if math.prod(y.shape[:-2]) == 1:
        multiply(x.reshape(-1, k), y.reshape(k, n), to.view(-1, n))
    else:
        multiply(x.expand(*lead, m, k).reshape(-1, m, k), y.expand(*lead, k, n).reshape(-1, k, n), to.view(-1, m, n))


class Decoding:
    """How an operand becomes BF16 numbers, and how tiles of it are read; see `DecodedOperand`.

    matrices, lines: leading axes, and rows of a or columns of b, which count the leading axes if `merged`, where they can be.
    depth: K. first: of its flags. global_scale: the constants of its global scale where values leave it out, or None.
    copies: as of `DecodedOperand`. exact: the pass that writes BF16 numbers; None for an array that is multiplied as it is.
    """

    def __init__(self, operand: ContiguousOperand, hardware: Hardware, first: int, merged: bool, copies: int = 1) -> None:
        self.k_last, self.first, self.codes, self.global_scale = operand.k_last, first, None, None
        self.limits, self.copies, self.residual = (0.0, 0.0), copies, False
        merged = merged and self.k_last
        self.shape = tuple(operand.x.shape)
        if operand.scaled:
            st = operand.x
            spec, within = needed(readable(st.recipe, st.layout)), range_of(st.recipe.format)
            self.codes = codes_of(st, spec, merged, hardware)
            if isinstance(within, str):
                self.residual = copies > 1
            else:
                self.global_scale, self.limits = spec.global_scale, (2.0**within.least_multiplier, 2.0**within.most_multiplier)
            matrices, *sides = self.codes.flat_shape
        elif operand.data.dtype != torch.bfloat16:
            raise Unsupported(f"tensor cores multiply BF16, and the array is {operand.data.dtype}")
        else:
            *lead, rows, columns = self.shape
            matrices, *sides = (1, math.prod(lead) * rows, columns) if merged else (math.prod(lead), rows, columns)
        self.matrices, (self.lines, self.depth) = matrices, sides if self.k_last else sides[::-1]
        self.exact: Launcher | None = None
        if self.codes is not None:
            self.exact = Launcher(self._exact(self.codes, choices_of(hardware.name)))
        elif copies > 1:
            rows, columns = sides
            self.exact = Launcher(self._twice(matrices, rows, columns, operand.data.data_ptr() % 16 == 0))

    def _twice(self, matrices: int, rows: int, columns: int, aligned: bool) -> Launch:
        """The pass that writes an array twice."""
        tile = plain_tile(1, rows, columns)
        programs, folded = grid_of(tile, matrices, rows, columns)
        tile = replace(tile, large=2 * matrices * rows * columns >= LARGE, folded=folded)
        arguments = {"x": Argument(NUMBERS["bfloat16"], aligned), "out": Argument(NUMBERS["bfloat16"], True)}
        arguments |= {"flags": Argument("*i32", True)} | integers_of({"rows": rows, "columns": columns})
        arguments |= {"first": Argument("i32")}
        constants = {"G": tile, "D": self._constants(None)}
        return Launch(exact_kernel, programs, arguments, constants, tile.warps, (rows, columns, self.first))

    def _exact(self, codes: Codes, choose: Choose) -> Launch:
        """The pass that decodes."""
        launch = decoding(codes, "bfloat16", choose)
        arguments: dict[str, Argument] = {}
        for name, argument in launch.arguments.items():
            arguments[name] = argument
            if name == "out":
                arguments["flags"] = Argument("*i32", True)
            elif name == "columns":
                arguments["first"] = Argument("i32")
        source = launch.constants["F"]
        if self.global_scale is not None:
            source = replace(source, spec=replace(source.spec, global_scale=None))
        constants = {"G": launch.constants["G"], "D": self._constants(source)}
        rows, columns, *groups = launch.integers
        integers = (rows, columns, self.first, *groups)
        return replace(launch, function=exact_kernel, arguments=arguments, constants=constants, integers=integers)

    def __call__(self, operand: ContiguousOperand, flags: Any, stream: int) -> Any:
        """The BF16 numbers of an operand, in the axes of the product."""
        numbers = operand.x
        if self.exact is not None:
            *lead, rows, columns = self.shape
            shape = (*lead, rows, self.copies * columns) if self.k_last else (*lead, self.copies * rows, columns)
            numbers = empty(shape, torch.bfloat16, operand.data.device)
            self.exact.run(stream, *operand.components, *addresses([numbers], 1), *addresses([flags]))
        return numbers.mT if operand.swapped else numbers

    def arguments(self, name: str) -> dict[str, Argument]:
        """Their types, under the operand's name."""
        if self.codes is None:
            return {name: Argument(NUMBERS["bfloat16"])}
        return {name + argument[1:]: kind for argument, kind in self.codes.arguments.items()}

    @property
    def constants(self) -> DecodedOperand:
        """How `mending_kernel` reads tiles."""
        source = None
        if self.codes is not None:
            tall, wide = (TILE, DEPTH) if self.k_last else (DEPTH, TILE)
            source = self.codes.source(Tile(1 if self.codes.axis == -1 else 0, 1, tall, tall, 1, wide, wide))
        return DecodedOperand(source, self.global_scale, *self.limits, self.k_last)

    def _constants(self, source: Source | None) -> DecodedOperand:
        """How `exact_kernel` reads and writes it."""
        return DecodedOperand(source, self.global_scale, *self.limits, self.k_last, self.copies, self.residual)


@dataclass(frozen=True)
class _Result:
    """The result of a product: (matrices, rows, columns) in a dtype. ptx: of an NVIDIA GPU."""

    matrices: int
    rows: int
    columns: int
    dtype: str
    ptx: bool

    def finishing(self, a: Decoding, b: Decoding, added: dict[str, Argument]) -> Launch:
        """The pass over FP32 sums. added: the bias as an argument, if there is one."""
        tile = plain_tile(1, self.rows, self.columns)
        programs, folded = grid_of(tile, self.matrices, self.rows, self.columns)
        tile = replace(tile, large=self.matrices * self.rows * self.columns >= LARGE, folded=folded)
        arguments = {"sums": Argument("*fp32", True)}
        arguments |= {
            f"{name}_global_scale": Argument("*i32") for name, side in (("a", a), ("b", b)) if side.global_scale is not None
        }
        arguments |= added | {"out": Argument(NUMBERS[self.dtype], True), "flags": Argument("*i32", True)}
        integers = {"rows": self.rows, "columns": self.columns, "a_rows": b.first}
        constants = {"A": a.constants, "B": b.constants, "G": tile, "PTX": self.ptx}
        return Launch(
            finishing_kernel, programs, arguments | integers_of(integers), constants, tile.warps, tuple(integers.values())
        )

    def mending(self, a: Decoding, b: Decoding, added: dict[str, Argument]) -> Launch:
        """The launch over tiles with flags."""
        arguments = a.arguments("a") | b.arguments("b") | {"flags": Argument("*i32", True)}
        arguments |= added | {"out": Argument(NUMBERS[self.dtype], True)}
        integers = {"rows": self.rows, "columns": self.columns, "depth": a.depth, "matrices": self.matrices}
        for name, side in (("a", a), ("b", b)):
            if side.codes is not None and side.codes.groups:
                integers[f"{name}_groups"] = side.codes.groups[0]
        integers |= {"a_rows": b.first, "a_many": int(a.matrices > 1), "b_many": int(b.matrices > 1)}
        constants = {"A": a.constants, "B": b.constants, "TILE": TILE, "DEPTH": DEPTH, "PTX": self.ptx}
        tiles = self.matrices * divided_up(self.rows, TILE) * divided_up(self.columns, TILE)
        programs = (min(tiles, PROGRAMS), 1, 1)
        return Launch(mending_kernel, programs, arguments | integers_of(integers), constants, WARPS, tuple(integers.values()))


def integers_of(named: dict[str, int]) -> dict[str, Argument]:
    """The arguments of integers that are the same in every launch."""
    return {name: Argument("i32", n % 16 == 0) for name, n in named.items()}


def multiply(x: Any, y: Any, to: Any) -> None:
    """Write the product of BF16 matrices, or of batches of them, into `to` (BF16 or FP32). Sums are FP32, rounded once."""
    product: Any = torch.mm if x.ndim == 2 else torch.bmm
    mixed = autocast_dtype(x) is not None  # it would multiply in another dtype
    # One thread at a time: torch's setting is global. cuBLAS adds parts of a sum (split-K) in FP32 where it is off.
    with _turn, torch.autocast(x.device.type, enabled=False) if mixed else nullcontext():
        settings: Any = torch.backends.cuda.matmul
        allowed = settings.allow_bf16_reduced_precision_reduction
        # From torch 2.10 on a second setting allows split-K at all, and is set together with the first.
        split = getattr(settings, "allow_bf16_reduced_precision_reduction_split_k", None)
        try:
            if allowed:
                settings.allow_bf16_reduced_precision_reduction = False if split is None else (False, split)
            if to.dtype == torch.float32:
                product(x, y, out_dtype=torch.float32, out=to)
            else:
                product(x, y, out=to)
        finally:
            if allowed:
                settings.allow_bf16_reduced_precision_reduction = allowed if split is None else (allowed, split)


_turn = reentrant()
