"""Scaled and plain tensors in safetensors files that every stock reader can open.

On disk a scaled tensor `w` is `w.data`, `w.scale`, and `w.zero_point`, `w.global_scale` where its recipe has them. Codes and
8-bit scales are U8, other scales F32, F16 or BF16. The file's metadata has the config as JSON under `w.config`,
and `schema` and `breccia_version`. Files of breccia 0.1 (no `schema`; 4-bit codes one per byte) are read as well.

To stream tensors that do not exist yet: `plan` each, `open_writer`, then `write_tensor` one by one.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from breccia import (
    Codec,
    CorruptFileError,
    DtypeWarning,
    Integer,
    Layout,
    PerGroupIndex,
    ScaledTensor,
    ScalingRecipe,
    ShapeError,
    UnsupportedError,
)
from breccia.backend import TENSOR, Array, Ops, components, dtype_name, ops_of, packing, part_shapes, registry, targets
from breccia.internal import ML_DTYPES, abbreviated, check_patterns, matches

from . import nested as trees
from .bare_codes import warn_of_codes
from .checkpoint import GGUF, PICKLED, checkpoint_files
from .configs import (
    CHECKPOINT,
    FILE_DTYPES,
    FILE_PARTS,
    INDEX,
    NON_NUMPY,
    SCOPE,
    Config,
    Undeclared,
    located,
    metadata_of,
    owners,
    read_configs,
)
from .histories import KEY as HISTORIES
from .histories import Histories, as_arrays
from .remote_path import path_of
from .safetensors_file import DTYPES, Container, Shape, read, shown
from .safetensors_writer import Writer, check_text
from .shards import Shards, in_both

_DTYPE_NAMES = {file: name for name, file in NON_NUMPY.items()}

#: The declaration of one name in a file: its entries as (dtype, shape), and the config of a scaled tensor.
Described = tuple[dict[str, tuple[str, Shape]], Config | None]


# ------------------------------------------------------------------------------------------------ describing


def describe(name: str, tensor: ScaledTensor | Array) -> Described:
    """The declaration of `tensor` under `name`, without reading its values."""
    if not isinstance(tensor, ScaledTensor):
        return {name: (_plain_dtype(name, tensor), tuple(tensor.shape))}, None
    scale = _scale_dtype(name, tensor)
    codec = tensor.recipe.format.scale_codec
    config = Config(tensor.recipe, tensor.layout, tensor.axis, tensor.shape, codec.name if codec.bits <= 8 else scale)
    dtypes = {"data": "U8", "scale": scale}
    if (offset := tensor.recipe.format.offset_codec) is not None and offset.bits > 8:
        dtypes["zero_point"] = _float_dtype(f"{name}.zero_point", tensor.zero_point)
    entries = {
        f"{name}.{part}": (dtypes.get(part) or _plain_dtype(f"{name}.{part}", array), tuple(array.shape))
        for part, array in components(tensor).items()
    }
    return _with_index(name, entries, config)


def plan(name: str, shape: Shape, recipe: ScalingRecipe) -> Described:
    """The result of `describe(name, cast(x, recipe))` for any `x` of that shape, blocks along the last axis.

    Raises ShapeError if the recipe needs more axes.
    """
    needed = 1 if recipe.layout.block() == TENSOR else 2
    if len(shape) < needed:
        raise ShapeError(
            f"tensor {name!r}: recipe {recipe.name!r} needs at least {needed} axes, shape {shape} has {len(shape)}; keep it "
            "unquantized, or reshape it.",
            shape=shape,
        )
    return described_as(name, recipe, recipe.layout.fitted(shape), -1, shape)


def described_as(name: str, recipe: ScalingRecipe, layout: Layout, axis: int, shape: Shape) -> Described:
    """The result of `describe` for a tensor whose scales and zero-points have the recipe's own dtypes."""
    fmt = recipe.format
    shapes = part_shapes(fmt, layout, shape, axis)
    dtypes = {part: "U8" if codec is None or codec.bits <= 8 else codec.name for part, codec in fmt.parts.items()}
    if fmt.offset == "zero_point" and isinstance(fmt.element, Integer) and fmt.element.signed:
        dtypes["zero_point"] = "I8"
    entries = {f"{name}.{part}": (dtype, shapes[part]) for part, dtype in dtypes.items()}
    return _with_index(name, entries, Config(recipe, layout, axis, tuple(shape), fmt.scale_codec.name))


