"""Which parameters of a model are quantized, and under which recipes: kinds that keep their precision, patterns, policies."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase, translate
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from . import targets
from .errors import BrecciaError, OptionError, UnknownNameError, UnsupportedError, abbreviated, suggestion
from .recipes import ScalingRecipe
from .siblings import YAML
from .specs import as_recipe

#: Kinds of parameters, and shell-style patterns of their names in Hugging Face's models. They are small, or their precision
#: affects every token; adapters are trained. Biases have tables that are added by position (T5's `relative_attention_bias`,
#: Swin's `relative_position_bias_table`, ViTDet's `rel_pos_h`, Transformer-XL's `pos_bias_u`); decays are exponentiated
#: (Mamba's `A_log`, RWKV's `time_decay`); the projections to and from Mamba's time steps are narrow.
KEPT = {
    "embedding": ("*embed*", "wte.*", "*.wte.*", "wpe.*", "*.wpe.*", "shared.weight"),
    "bias": ("*bias", "*_bias.weight", "*bias_table", "*bias_[kuv]", "*rel_pos_[hw]"),
    "decay": ("*A_log", "*time_decay", "*time_first"),
    "time step": ("*.dt_proj.weight", "*.x_proj.weight"),
    "norm": ("*norm*", "*Norm*", "*.ln_*"),
    "output head": ("lm_head*", "*.lm_head*"),
    "adapter": ("*lora_*",),
    "router": ("gate.weight", "*.gate.weight", "*router*", "*shared_expert_gate*"),
}
#: Kinds that the shape or the layer of a parameter tells, and its name does not: see `breccia.models.Parameter`.
NO_MATRIX, CONVOLUTION = "no matrix", "convolution"
KINDS = (*KEPT, NO_MATRIX, CONVOLUTION, "linear", "experts")

#: What a policy says of parameters that keep their precision; None says the same.
KEEP = "keep"


class Preset(NamedTuple):
    """A named policy: what it is for, the kinds of parameters that keep their precision, and rules for the others.

    The rules are (pattern, spec or "keep") pairs, of which the first that matches decides. They come after the patterns of a
    policy that names the preset, and, unlike these, need not match anything.
    """

    about: str
    keeps: frozenset[str]
    rules: tuple[tuple[str, str], ...] = ()


_KINDS_KEPT = frozenset((*KEPT, NO_MATRIX, CONVOLUTION))
_ATTENTION = tuple((pattern, KEEP) for pattern in ("*attn*", "*[Aa]ttention*"))
#: The layers after attention, and their experts: Llama, GPT-2 and Falcon; DeepSeek-V4, DistilBERT and MPT; Wav2Vec2; Mixtral;
#: any stack of experts; T5; OPT and BART; BERT.
_FEED_FORWARD = (
    *("*mlp*", "*ffn*", "*feed_forward*", "*moe*", "*experts*", "*DenseReluDense*", "*.fc[12].*"),
    *("*.intermediate.dense.*", "*.output.dense.*"),
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "breccia": Preset(
            "the kinds that keep their precision by default; a `default` beside it quantizes the others", _KINDS_KEPT
        ),
        # mlx.nn.quantize takes every layer that has a quantized form: linear and embedding layers, whatever they are used for.
        "mlx.nn.quantize": Preset(
            "what `mlx.nn.quantize` takes, embeddings, routers and output heads too; a `default` beside it quantizes them",
            frozenset(("bias", "decay", "norm", NO_MATRIX, CONVOLUTION)),
        ),
        # The checkpoint of DeepSeek-V3: all linear layers and experts, but two of the module that predicts further tokens.
        "deepseek-fp8": Preset(
            "FP8 in blocks of 128 x 128, of the layers that DeepSeek-V3 has so",
            _KINDS_KEPT,
            (("*.eh_proj.*", KEEP), ("*.shared_head.*", KEEP), ("*", "fp8_block,block_m=128")),
        ),
        "nvfp4-mlp": Preset(
            "NVFP4 of feed-forward layers and experts; attention keeps its precision",
            _KINDS_KEPT,
            (*_ATTENTION, *((pattern, "nvfp4") for pattern in _FEED_FORWARD), ("kind:experts", "nvfp4")),
        ),
        "int4-except-attention": Preset(
            "INT4 in groups of 128, of all but attention", _KINDS_KEPT, (*_ATTENTION, ("*", "int4"))
        ),
    }
)
#: The presets that say a recipe, and so stand in the place of one.
COMPLETE = tuple(name for name, preset in PRESETS.items() if preset.rules)
#: The reasons for parameters that a pattern leaves, and that no pattern matches.
EXCLUDED = "excluded"
NO_RULE = "no rule"

_DEFAULT, _PRESET, _KIND = "default", "preset", "kind:"
#: How frameworks and tree paths call what is a `weight` in torch.
_WEIGHTS = ("kernel", "embedding")


def kept_kind(name: str) -> str:
    """The kind of `KEPT` that the parameter of that name belongs to; empty if it is quantized by default.

    name: the full name of a tensor in a checkpoint or a model's state: "model.layers.0.mlp.gate.weight" is a router. Names of
        Flax's parameters are read as those of torch: "params.mlp.gate.kernel" is one, too.
    """
    names = {name, _as_in_torch(name)}
    return next((kind for kind, pattern in _kept_patterns().items() if any(map(pattern.match, names))), "")


@cache
def _kept_patterns() -> dict[str, re.Pattern[str]]:
    """One pattern for each kind of `KEPT`."""
    return {kind: re.compile("|".join(map(translate, patterns))) for kind, patterns in KEPT.items()}


def _as_in_torch(name: str) -> str:
    owner, dot, leaf = name.replace("/", ".").removeprefix("params.").rpartition(".")
    return f"{owner}{dot}{'weight' if leaf in _WEIGHTS else leaf}"


class WeightRule(NamedTuple):
    """How to quantize a parameter. axes: its contracted axes, where the model does not tell them; None in most rules."""

    recipe: ScalingRecipe
    axes: tuple[int, ...] | None = None

    @classmethod
    def of(cls, value: Any) -> WeightRule | None:
        """A rule from a recipe, its spec, or a pair of either and the contracted axes; None from None and "keep".

        Raises what `breccia.recipe` raises.
        """
        if value is None or value == KEEP:
            return None
        if isinstance(value, cls):
            return value
        recipe: Any = value
        axes: Any = None
        if isinstance(value, tuple):
            recipe, axes = cast("tuple[Any, Any]", value)
        return cls(as_recipe(recipe), (axes,) if isinstance(axes, int) else None if axes is None else tuple(axes))


@dataclass(frozen=True)
class Policy:
    """Which parameters of a model are quantized, under which recipes: the same for every framework and `breccia convert`.

    rules: (pattern, rule) pairs. The first whose pattern matches a parameter decides, and None leaves it. Patterns are
        shell-style globs over whole names, or "kind:" and a kind: "kind:embedding".
    default: the rule for parameters that no pattern matches, unless they are of a kind that `preset` keeps. None leaves them.
    preset: a named policy of `PRESETS`: the kinds of parameters that keep their precision by default, and rules that come
        after `rules`: "breccia" and "mlx.nn.quantize" have none; "deepseek-fp8", "nvfp4-mlp" and "int4-except-attention" do.
    source: what errors call the policy.

    Mappings and YAML files state one, in `Policy.of` and wherever a recipe may be given:

        >>> policy = breccia.Policy.of({"*.mlp.*": "nvfp4", "lm_head*": "keep", "default": "fp8_row"})
        >>> policy.default.recipe.name
        'fp8_row'
    """

    rules: tuple[tuple[str, WeightRule | None], ...] = ()
    default: WeightRule | None = None
    preset: str = "breccia"
    source: str = "the policy"

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise UnknownNameError(
                f"{self.source}: no preset {self.preset!r}{suggestion(str(self.preset), list(PRESETS))}", name=self.preset
            )
        if self.default is not None and any(pattern == "*" for pattern, _ in _rules_of(self.preset)):
            raise OptionError(
                f"{self.source}: the preset {self.preset!r} has a rule for every parameter, so a default decides nothing; give "
                "patterns.",
                preset=self.preset,
            )
        for pattern, _ in self.rules:
            kind = pattern.removeprefix(_KIND)
            if kind != pattern and kind not in KINDS:
                raise UnknownNameError(
                    f"{self.source}: {pattern!r} names no kind of parameter{suggestion(kind, list(KINDS))}", name=kind
                )

    @classmethod
    def of(cls, value: Any, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> Policy:
        """A policy from what users give in the place of a recipe.

        value: a policy; the name of a preset with rules, "nvfp4-mlp"; a mapping from patterns to recipes, specs, "keep" or
            None, with "default" and "preset" for these fields; the path of a YAML file with such a mapping; or a recipe, its
            spec or a WeightRule, which is the default.
        include, exclude: patterns to quantize under the one recipe, and to leave. `exclude` beats `include`.

        Raises UnsupportedError for other values, OptionError for patterns beside a policy, UnknownNameError and RecipeError
        for a rule's recipe, naming the pattern, and what `Policy.read` raises.
        """
        left, taken = [(pattern, None) for pattern in exclude], tuple(include)
        if (isinstance(value, str) and value.lower().endswith((".yaml", ".yml"))) or isinstance(value, os.PathLike):
            value = cls.read(cast("str | os.PathLike[str]", value))
        elif isinstance(value, Mapping):
            value = cls.from_mapping(cast("Mapping[str, Any]", value))
        elif isinstance(value, str) and value in PRESETS:
            value = _preset(value)
        if isinstance(value, cls):
            if left or taken:
                raise OptionError(
                    f"{value.source} has patterns of its own; give it them instead of include= and exclude=: "
                    '{"lm_head*": "keep", "*.mlp.*": "nvfp4"}.'
                )
            return value
        try:
            rule = WeightRule.of(value)
        except UnknownNameError as e:
            raise _unknown(value, e) from None
        if rule is None:
            raise OptionError(
                f"a model is quantized under a recipe, or a policy: a mapping from patterns to recipes. Got {value!r}."
            )
        return cls((*left, *((pattern, rule) for pattern in taken)), rule)

    @classmethod
    def from_mapping(cls, rules: Mapping[str, Any], source: str = "the policy") -> Policy:
        """A policy from patterns and their rules, in their order; see `Policy.of`."""
        fields: dict[str, Any] = {}
        listed: list[tuple[str, WeightRule | None]] = []
        for pattern, value in rules.items():
            if not isinstance(pattern, str):
                raise UnsupportedError(f"{source}: patterns are strings; got {pattern!r}.", pattern=pattern)
            if pattern == _PRESET:
                fields[_PRESET] = value
                continue
            if isinstance(value, Mapping | list):
                raise OptionError(
                    f"{source}: {pattern!r} has {value!r} where a recipe is expected. A policy is one mapping, of patterns to "
                    "recipes, without lists or mappings in it: `lm_head*: keep`.",
                    pattern=pattern,
                )
            try:
                rule = WeightRule.of(value)
            except BrecciaError as e:
                raise type(e)(f"{source}: the rule of {pattern!r}: {e}", **{**e.found, "pattern": pattern}) from e
            if pattern == _DEFAULT:
                fields[_DEFAULT] = rule
            else:
                listed.append((pattern, rule))
        return cls(tuple(listed), **fields, source=source)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Policy:
        """The policy of a YAML file: a mapping as `Policy.of` takes it.

        Raises ImportError without PyYAML, FileNotFoundError, and OptionError for a file that is no mapping of strings, or has
        a pattern twice.
        """
        if not targets.installed("yaml"):
            raise ImportError(
                f"policies are read from YAML files by PyYAML, which is not installed: {YAML.remedy}.", name="yaml"
            )
        rules: Any = targets.load("breccia.yaml_text:parsed_yaml")(Path(path).read_text(encoding="utf-8"), str(path))
        if rules is None:
            raise OptionError(
                f"{path} is empty; a policy has lines such as `lm_head*: keep` and `default: nvfp4`.", path=str(path)
            )
        if not isinstance(rules, dict):
            raise OptionError(
                f"{path}: a policy is a mapping from patterns to recipes, such as `lm_head*: keep`; the file has {rules!r}.",
                path=str(path),
            )
        return cls.from_mapping(cast("dict[str, Any]", rules), str(path))

    @property
    def recipes(self) -> tuple[ScalingRecipe, ...]:
        """The recipes of its rules, each once, the default's first."""
        rules = [self.default, *(rule for _, rule in (*self.rules, *_rules_of(self.preset)))]
        return tuple(dict.fromkeys(rule.recipe for rule in rules if rule is not None))

    def keeping(self, patterns: Iterable[str]) -> Policy:
        """The policy that leaves what these patterns match, whatever its own rules say."""
        return replace(self, rules=(*((pattern, None) for pattern in patterns), *self.rules))

    @property
    def has_patterns(self) -> bool:
        """Has it rules, of its own or of its preset, beside the default?"""
        return bool(self.rules or _rules_of(self.preset))

    def deciding(self, name: str, kinds: Collection[str]) -> str | None:
        """The pattern of its own that decides about a parameter of that name and those kinds; None if none does."""
        return next((pattern for pattern, _ in self.rules if _selects(pattern, name, kinds)), None)

    def preset_rule(self, name: str, kinds: Collection[str]) -> tuple[str | None, WeightRule | None]:
        """The pattern of its preset that matches such a parameter, and its rule; (None, the default) if none does."""
        found = ((p, rule) for p, rule in _rules_of(self.preset) if _selects(p, name, kinds))
        return next(found, (None, self.default))


