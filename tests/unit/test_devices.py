"""Which devices engines get, on a node of a job and on a machine of one's own."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_hpc import accelerator, collective
from areal_hpc.cluster import local
from areal_hpc.cluster.devices import engine_devices, visible_devices
from areal_hpc.config.derived import collective_s
from areal_hpc.config.load import load
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError
from areal_hpc.roles.wiring.launchers import make_launcher
from areal_hpc.roles.wiring.servers import spec_of
from areal_hpc.roles.wiring.training import join_ranks
from areal_hpc.run_dir import RunDir

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


def config_of(*overrides: str) -> Config:
    return load([QUICKSTART], ["generation.backend=sglang", "cluster.shape=local", *overrides])


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {"CUDA_VISIBLE_DEVICES": "6,7"}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,MIG-c,MIG-d"}, {"CUDA_VISIBLE_DEVICES": "MIG-c,MIG-d"}),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3"}, {"ASCEND_RT_VISIBLE_DEVICES": "2,3"}),
        ({}, {"CUDA_VISIBLE_DEVICES": "2,3", "ASCEND_RT_VISIBLE_DEVICES": "2,3"}),
    ],
)
def test_A10_devices_are_bound_by_the_names_that_slurm_gave_them(
    environment: dict[str, str], expected: dict[str, str]
) -> None:
    assert visible_devices((2, 3), environment) == expected
    assert visible_devices((), environment) == {}


@pytest.mark.parametrize("given", ["0,1", "NoDevFiles", "MIG-a"])
def test_where_slurm_gives_fewer_devices_than_the_run_is_said_to_use_that_is_said(given: str) -> None:
    said = rf"CUDA_VISIBLE_DEVICES={given} names .* is to have number 3, .*; set cluster\.all\.gpus"
    with pytest.raises(ConfigError, match=said):
        visible_devices((2, 3), {"CUDA_VISIBLE_DEVICES": given})


@pytest.mark.parametrize(
    ("num_devices", "replicas", "ranks", "expected"),
    [
        (8, 2, 2, [(6, 7), (4, 5)]),
        (8, 4, 1, [(7,), (6,), (5,), (4,)]),
        (1, 1, 1, [(0,)]),
        (1, 2, 1, [(0,), (0,)]),
        (7, 4, 2, [(5, 6), (3, 4), (1, 2), (5, 6)]),
        (4, 1, 4, [(0, 1, 2, 3)]),
    ],
)
def test_engines_take_devices_from_the_last_on_and_share_only_where_there_are_too_few(
    num_devices: int, replicas: int, ranks: int, expected: list[tuple[int, ...]]
) -> None:
    config = config_of(f"generation.replicas={replicas}", f"generation.tensor_parallel={ranks}")
    assert engine_devices(config, num_devices) == expected


def test_an_engine_that_is_larger_than_the_machine_is_refused() -> None:
    config = config_of("generation.tensor_parallel=2", "generation.pipeline_parallel=2")
    with pytest.raises(ConfigError, match=r"an engine needs 4 devices, and this machine has 3; lower it"):
        engine_devices(config, 3)


@pytest.mark.parametrize(
    ("num_devices", "more", "shared"),
    [
        (1, (), "trainer-0 and generator-0 would share device 0"),
        (2, ("generation.tensor_parallel=2",), "trainer-0 and generator-0 would share device 0"),
        (2, ("generation.replicas=2",), "trainer-0 and generator-1 would share device 0"),
        (
            5,
            ("generation.replicas=3", "generation.tensor_parallel=2"),
            "generator-0 and generator-2 would share device 3",
        ),
        (1, ("weights.transport=disk",), None),
        (2, (), None),
        (8, ("trainer.ranks=8",), None),  # only the trainer's first rank is a member of the weight group
    ],
)
def test_weights_are_not_broadcast_to_a_device_that_has_two_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_devices: int, more: tuple[str, ...], shared: str | None
) -> None:
    """NCCL ends the first broadcast with "Duplicate GPU detected": ncclInvalidUsage, as its init.cc has it."""
    monkeypatch.setattr(accelerator, "detect", lambda: accelerator.CUDA)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_devices)
    config = config_of(*more)
    with nullcontext() if shared is None else pytest.raises(ConfigError, match=shared):
        make_launcher(config, RunDir(tmp_path), 1, {"trainer": 1, "generator": config.generation.replicas})
    make_launcher(config, RunDir(tmp_path), 1, {"evaluator": 1, "generator": config.generation.replicas})


def started_with(launcher: Any, monkeypatch: pytest.MonkeyPatch, role: str, index: int) -> dict[str, str]:
    """The environment that a role would be started with."""
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(local.subprocess, "Popen", lambda *_, env, **__: seen.append(env))
    launcher.start(role, index)
    return seen[0]


@pytest.mark.parametrize(
    ("backend", "found", "visible"),
    [("sglang", accelerator.CUDA, "2"), ("sglang", accelerator.CPU, None), ("embedded", accelerator.CUDA, None)],
)
def test_an_engine_on_this_machine_is_bound_before_it_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    found: accelerator.Accelerator,
    visible: str | None,
) -> None:
    for name in (accelerator.CUDA.visible_devices, accelerator.NPU.visible_devices):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(accelerator, "detect", lambda: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    config = config_of("generation.replicas=2", f"generation.backend={backend}")
    run = RunDir(tmp_path)
    run.attempt(1).logs.mkdir(parents=True)
    launcher = make_launcher(config, run, 1, {"trainer": 1, "generator": 2})
    assert started_with(launcher, monkeypatch, "generator", 1).get("CUDA_VISIBLE_DEVICES") == visible
    assert "CUDA_VISIBLE_DEVICES" not in started_with(launcher, monkeypatch, "trainer", 0)


def test_without_engines_no_device_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "detect", lambda: accelerator.CUDA)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    config = config_of("generation.tensor_parallel=2")
    launcher = make_launcher(config, RunDir(tmp_path), 1, {"trainer": 1})
    assert isinstance(launcher, local.LocalLauncher)
    assert launcher.own_variables == {}


@pytest.mark.parametrize("role", ["trainer", "generator", "part"])
def test_on_a_cluster_nobody_takes_the_first_of_devices_that_it_is_not_bound_to(
    monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setattr(accelerator, "detect", lambda: accelerator.CUDA)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    config = load([QUICKSTART], ["generation.backend=sglang", "cluster.shape=het"])
    process: Any = SimpleNamespace(role=role, index=0, incarnation=0, config=config)
    with pytest.raises(ConfigError, match=r"works on 1 and sees 4 cuda devices"):
        join_ranks(process) if role == "trainer" else spec_of(process)


def test_the_ranks_devices_are_told_how_long_rank_0_may_keep_them_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Met(Exception):
        """As far as is looked at here."""

    def meet(_: Any) -> None:
        raise Met

    told: list[float] = []
    monkeypatch.setattr(accelerator, "take_device", lambda _: "npu:1")
    monkeypatch.setattr(accelerator, "let_wait", told.append)
    monkeypatch.setattr(collective, "remember_operations", lambda _: None)
    config = config_of("trainer.ranks=2")
    process: Any = SimpleNamespace(
        index=1, config=config, attempt=SimpleNamespace(stacks=Path()), publish_endpoint=meet
    )
    with pytest.raises(Met):
        join_ranks(process)
    assert told == [collective_s(config)]
