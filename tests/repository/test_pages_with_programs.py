"""The programs of pages, run by node: codes are those of the golden vectors, and recipes are chosen by their figures."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from paths import ROOT

from breccia import codecs
from breccia.testing import oracle, vectors

DOCS = ROOT / "docs"
#: Recipes whose codes are the numbers divided by a power of two, which rounds nothing: those of E8M0 scales.
EXACT = ("mxfp8", "mxfp6", "mxfp4", "mxint8")


def node(script: str, data: Any) -> Any:
    """What a script writes as JSON. It gets `data`, and the functions of docs/js by `require`."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("no node: programs of pages are not run")
    done = subprocess.run([program, "-e", script], input=json.dumps(data), capture_output=True, text=True, cwd=DOCS / "js")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def embedded(page: str, name: str) -> Any:
    """The JSON of that id in a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return json.loads(re.search(rf'<script type="application/json" id="{name}">(.*)</script>', text)[1])  # type: ignore[index]


READ = 'const data = JSON.parse(require("fs").readFileSync(0, "utf8"));'


def test_the_page_of_numbers_decodes_every_code_as_the_golden_vectors_do() -> None:
    page = embedded("number.md", "codecs")
    script = (
        READ + 'const { valuesOf } = require("./number.js"), bits = (v) => new Uint32Array(Float32Array.of(v).buffer)[0];'
        "console.log(JSON.stringify(data.map((codec) => valuesOf(codec).map(bits))));"
    )
    found = dict(zip((codec["name"] for codec in page), node(script, page), strict=True))
    assert {"E4M3", "E5M2", "E2M1", "E2M3", "E3M2", "E8M0", "INT4", "INT8", "NF4", "F16", "BF16"} <= set(found)
    compared: set[str] = set()
    for folder in sorted((DOCS / "spec" / "vectors").iterdir()):
        binary = (folder / "vectors.bin").read_bytes()
        for codec in json.loads((folder / "index.json").read_text(encoding="utf-8"))["codecs"]:
            if codec["name"] in found and "values" in codec:
                at, size = codec["values"]
                wanted = [bits for (bits,) in struct.iter_unpack("<I", binary[at : at + size])]
                assert list(map(without_nan, found[codec["name"]])) == list(map(without_nan, wanted)), codec["name"]
                compared.add(codec["name"])
    assert compared == set(found) - {"F16", "BF16"}


def without_nan(bits: int) -> int:
    """Any NaN as one."""
    return 0x7FC00000 if bits & 0x7FFFFFFF > 0x7F800000 else bits


def test_half_precision_numbers_of_the_page_are_those_of_ieee_754() -> None:
    page = [codec for codec in embedded("number.md", "codecs") if codec["name"] == "F16"]
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    script = (
        READ
        + 'console.log(JSON.stringify(require("./number.js").valuesOf(data[0]).map((v) => Number.isFinite(v) ? v : null)));'
    )
    found = [np.nan if value is None else value for value in node(script, page)]
    finite = np.isfinite(every)
    assert (
        np.array_equal(np.array(found)[finite], every[finite].astype(np.float64)) and np.isnan(np.array(found)[~finite]).all()
    )


@pytest.mark.together
def test_the_page_of_numbers_writes_the_codes_of_the_golden_vectors() -> None:
    """Cases of nearest rounding under scales of powers of two, whose quotients are exact, without NaN and Inf."""
    every = {codec["name"]: codec for codec in embedded("number.md", "codecs")}
    asked: list[tuple[str, list[float]]] = []
    wanted: list[list[int]] = []
    for v in vectors.read(DOCS / "spec" / "vectors" / "1"):
        if v.recipe.name not in EXACT or v.rounding != "nearest" or v.axis != -1 or v.edge in ("nan", "inf", "faulty"):
            continue
        if v.recipe.rules[0].name == "mse" or v.supplied is not None:
            continue
        element = v.recipe.format.element
        x = np.asarray(vectors.expanded(v.input, v.dtype), np.float32).reshape(-1, v.shape[-1])
        x = np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x)  # FP32 subnormals count as zeros of their sign
        scale = 2.0 ** (np.asarray(v.scale, np.float64).reshape(x.shape[0], -1) - 127)
        quotients = x.astype(np.float64) / np.repeat(scale, 32, axis=1)[:, : x.shape[1]]
        count, size = vectors.unit(element)
        data = np.asarray(v.data, np.uint8).reshape(x.shape[0], -1, size)
        numbers = sum(data[..., i].astype(np.uint64) << np.uint64(8 * i) for i in range(size))
        codes = np.stack(
            [numbers >> np.uint64(element.bits * i) & np.uint64((1 << element.bits) - 1) for i in range(count)], -1
        )
        asked.append((element.name, quotients.ravel().tolist()))
        wanted.append(codes.reshape(x.shape[0], -1)[:, : x.shape[1]].ravel().astype(int).tolist())
    assert len(asked) > 50 and {name for name, _ in asked} == {"E4M3", "E5M2", "E2M3", "E3M2", "E2M1", "MXINT8"}
    script = (
        READ + 'const { encode } = require("./number.js"), minus = (text) => (text === "-0" ? -0 : text);'
        "console.log(JSON.stringify(data.asked.map(([name, xs]) => xs.map((x) => encode(data.codecs[name], minus(x))))));"
    )
    signed = [(name, ["-0" if x == 0 and np.signbit(x) else x for x in xs]) for name, xs in asked]
    for (name, xs), found, expected in zip(signed, node(script, {"codecs": every, "asked": signed}), wanted, strict=True):
        wrong = [(x, a, b) for x, a, b in zip(xs, found, expected, strict=True) if a != b]
        assert not wrong, f"{name}: (number, the page's code, the golden code): {wrong[:5]}"


@pytest.mark.parametrize(
    ("codec", "numbers"),
    [
        ("E4M3", [0.1, 448, 464, 1e9, 2**-10, 3 * 2**-10]),
        ("INT4", [0.5, 1.5, 2.5, -0.5, -8.5, 100]),
        ("NF4", [0.1, -0.3, 2, 0.0]),
        ("E8M0", [0.1, 1.5, 3, 2**-127, 0.75]),
        ("UE5M3", [-1, 1e6, 0.3]),
    ],
)
def test_the_page_of_numbers_rounds_as_the_codecs_do(codec: str, numbers: list[float]) -> None:
    """Against the exact oracle's nearest code, which knows no sign of zero."""
    every = {c["name"]: c for c in embedded("number.md", "codecs")}
    script = (
        READ + 'const { encode } = require("./number.js");'
        "console.log(JSON.stringify(data.xs.map((x) => encode(data.codec, x))));"
    )
    assert node(script, {"codec": every[codec], "xs": numbers}) == [
        oracle.encode(getattr(codecs, codec), Fraction(x)) for x in numbers
    ]


