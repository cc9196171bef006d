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
#: The fields of a `Dialect` that refer to functions.
FUNCTIONS = ("form", "read", "rows", "stored", "write", "config", "header", "file", "settings")
#: The settings of a config for the values of a module; None for a module that the config leaves as it is.
SettingsOf = Callable[[str], Mapping[str, Any] | None]


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

    def stem(self, name: str) -> str | None:
        """What the names of the parts of a value begin with: the inverse of `named`; None if no value has such a name."""
        module, dot, own = name.rpartition(".")
        if not own.endswith(self.value) or (self.prefix and own == self.value):
            return None
        return module + dot + self.prefix + own.removesuffix(self.value)

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
    activations: how its layer is asked to quantize inputs, where it is written: a recipe's spec, "none", or None for what the
        library does by default. Some dialects store codes in another way then.
    dtype: of the model's other weights, in which its layers compute, as a file names it; where it is written.
    """

    recipe: ScalingRecipe
    shape: Shape
    layout: Layout | None = None
    is_transposed: bool = False
    activations: str | None = None
    dtype: str = "BF16"

    @property
    def fitted_layout(self) -> Layout:
        """`layout`, or by default the recipe's own for the shape."""
        return self.recipe.layout.fitted(self.shape) if self.layout is None else self.layout


@dataclass(frozen=True)
class StoredForm:
    """How a dialect stores a value, before it is written: the inverse of `ValueForm`.

    entries: the dtype and shape of each part in a file, by the end of its name.
    settings: what the config says of the value's module, in the terms of the dialect's own `config`.
    known: arrays of parts that the form alone determines, such as a shape; `write` does not make them.
    """

    entries: Mapping[str, Entry]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    known: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)


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
    stored: object reference of f(form: ValueForm) -> StoredForm, the inverse of `form`, from the form alone. It raises
        UnsupportedError for a form that the dialect does not hold.
    write: object reference of f(st: ScaledTensor, stored: StoredForm) -> {end: NumPy array}, the inverse of `read`: the arrays
        of `stored.entries`, with every code and scale as it is. Types that NumPy lacks are unsigned integers with their bits.
    config: object reference of f(stored: {name of a module: StoredForm}, plain: names of modules whose matrix is not quantized,
        activations: str | None) -> {name of a file: {key: setting}}: what the library's own loader expects in config.json,
        whose other keys stay, and in files of its own. A module is the name of a value without ".weight".
        activations: how layers quantize their inputs: a recipe's spec, "none", or None for what the library does by default.
    header: object reference of f({name of a value: StoredForm}) -> {key: text}: metadata of every file of a checkpoint with
        these values.
    file: object reference of the class that plans and writes its one file, where that is no safetensors file: a subclass of
        breccia_bridges.convert_file.FilePlan, which names the suffix.
    recipes: specs of recipes that it stores, as examples of all of them; the first is what `convert` takes by default.
    settings: object reference of f(config) -> a `SettingsOf`, which gets the name of a module; by default the config itself.
        It is called once for a config, so that long lists are read once.
    by_rows: whether what `write` makes of some rows of a matrix is a part of what it makes of all: its rows, or its columns.
        Then a matrix is written slab by slab, in little memory.
    rows: object reference of f(value: StoredValue, form: ValueForm) -> f(rows: slice) -> ScaledTensor, which reads some rows of
        a value alone, counted through all its matrices, as a matrix; or None for a value whose rows cannot be. For a dialect
        whose codes `read` arranges anew: then a large value is read slab by slab, in little memory. Not asked for values that
        are transposed; blocks have one row.
    embeddings: whether the library also reads embeddings that are quantized; most have quantized linear layers only.
    remedy: for a dialect without `read`, which is recognized only: what the user can do.
    activations: ends of tensors that say how a layer quantizes its inputs, outputs or cache, such as "input_scale". They are no
        part of a value, and mean nothing where values have left the dialect.
    factors: ends of tensors by which a layer multiplies its inputs: its weight is the model's only together with them.
    metadata: keys of a file's metadata that describe its tensors, beside keys that are names of values. They announce a dialect
        without `configs`.

    Raises PluginError, in `check`, for an invalid declaration.
    """

    name: str
    title: str
    configs: tuple[Mapping[str, tuple[Any, ...]], ...] = ()
    groups: tuple[TensorGroup, ...] = ()
    form: str | None = None
    read: str | None = None
    stored: str | None = None
    write: str | None = None
    config: str | None = None
    header: str | None = None
    file: str | None = None
    recipes: tuple[str, ...] = ()
    settings: str | None = None
    by_rows: bool = False
    rows: str | None = None
    embeddings: bool = False
    remedy: str = ""
    activations: tuple[str, ...] = ()
    factors: tuple[str, ...] = ()
    metadata: tuple[str, ...] = ()
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
        examples = {"activations": "input_scale", "factors": "pre_quant_scale", "metadata": "tensor_names", "recipes": "mxfp8"}
        for name, example in examples.items():
            listed: tuple[str, ...] = getattr(self, name)
            if not isinstance(listed, tuple) or not all(isinstance(one, str) and one for one in listed):
                raise PluginError(f"{what}: {name} is a tuple of str, like ({example!r},); got {listed!r}.")
        if not isinstance(self.embeddings, bool):
            raise PluginError(f"{what}: embeddings is True or False; got {self.embeddings!r}.")
        if not isinstance(self.groups, tuple) or not all(isinstance(group, TensorGroup) for group in self.groups):
            raise PluginError(f"{what}: groups is a tuple of breccia.backend.TensorGroup; got {self.groups!r}.")
        for group in self.groups:
            group.check(what)
        for name in FUNCTIONS:
            if (target := getattr(self, name)) is not None:
                targets.check(target, f"{what}: {name}")
        if (self.form is None) != (self.read is None) or (self.read is not None and not self.groups):
            raise PluginError(f"{what}: form and read are given together, with the groups that they read.")
        if self.rows is not None and self.read is None:
            raise PluginError(f"{what}: rows is for a dialect with read.")
        if (self.stored is None) != (self.write is None) or (self.write is not None and not (self.read and self.recipes)):
            raise PluginError(f"{what}: stored and write are given together, with read and the recipes that they store.")
        if self.file is not None and self.write is None:
            raise PluginError(f"{what}: file is for a dialect with write.")
        if self.read is None and not self.remedy:
            raise PluginError(f"{what}: a dialect without read has a remedy: what users can do with such a checkpoint.")
