"""`merge`: a change survives in quantized weights, nothing else changes, and what is lost is said or refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from adapters import factors, saved
from program import Run
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import breccia
from breccia import (
    CorruptFileError,
    InexactError,
    NonFiniteError,
    OptionError,
    ScaledTensor,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from breccia.backend import components, registry
from breccia.bridges import convert, load_checkpoint, load_safetensors, merge, save_safetensors
from breccia_bridges import merge as merge_module
from breccia_bridges import merge_plan, merging
from breccia_bridges.adapters import LowRank
from breccia_bridges.staging import staging_folder

LAYER = "model.layers.0."
Q, DOWN = f"{LAYER}self_attn.q_proj", f"{LAYER}mlp.down_proj"
HIDDEN, WIDE = 256, 512
SHAPES = {
    "model.embed_tokens.weight": (64, HIDDEN),
    **{f"{LAYER}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"},
    f"{DOWN}.weight": (HIDDEN, WIDE),
    f"{LAYER}input_layernorm.weight": (HIDDEN,),
    "model.norm.weight": (HIDDEN,),
}
#: What `saved` says: lora_alpha over r.
SCALE = 2.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {name: (rng.standard_normal(shape) / 16).astype(ml_dtypes.bfloat16) for name, shape in SHAPES.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """The adapter of two layers."""
    return saved(tmp_path / "adapter", {Q: factors(HIDDEN, HIDDEN), DOWN: factors(HIDDEN, WIDE, seed=1)})


def change(adapter: Path, layer: str, scale: float = SCALE) -> np.ndarray:
    """The change by the definition of LoRA, FP64."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{layer}.lora_{side}.weight"].astype(np.float64) for side in "AB")
    return scale * (b @ a)


def decoded(value: Any) -> np.ndarray:
    return (breccia.dequantize(value) if isinstance(value, ScaledTensor) else np.asarray(value)).astype(np.float64)


def surviving(before: Any, after: Any, adapter: Path, *layers: str) -> float:
    """The projection of what changed on the change, as a share of it."""
    along = wanted = 0.0
    for layer in layers:
        d, made = change(adapter, layer), decoded(after[f"{layer}.weight"]) - decoded(before[f"{layer}.weight"])
        along, wanted = along + float((d * made).sum()), wanted + float((d * d).sum())
    return along / wanted


#: Dialects with the first of their recipes and others of another kind. Their folders are not cut by layers of experts.
WRITTEN = [
    (one.name, spec)
    for one in registry().dialects.values()
    if one.write and not one.file and one.name != "gpt_oss"
    for spec in one.recipes
]
FIRST = {name: spec for name, spec in reversed(WRITTEN)}
#: One of each class of recipes of a dialect; `make slow` takes every setting of them.
EACH_CLASS = {(name, spec.partition(",")[0]): (name, spec) for name, spec in reversed(WRITTEN)}.values()


def check_merged(model: Path, adapter: Path, tmp_path: Path, dialect: str | None, spec: str) -> None:
    """Merge into a folder of a dialect, and compare every tensor and file with those of before."""
    convert(model, tmp_path / "before", spec, dialect=dialect)
    report = merge(tmp_path / "before", adapter, tmp_path / "after", min_share=-1)
    before, after = (load_checkpoint(tmp_path / folder) for folder in ("before", "after"))
    assert {t.name for t in report.tensors} == {f"{Q}.weight", f"{DOWN}.weight"} and list(before) == list(after)
    # FP32 sums of w + d: each rounds by 2^-24 of w, whose norm is 60 times that of d.
    assert report.share == pytest.approx(surviving(before, after, adapter, Q, DOWN), abs=1e-5)
    assert report.share > 0.9 or breccia.recipe(spec).format.element.bits < 4
    files = {path.name: path.read_bytes() for path in (tmp_path / "before").iterdir()}
    assert files.keys() == {path.name for path in (tmp_path / "after").iterdir()}
    for name, content in files.items():
        if name != "model.safetensors":
            assert (tmp_path / "after" / name).read_bytes() == content, name
    for name in before:
        if name not in (f"{Q}.weight", f"{DOWN}.weight"):
            assert (
                breccia.bytes_equal(before[name], after[name])
                if isinstance(before[name], ScaledTensor)
                else (before[name].tobytes() == after[name].tobytes())
            )
    check_unchanged_blocks(before[f"{Q}.weight"], after[f"{Q}.weight"], change(adapter, Q) != 0)