@cache
def _rules_of(preset: str) -> tuple[tuple[str, WeightRule | None], ...]:
    return tuple((pattern, WeightRule.of(spec)) for pattern, spec in PRESETS[preset].rules)


def _preset(name: str) -> Policy:
    """The policy of that name. Raises OptionError for a preset that names no recipe."""
    if name not in COMPLETE:
        raise OptionError(
            f"the preset {name!r} says what keeps its precision, and no recipe. Give both in a mapping: "
            f'{{"preset": {name!r}, "default": "nvfp4"}}; or one that has a recipe: {", ".join(COMPLETE)}.',
            preset=name,
        )
    return Policy(preset=name, source=f"the preset {name!r}")


def _unknown(given: Any, e: UnknownNameError) -> UnknownNameError:
    """The error of an unknown recipe, or, where a preset has the nearest name, that of an unknown preset."""
    if isinstance(given, str) and get_close_matches(given, COMPLETE, n=1):
        return UnknownNameError(f"no recipe and no preset {given!r}{suggestion(given, list(COMPLETE))}", name=given)
    return e


def _selects(pattern: str, name: str, kinds: Collection[str]) -> bool:
    return pattern.removeprefix(_KIND) in kinds if pattern.startswith(_KIND) else matches(name, (pattern,))


