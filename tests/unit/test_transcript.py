"""Transcripts: how requests fit to what was sampled before, and that exactly what was sampled is trained."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialogues import FAMILIES, make_dialogue, said
from replayed import Conversation

from areal_hpc.dialogue.messages import message
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.dialogue.transcript import Drift, Transcript
from areal_hpc.errors import DataError
from areal_hpc.types import NOT_SAMPLED, Completion, StopReason

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = {"id": "c1", "name": "add", "arguments": '{"a": 1}'}
USER = message("user", "What is 2 + 3?")


def completion(ids: Sequence[int], version: int = 3, stop: StopReason = StopReason.STOP) -> Completion:
    return Completion(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
        versions=np.full(len(ids), version, dtype=np.int32),
        stop=stop,
    )


class Talk:
    """A transcript with the shortest way to add to it."""

    def __init__(self, dialogue: ChatRenderer) -> None:
        self.dialogue, self.transcript = dialogue, Transcript(dialogue)

    def turn(self, messages: Sequence[Any], text: str, answer: Any = None, **how: Any) -> int:
        place = self.transcript.place(messages, how.pop("tools", ()))
        ids = how.pop("ids", None) or said(self.dialogue, text, how.pop("end", 0))
        return self.transcript.commit(place, completion(ids), answer or message("assistant", text), **how)

    def drift(self, number: int = -1) -> Drift:
        return self.transcript.turns[number].place.drift


def test_a_second_turn_continues_the_real_tokens(hermes: ChatRenderer) -> None:
    talk = Talk(hermes)
    odd = [*hermes.encode("4"), *hermes.encode(", "), 7, 8, hermes.eos_token_ids[0]]  # not what its text would give
    talk.turn([USER], "4, ", ids=odd)
    follow = [USER, message("assistant", "4, "), message("user", "Sure?")]
    talk.turn(follow, "5")
    first, second = talk.transcript.turns
    assert second.place.drift is Drift.CLEAN
    bridge = hermes.encode("\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n")
    assert second.place.context == first.place.context + tuple(odd) + bridge
    (trajectory,) = talk.transcript.trajectories(final=1.0)
    assert trajectory.token_ids.tolist() == list(second.token_ids)
    assert trajectory.token_ids[trajectory.loss_mask].tolist() == [*odd, *said(hermes, "5")]
    assert trajectory.logprobs[trajectory.loss_mask].tolist() == [*range(-1, -len(odd) - 1, -1), -1, -2]
    assert (trajectory.versions == np.where(trajectory.loss_mask, 3, NOT_SAMPLED)).all()
    assert (trajectory.logprobs[~trajectory.loss_mask] == 0).all()


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "sentencepiece"])
def test_G3_between_turns_is_what_the_template_of_the_whole_has_there(
    dialogues: dict[str, ChatRenderer], family: str
) -> None:
    dialogue = dialogues[family]
    talk = Talk(dialogue)
    talk.turn([USER], "Five.")
    whole = [USER, message("assistant", "Five."), message("user", "And 3 + 4?")]
    talk.turn(whole, "Seven.")
    assert talk.drift() is (Drift.FORK if family == "thinking" else Drift.CLEAN)
    assert talk.transcript.turns[1].place.context == dialogue.conversation(whole)


@pytest.mark.parametrize("family", ["hermes", "glm"])
def test_G6_two_results_of_tools_are_wrapped_as_one_turn(dialogues: dict[str, ChatRenderer], family: str) -> None:
    dialogue = dialogues[family]
    talk = Talk(dialogue)
    calls = [CALL, {**CALL, "id": "c2", "arguments": '{"a": 2}'}]
    answer = message("assistant", "", calls=calls)
    written = (
        "".join(f'\n<tool_call>\n{{"name": "add", "arguments": {{"a": {a}}}}}\n</tool_call>' for a in (1, 2))
        if family == "hermes"
        else "".join(
            f"\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{a}</arg_value>\n</tool_call>" for a in (1, 2)
        )
    )
    talk.turn([USER], written, answer, tools=[TOOL], end=len(dialogue.eos_token_ids) - 1)
    results = [message("tool", "4", answers="c1"), message("tool", "5", answers="c2")]
    talk.turn([USER, answer, *results], "ok", tools=[TOOL])
    assert talk.drift() is Drift.CLEAN
    wanted = [{**answer, "tool_calls": [_parsed(call) for call in answer["tool_calls"]]}]
    assert talk.transcript.turns[1].place.context == dialogue.conversation([USER, *wanted, *results], tools=[TOOL])


def _parsed(call: Any) -> Any:
    return {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}


def test_G5_a_template_that_forgets_old_reasoning_begins_a_new_branch(dialogues: dict[str, ChatRenderer]) -> None:
    dialogue = dialogues["thinking"]
    talk = Talk(dialogue)
    answer = message("assistant", "5", reasoning="two and three")
    talk.turn([USER], "<think>\ntwo and three\n</think>\n\n5", answer)
    talk.turn([USER, message("assistant", "5"), message("user", "Sure?")], "Yes")
    assert talk.drift() is Drift.FORK
    first, second = talk.transcript.trajectories(final=1.0)  # nothing of the old branch is lost, nothing trained twice
    assert first.token_ids[first.loss_mask].tolist() == list(talk.transcript.turns[0].completion.token_ids)
    assert second.token_ids[second.loss_mask].tolist() == list(said(dialogue, "Yes"))


def test_reasoning_that_the_template_keeps_is_continued_though_the_client_left_it_out(
    dialogues: dict[str, ChatRenderer],
) -> None:
    talk = Talk(dialogues["thinking"])
    text = '<think>\nhm\n</think>\n\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    talk.turn([USER], text, message("assistant", "", reasoning="hm", calls=[CALL]), tools=[TOOL])
    seen = message("assistant", None, calls=[CALL])
    talk.turn([USER, seen, message("tool", "4", answers="c1")], "done", tools=[TOOL])
    assert talk.drift() is Drift.CLEAN


@pytest.mark.parametrize(
    ("sent_back", "drift"),
    [
        (message("assistant", "Five. "), Drift.CLEAN),
        (message("assistant", "Five."), Drift.REALIGN),
        (message("assistant", " Five.\n"), Drift.REALIGN),
        (message("assistant", "Six."), Drift.FORK),
    ],
)
def test_G9_stripped_blanks_are_realigned_and_other_words_are_a_fork(
    hermes: ChatRenderer, sent_back: Any, drift: Drift
) -> None:
    talk = Talk(hermes)
    talk.turn([USER], "Five. ")
    talk.turn([USER, sent_back, message("user", "Sure?")], "Yes")
    assert talk.drift() is drift
    assert (talk.transcript.turns[1].token_ids[: len(talk.transcript.turns[0].token_ids)]
            == talk.transcript.turns[0].token_ids) is (drift is not Drift.FORK)  # fmt: skip


@pytest.mark.parametrize("content", [None, "", []])
def test_G9_no_content_has_several_spellings(hermes: ChatRenderer, content: Any) -> None:
    talk = Talk(hermes)
    text = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    talk.turn([USER], text, message("assistant", "", calls=[CALL]), tools=[TOOL])
    again = message("assistant", content, calls=[{**CALL, "id": "other", "arguments": '{ "a":1 }'}])
    talk.turn([USER, again, message("tool", "4", answers="other")], "ok", tools=[TOOL])
    assert talk.drift() is Drift.REALIGN  # the arguments were written anew
    assert talk.transcript.turns[1].place.context[: len(talk.transcript.turns[0].token_ids)] == (
        talk.transcript.turns[0].token_ids
    )


def test_H18_the_first_turn_again_is_a_branch_of_its_own_and_a_retry_is_not_trained(hermes: ChatRenderer) -> None:
    talk = Talk(hermes)
    talk.turn([USER], "lost")
    talk.turn([USER], "Five.")
    talk.turn([USER, message("assistant", "Five."), message("user", "Sure?")], "Yes")
    assert [talk.drift(n) for n in range(3)] == [Drift.START, Drift.START, Drift.CLEAN]
    (trajectory,) = talk.transcript.trajectories(final=1.0)
    assert trajectory.token_ids.tolist() == list(talk.transcript.turns[2].token_ids)


def test_the_same_question_several_times_at_once_is_no_retry(hermes: ChatRenderer) -> None:
    talk = Talk(hermes)
    places = [talk.transcript.place([USER]) for _ in range(3)]
    for number, place in enumerate(places):
        talk.transcript.commit(place, completion(said(hermes, str(number))), message("assistant", str(number)))
    assert talk.transcript.credits(final=1.0) == {0: 1.0, 1: 1.0, 2: 1.0}


def test_G18_the_templates_own_arguments_count_in_every_rendering(tmp_path: Path) -> None:
    dialogue = make_dialogue(tmp_path, "hermes")
    template = "{% if think %}<think>{% endif %}" + dialogue.template
    dialogue._tokenizer.chat_template = template
    transcript, options = Transcript(dialogue), {"think": True}
    first = transcript.place([USER], options=options)
    transcript.commit(first, completion(said(dialogue, "5")), message("assistant", "5"))
    second = transcript.place([USER, message("assistant", "5"), USER], options=options)
    assert second.drift is Drift.CLEAN
    assert dialogue.spelled(second.context).startswith("<think>")
    assert transcript.place([USER, message("assistant", "5"), USER]).drift is Drift.FORK
    with pytest.raises(DataError, match="'tokenize'"):
        transcript.place([USER], options={"tokenize": False})


def test_a_turn_cut_by_length_is_forked_and_so_is_one_that_a_stop_string_ended(hermes: ChatRenderer) -> None:
    talk = Talk(hermes)
    talk.turn([USER], "Fi", ids=hermes.encode("Fi"))
    talk.turn([USER, message("assistant", "Fi"), message("user", "Go on")], "ve")
    assert talk.drift() is Drift.FORK
    assert talk.transcript.turns[1].place.parent == 0  # credit still flows
    assert len(talk.transcript.trajectories(final=1.0)) == 2


def test_other_tools_are_another_prompt(hermes: ChatRenderer) -> None:
    talk = Talk(hermes)
    talk.turn([USER], "Five.", tools=[TOOL])
    talk.turn([USER, message("assistant", "Five."), message("user", "Sure?")], "Yes")
    assert talk.drift() is Drift.FORK


def test_G8_tools_are_rendered_as_they_were_sent(hermes: ChatRenderer) -> None:
    """The engine gets ids, so that what it continues is what this one rendering made of key order and ``strict``."""
    tool = {"type": "function", "function": {"strict": False, "name": "add", "parameters": {"b": 1, "a": 2}}}
    ids = Transcript(hermes).place([USER], [tool]).context
    assert json.dumps(tool) in hermes.spelled(ids)


def test_branches_share_their_prefix_once_and_credit_is_their_mean(hermes: ChatRenderer) -> None:
    talk = Talk(hermes)
    talk.turn([USER], "Five.")
    history = [USER, message("assistant", "Five.")]
    talk.turn([*history, message("user", "In French?")], "Cinq.")
    talk.turn([*history, message("user", "In German?")], "Fünf.")
    assert talk.transcript.credits(rewards={1: 1.0, 2: 0.0}) == {0: 0.5, 1: 1.0, 2: 0.0}
    assert talk.transcript.credits(rewards={1: 1.0, 2: 0.5}, discount=0.5) == {0: 0.375, 1: 1.0, 2: 0.5}
    rewarded = talk.transcript.trajectories(rewards={1: 1.0, 2: 0.0})
    assert [t.reward for t in rewarded] == [0.5, 1.0, 0.0]
    assert [t.num_generated for t in rewarded] == [turn.completion.token_ids.size for turn in talk.transcript.turns]
    alike = talk.transcript.trajectories(final=1.0)
    assert [t.reward for t in alike] == [1.0, 1.0]  # the first branch has the prefix as well
    assert sum(t.num_generated for t in alike) == sum(t.completion.token_ids.size for t in talk.transcript.turns)


def test_a_discount_by_turn_gives_each_turn_its_own_reward(hermes: ChatRenderer) -> None:
    talk = Talk(hermes)
    messages: list[Any] = [USER]
    for number in range(3):
        talk.turn(messages, str(number))
        messages += [message("assistant", str(number)), message("user", "next")]
    trajectories = talk.transcript.trajectories(final=1.0, discount=0.5)
    assert [t.reward for t in trajectories] == [0.25, 0.5, 1.0]
    assert [t.num_generated for t in trajectories] == [2, 2, 2]


def test_nothing_rewarded_is_nothing_to_train_on(hermes: ChatRenderer) -> None:
    talk = Talk(hermes)
    talk.turn([USER], "Five.")
    assert talk.transcript.trajectories() == []


def test_G15_a_tokenizer_that_is_not_stable_at_the_seams_is_never_cut_there(
    dialogues: dict[str, ChatRenderer],
) -> None:
    dialogue = dialogues["sentencepiece"]
    assert dialogue.encode("a") + dialogue.encode(" b") != dialogue.encode("a b")
    talk = Talk(dialogue)
    talk.turn([USER], " b a")
    talk.turn([USER, message("assistant", " b a"), message("user", " a")], "b")
    first, second = talk.transcript.turns
    assert second.place.drift is Drift.CLEAN
    assert second.place.context[: len(first.token_ids)] == first.token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_random_conversations_train_exactly_what_was_sampled(dialogues: dict[str, ChatRenderer], family: str) -> None:
    """As ``tests/benchmarks/replay_conversations.py`` does 10,000 times."""
    drifts: Counter[Drift] = Counter()
    for seed in range(60):
        conversation = Conversation(dialogues[family], random.Random(f"{family}/{seed}"))
        conversation.play()
        assert conversation.mismatches() == [], f"{family}, seed {seed}"
        drifts += conversation.transcript.drifts
    assert set(drifts) == set(Drift), drifts


class Telling:
    """Says of every token but the last, from the first that it was asked for, its place in the sequence."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk

    def turn(self, messages: Sequence[Any], text: str) -> int:
        transcript = self.talk.transcript
        place = transcript.place(messages)
        ids = said(self.talk.dialogue, text, 0)
        first, num_tokens = transcript.num_recorded(place), len(place.context) + len(ids)
        experts = np.array([*range(first, num_tokens - 1), 65535], dtype=np.uint16)[:, None, None]
        told = replace(completion(ids), experts=experts)
        return transcript.commit(place, told, message("assistant", text))


