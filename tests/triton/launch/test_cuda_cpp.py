"""Compiling and launching CUDA C++: what is passed to NVRTC and to the driver, the cache on disk, and errors.

No test here needs a GPU: the driver is a stand-in, and NVRTC compiles for any architecture where it is installed.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any

import pytest
from compiling import compiled_with_log
from fresh import printed

from breccia import KernelError
from breccia_triton.launch import compiler, driver
from breccia_triton.launch.generated import defined

SOURCE = compiler.CudaSource(
    "scale.cu",
    '#include "factor.cuh"\nextern "C" __global__ void scale(float* x) { x[threadIdx.x] *= FACTOR; }\n',
    {"factor.cuh": "#define FACTOR (2.0f + OFFSET)\n"},
)


class FakeNvrtc:
    """Functions of NVRTC that record what they are given; `status` is what compiling returns."""

    def __init__(self, status: int = 0, cubin: bytes = b"cubin") -> None:
        self.status, self.cubin, self.compiled = status, cubin, list[list[str]]()
        self.sources: list[tuple[str, str, dict[str, str]]] = []
        self.destroyed = 0

        def name(status: int) -> bytes:
            return b"NVRTC_ERROR_%d" % status

        self.nvrtcGetErrorString = name

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 13, 0
        return 0

    def nvrtcCreateProgram(self, program: Any, text: bytes, name: bytes, count: int, texts: Any, names: Any) -> int:
        included = {names[i].decode(): texts[i].decode() for i in range(count)}
        self.sources.append((name.decode(), text.decode(), included))
        return 0

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:
        self.compiled.append([options[i].decode() for i in range(count)])
        return self.status

    def _size(self, program: Any, size: Any, what: bytes) -> int:
        size._obj.value = len(what)
        return 0

    def nvrtcGetProgramLogSize(self, program: Any, size: Any) -> int:
        return self._size(program, size, b"the log\0")

    def nvrtcGetProgramLog(self, program: Any, buffer: Any) -> int:
        ctypes.memmove(buffer, b"the log\0", 8)
        return 0

    def nvrtcGetCUBINSize(self, program: Any, size: Any) -> int:
        return self._size(program, size, self.cubin)

    def nvrtcGetCUBIN(self, program: Any, buffer: Any) -> int:
        ctypes.memmove(buffer, self.cubin, len(self.cubin))
        return 0

    def nvrtcDestroyProgram(self, program: Any) -> int:
        self.destroyed += 1
        return 0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compiler, "cache_folder", lambda: tmp_path / "cuda")
    return tmp_path / "cuda"


def test_a_cubin_is_compiled_once_and_then_read_from_disk(folder: Path) -> None:
    fake = FakeNvrtc()
    nvrtc = compiler.Compiler(fake)
    for _ in range(2):
        assert compiler.cubin(SOURCE, "sm_90a", {"OFFSET": 1, "A": 2}, nvrtc) == b"cubin"
    assert fake.compiled == [["--gpu-architecture=sm_90a", *compiler.OPTIONS, "-DA=2", "-DOFFSET=1"]]
    assert fake.sources == [(SOURCE.name, SOURCE.text, dict(SOURCE.headers))]
    assert fake.destroyed == 1
    assert [path.suffix for path in folder.iterdir()] == [".cubin"]  # and no temporary file


def test_everything_that_a_cubin_depends_on_changes_its_key(folder: Path) -> None:
    fake = FakeNvrtc()
    nvrtc = compiler.Compiler(fake)
    other = compiler.CudaSource(SOURCE.name, SOURCE.text + "\n", SOURCE.headers)
    header = compiler.CudaSource(SOURCE.name, SOURCE.text, {"factor.cuh": "#define FACTOR 3\n"})
    for source, architecture, macros in (
        (SOURCE, "sm_90a", {"OFFSET": 1}),
        (SOURCE, "sm_90a", {"OFFSET": 2}),
        (SOURCE, "sm_80", {"OFFSET": 1}),
        (other, "sm_90a", {"OFFSET": 1}),
        (header, "sm_90a", {"OFFSET": 1}),
    ):
        compiler.cubin(source, architecture, macros, nvrtc)
    nvrtc.version = (13, 1)
    compiler.cubin(SOURCE, "sm_90a", {"OFFSET": 1}, nvrtc)
    assert len(fake.compiled) == 6
    assert len(list(folder.iterdir())) == 6


def test_an_empty_file_in_the_cache_is_replaced(folder: Path) -> None:
    nvrtc = compiler.Compiler(FakeNvrtc())
    compiler.cubin(SOURCE, "sm_90a", {}, nvrtc)
    (path,) = folder.iterdir()
    path.write_bytes(b"")
    assert compiler.cubin(SOURCE, "sm_90a", {}, nvrtc) == b"cubin"
    assert path.read_bytes() == b"cubin"


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setattr(compiler, "cache_folder", lambda: blocked / "cuda")
    assert compiler.cubin(SOURCE, "sm_90a", {}, compiler.Compiler(FakeNvrtc())) == b"cubin"


def test_a_source_that_does_not_compile_says_so_with_the_log(folder: Path) -> None:
    fake = FakeNvrtc(status=6)
    with pytest.raises(
        compiler.CompileError, match=r"does not compile scale\.cu with .*sm_90a.*NVRTC_ERROR_6.*\nthe log$"
    ) as e:
        compiler.cubin(SOURCE, "sm_90a", {}, compiler.Compiler(fake))
    assert e.value.found == {"log": "the log"}
    assert fake.destroyed == 1
    assert not folder.exists()


def test_libraries_are_found_in_packages_newest_first_and_without_builtins(tmp_path: Path) -> None:
    for name in (
        "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "nvidia/cu13/lib/libnvrtc.so.13",
        "nvidia/cu13/lib/libnvrtc-builtins.so.13.0",
        "nvidia/cu13/lib/libnvrtc.alt.so.13",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert [path.name for path in compiler.libraries([str(tmp_path)])] == ["libnvrtc.so.13", "libnvrtc.so.12"]


def test_a_missing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "libraries", lambda folders: [])
    assert "NVRTC 99, which was not found; pip install" in str(compiler.missing(99))


def test_nvrtc_compiles_a_source_with_a_header_and_reports_registers(folder: Path) -> None:
    if reason := compiler.missing():
        pytest.skip(reason)
    made, log = compiled_with_log(SOURCE, {"OFFSET": 1})
    assert made[:4] == b"\x7fELF"
    assert "Used" in log and "registers" in log
    assert compiler.cubin(SOURCE, "sm_90a", {"OFFSET": 1})[:4] == b"\x7fELF"
    with pytest.raises(compiler.CompileError, match='identifier "OFFSET" is undefined'):
        compiler.cubin(SOURCE, "sm_90a", {})


class FakeDriver:
    """Functions of the driver that record what they are given."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.maps, self.launched = status, list[Any](), list[Any]()
        self.attributes: list[tuple[int, int]] = []

    def cuModuleLoadData(self, module: Any, cubin: bytes) -> int:
        module._obj.value = 1
        return self.status

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = 2
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: Any) -> int:
        self.attributes.append((attribute, value.value))
        return 0

    def cuGetErrorName(self, status: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE" if status == 1 else None
        return 0 if status == 1 else 1

    def cuTensorMapEncodeTiled(self, place: Any, *rest: Any) -> int:
        assert place.value % 64 == 0
        ctypes.memmove(place.value, bytes(range(128)), 128)
        self.maps.append([list(x) if isinstance(x, ctypes.Array) else getattr(x, "value", x) for x in rest])
        return self.status

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: Any) -> int:
        c = config._obj
        attributes = [(c.attributes[i].id, list(c.attributes[i].value)[:3]) for i in range(c.count)]
        grid = c.grid_x, c.grid_y, c.grid_z
        self.launched.append((grid, c.block_x, c.shared, c.stream, attributes, list(arguments)))
        return self.status


