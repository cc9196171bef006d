"""A call as `Kernel.accepts`, `score` and `plan` see it. The facts that they read are recorded."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from .. import targets
from ..arrays.frameworks import Device, Framework, dtype_name, ops_of, place_of
from ..codecs import Codec
from ..errors import UnsupportedError
from ..layouts import Layout
from ..operations import Operation
from ..options import DEFAULT, FLOAT32, PLAIN, CastOptions, ProductOptions
from ..recipes import ScalingRecipe
from ..tensors.tensor import ScaledTensor
from .facts import (
    ATTRIBUTES,
    FEATURES,
    FRAMEWORK,
    OPTIONS,
    RECIPE,
    A,
    B,
    Described,
    address_alignment,
    aligned_of,
    all_options,
    array_of,
    as_fact,
    bias_dtype,
    bucketed_shape,
    device_count,
    device_of_operand,
    is_contiguous,
    is_empty,
    layout_of,
    opaque_reader,
    option_reader,
    recipe_of,
    row_alignment,
    shape_of,
    strides_of,
)

if TYPE_CHECKING:
    from .facts import Question, Values


class _Recorder:
    """Reads facts of a call and records which. Kernels must not use `values`: reads of it are not recorded."""

    def __init__(self, values: Values, asked: dict[Question, None]) -> None:
        self.values, self._asked = values, asked

    def _note(self, slot: int, fact: str | Callable[[Any], Hashable]) -> None:
        self._asked[fact, slot] = None

    def _ask(self, slot: int, read: Callable[[Any], Any]) -> Any:
        """A fact that is compared directly."""
        self._note(slot, read)
        return read(self.values[slot])

    def _attribute(self, slot: int, name: str) -> None:
        """Record a fact that is compared by an attribute of the operand."""
        x = self.values[slot]
        scaled = isinstance(x, ScaledTensor)
        if isinstance(x, Described) or (not scaled and not hasattr(x, name)):
            return  # not recorded, or not an attribute of this framework's arrays
        self._note(slot, ATTRIBUTES[name][scaled])


class Operand(_Recorder):
    """Facts of one operand. For a ScaledTensor, dtype, strides and contiguity are those of its codes.

    recipe: the recipe of a ScaledTensor; for the operand of a cast, the recipe to write.
    shape: the logical shape. For the first operand, every length except the last is rounded up (see `bucket`), so that a kernel
        chosen for one batch size is reused for the next; `aligned` is computed from the exact shape.
    empty: whether it has no elements. aligned: the largest powers of two (up to 256) that divide the last two sides.
    strides: in bytes, or None where the framework has none. contiguous: whether in C order.
    address_alignment: the largest power of two (up to 256) that divides the address of each of its arrays, in bytes.
    row_alignment: the largest power of two (up to 256) that divides all strides in bytes, except that of adjacent items.
    devices: the number of devices that it is sharded over.
    """

    def __init__(self, slot: int, values: Values, asked: dict[Question, None]) -> None:
        super().__init__(values, asked)
        self.slot = slot

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operand) and all(getattr(self, name) == getattr(other, name) for name in _OPERAND_FACTS)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Operand({', '.join(f'{name}={getattr(self, name)!r}' for name in _OPERAND_FACTS)})"

    @property
    def recipe(self) -> ScalingRecipe | None:
        x = self.values[self.slot]
        recipe = recipe_of(x)
        if recipe is None and self.slot == A and self.values[RECIPE] is not None:
            self._note(RECIPE, "interned_key")
            return self.values[RECIPE]
        if isinstance(x, ScaledTensor):
            self._attribute(self.slot, "recipe")
        return recipe

    @property
    def dtype(self) -> str:
        self._attribute(self.slot, "dtype")
        x = self.values[self.slot]
        return x.dtype if isinstance(x, Described) else dtype_name(array_of(x))

    @property
    def shape(self) -> tuple[int, ...]:
        return self._ask(self.slot, bucketed_shape if self.slot == A else shape_of)

    @property
    def ndim(self) -> int:
        self._attribute(self.slot, "ndim")
        if isinstance(self.values[self.slot], ScaledTensor):
            self._attribute(self.slot, "storage")  # codes may have other axes there
        return len(self.values[self.slot].shape)

    @property
    def empty(self) -> bool:
        return self._ask(self.slot, is_empty)

    @property
    def layout(self) -> Layout | None:
        if isinstance(self.values[self.slot], ScaledTensor):
            self._attribute(self.slot, "layout")
        return layout_of(self.values[self.slot])

    @property
    def axis(self) -> int:
        x = self.values[self.slot]
        if isinstance(x, ScaledTensor):
            self._attribute(self.slot, "axis")
        return x.axis if isinstance(x, ScaledTensor | Described) else -1

    @property
    def storage(self) -> str:
        x = self.values[self.slot]
        if not isinstance(x, ScaledTensor):
            return PLAIN
        self._attribute(self.slot, "storage")
        return x.layout.storage

    @property
    def aligned(self) -> tuple[int, int]:
        return self._ask(self.slot, aligned_of)

    @property
    def strides(self) -> tuple[int, ...] | None:
        return self._ask(self.slot, strides_of)

    @property
    def contiguous(self) -> bool:
        return self._ask(self.slot, is_contiguous)

    @property
    def address_alignment(self) -> int:
        return self._ask(self.slot, address_alignment)

    @property
    def row_alignment(self) -> int:
        return self._ask(self.slot, row_alignment)

    @property
    def devices(self) -> int:
        return self._ask(self.slot, device_count)

    def storage_of(self, codec: Codec) -> str:
        """Name of the dtype that codes of `codec` are stored in, on the operand's framework."""
        x = self.values[self.slot]
        return codec.dtype or "uint8" if isinstance(x, Described) else ops_of(array_of(x)).storage(codec)

    def described(self) -> Described:
        """A description of this operand, without its values."""
        x = self.values[self.slot]
        if isinstance(x, Described):
            return x
        return Described(recipe_of(x), dtype_name(array_of(x)), tuple(x.shape), layout_of(x), self.axis, place_of(array_of(x)))


