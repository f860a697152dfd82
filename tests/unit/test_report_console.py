"""The live console: plain lines word for word, and a terminal that is left as it was."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from areal_hpc.report import LiveConsole
from areal_hpc.report.progress import Progress
from areal_hpc.report.text import duration, size
from areal_hpc.telemetry import Record


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(kind: str, time: float = 0.0, index: int = 0, **values: Any) -> Record:
    return Record(time=time, role="trainer", index=index, epoch=1, kind=kind, values=values)


def full_step(number: int) -> Record:
    return record(
        "step",
        time=20.0 * number,
        step=number,
        version=number,
        reward_mean=number / 8,
        staleness_mean=0.75,
        staleness_max=2,
        train_tokens_per_s=2345.6,
        ring_fill=0.5,
        ring_dropped_filtered=1234,
        ring_dropped_failed=0,
        ring_dropped_stale=number,
        ring_dropped_newer=0,
    )


def lines_of(records: list[Record], clock: Iterator[float]) -> list[str]:
    stream = io.StringIO()
    with LiveConsole(100, stream, clock=clock.__next__) as console:
        console.feed(records)
    return stream.getvalue().splitlines()


def test_one_plain_line_a_step_word_for_word() -> None:
    records = [
        record("generation", index=0, version=0, tokens_per_s=1000.0),
        record("generation", index=1, version=0, tokens_per_s=234.4),
        full_step(1),
        record("evaluation", step=1, reward_mean=0.3125, samples=64),
        full_step(2),
    ]
    assert lines_of(records, clock=count(0.0, 1.0)) == [
        "step 1/100 | reward 0.125 (mean 0.125) | eval - | staleness 0.75 max 2 | tokens/s 1,234 gen 2,346 train"
        " | ring 50% | dropped 1,234 filtered, 0 failed, 1 stale | version 1 | 0:00:03 elapsed, - left",
        "evaluation 0.3125 at step 1",
        "step 2/100 | reward 0.25 (mean 0.1875) | eval 0.3125 at step 1 | staleness 0.75 max 2"
        " | tokens/s 1,234 gen 2,346 train | ring 50% | dropped 1,234 filtered, 0 failed, 2 stale"
        " | version 2 | 0:00:05 elapsed, 0:32:40 left",
    ]


def test_what_was_not_recorded_is_a_dash() -> None:
    assert lines_of([record("step", step=1)], clock=count(0.0, 1.0)) == [
        "step 1/100 | reward - (mean -) | eval - | staleness - max - | tokens/s - gen - train | ring - | dropped -"
        " | version - | 0:00:01 elapsed, - left"
    ]


def test_I15_values_that_are_no_numbers_are_a_dash() -> None:
    odd = record("step", step=1, reward_mean={"accuracy": 1.0}, staleness_mean=None, ring_fill="full", version=True)
    (line,) = lines_of([odd, record("step", step=None), record("step", step="x")], clock=count(0.0, 1.0))
    assert line.startswith("step 1/100 | reward - (mean -) | eval - | staleness - max -")
    assert lines_of([record("evaluation", reward_mean={})], clock=count(0.0, 1.0)) == ["evaluation - at step -"]


def test_what_was_started_again_is_a_line_and_a_row() -> None:
    def restart(process: str, reason: str, pause_s: float, epoch: int = 1) -> Record:
        values = {"process": process, "reason": reason, "pause_s": pause_s}
        return Record(time=0.0, role="launcher", index=0, epoch=epoch, kind="restart", values=values)

    records = [
        restart("generator-0", "generator-0 ended with signal 9 (SIGKILL)", 0.0),
        restart("generator-0", "generator-0 ended with exit code 1", 1.0),
        restart("run", "trainer-0 ended with signal 11 (SIGSEGV)", 0.0, epoch=4),
    ]
    assert lines_of(records, clock=count(0.0, 1.0)) == [
        "generator-0 ended with signal 9 (SIGKILL); it is started again",
        "generator-0 ended with exit code 1; it is started again in 1 s",
        "trainer-0 ended with signal 11 (SIGSEGV); attempt 4 goes on from the newest checkpoint",
    ]
    progress = Progress(100)
    assert "restarts" not in progress.fields()
    for one in records:
        progress.feed(one)
    assert progress.fields()["restarts"] == "generator-0 2, run 1"


def test_E17_a_run_without_records_prints_nothing() -> None:
    assert lines_of([], clock=count(0.0, 1.0)) == []


def group(outcome: str, reason: str = "") -> Record:
    return record("group", outcome=outcome, reason=reason)


def test_when_every_group_is_dropped_it_is_said_while_it_happens() -> None:
    filtered, failed = group("filtered", "zero_variance"), group("failed", "RewardError")
    assert lines_of([group("sealed"), *[filtered] * 31, group("sealed"), *[filtered] * 31], count(0.0, 1.0)) == []
    lines = lines_of([*[filtered] * 20, *[failed] * 120], count(0.0, 1.0))
    assert lines == [
        f"warning: no group was kept of the last {row} ({parts}); look at the reward and rollout.filter"
        for row, parts in (
            (32, "20 filtered: zero_variance, 12 failed: RewardError"),
            (64, "44 failed: RewardError, 20 filtered: zero_variance"),
            (128, "108 failed: RewardError, 20 filtered: zero_variance"),
        )
    ]


def test_a_warning_ends_with_the_next_group_that_is_kept_and_may_come_again() -> None:
    filtered = [group("filtered", "overlong")] * 32
    lines = lines_of([*filtered, group("sealed"), *filtered], count(0.0, 1.0))
    assert [line.split(";")[0] for line in lines] == [
        "warning: no group was kept of the last 32 (32 filtered: overlong)"
    ] * 2


def test_a_terminal_shows_the_warning_while_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with LiveConsole(100, terminal, clock=count(0.0, 1.0).__next__) as console:
        console.feed([group("filtered", "overlong")] * 32)
        assert "no group was kept of the last 32 (32 filtered: overlong)" in terminal.getvalue()
        told = len(terminal.getvalue())
        console.feed([group("sealed")])
        assert "no group was kept" not in terminal.getvalue()[told:]


def test_a_burst_of_steps_is_a_few_lines_a_second_and_ends_with_the_last() -> None:
    records = [record("step", step=step) for step in range(1, 1001)]
    lines = lines_of(records, clock=count(0.0, 0.001))
    assert len(lines) <= 2 + 2 * 4, "two seconds of the clock"
    assert lines[-1].startswith("step 1,000/100 ")


def test_plain_output_is_ascii_without_escapes() -> None:
    text = "\n".join(lines_of([full_step(step) for step in range(1, 20)], clock=count(0.0, 1.0)))
    assert text.isascii()
    assert text.replace("\n", "").isprintable()


def test_a_terminal_shows_a_table_and_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    with LiveConsole(100, terminal, clock=count(0.0, 1.0).__next__) as console:
        console.feed([full_step(1), full_step(2)])
    text = terminal.getvalue()
    for part in ("step 2 of 100", "0.25 (mean of 10: 0.1875)", "mean 0.75, max 2", "2,346 tokens/s", "0:32:40"):
        assert part in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"


def test_a_terminal_is_left_as_it_was_when_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with pytest.raises(RuntimeError, match="lost"), LiveConsole(100, terminal):
        raise RuntimeError("lost")
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")


def test_what_the_newest_weights_saved_is_told_where_only_changes_are_sent() -> None:
    progress = Progress(100)
    for saved, text in (({}, ""), ({"weight_bytes": 20, "weight_bytes_saved": 60}, ", 75% of its bytes saved")):
        progress.feed(record("step", step=1, version=7, **saved))
        assert progress.fields()["weights"] == f"version 7{text}"


def test_what_the_ring_holds_of_its_quota_is_told_where_there_is_one() -> None:
    progress = Progress(100)
    for gauges, text in (({}, ""), ({"ring_max_bytes": 64 << 20}, ", 48.0 MiB of 64.0 MiB")):
        progress.feed(record("step", step=1, ring_fill=0.5, ring_bytes=48 << 20, **gauges))
        assert progress.fields()["ring"] == f"50% full{text}"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (5000 << 40, "5,000.0 TiB")],
)
def test_sizes(num_bytes: int | None, text: str) -> None:
    assert size(num_bytes) == text


def test_the_moving_mean_is_over_ten_steps() -> None:
    progress = Progress(100)
    for step in range(1, 31):
        progress.feed(record("step", step=step, reward_mean=step))
    assert progress.reward_moving == 25.5  # mean of 21 ... 30


def test_the_remaining_time_follows_the_last_ten_steps() -> None:
    progress = Progress(100)
    for step in range(1, 41):
        progress.feed(record("step", time=100.0 * step if step <= 20 else 2000.0 + 3.0 * (step - 20), step=step))
    assert progress.remaining_s == pytest.approx(3.0 * 60)


def test_a_first_step_estimates_by_its_own_time() -> None:
    progress = Progress(100)
    assert progress.remaining_s is None
    progress.feed(record("step", step=1, seconds_step=2.0))
    assert progress.remaining_s == 198.0


def test_an_engine_that_fell_silent_no_longer_counts() -> None:
    progress = Progress(100)
    progress.feed(record("generation", time=0.0, index=0, tokens_per_s=100.0))
    progress.feed(record("generation", time=10.0, index=1, tokens_per_s=10.0))
    assert progress.generation_rate == 110.0
    progress.feed(record("generation", time=31.0, index=1, tokens_per_s=20.0))
    assert progress.generation_rate == 20.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0, "0:00:00"), (-5, "0:00:00"), (59.6, "0:01:00"), (3723, "1:02:03"), (90061, "1 d 1:01:01")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_samples_that_fail_are_told_at_once_and_each_time_that_their_number_has_doubled() -> None:
    failures = [record("failure", error="RewardRaised", message=f"é\x1b[2J {number}") for number in range(1, 6)]
    assert lines_of(failures, clock=count(0.0, 1.0)) == [
        f"warning: {what} failed so far, the last by RewardRaised: \\xe9\\x1b[2J {number}"
        for number, what in ((1, "1 sample"), (2, "2 samples"), (4, "4 samples"))
    ]


def test_a_terminal_shows_the_last_failure() -> None:
    terminal = Terminal()
    with LiveConsole(100, terminal) as console:
        console.feed([record("failure", error="RewardRaised", message="why not")])
    assert "1 sample failed so far, the last by RewardRaised: why not" in terminal.getvalue()
