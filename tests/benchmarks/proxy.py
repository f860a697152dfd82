"""What the agent service costs: added latency, many streams at once, memory over many sessions.

    PYTHONPATH=.:tests:tests/benchmarks python tests/benchmarks/proxy.py [--litellm PYTHON] [--sessions 10000]

    direct     client ──────────────────────────────> engine       OpenAI's chat completions, no log-probs
    bare       client ──> aiohttp ───────────────────> engine      passes requests and answers on, unread
    service    client ──> service ──> engine client ──> engine     session, template, log-probs, versions, commit
    litellm    client ──> LiteLLM's proxy ───────────> engine      where PYTHON has ``litellm[proxy]`` installed

The engine is a stub that answers at once, the same process for all, and every party is a process of its own. The ways
take turns, request by request, so that whatever else the machine does meets all of them; LiteLLM takes its turns with
the direct way after the others, since it works on after its answers, when others are being measured. What a way adds is
the difference of its median to the direct one's. Writes ``proxy.json`` and ``proxy.png`` and prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson
from aiohttp import web
from dialogues import make_dialogue, said
from machine import describe

from areal_hpc.config.schema import ToolFormatName
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.generation.client import EngineClient
from areal_hpc.proxy.access import listening
from areal_hpc.proxy.app import Service, serve
from areal_hpc.proxy.sessions import Limits, Session, Sessions
from areal_hpc.roles.wiring.agents import make_dialect
from areal_hpc.types import Sampling

ADMIN = "admin"
ANSWER = "The answer is forty-two, as ever."
PROMPTS = {"short": "What is six times seven?", "long": "What is six times seven? " * 80}
"""About 60 and 2,050 tokens, a byte each; each request is numbered, so that nobody knows its text from before."""
NUMBERS = itertools.count(10_000)
WARM_UP, STREAMS, STREAMED_TOKEN_S = 20, 500, 0.01
START_LIMIT_S = 180.0
BATCH = 50
"""Sessions at once where memory is measured, and between two readings of it a twentieth of all."""
JSON = {"Content-Type": "application/json"}
LITELLM_KEY = "sk-" + secrets.token_hex(16)
"""Without one it does not start; requests bring it, as they bring a key to ours."""
LITELLM = """
import socket, sys, uvicorn
from litellm.proxy.proxy_server import app
listening = socket.create_server(("127.0.0.1", 0))
print("port", listening.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
"""


class Way(NamedTuple):
    """Where requests go, by whom they are signed."""

    url: str
    key: str


# -- the engine


class Engine:
    """Answers at once, to our client as SGLang does and to others as OpenAI does; streams a token each 10 ms."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = list(token_ids)
        self._whole = json.dumps(self._answer(len(token_ids))).encode()

    def application(self) -> web.Application:
        application = web.Application(client_max_size=1 << 26)
        application.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/v1/chat/completions", self.chat),
                web.get("/server_info", lambda _: _json({"version": "0.5.21"})),
                web.get("/model_info", lambda _: _json({"weight_version": "7"})),
                web.get("/health", lambda _: _json({})),
            ]
        )
        return application

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if not orjson.loads(await request.read())["stream"]:
            return web.Response(body=self._whole, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(1, len(self._token_ids) + 1):
            await asyncio.sleep(STREAMED_TOKEN_S)
            await response.write(b"data: " + json.dumps(self._answer(number)).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _answer(self, number: int) -> dict[str, Any]:
        ids = self._token_ids[:number]
        whole = number == len(self._token_ids)
        meta = {
            "finish_reason": {"type": "stop"} if whole else None,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_version": "7",
            "weight_versions": [{"version": "7", "start": 0, "end": number}],
        }
        return {"text": ANSWER, "output_ids": ids, "meta_info": meta}

    async def chat(self, request: web.Request) -> web.Response:
        await request.json()
        message = {"role": "assistant", "content": ANSWER}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": "policy"}
        return await _json({**head, "choices": [choice], "usage": usage})


async def _json(answer: Any) -> web.Response:
    return web.json_response(answer)


@asynccontextmanager
async def engine(token_ids: Sequence[int]) -> AsyncIterator[str]:
    runner = web.AppRunner(Engine(token_ids).application(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


# -- what stands before it


@asynccontextmanager
async def bare(engine_url: str) -> AsyncIterator[str]:
    """The least that a proxy in this framework can do."""
    http = connected()

    async def passed_on(request: web.Request) -> web.Response:
        async with http.post(engine_url + request.path, data=await request.read(), headers=JSON) as answer:
            return web.Response(body=await answer.read(), content_type="application/json")

    application = web.Application()
    application.add_routes([web.post("/v1/chat/completions", passed_on)])
    async with http, listening(application, "127.0.0.1", 0) as url:
        yield url


@asynccontextmanager
async def service(model: str, engine_url: str) -> AsyncIterator[str]:
    """As a rollout worker has it."""
    dialogue = ChatRenderer(model)
    sessions = Sessions(dialogue, idle_s=3600.0)
    generator = EngineClient("stub", engine_url)

    def open_session() -> Session:
        sampling = Sampling(max_new_tokens=512)
        limits = Limits(max_turns=1 << 16)
        return sessions.open(generator=generator, sampling=sampling, max_tokens=1 << 16, limits=limits)

    dialect = make_dialect(dialogue, ToolFormatName.AUTO)
    made = Service(sessions=sessions, dialect=dialect, model="policy", open_session=open_session, admin_token=ADMIN)
    async with serve(made) as url:
        yield url
    await generator.close()


def _host(pipe: Connection, kind: str, *arguments: Any) -> None:
    """A process that says its URL and serves until the other end of the pipe is closed."""

    async def hosted() -> None:
        async with {"engine": engine, "bare": bare, "service": service}[kind](*arguments) as url:
            pipe.send(url)
            await asyncio.to_thread(pipe.poll, None)

    asyncio.run(hosted())


@contextmanager
def hosted(kind: str, *arguments: Any) -> Iterator[tuple[str, int]]:
    """URL and process id."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_host, args=(theirs, kind, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(START_LIMIT_S), f"{kind} did not start in {START_LIMIT_S:g} s"
        assert process.pid is not None
        yield ours.recv(), process.pid
    finally:
        ours.close()
        process.join(10.0)
        process.kill()


@contextmanager
def litellm(python: str, engine_url: str, scratch: Path) -> Iterator[str]:
    """LiteLLM's proxy in front of the engine."""
    parameters = {"model": "openai/policy", "api_base": f"{engine_url}/v1", "api_key": "none"}
    config = scratch / "litellm.yaml"  # JSON is YAML, and no other name is read
    config.write_text(json.dumps({"model_list": [{"model_name": "policy", "litellm_params": parameters}]}))
    log = scratch / "litellm.log"
    process = subprocess.Popen(
        [python, "-c", LITELLM],
        env={
            **os.environ,
            "CONFIG_FILE_PATH": str(config),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_MASTER_KEY": LITELLM_KEY,
            "PYTHONPATH": "",
        },
        stdout=subprocess.PIPE,
        stderr=log.open("wb"),
        text=True,
    )
    try:
        assert process.stdout is not None
        port = next((line.split()[1] for line in process.stdout if line.startswith("port ")), "")
        url = f"http://127.0.0.1:{port}"
        if not port or not asyncio.run(alive(f"{url}/health/liveliness", process)):
            last = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RuntimeError(f"LiteLLM's proxy did not start: {last}")
        yield url
    finally:
        process.kill()
        process.wait()


async def alive(url: str, process: subprocess.Popen[str]) -> bool:
    """Ask until it answers; False where it ends instead."""
    async with asyncio.timeout(START_LIMIT_S), aiohttp.ClientSession() as http:
        while process.poll() is None:
            try:
                async with http.get(url) as answer:
                    if answer.status == 200:
                        return True
            except aiohttp.ClientError:  # it listens before it serves
                await asyncio.sleep(0.2)
    return False


# -- what is measured


def connected() -> aiohttp.ClientSession:
    """Connections that are not used again when a server may be about to close them: uvicorn does after 5 s."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0))


async def start(http: aiohttp.ClientSession, url: str) -> Way:
    async with http.post(f"{url}/rl/start_session", headers={"Authorization": f"Bearer {ADMIN}"}) as answer:
        return Way(url, (await answer.json())["api_key"])


async def ask(http: aiohttp.ClientSession, way: Way, prompt: str) -> float:
    """Seconds of one request; its answer is the engine's."""
    body = {"model": "policy", "messages": [{"role": "user", "content": f"{next(NUMBERS)}. {prompt}"}]}
    began = time.perf_counter()
    async with http.post(
        f"{way.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {way.key}"}
    ) as answer:
        told = await answer.json()
    seconds = time.perf_counter() - began
    assert told.get("choices", [{}])[0].get("message", {}).get("content") == ANSWER, told
    return seconds


async def latencies(ways: Mapping[str, str], prompt: str, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each way: median, 95th percentile, and what it adds to the direct one's median."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    async with connected() as http:
        for number in range(WARM_UP + rounds):
            for name, url in ways.items():
                way = await start(http, url) if name == "service" else Way(url, LITELLM_KEY)
                seconds = await ask(http, way, prompt)
                if number >= WARM_UP:
                    taken[name].append(1000 * seconds)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    return {
        name: {
            "p50_ms": round(medians[name], 3),
            "p95_ms": round(sorted(values)[int(0.95 * len(values))], 3),
            "added_ms": round(medians[name] - medians["direct"], 3),
        }
        for name, values in taken.items()
    }


def beside(ways: Mapping[str, str], engine_url: str, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """``latencies`` of these ways and the direct one, for each prompt."""
    ways = {"direct": engine_url, **ways}
    return {length: asyncio.run(latencies(ways, prompt, rounds)) for length, prompt in PROMPTS.items()}


async def streams(url: str, number: int) -> dict[str, Any]:
    """So many streamed answers at once: seconds, failures, and how long the first text took."""
    body = {"model": "policy", "stream": True, "messages": [{"role": "user", "content": PROMPTS["short"]}]}
    async with connected() as http:
        ways = [await start(http, url) for _ in range(number)]

        async def one(way: Way) -> tuple[float, str]:
            began, first, raw = time.perf_counter(), 0.0, b""
            headers = {"Authorization": f"Bearer {way.key}"}
            async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
                async for chunk in answer.content.iter_any():
                    first = first or time.perf_counter() - began
                    raw += chunk
            events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event.startswith(b"data: ")]
            assert events[-1] == b"[DONE]", raw[-300:]
            deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
            return first, "".join(delta.get("content") or "" for delta in deltas)

        began = time.perf_counter()
        told = await asyncio.gather(*map(one, ways), return_exceptions=True)
        seconds = time.perf_counter() - began
    right = [one for one in told if isinstance(one, tuple) and one[1] == ANSWER]
    firsts = sorted(first for first, _ in right)
    return {
        "streams": number,
        "failed": number - len(right),
        "seconds": round(seconds, 2),
        "tokens_per_s": round(len(right) * len(ANSWER) / seconds),
        "first_text_p95_ms": round(1000 * firsts[int(0.95 * len(firsts))], 1) if firsts else None,
    }


async def memory(url: str, pid: int, number: int) -> list[tuple[int, float]]:
    """(sessions so far, resident MiB) twenty times: each session asks, is rewarded, and is exported."""
    admin = {"Authorization": f"Bearer {ADMIN}"}

    async def whole(http: aiohttp.ClientSession) -> None:
        async with http.post(f"{url}/rl/start_session", headers=admin) as answer:
            opened = await answer.json()
        way = Way(url, opened["api_key"])
        await ask(http, way, PROMPTS["long"])
        own = {"Authorization": f"Bearer {way.key}"}
        async with http.post(f"{url}/rl/set_reward", json={"reward": 1.0}, headers=own) as answer:
            assert answer.status == 200
        body = {"session_id": opened["session_id"]}
        async with http.post(f"{url}/rl/export", json=body, headers=admin) as answer:
            assert len((await answer.json())["trajectories"]) == 1

    readings = [(0, resident_mib(pid))]
    async with connected() as http:
        for done in range(0, number, BATCH):
            await asyncio.gather(*(whole(http) for _ in range(BATCH)))
            if (done + BATCH) % max(BATCH, number // 20) == 0:
                readings.append((done + BATCH, resident_mib(pid)))
    return readings


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024, 1)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Latencies as bars, memory as a line."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    bars, line = figure.subplots(1, 2)
    for place, (prompt, ways) in enumerate(result["latency"].items()):
        heights = [way["p50_ms"] for way in ways.values()]
        drawn = bars.bar([n + 0.4 * place for n in range(len(ways))], heights, width=0.38, label=f"{prompt} prompt")
        bars.bar_label(drawn, fmt="%.1f", fontsize=8)
    bars.set_xticks([n + 0.2 for n in range(len(ways))], list(ways))
    bars.set(ylabel="milliseconds (median)", yscale="log", title="one request")
    bars.legend(frameon=False)
    sessions, mib = zip(*result["memory"], strict=True)
    line.plot(sessions, mib, marker="o", markersize=3, color="#0072B2")
    line.set(xlabel="sessions", ylabel="resident MiB", ylim=(0, None), title="the service's memory")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--sessions", type=int, default=10000)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--litellm", metavar="PYTHON", help="an interpreter that has litellm[proxy]")
    chosen = parser.parse_args()
    result: dict[str, Any] = {"machine": describe()}
    with tempfile.TemporaryDirectory(prefix="areal-proxy-") as scratch:
        token_ids = said(make_dialogue(Path(scratch), "hermes"), ANSWER)
        with hosted("engine", token_ids) as (engine_url, _), hosted("service", scratch, engine_url) as (url, pid):
            with hosted("bare", engine_url) as (bare_url, _):
                result["latency"] = beside({"bare": bare_url, "service": url}, engine_url, chosen.rounds)
            if chosen.litellm:
                with litellm(chosen.litellm, engine_url, Path(scratch)) as other:
                    theirs = beside({"litellm": other}, engine_url, chosen.rounds)
                for prompt, ways in result["latency"].items():
                    ways["litellm"] = theirs[prompt]["litellm"]
            result["streams"] = asyncio.run(streams(url, chosen.streams))
            result["memory"] = asyncio.run(memory(url, pid, chosen.sessions))
    for prompt, rows in result["latency"].items():
        for name, row in rows.items():
            print(f"{prompt:6} {name:8}  " + "  ".join(f"{key} {value:8.3f}" for key, value in row.items()))
    print("  ".join(f"{key} {value}" for key, value in result["streams"].items()))
    print(
        "memory MiB: "
        + ", ".join(
            f"{mib:g} at {sessions:,}" for sessions, mib in result["memory"][:: max(1, len(result["memory"]) // 4)]
        )
    )
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(result, Path(__file__).with_suffix(".png"))
    return 1 if result["streams"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
