"""DLPack: zero-copy exchange of a tensor's components and metadata with any framework.

NumPy and MLX do not read DLPack's float8 and bfloat16, and DLPack cannot describe scales. So a bundle exports components in
dtypes that every consumer reads, float8 as uint8 and bfloat16 as uint16, with a header; on import each framework gets the
dtypes it stores them in. Both ways only the dtype field of the exchanged structure changes, never memory: the same on every
device, for every pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib import import_module
from operator import is_
from types import SimpleNamespace
from typing import Any

import numpy as np

from breccia import (
    Codec,
    CorruptFileError,
    DialectError,
    Framework,
    Layout,
    OptionError,
    ScaledTensor,
    ScalingRecipe,
    UnsupportedError,
)
from breccia.backend import (
    PARTS,
    Array,
    Metadata,
    Ops,
    Shape,
    dtype_name,
    float_codec,
    framework_of,
    ops_of,
    registry,
    targets,
)
from breccia.internal import InternedKey, bit_pattern, device_of

from .capsules import VERSION, Arrays, Codes, Dtypes, HostRoute, host_take, opened
from .configs import Config, read_config
from .dlpack_parts import ALIGNMENT, CONSUMERS, DEVICES, Consumer, Part, Refused, forward, said_by


def _address(array: Array) -> int:
    """The address of the first item."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    capsule = array.__dlpack__()  # it owns the structure
    tensor = opened(capsule)
    return tensor.data + tensor.byte_offset


def _stored(codec: Codec | None, ops: Ops) -> Callable[[str], str]:
    """Maps a component's dtype to the one in which `ops` stores it, of the same bits: float8 and uint8, bfloat16 and uint16."""
    words = ops.bfloat16
    names = {"bfloat16": words, "uint16": words}
    if codec is not None and codec.dtype and codec.dtype.startswith("float8"):
        names |= dict.fromkeys(("uint8", codec.dtype), ops.storage(codec))
    return lambda name: names.get(name, name)


# ------------------------------------------------------------------------------------------------ bundles


_NAMES = frozenset(PARTS)


