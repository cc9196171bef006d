"""Every tensor of GGUF files against the values that the library gguf decodes, and the bytes that breccia holds it in.

    python tests/dialects/check_gguf.py FILE.gguf ... [--out docs/gguf.json]    # of downloaded models

gguf and transformers are installed. Prints a line for each file; --out records the results. Exits with 1 where a value differs,
or quantized values take more bytes than in the file, as of TQ1_0. Rows of q and k are put into transformers' order by its own
code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

import breccia
from breccia.backend import components
from breccia.bridges import load_checkpoint
from breccia_bridges.gguf_file import GGUFFile


def check(path: Path) -> dict[str, Any]:
    """Compare a file; returns what was found."""
    theirs = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    file, checkpoint = GGUFFile(path), load_checkpoint(path)
    keys, architecture = file.header.keys, file.header.keys["general.architecture"]
    heads = {f"num_{what}": keys.get(f"{architecture}.attention.{key}") for what, key in _HEADS.items()}
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=heads)
    differ: list[str] = []
    ours = stored = 0
    for name, one in file.placed.items():
        tensor = theirs[one.info.name]
        wanted = dequantize(tensor.data, tensor.tensor_type).reshape(one.info.shape)
        if one.shape == one.info.shape:
            wanted = processor.process(wanted, tensor.name).weights
        else:  # an expert of a stack
            wanted = wanted[int(name.partition("experts.")[2].partition(".")[0])]
        found = checkpoint[name]
        if isinstance(found, breccia.ScaledTensor):
            ours += sum(part.nbytes for part in components(found).values())
            stored += one.stop - one.start
            found = breccia.dequantize(found)
        if not np.array_equal(np.asarray(found, np.float32), wanted):
            differ.append(name)
    print(f"{path.name}: {len(file.placed)} values, {len(differ)} differ {differ[:3]}; {stored:,} bytes there, {ours:,} here")
    with path.open("rb") as raw:
        digest = hashlib.file_digest(raw, "sha256").hexdigest()
    types = Counter(one.info.type.name for one in file.placed.values())
    said = {"file": path.name, "sha256": digest, "architecture": architecture, "types": dict(sorted(types.items()))}
    return said | {"values": len(file.placed), "differ": differ, "bytes_in_file": stored, "bytes_held": ours}


_HEADS = {"attention_heads": "head_count", "key_value_heads": "head_count_kv"}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    results = [check(file) for file in given.files]
    if given.out:
        libraries = ("breccia-bridges", "gguf", "transformers", "numpy")
        record = {"versions": {name: version(name) for name in libraries}, "files": results}
        given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(any(one["differ"] or one["bytes_held"] > one["bytes_in_file"] for one in results))


if __name__ == "__main__":
    sys.exit(main())
