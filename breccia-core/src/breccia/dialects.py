"""How other libraries store quantized values in checkpoints, as declarations.

A checkpoint is a set of named tensors and, beside them, configs. A `Dialect` says which tensors make one value, and has
functions that rearrange them into the components of a ScaledTensor. Everything that reads checkpoints works for all dialects
that plug-ins declare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from . import targets
from .errors import DialectError, PluginError
from .layouts import Layout, Shape
from .recipes import ScalingRecipe

#: Dtypes of a file by the suffix of a tensor's name; () allows any.
Parts = Mapping[str, tuple[str, ...]]


class Entry(NamedTuple):
    """A tensor of a file, by its header: the dtype as safetensors names it ("F8_E4M3"), and the shape."""

    dtype: str
    shape: Shape


@dataclass(frozen=True)
class TensorGroup:
    """The tensors of a checkpoint that make one value: names with the same beginning.

    parts: the ends of their names, with the dtypes that each may have in a file. The first one is looked for.
    optional: the same, of tensors that may be absent.
    value: the end of the value's name in the model; `{"qweight": ..., "scales": ...}` are the parts of "weight".
    needs_config: whether the tensors do not show the dialect, because others have the same ones: then the group counts only
        where a config announces the dialect, or a caller names it.
    prefix: what the names of parts within their module start with, and the value's does not: "_" if `up._weight_qdata` is a
        part of `up.weight`.
    """

    parts: Parts
    optional: Parts = field(default_factory=dict[str, tuple[str, ...]])
    value: str = "weight"
    needs_config: bool = False
    prefix: str = ""

    def named(self, stem: str) -> str | None:
        """The name of the value of parts that begin with `stem`; None if no part of such a name begins so."""
        module, dot, name = stem.rpartition(".")
        if not name.startswith(self.prefix) or (self.prefix and name == self.prefix):
            return None
        return module + dot + name.removeprefix(self.prefix) + self.value

    def check(self, what: str) -> None:
        """Raise PluginError, naming `what`, if the declaration is invalid."""
        for name, parts in (("parts", self.parts), ("optional", self.optional)):
            valid = isinstance(parts, Mapping) and all(
                isinstance(end, str) and isinstance(dtypes, tuple) and all(isinstance(dtype, str) for dtype in dtypes)
                for end, dtypes in parts.items()
            )
            if not valid:
                raise PluginError(f"{what}: {name} maps ends of names to tuples of dtypes, like {{'qweight': ('I32',)}}.")
        if not self.parts or self.parts.keys() & self.optional.keys():
            raise PluginError(f"{what}: a group has at least one part, and no part twice.")
        if not isinstance(self.value, str):
            raise PluginError(f"{what}: value is the end of a name, like 'weight'; got {self.value!r}.")
        if not isinstance(self.needs_config, bool):
            raise PluginError(f"{what}: needs_config is True or False; got {self.needs_config!r}.")
        if not isinstance(self.prefix, str):
            raise PluginError(f"{what}: prefix is the start of a name, like '_'; got {self.prefix!r}.")


@dataclass(frozen=True)
class ValueForm:
    """What a stored value is, as its headers and config say.

    recipe: of the ScaledTensor that `Dialect.read` returns. shape: the logical shape of that tensor.
    layout: if it is not the recipe's own for that shape, such as a PerGroupIndex.
    is_transposed: whether the model's value is the transpose of that tensor, in its last two axes.
    """

    recipe: ScalingRecipe
    shape: Shape
    layout: Layout | None = None
    is_transposed: bool = False

    @property
    def fitted_layout(self) -> Layout:
        """`layout`, or by default the recipe's own for the shape."""
        return self.recipe.layout.fitted(self.shape) if self.layout is None else self.layout


