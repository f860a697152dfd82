"""``areal-hpc run`` in the shape ``local``: see that the run may start, go through its attempts, say how it went.

prepare     no other living owner, the same experiment, file system, data and reward usable, a model or its maker there
attempts    one epoch each, until the run is done, stopped, or not worth another (``attempts.py``)
report      what they came to

Until an epoch is claimed nothing has been written, and Ctrl-C simply ends the command.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from areal_hpc import checkpoint
from areal_hpc.buffer.epochs import load_lineage, newest_epoch
from areal_hpc.cluster.environment import in_job
from areal_hpc.cluster.owner import Owner
from areal_hpc.config.cluster import Shape
from areal_hpc.config.keys import keys, value_of
from areal_hpc.config.paths import anchored
from areal_hpc.config.schema import Config
from areal_hpc.errors import CheckpointError, RoleDied, RunDirError, Stalled
from areal_hpc.exits import EXIT_DONE, EXIT_ELSEWHERE, EXIT_FAILED, EXIT_STOPPED
from areal_hpc.journal import Kind, entries
from areal_hpc.liveness.job import JobView, ended_with, refuse_queued
from areal_hpc.liveness.resting import dismiss
from areal_hpc.liveness.stopping import ALIVE, Signals, refuse_living_owner, state_of
from areal_hpc.mount import examine
from areal_hpc.privacy import umask_of
from areal_hpc.report import LiveConsole, report_run
from areal_hpc.roles.attempts import Attempts, committed_a_step
from areal_hpc.roles.preparation import prepare
from areal_hpc.roles.resuming import recorded
from areal_hpc.run_dir import RunDir

log = logging.getLogger(__name__)

EXIT_CODES = {"finished": EXIT_DONE, "stopped": EXIT_STOPPED, "aborted": EXIT_FAILED}
CHANGEABLE = (
    "agent.idle_s",
    "agent.max_",
    "agent.online.baseline_window",
    "agent.online.host",
    "agent.online.idle_s",
    "agent.online.port",
    "agent.online.reward_wait_s",
    "archive.",
    "buffer.max_mb",
    "buffer.min_free_mb",
    "checkpoint.",
    "cluster.",
    "evaluation.at_start",
    "evaluation.every_steps",
    "evaluation.num_prompts",
    "evaluation.pass_reward",
    "evaluation.samples",
    "evaluation.temperature",
    "generation.max_running",
    "generation.python",
    "generation.replicas",
    "generation.server_args",
    "generation.threads",
    "limits.",
    "rollout.concurrency",
    "rollout.reward_timeout_s",
    "rollout.reward_workers",
    "rollout.timeout_s",
    "run_group",
    "run_root",
    "telemetry.",
    "trainer.backend",
    "trainer.parallel.",
    "trainer.ranks",
    "trainer.threads",
    "trainer.total_steps",
    "weights.",
)
"""Keys that may change from one attempt of a run to the next; a falling learning rate follows a new total_steps."""
ROUNDING = ("generation.threads", "trainer.ranks", "trainer.threads")
"""Those of them that change the last bits of results, and are therefore fixed in deterministic training."""


def run_local(
    config: Config, *, resume: bool, console: LiveConsole, takeover: bool = False, resume_from: int | None = None
) -> int:
    """Run ``config`` on this machine to its end.

    Args:
        resume_from: go on from the checkpoint of this step instead of the newest; what came after it is taken back.

    Returns:
        EXIT_DONE when the last step is done, EXIT_STOPPED when a stop request ended it (with a checkpoint, unless no
        step was done yet), EXIT_FAILED when a second request did not give it the time for one. In a Slurm job,
        EXIT_STOPPED asks for more time: a person's stop is then EXIT_DONE, and an end that was warned of and came
        before the last checkpoint is EXIT_STOPPED, if there has been an earlier one in the attempt. EXIT_ELSEWHERE asks
        for the same without a node that has lost its devices.

    Raises:
        RunDirError: the run directory is in use (and not to be taken over), holds a run and ``resume`` is false, is
            open to others than it should be, or lies on a file system that cannot carry a run.
        CheckpointError: there is no checkpoint of the step ``resume_from``.
        ConfigError, DataError: see ``prepare``; the run directory has not been touched.
        RoleDied: a process ended too early, and it is not, or not again, to be started again.
        NodeLost: a node has lost its devices, and nobody can leave it out.
        Stalled: nobody got on any more, and no attempt is to follow.
    """
    config = anchored(config, Path.cwd())
    run = RunDir(Path(config.run_root) / config.name)
    newest = newest_epoch(run)
    if not takeover and not ended_with(run, _refuse_job(config, run)):
        refuse_living_owner(run, newest)
    scheduled = config.cluster.shape is not Shape.LOCAL
    with _over_for_good(run) if scheduled else nullcontext():  # a person who types it may mend it, and type it again
        check_resume(run, newest, config, resume)
        if resume_from is not None:
            _check_step(run, newest, resume_from)
        examine(run.root, config.buffer.min_free_mb)
        prepare(config)
    if not in_job(os.environ) and shutil.which("sbatch"):
        log.warning("training on this machine, outside of any job; `areal-hpc submit` hands a run to Slurm")
    run = RunDir.create(run.root, config.run_group)
    with (
        umask_of(config.run_group),
        Signals(from_scheduler=scheduled) as signals,
        console,
        _over_for_good(run, _is_anothers),
    ):
        attempts = Attempts(run=run, config=config, console=console, signals=signals, resume_from=resume_from)
        try:
            outcome = attempts.go(after=newest)
        except (RoleDied, Stalled) as failure:
            _report_if_possible(run)
            warned = isinstance(failure, RoleDied) and _is_told_by_slurm(config, signals)
            if not (warned and committed_a_step(run, newest_epoch(run))):
                raise
            log.warning("%s", failure)  # a checkpoint that came too late costs its steps, not the weeks that are left
            return EXIT_STOPPED
    code = EXIT_ELSEWHERE if attempts.lost else _exit_code(outcome, run, config)
    _conclude(run, goes_on=code in (EXIT_STOPPED, EXIT_ELSEWHERE))
    return code


def _conclude(run: RunDir, *, goes_on: bool) -> None:
    """Report how far the run came. Where it has ended, satellites that rest for it leave Slurm's queue."""
    if goes_on:
        _report_if_possible(run)  # an error here would change the exit code by which the batch script goes on
    else:
        dismiss(run)
        report_run(run)


