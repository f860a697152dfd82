"""What a run has cost: hours of nodes and GPUs, how they were used, energy, and how each of its attempts ended.

An attempt holds its nodes from when its launcher had them to its last record, so what Slurm counts besides is the time
before the launcher and after the last word. Attempts outside of Slurm hold no nodes that anybody counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_hpc.cluster.jobs import Accounted, accounted
from areal_hpc.errors import SubmissionError
from areal_hpc.fs import RunDir, read_if_listed
from areal_hpc.report.text import count, duration, number, percent
from areal_hpc.roles.job import jobs_of
from areal_hpc.roles.stopping import ALIVE

HOUR_S = 3600.0
JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptUse:
    """One attempt: where it ran, how long, and how it ended."""

    epoch: int
    job_id: str = ""
    """Empty outside of Slurm."""
    restarts: int = 0
    seconds: float | None = None
    nodes: Mapping[str, int]
    """Component to its nodes."""
    gpus: Mapping[str, int]
    """Component to the GPUs of all its nodes."""
    ending: str

    def text(self) -> str:
        where = f"job {self.job_id}{f' (requeued {self.restarts} times)' if self.restarts else ''}, "
        return f"{self.epoch}: {where if self.job_id else ''}{duration(self.seconds)}, {self.ending}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """All attempts of a run, oldest first."""

    attempts: Sequence[AttemptUse]
    energy_j: int | None = None

    def hours(self, what: str) -> dict[str, float]:
        """Component to hours of its ``nodes`` or ``gpus``."""
        found: dict[str, float] = {}
        for one in self.attempts:
            for component, amount in getattr(one, what).items():
                found[component] = found.get(component, 0.0) + amount * (one.seconds or 0.0) / HOUR_S
        return found

    def facts(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers, by name. ``told``: those of the run's summary."""
        gpu_hours = self.hours("gpus")
        held_s = sum(one.seconds or 0.0 for one in self.attempts if one.job_id)
        steps_s, wait_s = told["seconds"], (told["wait_share"] or 0.0) * (told["seconds"] or 0.0)
        total, tokens = sum(gpu_hours.values()), told["tokens_trained"]
        return {
            "node_hours": self.hours("nodes"),
            "gpu_hours": gpu_hours,
            "starting_share": max(0.0, 1 - steps_s / held_s) if held_s and steps_s else None,
            "trainer_idle_share": min(1.0, 1 - (steps_s - wait_s) / held_s) if held_s and steps_s else None,
            "tokens_per_gpu_hour": tokens / total if total and tokens else None,
            "energy_kwh": None if self.energy_j is None else self.energy_j / JOULES_PER_KWH,
            "attempt_endings": [one.text() for one in self.attempts],
        }


def usage_of(run: RunDir, last_seen: Mapping[int, float], *, ask: bool = False) -> Usage:
    """What the attempts of a run have used.

    Args:
        last_seen: epoch to the time of its last record, in seconds since 1970.
        ask: ask Slurm's accounts, once, for energy and for what the launcher could not tell any more.
    """
    rows: list[Accounted] = []
    if ask and (jobs := jobs_of(run)):
        try:
            rows = accounted(jobs)
        except SubmissionError:  # the files tell the rest; what only accounts know stays unknown
            rows = []
    energies = [row.energy_j for row in rows if not row.step and row.energy_j is not None]
    uses = [_use(run, attempt.epoch, last_seen.get(attempt.epoch), rows) for attempt in run.all_attempts()]
    return Usage(attempts=uses, energy_j=sum(energies) if energies else None)


def _use(run: RunDir, epoch: int, last: float | None, rows: Sequence[Accounted]) -> AttemptUse:
    attempt = run.attempt(epoch)
    job: dict[str, Any] = read_if_listed(attempt.job) or {}
    state = str((read_if_listed(attempt.state) or {}).get("state", "ended before it began"))
    seconds = None if last is None or "time" not in job else max(0.0, last - job["time"])
    nodes = {name: len(names) for name, names in job.get("nodes", {}).items()}
    incarnations = [row for row in rows if row.job == job.get("job_id") and not row.step and row.component == 0]
    number_of = int(job.get("restarts", 0))
    if state in ALIVE:
        said = incarnations[number_of].state if number_of < len(incarnations) else ""
        state = f"its launcher was cut off ({said})" if said and said != "RUNNING" else f"{state}, or cut off"
    return AttemptUse(
        epoch=epoch,
        job_id=str(job.get("job_id", "")),
        restarts=number_of,
        seconds=seconds,
        nodes=nodes,
        gpus={name: nodes[name] * per_node for name, per_node in job.get("gpus", {}).items() if per_node},
        ending=state,
    )


def usage_rows(usage: Usage, facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """As (name, text) rows; none for a run of one attempt that held no nodes of Slurm's."""
    rows: list[tuple[str, str]] = []
    for name, key in (("node-hours", "node_hours"), ("GPU-hours", "gpu_hours")):
        if facts[key]:
            rows.append((name, ", ".join(f"{component} {number(hours)}" for component, hours in facts[key].items())))
    if facts["trainer_idle_share"] is not None:
        idle, starting = percent(facts["trainer_idle_share"]), percent(facts["starting_share"])
        rows.append(("idle", f"trainer {idle} of the time, {starting} before the first step or after the last"))
    if facts["tokens_per_gpu_hour"] is not None:
        rows.append(("efficiency", f"{count(facts['tokens_per_gpu_hour'])} tokens trained per GPU-hour"))
    if facts["energy_kwh"] is not None:
        rows.append(("energy", f"{number(facts['energy_kwh'])} kWh"))
    if len(usage.attempts) > 1 or any(one.job_id for one in usage.attempts):
        rows += [("attempt" if place == 0 else "", text) for place, text in enumerate(facts["attempt_endings"])]
    return rows
