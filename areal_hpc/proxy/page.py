"""The web page of a run: its sessions turn by turn, token by token, and its learning curve; live, or after its end.

    GET /                       the page itself, one file without data, for anybody
    GET /rl/page/overview       sessions and curve, as JSON; needs the admin token, as does
    GET /rl/page/session/ID     one session

Everything that the page shows was written by a model or by its users, so it is set as text, never as markup.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from aiohttp import web

from areal_hpc.proxy.access import is_admin, listening
from areal_hpc.proxy.chronicle import Chronicle, Spelled, summary_of, turns_of
from areal_hpc.proxy.sessions import Session

NEWEST = 300
"""Sessions that the overview lists."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


@dataclass(slots=True, kw_only=True)
class Board:
    """What the page shows.

    Args:
        name: of the run.
        curve: the run's course as JSON data; may read files.
        live: sessions of this process that are not written down yet; None where nothing is served any more.
        spelled: the text of token ids, of a live session.
        discount: reward of a turn that counts for the turn before it.
        worker: whose live sessions these are.
        others: where the pages of the run's other workers are, which show theirs; may read files.
    """

    name: str
    chronicle: Chronicle
    curve: Callable[[], Mapping[str, Any]]
    live: Callable[[], Iterable[Session]] | None = None
    spelled: Spelled | None = None
    discount: float = 1.0
    worker: str = ""
    others: Callable[[], Mapping[str, str]] = dict
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def overview(self) -> dict[str, Any]:
        async with self._reading:  # the chronicle is one thread's at a time
            written, curve, others = await asyncio.to_thread(self._read)
        known = {summary["id"] for summary in written}
        live = [session for session in self._live() if session.id not in known]
        shown = [*written[-NEWEST:], *(self._summary(session) for session in live[-NEWEST:])]
        return {
            "run": self.name,
            "live": self.live is not None,
            "worker": self.worker,
            "others": others,
            "num_sessions": len(written) + len(live),
            "sessions": shown[-NEWEST:][::-1],
            "curve": curve,
        }

    def _read(self) -> tuple[list[dict[str, Any]], Mapping[str, Any], Mapping[str, str]]:
        self.chronicle.poll()
        return self.chronicle.summaries(), self.curve(), self.others()

    def _live(self) -> Iterable[Session]:
        return () if self.live is None else self.live()

    def _summary(self, session: Session) -> dict[str, Any]:
        outcome = "answering" if session.num_open else "open" if session.ended is None else "ended"
        return summary_of(session, {"outcome": outcome, "reason": "", "group": ""}, self.discount)

    async def session(self, session_id: str) -> dict[str, Any] | None:
        """``summary`` and ``turns``, or None where nothing is known of it (any more).

        Spelling a long session takes seconds, so that is done beside the loop that serves the agents.
        """
        found = next((one for one in self._live() if one.id == session_id), None)
        if found is None or self.spelled is None:
            return await asyncio.to_thread(self.chronicle.session, session_id)
        summary = self._summary(found)  # before its turns, so that whoever has missed one sees a newer summary
        return {"summary": summary, "turns": await asyncio.to_thread(turns_of, found, self.spelled, self.discount)}


def page_routes(board: Board, admin_token: str) -> list[web.RouteDef]:
    """The routes of the page, and of its data for whoever has the token."""
    text = files("areal_hpc.proxy").joinpath("page.html").read_text(encoding="utf-8")

    def admit(request: web.Request) -> None:
        if not is_admin(request, admin_token):
            raise web.HTTPUnauthorized(text="this needs the admin token")

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type="text/html", headers=HEADERS)

    async def overview(request: web.Request) -> web.Response:
        admit(request)
        return web.json_response(await board.overview(), headers=HEADERS)

    async def session(request: web.Request) -> web.Response:
        admit(request)
        found = await board.session(request.match_info["id"])
        return web.json_response(found or {"error": "nothing is known of this session"}, status=200 if found else 404)

    return [
        web.get("/", page),
        web.get("/rl/page/overview", overview),
        web.get("/rl/page/session/{id}", session),
    ]


@asynccontextmanager
async def show(board: Board, admin_token: str, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """The page alone, of a run that serves nothing any more, at the URL that this gives."""

    application = web.Application()
    application.add_routes(page_routes(board, admin_token))
    async with listening(application, host, port) as url:
        yield url
