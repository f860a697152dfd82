"""Anthropic's messages: content in blocks, the system text apart, results of tools inside user messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal_hpc.dialogue.messages import json_value, message, text_of
from areal_hpc.dialogue.parts import Parts
from areal_hpc.errors import DataError
from areal_hpc.proxy.calls import Call, Told
from areal_hpc.proxy.events import Api, News, event, generated
from areal_hpc.proxy.requests import (
    Ask,
    Choice,
    Refused,
    budget,
    check_drawing,
    checked_choice,
    given,
    stops,
    structure,
)
from areal_hpc.types import Message, StopReason

MODES = {"auto": "auto", "any": "required", "tool": "tool", "none": "none"}
"""Anthropic's words for what a model must call, and ours."""


def parse(body: Mapping[str, Any]) -> Ask:
    """Raises Refused naming the field that is wrong."""
    messages = tuple(_messages(body))
    if not any(one["role"] != "system" for one in messages):
        raise Refused(400, "messages: at least one message is required", param="messages")
    wanted = given(given(body, "output_config", dict, {}), "format", dict, {})
    structured = structure(wanted, {**wanted, "strict": True})
    tools = tuple(_tool(number, tool) for number, tool in enumerate(given(body, "tools", list, [])))
    chosen = given(body, "tool_choice", dict, {})
    if (kind := given(chosen, "type", str, "auto")) not in MODES:
        raise Refused(400, f"tool_choice: type {kind!r} is not known; use {', '.join(MODES)}", param="tool_choice")
    check_drawing(body)
    return Ask(
        model=given(body, "model", str, ""),
        messages=messages,
        tools=tools,
        choice=checked_choice(Choice(mode=MODES[kind], name=str(chosen.get("name") or "")), tools),
        parallel=not chosen.get("disable_parallel_tool_use"),
        max_tokens=budget(body, "max_tokens"),
        stop=stops(body, "stop_sequences"),
        stream=given(body, "stream", bool, False),
        **structured,
    )


def _messages(body: Mapping[str, Any]) -> Iterator[Message]:
    try:
        if body.get("system"):
            yield message("system", body["system"])
        for number, one in enumerate(given(body, "messages", list, [])):
            if not isinstance(one, Mapping) or one.get("role") not in ("user", "assistant", "system"):
                raise Refused(400, f"messages.{number}: role must be user or assistant", param="messages")
            yield from _from_blocks(one["role"], one.get("content"))
    except (DataError, KeyError, TypeError, AttributeError) as error:
        raise Refused(400, f"messages: {error}", param="messages") from error


