"""What the program prints: commands that are run in a folder with a small model in it, and what they said.

Each is run with the same environment and terminal width. Times differ from run to run and machine to machine; pages keep
the ones they have as long as nothing else changes.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import breccia
from breccia.dispatch.registry import registry
from breccia_bridges.safetensors_writer import Writer

ROOT = Path(__file__).resolve().parents[2]
MODEL = "model.safetensors"
#: Folders of quantized checkpoints: block FP8 as DeepSeek-V3 has it, and GPTQ.
DEEPSEEK, GPTQ = "ds", "gptq"
HIDDEN, MLP, WORDS, LAYERS = 256, 512, 1000, 2
#: The distribution of the tutorial, and broken ones.
THIRD_PARTY = ROOT / "tests" / "third_party"
ACME = ("acme-breccia",)
BROKEN = ("broken/misspelt-breccia", "broken/raises-breccia")
#: One in so many columns of the last matrix of a layer is larger than its neighbours, as in trained models.
OUTLIERS = 24


@dataclass(frozen=True)
class Session:
    """Commands of one block, run one after another in the folder that the sessions before it left.

    status: what the first of them exits with. volatile: the output tells of the machine. Of it, lines without digits, such as
        headings, are compared whole, others by their first column, and indented lines not at all.
    """

    name: str
    commands: tuple[str, ...]
    status: int = 0
    volatile: bool = False
    beside: tuple[str, ...] = ()


def sessions() -> list[Session]:
    """All sessions, in the order they are run in."""
    nvfp4, int4 = "model-nvfp4.safetensors", "model-int4.safetensors"
    helps = [Session(f"help-{name}", (f"breccia {name} --help",)) for name in registry().commands]
    return [
        Session("help", ("breccia --help",)),
        *helps,
        Session("help-plugin-new", ("breccia plugin new --help",)),
        Session("inspect", (f"breccia inspect {MODEL}",)),
        Session("dry-run", (f"breccia convert {MODEL} {nvfp4} --recipe nvfp4 --include '*embed*' --dry-run",)),
        Session("convert", (f"breccia convert {MODEL} {nvfp4} --recipe nvfp4",)),
        Session("inspect-converted", (f"breccia inspect {nvfp4}",)),
        Session("scales", (f"breccia inspect {nvfp4} --scales",)),
        Session("deepseek", (f"breccia convert {DEEPSEEK} ds-nvfp4 --recipe nvfp4",)),
        Session("gptq", (f"breccia convert {GPTQ} out --recipe none",)),
        Session("report", (f"breccia convert {MODEL} {int4} --recipe int4 --report report.html",)),
        Session("target-bits", (f"breccia convert {MODEL} model-mixed.safetensors --target-bits 4.5",)),
        Session("why", (f"breccia why {MODEL} {int4} --top 3 --remedies 1",)),
        Session("compare", (f"breccia compare {MODEL} {nvfp4}",)),
        Session("compare-several", (f"breccia compare {MODEL} {nvfp4} {int4}",)),
        Session("compare-worst", (f"breccia compare {MODEL} {int4} --sort sqnr --top 3",)),
        Session("gate", (f"breccia compare {MODEL} {int4} --fail-under 18", "echo $?"), status=1),
        Session("explain", ("breccia explain cast nvfp4 --on torch",)),
        Session("explain-matmul", ("breccia explain matmul fp8_block fp8_block",)),
        Session("recipes", ("breccia recipes",)),
        Session("recipes-nvfp4", ("breccia recipes nvfp4",)),
        Session("rosetta", ("breccia rosetta mxfp4 mxfp8 fp8_block,block_k=32 nvfp4 int4",)),
        Session("json", ("breccia explain dequantize nvfp4 --json",)),
        Session("plugins", ("breccia plugins",)),
        Session("acme-plugins", ("breccia plugins",), beside=ACME),
        Session("acme-explain", ("breccia explain cast acme6 --on torch",), beside=ACME),
        Session("acme-conformance", ("pytest -q -k 'not jax'",), volatile=True, beside=ACME),
        Session("acme-broken", ("breccia plugins",), beside=(*ACME, *BROKEN)),
        Session("doctor", ("breccia doctor",), volatile=True),
        Session("bench", ("breccia bench nvfp4 mxfp8 --size 512 --runs 3",), volatile=True),
        Session("bench-matmul", ("breccia bench matmul int4 mxfp8 --size 1024 --rows 1,16 --runs 3",), volatile=True),
        Session("plugin-new", ("breccia plugin new mine",)),
        Session("error", (f"breccia convert {MODEL} out.safetensors --recipe nvpf4", "echo $?"), status=1),
        Session("error-json", (f"breccia convert {MODEL} out.safetensors --recipe nvpf4 --json",), status=1),
    ]


def model() -> dict[str, np.ndarray]:
    """A transformer's weights in miniature, FP16, the same on every machine; rows differ in size, as trained ones do."""
    draw = np.random.default_rng(0)

    def weight(rows: int, columns: int) -> np.ndarray:
        bell = draw.integers(-128, 128, (8, rows, columns)).sum(axis=0)
        return (bell * 2.0 ** (draw.integers(-2, 2, (rows, 1)) - 14)).astype(np.float16)

    shapes = {f"attn.{x}": (HIDDEN, HIDDEN) for x in "qkvo"}
    shapes |= {"mlp.gate": (MLP, HIDDEN), "mlp.up": (MLP, HIDDEN), "mlp.down": (HIDDEN, MLP)}
    tensors = {"embed_tokens.weight": weight(WORDS, HIDDEN), "lm_head.weight": weight(WORDS, HIDDEN)}
    for layer in (f"layers.{n}" for n in range(LAYERS)):
        tensors |= {f"{layer}.{name}.weight": weight(*shape) for name, shape in shapes.items()}
        tensors[f"{layer}.mlp.down.weight"][:, ::OUTLIERS] *= 8
        tensors |= {f"{layer}.norm_{part}.weight": np.ones(HIDDEN, np.float16) for part in ("attn", "mlp")}
    return tensors | {"norm.weight": np.ones(HIDDEN, np.float16)}


