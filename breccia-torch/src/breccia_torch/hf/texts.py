"""Token ids as the texts that a model runs on, and the device that it runs on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from breccia import OptionError
from breccia.internal import TEXT_LENGTH

#: What torch and transformers take when they are imported.
PROGRAM = 512 << 20


def as_texts(model: Any, ids: np.ndarray) -> Tensor:
    """Token ids, (tokens,) or (texts, length), as texts of at most `TEXT_LENGTH` tokens and of as many as the model takes.

    Raises OptionError for texts that are longer than that, and for ids that the model does not have.
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or ids.shape[-1]
    if ids.ndim == 1:
        length = min(TEXT_LENGTH, most, len(ids))
        ids = ids[: len(ids) // length * length].reshape(-1, length)
    elif ids.shape[1] > most:
        raise OptionError(
            f"calibration: the texts have {ids.shape[1]} tokens, and {type(model).__name__} takes {most}. Cut them.",
            length=ids.shape[1],
            most=most,
        )
    count = model.get_input_embeddings().num_embeddings
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= count:
        raise OptionError(
            f"calibration: the token ids go from {low} to {high}, and {type(model).__name__} has {count}. They are of another "
            "tokenizer.",
            found=(low, high),
            count=count,
        )
    return torch.as_tensor(ids)


def check_device(device: str) -> None:
    """Raise OptionError for a device that torch does not have here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        reason = str(e).partition("\n")[0]
        raise OptionError(f"device={device!r} (--device): torch has none here ({reason}). Use 'cpu'.", device=device) from e
