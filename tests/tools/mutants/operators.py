# pyright: basic, reportMissingImports=false
"""Mutation operators that cosmic-ray lacks: statements left out, and `in` for `not in`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cosmic_ray.operators.operator import Example, Operator
from parso.python.tree import Keyword


class DropStatement(Operator):
    """Replace a call, an augmented assignment or a raise by `pass`, and the value of a return by None."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "simple_stmt" and node.search_ancestor("funcdef") and _instead(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        old = node.children[0]
        node.children[0] = Keyword(_instead(old), old.start_pos, old.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("def f(x):\n    x.g(1)\n", "def f(x):\n    pass\n"),
            Example("def f(x):\n    x += 1\n", "def f(x):\n    pass\n"),
            Example("def f(x):\n    raise E(x)\n", "def f(x):\n    pass\n"),
            Example("def f(x):\n    return x\n", "def f(x):\n    return None\n"),
        )


def _instead(statement: Any) -> str:
    """What replaces a statement; nothing where DropStatement leaves it."""
    match statement.type:
        case "return_stmt":
            return "" if statement.children[1:] and statement.children[1].get_code().strip() == "None" else "return None"
        case "raise_stmt":
            return "pass"
        case "atom_expr":
            last = statement.children[-1]
            return "pass" if last.type == "trailer" and last.children[0] == "(" else ""
        case "expr_stmt":
            operator = statement.children[1]
            return "pass" if operator.type == "operator" and operator.value not in ("=", ":") else ""
        case _:
            return ""


class FlipMembership(Operator):
    """Replace `in` by `not in`, and `not in` by `in`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "comparison":
            yield from ((word.start_pos, word.end_pos) for word, _ in _memberships(node))

    def mutate(self, node: Any, index: int) -> Any:
        word, place = list(_memberships(node))[index]
        now = "in" if word.type == "comp_op" else "not in"
        node.children[place] = Keyword(now, word.start_pos, word.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return Example("x in y", "x not in y"), Example("x not in y", "x in y")


def _memberships(comparison: Any) -> Iterator[tuple[Any, int]]:
    """The words `in` and `not in` of a comparison, with their places among its children."""
    for place in range(1, len(comparison.children), 2):
        if comparison.children[place].get_code().split() in (["in"], ["not", "in"]):
            yield comparison.children[place], place


OPERATORS: dict[str, type[Operator]] = {o.__name__: o for o in (DropStatement, FlipMembership)}


class Provider:
    """These operators, as cosmic-ray finds a provider's."""

    def __iter__(self) -> Iterator[str]:
        return iter(OPERATORS)

    def __getitem__(self, name: str) -> type[Operator]:
        return OPERATORS[name]
