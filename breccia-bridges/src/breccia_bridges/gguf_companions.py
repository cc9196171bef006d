"""The config and the tokenizer of a model in GGUF, as the files that transformers has beside weights.

transformers makes both from the keys of a GGUF file, for the architectures that it reads. Beside tensors that keep GGUF's names
there is no config.json: transformers would find none of them, and leave the weights of the model at random.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from breccia import UnsupportedError
from breccia.internal import abbreviated, printable

from .announcements import CONFIG, TORCH_NAMES
from .gguf_file import GGUFFile
from .remote_path import is_remote

#: Dtypes that are the model's where a matrix has one, beside norms in FP32.
HALVES = ("BF16", "F16")
#: Any of these files is that of a tokenizer.
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_INSTALL = "pip install transformers gguf torch accelerate"


def make(file: GGUFFile, names: Collection[str], folder: Path) -> list[str]:
    """Write those of config.json and the tokenizer's files into a folder that it lacks; returns what was not made, and why.

    file: the first one of the model. names: of all values of the model.
    """
    said: list[str] = []
    if file.unmapped:
        (folder / CONFIG).unlink(missing_ok=True)
        return [
            f"{file.path.name} is not a model that transformers can load from here: {file.unmapped}. No config of "
            "the model was written, with which transformers would fill all weights with random numbers."
        ]
    if is_remote(file.path):
        return [
            f"config.json and the tokenizer were not made: transformers reads them from a file on a disk, and {file.path} is a "
            "URL. Take those of the original model, or download the file first."
        ]
    if not (folder / CONFIG).exists():
        said += _attempt("config.json", lambda: _write_config(file, names, folder))
        if (folder / CONFIG).exists() and file.left_out:
            said.append(
                f"{abbreviated(file.left_out)} of {file.path.name} changes the rotary frequencies, which config.json does not "
                "say: add rope_scaling to it, as the model's own config.json has it."
            )
    if not any((folder / name).exists() for name in _TOKENIZERS):
        said += _attempt("the tokenizer", lambda: _write_tokenizer(file.path, folder))
    return said


def _attempt(what: str, write: Any) -> list[str]:
    try:
        write()
    except UnsupportedError as e:
        return [f"{what} was not made: {e}"]
    except ImportError as e:
        return [f"{what} was not made, for which transformers is needed ({printable(str(e))[:200]}): {_INSTALL}."]
    except Exception as e:  # transformers raises anything for a file that it does not read
        said = printable(str(e).strip().partition("\n")[0])[:300].rstrip(".")
        return [f"{what} was not made: transformers says {type(e).__name__}: {said}. Take that of the original model."]
    return []


def _write_config(file: GGUFFile, names: Collection[str], folder: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config: Any = AutoConfig.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    if any(".experts." in name for name in names) and getattr(config, "enable_moe_block", True) is False:
        raise UnsupportedError(
            f"the model has experts, and the config that transformers makes of {file.path.name} has none. Take that of the "
            "original model."
        )
    # Of a model that was split, transformers sees the first file alone.
    config.tie_word_embeddings = "lm_head.weight" not in names
    # Without it, transformers would take that of the first scales.
    halves = [TORCH_NAMES[entry.dtype] for entry in file.entries.values() if entry.dtype in HALVES and len(entry.shape) > 1]
    config.dtype = halves[0] if halves else "float32"
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    config.architectures = config.architectures or ([known] if isinstance(known, str) else None)
    config.save_pretrained(str(folder))


def _write_tokenizer(path: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.save_pretrained(str(folder))
