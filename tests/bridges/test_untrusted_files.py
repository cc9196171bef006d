"""Files that are damaged, hostile or only unusual: typed errors that name file and tensor, printable text, the right values."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from program import Run
from recipes import RECIPES
from safetensors.numpy import load_file, save_file

import breccia
from breccia.bridges import compare, convert, load_safetensors, save_safetensors
from breccia.internal import kept_kind
from breccia_bridges import configs, safetensors_writer
from breccia_bridges.checkpoint import INDEX
from breccia_bridges.inspection import inspected
from breccia_bridges.report import write_report
from breccia_bridges.safetensors_file import Container

X = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
SCALED = breccia.cast(X, "mxfp8")
DEEP = "[" * 100_000


def edited(path: Path, tensors: dict[str, Any], edit: Callable[[dict[str, Any]], None], pad: int = 0) -> Path:
    """A file of `tensors` whose header was changed by `edit`, and has `pad` more spaces."""
    save_safetensors(tensors, path)
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    return path


def config(name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    """A change of fields of a tensor's config."""

    def edit(header: dict[str, Any]) -> None:
        metadata = header["__metadata__"]
        metadata[f"{name}.config"] = json.dumps({**json.loads(metadata[f"{name}.config"]), **changes})

    return edit


def without(*names: str) -> Callable[[dict[str, Any]], None]:
    def edit(header: dict[str, Any]) -> None:
        for name in names:  # its bytes belong to another name, so that the container is whole
            header[f"{name}.other"] = header.pop(name)

    return edit


# ------------------------------------------------------------------------------------------------ configs


@pytest.mark.parametrize(
    ("recipe", "edit", "message"),
    [
        ("mxfp8", config("w", shape=[]), r"its shape is \[\]"),
        ("fp8_block,block_m=128", config("w", shape=[8]), "need at least 2 axes"),
        ("mxfp8", config("w", shape=[10**4000] * 2), "its shape is impossible"),
        ("nvfp4", config("w", shape=[2**62, 2**62]), "its shape is impossible"),
        ("mxfp8", config("w", shape=[1] * 70), "its shape is impossible"),
        ("mxfp8", config("w", shape=[8, 64.0]), "its shape is a list of integers"),
        ("mxfp8", config("w", axis=10**4000), "its axis is -1 or -2"),
        ("mxfp8", config("w", layout={"name": "per_block_k", "fields": {"block_size": 10**4000}}), ""),
        ("mxfp8", config("w", recipe={"name": "mxfp8", "fields": {"fp8_format": ["E4M3"]}}), "its recipe cannot be read"),
        ("mxfp8", config("w", recipe={"name": "mxfp8"}), "its recipe is an object with a name and fields"),
        ("mxfp8", lambda h: h["__metadata__"].update({"w.config": DEEP}), "its config is not JSON .*nested too deeply"),
        ("mxfp8", lambda h: h["__metadata__"].update({"w.config": '{"axis":-1,"axis":-2}'}), "the key 'axis' is twice"),
        ("int4_bias", without("w.zero_point"), "the file has no w.zero_point"),
        ("int4,symmetric=false,signed=false", without("w.zero_point"), "the file has no w.zero_point"),
        ("nvfp4", without("w.global_scale"), "the file has no w.global_scale"),
        ("mxfp4", without("w.scale"), "the file has no w.scale"),
        ("mxfp8", config("w", **{"as": "v"}), ""),
    ],
)
def test_a_damaged_config_is_an_error_that_names_file_and_tensor(recipe: str, edit: Any, message: str, tmp_path: Path) -> None:
    path = edited(tmp_path / "f.safetensors", {"w": breccia.cast(X, recipe)}, edit)
    calls = (load_safetensors, lambda p: inspected(p, scales=True), lambda p: compare(p, p))
    refused = 0
    for call in calls:
        try:
            call(path)
        except breccia.CorruptFileError as e:
            refused += 1
            assert "f.safetensors: tensor 'w'" in str(e) and re.search(message, str(e)) and len(str(e)) < 10_000
    assert refused >= 1


