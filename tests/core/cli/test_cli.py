"""The command line: a broken command does not affect others, and every exit has a message and an exit code."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from program import Run

import breccia
from breccia.cli.recipes import bits_per_value
from breccia.codecs import E4M3, F32
from breccia.dispatch.registry import Plugin, registry
from breccia.formats import Format, Level
from breccia.recipes import RECIPES, choices_of
from breccia.siblings import install
from breccia.training import PRESETS

MANIFEST = """
from breccia import Command, hookimpl
api = 1
@hookimpl
def breccia_cli():
    return [
        Command("works", "acme_commands:works", "Does what it says."),
        Command("absent", "module_of_nobody:run", "Needs what is not installed."),
        Command("gone", "acme_commands:gone", "Is not where it was declared."),
        Command("crash", "acme_crashes:run", "Has a module that fails."),
        Command("leave", "acme_leaves:run", "Has a module that leaves the process."),
        Command("number", "acme_commands:NUMBER", "Is no function."),
        Command("unreadable", "acme_commands:unreadable", "Takes what no line can spell."),
    ]
"""
COMMANDS = """
import typer
import breccia

NUMBER = 5

def works(how: str = "well", as_json: bool = typer.Option(False, "--json"), words: list[str] = typer.Argument(None)) -> int:
    if how == "interrupted":
        raise KeyboardInterrupt
    if how == "badly":
        raise ZeroDivisionError("a fault of the program")
    if how == "aborted":
        raise typer.Abort
    if how == "exit":
        raise typer.Exit(7)
    if how == "odd":
        raise breccia.ShapeError("shapes\\n  differ", shape=(2, 3), kind=int, limit=float("nan"))
    if how == "silent":
        raise OSError
    print(how, *(words or ()))
    return 3

def unreadable(x: "Nowhere") -> None: ...
"""


@pytest.fixture
def acme(tmp_path: Path) -> Path:
    """A folder with a plug-in that has one working command and several that cannot be loaded."""
    info = tmp_path / "acme_breccia-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-breccia\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[breccia]\nacme = acme_manifest\n")
    (tmp_path / "acme_manifest.py").write_text(MANIFEST)
    (tmp_path / "acme_commands.py").write_text(COMMANDS)
    (tmp_path / "acme_crashes.py").write_text("raise RuntimeError('no driver')")
    (tmp_path / "acme_leaves.py").write_text("raise SystemExit('bye')")
    return tmp_path


def program(
    *words: str, path: Path | None = None, start: tuple[str, ...] = ("-m", "breccia"), **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run `breccia` in a new process that also finds the distributions in `path`. start: what the interpreter runs."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("BRECCIA_", "PYTHON"))}
    environ = clean | {"COLUMNS": "200", "TERMINAL_WIDTH": "200"} | ({"PYTHONPATH": str(path)} if path else {}) | environ
    return subprocess.run([sys.executable, *start, *words], env=environ, capture_output=True, text=True)


def invoke(*words: str, path: Path | None = None, **environ: str) -> tuple[int, str, str]:
    done = program(*words, path=path, **environ)
    return done.returncode, done.stdout, done.stderr


_LINES = """
import contextlib, io, json, sys
from breccia.cli.main import run
found = []
for words in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run(words)
        except SystemExit as e:
            code = e.code or 0
    found.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""


def invoke_each(*lines: list[str], path: Path | None = None, **environ: str) -> list[tuple[int, str, str]]:
    """What `invoke` returns of each command line; one new process runs all of them."""
    done = program(json.dumps(lines), path=path, start=("-c", _LINES), **environ)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return [tuple(each) for each in json.loads(done.stdout)]


# -- commands that cannot be loaded ---------------------------------------------------------------------------------------


def test_a_broken_command_does_not_affect_others(acme: Path) -> None:
    assert invoke("works", path=acme) == (0, "well\n", "")
    assert invoke("--version", path=acme) == (0, f"breccia {breccia.__version__}\n", "")
    code, out, err = invoke("plugins", "--json", path=acme)
    assert (code, err) == (0, "")
    assert {p["name"]: p["status"] for p in json.loads(out)}["acme"] == "active"


@pytest.mark.together
def test_help_lists_commands_that_cannot_be_loaded_too(acme: Path) -> None:
    code, out, err = invoke("--help", path=acme)
    assert (code, err) == (0, "")
    for line in ("works", "absent", "gone", "crash", "leave", "number", "unreadable", "explain", "plugins", "convert"):
        assert line in out
    assert "Needs what is not installed." in out


