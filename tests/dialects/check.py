"""What breccia reads of checkpoints that other libraries wrote, against the values that their own code decodes.

    python tests/dialects/check.py DATA [--only GLOB]       # a folder that make.py wrote; `make dialects` does it

Prints a line for each checkpoint: exact (bit for bit in FP32; after rounding to BF16 where the library computes in BF16), codes
exact, refused with the message, or WRONG. Exits with 1 where that is not what the tables say: `EXPECTED` of
tests/bridges/dialects/test_golden.py, and `OTHERS` for the files that have no golden ones.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.torch import load_file

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "tools"), str(TESTS / "bridges" / "dialects")]
from dialect_values import digest, to_bf16  # noqa: E402
from golden_dialects import EXACT, EXPECTED, REFUSED, read  # noqa: E402
from test_golden import outcome  # noqa: E402

import breccia  # noqa: E402
from breccia_bridges.checkpoint import checkpoint_files, opened  # noqa: E402

DECODED = "decoded"  # plain tensors of the values that the library decodes, bit for bit
_GGUF = "iq2_xxs iq3_s iq4_nl iq4_xs mxfp4 nvfp4 q2_k q3_k q4_0 q4_1 q4_k q5_0 q5_1 q5_k q6_k q8_0 tq1_0 tq2_0"
#: Files that are not in safetensors.
OTHERS = {
    **{f"gguf_{kind}": DECODED if kind in ("iq2_xxs", "iq3_s") else EXACT for kind in _GGUF.split()},
    "torchao_float8_row_bin": EXACT,
}


def checked(data: Path, name: str) -> tuple[str, str]:
    """(the outcome of a checkpoint, what else there is to say)."""
    folder = data / name
    if not folder.is_dir():
        return "NOT MADE", f"run make.py {data} --only {name}"
    try:
        return compared(folder, data / "expected" / f"{name}.safetensors")
    except breccia.BrecciaError as e:
        return "refused", f"{type(e).__name__}: {e}"
    except Exception:
        return "WRONG", traceback.format_exc()


def compared(folder: Path, expected: Path) -> tuple[str, str]:
    """The same, of a checkpoint that breccia reads. expected: the file of its values."""
    with safe_open(str(expected), "pt") as file:
        record: dict[str, Any] = json.loads(file.metadata()["record"])
    theirs = {name: tensor.float().numpy() for name, tensor in load_file(expected).items()}
    values = read(folder)
    dense = {name: file.read(name) for file in map(opened, checkpoint_files(folder)) for name in file.decoded}
    outcomes: set[str] = {DECODED for name in dense if digest(dense[name]) == record["values"][name]["sha256"]}
    faults = [f"{name} is no value" for name in theirs if name not in values and name not in dense]
    faults += [
        f"{name}: {difference(dense[name], theirs[name])}" for name in dense if not np.array_equal(dense[name], theirs[name])
    ]
    faults += [f"{name} is a value, but not of the library" for name in values if name not in theirs]
    for name, stored in values.items():
        if name not in theirs:
            continue
        outcomes.add(one := outcome(stored, record["dtype"], record["values"][name]["sha256"]))
        if one == "wrong":
            ours = np.asarray(breccia.dequantize(stored.tensor()), np.float32)
            faults.append(f"{name}: {difference(to_bf16(ours) if record['dtype'] == 'bfloat16' else ours, theirs[name])}")
    recipes = " ".join(sorted({str(stored.form.recipe.spec) for stored in values.values()}))
    return ("WRONG", "; ".join(faults)) if faults else (" and ".join(sorted(outcomes)), f"{len(values)} values, {recipes}")


def difference(ours: np.ndarray, theirs: np.ndarray) -> str:
    """What differs between two arrays."""
    if ours.shape != theirs.shape:
        return f"shape {ours.shape}, not {theirs.shape}"
    differ = (ours.view(np.uint32) != theirs.view(np.uint32)) & ~(np.isnan(ours) & np.isnan(theirs))
    return f"{differ.mean():.3%} differ, first {ours[differ][0]!r}, not {theirs[differ][0]!r}"


def main() -> int:
    """Exits with 1 if a checkpoint is not read as the tables say."""
    parser = argparse.ArgumentParser(description="Compare what breccia reads with the values of the libraries.")
    parser.add_argument("data", type=Path, help="a folder that make.py wrote")
    parser.add_argument("--only", default="*", help="names of dialects, as a glob")
    options = parser.parse_args()
    table = {name: words for name, words in {**EXPECTED, **OTHERS}.items() if fnmatch.fnmatch(name, options.only)}
    counts: Counter[str] = Counter()
    unexpected = 0
    for name, expected in sorted(table.items()):
        one, said = checked(options.data, name)
        is_expected = one == expected or (
            one == "refused" and expected.startswith(REFUSED) and expected[len(REFUSED) :] in said
        )
        unexpected += not is_expected
        counts[one] += 1
        print(f"{one:12} {name:28} {said}" + ("" if is_expected else f"   (EXPECTED: {expected})"))
    print(", ".join(f"{count} {one}" for one, count in counts.most_common()) + f"; {unexpected} not as expected")
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main())
