"""FP8 and FP4 checkpoints that breccia writes, decoded by the libraries' own code, against `breccia.dequantize`: bit for bit.

    python tests/dialects/written_floats.py DATA [--only GLOB]

Converts small models to each dialect and recipe, DATA/<dialect>-<recipe>, and prints a line for each: the library, what of it
decodes, and whether all values are equal in FP32. Exits with 1 if one differs. In the environment of requirements.txt.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import importlib.metadata
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import make
import torch
from make import BF16, DEFAULT, F32, Tensors, config_of, load, stems
from written_record import record

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "tools")]
from golden_dialects import read  # noqa: E402

import breccia  # noqa: E402
from breccia.bridges import convert, load_safetensors, save_safetensors  # noqa: E402
from breccia_bridges.fused import fused  # noqa: E402


@dataclass(frozen=True)
class Case:
    """A checkpoint of a dialect. source: which of the models below. library, loader: what decodes it, and how.

    drops_signs: whether the library decodes the code of -0 as 0.
    """

    dialect: str
    recipe: str
    source: Callable[[Path], Path]
    library: str
    loader: str
    decode: Callable[[Path], Tensors]
    drops_signs: bool = False

    @property
    def name(self) -> str:
        return f"{self.dialect}-{self.source.__name__}-{self.recipe.replace(',', '-')}"


# --------------------------------------------------------------------------------------------------------------- models


@cache
def llama(data: Path) -> Path:
    """A Llama in BF16."""
    make._llama(DEFAULT).save_pretrained(data / "llama")
    return data / "llama"


@cache
def experts(data: Path) -> Path:
    """The same with a stack of matrices, which no class of transformers' loads."""
    tensors = load_safetensors(llama(data) / "model.safetensors")
    tensors[make.EXPERTS] = DEFAULT.weights()[make.EXPERTS].to(BF16)
    (data / "experts").mkdir(exist_ok=True)
    save_safetensors(tensors, data / "experts" / "model.safetensors", force=True)
    make.write_json(data / "experts" / "config.json", config_of(llama(data)))
    return data / "experts"


@cache
def gpt_oss(data: Path) -> Path:
    """A gpt-oss whose experts are quantized along the axis before the last, as no rule of `convert` does."""
    return _gpt_oss(data, "gpt_oss", "mxfp4")


@cache
def gpt_oss_nvfp4(data: Path) -> Path:
    """The same in NVFP4."""
    return _gpt_oss(data, "gpt_oss_nvfp4", "nvfp4,order=scales_first")


def _gpt_oss(data: Path, name: str, recipe: str) -> Path:
    transformers = importlib.import_module("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 64, "head_dim": 32, "vocab_size": 64, "num_hidden_layers": 1}
    torch.manual_seed(3)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **heads)).to(BF16)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.05)
    model.save_pretrained(data / name)
    path = data / name / "model.safetensors"
    tensors = load_safetensors(path)
    for key, tensor in tensors.items():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[key] = breccia.cast(tensor, recipe, axis=-2)
    save_safetensors(tensors, path, force=True)
    return data / name


# ------------------------------------------------------------------------------------------------------ what decodes them


def by_transformers(folder: Path) -> Tensors:
    """The weights of transformers' model: `from_pretrained` in FP32, which decodes where there is no GPU."""
    model, said = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(
        folder, dtype=F32, output_loading_info=True
    )
    assert not any(said.values()), said
    return model.state_dict()


def by_fbgemm(folder: Path) -> Tensors:
    """The modules that transformers makes for `fbgemm_fp8`, with the tensors of the file; they multiply on GPUs alone."""
    FbgemmFp8Linear = importlib.import_module("transformers.integrations.fbgemm_fp8").FbgemmFp8Linear
    t, _ = load(folder)
    out: Tensors = {}
    for stem in stems(t, ".weight_scale"):
        rows, columns = t[f"{stem}.weight"].shape
        linear = FbgemmFp8Linear(columns, rows, bias=False)
        linear.load_state_dict({end: t[f"{stem}.{end}"] for end in ("weight", "weight_scale")}, assign=True)
        out[f"{stem}.weight"] = linear.weight.float() * linear.weight_scale.expand(rows, 1)
    return out


def by_definition(folder: Path) -> Tensors:
    """Codes times scales, of libraries that run on GPUs alone."""
    t, _ = load(folder)
    return {f"{stem}.weight": t[f"{stem}.weight"].float() * t[f"{stem}.weight_scale"] for stem in stems(t, ".weight_scale")}


def by_quark(folder: Path) -> Tensors:
    """The weights that the modules of Quark multiply by, of transformers' model."""
    model, said = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(
        folder, dtype=F32, output_loading_info=True
    )
    assert not any(said.values()), said
    linears = {name: module for name, module in model.named_modules() if type(module).__name__ == "QParamsLinear"}
    return {f"{name}.weight": linear._get_qweight(linear.weight) for name, linear in linears.items()}


