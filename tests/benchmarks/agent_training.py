"""Does an agent that knows nothing of training learn through the service? OpenAI's agents SDK and its calculator.

    PYTHONPATH=.:tests:tests/benchmarks python tests/benchmarks/agent_training.py [--seeds 1 2 3]

For each seed the command line runs ``examples/agents/calculator.yaml`` with the example in ``openai_agents``, and makes
a model of that seed first: one that can call a calculator and seldom does. Held-out rewards count. Each finished seed
is kept in ``agent_training.json`` beside this file and not run again: break it off and start it again as you like, and
remove the file to begin anew. Draws ``agent_training.png`` as well, and exits with 1 if a seed gained less than 0.3.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import describe

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_suffix(".json")
AGENTS = ROOT / "examples" / "agents"
LAYERS = (ROOT / "configs" / "quickstart.yaml", AGENTS / "calculator.yaml")
GAIN = 0.3
RUN_LIMIT_S = 3600.0
COLUMNS = ("seed", "first", "last", "gain", "steps", "seconds", "model_s", "turns", "logprob_gap", "load")
COLOURS = ("#0072B2", "#D55E00", "#009E73")


def run(seed: int, root: Path) -> dict[str, Any]:
    """One run; its row.

    Raises:
        RuntimeError: the command failed; its last lines are in the message.
    """
    name, model = f"seed-{seed}", root / f"model-{seed}"
    words = [f"name={name}", f"seed={seed}", f"run_root={root}", f"model.path={model}"]
    began, began_wall = time.monotonic(), time.time()
    done = subprocess.run(
        [sys.executable, "-m", "areal_hpc", "run", *map(str, LAYERS), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(AGENTS / "openai_agents")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"seed {seed}: exit code {done.returncode}\n" + "\n".join(done.stdout.splitlines()[-15:]))
    facts = json.loads((root / name / "summary.json").read_text(encoding="utf-8"))
    steps, attempts = told(root / name, "trainer", "step"), told(root / name, "rollout", "agent")
    return {
        "seed": seed,
        "first": round(facts["evaluation_first"], 3),
        "last": round(facts["evaluation_last"], 3),
        "gain": round(facts["evaluation_last"] - facts["evaluation_first"], 3),
        "steps": facts["last_step"],
        "seconds": round(time.monotonic() - began, 1),
        "model_s": round((model / "config.json").stat().st_mtime - began_wall, 1),
        "turns": round(statistics.fmean(one["turns"] for one in attempts), 2),
        "forks": sum(one["fork"] for one in attempts),
        "logprob_gap": round(facts["logprob_gap_mean"], 4),
        "load": round(os.getloadavg()[0], 1),
        "evaluations": {str(one["step"]): round(one["reward_mean"], 3) for one in facts["evaluations"]},
        "rewards": [round(one["reward_mean"], 3) for one in steps],
    }


def told(run: Path, role: str, kind: str) -> list[dict[str, Any]]:
    """Records of one kind in the order in which a role wrote them."""
    files = sorted(run.glob(f"attempts/*/telemetry/{role}-*.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["kind"] == kind]


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Each step's mean reward as a line, held-out rewards as marks; a colour for each seed."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.subplots()
    for row, colour in zip(rows, itertools.cycle(COLOURS), strict=False):
        axes.plot(range(1, row["steps"] + 1), row["rewards"], color=colour, linewidth=1, label=f"seed {row['seed']}")
        steps, rewards = [int(step) for step in row["evaluations"]], list(row["evaluations"].values())
        axes.plot(steps, rewards, "o", color=colour)
    axes.set(xlabel="step", ylabel="reward (dots: held out)", ylim=(0, 1))
    axes.set_title("An unmodified openai-agents agent learns to use its calculator")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    seeds = parser.parse_args().seeds
    machine = {**describe(), "openai-agents": version("openai-agents")}
    result = json.loads(RESULTS.read_bytes()) if RESULTS.exists() else {"machine": machine, "rows": []}
    rows: list[dict[str, Any]] = result["rows"]
    print("  ".join(f"{column:>12}" for column in COLUMNS))
    with tempfile.TemporaryDirectory(prefix="areal-agent-training-") as root:
        for seed in seeds:
            if all(row["seed"] != seed for row in rows):
                rows.append(run(seed, Path(root)))
                rows.sort(key=lambda row: row["seed"])
                RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            row = next(row for row in rows if row["seed"] == seed)
            print("  ".join(f"{row[column]!s:>12}" for column in COLUMNS), flush=True)
    draw(rows, RESULTS.with_suffix(".png"))
    return 0 if all(row["gain"] >= GAIN for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