@pytest.mark.long
@pytest.mark.parametrize("words", [[], ["--help"], ["--json", "x"]], ids=["plain", "help", "json"])
def test_a_command_that_cannot_be_loaded_reports_the_reason(acme: Path, words: list[str]) -> None:
    reasons = {
        "absent": "cannot be loaded: ModuleNotFoundError: No module named 'module_of_nobody'.",
        "gone": "cannot be loaded: target 'acme_commands:gone': acme_commands has no 'gone'; correct the declaration.",
        "crash": "cannot be loaded: RuntimeError: no driver.",
        "leave": "cannot be loaded: SystemExit: bye.",
        "number": "is not a function that Typer supports: ",
        "unreadable": "is not a function that Typer supports: NameError: name 'Nowhere' is not defined",
    }
    found = invoke_each(*([command, *words] for command in reasons), path=acme)
    for (command, reason), (code, out, err) in zip(reasons.items(), found, strict=True):
        assert (code, out) == (1, "")
        message = f"command {command!r} of plug-in 'acme' (acme-breccia 0.1) {reason}"
        if "--json" in words:
            error = json.loads(err)["error"]
            assert error["type"] == "PluginError" and error["message"].startswith(message)
        else:
            assert err.startswith(f"error: {message}") and err.count("\n") == 1


