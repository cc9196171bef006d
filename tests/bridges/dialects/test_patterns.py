"""Patterns of configs: the matches of `re`, without its exponential time; and settings that are read once for a config."""

from __future__ import annotations

import gc
import json
import random
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pytest
from marks import slow_but
from stored_folders import folder

from breccia import DialectError, UnsupportedError
from breccia.backend import registry
from breccia.bridges import convert, load_checkpoint
from breccia_bridges.announcements import Announced
from breccia_bridges.dialects import compressed_tensors
from breccia_bridges.dialects.patterns import LONGEST, Expressions, globs
from breccia_bridges.inspection import inspected
from breccia_bridges.stored import ModuleSettings

#: Patterns for which `re` takes longer than the age of the universe, or whose repeats do not fit into memory.
EXPONENTIAL = [
    "(a+)+b",
    "(a|a)*b",
    "(a*)*b",
    "(.*)*x",
    "(a|aa)+$x",
    r"(\w+\s?)+!",
    "(.*a){12}b",
    "^(([a-z])+.)+[A-Z]([a-z])+$",
    "(){1000000000}",
]
HUGE = ["((a{0,30}){0,30}){0,30}b", "(((){1999}){1999}){1999}"]
#: A name on which they go wrong.
LONG = "a" * 200


def gptq(pattern: str) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq", "dynamic": {pattern: {"bits": 4}}}


def auto_round(pattern: str) -> dict[str, Any]:
    extra = {pattern: {"bits": 4}}
    packing = "auto_round:auto_gptq"
    return {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": packing, "extra_config": extra}


def ignored(pattern: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"g": group},
        "ignore": ["re:" + pattern],
    }


def targeted(pattern: str) -> dict[str, Any]:
    config = ignored("unused")
    config["config_groups"]["g"]["targets"] = ["re:" + pattern, "Linear"]
    return config


def quark(glob: str) -> dict[str, Any]:
    weight = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
    return {
        "quant_method": "quark",
        "exclude": [glob],
        "layer_quant_config": {glob: {"weight": weight}},
        "global_quant_config": {"weight": weight},
    }


def modelopt(glob: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [glob]}


def tensors(method: str, modules: list[str]) -> dict[str, Any]:
    """A small value of a library for each module."""
    parts: dict[str, tuple[str, np.ndarray]] = {
        "weight": ("F8_E4M3", np.full((1, 2), 56, np.uint8)),
        "weight_scale": ("F32", np.float32(1)),
    }
    if method in ("gptq", "auto-round"):
        parts = {
            "qweight": ("I32", np.zeros((4, 8), np.int32)),
            "qzeros": ("I32", np.zeros((1, 1), np.int32)),
            "scales": ("F16", np.ones((1, 8), np.float16)),
        }
    elif method == "compressed-tensors":
        parts = {"weight": ("I8", np.ones((1, 2), np.int8)), "weight_scale": ("F32", np.ones((1, 1), np.float32))}
    return {f"{module}.{end}": part for module in modules for end, part in parts.items()}


@pytest.mark.parametrize("pattern", EXPONENTIAL)
@pytest.mark.parametrize("config", [gptq, auto_round, ignored, targeted])
def test_an_exponential_pattern_is_matched_in_a_second(config: Callable[[str], Any], pattern: str, tmp_path: Path) -> None:
    settings = config(pattern)
    path = folder(tmp_path / "m", tensors(settings["quant_method"], [LONG]), settings)
    started = process_time()
    assert len(load_checkpoint(path).dialects) == 1
    assert process_time() - started < 1


@pytest.mark.parametrize("pattern", HUGE)
def test_repeats_that_fit_no_memory_are_refused_by_name(pattern: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "m", tensors("gptq", ["up"]), gptq(pattern))
    started = process_time()
    said = f"the pattern {re.escape(repr(pattern))} of dynamic is a regular expression that breccia does not match .*repetition"
    with pytest.raises(UnsupportedError, match=said):
        convert(path, tmp_path / "out", "none", dry_run=True)
    assert process_time() - started < 1


