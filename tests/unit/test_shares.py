"""An engine on two nodes: its generator and its part, each with a program in the place of SGLang's interpreter."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.accelerator import CPU, CUDA
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Config
from areal_hpc.errors import GenerationError
from areal_hpc.generation.external.spec import ServerSpec, Share
from areal_hpc.generation.sglang.arguments import BINDING, server_arguments, server_environment
from areal_hpc.roles import launches
from areal_hpc.roles.launches import Launch
from areal_hpc.roles.process import RoleProcess, StopRequested
from areal_hpc.roles.wiring import shares
from areal_hpc.roles.wiring.serving import ServedEngine, serve_engine
from areal_hpc.roles.wiring.shares import hold_shares
from areal_hpc.run_dir import AttemptDir, RunDir
from areal_hpc.telemetry import Recorder

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"

# Node 0 listens where the ranks are to meet and is healthy once node 1 has come; node 1 ends when node 0 has.
PROGRAM = """#!{python}
import json, os, socket, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
words = json.load(sys.stdin)["arguments"]
value = lambda name: words[words.index(name) + 1]
host, _, port = value("--dist-init-addr").rpartition(":")
with open({told!r}, "a") as file:
    file.write(json.dumps({{"pid": os.getpid(), "words": words}}) + "\\n")
if value("--node-rank") == "0":
    meeting = socket.socket()
    meeting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    meeting.bind((host, int(port)))
    meeting.listen()
    other, _ = meeting.accept()
else:
    import time
    for _ in range(600):
        try:
            other = socket.create_connection((host, int(port)))
            break
        except OSError:
            time.sleep(0.1)
    threading.Thread(target=lambda: (other.recv(1), os._exit(3)), daemon=True).start()
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{{}}")
    def log_message(self, *_):
        pass