@pytest.mark.together
def test_a_command_is_loaded_only_when_it_is_used() -> None:
    script = (
        "import sys\nfrom breccia.cli import main as cli\n"
        "try: cli.run(['--help'])\nexcept SystemExit: pass\nassert 'breccia_bridges.commands' not in sys.modules\n"
        "try: cli.run(['inspect', '--help'])\nexcept SystemExit: pass\nassert 'breccia_bridges.commands' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
@pytest.mark.together
def test_a_command_of_a_missing_distribution_names_the_distribution() -> None:
    for words in (["a", "b", "--recipe", "nvfp4"], ["--help"], []):
        code, out, err = invoke("convert", *words, BRECCIA_BLOCK="bridges")
        assert (code, out) == (1, "")
        assert err == f"error: `breccia convert` comes with breccia-bridges: {install('breccia-bridges')}\n"
    code, out, _ = invoke("--help", BRECCIA_BLOCK="bridges")
    assert code == 0 and "convert" not in out


def test_the_list_of_plug_ins_prints_reasons_verbatim(acme: Path) -> None:
    (acme / "acme_manifest.py").write_text("raise RuntimeError('[bold]brackets[/] are no markup')")
    code, out, err = invoke("plugins", path=acme)
    assert code == 0 and "set aside" in out and "RuntimeError: [bold]brackets[/] are no markup" in out
    assert err.startswith("warning: breccia plug-in 'acme' (acme-breccia 0.1) is set aside") and err.count("\n") == 1


# -- help and completion ----------------------------------------------------------------------------------------------


OWN_COMMANDS = (
    *("convert", "merge", "compare", "why", "diff", "inspect"),
    *("explain", "recipes", "rosetta", "plugins", "plugin", "doctor", "bench"),
)
#: Lines of a screen; `convert` and `merge` have more options than one holds, and there are more commands than that.
SCREEN = {"convert": 35, "merge": 27, "": 26}


@pytest.mark.together
def test_help_fits_on_a_screen() -> None:
    commands = ["", *OWN_COMMANDS]
    found = invoke_each(*([*command.split(), "--help"] for command in commands), COLUMNS="80", TERMINAL_WIDTH="80")
    for command, (code, out, err) in zip(commands, found, strict=True):
        lines = out.splitlines()
        assert (code, err) == (0, ""), command
        assert len(lines) <= SCREEN.get(command, 24) and max(map(len, lines)) <= 80, command
        assert "..." not in out.partition("Commands:")[2], "no line of help is truncated"


@pytest.mark.together
def test_help_lists_the_commands_for_checkpoints_first() -> None:
    _, out, _ = invoke("--help", COLUMNS="80", TERMINAL_WIDTH="80")
    listed = [line.split()[0] for line in out.partition("Commands:\n")[2].splitlines()]
    assert listed == list(OWN_COMMANDS)


def test_without_a_command_the_program_shows_its_help() -> None:
    code, out, err = invoke()
    assert (code, out) == (2, "") and err.startswith("Usage: breccia") and "error:" not in err
    code, out, err = invoke("--json")
    assert (code, out) == (2, "") and "error" in json.loads(err)


@pytest.mark.long
@pytest.mark.together
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("breccia con", ["convert"]),
        ("breccia convert a b --recipe nv", ["nvfp4", "nvfp4-mlp"]),
        ("breccia convert a b --dry", ["--dry-run"]),
        ("breccia compare a b --fail", ["--fail-under"]),
        (
            "breccia explain ca",
            ["cast", "cast_and_record", "cast_matmul", "cast_pair", "cast_pair_and_record", "cast_ste", "cast_ste_clipped"],
        ),
        ("breccia explain cast mxfp", ["mxfp4", "mxfp6", "mxfp8"]),
        ("breccia explain cast nvfp4 --on t", ["torch"]),
        ("breccia explain cast nvfp4 --prefer numpy.c", ["numpy.cast"]),
        ("breccia explain cast_ste nvfp4 --prefer composite.cast_s", ["composite.cast_ste"]),
        ("breccia bench in", ["int", "int4", "int4_bias", "int8", "int_rounded"]),
        ("breccia bench ma", ["matmul"]),
    ],
)
def test_the_shell_completes_commands_options_and_values(line: str, expected: list[str]) -> None:
    words = line.split()
    asked = {"_BRECCIA_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    code, out, err = invoke(**asked)
    assert (code, err) == (0, "")
    assert sorted(out.split()) == expected


@pytest.mark.long
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_can_be_shown(shell: str) -> None:
    code, out, err = invoke(_BRECCIA_COMPLETE=f"source_{shell}")
    assert (code, err) == (0, "") and "_BRECCIA_COMPLETE" in out


# -- errors and exit codes ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_debug_is_accepted_anywhere_on_the_line(place: int) -> None:
    words = ["explain", "cast", "nvpf4"]
    code, _, err = invoke(*words[:place], "--debug", *words[place:])
    assert code == 1
    assert err.startswith("Traceback (most recent call last):") and "UnknownNameError: no recipe 'nvpf4'" in err


def test_arguments_after_two_dashes_are_not_options(acme: Path) -> None:
    assert invoke("works", "--", "--debug", "--json", path=acme) == (0, "well --debug --json\n", "")
    code, _, err = invoke("works", "--how", "odd", "--", "--debug", "--json", path=acme)
    assert (code, err) == (1, "error: shapes differ\n")


def test_an_error_is_json_with_the_option_json(acme: Path) -> None:
    code, out, err = invoke("works", "--how", "odd", "--json", path=acme)
    assert (code, out) == (1, "")
    assert json.loads(err, parse_constant=pytest.fail) == {
        "error": {
            "type": "ShapeError",
            "message": "shapes differ",
            "found": {"shape": [2, 3], "kind": "<class 'int'>", "limit": "NaN"},
        }
    }
    code, _, err = invoke("explain", "cast", "nvpf4", "--json")
    error = json.loads(err)["error"]
    assert (code, error["type"], error["found"]["name"]) == (1, "UnknownNameError", "nvpf4")
    assert error["message"].startswith("no recipe 'nvpf4'; did you mean 'nvfp4'?")
    code, _, err = invoke("works", "--how", "silent", "--json", path=acme)
    assert (code, json.loads(err)["error"]) == (1, {"type": "OSError", "message": "OSError", "found": {}})


@pytest.mark.long
def test_a_usage_error_exits_with_two_in_text_and_in_json() -> None:
    for words, line in [
        (["explain", "cast", "nvfp4", "--nope"], "No such option"),  # Typer's message, which differs between versions
        (["explain"], "Missing argument 'OP'. See `breccia explain --help`."),
        (["convrt"], "No such command 'convrt'. Did you mean 'convert'?"),
    ]:
        code, out, err = invoke(*words)
        assert (code, out) == (2, "") and err.startswith(f"error: {line}") and err.count("\n") == 1
    for words in (["explain", "cast", "nvfp4", "--nope"], ["explain"], ["convrt"]):
        code, out, err = invoke(*words, "--json")
        assert (code, out) == (2, "")
        assert set(json.loads(err)["error"]) == {"type", "message", "found"}
    assert json.loads(err)["error"]["message"].startswith("No such command 'convrt'")


def test_json_and_debug_together_show_the_traceback() -> None:
    code, _, err = invoke("explain", "cast", "nvpf4", "--json", "--debug")
    assert code == 1 and err.startswith("Traceback")


@pytest.mark.long
@pytest.mark.parametrize("words", [[], ["--json"]], ids=["text", "json"])
def test_a_command_keeps_its_own_exit_code(acme: Path, words: list[str]) -> None:
    assert invoke("works", *words, path=acme)[0] == 0, "what it returns is no exit code"
    assert invoke("works", "--how", "exit", *words, path=acme)[0] == 7
    code, _, err = invoke("works", "--how", "aborted", *words, path=acme)
    assert code == 1 and "Abort" in err and "Traceback" not in err


@pytest.mark.long
@pytest.mark.parametrize("words", [[], ["--json"]], ids=["text", "json"])
def test_an_interrupt_prints_one_line_and_exits_with_130(acme: Path, words: list[str]) -> None:
    assert invoke("works", "--how", "interrupted", *words, path=acme) == (130, "", "interrupted\n")
    code, _, err = invoke("works", "--how", "interrupted", "--debug", *words, path=acme)
    assert code != 0 and err.startswith("Traceback") and "KeyboardInterrupt" in err


@pytest.mark.parametrize("module", ["acme_manifest", "rich", "acme_crashes"])
def test_an_interrupt_during_an_import_prints_one_line_too(acme: Path, module: str) -> None:
    (acme / f"{module}.py").write_text("raise KeyboardInterrupt")
    assert invoke("crash", path=acme) == (130, "", "interrupted\n")


def test_an_internal_error_shows_its_traceback(acme: Path) -> None:
    for words in ([], ["--json"]):
        code, _, err = invoke("works", "--how", "badly", *words, path=acme)
        assert code == 1
        assert err.startswith("Traceback") and "ZeroDivisionError: a fault of the program" in err


def test_a_plug_in_warning_turned_into_an_error_prints_one_line(acme: Path) -> None:
    (acme / "acme_manifest.py").write_text("raise RuntimeError('boom')")
    environ: dict[str, Any] = {"PYTHONWARNINGS": "error::UserWarning"}
    code, _, err = invoke("plugins", path=acme, **environ)
    assert code == 1
    assert err == "error: breccia plug-in 'acme' (acme-breccia 0.1) is set aside: RuntimeError: boom\n"


# -- recipes --------------------------------------------------------------------------------------------------------------


def test_recipes_lists_every_recipe_with_its_size_and_formats(run: Run) -> None:
    code, out, _ = run("recipes")
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines[1 : 1 + len(RECIPES)]] == [r.name for r in RECIPES]
    assert lines[0].split() == ["recipe", "bits/value", "element", "block", "scale", "class", "aliases", "distribution"]
    assert "nvfp4 4.500 E2M1 1x16 E4M3 + F32 NVFP4BlockScaling – breccia-core" in " ".join(out.split())
    assert "fp8_row 8.008 E4M3 row F32 Float8RowScaling row breccia-core" in " ".join(out.split())
    assert max(map(len, lines)) <= 100
    assert "shorthand for int1 int,bits=1" in " ".join(out.split()) and "q4_1 int4,group_size=32,offset=bias" in " ".join(
        out.split()
    )


