"""``areal-hpc join``: which run may be joined, by whom, from where, and with how many engines."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
from runs_to_join import ELSEWHERE, GONE, begin, config_of, end, run_to_join

from areal_hpc import accelerator
from areal_hpc.buffer.epochs import claim_epoch
from areal_hpc.cluster.environment import job_of
from areal_hpc.config.load import load
from areal_hpc.errors import ConfigError, DataError, RunDirError
from areal_hpc.fs import publish, publish_json
from areal_hpc.liveness.stopping import RESTARTING, RUNNING
from areal_hpc.roles.joining import Standing, device_blocks, require_joinable, standing_of
from areal_hpc.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return run_to_join(tmp_path)


def test_an_attempt_is_joined_when_its_trainer_is_up(run: RunDir) -> None:
    assert standing_of(run, 0) is None
    attempt = begin(run)
    assert standing_of(run, 0) == Standing(state="running", attempt=attempt)
    assert standing_of(run, 1) is None, "it is of the past"
    attempt.endpoint("trainer", 0).unlink()
    assert standing_of(run, 0) is None


@pytest.mark.parametrize("state", ["finished", "failed", "aborted"])
def test_a_run_that_has_ended_is_served_no_more(run: RunDir, state: str) -> None:
    begin(run, state)
    assert standing_of(run, 0) == Standing(state=state)
    assert standing_of(run, 1) is None, "what was before the submission does not count"


def test_between_two_attempts_the_next_one_is_waited_for_but_not_after_a_persons_stop(run: RunDir) -> None:
    attempt = begin(run, RESTARTING)
    assert standing_of(run, 0) is None
    end(attempt, "stopped")  # its job was pre-empted
    assert standing_of(run, 0) is None
    publish(attempt.stop_request, b"{}")
    assert standing_of(run, 0) == Standing(state="stopped")


def test_an_attempt_without_its_launcher_or_with_a_successor_is_not_joined(run: RunDir) -> None:
    attempt = begin(run, owner=GONE)
    assert standing_of(run, 0) is None
    publish_json(attempt.state, {"state": RUNNING, **ELSEWHERE})  # of another host nobody here can know
    assert standing_of(run, 0) is not None
    claim_epoch(run, ELSEWHERE)
    assert standing_of(run, 0) is None


def test_who_may_join(run: RunDir) -> None:
    config = load([run.config], [])
    require_joinable(run, config)
    with pytest.raises(DataError, match=rf"there is no directory /nowhere on {socket.gethostname()}; copy it there"):
        require_joinable(run, load([run.config], ["model.path=/nowhere"]))
    for words in (
        ["deterministic=true"],
        ["replay.run=other"],
        ["evaluation.checkpoint=other"],
        ["algorithm.name=sft"],
    ):
        with pytest.raises(ConfigError, match="takes no engines that join"):
            require_joinable(run, load([run.config], words))
    run.token.chmod(0o640)
    with pytest.raises(RunDirError, match="must be yours alone; run `chmod 600 "):
        require_joinable(run, config)


@pytest.mark.parametrize(
    ("words", "engines", "environment", "blocks"),
    [
        ((), None, {}, [()]),
        ((), 3, {}, [(), (), ()]),
        ((), None, {"CUDA_VISIBLE_DEVICES": "4,6"}, [(0,), (1,)]),
        ((), None, {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2"}, [(0,), (1,), (2,)]),
        ((), 1, {"CUDA_VISIBLE_DEVICES": "4,6"}, [(0,)]),
        ((), None, {"CUDA_VISIBLE_DEVICES": "4,"}, [(0,)]),
        (("layout=sglang:d1t2+fsdp:d1",), None, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}, [(0, 1), (2, 3)]),
        (("cluster.generation.gpus=4", "cluster.shape=satellites"), None, {}, [(0,), (1,), (2,), (3,)]),
    ],
)
def test_a_machine_has_as_many_engines_as_its_devices_are_for(
    words: tuple[str, ...], engines: int | None, environment: dict[str, str], blocks: list[tuple[int, ...]]
) -> None:
    assert device_blocks(config_of(*words), engines, environment) == blocks


@pytest.mark.parametrize(
    ("backend", "found", "blocks"),
    [
        ("sglang", accelerator.CUDA, [(0, 1), (2, 3)]),
        ("sglang", accelerator.CPU, [()]),
        ("embedded", accelerator.CUDA, [()]),
    ],
)
def test_where_nobody_says_which_all_devices_of_the_machine_are_for_engines(
    monkeypatch: pytest.MonkeyPatch, backend: str, found: accelerator.Accelerator, blocks: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr(accelerator, "detect", lambda: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    config = config_of(f"generation.backend={backend}", f"generation.tensor_parallel={2 if backend == 'sglang' else 1}")
    assert device_blocks(config, None, {}) == blocks


@pytest.mark.parametrize(
    ("engines", "message"),
    [(0, "--engines 0: each needs 2"), (2, "--engines 2: each needs 2 of the 3 devices here"), (-1, "--engines -1")],
)
def test_engines_that_do_not_fit_are_refused(engines: int, message: str) -> None:
    config = config_of("layout=sglang:d1t2+fsdp:d1")
    with pytest.raises(ConfigError, match=message):
        device_blocks(config, engines, {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    for number in (engines, None):  # an engine that spans nodes cannot join, however many are asked for
        with pytest.raises(ConfigError, match=r"2 GPUs of one node, and a satellite has 1.*of the run's own job span"):
            device_blocks(config, number, {"CUDA_VISIBLE_DEVICES": "0"})


def test_a_job_is_named_as_squeue_lists_it() -> None:
    array = {"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    assert [job_of(one) for one in ({}, {"SLURM_JOB_ID": "15"}, array)] == ["", "15", "12_3"]
