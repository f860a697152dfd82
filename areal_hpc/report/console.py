"""The live console: a table that redraws itself on a terminal, plain lines anywhere else.

    with LiveConsole(config.trainer.total_steps, sys.stdout) as console:
        while the run goes on:
            console.feed(reader.poll())

Call ``feed`` several times a second, with or without records: that is what keeps the elapsed time moving.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Self, TextIO

from areal_hpc.report.drops import WARN_AFTER
from areal_hpc.report.progress import Progress, evaluation_text, restart_text, service_text
from areal_hpc.report.text import duration
from areal_hpc.telemetry import Record

if TYPE_CHECKING:
    from rich.console import RenderableType

INTERVAL_S = 0.25
"""Shortest time between two pictures or two plain lines, in seconds."""


class LiveConsole:
    """Shows the progress of an attempt from its records.

    Args:
        table: whether a terminal gets the table, which is of steps; else it gets the lines, too.
    """

    def __init__(
        self, total_steps: int, stream: TextIO, clock: Callable[[], float] = time.monotonic, *, table: bool = True
    ) -> None:
        self._progress = Progress(total_steps)
        self._clock = clock
        self._began = clock()
        self._view = _Table(stream) if table and stream.isatty() else _Lines(stream)
        self._shown = float("-inf")

    def __enter__(self) -> Self:
        self._view.open()
        return self

    def __exit__(self, *_: object) -> None:
        """Show the last state and leave the terminal as it was."""
        self._view.show(self._progress, self._clock() - self._began)
        self._view.close()

    def feed(self, records: Iterable[Record]) -> None:
        """Take in new records, then show what is due."""
        for record in records:
            self._progress.feed(record)
            self._view.note(record, self._progress)
            self._show_if_due()
        self._show_if_due()

    def _show_if_due(self) -> None:
        now = self._clock()
        if now - self._shown >= INTERVAL_S and self._view.show(self._progress, now - self._began):
            self._shown = now


class _Lines:
    """One line a step, an evaluation, a warning, and whatever was started again; no escape codes, ASCII only."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._has_news = False
        self._warn_at = WARN_AFTER

    def open(self) -> None:
        """Nothing to prepare."""

    def note(self, record: Record, progress: Progress) -> None:
        self._warn(progress)
        if record.kind == "evaluation":
            self._write(f"evaluation {evaluation_text(record)}")
        elif record.kind == "restart":
            self._write(restart_text(record))
        elif record.kind == "service":
            self._write(service_text(record))
        elif record.kind == "failure" and progress.drops.failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ...
            self._write(f"warning: {progress.drops.failure_text()}")
        self._has_news |= record.kind == "step" and record.number("step") is not None

    def _warn(self, progress: Progress) -> None:
        """At once when no group is kept any more, then each time that the row has doubled."""
        row = progress.drops.row
        if row >= self._warn_at:
            self._write(f"warning: {progress.drops.warning()}")
            self._warn_at = 2 * row
        elif row == 0:
            self._warn_at = WARN_AFTER

    def show(self, progress: Progress, elapsed_s: float) -> bool:
        """Write the line of the newest step unless it is written already; whether it wrote."""
        if not self._has_news:
            return False
        self._write(progress.line(elapsed_s))
        self._has_news = False
        return True

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing to put back."""


class _Table:
    """A table with a progress bar, redrawn in place."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(file=stream), auto_refresh=False)

    def open(self) -> None:
        self._live.start()

    def note(self, record: Record, progress: Progress) -> None:
        """Everything that the table shows is in the progress."""

    def show(self, progress: Progress, elapsed_s: float) -> bool:
        self._live.update(_picture(progress, elapsed_s), refresh=True)
        return True

    def close(self) -> None:
        self._live.stop()


def _picture(progress: Progress, elapsed_s: float) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    bar = Table.grid(padding=(0, 2))
    bar.add_row(
        Text(f"step {progress.step_text()}", style="bold"),
        ProgressBar(total=progress.total_steps, completed=progress.step or 0, width=30),
        Text(f"elapsed {duration(elapsed_s)}"),
        Text(f"remaining {duration(progress.remaining_s)}"),
    )
    facts = Table.grid(padding=(0, 2))
    for name, text in progress.fields().items():
        facts.add_row(Text(name, style="cyan"), Text(text))
    if failures := progress.drops.failure_text():
        facts.add_row(Text("failures", style="bold red"), Text(failures))
    if warning := progress.drops.warning():
        facts.add_row(Text("warning", style="bold red"), Text(warning))
    whole = Table.grid()
    whole.add_row(bar)
    whole.add_row(facts)
    return whole
