"""Damaged checkpoints through everything that reads files: `make fuzz`. Each number is a case, so a run goes on where it ended.

A case is a valid file or folder with a few changes that know the format: to the header's JSON, to the configs in its metadata,
to an index and a config.json, to numbers of a GGUF header, and to bytes. It must load, or be refused by an error with a type
of breccia or of the system, within `SECONDS` of processor time and `MEMORY` bytes. What opens is also compared and converted;
dry runs and runs must agree.
`tests/corpus` keeps cases that failed once, and one of each kind; `make test` reads them again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf_models import llama
from golden_dialects import EXPECTED, unpacked
from paths import GOLDEN

import breccia
from breccia.bridges import compare, convert, load_checkpoint, load_safetensors, save_safetensors
from breccia_bridges.inspection import inspected

#: The files of a case by name; of a folder, or one file `m.safetensors`.
Files = dict[str, bytes]

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
SECONDS, MEMORY = 1.0, 300_000_000
FILE, INDEX, CONFIG = "m.safetensors", "model.safetensors.index.json", "config.json"
#: The part of cases that other libraries quantized.
FOREIGN = 0.5
#: Of so many cases one that opens is also compared and converted: 5 * 10^4 in 10^6, as a sixth of them open.
RARELY = 3


class Slow(BaseException):
    """A case took more than `SECONDS`."""


# ------------------------------------------------------------------------------------------------ valid checkpoints


@cache
def seeds() -> list[Files]:
    """Valid checkpoints, small ones, of every recipe and every kind of file."""
    rng = np.random.default_rng(0)
    x, bias = rng.standard_normal((4, 64)).astype(np.float32), np.ones(4, np.float32)
    scaled = {name: breccia.cast(x, name) for name in breccia.backend.registry().recipes if _has_defaults(name)}
    files: list[dict[str, Any]] = [{"l.weight": st, "l.bias": bias} for st in scaled.values()]
    files += [scaled, {"l.weight": x, "embed.weight": x.astype(np.float16), "ids": np.arange(3)}, {}]
    files += [{"e.weight": breccia.cast(np.stack([x, x]), "nvfp4"), "k.weight": breccia.cast(x.T.copy(), "mxfp8", axis=-2)}]
    found = [{FILE: saved(tensors)} for tensors in files]
    two = [saved({"a.weight": x, "a.bias": bias}), saved({"b.weight": x})]
    names = {"a.weight": "1.safetensors", "a.bias": "1.safetensors", "b.weight": "2.safetensors"}
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": names}).encode()
    folder = {"1.safetensors": two[0], "2.safetensors": two[1]}
    config = json.dumps({"model_type": "llama", "dtype": "bfloat16", "text_config": {"hidden": 4}}).encode()
    found += [folder, folder | {INDEX: index, CONFIG: config, "notes.txt": b"notes"}]
    codes, scales = breccia.cast(x, "fp8_block").data.view(np.uint8), np.ones((1, 1), np.float32)
    entries = {"w": ("F8_E4M3", codes), "w_scale_inv": ("F32", scales), "v": ("F32", x)}
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    found += [{FILE: laid_out(entries), CONFIG: json.dumps(quantized).encode()}, {FILE: laid_out(entries)}]
    old = {"recipe": scaled["mxfp8"].recipe.to_dict(), "layout": scaled["mxfp8"].layout.to_dict()}
    parts = {"w.data": ("U8", scaled["mxfp8"].data.view(np.uint8)), "w.scale": ("U8", scaled["mxfp8"].scale.view(np.uint8))}
    found += [{FILE: laid_out(parts, {"w.config": json.dumps(old)})}]
    return found


@cache
def foreign_seeds() -> list[Files]:
    """Valid checkpoints that other libraries quantized: the golden ones, and those of GGUF several times."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [unpacked(name, Path(folder))[0] for name in EXPECTED]
        found = [{file.name: file.read_bytes() for file in path.iterdir() if file.is_file()} for path in paths]
    # With these, convert has nothing to ask transformers for.
    beside = {CONFIG: json.dumps({"model_type": "llama", "dtype": "float32"}).encode(), "tokenizer.json": b"{}"}
    golden = {path.name: path.read_bytes() for path in (GOLDEN / "gguf").glob("*.gguf")}
    parts = {name: data for name, data in golden.items() if name.startswith("llama")}
    with tempfile.TemporaryDirectory() as folder:
        whole = {"m.gguf": llama(Path(folder), "m.gguf").read_bytes()}
    return found + 4 * [{**parts, **beside}, {"types.gguf": golden["types.gguf"], **beside}, {**whole, **beside}]


