"""The quickstart's task with the real SGLang server on a CPU, beside the embedded engine: a few steps of each.

    PYTHONPATH=. python tests/benchmarks/sglang_cpu.py --python .venv-sglang/bin/python [--steps 8]

Both runs have one configuration, one seed and one model, at staleness 0 and at 2. At staleness 0 the trainer computes
log-probs with the weights that sampled, so that the gap is the difference between two implementations and nothing else.
Writes ``sglang_cpu.json`` beside this file, prints a table, and exits with 1 if a gap at staleness 0 is above 1e-4.
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
RUN_LIMIT_S = 600.0
LARGEST_GAP = 1e-4
FACTS = ("last_step", "staleness_mean", "staleness_max", "logprob_gap_mean", "tokens_trained_per_s", "paused_share")


def run(engine: str, staleness: int, python: str, steps: int, root: Path) -> dict[str, Any]:
    """One run; its row of the table.

    Raises:
        RuntimeError: the command failed; its last lines are in the message.
    """
    name = f"{engine}-{staleness}"
    overrides = [
        *(f"name={name}", f"run_root={root}", f"model.path={root}/model", f"trainer.total_steps={steps}"),
        *(f"generation.backend={engine}", f"generation.python={python}", f"buffer.max_staleness={staleness}"),
        "evaluation.every_steps=0",
    ]
    log = root / f"{name}.log"
    began = time.monotonic()
    with log.open("wb") as stream:
        command = [sys.executable, "-m", "areal_hpc", "run", str(ROOT / "configs/quickstart.yaml"), *overrides]
        code = subprocess.run(
            command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, timeout=RUN_LIMIT_S, check=False
        ).returncode
    seconds = time.monotonic() - began
    if code != 0:
        last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise RuntimeError(f"{name}: exit code {code}\n{last}")
    facts = json.loads((root / name / "summary.json").read_text(encoding="utf-8"))
    return {"engine": engine, "staleness": staleness, "seconds": round(seconds, 1)} | {k: facts[k] for k in FACTS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="Python of SGLang's environment")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    machine = describe()
    with tempfile.TemporaryDirectory() as directory:
        rows = [
            run(engine, staleness, options.python, options.steps, Path(directory))
            for staleness in (0, 2)
            for engine in ("embedded", "sglang")
        ]
    columns = list(rows[0])
    print(" | ".join(columns))
    for row in rows:
        print(" | ".join(f"{row[c]:.3g}" if isinstance(row[c], float) else str(row[c]) for c in columns))
    sglang = subprocess.run(
        [options.python, "-c", "from importlib.metadata import version; print(version('sglang'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    result = {"machine": machine, "sglang": sglang, "steps": options.steps, "runs": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return int(any(row["staleness"] == 0 and row["logprob_gap_mean"] > LARGEST_GAP for row in rows))


if __name__ == "__main__":
    sys.exit(main())