class Bundle(tuple[Any, ...]):
    """`(data, scale)`, then zero_point and global_scale if the recipe has them; also by name; and a `header`.

    Each has `__dlpack__` and `__dlpack_device__`. The header is the JSON of `{name}.config` in files
    (docs/spec/files.md).
    """

    header: str
    #: Names of the components, in order.
    names: tuple[str, ...]
    #: The arrays whose memory holds the components, and the dtypes whose bits they hold.
    memory: tuple[Arrays, Dtypes]

    def __new__(cls, header: str, **parts: Any) -> Bundle:
        """A bundle of components by name. Raises DialectError for a header that is no text, and for wrong names."""
        if not isinstance(header, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DialectError(
                f"the header of a bundle is JSON text, which to_dlpack writes; got a {type(header).__name__}. Decode bytes: "
                "header.decode()."
            )
        names = tuple([name for name in PARTS if parts.get(name) is not None])
        if names[:2] != PARTS[:2] or not parts.keys() <= _NAMES:
            raise DialectError(
                f"a bundle has components data and scale, and zero_point and global_scale if the recipe has them; got "
                f"{', '.join(parts) or 'none'}."
            )
        self = super().__new__(cls, map(parts.get, names))
        self.header, self.names = header, names
        components = [parts.get(name) for name in PARTS]
        self.memory = (
            tuple([part.array if isinstance(part, Part) else part for part in components]),
            tuple([part.dtype if isinstance(part, Part) else None for part in components]),
        )
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in PARTS:
            raise AttributeError(f"a bundle has no {name!r}; it has header, names, {', '.join(PARTS)}")
        return self[self.names.index(name)] if name in self.names else None

    def __repr__(self) -> str:
        return f"Bundle({', '.join(f'{name}={part}' for name, part in zip(self.names, self, strict=True))})"


def to_dlpack(scaled: ScaledTensor) -> Bundle:
    """Export a tensor to any library that reads DLPack, zero-copy: `data, scale = to_dlpack(scaled)`.

    Returns a tuple of components: data and scale, then zero_point, then global_scale (see Bundle). Any `from_dlpack` takes
    each of them: float8 as uint8, bfloat16 as uint16, all other dtypes unchanged. `bundle.header` has the metadata;
    `from_dlpack(bundle, framework)` reads it. Memory is shared, so later writes to the tensor are visible.

    Raises UnsupportedError for components without values in memory (traced, fake, on the device meta), that require
    gradients, or that no consumer takes: NumPy arrays of non-native byte order, negative strides.

        >>> breccia.bridges.to_dlpack(breccia.cast(np.ones((4, 64), np.float32), "mxfp8"))
        Bundle(data=<uint8 (4, 64) on cpu:0>, scale=<uint8 (4, 2) on cpu:0>)
    """
    if not isinstance(scaled, ScaledTensor):
        raise UnsupportedError(
            f"to_dlpack takes a ScaledTensor, got {type(scaled).__name__}; use a framework's own from_dlpack for arrays."
        )
    scaled = scaled.to_plain()
    arrays, dtypes = _memory(scaled)
    parts = {
        name: Part(array, bit_pattern, _ANY_CONSUMER, dtype)
        for name, array, dtype in zip(PARTS, arrays, dtypes, strict=True)
        if array is not None
    }
    if _ANY_ROUTE.taken(arrays, dtypes, _NEUTRAL) is None:
        for name, part in parts.items():
            try:
                part.__dlpack__(max_version=VERSION)
            except Refused as e:
                raise UnsupportedError(f"to_dlpack cannot export {name}: {e}. {e.remedy or _COPY_FIRST}", part=name) from e
    return Bundle(_header(scaled), **parts)


_OWN: Dtypes = (None,) * len(PARTS)


def _memory(st: ScaledTensor) -> tuple[Arrays, Dtypes]:
    """The arrays whose memory holds the components."""
    replacement = st.held
    if replacement is None:
        return _parts(st), _OWN
    return replacement.leaves, tuple([name if replacement.replaces(n) else None for n, name in enumerate(replacement.dtypes)])


def _parts(st: ScaledTensor) -> Arrays:
    return st.data, st.scale, st.zero_point, st.global_scale


#: The requirements that all consumers share.
_ANY_CONSUMER = Consumer(forward, writes=False, metal=True)
_ANY_ROUTE, _NEUTRAL = HostRoute("any", id, True, False, forward), (Codes(bit_pattern),) * len(PARTS)
_COPY_FIRST = "breccia.bridges.from_dlpack(scaled, framework, copy=True) gives a tensor that can be exported."


def _header(st: ScaledTensor) -> str:
    codec = st.recipe.format.scale_codec
    scale_dtype = dtype_name(st.scale_dtype) if codec.bits > 8 else ""
    return _written(st.recipe, st.layout, st.axis, st.shape, scale_dtype)


@lru_cache(maxsize=1024)
def _written(recipe: ScalingRecipe, layout: Layout, axis: int, shape: Shape, scale: str) -> str:
    codec = float_codec("bfloat16" if scale == "uint16" else scale) or recipe.format.scale_codec
    return Config(recipe, layout, axis, shape, codec.name).to_json()


@lru_cache(maxsize=1024)
def _read(header: str) -> Config:
    try:
        return read_config(header)
    except CorruptFileError as e:
        raise DialectError(f"the bundle's header cannot be read: {e}") from e


# ------------------------------------------------------------------------------------------------ importing


def from_dlpack(source: ScaledTensor | Bundle, framework: str, *, device: Any = None, copy: bool | None = None) -> ScaledTensor:
    """Convert a tensor to another framework, byte for byte, in that framework's storage dtypes.

    source: a ScaledTensor of any framework, or a result of `to_dlpack`, also from another library.
    framework: "numpy", "torch", "jax", "mlx", or any that a plug-in declares.
    device: the target device, in that framework's spelling. By default the tensor stays on its device; moving it copies.
    copy: None shares memory where possible and copies the other components; True copies all; False raises instead of
        copying. docs/bridges/frameworks.md has the pairs.

    Writes to shared memory through a NumPy, torch or MLX array are visible in the other tensor, even in JAX, whose arrays count
    as immutable. Write to neither, or pass copy=True. NumPy arrays that share memory with JAX or MLX are read-only.

    Raises UnknownNameError for a framework that no plug-in declares, naming its package; UnsupportedError for components
    without values in memory, that require gradients, or that the framework cannot take on their device; OptionError if
    copy=False is impossible; DialectError for a header that does not fit.

        >>> st = breccia.cast(np.ones((4, 64), np.float32), "nvfp4")
        >>> moved = breccia.bridges.from_dlpack(st, "torch")
        >>> moved.framework, breccia.bytes_equal(moved, st)
        ('torch', True)
    """
    if copy is not None and not isinstance(copy, bool):
        raise OptionError(f"copy is None, True or False; got {copy!r}.", copy=copy)
    transfer = _transfer(framework)
    if device is not None or copy is not None:
        transfer = replace(transfer, device=device, copy=copy)
    if isinstance(source, ScaledTensor):
        source = source.to_plain()
        if framework_of(source.data_source) is transfer.target:
            arrays = _parts(source)
            taken = transfer.taken(arrays, _OWN, source.recipe)
            if all(map(is_, taken, arrays)):
                return source
        else:
            arrays, dtypes = _memory(source)
            taken = transfer.at_once(arrays, dtypes, source.recipe) or transfer.taken(arrays, dtypes, source.recipe)
        data, scale, zero_point, global_scale = taken
        return ScaledTensor.from_parts(
            data, scale, source.recipe, source.layout, zero_point, global_scale, source.axis, source.padding
        )
    if not isinstance(source, Bundle):
        raise UnsupportedError(
            f"from_dlpack takes a ScaledTensor, or what to_dlpack gave; got {type(source).__name__}. Make "
            "a bundle by breccia_bridges.dlpack.Bundle(header, data=..., scale=...), or a tensor by breccia.from_buffer."
        )
    return transfer.unbundled(source)


@dataclass(frozen=True)
class _Transfer:
    """The target framework and device of components, and whether to copy.

    route: the shortest way there from host memory, if there is one. codes: of each component, by recipe. accepted: the metadata
    of tensors made of bundles, by their header and the shapes and dtypes of their components.
    """

    target: Framework
    ops: Ops
    consumer: Consumer
    route: HostRoute | None
    codes: dict[InternedKey, tuple[Codes, ...]] = field(default_factory=dict)
    accepted: dict[Any, Metadata] = field(default_factory=dict)
    device: Any = None
    copy: bool | None = None

    def unbundled(self, source: Bundle) -> ScaledTensor:
        """The tensor of a bundle."""
        config = _read(source.header)
        arrays, dtypes = source.memory
        taken = self.at_once(arrays, dtypes, config.recipe)
        facts = None
        if taken is not None:
            facts = source.header, *[None if part is None else (part.shape, part.dtype) for part in taken]
            if (metadata := self.accepted.get(facts)) is not None:
                return metadata.assembled(*taken)
        data, scale, zero_point, global_scale = taken or self.taken(arrays, dtypes, config.recipe)
        st = ScaledTensor(data, scale, config.recipe, config.layout, zero_point, global_scale, config.axis, config.shape)
        if facts is not None:
            _remember(self.accepted, facts, Metadata.of(st))
        return st

    def at_once(self, arrays: Arrays, dtypes: Dtypes, recipe: ScalingRecipe) -> Arrays | None:
        """`taken`, if all components are in host memory that the target reads as it is; None if `taken` has to look closer."""
        if self.route is None or self.device is not None or self.copy is not None:
            return None
        return self.route.taken(arrays, dtypes, self._codes(recipe))

    def taken(self, arrays: Arrays, dtypes: Dtypes, recipe: ScalingRecipe) -> Arrays:
        """The components of a tensor, as arrays of the target."""
        components = list[Any]()
        for name, array, dtype, codes in zip(PARTS, arrays, dtypes, self._codes(recipe), strict=True):
            try:
                components.append(None if array is None else self._taken(array, codes.renamed, dtype))
            except Refused as e:
                said = f"from_dlpack: {self.target.name} cannot {{}} {name}: {e}. "
                if e.remedy:
                    raise UnsupportedError(said.format("take") + e.remedy, part=name) from e
                raise OptionError(f"{said.format('share')}copy=None copies it.", part=name, copy=False) from e
        return tuple(components)

    def _codes(self, recipe: ScalingRecipe) -> tuple[Codes, ...]:
        """The codes of each component of a recipe."""
        known = self.codes.get(recipe.interned_key)
        if known is None:
            codecs = recipe.format.parts
            known = tuple(Codes(_stored(codecs.get(name), self.ops)) for name in PARTS)
            _remember(self.codes, recipe.interned_key, known)
        return known

    def _taken(self, array: Any, renamed: Callable[[str], str], dtype: str | None) -> Array:
        """One component. Raises Refused."""
        if (
            dtype is None
            and self.copy is not True
            and _framework(array) is self.target
            and renamed(name := dtype_name(array)) == name
        ):
            component = array if self.device is None else self.ops.to(array, self.device)
            if self.copy is None or component is array:
                return component
        part = Part(array, renamed, self.consumer, dtype)
        here = None
        try:
            if self.device is not None or self.copy is not None:
                here = DEVICES.get(int(part.__dlpack_device__()[0]))
            if self.device is not None and _kind(self.device) != here:
                part.__dlpack__(max_version=VERSION)
                raise Refused(f"it is on {here}, and device={self.device!r} is another device")
            component = self._shared(part)
        except Refused as e:
            if e.remedy or self.copy is False:
                raise
            return self._copied(array, renamed, self.device, dtype)
        if self.copy is None or not math.prod(component.shape):
            return component
        shared = _address(component) == part.address
        if self.copy and shared:
            return self._copied(array, renamed, self.device if here == "cpu" else component.device, dtype)
        if not self.copy and not shared:
            off = (part.address or 0) % self.consumer.aligned
            past = f"its address is {off} bytes past a multiple of {self.consumer.aligned}"
            raise Refused(past if off else f"{self.target.name} always copies")
        return component

    def _shared(self, part: Part) -> Array:
        """A component as an array of the target, on `device`."""
        enter = _entrance(self.consumer.module or self.target.module)
        try:
            component = enter(part)
        except Exception as e:  # some consumers replace the error raised here by their own
            if part.refused:
                raise part.refused from e
            raise Refused(said_by(e), "Pass device= to move it there, which copies.") from e
        return component if self.device is None else self.ops.to(component, self.device)

    def _copied(self, array: Any, renamed: Callable[[str], str], device: Any, dtype: str | None) -> Array:
        """Share a copy in host memory instead: C order, native byte order, aligned, writable."""
        host = np.from_dlpack(array) if _framework(array) is None else ops_of(array).to_numpy(array)
        raw = np.empty(host.nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        fresh = raw[start : start + host.nbytes].view(host.dtype.newbyteorder("=")).reshape(host.shape)
        np.copyto(fresh, host)
        return replace(self, device=device, copy=None)._shared(Part(fresh, renamed, self.consumer, dtype))


def _transfer(framework: str) -> _Transfer:
    """The transfer to the framework's default device, sharing memory where possible. Raises UnknownNameError."""
    declared = registry()
    known = _transfers.get(framework)
    if known is None or known[0] is not declared:
        target: Framework = declared.look_up("breccia_frameworks", framework, "framework")
        consumer, take = CONSUMERS.get(framework, Consumer()), host_take(framework)
        route = take and HostRoute(
            framework, take.call, take.flagged, consumer.writes, None if take.strict else consumer.strides
        )
        transfer = _Transfer(target, targets.load(target.ops), consumer, route)
        known = _transfers[framework] = (declared, transfer)
    return known[1]


#: By the name of a framework: the registry that declares it, and the transfer.
_transfers: dict[str, tuple[Any, _Transfer]] = {}
_REMEMBERED = 256


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    if len(known) >= _REMEMBERED:
        known.clear()
    known[key] = value


def _framework(array: Any) -> Framework | None:
    """The framework of an array; None if no plug-in declares it."""
    try:
        return framework_of(array)
    except UnsupportedError:
        return None


def _kind(device: Any) -> str:
    """The kind of a device, in any framework's spelling."""
    return device_of(SimpleNamespace(device=device))


@cache
def _entrance(module: str) -> Callable[[Any], Array]:
    return import_module(module).from_dlpack