def test_each_token_has_the_experts_that_were_told_of_it_once(hermes: ChatRenderer) -> None:
    """Later turns ask for what is new alone; a branch has those of the turns before it, wherever these are trained."""
    talk = Talk(hermes)
    telling = Telling(talk)
    telling.turn([USER], "Five.")
    asked = [USER, message("assistant", "Five."), message("user", "Sure?")]
    telling.turn(asked, "Yes.")
    telling.turn([*asked, message("assistant", "Yes."), message("user", "Why?")], "So.")
    telling.turn([USER, message("assistant", "Five."), message("user", "Really?")], "No.")
    turns = talk.transcript.turns
    assert [turn.place.drift for turn in turns[1:]] == [Drift.CLEAN] * 3
    for turn, parent in ((turns[1], turns[0]), (turns[2], turns[1]), (turns[3], turns[0])):
        assert turn.completion.experts is not None
        assert len(turn.completion.experts) == len(turn.token_ids) - len(parent.token_ids) + 1
    main, branch = talk.transcript.trajectories(final=1.0)
    assert {main.token_ids.size, branch.token_ids.size} == {len(turns[2].token_ids), len(turns[3].token_ids)}
    for trajectory in (main, branch):
        assert trajectory.experts is not None
        assert trajectory.experts.ravel().tolist() == [*range(trajectory.token_ids.size - 1), 65535]


def test_a_turn_that_tells_none_leaves_its_own_tokens_without_and_the_next_asks_for_all(hermes: ChatRenderer) -> None:
    talk = Talk(hermes)
    telling = Telling(talk)
    telling.turn([USER], "Five.")
    asked = [USER, message("assistant", "Five."), message("user", "Sure?")]
    talk.turn(asked, "Yes.")
    (trajectory,) = talk.transcript.trajectories(final=1.0)
    known = len(talk.transcript.turns[0].token_ids) - 1
    unknown = [65535] * (trajectory.token_ids.size - known)
    assert trajectory.experts is not None
    assert trajectory.experts.ravel().tolist() == [*range(known), *unknown]
    telling.turn([*asked, message("assistant", "Yes."), message("user", "Why?")], "So.")
    (trajectory,) = talk.transcript.trajectories(final=1.0)
    assert trajectory.experts is not None
    assert trajectory.experts.ravel().tolist() == [*range(trajectory.token_ids.size - 1), 65535]
