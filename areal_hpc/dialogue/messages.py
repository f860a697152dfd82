"""Chat messages in one shape, and when two histories are the same one.

What a client sends back of an answer differs from what it got: ``null`` for empty content, stripped blanks, arguments
written anew, reasoning left out. ``History`` sees through that; ``verbatim`` tells whether there was anything to
see through.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from areal_hpc.errors import DataError
from areal_hpc.types import Message

MAX_DEPTH = 128
"""Lists and objects inside each other that are taken; what renders and writes them calls itself for each level."""


def text_of(content: Any) -> str:
    """The text of a message's content: a string, nothing, or parts of type text.

    Raises:
        DataError: a part that is no text, such as an image.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise DataError(f"a message's content is a {type(content).__name__}; send a text or a list of text parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise DataError(f"content of type {kind!r} is not supported; send text parts only")
        texts.append(text)
    return "".join(texts)


def message(
    role: str, content: Any, *, reasoning: str = "", calls: Sequence[Mapping[str, Any]] = (), answers: str = ""
) -> dict[str, Any]:
    """A message as transcripts keep it: text content, arguments of calls as the text they are.

    Args:
        calls: ``{"id", "name", "arguments"}`` each.
        answers: id of the call whose result this is.
    """
    made: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text_of(content)}
    if reasoning:
        made["reasoning_content"] = reasoning
    if calls:
        made["tool_calls"] = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in calls
        ]
    if answers:
        made["tool_call_id"] = answers
    return made


def for_template(messages: Sequence[Message]) -> list[Message]:
    """Messages as chat templates expect them: arguments that are a JSON object as that object."""
    return [
        m if "tool_calls" not in m else {**m, "tool_calls": [_parsed(c) for c in m["tool_calls"]]} for m in messages
    ]


def _parsed(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    arguments = json_value(function["arguments"])
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def json_value(text: str) -> Any:
    """What ``text`` says as JSON, or the text itself where it is none, or is too deep."""
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return text
    return text if is_too_deep(value) else value


def is_too_deep(value: Any) -> bool:
    """Whether lists and objects of JSON are nested in more than ``MAX_DEPTH`` levels."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [one for one in level if isinstance(one, (list, dict))]
        if not level:
            return False
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return True


def refuse_constant(constant: str) -> Any:
    """For a reader of JSON: NaN and infinities are none. Raises ValueError."""
    raise ValueError(f"{constant} is not JSON")


def verbatim(messages: Sequence[Message]) -> list[Any]:
    """What a client must send back for its history to be the very one; reasoning and ids of calls may go."""
    return [(m["role"], m["content"], _calls(m)) for m in messages]


def _calls(message: Message) -> list[tuple[str, str]]:
    return [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]


class History:
    """A conversation as it grows, known by a fingerprint that is equal where histories are the same.

    Whitespace, the way JSON is written, reasoning and the ids of calls do not count; which call a result answers does.

    Args:
        setting: what else decides how the conversation is rendered (tools, template arguments), as JSON data.
    """

    def __init__(self, setting: Any) -> None:
        self._digest = hashlib.blake2b(json.dumps(setting, sort_keys=True).encode(), digest_size=16)
        self._places: dict[str, int] = {}  # of the newest calls, by their ids

    def add(self, one: Message) -> str:
        """The fingerprint with one message more."""
        calls = [(name, json.dumps(json_value(arguments), sort_keys=True)) for name, arguments in _calls(one)]
        if calls:
            self._places = {call["id"]: place for place, call in enumerate(one["tool_calls"])}
        answers = self._places.get(one.get("tool_call_id", ""))
        content = " ".join(one["content"].split())
        self._digest.update(repr((one["role"], content, calls, answers)).encode("utf-8", "surrogatepass"))
        return self._digest.hexdigest()

    def copy(self) -> History:
        """One that grows by itself from here on."""
        made = object.__new__(History)
        made._digest, made._places = self._digest.copy(), self._places
        return made
