"""Base of recipes and layouts: frozen dataclasses with a stable name and a JSON form."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from inspect import signature
from reprlib import repr as short
from types import MappingProxyType
from typing import Any, ClassVar, Self, cast
from weakref import WeakValueDictionary

from . import targets
from .errors import BrecciaError, RecipeError, UnsupportedError, did_you_mean, suggestion
from .json_text import parsed_json
from .locks import cached_property, reentrant


class InternedKey:
    """One object per set of equal declarations in a process; it hashes and compares in C."""

    __slots__ = ("__weakref__",)


#: Keyed by (class, *field values), not by the declaration: it references its key and would keep itself alive.
_interned: WeakValueDictionary[Any, InternedKey] = WeakValueDictionary()
_interning = reentrant()


def rebuilt(cls: type[Declared], fields: dict[str, Any]) -> Declared:
    """Rebuild a declaration from a pickle. Raises the errors of its constructor, and RecipeError for what is no declaration."""
    try:
        return cls.with_fields(fields)
    except BrecciaError:
        raise
    except Exception as e:
        raise RecipeError(f"the pickle of a {getattr(cls, '__name__', cls)!r} is damaged ({type(e).__name__}: {e}).") from e


class Declared:
    """Base of declarations that are stored in files as `{"name": ..., "fields": {...}}`."""

    name: ClassVar[str] = ""
    kind: ClassVar[str] = "declaration"

    def __new__(cls, *_: Any, **fields: Any) -> Self:
        """Raises UnsupportedError (a TypeError) naming an unknown field, before a constructor that was made for the fields."""
        for key in fields:
            if key not in getattr(cls, "__dataclass_fields__", fields):
                cls._refuse(key)
        return object.__new__(cls)

    @cached_property
    def interned_key(self) -> InternedKey:
        """The interned key of all equal declarations, much faster to hash than their fields. It lives as long as they do."""
        key = (type(self), *(getattr(self, f.name) for f in dataclasses.fields(self)))  # type: ignore[arg-type]
        with _interning:
            interned = _interned.get(key)
            if interned is None:
                interned = _interned[key] = InternedKey()
            return interned

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the fields only; they are checked on reading, and derived values are not stored."""
        return rebuilt, (type(self), {f.name: getattr(self, f.name) for f in dataclasses.fields(self)})  # type: ignore[arg-type]

    @property
    def changed(self) -> dict[str, Any]:
        """The fields that are not at their default, by name."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {f.name: value for f in fields if (value := getattr(self, f.name)) != f.default}

    @property
    def spec(self) -> str:
        """A one-line form for the command line and `breccia.recipe`: "fp8_block,block_m=128,power_of_two_scale=true".

        >>> breccia.Float8BlockScaling(block_m=128).spec
        'fp8_block,block_m=128'
        """
        return ",".join([self.name, *(f"{name}={spelled(value)}" for name, value in self.changed.items())])

    def to_dict(self) -> dict[str, Any]:
        """`{"name": ..., "fields": {...}}`, ready for `json.dumps`.

        It has every field except those added later that are at their default, so that the JSON of a declaration and its
        hash do not change between releases.
        """
        every = [(f, getattr(self, f.name)) for f in dataclasses.fields(self)]  # type: ignore[arg-type]
        fields = {f.name: value for f, value in every if not (f.metadata.get("added") and value == f.default)}
        return {"name": self.name, "fields": fields}

    def to_json(self) -> str:
        """Canonical JSON of `to_dict`: sorted keys, no spaces.

        >>> breccia.MXFP8BlockScaling().to_json()
        '{"fields":{"block_size":32,"fp8_format":"E4M3","scale_rule":"rceil"},"name":"mxfp8"}'
        """
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The declaration that `to_json` wrote. On a base class: of any class with that name, from any plug-in.

        Raises RecipeError for other text, UnknownNameError for a name no plug-in declares.

            >>> breccia.ScalingRecipe.from_json('{"name": "mxfp8", "fields": {}}')
            MXFP8BlockScaling(fp8_format='E4M3', block_size=32, scale_rule='rceil')
        """
        try:
            listed = parsed_json(text)
        except (ValueError, TypeError) as e:
            raise RecipeError(f"a {cls.kind} in JSON is an object with a name and fields; this is not JSON ({e}).") from e
        name, fields = _parts_of(listed)
        if name is None or fields is None:
            raise RecipeError(f"a {cls.kind} in JSON is an object with a name and fields; got {text[:80]}")
        named_class: type[Self] = targets.load(targets.REGISTRY)().look_up(f"breccia_{cls.kind}s", name, cls.kind)
        if not issubclass(named_class, cls):
            raise RecipeError(f"this is a {cls.kind} {named_class.name!r}, not {cls.name!r}; read it with the base class.")
        return named_class.with_fields(fields)

    @classmethod
    def _refuse(cls, key: str) -> None:
        known = signature(cls.__init__).parameters
        if key not in known and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
            raise UnsupportedError(f"{cls.__name__} has no field {key!r}{suggestion(key, names)}", field=key, known=names)

    @classmethod
    def needed_fields(cls) -> list[str]:
        """The fields that have no default."""
        fields = (f for f in dataclasses.fields(cls) if f.init)  # type: ignore[arg-type]
        return [f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]

    @classmethod
    def with_fields(cls, fields: dict[str, Any]) -> Self:
        """An instance from field values by name. Raises RecipeError naming an unknown field, or those without a value."""
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in fields:
            if key not in known:
                raise RecipeError(
                    f"{cls.kind} {cls.name!r} has no field {key!r}{suggestion(key, known)}", field=key, known=known
                )
        if missing := [name for name in cls.needed_fields() if name not in fields]:
            without = " and ".join(missing)
            raise RecipeError(f"{cls.kind} {cls.name!r} has no default for {without}; give it a value.", missing=missing)
        return cls(**fields)


