"""How one episode runs: what a workflow does between a prompt and its trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from areal_hpc.errors import DataError, GenerationError
from areal_hpc.protocols import Episode
from areal_hpc.types import MAX_SEED, NOT_SAMPLED, Completion, GenerationRequest, Prompt, Trajectory


class SingleTurn:
    """One prompt, one answer, one reward. The whole prompt is context, also assistant turns that it contains."""

    async def run(self, prompt: Prompt, episode: Episode) -> Sequence[Trajectory]:
        """One trajectory.

        Raises:
            DataError, GenerationError: see ``ask``.
            RewardError: the answer could not be scored.
        """
        context = episode.renderer.render(prompt.messages)
        completion = await ask(episode, prompt, context)
        reward = await episode.score(episode.renderer.decode(completion.token_ids.tolist()), prompt)
        return [trajectory(context, completion, reward)]


async def ask(episode: Episode, prompt: Prompt, context: Sequence[int], turn: int = 0) -> Completion:
    """The model's answer to ``context``, complete and within what is left of ``episode.max_tokens``.

    Args:
        turn: number of this answer in its episode; each has an id and a seed of its own.

    Raises:
        DataError: the context leaves no room for an answer; it is refused, never cut.
        GenerationError: the engine failed, ended the answer early, or gave more than it was asked for.
    """
    room = episode.max_tokens - len(context)
    if room < 1:
        raise DataError(
            f"prompt {prompt.id!r} has {len(context)} tokens at turn {turn} and leaves no room for an answer; "
            f"raise `model.max_tokens` ({episode.max_tokens}) or remove the prompt"
        )
    sampling = episode.sampling
    request = GenerationRequest(
        request_id=f"{episode.id}.t{turn}",
        token_ids=tuple(context),
        sampling=replace(
            sampling,
            max_new_tokens=min(sampling.max_new_tokens, room),
            seed=None if sampling.seed is None else (sampling.seed + turn) % MAX_SEED,
        ),
        session=episode.id,
    )
    completion = await episode.generator.generate(request)
    check(request, completion)
    return completion


def check(request: GenerationRequest, completion: Completion) -> None:
    """Accept an answer only if it is complete and within its budget.

    Raises:
        GenerationError: it is not.
    """
    num_tokens, budget = completion.token_ids.size, request.sampling.max_new_tokens
    if not completion.stop.is_complete():
        raise GenerationError(f"request {request.request_id} was ended early, after {num_tokens} of {budget} tokens")
    if num_tokens > budget:
        raise GenerationError(f"request {request.request_id} got {num_tokens} tokens for a budget of {budget}")


def trajectory(context: Sequence[int], completion: Completion, reward: float) -> Trajectory:
    """Context [P] and sampled tokens [T] as one sequence [P + T]; only the sampled ones are trainable."""
    num_context, num_sampled = len(context), completion.token_ids.size
    return Trajectory(
        token_ids=np.concatenate([np.array(context, dtype=np.int32), completion.token_ids]),
        loss_mask=np.arange(num_context + num_sampled) >= num_context,
        logprobs=np.concatenate([np.zeros(num_context, dtype=np.float32), completion.logprobs]),
        versions=np.concatenate([np.full(num_context, NOT_SAMPLED, dtype=np.int32), completion.versions]),
        reward=reward,
        stop=completion.stop,
        experts=completion.experts,
    )
