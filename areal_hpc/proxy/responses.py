"""OpenAI's Responses API: items in, items out, and a stream of typed, numbered events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal_hpc.dialogue.messages import message, text_of
from areal_hpc.dialogue.parts import Parts
from areal_hpc.errors import DataError
from areal_hpc.proxy.calls import Call, Told
from areal_hpc.proxy.events import Api, News, event, generated, logprob_rows, openai_error, reasoned
from areal_hpc.proxy.requests import (
    Ask,
    Choice,
    Refused,
    budget,
    check_drawing,
    checked_choice,
    given,
    structure,
    top_logprobs,
)
from areal_hpc.proxy.stored import Stored
from areal_hpc.types import Message, StopReason

ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "tool_choice", "tools", "text")
DEFAULTS = {"metadata": {}, "tool_choice": "auto", "tools": [], "text": {"format": {"type": "text"}}}
WITH_LOGPROBS = "message.output_text.logprobs"
"""What a client includes to see the log-probs: those of all that was sampled, reasoning and calls too."""
MAX_PAGE = 100
LIMITS = {str(number): number for number in range(1, MAX_PAGE + 1)}
UNSUPPORTED = ("conversation", "background", "prompt")


def parse(body: Mapping[str, Any]) -> Ask:
    """Raises Refused naming the field that is wrong."""
    for name in UNSUPPORTED:
        if body.get(name):
            raise Refused(400, f"{name} is not supported; send the whole conversation as input", param=name)
    asked = body.get("input")
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else given(body, "input", list, [])
    own = tuple(_messages(items))
    if not own:
        raise Refused(400, "input must be a text or a list with at least one item", param="input")
    wanted = given(given(body, "text", dict, {}), "format", dict, {})
    structured = structure(wanted, wanted)
    instructions = given(body, "instructions", str, "")
    messages = (message("system", instructions), *own) if instructions else own
    tools = tuple(_tool(number, tool) for number, tool in enumerate(given(body, "tools", list, [])))
    check_drawing(body)
    return Ask(
        model=given(body, "model", str, ""),
        messages=messages,
        lead=len(messages) - len(own),
        previous=given(body, "previous_response_id", str, ""),
        store=given(body, "store", bool, True),
        tools=tools,
        choice=checked_choice(_choice(body.get("tool_choice")), tools),
        parallel=given(body, "parallel_tool_calls", bool, True),
        max_tokens=budget(body, "max_output_tokens"),
        seed=given(body, "seed", int),
        stream=given(body, "stream", bool, False),
        logprobs=WITH_LOGPROBS in given(body, "include", list, []),
        num_top=top_logprobs(body),
        **structured,
        echoed={name: DEFAULTS.get(name) if body.get(name) is None else body[name] for name in ECHOED},
    )


def _messages(items: Sequence[Any]) -> Iterator[Message]:
    """Items as messages: what one answer consisted of (reasoning, text, calls) is one message again."""
    answer: list[Mapping[str, Any]] = []
    for number, item in enumerate(items):
        try:
            place = _place_in_answer(item)
            if answer and (place is None or place < (last := _place_in_answer(answer[-1]) or 0) or place == last == 1):
                yield _answer(answer)
                answer = []
            if place is None:
                yield _no_answer(item)
            else:
                answer.append(item)
        except (DataError, KeyError, TypeError, AttributeError) as error:
            raise Refused(400, f"input[{number}] cannot be used: {error}", param="input") from error
    if answer:
        yield _answer(answer)


def _place_in_answer(item: Mapping[str, Any]) -> int | None:
    """Reasoning comes before text and text before calls; None for what is no part of an answer."""
    kind = item.get("type") or "message"
    if kind == "message":
        return 1 if item["role"] == "assistant" else None
    return {"reasoning": 0, "function_call": 2}.get(kind)


def _answer(items: Sequence[Mapping[str, Any]]) -> Message:
    by_place: dict[int | None, list[Mapping[str, Any]]] = {0: [], 1: [], 2: []}
    for item in items:
        by_place[_place_in_answer(item)].append(item)
    calls = [{"id": str(c["call_id"]), "name": str(c["name"]), "arguments": str(c["arguments"])} for c in by_place[2]]
    reasoning = "".join(text_of(item.get("content")) for item in by_place[0])
    return message("assistant", by_place[1][0].get("content") if by_place[1] else "", reasoning=reasoning, calls=calls)


def _no_answer(item: Mapping[str, Any]) -> Message:
    kind = item.get("type") or "message"
    if kind == "message":
        return message(item["role"], item.get("content"))
    if kind == "function_call_output":
        return message("tool", item.get("output"), answers=str(item["call_id"]))
    raise DataError(f"items of type {kind!r} are not supported; send messages, function calls and their outputs")


def _tool(number: int, tool: Any) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise Refused(400, f"tools[{number}] is no function tool; only functions are served here", param="tools")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _choice(chosen: Any) -> Choice:
    if chosen is None:
        return Choice()
    if chosen in ("auto", "none", "required"):
        return Choice(mode=chosen)
    if not isinstance(chosen, Mapping) or chosen.get("type") != "function":
        raise Refused(400, f"tool_choice {chosen!r} is not supported", param="tool_choice")
    return Choice(mode="tool", name=str(chosen.get("name")))


def _response(call: Call, created: int, status: str, **more: Any) -> dict[str, Any]:
    return {
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": call.ask.model,
        "output": [],
        "parallel_tool_calls": call.ask.parallel,
        "previous_response_id": call.ask.previous or None,
        "reasoning": {"effort": None, "summary": None},
        "store": call.ask.store,
        "truncation": "disabled",
        "usage": None,
        "user": None,
        **call.ask.echoed,
        **more,
    }


def _answer_items(call: str, answer: Message, logprobs: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """An answer's items; their ids are those of the stream."""
    items: list[dict[str, Any]] = []
    if answer.get("reasoning_content"):
        items.append(_reasoning(call, answer["reasoning_content"]))
    calls = answer.get("tool_calls", ())
    if answer["content"] or not calls:
        items.append(_message(call, answer["content"], logprobs=logprobs))
    return [*items, *(_function_call(call, one, place) for place, one in enumerate(calls))]