def test_a_number_of_thousands_of_digits_in_a_config_of_an_unknown_recipe_is_shown(tmp_path: Path, run: Run) -> None:
    edit = config("w", shape=[10**4000] * 2, recipe={"name": "zzz\x1b[2J", "fields": {}})
    path = edited(tmp_path / "f.safetensors", {"w": breccia.cast(X, "mxfp8")}, edit)
    code, out, err = run("inspect", path)
    assert code == 0 and "zzz\\x1b[2J" in out and "\x1b[2J" not in out + err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b.config": {"as": "absent", "axis": -1, "shape": [8, 64]}}, "refers to that of 'absent'; the file has no config"),
        ({"b.config": {"as": "b", "axis": -1, "shape": [8, 64]}}, "whose own config refers to another"),
        ({"b.config": {"as": 3, "axis": -1, "shape": [8, 64]}}, "its config is an object with recipe"),
        ({"b.config": {"as": "a", "axis": -1}}, "its config is an object with as, axis, shape"),
        ({"b.config": {"as": "a", "axis": -1, "shape": [8, 65]}}, "shape=\\(8, 65\\) needs data of shape"),
        ({"b.config": {"as": "a", "axis": -3, "shape": [8, 64]}}, "its axis is -1 or -2"),
    ],
)
def test_a_config_that_refers_to_another_must_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        header["__metadata__"] |= {key: json.dumps(value) for key, value in changes.items()}

    tensors = {name: breccia.cast(X, "mxfp8") for name in "ab"}
    text = '{"as":"a","axis":-1,"shape":[8,64]}'
    good = edited(tmp_path / "g.safetensors", tensors, lambda h: h["__metadata__"].update({"b.config": text}))
    assert load_safetensors(good)["b"].digest() == tensors["b"].digest()
    with pytest.raises(breccia.CorruptFileError, match=f"tensor 'b': .*{message}"):
        load_safetensors(edited(tmp_path / "f.safetensors", tensors, edit))


# ------------------------------------------------------------------------------------------------ JSON of every kind


def _folder(path: Path, **texts: str) -> Path:
    path.mkdir()
    save_safetensors({"w": X}, path / "model.safetensors")
    for name, text in texts.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


NAMES = {"index": INDEX, "config": "config.json", "hf": "hf_quant_config.json", "quantize": "quantize_config.json"}


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 50_000, "{", "\x00", "[1]", '"' + "x" * 10_000], ids=range(6))
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_json_that_is_no_config_is_refused_by_name(name: str, text: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m")
    (folder / name).write_text(text)
    calls: list[Callable[[], Any]] = [lambda: convert(folder, tmp_path / "out", "mxfp8"), lambda: compare(folder, folder)]
    calls += [lambda: convert(folder, tmp_path / "out", "mxfp8", dry_run=True)]
    calls += [lambda: load_safetensors(folder), lambda: inspected(folder)] if name == INDEX else []
    for call in calls:
        with pytest.raises(breccia.CorruptFileError, match=re.escape(name)) as refused:
            call()
        assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    "read",
    [
        lambda: breccia.recipe("int4,group_size=" + DEEP),
        lambda: breccia.recipe("mxfp8,fp8_format=" + '{"a":' * 50_000),
        lambda: breccia.ScalingRecipe.from_json('{"name":' + DEEP),
        lambda: breccia.Layout.from_json(DEEP),
        lambda: breccia.cast(X, "nvfp4,two_level=" + DEEP),
    ],
)
def test_text_nested_too_deeply_is_no_recipe_and_no_layout(read: Callable[[], Any]) -> None:
    with pytest.raises(breccia.BrecciaError) as refused:
        read()
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("written", [b"[" * 50_000, b"\xff\xfe", b"{", b"[]", b"{}", b'{"activation": {"name": 1}}'])
def test_a_damaged_state_of_a_layer_is_refused_when_a_model_is_loaded(written: bytes, tmp_path: Path) -> None:
    torch, ours = pytest.importorskip("torch"), pytest.importorskip("breccia_torch")
    model = torch.nn.Sequential(torch.nn.Linear(64, 8))
    ours.quantize_(model, "mxfp8", activation="mxfp8")
    path = tmp_path / "m.safetensors"
    ours.save_model(model, path)
    tensors = load_safetensors(path)
    (state,) = (name for name in tensors if name.endswith("_extra_state"))
    save_safetensors({**tensors, state: np.frombuffer(written, np.uint8)}, path, force=True)
    with pytest.raises(breccia.BrecciaError, match=re.escape(state)):
        ours.load_model(model, path)


