"""Calls of tools as models write them, read.

What a model writes is never run: JSON, and Python's literals by ``ast.literal_eval``. A call whose name can be read is
given to the client even if its arguments cannot, so that the model is told; what is no call stays text.

Models that go astray repeat half a call until their budget ends. So no pattern looks twice at the same stretch of text:
names end at the next ``<``, blanks are stripped behind the pattern, and the first part that is not closed ends the look
for parts that are.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_hpc.dialogue.messages import json_value

MAX_LITERAL = 1 << 16
"""Longest text that is tried as a Python literal: the parser's memory grows with it."""
Kinds = Mapping[tuple[str, str], str]
"""(tool, parameter) -> its type by the tool's schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as the model wrote it; ``arguments`` is a JSON object's text, or whatever stands where one should."""

    name: str
    arguments: str
    id: str = ""
    """Only where the model gives its calls names."""


Found = tuple[list[ToolCall], str]
"""The calls, and what was no call."""


def kinds_of(tools: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """The parameter types that the tools' schemas give."""
    found = {}
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        for key, schema in properties.items() if isinstance(properties, Mapping) else ():
            if isinstance(schema, Mapping) and isinstance(schema.get("type"), str):
                found[str(function["name"]), str(key)] = schema["type"]
    return found


def _typed(text: str, kind: str | None) -> Any:
    """A parameter that was written without quotes."""
    if kind == "string":
        return text
    value = json_value(text.strip())
    return text if isinstance(value, str) and not text.strip().startswith('"') else value


def _written(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _literal(text: str) -> Any:
    """A JSON value, else a Python literal, else None."""
    value = json_value(text)
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(text) if len(text) <= MAX_LITERAL else None
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None


def _from_object(value: Any) -> ToolCall | None:
    """The call in ``{"name": ..., "arguments" or "parameters": ...}``."""
    if not isinstance(value, Mapping) or not isinstance(name := value.get("name"), str) or not name.strip():
        return None
    arguments = value.get("arguments", value.get("parameters"))
    try:
        return ToolCall(name=name, arguments=_written({} if arguments is None else arguments))
    except (TypeError, ValueError, RecursionError):  # a literal that JSON lacks, such as a set, or a very deep one
        return None


NAMED = re.compile(r'["\']name["\']\s*:\s*["\']([^"\'\n]+)["\']')
ARGUMENTS = re.compile(r'["\'](?:arguments|parameters)["\']\s*:\s*')


def _from_json(text: str) -> ToolCall | None:
    """The call in a JSON text; with a readable name also where the rest is broken, its arguments as they stand."""
    call = _from_object(_literal(text))
    if call is not None or (named := NAMED.search(text)) is None or not named.group(1).strip():
        return call
    behind = ARGUMENTS.search(text, named.end())
    raw = text[behind.end() :].strip() if behind else ""
    return ToolCall(name=named.group(1), arguments=raw.removesuffix("}").strip() if raw.endswith("}}") else raw)


# -- tags

TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
TAGGED_JSON = re.compile(  # whose texts may hold the tag that ends it
    r'<tool_call>(?:((?:(?!<tool_call>)[^"]|"(?:\\.|[^"\\\n])*")*?)</tool_call>|(.*?)(?:</tool_call>|(?=<tool_call>)|\Z))',
    re.DOTALL,
)
FUNCTION_CALL = re.compile(r"(?:<tool_call>\s*)?(<function=.*?(?:</function>|\Z))(?:\s*</tool_call>)?", re.DOTALL)
FUNCTION = re.compile(r"<function=\s*+([^>\n<]++)\s*+>(.*?)(?:</function>|\Z)", re.DOTALL)
PARAMETER = r"<parameter=\s*+([^>\n<]++)\s*+>\n?(.*?)\n?(?:</parameter>%s)"
PAIR = r"<arg_key>([^<]*+)</arg_key>\s*+<arg_value>(.*?)(?:</arg_value>%s)"
TOOL_NAME = re.compile(r"[\w.:/-]+\Z")


def tagged(pattern: re.Pattern[str], read: Callable[[str, Kinds], ToolCall | None]) -> Callable[[str, Kinds], Found]:
    """A reader of calls that ``pattern`` finds; of the group that has one ``read`` makes a call, or does not."""

    def parse(text: str, kinds: Kinds) -> Found:
        calls: list[ToolCall] = []

        def taken(match: re.Match[str]) -> str:
            call = read(next(filter(None, match.groups()), "").strip(), kinds)
            if call is None:
                return match.group()
            calls.append(call)
            return ""

        rest = pattern.sub(taken, text)
        return calls, rest if rest.strip() else ""

    return parse


def json_body(body: str, kinds: Kinds) -> ToolCall | None:
    return _from_json(body) if body.startswith("{") else None


def function_body(body: str, kinds: Kinds) -> ToolCall | None:
    function = FUNCTION.search(body)
    if function is None:
        return None
    return _keyed(function.group(1).strip(), _pairs(PARAMETER, "(?=<parameter=)", function.group(2)), kinds)


def paired_body(body: str, kinds: Kinds) -> ToolCall | None:
    name, key, rest = body.partition("<arg_key>")
    return (
        _keyed(name.strip(), _pairs(PAIR, "(?=<arg_key>)", key + rest), kinds)
        if TOOL_NAME.match(name.strip())
        else None
    )


def _pairs(pattern: str, next_one: str, body: str) -> list[tuple[str, str]]:
    """Names and values; where some are not closed, the next one's beginning closes them."""
    found = _closed(re.compile(rf"\s*+(?:{pattern % ''}|\Z)", re.DOTALL), body)
    if found is None:
        found = re.findall(pattern % rf"|{next_one}|\Z", body, re.DOTALL)
    return [(name.strip(), value) for name, value in found]


def _closed(one: re.Pattern[str], body: str) -> list[tuple[str, str]] | None:
    """Names and values of a body that consists of them; None if there is anything else."""
    found, at = [], 0
    while at < len(body):
        if (match := one.match(body, at)) is None:
            return None
        if match.group(1) is not None:
            found.append((match.group(1), match.group(2)))
        at = match.end()
    return found


def _keyed(name: str, pairs: Sequence[tuple[str, str]], kinds: Kinds) -> ToolCall:
    arguments = {key: _typed(value, kinds.get((name, key))) for key, value in pairs}
    return ToolCall(name=name, arguments=_written(arguments))


# -- llama3

PYTHON_TAG = "<|python_tag|>"


def bare(text: str, kinds: Kinds) -> Found:
    body = text.strip().removeprefix(PYTHON_TAG).strip()
    calls = _python_calls(body) if body.startswith("[") else list(_json_calls(body))
    return (calls, "") if calls else ([], text)


def _json_calls(body: str) -> Iterator[ToolCall]:
    """Objects one after another, with ``;`` or nothing in between; a list of them counts as well."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(body):
        try:
            value, end = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            value, end = None, len(body)
        call = _from_object(value) if value is not None else _from_json(body[at:])
        if call is None:
            return
        yield call
        at = end
        while at < len(body) and (body[at].isspace() or body[at] == ";"):
            at += 1


def _python_calls(body: str) -> list[ToolCall]:
    if isinstance(listed := json_value(body), list):
        return [call for call in map(_from_object, listed) if call is not None]
    try:
        parsed = ast.parse(body, mode="eval").body if len(body) <= MAX_LITERAL else None
        items = parsed.elts if isinstance(parsed, ast.List) else []
        return [_python_call(item) for item in items if isinstance(item, ast.Call)]
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return []


def _python_call(call: ast.Call) -> ToolCall:
    """``name(key=literal, ...)``. Raises ValueError or TypeError for anything else."""
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    if call.args or None in arguments:
        raise ValueError("arguments without a name")
    return ToolCall(name=ast.unparse(call.func), arguments=_written(arguments))


# -- deepseek and kimi

DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001  the model's own bars
DEEPSEEK_CALL_BEGIN, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
DEEPSEEK_CALL = re.compile(r"<｜tool▁call▁begin｜>([^<]*+)<｜tool▁sep｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL)  # noqa: RUF001
FENCED = re.compile(r"\s*+(\S+)\s*+```(?:json)?(.*?)(?:```|\Z)", re.DOTALL)
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL = re.compile(
    r"<\|tool_call_begin\|>([^<]*+)<\|tool_call_argument_begin\|>(.*?)(?:<\|tool_call_end\|>|\Z)", re.DOTALL
)
KIMI_ID = re.compile(r"(?:functions\.)?([^\s:]+)(?::\d+)?")


def deepseek(text: str, kinds: Kinds) -> Found:
    calls = []
    for left, right in DEEPSEEK_CALL.findall(text):
        if fenced := FENCED.match(right) if left.strip() == "function" else None:
            calls.append(ToolCall(name=fenced.group(1), arguments=fenced.group(2).strip()))
        elif left.strip():
            calls.append(ToolCall(name=left.strip(), arguments=right.strip()))
    return calls, _behind(text, DEEPSEEK_END) if calls else text


def kimi(text: str, kinds: Kinds) -> Found:
    calls = [
        ToolCall(id=given[0], name=given[1], arguments=arguments.strip())
        for id_, arguments in KIMI_CALL.findall(text)
        if (given := KIMI_ID.fullmatch(id_.strip()))
    ]
    return calls, _behind(text, KIMI_END) if calls else text


def _behind(text: str, end: str) -> str:
    return text.partition(end)[2].strip()
