"""`convert(..., calibrate=)`: less error at the same bytes, what is reported and refused, and a run that goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from calibration_models import IDS, model, outputs, saved, share
from program import Run

import breccia
from breccia import NonFiniteError, OptionError, UnsupportedError
from breccia.bridges import convert, load_checkpoint, save_safetensors
from breccia_bridges.calibration import Calibration
from breccia_bridges.staging import staging_folder

pytestmark = pytest.mark.usefixtures("no_progress_bars", "one_thread")
INT4 = "int4,group_size=32"


@pytest.fixture
def no_progress_bars() -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


@pytest.fixture
def one_thread() -> Any:
    """Threads that wait for each other in products of 64 rows take longer than the products."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved("llama", tmp_path / "model")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_gptq_halves_the_error_of_outputs_at_the_same_bytes(source: Path, tmp_path: Path) -> None:
    plain = convert(source, tmp_path / "plain", INT4)
    report = convert(source, tmp_path / "gptq", INT4, calibrate=IDS)
    expected = outputs("llama", source)
    assert share(outputs("llama", tmp_path / "gptq"), expected) < 0.5 * share(outputs("llama", tmp_path / "plain"), expected)
    assert (report.bytes_out, report.recipes) == (plain.bytes_out, plain.recipes)
    assert len(report.calibrated) == len(report.quantized) == 14 and report.calibration == "gptq"
    record = next(t for t in report.tensors if t.name.endswith("up_proj.weight")).calibration
    assert record and record["tokens"] == IDS.size and record["damping"] == 0.01 and record["output_sqnr"] > 15
    # The first block reads embeddings, so its inputs span no more dimensions than the text has different tokens.
    assert [w for w in report.warnings if "layers.1" in w or "mlp" in w or "o_proj" in w] == []
    assert len(report.warnings) == 1 and f"inputs span {len(np.unique(IDS))} of 64 dimensions" in report.warnings[0]


@pytest.mark.long
def test_importance_searches_scales_for_the_columns_that_count(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "search", f"{INT4},scale_rule=mse")
    report = convert(source, tmp_path / "out", INT4, calibrate=IDS, method="importance")
    expected = outputs("llama", source)
    assert share(outputs("llama", tmp_path / "out"), expected) < share(outputs("llama", tmp_path / "search"), expected)
    assert report.recipe and report.recipe.spec == f"{INT4},scale_rule=mse"


