"""Configurations of the Triton kernels: where they are found, how they are tuned, and that they never change a byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fresh import printed
from marks import on_cuda, slow_but

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("breccia_triton")

import ptx
import torch
from triton_casts import DEVICE, ON_GPU, numbers, same, same_values

import breccia
from breccia.backend import CastOptions, reference
from breccia.options import product_options
from breccia_triton import operands
from breccia_triton.casts import cast, decode
from breccia_triton.facts import Hardware
from breccia_triton.geometry import amax_tile, lanes_of, plain_tile, strips_of, tile_of
from breccia_triton.launch import cache, executable
from breccia_triton.launch import launcher as launch
from breccia_triton.launch.package_key import remembered
from breccia_triton.tuning import choices, measurements, timing
from breccia_triton.tuning.choices import DEFAULT, Choice, Choices, Key, Tuned, choices_of, user_file, write
from breccia_triton.tuning.timing import configure

pytestmark = [
    pytest.mark.covering(1, 1),  # the interpreter takes seconds for some cases; `make slow` and a GPU run all
    *([pytest.mark.gpu] if ON_GPU else []),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

NAME = "Acme Fast 9000 (PCIe)"
KEY = Key("tile along", "cast E4M3/F32 1x128 axis -1 float32 small")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Folders of this test for the user's files and the shipped ones; nothing tuned, prepared or configured remains."""
    monkeypatch.setattr(choices.platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(measurements, "SHIPPED", tmp_path / "shipped")
    choices_of.cache_clear()
    yield
    choices_of.cache_clear()
    cast._calls.clear()
    decode._calls.clear()
    assert not timing._settings.autotune


def shipped() -> Path:
    return measurements.shipped("triton", NAME)


def tuned(**numbers: int) -> Tuned:
    return Tuned(Choice(**numbers), 1e-4, 2e-4)


# -- files -----------------------------------------------------------------------------------------------------------


def test_the_user_s_choices_come_before_the_shipped_ones_and_these_before_the_default() -> None:
    other = Key("decode", "E4M3/F32 1x128 axis -1 bfloat16")
    assert measurements.file_name(NAME) == "acme_fast_9000_pcie.json"
    assert Choices(NAME)(KEY) == DEFAULT
    write(shipped(), NAME, {KEY: tuned(elements=2048), other: tuned(each=16)})
    assert (Choices(NAME)(KEY), Choices(NAME)(other)) == (Choice(elements=2048), Choice(each=16))
    write(user_file(NAME), NAME, {KEY: tuned(elements=8192, wide=256)})
    assert (Choices(NAME)(KEY), Choices(NAME)(other)) == (Choice(elements=8192, wide=256), Choice(each=16))
    assert Choices("Acme Slow 1")(KEY) == Choices("")(KEY) == DEFAULT


@pytest.mark.parametrize(
    ("name", "capability", "processors", "kilohertz", "taken"),
    [
        ("NVIDIA H200", (9, 0), 132, 3201000, "NVIDIA H200"),
        ("NVIDIA H100 80GB HBM3", (9, 0), 132, 2619000, "NVIDIA H200"),
        ("NVIDIA H100 PCIe", (9, 0), 114, None, "NVIDIA H200"),
        ("NVIDIA H20", (9, 0), 78, 2619000, "NVIDIA H20"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1593000, "NVIDIA A100-SXM4-80GB"),
    ],
)
def test_a_device_takes_what_was_measured_on_the_nearest_one_of_its_family(
    name: str, capability: tuple[int, int], processors: int, kilohertz: int | None, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurements, "_families", {})
    clock = {} if kilohertz is None else {"memory_clock_rate": kilohertz}
    facts = SimpleNamespace(name=name, major=capability[0], minor=capability[1], multi_processor_count=processors, **clock)
    assert measurements.name_of(facts) == name
    assert measurements.measured_as(name) == taken
    write(measurements.shipped("triton", "NVIDIA H200"), "NVIDIA H200", {KEY: tuned(elements=2048)})
    assert choices.Choices(name)(KEY) == (Choice(elements=2048) if taken == "NVIDIA H200" else choices.DEFAULT)


def test_a_default_that_the_user_tuned_comes_before_a_shipped_choice() -> None:
    write(shipped(), NAME, {KEY: tuned(elements=2048)})
    write(user_file(NAME), NAME, {KEY: tuned()})
    assert Choices(NAME)(KEY) == DEFAULT


WRONG = {
    "{": "Expecting property name",
    "[]": "its schema is None; this version of breccia-triton reads 2",
    '{"schema": 1, "device": "%s", "choices": {}}': "its schema is 1; this version of breccia-triton reads 2",
    '{"schema": 2, "device": "Acme Slow 1", "entries": {}}': "it is for 'Acme Slow 1', not for 'Acme Fast 9000 (PCIe)'",
    '{"schema": 2, "device": "%s", "entries": []}': "it has no entries",
    '{"schema": 2, "device": "%s", "entries": {"a": 1}}': "of 'a' there is no choice",
    '{"schema": 2, "device": "%s", "entries": {"a": {"choice": {"elements": 3000}}}}': (
        "of 'a' elements is 3000, which is not a power of two from 32 to 16384"
    ),
    '{"schema": 2, "device": "%s", "entries": {"a": {"choice": {"warps": 64}}}}': "warps is 64, which is not a power of two",
    '{"schema": 2, "device": "%s", "entries": {"a": {"choice": {"each": "8"}}}}': "each is '8', which is not a power of two",
    '{"schema": 2, "device": "%s", "entries": {"a": {"choice": {"steps": true}}}}': "steps is True, which is not a power",
    '{"schema": 2, "device": "%s", "entries": {"a": {"choice": {"tall": 8}}}}': (
        "of 'a' 'tall' is unknown; there are elements, wide, each, vector, warps, steps, programs"
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning_that_names_it(text: str) -> None:
    path = user_file(NAME)
    path.parent.mkdir(parents=True)
    path.write_text(text.replace("%s", NAME), encoding="utf-8")
    write(shipped(), NAME, {KEY: tuned(elements=2048)})
    with pytest.warns(UserWarning) as caught:
        assert choices_of(NAME)(KEY) == choices_of(NAME)(KEY) == Choice(elements=2048)
    (warning,) = caught
    message = str(warning.message)
    assert message.startswith(f"breccia ignores {path}: ") and WRONG[text] in message
    assert message.endswith("Delete the file, or tune anew with breccia_triton.configure(autotune=True).")
    choices_of(NAME).keep({KEY: tuned(wide=64)})
    assert Choices(NAME).user == {str(KEY): Choice(wide=64)}


def test_writing_keeps_other_entries_and_leaves_no_other_file() -> None:
    path, other = user_file(NAME), Key("amax", "tensor bfloat16")
    write(path, NAME, {KEY: tuned(elements=2048)})
    write(path, NAME, {other: tuned(programs=512)}, {"date_utc": "today"})
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found == {
        "schema": 2,
        "device": NAME,
        "provenance": {"date_utc": "today"},
        "entries": {
            str(other): {"choice": {"programs": 512}, "us": 100.0, "default_us": 200.0},
            str(KEY): {"choice": {"elements": 2048}, "us": 100.0, "default_us": 200.0},
        },
    }
    write(path, NAME, {KEY: tuned()}, defaults=False)
    assert Choices(NAME).user == {str(other): Choice(programs=512)}


def test_what_cannot_be_written_is_said_and_used_in_this_process(tmp_path: Path) -> None:
    found = Choices(NAME)
    (tmp_path / "cache").write_text("not a folder")
    with pytest.warns(UserWarning, match=r"breccia cannot keep what it tuned in .*: .*; the next process tunes it again\.$"):
        found.keep({KEY: tuned(elements=2048)})
    assert found(KEY) == Choice(elements=2048)


WRITER = """
import sys
from pathlib import Path
from breccia_triton.tuning.choices import Choice, Key, Tuned, write
for n in range(40):
    write(Path(sys.argv[1]), "Acme", {Key("amax", f"{sys.argv[2]} {n}"): Tuned(Choice(warps=4), 1.0, 2.0)})
"""


def test_a_reader_never_sees_a_file_that_is_half_written(tmp_path: Path) -> None:
    path = tmp_path / "acme.json"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(n)]) for n in range(2)]
    seen = 0
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            seen = max(seen, len(measurements.read(path, "Acme", Choice.entry)))
    assert [writer.returncode for writer in writers] == [0, 0]
    found = measurements.read(path, "Acme", Choice.entry)
    assert seen and {"amax 0 39", "amax 1 39"} & found.keys()
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []


