"""How models write tool calls, as data: where calls begin, how they are read, how one is forced.

hermes     <tool_call>...</tool_call> around JSON (also Qwen); around <arg_key> it is glm, and glm47 without lines
qwen_coder <function=...>...</function> around <parameter=...>, mostly inside <tool_call>
llama3     bare JSON with "parameters", or [name(key=value)], perhaps behind <|python_tag|>
deepseek   tool_calls_begin between the model's own bars; name, separator, JSON; deepseek_v3 fences the JSON
kimi       <|tool_calls_section_begin|> with functions.name:index, separator, JSON
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from areal_hpc.dialogue.tool_calls import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL_BEGIN,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEPARATOR,
    FUNCTION_CALL,
    KIMI_BEGIN,
    KIMI_END,
    PYTHON_TAG,
    TAGGED,
    TAGGED_JSON,
    Found,
    Kinds,
    bare,
    deepseek,
    function_body,
    json_body,
    kimi,
    paired_body,
    tagged,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """How one argument is written where they are written one by one."""

    opening: str
    """Before its value, with ``%s`` for its name."""
    line: str = ""
    """Between a value that is no text and ``end``; texts may have it or not."""
    end: str
    behind: str = ""
    """Between it and what follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What calls consist of, for grammars that hold them to schemas."""

    trigger: str
    """What begins every call, and nothing else."""
    anywhere: bool = True
    """Whether that is so wherever it stands; otherwise only in answers that are calls from their beginning on."""
    begin: Callable[[str], str]
    """A call to the named tool up to its arguments; begins with ``trigger``."""
    between: tuple[Mapping[str, Any], ...] = ()
    """What else precedes them, in the words of structural tags."""
    parameter: Parameter | None = None
    """How each argument is written; None where all of them are one JSON object."""
    end: str
    """What follows the arguments."""
    separator: str = ""
    """Between two calls."""
    section: tuple[str, str] = ("", "")
    """What stands around all calls of an answer."""


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
    held: Held


def _in_json(before: str, after: str) -> Callable[[str], str]:
    """The beginning of a call whose name is JSON."""
    return lambda name: before + json.dumps(name, ensure_ascii=False) + after


def _opening(text: str, held: Held) -> Callable[[str], str]:
    return lambda name: held.section[0] + held.begin(name) if name else held.section[0] + text


def _hermes() -> ToolFormat:
    begin = _in_json('<tool_call>\n{"name": ', ', "arguments": ')
    held = Held(trigger="<tool_call>", begin=begin, end="}\n</tool_call>", separator="\n")
    opening = _opening("<tool_call>\n", held)
    return ToolFormat(markers=("<tool_call>",), parse=tagged(TAGGED_JSON, json_body), opening=opening, held=held)


def _qwen_coder() -> ToolFormat:
    held = Held(
        trigger="<function=",  # models leave the tag around it out
        begin=lambda name: f"<function={name}>\n",
        parameter=Parameter(opening="<parameter=%s>\n", line="\n", end="</parameter>", behind="\n"),
        end="</function>",
        separator="\n</tool_call>\n<tool_call>\n",
        section=("<tool_call>\n", "\n</tool_call>"),
    )
    return ToolFormat(
        markers=("<tool_call>", "<function="),
        parse=tagged(FUNCTION_CALL, function_body),
        opening=_opening("", held),
        held=held,
    )


def _glm(line: str) -> ToolFormat:
    """``line`` stands between a call's parts."""
    held = Held(
        trigger="<tool_call>",
        begin=lambda name: f"<tool_call>{name}{line}",
        parameter=Parameter(opening=f"<arg_key>%s</arg_key>{line}<arg_value>", end="</arg_value>", behind=line),
        end="</tool_call>",
        separator="\n",
    )
    opening = _opening("<tool_call>", held)
    return ToolFormat(markers=("<tool_call>",), parse=tagged(TAGGED, paired_body), opening=opening, held=held)


def _llama3() -> ToolFormat:
    held = Held(
        trigger='{"name": "',
        anywhere=False,
        begin=_in_json('{"name": ', ', "parameters": '),
        end="}",
        separator="; ",
    )
    return ToolFormat(
        markers=(PYTHON_TAG,), bare=("{", "["), parse=bare, opening=_opening('{"name": "', held), held=held
    )


def _deepseek_format(before: str, after: str, end: str) -> ToolFormat:
    """``before`` stands before a call's name, ``after`` behind it, and ``end`` behind its arguments."""
    held = Held(
        trigger=DEEPSEEK_CALL_BEGIN,
        begin=lambda name: f"{DEEPSEEK_CALL_BEGIN}{before}{name}{after}",
        end=end + DEEPSEEK_CALL_END,
        separator="\n" if before else "",
        section=(DEEPSEEK_BEGIN, DEEPSEEK_END),
    )
    opening = _opening(DEEPSEEK_CALL_BEGIN + before, held)
    return ToolFormat(markers=(DEEPSEEK_BEGIN,), parse=deepseek, opening=opening, held=held)


def _kimi_format() -> ToolFormat:
    held = Held(
        trigger="<|tool_call_begin|>",
        begin=lambda name: f"<|tool_call_begin|>functions.{name}:",
        between=(
            {"type": "regex", "pattern": "[0-9]+"},
            {"type": "const_string", "value": "<|tool_call_argument_begin|>"},
        ),
        end="<|tool_call_end|>",
        section=(KIMI_BEGIN, KIMI_END),
    )

    def opening(name: str) -> str:
        begun = KIMI_BEGIN + "<|tool_call_begin|>"
        return f"{begun}functions.{name}:0<|tool_call_argument_begin|>" if name else begun

    return ToolFormat(markers=(KIMI_BEGIN,), parse=kimi, opening=opening, held=held)


FORMATS: Mapping[str, ToolFormat] = {
    "hermes": _hermes(),
    "qwen": _hermes(),
    "qwen_coder": _qwen_coder(),
    "glm": _glm("\n"),
    "glm47": _glm(""),
    "llama3": _llama3(),
    "deepseek": _deepseek_format("", DEEPSEEK_SEPARATOR, ""),
    "deepseek_v3": _deepseek_format(f"function{DEEPSEEK_SEPARATOR}", "\n```json\n", "\n```"),
    "kimi": _kimi_format(),
}
SIGNS = (  # texts that a template has, all of them
    ((KIMI_BEGIN,), "kimi"),
    ((DEEPSEEK_BEGIN, "```json"), "deepseek_v3"),
    ((DEEPSEEK_BEGIN,), "deepseek"),
    (("</arg_key><arg_value>",), "glm47"),
    (("<arg_key>",), "glm"),
    (("<function=",), "qwen_coder"),
    (("<tool_call>",), "hermes"),
    ((PYTHON_TAG,), "llama3"),
    (('"parameters":',), "llama3"),
)


def detect(template: str) -> str:
    """The format that a chat template writes calls in; ``hermes`` where it shows none."""
    return next((name for signs, name in SIGNS if all(sign in template for sign in signs)), "hermes")
