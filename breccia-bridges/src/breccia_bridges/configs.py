"""The configs of scaled tensors in a file's metadata: what a tensor's bytes mean. docs/spec/files.md specifies them."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any

from breccia import (
    BrecciaError,
    CorruptFileError,
    Layout,
    PerGroupIndex,
    ScalingRecipe,
    UnknownNameError,
    UnsupportedError,
    __version__,
)
from breccia.backend import BF16, F16, F32, PARTS, registry
from breccia.internal import parsed_json, placed, printable, suggestion, unique_keys

from .safetensors_file import DTYPES, Container, Shape, byte_count, shown

#: The schema that this version writes and reads, as in the metadata.
SCHEMA = "1"
#: The key of the metadata for what its configs are about.
SCOPE = "breccia_scope"
#: Keys of the metadata that breccia writes.
RESERVED = ("schema", "breccia_version", SCOPE)
#: The metadata's scope where its configs are about all files of a checkpoint, not about one file.
CHECKPOINT = "checkpoint"

#: File dtypes that NumPy lacks, by their name in torch, JAX and ml_dtypes.
NON_NUMPY = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "bfloat16": "BF16",
}
#: File dtypes by the name of an array's dtype, for every framework.
FILE_DTYPES = {
    **{numpy: file for file, (bits, numpy) in DTYPES.items() if bits >= 8 and file not in NON_NUMPY.values()},
    **NON_NUMPY,
}
#: Dtypes of float scales and biases, and of zero-points, in a file.
FLOATS = tuple(codec.name for codec in (F32, F16, BF16))
_ZERO_POINTS = ("U8", "I8", "I16", "I32", *FLOATS)
#: Configs of more characters than this in all refer to each other: the headers of files have a limit.
_REPEATED = 1 << 24
#: The entry of a layout by index, and all entries that a scaled tensor may have, after its name.
INDEX = "group_index"
FILE_PARTS = (*PARTS, INDEX)


@dataclass(frozen=True)
class Config:
    """The contents of `{name}.config` for a scaled tensor.

    shape: the logical shape; None in files of breccia 0.1, where it is the shape of the data.
    scale_dtype: name of the codec that scales are stored in. It differs from the recipe's if a float scale kept its original
        dtype; empty in files of breccia 0.1, where the entry's dtype is used.
    """

    recipe: ScalingRecipe
    layout: Layout
    axis: int
    shape: Shape | None
    scale_dtype: str

    @property
    def index(self) -> tuple[int, ...] | None:
        """The index of a layout by index, which a file has as an array of its own: `{name}.group_index`, I32."""
        return self.layout.index if isinstance(self.layout, PerGroupIndex) else None

    def to_json(self, beside: bool = False) -> str:
        """The text stored under `{name}.config`. beside: the index of a layout by index is in an array beside it."""
        layout = self.layout.to_dict()
        if beside and self.index is not None:
            layout = {**layout, "fields": {name: of for name, of in layout["fields"].items() if name != "index"}}
        listed = {
            "recipe": self.recipe.to_dict(),
            "layout": layout,
            "axis": self.axis,
            "shape": self.shape,
            "dtypes": {"data": self.recipe.format.element.name, "scale": self.scale_dtype},
        }
        return json.dumps(listed, sort_keys=True, separators=(",", ":"))

    def like(self, name: str) -> str:
        """The text for a config that has the recipe, the layout and the dtypes of the tensor `name`."""
        return json.dumps({"as": name, "axis": self.axis, "shape": self.shape}, separators=(",", ":"))


# ------------------------------------------------------------------------------------------------ writing


def metadata_of(configs: Mapping[str, Config], extra: Mapping[str, str], beside: bool = True) -> dict[str, str]:
    """The metadata of a file: the configs of its scaled tensors by name, and `extra`. Raises UnsupportedError for its keys.

    beside: whether the file has indices of groups as arrays; otherwise they are in the configs.
    """
    for key in extra:
        if key in RESERVED or (isinstance(key, str) and key.endswith(".config")):
            raise UnsupportedError(
                f"extra_metadata key {key!r} is reserved: {', '.join(RESERVED)} and all keys that end in '.config'. Rename it.",
                key=key,
            )
    reserved = {"schema": SCHEMA, "breccia_version": __version__}
    return {**reserved, **{f"{name}.config": text for name, text in _texts(configs, beside).items()}, **extra}


def _texts(configs: Mapping[str, Config], beside: bool) -> dict[str, str]:
    """The text of each config. In a file of very many, those after the first of their kind refer to it."""
    kinds = {name: (one.recipe, one.layout, one.scale_dtype) for name, one in configs.items()}
    first: dict[Any, str] = {}
    for name, kind in kinds.items():
        first.setdefault(kind, name)
    full = {kind: configs[name].to_json(beside) for kind, name in first.items()}
    if sum(len(full[kind]) for kind in kinds.values()) <= _REPEATED:
        return {name: one.to_json(beside) for name, one in configs.items()}
    return {name: full[kind] if first[kind] == name else configs[name].like(first[kind]) for name, kind in kinds.items()}


# ------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class Undeclared:
    """The unparsed config of a scaled tensor whose recipe or layout no installed plug-in declares."""

    listed: dict[str, Any]
    reason: str

    @property
    def recipe(self) -> str:
        """The recipe's name, or "?" if the config has none."""
        recipe = self.listed["recipe"]
        return str(recipe.get("name", "?")) if isinstance(recipe, dict) else "?"

    @property
    def shape(self) -> Shape | None:
        """The logical shape, if the config has one."""
        try:
            return _shape_of(self.listed)
        except CorruptFileError:
            return None


