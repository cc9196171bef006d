"""The metadata of a ScaledTensor (its fields that are not arrays), for pytrees, operators and saved tensors."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ..layouts import Layout, layout_of_tensor
from ..recipes import ScalingRecipe
from .tensor import ScaledTensor


class Metadata(NamedTuple):
    """A tensor without its components. Hashable: it is the static aux data of pytrees, compared by equality."""

    recipe: ScalingRecipe
    layout: Layout
    axis: int
    padding: int

    @classmethod
    def of(cls, st: ScaledTensor) -> Metadata:
        return cls(st.recipe, st.layout, st.axis, st.padding)

    def assembled(self, data: Any, scale: Any, zero_point: Any = None, global_scale: Any = None) -> ScaledTensor:
        """The tensor with these components, unchecked: they may be placeholders."""
        return ScaledTensor.from_parts(data, scale, self.recipe, self.layout, zero_point, global_scale, self.axis, self.padding)

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces."""
        listed = {"recipe": self.recipe.to_dict(), "layout": self.layout.to_dict(), "axis": self.axis, "padding": self.padding}
        return json.dumps(listed, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Metadata:
        """Inverse of `to_json`. Raises the errors of the declarations."""
        listed = json.loads(text)
        recipe, layout = (json.dumps(listed[of.kind]) for of in (ScalingRecipe, Layout))
        axis, padding = int(listed["axis"]), int(listed["padding"])
        return cls(ScalingRecipe.from_json(recipe), layout_of_tensor(layout), axis, padding)