def test_recipes_lists_every_field_with_its_default_and_its_values(run: Run) -> None:
    _, out, _ = run("recipes")
    fields = out.partition("recipe       field")[2].partition("\nSet fields")[0].splitlines()[1:]
    declared = breccia.dispatch.registry.registry().recipes.values()  # also those of plug-ins
    named = [line for line in fields if line[:40].strip()]  # others go on with long values
    assert len(named) == sum(len(dataclasses.fields(r)) for r in declared)  # type: ignore[arg-type]
    said = [" ".join(line.split()) for line in fields]
    assert "int4 group_size 128 int" in said and "scale_dtype fp16 fp16, bf16 or fp32" in said
    assert "mxfp8 fp8_format E4M3 E4M3 or E5M2" in said and "block_size 32 only 32" in said
    assert "int8 group_size null int or null" in said and "two_level true false or true" in said
    assert "amax_history_len 16 int; does not change the bytes" in said
    assert "symmetric true false or true; false implies signed=false" in said
    whole = " ".join(" ".join(fields).split())
    assert "offset zero_point zero_point, float_zero_point or bias; float_zero_point or bias implies symmetric=false" in whole


def test_every_value_that_recipes_lists_is_taken_and_no_other(run: Run) -> None:
    for listed in json.loads(run("recipes", "--json")[1]):
        for field in listed["fields"]:
            wrong = "?" if isinstance(field["default"], str) else 10**6
            if field["choices"]:
                with pytest.raises(breccia.RecipeError, match=field["name"]):
                    breccia.recipe(listed["name"], **{field["name"]: wrong})
            for value in field["choices"]:
                try:
                    found = breccia.recipe(listed["name"], **{field["name"]: value})
                except breccia.RecipeError as e:  # it contradicts the default of another field, as the message says
                    assert "require" in str(e) or "is for" in str(e)
                else:
                    assert getattr(found, field["name"]) == value


