"""What plug-ins declare, as tables in Markdown: kernels, recipes, codecs, rules, layouts, storages, bridges, commands.

All of it is asked of the registry, so that whatever is added shows by itself.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from harness.blocks import table

from breccia import targets
from breccia.arrays.frameworks import Device, Framework
from breccia.cli.recipes import bits_per_value, covered
from breccia.codecs import Codec, Integer, Lookup, Minifloat, PowerOfTwo
from breccia.dispatch.call import Call
from breccia.dispatch.explanation import Explanation
from breccia.dispatch.facts import Described
from breccia.dispatch.hookspecs import Bridge
from breccia.dispatch.registry import registry
from breccia.dispatch.table import Table
from breccia.errors import RecipeError
from breccia.formats import Format
from breccia.operations import OPERATIONS
from breccia.options import DEFAULT
from breccia.policies import COMPLETE, KEEP, KEPT, PRESETS
from breccia.recipes import ScalingRecipe, choices_of
from breccia.tensors.grids import packing
from breccia.tensors.storage import Storage

ROOT = Path(__file__).resolve().parents[2]
#: Rows and columns of a matrix in which scales of whole rows and tensors take no bits that are shown.
SIDE = 1 << 20
#: Which devices a framework is asked about beside its own default; kernels' declarations add theirs.
DEVICES = {"torch": {"cuda"}}
NONE = "—"


def link(name: str, location: str) -> str:
    """The name, with a link to `file:line` as pages directly in docs/ write it. Exits where there is no such place."""
    file, _, line = location.rpartition(":")
    if not line.isdigit() or not Path(file).is_relative_to(ROOT):
        sys.exit(f"generate: {name} is said to be at {location!r}, which is no line of this repository.")
    return f"[`{name}`](../{Path(file).relative_to(ROOT).as_posix()}#L{line})"


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def first_sentence(docstring: str | None) -> str:
    return re.split(r"(?<=\.)\s", " ".join(inspect.cleandoc(docstring or "").split()))[0]


# ---------------------------------------------------------------------------------------------------- kernels


def support_matrix() -> str:
    """By op and framework the kernel of every recipe, and the kernels that it calls; recipes with equal cells share a row."""
    recipes = list(registry().recipes)
    places = columns()
    cells = {(op, r, on): cell(op, r, on) for op in OPERATIONS for r in recipes for on in places}
    shown = [on for on in places if ":" not in on or any(cells[op, r, on] != cells[op, r, _of(on)] for op, r, _ in cells)]
    rows: list[list[str]] = []
    for op in OPERATIONS:
        groups: dict[tuple[str, ...], list[str]] = {}
        for r in recipes:
            groups.setdefault(tuple(cells[op, r, on] for on in shown), []).append(r)
        rows += [[f"`{op}`", "every recipe" if len(groups) == 1 else code(alike), *found] for found, alike in groups.items()]
    notes = [f"Every recipe: {code(recipes)}.\n"]
    same = [on for on in places if on not in shown]
    if same:
        notes.append(f"On {code(same)} the kernels are those of {code(sorted({_of(on) for on in same}))} without a device.\n")
    return "\n".join([table(["op", "recipes", *shown], rows), *notes, *missing(shown)])


def columns() -> list[str]:
    """Each framework, and each with a device that is named for it."""
    found: list[str] = []
    for name in registry().frameworks:
        devices = {k.device for k in registry().table.kernels if k.device and k.framework == name} | DEVICES.get(name, set())
        found += [name, *(f"{name}:{device}" for device in sorted(devices - {"cpu"}))]
    return found


def _of(on: str) -> str:
    return on.partition(":")[0]


def cell(op: str, recipe: str, on: str) -> str:
    """The kernels of `op`, linked: where one has needs of its own, also the one that runs without it."""
    kernels = registry().table.kernels
    everything, unconditional = ([replace(k, available=None) for k in kernels], [k for k in kernels if not k.available])
    found = winners(Table(everything), op, recipe, on)
    others = {name: inner for name, inner in winners(Table(unconditional), op, recipe, on).items() if name not in found}
    return " or, where it is not available, ".join(filter(None, map(_joined, (found, others)))) or NONE


def winners(kernels: Table, op: str, recipe: str, on: str) -> dict[str, dict[str, None]]:
    """The kernel, or kernels where the other operand's recipe decides (`requantize`: the new one), and what each calls."""
    found: dict[str, dict[str, None]] = {}
    for e in asked(kernels, op, recipe, on):
        if e.winner:
            found.setdefault(_linked(e), {}).update((_linked(step), None) for step in e.plan if step.winner)
    return found


