"""Files that other processes read: published whole, found by listing, laid out by ``RunDir``.

What a shared file system really promises (close-to-open consistency, cached negative lookups, atomic rename) is worked
out here once: publish by temporary file, fsync, rename, fsync of the directory; create exclusively by link; wait by
listing the directory, never by asking for a name that may not exist yet (NFS caches the "no" for up to a minute).
A name is durable once its directory has been synced, so whoever makes a directory here syncs its parent, too.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from areal_hpc.errors import RunDirError, WaitTimeout
from areal_hpc.patience import naming, opened_status, rename, retried
from areal_hpc.privacy import check_mode, make_inside, make_root, open_private
from areal_hpc.waits import FILE_SYSTEM, waiting

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
TEMPORARY_NAME = re.compile(r"\.(.+)\.\d+\.[0-9a-f]{8}\.tmp")


def fsync_directory(path: Path) -> None:
    """Make names created in or removed from ``path`` survive a power cut."""
    with naming(path):
        fd = retried(lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY))
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def _temporary(path: Path, data: bytes, *, secret: bool) -> Iterator[Path]:
    """A private, durable file with ``data`` beside ``path``, for the block to rename or remove; gone if that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    fd = open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, secret=secret)
    try:
        _write_durably(fd, path, data)
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_durably(fd: int, path: Path, data: bytes) -> None:
    with naming(path), os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def publish(path: Path, data: bytes, *, secret: bool = False) -> None:
    """Replace ``path`` by ``data`` so that every reader sees the old or the new bytes, never a mixture.

    A ``secret`` is nobody's but the caller's, also in a group's run directory.

    Raises:
        OSError: the file system refused; ``path`` is unchanged and nothing is left behind.
    """
    with waiting(f"writing {path}", FILE_SYSTEM, limit_s=None):
        with _temporary(path, data, secret=secret) as temporary:
            rename(temporary, path)
        fsync_directory(path.parent)


def publish_json(path: Path, value: Any) -> None:
    """``publish`` of one JSON document."""
    publish(path, json.dumps(value, indent=1, sort_keys=True).encode())


def create_exclusive(path: Path, data: bytes) -> bool:
    """Create ``path`` with ``data`` if nobody has it: exactly one of many callers on any host gets True.

    link(2) makes the file appear complete; where hard links are refused, O_EXCL does (a reader may see it empty first,
    and a crash may leave it so). A server may answer "exists" to a repeated request of ours: a second link says so.
    """
    with waiting(f"writing {path}", FILE_SYSTEM, limit_s=None):
        with _temporary(path, data, secret=False) as temporary:
            made = _link(temporary, path)
            temporary.unlink(missing_ok=True)
        if made is None:
            return _create_by_open(path, data)
        if made:
            fsync_directory(path.parent)
        return made


