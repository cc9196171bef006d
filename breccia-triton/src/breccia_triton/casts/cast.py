"""`cast`, `cast_pair`, `cast_ste`, `requantize` and the ops of histories on CUDA tensors of torch: their kernels, launched."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from breccia import DelayedScaling, Layout, ScaledTensor, ScalingRecipe
from breccia.backend import COLUMNS, DEFAULT, PLAIN, CastOptions, calls, checks, composites, reference
from breccia.internal import repeats, storages
from breccia_torch.ops import TORCH, need_dense

from ..facts import INTERPRETED, Hardware
from ..geometry import divided_up
from ..launch.cache import Remembered
from ..launch.device import allocator, current_stream, elsewhere, empty, index_of, on, stream_of, workspace
from ..launch.launcher import Launcher
from ..operands import FLOATS, ResultBuffers, addresses, array_of, codes_of, columns_adjacent, components_of, facts_of, hardware
from ..specs import TwoCasts, Unsupported
from ..tuning import timing
from ..tuning.choices import Choose
from .prepare import PAIRS, Options, Pass, Prepared, scaled_source


def cast(x: Any, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """`cast` as `breccia.cast` documents it; see `kernels`."""
    if (result := _plainly("cast", x, recipe, options)) is not None:
        return result
    if options.importance is not None:
        checks.check_importance(options.importance, x, recipe, options.axis)
    x, options = _readable(x, recipe), _in_order(options, x.device)
    if columns_adjacent(x) and options.storage == PLAIN:
        result = cast(x.mT, recipe, _other_axis(options, x.ndim))
        return result.mT if options.out is None else options.out
    prepared = _call_for("cast", x, recipe, options)
    if prepared is None:
        return reference.cast(x, recipe, options) if options.storage == PLAIN else storages.cast(x, recipe, options)
    return prepared(x, options)


def cast_ste(x: Any, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> Any:
    """`cast_ste` as `breccia.cast_ste` documents it, without codes in memory."""
    if (result := _plainly("cast_ste", x, recipe, options)) is not None:
        return result
    x, options = _readable(x, recipe), _in_order(options, x.device)
    if columns_adjacent(x):
        return cast_ste(x.mT, recipe, _other_axis(options, x.ndim)).mT
    prepared = _call_for("cast_ste", x, recipe, options)
    if prepared is None:
        return reference.cast_ste(x, recipe, options)
    return prepared(x, options)


def _plainly(op: str, x: Any, recipe: ScalingRecipe, options: CastOptions, history: tuple[Any, Any] | None = None) -> Any:
    """The result of most calls under no option but an axis and a supplied scale, or None for other calls.

    It does less than `_call_for` does for those, as calls of small arrays are bound by the host.
    history: of ops that record, its amaxes and its scale, which is the supplied one.
    """
    scale, axis, kind = options.scale, options.axis, _OWN
    if history is not None:
        scale, kind = history[1], _SUPPLIED
    elif options is not DEFAULT and options is not COLUMNS:
        if scale is None or options.out is not None or options.nonfinite == "raise":
            return None
        kind = _kind(options)
        if kind != _SUPPLIED:
            return None
    if x.layout is not torch.strided or not x.is_contiguous() or x.is_neg():
        return None
    address = x.data_ptr()
    call: Any = _calls.get((op, recipe.interned_key, x.shape, x.dtype, x.device, axis, kind, True, address % 16 == 0))
    if not getattr(call, "plain", False):
        return None
    if elsewhere(call.index):
        with torch.cuda.device(call.index):
            return _plainly(op, x, recipe, options, history)
    if scale is None:
        return call.plainly(address)
    if not call.takes(scale):
        return None
    return call.plainly(address, scale.data_ptr()) if history is None else call.recording(address, *history)


def _kind(options: CastOptions) -> tuple[bool, str, str, bool, bool]:
    """What calls are prepared for, of their options."""
    seeded = isinstance(options.seed, torch.Tensor)
    return options.scale is not None, options.rounding, options.storage, options.importance is not None, seeded


_OWN, _SUPPLIED = (False, "nearest", PLAIN, False, False), (True, "nearest", PLAIN, False, False)


def cast_pair(x: Any, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> tuple[ScaledTensor, ScaledTensor]:
    """`cast_pair` as `breccia.cast_pair` documents it: from one read, or two casts where they are faster."""
    if (pair := _plainly("cast_pair", x, recipe, options)) is not None:
        return pair
    x, options = _readable(x, recipe), _in_order(options, x.device)
    if columns_adjacent(x) and options.storage == PLAIN:
        turned = options if options.scale is None else _other_axis(options, x.ndim).replace(axis=-1)
        rows, columns = cast_pair(x.mT, recipe, turned)
        return columns.mT, rows.mT
    prepared = _call_for("cast_pair", x, recipe, options)
    if prepared is not None:
        return prepared(x, options)
    return cast(x, recipe, options.replace(axis=-1)), cast(x, recipe, options.replace(axis=-2))


def record_amax(x: Any, recipe: DelayedScaling, amaxes: Any, scale: Any) -> tuple[Any, Any]:
    """`record_amax` as `breccia.AmaxHistory.update` documents it, in one launch."""
    x = _readable(x, recipe)
    x = x.mT if columns_adjacent(x) else x
    prepared = _call_for("record_amax", x, recipe, DEFAULT)
    history = None if prepared is None else _History.of(recipe, amaxes, scale, x.device)
    if prepared is None or history is None:
        return reference.record_amax(x, recipe, amaxes, scale)
    return prepared.record(x, history)


def cast_and_record(
    x: Any, recipe: DelayedScaling, amaxes: Any, scale: Any, options: CastOptions = DEFAULT
) -> tuple[ScaledTensor, Any, Any]:
    """`cast_and_record` as `breccia.AmaxHistory.cast` documents it: the input is read once."""
    if options is DEFAULT or options is COLUMNS:
        results = _plainly("cast_and_record", x, recipe, options, (amaxes, scale))
        if results is not None:
            return results
    x, options = _readable(x, recipe), _in_order(options, x.device)
    if columns_adjacent(x) and options.storage == PLAIN:
        result, *recorded = cast_and_record(x.mT, recipe, amaxes, scale, _other_axis(options, x.ndim))
        return result.mT if options.out is None else options.out, *recorded
    history = _History.of(recipe, amaxes, scale, x.device)
    options = options.replace(scale=scale if history is None else history.scale)
    prepared = None if history is None else _call_for("cast_and_record", x, recipe, options)
    if prepared is None or history is None:
        return cast(x, recipe, options), *record_amax(x, recipe, amaxes, scale)
    return prepared(x, options, history=history), *history.recorded


def cast_pair_and_record(
    x: Any, recipe: DelayedScaling, amaxes: Any, scale: Any, options: CastOptions = DEFAULT
) -> tuple[ScaledTensor, ScaledTensor, Any, Any]:
    """`cast_pair_and_record` as `breccia.AmaxHistory.cast_pair` documents it: the input is read once."""
    if options is DEFAULT and (results := _plainly("cast_pair_and_record", x, recipe, options, (amaxes, scale))) is not None:
        return results
    x, options = _readable(x, recipe), _in_order(options, x.device)
    if columns_adjacent(x) and options.storage == PLAIN:
        rows, columns, *recorded = cast_pair_and_record(x.mT, recipe, amaxes, scale, options)
        return columns.mT, rows.mT, *recorded
    history = _History.of(recipe, amaxes, scale, x.device)
    options = options.replace(scale=scale if history is None else history.scale)
    prepared = None if history is None else _call_for("cast_pair_and_record", x, recipe, options)
    if prepared is None or history is None:
        return *cast_pair(x, recipe, options), *record_amax(x, recipe, amaxes, scale)
    return *prepared(x, options, history=history), *history.recorded


class _History:
    """The numbers of an `AmaxHistory` on a device, and those that a kernel writes."""

    def __init__(self, amaxes: Any, scale: Any, length: int, device: torch.device) -> None:
        count = 0 if amaxes is None else amaxes.shape[0]
        self.scale = scale
        self.old_count = min(count, length - 1)
        self.first = count - self.old_count
        self.recorded = empty((self.old_count + 1,), torch.float32, device), empty((), torch.float32, device)
        self.amaxes = self.recorded[0] if amaxes is None else amaxes

    @staticmethod
    def of(recipe: Any, amaxes: Any, scale: Any, device: torch.device) -> _History | None:
        """The history, or None where it is not on the device as kernels read it."""
        if not isinstance(scale, torch.Tensor):
            scale = torch.full((), float(scale), dtype=torch.float32, device=device)
        tensor = amaxes if isinstance(amaxes, torch.Tensor) else None
        if tensor is None and len(amaxes):
            return None
        if not all(_fits(part, device) for part in (scale, tensor) if part is not None):
            return None
        with on(device):
            return _History(tensor, scale, recipe.amax_history_len, device)


def _fits(part: Any, device: torch.device) -> bool:
    """Whether kernels on a device can read a part of a history, or an importance, as it is."""
    return isinstance(part, torch.Tensor) and part.dtype is torch.float32 and part.device == device and part.is_contiguous()


def requantize(st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """`requantize` as `breccia.requantize` documents it, for values that are cast: decoded in registers."""
    data = st.data
    if data.ndim > 1 and not data.is_contiguous() and data.mT.is_contiguous() and options.scale is None:
        # A transposed view: so is the result.
        turned = options if options.out is None else options.replace(out=options.out.mT)
        result = requantize(st.mT, recipe, turned)
        return result.mT if options.out is None else options.out
    options = _in_order(options, data.device)
    prepared = None if options.require_exact else _call_for("requantize", st, recipe, options)
    if prepared is None:
        return composites.requantize(st, recipe, options)
    return prepared(st, options)


def _readable(x: Any, recipe: ScalingRecipe) -> Any:
    need_dense(x)
    if x.dtype not in FLOATS:
        checks.check_cast(x, recipe)
    return x.resolve_neg() if x.is_neg() else x  # an imaginary part may have torch's negative bit, which its memory lacks


def _in_order(options: CastOptions, device: torch.device) -> CastOptions:
    """The options as kernels on a device read them.

    A scale is in C order, which those of tiles down the columns are not in, and an importance in FP32. A seed is int32 words in
    the memory of the device, or an integer.
    """
    scale, importance, seed = options.scale, options.importance, options.seed
    if isinstance(seed, torch.Tensor):
        if seed.device == device:
            words: Any = seed.to(torch.int32).contiguous()
        else:
            low, high = (word & 0xFFFFFFFF for word in seed.tolist())
            words = high << 32 | low
        if words is not seed:
            options = options.replace(seed=words)
    if isinstance(scale, torch.Tensor) and not scale.is_contiguous():
        options = options.replace(scale=scale.contiguous())
    if importance is not None:
        need_dense(importance)
        options = options.replace(importance=importance.resolve_neg().to(torch.float32).contiguous())
    return options


def _other_axis(options: CastOptions, ndim: int) -> CastOptions:
    """The options for the transpose of a tensor of `ndim` axes. A scale for each matrix has the leading axes alone."""
    if options is DEFAULT or options is COLUMNS:
        return COLUMNS if options is DEFAULT else DEFAULT
    scale, out = options.scale, options.out
    if isinstance(scale, torch.Tensor) and scale.ndim == ndim:
        scale = scale.mT.contiguous()
    return options.replace(axis=-3 - options.axis, scale=scale, out=None if out is None else out.mT)


def _call_for(op: str, x: Any, recipe: ScalingRecipe, options: CastOptions) -> Any:
    """The prepared call for these arguments, or None where the generic algorithm runs."""
    scaled = op == "requantize"
    axis = x.axis if scaled else options.axis
    if options is not DEFAULT and options.nonfinite == "raise":
        reference.refuse_nonfinite(TORCH, calls.dequantize(x) if scaled else TORCH.f32(x))
    device = x.data.device
    facts: Any = facts_of(x) if scaled else (x.is_contiguous() or x.stride(), x.data_ptr() % 16 == 0)
    key = (
        op, recipe.interned_key, x.shape, x.dtype, device, axis,
        _kind(options), *facts,
    )  # fmt: skip
    call = _calls.get(key)
    if call is None:
        try:
            call = _new_call(op, x, recipe, axis, options)
        except Unsupported as e:
            call = str(e)
        _calls.keep(key, call)
    if isinstance(call, str) or (options.scale is not None and not call.takes(options.scale)):
        return None
    return call if options.importance is None or _fits(options.importance, device) else None


#: Prepared calls; for calls that the kernels do not support, the reason.
_calls = Remembered()


#: Ops whose kernels are tuned on request. The others take choices that are known.
_TUNED = ("cast", "cast_ste", "requantize")


def _new_call(op: str, x: Any, recipe: ScalingRecipe, axis: int, options: CastOptions) -> Any:
    """The call for these arguments, tuned on request. Raises Unsupported."""
    device = x.data.device
    if op == "requantize" and options.scale is None and options.storage == PLAIN and Repeated.takes_tensor(x, recipe):
        return Repeated(x, recipe)
    device_hardware = hardware(device)

    def prepare(choose: Choose | None = None) -> Prepared:
        return prepared(op, x, recipe, axis, options, device_hardware, choose)

    def compiled(one: Prepared) -> Any:
        call, without_out = Call(x, one), options.replace(out=None)
        return lambda: call(x, without_out)

    if op == "cast_pair":
        try:
            return Call(x, prepare())
        except TwoCasts:
            return Pair(*(_new_call("cast", x, recipe, axis, options.replace(axis=axis)) for axis in (-1, -2)))
    if op not in _TUNED:
        return Call(x, prepare())
    return Call(x, timing.tuned(prepare, lambda one: one.launches, compiled, device, device_hardware.name))


def prepared(
    op: str, x: Any, recipe: ScalingRecipe, axis: int, options: CastOptions, hardware: Hardware, choose: Choose | None = None
) -> Prepared:  # fmt: skip
    """A call prepared for hardware under choices. Raises Unsupported."""
    supplied, rounding, storage, weighted, seeded = _kind(options)
    chosen = Options(supplied, rounding == "stochastic", storage, weighted, seeded)
    scaled = isinstance(x, ScaledTensor)
    facts = codes_of(x, scaled_source(x, recipe, chosen.supplied), False, hardware) if scaled else array_of(x)
    return Prepared(op, recipe, facts, axis, chosen, TORCH.dtypes(recipe.format), hardware, choose, turns=not scaled)


class Pair:
    """Calls of `cast_pair` that are two casts; both take the amax of the tensor from one pass, where they need it.

    plain, plainly, takes: as of `Call`.
    """

    def __init__(self, first: Call, second: Call) -> None:
        self.calls, self.index, self.device = (first, second), first.index, first.device
        self.shared = list(first.passes) == list(second.passes) == ["tensor"]
        self.plain = first.plain and second.plain
        self.launches = [*first.launches, *(second.launches[1:] if self.shared else second.launches)]

    def takes(self, scale: Any) -> bool:
        return all(call.takes(scale) for call in self.calls)

    def __call__(self, x: Any, options: CastOptions) -> tuple[ScaledTensor, ScaledTensor]:
        first, second = self.calls
        shared = first.amaxes(x) if self.shared else None
        return first(x, options.replace(axis=-1), shared), second(x, options.replace(axis=-2), shared)

    def plainly(self, address: int, *supplied: int) -> tuple[ScaledTensor, ScaledTensor]:
        """The results under no option but a scale, on the current device. supplied: its address, if there is one."""
        first, second = self.calls
        if not self.shared:
            return first.plainly(address, *supplied), second.plainly(address, *supplied)
        stream = stream_of(self.index)
        work, amax = workspace(self.device, stream)
        number = amax.data_ptr()
        first.amax.run(stream, address, number, work.data_ptr())
        return first.launched(stream, address, number), second.launched(stream, address, number)


class Repeated:
    """Calls of `requantize` that keep codes and repeat scales for finer blocks: 128x128 tiles to 1x128, say.

    One copy of a view in which each scale is repeated, by torch.
    """

    @staticmethod
    def takes_tensor(st: ScaledTensor, recipe: ScalingRecipe) -> bool:
        """Whether this is all that has to be done."""
        in_order = st.layout.storage == PLAIN and st.scale.ndim == st.data.ndim and st.data.is_contiguous()
        return in_order and repeats(st.recipe, st.layout, st.axis, recipe)

    def __init__(self, st: ScaledTensor, recipe: ScalingRecipe) -> None:
        shape, axis = st.shape, st.axis
        self.recipe, self.axis, self.padding, self.index = recipe, axis, st.padding, index_of(st.data.device)
        self.layout = checks.fitted_layout(recipe, shape, axis)
        *lead, tall, wide = st.scale.shape
        (m, k), (rows, columns) = (_sides(layout, axis, shape) for layout in (st.layout, self.layout))
        down, along = divided_up(m, rows), divided_up(k, columns)
        self.shape = (*lead, divided_up(shape[-2], rows), divided_up(shape[-1], columns))
        self.repeated = (*lead, tall * down, wide * along)
        strides = torch.empty(st.scale.shape, device="meta").stride()
        self.view = (*lead, tall, down, wide, along), (*strides[:-1], 0, 1, 0)

    def __call__(self, st: ScaledTensor, options: CastOptions) -> ScaledTensor:
        rows, columns = self.shape[-2:]
        with on(st.data.device):
            scale = st.scale.contiguous().as_strided(*self.view).contiguous().view(self.repeated)
            if self.repeated != self.shape:
                scale = scale[..., :rows, :columns].contiguous()
        result = ScaledTensor.from_parts(
            st.data, scale, self.recipe, self.layout, None, st.global_scale, self.axis, self.padding
        )
        return result if options.out is None else reference.assign(TORCH, options.out, result)


def _sides(layout: Layout, axis: int, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a block."""
    m, k = layout.block(axis) if axis == -1 else layout.block(axis)[::-1]
    return m or shape[-2], k or shape[-1]


