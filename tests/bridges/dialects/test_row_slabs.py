"""Values that another library's dialect stores by slabs of rows: the bytes are those of a value that is taken whole."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from breccia.backend import registry
from breccia.bridges import convert, save_safetensors
from breccia.internal import measuring
from breccia_bridges.row_slabs import RowSlabs

#: The dialects that declare `by_rows`. Matrices with blocks of 128 rows, and rows that fill no whole slab.
DIALECTS = {name: one for name, one in registry().dialects.items() if one.by_rows}
SHAPES = {"mlp.up_proj": (1344, 512), "mlp.gate_proj": (1344, 512), "self_attn.q_proj": (512, 512)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in BF16, as most are."""
    folder, rng = tmp_path_factory.mktemp("rows") / "m", np.random.default_rng(0)
    folder.mkdir()
    numbers = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    tensors = {f"model.layers.0.{name}.weight": x.astype(ml_dtypes.bfloat16) for name, x in numbers.items()}
    save_safetensors(tensors, folder / "model.safetensors")
    sizes = {"hidden_size": 512, "intermediate_size": 1344, "num_attention_heads": 8, "num_hidden_layers": 1, "vocab_size": 10}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 128, **sizes}
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5}))
    return folder


def contents(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in (sorted(path.iterdir()) if path.is_dir() else [path])]


def check(dialect: str, spec: str, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if dialect == "gguf":
        pytest.importorskip("gguf")
    found: list[RowSlabs | None] = []
    real = RowSlabs.of

    def of(*arguments: object) -> RowSlabs | None:
        found.append(real(*arguments))  # pyright: ignore[reportArgumentType]
        return found[-1]

    whole, slabs = ((out / name).with_suffix(".gguf" if dialect == "gguf" else "") for name in ("whole", "slabs"))
    with monkeypatch.context() as patch:
        patch.setattr("breccia_bridges.production.RowSlabs.of", lambda *_: None)
        convert(source, whole, spec, dialect=dialect, verify="bytes")
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "SLAB", 1 << 14)
        patch.setattr("breccia_bridges.production.RowSlabs.of", of)
        convert(source, slabs, spec, dialect=dialect, verify="bytes")
    assert len(found) >= len(SHAPES) and None not in found, "all are written by slabs"
    assert contents(slabs) == contents(whole)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_value_that_is_written_by_slabs_has_the_bytes_of_one_that_is_taken_whole(
    dialect: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(dialect, DIALECTS[dialect].recipes[0], source, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(("dialect", "spec"), [(name, spec) for name, one in DIALECTS.items() for spec in one.recipes[1:]])
def test_so_has_one_of_every_other_recipe(
    dialect: str, spec: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(dialect, spec, source, tmp_path, monkeypatch)


def test_most_dialects_that_are_written_store_rows_apart() -> None:
    written = {name for name, one in registry().dialects.items() if one.write}
    # The first two flatten or turn whole tensors; halves of the matrix share bytes in the others.
    assert written - set(DIALECTS) == {"bitsandbytes", "gpt_oss", "hqq", "quanto"}
