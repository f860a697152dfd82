"""What deterministic training costs: the quickstart's first steps with and without it, one after the other.

    PYTHONPATH=. python tests/benchmarks/deterministic.py [--steps 12]

Prints a table and writes ``deterministic.json`` beside itself. Only the ratio means something.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from machine import describe

from areal_hpc.fs import RunDir
from areal_hpc.tasks import tiny_model
from areal_hpc.telemetry import RecordReader

REPOSITORY = Path(__file__).resolve().parents[2]
SHAPES = {
    "asynchronous": (),
    "one sequence at a time": ("generation.max_running=1",),
    "deterministic": ("deterministic=true",),
    "deterministic, two engines": ("deterministic=true", "generation.replicas=2"),
}

KEYS = ("seconds_step", "seconds_wait", "seconds_train", "seconds_publish", "tokens_trained", "staleness_mean")


def measure(directory: Path, name: str, words: tuple[str, ...], steps: int) -> dict[str, float]:
    """Medians over the steps after the first two, which the ring's first filling shares."""
    common = [f"run_root={directory}", f"model.path={directory}/model", f"trainer.total_steps={steps}"]
    line = [sys.executable, "-m", "areal_hpc", "run", str(REPOSITORY / "configs" / "quickstart.yaml"), *common]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    quiet = ["evaluation.every_steps=0", f"name={name.replace(', ', '-').replace(' ', '-')}"]
    subprocess.run([*line, *quiet, *words], env=environment, check=True, stdout=subprocess.DEVNULL)
    run = RunDir(directory / quiet[1].removeprefix("name="))
    records = [r for r in RecordReader(run.attempt(1).telemetry, roles=("trainer",)).poll() if r.kind == "step"]
    values = {key: [record.number(key) or 0.0 for record in records[2:]] for key in KEYS}
    return {key: median(numbers) for key, numbers in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    steps, described = parser.parse_args().steps, describe()
    with tempfile.TemporaryDirectory() as directory:
        tiny_model.make(Path(directory) / "model", 1)
        shapes = {name: measure(Path(directory), name, words, steps) for name, words in SHAPES.items()}
    first = shapes["asynchronous"]
    for shape in shapes.values():
        rate = shape["tokens_trained"] / shape["seconds_step"]
        shape["speed_ratio"] = rate / (first["tokens_trained"] / first["seconds_step"])
    print(f"{'':28}" + "".join(f"{key:>17}" for key in (*KEYS, "speed_ratio")))
    for name, shape in shapes.items():
        print(f"{name:28}" + "".join(f"{shape[key]:17.3f}" for key in (*KEYS, "speed_ratio")))
    document = {"machine": described, "steps": steps, "medians": shapes}
    Path(__file__).with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
