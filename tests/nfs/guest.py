"""What a guest of the laboratory runs: it mounts the server, and then starts, signals and reports on commands.

Lines of JSON come from and go to the host by a serial port of the machine. Only the standard library, and nothing of
the package: the host's files, this one among them, are the guest's root file system, and read-only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

MOUNT = "/mnt/nfs"
SERVER = "10.0.2.2"  # the host's loopback, as a machine of QEMU's user network sees it
OPTIONS = {"3": "vers=3,nolock,proto=tcp,mountproto=tcp", "4.1": "vers=4.1,proto=tcp"}


class Guest:
    def __init__(self, out: Any) -> None:
        self._out, self._lock = out, threading.Lock()
        self._running: dict[int, subprocess.Popen[str]] = {}

    def say(self, **message: Any) -> None:
        with self._lock:
            self._out.write(json.dumps(message).encode() + b"\n")
            self._out.flush()

    def obey(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "run":
                self.run(order["id"], order["argv"], order["env"])
            case "kill":
                os.killpg(self._running[order["id"]].pid, signal.SIGKILL)
            case "clock":
                self.say(id=order["id"], clock=time.time())
            case "rpcs":
                self.say(id=order["id"], rpcs=rpcs(Path("/proc/self/mountstats").read_text(encoding="utf-8")))

    def run(self, number: int, argv: list[str], env: dict[str, str]) -> None:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(argv, env={**os.environ, **env}, text=True, start_new_session=True, **pipes)
        self._running[number] = process
        threading.Thread(target=self._follow, args=(number, process)).start()

    def _follow(self, number: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.say(id=number, line=line.rstrip("\n"))
        self.say(id=number, rc=process.wait())


def rpcs(mountstats: str) -> dict[str, int]:
    """How often the client has asked the server for what, since it mounted."""
    part = next(part for part in mountstats.split("device ") if f" mounted on {MOUNT} " in part)
    words = [line.split() for line in part.partition("per-op statistics")[2].splitlines()]
    return {line[0].rstrip(":"): int(line[1]) for line in words if len(line) > 2 and int(line[1])}


def network(name: str) -> None:
    Path("/proc/sys/kernel/hostname").write_text(name, encoding="utf-8")
    interface = next(each for each in sorted(os.listdir("/sys/class/net")) if each != "lo")
    for words in (
        f"link set {interface} up",
        f"addr add 10.0.2.15/24 dev {interface}",
        "route add default via 10.0.2.2",
    ):
        subprocess.run(["ip", *words.split()], check=True)


def mount(version: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=True)
    Path(MOUNT).mkdir()
    subprocess.run(["mount.nfs", "-o", OPTIONS[version], f"{SERVER}:/x", MOUNT], check=True)


def serial_port() -> str:
    """The device of the port that QEMU calls ``lab``."""
    for name in Path("/sys/class/virtio-ports").iterdir():
        if (name / "name").read_text(encoding="utf-8").strip() == "lab":
            return f"/dev/{name.name}"
    raise RuntimeError("the machine has no serial port called lab")


def main(name: str, version: str) -> None:
    network(name)
    mount(version)
    with Path(serial_port()).open("r+b", buffering=0) as port:
        guest = Guest(port)
        guest.say(ready=os.uname().release)
        for line in port:
            guest.obey(json.loads(line))


if __name__ == "__main__":
    main(*sys.argv[1:])
