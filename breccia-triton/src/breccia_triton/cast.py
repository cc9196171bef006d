"""`cast`, `cast_pair`, `cast_ste` and `requantize` on CUDA tensors of torch: launches around the kernels of `casting`."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from breccia import DelayedScaling
from breccia.backend import (
    DEFAULT,
    PLAIN,
    TENSOR,
    Block,
    CastOptions,
    ScaledTensor,
    ScalingRecipe,
    calls,
    checks,
    composites,
    reference,
    renames,
)
from breccia_torch.ops import TORCH, need_dense

from .casting import amax_kernel, cast_kernel, cast_record_kernel, pair_kernel, record_kernel
from .geometry import Tile, Variant, divided_up, lanes_of, power_of_two, strips_of
from .lanes import lanes_kernel, strips_kernel
from .launch import INTERPRETED, Argument, Launcher, empty, type_of, workspace
from .operands import (
    FLOATS,
    LARGE,
    POINTERS,
    Codes,
    Numbers,
    Written,
    addresses,
    conversion,
    facts_of,
    grid_of,
    matrices_of,
)  # fmt: skip
from .plans import paired, readable, tiled, writes
from .specs import CONVERTED, Spec, spec_of

#: Programs of the pass for the amax of a tensor: enough to fill a GPU, few enough for one atomic operation each.
_PROGRAMS = 1024
#: Prepared calls are remembered up to this many.
_REMEMBERED = 4096


def cast(x: Any, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """`cast` as `breccia.cast` documents it; see `casting` for the kernels."""
    x = _readable(x, recipe)
    prepared = _found("cast", x, recipe, options)
    if prepared is None:
        return (
            reference.cast(x, recipe, options) if options.storage == PLAIN else composites.cast_into_storage(x, recipe, options)
        )
    return prepared(x, options)


def cast_ste(x: Any, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> Any:
    """`cast_ste` as `breccia.cast_ste` documents it, without codes in memory."""
    x = _readable(x, recipe)
    prepared = _found("cast_ste", x, recipe, options)
    if prepared is None:
        return reference.cast_ste(x, recipe, options)
    return prepared(x, options)


def cast_ste_clipped(x: Any, recipe: ScalingRecipe, clip: Any, options: CastOptions = DEFAULT) -> Any:
    """`cast_ste`: a clip affects only the gradient."""
    return cast_ste(x, recipe, options)


def cast_pair(x: Any, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> tuple[ScaledTensor, ScaledTensor]:
    """`cast_pair` as `breccia.cast_pair` documents it: from one read, or two casts where they are faster."""
    x = _readable(x, recipe)
    prepared = _found("cast_pair", x, recipe, options)
    if prepared is not None:
        return prepared(x, options)
    first, second = options.replace(axis=-1), options.replace(axis=-2)
    one, two = _found("cast", x, recipe, first), _found("cast", x, recipe, second)
    if one is None or two is None:
        return cast(x, recipe, first), cast(x, recipe, second)
    shared = one.amaxes(x) if list(one.passes) == list(two.passes) == ["tensor"] else None
    return one(x, first, shared), two(x, second, shared)


def record_amax(x: Any, recipe: DelayedScaling, amaxes: Any, scale: Any) -> tuple[Any, Any]:
    """`record_amax` as `breccia.AmaxHistory.update` documents it, in one launch."""
    x = _readable(x, recipe)
    prepared = _found("record_amax", x, recipe, DEFAULT)
    held = None if prepared is None else _History.of(recipe, amaxes, scale, x.device)
    if prepared is None or held is None:
        return reference.record_amax(x, recipe, amaxes, scale)
    return prepared.record(x, held)


def cast_and_record(
    x: Any, recipe: DelayedScaling, amaxes: Any, scale: Any, options: CastOptions = DEFAULT
) -> tuple[ScaledTensor, Any, Any]:
    """`cast_and_record` as `breccia.AmaxHistory.cast` documents it: the input is read once."""
    x = _readable(x, recipe)
    held = _History.of(recipe, amaxes, scale, x.device)
    given = options.replace(scale=scale if held is None else held.scale)
    prepared = None if held is None else _found("cast_and_record", x, recipe, given)
    if prepared is None or held is None:
        return cast(x, recipe, given), *record_amax(x, recipe, amaxes, scale)
    return prepared(x, given, held=held), *held.recorded


class _History:
    """The numbers of an `AmaxHistory` on a device, and those that a kernel writes."""

    def __init__(self, amaxes: Any, scale: Any, length: int, device: torch.device) -> None:
        count = 0 if amaxes is None else amaxes.shape[0]
        self.scale = scale
        self.kept = min(count, length - 1)
        self.first = count - self.kept
        self.recorded = empty((self.kept + 1,), torch.float32, device), empty((), torch.float32, device)
        self.amaxes = self.recorded[0] if amaxes is None else amaxes

    @staticmethod
    def of(recipe: Any, amaxes: Any, scale: Any, device: torch.device) -> _History | None:
        """The history, or None where it is not on the device as kernels read it."""
        if not isinstance(scale, torch.Tensor):
            scale = torch.full((), float(scale), dtype=torch.float32, device=device)
        held = amaxes if isinstance(amaxes, torch.Tensor) else None
        if held is None and len(amaxes):
            return None
        for part in (scale, *(() if held is None else (held,))):
            if part.device != device or part.dtype != torch.float32 or not part.is_contiguous():
                return None
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return _History(held, scale, recipe.amax_history_len, device)


def requantize(
    st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions = DEFAULT, require_exact: bool = False
) -> ScaledTensor:
    """`requantize` as `breccia.requantize` documents it, for values that are cast: decoded in registers."""
    data = st.data
    if data.ndim > 1 and not data.is_contiguous() and data.mT.is_contiguous() and options.scale is None:
        # A transposed view: so is the result.
        turned = options if options.out is None else options.replace(out=options.out.mT)
        return requantize(st.mT, recipe, turned, require_exact).mT
    prepared = None if require_exact else _found("requantize", st, recipe, options)
    if prepared is None:
        return composites.requantize(st, recipe, options, require_exact)
    return prepared(st, options)


def _readable(x: Any, recipe: ScalingRecipe) -> Any:
    need_dense(x)
    if x.dtype not in FLOATS:
        checks.check_cast(x, recipe)
    return x.resolve_neg() if x.is_neg() else x  # an imaginary part may have torch's negative bit, which its memory lacks


def _found(op: str, x: Any, recipe: ScalingRecipe, options: CastOptions) -> Prepared | None:
    """The prepared call for these arguments, or None where the generic algorithm runs."""
    scaled = op == "requantize"
    axis = x.axis if scaled else options.axis
    if options is not DEFAULT and options.nonfinite == "raise":
        reference.refuse_nonfinite(TORCH, calls.dequantize(x) if scaled else TORCH.f32(x))
    device = x.data.device
    facts: Any = facts_of(x) if scaled else (x.is_contiguous() or x.stride(), x.data_ptr() % 16 == 0)
    key = (
        op, recipe.interned_key, x.shape, x.dtype, device, axis, facts,
        options is DEFAULT or (options.scale is not None, options.rounding, options.storage),
    )  # fmt: skip
    prepared = _prepared.get(key)
    if prepared is None:
        if len(_prepared) >= _REMEMBERED:
            _prepared.clear()
        prepared = _prepared[key] = Prepared(op, x, recipe, axis, options)
    if prepared.reason is not None or (options.scale is not None and not prepared.takes(options.scale, device)):
        return None
    return prepared


_prepared: dict[Any, Prepared] = {}


class Prepared:
    """What calls of one op, recipe, shape, dtype, device and set of options have in common.

    `reason` says why the kernels do not apply, or is None.
    """

    def __init__(self, op: str, x: Any, recipe: ScalingRecipe, axis: int, options: CastOptions) -> None:
        self.op, self.recipe, self.axis = op, recipe, axis
        self.supplied, self.stochastic = options.scale is not None, options.rounding == "stochastic"
        self.storage = options.storage
        self.reason = self._prepare(x, tuple(x.shape))

    def _prepare(self, x: Any, shape: tuple[int, ...]) -> str | None:
        recipe, axis, fmt = self.recipe, self.axis, self.recipe.format
        if 0 in shape:
            return "an empty tensor"
        spec = spec_of(recipe)
        if isinstance(spec, str):
            return spec
        layout = checks.fitted_layout(recipe, shape, axis)
        block = layout.block(axis)
        self.device = x.data.device
        length = power_of_two(recipe.amax_history_len) if isinstance(recipe, DelayedScaling) and self.op in _RECORDING else 0
        if self.storage != PLAIN and (len(shape) < 2 or not writes(spec, block, self.storage)):
            return f"it does not write these scales in storage {self.storage!r}"
        self.input: Numbers | Codes
        if isinstance(x, ScaledTensor):
            if not self.supplied and renames(x.recipe, x.layout.plain, axis, recipe):
                return "codes are translated, and nothing is cast"
            source = readable(x.recipe, x.layout)
            if isinstance(source, str):
                return source
            self.input = Codes(x, source, merged=False)
            if self.input.reason is not None:
                return self.input.reason
            matrices, rows, columns = self.input.matrices, self.input.rows, self.input.columns
        else:
            matrices, rows, columns = self._matrix(x, fmt.element.bits, block)
            self.input = Numbers(x, matrices, rows, columns)
        self.matrices, self.rows, self.columns = matrices, rows, columns
        self.two_level = spec.outer is not None
        self.fp8, self.ptx = conversion(self.device)
        if self.op == "record_amax":
            self.passes = {"tensor": _Pass(self, x, "tensor", spec, length)}
            return None
        self.tensor = block == TENSOR
        large = self.input.large
        # Tiles, and where the amax comes from.
        if self.op == "cast_pair":
            pair = paired(recipe, block, rows, columns)
            if isinstance(pair, str):
                return pair
            pair = pair[1]
            if spec.element.bits < 8 or any(source in ("rows", "columns") for _, source in pair):
                return "two casts are faster"
            oriented = list(zip(pair, (-1, -2), strict=True))
        else:
            found = tiled(recipe, block, axis, rows, columns)
            if isinstance(found, str):
                return found
            oriented = [((found[1], found[2]), axis)]
        if self.supplied and fmt.global_scale is None and oriented[0][0][1] != "tile" and spec.element.nan < 0:
            return "a supplied scale for blocks that do not fit a tile marks their faults"
        self.programs, folded = grid_of(oriented[0][0][0], matrices, rows, columns)
        self.steps = 1
        if length:
            count = math.prod(self.programs)
            self.steps = power_of_two(divided_up(count, 4 * _PROGRAMS))
            self.programs, folded = (divided_up(count, self.steps), 1, 1), True
        self.passes: dict[str, _Pass] = {}
        self.written: list[Written] = []
        constants: dict[str, Any] = {"S": spec, "F": None}
        arguments = dict(self.input.arguments)
        tail: dict[str, Argument] = {}
        self.amax_of: list[str] = []
        for ((tile, source), along), prefix, names in zip(oriented, ("", "other_"), ("GV", "HW"), strict=False):
            whole = "tensor" if self.tensor or self.two_level else source if source != "tile" else ""
            whole = "" if self.supplied else whole
            if whole:
                self.amax_of.append(whole)
                if whole not in self.passes:
                    self.passes[whole] = _Pass(self, x, whole, spec)
            written = Written(recipe, shape, along, self.storage, rows, columns)
            tile = replace(tile, large=large, folded=folded, backward=bool(self.passes))
            constants[names[0]] = tile
            constants[names[1]] = self._variant(spec, tile, source, written)
            self.written.append(written)
            if self.op == "cast_ste":
                arguments["data"] = Argument(type_of(x.dtype), True)
            else:
                arguments |= written.arguments(prefix)
            if whole:
                tail[f"{prefix}amax"] = Argument("*i32", True)
            groups = f"{prefix}groups"
            constants.setdefault("groups", []).append((groups, written.groups))
        groups = constants.pop("groups")
        first = self.written[0]
        self.scale_shape = () if self.two_level else first.scale_shape
        self.scale_dtype = torch.float32 if self.two_level else first.dtypes["scale"]
        arguments |= tail
        if self.supplied:
            arguments["supplied"] = Argument(POINTERS[self.scale_dtype.itemsize])
        if length:
            arguments |= _HISTORY
        if self.stochastic:
            arguments |= {"seed_low": Argument("i32"), "seed_high": Argument("i32")}
        arguments |= {"rows": Argument("i32"), "columns": Argument("i32", columns % 16 == 0)}
        arguments |= {name: Argument("i32", n % 16 == 0) for name, n in groups}
        if length:
            arguments |= {name: Argument("i32") for name in ("matrices", "first", "kept")}
            constants["LENGTH"] = length
        arguments |= self.input.counts | self.input.strides
        self.integers = [rows, columns, *(n for _, n in groups), *self.input.groups]
        kernel = {"cast_pair": pair_kernel, "cast_and_record": cast_record_kernel}.get(self.op, cast_kernel)
        if kernel is cast_kernel:
            constants["F"] = self.input.source(constants["G"])
        else:
            del constants["F"]
        # One kernel that reads the input as it is: most calls, and those of small tensors are bound by the host.
        self.simple = not (INTERPRETED or self.passes or self.supplied or self.stochastic) and self.op == "cast"
        self.simple &= isinstance(self.input, Numbers) and self.input.contiguous
        self.narrow = self._narrow(spec, oriented[0][0][1], arguments, constants["V"])
        if not self.narrow:
            self.cast = Launcher(kernel, arguments, constants, constants["G"].warps)
        return None

    def _narrow(self, spec: Spec, source: str, arguments: dict[str, Argument], variant: Variant) -> bool:
        """Whether the kernels for whole blocks of codes of 4 and 6 bits apply; they are prepared then."""
        read, axis, block = self.input, self.axis, self.written[0].block
        plain = self.op == "cast" and isinstance(read, Numbers) and not read.strided and read.arguments["x"].aligned
        plain &= not (self.supplied or self.stochastic) and source == "tile" and spec.lanes
        if not plain or self.storage != PLAIN or not isinstance(read, Numbers):
            return False
        elements = self.matrices * self.rows * self.columns
        backward = bool(self.passes)
        given = {name: kind for name, kind in arguments.items() if name not in ("rows", "columns", "groups")}
        given["blocks"] = Argument("i32")
        if axis == -1:
            lanes = lanes_of(block, self.columns, spec.element.bits, read.itemsize)
            if lanes is None:
                return False
            # What all programs compute from the amax of the tensor is worth more than one tile.
            lanes = replace(lanes, steps=2 if self.two_level else 1, large=read.large, backward=backward)
            self.integers = [elements // lanes.block]
            self.programs = (divided_up(self.integers[0], lanes.blocks), 1, 1)
            self.cast = Launcher(lanes_kernel, given, {"S": spec, "L": lanes, "V": variant}, lanes.warps)
        else:
            most = 16 if read.itemsize == 4 or spec.element.kind == "table" else 32
            strips = strips_of(block, self.rows, self.columns, spec.element.bits, most)
            if strips is None:
                return False
            strips = replace(strips, large=read.large, backward=backward)
            self.integers = [self.matrices * self.rows // strips.block, self.columns]
            self.programs = (self.integers[0] * divided_up(self.columns, strips.wide), 1, 1)
            given["columns"] = Argument("i32", self.columns % 16 == 0)
            self.cast = Launcher(strips_kernel, given, {"S": spec, "L": strips, "V": variant}, strips.warps)
        return True

    def _matrix(self, x: Any, bits: int, block: Block) -> tuple[int, int, int]:
        """(matrices, rows, columns) of an array of numbers. bits: of a code."""
        ordered = self.axis == -1 or not self.stochastic  # random words follow the order of elements with K last
        one_row = block == TENSOR and self.op != "cast_pair" and ordered and bits == 8
        if one_row and x.is_contiguous() and x.numel() < LARGE:
            return 1, 1, x.numel()
        if self.op == "cast_pair" or self.storage != PLAIN:
            return matrices_of(tuple(x.shape), block, -2)
        return matrices_of(tuple(x.shape), block, self.axis)

    def _variant(self, spec: Spec, tile: Tile, source: str, written: Written) -> Variant:
        """What the kernel is compiled for, of one orientation."""
        kind = "supplied" if self.supplied else "tile" if self.two_level else source
        return Variant(
            kind,
            self.tensor,
            ptx=self.ptx,
            native=self.recipe.format.element.name in CONVERTED and self.fp8,
            stochastic=self.stochastic,
            steps=self.steps,
            subnormals=self.input.subnormals,
            strided=self.input.strided,
            ragged=written.padding > 0,
            words=self.recipe.format.element.bits == 6
            and not any(n % 16 for n in (self.columns, tile.block_columns, tile.wide)),
            storage=self.storage,
            values=self.op == "cast_ste",
        )

    def takes(self, scale: Any, device: torch.device) -> bool:
        """Whether a supplied scale can be read as it is."""
        return (
            isinstance(scale, torch.Tensor)
            and scale.device == device
            and scale.dtype == self.scale_dtype
            and tuple(scale.shape) == tuple(self.scale_shape)
            and scale.is_contiguous()
        )

    def __call__(self, x: Any, options: CastOptions, amaxes: dict[str, Any] | None = None, held: _History | None = None) -> Any:
        """The result of the op. amaxes: those that `amaxes` returned for `x`."""
        device = self.device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._run(x, options, amaxes, held)
        return self._run(x, options, amaxes, held)

    def amaxes(self, x: Any) -> dict[str, Any]:
        """The results of the passes before the cast."""
        device = self.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            inputs, strides = self.input.read(x)
            return {name: each.run(inputs, strides, _stream(device), device) for name, each in self.passes.items()}

    def record(self, x: Any, held: _History) -> tuple[Any, Any]:
        """Record the amax of `x`."""
        device = self.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            inputs, strides = self.input.read(x)
            self.passes["tensor"].record(inputs, strides, _stream(device), device, held)
        return held.recorded

    def _run(self, x: Any, options: CastOptions, found: dict[str, Any] | None, held: _History | None) -> Any:
        device, written, out = self.device, self.written, options.out
        stream = _stream(device)
        if self.simple and out is None:
            made = written[0].allocated(device)
            self.cast(self.programs, stream, (x.data_ptr(), *[part.data_ptr() for part in made], *self.integers))
            return written[0].tensor(made)
        inputs, strides = self.input.read(x)
        if found is None:
            found = {name: each.run(inputs, strides, stream, device) for name, each in self.passes.items()}
        if self.op == "cast_ste":
            result = empty(tuple(x.shape), x.dtype, device)
            parts, tensors = [], [result]
        else:
            given = None if out is None else written[0].components(out, device)
            parts = [w.allocated(device) for w in written] if given is None else [given]
            tensors = parts[0] if len(parts) == 1 else [*parts[0], *parts[1]]
        others = [found[name] for name in self.amax_of]
        if options.scale is not None:
            others.append(options.scale)
        integers = self.integers
        if held is not None:
            others += [workspace(device, stream), held.amaxes, *held.recorded]
            integers = (*integers, self.matrices, held.first, held.kept)
        self.cast(
            self.programs,
            stream,
            (
                *addresses(inputs, self.input.numbers),
                *addresses(tensors, int(self.op == "cast_ste")),
                *addresses(others),
                *(TORCH.words(options.seed) if self.stochastic else ()),
                *integers,
                *strides,
            ),
        )
        if self.op == "cast_ste":
            return result
        made = written[0].tensor(parts[0])
        if self.op == "cast_pair":
            return made, written[1].tensor(parts[1])
        if out is None:
            return made
        return out if parts[0][0] is out.data else reference.assign(TORCH, out, made)


def _stream(device: torch.device) -> int:
    """The current stream, on the current device."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


