"""An agent that knows nothing of training learns through the service; ``benchmarks/agent_training.py`` has seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AGENTS = ROOT / "examples" / "agents"
WORDS = (
    "trainer.total_steps=14",
    "evaluation.every_steps=14",
    "evaluation.num_prompts=64",
    "checkpoint.every_steps=14",
)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_openai_agents_agent_learns_to_use_its_tool(tmp_path: Path) -> None:
    layers = (ROOT / "configs" / "quickstart.yaml", AGENTS / "calculator.yaml")
    where = (f"run_root={tmp_path}", f"model.path={tmp_path}/model")
    done = subprocess.run(
        [sys.executable, "-m", "areal_hpc", "run", *map(str, layers), *where, *WORDS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(AGENTS / "openai_agents")])},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "calculator"
    facts = json.loads((run / "summary.json").read_text())
    assert facts["evaluation_first"] < 0.3, "the model must not use its tool yet"
    assert facts["evaluation_last"] > facts["evaluation_first"] + 0.3, done.stdout[-3000:]
    told = [json.loads(line) for file in run.glob("attempts/*/telemetry/rollout-*.jsonl") for line in file.open()]
    attempts = [one for one in told if one["kind"] == "agent"]
    turns = [one["turns"] for one in attempts]
    assert sum(turns[-100:]) > sum(turns[:100]), "the tool is called more often at the end"
    # answers that were cut by length cannot be continued; all others are
    assert sum(one["clean"] for one in attempts) > 20 * sum(one["fork"] + one["realign"] for one in attempts)
