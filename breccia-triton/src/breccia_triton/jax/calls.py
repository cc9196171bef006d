"""The ops on JAX arrays on CUDA, eager and traced. Calls are prepared as those of torch are; only launches differ.

Arrays are contiguous and aligned, and bytes of codes and scales pass as integers.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from breccia import DelayedScaling, ScaledTensor, ScalingRecipe
from breccia.backend import (
    DEFAULT,
    FLOAT32,
    PLAIN,
    CastOptions,
    Metadata,
    Ops,
    ProductOptions,
    Shape,
    calls,
    checks,
    composites,
    dtype_name,
    ops_of,
    product_options,
    reference,
)
from breccia.internal import storages

from ..casts.plans import TOO_LARGE, readable
from ..casts.prepare import RECORDING, Options, Pass, Prepared, decoding, scaled_source
from ..facts import LARGE, Array, Codes, Component, Hardware, itemsize
from ..launch.triton_launch import Launch
from ..specs import Spec, Unsupported, needed
from .launch import OnGPU, launched, run

#: The dtypes of codes and scales in kernels, by bytes.
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32"}
#: The parameters of kernels that are components of a ScaledTensor that they read.
_COMPONENTS = {"data": "x", "scale": "x_scale", "zero_point": "x_zero_point", "global_scale": "x_global_scale"}
_SEED = ("seed_low", "seed_high")
#: While a function is traced: what calls are supported, and what they return, does not depend on it.
UNKNOWN = Hardware()
#: Name, shape and dtype of arrays.
Shapes = tuple[tuple[str, Shape, str], ...]


def cast(x: Any, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """`cast` as `breccia.cast` documents it."""
    results = _cast("cast", x, recipe, options)
    if results is None:
        plain = options.storage == PLAIN
        return reference.cast(x, recipe, options) if plain else storages.cast(x, recipe, options)
    return results[0]


def cast_pair(x: Any, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> tuple[ScaledTensor, ScaledTensor]:
    """`cast_pair` as `breccia.cast_pair` documents it: from one read, or two casts where they are faster."""
    pair = _cast("cast_pair", x, recipe, options)
    if pair is None:
        return cast(x, recipe, options.replace(axis=-1)), cast(x, recipe, options.replace(axis=-2))
    return pair


def cast_ste(x: Any, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> Any:
    """`cast_ste` as `breccia.cast_ste` documents it, without codes in memory. The frontend computes gradients."""
    results = _cast("cast_ste", x, recipe, options)
    return reference.cast_ste(x, recipe, options) if results is None else results[0]


def record_amax(x: Any, recipe: DelayedScaling, amaxes: Any, scale: Any) -> tuple[Any, Any]:
    """`record_amax` as `breccia.AmaxHistory.update` documents it, in one launch."""
    results = _cast("record_amax", x, recipe, DEFAULT, _history(amaxes, scale))
    return reference.record_amax(x, recipe, amaxes, scale) if results is None else results


def cast_and_record(
    x: Any, recipe: DelayedScaling, amaxes: Any, scale: Any, options: CastOptions = DEFAULT
) -> tuple[ScaledTensor, Any, Any]:
    """`cast_and_record` as `breccia.AmaxHistory.cast` documents it: the input is read once."""
    history = _history(amaxes, scale)
    results = (
        None if history is None else _cast("cast_and_record", x, recipe, options.replace(scale=history["before"]), history)
    )
    if results is None:
        return cast(x, recipe, options.replace(scale=scale)), *record_amax(x, recipe, amaxes, scale)
    return results


def cast_pair_and_record(
    x: Any, recipe: DelayedScaling, amaxes: Any, scale: Any, options: CastOptions = DEFAULT
) -> tuple[ScaledTensor, ScaledTensor, Any, Any]:
    """`cast_pair_and_record` as `breccia.AmaxHistory.cast_pair` documents it: the input is read once."""
    history = _history(amaxes, scale)
    results = (
        None if history is None else _cast("cast_pair_and_record", x, recipe, options.replace(scale=history["before"]), history)
    )
    if results is None:
        return *cast_pair(x, recipe, options.replace(scale=scale)), *record_amax(x, recipe, amaxes, scale)
    return results


def requantize(st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """`requantize` as `breccia.requantize` documents it, for values that are cast: decoded in registers."""
    results = None if options.require_exact else _cast("requantize", st, recipe, options.replace(axis=st.axis))
    return composites.requantize(st, recipe, options) if results is None else results[0]


def dequantize(st: ScaledTensor, options: ProductOptions = FLOAT32) -> Any:
    """`dequantize` as `breccia.dequantize` documents it."""
    out_dtype, _, out = options
    arrays = components(st)
    call = Decode(ops_of(st.data), shapes_of(arrays), Metadata.of(st), out_dtype)
    if out is not None or not isinstance(_decoding(call), Launch):
        return reference.dequantize(st, options)
    return run(call, list(arrays.values()))[0]


def _cast(op: str, x: Any, recipe: ScalingRecipe, options: CastOptions, history: Mapping[str, Any] | None = None) -> Any:
    """The results of an op that casts, or None where the generic algorithm runs."""
    scaled = isinstance(x, ScaledTensor)
    ops = ops_of(x.data if scaled else x)
    if not scaled:
        checks.check_cast(x, recipe)
    if options.nonfinite == "raise":
        reference.refuse_nonfinite(ops, calls.dequantize(x) if scaled else ops.f32(x))
    arrays = components(x) if scaled else {"x": x}
    if options.scale is not None:
        arrays["supplied"] = options.scale
    if options.importance is not None:
        checks.check_importance(options.importance, x, recipe, options.axis)
        arrays["importance"] = ops.f32(options.importance)
    if options.rounding == "stochastic":
        words = ops.words(options.seed)
        arrays |= {name: jnp.asarray(word, jnp.int32) for name, word in zip(_SEED, words, strict=True)}
    arrays |= history or {}
    if options.out is not None or (op in RECORDING) != (history is not None) or not all(map(is_array, arrays.values())):
        return None
    weighted = options.importance is not None
    chosen = Options(options.scale is not None, options.rounding == "stochastic", options.storage, weighted)
    call = Cast(op, ops, recipe, options.axis, chosen, shapes_of(arrays), Metadata.of(x) if scaled else None)
    return call.assembled(run(call, list(arrays.values()))) if call.supported else None


def is_array(x: Any) -> bool:
    """Whether it is an array, or a tracer of one"""
    return isinstance(x, jax.Array)


def _history(amaxes: Any, scale: Any) -> dict[str, Any] | None:
    """The numbers of an `AmaxHistory` by the parameters of kernels; None where they are not as kernels read them."""
    before = scale if is_array(scale) else jnp.asarray(float(scale), jnp.float32)
    numbers = {"before": before, "amaxes": amaxes} if len(amaxes) else {"before": before}
    fits = all(is_array(a) and a.dtype == jnp.float32 for a in numbers.values()) and before.shape == ()
    return numbers if fits else None


def components(st: ScaledTensor) -> dict[str, Any]:
    """The components of a tensor by the parameters of kernels."""
    return {_COMPONENTS[name]: getattr(st, name) for name in st.recipe.format.parts}


def shapes_of(arrays: Mapping[str, Any]) -> Shapes:
    """Names, shapes and dtypes."""
    return tuple((name, tuple(a.shape), dtype_name(a)) for name, a in arrays.items())


def assembled(metadata: Metadata, components: Mapping[str, Any]) -> ScaledTensor:
    """The tensor with these components by the parameters of kernels."""
    return metadata.assembled(*map(components.get, _COMPONENTS.values()))


def tensor_of(metadata: Metadata | None, shapes: Shapes, arrays: Sequence[Any]) -> Any:
    """The tensor with these arrays, named as `shapes` names them; without metadata the only array."""
    if metadata is None:
        return arrays[0]
    return assembled(metadata, dict(zip((name for name, _, _ in shapes), arrays, strict=True)))


def placeholder(metadata: Metadata | None, shapes: Shapes) -> Any:
    """`tensor_of` with shapes and dtypes in place of arrays. shapes: of the components, by the parameters of kernels."""
    return tensor_of(metadata, shapes, [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for _, shape, dtype in shapes])


def codes_of(ops: Ops, shapes: Shapes, st: ScaledTensor, spec: Spec, hardware: Hardware, merged: bool) -> Codes:
    """The facts of a tensor of `placeholder`. merged: as of `Codes`. Raises Unsupported."""
    operands = {name: Component(shape, dtype) for name, shape, dtype in shapes}
    parts = {name: operands[_COMPONENTS[name]] for name in st.recipe.format.parts}
    need_small(tuple(st.shape))
    return Codes(st, spec, parts, ops.dtypes(st.recipe.format), hardware, merged)


def need_small(shape: Shape) -> None:
    """Raise Unsupported for an array whose positions need 64 bits."""
    if math.prod(shape) >= LARGE:
        raise Unsupported(TOO_LARGE)


def as_integers(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Codes and scales as kernels read them."""
    return {name: lax.bitcast_convert_type(a, _INTEGERS[a.dtype.itemsize]) for name, a in arrays.items()}


