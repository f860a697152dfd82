"""Who may start a run, what a start leaves behind, and how an end is judged; the processes are whole in test_run.py."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_hpc import checkpoint
from areal_hpc.buffer.epochs import StartRecord, claim_epoch, newest_epoch, write_start
from areal_hpc.cluster.owner import Owner
from areal_hpc.config.cluster import Shape
from areal_hpc.config.keys import keys, with_value
from areal_hpc.config.load import load
from areal_hpc.config.schema import Config
from areal_hpc.errors import AttemptFailed, CheckpointError, DataError, Fenced, RoleDied, RunDirError, Stalled
from areal_hpc.fs import RunDir, publish_json, read_json
from areal_hpc.report import LiveConsole
from areal_hpc.roles import attempts, launcher
from areal_hpc.roles.attempts import Attempts
from areal_hpc.roles.launcher import CHANGEABLE, ROUNDING, run_local
from areal_hpc.roles.trainer import requested_step
from areal_hpc.types import WeightVersion
from areal_hpc.watermark import Watermark

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load([QUICKSTART], [f"run_root={tmp_path}", "name=run"])


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that end at once, well, and without a look at model and data."""
    monkeypatch.setattr(launcher, "preflight", lambda _: None)
    monkeypatch.setattr(Attempts, "supervise", lambda *_: "finished")
    monkeypatch.setattr(launcher, "write_report", lambda _: None)


def start(config: Config, *, resume: bool = False, takeover: bool = False, resume_from: int | None = None) -> int:
    console = LiveConsole(3, io.StringIO())
    return run_local(config, resume=resume, takeover=takeover, resume_from=resume_from, console=console)


def begin(run: RunDir, epoch: int = 1, step: int = 0) -> None:
    """What the trainer writes when an attempt really begins."""
    version = WeightVersion(epoch, step)
    write_start(run, epoch, StartRecord(parent=None, version=version, consumed=Watermark(), fingerprint="f"))


def state_of(run: RunDir, epoch: int = 1) -> Any:
    return read_json(run.attempt(epoch).state)["state"]


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


@pytest.mark.parametrize("failing", ["supervise", "publish", "create_exclusive"])
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

    monkeypatch.setattr(launcher, "preflight", fail)
    with pytest.raises(DataError):
        start(config)
    assert not run.root.exists()


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


def test_an_attempt_that_got_stuck_is_followed_by_another_within_the_same_limit(
    config: Config, run: RunDir, dying: Callable[[list[list[int]]], Dying]
) -> None:
    made = dying([[]])
    made.error = Stalled("stuck for 600 s at generator-0:\ntrainer-0 waits for generator-0; and so on")
    assert start(config) == 0
    lines = [json.loads(line) for line in run.attempt(2).records("launcher", 0).read_text().splitlines()]
    assert lines[0]["reason"] == "stuck for 600 s at generator-0:"
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
        start(changed(config, "limits.attempts=0"))
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


# Who may start


def leave(run: RunDir, state: str | None, **changes: Any) -> None:
    """An attempt as this process or, with ``changes``, another would have left it; None: it got no further yet."""
    owner = dataclasses.replace(Owner.this_process(), **changes).record()
    epoch = claim_epoch(RunDir.create(run.root), owner)
    if state is not None:
        publish_json(run.attempt(epoch).create().state, {"state": state, **owner})


@pytest.mark.parametrize("state", ["running", "restarting", None])
@pytest.mark.parametrize("changes", [{}, {"host": "node17"}], ids=["here", "elsewhere"])
def test_a_run_in_use_is_refused_with_a_way_out(
    state: str | None, changes: dict[str, Any], config: Config, run: RunDir
) -> None:
    leave(run, state, **changes)
    host = changes.get("host", Owner.this_process().host)
    expected = f"in use by process {os.getpid()} on {host}; stop it with `areal-hpc stop {run.root}`.*--takeover"
    with pytest.raises(RunDirError, match=expected):
        start(config)
    assert newest_epoch(run) == 1
    assert start(config, takeover=True) == 0
    assert newest_epoch(run) == 2


@pytest.mark.parametrize(
    ("state", "changes"),
    [
        ("finished", {}),
        ("failed", {"host": "node17"}),
        ("restarting", {"start_ticks": 1}),
        ("running", {"start_ticks": 1}),  # the pid is another process's now
        ("running", {"boot": "another"}),  # the host was rebooted
        (None, {"start_ticks": 1}),
    ],
)
def test_a_run_whose_owner_is_gone_may_go_on(
    state: str | None, changes: dict[str, Any], config: Config, run: RunDir
) -> None:
    leave(run, state, **changes)
    assert start(config) == 0
    assert state_of(run, 2) == "finished"


