"""The life of an SGLang server, with a program in its place that prints, answers, hangs or dies as a test wants it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_spec import KEY, LORA, SPEC

from areal_hpc.errors import ConfigError, GenerationError
from areal_hpc.generation.external import process as server
from areal_hpc.generation.external.process import LAUNCHER, ServerProcess, reserved_port
from areal_hpc.generation.external.spec import Share
from areal_hpc.generation.sglang.server import load as load_of
from areal_hpc.generation.sglang.server import serving
from areal_hpc.telemetry import add_secret

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


def test_a_reserved_port_is_nobody_elses_and_yet_can_be_listened_on() -> None:
    with reserved_port("127.0.0.1") as port:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass


# -- launch.py in an interpreter of its own, with a package `sglang` that tells what it got

TELLS = """
import json, os, signal, sys
print(json.dumps({
    "arguments": sys.argv[1:],
    "blocked": signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []),
    "interruptible": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "visible": open("/proc/self/cmdline").read(),
}), flush=True)
if "--wait" in sys.argv:
    signal.pause()
"""


@pytest.fixture
def told_by(tmp_path: Path) -> dict[str, str]:
    """Environment in which that package is found."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").touch()
    (tmp_path / "sglang/launch_server.py").write_text(TELLS)
    return {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}


def launch(environment: dict[str, str], **order: Any) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, str(LAUNCHER)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # noqa: PLW1509  as a role process has it
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps({"parent": os.getpid(), "module": "sglang.launch_server", **order}))
    process.stdin.close()
    return process


def test_arguments_reach_sglang_and_no_command_line(told_by: dict[str, str]) -> None:
    with launch(told_by, arguments=["--api-key", KEY]) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.read())
    assert told["arguments"] == ["--api-key", KEY]
    assert KEY not in told["visible"]


def test_a_schedulers_sigterm_to_all_processes_leaves_the_server_to_its_generator(told_by: dict[str, str]) -> None:
    with launch(told_by, arguments=["--wait"]) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert (told["blocked"], told["interruptible"]) == (True, True)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT


def test_a_server_whose_parent_is_gone_already_does_not_start(told_by: dict[str, str]) -> None:
    with launch(told_by, parent=1, arguments=[]) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "is gone" in process.stderr.read()
        assert process.wait(30) == 1
        assert process.stdout.read() == ""


# -- serving, with a program in the place of the interpreter

METRICS = """
sglang:realtime_tokens_total{mode="decode",tp_rank="0"} 700.0
sglang:realtime_tokens_total{mode="prefill_compute",tp_rank="0"} 90.0
sglang:num_requests_total{is_streaming="false"} 30.0
sglang:num_requests_total{is_streaming="true"} 11.0
"""

PROGRAM = """#!{python}
import json, os, signal, sys, time
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, HTTPServer
METRICS = {metrics!r}
words = json.load(sys.stdin)["arguments"]
value = lambda name: words[words.index(name) + 1]
print("arguments:", words, flush=True)
fault = value("--fault")
if fault == "dies":
    sys.exit("no such model")
if fault == "hangs":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(60)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        ready = self.path != "/health_generate" or time.monotonic() > came + 0.3
        if self.path == "/model_info" and fault == "stops":
            time.sleep(60)
        about = {{"timestamp": time.time(), "queues": {{"paused": False}}}}
        body = {{"weight_version": "7", "timestamp": datetime.now(timezone.utc).isoformat(), "loads": [
            {{"num_running_reqs": 2, "num_waiting_reqs": 1, **about}},
            {{"num_running_reqs": 0, "num_waiting_reqs": 3, **about}},
        ], "internal_states": [{{"areal_hpc": {{"deltas": True}}}} if fault == "takes ours" else {{}}]}}
        if self.path == "/end":
            print("areal_hpc: lower the temperature\\nand a last line that says less", flush=True)
            os._exit(int(fault))
        data = (METRICS if self.path == "/metrics" else json.dumps(body)).encode()
        self.send_response(200 if ready else 503)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
came = time.monotonic()
HTTPServer((value("--host"), int(value("--port"))), Handler).serve_forever()
"""