def test_a_launch_passes_the_grid_the_stream_the_cluster_and_the_addresses_of_its_arguments() -> None:
    fake = FakeDriver()
    function = driver.Driver(fake).load(b"cubin", "scale", 1024)
    assert fake.attributes == [(8, 1024)]
    values = [ctypes.c_void_p(256), ctypes.c_int(7)]
    launch = function.prepare((4, 2, 1), 128, values, cluster=2, dependent=True)
    launch.run(99)
    launch.run(99)
    arguments = [ctypes.addressof(value) for value in values]
    expected = ((4, 2, 1), 128, 1024, 99, [(4, [2, 1, 1]), (6, [1, 0, 0])], arguments)
    assert fake.launched == [expected, expected]
    function.prepare((1, 1, 1), 32, [ctypes.c_int(7)]).run(0)
    assert fake.launched[-1][3:5] == (None, [])


def test_a_launch_writes_each_number_of_a_call_where_the_kernel_reads_it() -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("first", ctypes.c_void_p), ("second", ctypes.c_int))

    fake = FakeDriver()
    function = driver.Driver(fake).load(b"cubin", "scale", 0)
    pair, number, tensor_map = Pair(), ctypes.c_void_p(), driver.MovableMap(function.driver, "uint8", (4, 64), (64,), (4, 32))
    slots = [(pair, "first"), [number, tensor_map], (pair, "second")]
    launch = function.prepare((1, 1, 1), 32, [pair, number, tensor_map], slots)
    assert launch.values == (pair, number, tensor_map.map)
    for numbers in ((256, 512, 7), (1024, 4096, -1)):
        launch.run(3, *numbers)
        assert (pair.first, number.value, pair.second) == numbers
        assert numbers[1] in [made[2] for made in fake.maps]


