"""What runs an episode: the configured workflow, or an agent behind a service of its own in this process."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

from areal_hpc.config.derived import queue_s
from areal_hpc.config.schema import Config, EngineName, ToolFormatName
from areal_hpc.dialogue.probe import tool_trouble
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.dialogue.tool_formats import FORMATS, detect
from areal_hpc.errors import ConfigError
from areal_hpc.fs import read_if_listed
from areal_hpc.protocols import Generator, Workflow
from areal_hpc.proxy.agent import Agent, AgentWorkflow, command_agent, python_agent, shared_http_client
from areal_hpc.proxy.app import Service, serve
from areal_hpc.proxy.calls import Dialect
from areal_hpc.proxy.chronicle import Chronicle, Scribe, Spelled, summary_of, turns_of
from areal_hpc.proxy.online import Open
from areal_hpc.proxy.page import Board
from areal_hpc.proxy.sessions import Limits, Session, Sessions
from areal_hpc.report.course import Course
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.dotted import dotted
from areal_hpc.rollout.episodes import derive_seed, sampling

NOTE_EVERY_S = 0.5
"""Between two sessions of a run's own agent that are written down: enough to look at."""
NOTE_SHARE = 0.02
"""Largest share of this process's time that may go into writing sessions down. Turning tokens into text costs some
0.2 ms each, in the event loop that serves the agents: a session of 10,000 tokens holds it up for two seconds."""


def has_agent(config: Config) -> bool:
    return bool(config.agent.python or config.agent.command)


def make_agent(config: Config, http_client: Any = None) -> Agent:
    """Raises ConfigError if the class cannot be imported or made, or there is no such program."""
    agent = config.agent
    if agent.command:
        if shutil.which(agent.command[0]) is None:
            raise ConfigError(f"agent.command: there is no program {agent.command[0]!r}; give its path")
        return command_agent(agent.command, agent.env)
    return python_agent(partial(dotted(agent.python, "agent.python"), **agent.args), http_client)


def make_dialect(renderer: ChatRenderer, name: ToolFormatName, engine: EngineName = EngineName.EMBEDDED) -> Dialect:
    written = FORMATS[detect(renderer.template) if name is ToolFormatName.AUTO else name]
    known = {} if engine is EngineName.EMBEDDED else {"schema_trouble": lambda _: ""}  # SGLang judges schemas itself
    return Dialect(dialogue=renderer, written=written, trouble=tool_trouble(renderer), **known)


@asynccontextmanager
async def make_workflow(process: RoleProcess, renderer: ChatRenderer, generator: Generator) -> AsyncIterator[Workflow]:
    """The workflow of this process; of an agent, while its service is up."""
    config = process.config
    if not has_agent(config):
        workflow: Workflow = dotted(config.rollout.workflow, "rollout.workflow")()
        yield workflow
        return
    sessions = Sessions(renderer, idle_s=max(config.agent.idle_s, config.rollout.timeout_s))
    service = Service(
        sessions=sessions,
        dialect=make_dialect(renderer, config.agent.tool_format, config.generation.backend),
        model=Path(config.model.path).name,
        open_session=opener(process, sessions, generator),
        admin_token=process.token,
        discount=config.agent.discount,
        board=make_board(process, renderer, lambda: sessions),
    )
    timeout_s, record = config.rollout.timeout_s, process.recorder.record
    async with serve(service) as url, shared_http_client(request_s(config)) as http_client:
        process.publish_endpoint({"agents_url": url})
        agent = make_agent(config, http_client)
        with closing(make_notes(process, renderer, every_s=NOTE_EVERY_S)) as notes:
            yield AgentWorkflow(
                agent, sessions, url, config.agent, timeout_s=timeout_s, record=record, note=notes.write
            )


def request_s(config: Config) -> float:
    """Longest wait within an agent's request: the episode's time limit, and the time in which that does not run since
    satellites are in Slurm's queue."""
    return config.rollout.timeout_s + queue_s(config)


def opener(process: RoleProcess, sessions: Sessions, generator: Generator) -> Open:
    """Opens sessions for whoever asks over HTTP; each samples by a seed of its own."""
    config = process.config
    number = itertools.count(process.index, config.rollout.workers)  # another worker's are others
    limits = Limits.of(config.agent)

    def open_session(*, key: str = "") -> Session:
        seed = derive_seed(config.seed, process.epoch, process.incarnation, next(number))
        return sessions.open(
            generator=generator,
            sampling=sampling(config.rollout.sampling, seed),
            max_tokens=config.model.max_tokens,
            limits=limits,
            key=key,
        )

    return open_session


class Notes:
    """Writes down, for the page, sessions that have ended.

    Args:
        every_s: at most one session in so many seconds is written, and fewer where one takes long to write; 0 writes
            all.
    """

    def __init__(
        self,
        scribe: Scribe,
        spelled: Spelled,
        discount: float,
        every_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scribe, self._spelled, self._discount, self._every_s = scribe, spelled, discount, every_s
        self._clock, self._next = clock, 0.0

    def write(self, session: Session, said: Mapping[str, Any]) -> None:
        began = self._clock()
        if self._every_s and began < self._next:
            return
        turns = turns_of(session, self._spelled, self._discount)
        self._scribe.write({"summary": summary_of(session, said, self._discount), "turns": turns})
        self._next = began + max(self._every_s, (self._clock() - began) / NOTE_SHARE)

    def close(self) -> None:
        self._scribe.close()


def make_notes(process: RoleProcess, renderer: ChatRenderer, every_s: float = 0.0) -> Notes:
    name = f"{process.epoch:08d}-{process.name}-{process.incarnation}"
    scribe = Scribe(process.run.sessions, name)
    return Notes(scribe, renderer.spelled, process.config.agent.discount, every_s)


def make_board(process: RoleProcess, renderer: ChatRenderer, live: Callable[[], Iterable[Session]]) -> Board:
    return Board(
        name=process.config.name,
        chronicle=Chronicle(process.run.sessions),
        curve=Course(process.run).told,
        live=live,
        spelled=renderer.spelled,
        discount=process.config.agent.discount,
        worker=process.name,
        others=partial(other_pages, process),
    )


def other_pages(process: RoleProcess) -> dict[str, str]:
    """Where the attempt's other rollout workers serve their pages, by name, as far as they are up."""
    found = {}
    for index in range(process.config.rollout.workers):
        record = read_if_listed(process.attempt.endpoint("rollout", index)) or {}
        if f"rollout-{index}" != process.name and "agents_url" in record:
            found[f"rollout-{index}"] = f"{record['agents_url']}/"
    return found