def input_items(call: str, stored: Stored) -> list[dict[str, Any]]:
    """The conversation that a stored answer answered, as items; ids are their own, since clients need send none."""
    return [
        item
        for number, one in enumerate(stored.asked())
        for item in (_answer_items if one["role"] == "assistant" else _input_items)(f"{call}_{number}", one)
    ]


def _input_items(call: str, one: Message) -> list[dict[str, Any]]:
    if one["role"] == "tool":
        output = {"call_id": one.get("tool_call_id", ""), "output": one["content"]}
        return [{"id": f"fco_{call}", "type": "function_call_output", "status": "completed", **output}]
    content = [{"type": "input_text", "text": one["content"]}]
    return [{"id": f"msg_{call}", "type": "message", "role": one["role"], "status": "completed", "content": content}]


def page_of(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A list as OpenAI gives it: ``limit`` items in ``order``, those behind the one whose id is ``after``.

    Raises:
        Refused: one of the three is odd.
    """
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise Refused(400, "order must be asc or desc", param="order")
    if limit not in LIMITS:
        raise Refused(400, f"limit must be in [1, {MAX_PAGE}]", param="limit")
    ordered = list(items) if order == "asc" else list(reversed(items))
    ids = [item["id"] for item in ordered]
    if after is not None and after not in ids:
        raise Refused(400, f"after: there is no item {after!r}", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page = ordered[start : start + LIMITS[limit]]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": start + len(page) < len(ordered)}


def _reasoning(call: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": f"rs_{call}", "type": "reasoning", "summary": [], "content": content, "status": status}


def _part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _message(call: str, text: str | None, status: str = "completed", logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    content = [] if text is None else [_part(text, logprobs)]
    return {"id": f"msg_{call}", "type": "message", "role": "assistant", "status": status, "content": content}


def _function_call(call: str, made: Mapping[str, Any], place: int) -> dict[str, Any]:
    function = {"name": made["function"]["name"], "arguments": made["function"]["arguments"]}
    identity = {"id": f"fc_{call}_{place}", "call_id": made["id"], "status": "completed"}
    return {"type": "function_call", **identity, **function}


def _finished(call: Call, told: Sequence[Told], created: int) -> dict[str, Any]:
    (one,) = told
    prompt, sampled = len(call.place.context), generated(told)
    cut = one.completion.stop is StopReason.LENGTH
    return _response(
        call,
        created,
        "incomplete" if cut else "completed",
        incomplete_details={"reason": "max_output_tokens"} if cut else None,
        output=_answer_items(call.id, one.answer, logprob_rows(one)),
        usage={
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": reasoned(told)},
            "total_tokens": prompt + sampled,
        },
    )


def whole(call: Call, told: Sequence[Told]) -> dict[str, Any]:
    response = _finished(call, told, int(time.time()))
    call.keep(told[0], response)
    return response


class ResponseStream:
    """Items one after another, each added, filled and done; ``response.completed`` last, with the full response."""

    def __init__(self, call: Call) -> None:
        self._call, self._news, self._created = call, News(), int(time.time())
        self._number, self._index, self._open = -1, -1, ""
        self._so_far = Parts()
        self._logprobs: list[dict[str, Any]] = []  # told when a message is done

    def begin(self) -> list[bytes]:
        response = _response(self._call, self._created, "in_progress")
        return [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]

    def delta(self, choice: int, parts: Parts) -> list[bytes]:
        thought, text = self._news.of(choice, parts)
        self._so_far = parts
        events = []
        if thought:
            events += self._in("reasoning")
            events.append(self._at("response.reasoning_text.delta", f"rs_{self._call.id}", delta=thought))
        if text:
            events += self._in("message")
            events.append(self._at("response.output_text.delta", f"msg_{self._call.id}", delta=text, logprobs=[]))
        return events

    def end(self, told: Sequence[Told]) -> list[bytes]:
        events = self.delta(0, told[0].parts)
        self._logprobs = logprob_rows(told[0])
        calls = told[0].answer.get("tool_calls", ())
        if not calls:
            events += self._in("message")  # also around an empty text
        events += self._close()
        for place, made in enumerate(calls):
            events += self._called(_function_call(self._call.id, made, place))
        response = _finished(self._call, told, self._created)
        self._call.keep(told[0], response)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def broken(self, refused: Refused) -> list[bytes]:
        error = {"code": "server_error", "message": str(refused)}
        response = _response(self._call, self._created, "failed", error=error)
        return [self._event("response.failed", response=response)]

    def _called(self, item: Mapping[str, Any]) -> list[bytes]:
        self._index += 1
        place = {"item_id": item["id"], "output_index": self._index}
        begun = {**item, "arguments": "", "status": "in_progress"}
        arguments = item["arguments"]
        return [
            self._event("response.output_item.added", output_index=self._index, item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=arguments),
            self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments),
            self._event("response.output_item.done", output_index=self._index, item=item),
        ]

    def _in(self, kind: str) -> list[bytes]:
        """Be in the item of that kind: the one before is done."""
        if self._open == kind:
            return []
        closed = self._close()
        self._index, self._open = self._index + 1, kind
        empty = _reasoning if kind == "reasoning" else _message
        item = empty(self._call.id, "" if kind == "reasoning" else None, "in_progress")  # type: ignore[arg-type]
        added = self._event("response.output_item.added", output_index=self._index, item=item)
        if kind == "reasoning":
            return [*closed, added]
        part = self._at("response.content_part.added", item["id"], part=_part(""))
        return [*closed, added, part]

    def _close(self) -> list[bytes]:
        was, self._open = self._open, ""
        if was == "reasoning":
            item = _reasoning(self._call.id, self._so_far.reasoning)
            text = self._so_far.reasoning
            done = [self._at("response.reasoning_text.done", item["id"], text=text)]
        elif was == "message":
            text, logprobs = self._so_far.content, self._logprobs
            item = _message(self._call.id, text, logprobs=logprobs)
            done = [
                self._at("response.output_text.done", item["id"], text=text, logprobs=logprobs),
                self._at("response.content_part.done", item["id"], part=_part(text, logprobs)),
            ]
        else:
            return []
        return [*done, self._event("response.output_item.done", output_index=self._index, item=item)]

    def _at(self, kind: str, item_id: str, **values: Any) -> bytes:
        return self._event(kind, item_id=item_id, output_index=self._index, content_index=0, **values)

    def _event(self, kind: str, **values: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **values}, kind)


RESPONSES = Api(parse=parse, whole=whole, stream=ResponseStream, refusal=openai_error)
