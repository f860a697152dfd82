"""A real Slurm cluster of several nodes on one Linux host, for as long as a test session.

    login    10.99.0.1     slurmctld, slurmdbd with MariaDB, munged; here commands are typed
    n1 ...   10.99.0.11 +  one slurmd each

Every node is an own set of kernel namespaces (network, host name, pid, IPC, mount), so that a node has its own address,
ports, /tmp and /dev/shm, and so that killing its first process is a power cut: the kernel ends everything on it. The
rest of the file system is shared, as on a cluster with a parallel file system. Nothing is added to the host's own
network, /etc or /run, so that clusters run side by side. Needs root, and ``PACKAGES`` of Debian.

What is started is recorded as (pid, start time) and ended by exactly that; nothing is ever found by name. A test
session that is killed takes its cluster along.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cluster_files import MARIADB, MARIADB_USER, SLURM_CONF, SLURMDBD_CONF

from areal_hpc.cluster.owner import start_ticks

PACKAGES = (Path(__file__).parent / "packages.txt").read_text(encoding="utf-8").split()
PROGRAMS = ("slurmctld", "slurmd", "munged", "slurmdbd", "mariadbd", "ip", "nsenter", "unshare")
SUBNET = "10.99.0"  # exists only inside the cluster's namespaces
LOGIN = "login"
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
LONGEST_SOCKET_PATH = 100  # of the 108 bytes that the kernel allows
LIMIT_S = 90.0
ASK_S = 0.5  # between questions to the controller: each is a process, on cores that the runs under test need

# The first process of a node: sets the node up, says so, then reaps orphans for ever (a `sleep` would not).
# Its /proc is still the host's when it reads its own pid.
FIRST_PROCESS = r"""
set -eu
name=$1 ready=$2 hosts=$3 tmp=$4; shift 4
read -r pid _ < /proc/self/stat
hostname "$name"
mount -t proc proc /proc
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$hosts" /etc/hosts
mkdir -p "$tmp"; chmod 1777 "$tmp"
for path; do mkdir -p "$tmp/${path#/tmp/}"; mount --bind "$path" "$tmp/${path#/tmp/}"; done
mount --rbind "$tmp" /tmp
ip link set lo up
echo "$pid" > "$ready.new"; mv "$ready.new" "$ready"
trap : TERM INT HUP
while :; do sleep 86400 & wait $! || :; done
"""


def unusable() -> str:
    """Why no cluster can be started here; empty if one can."""
    if os.geteuid():
        return "a Slurm of one's own needs root"
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if missing:
        return f"{', '.join(missing)} not found; apt-get install -y --no-install-recommends {' '.join(PACKAGES)}"
    return ""


def wait_for(what: str, ready: Callable[[], Any], limit_s: float = LIMIT_S, poll_s: float = 0.05) -> Any:
    deadline = time.monotonic() + limit_s
    while not (answer := ready()):
        assert time.monotonic() < deadline, f"waited {limit_s:g} s for {what}"
        time.sleep(poll_s)
    return answer


class SlurmCluster:
    """A cluster whose whole state lies in ``directory``; ``with SlurmCluster(directory) as cluster:``.

    Args:
        num_nodes: compute nodes n1, n2, ...; the first half has the feature h100, the rest a100, each also its number.
        gpus: pretended GPUs of a node; with 0 the cluster has no generic resources at all.
        settings: lines of slurm.conf that replace or follow ours.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_nodes: int = 3,
        cpus: int = 16,
        gpus: int = 4,
        grace_s: int = 40,
        settings: Sequence[str] = (),
    ) -> None:
        self.dir = directory.resolve()
        self.nodes = tuple(f"n{number}" for number in range(1, num_nodes + 1))
        self._cpus, self._gpus, self._grace_s, self._settings = cpus, gpus, grace_s, settings
        self._started: dict[str, tuple[int, int]] = {}  # name to (pid, start time)
        visible = (self.dir, Path.cwd(), Path(sys.prefix))
        self._visible = sorted({str(path.resolve()) for path in visible if path.resolve().is_relative_to("/tmp")})
        assert len(f"{self.dir}/run/munge.sock") <= LONGEST_SOCKET_PATH, f"{self.dir} is too long for a socket's path"

    # ---- what tests do

    def __enter__(self) -> SlurmCluster:
        try:
            self._up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def call(self, *words: str | Path, where: str = LOGIN, limit_s: float = LIMIT_S) -> str:
        """Output of a command on a node, which must succeed."""
        done = self.run(*words, where=where, limit_s=limit_s)
        assert done.returncode == 0, f"{' '.join(map(str, words))}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def run(
        self,
        *words: str | Path,
        where: str = LOGIN,
        limit_s: float = LIMIT_S,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._enter(where, cwd), *map(str, words)],
            env={**self._environment(), **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def job(self, job_id: str | int) -> list[dict[str, str]]:
        """What Slurm knows of a job, one mapping a component, from the controller (accounting lags by a second)."""
        lines = self.call("scontrol", "show", "job", "-o", str(job_id)).splitlines()
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines if line.strip()]

    def wait_for_state(self, job_id: str | int, *states: str, limit_s: float = LIMIT_S) -> str:
        """The state of a job's first component, once it is one of ``states``."""

        def state() -> str:
            now = self.job(job_id)[0]["JobState"]
            return now if now in states else ""

        return str(wait_for(f"job {job_id} to be {' or '.join(states)}", state, limit_s, ASK_S))

    @contextmanager
    def without_controller(self) -> Iterator[None]:
        """slurmctld is away for the time of the block; it comes back with what it knew."""
        self._kill("slurmctld")
        try:
            yield
        finally:
            self._daemon(LOGIN, "slurmctld", "slurmctld", "-D")
            wait_for("slurmctld", lambda: self.run("scontrol", "ping").stdout.find(" is UP") > 0, poll_s=0.2)
            wait_for("its nodes", lambda: not self._missing(), poll_s=0.2)

    def _missing(self) -> list[str]:
        """Nodes that the controller does not hear of, or does not give jobs to."""
        lines = [line.split() for line in self.run("sinfo", "-hN", "-o", "%N %T").stdout.splitlines()]
        heard = {name for name, state in lines if state in ("idle", "allocated", "mixed", "completing")}
        return [node for node in self.nodes if node not in heard]

    def crash(self, node: str) -> None:
        """Cut a node's power."""
        self._kill(f"first.{node}")

    def boot(self, node: str) -> None:
        """Start a node that has crashed."""
        self._boot(node)
        wait_for("the old cable to go", lambda: f" {node}@" not in self.call("ip", "link", "show", "type", "veth"))
        self._plug_in(node)
        self._start_slurmd(node)
        self._wait_until_idle([node])

    def down(self) -> None:
        """End everything that was started."""
        names = list(self._started)
        first = [name for name in names if name.startswith("first.") and name != f"first.{LOGIN}"]
        rest = [name for name in reversed(names) if not name.startswith("first.")]
        for name in [*first, *rest, f"first.{LOGIN}"]:
            self._kill(name)

    # ---- processes

    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return {**own, "SLURM_CONF": f"{self.dir}/etc/slurm.conf", "PATH": f"{own.get('PATH', '')}:{SYSTEM_PATH}"}

    def _enter(self, node: str, cwd: Path | None = None) -> list[str]:
        pid, _ = self._started[f"first.{node}"]
        return ["nsenter", "-t", str(pid), "-m", "-u", "-i", "-n", "-p", f"--wdns={cwd or self.dir}", "--"]

    def _record(self, name: str, pid: int) -> None:
        ticks = start_ticks(pid)
        assert ticks is not None, f"{name} ended at once; see {self.dir}/log"
        self._started[name] = (pid, ticks)

    def _lives(self, name: str) -> bool:
        return name in self._started and start_ticks(self._started[name][0]) == self._started[name][1]

    def _kill(self, name: str) -> None:
        if self._lives(name):
            with suppress(ProcessLookupError):
                os.kill(self._started[name][0], signal.SIGKILL)
            wait_for(f"the end of {name}", lambda: not self._lives(name), 20.0)
        self._started.pop(name, None)

    def _daemon(self, node: str, name: str, *words: str) -> None:
        with (self.dir / f"log/{name}.out").open("ab") as out:
            entered = subprocess.Popen(
                [*self._enter(node), *words],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        children = Path(f"/proc/{entered.pid}/task/{entered.pid}/children")

        def child() -> int:  # nsenter forks to enter the pid namespace: the daemon is its only child
            assert entered.poll() is None, f"{name} ended at once; see {self.dir}/log/{name}.out"
            pids = children.read_text().split()
            return int(pids[0]) if pids else 0

        self._record(name, wait_for(f"the start of {name}", child))

    # ---- bring-up

    def _up(self) -> None:
        for room in ("run", "state", "spool", "log", "etc", "dev", "tmp"):
            (self.dir / room).mkdir(parents=True)
        for number in range(self._gpus):  # Slurm wants device files to number GPUs by; these are twins of /dev/null
            os.mknod(self.dir / f"dev/nvidia{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        names = [f"{SUBNET}.1 {LOGIN}", *(f"{self._address(node)} {node}" for node in self.nodes)]
        self._write("hosts", "\n".join(["127.0.0.1 localhost", *names, ""]))
        self._write_configuration()
        for node in (LOGIN, *self.nodes):
            self._boot(node)
        bridge = f"link add br0 type bridge\naddr add {SUBNET}.1/24 dev br0\nlink set br0 up\n"
        self._ip(LOGIN, bridge)
        for node in self.nodes:
            self._plug_in(node)
        self._start_munge()
        self._start_accounting()
        self._daemon(LOGIN, "slurmctld", "slurmctld", "-D")
        for node in self.nodes:
            self._start_slurmd(node)
        self._wait_until_idle(self.nodes)

    def _write(self, name: str, text: str, mode: int = 0o644) -> None:
        path = self.dir / "etc" / name
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)

    def _address(self, node: str) -> str:
        return f"{SUBNET}.{11 + self.nodes.index(node)}"

    def _write_configuration(self) -> None:
        replaced = tuple(line.split("=", 1)[0] + "=" for line in self._settings if not line.startswith("Partition"))
        left_out = replaced if self._gpus else (*replaced, "GresTypes=", "AccountingStorageTRES=")
        lines = [line for line in SLURM_CONF.format(dir=self.dir).splitlines() if not line.startswith(left_out or "\0")]
        gres = []
        for number, node in enumerate(self.nodes, 1):
            kind = "h100" if number <= (len(self.nodes) + 1) // 2 else "a100"
            has = f"Gres=gpu:{kind}:{self._gpus} " if self._gpus else ""
            lines.append(
                f"NodeName={node} NodeHostname={node} NodeAddr={self._address(node)} CPUs={self._cpus} "
                f"RealMemory=16384 {has}Feature={kind},gpu,node{number} State=UNKNOWN"
            )
            if has:
                gres.append(f"NodeName={node} Name=gpu Type={kind} File={self.dir}/dev/nvidia[0-{self._gpus - 1}]")
        everywhere = "Nodes=ALL MaxTime=1-0 DefaultTime=10 State=UP"
        lines += [
            f"PartitionName=gpu {everywhere} Default=YES PriorityTier=100 PreemptMode=OFF",
            f"PartitionName=cpu {everywhere} PriorityTier=100 PreemptMode=OFF",
            f"PartitionName=single {everywhere.replace('ALL', 'n1')} PriorityTier=100 PreemptMode=OFF",
            f"PartitionName=preempt {everywhere} PriorityTier=1 PreemptMode=REQUEUE GraceTime=0",
            f"PartitionName=graceful {everywhere} PriorityTier=1 PreemptMode=REQUEUE GraceTime={self._grace_s}",
            *self._settings,
        ]
        self._write("slurm.conf", "\n".join([*lines, ""]))
        self._write("gres.conf", "\n".join([*gres, ""]))
        self._write("cgroup.conf", "")  # exists, so that none of the host's is looked for
        self._write("slurmdbd.conf", SLURMDBD_CONF.format(dir=self.dir), 0o600)

    def _boot(self, node: str) -> None:
        ready = self.dir / f"run/ready.{node}"
        ready.unlink(missing_ok=True)
        apart = ["--net", "--uts", "--ipc", "--mount", "--propagation", "slave", "--pid", "--fork", "--kill-child"]
        paths = [str(ready), str(self.dir / "etc/hosts"), str(self.dir / "tmp" / node), *self._visible]
        with (self.dir / f"log/first.{node}.out").open("ab") as out:
            subprocess.Popen(
                [
                    "setpriv",
                    "--pdeathsig",
                    "KILL",
                    "unshare",
                    *apart,
                    "bash",
                    "-c",
                    FIRST_PROCESS,
                    f"first-process-of-{node}",
                    node,
                    *paths,
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd="/",
            )
        wait_for(f"the boot of {node} (see {self.dir}/log/first.{node}.out)", ready.exists)
        self._record(f"first.{node}", int(ready.read_text()))

    def _ip(self, node: str, batch: str) -> None:
        """ip(8) commands in a node's network; only there, so that a pid in them is one of the host's."""
        pid, _ = self._started[f"first.{node}"]
        subprocess.run(["nsenter", "-t", str(pid), "-n", "--", "ip", "-batch", "-"], input=batch, text=True, check=True)

    def _plug_in(self, node: str) -> None:
        pid, _ = self._started[f"first.{node}"]
        self._ip(
            LOGIN,
            f"link add {node} type veth peer name eth0 netns {pid}\nlink set {node} master br0\nlink set {node} up\n",
        )
        self._ip(node, f"addr add {self._address(node)}/24 dev eth0\nlink set eth0 up\n")

    def _start_munge(self) -> None:
        key = self.dir / "etc/munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        paths = {"key-file": key, "socket": "run/munge.sock", "pid-file": "run/munged.pid", "seed-file": "run/seed"}
        options = [f"--{name}={self.dir / path}" for name, path in paths.items()]
        self._daemon(
            LOGIN, "munged", "munged", "--foreground", "--force", *options, f"--log-file={self.dir}/log/munged.log"
        )
        wait_for("munged's socket", (self.dir / "run/munge.sock").exists)

    def _start_accounting(self) -> None:
        """MariaDB in the login node's own memory, its system tables only (a fifth of mariadb-install-db's time)."""
        data, log = "/dev/shm/mysql", self.dir / "log/mariadbd.log"
        self.call("mkdir", "-p", f"{data}/mysql")
        tables = Path("/usr/share/mysql/mysql_system_tables.sql").read_text(encoding="utf-8")
        setup = f"CREATE DATABASE IF NOT EXISTS mysql;\nUSE mysql;\n{tables}\n"
        made = self.run(*MARIADB, f"--datadir={data}", "--bootstrap", "--skip-networking", stdin=setup)
        assert made.returncode == 0, made.stderr
        self._write("users.sql", MARIADB_USER)
        self._daemon(
            LOGIN,
            "mariadbd",
            *MARIADB,
            f"--datadir={data}",
            "--bind-address=127.0.0.1",
            f"--socket={self.dir}/run/mysql.sock",
            f"--pid-file={self.dir}/run/mariadbd.pid",
            f"--init-file={self.dir}/etc/users.sql",
            f"--log-error={log}",
        )
        # slurmdbd tries a database that is not ready again only after 5 s.
        wait_for("MariaDB", lambda: log.exists() and "ready for connections" in log.read_text(encoding="utf-8"))
        self._daemon(LOGIN, "slurmdbd", "slurmdbd", "-D")
        wait_for(
            "slurmdbd", lambda: self.run("sacctmgr", "-i", "add", "cluster", "testbed").returncode == 0, poll_s=0.2
        )

    def _start_slurmd(self, node: str) -> None:
        self._daemon(node, f"slurmd.{node}", "slurmd", "-D", "-N", node)

    def _wait_until_idle(self, nodes: Sequence[str]) -> None:
        def idle() -> bool:
            lines = self.run("sinfo", "-hN", "-o", "%N %T", "-n", ",".join(nodes)).stdout.splitlines()
            return {line.split()[0] for line in lines if line.split()[1] == "idle"} == set(nodes)

        wait_for("all nodes to be idle", idle, poll_s=0.1)
