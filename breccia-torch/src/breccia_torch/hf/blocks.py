"""A model of transformers that runs block by block: its other weights are not in memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import breccia
from breccia import ScaledTensor, UnknownNameError, UnsupportedError
from breccia.internal import abbreviated

from .experts import NAME
from .spots import Spot, spots_of

#: The arguments of a call.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Reached(Exception):
    """The last block is reached: what comes after it need not run."""


class Blocks:
    """The blocks of a decoder or encoder, which are filled with their weights one at a time.

    model: on the meta device, except buffers that no file has, such as rotary frequencies. names: of its blocks, in order.
    spots: where each value of the checkpoint lies.

    Raises UnsupportedError for a model without a list of blocks.
    """

    def __init__(self, source: Path, checkpoint: Any, device: Any) -> None:
        self.source, self.checkpoint, self.device = source, checkpoint, device
        self.model = _empty_model(source, device)
        self.spots = spots_of(self.model, checkpoint)
        self._by_target: dict[str, list[Spot]] = {}
        for spot in self.spots.values():
            self._by_target.setdefault(spot.target, []).append(spot)
        self.path = _longest_list(self.model, source)
        self.blocks: list[nn.Module] = list(self.model.get_submodule(self.path))
        self.names = [f"{self.path}.{n}" for n in range(len(self.blocks))]
        self._returns_tuple = False
        #: Values, FP32, that are read in place of those of the checkpoint, by their names there.
        self.replaced: dict[str, Tensor] = {}
        shared: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            shared.setdefault(id(parameter), []).append(name)
        #: The names of each parameter that has several. Its objects are other ones after it was filled and emptied.
        self._tied = {name: names for names in shared.values() if len(names) > 1 for name in names}

    # -- weights ---------------------------------------------------------------------------------------------------

    def fill(self, module: nn.Module, name: str, *, recurse: bool = True) -> None:
        """Read the parameters of a module, and the buffers that files have. Raises UnknownNameError for missing ones."""
        found: dict[int, Tensor] = {}
        missing: list[str] = []
        for owner_name, owner in module.named_modules(prefix=name) if recurse else [(name, module)]:
            for leaf, tensor in _own(owner):
                if tensor.device.type != "meta":
                    continue
                if id(tensor) not in found:
                    new = torch.empty_like(tensor, device=self.device, dtype=torch.float32 if _floats(tensor) else None)
                    found[id(tensor)] = nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new
                setattr(owner, leaf, found[id(tensor)])
                if not self._read(owner_name, leaf):
                    missing.append(f"{owner_name}.{leaf}".lstrip("."))
        if missing:
            raise UnknownNameError(
                f"calibration: {self.source} lacks {abbreviated(missing)}, which {type(self.model).__name__} has. Check the "
                "architectures of its config.json.",
                names=missing,
            )

    def _read(self, owner: str, leaf: str) -> bool:
        """Read a parameter, which may be tied to one of another name. Is there a value for it?"""
        spots = self.spots_at(f"{owner}.{leaf}".lstrip("."))
        for spot in spots:
            value = self.replaced[spot.name] if spot.name in self.replaced else self.checkpoint[spot.name]
            tensor = breccia.dequantize(value) if isinstance(value, ScaledTensor) else torch.as_tensor(value)
            place = spot._replace(owner=owner, leaf=leaf).of(self.model, tuple(tensor.shape))
            if place.shape != tensor.shape:
                raise breccia.ShapeError(
                    f"calibration: {spot.name} has shape {tuple(tensor.shape)} in the file, and the model has "
                    f"{tuple(place.shape)} there.",
                    name=spot.name,
                )
            place.copy_(tensor)
        return bool(spots)

    def spots_at(self, target: str) -> list[Spot]:
        """The values of a parameter, which the files may have under the name of one that is tied to it."""
        return next((self._by_target[name] for name in self.tied(target) if name in self._by_target), [])

    def tied(self, target: str) -> list[str]:
        """The names of a parameter: of several, where it is tied."""
        return [target, *(name for name in self._tied.get(target, ()) if name != target)]

    def empty(self, module: nn.Module, *, recurse: bool = True) -> None:
        """Forget the parameters of a module, and the buffers that files have."""
        for owner in module.modules() if recurse else [module]:
            for leaf, tensor in _own(owner):
                like = torch.empty_like(tensor, device="meta")
                setattr(owner, leaf, nn.Parameter(like, requires_grad=False) if isinstance(tensor, nn.Parameter) else like)

    # -- running ---------------------------------------------------------------------------------------------------

    def embed(self, ids: Tensor) -> tuple[Tensor, list[Arguments]]:
        """The inputs of the first block for each row of `ids`, (rows, length, hidden), and the other arguments of each block.

        Raises UnsupportedError for a model whose blocks get arguments that depend on the text.
        """
        hidden: list[Tensor] = []
        first: list[Arguments] = []
        for row in ids:
            calls = self._recorded(row[None].to(self.device))
            hidden.append(calls[0][0][0][0] if calls[0][0] else calls[0][1]["hidden_states"][0])
            others = [_others(call) for call in calls]
            if not first:
                first = others
            elif len(hidden) == 2 and not all(_same(a, b) for a, b in zip(first, others, strict=True)):
                raise self._refusal("has blocks with arguments that depend on the text")
        return torch.stack(hidden), first

    def _recorded(self, row: Tensor) -> list[Arguments]:
        calls: list[Arguments] = []

        def pass_on(n: int) -> Callable[..., Any]:
            def forward(*arguments: Any, **options: Any) -> Any:
                calls.append((arguments, options))
                if n == len(self.blocks) - 1:
                    raise _Reached
                return arguments[0] if arguments else options["hidden_states"]

            return forward

        with self._forwards(pass_on):
            try:
                self.model(input_ids=row, use_cache=False)
            except _Reached:
                return calls
            except (TypeError, ValueError) as e:
                raise self._refusal(f"takes more than token ids ({e})") from e
        raise self._refusal(f"runs {len(calls)} of its {len(self.blocks)} blocks for a text")

    def _refusal(self, why: str) -> UnsupportedError:
        kind = type(self.model).__name__
        return UnsupportedError(
            f"calibration runs a model block by block, and {kind} {why}. Convert without --calibrate.", model=kind
        )

    def run(self, n: int, hidden: Tensor, arguments: Arguments) -> Tensor:
        """The output of a block for one text: hidden of shape (length, hidden)."""
        positional, options = arguments
        output = self.blocks[n](hidden[None], *positional, **options)
        self._returns_tuple = not isinstance(output, Tensor)
        return (output if isinstance(output, Tensor) else output[0])[0]

    def finish(self, ids: Tensor, hidden: Tensor) -> Iterator[Any]:
        """What the model returns for each row of `ids`; hidden: the outputs of the last block."""

        def skip(output: Tensor) -> Callable[[int], Callable[..., Any]]:
            result: Any = (output[None],) if self._returns_tuple else output[None]
            return lambda n: _always(result)

        for row, output in zip(ids, hidden, strict=True):
            with self._forwards(skip(output)):
                returned = self.model(input_ids=row[None].to(self.device), use_cache=False)
            yield returned

    @contextmanager
    def _forwards(self, make: Callable[[int], Callable[..., Any]]) -> Generator[None]:
        """Replace the functions of the blocks."""
        for n, block in enumerate(self.blocks):
            block.forward = make(n)
        try:
            yield
        finally:
            for block in self.blocks:
                del block.forward

    @contextmanager
    def outside(self) -> Generator[None]:
        """Fill modules outside the blocks when they are called, and empty them at the end."""
        inside = {id(module) for block in self.blocks for module in block.modules()}
        outer = [(n, m) for n, m in self.model.named_modules() if id(m) not in inside and any(_own(m))]
        names = {module: name for name, module in outer}

        def fill(module: nn.Module, *_: Any) -> None:
            self.fill(module, names[module], recurse=False)

        handles = [module.register_forward_pre_hook(fill) for module in names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module in names:
                self.empty(module, recurse=False)


def _always(result: Any) -> Callable[..., Any]:
    """A function that returns `result` for any arguments."""

    def function(*arguments: Any, **options: Any) -> Any:
        return result

    return function


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and persistent buffers of a module itself."""
    yield from list(module.named_parameters(recurse=False))
    transient = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
    yield from [(name, buffer) for name, buffer in module.named_buffers(recurse=False) if name not in transient]


