"""The file system in memory against the real one, and what it says that crashes leave."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import hypothesis.strategies as st
from faults.images import SECTOR, Image, killed, power_cut, tree
from faults.mounted import mounted
from faults.volume import Volume
from hypothesis import given, settings

from areal_hpc import fs

ROOT = Path("/volume")
NAMES = st.sampled_from(["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a"])
FLAGS = st.sampled_from(
    [
        os.O_RDONLY,
        os.O_RDONLY | os.O_DIRECTORY,
        os.O_WRONLY,
        os.O_WRONLY | os.O_CREAT,
        os.O_RDWR | os.O_CREAT | os.O_EXCL,
        os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    ]
)


def use(path: Path, flags: int, data: bytes, offset: int) -> list[Any]:
    """Everything that one descriptor can do."""
    fd = os.open(path, flags, 0o640)
    try:
        calls: list[Callable[[], Any]] = [
            lambda: os.pwrite(fd, data, offset),
            lambda: os.write(fd, data),
            lambda: os.read(fd, 7),
            lambda: os.pread(fd, 5, offset),
            lambda: os.ftruncate(fd, offset),
            lambda: os.fsync(fd),
        ]
        return [None if path.is_dir() else os.fstat(fd).st_size, *(outcome(call) for call in calls)]
    finally:
        os.close(fd)


def describe(path: Path) -> tuple[int, int | None, int | None]:
    status = path.stat()
    file = path.is_file()
    return status.st_mode, status.st_nlink if file else None, status.st_size if file else None


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except OSError as error:
        return f"errno {error.errno}"


STEP = st.one_of(
    st.tuples(st.just("use"), NAMES, FLAGS, st.binary(max_size=9), st.integers(0, 12)),
    st.tuples(st.sampled_from(["mkdir", "rmdir", "unlink", "rmtree", "list", "glob", "describe", "read"]), NAMES),
    st.tuples(st.sampled_from(["rename", "replace", "link"]), NAMES, NAMES),
    st.tuples(st.just("write"), NAMES, st.binary(max_size=9)),
)


def carry_out(root: Path, step: tuple[Any, ...]) -> Any:
    name, path, *rest = step[0], root / step[1], *step[2:]
    calls: dict[str, Callable[[], Any]] = {
        "use": lambda: use(path, *rest),
        "mkdir": lambda: path.mkdir(mode=0o700),
        "rmdir": path.rmdir,
        "unlink": path.unlink,
        "rmtree": lambda: shutil.rmtree(path),
        "list": lambda: sorted(os.listdir(path)),
        "glob": lambda: sorted(str(found.relative_to(root)) for found in path.rglob("*")),
        "describe": lambda: describe(path),
        "read": path.read_bytes,
        "write": lambda: path.write_bytes(*rest),
        "rename": lambda: os.rename(path, root / rest[0]),  # noqa: PTH104
        "replace": lambda: os.replace(path, root / rest[0]),
        "link": lambda: os.link(path, root / rest[0]),
    }
    return outcome(calls[name])


@settings(max_examples=300)
@given(steps=st.lists(STEP, max_size=25))
def test_every_call_answers_as_the_kernel_does(steps: list[tuple[Any, ...]]) -> None:
    old = os.umask(0)
    with tempfile.TemporaryDirectory() as directory, mounted(Volume(ROOT)):
        for step in steps:
            assert carry_out(ROOT, step) == carry_out(Path(directory), step), step
    os.umask(old)


def after(work: Callable[[Path], None]) -> Image:
    volume = Volume(ROOT)
    with mounted(volume):
        work(ROOT)
    return volume.image


def cuts(image: Image, number: int = 400) -> list[dict[str, bytes | None]]:
    return [tree(power_cut(image, Random(seed))) for seed in range(number)]


def test_a_published_file_is_there_after_every_crash() -> None:
    image = after(lambda root: fs.publish(root / "x", b"data"))
    assert tree(killed(image)) == {"": None, "/x": b"data"}
    assert all(found["/x"] == b"data" for found in cuts(image))


def test_the_old_or_the_new_version_is_there_before_the_directory_is_synced() -> None:
    def work(root: Path) -> None:
        fs.publish(root / "x", b"old")
        fs.publish(root / "y", b"new")
        os.replace(root / "y", root / "x")

    assert {found["/x"] for found in cuts(after(work))} == {b"old", b"new"}


def test_a_name_without_a_sync_of_its_directory_may_be_lost_whatever_was_synced_below_it() -> None:
    def work(root: Path) -> None:
        (root / "d").mkdir()
        fs.publish(root / "d/x", b"data")

    assert {"/d/x" in found for found in cuts(after(work))} == {True, False}


def test_unsynced_data_are_lost_sector_by_sector_and_leave_zeros() -> None:
    def work(root: Path) -> None:
        fd = os.open(root / "x", os.O_WRONLY | os.O_CREAT)
        os.fsync(fd)
        fs.fsync_directory(root)
        os.pwrite(fd, b"a" * SECTOR + b"b" * SECTOR, 0)

    sector = {b"a": b"a" * SECTOR, b"b": b"b" * SECTOR, b"0": bytes(SECTOR)}
    found = {one["/x"] for one in cuts(after(work))}
    shapes = [b"", sector[b"a"], sector[b"0"] * 2, sector[b"0"] + sector[b"b"]]
    shapes += [sector[b"a"] + sector[b"0"], sector[b"a"] + sector[b"b"]]
    assert found == set(shapes)
