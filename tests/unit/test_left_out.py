"""Fault 17: who leaves a node out that has lost its devices, who cannot, and what is known of it afterwards."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from started import config_in, end_at_once, leave, start, state_of

from areal_hpc.buffer.epochs import claim_epoch
from areal_hpc.cluster.components import Placement
from areal_hpc.cluster.local import Ended, LocalLauncher
from areal_hpc.cluster.owner import Owner
from areal_hpc.config.cluster import ComponentConfig, Shape
from areal_hpc.config.keys import with_value
from areal_hpc.config.schema import Config
from areal_hpc.errors import AttemptFailed, ConfigError, Fenced, NodeLost, RunDirError
from areal_hpc.exits import EXIT_ELSEWHERE, EXIT_USER_ERROR
from areal_hpc.fs import make_private_directory, read_json
from areal_hpc.liveness import seats
from areal_hpc.liveness.job import JobView, note_satellite
from areal_hpc.liveness.left_out import MOST, TIMES, leave_out, left_out
from areal_hpc.liveness.resting import rest, resting
from areal_hpc.report import status_lines, why_lines
from areal_hpc.roles import attempts, launcher
from areal_hpc.roles.attempts import Attempts
from areal_hpc.roles.supervisor import Supervisor
from areal_hpc.run_dir import RunDir

NOTHING = [ComponentConfig()]


def lost(node: str = "n2") -> NodeLost:
    return NodeLost(f"node {node} has lost device 0 of trainer-0; its log a.log ends with:\nno device", node)


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment that a batch script makes."""
    return {"AREAL_HPC_AVOIDED": str(tmp_path / "avoided-12")}


def test_a_node_is_left_out_by_its_name_and_another_one_as_well(job: dict[str, str], tmp_path: Path) -> None:
    leave_out(lost(), job, requests=NOTHING)
    leave_out(lost("n7"), job, requests=NOTHING)
    assert sorted(path.name for path in (tmp_path / "avoided-12").iterdir()) == ["n2", "n7"]


def test_no_name_gets_lost_where_several_nodes_find_it_at_one_moment(job: dict[str, str], tmp_path: Path) -> None:
    """Those of one satellite: each looks at what the others have named, and then names itself."""
    names = {f"n{number}" for number in range(8)}
    together = threading.Barrier(len(names))

    def find(name: str) -> None:
        together.wait(30)
        leave_out(lost(name), job, requests=NOTHING)

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(find, names))
    assert {path.name for path in (tmp_path / "avoided-12").iterdir()} == names


def test_outside_of_a_batch_script_of_ours_nobody_can_be_asked() -> None:
    with pytest.raises(NodeLost) as told:
        leave_out(lost(), {}, requests=NOTHING)
    assert str(told.value) == str(lost())


def test_a_node_that_comes_again_shows_a_site_that_lets_no_user_change_a_job(job: dict[str, str]) -> None:
    """Once may be Slurm, which took the job back by itself before the script had the node left out."""
    for _ in range(TIMES):
        leave_out(lost(), job, requests=NOTHING)
    with pytest.raises(NodeLost, match=r"^node n2 has lost device 0 of trainer-0, and Slurm gave it although .*; ask"):
        leave_out(lost(), job, requests=NOTHING)
    leave_out(lost("n3"), job, requests=NOTHING)


@pytest.mark.parametrize("nodelist", ["n2", "n[1-3]", "m1,n2"])
def test_a_node_that_the_configuration_asks_for_is_not_left_out(job: dict[str, str], nodelist: str) -> None:
    """Slurm would let the job wait for ever."""
    requests = [ComponentConfig(), ComponentConfig(nodelist=nodelist)]
    with pytest.raises(NodeLost, match="the nodelist of the configuration asks for it; name another"):
        leave_out(lost(), job, requests=requests)
    leave_out(lost("n4"), job, requests=[*requests, ComponentConfig(nodelist="/home/me/nodes")])  # is a file's name


def test_there_is_an_end_to_it(job: dict[str, str]) -> None:
    for number in range(MOST):
        leave_out(lost(f"n{number}"), job, requests=NOTHING)
    with pytest.raises(NodeLost, match=rf"n{MOST} has lost .*, n9 it is one too many .*ask your site's"):
        leave_out(lost(f"n{MOST}"), job, requests=NOTHING)
    leave_out(lost("n0"), job, requests=NOTHING)  # which is none more