HTTPServer((value("--host"), int(value("--port"))), Handler).serve_forever()
"""


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    return RunDir.create(tmp_path / "run").attempt(1).create()


# -- launches


def test_a_launch_is_over_once_and_for_all_who_look(attempt: AttemptDir) -> None:
    launch = launches.begin(attempt, 0, 2, "10.0.0.1:4711")
    seen = launches.newest(attempt, 0)
    assert seen == launch
    assert seen is not None
    assert (seen.address, seen.why_over()) == ("10.0.0.1:4711", "")
    seen.end("part-0 has ended")
    launch.end("generator-0 has ended, because part-0 has")
    assert [one.why_over() for one in (launch, seen)] == ["part-0 has ended"] * 2


def test_nobody_joins_a_launch_twice(attempt: AttemptDir) -> None:
    launch = launches.begin(attempt, 0, 0, "a:1")
    assert [launch.join("part-0"), launch.join("part-1"), launch.join("part-0")] == [True, True, False]
    assert launches.newest(attempt, 0) == launch


def test_a_later_launch_of_the_same_engine_makes_history_of_the_one_before(attempt: AttemptDir) -> None:
    assert launches.newest(attempt, 1) is None
    first = launches.begin(attempt, 1, 9, "a:1")
    launches.begin(attempt, 0, 11, "b:1")
    assert first.why_over() == ""
    second = launches.begin(attempt, 1, 10, "a:2")
    assert launches.newest(attempt, 1) == second
    assert (first.why_over(), second.why_over()) == ("generator-1 has been started again", "")


# -- what SGLang is told


def spec_of(**fields: Any) -> ServerSpec:
    values: dict[str, Any] = {"model_path": "/m", "dtype": "float32", "host": "h", "key": "k", "max_running": 4}
    return ServerSpec(**values | {"accelerator": CUDA, "max_tokens": 100, "tensor_parallel": 16} | fields)


def test_each_node_is_told_its_number_and_where_rank_0_is() -> None:
    words = server_arguments(
        spec_of(share=Share(num_nodes=2, node=1, address="[fd00::1]:4711")), port=1, internal_port=2
    )
    told = {name: words[words.index(name) + 1] for name in ("--nnodes", "--node-rank", "--dist-init-addr", "--tp-size")}
    assert told == {"--nnodes": "2", "--node-rank": "1", "--dist-init-addr": "[fd00::1]:4711", "--tp-size": "16"}
    assert not {"--nnodes", "--node-rank", "--dist-init-addr"} & set(
        server_arguments(spec_of(), port=1, internal_port=2)
    )


def test_on_a_cpu_ranks_are_bound_to_nothing_unless_somebody_has_said_so() -> None:
    made = server_environment({}, CPU, Path("/t"), ranks=4)
    assert len(made[BINDING].split("|")) == 4  # an entry for each rank, as SGLang asks
    assert server_environment({BINDING: "0-7|8-15"}, CPU, Path("/t"), ranks=2)[BINDING] == "0-7|8-15"
    assert BINDING not in server_environment({}, CUDA, Path("/t"), ranks=4) | server_environment({}, CPU, Path("/t"))


# -- life and death


class World:
    """Two nodes of a run, their processes all in this one."""

    def __init__(self, tmp_path: Path, attempt: AttemptDir) -> None:
        self.told, self.run = tmp_path / "told.jsonl", RunDir(attempt.root.parents[1])
        self.attempt = attempt
        program = tmp_path / "python"
        program.write_text(PROGRAM.format(python=sys.executable, told=str(self.told)))
        program.chmod(0o700)
        words = ["cluster.shape=het", "generation.backend=sglang", "generation.tensor_parallel=2"]
        words += ["cluster.generation.gpus=1", "cluster.generation.nodes=2", f"generation.python={program}"]
        self.config: Config = resolve(load([QUICKSTART], words))

    def process(self, role: str, incarnation: int = 0) -> RoleProcess:
        recorder = Recorder(self.attempt.records(role, 0), role=role, index=0, epoch=1)
        return RoleProcess(
            role=role, index=0, incarnation=incarnation, run=self.run, epoch=1, config=self.config, token="t",
            recorder=recorder,
        )  # fmt: skip

    @asynccontextmanager
    async def part(self, incarnation: int = 0) -> AsyncIterator[asyncio.Task[None]]:
        """A part at work, and orderly stopped."""
        process = self.process("part", incarnation)
        task = asyncio.create_task(hold_shares(process))
        try:
            yield task
        finally:
            process.stop_flag.set()
            async with asyncio.timeout(60):
                await asyncio.gather(task, return_exceptions=True)

    def servers(self) -> list[tuple[str, int, str]]:
        """Node, pid and meeting place of each server that was started, in that order."""
        told = [json.loads(line) for line in self.told.read_text().splitlines()]
        return [
            (value(one["words"], "--node-rank"), one["pid"], value(one["words"], "--dist-init-addr")) for one in told
        ]

    def launch(self) -> Launch:
        found = launches.newest(self.attempt, 0)
        assert found is not None
        return found


def value(words: list[str], name: str) -> str:
    return str(words[words.index(name) + 1])


@pytest.fixture
def world(tmp_path: Path, attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(shares, "LOOK_S", 0.02)
    return World(tmp_path, attempt)


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(120):
            await scenario()

    asyncio.run(within())


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.02)


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def has_ended(engine: ServedEngine) -> None:
    await until(lambda: not engine.alive())


def test_an_engine_is_up_when_all_of_its_nodes_are_and_all_end_with_it(world: World) -> None:
    async def scenario() -> None:
        async with world.part():
            async with serve_engine(world.process("generator")) as engine:
                assert engine.alive()
                assert world.launch().why_over() == ""
            why = world.launch().why_over()
            assert why == "generator-0 on 127.0.0.1 has ended"
            pids = [pid for _, pid, _ in world.servers()]
            await until(lambda: not any(map(exists, pids)))

    play(scenario)
    assert sorted(node for node, _, _ in world.servers()) == ["0", "1"]
    assert {address for _, _, address in world.servers()} == {world.launch().address}
    assert (world.attempt.logs / "sglang-part-0.log").exists()


@pytest.mark.parametrize("node", ["0", "1"])
def test_the_death_of_any_share_ends_the_engine_and_the_next_launch_has_both_again(world: World, node: str) -> None:
    async def scenario() -> None:
        async with world.part():
            async with serve_engine(world.process("generator")) as engine:
                (pid,) = [pid for here, pid, _ in world.servers() if here == node]
                os.kill(pid, signal.SIGKILL)
                await has_ended(engine)
            first = world.launch()
            async with serve_engine(world.process("generator", incarnation=1)) as engine:
                assert engine.alive()
                assert world.launch() != first
                assert "generator-0" in first.why_over() or "part-0" in first.why_over()
                assert [here for here, _, _ in world.servers()].count("1") == 2

    play(scenario)


def test_a_part_that_was_replaced_ends_what_its_predecessor_was_in(world: World) -> None:
    """Killed outright, it said nothing, and its server went with it."""

    async def scenario() -> None:
        launch = launches.begin(world.attempt, 0, 0, "127.0.0.1:9")
        launch.join("part-0")
        async with world.part(incarnation=1):
            await until(lambda: launch.why_over() == "part-0 on 127.0.0.1 has ended")
            async with serve_engine(world.process("generator", incarnation=1)) as engine:
                assert engine.alive()

    play(scenario)


def test_a_generator_that_was_killed_outright_is_noticed_by_its_next_launch(world: World) -> None:
    async def scenario() -> None:
        async with world.part():
            launches.begin(world.attempt, 0, 0, "127.0.0.1:9")  # nobody is there, and nobody says so
            async with serve_engine(world.process("generator", incarnation=1)) as engine:
                assert engine.alive()

    play(scenario)


def test_an_engine_does_not_come_up_where_a_part_cannot_and_says_which(world: World) -> None:
    async def scenario() -> None:
        begun = asyncio.create_task(fail())
        await until(lambda: launches.newest(world.attempt, 0) is not None)
        world.launch().end("the server of part-0 on n2 did not come up; see its log")
        await begun

    async def fail() -> None:
        with pytest.raises(GenerationError, match="the engine of generator-0 did not come up: the server of part-0"):
            async with serve_engine(world.process("generator")):
                raise AssertionError("it is up")

    play(scenario)


def test_who_cannot_see_whether_a_launch_is_over_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def why_over(_: Launch) -> str:
        raise OSError(errno.ESTALE, "Stale file handle")

    async def scenario() -> None:
        async with world.part() as part, serve_engine(world.process("generator")) as engine:
            assert engine.alive()
            monkeypatch.setattr(Launch, "why_over", why_over)
            with pytest.raises(OSError, match="Stale file handle"):
                await has_ended(engine)
            with pytest.raises(OSError, match="Stale file handle"):
                await part

    play(scenario)


def test_a_part_is_told_to_stop_while_its_share_comes_up_and_takes_the_engine_along(world: World) -> None:
    async def scenario() -> None:
        launch = launches.begin(world.attempt, 0, 0, "127.0.0.1:9")
        process = world.process("part")
        held = asyncio.create_task(hold_shares(process))
        await until(world.told.exists)
        process.stop_flag.set()
        with pytest.raises(StopRequested):
            await held
        assert launch.why_over() == "part-0 on 127.0.0.1 has ended"

    play(scenario)
