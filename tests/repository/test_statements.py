"""What pages say there is, there is: names, calls, recipes, commands, options, files, and numbers of things."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from paths import ROOT

import breccia
from breccia.cli.main import application
from breccia.cli.recipes import bits_per_value
from breccia.dispatch import hookspecs
from breccia.dispatch.registry import registry
from breccia.recipes import RECIPES, ScalingRecipe
from breccia.rules import RULES, Exponent

DOCS = ROOT / "docs"
#: All pages but the changelog, which also names what is gone.
PAGES = [p for p in [*ROOT.glob("*.md"), *ROOT.glob("breccia-*/*.md"), *DOCS.glob("**/*.md")] if p.name != "CHANGELOG.md"]
#: Pages of benchmarks/draw.py, whose options and commands are those of scripts.
MEASURED = re.compile(r"docs/(?:(?:measured|kernels)/.*|(?:spec/)?numerics\.md|agreement\.md)")
#: Names that pages write to say that they do not exist.
ABSENT = {"breccia._core", "breccia.bridges.to_acme"}

FENCE = re.compile(r"^( *)(`{3,}|~{3,})[^\n]*\n.*?^\1\2[`~]*$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
LIBRARY = re.compile(r"(?<![\w./-])([a-z_]+(?:\.[A-Za-z_]\w*)+)\b(?!\.\w)")
DOTTED = re.compile(r"(?<![\w./-])breccia(?:_\w+)?(?:\.[A-Za-z_]\w*)+(?![\w]|\.html)")

pytestmark = pytest.mark.together


@cache
def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def stating() -> list[Path]:
    """Pages whose options, commands and numbers are those of breccia, and not those of scripts."""
    return [page for page in PAGES if not MEASURED.fullmatch(page.relative_to(ROOT).as_posix())]


def inline(*pages: Path) -> Iterator[tuple[str, str]]:
    """(page, code) of all code inside lines."""
    for page in pages or PAGES:
        for found in INLINE.findall(prose(page)):
            yield page.relative_to(ROOT).as_posix(), " ".join(found.split())


def resolve(dotted: str) -> Any:
    """The object of a dotted name. Raises ImportError or AttributeError."""
    words = dotted.split(".")
    for count in range(len(words), 0, -1):
        module = ".".join(words[:count])
        try:
            found = import_module(module)
        except ModuleNotFoundError as e:
            if not f"{module}.".startswith(f"{e.name}."):
                raise
            continue
        for word in words[count:]:
            found = getattr(found, word)
        return found
    raise ImportError(f"no module named {words[0]!r}")


def is_absent(error: BaseException) -> bool:
    """Does it say that a package which not every environment has is not installed?"""
    name = getattr(error, "name", None) or ""
    return isinstance(error, ImportError) and not name.startswith("breccia") and bool(name) and find_spec(name) is None


# -- Python ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_every_name_of_breccia_and_of_frameworks_in_a_page_exists() -> None:
    """Names of frameworks may be those of kernels: `torch.cpu.cast`."""
    kernels = {kernel.name for kernel in registry().table.kernels}
    roots = {name.partition(".")[0] for name in kernels} | {"transformers", "flax", "optax"}
    pytest.importorskip("breccia_torch.operators", reason="breccia-torch registers torch.ops.breccia")
    wrong: list[str] = []
    checked: set[str] = set()
    for page, code in inline():
        names = set(DOTTED.findall(code))
        if not MEASURED.fullmatch(page):
            names |= {name for name in LIBRARY.findall(code) if name.partition(".")[0] in roots}
        for name in names - ABSENT - kernels:
            checked.add(name)
            try:
                resolve(name)
            except (ImportError, AttributeError) as e:
                if not is_absent(e):
                    wrong.append(f"{page}: {name}: {e}")
    assert not wrong, "\n".join(wrong)
    assert len(checked) > 100 and all(any(name in code for _, code in inline()) for name in ABSENT)


@pytest.mark.parametrize(("package", "page"), [("breccia_torch", "pytorch"), ("breccia_jax", "jax"), ("breccia_mlx", "mlx")])
def test_every_public_name_of_a_framework_s_package_is_on_its_api_page(package: str, page: str) -> None:
    text = (DOCS / "api" / f"{page}.md").read_text(encoding="utf-8")
    names = set(pytest.importorskip(package).__all__) - {"enable_compile"}  # deprecated
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []


def test_every_attribute_of_a_tensor_in_a_page_exists() -> None:
    known = {*dir(breccia.ScaledTensor), *breccia.ScaledTensor.__dataclass_fields__}
    wrong = [f"{page}: {code}" for page, code in inline() for name in re.findall(r"\bst\.(\w+)", code) if name not in known]
    assert not wrong, "\n".join(wrong)


def calls() -> Iterator[tuple[str, ast.Call, Callable[..., Any]]]:
    """(page, call, what it calls) of calls in lines of functions and classes of `breccia`."""
    for page, code in inline():
        try:
            call = ast.parse(code.replace("…", "..."), mode="eval").body
        except SyntaxError:
            continue
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func).removeprefix("breccia.")
        if name in breccia.__all__ and callable(getattr(breccia, name)):
            yield page, call, getattr(breccia, name)


def test_every_call_in_a_page_has_arguments_that_exist() -> None:
    wrong: list[str] = []
    counted = 0
    for page, call, function in calls():
        counted += 1
        keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        try:
            inspect.signature(function).bind_partial(*call.args, **keywords)
            if inspect.isclass(function) and issubclass(function, ScalingRecipe):
                made = {name: ast.literal_eval(value) for name, value in keywords.items()}
                if Ellipsis not in made.values() and not call.args:
                    function(**made)
        except ValueError:
            pass  # a variable
        except Exception as e:
            wrong.append(f"{page}: {ast.unparse(call)}: {e}")
    assert not wrong, "\n".join(wrong)
    assert counted > 40


def test_every_recipe_with_fields_in_a_page_can_be_made() -> None:
    wrong: list[str] = []
    names = {name for kind in registry().recipes.values() for name in (kind.name, *kind.aliases)}
    for page, code in inline():
        spec = code.removeprefix("--recipe ")
        if "..." not in spec and re.fullmatch(r"\w+(,\w+=[\w.]+)+", spec) and spec.partition(",")[0] in names:
            try:
                breccia.recipe(spec)
            except breccia.BrecciaError as e:
                wrong.append(f"{page}: {spec}: {e}")
    assert not wrong, "\n".join(wrong)


# -- recipes ---------------------------------------------------------------------------------------------------------


def test_every_recipe_has_a_page_with_its_card_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "recipes").glob("*.md")}
    listed = (DOCS / "recipes.md").read_text(encoding="utf-8")
    for name in registry().recipes:
        assert f"<!-- table: recipe-{name} -->" in pages.get(name, ""), f"docs/recipes/{name}.md"
        assert f"recipes/{name}.md" in navigation and f"[`{name}`](recipes/{name}.md)" in listed, name
    assert set(RECIPES) <= set(registry().recipes.values())


def test_every_engine_has_a_page_that_says_what_does_not_work() -> None:
    for engine in {row["engine"] for row in json.loads((DOCS / "engines.json").read_text(encoding="utf-8"))["rows"]}:
        page = (DOCS / "engines" / f"{engine.replace('_', '-')}.md").read_text(encoding="utf-8")
        assert f"<!-- table: engine-{engine} -->" in page and "\n## What does not work\n" in page, engine


def test_pages_of_recipes_have_every_default_and_the_bits_per_parameter() -> None:
    for kind in RECIPES:
        section = prose(DOCS / "recipes" / f"{kind.name}.md").partition("<!-- end -->")[2]
        (call,) = re.findall(rf"^`({kind.__name__}\(.*?\))`", section, re.MULTILINE | re.DOTALL)
        given = {k.arg: ast.literal_eval(k.value) for k in ast.parse(call, mode="eval").body.keywords}  # type: ignore[attr-defined]
        assert given == {field.name: field.default for field in dataclasses.fields(kind)}, kind.name  # type: ignore[arg-type]
        for bits in re.findall(r"([\d.]+) bits\s+per\s+parameter", section):
            assert bits_per_value(kind()) == pytest.approx(float(bits), abs=0.01), kind.name


# -- the program -----------------------------------------------------------------------------------------------------


@cache
def program() -> dict[str, set[str]]:
    """Commands, "plugin new" among them, and the options of each; those of the program itself are those of ""."""
    context = typer.Context(application())

    def options(command: Any) -> set[str]:
        return {name for parameter in command.get_params(context) for name in (*parameter.opts, *parameter.secondary_opts)}

    found = {"": options(application()) | {"--install-completion", "--show-completion", "--debug"}}
    for name in registry().commands:
        loaded = application().get_command(context, name)._load()
        found[name] = options(loaded)
        found |= {f"{name} {below}": options(c) for below, c in getattr(loaded, "commands", {}).items()}
    return found


def test_every_command_and_option_in_a_page_exists() -> None:
    known = program()
    every = set().union(*known.values())
    wrong: list[str] = []
    for page, code in inline(*stating()):
        if code.startswith("breccia "):
            words = shlex.split(code)[1:]
            command = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
            command = "" if command.startswith("-") else command
            asked = {word for word in words if word.startswith("--")}
            if command not in known or not asked <= known[command] | known[""]:
                wrong.append(f"{page}: {code}")
        elif code.startswith("--") and code.split()[0].partition("=")[0] not in every:
            wrong.append(f"{page}: {code}")
    assert not wrong, "\n".join(wrong)


def test_every_target_file_and_distribution_in_a_page_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    wrong: list[str] = []
    for page, code in inline():
        if (target := re.match(r"make ([a-z-]+)", code)) and f"\n{target[1]}:" not in makefile:
            wrong.append(f"{page}: {code}")
        if re.fullmatch(r"(docs|tests|benchmarks|examples|breccia-\w+)/[\w./-]+", code) and not (ROOT / code).exists():
            wrong.append(f"{page}: {code}")
        for name, extras in re.findall(r"(?<![\w/.-])(breccia-(?!results)[a-z]+)(?:\[([\w,-]+)\])?(?![\w-])", code):
            path = ROOT / name / "pyproject.toml"
            declared = tomllib.loads(path.read_text(encoding="utf-8"))["project"] if path.is_file() else {}
            if not set(filter(None, extras.split(","))) <= set(declared.get("optional-dependencies", ())) or not declared:
                wrong.append(f"{page}: {code}")
    assert not wrong, "\n".join(wrong)


def test_the_variables_of_the_environment_are_those_that_the_source_reads() -> None:
    table = (DOCS / "cli.md").read_text(encoding="utf-8").partition("## Environment")[2]
    source = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("breccia-*/src/**/*.py"))
    assert set(re.findall(r"^\| `(BRECCIA_\w+)", table, re.MULTILINE)) == set(re.findall(r'"(BRECCIA_[A-Z]+)"', source))


# -- numbers ---------------------------------------------------------------------------------------------------------

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NOUNS = (
    "recipes", "frameworks", "distributions", "codecs", "layouts", "bridges", "kernels", "commands", "hooks", "laws",
    "plug-ins", "examples", "storages", "libraries", "variables", "packages", "rules", "dialects",
)  # fmt: skip
#: How many there are of what a noun names, where no sentence about another matter has it.
COUNTS: dict[str, Callable[[], int]] = {
    "frameworks": lambda: len(registry().frameworks),
    "distributions": lambda: len(list(ROOT.glob("breccia-*/pyproject.toml"))),
    "hooks": lambda: sum(name.startswith("breccia_") for name in vars(hookspecs)),
    "variables": lambda: len(re.findall(r"^\| `BRECCIA_\w+", (DOCS / "cli.md").read_text(encoding="utf-8"), re.MULTILINE)),
    "five recipes": lambda: len(assigned(ROOT / "examples" / "demo.py", "RECIPES")),  # those of `make demo`
    "three rules": lambda: sum(isinstance(rule, Exponent) for rule in RULES),  # of E8M0 scales, from amax alone
    "six recipes": lambda: 6,  # of breccia 0.1
}


def assigned(path: Path, name: str) -> Any:
    """The constant that a module assigns to a name."""
    return ast.literal_eval(re.search(rf"^{name} = (\(.*?\)|\S+)$", path.read_text(encoding="utf-8"), re.M | re.S)[1])  # type: ignore[index]


def number(word: str) -> int:
    return int(word) if word.isdigit() else WORDS.index(word.lower())


def test_every_number_of_things_in_a_page_is_that_of_the_registry() -> None:
    pattern = re.compile(rf"\b({'|'.join(WORDS[3:])}|[3-9]|[1-9]\d)\s+({'|'.join(NOUNS)})\b", re.IGNORECASE)
    wrong: list[str] = []
    for page in stating():
        text = re.sub(r"\s+", " ", prose(page))
        for found in pattern.finditer(text):
            count = COUNTS.get(found[0].lower()) or COUNTS.get(found[2].lower())
            if count is None or count() != number(found[1]):
                wrong.append(f"{page.relative_to(ROOT)}: ...{text[max(0, found.start() - 40) : found.end() + 40]}...")
    assert not wrong, "\n".join(wrong)


def test_every_example_is_on_its_page() -> None:
    page = (DOCS / "examples.md").read_text(encoding="utf-8")
    assert set(re.findall(r"examples/(\d\w+\.py)\)", page)) == {path.name for path in ROOT.glob("examples/[0-9]*.py")}
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob("examples/[0-9]*.py")]
    least, most = map(int, re.findall(r"each (\d+) to (\d+) lines", page)[0])
    assert least <= min(lines) and max(lines) <= most


def test_versions_in_pages_are_those_of_the_distributions() -> None:
    for project in ROOT.glob("breccia-*/pyproject.toml"):
        assert tomllib.loads(project.read_text(encoding="utf-8"))["project"]["requires-python"] == ">=3.11"
    for page in PAGES:
        for version in re.findall(r"Python (\d\.\d+) or newer", prose(page)):
            assert version == "3.11", page
    assert f"The version is {breccia.__version__}," in (DOCS / "index.md").read_text(encoding="utf-8")


def test_the_list_of_bridges_has_every_bridge() -> None:
    page = "\n".join(code for _, code in inline(DOCS / "bridges.md"))
    bridges = [name for name in registry().bridges if name.startswith(("from_", "to_", "load_", "save_"))]
    assert len(bridges) > 15 and [name for name in bridges if not re.search(rf"\b{name}\b", page)] == []


def test_the_page_of_plug_ins_has_every_hook() -> None:
    listed = re.search(r"members: \[(breccia_codecs[^]]*)\]", (DOCS / "api" / "plugins.md").read_text(encoding="utf-8"))
    assert listed and listed[1].split(", ") == [name for name in vars(hookspecs) if name.startswith("breccia_")]


def test_checkpoints_that_pages_call_refused_or_planned_are_refused() -> None:
    pytest.importorskip("breccia_bridges", reason="breccia-bridges reads checkpoints")
    refused = " ".join(f"{d.title} {d.name}" for d in registry().dialects.values() if d.read is None).lower()
    text = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("migration/index", "bridges", "cli/sources")}
    first = text["migration/index"].partition("\n## ")[0]
    migration = dict(re.findall(r"^\| ([^|]+) \| (refused|\S.*?) \|", first, re.MULTILINE))
    assert {row: said for row, said in migration.items() if (row.partition(" ")[0].strip(",").lower() in refused)} == {
        row: said for row, said in migration.items() if said == "refused"
    }
    planned = re.findall(r"^\| ([^|]+) \| checkpoint dialects \| planned", text["bridges"], re.MULTILINE)
    (listed,) = re.findall(r"refused by name\*\*, before anything is written: (.*?) and more\.", text["cli/sources"], re.DOTALL)
    named = [
        name.strip()
        for said in (*(r for r in migration if migration[r] == "refused"), *planned, listed)
        for name in said.split(",")
    ]
    assert len(named) > 5
    for name in named:
        known = re.sub(r"\s+", " ", name).lower().removeprefix("mxfp4 of ")
        assert known in refused, f"{name}: breccia reads it, or does not know it"


def test_the_comparisons_of_the_faq_name_what_there_is() -> None:
    """Frameworks, recipes and libraries of the column of breccia, beside TransformerEngine's."""
    rows = dict(re.findall(r"^\| ([\w ]+) \|[^|\n]*\| ([^|\n]*) \|$", (DOCS / "faq.md").read_text(), re.MULTILINE))
    assert {name.lower().removeprefix("py") for name in rows["frameworks"].split(", ")} == set(registry().frameworks)
    named = {name.lower() for name in re.findall(r"\b(?:MX)?(?:FP|INT|NF)\d\b", rows["recipes"])}
    assert len(named) > 5 and all(breccia.recipe(name).name == name for name in named)
    listed = rows["exchange with others"].partition("[tensors](bridges.md) of ")[2]
    bridges = {name.lower().replace("-", "_") for name in re.split(", | and ", listed)}
    found = {name.removeprefix("from_") for name in dir(breccia.bridges) if name.startswith("from_")}
    others = {"dlpack", "te_recipe", "deepseek_v3"}  # no tensor of a library; DeepSeek-V3's are named as checkpoints
    assert {name.replace("transformerengine", "transformer_engine") for name in bridges} == {
        name for name in found - others if not name.endswith("_layer")
    }


