"""The choice of one option for each group: never worse than any other, against all of them and against a bound."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest

from breccia_bridges.knapsack import Option, solve


def sums(groups: list[list[Option]], chosen: tuple[int, ...] | list[int]) -> tuple[Fraction, int]:
    """The damage and the bytes of a choice, exactly."""
    options = [group[n] for group, n in zip(groups, chosen, strict=True)]
    return sum((Fraction(each.damage) for each in options), Fraction(0)), sum(each.nbytes for each in options)


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_is_better(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        # Damages of few bits: whole multiples of the solver's unit, or differing by more than it.
        groups = [
            [Option(draw.randint(1, 12), draw.randint(0, 40) / 8) for _ in range(draw.randint(1, 4))]
            for _ in range(draw.randint(1, 6))
        ]
        limit = draw.randint(1, 50)
        every = [sums(groups, choice) for choice in itertools.product(*(range(len(group)) for group in groups))]
        fitting = [each for each in every if each[1] <= limit]
        found = solve(groups, limit)
        assert (found is None) == (not fitting)
        if found is not None:
            assert sums(groups, found) == min(fitting), "the least damage, and of equal ones the fewest bytes"


def test_a_choice_of_hundreds_of_groups_is_within_one_piece_of_the_relaxation() -> None:
    draw = np.random.default_rng(0)
    sizes = (4096 * 4096 + 64 * draw.integers(0, 1000, 200)).tolist()
    groups = [
        [Option(int(size * bits / 8) + 4, float(weight * 4.0**-bits)) for bits in (3.5, 4.125, 4.25, 4.5, 5.0, 6.25)]
        for size, weight in zip(sizes, np.exp(draw.normal(size=200)), strict=True)
    ]
    limit = sum(group[3].nbytes for group in groups)
    found = solve(groups, limit)
    assert found is not None and found == solve(groups, limit)
    damage, nbytes = sums(groups, found)
    assert nbytes <= limit
    # By duality no choice within the limit does less damage than the least of damage + price * (bytes - limit), for any price.
    options = np.array([[(one.damage, one.nbytes) for one in group] for group in groups])
    bound = max(
        np.min(options[..., 0] + price * options[..., 1], axis=1).sum() - price * limit
        for price in np.geomspace(1e-10, 1e-7, 400)
    )
    # Prices are 1.8 % apart, and the bound is flat at its maximum; FP64 sums of 200 terms are off by less than 2^-44.
    assert bound * (1 - 2**-40) <= float(damage) <= bound * 1.001


def test_a_damage_without_end_is_taken_only_where_nothing_else_fits() -> None:
    groups = [[Option(1, float("inf")), Option(2, 1.0)], [Option(1, 3.0), Option(2, 0.0)]]
    assert solve(groups, 3) == [1, 0]
    assert solve(groups, 2) == [0, 0]
    assert solve(groups, 1) is None


def test_equal_options_are_chosen_in_their_order_and_no_group_is_no_choice() -> None:
    assert solve([[Option(4, 1.0), Option(4, 1.0), Option(4, 2.0)]] * 3, 12) == [0, 0, 0]
    assert solve([], 0) == []
