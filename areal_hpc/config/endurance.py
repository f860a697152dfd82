"""The sections of a run that lasts: what it keeps, what it begins from, how long it waits. See ``schema``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    every_steps: int = 20
    """Optimizer steps between checkpoints; the last step and a stop always make one."""
    keep: int = 2
    """Newest checkpoints kept; an older one goes only after a newer one has been verified. A file PINNED in a
    checkpoint's directory keeps it for ever."""
    keep_every: int = 0
    """Also keep every checkpoint whose step this number divides; 0 keeps none for that."""
    keep_best: str = ""
    """Also keep the checkpoint whose evaluation is highest by this value of its result, such as `reward_mean`; of
    equals, the newest."""
    asynchronous: bool = True
    """Training waits only for the copy to host memory; false: until the checkpoint is durable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveConfig:
    every_steps: int = 0
    """Keep all trained groups, in one HDF5 file for so many optimizer steps (in memory until then); 0 keeps none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig:
    run: str = ""
    """Train on the archive of this run directory instead of generating; empty is a run as usual."""
    from_step: int = 0
    """Begin with that run's checkpoint of this step; 0 begins with `model.path`."""
    to_step: int = 0
    """Last step; 0 is the last one in the archive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitsConfig:
    start_s: float = 300.0
    """Longest time for a process of the run to come up."""
    starve_s: float = 1800.0
    """Longest time the trainer waits for a full batch."""
    weight_update_s: float = 120.0
    """Longest time for one weight update to reach every engine."""
    restarts: int = 3
    """How often one generator, rollout worker or evaluator is started again in `restart_window_s`; 0 is never."""
    restart_window_s: float = 600.0
    """See `restarts`; a process that dies more often ends the run."""
    attempts: int = 3
    """Attempts in a row without a new committed step after which the run ends, also where each was stopped by another
    node that had lost its devices; 0 starts none after one that failed."""
    join_s: float = 86400.0
    """Longest time without any engine where satellites are to bring them; meanwhile no other limit counts. Time in
    Slurm's queue does not count: the limit begins anew while any satellite waits there that was submitted with the run
    or has served it before."""
    alone_s: float = 0.0
    """A budget and not a time-out, so it counts the queue's time as well: after so long without any engine the run
    stops, with a checkpoint, and `areal-hpc resume` goes on. The trainer's nodes cost as much as at work meanwhile; 0
    lets them wait for as long as the queue likes."""
    rejoin_s: float = 300.0
    """Longest time that a satellite waits for the run, or its next attempt, before it gives its nodes back. Its Slurm
    job then rests in the queue, held, until the run is there again and lets it go; outside of Slurm it ends."""
    checkpoint_s: float = 1800.0
    """Longest time for writing a checkpoint: who waits for it gives up, and the watchdog calls the trainer stuck."""
    quiet_s: float = 25.0
    """Silence of a process, or of all that its work depends on, after which the watchdog says who waits for whom."""
    engine_s: float = 120.0
    """Silence of one engine that somebody waits for, after which it alone is killed and replaced; 0 never does that."""
    worker_s: float = 120.0
    """Silence of one rollout worker, or time in which it hangs in a file call and no trainer does, after which it alone
    is killed and replaced; 0 never does that."""
    stall_s: float = 600.0
    """Silence as of `quiet_s` after which the watchdog ends the attempt, with exit code 70."""
    stop_s: float = 10.0
    """Longest time for everything to end after a stop request: the step under way and a checkpoint must fit into it."""
