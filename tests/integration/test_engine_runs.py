"""A whole run on a real SGLang or vLLM server, whose process is killed on the way."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from launched import STEPS, Launched, launched, newest_checkpoint, until
from real_engines import REAL, SGLANG, START_S, RealEngine
from strangers import REFUSED, SILENT, receptions
from test_joined_run import satellite
from test_live_roles import engine_events
from tiny_models import make_model

from areal_hpc.exits import EXIT_DONE
from areal_hpc.generation.external.process import LAUNCHER
from areal_hpc.generation.sglang.plugin import ORDER
from areal_hpc.report import prove_run

pytestmark = [pytest.mark.long, pytest.mark.timeout(1000)]

LIMIT_S = 450.0
LARGEST_GAP = 1e-4
"""Nats a token, in float32."""


def server_of(started: Launched) -> psutil.Process:
    children = started.roles()["generator-0"].children()
    return next(child for child in children if str(LAUNCHER) in child.cmdline())


@pytest.mark.parametrize("trained", ["the model", "adapters"])
@pytest.mark.parametrize(
    "engine", [pytest.param(engine, marks=getattr(pytest.mark, engine.name), id=engine.name) for engine in REAL]
)
def test_a_run_outlives_its_server_and_its_log_probs_are_the_trainers(
    tmp_path: Path, engine: RealEngine, trained: str
) -> None:
    """Nothing is stale here, so that the gap between the log-probs of engine and trainer has no other reason than
    wrong weights or a wrong computation. Adapters come to such engines alone, and are merged there."""
    assert not engine.unusable(), engine.unusable()
    make_model(tmp_path / "model", "llama", seed=3, num_attention_heads=2, num_key_value_heads=1)
    words = [f"generation.backend={engine.name}", f"generation.python={engine.python}", "generation.max_running=8"]
    words += ["buffer.max_staleness=0", f"limits.start_s={START_S}", f"limits.stall_s={LIMIT_S}"]
    words += ["model.lora.rank=4"] if trained == "adapters" else []
    with launched(tmp_path, tmp_path / "model", *words) as started:
        started.wait_for_step(2, LIMIT_S)
        assert receptions(server_of(started)) == {REFUSED, SILENT}, (
            "SGLang's own store and gloo's ports are signed, too"
        )
        server_of(started).kill()
        assert started.wait(LIMIT_S) == 0, started.text

        assert [dict(record.values)["process"] for record in started.records("restart")] == ["generator-0"]
        steps = started.records("step")
        assert [record.number("step") for record in steps] == list(range(1, STEPS + 1))
        gaps = [record.number("logprob_gap") for record in steps]
        assert max(gap for gap in gaps if gap is not None) < LARGEST_GAP
        assert None not in gaps
        if trained == "adapters":
            for record in steps:
                sent, saved = (record.number(name) or 0.0 for name in ("weight_bytes", "weight_bytes_saved"))
                assert 0 < sent < saved
        proof = prove_run(started.run)
        assert proof.proven, proof.violations

        told = started.records("generation")
        assert max(record.number("tokens_per_s") or 0.0 for record in told) > 0
        first_life = [r.number("tokens") or 0.0 for r in told if r.time < started.records("restart")[0].time]
        assert max(first_life) >= sum(record.number("tokens_generated") or 0.0 for record in steps[:1])
        assert started.left_over() == []


@pytest.mark.parametrize(
    "engine", [pytest.param(engine, marks=getattr(pytest.mark, engine.name), id=engine.name) for engine in REAL]
)
def test_a_real_engine_joins_a_run_that_has_none_and_serves_it_to_its_end(tmp_path: Path, engine: RealEngine) -> None:
    assert not engine.unusable(), engine.unusable()
    make_model(tmp_path / "model", "llama", seed=3, num_attention_heads=2, num_key_value_heads=1)
    words = [f"generation.backend={engine.name}", f"generation.python={engine.python}", "generation.max_running=8"]
    words += ["generation.replicas=0", "buffer.max_staleness=0", f"limits.start_s={START_S}"]
    words += [f"limits.stall_s={LIMIT_S}", f"limits.join_s={LIMIT_S}"]
    with launched(tmp_path, tmp_path / "model", *words) as started:
        until("the configuration", started.run.config.exists)
        with satellite(started, 0) as joined:
            assert started.wait(LIMIT_S) == 0, started.text
            assert joined.process.wait(60) == EXIT_DONE, joined.output.read_text()
        steps = started.records("step")
        assert [record.number("step") for record in steps] == list(range(1, STEPS + 1))
        assert max(record.number("logprob_gap") or 0.0 for record in steps) < LARGEST_GAP
        assert [event["engine"] for event in engine_events(started, "joined")] == ["generator-0"]
        proof = prove_run(started.run)
        assert proof.proven, proof.violations


@pytest.mark.sglang
def test_a_run_publishes_to_an_sglang_that_takes_weights_as_sglang_itself_does(tmp_path: Path) -> None:
    """The default on a GPU: it pauses while they come, keeps no copy, and proves nothing of what came. On a CPU it
    would stage them, so that its environment tells it otherwise here."""
    assert not SGLANG.unusable(), SGLANG.unusable()
    make_model(tmp_path / "model", "llama", seed=3, num_attention_heads=2, num_key_value_heads=1)
    order = json.dumps({"limit_s": 60.0, "stages": False})
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{ORDER}='{order}' exec {SGLANG.python} \"$@\"\n", encoding="utf-8")
    python.chmod(0o700)
    words = ["generation.backend=sglang", f"generation.python={python}", "generation.max_running=8"]
    words += ["weights.transport=broadcast", "buffer.max_staleness=0"]
    words += [f"limits.start_s={START_S}", f"limits.stall_s={LIMIT_S}"]
    with launched(tmp_path, tmp_path / "model", *words) as started:
        assert started.wait(LIMIT_S) == 0, started.text
        steps = started.records("step")
        assert [record.number("step") for record in steps] == list(range(1, STEPS + 1))
        assert max(record.number("logprob_gap") or 0.0 for record in steps) < LARGEST_GAP
        assert newest_checkpoint(started.run).state["weights"] is None, "nobody knows what the engine got"
        assert started.records("restart") == []
        proof = prove_run(started.run)
        assert proof.proven, proof.violations
