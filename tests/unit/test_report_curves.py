"""The figure: real image files, the same bytes each time, labels as text, and runs of no or one step."""

from __future__ import annotations

import struct
import subprocess
import sys
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from areal_hpc.report import Summary, summarise
from areal_hpc.report.curves import draw
from areal_hpc.telemetry import Record


def record(kind: str, epoch: int = 1, **values: Any) -> Record:
    return Record(time=1e9, role="trainer", index=0, epoch=epoch, kind=kind, values=values)


def run_of(num_steps: int) -> Summary:
    rng = np.random.default_rng(0)
    steps = [
        record(
            "step",
            1 if n < 20 else 2,
            step=n,
            reward_mean=rng.normal(),
            staleness_mean=rng.uniform(0, 2),
            staleness_max=2,
            logprob_gap=rng.uniform(0, 0.1),
        )
        for n in range(1, num_steps + 1)
    ]
    return summarise([*steps, *(record("evaluation", step=n, reward_mean=n / 7) for n in range(0, num_steps, 10))])


@pytest.fixture(scope="module")
def drawn() -> dict[str, bytes]:
    return draw(run_of(30), 3)


def texts(svg: bytes) -> set[str]:
    return {
        "".join(node.itertext()).strip() for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("}text")
    }


def test_every_label_is_text_in_the_svg(drawn: dict[str, bytes]) -> None:
    expected = {
        "Reward", "Staleness", "Training versus generation", "optimizer step", "mean reward per answer",
        "age of trained tokens", "(optimizer steps)", "mean |log-prob gap|", "(nats per token)", "each step",
        "mean of 10 steps", "evaluation", "oldest token", "bound (3)", "attempt begins", "1.43",
    }  # fmt: skip
    assert expected <= texts(drawn["svg"])


def test_the_same_run_gives_the_same_files(drawn: dict[str, bytes]) -> None:
    assert draw(run_of(30), 3) == drawn


def test_the_png_is_at_least_1000_pixels_wide(drawn: dict[str, bytes]) -> None:
    png = drawn["png"]
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width >= 1000
    assert height >= 1000


@pytest.mark.parametrize(("num_steps", "bound"), [(0, None), (0, 2), (1, 0)])
def test_E17_E18_runs_of_no_and_of_one_step_are_drawn(num_steps: int, bound: int | None) -> None:
    shown = texts(draw(run_of(num_steps), bound)["svg"])
    assert ("nothing recorded yet" in shown) == (num_steps == 0)
    assert (f"bound ({bound})" in shown) == (bound is not None)


def test_of_many_evaluations_only_first_best_and_last_are_written() -> None:
    values = [0.111, 0.222, 0.999, 0.333, 0.444, 0.555, 0.666, 0.777, 0.888]
    summary = summarise(record("evaluation", step=n, reward_mean=value) for n, value in enumerate(values))
    assert {"0.111", "0.999", "0.888"} == texts(draw(summary, None)["svg"]) & {f"{value:.3g}" for value in values}


def test_importing_the_report_loads_neither_matplotlib_nor_rich_nor_torch() -> None:
    code = "import sys, areal_hpc.report; sys.exit(bool({'matplotlib', 'rich', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
