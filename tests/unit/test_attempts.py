"""What a start leaves behind, while the model is made, and when an attempt fails; the processes are in test_run.py."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from started import begin, config_in, end_at_once, leave, start, state_of

from areal_hpc.buffer.epochs import newest_epoch
from areal_hpc.cluster.owner import Owner
from areal_hpc.config.cluster import Shape
from areal_hpc.config.keys import with_value
from areal_hpc.config.schema import Config
from areal_hpc.errors import AttemptFailed, DataError, Fenced, RoleDied, Stalled
from areal_hpc.exits import EXIT_STOPPED
from areal_hpc.fs import read_json
from areal_hpc.report import status_lines, why_lines
from areal_hpc.roles import attempts, launcher
from areal_hpc.roles.attempts import Attempts
from areal_hpc.run_dir import RunDir


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_in(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    end_at_once(monkeypatch)


# What a start leaves behind


@pytest.mark.parametrize(("outcome", "code"), [("finished", 0), ("stopped", 75), ("aborted", 1)])
def test_an_attempt_is_running_while_it_runs_and_then_what_it_came_to(
    outcome: str, code: int, config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def supervise(*_: Any) -> str:
        seen.append((state_of(run), run.config.is_file(), run.token.is_file()))
        return outcome

    monkeypatch.setattr(Attempts, "supervise", supervise)
    assert start(config) == code
    assert seen == [("running", True, True)]
    assert state_of(run) == outcome
    (line,) = run.attempt(1).records("launcher", 0).read_text().splitlines()
    assert json.loads(line)["event"] == outcome


@pytest.mark.parametrize(("shape", "asked", "code"), [("local", True, 75), ("split", True, 0), ("split", False, 75)])
def test_in_a_job_a_persons_stop_asks_for_no_more_time_and_the_schedulers_does(
    shape: str, asked: bool, code: int, config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when both came at once: the batch script goes on only after 75."""

    def supervise(*_: Any) -> str:
        if asked:
            run.attempt(1).stop_request.touch()
        return "stopped"

    monkeypatch.setattr(Attempts, "supervise", supervise)
    assert start(with_value(config, "cluster.shape", Shape(shape))) == code


