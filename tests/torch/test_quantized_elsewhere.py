"""Models that another library has quantized: `quantize_` names the function that takes over their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from torch import nn

import breccia
import breccia_torch
from breccia_torch.nn import ScaledLinear

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 64, bias=False), nn.Linear(64, 128))


def torchao(found: nn.Sequential) -> str:
    library = pytest.importorskip("torchao.quantization")
    library.quantize_(found[0], library.Int8WeightOnlyConfig(version=2))
    return r"quantized by torchao: breccia_torch.from_torchao_model_\(model\) takes it over"


def bitsandbytes_4bit(found: nn.Sequential) -> str:
    library = pytest.importorskip("bitsandbytes")
    found[0] = library.nn.Linear4bit(128, 64, bias=False)
    return r"quantized by bitsandbytes: breccia.bridges.from_bitsandbytes\(layer.weight\) takes it over"


def bitsandbytes_8bit(found: nn.Sequential) -> str:
    library = pytest.importorskip("bitsandbytes")
    found[0] = library.nn.Linear8bitLt(128, 64, bias=False)
    return "quantized by bitsandbytes"


def compressed_tensors(found: nn.Sequential) -> str:
    pytest.importorskip("compressed_tensors")
    found[0] = breccia.bridges.to_compressed_tensors(breccia.cast(found[0].weight.detach(), "int8"))
    return r"quantized by compressed-tensors: breccia.bridges.from_compressed_tensors\(layer\) takes it over"


@pytest.mark.together
@pytest.mark.parametrize("library", [torchao, bitsandbytes_4bit, bitsandbytes_8bit, compressed_tensors])
def test_the_function_that_takes_over_is_named_and_the_rest_is_quantized(library: Callable[[Any], str]) -> None:
    found = model()
    reason = library(found)
    layer = found[0]
    with pytest.raises(breccia.OptionError, match=f"no parameter is chosen: {reason}"):
        breccia_torch.quantize_(nn.Sequential(layer), "mxfp8")
    summary = breccia_torch.quantize_(found, "mxfp8")
    assert summary.quantized == ("1.weight",) and found[0] is layer and type(found[1]) is ScaledLinear
    assert reason.replace("\\", "") in summary.left["0.weight"]