def check_unchanged_blocks(before: ScaledTensor, after: ScaledTensor, changed: np.ndarray) -> None:
    """Blocks without a change have the same codes and scales: slices of one row and one block of columns."""
    m, k = before.recipe.layout.block()
    if before.axis != -1 or m != 1 or not k:
        assert np.array_equal(decoded(before)[~changed], decoded(after)[~changed]) or m != 1 or not k
        return
    rows, columns = before.shape
    for row in range(0, rows, 16):
        for start in range(0, columns, k):
            if not changed[row, start : start + k].any():
                one, other = (st[row : row + 1, start : start + k] for st in (before, after))
                assert {n: p.tobytes() for n, p in components(one).items()} == {
                    n: p.tobytes() for n, p in components(other).items()
                }


@pytest.mark.parametrize("spec", ["nvfp4", "int4,group_size=32", "fp8_block", "mxfp4"])
def test_a_change_survives_in_our_own_files_and_other_bytes_stay(spec: str, model: Path, adapter: Path, tmp_path: Path) -> None:
    check_merged(model, adapter, tmp_path, None, spec)


@pytest.mark.parametrize("dialect", [name for name in FIRST if name in ("compressed_tensors", "awq", "mlx", "torchao")])
def test_a_change_survives_in_the_files_of_other_libraries(dialect: str, model: Path, adapter: Path, tmp_path: Path) -> None:
    check_merged(model, adapter, tmp_path, dialect, FIRST[dialect])


@pytest.mark.long
@pytest.mark.parametrize(
    ("dialect", "spec"), [each if each in EACH_CLASS else pytest.param(*each, marks=pytest.mark.slow) for each in WRITTEN]
)
def test_a_change_survives_in_every_dialect_and_recipe(
    dialect: str, spec: str, model: Path, adapter: Path, tmp_path: Path
) -> None:
    check_merged(model, adapter, tmp_path, dialect, spec)


