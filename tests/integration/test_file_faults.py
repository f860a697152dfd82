"""A whole run on a disk or server that fails: it recovers, or says clearly where; it never trains on a wrong batch.

Faults are injected under the file calls of ring and checkpoints. What a run may do about one is either to go on as if
nothing had happened, or to end the attempt with an error that names the path, so that the next attempt goes on.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from faults.mounted import mounted
from faults.nfs import NfsVolume
from faults.scenario import Trial, Violation, without_threads
from faults.volume import Call, Intercept, Volume, failure

from areal_hpc.errors import RunDirError

ROOT = Path("/volume")
ATTEMPTS = 100
WRITES = {"write", "pwrite", "create", "mkdir"}
SYNCS = {"fsync", "fdatasync", "close"}
READS = {"open", "pread", "listdir"}


class Faulty:
    """Fails calls named in ``calls`` with ``number``, now and then, until ``limit`` have failed."""

    def __init__(
        self, calls: set[str], number: int, chance: float = 0.1, limit: int = 60, under: str = "/run/"
    ) -> None:
        self.calls, self.number, self.chance, self.limit, self.under = calls, number, chance, limit, under
        self.injected, self._rng = 0, Random(number)

    def __call__(self, call: Call, do: Callable[..., Any]) -> Any:
        if call.name not in self.calls or self.under not in call.path or not self._now():
            return do()
        if call.name == "close":
            do()
        raise OSError(self.number, "injected") if call.name in SYNCS | {"pread"} else failure(self.number, call.path)

    def _now(self) -> bool:
        now = self.injected < self.limit and self._rng.random() < self.chance
        self.injected += now
        return now


class LostAnswer:
    """Carries ``name`` out and then says that it could not: the answer of a server was lost, its repetition failed."""

    def __init__(self, name: str, number: int, chance: float = 0.5) -> None:
        self.name, self.number, self.chance = name, number, chance
        self.injected, self._rng = 0, Random(name)

    def __call__(self, call: Call, do: Callable[..., Any]) -> Any:
        answer = do()
        if call.name == self.name and "/run/" in call.path and self._rng.random() < self.chance:
            self.injected += 1
            raise failure(self.number, call.path)
        return answer


def run_to_the_end(intercept: Intercept) -> int:
    """How many attempts the run took; an attempt may end with an error that names a path of the run."""
    volume = Volume(ROOT)
    volume.intercept = intercept
    with mounted(volume), without_threads():
        trial = Trial(ROOT, tidy=False)
        for attempt in range(1, ATTEMPTS):
            try:
                trial.attempt()
            except (OSError, RunDirError) as error:
                assert f"{ROOT}/run" in str(error), error
            else:
                return attempt
    raise Violation(f"{ATTEMPTS} attempts did not bring the run to its end")


@pytest.mark.parametrize(
    ("calls", "number"),
    [
        (WRITES, errno.ENOSPC),
        (WRITES, errno.EDQUOT),
        (SYNCS, errno.EDQUOT),
        (SYNCS, errno.ENOSPC),
        (SYNCS, errno.EIO),
        (READS, errno.EIO),
        (READS, errno.ESTALE),
        ({"rename", "replace", "link"}, errno.EIO),
        ({"unlink", "rmdir"}, errno.EBUSY),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "+".join(sorted(value)),
)
def test_errors_that_pass_are_survived(calls: set[str], number: int) -> None:
    fault = Faulty(calls, number, chance=0.1 if calls & (READS | WRITES | SYNCS) else 0.4)
    assert run_to_the_end(fault) < ATTEMPTS
    assert fault.injected >= 5


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_one_bad_read_of_the_ring_in_a_hundred_does_not_even_end_an_attempt(number: int) -> None:
    fault = Faulty(READS, number, chance=0.01, limit=10**6, under="/ring/")
    assert run_to_the_end(fault) == 1
    assert fault.injected >= 5


@pytest.mark.parametrize("calls", [{"pwrite"}, {"fdatasync", "close"}], ids=["at writes", "at sync and close"])
def test_groups_wait_in_memory_while_the_disk_is_full(calls: set[str]) -> None:
    """Attempts may end where a chain is begun or closed, which cannot wait; nothing is lost by that."""
    fault = Faulty(calls, errno.ENOSPC, chance=0.4, under=".seg")
    assert run_to_the_end(fault) < ATTEMPTS
    assert fault.injected > 30


def test_the_trainer_goes_on_while_control_cannot_be_published() -> None:
    fault = Faulty(WRITES | SYNCS, errno.ENOSPC, chance=0.3, limit=10**6, under="ring/.CONTROL")
    assert run_to_the_end(fault) == 1
    assert fault.injected > 10


def test_short_writes_are_completed() -> None:
    shortened = 0

    def short(call: Call, do: Callable[..., Any]) -> Any:
        nonlocal shortened
        if len(call.data) > 1:
            shortened += 1
            return do(call.data[: len(call.data) // 2])
        return do()

    assert run_to_the_end(short) == 1
    assert shortened > 100


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("replace", errno.ENOENT),
        ("link", errno.EEXIST),
        ("unlink", errno.ENOENT),
        ("rmdir", errno.ENOENT),
    ],
)
def test_what_was_done_although_the_answer_says_otherwise_counts_as_done(name: str, number: int) -> None:
    lost = LostAnswer(name, number, chance=1.0)
    assert run_to_the_end(lost) == 1
    assert lost.injected >= 1


def test_a_disk_that_turns_read_only_ends_the_attempt_with_its_path_and_the_run_goes_on_once_it_is_writable() -> None:
    writable_again = False

    def read_only(call: Call, do: Callable[..., Any]) -> Any:
        reads = call.name in READS | {"stat", "fstat", "close"}
        return do() if reads or writable_again else failing(call)

    def failing(call: Call) -> Any:
        raise failure(errno.EROFS, call.path)

    volume = Volume(ROOT)
    with mounted(volume), without_threads():
        trial = Trial(ROOT)
        trial.attempt(until=3)
        volume.intercept = read_only
        for _ in range(3):
            with pytest.raises(OSError, match=rf"Read-only file system: '{ROOT}"):
                trial.attempt()
        writable_again = True
        trial.attempt()


@pytest.mark.parametrize("seed", range(5))
def test_clients_with_stale_caches_are_late_and_never_wrong(seed: int) -> None:
    """B10 and others: cached listings and denials, pages of a file that arrive in any order, on every client."""
    volume = NfsVolume(ROOT, seed)
    trial = Trial(ROOT, seed=seed, acting=volume.act_as)

    def look_before(call: Call, do: Callable[..., Any]) -> Any:
        """Let the trainer look at the ring in the middle of a writer's commit."""
        writer = volume.client
        if call.name == "fdatasync" and writer != "trainer":
            volume.act_as("trainer")
            trial.trainer.reader.poll()
            volume.act_as(writer)
        return do()

    with mounted(volume), without_threads():
        trial.begin()
        volume.intercept = look_before
        trial.attempt(until=3, replace_at=1)
        trial.attempt(until=5)
        trial.attempt()
    assert volume.stale["listing"] > 0 and volume.stale["content"] > 0


