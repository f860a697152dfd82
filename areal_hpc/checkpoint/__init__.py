"""Checkpoints: one directory for a step, one atomic commit for everything that a resumed run needs.

    sweep(run, epoch)                                   # at the start of an attempt
    found = newest(run, lineage)                        # None only where no checkpoint was ever made
    ...                                                 # every k steps, at a step's edge:
    directory = begin(run, version)                     # all ranks copy their state to host memory, then train on
    write(run, version, save, state, directory=directory, still_leader=...)          # in the background
    prune(run, lineage, rules)

    checkpoints/step-00000042.e00000003/                optimizer step 42, made by attempt (epoch) 3
        whatever ``save`` wrote
        part-00001.json ...                             each rank's word that its own files hold what its memory held
        state.json                                      plain data: see ``roles/commits.py`` for what and why
        MANIFEST.json                                   written last: size and CRC-32C of every file, layout, versions
        PINNED                                          put there by a person: never delete this one

A checkpoint is made under a temporary name, everything in it is fsynced and read again, and one rename makes it exist.
A crash at any instant leaves either the whole or a temporary that the next attempt sweeps. No torch: the trainer writes
its own files.
"""

from areal_hpc.checkpoint.background import Background
from areal_hpc.checkpoint.choice import at_step, newest, steps_of
from areal_hpc.checkpoint.commit import add_part, await_parts, begin, write
from areal_hpc.checkpoint.files import CHECKPOINT_NAME, PENDING_NAME, Checkpoint, Lineage, size_of, verify
from areal_hpc.checkpoint.retention import Keep, prune, sweep

__all__ = [
    "CHECKPOINT_NAME",
    "PENDING_NAME",
    "Background",
    "Checkpoint",
    "Keep",
    "Lineage",
    "add_part",
    "at_step",
    "await_parts",
    "begin",
    "newest",
    "prune",
    "size_of",
    "steps_of",
    "sweep",
    "verify",
    "write",
]