def read_configs(container: Container, undeclared: dict[str, Undeclared] | None = None) -> dict[str, Config]:
    """The configs of a file's scaled tensors, by name.

    undeclared: a dict that receives the tensors whose recipe or layout no installed plug-in declares, by name.

    Raises CorruptFileError naming the file and the tensor, and without `undeclared` also the undeclared recipe or layout.
    """
    metadata, entries = container.metadata, container.entries
    names = [key.removesuffix(".config") for key in metadata if key.endswith(".config")]
    schema = metadata.get("schema")
    if schema is None:  # breccia 0.1, or another program, which may use such keys for anything
        names = [name for name in names if f"{name}.data" in entries or f"{name}.scale" in entries]
    elif schema != SCHEMA and (names or "breccia_version" in metadata):
        raise CorruptFileError(
            f"{shown(container.path)}: the file has schema {short(schema)}; breccia {__version__} reads {SCHEMA!r} and the "
            f"files of breccia 0.1. It was written by breccia {short(metadata.get('breccia_version'))}: upgrade "
            "breccia-bridges.",
            path=str(container.path),
            schema=schema,
        )
    configs: dict[str, Config] = {}
    if metadata.get(SCOPE) == CHECKPOINT:
        names = [name for name in names if any(f"{name}.{part}" in entries for part in PARTS)]
    owned = owners(names)
    read = _Reader(container, schema)
    for name in names:
        with located(container, name):
            if name in entries and name not in owned:
                raise CorruptFileError("the file has both a scaled and a plain tensor of this name.")
            try:
                configs[name] = read.config(name)
            except CorruptFileError as e:
                if undeclared is None or "undeclared" not in e.found:
                    raise
                undeclared[name] = Undeclared(read.listed(name), str(e))
                continue
            _check_entries(container, name, configs[name])
    return configs


