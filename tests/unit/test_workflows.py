"""Single-turn episodes against an engine of ten lines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.errors import DataError, GenerationError, RewardError
from areal_hpc.protocols import Episode
from areal_hpc.rollout.workflows import SingleTurn, ask
from areal_hpc.types import Completion, GenerationRequest, Message, Prompt, Sampling, StopReason, Trajectory

PROMPT = Prompt(position=3, id="p", messages=({"role": "user", "content": "abc"},), answer="x")


class Letters:
    """A renderer whose tokens are code points."""

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(ord(letter) for message in messages for letter in f"{message['role'][0]}:{message['content']};")

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in token_ids)


class Scripted:
    """Answers every request with the same completion and remembers the requests."""

    def __init__(self, text: str, stop: StopReason = StopReason.STOP) -> None:
        self.text, self.stop, self.requests = text, stop, list[GenerationRequest]()

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        length = len(self.text)
        return Completion(
            token_ids=np.array([ord(letter) for letter in self.text], dtype=np.int32),
            logprobs=-0.5 - np.arange(length, dtype=np.float32),
            versions=7 + np.arange(length, dtype=np.int32),
            stop=self.stop,
            text="not what was sampled",
        )

    async def close(self) -> None: ...


async def length(text: str, prompt: Prompt) -> float:
    assert prompt is PROMPT or prompt.metadata
    return float(len(text))


def episode(engine: Scripted, *, max_tokens: int = 100, max_new_tokens: int = 50) -> Episode:
    return Episode(
        id="chain.1.p3.s0.a0",
        generator=engine,
        renderer=Letters(),
        score=length,
        sampling=Sampling(max_new_tokens=max_new_tokens, temperature=0.7, stop=("!",), seed=5),
        max_tokens=max_tokens,
    )


def run(prompt: Prompt, episode: Episode) -> Trajectory:
    (trajectory,) = asyncio.run(SingleTurn().run(prompt, episode))
    return trajectory


def test_an_episode_becomes_one_trajectory() -> None:
    engine = Scripted("hey")
    trajectory = run(PROMPT, episode(engine))
    assert "".join(map(chr, trajectory.token_ids)) == "u:abc;hey"
    assert trajectory.loss_mask.tolist() == [False] * 6 + [True] * 3
    assert trajectory.logprobs.tolist() == [0.0] * 6 + [-0.5, -1.5, -2.5]
    assert trajectory.versions.tolist() == [-1] * 6 + [7, 8, 9]
    assert (trajectory.reward, trajectory.stop) == (3.0, StopReason.STOP)
    dtypes = [a.dtype for a in (trajectory.token_ids, trajectory.loss_mask, trajectory.logprobs, trajectory.versions)]
    assert dtypes == [np.int32, np.bool_, np.float32, np.int32]


def test_experts_of_the_whole_sequence_come_with_it() -> None:
    class Telling(Scripted):
        async def generate(self, request: GenerationRequest) -> Completion:
            assert request.experts_from == 0
            return replace(await super().generate(request), experts=np.arange(9, dtype=np.uint8).reshape(9, 1, 1))

    assert run(PROMPT, episode(Scripted("hey"))).experts is None
    experts = run(PROMPT, episode(Telling("hey"))).experts
    assert experts is not None and experts.ravel().tolist() == list(range(9))


def test_the_request_carries_the_episode_and_its_sampling() -> None:
    engine = Scripted("hey")
    run(PROMPT, episode(engine))
    (request,) = engine.requests
    assert request.token_ids == tuple(map(ord, "u:abc;"))
    assert request.session == "chain.1.p3.s0.a0"
    assert request.request_id.startswith("chain.1.p3.s0.a0")
    assert request.sampling == Sampling(max_new_tokens=50, temperature=0.7, stop=("!",), seed=5)


def test_E20_chat_history_is_never_trained_on() -> None:
    history = (
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    )
    trajectory = run(Prompt(position=0, id="h", messages=history, metadata={"x": 1}), episode(Scripted("four")))
    trained = "".join(map(chr, trajectory.token_ids[trajectory.loss_mask]))
    assert trained == "four"


@given(st.integers(0, 40), st.integers(1, 60), st.integers(1, 60))
def test_F2_an_answer_gets_what_is_left_of_the_context_and_no_more(
    prompt_length: int, max_new_tokens: int, max_tokens: int
) -> None:
    engine = Scripted("")
    prompt = Prompt(position=0, id="p", messages=({"role": "u", "content": "a" * prompt_length},), metadata={"x": 1})
    room = max_tokens - (prompt_length + 3)
    if room < 1:
        with pytest.raises(DataError, match=r"prompt 'p' has .* tokens.*model\.max_tokens"):
            run(prompt, episode(engine, max_tokens=max_tokens, max_new_tokens=max_new_tokens))
        assert engine.requests == []
    else:
        run(prompt, episode(engine, max_tokens=max_tokens, max_new_tokens=max_new_tokens))
        assert engine.requests[0].sampling.max_new_tokens == min(room, max_new_tokens)


@pytest.mark.parametrize("sampled", ["", "h", "he"])
def test_F1_an_answer_that_was_ended_early_is_a_failure(sampled: str) -> None:
    with pytest.raises(GenerationError, match="ended early"):
        run(PROMPT, episode(Scripted(sampled, StopReason.ABORT)))


def test_an_answer_cut_by_its_budget_is_scored_and_says_so() -> None:
    trajectory = run(PROMPT, episode(Scripted("hey", StopReason.LENGTH), max_new_tokens=3))
    assert (trajectory.reward, trajectory.stop) == (3.0, StopReason.LENGTH)


def test_more_tokens_than_the_budget_are_a_broken_engine() -> None:
    with pytest.raises(GenerationError, match="4 tokens for a budget of 3"):
        run(PROMPT, episode(Scripted("heyy", StopReason.LENGTH), max_new_tokens=3))


def test_an_empty_answer_is_an_answer() -> None:
    trajectory = run(PROMPT, episode(Scripted("")))
    assert (trajectory.reward, trajectory.num_generated, trajectory.token_ids.size) == (0.0, 0, 6)


def test_a_reward_that_fails_fails_the_sample() -> None:
    async def broken(text: str, prompt: Prompt) -> float:
        raise RewardError("no")

    context = episode(Scripted("hey"))
    failing = Episode(
        id="e",
        generator=context.generator,
        renderer=Letters(),
        score=broken,
        sampling=context.sampling,
        max_tokens=100,
    )
    with pytest.raises(RewardError):
        run(PROMPT, failing)


@pytest.mark.parametrize(("seed", "turn", "expected"), [(5, 0, 5), (5, 2, 7), (2**31 - 1, 1, 0), (None, 1, None)])
def test_each_turn_has_an_id_and_a_seed_of_its_own(seed: int | None, turn: int, expected: int | None) -> None:
    engine = Scripted("hey")
    context = replace(episode(engine), sampling=Sampling(max_new_tokens=50, seed=seed))
    asyncio.run(ask(context, PROMPT, [1, 2, 3], turn))
    (request,) = engine.requests
    assert (request.request_id, request.session) == (f"chain.1.p3.s0.a0.t{turn}", "chain.1.p3.s0.a0")
    assert request.token_ids == (1, 2, 3)
    assert request.sampling == Sampling(max_new_tokens=50, seed=expected)
