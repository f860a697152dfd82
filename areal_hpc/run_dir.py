"""Where everything of a run lies: ``RunDir``, and ``AttemptDir`` for one start of it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from areal_hpc.errors import RunDirError
from areal_hpc.fs import make_private_directory, names_in
from areal_hpc.privacy import check_mode, make_root

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
OF_STEPS = re.compile(r"steps?-\d{8}.*\.e\d{8}")
"""How the names of checkpoints and of archived steps begin."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """Where everything of one run lies. Every path of the system comes from here.

    config.yaml                      the resolved configuration
    secrets/token agent-key          what every socket of the run asks for; what an agent in daily use brings
    attempts/00000001/               one start of the run: endpoints/ heartbeats/ logs/ stacks/ telemetry/
                                     state.json mount.json, stall.txt where somebody got stuck,
                                     job.json in a Slurm job, seats/ of engines that joined,
                                     alone.json while there are none, launches/ of engines that span several nodes,
                                     given_up/ of those that took no weights, signing.so
                                     where sockets are signed
    journal/e00000001.log            what each optimizer step of an attempt trained on (journal.py)
    ring/                            the rollout ring (epochs/ reg/ chains/ CONTROL.json)
    checkpoints/step-00000020.e00000001/
    evaluations/step-00000020.json   results
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
        lacks = "" if run.config.is_file() else "config.yaml"
        if waiting and run.slurm.is_dir():
            return run
        # Many a project has a config.yaml and checkpoints; a copy of a run may hold no more than one of these rooms.
        if not lacks and not (run.attempts.is_dir() or _has_own(run.checkpoints) or _has_own(run.archive)):
            lacks = "attempts, and no checkpoints of one"
        if lacks:
            raise RunDirError(f"{run.root} is not a run directory (no {lacks}); give the one that `run` printed")
        return run

    @property
    def typed(self) -> str:
        """The path as a person types it, for a command that a message proposes."""
        return shlex.quote(str(self.root))

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
    def signing(self) -> Path:
        """What ``submit`` made to sign sockets, for nodes that have no compiler (signing.py)."""
        return self.slurm / "signing.so"

    @property
    def satellites(self) -> Path:
        """Jobs of engines: the output of those that were submitted with the run, who came in their place, who has
        joined, and who rests."""
        return self.slurm / "satellites"

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

    def in_checkpoints(self) -> list[str]:
        """What is in ``checkpoints/``, listed anew.

        Raises:
            RunDirError: it is gone.
        """
        try:
            return names_in(self.checkpoints)
        except FileNotFoundError as error:
            raise RunDirError(
                f"{self.checkpoints} is gone; put it back, or restore it from a copy, and go on with --resume"
            ) from error

    def all_attempts(self) -> list[AttemptDir]:
        """Every attempt, oldest first, by listing; a copy of a run may have none."""
        names = names_in(self.attempts) if self.attempts.is_dir() else []
        epochs = sorted(int(name) for name in names if re.fullmatch(r"\d{8}", name))
        return [self.attempt(epoch) for epoch in epochs]

    def newest_attempt(self) -> AttemptDir | None:
        """The attempt with the highest epoch; None before the first."""
        attempts = self.all_attempts()
        return attempts[-1] if attempts else None


def _has_own(directory: Path) -> bool:
    """Whether what a run has made of its steps is in a directory that may be another program's."""
    return directory.is_dir() and any(OF_STEPS.match(name) for name in names_in(directory))


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """Where everything of one start of a run lies."""

    root: Path

    def create(self) -> AttemptDir:
        for name in ("", "endpoints", "given_up", "heartbeats", "launches", "logs", "seats", "stacks", "telemetry"):
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
    def alone(self) -> Path:
        """That the attempt has no engine, and where satellites are; there as long as that lasts (liveness/alone.py)."""
        return self.root / "alone.json"

    @property
    def mount(self) -> Path:
        """What the file system was found to offer when the attempt began."""
        return self.root / "mount.json"

    @property
    def signing(self) -> Path:
        """What signs sockets in the attempt's processes; there if they are to (signing.py)."""
        return self.root / "signing.so"

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
