"""A rollout worker in one piece: real prompts, chat template and reward processes; engine and ring are faked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_hpc.config.schema import RolloutConfig, SamplingConfig
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.rollout.episodes import EpisodeRunner
from areal_hpc.rollout.reward_pool import RewardPool
from areal_hpc.rollout.runner import Runner
from areal_hpc.rollout.workflows import SingleTurn
from areal_hpc.tasks.sort_digits import SortDigits
from areal_hpc.types import (
    Completion,
    Drop,
    GenerationRequest,
    Prompt,
    StopReason,
    Ticket,
    TrajectoryGroup,
    WeightVersion,
)


def make_tokenizer(path: Path) -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    tokenizer.save_pretrained(path)
    return str(path)


class Stream:
    def __init__(self) -> None:
        self.rows, self.position = SortDigits("train", seed=1), -1

    def next(self) -> Prompt:
        self.position += 1
        return self.at(self.position)

    def at(self, position: int) -> Prompt:
        row = self.rows[position]
        message = {"role": "user", "content": row["prompt"]}
        return Prompt(position=position, id=row["id"], messages=(message,), answer=row["answer"])


class Sorter:
    """An engine that reads the prompt's digits and sorts them for an even seed; at a fifth of the seeds it fails."""

    def __init__(self, renderer: ChatRenderer, tokenizer: Any) -> None:
        self.renderer, self.tokenizer = renderer, tokenizer

    async def generate(self, request: GenerationRequest) -> Completion:
        seed = request.sampling.seed
        assert seed is not None
        stop = StopReason.ABORT if seed % 5 == 0 else StopReason.STOP
        digits = [letter for letter in self.renderer.decode(request.token_ids) if letter.isdigit()]
        text = " ".join(sorted(digits)) if seed % 2 == 0 else "none"
        ids = np.array(self.tokenizer(rf"\boxed{{{text}}}").input_ids, dtype=np.int32)
        return Completion(
            token_ids=ids, logprobs=np.full(ids.size, -1, np.float32), versions=np.full_like(ids, 3), stop=stop
        )

    async def close(self) -> None: ...


class Ring:
    version = WeightVersion(1, 3)

    def __init__(self, wanted: int) -> None:
        self.wanted, self.full, self.groups, self.drops = wanted, asyncio.Event(), list[TrajectoryGroup](), list[Drop]()

    def try_reserve(self, position: int) -> Ticket | None:
        return Ticket(chain="w0", number=position, position=position, version=self.version)

    def seal(self, ticket: Ticket, group: TrajectoryGroup) -> None:
        assert ticket.position == group.position
        self.groups.append(group)
        if len(self.groups) >= self.wanted:
            self.full.set()

    def drop(self, ticket: Ticket, reason: Drop) -> None:
        self.drops.append(reason)

    def reissues(self) -> list[int]:
        return []

    def close(self) -> None: ...


def test_prompts_become_scored_groups(tmp_path: Path) -> None:
    async def test() -> None:
        renderer = ChatRenderer(make_tokenizer(tmp_path))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        ring, failures, stream = Ring(12), list[Mapping[str, Any]](), Stream()
        pool = RewardPool("areal_hpc.tasks.sort_digits:reward", workers=2, timeout_s=20.0)
        config = RolloutConfig(
            reward="", group_size=4, concurrency=3, attempts=20, sampling=SamplingConfig(max_new_tokens=40)
        )
        episodes = EpisodeRunner(
            workflow=SingleTurn(),
            generator=Sorter(renderer, tokenizer),
            renderer=renderer,
            score=pool.score,
            config=config,
            max_tokens=128,
            record=lambda kind, values: failures.append(values),
            seed=1,
            retry_pause_s=0.0,
        )
        runner = Runner(episodes=episodes, stream=stream, writer=ring, config=config, record=lambda kind, values: None)
        await asyncio.wait_for(runner.run(ring.full), 60)
        await pool.close()
        assert set(ring.drops) <= {Drop.FILTERED}
        assert {failure["error"] for failure in failures} == {"GenerationError"}
        for group in ring.groups:
            assert group.prompt_id == stream.at(group.position).id
            assert len(group.trajectories) == 4
            for trajectory in group.trajectories:
                text = renderer.decode(trajectory.token_ids.tolist())
                answer = stream.at(group.position).answer
                assert text.startswith(f"user: {stream.at(group.position).messages[0]['content']}\nassistant: ")
                assert trajectory.reward == float(text.endswith(rf"\boxed{{{answer}}}"))
                assert renderer.decode(trajectory.token_ids[trajectory.loss_mask].tolist()).startswith(r"\boxed{")

    asyncio.run(test())
