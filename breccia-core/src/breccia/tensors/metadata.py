"""What a ScaledTensor says beside its arrays: the metadata of pytrees, operators and saved tensors."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ..layouts import Layout
from ..recipes import ScalingRecipe
from .tensor import ScaledTensor


class Metadata(NamedTuple):
    """What a tensor is beside its parts. Hashable: the static side of frameworks' trees, where equal ones make equal trees."""

    recipe: ScalingRecipe
    layout: Layout
    axis: int
    padding: int

    @classmethod
    def of(cls, st: ScaledTensor) -> Metadata:
        return cls(st.recipe, st.layout, st.axis, st.padding)

    def assembled(self, data: Any, scale: Any, zero_point: Any = None, global_scale: Any = None) -> ScaledTensor:
        """The tensor of these parts, unchecked: they may be placeholders."""
        return ScaledTensor.from_parts(data, scale, self.recipe, self.layout, zero_point, global_scale, self.axis, self.padding)

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces."""
        listed = {"recipe": self.recipe.to_dict(), "layout": self.layout.to_dict(), "axis": self.axis, "padding": self.padding}
        return json.dumps(listed, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Metadata:
        """What `to_json` wrote. Raises what the declarations raise."""
        listed = json.loads(text)
        recipe, layout = (json.dumps(listed[of.kind]) for of in (ScalingRecipe, Layout))
        axis, padding = int(listed["axis"]), int(listed["padding"])
        return cls(ScalingRecipe.from_json(recipe), Layout.from_json(layout), axis, padding)