def _has_defaults(name: str) -> bool:
    return not breccia.backend.registry().recipes[name].needed_fields()


def saved(tensors: dict[str, Any]) -> bytes:
    """A file of breccia's writer."""
    with tempfile.TemporaryDirectory() as folder:
        save_safetensors(tensors, Path(folder, FILE))
        return Path(folder, FILE).read_bytes()


def laid_out(entries: dict[str, tuple[str, np.ndarray]], metadata: dict[str, str] | None = None) -> bytes:
    """A file of tensors of any dtype, with the dtypes named."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, (dtype, array) in entries.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    return joined(header, data)


def joined(header: Any, data: bytes, pad: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8", "surrogatepass")
    text += b" " * pad
    return struct.pack("<Q", len(text)) + text + data


def parted(file: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", file[:8])
    return json.loads(file[8 : 8 + length]), file[8 + length :]


# ------------------------------------------------------------------------------------------------ changes

NUMBERS = (0, 1, -1, 2, 3, 7, 63, 64, 65, 128, 255, 2**31, 2**32 + 1, 2**62, 2**63, 2**64, 10**30, 10**4000, 0.5, 1e308, -0.0)
OTHERS = (None, True, False, "", "x", [], {}, [1], [[]], {"a": 1}, float("nan"), float("inf"), "\x1b[31m", "\u202e", "a\nb")
#: Dtypes, and the bits of an element.
DTYPES = (("U8", 8), ("I8", 8), ("F32", 32), ("F16", 16), ("BF16", 16), ("F8_E4M3", 8), ("F64", 64))
TEXTS = ("F32", "U8", "F8_E4M3", "F4", "BF16", "I64", "C64", "BOOL", "F6_E2M3", "nvfp4", "mxfp8", "int4", "fp8_block", "E4M3")


def mutated(rng: random.Random, value: Any) -> Any:
    """`value` with one change somewhere in it."""
    kind = rng.random()
    if isinstance(value, dict) and value and kind < 0.8:
        key = rng.choice(list(value))
        if kind < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.2:
            new = rng.choice(
                (*value, key + rng.choice((".data", ".scale", ".config", "\x1b[2J", "\0", "\n")), "__metadata__", "")
            )
            return {new if k == key else k: v for k, v in value.items()}
        if kind < 0.25:
            return {**value, f"{key}{rng.choice(('.data', '.scale', '.zero_point', '2'))}": value[key]}
        return {**value, key: mutated(rng, value[key])}
    if isinstance(value, list) and value and kind < 0.85:
        at = rng.randrange(len(value))
        if kind < 0.1:
            return value[:at] + value[at + 1 :]
        if kind < 0.2:
            return value[:at] + [value[at]] * rng.choice((2, 3, 70)) + value[at + 1 :]
        return [*value[:at], mutated(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, str) and value.startswith("{") and kind < 0.9:  # a config in the metadata
        return _mutated_json(rng, value)
    if isinstance(value, int) and not isinstance(value, bool) and kind < 0.5:
        return value + rng.choice((1, -1, 8, -8, value))
    return rng.choice(rng.choice((NUMBERS, OTHERS, TEXTS)))


def _mutated_json(rng: random.Random, text: str) -> str:
    kind = rng.random()
    if kind < 0.03:
        return rng.choice("[{") * rng.choice((10, 2000, 100_000))
    if kind < 0.06:
        return text[: rng.randrange(len(text) + 1)]
    if kind < 0.09:  # a key twice
        return "{" + text[1:-1] + "," + text[1:]
    try:
        return json.dumps(mutated(rng, json.loads(text)))
    except (ValueError, RecursionError):
        return text + "}"


def _header(rng: random.Random, file: bytes) -> bytes:
    header, data = parted(file)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        header = mutated(rng, header)
    return joined(header, data, rng.choice((0, 0, 0, 1, 2, 3, 7)))


def _reshaped(rng: random.Random, file: bytes) -> bytes:
    """Other shapes, dtypes and places that agree with each other: what the header's checks let through."""
    header, data = parted(file)
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return file
    out, end = b"", 0
    renamed = rng.choice(names) if rng.random() < 0.3 else None
    new: dict[str, Any] = {k: v for k, v in header.items() if k == "__metadata__"}
    for name in names:
        entry = header[name]
        piece = data[slice(*entry["data_offsets"])]
        if rng.random() < 0.4:
            dtype, bits = rng.choice(DTYPES)
            shape = [rng.choice((0, 1, 2, 4, 16, 33, 64)) for _ in range(rng.choice((0, 1, 2, 2, 3, 4)))]
            count = int(np.prod(shape, dtype=np.int64)) * bits // 8
            piece = (piece * (count // max(1, len(piece)) + 1))[:count] if piece else bytes(count)
            entry = {"dtype": dtype, "shape": shape}
        suffix = rng.choice((".data", ".scale", "_scale", "_scale_inv", "\x1b", ".weight")) if name == renamed else ""
        new[name + suffix] = {**entry, "data_offsets": [end, end + len(piece)]}
        out, end = out + piece, end + len(piece)
    return joined(new, out, rng.choice((0, 0, 1, 5)))


def _configured(rng: random.Random, file: bytes) -> bytes:
    """Changes to the configs and the other keys of the metadata alone."""
    header, data = parted(file)
    metadata = header.get("__metadata__") or {}
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not metadata:
            metadata = {"w.config": "{}"}
        key = rng.choice([k for k in metadata if k.endswith(".config")] or list(metadata))
        if rng.random() < 0.1:
            other = rng.choice(list(metadata)).removesuffix(".config")
            metadata = {**metadata, key: json.dumps({"as": rng.choice((other, key, 3)), "axis": -1, "shape": [4, 64]})}
        else:
            changed = _mutated_json(rng, metadata[key]) if metadata[key].startswith("{") else mutated(rng, metadata[key])
            metadata = {**metadata, key: changed if isinstance(changed, str) else json.dumps(changed)}
        if rng.random() < 0.1:
            metadata = {**metadata, rng.choice(("schema", "breccia_scope")): rng.choice(("1", "2", "checkpoint", ""))}
    return joined({**header, "__metadata__": metadata}, data)


def _bytes(rng: random.Random, file: bytes) -> bytes:
    kind = rng.random()
    if kind < 0.25:
        return file[: rng.randrange(len(file) + 1)]
    if kind < 0.35:
        return file + bytes(rng.choice((1, 8, 64)))
    if kind < 0.45:
        return struct.pack("<Q", rng.choice((0, 1, 2, len(file), 10**8, 10**8 + 1, 2**63, 2**64 - 1))) + file[8:]
    out = bytearray(file)
    for _ in range(rng.choice((1, 2, 8, 64))):
        if out:
            out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out)


def _gguf(rng: random.Random, file: bytes) -> bytes:
    """Changes to the numbers and the length of a GGUF header, and to bytes."""
    kind = rng.random()
    if kind < 0.2:
        return _bytes(rng, file)
    out = bytearray(file)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(min(len(out), rng.choice((32, 400, 2000))) or 1)
        if kind < 0.3:  # a piece away, or twice
            size = rng.choice((1, 4, 8, 12, 24, 100))
            out[at : at + size] = rng.choice((b"", out[at : at + size] * 2))
        else:
            layout, bits = rng.choice((("<Q", 64), ("<I", 32), ("<H", 16), ("<B", 8)))
            near = len(file), *(n % 2**bits for n in NUMBERS if isinstance(n, int)), rng.randrange(50)
            out[at : at + bits // 8] = struct.pack(layout, rng.choice(near) % 2**bits)
    return bytes(out)


CHANGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (_header, _header, _reshaped, _configured, _configured, _bytes)


def case(number: int) -> Files:
    """The files of a case."""
    rng = random.Random(number)
    files = dict(rng.choice(foreign_seeds() if rng.random() < FOREIGN else seeds()))
    for _ in range(rng.choice((1, 1, 1, 2))):
        name = rng.choice(list(files))
        if name.endswith(".json"):
            files[name] = _mutated_json(rng, files[name].decode("utf-8", "replace") or "{}").encode("utf-8", "replace")
        elif name.endswith(".gguf"):
            files[name] = _gguf(rng, files[name])
        elif name.endswith(".safetensors"):
            try:
                files[name] = rng.choice(CHANGES)(rng, files[name])
            except (
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
                RecursionError,
                struct.error,
            ):  # the first change left no header to change
                files[name] = _bytes(rng, files[name])
        elif rng.random() < 0.5:
            del files[name]
    return files


# ------------------------------------------------------------------------------------------------ running


def written(files: Files, folder: Path) -> Path:
    """Write a case below `folder`; returns the checkpoint's path."""
    if set(files) == {FILE}:
        path = folder / FILE
        path.write_bytes(files[FILE])
        return path
    path = folder / "m"
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def check(path: Path, scratch: Path, number: int = 0, thorough: bool = True) -> Counter[str]:
    """Read a checkpoint in every way. Returns how often each was done; other errors than those allowed pass through."""
    done: Counter[str] = Counter()
    _allowed(lambda: load_safetensors(path))
    opens = _allowed(lambda: [*load_checkpoint(path).values()])
    _allowed(lambda: inspected(path, scales=number % 2 == 0))
    done["load and inspect"] += 1
    done["opened"] += opens
    if opens and thorough:
        _allowed(lambda: compare(path, path))
        recipe = ("mxfp8", "fp8_current", "none", "int4_bias", "bf16")[number % 5]
        out = scratch / ("out.safetensors" if path.is_file() else "out")
        dry, run = (_outcome(lambda dry=dry: convert(path, out, recipe, dry_run=dry)) for dry in (True, False))
        if dry != run:
            raise AssertionError(f"the dry run: {dry or 'works'}; the run: {run or 'works'}")
        if not run:
            load_safetensors(out)
            _allowed(lambda: compare(path, out))
        if left := [name for name in os.listdir(scratch) if name.startswith(".breccia")]:
            raise AssertionError(f"left behind: {left}")
        done["compare and convert"] += 1
    return done


def _allowed(call: Callable[[], Any]) -> bool:
    """Does the call work? Errors of breccia and of the system are fine, and are printable."""
    return not _outcome(call)


def _outcome(call: Callable[[], Any]) -> str:
    """The error of a call; empty if it works."""
    try:
        call()
    except (breccia.BrecciaError, OSError) as e:
        said = str(e)
        if not said.replace("\n", "").isprintable():
            raise AssertionError(f"not printable: {said!r}") from e
        return f"{type(e).__name__}: {said}"
    return ""


@contextmanager
def limited() -> Iterator[None]:
    """Raise Slow after `SECONDS` of this process's own time, and AssertionError where its memory grew by `MEMORY`."""

    def stop(number: int, frame: Any) -> None:
        raise Slow(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    if grown > MEMORY:
        raise AssertionError(f"{grown} bytes more memory")


def attempt(number: int, files: Files, thorough: bool) -> tuple[Counter[str], str]:
    """Run a case. Returns what was done, and the traceback of a fault."""
    scratch = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        path = written(files, scratch)
        with limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return check(path, scratch, number, thorough), ""
    except (Exception, Slow):
        return Counter({"faults": 1}), traceback.format_exc()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def keep(number: int) -> None:
    """Add a case to the corpus."""
    files = case(number)
    folder = CORPUS / str(number)
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def kept() -> dict[str, Files]:
    """The cases of the corpus, by name."""
    return {folder.name: {path.name: path.read_bytes() for path in folder.iterdir()} for folder in sorted(CORPUS.iterdir())}


def _numbered(number: int) -> tuple[int, Counter[str], str]:
    done, fault = attempt(number, case(number), thorough=number % RARELY == 0)
    return number, done, fault


def main() -> None:
    """Run cases from where the last run ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, default=Path(".fuzz"), help="folder of what was reached, and of faults")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--cases", type=int, default=1_000_000, help="stop at this number")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=int, nargs="+", default=[], help="write these cases to tests/corpus instead")
    given = parser.parse_args()
    for number in given.keep:
        keep(number)
    if given.keep:
        return
    given.state.mkdir(exist_ok=True)
    reached = given.state / "reached.json"
    state = json.loads(reached.read_text()) if reached.exists() else {"next": 0, "done": {}}
    done: Counter[str] = Counter(state["done"])
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the workers, which wait for each other otherwise
    started = saved_at = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(given.jobs, maxtasksperchild=20_000) as pool:
        for number, more, fault in pool.imap(_numbered, range(state["next"], given.cases), chunksize=50):
            done += more
            if fault:
                print(f"case {number}: {fault.splitlines()[-1][:300]}", flush=True)
                (given.state / f"{number}.txt").write_text(fault)
            now = time.monotonic()
            if now - saved_at > 10 or number + 1 == given.cases or now - started > given.seconds:
                reached.write_text(json.dumps({"next": number + 1, "done": done}))
                saved_at = now
            if now - started > given.seconds:
                break
        pool.terminate()
        reached_now = json.loads(reached.read_text())["next"]
    print(", ".join(f"{count:,} {what}" for what, count in done.items()), f"; next case {reached_now:,}")
    sys.exit(bool(done["faults"]))


if __name__ == "__main__":
    main()