def test_bits_per_value_are_those_of_a_cast(recipe: breccia.ScalingRecipe) -> None:
    st = breccia.cast(np.ones((128, 128), np.float32), recipe)
    assert bits_per_value(recipe, 128) == 8 * st.nbytes / 128**2


def test_recipes_of_a_name_explains_it_with_the_fields_given(run: Run) -> None:
    code, out, _ = run("recipes", "nvfp4", "INT4,group_size=32,symmetric=false,signed=false")
    nvfp4, _, int4 = out.partition("\n\nint4: INT4Scaling")
    said = " ".join(nvfp4.split())
    assert code == 0 and f"nvfp4: NVFP4BlockScaling of breccia-core {breccia.__version__}" in said
    assert "16 E2M1 elements along K share an E4M3 scale, under one FP32 scale per tensor." in said
    assert "`two_level=False` omits the FP32 scale" in said
    assert "bits per value 4.500, scales included, in a 4096x4096 matrix" in said
    assert "scale E4M3, 8 bits, multiplies codes, one per block of 1x16, by rule linear" in said
    assert "global scale F32, 32 bits, multiplies codes, one per tensor, by rule linear" in said
    assert "aliases – source Pretraining Large Language Models with NVFP4" in said
    said = " ".join(int4.split())
    assert "bits per value 4.750" in said and "element UINT4, 4 bits" in said and "group_size 32 int" in said
    assert "offset zero-point, one per block of 1x32" in said


def test_recipes_as_json_has_all_that_the_text_has(run: Run) -> None:
    (found,) = json.loads(run("recipes", "row,scale_rule=te", "--json")[1])
    fields = found.pop("fields")
    assert found == {
        "name": "fp8_row",
        "class": "Float8RowScaling",
        "aliases": ["row"],
        "distribution": "breccia-core",
        "version": breccia.__version__,
        "summary": "FP8 with one FP32 scale per row along K: per token for activations, per output channel for weights.",
        "source": "torchao 0.18, float8 rowwise scaling (PerRow)",
        "spec": "fp8_row,scale_rule=te",
        "bits_per_value": 8 + 32 / 4096,
        "element": {"codec": "E4M3", "bits": 8},
        "alternative": None,
        "scale": {"codec": "F32", "bits": 32, "block": [1, None], "convention": "multiplier"},
        "coarser_scales": [],
        "global_scale": None,
        "offset": "none",
        "features": [],
        "rules": ["te"],
        "training": None,
    }
    assert fields[2] == {
        "name": "scale_rule",
        "type": "str",
        "value": "te",
        "default": "linear",
        "choices": ["linear", "recip", "divide", "te"],
        "needed": False,
        "affects_bytes": True,
        "implies": [None, {}],
    }


def test_recipes_of_an_unknown_name_or_field_says_what_there_is(run: Run) -> None:
    code, out, err = run("recipes", "nvpf4")
    assert (
        (code, out) == (1, "")
        and "no recipe 'nvpf4'; did you mean 'nvfp4'? Known: " in err
        and " fp8_block, fp8_current, " in err
    )
    code, out, err = run("recipes", "nvfp4,block=16")
    assert (code, out) == (1, "") and "recipe 'nvfp4' has no field 'block'" in err and "block_size" in err


