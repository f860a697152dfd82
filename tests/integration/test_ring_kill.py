"""Real writer processes, killed at random instants and started again: every prompt is trained exactly once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from areal_hpc.buffer.epochs import claim_epoch
from areal_hpc.buffer.reader import RingReader
from areal_hpc.config.schema import BufferConfig
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion

NUM_SLOTS, NUM_GROUPS, MAX_STALENESS, STEPS, KILLS, CHECKPOINT_STEPS = 2, 3, 1, 60, 12, 5
CAPACITY = (MAX_STALENESS + 1) * NUM_GROUPS
LIMIT_S = 120.0

WRITER = f"""
import sys, time
from pathlib import Path
import numpy as np
from areal_hpc.buffer.writer import RingWriter
from areal_hpc.config.schema import BufferConfig
from areal_hpc.run_dir import RunDir
from areal_hpc.types import StopReason, Trajectory, TrajectoryGroup

slot = int(sys.argv[3])
config = BufferConfig(max_staleness={MAX_STALENESS}, segment_mb=0.02, commit_s=0.005)
writer = RingWriter(RunDir(Path(sys.argv[1])), int(sys.argv[2]), slot=slot, num_slots={NUM_SLOTS}, config=config,
                    capacity={CAPACITY}, poll_s=0.002)
while (issued := writer.issued()) is None:
    time.sleep(0.002)
again, position = [], slot
while True:
    again += writer.reissues()
    while position in issued:
        position += {NUM_SLOTS}
    ticket = writer.try_reserve(again[0] if again else position)
    if ticket is None:
        time.sleep(0.002)
        continue
    if again:
        again.pop(0)
    else:
        position += {NUM_SLOTS}
    size = 100 + ticket.position % 1000
    time.sleep(0.001 * (ticket.position % 5))
    one = Trajectory(token_ids=np.full(size, ticket.position, np.int32), loss_mask=np.ones(size, np.bool_),
                     logprobs=np.zeros(size, np.float32), versions=np.full(size, ticket.version.step, np.int32),
                     reward=1.0, stop=StopReason.STOP)
    writer.seal(ticket, TrajectoryGroup(position=ticket.position, prompt_id="", trajectories=(one,)))
"""


class Run:
    """The trainer is this process; writers are children that die whenever the dice say so."""

    def __init__(self, root: Path, seed: int) -> None:
        self.run = RunDir.create(root)
        self.random = random.Random(seed)
        self.writers: dict[int, subprocess.Popen[bytes]] = {}
        self.trained: list[int] = []
        self.kills = 0

    def attempt(self, until: int, checkpoint: tuple[dict[str, object], WeightVersion] | None) -> RingReader:
        epoch = claim_epoch(self.run, {})
        resume = {"state": checkpoint[0], "parent": checkpoint[1]} if checkpoint else {}
        config = BufferConfig(max_staleness=MAX_STALENESS)
        reader = RingReader(
            self.run,
            epoch,
            num_slots=NUM_SLOTS,
            config=config,
            capacity=CAPACITY,
            poll_s=0.01,
            discover_s=0.01,
            **resume,
        )
        version = WeightVersion(epoch, checkpoint[1].step if checkpoint else 0)
        reader.write_start(version, "data", {})
        reader.release(version)
        for slot in range(NUM_SLOTS):
            self.start(epoch, slot)
        while version.step < until:
            version = self.train(reader, version)
        return reader

    def start(self, epoch: int, slot: int) -> None:
        command = [sys.executable, "-c", WRITER, str(self.run.root), str(epoch), str(slot)]
        self.writers[slot] = subprocess.Popen(command, env=dict(os.environ))

    def kill(self, slot: int) -> None:
        self.writers[slot].send_signal(signal.SIGKILL)
        assert self.writers.pop(slot).wait() == -signal.SIGKILL

    def train(self, reader: RingReader, version: WeightVersion) -> WeightVersion:
        deadline = time.monotonic() + LIMIT_S
        while (refs := reader.claim(NUM_GROUPS, version)) is None:
            assert time.monotonic() < deadline, reader.waiting_for()
            time.sleep(0.002)
        for ref in refs:
            assert version.step - ref.version.step <= MAX_STALENESS
            group = reader.read(ref)
            assert set(group.trajectories[0].token_ids) == {ref.position}
        self.trained += [ref.position for ref in refs]
        version = WeightVersion(version.epoch, version.step + 1)
        reader.release(version)
        if version.step % CHECKPOINT_STEPS == 0:
            reader.covered(reader.state_dict())
        if self.random.random() < KILLS / STEPS:
            slot = self.random.randrange(NUM_SLOTS)
            time.sleep(self.random.random() * 0.01)
            self.kill(slot)
            self.start(version.epoch, slot)
            self.kills += 1
        return version

    def stop(self) -> None:
        for slot in list(self.writers):
            self.kill(slot)


def test_killed_writers_and_a_lost_attempt_train_every_prompt_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", seed=3)
    try:
        half = STEPS // 2
        reader = run.attempt(half, None)
        state, parent, kept = reader.state_dict(), WeightVersion(1, half), list(run.trained)
        for step in range(half, half + 4):  # these are lost: no checkpoint holds them
            run.train(reader, WeightVersion(1, step))
        run.stop()
        run.trained = kept
        reader = run.attempt(STEPS, (state, parent))
    finally:
        run.stop()
    assert run.kills >= 5
    assert len(run.trained) == len(set(run.trained)) == STEPS * NUM_GROUPS
    # Two writers walk their halves of the stream; what is missing below the highest is at most what is in the ring.
    missing = set(range(max(run.trained))) - set(run.trained)
    assert list(reader.state_dict()["consumed"]["above"]) == sorted(
        set(run.trained) - set(range(min(missing, default=0)))
    )
    assert len(list(run.run.ring.rglob("*"))) < 64