class StoredValue(Mapping[str, Any]):
    """The tensors of a checkpoint that make one value, by the ends of their names: `value["scales"]`.

    Items are NumPy arrays, read into memory on access; bfloat16 and 8-bit floats, which NumPy lacks, are unsigned integers with
    their bits.

    name: the value's name in the model. entries: dtypes and shapes. settings: those of the config for this value.
    metadata: of the file that holds its first part. view: the array of a part, mapped: nothing of it is read yet. Codes that
        are a component as they are stay a view, so that a large tensor is read in pieces.
    """

    def __init__(
        self,
        name: str,
        entries: Mapping[str, Entry],
        settings: Mapping[str, Any],
        read: Callable[[str], Any],
        view: Callable[[str], Any] | None = None,
        metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name, self.entries, self.settings, self.metadata = name, entries, settings, metadata
        self._read, self.view = read, read if view is None else view

    def __getitem__(self, end: str) -> Any:
        if end not in self.entries:
            raise KeyError(end)
        return self._read(end)

    def __contains__(self, end: object) -> bool:
        return end in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        listed = ", ".join(f"{end}: {entry.dtype} {list(entry.shape)}" for end, entry in self.entries.items())
        return f"StoredValue({self.name!r}, {listed})"

    def need(self, holds: bool, wanted: str, **values: Any) -> None:
        """Raise DialectError unless `holds`. wanted: what the dialect has there, and what was found."""
        if not holds:
            raise DialectError(wanted, name=self.name, **values)

    def need_shape(self, end: str, *shapes: Shape) -> None:
        """Raise DialectError unless the part has one of these shapes."""
        shape = self.entries[end].shape
        wanted = " or ".join(str(list(one)) for one in shapes)
        self.need(shape in shapes, f"{end!r} has shape {list(shape)}; its other parts need {wanted}.", shape=shape)


@dataclass(frozen=True)
class Dialect:
    """How a library stores quantized values in checkpoints.

    name: unique, as `source_dialect=` takes it ("gptq"). title: what messages call it ("GPTQ").
    configs: alternatives by which a config announces it: values of its keys, None for a key that may be absent;
        `({"quant_method": ("gptq",)},)`.
    groups: which tensors make a value. Tensors alone show a dialect where no config announces one.
    form: object reference of f(value: StoredValue) -> ValueForm, from headers and settings. It raises DialectError for what the
        library does not write, and UnsupportedError for what no recipe holds.
    read: object reference of f(value: StoredValue, form: ValueForm) -> ScaledTensor on NumPy, with every code and scale as
        stored.
    write: object reference of f(st: ScaledTensor, settings) -> {end: (dtype of a file, array)}, the inverse of `read`.
    settings: object reference of f(config, module) -> the settings of the values of a module, or None for a module that the
        config leaves; by default the config itself.
    remedy: for a dialect without `read`, which is recognized only: what the user can do.

    Raises PluginError, in `check`, for an invalid declaration.
    """

    name: str
    title: str
    configs: tuple[Mapping[str, tuple[Any, ...]], ...] = ()
    groups: tuple[TensorGroup, ...] = ()
    form: str | None = None
    read: str | None = None
    write: str | None = None
    settings: str | None = None
    remedy: str = ""
    plugin: str = field(default="", compare=False)

    @property
    def methods(self) -> tuple[str, ...]:
        """The values of `quant_method` of its configs."""
        return tuple(dict.fromkeys(value for config in self.configs for value in config.get("quant_method", ())))

    def announced_by(self, method: str, config: Mapping[str, Any]) -> bool:
        """Does a config of this `quant_method` announce the dialect?"""
        has = {**config, "quant_method": method}
        return any(all(has.get(key) in values for key, values in wanted.items()) for wanted in self.configs)

    def check(self) -> None:
        """Raise PluginError if the declaration is invalid."""
        what = f"dialect {self.name!r}"
        for name in ("name", "title", "remedy"):
            if not isinstance(getattr(self, name), str):
                raise PluginError(f"{what}: {name} must be str; got {getattr(self, name)!r}.")
        if not self.title:
            raise PluginError(f"{what}: title is what messages call it, like 'GPTQ'.")
        configs = isinstance(self.configs, tuple) and all(
            isinstance(one, Mapping) and all(isinstance(values, tuple) for values in one.values()) for one in self.configs
        )
        if not configs:
            raise PluginError(
                f"{what}: configs is a tuple of mappings from keys to allowed values, like "
                f"({{'quant_method': ('gptq',)}},); got {self.configs!r}."
            )
        if not isinstance(self.groups, tuple) or not all(isinstance(group, TensorGroup) for group in self.groups):
            raise PluginError(f"{what}: groups is a tuple of breccia.backend.TensorGroup; got {self.groups!r}.")
        for group in self.groups:
            group.check(what)
        for name in ("form", "read", "write", "settings"):
            if (target := getattr(self, name)) is not None:
                targets.check(target, f"{what}: {name}")
        if (self.form is None) != (self.read is None) or (self.read is not None and not self.groups):
            raise PluginError(f"{what}: form and read are given together, with the groups that they read.")
        if self.read is None and not self.remedy:
            raise PluginError(f"{what}: a dialect without read has a remedy: what users can do with such a checkpoint.")
