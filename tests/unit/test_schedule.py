from __future__ import annotations

import pytest

from areal_hpc.config.schema import OptimizerConfig, Schedule
from areal_hpc.training.schedule import learning_rate

C11 = {"lr": 1.0, "warmup_steps": 22, "min_lr": 0.1}


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        (Schedule.LINEAR, 1, 1 / 22),
        (Schedule.LINEAR, 11, 0.5),
        (Schedule.LINEAR, 22, 1.0),
        (Schedule.LINEAR, 121, 0.55),  # half of the 198 steps that are left after the warm-up
        (Schedule.LINEAR, 198, 0.1 + 0.9 * 22 / 198),  # the defect had reached the end here
        (Schedule.LINEAR, 219, 0.1 + 0.9 / 198),
        (Schedule.LINEAR, 220, 0.1),
        (Schedule.LINEAR, 500, 0.1),
        (Schedule.COSINE, 22, 1.0),
        (Schedule.COSINE, 88, 0.1 + 0.9 * 0.75),  # a third of the way: (1 + cos 60 degrees) / 2
        (Schedule.COSINE, 121, 0.55),
        (Schedule.COSINE, 154, 0.1 + 0.9 * 0.25),
        (Schedule.COSINE, 220, 0.1),
        (Schedule.CONSTANT, 11, 0.5),
        (Schedule.CONSTANT, 23, 1.0),
        (Schedule.CONSTANT, 500, 1.0),
    ],
)
def test_C11_the_warm_up_is_counted_once(schedule: Schedule, step: int, expected: float) -> None:
    assert learning_rate(step, OptimizerConfig(schedule=schedule, **C11), 220) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_without_warm_up_the_first_step_is_near_the_peak(schedule: Schedule) -> None:
    first = learning_rate(1, OptimizerConfig(lr=1.0, schedule=schedule), 100)
    assert 0.98 < first <= 1.0


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_run_that_is_all_warm_up_never_divides_by_zero(schedule: Schedule) -> None:
    optimizer = OptimizerConfig(lr=1.0, warmup_steps=5, schedule=schedule)
    assert [learning_rate(s, optimizer, 5) for s in range(1, 6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert 0.0 <= learning_rate(6, optimizer, 5) <= 1.0