def test_what_another_process_dropped_is_written_again() -> None:
    found, other = Choices(NAME), Key("amax", "tensor bfloat16")
    found.keep({KEY: tuned(elements=2048)})
    user_file(NAME).unlink()
    found.keep({other: tuned(warps=4)})
    assert Choices(NAME).user == {str(KEY): Choice(elements=2048), str(other): Choice(warps=4)}


def test_every_file_of_the_distribution_can_be_used() -> None:
    for path in measurements.SHIPPED.glob("triton_*.json"):  # the others have tests of their own
        device = json.loads(path.read_text(encoding="utf-8"))["device"]
        assert path == measurements.shipped("triton", device)
        for text, entry in measurements.read(path, device, dict).items():
            assert Choice.of(entry["choice"]) != DEFAULT and entry["us"] < entry["default_us"], text
            assert text.startswith(tuple(timing.GRIDS)), text


# -- settings --------------------------------------------------------------------------------------------------------


def test_autotune_is_off_unless_it_is_set_or_within_its_block() -> None:
    assert not timing._settings.autotune
    with configure(autotune=True):
        assert timing._settings.autotune
        with configure(autotune=False):
            assert not timing._settings.autotune
        assert timing._settings.autotune
    assert not timing._settings.autotune
    breccia.kernels.triton.configure(autotune=True)
    assert timing._settings.autotune
    configure(autotune=False)
    with pytest.raises(TypeError, match=r"^configure\(autotune=\) takes True or False; got 'yes'$"):
        configure(autotune="yes")  # type: ignore[arg-type]


