"""How models write tool calls, as data: where calls begin, how they are read, how one is forced.

    tags       <tool_call>...</tool_call> around JSON (Qwen, Hermes), <function=..> (Qwen-Coder) or <arg_key> (GLM)
    llama3     bare JSON with "parameters", or [name(key=value)], perhaps behind <|python_tag|>
    deepseek   tool_calls_begin between the model's own bars; name, separator, JSON
    kimi       <|tool_calls_section_begin|> with functions.name:index, separator, JSON

What a model writes is never run: JSON, and Python's literals by ``ast.literal_eval``. A call whose name can be read is
given to the client even if its arguments cannot, so that the model is told; what is no call stays text.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way to write calls."""

    markers: tuple[str, ...]
    """Texts with which calls begin, anywhere; content ends there."""
    bare: tuple[str, ...] = ()
    """Characters with which calls begin at the very start of an answer."""
    parse: Callable[[str, Kinds], Found]
    opening: Callable[[str], str]
    """The beginning of a call to the named tool, or to any for an empty name: what forces the model to make it."""
    closing: str = ""
    """What follows arguments that are JSON, at the end of a call; empty where a call cannot be held to a schema."""
    trigger: str = ""
    """What begins every call and nothing else, wherever it stands; empty where calls begin like other answers."""


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
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    try:
        return ToolCall(name=value["name"], arguments=_written({} if arguments is None else arguments))
    except (TypeError, ValueError):  # a literal that JSON lacks, such as a set
        return None


NAMED = re.compile(r'["\']name["\']\s*:\s*["\']([^"\'\n]+)["\']')
ARGUMENTS = re.compile(r'["\'](?:arguments|parameters)["\']\s*:\s*')


def _from_json(text: str) -> ToolCall | None:
    """The call in a JSON text; with a readable name also where the rest is broken, its arguments as they stand."""
    call = _from_object(_literal(text))
    if call is not None or (named := NAMED.search(text)) is None:
        return call
    behind = ARGUMENTS.search(text, named.end())
    raw = text[behind.end() :].strip() if behind else ""
    return ToolCall(name=named.group(1), arguments=raw.removesuffix("}").strip() if raw.endswith("}}") else raw)


# -- tags

TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)|(<function=.*?(?:</function>|\Z))", re.DOTALL)
FUNCTION = re.compile(r"<function=\s*([^>\n<]+?)\s*>(.*?)(?:</function>|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=\s*([^>\n<]+?)\s*>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
PAIR = re.compile(r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|(?=<arg_key>)|\Z)", re.DOTALL)
TOOL_NAME = re.compile(r"[\w.:/-]+\Z")


def _tagged(text: str, kinds: Kinds) -> Found:
    calls: list[ToolCall] = []

    def taken(match: re.Match[str]) -> str:
        call = _tagged_call((match.group(1) or match.group(2) or "").strip(), kinds)
        if call is None:
            return match.group()
        calls.append(call)
        return ""

    rest = TAGGED.sub(taken, text)
    return calls, rest if rest.strip() else ""


def _tagged_call(body: str, kinds: Kinds) -> ToolCall | None:
    if body.startswith("{"):
        return _from_json(body)
    if function := FUNCTION.search(body):
        return _keyed(function.group(1), PARAMETER.findall(function.group(2)), kinds)
    name = body.partition("<arg_key>")[0].strip()
    return _keyed(name, PAIR.findall(body), kinds) if TOOL_NAME.match(name) else None


def _keyed(name: str, pairs: Sequence[tuple[str, str]], kinds: Kinds) -> ToolCall:
    arguments = {key: _typed(value, kinds.get((name, key))) for key, value in pairs}
    return ToolCall(name=name, arguments=_written(arguments))


# -- llama3

PYTHON_TAG = "<|python_tag|>"


def _bare(text: str, kinds: Kinds) -> Found:
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
DEEPSEEK_CALL = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL)  # noqa: RUF001
FENCED = re.compile(r"\s*(\S+)\s*```(?:json)?\s*(.*?)\s*(?:```|\Z)", re.DOTALL)
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL = re.compile(
    r"<\|tool_call_begin\|>\s*((?:functions\.)?([^\s:]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
    r"\s*(.*?)\s*(?:<\|tool_call_end\|>|\Z)",
    re.DOTALL,
)


def _deepseek(text: str, kinds: Kinds) -> Found:
    calls = []
    for left, right in DEEPSEEK_CALL.findall(text):
        if fenced := FENCED.match(right) if left.strip() == "function" else None:
            calls.append(ToolCall(name=fenced.group(1), arguments=fenced.group(2)))
        else:
            calls.append(ToolCall(name=left.strip(), arguments=right.strip()))
    return calls, _behind(text, DEEPSEEK_END) if calls else text


def _kimi(text: str, kinds: Kinds) -> Found:
    calls = [ToolCall(id=i, name=name, arguments=arguments) for i, name, arguments in KIMI_CALL.findall(text)]
    return calls, _behind(text, KIMI_END) if calls else text


def _behind(text: str, end: str) -> str:
    return text.partition(end)[2].strip()


def _open_tag(name: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ' if name else "<tool_call>\n"


def _opening(text: str, named: str) -> Callable[[str], str]:
    return lambda name: named % name if name else text


JSON_TAGS = ToolFormat(
    markers=("<tool_call>", "<function="),
    parse=_tagged,
    opening=_open_tag,
    closing="}\n</tool_call>",
    trigger="<tool_call>",
)
FORMATS: Mapping[str, ToolFormat] = {
    "hermes": JSON_TAGS,
    "qwen": JSON_TAGS,
    "qwen_coder": ToolFormat(
        markers=JSON_TAGS.markers, parse=_tagged, opening=_opening("<tool_call>\n", "<tool_call>\n<function=%s>\n")
    ),
    "glm": ToolFormat(markers=JSON_TAGS.markers, parse=_tagged, opening=_opening("<tool_call>", "<tool_call>%s\n")),
    "llama3": ToolFormat(
        markers=(PYTHON_TAG,),
        bare=("{", "["),
        parse=_bare,
        opening=_opening('{"name": "', '{"name": "%s", "parameters": '),
        closing="}",
    ),
    "deepseek": ToolFormat(
        markers=(DEEPSEEK_BEGIN,),
        parse=_deepseek,
        opening=_opening(
            DEEPSEEK_BEGIN + "<｜tool▁call▁begin｜>",  # noqa: RUF001
            DEEPSEEK_BEGIN + "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>",  # noqa: RUF001
        ),
    ),
    "kimi": ToolFormat(
        markers=(KIMI_BEGIN,),
        parse=_kimi,
        opening=_opening(
            KIMI_BEGIN + "<|tool_call_begin|>",
            KIMI_BEGIN + "<|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>",
        ),
    ),
}
SIGNS = (
    (KIMI_BEGIN, "kimi"),
    (DEEPSEEK_BEGIN, "deepseek"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen_coder"),
    ("<tool_call>", "hermes"),
    (PYTHON_TAG, "llama3"),
    ('"parameters":', "llama3"),
)


def detect(template: str) -> str:
    """The format that a chat template writes calls in; ``hermes`` where it shows none."""
    return next((name for sign, name in SIGNS if sign in template), "hermes")