def _joined(found: dict[str, dict[str, None]]) -> str:
    return ", ".join(name + (f" ({', '.join(inner)})" if inner else "") for name, inner in found.items())


def _linked(e: Explanation) -> str:
    """The winner of an explanation."""
    winner = next(v for v in e.verdicts if v.reason is None)
    return link(winner.kernel.name, winner.location)


def asked(kernels: Table, op: str, recipe: str, on: str) -> Iterator[Explanation]:
    """What `breccia.explain` says of `op`: with products both operands under the recipe, with requantize to any other."""
    framework, _, device = on.partition(":")
    r = example(recipe)
    place = Device(device or "cpu")
    array, scaled = Described(device=place), described(r, place)
    for new in [example(n) for n in registry().recipes if n != recipe] if op == "requantize" else [r]:
        operation = OPERATIONS[op]
        first = array if operation.casts else scaled
        second = None if operation.second is None else scaled
        written = None if operation.target is None else r if operation.casts else new
        values = (first, second, written, operation.default or DEFAULT, registry().frameworks[framework])
        found = kernels.explain(Call(operation, framework, values), None, device)
        if found.tied:
            sys.exit(f"generate: {found}")
        yield found


def described(recipe: ScalingRecipe, place: Device) -> Described:
    """A matrix under that recipe whose sides every block divides."""
    return Described(recipe, recipe.format.element.dtype or "uint8", (256, 256), recipe.layout, -1, place)


def missing(shown: list[str]) -> list[str]:
    """Why cells are empty: which ops no plug-in declares a kernel of, on which framework."""
    kernels = registry().table.kernels
    absent: dict[tuple[str, ...], list[str]] = {}
    for op in OPERATIONS:
        without = tuple(on for on in shown if not any(k.op == op and k.framework in (_of(on), "*") for k in kernels))
        if without:
            absent.setdefault(without, []).append(op)
    return [f"{NONE}: no plug-in declares a kernel of {code(ops)} for {code(places)} yet.\n" for places, ops in absent.items()]


@cache
def example(name: str) -> ScalingRecipe:
    """The recipe of that name, with every field at its default."""
    return registry().recipes[name]()


# ---------------------------------------------------------------------------------------------------- what else is declared


def frameworks() -> str:
    def row(f: Framework) -> list[str]:
        arrays, frontend = code(f"{f.module}.{t}" for t in f.types), f"`{f.frontend}`" if f.frontend else NONE
        return [f"`{f.name}`", arrays, link(f.ops, targets.locate(f.ops)), frontend]

    return table(["framework", "arrays", "primitives", "frontend"], map(row, registry().frameworks.values()))


def bridges() -> str:
    rows = [
        [link(f"breccia.bridges.{b.name}", targets.locate(b.target)), f"`{b.plugin}`", code(b.requires) or "nothing more"]
        for b in registry().bridges.values()
    ]
    return table(["bridge", "plug-in", "needs"], rows)


def commands() -> str:
    rows = [
        [link(f"breccia {c.name}", targets.locate(c.target)), f"`{c.plugin}`", c.help] for c in registry().commands.values()
    ]
    return table(["command", "plug-in", "what it does"], rows)


def api_bridges() -> str:
    """What the API page of bridges documents, each under the name that users write."""

    def entry(b: Bridge) -> str:
        options = f"{{heading: breccia.bridges.{b.name}, toc_label: {b.name}, heading_level: 2}}"
        return f"::: {b.target.replace(':', '.')}\n    options: {options}\n"

    return "".join(map(entry, registry().bridges.values()))