def test_an_error_with_its_node_crosses_process_borders() -> None:
    copy = pickle.loads(pickle.dumps(lost()))
    assert (str(copy), copy.node) == (str(lost()), "n2")


# The supervisor


def test_whoever_has_found_it_is_named_with_node_and_device(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.attempt(1).create().log("generator", 0).write_text("looked\nn2 was to compute on CUDA_VISIBLE_DEVICES=3\n")
    local = LocalLauncher(run, 1, {})
    local.placement_of = lambda role, index: Placement(node="n2", devices=(0, 3))  # type: ignore[method-assign]
    nothing: Any = lambda *_: None  # noqa: E731
    limits = Config.__dataclass_fields__["limits"].default_factory()  # type: ignore[misc]
    supervisor = Supervisor(
        local, limits, stop=nothing, show=nothing, record=nothing, check_fence=nothing, watchdog=nothing
    )
    with pytest.raises(NodeLost) as told:  # whatever else ended with it
        supervisor.judge([Ended("trainer", 0, EXIT_USER_ERROR), Ended("generator", 0, EXIT_ELSEWHERE)])
    assert told.value.node == "n2"
    assert str(told.value).startswith("node n2 has lost device 0, 3 of generator-0; its log ")
    assert str(told.value).endswith("n2 was to compute on CUDA_VISIBLE_DEVICES=3")


def test_on_one_machine_the_node_is_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    assert LocalLauncher(RunDir(tmp_path), 1, {}).placement_of("generator", 7) == Placement(node="n3")


# The launcher


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    end_at_once(monkeypatch)
    return with_value(config_in(tmp_path), "cluster.shape", Shape.SPLIT)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def avoided(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in a batch script of job 12 that was submitted."""
    RunDir.create(run.root)
    path = make_private_directory(run.slurm) / "avoided-12"
    monkeypatch.setenv("AREAL_HPC_AVOIDED", str(path))
    return path


def finds(error: BaseException) -> Callable[..., str]:
    def supervise(*_: Any) -> str:
        raise error

    return supervise


def test_the_attempt_is_stopped_and_the_job_is_to_go_on_elsewhere(
    config: Config, run: RunDir, avoided: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attempts, "supervise", finds(lost()))
    note_satellite(run, "9_1")
    rest(run, "9_1", 0)
    assert start(config) == EXIT_ELSEWHERE
    assert (avoided / "n2").read_text() == "n2\n"
    state = read_json(run.attempt(1).state)
    assert (state["state"], state["lost"]) == ("stopped", "n2"), "satellites wait for what follows"
    assert resting(run) == ["9_1"]
    shown = dict(line.split("  ", 1) for line in status_lines(run, ask=lambda _: JobView(job_id="12", is_over=True)))
    assert shown["state"].strip() == "stopped: node n2 has lost device 0 of trainer-0 (attempt 1)"
    assert shown["left out"].strip() == "n2 by job 12, which is over: without the devices that were asked for"
    assert "left out" not in dict(line.split("  ", 1) for line in status_lines(run, ask=lambda _: None))
    assert why_lines(run)[0].startswith("run run, attempt 1: stopped: node n2 has lost device 0 of trainer-0; ")
    assert left_out(run) == {"12": ["n2"]}


def test_of_satellites_that_serve_a_run_outside_of_slurm_it_is_told_what_they_leave_out(run: RunDir) -> None:
    leave(run, "running")
    for job in ("9_1", "10"):
        room = make_private_directory(run.satellites / f"avoided-{job}")
        (room / "n2").write_text("n2\n")
    assert not any(line.startswith("left out") for line in status_lines(run, watch=lambda _: {}))
    seats.take(run.attempt(1), 0, {"job": "9_1", "host": "n3"}).come_up()
    (line,) = (line for line in status_lines(run, watch=lambda _: {}) if line.startswith("left out"))
    assert line.partition("  ")[2].strip() == "n2 by job 9_1: without the devices that were asked for"


@pytest.mark.usefixtures("avoided")
def test_nodes_without_end_end_the_run_unless_it_gets_on_between(
    config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many in a row as limits.attempts allows, which is three."""
    committed = {2}
    monkeypatch.setattr(attempts, "committed_a_step", lambda _, epoch: epoch in committed)
    for number in range(1, 5):
        monkeypatch.setattr(Attempts, "supervise", finds(lost(f"n{number}")))
        assert start(config, resume=True) == EXIT_ELSEWHERE
    monkeypatch.setattr(Attempts, "supervise", finds(lost("n5")))
    with pytest.raises(NodeLost, match=r"node n5 has lost .*n4 it is one too many"):
        start(config, resume=True)
    assert state_of(run, 5) == "failed"
    monkeypatch.setattr(Attempts, "supervise", finds(lost("n6")))
    assert start(config, resume=True) == EXIT_ELSEWHERE, "a person has started it again"


def test_where_no_job_can_go_on_the_run_has_failed_and_so_where_a_person_has_asked_for_its_end(
    config: Config, run: RunDir, avoided: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any) -> str:
        run.attempt(1).stop_request.touch()
        raise lost()

    monkeypatch.setattr(Attempts, "supervise", asked)
    with pytest.raises(NodeLost):
        start(config)
    monkeypatch.delenv("AREAL_HPC_AVOIDED")
    monkeypatch.setattr(Attempts, "supervise", finds(lost()))
    with pytest.raises(NodeLost):
        start(config, resume=True)
    assert [state_of(run, epoch) for epoch in (1, 2)] == ["failed", "failed"]
    assert not avoided.exists()
    assert not isinstance(lost(), AttemptFailed), "no attempt on the same nodes follows"


def test_a_job_whose_run_another_one_owns_does_not_come_again(
    config: Config, run: RunDir, avoided: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(*_: Any) -> str:
        claim_epoch(run, Owner.this_process().record())
        raise lost()

    monkeypatch.setattr(Attempts, "supervise", replaced)
    with pytest.raises(Fenced):
        start(config)
    assert not avoided.exists()


# Who rests for a run that an error ends


@pytest.mark.parametrize("shape", ["split", "local"])
def test_whatever_error_ends_a_run_for_good_ends_those_who_rest_for_it(
    shape: str, config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[RunDir] = []
    monkeypatch.setattr(launcher, "dismiss", ended.append)
    config = with_value(config, "cluster.shape", Shape(shape))
    for number, error in enumerate((ConfigError("x"), OSError(28, "no space"), lost()), 1):
        monkeypatch.setattr(Attempts, "supervise", finds(error))
        with pytest.raises(type(error)):
            start(config, resume=True)
        assert ended == [run] * number


def test_a_file_system_on_which_nobody_can_be_ended_does_not_hide_the_reason(
    config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stale(_: RunDir) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(launcher, "dismiss", stale)
    monkeypatch.setattr(Attempts, "supervise", finds(ConfigError("rollout.reward: there is no such module")))
    with pytest.raises(ConfigError, match=r"rollout\.reward"):
        start(config)
    assert f"satellites may still rest in the queue; `areal-hpc stop {run.root}` ends them: [Errno 116]" in caplog.text


def test_who_rests_is_left_to_the_attempt_of_another_process_that_is_at_work(
    config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[RunDir] = []
    monkeypatch.setattr(launcher, "dismiss", ended.append)
    another = replace(Owner.this_process(), host="elsewhere").record()

    def loses_it(*_: Any, **__: Any) -> Any:
        claim_epoch(run, another)
        raise error

    error: Exception = Fenced("attempt 2 owns the run")
    monkeypatch.setattr(Attempts, "supervise", loses_it)
    with pytest.raises(Fenced):
        start(config)
    error = RunDirError("somebody else has started it at the same moment")
    monkeypatch.setattr(attempts, "claim_epoch", loses_it)
    with pytest.raises(RunDirError):
        start(config, resume=True, takeover=True)
    assert ended == []


@pytest.mark.parametrize(("shape", "over"), [("split", True), ("local", False)])
def test_what_is_wrong_before_an_attempt_ends_them_in_a_job_and_not_where_a_person_types_it(
    shape: str, over: bool, config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[RunDir] = []
    monkeypatch.setattr(launcher, "dismiss", ended.append)
    monkeypatch.setattr(launcher, "prepare", finds(ConfigError("rollout.reward: there is no such module")))
    config = with_value(config, "cluster.shape", Shape(shape))
    with pytest.raises(ConfigError):
        start(config)
    assert ended == [run] * over


def test_a_second_start_that_is_refused_ends_nobody_of_the_first(
    config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[RunDir] = []
    monkeypatch.setattr(launcher, "dismiss", ended.append)
    leave(run, "running", pid=os.getppid(), start_ticks=1, host="elsewhere")
    with pytest.raises(ValueError, match="is in use by process"):
        start(config, resume=True)
    assert ended == []
