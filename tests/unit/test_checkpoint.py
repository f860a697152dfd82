from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.checkpoint import (
    Keep,
    add_part,
    at_step,
    await_parts,
    begin,
    files,
    newest,
    prune,
    steps_of,
    sweep,
    verify,
    write,
)
from areal_hpc.errors import CheckpointError, Fenced, RoleDied, WaitTimeout
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def v(step: int, epoch: int = 1) -> WeightVersion:
    return WeightVersion(epoch=epoch, step=step)


def save(directory: Path) -> None:
    (directory / "model.bin").write_bytes(b"weights" * 1000)
    (directory / "shards").mkdir()
    (directory / "shards" / "0.bin").write_bytes(b"\x00" * 10)


def make(run: RunDir, step: int, epoch: int = 1) -> Path:
    return write(run, v(step, epoch), save, {"telemetry_step": step}, layout={"ranks": 2})


ONE = {1: None}
"""The lineage of a run with one attempt."""


def names(run: RunDir) -> list[str]:
    return sorted(os.listdir(run.checkpoints))


def test_what_is_written_is_found_again(run: RunDir) -> None:
    path = make(run, 20)
    assert path == run.checkpoints / "step-00000020.e00000001"
    found = newest(run, {1: None})
    assert found is not None
    assert (found.path, found.version) == (path, v(20))
    assert found.state == {"telemetry_step": 20}
    assert found.layout == {"ranks": 2}
    assert (path / "model.bin").read_bytes() == b"weights" * 1000


def test_the_manifest_names_every_file_with_its_castagnoli_checksum(run: RunDir) -> None:
    def nine_digits(directory: Path) -> None:
        (directory / "check").write_bytes(b"123456789")

    body = json.loads((write(run, v(1), nine_digits, {}) / "MANIFEST.json").read_bytes())["body"]
    assert sorted(body["files"]) == ["check", "state.json"]
    assert body["files"]["check"] == {"size": 9, "crc32c": 0xE3069283}  # the check value of RFC 3720
    assert "areal-hpc" in body["code"]


def test_a_run_without_checkpoints_starts_fresh(run: RunDir) -> None:
    assert newest(run, {1: None}) is None


