"""What a client asks for, whichever API it speaks, and why it is refused.

Fields that are null count as absent, and fields that nobody knows are ignored: clients send many. Whatever model they
name, the run's is meant. From which distribution tokens are drawn (temperature, top_p, top_k, min_p) is the run's to
decide, since the trainer must know it: these are accepted and not obeyed. Stop strings and smaller budgets are, and a
seed is as far as it can be: with the same one, the same request in the same session is answered alike.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_hpc.dialogue.grammar import as_schema
from areal_hpc.types import Message

MAX_CHOICES = 64
MAX_TOP = 20
MAX_FLOAT = sys.float_info.max


class Refused(Exception):
    """A request that is not served; each API says so in a shape of its own.

    Args:
        status: of HTTP; 400 is what the client can mend.
        code: machine-readable, such as ``context_length_exceeded``.
        param: the field at fault.
        retry_after_s: when the client may try again.
    """

    def __init__(
        self, status: int, message: str, *, code: str = "", param: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s


def own_fault(error: Exception, advice: str) -> Refused:
    """What a client is told of an error that nobody foresaw; the log has all of it."""
    what = f"the service itself failed ({type(error).__name__}), and its log says how; {advice}"
    return Refused(500, what, code="internal_error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which tool the model must call: ``auto`` as it likes, ``none``, ``required`` any, or ``tool`` a named one."""

    mode: str = "auto"
    name: str = ""

    @property
    def is_forced(self) -> bool:
        """Whether the model must call one."""
        return self.mode in ("required", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. ``messages`` are of ``dialogue.messages.message``'s shape."""

    model: str
    messages: tuple[Message, ...]
    text: str | None = None
    """A plain text to continue, instead of messages."""
    tools: tuple[Mapping[str, Any], ...] = ()
    choice: Choice = field(default_factory=Choice)
    parallel: bool = True
    """Whether one answer may call several tools; otherwise only its first call is given out."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_choices: int = 1
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the chat template."""
    stream: bool = False
    usage_chunk: bool = False
    logprobs: bool = False
    num_top: int = 0
    """How many of the likeliest tokens are told beside each; only with ``logprobs``."""
    schema: str = ""
    """JSON schema of the answer, as JSON; empty is any text."""
    strict: bool = False
    """Refuse a schema that answers cannot be held to; else the model is only asked to follow it."""
    previous: str = ""
    """Id of the answer that ``messages`` go on from, of those that the session keeps; empty where they are whole."""
    lead: int = 0
    """How many messages, at the beginning, hold for this answer alone: what goes on from it does without them."""
    store: bool = False
    """Whether the session keeps the answer for requests that go on from it."""
    echoed: Mapping[str, Any] = field(default_factory=dict)
    """What the answer repeats of the request."""


def given(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """A field's value, the default where it is absent or null.

    Raises:
        Refused: it is of another type.
    """
    value = body.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise Refused(400, f"{name} must be of type {' or '.join(k.__name__ for k in kinds)}", param=name)
    return value


def number(body: Mapping[str, Any], name: str, default: float | None = None) -> float | None:
    """A finite number, the default where it is absent or null.

    Raises:
        Refused: it is none, or more than a float holds.
    """
    value = given(body, name, (int, float))
    if value is not None and not abs(value) <= MAX_FLOAT:  # not (>): NaN must fail
        raise Refused(400, f"{name} must be a finite number", param=name)
    return default if value is None else float(value)


def check_drawing(body: Mapping[str, Any]) -> None:
    """Raises Refused where what is not obeyed is no number."""
    for name in ("temperature", "top_p"):
        number(body, name)


def top_logprobs(body: Mapping[str, Any], name: str = "top_logprobs") -> int:
    """How many of the likeliest tokens are asked for at each place."""
    num = given(body, name, (int, bool), 0)
    if not 0 <= num <= MAX_TOP:
        raise Refused(400, f"{name} must be in [0, {MAX_TOP}]", param=name)
    return 0 if isinstance(num, bool) else num


def budget(body: Mapping[str, Any], *names: str) -> int | None:
    """The most tokens that the answer may have, under any of its names; the smallest counts."""
    asked = [given(body, name, int) for name in names]
    budgets = [number for number in asked if number is not None]
    if any(number < 1 for number in budgets):
        raise Refused(400, f"{names[0]} must be at least 1", param=names[0])
    return min(budgets, default=None)


def stops(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Stop strings: one, or a list of them."""
    stop = given(body, name, (str, list), [])
    texts = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(text, str) for text in texts):
        raise Refused(400, f"{name} must be a text or a list of texts", param=name)
    return tuple(text for text in texts if text)


def function_tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """Tools in the chat API's shape, as they were sent: the template renders exactly this."""
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Refused(400, f"tools[{number}] is no function tool; only functions are served here", param="tools")
    return tuple(tools)


def checked_choice(choice: Choice, tools: Sequence[Mapping[str, Any]]) -> Choice:
    """The choice, if there is a tool that it can mean."""
    names = [tool["function"]["name"] for tool in tools]
    if choice.mode == "required" and not names:
        raise Refused(400, "tool_choice is required, and there are no tools", param="tool_choice")
    if choice.mode == "tool" and choice.name not in names:
        raise Refused(400, f"tool_choice names {choice.name!r}; the tools are {names}", param="tool_choice")
    return choice


def structure(wanted: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """``schema`` and ``strict`` of an ``Ask``; nothing for plain text.

    Args:
        wanted: a format, with its ``type``.
        described: what has its ``schema`` and ``strict``.
    """
    if wanted.get("type") not in ("json_schema", "json_object"):
        return {}
    schema = given(described, "schema", dict, {"type": "object"})
    return {"schema": as_schema(schema), "strict": given(described, "strict", bool, False)}


def with_schema(messages: Sequence[Message], schema: str) -> tuple[Message, ...]:
    """The conversation with a system message that tells the schema, without which a forced model would be at a loss."""
    wish = f"Answer with one JSON value of this schema and nothing else: {schema}"
    if messages and messages[0]["role"] == "system":
        return ({**messages[0], "content": f"{messages[0]['content']}\n\n{wish}"}, *messages[1:])
    return ({"role": "system", "content": wish}, *messages)
