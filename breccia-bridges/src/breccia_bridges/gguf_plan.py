"""The GGUF file that `convert` writes: which tensors it has, where their bytes are, and the bytes read back.

Everything is known before a byte is written: the keys, the name, type and place of each tensor. Bytes are those that
`dialects.gguf` writes; rows of q and k are put into llama.cpp's order here, whole, so that no code and no scale changes. Of
another GGUF file, the tensors that transformers has transposed or joined stay as they are, under their names in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, ClassVar, Self

import numpy as np

from breccia import CorruptFileError, UnsupportedError
from breccia.internal import abbreviated, measuring, printable

from .ahead import Item, results
from .convert_file import FilePlan, in_pieces
from .dialect_writer import DialectWriter, Reader
from .gguf_file import PART, GGUFFile, GGUFTensors
from .gguf_keys import SCALED, copied_keys, file_type, made_keys
from .gguf_names import Change, Namer, Place, whole
from .gguf_types import NAMED, TYPES, type_bytes
from .jobs import CASTABLE, Job
from .safetensors_file import DTYPES, Container, Shape, read, shown
from .safetensors_writer import raw_bytes, write_at
from .source import Source
from .staged_writer import Digest, Thread, has_digest, opened_again
from .staging import naming

_NUMBERS = {one.name: number for number, one in TYPES.items()}
#: Tensors that programs compute from the config, and old checkpoints have.
_COMPUTED = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class Tensor:
    """A tensor of the new file, or the part of it that one expert has."""

    type: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        return type_bytes(self.type, self.shape)

    @property
    def rows(self) -> Shape:
        """The shape of its array: of blocks, their bytes are the last axis."""
        kind = NAMED[self.type]
        return self.shape if kind.dtype else (*self.shape[:-1], self.shape[-1] // kind.length * kind.size)


@dataclass(frozen=True)
class Slot:
    """Where a part of a value is: in which tensor, from which of its bytes on, and what is done to its array before."""

    tensor: str
    start: int
    part: Tensor
    change: Change | None

    def changed(self, pieces: Sequence[np.ndarray]) -> np.ndarray:
        """The array of the part from pieces of its bytes."""
        raw, dtype = np.concatenate(pieces), NAMED[self.part.type].dtype
        array = raw.view(DTYPES[dtype][1] if dtype else np.uint8).reshape(self.part.rows)
        return array if self.change is None else self.change(array)


class GGUFPlan(FilePlan):
    """One GGUF file for the values of a checkpoint: of GGUF files with their keys, or of a folder of transformers.

    Raises UnsupportedError without the library gguf, for a model whose keys are not known, names that its architecture does
    not have, and tensors of types that GGUF lacks.
    """

    suffix: ClassVar[str] = ".gguf"

    def __init__(
        self, source: Source, jobs: dict[str, Job], dialect: DialectWriter, reader: Reader, header: Mapping[str, str]
    ) -> None:
        super().__init__(source.files[0], dict(jobs), set(), dialect, reader, header)
        self.source = source
        first = source.files[0]
        if isinstance(first, GGUFFile):
            self._out, computed, keys = copied_keys(first.path), {}, first.header.keys
        else:
            self._out, computed, self.not_made = made_keys(source.path)
            keys = {key: one.value for key, one in self._out.kv_data[0].items()}
        self._namer = Namer(source.path, keys)
        self._files = [file for file in source.files if isinstance(file, GGUFFile)]
        self._originals = {name: (file, one) for file in self._files for name, one in file.placed.items()}
        self._check_names()
        self.tensors, self.slots = self._arranged()
        self.tensors |= {name: Tensor("F32", array.shape) for name, array in computed.items()}
        self.kept = computed
        for file in self._files:
            for one in (whole(file.header.tensors[name]) for name in file.left_out):
                self.kept[one.info.name] = file.stored(one)
                self.tensors[one.info.name] = Tensor(one.info.type.name, one.shape)
        self._ordered()
        if not self._originals or not all(map(self._is_same, self.jobs.values())):
            file_type(self._out, [(one.type, one.nbytes) for one in self.tensors.values() if len(one.shape) > 1])
        for name, one in self.tensors.items():
            self._out.add_tensor_info(name, one.shape, np.dtype(np.float32), one.nbytes, _NUMBERS[one.type])

    def declare(self, path: Path) -> None:
        if PART.fullmatch(path.name):
            raise UnsupportedError(f"{path.name} is the name of a part of a split model; give another one.", path=str(path))
        self.writer = GGUFWriter(path, self._out, self.tensors, self.slots, self.kept)

    @property
    def moved(self) -> Iterable[str]:
        return [part for part, slot in self.slots.items() if slot.change is not None]

    def copied(self, job: Job) -> Iterator[np.ndarray]:
        if job.name not in self._originals or job.is_changed:
            return super().copied(job)
        file, one = self._originals[job.name]
        return in_pieces(file.stored(one))

    def reopened(self) -> tuple[Container, dict[str, Item[None]]]:
        assert isinstance(self.writer, GGUFWriter)
        self.writer.check()
        return GGUFTensors(self.writer.path), {}

    # -- where everything is ------------------------------------------------------------------------------------

    def _check_names(self) -> None:
        """Leave out what programs compute, and refuse names that the architecture does not have."""
        if self._originals:
            return
        self.jobs = {name: job for name, job in self.jobs.items() if not name.endswith(_COMPUTED)}
        unknown = [name for name, job in self.jobs.items() if self._namer.place(name, job.value.shape) is None]
        if unknown:
            raise UnsupportedError(
                f"{shown(self.source.path)}: GGUF's {self._out.arch!r}, the architecture by config.json, has no place for "
                f"{abbreviated(unknown)}. Give a checkpoint with the names of transformers, of a model of text; or leave "
                "dialect='gguf' out.",
                names=unknown,
            )

    def _arranged(self) -> tuple[dict[str, Tensor], dict[str, Slot]]:
        """The tensors by their names, and the places of parts of values in them."""
        parts: dict[str, dict[str, tuple[str, Place]]] = {}
        for name, job in self.jobs.items():
            if self._needs_f32(job):
                job = self.jobs[name] = Job.decoding(job.value, "F32", f"{job.reason}, as F32")
            for part, (dtype, shape) in job.described[0].items():
                kind, place = self._place(job, part, dtype, shape)
                if kind not in NAMED:
                    raise UnsupportedError(
                        f"{printable(part)} is {kind}, which GGUF does not have. Give recipe='bf16' (--recipe), or "
                        "leave dialect='gguf' out.",
                        name=name,
                    )
                if place.name.endswith(".scale") and part not in self._originals and self._out.arch not in SCALED:
                    raise UnsupportedError(
                        f"{printable(name)}: llama.cpp multiplies by the scale of a tensor of NVFP4 in {', '.join(SCALED)}, "
                        f"and not in {self._out.arch!r}. Give 'nvfp4,two_level=false', without such a scale.",
                        name=name,
                    )
                parts.setdefault(place.name, {})[part] = (kind, place)
        tensors: dict[str, Tensor] = {}
        slots: dict[str, Slot] = {}
        for name, of in parts.items():
            tensors[name] = _joined(name, of)
            for part, (_, place) in of.items():
                one = Tensor(tensors[name].type, place.shape)
                slots[part] = Slot(name, (place.expert or 0) * one.nbytes, one, place.change)
        return tensors, slots

    def _needs_f32(self, job: Job) -> bool:
        """Is it a vector or a router that the source has in another dtype?"""
        place = self._namer.place(job.name, job.value.shape)
        is_half = job.way == "copy" and job.name not in self._originals and job.value.stored_as in CASTABLE
        return is_half and place is not None and place.needs_f32

    def _place(self, job: Job, part: str, dtype: str, shape: Shape) -> tuple[str, Place]:
        """The type and the place of a part of a value."""
        original = self._originals.get(part)
        if original is not None and job.way == "copy":
            one = original[1]
            expert = (one.start - one.info.start) // (one.stop - one.start) if one.stored != one.info.shape else None
            return one.info.type.name, Place(one.info.name, one.stored, expert)
        return dtype, self._namer.place(part, shape) or Place(part, shape)

    def _is_same(self, job: Job) -> bool:
        """Has a value of a GGUF file the type that it had?"""
        return job.way == "copy" or all(
            part in self._originals and self._originals[part][1].info.type.name == dtype
            for part, (dtype, _) in job.described[0].items()
        )

    def _ordered(self) -> None:
        """Put tensors into the order of the source's files, and new ones behind."""
        order = {name: n for n, name in enumerate(name for file in self._files for name in file.header.tensors)}
        self.tensors = dict(sorted(self.tensors.items(), key=lambda item: order.get(item[0], len(order))))


