"""The registry of waits: what is open is told, alike as one, from any thread, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from areal_hpc.waits import Achieved, Wait, achieved, advance, open_waits, published, waiting


def mine(what: str) -> list[Wait]:
    return [wait for wait in open_waits() if wait.what == what]


def test_a_wait_is_told_while_it_lasts() -> None:
    assert mine("a batch") == []
    with waiting("a batch", "rollout-0", "rollout-1", limit_s=9.0, about="for step 3"):
        (wait,) = mine("a batch")
        assert (wait.parties, wait.limit_s, wait.count, wait.about) == (
            ("rollout-0", "rollout-1"),
            9.0,
            1,
            "for step 3",
        )
        assert 0 <= wait.seconds < 9
    assert mine("a batch") == []


def test_a_wait_that_fails_is_over() -> None:
    with pytest.raises(ZeroDivisionError), waiting("it", "x", limit_s=None):
        raise ZeroDivisionError
    assert mine("it") == []


def test_D27_waits_alike_are_told_as_one_with_their_number_and_the_oldest() -> None:
    with (
        waiting("an answer", "generator-0", limit_s=1.0, about="episode 1"),
        waiting("an answer", "generator-0", limit_s=1.0, about="episode 2"),
        waiting("an answer", "generator-1", limit_s=1.0, about="episode 3"),
    ):
        found = {wait.parties: (wait.count, wait.about) for wait in mine("an answer")}
    assert found == {("generator-0",): (2, "episode 1"), ("generator-1",): (1, "episode 3")}


def test_cancelled_tasks_leave_nothing() -> None:
    async def wait() -> None:
        with waiting("for ever", "x", limit_s=None):
            await asyncio.Event().wait()

    async def main() -> int:
        tasks = [asyncio.create_task(wait()) for _ in range(50)]
        await asyncio.sleep(0)
        (told,) = mine("for ever")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return told.count

    assert asyncio.run(main()) == 50
    assert mine("for ever") == []


def test_threads_wait_and_achieve_while_another_looks() -> None:
    """As a heartbeat does: what it reads is whole at every instant."""
    begin, rounds = threading.Barrier(5), 2000

    def work(name: str) -> None:
        begin.wait()
        for _ in range(rounds):
            with waiting("something", name, limit_s=None):
                advance(name)

    threads = [threading.Thread(target=work, args=(f"thread {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    begin.wait()
    while any(thread.is_alive() for thread in threads):
        assert sum(wait.count for wait in mine("something")) <= 4
    assert mine("something") == []
    assert [achieved()[f"thread {n}"].count for n in range(4)] == [rounds] * 4


def test_what_is_published_comes_back_from_json() -> None:
    advance("tokens", 7)
    advance("tokens", 5)
    with waiting("a lock", "the file system", limit_s=None):
        told = json.loads(json.dumps(published()))
    waits = [Wait.from_record(record) for record in told["waits"]]
    assert [(wait.what, wait.parties, wait.limit_s) for wait in waits if wait.what == "a lock"] == [
        ("a lock", ("the file system",), None)
    ]
    tokens = Achieved(**told["achieved"]["tokens"])
    assert tokens.count == 12
    assert 0 <= tokens.seconds < 60


def test_a_wait_is_overdue_past_its_limit_and_never_without_one() -> None:
    assert not Wait(what="x", seconds=1.0, limit_s=1.0).is_overdue()
    assert Wait(what="x", seconds=1.1, limit_s=1.0).is_overdue()
    assert not Wait(what="x", seconds=1e9).is_overdue()
