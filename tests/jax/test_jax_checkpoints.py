"""Checkpoints of JAX's libraries: quantized leaves keep their recipe, and another recipe's are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fresh import printed

import breccia
from breccia.testing.examples import wide

pytestmark = pytest.mark.long

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import breccia_jax  # noqa: E402

RECIPES = (
    "mxfp8", "mxfp8,fp8_format=E5M2", "fp8_block,block_m=4,block_k=32", "fp8_current", "nvfp4", "mxfp6",
    "int4,scale_dtype=bf16", "int4,group_size=32,signed=false,symmetric=false",
    "int4,group_size=32,signed=false,symmetric=false,offset=bias", "nf4",
)  # fmt: skip
#: Of two, three and four arrays; `make slow` gives Orbax the others, which have the same arrays under other recipes.
FEW = ("mxfp8", "nvfp4", "int4,group_size=32,signed=false,symmetric=false")


def tree(spec: str) -> dict[str, Any]:
    """Leaves of both axes, with partial blocks and stacked layers, beside dense ones."""
    x = jnp.asarray(wide((64, 70), seed=1, exponents=3))
    st = breccia.cast(x, spec)
    stacked = jax.vmap(lambda x: breccia.cast(x, spec, axis=-2))(jnp.stack([x, x * 2]))
    weight = breccia_jax.ScaledWeight(breccia.cast(x[:, :64], spec, axis=-2), (64, 4, 16), "bfloat16")
    return {"a": {"kernel": st, "bias": jnp.ones(3)}, "layers": [stacked, {"kernel": weight}]}


def same(a: Any, b: Any) -> bool:
    assert jax.tree.structure(a) == jax.tree.structure(b), (jax.tree.structure(a), jax.tree.structure(b))
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.mark.parametrize("spec", [spec if spec in FEW else pytest.param(spec, marks=pytest.mark.slow) for spec in RECIPES])
def test_orbax_keeps_the_recipe_and_refuses_another(spec: str, tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    saved = tree(spec)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", saved)
        checkpointer.wait_until_finished()
        found = breccia_jax.assembled(checkpointer.restore(tmp_path / "c"))
        assert same(found, saved)
        assert same(checkpointer.restore(tmp_path / "c", jax.eval_shape(lambda: saved)), saved)
        other = "nvfp4,two_level=false" if spec == "nvfp4" else "nvfp4"
        for target in (tree(other), tree("int8"), {**saved, "a": {"kernel": saved["a"]["kernel"].mT, "bias": jnp.ones(3)}}):
            with pytest.raises(ValueError, match="tree structures do not match"):
                checkpointer.restore(tmp_path / "c", target)


@pytest.mark.parametrize("spec", RECIPES)
def test_flax_serialization_keeps_the_recipe_and_refuses_another(spec: str) -> None:
    serialization = pytest.importorskip("flax.serialization")
    import breccia_jax.flax  # registers tensors

    assert breccia_jax.flax
    saved = tree(spec)
    written = serialization.to_bytes(saved)
    read = serialization.from_bytes(saved, written)
    assert same(read, saved) and breccia.bytes_equal(read["a"]["kernel"], saved["a"]["kernel"])
    assert same(serialization.from_state_dict(saved, serialization.to_state_dict(saved)), saved)
    found = breccia_jax.assembled(serialization.msgpack_restore(written))
    assert found["layers"].keys() == {"0", "1"}, "Flax has no lists"
    assert same(found | {"layers": list(found["layers"].values())}, saved)
    other = "nvfp4,two_level=false" if spec == "nvfp4" else "nvfp4"
    with pytest.raises(breccia.OptionError, match=rf"the state holds {spec.split(',')[0]} \(.*, and the target nvfp4 \("):
        serialization.from_bytes(tree(other), written)


def test_a_state_that_is_no_tensor_is_refused() -> None:
    serialization = pytest.importorskip("flax.serialization")
    import breccia_jax.flax  # noqa: F401  registers tensors

    st = breccia.cast(jnp.ones((4, 64)), "mxfp8")
    with pytest.raises(breccia.OptionError, match="the state holds no quantized parameter, and the target mxfp8"):
        serialization.from_state_dict({"w": st}, {"w": {"value": np.ones(3)}})


def test_components_that_contradict_each_other_are_refused() -> None:
    serialization = pytest.importorskip("flax.serialization")
    import breccia_jax.flax

    st = breccia.cast(jnp.ones((4, 64)), "mxfp8")
    state = serialization.to_state_dict({"w": st})["w"]
    short = {name: a[:2] if name.startswith("scale") else a for name, a in state.items()}
    with pytest.raises(
        breccia.CorruptFileError, match="a quantized leaf of the tree cannot be put together: .*scale.shape must be"
    ):
        breccia_jax.assembled({"w": short})
    with pytest.raises(breccia.CorruptFileError, match="its components are not those of one tensor"):
        breccia_jax.assembled({"w": {name: a for name, a in state.items() if name.startswith("data")}})
    other = serialization.to_state_dict({"w": breccia.cast(jnp.ones((4, 64)), "mxfp8,fp8_format=E5M2")})["w"]
    mixed = {name: a for name, a in state.items() if name.startswith("data")} | {
        name: a for name, a in other.items() if name.startswith("scale")
    }
    with pytest.raises(breccia.CorruptFileError, match="its components are not those of one tensor"):
        breccia_jax.assembled({"w": mixed})


def test_other_leaves_and_nodes_stay() -> None:
    made = {"a": [jnp.ones(2), None, ("x", 3)], "data": 1, "scale {": 2}
    assert jax.tree.structure(breccia_jax.assembled(made)) == jax.tree.structure(made)


@pytest.mark.parametrize("spec", RECIPES)
def test_equinox_files_keep_the_recipe_and_refuse_another(spec: str, tmp_path: Path) -> None:
    eqx = pytest.importorskip("equinox")
    from breccia_jax import equinox as be

    saved, path = tree(spec), tmp_path / "m.eqx"
    be.tree_serialise_leaves(path, saved)
    for like in (saved, jax.tree.map(jnp.zeros_like, saved), jax.eval_shape(lambda: saved)):
        assert same(be.tree_deserialise_leaves(path, like), saved)
    others = [tree("nvfp4,two_level=false" if spec == "nvfp4" else "nvfp4"), tree("int8")]
    if spec == "mxfp8":
        others.append(tree("mxfp8,fp8_format=E5M2"))  # the same shapes and dtypes
    for other in others:
        with pytest.raises(breccia.OptionError, match="'kernel'.: the file has a tensor of .*, and `like` one of "):
            be.tree_deserialise_leaves(path, other)
    longer = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), saved)
    with pytest.raises(breccia.OptionError, match="with leaves of shapes .*, and that of `like` has"):
        be.tree_deserialise_leaves(path, longer)
    eqx.tree_serialise_leaves(path, saved)
    with pytest.raises(breccia.CorruptFileError, match="Files of equinox.tree_serialise_leaves have none: write them with"):
        be.tree_deserialise_leaves(path, saved)


FLAX_FIRST = """
from flax import serialization
import jax.numpy as jnp, breccia
st = breccia.cast(jnp.ones((4, 64)), "nvfp4")
again = serialization.from_bytes({"w": st}, serialization.to_bytes({"w": st}))["w"]
assert breccia.bytes_equal(again, st)
"""


def test_flax_stores_tensors_without_an_import_of_breccia_jax_flax() -> None:
    pytest.importorskip("flax.serialization")
    printed(FLAX_FIRST)
