"""Runs that are stopped, killed, taken over or started twice: real processes and signals."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from launched import (
    EVALUATE,
    GROUPS,
    ROLES,
    STEPS,
    arguments,
    assert_stopped_in_order,
    command,
    groups_in,
    launched,
    newest_checkpoint,
    num_consumed,
    resumed,
    state_of,
    until,
)

from areal_hpc.report import status_lines


def pelt(process: psutil.Process, number: int) -> int:
    """Send a process up to ``number`` requests to stop, at random moments until it ends; how many reached it."""
    moments = random.Random(37)
    for sent in range(number):
        try:
            process.send_signal(signal.SIGTERM)
        except psutil.NoSuchProcess:
            return sent
        time.sleep(moments.expovariate(1000.0))
    return number


def test_A37_a_scheduler_that_signals_every_process_a_thousand_times_costs_nothing_and_the_run_goes_on(
    model: Path, tmp_path: Path
) -> None:
    with launched(tmp_path, model, "trainer.total_steps=400") as started:
        started.wait_for_step(2)
        roles = started.roles()
        for process in [*roles.values(), started.process]:
            process.send_signal(signal.SIGTERM)
        assert pelt(roles["trainer-0"], 1000) > 20, "hardly any signal came before the end"
        assert started.wait() == 75, started.text
        assert "INFO stopping: the step under way, then a checkpoint" in started.text
        assert f"`areal-hpc resume {started.run.root}` goes on from the newest checkpoint" in started.text
        stopped_at = assert_stopped_in_order(started)
    sealed = {group.position for _, group in groups_in(started.run)}
    last = stopped_at + 3
    with resumed(started.run, f"trainer.total_steps={last}") as again:
        assert again.wait() == 0, again.text
        assert [record.number("step") for record in again.records("step")] == list(range(stopped_at + 1, last + 1))
    assert num_consumed(again.run) == last * GROUPS  # so no position was trained twice
    twice = [group.position for _, group in groups_in(again.run)]
    assert len(twice) == len(set(twice)), "a group that was sealed before the stop was made again"
    assert sealed <= set(twice)


def test_a_second_request_ends_everything_at_once(model: Path, tmp_path: Path) -> None:
    with launched(tmp_path, model, "trainer.total_steps=400", "limits.stop_s=100") as started:
        started.wait_for_step(1)
        started.roles()["trainer-0"].suspend()  # so the first request alone would take until limits.stop_s
        started.process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        assert started.process.poll() is None
        started.process.send_signal(signal.SIGINT)
        assert started.wait(limit_s=10.0) == 1, started.text
        assert started.left_over() == []
    assert state_of(started.run) == "aborted"


def test_a_trainer_that_is_killed_at_the_stop_limit_is_not_called_stopped(model: Path, tmp_path: Path) -> None:
    with launched(tmp_path, model, "trainer.total_steps=400", "limits.stop_s=3") as started:
        started.wait_for_step(1)
        started.roles()["trainer-0"].suspend()
        started.process.send_signal(signal.SIGTERM)
        assert started.wait() == 1
        assert "trainer-0 did not end within limits.stop_s and was killed" in started.text
        assert started.left_over() == []
    assert state_of(started.run) == "failed"


def test_a_stop_while_everything_still_starts_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    with launched(tmp_path, model, *EVALUATE) as started:
        until("the first role", started.roles)
        started.process.send_signal(signal.SIGTERM)
        assert started.wait() == 75, started.text
        assert started.left_over() == []
    assert state_of(started.run) == "stopped"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_the_model_is_made_leaves_no_half_of_one(number: signal.Signals, tmp_path: Path) -> None:
    with launched(tmp_path, tmp_path / "model", "model.maker=tiny_task:make_for_ever") as started:
        until("the making to begin", lambda: list(tmp_path.glob(".model.*/making")))
        assert status_lines(started.run)[1].startswith(
            f"state        running: making the model {tmp_path}/model, process"
        )
        started.process.send_signal(number)
        assert started.wait() == 75, started.text
        assert "Traceback" not in started.text
    why = {signal.SIGINT: "Ctrl-C, or SIGINT", signal.SIGTERM: "SIGTERM"}[number]
    assert status_lines(started.run)[1] == f"state        stopped: {why} (attempt 1)"
    assert list(tmp_path.glob("*model*")) == []


# Kills


@pytest.mark.parametrize("name", ROLES)
def test_a_killed_role_ends_a_run_without_restarts_and_is_named(name: str, model: Path, tmp_path: Path) -> None:
    evaluate = EVALUATE if name == "evaluator-0" else ()
    never = ("limits.restarts=0", "limits.attempts=0")
    with launched(tmp_path, model, "trainer.total_steps=400", *never, *evaluate) as started:
        started.wait_for_step(1)
        started.roles()[name].kill()
        assert started.wait() == 1, started.text
        assert f"areal-hpc: {name} ended with signal 9 (SIGKILL); its log " in started.text
        assert "Traceback" not in started.text.split(f"{name} ended")[0]
        assert started.left_over() == []
    assert state_of(started.run) == "failed"


def test_a_killed_launcher_takes_its_roles_along_and_the_run_can_be_resumed(model: Path, tmp_path: Path) -> None:
    with launched(tmp_path, model, "trainer.total_steps=400") as started:
        started.wait_for_step(2)
        started.process.kill()
        until("the roles to end", lambda: not started.left_over())
    assert state_of(started.run) == "running"
    assert "dead" in command("status", started.run.root).stdout
    assert command("stop", started.run.root).stdout == f"{started.run.root}: dead\n"
    stopped_at = newest_checkpoint(started.run).version.step  # the trainer had the time to commit
    assert stopped_at >= 2
    last = stopped_at + 2
    with launched(tmp_path, model, f"trainer.total_steps={last}", "--resume") as again:
        assert again.wait() == 0, again.text
    assert num_consumed(again.run) == last * GROUPS


# One run in one directory


def test_a_run_that_is_taken_over_stops_and_spoils_nothing(model: Path, tmp_path: Path) -> None:
    endless = "trainer.total_steps=400"
    with launched(tmp_path, model, endless, "checkpoint.every_steps=2") as first:
        first.wait_for_step(3)
        with launched(tmp_path, model, endless, "--resume", "--takeover") as second:
            assert first.wait() == 1
            assert f"of {first.run.root} was replaced by attempt 2; this process must stop" in first.text
            until("a step of attempt 2", lambda: second.run.attempt(2).root.is_dir() and second.records("step"))
            second.process.send_signal(signal.SIGTERM)
            assert second.wait() == 75, second.text
            assert_stopped_in_order(second)
    assert state_of(first.run, 1) == "failed"
    assert newest_checkpoint(first.run).version.epoch == 2


def test_A5_a_run_in_use_is_refused_until_the_command_stops_it_and_one_beside_it_is_not_disturbed(
    model: Path, tmp_path: Path
) -> None:
    endless = "trainer.total_steps=400"
    words = [*arguments(tmp_path, model), "name=run", endless]
    with launched(tmp_path, model, endless) as first, launched(tmp_path, model, name="other") as other:
        first.wait_for_step(1)
        for extra in ([], ["--resume"]):
            second = command("run", *words, *extra)
            assert second.returncode == 2
            assert second.stderr.count("\n") == 1
            assert f"in use by process {first.process.pid} on " in second.stderr
            assert f"areal-hpc stop {first.run.root}" in second.stderr
        assert other.wait() == 0, other.text
        assert first.process.poll() is None, first.text
        told = command("stop", first.run.root)
        assert (told.returncode, told.stdout) == (0, f"{first.run.root}: stopped\n"), told.stderr
        assert first.wait() == 75, first.text
        assert_stopped_in_order(first)
        assert other.left_over() == []
    assert num_consumed(other.run) == STEPS * GROUPS

    without = command("run", *words)
    assert (without.returncode, without.stderr.count("\n")) == (2, 1)
    assert "already holds a run; continue it with --resume" in without.stderr
    changed = command("run", *words, "--resume", "seed=7", "algorithm.clip_high=0.3")
    assert (changed.returncode, changed.stderr.count("\n")) == (2, 1)
    assert "seed (was 1), algorithm.clip_high (was 0.2) would change within one run" in changed.stderr