def _with_index(name: str, entries: dict[str, tuple[str, Shape]], config: Config) -> Described:
    """The declaration of a scaled tensor, with the array of its layout's index, if it has one."""
    index = {} if config.index is None else {f"{name}.{INDEX}": ("I32", (len(config.index),))}
    return entries | index, config


def file_parts(tensor: ScaledTensor) -> dict[str, Array]:
    """The arrays that a file has of a scaled tensor, by the ends of their names."""
    if not isinstance(tensor.layout, PerGroupIndex):
        return components(tensor)
    return components(tensor) | {INDEX: np.array(tensor.layout.index, np.int32)}


def _scale_dtype(name: str, st: ScaledTensor) -> str:
    codec = st.recipe.format.scale_codec
    if codec.bits <= 8:
        return "U8"
    return _float_dtype(f"{name}.scale", st.scale)


def _float_dtype(name: str, array: Array) -> str:
    """The dtype of float scales and biases; uint16 is BF16's bit pattern."""
    return "BF16" if dtype_name(array) == "uint16" else _plain_dtype(name, array)


def _plain_dtype(name: str, array: Array) -> str:
    ops_of(array, f"tensor {name!r}")
    dtype = dtype_name(array)
    if dtype not in FILE_DTYPES:
        raise UnsupportedError(
            f"tensor {name!r}: safetensors has no dtype for {dtype}; it has {', '.join(FILE_DTYPES)}. Convert it, or view it "
            "as bytes.",
            name=name,
            dtype=dtype,
        )
    return FILE_DTYPES[dtype]


# ------------------------------------------------------------------------------------------------ saving


def save_safetensors(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    extra_metadata: Mapping[str, str] | None = None,
    *,
    force: bool = False,
) -> None:
    """Write scaled tensors and plain arrays, of any installed framework, to a safetensors file.

    tensors: by name, an AmaxHistory among them. Values may be nested mappings and lists of them, such as the parameters of a
        Flax model, whose keys are joined by dots.
    extra_metadata: further entries of the file's metadata, str to str; keys that end in ".config" are reserved.
    force: replace an existing file, atomically at the end; otherwise FileExistsError.

    Raises UnsupportedError for names or metadata that are not text or collide, and for dtypes the format lacks.

        >>> w, bias = breccia.cast(np.ones((64, 32), np.float32), "mxfp8"), np.zeros(64, np.float32)
        >>> breccia.bridges.save_safetensors({"w": w, "bias": bias}, tmp / "layer.safetensors")
        >>> from safetensors.numpy import load_file
        >>> sorted(load_file(tmp / "layer.safetensors"))
        ['bias', 'w.data', 'w.scale']
    """
    if not isinstance(tensors, Mapping):
        raise UnsupportedError(
            f"save_safetensors takes (tensors, path): a mapping of names first; got {type(tensors).__name__}."
        )
    if HISTORIES in (extra_metadata or {}):
        raise UnsupportedError(f"extra_metadata key {HISTORIES!r} is reserved for amax histories. Rename it.", key=HISTORIES)
    tensors = {name: t.to_plain() if isinstance(t, ScaledTensor) else t for name, t in trees.flat(tensors).items()}
    tensors, histories = as_arrays(tensors)
    described = {name: describe(name, tensor) for name, tensor in tensors.items()}
    with open_writer(path, described, {**(extra_metadata or {}), **histories}, force=force) as writer:
        for name, tensor in tensors.items():
            write_tensor(writer, name, tensor)


def open_writer(
    path: str | os.PathLike[str],
    described: Mapping[str, Described],
    extra_metadata: Mapping[str, str] | None = None,
    *,
    force: bool = False,
) -> Writer:
    """The writer of a file of tensors that `describe` or `plan` declared, by name; see `save_safetensors`.

    A plain tensor is described as `({name: (dtype, shape)}, None)`.
    """
    return Writer(path, *declarations(described, extra_metadata), force)


def declarations(
    described: Mapping[str, Described], extra_metadata: Mapping[str, str] | None = None
) -> tuple[dict[str, tuple[str, Shape]], dict[str, str]]:
    """The entries and the metadata of a file of tensors that `describe` or `plan` declared, by name."""
    for name in described:
        check_text("a tensor's name", name)
    configs = {name: config for name, (_, config) in described.items() if config is not None}
    owned = owners(configs)
    entries: dict[str, tuple[str, Shape]] = {}
    for name, (own, config) in described.items():
        if config is None and name in owned:
            raise UnsupportedError(
                f"the names {name!r} and {owned[name]!r} collide: a scaled tensor uses its name with "
                f"{', '.join(f'.{part}' for part in FILE_PARTS)} in the file. Rename one.",
                name=name,
            )
        entries |= own
    return entries, metadata_of(configs, extra_metadata or {})