def _link(temporary: Path, path: Path) -> bool | None:
    """Whether ``path`` is now a second name of ``temporary``; None where there are no hard links."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return opened_status(temporary).st_nlink > 1
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        return None
    return True


def _create_by_open(path: Path, data: bytes) -> bool:
    try:
        fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return False
    _write_durably(fd, path, data)
    fsync_directory(path.parent)
    return True


def sweep_temporaries(directory: Path, *, before: str = "~") -> None:
    """Remove what killed processes left of files, of names that sort before ``before``, that they were publishing in
    ``directory``. Nobody who lives may be publishing one of these: his would go as well."""
    for name in names_in(directory):
        if (match := TEMPORARY_NAME.fullmatch(name)) and match[1] < before:
            (directory / name).unlink(missing_ok=True)


def names_in(directory: Path) -> list[str]:
    """What is in ``directory``, listed anew."""
    with waiting(f"listing {directory}", FILE_SYSTEM, limit_s=None):
        return retried(lambda: os.listdir(directory))


def read_json(path: Path) -> Any:
    """The JSON document at ``path``, opened anew: that is what revalidates on a network file system."""
    return json.loads(_read(path))


def _read(path: Path) -> bytes:
    with waiting(f"reading {path}", FILE_SYSTEM, limit_s=None), naming(path):
        return retried(path.read_bytes)


def read_if_listed(path: Path) -> Any | None:
    """The JSON document at ``path``, or None while its directory does not list it or it is empty (no hard links here,
    and whoever made it has not written it yet)."""
    try:
        names = names_in(path.parent)
    except FileNotFoundError:
        return None
    if path.name not in names or not (data := _read(path)):
        return None
    return json.loads(data)


def wait_for(
    what: str, ready: Callable[[], Any], timeout_s: float, poll_s: float = 0.1, *, party: str, hint: str = ""
) -> Any:
    """The first truthy answer of ``ready``, asked every ``poll_s`` seconds; ``party`` is who brings it about.

    Raises:
        WaitTimeout: none came in ``timeout_s`` seconds; the message names ``what`` and carries ``hint``.
    """
    deadline = time.monotonic() + timeout_s
    with waiting(what, party, limit_s=timeout_s):
        while not (answer := ready()):
            if time.monotonic() >= deadline:
                raise WaitTimeout(f"waited {timeout_s:g} s for {what}, which did not come{'; ' + hint if hint else ''}")
            time.sleep(poll_s)
    return answer


def make_private_directory(path: Path, make: Callable[[Path], None] = make_inside) -> Path:
    """``path`` as a directory as private as the one it lies in; parents are made with the caller's umask.

    Its name is durable even if somebody made it who was killed before he could sync it; so are those of new parents.
    """
    for parent in reversed([parent for parent in path.parents if not parent.is_dir()]):
        parent.mkdir(exist_ok=True)
        fsync_directory(parent.parent)
    with suppress(FileExistsError):
        make(path)
    fsync_directory(path.parent)
    return path


@dataclass(frozen=True, slots=True)
class RunDir:
    """Where everything of one run lies. Every path of the system comes from here.

    config.yaml                      the resolved configuration
    secrets/token agent-key          what every socket of the run asks for; what an agent in daily use brings
    attempts/00000001/               one start of the run: endpoints/ heartbeats/ logs/ stacks/ telemetry/
                                     state.json mount.json, stall.txt where somebody got stuck,
                                     job.json in a Slurm job, seats/ of engines that joined
    journal/e00000001.log            what each optimizer step of an attempt trained on (journal.py)
    ring/                            the rollout ring (epochs/ reg/ chains/ CONTROL.json)
    checkpoints/step-00000020.e00000001/
    archive/                         trained groups in HDF5, if they are archived
    weights/                         the disk transport's versions
    model/                           of an evaluation alone: the checkpoint that it is of
    trackers/                        tensorboard/, wandb/
    sessions/                        what became of agents' sessions, the newest ones (proxy/chronicle.py)
    slurm/                           submissions, batch scripts and their output (roles/submission.py)
    summary.json  curves.png  curves.svg
    """

    root: Path

    @classmethod
    def create(cls, root: Path, group: str = "") -> RunDir:
        """The run directory at ``root``, made if it is not there, for its owner alone or for a ``group``.

        Raises:
            RunDirError: the name or the group is not usable, or the directory lies open to other users.
        """
        if not NAME.fullmatch(root.name):
            raise RunDirError(f"run name {root.name!r}: use letters, digits, '.', '_' and '-', at most 100; set `name`")
        run = cls(root.absolute())
        make_private_directory(run.root, partial(make_root, group=group))
        check_mode(run.root, group)
        rooms = (run.secrets, run.attempts, run.journal, run.ring, run.checkpoints, run.weights, run.evaluations)
        for directory in rooms:
            make_private_directory(directory)
        return run

    @classmethod
    def open(cls, root: Path, *, waiting: bool = False) -> RunDir:
        """An existing run directory; with ``waiting`` also that of a run which was submitted and has not started yet.

        Raises:
            RunDirError: ``root`` holds no run.
        """
        run = cls(root.absolute())
        if not run.config.is_file() and not (waiting and run.slurm.is_dir()):
            raise RunDirError(f"{run.root} is not a run directory (no config.yaml); give the one that `run` printed")
        return run

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def ring(self) -> Path:
        return self.root / "ring"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def archive(self) -> Path:
        return self.root / "archive"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations"

    @property
    def token(self) -> Path:
        return self.secrets / "token"

    @property
    def sessions(self) -> Path:
        return self.root / "sessions"

    @property
    def trackers(self) -> Path:
        return self.root / "trackers"

    @property
    def slurm(self) -> Path:
        """Submissions, batch scripts and their output; there once the run was submitted."""
        return self.root / "slurm"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    def evaluation(self, step: int) -> Path:
        return self.evaluations / f"step-{step:08d}.json"

    def evaluated_steps(self) -> set[int]:
        """Optimizer steps whose evaluation has a result."""
        return {int(name[5:13]) for name in names_in(self.evaluations) if re.fullmatch(r"step-\d{8}\.json", name)}

    def curves(self, suffix: str) -> Path:
        return self.root / f"curves.{suffix}"

    def attempt(self, epoch: int) -> AttemptDir:
        return AttemptDir(self.attempts / f"{epoch:08d}")

    def all_attempts(self) -> list[AttemptDir]:
        """Every attempt, oldest first, by listing."""
        epochs = sorted(int(name) for name in names_in(self.attempts) if re.fullmatch(r"\d{8}", name))
        return [self.attempt(epoch) for epoch in epochs]

    def newest_attempt(self) -> AttemptDir | None:
        """The attempt with the highest epoch; None before the first."""
        attempts = self.all_attempts()
        return attempts[-1] if attempts else None


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """Where everything of one start of a run lies."""

    root: Path

    def create(self) -> AttemptDir:
        for name in ("", "endpoints", "heartbeats", "logs", "seats", "stacks", "telemetry"):
            make_private_directory(self.root / name)
        return self

    @property
    def epoch(self) -> int:
        return int(self.root.name)

    @property
    def endpoints(self) -> Path:
        return self.root / "endpoints"

    @property
    def heartbeats(self) -> Path:
        return self.root / "heartbeats"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def stacks(self) -> Path:
        return self.root / "stacks"

    @property
    def stall(self) -> Path:
        return self.root / "stall.txt"

    @property
    def telemetry(self) -> Path:
        return self.root / "telemetry"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def resume_from(self) -> Path:
        return self.root / "resume-from.json"

    @property
    def job(self) -> Path:
        """The Slurm job that the attempt runs in, and its nodes; there for those shapes only."""
        return self.root / "job.json"

    @property
    def mount(self) -> Path:
        """What the file system was found to offer when the attempt began."""
        return self.root / "mount.json"

    @property
    def stop_request(self) -> Path:
        return self.root / "stop"

    def endpoint(self, role: str, index: int) -> Path:
        return self.endpoints / f"{role}-{index}.json"

    def heartbeat(self, role: str, index: int) -> Path:
        return self.heartbeats / f"{role}-{index}.json"

    def log(self, role: str, index: int) -> Path:
        return self.logs / f"{role}-{index}.log"

    def stack(self, role: str, index: int) -> Path:
        return self.stacks / f"{role}-{index}.txt"

    def records(self, role: str, index: int) -> Path:
        return self.telemetry / f"{role}-{index}.jsonl"
