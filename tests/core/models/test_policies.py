"""Policies: patterns, kinds and presets, as mappings and YAML files, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import breccia
from breccia import Policy
from breccia.models import Chosen, Parameter, QuantizeSummary, choose, kind_in_file, matrix_of
from breccia.policies import KEPT, PRESETS, WeightRule, kept_kind

NVFP4, MXFP8 = breccia.NVFP4BlockScaling(), breccia.MXFP8BlockScaling()


def parameter(name: str, shape: tuple[int, ...] = (64, 64), **fields: Any) -> Parameter:
    defaults: dict[str, Any] = {"nbytes": 4 * math.prod(shape), "axes": (len(shape) - 1,)}
    return Parameter(name, shape, **defaults | fields)


MODEL = [
    parameter("embed.weight", kind="embedding"),
    parameter("layers.0.mlp.up.weight"),
    parameter("layers.0.attn.q.weight"),
    parameter("layers.0.mlp.gate.weight"),
    parameter("layers.0.conv.weight", (64, 1, 4), kind="convolution", axes=None, why="Conv1d is no linear layer"),
    parameter("layers.0.thin.weight", (64, 1), nbytes=128),
    parameter("lm_head.weight"),
]


def chosen(policy: Any, *parameters: Parameter, **patterns: Any) -> tuple[dict[str, str], dict[str, str]]:
    """(recipe names by name, reasons by name)."""
    found, left = choose(parameters or MODEL, Policy.of(policy, **patterns), "quantize")
    return {name: how.recipe.name for name, how in found.items()}, left


def test_one_recipe_leaves_the_kinds_that_keep_their_precision() -> None:
    found, left = chosen("nvfp4")
    assert found == {"layers.0.mlp.up.weight": "nvfp4", "layers.0.attn.q.weight": "nvfp4"}
    assert left == {
        "embed.weight": "embedding",
        "layers.0.mlp.gate.weight": "router",
        "layers.0.conv.weight": "Conv1d is no linear layer",
        "layers.0.thin.weight": "would not shrink",
        "lm_head.weight": "output head",
    }


def test_the_first_pattern_that_matches_decides_and_beats_the_default() -> None:
    policy = {"*.mlp.gate.*": "keep", "*.mlp.*": "nvfp4", "lm_head*": MXFP8, "kind:embedding": None, "default": "fp8_row"}
    found, left = chosen(policy)
    assert found == {
        "layers.0.mlp.up.weight": "nvfp4",
        "layers.0.attn.q.weight": "fp8_row",
        "lm_head.weight": "mxfp8",
    }
    assert left["layers.0.mlp.gate.weight"] == left["embed.weight"] == "excluded"
    found, left = chosen({"*.mlp.*": "nvfp4"})
    assert set(found) == {"layers.0.mlp.up.weight", "layers.0.mlp.gate.weight"} and left["layers.0.attn.q.weight"] == "no rule"


def test_include_and_exclude_are_patterns_of_one_recipe() -> None:
    found, left = chosen("nvfp4", include=["lm_head*", "*.mlp.*"], exclude=["*.gate.*"])
    assert set(found) == {"layers.0.mlp.up.weight", "layers.0.attn.q.weight", "lm_head.weight"}
    assert left["layers.0.mlp.gate.weight"] == "excluded"
    assert "layers.0.thin.weight" in chosen("nvfp4", include=["*.thin.*"])[1], "it would not shrink in any case"


def test_the_preset_of_mlx_keeps_no_linear_and_no_embedding_layer() -> None:
    found, left = chosen({"preset": "mlx.nn.quantize", "default": "nvfp4"})
    assert set(left) == {"layers.0.conv.weight", "layers.0.thin.weight"} and "embed.weight" in found
    assert set(KEPT) < PRESETS["breccia"].keeps


#: Weights of DeepSeek-V3 as its checkpoint names them, and whether it has them in FP8; of BERT, T5 and OPT; of Mixtral.
DEEPSEEK = {
    "model.embed_tokens.weight": False,
    "lm_head.weight": False,
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": True,
    "model.layers.0.mlp.gate_proj.weight": True,
    "model.layers.3.mlp.experts.255.down_proj.weight": True,
    "model.layers.3.mlp.shared_experts.up_proj.weight": True,
    "model.layers.3.mlp.gate.weight": False,
    "model.layers.61.eh_proj.weight": False,
    "model.layers.61.shared_head.head.weight": False,
}
FEED_FORWARD = (
    "bert.encoder.layer.0.output.dense.weight",
    "encoder.block.0.layer.1.DenseReluDense.wi_0.weight",
    "model.decoder.layers.0.fc1.weight",
    "model.layers.0.block_sparse_moe.experts.0.w1.weight",
    "model.layers.0.mlp.experts.gate_up_proj",
)
ATTENTION = (
    "bert.encoder.layer.0.attention.output.dense.weight",
    "encoder.block.0.layer.0.SelfAttention.q.weight",
    "model.decoder.layers.0.self_attn.k_proj.weight",
    "transformer.h.0.attn.c_attn.weight",
)


def test_presets_with_rules_stand_in_the_place_of_a_recipe() -> None:
    def recipes(policy: Any, *names: str) -> dict[str, str]:
        shapes = {name: (2, 64, 64) if name.endswith("gate_up_proj") else (256, 256) for name in names}
        return chosen(policy, *[parameter(n, s, kind=kind_in_file(n, s)) for n, s in shapes.items()])[0]

    found, left = chosen("deepseek-fp8", *[parameter(name, (256, 256)) for name in DEEPSEEK])
    assert set(found) == {name for name, is_fp8 in DEEPSEEK.items() if is_fp8} and set(found.values()) == {"fp8_block"}
    assert left["model.layers.61.eh_proj.weight"] == "excluded" and left["model.layers.3.mlp.gate.weight"] == "router"
    assert Policy.of("deepseek-fp8").recipes == (breccia.Float8BlockScaling(block_m=128),)
    assert recipes("nvfp4-mlp", *FEED_FORWARD, *ATTENTION, "lm_head.weight", "model.other.weight") == dict.fromkeys(
        FEED_FORWARD, "nvfp4"
    )
    assert recipes("int4-except-attention", *FEED_FORWARD, *ATTENTION, "lm_head.weight", "model.other.weight") == dict.fromkeys(
        (*FEED_FORWARD, "model.other.weight"), "int4"
    )


def test_patterns_and_a_default_come_beside_a_preset() -> None:
    found, left = chosen({"*.up.*": "keep", "*.attn.*": "mxfp8", "preset": "nvfp4-mlp"})
    assert found == {"layers.0.attn.q.weight": "mxfp8"} and left["layers.0.mlp.up.weight"] == "excluded"
    found, _ = chosen({"preset": "nvfp4-mlp", "default": "mxfp8"}, *MODEL, parameter("other.weight"))
    assert found == {"layers.0.mlp.up.weight": "nvfp4", "other.weight": "mxfp8"}
    with pytest.raises(
        breccia.OptionError, match=r"^quantize: a function chooses the parameters, and so do the patterns of the "
    ):
        choose(MODEL, Policy.of("nvfp4-mlp"), "quantize", select=lambda p: "")
    with pytest.raises(breccia.OptionError, match=r"the preset 'nvfp4-mlp' has patterns of its own; give it them instead of"):
        Policy.of("nvfp4-mlp", exclude=["*.up.*"])


def test_kinds_are_patterns() -> None:
    found, _ = chosen({"kind:linear": "mxfp8", "kind:output head": "keep"})
    assert "lm_head.weight" in found, "it is a linear layer, and the first pattern that matches decides"
    found, _ = chosen({"kind:output head": "keep", "kind:linear": "mxfp8"})
    assert "lm_head.weight" not in found and "layers.0.mlp.gate.weight" in found


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.mlp.gate.weight", "router"),
        ("params.layers_0.mlp.gate.kernel", "router"),
        ("params/lm_head/kernel", "output head"),
        ("model.embed_tokens.weight", "embedding"),
        ("block.0.relative_attention_bias.weight", "bias"),
        ("layers.0.mixer.A_log", "decay"),
        ("layers.0.mixer.dt_proj.weight", "time step"),
        ("layers.0.mixer.out_proj.weight", ""),
        ("layers.0.pwconv1.weight", ""),
    ],
)
def test_names_tell_kinds_in_the_spelling_of_every_framework(name: str, kind: str) -> None:
    assert kept_kind(name) == kind


def test_the_shape_of_a_stored_tensor_tells_matrices_and_experts() -> None:
    assert kind_in_file("w", (4, 4)) == "linear"
    assert (
        kind_in_file("mlp.experts.up", (2, 4, 4))
        == kind_in_file("block_sparse_moe.input_linear.weight", (2, 4, 4))
        == kind_in_file("blk.0.ffn_up_exps.weight", (2, 4, 4))
        == "experts"
    )
    assert kind_in_file("time_mix", (1, 1, 4)) == kind_in_file("conv.weight", (4, 4, 3, 3)) == "no matrix"


def test_a_yaml_file_says_what_a_mapping_says(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "policy.yaml"
    path.write_text('default: nvfp4  # what no pattern matches\n"*.mlp.*": fp8_block,block_m=128\nlm_head*: keep\nembed*:\n')
    mapping = {"default": "nvfp4", "*.mlp.*": "fp8_block,block_m=128", "lm_head*": "keep", "embed*": None}
    expected = Policy.of(mapping)
    for found in (Policy.read(path), Policy.of(path), Policy.of(str(path))):
        assert (found.rules, found.default, found.preset) == (expected.rules, expected.default, expected.preset)
    assert expected.recipes == (NVFP4, breccia.Float8BlockScaling(block_m=128))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: nvfp4\nb: keep\na: mxfp8\n", r"policy\.yaml: 'a' stands in lines 1 and 3; delete one of them\.$"),
        ("a: [", r"policy\.yaml is no YAML: while parsing"),
        ("- a\n", r"a policy is a mapping from patterns to recipes, such as `lm_head\*: keep`; the file has \['a'\]\.$"),
        ("1: nvfp4\n", r"policy\.yaml: patterns are strings; got 1\.$"),
        ("'*.mlp.*': mxfp9\n", r"policy\.yaml: the rule of '\*\.mlp\.\*': no recipe 'mxfp9'; did you mean 'mxfp8'\?"),
        ("'*.mlp.*': fp8_block,block=3\n", r"policy\.yaml: the rule of '\*\.mlp\.\*': .*block"),
        ("kind:embeding: keep\n", r"policy\.yaml: 'kind:embeding' names no kind of parameter; did you mean 'embedding'\?"),
        ("preset: mlx\n", r"policy\.yaml: no preset 'mlx'.* Known: breccia, deepseek-fp8, .*, nvfp4-mlp\.$"),
        ("", r"policy\.yaml is empty; a policy has lines such as `lm_head\*: keep` and `default: nvfp4`\.$"),
        (
            "rules:\n- '*.mlp.*': nvfp4\n",
            r"policy\.yaml: 'rules' has \[\{'\*\.mlp\.\*': 'nvfp4'\}\] where a recipe is expected\. A policy is one "
            r"mapping, of patterns to recipes, without lists or mappings in it: `lm_head\*: keep`\.$",
        ),
        (
            "preset: deepseek-fp8\ndefault: mxfp8\n",
            r"policy\.yaml: the preset 'deepseek-fp8' has a rule for every parameter, so a default decides nothing",
        ),
    ],
)
def test_a_wrong_file_is_named_with_the_place_and_the_remedy(text: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(breccia.BrecciaError, match=message):
        Policy.read(tmp_path / "policy.yaml")


def test_without_pyyaml_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breccia.targets.installed", lambda module: module != "yaml")
    with pytest.raises(ImportError, match=r"read from YAML files by PyYAML, which is not installed: pip install .*\[yaml\]"):
        Policy.of("policy.yaml")


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (
            {"*": "nvfp4", "*.mlp.*": "mxfp8"},
            breccia.OptionError,
            r"^quantize: the pattern '\*\.mlp\.\*' decides nothing: '\*' before it matches layers\.0\.mlp\.up\.weight, "
            r"layers\.0\.mlp\.gate\.weight, too, and the first pattern that matches decides\. Put '\*\.mlp\.\*' first\.$",
        ),
        (
            {"*.mpl.*": "nvfp4"},
            breccia.UnknownNameError,
            r"'\*\.mpl\.\*' matches no parameter of two axes; did you mean",
        ),
        (
            {"*.conv.*": "nvfp4"},
            breccia.UnsupportedError,
            r"'\*\.conv\.\*' matches only parameters that cannot be quantized: Conv1d is no linear layer: layers\.0\.conv",
        ),
        ({"*.q.*": ("nvfp4", (0, 5))}, breccia.OptionError, r"layers\.0\.attn\.q\.weight has 2 axes; its contracted axes are "),
        (None, breccia.OptionError, r"quantized under a recipe, or a policy: a mapping from patterns to recipes\. Got None\.$"),
        ("nvpf4", breccia.UnknownNameError, r"no recipe 'nvpf4'; did you mean 'nvfp4'"),
        (
            "nvfp4-mpl",
            breccia.UnknownNameError,
            r"^no recipe and no preset 'nvfp4-mpl'; did you mean 'nvfp4-mlp'\? Known: deep",
        ),
        (
            "mlx.nn.quantize",
            breccia.OptionError,
            r"the preset 'mlx\.nn\.quantize' says what keeps its precision, and no recipe\. Give both in a mapping: \{",
        ),
    ],
)
def test_a_policy_that_does_not_fit_the_model_is_refused(policy: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        chosen(policy)


def test_patterns_beside_a_policy_are_refused() -> None:
    with pytest.raises(breccia.OptionError, match=r"the policy has patterns of its own; give it them instead of include= and"):
        Policy.of({"*": "nvfp4"}, include=["lm_head*"])


def test_harmless_overlaps_are_no_error() -> None:
    assert chosen({"*.up.*": "nvfp4", "*.mlp.*": "nvfp4", "default": "mxfp8"})[0]["layers.0.mlp.gate.weight"] == "nvfp4"
    assert chosen({"*.mlp.up.*": "nvfp4", "*.up.weight": "nvfp4"})[0] == {"layers.0.mlp.up.weight": "nvfp4"}
    assert not chosen("nvfp4", include=["lm_head*"], exclude=["*"])[0], "`exclude` beats `include`"


@pytest.mark.parametrize(
    ("shape", "axes", "matrix"),
    [
        ((8, 4), (1,), (-1, 0, (8, 4), (8, 4))),
        ((8, 4), (0,), (-2, 0, (8, 4), (8, 4))),
        ((3, 8, 4), (2,), (-1, 1, (3, 8, 4), (8, 4))),
        ((3, 8, 4), (1,), (-2, 1, (3, 8, 4), (8, 4))),
        ((3, 3, 8, 4), (0, 1, 2), (-2, 0, (72, 4), (3, 3, 8, 4))),
        ((8, 2, 4), (0,), (-2, 0, (8, 8), (8, 2, 4))),
        ((4,), (0,), (-1, 0, (1, 4), (4,))),
    ],
)
def test_a_parameter_of_any_shape_is_matrices_whose_contracted_axes_are_one(shape: Any, axes: Any, matrix: Any) -> None:
    assert matrix_of(shape, axes) == matrix


def test_the_summary_prints_recipes_axes_and_reasons() -> None:
    found = {"a": Chosen(NVFP4, (1,)), "b": Chosen(MXFP8, (0, 1)), "c": Chosen(NVFP4, (1,))}
    summary = QuantizeSummary(found, {"d": "router"}, 3_000_000, 1_500)
    assert repr(summary).splitlines() == [
        "3 parameters quantized; the model has 1.50 kB, before 3.00 MB",
        "nvfp4, blocks along axis 1: a, c",
        "mxfp8, blocks along axes 0, 1: b",
        "left in high precision (router): d",
    ]
    assert summary.quantized == ("a", "b", "c")
    with pytest.raises(breccia.OptionError, match=r"several recipes: nvfp4, mxfp8; `chosen` has that of each\.$"):
        _ = summary.recipe
    assert QuantizeSummary({"a": found["a"]}, {}, 2, 1).recipe == NVFP4
    assert WeightRule.of(("nvfp4", -2)) == WeightRule(NVFP4, (-2,)) and WeightRule.of("keep") is None
