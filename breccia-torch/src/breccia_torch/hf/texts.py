"""Token ids as texts that a model runs on."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from breccia import OptionError

#: Tokens of the pieces that a text is cut into, at most.
LENGTH = 512


def cut(ids: np.ndarray, model: Any) -> np.ndarray:
    """Token ids, (tokens,) or (texts, length), as texts. Raises OptionError for texts that are longer than the model takes."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or ids.shape[-1]
    if ids.ndim == 1:
        length = min(LENGTH, most, len(ids))
        return ids[: len(ids) // length * length].reshape(-1, length)
    if ids.shape[1] > most:
        raise OptionError(
            f"calibration: the texts have {ids.shape[1]} tokens, and {type(model).__name__} takes {most}. Cut them.",
            length=ids.shape[1],
            most=most,
        )
    return ids


def check_ids(ids: Tensor, model: Any) -> None:
    """Raise OptionError for ids that the model does not have."""
    count = model.get_input_embeddings().num_embeddings
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= count:
        raise OptionError(
            f"calibration: the token ids go from {low} to {high}, and {type(model).__name__} has {count}. They are of "
            "another tokenizer.",
            found=(low, high),
            count=count,
        )
