"""A run whose one engine, a real SGLang, has a rank on each of two nodes; the server on the second is killed midway."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from cluster import SlurmCluster
from launched import arguments
from real_engines import SGLANG, START_S
from slurm_runs import OVER, areal, submit, wait_for_step
from tiny_models import make_model

from areal_hpc.generation.external.process import LAUNCHER
from areal_hpc.report import prove_run
from areal_hpc.roles import launches
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import RecordReader

pytestmark = [pytest.mark.long, pytest.mark.sglang, pytest.mark.timeout(1500)]

STEPS = 6
LIMIT_S = 900.0
LARGEST_GAP = 1e-4
"""Nats a token, in float32."""


def server_of(run: RunDir, role: str) -> psutil.Process:
    """The server that a role of this run has started, on whichever node."""
    mine = [role, "0", str(run.root)]
    for process in psutil.process_iter(["cmdline"]):
        if str(LAUNCHER) in (process.info["cmdline"] or ()):
            words = process.parent().cmdline()  # type: ignore[union-attr]  # it dies with its parent
            if "areal_hpc.roles" in words and words[words.index("areal_hpc.roles") + 1 :][:3] == mine:
                return process
    raise AssertionError(f"{role}-0 of {run.root} has no server")


def test_a_run_outlives_a_share_of_its_engine(slurm: SlurmCluster, home: Path) -> None:
    assert not SGLANG.unusable(), SGLANG.unusable()
    make_model(home / "model", "llama", seed=3, num_attention_heads=4, num_key_value_heads=2)
    words = [*arguments(home, home / "model"), "cluster.shape=het", "generation.backend=sglang"]
    words += ["generation.tensor_parallel=2", "cluster.generation.gpus=1", "cluster.generation.nodes=2"]
    words += [f"generation.python={SGLANG.python}", "generation.max_running=8", f"trainer.total_steps={STEPS}"]
    words += ["buffer.max_staleness=0", f"limits.start_s={START_S}", f"limits.stall_s={LIMIT_S}", "cluster.all.cpus=4"]
    words += [
        "cluster.all.time='60'",
        "cluster.setup=[export CUDA_VISIBLE_DEVICES=NoDevFiles]",
    ]  # as of nodes without devices
    planned = areal(slurm, home, "plan", *words).stdout
    assert "part-0 on GPU 0" in planned
    job, run, log = submit(slurm, home, *words)
    wait_for_step(run, 2, LIMIT_S)
    server_of(run, "part").kill()
    assert slurm.wait_for_state(job, *OVER, limit_s=LIMIT_S) == "COMPLETED", log.read_text()
    records = list(RecordReader(run.attempt(1).telemetry).poll())
    assert [record.values["process"] for record in records if record.kind == "restart"] == ["generator-0"]
    steps = [record for record in records if record.kind == "step"]
    assert [record.number("step") for record in steps] == list(range(1, STEPS + 1))
    assert max(record.number("logprob_gap") or 0.0 for record in steps) < LARGEST_GAP
    launch = launches.newest(run.attempt(1), 0)
    assert launch is not None
    assert launch.incarnation == 1
    proof = prove_run(run)
    assert proof.proven, proof.violations
