"""``areal-hpc ledger``: the proof that every prompt was consumed exactly once, from a run's files alone.

Works on any node, while the run goes on and afterwards. ``report/proof.py`` says what is compared with what.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from areal_hpc.buffer.chain import ChainName
from areal_hpc.buffer.control import read_control
from areal_hpc.buffer.epochs import load_lineage, newest_epoch
from areal_hpc.buffer.records import RecordType
from areal_hpc.buffer.scan import ChainReader
from areal_hpc.checkpoint import CHECKPOINT_NAME, Checkpoint, verify
from areal_hpc.errors import CheckpointError, RunDirError
from areal_hpc.journal import entries
from areal_hpc.report.files import configuration
from areal_hpc.report.proof import Attempt, Breach, Evidence, Proof, RingState, Violation, prove
from areal_hpc.report.text import count
from areal_hpc.run_dir import RunDir
from areal_hpc.types import Drop
from areal_hpc.watermark import Watermark

MOST_TOLD = 5
READINGS = 3
"""How often a run is read that another attempt takes over meanwhile."""


def prove_run(run: RunDir) -> Proof:
    """The proof of the run as it is now.

    Raises:
        RunDirError: attempts of the run follow each other too fast to be read.
    """
    for _ in range(READINGS):
        epoch = newest_epoch(run)
        evidence = read_evidence(run, epoch)
        if newest_epoch(run) == epoch:
            return prove(evidence)
    raise RunDirError(
        f"{run.root}: a new attempt began at each of {READINGS} readings; try again when it runs steadily"
    )


def read_evidence(run: RunDir, epoch: int) -> Evidence:
    """What the files say up to attempt ``epoch``.

    While the run goes on, what moves on does so from the ring into the journal and from there into a checkpoint. So the
    ring is read first, and the journals last: what has moved meanwhile is seen twice rather than not at all.
    """
    lineage = load_lineage(run, epoch + 1)
    config = configuration(run)
    ring = _read_ring(run, max(lineage, default=0), int(config["rollout"]["workers"]))
    checkpoints, unreadable = _read_checkpoints(run, lineage)
    journals = {one: entries(run, one) for one in range(1, epoch + 1)}
    newest = max(checkpoints, key=lambda one: one.version, default=None)
    return Evidence(
        attempts=[Attempt(epoch=one, last_step=lineage[one], journal=journals.pop(one)) for one in sorted(lineage)],
        others=journals,
        checkpoints={one.version: Watermark.from_state(one.state["ring"]["consumed"]) for one in checkpoints},
        unreadable=unreadable,
        num_rows=None if newest is None else int(newest.state["prompts"]["rows"]),
        max_staleness=int(config["buffer"]["max_staleness"]),
        ring=ring,
    )


def _read_checkpoints(run: RunDir, lineage: Mapping[int, int | None]) -> tuple[list[Checkpoint], list[str]]:
    """The checkpoints of the surviving history, and what is wrong with each that is there and cannot be read."""
    found, problems = list[Checkpoint](), list[str]()
    for match in filter(None, map(CHECKPOINT_NAME.fullmatch, sorted(run.in_checkpoints()))):
        step, last = int(match[1]), lineage.get(int(match[2]), -1)
        if last is not None and step > last:
            continue
        try:
            found.append(verify(run.checkpoints / match[0], weights=False))
        except CheckpointError as error:
            if match[0] in os.listdir(run.checkpoints):  # else the run has deleted it meanwhile, for a newer one
                problems.append(str(error))
    return found, problems


def _read_ring(run: RunDir, newest: int, num_writers: int) -> RingState:
    """What the logs hold; ``newest`` is the last attempt whose trainer began."""
    control = read_control(run, known=False)
    slots = control.slots if control is not None and control.epoch == newest else ()
    sealed, dropped, reserved = dict[tuple[str, int], tuple[int, str]](), set[int](), set[int]()
    chains = run.ring / "chains"
    names = (ChainName.parse(text) for text in (os.listdir(chains) if chains.is_dir() else ()))
    for name in sorted(name for name in names if name is not None and name.epoch <= newest):
        begun: dict[int, int] = {}
        for record in ChainReader(chains, name).poll(last=True):
            ticket = record.meta["ticket"]
            if record.type is RecordType.RESERVE:
                begun[ticket] = record.meta["position"]
            elif record.type is RecordType.DATA:
                sealed[str(name), ticket] = (record.meta["position"], record.meta["prompt"])
            elif ticket in begun and not Drop(record.meta["reason"]).reissues():
                dropped.add(begun[ticket])
        if name.epoch == newest:
            reserved |= set(begun.values())
    return RingState(
        sealed=sealed,
        dropped=frozenset(dropped),
        reserved=frozenset(reserved),
        reissues=frozenset(position for slot in slots for position, _ in slot.reissues),
        num_writers=num_writers,
    )


def ledger_lines(run: RunDir, proof: Proof) -> list[str]:
    """What ``areal-hpc ledger`` prints, a line each."""
    title = f"run {run.root.name}: {'proven' if proof.proven else 'VIOLATED'}"
    rows = {
        "violations": _violation_texts(proof.violations) or ["none"],
        "steps": [_steps_text(proof)],
        "unreadable": list(proof.unreadable),
        "prompts": [_prompts_text(proof)],
        "data epochs": [_epochs_text(proof)],
        "dropped": [_drops_text(proof.consumed_by_drop) or "none for good"],
        "issued again": [_drops_text(proof.issued_again) or "none"],
        "second episodes": [f"{count(proof.dropped_again)} dropped of prompts that were consumed already"],
        "staleness": [f"at most {count(proof.max_staleness)} versions"],
        "taken back": [f"{count(proof.steps_taken_back)} steps, by restarts"],
        "not yet safe": [f"{count(proof.steps_since)} steps since that checkpoint"],
        "in the ring": [
            f"{count(proof.open_sealed)} sealed, {count(proof.open_begun)} begun, "
            f"{count(proof.open_reissued)} to be run again; {count(proof.confirmed)} trained still stored, as noted"
        ],
    }
    width = max(map(len, rows))
    return [title, *(f"  {name:<{width}}  {text}" for name, texts in rows.items() for text in texts)]


def _violation_texts(violations: Sequence[Violation]) -> list[str]:
    """The first few of each kind, one by one; of the rest how many."""
    texts = []
    for breach in Breach:
        told = [violation.text for violation in violations if violation.breach is breach]
        texts += [f"{breach}: {text}" for text in told[:MOST_TOLD]]
        if len(told) > MOST_TOLD:
            texts.append(f"{breach}: ... and {count(len(told) - MOST_TOLD)} more")
    return texts


def _steps_text(proof: Proof) -> str:
    if proof.checkpoint is None:
        return "no checkpoint yet, so nothing is consumed for good"
    step, epoch = proof.checkpoint.step, proof.checkpoint.epoch
    attempts = "1 attempt" if proof.attempts == 1 else f"{count(proof.attempts)} attempts"
    return f"{count(proof.steps)}, each once, of {attempts}; newest checkpoint: step {step} of attempt {epoch}"


def _prompts_text(proof: Proof) -> str:
    dropped = sum(proof.consumed_by_drop.values())
    return (
        f"{count(proof.trained + dropped)} consumed: {count(proof.trained)} trained, {count(dropped)} dropped for good"
    )


def _epochs_text(proof: Proof) -> str:
    return f"{count(proof.finished_epochs)} finished, of {count(proof.num_rows)} prompts each"


def _drops_text(drops: Mapping[Drop, int]) -> str:
    return ", ".join(f"{reason} {count(number)}" for reason, number in sorted(drops.items()))
