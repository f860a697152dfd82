"""Whatever dies of a run is started again while the run goes on: real processes, real kills, nothing trained twice."""

from __future__ import annotations

import http.client
import json
import re
import signal
import time
import urllib.parse
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from launched import GROUPS, Launched, command, launched, newest_checkpoint, until

from areal_hpc.fs import read_json
from areal_hpc.keys import engine_token
from areal_hpc.liveness.given_up import give_up
from areal_hpc.report import prove_run
from areal_hpc.run_dir import RunDir

ENDLESS = ("trainer.total_steps=4000", "limits.stop_s=60")
SMALL_BUCKETS = "weights.bucket_mb=0.001"  # an update of many calls, so that a kill lands within one


def check_exactly_once(run: RunDir) -> None:
    """From the run's files, and that every step had its whole batch."""
    proof = prove_run(run)
    assert proof.proven, proof.violations
    assert proof.trained == proof.steps * GROUPS > 0


def restarts(started: Launched) -> Counter[Any]:
    return Counter(record.values["process"] for record in started.records("restart"))


def engine_events(started: Launched, event: str) -> list[dict[str, Any]]:
    return [dict(record.values) for record in started.records("engine") if record.values["event"] == event]


def newest_step(started: Launched) -> int:
    return int(max((record.number("step") or 0 for record in started.records("step")), default=0))


def kill_in_update(started: Launched, index: int) -> None:
    """Kill a generator while it takes new weights: the engine itself says when that is."""
    attempt = started.run.newest_attempt()
    assert attempt is not None
    endpoint = read_json(attempt.endpoint("generator", index))
    token = engine_token(started.run.token.read_text(), attempt.epoch, index, endpoint["incarnation"])
    process = started.roles()[f"generator-{index}"]
    assert process.pid == endpoint["pid"]
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(endpoint["url"]).netloc, timeout=30)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        connection.request("GET", "/server_info", headers={"Authorization": f"Bearer {token}"})
        if json.loads(connection.getresponse().read())["updating"]:
            process.kill()
            connection.close()
            return
    raise AssertionError("no update in a minute")


def give_up_on(started: Launched, index: int, why: str) -> None:
    """What the trainer does after updates that failed again and again."""
    attempt = started.run.newest_attempt()
    assert attempt is not None
    give_up(attempt, f"generator-{index}", read_json(attempt.endpoint("generator", index))["incarnation"], why)


def test_D21_fault_45_whoever_dies_beside_the_trainer_is_replaced_and_the_run_goes_on(
    model: Path, tmp_path: Path
) -> None:
    """Two engines, two workers, an evaluator: killed together in mid-generation; then an engine in mid-broadcast, whose
    next process is given up as one that takes no weights."""
    words = ("generation.replicas=2", "rollout.workers=2", "evaluation.every_steps=2", "evaluation.num_prompts=4")
    with launched(tmp_path, model, *ENDLESS, SMALL_BUCKETS, *words) as started:
        started.wait_for_step(2)
        for name in ("generator-0", "rollout-1", "evaluator-0"):
            started.roles()[name].kill()
        until("generator-0 to serve again", lambda: engine_events(started, "back"))
        started.wait_for_step(newest_step(started) + 2)
        assert restarts(started) == {"generator-0": 1, "rollout-1": 1, "evaluator-0": 1}
        told = len(started.run.evaluated_steps())

        kill_in_update(started, 1)
        until("both engines to be back", lambda: len(engine_events(started, "back")) == 2)
        started.wait_for_step(newest_step(started) + 2)
        lost = [event["engine"] for event in engine_events(started, "lost")]
        assert lost == ["generator-0", "generator-1"]

        give_up_on(started, 1, "3 updates have failed")
        until("that engine to be back once more", lambda: len(engine_events(started, "back")) == 3)
        (attempt,) = started.run.all_attempts()
        assert "generator-1 is given up: 3 updates have failed" in attempt.log("generator", 1).read_text()
        until("the evaluator to go on", lambda: len(started.run.evaluated_steps()) > told)

        started.roles()["evaluator-0"].suspend()  # it lives and says nothing
        shown = command("status", started.run.root).stdout
        started.roles()["evaluator-0"].resume()
        assert "restarts     evaluator-0 1, generator-0 1, generator-1 2, rollout-1 1" in shown
        assert "generator-0, generator-1, rollout-0, rollout-1, trainer-0 alive; evaluator-0 silent" in shown

        started.process.send_signal(signal.SIGTERM)
        assert started.wait() == 75, started.text
        assert started.left_over() == []
    assert "generator-0 ended with signal 9 (SIGKILL); it is started again" in started.text
    assert max(record.number("ring_staleness_max") or 0 for record in started.records("step")) <= 1
    check_exactly_once(started.run)


