"""What an evaluation alone came to (``areal-hpc eval``): a table for the person who asked, and summary.json."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from areal_hpc.algorithms.pass_at_k import LEVEL, RESAMPLES, ks_of
from areal_hpc.fs import publish_json, read_json
from areal_hpc.report.files import configuration, print_rows, write_report
from areal_hpc.report.text import count, number, percent
from areal_hpc.run_dir import RunDir


def report_run(run: RunDir, stream: TextIO | None = None, *, ask: bool = False) -> None:
    """Tell what ``run`` came to, an evaluation or a training run (see ``write_report``), and write its files."""
    config = configuration(run)
    if config.get("evaluation", {}).get("checkpoint"):
        _report_evaluation(run, config, stream or sys.stdout)
    else:
        write_report(run, stream, ask=ask)


def _report_evaluation(run: RunDir, config: Mapping[str, Any], stream: TextIO) -> None:
    knobs = config["evaluation"]
    if knobs["step"] not in run.evaluated_steps():
        print_rows(f"evaluation {run.root.name}", [("result", "none: it was stopped, or has failed")], stream)
        return
    result = read_json(run.evaluation(knobs["step"]))
    if (reason := result.get("reason")) is not None:
        print_rows(f"evaluation {run.root.name}", [("result", f"failed: {reason}")], stream)
        return
    asked = {name: knobs[name] for name in ("checkpoint", "step", "temperature", "pass_reward")}
    publish_json(run.summary, {**asked, "data": config["prompts"]["eval"], "seed": config["seed"], **result})
    rows = [*evaluation_rows(result, config), ("written", f"{run.summary.name} in {run.root}")]
    print_rows(f"evaluation {run.root.name}", rows, stream)


def evaluation_rows(result: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The result of one evaluation as (name, text) rows."""
    knobs = config["evaluation"]
    of_run = config["model"]["path"] != knobs["checkpoint"]
    yield "checkpoint", f"step {knobs['step']} of {knobs['checkpoint']}" if of_run else knobs["checkpoint"]
    yield (
        "answers",
        f"{count(result['prompts'])} prompts of {config['prompts']['eval']}, {knobs['samples']} samples each at "
        f"temperature {number(knobs['temperature'])}; {count(result['failed'])} failed",
    )
    yield "reward", _with_interval(result, "reward_mean")
    for k in ks_of(knobs["samples"]):
        if f"pass_at_{k}" in result:
            yield f"pass@{k}", _with_interval(result, f"pass_at_{k}")
    enough = {k: sum(len(one["rewards"]) >= k for one in result["answers"]) for k in ks_of(knobs["samples"])}
    if left_out := [f"pass@{k} is of {count(n)} prompts" for k, n in enough.items() if n < result["prompts"]]:
        yield "left out", f"prompts with fewer samples than k: {', '.join(left_out)}"
    yield "intervals", f"{percent(LEVEL)}, from prompts drawn again {count(RESAMPLES)} times"


def _with_interval(result: Mapping[str, Any], name: str) -> str:
    return f"{number(result[name])} [{number(result[f'{name}_low'])}, {number(result[f'{name}_high'])}]"
