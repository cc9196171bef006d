"""One model in every framework, and its file: the same parameters are quantized, under the same recipes, by one policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import breccia

#: (out, in) of the layers, by torch's names; `embed.weight` is a table.
LAYERS = {
    "embed.weight": (96, 64),
    "layers.0.mlp.gate.weight": (32, 64),
    "layers.0.mlp.up.weight": (128, 64),
    "layers.0.attn.q.weight": (64, 64),
    "lm_head.weight": (96, 64),
}
NVFP4, MXFP8 = "nvfp4", "mxfp8"
POLICIES: dict[str, tuple[Any, dict[str, str]]] = {
    "one recipe": (NVFP4, {"layers.0.mlp.up.weight": NVFP4, "layers.0.attn.q.weight": NVFP4}),
    "a mapping": (
        {"*.mlp.up.*": MXFP8, "*.attn.*": "keep", "lm_head.*": NVFP4},
        {"layers.0.mlp.up.weight": MXFP8, "lm_head.weight": NVFP4},
    ),
    "a mapping with a default": (
        {"*.attn.*": MXFP8, "default": NVFP4},
        {"layers.0.mlp.up.weight": NVFP4, "layers.0.attn.q.weight": MXFP8},
    ),
    "what mlx.nn.quantize takes": (
        {"preset": "mlx.nn.quantize", "default": NVFP4, "kind:embedding": "keep"},
        dict.fromkeys([name for name in LAYERS if name != "embed.weight"], NVFP4),
    ),
}


def values(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).standard_normal(LAYERS[name]).astype(np.float32)


def of_torch(policy: Any, folder: Path) -> dict[str, str]:
    torch = pytest.importorskip("torch")
    import breccia_torch

    model = torch.nn.Module()
    for name, (out, inner) in LAYERS.items():
        owner = model
        *parents, leaf, _ = name.split(".")
        for parent in parents:
            if not hasattr(owner, parent):
                owner.add_module(parent, torch.nn.Module())
            owner = getattr(owner, parent)
        owner.add_module(leaf, torch.nn.Embedding(out, inner) if leaf == "embed" else torch.nn.Linear(inner, out, bias=False))
    summary = breccia_torch.quantize_(model, policy)
    assert set(summary.quantized) | set(summary.left) == set(LAYERS)
    return {name: how.recipe.name for name, how in summary.chosen.items()}


def of_mlx(policy: Any, folder: Path) -> dict[str, str]:
    nn = pytest.importorskip("mlx.nn")
    import breccia_mlx

    model: Any = nn.Module()
    attn, mlp = nn.Module(), nn.Module()
    mlp.gate, mlp.up, attn.q = nn.Linear(64, 32, False), nn.Linear(64, 128, False), nn.Linear(64, 64, False)
    layer = nn.Module()
    layer.mlp, layer.attn = mlp, attn
    model.embed, model.layers, model.lm_head = nn.Embedding(96, 64), [layer], nn.Linear(64, 96, False)
    summary = breccia_mlx.quantize(model, policy)
    return {name: how.recipe.name for name, how in summary.chosen.items()}


def nested() -> dict[str, Any]:
    """A tree as linen has it: kernels (in, out) under Flax's names."""
    tree: dict[str, Any] = {}
    for name in LAYERS:
        owner = tree
        *parents, _ = name.split(".")
        for parent in parents:
            owner = owner.setdefault(parent, {})
        x = values(name)
        owner["embedding" if parents == ["embed"] else "kernel"] = x if parents == ["embed"] else x.T.copy()
    return tree


def named(name: str) -> str:
    """torch's name of a parameter of Flax."""
    owner, _, _ = name.replace("/", ".").rpartition(".")
    return f"{owner}.weight"


def of_flax(policy: Any, folder: Path) -> dict[str, str]:
    pytest.importorskip("flax")
    import breccia_jax.flax

    _, report = breccia_jax.flax.quantize(nested(), policy)
    return {named(name): how.recipe.name for name, how in report.chosen.items()}


