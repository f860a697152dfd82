"""A watermark against Python's own set."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.watermark import Watermark

numbers = st.lists(st.integers(0, 40), max_size=60)


@given(added=numbers)
def test_it_behaves_like_a_set(added: list[int]) -> None:
    watermark, reference = Watermark(), set[int]()
    for number in added:
        assert watermark.add(number) == (number not in reference)
        reference.add(number)
        assert len(watermark) == len(reference)
    assert list(watermark) == sorted(reference)
    assert all((number in watermark) == (number in reference) for number in range(50))


@given(added=numbers)
def test_it_is_kept_as_small_as_it_goes(added: list[int]) -> None:
    watermark = Watermark(above=added)
    assert watermark.low not in watermark
    assert all(number > watermark.low for number in watermark.above)


@given(added=numbers, low=st.integers(0, 10))
def test_its_state_survives_json(added: list[int], low: int) -> None:
    watermark = Watermark(low, added)
    assert Watermark.from_state(json.loads(json.dumps(watermark.state_dict()))) == watermark


def test_a_copy_goes_its_own_way() -> None:
    first = Watermark(2, [5])
    second = first.copy()
    second.add(2)
    assert (first.low, second.low) == (2, 3)
    assert first != second


def test_it_cannot_be_hashed() -> None:
    with pytest.raises(TypeError):
        hash(Watermark())


def test_a_million_consumed_prompts_cost_a_few_bytes() -> None:
    watermark = Watermark()
    for number in range(1_000_000):
        watermark.add(number ^ 1)  # neighbours arrive in the wrong order
    assert watermark.state_dict() == {"low": 1_000_000, "above": []}
