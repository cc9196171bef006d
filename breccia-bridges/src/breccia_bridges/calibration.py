"""`convert(..., calibrate=)`: its arguments, the values that it quantizes, and what chooses their codes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from breccia import OptionError, Policy, RecipeError, ScaledTensor, ScalingRecipe, UnsupportedError, bridges
from breccia.backend import Declared, registry
from breccia.internal import TEXT_LENGTH, check_choices, check_positive, choices_of, one_of, suggestion

from .calibrated import Calibrated, Stage
from .extremes import Extremes
from .jobs import Job
from .measure import FileTensor
from .results import Advance
from .slab_casts import SlabCasts, assembled

#: The rule by which scales are searched for the least squared error, where a recipe has it.
SEARCH = "mse"


@dataclass(frozen=True)
class Importance(Declared):
    """Scales that are searched for the least squared error, each column weighed by the mean square of its input."""

    kind: ClassVar[str] = "method"
    name: ClassVar[str] = "importance"


@dataclass(frozen=True)
class GPTQ(Declared):
    """Codes with error feedback (Frantar et al., arXiv:2210.17323), under scales that are searched as in `Importance`.

    damping: what is added to the diagonal of the second moment, as a share of its mean. order: "importance", columns of large
    inputs first; or "given", as they lie.
    """

    kind: ClassVar[str] = "method"
    name: ClassVar[str] = "gptq"
    damping: float = 0.01
    order: str = field(default="importance", metadata=one_of(("importance", "given")))

    def __post_init__(self) -> None:
        check_choices(self)
        if isinstance(self.damping, bool) or not isinstance(self.damping, int | float) or not 0 < self.damping <= 1:
            raise RecipeError(f"damping must lie in 0 .. 1, got {self.damping!r}", damping=self.damping)


@dataclass(frozen=True)
class AWQ(Declared):
    """Scales of columns, folded into the norm or the linear layer before (Lin et al., arXiv:2306.00978), then `Importance`.

    grid: the powers of the mean magnitudes of inputs that are tried.
    """

    kind: ClassVar[str] = "method"
    name: ClassVar[str] = "awq"
    grid: int = 20

    def __post_init__(self) -> None:
        check_positive("AWQ", "grid", self.grid)


METHODS: dict[str, type[Declared]] = {method.name: method for method in (Importance, GPTQ, AWQ)}


def method_of(spec: Any) -> Any:
    """The method of a spec: "gptq", or with fields "gptq,damping=0.05,order=given". Raises OptionError for another."""
    name, *settings = (part.strip() for part in str(spec).split(","))
    if name not in METHODS:
        raise OptionError(
            f"method (--method) is one of {', '.join(METHODS)}; got {spec!r}{suggestion(name, list(METHODS))}", method=spec
        )
    parts = [setting.partition("=") for setting in settings]
    try:
        return METHODS[name].with_fields({key: _number(value) for key, _, value in parts})
    except RecipeError as e:
        raise OptionError(f"method={spec!r} (--method): {e}", method=spec) from e


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True)
class Calibration:
    """A text, and how it chooses codes. text: of a file that is tokenized with the model's tokenizer; or token ids."""

    text: str | np.ndarray
    method: Any
    device: str

    @classmethod
    def of(cls, given: Any, method: str | None, device: str | None) -> Calibration | None:
        """What users give: the path of a text or of an .npy file of token ids, or an array of them; None for nothing.

        Raises OptionError for another method, for arrays that are no token ids, for a method or device without a text, and for
        a file that cannot be read.
        """
        if given is None:
            for name, value in {"method": method, "device": device}.items():
                if value is not None:
                    raise OptionError(
                        f"{name}={value!r} (--{name}) is for calibration: give calibrate= (--calibrate), or leave it out.",
                        **{name: value},
                    )
            return None
        text: Any = given
        if isinstance(given, str | os.PathLike):
            text = _read(Path(given))
        return cls(
            text if isinstance(text, str) else _checked(np.asarray(text)), method_of(method or GPTQ.name), device or "cpu"
        )

    @property
    def key(self) -> str:
        """What decides about the codes, for the journal."""
        text = self.text.encode() if isinstance(self.text, str) else self.text.tobytes() + str(self.text.shape).encode()
        return f"{self.method.spec} on {hashlib.sha256(text).hexdigest()[:16]}, {self.device}"

    def searched(self, policy: Policy) -> Policy:
        """The policy whose recipes search scales where they have a choice of rules, and none was made.

        Raises OptionError where the method only weighs the search, and a recipe has none.
        """

        def rule(one: Any) -> Any:
            return one and one._replace(recipe=self.searching(one.recipe))

        return replace(policy, default=rule(policy.default), rules=tuple((key, rule(one)) for key, one in policy.rules))

    def searching(self, recipe: ScalingRecipe) -> ScalingRecipe:
        """The recipe, searching for scales where it has the choice. Raises OptionError as `searched`, and for rotations."""
        if recipe.format.rotation is not None:
            raise OptionError(
                f"calibrate (--calibrate) weighs the columns of a layer by its inputs, and the rotation of {recipe.spec} mixes "
                f"them. Leave calibrate out, or the rotation: {recipe.unrotated.spec}.",
                recipe=recipe.spec,
            )
        if SEARCH in choices_of(type(recipe), "scale_rule")[0]:
            if is_searched(recipe):
                return recipe
            if "scale_rule" not in recipe.changed:
                with suppress(RecipeError):  # some fields exclude the search
                    return replace(recipe, scale_rule=SEARCH)  # type: ignore[type-var]
        if self.method.name == Importance.name:
            raise OptionError(
                f"method='importance' (--method) weighs the search of scales, scale_rule={SEARCH!r}, which {recipe.spec} does "
                "not do. Give method='gptq', or a recipe with that rule.",
                recipe=recipe.spec,
            )
        return recipe

    def ids(self, source: Path) -> np.ndarray:
        """Token ids, (texts, length) or (tokens,)."""
        return _tokenized(source, self.text) if isinstance(self.text, str) else self.text

    def plan(
        self, source: Path, jobs: Iterable[Job], limit: int, source_dialect: str | None, results: Calibrated
    ) -> Iterable[Stage]:
        """Check that the model can be calibrated, and return its stages, none of them made yet. limit: bytes of memory.

        Raises ImportError without breccia-torch and transformers, and what `breccia.bridges.calibrate` raises.
        """
        if "calibrate" not in registry().bridges:
            raise ImportError("calibration runs the model in torch: pip install 'breccia-torch[hf]'.", name="breccia_torch")
        targets = {job.name: _Target.of(job) for job in jobs if job.way == "cast" and job.recipe}
        return bridges.calibrate(
            source, self.ids(source), targets, self.method, device=self.device, limit=limit, source_dialect=source_dialect,
            finished=results.finished,
        )  # fmt: skip

    def run(self, stages: Iterable[Stage], results: Calibrated, jobs: Mapping[str, Job], advance: Advance) -> None:
        """Make the stages, and keep each on the disk."""
        told: set[str] = set()
        for stage in stages:
            results.add(stage)
            for name in stage.tensors:
                advance(name, jobs[name].value.nbytes)
                told.add(name)
        for name, job in jobs.items():
            if name not in told:
                advance(name, job.value.nbytes)


