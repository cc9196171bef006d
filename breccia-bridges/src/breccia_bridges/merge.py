"""Merge a LoRA adapter into a quantized checkpoint: every tensor that it does not change keeps its bytes."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from breccia import InexactError, OptionError, UnsupportedError, bridges
from breccia.internal import install

from .adapters import CONFIG, WEIGHTS, Adapter
from .calibrated import Calibrated
from .calibration import Calibration
from .conversion import KEEP_CODES
from .convert import verification
from .destination import location
from .journal import Journal
from .merge_plan import Merging
from .merging import Survival
from .remote_path import is_remote, path_of
from .results import Advance, Report, no_progress
from .staging import Staging
from .text import byte_count_of

#: The share of a change that has to survive, unless another is given.
MIN_SHARE = 0.9
#: KL divergence per token, in nats, below which FP32 models differ by the order of their sums alone.
NOISE = 1e-9


@dataclass(frozen=True)
class MergedTensor:
    """A tensor with a change. stored_as: a recipe's name, or a dtype of the file. rank: of the change.

    share, error: of the change that survives, and of what is changed otherwise; see `MergeReport`.
    blocks: those of its scale; 0 of a plain tensor. changed: of them, those with a change. rescaled: with a new scale.
    """

    name: str
    stored_as: str
    rank: int
    share: float
    error: float
    blocks: int
    changed: int
    rescaled: int


@dataclass
class MergeReport:
    """What a merge has made of a change.

    share: how much of the change survives: with w the decoded weights before, q those after, and d the change, the sum of
        d (q - w) over that of d². 1 for a perfect merge, 0 where every code stayed.
    error: the norm of q - w - d over that of d: what is changed otherwise, by rounding.
    divergence: KL divergence per token on a text, of the checkpoint without the change, and with it merged, from the model with
        the change added to its decoded weights; None without a text.
    divergence_share: 1 - the second over the first. None without a text, and where the first is below 1e-9 nats: the change
        moves the outputs by no more than rounding does.
    """

    source: str
    adapter: str
    destination: str
    tensors: list[MergedTensor] = field(default_factory=list[MergedTensor])
    share: float = 1.0
    error: float = 0.0
    divergence: tuple[float, float] | None = None

    @property
    def divergence_share(self) -> float | None:
        if self.divergence is None or self.divergence[0] < NOISE:
            return None
        before, after = self.divergence
        return 1 - after / before

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        return {
            "source": self.source,
            "adapter": self.adapter,
            "destination": self.destination,
            "share": self.share,
            "error": self.error,
            "divergence": self.divergence and {"before": self.divergence[0], "after": self.divergence[1]},
            "divergence_share": self.divergence_share,
            "tensors": [vars(t) for t in self.tensors],
        }


def merge(
    source: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    min_share: float = MIN_SHARE,
    calibrate: Any = None,
    force: bool = False,
    advance: Advance | None = None,
    source_dialect: str | None = None,
    restart: bool = False,
    max_memory: int | str = "4GiB",
    verify: str = "bytes",
) -> MergeReport:
    """Add a LoRA adapter to the weights of a quantized checkpoint, under their recipes, in the dialect of the source.

    source: a quantized `.safetensors` file, folder or `.gguf` file, as `convert` takes it, of a dialect that breccia writes.
    adapter: the folder of an adapter in PEFT's format: adapter_config.json and adapter_model.safetensors. The layer
        "base_model.model.NAME" changes the tensor "NAME.weight" of the source, quantized or plain.
    destination: like `source`. Tensors that no layer changes, and the other files, keep every byte. So do the codes and scales
        of blocks whose change is zero. Other blocks keep their scale while their values fit under it, and get the one of a cast
        where they do not. The scale of a whole tensor beside scales of blocks stays: engines share it between layers.
    min_share: the least share of the change that has to survive, of all tensors together, and of its KL divergence on the text;
        see `MergeReport`. Below it nothing is written. A number of 0 or less allows any loss.
    calibrate: a text, as `convert` takes it, on which the loss is also measured as KL divergence per token. It runs the model
        three times, block by block, in transformers, and changes no byte.
    force, advance, source_dialect, restart, max_memory, verify: as of `convert`.

    A change that is small beside the step between codes does not survive rounding to the nearest code. Codes are chosen by
    error feedback along the adapter's inputs instead; what is rounded otherwise is the `error` of the report.

    Raises InexactError, with the share that survives, below `min_share`; UnsupportedError for adapters that do more than add
    low-rank matrices to linear layers (DoRA, modules_to_save, PiSSA, ...), for a source that is not quantized, or of a dialect
    that breccia does not write; UnknownNameError for layers that the source does not have; ShapeError for those of another
    shape; and what `convert` raises.

        >>> weight = breccia.cast(np.ones((64, 32), np.float32), "int8")
        >>> breccia.bridges.save_safetensors({"mlp.weight": weight}, tmp / "model.safetensors")
        >>> factors = {"mlp.lora_A.weight": np.eye(2, 32, dtype=np.float32), "mlp.lora_B.weight": np.ones((64, 2), np.float32)}
        >>> breccia.bridges.save_safetensors(factors, tmp / "adapter_model.safetensors")
        >>> _ = (tmp / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 1}')
        >>> report = breccia.bridges.merge(tmp / "model.safetensors", tmp, tmp / "merged.safetensors")
        >>> round(report.share, 2)
        1.0
    """
    least, verified = _checked_share(min_share), verification(verify, histograms=False)
    src, dst, memory = path_of(source), path_of(destination), byte_count_of(max_memory, "max_memory")
    if is_remote(src) or is_remote(dst):
        raise UnsupportedError(f"merge reads and writes files of this machine; {src if is_remote(src) else dst} is a URL.")
    text, changes = Calibration.of(calibrate, None, None), Adapter.open(path_of(adapter))
    if text is not None:
        _check_torch()
    staging = Staging(location(dst), keeps_journal=True, target=location(dst))
    if staging.moved:
        with staging:  # puts it back
            pass
    work = Merging(src, staging, force, source_dialect, changes, memory)
    work.plan(Report(str(src), str(dst), is_conversion=True, verify=verified), None, "", None)
    digest = hashlib.sha256(b"".join((changes.path / name).read_bytes() for name in (CONFIG, WEIGHTS))).hexdigest()[:16]
    journal = Journal(staging, work.key({"recipe": KEEP_CODES, "adapter": digest, "verify": verified.value}))
    report = MergeReport(str(src), str(changes.path), str(dst))
    ids = None if text is None else text.ids(src)
    work.choose(Calibrated(staging.calibrated, journal, is_stored=True), lambda made: _judge(report, made, least))
    if ids is not None:
        work.before_commit = lambda made: _measure(report, ids, work, source_dialect, made, least)
    if restart:
        with Staging(staging.destination):  # removes what is there
            pass
    work.run(work.estimates.slab(work.jobs, memory), False, advance or no_progress, journal)
    return report


def _judge(report: MergeReport, made: Mapping[str, Mapping[str, Any]], least: float) -> None:
    """Put what was merged into the report. Raises InexactError where less than `least` of the change survives."""
    total = Survival()
    for name, record in made.items():
        of = Survival(*record["survival"])
        counts = {key: record[key] for key in ("stored_as", "rank", "blocks", "changed", "rescaled")}
        report.tensors.append(MergedTensor(name, share=of.share, error=of.error, **counts))
        total += of
    report.share, report.error = total.share, total.error
    if least > 0 and not total.share >= least:
        worst = min(report.tensors, key=lambda t: t.share)
        what = f"{total.share:.1%} of the change survives in {report.source}, least in {worst.name} ({worst.share:.1%})"
        raise _lost(what, total.share, least)


def _lost(what: str, share: float, least: float) -> InexactError:
    """The error that less than `least` survives. what: the share that does."""
    return InexactError(
        f"merge: {what}, and {least:.1%} are asked for. Nothing was written. Merge the adapter into the model in high "
        "precision and convert that, convert to a finer recipe first, or accept the loss: "
        f"min_share={max(0, math.floor(100 * share)) / 100} (--min-share).",
        share=share,
        min_share=least,
    )


def _check_torch() -> None:
    """Raise ImportError without breccia-torch, torch or transformers."""
    if not hasattr(bridges, "merge_divergence"):
        raise ImportError(
            f"calibrate= (--calibrate) runs the model in torch: {install('breccia-torch[hf]')}", name="breccia_torch"
        )


def _measure(report: MergeReport, ids: np.ndarray, work: Merging, source_dialect: str | None, made: Path, least: float) -> None:
    """Put the KL divergence on a text into the report. made: the merged checkpoint, not yet at its destination.

    Raises InexactError where less than `least` of it survives.
    """
    changes = {name: change.matrix for name, change in work.changes.items()}
    before, after = report.divergence = bridges.merge_divergence(work.src, made, ids, changes, source_dialect=source_dialect)
    share = report.divergence_share
    if least > 0 and share is not None and share < least:
        worst = max(report.tensors, key=lambda t: t.error)
        what = (
            f"{share:.1%} of the change's effect on the text survives in {report.source}: KL divergence from the model with "
            f"the whole change is {after:.3g} nats per token, and {before:.3g} without the change. {report.share:.1%} of the "
            f"change itself survives, with an error of {report.error:.2f} of its norm, most of all in "
            f"{worst.name} ({worst.error:.2f})"
        )
        raise _lost(what, share, least)


def _checked_share(share: Any) -> float:
    if isinstance(share, bool) or not isinstance(share, int | float) or not share <= 1:
        raise OptionError(
            f"min_share (--min-share) is a share of the change, at most 1, such as {MIN_SHARE}; got {share!r}.", min_share=share
        )
    return float(share)
