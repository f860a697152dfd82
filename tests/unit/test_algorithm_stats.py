"""Statistics of parts, merged in any order, are those of the whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.algorithms.stats import Stats, finish, fraction_of, max_of, mean_of, merge, min_of

VALUES = st.lists(st.tuples(st.integers(-64, 64), st.booleans()), max_size=8)


def stats_of(entries: list[tuple[int, bool]]) -> Stats:
    values = torch.tensor([value for value, _ in entries], dtype=torch.float32)
    where = torch.tensor([chosen for _, chosen in entries], dtype=torch.bool)
    return {
        "x": mean_of(values, where),
        "x_max": max_of(values, where),
        "x_min": min_of(values, where),
        "positive_fraction": fraction_of(values > 0, where),
    }


@given(st.lists(VALUES, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_merged_parts_are_the_whole(parts: list[list[tuple[int, bool]]], random: Any) -> None:
    chosen = [value for part in parts for value, taken in part if taken]
    random.shuffle(parts)
    merged = finish(merge([stats_of(part) for part in parts]))
    if not chosen:
        assert all(math.isnan(value) for value in merged.values())
        return
    assert merged == pytest.approx(
        {
            "x": sum(chosen) / len(chosen),
            "x_max": max(chosen),
            "x_min": min(chosen),
            "positive_fraction": sum(value > 0 for value in chosen) / len(chosen),
        }
    )


def test_E18_one_value_is_enough() -> None:
    assert finish(stats_of([(3, True)])) == {"x": 3.0, "x_max": 3.0, "x_min": 3.0, "positive_fraction": 1.0}


def test_merging_twice_is_merging_once() -> None:
    parts = [stats_of([(1, True)]), stats_of([(2, True), (9, False)]), stats_of([])]
    assert finish(merge([merge(parts[:2]), parts[2]])) == finish(merge(parts))
    assert merge([]) == {}


def test_what_is_not_counted_may_be_nan_and_nothing_keeps_a_graph() -> None:
    values = torch.tensor([math.nan, 2.0], requires_grad=True)
    where = torch.tensor([False, True])
    for stat in (mean_of(values, where), max_of(values, where), min_of(values, where)):
        assert stat[0] == 2.0
        assert not stat[0].requires_grad
