"""``areal-hpc logs RUN``: the logs of a run's newest attempt, and what its batch script printed; followed as they grow.

Each part has a heading with the name of its process, as ``tail`` writes it for several files. Files are found by
listing and opened anew at each look, so that what other nodes write is seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from areal_hpc.errors import ConfigError
from areal_hpc.fs import names_in
from areal_hpc.liveness.job import batch_log, jobs_of
from areal_hpc.liveness.stopping import state_of
from areal_hpc.run_dir import RunDir

LAUNCHER = "launcher"
"""The name under which the batch script's output is shown; started by hand, a launcher writes to its terminal."""
POLL_S = 0.5
BLOCK = 1 << 16


def log_files(run: RunDir, role: str = "", rank: int | None = None) -> dict[str, Path]:
    """Name of a process to its log: of all, of one role, or of one process of it.

    Raises:
        ConfigError: there is none of that name; says which there are.
    """
    found: dict[str, Path] = {}
    jobs, attempt = jobs_of(run), run.newest_attempt()
    if jobs and (log := batch_log(run, jobs[-1])).is_file():
        found[LAUNCHER] = log
    if attempt is not None and attempt.logs.is_dir():
        found |= {name.removesuffix(".log"): attempt.logs / name for name in sorted(names_in(attempt.logs))}
    wanted = {name: path for name, path in found.items() if not role or _is_of(name, role, rank)}
    if role and not wanted:
        asked = role if rank is None else f"{role}-{rank}"
        raise ConfigError(f"{run.root} has no log of {asked}; there are: {', '.join(found) or 'none yet'}")
    return wanted


def _is_of(name: str, role: str, rank: int | None) -> bool:
    return (name == role or name.rpartition("-")[0] == role) if rank is None else name == f"{role}-{rank}"


def show_logs(
    run: RunDir,
    role: str = "",
    rank: int | None = None,
    *,
    lines: int,
    follow: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """What ``areal-hpc logs`` prints, a line at a time; following ends with the run, and goes on over its attempts.

    Args:
        lines: of the end of each file that is there already; 0 is all.

    Raises:
        ConfigError: see ``log_files``; not while following, when what is asked for may still come.
    """
    tail = _Tail(lines)
    if not follow and not log_files(run, role, rank):
        yield f"{run.root} has no logs yet"
    while True:
        over = not follow or _is_over(run)  # asked first, so that the last words are still read
        yield from tail.news(_files_so_far(run, role, rank) if follow else log_files(run, role, rank))
        if over:
            return
        tail.lines = 0
        sleep(POLL_S)


def _files_so_far(run: RunDir, role: str, rank: int | None) -> dict[str, Path]:
    return {name: path for name, path in log_files(run).items() if not role or _is_of(name, role, rank)}


def _is_over(run: RunDir) -> bool:
    """Whether nothing more will come: a stopped run's job may go on with it."""
    attempt = run.newest_attempt()
    if attempt is None:
        return False
    state, owner = state_of(run, attempt.epoch)
    if state == "stopped":
        return not jobs_of(run)
    return state in ("finished", "failed", "aborted") or owner.is_gone()


@dataclass(slots=True)
class _Tail:
    """Reads on, in every file, from where it stopped."""

    lines: int
    _offsets: dict[Path, int] = field(default_factory=dict)
    _last: Path | None = None

    def news(self, files: dict[str, Path]) -> Iterator[str]:
        for name, path in files.items():
            added = self._added(path)
            if added and path != self._last:
                yield f"==> {name} ({path}) <=="
                self._last = path
            yield from added

    def _added(self, path: Path) -> Sequence[str]:
        """Whole lines: the rest of one that is being written comes with the next look."""
        with path.open("rb") as file:
            start = self._offsets[path] if path in self._offsets else _start_of_last(file, self.lines)
            file.seek(start)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = start + len(data)
        return [line.decode(errors="replace") for line in data.split(b"\n")[:-1]]


def _start_of_last(file: BinaryIO, lines: int) -> int:
    """Where the last ``lines`` whole lines of a file begin, read from its end."""
    position = file.seek(0, 2)
    if not lines:
        return 0
    data = b""
    while position > 0 and data.count(b"\n") <= lines:
        step = min(BLOCK, position)
        position -= step
        file.seek(position)
        data = file.read(step) + data
    parts = data.split(b"\n")
    return position + sum(len(part) + 1 for part in parts[: max(0, len(parts) - 1 - lines)])
