"""A long kill storm on whole runs: any role, at random instants, from the command line as a person starts it.

    PYTHONPATH=.:tests:tests/benchmarks python tests/benchmarks/kill_storm.py --kills 1000 [--seed 1] [--directory DIR]

With a directory the storm can be broken off, and the same command goes on with it. ``tests/storm.py`` says whom it
kills and when. Exits with 1 where something was lost, trained twice, or did not resume. Reports how long the first
optimizer step takes after a restart: in all, and without what comes before the trainer's start record (interpreters,
imports, loading the model), which is the overhead of our own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe
from storm import blow
from storm_terms import How
from tiny_models import make_model

RESULT = Path(__file__).with_suffix(".json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--how", type=How, choices=list(How), default=How.PROCESSES)
    options = parser.parse_args()
    machine = describe()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="storm-"))
    directory.mkdir(parents=True, exist_ok=True)
    model = directory / "model"
    if not model.exists():
        make_model(model, "qwen3", 1, hidden_size=32, intermediate_size=48, initializer_range=0.06)
    facts = blow(directory, model, options.kills, options.seed, options.how)
    results: dict[str, Any] = json.loads(RESULT.read_bytes()) if RESULT.exists() else {}
    results[options.how] = {"machine": {**machine, "load_at_end": round(os.getloadavg()[0], 2)}, **facts}
    RESULT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(facts)))
    return 0 if facts["proof"]["proven"] and not facts["failures"] else 1


def table(facts: dict[str, Any]) -> list[str]:
    """The findings, a line each."""
    rows = {
        "kills": f"{facts['kills']} in {facts['seconds']:.0f} s, {facts['attempts']} attempts",
        "of": _counts(facts["kills_by_victim"]),
        "in": _counts(facts["kills_by_phase"]),
        "lost": str(facts["lost"]),
        "trained twice": str(facts["twice"]),
        "failed resumes": str(facts["failed_resumes"]),
        "steps": f"{facts['proof']['steps']}, and {facts['proof']['steps_taken_back']} taken back",
        "data epochs": f"{facts['proof']['finished_epochs']} finished",
        "restart to first step": _seconds(facts["seconds_to_first_step"]),
        "of it after loading": _seconds(facts["seconds_from_start_record"]),
    }
    width = max(map(len, rows))
    return [f"{name:<{width}}  {text}" for name, text in rows.items()]


def _counts(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(numbers.items()))


def _seconds(values: dict[str, float] | None) -> str:
    return "-" if values is None else f"median {values['median']:.1f} s, p95 {values['p95']:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
