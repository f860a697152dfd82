"""Calls that are held to their schemas, token by token: nothing else behind a trigger, anything before and after."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dialogues import make_dialogue
from embedded_engines import FREE, PROMPT, MakeEngine, Models, complete, engines, one, two_models
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB_SIZE, make_tokenizer
from transformers import PreTrainedTokenizerFast

from areal_hpc.dialogue.grammar import LAYOUT, Grammars, Matcher, grammar_of_tag
from areal_hpc.dialogue.structural_tag import calls_tag, lark_of
from areal_hpc.dialogue.tool_formats import FORMATS
from areal_hpc.errors import DataError

TOKENIZER = make_tokenizer()
EOS = TOKENIZER.eos_token_id
GRAMMARS = Grammars(TOKENIZER, [EOS], VOCAB_SIZE)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}


TOOLS = (tool("add", a={"type": "integer", "minimum": 0, "maximum": 99}), tool("say", word={"enum": ["x", "y"]}))
MAY = calls_tag(FORMATS["hermes"], TOOLS, forced=False)
MUST = calls_tag(FORMATS["hermes"], TOOLS, forced=True)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>'


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return two_models(tmp_path_factory)


@pytest.fixture
def make_engine(models: Models) -> Iterator[MakeEngine]:
    with engines(models) as make:
        yield make


def taken(matcher: Matcher, text: str) -> None:
    for token in TOKENIZER.encode(text):
        assert matcher.allowed()[token], (text, TOKENIZER.decode([token]))
        matcher.take(token)


def may_end(matcher: Matcher) -> bool:
    return bool(matcher.allowed()[EOS])


def is_call(text: str) -> bool:
    """Whether TOOLS, read by a person, allow it."""
    made = json.loads(text)
    arguments = made["arguments"]
    if list(made) != ["name", "arguments"] or made["name"] not in ("add", "say"):
        return False
    if made["name"] == "say":
        return arguments in ({"word": "x"}, {"word": "y"})
    return list(arguments) == ["a"] and type(arguments["a"]) is int and 0 <= arguments["a"] <= 99


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_what_follows_a_trigger_is_a_call_of_the_schema(seed: int, forced: bool) -> None:
    matcher, rng = GRAMMARS.matcher(structural_tag=MUST if forced else MAY), np.random.default_rng(seed)
    sampled: list[int] = []
    if not forced:
        taken(matcher, "Let me see.\n<tool_call>")
    for _ in range(200):
        allowed = matcher.allowed()
        if allowed[EOS]:
            break
        sampled.append(int(rng.choice(np.flatnonzero(allowed))))
        matcher.take(sampled[-1])
    text = TOKENIZER.decode(sampled).removeprefix("<tool_call>")
    assert text.endswith("\n</tool_call>") and is_call(text.removesuffix("</tool_call>"))


@pytest.mark.parametrize(
    "text", ["", "yes", "a <tool_cal", '{"name": "add"}', CALL, f"First:\n{CALL}\nthen {CALL}{CALL} and <tool_c"]
)
def test_text_is_free_before_and_after_calls(text: str) -> None:
    matcher = GRAMMARS.matcher(structural_tag=MAY)
    taken(matcher, text)
    assert may_end(matcher)


def test_an_answer_that_must_call_begins_with_a_call_and_may_go_on() -> None:
    matcher = GRAMMARS.matcher(structural_tag=MUST)
    allowed = {TOKENIZER.decode([token])[:1] for token in np.flatnonzero(matcher.allowed())}
    assert allowed == {"<"} and not may_end(matcher)
    taken(matcher, CALL + "\n" + CALL)
    assert may_end(matcher)


@given(st.integers(0, 99))
def test_every_call_of_the_schema_can_be_made(a: int) -> None:
    matcher = GRAMMARS.matcher(structural_tag=MUST)
    taken(matcher, CALL.replace("7", str(a)))
    assert may_end(matcher)


def test_a_marker_that_whoever_reads_the_grammar_takes_for_no_text_is_in_it_as_a_token(tmp_path: Any) -> None:
    """As vLLM reads a tokenizer of Qwen's kind: whatever is written <so> is special to its grammars."""
    llguidance = pytest.importorskip("llguidance")
    make_dialogue(tmp_path, "hermes")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in ("<tool_call>", "</tool_call>")}
    read = llguidance.LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=len(tokenizer))
    assert all(map(read.is_special_token, ids.values()))

    def follows(tag: str, tokens: dict[str, int], text: str) -> bool:
        matcher = llguidance.LLMatcher(read, llguidance.LLMatcher.grammar_from_lark(lark_of(tag, LAYOUT, tokens)))
        taken = [matcher.consume_token(token) for token in tokenizer.encode(text, add_special_tokens=False)]
        return all(taken) and bool(matcher.is_accepting())

    for tag in (MAY, MUST):
        assert follows(tag, ids, CALL)
        assert follows(tag, ids, f"{CALL}\n and {CALL}")
        assert not follows(tag, ids, CALL.replace("7", "700")), "the schema ends at 99"
        assert not follows(tag, ids, CALL.replace("</tool_call>", ""))
    assert follows(MAY, ids, f"Let me see.\n{CALL}")
    assert not follows(MUST, ids, "Let me see.")
    assert not follows(MUST, {}, CALL), "as text these tokens cannot be written, which is why they are told"


