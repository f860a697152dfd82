"""What every route needs of HTTP: a JSON object in, SGLang's answer shapes out, our errors as statuses."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from areal_hpc.errors import DataError, GenerationError, WeightUpdateError
from areal_hpc.generation.served.request import LARGEST, Quarantined

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
"""Headers of an answer that comes as server-sent events."""
DONE = b"data: [DONE]\n\n"
"""The last of them."""


async def read_body(request: web.Request) -> Mapping[str, Any]:
    """The JSON object of a request; no body is an empty one. Raises DataError for anything else."""
    try:
        raw = await request.read()
        body = json.loads(raw) if raw else {}
    except (ValueError, RecursionError, web.RequestPayloadError) as error:  # the last: it is compressed, and damaged
        raise DataError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise DataError("the body must be a JSON object")
    return body


def need(body: Mapping[str, Any], *names: str) -> list[Any]:
    """The values of fields that must be there. Raises DataError naming those that are not."""
    absent = [name for name in names if body.get(name) is None]
    if absent:
        raise DataError(f"fields {absent} are missing")
    return [body[name] for name in names]


def _value(body: Mapping[str, Any], name: str, default: Any) -> Any:
    if body.get(name) is None and default is not None:
        return default
    return need(body, name)[0]


def text_field(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """A text that other programs can be told. Raises DataError where it is none, or is absent and has no default."""
    value = _value(body, name, default)
    if not isinstance(value, str) or "\0" in value:
        raise DataError(f"{name} must be a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{name} has half a character: {error}") from error
    return value


def number_field(
    body: Mapping[str, Any], name: str, least: int, most: int = LARGEST, default: int | None = None
) -> int:
    """An integer in [least, most]. Raises DataError where it is none, or is absent and has no default."""
    value = _value(body, name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise DataError(f"{name} must be an integer in [{least}, {most}]")
    return value


def list_field(body: Mapping[str, Any], name: str, fits: Callable[[Any], bool], kind: str) -> list[Any]:
    """A list whose entries are of that ``kind``. Raises DataError where it is none, or is absent."""
    [value] = need(body, name)
    if not isinstance(value, list) or not all(map(fits, value)):
        raise DataError(f"{name} must be a list of {kind}")
    return value


def outcome(success: bool, message: str, **more: Any) -> web.Response:
    """The answer of an administrative route."""
    return web.json_response({"success": success, "message": message, **more}, status=200 if success else 400)


def refusal(message: str, status: int) -> web.Response:
    """The answer to a request that is not served; readable as either of SGLang's failure shapes."""
    return web.json_response({"error": {"message": message}, "success": False, "message": message}, status=status)


def guard(token: str) -> Any:
    """Middleware: 401 unless the request brings ``token``; an empty token guards nothing."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if token and not hmac.compare_digest(given, expected):
            return refusal("the bearer token is missing or wrong", 401)
        return await handler(request)

    return check


@web.middleware
async def errors_as_answers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware: which status each of our errors has; any other exception is aiohttp's 500."""
    try:
        return await handler(request)
    except DataError as error:
        return refusal(str(error), 400)
    except WeightUpdateError as error:
        return outcome(False, str(error))
    except Quarantined as error:
        return refusal(str(error), 503)
    except GenerationError as error:
        return refusal(str(error), 500)
