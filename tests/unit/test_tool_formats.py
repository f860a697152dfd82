"""Tool calls as models of several families write them, well and badly; texts after the families' own documentation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dialogues import GLM, HERMES, LLAMA
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.dialogue.parts import Parts, Reading
from areal_hpc.dialogue.tool_calls import kinds_of
from areal_hpc.dialogue.tool_formats import FORMATS, detect

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
BAR = "\uff5c"


def read(family: str, text: str) -> Parts:
    return Reading(format=FORMATS[family], kinds=kinds_of(TOOLS)).read(text, final=True)


def calls(family: str, text: str) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in read(family, text).calls]


PARIS = [("weather", {"city": "Paris", "days": 2})]


def deep(word: str) -> str:
    return f"<{BAR}{word.replace(' ', chr(0x2581))}{BAR}>"


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'),
        ("hermes", "<tool_call>{'name': 'weather', 'arguments': {'city': 'Paris', 'days': 2}}</tool_call>"),
        ("hermes", "<tool_call>" + json.dumps({"name": "weather", "arguments": '{"city": "Paris", "days": 2}'})),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 2}}'),  # cut before its end
        (
            "qwen_coder",
            "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        (
            "qwen_coder",
            "<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>",
        ),
        (
            "glm",
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>",
        ),
        ("llama3", '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}'),
        ("llama3", '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris", "days": 2}}'),
        ("llama3", '[weather(city="Paris", days=2)]'),
        (
            "deepseek",
            deep("tool calls begin") + deep("tool call begin") + "function" + deep("tool sep") + "weather\n```json\n"
            '{"city": "Paris", "days": 2}\n```' + deep("tool call end") + deep("tool calls end"),
        ),
        (
            "deepseek",
            deep("tool calls begin") + deep("tool call begin") + "weather" + deep("tool sep")
            + '{"city": "Paris", "days": 2}' + deep("tool call end") + deep("tool calls end"),
        ),
        (
            "kimi",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
            '{"city": "Paris", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
        ),
    ],
)  # fmt: skip
def test_a_call_is_read_and_what_was_said_before_it_is_content(family: str, text: str) -> None:
    assert calls(family, text) == PARIS
    assert read(family, text).content == ""
    if family != "llama3" or text.startswith("<|"):
        assert read(family, "Let me look.\n" + text) == Parts(content="Let me look.", calls=read(family, text).calls)


def test_several_calls_come_in_their_order() -> None:
    one = '<tool_call>{"name": "weather", "arguments": {"city": "%s"}}</tool_call>'
    assert calls("hermes", one % "A" + "\n" + one % "B") == [("weather", {"city": "A"}), ("weather", {"city": "B"})]
    two = '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": [1]}}'
    assert calls("llama3", two) == [("a", {}), ("b", {"x": [1]})]
    kimi = "<|tool_call_begin|>functions.{0}:{1}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    parts = read("kimi", "<|tool_calls_section_begin|>" + kimi.format("a", 0) + kimi.format("b", 1))
    assert [(call.id, call.name) for call in parts.calls] == [("functions.a:0", "a"), ("functions.b:1", "b")]


def test_a_text_inside_a_call_may_hold_the_tag_that_ends_it() -> None:
    one = '<tool_call>\n{"name": "say", "arguments": {"text": "a \\" </tool_call> <tool_call> b"}}\n</tool_call>'
    said = ("say", {"text": 'a " </tool_call> <tool_call> b'})
    assert calls("hermes", f"{one}\n{one}") == [said, said]
    broken = '<tool_call>{"name": "say", "arguments": {"text": "a}}</tool_call>'
    first, second = read("hermes", f"{broken}\n{one}").calls
    assert (first.name, first.arguments, second.name) == ("say", '{"text": "a}', "say")


def test_I2_a_parameter_without_its_bracket_is_skipped_and_the_others_are_kept() -> None:
    text = "<function=weather><parameter=city\nParis</parameter><parameter=days>2</parameter></function>"
    assert calls("qwen_coder", text) == [("weather", {"days": 2})]


def test_I3_a_name_without_a_line_break_behind_it_is_a_name() -> None:
    text = "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
    assert calls("glm", text) == [("weather", {"city": "Paris"})]
    assert calls("glm", "<tool_call>weather</tool_call>") == [("weather", {})]


def test_parameters_without_quotes_have_the_schemas_type() -> None:
    def text(city: str) -> str:
        return f"<tool_call>weather<arg_key>city</arg_key><arg_value>{city}</arg_value></tool_call>"

    assert calls("glm", text("75001")) == [("weather", {"city": "75001"})]
    other = "<tool_call>other<arg_key>n</arg_key><arg_value>[1, 2]</arg_value></tool_call>"
    assert calls("glm", other) == [("other", {"n": [1, 2]})]


def test_malformed_arguments_are_given_to_the_client_as_they_stand() -> None:
    (call,) = read("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Par}}</tool_call>').calls
    assert (call.name, call.arguments) == ("weather", '{"city": "Par}')
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(call.arguments)


@pytest.mark.parametrize(
    "text", ["<tool_call>no call</tool_call>", "<tool_call>", '<tool_call>{"nam": 1}</tool_call> x']
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert read("hermes", "a " + text) == Parts(content="a " + text)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": " ", "arguments": {</tool_call>'),
        ("llama3", '{"name": " ", "parameters": {}}'),
        (
            "deepseek",
            deep("tool calls begin") + deep("tool call begin") + deep("tool sep") + "{}" + deep("tool call end"),
        ),
    ],
)
def test_what_names_no_tool_is_no_call(family: str, text: str) -> None:
    assert read(family, text) == Parts(content=text)


def test_arguments_deeper_than_can_be_written_again_bring_nothing_down() -> None:
    for depth in range(900, 1000):  # somewhere in here the reader of JSON takes what its writer does not
        read("llama3", '{"name": "a", "parameters": ' + "[" * depth + "]" * depth + "}")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{'name': 'x', 'arguments': __import__('os').system('true')}</tool_call>",
        "[weather(city=open('/etc/passwd').read())]",
        "[weather(*[1])]",
        "<tool_call>" + "[" * 100_000,
        "[" * 100_000,
        '{"name": "a", "parameters": ' * 10_000,
    ],
)
def test_nothing_that_a_model_writes_is_run_and_nothing_brings_the_reader_down(text: str) -> None:
    for family in FORMATS:
        for call in read(family, text).calls:
            assert "root:" not in call.arguments


def test_templates_show_their_format() -> None:
    assert [detect(template) for template in (HERMES, LLAMA, GLM)] == ["hermes", "llama3", "glm"]
    assert detect("{{ messages }}") == "hermes"
    assert detect(GLM.replace("</arg_key>\n<arg_value>", "</arg_key><arg_value>")) == "glm47"
    begun = deep("tool calls begin")
    assert [detect(begun), detect(begun + "\n```json\n")] == ["deepseek", "deepseek_v3"]


@pytest.mark.parametrize("family", FORMATS)
def test_a_forced_call_begins_as_the_family_writes_it_and_is_read_with_what_follows(family: str) -> None:
    rest = {
        "qwen_coder": "<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "glm": "<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        "glm47": "<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        "deepseek": '{"city": "Paris"}',
        "deepseek_v3": '{"city": "Paris"}\n```' + deep("tool call end"),
        "kimi": '{"city": "Paris"}<|tool_call_end|>',
        "llama3": '{"city": "Paris"}}',
    }.get(family, '{"city": "Paris"}}\n</tool_call>')
    forced = Reading(format=FORMATS[family], kinds=kinds_of(TOOLS), prefix=FORMATS[family].opening("weather"))
    (call,) = forced.read(rest, final=True).calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})


@pytest.mark.parametrize(
    ("family", "begun", "again", "read_as"),
    [
        ("glm", "<tool_call>weather\n", "<arg_key>city</arg_key><arg_value>", [("weather", {"city": ""})]),
        ("glm", "<tool_call>weather\n", "<arg_key>", [("weather", {})]),
        ("glm", "<tool_call>weather\n<arg_key>", " ", [("weather", {})]),
        ("qwen_coder", "<function=weather>\n", "<parameter=city>\n", [("weather", {"city": ""})]),
        ("qwen_coder", "", "<tool_call>\n<function=weather>\n<parameter=city>\n", None),
        ("qwen_coder", "<function=weather", " ", []),
        ("hermes", "", "<tool_call>", []),
        ("hermes", "", '<tool_call>{"city": "', []),
        ("deepseek", deep("tool calls begin"), deep("tool call begin"), []),
        ("deepseek_v3", deep("tool calls begin") + deep("tool call begin") + "a" + deep("tool sep"), "b\n", None),
        ("kimi", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", []),
        ("kimi", "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.weather:0 ", []),
        ("llama3", "", '{"name": "', None),
    ],
)
def test_half_a_call_said_over_and_over_is_read_in_one_go(
    family: str, begun: str, again: str, read_as: list[tuple[str, Any]] | None
) -> None:
    """Where each piece is held against all that follows, an answer as long as this takes minutes, or hours."""
    said = begun + again * (200_000 // len(again))
    parts = read(family, said)
    if read_as is not None:
        assert [(call.name, json.loads(call.arguments)) for call in parts.calls] == read_as
    if not parts.calls:
        assert parts.content == said


def test_H8_reasoning_is_apart_from_content_both_ways_round() -> None:
    plain, inside = Reading(), Reading(thinking=True)
    assert plain.read("<think>\nhm\n</think>\n\nYes", final=True) == Parts(reasoning="hm", content="Yes")
    assert inside.read("hm\n</think>\n\nYes", final=True) == Parts(reasoning="hm", content="Yes")
    assert inside.read("hm", final=True) == Parts(reasoning="hm")  # cut while it was thinking
    assert plain.read("1 < 2", final=True) == Parts(content="1 < 2")
    assert plain.read("<think>a <tool_call>b</think>c", final=True) == Parts(reasoning="a <tool_call>b", content="c")


PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {}}',
        "<function=f>",
        "<",
        "\n",
        "a ",
        "今🙂",
    ]
)


@given(st.sampled_from(sorted(FORMATS)), st.lists(PIECES, max_size=8), st.booleans())
def test_readings_grow_and_the_last_one_has_all_that_was_told(family: str, pieces: list[str], thinking: bool) -> None:
    reading, text, before = Reading(format=FORMATS[family], thinking=thinking), "".join(pieces), Parts()
    for end in range(len(text) + 1):
        parts = reading.read(text[:end], final=False)
        assert parts.reasoning.startswith(before.reasoning) and parts.content.startswith(before.content)
        before = parts
    final = reading.read(text, final=True)
    assert final.reasoning.startswith(before.reasoning) and final.content.startswith(before.content)