# ---------------------------------------------------------------------------------------------------- codecs


def codecs() -> str:
    headings = [
        "codec",
        "bits",
        "layout",
        "bias",
        "largest",
        "smallest normal",
        "smallest subnormal",
        "NaN, as written",
        "Inf",
        "dtype",
    ]
    return table(headings, ([f"`{c.name}`", str(c.bits), *facts(c)] for c in registry().declared["breccia_codecs"].values()))


def facts(c: Codec) -> list[str]:
    """Layout, bias, largest, smallest normal and subnormal number, NaN and Inf codes, dtype."""
    nan, dtype = hexadecimal(c, c.nan_code), f"`{c.dtype}`" if c.dtype else NONE
    match c:
        case Minifloat():
            normal, step = 1 - c.bias, 1 - c.bias - c.mantissa_bits
            fields = f"{int(c.signed)}.{c.exponent_bits}.{c.mantissa_bits}"
            return [fields, str(c.bias), number(c.max), power(normal), power(step), nan, hexadecimal(c, c.inf), dtype]
        case PowerOfTwo():
            return [f"0.{c.bits}.0", str(c.bias), power(c.nan - 1 - c.bias), power(-c.bias), NONE, nan, NONE, dtype]
        case Integer():
            kind = "two's complement" if c.signed else "unsigned"
            kind += f", times 2^-{c.fraction_bits}" if c.fraction_bits else ""
            lowest = f" (lowest {number(c.low * 2.0**-c.fraction_bits)})" if c.signed else ""
            return [kind, NONE, number(c.max) + lowest, power(-c.fraction_bits), NONE, nan, NONE, dtype]
        case Lookup():
            ends = f"{number(c.max)} (lowest {number(min(c.values))})"
            least = number(min(v for v in c.values if v > 0))
            return [f"table of {len(c.values)}", NONE, ends, least, NONE, nan, NONE, dtype]
    return [type(c).__name__, NONE, number(c.max), NONE, NONE, nan, NONE, dtype]


def power(exponent: int) -> str:
    return f"2^{exponent}" if exponent else "1"


def number(value: float) -> str:
    return f"{value:.7g}".replace("-", "−", 1) if value < 0 else f"{value:.7g}"


def hexadecimal(c: Codec, found: int | None) -> str:
    return NONE if found is None else f"`0x{found:0{c.bits // 4}X}`"


def storage() -> str:
    """The dtype that each framework stores codes in. Loads the frameworks."""
    primitives = {name: targets.load(f.ops) for name, f in registry().frameworks.items()}
    groups: dict[tuple[str, ...], list[str]] = {}
    for c in registry().declared["breccia_codecs"].values():
        groups.setdefault(tuple(f"`{o.storage(c)}`" for o in primitives.values()), []).append(c.name)
    return table(["codecs", *primitives], ([code(names), *dtypes] for dtypes, names in groups.items()))


# ---------------------------------------------------------------------------------------------------- recipes


def formats() -> str:
    headings = ["recipe", "class", "element", "scale", "block", "global scale", "offset", "packing", "bits per parameter"]
    rows: list[list[str]] = []
    for name, kind in registry().recipes.items():
        fmt = example(name).format
        every = [variant.format for variant in variants(kind)]
        global_scales = [f"{f.global_scale.codec.name} per tensor" if f.global_scale else "none" for f in every]
        codes, size = packing(fmt.element)
        rows.append(
            [
                f"`{name}`",
                f"`{kind.__name__}`",
                either(f.element.name for f in every),
                scales(every),
                covered(fmt.scale.block).replace("x", "×"),
                NONE if set(global_scales) == {"none"} else either(global_scales),
                NONE if {f.offset for f in every} == {"none"} else either(f.offset.replace("_", "-") for f in every),
                "one in a byte" if (codes, size) == (1, 1) else f"{codes} in {size} byte{'s' if size > 1 else ''}",
                f"{round(bits_per_value(example(name), SIDE), 4):g}",
            ]
        )
    return table(headings, rows)


