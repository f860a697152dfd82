"""A run started as a person starts it, ``areal-hpc run`` in a process of its own, and what its files and processes say.

Most runs here are forks of a process that has imported everything (``forked.py``), since imports would be most of what
they do; ``fresh=True`` starts an interpreter for each process, as outside of tests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from forked import ForkedCommand, role_name

from areal_hpc.buffer.chain import ChainName
from areal_hpc.buffer.records import RecordType
from areal_hpc.buffer.scan import ChainReader, GroupFetcher
from areal_hpc.checkpoint import CHECKPOINT_NAME, verify
from areal_hpc.fs import read_json
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Record, RecordReader
from areal_hpc.types import TrajectoryGroup
from areal_hpc.watermark import Watermark

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT_S = 120.0
"""Far more than any wait takes on a busy machine."""

GROUPS = 2
CONFIG: dict[str, Any] = {
    "name": "run",
    "model": {"max_tokens": 128},
    "prompts": {"train": "tiny_task:Numbers", "eval": "tiny_task:Numbers"},
    "rollout": {
        "reward": "tiny_task:spread",
        "group_size": 2,
        "concurrency": 8,
        "sampling": {"max_new_tokens": 48},
        "filter": {"zero_variance": False},
    },
    "buffer": {"max_staleness": 1, "commit_s": 0.05},
    "algorithm": {"groups_per_step": GROUPS},
    "trainer": {"total_steps": 5, "optimizer": {"lr": 1.0e-2}},
    "weights": {"bucket_mb": 0.05},
    "checkpoint": {"every_steps": 100},
    "limits": {"stop_s": 30.0},
}
"""About five steps in two seconds, once everything is up; on a machine that is busy with other tests, far slower."""
STEPS = CONFIG["trainer"]["total_steps"]
ROLES = ("trainer-0", "generator-0", "rollout-0", "evaluator-0")
EVALUATE = ("evaluation.every_steps=2", "evaluation.num_prompts=4")


def until(what: str, ready: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    deadline = time.monotonic() + limit_s
    while not (answer := ready()):
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        time.sleep(0.02)
    return answer


def command(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``areal-hpc`` to its end."""
    line = [sys.executable, "-m", "areal_hpc", *map(str, words)]
    return subprocess.run(
        line, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False, **options
    )


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def fresh_command(words: list[str], output: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """``python -m areal_hpc`` with ``words``."""
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "areal_hpc", *words],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            # A shell that runs the tests in the background hands SIGINT down as ignored; a person's shell does not.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  no threads here
        )


class Launched:
    """One start of a run."""

    def __init__(self, root: Path, *words: str, fresh: bool = False, command: str = "run") -> None:
        self.run = RunDir(root)
        self.output = root.parent / f"{root.name}.{time.monotonic_ns()}.txt"
        self.output.touch()
        start = fresh_command if fresh else ForkedCommand
        self.process = start([command, *words], self.output, environment())
        self.seen: dict[int, psutil.Process] = {}  # every process that this start was seen to have

    @property
    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def roles(self) -> dict[str, psutil.Process]:
        """The living role processes, by name."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):  # it ended, or is a zombie
                if name := role_name(child):
                    found[name] = child
                    self.seen |= {process.pid: process for process in (child, *child.children(recursive=True))}
        return found

    def hangs(self, name: str) -> Path:
        """While this file is there, the role's file calls hang, if it was started with HANG_ON_REQUEST in its
        environment; it may name threads whose calls do not."""
        return self.run.root.parent / f"{name}.hangs"

    def records(self, kind: str) -> list[Record]:
        attempt = self.run.newest_attempt() if self.run.attempts.is_dir() else None
        return [] if attempt is None else [r for r in RecordReader(attempt.telemetry).poll() if r.kind == kind]

    def wait_for_step(self, step: int, limit_s: float = LIMIT_S) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.text
            return any(record.number("step") >= step for record in self.records("step"))

        until(f"step {step}", reached, limit_s)
        self.roles()

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """The exit code, once the launcher has ended."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s} s:\n{self.text}") from None

    def left_over(self) -> list[psutil.Process]:
        return [process for process in self.seen.values() if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def launched(
    directory: Path, model: Path, *words: str, name: str = "run", fresh: bool = False, command: str = "run"
) -> Iterator[Launched]:
    """Start run ``name`` of ``CONFIG`` in ``directory``; whatever it leaves is killed by pid in the end."""
    words = (*arguments(directory, model), f"name={name}", *words)
    with _ended(Launched(directory / name, *words, fresh=fresh, command=command)) as started:
        yield started


@contextmanager
def resumed(run: RunDir, *words: str) -> Iterator[Launched]:
    """Go on with a run by its directory alone."""
    with _ended(Launched(run.root, str(run.root), *words, command="resume")) as started:
        yield started


@contextmanager
def _ended(started: Launched) -> Iterator[Launched]:
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.roles()
            started.process.kill()
            started.process.wait()
        for process in started.left_over():
            process.kill()


def arguments(directory: Path, model: Path) -> list[str]:
    config = directory / "config.yaml"
    if not config.exists():
        config.write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    return [str(config), f"run_root={directory}", f"model.path={model}"]


def newest_checkpoint(run: RunDir) -> Any:
    """The checkpoint of the newest attempt with the highest step, verified."""
    names = [name for name in os.listdir(run.checkpoints) if CHECKPOINT_NAME.fullmatch(name)]
    return verify(run.checkpoints / max(names, key=lambda name: (name[-8:], name)))


def num_consumed(run: RunDir) -> int:
    """Different prompt positions that the newest checkpoint counts as consumed."""
    return len(Watermark.from_state(newest_checkpoint(run).state["ring"]["consumed"]))


def state_of(run: RunDir, epoch: int = 1) -> str:
    return str(read_json(run.attempt(epoch).state)["state"])


def groups_in(run: RunDir) -> list[tuple[int, TrajectoryGroup]]:
    """Every group that was sealed into the ring, with the weight version of its ticket."""
    chains, fetcher, found = run.ring / "chains", GroupFetcher(run), []
    for text in os.listdir(chains):
        name = ChainName.parse(text)
        assert name is not None
        for record in ChainReader(chains, name).poll(last=True):
            if record.type is RecordType.DATA:
                ref = record.ref(text)
                found.append((ref.version.step, fetcher.read(ref)))
    return found


def assert_stopped_in_order(started: Launched) -> int:
    """Everything is gone, and the checkpoint is that of the last step; which one that was."""
    assert started.left_over() == []
    assert state_of(started.run, started.run.all_attempts()[-1].epoch) == "stopped"
    stopped_at = int(newest_checkpoint(started.run).version.step)
    assert stopped_at == max(record.number("step") or 0 for record in started.records("step"))
    assert num_consumed(started.run) == stopped_at * GROUPS
    return stopped_at
