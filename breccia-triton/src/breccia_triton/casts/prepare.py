"""Calls of the kernels, prepared from facts: which kernels run, what they are compiled for, and what each is passed.

A prepared call is the same for every framework, which allocates arrays and launches. Imports Triton, but no framework.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from breccia import DelayedScaling, ScaledTensor, ScalingRecipe
from breccia.backend import PLAIN, TENSOR, Block, checks
from breccia.internal import keeps_values

from ..facts import (
    GRID,
    LARGE,
    NUMBERS,
    POINTERS,
    Argument,
    Array,
    Codes,
    Hardware,
    Numbers,
    Written,
    grid_of,
    itemsize,
    matrices_of,
)  # fmt: skip
from ..geometry import Tile, Variant, amax_tile, divided_up, lanes_of, panels_of, plain_tile, power_of_two, strips_of
from ..launch.triton_launch import Launch
from ..specs import CONVERTED, Spec, TwoCasts, Unsupported, needed, spec_of
from ..tuning.choices import Choice, Choose, block_text, choices_of, codecs_of, key_of
from .kernels import (
    amax_kernel,
    cast_kernel,
    cast_record_kernel,
    dequantize_kernel,
    pair_kernel,
    pair_record_kernel,
    record_kernel,
    waiting_cast_kernel,
)
from .plans import paired, readable, tiled, writes
from .subbyte_kernels import lanes_kernel, panels_kernel, strips_kernel

#: Programs of the pass for the amax of a tensor: enough to fill a GPU, few enough for one atomic operation each.
_PROGRAMS = 1024
#: Warps of that pass.
_WARPS = 8
#: Ops whose kernels may wait for the amax of the tensor, and the most elements they do it for: up to there, the host takes
#: longer than the device. (H200, a million BF16 numbers under fp8_current: 4.2 us less on the host, 0.2 us more on the device.)
_WAITING = ("cast", "cast_ste", "requantize")
SMALL = 1 << 20
#: Ops that may write codes column by column.
_TURNING = ("cast", "cast_pair", "cast_and_record", "cast_pair_and_record")
#: Ops that record an amax.
RECORDING = ("record_amax", "cast_and_record", "cast_pair_and_record")
#: Ops that cast in both orientations.
PAIRS = ("cast_pair", "cast_pair_and_record")
#: The kernels of ops; of others it is `cast_kernel`.
_KERNELS = {"cast_pair": pair_kernel, "cast_and_record": cast_record_kernel, "cast_pair_and_record": pair_record_kernel}
#: What kernels read and write of a history, besides the scale.
_HISTORY = {name: Argument("*i32") for name in ("work", "amaxes", "recorded", "after")}


@dataclass(frozen=True)
class Options:
    """The options of a cast that kernels are compiled for.

    supplied: whether there is a scale. weighted: an importance. seeded: whether the seed is in the memory of the device.
    """

    supplied: bool = False
    stochastic: bool = False
    storage: str = PLAIN
    weighted: bool = False
    seeded: bool = False


class Prepared:
    """A call of `op` for one recipe, input, axis, set of options and kind of device. Raises Unsupported.

    launch: the cast, None for `record_amax`. passes: the passes before it for the amax of the "tensor", its "rows" or
    "columns", by these names; amax_of: those that the cast reads, in the order of its arguments. written: the results.
    choose: what returns the choices of kernels by their keys (see `choices`); those of the device, if nothing else is given.
    turns: whether casts of numbers along axis -2 write the codes of a block next to each other, as products read them.
    """

    def __init__(
        self, op: str, recipe: ScalingRecipe, x: Array | Codes, axis: int, options: Options, dtypes: Mapping[str, str],
        hardware: Hardware, choose: Choose | None = None, turns: bool = False,
    ) -> None:  # fmt: skip
        """dtypes: of the components of the recipe's format, by the framework."""
        self.turns = turns and op in _TURNING
        self.choose = choose or choices_of(hardware.name)
        self.op, self.recipe, self.axis, self.options, self.hardware = op, recipe, axis, options, hardware
        shape = x.shape
        if 0 in shape:
            raise Unsupported("an empty tensor")
        self.spec = needed(spec_of(recipe))
        block = checks.fitted_layout(recipe, shape, axis).block(axis)
        self.tensor, self.two_level = block == TENSOR, self.spec.global_scale is not None
        #: Whether scales are searched for, and whether an importance weighs their errors.
        self.searches = self.spec.scale.window is not None and (self.two_level or not options.supplied)
        self.weighted = self.searches and options.weighted
        if options.storage != PLAIN and (len(shape) < 2 or not writes(self.spec, block, options.storage)):
            raise Unsupported(f"it does not write these scales in storage {options.storage!r}")
        self.input = x if isinstance(x, Codes) else x.flat(self._matrix(x, block))
        #: Of the history, a power of two; 0 where none is written.
        self.length = power_of_two(recipe.amax_history_len) if isinstance(recipe, DelayedScaling) and op in RECORDING else 0
        self.passes: dict[str, Pass] = {}
        self.amax_of: list[str] = []
        self.written: list[Written] = []
        #: Whether the cast itself finds the amax of the tensor first; its first argument after the results is a workspace then.
        self.waits = False
        self.launch: Launch | None = None
        if op == "record_amax":
            self.passes["tensor"] = Pass.of(self, "tensor", self.length)
        else:
            self._cast(x, block, dtypes)

    def _matrix(self, x: Array, block: Block) -> tuple[int, int, int]:
        """(matrices, rows, columns) of an array of numbers."""
        # Random words, and codes that are turned, follow the order of elements with K last.
        ordered = self.axis == -1 or not (self.options.stochastic or self.turns)
        one_row = block == TENSOR and self.op not in PAIRS and ordered and self.spec.element.bits == 8
        if one_row and x.contiguous and (count := math.prod(x.shape)) < LARGE:
            return 1, 1, count
        apart = self.op in PAIRS or self.options.storage != PLAIN
        return matrices_of(x.shape, block, -2 if apart else self.axis)

    def _cast(self, x: Array | Codes, block: Block, dtypes: Mapping[str, str]) -> None:
        spec, fmt, (matrices, rows, columns) = self.spec, self.recipe.format, self.input.flat_shape
        oriented = self._tiles(block)
        source = oriented[0][1]
        if self.options.supplied and fmt.global_scale is None and source != "tile" and spec.element.nan < 0:
            raise Unsupported("a supplied scale for blocks that do not fit a tile marks their faults")
        programs, folded = grid_of(oriented[0][0], matrices, rows, columns)
        steps = 1
        if self.length:
            count = math.prod(programs)
            # Measured on an H200: with one tile a program waits for the atomics of the amax, with eight for its loads.
            steps = min(4, power_of_two(divided_up(count, _PROGRAMS)))
            programs, folded = (divided_up(count, steps), 1, 1), True
        constants: dict[str, Any] = {"S": spec}
        arguments = dict(self.input.arguments)
        amaxes: dict[str, Argument] = {}
        for (tile, of, along), prefix, names in zip(oriented, ("", "other_"), ("GV", "HW"), strict=False):
            scope = "tensor" if self.tensor or self.two_level else of if of != "tile" else ""
            if scope and not self.options.supplied:
                self.amax_of.append(scope)
                amaxes[f"{prefix}amax"] = Argument("*i32", True)
                if scope not in self.passes:
                    self.passes[scope] = Pass.of(self, scope)
            turned = self.turns and along == -2
            written = Written(self.recipe, x.shape, along, self.options.storage, rows, columns, dtypes, turned)
            self.written.append(written)
            variant = self._variant(tile, of, written, steps)
            tile = replace(tile, large=self.input.large, folded=folded, backward=bool(self.passes))
            quads = (turned or self.op in PAIRS) and self._in_quads(tile)
            if quads or variant.pairs:  # codes are stored by the threads that load the numbers
                tile = replace(tile, quads=quads, vector=(quads and tile.vector) or 8)
            constants[names[0]], constants[names[1]] = tile, variant
            if isinstance(x, Array) and self.op == "cast_ste":
                arguments["data"] = Argument(NUMBERS[x.dtype], True)
            else:
                arguments |= written.arguments(prefix)
        self.waits = self._may_wait(x)
        if self.waits:
            self.passes, self.amax_of, amaxes = {}, [], {"work": Argument("*i32", True)}
            constants["V"] = replace(constants["V"], finite=self.two_level)
            most = max(1, self.hardware.resident // constants["G"].warps)
            programs = (min(math.prod(programs), most), 1, 1)
        self.scale_shape = () if self.two_level else self.written[0].scale_shape
        if self.options.supplied and any(w.scale_shape != self.written[0].scale_shape for w in self.written):
            raise Unsupported("one scale for blocks of both orientations, which have scales of different shapes")
        self.scale_dtype = "float32" if self.two_level else dtypes["scale"]
        arguments |= amaxes
        if self.options.supplied:
            arguments["supplied"] = Argument(POINTERS[itemsize(self.scale_dtype)])
        if self.weighted:
            arguments["importance"] = Argument("*i32")
        if self.length:
            arguments |= _HISTORY
        if self.options.stochastic:
            word = Argument("*i32" if self.options.seeded else "i32")
            arguments |= {"seed_low": word, "seed_high": word}
        self.narrow = not self.waits and self._narrow(source, arguments, constants)
        if self.narrow:
            return
        if self.op in PAIRS and (self.spec.element.bits < 8 or self.searches):
            raise TwoCasts("two casts are faster")
        integers = {"rows": rows, "columns": columns}
        integers |= {f"{prefix}groups": w.groups for w, prefix in zip(self.written, ("", "other_"), strict=False)}
        arguments |= {name: Argument("i32", (name != "rows" or self.turns) and n % 16 == 0) for name, n in integers.items()}
        values = (*integers.values(), *self.input.groups)
        function = _KERNELS.get(self.op, cast_kernel)
        if function is cast_kernel:
            constants["F"] = self.input.source(constants["G"])
        if self.waits:
            function, values = waiting_cast_kernel, (*integers.values(), matrices, *self.input.groups)
            arguments |= {"matrices": Argument("i32")}
        arguments |= self.input.counts
        if self.length:
            constants["LENGTH"] = self.length
            arguments |= {name: Argument("i32") for name in ("matrices", "first", "old_count")}
            values = (*values, matrices)
        arguments |= self.input.strides
        self.launch = Launch(function, programs, arguments, constants, constants["G"].warps, values, together=self.waits)

    def _may_wait(self, x: Array | Codes) -> bool:
        """Whether one kernel both finds the amax of the tensor and casts: for a small tensor, a second launch takes longer."""
        small = math.prod(x.shape) <= SMALL and not self.searches  # which takes longer than a launch
        return small and self.hardware.resident > 0 and self.op in _WAITING and list(self.passes) == ["tensor"]

    def _tiles(self, block: Block) -> list[tuple[Tile, str, int]]:
        """(tile, where the amax comes from, contraction axis) of each result."""
        _, rows, columns = self.input.flat_shape
        if self.op not in PAIRS:
            # Blocks along rows, down columns, and those that are a tile by themselves or more.
            kind = "tile whole" if block[0] != 1 or block[1] is None else "tile down" if self.axis == -2 else "tile along"
            turned = self.turns and self.axis == -2
            choice = self._choice("tile turned" if turned else kind, block)
            if self.searches and not choice.each:
                choice = replace(choice, each=16)  # a search has more numbers in registers for each
            if self.length and turned and not choice.elements:
                choice = replace(choice, elements=8192)  # a program that goes on to other tiles has fewer registers for each
            _, tile, source = needed(tiled(self.recipe, block, self.axis, rows, columns, choice, turned))
            return [(tile, source, self.axis)]
        choice = self._choice("pair", block)
        if self.spec.element.kind == "integer" and not choice.each:
            choice = replace(choice, each=32)  # codes that no instruction makes take more registers
        if self.length and not choice.elements:
            choice = replace(choice, elements=8192, each=64, vector=16)  # the amax takes registers (H200: up to 11 % faster)
        _, pair = needed(paired(self.recipe, block, rows, columns, self.turns, choice))
        if any(source in ("rows", "columns") for _, source in pair):
            raise TwoCasts("two casts are faster")
        return [(*tiling, axis) for tiling, axis in zip(pair, (-1, -2), strict=True)]

    def _choice(self, kernel: str, block: Block) -> Choice:
        source, codecs = self.input, codecs_of(self.recipe.format)
        rule = (self.recipe.rules[-1].name,) if self.searches else ()
        facts = (self.op, codecs, block_text(block), f"axis {self.axis}", source.kind, *rule)
        return self.choose(key_of(kernel, math.prod(source.flat_shape), *facts))

    @property
    def launches(self) -> list[Launch]:
        """Those of the passes, and that of the cast."""
        return [each.launch for each in self.passes.values()] + ([] if self.launch is None else [self.launch])

    def _variant(self, tile: Tile, source: str, written: Written, steps: int) -> Variant:
        """What the kernel is compiled for, of one orientation."""
        element, columns = self.recipe.format.element, self.input.flat_shape[2]
        return Variant(
            "supplied" if self.options.supplied else "tile" if self.two_level else source,
            self.tensor,
            tensor_amax=(self.tensor or self.two_level) and not self.options.supplied,
            ptx=self.hardware.ptx,
            native=element.name in CONVERTED and self.hardware.fp8,
            stochastic=self.options.stochastic,
            steps=steps,
            subnormals=self.input.subnormals,
            strided=self.input.strided,
            ragged=written.padding > 0,
            words=element.bits == 6 and not any(n % 16 for n in (columns, tile.block_columns, tile.wide)),
            storage=self.options.storage,
            values=self.op == "cast_ste",
            turned=written.turned,
            pairs=source == "tile" and self._in_pairs(tile),
            weighted=self.weighted,
        )

    def _in_pairs(self, tile: Tile) -> bool:
        """Whether BF16 numbers are read, and their magnitudes compared, two at a time.

        That is faster for blocks of one column (H200: 2 to 8 %), and slower for blocks of one row.
        """
        read = self.input
        if tile.block_columns != 1 and (self.op not in PAIRS or tile.block_rows != 1):
            return False
        if not isinstance(read, Numbers) or read.strided or read.arguments["x"] != Argument("*bf16", True):
            return False
        width = tile.along if tile.block_columns == 1 else tile.block_columns or tile.wide
        even = not (width % 2 or read.flat_shape[2] % 2)
        return even and self.spec.offset == "none" and not self.options.supplied and self.hardware.fp8

    def _in_quads(self, tile: Tile) -> bool:
        """Whether a thread reads four rows of columns at a time.

        That is slower where the amax of tiles of one orientation is found (H200: 7 %), and faster under supplied scales (11 %).
        """
        read = self.input
        if tile.block_columns > 1 and self.op not in PAIRS and not self.options.supplied:
            return False
        fits = tile.block_rows in (0, tile.tall) and tile.rows % 4 == 0
        return self.turns and fits and self.spec.element.bits == 8 and not read.strided and read.flat_shape[1] % 4 == 0

    def _narrow(self, source: str, arguments: dict[str, Argument], constants: dict[str, Any]) -> bool:
        """Whether the kernels for whole blocks of codes of 4 and 6 bits apply; one is prepared then."""
        read, block, (matrices, rows, columns) = self.input, self.written[0].block, self.input.flat_shape
        if self.op not in ("cast", "cast_pair") or not isinstance(read, Numbers):
            return False
        if self.op == "cast_pair" and not self.turns:
            return False
        if read.strided or not read.arguments["x"].aligned:
            return False
        if self.options != Options() or source != "tile" or not self.spec.lanes:
            return False
        searches = self.spec.scale.window is not None
        if searches and (self.op == "cast_pair" or self.axis == -2):
            return False
        if self.turns and (self.op == "cast_pair" or self.axis == -2):
            return self._panels(read, block, arguments, constants["V"])
        bits, facts = self.spec.element.bits, {"large": read.large, "backward": bool(self.passes)}
        if self.axis == -1:
            # What all programs compute from the amax of the tensor is worth more than one tile.
            steps = 2 if self.two_level else 1
            shape = lanes_of(
                block, matrices * rows, columns, bits, read.itemsize, self._choice("lanes", block), steps, searches
            )
            if shape is None:
                return False
            shape = replace(shape, **facts)
            function, integers = lanes_kernel, (matrices * rows * columns // shape.block,)
            programs = divided_up(integers[0], shape.blocks)
            kernel_arguments = arguments | {"blocks": Argument("i32")}
        else:
            most = 16 if read.itemsize == 4 or self.spec.element.kind == "table" else 32
            shape = strips_of(block, rows, columns, bits, most, self._choice("strips", block))
            if shape is None:
                return False
            shape = replace(shape, **facts)
            function, integers = strips_kernel, (columns,)
            programs = matrices * rows // shape.block * divided_up(columns, shape.wide)
            kernel_arguments = arguments | {"columns": Argument("i32", columns % 16 == 0)}
        kernel_constants = {"S": self.spec, "L": shape, "V": constants["V"]}
        self.launch = Launch(function, (programs, 1, 1), kernel_arguments, kernel_constants, shape.warps, integers)
        return True

    def _panels(self, read: Numbers, block: Block, arguments: dict[str, Argument], variant: Variant) -> bool:
        """Whether the kernel for whole blocks of such codes that are turned applies; it is prepared then."""
        both, (matrices, rows, columns) = self.op == "cast_pair", read.flat_shape
        choice = self._choice("panels", block)
        if both and (self.spec.element.kind == "table" or self.spec.offset != "none"):
            return False  # they take more registers than a thread has for both
        shape = panels_of(block, rows, columns, self.spec.element.bits, read.itemsize, both, choice)
        if shape is None or read.large:
            return False
        programs = divided_up(columns, shape.wide), divided_up(rows, shape.tall), matrices
        if max(programs[1:]) > GRID:
            return False
        kernel_constants = {"S": self.spec, "L": replace(shape, backward=bool(self.passes)), "V": variant}
        kernel_arguments = {name: a for name, a in arguments.items() if name != "other_amax"}
        kernel_arguments |= {"rows": Argument("i32", rows % 16 == 0), "columns": Argument("i32", columns % 16 == 0)}
        self.launch = Launch(panels_kernel, programs, kernel_arguments, kernel_constants, shape.warps, (rows, columns))
        if both:
            self.amax_of = self.amax_of[:1]
        return True


@dataclass(frozen=True)
class Pass:
    """The pass for the amax of the whole tensor, or of its rows or columns; with a length, that of a history.

    length: how many numbers it writes, all zeros before; 0 for one number that needs no zeros, but a workspace.
    """

    launch: Launch
    length: int

    @staticmethod
    def of(call: Prepared, scope: str, history: int = 0) -> Pass:
        source = call.input
        row = source if scope == "tensor" and isinstance(source, Numbers) and not source.strided else None
        matrices, rows, columns = (1, 1, math.prod(row.flat_shape)) if row else source.flat_shape
        choice = call.choose(key_of("amax", math.prod(source.flat_shape), scope, source.kind))
        most = choice.programs or _PROGRAMS
        tile = amax_tile(scope, rows, columns, source.large, choice)
        down, along = tile.counts(rows, columns)
        if scope == "tensor":
            tiles = matrices * down * along
            steps = power_of_two(divided_up(tiles, most))
            programs, length = divided_up(tiles, steps), 0
        else:
            side, across, lines = (down, along, columns) if scope == "columns" else (along, down, rows)
            steps = max(1, min(side, side * across * matrices // most))
            programs, length = matrices * across * divided_up(side, steps), matrices * lines
        arguments = dict(source.arguments)
        if history:
            arguments |= _HISTORY | {"before": Argument("*i32")}
        else:
            arguments |= {"amax": Argument("*i32", True)} | ({} if length else {"work": Argument("*i32", True)})
        arguments |= {
            "rows": Argument("i32"),
            "columns": Argument("i64" if source.large else "i32", columns % 16 == 0),
            "matrices": Argument("i32"),
        }
        arguments |= source.counts
        arguments |= {name: Argument("i32") for name in ("first", "old_count") if history}
        pairs = row is not None and columns % 2 == 0 and row.itemsize == 2 and row.arguments["x"].aligned
        variant = Variant(
            scope,
            pairs=pairs and call.hardware.ptx and call.hardware.fp8,
            ptx=call.hardware.ptx,
            subnormals=source.subnormals,
            finite=call.two_level,
            steps=steps,
            strided=source.strided,
        )
        own = {"S": call.spec, "LENGTH": history} if history else {"F": source.source(tile)}
        function = record_kernel if history else amax_kernel
        integers = (rows, columns, matrices, *source.groups)
        constants = {"G": tile, "V": variant, **own}
        warps = choice.warps or _WARPS
        return Pass(Launch(function, (programs, 1, 1), arguments | source.strides, constants, warps, integers), length)


def decoding(codes: Codes, dtype: str, choose: Choose | None = None) -> Launch:
    """`dequantize` to a floating dtype. choose: as of `Prepared`."""
    matrices, rows, columns = codes.flat_shape
    choose = choose or choices_of(codes.hardware.name)
    facts = (codes.kind, block_text(codes.block), f"axis {codes.axis}", dtype)
    choice = choose(key_of("decode", math.prod(codes.flat_shape), *facts))
    tile = plain_tile(1 if codes.axis == -1 else 0, rows, columns, choice)
    programs, folded = grid_of(tile, matrices, rows, columns)
    tile = replace(tile, large=codes.large, folded=folded)
    arguments = codes.arguments | {
        "out": Argument(NUMBERS[dtype], True),
        "rows": Argument("i32"),
        "columns": Argument("i32", columns % 16 == 0),
    }
    constants = {"G": tile, "F": codes.source(tile)}
    return Launch(dequantize_kernel, programs, arguments | codes.counts, constants, tile.warps, (rows, columns, *codes.groups))


def scaled_source(st: ScaledTensor, recipe: ScalingRecipe, supplied: bool) -> Spec:
    """The constants of a tensor that is requantized. Raises Unsupported where no value is cast."""
    if not supplied and keeps_values(st.recipe, st.layout.plain, st.axis, recipe):
        raise Unsupported("codes are translated, and nothing is cast")
    return needed(readable(st.recipe, st.layout))