def _from_blocks(role: str, content: Any) -> Iterator[Message]:
    """A message of blocks as one or several of ours; results of tools come before the user's own words."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    by_type: dict[str, list[Any]] = {}
    for block in blocks:
        by_type.setdefault(block["type"], []).append(block)
    for result in by_type.pop("tool_result", []):
        yield message("tool", result.get("content"), answers=str(result["tool_use_id"]))
    thoughts = "".join(str(block.get("thinking", "")) for block in by_type.pop("thinking", []))
    by_type.pop("redacted_thinking", None)
    calls = [
        {"id": str(use["id"]), "name": str(use["name"]), "arguments": json.dumps(use["input"], ensure_ascii=False)}
        for use in by_type.pop("tool_use", [])
    ]
    texts = by_type.pop("text", [])
    if by_type:
        raise DataError(f"content of type {next(iter(by_type))!r} is not supported; send text and tool blocks only")
    if texts or calls or not blocks:
        yield message(role, text_of(texts), reasoning=thoughts, calls=calls)


def _tool(number: int, tool: Any) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str) or "input_schema" not in tool:
        raise Refused(400, f"tools.{number}: only tools with a name and an input_schema are served here", param="tools")
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
    strict = {"strict": True} if tool.get("strict") is True else {}
    return {"type": "function", "function": {**function, **strict}}


def stop_reason(told: Told) -> str:
    if told.answer.get("tool_calls"):
        return "tool_use"
    if told.completion.stop is StopReason.LENGTH:
        return "max_tokens"
    return "stop_sequence" if told.stopped_by else "end_turn"


def _usage(call: Call, told: Sequence[Told]) -> dict[str, Any]:
    return {
        "input_tokens": len(call.place.context),
        "output_tokens": generated(told),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _head(call: Call) -> dict[str, Any]:
    return {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": call.ask.model}


def _uses(told: Told) -> list[dict[str, Any]]:
    """Calls as blocks; arguments that are no object travel as text, so that the model hears of them."""
    blocks = []
    for call in told.answer.get("tool_calls", ()):
        arguments = json_value(call["function"]["arguments"])
        given = arguments if isinstance(arguments, dict) else {"arguments": call["function"]["arguments"]}
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
    return blocks


def whole(call: Call, told: Sequence[Told]) -> dict[str, Any]:
    (one,) = told
    content: list[dict[str, Any]] = []
    if one.parts.reasoning:
        content.append({"type": "thinking", "thinking": one.parts.reasoning, "signature": ""})
    uses = _uses(one)
    if one.parts.content or not uses:
        content.append({"type": "text", "text": one.parts.content})
    return {
        **_head(call),
        "content": [*content, *uses],
        "stop_reason": stop_reason(one),
        "stop_sequence": one.stopped_by or None,
        "usage": _usage(call, told),
    }


class MessageStream:
    """Blocks one after another, each opened, filled and closed: thinking, text, tool uses."""

    def __init__(self, call: Call) -> None:
        self._call, self._news = call, News()
        self._index, self._open = -1, ""

    def begin(self) -> list[bytes]:
        usage = {**_usage(self._call, ()), "output_tokens": 0}
        head = {**_head(self._call), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [_event("message_start", message=head)]

    def delta(self, choice: int, parts: Parts) -> list[bytes]:
        thought, text = self._news.of(choice, parts)
        events = []
        if thought:
            events += self._in("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._filled({"type": "thinking_delta", "thinking": thought}))
        if text:
            events += self._in("text", {"type": "text", "text": ""})
            events.append(self._filled({"type": "text_delta", "text": text}))
        return events

    def end(self, told: Sequence[Told]) -> list[bytes]:
        (one,) = told
        events = self.delta(0, one.parts)
        for use in _uses(one):
            events += self._in(f"tool_use {use['id']}", {**use, "input": {}})
            events.append(self._filled({"type": "input_json_delta", "partial_json": json.dumps(use["input"])}))
        if self._index < 0:
            events += self._in("text", {"type": "text", "text": ""})
        delta = {"stop_reason": stop_reason(one), "stop_sequence": one.stopped_by or None}
        events += [*self._close(), _event("message_delta", delta=delta, usage=_usage(self._call, told))]
        return [*events, _event("message_stop")]

    def broken(self, refused: Refused) -> list[bytes]:
        return [event(refusal(refused), "error")]

    def _in(self, name: str, block: Mapping[str, Any]) -> list[bytes]:
        """Be in the block of that name: the one before is closed."""
        if self._open == name:
            return []
        closed = self._close()
        self._index, self._open = self._index + 1, name
        return [*closed, _event("content_block_start", index=self._index, content_block=block)]

    def _close(self) -> list[bytes]:
        was, self._open = self._open, ""
        return [_event("content_block_stop", index=self._index)] if was else []

    def _filled(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **values: Any) -> bytes:
    return event({"type": kind, **values}, kind)


def refusal(refused: Refused) -> dict[str, Any]:
    """A refusal in Anthropic's shape."""
    kinds = {
        401: "authentication_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    kind = kinds.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


MESSAGES = Api(parse=parse, whole=whole, stream=MessageStream, refusal=refusal)
