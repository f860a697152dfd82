"""Who may start a run, what may be resumed with what, and what goes on from where."""

from __future__ import annotations

import grp
import logging
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from started import QUICKSTART, begin, config_in, end_at_once, leave, start, state_of

from areal_hpc import checkpoint
from areal_hpc.buffer.epochs import newest_epoch
from areal_hpc.cluster.owner import Owner
from areal_hpc.config.keys import keys, with_value
from areal_hpc.config.load import load
from areal_hpc.config.schema import Config
from areal_hpc.errors import CheckpointError, ConfigError, RunDirError
from areal_hpc.fs import publish_json
from areal_hpc.journal import Journal
from areal_hpc.roles import launcher
from areal_hpc.roles.attempts import committed_a_step
from areal_hpc.roles.launcher import CHANGEABLE, ROUNDING
from areal_hpc.roles.trainer import requested_step
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_in(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    end_at_once(monkeypatch)


# Who may start


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
    monkeypatch.setattr(launcher, "prepare", lambda _: leave(run, "running"))
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
    words = [f"run_root={config.run_root}", "name=run", f"model.path={config.model.path}", "cluster.shape=local"]
    return load([QUICKSTART], [*words, *overrides])


def test_another_experiment_under_the_same_name_is_refused(config: Config, run: RunDir) -> None:
    start(config)
    begin(run)
    other = changed(config, "seed=9", "rollout.group_size=4", "trainer.total_steps=3")
    with pytest.raises(RunDirError) as refusal:
        start(other, resume=True)
    assert "rollout.group_size (was 8), seed (was 1) would change within one run" in str(refusal.value)
    assert "total_steps" not in str(refusal.value)
    assert load([run.config]).seed == 1


def test_a_run_whose_own_configuration_is_damaged_says_where_another_copy_is(config: Config, run: RunDir) -> None:
    start(config)
    begin(run)
    run.config.write_text("name: run\nagent:\n  online:")
    with pytest.raises(
        ConfigError, match=rf"(?s)the run itself wrote {run.config}; restore it, each of its checkpoints"
    ):
        start(config, resume=True)
    run.config.unlink()
    with pytest.raises(ConfigError, match="restore it, each of its checkpoints holds a copy"):
        start(config, resume=True)


def test_all_checkpoints_that_somebody_deletes_meanwhile_are_an_error_that_names_them(run: RunDir) -> None:
    leave(run, "failed")
    begin(run)
    assert not committed_a_step(run, 1)
    run.checkpoints.rmdir()
    with pytest.raises(RunDirError, match=rf"{run.checkpoints} is gone; put it back, or restore it from a copy"):
        committed_a_step(run, 1)


def test_a_run_whose_checkpoints_are_all_gone_does_not_begin_again(config: Config, run: RunDir) -> None:
    """A full disk leaves the marks of a checkpoint that failed and of the next, which was to wait for it; no third."""
    start(config)
    begin(run)
    journal = Journal(run, 1)
    journal.checkpoint(4, ())
    journal.checkpoint(8, ())
    assert start(config, resume=True) == 0
    journal.checkpoint(12, ())
    journal.close()
    with pytest.raises(CheckpointError, match="attempt 1 had made that of step 4; restore it from a copy, or set"):
        start(config, resume=True)
    run.checkpoints.rmdir()
    with pytest.raises(RunDirError, match="is gone; put it back"):
        start(config, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_whose_ring_is_gone_is_neither_begun_anew_nor_gone_on_with(
    resume: bool, config: Config, run: RunDir
) -> None:
    (RunDir.create(run.root).checkpoints / "step-00000004.e00000001").mkdir()
    with pytest.raises(RunDirError, match="restore ring/ from a copy"):
        start(config, resume=resume)
    assert newest_epoch(run) == 0 and not run.config.exists()


def test_what_teaches_nothing_may_change(config: Config, run: RunDir) -> None:
    start(config)
    begin(run)
    trainer = ("trainer.total_steps=99", "trainer.ranks=2")
    other = changed(config, *trainer, "generation.replicas=2", "limits.stop_s=5", "weights.transport=disk")
    assert start(other, resume=True) == 0
    assert load([run.config]) == other


def test_a_run_may_be_given_to_a_group_later_by_the_command_that_is_told(config: Config, run: RunDir) -> None:
    start(config)
    begin(run)
    shared = changed(config, f"run_group={grp.getgrgid(os.getegid()).gr_name}")
    with pytest.raises(RunDirError, match="is not the group's; run `") as refusal:
        start(shared, resume=True)
    subprocess.run(str(refusal.value).split("`")[1], shell=True, check=True)
    assert start(shared, resume=True) == 0
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (run.root, run.attempt(2).state, run.token)]
    assert modes == [0o2770, 0o660, 0o600]


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


def test_a_run_goes_on_from_another_directory_than_it_was_begun_in(
    config: Config, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory knows where the model is; a relative path typed elsewhere is another one."""
    config = with_value(config, "model.path", "models/tiny")
    (tmp_path / "here/models/tiny").mkdir(parents=True)
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert start(config) == 0
    begin(run)
    monkeypatch.chdir(tmp_path / "there")
    assert load([run.config]).model.path == str(tmp_path / "here/models/tiny")
    assert start(load([run.config]), resume=True) == 0
    with pytest.raises(RunDirError, match=rf"model\.path \(was {tmp_path}/here/models/tiny\) would change"):
        start(config, resume=True)
