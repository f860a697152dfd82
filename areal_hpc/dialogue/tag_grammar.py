"""Structural tags as grammars for llguidance, in its dialect of Lark: what embedded engines and vLLM are held to.

    start: tagged* TEXT                                       found behind free text, and free text behind it
    tagged: trigger rest
    trigger[lazy]: TEXT "<tool_call>"                         as soon as it stands there
    rest: "\\n{\\"name\\": \\"add\\", \\"arguments\\": " json "}\\n</tool_call>"
    json: %json {...}

A tokenizer may have a token for what is text to the tag. Grammars take such special tokens for something else than
their text, and name them ``<so>``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_hpc.dialogue.tool_calls import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL_BEGIN,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEPARATOR,
    KIMI_BEGIN,
    KIMI_END,
)
from areal_hpc.errors import DataError

TEXT = r"TEXT: /(.|\n)*/"
TEXT_TOKENS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *(DEEPSEEK_BEGIN, DEEPSEEK_END, DEEPSEEK_CALL_BEGIN, DEEPSEEK_CALL_END, DEEPSEEK_SEPARATOR),
    *(KIMI_BEGIN, KIMI_END, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
"""Tokens that are text to a grammar, although some tokenizers call them special."""


def lark_of(tag: str, layout: Mapping[str, Any]) -> str:
    """The tag as a grammar.

    Args:
        tag: as JSON.
        layout: how JSON is written, in llguidance's words.

    Raises:
        DataError: it is no tag of the kinds that ``structural_tag`` writes.
    """
    rules = _Rules(layout)
    try:
        start = rules.of(json.loads(tag)["format"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"structural_tag: {type(error).__name__}: {error}; send one with a `format`") from error
    return "\n".join(["%llguidance {}", f"start: {start}", TEXT, *rules.lines, ""])


class _Rules:
    """Grows as formats are written down; ``of`` gives the expression that stands for one."""

    def __init__(self, layout: Mapping[str, Any]) -> None:
        self._layout = layout
        self.lines: list[str] = []

    def of(self, one: Mapping[str, Any]) -> str:
        """Raises KeyError for a kind of format that is not written here, and where something is missing."""
        write: dict[str, Callable[[], str]] = {
            "const_string": lambda: _quoted(one["value"]),
            "regex": lambda: f"/{one['pattern']}/",
            "json_schema": lambda: self._json(one["json_schema"]),
            "any_text": lambda: "TEXT",
            "sequence": lambda: " ".join(map(self.of, one["elements"])),
            "or": lambda: self._any(one["elements"]),
            "optional": lambda: f"({self.of(one['content'])})?",
            "tag": lambda: f"{_quoted(one['begin'])} {self._rest(one)}",
            "tags_with_separator": lambda: self._row(one["tags"], one["separator"]),
            "triggered_tags": lambda: self._triggered(one["triggers"], one["tags"], bool(one.get("at_least_one"))),
        }
        return write[one["type"]]()

    def _named(self, expression: str, kind: str = "rule", attribute: str = "") -> str:
        name = f"{kind}_{len(self.lines)}"
        self.lines.append(f"{name}{attribute}: {expression}")
        return name

    def _json(self, schema: Any) -> str:
        laid_out = {**schema, "x-guidance": dict(self._layout)} if isinstance(schema, Mapping) else schema
        return self._named(f"%json {json.dumps(laid_out, ensure_ascii=False)}", "json")

    def _any(self, formats: Sequence[Mapping[str, Any]]) -> str:
        return self._named(" | ".join(map(self.of, formats)))

    def _rest(self, tag: Mapping[str, Any], begun: str = "") -> str:
        """A tag behind its beginning, or behind what has ``begun`` it."""
        before = _quoted(tag["begin"].removeprefix(begun)) + " " if begun and tag["begin"] != begun else ""
        if tag["content"] == {"type": "any_text"}:
            return before + self._named(f"TEXT {_quoted(tag['end'])}", "text", "[lazy]")
        return f"{before}{self.of(tag['content'])} {_quoted(tag['end'])}"

    def _row(self, tags: Sequence[Mapping[str, Any]], separator: str) -> str:
        one = self._any(tags)
        return f"{one} ({_quoted(separator) if separator else ''} {one})*"

    def _triggered(self, triggers: Sequence[str], tags: Sequence[Mapping[str, Any]], at_least_one: bool) -> str:
        found, first = [], []
        for trigger in triggers:
            begun = [tag for tag in tags if tag["begin"].startswith(trigger)]
            if not trigger or not begun:
                raise ValueError(f"no tag begins with the trigger {trigger!r}")
            rest = self._named(" | ".join(self._rest(tag, trigger) for tag in begun))
            seen = self._named(f"TEXT {_quoted(trigger)}", "found", "[lazy]")
            found.append(f"{seen} {rest}")
            first.append(f"{_quoted(trigger)} {rest}")
        anywhere = f"({' | '.join(found)})* TEXT"
        return f"({' | '.join(first)}) {anywhere}" if at_least_one else anywhere


def _quoted(text: str) -> str:
    return json.dumps(text)