_OPERAND_FACTS = ("recipe", "dtype", "ndim", "shape", "layout", "axis", "storage", "aligned", "contiguous")


class Call(_Recorder):
    """The facts of one call: the argument of `Kernel.accepts`, `score` and `plan`.

    op, framework: their names. operation: the op's declaration. a, b: the operands; b is None where the op has only one.
    """

    def __init__(self, operation: Operation, framework: str, values: Values, asked: dict[Question, None] | None = None) -> None:
        super().__init__(values, {} if asked is None else asked)
        self.operation, self.op, self.framework = operation, operation.name, framework
        self.a = Operand(A, values, self._asked)
        self.b = None if values[B] is None else Operand(B, values, self._asked)

    @property
    def recipe(self) -> ScalingRecipe | None:
        """The recipe to write, or None."""
        recipe = self.values[RECIPE]
        if recipe is not None:
            self._note(RECIPE, "interned_key")
        return recipe

    @property
    def device(self) -> Device:
        """The device of the first operand, with its number and compute capability."""
        framework: Framework | None = self.values[FRAMEWORK]
        x = self.values[A]
        if isinstance(x, Described):
            return x.device
        if framework is not None and framework.device is not None:
            return self._ask(A, device_of_operand)
        if framework is None or len(framework.kinds) != 1:  # else there is only one kind
            self._attribute(A, "device")
        return place_of(array_of(x))

    @property
    def options(self) -> dict[str, Any]:
        """The keyword options that are not at their default; for `scale`, `seed`, `out`, `bias` only whether they are given."""
        return dict(all_options(self.values[OPTIONS])) if self._defaults else dict(self._ask(OPTIONS, all_options))

    def option(self, name: str, default: Any = None) -> Any:
        """One keyword option of the op; `default` if the op does not have it, or it is None."""
        options = self.values[OPTIONS]
        value = as_fact(name, options.get(name)) if self._defaults else self._ask(OPTIONS, option_reader(name))
        return default if value is None else value

    @property
    def bias(self) -> str | None:
        """The name of the dtype of a product's bias; None where it has none."""
        return None if self._defaults else self._ask(OPTIONS, bias_dtype)

    @property
    def _defaults(self) -> bool:
        """Whether all options are at their default. Such calls are cached separately, without reading options."""
        return self.values[OPTIONS] is DEFAULT or self.values[OPTIONS] is FLOAT32

    def cast_options(self) -> CastOptions:
        """The options of an op that casts."""
        options = self.values[OPTIONS]
        if isinstance(options, CastOptions):
            return options
        raise UnsupportedError(f"{self.op} does not cast: its options are those of a product.", op=self.op)

    def product_options(self) -> ProductOptions:
        """The options of a product or of `dequantize`."""
        options = self.values[OPTIONS]
        if isinstance(options, ProductOptions):
            return options
        raise UnsupportedError(f"{self.op} casts: its options are those of `cast`.", op=self.op)

    @property
    def storage(self) -> str:
        """The storage to write."""
        return self.option("storage", PLAIN)

    @property
    def stored(self) -> bool:
        """Whether any operand or the result is in a storage other than plain"""
        writes = self.operation.stores and self.storage != PLAIN
        return writes or any(operand.storage != PLAIN for operand in self.scaled)

    @property
    def opaque(self) -> str | None:
        """The kind of array without its own memory that an operand is, or None."""
        framework: Framework | None = self.values[FRAMEWORK]
        if framework is None or framework.opaque is None:
            return None
        read = opaque_reader(framework.opaque)
        for slot in (A, B):
            x = self.values[slot]
            if x is None or isinstance(x, Described):
                continue  # and no framework is imported
            if (kind := self._ask(slot, read)) is not None:
                return kind
        return None

    @property
    def scaled(self) -> tuple[Operand, ...]:
        """The operands that are ScaledTensors."""
        values = ((self.a, self.values[A]), (self.b, self.values[B]))
        return tuple([operand for operand, value in values if operand is not None and isinstance(value, ScaledTensor)])

    @property
    def features(self) -> frozenset[str]:
        """What kernels have to know of the formats of the operands and of the result; see `Format.features`."""
        features = frozenset[str]()
        for slot in (A, B, RECIPE):
            x = self.values[slot]
            recipe = x if slot == RECIPE else recipe_of(x)
            if recipe is None:
                continue
            if not isinstance(x, Described):
                self._note(slot, FEATURES[slot != RECIPE])
            features |= recipe.features if slot == RECIPE else recipe.format.features
        return features

    def makes(self, op: str, a: Any, b: Any = None, recipe: ScalingRecipe | None = None, **changed: Any) -> Call:
        """A call of the op named that a kernel makes in turn, for `Kernel.plan`.

        Operands are those of this call, or `Described` ones. changed: framework=, options=.
        """
        operation: Operation = targets.load(targets.REGISTRY)().operation(op)
        framework: str = changed.get("framework", self.framework)
        first, second = (x.values[x.slot] if isinstance(x, Operand) else x for x in (a, b))
        home = self.values[FRAMEWORK] if framework == self.framework else None
        options = changed.get("options", operation.default or DEFAULT)
        return Call(operation, framework, (first, second, recipe, options, home))
