"""The checkpoints of make.py, read by breccia and written in the same dialect: tensors byte for byte.

    python tests/dialects/rewritten.py DATA [--only GLOB]

Prints a line for each checkpoint: the same bytes (what its own library wrote, so that it opens it), the same floats by the
library's own decoder (where dtypes of scales or equivalent codes differ), or why not. Tensors about the inputs of layers, which
`convert` leaves out, are named. Exits with 1 unless at least FEWEST are the same.
"""

from __future__ import annotations

import argparse
import fnmatch
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import make
import torch

import breccia
from breccia.bridges import convert
from breccia_bridges.checkpoint import all_opened, checkpoint_files
from breccia_bridges.safetensors_file import read
from breccia_bridges.source import Source

FEWEST = 40


def tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """(dtype, shape, bytes) of each tensor of the files, by name."""
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for file in all_opened(checkpoint_files(path)):
        for name, entry in file.entries.items():
            found[name] = str(entry.dtype), tuple(entry.shape), read(file.view(name)).tobytes()
    return found


def rewritten(folder: Path, out: Path) -> str:
    """What differs between a checkpoint and what breccia writes of it."""
    source = Source.open(folder)
    dialects = {value.stored.dialect.name for value in source.values.values() if value.stored is not None}
    if len(dialects) != 1:
        return f"it has values of {', '.join(sorted(dialects)) or 'no dialect'}"
    (dialect,) = dialects
    destination = out / "model.gguf" if dialect == "gguf" else out / folder.name
    convert(folder, destination, "none", dialect=dialect)
    before, after = tensors(folder), tensors(destination)
    left_out = sorted(before.keys() - after.keys())
    others = sorted(name for name in after if before.get(name) != after[name])
    beside = f"; left out: {', '.join(left_out)}" if left_out else ""
    if not others:
        return f"same bytes{beside}"
    decoded, wanted = make.decode(folder.name, out / folder.name), make.decode(folder.name, folder)
    equal = decoded.keys() == wanted.keys() and all(
        torch.equal(decoded[name].float().view(torch.int32), wanted[name].float().view(torch.int32)) for name in wanted
    )
    return f"{'same floats' if equal else 'OTHER FLOATS'}, other bytes in {', '.join(others[:3])}{beside}"


def main() -> int:
    """Exits with 1 if fewer than FEWEST are the same."""
    parser = argparse.ArgumentParser(description="Write checkpoints in the dialect in which they are read.")
    parser.add_argument("data", type=Path, help="a folder that make.py wrote")
    parser.add_argument("--only", default="*", help="names of checkpoints, as a glob")
    options = parser.parse_args()
    folders = [f for f in sorted(options.data.iterdir()) if f.is_dir() and fnmatch.fnmatch(f.name, options.only)]
    folders = [folder for folder in folders if folder.name in make.DIALECTS]
    same = 0
    for folder in folders:
        out = Path(tempfile.mkdtemp())
        try:
            said: Any = rewritten(folder, out)
        except breccia.BrecciaError as e:
            said = f"{type(e).__name__}: {e}"
        finally:
            shutil.rmtree(out)
        same += said.startswith("same")
        print(f"{folder.name:28} {said}", flush=True)
    print(f"{same} of {len(folders)} are the same")
    return int(same < min(FEWEST, len(folders)))


if __name__ == "__main__":
    sys.exit(main())
