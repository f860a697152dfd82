"""The generator's own part in leaving a run that it has joined; engines are stand-ins here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.config.load import load
from areal_hpc.errors import ArealError, ConfigError, GenerationError
from areal_hpc.exits import EXIT_STOPPED
from areal_hpc.liveness import seats
from areal_hpc.liveness.given_up import give_up, why_given_up
from areal_hpc.liveness.seats import Seat
from areal_hpc.roles import generator
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.serving import ServedEngine
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Recorder, RecordReader

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


@dataclass
class Engine:
    """Says of itself what a test wants, and what had been said of its seat when it ended."""

    run: RunDir
    running: list[int] = field(default_factory=list)
    lives: bool = True
    answers: bool = True
    death: ArealError = field(default_factory=lambda: GenerationError("it has ended"))
    vacant_at_end: set[str] | None = None
    process: RoleProcess | None = None

    async def load(self) -> dict[str, Any]:
        assert self.process is not None
        if not self.answers:
            raise GenerationError("the connection is closed")
        self.process.stop_flag.set()
        finishing = self.running and seats.vacant(self.run.attempt(1))
        return {"running": self.running.pop(0) if finishing else len(self.running), "queued": 0}

    @asynccontextmanager
    async def serve(self, process: RoleProcess) -> AsyncIterator[ServedEngine]:
        self.process = process
        try:
            yield ServedEngine(
                url="http://127.0.0.1:1",
                alive=lambda: self.lives,
                load=self.load,
                death=lambda: asyncio.sleep(0, self.death),
            )
        finally:
            self.vacant_at_end = seats.vacant(self.run.attempt(1))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine(RunDir.create(tmp_path / "run"))
    made.run.attempt(1).create()
    monkeypatch.setattr(generator, "serve_engine", made.serve)
    for name in ("REPORT_S", "NOTICE_S", "POLL_S"):
        monkeypatch.setattr(generator, name, 0.001)
    return made


def process_of(engine: Engine, index: int, incarnation: int = 0) -> RoleProcess:
    return RoleProcess(
        role="generator",
        index=index,
        incarnation=incarnation,
        run=engine.run,
        epoch=1,
        config=load([QUICKSTART], ["generation.replicas=1", "limits.stop_s=60"]),
        token="t",
        recorder=Recorder(engine.run.attempt(1).records("generator", index), role="generator", index=index, epoch=1),
    )


def taken(engine: Engine) -> Seat:
    return seats.take(engine.run.attempt(1), 1, {})


def test_an_engine_leaves_its_seat_first_and_ends_when_it_has_nothing_more_to_do(engine: Engine) -> None:
    engine.running = [3, 3, 2, 1]
    seat = taken(engine)
    assert generator.main(process_of(engine, seat.index)) == EXIT_STOPPED
    assert engine.running == []
    assert engine.vacant_at_end == {"generator-1"}


def test_what_takes_longer_than_a_stop_may_is_not_waited_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.running = [1] * 100_000
    monkeypatch.setattr(generator, "END_S", 59.9)
    assert generator.main(process_of(engine, taken(engine).index)) == EXIT_STOPPED
    assert engine.running


def test_an_engine_whose_seat_was_given_up_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seat = taken(engine)
    monkeypatch.setattr(engine, "load", lambda: asyncio.sleep(0, {"running": 0, "queued": 0}))
    seat.leave()  # by the launcher
    successor = taken(engine)
    assert generator.main(process_of(engine, seat.index)) == EXIT_STOPPED
    assert successor.is_held()


def test_a_process_that_the_trainer_has_given_up_ends_as_one_that_failed_and_its_successor_does_not(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "_finish", lambda *_: pytest.fail("it has nothing that anybody wants"))
    give_up(engine.run.attempt(1), "generator-0", 1, "3 updates in a row have failed")
    give_up(engine.run.attempt(1), "generator-0", 1, "of two that say so the first is heard")
    with pytest.raises(GenerationError, match="generator-0 is given up: 3 updates in a row have failed"):
        generator.main(process_of(engine, 0, incarnation=1))
    assert generator.main(process_of(engine, 0, incarnation=2)) == EXIT_STOPPED
    assert why_given_up(engine.run.attempt(1), "generator-1", 1) == ""


def test_an_engine_of_the_runs_own_has_no_seat_and_ends_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "_finish", lambda *_: pytest.fail("its launcher says when it is to end"))
    process = process_of(engine, 0)
    assert process.seat is None
    assert generator.main(process) == EXIT_STOPPED
    assert seats.newest(engine.run.attempt(1)) == {}


def test_what_an_engine_tells_of_its_time_holds_that_of_those_who_were_it_before(engine: Engine) -> None:
    seat = taken(engine)
    before = process_of(engine, seat.index)
    for up_s in (1.0, 100.0):
        before.recorder.record("generation", {"running": 0, "busy_s": up_s / 2, "up_s": up_s})
    process_of(engine, 7).recorder.record("generation", {"running": 0, "busy_s": 900.0, "up_s": 900.0})
    seat.leave()
    for incarnation in (1, 2):
        assert generator.main(process_of(engine, taken(engine).index, incarnation)) == EXIT_STOPPED
    records = RecordReader(engine.run.attempt(1).telemetry, ["generator"]).poll()
    told = [record.values["up_s"] for record in records if record.index == seat.index]
    assert told[:2] == [1.0, 100.0]
    assert told[2:] == sorted(told[2:])
    assert all(100.0 < float(str(up_s)) < 200.0 for up_s in told[2:])
    assert len(told) >= 4


@pytest.mark.parametrize("noticed_by", ["lives", "answers"])
@pytest.mark.parametrize("death", [GenerationError("it has ended"), ConfigError("it needs a higher limit")])
def test_an_engine_that_has_ended_says_why_and_its_launcher_frees_the_seat(
    engine: Engine, noticed_by: str, death: ArealError
) -> None:
    seat = taken(engine)
    setattr(engine, noticed_by, False)
    engine.death = death
    with pytest.raises(type(death), match=str(death)):
        generator.main(process_of(engine, seat.index))
    assert seat.is_held()