def of_nnx(policy: Any, folder: Path) -> dict[str, str]:
    nnx = pytest.importorskip("flax.nnx")
    import breccia_jax.flax

    rngs = nnx.Rngs(0)

    class Part(nnx.Module):
        def __init__(self, **parts: Any) -> None:
            for name, part in parts.items():
                setattr(self, name, part)

    def linear(name: str) -> Any:
        return nnx.Linear(*LAYERS[name][::-1], use_bias=False, rngs=rngs)

    mlp = Part(gate=linear("layers.0.mlp.gate.weight"), up=linear("layers.0.mlp.up.weight"))
    layer = Part(mlp=mlp, attn=Part(q=linear("layers.0.attn.q.weight")))
    model = Part(embed=nnx.Embed(96, 64, rngs=rngs), layers=nnx.List([layer]), lm_head=linear("lm_head.weight"))
    _, report = breccia_jax.flax.quantize(model, policy)
    return {named(name): how.recipe.name for name, how in report.chosen.items()}


def of_tree(policy: Any, folder: Path) -> dict[str, str]:
    jax = pytest.importorskip("jax")
    import breccia_jax

    tree = breccia_jax.quantize(jax.tree.map(jax.numpy.asarray, nested()), policy)
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, breccia.ScaledTensor))[0]
    return {
        named(jax.tree_util.keystr(path, simple=True, separator="/")): leaf.recipe.name
        for path, leaf in leaves
        if isinstance(leaf, breccia.ScaledTensor)
    }


def of_equinox(policy: Any, folder: Path) -> dict[str, str]:
    eqx = pytest.importorskip("equinox")
    jax = pytest.importorskip("jax")
    import breccia_jax.equinox

    def layer(name: str) -> Any:
        out, inner = LAYERS[name]
        key = jax.random.key(0)
        return eqx.nn.Embedding(out, inner, key=key) if name == "embed.weight" else eqx.nn.Linear(inner, out, False, key=key)

    class Part(eqx.Module):
        parts: dict[str, Any]

    class Layer(eqx.Module):
        mlp: dict[str, Any]
        attn: dict[str, Any]

    class Model(eqx.Module):
        embed: Any
        layers: list[Any]
        lm_head: Any

    mlp = {part: layer(f"layers.0.mlp.{part}.weight") for part in ("gate", "up")}
    model = Model(layer("embed.weight"), [Layer(mlp, {"q": layer("layers.0.attn.q.weight")})], layer("lm_head.weight"))
    _, report = breccia_jax.equinox.quantize(model, policy)
    return {name: how.recipe.name for name, how in report.chosen.items()}


def of_convert(policy: Any, folder: Path) -> dict[str, str]:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    pytest.importorskip("breccia_bridges")
    save_file({name: values(name) for name in LAYERS}, folder / "model.safetensors")
    breccia.bridges.convert(folder / "model.safetensors", folder / "small.safetensors", policy)
    written = breccia.bridges.load_safetensors(folder / "small.safetensors")
    return {name: st.recipe.name for name, st in written.items() if isinstance(st, breccia.ScaledTensor)}


WAYS: dict[str, Callable[[Any, Path], dict[str, str]]] = {
    "torch": of_torch,
    "mlx": of_mlx,
    "linen": of_flax,
    "nnx": of_nnx,
    "tree": of_tree,
    "equinox": of_equinox,
    "convert": of_convert,
}


@pytest.mark.covering(1, 3)
@pytest.mark.together
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_way_quantizes_the_same_parameters_under_the_same_recipes(way: str, policy: str, tmp_path: Path) -> None:
    given, expected = POLICIES[policy]
    assert WAYS[way](given, tmp_path) == expected


@pytest.mark.together
@pytest.mark.parametrize("way", WAYS)
def test_a_yaml_file_is_a_policy_in_every_way(way: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "policy.yaml").write_text('"*.attn.*": mxfp8\ndefault: nvfp4\n')
    expected = POLICIES["a mapping with a default"][1]
    assert WAYS[way](tmp_path / "policy.yaml", tmp_path) == expected


@pytest.mark.together
@pytest.mark.parametrize("way", WAYS)
def test_a_pattern_that_matches_nothing_is_an_error_in_every_way(way: str, tmp_path: Path) -> None:
    with pytest.raises(
        breccia.UnknownNameError, match=r"the pattern '\*\.mpl\.\*' matches no .*; did you mean '\*\.mlp\.\*'\?"
    ):
        WAYS[way]({"*.mpl.*": "nvfp4"}, tmp_path)
