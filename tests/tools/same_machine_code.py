"""Compare the machine code of all FP8 variants between two revisions of the repository. It needs NVRTC, and no GPU.

    python tests/tools/same_machine_code.py REV [OTHER]

OTHER defaults to the working tree. Each revision is compiled from its own sources by its own breccia_triton and its own copy of
this program, in a separate process. Where the machine code is the same, measurements of one revision hold for the other.

Exit code: 0 where all variants that both have are identical, otherwise 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = ("breccia-core", "breccia-torch", "breccia-triton")
TOOLS = "tests/tools"
ARCHITECTURE = "sm_90a"


def sections(cubin: bytes) -> dict[str, bytes]:
    """The sections of a cubin, a 64-bit ELF file, by name."""
    (start,), (size, count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + n * size) for n in range(count)]
    texts = headers[names][4]

    def name(at: int) -> str:
        return cubin[texts + at : cubin.index(b"\0", texts + at)].decode()

    nobits = 8  # sections without bytes in the file
    return {name(h[0]): b"" if h[1] == nobits else cubin[h[4] : h[4] + h[5]] for h in headers}


def registers(info: bytes) -> list[int]:
    """Registers per thread of each function, from section .nv.info: a list of (format, attribute, size or value)."""
    found: list[int] = []
    at, sized, count = 0, 4, 0x2F
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == sized:
            if attribute == count:
                found.append(struct.unpack_from("<II", info, at)[1])
            at += size
    return found


def machine_code(cubin: bytes) -> str:
    """A digest of instructions, registers, parameters and constants.

    Other sections have names and numbers of symbols, which change with each named constant of the source. So do the addresses
    of the module's variables in bank 4.
    """
    digest = hashlib.sha256()
    found = sections(cubin)
    digest.update(repr(registers(found[".nv.info"])).encode())
    for name, content in sorted(found.items()):
        if name.startswith((".text.", ".nv.constant", ".nv.shared")) and name != ".nv.constant4":
            digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def digests() -> dict[str, str]:
    """A digest of each variant's machine code, by its title, from the breccia_triton that this process imports."""
    from fp8_variants import fp8_variants, title

    from breccia_triton.gemm.fp8 import matmul as fp8_matmul
    from breccia_triton.launch import compiler

    nvrtc = compiler.nvrtc()

    def compiled(variant: object) -> tuple[str, str]:
        source = fp8_matmul.source_of(variant.tile.columns, variant.codecs)  # type: ignore[attr-defined]
        made = compiler.cubin(source, ARCHITECTURE, variant.macros, nvrtc)  # type: ignore[attr-defined]
        return title(variant), machine_code(made)  # type: ignore[arg-type]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(pool.map(compiled, fp8_variants()))


def of_revision(revision: str | None) -> dict[str, str]:
    """`digests` of a revision, or of the working tree for None."""
    with tempfile.TemporaryDirectory() as folder:
        if revision is not None:
            archive = ["git", "archive", revision, TOOLS, *(f"{name}/src" for name in DISTRIBUTIONS)]
            packed = subprocess.run(archive, cwd=ROOT, stdout=subprocess.PIPE, check=True)
            subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
        root = ROOT if revision is None else Path(folder)
        path = os.pathsep.join(str(root / name / "src") for name in DISTRIBUTIONS)
        # Installed plug-ins are of another revision, and breccia may warn about them.
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, str(root / TOOLS / Path(__file__).name), "--digests"]
        return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def compared(first: dict[str, str], second: dict[str, str]) -> tuple[int, list[str]]:
    """(number of identical variants, a line about each of the others)."""
    both = [name for name in first if name in second]
    said = [f"differs: {name}" for name in both if first[name] != second[name]]
    said += [f"only in the first: {name}" for name in first if name not in second]
    said += [f"only in the second: {name}" for name in second if name not in first]
    return sum(first[name] == second[name] for name in both), said


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("revision", nargs="?")
    arguments.add_argument("other", nargs="?")
    arguments.add_argument("--digests", action="store_true", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.digests:
        print(json.dumps(digests()))
        return 0
    if given.revision is None:
        arguments.error("name a revision, such as main or a commit")
    first, second = of_revision(given.revision), of_revision(given.other)
    identical, said = compared(first, second)
    for line in said:
        print(line)
    print(f"{identical} of {len(first.keys() & second.keys())} FP8 variants have identical machine code")
    return int(any(line.startswith("differs") for line in said))


if __name__ == "__main__":
    sys.exit(main())