def safetensors_metadata(tensors: Mapping[str, ScaledTensor]) -> dict[str, str]:
    """The metadata for files whose tensors another library writes: `{name}.data`, `{name}.scale`, ..., in plain storage.

    Write all of it to every file of the checkpoint ("breccia_scope": "checkpoint"), whichever components the file holds.

        >>> w = breccia.cast(np.ones((64, 32), np.float32), "mxfp8")
        >>> sorted(breccia.bridges.safetensors_metadata({"w": w}))
        ['breccia_scope', 'breccia_version', 'schema', 'w.config']
    """
    configs = {name: config for name, st in tensors.items() if (config := describe(name, st)[1]) is not None}
    return metadata_of(configs, {}, beside=False) | {SCOPE: CHECKPOINT}


def write_tensor(writer: Writer, name: str, tensor: ScaledTensor | Array) -> None:
    """Write a tensor declared to `open_writer`: all components of a scaled one, or a plain array, from any framework."""
    if isinstance(tensor, ScaledTensor):
        for part, array in file_parts(tensor).items():
            writer.write(f"{name}.{part}", _flat(array))
    else:
        writer.write(name, _flat(tensor))


def _flat(array: Array) -> np.ndarray:
    """Its items in C order on one axis. Flattened before conversion: some bit-pattern views need one axis."""
    ops = ops_of(array)
    return ops.to_numpy(ops.reshape(array, (math.prod(array.shape),)))


# ------------------------------------------------------------------------------------------------ loading


def load_safetensors(
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    framework: str = "numpy",
    device: Any = None,
    nested: bool = False,
) -> dict[str, Any]:
    """Scaled tensors and plain arrays of a safetensors file, or of a checkpoint folder of them, by name.

    names: the tensors to read, as names or shell-style globs over whole names; by default all. Of files without any of them
        only the header is read.
    framework: of the returned arrays; "numpy" maps the file and reads on access (copy-on-write: the file never changes).
    device: the device to put them on, in that framework's spelling.
    nested: return nested dicts, by the dots in names.

    Any safetensors file loads; without breccia's configs it gives plain arrays only. If those are codes of another library, a
    DialectWarning names `load_checkpoint`, which decodes them. Plain BF16 and float8 arrays need ml_dtypes on NumPy; MLX, which
    has no float8, shows those as uint8.

    Plain arrays whose dtype the framework would narrow stay NumPy arrays, and one DtypeWarning names them: 64-bit dtypes on
    JAX without jax_enable_x64, float64 on MLX.

    Raises CorruptFileError where the file, or a config in it, contradicts itself; UnknownNameError for a framework no plug-in
    declares and for a name or glob that matches no tensor; UnsupportedError if the framework and NumPy lack the dtype of a
    plain array.

        >>> w, bias = breccia.cast(np.ones((64, 32), np.float32), "mxfp8"), np.zeros(64, np.float32)
        >>> breccia.bridges.save_safetensors({"w": w, "bias": bias}, tmp / "layer.safetensors")
        >>> breccia.bridges.load_safetensors(tmp / "layer.safetensors", names=["w"])
        {'w': breccia.ScaledTensor('mxfp8', shape=(64, 32), numpy cpu, 8.25 bits per value)}
    """
    target = Target.of(framework, device)
    chosen = None if names is None else (names,) if isinstance(names, str) else tuple(names)
    path = path_of(path)
    containers = opened(path)
    listed = named_tensors(path, containers)
    histories = Histories(containers, listed.keys())
    if chosen is not None:
        check_patterns(chosen, [*listed, *histories.recipes])
    out: dict[str, ScaledTensor | Array] = {}
    left: dict[str, str] = {}
    for name, (container, config) in listed.items():
        if chosen is not None and not matches(name, chosen) and not matches(histories.owners.get(name, name), chosen):
            continue
        if config is not None:
            out[name] = _scaled(container, name, config, target)
        elif target.narrowed(container, name):
            out[name] = target.fetch(container, name)
            left[name] = out[name].dtype.name
        else:
            out[name] = target.plain(container, name)
    if left:
        warn_of_narrowed(path, framework, left)
    warn_of_codes(path, containers, listed, out)
    out = histories.put_into(out)
    return trees.nested(out) if nested else out


