"""Evaluation results of the surviving history, which the evaluator and the retention of checkpoints go by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_hpc.buffer.epochs import lineage, read_start
from areal_hpc.fs import read_json
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion


def results(run: RunDir, epoch: int) -> dict[int, Mapping[str, Any]]:
    """By step, for attempt ``epoch``, which has said how it begins. What a restart took back is not among them: those
    weights are no longer this run's."""
    start = read_start(run, epoch)
    assert start is not None, "engines serve before the trainer said how the attempt begins"
    survives = lineage(run, epoch, start.parent)
    found = {step: read_json(run.evaluation(step)) for step in run.evaluated_steps()}
    return {step: result for step, result in found.items() if survives(WeightVersion(result["epoch"], step))}
