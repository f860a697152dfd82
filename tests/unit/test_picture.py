"""From what processes say to who waits for whom: every shape that waits can have."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.liveness.picture import Seen, explain, hung_engines, hung_workers
from areal_hpc.waits import ANYBODY, FILE_SYSTEM, REWARD_PROCESS, Achieved, Wait

QUIET_S = 25.0
LONG, SHORT = 40.0, 3.0


def seen(name: str, *waits: Wait, moved: Mapping[str, float] | None = None, **more: Any) -> Seen:
    """A process whose last achievements are ``moved`` seconds ago."""
    achieved = {what: Achieved(count=7, seconds=seconds) for what, seconds in (moved or {}).items()}
    return Seen(name=name, waits=waits, achieved=achieved, **more)


def wait(what: str, *parties: str, seconds: float = LONG, limit_s: float | None = None, **more: Any) -> Wait:
    return Wait(what=what, parties=parties, seconds=seconds, limit_s=limit_s, **more)


TICKET = wait("a free ticket", "trainer-0")
BATCH = wait("a batch of 16 groups for step 7", "rollout-0", "rollout-1", limit_s=1800.0)
ANSWERS = wait("an answer to /generate", "generator-0", limit_s=600.0, count=64, about="00000.e1.p7.s0.a0.t0")
IDLE = wait("requests", ANYBODY)
SILENT = "has given no sign of life for 40 s; process 4711 on node3"


def test_a_run_that_gets_on_is_told_as_a_chain_to_who_works() -> None:
    told = explain(
        [
            seen("generator-0", moved={"tokens generated": 0.2}),
            seen("rollout-0", TICKET, ANSWERS, moved={"groups sealed": 2.0}),
            seen("trainer-0", BATCH, moved={"steps trained": 40.0}),
        ],
        QUIET_S,
    )
    assert told.trouble == ()
    assert told.root == "generator-0"
    assert told.text().splitlines() == [
        "trainer-0 waits for rollout-0, rollout-1: a batch of 16 groups for step 7 (40 s of 1800 s)",
        "<- rollout-0 waits for generator-0: an answer to /generate (64 of them, the oldest for 40 s of 600 s: "
        "00000.e1.p7.s0.a0.t0)",
        "<- generator-0 waits for nobody; achieved: tokens generated 7 (0 s ago)",
    ]


def test_D27_the_silent_one_at_the_end_is_named_and_so_are_episode_engine_number_and_age() -> None:
    told = explain(
        [
            seen("generator-0", absent=SILENT, moved={"tokens generated": LONG}),
            seen("rollout-0", TICKET, ANSWERS),
            seen("trainer-0", BATCH),
        ],
        QUIET_S,
    )
    assert told.trouble == ("generator-0", "trainer-0")
    assert told.root == "generator-0"
    assert told.chain[1].startswith("rollout-0 waits for generator-0: an answer to /generate (64 of them, the oldest")
    assert "40 s of 600 s: 00000.e1.p7.s0.a0.t0" in told.chain[1]
    assert told.chain[2] == f"generator-0 {SILENT}"


def test_one_that_is_heard_of_but_achieves_nothing_is_the_root() -> None:
    """An engine that hangs while its HTTP thread and its heartbeat live on."""
    told = explain(
        [
            seen("generator-0", moved={"tokens generated": LONG}),
            seen("rollout-0", ANSWERS, moved={"groups sealed": LONG}),
            seen("trainer-0", BATCH),
        ],
        QUIET_S,
    )
    assert told.root == "generator-0"
    assert told.chain[-1] == "generator-0 waits for nobody; achieved: tokens generated 7 (40 s ago)"


def test_an_engine_that_is_idle_while_others_wait_for_it_is_the_root_and_else_no_trouble() -> None:
    rollout = seen("rollout-0", ANSWERS)
    told = explain([seen("generator-0", IDLE), rollout, seen("trainer-0", BATCH)], QUIET_S)
    assert told.root == "generator-0"
    assert "generator-0 waits for whoever asks: requests" in told.chain[-1]
    busy = seen("trainer-0", moved={"micro-batches": 1.0})
    assert explain([seen("generator-0", IDLE), seen("rollout-0", TICKET), busy], QUIET_S).trouble == ()


def test_a_file_system_that_does_not_answer_is_the_root_whatever_else_its_victim_waits_for() -> None:
    hung = wait("reading ring/CONTROL.json", FILE_SYSTEM)
    told = explain(
        [seen("generator-0", IDLE), seen("rollout-0", TICKET, ANSWERS, hung), seen("trainer-0", BATCH)], QUIET_S
    )
    assert told.root == "rollout-0"
    assert told.chain[-1].startswith("rollout-0 waits for the file system: reading ring/CONTROL.json (40 s)")


def test_a_file_system_that_takes_long_is_told_before_it_is_a_stall() -> None:
    hung = wait("reading ring/CONTROL.json", FILE_SYSTEM, seconds=SHORT)
    rollout = seen("rollout-0", TICKET, ANSWERS, hung, moved={"groups sealed": 4.0})
    told = explain([seen("generator-0", IDLE, moved={"tokens": 4.0}), rollout, seen("trainer-0", BATCH)], QUIET_S)
    assert (told.trouble, told.root) == ((), "rollout-0")
    assert "rollout-0 waits for the file system: reading ring/CONTROL.json (3 s)" in told.chain[-1]


HUNG = wait("reading ring/CONTROL.json", FILE_SYSTEM)
BUSY = seen("trainer-0", moved={"steps trained": 1.0})


@pytest.mark.parametrize(
    ("victim", "others"),
    [
        pytest.param(seen("rollout-1", TICKET, HUNG), [BUSY], id="a worker whose peers go on"),
        pytest.param(seen("evaluator-0", wait("newer weights", "trainer-0"), HUNG), [BUSY], id="the evaluator"),
        pytest.param(seen("generator-1", IDLE, HUNG), [BUSY], id="an engine that nobody asks"),
        pytest.param(seen("trainer-0", BATCH, HUNG), [seen("rollout-0", TICKET, moved={"turns": 2.0})], id="a trainer"),
        pytest.param(
            seen("rollout-0", wait("an agent to finish", "an agent", limit_s=9e9), HUNG), [BUSY], id="an agent service"
        ),
        pytest.param(
            seen("trainer-0", wait("writing the checkpoint of step 8", seconds=90.0, limit_s=1800.0), HUNG),
            [seen("rollout-0", moved={"turns": 2.0})],
            id="beside work within its limit",
        ),
    ],
)
def test_fault_24_who_hangs_in_a_file_call_is_trouble_whatever_else_it_waits_for(
    victim: Seen, others: list[Seen]
) -> None:
    told = explain([*others, victim], QUIET_S)
    assert (told.trouble, told.root) == ((victim.name,), victim.name)
    assert f"{victim.name} waits for the file system: reading ring/CONTROL.json (40 s)" in told.chain[-1]
    engines = hung_engines([*others, victim], QUIET_S)
    assert engines.keys() == ({victim.name} if victim.name.startswith("generator") else set())
    workers = hung_workers([*others, victim], QUIET_S)
    assert workers.keys() == ({victim.name} if victim.name.startswith("rollout") else set())


def test_fault_24_workers_that_hang_together_with_a_trainer_are_no_matter_of_theirs() -> None:
    worker, silent = seen("rollout-0", TICKET, HUNG), seen("rollout-1", absent="has given no sign of life for 40 s")
    assert hung_workers([BUSY, worker, silent], QUIET_S) == {
        "rollout-0": "rollout-0 waits for the file system: reading ring/CONTROL.json (40 s); achieved: nothing yet",
        "rollout-1": "rollout-1 has given no sign of life for 40 s",
    }
    assert hung_workers([seen("trainer-1", BATCH, HUNG), worker, silent], QUIET_S) == {}
    assert hung_workers([BUSY, seen("rollout-0", TICKET), seen("rollout-1", HUNG, ended=True)], QUIET_S) == {}


@pytest.mark.parametrize(
    "lives",
    [
        pytest.param({"moved": {"turns": 3.0}}, id="another thread gets on"),
        pytest.param({"ended": True}, id="it has ended since"),
    ],
)
def test_a_slow_disk_stops_nobody_who_gets_on(lives: Mapping[str, Any]) -> None:
    assert explain([BUSY, seen("rollout-0", TICKET, HUNG, **lives)], QUIET_S).trouble == ()


def test_a_circle_is_named_as_such() -> None:
    told = explain([seen("rollout-0", TICKET), seen("trainer-0", BATCH)], QUIET_S)
    assert told.root == "trainer-0, rollout-0"
    assert told.chain[-1] == "trainer-0: each of trainer-0, rollout-0 waits for the next"
    assert len(told.chain) == 3


def test_a_circle_further_on_is_told_with_the_way_to_it() -> None:
    told = explain(
        [
            seen("evaluator-0", wait("an answer", "generator-0")),
            seen("generator-0", wait("weights", "generator-1")),
            seen("generator-1", wait("weights", "generator-0")),
        ],
        QUIET_S,
    )
    assert [line.split()[0] for line in told.chain] == ["evaluator-0", "generator-0", "generator-1", "generator-0:"]
    assert told.root == "generator-0, generator-1"


def test_waits_in_a_ring_of_all_are_no_circle_while_one_way_leads_to_somebody_who_works() -> None:
    """The normal state of a full ring: the worker waits for tickets and for answers, the trainer for groups."""
    for worker in (seen("generator-0", moved={"tokens generated": 1.0}), seen("generator-0", absent=SILENT)):
        told = explain([worker, seen("rollout-0", TICKET, ANSWERS), seen("trainer-0", BATCH)], QUIET_S)
        assert told.root == "generator-0"
        assert "trainer-0" in told.trouble or not worker.absent


@pytest.mark.parametrize("others", [2, 3])
def test_fault_47_a_rank_that_skips_a_collective_is_named_by_those_that_do_not(others: int) -> None:
    ranks = [f"trainer-{rank}" for rank in range(others + 1)]
    meeting = [
        seen(name, wait("the sum of gradients", *(set(ranks) - {name}), limit_s=2100.0), moved={"micro-batches": LONG})
        for name in ranks[:-1]
    ]
    told = explain([*meeting, seen(ranks[-1], moved={"micro-batches": LONG})], QUIET_S)
    assert told.root == ranks[-1]
    assert told.trouble == tuple(ranks)
    busy = seen(ranks[-1], moved={"micro-batches": SHORT})  # it only takes longer
    assert explain([*meeting, busy], QUIET_S).trouble == ()


def test_fault_47_ranks_in_two_different_collectives_are_a_circle() -> None:
    told = explain(
        [
            seen("trainer-0", wait("the sum of gradients", "trainer-1", limit_s=2100.0)),
            seen("trainer-1", wait("what rank 0 shares", "trainer-0", limit_s=2100.0)),
        ],
        QUIET_S,
    )
    assert told.root == "trainer-0, trainer-1"
    assert "the sum of gradients" in told.chain[0]
    assert "what rank 0 shares" in told.chain[1]


def test_fault_46_a_group_that_does_not_form_names_who_has_not_come() -> None:
    told = explain(
        [
            seen("generator-0", absent=SILENT),
            seen("generator-1", wait("group w-1-0 to form", "trainer-0", limit_s=120.0)),
            seen("trainer-0", wait("all to join", "generator-0", "generator-1", limit_s=120.0)),
        ],
        QUIET_S,
    )
    assert told.root == "generator-0"
    assert told.chain[0] == "trainer-0 waits for generator-0, generator-1: all to join (40 s of 120 s)"


@pytest.mark.parametrize("what", ["coming up", "writing the checkpoint of step 40"])
def test_long_work_within_its_own_limit_is_no_trouble_and_beyond_it_is(what: str) -> None:
    rollout = seen("rollout-0", TICKET)
    assert explain([rollout, seen("trainer-0", wait(what, limit_s=300.0))], QUIET_S).trouble == ()
    told = explain([rollout, seen("trainer-0", wait(what, seconds=301.0, limit_s=300.0))], QUIET_S)
    assert told.trouble == ("trainer-0",)
    assert told.chain[-1].startswith(f"trainer-0 is at work: {what} (301 s of 300 s)")


def test_a_first_evaluation_is_no_trouble_while_answers_come() -> None:
    trainer = seen("trainer-0", wait("the evaluation of the start weights", "evaluator-0", limit_s=1800.0))
    evaluator = seen("evaluator-0", ANSWERS)
    assert explain([trainer, evaluator, seen("generator-0", moved={"tokens generated": 1.0})], QUIET_S).trouble == ()
    assert explain([trainer, evaluator, seen("generator-0")], QUIET_S).trouble == ("evaluator-0", "trainer-0")


def test_a_reward_within_its_limit_is_no_trouble() -> None:
    scoring = wait("a reward", REWARD_PROCESS, seconds=9.0, limit_s=10.0)
    assert explain([seen("rollout-0", TICKET, scoring), seen("trainer-0", BATCH)], QUIET_S).trouble == ()


def test_one_that_nobody_waits_for_is_trouble_only_when_it_is_silent() -> None:
    busy = seen("trainer-0", moved={"steps trained": 1.0})
    told = explain([busy, seen("evaluator-0", absent=SILENT)], QUIET_S)
    assert (told.trouble, told.root) == (("evaluator-0",), "evaluator-0")
    assert explain([busy, seen("evaluator-0", wait("newer weights", "trainer-0"))], QUIET_S).trouble == ()


def test_who_has_ended_in_order_is_no_trouble_unless_waited_for() -> None:
    evaluator = seen("evaluator-0", moved={"evaluation answers": 1.0})
    assert explain([evaluator, seen("trainer-0", ended=True)], QUIET_S).trouble == ()
    told = explain([seen("trainer-0", BATCH), seen("rollout-0", ended=True)], QUIET_S)
    assert (told.trouble, told.chain[-1]) == (("trainer-0",), "rollout-0 has ended")


def test_many_parties_are_counted() -> None:
    told = explain([seen("trainer-0", wait("a batch", *(f"rollout-{n}" for n in range(64))))], QUIET_S)
    assert "waits for rollout-0, rollout-1, rollout-2, rollout-3 and 60 more: a batch" in told.chain[0]


NAMES = ("trainer-0", "trainer-1", "rollout-0", "generator-0", "evaluator-0")
WAITS = st.builds(
    lambda parties, seconds, limit: wait("it", *parties, seconds=seconds, limit_s=limit),
    st.lists(st.sampled_from((*NAMES, FILE_SYSTEM, ANYBODY)), max_size=3, unique=True),
    st.sampled_from((SHORT, LONG)),
    st.sampled_from((None, 10.0, 600.0)),
)
PROCESSES = st.lists(
    st.builds(
        lambda name, waits, moved, ended, absent: seen(
            name, *waits, moved={} if moved is None else {"it": moved}, ended=ended, absent=absent
        ),
        st.sampled_from(NAMES),
        st.lists(WAITS, max_size=3),
        st.sampled_from((None, SHORT, LONG)),
        st.booleans(),
        st.sampled_from(("", SILENT)),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda one: one.name,
)


@given(PROCESSES)
def test_every_picture_has_an_explanation_whose_sentences_follow_each_other(processes: list[Seen]) -> None:
    told = explain(processes, QUIET_S)
    by_name = {one.name: one for one in processes}
    subjects = [line.split()[0].rstrip(":") for line in told.chain]
    for before, after in itertools.pairwise(subjects):
        assert any(after in waits.parties for waits in by_name[before].waits)
    assert len(set(subjects[:-1])) == len(subjects) - 1
    assert told.root == subjects[-1] or told.root.split(", ")[0] == subjects[-1]
    lately = {one.name for one in processes if not one.ended and not one.absent and SHORT in _ages(one)}
    assert not lately & set(told.trouble), "who achieved something lately is not stuck"
    assert {one.name for one in processes if one.absent and not one.ended} <= set(told.trouble)


def _ages(one: Seen) -> set[float]:
    return {thing.seconds for thing in one.achieved.values()}