# ------------------------------------------------------------------------------------------------ one tensor, two places


def test_a_tensor_in_two_files_of_a_folder_is_refused_by_everything(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m")
    save_safetensors({"w": X}, folder / "consolidated.safetensors")
    for call in (
        lambda: convert(folder, tmp_path / "out", "mxfp8"),
        lambda: convert(folder, tmp_path / "out", "mxfp8", dry_run=True),
        lambda: load_safetensors(folder),
        lambda: inspected(folder),
        lambda: compare(folder, folder),
    ):
        with pytest.raises(breccia.CorruptFileError, match="'w' is in both consolidated.safetensors and model.safetensors"):
            call()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dry_run", [False, True])
def test_names_that_collide_only_when_quantized_are_refused_before_anything_is_written(dry_run: bool, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({"w": X}, folder / "a.safetensors")
    save_file({"w.data": X[0]}, folder / "b.safetensors")
    with pytest.raises(breccia.CorruptFileError, match=r"'w.data' is in both a.safetensors and b.safetensors"):
        convert(folder, tmp_path / "out", "mxfp8", dry_run=dry_run)
    save_file({"w": X, "w.data": X[0]}, tmp_path / "m.safetensors")
    with pytest.raises(breccia.UnsupportedError, match="collide"):
        convert(tmp_path / "m.safetensors", tmp_path / "out.safetensors", "mxfp8", dry_run=dry_run)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map": {"w": "model.safetensors", "w": "2.safetensors"}}',
        '{"weight_map": {"w": "model.safetensors"}, "weight_map": {"v": "2.safetensors"}}',
        '{"weight_map": {"w": "model.safetensors", "v": "2.safetensors", "\\u0077": "model.safetensors"}}',
    ],
)
def test_an_index_with_a_key_twice_is_refused(text: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m")
    save_safetensors({"v": X}, folder / "2.safetensors")
    (folder / INDEX).write_text(text)
    for call in (load_safetensors, inspected, lambda path: convert(path, tmp_path / "out", "mxfp8")):
        with pytest.raises(breccia.CorruptFileError, match=rf"{INDEX} has no readable weight_map .* is twice in one object"):
            call(folder)


@pytest.mark.parametrize("file", ["../m.safetensors", "a/b.safetensors", "\x00", "x" * 300, "", "..", "/etc/passwd"])
def test_an_index_names_files_of_its_folder_only(file: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(breccia.CorruptFileError, match=INDEX):
        load_safetensors(folder)


# ------------------------------------------------------------------------------------------------ alignment


@pytest.mark.parametrize("pad", [1, 2, 3])
@pytest.mark.parametrize(
    "recipe", ["fp8_block", "nf4", "int4_bias", "nvfp4", "fp8_current", "int4,symmetric=false,signed=false"]
)
def test_values_at_any_byte_are_read(recipe: str, pad: int, tmp_path: Path) -> None:
    st = breccia.cast(X, recipe)
    path = edited(tmp_path / "f.safetensors", {"w": st, "v": X, "h": X.astype(np.float16)}, lambda h: None, pad)
    opened = Container(path)
    assert not opened.view("v").flags.aligned and opened.array("v").flags.aligned
    found = load_safetensors(path)
    assert found["w"].digest() == st.digest() and found["v"].tobytes() == X.tobytes()
    assert breccia.dequantize(found["w"]).tobytes() == breccia.dequantize(st).tobytes()
    assert breccia.matmul(X, found["w"].mT).tobytes() == breccia.matmul(X, st.mT).tobytes()
    save_safetensors({"w": X, "v": X, "h": X.astype(np.float16)}, tmp_path / "g.safetensors")
    assert not compare(path, tmp_path / "g.safetensors").missing
    for framework in ("torch", "jax", "mlx"):
        if framework in breccia.backend.registry().frameworks:
            pytest.importorskip({"mlx": "mlx.core"}.get(framework, framework))
            assert load_safetensors(path, framework=framework)["w"].digest() == st.digest()


# ------------------------------------------------------------------------------------------------ text

MARKUP = ("[bold red]x[/]", "<img src=x onerror=alert(1)>")
HOSTILE = ("\x1b]0;title\x07\x1b[31mred", "\u202egnp.exe", "a\nverified: all", "\x9b2J", *MARKUP)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_from_files_reach_no_terminal_as_they_are(name: str, tmp_path: Path, run: Run) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({name: X, f"{name}.2": X[0], "ids": np.arange(3)}, a)
    save_file({f"{name}.2": X[0] + 1, "bad": X}, b)
    shown = "".join(
        "".join(run(*words)[1:])
        for words in (
            ("inspect", a, "--scales"),
            ("convert", a, tmp_path / "o.safetensors", "-r", "mxfp8", "--include", "*"),
            ("convert", a, tmp_path / "p.safetensors", "-r", "mxfp8", "--exclude", f"{name}*"),
            ("compare", a, b, "--fail-under", "60"),
            ("compare", a, tmp_path / "o.safetensors", "--sort", "name"),
            ("compare", a, tmp_path / "o.safetensors", b),
            ("convert", a, tmp_path / "q.safetensors", "-r", "mxfp8", "--include", "nothing"),
        )
    )
    assert all(c == "\n" or c.isprintable() for c in shown)
    assert all(line.strip() != "verified: all" for line in shown.splitlines())
    if name.isprintable():
        assert name in shown, "markup is text"


@pytest.mark.skipif(os.name != "posix", reason="such names of files are refused there")
@pytest.mark.parametrize("name", [name for name in HOSTILE if not name.isprintable()])
def test_names_of_files_reach_no_terminal_as_they_are(
    name: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The progress bar and the report's name, too; and errors of one line stay on it."""
    pytest.importorskip("jinja2")
    folder, report = _folder(tmp_path / "m"), tmp_path / f"{name}.html"
    hostile = folder / f"{name}.safetensors"
    save_file({"v": X}, hostile)
    monkeypatch.setenv("TTY_COMPATIBLE", "1"), monkeypatch.setenv("NO_COLOR", "1")  # a progress bar without colors
    _, out, err = run("compare", hostile, hostile, "--report", report)
    for sequence in re.findall(r"\x1b\[\??[\d;]*[A-Zhl]", err):  # Rich's own: cursor and line
        err = err.replace(sequence, "")
    assert "compare " in err and ".html" in out
    assert all(c in "\n\r" or c.isprintable() for c in out + err)

    save_file({"v": X}, folder / "b.safetensors")
    with pytest.raises(breccia.CorruptFileError, match=r"tensor 'v' is in both ") as e:
        load_safetensors(folder)
    assert str(e.value).isprintable()
    (folder / "b.safetensors").unlink()
    hostile.unlink()
    save_file({"v": X, "trellis": np.ones((4, 4), np.int16)}, hostile)
    with pytest.raises(breccia.UnsupportedError, match="already quantized \\(EXL3\\)") as e:
        convert(hostile, tmp_path / "again.safetensors", "mxfp8")
    assert str(e.value).isprintable()
    hostile.write_bytes(b"1234")
    with pytest.raises(breccia.CorruptFileError, match="4 bytes long") as e:
        load_safetensors(folder)
    assert str(e.value).isprintable()


@pytest.mark.parametrize("name", [name for name in HOSTILE if not name.isprintable()])
def test_errors_and_warnings_of_files_are_printable(name: str, tmp_path: Path) -> None:
    def raised(call: Callable[[], Any]) -> str:
        with pytest.raises(breccia.BrecciaError) as e:
            call()
        return str(e.value)

    edit = config(name, recipe={"name": name, "fields": {}})
    path = edited(tmp_path / "f.safetensors", {name: breccia.cast(X, "mxfp8")}, edit)
    messages = [raised(lambda: load_safetensors(path)), raised(lambda: load_safetensors(path, names=["other"]))]
    messages.append(raised(lambda: load_safetensors(edited(tmp_path / "g.safetensors", {name: X}, _twice(name)))))
    folder = _folder(tmp_path / "m")
    save_file({f"{name}.weight": X.astype(np.int8), f"{name}.scale": X}, tmp_path / "c.safetensors")
    messages.append(raised(lambda: convert(tmp_path / "c.safetensors", tmp_path / "d.safetensors", "mxfp8")))
    messages.append(
        raised(lambda: load_safetensors(edited(tmp_path / "e.safetensors", {name: SCALED}, without(f"{name}.scale"))))
    )
    assert not any("\n" in message for message in messages)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": f"{name}.safetensors"}}))
    messages.append(raised(lambda: load_safetensors(folder)))
    if "jax" in breccia.backend.registry().frameworks:
        pytest.importorskip("jax")
        save_file({name: np.arange(3)}, tmp_path / "w.safetensors")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            load_safetensors(tmp_path / "w.safetensors", framework="jax")
        messages += [str(one.message) for one in said]
    for message in messages:
        assert all(c == "\n" or c.isprintable() for c in message), message


def _twice(name: str) -> Callable[[dict[str, Any]], None]:
    def edit(header: dict[str, Any]) -> None:
        header[f"{name}2"] = header[name]

    return edit


@pytest.mark.parametrize("name", HOSTILE)
def test_a_report_shows_names_as_text(name: str, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    from breccia_bridges.commands import runs

    save_file({name: X}, tmp_path / "a.safetensors")
    report = convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "mxfp8", histograms=True)
    write_report(tmp_path / "r.html", runs([report]), title=name)
    page = (tmp_path / "r.html").read_text("utf-8")
    assert "<img src=x" not in page and "\x1b" not in page and "\u202e" not in page.replace(report.source, "")


# ------------------------------------------------------------------------------------------------ many tensors


def test_configs_of_many_tensors_refer_to_the_first_of_their_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"{name}.{i}": breccia.cast(X, name) for name in ("mxfp8", "nvfp4") for i in range(3)}
    tensors["t"] = breccia.cast(X.T.copy(), "mxfp8", axis=-2)
    save_safetensors(tensors, tmp_path / "long.safetensors")
    monkeypatch.setattr(configs, "_REPEATED", 100)
    save_safetensors(tensors, tmp_path / "short.safetensors")
    texts = {k: json.loads(v) for k, v in Container(tmp_path / "short.safetensors").metadata.items() if k.endswith(".config")}
    assert [k for k, v in texts.items() if "recipe" in v] == ["mxfp8.0.config", "nvfp4.0.config"]
    assert texts["nvfp4.2.config"] == {"as": "nvfp4.0", "axis": -1, "shape": [8, 64]}
    for path in tmp_path.glob("*.safetensors"):
        found = load_safetensors(path)
        assert {name: st.digest() for name, st in found.items()} == {name: st.digest() for name, st in tensors.items()}
        assert [row["recipe"]["name"] for row in inspected(path).rows] == ["mxfp8"] * 3 + ["nvfp4"] * 3 + ["mxfp8"]
        assert set(load_file(path)) == set(Container(path).entries)


def _many(path: Path, count: int) -> Path:
    places = [[i * 256, i * 256 + 256] for i in range(count)]
    header = {f"l.{i}.weight": {"dtype": "F32", "shape": [2, 32], "data_offsets": place} for i, place in enumerate(places)}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + np.ones(count * 64, np.float32).tobytes())
    return path


@pytest.mark.slow
def test_a_conversion_takes_time_linear_in_the_number_of_tensors(tmp_path: Path) -> None:
    seconds: dict[int, float] = {}
    for count in (100, 500, 4000):
        source = _many(tmp_path / f"{count}.safetensors", count)
        started = time.process_time()
        convert(source, tmp_path / f"o{count}.safetensors", "mxfp8")
        seconds[count] = time.process_time() - started
    assert seconds[4000] < 2 * 8 * seconds[500]


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_header_longer_than_readers_accept_is_refused_before_anything_is_written(
    dry_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _many(tmp_path / "m.safetensors", 20)
    monkeypatch.setattr(safetensors_writer, "MAX_HEADER", 3000)
    with pytest.raises(breccia.UnsupportedError, match="the header would be [0-9]+ bytes long; readers accept 3000"):
        convert(source, tmp_path / "o.safetensors", "mxfp8", dry_run=dry_run)
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_file_of_a_folder_with_too_many_tensors_becomes_several_with_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    source = _many(tmp_path / "m" / "model.safetensors", 20)
    monkeypatch.setattr(safetensors_writer, "MAX_HEADER", 3000)
    report = convert(tmp_path / "m", tmp_path / "o", "mxfp8")
    dry = convert(tmp_path / "m", tmp_path / "p", "mxfp8", dry_run=True)
    assert [t.name for t in report.tensors] == [t.name for t in dry.tensors] == list(Container(source).entries)
    files = sorted(path.name for path in (tmp_path / "o").glob("*.safetensors"))
    assert files == [f"model-part-{n:03}-of-{len(files):03}.safetensors" for n in range(1, len(files) + 1)] and len(files) > 2
    index = json.loads((tmp_path / "o" / INDEX).read_text())["weight_map"]
    assert set(index.values()) == set(files)
    found, want = load_safetensors(tmp_path / "o"), breccia.cast(np.ones((2, 32), np.float32), "mxfp8")
    assert len(found) == 20 and {st.digest() for st in found.values()} == {want.digest()}
    other = _many(source.parent / files[0], 1)
    other.write_bytes(other.read_bytes().replace(b'"l.', b'"k.'))
    with pytest.raises(breccia.UnsupportedError, match=f"two files would be named {files[0]}"):
        convert(tmp_path / "m", tmp_path / "p", "mxfp8")


# ------------------------------------------------------------------------------------------------ a dry run is the run's checks


@pytest.mark.skipif(sys.platform == "win32", reason="permissions and disks as POSIX has them")
@pytest.mark.parametrize("wrong", ["metadata", "full disk", "unreadable", "read-only", "collision", "index", "a dialect"])
def test_a_dry_run_refuses_what_the_run_refuses(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = _folder(tmp_path / "m", notes__txt="notes"), tmp_path / "out"
    if wrong == "metadata":
        save_file({"w": X}, folder / "model.safetensors", {"tokenizer.config": "theirs"})
    elif wrong == "full disk":
        usage = type("Usage", (), {"free": 100})
        monkeypatch.setattr("breccia_bridges.destination.shutil.disk_usage", lambda path: usage)
    elif wrong in ("unreadable", "read-only"):  # also for root, who may read and write everything
        target = folder / "notes.txt" if wrong == "unreadable" else tmp_path
        monkeypatch.setattr("os.access", lambda path, mode: Path(path) != target)
    elif wrong == "collision":
        save_file({"w.scale": X[0]}, folder / "b.safetensors")
    elif wrong == "index":
        (folder / INDEX).write_text('{"weight_map": {"x": "model.safetensors"}}')
    else:
        save_file({"W_q": np.ones((4, 4), np.uint8)}, folder / "model.safetensors")
    refused = []
    for dry_run in (True, False):
        with pytest.raises((breccia.BrecciaError, OSError)) as e:
            convert(folder, out, "mxfp8", dry_run=dry_run)
        refused.append((type(e.value), str(e.value)))
    assert refused[0] == refused[1] and [path.name for path in tmp_path.iterdir()] == ["m"]


# ------------------------------------------------------------------------------------------------ which tensors, which values


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "bias"),
        ("layers.0.blocks.0.attn.relative_position_bias_table", "bias"),
        ("encoder.layers.0.self_attn.pos_bias_u", "bias"),
        ("vision_encoder.layers.2.attn.rel_pos_h", "bias"),
        ("layers.0.self_attn.bias_v", "bias"),
        ("backbone.layers.0.mixer.A_log", "decay"),
        ("rwkv.blocks.0.attention.time_decay", "decay"),
        ("model.layers.0.mlp.up_proj.weight", ""),
        ("debiased.weight", ""),
    ],
)
def test_tables_that_are_added_or_exponentiated_keep_their_precision(name: str, kind: str, tmp_path: Path) -> None:
    assert kept_kind(name) == kind
    save_file({name: X}, tmp_path / "m.safetensors")
    report = convert(tmp_path / "m.safetensors", tmp_path / "o.safetensors", "mxfp8")
    assert [t.name for t in report.quantized] == ([] if kind else [name])


