"""A package ``vllm`` for tests of the server around it: its engine counts upwards, and its workers take any weights."""

from __future__ import annotations

import argparse
import asyncio
import enum
import math
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import pytest

VOCABULARY = 272
LOGPROB = -1.5


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
    hanging: str = ""  # the one that never returns
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
            await asyncio.Event().wait()
        return [True]

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
