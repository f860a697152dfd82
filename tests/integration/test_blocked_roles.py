"""One run whose roles are blocked in turn: each is named, shows its stacks, and is forgiven; the last one is not.

trainer-1 stopped       fault 47: a rank that skips a collective, as its peer sees it
generator-0 stopped     an engine that does not answer
rollout-0 stopped       nobody fills the ring
evaluator-0 stopped     nobody waits for it yet, but no run ends without it
their files             trainer, worker, evaluator hang in a call while their hearts beat, as where one of several
                        servers does not answer; an engine with its heart, as where none does
the ring's directory    a file of it hangs when it is opened: the run ends with 70
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from launched import Launched, command, launched, newest_checkpoint, until
from tiny_models import make_model

from areal_hpc.fs import read_json

QUIET_S, STALL_S = 3.0, 16.0
WORDS = (
    *("trainer.total_steps=4000", "trainer.ranks=2", "evaluation.every_steps=1000", "evaluation.num_prompts=2"),
    *(f"limits.quiet_s={QUIET_S}", f"limits.stall_s={STALL_S}", "limits.stop_s=5", "limits.attempts=0"),
)
BLOCKED = {"trainer-1": "<- ", "generator-0": "<- ", "rollout-0": "<- ", "evaluator-0": "at evaluator-0: "}
"""What stands before its name: somebody waits for it, or nobody does."""


@pytest.mark.long
def test_fault_24_41_47_whoever_is_blocked_is_named_and_one_that_stays_so_ends_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "tiny"
    make_model(model, "qwen3", 1, hidden_size=32, intermediate_size=48, initializer_range=0.06)
    monkeypatch.setenv("HANG_ON_REQUEST", "yes")
    with launched(tmp_path, model, *WORDS) as started:
        started.wait_for_step(1)
        roles = started.roles()
        for name, before in BLOCKED.items():
            stop_for_a_while(started, name, roles[name], before)
        for name in ("trainer-0", "rollout-0", "evaluator-0", "generator-0"):
            let_files_hang_for_a_while(started, name)
        block_the_ring(started)
        until("the worker to be named", lambda: "at rollout-0: trainer-0 waits for rollout-0: a batch" in started.text)
        told = command("why", started.run.root).stdout
        assert f"<- rollout-0 waits for the file system: reading {started.run.ring / 'CONTROL.json'} (" in told, told
        assert "generator-0 answers requests and serves version " in told
        assert started.wait(limit_s=60.0) == 70, started.text
        assert started.left_over() == []
    end = started.text.rpartition("areal-hpc: ")[2]
    assert re.match(r"stuck for \d+ s at rollout-0:\ntrainer-0 waits for rollout-0: a batch of ", end), end
    assert read_json(started.run.attempt(1).state)["state"] == "failed"
    assert newest_checkpoint(started.run).version.step >= 1, "the trainers could still commit"
    told = command("why", started.run.root).stdout
    assert re.search(r"failed; this is what was last said\nstuck for \d+ s at rollout-0:\n", told), told
    stack = started.run.attempt(1).stack("rollout", 0).read_text()
    assert "in read_control" in stack, "the stack does not show where it hangs"


def stop_for_a_while(started: Launched, name: str, process: psutil.Process, before: str) -> None:
    silent = rf"{before}{name} has given no sign of life for \d+ s; process {process.pid} on .* is stopped by a signal"
    named_for_a_while(started, name, silent, process.suspend, process.resume)


def let_files_hang_for_a_while(started: Launched, name: str) -> None:
    """Its calls for files of the run hang; but for an engine's, its heart goes on beating."""
    beats = not name.startswith("generator")
    hangs = rf"{name} waits for the file system: \w+ing .*{re.escape(str(started.run.root))}/"
    switch = started.hangs(name)
    block = partial(switch.write_text, "heartbeat" if beats else "")
    named_for_a_while(started, name, hangs if beats else f"{name} has given no sign of life", block, switch.unlink)


def named_for_a_while(
    started: Launched, name: str, sentence: str, block: Callable[[], object], let_go: Callable[[], object]
) -> None:
    """What ``block`` does to a role is told within 30 s, all show what they do, and then the run gets on."""
    stacks = {path: path.stat().st_size for path in started.run.attempt(1).stacks.glob("*.txt")}
    seen = len(started.text)
    began = time.monotonic()
    block()
    until(f"{name} to be named", lambda: f"at {name}: " in started.text[seen:])
    assert time.monotonic() - began < 30.0
    assert re.search(sentence, started.text[seen:]), started.text[seen:]
    let_go()
    until("the run to get on", lambda: "the run gets on again" in started.text[seen:])
    until("stacks of all", lambda: all(path.stat().st_size > size for path, size in stacks.items()))
    assert len(stacks) == 5


@pytest.mark.long
def test_fault_24_a_launcher_that_hangs_itself_ends_its_processes_and_names_the_file(
    model: Path, tmp_path: Path
) -> None:
    """A heartbeat hangs when it is opened, as on a server that does not answer; nobody but the launcher reads it."""
    words = ("trainer.total_steps=4000", "limits.quiet_s=2", "limits.engine_s=0", "limits.stall_s=4")
    with launched(tmp_path, model, *words) as started:
        started.wait_for_step(1)
        beat = started.run.attempt(1).heartbeat("rollout", 0)

        def ended() -> bool:
            os.mkfifo(beat.with_suffix(".fifo"))
            beat.with_suffix(".fifo").replace(beat)  # the worker puts its own back with its next beat
            return started.process.poll() is not None

        until("the launcher to hang, and its end", ended)
        assert started.wait() == 70, started.text
        until("its processes to be gone", lambda: not started.left_over())
    said = rf"the launcher itself has hung for \d+ s \(limits\.stall_s\) at reading {beat}: the file system of"
    assert re.search(said, started.text), started.text


def block_the_ring(started: Launched) -> None:
    """Put a pipe that nobody writes in place of a file; the trainer may put a file back, so do it until one is open."""
    path = started.run.ring / "CONTROL.json"
    wait = f"reading {path}"

    def hangs() -> bool:
        with suppress(FileExistsError):
            path.unlink(missing_ok=True)
            os.mkfifo(path)
        beat = read_json(started.run.attempt(1).heartbeat("rollout", 0))
        return any(one["what"] == wait and one["seconds"] > 1.0 for one in beat["waits"])

    until("the worker to hang", hangs)