@pytest.mark.long
def test_the_only_engine_may_die_and_then_the_trainer_and_nothing_is_lost(model: Path, tmp_path: Path) -> None:
    """One engine: in mid-generation, in mid-broadcast; then the trainer, whose next attempt comes by itself."""
    with launched(tmp_path, model, *ENDLESS, SMALL_BUCKETS, "checkpoint.every_steps=2") as started:
        started.wait_for_step(2)
        started.roles()["generator-0"].kill()
        until("the engine to serve again", lambda: engine_events(started, "back"))
        started.wait_for_step(newest_step(started) + 2)

        kill_in_update(started, 0)
        until("the engine to serve again", lambda: len(engine_events(started, "back")) == 2)
        started.wait_for_step(newest_step(started) + 2)
        assert restarts(started) == {"generator-0": 2}
        committed = newest_checkpoint(started.run).version.step

        started.roles()["trainer-0"].kill()
        until("the next attempt", lambda: started.run.newest_attempt() == started.run.attempt(2))
        started.wait_for_step(committed + 3)
        assert restarts(started) == {"run": 1}
        steps = [int(record.number("step") or 0) for record in started.records("step")]
        assert steps[0] in (committed + 1, committed + 3)  # a commit may have been under way when it died
        assert command("stop", started.run.root).stdout == f"{started.run.root}: stopped\n"
        assert started.wait() == 75, started.text
        assert started.left_over() == []
    assert [read_json(started.run.attempt(epoch).state)["state"] for epoch in (1, 2)] == ["restarting", "stopped"]
    assert "trainer-0 ended with signal 9 (SIGKILL); attempt 2 goes on from the newest checkpoint" in started.text
    check_exactly_once(started.run)


@pytest.mark.long
def test_fault_41_an_engine_that_hangs_is_replaced_alone(model: Path, tmp_path: Path) -> None:
    """Stopped in mid-generation, it takes connections and answers none: its prompts run again on the one after it."""
    limits = ("limits.quiet_s=2", "limits.engine_s=3", "limits.stall_s=60", "checkpoint.every_steps=2")
    with launched(tmp_path, model, *ENDLESS, *limits) as started:
        started.wait_for_step(2)
        started.roles()["generator-0"].suspend()
        until("the engine to serve again", lambda: engine_events(started, "back"))
        started.wait_for_step(newest_step(started) + 2)
        assert restarts(started) == {"generator-0": 1}
        started.process.send_signal(signal.SIGTERM)
        assert started.wait() == 75, started.text
        assert started.left_over() == []
    assert "generator-0 has given no sign of life for" in started.text
    assert "longer than limits.engine_s = 3 s, so it is killed and replaced" in started.text
    assert started.run.newest_attempt() == started.run.attempt(1), "nobody else had to begin anew"
    check_exactly_once(started.run)


@pytest.mark.long
def test_fault_24_rollout_workers_that_hang_are_replaced_and_their_prompts_run_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is stopped, the other's file calls have no end while its heart beats."""
    monkeypatch.setenv("HANG_ON_REQUEST", "yes")
    limits = ("limits.quiet_s=2", "limits.worker_s=4", "limits.stall_s=60", "checkpoint.every_steps=2")
    with launched(tmp_path, model, *ENDLESS, *limits, "rollout.workers=2") as started:
        started.wait_for_step(2)
        started.hangs("rollout-0").write_text("heartbeat")
        started.roles()["rollout-1"].suspend()
        for name in ("rollout-0", "rollout-1"):
            killed = rf"{name} .*longer than limits\.worker_s = 4 s, so it is killed and replaced"
            until(f"{name} to be killed", lambda killed=killed: re.search(killed, started.text))
        started.hangs("rollout-0").unlink()
        until("both to be replaced", lambda: restarts(started) == {"rollout-0": 1, "rollout-1": 1})
        started.wait_for_step(newest_step(started) + 4)
        started.process.send_signal(signal.SIGTERM)
        assert started.wait() == 75, started.text
        assert started.left_over() == []
    assert "rollout-0 waits for the file system: " in started.text
    assert "rollout-1 has given no sign of life for" in started.text
    assert started.run.newest_attempt() == started.run.attempt(1), "nobody else had to begin anew"
    check_exactly_once(started.run)


def test_a_trainer_that_never_gets_anywhere_is_given_up(model: Path, tmp_path: Path) -> None:
    with launched(tmp_path, model, *ENDLESS, "limits.attempts=2") as started:
        for epoch in (1, 2):
            until("a trainer", lambda epoch=epoch: started.run.attempt(epoch).heartbeat("trainer", 0).exists())
            started.roles()["trainer-0"].kill()
        assert started.wait() == 1
        assert started.left_over() == []
    said = "areal-hpc: 2 attempts in a row committed no new step (limits.attempts); trainer-0 ended with signal 9"
    assert said in started.text
    assert [read_json(started.run.attempt(epoch).state)["state"] for epoch in (1, 2)] == ["restarting", "failed"]
    assert started.run.newest_attempt() == started.run.attempt(2)
