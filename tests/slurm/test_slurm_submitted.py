"""submitit's job of a submission, on a real cluster: what it says of heterogeneous jobs, whatever becomes of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cluster import SlurmCluster
from slurm_runs import PATHS

SESSION = Path(__file__).parent / "submitted_session.py"


@pytest.mark.parametrize("keeps_accounts", [True, False])
def test_a_job_that_was_submitted_says_what_becomes_of_its_components(
    slurm: SlurmCluster, home: Path, keeps_accounts: bool
) -> None:
    """Without accounts submitit's own job is in the state UNKNOWN for ever, and waits without end for one that dies."""
    path = "/usr/sbin:/usr/bin:/sbin:/bin"
    if not keeps_accounts:
        (home / "sacct").write_text("#!/bin/bash\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n")
        (home / "sacct").chmod(0o755)
        path = f"{home}:{path}"
    done = slurm.run(sys.executable, SESSION, home / "room", env={**PATHS, "PATH": path}, cwd=home, limit_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert set(said["before"].values()) <= {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "FAILED"}, said["before"]
    assert said["running"] == ["RUNNING", "RUNNING"]
    assert said["while_it_runs"] == {"states": ["RUNNING", "CANCELLED"], "state": "RUNNING", "done": False}
    told = said["told"]
    expected = {
        "finishes": ["COMPLETED", "COMPLETED"],
        "loses": ["COMPLETED", "CANCELLED"],
        "is-cancelled": ["CANCELLED", "CANCELLED"],
        "is-plain": ["COMPLETED"],
    }
    assert {kind: told[kind]["states"] for kind in expected} == expected
    assert told["fails"]["states"][0] == "FAILED"
    states = {kind: told[kind]["state"] for kind in told}
    assert states == {
        "finishes": "COMPLETED",
        "loses": "CANCELLED",
        "fails": "FAILED",
        "is-cancelled": "CANCELLED",
        "is-plain": "COMPLETED",
    }
    assert [told[kind]["result"] for kind in ("finishes", "loses", "is-plain")] == [0, 0, 0]
    for kind, state in (("fails", "FAILED"), ("is-cancelled", "CANCELLED")):
        assert f"has not produced any output (state: {state})" in told[kind]["result"]
        assert f"this is the job that {kind}" in told[kind]["result"], "the end of its log"
    for kind, one in told.items():
        assert one["tasks"] == 1
        assert f"this is the job that {kind}\n" in one["stdout"]