def serve(
    tmp_path: Path,
    use: Callable[[ServerProcess], Awaitable[None]],
    *,
    fault: str = "none",
    start_s: float = 60.0,
    **fields: Any,
) -> Path:
    """Run ``use`` with such a server; its log."""
    add_secret(KEY)
    program = tmp_path / "python"
    program.write_text(PROGRAM.format(python=sys.executable, metrics=METRICS))
    program.chmod(0o700)
    log = tmp_path / "sglang-0.log"
    spec = replace(SPEC, extra={"fault": fault}, **fields)

    async def within() -> None:
        async with serving(spec, python=str(program), log=log, start_s=start_s) as started:
            await use(started)

    asyncio.run(within())
    return log


async def nothing(_: ServerProcess) -> None:
    pass


def test_a_server_is_up_when_it_generates_and_gone_afterwards(tmp_path: Path) -> None:
    seen: list[ServerProcess] = []

    async def use(started: ServerProcess) -> None:
        seen.append(started)
        assert started.alive()
        assert await load_of(started) == {"version": 7, "running": 2, "queued": 4, "held": False, "tokens": 741}

    log = serve(tmp_path, use)
    assert not seen[0].alive()
    assert "arguments:" in log.read_text()
    assert log.stat().st_mode & 0o077 == 0


AT = "2026-01-02T03:04:05+00:00"
AT_S = 1767323045.0
"""The same moment, by coreutils' date."""


@pytest.mark.parametrize(
    ("paused", "age_s", "told"),
    [
        (True, 0.0, {"running": 0, "queued": 8, "held": True}),
        (False, 0.0, {"running": 5, "queued": 3, "held": False}),
        (False, 900.0, {"running": 5, "queued": 3, "held": False}),
        (0, 2.0, {"running": 5, "queued": 3, "held": False}),
        (0, 11.0, {"running": 0, "queued": 8, "held": True}),
    ],
    ids=["paused", "at work", "it hangs", "at work, without our code", "paused or hangs, without our code"],
)
def test_a_pause_is_told_from_a_server_that_hangs_where_it_has_our_code(
    paused: bool | int, age_s: float, told: dict[str, Any]
) -> None:
    about = {"timestamp": AT_S - age_s, "queues": {"waiting": 1, "paused": paused}}
    ranks = [{"num_running_reqs": 4, "num_waiting_reqs": 3, **about}, {"num_running_reqs": 1, "num_waiting_reqs": 0}]
    ranks[1] |= about
    answers = {
        "/v1/loads?include=core,queues": {"timestamp": AT, "loads": ranks},
        "/model_info": {"weight_version": "7"},
        "/metrics": METRICS,
    }

    async def get(path: str) -> Any:
        return answers[path]

    stub: Any = SimpleNamespace(get=get)
    assert asyncio.run(load_of(stub)) == {**told, "version": 7, "tokens": 741}


def test_sglang_prints_its_key_and_the_log_does_not_have_it(tmp_path: Path) -> None:
    text = serve(tmp_path, nothing).read_text()
    assert "'--api-key', '[redacted]'" in text
    assert KEY not in text


def test_a_server_that_dies_while_it_starts_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(
        GenerationError, match=r"ended with code 1 before it was up(.|\n)*sglang-0.log(.|\n)*no such model"
    ):
        serve(tmp_path, nothing, fault="dies")


def test_a_server_that_does_not_come_up_is_given_up_and_ended_by_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STOP_S", 0.1)
    began = time.monotonic()
    with pytest.raises(GenerationError, match=r"did not come up in 0.5 s; raise limits.start_s"):
        serve(tmp_path, nothing, fault="hangs", start_s=0.5)
    assert time.monotonic() - began < 50  # not its own minute


