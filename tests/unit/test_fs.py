"""Files that other processes read: whole or not at all, private, found by listing."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from areal_hpc import fs
from areal_hpc.errors import CorruptDocument, RunDirError, WaitTimeout
from areal_hpc.fs import create_exclusive, publish, publish_json, read_if_listed, read_json, wait_for
from areal_hpc.run_dir import RunDir


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_published_file_replaces_the_old_one_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "x"
    publish(path, b"old")
    publish(path, b"new")
    assert path.read_bytes() == b"new"
    assert mode_of(path) == 0o600
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_refused_publish_leaves_the_old_bytes_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "x"
    publish(path, b"old")

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="No space left"):
        publish(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_publishing_is_durable_before_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that a power cut tests: data, name, directory."""
    order: list[str] = []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            order.append(name)
            return call(*arguments)

        return noted

    monkeypatch.setattr(os, "fsync", noting("fsync", os.fsync))
    monkeypatch.setattr(os, "replace", noting("replace", os.replace))
    publish(tmp_path / "x", b"data")
    assert order == ["fsync", "replace", "fsync"]


def test_readers_never_see_half_a_document(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    publish_json(path, ["a"] * 10_000)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            publish_json(path, [str(number)] * 10_000)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            value = read_json(path)
            assert len(value) == 10_000
            assert len(set(value)) == 1
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("links", [True, False])
def test_of_many_creators_exactly_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.EPERM, "hard links are not allowed here")

        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "claim"
    start = threading.Barrier(8)
    wins: list[int] = []

    def create(number: int) -> None:
        start.wait()
        if create_exclusive(path, str(number).encode()):
            wins.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert path.read_bytes() == str(wins[0]).encode()
    assert os.listdir(tmp_path) == ["claim"]
    assert mode_of(path) == 0o600


def test_an_error_that_is_no_answer_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OSError, match="read-only"):
        create_exclusive(tmp_path / "claim", b"")
    assert os.listdir(tmp_path) == []


def test_a_name_is_read_only_once_it_is_listed(tmp_path: Path) -> None:
    assert read_if_listed(tmp_path / "nowhere" / "x.json") is None
    assert read_if_listed(tmp_path / "x.json") is None
    publish_json(tmp_path / "x.json", {"a": 1})
    assert read_if_listed(tmp_path / "x.json") == {"a": 1}


@pytest.mark.parametrize("data", [b'{"state": "run', b"\x00\xff\xfe", b"\x00" * 10], ids=["half", "binary", "zeros"])
@pytest.mark.parametrize("read", [read_json, read_if_listed])
def test_a_damaged_document_is_named_with_what_to_do(tmp_path: Path, read: Callable[[Path], Any], data: bytes) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(data)
    with pytest.raises(CorruptDocument, match=rf"{path} is no JSON document: .*; restore it from a copy, or remove it"):
        read(path)


def test_a_wait_returns_the_first_answer() -> None:
    answers = iter([None, 0, "", "here"])
    assert wait_for("it", lambda: next(answers), timeout_s=10, poll_s=0, party="x") == "here"


def test_a_wait_that_ends_names_whom_it_waited_for() -> None:
    with pytest.raises(WaitTimeout, match=r"waited 0 s for trainer-0 to come up.*; look into its log"):
        wait_for("trainer-0 to come up", lambda: None, timeout_s=0, party="trainer-0", hint="look into its log")
    assert issubclass(WaitTimeout, TimeoutError)


def test_a_run_directory_is_private_and_opens_again(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs" / "first")
    for directory in (run.root, run.secrets, run.attempts, run.ring, run.checkpoints):
        assert mode_of(directory) == 0o700
    publish(run.config, b"name: first\n")
    assert RunDir.open(run.root) == run == RunDir.create(run.root)


@pytest.mark.parametrize("name", ["..", "-rf", "a b", "x" * 101, "ä", "a\nb", ".hidden"])
def test_names_that_could_escape_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunDirError, match="set `name`"):
        RunDir.create(Path(f"{tmp_path}/{name}"))
    assert os.listdir(tmp_path) == []


def test_a_directory_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "open"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(RunDirError, match="is open to others; run `chmod go=,g-s "):
        RunDir.create(root)


def test_a_directory_without_a_run_is_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"no config\.yaml"):
        RunDir.open(tmp_path)


def test_attempts_are_listed_in_order_and_nothing_else_is_one(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    assert run.newest_attempt() is None
    for epoch in (2, 10, 1):
        run.attempt(epoch).create()
    (run.attempts / "notes").mkdir()
    (run.attempts / "00000011.bak").mkdir()
    assert [attempt.epoch for attempt in run.all_attempts()] == [1, 2, 10]
    newest = run.newest_attempt()
    assert newest is not None
    assert newest.epoch == 10
    assert mode_of(newest.logs) == 0o700


def test_evaluations_are_known_by_their_exact_names(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    publish_json(run.evaluation(20), {})
    (run.evaluations / "step-00000040.json.tmp").write_text(json.dumps({}))
    assert run.evaluated_steps() == {20}


def test_the_directory_is_synced_after_a_creation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(fs, "fsync_directory", synced.append)
    assert create_exclusive(tmp_path / "claim", b"")
    assert synced == [tmp_path]


def test_B2_many_make_one_directory_and_its_name_is_synced_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finds it there cannot know that its maker lived long enough to sync it."""
    synced: list[Path] = []
    monkeypatch.setattr(fs, "fsync_directory", synced.append)
    path = tmp_path / "a" / "b" / "c"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fs.make_private_directory, [path] * 32))
    assert path.is_dir()
    assert synced.count(path.parent) == 32
    assert {tmp_path, tmp_path / "a"} <= set(synced)


def test_errors_of_descriptors_name_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=f"Disk quota exceeded: '{tmp_path}/x'"):
        publish(tmp_path / "x", b"data")


def test_a_rename_that_says_that_it_failed_is_believed_unless_the_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request of an NFS client is lost on the way there, or its answer on the way back."""
    real = os.replace

    def answer_lost(source: Path, target: Path) -> None:
        real(source, target)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(source))

    def request_lost(source: Path, _: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(source))

    publish(tmp_path / "x", b"old")
    monkeypatch.setattr(os, "replace", request_lost)
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"old"
    monkeypatch.setattr(os, "replace", answer_lost)
    publish(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["x"]


def test_a_link_that_says_that_the_name_exists_is_ours_if_our_file_has_two_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def answer_lost(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists", str(target))

    monkeypatch.setattr(os, "link", answer_lost)
    assert create_exclusive(tmp_path / "x", b"ours")
    assert not create_exclusive(tmp_path / "x", b"theirs")
    assert (tmp_path / "x").read_bytes() == b"ours"
    assert os.listdir(tmp_path) == ["x"]
