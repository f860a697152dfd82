"""What somebody might type into a notebook on the login node: jobs handed to Slurm, watched and cancelled from Python.

``python submitted_session.py DIRECTORY`` says as JSON what became of each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from submitit.core.utils import UncompletedJobError

from areal_hpc.cluster.executor import Launch, submit
from areal_hpc.cluster.hetjob import job_of, log_of
from areal_hpc.cluster.submitted import SubmittedJob
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"
LIMIT_S = 90.0


def work(arguments: Sequence[str]) -> int:
    """Stands in for a run."""
    kind, go = arguments
    print(f"this is the job that {kind}", flush=True)
    if kind == "fails":
        return 3
    deadline = time.monotonic() + LIMIT_S
    while not Path(go).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return 0


def wait_for(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def outcome(job: SubmittedJob) -> dict[str, Any]:
    """How it ended, by what submitit's users know."""
    wait_for(lambda: job.watcher.is_done(job.job_id, mode="force"))  # there may be a result before the job has ended
    try:
        result = job.result()
    except UncompletedJobError as error:
        result = str(error)
    return {"result": result, "states": job.states, "state": job.state, "stdout": job.stdout(), "tasks": job.num_tasks}


def main(home: Path) -> None:
    go = home / "go"

    def hand_in(kind: str, shape: str = "het") -> SubmittedJob:
        config = resolve(load([QUICKSTART], [f"cluster.shape={shape}", "cluster.all.cpus=1", f"name={kind}"]))
        job = job_of(config, log=str(log_of(home, "%j")), room=str(home))
        return submit(
            job,
            Launch(work, (kind, str(go if kind != "is-cancelled" else home / "never"))),
            home,
            python=sys.executable,
        )

    jobs = {kind: hand_in(kind) for kind in ("finishes", "loses", "fails", "is-cancelled")}
    jobs["is-plain"] = hand_in("is-plain", "split")
    before = {kind: job.state for kind, job in jobs.items()}
    for kind in ("finishes", "loses", "is-cancelled", "is-plain"):
        wait_for(lambda: "this is the job" in (jobs[kind].stdout() or ""))  # noqa: B023
    running = jobs["loses"].states
    subprocess.run(["scancel", f"{jobs['loses'].job_id}+1"], check=True)
    jobs["is-cancelled"].cancel()
    wait_for(lambda: "CANCELLED" in jobs["loses"].states)
    while_it_runs = {"states": jobs["loses"].states, "state": jobs["loses"].state, "done": jobs["loses"].done()}
    go.touch()
    told = {kind: outcome(job) for kind, job in jobs.items()}
    print(json.dumps({"before": before, "running": running, "while_it_runs": while_it_runs, "told": told}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
