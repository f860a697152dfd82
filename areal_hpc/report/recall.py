"""A step that was trained on, from the files of the run: out of the archive, or out of the ring while it is there."""

from __future__ import annotations

import numpy as np

from areal_hpc.buffer.archive import archived_steps, read_step
from areal_hpc.buffer.chain import ChainName
from areal_hpc.buffer.epochs import history
from areal_hpc.buffer.records import RecordType
from areal_hpc.buffer.scan import ChainReader, GroupFetcher, intact
from areal_hpc.errors import DataError
from areal_hpc.journal import Entry, Kind, entries
from areal_hpc.run_dir import RunDir
from areal_hpc.types import ArchivedStep, GroupRef, TrainedStep, WeightVersion


def recall(run: RunDir, step: int) -> ArchivedStep:
    """Step ``step`` with its tokens. From the ring it has no advantages (NaN) and no proximal log-probs.

    Raises:
        DataError: the run has not made this step, or neither archive nor ring hold all of its groups.
        CorruptRecord: one of its groups is damaged in the ring.
    """
    if (path := archived_steps(run).get(step)) is not None:
        return read_step(path, step)
    found = journalled_steps(run).get(step)
    if found is None:
        raise DataError(f"{run.root} has not made step {step}; `areal-hpc inspect {run.typed}` lists what there is")
    return _from_ring(run, *found)


def journalled_steps(run: RunDir) -> dict[int, tuple[int, Entry]]:
    """Step -> (epoch, journal entry), of all steps that the run stands on."""
    return {
        entry.step: (epoch, entry)
        for epoch, last in sorted(history(run).items())
        for entry in entries(run, epoch)
        if entry.kind is Kind.STEP and (last is None or entry.step <= last)
    }


def _from_ring(run: RunDir, epoch: int, entry: Entry) -> ArchivedStep:
    present = {key: ref for chain in {one.chain for one in entry.trained} for key, ref in _sealed(run, chain).items()}
    keys = [(one.chain, one.ticket) for one in entry.trained]
    if gone := sum(key not in present for key in keys):
        raise DataError(
            f"step {entry.step} is not archived, and the ring has deleted {gone} of its {len(keys)} groups; set "
            "archive.every_steps in the next run to keep all of them"
        )
    refs = tuple(present[key] for key in keys)
    step = TrainedStep(
        version=WeightVersion(epoch, entry.step),
        refs=refs,
        readable=(True,) * len(refs),
        advantages=np.full(sum(len(ref.rewards) for ref in refs), np.nan, dtype=np.float32),
    )
    return ArchivedStep(step=step, groups=dict(enumerate(intact(GroupFetcher(run).read_all(refs)))))


def _sealed(run: RunDir, chain: str) -> dict[tuple[str, int], GroupRef]:
    """(chain, ticket) -> reference, of the groups of ``chain`` that still have files."""
    name = ChainName.parse(chain)
    assert name is not None, chain
    records = ChainReader(run.ring / "chains", name).poll(last=True)
    refs = (record.ref(chain) for record in records if record.type is RecordType.DATA)
    return {(ref.chain, ref.ticket): ref for ref in refs}
