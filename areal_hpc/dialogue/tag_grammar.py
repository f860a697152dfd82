"""Structural tags as grammars for llguidance, in its dialect of Lark: what embedded engines and vLLM are held to.

    start: tagged* TEXT                                       found behind free text, and free text behind it
    tagged: trigger rest
    trigger[lazy]: TEXT "<tool_call>"                         as soon as it stands there
    rest: "\\n{\\"name\\": \\"add\\", \\"arguments\\": " json "}\\n</tool_call>"
    json: %json {...}

A tokenizer may have a token for what is text to the tag. Where llguidance takes whatever is written <so> for special,
as vLLM has it do, such a token is no text to a grammar either, which then names it by its id: ``<[7]>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
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
THOUGHT_TOKENS = ("<think>", "</think>")
TEXT_TOKENS = (
    *("<tool_call>", "</tool_call>", *THOUGHT_TOKENS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *(DEEPSEEK_BEGIN, DEEPSEEK_END, DEEPSEEK_CALL_BEGIN, DEEPSEEK_CALL_END, DEEPSEEK_SEPARATOR),
    *(KIMI_BEGIN, KIMI_END, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
"""Tokens that are text to a grammar, although some tokenizers call them special."""
NO_TOKENS: Mapping[str, int] = MappingProxyType({})


def lark_of(tag: str, layout: Mapping[str, Any], tokens: Mapping[str, int] = NO_TOKENS) -> str:
    """The tag as a grammar.

    Args:
        tag: as JSON.
        layout: how JSON is written, in llguidance's words.
        tokens: of ``TEXT_TOKENS`` those that are no text to whoever reads the grammar, with their ids: the grammar
            has them as tokens. Spelled by several others they are text, and trigger nothing.

    Raises:
        DataError: it is no tag of the kinds that ``structural_tag`` writes.
    """
    rules = _Rules(layout, tokens)
    try:
        start = rules.of(json.loads(tag)["format"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"structural_tag: {type(error).__name__}: {error}; send one with a `format`") from error
    return "\n".join(["%llguidance {}", f"start: {start}", TEXT, *rules.lines, ""])


class _Rules:
    """Grows as formats are written down; ``of`` gives the expression that stands for one."""

    def __init__(self, layout: Mapping[str, Any], tokens: Mapping[str, int]) -> None:
        self._layout, self._tokens = layout, tokens
        self.lines: list[str] = []

    def of(self, one: Mapping[str, Any]) -> str:
        """Raises KeyError for a kind of format that is not written here, and where something is missing."""
        write: dict[str, Callable[[], str]] = {
            "const_string": lambda: self._fixed(one["value"]),
            "regex": lambda: f"/{one['pattern']}/",
            "json_schema": lambda: self._json(one["json_schema"]),
            "any_text": lambda: "TEXT",
            "sequence": lambda: " ".join(map(self.of, one["elements"])),
            "or": lambda: self._any(one["elements"]),
            "optional": lambda: f"({self.of(one['content'])})?",
            "tag": lambda: f"{self._fixed(one['begin'])} {self._rest(one)}",
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
        before = self._fixed(tag["begin"].removeprefix(begun)) if begun else ""
        free = tag["content"] == {"type": "any_text"}
        rest = self._text_to(tag["end"]) if free else f"{self.of(tag['content'])} {self._fixed(tag['end'])}"
        return f"{before} {rest}"

    def _text_to(self, end: str) -> str:
        """Free text, and ``end`` as soon as it stands there.

        Raises:
            ValueError: it begins as text, and has a special token within it.
        """
        fixed = self._fixed(end)
        if end.startswith(tuple(self._tokens)):
            return f"TEXT {fixed}"  # which free text cannot hold, so that it ends there
        if fixed != json.dumps(end):
            raise ValueError(f"free text up to {end!r}, which has a special token within it; let it begin there")
        return self._named(f"TEXT {fixed}", "text", "[lazy]")

    def _fixed(self, text: str) -> str:
        """A fixed text: quoted, but for special tokens."""
        parts = re.split(f"({'|'.join(map(re.escape, self._tokens))})", text) if self._tokens else [text]
        terms = [f"<[{self._tokens[part]}]>" if part in self._tokens else json.dumps(part) for part in parts if part]
        return " ".join(terms)

    def _row(self, tags: Sequence[Mapping[str, Any]], separator: str) -> str:
        one = self._any(tags)
        return f"{one} ({self._fixed(separator)} {one})*"

    def _triggered(self, triggers: Sequence[str], tags: Sequence[Mapping[str, Any]], at_least_one: bool) -> str:
        found, first, thoughts = [], [], self._thoughts()
        for trigger in triggers:
            begun = [tag for tag in tags if tag["begin"].startswith(trigger)]
            if not trigger or not begun:
                raise ValueError(f"no tag begins with the trigger {trigger!r}")
            rest = self._named(" | ".join(self._rest(tag, trigger) for tag in begun))
            found.append(f"{thoughts} {self._text_to(trigger)} {rest}")
            first.append(f"{self._fixed(trigger)} {rest}")
        anywhere = f"({' | '.join(found)})* {thoughts} TEXT"
        return f"({' | '.join(first)}) {anywhere}" if at_least_one else anywhere

    def _thoughts(self) -> str:
        """What special tokens around thoughts add to free text; empty where they are text."""
        around = [f"<[{self._tokens[token]}]>" for token in THOUGHT_TOKENS if token in self._tokens]
        return f"(TEXT ({' | '.join(around)}))*" if around else ""
