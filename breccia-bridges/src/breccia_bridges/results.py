"""Results of `convert` and `compare`: a record per tensor of a checkpoint, and their sums."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from breccia import ErrorMetrics, Exactness, ScalingRecipe
from breccia.internal import abbreviated

from .measure import NOTHING, Histogram
from .mix import Mix
from .safetensors import plan
from .safetensors_file import Shape, byte_count

#: The reason for not measuring two tensors of the same bytes.
EQUAL = "same in both"


class Verify(StrEnum):
    """What `convert` does with a file that it wrote: compare its bytes and measure its values; compare bytes; or nothing."""

    full = "full"
    bytes = "bytes"
    none = "none"


#: Progress callback: called with a tensor's name and the number of its bytes processed.
Advance = Callable[[str, int], None]


def no_progress(name: str, bytes_done: int) -> None:
    """The default `Advance`: does nothing."""


@dataclass(frozen=True)
class TensorReport:
    """One tensor, before and after.

    dtype, stored_as: its type before and after, as a dtype of the file or a recipe's name.
    reason: why it was kept or decoded, or could not be compared; empty if it was quantized or compared.
    fidelity, histogram: its error metrics and its elements by value; None unless requested, or decoded.
    recipe: the one it is stored under; None for a plain tensor.
    codes_kept, decoded, requantized: what became of one that was quantized before: its codes and scales hold the same values
        now; it is plain; or it is quantized again, from its decoded values.
    exactness: what `recipe` keeps of one that was quantized before.
    calibration: how its codes were chosen: method, tokens, damping, output_sqnr (of its layer's outputs on the text, in dB),
        and a note; None without calibration.
    """

    name: str
    shape: Shape
    dtype: str
    stored_as: str
    reason: str
    bytes_in: int
    bytes_out: int
    fidelity: ErrorMetrics | None = None
    histogram: Histogram | None = None
    recipe: ScalingRecipe | None = None
    codes_kept: bool = False
    decoded: bool = False
    requantized: bool = False
    exactness: Exactness | None = None
    calibration: Mapping[str, Any] | None = None

    @property
    def quantized(self) -> bool:
        return not self.reason

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def bits_per_parameter(self) -> float | None:
        """Bits per parameter, scales included; None for an empty tensor."""
        return 8 * self.bytes_out / self.parameters if self.parameters else None

    @property
    def measured(self) -> ErrorMetrics:
        """`fidelity`, or the metrics of no elements."""
        return self.fidelity or NOTHING

    def to_dict(self) -> dict[str, Any]:
        """Everything except the histogram, ready for `json.dumps`: non-finite or unknown numbers become None."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "stored_as": self.stored_as,
            "spec": self.recipe and self.recipe.spec,
            "quantized": self.quantized,
            "codes_kept": self.codes_kept,
            "decoded": self.decoded,
            "requantized": self.requantized,
            "exactness": self.exactness and self.exactness.kind,
            "reason": self.reason or None,
            "calibration": self.calibration and dict(self.calibration),
            "parameters": self.parameters,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            **(self.fidelity.to_dict() if self.fidelity else dict.fromkeys(NOTHING.to_dict())),
        }


