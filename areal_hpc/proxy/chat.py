"""OpenAI's chat completions, and the older completions of plain texts."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from areal_hpc.dialogue.messages import message
from areal_hpc.dialogue.parts import Parts
from areal_hpc.errors import DataError
from areal_hpc.proxy.calls import Call, Told
from areal_hpc.proxy.events import Api, News, event, generated, logprob_rows, openai_error, reasoned
from areal_hpc.proxy.requests import (
    MAX_CHOICES,
    Ask,
    Choice,
    Refused,
    budget,
    check_drawing,
    checked_choice,
    function_tools,
    given,
    stops,
    structure,
    top_logprobs,
)
from areal_hpc.types import Message, StopReason

ROLES = ("system", "developer", "user", "assistant", "tool")
DONE = b"data: [DONE]\n\n"


def parse_chat(body: Mapping[str, Any]) -> Ask:
    """Raises Refused naming the field that is wrong."""
    messages = tuple(_message(number, one) for number, one in enumerate(given(body, "messages", list, [])))
    if not messages:
        raise Refused(400, "messages must be a list with at least one message", param="messages")
    wanted = given(body, "response_format", dict, {})
    structured = structure(wanted, given(wanted, "json_schema", dict, {}))
    tools = function_tools(given(body, "tools", list, []))
    return Ask(
        messages=messages,
        tools=tools,
        choice=checked_choice(_choice(body.get("tool_choice")), tools),
        parallel=given(body, "parallel_tool_calls", bool, True),
        max_tokens=budget(body, "max_completion_tokens", "max_tokens"),
        options=given(body, "chat_template_kwargs", dict, {}),
        logprobs=given(body, "logprobs", bool, False),
        num_top=top_logprobs(body),
        **structured,
        **_shared(body),
    )


def _shared(body: Mapping[str, Any]) -> dict[str, Any]:
    """What both APIs spell alike."""
    num_choices = given(body, "n", int, 1)
    if not 1 <= num_choices <= MAX_CHOICES:
        raise Refused(400, f"n must be in [1, {MAX_CHOICES}]", param="n")
    check_drawing(body)
    return {
        "model": given(body, "model", str, ""),
        "stop": stops(body, "stop"),
        "num_choices": num_choices,
        "seed": given(body, "seed", int),
        "stream": given(body, "stream", bool, False),
        "usage_chunk": bool(given(body, "stream_options", dict, {}).get("include_usage")),
    }


def _message(number: int, one: Any) -> Message:
    if not isinstance(one, Mapping) or one.get("role") not in ROLES:
        raise Refused(400, f"messages[{number}] needs a role, one of {', '.join(ROLES)}", param="messages")
    try:
        return message(
            one["role"],
            one.get("content"),
            reasoning=str(one.get("reasoning_content") or one.get("reasoning") or ""),
            calls=[_call(call) for call in one.get("tool_calls") or ()],
            answers=str(one.get("tool_call_id") or ""),
        )
    except (DataError, KeyError, TypeError, AttributeError) as error:
        raise Refused(400, f"messages[{number}] cannot be used: {error}", param="messages") from error


def _call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": str(call.get("id") or ""), "name": str(function["name"]), "arguments": text}


def _choice(chosen: Any) -> Choice:
    if chosen is None:
        return Choice()
    if chosen in ("auto", "none", "required"):
        return Choice(mode=chosen)
    function = chosen.get("function") if isinstance(chosen, Mapping) else None
    if not isinstance(function, Mapping):
        raise Refused(
            400, f"tool_choice {chosen!r} is not known; use auto, none, required or a function", param="tool_choice"
        )
    return Choice(mode="tool", name=str(function.get("name")))


def finish_reason(told: Told) -> str:
    if told.answer.get("tool_calls"):
        return "tool_calls"
    return "length" if told.completion.stop is StopReason.LENGTH else "stop"


def usage(call: Call, told: Sequence[Told]) -> dict[str, Any]:
    prompt, sampled = len(call.place.context), generated(told)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": reasoned(told)},
    }


def _logprobs(told: Told) -> dict[str, Any] | None:
    if not told.pieces:
        return None
    return {"content": logprob_rows(told), "refusal": None}


def _chunk_head(call: Call, kind: str) -> dict[str, Any]:
    """With the usage that only the last chunk tells, where one is asked for."""
    return {**_head(call, kind), **({"usage": None} if call.ask.usage_chunk else {})}


def _head(call: Call, kind: str) -> dict[str, Any]:
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {
        "id": f"{prefix}-{call.id}",
        "object": kind,
        "created": int(time.time()),
        "model": call.ask.model,
    }


def whole_chat(call: Call, told: Sequence[Told]) -> dict[str, Any]:
    choices = []
    for index, one in enumerate(told):
        answer: dict[str, Any] = {**one.answer, "refusal": None}
        if one.answer.get("tool_calls") and not one.answer["content"]:
            answer["content"] = None
        choices.append(
            {"index": index, "message": answer, "logprobs": _logprobs(one), "finish_reason": finish_reason(one)}
        )
    return {**_head(call, "chat.completion"), "choices": choices, "usage": usage(call, told)}


class ChatStream:
    """Chunks: the role first, text as it comes, calls when they are whole, the reason, then usage if asked for."""

    def __init__(self, call: Call) -> None:
        self._call, self._news = call, News()
        self._head = _chunk_head(call, "chat.completion.chunk")

    def begin(self) -> list[bytes]:
        role = {"role": "assistant", "content": ""}
        return [self._chunk(index, role) for index in range(self._call.ask.num_choices)]

    def delta(self, choice: int, parts: Parts) -> list[bytes]:
        reasoning, content = self._news.of(choice, parts)
        chunks = [self._chunk(choice, {"reasoning_content": reasoning})] if reasoning else []
        return [*chunks, self._chunk(choice, {"content": content})] if content else chunks

    def end(self, told: Sequence[Told]) -> list[bytes]:
        events = []
        for index, one in enumerate(told):
            events += self.delta(index, one.parts)
            for place, call in enumerate(one.answer.get("tool_calls", ())):
                events.append(self._chunk(index, {"tool_calls": [{"index": place, **call}]}))
            events.append(self._chunk(index, {}, finish_reason(one), _logprobs(one)))
        if self._call.ask.usage_chunk:
            events.append(event({**self._head, "choices": [], "usage": usage(self._call, told)}))
        return [*events, DONE]

    def broken(self, refused: Refused) -> list[bytes]:
        return [event(openai_error(refused))]

    def _chunk(self, index: int, delta: Any, reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event({**self._head, "choices": [choice]})


def parse_completion(body: Mapping[str, Any]) -> Ask:
    """Raises Refused naming the field that is wrong."""
    prompt = given(body, "prompt", (str, list))
    prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    if not isinstance(prompt, str):
        raise Refused(400, "prompt must be one text; send one request for each", param="prompt")
    for field in ("suffix", "echo"):
        if body.get(field):
            raise Refused(400, f"{field} is not supported; leave it out", param=field)
    asked = body.get("logprobs")
    logprobs = asked is not None and asked is not False  # 0 asks for those of the sampled tokens alone
    return Ask(
        messages=(),
        text=prompt,
        max_tokens=budget(body, "max_tokens"),
        logprobs=logprobs,
        num_top=top_logprobs(body, "logprobs"),
        **_shared(body),
    )


def _text_logprobs(told: Told) -> dict[str, Any] | None:
    if not told.pieces:
        return None
    return {
        "tokens": list(told.pieces),
        "token_logprobs": told.completion.logprobs.tolist(),
        "top_logprobs": [dict(place) for place in told.tops] or None,
        "text_offset": [0, *itertools.accumulate(map(len, told.pieces[:-1]))],
    }


def whole_completion(call: Call, told: Sequence[Told]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": one.parts.content,
            "logprobs": _text_logprobs(one),
            "finish_reason": finish_reason(one),
        }
        for index, one in enumerate(told)
    ]
    return {**_head(call, "text_completion"), "choices": choices, "usage": usage(call, told)}


class CompletionStream:
    """Chunks of plain text."""

    def __init__(self, call: Call) -> None:
        self._call, self._news, self._head = call, News(), _chunk_head(call, "text_completion")

    def begin(self) -> list[bytes]:
        return []

    def delta(self, choice: int, parts: Parts) -> list[bytes]:
        _, content = self._news.of(choice, parts)
        return [self._chunk(choice, content)] if content else []

    def end(self, told: Sequence[Told]) -> list[bytes]:
        events = []
        for index, one in enumerate(told):
            events += self.delta(index, one.parts)
            events.append(self._chunk(index, "", finish_reason(one), _text_logprobs(one)))
        if self._call.ask.usage_chunk:
            events.append(event({**self._head, "choices": [], "usage": usage(self._call, told)}))
        return [*events, DONE]

    def broken(self, refused: Refused) -> list[bytes]:
        return [event(openai_error(refused))]

    def _chunk(self, index: int, text: str, reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return event({**self._head, "choices": [choice]})


CHAT = Api(parse=parse_chat, whole=whole_chat, stream=ChatStream, refusal=openai_error)
COMPLETIONS = Api(parse=parse_completion, whole=whole_completion, stream=CompletionStream, refusal=openai_error)