@dataclass(frozen=True)
class _Target:
    """A value to quantize, as `breccia.bridges.calibrate` takes it."""

    recipe: ScalingRecipe
    together: Sequence[str]

    @classmethod
    def of(cls, job: Job) -> _Target:
        assert job.recipe is not None
        return cls(job.recipe, tuple(value.name for value in job.among.values) if job.among else ())

    def cast(self, x: np.ndarray, among: Sequence[np.ndarray], importance: np.ndarray | None) -> ScaledTensor:
        ends = Extremes.of([FileTensor(each, "F32") for each in among]) if among else None
        weights = importance if is_searched(self.recipe) else None
        pieces = SlabCasts(FileTensor(x, "F32"), self.recipe, ends, weights).cast()
        return assembled(pieces, self.recipe, x.shape)


def is_searched(recipe: ScalingRecipe) -> bool:
    """Are its scales searched for the least squared error?"""
    return getattr(recipe, "scale_rule", None) == SEARCH


def _read(path: Path) -> str | np.ndarray:
    """The text or the array of a file. Raises OptionError for one that cannot be read."""
    try:
        return np.load(path, allow_pickle=False) if path.suffix == ".npy" else path.read_text(encoding="utf-8")
    except OSError as e:
        raise OptionError(
            f"calibrate (--calibrate) takes the path of a text in UTF-8, or of an .npy file of token ids; {path} cannot be "
            f"read ({e.strerror or e}). Give a file that exists.",
            path=str(path),
        ) from e
    except UnicodeDecodeError as e:
        raise OptionError(
            f"calibrate (--calibrate): {path} is no text in UTF-8 ({e.reason} at byte {e.start}). Convert it, or give token "
            "ids (.npy).",
            path=str(path),
        ) from e
    except (ValueError, EOFError) as e:
        raise OptionError(
            f"calibrate (--calibrate): {path} is not an array of token ids ({e}). Write one by numpy.save.", path=str(path)
        ) from e