def _exit_code(outcome: str, run: RunDir, config: Config) -> int:
    return EXIT_DONE if outcome == "stopped" and _has_no_more_to_do(run, config) else EXIT_CODES[outcome]


@contextmanager
def _over_for_good(run: RunDir, unless: Callable[[RunDir], bool] = lambda _: False) -> Iterator[None]:
    """If an error ends the run, satellites that rest for it leave Slurm's queue: no attempt would wake them."""
    try:
        yield
    except Exception:
        try:
            if not unless(run):
                dismiss(run)
        except OSError as error:  # it must not hide the error that ended the run, perhaps of the same file system
            log.warning("satellites may still rest in the queue; `areal-hpc stop %s` ends them: %s", run.typed, error)
        raise


def _is_anothers(run: RunDir) -> bool:
    """Whether another process has begun an attempt and is at work, so that the run has not ended with this one."""
    if (newest := newest_epoch(run)) == 0:
        return False
    state, owner = state_of(run, newest)
    return state in ALIVE and owner != Owner.this_process()


def _refuse_job(config: Config, run: RunDir) -> JobView | None:
    """The last Slurm job of a run that is to go on on this machine, if that job is over.

    None where the run has never been a job, and where this process is itself in one.

    Raises:
        RunDirError, SubmissionError: as ``refuse_queued``.
    """
    if config.cluster.shape is not Shape.LOCAL or not run.attempts.is_dir():
        return None
    return refuse_queued(run)


def _is_told_by_slurm(config: Config, signals: Signals) -> bool:
    """Whether a signal in a Slurm job has asked for the end."""
    return config.cluster.shape is not Shape.LOCAL and signals.count > 0


def _has_no_more_to_do(run: RunDir, config: Config) -> bool:
    """Whether the stop of a Slurm job was a person's request: after any other, such as the time limit, it goes on."""
    last = run.newest_attempt()
    return config.cluster.shape is not Shape.LOCAL and last is not None and last.stop_request.exists()


def _report_if_possible(run: RunDir) -> None:
    """How far a run came that has failed or goes on: what stops this, such as a full disk, must not hide why it failed,
    nor keep it from going on."""
    try:
        report_run(run)
    except OSError as error:
        log.warning("there is no report: %s", error)


def check_resume(run: RunDir, newest: int, config: Config, resume: bool) -> None:
    """Refuse to go on with another experiment under the same name. A start that got nowhere is no experiment.

    Raises:
        RunDirError: there is one, and ``resume`` is false or something is different that may not be; names the keys.
            Or nothing says any more how its checkpoints follow from each other.
        CheckpointError: somebody has deleted all checkpoints.
        ConfigError: its ``config.yaml`` is gone, or damaged.
    """
    lineage = load_lineage(run, newest + 1)
    if not lineage:
        return
    if not resume:
        raise RunDirError(f"{run.root} already holds a run; continue it with --resume, or set another `name`")
    _refuse_lost(run, lineage)
    before = anchored(recorded(run.config), Path.cwd())
    changed = [key for key in keys() if value_of(before, key) != value_of(config, key)]
    fixed = ROUNDING if config.deterministic else ()
    frozen = [
        f"{key} (was {value_of(before, key)})" for key in changed if key in fixed or not key.startswith(CHANGEABLE)
    ]
    if frozen:
        raise RunDirError(f"{run.config}: {', '.join(frozen)} would change within one run; set another `name`")
    for key in changed:
        log.info("from this attempt on: %s = %s (was %s)", key, value_of(config, key), value_of(before, key))


def _refuse_lost(run: RunDir, lineage: checkpoint.Lineage) -> None:
    """Refuse a run whose checkpoints are all gone: it would begin again at step 0 without a word.

    The journal marks each before the one before it is waited for. So a full disk may leave two marks and no checkpoint,
    and a third mark follows only where the first one's checkpoint was durable.
    """
    if any(checkpoint.CHECKPOINT_NAME.fullmatch(name) for name in run.in_checkpoints()):
        return
    for epoch in lineage:
        marked = [entry.step for entry in entries(run, epoch) if entry.kind is Kind.CHECKPOINT]
        if len(marked) > 2:
            raise CheckpointError(
                f"{run.checkpoints} holds no checkpoint, and attempt {epoch} had made that of step {marked[-3]}; "
                "restore it from a copy, or set another `name`"
            )


def _check_step(run: RunDir, newest: int, step: int) -> None:
    """Refuse a step that has no checkpoint, and say what going back to it takes back."""
    lineage = load_lineage(run, newest + 1)
    steps = checkpoint.steps_of(run, lineage) if run.checkpoints.is_dir() else []
    if step not in steps:
        found = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"--resume-from {step}: {run.checkpoints} has no checkpoint of it; there are: {found}")
    later = [one for one in steps if one > step]
    what = f"the checkpoints of steps {', '.join(map(str, later))} and " if later else ""
    log.info("going back to step %d: %sall that was trained after it are taken back", step, what)