def test_files_that_somebody_deletes_are_written_again_or_done_without() -> None:
    """CONTROL and the registry, in the middle of an attempt."""
    volume, turns = Volume(ROOT), 0

    def delete(_: str) -> None:
        nonlocal turns
        turns += 1
        if turns == 12:
            (trial.root / "ring" / "CONTROL.json").unlink()
            for path in (trial.root / "ring" / "reg").iterdir():
                path.unlink()

    trial = Trial(ROOT, acting=delete)
    with mounted(volume), without_threads():
        trial.attempt()
        assert turns > 12
        assert (trial.root / "ring" / "CONTROL.json").exists()


def test_a_run_directory_can_be_moved_between_attempts() -> None:
    with mounted(Volume(ROOT)), without_threads():
        trial = Trial(ROOT)
        trial.attempt(until=3)
        (ROOT / "elsewhere").mkdir()
        trial.root = trial.root.rename(ROOT / "elsewhere" / "other")
        trial.attempt()


@pytest.fixture
def wild_clock() -> Iterator[None]:
    """time.time jumps by up to ten days, both ways, at each look."""
    real, rng = time.time, Random(0)
    with patch("time.time", lambda: real() + rng.uniform(-864_000, 864_000)):
        yield


def trained_order() -> list[list[str]]:
    volume = Volume(ROOT)
    with mounted(volume), without_threads():
        trial = Trial(ROOT)
        trial.attempt(until=3)
        trial.attempt()
        return [[path.name, (path / "model.json").read_text()] for path in sorted(trial.root.glob("checkpoints/*"))]


def test_wall_clocks_that_jump_by_ten_days_have_no_effect(request: pytest.FixtureRequest) -> None:
    undisturbed = trained_order()
    request.getfixturevalue("wild_clock")
    assert trained_order() == undisturbed


def test_B15_locks_are_never_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def missing(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    for name in ("flock", "lockf", "fcntl"):
        monkeypatch.setattr(fcntl, name, missing)
    assert run_to_the_end(lambda _, do: do()) == 1