def test_functions_of_one_text_share_their_code_and_look_nothing_up_by_name() -> None:
    text = "def run(stream, more):\n    nonlocal total\n    total = total + more\n    return launched(stream, total)\n"
    first, second = (defined(text, {"total": n, "launched": lambda *given: given}) for n in (0, 10))
    assert [first(1, 2), second(3, 4), first(5, 6)] == [(1, 2), (3, 14), (5, 8)]
    assert first.__code__ is second.__code__ and first.__code__.co_names == ()
    launch = driver.Driver(FakeDriver()).load(b"cubin", "scale", 0).prepare((1, 1, 1), 32, [ctypes.c_int(7)])
    assert launch.run.__code__.co_names == ("stream",), "the field of the configuration is the only name"


def test_a_launch_in_the_middle_of_itself_is_refused() -> None:
    fake = FakeDriver()
    enqueue = fake.cuLaunchKernelEx
    fake_launches: list[int] = []

    def interrupted(*given: Any) -> int:
        fake_launches.append(1)
        if len(fake_launches) == 1:
            with pytest.raises(KernelError, match="a signal handler or a finalizer called for a product while the same"):
                again.run(0)
        return enqueue(*given)

    fake.cuLaunchKernelEx = interrupted  # type: ignore[method-assign]
    again = driver.Driver(fake).load(b"cubin", "scale", 0).prepare((1, 1, 1), 32, [])
    again.run(0)
    again.run(0)
    assert len(fake.launched) == 2


def test_a_tensor_map_lists_axes_from_the_last_one_and_strides_in_bytes() -> None:
    fake = FakeDriver()
    made = driver.Driver(fake).tensor_map(4096, "bfloat16", (3, 100, 64), (8000, 80), (1, 32, 64), swizzle=128)
    assert bytes(made) == bytes(range(128))
    dtype, rank, address, dims, strides, box, ones, interleave, swizzle, promotion, fill = fake.maps[0]
    assert (dtype, rank, address) == (9, 3, 4096)
    assert (dims, strides) == ([64, 100, 3], [160, 16000])
    assert (box, ones) == ([64, 32, 1], [1, 1, 1])
    assert (interleave, swizzle, promotion, fill) == (0, 3, 2, 0)


@pytest.mark.parametrize(("index", "shift"), [(0, 0), (3, 4)])
def test_the_word_of_a_map_that_holds_the_address_is_changed(index: int, shift: int) -> None:
    class Encoding(FakeDriver):
        def cuTensorMapEncodeTiled(self, place: Any, dtype: int, rank: int, address: Any, dims: Any, *rest: Any) -> int:
            super().cuTensorMapEncodeTiled(place, dtype, rank, address, dims, *rest)
            words = [dims[0]] * 16
            words[index] = (address.value >> shift) + (5 << 60)
            ctypes.memmove(place.value, struct.pack("<16Q", *words), 128)
            return self.status

    fake = Encoding()
    used = driver.MovableMap(driver.Driver(fake), "float32", (4, 100), (100,), (4, 32))
    for address in (4096, 8192, 1 << 45, 16):
        used.move(address)
        assert used.map.words[index] == (address >> shift) + (5 << 60) and used.map.words[index - 1] == 100
    assert len(fake.maps) == 1 + 5  # five maps show how addresses are held