def test_recipes_lists_the_presets_for_training(run: Run) -> None:
    _, out, _ = run("recipes")
    said = " ".join(out.partition("for training")[2].split())
    assert (
        "fp8_tile input fp8_block input_columns fp8_block,block_m=128 weight fp8_block,block_m=128 gradient fp8_block mx"
        in said
    )
    assert (
        "weight nvfp4,block_m=16 gradient nvfp4 gradient_rounding stochastic hadamard 16 breccia.TrainingRecipe(NAME)" in said
    )
    training = {one["name"]: one["training"] for one in json.loads(run("recipes", "--json")[1])}
    assert {name for name, of in training.items() if of} == set(PRESETS)
    assert all(breccia.TrainingRecipe.from_dict(training[name]) == breccia.TrainingRecipe(name) for name in PRESETS)


def test_recipes_of_a_preset_shows_what_its_gemms_multiply(run: Run) -> None:
    code, out, _ = run("recipes", "fp8_tile")
    assert code == 0 and out.startswith("fp8_tile: preset of breccia.TrainingRecipe\n")
    assert " ".join(out.partition("GEMM  ")[2].split()) == (
        "multiplies as output rows of x fp8_block rows of w fp8_block,block_m=128 "
        "grad_input rows of dy fp8_block columns of w fp8_block,block_m=128 "
        "grad_weight columns of dy fp8_block columns of x fp8_block,block_m=128"
    )
    _, out, _ = run("recipes", "NVFP4")  # also a recipe for casts
    said = " ".join(out.split())
    assert said.startswith("nvfp4: NVFP4BlockScaling of breccia-core") and "nvfp4: preset of breccia.TrainingRecipe" in said
    assert "grad_weight columns of dy nvfp4, rounded stochastically, rotated in blocks of 16" in said
    assert "TrainingRecipe" not in run("recipes", "nvfp4,block_m=16")[1]
    (found,) = json.loads(run("recipes", "fp8_tile", "--json")[1])
    assert found == {
        "name": "fp8_tile",
        "class": "TrainingRecipe",
        "fields": [],
        "training": breccia.TrainingRecipe("fp8_tile").to_dict(),
    }


def test_recipes_of_a_wrong_name_hints_at_presets_too(run: Run) -> None:
    code, out, err = run("recipes", "fp8_tlie")
    assert (code, out) == (1, "") and "error: no recipe 'fp8_tlie'; did you mean 'fp8_tile'? Known: " in err
    assert "fp8_row, fp8_tile, gguf" in err
    assert "'e4m3' is an element format, not a recipe" in run("recipes", "e4m3")[2]


@dataclasses.dataclass(frozen=True)
class Flooring(breccia.MXFP4BlockScaling):
    scale_rule: str = "floor"


def test_a_subclass_that_changes_a_default_keeps_the_values_that_the_field_takes() -> None:
    assert choices_of(Flooring, "scale_rule") == (("rceil", "floor", "even", "mse"), "")
    assert choices_of(Flooring, "block_size") == ((32,), " by the OCP MX spec")
    with pytest.raises(breccia.RecipeError, match="scale_rule must be one of 'rceil', 'floor', 'even', 'mse', got 'up'"):
        Flooring(scale_rule="up")


@dataclasses.dataclass(frozen=True)
class Asking(breccia.ScalingRecipe):
    """A recipe whose block has no default.

    Nothing else about it matters.
    """

    name: ClassVar[str] = "asking"
    block_size: int
    hint: str | None = None

    @cached_property
    def format(self) -> Format:
        return Format(E4M3, (Level(F32, (1, self.block_size)),))


def test_recipes_lists_one_whose_fields_have_no_default(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry()
    monkeypatch.setitem(known.declared["breccia_recipes"], "asking", Asking)
    owner = Plugin("acme", "acme-breccia", "0.1", "acme.plugin", declares=("recipes:asking",))
    monkeypatch.setattr(known, "plugins", [*known.plugins, owner])
    code, out, _ = run("recipes")
    said = " ".join(out.split())
    assert code == 0 and "asking – – – – Asking – acme-breccia" in said
    assert "asking block_size (needed) int hint null str or null" in said
    found = next(one for one in json.loads(run("recipes", "--json")[1]) if one["name"] == "asking")
    assert found["bits_per_value"] is None and found["scale"] is None and found["fields"][0]["needed"]
    assert found["summary"] == "A recipe whose block has no default."
    code, _, err = run("recipes", "asking")
    assert code == 1 and "error: recipe 'asking' has no default for block_size; give it a value." in err
    assert "scale F32, 32 bits, multiplies codes, one per block of 1x64" in " ".join(
        run("recipes", "asking,block_size=64")[1].split()
    )
