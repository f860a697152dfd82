"""Random conversations of a careless client with a model that says anything, and a check of what they train.

The model: text of odd Unicode, broken bytes, thoughts, tool calls, several at once, malformed; ended or cut. The
client: goes on, sends blanks stripped and arguments written anew, asks again, goes back and takes another way, rewrites
history.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_hpc.dialogue.messages import message
from areal_hpc.dialogue.parts import Reading
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.dialogue.tool_calls import kinds_of
from areal_hpc.dialogue.tool_formats import FORMATS, detect
from areal_hpc.dialogue.transcript import Transcript, Turn
from areal_hpc.types import Completion, Message, StopReason

ALPHABET = "ab 1\n\t{}<>\"'\\é今🙂\u200d\u0301\ufffd"
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}},
    },
}
CALLS = {
    "hermes": '<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>',
    "llama3": '{{"name": "look", "parameters": {arguments}}}',
    "glm": "<tool_call>look\n<arg_key>q</arg_key>\n<arg_value>{q}</arg_value>\n</tool_call>",
}


class Conversation:
    """One of them; ``sent`` are the engine's requests and answers, in their order, as the engine knows them."""

    def __init__(self, dialogue: ChatRenderer, rng: random.Random) -> None:
        self._dialogue, self._rng = dialogue, rng
        self._format = detect(dialogue.template)
        self._tools = [TOOL] if rng.random() < 0.7 else []
        self.transcript = Transcript(dialogue)
        self.sent: list[tuple[tuple[int, ...], Completion]] = []
        self._histories: list[list[Message]] = [self._begin()]

    def play(self) -> None:
        for _ in range(self._rng.randint(2, 8)):
            history = self._histories[-1] if self._rng.random() < 0.7 else self._rng.choice(self._histories)
            self._ask(self._careless(history))

    def _begin(self) -> list[Message]:
        system = [message("system", self._words())] if self._rng.random() < 0.5 else []
        return [*system, message("user", self._words())]

    def _words(self, most: int = 12) -> str:
        return "".join(self._rng.choices(ALPHABET, k=self._rng.randint(0, most)))

    def _ask(self, messages: list[Message]) -> None:
        place = self.transcript.place(messages, self._tools)
        ids, stop = self._sampled()
        answered = Completion(
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.array([-self._rng.random() for _ in ids], dtype=np.float32),
            versions=np.array([self._rng.randint(0, 9) for _ in ids], dtype=np.int32),
            stop=stop,
        )
        self.sent.append((place.context, answered))
        answer = self._read(ids)
        self.transcript.commit(place, answered, answer)
        results = [message("tool", self._words(), answers=c["id"]) for c in answer.get("tool_calls", ())]
        self._histories.append([*messages, answer, *(results or [message("user", self._words())])])

    def _sampled(self) -> tuple[list[int], StopReason]:
        text = f"<think>{self._words()}</think>" if self._rng.random() < 0.3 else ""
        text += self._words()
        if self._tools and self._rng.random() < 0.6:
            call = CALLS[self._format]
            for _ in range(self._rng.randint(1, 3)):
                q = self._words(5)
                arguments = json.dumps({"q": q}, ensure_ascii=self._rng.random() < 0.5)
                text += call.format(arguments=arguments[: self._rng.choice([None, None, 4])], q=q)
        ids = list(self._dialogue.encode(text))
        if self._rng.random() < 0.2:
            ids[self._rng.randint(0, len(ids)) :] = [self._rng.randrange(256)]  # bytes that may be no text
        if self._rng.random() < 0.2:
            return ids or [0], StopReason.LENGTH
        return [*ids, self._rng.choice(self._dialogue.eos_token_ids)], StopReason.STOP

    def _read(self, ids: Sequence[int]) -> Message:
        text = self._dialogue.spelled(ids[:-1] if ids[-1] in self._dialogue.eos_token_ids else ids)
        written = FORMATS[self._format] if self._tools else None
        parts = Reading(format=written, kinds=kinds_of(self._tools)).read(text, final=True)
        calls = [
            {"id": f"c{len(self.sent)}.{place}", "name": c.name, "arguments": c.arguments}
            for place, c in enumerate(parts.calls)
        ]
        return message("assistant", parts.content, reasoning=parts.reasoning, calls=calls)

    def _careless(self, history: list[Message]) -> list[Message]:
        """The history as this client sends it."""
        return [self._rewritten(m) if m["role"] == "assistant" else m for m in history]

    def _rewritten(self, one: Message) -> Message:
        kept: dict[str, Any] = {key: value for key, value in one.items() if key != "reasoning_content"}
        if self._rng.random() < 0.2:
            kept["content"] = kept["content"].strip()
        if self._rng.random() < 0.2 and "tool_calls" in kept:
            kept["tool_calls"] = [self._spaced(call) for call in kept["tool_calls"]]
        if self._rng.random() < 0.05:
            kept["content"] += "!"
        return kept

    def _spaced(self, call: Any) -> Any:
        try:
            arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        except ValueError:
            return call
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def mismatches(self) -> list[str]:
        """Every difference between what the engine saw and sampled and what is trained."""
        found, turns = [], self.transcript.turns
        rewards = {number: float(number) for number in range(len(turns)) if self._rng.random() < 0.3}
        discount = self._rng.choice([1.0, 0.9])
        worth = self.transcript.credits(final=0.5, rewards=rewards, discount=discount)
        trained: list[int] = []
        for trajectory in self.transcript.trajectories(final=0.5, rewards=rewards, discount=discount):
            ids, mask = trajectory.token_ids.tolist(), trajectory.loss_mask
            claimed = np.zeros(mask.size, dtype=bool)
            for number, (context, completion) in enumerate(self.sent):
                span = slice(len(context), len(context) + completion.token_ids.size)
                if not mask[span].all() or tuple(ids[: span.stop]) != (*context, *completion.token_ids.tolist()):
                    continue
                same = (trajectory.logprobs[span] == completion.logprobs) & (
                    trajectory.versions[span] == completion.versions
                )
                if same.all() and number not in trained and trajectory.reward == worth.get(number):
                    trained.append(number)
                    claimed[span] = True
            if (claimed != mask).any():
                found.append(
                    f"{int((claimed != mask).sum())} tokens are trainable that the engine did not sample there"
                )
        if sorted(trained) != sorted(worth):
            found.append(f"turns {sorted(trained)} are trained, and {sorted(worth)} have credit")
        return found + [f"turn {n} was not kept as sent" for n, t in enumerate(turns) if not self._kept(n, t)]

    def _kept(self, number: int, turn: Turn) -> bool:
        context, completion = self.sent[number]
        return turn.token_ids == (*context, *completion.token_ids.tolist())
