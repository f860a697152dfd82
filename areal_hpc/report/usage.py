"""What a run in Slurm jobs has cost: hours of nodes and GPUs, how they were used, energy, and how each attempt ended.

An attempt holds its nodes from when its launcher had them to its last record; Slurm also counts the time before the
launcher came up and after its last word. Of satellites, which come and go, Slurm's accounts speak; without them the
time that their engines served, by their records: what it took to come up is not in it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_hpc.cluster.jobs import Accounted, accounted
from areal_hpc.errors import SubmissionError
from areal_hpc.fs import read_if_listed
from areal_hpc.liveness import seats
from areal_hpc.liveness.job import jobs_of, satellite_jobs
from areal_hpc.liveness.stopping import ALIVE
from areal_hpc.report.summary import Summary
from areal_hpc.report.text import count, duration, number, percent
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Record, RecordReader

HOUR_S = 3600.0
JOULES_PER_KWH = 3.6e6
LAST_BYTES = 1 << 12
"""Enough of an engine's records for one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptUse:
    """One attempt: where it ran, how long, and how it ended."""

    epoch: int
    job_id: str
    """Empty of an attempt outside of Slurm."""
    restarts: int
    """How often Slurm had requeued the job before."""
    seconds: float
    nodes: Mapping[str, int]
    """Component to the number of its nodes."""
    gpus: Mapping[str, int]
    """Role to the GPUs that its processes had, and `unused` to those that nobody had."""
    ending: str

    def text(self) -> str:
        if not self.job_id:
            return f"not in a job, {self.ending}"
        again = f", requeue {self.restarts}" if self.restarts else ""
        return f"job {self.job_id}{again}, {duration(self.seconds)}, {self.ending}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SatelliteUse:
    """What all jobs of engines that joined have held."""

    node_s: float = 0.0
    gpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """All attempts of a run, oldest first."""

    attempts: Sequence[AttemptUse]
    satellites: SatelliteUse = SatelliteUse()
    engines_idle_share: float | None = None
    """Share of the time that engines served in which they had nothing to do; None where a run had no engines."""
    energy_j: int | None = None
    """Joules of all jobs, where Slurm's accounts were asked and know it."""

    def facts(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers, by name. ``told``: those of the run's summary."""
        node_hours = self._hours("nodes", self.satellites.node_s)
        gpu_hours = self._hours("gpus", self.satellites.gpu_s)
        held_s = sum(one.seconds for one in self.attempts)
        steps_s = told["seconds_of_all_steps"] or 0.0  # who made what a restart took back was not idle
        busy_s = steps_s - (told["seconds_waited_in_all_steps"] or 0.0)
        tokens = told["tokens_trained"] or 0.0
        total = sum(gpu_hours.values()) if held_s else 0.0  # of a run outside of Slurm only the satellites' are known
        return {
            "node_hours": node_hours,
            "gpu_hours": gpu_hours,
            "outside_steps_share": max(0.0, 1 - steps_s / held_s) if held_s else None,
            "trainer_idle_share": max(0.0, 1 - busy_s / held_s) if held_s else None,
            "engines_idle_share": self.engines_idle_share,
            "tokens_per_gpu_hour": tokens / total if total else None,
            "energy_kwh": None if self.energy_j is None else self.energy_j / JOULES_PER_KWH,
            "attempts": {str(one.epoch): one.text() for one in self.attempts},
        }

    def _hours(self, what: str, satellites_s: float) -> dict[str, float]:
        """Hours of each component's ``nodes`` or each role's ``gpus``, and those of satellites."""
        found: dict[str, float] = {}
        for one in self.attempts:
            for component, amount in getattr(one, what).items():
                found[component] = found.get(component, 0.0) + amount * one.seconds / HOUR_S
        return {**found, "satellites": satellites_s / HOUR_S} if satellites_s else found


def usage_of(run: RunDir, summary: Summary, *, ask: bool) -> Usage | None:
    """What the attempts of a run have used; None of one with which Slurm has had nothing to do.

    Args:
        ask: ask Slurm's accounts, once, for energy and for what a launcher could not tell any more. Where there are
            none the files alone speak.
    """
    jobs = jobs_of(run)
    beside = [job for job in satellite_jobs(run) if job not in jobs]  # engines may also join in the run's own job
    if not jobs and not beside:
        return None
    try:
        rows = accounted([*jobs, *beside]) if ask else []
    except SubmissionError:
        rows = []
    energies = [row.energy_j for row in rows if not row.step and row.energy_j is not None]
    uses = [_use(run, attempt.epoch, summary, rows) for attempt in run.all_attempts()]
    engines = _last_of_engines(run)
    served = _served(run, engines)
    held = [row for row in rows if not row.step and row.job.partition("_")[0] in beside]
    satellites = SatelliteUse(
        node_s=sum(row.elapsed_s * row.nodes for row in held) or served.node_s,
        gpu_s=sum(row.elapsed_s * row.gpus for row in held) or served.gpu_s,
    )
    return Usage(
        attempts=uses,
        satellites=satellites,
        engines_idle_share=_idle_share(engines.values()),
        energy_j=sum(energies) if energies else None,
    )


def _last_of_engines(run: RunDir) -> dict[tuple[int, int], Record]:
    """The last record of each engine in each attempt, by epoch and index: it tells of all processes that were it."""
    return {
        (record.epoch, record.index): record
        for attempt in run.all_attempts()
        for record in RecordReader(attempt.telemetry, ("generator",), last_bytes=LAST_BYTES).poll()
        if record.number("up_s") is not None
    }


def _idle_share(engines: Collection[Record]) -> float | None:
    up_s = sum(record.number("up_s") or 0.0 for record in engines)
    busy_s = sum(record.number("busy_s") or 0.0 for record in engines)
    return 1 - busy_s / up_s if up_s else None


def _served(run: RunDir, engines: Mapping[tuple[int, int], Record]) -> SatelliteUse:
    """What satellites have used as their engines tell it: each stands for its part of its node."""
    node_s = gpu_s = 0.0
    for attempt in run.all_attempts():
        for seat in seats.last(attempt):
            last, holder = engines.get((attempt.epoch, seat.index)), seat.holder()
            if last is not None and (number := holder.get("engines")):
                up_s = last.number("up_s") or 0.0
                node_s += up_s / number
                gpu_s += up_s / number * holder["gpus"]
    return SatelliteUse(node_s=node_s, gpu_s=gpu_s)


def _use(run: RunDir, epoch: int, summary: Summary, rows: Sequence[Accounted]) -> AttemptUse:
    attempt = run.attempt(epoch)
    job: dict[str, Any] = read_if_listed(attempt.job) or {"job_id": "", "restarts": 0, "nodes": {}, "gpus": {}}
    nodes = {component: len(names) for component, names in job["nodes"].items()}
    began, last = job.get("time"), summary.last_seen.get(epoch)
    return AttemptUse(
        epoch=epoch,
        job_id=job["job_id"],
        restarts=job["restarts"],
        seconds=0.0 if began is None or last is None else max(0.0, last - began),
        nodes=nodes,
        gpus=_gpus(job),
        ending=summary.failures.get(epoch) or _ending(read_if_listed(attempt.state) or {}, job, rows),
    )


def _gpus(job: Mapping[str, Any]) -> dict[str, int]:
    """Of a job's record: role to GPUs, as far as it tells; else component to GPUs."""
    asked = {component: len(names) * job["gpus"][component] for component, names in job["nodes"].items()}
    held: Mapping[str, int] = job.get("devices", asked)
    found = {**held, "unused": sum(asked.values()) - sum(held.values())}
    return {who: amount for who, amount in found.items() if amount > 0}


def _ending(state: Mapping[str, Any], job: Mapping[str, Any], rows: Sequence[Accounted]) -> str:
    """What the launcher said last; of one that was cut off, what the accounts say of its incarnation of the job."""
    if (said := str(state.get("state", "ended before it began"))) not in ALIVE:
        return ": ".join(filter(None, (said, state.get("about"))))
    mine = [row.state for row in rows if row.job == job["job_id"] and not row.step and row.component == 0]
    by_slurm = mine[job["restarts"]] if job["restarts"] < len(mine) else ""
    return f"cut off: {by_slurm}" if by_slurm and by_slurm != "RUNNING" else f"{said}, unless it was cut off"


def usage_rows(usage: Usage, facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the run has cost as (name, text) rows."""
    rows: list[tuple[str, str]] = []
    for name, key in (("node-hours", "node_hours"), ("GPU-hours", "gpu_hours")):
        if facts[key]:
            rows.append((name, ", ".join(f"{component} {number(hours)}" for component, hours in facts[key].items())))
    if facts["trainer_idle_share"] is not None:
        outside = percent(facts["outside_steps_share"])
        engines = facts["engines_idle_share"]
        others = "" if engines is None else f", engines {percent(engines)}"
        trainer = percent(facts["trainer_idle_share"])
        idle = f"trainer {trainer} of the time{others}; {outside} of it all outside of steps"
        rows.append(("idle", idle))
    if facts["tokens_per_gpu_hour"] is not None:
        rows.append(("efficiency", f"{count(facts['tokens_per_gpu_hour'])} tokens trained per GPU-hour"))
    if facts["energy_kwh"] is not None:
        rows.append(("energy", f"{number(facts['energy_kwh'])} kWh"))
    return rows + [(f"attempt {one.epoch}", one.text()) for one in usage.attempts]