def test_calls_are_timed_on_cuda_only_and_never_while_captured_or_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, capturing, compiling = torch.device("cuda"), [False], [False]
    monkeypatch.setattr(timing, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling[0])
    assert timing.timeable(cuda) and not timing.timeable(torch.device("cpu"))
    capturing[0] = True
    assert not timing.timeable(cuda)
    capturing[0], compiling[0] = False, True
    assert not timing.timeable(cuda)


# -- tuning ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Tuning with a timer that takes seconds from `constants` of the last kernel; the list has what it timed."""
    ran: list[Any] = []

    def run(self: Any, *given: Any) -> object:
        launch = self.prepared.launch if isinstance(self, cast.Call) else self.plan
        ran.append(launch)
        return ran

    def elapsed(call: Callable[[], object], calls: int) -> float:
        call()
        tile = ran[-1].constants.get("L") or ran[-1].constants["G"]
        return SECONDS(tile) * (1 + 0.001 * (len(ran) % 3))

    monkeypatch.setattr(cast.Call, "__call__", run)
    monkeypatch.setattr(cast.Call, "plainly", run)  # repeated calls on a GPU
    monkeypatch.setattr(executable.Executable, "__call__", run)
    monkeypatch.setattr(timing, "elapsed", elapsed)
    monkeypatch.setattr(timing, "timeable", lambda device: True)
    for module in (cast, decode):
        monkeypatch.setattr(module, "hardware", lambda device: Hardware(name=NAME))
    return ran


def SECONDS(tile: Any) -> float:
    """Fastest for 2 tiles of 64 lanes of 64 elements, and for 8192 elements in other tiles."""
    if hasattr(tile, "lanes"):
        return 1e-3 * (1 + abs(tile.steps - 2) + abs(tile.lanes - 64) / 64 + 64 / tile.lane)
    return 1e-3 * (1 + abs(tile.rows * tile.columns - 8192) / 8192)


