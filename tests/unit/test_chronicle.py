"""Sessions that are written down: token by token, whole whatever happens to a line, and never more than so much."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import run, served

from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.proxy.chronicle import Chronicle, Scribe, pieces, summary_of, turns_of
from areal_hpc.proxy.page import Board, show
from areal_hpc.report.course import Course
from areal_hpc.roles.wiring.agents import Notes
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Recorder


def line(number: int) -> dict[str, object]:
    return {"summary": {"id": f"s{number}", "began": float(number)}, "turns": ["x" * 50]}


@given(st.binary(max_size=40))
def test_the_pieces_of_any_tokens_are_the_whole_text(raw: bytes) -> None:
    """One token a byte: a character's text comes with its last one."""

    def spelled(token_ids: object) -> str:
        return bytes(token_ids).decode(errors="replace")  # type: ignore[call-overload, no-any-return]

    found = pieces(list(raw), spelled)
    assert len(found) == len(raw) and "".join(found) == spelled(raw)
    assert pieces(list("ä🙂".encode()), spelled) == ["", "ä", "", "", "", "🙂"]


def test_a_session_is_told_turn_by_turn_with_what_was_new_in_each(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, ["yes", "no"]) as service:
            first = await service.chat("one")
            messages = [{"role": "user", "content": "one"}, first["message"], {"role": "user", "content": "two"}]
            await service.post("/v1/chat/completions", {"messages": messages})
            session = service.session
            session.reward(1.0)
            summary = summary_of(session, {"outcome": "sealed"}, 0.5)
            assert (summary["turns"], summary["tokens"], summary["versions"]) == (2, 7, [0, 0])
            assert (summary["final"], summary["worth"], summary["outcome"]) == (1.0, 0.75, "sealed")
            session.broken = "half an answer"
            assert summary_of(session, {}, 0.5)["worth"] is None, "nothing of it is trained"
            turns = turns_of(session, hermes.spelled, 0.5)
            assert [turn["parent"] for turn in turns] == [None, 0]
            assert [turn["new"] for turn in turns] == [
                [{"role": "user", "content": "one"}],
                [{"role": "user", "content": "two"}],
            ]
            assert ["".join(turn["tokens"]) for turn in turns] == ["yes<|im_end|>", "no<|im_end|>"]
            assert [turn["worth"] for turn in turns] == [0.5, 1.0]
            assert turns[0]["logprobs"] == pytest.approx(session.transcript.turns[0].completion.logprobs, abs=1e-4)

    run(scenario())


def test_what_is_written_is_read_as_it_grows(tmp_path: Path) -> None:
    scribe, chronicle = Scribe(tmp_path / "s", "00000001-rollout-0-0"), Chronicle(tmp_path / "s")
    chronicle.poll()
    assert chronicle.summaries() == []
    for number in (2, 1):
        scribe.write(line(number))
        chronicle.poll()
    assert [one["id"] for one in chronicle.summaries()] == ["s1", "s2"]
    assert chronicle.session("s2") == line(2) and chronicle.session("s3") is None
    scribe.close()


def test_a_torn_line_costs_itself(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "s", "00000001-rollout-0-0")
    scribe.write(line(1))
    (part,) = (tmp_path / "s").iterdir()
    with part.open("ab") as file:
        file.write(b'{"summary": {"id": "torn"\n{"summary"')
    chronicle = Chronicle(tmp_path / "s")
    chronicle.poll()
    assert [one["id"] for one in chronicle.summaries()] == ["s1"]
    scribe.close()


def test_the_oldest_parts_of_a_worker_go_and_other_workers_stay(tmp_path: Path) -> None:
    other = Scribe(tmp_path / "s", "00000001-rollout-1-0")
    other.write(line(1000))
    chronicle = Chronicle(tmp_path / "s")
    for incarnation in range(2):
        scribe = Scribe(tmp_path / "s", f"00000001-rollout-0-{incarnation}", part_bytes=300, parts=3)
        for number in range(20):
            scribe.write(line(20 * incarnation + number))
            chronicle.poll()
        scribe.close()
    other.close()
    names = sorted(path.name for path in (tmp_path / "s").iterdir())
    assert len([name for name in names if "rollout-0" in name]) == 3 and len(names) == 4
    kept = [one["id"] for one in chronicle.summaries()]
    assert kept[-2:] == ["s39", "s1000"] and len(kept) < 15 and chronicle.session("s0") is None


def test_a_full_disk_costs_what_does_not_fit_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scribe, write = Scribe(tmp_path / "s", "00000001-rollout-0-0"), os.write
    scribe.write(line(1))

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(os, "write", full)
        scribe.write(line(2))
        scribe.write(line(3))
        monkeypatch.setattr(os, "write", write)
        scribe.write(line(4))
    assert [record.message.count("until that is mended") for record in caplog.records] == [1]
    chronicle = Chronicle(tmp_path / "s")
    chronicle.poll()
    assert [one["id"] for one in chronicle.summaries()] == ["s1", "s4"]
    scribe.close()


