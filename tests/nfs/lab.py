"""Two genuine NFS clients and a server on one Linux host, for as long as a block.

    with Lab(directory) as lab:
        a, b = lab.client("a", "4.1"), lab.client("b", "4.1")
        command = a.run([sys.executable, "-c", "open('/mnt/nfs/x', 'w')"])
        command.wait(10.0)

A client is a virtual machine with Debian's own kernel, since caches are the kernel's: attributes, names and pages as
old as NFS allows. The host's root is its root file system, read-only, so that it has the same Python and checkout. The
server is nfs-ganesha. Server and machines have a network of their own, in which their ports are fixed and nobody else
is. Needs root and the Debian packages of ``packages.txt``; the machines are emulated, about ten times slower than the
host, and need no KVM.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PACKAGES = (HERE / "packages.txt").read_text(encoding="utf-8").split()
MODULES = (
    "virtio_pci",
    "virtio_net",
    "virtio_console",
    "virtio_rng",
    "9p",
    "9pnet_virtio",
    "overlay",
    "nfsv3",
    "nfsv4",
)
TIED = ("setpriv", "--pdeathsig", "KILL")
"""Who kills the laboratory's process ends the laboratory."""
BOOT_S = 240.0
SERVER_S = 60.0
ORDER_S = 60.0

INIT = r"""#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc; $b mount -t sysfs sys /sys; $b mount -t devtmpfs dev /dev
for module in $($b cat /modules); do $b insmod /module/$module; done
$b mkdir -p /lower /over /new
$b mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144 host /lower
$b mount -t tmpfs tmpfs /over; $b mkdir /over/upper /over/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/over/upper,workdir=/over/work root /new
for each in proc sys dev; do $b mount --move /$each /new/$each; done
$b mount -t tmpfs tmpfs /new/run
word() { $b sed -n "s/.*lab.$1=\([^ ]*\).*/\1/p" /new/proc/cmdline; }
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
$b chroot /new $(word python) -B $(word guest) $(word name) $(word version)
$b poweroff -f
"""

GANESHA = """\
NFS_CORE_PARAM {{ Protocols = 3, 4; Enable_NLM = false; Enable_RQUOTA = false;
                  Enable_UDP = false; mount_path_pseudo = true; }}
NFSv4 {{ Grace_Period = 5; Lease_Lifetime = 10; Graceless = true; RecoveryBackend = fs;
         RecoveryRoot = {directory}/recovery;
         Minor_Versions = 1, 2; }}
EXPORT {{ Export_Id = 1; Path = {directory}/export; Pseudo = /x; Access_Type = RW; Squash = No_Root_Squash;
          SecType = sys; Protocols = 3, 4; Transports = TCP; FSAL {{ Name = VFS; }} }}
"""


class Command:
    """One that runs on a client."""

    def __init__(self, client: Client, number: int) -> None:
        self._client, self._number = client, number
        self.lines: list[str] = []
        self.returned: int | None = None
        self.over = threading.Event()

    def wait(self, limit_s: float) -> list[str]:
        """What it has said, once it has ended well.

        Raises:
            RuntimeError: it failed, or did not end in time.
        """
        if not self.over.wait(limit_s) or self.returned != 0:
            state = "still runs" if self.returned is None else f"exit code {self.returned}"
            raise RuntimeError(f"a command on {self._client.name}: {state}\n" + "\n".join(self.lines[-15:]))
        return self.lines

    def kill(self) -> None:
        self._client.order(do="kill", id=self._number)


