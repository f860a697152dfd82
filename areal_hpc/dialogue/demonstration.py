"""Given answers as training data: the tokens of a conversation, and which of them the assistant wrote.

    prompt, answer                   one trajectory; the answer's tokens are trained on, no turn of the prompt's
    a conversation                   one trajectory; every assistant turn is
    prompt, chosen, rejected         two trajectories, the better one first

A turn's tokens are those that an engine would have sampled after the turn's header, up to and with the end of the
turn: header and answer are tokenized apart, so that no token lies across the border, and what the template writes after
the end of the last turn is not part of the sequence. Nothing is ever cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from areal_hpc.config.recipes import Data
from areal_hpc.errors import DataError
from areal_hpc.types import NOT_SAMPLED, Message, Prompt, StopReason, Trajectory, TrajectoryGroup

BETTER, WORSE = 1.0, 0.0
"""Rewards of given answers: one to learn, or the better one of a pair; and the worse one."""


class Template(Protocol):
    """What ``ChatRenderer`` knows of a model's template and tokenizer."""

    eos_token_ids: tuple[int, ...]

    def text(self, messages: Sequence[Message], *, header: bool) -> str: ...

    def encode(self, text: str) -> tuple[int, ...]: ...


def conversations_of(prompt: Prompt, data: Data, rejected_key: str) -> tuple[tuple[Message, ...], ...]:
    """The conversations that a prompt's row holds: one, or with pairs two; each ends with an assistant turn.

    Raises:
        DataError: an answer is missing or is none; names the row and the column's place.
    """
    where = f"row {prompt.id}"
    if data is Data.PAIRS:
        if rejected_key not in prompt.metadata:
            names = ", ".join(prompt.metadata) or "none besides prompt and answer"
            raise DataError(f"{where}: no column {rejected_key!r}, there are {names}; set prompts.rejected_key")
        answers = {"the better answer": prompt.answer, "the worse answer": prompt.metadata[rejected_key]}
        return tuple((*prompt.messages, *_answer(answer, f"{where}, {what}")) for what, answer in answers.items())
    given = () if prompt.answer is None else _answer(prompt.answer, f"{where}, the answer")
    conversation = (*prompt.messages, *given)
    if conversation[-1]["role"] != "assistant":
        raise DataError(
            f"{where}: the conversation ends with a turn of {conversation[-1]['role']!r}, so there is no last answer "
            "to learn; mend the row, or set prompts.answer_key to the column of answers"
        )
    return (conversation,)


def _answer(answer: Any, where: str) -> tuple[Message, ...]:
    """An answer as messages: a text, or messages that follow the prompt's and end with the assistant's."""
    if isinstance(answer, str) and answer.strip():
        return ({"role": "assistant", "content": answer},)
    messages = answer if isinstance(answer, list | tuple) and all(isinstance(one, Mapping) for one in answer) else ()
    if messages and messages[-1].get("role") == "assistant":
        return tuple(messages)
    raise DataError(
        f"{where} is a text, or a list of the messages that follow the prompt, the assistant's last; not "
        f"{answer!r:.80}; mend the row"
    )


def group_of(prompt: Prompt, template: Template, data: Data, rejected_key: str) -> TrajectoryGroup:
    """The prompt's given answers as trajectories that nobody sampled: log-probs 0, versions ``NOT_SAMPLED``.

    Raises:
        DataError: see ``conversations_of`` and ``demonstrate``.
    """
    conversations = conversations_of(prompt, data, rejected_key)
    rewards = (BETTER, WORSE) if data is Data.PAIRS else (BETTER,)
    num_context = 0 if prompt.answer is None else len(prompt.messages)
    return TrajectoryGroup(
        position=prompt.position,
        prompt_id=prompt.id,
        trajectories=tuple(
            demonstrate(
                conversation,
                template,
                f"row {prompt.id}",
                num_context=num_context,
                reward=reward,
                episode=episode,
            )
            for episode, (conversation, reward) in enumerate(zip(conversations, rewards, strict=True))
        ),
    )


def demonstrate(
    messages: Sequence[Message],
    template: Template,
    where: str,
    *,
    num_context: int = 0,
    reward: float = BETTER,
    episode: int = 0,
) -> Trajectory:
    """The conversation up to the end of its last assistant turn, all of whose assistant turns are trained on.

    Args:
        num_context: so many messages at the beginning are context, whoever wrote them, as a prompt's are in an episode.

    Raises:
        DataError: the template rewrites earlier turns when later ones follow, or refuses the messages.
    """
    token_ids, mask, done = list[int](), list[bool](), ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index == 0 or index < num_context:
            continue
        before = template.text(messages[:index], header=True)
        after = template.text(messages[: index + 1], header=False)
        if not (before.startswith(done) and after.startswith(before)):
            raise DataError(
                f"{where}: the chat template writes turn {index} differently when other turns follow or it is being "
                "generated, so its tokens are not those that the model would produce; give one answer a row"
            )
        context, answer = template.encode(before[len(done) :]), template.encode(after[len(before) :])
        ends = [place + 1 for place, token in enumerate(answer) if token in template.eos_token_ids]
        trained = ends[-1] if ends else len(answer)
        token_ids += [*context, *answer]
        mask += [False] * len(context) + [True] * trained + [False] * (len(answer) - trained)
        done = after
    length = max((place + 1 for place, trains in enumerate(mask) if trains), default=0)
    if length == 0:
        raise DataError(f"{where}: nothing comes before the assistant's turn; mend the row")
    return Trajectory(
        token_ids=np.array(token_ids[:length], dtype=np.int32),
        loss_mask=np.array(mask[:length], dtype=np.bool_),
        logprobs=np.zeros(length, dtype=np.float32),
        versions=np.full(length, NOT_SAMPLED, dtype=np.int32),
        reward=reward,
        stop=StopReason.STOP,
        episode=episode,
    )
