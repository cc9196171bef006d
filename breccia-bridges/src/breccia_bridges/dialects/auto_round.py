"""AutoRound: tensors as GPTQ or AWQ has them, by `packing_format`.

    auto_round, auto_round:gptqmodel     as GPTQ, with zero-points as they are
    auto_round:auto_gptq                 as GPTQ, with zero-points minus one
    auto_round:auto_awq                  as AWQ gemm

Codes of 5, 6 and 7 bits are a stream too, and are held in 8.

Source: AutoRound 0.16.1 (export_to_autoround), transformers 5.24 (AutoRoundConfig).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from breccia import DialectError, ScaledTensor, UnsupportedError
from breccia.backend import StoredValue, ValueForm

from . import awq, gptq

#: AutoRound's names of a packing; each has a short one.
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_MINUS_ONE = ("auto_round:auto_gptq", "auto_round:gptq")
_AS_STORED = ("auto_round", "auto_round:gptqmodel")

#: What a pattern of `extra_config` has, and the name of a module has not.
_PATTERN = re.compile(r"[*^$|()\[\]?+\\]")


def settings(config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
    """The config with what `extra_config` changes for a module: under its name, or the first pattern found in it.

    16 bits and more are a module that is not quantized.
    """
    extra: Any = config.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(changes, Mapping) for changes in extra.values()):
        raise DialectError(f"extra_config is an object of objects by modules; the config has {extra!r}.", extra_config=extra)
    changes = extra.get(module)
    if changes is None:
        changes = next((own for key, own in extra.items() if own and _PATTERN.search(key) and _found(key, module)), {})
    own = {**config, **changes}
    bits = own.get("bits")
    return None if isinstance(bits, int) and bits >= 16 else own


def _found(pattern: str, module: str) -> bool:
    try:
        return re.search(pattern, module) is not None
    except (re.error, OverflowError, RecursionError) as e:
        raise DialectError(f"the key {pattern!r} of extra_config is not a regular expression ({e}).", pattern=pattern) from e


def form(value: StoredValue) -> ValueForm:
    """Unsigned integers with zero-points."""
    packing, act_bits = value.settings.get("packing_format"), value.settings.get("act_bits")
    value.need(
        packing is not None,
        "the config has no packing_format, which says whether 'qzeros' has zero-points minus one. Give source_dialect= (on the "
        "command line --from): 'gptq' if it has, 'gptq_v2' if not, or 'awq'.",
    )
    if isinstance(act_bits, int) and act_bits <= 8:
        raise UnsupportedError(
            f"the config has act_bits={act_bits}: AutoRound quantizes such weights twice, and no recipe has both scales. "
            "Convert the checkpoint that it was made from.",
            act_bits=act_bits,
        )
    if packing in _AWQ:
        return awq.form_of(value, (4, 5, 6, 7))
    return gptq.form_of(value, (2, 3, 4, 5, 6, 7, 8))


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """As GPTQ or AWQ."""
    packing = value.settings.get("packing_format")
    if packing in _AWQ:
        return awq.read(value, form)
    return gptq.read_v2(value, form) if packing in _AS_STORED else gptq.read_minus_one(value, form)
