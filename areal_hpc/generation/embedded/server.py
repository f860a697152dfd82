"""SGLang's native HTTP surface in front of the embedded engine.

    url, runner = await start_server(engine, token=token)      loopback, a port that the kernel chose
    ...
    await runner.cleanup(); engine.close()

Answers have SGLang's shapes: ``{success, message}`` with 200 or 400 for weights, ``{error: {message}}`` for a refused
``/generate``. Ours besides: ``checksums`` and ``nums_changed`` in ``/update_weights_from_distributed``, and 503 while
quarantined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from aiohttp import web

from areal_hpc.collective import bracketed
from areal_hpc.errors import DataError
from areal_hpc.generation.embedded.engine import EmbeddedEngine
from areal_hpc.generation.embedded.scheduler import PAUSE, QUARANTINE
from areal_hpc.generation.embedded.sequence import Sequence
from areal_hpc.generation.embedded.stream import Stream
from areal_hpc.generation.embedded.wire import answer
from areal_hpc.generation.served.exchange import EVENTS, errors_as_answers, guard, read_body, text_field
from areal_hpc.generation.served.request import SamplingParams, parse_generate
from areal_hpc.generation.served.weight_routes import ParameterRoutes, WeightRoutes

VERSION = "areal-embedded"
MAX_BODY_BYTES = 256 * 2**20
PROBE_LIMIT_S = 10.0
PAUSE_MODES = ("abort", "in_place", "retract")
LAST_ANSWERS_S = 0.5
"""How long the end waits for requests that run, and again for those that it breaks off; by default a minute each."""

T = TypeVar("T")


async def start_server(engine: EmbeddedEngine, *, host: str = "127.0.0.1", token: str) -> tuple[str, web.AppRunner]:
    """Serve a started engine; returns its URL and the runner whose ``cleanup()`` ends it.

    Args:
        token: what every request must bring as ``Authorization: Bearer``; empty asks for nothing.
    """
    application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[guard(token), errors_as_answers])
    application.add_routes([*EngineRoutes(engine).table(), *_weight_routes(engine)])
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=LAST_ANSWERS_S)
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    port = runner.addresses[0][1]
    return f"http://{bracketed(host)}:{port}", runner


def _weight_routes(engine: EmbeddedEngine) -> list[web.RouteDef]:
    return [*WeightRoutes(engine.updates).table(), *ParameterRoutes(engine.updates).table()]


class EngineRoutes:
    """Generation and state; one method for each route."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler

    def table(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self.generate),
            web.post("/pause_generation", self.pause),
            web.post("/continue_generation", self.resume),
            web.post("/abort_request", self.abort),
            web.get("/flush_cache", self.flush_cache),
            web.post("/flush_cache", self.flush_cache),
            web.get("/health", self.health),
            web.get("/health_generate", self.health_generate),
            web.get("/model_info", self.model_info),
            web.get("/get_model_info", self.model_info),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
            web.get("/v1/models", self.models),
        ]

    async def _call(self, action: Callable[[], T]) -> T:
        """Run ``action`` in the engine's thread."""
        return await asyncio.wrap_future(self._scheduler.call(action))

    # -- generation

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = parse_generate(await read_body(request), self._engine.text)
        sequences = [
            sequence
            for prompt, request_id, params in zip(asked.prompts, asked.request_ids, asked.params, strict=True)
            for sequence in self._engine.sequences(
                prompt,
                params,
                request_id=request_id,
                logprob_start=asked.logprob_start,
                num_top=asked.num_top,
                priority=asked.priority,
            )
        ]
        stream = Stream(sequences, asked, self._engine.text) if asked.stream else None
        try:
            await self._call(lambda: self._scheduler.submit(sequences))
            if stream is not None:
                return await _send(request, stream)
            await asyncio.gather(*(asyncio.wrap_future(sequence.done) for sequence in sequences))
        finally:
            self._drop(sequences)
        answers = [answer(sequence, asked, self._engine.text) for sequence in sequences]
        return web.json_response(answers[0] if asked.single else answers)

    def _drop(self, sequences: list[Sequence]) -> None:
        """End what still runs for a client that hung up, or beside a sequence that failed."""
        left = [sequence for sequence in sequences if not sequence.done.done()]
        if left and self._scheduler.alive:
            self._scheduler.call(lambda: self._scheduler.drop(left))

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await read_body(request)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise DataError(f"mode {mode!r} is not known; use one of {', '.join(PAUSE_MODES)}")
        await self._call(lambda: self._scheduler.pause(mode))
        return web.json_response({"message": f"Generation paused ({mode}).", "status": "ok"})

    async def resume(self, _: web.Request) -> web.Response:
        await self._call(lambda: self._scheduler.holds.discard(PAUSE))
        return web.json_response({"message": "Generation continued.", "status": "ok"})

    async def abort(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        request_id = None if body.get("abort_all") else text_field(body, "rid")
        await self._call(lambda: self._scheduler.abort(request_id))
        return web.Response()

    async def flush_cache(self, _: web.Request) -> web.Response:
        """Nothing outlives its sequence here, so the cache is empty when nothing runs; waiting ones hold none."""
        num_running = (await self._call(self._scheduler.stats))["num_running"]
        if num_running:
            return web.Response(status=400, text=f"Cache not flushed: {num_running} requests are running.\n")
        return web.Response(text="Cache flushed.\n")

    # -- state

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._scheduler.alive else 503)

    async def health_generate(self, _: web.Request) -> web.Response:
        """Whether one token comes within the limit; an engine that is held, for whatever reason, cannot give it."""
        if not self._scheduler.alive or self._scheduler.holds:
            return web.Response(status=503)
        probe = self._engine.sequences([0], SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True))
        await self._call(lambda: self._scheduler.submit(probe))
        try:
            await asyncio.wait_for(asyncio.wrap_future(probe[0].done), PROBE_LIMIT_S)
        except TimeoutError:
            return web.Response(status=503)
        finally:
            self._drop(probe)
        return web.Response()

    async def model_info(self, _: web.Request) -> web.Response:
        path = str(self._engine.model_path)
        info: dict[str, Any] = {
            "model_path": path,
            "served_model_name": path,
            "tokenizer_path": path if self._engine.text else None,
            "is_generation": True,
            "weight_version": self._scheduler.version,
            "load_format": "auto",
        }
        return web.json_response(info)

    async def server_info(self, _: web.Request) -> web.Response:
        stats = self._scheduler.stats()
        info = {
            "version": VERSION,
            "areal_hpc": {"checksums": True, "deltas": True, "stages": True, "priorities": True},
            "model_path": str(self._engine.model_path),
            "dtype": self._engine.dtype,
            "max_running_requests": self._engine.max_running,
            "context_length": self._engine.max_tokens,
            "weight_version": self._scheduler.version,
            "updating": self._engine.updates.is_open,
            "quarantined": QUARANTINE in self._scheduler.holds,
            **stats,
            "internal_states": [stats],
        }
        return web.json_response(info)

    async def models(self, _: web.Request) -> web.Response:
        path, context = str(self._engine.model_path), self._engine.max_tokens
        model = {"id": path, "object": "model", "owned_by": VERSION, "max_model_len": context}
        return web.json_response({"object": "list", "data": [model]})


async def _send(request: web.Request, stream: Stream) -> web.StreamResponse:
    response = web.StreamResponse(headers=EVENTS)
    await response.prepare(request)
    async for event in stream:
        await response.write(event)
    return response
