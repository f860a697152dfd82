"""The report of a run: a table for the person who asked, and summary.json, curves.png and curves.svg beside the run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, TextIO

import yaml

from areal_hpc.errors import RunDirError
from areal_hpc.fs import publish, publish_json
from areal_hpc.report.curves import draw
from areal_hpc.report.summary import Summary, summarise
from areal_hpc.report.text import MISSING, count, duration, number, one_line, percent, size
from areal_hpc.report.usage import usage_of, usage_rows
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Record, RecordReader

ROLES = ("trainer", "evaluator", "rollout", "launcher")
"""Whose records the summary is made of; an engine's are one a second and say nothing of the whole."""
ALWAYS_TOLD = ("sealed", "filtered", "failed", "stale")
"""What became of groups in every run; the rest is told where it happened."""


def write_report(run: RunDir, stream: TextIO | None = None, *, ask: bool = False) -> Summary:
    """Read the records of all attempts, write the three files, print the table to ``stream`` (default: stdout).

    ``ask``: ask Slurm's accounts for what the run's files do not tell.
    """
    readers = [RecordReader(attempt.telemetry, ROLES) for attempt in run.all_attempts()]
    summary = summarise(_all(readers))
    config = configuration(run)
    bound = config.get("buffer", {}).get("max_staleness")
    total_steps = config.get("trainer", {}).get("total_steps")
    evaluations = [
        {name: value for name, value in asdict(evaluation).items() if value is not None}
        for evaluation in summary.evaluations
    ]
    usage = usage_of(run, summary, ask=ask)
    used = {} if usage is None else {"usage": usage.facts(summary.facts())}
    publish_json(run.summary, {**summary.facts(), **used, "evaluations": evaluations})
    for suffix, data in draw(summary, bound).items():
        publish(run.curves(suffix), data)
    rows = table(summary, total_steps, bound)
    if usage is not None:
        rows += usage_rows(usage, used["usage"])
    if num_damaged := sum(reader.num_damaged for reader in readers):
        rows.append(("damaged records", f"{num_damaged} lines could not be read and are left out"))
    rows += [("next", text) for text in next_steps(summary, run)]
    rows.append(("written", f"{run.summary.name}, {run.curves('png').name}, {run.curves('svg').name} in {run.root}"))
    print_rows(f"run {run.root.name}", rows, stream or sys.stdout)
    return summary


def _all(readers: list[RecordReader]) -> Iterator[Record]:
    for reader in readers:
        yield from reader.poll()


def configuration(run: RunDir) -> dict[str, Any]:
    """The run's configuration as plain data; empty where there is none.

    Not as ``Config``: a key that has gone since must not hide an old run.

    Raises:
        RunDirError: it is no configuration any more.
    """
    if not run.config.is_file():
        return {}
    try:
        values = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError):
        values = None
    if not isinstance(values, dict):
        raise RunDirError(f"{run.config} is damaged; restore it, every checkpoint of the run holds a copy")
    return values


def table(summary: Summary, total_steps: int | None, staleness_bound: int | None) -> list[tuple[str, str]]:
    """The summary as (name, text) rows."""
    facts: dict[str, Any] = summary.facts()
    if summary.is_offline:
        return _offline_table(summary, facts, total_steps)
    groups = [
        f"{name} {count(number)}"
        for name, number in summary.group_counts().items()
        if number is not None and (number or name in ALWAYS_TOLD)
    ]
    return [
        *_course(summary, facts, total_steps),
        ("reward", f"{number(facts['reward_first'])} (first 10 steps) to {number(facts['reward_last'])} (last 10)"),
        *([("evaluation", _evaluation_text(facts))] if summary.evaluations else []),
        *([("not evaluated", _failed_text(summary.failed_evaluations))] if summary.failed_evaluations else []),
        (
            "staleness",
            f"mean {number(facts['staleness_mean'])}, max {number(facts['staleness_max'])},"
            f" bound {number(staleness_bound)}",
        ),
        ("log-prob gap", f"mean {number(facts['logprob_gap_mean'])} nats per token"),
        ("tokens kept", f"{percent(facts['kept_fraction_mean'])}, clipped {percent(facts['clip_fraction_mean'])}"),
        ("tokens", f"{count(facts['tokens_trained'])} trained, {count(facts['tokens_generated'])} of them generated"),
        ("speed", f"{count(facts['tokens_trained_per_s'])} tokens trained per second"),
        (
            "time",
            f"{duration(facts['seconds'])} in steps: {percent(facts['train_share'])} training,"
            f" {percent(facts['wait_share'])} waiting, {percent(facts['publish_share'])} publishing weights;"
            f" generation paused {percent(facts['paused_share'])}",
        ),
        *([("weights", _weights_text(facts))] if facts["weight_bytes"] is not None else []),
        *([("ring", _ring_text(facts))] if facts["ring_max_bytes"] is not None else []),
        ("groups", ", ".join(groups) or MISSING),
    ]