def corruptions() -> dict[str, Any]:
    def edit(name: str, change: Any) -> Any:
        def apply(path: Path) -> None:
            (path / name).write_bytes(change((path / name).read_bytes()))

        return apply

    return {
        "file missing": lambda path: (path / "shards" / "0.bin").unlink(),
        "file short": edit("model.bin", lambda data: data[:-1]),
        "file longer": edit("model.bin", lambda data: data + b"x"),
        "bit flipped": edit("model.bin", lambda data: bytes([data[0] ^ 1]) + data[1:]),
        "file zeroed": edit("model.bin", lambda data: b"\x00" * len(data)),
        "state edited": edit("state.json", lambda data: data.replace(b"30", b"31")),
        "manifest missing": lambda path: (path / "MANIFEST.json").unlink(),
        "manifest empty": edit("MANIFEST.json", lambda data: b""),
        "manifest torn": edit("MANIFEST.json", lambda data: data[: len(data) // 2]),
        "manifest not ours": edit("MANIFEST.json", lambda data: b"[]"),
        "manifest edited": edit("MANIFEST.json", lambda data: data.replace(b'"ranks": 2', b'"ranks": 4')),
        "manifest of another step": lambda path: shutil.copy(
            path.with_name("step-00000020.e00000001") / "MANIFEST.json", path
        ),
    }


@pytest.mark.parametrize("kind", corruptions())
def test_a_corrupt_newest_falls_back_to_the_one_before_loudly(
    run: RunDir, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = make(run, 20), make(run, 30)
    corruptions()[kind](newer)
    with pytest.raises(CheckpointError, match="step-00000030"):
        verify(newer)
    with caplog.at_level(logging.WARNING):
        found = newest(run, {1: None})
    assert found is not None
    assert found.path == older
    assert "step-00000030.e00000001" in caplog.text


def test_all_corrupt_is_an_error_and_never_a_fresh_start(run: RunDir) -> None:
    (make(run, 20) / "model.bin").unlink()
    with pytest.raises(
        CheckpointError, match=r"step-00000020\.e00000001 cannot be read: .*model\.bin.*move the run directory away"
    ):
        newest(run, {1: None})


def test_all_corrupt_names_each_and_what_is_wrong_with_it(run: RunDir) -> None:
    (make(run, 20) / "model.bin").unlink()
    (make(run, 30) / "MANIFEST.json").write_text("{")
    make(run, 40, epoch=7)
    expected = r"40\.e00000007 does not belong.*30\.e00000001/MANIFEST\.json is damaged.*20\.e00000001 cannot be read"
    with pytest.raises(CheckpointError, match=expected):
        newest(run, ONE)


def test_a_run_whose_checkpoints_are_gone_does_not_start_again_from_the_beginning(run: RunDir) -> None:
    """Attempt 2 went on from step 20 of attempt 1, so there was a checkpoint, and it was lost."""
    with pytest.raises(CheckpointError, match="nothing, and the run went on from step 20 of attempt 1 before"):
        newest(run, {1: 20, 2: None})


def test_C18_from_step_k_means_exactly_k(run: RunDir) -> None:
    ten, twenty, lost = make(run, 10), make(run, 20), make(run, 30)
    again = make(run, 20, epoch=2)
    lineage = {1: 20, 2: None}
    assert steps_of(run, lineage) == [10, 20]
    assert at_step(run, lineage, 10).path == ten
    assert at_step(run, lineage, 20).path == again
    assert at_step(run, {1: None}, 30).path == lost
    for step in (15, 30):
        with pytest.raises(CheckpointError, match=rf"no checkpoint of step {step}; there are: 10, 20"):
            at_step(run, lineage, step)
    (ten / "model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000010\.e00000001 cannot be read"):
        at_step(run, lineage, 10)
    assert twenty.is_dir()


def test_B5_a_rank_whose_part_failed_leaves_its_word_and_the_error(run: RunDir) -> None:
    directory = begin(run, v(10))
    add_part(directory, 1, save)
    with pytest.raises(OSError, match="No space"):
        add_part(directory, 2, no_space)
    await_parts(directory, [1], timeout_s=0)
    with pytest.raises(RoleDied, match=r"rank 2 could not write .*OSError: .*No space left on device"):
        await_parts(directory, [1, 2], timeout_s=0)
    with pytest.raises(WaitTimeout, match="the part of trainer rank 3"):
        await_parts(directory, [1, 3], timeout_s=0)


def test_the_word_of_a_rank_is_part_of_the_checkpoint(run: RunDir) -> None:
    directory = begin(run, v(10))
    add_part(directory, 1, save)
    path = write(run, v(10), lambda _: None, {}, directory=directory)
    assert verify(path).version == v(10)
    assert (path / "model.bin").is_file()
    (path / "part-00001.json").unlink()
    with pytest.raises(CheckpointError, match="part-00001"):
        verify(path)


def test_C14_only_names_that_are_exactly_ours_count(run: RunDir) -> None:
    path = make(run, 10)
    for name in ("step-00000010.e00000001-hf", "step_10-hf", "step-00000099", "step-99.e00000001", "latest"):
        (run.checkpoints / name).mkdir()
    found = newest(run, {1: None})
    assert found is not None
    assert found.path == path
    prune(run, ONE, Keep(newest=1))
    assert "step_10-hf" in names(run)


def test_B6_an_unfinished_save_is_not_a_checkpoint(run: RunDir) -> None:
    seen = []

    def look(directory: Path) -> None:
        save(directory)
        seen.append(newest(run, {1: None}))

    write(run, v(10), look, {})
    assert seen == [None]


def test_C18_the_history_decides_not_the_highest_number(run: RunDir) -> None:
    """Epoch 2 went on from step 20 of epoch 1; a zombie of epoch 1 then wrote step 40."""
    kept, _, _ = make(run, 20), make(run, 40), make(run, 50, epoch=3)
    found = newest(run, {1: 20, 2: None})
    assert found is not None
    assert found.path == kept
    later = make(run, 25, epoch=2)
    found = newest(run, {1: 20, 2: None})
    assert found is not None
    assert found.path == later


def test_checkpoints_of_another_history_alone_are_an_error(run: RunDir) -> None:
    make(run, 20, epoch=5)
    with pytest.raises(CheckpointError):
        newest(run, {1: None})


def test_B9_a_step_below_existing_ones_can_be_saved_and_is_the_newest(run: RunDir) -> None:
    make(run, 10), make(run, 20)
    path = make(run, 15, epoch=2)
    found = newest(run, {1: 10, 2: None})
    assert found is not None
    assert found.path == path
    prune(run, {1: 10, 2: None}, Keep(newest=2))
    assert names(run) == ["step-00000010.e00000001", "step-00000015.e00000002", "step-00000020.e00000001"]
    make(run, 25, epoch=2)
    prune(run, {1: 10, 2: None}, Keep(newest=2))
    assert names(run) == ["step-00000015.e00000002", "step-00000025.e00000002"]


def test_the_same_version_again_takes_the_place_of_the_first(run: RunDir) -> None:
    (make(run, 10) / "model.bin").unlink()
    path = write(run, v(10), save, {"telemetry_step": 11})
    assert verify(path).state == {"telemetry_step": 11}
    prune(run, ONE, Keep(newest=1))
    assert names(run) == [path.name]


# Failures while writing


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_C12_a_save_that_fails_leaves_the_old_one_and_nothing_else(run: RunDir) -> None:
    make(run, 10)
    with pytest.raises(OSError, match="No space"):
        write(run, v(20), no_space, {})
    assert names(run) == ["step-00000010.e00000001"]


class PowerCut(BaseException):
    """The machine stops here: no handler of ours runs any more."""


def cut_after(monkeypatch: pytest.MonkeyPatch, calls: int, failure: BaseException) -> None:
    """Let ``calls`` fsyncs pass, then fail each one."""
    real, left = os.fsync, [calls]

    def fsync(fd: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise failure
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)


def num_fsyncs(tmp_path: Path) -> int:
    """How many fsyncs one checkpoint takes."""
    run = RunDir.create(tmp_path / "counted")
    with pytest.MonkeyPatch.context() as patch:
        calls: list[int] = []
        patch.setattr(os, "fsync", calls.append)
        make(run, 1)
    return len(calls)


def test_no_space_at_any_fsync_leaves_the_old_one_and_nothing_else(tmp_path: Path, run: RunDir) -> None:
    make(run, 10)
    for calls in range(num_fsyncs(tmp_path) - 1):  # the last one comes after the rename
        with pytest.MonkeyPatch.context() as patch:
            cut_after(patch, calls, OSError(errno.ENOSPC, "No space left on device"))
            with pytest.raises(OSError, match="No space"):
                make(run, 20)
        assert names(run) == ["step-00000010.e00000001"]
    assert verify(make(run, 20)).version == v(20)


def test_a_crash_at_any_fsync_leaves_old_or_new_whole_and_is_swept(tmp_path: Path, run: RunDir) -> None:
    make(run, 10)
    found = []
    for calls in range(num_fsyncs(tmp_path)):
        with pytest.MonkeyPatch.context() as patch:
            cut_after(patch, calls, PowerCut())
            patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
            with pytest.raises(PowerCut):
                make(run, 20)
        survivor = newest(run, {1: None})
        assert survivor is not None
        found.append(survivor.version.step)
        sweep(run, epoch=2)
        assert all(name.startswith("step-") for name in names(run))
    assert found == [10] * (len(found) - 1) + [20]


def test_everything_is_durable_before_the_rename_and_the_rename_after_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_fsync, real_rename = os.fsync, os.replace

    def fsync(fd: int) -> None:
        events.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        real_fsync(fd)

    def rename(source: Path, target: Path) -> None:
        events.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    target = write(run, v(1), save, {}, still_leader=lambda: events.append("fence"))
    before = events[: events.index("fence")]
    manifest = next(i for i, path in enumerate(before) if "MANIFEST" in path)
    assert {"model.bin", "0.bin", "shards"} <= {Path(path).name for path in before[:manifest]}
    assert any("state.json" in path for path in before[:manifest])
    assert before[-1].endswith(".tmp")  # the directory that the manifest was renamed in
    assert events[events.index("fence") :] == ["fence", "rename", str(target.parent)]


def test_a_fenced_trainer_publishes_nothing(run: RunDir) -> None:
    def fenced() -> None:
        raise Fenced("epoch 2 owns this run")

    make(run, 10)
    with pytest.raises(Fenced):
        write(run, v(20), save, {}, still_leader=fenced)
    assert names(run) == ["step-00000010.e00000001"]


def test_state_that_is_not_plain_data_fails_before_anything_is_written(run: RunDir) -> None:
    with pytest.raises(TypeError):
        write(run, v(1), lambda _: pytest.fail("saved"), {"ring": object()})
    assert names(run) == []


def test_the_sweep_leaves_the_unfinished_work_of_living_attempts(run: RunDir) -> None:
    for name in (".step-00000010.e00000001.0123abcd.tmp", ".step-00000010.e00000003.0123abcd.tmp", "notes"):
        (run.checkpoints / name).mkdir()
    sweep(run, epoch=3)
    assert names(run) == [".step-00000010.e00000003.0123abcd.tmp", "notes"]


def test_verify_refuses_what_is_not_a_checkpoint(run: RunDir) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        verify(run.root)
    with pytest.raises(CheckpointError, match="cannot be read"):
        verify(run.checkpoints / "step-00000001.e00000001")


def test_a_checkpoint_of_another_format_is_refused_by_name(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(run, 10)
    monkeypatch.setattr(files, "FORMAT", 3)
    with pytest.raises(CheckpointError, match="format 2"):
        verify(path)
