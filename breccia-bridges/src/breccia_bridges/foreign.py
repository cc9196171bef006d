"""Checkpoints that other programs quantized: which format they have, and how block FP8 is decoded.

`DIALECTS` declares each by its values of `quant_method` and by the names and dtypes of its tensors; `recognized` decides.
Names are those that transformers 5.23, compressed-tensors 0.20, torchao 0.18 and MLX 0.32 read and write.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np

from breccia import CorruptFileError, ScaledTensor, UnsupportedError
from breccia.backend import BF16, NUMPY, float_codec
from breccia.internal import abbreviated, parsed_json, printable, suggestion

from .checkpoint import is_there
from .configs import FLOATS
from .deepseek import TILE_M, from_deepseek_v3
from .safetensors_file import Container, Entry, Shape
from .text import spelled

CONFIG = "config.json"
#: The key of config.json under which transformers finds the quantization of a checkpoint.
QUANTIZATION = "quantization_config"

#: breccia's own `quant_method`; the tensors of such files have configs in the metadata.
OWN = "breccia"

#: FP8 dtypes of a file, by the name of their format.
_FP8 = {"F8_E4M3": "E4M3", "F8_E5M2": "E5M2"}
_CODES = (*_FP8, "I8", "U8")

_ORIGINAL = "Breccia does not decode this format: convert the checkpoint that it was made from, in BF16, FP16 or FP32."
_BY_HAND = f"{_ORIGINAL} The page Migration of the documentation shows how to wrap single tensors."
_DAMAGED = "Download the checkpoint again."
_PARTIAL = "Give the folder of all shards, or download the checkpoint again."


@dataclass(frozen=True)
class Dialect:
    """A dialect: a format in which a program quantizes checkpoints.

    methods: its values of `quant_method`.
    signs: alternatives by which tensors show it. Each maps suffixes of names with one stem to their dtypes, () for any.
    remedy: what the user can do with such a checkpoint.
    """

    name: str
    methods: tuple[str, ...]
    signs: tuple[Mapping[str, tuple[str, ...]], ...] = ()
    remedy: str = _ORIGINAL

    def example(self, tensors: Mapping[str, Entry]) -> dict[str, str]:
        """The dtypes, by name, of the first tensors that show this dialect; empty if none do."""
        for sign in self.signs:
            first = next(iter(sign))
            for name in tensors:
                if not name.endswith(first):
                    continue
                names = {name.removesuffix(first) + suffix: dtypes for suffix, dtypes in sign.items()}
                if all(n in tensors and (not dtypes or tensors[n].dtype in dtypes) for n, dtypes in names.items()):
                    return {n: tensors[n].dtype for n in names}
        return {}


#: The one dialect that `convert` and `compare` decode.
BLOCK_FP8 = Dialect(
    "block FP8, as DeepSeek-V3", ("fp8", "mxfp8"), ({"_scale_inv": (), "": tuple(_FP8)}, {"weight_scale_inv": ()})
)

#: Dialects, the most specific signs first.
DIALECTS = (
    BLOCK_FP8,
    Dialect("breccia", (OWN,)),
    Dialect("MXFP4, as GPT-OSS", ("mxfp4",), ({"_blocks": ("U8",), "_scales": ("U8",)},)),
    Dialect(
        "compressed-tensors",
        ("compressed-tensors",),
        (
            {"weight_packed": (), "weight_scale": ()},
            {"weight_packed": (), "weight_shape": ()},
            {"compressed": (), "bitmask": ()},
        ),
        _BY_HAND,
    ),
    Dialect("NVFP4 of ModelOpt", ("modelopt",), ({"weight_scale_2": (), "weight": ("U8",)},)),
    Dialect("FP8 with E8M0 scales, as DeepSeek-V4", ("fp8",), ({"scale": ("F8_E8M0",), "weight": _CODES},)),
    Dialect(
        "FP8 with a scale per tensor or row",
        ("fp8", "fbgemm_fp8", "modelopt"),
        ({"_scale": (), "": tuple(_FP8)}, {"scale_weight": (), "weight": tuple(_FP8)}),
    ),
    Dialect("GPTQ", ("gptq",), ({"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS, "g_idx": ("I32",)},), _BY_HAND),
    Dialect("AWQ", ("awq",), ({"qweight": ("I32", "I16"), "qzeros": (), "scales": FLOATS},), _BY_HAND),
    Dialect(
        "bitsandbytes",
        ("bitsandbytes",),
        (
            {"weight.absmax": (), "weight": ()},
            {"weight.quant_state.bitsandbytes__nf4": ()},
            {"weight.quant_state.bitsandbytes__fp4": ()},
            {"SCB": (), "weight": ("I8",)},
        ),
        _BY_HAND,
    ),
    Dialect("torchao", ("torchao",), ({"_weight_qdata": ()},), _BY_HAND),
    Dialect("HQQ or SINQ", ("hqq", "sinq"), ({"W_q": ("U8", "I8", "I16", "I32")},)),
    Dialect(
        "MLX",
        ("mlx", "metal"),
        ({"scales": (), "weight": ("U32",)},),
        "Wrap its arrays one by one with breccia.bridges.from_mlx, or convert the checkpoint that it was made from.",
    ),
    Dialect("EETQ", ("eetq",), ({"weight_scales": (), "weight": ("I8",)},)),
    Dialect("GPTQ or AWQ of AutoRound", ("auto-round",)),
    *(
        Dialect(method, (method,))
        for method in (
            "aqlm",
            "bitnet",
            "fouroversix",
            "fp_quant",
            "gemma",
            "gguf",
            "higgs",
            "nvfp4",
            "quanto",
            "quark",
            "spqr",
            "vptq",
        )
    ),
    Dialect(
        "codes with scales, of an unknown program",
        (),
        (
            {"_scale": (), "": _CODES},
            {"scale": (), "weight": _CODES},
            {"scales": (), "weight": _CODES},
            {"qweight": (), "scales": ()},
        ),
    ),
)


# ------------------------------------------------------------------------------------------------ what configs announce


@dataclass(frozen=True)
class Announced:
    """A quantization that a file beside the weights announces. where: the file, and the key in it."""

    where: str
    method: str
    settings: Mapping[str, Any]

    @property
    def dialects(self) -> list[Dialect]:
        return [dialect for dialect in DIALECTS if self.method in dialect.methods]


#: Files that only declare a quantization, of ModelOpt, GPTQ and AWQ, with the method where the file names none.
QUANTIZATION_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no such file. Raises CorruptFileError for anything else."""
    if not is_there(path):
        return None
    try:
        listed = parsed_json(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise CorruptFileError(f"{path} is not JSON ({e}). {_DAMAGED}", path=str(path)) from e
    if not isinstance(listed, dict):
        raise CorruptFileError(f"{path} is a JSON object; found {short(listed)}. {_DAMAGED}", path=str(path))
    return listed


def model_configs(config: dict[str, Any]) -> Generator[tuple[str, dict[str, Any]]]:
    """config.json itself, and the configs of a composite model's parts (`text_config`), each with what its keys start with."""
    yield "", config
    for key, part in config.items():
        if key.endswith("_config") and key not in (QUANTIZATION, "compression_config") and isinstance(part, dict):
            yield f"{key}.", part


def announcements(folder: Path) -> list[Announced]:
    """What the configs of a folder announce. Raises CorruptFileError for invalid and UnsupportedError for unknown ones."""
    announced: list[Announced] = []
    for key, config in model_configs(read_object(folder / CONFIG) or {}):
        prefix = printable(key)
        mlx = config.get("quantization")
        mlx = mlx if isinstance(mlx, dict) and "bits" in mlx else None
        if mlx is not None:
            announced.append(Announced(f"{folder / CONFIG}: {prefix}quantization", "mlx", mlx))
        both = [key for key in (QUANTIZATION, "compression_config") if config.get(key) is not None]
        if len(both) > 1:
            raise CorruptFileError(
                f"{folder / CONFIG} has both {prefix}{both[0]} and {prefix}{both[1]}; keep the one that describes the tensors.",
                path=str(folder / CONFIG),
            )
        for key in both:
            if config[key] != mlx:  # MLX writes its settings under both keys
                default = "" if key == QUANTIZATION else "compressed-tensors"
                announced.append(_announced(f"{folder / CONFIG}: {prefix}{key}", config[key], default))
    for file, default in QUANTIZATION_FILES.items():
        listed = read_object(folder / file)
        if listed is not None:
            announced.append(_announced(str(folder / file), listed, default))
    _check_agreement(announced)
    return announced


def _announced(where: str, settings: Any, default: str) -> Announced:
    if not isinstance(settings, dict):
        raise CorruptFileError(f"{where} is an object; found {short(settings)}. Fix it, or download it again.", where=where)
    if not default and (settings.get("load_in_8bit") or settings.get("load_in_4bit")):
        default = "bitsandbytes"
    method = settings.get("quant_method", default)
    known = sorted({method for dialect in DIALECTS for method in dialect.methods})
    if not method or not isinstance(method, str):
        wrong = f"has no quant_method; its keys are {abbreviated(settings, 8) or 'none'}. Known: {', '.join(known)}."
    elif method not in known:
        wrong = f"has quant_method {method!r}, which breccia does not know{suggestion(method, known)}"
    else:
        return Announced(where, method, settings)
    raise UnsupportedError(
        f"{where} {wrong} Convert the checkpoint that it was made from; if the weights are not quantized, remove {where}.",
        where=where,
        quant_method=method,
    )


def _check_agreement(announced: Sequence[Announced]) -> None:
    for one in announced[1:]:
        if not any(dialect in announced[0].dialects for dialect in one.dialects):
            raise CorruptFileError(
                f"two quantization configs disagree: {announced[0].where} is {announced[0].method!r}, and {one.where} is "
                f"{one.method!r}. Keep the one that describes the tensors.",
                declared=[announced[0].method, one.method],
            )


# ------------------------------------------------------------------------------------------------ the decision


def recognized(path: Path, containers: Sequence[Container]) -> BlockFP8 | None:
    """How to decode the quantized weights of a checkpoint; None for one that no other program quantized.

    Raises UnsupportedError for every format that breccia cannot decode, CorruptFileError where configs and tensors, or tensors
    and their scales, contradict each other. Reads headers and configs only.
    """
    announced = [one for one in announcements(path) if one.method != OWN] if path.is_dir() else []
    tensors = {name: entry for container in containers for name, entry in container.entries.items()}
    matches = {dialect.name: (dialect, example) for dialect in DIALECTS if (example := dialect.example(tensors))}
    if not announced and not matches:
        return None
    possible = [dialect for dialect in DIALECTS if all(one.method in dialect.methods for one in announced)] or announced[
        0
    ].dialects
    refused = [name for name in matches if name != BLOCK_FP8.name]
    coded = matches or any(entry.dtype in _FP8 for entry in tensors.values())
    if BLOCK_FP8 in possible and coded and not refused:
        return BlockFP8.of(path, containers, announced)
    agreeing = [matches[name] for name in refused if matches[name][0] in possible]
    seen_as = agreeing or [matches[name] for name in refused] or list(matches.values()) or [(possible[0], dict[str, str]())]
    look, example = seen_as[0]
    dialect = look if agreeing else possible[0]
    seen = [f"{one.where} is {one.method!r}" for one in announced]
    seen += [", ".join(f"{printable(name)} is {dtype}" for name, dtype in example.items())] if example else []
    remedy = f"codes and scales are not values. {dialect.remedy}"
    if not matches:
        remedy = f"but no tensor is quantized. Remove {' and '.join(one.where for one in announced)}, or download it again."
    looks = "" if look is dialect else f", and its tensors look like {look.name}"
    raise UnsupportedError(
        f"{path} is already quantized ({dialect.name}{looks}): {'; '.join(seen)}; {remedy}", path=str(path), format=dialect.name
    )


# ------------------------------------------------------------------------------------------------ block FP8


@dataclass(frozen=True)
class BlockFP8:
    """The block-scaled FP8 weights of a checkpoint.

    files: the file of each tensor; a scale may be in another file than its weight.
    scales: the name of each weight's scale.
    block: rows and columns of a block, partial at the edges.
    dtype: the dtype (of a file) of the model's other weights, to which weights that are not quantized again are decoded.
    """

    files: Mapping[str, Container]
    scales: Mapping[str, str]
    block: tuple[int, int]
    dtype: str

    @classmethod
    def of(cls, path: Path, containers: Sequence[Container], announced: Sequence[Announced]) -> BlockFP8:
        """Pair weights and scales. Raises CorruptFileError where one of the two is missing or does not fit the other."""
        files = {name: container for container in containers for name in container.entries}
        scales = {name.removesuffix("_scale_inv"): name for name in files if name.endswith("_scale_inv")}
        blocks = cls(files, scales, _block(announced), _dtype(path))
        for weight in dict.fromkeys((*scales, *(n for n, c in files.items() if c.entries[n].dtype in _FP8))):
            if wrong := blocks._wrong(weight):
                raise CorruptFileError(f"{path}: {wrong}", path=str(path), name=weight)
        return blocks

    def _wrong(self, weight: str) -> str:
        """What is wrong about a weight and its scale; empty if nothing is."""
        if weight not in self.files:
            return f"{self.scales[weight]!r} is a scale without a weight: no file has {weight!r}. {_PARTIAL}"
        code = self.files[weight].entries[weight]
        if weight not in self.scales:
            return f"{weight!r} is {code.dtype} without a scale: no file has {weight + '_scale_inv'!r}. {_PARTIAL}"
        scale = self.files[self.scales[weight]].entries[self.scales[weight]]
        if code.dtype not in _FP8:
            return f"{weight!r} has the scale {self.scales[weight]!r} but is {code.dtype}, not FP8 codes. {_DAMAGED}"
        if scale.dtype not in (*FLOATS, "F8_E8M0", "U8"):
            return f"{self.scales[weight]!r} is {scale.dtype}; scales are F32, BF16, F16, or E8M0 as F8_E8M0 or U8. {_DAMAGED}"
        if len(code.shape) < 2 or scale.shape != self._scale_shape(code.shape):
            wanted = spelled(self._scale_shape(code.shape)) if len(code.shape) > 1 else "none"
            return (
                f"{weight!r} of shape {spelled(code.shape)} needs a scale of shape {wanted}, one per {spelled(self.block)}; "
                f"{self.scales[weight]!r} has shape {spelled(scale.shape)}. Check weight_block_size in config.json, or "
                "download the checkpoint again."
            )
        return ""

    def _scale_shape(self, shape: Shape) -> Shape:
        rows, columns = self.block
        return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))

    def nbytes(self, weight: str) -> int:
        """Bytes of a weight and its scale."""
        return sum(self.files[name].entries[name].nbytes for name in (weight, self.scales[weight]))

    def tensor(self, weight: str) -> ScaledTensor:
        """A weight as a scaled tensor; its codes are a `Container.view`, its scales are widened to FP32, exactly."""
        code, scale = (self.files[name].entries[name] for name in (weight, self.scales[weight]))
        codes, stored = self.files[weight].view(weight), self.files[self.scales[weight]].read(self.scales[weight])
        if scale.dtype in ("F16", "BF16"):
            stored = BF16.read(NUMPY, stored) if scale.dtype == "BF16" else stored.astype(np.float32)
        rows, columns = self.block
        return from_deepseek_v3(codes, stored, block_k=columns, fp8_format=_FP8[code.dtype], block_m=rows)


def _block(announced: Sequence[Announced]) -> tuple[int, int]:
    """The block of `weight_block_size`; 128 x 128 without a config, as transformers assumes."""
    for one in announced:
        size = one.settings.get("weight_block_size", [TILE_M, TILE_M])
        if size is None:
            raise UnsupportedError(
                f"{one.where} has weight_block_size null, which means FP8 with one scale per tensor. {_ORIGINAL}",
                where=one.where,
            )
        if not isinstance(size, list) or len(size) != 2 or any(type(n) is not int or n < 1 for n in size):
            raise CorruptFileError(f"{one.where}: weight_block_size is two integers >= 1; found {short(size)}. {_DAMAGED}")
        return size[0], size[1]
    return TILE_M, TILE_M


def _dtype(path: Path) -> str:
    """The model's dtype by config.json (`dtype`, before transformers 5 `torch_dtype`), BF16 by default."""
    config = read_object(path / CONFIG) if path.is_dir() else None
    for _, part in model_configs(config or {}):
        for key in ("dtype", "torch_dtype"):
            if isinstance(name := part.get(key), str) and (codec := float_codec(name)) is not None:
                return codec.name
    return BF16.name