# -- the decision helper ----------------------------------------------------------------------------------------------


def chosen(**wish: Any) -> tuple[Any, str]:
    """(what the helper finds, its verdict) for a wish."""
    data = embedded("choose.md", "choices")
    asked = {"hardware": "hopper", "task": "few", "engine": "", "billions": 32, "memory": 24} | wish
    script = (
        READ + 'const { chosen, verdict } = require("./choose.js"), found = chosen(data.data, data.wish);'
        "console.log(JSON.stringify([found, verdict(found, data.wish, data.data.engines)]));"
    )
    found, said = node(script, {"data": data, "wish": asked})
    return found, said


def test_the_most_accurate_recipe_that_fits_comes_first() -> None:
    found, said = chosen()
    sizes, errors = [row["size"] for row in found["fit"]], [row["sqnr"] for row in found["fit"]]
    assert len(sizes) > 3 and max(sizes) <= 24 and errors == sorted(errors, reverse=True)
    every = {choice["spec"]: choice for choice in embedded("choose.md", "choices")["choices"]}
    assert {spec for spec, choice in every.items() if 32 * choice["bits"] / 8 <= 24} == {row["spec"] for row in found["fit"]}
    assert said.startswith(found["fit"][0]["spec"]) and f"{sizes[0]:.1f} GB of weights" in said


def test_an_engine_is_offered_only_what_ran_in_it() -> None:
    found, _ = chosen(engine="vllm", memory=80)
    ran = {
        row["command"].removeprefix("breccia convert MODEL OUT ") for row in engines() if row["engine"] == "vllm" and row["ran"]
    }
    assert found["fit"] and {row["options"] for row in found["fit"]} <= ran
    assert all(row["options"].startswith("--dialect gguf") for row in chosen(engine="llama_cpp", memory=80)[0]["fit"])


def engines() -> list[Any]:
    return json.loads((DOCS / "engines.json").read_text(encoding="utf-8"))["rows"]


def test_the_helper_says_when_nothing_fits_and_when_bf16_does() -> None:
    found, said = chosen(billions=70, memory=8)
    assert not found["fit"] and said.startswith("Nothing fits: 70 billion parameters")
    assert chosen(billions=8, memory=24, task="many")[1].startswith("BF16 fits in 24 GB")


def test_figures_that_were_not_measured_are_none() -> None:
    assert {row["speed"] for row in chosen(hardware="other", memory=80)[0]["fit"]} == {None}
    measured = [row for row in chosen(memory=80)[0]["fit"] if row["speed"] is not None]
    assert len(measured) >= 5 and all(0.2 < row["speed"] < 5 for row in measured)