@pytest.mark.parametrize(("every_s", "written"), [(0.0, 8), (0.5, 2)])
def test_writing_sessions_down_takes_little_of_the_time(
    hermes: ChatRenderer, tmp_path: Path, every_s: float, written: int
) -> None:
    """One that takes 1 s is followed by 49 s without another; of an agent in daily use every one is written."""
    now = [100.0]

    def spelled(token_ids: Sequence[int]) -> str:
        now[0] += 0.25  # four times for a session of two tokens
        return hermes.spelled(token_ids)

    async def scenario() -> None:
        async with served(hermes, ["y"]) as service:
            await service.chat("one")
            (turn,) = service.session.transcript.turns
            assert turn.completion.token_ids.size == 2
            for _ in range(8):
                notes.write(service.session, {"outcome": "sealed"})
                now[0] += 14.0

    chronicle = Chronicle(tmp_path / "s")
    notes = Notes(Scribe(chronicle.directory, "00000001-rollout-0-0"), spelled, 1.0, every_s, clock=lambda: now[0])
    run(scenario())
    notes.close()
    (part,) = chronicle.directory.iterdir()
    assert len(part.read_bytes().splitlines()) == written


def test_half_a_line_costs_itself_and_not_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """write(2) on a disk that is nearly full writes what fits, and is no error."""
    scribe, write = Scribe(tmp_path / "s", "00000001-rollout-0-0"), os.write
    scribe.write(line(1))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
        scribe.write(line(2))
    scribe.write(line(3))
    chronicle = Chronicle(tmp_path / "s")
    chronicle.poll()
    assert [one["id"] for one in chronicle.summaries()] == ["s1", "s3"]
    scribe.close()


def test_a_part_may_be_deleted_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scribe, chronicle = Scribe(tmp_path / "s", "00000001-rollout-0-0"), Chronicle(tmp_path / "s")
    scribe.write(line(1))
    chronicle.poll()
    (part,) = os.listdir(tmp_path / "s")
    (tmp_path / "s" / part).unlink()
    assert chronicle.session("s1") is None
    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", lambda _: [part])  # as it was when the poll began
        chronicle.poll()
    chronicle.poll()
    assert chronicle.summaries() == []
    scribe.close()


def test_the_page_reads_the_chronicle_in_one_thread_at_a_time(tmp_path: Path) -> None:
    """Two people look: the one's poll must not change what the other's answer is made from."""
    users = list[threading.Thread]()

    class Watched(Chronicle):
        def poll(self) -> None:
            users.append(threading.current_thread())
            super().poll()

        def summaries(self) -> list[dict[str, Any]]:
            assert users.pop() is threading.current_thread() and not users
            return super().summaries()

    board = Board(name="run", chronicle=Watched(tmp_path / "s"), curve=dict)

    async def scenario() -> None:
        for told in await asyncio.gather(*(board.overview() for _ in range(8))):
            assert told["sessions"] == []

    run(scenario())


def test_a_live_session_is_spelled_beside_the_loop_that_serves_it(hermes: ChatRenderer, tmp_path: Path) -> None:
    def spelled(token_ids: Sequence[int]) -> str:
        assert threading.current_thread() is not threading.main_thread()
        return hermes.spelled(token_ids)

    async def scenario() -> None:
        async with served(hermes, ["yes"]) as service:
            await service.chat("one")
            board = Board(
                name="run",
                chronicle=Chronicle(tmp_path / "s"),
                curve=dict,
                live=lambda: service.sessions,
                spelled=spelled,
            )
            told = await board.session(service.session.id)
            assert told is not None and "".join(told["turns"][0]["tokens"]) == "yes<|im_end|>"
            assert await board.session("none") is None

    run(scenario())


def test_the_course_of_a_run_goes_on_with_its_records(tmp_path: Path) -> None:
    directory = RunDir.create(tmp_path / "run")
    directory.config.write_text("trainer: {total_steps: 9}\n", encoding="utf-8")
    course = Course(directory)
    assert course.told()["steps"] == []
    for epoch, steps in ((1, (1, 2, 3)), (2, (3, 4))):  # the second attempt takes step 3 back
        recorder = Recorder(
            directory.attempt(epoch).create().records("trainer", 0), role="trainer", index=0, epoch=epoch
        )
        for step in steps:
            recorder.record("step", {"step": step, "reward_mean": step + epoch / 10, "staleness_max": 1})
        recorder.close()
        told = course.told()
    assert (told["steps"], told["reward"], told["total_steps"]) == ([1, 2, 3, 4], [1.1, 2.1, 3.2, 4.2], 9)
    assert told["reward_mean"] == pytest.approx([1.1, 1.6, 6.4 / 3, 10.6 / 4]) and told["attempts"] == [3]


def test_the_page_of_a_run_is_for_whoever_has_its_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        directory = RunDir.create(tmp_path / "run")
        board = Board(name="run", chronicle=Chronicle(directory.sessions), curve=Course(directory).told)
        async with show(board, "the-token") as url, aiohttp.ClientSession() as http:
            async with http.get(url + "/") as answer:
                assert answer.status == 200 and "default-src 'none'" in answer.headers["Content-Security-Policy"]
            for headers, status in (({}, 401), ({"x-api-key": "other"}, 401), ({"x-api-key": "the-token"}, 200)):
                async with http.get(f"{url}/rl/page/overview", headers=headers) as answer:
                    assert answer.status == status
            async with http.get(f"{url}/rl/page/session/none", headers={"x-api-key": "the-token"}) as answer:
                assert answer.status == 404

    asyncio.run(scenario())
