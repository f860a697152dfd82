"""What deterministic training costs, and whether it keeps its promise.

    PYTHONPATH=. python tests/benchmarks/deterministic.py [--steps 12]
        the quickstart's first steps with and without it, one after the other; only the ratio means something
    PYTHONPATH=.:tests:tests/benchmarks python tests/benchmarks/deterministic.py --kills 20 [--seed 1]
        a run that is killed so often, any role, the launcher or everything, and continued each time in another shape,
        against the same run undisturbed: the same weights, moments and rows, or exit code 1

Prints what it found and writes it into ``deterministic.json`` beside itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from machine import describe

from areal_hpc.run_dir import RunDir
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


VICTIMS = ("everything", "launcher", "trainer-0", "generator-0", "rollout-0", "rollout-1")
WORKERS = "rollout.workers=2"


def compare_killed(directory: Path, kills: int, seed: int) -> dict[str, Any]:
    """Two runs of one experiment, one of which is killed ``kills`` times."""
    from bit_identity import WORDS, learned, rows, run_with_kills
    from launched import launched
    from tiny_models import make_model

    model, steps = directory / "model", 2 * kills + 4  # a step or two between kills
    make_model(model, "qwen3", 1, hidden_size=32, intermediate_size=48, initializer_range=0.06)
    words = (*WORDS, WORKERS, f"trainer.total_steps={steps}")
    with launched(directory, model, *words, name="undisturbed") as started:
        assert started.wait(limit_s=1800.0) == 0, started.text
    victims = random.Random(seed).choices(VICTIMS, k=kills)
    began = time.monotonic()
    killed = run_with_kills(directory, model, (WORKERS,), victims, seed, steps)
    return {
        "kills": kills,
        "kills_by_victim": dict(Counter(victims)),
        "attempts": len(killed.all_attempts()),
        "steps": steps,
        "same_rows": rows(killed) == rows(started.run),
        "same_bits": learned(killed, steps) == learned(started.run, steps),
        "sha256": learned(killed, steps),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    path = Path(__file__).with_suffix(".json")
    document = json.loads(path.read_bytes()) if path.exists() else {}
    described = describe()
    if options.kills:
        with tempfile.TemporaryDirectory() as directory:
            found = compare_killed(Path(directory), options.kills, options.seed)
        document["killed"] = {"machine": described, **found}
        print("\n".join(f"{name:16}{value}" for name, value in found.items()))
    else:
        document |= {"machine": described, "steps": options.steps, "medians": measure_all(options.steps)}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if not options.kills or (found["same_rows"] and found["same_bits"]) else 1


def measure_all(steps: int) -> dict[str, dict[str, float]]:
    """Every shape, with its speed as a share of the first one's; prints a table."""
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
    return shapes


if __name__ == "__main__":
    sys.exit(main())
