"""Whole runs through sbatch, on nodes that share nothing but the file system."""

from __future__ import annotations

import sys
from pathlib import Path

from cluster import SlurmCluster
from launched import arguments, environment

from areal_hpc.fs import RunDir
from areal_hpc.report import prove_run


def areal(slurm: SlurmCluster, directory: Path, *words: str) -> str:
    """What ``areal-hpc`` prints on the login node."""
    paths = {"PYTHONPATH": environment()["PYTHONPATH"], "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = slurm.run(sys.executable, "-m", "areal_hpc", *words, env=paths, cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submitted(output: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in output.splitlines())


def test_a_run_goes_through_a_heterogeneous_job(slurm: SlurmCluster, home: Path, model: Path) -> None:
    words = [*arguments(home, model), "cluster.shape=het", "cluster.all.cpus=4", "generation.replicas=2"]
    said = submitted(areal(slurm, home, "submit", *words))
    state = slurm.wait_for_state(said["job"], "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
    text = Path(said["log"]).read_text()
    assert state == "COMPLETED", text
    proof = prove_run(RunDir.open(Path(said["run"])))
    assert proof.proven, proof.facts()
