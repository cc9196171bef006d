"""CUDA C++ to cubins, by NVRTC through ctypes, with a cache on disk.

Kernels include no CUDA headers, so no toolkit is needed: torch's CUDA wheels depend on NVRTC. A cubin is kept in the user
cache directory under a hash of everything that it depends on: source, headers, options, architecture and NVRTC version.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import platformdirs

from breccia import BrecciaError
from breccia.internal import once

from ..tuning.measurements import replace_file

#: Options of every compilation.
OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")
#: The name of the library: `libnvrtc.so.13`, on Windows `nvrtc64_130_0.dll`. Others, such as the builtins, do not match.
_LIBRARY = re.compile(r"libnvrtc\.so(\.\d+)*|nvrtc64_\d+_\d+\.dll")


class CompileError(BrecciaError, RuntimeError):
    """NVRTC rejected a source, or could not be used. log: what it printed."""


_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class CudaSource:
    """A CUDA C++ source: its text, and the texts of files that it includes by `#include "name"`, by name."""

    name: str
    text: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @staticmethod
    def read(path: Path, headers: Mapping[str, str] | None = None) -> CudaSource:
        """The source in a file, with the files that it includes, beside it or a folder above. headers: other texts, by name."""
        texts = dict(headers or {})
        text = path.read_text(encoding="utf-8")
        waiting = [text]
        while waiting:
            for name in _INCLUDE.findall(waiting.pop()):
                found = next((folder / name for folder in path.parents[:2] if (folder / name).is_file()), None)
                if name not in texts and found is not None:
                    texts[name] = found.read_text(encoding="utf-8")
                    waiting.append(texts[name])
        return CudaSource(path.name, text, texts)


class Compiler:
    """NVRTC. library: the loaded shared library, whose functions return 0 or the number of an error."""

    def __init__(self, library: Any) -> None:
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
        self.version = major.value, minor.value

    def compile(self, source: CudaSource, options: Iterable[str]) -> tuple[bytes, str]:
        """(The cubin, what the compiler and ptxas printed.) Raises CompileError with the log.

        options: of NVRTC; one has to be `--gpu-architecture=sm_XX`, since PTX would still need a driver that knows it.
        """
        library, options = self._library, list(options)
        names, texts = list(source.headers), list(source.headers.values())
        program = ctypes.c_void_p()
        status = library.nvrtcCreateProgram(
            ctypes.byref(program), source.text.encode(), source.name.encode(), len(names), _strings(texts), _strings(names)
        )
        self._check(status, "nvrtcCreateProgram")
        try:
            status = library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                version, flags = ".".join(map(str, self.version)), " ".join(map(repr, options))
                raise CompileError(
                    f"NVRTC {version} does not compile {source.name} with {flags}: {self._name(status)}. It printed:\n{log}",
                    log=log,
                )
            return self._read(program, "CUBIN"), log
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
        return buffer.raw

    def _check(self, status: int, what: str) -> None:
        if status:
            raise CompileError(f"NVRTC: {what} failed with {self._name(status)}; reinstall torch's CUDA packages.")

    def _name(self, status: int) -> str:
        function = self._library.nvrtcGetErrorString
        function.restype = ctypes.c_char_p
        name: Any = function(status)
        return name.decode() if isinstance(name, bytes) else f"error {status}"


def _strings(texts: list[str]) -> Any:
    return (ctypes.c_char_p * len(texts))(*[text.encode() for text in texts])


def libraries(folders: Iterable[str]) -> list[Path]:
    """The NVRTC libraries of packages in folders of `sys.path`, the newest first: in NVIDIA's wheels, or in torch's."""
    paths: set[Path] = set()
    for folder in folders:
        root = Path(folder or ".")
        for pattern in ("nvidia/*/lib", "nvidia/*/bin", "nvidia/*/bin/*", "torch/lib"):
            for place in root.glob(pattern):
                paths.update(path for path in place.glob("*nvrtc*") if _LIBRARY.fullmatch(path.name))
    return sorted(paths, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)], reverse=True)


@once
def nvrtc(major: int | None = None) -> Compiler:
    """NVRTC of a CUDA version: torch's, the toolkit's or a package's. Raises CompileError where there is none.

    major: of CUDA, which should be torch's (a newer compiler may make cubins that the driver does not know). None: any.
    """
    names = [f"libnvrtc.so.{major}"] if major else ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    paths = [path for path in libraries(sys.path) if not major or re.search(rf"(so\.|nvrtc64_){major}", path.name)]
    for path in paths:
        with contextlib.suppress(OSError):
            for builtins in path.parent.glob("*nvrtc-builtins*"):  # NVRTC looks for it by name, in no folder of a package
                if ".alt." not in builtins.name:
                    ctypes.CDLL(str(builtins))
            return Compiler(ctypes.CDLL(str(path)))
    for name in names:
        with contextlib.suppress(OSError):
            return Compiler(ctypes.CDLL(name))
    raise CompileError(
        f"CUDA C++ kernels need NVRTC{f' {major}' if major else ''}, which was not found; pip install nvidia-cuda-nvrtc "
        "(torch's CUDA wheels depend on it)."
    )


def missing(major: int | None = None) -> str | None:
    """Why nothing can be compiled, or None."""
    try:
        nvrtc(major)
    except CompileError as e:
        return str(e)
    return None


def options_of(architecture: str, macros: Mapping[str, int | str]) -> list[str]:
    """NVRTC's options for an architecture ("sm_90a") and macros by name."""
    return [f"--gpu-architecture={architecture}", *OPTIONS, *[f"-D{name}={value}" for name, value in sorted(macros.items())]]


def cubin(source: CudaSource, architecture: str, macros: Mapping[str, int | str], compiler: Compiler | None = None) -> bytes:
    """The compiled source, from the cache on disk where it is known. Raises CompileError.

    A cache that cannot be written costs time only.
    """
    compiler, options = compiler or nvrtc(), options_of(architecture, macros)
    path = cache_folder() / f"{_key(source, options, compiler.version)}.cubin"
    with contextlib.suppress(OSError):
        cached = path.read_bytes()
        if cached:
            return cached
    compiled, _ = compiler.compile(source, options)
    with contextlib.suppress(OSError):
        replace_file(path, compiled)
    return compiled


@lru_cache(maxsize=1)
def cache_folder() -> Path:
    """The folder of compiled kernels."""
    return platformdirs.user_cache_path("breccia") / "cuda"


def _key(source: CudaSource, options: list[str], version: tuple[int, int]) -> str:
    facts = [source.name, source.text, sorted(source.headers.items()), options, version]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
