"""What the doctor finds, with stand-ins for Slurm's commands; on a real Slurm it is asked in tests/slurm."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path

import pytest

from areal_hpc.cluster import probe
from areal_hpc.cluster.probe import clock_ahead_s, unreachable
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Config
from areal_hpc.roles import doctor
from areal_hpc.roles.doctor import Finding, examine_site, report_lines

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_devices", lambda: iter(()))  # detect() has tests of its own


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands, all of which succeed and say nothing."""
    place = tmp_path / "bin"
    place.mkdir()
    for name in doctor.PROGRAMS:
        command(place, name, "")
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    return place


def command(place: Path, name: str, body: str) -> None:
    (place / name).write_text(f"#!/bin/bash\n{body}\n")
    (place / name).chmod(0o755)


def scontrol(place: Path, *lines: str, at: float | None = None) -> None:
    now = datetime.fromtimestamp(time.time() if at is None else at).strftime("%Y-%m-%dT%H:%M:%S")
    told = [f"Configuration data as of {now}", "SLURM_VERSION           = 23.11.4", *lines]
    command(place, "scontrol", "cat <<'END'\n" + "\n".join(told) + "\nEND")
    command(place, "sinfo", "printf 'gpu|up\\nold|drain\\n'")


def config_of(tmp_path: Path, *words: str) -> Config:
    return resolve(load([QUICKSTART], [f"run_root={tmp_path}/runs", *words]))


def findings(config: Config, **environment: str) -> dict[str, Finding]:
    return {one.name: one for one in examine_site(config, environment)}


def test_on_one_machine_slurm_is_not_asked_for(tmp_path: Path) -> None:
    found = findings(config_of(tmp_path, "cluster.shape=local"), http_proxy="http://proxy:3128")
    assert {name: one.verdict for name, one in found.items()} == dict.fromkeys(
        ["file system", "clock", "signatures", "ports", "proxy", "files"], "ok"
    )
    assert list(report_lines(list(found.values())))[-1] == "nothing is wrong"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("choice", "verdict"), [("auto", "warning"), ("always", "wrong"), ("never", "ok")])
def test_a_machine_that_cannot_sign_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, verdict: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    found = findings(config_of(tmp_path, f"cluster.sign_sockets={choice}"))["signatures"]
    assert found.verdict == verdict
    assert ("there is no C compiler" in found.found) == (choice != "never")


def test_a_machine_without_slurm_trains_by_itself_and_one_with_a_part_of_it_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = findings(config_of(tmp_path))
    assert found["scheduler"].verdict == "ok"
    assert found["scheduler"].found == "there is none on this machine: `areal-hpc run` trains here"
    command(tmp_path, "sbatch", "")
    found = findings(config_of(tmp_path))
    assert found["scheduler"].verdict == "wrong"
    assert found["scheduler"].found == "there is no squeue, scontrol, scancel, sinfo, srun here"
    assert list(report_lines(list(found.values())))[-1] == f"1 of {len(found)} are wrong"


def test_a_controller_that_does_not_answer(tmp_path: Path, commands: Path) -> None:
    command(commands, "scontrol", 'echo "Unable to contact slurm controller" >&2; exit 1')
    found = findings(config_of(tmp_path, "cluster.shape=het"))["scheduler"]
    assert (found.verdict, found.found) == ("wrong", "Unable to contact slurm controller")


@pytest.mark.parametrize(
    ("line", "shape", "name", "verdict"),
    [
        ("SchedulerType           = sched/builtin", "het", "heterogeneous jobs", "wrong"),
        ("SchedulerType           = sched/builtin", "split", "heterogeneous jobs", None),
        ("JobRequeue              = 0", "split", "requeueing", "warning"),
        ("JobRequeue              = 1", "split", "requeueing", None),
        ("AccountingStorageType   = accounting_storage/none", "split", "accounts", "warning"),
    ],
)
def test_rules_of_a_site_are_held_against_the_run(
    tmp_path: Path, commands: Path, line: str, shape: str, name: str, verdict: str | None
) -> None:
    scontrol(commands, line)
    found = findings(config_of(tmp_path, f"cluster.shape={shape}"))
    assert found["scheduler"].found == "Slurm 23.11.4 answers"
    assert (found[name].verdict if name in found else None) == verdict


