"""What recipes and layouts share: frozen dataclasses with a stable name and a JSON form."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar, Self

from .errors import RecipeError, suggestion


class Declared:
    """Base of declarations that travel in files as `{"name": ..., "fields": {...}}`."""

    name: ClassVar[str] = ""
    kind: ClassVar[str] = "declaration"

    def to_dict(self) -> dict[str, Any]:
        """`{"name": ..., "fields": {...}}` with every field, ready for `json.dumps`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"name": self.name, "fields": fields}

    def to_json(self) -> str:
        """Canonical JSON of `to_dict`: sorted keys, no spaces."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def with_fields(cls, fields: dict[str, Any]) -> Self:
        """An instance from field values by name. Raises RecipeError naming an unknown field."""
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in fields:
            if key not in known:
                raise RecipeError(
                    f"{cls.kind} {cls.name!r} has no field {key!r}{suggestion(key, known)}", field=key, known=known
                )
        return cls(**fields)


def check_type(owner: str, field: str, value: Any, kind: type) -> None:
    """Raise RecipeError unless `value` is a `kind` (and not a bool that passes for an int)."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RecipeError(f"{owner}: {field} must be {kind.__name__}, got {value!r}", **{field: value})


def check_positive(owner: str, field: str, value: Any) -> None:
    """Raise RecipeError unless `value` is an int > 0."""
    check_type(owner, field, value, int)
    if value <= 0:
        raise RecipeError(f"{field} must be > 0, got {value}", **{field: value})
