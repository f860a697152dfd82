"""A trained reward model as a reward: the score of the prompt's conversation with the text as its answer.

What ``rollout.reward`` names with a directory. It runs where every reward does, in a worker of ``reward_pool``, on the
CPU and on one answer at a time; ``rollout.reward_workers`` of them run side by side, each with its own copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_hpc.dialogue.demonstration import demonstrate
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.types import Prompt


class ModelReward:
    """``reward(text, answer, prompt)`` of the reward model in ``directory``.

    Raises:
        DataError: by ``prepare``, if the directory holds none; by a call, if the template refuses the conversation.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._renderer: Any = None
        self._model: Any = None

    def prepare(self) -> None:
        """Load the model: the slow part, which no time limit of a single reward is for."""
        from areal_hpc.scorer import load_scorer

        self._renderer = ChatRenderer(self._directory)
        self._model = load_scorer(Path(self._directory), new_head=False)

    def __call__(self, text: str, answer: Any, prompt: Prompt) -> float:
        import torch

        from areal_hpc.scorer import scores

        conversation = (*prompt.messages, {"role": "assistant", "content": text})
        where, num_context = f"prompt {prompt.id}", len(prompt.messages)
        token_ids = demonstrate(conversation, self._renderer, where, num_context=num_context).token_ids
        with torch.inference_mode():
            decoder = self._model.get_decoder()
            hidden = decoder(input_ids=torch.from_numpy(token_ids).long().unsqueeze(0), use_cache=False)
            return float(scores(self._model, hidden.last_hidden_state[:, -1]))
