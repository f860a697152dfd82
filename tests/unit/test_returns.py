"""Token advantages against a loop in plain Python, recorded numbers, and any split over ranks."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.algorithms.returns import Gather, gae, lambdas, second_moment_bound, token_rewards, whiten
from areal_hpc.config.algorithm import GaeConfig, GaeLevel, Level, NormConfig

CASES = json.loads((Path(__file__).parents[1] / "data" / "algorithms.json").read_text(encoding="utf-8"))
NUMBERS = st.integers(-64, 64).map(lambda n: n / 16)
BATCH = NormConfig(mean=Level.BATCH, std=Level.BATCH)
TOKEN = st.tuples(NUMBERS, NUMBERS, st.booleans())  # reward, value, trainable
SEQUENCES = st.lists(st.tuples(st.lists(TOKEN, max_size=7), NUMBERS), min_size=1, max_size=4)  # tokens, bootstrap


def alone(numbers: list[float]) -> list[list[float]]:
    """The gather of one rank."""
    return [numbers]


def together(num_ranks: int, function: Any) -> list[Any]:
    """``function(rank, gather)`` on threads that gather like ranks do."""
    board: list[list[float]] = [[] for _ in range(num_ranks)]
    barrier = Barrier(num_ranks)

    def member(rank: int) -> Any:
        def gather(numbers: list[float]) -> list[list[float]]:
            board[rank] = numbers
            barrier.wait(10)
            told = [list(numbers) for numbers in board]
            barrier.wait(10)
            return told

        return function(rank, gather)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(member, range(num_ranks)))


def run(sequences: Any, config: GaeConfig) -> tuple[list[float], list[float]]:
    tokens = [token for sequence, _ in sequences for token in sequence]
    rewards, values, mask = ([token[i] for token in tokens] for i in range(3))
    advantages, returns = gae(
        rewards=np.array(rewards, dtype=np.float64),
        values=np.array(values, dtype=np.float64),
        bootstrap=np.array([last for _, last in sequences], dtype=np.float64),
        mask=np.array(mask, dtype=np.bool_),
        boundaries=np.cumsum([0, *(len(sequence) for sequence, _ in sequences)], dtype=np.int32),
        config=config,
    )
    return advantages.tolist(), returns.tolist()


def by_hand(sequences: Any, config: GaeConfig) -> tuple[list[float], list[float]]:
    """The definition, one sequence at a time: the sum of discounted errors, no recurrence (Schulman 2016, eq. 16)."""
    advantages, returns = [], []
    for tokens, bootstrap in sequences:
        turns: list[list[int]] = []
        for t, (_, _, trainable) in enumerate(tokens):
            if not trainable:
                continue
            joins = config.level is GaeLevel.TURN and turns and turns[-1][-1] == t - 1
            turns = [*turns[:-1], [*turns[-1], t]] if joins else [*turns, [t]]
        reward = [math.fsum(tokens[t][0] for t in turn) for turn in turns]
        value = [*(tokens[turn[0]][1] for turn in turns), bootstrap]
        lam = config.lam
        if config.alpha is not None and turns:
            lam = max(0.0, 1 - 1 / (config.alpha * len(turns)))
        error = [reward[k] + config.discount * value[k + 1] - value[k] for k in range(len(turns))]
        own = [0.0] * len(tokens), [0.0] * len(tokens)
        for k, turn in enumerate(turns):
            total = math.fsum((config.discount * lam) ** (j - k) * error[j] for j in range(k, len(turns)))
            for t in turn:
                own[0][t], own[1][t] = total, total + value[k]
        advantages += own[0]
        returns += own[1]
    return advantages, returns


@pytest.mark.parametrize("name", CASES["gae"])
def test_gae_agrees_with_recorded_numbers(name: str) -> None:
    """On trainable tokens; the recorded system also fills places that nobody trains on."""
    case = CASES["gae"][name]
    size = len(case["mask"]) // case["num_sequences"]
    rows = list(zip(case["rewards"], case["values"], map(bool, case["mask"]), strict=True))
    # Index t of the recorded values is the state before token t, so the last one is the state after the last token.
    sequences = [
        (rows[s * size : (s + 1) * size], cut * rows[(s + 1) * size - 1][1]) for s, cut in enumerate(case["cut"])
    ]
    config = GaeConfig(discount=case["discount"], lam=case["lam"], level=GaeLevel(case["level"]))
    advantages, returns = run(sequences, config)
    trainable = np.array(case["mask"], dtype=np.bool_)
    np.testing.assert_allclose(np.array(advantages)[trainable], np.array(case["advantages"])[trainable], atol=1e-5)
    np.testing.assert_allclose(np.array(returns)[trainable], np.array(case["returns"])[trainable], atol=1e-5)


@given(
    SEQUENCES,
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([1.0, 0.95, 0.0]),
    st.sampled_from([None, 0.5]),
    st.sampled_from(list(GaeLevel)),
)
def test_gae_is_its_definition(sequences: Any, discount: float, lam: float, alpha: float | None, level: Any) -> None:
    config = GaeConfig(discount=discount, lam=lam, alpha=alpha, level=level)
    found, expected = run(sequences, config), by_hand(sequences, config)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-9, atol=1e-9)


@given(SEQUENCES, st.sampled_from(list(GaeLevel)))
def test_E23_what_a_tool_wrote_is_no_step(sequences: Any, level: GaeLevel) -> None:
    """Whatever rewards and values stand on tokens that this run did not sample, nothing changes."""
    config = GaeConfig(discount=0.9, lam=0.8, level=level)
    other = [([t if t[2] else (9.0, -9.0, False) for t in tokens], last) for tokens, last in sequences]
    assert run(sequences, config) == run(other, config)
    if level is GaeLevel.TOKEN:
        short = [([t for t in tokens if t[2]], last) for tokens, last in sequences]
        kept = [t[2] for tokens, _ in sequences for t in tokens]
        assert np.array(run(sequences, config)[0])[kept].tolist() == run(short, config)[0]


@given(SEQUENCES, st.sampled_from(list(GaeLevel)))
def test_packing_changes_no_advantage(sequences: Any, level: GaeLevel) -> None:
    config = GaeConfig(discount=0.9, lam=0.8, level=level)
    alone_each = [run([sequence], config)[0] for sequence in sequences]
    assert run(sequences, config)[0] == [a for one in alone_each for a in one]


def test_a_critic_that_knows_the_return_leaves_no_advantage() -> None:
    tokens = [(0.0, 1.0, True)] * 4 + [(1.0, 1.0, True)]
    assert run([(tokens, 0.0)], GaeConfig(lam=0.95))[0] == pytest.approx([0.0] * 5, abs=1e-12)


def test_only_what_was_cut_goes_on_with_a_value() -> None:
    """An answer that ended earns its reward and no more; one that was cut is worth what the critic says of its end."""
    ended, cut = run([([(0.0, 0.0, True)], 0.0), ([(0.0, 0.0, True)], 0.75)], GaeConfig())[0]
    assert (ended, cut) == (0.0, 0.75)


def test_lambda_by_length_agrees_with_recorded_numbers() -> None:
    case = CASES["lambdas"]
    found = lambdas(np.array(case["steps"]), GaeConfig(alpha=case["alpha"]))
    np.testing.assert_allclose(found, case["lambda"], atol=1e-6)
    assert lambdas(np.array([3]), GaeConfig(lam=0.7)).tolist() == [0.7]


@given(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=4))
def test_the_outcome_stands_on_the_last_trainable_token(masks: list[list[bool]]) -> None:
    boundaries = np.cumsum([0, *map(len, masks)], dtype=np.int32)
    outcomes = np.arange(1.0, len(masks) + 1)
    rewards = token_rewards(outcomes, np.array([m for mask in masks for m in mask], dtype=np.bool_), boundaries)
    for s, mask in enumerate(masks):
        own = rewards[boundaries[s] : boundaries[s + 1]].tolist()
        last = max((t for t, m in enumerate(mask) if m), default=None)
        assert own == [outcomes[s] if t == last else 0.0 for t in range(len(mask))]


@given(st.lists(st.lists(NUMBERS, max_size=5), min_size=1, max_size=3), st.booleans())
def test_whitening_is_that_of_all_tokens_at_once(parts: list[list[float]], unbiased: bool) -> None:
    config = NormConfig(mean=Level.BATCH, std=Level.BATCH, unbiased=unbiased)
    found = [x for part in whiten([np.array(part) for part in parts], config, alone) for x in part.tolist()]
    values = np.array([x for part in parts for x in part])
    if values.size < 2 or np.ptp(values) == 0:
        assert found == [0.0] * values.size
    else:
        np.testing.assert_allclose(found, (values - values.mean()) / (values.std(ddof=int(unbiased)) + 1e-5), atol=1e-9)


@pytest.mark.parametrize("mean", [Level.NONE, Level.BATCH])
@pytest.mark.parametrize("std", [Level.NONE, Level.BATCH])
def test_whitening_leaves_out_what_it_is_told_to(mean: Level, std: Level) -> None:
    values = np.array([1.0, 2.0, 6.0])
    (found,) = whiten([values], NormConfig(mean=mean, std=std), alone)
    expected = values - (3.0 if mean is Level.BATCH else 0.0)
    np.testing.assert_allclose(found, expected / (np.sqrt(7.0) + 1e-5) if std is Level.BATCH else expected)


def test_equal_advantages_give_exactly_zero() -> None:
    assert whiten([np.full(3, 0.1), np.full(4, 0.1)], BATCH, alone)[1].tolist() == [0.0] * 4


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_E24_statistics_are_of_all_ranks(num_ranks: int) -> None:
    """However tokens fall on ranks, also when one has none, each has the advantage that one rank would give it."""
    values = np.random.default_rng(0).normal(size=40) ** 3
    share = np.random.default_rng(1).integers(0, num_ranks - 1, size=40)  # the last rank has nothing
    (expected,) = whiten([values], BATCH, alone)

    def member(rank: int, gather: Gather) -> Any:
        return whiten([values[share == rank]], BATCH, gather)[0], second_moment_bound(
            np.square(values[share == rank]).astype(np.float32), 0.5, gather
        )

    results = together(num_ranks, member)
    for rank, (found, _) in enumerate(results):
        np.testing.assert_allclose(found, expected[share == rank], rtol=1e-9)
    assert {bound for _, bound in results} == {second_moment_bound(np.square(values).astype(np.float32), 0.5, alone)}


@given(st.lists(st.sampled_from([0.0, 0.01, 0.09, 0.25, 1.0, 100.0]), max_size=12), st.sampled_from([0.04, 0.3, 2]))
def test_the_bound_keeps_the_most_that_it_may(squares: list[float], threshold: float) -> None:
    array = np.array(squares, dtype=np.float32)
    bound = second_moment_bound(array, threshold, alone)
    kept = array[array <= bound].astype(np.float64)
    assert kept.size > 0 or not squares
    if kept.size and kept.max() > array.min():
        assert kept.mean() < threshold
    left_out = array[array > bound]
    if left_out.size:  # the next larger ones as well would be too much
        more = array[array <= left_out.min()].astype(np.float64)
        assert more.mean() >= threshold


def test_the_bound_agrees_with_recorded_numbers() -> None:
    case = CASES["m2po_sorted"]
    squares = np.array(case["squares"], dtype=np.float32)
    bound = second_moment_bound(squares, case["threshold"], alone)
    assert (squares <= bound).astype(int).tolist() == case["kept"]


def test_the_mean_of_what_is_kept_is_below_the_threshold_not_at_it() -> None:
    assert second_moment_bound(np.array([0.0, 0.5], dtype=np.float32), 0.25, alone) < 0.5


def test_E17_no_tokens_anywhere() -> None:
    assert run([([], 0.0)], GaeConfig()) == ([], [])
    assert [part.size for part in whiten([np.zeros(0)], BATCH, alone)] == [0]
    assert second_moment_bound(np.zeros(0, np.float32), 0.04, alone) == np.inf