@pytest.mark.parametrize(("partition", "verdict"), [("gpu", None), ("old", "warning"), ("gpu,none", "wrong")])
def test_a_partition_that_is_not_there(tmp_path: Path, commands: Path, partition: str, verdict: str | None) -> None:
    scontrol(commands)
    found = findings(config_of(tmp_path, "cluster.shape=split", f"cluster.all.partition={partition!r}"))
    assert (found["partition"].verdict if "partition" in found else None) == verdict


def test_a_sinfo_that_does_not_answer_is_not_taken_for_a_site_without_partitions(
    tmp_path: Path, commands: Path
) -> None:
    scontrol(commands)
    command(commands, "sinfo", "echo 'slurm_load_partitions: timed out' >&2; exit 1")
    found = findings(config_of(tmp_path, "cluster.shape=split", "cluster.all.partition=gpu"))["partition"]
    assert (found.verdict, found.found) == ("warning", "slurm_load_partitions: timed out")


def test_a_controller_of_another_time_is_warned_of(tmp_path: Path, commands: Path) -> None:
    scontrol(commands, at=time.time() - 100)
    clocks = [one for one in examine_site(config_of(tmp_path, "cluster.shape=split"), {}) if one.name == "clock"]
    assert [one.verdict for one in clocks] == ["warning", "ok"]
    assert "ahead of Slurm's controller" in clocks[0].found


def test_files_that_are_missing_and_a_full_disk_are_wrong(tmp_path: Path) -> None:
    words = ["model.maker=''", f"model.path={tmp_path}/none", "buffer.min_free_mb=1e12"]
    found = findings(config_of(tmp_path, *words))
    assert (found["files"].verdict, found["files"].found) == ("wrong", f"there is no directory {tmp_path}/none")
    assert found["file system"].verdict == "wrong"
    assert "free space there" in found["file system"].advice


def test_each_node_of_a_job_is_probed(tmp_path: Path, commands: Path) -> None:
    """srun runs the probe for two nodes, one of which is told an address that nobody listens on."""
    there = "SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 SLURMD_NODENAME=n1"
    nowhere = "SLURM_LAUNCH_NODE_IPADDR=127.0.0.2 SLURMD_NODENAME=n2"
    command(commands, "srun", f'while [[ $1 == --* ]]; do shift; done\nenv {there} "$@"\nenv {nowhere} "$@"')
    found = [one for one in examine_site(config_of(tmp_path), {"SLURM_JOB_ID": "1"}) if one.name.startswith("node")]
    clocks = [one for one in found if "server of" in one.found]
    reached = {one.name: one for one in found if one not in clocks}
    assert [one.verdict for one in clocks] == ["ok", "ok"]
    assert reached["node n1"].found.startswith("reaches 127.0.0.1, ")


def test_fault_29_two_machines_of_one_name_are_wrong(tmp_path: Path, commands: Path) -> None:
    facts = {"clock_ahead_s": 0.0, "host": "10.0.0.1", "unreachable": "", "cpus": 4, "devices": ""}
    said = [json.dumps({"node": f"n{i}", "machine": ["cloned", f"boot-{i}"], **facts}) for i in (1, 2)]
    command(commands, "srun", "cat <<'END'\n" + "\n".join(said) + "\nEND")
    found = findings(config_of(tmp_path), SLURM_JOB_ID="1")["hostnames"]
    assert (found.verdict, found.found) == (
        "wrong",
        "different machines have one hostname: n1 and n2, all named cloned",
    )


def test_a_step_that_fails_is_wrong(tmp_path: Path, commands: Path) -> None:
    command(commands, "srun", 'echo "srun: error: no step" >&2; exit 1')
    found = findings(config_of(tmp_path), SLURM_JOB_ID="1")
    assert (found["nodes"].verdict, found["nodes"].found) == ("wrong", "a step failed: srun: error: no step")


@pytest.mark.parametrize("ahead_s", [-60.0, 0.0, 60.0])
def test_a_clock_that_is_wrong_shows_against_the_file_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    real = time.time
    monkeypatch.setattr(probe.time, "time", lambda: real() + ahead_s)
    assert clock_ahead_s(tmp_path) == pytest.approx(ahead_s, abs=1.0)


def test_a_port_that_nobody_listens_on_is_unreachable() -> None:
    with doctor._listener("127.0.0.1") as port:
        assert unreachable("127.0.0.1", port) == ""
    assert "refused" in unreachable("127.0.0.1", port)