def warn_of_narrowed(path: str | os.PathLike[str], framework: str, dtypes: Mapping[str, str]) -> None:
    """Warn the caller of the caller that these arrays, by name, stay NumPy arrays of these dtypes."""
    hint = " JAX keeps 64-bit dtypes after jax.config.update('jax_enable_x64', True)." if framework == "jax" else ""
    narrowed = abbreviated([f"{name} ({dtype})" for name, dtype in dtypes.items()])
    warnings.warn(f"{path}: {framework} would narrow {narrowed}; they stay NumPy arrays.{hint}", DtypeWarning, stacklevel=3)


def opened(path: Path) -> list[Container]:
    """The containers of a file or a folder, as `joined` returns them. Raises UnsupportedError for a folder of torch.save's."""
    files = checkpoint_files(path) if path.is_dir() else [path]
    if path.is_dir() and files[0].suffix in (*PICKLED, GGUF):
        names = [file.name for file in files]
        raise UnsupportedError(
            f"folder {path} contains no .safetensors file, only {abbreviated(names)} of "
            f"{'torch.save' if files[0].suffix in PICKLED else 'llama.cpp'}, which load_safetensors does not read; "
            "breccia.bridges.load_checkpoint and convert do.",
            path=str(path),
            files=names,
        )
    return joined(path, [Container(file) for file in files])


def joined(path: Path, containers: list[Container]) -> list[Container]:
    """The opened files at `path`, or one container for all of them where their configs are about the checkpoint."""
    if len(containers) > 1 and any(one.metadata.get(SCOPE) == CHECKPOINT for one in containers):
        return [Shards(path, containers)]
    return containers


def named_tensors(
    path: Path, containers: Sequence[Container], undeclared: dict[str, Undeclared] | None = None
) -> dict[str, tuple[Container, Config | None]]:
    """The tensors of the opened files at `path`, each with its file and, if it is scaled, its config.

    Raises CorruptFileError where two files hold a tensor of the same name, and as `read_configs` does; undeclared: for that.
    """
    tensors: dict[str, tuple[Container, Config | None]] = {}
    for container in containers:
        unknown: dict[str, Undeclared] = {}
        configs = read_configs(container, None if undeclared is None else unknown)
        owned = owners((*configs, *unknown))
        for name in dict.fromkeys(owned.get(entry, entry) for entry in container.entries):
            if name in tensors:
                raise in_both(name, path, tensors[name][0].path, container.path)
            tensors[name] = container, configs.get(name)
        if undeclared is not None:
            undeclared |= unknown
    return tensors


def read_tensor(
    container: Container, name: str, config: Config, *, framework: str = "numpy", device: Any = None
) -> ScaledTensor:
    """One scaled tensor of an opened file, with its config from `read_configs`; other tensors are not read.

    framework, device, and what it raises: as in `load_safetensors`.
    """
    return _scaled(container, name, config, Target.of(framework, device))


def view_tensor(container: Container, name: str, config: Config) -> ScaledTensor:
    """As `read_tensor` on NumPy, with components that are `Container.view`s: nothing is read before `safetensors_file.read`."""
    return _scaled(container, name, config, replace(Target.of("numpy", None), way="view"))


def _scaled(container: Container, name: str, config: Config, target: Target) -> ScaledTensor:
    fmt = config.recipe.format
    codes = target.fetch(container, f"{name}.data")
    shape = config.shape
    if shape is None:
        shape = tuple(codes.shape)
        with located(container, name):
            codes = _packed(read(codes), fmt.element)
    data = target.stored(codes, fmt.element)
    scale = target.scale(container, f"{name}.scale", fmt.scale_codec)
    if fmt.offset_codec is not None:
        zero_point = target.scale(container, f"{name}.zero_point", fmt.offset_codec)
    else:
        zero_point = target.plain(container, f"{name}.zero_point")
    global_scale = target.plain(container, f"{name}.global_scale")
    with located(container, name):
        return ScaledTensor(data, scale, config.recipe, config.layout, zero_point, global_scale, config.axis, shape)


def _packed(codes: np.ndarray, codec: Codec) -> np.ndarray:
    """Pack 4-bit codes stored one per byte (breccia 0.1) two to a byte, the even index in the low nibble."""
    if packing(codec) != (2, 1):
        return codes
    if codes.size and codes.max() > 15:
        raise CorruptFileError(f"its {codec.name} codes, one per byte, are 0 to 15; found {codes.max()}.")
    even, odd = codes[..., 0::2], codes[..., 1::2]
    out = np.array(even)
    out[..., : odd.shape[-1]] |= odd << 4
    return out


