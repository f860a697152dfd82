"""What training waits for at a checkpoint: the copy to host memory, against the whole of making it durable.

    PYTHONPATH=.:tests:tests/benchmarks python tests/benchmarks/checkpoint.py [--saves 5] [--directory DIR]

Both are taken from the same saves of the same state, so the ratio means something on a busy machine: weights and both
moments of a model of 27 million parameters. Writes ``checkpoint.json`` beside this file and prints a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from machine import describe
from tiny_models import make_model

from areal_hpc.checkpoint import Keep, prune, write
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.schema import TrainerConfig
from areal_hpc.run_dir import RunDir
from areal_hpc.training.reference import ReferenceBackend
from areal_hpc.types import WeightVersion

SIZES = {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6}


def measure(directory: Path, num_saves: int) -> dict[str, float]:
    """Median seconds of the copy and of all, over saves after a first one that makes the host memory."""
    make_model(directory / "model", "qwen3", 0, **SIZES)
    backend = ReferenceBackend(
        model_path=str(directory / "model"),
        algorithm=AlgorithmConfig(),
        trainer=TrainerConfig(total_steps=1),
        temperature=1.0,
    )
    run, copies, wholes = RunDir.create(directory / "run"), [], []
    size = 0
    for step in range(num_saves + 1):
        began = time.perf_counter()
        save = backend.snapshot()
        copied = time.perf_counter()
        path = write(run, WeightVersion(1, step), save, {})
        prune(run, {1: None}, Keep(newest=1))
        ended = time.perf_counter()
        size = sum(file.stat().st_size for file in path.iterdir())
        if step:
            copies.append(copied - began)
            wholes.append(ended - began)
    copy_s, whole_s = statistics.median(copies), statistics.median(wholes)
    return {
        "state_mib": round(size / 2**20, 1),
        "saves": num_saves,
        "seconds_copy": round(copy_s, 4),
        "seconds_whole": round(whole_s, 4),
        "waited_share": round(copy_s / whole_s, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the file system to measure; by default a temporary one")
    options = parser.parse_args()
    machine = describe()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        found = measure(Path(directory), options.saves)
    report = {"machine": machine, **found}
    Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for name, value in found.items():
        print(f"{name:<14}  {value}")


if __name__ == "__main__":
    main()
