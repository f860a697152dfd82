"""One client works on the task, and what would be trained is held against what the model said, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from clients.cases import QUESTION, RESULT, Case
from dialogues import said
from served import served

from areal_hpc.config.schema import AgentConfig
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.generation.scripted import scripted_logprob
from areal_hpc.protocols import Episode
from areal_hpc.proxy.agent import Agent, AgentWorkflow
from areal_hpc.types import GenerationRequest, Prompt, Sampling, Trajectory

LIMIT_S = 600.0
CONTEXT = 1 << 20
PROMPT = Prompt(position=0, id="p", messages=({"role": "user", "content": QUESTION},), answer=RESULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How a client fared: what it asked, what it got, and the trajectories."""

    asked: Sequence[GenerationRequest]
    sampled: Sequence[Sequence[int]]
    """Ids that the model said to each request."""
    trajectories: Sequence[Trajectory]
    drifts: Mapping[str, Any]


async def exchange(case: Case, dialogue: ChatRenderer, agent: Agent) -> Exchange:
    """Let the agent do the task.

    Raises:
        AgentError: it failed, or asked for more than the model has to say.
    """
    answers, sampled, records = iter(case.answers), list[Sequence[int]](), list[Mapping[str, Any]]()

    def says(request: GenerationRequest) -> Sequence[int]:
        ids = said(dialogue, _unsaid(dialogue.spelled(request.token_ids), next(answers, "There is no more to say.")))
        sampled.append(ids)
        return ids

    async def score(text: str, prompt: Prompt) -> float:
        raise AssertionError("the agent gives the reward")

    async with served(dialogue, says, idle_s=LIMIT_S) as service:
        workflow = AgentWorkflow(
            agent,
            service.sessions,
            service.url,
            AgentConfig(),
            timeout_s=LIMIT_S,
            record=lambda _, values: records.append(values),
        )
        episode = Episode(
            id="e",
            generator=service.engine,
            renderer=dialogue,
            score=score,
            sampling=Sampling(max_new_tokens=4096),
            max_tokens=CONTEXT,
        )
        trajectories = await workflow.run(PROMPT, episode)
        return Exchange(asked=service.engine.requests, sampled=sampled, trajectories=trajectories, drifts=records[0])


def _unsaid(context: str, answer: str) -> str:
    """The answer without the beginning that a forced call has put into the context."""
    said_already = next((n for n in reversed(range(len(answer))) if context.endswith(answer[:n])), 0)
    return answer[said_already:]


def faults(one: Exchange, case: Case, dialogue: ChatRenderer) -> Iterator[str]:
    """What is wrong, in words; nothing if the task was done and the tokens trained are the tokens sampled."""
    if len(one.sampled) != len(case.answers):
        yield f"asked {len(one.sampled)} times instead of {len(case.answers)}"
    if RESULT not in dialogue.spelled(one.asked[-1].token_ids):
        yield "the result of the tool did not reach the model"
    if any(trajectory.reward != 1.0 for trajectory in one.trajectories):
        yield f"rewards {[trajectory.reward for trajectory in one.trajectories]}"
    trained = sum(trajectory.num_generated for trajectory in one.trajectories)
    if trained != sum(map(len, one.sampled)):
        yield f"{trained} tokens are trained, {sum(map(len, one.sampled))} were sampled"
    for number, (request, ids) in enumerate(zip(one.asked, one.sampled, strict=True)):
        if not any(_holds(trajectory, request.token_ids, ids) for trajectory in one.trajectories):
            yield f"no trajectory trains what was sampled in turn {number}, behind what it was sampled after"


def _holds(trajectory: Trajectory, context: Sequence[int], ids: Sequence[int]) -> bool:
    span = slice(len(context), len(context) + len(ids))
    logprobs = np.array([scripted_logprob(token, t) for t, token in enumerate(ids)], dtype=np.float32)
    return bool(
        trajectory.token_ids[: span.stop].tolist() == [*context, *ids]
        and trajectory.loss_mask[span].all()
        and np.array_equal(trajectory.logprobs[span], logprobs)
    )
