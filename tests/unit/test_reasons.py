"""Why a job waits, in words that tell what to do."""

from __future__ import annotations

import pytest

from areal_hpc.cluster.reasons import FAMILIES, REASONS, explained


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("QOSGrpGRES", "quality of service together use as much"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "maintenance"),
        ("ReqNodeNotAvail", "maintenance"),
        ("DependencyNeverSatisfied", "without cluster.dependency"),
        ("AssocGrpGRESMinutes", "the budget may be spent"),
        ("AssocMaxJobsLimit", "sacctmgr show assoc"),
        ("QOSMaxWallDurationPerJobLimit", "more than its quality of service gives"),
        ("BeginTime", "requeued rests"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", "maintenance"),
    ],
)
def test_A43_A44_a_reason_becomes_a_sentence_with_what_to_do(reason: str, says: str) -> None:
    text = explained(reason)
    assert text.startswith(f"{reason}: ")
    assert says in text


def test_a_reason_of_tomorrow_is_shown_as_it_is() -> None:
    assert explained("Moonphase").startswith("Moonphase: `man squeue`")


def test_every_sentence_has_both_halves() -> None:
    assert all(meaning and advice for meaning, advice in [*REASONS.values(), *FAMILIES.values()])
