"""How a run stands, from its files: works on any node, while it runs and long after Slurm has forgotten it. Of a run
in a Slurm job, Slurm then has its word."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from areal_hpc.cluster.jobs import WAITS
from areal_hpc.cluster.owner import Owner
from areal_hpc.fs import read_if_listed
from areal_hpc.liveness import seats
from areal_hpc.liveness.alone import alone
from areal_hpc.liveness.heartbeat import watch_pulses
from areal_hpc.liveness.job import JobView, batch_log, look, works_outside
from areal_hpc.liveness.left_out import left_out
from areal_hpc.liveness.resting import resting
from areal_hpc.liveness.seats import Seat
from areal_hpc.liveness.stopping import ALIVE
from areal_hpc.report.files import configuration
from areal_hpc.report.progress import Progress, evaluation_text
from areal_hpc.report.text import count, duration
from areal_hpc.run_dir import AttemptDir, RunDir
from areal_hpc.telemetry import RecordReader

CHECKPOINT = re.compile(r"step-(\d+)\.e(\d+)")
ROLES = ("trainer", "evaluator", "generator", "rollout", "launcher")
"""Whose records tell the status."""
LAST_BYTES = 64 * 1024
"""How much of the end of each file is read: far more than the last ten records of a trainer."""


def status_lines(
    run: RunDir,
    now: Callable[[], float] = time.time,
    watch: Callable[[AttemptDir], Mapping[str, str]] = watch_pulses,
    ask: Callable[[RunDir], JobView | None] = look,
) -> list[str]:
    """What ``areal-hpc status`` prints, a line each. Of a run that goes on, it looks for a moment who is alive; of one
    that was submitted, it asks Slurm once."""
    attempts, job = run.all_attempts(), None if works_outside(run) else ask(run)
    present = [seat for _, seat in sorted(seats.present(attempts[-1]).items())] if attempts else []
    job_row = {} if job is None else {"job": job.text()}
    if not attempts:
        rows = {"run": run.root.name, "state": f"not started{_before_start(run, job)}", **job_row}
        return _aligned({**rows, **_satellites(run, present, job)})
    config = configuration(run)
    total_steps = config.get("trainer", {}).get("total_steps")
    trains = not config.get("evaluation", {}).get("checkpoint")
    newest = told = _progress(attempts[-1], total_steps)
    evaluation = newest.evaluation
    for attempt in reversed(attempts[:-1]):  # what a fresh attempt has not said yet, the one before may have
        if told.step is not None and evaluation is not None:
            break
        earlier = _progress(attempt, total_steps)
        told = earlier if told.step is None else told
        evaluation = evaluation or earlier.evaluation
    return _aligned(
        {
            "run": run.root.name,
            "state": f"{_state_text(attempts[-1], job)} (attempt {attempts[-1].epoch})",
            **job_row,
            **({"step": told.step_text(), **told.fields()} if trains else {"generation": told.fields()["generation"]}),
            **({"engines": routing + _capacity_text(config)} if (routing := newest.routing_text()) else {}),
            **(_alone(attempts[-1], now()) if _has_nodes(job) else {}),
            **_satellites(run, present, job),
            **_left_out(run, present, job),
            "evaluation": evaluation_text(evaluation),
            **({"warning": warning} if (warning := newest.drops.warning()) else {}),
            "last record": _ago(newest.last_time, now())
            + (f", last step {_ago(told.step_time, now())}" if trains else ""),
            **({"checkpoints": _checkpoints_text(run)} if trains else {}),
            **({} if job is not None and job.is_over else _processes(attempts[-1], watch)),
        }
    )


def _capacity_text(config: Mapping[str, Any]) -> str:
    """What a process gives an engine at most, where that is limited."""
    generation = config.get("generation", {})
    limits = {"requests": generation.get("max_requests"), "tokens": generation.get("max_outstanding_tokens")}
    texts = [f"{count(limit)} {what}" for what, limit in limits.items() if limit]
    return f"; at most {' and '.join(texts)} for each process at each" if texts else ""


def _ago(moment: float | None, now: float) -> str:
    return f"{duration(None if moment is None else now - moment)} ago"


def _aligned(rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows))
    return [f"{name:<{width}}  {text}" for name, text in rows.items()]


def _progress(attempt: AttemptDir, total_steps: int | None) -> Progress:
    progress = Progress(total_steps)
    for record in RecordReader(attempt.telemetry, ROLES, LAST_BYTES).poll():
        progress.feed(record)
    return progress


def _processes(attempt: AttemptDir, watch: Callable[[AttemptDir], Mapping[str, str]]) -> dict[str, str]:
    """Who is alive, has ended, or says nothing: for an attempt whose launcher may be alive."""
    if not _may_live(attempt):
        return {}
    by_state: dict[str, list[str]] = {}
    gone = seats.vacant(attempt)
    for name, pulse in sorted(watch(attempt).items()):
        if name in gone:
            continue  # it has left, in one way or another
        by_state.setdefault(pulse, []).append(name)
    texts = [f"{', '.join(names)} {pulse}" for pulse, names in sorted(by_state.items())]
    return {"processes": "; ".join(texts) or "none has come up yet"}


def _has_nodes(job: JobView | None) -> bool:
    """Whether nothing is known to the contrary; also of a run outside of Slurm."""
    return job is None or not (job.is_over or (job.queued is not None and job.queued.state in WAITS))


def _may_live(attempt: AttemptDir) -> bool:
    """Whether its launcher is at work, as far as can be known from here."""
    state = read_if_listed(attempt.state)
    return state is not None and state["state"] in ALIVE and not Owner.from_record(state).is_gone()


def _satellites(run: RunDir, present: Iterable[Seat], job: JobView | None) -> dict[str, str]:
    """The engines that have joined, who holds their seats, and what Slurm says of the jobs that bring more."""
    joined = [_seat_text(seat) for seat in present]
    texts = [f"joined: {', '.join(joined)}"] if joined else []
    for array_id, tasks in job.satellites.items() if job is not None else ():
        texts.append(f"array {array_id}: " + ", ".join(f"{number} {state}" for state, number in tasks.items()))
    if rest := resting(run):
        texts.append(f"{', '.join(rest)} held until the run is there again")
    return {"satellites": "; ".join(texts)} if texts else {}


def _alone(attempt: AttemptDir, now: float) -> dict[str, str]:
    """For how long the trainer's nodes have stood idle for want of an engine, and why."""
    told = alone(attempt) if _may_live(attempt) else None
    return {} if told is None else {"no engine": f"for {duration(now - told.since)}: {told.text()}"}


