"""What transformers reads in the config.json of a quantized folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .announcements import CONFIG, read_object
from .staging import write_text

#: The key under which transformers takes the file name of the weights, and a text that it refuses with an error that shows it.
#: transformers skips a `quant_method` that nothing registered with a warning, and loads random weights. This keeps it from
#: that: `breccia_torch.hf` removes the entry when it loads a folder.
WEIGHTS = "transformers_weights"
REFUSAL = "the weights are quantized by breccia: pip install 'breccia-torch[hf]', and import breccia_torch.hf before loading"


def refuse_in_transformers(folder: str | os.PathLike[str]) -> None:
    """Make transformers refuse a folder unless `breccia_torch.hf` is imported. A folder without a config.json stays as it is.

    Raises CorruptFileError for a config.json that is not a JSON object.

        >>> size = (tmp / "config.json").write_text('{"model_type": "llama"}')
        >>> breccia.bridges.refuse_in_transformers(tmp)
        >>> import json
        >>> json.loads((tmp / "config.json").read_text())["transformers_weights"]
        "the weights are quantized by breccia: pip install 'breccia-torch[hf]', and import breccia_torch.hf before loading"
    """
    path = Path(folder, CONFIG)
    config = read_object(path)
    if config is not None:
        write_json(path, config | {WEIGHTS: REFUSAL})


def write_json(path: Path, fields: dict[str, Any]) -> None:
    """Write a JSON object in the style of transformers."""
    write_text(path, json.dumps(fields, indent=2) + "\n")