#: Ops that record an amax.
_RECORDING = ("record_amax", "cast_and_record")
#: What kernels read and write of a history, besides the scale.
_HISTORY = {name: Argument("*i32") for name in ("work", "amaxes", "recorded", "after")}


class _Pass:
    """The pass for the amax of the whole "tensor", or of its "rows" or "columns"; with a length, that of a history."""

    def __init__(self, of: Prepared, x: Any, whole: str, spec: Spec, length: int = 0) -> None:
        source = of.input
        contiguous = whole == "tensor" and isinstance(source, Numbers) and not source.strided
        self.shape = (1, 1, math.prod(x.shape)) if contiguous else (of.matrices, of.rows, of.columns)
        tile = _amax_tile(whole, *self.shape[1:], source.large)
        down, along = tile.counts(*self.shape[1:])
        if whole == "tensor":
            tiles = self.shape[0] * down * along
            steps = power_of_two(divided_up(tiles, _PROGRAMS))
            programs = divided_up(tiles, steps)
        else:
            side, across = (down, along) if whole == "columns" else (along, down)
            steps = max(1, min(side, side * across * self.shape[0] // _PROGRAMS))
            programs = self.shape[0] * across * divided_up(side, steps)
        self.programs = (programs, 1, 1)
        self.length = 0 if whole == "tensor" else of.matrices * (of.rows if whole == "rows" else of.columns)
        self.numbers = source.numbers
        self.integers = (*self.shape[1:], self.shape[0], *source.groups)
        arguments = dict(source.arguments)
        if length:
            arguments |= {name: Argument("*i32") for name in ("work", "amaxes", "recorded", "after", "before")}
        else:
            arguments |= {"amax": Argument("*i32", True)} | ({"work": Argument("*i32", True)} if whole == "tensor" else {})
        arguments |= {
            "rows": Argument("i32"),
            "columns": Argument("i64" if source.large else "i32", self.shape[2] % 16 == 0),
            "matrices": Argument("i32"),
        }
        arguments |= source.counts
        pairs = contiguous and self.shape[2] % 2 == 0 and x.element_size() == 2 and source.arguments["x"].aligned
        pairs &= of.ptx and of.fp8
        variant = Variant(
            whole,
            pairs=pairs,
            ptx=of.ptx,
            subnormals=source.subnormals,
            finite=of.two_level,
            steps=steps,
            strided=source.strided,
        )
        if length:
            arguments |= {name: Argument("i32") for name in ("first", "kept")} | source.strides
            constants = {"S": spec, "G": tile, "V": variant, "LENGTH": length}
            self.kernel = Launcher(record_kernel, arguments, constants, 8)
        else:
            arguments |= source.strides
            self.kernel = Launcher(amax_kernel, arguments, {"G": tile, "V": variant, "F": source.source(tile)}, 8)

    def record(self, inputs: list[Any], strides: list[int], stream: int, device: torch.device, held: _History) -> None:
        """Record the amax in a history."""
        tensors = [*inputs, workspace(device, stream), held.amaxes, *held.recorded, held.scale]
        values = addresses(tensors, self.numbers)
        self.kernel(self.programs, stream, (*values, *self.integers, held.first, held.kept, *strides))

    def run(self, inputs: list[Any], strides: list[int], stream: int, device: torch.device) -> Any:
        """The amax as bits."""
        if self.length:
            amax = torch.zeros(self.length, dtype=torch.int32, device=device)
            tensors = [*inputs, amax]
        else:
            amax = empty((1,), torch.int32, device)
            tensors = [*inputs, amax, workspace(device, stream)]
        self.kernel(self.programs, stream, (*addresses(tensors, self.numbers), *self.integers, *strides))
        return amax


def _amax_tile(whole: str, rows: int, columns: int, large: bool) -> Tile:
    if whole == "columns":
        return Tile(1, 1, 0, 64, 1, 0, min(128, power_of_two(columns)), large)
    wide = min(4096 if rows == 1 else 1024, power_of_two(columns))
    return Tile(1, 1, 0, min(max(1, 4096 // wide), power_of_two(rows)), 1, 0, wide, large)