def test_of_two_starts_at_one_moment_one_wins(config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other claims while this one still looks at its data."""
    monkeypatch.setattr(launcher, "preflight", lambda _: leave(run, "running"))
    with pytest.raises(RunDirError, match="somebody else at the same moment"):
        start(config)
    assert newest_epoch(run) == 1, "the winner would be fenced"
    assert state_of(run) == "running"


# What may be resumed


def test_a_directory_that_holds_a_run_is_continued_only_on_demand(config: Config, run: RunDir) -> None:
    assert start(config) == 0
    begin(run)
    with pytest.raises(RunDirError, match="already holds a run; continue it with --resume, or set another `name`"):
        start(config)
    assert start(config, resume=True) == 0
    assert newest_epoch(run) == 2


def changed(config: Config, *overrides: str) -> Config:
    return load([QUICKSTART], [f"run_root={config.run_root}", "name=run", *overrides])


def test_another_experiment_under_the_same_name_is_refused(config: Config, run: RunDir) -> None:
    start(config)
    begin(run)
    other = changed(config, "seed=9", "rollout.group_size=4", "trainer.total_steps=3")
    with pytest.raises(RunDirError) as refusal:
        start(other, resume=True)
    assert "rollout.group_size (was 8), seed (was 1) would change within one run" in str(refusal.value)
    assert "total_steps" not in str(refusal.value)
    assert load([run.config]).seed == 1


def test_what_teaches_nothing_may_change(config: Config, run: RunDir) -> None:
    start(config)
    begin(run)
    trainer = ("trainer.total_steps=99", "trainer.ranks=2")
    other = changed(config, *trainer, "generation.replicas=2", "limits.stop_s=5", "weights.transport=disk")
    assert start(other, resume=True) == 0
    assert load([run.config]) == other


def test_C18_going_back_to_a_step_says_what_it_takes_back_and_tells_the_trainer(
    config: Config, run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    start(config)
    begin(run)
    for step in (10, 20, 30):
        checkpoint.write(run, WeightVersion(1, step), lambda _: None, {})
    with pytest.raises(CheckpointError, match=r"--resume-from 15: .* no checkpoint of it; there are: 10, 20, 30"):
        start(config, resume=True, resume_from=15)
    assert newest_epoch(run) == 1, "nothing has been claimed"
    with caplog.at_level(logging.INFO):
        assert start(config, resume=True, resume_from=10) == 0
    assert "going back to step 10: the checkpoints of steps 20, 30 and all that was trained after it" in caplog.text
    assert requested_step(run, 2) == 10
    assert start(config, resume=True) == 0
    assert requested_step(run, 3) is None


def test_C18_a_step_is_gone_back_to_once_however_many_attempts_carry_the_request(config: Config, run: RunDir) -> None:
    start(config)
    begin(run)
    checkpoint.write(run, WeightVersion(1, 10), lambda _: None, {})
    for epoch in (2, 3, 4):
        assert start(config, resume=True) == 0
        publish_json(run.attempt(epoch).resume_from, {"step": 10, "after": 1})
    assert [requested_step(run, epoch) for epoch in (2, 3, 4)] == [10, 10, 10]
    begin(run, 3)
    assert [requested_step(run, epoch) for epoch in (2, 3, 4)] == [10, 10, None]


def test_a_start_that_got_nowhere_freezes_nothing(config: Config, run: RunDir) -> None:
    """A wrong path is mended and the command repeated; no --resume, no other name."""
    start(config)
    assert start(changed(config, "seed=9")) == 0
    assert load([run.config]).seed == 9


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_number_of_threads_may_change_unless_bits_count(deterministic: bool, config: Config, run: RunDir) -> None:
    mode = f"deterministic={str(deterministic).lower()}"
    config = changed(config, mode)
    start(config)
    begin(run)
    other = changed(config, mode, "trainer.threads=2", "generation.replicas=2")
    if not deterministic:
        assert start(other, resume=True) == 0
        return
    with pytest.raises(RunDirError, match=r"config.yaml: trainer\.threads \(was 1\) would change within one run"):
        start(other, resume=True)


def test_every_changeable_key_exists() -> None:
    assert [prefix for prefix in CHANGEABLE if not any(key.startswith(prefix) for key in keys())] == []
    assert all(key in keys() and key.startswith(CHANGEABLE) for key in ROUNDING)