def _ring_text(facts: Mapping[str, Any]) -> str:
    """The most that the ring held at a step's end, of what it may."""
    return f"at most {size(facts['ring_bytes_most'])} of {size(facts['ring_max_bytes'])} held"


def _weights_text(facts: Mapping[str, Any]) -> str:
    """What the engines were sent, and what sending only changes has saved."""
    sent, saved = facts["weight_bytes"], facts["weight_bytes_saved"]
    told = "" if saved is None else f", {percent(saved / max(1.0, sent + saved))} of its bytes saved"
    return f"{size(sent)} sent to each engine{told}"


def _course(summary: Summary, facts: Mapping[str, Any], total_steps: int | None) -> list[tuple[str, str]]:
    return [
        ("outcome", facts["outcome"] or "not recorded; `areal-hpc status` tells whether it still runs"),
        ("attempts", _attempts_text(summary)),
        *([("restarts", _restarts_text(summary))] if summary.restarts else []),
        ("steps", f"{count(facts['last_step'])} of {count(total_steps)}"),
    ]


def _offline_table(summary: Summary, facts: Mapping[str, Any], total_steps: int | None) -> list[tuple[str, str]]:
    """What there is to tell where nothing was generated."""
    accuracy = facts["evaluation_accuracy_last"]
    return [
        *_course(summary, facts, total_steps),
        ("loss", f"{number(facts['loss_first'])} (first 10 steps) to {number(facts['loss_last'])} (last 10)"),
        (
            "evaluation",
            f"loss {_evaluation_text(facts)}" + ("" if accuracy is None else f"; accuracy {number(accuracy)}"),
        ),
        ("tokens", f"{count(facts['tokens_trained'])} trained"),
        ("speed", f"{count(facts['tokens_trained_per_s'])} tokens trained per second"),
        ("time", f"{duration(facts['seconds'])} in steps: {percent(facts['train_share'])} training"),
    ]


def _attempts_text(summary: Summary) -> str:
    in_vain = summary.num_attempts_in_vain
    text = f"{summary.num_attempts}, {summary.num_steps_taken_back} steps taken back by restarts"
    if summary.outcome != "failed" or in_vain < 2:
        return text
    return f"{text}; the last {in_vain} in a row made no step"


def _restarts_text(summary: Summary) -> str:
    return ", ".join(f"{process} {times}" for process, times in sorted(summary.restarts.items()))


def _evaluation_text(facts: Mapping[str, Any]) -> str:
    return (
        f"first {number(facts['evaluation_first'])}, last {number(facts['evaluation_last'])},"
        f" best {number(facts['evaluation_best'])} at step {count(facts['evaluation_best_step'])}"
    )


def _failed_text(failed: Mapping[int, str]) -> str:
    steps = ", ".join(map(count, failed))
    return f"step{'s' if len(failed) > 1 else ''} {steps}: {one_line(failed[max(failed)])}"


def next_steps(summary: Summary, run: RunDir) -> Iterator[str]:
    """What a person may want to do now, one command a line."""
    if summary.outcome == "failed":
        yield f"`areal-hpc why {run.typed}` tells who waited for whom when it ended"
    if summary.outcome in ("failed", "stopped", "aborted"):
        yield f"`areal-hpc resume {run.typed}` goes on from the newest checkpoint"
    if summary.num_attempts > 1 and summary.steps.size:
        yield f"`areal-hpc ledger {run.typed}` proves that no prompt was lost or trained on twice"


def print_rows(title: str, rows: list[tuple[str, str]], stream: TextIO) -> None:
    if stream.isatty():
        _print_table(title, rows, stream)
        return
    width = max(len(name) for name, _ in rows)
    lines = [title, *(f"  {name:<{width}}  {text}" for name, text in rows)]
    stream.write("\n".join(lines) + "\n")


def _print_table(title: str, rows: list[tuple[str, str]], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(title), title_justify="left", show_header=False)
    drawn.add_column(style="cyan", no_wrap=True)
    drawn.add_column()
    for name, text in rows:
        drawn.add_row(Text(name), Text(text))
    Console(file=stream).print(drawn)
