"""How the processes that hold an engine on several nodes start and end it together.

    attempts/N/launches/
      0.3          the fourth process that is generator-0 starts its engine, and says where the ranks of it meet
      0.3.part-2   the process part-2 starts its node's share
      0.3.over     it has ended, or must: the file says why

    generator-0, on the first node          part-2, on another
    ------------------------------          ------------------
    begin           ---- address ---->      newest, join
    starts rank 0's server                  starts its own, which meets it there
    serves while nothing is over            waits while nothing is over
    end             <---------------->      end

Whichever share dies, says so or is found dead, the whole engine is over: the generator's process ends and is replaced
by the launcher, within its limit, and with the next launch every part starts anew. Nobody joins a launch twice, so a
part that was replaced itself ends what its predecessor was in. Each name is made once, and found by listing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.fs import create_exclusive, names_in, read_if_listed
from areal_hpc.run_dir import AttemptDir

NAME = re.compile(r"(\d+)\.(\d+)")
OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of one engine."""

    attempt: AttemptDir
    engine: int
    incarnation: int
    """Incarnation of the generator's process; a later one makes this launch history."""
    address: str
    """Where the engine's ranks meet, "host:port"."""

    @property
    def _path(self) -> Path:
        return _directory(self.attempt) / f"{self.engine}.{self.incarnation}"

    def join(self, part: str) -> bool:
        """Take part in it; False if a process of that name has before."""
        return create_exclusive(self._path.with_name(f"{self._path.name}.{part}"), b"{}")

    def end(self, why: str) -> None:
        """Say that it is over; only the first who says so is heard."""
        create_exclusive(self._over, json.dumps({"why": why}).encode())

    def why_over(self) -> str:
        """Why it is over; empty while it is not."""
        names = names_in(self._path.parent)
        if self._over.name in names:
            return str((read_if_listed(self._over) or {"why": "a share of it has ended"})["why"])
        later = max(_incarnations(names, self.engine), default=0) > self.incarnation
        return f"generator-{self.engine} has been started again" if later else ""

    @property
    def _over(self) -> Path:
        return self._path.with_name(f"{self._path.name}.{OVER}")


def begin(attempt: AttemptDir, engine: int, incarnation: int, address: str) -> Launch:
    """Start the engine ``engine`` as the generator's process of that ``incarnation``."""
    launch = Launch(attempt=attempt, engine=engine, incarnation=incarnation, address=address)
    made = create_exclusive(launch._path, json.dumps({"address": address}).encode())
    assert made, f"{launch._path} is there already"
    return launch


def newest(attempt: AttemptDir, engine: int) -> Launch | None:
    """The last launch of an engine; None before the first."""
    if not (incarnations := _incarnations(names_in(_directory(attempt)), engine)):
        return None
    told = read_if_listed(_directory(attempt) / f"{engine}.{max(incarnations)}")
    if told is None:  # made a moment ago, where there are no hard links
        return None
    return Launch(attempt=attempt, engine=engine, incarnation=max(incarnations), address=told["address"])


def _incarnations(names: Iterable[str], engine: int) -> list[int]:
    """The launches of an engine, by what its directory lists."""
    found = (NAME.fullmatch(name) for name in names)
    return [int(match[2]) for match in found if match and int(match[1]) == engine]


def _directory(attempt: AttemptDir) -> Path:
    return attempt.root / "launches"