class _Reader:
    """Reads the configs of a file's metadata; a text that several have, and what several refer to, is read once."""

    def __init__(self, container: Container, schema: str | None) -> None:
        self._container, self._metadata, self._schema = container, container.metadata, schema
        self._full: dict[str, Config] = {}
        self._by_text: dict[str, Config] = {}

    def config(self, name: str) -> Config:
        text = self._metadata[f"{name}.config"]
        if f"{name}.{INDEX}" in self._container.entries:  # the rest of its layout is in that array
            return self._of_text(name, text)
        if text not in self._by_text:
            self._by_text[text] = self._of_text(name, text)
        return self._by_text[text]

    def _of_text(self, name: str, text: str) -> Config:
        listed = _listed(text, self._schema)
        other = listed.get("as")
        if other is None:
            return _config(self._with_index(name, listed), self._schema)
        if other not in self._full:
            self._full[other] = _config(self._with_index(other, self._referred(other)), self._schema)
        base = self._full[other]
        return replace(base, axis=_axis_of(listed), shape=_fitting(_shape_of(listed), base.layout, _axis_of(listed)))

    def listed(self, name: str) -> dict[str, Any]:
        """The object of a config, with what it refers to."""
        listed = _listed(self._metadata[f"{name}.config"], self._schema)
        return {**self._referred(listed["as"]), **listed} if "as" in listed else listed

    def _with_index(self, name: str, listed: dict[str, Any]) -> dict[str, Any]:
        """The object of a config, with the index of its layout where that is in an array beside it."""
        layout, entry = listed["layout"], self._container.entries.get(f"{name}.{INDEX}")
        if not isinstance(layout, dict) or layout.get("name") != PerGroupIndex.name or entry is None:
            return listed
        if entry.dtype != "I32" or len(entry.shape) != 1:
            raise CorruptFileError(
                f"{printable(name)}.{INDEX} is I32 of one axis; the file has {entry.dtype} {list(entry.shape)}."
            )
        fields = layout.get("fields")
        index = self._container.read(f"{name}.{INDEX}").tolist()
        return {**listed, "layout": {**layout, "fields": {**(fields if isinstance(fields, dict) else {}), "index": index}}}

    def _referred(self, other: str) -> dict[str, Any]:
        """The object of the config that another one refers to."""
        text = self._metadata.get(f"{other}.config")
        listed = {} if text is None else _listed(text, self._schema)
        if text is None or "as" in listed:
            why = "the file has no config of this name" if text is None else "whose own config refers to another"
            raise CorruptFileError(f"its config refers to that of {short(other)}; {why}.")
        return listed


def read_config(text: str, *, schema: str | None = SCHEMA) -> Config:
    """Parse the text of a `{name}.config` that refers to no other; `schema` is None for breccia 0.1.

    Raises CorruptFileError.
    """
    listed = _listed(text, schema)
    if "as" in listed:
        raise CorruptFileError(f"its config refers to that of {short(listed['as'])}; read the configs of the whole file.")
    return _config(listed, schema)


def owners(names: Iterable[str]) -> dict[str, str]:
    """Scaled tensor by the name of each entry that it has or could have."""
    return {f"{name}.{part}": name for name in names for part in FILE_PARTS}


@contextmanager
def located(container: Container, name: str) -> Generator[None]:
    """Turn any BrecciaError into a CorruptFileError that names the file and the tensor."""
    try:
        yield
    except BrecciaError as e:
        values = {**e.found, "path": str(container.path), "name": name}
        raise CorruptFileError(f"{shown(container.path)}: tensor {name!r}: {e}", **values) from e


def _listed(text: str, schema: str | None) -> dict[str, Any]:
    """The object in the text of a config, with the keys it needs."""
    try:
        listed = parsed_json(text, unique_keys)
    except ValueError as e:
        raise CorruptFileError(f"its config is not JSON ({e}).") from e
    keys = ["recipe", "layout"] if schema is None else ["recipe", "layout", "axis", "shape", "dtypes"]
    refers = schema is not None and isinstance(listed, dict) and isinstance(listed.get("as"), str)
    if refers:
        keys = ["as", "axis", "shape"]
    if not isinstance(listed, dict) or not set(keys) <= listed.keys() or ("as" in listed and not refers):
        raise CorruptFileError(f"its config is an object with {', '.join(keys)}; found {short(listed)}.")
    return listed


