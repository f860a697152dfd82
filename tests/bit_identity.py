"""A deterministic run that is killed again and again, what it learned, and what it recorded, for comparison."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from launched import Launched, launched, newest_checkpoint, until

from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import RecordReader

STEPS = 8
WORDS = (
    "deterministic=true",
    "limits.restarts=0",  # so that each kill is an end, and the next start a shape of its own
    "limits.attempts=0",
    "checkpoint.every_steps=2",
    "rollout.reward=tiny_task:coarse",
    "rollout.filter.zero_variance=true",
    "rollout.group_size=3",
    "rollout.attempts=1",
    "algorithm.groups_per_step=3",
    "algorithm.minibatches=2",
)
OF_THE_CLOCK = ("seconds", "ring_", "train_tokens_per_s")
"""What a step's record says of this start of the run, not of what was learned."""
OTHER_SHAPES = (
    ("generation.replicas=2", "rollout.concurrency=1", "buffer.max_mb=0.05"),
    ("generation.replicas=1", "rollout.concurrency=8", "weights.transport=disk"),
    ("generation.replicas=2", "rollout.concurrency=3", "weights.bucket_mb=0.01"),
)
"""What may change from one attempt to the next."""


def learned(run: RunDir, steps: int = STEPS) -> dict[str, str]:
    """Hashes of the last weights and of the optimizer's moments."""
    newest = newest_checkpoint(run)
    assert newest.version.step == steps
    files = ("model.safetensors", "optimizer.safetensors")
    return {name: hashlib.sha256((newest.path / name).read_bytes()).hexdigest() for name in files}


def rows(run: RunDir) -> dict[int, Mapping[str, Any]]:
    """What was recorded of each step. A step that several attempts have done must have come out the same each time."""
    found: dict[int, Mapping[str, Any]] = {}
    for attempt in sorted(os.listdir(run.attempts)):
        if not attempt.isdecimal():
            continue
        for record in RecordReader(run.attempt(int(attempt)).telemetry, roles=("trainer",)).poll():
            if record.kind == "step":
                row = {key: value for key, value in record.values.items() if not key.startswith(OF_THE_CLOCK)}
                assert found.setdefault(int(row["step"]), row) == row
    return found


def kill(started: Launched, whom: str) -> None:
    """SIGKILL to one role, to the launcher alone, or to everything at once; returns when all have ended."""
    processes = {"launcher": psutil.Process(started.process.pid), **started.roles()}
    for process in processes.values() if whom == "everything" else [processes[whom]]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert started.wait() in (1, -signal.SIGKILL), started.text
    until("the roles to end", lambda: not started.left_over(), limit_s=30.0)


def run_with_kills(
    directory: Path, model: Path, words: Sequence[str], victims: Sequence[str], seed: int, steps: int = STEPS
) -> RunDir:
    """A run that is killed once for each victim, at a random instant after some new step, and then left to finish."""
    chance, resume, reached = random.Random(seed), (), 0
    words = (*words, f"trainer.total_steps={steps}")
    for number, victim in enumerate(victims):
        shape = OTHER_SHAPES[number % len(OTHER_SHAPES)]
        with launched(directory, model, *WORDS, *words, *shape, *resume, name="killed") as started:
            if reached < steps - 2:
                started.wait_for_step(reached + chance.randint(1, 2))
            time.sleep(chance.uniform(0.0, 0.3))
            kill(started, victim)
            reached, resume = max([0, *rows(started.run)]), ("--resume",)
    with launched(directory, model, *WORDS, *words, *resume, name="killed") as started:
        assert started.wait() == 0, started.text
    return started.run
