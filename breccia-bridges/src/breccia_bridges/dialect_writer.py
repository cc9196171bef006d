"""The dialect in which `convert` writes: how it stores each value, and what its configs say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from breccia import BrecciaError, Dialect, DialectError, Layout, OptionError, ScaledTensor, ScalingRecipe, UnsupportedError
from breccia.backend import SettingsOf, StoredForm, TensorGroup, ValueForm, as_recipe, registry, targets
from breccia.internal import printable

from .announcements import CONFIG, QUANTIZATION, QUANTIZATION_FILES, Announced
from .modules import is_table
from .safetensors_file import Container, Shape
from .source import Value
from .stored import ModuleSettings, Stored


@dataclass(frozen=True)
class Placed:
    """A value as a dialect stores it. parts: the names of its tensors, by their ends."""

    name: str
    group: TensorGroup
    stored: StoredForm
    parts: Mapping[str, str]
    is_transposed: bool
    form: ValueForm

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def entries(self) -> dict[str, tuple[str, Shape]]:
        """The dtype and shape of each tensor, by its name."""
        return {self.parts[end]: (entry.dtype, entry.shape) for end, entry in self.stored.entries.items()}


#: Gives the value which breccia reads of a file that was written.
Reader = Callable[[Placed, Container], Value]


@dataclass(frozen=True)
class DialectWriter:
    """A dialect to write.

    activations: how layers quantize their inputs, as `convert` takes it. dtype: of the model's other weights.
    """

    dialect: Dialect
    activations: str | None = None
    dtype: str = "BF16"

    @classmethod
    def of(cls, name: str, activations: str | None) -> DialectWriter:
        """Raises UnknownNameError for a dialect that no plug-in declares, UnsupportedError for one that is only read, and
        OptionError for activations that are no recipe, or that the dialect has no config for.
        """
        dialect = registry().look_up("breccia_dialects", name, "dialect")
        if dialect.write is None:
            written = sorted(one.name for one in registry().dialects.values() if one.write)
            raise UnsupportedError(
                f"{dialect.title} ({name!r}) is a dialect that breccia {'reads' if dialect.read else 'recognizes'}, and does "
                f"not write; it writes {', '.join(written)}.",
                dialect=name,
            )
        if activations is not None and dialect.config is None:
            raise OptionError(
                f"activations={activations!r} is for a config, and {dialect.title} has none; leave it out.",
                activations=activations,
            )
        if activations not in (None, "none"):
            try:
                as_recipe(activations)
            except BrecciaError as e:
                raise OptionError(f"activations={activations!r} is no recipe: {e}", activations=activations) from e
        return cls(dialect, activations)

    @property
    def recipes(self) -> list[ScalingRecipe]:
        """Examples of the recipes that it stores."""
        return [as_recipe(spec) for spec in self.dialect.recipes]

    @property
    def file(self) -> Any:
        """The plan's class of the one file that the dialect has in place of safetensors files; None if it has none."""
        return targets.load(self.dialect.file) if self.dialect.file else None

    def holds(self, value: Value) -> bool:
        """Is a value in this dialect already?"""
        return value.stored is not None and value.stored.dialect.name == self.dialect.name

    def check_name(self, name: str) -> None:
        """Raise UnsupportedError for an embedding, if the library reads none that is quantized."""
        if not self.dialect.embeddings and is_table(name):
            raise UnsupportedError(
                f"{printable(name)} is an embedding, and of {self.dialect.title} there are quantized linear layers only. Leave "
                "it as it is: exclude= (--exclude), with recipe= (--recipe).",
                name=name,
            )

    def place(self, name: str, recipe: ScalingRecipe, layout: Layout, axis: int, shape: Shape) -> Placed:
        """How a value is stored. shape: the model's; axis: the contraction axis in it.

        Raises UnsupportedError, naming the value, for a form that the dialect does not hold, and OptionError for activations
        that it has no scheme for. Raises what `check_name` raises.
        """
        self.check_name(name)
        is_transposed = axis == -2
        if is_transposed:
            layout, shape = layout.mT, (*shape[:-2], shape[-1], shape[-2])
        if recipe.format.rotation is not None:
            raise UnsupportedError(
                f"{printable(name)}: {self.dialect.title} does not store it: its loader would not undo the rotation of "
                f"{recipe.spec}. Give recipe {recipe.unrotated.spec} (--recipe), or leave dialect= (--dialect) out.",
                name=name,
                spec=recipe.spec,
            )
        form = ValueForm(recipe, shape, layout, is_transposed, self.activations, self.dtype)
        try:
            stored: StoredForm = targets.load(self.dialect.stored or "")(form)
        except OptionError:  # of `activations`, whatever the value
            raise
        except BrecciaError as e:
            raise UnsupportedError(
                f"{printable(name)}: {self.dialect.title} does not store it: {e}",
                **{**e.found, "name": name, "spec": recipe.spec},
            ) from e
        group, stem = self._group(name, stored)
        return Placed(name, group, stored, {end: stem + end for end in stored.entries}, is_transposed, form)

    def _group(self, name: str, stored: StoredForm) -> tuple[TensorGroup, str]:
        """The group of a value's parts, and what their names begin with."""
        ends: set[str] = set()
        for group in self.dialect.groups:
            known = {**group.parts, **group.optional}
            fits = group.parts.keys() <= stored.entries.keys() <= known.keys()
            if fits and all(not known[end] or entry.dtype in known[end] for end, entry in stored.entries.items()):
                stem = group.stem(name)
                if stem is not None:
                    return group, stem
                ends.add(group.value)
        if not ends:
            listed = {end: entry.dtype for end, entry in stored.entries.items()}
            raise DialectError(
                f"stored of the dialect {self.dialect.name!r}, of plug-in {self.dialect.plugin!r}, returned the parts "
                f"{listed}, which are those of none of its groups. Report it to the plug-in's author.",
                dialect=self.dialect.name,
            )
        raise UnsupportedError(
            f"{printable(name)}: {self.dialect.title} stores values whose names end in {' or '.join(map(repr, sorted(ends)))}. "
            "Leave this one as it is: exclude= (--exclude).",
            name=name,
        )

    def arrays(self, placed: Placed, st: ScaledTensor) -> dict[str, np.ndarray]:
        """The arrays of a value's tensors, by their names.

        Raises UnsupportedError or DialectError, naming the value, for contents that the dialect does not hold.
        """
        plain = (st.mT if placed.is_transposed else st).to_plain()
        try:
            arrays: Mapping[str, np.ndarray] = {
                **targets.load(self.dialect.write or "")(plain, placed.stored),
                **placed.stored.known,
            }
        except (UnsupportedError, DialectError) as e:
            raise type(e)(
                f"{printable(placed.name)}: {self.dialect.title} does not store it: {e}", **{**e.found, "name": placed.name}
            ) from e
        return {placed.parts[end]: array for end, array in arrays.items()}

    def of_rows(self, placed: Placed, rows: int) -> Placed | None:
        """How so many rows of a matrix are stored, alone; None where the dialect does not hold them."""
        form = placed.form
        shape = (rows, form.shape[1])
        try:
            layout = form.recipe.layout.fitted(shape)
            stored: StoredForm = targets.load(self.dialect.stored or "")(replace(form, shape=shape, layout=layout))
        except BrecciaError:
            return None
        return replace(placed, stored=stored)

    def configs(self, placed: Mapping[str, Placed], plain: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What the dialect's files say of these values, by the names of files."""
        if self.dialect.config is None or not placed:
            return {}
        modules = {one.module: one.stored for one in placed.values()}
        files: Mapping[str, Mapping[str, Any]] = targets.load(self.dialect.config)(modules, tuple(plain), self.activations)
        return {file: dict(settings) for file, settings in files.items()}

    def header(self, placed: Mapping[str, Placed]) -> dict[str, str]:
        """Metadata of every file of a checkpoint with these values."""
        if self.dialect.header is None:
            return {}
        return dict(targets.load(self.dialect.header)({name: one.stored for name, one in placed.items()}))

    def reader(self, configs: Mapping[str, Mapping[str, Any]]) -> Reader:
        """The function that reads what was written, under the configs that are beside it."""
        announced = _announced(configs)
        return partial(_read_back, self.dialect, announced, ModuleSettings(self.dialect, announced))


def _read_back(dialect: Dialect, announced: Announced | None, of: SettingsOf, placed: Placed, written: Container) -> Value:
    files = dict.fromkeys(placed.parts.values(), written)
    ends = [end for end in (*placed.group.parts, *placed.group.optional) if end in placed.parts]
    parts = {end: placed.parts[end] for end in ends}
    return Value(placed.name, files, stored=Stored(dialect, placed.group, placed.name, parts, files, announced, of))


def _announced(configs: Mapping[str, Mapping[str, Any]]) -> Announced | None:
    """The quantization that the files of a dialect announce."""
    config = configs.get(CONFIG, {}).get(QUANTIZATION)
    if config is not None:
        return Announced(f"{CONFIG}: {QUANTIZATION}", config.get("quant_method", ""), config)
    files = [(file, method) for file, method in QUANTIZATION_FILES.items() if file in configs]
    return next((Announced(file, method, configs[file]) for file, method in files), None)
