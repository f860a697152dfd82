from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.training.batching import microbatches, pack, plan_step
from areal_hpc.types import StopReason, Trajectory

LENGTHS = [900, 640, 512, 333, 300, 210, 150, 77, 41, 13]
"""Sequence lengths for which another system's packers are known: see the expected sums below."""

sizes = st.lists(st.integers(1, 300), max_size=40)


def trajectory(num_prompt: int, num_generated: int, start: int = 0) -> Trajectory:
    total = num_prompt + num_generated
    mask = np.arange(total) >= num_prompt
    return Trajectory(
        token_ids=np.arange(start, start + total, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        reward=1.0,
        stop=StopReason.STOP,
    )


@given(sizes, st.integers(1, 5), st.integers(1, 4), st.integers(0, 9))
def test_a_plan_holds_every_trajectory_exactly_once(lengths: list[int], parts: int, ranks: int, seed: int) -> None:
    plan = plan_step(lengths, lengths, parts, ranks, seed)
    assert len(plan) == parts
    assert all(len(shares) == ranks for shares in plan)
    assert sorted(chain.from_iterable(chain.from_iterable(plan))) == list(range(len(lengths)))
    assert plan == plan_step(lengths, lengths, parts, ranks, seed)


@given(sizes, st.integers(1, 5), st.integers(2, 4), st.integers(0, 9))
def test_minibatches_do_not_depend_on_num_ranks(lengths: list[int], parts: int, ranks: int, seed: int) -> None:
    one = plan_step(lengths, lengths, parts, 1, seed)
    many = plan_step(lengths, lengths, parts, ranks, seed)
    assert [sorted(chain.from_iterable(shares)) for shares in many] == [shares[0] for shares in one]


def test_the_seed_decides_the_minibatches() -> None:
    assert plan_step(LENGTHS, LENGTHS, 2, 1, seed=1) != plan_step(LENGTHS, LENGTHS, 2, 1, seed=2)


@given(st.lists(st.tuples(st.integers(1, 300), st.booleans()), max_size=40), st.integers(1, 5), st.integers(0, 9))
def test_minibatches_share_trainable_trajectories_evenly(items: list[tuple[int, bool]], parts: int, seed: int) -> None:
    lengths, generated = [size for size, _ in items], [size * trains for size, trains in items]
    counts = [sum(generated[i] > 0 for i in shares[0]) for shares in plan_step(lengths, generated, parts, 1, seed)]
    assert max(counts) - min(counts) <= 1


@given(sizes.filter(bool), st.integers(1, 6))
def test_ranks_differ_by_at_most_the_longest_sequence(lengths: list[int], ranks: int) -> None:
    (shares,) = plan_step(lengths, lengths, 1, ranks, seed=0)
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths)


@pytest.mark.parametrize(
    ("ranks", "sums"),
    [(2, [1583, 1593]), (4, [735, 758, 783, 900])],  # what a Karmarkar-Karp partition of these lengths reaches
)
def test_shares_are_as_even_as_karmarkar_karp(ranks: int, sums: list[int]) -> None:
    (shares,) = plan_step(LENGTHS, LENGTHS, 1, ranks, seed=0)
    assert sorted(sum(LENGTHS[i] for i in share) for share in shares) == sums


def test_microbatches_by_hand() -> None:
    """First-fit decreasing by hand; another system's packer also needs four groups of 1,024 for these lengths."""
    assert microbatches(LENGTHS, 1024) == [[0, 7, 8], [1, 3, 9], [2, 4, 5], [6]]


@given(sizes, st.integers(1, 500), st.booleans())
def test_microbatches_keep_the_budget(lengths: list[int], budget: int, padded: bool) -> None:
    groups = microbatches(lengths, budget, padded=padded)
    assert sorted(chain.from_iterable(groups)) == list(range(len(lengths)))
    for group in groups:
        inside = [lengths[i] for i in group]
        cost = len(inside) * max(inside) if padded else sum(inside)
        assert cost <= budget or len(group) == 1
    assert groups == microbatches(lengths, budget, padded=padded)


@given(sizes, st.integers(300, 900))
def test_first_fit_leaves_at_most_one_group_half_empty(lengths: list[int], budget: int) -> None:
    totals = [sum(lengths[i] for i in group) for group in microbatches(lengths, budget)]
    assert sum(2 * total <= budget for total in totals) <= 1


def test_padded_rows_keep_like_lengths_together() -> None:
    assert microbatches([100, 1, 100, 1, 1], 200, padded=True) == [[0, 2], [1, 3, 4]]


def test_pack_lays_trajectories_end_to_end() -> None:
    batch = pack([trajectory(2, 3), trajectory(1, 1, start=50), trajectory(3, 0, start=90)], [0.5, -2.0, 9.0])
    assert batch.token_ids.tolist() == [0, 1, 2, 3, 4, 50, 51, 90, 91, 92]
    assert batch.boundaries.tolist() == [0, 5, 7, 10]
    assert batch.loss_mask.tolist() == [False, False, True, True, True, False, True, False, False, False]
    assert batch.advantages.tolist() == [0.0, 0.0, 0.5, 0.5, 0.5, 0.0, -2.0, 0.0, 0.0, 0.0]
    assert batch.versions.tolist() == [-1, -1, 3, 3, 3, -1, 3, -1, -1, -1]
    assert batch.num_trainable == 4
    assert batch.advantages.dtype == batch.behaviour.dtype == np.float32
    assert batch.token_ids.dtype == batch.versions.dtype == np.int32


def test_experts_stay_with_their_tokens() -> None:
    told = replace(trajectory(2, 1), experts=np.arange(12, dtype=np.uint8).reshape(3, 2, 2))
    assert pack([trajectory(1, 1), trajectory(2, 1)], [0.0, 0.0]).experts is None
    batch = pack([trajectory(1, 1), told, trajectory(1, 1)], [0.0, 0.0, 0.0])
    assert batch.experts is not None
    assert batch.experts[2:5].tolist() == np.arange(12).reshape(3, 2, 2).tolist()
    assert (batch.experts[[0, 1, 5, 6]] == 255).all()
    chosen = batch.select([1, 0]).experts
    assert chosen is not None
    np.testing.assert_array_equal(chosen, batch.experts[[2, 3, 4, 0, 1]])


def test_E17_an_empty_share_is_a_batch_of_nothing() -> None:
    batch = pack([], [])
    assert (batch.num_sequences, batch.num_trainable, batch.token_ids.dtype) == (0, 0, np.int32)
    assert microbatches(batch.lengths, 100) == []
    assert plan_step([], [], 2, 2, seed=1) == [[[], []], [[], []]]
