"""Agents that are no coroutines and hang: each in a thread that nothing can end, and that must hold nobody else up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from served import run

from areal_hpc.errors import AgentError
from areal_hpc.proxy.agent import Agent, Task, python_agent

WHOLE = """
import asyncio, threading
from areal_hpc.proxy.agent import Task, python_agent

class Sometimes:
    def run(self, data, **_):
        return 1.0 if data["good"] else threading.Event().wait()

async def main():
    agent = python_agent(Sometimes)
    try:
        await asyncio.wait_for(agent(Task(data={"good": False}, url="u", key="k")), 0.05)
    except TimeoutError:
        print(await agent(Task(data={"good": True}, url="u", key="k")), flush=True)

asyncio.run(main())
raise SystemExit("the worker failed")
"""


class Hanging:
    """Hangs where the data says so, until ``freed``."""

    def __init__(self) -> None:
        self.begun, self.freed = threading.Semaphore(0), threading.Event()
        self.threads: list[threading.Thread] = []

    def run(self, data: Mapping[str, Any], **_: Any) -> float:
        self.threads.append(threading.current_thread())
        self.begun.release()
        if data["hangs"]:
            self.freed.wait()
        return 1.0

    def end(self) -> None:
        self.freed.set()
        for thread in self.threads:
            thread.join()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    agent = Hanging()
    yield agent
    agent.end()


def attempt(agent: Agent, *, hangs: bool = False) -> asyncio.Future[float | None]:
    return asyncio.ensure_future(agent(Task(data={"hangs": hangs}, url="http://127.0.0.1:1", key="k")))


async def give_up(agent: Agent, hanging: Hanging) -> None:
    """Begin an episode that hangs, and end it as its time limit does."""
    episode = attempt(agent, hangs=True)
    await asyncio.to_thread(hanging.begun.acquire)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode


def test_agents_that_hang_hold_no_later_episode_up(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("areal_hpc.proxy.threads.MAX_AT_ONCE", 2)

    async def scenario() -> None:
        agent = python_agent(lambda: hanging)
        for _ in range(5):
            await give_up(agent, hanging)
        assert await attempt(agent) == 1.0
        assert caplog.text.count("Hanging.run hangs") == 1, "it is said once, and by name"

    run(scenario())


def test_no_more_run_at_once_than_there_are_places(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_hpc.proxy.threads.MAX_AT_ONCE", 2)

    async def scenario() -> None:
        agent = python_agent(lambda: hanging)
        episodes = [attempt(agent, hangs=True) for _ in range(4)]
        for _ in range(2):
            await asyncio.to_thread(hanging.begun.acquire)
        assert len(hanging.threads) == 2
        hanging.freed.set()
        assert await asyncio.gather(*episodes) == [1.0] * 4

    run(scenario())


def test_episodes_are_refused_while_too_many_hang(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_hpc.proxy.threads.MAX_GIVEN_UP", 3)

    async def scenario() -> None:
        agent = python_agent(lambda: hanging)
        for _ in range(3):
            await give_up(agent, hanging)
        with pytest.raises(AgentError, match=r"3 episodes .* Hanging\.run .* `agent\.command`"):
            await attempt(agent)
        await asyncio.to_thread(hanging.end)
        assert await attempt(agent) == 1.0, "those that came to an end after all count no more"

    run(scenario())


def test_a_process_ends_although_agents_hang_in_it_also_by_an_error() -> None:
    """Not only by ``roles.leave``, which waits for nobody: by whatever is raised, too."""
    ended = subprocess.run([sys.executable, "-c", WHOLE], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "1.0\n"), ended.stderr
    assert ended.stderr.endswith("the worker failed\n")
