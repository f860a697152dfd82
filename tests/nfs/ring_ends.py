"""The two ends of the ring as programs, for clients of the laboratory. They say what they do, and when by their clock.

    ring_ends.py writer ROOT EPOCH SLOT NUM_SLOTS STEPS GROUPS_PER_S    until it is killed
    ring_ends.py trainer ROOT NUM_SLOTS STEPS                           an attempt: goes on from the last checkpoint

A writer walks its share of the stream as a rollout worker does; the stream ends with what so many steps train. A
trainer checks every token that it takes.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.buffer.epochs import check_fence, claim_epoch
from areal_hpc.buffer.reader import RingReader
from areal_hpc.buffer.scan import GroupFetcher, intact
from areal_hpc.buffer.writer import RingWriter
from areal_hpc.config.schema import BufferConfig
from areal_hpc.fs import publish_json, read_if_listed
from areal_hpc.run_dir import RunDir
from areal_hpc.types import GroupRef, StopReason, Trajectory, TrajectoryGroup, WeightVersion

GROUPS_PER_STEP, MAX_STALENESS, CHECKPOINT_STEPS = 8, 2, 5
GROUP_SIZE, NUM_TOKENS = 8, 3_000  # 13 bytes a token: 39 KB a trajectory
CAPACITY = (MAX_STALENESS + 1) * GROUPS_PER_STEP
CONFIG = BufferConfig(max_staleness=MAX_STALENESS, segment_mb=2.0, min_free_mb=0.0)
CLAIM_POLL_S = 0.02
LIMIT_S = 300.0


def say(*words: object) -> None:
    print(*words, flush=True)


def write(root: Path, epoch: int, slot: int, num_slots: int, steps: int, groups_per_s: float) -> None:
    writer = RingWriter(RunDir(root), epoch, slot=slot, num_slots=num_slots, config=CONFIG, capacity=CAPACITY)
    while (issued := writer.issued()) is None:
        time.sleep(CLAIM_POLL_S)
    again, position = list[int](), slot
    while True:
        again += writer.reissues()
        while position in issued:
            position += num_slots
        due = again[0] if again else position
        ticket = writer.try_reserve(due) if due < steps * GROUPS_PER_STEP else None
        if ticket is None:
            time.sleep(CLAIM_POLL_S)
            continue
        if again:
            again.pop(0)
        else:
            position += num_slots
        time.sleep(1.0 / groups_per_s)
        writer.seal(ticket, a_group(ticket.position, ticket.version.step))
        say("sealed", ticket.position, time.time())


def a_group(position: int, version: int) -> TrajectoryGroup:
    one = Trajectory(
        token_ids=np.full(NUM_TOKENS, position, np.int32),
        loss_mask=np.ones(NUM_TOKENS, np.bool_),
        logprobs=np.zeros(NUM_TOKENS, np.float32),
        versions=np.full(NUM_TOKENS, version, np.int32),
        reward=1.0,
        stop=StopReason.STOP,
    )
    each = tuple(replace(one, episode=episode) for episode in range(GROUP_SIZE))
    return TrajectoryGroup(position=position, prompt_id="", trajectories=each)


class Trainer:
    def __init__(self, root: Path, num_slots: int) -> None:
        self.run = RunDir(root)
        self.epoch = claim_epoch(self.run, {})
        saved = read_if_listed(root / "saved.json")
        resume: dict[str, Any] = {}
        step = 0
        if saved is not None:
            parent = WeightVersion(*saved["version"])
            resume, step = {"state": saved["ring"], "parent": parent}, parent.step
        self.reader = RingReader(self.run, self.epoch, num_slots=num_slots, config=CONFIG, capacity=CAPACITY, **resume)
        self.fetcher = GroupFetcher(self.run)
        self.version = WeightVersion(self.epoch, step)
        self._tell_what_becomes_visible()
        self.reader.write_start(self.version, "data", {})
        self.reader.release(self.version)
        say("epoch", self.epoch, step)

    def _tell_what_becomes_visible(self) -> None:
        ledger = self.reader._ledger
        sealed = ledger.sealed

        def told(ref: GroupRef, newest: Any) -> None:
            say("seen", ref.position, time.time())
            sealed(ref, newest)

        ledger.sealed = told  # type: ignore[method-assign]

    def step(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while (refs := self.reader.claim(GROUPS_PER_STEP, self.version)) is None:
            assert time.monotonic() < deadline, self.reader.waiting_for()
            time.sleep(CLAIM_POLL_S)
        for ref, group in zip(refs, intact(self.fetcher.read_all(refs)), strict=True):
            assert self.version.step - ref.version.step <= MAX_STALENESS
            assert all(set(one.token_ids) == {ref.position} for one in group.trajectories)
        check_fence(self.run, self.epoch)
        self.version = WeightVersion(self.epoch, self.version.step + 1)
        say("trained", self.version.step, *(ref.position for ref in refs))
        self.reader.release(self.version)
        if self.version.step % CHECKPOINT_STEPS == 0:
            state = self.reader.state_dict()
            publish_json(self.run.root / "saved.json", {"version": list(self.version), "ring": state})
            self.reader.covered(state)
            say("saved", self.version.step)


def train(root: Path, num_slots: int, steps: int) -> None:
    trainer = Trainer(root, num_slots)
    while trainer.version.step < steps:
        trainer.step()


if __name__ == "__main__":
    part, place, *numbers = sys.argv[1:]
    if part == "writer":
        write(Path(place), *map(int, numbers[:-1]), float(numbers[-1]))
    else:
        train(Path(place), *map(int, numbers))
