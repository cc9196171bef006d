"""Quantize checkpoints slab by slab: verified after writing, and put at the destination only when complete."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from breccia import OptionError, Policy, ScalingRecipe
from breccia.internal import suggestion

from .calibration import Calibration
from .conversion import KEEP_CODES, Conversion
from .damage import Damages, Divergences
from .destination import location
from .dialect_writer import DialectWriter
from .engines import ENGINES, engine_of
from .journal import Journal
from .remote_path import is_remote, path_of
from .results import Advance, Report, Verify, no_progress
from .staging import Staging
from .target_bits import Target, check_policy_path, mixed, write_policy
from .text import byte_count_of
from .uploads import staged_at

#: In place of a recipe: the values that are quantized in the source are decoded to a dtype of a file.
DENSE = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    recipe: ScalingRecipe | str | Policy | Mapping[str, Any] | Sequence[ScalingRecipe | str] | None = None,
    *,
    target_bits: float | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    force: bool = False,
    dry_run: bool = False,
    histograms: bool = False,
    advance: Advance | None = None,
    source_dialect: str | None = None,
    dialect: str | None = None,
    activations: str | None = None,
    exact: bool = False,
    restart: bool = False,
    max_shard_size: int | str | None = None,
    max_memory: int | str = "1GiB",
    verify: str = "full",
    engine: str = "local",
    calibrate: Any = None,
    method: str | None = None,
    device: str | None = None,
) -> Report:
    """Quantize a checkpoint under `recipe`, or change how a quantized one is stored.

    source: a `.safetensors` file, or a folder of them (Hugging Face's layout): plain, quantized by breccia, or in any dialect
        that breccia reads; a `.gguf` file, whose tensors get transformers' names, or a folder with one; or such files of
        torch.save, where there are none of safetensors. Other files of a folder are copied, except weights in other formats,
        hidden folders and links to folders; config.json gets a `quantization_config` that names the recipe and the modules
        that keep their precision.
        Or a URL of such a file or folder, "s3://bucket/model", for which fsspec and the package of its protocol are needed.
        Scales of activations are dropped with the dialect that they belong to, except under "none".
        Values that the source has quantized keep their codes where the recipe holds them exactly, and are quantized again
        where it does not; those that the policy leaves are decoded to the model's dtype by config.json, BF16 by default.
    destination: a file or folder, like `source`; that of a `.gguf` file is a folder with config.json and the tokenizer's files,
        which transformers makes, or a `.safetensors` file of the weights alone. The dialect "gguf" has one `.gguf` file, with
        the keys of a source in GGUF, or those that config.json and tokenizer.json of a folder say. It appears under its name
        only when everything is written and verified; see `verify`. A link is replaced, not followed. For a URL, files are made
        in the user's cache folder, uploaded one by one, and put in their place at the end: no part looks like the whole.
    recipe: a recipe or its spec; or a policy: a mapping from patterns to recipes or "keep", the path of a YAML file with
        one, or the name of a preset, "deepseek-fp8", "nvfp4-mlp" or "int4-except-attention"; see `breccia.Policy`.
        Under one recipe, floating matrices and stacks of experts are quantized, except embeddings, norms, routers, output
        heads and the other kinds of `breccia.backend.KEPT`, as `quantize` does in every framework.
        "none" quantizes nothing: what the source has quantized keeps every code and scale, in breccia's files or, with
        `dialect`, in another library's. "bf16", "fp16" and "fp32" decode it to that dtype; plain tensors keep theirs.
        It may be left out with `dialect`: "none" for a source that is quantized, else the dialect's own default.
        Under `target_bits` a list of recipes and specs to choose among, "keep" for none; by default those of the dialect, or
        seven of 3.5 to 8.25 bits.
    target_bits: choose a recipe for each tensor, so that all that are quantized take at most so many bits per parameter, scales
        included, and the predicted damage is the least. The damage of a tensor is the share of its energy that is lost, times
        the square root of its parameters; under `calibrate` the KL divergence of the model when that tensor alone is quantized.
        Experts of a layer get one recipe, and under a dialect with a config the layers that engines compute as one.
        `Report.mix` has the choice, as a policy, which is also written beside the destination, `NAME.policy.yaml`: given as
        `recipe`, it writes the same bytes.
    include, exclude: shell-style globs over whole names, beside one recipe; each must match a tensor. `exclude` beats
        `include`, which beats the default.
    force: replace an existing file, or a folder that contains a checkpoint; otherwise FileExistsError, before anything is read.
    dry_run: check everything and report sizes from headers alone; write nothing.
    histograms: count the elements of quantized tensors by value, before and after.
    advance: called with a tensor's name and its source bytes after it was written and after it was verified.
    source_dialect: the name of the dialect of the source, where its config and tensors leave a choice.
    dialect: the name of the dialect to write, such as "compressed_tensors", so that the library's own loader opens the result;
        by default breccia's own files. Layers that engines compute as one (query, key and value; gate and up) get one scale of
        the whole tensor, where the recipe has such a scale.
    activations: what the dialect's config says of the inputs of layers: a recipe's spec, or "none"; by default what the
        library does for codes of that width.
    exact: raise InexactError, before anything is written, if a value would change: one that is not quantized in the source, and
        one whose numbers the recipe, or the dtype that it is decoded to, does not have; see `breccia.exactness`. Values whose
        own scales allow it are converted exactly also where their formats leave a choice; this reads them.
    restart: discard what an interrupted run to this destination has finished. Without it the same call goes on from the last
        finished tensor, with a warning that says so, and gives the same bytes; another call raises OptionError.
    max_shard_size: a folder's tensors become files of at most so many bytes, "5GB" or "512MiB", in the order of the source,
        `model-00001-of-00003.safetensors`, with an index; a value that has more gets a file of its own. By default each file of
        the source becomes one.
    max_memory: the largest peak of memory, beside what the process holds already and the pages of mapped files. Values are read
        and written by slabs, which are smaller under a small limit; codes that are kept, values of a few dialects, and with
        `exact` those whose formats leave a choice, whole: OptionError, before a byte is written, names a value that takes more,
        and the limit to give.
    verify: "full" reads each file back, compares its bytes with those written, and measures the errors of its decoded tensors;
        "bytes" leaves measuring out, so that the report has no error metrics; "none" reads nothing back.
    engine: "local" writes one file after the other in this process; "ray" many at a time, as tasks on the machines of a Ray
        cluster, which see the source and the destination (for a URL, the cache folder) under the same paths. The bytes and the
        report are the same, and either engine goes on with what the other one has begun. `advance` gets the tensors of several
        files interleaved. A task takes one CPU and `max_memory`. The cluster is the one that this program has joined, else the
        one that `ray.init` finds or starts. Raises WorkerError, a RuntimeError, where three workers in a row are lost at one
        tensor, or one does not see the files.
    calibrate: choose codes and scales by the inputs that the layers of a model of transformers have on a text: its path, or
        that of an .npy file of token ids, or an array of them, (tokens,) or (texts, length). A text is cut into pieces of at
        most 512 tokens, each with what the tokenizer puts around a text. The model runs block by block, in FP32, and each
        block sees the quantized ones before it. A run that was interrupted goes on after its last finished block. Recipes
        that can search for scales do, by "mse", unless they name another rule. `TensorReport.calibration` has what was done
        for each value.
    method: of calibration. "gptq", by default: error feedback; its fields are damping=0.01 and order=importance or given.
        "importance": only the search for scales, each column weighed by the mean square of its input. "awq": scales of
        columns, folded into the norm or the linear layer before, then as "importance"; its field is grid=20, the powers that
        are tried.
    device: what the model runs on under `calibrate`, in torch's spelling; the CPU by default.

    A file of a folder whose new header would be longer than readers accept becomes several, with an index.
    A tensor that would not shrink is kept as it is. Raises CorruptFileError for a source that breaks its format; DialectError
    for values that do not follow their dialect, and where two dialects are possible; UnsupportedError for a dialect that
    breccia does not read, for a source that is no checkpoint, and for a destination that is, contains or is in the source;
    OptionError for a `target_bits` that no choice meets;
    under `calibrate` ImportError without breccia-torch and transformers, NonFiniteError naming the layer whose inputs have NaN,
    OptionError for a URL as the source, and for another engine than "local";
    UnknownNameError for a pattern that matches no tensor; OSError where files cannot be read or written, ConnectionError for
    what the filesystem of a URL says; ImportError without the packages that a URL needs.

        >>> source, destination = tmp / "model.safetensors", tmp / "model-mxfp8.safetensors"
        >>> breccia.bridges.save_safetensors({"mlp.weight": np.ones((64, 32), np.float32)}, source)
        >>> report = breccia.bridges.convert(source, destination, "mxfp8")
        >>> report.recipes, report.bits_per_parameter
        (['mxfp8'], 8.25)
        >>> breccia.bridges.load_safetensors(destination)
        {'mlp.weight': breccia.ScaledTensor('mxfp8', shape=(64, 32), numpy cpu, 8.25 bits per value)}
    """
    verified = verification(verify, histograms)
    memory = byte_count_of(max_memory, "max_memory")
    calibration = Calibration.of(calibrate, method, device)
    if calibration is not None:
        _check_calibrated_here(path_of(source), engine)
    runs = engine_of(engine, memory)
    writer = None if dialect is None else DialectWriter.of(dialect, activations)
    target = Target.of(target_bits, recipe, include, exclude)
    if target is None:
        _check_given(recipe, writer, activations)
    chosen = None if recipe is None or target else _chosen(recipe, include, exclude, writer)
    src, dst = path_of(source), path_of(destination)
    staging = Staging(staged_at(location(dst)), keeps_journal=True, target=location(dst))
    if staging.moved and not dry_run:
        with staging:  # puts it back
            pass
    limit = None if max_shard_size is None else byte_count_of(max_shard_size, "max_shard_size")
    work = Conversion(src, staging, force, source_dialect, writer, limit, runs)
    mix = None
    if target is not None:
        if exact:
            raise OptionError(
                "exact=True (--exact) changes no value, and target_bits= (--target-bits) quantizes: use one.",
                target_bits=target_bits,
            )
        check_policy_path(dst, force)
        damages = Damages() if calibration is None else Divergences(calibration, src, memory, source_dialect)
        mix = mixed(target, work, damages, memory)
        chosen = None, mix.policy
    dense, policy = chosen or _chosen(work.default_recipe, include, exclude, writer)
    if calibration is not None:
        policy = calibration.searched(_calibrated(policy, dense, exact))
    report = Report(
        str(src), str(dst), policy.recipes[0] if policy and policy.recipes else None, is_conversion=True,
        dense=dense or "", dialect=dialect or "", verify=verified, calibration=calibration.method.spec if calibration else "",
        mix=mix,
    )  # fmt: skip
    work.plan(report, policy, dense, memory if exact else None)
    slab = work.estimates.slab(work.jobs, memory)
    options = {
        "recipe": (dense or KEEP_CODES) if policy is None else _spelled(policy),
        "dialect": dialect, "activations": activations, "source_dialect": source_dialect, "exact": exact,
        "histograms": histograms, "max_shard_size": limit, "verify": verified.value,
        **({"calibration": calibration.key} if calibration else {}),
    }  # fmt: skip
    journal = Journal(staging, work.key(options))
    if calibration is not None:
        work.calibrate(calibration, journal, memory, source_dialect)
    if not restart:
        journal.check()
    if dry_run:
        return work.planned()
    if restart:
        with Staging(staging.destination):  # removes what is there
            pass
    work.run(slab, histograms, advance or no_progress, journal)
    if mix is not None:
        write_policy(mix, src, dst, calibration.method.spec if calibration else "")
    return report


def verification(verify: str, histograms: bool) -> Verify:
    """What to verify. Raises OptionError for another word, and for histograms of values that are not decoded."""
    if verify not in (known := [one.value for one in Verify]):
        raise OptionError(f"verify takes {', '.join(map(repr, known))}; got {verify!r}{suggestion(str(verify), known)}")
    if histograms and verify != Verify.full:
        raise OptionError(
            f"histograms=True counts decoded values, and verify={str(verify)!r} decodes none. Use verify='full'.", verify=verify
        )
    return Verify(verify)


def _check_calibrated_here(source: Path, engine: str) -> None:
    """Raise OptionError where the model is not run: at a URL, and on other machines."""
    if is_remote(source):
        raise OptionError(
            f"calibrate= (--calibrate) runs a model that transformers opens from disk; {source} is a URL. Download it first.",
            source=str(source),
        )
    if engine in ENGINES and engine != "local":
        raise OptionError(
            f"calibrate= (--calibrate) runs the model in this process, and engine={engine!r} (--engine {engine}) runs in "
            "others. Use engine='local'.",
            engine=engine,
        )


def _calibrated(policy: Policy | None, dense: str | None, exact: bool) -> Policy:
    """The policy of a conversion that calibrates. Raises OptionError where nothing is cast, or nothing may change."""
    if policy is None:
        what = f"decodes values to {dense}" if dense else "keeps all codes"
        raise OptionError(f"calibrate= (--calibrate) chooses codes, and this conversion {what}: give a recipe (--recipe).")
    if exact:
        raise OptionError("exact=True (--exact) changes no value, and calibrate= (--calibrate) chooses others: use one.")
    return policy


def _check_given(recipe: Any, writer: DialectWriter | None, activations: str | None) -> None:
    """Raise OptionError where neither a recipe nor a dialect is given, and for activations without a dialect."""
    if writer is None and (recipe is None or activations is not None):
        what = (
            "activations= is for the config of another library's dialect" if recipe else "convert needs a recipe or a dialect"
        )
        raise OptionError(f"{what}: give dialect= (--dialect){'' if recipe else ', recipe= (--recipe), or both'}.")


def _chosen(
    recipe: Any, include: Sequence[str], exclude: Sequence[str], writer: DialectWriter | None
) -> tuple[str | None, Policy | None]:
    """What `_unquantized` returns, and the policy where that is None."""
    dense = _unquantized(recipe, include, exclude, writer)
    if dense is not None:
        return dense, None
    policy = Policy.of(recipe, include, exclude)
    _check_axes(policy)
    return None, policy


def _unquantized(recipe: Any, include: Sequence[str], exclude: Sequence[str], writer: DialectWriter | None) -> str | None:
    """The dtype to decode to, "" to keep all codes, or None for a recipe or policy."""
    if not isinstance(recipe, str) or recipe not in (KEEP_CODES, *DENSE):
        return None
    if include or exclude:
        raise OptionError(
            f"recipe {recipe!r} quantizes nothing, so include= and exclude= have nothing to choose; leave them out.",
            recipe=recipe,
        )
    if recipe in DENSE and writer is not None and not writer.file:
        raise OptionError(
            f"recipe {recipe!r} decodes all values, and {writer.dialect.title} stores those that are quantized: leave dialect= "
            f"(--dialect) out, or give a recipe such as {writer.dialect.recipes[0]!r}.",
            recipe=recipe,
            dialect=writer.dialect.name,
        )
    return DENSE.get(recipe, "")


def _spelled(policy: Policy) -> str:
    """All that a policy says: the spec of one recipe alone, or its rules with their specs."""
    rules = [*policy.rules, ("default", policy.default)]
    listed = [f"{pattern!r}: {rule.recipe.spec if rule else 'keep'}" for pattern, rule in rules]
    alone = policy.default if not policy.rules and policy.preset == Policy().preset else None
    return alone.recipe.spec if alone else ", ".join([*listed, f"preset: {policy.preset}"])


def _check_axes(policy: Policy) -> None:
    """Raise OptionError for a rule with contracted axes other than the last: those of a file's tensors are the last ones."""
    rules = [("default", policy.default), *policy.rules]
    for pattern, rule in rules:
        if rule is not None and rule.axes not in (None, (-1,)):
            raise OptionError(
                f"{policy.source}: the rule of {pattern!r} has blocks along axes {rule.axes}; files have them along the last "
                "axis. Give the recipe alone.",
                pattern=pattern,
            )