class Client:
    """A machine that has mounted the server at ``/mnt/nfs``."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], port: socket.socket, console: Path) -> None:
        self.name, self.console, self._process, self._port = name, console, process, port
        self._reader = port.makefile("rb")
        self._commands: dict[int, Command] = {}
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._next = 0
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with suppress(ConnectionResetError):
            self._hear()
        self._answers.put({"gone": True})

    def _hear(self) -> None:
        for line in self._reader:
            message = json.loads(line)
            command = self._commands.get(message.get("id", -1))
            if command is None:
                self._answers.put(message)
            elif "line" in message:
                command.lines.append(message["line"])
            else:
                command.returned = message["rc"]
                command.over.set()

    def order(self, **what: Any) -> None:
        self._port.sendall(json.dumps(what).encode() + b"\n")

    def answer(self, limit_s: float = ORDER_S) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=limit_s)
        except queue.Empty:
            raise RuntimeError(f"client {self.name} has said nothing for {limit_s:g} s") from None
        if "gone" in answer:
            raise RuntimeError(f"machine {self.name} has ended; see its console in {self.console}")
        return answer

    def run(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Command:
        self._next += 1
        command = self._commands[self._next] = Command(self, self._next)
        self.order(do="run", id=self._next, argv=list(argv), env=dict(env or {}))
        return command

    def rpcs(self) -> dict[str, int]:
        """How often it has asked the server for what."""
        self.order(do="rpcs", id=0)
        answer: dict[str, int] = self.answer()["rpcs"]
        return answer

    def clock_offset_s(self, times: int = 50) -> float:
        """What is to be added to its clock to have the host's: the best of ``times`` exchanges."""
        best = (1e9, 0.0)
        for _ in range(times):
            asked = time.time()
            self.order(do="clock", id=0)
            told, got = self.answer()["clock"], time.time()
            best = min(best, (got - asked, (asked + got) / 2 - told))
        return best[1]

    def power_off(self) -> None:
        """As if its plug were pulled: what it had not written to the server is lost."""
        self._process.kill()
        self._process.wait()
        self._port.close()


