"""Signs of life: every role counts in a file, and whoever reads it judges by its own clock.

    role process (a thread)                              launcher, status
    -----------------------                              ----------------
    every BEAT_S: heartbeats/<role>-<index>.json         pulse.see(read_heartbeat(attempt, "<role>-<index>"))
        {pid ..., incarnation, counter, ended,           pulse.silent_s(): since the file last said something new
         waits, achieved}

A counter in the content, never the file's time: attributes are cached for minutes on a network file system, and clocks
of two hosts differ. The thread shows that the process runs, not that it gets anywhere: that is what the rest is for.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from areal_hpc.buffer.control import read_replaced
from areal_hpc.cluster.owner import Owner
from areal_hpc.fs import names_in, publish_json
from areal_hpc.run_dir import AttemptDir
from areal_hpc.waits import published

log = logging.getLogger(__name__)

HEARTBEAT_NAME = re.compile(r"([a-z]+-\d+)\.json")
BEAT_S = 2.0
LOOK_S = 0.1
SILENT_S = 6.0
"""A process that has not beaten for so long is called silent: three beats."""
LAST_BEAT_S = 5.0
"""How long a process that ends waits for its last beat, on a file system that does not answer."""


@contextmanager
def beating(
    attempt: AttemptDir,
    role: str,
    index: int,
    incarnation: int,
    *,
    beat_s: float = BEAT_S,
    state: Callable[[], Mapping[str, Any]] = published,
) -> Iterator[None]:
    """Publish this process's heartbeat while inside; the last one says that the process has ended by itself.

    Args:
        state: what the process waits for at the moment, and what it has achieved, as JSON data.
    """
    stop = threading.Event()
    path = attempt.heartbeat(role, index)
    owner = Owner.this_process().record()

    def beat() -> None:
        counter, failing, ended = 0, False, False
        while not ended:
            ended = stop.wait(beat_s if counter else 0.0)
            counter += 1
            try:
                publish_json(
                    path,
                    {
                        **owner,
                        "incarnation": incarnation,
                        "counter": counter,
                        "ended": ended,
                        **state(),
                    },
                    durable=False,  # it says that the process lives, which no power cut leaves true
                )
                failing = False
            except OSError as error:  # a full disk must not end a run that could go on without this
                if not failing:
                    log.warning("%s: %s; nobody sees this process live until that is mended", path, error)
                failing = True

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(LAST_BEAT_S)


def read_heartbeat(attempt: AttemptDir, name: str) -> dict[str, Any] | None:
    """The newest heartbeat of process ``name`` (trainer-0); None while there is none, or it is stale for an instant."""
    return read_heartbeats(attempt, [name])[name]


def read_heartbeats(attempt: AttemptDir, names: Iterable[str] | None = None) -> dict[str, dict[str, Any] | None]:
    """The newest heartbeats of many processes, or of all that have left one, which are listed once and not once for
    each: a run has hundreds."""
    listed = {match[1] for file_name in names_in(attempt.heartbeats) if (match := HEARTBEAT_NAME.fullmatch(file_name))}
    return {
        name: read_replaced(attempt.heartbeats / f"{name}.json") if name in listed else None
        for name in (sorted(listed) if names is None else names)
    }


class Pulse:
    """Whether one process lives, from what its heartbeat said at each look. Nothing is compared but with itself."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: tuple[int, int] | None = None  # incarnation, counter
        self._changed = clock()
        self.ended = False
        self.moved = False
        """Whether two looks have differed: for certain it lived between them."""

    def see(self, beat: dict[str, Any] | None) -> None:
        """Take in what the file says now."""
        now = None if beat is None else (int(beat["incarnation"]), int(beat["counter"]))
        if beat is not None and now != self._seen:
            self.moved = self._seen is not None
            self._seen, self._changed = now, self._clock()
            self.ended = bool(beat["ended"])

    def silent_s(self) -> float:
        """Seconds, by the reader's clock, since the heartbeat last changed or since the first look."""
        return self._clock() - self._changed


def watch_pulses(
    attempt: AttemptDir,
    *,
    limit_s: float = SILENT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> dict[str, str]:
    """Every process of an attempt as "alive", "ended" or "silent"; looks until all have moved, ``limit_s`` at most."""
    began = clock()
    pulses: dict[str, Pulse] = {}
    while True:
        for name, beat in read_heartbeats(attempt).items():
            pulses.setdefault(name, Pulse(clock)).see(beat)
        if all(pulse.moved or pulse.ended for pulse in pulses.values()) or clock() - began >= limit_s:
            break
        sleep(LOOK_S)
    return {name: "ended" if p.ended else "alive" if p.moved else "silent" for name, p in pulses.items()}
