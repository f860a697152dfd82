"""The tiny model with a tool: what it is taught is what its template renders and what the service reads."""

from __future__ import annotations

import json
import random
from itertools import islice

import pytest

from areal_hpc.dialogue.probe import tool_trouble
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.dialogue.tool_formats import FORMATS, detect
from areal_hpc.tasks import tool_model
from areal_hpc.tasks.calculator import NUMBER, calculate
from areal_hpc.tasks.tiny_model import Recipe

SHORT = Recipe(batch=2, check_every=1, skill_goal=0.0, habit_goal=(0.0, 1.0), kept_skill=0.0)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    path = tmp_path_factory.mktemp("models") / "tiny-tool"
    tool_model.make(path, 1, SHORT)
    return ChatRenderer(str(path))


def test_its_template_serves_tools(renderer: ChatRenderer) -> None:
    assert tool_trouble(renderer) == ""
    assert detect(renderer.template) == "hermes"


def test_a_right_call_is_what_the_service_reads_and_the_template_writes(renderer: ChatRenderer) -> None:
    asked, told = next(tool_model.CALLING.dialogues(5))
    assert asked.answer.startswith(asked.opening)
    (call,), rest = FORMATS["hermes"].parse(asked.answer, {})
    assert call.name == "calculator" and rest == ""
    assert calculate(json.loads(call.arguments)["expression"]) == told.answer == told.messages[-1]["content"]
    tools = tool_model.CALLING.tools
    before = renderer.spelled(renderer.conversation(asked.messages, tools=tools))
    whole = renderer.spelled(renderer.conversation(told.messages, tools=tools))
    assert (
        whole == f"{before}{asked.answer}<|im_end|>\n<|im_start|>tool\n{told.answer}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert before.startswith("<|im_start|>system\ncalculator(expression)\n<|im_end|>\n<|im_start|>user\nWhat is ")


def test_a_dialogue_has_room_in_the_examples_budget(renderer: ChatRenderer) -> None:
    for asked, told in islice(tool_model.CALLING.dialogues(6), 100):
        assert len(renderer.encode(asked.answer)) < 48
        assert len(renderer.conversation(told.messages, tools=tool_model.CALLING.tools)) < 128


def test_habits_seldom_call_and_are_nearly_never_right() -> None:
    rng = random.Random(0)
    dialogues = list(islice(tool_model.CALLING.dialogues(7), 2000))
    first = [(asked.habit(rng), asked.answer, told.answer) for asked, told in dialogues]
    called = [(said, right) for said, right, _ in first if said.startswith(tool_model.OPENING)]
    assert len(called) / len(first) == pytest.approx(0.16, abs=0.02)
    assert sum(said == right for said, right in called) / len(called) == pytest.approx(0.91, abs=0.05)
    guessed = [NUMBER.findall(said) == [result] for said, _, result in first if "<tool_call>" not in said]
    assert sum(guessed) / len(guessed) < 0.01
    second = [told.habit(rng) == told.answer for _, told in dialogues]
    assert sum(second) / len(second) == pytest.approx(0.91, abs=0.02)