class Lab(AbstractContextManager["Lab"]):
    """The server in a network of its own; ``client`` adds machines. ``directory`` keeps the kernel and the logs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.export = self.directory / "export"
        self._stack = ExitStack()
        self._machines: list[Client] = []

    def __enter__(self) -> Lab:
        with ExitStack() as undo:
            self.export.mkdir(parents=True, exist_ok=True)
            (self.directory / "recovery").mkdir(exist_ok=True)
            self.kernel, self.modules = _kernel(self.directory)
            _initramfs(self.directory, self.kernel, self.modules)
            self._network = undo.enter_context(_network())
            undo.enter_context(self._started("rpcbind", ["rpcbind", "-f", "-w"]))
            undo.callback(self.stop_server)
            self.start_server()
            undo.callback(self._power_off_all)
            self._stack = undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def start_server(self) -> None:
        """Start the server, also again, and wait until it answers."""
        path = self.directory / "ganesha.conf"
        path.write_text(GANESHA.format(directory=self.directory), encoding="utf-8")
        log, pid = self.directory / "ganesha.log", self.directory / "ganesha.pid"
        argv = ["ganesha.nfsd", "-F", "-f", str(path), "-L", str(log), "-p", str(pid), "-N", "NIV_WARN"]
        self._server = self._spawn("ganesha.out", argv)
        deadline = time.monotonic() + SERVER_S
        ask = self._inside(["rpcinfo", "-t", "127.0.0.1", "nfs", "4"])
        while subprocess.run(ask, capture_output=True, check=False).returncode:
            if self._server.poll() is not None or time.monotonic() > deadline:
                last = log.read_text(encoding="utf-8").splitlines()[-5:] if log.exists() else []
                raise RuntimeError("the NFS server does not answer; its last lines:\n" + "\n".join(last))
            time.sleep(0.2)

    def stop_server(self) -> None:
        """Kill the server; its files stay, and clients wait for it."""
        self._server.kill()
        self._server.wait()

    def client(self, name: str, version: str) -> Client:
        """Boot one. ``version``: of NFS, 3 or 4.1. Names must differ: NFSv4 takes equal host names for one client."""
        path = self.directory / f"{name}.port"
        path.unlink(missing_ok=True)
        process = self._spawn(f"{name}.console", self._machine(name, version, path))
        deadline = time.monotonic() + BOOT_S
        while not path.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"machine {name} did not start; see {self.directory}/{name}.console")
            time.sleep(0.05)
        port = socket.socket(socket.AF_UNIX)
        port.connect(str(path))
        made = Client(name, process, port, self.directory / f"{name}.console")
        self._machines.append(made)
        made.answer(BOOT_S)
        return made

    def _machine(self, name: str, version: str, port: Path) -> list[str]:
        words = {"python": sys.executable, "guest": HERE / "guest.py", "name": name, "version": version}
        told = " ".join(f"lab.{key}={value}" for key, value in words.items())
        return [
            *("qemu-system-x86_64", "-machine", "q35", "-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", "1024"),
            *("-nographic", "-no-reboot", "-kernel", str(self.kernel), "-initrd", str(self.directory / "initrd.gz")),
            *("-append", f"console=ttyS0 quiet panic=-1 net.ifnames=0 {told}"),
            *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"),
            *("-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net", "-device", "virtio-rng-pci"),
            *("-chardev", f"socket,id=lab,path={port},server=on,wait=off", "-device", "virtio-serial-pci"),
            *("-device", "virtserialport,chardev=lab,name=lab"),
        ]

    def _inside(self, argv: Sequence[str]) -> list[str]:
        return [*TIED, "nsenter", "--target", str(self._network), "--net", "--mount", "--", *argv]

    def _spawn(self, log: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.directory / log).open("wb") as file:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            return subprocess.Popen(self._inside(argv), **pipes)

    @contextmanager
    def _started(self, name: str, argv: Sequence[str]) -> Iterator[None]:
        process = self._spawn(f"{name}.out", argv)
        try:
            yield
        finally:
            process.kill()
            process.wait()

    def _power_off_all(self) -> None:
        for machine in self._machines:
            machine.power_off()


@contextmanager
def _network() -> Iterator[int]:
    """Pid of a process whose network nobody shares, with a loopback; its /run is its own as well."""
    script = (
        "mount -t tmpfs tmpfs /run; mkdir -p /run/rpcbind /run/ganesha; ip link set lo up; echo; exec sleep infinity"
    )
    process = subprocess.Popen([*TIED, "unshare", "--net", "--mount", "sh", "-c", script], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _kernel(directory: Path) -> tuple[Path, Path]:
    """Debian's kernel and its modules, unpacked here and not installed."""
    root = directory / "root"
    if not root.exists():
        depends = subprocess.run(
            ["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True, check=True
        )
        package = next(line.split()[-1] for line in depends.stdout.splitlines() if "Depends: linux-image" in line)
        subprocess.run(["apt-get", "-qq", "download", package], cwd=directory, check=True)
        subprocess.run(["dpkg", "-x", next(directory.glob(f"{package}_*.deb")), "unpacked"], cwd=directory, check=True)
        (directory / "unpacked").rename(root)
    kernel = next((root / "boot").glob("vmlinuz-*"))
    version = kernel.name.removeprefix("vmlinuz-")
    subprocess.run(["depmod", "-b", root, version], check=True)
    return kernel, root / "lib" / "modules" / version


def _initramfs(directory: Path, kernel: Path, modules: Path) -> None:
    """What the machine runs first: it loads modules, mounts the host's root, and starts ``guest.py``."""
    tree = directory / "initramfs"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("bin", "proc", "sys", "dev", "module"):
        (tree / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None, "busybox-static is not installed"
    shutil.copy(busybox, tree / "bin" / "busybox")
    version = kernel.name.removeprefix("vmlinuz-")
    names: list[str] = []
    for module in MODULES:
        words = ["modprobe", "--dirname", directory / "root", "--set-version", version, "--show-depends", module]
        shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        for line in shown.splitlines():
            path = Path(line.removeprefix("insmod ").strip())
            if line.startswith("insmod") and path.name not in names:
                shutil.copy(path, tree / "module" / path.name)
                names.append(path.name)
    (tree / "modules").write_text("\n".join(names) + "\n", encoding="utf-8")
    (tree / "init").write_text(INIT, encoding="utf-8")
    (tree / "init").chmod(0o755)
    pack = "find . | cpio -o -H newc --quiet | gzip -1 > ../initrd.gz"
    subprocess.run(["sh", "-c", pack], cwd=tree, check=True)


def missing() -> str | None:
    """Why there can be no laboratory here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    programs = ("qemu-system-x86_64", "ganesha.nfsd", "mount.nfs", "rpcbind", "busybox", "depmod", "cpio")
    absent = [
        program for program in programs if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None
    ]
    return f"needs {', '.join(absent)}: install the packages of tests/nfs/packages.txt" if absent else None
