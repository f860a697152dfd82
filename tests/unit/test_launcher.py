"""Who may start a run, what a start leaves behind, and how an end is judged; the processes are whole in test_run.py."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.buffer.epochs import StartRecord, claim_epoch, newest_epoch, write_start
from areal_hpc.cluster.local import Ended, LocalLauncher
from areal_hpc.cluster.owner import Owner
from areal_hpc.config.keys import keys
from areal_hpc.config.load import load
from areal_hpc.config.schema import Config
from areal_hpc.errors import DataError, RoleDied, RunDirError
from areal_hpc.fs import RunDir, publish_json, read_json
from areal_hpc.report import LiveConsole
from areal_hpc.roles import launcher
from areal_hpc.roles.launcher import CHANGEABLE, ROUNDING, run_local
from areal_hpc.roles.stopping import Signals, stop_run
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
    monkeypatch.setattr(launcher, "_supervise", lambda *_: "finished")
    monkeypatch.setattr(launcher, "write_report", lambda _: None)


def start(config: Config, *, resume: bool = False, takeover: bool = False) -> int:
    return run_local(config, resume=resume, takeover=takeover, console=LiveConsole(3, io.StringIO()))


def begin(run: RunDir, epoch: int = 1) -> None:
    """What the trainer writes when an attempt really begins."""
    version = WeightVersion(epoch, 0)
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

    monkeypatch.setattr(launcher, "_supervise", supervise)
    assert start(config) == code
    assert seen == [("running", True, True)]
    assert state_of(run) == outcome
    (line,) = run.attempt(1).records("launcher", 0).read_text().splitlines()
    assert json.loads(line)["event"] == outcome


@pytest.mark.parametrize("failing", ["_supervise", "publish", "create_exclusive"])
@pytest.mark.parametrize("error", [RoleDied("x"), OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_no_exception_leaves_an_attempt_running(
    failing: str, error: BaseException, config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> str:
        raise error

    monkeypatch.setattr(launcher, failing, fail)
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


# Who may start


def leave(run: RunDir, state: str | None, **changes: Any) -> None:
    """An attempt as this process or, with ``changes``, another would have left it; None: it got no further yet."""
    owner = dataclasses.replace(Owner.this_process(), **changes).record()
    epoch = claim_epoch(RunDir.create(run.root), owner)
    if state is not None:
        publish_json(run.attempt(epoch).create().state, {"state": state, **owner})


@pytest.mark.parametrize("state", ["running", None])
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
    other = changed(
        config, "trainer.total_steps=99", "generation.replicas=2", "limits.stop_s=5", "weights.transport=disk"
    )
    assert start(other, resume=True) == 0
    assert load([run.config]) == other


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


# How an end is judged


@pytest.fixture
def local(run: RunDir) -> LocalLauncher:
    attempt = RunDir.create(run.root).attempt(1).create()
    for role in ("trainer", "generator", "rollout", "evaluator"):
        attempt.log(role, 0).write_text("".join(f"line {n} of {role}\n" for n in range(40)))
    return LocalLauncher(run, 1, {})


@pytest.mark.parametrize(
    ("ended", "named"),
    [
        ([("trainer", 0), ("evaluator", 0)], None),
        ([("rollout", 0)], "rollout-0 ended with exit code 0"),
        ([("trainer", 75)], "trainer-0 ended with exit code 75"),
        ([("evaluator", 1)], "evaluator-0 ended with exit code 1"),
        ([("trainer", 1), ("generator", -9)], "generator-0 ended with signal 9 (SIGKILL)"),
        ([("trainer", 0), ("rollout", 1)], "rollout-0 ended with exit code 1"),
    ],
)
def test_a_role_that_ends_too_early_is_named_with_its_last_lines(
    ended: list[tuple[str, int]], named: str | None, local: LocalLauncher
) -> None:
    all_ended = [Ended(role, 0, code) for role, code in ended]
    if named is None:
        launcher._judge(local, all_ended)
        return
    with pytest.raises(RoleDied) as died:
        launcher._judge(local, all_ended)
    text, role = str(died.value), named.split("-")[0]
    assert text.startswith(f"{named}; its log {local.attempt.log(role, 0)} ends with:\nline 25 of {role}\n")
    assert text.endswith(f"line 39 of {role}")


@pytest.mark.parametrize("code", [0, 75, -signal.SIGTERM, None])
def test_a_stop_is_one_when_the_committing_trainer_ended_in_order(code: int | None, local: LocalLauncher) -> None:
    others = [Ended("trainer", 1, 1), Ended("generator", 0, -9)]  # may have lost the rank that ended first
    ended = others if code is None else [Ended("trainer", 0, code), *others]
    assert launcher._judge_stopped(local, ended) == "stopped"


@pytest.mark.parametrize(
    ("code", "words"), [(-9, r"within limits\.stop_s and was killed.*--resume"), (1, "ended with exit code 1")]
)
def test_a_stop_without_a_checkpoint_is_a_failure(code: int, words: str, local: LocalLauncher) -> None:
    with pytest.raises(RoleDied, match=words):
        launcher._judge_stopped(local, [Ended("trainer", 0, code)])


def test_only_the_end_of_a_long_log_is_read(local: LocalLauncher) -> None:
    path = local.attempt.log("trainer", 0)
    path.write_bytes(b"x" * 10**6 + b"\nthe end \xff\n")
    assert local.last_lines("trainer", 0).endswith("x\nthe end �")
    assert len(local.last_lines("trainer", 0)) < 70_000
    path.write_bytes(b"")
    assert local.last_lines("trainer", 0) == ""


# Requests to stop


@pytest.fixture
def hangup() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler) and None
    signal.signal(signal.SIGHUP, before)


def test_signals_are_counted_and_given_back(hangup: Callable[[Any], None]) -> None:
    hangup(signal.SIG_DFL)
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert signals.count == 3
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_nohup_is_respected(hangup: Callable[[Any], None]) -> None:
    hangup(signal.SIG_IGN)
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.count == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_stop_asks_by_a_file_and_waits_for_the_answer(run: RunDir) -> None:
    leave(run, "running")
    attempt = run.attempt(1)

    def answer() -> None:
        while not attempt.stop_request.exists():
            pass
        publish_json(attempt.state, {"state": "stopped", **Owner.this_process().record()})

    thread = threading.Thread(target=answer)
    thread.start()
    assert stop_run(run, timeout_s=20) == "stopped"
    thread.join()


@pytest.mark.parametrize("state", ["running", None])
def test_stop_of_a_run_whose_launcher_is_gone_says_so(state: str | None, run: RunDir) -> None:
    leave(run, state, start_ticks=1)
    run.attempt(1).create()
    assert stop_run(run, timeout_s=20) == "dead"
    assert not run.attempt(1).stop_request.exists()


def test_stop_gives_up_in_words(run: RunDir) -> None:
    leave(run, "running", host="node17")
    with pytest.raises(RunDirError, match=r"process \d+ on node17 did not stop in 0 s; wait longer with --timeout"):
        stop_run(run, timeout_s=0)
    assert run.attempt(1).stop_request.exists()
