"""The winners of earlier calls, found again by facts of a call.

Facts are read lazily, when a kernel reads them, and a memo records which: calls of a key that agree in all facts read so far
share one winner. Reading facts takes longer than a small kernel, so a winner is also remembered by the attributes of the
operands that determine those facts, which are read in C: most calls repeat an earlier one, and are found there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..locks import reentrant
from ..tensors.tensor import ScaledTensor
from .facts import IMPLIED, OF_SHAPE, SHAPES

if TYPE_CHECKING:
    from .facts import Question, Values

_T = TypeVar("_T")

#: The number of winners per key (least recently used ones are dropped).
LIMIT = 512


class Memo(Generic[_T]):
    """Winners by key, and by the facts of a call. Threads may use it at the same time."""

    def __init__(self) -> None:
        self._by_key: dict[Any, _OfKey[_T]] = {}
        self._learning = reentrant()

    def repeated(self, key: Any, values: tuple[Any, ...]) -> _T | None:
        """The winner of a call whose attributes are those of an earlier one."""
        of_key = self._by_key.get(key)
        if of_key is None:
            return None
        attributes = of_key.read_attributes(values)
        try:
            winner = of_key.by_attributes.get(attributes)
        except TypeError:  # see `_OfKey.remember`
            return None
        if winner is not None and len(of_key.by_attributes) > LIMIT // 2:
            _used(of_key.by_attributes, attributes)
        return winner

    def known(self, key: Any, values: Values) -> _T | None:
        """The winner of a call whose facts are those of an earlier one."""
        of_key = self._by_key.get(key)
        if of_key is None:
            return None
        facts = of_key.facts_of(values)
        winner = of_key.by_facts.get(facts)
        if winner is not None:
            _used(of_key.by_facts, facts)
            of_key.remember(values, winner)
        return winner

    def learn(self, key: Any, values: Values, read: Iterable[Question], winner: _T) -> None:
        """Keep the winner of a call, for which these facts were read."""
        with self._learning:
            of_key = self._by_key.get(key)
            asked = dict.fromkeys([*(() if of_key is None else of_key.facts), *read])
            facts = tuple([(fact, slot) for fact, slot in asked if (IMPLIED.get(fact), slot) not in asked])
            if of_key is None or of_key.facts != facts:  # a new fact was read: winners so far do not have it
                of_key = self._by_key[key] = _OfKey(facts, values)
            of_key.by_facts[of_key.facts_of(values)] = winner
            if len(of_key.by_facts) > LIMIT:
                of_key.by_facts.popitem(last=False)
            of_key.remember(values, winner)

    def counts(self) -> list[int]:
        """The number of winners of each key."""
        return [len(of_key.by_facts) for of_key in self._by_key.values()]


class _OfKey(Generic[_T]):
    """The winners of one key.

    facts: those that its kernels read. read_attributes: reads the attributes that determine them, of all values at once.
    """

    __slots__ = ("by_attributes", "by_facts", "facts", "read_attributes")

    def __init__(self, facts: tuple[Question, ...], values: Values) -> None:
        self.facts = facts
        self.by_facts: OrderedDict[tuple[Hashable, ...], _T] = OrderedDict()
        self.by_attributes: OrderedDict[Hashable, _T] = OrderedDict()
        paths: dict[int, dict[str, None]] = {}
        others: list[tuple[Callable[[Any], Hashable], int]] = []
        for fact, slot in facts:
            if fact in OF_SHAPE:
                paths.setdefault(slot, {}).update(dict.fromkeys(SHAPES[isinstance(values[slot], ScaledTensor)]))
            elif isinstance(fact, str):
                paths.setdefault(slot, {})[fact] = None
            else:
                others.append((fact, slot))
        self.read_attributes = _reading([*((attrgetter(*names), slot) for slot, names in paths.items()), *others])

    def facts_of(self, values: Values) -> tuple[Hashable, ...]:
        """The call's value of each fact."""
        return tuple([attrgetter(f)(values[slot]) if isinstance(f, str) else f(values[slot]) for f, slot in self.facts])

    def remember(self, values: Values, winner: _T) -> None:
        """Keep the winner for calls with the attributes of these values."""
        with suppress(TypeError):  # a symbolic dimension has no hash
            self.by_attributes[self.read_attributes(values)] = winner
        if len(self.by_attributes) > LIMIT:
            with suppress(KeyError):  # another thread has dropped the entry
                self.by_attributes.popitem(last=False)


def _used(winners: OrderedDict[Any, Any], key: Hashable) -> None:
    """Mark an entry as most recently used."""
    with suppress(KeyError):  # another thread has dropped it
        winners.move_to_end(key)


def _reading(readers: list[tuple[Callable[[Any], Hashable], int]]) -> Callable[[Any], Hashable]:
    """One function for all of them. Their calls are written out: a loop costs as much as the reads."""
    named = {f"_{n}": read for n, (read, _) in enumerate(readers)}
    reads = ", ".join([f"_{n}(values[{slot}])" for n, (_, slot) in enumerate(readers)])
    return eval(f"lambda values: ({reads})", named)