def test_a_trigger_with_a_special_token_within_it_is_refused() -> None:
    tag = {"structures": [{"begin": "a<think>b", "schema": {}, "end": ""}], "triggers": ["a<think>"]}
    with pytest.raises(DataError, match="has a special token within it"):
        lark_of(json.dumps(tag), LAYOUT, {"<think>": 7})


def test_a_marker_that_is_one_special_token_of_the_tokenizer_is_a_trigger_as_well(tmp_path: Any) -> None:
    make_dialogue(tmp_path, "hermes")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    marker, end = tokenizer.convert_tokens_to_ids(["<tool_call>", tokenizer.eos_token])
    matcher = Grammars(tokenizer, [end], len(tokenizer)).matcher(structural_tag=MAY)
    ids = tokenizer.encode(CALL, add_special_tokens=False)
    assert ids[0] == marker and matcher.allowed()[[marker, end]].all()
    for token in ids:
        allowed = matcher.allowed()
        assert allowed[token] and (token == marker or not allowed[end])
        matcher.take(token)
    assert matcher.allowed()[[marker, end]].all()


def test_the_engine_makes_nothing_but_such_calls(make_engine: MakeEngine) -> None:
    engine = make_engine()
    params = replace(FREE, structural_tag=MUST, stop=("</tool_call>",), ignore_eos=False, max_new_tokens=120)
    made = [one(engine, PROMPT[: 3 + seed], replace(params, sampling_seed=seed)) for seed in range(3)]
    complete(engine, *made)
    for sequence in made:
        text = TOKENIZER.decode(sequence.token_ids)
        assert is_call(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))


@pytest.mark.parametrize(
    "tag",
    [
        "no JSON",
        "[]",
        '{"structures": [], "triggers": ["x"]}',
        '{"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["x"]}',
        '{"structures": [{"begin": "<a>", "schema": {"type": "nonsense"}, "end": ""}], "triggers": ["<a>"]}',
        '{"structures": [{"begin": "<a>", "schema": 1, "end": ""}], "triggers": ["<a>"]}',
    ],
)
def test_what_is_no_tag_is_refused(make_engine: MakeEngine, tag: str) -> None:
    with pytest.raises(DataError, match="structural_tag"):
        grammar_of_tag(tag)
    with pytest.raises(DataError, match="structural_tag"):
        one(make_engine(), PROMPT, replace(FREE, structural_tag=tag))


def test_tools_that_are_not_strict_or_written_in_another_way_are_not_held() -> None:
    free = {"type": "function", "function": {"name": "add", "strict": False, "parameters": {}}}
    assert calls_tag(FORMATS["hermes"], [free], forced=True) == ""
    for name in ("glm", "qwen_coder", "deepseek", "kimi"):
        assert calls_tag(FORMATS[name], TOOLS, forced=True) == ""