def quantized_model(folder: Path, config: dict[str, object], tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """A checkpoint folder of another library. tensors: dtype in the file and array, by name."""
    folder.mkdir()
    with Writer(folder / MODEL, {name: (dtype, array.shape) for name, (dtype, array) in tensors.items()}) as file:
        for name, (_, array) in tensors.items():
            file.write(name, array)
    said = {"model_type": "miniature", "dtype": "float16", "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(said), encoding="utf-8")


def deepseek() -> dict[str, tuple[str, np.ndarray]]:
    """The matrices of the model's layers in tiles of 128x128, the rest as it is; `attn.q` is named `attn.q_proj`."""
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for name, array in model().items():
        name = re.sub(r"(attn|mlp)\.(\w+)\.", r"\1.\2_proj.", name)
        if "_proj" not in name:
            tensors[name] = ("F16", array)
            continue
        tile = breccia.cast(array, breccia.Float8BlockScaling(block_m=128))
        data, scale = breccia.bridges.to_deepseek_v3(tile)
        tensors |= {name: ("F8_E4M3", data), f"{name}_scale_inv": ("F32", scale)}
    return tensors


def gptq() -> dict[str, tuple[str, np.ndarray]]:
    """One layer of GPTQ, all zeros: its names and dtypes are what matters."""
    group = HIDDEN // 128
    return {
        "layers.0.mlp.up.qweight": ("I32", np.zeros((HIDDEN // 8, MLP), np.int32)),
        "layers.0.mlp.up.qzeros": ("I32", np.zeros((group, MLP // 8), np.int32)),
        "layers.0.mlp.up.scales": ("F16", np.zeros((group, MLP), np.float16)),
        "layers.0.mlp.up.g_idx": ("I32", np.arange(HIDDEN, dtype=np.int32) // 128),
        "norm.weight": ("F16", np.ones(HIDDEN, np.float16)),
    }


def recorded(wanted: list[Session]) -> Iterator[tuple[str, str]]:
    """(name, block) of each session. Exits where a command ends otherwise than it should."""
    with tempfile.TemporaryDirectory(prefix="breccia-") as made:
        folder = str(Path(made).resolve())  # as programs name it: on macOS the temporary folder is a link
        breccia.bridges.save_safetensors(model(), Path(folder, MODEL))
        blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        quantized_model(Path(folder, DEEPSEEK), blocks, deepseek())
        quantized_model(Path(folder, GPTQ), {"quant_method": "gptq", "bits": 4, "group_size": 128}, gptq())
        shutil.copy(THIRD_PARTY / ACME[0] / "tests" / "test_conformance.py", folder)
        for session in wanted:
            path = [installed(name, Path(made, "site", name)) for name in session.beside]
            lines: list[str] = []
            status = 0
            for place, command in enumerate(session.commands):
                done = run(command, status, folder, path)
                status = done.returncode
                if status != (0 if place else session.status):
                    sys.exit(
                        f"generate: session {session.name!r}: `{command}` exited with {status}, and not with "
                        f"{0 if place else session.status}:\n{done.stdout}"
                    )
                lines += [f"$ {command}", plain(done.stdout, folder)]
            yield f"session-{session.name}", "```console\n" + "\n".join(lines) + "\n```\n"


def installed(name: str, site: Path) -> str:
    """A folder that holds a distribution of tests/third_party as pip would install it."""
    source = THIRD_PARTY / name
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    if not info.is_dir():
        shutil.copytree(source / "src", site)
        info.mkdir()
        points = "".join(f"{key} = {value}\n" for key, value in project["entry-points"]["breccia"].items())
        (info / "entry_points.txt").write_text(f"[breccia]\n{points}", encoding="utf-8")
        about = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        (info / "METADATA").write_text(about, encoding="utf-8")
    return str(site)


def run(command: str, status: int, folder: str, path: list[str]) -> subprocess.CompletedProcess[str]:
    """The command, as typed after one that exited with `status`; errors among the output, as on a terminal."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environ = {"PATH": programs, "HOME": folder, "COLUMNS": "100", "LINES": "50", "TERM": "dumb", "NO_COLOR": "1"}
    environ |= {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8", "PYTHONPATH": os.pathsep.join(path)}
    return subprocess.run(
        ["/bin/sh", "-c", f"(exit {status}); {command}"], cwd=folder, env=environ,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8",
    )  # fmt: skip


def plain(output: str, folder: str) -> str:
    """The output without what only this machine knows: where the repository, the environment and the folder are."""
    system = f"{platform.system()}-{platform.machine()}"
    sites = {f"{folder}/site/{name}/": "" for name in (*ACME, *BROKEN)}
    known = sites | {
        f"{ROOT}/": "",
        f"{folder}/": "",
        sys.prefix: ".venv",
        sys.base_prefix: "python",
        platform.platform(): system,
    }
    for found, name in known.items():
        output = output.replace(found, name)
    return "\n".join(line.rstrip() for line in output.splitlines()).strip("\n")


def comparable(session: Session, block: str) -> str:
    """What of a block must be the same whenever and wherever the session is run."""
    if session.volatile:
        rows = [line.strip() for line in block.strip().splitlines() if not line.startswith("  ")]
        return "\n".join(
            re.sub(r"[\d.]+", "#", row.partition("  ")[0]) if re.search(r"\d", row) else " ".join(row.split()) for row in rows
        )
    return re.sub(r"\b\d+(\.\d+)?(?= (s|ms|µs|ns)\b)", "#", block.strip())