@dataclass(frozen=True, repr=False)
class Report:
    """A checkpoint before and after, with its error metrics.

    recipe: the requested one, of a policy the default's; None where checkpoints were compared.
    missing, added: tensors present in only one of two checkpoints.
    links: files of the source that were not copied, as they are links that leave it.
    dropped: tensors of the source that mean nothing in the new files: how other programs quantize activations.
    not_made: files beside the weights of a GGUF model that were not made, each with the reason.
    unlike_layers: layers that engines compute as one, with the values of each, which are stored under different recipes.
    new_dtype: the dtype of the model, and the one that config.json says now, where a dialect changes it; empty elsewhere.
    is_conversion: whether it is of `convert`. dense: the dtype that a conversion decodes quantized values to, if to one.
    dialect: the name of the dialect that it writes; empty for breccia's own files.
    verify: what a conversion verified; there are no error metrics unless it is full.
    calibration: the method by which a conversion chose codes, and the tokens that it read; empty without calibration.
    mix: the recipes that a conversion to a number of bits has chosen; None for others.
    """

    source: str
    destination: str
    recipe: ScalingRecipe | None = None
    tensors: list[TensorReport] = field(default_factory=list[TensorReport])
    missing: list[str] = field(default_factory=list[str])
    added: list[str] = field(default_factory=list[str])
    links: list[str] = field(default_factory=list[str])
    dropped: list[str] = field(default_factory=list[str])
    not_made: list[str] = field(default_factory=list[str])
    unlike_layers: list[list[str]] = field(default_factory=list[list[str]])
    new_dtype: list[str] = field(default_factory=list[str])
    is_conversion: bool = False
    dense: str = ""
    dialect: str = ""
    verify: Verify = Verify.full
    calibration: str = ""
    mix: Mix | None = None

    def __repr__(self) -> str:
        under = f" under {', '.join(self.recipes)}" if self.quantized else ""
        decoded = f"{len(self.decoded)} decoded, " if self.decoded else ""
        return (
            f"Report({self.source!r} -> {self.destination!r}: {len(self.quantized)} tensors quantized{under}, {decoded}"
            f"{len(self.kept)} kept; {self.bits_per_parameter:.4g} bits per parameter, "
            f"{f'SQNR {self.sqnr:.2f} dB' if self.verify is Verify.full else 'not measured'})"
        )

    @property
    def quantized(self) -> list[TensorReport]:
        return [t for t in self.tensors if t.quantized]

    @property
    def kept(self) -> list[TensorReport]:
        """Tensors that are neither quantized nor decoded."""
        return [t for t in self.tensors if not t.quantized and not t.decoded]

    @property
    def decoded(self) -> list[TensorReport]:
        """Tensors that were quantized before, and are plain now."""
        return [t for t in self.tensors if t.decoded]

    @property
    def requantized(self) -> list[TensorReport]:
        """Tensors that were quantized before, and again from their decoded values."""
        return [t for t in self.tensors if t.requantized]

    @property
    def calibrated(self) -> list[TensorReport]:
        """Tensors whose codes were chosen by calibration."""
        return [t for t in self.tensors if t.quantized and t.calibration and t.calibration["method"]]

    @property
    def codes_kept(self) -> list[TensorReport]:
        """Tensors that were quantized before, and whose codes and scales hold the same values now."""
        return [t for t in self.tensors if t.codes_kept]

    @property
    def counts(self) -> dict[str, int]:
        """The number of tensors by what became of them."""
        again, codes = len(self.requantized), len(self.codes_kept)
        return {
            "quantized": len(self.quantized) - again - codes,
            "quantized again": again,
            "with their codes kept": codes,
            "decoded": len(self.decoded),
            "kept": len(self.kept),
            "dropped": len(self.dropped),
        }

    @property
    def recipes(self) -> list[str]:
        """The recipes of the quantized tensors, most common first."""
        return [name for name, _ in Counter(t.stored_as for t in self.quantized).most_common()]

    @property
    def used(self) -> list[ScalingRecipe]:
        """The recipes of the quantized tensors with their fields, most common first."""
        return [recipe for recipe, _ in Counter(t.recipe for t in self.quantized if t.recipe).most_common()]

    @property
    def reasons(self) -> dict[str, int]:
        """The number of tensors kept or decoded for each reason, most common first."""
        return dict(Counter(t.reason for t in self.tensors if not t.quantized).most_common())

    @property
    def unlike(self) -> list[TensorReport]:
        """Kept tensors that differ between two checkpoints and cannot be measured."""
        return [t for t in self.kept if t.reason != EQUAL]

    @property
    def parameters(self) -> int:
        return sum(t.parameters for t in self.tensors)

    @property
    def bytes_in(self) -> int:
        return sum(t.bytes_in for t in self.tensors)

    @property
    def bytes_out(self) -> int:
        return sum(t.bytes_out for t in self.tensors)

    @property
    def bytes_kept(self) -> int:
        """Bytes of tensors that are not quantized, kept or decoded."""
        return sum(t.bytes_out for t in self.tensors if not t.quantized)

    @property
    def bits_per_parameter(self) -> float:
        """Bits per quantized parameter, scales included."""
        return 8 * sum(t.bytes_out for t in self.quantized) / max(1, sum(t.parameters for t in self.quantized))

    @property
    def fidelity(self) -> ErrorMetrics:
        """Error metrics of all quantized tensors together."""
        return sum((t.measured for t in self.quantized), NOTHING)

    @property
    def sqnr(self) -> float:
        """SQNR of all quantized tensors together, in dB."""
        return self.fidelity.sqnr

    @property
    def cosine(self) -> float:
        """Cosine of all quantized tensors together, as one vector; 1 if there are none."""
        return self.fidelity.cosine

    @property
    def worst(self) -> TensorReport | None:
        """The quantized tensor of lowest SQNR; non-finite tensors come first."""
        measured = [t for t in self.quantized if t.fidelity]
        return min(measured, key=lambda t: -math.inf if math.isnan(t.measured.sqnr) else t.measured.sqnr, default=None)

    @property
    def verdict(self) -> str:
        """What a comparison found, or a conversion did, in one sentence."""
        worse = [t.name for t in self.quantized if t.measured.bad_after and not t.measured.bad]
        if worse:
            return f"broken: NaN or Inf only in {self.destination}, in {abbreviated(worse)}"
        if self.is_conversion:
            counts = [f"{count} {what}" for what, count in self.counts.items() if count]
            return f"{len(self.tensors)} tensors: {', '.join(counts) or 'none'}"
        counts = {"missing": len(self.missing), "added": len(self.added), "of another shape or type": len(self.unlike)}
        if any(counts.values()):
            return f"not the same tensors: {', '.join(f'{count} {what}' for what, count in counts.items() if count)}"
        differ = [t for t in self.quantized if not t.measured.lossless]
        if not self.quantized:
            return "identical: all tensors have the same bytes"
        if not differ or self.worst is None:
            return f"equal: all tensors have the same values, {len(self.quantized)} of {len(self.tensors)} in other bytes"
        total, least = (f"{n:.2f} dB" if math.isfinite(n) else "no finite SQNR" for n in (self.sqnr, self.worst.measured.sqnr))
        count = f"{len(differ)} of {len(self.tensors)} tensors differ"
        return f"rounded: {count}, {total} in all, at worst {least} ({self.worst.name})"

    @property
    def _wide(self) -> list[str]:
        """Quantized tensors that need over 1.5 times the bits per parameter of a tensor of full blocks."""
        side, full = 4096, dict[ScalingRecipe, float]()
        for recipe in self.used:
            entries, _ = plan("w", (side, side), recipe)
            full[recipe] = 8 * sum(byte_count(*entry) for entry in entries.values()) / side**2
        return [
            f"{t.name} ({t.bits_per_parameter:.2f} bits)"
            for t in self.quantized
            if t.recipe and (t.bits_per_parameter or 0) > 1.5 * full[t.recipe]
        ]

    @property
    def warnings(self) -> list[str]:
        """Warnings for the user, as sentences."""
        warnings: list[str] = list(self.not_made)
        for names, here, there in ((self.missing, self.source, self.destination), (self.added, self.destination, self.source)):
            if names:
                warnings.append(f"in {here} and not in {there}: {abbreviated(names)}.")
        if self.links:
            warnings.append(f"not copied, as these are links that leave {self.source}: {abbreviated(self.links)}.")
        if self.unlike_layers:
            groups = abbreviated([" and ".join(group) for group in self.unlike_layers], 2)
            warnings.append(
                f"vLLM and SGLang compute each of these groups as one layer, and do not load it under different recipes: "
                f"{groups}. Give the layers of a group one recipe, to serve the model there."
            )
        if self.new_dtype:
            old, new = self.new_dtype
            warnings.append(
                f"config.json says {new} now, the dtype of the scales, and the model has {old}: libraries round the weights "
                "that are not quantized to it, and compute in it. A recipe with another scale_dtype changes that."
            )
        if not self.quantized and self.recipe is not None:
            warnings.append("no tensor was quantized; `--json` says why each was kept.")
        if self.dense and not self.decoded:
            warnings.append(
                f"no tensor of {self.source} is quantized, so none was decoded to {self.dense}: plain tensors keep "
                "their dtypes."
            )
        if self.recipe is not None and (wide := self._wide):
            warnings.append(
                f"the last axis of {abbreviated(wide)} is shorter than a block, so scales take more space than usual; "
                "--exclude keeps such tensors unquantized."
            )
        rounded = [t for t in self.decoded if t.fidelity and not t.fidelity.lossless]
        if rounded:
            dtypes = " or ".join(sorted({t.stored_as for t in rounded}))
            warnings.append(f"not quantized, and rounded to {dtypes} when decoded: {abbreviated(t.name for t in rounded)}.")
        by_note: dict[str, list[str]] = {}
        for t in self.tensors:
            if t.calibration and t.calibration["note"]:
                by_note.setdefault(t.calibration["note"], []).append(t.name)
        warnings.extend(f"calibration: {abbreviated(names)}: {note}." for note, names in by_note.items())
        bad = [t.name for t in self.quantized if t.measured.bad]
        worse = [t.name for t in self.quantized if t.measured.bad_after and not t.measured.bad]
        if bad:
            blocks = "; their blocks decode to NaN" if self.recipe is not None else ""
            warnings.append(f"NaN or Inf in {self.source}: {abbreviated(bad)}{blocks}.")
        if worse:
            warnings.append(f"NaN or Inf only in {self.destination}: {abbreviated(worse)}.")
        return warnings

    def to_dict(self) -> dict[str, Any]:
        """Everything except histograms, ready for `json.dumps`: non-finite or unknown numbers become None."""
        worst, fidelity = self.worst, self.fidelity
        known = worst is not None
        return {
            "source": self.source,
            "destination": self.destination,
            "recipe": self.recipe and self.recipe.to_dict(),
            "recipes": self.recipes,
            "dialect": self.dialect or None,
            "verify": self.verify.value if self.is_conversion else None,
            "calibration": self.calibration or None,
            "target": self.mix and self.mix.to_dict(),
            "parameters": self.parameters,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "bytes_kept": self.bytes_kept,
            "bits_per_parameter": self.bits_per_parameter,
            **(fidelity.to_dict() if known else dict.fromkeys(NOTHING.to_dict())),
            "worst": worst.name if worst else None,
            "counts": self.counts if self.is_conversion else None,
            "kept": self.reasons,
            "dropped": self.dropped,
            "missing": self.missing,
            "added": self.added,
            "verdict": self.verdict,
            "warnings": self.warnings,
            "tensors": [t.to_dict() for t in self.tensors],
        }