def by_modelopt(folder: Path) -> Tensors:
    """The tensors of the file, by the classes of ModelOpt that decode them."""
    t, _ = load(folder)
    algorithm = config_of(folder)["quantization_config"]["quant_algo"]
    out: Tensors = {}
    for stem in stems(t, ".weight_scale"):
        end = f"{stem}.weight"
        out[end] = _of_modelopt(algorithm, t[end], t[f"{end}_scale"], t.get(f"{end}_scale_2"))
    for name in stems(t, "_weight_scale"):  # fused experts: the transposes of matrices
        parts = zip(t[name].mT, t[f"{name}_weight_scale"].mT, t[f"{name}_weight_scale_2"], strict=True)
        out[name] = torch.stack([_of_modelopt(algorithm, w.contiguous(), s.contiguous(), s2) for w, s, s2 in parts]).mT
    return out


def _of_modelopt(algorithm: str, w: torch.Tensor, scale: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
    """A matrix, by the class of its `quant_algo`. second: the scale of scales."""
    qtensor = importlib.import_module("modelopt.torch.quantization.qtensor")
    twice, rows = torch.Size((w.shape[0], 2 * w.shape[1])), scale[:, None] if scale.ndim == 1 else scale
    match algorithm:
        case "W4A16_NVFP4":
            q = qtensor.NVFP4QTensor(twice, F32, w)
            return q.dequantize(dtype=F32, scale=scale, double_scale=second, block_sizes={-1: 16})
        case "MXFP8":
            return qtensor.MXFP8QTensor(w.shape, F32, w).dequantize(dtype=F32, scale=scale)
        case "mxfp4":
            return qtensor.MXFP4QTensor(twice, F32, w).dequantize(dtype=F32, scale=scale, block_sizes={-1: 32})
        case "W8A16":
            return qtensor.INT8QTensor(w.shape, F32, w).dequantize(dtype=F32, scale=rows)
        case "W4A16_AWQ":
            return _decoded_rows(w, scale)
        case "fp8_pb_wo":
            q = qtensor.FP8QTensor(w.shape, F32, w)
            return q.dequantize(dtype=F32, scale=scale[:, 0, :, 0], block_sizes={-2: 128, -1: 128})
        case _:
            return qtensor.FP8QTensor(w.shape, F32, w).dequantize(dtype=F32, scale=rows)


def _decoded_rows(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """4-bit integers of two rows to a byte. ModelOpt has no unpacker: its packer makes the same bytes of what this returns."""
    pack = importlib.import_module("modelopt.torch.export.quant_utils").pack_int4_in_uint8
    codes = torch.stack([w << 4, w], 1).reshape(-1, w.shape[1]).view(torch.int8) >> 4
    size = w.shape[1] // scale.shape[1]
    decoded = codes.float() * scale.repeat_interleave(size, 1)
    assert torch.equal(pack(decoded, scale, size), w)
    return decoded


# ---------------------------------------------------------------------------------------------------------------- cases

BLOCKS = "fp8_block,block_m=128"
POWERS = f"{BLOCKS},power_of_two_scale=true"
FROM_PRETRAINED = "transformers", "from_pretrained(dtype=float32)", by_transformers
QUARK = "amd-quark", "from_pretrained, QParamsLinear", by_quark
MODELOPT = "nvidia-modelopt", "qtensor.*.dequantize", by_modelopt
CASES = (
    Case("deepseek_v3", BLOCKS, llama, *FROM_PRETRAINED),
    Case("deepseek_v3", POWERS, llama, *FROM_PRETRAINED),
    Case("deepseek_v3", "mxfp8", llama, *FROM_PRETRAINED),
    Case("deepseek_v3", "mxfp8,fp8_format=E5M2", llama, *FROM_PRETRAINED),
    Case("deepseek_v3", "fp8_block", llama, *FROM_PRETRAINED),
    Case("deepseek_v3", "fp8_block,block_m=64,block_k=64", llama, *FROM_PRETRAINED),
    Case("deepseek_v3", "fp8_current", llama, *FROM_PRETRAINED),
    Case("deepseek_v3", f"{BLOCKS},fp8_format=E5M2", llama, *FROM_PRETRAINED),
    Case("deepseek_v3", f"{BLOCKS},fp8_format=E4M3FNUZ", llama, *FROM_PRETRAINED),
    Case("deepseek_v3", BLOCKS, experts, "transformers", "finegrained_fp8._dequantize_fp8_weight", make.decode_fp8),
    Case("deepseek_v3", POWERS, experts, "transformers", "finegrained_fp8._dequantize_fp8_weight", make.decode_fp8),
    Case("deepseek_v4", POWERS, llama, *FROM_PRETRAINED),
    Case("deepseek_v4", "mxfp4", llama, "transformers", "finegrained_fp8.Fp8Dequantize", make.decode_deepseek_v4),
    Case("fp8_scale", "fp8_row", llama, "transformers", "fbgemm_fp8.FbgemmFp8Linear", by_fbgemm),
    Case("fp8_scale", "fp8_current", llama, "none", "the definition", by_definition),
    Case("gpt_oss", "none", gpt_oss, *FROM_PRETRAINED),
    Case("modelopt", "nvfp4,order=scales_first", llama, *MODELOPT, drops_signs=True),
    Case("modelopt", "none", gpt_oss_nvfp4, *MODELOPT, drops_signs=True),
    Case("modelopt", "fp8_row", llama, *MODELOPT),
    Case("modelopt", "fp8_current", llama, *MODELOPT),
    Case("modelopt", BLOCKS, llama, *MODELOPT),
    Case("modelopt", "mxfp8", llama, *MODELOPT),
    Case("modelopt", "mxfp4", llama, *MODELOPT),
    Case("modelopt", "int4,scale_dtype=fp32", llama, *MODELOPT),
    Case("modelopt", "int8", llama, *MODELOPT),
    Case("quark", "mxfp4", llama, *QUARK),
    Case("quark", "fp8_row", llama, *QUARK),
    Case("quark", "fp8_current", llama, *QUARK),
    Case("quark", BLOCKS, llama, *QUARK),
    Case("quark", "fp8_row,fp8_format=E5M2", llama, *QUARK),
    Case("comfy_quant", "fp8_current", llama, "none", "the definition", by_definition),
    Case("comfy_quant", "fp8_current,fp8_format=E5M2", llama, "none", "the definition", by_definition),
)


# ------------------------------------------------------------------------------------------------------------- comparing


def checked(data: Path, case: Case) -> str:
    """What the library decodes of a checkpoint: "equal" and how much, or what differs."""
    source = case.source(data)
    folder = data / case.name
    convert(source, folder, case.recipe, dialect=case.dialect, force=True)
    ours, theirs = expected(source, folder, case), case.decode(folder)
    faults: list[str] = []
    for name, value in ours.items():
        other = theirs[name].float().contiguous()
        if other.shape != value.shape:
            faults.append(f"{name}: shape {tuple(other.shape)}, not {tuple(value.shape)}")
            continue
        if case.drops_signs:
            value = value + 0.0  # -0 + 0 is 0
        differ = value.view(torch.int32) != other.view(torch.int32)
        if differ.any():
            faults.append(f"{name}: {differ.float().mean():.3%} differ, first {other[differ][0]!r}, not {value[differ][0]!r}")
    assert ours
    but = " but for the signs of zeros" if case.drops_signs else ""
    return "; ".join(faults) or f"equal{but}, {len(ours)} values, {sum(value.numel() for value in ours.values())} numbers"


def expected(source: Path, folder: Path, case: Case) -> Tensors:
    """What breccia decodes of each value: of the cast of the source's weight, or of its codes there.

    Layers of one scale for the whole tensor, which several share, are what is read of the new file.
    """
    written = {name: stored.tensor() for name, stored in read(folder).items()}
    tensors = load_safetensors(source / "model.safetensors")
    together = {name for group in fused(written) for name in group}
    out: Tensors = {}
    for name, st in written.items():
        if case.recipe == "none":
            st = tensors[name]
        elif st.recipe.format.levels[0].block != breccia.backend.TENSOR or name not in together:
            st = breccia.cast(tensors[name], case.recipe)
        out[name] = torch.as_tensor(breccia.dequantize(st)).float().contiguous()
    return out


def main() -> int:
    """Exits with 1 if a checkpoint differs."""
    parser = argparse.ArgumentParser(description="Compare what the libraries decode of breccia's checkpoints with breccia.")
    parser.add_argument("data", type=Path, help="a folder for the checkpoints")
    parser.add_argument("--only", default="*", help="names of checkpoints, as a glob")
    options = parser.parse_args()
    options.data.mkdir(parents=True, exist_ok=True)
    faults = 0
    for case in (case for case in CASES if fnmatch.fnmatch(case.name, options.only)):
        try:
            said = checked(options.data, case)
        except Exception:
            said = traceback.format_exc()
        faults += not said.startswith("equal")
        recipe = case.recipe if case.source is llama else f"{case.recipe}, {case.source.__name__}"
        library = "" if case.library == "none" else case.library
        outcome = "not equal" if not said.startswith("equal") else said.partition(",")[0]
        record(case.dialect, recipe, library, case.loader, outcome)
        version = "" if case.library == "none" else importlib.metadata.version(case.library)
        print(f"{case.dialect:12} {case.recipe:46} {case.library} {version}, {case.loader}: {said}", flush=True)
    print(f"{faults} differ")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