def of_names(patterns: Iterable[str]) -> list[str]:
    """The patterns that are globs over names."""
    return [pattern for pattern in patterns if not pattern.startswith(_KIND)]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Does any pattern select `name`? A pattern that is an exact name selects itself."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(
    patterns: Iterable[str], names: Collection[str], what: str = "tensor", listed_by: str = "`breccia inspect`"
) -> None:
    """Raise UnknownNameError for patterns that match none of `names`, which are names of a `what`."""
    unmatched = [pattern for pattern in dict.fromkeys(patterns) if not _matches_any(pattern, names)]
    if unmatched:
        messages = (f"the pattern {pattern!r} matches no {what}{_remedy(pattern, names, listed_by)}" for pattern in unmatched)
        raise UnknownNameError(" ".join(messages), patterns=unmatched)


def _remedy(pattern: str, names: Collection[str], listed_by: str) -> str:
    """What to do about a pattern that matches no name: the pattern with its unknown words replaced, if that matches one."""
    words = {word for name in names for word in name.split(".")}
    literals = [word for word in re.split(r"[.*?\[\],]+", pattern) if word and not any(word in known for known in words)]
    close = {word: near[0] for word in literals if (near := get_close_matches(word, sorted(words), n=1))}
    corrected = pattern
    for word, near in close.items():
        corrected = corrected.replace(word, near)
    if corrected != pattern and _matches_any(corrected, names):
        return f"; did you mean {corrected!r}?"
    if "," in pattern:
        return "; give each pattern separately."
    return f"; {listed_by} lists the names, such as {abbreviated(sorted(names))}."


def _matches_any(pattern: str, names: Iterable[str]) -> bool:
    return any(matches(name, [pattern]) for name in names)
