"""Embeddings whose quantized weight output layers share: `breccia_torch.tables`."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import breccia
import breccia_torch
from breccia.bridges import save_safetensors
from breccia_torch.nn import ScaledLinear, ScaledWeight
from breccia_torch.tables import ScaledTable, put_table

ROWS, COLUMNS = 40, 64
POSITIONS = torch.tensor([[3, 39, 3], [0, 7, 12]])
#: Codes of 3 to 8 bits, zero-points, a bias, scales in records, of a row, and of the whole tensor.
SPECS = (
    "int8,group_size=32",
    "int4,group_size=32,symmetric=false",
    "int,bits=3,group_size=32",
    "q4_1",
    "gguf",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "fp8_row",
    "fp8_current",
)
#: Blocks of several rows.
TILED = "fp8_block,block_k=32,block_m=32"


class Decoder(nn.Module):
    """An embedding, and an output layer that multiplies by its weight."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, COLUMNS, **options)
        self.head = nn.Linear(COLUMNS, ROWS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, positions: Tensor) -> Tensor:
        return self.head(self.embedding(positions))


def table(spec: str = "int8,group_size=32") -> ScaledTable:
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    return ScaledTable(breccia.cast(values, spec))


def embedding(held: ScaledTable, **options: Any) -> nn.Embedding:
    made = nn.Embedding(ROWS, COLUMNS, **options)
    put_table(made, held)
    return made


def file(path: Path, spec: str = "int8,group_size=32") -> Path:
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    save_safetensors({"embedding.weight": breccia.cast(values, spec)}, path)
    return path


# -- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_rows_have_the_values_of_the_decoded_weight(spec: str) -> None:
    held = table(spec)
    for positions in (POSITIONS, POSITIONS.int(), POSITIONS[0, 0], POSITIONS[:, :0]):
        assert torch.equal(embedding(held)(positions), functional.embedding(positions, held.decoded()))


def test_only_the_rows_that_are_looked_up_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    held, decode, shapes = embedding(table()), breccia.dequantize, []

    def counted(st: Any, *arguments: Any, **options: Any) -> Any:
        shapes.append(st.shape)
        return decode(st, *arguments, **options)

    monkeypatch.setattr(breccia, "dequantize", counted)
    held(POSITIONS)
    assert shapes == [(6, COLUMNS)]


def test_rows_follow_the_models_precision_and_codes_do_not() -> None:
    model = embedding(table()).to(torch.bfloat16)
    held: Any = model.weight
    assert held.data.dtype == torch.int8 and model(POSITIONS).dtype == torch.bfloat16
    assert torch.equal(model(POSITIONS), held.decoded(torch.bfloat16)[POSITIONS])


def test_options_of_an_embedding_are_those_of_torch() -> None:
    held = table()
    assert torch.equal(embedding(held, padding_idx=3)(POSITIONS), held.decoded()[POSITIONS])
    with pytest.raises(IndexError, match="out of range"):
        embedding(held)(torch.tensor([ROWS]))
    norms = functional.embedding(POSITIONS, held, max_norm=1.0).norm(dim=-1)  # pyright: ignore[reportArgumentType]
    assert norms.max() < 1.001, "the length of a row of FP32"


def test_a_compiled_embedding_looks_up_the_same_rows() -> None:
    model = embedding(table())
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(POSITIONS), model(POSITIONS))


def test_other_uses_of_the_weight_take_its_values() -> None:
    held = table()
    x = torch.randn(2, COLUMNS)
    assert torch.equal(functional.linear(x, held), functional.linear(x, held.decoded()))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("tensor", "kind", "message"),
    [
        (
            lambda: breccia.cast(torch.ones(64, 64), "mxfp8", axis=-2),
            breccia.ShapeError,
            r"last axis; got .*\(64, 64\) and axis -2",
        ),
        (lambda: breccia.cast(torch.ones(2, 64, 64), "mxfp8"), breccia.ShapeError, r"got shape \(2, 64, 64\)"),
        (
            lambda: breccia.cast(torch.ones(64, 64), TILED),
            breccia.UnsupportedError,
            "has blocks of several: use blocks of one row in plain storage",
        ),
    ],
)
def test_a_weight_without_rows_of_its_own_is_refused(tensor: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ScaledTable(tensor())


# -- models ----------------------------------------------------------------------------------------------------------


def test_an_embedding_and_the_layer_tied_to_it_load_one_weight(tmp_path: Path) -> None:
    model, decoded = Decoder(), Decoder()
    source = file(tmp_path / "m.safetensors")
    assert breccia_torch.load_model(model, source) == ([], [])
    held: Any = model.embedding.weight
    assert isinstance(held, ScaledTable) and model.head.weight is held and isinstance(model.head, ScaledLinear)
    with torch.no_grad():
        decoded.embedding.weight.copy_(held.decoded())
    # Two orders of summing 64 products.
    torch.testing.assert_close(model(POSITIONS), decoded(POSITIONS), rtol=1e-5, atol=1e-5)


def test_a_copy_a_pickle_a_state_and_a_file_keep_what_is_shared(tmp_path: Path) -> None:
    model = Decoder()
    breccia_torch.load_model(model, file(tmp_path / "m.safetensors"))
    expected = model(POSITIONS)
    breccia_torch.save_model(model, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").stat().st_size < 1.5 * ROWS * COLUMNS, "one set of codes of a byte"
    again, other = Decoder(), copy.deepcopy(model)
    breccia_torch.load_model(again, tmp_path / "again.safetensors")
    other.embedding.weight.data.zero_()
    other.load_state_dict(model.state_dict())
    for found in (again, other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert found.head.weight is found.embedding.weight and torch.equal(found(POSITIONS), expected)


def test_a_named_storage_leaves_a_shared_weight_plain(tmp_path: Path) -> None:
    model = Decoder()
    breccia_torch.load_model(model, file(tmp_path / "m.safetensors", "int4,group_size=32"), storage="interleaved")
    assert model.head.weight.layout.storage == "plain"


def test_a_plain_file_is_cast_for_a_model_with_a_table(tmp_path: Path) -> None:
    model, plain = Decoder(), Decoder()
    breccia_torch.load_model(model, file(tmp_path / "m.safetensors"))
    breccia_torch.save_model(plain, tmp_path / "plain.safetensors")
    assert breccia_torch.load_model(model, tmp_path / "plain.safetensors") == ([], [])
    held: Any = model.embedding.weight
    assert isinstance(held, ScaledTable) and model.head.weight is held
    assert breccia.bytes_equal(held.tensor, breccia.cast(plain.embedding.weight.detach(), held.recipe))


@pytest.mark.parametrize(
    ("options", "spec"),
    [({"max_norm": 1.0}, "int8,group_size=32"), ({}, TILED)],
)
def test_an_embedding_that_cannot_look_up_single_rows_is_decoded(options: Any, spec: str, tmp_path: Path) -> None:
    model = Decoder(**options)
    breccia_torch.load_model(model, file(tmp_path / "m.safetensors", spec))
    assert model.head.weight is model.embedding.weight and isinstance(model.head.weight, nn.Parameter)


def test_an_embedding_alone_is_decoded(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(ROWS, COLUMNS)})
    breccia_torch.load_model(model, file(tmp_path / "m.safetensors"))
    assert not any(isinstance(module, ScaledWeight) for module in model.modules())
