"""Calls of tools that are held to the schemas of their arguments: structural tags, in the words of xgrammar and SGLang.

    {"type": "structural_tag",
     "format": {"type": "triggered_tags", "triggers": ["<tool_call>"], "at_least_one": false,
                "tags": [{"type": "tag", "begin": '<tool_call>\\n{"name": "add", "arguments": ',
                          "content": {"type": "json_schema", "json_schema": {...}},
                          "end": "}\\n</tool_call>"}]}}

An answer is free until a trigger stands in it. What follows is the rest of a tag that begins so, and after it the
answer is free again. With ``at_least_one`` the answer begins with a tag. Arguments are JSON, or a list of parameters
whose values are JSON but for texts, which stand as they are; not all that a schema says can be held to there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal_hpc.dialogue.tool_formats import Held, Parameter, ToolFormat
from areal_hpc.errors import DataError

Format = Mapping[str, Any]
Tool = Mapping[str, Any]

ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
"""What a tool that is not strict is held to beside one that is, since both begin alike."""
ANY_TEXT: Format = {"type": "any_text"}
OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
"""What a schema may say of arguments that are written as parameters."""
OF_TEXTS = {"type", "enum"}
SILENT = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "format"}
"""What says nothing of a value that an answer could be held to; formats are an annotation."""


def is_strict(tool: Tool) -> bool:
    """Whether a tool's calls must follow its schema."""
    return tool["function"].get("strict") is True


def schema_of(tool: Tool) -> Mapping[str, Any]:
    """What the arguments of a tool are held to."""
    parameters = tool["function"].get("parameters")
    return parameters if is_strict(tool) and isinstance(parameters, Mapping) else ANY_ARGUMENTS


def calls_tag(written: ToolFormat, tools: Sequence[Tool], *, forced: bool) -> str:
    """What holds the calls to their tools' schemas, as JSON; empty where no tool is strict, or none can be held to it.

    Args:
        written: how the model writes calls.
        tools: those that it may call.
        forced: whether it must.

    Raises:
        DataError: a strict tool's arguments cannot be held to their schema, as this model writes them.
    """
    if not any(map(is_strict, tools)) or not (forced or written.held.anywhere):
        return ""
    held = written.held
    calls = {
        "type": "triggered_tags",
        "triggers": [held.trigger],
        "tags": [_call(held, tool) for tool in tools],
        "at_least_one": forced,
    }
    return _tag(_sequence(_const(held.section[0]), calls) if forced else calls)


def calls_or_json_tag(written: ToolFormat, tools: Sequence[Tool], schema: str) -> str:
    """What holds an answer to JSON of ``schema``, or to calls and nothing else, as JSON. Otherwise as ``calls_tag``."""
    held = written.held
    calls = {
        "type": "tags_with_separator",
        "tags": [_call(held, tool) for tool in tools],
        "separator": held.separator,
        "at_least_one": True,
    }
    whole = _sequence(_const(held.section[0]), calls, _const(held.section[1]))
    return _tag({"type": "or", "elements": [{"type": "json_schema", "json_schema": json.loads(schema)}, whole]})


def _tag(format_: Format) -> str:
    return json.dumps({"type": "structural_tag", "format": format_}, ensure_ascii=False)


def _call(held: Held, tool: Tool) -> Format:
    name = tool["function"]["name"]
    try:
        arguments = _arguments(held, schema_of(tool))
    except DataError as error:
        raise DataError(f"tool {name} is strict, and {error}; leave `strict` out") from error
    return {"type": "tag", "begin": held.begin(name), "content": arguments, "end": held.end}


def _arguments(held: Held, schema: Mapping[str, Any]) -> Format:
    if held.parameter is None:
        return _sequence(*held.between, {"type": "json_schema", "json_schema": schema})
    if schema is ANY_ARGUMENTS:
        return ANY_TEXT
    return _sequence(*_parameters(held.parameter, schema))


def _parameters(written: Parameter, schema: Mapping[str, Any]) -> Iterator[Format]:
    """One parameter after another, in the schema's order; those that may be left out may."""
    if odd := schema.keys() - OF_OBJECTS - SILENT:
        raise DataError(f"{min(odd)!r} of its schema cannot be held to where arguments are written one by one")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if unknown := set(required) - set(properties):
        raise DataError(f"its schema requires {min(unknown)!r} and does not say what that is")
    defined = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for name, one in properties.items():
        parameter = _sequence(_parameter(written, name, one, defined), _const(written.behind))
        yield parameter if name in required else {"type": "optional", "content": parameter}


def _parameter(written: Parameter, name: str, schema: Any, defined: Mapping[str, Any]) -> Format:
    opening, closing = written.opening % name, written.line + written.end
    if not isinstance(schema, Mapping) or schema.get("type") != "string":
        whole = {**schema, **defined} if isinstance(schema, Mapping) else schema
        return {
            "type": "tag",
            "begin": opening,
            "content": {"type": "json_schema", "json_schema": whole},
            "end": closing,
        }
    if odd := schema.keys() - OF_TEXTS - SILENT:
        raise DataError(f"its {name}, a text that stands without quotes, cannot be held to {min(odd)!r}")
    if "enum" in schema:
        choices = {"type": "or", "elements": [_const(str(choice)) for choice in schema["enum"]]}
        return {"type": "tag", "begin": opening, "content": choices, "end": closing}
    return {"type": "tag", "begin": opening, "content": ANY_TEXT, "end": written.end}


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _sequence(*elements: Format) -> Format:
    """One after another, without those that are empty, of which the last is left where there is nothing else."""
    kept = [one for one in elements if one != _const("")] or [_const("")]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept}
