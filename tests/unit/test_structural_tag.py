"""Calls that are held to their schemas, token by token: nothing else behind a trigger, anything before and after."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dialogues import make_dialogue
from embedded_engines import FREE, PROMPT, MakeEngine, complete, one
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB_SIZE, make_tokenizer
from transformers import PreTrainedTokenizerFast

from areal_hpc.dialogue.grammar import LAYOUT, Grammars, Matcher, grammar_of_tag
from areal_hpc.dialogue.parts import Reading
from areal_hpc.dialogue.structural_tag import calls_or_json_tag, calls_tag
from areal_hpc.dialogue.tag_grammar import TEXT_TOKENS, lark_of
from areal_hpc.dialogue.tool_calls import kinds_of
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
        '{"format": 1}',
        '{"format": {"type": "dispatch"}}',
        '{"format": {"type": "triggered_tags", "tags": [], "triggers": ["x"]}}',
        '{"format": {"type": "json_schema", "json_schema": {"type": "nonsense"}}}',
        '{"format": {"type": "tag", "begin": "<a>", "content": {"type": "json_schema"}, "end": ""}}',
    ],
)
def test_what_is_no_tag_is_refused(make_engine: MakeEngine, tag: str) -> None:
    with pytest.raises(DataError, match="structural_tag"):
        grammar_of_tag(tag)
    with pytest.raises(DataError, match="structural_tag"):
        one(make_engine(), PROMPT, replace(FREE, structural_tag=tag))


def test_tools_that_are_not_strict_are_not_held() -> None:
    free = {"type": "function", "function": {"name": "add", "strict": False, "parameters": {}}}
    for written in FORMATS.values():
        assert calls_tag(written, [free], forced=True) == ""
    assert calls_tag(FORMATS["llama3"], TOOLS, forced=False) == ""  # any JSON begins as its calls do


MIXED = (
    *TOOLS,
    tool("none"),
    tool("mix", flag={"type": "boolean"}, few={"type": "array", "items": {"type": "integer"}, "maxItems": 2}),
    tool("maybe", one={"anyOf": [{"enum": ["\u00e4", 'a"b']}, {"type": "null"}]}, when={"type": "number"}),
)
MIXED[3]["function"]["parameters"]["required"] = ["flag"]
CHECKS: dict[str, Callable[[Any], bool]] = {
    "a": lambda value: type(value) is int and 0 <= value <= 99,
    "word": lambda value: value in ("x", "y"),
    "flag": lambda value: type(value) is bool,
    "few": lambda value: len(value) <= 2 and all(type(one) is int for one in value),
    "one": lambda value: value in ("\u00e4", 'a"b', None),
    "when": lambda value: type(value) in (int, float),
}
NEEDED = {"none": [], "add": ["a"], "say": ["word"], "mix": ["flag"], "maybe": ["one", "when"]}
ALLOWED = {**NEEDED, "mix": ["flag", "few"]}


def drawn(tag: str, seed: int, most: int = 4000) -> str:
    """What a model that knows nothing makes of a tag; it ends where it may."""
    matcher, rng, sampled = GRAMMARS.matcher(structural_tag=tag), np.random.default_rng(seed), list[int]()
    while not (allowed := matcher.allowed())[EOS]:
        assert len(sampled) < most
        ends = [token for token in ENDS if allowed[token]]  # lest numbers go on for ever
        few = len(sampled) % 8 == 7 and ends
        sampled.append(int(rng.choice(ends if few else np.flatnonzero(allowed))))
        matcher.take(sampled[-1])
    return str(TOKENIZER.decode(sampled))


ENDS = TOKENIZER.encode("}],\n<")


@pytest.mark.parametrize("family", FORMATS)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_a_held_model_writes_is_read_as_a_call_of_the_schema(family: str, seed: int) -> None:
    """The reader of answers, which knows nothing of grammars, is the judge."""
    for tag in (
        calls_tag(FORMATS[family], MIXED, forced=True),
        calls_or_json_tag(FORMATS[family], MIXED, '{"const": 1}'),
    ):
        text = drawn(tag, seed)
        parts = Reading(format=FORMATS[family], kinds=kinds_of(MIXED)).read(text, final=True)
        if text == "1":
            continue  # the answer instead of a call
        assert parts.calls and not parts.content.strip(), text
        for call in parts.calls:
            arguments = json.loads(call.arguments)
            assert set(NEEDED[call.name]) <= set(arguments) <= set(ALLOWED[call.name]), text
            assert all(CHECKS[key](value) for key, value in arguments.items()), text


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """A tokenizer that has a token for each of ``TEXT_TOKENS``."""
    path = tmp_path_factory.mktemp("special")
    make_dialogue(path, "hermes")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.add_tokens(list(TEXT_TOKENS))
    return tokenizer


def follows(tokenizer: PreTrainedTokenizerFast, tag: str, text: str, *, told: bool = True) -> bool:
    """Whether ``text`` follows the tag as vLLM reads a tokenizer, to whom whatever is written <so> is special."""
    llguidance = pytest.importorskip("llguidance")
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in TEXT_TOKENS}
    read = llguidance.LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=len(tokenizer))
    assert all(map(read.is_special_token, ids.values()))
    grammar = lark_of(tag, LAYOUT, ids) if told else lark_of(tag, LAYOUT)
    matcher = llguidance.LLMatcher(read, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.get_error()
    taken = [matcher.consume_token(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    return all(taken) and bool(matcher.is_accepting())


@pytest.mark.parametrize("family", FORMATS)
def test_markers_that_are_no_text_to_whoever_reads_the_grammar_are_in_it_as_tokens(
    special: PreTrainedTokenizerFast, family: str
) -> None:
    """What a model is held to is the same texts, however its tokenizer spells their markers."""
    for tag in (
        calls_tag(FORMATS[family], MIXED, forced=True),
        calls_or_json_tag(FORMATS[family], MIXED, '{"const": 1}'),
    ):
        for seed in range(4):
            text = drawn(tag, seed)
            assert follows(special, tag, text), text
            assert not follows(special, tag, text[:-1]), text


def test_thoughts_and_texts_are_free_beside_calls_whose_markers_are_tokens(special: PreTrainedTokenizerFast) -> None:
    for tag in (MAY, MUST):
        assert follows(special, tag, CALL)
        assert follows(special, tag, f"{CALL}\n and {CALL}")
        assert not follows(special, tag, CALL.replace("7", "700")), "the schema ends at 99"
        assert not follows(special, tag, CALL.replace("</tool_call>", ""))
    assert follows(special, MAY, f"<think>Which?</think>Let me see.\n{CALL}")
    assert follows(special, MAY, "<think>Which?</think>None.")
    assert not follows(special, MUST, "Let me see.")
    assert not follows(special, MUST, CALL, told=False), "as text these tokens cannot be written"


def test_a_trigger_with_a_special_token_within_it_is_refused() -> None:
    tag = {"type": "tag", "begin": "a<think>b", "content": {"type": "any_text"}, "end": ""}
    whole = {"format": {"type": "triggered_tags", "triggers": ["a<think>"], "tags": [tag]}}
    with pytest.raises(DataError, match="has a special token within it"):
        lark_of(json.dumps(whole), LAYOUT, {"<think>": 7})


TEXTS = ["", "a", "two\nlines", '"quoted"', "null", "12", "<arg_key>k</arg_key>", "<parameter=x>", "</tool_cal"]


@pytest.mark.parametrize("family", ["qwen_coder", "glm", "glm47"])
@pytest.mark.parametrize("text", TEXTS)
def test_texts_without_quotes_are_free_and_come_back_as_they_were(family: str, text: str) -> None:
    tools = [tool("note", text={"type": "string"}, more={"type": "integer"})]
    written = {
        "qwen_coder": "<tool_call>\n<function=note>\n<parameter=text>\n{}\n</parameter>\n"
        "<parameter=more>\n3\n</parameter>\n</function>\n</tool_call>",
        "glm": "<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>{}</arg_value>\n"
        "<arg_key>more</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "glm47": "<tool_call>note<arg_key>text</arg_key><arg_value>{}</arg_value>"
        "<arg_key>more</arg_key><arg_value>3</arg_value></tool_call>",
    }[family].format(text)
    matcher = GRAMMARS.matcher(structural_tag=calls_tag(FORMATS[family], tools, forced=False))
    taken(matcher, "Well. " + written + " So.")
    assert may_end(matcher)
    (call,) = Reading(format=FORMATS[family], kinds=kinds_of(tools)).read(written, final=True).calls
    assert (call.name, json.loads(call.arguments)) == ("note", {"text": text, "more": 3})


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, "'anyOf' of its schema cannot be held to"),
        ({"type": "object", "required": ["a"]}, "requires 'a' and does not say what that is"),
        ({"properties": {"a": {"type": "string", "pattern": "x+"}}}, "its a, a text .* cannot be held to 'pattern'"),
    ],
)
def test_what_parameters_cannot_be_held_to_is_refused_by_name(schema: Any, why: str) -> None:
    asked = [{"type": "function", "function": {"name": "odd", "strict": True, "parameters": schema}}]
    for family in ("glm", "qwen_coder"):
        with pytest.raises(DataError, match=f"tool odd is strict, and .*{why}"):
            calls_tag(FORMATS[family], asked, forced=False)
    assert calls_tag(FORMATS["kimi"], asked, forced=False)  # whose arguments are JSON


def test_a_tool_beside_a_strict_one_may_be_called_with_anything_of_its_kind() -> None:
    free = {"type": "function", "function": {"name": "free", "parameters": {}}}
    for family, call in (
        ("glm", "<tool_call>free\n<arg_key>any</arg_key>\n<arg_value>thing</arg_value>\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "free", "arguments": {"any": "thing"}}\n</tool_call>'),
    ):
        matcher = GRAMMARS.matcher(structural_tag=calls_tag(FORMATS[family], [*TOOLS, free], forced=True))
        taken(matcher, call)
        assert may_end(matcher)


def test_names_are_written_as_templates_write_them() -> None:
    named = [tool("gr\u00f6\u00dfe")]
    for family, written in FORMATS.items():
        assert "gr\u00f6\u00dfe" in written.opening("gr\u00f6\u00dfe"), family
        assert "gr\u00f6\u00dfe" in calls_tag(written, named, forced=True), family
        taken(
            GRAMMARS.matcher(structural_tag=calls_tag(written, named, forced=True)),
            written.opening("gr\u00f6\u00dfe")[:-3],
        )
