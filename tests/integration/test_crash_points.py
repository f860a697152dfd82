"""A run crashes at each of its file operations, by kill or power cut, whole or torn, and goes on to its end.

The full set, with more power cuts and runs than fit into every test, is ``tests/benchmarks/crash_points.py``.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from faults import mutants, named
from faults.crashes import State, record, recover, states

CUTS = 1
ENOUGH = 250
"""Crashes after which a mutant counts as alive."""


@pytest.fixture(scope="module")
def crashes() -> list[State]:
    points, promises = record()
    return list(states(points, promises, CUTS))


def test_every_kind_of_operation_is_a_crash_point(crashes: list[State]) -> None:
    """What the other tests stand on: the run does everything that a run does, and crashes differ from each other."""
    calls = Counter(point.call.name for point in record()[0])
    assert calls.keys() >= {"mkdir", "create", "write", "pwrite", "fsync", "fdatasync", "link", "replace", "unlink"}
    places = [point.call.path for point in record()[0]]
    for place in ("ring/epochs/", "ring/reg/", "ring/.CONTROL", "ring/chains/", "checkpoints/"):
        assert any(f"/{place}" in path for path in places), place
    assert any(path.endswith("00000002.seg") for path in places), "segments roll"
    assert any(point.call.name == "unlink" and point.call.path.endswith(".seg") for point in record()[0]), "reclaim"
    kinds = Counter(state.kind for state in crashes)
    assert min(kinds[kind] for kind in ("killed before", "killed within", "no power before")) > 50
    assert len(crashes) > 400


@pytest.mark.parametrize("part", range(4))
def test_C6_a_crash_at_any_operation_loses_nothing_and_trains_nothing_twice(crashes: list[State], part: int) -> None:
    for state in crashes[part::4]:
        try:
            recover(state)
        except Exception as error:
            error.add_note(f"{state.kind} operation {state.point.number}: {state.point.call[:2]}")
            raise


def test_a_kill_at_any_claim_is_survived_where_there_are_no_hard_links() -> None:
    points, promises = record(hard_links=False)
    claims = [point for point in points if "/ring/epochs" in point.call.path]
    crashes = [state for state in states(claims, promises, cuts=0) if state.kind == "killed before"]
    assert len(crashes) > 10
    for state in crashes:
        recover(state, hard_links=False)


def killer(mutant: mutants.Mutant, calls: set[str]) -> Exception | None:
    """What gives the mutant away at the first crash at one of ``calls`` that does; None if nothing has."""
    with mutant():
        points, promises = record()  # undisturbed, a mutant works
        crashes = list(states([point for point in points if point.call.name in calls], promises, cuts=6))
        for state in Random(0).sample(crashes, min(ENOUGH, len(crashes))):
            try:
                recover(state)
            except Exception as error:
                return error
    return None


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("NO_DATA_SYNC", {"fdatasync"}),
        ("NO_CHAIN_SYNC", {"pwrite", "create"}),
        ("NO_COMMIT", {"pwrite"}),
        ("NO_DIRECTORY_SYNC", {"mkdir", "create"}),
        ("NO_FILE_SYNC_BEFORE_RENAME", {"fsync"}),
        ("PUBLISH_IN_PLACE", {"write"}),
        ("CHECKPOINT_IN_PLACE", {"write"}),
        ("RECLAIM_WHAT_WAS_TRAINED", {"create"}),
        ("COMMIT_WITHOUT_WHAT_IS_OWED", {"create"}),
    ],
)
def test_without_this_step_some_crash_does_harm(name: str, calls: set[str]) -> None:
    assert killer(getattr(mutants, name), calls) is not None


def test_chain_names_that_come_back_do_harm_without_a_crash() -> None:
    with mutants.CHAIN_NAMES_COME_BACK(), pytest.raises(named.Violation, match="were durable and are lost"):
        record()


@pytest.mark.parametrize(
    ("scenario", "mutant"),
    [
        (named.trainer_that_sleeps_through_its_replacement, mutants.FENCE_BEFORE_THE_WRITE),
        (named.writer_that_was_taken_for_dead, mutants.NO_DEDUPE),
        (named.writer_that_is_restarted_behind_a_torn_record, mutants.APPEND_TO_THE_OLD_CHAIN),
        (named.evaluator_that_is_killed_before_its_result_is_durable, mutants.NO_SYNC_OF_RESULTS),
        (named.flipped_bits, mutants.NO_CHECKSUM),
        (named.flipped_bits, mutants.NO_CHECKSUM_OF_BODIES),
    ],
    ids=["fence", "dedupe", "new chain", "results", "checksum", "checksum of bodies"],
)
def test_a_scenario_made_for_a_step_passes_with_it_and_fails_without_it(
    scenario: named.Scenario, mutant: mutants.Mutant
) -> None:
    scenario()
    with mutant(), pytest.raises((named.Violation, ValueError, KeyError, TypeError)):
        scenario()