def _is_recipe(spec: str) -> bool:
    try:
        return bool(breccia.recipe(spec))
    except breccia.RecipeError:
        return False


NAMES_OF_RULES = ("linear", "recip", "half_range", "divide", "te", "rceil", "floor", "even")
SPECS = [
    spec
    for name in breccia.backend.registry().recipes
    for rule in NAMES_OF_RULES
    if _is_recipe(spec := f"{name},scale_rule={rule}")
]


@pytest.mark.long
@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("recipe", [*SPECS, *RECIPES, "fp8_delayed,margin=1", "fp8_block,block_m=4,block_k=8"], ids=str)
@pytest.mark.parametrize("shape", [(40, 24), (3, 20, 16)])
def test_slabs_have_the_bytes_of_one_cast_under_every_rule(
    recipe: Any, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = breccia.recipe(recipe) if isinstance(recipe, str) else recipe
    monkeypatch.setattr("breccia.kernels.measuring.SLAB", 100)
    rng = np.random.default_rng(3)
    for trial in range(4):
        x = rng.standard_normal(shape).astype(np.float32) * np.float32(rng.uniform(0.01, 2))
        if trial == 3:
            x.flat[rng.integers(x.size)] = (np.nan, np.inf)[rng.integers(2)]
        save_safetensors({"w": x}, tmp_path / "m.safetensors", force=True)
        convert(tmp_path / "m.safetensors", tmp_path / "o.safetensors", recipe, force=True, include=["*"])
        assert load_safetensors(tmp_path / "o.safetensors")["w"].digest() == breccia.cast(x, recipe).digest()


# ------------------------------------------------------------------------------------------------ the verdict


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ({"w": X, "v": X}, "identical: all tensors have the same bytes"),
        ({"w": X.astype(np.float64), "v": X}, "equal: all tensors have the same values, 1 of 2 in other bytes"),
        ({"w": breccia.cast(X, "nvfp4"), "v": X}, "rounded: 1 of 2 tensors differ, "),
        ({"w": np.full_like(X, np.nan), "v": X}, "broken: NaN or Inf only in "),
        ({"w": X, "u": X}, "not the same tensors: 1 missing, 1 added"),
        ({"w": X[:4], "v": X}, "not the same tensors: 1 of another shape or type"),
    ],
)
def test_a_comparison_ends_with_a_verdict(after: dict[str, Any], verdict: str, tmp_path: Path, run: Run) -> None:
    save_safetensors({"w": X, "v": X}, tmp_path / "a.safetensors")
    save_safetensors(after, tmp_path / "b.safetensors")
    _, out, _ = run("compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert out.splitlines()[-1].startswith(f"verdict: {verdict}")
    _, out, _ = run("compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "a.safetensors")
    assert [line.partition(": ")[0] for line in out.splitlines()[-2:]] == ["verdict"] * 2
    _, out, _ = run("compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json")
    assert json.loads(out)["candidates"][0]["verdict"].startswith(verdict)