def test_rounding_to_the_nearest_code_loses_the_change_that_feedback_keeps(
    model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that a merge must find: every code stays, and nothing is written."""
    convert(model, tmp_path / "before", "nvfp4")
    fed = merging.with_feedback
    monkeypatch.setattr(merging, "with_feedback", lambda *given: fed(*given[:5], np.zeros_like(given[5]), given[6]))
    listed = sorted(tmp_path.iterdir())
    with pytest.raises(InexactError, match=r"of the change survives in .*before, least in ") as caught:
        merge(tmp_path / "before", adapter, tmp_path / "after")
    assert caught.value.found["share"] < 0.3 and sorted(tmp_path.iterdir()) == listed
    assert "90.0% are asked for. Nothing was written." in str(caught.value)
    report = merge(tmp_path / "before", adapter, tmp_path / "after", min_share=0)
    assert report.share == caught.value.found["share"]
    before, after = (load_checkpoint(tmp_path / folder) for folder in ("before", "after"))
    assert report.share == pytest.approx(surviving(before, after, adapter, Q, DOWN), abs=1e-5)


def test_the_share_that_the_message_gives_is_accepted(model: Path, adapter: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "before", "int,bits=2,group_size=64")
    with pytest.raises(InexactError) as caught:
        merge(tmp_path / "before", adapter, tmp_path / "after", min_share=0.999)
    given = float(str(caught.value).rpartition("min_share=")[2].partition(" ")[0])
    assert merge(tmp_path / "before", adapter, tmp_path / "after", min_share=given).share >= given


def test_an_adapter_of_zeros_changes_no_byte(model: Path, tmp_path: Path) -> None:
    a, b = factors(HIDDEN, HIDDEN)
    adapter = saved(tmp_path / "adapter", {Q: (a, 0 * b)})
    convert(model, tmp_path / "before", "mxfp4")
    report = merge(tmp_path / "before", adapter, tmp_path / "after")
    assert report.share == 1 and report.tensors[0].changed == 0
    assert (tmp_path / "before" / "model.safetensors").read_bytes() == (tmp_path / "after" / "model.safetensors").read_bytes()


def test_scales_grow_where_values_do_and_only_there(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((16, 128)).astype(np.float32)
    st = breccia.cast(x, "nvfp4")
    a, b = np.zeros((1, 128)), np.zeros((16, 1))
    a[0, :16], b[3] = 20, 1
    found = merging.merged(st, LowRank(a, b))
    assert (found.blocks, found.changed, found.rescaled) == (128, 1, 1)
    assert found.tensor.global_scale == st.global_scale
    differ = found.tensor.scale != st.scale
    assert differ.sum() == 1 and differ[3, 0] and found.survival.share > 0.2  # the tensor's scale bounds that of the block


@pytest.mark.parametrize("axis", [-1, -2])
def test_blocks_run_along_either_axis(axis: int) -> None:
    x = np.random.default_rng(0).standard_normal((128, 96)).astype(np.float32)
    a, b = factors(128, 96, size=0.01)
    for spec in ("int4,group_size=32", "q4_0"):
        found = merging.merged(breccia.cast(x, spec, axis=axis), LowRank(a.astype(float), b.astype(float)))
        assert found.survival.share > 0.9 and found.tensor.axis == axis


def test_weights_that_are_not_quantized_get_the_change_too(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "before", "int8", exclude=["*q_proj*"])
    adapter = saved(tmp_path / "adapter", {Q: factors(HIDDEN, HIDDEN, size=0.02)})
    report = merge(tmp_path / "before", adapter, tmp_path / "after")
    before, after = (load_safetensors(tmp_path / folder)[f"{Q}.weight"] for folder in ("before", "after"))
    wanted = (before.astype(np.float32) + change(adapter, Q).astype(np.float32)).astype(ml_dtypes.bfloat16)
    assert after.dtype == ml_dtypes.bfloat16 and np.array_equal(after, wanted)
    assert report.tensors[0].stored_as == "BF16" and report.tensors[0].blocks == 0


def test_gguf_files_stay_gguf_files(model: Path, adapter: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDE,
        "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 64, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
        "dtype": "bfloat16",
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").unlink()
    tensors = load_file(model / "model.safetensors")
    gate = {f"{LAYER}mlp.{n}_proj.weight": tensors[f"{DOWN}.weight"].T.copy() for n in ("gate", "up")}
    gate[f"{LAYER}post_attention_layernorm.weight"] = tensors["model.norm.weight"]
    save_file({**tensors, **gate}, model / "model.safetensors", {"format": "pt"})
    convert(model, tmp_path / "before.gguf", "q4_0", dialect="gguf")
    report = merge(tmp_path / "before.gguf", adapter, tmp_path / "after.gguf")
    before, after = (load_checkpoint(tmp_path / name) for name in ("before.gguf", "after.gguf"))
    assert report.share == pytest.approx(surviving(before, after, adapter, Q, DOWN), abs=1e-5) and report.share > 0.9
    others = [
        name for name in before if isinstance(before[name], ScaledTensor) and name not in (f"{Q}.weight", f"{DOWN}.weight")
    ]
    assert others and all(breccia.bytes_equal(before[name], after[name]) for name in others)


# ------------------------------------------------------------------------------------------------ the format of PEFT


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"lora_alpha": 3}, 3 / 4),
        ({"lora_alpha": 3, "use_rslora": True}, 3 / 2),
        ({"lora_alpha": 1, "alpha_pattern": {"v_proj": 5, "self_attn.q_proj": 6}}, 6 / 4),
        ({"r": 16, "rank_pattern": {"q_proj": 4}, "lora_alpha": 8}, 8 / 4),
    ],
)
def test_the_change_has_pefts_scale(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((128, 128)).astype(np.float32) / 16
    save_safetensors({f"{Q}.weight": breccia.cast(x, "int8")}, tmp_path / "before.safetensors")
    adapter = saved(tmp_path / "adapter", {Q: factors(128, 128, size=0.02)}, **config)
    merge(tmp_path / "before.safetensors", adapter, tmp_path / "after.safetensors")
    before, after = (decoded(load_safetensors(tmp_path / f"{name}.safetensors")[f"{Q}.weight"]) for name in ("before", "after"))
    wanted = change(adapter, Q, scale)
    # Codes of 8 bits: the change is of about one step, so its share is one within a few errors over the root of 128².
    assert ((after - before) * wanted).sum() / (wanted * wanted).sum() == pytest.approx(1, abs=0.02)


def test_layers_of_gpt2_are_stored_turned(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32) / 16
    save_safetensors({"h.0.c_attn.weight": breccia.cast(x, "int8")}, tmp_path / "before.safetensors")
    layers = {"h.0.c_attn": factors(128, 64, size=0.02)}
    adapter = saved(tmp_path / "adapter", layers, fan_in_fan_out=True)
    assert merge(tmp_path / "before.safetensors", adapter, tmp_path / "after.safetensors").share > 0.98
    before, after = (decoded(load_safetensors(tmp_path / f"{n}.safetensors")["h.0.c_attn.weight"]) for n in ("before", "after"))
    wanted = change(adapter, "h.0.c_attn").T
    assert ((after - before) * wanted).sum() / (wanted * wanted).sum() == pytest.approx(1, abs=0.02)
    adapter = saved(tmp_path / "adapter", layers)
    with pytest.raises(ShapeError, match=r"has shape \(64, 128\), and the change of .* has \(128, 64\)"):
        merge(tmp_path / "before.safetensors", adapter, tmp_path / "again.safetensors")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', and adapters of LORA are merged"),
        ({"use_dora": True}, "use_dora=True: DoRA also scales the columns"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]: these modules are trained whole"),
        ({"lora_bias": True}, "lora_bias=True: the bias of these layers is trained too"),
        ({"layer_replication": [[0, 2]]}, "has more layers than the checkpoint"),
        ({"target_parameters": ["experts.down_proj"]}, "parameters of experts"),
        ({"trainable_token_indices": [3]}, "rows of the embedding are trained too"),
        ({"alora_invocation_tokens": [3]}, "applies to a part of the tokens"),
        ({"use_qalora": True}, "use_qalora=True: breccia does not know this variant of LoRA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa': this initialization changes the weights"),
    ],
)
def test_variants_that_do_more_are_refused_by_name(config: dict[str, Any], message: str, model: Path, tmp_path: Path) -> None:
    adapter = saved(tmp_path / "adapter", {Q: factors(128, 128)}, **config)
    with pytest.raises(UnsupportedError, match=message):
        merge(model, adapter, tmp_path / "after")


def rewritten(adapter: Path, **tensors: np.ndarray | None) -> None:
    """Replace tensors of an adapter, by the ends of their names; None removes one."""
    known = load_file(adapter / "adapter_model.safetensors")
    for end, array in tensors.items():
        known = {n: a for n, a in known.items() if not n.endswith(f"{end}.weight")}
        if array is not None:
            known[f"base_model.model.{Q}.{end}.weight"] = array
    save_file(known, adapter / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"lora_B": None}, CorruptFileError, "and needs lora_A of .rank, inputs. and lora_B"),
        ({"lora_B": np.ones((128, 3), np.float32)}, CorruptFileError, "and needs lora_A of .rank, inputs. and lora_B"),
        (
            {"lora_A": np.ones((2, 128), np.float32), "lora_B": np.ones((128, 2), np.float32)},
            CorruptFileError,
            "has rank 2, and its config says r=4, lora_alpha=8. The two files are of different adapters",
        ),
        ({"lora_A": np.full((4, 128), np.nan, np.float32)}, NonFiniteError, "has NaN or Inf; the training has failed"),
        ({"lora_A": np.ones((4, 128), np.int32)}, UnsupportedError, "is I32 of shape .4, 128., and adapters of linear"),
        ({"lora_A": np.ones((4, 8, 3, 3), np.float32)}, UnsupportedError, "adapters of linear layers have"),
        ({"lora_embedding_A": np.ones((4, 8), np.float32)}, UnsupportedError, "no lora_A or lora_B of a linear layer"),
        ({"lora_magnitude_vector": np.ones(8, np.float32)}, UnsupportedError, "no lora_A or lora_B of a linear layer"),
        ({"lora_A": None, "lora_B": None}, UnsupportedError, "has no tensor"),
    ],
)
def test_adapters_that_contradict_themselves_are_refused(
    tensors: dict[str, Any], error: type[Exception], message: str, model: Path, tmp_path: Path
) -> None:
    adapter = saved(tmp_path / "adapter", {Q: factors(128, 128)})
    rewritten(adapter, **tensors)
    with pytest.raises(error, match=message):
        merge(model, adapter, tmp_path / "after")


def test_adapters_of_other_models_are_refused_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "before", "int8")
    other = saved(tmp_path / "other", {f"{LAYER}self_attn.qq_proj": factors(128, 128)})
    with pytest.raises(UnknownNameError, match=r"qq_proj.weight, which .* does not have; did you mean .*q_proj.weight'\?"):
        merge(tmp_path / "before", other, tmp_path / "after")
    norm = saved(tmp_path / "norm", {f"{LAYER}input_layernorm": factors(128, 128)})
    with pytest.raises(ShapeError, match=r"has shape \(256,\), and the change of .* has \(128, 128\)"):
        merge(tmp_path / "before", norm, tmp_path / "after")
    assert not (tmp_path / "after").exists() and not staging_folder(tmp_path / "after").exists()


def test_what_cannot_be_merged_is_said(model: Path, adapter: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "before", "int8")
    with pytest.raises(UnsupportedError, match="no tensor of .*model is quantized. Merge the adapter in PEFT"):
        merge(model, adapter, tmp_path / "after")
    with pytest.raises(FileNotFoundError, match="lacks adapter_config.json and adapter_model.safetensors"):
        merge(tmp_path / "before", model, tmp_path / "after")
    with pytest.raises(UnsupportedError, match="merge reads and writes files of this machine; https://host/model is a URL"):
        merge("https://host/model", adapter, tmp_path / "after")
    with pytest.raises(OptionError, match=r"min_share \(--min-share\) is a share of the change, at most 1, .*; got nan"):
        merge(tmp_path / "before", adapter, tmp_path / "after", min_share=math.nan)
    with pytest.raises(OptionError, match=r"takes about .* of memory for .*down_proj.weight, and the limit is 1.05 MB"):
        merge(tmp_path / "before", adapter, tmp_path / "after", max_memory="1MiB")
    with pytest.raises(OptionError, match="verify takes 'full', 'bytes', 'none'; got 'all'"):
        merge(tmp_path / "before", adapter, tmp_path / "after", verify="all")
    with pytest.raises(FileExistsError, match="exists; choose another name"):
        merge(tmp_path / "before", adapter, model)
    numbers = {"x.weight": np.ones((8, 128), np.int32), "y.weight": breccia.cast(np.ones((8, 128), np.float32), "int8")}
    save_safetensors(numbers, tmp_path / "numbers.safetensors")
    with pytest.raises(UnsupportedError, match="x.weight of .* is I32, not floating; nothing is added"):
        merge(tmp_path / "numbers.safetensors", saved(tmp_path / "x", {"x": factors(8, 128)}), tmp_path / "out.safetensors")
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(CorruptFileError, match="adapter_config.json is not readable"):
        merge(tmp_path / "before", adapter, tmp_path / "after")


def test_a_dialect_that_is_only_read_is_refused(
    model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(model, tmp_path / "before", "int4", dialect="compressed_tensors")

    def refuse(name: str, activations: None) -> None:
        raise UnsupportedError(f"{name} is only read.")

    monkeypatch.setattr(merge_plan.DialectWriter, "of", refuse)
    with pytest.raises(UnsupportedError, match="is only read. Convert .*before first, to one of these or to"):
        merge(tmp_path / "before", adapter, tmp_path / "after")


def test_a_dialect_whose_bytes_we_would_write_otherwise_is_refused(
    model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(model, tmp_path / "before", "int4", dialect="compressed_tensors")
    write = merge_plan.DialectWriter.arrays

    def other(self: Any, placed: Any, st: Any) -> Any:
        return {name: array ^ 1 if name.endswith("_packed") else array for name, array in write(self, placed, st).items()}

    monkeypatch.setattr(merge_plan.DialectWriter, "arrays", other)
    with pytest.raises(UnsupportedError, match="breccia writes .*_proj.weight_packed of compressed-tensors in another way"):
        merge(tmp_path / "before", adapter, tmp_path / "after")
    assert not (tmp_path / "after").exists() and not staging_folder(tmp_path / "after").exists()


def test_a_merge_that_is_interrupted_goes_on_with_the_same_bytes(
    model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(model, tmp_path / "before", "int4,group_size=32")
    merge(tmp_path / "before", adapter, tmp_path / "expected")
    merged, made = merge_plan.merged, list[tuple[int, ...]]()

    def once(st: ScaledTensor, change: LowRank) -> Any:
        if made:
            raise KeyboardInterrupt
        made.append(tuple(st.shape))
        return merged(st, change)

    with monkeypatch.context() as patch:
        patch.setattr(merge_plan, "merged", once)
        with pytest.raises(KeyboardInterrupt):
            merge(tmp_path / "before", adapter, tmp_path / "after")
    monkeypatch.setattr(merge_plan, "merged", lambda st, change: made.append(tuple(st.shape)) or merged(st, change))
    with pytest.warns(UserWarning, match="1 parts are chosen"):
        report = merge(tmp_path / "before", adapter, tmp_path / "after")
    assert sorted(made) == [(HIDDEN, HIDDEN), (HIDDEN, WIDE)] and len(report.tensors) == 2
    for path in (tmp_path / "expected").iterdir():
        assert (tmp_path / "after" / path.name).read_bytes() == path.read_bytes()


# ------------------------------------------------------------------------------------------------ on a text, and the command


def test_divergence_is_that_of_the_model_with_the_whole_change(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    import calibration_models as models

    torch.set_num_threads(1)  # threads that wait for each other take longer than products of 64 rows
    transformers.utils.logging.disable_progress_bar()

    source = models.saved("llama", tmp_path / "model")
    layers = {f"model.layers.{n}.mlp.up_proj": factors(96, 64, seed=n, size=0.03) for n in range(2)}
    adapter = saved(tmp_path / "adapter", layers)
    convert(source, tmp_path / "before", "int4,group_size=32")
    np.save(tmp_path / "ids.npy", models.IDS)
    report = merge(tmp_path / "before", adapter, tmp_path / "after", calibrate=tmp_path / "ids.npy", min_share=0)
    # The same by whole models, whose weights are decoded.
    before = load_checkpoint(tmp_path / "before")
    whole = {f"{name}.weight": decoded(before[f"{name}.weight"]) + change(adapter, name) for name in layers}
    save_safetensors(
        {n: whole.get(n, decoded(v)).astype(np.float32) for n, v in before.items()}, tmp_path / "whole.safetensors"
    )
    wanted, *others = (
        models.outputs("llama", tmp_path / name).log_softmax(-1).double() for name in ("whole.safetensors", "before", "after")
    )
    found = [float((wanted.exp() * (wanted - other)).sum(-1).mean()) for other in others]
    assert report.divergence == pytest.approx(found, rel=1e-3)  # FP32 models, whose rows run one by one here
    assert report.divergence_share == pytest.approx(1 - found[1] / found[0], abs=0.01) and found[1] < found[0]
    assert torch.is_grad_enabled()


def small_model(tmp_path: Path, size: float) -> tuple[Path, Path, np.ndarray]:
    """A quantized model of transformers, an adapter whose change has about this size, and token ids."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    import calibration_models as models

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    layers = {f"model.layers.{n}.mlp.up_proj": factors(96, 64, seed=n, size=size) for n in range(2)}
    convert(models.saved("llama", tmp_path / "model"), tmp_path / "before", "int4,group_size=32")
    return tmp_path / "before", saved(tmp_path / "adapter", layers), models.IDS[:2]


def test_a_change_that_survives_but_is_drowned_by_rounding_is_refused_on_a_text(tmp_path: Path, run: Run) -> None:
    """The change keeps its direction, and rounding adds errors of more than its norm: the outputs come no nearer."""
    source, adapter, ids = small_model(tmp_path, 0.0004)
    assert merge(source, adapter, tmp_path / "by_norm").share > 0.9
    with pytest.raises(InexactError, match="of the change's effect on the text survives") as refused:
        merge(source, adapter, tmp_path / "after", calibrate=ids)
    message = str(refused.value)
    assert refused.value.found["share"] < 0 and refused.value.found["min_share"] == 0.9
    assert "nats per token, and" in message and "of the change itself survives, with an error of 1." in message
    assert "90.0% are asked for. Nothing was written" in message and message.endswith("min_share=0.0 (--min-share).")
    assert not (tmp_path / "after").exists() and not staging_folder(tmp_path / "after").exists()
    report = merge(source, adapter, tmp_path / "after", calibrate=ids, min_share=0)
    assert report.divergence is not None and report.divergence_share == refused.value.found["share"]
    np.save(tmp_path / "ids.npy", ids)
    words = ("merge", str(source), str(adapter), str(tmp_path / "told"), "--calibrate", str(tmp_path / "ids.npy"))
    code, _, err = run(*words)
    assert code == 1 and "of the change's effect on the text survives" in err
    code, out, _ = run(*words[:3], str(tmp_path / "unmeasured"))
    assert code == 0 and "rounding changes the weights by more than the adapter does, and may cost more than it gains" in out
    code, out, _ = run(*words, "--min-share", "0")
    before, after = report.divergence
    assert (
        code == 0
        and "more than the adapter does" not in out
        and f"{after:.3g} per token from the model with the whole change; {before:.3g} without it (-" in out
    )
    for path in (tmp_path / "by_norm").iterdir():
        assert (tmp_path / "told" / path.name).read_bytes() == path.read_bytes()


def test_a_change_whose_effect_survives_passes_on_a_text(tmp_path: Path) -> None:
    source, adapter, ids = small_model(tmp_path, 0.01)
    report = merge(source, adapter, tmp_path / "after", calibrate=ids)
    assert report.divergence_share is not None and 0.9 < report.divergence_share < 1


def test_a_change_below_the_rounding_of_fp32_has_no_share_of_divergence(tmp_path: Path, run: Run) -> None:
    source, adapter, ids = small_model(tmp_path, 1e-7)
    report = merge(source, adapter, tmp_path / "after", calibrate=ids, min_share=0)
    assert report.divergence is not None and 0 < report.divergence[0] < 1e-9 and report.divergence_share is None
    np.save(tmp_path / "ids.npy", ids)
    words = ("--calibrate", str(tmp_path / "ids.npy"), "--min-share", "0")
    code, out, _ = run("merge", str(source), str(adapter), str(tmp_path / "told"), *words)
    assert code == 0 and "(below 1e-09, which rounding in FP32 alone costs: no share)" in out


def test_outputs_with_nan_are_refused_on_a_text(tmp_path: Path) -> None:
    source, adapter, ids = small_model(tmp_path, 0.01)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    with safe_open(source / "model.safetensors", "np") as file:
        save_file(tensors, source / "model.safetensors", file.metadata())
    with pytest.raises(NonFiniteError, match=r"the outputs of .*before, or of it with the change, have NaN or Inf on the text"):
        merge(source, adapter, tmp_path / "after", calibrate=ids)
    assert not (tmp_path / "after").exists()


def test_divergence_without_torch_is_refused_before_anything_is_written(
    model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(model, tmp_path / "before", "int8")
    monkeypatch.setattr(merge_module, "bridges", object())
    with pytest.raises(ImportError, match=r"calibrate= \(--calibrate\) runs the model in torch: "):
        merge(tmp_path / "before", adapter, tmp_path / "after", calibrate=np.arange(8))
    assert not (tmp_path / "after").exists()


def test_a_merge_with_another_config_does_not_go_on(
    model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(model, tmp_path / "before", "int8")
    merged, made = merge_plan.merged, list[int]()

    def once(st: ScaledTensor, change: LowRank) -> Any:
        made.append(1)
        if len(made) == 2:
            raise KeyboardInterrupt
        return merged(st, change)

    monkeypatch.setattr(merge_plan, "merged", once)
    with pytest.raises(KeyboardInterrupt):
        merge(tmp_path / "before", adapter, tmp_path / "after")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "lora_alpha": 5}))
    with pytest.raises(OptionError, match="it was another one .adapter: .* there, .* now"):
        merge(tmp_path / "before", adapter, tmp_path / "after")
    with pytest.warns(UserWarning, match="which an interrupted run left behind"):
        assert merge(tmp_path / "before", adapter, tmp_path / "after", restart=True).share > 0.9


def test_the_command_says_what_survives(model: Path, adapter: Path, tmp_path: Path, run: Run) -> None:
    convert(model, tmp_path / "before", "nvfp4")
    words = ("merge", str(tmp_path / "before"), str(adapter))
    code, out, _ = run(*words, str(tmp_path / "after"))
    assert code == 0 and "2 tensors changed; all others, and blocks without a change, keep every byte" in out
    assert "survives" in out and "of the change" in out and f"{Q}.weight" in out
    code, out, _ = run(*words, str(tmp_path / "again"), "--json", "--verify", "full")
    listed = json.loads(out)
    assert code == 0 and listed["share"] > 0.9 and listed["tensors"][0]["rank"] == 4 and listed["divergence"] is None
    for path in (tmp_path / "after").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    code, _, err = run(*words, str(tmp_path / "third"), "--min-share", "1")
    assert code == 1 and "100.0% are asked for. Nothing was written" in err and not (tmp_path / "third").exists()
    code, out, _ = run("merge", "--help")
    assert code == 0 and "breccia merge model-int4 adapter model-int4-merged" in out
