"""The self-test of a mount: what it accepts, what it refuses and in which words, and that it leaves nothing behind."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from faults.mounted import mounted
from faults.volume import Call, Intercept, Volume, failure

from areal_hpc import mount
from areal_hpc.errors import RunDirError
from areal_hpc.mount import MIB, examine, is_served, low_space

ROOT = Path("/volume")


@pytest.fixture
def volume() -> Volume:
    return Volume(ROOT)


def refused(volume: Volume, intercept: Intercept) -> str:
    """What ``examine`` says of the volume."""
    volume.intercept = intercept
    with mounted(volume):
        with pytest.raises(RunDirError) as told:
            examine(ROOT / "runs" / "name", min_free_mb=0)
        volume.intercept = lambda _, do: do()
        assert os.listdir(ROOT) == []
    return str(told.value)


def test_this_file_system_is_good_enough_and_nothing_is_left_behind(tmp_path: Path) -> None:
    found = examine(tmp_path / "not" / "yet", min_free_mb=1)
    assert found.path == str(tmp_path)
    assert found.hard_links and found.free_bytes > MIB
    assert os.listdir(tmp_path) == []
    assert found.record()["kind"] == found.kind


def test_the_kind_is_that_of_the_longest_mount_point_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines as proc(5) shows them: optional fields before the dash, blanks as octal."""
    place = tmp_path / "my runs"
    place.mkdir()
    lines = [
        "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
        f"22 21 0:40 / {str(place).replace(' ', chr(92) + '040')} rw - nfs4 server:/x rw,vers=4.1",
        f"23 21 0:41 / {tmp_path}/my rw - tmpfs tmpfs rw",
    ]
    (tmp_path / "mountinfo").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(mount, "MOUNTS", tmp_path / "mountinfo")
    assert examine(place, 0).kind == "nfs4"
    assert examine(tmp_path, 0).kind == "ext4"
    assert (is_served(place), is_served(tmp_path)) == (True, False)


def test_hard_links_can_be_done_without(volume: Volume) -> None:
    volume.hard_links = False
    with mounted(volume):
        assert not examine(ROOT, 0).hard_links


def refuse(number: int, call: Call) -> Any:
    raise failure(number, call.path)


def overwrites(call: Call, do: Callable[..., Any]) -> Any:
    """An O_EXCL that is not exclusive."""
    try:
        return do()
    except FileExistsError:
        return os.open(call.path, os.O_WRONLY | os.O_TRUNC)


def copies(volume: Volume) -> Intercept:
    """A rename that leaves the old name as well."""

    def intercept(call: Call, do: Callable[..., Any]) -> Any:
        if call.name != "replace":
            return do()
        volume.unlink(call.target)
        return volume.link(call.path, call.target)

    return intercept


def when(condition: Callable[[Call], bool], number: int) -> Intercept:
    return lambda call, do: refuse(number, call) if condition(call) else do()


def test_exclusive_creation_that_is_not_is_refused(volume: Volume) -> None:
    told = refused(volume, overwrites)
    assert told.startswith("/volume (") and "two attempts could both own the run" in told


def test_a_rename_that_copies_is_refused(volume: Volume) -> None:
    assert "does not replace a file by renaming another" in refused(volume, copies(volume))


@pytest.mark.parametrize(
    ("condition", "number", "sentence"),
    [
        (lambda call: call.name == "rename", errno.EXDEV, "does not rename a directory with files in it, so that no"),
        (lambda call: call.name == "pwrite", errno.ENOTSUP, "does not write at chosen offsets"),
        (lambda call: call.name == "fsync" and call.path[-1] == "4", errno.EINVAL, "does not sync directories"),
        (lambda call: call.name == "mkdir", errno.EROFS, "/volume cannot be used for a run: .*Read-only file system"),
        (lambda call: call.name == "mkdir", errno.EDQUOT, "Disk quota exceeded"),
    ],
    ids=["directory rename", "offsets", "directory sync", "read-only", "quota"],
)
def test_what_a_run_relies_on_is_refused_by_name(
    volume: Volume, condition: Callable[[Call], bool], number: int, sentence: str
) -> None:
    told = refused(volume, when(condition, number))
    assert re.search(sentence, told), told
    assert told.endswith("set run_root to a directory on a local disk or a file system such as NFS, Lustre or GPFS")


def test_a_mount_that_opens_secrets_to_everybody_is_refused(volume: Volume) -> None:
    real = volume._open
    with patch.object(volume, "_open", lambda path, flags, _: real(path, flags, 0o777)):
        assert "secrets would lie open" in refused(volume, lambda _, do: do())


def test_a_name_that_is_not_listed_is_refused(volume: Volume) -> None:
    stale: dict[str, list[str]] = {}

    def old_listings(call: Call, do: Callable[..., Any]) -> Any:
        return stale.setdefault(call.path, do()) if call.name == "listdir" and call.path[-1] == "5" else do()

    assert "does not list a file that was made" in refused(volume, old_listings)


def test_too_little_space_is_a_sentence(volume: Volume) -> None:
    volume.free_bytes = 100 * MIB
    with mounted(volume):
        assert low_space(ROOT, 100) is None
        assert low_space(ROOT, 0) is None
        told = low_space(ROOT, 101)
        assert told == "/volume has 100 MiB left, less than the 101 MiB of buffer.min_free_mb"
        with pytest.raises(RunDirError, match=r"less than the 101 MiB .*; free space there, or set run_root elsewhere"):
            examine(ROOT, 101)


def test_too_few_inodes_are_a_sentence_where_they_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_inodes(total: int, left: int) -> None:
        answer = os.statvfs_result((4096, 4096, 1 << 30, 1 << 30, 1 << 30, total, left, left, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _: answer)

    with_inodes(total=10_000, left=999)
    assert low_space(tmp_path, 1) == f"{tmp_path} has 999 inodes left, less than 1000"
    with_inodes(total=0, left=0)  # btrfs and others make them as they are needed
    assert low_space(tmp_path, 1) is None