def _written(prepared: Prepared) -> Iterator[tuple[str, Shape, str, bool]]:
    """(parameter, shape, dtype, whether it has padding) of each component that a kernel writes."""
    for written, prefix in zip(prepared.written, ("", "other_"), strict=False):
        for name, (part, shape, dtype) in zip(written.arguments(prefix), written.parts, strict=True):
            yield name, shape, dtype, part in written.padded


@dataclass(frozen=True)
class Decode(OnGPU):
    """A call of `dequantize`. shapes: of the components, by the parameters of kernels."""

    ops: Ops
    shapes: Shapes
    metadata: Metadata
    dtype: str

    @property
    def results(self) -> tuple[tuple[Shape, str], ...]:
        return ((tuple(placeholder(self.metadata, self.shapes).shape), self.dtype),)

    def generic(self, *arrays: Any) -> list[Any]:
        return [reference.dequantize(tensor_of(self.metadata, self.shapes, arrays), product_options(self.dtype))]

    def kernels(self, hardware: Hardware, *arrays: Any) -> list[Any]:
        inputs = as_integers(dict(zip((name for name, _, _ in self.shapes), arrays, strict=True)))
        ((shape, dtype),) = self.results
        out = {"out": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))}
        return [launched(needed(_decoding(self, hardware)), inputs, out)["out"]]


