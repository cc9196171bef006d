"""The tensors of a layer's quantized weights, as vLLM hands them over one by one, and the part of them that a rank holds."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import breccia
from breccia import CorruptFileError, LayoutError, ScaledTensor, ShapeError, UnsupportedError
from breccia.backend import TENSOR

from ..ops import TORCH


class Received(nn.Module):
    """Takes the components of the weights that vLLM joins to one. headers: of these weights, by the ids of their shards.

    vLLM finds a component as the parameter `weight.data` or `weight.scale` of the layer, and calls its `weight_loader`.
    """

    #: For models of vLLM that look for weights in BF16 before they are loaded.
    dtype = torch.uint8

    def __init__(self, headers: Mapping[Hashable, Any]) -> None:
        super().__init__()
        self._headers = dict(headers)
        self._parts: dict[Hashable, dict[str, Tensor]] = {shard: {} for shard in headers}
        names = {part.rpartition(".")[2] for header in headers.values() for part in header.parts}
        for name in sorted(names):
            parameter = nn.Parameter(torch.empty(0), requires_grad=False)
            parameter.weight_loader = self._loader(name)  # pyright: ignore[reportAttributeAccessIssue]
            self.register_parameter(name, parameter)

    def _loader(self, part: str) -> Any:
        def load(param: Tensor, loaded_weight: Tensor, *given: Hashable, **of_experts: Any) -> bool:
            """given: the id of a shard; of an expert its name, which says nothing more. Returns whether this rank has it."""
            if "expert_id" in of_experts:
                shard = of_experts["expert_id"], of_experts["shard_id"]
            else:
                shard = of_experts.get("shard_id", given[0] if given else None)
            if shard in self._parts:
                self._parts[shard][part] = loaded_weight.to(param.device)  # files are read on the CPU
            return shard in self._parts

        return load

    def tensors(self) -> dict[Hashable, ScaledTensor]:
        """The weights, by the ids of their shards. Raises CorruptFileError where a component did not come."""
        return {shard: self._tensor(header, self._parts[shard]) for shard, header in self._headers.items()}

    def _tensor(self, header: Any, parts: dict[str, Tensor]) -> ScaledTensor:
        names = [part.rpartition(".")[2] for part in header.parts]
        if missing := [part for part, name in zip(header.parts, names, strict=True) if name not in parts]:
            raise CorruptFileError(f"vLLM found no {' and no '.join(missing)} in the files; convert the checkpoint again.")
        dtypes = TORCH.dtypes(header.recipe.format)
        typed: dict[str, Any] = {
            name: part.view(getattr(torch, dtypes[name])) if part.dtype == torch.uint8 else part for name, part in parts.items()
        }
        return ScaledTensor(recipe=header.recipe, layout=header.layout, axis=header.axis, shape=header.shape, **typed)


def check_experts(headers: Mapping[tuple[int, str], Any], name: str) -> None:
    """Raise UnsupportedError where only some projections of a layer's experts are quantized.

    headers: of those that are, by (expert, projection). name: of the layer.
    """
    projections = sorted({"w1", "w2"} | {projection for _, projection in headers})
    experts = range(1 + max(expert for expert, _ in headers))
    lacking = [(expert, projection) for expert in experts for projection in projections if (expert, projection) not in headers]
    if lacking:
        (expert, projection), *_ = lacking
        raise UnsupportedError(
            f"{name}: {len(lacking)} of {len(experts) * len(projections)} projections of its experts are not quantized, the "
            f"first {projection} of expert {expert}. Convert the model again with a policy that quantizes all, or none.",
            name=name,
        )


def of_rank(tensor: ScaledTensor, axis: int, length: int, rank: int, ranks: int, name: str) -> ScaledTensor:
    """The part of a weight that a rank holds, of `length` along an axis. Ranks share parts where there are fewer of them.

    Raises LayoutError where the part does not begin and end with whole blocks, and ShapeError where the parts are not equal.
    """
    whole, lines = tensor.shape[axis], ("rows", "columns")[axis]
    if length == whole:
        return tensor
    parts = whole // length
    if parts * length != whole:
        raise ShapeError(f"{name}: {whole} {lines} are no multiple of the {length} of a rank.")
    start = rank * parts // ranks * length
    cut = slice(start, start + length)
    try:
        return tensor[cut] if axis == 0 else tensor[:, cut]
    except LayoutError as e:
        raise LayoutError(
            f"{name}: each of {ranks} ranks would hold {length} of {whole} {lines}, which is no whole number of blocks of "
            f"{tensor.recipe.spec!r}. Use another tensor_parallel_size, or convert under a recipe with shorter blocks."
        ) from e


def joined(tensors: list[ScaledTensor]) -> list[ScaledTensor]:
    """One tensor of the rows of all, where one recipe and one scale of the whole tensor can hold them; else these."""
    return [breccia.concat(tensors)] if all(_can_join(one, other) for one, other in pairwise(tensors)) else tensors


def _can_join(one: ScaledTensor, other: ScaledTensor) -> bool:
    whole_rows = one.shape[0] % (one.layout.block(one.axis)[0] or 1) == 0
    if one.recipe != other.recipe or not whole_rows or one.recipe.format.levels[0].block != TENSOR:
        return one.recipe == other.recipe and whole_rows
    scales = [tensor.scale if tensor.global_scale is None else tensor.global_scale for tensor in (one, other)]
    return torch.equal(*scales)