def test_maps_are_made_anew_where_they_do_not_show_the_address() -> None:
    fake = FakeDriver()
    used = driver.MovableMap(driver.Driver(fake), "float32", (4, 100), (100,), (4, 32))
    for address in (4096, 8192, 1 << 45):
        used.move(address)
    assert [made[2] for made in fake.maps if made[0] == 7] == [4096, 8192, 1 << 45]
    fake.status = 1
    assert driver.Driver(fake).address_word is None


def test_a_failed_call_names_what_was_asked_and_the_drivers_error() -> None:
    with pytest.raises(driver.DriverError, match="loading kernel 'scale' failed with CUDA_ERROR_INVALID_VALUE") as e:
        driver.Driver(FakeDriver(1)).load(b"", "scale", 0)
    assert e.value.found == {"name": "CUDA_ERROR_INVALID_VALUE"}
    fake = FakeDriver()
    launch = driver.Driver(fake).load(b"cubin", "scale", 0).prepare((1, 1, 1), 32, [])
    fake.status = 1
    with pytest.raises(driver.DriverError, match="launching kernel 'scale' failed with CUDA_ERROR_INVALID_VALUE"):
        launch.run(0)
    with pytest.raises(driver.DriverError, match=r"describing a uint8 tensor of shape \(4, 4\).* failed with error 77"):
        driver.Driver(FakeDriver(77)).tensor_map(16, "uint8", (4, 4), (16,), (4, 4))


def test_a_thread_without_a_context_gets_that_of_the_kernel() -> None:
    fake, entered = FakeDriver(), list[int]()
    launch = driver.Driver(fake).load(b"cubin", "scale", 0).prepare((1, 1, 1), 32, [])
    fake.status = 201
    with pytest.raises(driver.DriverError, match="failed with error 201"):
        launch.run(0)
    launch.function.context = ctypes.c_void_p(5)

    def enter(context: Any) -> int:
        fake.status = 0
        entered.append(context.value)
        return 0

    def count(found: Any, *given: Any) -> int:
        found._obj.value = 33
        return fake.status

    fake.cuCtxSetCurrent, fake.cuOccupancyMaxActiveClusters = enter, count  # type: ignore[attr-defined]
    launch.run(0)
    assert entered == [5]
    fake.status = 201
    assert launch.function.clusters(128, 2) == 33 and entered == [5, 5]
    fake.status = 1
    with pytest.raises(driver.DriverError, match="counting clusters of 2 blocks of kernel 'scale' failed with CUDA_ERROR"):
        launch.function.clusters(128, 2)


def test_a_thread_without_a_context_describes_tensors_in_one_and_has_none_after_that() -> None:
    fake, contexts = FakeDriver(), list[int | None]()
    used = driver.Driver(fake)
    fake.status = 201
    with pytest.raises(driver.DriverError, match="describing a uint8 tensor .* failed with error 201"):
        used.tensor_map(4096, "uint8", (4, 64), (64,), (4, 32))

    def push(context: Any) -> int:
        fake.status = 0
        contexts.append(context.value)
        return 0

    def pop(context: Any) -> int:
        fake.status = 201
        contexts.append(None)
        return 0

    fake.cuCtxPushCurrent_v2, fake.cuCtxPopCurrent_v2 = push, pop  # type: ignore[attr-defined]
    used.entered = ctypes.c_void_p(5)
    assert bytes(used.tensor_map(4096, "uint8", (4, 64), (64,), (4, 32))) == bytes(range(128))
    assert contexts == [5, None]


def test_importing_the_compiler_and_the_driver_loads_no_framework() -> None:
    modules = "breccia_triton.launch.compiler, breccia_triton.launch.driver"
    code = f"import sys, {modules}; print({{'torch', 'triton', 'jax'}} & set(sys.modules))"
    assert printed(code) == "set()\n"
