"""A package ``vllm`` for tests of the server around it: its engine counts upwards, and its workers take any weights.

``driver`` runs our server around it, in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import enum
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import pytest

from areal_hpc.generation.client import EngineClient
from areal_hpc.generation.connection import EngineLost
from areal_hpc.generation.external.process import reserved_port, url_of
from areal_hpc.types import GenerationRequest, Sampling

VOCABULARY = 272
LOGPROB = -1.5
PROMPT = (65, 66, 67)
KEY = "a-key-that-must-not-leak"


class ClientError(Exception):
    pass


class Kind(enum.Enum):
    DELTA = 1


class Options(SimpleNamespace):
    """Keyword arguments, kept."""


class EngineArgs(Options):
    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        for name in ("model", "max-model-len", "max-num-seqs"):
            parser.add_argument(f"--{name}")
        return parser

    @classmethod
    def from_cli_args(cls, given: argparse.Namespace) -> Self:
        return cls(**vars(given))


def likeliest(token: int) -> dict[int, Any]:
    """The sampled token as the third likeliest, behind two others; a fourth cannot be sampled."""
    told = {token: (3, LOGPROB), 7: (2, -1.0), 8: (1, -0.9), 9: (4, -math.inf)}
    return {one: SimpleNamespace(rank=rank, logprob=logprob) for one, (rank, logprob) in told.items()}


@dataclass
class FakeLLM:
    """vLLM's AsyncLLM: one token for each turn of the loop and request, unless it is paused."""

    args: Any
    tied: bool = True
    version: str = "default"
    errored: bool = False
    failing: str = ""  # the worker's method that fails
    hanging: str = ""  # the one that does not return before it ``returns``
    returns: asyncio.Event = field(default_factory=asyncio.Event)
    slow: dict[str, float] = field(default_factory=dict)  # seconds that others take, by ``now``
    now: float = 0.0
    answers: dict[str, Any] = field(default_factory=dict)  # what others answer; else true
    called: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    recomputed: list[bool] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    asked: list[Any] = field(default_factory=list)  # vLLM's sampling parameters
    going: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.going.set()
        self.model_config = SimpleNamespace(
            max_model_len=int(self.args.max_model_len),
            get_vocab_size=lambda: VOCABULARY,
            hf_config=SimpleNamespace(tie_word_embeddings=self.tied),
        )

    @classmethod
    def from_engine_args(cls, args: Any) -> Self:
        return cls(args)

    async def generate(
        self, prompt: Mapping[str, Any], params: Any, request_id: str, priority: int = 0
    ) -> AsyncIterator[Any]:
        self.asked.append(params)
        if params.temperature > 100:
            raise ClientError("that is too hot")
        token_ids, starts = [], []
        last, reason, matched = prompt["prompt_token_ids"][-1], None, None
        while reason is None:
            await asyncio.sleep(0)
            await self.going.wait()
            new = []
            if request_id in self.aborted:
                reason = "abort"
            else:
                last = (last + 1) % VOCABULARY
                new = [last]
                if not starts or starts[-1][0] != self.version:
                    starts.append((self.version, len(token_ids)))
                token_ids += new
                if last in params.stop_token_ids:
                    reason, matched = "stop", last
                elif len(token_ids) == params.max_tokens:
                    reason = "length"
            ends = [start for _, start in starts[1:]] + [len(token_ids)] * bool(starts)
            spans = [
                SimpleNamespace(version=version, start=start, end=end)
                for (version, start), end in zip(starts, ends, strict=True)
            ]
            part = SimpleNamespace(
                token_ids=new,
                logprobs=[likeliest(token) for token in new],
                finish_reason=reason,
                stop_reason=matched,
                weight_versions=spans if reason else None,
            )
            yield SimpleNamespace(outputs=[part], num_cached_tokens=0)

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted |= set(request_ids)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self.going.clear()

    async def resume_generation(self) -> None:
        self.going.set()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.recomputed.append(reset_running_requests)
        return True

    async def update_weight_version(self, version: str) -> None:
        self.version = version

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[bool]:
        self.called.append((method, args))
        if method == self.failing:
            raise Exception("Call to collective_rpc method failed: no route to host")
        if method == self.hanging:
            await self.returns.wait()
        self.now += self.slow.get(method, 0)
        return [self.answers.get(method, True)]

    def shutdown(self, timeout: float) -> None:
        self.errored = True


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``import vllm`` find this."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": EngineArgs},
        "vllm.exceptions": {"VLLMClientError": ClientError},
        "vllm.inputs": {"tokens_input": lambda token_ids: {"prompt_token_ids": token_ids}},
        "vllm.sampling_params": {
            "RequestOutputKind": Kind,
            "SamplingParams": Options,
            "StructuredOutputsParams": Options,
        },
        "vllm.utils": {},
        "vllm.utils.argparse_utils": {"FlexibleArgumentParser": argparse.ArgumentParser},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": FakeLLM},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)


Scenario = Callable[[EngineClient, Any], Awaitable[None]]
Drive = Callable[..., None]
"""Takes a scenario, and what the server is told besides."""


def driver(model: Path, monkeypatch: pytest.MonkeyPatch) -> Drive:
    """Runs a scenario with a client of a server of ``model``, and the engine behind it."""
    install(monkeypatch)
    for name in ("engine", "updates", "server"):  # so that they are imported with this fake, and not kept
        monkeypatch.delitem(sys.modules, f"areal_hpc.generation.vllm.{name}", raising=False)
    from areal_hpc.generation.vllm.engine import VllmEngine
    from areal_hpc.generation.vllm.server import serve

    @asynccontextmanager
    async def served(told: Mapping[str, Any]) -> AsyncIterator[tuple[EngineClient, Any]]:
        engine = VllmEngine(["--model", str(model), "--max-model-len", "300", "--max-num-seqs", "2"], "0")
        with reserved_port("127.0.0.1") as port:
            ours = {"host": "127.0.0.1", "port": port, "key": KEY, "keeps_weights": False, "adapters": None}
            serving_it = asyncio.create_task(serve(engine, {**ours, "update_timeout_s": 30.0, **told}))
            client = EngineClient("engine-0", url_of("127.0.0.1", port), token=KEY)
            try:
                while True:
                    try:
                        await client.probe()
                        break
                    except EngineLost:
                        assert not serving_it.done(), serving_it.result()
                yield client, engine
            finally:
                await client.close()
                engine.close()  # as if it had died: the server ends by itself
                await asyncio.wait_for(serving_it, 30)

    def run(scenario: Scenario, **told: Any) -> None:
        async def within() -> None:
            async with served(told) as (client, engine):
                await scenario(client, engine)

        asyncio.run(within())

    return run


def asked(num: int, name: str = "r", **sampling: Any) -> GenerationRequest:
    return GenerationRequest(request_id=name, token_ids=PROMPT, sampling=Sampling(max_new_tokens=num, **sampling))