def _config(listed: dict[str, Any], schema: str | None) -> Config:
    layout = _declared("breccia_layouts", "layout", listed["layout"])
    if schema is None:
        # breccia 0.1 had no second level, which is the default now.
        recipe = _declared("breccia_recipes", "recipe", listed["recipe"], nvfp4={"two_level": False})
        return Config(recipe, layout, -1, None, "")
    recipe = _declared("breccia_recipes", "recipe", listed["recipe"])
    axis, dtypes = _axis_of(listed), listed["dtypes"]
    shape = _fitting(_shape_of(listed), layout, axis)
    fmt = recipe.format
    codec = fmt.scale_codec
    allowed = [codec.name] if codec.bits <= 8 else list(FLOATS)
    if not isinstance(dtypes, dict) or dtypes.get("data") != fmt.element.name or dtypes.get("scale") not in allowed:
        raise CorruptFileError(
            f"recipe {recipe.name!r} has dtypes data {fmt.element.name}, scale {' or '.join(allowed)}; its config says "
            f"{short(dtypes)}."
        )
    return Config(recipe, placed(layout, fmt.block, axis), axis, shape, dtypes["scale"])


def _axis_of(listed: dict[str, Any]) -> int:
    axis = listed["axis"]
    if type(axis) is not int or axis not in (-1, -2):
        raise CorruptFileError(f"its axis is -1 or -2; found {short(axis)}.")
    return axis


def _shape_of(listed: dict[str, Any]) -> Shape:
    shape = listed.get("shape")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise CorruptFileError(f"its shape is a list of integers >= 0; found {short(shape)}.")
    try:
        byte_count("U8", tuple(shape))
    except BrecciaError as e:
        raise CorruptFileError(f"its shape is impossible: {e}") from e
    return tuple(shape)


def _fitting(shape: Shape, layout: Layout, axis: int) -> Shape:
    """`shape`, which has the axes that the layout and the contraction axis need."""
    needed = max(layout.least_ndim, -axis)
    if len(shape) < needed:
        raise CorruptFileError(
            f"its shape is {list(shape)}; blocks along axis {axis} under layout {layout.name!r} need at least {needed} axes."
        )
    return shape


def _declared(hook: str, what: str, value: Any, **defaults: dict[str, Any]) -> Any:
    """The recipe or layout of a config's `{"name": ..., "fields": ...}`; `defaults` are fields by its name."""
    match value:
        case {"name": str(name), "fields": dict(fields)}:
            pass
        case _:
            raise CorruptFileError(f"its {what} is an object with a name and fields; found {short(value)}.")
    try:
        kind = registry().look_up(hook, name, what)
    except UnknownNameError:
        known = list(registry().declared[hook])
        raise CorruptFileError(
            f"its {what} {name!r} is declared by no installed plug-in{suggestion(name, known)} Install the plug-in that "
            "declares it; `breccia plugins` lists the installed and the disabled ones.",
            undeclared=name,
        ) from None
    try:
        return kind.with_fields({**defaults.get(kind.name, {}), **fields})
    except Exception as e:  # any kind: a recipe's own checks may not expect such values
        raise CorruptFileError(f"its {what} cannot be read: {e}") from e


def _check_entries(container: Container, name: str, config: Config) -> None:
    """Refuse missing components and dtypes that do not fit the recipe; ScaledTensor checks shapes, and refuses others."""
    entries, fmt = container.entries, config.recipe.format
    for part in PARTS:
        entry = entries.get(f"{name}.{part}")
        if entry is None and part in fmt.parts:
            raise CorruptFileError(f"it has a config, but the file has no {printable(name)}.{part}; the file is incomplete.")
        if entry is None:
            continue
        holds, allowed = _stored_as(part, config)
        if entry.dtype not in allowed:
            raise CorruptFileError(
                f"{printable(name)}.{part} holds {holds}, stored as {' or '.join(allowed)}; the file has {entry.dtype} there."
            )


def _stored_as(part: str, config: Config) -> tuple[str, tuple[str, ...]]:
    """What a component holds, and the dtypes in which a file may hold it."""
    fmt = config.recipe.format
    if part == "global_scale":
        return "F32", ("F32",)
    if part == "zero_point":
        if fmt.offset_codec is None:
            return "integers", _ZERO_POINTS
        return ("records of biases", ("U8",)) if fmt.offset_record is not None else ("floats", FLOATS)
    codec = fmt.element if part == "data" else fmt.scale_codec
    if codec.bits > 8:
        return codec.name, (config.scale_dtype,) if config.scale_dtype else FLOATS
    return codec.name, ("U8", NON_NUMPY[codec.dtype]) if codec.dtype in NON_NUMPY else ("U8",)
