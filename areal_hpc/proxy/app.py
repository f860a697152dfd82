"""The HTTP service: the model APIs for agents, and ``/rl`` for sessions and rewards.

    async with serve(Service(sessions=..., dialect=..., ...)) as url:      loopback, a port that the kernel chose
        OPENAI_BASE_URL=url/v1  OPENAI_API_KEY=session.key  python agent.py

    client ── request ──> Call: placed, generated ── deltas ──> client
                            └─ committed ── the last event ──> client        in this order

A stream's status is sent with its first token (or the first comment that keeps it alive), so that an engine that fails
at once is a 503 that clients try again; one that breaks later ends with an error event, and its session is not trained.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from areal_hpc.dialogue.messages import MAX_DEPTH, is_too_deep, refuse_constant
from areal_hpc.json_bytes import from_json, to_json
from areal_hpc.proxy.access import bearer, is_admin, listening, same
from areal_hpc.proxy.anthropic import MESSAGES
from areal_hpc.proxy.calls import Call, Dialect, Forced, placed
from areal_hpc.proxy.chat import CHAT, COMPLETIONS
from areal_hpc.proxy.events import Api, Stream
from areal_hpc.proxy.exports import exported
from areal_hpc.proxy.online import Online
from areal_hpc.proxy.outgoing import Progress, outgoing
from areal_hpc.proxy.page import Board, page_routes
from areal_hpc.proxy.requests import Refused, given, number, own_fault
from areal_hpc.proxy.responses import RESPONSES, input_items, page_of
from areal_hpc.proxy.sessions import Session, Sessions
from areal_hpc.proxy.stored import Stored

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20
BODY_S = 600.0
"""How long the body of a request may be under way."""
GONE = 499
"""Status of what nobody is there to get."""
KEEP_ALIVE_S = 10.0
"""Longest silence of a stream; clients and proxies give up after about 15 s and more."""
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
NOT_HELD = "X-Not-Enforced"
"""Header of an answer: the field of the request that nothing but the model's good will has followed."""
MAX_SAID = 100
APIS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the routes work with.

    Args:
        open_session: opens a session on the run's engines, for whoever holds the admin token.
        admin_token: what ``/rl/start_session`` and ``/rl/export`` ask for. Empty: they are refused to everybody.
        discount: reward of a turn that counts for the turn before it.
    """

    sessions: Sessions
    dialect: Dialect
    model: str
    open_session: Callable[[], Session]
    admin_token: str
    discount: float = 1.0
    online: Online | None = None
    """Makes episodes of what agents in daily use ask; without it, sessions that are opened over HTTP train nothing."""
    board: Board | None = None
    """What the web page shows; None serves none."""
    keep_alive_s: float = KEEP_ALIVE_S

    def session_of(self, key: str) -> Session:
        """Whom a key speaks for. Raises Refused for one that opens nothing."""
        return self.sessions.of_key(key) if self.online is None else self.online.of_key(key)


@asynccontextmanager
async def serve(service: Service, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """The service at the URL that this gives, until the context ends."""
    application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[refusals_in_shape])
    application.add_routes(Routes(service).table())
    async with listening(application, host, port) as url:
        yield url


@web.middleware
async def refusals_in_shape(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    """What the web framework refuses (a path or a method that is not served) in the API's own shape as well, and what
    is an error of ours."""
    try:
        response: web.StreamResponse = await handler(request)
    except web.HTTPClientError as error:
        refused = Refused(error.status, f"{request.method} {request.path}: {error.reason}")
    except Exception as error:
        if isinstance(error, ConnectionError) and (request.transport is None or request.transport.is_closing()):
            return web.Response(status=GONE)  # raised on, it would be an error in the log
        log.exception("%s %s was not answered by an error of our own", request.method, request.path)
        refused = own_fault(error, "ask again")
    else:
        return response
    api = MESSAGES if request.path.startswith("/v1/messages") else CHAT
    return web.json_response(api.refusal(refused), status=refused.status)


class Routes:
    """One method for each kind of route."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._said: set[tuple[str, str]] = set()

    def table(self) -> list[web.RouteDef]:
        asked = [web.post(path, self._asked(api)) for path, api in APIS.items()]
        board = self._service.board
        return [
            *asked,
            *([] if board is None else page_routes(board, self._service.admin_token)),
            web.get("/v1/responses/{id}", self._refusing(RESPONSES, self.stored_response)),
            web.get("/v1/responses/{id}/input_items", self._refusing(RESPONSES, self.input_items)),
            web.delete("/v1/responses/{id}", self._refusing(RESPONSES, self.forget_response)),
            web.post("/v1/messages/count_tokens", self._refusing(MESSAGES, self.count_tokens)),
            web.get("/v1/models", self._refusing(CHAT, self.models)),
            web.get("/health", self._refusing(CHAT, self.health)),
            web.post("/rl/start_session", self._refusing(CHAT, self.start_session)),
            web.post("/rl/start_group", self._refusing(CHAT, self.start_group)),
            web.post("/rl/set_reward", self._refusing(CHAT, self.set_reward)),
            web.post("/rl/end_session", self._refusing(CHAT, self.end_session)),
            web.post("/rl/export", self._refusing(CHAT, self.export)),
        ]

    # -- model APIs

    def _asked(self, api: Api) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._service.session_of(bearer(request))
            ask = api.parse(await _body(request))
            call = Call(session, ask, self._service.dialect)
            self._say(call.forced)
            if ask.stream:
                return await self._streamed(request, api.stream(call), call)
            answer = api.whole(call, await call.run())
            return web.Response(body=to_json(answer), content_type="application/json", headers=_headers(call))

        return self._refusing(api, handle)

    def _say(self, forced: Forced) -> None:
        """In the log, once for each reason, what models are only asked to follow."""
        if forced.not_held and len(self._said) < MAX_SAID and (said := (forced.not_held, forced.why)) not in self._said:
            self._said.add(said)
            log.warning("%s of a request is not enforced, and answers say so (%s): %s", said[0], NOT_HELD, said[1])

    def _refusing(self, api: Api, handle: Callable[[web.Request], Any]) -> Callable[[web.Request], Any]:
        """A handler whose refusals have the API's shape."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                response: web.StreamResponse = await handle(request)
            except Refused as refused:
                headers = {} if refused.retry_after_s is None else {"retry-after": f"{refused.retry_after_s:g}"}
                return web.json_response(api.refusal(refused), status=refused.status, headers=headers)
            return response

        return guarded

    async def _streamed(self, request: web.Request, stream: Stream, call: Call) -> web.StreamResponse:
        progress = Progress()
        running = asyncio.ensure_future(call.run(progress.tell))
        running.add_done_callback(lambda _: progress.end())
        keep_alive_s = self._service.keep_alive_s
        try:
            await progress.wait(asyncio.get_running_loop().time() + keep_alive_s)
            if running.done():
                running.result()  # it may have failed at once
            response = web.StreamResponse(headers={**HEADERS, **_headers(call)})
            await response.prepare(request)
            async with aclosing(outgoing(stream, call, running, progress, keep_alive_s)) as events:
                async for told in events:
                    await response.write(told)
            await response.write_eof()
            return response
        finally:
            running.cancel()
            call.end()  # it may not even have begun to run

    async def stored_response(self, request: web.Request) -> web.Response:
        if request.query.get("stream") == "true":
            raise Refused(400, "a stored response is not streamed again; leave stream out", param="stream")
        _, _, stored = self._stored(request)
        return web.json_response(stored.response)

    async def input_items(self, request: web.Request) -> web.Response:
        _, call, stored = self._stored(request)
        return web.json_response(page_of(input_items(call, stored), request.query))

    async def forget_response(self, request: web.Request) -> web.Response:
        session, call, _ = self._stored(request)
        session.answers.forget(call)
        return web.json_response({"id": request.match_info["id"], "object": "response", "deleted": True})

    def _stored(self, request: web.Request) -> tuple[Session, str, Stored]:
        """The answer that the path names: its session, its call, and what is kept of it."""
        response_id = request.match_info["id"]
        session = self._asked_in(bearer(request), response_id)
        call = session.call_of(response_id)
        stored = session.answers.find(call)
        if stored is None or stored.response["id"] != response_id:
            raise Refused(404, f"Response with id '{response_id}' not found.", param="response_id")
        return session, call, stored

    async def count_tokens(self, request: web.Request) -> web.Response:
        session = self._service.session_of(bearer(request))
        place = placed(session, MESSAGES.parse(await _body(request)), self._service.dialect)
        return web.json_response({"input_tokens": len(place.context)})

    async def models(self, _: web.Request) -> web.Response:
        model = {"id": self._service.model, "object": "model", "created": 0, "owned_by": "areal-hpc"}
        return web.json_response({"object": "list", "data": [model]})

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "sessions": len(self._service.sessions)})

    # -- sessions

    async def start_session(self, request: web.Request) -> web.Response:
        """A new episode; of the ``api_key`` in the body (admin), or of the key that asks, which ends its last one."""
        key = given(await _body(request), "api_key", str, "")
        if self._service.online is None:
            self._admit(request)
            session = self._service.open_session()
        elif self._is_admin(request):
            session = self._service.online.begin(key or None)
        else:
            session = self._service.online.begin(bearer(request))
        return web.json_response({"session_id": session.id, "api_key": session.key})

    async def start_group(self, request: web.Request) -> web.Response:
        """Sessions for ``size`` attempts at one task, which are compared with each other."""
        self._admit(request)
        if self._service.online is None:
            raise Refused(400, "groups over HTTP need `agent.online.enabled`; here the run makes its groups itself")
        body = await _body(request)
        size = given(body, "size", int, 0)
        group_id, sessions = self._service.online.begin_group(size, given(body, "metadata", dict, {}))
        told = [{"session_id": session.id, "api_key": session.key} for session in sessions]
        return web.json_response({"group_id": group_id, "sessions": told})

    async def set_reward(self, request: web.Request) -> web.Response:
        """Reward an interaction, or the episode; also one that has ended, until it is taken for training."""
        body = await _body(request)
        reward, call = number(body, "reward"), given(body, "interaction_id", str, "")
        session = self._rewarded(request, given(body, "session_id", str, ""), call)
        if reward is None:
            raise Refused(400, "reward is missing", param="reward")
        session.reward(reward, call)
        return web.json_response({"message": "success"})

    def _rewarded(self, request: web.Request, session_id: str, call: str) -> Session:
        """The session that is meant: named, else the interaction's, else the one that the key speaks for now."""
        key = bearer(request)
        if not session_id:
            return self._asked_in(key, call)
        session = self._service.sessions.of_id(session_id)
        if not same(key, session.key):
            self._admit(request)
        return session

    def _asked_in(self, key: str, call: str) -> Session:
        """The session of an interaction: of all that a key has spoken for, since a standing one speaks for many."""
        session = self._service.sessions.of_key(key)
        earlier = (one for one in self._service.sessions if one.id in call and same(key, one.key))
        return session if session.id in call else next(earlier, session)

    async def end_session(self, request: web.Request) -> web.Response:
        session = self._service.sessions.of_key(bearer(request))
        session.close()
        return web.json_response({"message": "success", "interaction_count": len(session.transcript.turns)})

    async def export(self, request: web.Request) -> web.Response:
        self._admit(request)
        body = await _body(request)
        session = self._service.sessions.of_id(given(body, "session_id", str, ""))
        discount = number(body, "discount", self._service.discount)
        if discount is None or not 0.0 <= discount <= 1.0:
            raise Refused(400, "discount must be in [0, 1]", param="discount")
        answer = exported(session, discount)
        self._service.sessions.close(session)
        return web.json_response(answer)

    def _admit(self, request: web.Request) -> None:
        if not self._is_admin(request):
            raise Refused(401, "this needs the admin token", code="invalid_api_key")

    def _is_admin(self, request: web.Request) -> bool:
        return is_admin(request, self._service.admin_token)


def _headers(call: Call) -> dict[str, str]:
    """Says which field of the request the model was only asked to follow."""
    return {NOT_HELD: call.forced.not_held} if call.forced.not_held else {}


async def _body(request: web.Request) -> Mapping[str, Any]:
    try:
        body = from_json(await _read(request) or b"{}", constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    if is_too_deep(body):
        raise Refused(400, f"the body is nested in more than {MAX_DEPTH} levels; send flatter JSON")
    return body


async def _read(request: web.Request) -> bytes:
    """The bytes of a request's body. Raises Refused for one that is too large, damaged, or does not come to an end."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise Refused(413, f"the body is larger than {MAX_BODY_BYTES} bytes; send less") from error
    except web.RequestPayloadError as error:
        why = " ".join(str(error).split())
        raise Refused(400, f"the body cannot be read ({why}); send it encoded as its headers say") from error
    except TimeoutError as error:
        raise Refused(408, f"the body did not come to its end in {BODY_S:g} s; send it whole") from error
