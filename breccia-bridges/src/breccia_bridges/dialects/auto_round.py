"""AutoRound: tensors as GPTQ or AWQ has them, by `packing_format`.

    auto_round, auto_round:gptqmodel     as GPTQ, with zero-points as they are
    auto_round:auto_gptq                 as GPTQ, with zero-points minus one
    auto_round:auto_awq                  as AWQ gemm

Codes of 5, 6 and 7 bits are a stream too.

Source: AutoRound 0.16.1 (export_to_autoround), transformers 5.24 (AutoRoundConfig).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from reprlib import repr as short
from typing import Any

import numpy as np

from breccia import DialectError, ScaledTensor, UnsupportedError
from breccia.backend import SettingsOf, StoredForm, StoredValue, ValueForm

from . import awq, gptq, writing
from .holding import NO_INPUTS, check_matrix, check_multiples, model_dtype, most_common
from .patterns import Expressions
from .words import held

#: AutoRound's names of a packing; each has a short one.
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_MINUS_ONE = ("auto_round:auto_gptq", "auto_round:gptq")
_AS_STORED = ("auto_round", "auto_round:gptqmodel")

#: The release whose loader has these names.
_VERSION = "0.16.1"
#: Widths of codes that its layers have as a stream of bits.
_STREAMS = (2, 3, 4, 5, 6, 7, 8)
#: Its layers load scales as FP16, whatever the file has.
_SCALES = ("F16",)

#: What a pattern of `extra_config` has, and the name of a module has not.
_PATTERN = re.compile(r"[*^$|()\[\]?+\\]")


def settings(config: Mapping[str, Any]) -> SettingsOf:
    """The config with what `extra_config` changes for a module: under its name, or the first pattern found in it.

    16 bits and more are a module that is not quantized.
    """
    extra: Any = config.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(changes, Mapping) for changes in extra.values()):
        raise DialectError(
            f"extra_config is an object of objects by modules; the config has {short(extra)}.", extra_config=extra
        )
    patterns = [key for key, changes in extra.items() if changes and _PATTERN.search(key)]
    expressions = Expressions(patterns, "the key {} of extra_config", anywhere=True)

    def of(module: str) -> Mapping[str, Any] | None:
        changes = extra.get(module)
        if changes is None:
            matching = expressions.matching(module)
            changes = extra[patterns[min(matching)]] if matching else {}
        own = {**config, **changes}
        bits = own.get("bits")
        return None if isinstance(bits, int) and bits >= 16 else own

    return of


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
    return gptq.form_of(value, _STREAMS)


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """As GPTQ or AWQ."""
    packing = value.settings.get("packing_format")
    if packing in _AWQ:
        return awq.read(value, form)
    return gptq.read_v2(value, form) if packing in _AS_STORED else gptq.read_minus_one(value, form)


def stored(form: ValueForm) -> StoredForm:
    """Unsigned integers with zero-points, in whole groups, as GPTQ has them."""
    check_matrix(form, "auto_round")
    bits, size = held(form, _STREAMS, dtypes=_SCALES)
    check_multiples(form, "auto_round", 32, math.lcm(32, size or 1))
    return StoredForm(gptq.entries_of(form, bits, size), {"bits": bits, "group_size": size or -1})


def write(st: ScaledTensor, stored: StoredForm) -> dict[str, np.ndarray]:
    """As GPTQ, with zero-points as they are."""
    return gptq.write_v2(st, stored)


def config(stored: Mapping[str, StoredForm], plain: Collection[str], activations: str | None) -> dict[str, Any]:
    """What AutoRound and transformers expect.

    `extra_config` names the modules that are not quantized, that have other settings, or that are in no numbered block: those
    are not quantized unless they are named.
    """
    writing.inputs("auto_round", activations, NO_INPUTS)
    common, others = most_common(stored, "bits", "group_size")
    outside = {module: dict(common) for module in stored if not re.search(r"\.\d+\.", module)}
    named = {module: {**settings, "data_type": "int", "sym": False} for module, settings in (outside | others).items()}
    named |= {module: {"bits": 16, "data_type": "float"} for module in plain}
    config = {
        "quant_method": "auto-round",
        "packing_format": _AS_STORED[0],
        **common,
        "data_type": "int",
        "sym": False,  # a form does not say that all zero-points are half of the range
        "autoround_version": _VERSION,
        "extra_config": dict(sorted(named.items())),
    }
    return {"config.json": {**model_dtype(stored, "AutoRound"), "quantization_config": config}}
