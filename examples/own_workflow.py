r"""A workflow and a reward of one's own, tested without a model: the answer, and a second chance if it is wrong.

    pytest examples/own_workflow.py
    PYTHONPATH=examples areal-hpc run configs/quickstart.yaml examples/own_workflow.yaml

A workflow is a class with one method, made once for each rollout process. Whatever it returns is trained on; whatever
it raises fails the sample, which is tried again. It says nothing of engines, weights or staleness: the runner does.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from areal_hpc.generation.scripted import ScriptedGenerator, Utf8Renderer
from areal_hpc.protocols import Episode
from areal_hpc.rollout.workflows import ask, trajectory
from areal_hpc.types import Prompt, Sampling, Trajectory

WORTH = (1.0, 0.5)
"""What a right answer is worth at the first and at the second attempt."""
WRONG = {"role": "user", "content": "No."}


class SecondChance:
    """Each attempt is a trajectory with exactly the tokens that the engine saw: the history is context, not target."""

    async def run(self, prompt: Prompt, episode: Episode) -> Sequence[Trajectory]:
        messages, attempts = list(prompt.messages), list[Trajectory]()
        for turn, worth in enumerate(WORTH):
            context = episode.renderer.render(messages)
            completion = await ask(episode, prompt, context, turn)
            text = episode.renderer.decode(completion.token_ids.tolist())
            score = await episode.score(text, prompt)
            attempts.append(trajectory(context, completion, worth * score))
            if score == 1.0:
                break
            messages += [{"role": "assistant", "content": text}, WRONG]
        return attempts


def partial_credit(text: str, answer: str, prompt: Prompt) -> float:
    """1.0 for the right box, 0.2 for a box with the right digits in another order. Runs behind a time limit."""
    boxes = re.findall(r"\\boxed\{([0-9 ]*)\}", text)
    if not boxes or sorted(boxes[-1].split()) != sorted(answer.split()):
        return 0.0
    return 1.0 if boxes[-1].split() == answer.split() else 0.2


def play(*answers: str) -> tuple[Sequence[Trajectory], ScriptedGenerator]:
    """The episode in which the engine gives these answers, and the engine, which knows what it was asked."""
    generator = ScriptedGenerator(answers)
    prompt = Prompt(position=0, id="p", messages=({"role": "user", "content": "Sort 2 1"},), answer="1 2")

    async def score(text: str, prompt: Prompt) -> float:
        return partial_credit(text, prompt.answer, prompt)

    sampling = Sampling(max_new_tokens=32)
    episode = Episode(
        id="e", generator=generator, renderer=Utf8Renderer(), score=score, sampling=sampling, max_tokens=128
    )
    return asyncio.run(SecondChance().run(prompt, episode)), generator


def test_a_right_answer_ends_the_episode() -> None:
    (attempt,), generator = play(r"\boxed{1 2}", "never asked for")
    assert (attempt.reward, len(generator.requests)) == (1.0, 1)


def test_a_wrong_answer_is_told_so_and_only_sampled_tokens_are_trained_on() -> None:
    (first, second), generator = play(r"\boxed{2 1}", r"\boxed{1 2}")
    assert (first.reward, second.reward) == (0.2, 0.5)
    told = "user: Sort 2 1\nassistant: \\boxed{2 1}\nuser: No.\nassistant: "
    assert bytes(generator.requests[1].token_ids).decode() == told
    assert bytes(second.token_ids[second.loss_mask].tolist()).decode() == r"\boxed{1 2}"