@lru_cache(maxsize=4096)
def _decoding(call: Decode, hardware: Hardware = UNKNOWN) -> Launch | str:
    """The launch of a call, or why the kernels do not support it."""
    try:
        if 0 in call.results[0][0]:
            raise Unsupported("an empty tensor")
        st = placeholder(call.metadata, call.shapes)
        spec = needed(readable(st.recipe, st.layout))
        return decoding(codes_of(call.ops, call.shapes, st, spec, hardware, merged=True), call.dtype)
    except Unsupported as e:
        return str(e)


@dataclass(frozen=True)
class Cast(OnGPU):
    """A call of an op that casts. shapes: of the arrays it reads, by the parameters of kernels. metadata: of a ScaledTensor."""

    op: str
    ops: Ops
    recipe: ScalingRecipe
    axis: int
    options: Options
    shapes: Shapes
    metadata: Metadata | None

    @property
    def supported(self) -> bool:
        """Whether there is a kernel for it, which reads a supplied scale as it is."""
        prepared = _prepared(self)
        if isinstance(prepared, str):
            return False
        supplied = [(shape, dtype) for name, shape, dtype in self.shapes if name == "supplied"]
        return not supplied or supplied == [(tuple(prepared.scale_shape), prepared.scale_dtype)]

    @property
    def results(self) -> tuple[tuple[Shape, str], ...]:
        prepared = needed(_prepared(self))
        arrays = (
            [self.shapes[0][1:]] if self.op == "cast_ste" else [(shape, dtype) for _, shape, dtype, _ in _written(prepared)]
        )
        if self.op in RECORDING:
            arrays += [((self._old[1] + 1,), "float32"), ((), "float32")]
        return tuple(arrays)

    @property
    def _old(self) -> tuple[int, int]:
        """(the first number of a history that is kept, how many are)."""
        assert isinstance(self.recipe, DelayedScaling)
        count = sum(shape[0] for name, shape, _ in self.shapes if name == "amaxes")
        old = min(count, self.recipe.amax_history_len - 1)
        return count - old, old

    def _named(self, arrays: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip((name for name, _, _ in self.shapes), arrays, strict=True))

    def assembled(self, results: list[Any]) -> tuple[Any, ...]:
        """ScaledTensors of the components among the results, and the other results."""
        if self.op == "cast_ste":
            return tuple(results)
        tensors, rest = [], list(results)
        for written in needed(_prepared(self)).written:
            parts, rest = rest[: len(written.parts)], rest[len(written.parts) :]
            tensors.append(written.tensor(parts))
        return *tensors, *rest

    def generic(self, *arrays: Any) -> list[Any]:
        by_name = self._named(arrays)
        x = by_name["x"] if self.metadata is None else assembled(self.metadata, by_name)
        stochastic = self.options.stochastic
        seed = jnp.stack([by_name[name] for name in _SEED]) if stochastic else None
        rounding = "stochastic" if stochastic else "nearest"
        options = CastOptions(self.axis, by_name.get("supplied"), rounding, seed, importance=by_name.get("importance"))
        if self.op in RECORDING:
            more = () if self.op == "record_amax" else (options,)
            amaxes, before = by_name.get("amaxes", ()), by_name["before"]
            results: Any = getattr(reference, self.op)(x, self.recipe, amaxes, before, *more)
        else:
            results = getattr(reference, self.op)(x, self.recipe, options)
        flat: list[Any] = []
        for each in results if isinstance(results, tuple) else (results,):
            if isinstance(each, ScaledTensor):
                stored = each.to_storage(self.options.storage)
                flat += [getattr(stored, name) for name in self.recipe.format.parts]
            else:
                flat.append(each)
        return flat

    def kernels(self, hardware: Hardware, *arrays: Any) -> list[Any]:
        prepared, by_name = needed(_prepared(self, hardware)), self._named(arrays)
        x = {name: by_name[name] for name in _COMPONENTS.values() if name in by_name}
        x = x if self.metadata is None else as_integers(x)
        given = ("supplied", "importance", "before", "amaxes", *_SEED)
        others = as_integers({name: by_name[name] for name in given if name in by_name})
        history: dict[str, Any] = {}
        old: tuple[int, ...] = ()
        if self.op in RECORDING:
            old = self._old
            others.setdefault("amaxes", others["before"])  # none is read
            shapes = {"work": (2,), "recorded": (old[1] + 1,), "after": ()}
            history = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
        passes = {name: self._amax(each, x | others, history, old) for name, each in prepared.passes.items()}
        if prepared.launch is None:
            return self._recorded(passes["tensor"])
        names = [name for name in ("amax", "other_amax") if name in prepared.launch.arguments]
        amaxes = {name: passes[of]["amax"] for name, of in zip(names, prepared.amax_of, strict=True)}
        if self.op == "cast_ste":
            ((shape, dtype),) = self.results
            data = {"data": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))}
            return [launched(prepared.launch, x | others | amaxes, data)["data"]]
        written = list(_written(prepared))
        outputs = history | {name: jax.ShapeDtypeStruct(shape, _INTEGERS[itemsize(dtype)]) for name, shape, dtype, _ in written}
        zeroed = {"work"} | {name for name, _, _, padded in written if padded}
        done = launched(prepared.launch, x | others | amaxes, outputs, zeroed, old)
        flat = [lax.bitcast_convert_type(done[name], dtype) for name, _, dtype, _ in written]
        return flat + (self._recorded(done) if history else [])

    def _amax(self, each: Pass, inputs: dict[str, Any], history: dict[str, Any], old: tuple[int, ...]) -> dict[str, Any]:
        """The results of a pass before the cast."""
        if history:
            return launched(each.launch, inputs, history, {"work"}, old)
        amax = {"amax": jax.ShapeDtypeStruct((each.length or 1,), jnp.int32)}
        if each.length:
            return launched(each.launch, inputs, amax, {"amax"})
        work = {"work": jax.ShapeDtypeStruct((2,), jnp.int32)}  # two zeros, which kernels leave as zeros
        return launched(each.launch, inputs, amax | work, {"work"})

    @staticmethod
    def _recorded(outputs: dict[str, Any]) -> list[Any]:
        return [lax.bitcast_convert_type(outputs[name], jnp.float32) for name in ("recorded", "after")]


@lru_cache(maxsize=4096)
def _prepared(call: Cast, hardware: Hardware = UNKNOWN) -> Prepared | str:
    """The prepared call, or why the kernels do not support it."""
    try:
        if call.metadata is None:
            _, shape, dtype = call.shapes[0]
            need_small(shape)
            source: Array | Codes = Array.dense(shape, dtype)
        else:
            read = tuple(each for each in call.shapes if each[0] in _COMPONENTS.values())
            st = placeholder(call.metadata, read)
            spec = scaled_source(st, call.recipe, call.options.supplied)
            source = codes_of(call.ops, read, st, spec, hardware, merged=False)
        return Prepared(call.op, call.recipe, source, call.axis, call.options, call.ops.dtypes(call.recipe.format), hardware)
    except Unsupported as e:
        return str(e)
