"""Both launchers start, watch and end real processes alike; an agent is started without srun here, on this machine."""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from launched import CONFIG, until

from areal_hpc.cluster.components import Placement
from areal_hpc.cluster.local import LocalLauncher
from areal_hpc.cluster.remote import RemoteLauncher, Step
from areal_hpc.errors import AttemptFailed, ConfigError
from areal_hpc.exits import EXIT_STOPPED
from areal_hpc.protocols import Launcher
from areal_hpc.run_dir import RunDir

ROLE = ("trainer", 1)
"""It waits for rank 0, which never comes up, and needs no model."""
START_S = 60.0
NODES = {"n1": ROLE, "n2": ("trainer", 2)}


def agent(run: RunDir, node: str) -> list[str]:
    variables = [f"SLURMD_NODENAME={node}", "SLURM_LAUNCH_NODE_IPADDR=127.0.0.1"]
    return ["env", *variables, sys.executable, "-m", "areal_hpc.cluster.agent", str(run.root), "1"]


def remote(run: RunDir, start_s: float = START_S, **commands: list[str]) -> RemoteLauncher:
    """A step for each node."""
    steps = [(commands.get(node, agent(run, node)), [node]) for node in NODES]
    placements = {role: Placement(node=node) for node, role in NODES.items()}
    return RemoteLauncher(run, 1, steps, placements, start_s)


MAKE: Mapping[str, Callable[[RunDir], Any]] = {"local": lambda run: LocalLauncher(run, 1, {}), "remote": remote}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of three trainer ranks."""
    made = RunDir.create(tmp_path / "run")
    made.config.write_text(
        yaml.safe_dump(CONFIG | {"model": {"path": "none"}, "trainer": CONFIG["trainer"] | {"ranks": 3}})
    )
    made.token.write_text("secret")
    made.attempt(1).create()
    return made


@pytest.fixture(params=MAKE)
def launcher(request: pytest.FixtureRequest, run: RunDir) -> Iterator[Any]:
    made = MAKE[request.param](run)
    try:
        yield made
    finally:
        made.stop(0.0)


def pid_of(launcher: Any) -> int:
    def told() -> int:
        assert launcher.died() == []
        return int(launcher.running[ROLE].pid)

    return int(until("the pid", told))


def wait_until_up(run: RunDir) -> None:
    until("a heartbeat", lambda: run.attempt(1).heartbeat(*ROLE).exists())


def ended(launcher: Any) -> list[tuple[str, int]]:
    return [(one.name, one.code) for one in until("an end", launcher.died)]


def test_what_it_starts_is_told_when_it_dies_and_can_be_started_again(launcher: Any, run: RunDir) -> None:
    assert isinstance(launcher, LocalLauncher | RemoteLauncher)
    as_protocol: Launcher = launcher
    as_protocol.start(*ROLE)
    assert list(launcher.running) == [ROLE]
    first = psutil.Process(pid_of(launcher))
    wait_until_up(run)
    line = first.cmdline()
    assert line[line.index("areal_hpc.roles") + 1 :][:5] == ["trainer", "1", str(run.root), "1", "0"]
    first.kill()
    assert ended(launcher) == [("trainer-1", -signal.SIGKILL)]
    assert not launcher.running
    as_protocol.start(*ROLE)
    second = psutil.Process(pid_of(launcher))
    until("its own command line", lambda: "areal_hpc.roles" in second.cmdline())  # a fork has its parent's at first
    line = second.cmdline()
    assert line[line.index("areal_hpc.roles") + 5] == "1", "it is told that it is the second"


def test_a_signal_reaches_the_process_itself(launcher: Any, run: RunDir) -> None:
    launcher.start(*ROLE)
    pid_of(launcher)
    wait_until_up(run)
    launcher.running[ROLE].send_signal(signal.SIGKILL)
    assert ended(launcher) == [("trainer-1", -signal.SIGKILL)]


def test_a_stop_is_a_request_and_leaves_nothing(launcher: Any, run: RunDir) -> None:
    launcher.start(*ROLE)
    process = psutil.Process(pid_of(launcher))
    wait_until_up(run)
    assert [(one.name, one.code) for one in launcher.stop(120.0)] == [("trainer-1", EXIT_STOPPED)]
    assert not process.is_running()
    assert not launcher.running


def test_who_does_not_stop_is_killed_in_time(launcher: Any, run: RunDir) -> None:
    launcher.start(*ROLE)
    pid = pid_of(launcher)
    wait_until_up(run)
    os.kill(pid, signal.SIGSTOP)
    assert [(one.name, one.code) for one in launcher.stop(2.5)] == [("trainer-1", -signal.SIGKILL)]
    assert not psutil.pid_exists(pid)


def test_the_end_of_a_log_is_at_hand(launcher: Any, run: RunDir) -> None:
    run.attempt(1).log(*ROLE).write_text("first\nlast\n")
    assert launcher.last_lines(*ROLE) == "first\nlast"


def agents_of(launcher: RemoteLauncher) -> list[psutil.Process]:
    return [psutil.Process(step.process.pid) for step in launcher._steps]


def test_an_agent_that_is_lost_ends_the_attempt_and_takes_its_roles_along(run: RunDir) -> None:
    launcher = remote(run)
    launcher.start(*ROLE)
    role = psutil.Process(pid_of(launcher))
    wait_until_up(run)
    first, second = agents_of(launcher)
    first.kill()
    with pytest.raises(AttemptFailed, match=r"the step on n1 ended with code -9; the end of .*step-0\.log"):
        until("its end", launcher.died)
    assert [(one.name, one.code) for one in launcher.stop(20.0)] == [("trainer-1", -signal.SIGKILL)]
    role.wait(30)  # it has seen that its parent is another
    assert not second.is_running()


def test_fault_24_one_on_a_node_that_does_not_answer_is_named_and_waited_for_no_longer(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    """Its agent is stopped, as one that hangs in the kernel together with what it started."""
    launcher = remote(run)
    launcher.start(*ROLE)
    pid_of(launcher)
    for one in agents_of(launcher):
        one.suspend()
    with caplog.at_level(logging.CRITICAL):
        launcher._end([ROLE], 0.0, lambda: False)
    assert "trainer-1 on n1 was to be killed and is not known to have ended: its node does not answer" in caplog.text
    assert not launcher.running
    for one in agents_of(launcher):
        one.resume()
    assert [(one.name, one.code) for one in launcher.stop(20.0)] == [("trainer-1", -signal.SIGKILL)]


def test_fault_24_an_srun_that_cannot_be_killed_is_named_and_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it is asked to is carried out, but nobody sees its end."""
    step = Step(["sleep", "60"], ["n1", "n2"], tmp_path / "step.log", queue.SimpleQueue())
    asked, ended = list[float](), step.process.wait

    def never(timeout: float) -> int:
        asked.append(timeout)
        raise subprocess.TimeoutExpired("srun", timeout)

    monkeypatch.setattr(step.process, "wait", never)
    with caplog.at_level(logging.CRITICAL):
        step.wait(0.5)
    assert asked == [0.5, 0.5, 0.5], "asked to leave, told to end, killed"
    assert f"srun {step.process.pid} of n1,n2 was killed and does not end" in caplog.text
    assert ended(30) == -signal.SIGTERM


