"""What asynchrony is worth: the same run at equal resources, once with ``buffer.max_staleness=0``, once with more.

    PYTHONPATH=.:tests:tests/benchmarks python tests/benchmarks/async_vs_sync.py [--staleness 0 2] [--repeats 2]

One engine of one thread and one trainer of one thread: two busy processes, so two cores that nobody else uses. Answers
have exact lengths, ``ignore_eos`` up to a limit that each prompt draws from a log-normal (median 48 tokens, at most 8
times that), the same in every run; weights are random and the reward says nothing, for only the clock matters. The runs
of a repetition follow each other, in every second one the other way round, so that a drift of the machine hits all.

What limits the ratio. With g seconds of generation and t of training a step, synchronous training takes g + t, perfect
overlap max(g, t): at most 2 times faster, and that only where g = t. Two effects move the bound. Waiting for the
longest answer leaves a synchronous engine with a batch of a few sequences most of the time; an asynchronous one fills
the places with answers for the steps to come, so its g is smaller and the ratio may pass 2. And on two cores the
rollout worker, the reward process and the launcher live off the same two, which costs the run more that keeps both
busy. Tokens a second is the figure to compare: over a few steps short answers overtake long ones, which flatters
steps a second.

Writes ``async_vs_sync.json``, ``.png`` and ``.svg`` beside this file and prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from areal_hpc.protocols import Episode
from areal_hpc.rollout.workflows import SingleTurn
from areal_hpc.types import Prompt, Trajectory

ROOT = Path(__file__).resolve().parents[2]
MEDIAN, SIGMA, SHORTEST, LONGEST = 48, 0.9, 4, 384
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
}
CONFIG: Mapping[str, Any] = {
    "model": {"max_tokens": 480},
    "prompts": {"train": "areal_hpc.tasks.sort_digits:SortDigits"},
    "rollout": {
        "workflow": "async_vs_sync:SkewedLengths",
        "reward": "async_vs_sync:reward",
        "group_size": 4,
        "concurrency": 64,
        "sampling": {"max_new_tokens": LONGEST},
        "filter": {"zero_variance": False},
    },
    "algorithm": {"name": "grpo", "groups_per_step": 4},
    "trainer": {"tokens_per_microbatch": 4096, "optimizer": {"lr": 1e-6}, "threads": 1},
    "generation": {"max_running": 256, "threads": 1},
    "checkpoint": {"every_steps": 1000},
}
RUN_LIMIT_S = 1200.0
COLUMNS = (
    "max_staleness",
    "repeat",
    "steps_per_s",
    "trained_tok_s",
    "generated_tok_s",
    "trainer_idle",
    "engine_idle",
    "sequences",
    "staleness_mean",
)


class SkewedLengths(SingleTurn):
    """A single turn whose answer is exactly as long as the prompt's place in the stream says."""

    async def run(self, prompt: Prompt, episode: Episode) -> Sequence[Trajectory]:
        sampling = replace(episode.sampling, max_new_tokens=length(prompt.position), ignore_eos=True)
        return await super().run(prompt, replace(episode, sampling=sampling))


def length(position: int) -> int:
    """Tokens of every answer to the prompt at ``position``."""
    drawn = MEDIAN * random.Random(position).lognormvariate(0.0, SIGMA)
    return min(LONGEST, max(SHORTEST, round(drawn)))


def reward(text: str, _answer: str, _prompt: Prompt | None = None) -> float:
    """Noise that differs within a group, so that there is a gradient."""
    return float(len(text) % 2)


