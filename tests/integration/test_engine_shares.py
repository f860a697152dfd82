"""A real SGLang engine on two nodes: one rank on each, weights by both transports, and the death of the second.

The nodes are two tasks here, each with a server of its own that knows only its number and where the ranks meet. The
judge of log-probs is transformers, in float32.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from real_engines import SGLANG, START_S
from tiny_models import make_model

from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.generation.client import EngineClient
from areal_hpc.generation.external.process import LAUNCHER
from areal_hpc.keys import engine_token
from areal_hpc.roles import launches
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.serving import serve_engine
from areal_hpc.roles.wiring.shares import hold_shares
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Recorder
from areal_hpc.types import Completion, GenerationRequest, Sampling
from areal_hpc.weights.broadcast import BroadcastTransport
from areal_hpc.weights.disk import DiskTransport

pytestmark = [pytest.mark.long, pytest.mark.sglang, pytest.mark.timeout(1500)]

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
PROMPT = tuple(range(40, 90))
TOLERANCE = 1e-4
"""Nats, in float32; two ranks sum in another order than one."""


def model_of(directory: Path, seed: int) -> Any:
    return make_model(directory, "llama", seed, tie_word_embeddings=True, num_attention_heads=4, num_key_value_heads=2)


def largest_gap(model: Any, completion: Completion) -> float:
    token_ids = torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])
    with torch.no_grad():
        rows = torch.log_softmax(model(token_ids).logits[0].float(), -1)
    start = len(PROMPT) - 1
    expected = [rows[start + place, token].item() for place, token in enumerate(completion.token_ids.tolist())]
    return float(np.abs(np.array(expected) - completion.logprobs).max())


def servers() -> list[psutil.Process]:
    """Those that this process has started."""
    return [child for child in psutil.Process().children() if str(LAUNCHER) in child.cmdline()]


def test_an_engine_on_two_nodes_answers_takes_weights_and_is_started_anew_when_one_dies(tmp_path: Path) -> None:
    assert not SGLANG.unusable(), SGLANG.unusable()
    models = [model_of(tmp_path / f"model-{version}", version) for version in range(3)]
    words = ["cluster.shape=het", "generation.backend=sglang", "generation.tensor_parallel=2"]
    words += ["cluster.generation.gpus=1", "cluster.generation.nodes=2", f"generation.python={SGLANG.python}"]
    words += [f"model.path={tmp_path / 'model-0'}", "model.max_tokens=128", f"limits.start_s={START_S}"]
    config, run = resolve(load([QUICKSTART], words)), RunDir.create(tmp_path / "run")
    attempt = run.attempt(1).create()

    def process(role: str, incarnation: int = 0) -> RoleProcess:
        recorder = Recorder(attempt.records(role, 0), role=role, index=0, epoch=1)
        told: dict[str, Any] = {"config": config, "token": "t", "recorder": recorder, "incarnation": incarnation}
        return RoleProcess(role=role, index=0, run=run, epoch=1, **told)

    def client_of(url: str, incarnation: int) -> EngineClient:
        return EngineClient("generator-0", url, num_ranks=2, token=engine_token("t", 1, 0, incarnation))

    async def answer(client: EngineClient, version: int) -> None:
        sampling = Sampling(max_new_tokens=24, ignore_eos=True)
        request = GenerationRequest(request_id=f"r{version}", token_ids=PROMPT, sampling=sampling)
        completion = await client.generate(request)
        assert set(completion.versions.tolist()) == {version}
        assert largest_gap(models[version], completion) < TOLERANCE

    def weights(version: int) -> Any:
        state = models[version].state_dict()
        return iter([(name, tensor) for name, tensor in state.items() if name != "lm_head.weight"])

    async def scenario() -> None:
        part = process("part")
        holding = asyncio.create_task(hold_shares(part))
        async with serve_engine(process("generator")) as engine:
            client = client_of(engine.url, 0)
            await answer(client, 0)
            assert (await client.prepare()).stages, "both ranks put what comes beside the model"
            broadcast = BroadcastTransport([client], epoch=1, bucket_bytes=20_000, timeout_s=100)
            await broadcast.publish(1, weights(1))
            await answer(client, 1)
            await broadcast.close()
            disk = DiskTransport(tmp_path / "weights", [client], epoch=1, file_bytes=50_000, timeout_s=100)
            await disk.publish(2, weights(2))
            await answer(client, 2)
            await client.close()
            port = int(engine.url.rpartition(":")[2])
            (second,) = [one for one in servers() if port not in {c.laddr.port for c in one.net_connections("tcp")}]
            second.kill()
            async with asyncio.timeout(60):
                while engine.alive():
                    await asyncio.sleep(0.1)
            launch = launches.newest(attempt, 0)
            assert launch is not None
            assert "part-0" in launch.why_over()
        async with serve_engine(process("generator", incarnation=1)) as engine:
            client = client_of(engine.url, 1)
            await answer(client, 0)
            await client.close()
        part.stop_flag.set()
        await holding

    asyncio.run(scenario())
    assert servers() == []