def spelled(value: Any) -> str:
    """A field's value as the command line takes it: strings unchanged, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _parts_of(listed: Any) -> tuple[str | None, dict[str, Any] | None]:
    """(name, fields) from the output of `to_dict`; None where one is missing or of another type."""
    if not isinstance(listed, dict):
        return None, None
    entries = cast("dict[str, Any]", listed)
    name, fields = entries.get("name"), entries.get("fields")
    return (name if isinstance(name, str) else None), (cast("dict[str, Any]", fields) if isinstance(fields, dict) else None)


def settle(declared: Any, field: str, allowed: Collection[Any], aliases: Mapping[str, str] = MappingProxyType({})) -> None:
    """Set a field to its spelling in `allowed`, from any case or from an alias. Raises RecipeError for another value.

    Values that are not text, such as widths, must be equal and of the same type.
    aliases: canonical spellings by lower-case ones. They also match objects with such a name, such as dtypes.
    """
    value = getattr(declared, field)
    if any(type(value) is type(each) and value == each for each in allowed):
        return
    spellings = [each for each in allowed if isinstance(each, str)]
    name = getattr(value, "__name__", None) or getattr(value, "name", None) or value
    text = value if isinstance(value, str) else str(name).rpartition(".")[2] if aliases else ""
    spelling = aliases.get(text.lower()) or next((each for each in spellings if each.lower() == text.lower()), None)
    if spelling is None:
        named = " or ".join(map(repr, allowed)) if len(allowed) < 3 else f"one of {', '.join(map(repr, allowed))}"
        raise RecipeError(f"{field} must be {named}, got {short(value)}{did_you_mean(text[:80], spellings)}", **{field: value})
    object.__setattr__(declared, field, spelling)


def check_type(owner: str, field: str, value: Any, kind: type) -> None:
    """Raise RecipeError unless `value` is a `kind` (a bool is not an int here)."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RecipeError(f"{owner}: {field} must be {kind.__name__}, got {short(value)}", **{field: value})


def check_positive(owner: str, field: str, value: Any) -> None:
    """Raise RecipeError unless `value` is an int > 0."""
    check_type(owner, field, value, int)
    if value <= 0:
        raise RecipeError(f"{field} must be > 0, got {value}", **{field: value})
