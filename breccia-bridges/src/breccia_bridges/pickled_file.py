"""Files of torch.save, read by `torch.load(weights_only=True, mmap=True)` alone: no program that is in a pickle runs.

Tensors of torchao's classes become the parts, names and metadata that torchao gives them in safetensors files, so that one
dialect reads both.
"""

from __future__ import annotations

import json
import os
import pickle
import stat
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from breccia import BrecciaError, CorruptFileError, UnsupportedError
from breccia.internal import printable

from .configs import FILE_DTYPES
from .safetensors_file import DTYPES, Container, Entry, byte_count, identity, need_little_endian, shown

#: What users can do with a file that breccia does not read.
_RESAVE = (
    "If you trust it, load the model with the library that wrote the file, and write it with model.save_pretrained(folder), "
    "which makes safetensors."
)


class PickledFile(Container):
    """A state dict that torch.save wrote, mapped: its pickle is read, and no tensor before it is asked for.

    entries: of plain tensors by name; of the parts of torchao's tensors. metadata: under the name of each of torchao's tensors
    its class and attributes.

    Raises UnsupportedError without torch or torchao where they are needed, for a pickle that needs more than tensors, and for
    what is no dict of tensors by name; CorruptFileError for a file that torch cannot read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        need_little_endian()
        self.path = Path(path)
        status = os.stat(self.path)
        self._identity = identity(status)
        self.metadata, self.entries, self._tensors, self._end = {}, {}, {}, 0
        with _typed(self.path):
            self._need_stored(stat.S_ISREG(status.st_mode))
            self._state = self._loaded()
            for name, tensor in self._state.items():
                for entry, part in self._parts(name, tensor).items():
                    self._add(entry, part)
        self.check_unchanged()

    @property
    def names(self) -> list[str]:
        return list(self._state)

    def view(self, name: str) -> np.ndarray:
        """The tensor as a mapped, copy-on-write array, as `Container.view`.

        One whose items do not lie in order, or that torch negates or conjugates when it reads them, is copied.
        """
        entry = self.entry(name)
        with _typed(self.path):
            flat = self._tensors[name].resolve_conj().resolve_neg().contiguous().reshape(-1)
            return flat.view(_torch(self.path).uint8).numpy().view(DTYPES[entry.dtype][1]).reshape(entry.shape)

    def read(self, name: str) -> np.ndarray:
        array = self.view(name).copy()
        self.check_unchanged()
        return array

    def _need_stored(self, is_file: bool) -> None:
        """Raise unless the file is a zip archive without compression: mapped bytes would be other values."""
        if not is_file or not zipfile.is_zipfile(self.path):
            raise UnsupportedError(
                f"{shown(self.path)} is no zip archive, which torch.save writes since PyTorch 1.6, or is truncated. Download "
                f"it again. {_RESAVE}",
                path=str(self.path),
            )
        with zipfile.ZipFile(self.path) as archive:
            packed = [record.filename for record in archive.infolist() if record.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise UnsupportedError(
                f"{shown(self.path)}: {printable(packed[0])} is compressed, which torch.save does not do, so that it cannot be "
                f"mapped. {_RESAVE}",
                path=str(self.path),
            )

    def _loaded(self) -> dict[str, Any]:
        """The state dict."""
        torch = _torch(self.path)
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as e:
            if "torchao." not in str(e):
                raise
            _torchao(self.path)  # when it is imported, it declares its classes to torch
            state = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(state, dict):
            raise self._no_state_dict(f"it holds a {type(state).__name__}")
        for name, tensor in state.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise self._no_state_dict(f"under {printable(repr(name))} it has a {type(tensor).__name__}")
        return state

    def _no_state_dict(self, found: str) -> UnsupportedError:
        return UnsupportedError(
            f"{shown(self.path)} is no state dict, tensors by name: {found}. Save the state dict alone, with "
            "torch.save(model.state_dict(), path) or as safetensors.",
            path=str(self.path),
        )

    def _parts(self, name: str, tensor: Any) -> dict[str, Any]:
        """The entries of a tensor; the metadata of one of torchao's is added."""
        torch = _torch(self.path)
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            return {name: tensor}
        kind = type(tensor)
        if kind.__module__.partition(".")[0] == "torchao":
            utils = _torchao(self.path)
            if kind.__name__ in utils.ALLOWED_TENSORS_SUBCLASSES:
                self.metadata[name] = text = json.dumps(tensor, cls=utils.TensorSubclassAttributeJSONEncoder)
                stem, dot, leaf = name.rpartition(".")
                return {f"{stem}{dot}_{leaf}_{part}": getattr(tensor, part) for part in json.loads(text)["_tensor_data_names"]}
        raise UnsupportedError(
            f"{shown(self.path)}: {printable(name)} is a {kind.__module__}.{kind.__qualname__}, which breccia does not read. "
            f"{_RESAVE}",
            path=str(self.path),
            name=name,
        )

    def _add(self, name: str, tensor: Any) -> None:
        torch = _torch(self.path)
        dtype = FILE_DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise UnsupportedError(
                f"{shown(self.path)}: {printable(name)} is {tensor.dtype}, {tensor.layout}, on {tensor.device.type!r}; "
                f"safetensors has no such tensors. {_RESAVE}",
                path=str(self.path),
                name=name,
            )
        if name in self.entries:
            raise CorruptFileError(
                f"{shown(self.path)}: a part of a tensor of torchao and another tensor would both be {printable(name)}.",
                path=str(self.path),
                name=name,
            )
        size, stored = byte_count(dtype, tuple(tensor.shape)), tensor.untyped_storage().nbytes()
        if size > stored:
            raise UnsupportedError(
                f"{shown(self.path)}: {printable(name)} has {size} bytes, of which the file repeats {stored}; a small file can "
                "ask for any memory in this way. If you trust it, save tensor.contiguous() of each such tensor.",
                path=str(self.path),
                name=name,
            )
        start, self._end = self._end, self._end + size
        self.entries[name] = Entry(dtype, tuple(tensor.shape), start, self._end)
        self._tensors[name] = tensor.detach()


