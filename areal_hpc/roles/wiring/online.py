"""What a rollout worker works with that serves agents in daily use, instead of running episodes of its own."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.keys import make_key
from areal_hpc.protocols import Generator, RolloutWriter
from areal_hpc.proxy.app import Service, serve
from areal_hpc.proxy.chronicle import Chronicle
from areal_hpc.proxy.online import Online, Score
from areal_hpc.proxy.sessions import Sessions
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.agents import make_board, make_dialect, make_notes, opener
from areal_hpc.rollout.online import OnlineRunner, RunningBaseline
from areal_hpc.rollout.runner import PromptStream
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import add_secret

log = logging.getLogger(__name__)

AGENT_KEY = "agent-key"
NEVER_S = 1e9
"""Sessions end by the rules of ``proxy.online``, and are closed once they are taken."""


def standing_key(path: Path) -> str:
    """What an agent's settings hold: made once for a run and its owner, in a file that only he can read.

    Raises:
        RunDirError: the file is empty.
    """
    key = make_key(path, "sk-")
    add_secret(key)
    return key


def rewards_so_far(run: RunDir) -> list[float]:
    """Rewards of the episodes without a group that were handed to the trainer, as far as they are written down."""
    chronicle = Chronicle(run.sessions)
    chronicle.poll()
    alone = (one for one in chronicle.summaries() if one["outcome"] == "sealed" and not one["group"])
    return [float(one["worth"]) for one in alone]


@asynccontextmanager
async def make_online(
    process: RoleProcess,
    renderer: ChatRenderer,
    generator: Generator,
    *,
    writer: RolloutWriter,
    stream: PromptStream,
    score: Score | None,
) -> AsyncIterator[OnlineRunner]:
    """The loop that seals what agents finish, while the service is up."""
    config, agent, run = process.config, process.config.agent, process.run
    key_file = run.secrets / AGENT_KEY
    sessions = Sessions(renderer, idle_s=NEVER_S)
    open_session = opener(process, sessions, generator)
    with closing(make_notes(process, renderer)) as notes:
        online = Online(
            sessions, open_session, agent, standing_key=standing_key(key_file), score=score, note=notes.write
        )
        service = Service(
            sessions=sessions,
            dialect=make_dialect(renderer, agent.tool_format, config.generation.backend),
            model=Path(config.model.path).name,
            open_session=open_session,
            admin_token=process.token,
            discount=agent.discount,
            online=online,
            board=make_board(process, renderer, online.shown),
        )
        async with serve(service, host=agent.online.host, port=agent.online.port) as url:
            process.publish_endpoint({"agents_url": url})
            process.recorder.record("service", {"url": url, "key_file": str(key_file)})
            log.info("serving agents at %s/v1; their key is in %s", url, key_file)
            yield OnlineRunner(
                take=online.take,
                stream=stream,
                writer=writer,
                filters=config.rollout.filter,
                baseline=RunningBaseline(agent.online.baseline_window, rewards_so_far(run)),
                max_staleness=config.buffer.max_staleness,
                concurrency=config.rollout.concurrency,
                patience_s=config.limits.starve_s,
                record=process.recorder.record,
            )