@pytest.mark.parametrize("glob", ["*a" * 40 + "*b", "*?" * 40 + "b", "*[ab]*a" * 30 + "c"])
@pytest.mark.parametrize("config", [quark, modelopt])
def test_a_glob_of_many_stars_is_matched_in_a_second(config: Callable[[str], Any], glob: str, tmp_path: Path) -> None:
    settings = config(glob)
    path = folder(tmp_path / "m", tensors(settings["quant_method"], [LONG]), settings)
    started = process_time()
    assert len(load_checkpoint(path).dialects) == 1
    assert process_time() - started < 1


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("a(?=b)", "(?="), (r"(a)\1", r"\1"), ("a*+b", "*+"), (r"a\Z", r"\Z"), ("a{,3}", "{,"), ("a[[:alpha:]]", "[[")],
)
def test_what_re2_cannot_match_or_matches_otherwise_is_refused_by_name(pattern: str, reason: str) -> None:
    with pytest.raises(UnsupportedError) as e:
        Expressions(["fine", "re:" + pattern], "the target {}", written=lambda text: text.removeprefix("re:"))
    said = str(e.value)
    assert said.startswith(f"the target {'re:' + pattern!r} is a regular expression that breccia does not match (")
    assert reason in said and said.endswith("). Write the names of modules in its place.")
    assert e.value.found["pattern"] == "re:" + pattern


def test_what_is_no_regular_expression_is_refused_by_name() -> None:
    with pytest.raises(DialectError, match=r"the pattern '\(a' is not a regular expression \(missing \), .*\)\. Fix it, or "):
        Expressions(["(a"], "the pattern {}")
    with pytest.raises(DialectError, match="is not a regular expression"):
        Expressions(["(" * 990 + ")" * 990], "the pattern {}")


@pytest.mark.parametrize("pattern", ["[ -\uffff]", r"[\x00-\uffff]", r"\N{DIGIT ONE}", "\u00e9"])
def test_other_characters_than_ascii_are_refused(pattern: str) -> None:
    """`re` makes a table of 65536 characters for such a class, and RE2's `\\w` has ASCII alone."""
    started = process_time()
    with pytest.raises(UnsupportedError, match=r"\(.* is read in another way by RE2\)\. Write the names of modules"):
        Expressions([pattern + "x" * 1900, pattern], "the pattern {}")
    with pytest.raises(UnsupportedError, match="is read in another way by RE2"):
        globs([pattern + "*"], "{} in exclude")
    assert process_time() - started < 1


def test_a_long_pattern_is_refused_at_once() -> None:
    started = process_time()
    Expressions(["a" * LONGEST], "the pattern {}")
    for texts in (["a" * (LONGEST + 1)], ["[" * 300000]):
        with pytest.raises(UnsupportedError, match=rf"\(it has {len(texts[0])} characters; at most 2000 are read\)"):
            Expressions(texts, "the pattern {}")
    with pytest.raises(UnsupportedError, match="it has 300000 characters; at most 2000 are read"):
        globs(["[" * 300000], "{} in exclude")
    assert process_time() - started < 1


#: Pieces of random patterns.
PIECES = r"""
    a b c . \. \d \W [ab] [^a] []a] * + ? *? {2} {1,3} {1,} ( (?: (?P<x> ) | ^ $ \b \B \A 1 _ { } a{
"""


def test_matches_are_those_of_re() -> None:
    """Random patterns and names; what is refused is not compared, and is rare."""
    rng, compared, refused = random.Random(0), 0, 0
    while compared < 3000:
        text = "".join(rng.choices(PIECES.split(), k=rng.randint(1, 9)))
        try:
            expected = re.compile(text)
        except re.error:
            continue
        try:
            start, middle = (Expressions(["b", text], "{}", anywhere=anywhere) for anywhere in (False, True))
        except UnsupportedError:
            refused += 1
            continue
        compared += 1
        for _ in range(8):
            name = "".join(rng.choices("abc.1_", k=rng.randint(1, 8)))
            assert (1 in start.matching(name)) == (expected.match(name) is not None), (text, name)
            assert (1 in middle.matching(name)) == (expected.search(name) is not None), (text, name)
    assert refused < compared / 10  # `a*+`


def test_patterns_that_take_too_much_memory_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("breccia_bridges.dialects.patterns._MEMORY", 200_000)
    extra = {rf".*m\..*{n}.*{n}": {"bits": 4} for n in range(300)}
    path = folder(tmp_path / "m", tensors("auto-round", ["model.m.7"]), auto_round("unused") | {"extra_config": extra})
    said = r"the 300 patterns of the config, such as the key '.*' of extra_config, take too much memory\. Write the names"
    with pytest.raises(UnsupportedError, match=said):
        load_checkpoint(path)["model.m.7.weight"]


