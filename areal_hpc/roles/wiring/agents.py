"""What runs an episode: the configured workflow, or an agent behind a service of its own in this process."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from areal_hpc.config.schema import Config, ToolFormatName
from areal_hpc.dialogue.probe import tool_trouble
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.dialogue.tool_formats import FORMATS, detect
from areal_hpc.errors import ConfigError
from areal_hpc.protocols import Generator, Workflow
from areal_hpc.proxy.agent import Agent, AgentWorkflow, command_agent, python_agent, shared_http_client
from areal_hpc.proxy.app import Service, serve
from areal_hpc.proxy.calls import Dialect
from areal_hpc.proxy.sessions import Sessions
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.engines import dotted
from areal_hpc.rollout.episodes import sampling


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


def make_dialect(renderer: ChatRenderer, name: ToolFormatName) -> Dialect:
    written = FORMATS[detect(renderer.template) if name is ToolFormatName.AUTO else name]
    return Dialect(dialogue=renderer, written=written, trouble=tool_trouble(renderer))


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
        dialect=make_dialect(renderer, config.agent.tool_format),
        model=Path(config.model.path).name,
        open_session=partial(
            sessions.open,
            generator=generator,
            sampling=sampling(config.rollout.sampling, config.seed),
            max_tokens=config.model.max_tokens,
            max_turns=config.agent.max_turns,
        ),
        admin_token=process.token,
        discount=config.agent.discount,
    )
    async with serve(service) as url, shared_http_client() as http_client:
        process.publish_endpoint({"agents_url": url})
        agent = make_agent(config, http_client)
        timeout_s, record = config.rollout.timeout_s, process.recorder.record
        yield AgentWorkflow(agent, sessions, url, config.agent, timeout_s=timeout_s, record=record)