def _floats(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point


def _others(call: Arguments) -> Arguments:
    """The arguments of a block but the first, which is the text's."""
    positional, options = call
    return (positional[1:], options) if positional else ((), {k: v for k, v in options.items() if k != "hidden_states"})


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or torch.equal(a, b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return type(a) is type(b)


def _longest_list(model: nn.Module, source: Path) -> str:
    """The name of the list of modules with the most parameters: the blocks."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    within = {name for name in lists for other in lists if name.startswith(f"{other}.")}
    outer: dict[str, nn.ModuleList] = {name: lists[name] for name in lists if name not in within}
    if not outer:
        raise UnsupportedError(
            f"calibration runs a model block by block, and {type(model).__name__} of {source} has no list of blocks. Convert "
            "without --calibrate.",
            model=type(model).__name__,
        )
    return max(outer, key=lambda name: sum(p.numel() for p in outer[name].parameters()))


def config_of(source: Path) -> Any:
    """transformers' config of a checkpoint: of the folder, or of a GGUF file."""
    folder = source if source.is_dir() else source.parent
    files = [source] if source.suffix == ".gguf" else sorted(folder.glob("*.gguf")) if source.is_dir() else []
    if not (folder / "config.json").exists() and not files:
        raise UnsupportedError(
            f"calibration runs the model, and {folder} has no config.json that describes it to transformers. Give the model's "
            "folder as the source.",
            path=str(source),
        )
    options = {"gguf_file": files[0].name} if files else {}
    config = transformers.AutoConfig.from_pretrained(folder, **options)
    for part in (config, *(getattr(config, key) for key in config.sub_configs)):
        if hasattr(part, "quantization_config"):
            delattr(part, "quantization_config")
    return config


def _empty_model(source: Path, device: Any) -> Any:
    """The model on the meta device, with the buffers that no file has on `device`."""
    config = config_of(source)
    known: Sequence[str] = config.architectures or ()
    kind = next((getattr(transformers, name) for name in known if hasattr(transformers, name)), None)
    with torch.device("meta"):
        make: Any = kind._from_config if kind else transformers.AutoModelForCausalLM.from_config
        model = make(config, dtype=torch.float32).eval()
    for module in model.modules():
        module._is_hf_initialized = False
        for name in module._non_persistent_buffers_set:
            if module._buffers[name] is not None:
                module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
    model.initialize_weights()
    model.requires_grad_(False)
    for part in (model.config, *(getattr(model.config, key) for key in model.config.sub_configs)):
        if hasattr(part, "_experts_implementation"):
            part._experts_implementation = NAME  # it lets the inputs of experts be observed
    return model