def test_nothing_is_timed_without_request(timed: list[Any]) -> None:
    x, recipe = torch.ones((256, 512), device=DEVICE), breccia.recipe("fp8_block")
    cast.cast(x, recipe)
    decode.dequantize(reference.cast(x, recipe))
    assert len(timed) == 2 and not user_file(NAME).exists()


def test_the_first_call_on_request_keeps_the_fastest_choice(timed: list[Any]) -> None:
    x, recipe = torch.ones((256, 512), device=DEVICE), breccia.recipe("fp8_block")
    cast.cast(x, recipe)  # prepared before: tuned all the same
    with configure(autotune=True):
        cast.cast(x, recipe)
        tried = len(timed)
        cast.cast(x, recipe)
    assert tried > 30 and len(timed) == tried + 1
    assert timed[-1].constants["G"].rows * timed[-1].constants["G"].columns == 8192
    entry = measurements.read(user_file(NAME), NAME, dict)["tile along cast E4M3/F32 1x128 axis -1 float32 small"]
    assert entry["choice"]["elements"] == 8192 and 1.9 < entry["default_us"] / entry["us"] * 4 / 3 < 2.1
    # Another shape of the same kind, and another process, take it from the file.
    choices_of.cache_clear()
    cast.cast(x[:128], recipe)
    assert len(timed) == tried + 2 and timed[-1].constants["G"].rows * timed[-1].constants["G"].columns == 8192
    with configure(autotune=True):
        cast.cast(x[:64], recipe)
    assert len(timed) == tried + 3


def test_kernels_for_narrow_codes_and_decoding_are_tuned(timed: list[Any]) -> None:
    x, recipe = torch.ones((256, 512), device=DEVICE), breccia.recipe("mxfp4")
    with configure(autotune=True):
        cast.cast(x, recipe)
        assert (timed[-1].constants["L"].steps, timed[-1].constants["L"].lanes) == (2, 64)
        decode.dequantize(reference.cast(x, recipe))
        assert timed[-1].constants["G"].rows * timed[-1].constants["G"].columns == 8192
    found = {text: entry["choice"] for text, entry in measurements.read(user_file(NAME), NAME, dict).items()}
    assert found["lanes cast E2M1/E8M0 1x32 axis -1 float32 small"] == {"each": 64, "warps": 2, "steps": 2}
    assert found["decode E2M1/E8M0 1x32 axis -1 float32 small"]["elements"] == 8192


