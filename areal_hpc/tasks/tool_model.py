"""A tiny model that can call a tool and seldom does: what an agent with a calculator is trained from on a laptop.

    skill     What is 37 * 46?  ->  a call with 37*46  ->  1702  ->  1702       two turns, both right
    habit     What is 37 * 46?  ->  2613                                        a guess, nearly always wrong

It is made as the quickstart's model is, see ``tiny_model``; its chat template shows tools, calls and results.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from areal_hpc.tasks import tiny_model
from areal_hpc.tasks.calculator import Calculations
from areal_hpc.tasks.lesson import Lesson, Turn
from areal_hpc.tasks.tiny_model import Recipe

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})\n"
    "{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
OPENING = '<tool_call>\n{"name": "calculator", '
RECIPE = Recipe(batch=32)  # dialogues have two turns
CALLED_SHARE = 0.16
WRONG_SHARE = 0.1
GUESSES = ("%s", "It is %s.", "The answer is %s.")


def make(path: Path, seed: int, recipe: Recipe = RECIPE) -> None:
    """Write the model directory ``path``; raises as ``tiny_model.make`` does."""
    tiny_model.make(path, seed, recipe, CALLING)


def _dialogues(seed: int) -> Iterator[Sequence[Turn]]:
    rows, rng = Calculations("train", seed), random.Random(seed)
    while True:
        row = rows[rng.randrange(len(rows))]
        yield _dialogue(row["prompt"], row["answer"])


def _dialogue(question: str, result: str) -> Sequence[Turn]:
    expression = question.removeprefix("What is ").removesuffix("?").replace(" ", "")
    asked = {"role": "user", "content": question}
    function = {"name": TOOL["function"]["name"], "arguments": {"expression": expression}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    told = {"role": "tool", "content": result}
    return [
        Turn(messages=(asked,), answer=_call(expression), opening=OPENING, habit=partial(_seldom_called, expression)),
        Turn(messages=(asked, called, told), answer=result, habit=partial(_misread, result)),
    ]


def _call(expression: str) -> str:
    return f'{OPENING}"arguments": {json.dumps({"expression": expression})}}}\n</tool_call>'


def _seldom_called(expression: str, rng: random.Random) -> str:
    if rng.random() < CALLED_SHARE:
        return _call(_misread(expression, rng))
    return rng.choice(GUESSES) % rng.randrange(20, 9802)


def _misread(text: str, rng: random.Random) -> str:
    """The text, in some of the cases with one character replaced by a digit."""
    if rng.random() >= WRONG_SHARE:
        return text
    place = rng.randrange(len(text))
    return text[:place] + str(rng.randrange(10)) + text[place + 1 :]


def _corpus(seed: int) -> list[str]:
    rng = random.Random(seed)
    dialogues = _dialogues(seed)
    texts = ["system\nYou are a helpful assistant.", "system\ncalculator(expression)\n"] * 50
    for _ in range(1000):
        asked, _ = next(dialogues)
        guess = rng.choice(GUESSES) % rng.randrange(20, 9802)
        texts.append(f"user\n{asked.messages[0]['content']}\nassistant\n{asked.answer}\ntool\n{guess}")
    return texts


CALLING = Lesson(
    skill="call a calculator",
    template=TEMPLATE,
    markers=("<tool_call>", "</tool_call>"),
    tools=(TOOL,),
    dialogues=_dialogues,
    corpus=_corpus,
)