class Call:
    """What calls of one op, recipe, shape, dtype, device and set of options have in common: their kernels, compiled."""

    def __init__(self, x: Any, prepared: Prepared) -> None:
        """x: one of the operands."""
        op, scaled, chosen = prepared.op, isinstance(x, ScaledTensor), prepared.options
        self.op, self.device = op, x.data.device
        self.index = index_of(self.device)
        self.prepared = prepared
        self.launches = prepared.launches
        self.numbers = 0 if scaled else 1
        self.flat_shape = None if scaled or x.is_contiguous() else prepared.input.flat_shape
        self.strided = prepared.input.strided
        self.passes = {name: (each, Launcher(each.launch)) for name, each in prepared.passes.items()}
        self.written = [ResultBuffers(written, self.device) for written in prepared.written]
        if prepared.launch is not None:
            self.launcher = Launcher(prepared.launch)
            self.scale_shape, self.scale_dtype = tuple(prepared.scale_shape), getattr(torch, prepared.scale_dtype)
        #: Whether `plainly` does what a call does, if options are at their default.
        self.plain = (
            op in ("cast", "cast_ste", "cast_pair", "cast_and_record", "cast_pair_and_record")
            and chosen in (Options(), Options(supplied=True))
            and self.index is not None
            and not INTERPRETED
            and self.flat_shape is None
            and len(self.passes) < 2
        )
        self.amax: Any = None
        #: What makes the zeros that a pass for rows or columns needs.
        self.zeros: Any = None
        for each, launcher in self.passes.values():
            self.amax = launcher
            if each.length:
                self.zeros = partial(torch.zeros, each.length, dtype=torch.int32, device=self.device)
        self.waits = prepared.waits
        if self.plain:
            values = op == "cast_ste"
            own = [allocate for written in self.written for allocate in written.allocators]
            self.allocators = [allocator(tuple(x.shape), x.dtype, self.device)] if values else own
            self.finished = itemgetter(0) if values else self._both if op in PAIRS else self.written[0].tensor

    def takes(self, scale: Any) -> bool:
        """Whether a supplied scale can be read as it is."""
        return (
            isinstance(scale, torch.Tensor)
            and scale.device == self.device
            and scale.dtype == self.scale_dtype
            and tuple(scale.shape) == self.scale_shape
            and scale.is_contiguous()
        )

    def __call__(
        self, x: Any, options: CastOptions, amaxes: dict[str, Any] | None = None, history: _History | None = None
    ) -> Any:
        """The result of the op. amaxes: those that `amaxes` returned for `x`."""
        if elsewhere(self.index):
            with torch.cuda.device(self.index):
                return self._run(x, options, amaxes, history)
        return self._run(x, options, amaxes, history)

    def plainly(self, address: int, *supplied: int) -> Any:
        """The result for contiguous numbers at an address, under no option but the axis and a scale, on the current device.

        supplied: the address of the scale, if there is one.
        """
        stream = stream_of(self.index)
        if self.waits:
            work, _ = workspace(self.device, stream)
            return self.launched(stream, address, work.data_ptr())
        if self.amax is None:
            return self.launched(stream, address, *supplied)
        if self.zeros is not None:
            amax = self.zeros()
            number = amax.data_ptr()
            self.amax.run(stream, address, number)
            return self.launched(stream, address, number)
        work, amax = workspace(self.device, stream)
        number = amax.data_ptr()
        self.amax.run(stream, address, number, work.data_ptr())
        return self.launched(stream, address, *[number] * len(self.prepared.amax_of))

    def recording(self, address: int, amaxes: Any, scale: Any) -> tuple[Any, ...] | None:
        """`plainly` under the scale of a history, which records the amax. None where the kernel cannot read `amaxes`."""
        tensor = amaxes if isinstance(amaxes, torch.Tensor) else None
        if not (_fits(tensor, self.device) if tensor is not None else not len(amaxes)):
            return None
        stream = stream_of(self.index)
        work, _ = workspace(self.device, stream)
        recipe: Any = self.prepared.recipe
        history = _History(tensor, scale, recipe.amax_history_len, self.device)
        parts = scale, work, history.amaxes, *history.recorded
        result = self.launched(stream, address, *[part.data_ptr() for part in parts], history.first, history.old_count)
        return *(result if self.op in PAIRS else (result,)), *history.recorded

    def launched(self, stream: int, address: int, *operands: int) -> Any:
        """The result of the last kernel of the short ways. operands: what the kernel takes after the result."""
        parts = [allocate() for allocate in self.allocators]
        self.launcher.run(stream, address, *[part.data_ptr() for part in parts], *operands)
        return self.finished(parts)

    def _both(self, parts: list[Any]) -> tuple[ScaledTensor, ScaledTensor]:
        """The results of a cast in both orientations."""
        count = len(self.written[0].parts)
        return self.written[0].tensor(parts[:count]), self.written[1].tensor(parts[count:])

    def amaxes(self, x: Any) -> dict[str, Any]:
        """The results of the passes before the cast, as bits."""
        with on(self.device):
            return self._amaxes(*self._read(x), current_stream(self.device))

    def record(self, x: Any, history: _History) -> tuple[Any, Any]:
        """Record the amax of `x` in a history."""
        with on(self.device):
            inputs, strides = self._read(x)
            stream = current_stream(self.device)
            _, launcher = self.passes["tensor"]
            tensors = [*inputs, workspace(self.device, stream)[0], history.amaxes, *history.recorded, history.scale]
            launcher.run(stream, *addresses(tensors, 1), history.first, history.old_count, *strides)
        return history.recorded

    def _seed(self, seed: Any) -> Sequence[int]:
        """What kernels take of a seed: its words, or their addresses."""
        if not self.prepared.options.stochastic:
            return ()
        return addresses([seed, seed[1:]]) if self.prepared.options.seeded else TORCH.words(seed)

    def _read(self, x: Any) -> tuple[list[Any], tuple[int, ...]]:
        """(the tensors that kernels read, strides)."""
        if not self.numbers:
            return components_of(x), ()
        flat = x if self.flat_shape is None else x.reshape(self.flat_shape)
        return [flat], flat.stride() if self.strided else ()

    def _amaxes(self, inputs: list[Any], strides: tuple[int, ...], stream: int) -> dict[str, Any]:
        return {name: self._pass(*each, inputs, strides, stream) for name, each in self.passes.items()}

    def _pass(self, prepared: Pass, launcher: Launcher, inputs: list[Any], strides: tuple[int, ...], stream: int) -> Any:
        device = self.device
        if prepared.length:
            amax = torch.zeros(prepared.length, dtype=torch.int32, device=device)
            tensors = [*inputs, amax]
        else:
            work, amax = workspace(device, stream)
            tensors = [*inputs, amax, work]
        launcher.run(stream, *addresses(tensors, self.numbers), *strides)
        return amax

    def _run(self, x: Any, options: CastOptions, amaxes: dict[str, Any] | None, history: _History | None) -> Any:
        device, written, out = self.device, self.written, options.out
        stream = current_stream(device)
        inputs, strides = self._read(x)
        if amaxes is None:
            amaxes = self._amaxes(inputs, strides, stream)
        if self.op == "cast_ste":
            result = empty(tuple(x.shape), x.dtype, device)
            parts, tensors = [], [result]
        else:
            out_parts = None if out is None else written[0].of(out, device)
            parts = [w.allocated() for w in written] if out_parts is None else [out_parts]
            tensors = parts[0] if len(parts) == 1 else [*parts[0], *parts[1]]
        others = [amaxes[name] for name in self.prepared.amax_of]
        if self.waits:
            others.append(workspace(device, stream)[0])
        if options.scale is not None:
            others.append(options.scale)
        if self.prepared.weighted:
            others.append(options.importance)
        counts: tuple[int, ...] = ()
        if history is not None:
            others += [workspace(device, stream)[0], history.amaxes, *history.recorded]
            counts = history.first, history.old_count
        self.launcher.run(
            stream,
            *addresses(inputs, self.numbers),
            *addresses(tensors, int(self.op == "cast_ste")),
            *addresses(others),
            *self._seed(options.seed),
            *counts,
            *strides,
        )
        if self.op == "cast_ste":
            return result
        st = written[0].tensor(parts[0])
        if self.op in PAIRS:
            return st, written[1].tensor(parts[1])
        if out is None:
            return st
        return out if parts[0][0] is out.data else reference.assign(TORCH, out, st)
