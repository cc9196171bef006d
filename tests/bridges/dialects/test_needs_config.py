"""A group that several dialects have counts only where a config, or the caller, names the dialect; fields of declarations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_folders import floats, folder, fp8, values

from breccia import Dialect, PluginError
from breccia.backend import TensorGroup, registry

WEIGHT = "model.layers.0.mlp.up_proj.weight"


def test_fp8_with_a_scale_per_tensor_has_one_reading_without_a_config(tmp_path: Path) -> None:
    path = folder(tmp_path, {WEIGHT: fp8(4, 32)[0], f"{WEIGHT}_scale": floats("F32")[0]})
    assert values(path)[WEIGHT].dialect.name == "fp8_scale"
    sharing = [name for name, dialect in registry().dialects.items() if any(group.needs_config for group in dialect.groups)]
    assert {"compressed_tensors", "modelopt", "quark"} <= set(sharing)
    scales = []
    for name in ("compressed_tensors", "modelopt", "quark"):
        stored = values(path, name)[WEIGHT]
        assert stored.dialect.name == name
        scales.append(np.asarray(stored.tensor().scale))
    assert scales[0] == scales[1] == scales[2]


def test_needs_config_is_a_bool() -> None:
    wrong: Any = "yes"
    with pytest.raises(PluginError, match="dialect 'd': needs_config is True or False; got 'yes'"):
        TensorGroup({"weight": ()}, needs_config=wrong).check("dialect 'd'")


def test_embeddings_is_a_bool() -> None:
    wrong: Any = "yes"
    with pytest.raises(PluginError, match="dialect 'd': embeddings is True or False; got 'yes'"):
        Dialect("d", "D", remedy="Convert the original.", embeddings=wrong).check()


@pytest.mark.parametrize("field", ["activations", "factors", "metadata", "recipes"])
@pytest.mark.parametrize("wrong", ["input_scale", ("",), (5,), ["input_scale"]])
def test_what_is_beside_values_is_a_tuple_of_names(field: str, wrong: Any) -> None:
    sound = Dialect("d", "D", remedy="Convert the original.")
    sound.check()
    with pytest.raises(PluginError, match=rf"dialect 'd': {field} is a tuple of str, like \('\w+',\); got "):
        replace(sound, **{field: wrong}).check()
