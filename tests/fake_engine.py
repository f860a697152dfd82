"""A server with SGLang's surface and no model: it samples by a formula, truly joins groups, and fails on command.

Token t of an answer is ``expected_token(sum of all tokens before it)``, so an answer that was interrupted and continued
must equal one that was not. Run in this process (``running``) or in one of its own that can be killed (``spawned``).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from aiohttp import web

TOKEN = "a-token-that-must-not-leak"


def expected_token(before: int) -> int:
    return (before * 7 + 3) % 251


def expected_tokens(prompt: list[int] | tuple[int, ...], num: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(num):
        tokens.append(expected_token(sum(prompt) + sum(tokens)))
    return tokens


@dataclass
class Run:
    body: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    aborted: bool = False


@dataclass
class FakeEngine:
    """``faults``: for a path, what happens to its next calls: a status, "drop", "hang", "die", or None for nothing."""

    info: dict[str, Any] = field(default_factory=lambda: {"version": "0.5.21"})
    sessions: bool = True  # /begin_weight_update exists and is asked for
    spans: bool = True
    deaf_to_abort: bool = False
    version: str = "default"
    token_s: float = 0.0
    interrupt_at: list[int] = field(default_factory=list)  # abort the next answers after so many tokens
    spoil: Callable[[dict[str, Any]], Any] = lambda answer: answer
    faults: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    calls: list[tuple[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: list[asyncio.BaseTransport] = field(default_factory=list)  # the one that each call came on
    frozen: bool = False
    mode: str = ""
    begun: bool = False
    runs: dict[str, Run] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def bodies(self, path: str) -> list[Any]:
        return [body for called, body in self.calls if called == path]

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self.fail_on_command], client_max_size=1 << 28)
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/pause_generation", self.pause),
                web.post("/continue_generation", self.go_on),
                web.post("/abort_request", self.abort),
                web.post("/init_weights_update_group", self.join),
                web.post("/destroy_weights_update_group", self.leave),
                web.post("/update_weights_from_distributed", self.load_bucket),
                web.post("/update_weights_from_disk", self.load_directory),
                web.post("/update_weight_version", self.name_version),
                web.post("/flush_cache", self.flush),
                web.get("/health", self.health),
                web.get("/server_info", self.server_info),
                web.get("/model_info", self.model_info),
                web.get("/loaded", self.show_loaded),
                web.post("/faults", self.take_faults),
            ]
        )
        if self.sessions:
            app.add_routes([web.post("/begin_weight_update", self.begin), web.post("/end_weight_update", self.end)])
        return app

    @web.middleware
    async def fail_on_command(self, request: web.Request, handler: Any) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.path, body))
        self.headers.append(dict(request.headers))
        assert request.transport is not None
        self.connections.append(request.transport)
        fault = self.faults[request.path].pop(0) if self.faults.get(request.path) else None
        if fault == "die":
            os._exit(1)
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "drop":
            request.transport.abort()
        if isinstance(fault, int):
            return web.json_response({"success": False, "message": f"told to fail with {fault}"}, status=fault)
        return await handler(request)  # type: ignore[no-any-return]

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        while self.frozen:  # what comes during a pause waits at the door, as in SGLang
            await asyncio.sleep(0.001)
        run = self.runs[body["rid"]] = Run(body)
        stop_at = self.interrupt_at.pop(0) if self.interrupt_at else None
        before = sum(body["input_ids"])
        budget = body["sampling_params"]["max_new_tokens"]
        while len(run.tokens) < budget and not run.aborted:
            if len(run.tokens) == stop_at:
                run.aborted = True
                break
            await asyncio.sleep(self.token_s)
            if self.frozen or run.aborted:
                continue
            run.tokens.append(expected_token(before))
            run.versions.append(self.version)
            before += run.tokens[-1]
        del self.runs[body["rid"]]
        return web.json_response(self.spoil(self.answer(run)))

    def answer(self, run: Run) -> dict[str, Any]:
        spans: list[dict[str, Any]] = []
        for position, version in enumerate(run.versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": position, "end": position})
            spans[-1]["end"] = position + 1
        meta: dict[str, Any] = {
            "finish_reason": {"type": "abort", "message": "told to"} if run.aborted else {"type": "length"},
            "output_token_logprobs": [[-token / 256, token, None] for token in run.tokens],
            "weight_version": self.version,
        }
        if self.spans:
            meta["weight_versions"] = spans
        if run.body.get("return_sampling_mask"):
            meta["output_token_sampling_logprobs"] = [-token / 512 for token in run.tokens]
        return {"text": "x" * len(run.tokens), "output_ids": run.tokens, "meta_info": meta}

    async def pause(self, request: web.Request) -> web.Response:
        self.frozen = True
        self.mode = (await request.json())["mode"]
        if self.mode == "abort":
            self.end_all()
        return web.json_response({"status": "ok"})

    def end_all(self) -> None:
        for run in self.runs.values():
            run.aborted = not self.deaf_to_abort

    async def go_on(self, _: web.Request) -> web.Response:
        self.frozen = False
        return web.json_response({"status": "ok"})

    async def abort(self, request: web.Request) -> web.Response:
        run = self.runs.get((await request.json())["rid"])
        if run is not None and not self.deaf_to_abort:
            run.aborted = True
        return web.Response()

    async def join(self, request: web.Request) -> web.Response:
        from areal_hpc.collective import join_group
        from areal_hpc.transfer import GroupAddress

        body = await request.json()
        address = GroupAddress(
            host=body["master_address"],
            port=body["master_port"],
            name=body["group_name"],
            world_size=body["world_size"],
            backend=body["backend"],
        )
        self.groups[address.name] = await asyncio.to_thread(join_group, address, body["rank_offset"], 60.0)
        return web.json_response({"success": True})

    async def leave(self, request: web.Request) -> web.Response:
        from areal_hpc.collective import leave_group

        name = (await request.json())["group_name"]
        if name not in self.groups:
            return web.json_response({"success": False, "message": "no such group"}, status=400)
        leave_group(self.groups.pop(name))
        return web.json_response({"success": True})

    async def begin(self, _: web.Request) -> web.Response:
        status = 400 if self.begun else 200
        self.begun = True
        return web.json_response({"success": status == 200}, status=status)

    async def end(self, _: web.Request) -> web.Response:
        status = 200 if self.begun else 400
        self.begun = False
        return web.json_response({"success": status == 200}, status=status)

    async def load_bucket(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["group_name"] not in self.groups:  # a client test without a group
            return web.json_response({"success": True})

        import torch
        import torch.distributed as dist

        from areal_hpc.buckets import num_bytes, unpack
        from areal_hpc.errors import WeightUpdateError
        from areal_hpc.transfer import TensorSpec

        if self.sessions and not self.begun:
            return web.json_response({"success": False, "message": "no session"}, status=400)
        rows = zip(body["names"], body["dtypes"], body["shapes"], body["checksums"], strict=True)
        specs = [TensorSpec(name=n, dtype=d, shape=tuple(s), checksum=c) for n, d, s, c in rows]
        buffer = torch.empty(sum(num_bytes(spec) for spec in specs), dtype=torch.uint8)
        try:
            if self.faults.get("receiving"):
                asyncio.get_running_loop().call_later(self.faults["receiving"].pop(), os._exit, 1)
                await asyncio.to_thread(dist.broadcast, buffer, group=self.groups[body["group_name"]], group_src=0)
                await asyncio.sleep(3600)
            await asyncio.to_thread(dist.broadcast, buffer, group=self.groups[body["group_name"]], group_src=0)
            if self.faults.get("received"):
                buffer[self.faults["received"].pop()] ^= 1
            self.loaded.update({s.name: s.checksum for s in specs if unpack(buffer, specs)})
        except (RuntimeError, WeightUpdateError) as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True})

    async def load_directory(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def name_version(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("abort_all_requests", True):
            self.end_all()
        self.version = body["new_version"]
        return web.json_response({"success": True, "new_version": self.version})

    async def flush(self, _: web.Request) -> web.Response:
        pending = bool(self.runs) and not (self.frozen and self.mode == "retract")
        return web.Response(status=400 if pending else 200, text="pending" if pending else "flushed")

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def server_info(self, _: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def show_loaded(self, _: web.Request) -> web.Response:
        joined = [body["group_name"] for body in self.bodies("/init_weights_update_group")]
        told = {"loaded": self.loaded, "frozen": self.frozen, "version": self.version, "joined": joined}
        return web.json_response(told)

    async def take_faults(self, request: web.Request) -> web.Response:
        self.faults.update(await request.json())
        return web.Response()


@asynccontextmanager
async def running(engine: FakeEngine, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serve ``engine`` in this process; yields its URL."""
    runner = web.AppRunner(engine.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _serve(pipe: Connection) -> None:
    import torch.distributed  # noqa: F401 (now, not inside the first join, where it would count against a limit)

    async def forever() -> None:
        async with running(FakeEngine(info={"version": "0.5.21", "areal_hpc": {"checksums": True}})) as url:
            pipe.send(url)
            await asyncio.sleep(3600)

    asyncio.run(forever())


@contextmanager
def spawned(num: int) -> Iterator[list[tuple[str, multiprocessing.process.BaseProcess]]]:
    """``num`` engines, each in a process of its own: their URLs and processes."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(num)]
    processes = [spawn.Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in pipes]
    for process in processes:
        process.start()
    try:
        for ours, _ in pipes:
            assert ours.poll(120)
        yield [(ours.recv(), process) for (ours, _), process in zip(pipes, processes, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.join()