def _checked(ids: np.ndarray) -> np.ndarray:
    if ids.ndim not in (1, 2) or not ids.size or ids.dtype.kind not in "iu":
        raise OptionError(
            "calibrate (--calibrate) takes a text, or token ids: integers of shape (tokens,) or (texts, length); got "
            f"{ids.dtype} of shape {ids.shape}.",
            shape=ids.shape,
        )
    return ids.astype(np.int64)


def _tokenized(source: Path, text: str) -> np.ndarray:
    """The ids of a text under the tokenizer of a model: (tokens,), or (texts, length) of pieces of it, each between the tokens
    that the tokenizer puts around a text, as [CLS] and [SEP], where it puts some.

    A piece has at most `TEXT_LENGTH` tokens, with those around it. Raises UnsupportedError without a tokenizer, OptionError for
    no tokens.
    """
    from transformers import AutoConfig, AutoTokenizer

    folder = source if source.is_dir() else source.parent
    files = [source] if source.suffix == ".gguf" else sorted(folder.glob("*.gguf")) if source.is_dir() else []
    of_gguf = {"gguf_file": files[0].name} if files else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **of_gguf)
    except (OSError, ValueError) as e:
        raise UnsupportedError(
            f"calibrate (--calibrate): {folder} has no tokenizer that transformers reads, so a text cannot become token ids "
            f"({type(e).__name__}). Give the ids in an .npy file.",
            path=str(folder),
        ) from e
    ids = np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)
    if not ids.size:
        raise OptionError("calibrate (--calibrate): the text has no tokens.")
    before, after = _around(tokenizer)
    if not before and not after:
        return ids
    config = AutoConfig.from_pretrained(folder, **of_gguf).get_text_config()
    most = min(TEXT_LENGTH, tokenizer.model_max_length, getattr(config, "max_position_embeddings", None) or TEXT_LENGTH)
    inner = min(max(1, most - len(before) - len(after)), ids.size)
    pieces = ids[: ids.size // inner * inner].reshape(-1, inner)
    ahead, behind = (np.tile(np.array(side, np.int64), (len(pieces), 1)) for side in (before, after))
    return np.concatenate([ahead, pieces, behind], axis=1)


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and behind a text."""
    inner, whole = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    at = next((n for n in range(len(whole) - len(inner) + 1) if whole[n : n + len(inner)] == inner), 0)
    return whole[:at], whole[at + len(inner) :]