def _left_out(run: RunDir, present: Iterable[Seat], job: JobView | None) -> dict[str, str]:
    """The nodes without which the newest job goes on, or went, and the satellites that are in the queue or serve."""
    there = {str(seat.holder().get("job", "")).partition("_")[0] for seat in present}
    there |= set() if job is None else {job.job_id, *job.satellites}
    told = {who: nodes for who, nodes in left_out(run).items() if who.partition("_")[0] in there}
    over = job.job_id if job is not None and job.is_over else ""
    texts = [f"{', '.join(nodes)} by job {who}{', which is over' * (who == over)}" for who, nodes in told.items()]
    return {"left out": f"{'; '.join(texts)}: without the devices that were asked for"} if texts else {}


def _seat_text(seat: Seat) -> str:
    holder = seat.holder()
    job = f", job {holder['job']}" if holder.get("job") else ""
    return f"{seat.name} ({holder.get('host', 'unknown')}{job})"


def _before_start(run: RunDir, job: JobView | None) -> str:
    """Why a run has not started, as far as its job tells."""
    if job is None:
        return ""
    if job.is_over:
        return f": its job has ended; look into {batch_log(run, job.job_id)}"
    return ": its job waits in the queue" if job.queued is not None and job.queued.state in WAITS else ""


def _state_text(attempt: AttemptDir, job: JobView | None) -> str:
    state: dict[str, Any] | None = read_if_listed(attempt.state)
    if state is None:
        return "starting, no state file yet"
    text = ": ".join(filter(None, (str(state["state"]), state.get("about"))))
    if state["state"] not in ALIVE:
        return text
    owner = Owner.from_record(state)
    where = f"process {owner.pid} on {owner.host}"
    if job is not None and job.is_over:
        return f"dead: {where} went with its job; `areal-hpc resume` goes on from its last checkpoint"
    if job is not None and job.queued is not None and job.queued.state in WAITS:
        return f"waiting: {where} went with its job, which will go on from the last checkpoint"
    if not owner.is_gone():
        return f"{text}, {where}"
    return f"dead: {where} is gone without a word; `areal-hpc resume` goes on from its last checkpoint"


def _checkpoints_text(run: RunDir) -> str:
    names = os.listdir(run.checkpoints) if run.checkpoints.is_dir() else []
    steps = sorted(int(match[1]) for name in names if (match := CHECKPOINT.fullmatch(name)))
    return f"{count(len(steps))}, newest of step {steps[-1]}" if steps else "none"
