"""What a submission hands out, held against what Slurm may say of a job: its states, and when it is over."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from submitit.core.utils import UncompletedJobError

from areal_hpc.cluster import jobs, submitted
from areal_hpc.cluster.jobs import FINAL, FORGOTTEN, folded, states
from areal_hpc.cluster.submitted import SETTLED_S, SubmittedJob, Watcher
from areal_hpc.errors import SubmissionError


class World:
    """A controller, and the time."""

    def __init__(self) -> None:
        self.told: dict[str, list[str]] = {}
        self.now = 1000.0
        self.problem = ""

    def states(self, job_ids: Sequence[str]) -> dict[str, list[str]]:
        if self.problem:
            raise SubmissionError(self.problem)
        return {job: self.told[job] for job in job_ids if job in self.told}

    def time(self) -> float:
        return self.now


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(submitted, "states", made.states)
    monkeypatch.setattr(submitted.time, "time", made.time)  # submitit's watcher has the same module
    monkeypatch.setattr(submitted.time, "sleep", lambda s: setattr(made, "now", made.now + s))
    monkeypatch.setattr(SubmittedJob, "watcher", Watcher())
    return made


def job_in(room: Path) -> SubmittedJob:
    (room / "12").mkdir(parents=True)
    return SubmittedJob(room / "%j", "12")


def test_a_heterogeneous_job_goes_on_while_any_component_does_and_has_the_worst_of_their_ends(
    world: World, tmp_path: Path
) -> None:
    job = job_in(tmp_path)
    world.told["12"] = ["RUNNING", "CANCELLED"]
    assert (job.states, job.state, job.done(force_check=True)) == (("RUNNING", "CANCELLED"), "RUNNING", False)
    world.told["12"] = ["COMPLETED", "CANCELLED"]
    world.now += 1
    assert (job.states, job.state) == (("COMPLETED", "CANCELLED"), "CANCELLED")


def test_a_job_that_is_requeued_looks_failed_for_an_instant_and_is_not_over(world: World, tmp_path: Path) -> None:
    job = job_in(tmp_path)
    world.told["12"] = ["FAILED"]
    assert not job.done(force_check=True)
    world.told["12"] = ["PENDING"]
    world.now += SETTLED_S
    assert not job.done(force_check=True)
    world.told["12"] = ["FAILED"]
    world.now += SETTLED_S
    assert not job.done(force_check=True)
    world.now += SETTLED_S
    assert job.done(force_check=True)


@pytest.mark.parametrize("last", [["FAILED"], []])
def test_the_wait_for_one_that_left_no_result_ends_also_where_slurm_has_forgotten_it(
    world: World, tmp_path: Path, last: list[str]
) -> None:
    job = job_in(tmp_path)
    (tmp_path / "12.log").write_text("areal-hpc: no model\n")
    world.told = {"12": last} if last else {}
    with pytest.raises(UncompletedJobError, match=rf"(?s)state: {last[0] if last else FORGOTTEN}.*areal-hpc: no model"):
        job.result()
    assert world.now < 1000 + 60


def test_the_result_is_the_runs_exit_code_and_the_log_is_ours(world: World, tmp_path: Path) -> None:
    job = job_in(tmp_path)
    assert job.stdout() is None
    (tmp_path / "12.log").write_text("step 1/3\n")
    (tmp_path / "12/12_0_result.pkl").write_bytes(pickle.dumps(("success", 0)))
    assert (job.result(), job.results(), job.num_tasks) == (0, [0], 1)
    assert (job.stdout(), job.stderr()) == ("step 1/3\n", None)


def test_a_scheduler_that_is_away_says_nothing_new(world: World, tmp_path: Path) -> None:
    job = job_in(tmp_path)
    world.told["12"] = ["RUNNING"]
    assert job.state == "RUNNING"
    world.problem, world.now = "squeue does not answer", world.now + 60
    assert (job.state, job.done(force_check=True)) == ("RUNNING", False)


def test_all_components_are_cancelled(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(submitted, "cancel", ended.extend)
    job_in(tmp_path).cancel()
    assert ended == ["12"]

    def refused(_: Sequence[str]) -> None:
        raise SubmissionError("scancel failed")

    monkeypatch.setattr(submitted, "cancel", refused)
    job_in(tmp_path / "b").cancel(check=False)
    with pytest.raises(SubmissionError, match="scancel failed"):
        job_in(tmp_path / "c").cancel()


@given(st.lists(st.sampled_from([*FINAL, "RUNNING", "PENDING", "COMPLETING"]), min_size=1, max_size=4))
def test_one_state_speaks_for_all(components: list[str]) -> None:
    state = folded(components)
    assert state in components
    assert (state in FINAL) == all(one in FINAL for one in components)
    if "FAILED" in components and state in FINAL:
        assert state in ("FAILED", FORGOTTEN)
    assert (state == "COMPLETED") == (set(components) == {"COMPLETED"})


def test_the_controller_is_asked_first_and_the_accounts_of_what_it_has_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = "12+1|CANCELLED\n12+0|RUNNING\n13|COMPLETING\n20+10|PENDING\n20+9|RUNNING\n"
    rows = (
        "14+0|NODE_FAIL|0:0|0:0|a|b|61||\n14+0.0|FAILED|1:0||a|b|60||\n14+1|NODE_FAIL|0:0|0:0|a|b|61||\n"
        "14+0|COMPLETED|0:0|0:0|c|d|31||\n14+1|CANCELLED by 0|0:0|0:0|c|d|31||\n"
    )
    for name, text in {"squeue": queue, "sacct": rows}.items():
        (tmp_path / f"{name}.txt").write_text(text)
        (tmp_path / name).write_text(f'#!/bin/bash\necho "{name} $*" >>{tmp_path}/calls\ncat {tmp_path}/{name}.txt\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert states(["12", "13", "14", "15", "20"]) == {
        "12": ["RUNNING", "CANCELLED"],
        "13": ["COMPLETING"],
        "14": ["COMPLETED", "CANCELLED"],
        "20": ["RUNNING", "PENDING"],
    }
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[1].endswith("--jobs 14,15"), calls
    (tmp_path / "sacct").write_text("#!/bin/bash\necho 'accounting storage is disabled' >&2; exit 1\n")
    assert "14" not in jobs.states(["12", "14"]), "this site keeps no accounts"
