"""Does the quickstart keep its promise? From a model that seldom answers right to one that mostly does, in minutes.

    PYTHONPATH=. python tests/benchmarks/quickstart.py [--seeds 1 2 3]
    PYTHONPATH=. python tests/benchmarks/quickstart.py --seeds 1 --set trainer.backend=megatron trainer.ranks=2 ...

For each seed the command line runs ``configs/quickstart.yaml`` in a temporary directory, with a model of that seed made
on the way. The clock runs from the start of the command to its end, so it covers making the model, starting the
processes, every evaluation and the report; it leaves out what installing the package takes. Writes ``quickstart.json``
beside this file, prints a table, and exits with 1 if a seed misses the target. With ``--set`` the run is another one,
held to the same rewards in any time, and stands under what was set in the ``changed`` of the same file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe

ROOT = Path(__file__).resolve().parents[2]
START_BELOW, END_ABOVE, WITHIN_S = 0.25, 0.75, 240.0
RUN_LIMIT_S = 900.0
COLUMNS = ("seed", "seconds", "model_s", "first", "last", "steps", "staleness_mean", "staleness_max", "met")


def run(seed: int, root: Path, changes: list[str]) -> dict[str, Any]:
    """One run; its row of the table.

    Raises:
        RuntimeError: the command failed; its last lines are in the message.
    """
    name = f"seed-{seed}"
    overrides = [f"name={name}", f"seed={seed}", f"run_root={root}", f"model.path={root}/model-{seed}"]
    command = [sys.executable, "-m", "areal_hpc", "run", str(ROOT / "configs/quickstart.yaml"), *overrides, *changes]
    log = root / f"{name}.log"
    began, began_wall = time.monotonic(), time.time()
    with log.open("wb") as stream:
        code = subprocess.run(
            command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, timeout=RUN_LIMIT_S, check=False
        ).returncode
    seconds = time.monotonic() - began
    if code != 0:
        last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise RuntimeError(f"seed {seed}: exit code {code}\n{last}")
    facts = json.loads((root / name / "summary.json").read_text(encoding="utf-8"))
    first, last_reward = facts["evaluation_first"], facts["evaluation_last"]
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "model_s": round((root / f"model-{seed}" / "config.json").stat().st_mtime - began_wall, 1),
        "first": round(first, 3),
        "last": round(last_reward, 3),
        "steps": facts["last_step"],
        "staleness_mean": round(facts["staleness_mean"], 2),
        "staleness_max": facts["staleness_max"],
        "evaluations": {str(e["step"]): round(e["reward_mean"], 3) for e in facts["evaluations"]},
        "shares": {part: round(facts[f"{part}_share"], 2) for part in ("wait", "train", "publish", "paused")},
        "met": first < START_BELOW and last_reward > END_ABOVE and (bool(changes) or seconds <= WITHIN_S),
    }


def record(result: dict[str, Any], changes: str) -> None:
    """Put it in the place of the last one with the same changes; what other runs have found stays."""
    path = Path(__file__).with_suffix(".json")
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    changed = known.pop("changed", {})
    known = {**known, "changed": {**changed, changes: result}} if changes else {**result, "changed": changed}
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": describe(), "rows": []}
    print("  ".join(f"{column:>14}" for column in COLUMNS))
    with tempfile.TemporaryDirectory(prefix="areal-quickstart-") as root:
        for seed in options.seeds:
            row = run(seed, Path(root), options.set)
            result["rows"].append(row)
            print("  ".join(f"{row[column]!s:>14}" for column in COLUMNS), flush=True)
    record(result, " ".join(options.set))
    return 0 if all(row["met"] for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
