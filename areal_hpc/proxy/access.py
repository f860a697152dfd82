"""Who asks, and where: keys in the headers that clients use, and the address that a service listens at."""

from __future__ import annotations

import hmac
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from areal_hpc.errors import ConfigError


def bearer(request: web.Request) -> str:
    """The key of a request, in either of the headers that clients use."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def is_admin(request: web.Request, token: str) -> bool:
    """Whether a request brings the admin token; where that is empty, none does."""
    return bool(token) and same(bearer(request), token)


def same(given: str, secret: str) -> bool:
    """Whether they are; the time that it takes tells nothing of the secret but its length."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), secret.encode())


BACKLOG = 4096
"""Connections that may wait to be taken, as far as the kernel allows: hundreds of episodes begin at once, and where the
usual 128 wait, the next ones are dropped and tried again seconds later."""
LAST_ANSWERS_S = 0.5
"""How long an end waits for answers that are under way, and again for those that it breaks off: whoever stops a run has
given it seconds. Usually a server waits for two minutes, and somebody who uses an agent may ask at any time."""

UNREAD_S = 600.0
"""How long a client may take nothing of what it was sent, before its connection is dropped: as long as the clients of
OpenAI and Anthropic wait for us. What is held for it meanwhile is a connection, a handler and its answer."""


@asynccontextmanager
async def listening(application: web.Application, host: str, port: int) -> AsyncIterator[str]:
    """An application at its URL, until the context ends; port 0 is one that the kernel chooses.

    What is still being answered then is broken off; so is, after ``UNREAD_S``, what nobody reads.

    Raises:
        ConfigError: somebody else listens there, or it is no address of this machine.
    """
    application.on_response_prepare.append(_drop_unread)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=LAST_ANSWERS_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        except (OSError, OverflowError) as error:  # the latter is of a number that is no port
            raise ConfigError(
                f"cannot listen at host {host}, port {port}: {error}; choose another one (agent.online.port, or --port "
                "of `areal-hpc page`), or 0 for any that is free"
            ) from error
        yield f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _drop_unread(request: web.Request, _: web.StreamResponse) -> None:
    """Have the kernel drop the connection of a client that takes nothing; to us it is then one that went away.

    No limit of ours on a write would do: most answers fit into buffers, and their writes end at once.
    """
    if request.transport is not None:
        connection = request.transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * UNREAD_S))
