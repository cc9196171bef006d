"""DTensors, which breccia does not compute on yet: one error that names the argument or the parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import breccia
import breccia_torch
from breccia_torch.nn import ScaledLinear

REMEDY = r"is a torch.distributed.tensor.DTensor, not a plain torch array. breccia does not compute on sharded tensors yet"


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def sharded(mesh: Any, *shape: int) -> Any:
    return distribute_tensor(torch.ones(shape), mesh, [Shard(0)])


CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "cast": ("x", lambda d: breccia.cast(d, "mxfp8")),
    "cast_ste": ("x", lambda d: breccia.cast_ste(d, "mxfp8")),
    "cast_pair": ("x", lambda d: breccia.cast_pair(d, "mxfp8")),
    "matmul": ("a", lambda d: breccia.matmul(d, breccia.cast(torch.ones(8, 64), "mxfp8").mT)),
    "matmul, second": ("b", lambda d: breccia.matmul(breccia.cast(torch.ones(8, 64), "mxfp8"), d.mT)),
    "cast_matmul": ("x", lambda d: breccia.cast_matmul(d, "mxfp8", breccia.cast(torch.ones(8, 64), "mxfp8").mT)),
    "history": ("x", lambda d: breccia.AmaxHistory("fp8_delayed").update(d)),
    "layer": ("a", lambda d: ScaledLinear.from_linear(nn.Linear(64, 8), "mxfp8")(d)),
    "layer that casts": ("x", lambda d: ScaledLinear.from_linear(nn.Linear(64, 8), "mxfp8", activation="mxfp8")(d)),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_op_on_a_dtensor_names_the_argument(mesh: Any, call: str) -> None:
    name, function = CALLS[call]
    with pytest.raises(breccia.UnsupportedError, match=f"^{name} {REMEDY}"):
        function(sharded(mesh, 32, 64))


def test_a_dtensor_is_no_component(mesh: Any) -> None:
    st = breccia.cast(torch.ones(32, 64), "int8")
    parts = (distribute_tensor(st.data, mesh, [Shard(0)]), st.scale, st.recipe, st.layout)
    with pytest.raises(breccia.UnsupportedError, match=f"data {REMEDY}"):
        breccia.ScaledTensor(*parts)
    with pytest.raises(breccia.UnsupportedError, match=f"st {REMEDY}|x {REMEDY}|data {REMEDY}"):
        breccia.dequantize(breccia.ScaledTensor.from_parts(*parts))


def test_quantizing_a_sharded_model_names_the_parameter_and_changes_nothing(mesh: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    distribute_module(model[1], mesh)
    with pytest.raises(breccia.UnsupportedError, match=f"quantize_: 1.weight {REMEDY}"):
        breccia_torch.quantize_(model, "mxfp8")
    assert type(model[0]) is nn.Linear


def test_loading_into_and_saving_a_sharded_model_names_the_parameter(mesh: Any, tmp_path: Any) -> None:
    pytest.importorskip("breccia_bridges")
    model = nn.Sequential(nn.Linear(64, 32))
    breccia_torch.save_model(model, tmp_path / "model.safetensors")
    distribute_module(model, mesh)
    with pytest.raises(breccia.UnsupportedError, match=f"load_model: 0.weight {REMEDY}"):
        breccia_torch.load_model(model, tmp_path / "model.safetensors")
    with pytest.raises(breccia.UnsupportedError, match=f"tensor '0.weight' {REMEDY}"):
        breccia_torch.save_model(model, tmp_path / "other.safetensors")


def test_a_bias_that_was_distributed_is_named(mesh: Any) -> None:
    layer, x = ScaledLinear.from_linear(nn.Linear(64, 8), "mxfp8"), torch.ones(32, 64)
    for trained in (True, False):
        layer.bias = nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Replicate()]), trained)
        with pytest.raises(breccia.UnsupportedError, match=f"^bias {REMEDY}"):
            layer(x)


def test_a_history_that_was_distributed_is_named(mesh: Any) -> None:
    history = breccia.AmaxHistory("fp8_delayed", distribute_tensor(torch.ones(16), mesh, [Replicate()]))  # type: ignore[arg-type]
    for call in (history.update, history.cast):
        with pytest.raises(breccia.UnsupportedError, match=f"^amaxes {REMEDY}"):
            call(torch.ones(32, 64))


def test_a_quantized_layer_whose_components_were_distributed_names_them(mesh: Any) -> None:
    layer = ScaledLinear.from_linear(nn.Linear(64, 32), "int8")
    x = torch.ones(3, 64)
    layer(x)
    for name in ("data", "scale"):
        setattr(layer.weight, name, distribute_tensor(getattr(layer.weight, name), mesh, [Replicate()]))
    with pytest.raises(breccia.UnsupportedError, match=f"data of the weight {REMEDY}"):
        layer(x)
