"""The ledger: a run read from its files, and what is printed of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from areal_hpc import checkpoint
from areal_hpc.buffer.epochs import claim_epoch
from areal_hpc.buffer.reader import RingReader
from areal_hpc.buffer.writer import RingWriter
from areal_hpc.cli import main
from areal_hpc.config.describe import dump
from areal_hpc.config.load import load
from areal_hpc.config.schema import BufferConfig
from areal_hpc.errors import RunDirError
from areal_hpc.journal import Journal
from areal_hpc.report import Breach, ledger_lines, prove_run
from areal_hpc.report import ledger as ledger_module
from areal_hpc.report.proof import Evidence, Proof, Violation
from areal_hpc.run_dir import RunDir
from areal_hpc.types import Drop, StopReason, Trajectory, TrajectoryGroup, WeightVersion

GROUPS, ROWS = 2, 4


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "run")
    path = tmp_path / "config.yaml"
    path.write_text(
        "{name: run, model: {path: m}, prompts: {train: t}, rollout: {reward: 'r:r'}, trainer: {total_steps: 9}}",
        encoding="utf-8",
    )
    run.config.write_text(dump(load([path], ["buffer.max_staleness=1"])), encoding="utf-8")
    return run


class Attempt:
    """One attempt's trainer and worker in this process."""

    def __init__(self, run: RunDir, parent: checkpoint.Checkpoint | None = None) -> None:
        self.run, self.epoch = run, claim_epoch(run, {})
        config = BufferConfig(max_staleness=1, commit_s=0.0)
        self.reader = RingReader(
            run,
            self.epoch,
            num_slots=1,
            config=config,
            capacity=2 * GROUPS,
            state=None if parent is None else parent.state["ring"],
            parent=None if parent is None else parent.version,
            poll_s=0.0,
            discover_s=0.0,
        )
        self.version = WeightVersion(self.epoch, 0 if parent is None else parent.version.step)
        done = self.reader.write_start(self.version, "data", {}).consumed
        self.journal = Journal(run, self.epoch)
        self.writer = RingWriter(run, self.epoch, slot=0, num_slots=1, config=config, capacity=2 * GROUPS, poll_s=0.0)
        self.reader.release(self.version)
        self.reader.poll()
        self.positions = (position for position in range(1000) if position not in done)

    def seal(self, number: int, drop: Drop | None = None) -> None:
        for _ in range(number):
            position = next(self.positions)
            ticket = self.writer.try_reserve(position)
            assert ticket is not None
            if drop is None:
                self.writer.seal(ticket, group(position, self.version.step))
            else:
                self.writer.drop(ticket, drop)
        self.writer.flush()

    def step(self) -> None:
        refs = self.reader.claim(GROUPS, self.version)
        assert refs is not None, self.reader.waiting_for()
        self.version = WeightVersion(self.epoch, self.version.step + 1)
        self.journal.step(self.version.step, refs, self.reader.take_dropped())
        self.reader.release(self.version)

    def commit(self) -> checkpoint.Checkpoint:
        self.journal.checkpoint(self.version.step, self.reader.take_dropped())
        state = {"ring": self.reader.state_dict(), "prompts": {"rows": ROWS}}
        return checkpoint.verify(checkpoint.write(self.run, self.version, lambda _: None, state))


def group(position: int, step: int) -> TrajectoryGroup:
    one = Trajectory(
        token_ids=np.array([position, 1], dtype=np.int32),
        loss_mask=np.array([False, True]),
        logprobs=np.zeros(2, dtype=np.float32),
        versions=np.array([-1, step], dtype=np.int32),
        reward=1.0,
        stop=StopReason.STOP,
    )
    return TrajectoryGroup(position=position, prompt_id=f"d/{position % ROWS}", trajectories=(one,))


def test_two_attempts_are_read_and_proven(run: RunDir) -> None:
    first = Attempt(run)
    first.seal(1, Drop.FAILED)
    first.seal(2)
    first.step()
    kept = first.commit()
    first.seal(3)
    first.step()  # taken back: no checkpoint covers it
    second = Attempt(run, kept)  # all three groups wait for it: version 1 is on its branch
    second.seal(1)
    second.step()
    second.commit()
    second.step()
    proof = prove_run(run)
    assert proof.proven, proof.violations
    assert (proof.checkpoint, proof.steps, proof.trained) == (WeightVersion(second.epoch, 2), 2, 4)
    assert proof.consumed_by_drop == {Drop.FAILED: 1}
    assert (proof.steps_taken_back, proof.steps_since, proof.finished_epochs) == (1, 1, 1)
    assert proof.confirmed == 4


def test_a_run_without_a_checkpoint_has_nothing_to_lose(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove_run(run).proven
    attempt = Attempt(run)
    attempt.seal(3)
    attempt.step()
    assert main(["ledger", str(run.root), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["checkpoint"], facts["steps_since"], facts["open_sealed"]) == (None, 1, 1)
    assert "no checkpoint yet, so nothing is consumed for good" in "\n".join(ledger_lines(run, prove_run(run)))


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_proven(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = Attempt(run)
    attempt.seal(4)
    attempt.step()
    first = attempt.commit()
    attempt.step()
    last = attempt.commit()
    (last.path / "state.json").write_bytes(b"{}")
    assert main(["ledger", str(run.root)]) == 0
    text = capsys.readouterr().out
    assert f"{last.path / 'state.json'} is damaged" in text
    assert "newest checkpoint: step 1 of attempt 1" in text
    (first.path / "state.json").write_bytes(b"{}")
    assert main(["ledger", str(run.root)]) == 1
    assert f"history: {first.path / 'state.json'} is damaged" in capsys.readouterr().out


def test_of_many_violations_the_first_of_each_kind_are_told(run: RunDir) -> None:
    empty = prove_run(run)
    many = [Violation(Breach.LOST, f"position {number}") for number in range(8)] + [Violation(Breach.STALE, "old")]
    proof = Proof(**{name: getattr(empty, name) for name in Proof.__slots__} | {"violations": tuple(many)})
    lines = ledger_lines(run, proof)
    assert lines[0] == "run run: VIOLATED"
    told = [line[19:] for line in lines[1:8]]
    assert told == [*(f"lost: position {n}" for n in range(5)), "lost: ... and 3 more", "stale: old"]


def test_a_run_whose_attempts_follow_each_other_too_fast_is_refused(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ledger_module.read_evidence

    def restarted_meanwhile(run: RunDir, epoch: int) -> Evidence:
        claim_epoch(run, {})
        return read(run, epoch)

    monkeypatch.setattr(ledger_module, "read_evidence", restarted_meanwhile)
    with pytest.raises(RunDirError, match="a new attempt began at each of 3 readings"):
        prove_run(run)