def test_the_table_of_hardware_says_what_results_and_kernels_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The column "tested there" has the machines of the committed results; the kernels named run on the rows named."""
    triton = pytest.importorskip("breccia_triton.availability", reason="the rows of GPUs are of breccia-triton")
    from breccia_triton.gemm.fp8 import plans as fp8_plans
    from breccia_triton.gemm.scaled_mm import plans as torch_plans
    from breccia_triton.gemm.weight_only import plans as weight_plans

    section = (DOCS / "support.md").read_text(encoding="utf-8").partition("\n## Hardware\n")[2].partition("\n## ")[0]
    cells = (line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| "))
    rows = {row[0]: row[1:] for row in cells if row[0] != "hardware"}
    cpu, hopper, _, blackwell, amd, apple, tpu, trainium = rows

    runs = [run for path in (ROOT / "benchmarks/results").glob("*.json") for run in json.loads(path.read_text())["runs"]]
    gpus = {run["device"] for run in runs if "CUDA" in run.get("device", "").upper()}
    assert {re.search(r"NVIDIA (\w+)", gpu)[1] for gpu in gpus} == set(re.findall(r"\b[A-Z]+\d+\b", rows[hopper][1]))
    assert rows[cpu][1] == "on x86-64" and all(re.search("Intel|AMD EPYC", run["cpu"]) for run in runs)
    assert all(rows[row][1].startswith("no") for row in (amd, apple, tpu, trainium))

    monkeypatch.setitem(sys.modules, "torch", None)  # one built without CUDA would be the reason

    def refused(available: Callable[[Any], str | None], *capability: int) -> bool:
        return "compute capability" in (available(breccia.Device("cuda", 0, capability)) or "")

    for capability in ((8, 9), (10, 0)):  # Ada, Blackwell: Triton's kernels, and none of Hopper's instructions
        assert not refused(triton.available, *capability)
        assert refused(fp8_plans.available, *capability) and refused(weight_plans.available, *capability)
    assert not any(refused(module.available, 9, 0) for module in (triton, fp8_plans, weight_plans))
    assert refused(torch_plans.block_scaled_available, 9, 0) and not refused(torch_plans.block_scaled_available, 10, 0)
    for row, kernel in ((blackwell, "torch.block_scaled_mm"), (apple, "mlx.quantized_matmul")):
        library = kernel.replace("mlx.", "mx.")
        assert library in rows[row][0] and next(k for k in registry().table.kernels if k.name == kernel).opt_in
    dtypes = {value.dtype for value in vars(breccia.codecs).values() if isinstance(value, breccia.codecs.Codec)}
    assert {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz"} <= dtypes
    assert "float8_e4m3fnuz" in section and "float8_e5m2fnuz" in section