def test_agents_whose_launcher_is_gone_end_all_that_they_have_started(run: RunDir) -> None:
    launcher = remote(run)
    launcher.start(*ROLE)
    role = psutil.Process(pid_of(launcher))
    wait_until_up(run)
    for step in launcher._steps:
        step._orders.close()
    for step in launcher._steps:
        assert step.process.wait(30) == 0
    assert not role.is_running()


def test_a_signal_to_all_processes_of_a_job_leaves_the_agents_to_their_launcher(run: RunDir) -> None:
    launcher = remote(run)
    for one in agents_of(launcher):
        one.terminate()
    launcher.start(*ROLE)
    assert pid_of(launcher)
    assert [one.name for one in launcher.stop(0.0)] == ["trainer-1"]


def test_A8_a_step_that_never_starts_is_said_at_once_with_what_slurm_said(run: RunDir) -> None:
    refused = ["bash", "-c", "echo 'srun: error: Memory required by task is not available' >&2; exit 1"]
    with pytest.raises(AttemptFailed, match=r"the step on n2 ended with code 1.*\n.*Memory required by task"):
        remote(run, n2=refused)


def test_a_node_that_does_not_answer_is_named(run: RunDir) -> None:
    with pytest.raises(AttemptFailed, match=r"waited 2 s \(limits\.start_s\) for the agents on n2; look into"):
        remote(run, 2.0, n2=["sleep", "600"])


def test_fault_29_different_machines_of_one_name_are_refused(run: RunDir) -> None:
    """Two agents answer from one hostname and two boots."""
    words = {
        node: {"node": node, "ready": True, "machine": ["cloned", boot]} for node, boot in (("n1", "a"), ("n2", "b"))
    }
    answering = {node: ["bash", "-c", f"echo '{json.dumps(said)}'; cat > /dev/null"] for node, said in words.items()}
    with pytest.raises(ConfigError, match=r"one hostname: n1 and n2, all named cloned; .*cluster\.all\.exclude"):
        remote(run, **answering)


def test_ctrl_c_while_the_agents_come_up_leaves_none_of_them(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes once both steps have been started."""
    monkeypatch.setattr(RemoteLauncher, "_wait_for_agents", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        remote(run)  # and ``nothing_is_left`` looks


def test_a_command_that_cannot_be_started_ends_the_steps_before_it(run: RunDir) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-srun"):
        remote(run, n2=["no-such-srun"])


@pytest.fixture(autouse=True)
def nothing_is_left(run: RunDir) -> Iterator[None]:
    yield
    mine = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if str(run.root) in child.cmdline():
                mine.append(child)
    _, left = psutil.wait_procs(mine, timeout=20)
    assert left == []