@pytest.mark.long
@pytest.mark.parametrize("spec", ["int4,symmetric=false", "q4_k", "fp8_block,block_m=128", "mxfp4,scale_rule=floor"])
def test_recipes_without_a_search_get_error_feedback_under_their_own_scales(spec: str, source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out", spec, calibrate=IDS)
    plain = convert(source, tmp_path / "plain", spec)
    assert report.recipe == plain.recipe == breccia.recipe(spec) and len(report.calibrated) == 14
    expected = outputs("llama", source)
    assert share(outputs("llama", tmp_path / "out"), expected) < share(outputs("llama", tmp_path / "plain"), expected)


@pytest.mark.long
def test_awq_moves_scales_into_the_layers_before(tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "model", torch.bfloat16)
    convert(source, tmp_path / "plain", INT4)
    report = convert(source, tmp_path / "awq", INT4, calibrate=IDS, method="awq,grid=8")
    expected = outputs("llama", source)
    assert share(outputs("llama", tmp_path / "awq"), expected) < share(outputs("llama", tmp_path / "plain"), expected)
    folded = {t.name: t.calibration["folded_into"] for t in report.tensors if t.calibration and "folded_into" in t.calibration}
    norm = "model.layers.0.input_layernorm.weight"
    assert folded["model.layers.0.self_attn.q_proj.weight"] == norm and norm in folded
    assert folded["model.layers.0.mlp.down_proj.weight"] == "model.layers.0.mlp.up_proj.weight"
    before, after = (load_checkpoint(folder, framework="torch")[norm] for folder in (source, tmp_path / "awq"))
    assert after.dtype == before.dtype == torch.bfloat16 and not torch.equal(before, after)


@pytest.mark.long
def test_a_norm_whose_output_goes_elsewhere_too_keeps_its_weight(tmp_path: Path) -> None:
    source = saved("bert", tmp_path / "model")
    report = convert(source, tmp_path / "awq", INT4, calibrate=IDS, method="awq,grid=4")
    assert not any(t.calibration and "folded_into" in t.calibration for t in report.tensors)


@pytest.mark.long
def test_experts_get_the_tokens_that_are_routed_to_them(tmp_path: Path) -> None:
    source = saved("qwen3_moe", tmp_path / "model")
    convert(source, tmp_path / "plain", INT4)
    report = convert(source, tmp_path / "gptq", INT4, calibrate=IDS)
    expected = outputs("qwen3_moe", source)
    assert share(outputs("qwen3_moe", tmp_path / "gptq"), expected) < 0.8 * share(
        outputs("qwen3_moe", tmp_path / "plain"), expected
    )
    tokens = {t.name: t.calibration["tokens"] for t in report.tensors if t.calibration}
    for layer in range(2):
        names = [f"model.layers.{layer}.mlp.experts.{n}.down_proj.weight" for n in range(4)]
        assert sum(tokens[name] for name in names) == 2 * IDS.size  # two experts for each token


@pytest.mark.long
def test_experts_without_tokens_are_cast_and_those_with_few_are_damped(tmp_path: Path) -> None:
    source = saved("qwen3_moe", tmp_path / "model")
    convert(source, tmp_path / "plain", f"{INT4},scale_rule=mse")
    report = convert(source, tmp_path / "gptq", INT4, calibrate=np.full((1, 4), 7))
    unreached = [t.name for t in report.tensors if t.calibration and t.calibration["tokens"] == 0]
    assert unreached and all("experts" in name for name in unreached)
    said = "\n".join(report.warnings)
    assert "the text does not reach it, so it is cast without calibration" in said
    assert "4 tokens for 64 inputs: damped more" in said
    plain, chosen = (load_checkpoint(tmp_path / name) for name in ("plain", "gptq"))
    assert all(breccia.bytes_equal(plain[name], chosen[name]) for name in unreached)


def test_a_text_that_says_one_thing_over_and_over_is_reported_for_each_layer(source: Path, tmp_path: Path) -> None:
    """One repeated token: all rows of a layer's inputs are equal, so their second moment has rank 1."""
    report = convert(source, tmp_path / "out", INT4, calibrate=np.full((4, 32), 7))
    (up,) = (t for t in report.tensors if t.name == "model.layers.0.mlp.up_proj.weight")
    said = "inputs span 1 of 64 dimensions: their second moment is singular, and inverted by damping alone"
    assert up.calibration and up.calibration["note"] == said
    assert any(w.startswith("calibration: ") and w.endswith(f": {said}.") for w in report.warnings)


def test_damping_that_grows_is_reported_for_each_layer(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out", INT4, calibrate=np.full((4, 32), 7), method="gptq,damping=1e-19")
    notes = [t.calibration["note"] for t in report.calibrated if t.calibration]
    grown = [note for note in notes if "; damping grew to 1e-1" in note and "could not be inverted under less" in note]
    assert grown and all(float(t.calibration["damping"]) > 1e-19 for t in report.calibrated if t.calibration["note"] in grown)


@pytest.mark.long
def test_layers_that_engines_compute_as_one_keep_one_scale(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", "nvfp4,global_sense=divisor", calibrate=IDS, dialect="compressed_tensors")
    values = load_checkpoint(tmp_path / "out")
    scales = {values[f"model.layers.0.self_attn.{n}_proj.weight"].global_scale.tobytes() for n in "qkv"}
    assert len(scales) == 1


@pytest.mark.long
def test_a_head_outside_the_blocks_is_calibrated_too(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out", INT4, include=["lm_head*"], calibrate=IDS)
    head = next(t for t in report.tensors if t.name == "lm_head.weight")
    assert head.calibration and head.calibration["tokens"] == IDS.size


def test_an_embedding_that_is_the_head_too_is_calibrated_by_the_inputs_of_the_head(tmp_path: Path) -> None:
    source, name = saved("tied", tmp_path / "model"), "model.embed_tokens.weight"
    options: dict[str, Any] = {"include": ["*embed*"], "exclude": ["*layers*"]}
    convert(source, tmp_path / "plain", INT4, **options)
    report = convert(source, tmp_path / "out", INT4, **options, calibrate=IDS)
    table = next(t for t in report.tensors if t.name == name)
    assert table.calibration and table.calibration["tokens"] == IDS.size and table.calibration["damping"] == 0.01
    assert not report.warnings and report.calibrated == [table]
    # The head's own error, under the hidden states of the model in high precision.
    made = model("tied")
    with torch.no_grad():
        hidden = made.model(torch.as_tensor(IDS)).last_hidden_state
    weight = load_checkpoint(source)[name]
    errors = [
        float((hidden @ torch.from_numpy(breccia.dequantize(load_checkpoint(tmp_path / folder)[name]) - weight).T).norm())
        for folder in ("plain", "out")
    ]
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.long
def test_a_smaller_limit_of_memory_runs_a_block_several_times_with_the_same_bytes(source: Path, tmp_path: Path) -> None:
    from breccia_torch.hf.calibrating import _Run  # pyright: ignore[reportPrivateUsage]

    convert(source, tmp_path / "all", INT4, calibrate=IDS)
    runs: list[int] = []
    observed, room = _Run._observed, _Run._room  # pyright: ignore[reportPrivateUsage]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Run, "_observed", lambda self, keys, of: runs.append(len(keys)) or observed(self, keys, of))
        patch.setattr(_Run, "_room", lambda self, limit: min(room(self, limit), 8 * 96**2))
        convert(source, tmp_path / "one", INT4, calibrate=IDS)
    assert max(runs) == 2 and len(runs) > 6  # two second moments of 64 inputs, or one of 96
    assert contents(tmp_path / "all") == contents(tmp_path / "one")


@pytest.mark.long
def test_a_limit_that_a_layer_exceeds_is_refused_with_the_one_to_give(source: Path, tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"calibration takes about .* of memory for model.layers.\d.mlp.down_proj.weight"
    ) as e:
        convert(source, tmp_path / "out", INT4, calibrate=IDS, max_memory="300MiB")
    give = str(e.value).partition("--max-memory ")[2].partition(")")[0]
    convert(source, tmp_path / "out", INT4, calibrate=IDS, max_memory=give)


class Stop(Exception):
    """Ends a conversion; no error of breccia."""


def test_a_run_that_was_stopped_goes_on_after_the_last_block_with_the_same_bytes(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "whole", INT4, calibrate=IDS, method="awq,grid=4")

    def stop(name: str, size: int) -> None:
        raise Stop

    out = tmp_path / "out"
    with pytest.raises(Stop):
        convert(source, out, INT4, calibrate=IDS, method="awq,grid=4", advance=stop)
    assert not out.exists() and (staging_folder(out) / "calibrated").is_dir()
    with pytest.raises(OptionError, match=r"it was another one \(calibration: awq,grid=4 on .* there, gptq on .* now\)"):
        convert(source, out, INT4, calibrate=IDS)
    told: list[str] = []
    with pytest.warns(UserWarning, match="1 parts are chosen, 0 tensors are written"):
        convert(source, out, INT4, calibrate=IDS, method="awq,grid=4", advance=lambda name, size: told.append(name))
    assert contents(out) == contents(tmp_path / "whole")
    assert not staging_folder(out).exists()


@pytest.mark.long
def test_a_url_gets_the_bytes_of_a_folder_after_an_interruption_too(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec comes with breccia-bridges[remote]")
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache" / name)
    store, url = fsspec.filesystem("memory"), f"memory://{tmp_path.name}"
    options: dict[str, Any] = {"calibrate": IDS, "method": "awq,grid=4", "max_shard_size": 40_000}
    here = convert(source, tmp_path / "here", INT4, **options)
    told: list[str] = []

    def stop(name: str, size: int) -> None:
        told.append(name)
        if len(told) == 3 * len(here.tensors) - 2:  # all are calibrated and written, and most verified
            raise Stop

    with pytest.raises(Stop):
        convert(source, url, INT4, **options, advance=stop)
    assert list(store.find(f"/{tmp_path.name}/.breccia-staging"))
    with pytest.warns(UserWarning, match="3 parts are chosen"):
        there = convert(source, url, INT4, **options)
    assert there.tensors == here.tensors and there.calibrated == here.calibrated
    root = f"/{tmp_path.name}/"
    assert {name.removeprefix(root): store.cat_file(name) for name in store.find(root)} == contents(tmp_path / "here")
    assert not any((tmp_path / "cache").rglob("*staging*"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"engine": "ray"},
            r"runs the model in this process, and engine='ray' \(--engine ray\) runs in others. Use engine='local'",
        ),
        ({"source": "memory://m"}, r"runs a model that transformers opens from disk; memory://m is a URL. Download it first"),
    ],
)
def test_other_machines_and_urls_as_the_source_are_refused(
    change: dict[str, str], said: str, source: Path, tmp_path: Path
) -> None:
    if "source" in change:
        pytest.importorskip("fsspec", reason="fsspec comes with breccia-bridges[remote]")
    given: dict[str, Any] = {"source": source, "destination": tmp_path / "out", "recipe": INT4, "calibrate": IDS, **change}
    with pytest.raises(OptionError, match=said):
        convert(**given)
    assert not staging_folder(tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize("dialect", [None, "compressed_tensors"])
def test_slabs_of_a_smaller_size_have_the_same_bytes(
    dialect: str | None, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "whole", INT4, calibrate=IDS, dialect=dialect, verify="bytes")
    monkeypatch.setattr("breccia.kernels.measuring.SLAB", 32 * 64)
    convert(source, tmp_path / "slabs", INT4, calibrate=IDS, dialect=dialect, verify="bytes")
    assert contents(tmp_path / "slabs") == contents(tmp_path / "whole")


@pytest.mark.long
def test_a_block_whose_file_was_damaged_is_calibrated_again(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "whole", INT4, calibrate=IDS)
    out = tmp_path / "out"

    def stop(name: str, size: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        convert(source, out, INT4, calibrate=IDS, advance=stop)
    (file,) = (staging_folder(out) / "calibrated").iterdir()
    file.write_bytes(file.read_bytes()[:-64] + bytes(64))
    with pytest.warns(UserWarning, match="goes on"):
        convert(source, out, INT4, calibrate=IDS)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.long
def test_nan_in_the_inputs_of_a_layer_names_it_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(source)
    values = {name: np.array(checkpoint[name]) for name in checkpoint}
    values["model.layers.0.mlp.down_proj.weight"][3] = np.nan
    save_safetensors(values, source / "model.safetensors", force=True)
    with pytest.raises(NonFiniteError, match=r"the inputs of model.layers.1.self_attn.q_proj.weight have NaN or Inf"):
        convert(source, tmp_path / "out", INT4, calibrate=IDS)
    assert not (tmp_path / "out").exists() and not staging_folder(tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"calibrate": IDS + 60},
            r"the token ids go from 60 to 123, and LlamaForCausalLM has 64. They are of another tokenizer",
        ),
        ({"calibrate": np.resize(IDS, (1, 65))}, r"the texts have 65 tokens, and LlamaForCausalLM takes 64. Cut them"),
        ({"method": "awq"}, r"method='awq' \(--method\) is for calibration: give calibrate= \(--calibrate\), or leave it out"),
        ({"calibrate": IDS, "device": "tpux"}, r"device='tpux' \(--device\): torch has none here \(.*\). Use 'cpu'"),
        ({"device": "cuda"}, r"device='cuda' \(--device\) is for calibration"),
        (
            {"calibrate": IDS / 2},
            r"token ids: integers of shape \(tokens,\) or \(texts, length\); got float64 of shape \(6, 32\)",
        ),
        (
            {"calibrate": IDS, "method": "gtpq"},
            r"method \(--method\) is one of importance, gptq, awq; got 'gtpq'; did you mean",
        ),
        ({"calibrate": IDS, "method": "gptq,damping=2"}, r"damping must lie in 0 .. 1, got 2"),
        ({"calibrate": IDS, "method": "gptq,damp=1"}, r"method 'gptq' has no field 'damp'"),
        (
            {"calibrate": IDS, "recipe": "none"},
            r"calibrate= \(--calibrate\) chooses codes, and this conversion keeps all codes",
        ),
        ({"calibrate": IDS, "exact": True}, r"exact=True \(--exact\) changes no value, and calibrate="),
        (
            {"calibrate": IDS, "recipe": "fp8_block", "method": "importance"},
            r"weighs the search of scales.*which fp8_block does not",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(options: dict[str, Any], said: str, source: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"recipe": INT4, **options}
    with pytest.raises(OptionError, match=said):
        convert(source, tmp_path / "out", **given)
    assert not staging_folder(tmp_path / "out").exists()


@pytest.mark.parametrize("words", ["convert {0} {1} --recipe int4", "why {0} {0}", "merge {0} {1} {1}"])
def test_a_file_to_calibrate_on_that_cannot_be_read_is_refused(words: str, source: Path, tmp_path: Path, run: Run) -> None:
    paths = {kind: tmp_path / kind for kind in ("missing.npy", "missing.txt", "empty.npy", "latin.txt")}
    paths["empty.npy"].touch()
    paths["latin.txt"].write_bytes("café".encode("latin-1"))
    takes, absent = " takes the path of a text in UTF-8, or of an .npy file of token ids; ", " cannot be read (No such file or "
    said = dict.fromkeys(paths, f"{takes}{{}}{absent}directory). Give a file that exists.")
    said["empty.npy"] = ": {} is not an array of token ids (No data left in file). Write one by numpy.save."
    said["latin.txt"] = ": {} is no text in UTF-8 (unexpected end of data at byte 3). Convert it, or give token ids (.npy)."
    for kind, path in paths.items():
        code, _, err = run(*words.format(source, tmp_path / "other").split(), "--calibrate", str(path))
        assert code == 1 and f"calibrate (--calibrate){said[kind].format(path)}" in err


@pytest.mark.long
def test_a_model_that_takes_more_than_token_ids_is_refused(tmp_path: Path) -> None:
    import transformers

    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2, "vocab_size": 64}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(tmp_path / "model")
    with pytest.raises(
        UnsupportedError, match=r"runs a model block by block, and T5ForConditionalGeneration .*Convert without"
    ):
        convert(tmp_path / "model", tmp_path / "out", INT4, calibrate=IDS)


def test_a_text_for_a_model_without_a_tokenizer_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words")
    with pytest.raises(UnsupportedError, match=r"has no tokenizer that transformers reads.*Give the ids in an .npy file"):
        convert(source, tmp_path / "out", INT4, calibrate=tmp_path / "text.txt")


#: What tokenizers put around a text, as templates, and how many tokens that is before and behind.
AROUND = {"$A": (0, 0), "[BOS] $A": (1, 0), "[BOS] $A [END]": (1, 1)}


@pytest.mark.parametrize("template", AROUND)
def test_pieces_of_a_text_lie_between_the_tokens_that_the_tokenizer_puts_around_a_text(template: str, source: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[BOS]", "[END]", "a", "b", "c"]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [(word, n) for n, word in enumerate(words[:2])]
    made.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=8).save_pretrained(source)
    (source / "text.txt").write_text("a b c " * 10)
    calibration = Calibration.of(source / "text.txt", None, None)
    assert calibration
    before, after = AROUND[template]
    inner = 8 - before - after
    text = [2, 3, 4] * 10
    pieces = [[*[0] * before, *text[at : at + inner], *[1] * after] for at in range(0, 30 - inner + 1, inner)]
    assert calibration.ids(source).tolist() == (pieces if before else text)


def test_the_command_reads_ids_and_reports_each_layer(source: Path, tmp_path: Path, run: Run) -> None:
    np.save(tmp_path / "ids.npy", IDS.reshape(-1))  # cut into texts
    arguments = ("convert", source, tmp_path / "out", "-r", INT4, "--calibrate", tmp_path / "ids.npy", "--method", "gptq")
    code, out, err = run(*arguments)
    assert code == 0 and "14 tensors by gptq, on 192 tokens" in out, err
    code, out, _ = run(*arguments, "--force", "--json")
    assert json.loads(out)["calibration"] == "gptq"
    found = {t["name"]: t["calibration"] for t in json.loads(out)["tensors"]}
    assert found["model.layers.0.mlp.up_proj.weight"]["method"] == "gptq" and found["model.norm.weight"] is None