def test_globs_and_names_keep_their_order() -> None:
    names = globs(["up.1", "up.*", "up.1", "[ud]?.2"], "{}")
    assert [names.first(name) for name in ("up.1", "up.2", "dn.2", "other")] == [0, 1, 3, None]
    assert names.named("up.1") == [0, 2] and names.matching("up.2") == [1, 3]


def test_globs_match_as_fnmatch_does() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        glob = "".join(
            rng.choices(["a", "b", ".", "*", "?", "[ab]", "[!a]", "[", "]", "[]a]", "\\", "\n", "+"], k=rng.randint(1, 6))
        )
        name = "".join(rng.choices("ab.[]\\\n+", k=rng.randint(0, 6)))
        assert (globs([glob], "{}").first(name) == 0) == fnmatchcase(name, glob), (glob, name)


# -- once for a config ------------------------------------------------------------------------------------------------


def of_modules(method: str, modules: list[str]) -> dict[str, Any]:
    """A config that has something to say about each module by itself."""
    unused = [f"unused.{n}" for n in range(len(modules))]
    match method:
        case "gptq":
            return gptq("unused") | {"dynamic": {rf"+:{re.escape(name)}$": {"group_size": 32} for name in modules}}
        case "auto-round":
            return auto_round("unused") | {"extra_config": {name: {"bits": 4} for name in modules}}
        case "compressed-tensors":
            config = targeted("unused")
            config["config_groups"]["g"]["targets"] = [f"re:{re.escape(name)}$" for name in modules]
            return config | {"ignore": unused}
        case "modelopt":
            layers = {name: {"quant_algo": "FP8"} for name in modules}
            return modelopt("unused") | {"ignore": unused, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        case "quark":
            config = quark("unused")
            return config | {"exclude": unused, "layer_quant_config": dict.fromkeys(modules, config["global_quant_config"])}
        case _:
            raise AssertionError(method)


@pytest.mark.long
@pytest.mark.parametrize("method", slow_but({"gptq"}, ["gptq", "auto-round", "compressed-tensors", "modelopt", "quark"]))
def test_a_config_of_20000_modules_takes_as_long_for_each_as_one_of_2000(method: str, tmp_path: Path) -> None:
    """Ten times as many modules may take 30 times as long, for noise and caches; once per pair of them would be 100 times."""

    def seconds(count: int) -> float:
        modules = [f"model.layers.{n // 50}.mlp.experts.{n % 50}" for n in range(count)]
        settings = json.loads(json.dumps(of_modules(method, modules)))
        dialect = next(d for d in registry().dialects.values() if d.announced_by(method, settings))
        started = process_time()
        of = ModuleSettings(dialect, Announced("config.json", method, settings))
        assert all(of(module) is not None for module in modules)
        return process_time() - started

    gc.disable()  # a collection takes as long as the objects of all tests before this one require
    try:
        few = min(seconds(2000) for _ in range(3))
        assert any(seconds(20000) < 30 * max(few, 0.01) for _ in range(3))
    finally:
        gc.enable()


def test_the_settings_of_a_config_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [f"layers.{n}.up" for n in range(50)]
    calls: list[Any] = []
    scheme = compressed_tensors._scheme
    monkeypatch.setattr(compressed_tensors, "_scheme", lambda *arguments: calls.append(arguments) or scheme(*arguments))
    path = folder(tmp_path / "m", tensors("compressed-tensors", modules), targeted("layers"))
    assert len(load_checkpoint(path)) == len(modules)
    convert(path, tmp_path / "out", "none")
    assert len(calls) == 2, "once for each time that the checkpoint was opened"


def test_a_wrong_config_is_read_once_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    compile_ = re.compile
    monkeypatch.setattr("breccia_bridges.dialects.patterns.re.compile", lambda text: calls.append(text) or compile_(text))
    path = folder(tmp_path / "m", tensors("gptq", [f"layers.{n}" for n in range(50)]), gptq("(wrong"))
    rows = inspected(path).rows
    assert len(rows) == 50 and all("the pattern '(wrong' of dynamic is not a reg" in row["suspicious"][0] for row in rows)
    assert calls.count("(wrong") == 1