@pytest.mark.parametrize(
    ("shape", "told", "committed", "goes_on"),
    [
        ("split", True, True, True),
        ("split", True, False, False),  # it would come to nothing again
        ("split", False, True, False),
        ("local", True, True, False),
    ],
)
def test_A47_a_job_whose_last_checkpoint_came_too_late_goes_on_from_the_one_before(
    shape: str, told: bool, committed: bool, goes_on: bool, config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def supervise(*_: Any) -> str:
        if told:
            os.kill(os.getpid(), signal.SIGTERM)
        raise RoleDied("trainer-0 did not end within limits.stop_s")

    monkeypatch.setattr(Attempts, "supervise", supervise)
    monkeypatch.setattr(launcher, "committed_a_step", lambda *_: committed)
    config = with_value(config, "cluster.shape", Shape(shape))
    if goes_on:
        assert start(config) == 75
    else:
        with pytest.raises(RoleDied):
            start(config)
    assert state_of(run) == "failed"


@pytest.mark.parametrize("failing", ["supervise", "publish", "make_key"])
@pytest.mark.parametrize("error", [RoleDied("x"), OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_no_exception_leaves_an_attempt_running(
    failing: str, error: BaseException, config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> str:
        raise error

    monkeypatch.setattr(Attempts if failing == "supervise" else attempts, failing, fail)
    with pytest.raises(type(error)):
        start(config)
    assert state_of(run) == "failed"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_the_preflight_finds_leaves_nothing(config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Config) -> None:
        raise DataError("no such file; give another")

    monkeypatch.setattr(launcher, "prepare", fail)
    with pytest.raises(DataError):
        start(config)
    assert not run.root.exists()


# Making the model


def making(config: Config, maker: Callable[[Path, int], None], monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setitem(sys.modules, "makers", SimpleNamespace(make=maker))
    config = with_value(config, "model.maker", "makers:make")
    return with_value(config, "model.path", str(Path(config.run_root) / "models/tiny"))


def test_status_and_why_work_while_the_model_is_made(
    config: Config, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def make(target: Path, _: int) -> None:
        told.extend([status_lines(RunDir.open(run.root), watch=lambda _: {})[1], *why_lines(RunDir.open(run.root))])
        target.mkdir()

    assert start(making(config, make, monkeypatch)) == 0
    doing, owner = f"running: making the model {tmp_path}/models/tiny", Owner.this_process()
    assert told == [
        f"state        {doing}, process {owner.pid} on {owner.host} (attempt 1)",
        f"run run, attempt 1: {doing}",
        "no process has been started yet",
    ]
    assert "about" in read_json(run.attempt(1).state) and not read_json(run.attempt(1).state)["about"]


def test_a_start_that_failed_tells_why_and_is_no_run_yet(
    config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path, __: int) -> None:
        raise DataError("no room for the model; free some\nand more")

    with pytest.raises(DataError):
        start(making(config, fail, monkeypatch))
    assert status_lines(run)[1] == "state        failed: no room for the model (attempt 1)"
    assert why_lines(run)[0] == "run run, attempt 1: failed: no room for the model; this is what was last said"
    assert start(making(config, lambda target, _: target.mkdir(), monkeypatch)) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_the_model_is_made_stops_it_and_leaves_no_half_of_one(
    number: int, config: Config, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(target: Path, _: int) -> None:
        target.mkdir()
        os.kill(os.getpid(), number)
        pytest.fail("it went on")

    assert start(making(config, interrupted, monkeypatch)) == 75
    assert state_of(run) == "stopped"
    assert list((tmp_path / "models").iterdir()) == []
    assert start(making(config, lambda target, _: target.mkdir(), monkeypatch)) == 0


# What follows an attempt that failed


class Dying:
    """Attempts whose trainer dies, each after the checkpoints of ``commits`` steps; then one that finishes."""

    def __init__(self, run: RunDir, commits: list[list[int]]) -> None:
        self.run, self.commits = run, commits
        self.epochs: list[int] = []
        self.recorded: list[tuple[str, dict[str, Any]]] = []
        self.also: Callable[[int], Any] = lambda epoch: None
        self.error: Exception = AttemptFailed(
            "trainer-0 ended with signal 9 (SIGKILL); its log x ends with:\nline 1\nline 2"
        )

    def supervise(self, epoch: int, record: Any) -> str:
        assert state_of(self.run, epoch) == "running"
        self.epochs.append(epoch)
        if not self.commits:
            return "finished"
        steps = self.commits.pop(0)
        begin(self.run, epoch, step=max(self.steps(), default=0))
        for step in steps:
            (self.run.checkpoints / f"step-{step:08d}.e{epoch:08d}").mkdir()
        self.also(epoch)
        raise self.error

    def steps(self) -> list[int]:
        return [int(path.name[5:13]) for path in self.run.checkpoints.iterdir()]


@pytest.fixture
def dying(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[list[int]]], Dying]:
    def make(commits: list[list[int]]) -> Dying:
        made = Dying(run, commits)
        monkeypatch.setattr(Attempts, "supervise", made.supervise)
        return made

    return make


def test_a_trainer_that_died_is_followed_by_the_next_attempt(
    config: Config, run: RunDir, dying: Callable[[list[list[int]]], Dying]
) -> None:
    made = dying([[], []])
    assert start(config) == 0
    assert made.epochs == [1, 2, 3]
    assert [state_of(run, epoch) for epoch in (1, 2, 3)] == ["restarting", "restarting", "finished"]
    lines = [json.loads(line) for line in run.attempt(2).records("launcher", 0).read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["restart", "run"]
    assert lines[0]["reason"] == "trainer-0 ended with signal 9 (SIGKILL)"


def test_attempts_in_a_row_that_commit_nothing_are_bounded_and_said(
    config: Config, run: RunDir, dying: Callable[[list[list[int]]], Dying]
) -> None:
    made = dying([[], [4, 8], [], [8], [], [12]])  # step 8 is where the third and later ones begin
    with pytest.raises(AttemptFailed) as died:
        start(config)
    assert made.epochs == [1, 2, 3, 4, 5]
    assert str(died.value).startswith(
        "3 attempts in a row committed no new step (limits.attempts); trainer-0 ended with signal 9 (SIGKILL); its log"
    )
    assert str(died.value).endswith("line 1\nline 2")
    assert state_of(run, 5) == "failed"


@pytest.mark.parametrize("full", [False, True])
def test_a_run_that_failed_has_a_report_unless_that_fails_too(
    full: bool, config: Config, dying: Callable[[list[list[int]]], Dying], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = []

    def report(run: RunDir) -> None:
        reported.append(run)
        if full:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(launcher, "report_run", report)
    dying([[], [], []])
    with pytest.raises(AttemptFailed, match="3 attempts in a row"):
        start(config)
    assert len(reported) == 1


def test_a_run_that_is_to_go_on_does_so_without_a_report(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The batch script goes by the exit code, and by that of an error it would give the weeks up that are left."""

    def full(_: RunDir) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launcher, "report_run", full)
    monkeypatch.setattr(Attempts, "supervise", lambda *_: "stopped")
    assert start(with_value(config, "cluster.shape", Shape.SPLIT)) == EXIT_STOPPED
    assert "there is no report: [Errno 28]" in caplog.text
    monkeypatch.setattr(Attempts, "supervise", lambda *_: "finished")
    with pytest.raises(OSError, match="No space left"):
        start(config, resume=True)


def test_an_attempt_that_got_stuck_is_followed_by_another_within_the_same_limit(
    config: Config, run: RunDir, dying: Callable[[list[list[int]]], Dying]
) -> None:
    made = dying([[]])
    made.error = Stalled("stuck for 600 s at generator-0:\ntrainer-0 waits for generator-0; and so on")
    assert start(config) == 0
    lines = [json.loads(line) for line in run.attempt(2).records("launcher", 0).read_text().splitlines()]
    assert lines[0]["reason"] == "stuck for 600 s at generator-0"
    again = dying([[], [], [], []])
    again.error = made.error
    with pytest.raises(
        Stalled, match=r"^3 attempts in a row committed no new step .*; stuck for 600 s at generator-0:"
    ):
        start(config, resume=True)


def test_attempts_that_get_on_may_go_on_for_ever(
    config: Config, run: RunDir, dying: Callable[[list[list[int]]], Dying]
) -> None:
    made = dying([[step] for step in range(1, 21)])
    assert start(config) == 0
    assert made.epochs == list(range(1, 22))


def test_no_attempt_follows_where_none_is_wanted(
    config: Config, run: RunDir, dying: Callable[[list[list[int]]], Dying]
) -> None:
    dying([[4], [8]])
    with pytest.raises(AttemptFailed, match=r"^trainer-0 ended"):
        start(with_value(config, "limits.attempts", 0))
    assert state_of(run, 1) == "failed"
    assert newest_epoch(run) == 1


@pytest.mark.parametrize("how", ["signal", "file"])
def test_no_attempt_follows_a_request_to_stop(
    how: str, config: Config, run: RunDir, dying: Callable[[list[list[int]]], Dying]
) -> None:
    made = dying([[], []])

    def ask(epoch: int) -> None:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            run.attempt(epoch).stop_request.write_bytes(b"{}")

    made.also = ask
    with pytest.raises(AttemptFailed):
        start(config)
    assert newest_epoch(run) == 1


def test_no_attempt_follows_one_that_was_taken_over(
    config: Config, run: RunDir, dying: Callable[[list[list[int]]], Dying]
) -> None:
    made = dying([[], []])
    made.also = lambda _: leave(run, "running")
    with pytest.raises(Fenced, match="replaced by attempt 2"):
        start(config)
    assert (state_of(run, 1), newest_epoch(run)) == ("failed", 2)


def test_another_process_that_died_too_often_ends_the_run(
    config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> str:
        raise RoleDied("generator-0 was started again 3 times")

    monkeypatch.setattr(Attempts, "supervise", die)
    with pytest.raises(RoleDied):
        start(config)
    assert (state_of(run, 1), newest_epoch(run)) == ("failed", 1)