def test_a_server_that_does_not_answer_any_more_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ANSWER_S", 0.3)
    monkeypatch.setattr(server, "STOP_S", 0.1)

    async def use(started: ServerProcess) -> None:
        with pytest.raises(GenerationError, match="did not answer /model_info"):
            await load_of(started)

    serve(tmp_path, use, fault="stops")


@pytest.mark.parametrize(("code", "error"), [(2, ConfigError), (1, GenerationError)])
def test_what_a_person_has_to_change_is_a_mistake_of_theirs_only_if_the_server_says_so_itself(
    tmp_path: Path, code: int, error: type[Exception]
) -> None:
    async def use(started: ServerProcess) -> None:
        with pytest.raises(GenerationError):
            await started.get("/end")
        died = await started.death()
        assert type(died) is error
        if error is ConfigError:
            assert str(died) == "lower the temperature"
        else:
            assert "has ended with code 1" in str(died) and str(died).endswith("a last line that says less")

    serve(tmp_path, use, fault=str(code))


def test_who_lives_and_does_not_answer_is_said_to_do_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "END_S", 0.1)

    async def use(started: ServerProcess) -> None:
        assert "does not answer" in str(await started.death())

    serve(tmp_path, use)


def test_the_loop_turns_while_a_servers_death_and_the_end_of_its_log_are_waited_for() -> None:
    """A generator that did not would hear of no stop, and answer nobody, for as long as both may take."""
    ended, read = threading.Event(), threading.Event()
    lines: list[str] = []

    def wait(limit_s: float) -> int:
        if not ended.wait(limit_s):
            raise subprocess.TimeoutExpired("server", limit_s)
        return 1

    process: Any = SimpleNamespace(pid=1, returncode=1, poll=lambda: 1 if ended.is_set() else None, wait=wait)
    output: Any = SimpleNamespace(join=read.wait, last=lines, path="its.log")

    async def die() -> str:
        dying = asyncio.create_task(ServerProcess("SGLang", "http://127.0.0.1:1", KEY, process, output).death())
        await asyncio.sleep(0)  # it waits by now
        ended.set()
        lines.append("out of memory")
        read.set()
        return str(await dying)

    assert asyncio.run(die()) == "the SGLang server has ended with code 1. The end of its log its.log:\nout of memory"


@pytest.mark.parametrize("needs", [{"keeps_weights": True}, {"lora": LORA}])
def test_an_sglang_that_did_not_take_our_code_in_is_refused_and_not_started_again_and_again(
    tmp_path: Path, needs: dict[str, Any]
) -> None:
    """The trainer would have each of its updates refused, and it would come back for the next."""
    key = "weights.delta" if "keeps_weights" in needs else "model.lora"
    with pytest.raises(ConfigError, match=rf"does not let weights be taken as {key} needs it"):
        serve(tmp_path, nothing, **needs)
    serve(tmp_path, nothing, fault="takes ours", **needs)
    serve(tmp_path, nothing, share=Share(num_nodes=2, node=1, address="127.0.0.1:1"), **needs)


class Unkillable:
    """A server that hangs in a call to its device's driver."""

    pid = 4711

    def __init__(self) -> None:
        self.told: list[object] = []

    def poll(self) -> None:
        return None

    def send_signal(self, number: int) -> None:
        self.told.append(signal.Signals(number))

    def kill(self) -> None:
        self.told.append(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        self.told.append(timeout)
        raise subprocess.TimeoutExpired("server", timeout)


def test_fault_24_one_that_cannot_be_killed_is_named_and_waited_for_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    process: Any = Unkillable()
    output: Any = SimpleNamespace(join=lambda limit_s: None, is_alive=lambda: False)

    async def close() -> None:
        await ServerProcess("SGLang", "http://127.0.0.1:1", KEY, process, output).close()

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(close())
    assert process.told == [signal.SIGINT, server.STOP_S, signal.SIGKILL, server.END_S]
    assert "the SGLang server 4711 was killed and has not ended in 10 s: it hangs in the kernel" in caplog.text
