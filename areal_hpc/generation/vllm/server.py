"""SGLang's native HTTP surface in front of vLLM: a program, started by ``external/launch.py``.

    arguments   {"host": ..., "port": ..., "key": ..., "version": ..., ...}   ours, one JSON object
                --model ... --max-model-len ...                                                   vLLM's own

It ends when vLLM's engine has died, hangs in a weight update or is too slow for it, and on SIGINT. Answers have the
shapes of the embedded engine's server.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from aiohttp import web
from vllm import __version__ as vllm_version

from areal_hpc.collective import unbracketed
from areal_hpc.errors import DataError, GenerationError
from areal_hpc.exits import EXIT_USER_ERROR
from areal_hpc.generation.external.launch import UNFIT
from areal_hpc.generation.served.exchange import (
    DONE,
    EVENTS,
    errors_as_answers,
    guard,
    read_body,
    refusal,
    text_field,
)
from areal_hpc.generation.served.request import GenerateRequest, SamplingParams, parse_generate
from areal_hpc.generation.served.weight_routes import WeightRoutes
from areal_hpc.generation.vllm.engine import Progress, VllmEngine
from areal_hpc.generation.vllm.updates import WeightUpdates

VERSION = "areal-vllm"
MAX_BODY_BYTES = 256 * 2**20
PAUSE_MODE = "retract"
POLL_S = 0.5
PROBE_LIMIT_S = 10.0
LAST_ANSWERS_S = 0.5
CAPABILITIES = {"checksums": True, "stages": True, "retracts": True, "priorities": True}


class EngineRoutes:
    """Generation and state; one method for each route."""

    def __init__(self, engine: VllmEngine, updates: WeightUpdates) -> None:
        self._engine, self._updates = engine, updates

    def table(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self.generate),
            web.post("/pause_generation", self.pause),
            web.post("/continue_generation", self.resume),
            web.post("/abort_request", self.abort),
            web.post("/flush_cache", self.flush_cache),
            web.get("/health", self.health),
            web.get("/health_generate", self.health_generate),
            web.get("/model_info", self.model_info),
            web.get("/server_info", self.server_info),
        ]

    # -- generation

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = parse_generate(await read_body(request), None)
        if self._engine.quarantined:  # looked at when the body is there: nothing is waited for from here on
            return refusal(f"the engine is quarantined: {self._engine.quarantined}", 503)
        if not asked.single:
            raise DataError("one prompt a request, please")
        if asked.logprob_start is not None:
            raise DataError("log-probs of prompts are not served here")
        if asked.stream:
            return await self._streamed(request, asked)
        async for progress in self._sampled(asked):
            last = progress
        return web.json_response(self._told(last))

    def _sampled(self, asked: GenerateRequest) -> AsyncGenerator[Progress]:
        return self._engine.generate(
            asked.prompts[0],
            asked.params[0],
            asked.request_ids[0],
            priority=asked.priority,
            num_top=asked.num_top,
        )

    def _told(self, progress: Progress) -> dict[str, Any]:
        return progress.answer(self._engine.version, self._engine.text)

    async def _streamed(self, request: web.Request, asked: GenerateRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers=EVENTS)
        async with aclosing(self._sampled(asked)) as sampled:
            progress = await anext(sampled)  # what is refused is refused before the answer begins
            await response.prepare(request)
            await _send(response, self._told(progress))
            async for progress in sampled:
                await _send(response, self._told(progress))
        await response.write(DONE)
        return response

    async def pause(self, request: web.Request) -> web.Response:
        if (mode := (await read_body(request)).get("mode", "abort")) != PAUSE_MODE:
            raise DataError(f"mode {mode!r} is not served here; use {PAUSE_MODE}")
        await self._engine.pause()
        return web.json_response({"message": f"Generation paused ({mode}).", "status": "ok"})

    async def resume(self, _: web.Request) -> web.Response:
        if self._engine.quarantined:
            return refusal(f"the engine is quarantined: {self._engine.quarantined}", 400)
        await self._engine.resume()
        return web.json_response({"message": "Generation continued.", "status": "ok"})

    async def abort(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        await self._engine.abort(None if body.get("abort_all") else text_field(body, "rid"))
        return web.Response()

    async def flush_cache(self, _: web.Request) -> web.Response:
        if await self._engine.forget_cache():
            return web.Response(text="Cache flushed.\n")
        return web.Response(status=400, text="Cache not flushed: requests are running.\n")

    # -- state

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.alive() else 503)

    async def health_generate(self, _: web.Request) -> web.Response:
        """Whether one token comes within the limit."""
        if not self._engine.alive() or self._engine.paused:
            return web.Response(status=503)
        one = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        try:
            async with asyncio.timeout(PROBE_LIMIT_S), aclosing(self._engine.generate((0,), one)) as sampled:
                async for _progress in sampled:
                    pass
        except (TimeoutError, GenerationError):
            return web.Response(status=503)
        return web.Response()

    async def model_info(self, _: web.Request) -> web.Response:
        path = str(self._engine.model_path)
        return web.json_response({"model_path": path, "weight_version": self._engine.version})

    async def server_info(self, _: web.Request) -> web.Response:
        info = {
            "version": VERSION,
            "vllm": vllm_version,
            "areal_hpc": CAPABILITIES | {"deltas": self._updates.keeps},
            "model_path": str(self._engine.model_path),
            "context_length": self._engine.max_tokens,
            "weight_version": self._engine.version,
            "updating": self._updates.is_open,
            "paused": self._engine.paused,
            "loaded": self._updates.how_far(),
            "quarantined": bool(self._engine.quarantined),
            **self._engine.load(),
        }
        return web.json_response(info)


async def _send(response: web.StreamResponse, event: Mapping[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def serve(engine: VllmEngine, ours: Mapping[str, Any]) -> None:
    """Answer requests until the engine has died."""
    await engine.start()
    updates = WeightUpdates(
        engine,
        asyncio.get_running_loop(),
        timeout_s=ours["update_timeout_s"],
        keeps=ours["keeps_weights"],
        adapters=ours["adapters"],
    )
    application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[guard(ours["key"]), errors_as_answers])
    application.add_routes([*EngineRoutes(engine, updates).table(), *WeightRoutes(updates).table()])
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=LAST_ANSWERS_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, unbracketed(ours["host"]), ours["port"], reuse_address=True).start()
        while engine.alive():  # noqa: ASYNC110  vLLM tells it to nobody
            await asyncio.sleep(POLL_S)
    finally:
        await runner.cleanup()


def main() -> None:
    ours = json.loads(sys.argv[1])

    async def run() -> None:
        engine = VllmEngine(sys.argv[2:], ours["version"])
        try:
            await serve(engine, ours)
        finally:
            engine.close()
        if engine.unfit:
            print(f"{UNFIT}{engine.unfit}", file=sys.stderr)
            sys.exit(EXIT_USER_ERROR)
        sys.exit(engine.hangs or "vLLM's engine has died; see above")

    try:
        asyncio.run(run())
    except KeyboardInterrupt:  # how it is ended in order
        print("vLLM's server ends")


if __name__ == "__main__":
    main()