@dataclass(frozen=True)
class Target:
    """Where loaded arrays go: a framework, its backend primitives, and the requested device.

    way: the method of `Container` that gives its arrays: "array" maps them, "read" reads them, "view" does neither yet.
    """

    framework: str
    ops: Ops
    device: Any
    way: str

    @classmethod
    def of(cls, framework: str, device: Any) -> Target:
        declared = registry().look_up("breccia_frameworks", framework, "framework")
        if framework == "numpy" and device not in (None, "cpu"):
            raise UnsupportedError(
                f"NumPy arrays live on 'cpu'; got device={device!r}. Name a framework that has that device: framework='torch'.",
                device=device,
            )
        # Frameworks that keep NumPy's memory map the file; the others copy it, and read it for that.
        mapped = framework in ("numpy", "torch") and device in (None, "cpu")
        return cls(framework, targets.load(declared.ops), device, "array" if mapped else "read")

    def fetch(self, container: Container, name: str) -> np.ndarray:
        """An entry of a file, as an array of NumPy."""
        return getattr(container, self.way)(name)

    def scaled(self, container: Container, name: str, config: Config) -> ScaledTensor:
        """A tensor that breccia quantized."""
        return _scaled(container, name, config, self)

    def component(self, array: np.ndarray, codec: Codec | None) -> Array:
        """A component of a scaled tensor, of a NumPy array with its bits. codec: None for integers."""
        return self._placed(array, array.dtype.name if codec is None else self.ops.storage(codec))

    def stored(self, array: np.ndarray, codec: Codec) -> Array:
        """Codes in the framework's storage dtype of `codec`."""
        return self._placed(array, self.ops.storage(codec))

    def scale(self, container: Container, name: str, codec: Codec) -> Array:
        if codec.bits <= 8 or container.entries[name].dtype == codec.name:
            return self.stored(self.fetch(container, name), codec)
        return self.plain(container, name)

    def plain(self, container: Container, name: str) -> Array:
        """The array `name` in its own dtype; None if absent."""
        if name not in container.entries:
            return None
        file_dtype = container.entries[name].dtype
        if DTYPES[file_dtype][0] < 8:
            raise self._unavailable(container, name, f"no framework has an unpacked {file_dtype} dtype")
        array = self.fetch(container, name)
        wanted = _DTYPE_NAMES.get(file_dtype, array.dtype.name)
        if self.framework == "numpy" and file_dtype in _DTYPE_NAMES:
            try:
                import ml_dtypes
            except ImportError:
                raise self._unavailable(container, name, f"NumPy itself has no {wanted}", f"{ML_DTYPES.remedy}, or ") from None
            return array.view(getattr(ml_dtypes, wanted))
        out = self._placed(array, wanted)
        if dtype_name(out) != wanted and not (file_dtype.startswith("F8_") and dtype_name(out) == "uint8"):
            raise self._unavailable(container, name, f"{self.framework} makes {dtype_name(out)} of {wanted} arrays")
        return out

    def narrowed(self, container: Container, name: str) -> bool:
        """Would the framework change the array's dtype, which NumPy has?"""
        file_dtype = container.entries[name].dtype
        bits, dtype = DTYPES[file_dtype]
        if self.framework == "numpy" or bits < 8 or file_dtype in _DTYPE_NAMES:
            return False
        return dtype_name(self.ops.from_numpy(np.empty(0, dtype))) != dtype

    def _unavailable(self, container: Container, name: str, why: str, first: str = "") -> UnsupportedError:
        other = "framework='torch'" if self.framework != "torch" else "framework='numpy'"
        return UnsupportedError(
            f"{shown(container.path)}: tensor {name!r} is {container.entries[name].dtype}, and {why}. Remedy: {first}load with "
            f"{other}, or take its bytes: breccia_bridges.safetensors_file.Container(path).array({name!r}).",
            name=name,
            dtype=container.entries[name].dtype,
        )

    def _placed(self, array: np.ndarray, dtype: str) -> Array:
        view = None if dtype == array.dtype.name else dtype
        if self.framework == "numpy":
            return self.ops.from_numpy(array, view)
        out = self.ops.from_numpy(np.require(array, requirements=["A", "W"]), view)
        if self.device is None:
            return out
        return self.ops.to(out, self.device)