def _joined(name: str, parts: Mapping[str, tuple[str, Place]]) -> Tensor:
    """The tensor of one part, or of the experts of a stack. Raises UnsupportedError where they do not fit together."""
    kind, first = next(iter(parts.values()))
    if first.expert is None and len(parts) == 1:
        return Tensor(kind, first.shape)
    experts = sorted(place.expert if place.expert is not None else -1 for _, place in parts.values())
    if experts != list(range(len(experts))) or len({(kind, place.shape) for kind, place in parts.values()}) > 1:
        raise UnsupportedError(
            f"GGUF has the experts of a layer in one tensor {printable(name)}, of one type; {abbreviated(parts)} are not "
            "numbered from 0 on, or differ in type or shape. Give all of them one recipe.",
            name=name,
        )
    shape = first.shape if first.shape != (1,) else ()  # of a scale beside NVFP4
    return Tensor(kind, (len(experts), *shape))


# ------------------------------------------------------------------------------------------------ the file


class GGUFWriter:
    """Writes the tensors of a GGUF file in any order, each in consecutive pieces, to places known before.

    out: the library's writer, with all keys and tensors, which writes the header. kept: arrays of tensors that are no values.
    """

    def __init__(
        self, path: Path, out: Any, tensors: Mapping[str, Tensor], slots: Mapping[str, Slot], kept: Mapping[str, np.ndarray]
    ) -> None:
        self.path, self._out, self._tensors, self._slots, self._kept = path, out, tensors, slots, kept
        self._file: BinaryIO | None = None
        self._starts: dict[str, int] = {}
        self._digests: dict[tuple[int, int], str] = {}
        self.digests: dict[str, str] = {}
        self._hashing = Thread()

    @property
    def entries(self) -> Sequence[str]:
        return list(self._slots)

    @property
    def nbytes(self) -> int:
        """The size of the tensors."""
        return sum(self._padded(one.nbytes) for one in self._tensors.values())

    def _padded(self, count: int) -> int:
        return self._out.ggml_pad(count, self._out.data_alignment)

    def __enter__(self) -> Self:
        beside = self.path.with_name(f"{self.path.name}.header")
        self._out.write_header_to_file(beside)
        self._out.write_kv_data_to_file()
        self._out.write_ti_data_to_file()
        self._out.close()
        header = beside.read_bytes()
        beside.unlink()
        start = self._padded(len(header))
        for name, one in self._tensors.items():
            self._starts[name] = start
            start += self._padded(one.nbytes)
        self._file = opened_again(self.path, header, start)
        for name, array in self._kept.items():
            self._put(self._starts[name], [read(array)])
        return self

    def keep(self, digests: Mapping[str, str]) -> bool:
        """As `StagedWriter.keep`."""
        assert self._file is not None
        spans: dict[str, tuple[int, int]] = {}
        for name in digests:
            slot = self._slots[name]
            start = self._starts[slot.tensor] + slot.start
            spans[name] = start, start + slot.part.nbytes
        if any(not has_digest(self._file, start, stop - start, digests[name]) for name, (start, stop) in spans.items()):
            return False
        self.digests |= digests
        self._digests |= {span: digests[name] for name, span in spans.items()}
        return True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hashing.close()
        if self._file is not None:
            self._file.close()

    @contextmanager
    def stream(self, name: str) -> Generator[Callable[[np.ndarray], None]]:
        """Write a part of a value in consecutive pieces; one whose rows change places is collected before."""
        slot = self._slots[name]
        start = self._starts[slot.tensor] + slot.start
        if slot.change is None:
            with self._digested(start) as put:
                yield put
        else:
            pieces: list[np.ndarray] = []
            yield lambda piece: pieces.append(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
            self._put(start, [slot.changed(pieces)])
        self.digests[name] = self._digests[start, start + slot.part.nbytes]

    def _put(self, start: int, pieces: Sequence[np.ndarray]) -> None:
        with self._digested(start) as put:
            for piece in pieces:
                put(piece)

    @contextmanager
    def _digested(self, start: int) -> Generator[Callable[[np.ndarray], None]]:
        at, file = start, self._file
        assert file is not None
        digest = Digest(self._hashing)

        def put(piece: np.ndarray) -> None:
            nonlocal at
            raw = raw_bytes(piece)
            digest.update(raw)
            with naming(self.path):
                write_at(file, raw, at)
                at += raw.nbytes

        yield put
        with naming(self.path):
            file.flush()
        self._digests[start, at] = digest.text

    def check(self) -> None:
        """Raise CorruptFileError unless the file has the bytes that were written, and all of them."""
        missing = sum(one.nbytes for one in self._tensors.values()) - sum(stop - start for start, stop in self._digests)

        def item(start: int, stop: int) -> Item[int]:
            def changed(_: measuring.Rooms) -> int:
                with self.path.open("rb") as file:
                    return 0 if has_digest(file, start, stop - start, self._digests[start, stop]) else stop - start

            return changed

        if missing or sum(results([item(*span) for span in self._digests])):
            raise CorruptFileError(f"{shown(self.path)} reads back bytes other than those written; check the disk.")