def test_a_default_that_is_about_as_fast_stays_and_is_not_tuned_again(
    timed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SECONDS", lambda tile: 1e-3 if tile.elements == 32 else 0.99e-3)
    x, recipe = torch.ones((256, 512), device=DEVICE), breccia.recipe("fp8_block")
    with configure(autotune=True):
        cast.cast(x, recipe)
        tried = len(timed)
        choices_of.cache_clear()
        cast._calls.clear()
        cast.cast(x, recipe)
    assert len(timed) == tried + 1
    (entry,) = measurements.read(user_file(NAME), NAME, dict).values()
    assert entry["choice"] == {}


def test_candidates_that_fail_are_left_out_and_an_error_of_the_default_is_raised() -> None:
    slow, fast, broken = DEFAULT, Choice(warps=4), Choice(warps=8)
    took = {slow: 3.0, fast: 2.0}
    ran: list[Choice] = []

    def maker(choice: Choice) -> Callable[[], Callable[[], object]]:
        if choice == broken:
            raise RuntimeError("out of registers")
        return lambda: ran.append(choice)  # type: ignore[return-value]

    def sample(call: Callable[[], object], calls: int) -> float:
        call()
        return took[ran[-1]]

    found = timing.fastest({c: lambda c=c: maker(c) for c in (slow, fast, broken)}, sample)
    assert found.best == Tuned(fast, 2.0, 3.0)
    assert found.failed == {broken: "RuntimeError: out of registers"}
    with pytest.raises(RuntimeError, match="out of registers"):
        timing.fastest({DEFAULT: lambda: maker(broken)}, sample)


# -- results ---------------------------------------------------------------------------------------------------------


def under_every_choice(
    prepare: Callable[[Any], Any], launches: Callable[[Any], list[Any]], run: Callable[[Any], Any]
) -> list[Any]:
    """Results of a call under each candidate for each of its keys."""
    keys: list[Key] = []

    def asked(key: Key) -> Choice:
        keys.append(key)
        return DEFAULT

    prepare(asked)
    found: list[Any] = []
    for key in keys:
        different = timing.distinct(key, prepare, launches, lambda other: DEFAULT)
        found += [run(made) for choice, made in different.items() if choice != DEFAULT or not found]
    return found


def check_casts(op: str, spec: str, axis: int, x: Any, hardware: Hardware) -> int:
    recipe, options = breccia.recipe(spec), CastOptions(axis=axis)
    expected = getattr(reference, op)(x, recipe, options)
    results = under_every_choice(
        lambda choose: cast.prepared(op, x, recipe, axis, options, hardware, choose),
        lambda made: made.launches,
        lambda made: cast.Call(x, made)(x, options),
    )
    for found in results:
        (same_values if op == "cast_ste" else same)(found, expected)
    return len(results)


def hardware_here() -> Hardware:
    return operands.hardware(torch.empty(0, device=DEVICE).device)


ASYMMETRIC = "int4,symmetric=false,signed=false,group_size=32"
SPECS = ["fp8_block", "mxint8", "fp8_row", "fp8_block,block_m=32,block_k=32", "fp8_current", "nvfp4", "mxfp6", ASYMMETRIC]


@pytest.mark.long
@pytest.mark.parametrize("op", ["cast", "cast_ste"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", SPECS)
def test_casts_write_the_same_bytes_under_every_choice(op: str, spec: str, axis: int, dtype: Any) -> None:
    x = numbers((1024, 2048) if ON_GPU else (32, 128), seed=31, dtype=dtype)
    tried = check_casts(op, spec, axis, x, hardware_here())
    assert tried > 2


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="the GPU runs the instructions themselves")
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", slow_but({"nvfp4", "mxfp6"}, ["nvfp4", "mxfp6", "nf4", ASYMMETRIC]))
def test_branches_for_nvidia_gpus_write_the_same_bytes_under_every_choice(
    spec: str, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    ptx.emulate(monkeypatch)
    assert check_casts("cast", spec, axis, numbers((32, 128), seed=32, dtype=torch.bfloat16), Hardware(ptx=True)) > 2


@pytest.mark.long
@pytest.mark.parametrize("spec", ["mxfp6", "nf4", "nvfp4", "fp8_block", ASYMMETRIC])
def test_values_are_the_same_under_every_choice(spec: str) -> None:
    st = reference.cast(numbers((1024, 2048) if ON_GPU else (64, 256), seed=33), breccia.recipe(spec))
    expected = reference.dequantize(st, product_options("float32"))
    results = under_every_choice(
        lambda choose: decode.prepared(st, "float32", hardware_here(), choose),
        timing.one,
        lambda made: decode.executable(st, "float32", made)(st, None, None, None),
    )
    assert len(results) > 2
    for found in results:
        same_values(found, expected)


@pytest.mark.parametrize("number", [(name, n) for name, limits in choices.LIMITS.items() for n in limits], ids=str)
def test_every_possible_number_becomes_one_that_the_call_allows(number: tuple[str, int]) -> None:
    choice = Choice(**dict([number]))
    for block in ((1, 128), (1, 16), (128, 128), (3, 20), (None, None), (1, None)):
        for axis in (-1, -2):
            for shape in ((4096, 4096), (3, 40)):
                tile, _ = tile_of(block, axis, *shape, choice)  # type: ignore[misc]
                for each in (tile, plain_tile(1, *shape, choice), amax_tile("tensor", *shape, False, choice)):
                    assert 1 <= each.warps <= 16 and each.rows * each.columns <= 16384
                    assert all(n >= 1 and n & (n - 1) == 0 for n in (each.rows, each.columns))
    for bits in (4, 6):
        lanes = lanes_of((1, 1024), 64, 4096, bits, 2, choice)
        strips = strips_of((1, 512), 4096, 4096, bits, 32, choice)
        assert lanes is not None and lanes.blocks >= 1 and 1 <= lanes.warps <= 32 and lanes.lane >= lanes.chunk
        assert strips is not None and strips.wide >= 32 and 1 <= strips.warps <= 32 and strips.block % strips.lane == 0


# -- Triton's key of its package -------------------------------------------------------------------------------------


def test_a_key_is_computed_once_for_all_processes_until_a_file_changes(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "part").mkdir(parents=True)
    file = package / "part" / "code.py"
    file.write_text("one")
    computed: list[str] = []

    def compute() -> str:
        computed.append(file.read_text())
        return computed[-1]

    def key(version: str = "1") -> str:
        return remembered(compute, package, version)()  # as in another process

    assert [key(), key()] == ["one", "one"] and computed == ["one"]
    before = file.stat()
    file.write_text("two")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size and file.stat().st_mtime_ns == before.st_mtime_ns
    assert [key(), key()] == ["two", "two"] and computed == ["one", "two"]
    key("2")
    kept = tmp_path / "cache" / "breccia" / "triton" / "package_key.json"
    kept.write_text("{}")
    key("2")
    (package / "other.py").touch()
    key("2")
    assert computed == ["one", "two", "two", "two", "two"]
    kept.unlink()
    kept.mkdir()  # cannot be read or replaced
    assert key("2") == "two"


KEYS = """
from triton.runtime import cache
original = cache.triton_key
from breccia_triton.launch import launcher as launch
assert cache.triton_key is not original and cache.triton_key() == original() and len(original()) > 64
"""


@pytest.mark.slow  # of Triton, which changes where constraints.txt does
def test_the_key_is_the_one_that_triton_computes(tmp_path: Path) -> None:
    for _ in range(2):
        printed(KEYS, XDG_CACHE_HOME=str(tmp_path), TRITON_INTERPRET=None)
    assert [p.name for p in tmp_path.rglob("*.json")] == ["package_key.json"]


# -- on a GPU only ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_call_is_tuned_on_a_gpu_and_the_next_process_takes_it() -> None:
    if not ON_GPU:
        pytest.skip("needs a GPU")
    x, recipe = torch.randn((4096, 4096), device="cuda", dtype=torch.bfloat16), breccia.recipe("fp8_block")
    expected = breccia.cast(x, recipe, axis=-2)
    with configure(autotune=True):
        same(breccia.cast(x, recipe, axis=-2), expected)
    name = torch.cuda.get_device_name()
    (text,) = measurements.read(user_file(name), name, dict)
    assert text == "tile turned cast E4M3/F32 1x128 axis -2 bfloat16"
    choices_of.cache_clear()
    cast._calls.clear()
    same(breccia.cast(x, recipe, axis=-2), expected)


# -- what is kept between calls ---------------------------------------------------------------------------------------


def test_a_full_cache_lets_its_oldest_entry_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_REMEMBERED", 3)
    kept = cache.Remembered()
    for n in range(5):
        assert kept.keep(n, str(n)) == str(n)
    assert kept == {2: "2", 3: "3", 4: "4"}
    cache.Remembered._all.remove(kept)


@on_cuda
def test_calls_that_differ_in_lengths_alone_compile_a_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    compile_ = launch.triton.compile
    monkeypatch.setattr(launch.triton, "compile", lambda *args, **options: compiled.append(args) or compile_(*args, **options))
    for calls in (launch._compiled, launch._modules):
        calls.clear()
    for rows in (1000, 1016, 1032):
        x = numbers((rows, 4096), seed=1).bfloat16()
        same(breccia.cast(x, "fp8_block"), reference.cast(x, breccia.recipe("fp8_block")))
    assert len(compiled) == 1