def run(root: Path, max_staleness: int, repeat: int, steps: int, warmup: int) -> dict[str, Any]:
    """One run through the command line; its row of the table."""
    import yaml

    name = f"lag-{max_staleness}-{repeat}"
    config = {**CONFIG, "name": name, "run_root": str(root), "buffer": {"max_staleness": max_staleness}}
    config = {**config, "model": {**CONFIG["model"], "path": str(root / "model")}}
    config = {**config, "trainer": {**CONFIG["trainer"], "total_steps": warmup + steps}}
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}
    command = [sys.executable, "-m", "areal_hpc", "run", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{name}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return {"max_staleness": max_staleness, "repeat": repeat, **figures(root / name, warmup)}


def figures(run_dir: Path, warmup: int) -> dict[str, float]:
    """What the records say of the steps after the warm-up."""
    telemetry = run_dir / "attempts/00000001/telemetry"
    steps = [r for r in _records(telemetry / "trainer-0.jsonl") if r["kind"] == "step"]
    began, ended, counted = steps[warmup - 1]["time"], steps[-1]["time"], steps[warmup:]
    seconds = ended - began
    engine = [r for r in _records(telemetry / "generator-0.jsonl") if r["kind"] == "generation"]
    engine = [r for r in engine if began <= r["time"] <= ended]
    generated = (engine[-1]["tokens"] - engine[0]["tokens"]) / (engine[-1]["time"] - engine[0]["time"])
    return {
        "steps_per_s": round(len(counted) / seconds, 3),
        "trained_tok_s": round(sum(r["tokens_trained"] for r in counted) / seconds, 1),
        "generated_tok_s": round(generated, 1),
        "trainer_idle": round(sum(r["seconds_wait"] for r in counted) / seconds, 3),
        "engine_idle": round(mean(r["running"] == 0 for r in engine), 3),  # looked at once a second
        "sequences": round(mean(r["running"] for r in engine), 1),
        "staleness_mean": round(mean(r["staleness_mean"] for r in counted), 2),
        "seconds_train": round(mean(r["seconds_train"] for r in counted), 3),
        "seconds_publish": round(mean(r["seconds_publish"] for r in counted), 3),
    }


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """For each bound its speed against the smallest bound's of the same repetition."""
    first = min(row["max_staleness"] for row in rows)
    at_first = {row["repeat"]: row for row in rows if row["max_staleness"] == first}
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for figure in ("steps_per_s", "trained_tok_s"):
            ratio = row[figure] / at_first[row["repeat"]][figure]
            found.setdefault(str(row["max_staleness"]), {}).setdefault(figure, []).append(round(ratio, 2))
    return found


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Bars of the mean trained tokens a second, a dot for each run, a line through those of one repetition."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    bounds = sorted({row["max_staleness"] for row in rows})
    in_order = sorted(rows, key=lambda row: row["repeat"])
    speeds = [[row["trained_tok_s"] for row in in_order if row["max_staleness"] == bound] for bound in bounds]
    figure, axes = pyplot.subplots(figsize=(4.5, 3.2), layout="constrained")
    axes.bar(range(len(bounds)), [mean(speed) for speed in speeds], width=0.6, color="#4c78a8")
    for pair in zip(*speeds, strict=True):
        axes.plot(range(len(bounds)), pair, "o-", color="#222222", markersize=4, linewidth=0.8)
    axes.set_xticks(range(len(bounds)), [f"{bound}\nsynchronous" if bound == 0 else str(bound) for bound in bounds])
    axes.set(xlabel="buffer.max_staleness", ylabel="trained tokens / s", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    for suffix in ("png", "svg"):
        figure.savefig(path.with_suffix(f".{suffix}"), dpi=150)


def main() -> None:
    from machine import describe
    from tiny_models import make_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of one run")
    parser.add_argument("--warmup", type=int, default=5)
    options = parser.parse_args()
    machine, rows = describe(), []
    print("  ".join(f"{column:>15}" for column in COLUMNS))
    with tempfile.TemporaryDirectory(prefix="areal-async-") as root:
        model = make_model(Path(root) / "model", "qwen3", 0, **SHAPE)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        for repeat in range(options.repeats):
            for bound in options.staleness if repeat % 2 == 0 else reversed(options.staleness):
                rows.append(run(Path(root), bound, repeat, options.steps, options.warmup))
                print("  ".join(f"{rows[-1][column]!s:>15}" for column in COLUMNS), flush=True)
    result = {
        "machine": machine,
        "config": CONFIG,
        "model": {**SHAPE, "parameters": parameters},
        "lengths": {"median": MEDIAN, "sigma": SIGMA, "shortest": SHORTEST, "longest": LONGEST},
        "steps": options.steps,
        "warmup": options.warmup,
        "rows": rows,
        "ratios": ratios(rows),
    }
    path = Path(__file__)
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(rows, path)
    print(f"{parameters:,} parameters; {json.dumps(CONFIG)}")
    for bound, found in result["ratios"].items():
        print(f"max_staleness {bound}: {found['steps_per_s']} x steps/s, {found['trained_tok_s']} x trained tokens/s")


if __name__ == "__main__":
    main()
