"""``python -m areal_hpc.cluster.agent RUN_DIR EPOCH``: one node's hands. It starts and ends the run's processes there.

    launcher (on the job's first node)                      agent (one task of an srun step on every node)
    ----------------------------------                      ----------------------------------------------
                                                   <-----   {"node", "ready": true, "machine": [host, boot]}
    {"node", "do": "start", role, index, devices}  ----->   a process of its own, as on a laptop
                                                   <-----   {"node", role, index, "pid"}
    {"node", "do": "signal", role, index, number}  ----->
                                                   <-----   {"node", role, index, "code"} when a process has ended
    {"do": "leave"}, or the end of the input       ----->   ends what still runs, and itself

Orders and answers are lines of JSON on standard input and output, which srun carries under Slurm's own authentication:
no port, no token. srun gives each order to all nodes of a step; an agent heeds those with its name and those with none.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_hpc.cluster.devices import visible_devices
from areal_hpc.cluster.local import LocalLauncher
from areal_hpc.cluster.owner import Machine
from areal_hpc.cluster.rendezvous import address_by_mpi, address_towards
from areal_hpc.config.load import load
from areal_hpc.run_dir import RunDir

LOOK_S = 0.1


class Agent:
    """Follows orders on one node until it is to leave."""

    def __init__(self, node: str, launcher: LocalLauncher, environment: Mapping[str, str]) -> None:
        self.node, self.launcher, self.environment = node, launcher, environment
        self.orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def say(self, answer: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps({"node": self.node, **answer}) + "\n")
        sys.stdout.flush()

    def listen(self) -> None:
        """Read orders to the end of the input, which is None."""
        for line in sys.stdin:
            self.orders.put(json.loads(line))
        self.orders.put(None)

    def follow(self) -> None:
        """Follow orders until it is told to leave, or the launcher is gone."""
        self.say({"ready": True, "machine": Machine.here()})
        while self._obey():
            for ended in self.launcher.died():
                self.say({"role": ended.role, "index": ended.index, "code": ended.code})

    def _obey(self) -> bool:
        """Carry out the next order, if one comes in a while; False when it was the last."""
        try:
            order = self.orders.get(timeout=LOOK_S)
        except queue.Empty:
            return True
        if order is None or order["do"] == "leave":
            return False
        if order["node"] == self.node:
            key = (order["role"], order["index"])
            if order["do"] == "start":
                self.launcher.start(*key, visible_devices(order["devices"], self.environment))
                self.say({"role": key[0], "index": key[1], "pid": self.launcher.running[key].pid})
            elif process := self.launcher.running.get(key):
                _signal(process.pid, order["number"])
        return True


def _signal(pid: int, number: int) -> None:
    """A request goes to the process; the end of patience to the session that it leads."""
    if number == signal.SIGKILL:
        os.killpg(pid, number)
    else:
        os.kill(pid, number)  # not reaped yet, so the pid is its own


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    root, epoch = arguments
    # Slurm sends this to every process of the job at once; when to stop, and in which order, is the launcher's to say.
    # A handler, not SIG_IGN: that would be handed down.
    signal.signal(signal.SIGTERM, lambda *_: None)
    run = RunDir.open(Path(root))
    config = load([run.config], [])
    peer = environment["SLURM_LAUNCH_NODE_IPADDR"]
    by_mpi = config.cluster.mpi
    host = address_by_mpi(peer, int(environment["SLURM_STEP_NUM_TASKS"])) if by_mpi else address_towards(peer)
    launcher = LocalLauncher.of(config, run, int(epoch), host)
    agent = Agent(environment["SLURMD_NODENAME"], launcher, environment)
    threading.Thread(target=agent.listen, name="orders", daemon=True).start()
    try:
        agent.follow()
    finally:
        launcher.stop(config.limits.stop_s)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:], os.environ)
    sys.stdout.flush()
    os._exit(code)  # the thread that reads orders holds the input's lock, which an orderly end would wait for