def scales(formats: Iterable[Format]) -> str:
    """The codecs of the scales of blocks, those of the finest level first."""
    finest: dict[str, list[str]] = {}
    for fmt in formats:
        coarser = "".join(f" under {level.codec.name} per {level.block[1]}" for level in reversed(fmt.block_levels[:-1]))
        finest.setdefault(coarser, []).append(fmt.scale.codec.name)
    return "; ".join(either(names) + coarser for coarser, names in finest.items())


def either(names: Iterable[str]) -> str:
    *others, last = dict.fromkeys(names)
    return f"{', '.join(others)} or {last}" if others else last


def variants(kind: type[ScalingRecipe]) -> list[ScalingRecipe]:
    """The recipes of a class that can be had by its words and truth values, the default one first."""
    choices = {f.name: [getattr(kind(), f.name), *values(kind, f)] for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    found: list[ScalingRecipe] = []
    for chosen in itertools.product(*choices.values()):
        try:
            found.append(kind(**dict(zip(choices, chosen, strict=True))))
        except RecipeError:  # fields that contradict each other
            continue
    return list(dict.fromkeys(found))


def values(kind: type[ScalingRecipe], field: dataclasses.Field[Any]) -> list[Any]:
    """The other values that a field of words or truth values takes."""
    default = getattr(kind(), field.name)
    if isinstance(default, bool):
        return [not default]
    return [v for v in choices_of(kind, field.name)[0] if v != default]


def allowed(kind: type[ScalingRecipe], field: dataclasses.Field[Any]) -> str:
    """What a field takes, in the words with which the class refuses anything else."""
    default = getattr(kind(), field.name)
    if isinstance(default, bool):
        return "True or False"
    try:
        kind(**{field.name: "?" if isinstance(default, str) else -(10**6)})
    except RecipeError as e:
        said = re.search(rf"(?:\b{field.name}|a rotation's \w+) (?:must be |must lie in |is )(.+)[,;] got ", str(e))
        whole = ", or None" if default is None or "None" in str(field.type) else ""
        return said[1].replace("fixed at ", "only ") + whole if said else str(e)
    return str(field.type)


def recipe_fields() -> str:
    rows: list[list[str]] = []
    for name, kind in registry().recipes.items():
        for place, f in enumerate(dataclasses.fields(kind)):  # type: ignore[arg-type]
            head = ["", ""] if place else [f"`{name}`", f"`{kind.__name__}`"]
            note = "" if f.metadata.get("affects_bytes", True) else "; affects no byte"
            taken = re.sub(r"'([^']+)'", r'`"\1"`', allowed(kind, f))
            rows.append([*head, f"`{f.name}`", "`" + repr(getattr(kind(), f.name)).replace("'", '"') + "`", taken + note])
    return table(["recipe", "class", "field", "default", "takes"], rows)


def layouts() -> str:
    rows: list[list[str]] = []
    for name, kind in registry().layouts.items():
        fields = (f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default!r}" for f in dataclasses.fields(kind))  # type: ignore[arg-type]
        rows.append([f"`{name}`", f"`{kind.__name__}({', '.join(fields)})`", first_sentence(kind.__doc__)])
    return table(["layout", "class and fields", "scale"], rows)


def storages() -> str:
    def row(s: Storage) -> list[str]:
        moved = "codes and scales" if s.data_axes else "scales"
        return [f"`{s.name}`", moved, paragraph(targets.load(s.from_plain))]

    return table(["storage", "moves", "order"], map(row, registry().declared["breccia_storages"].values()))


def paragraph(function: Any) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join(inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0].split())


