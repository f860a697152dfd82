"""The shapes on Slurm: every role a process on one of the job's nodes, started through an agent there.

launcher (areal-hpc run, in the batch script)
├── srun, one step for each component of the job
│   └── agent on each of its nodes                 (agent.py)
│       └── generator-0, rollout-0, trainer-0 ...  as on a laptop
└── ...

A process that dies is reported by its agent and replaced like any other. An agent that ends unasked ends its step and
with it the attempt; the next attempt starts new steps. A step that never starts is noticed within limits.start_s.
"""

from __future__ import annotations

import json
import logging
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from areal_hpc.cluster.components import Placement
from areal_hpc.cluster.local import KILL_RESERVE_S, Ended, end_in_order, last_lines
from areal_hpc.cluster.owner import Machine, namesakes
from areal_hpc.errors import AttemptFailed, ConfigError
from areal_hpc.run_dir import AttemptDir, RunDir

log = logging.getLogger(__name__)

POLL_S = 0.1
LEAVE_S = 15.0
"""How long an agent that was told to leave may take, and then its srun."""
ABANDON_S = 1.0
"""``LEAVE_S`` where not all agents have come up, so that nothing has been started yet."""


class Step:
    """One srun and the agents behind it.

    Args:
        answers: takes what the agents say.
    """

    def __init__(
        self, command: Sequence[str], nodes: Sequence[str], log: Path, answers: queue.SimpleQueue[dict[str, Any]]
    ) -> None:
        self.nodes, self.log = tuple(nodes), log
        with log.open("ab") as file:
            self.process = subprocess.Popen(  # noqa: S603  no shell
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, start_new_session=True
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._orders: IO[bytes] = self.process.stdin
        threading.Thread(target=_read, args=(self.process.stdout, answers), name="agents", daemon=True).start()

    def order(self, order: Mapping[str, Any]) -> bool:
        """Tell the agents; False if the step is gone."""
        try:
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()
        except BrokenPipeError:
            return False
        return True

    def wait(self, limit_s: float) -> None:
        """Wait for the end of agents that were told to leave; insist when ``limit_s`` is over, and give up when an srun
        that was killed does not end: its output hangs."""
        for insist in (self.process.terminate, self.process.kill, self._give_up):
            try:
                self.process.wait(limit_s)
            except subprocess.TimeoutExpired:
                insist()
            else:
                return

    def _give_up(self) -> None:
        log.critical("srun %d of %s was killed and does not end", self.process.pid, ",".join(self.nodes))

    def obituary(self) -> str:
        return (
            f"the step on {','.join(self.nodes)} ended with code {self.process.poll()}; the end of {self.log}:\n"
            f"{last_lines(self.log)}"
        )


@dataclass(slots=True, kw_only=True)
class RemoteProcess:
    """One role as ``subprocess.Popen`` would show it, with what is needed of that."""

    role: str
    index: int
    node: str
    step: Step
    pid: int = 0
    """On its node; 0 until the agent has told it."""

    def send_signal(self, number: int, /) -> None:
        """Have the agent send it; nothing if the process, or its node, is gone."""
        self.step.order(
            {"do": "signal", "node": self.node, "role": self.role, "index": self.index, "number": int(number)}
        )


def _read(lines: IO[bytes], answers: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in lines:
        answers.put(json.loads(line))


class RemoteLauncher:
    """Implements ``Launcher`` on the nodes of a Slurm job.

    Args:
        steps: the srun command of each step, and its nodes.
        placements: where each process belongs.
        start_s: longest time for all agents to answer.

    Raises:
        AttemptFailed: they did not; names the nodes, and why as far as srun has said.
        ConfigError: some of the nodes are different machines of one name.
    """

    def __init__(
        self,
        run: RunDir,
        epoch: int,
        steps: Sequence[tuple[Sequence[str], Sequence[str]]],
        placements: Mapping[tuple[str, int], Placement],
        start_s: float,
    ) -> None:
        self.attempt: AttemptDir = run.attempt(epoch)
        self.placements = placements
        self.running: dict[tuple[str, int], RemoteProcess] = {}
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._ended: list[Ended] = []
        self._steps: list[Step] = []
        try:
            for number, (command, nodes) in enumerate(steps):
                self._steps.append(Step(command, nodes, self.attempt.log("step", number), self._answers))
            self._wait_for_agents(start_s)
        except BaseException:
            self._leave(ABANDON_S)
            raise
        self._step_of = {node: step for step in self._steps for node in step.nodes}

    def _wait_for_agents(self, limit_s: float) -> None:
        missing = {node for step in self._steps for node in step.nodes}
        machines: dict[str, Machine] = {}
        deadline = time.monotonic() + limit_s
        while missing:
            for answer in self._heard(POLL_S):
                machines[answer["node"]] = Machine(*answer["machine"])
                missing.discard(answer["node"])
            self._require_steps()
            if time.monotonic() > deadline:
                raise AttemptFailed(
                    f"waited {limit_s:g} s (limits.start_s) for the agents on {', '.join(sorted(missing))}; look into "
                    f"{self.attempt.log('step', 0).parent}"
                )
        if problem := namesakes(machines):
            raise ConfigError(problem)

    def _heard(self, wait_s: float) -> Iterator[dict[str, Any]]:
        """What agents have said; waits ``wait_s`` seconds at most for the first."""
        try:
            if wait_s:
                yield self._answers.get(timeout=wait_s)
            while True:
                yield self._answers.get_nowait()
        except queue.Empty:
            return

    def _require_steps(self) -> None:
        for step in self._steps:
            if step.process.poll() is not None:
                raise AttemptFailed(step.obituary())

    def start(self, role: str, index: int) -> None:
        """Start one role at its place, again if need be."""
        place = self.placements[role, index]
        step = self._step_of[place.node]
        step.order({"do": "start", "node": place.node, "role": role, "index": index, "devices": place.devices})
        self.running[role, index] = RemoteProcess(role=role, index=index, node=place.node, step=step)

    def died(self) -> list[Ended]:
        """The processes that have ended since the last call.

        Raises:
            AttemptFailed: a step has ended, and all that ran in it.
        """
        self._listen()
        self._require_steps()
        ended, self._ended = self._ended, []
        return ended

    def _listen(self, wait_s: float = 0.0) -> None:
        for answer in self._heard(wait_s):
            key = (answer["role"], answer["index"])
            if key in self.running and "pid" in answer:
                self.running[key].pid = answer["pid"]
            elif self.running.pop(key, None) is not None:
                self._ended.append(Ended(*key, answer["code"]))

    def placement_of(self, role: str, index: int) -> Placement:
        """Where a process of the run is, or was."""
        return self.placements[role, index]

    def last_lines(self, role: str, index: int) -> str:
        """The end of a role's log, for the message that says why the run ended."""
        return last_lines(self.attempt.log(role, index))

    def stop(self, timeout_s: float, at_once: Callable[[], bool] = lambda: False) -> list[Ended]:
        """End everything within ``timeout_s`` seconds as on one machine, and then the agents."""
        end_in_order(self.running, lambda keys, deadline: self._end(keys, deadline, at_once), timeout_s)
        self._leave(LEAVE_S)
        ended, self._ended = self._ended, []
        return ended

    def _end(self, keys: Sequence[tuple[str, int]], deadline: float, at_once: Callable[[], bool]) -> None:
        self._signal(keys, signal.SIGTERM)
        while self._still(keys) and time.monotonic() < deadline and not at_once():
            self._listen(POLL_S)
        self._signal(self._still(keys), signal.SIGKILL)
        last = time.monotonic() + KILL_RESERVE_S
        while self._still(keys) and time.monotonic() < last:
            self._listen(POLL_S)
        for key in self._still(keys):
            process = self.running.pop(key)
            self._ended.append(Ended(*key, -signal.SIGKILL))
            log.critical(
                "%s-%d on %s was to be killed and is not known to have ended: its node does not answer, or it hangs in "
                "the kernel, in a call to a device or a file system that does not answer, and ends with that",
                *key,
                process.node,
            )

    def _still(self, keys: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """The ``keys`` whose processes still run, as far as one can know: with its step a process is gone."""
        for key in keys:
            if key in self.running and self.running[key].step.process.poll() is not None:
                del self.running[key]
                self._ended.append(Ended(*key, -signal.SIGKILL))
        return [key for key in keys if key in self.running]

    def _signal(self, keys: Sequence[tuple[str, int]], number: int) -> None:
        for key in keys:
            self.running[key].send_signal(number)

    def _leave(self, limit_s: float) -> None:
        for step in self._steps:
            step.order({"do": "leave"})
        for step in self._steps:
            step.wait(limit_s)
