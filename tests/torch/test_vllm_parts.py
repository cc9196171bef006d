"""Weights of breccia's folders in vLLM, without vLLM: what comes of their components, and the parts of ranks.

tests/engines runs vLLM itself (`make engines`).
"""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

import breccia
from breccia import CorruptFileError, LayoutError, ScaledTensor, ShapeError, UnsupportedError
from breccia.backend import components
from breccia.bridges import load_checkpoint, save_safetensors
from breccia_torch.vllm.received import Received, check_experts, joined, of_rank

W = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
RECIPES = ["nvfp4", "mxfp8", "int4", "int4,symmetric=false", "fp8_block,block_m=128", "fp8_current"]


def saved(tmp_path: Path, **tensors: ScaledTensor) -> dict[str, Any]:
    """Headers of tensors in a file, by name."""
    save_safetensors(tensors, tmp_path / "model.safetensors")
    checkpoint = load_checkpoint(tmp_path / "model.safetensors", framework="torch")
    return {name: checkpoint.header(name) for name in tensors}


def give(received: Received, st: ScaledTensor, **given: Any) -> None:
    """Hand the components over as vLLM does, as the bytes of the file."""
    for name, part in components(st).items():
        parameter: Any = received.get_parameter(name)
        parameter.weight_loader(parameter, part.view(torch.uint8) if part.itemsize == 1 else part, **given)


@pytest.mark.parametrize("recipe", RECIPES)
def test_components_become_the_weight(recipe: str, tmp_path: Path) -> None:
    one, two = breccia.cast(W, recipe), breccia.cast(W.flip(0), recipe)
    headers = saved(tmp_path, one=one, two=two)
    received = Received({"q": headers["one"], "k": headers["two"]})
    give(received, one, shard_id="q")
    give(received, two, shard_id="k")
    found = received.tensors()
    assert breccia.bytes_equal(found["q"], one) and breccia.bytes_equal(found["k"], two)


def test_components_come_to_the_device_that_the_layer_is_made_on(tmp_path: Path) -> None:
    st = breccia.cast(W, "mxfp8")
    headers = saved(tmp_path, one=st)
    with torch.device("meta"):
        received = Received({None: headers["one"]})
    give(received, st)
    assert {part.device.type for part in components(received.tensors()[None]).values()} == {"meta"}


def test_experts_of_other_ranks_are_not_taken(tmp_path: Path) -> None:
    st = breccia.cast(W, "mxfp8")
    received = Received({(1, "w1"): saved(tmp_path, one=st)["one"]})
    parameter: Any = received.get_parameter("data")
    assert parameter.weight_loader(parameter, st.data, shard_id="w1", expert_id=0) is False
    give(received, st, shard_id="w1", expert_id=1)
    assert breccia.bytes_equal(received.tensors()[1, "w1"], st)


def test_experts_of_which_some_projections_are_plain_are_refused() -> None:
    headers = dict.fromkeys([(expert, projection) for expert in (0, 1) for projection in ("w1", "w2", "w3")])
    check_experts(headers, "mlp.experts")
    del headers[1, "w2"]
    said = "mlp.experts: 1 of 6 projections of its experts are not quantized, the first w2 of expert 1. Convert the model again"
    with pytest.raises(UnsupportedError, match=said):
        check_experts(headers, "mlp.experts")
    with pytest.raises(UnsupportedError, match="2 of 4 projections .* the first w2 of expert 0"):
        check_experts({(0, "w1"): None, (1, "w1"): None}, "mlp.experts")


def test_a_component_that_did_not_come_is_named(tmp_path: Path) -> None:
    header = saved(tmp_path, up=breccia.cast(W, "mxfp8"))["up"]
    with pytest.raises(CorruptFileError, match=r"vLLM found no up.scale and no up.data in the files; convert the checkpoint"):
        Received({None: header}).tensors()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_ranks_have_the_values_of_the_whole(recipe: str, axis: int) -> None:
    st = breccia.cast(torch.randn(256, 512, generator=torch.Generator().manual_seed(1)), recipe)
    length = st.shape[axis] // 2
    parts = [of_rank(st, axis, length, rank, 4, "qkv_proj") for rank in range(4)]
    values = breccia.dequantize(st)
    for rank, part in enumerate(parts):
        assert torch.equal(breccia.dequantize(part), values.narrow(axis, rank // 2 * length, length))
    assert of_rank(st, axis, st.shape[axis], 3, 4, "qkv_proj") is st


def test_ranks_that_would_cut_blocks_are_refused() -> None:
    st = breccia.cast(W, "nvfp4")
    with pytest.raises(
        LayoutError, match=r"mlp.down_proj: each of 16 ranks would hold 8 of 128 columns, which is no whole number"
    ):
        of_rank(st, 1, 8, 0, 16, "mlp.down_proj")
    with pytest.raises(ShapeError, match="mlp.down_proj: 8 rows are no multiple of the 3 of a rank"):
        of_rank(st, 0, 3, 0, 3, "mlp.down_proj")


@pytest.mark.parametrize(("recipe", "count"), [("mxfp8", 1), ("int4", 1), ("fp8_block,block_m=128", 2), ("nvfp4", 2)])
def test_weights_are_joined_where_one_tensor_can_hold_them(recipe: str, count: int) -> None:
    parts = [breccia.cast(w, recipe) for w in (W, 2 * W)]  # NVFP4's tensors have scales of their own
    found = joined(parts)
    assert len(found) == count
    values = torch.cat([breccia.dequantize(part) for part in found])
    assert torch.equal(values, torch.cat([breccia.dequantize(part) for part in parts]))
    same = joined([breccia.cast(W, "nvfp4")] * 2)
    assert len(same) == 1


def test_vllm_finds_the_plug_in() -> None:
    (point,) = entry_points(group="vllm.general_plugins", name="breccia")
    assert re.fullmatch(r"breccia_torch\.vllm:register", point.value) and callable(point.load())