def scale_rules() -> str:
    recipes = registry().recipes
    rows: list[list[str]] = []
    for name, rule in registry().declared["breccia_rules"].items():
        default = [r for r in recipes if name in {x.name for x in example(r).rules}]
        fields = [r for r, kind in recipes.items() if any(getattr(v, "scale_rule", None) == name for v in variants(kind))]
        said = re.search(rf"^ *`{name}`: (.+?\.)(?:\s|$)", type(rule).__doc__ or "", re.MULTILINE)
        what = said[1] if said else first_sentence(type(rule).__doc__)
        rows.append([f"`{name}`", code(default) or NONE, code(r for r in fields if r not in default) or NONE, what])
    return table(["rule", "default of", "also taken by", "what it writes"], rows)


def kinds() -> str:
    """The kinds of parameters that keep their precision by default, and the patterns of their names."""
    return table(["kind", "names"], [[kind, code(patterns)] for kind, patterns in KEPT.items()])


def presets() -> str:
    """The presets of policies that have recipes, with their rules, the first of which decides."""
    rows: list[list[str]] = []
    for name in COMPLETE:
        preset = PRESETS[name]
        of_spec: dict[str, list[str]] = {}
        for pattern, spec in preset.rules:
            of_spec.setdefault(spec, []).append(pattern)
        said = "; ".join(f"{'keep' if spec == KEEP else f'`{spec}`'}: {code(patterns)}" for spec, patterns in of_spec.items())
        rows.append([f"`{name}`", preset.about, said])
    return table(["preset", "quantizes", "rules"], rows)


def dialects() -> str:
    """The dialects of checkpoints, those that are read first."""
    rows: list[list[str]] = []
    for dialect in sorted(registry().dialects.values(), key=lambda d: (d.read is None, d.title.lower())):
        if dialect.methods or dialect.groups:
            said = "read and written" if dialect.write else "read" if dialect.read else "refused"
            rows.append([dialect.title, code([dialect.name]), code(dialect.methods) or NONE, said])
    return table(["checkpoints of", "name", "`quant_method`", ""], rows)


def written() -> str:
    """What libraries decoded of what breccia wrote, as tests/dialects/written_*.py recorded it."""
    record = json.loads((ROOT / "docs" / "written.json").read_text(encoding="utf-8"))
    titles = {dialect.name: dialect.title for dialect in registry().dialects.values()}
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for row in record["rows"]:
        library = f"{row['library']} {record['versions'].get(row['library'], '')}".strip()
        groups.setdefault((row["dialect"], library, row["loader"], row["outcome"]), []).append(row["recipe"])
    rows = [
        [
            titles[dialect],
            f"{library}: {loader}".removeprefix(": "),
            code(dict.fromkeys(recipe.partition(",")[0] for recipe in recipes)),
            str(len(recipes)),
            said,
        ]
        for (dialect, library, loader, said), recipes in groups.items()
    ]
    return table(["dialect", "decoded by", "recipes", "with all fields", ""], rows)


def laws() -> str:
    """The laws of the conformance kit, by what they are about."""
    from breccia.testing.laws import LAWS, SUBMODULES

    rows: list[tuple[str, str, str]] = []
    for module in (sys.modules[laws_of.__module__] for laws_of in LAWS):
        parts = (module, *SUBMODULES.get(module.__name__.rpartition(".")[2], ()))
        listed = [f for part in parts for f in vars(part).values() if inspect.isfunction(f) and f.__module__ == part.__name__]
        sentences = [f for f in listed if not f.__name__.startswith("_") and f.__annotations__.get("return") == "None"]
        kind = module.__name__.rpartition(".")[2]
        rows += [(kind, f.__name__.replace("_", " "), first_sentence(f.__doc__)) for f in sentences]
    return table(("of", "law", ""), rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "support-matrix": support_matrix,
    "frameworks": frameworks,
    "bridges": bridges,
    "commands": commands,
    "api-bridges": api_bridges,
    "codecs": codecs,
    "storage": storage,
    "formats": formats,
    "recipe-fields": recipe_fields,
    "layouts": layouts,
    "storages": storages,
    "scale-rules": scale_rules,
    "laws": laws,
    "kinds": kinds,
    "presets": presets,
    "dialects": dialects,
    "written": written,
}
