"""Who runs an attempt, said so that others can tell whether that process still lives.

A pid alone lies: it is reused. The kernel's start time of the process, together with the boot it belongs to, makes it
unique on a host. What became of a process on another host cannot be told from here, least of all by a clock.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

STOPPED, HANGING = "T", "D"
"""Kernel states: stopped by a signal; in a call that nothing interrupts, such as to a server that is away."""


class Machine(NamedTuple):
    """A kernel that runs, and the name that it gives."""

    host: str
    boot: str

    @classmethod
    def here(cls) -> Machine:
        return cls(socket.gethostname(), _boot())


def namesakes(machines: Mapping[str, Machine]) -> str:
    """Which nodes are different machines of one name, and what to do about it; empty where none are.

    To an NFSv4 server such machines are one client, and each takes the other's session (RFC 8881, 2.4). And whoever
    asks whether a process of one of them lives finds another boot on "its" host, and takes it for gone.
    """
    nodes: dict[str, dict[str, str]] = {}  # host -> boot -> one node
    for node, machine in machines.items():
        nodes.setdefault(machine.host, {})[machine.boot] = node
    found = [f"{' and '.join(sorted(of.values()))}, all named {host}" for host, of in nodes.items() if len(of) > 1]
    if not found:
        return ""
    return (
        f"different machines have one hostname: {', '.join(found)}; give each a name of its own, or keep all but one "
        "of them out of the job (cluster.all.exclude)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """One process on one host, for ever distinct from any other."""

    host: str
    pid: int
    boot: str
    start_ticks: int  # clock ticks after boot at which the process began

    @classmethod
    def this_process(cls) -> Owner:
        pid = os.getpid()
        ticks = start_ticks(pid)
        assert ticks is not None
        return cls(host=socket.gethostname(), pid=pid, boot=_boot(), start_ticks=ticks)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Owner:
        fields = ("host", "pid", "boot", "start_ticks")
        return cls(**{name: record[name] for name in fields})

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def is_gone(self) -> bool:
        """Whether the process has ended for certain. Of another host's nobody here can know, so it is not gone."""
        if self.host != socket.gethostname():
            return False
        return self.boot != _boot() or start_ticks(self.pid) != self.start_ticks

    def kernel_state(self) -> str:
        """How the kernel calls the state of a process of this host that lives (proc(5)); else nothing."""
        fields = None if self.host != socket.gethostname() or self.is_gone() else _stat(self.pid)
        return fields[0] if fields else ""


def whence() -> dict[str, str]:
    """What is recorded beside the owner for whoever goes on: the directory he began in, where modules may lie."""
    return {"directory": str(Path.cwd())}


def start_ticks(pid: int) -> int | None:
    """Start time of process ``pid`` in clock ticks since boot; None when it is gone or a zombie (proc(5))."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def _stat(pid: int) -> list[str] | None:
    """What /proc says of a process, from its state on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
