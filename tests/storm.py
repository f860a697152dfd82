"""A kill storm: a real run whose processes are killed again and again, continued each time, and proven in the end.

    python tests/storm.py DIRECTORY --kills 40 --seed 1 [--how stand-ins|forks|processes]      prints one JSON document;
    started again in the same directory, it goes on where it was

Whom it kills and when comes from a seed: any role, the launcher alone (its roles must end by themselves), everything at
once, or the launcher with the trainer frozen and woken after its successor took over. The instants: while the attempt
still starts, somewhere in a step, in the middle of a weight broadcast, in the middle of a checkpoint; the last two are
told from the files (a step in the journal whose version CONTROL does not name yet, a checkpoint under its temporary
name). A launcher that has ended is started again with ``--resume``; one that replaces its dead roles is left alone.

Every launcher and role runs the product's own code, from its command line on, in a process of its own:

    processes    as a person starts it
    forks        forked from this process, which has imported torch and computed nothing: a cheap start
    stand-ins    forks, with stand-ins for mathematics, engines and reward processes (``stand_ins.py``)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import yaml
from forked import fork, preload, role_name
from storm_terms import CONFIG, PHASES, WEIGHTS, How, Outcome, Phase, Victim

from areal_hpc.buffer.epochs import lineage, newest_epoch, read_start
from areal_hpc.checkpoint import PENDING_NAME
from areal_hpc.fs import publish_json, read_json
from areal_hpc.report import prove_run
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import RecordReader
from areal_hpc.types import WeightVersion

LIMIT_S = 120.0
"""Longest wait for anything; far more than it takes on a busy machine."""
MOST_FAILURES = 5
"""A storm that found so many says nothing new any more."""


class Storm:
    """One run, its kills, and its continuations."""

    def __init__(self, directory: Path, model: Path, seed: int, how: How) -> None:
        self.directory, self.model, self.how = directory, model, how
        self.run = RunDir(directory / "run")
        self.record = directory / "outcome.json"
        self.outcome = Outcome(**read_json(self.record)) if self.record.exists() else Outcome()
        self.random = random.Random(f"{seed}/{self.outcome.kills}")
        self.launcher: psutil.Process | None = None
        self.frozen: list[tuple[psutil.Process, float]] = []
        self.seen: dict[int, psutil.Process] = {}
        self.epoch, self.began, self.recorded, self.measured = 0, 0.0, 0.0, True
        self.start_is_due = False
        self.output = directory / "output.txt"
        (directory / "config.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")

    # Attempts

    def start(self, *words: str) -> None:
        """Start the run, or continue it."""
        line = ["run", str(self.directory / "config.yaml"), f"run_root={self.directory}", f"model.path={self.model}"]
        if self.how is not How.PROCESSES:
            line.append("cluster.sign_sockets=never")  # what signs them is loaded by an exec, and these are forks
        if self.how is How.STAND_INS:
            line.append("evaluation.every_steps=0")
        line += ["--resume", *words] if newest_epoch(self.run) else words
        self.epoch = newest_epoch(self.run) + 1
        self.began, self.recorded, self.measured = time.monotonic(), 0.0, False
        self.output = self.directory / f"output.{self.epoch}.txt"
        with self.output.open("wb") as file:
            self.launcher = psutil.Process(self._spawn(line, file.fileno()))
        self.outcome.attempts += 1

    def _spawn(self, line: list[str], output: int) -> int:
        if self.how is How.PROCESSES:
            words = [sys.executable, "-m", "areal_hpc", *line]
            return subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True).pid
        from areal_hpc.cli import main

        return fork("launcher", output, lambda: main(line))

    def ended(self) -> int | None:
        """The launcher's exit code once it has ended (negative for a signal)."""
        assert self.launcher is not None
        with suppress(psutil.TimeoutExpired):
            code: int | None = self.launcher.wait(0)
            return 0 if code is None else code
        return None

    def roles(self) -> dict[str, psutil.Process]:
        """The living roles of this launcher by name."""
        found = {}
        with suppress(psutil.NoSuchProcess):
            assert self.launcher is not None
            for child in self.launcher.children():
                with suppress(psutil.NoSuchProcess):
                    if name := role_name(child):
                        found[name] = child
        self.seen |= {process.pid: process for process in found.values()}
        return found

    # What the files say

    def step(self) -> int:
        """The newest step in this attempt's journal; 0 before its first."""
        with suppress(FileNotFoundError), (self.run.journal / f"e{self.epoch:08d}.log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            found = re.findall(rb'\{"step":(\d+),', file.read())
            return int(found[-1]) if found else 0
        return 0

    def published(self) -> int:
        """The step that CONTROL names; -1 while it does not speak of this attempt."""
        with suppress(FileNotFoundError):
            control = read_json(self.run.ring / "CONTROL.json")
            return int(control["version"][1]) if control["epoch"] == self.epoch else -1
        return -1

    def phase(self) -> Phase:
        with suppress(FileNotFoundError):
            names = os.listdir(self.run.checkpoints)
            matches = [match for name in names if (match := PENDING_NAME.fullmatch(name))]
            if any((int(match[1]), match[2]) == (self.epoch, "tmp") for match in matches):
                return Phase.CHECKPOINT
        if (published := self.published()) < 0:
            return Phase.START
        return Phase.BROADCAST if self.step() > published else Phase.STEP

    def until(self, ready: Callable[[], bool], limit_s: float) -> bool:
        """Whether ``ready`` came true in time while the launcher lived."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and self.ended() is None:
            self.measure()
            self.wake()
            if ready():
                return True
            time.sleep(0.003)
        return False

    def measure(self) -> None:
        """Note when the attempt reached its start record, and then its first step."""
        now = time.monotonic()
        if not self.recorded and read_start(self.run, self.epoch) is not None:
            self.recorded = now
        if not self.measured and self.recorded and self.step():
            self.measured = True
            self.outcome.to_first_step.append(now - self.began)
            self.outcome.from_start_record.append(now - self.recorded)

    # Kills

    def wake(self, *, all_of_them: bool = False) -> None:
        """Let frozen trainers go on once their successors are at work."""
        for process, when in list(self.frozen):
            if all_of_them or time.monotonic() > when:
                with suppress(psutil.NoSuchProcess):
                    process.resume()
                self.frozen.remove((process, when))

    def strike(self) -> bool:
        """Wait for an instant and kill somebody; False where the run had ended or that role was not there.

        Only a new attempt can be hit at its start: one that is past it by then is ended for the next one's sake.
        """
        (wanted,) = [Phase.START] if self.start_is_due else self.random.choices(list(PHASES), list(PHASES.values()))
        (victim,) = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        self.wait_for(wanted)
        phase = self.phase()
        if wanted is Phase.START and phase is not Phase.START:
            victim = Victim.EVERYTHING
        hit = self.ended() is None and self.kill(victim)
        self.start_is_due = wanted is Phase.START and not (hit and phase is Phase.START)
        if not hit:
            return False
        self.outcome.kills += 1
        self.outcome.victims[victim] = self.outcome.victims.get(victim, 0) + 1
        self.outcome.phases[phase] = self.outcome.phases.get(phase, 0) + 1
        return True

    def wait_for(self, wanted: Phase) -> None:
        """Until the attempt is likely to be at ``wanted``, and a moment of chance longer."""
        if wanted is Phase.START:
            usual = self.outcome.to_first_step[-1] if self.outcome.to_first_step else 1.0
            delay = self.random.uniform(0.0, 0.6 * usual)
            self.until(lambda: self.phase() is not Phase.START or time.monotonic() - self.began > delay, delay)
            return
        before = self.step()
        self.until(lambda: self.step() > before, LIMIT_S)
        self.until(lambda: self.phase() is wanted, 10.0)
        time.sleep(self.random.choice([0.0, 0.005, 0.02, self.random.uniform(0.0, 0.3)]))

    def kill(self, victim: Victim) -> bool:
        """Whether there was somebody to kill."""
        assert self.launcher is not None
        roles = self.roles()
        doomed = [process for name, process in roles.items() if name.startswith(str(victim))]
        if victim in (Victim.LAUNCHER, Victim.EVERYTHING, Victim.FROZEN):
            doomed = [self.launcher]
        if victim is Victim.EVERYTHING:
            doomed += [one for role in roles.values() for one in family(role)]
        if victim is Victim.FROZEN and "trainer-0" in roles:
            roles["trainer-0"].suspend()
            self.frozen.append((roles["trainer-0"], time.monotonic() + self.random.uniform(0.5, 3.0)))
        self.random.shuffle(doomed)
        for process in doomed if victim is Victim.EVERYTHING else doomed[:1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return bool(doomed)

    def go_on(self) -> None:
        """After a hit: wait until the run moves again by itself or has ended."""
        before = (self.epoch, self.step())
        if self.until(lambda: self.moved_beyond(before), LIMIT_S):
            return
        if self.ended() is None:
            self.fail("neither ended nor went on")
            self.kill(Victim.EVERYTHING)
            self.until(lambda: False, LIMIT_S)

    def moved_beyond(self, before: tuple[int, int]) -> bool:
        """Whether there is a step after ``before``; a launcher may begin attempts by itself."""
        self.epoch = newest_epoch(self.run)
        return (self.epoch, self.step()) > before and self.step() > 0

    def continue_if_ended(self) -> None:
        """Start the next attempt where the launcher has ended, which it may only because of a kill."""
        if (code := self.ended()) is None:
            return
        text = self.output.read_text(encoding="utf-8", errors="replace")
        if code != -signal.SIGKILL and not (code == 1 and "(SIGKILL)" in text):
            self.fail(f"ended with {code}, and no kill explains it")
        self.start()

    def fail(self, what: str) -> None:
        text = self.output.read_text(encoding="utf-8", errors="replace")[-2000:]
        self.outcome.failures.append(f"attempt {self.epoch}: {what}: {text}")

    # The whole

    def blow(self, kills: int, tell: Callable[[Outcome], None]) -> None:
        """Kill until ``kills`` are done, then let the run reach its end."""
        before, began = self.outcome.seconds, time.monotonic()
        self.start()
        while self.outcome.kills < kills and len(self.outcome.failures) <= MOST_FAILURES:
            if self.strike():
                self.go_on()
            self.continue_if_ended()
            self.outcome.seconds = before + time.monotonic() - began
            publish_json(self.record, asdict(self.outcome))
            tell(self.outcome)
        self.finish()

    def finish(self) -> None:
        """Stop what still runs, continue to a last step, and see that nobody is left."""
        if self.ended() is None:
            self.kill(Victim.EVERYTHING)
        saved = prove_run(self.run).checkpoint  # the killed attempt may have come further than six steps
        begun = [start.version.step for e in range(1, self.epoch + 1) if (start := read_start(self.run, e))]
        last = 6 + max([0 if saved is None else saved.step, *begun])
        self.start(f"trainer.total_steps={last}")
        self.until(lambda: False, LIMIT_S)
        if (code := self.ended()) != 0:
            self.fail(f"the last attempt ended with {code}")
        self.wake(all_of_them=True)
        self.check(last)

    def check(self, last: int) -> None:
        """No attempt fell back behind one before it, the last one reached step ``last``, and no process outlives it."""
        reached = prove_run(self.run).checkpoint
        if reached is None or reached.step != last:
            self.outcome.failures.append(
                f"the last attempt was to reach step {last}; the newest checkpoint is {reached}"
            )
        parents = [start.parent for e in range(1, self.epoch + 1) if (start := read_start(self.run, e))]
        steps = [0 if parent is None else parent.step for parent in parents]
        if steps != sorted(steps):
            self.outcome.failures.append(f"an attempt began at an earlier step than one before it: {steps}")
        if self.how is not How.STAND_INS:  # those evaluate nothing
            self.check_evaluations(last)
        deadline = time.monotonic() + 30.0
        while (alive := [one for one in self.seen.values() if lives(one)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in alive:
            self.outcome.failures.append(f"process {process.pid} ({process.name()}) outlived its run")
            process.kill()

    def check_evaluations(self, last: int) -> None:
        """The last step has its evaluation, and none of the surviving history was made twice."""
        start = read_start(self.run, self.epoch)
        survives = lineage(self.run, self.epoch, None if start is None else start.parent)
        records = [r for attempt in self.run.all_attempts() for r in RecordReader(attempt.telemetry).poll()]
        made = [WeightVersion(r.epoch, int(r.values["step"])) for r in records if r.kind == "evaluation"]
        counts = Counter(version.step for version in made if survives(version))
        if last not in counts or max(counts.values()) > 1:
            self.outcome.failures.append(f"evaluations of the surviving history, and how often: {dict(counts)}")

    def clean_up(self) -> None:
        """Whatever happened, leave no process behind."""
        self.wake(all_of_them=True)
        if self.launcher is not None and self.ended() is None:
            self.kill(Victim.EVERYTHING)
        for process in self.seen.values():
            if lives(process):
                process.kill()


def family(process: psutil.Process) -> list[psutil.Process]:
    """The process and all below it; nobody where it has ended."""
    with suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def progress(outcome: Outcome) -> None:
    told = f"{outcome.kills} kills, {outcome.attempts} attempts, {len(outcome.failures)} failures"
    told += f", {outcome.seconds:.0f} s"
    print(f"\r{told}", end="", file=sys.stderr, flush=True)


def blow(directory: Path, model: Path, kills: int, seed: int, how: How) -> dict[str, Any]:
    """A whole storm in ``directory``, or the rest of one that was broken off there; what it found."""
    if how is not How.PROCESSES:
        preload()
    if how is How.STAND_INS:
        from stand_ins import install

        install()
        model = directory / "no-model"
        model.mkdir(parents=True, exist_ok=True)
    storm = Storm(directory, model, seed, how)
    try:
        storm.blow(kills, progress)
    finally:
        storm.clean_up()
    return storm.outcome.facts(prove_run(storm.run))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", type=Path, default=Path("none"))
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--how", type=How, choices=list(How), default=How.FORKS)
    options = parser.parse_args()
    facts = blow(options.directory, options.model, options.kills, options.seed, options.how)
    print(json.dumps(facts, indent=1))
    return 0 if facts["proof"]["proven"] and not facts["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())
