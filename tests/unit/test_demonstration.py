"""Given answers become the tokens that an engine would have sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_hpc.config.recipes import Data
from areal_hpc.dialogue.demonstration import conversations_of, demonstrate, group_of
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.errors import DataError
from areal_hpc.types import Prompt, Trajectory
from tests.tiny_models import CHATML, make_tokenizer

ASKED = ({"role": "user", "content": "2 and 2?"},)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return renderer_of(tmp_path_factory.mktemp("tokenizer"))


def renderer_of(path: Path, template: str = CHATML) -> ChatRenderer:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return ChatRenderer(str(path))


def prompt_of(answer: Any = "4", messages: Any = ASKED, **columns: Any) -> Prompt:
    return Prompt(position=3, id="sums.jsonl/7", messages=messages, answer=answer, metadata=columns)


def trained_text(trajectory: Trajectory, renderer: ChatRenderer) -> str:
    return renderer.decode(trajectory.token_ids[trajectory.loss_mask].tolist())


def test_an_answer_follows_the_prompt_that_an_engine_gets_and_ends_its_turn(renderer: ChatRenderer) -> None:
    (found,) = group_of(prompt_of(), renderer, Data.RESPONSES, "rejected").trajectories
    prompt, end = renderer.render(ASKED), renderer.encode("<|im_end|>")
    assert tuple(found.token_ids) == (*prompt, *renderer.encode("4"), *end)  # and not the newline that follows
    assert found.loss_mask.tolist() == [False] * len(prompt) + [True, True]
    assert set(found.versions.tolist()) == {-1}
    assert not found.logprobs.any()
    assert end[0] in renderer.eos_token_ids


def test_the_whole_is_what_transformers_makes_of_the_conversation(renderer: ChatRenderer, tmp_path: Path) -> None:
    """transformers marks the assistant's tokens by ``generation`` blocks; a byte a token, so borders are the same."""
    conversation = [*ASKED, {"role": "assistant", "content": "4"}, *ASKED, {"role": "assistant", "content": "five"}]
    marked = CHATML.replace(
        "{{ m['content'] }}<|im_end|>\n",
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}",  # a newline after a block would be trimmed
    )
    tokenizer = make_tokenizer()
    expected = tokenizer.apply_chat_template(
        conversation, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
    )
    found = demonstrate(conversation, renderer, "here")
    length = found.token_ids.size
    assert found.token_ids.tolist() == expected["input_ids"][:length]
    assert found.loss_mask.tolist() == [bool(trains) for trains in expected["assistant_masks"][:length]]
    assert not any(expected["assistant_masks"][length:])


def test_pairs_have_the_better_answer_first(renderer: ChatRenderer) -> None:
    rejected = [{"role": "assistant", "content": "five"}]
    group = group_of(prompt_of(worse=rejected), renderer, Data.PAIRS, "worse")
    assert [trained_text(trajectory, renderer) for trajectory in group.trajectories] == ["4", "five"]
    assert group.rewards.tolist() == [1.0, 0.0]
    assert group.position == 3


def test_an_assistants_turns_in_the_prompt_are_context(renderer: ChatRenderer) -> None:
    """As in an episode: the model is not to learn what it, or whoever wrote the examples, had said before."""
    prompt = (*ASKED, {"role": "assistant", "content": "five"}, {"role": "user", "content": "Sure?"})
    (found,) = group_of(prompt_of("4", prompt), renderer, Data.RESPONSES, "rejected").trajectories
    context = renderer.render(prompt)
    assert tuple(found.token_ids[: len(context)]) == context
    assert found.loss_mask.tolist() == [False] * len(context) + [True, True]
    pair = group_of(prompt_of("4", prompt, worse="6"), renderer, Data.PAIRS, "worse").trajectories
    assert [trained_text(trajectory, renderer) for trajectory in pair] == ["4", "6"]


def test_a_conversation_is_its_own_answer(renderer: ChatRenderer) -> None:
    messages = (*ASKED, {"role": "assistant", "content": "4"}, *ASKED, {"role": "assistant", "content": "still 4"})
    (found,) = group_of(prompt_of(None, messages), renderer, Data.RESPONSES, "rejected").trajectories
    assert trained_text(found, renderer) == "4still 4"


def test_header_and_answer_share_no_token(tmp_path: Path) -> None:
    """With merges, a newline at the start of an answer would melt into that of the header, which no engine samples."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "ĊĊ", "<|im_start|>", "<|im_end|>"]
    made = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[("Ċ", "Ċ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )
    fast.save_pretrained(tmp_path)
    renderer = ChatRenderer(str(tmp_path))
    found = demonstrate([*ASKED, {"role": "assistant", "content": "\n4"}], renderer, "here")
    context = renderer.render(ASKED)
    assert tuple(found.token_ids[: len(context)]) == context
    assert len(renderer.encode("\n\n")) == 1


def refused(prompt: Prompt, renderer: ChatRenderer, data: Data = Data.RESPONSES) -> str:
    with pytest.raises(DataError) as caught:
        group_of(prompt, renderer, data, "rejected")
    assert str(caught.value).startswith("row sums.jsonl/7")
    return str(caught.value)


@pytest.mark.parametrize("answer", ["", "  ", 4, [], ["4"], [{"role": "user", "content": "4"}], {"content": "4"}])
def test_an_answer_is_a_text_or_messages(answer: Any, renderer: ChatRenderer) -> None:
    assert "the answer is a text, or a list of the messages that follow" in refused(prompt_of(answer), renderer)


def test_a_row_without_a_worse_answer_is_named(renderer: ChatRenderer) -> None:
    assert "no column 'rejected', there are worse" in refused(prompt_of(worse="5"), renderer, Data.PAIRS)
    assert "the worse answer is a text" in refused(prompt_of(rejected=None), renderer, Data.PAIRS)


def test_a_conversation_without_a_last_answer_is_refused(renderer: ChatRenderer) -> None:
    assert "ends with a turn of 'user'" in refused(prompt_of(None), renderer)
    alone = prompt_of(None, ({"role": "assistant", "content": "4"},))
    assert "nothing comes before the assistant's turn" in refused(alone, renderer)


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    """Some templates drop the thoughts of all turns but the last: those tokens no engine would have seen."""
    forgetful = CHATML.replace("{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] == 'user' else '' }}")
    renderer = renderer_of(tmp_path, forgetful)
    messages = (*ASKED, {"role": "assistant", "content": "4"}, *ASKED, {"role": "assistant", "content": "4"})
    assert "writes turn 3 differently" in refused(prompt_of(None, messages), renderer)
    assert np.count_nonzero(demonstrate(messages[:2], renderer, "here").loss_mask) == 2  # one answer is well


def test_conversations_need_no_tokenizer_to_be_looked_at() -> None:
    assert conversations_of(prompt_of(), Data.RESPONSES, "rejected") == (
        (*ASKED, {"role": "assistant", "content": "4"}),
    )
