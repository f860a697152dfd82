"""Agents as a workflow: an unmodified agent runs one episode against the service, and its turns are the trajectories.

    a session with a key of its own ── the agent works: base_url, api_key ── reward ── trajectories
                                          │
             raises, exits, hangs, asks nothing, has an answer break off: the sample is failed and says why

The reward is what a Python agent returns, else what was set over HTTP, else ``rollout.reward`` of the last answer.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from areal_hpc.config.schema import AgentConfig
from areal_hpc.dialogue.transcript import Drift
from areal_hpc.errors import AgentError, ConfigError
from areal_hpc.protocols import Episode
from areal_hpc.proxy.chronicle import Note
from areal_hpc.proxy.sessions import Limits, Session, Sessions
from areal_hpc.proxy.threads import Threads
from areal_hpc.types import Prompt, Trajectory

KEPT_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""What a command sees of this process's environment, which may hold secrets that are not an agent's."""
NO_PROXY = "127.0.0.1,localhost,::1"
LAST_OUTPUT = 2000
"""Bytes of a command's output that are kept, for the message that it has failed."""
READ_BYTES = 1 << 16
REAP_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an agent gets: the prompt as data, and where to ask."""

    data: Mapping[str, Any]
    url: str
    key: str


Record = Callable[[str, Mapping[str, Any]], None]
Agent = Callable[[Task], Awaitable[float | None]]
"""Runs one attempt; its reward, or None where it gives none. Raises whatever it raises."""


class AgentWorkflow:
    """A ``Workflow`` that lets an agent run each episode.

    Args:
        url: of the service that has ``sessions``, without ``/v1``.
        timeout_s: the episode's limit, which whoever runs it enforces.
        record: is told of each attempt how many turns it had, and how each fitted to those before it.
        note: is given each session that has ended well, to be looked at.
    """

    def __init__(
        self,
        agent: Agent,
        sessions: Sessions,
        url: str,
        config: AgentConfig,
        *,
        timeout_s: float,
        record: Record = lambda *_: None,
        note: Note = lambda *_: None,
    ) -> None:
        self._agent, self._sessions, self._url, self._config = agent, sessions, url, config
        self._timeout_s, self._record, self._note = timeout_s, record, note
        self._limits = Limits.of(config)

    async def run(self, prompt: Prompt, episode: Episode) -> Sequence[Trajectory]:
        """The trajectories of one attempt.

        Raises:
            AgentError: the agent failed, asked nothing, or was given half an answer.
            RewardError: its last answer could not be scored.
        """
        session = self._sessions.open(
            generator=episode.generator,
            sampling=episode.sampling,
            max_tokens=episode.max_tokens,
            limits=self._limits,
            agent_s=self._timeout_s,
        )
        try:
            reward = await self._attempt(Task(data=_data(prompt), url=self._url, key=session.key))
            _check(session)
            if reward is not None:
                session.reward(reward)
            elif session.final is None and not session.rewards:
                session.final = await episode.score(session.transcript.turns[-1].answer["content"], prompt)
            trajectories = session.trajectories(self._config.discount)
            drifts = session.transcript.drifts
            counts = {str(drift): drifts[drift] for drift in Drift}
            self._record("agent", {"turns": drifts.total(), **counts, "trajectories": len(trajectories)})
            self._note(session, {"group": prompt.id, "outcome": "an episode", "reason": ""})
            return trajectories
        finally:
            self._sessions.close(session)

    async def _attempt(self, task: Task) -> float | None:
        try:
            return await self._agent(task)
        except (AgentError, ConfigError):
            raise
        except Exception as error:  # an agent is a stranger's code: whatever it raises fails this sample, and is told
            raise AgentError(f"the agent raised {type(error).__name__}: {error}") from error


def _check(session: Session) -> None:
    """Raises AgentError for an attempt that nothing can be learned from."""
    if session.broken:
        raise AgentError(session.broken)
    if not session.transcript.turns:
        raise AgentError("the agent asked for no completion; it must use the base_url and api_key that it is given")


def _data(prompt: Prompt) -> dict[str, Any]:
    return {**prompt.metadata, "id": prompt.id, "messages": [dict(m) for m in prompt.messages], "answer": prompt.answer}


@asynccontextmanager
async def shared_http_client(limit_s: float) -> AsyncIterator[Any]:
    """Connections for the OpenAI clients of all episodes; None where the package is not installed.

    A client makes its own otherwise, and its TLS settings alone cost tens of milliseconds for each episode.

    Args:
        limit_s: of each wait within a request, the episode's own. Usually clients give up after 5 s without a
            connection, which on a busy machine is the time that hundreds of episodes take to start together.
    """
    if find_spec("openai") is None:
        yield None
        return
    from openai import DefaultAsyncHttpxClient, Timeout

    async with DefaultAsyncHttpxClient(trust_env=False, timeout=Timeout(limit_s)) as client:
        yield client


def python_agent(make: Callable[[], Any], http_client: Any = None) -> Agent:
    """An object with ``run(data, *, base_url, api_key, http_client)``; one that is no coroutine runs in a thread.

    Args:
        http_client: shared by the episodes, which must not close it; what runs in a thread makes its own.

    Raises:
        ConfigError: the object cannot be made, or has no ``run``.
    """
    try:
        agent = make()
    except TypeError as error:
        raise ConfigError(f"agent.python cannot be made: {error}; give `agent.args` that its class takes") from error
    if not callable(getattr(agent, "run", None)):
        raise ConfigError(f"agent.python: {type(agent).__name__} has no method `run`; see examples/agents")
    threads = Threads(f"{type(agent).__name__}.run")

    async def attempt(task: Task) -> float | None:
        words = {"base_url": f"{task.url}/v1", "api_key": task.key}
        if inspect.iscoroutinefunction(agent.run):
            return _number(await agent.run(dict(task.data), **words, http_client=http_client))
        blocking = partial(agent.run, dict(task.data), **words, http_client=None)
        return _number(await threads.run(blocking))

    return attempt


def _number(reward: Any) -> float | None:
    if reward is None:
        return None
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise AgentError(f"the agent returned {reward!r} where a reward was expected; return a finite number or None")
    return float(reward)


def command_agent(command: Sequence[str], passed: Sequence[str]) -> Agent:
    """A command: the prompt as JSON on its standard input, addresses and key in its environment.

    Args:
        passed: further variables of this process's environment that it may see.
    """

    async def attempt(task: Task) -> None:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=environment(task, passed),
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            told = _tell(process.stdin, json.dumps(task.data).encode())
            output, *_ = await asyncio.gather(_last_output(process.stdout), told, process.wait())
        finally:
            await _end(process)
        if process.returncode:
            said = output.decode(errors="replace").strip()
            raise AgentError(f"{command[0]} ended with exit code {process.returncode}; its last words: {said}")

    return attempt


async def _tell(stdin: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # it need not read its prompt
        stdin.write(data)
        await stdin.drain()
    stdin.close()


async def _last_output(stdout: asyncio.StreamReader) -> bytes:
    """The end of what is printed, to whose length there is no limit."""
    kept = b""
    while chunk := await stdout.read(READ_BYTES):
        kept = (kept + chunk)[-LAST_OUTPUT:]
    return kept


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGKILL to all that it started and left running; also when it has ended itself."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it left nothing
    async with asyncio.timeout(REAP_LIMIT_S):
        await process.wait()


def environment(task: Task, passed: Sequence[str]) -> dict[str, str]:
    """What a command sees: where to ask under the names that clients read, and little else."""
    kept = {name: os.environ[name] for name in (*KEPT_ENVIRONMENT, *passed) if name in os.environ}
    return {
        **kept,
        "OPENAI_BASE_URL": f"{task.url}/v1",
        "OPENAI_API_KEY": task.key,
        "ANTHROPIC_BASE_URL": task.url,
        "ANTHROPIC_API_KEY": task.key,
        "AREAL_SERVICE_URL": task.url,
        "NO_PROXY": NO_PROXY,
        "no_proxy": NO_PROXY,
    }
