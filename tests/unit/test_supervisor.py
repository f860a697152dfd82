"""Who is replaced, who ends the attempt, and how an end is judged; no process is started here."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.cluster.local import Ended, LocalLauncher
from areal_hpc.config.schema import LimitsConfig
from areal_hpc.errors import AttemptFailed, Fenced, RoleDied
from areal_hpc.roles.attempts import IRREPLACEABLE
from areal_hpc.roles.supervisor import Supervisor, judge_stopped
from areal_hpc.run_dir import RunDir


@pytest.fixture
def local(tmp_path: Path) -> LocalLauncher:
    attempt = RunDir.create(tmp_path / "run").attempt(1).create()
    for role in ("trainer", "generator", "rollout", "evaluator"):
        attempt.log(role, 0).write_text("".join(f"line {n} of {role}\n" for n in range(40)))
    return LocalLauncher(RunDir(tmp_path / "run"), 1, {})


NEVER = LimitsConfig(restarts=0)


class World:
    """A supervisor on a clock of its own; ``started`` says whom it had started, and when."""

    def __init__(self, local: LocalLauncher, monkeypatch: pytest.MonkeyPatch, limits: LimitsConfig) -> None:
        self.now, self.stop, self.fenced = 0.0, False, False
        self.started: list[tuple[str, int, float]] = []
        self.records: list[dict[str, Any]] = []
        monkeypatch.setattr(local, "start", self.start)
        self.supervisor = Supervisor(
            local,
            limits,
            stop=lambda: self.stop,
            show=lambda: None,
            record=lambda kind, values: self.records.append({"kind": kind, **values}),
            check_fence=self.check_fence,
            watchdog=lambda _: None,
            clock=lambda: self.now,
        )

    def start(self, role: str, index: int) -> None:
        self.started.append((role, index, self.now))

    def check_fence(self) -> None:
        if self.fenced:
            raise Fenced("replaced by attempt 2")

    def dies(self, role: str, code: int = -9, after_s: float = 100.0) -> float:
        """The role dies once more; how long until it is started again."""
        self.now += after_s
        died = self.now
        self.supervisor.judge([Ended(role, 0, code)])
        self.supervisor._start_due()
        while len(self.started) == 0 or self.started[-1][2] < died:
            self.now += 0.25
            self.supervisor._start_due()
        return self.now - died


@pytest.fixture
def world(local: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(local, monkeypatch, LimitsConfig(restarts=3, restart_window_s=600.0))


@pytest.mark.parametrize("role", ["generator", "rollout", "evaluator"])
@pytest.mark.parametrize("code", [-9, -15, 1, 75])
def test_whoever_may_be_replaced_is_at_once_and_that_is_recorded(role: str, code: int, world: World) -> None:
    assert world.dies(role, code) == 0.0
    assert world.started == [(role, 0, 100.0)]
    (record,) = world.records
    assert (record["kind"], record["process"], record["pause_s"]) == ("restart", f"{role}-0", 0.0)
    assert record["reason"].startswith(f"{role}-0 ended with ")


def test_one_that_dies_again_and_again_is_paused_for_and_then_ends_the_run(world: World, local: LocalLauncher) -> None:
    assert [world.dies("generator") for _ in range(3)] == [0.0, 1.0, 2.0]
    assert world.dies("rollout") == 0.0, "each has a count of its own"
    with pytest.raises(RoleDied) as died:
        world.dies("generator")
    assert str(died.value).startswith(
        "generator-0 died more often than limits.restarts = 3 allows in 600 s: "
        f"generator-0 ended with signal 9 (SIGKILL); its log {local.attempt.log('generator', 0)} ends with:\nline 25"
    )
    assert not isinstance(died.value, AttemptFailed)


def test_deaths_that_are_far_apart_are_no_reason_to_give_up(world: World) -> None:
    assert {world.dies("generator", after_s=601.0) for _ in range(20)} == {0.0}


@pytest.mark.parametrize("role", ["generator", "rollout", "evaluator", "trainer"])
def test_a_persons_mistake_is_never_tried_again(role: str, world: World) -> None:
    with pytest.raises(RoleDied, match=f"{role}-0 ended with exit code 2") as died:
        world.supervisor.judge([Ended("generator", 0, -9), Ended(role, 0, 2)])
    assert not isinstance(died.value, AttemptFailed)
    assert world.started == []


def test_nobody_is_replaced_once_another_attempt_owns_the_run(world: World) -> None:
    world.fenced = True
    with pytest.raises(Fenced):
        world.supervisor.judge([Ended("rollout", 0, 1)])
    assert world.records == []


@pytest.mark.parametrize(
    ("ended", "named"),
    [
        ([("trainer", 75)], "trainer-0 ended with exit code 75"),
        ([("trainer", 1)], "trainer-0 ended with exit code 1"),
        ([("trainer", 1), ("generator", -9)], "generator-0 ended with signal 9 (SIGKILL)"),
        ([("trainer", -35)], "trainer-0 ended with signal 35 (SIGRTMIN+1)"),
    ],
)
def test_a_trainer_that_ends_too_early_ends_the_attempt_with_the_likeliest_cause_and_its_last_lines(
    ended: list[tuple[str, int]], named: str, world: World, local: LocalLauncher
) -> None:
    with pytest.raises(AttemptFailed) as died:
        world.supervisor.judge([Ended(role, 0, code) for role, code in ended])
    text, role = str(died.value), named.split("-", maxsplit=1)[0]
    assert text.startswith(f"{named}; its log {local.attempt.log(role, 0)} ends with:\nline 25 of {role}\n")
    assert text.endswith(f"line 39 of {role}")


def test_in_deterministic_training_an_engine_cannot_be_replaced(world: World) -> None:
    """It would lack the older weights, by which some groups are still to be sampled."""
    world.supervisor._irreplaceable = IRREPLACEABLE
    with pytest.raises(AttemptFailed, match="generator-0 ended with signal 9"):
        world.supervisor.judge([Ended("generator", 0, -9)])
    assert world.dies("rollout") == 0.0


def test_whoever_is_done_is_done(world: World) -> None:
    world.supervisor.judge([Ended("trainer", 0, 0), Ended("evaluator", 0, 0)])
    assert world.records == []
    assert world.supervisor.watch() == "finished"


def test_an_evaluator_that_is_due_again_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.dies("evaluator")
    world.supervisor.judge([Ended("evaluator", 0, -9)])
    world.stop = True
    assert world.supervisor.watch() == "stopped"
    world.stop = False
    seen = []
    monkeypatch.setattr(time, "sleep", lambda _: (seen.append(1), setattr(world, "now", world.now + 10.0)))
    assert world.supervisor.watch() == "finished"  # started again, and nothing runs in this test
    assert seen


def test_without_restarts_the_first_death_ends_the_run(local: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(local, monkeypatch, NEVER)
    with pytest.raises(RoleDied, match=r"^rollout-0 ended with exit code 1; its log"):
        world.dies("rollout", 1)


@pytest.mark.parametrize("code", [0, 75, -signal.SIGTERM, None])
def test_a_stop_is_one_when_the_committing_trainer_ended_in_order(code: int | None, local: LocalLauncher) -> None:
    others = [Ended("trainer", 1, 1), Ended("generator", 0, -9)]  # may have lost the rank that ended first
    ended = others if code is None else [Ended("trainer", 0, code), *others]
    judge_stopped(local, ended)


@pytest.mark.parametrize(
    ("code", "words"), [(-9, r"within limits\.stop_s and was killed.*--resume"), (1, "ended with exit code 1")]
)
def test_a_stop_without_a_checkpoint_is_a_failure(code: int, words: str, local: LocalLauncher) -> None:
    with pytest.raises(RoleDied, match=words):
        judge_stopped(local, [Ended("trainer", 0, code)])


def test_only_the_end_of_a_long_log_is_read(local: LocalLauncher) -> None:
    path = local.attempt.log("trainer", 0)
    path.write_bytes(b"x" * 10**6 + b"\nthe end \xff\n")
    assert local.last_lines("trainer", 0).endswith("x\nthe end �")
    assert len(local.last_lines("trainer", 0)) < 70_000
    path.write_bytes(b"")
    assert local.last_lines("trainer", 0) == ""
