"""Records: whole lines with one owner, read incrementally, whatever a kill or a full disk leaves behind."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.report.progress import Progress
from areal_hpc.telemetry import Record, Recorder, RecordReader, records
from areal_hpc.telemetry.records import ENVELOPE, from_line, to_line


def open_recorder(directory: Path, role: str = "trainer", index: int = 0) -> Recorder:
    return Recorder(directory / f"{role}-{index}.jsonl", role=role, index=index, epoch=3)


ODD = b'{"time": "noon", "role": "trainer", "index": 0, "epoch": 1, "kind": "step", "step": 9}'
"""Everything is there, but the time is not one."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def values_of(directory: Path) -> list[dict[str, Any]]:
    return [dict(record.values) for record in RecordReader(directory).poll()]


def test_a_record_is_one_line_of_json(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    recorder.record("step", {"step": 7, "reward_mean": 0.5, "note": "a\nb"})
    text = (tmp_path / "trainer-0.jsonl").read_text(encoding="ascii")
    assert text.count("\n") == 1
    line = json.loads(text)
    assert line.pop("time") > 1.7e9
    assert line == {
        "role": "trainer", "index": 0, "epoch": 3, "kind": "step", "step": 7, "reward_mean": 0.5, "note": "a\nb",
    }  # fmt: skip


def test_records_are_private(tmp_path: Path) -> None:
    open_recorder(tmp_path)
    assert stat.S_IMODE((tmp_path / "trainer-0.jsonl").stat().st_mode) == 0o600


def test_E17_numbers_that_are_none_become_null(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    recorder.record("step", {"a": float("nan"), "b": float("inf"), "c": np.float32("-inf"), "d": None})
    assert values_of(tmp_path) == [{"a": None, "b": None, "c": None, "d": None}]
    assert "NaN" not in (tmp_path / "trainer-0.jsonl").read_text(encoding="ascii")


def test_I15_any_value_can_be_recorded(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    recorder.record("step", {"a": np.int64(3), "b": np.float32(0.5), "c": {"x": 1}, "d": True, "e": "\udc80"})
    assert values_of(tmp_path) == [{"a": 3, "b": 0.5, "c": "{'x': 1}", "d": True, "e": "\udc80"}]


def test_a_name_of_the_envelope_is_our_own_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="envelope"):
        open_recorder(tmp_path).record("step", {"time": 1.0})


def test_spans_join_the_next_record_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = open_recorder(tmp_path)
    ticks = iter([10.0, 12.0, 20.0, 23.0, 30.0, 31.0])
    monkeypatch.setattr(records, "time", SimpleNamespace(monotonic=lambda: next(ticks), time=time.time))
    with recorder.span("train"):
        pass
    with recorder.span("train"):
        pass
    with pytest.raises(KeyError), recorder.span("wait"):
        raise KeyError
    recorder.record("step", {"step": 1})
    recorder.record("step", {"step": 2})
    assert values_of(tmp_path) == [{"step": 1, "seconds_train": 5.0, "seconds_wait": 1.0}, {"step": 2}]


def test_a_poll_gives_only_what_is_new(tmp_path: Path) -> None:
    reader = RecordReader(tmp_path / "telemetry")
    assert list(reader.poll()) == []
    (tmp_path / "telemetry").mkdir()
    one, two = open_recorder(tmp_path / "telemetry"), open_recorder(tmp_path / "telemetry", "rollout", 1)
    one.record("step", {"step": 1})
    assert [record.number("step") for record in reader.poll()] == [1]
    assert list(reader.poll()) == []
    two.record("group", {"position": 5})
    one.record("step", {"step": 2})
    assert [(record.role, record.index, record.epoch) for record in reader.poll()] == [
        ("rollout", 1, 3),
        ("trainer", 0, 3),
    ]


def test_a_poll_that_is_left_early_goes_on_where_it_was(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    for step in range(5):
        recorder.record("step", {"step": step})
    reader = RecordReader(tmp_path)
    first = next(iter(reader.poll()))
    assert [first.number("step"), *(record.number("step") for record in reader.poll())] == [0, 1, 2, 3, 4]


def test_only_the_roles_asked_for_are_read(tmp_path: Path) -> None:
    for role in ("trainer", "rollout", "evaluator"):
        open_recorder(tmp_path, role).record("x", {})
    (tmp_path / "notes.txt").write_text("{}\n")
    roles = [record.role for record in RecordReader(tmp_path, roles=("trainer", "evaluator")).poll()]
    assert roles == ["evaluator", "trainer"]


def test_of_more_files_than_are_to_be_opened_each_has_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real = list[str](), Path.open
    recorders = [open_recorder(tmp_path, "rollout", index) for index in range(7)]
    reader = RecordReader(tmp_path)
    monkeypatch.setattr(Path, "open", lambda path, *args: (opened.append(path.name), real(path, *args))[1])
    for index, recorder in enumerate(recorders):
        recorder.record("group", {"n": index})
    polls = [[record.values["n"] for record in reader.poll(most=3)] for _ in range(2)]
    assert polls == [[0, 1, 2], [3, 4, 5]]
    recorders[0].record("group", {"n": 7})
    assert [record.values["n"] for record in reader.poll(most=3)] == [6, 7]  # and the second file, without news
    assert len(opened) == 9
    recorders[2].record("group", {"n": 8})
    assert [record.values["n"] for record in reader.poll(most=7)] == [8]
    recorders[2].record("group", {"n": 9})
    assert [record.values["n"] for record in reader.poll()] == [9]


@pytest.mark.parametrize("last_bytes", [1, 50, 99, 100, 101, 150, 200, 250, 299, 300, 400])
def test_the_end_of_a_file_starts_at_a_whole_line(tmp_path: Path, last_bytes: int) -> None:
    recorder = open_recorder(tmp_path)
    for step in range(3):
        recorder.record("step", {"step": step})
    size = (tmp_path / "trainer-0.jsonl").stat().st_size
    reader = RecordReader(tmp_path, last_bytes=last_bytes)
    steps = [record.number("step") for record in reader.poll()]
    assert steps == [0, 1, 2][3 - len(steps) :]
    assert reader.num_damaged == 0
    assert len(steps) == 3 or last_bytes < size
    recorder.record("step", {"step": 3})
    assert [record.number("step") for record in reader.poll()] == [3]


def test_a_torn_last_line_is_left_until_it_is_whole(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    recorder.record("step", {"step": 1})
    path = tmp_path / "trainer-0.jsonl"
    whole = path.read_bytes()
    reader = RecordReader(tmp_path)
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        assert list(reader.poll()) == []
    path.write_bytes(whole)
    assert [record.number("step") for record in reader.poll()] == [1]


def test_a_successor_starts_a_line_of_its_own_after_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "trainer-0.jsonl"
    open_recorder(tmp_path).record("step", {"step": 1})
    with path.open("ab") as file:
        file.write(b'{"time": 1.0, "role": "tra')  # killed here
    successor = open_recorder(tmp_path)
    successor.record("step", {"step": 2})
    successor.record("step", {"step": 3})
    reader = RecordReader(tmp_path)
    assert [record.number("step") for record in reader.poll()] == [1, 2, 3]
    assert reader.num_damaged == 1


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"[1]", b"null", b"7", b"\xff\xfe", b'{"time": 1, "role"', b"\x00" * 9, ODD]
)
def test_a_line_that_holds_no_record_is_counted_and_left_out(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "trainer-0.jsonl").write_bytes(line + b"\n")
    open_recorder(tmp_path).record("step", {"step": 1})
    reader = RecordReader(tmp_path)
    assert [record.number("step") for record in reader.poll()] == [1]
    assert reader.num_damaged == (1 if line else 0)


def test_lines_end_at_a_line_feed_and_nowhere_else(tmp_path: Path) -> None:
    """U+2028, U+0085, form feed and carriage return end lines for ``str.splitlines``."""
    text = "a\u2028b\u2029c\x85d\x0ce\rf"
    record = {"time": 1.0, "role": "x", "index": 0, "epoch": 1, "kind": "k", "text": text}
    (tmp_path / "x-0.jsonl").write_bytes(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    open_recorder(tmp_path, "y").record("k", {"text": text})
    assert values_of(tmp_path) == [{"text": text}, {"text": text}]


@given(
    st.dictionaries(
        st.text().filter(lambda key: key not in ENVELOPE),
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    )
)
def test_what_is_written_is_what_is_read(values: dict[str, Any]) -> None:
    record = Record(time=1.5, role="trainer", index=0, epoch=1, kind="step", values=values)
    line = to_line(record)
    assert line.count(b"\n") == 1
    assert line.isascii()
    assert from_line(line) == record


def test_a_full_disk_costs_records_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = open_recorder(tmp_path)
    real_write, answers = os.write, iter(["whole", "half", "none", "none", "whole", "whole"])

    def write(fd: int, data: bytes) -> int:
        answer = next(answers)
        if answer == "none":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, data[: len(data) // 2] if answer == "half" else data)

    monkeypatch.setattr("os.write", write)
    with caplog.at_level(logging.WARNING):
        for step in range(6):
            recorder.record("step", {"step": step})
    monkeypatch.undo()
    reader = RecordReader(tmp_path)
    assert [record.number("step") for record in reader.poll()] == [0, 4, 5]
    assert reader.num_damaged == 1
    assert len(caplog.records) == 1
    assert "trainer-0.jsonl: a record was written in part" in caplog.text


def test_number_answers_only_with_finite_numbers() -> None:
    values: dict[str, Any] = {"a": 1, "b": 0.5, "c": None, "d": "7", "e": True, "f": {"x": 1}, "g": float("inf")}
    record = Record(time=0.0, role="r", index=0, epoch=1, kind="k", values=values)
    assert [record.number(key) for key in "abcdefgh"] == [1.0, 0.5, None, None, None, None, None, None]


def test_J8_reading_100_000_records_keeps_none_of_them(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    recorder.record("step", {"step": 1, "reward_mean": 0.5, "tokens_trained": 1000})
    line = (tmp_path / "trainer-0.jsonl").read_bytes()
    (tmp_path / "trainer-0.jsonl").write_bytes(line * 100_000)
    reader, progress, total = RecordReader(tmp_path), Progress(10), 0
    for record in reader.poll():
        progress.feed(record)
        total += 1
        if total == 1000:
            before = resident_bytes()
    assert total == 100_000
    assert resident_bytes() - before < 8_000_000, "the records themselves, kept, are more than 50 MB"
