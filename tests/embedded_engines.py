"""Embedded engines for tests of what they sample, and how to ask them without HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tiny_models import make_model

from areal_hpc.generation.embedded.engine import EmbeddedEngine
from areal_hpc.generation.embedded.sequence import Sequence
from areal_hpc.generation.served.request import SamplingParams

LIMIT_S = 60.0
FREE = SamplingParams(max_new_tokens=20, ignore_eos=True, sampling_seed=1)
GREEDY = replace(FREE, temperature=0.0)
PROMPT = tuple(range(40, 60))
Models = dict[str, tuple[Path, Any]]
MakeEngine = Callable[..., EmbeddedEngine]


def two_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Two checkpoints of one architecture, with the transformers models that wrote them."""
    made = {}
    for seed, name in enumerate(("old", "new")):
        directory = tmp_path_factory.mktemp(name)
        made[name] = (directory, make_model(directory, "qwen2", seed))
    return made


@contextmanager
def engines(models: Models) -> Iterator[MakeEngine]:
    """Makes started engines on the "old" model, and closes them all."""
    started: list[EmbeddedEngine] = []

    def make(**options: Any) -> EmbeddedEngine:
        defaults = {"max_running": 4, "max_tokens": 256, "seed": 0, "version": "1"}
        engine = EmbeddedEngine(models["old"][0], **(defaults | options))
        engine.start()
        started.append(engine)
        return engine

    try:
        yield make
    finally:
        for engine in started:
            engine.close()


def submit(engine: EmbeddedEngine, *sequences: Sequence) -> None:
    engine.scheduler.call(lambda: engine.scheduler.submit(sequences)).result(LIMIT_S)


def complete(engine: EmbeddedEngine, *sequences: Sequence) -> list[Sequence]:
    submit(engine, *sequences)
    for sequence in sequences:
        sequence.done.result(LIMIT_S)
    return list(sequences)


def one(engine: EmbeddedEngine, prompt: tuple[int, ...], params: SamplingParams, **options: Any) -> Sequence:
    [sequence] = engine.sequences(prompt, params, **options)
    return sequence


def at_token(sequence: Sequence, num: int, action: Callable[[], object]) -> Event:
    """Do ``action`` in the engine's thread right after token ``num``; the event says that it has been done."""
    done = Event()

    def listen(num_tokens: int) -> None:
        if num_tokens == num:
            action()
            done.set()

    sequence.listener = listen
    return done


def expected_logprobs(model: Any, sequence: Sequence, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs [T] that ``model`` gives the sampled tokens, in one pass over the whole sequence."""
    token_ids = torch.tensor([sequence.history])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(token_ids).logits[0].float() / temperature, -1)
    start = len(sequence.prompt)
    return logprobs[start - 1 : -1].gather(1, token_ids[0, start:, None])[:, 0]


def assert_logprobs(sequence: Sequence, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(sequence.logprobs), expected, atol=1e-4, rtol=0)


def load(engine: EmbeddedEngine, directory: Path, version: str, *, flush_cache: bool) -> None:
    engine.updates.load_directory(directory, version, flush_cache=flush_cache, abort_all=False)