@contextmanager
def _typed(path: Path) -> Generator[None]:
    """Turn what zipfile, torch and torchao raise for a file into breccia's errors."""
    try:
        yield
    except (BrecciaError, OSError, MemoryError, Warning):
        raise
    except pickle.UnpicklingError as e:
        raise UnsupportedError(
            f"{shown(path)}: torch.load(weights_only=True) refuses it ({_reason(e)}). A pickle can run any program, so breccia "
            f"reads tensors alone. {_RESAVE}",
            path=str(path),
        ) from e
    except Exception as e:  # of many types, for a damaged file
        raise CorruptFileError(
            f"{shown(path)}: torch.load cannot read it ({type(e).__name__}: {_first_line(e)}). Download it again.",
            path=str(path),
        ) from e


def _torch(path: Path) -> Any:
    """torch. Raises UnsupportedError without it."""
    try:
        import torch
    except ImportError as e:
        raise UnsupportedError(
            f"{shown(path)} is a file of torch.save, and torch is not installed: pip install torch.", path=str(path)
        ) from e
    return torch


def _torchao(path: Path) -> Any:
    """How torchao writes its tensors to safetensors. Raises UnsupportedError without it."""
    try:
        from torchao.prototype.safetensors import safetensors_utils
    except ImportError as e:
        raise UnsupportedError(
            f"{shown(path)} has tensors of torchao, and torchao is not installed, or too old ({_first_line(e)}): "
            "pip install -U torchao.",
            path=str(path),
        ) from e
    return safetensors_utils


def _reason(error: Exception) -> str:
    """What torch refuses, of its page of advice."""
    lines = [line.strip().removeprefix("WeightsUnpickler error: ") for line in str(error).splitlines()]
    said = next((line for line in lines if "GLOBAL" in line or "nsupported" in line), _first_line(error))
    return printable(said.partition(" by default")[0].rstrip("."))


def _first_line(error: Exception) -> str:
    return printable((str(error).strip().splitlines() or [""])[0].rstrip("."))
