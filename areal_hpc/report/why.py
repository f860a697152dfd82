"""``areal-hpc why RUN``: who waits for whom, right now or when the run ended, and who is at the end of the chain."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from areal_hpc.cluster.components import ROLES
from areal_hpc.config.schema import LimitsConfig
from areal_hpc.errors import GenerationError
from areal_hpc.fs import read_if_listed
from areal_hpc.keys import engine_token, read_key
from areal_hpc.liveness.alone import alone
from areal_hpc.liveness.heartbeat import SILENT_S, read_heartbeats
from areal_hpc.liveness.observer import Observer, last_words
from areal_hpc.liveness.picture import Seen, explain, sentence
from areal_hpc.liveness.seats import vacant
from areal_hpc.liveness.stopping import ALIVE, state_of
from areal_hpc.privacy import owner_of
from areal_hpc.report.files import configuration
from areal_hpc.report.text import duration
from areal_hpc.run_dir import AttemptDir, RunDir

POLL_S = 0.25
PROCESSES = {role for roles in ROLES.values() for role in roles}
"""Whose logs are those of processes with a heartbeat; beside them lie logs of Slurm's steps and of engines' servers."""
ASK_S = 2.0
"""How long an engine is asked whether it answers."""


def why_lines(
    run: RunDir, *, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic
) -> list[str]:
    """What ``areal-hpc why`` prints, a line each. Takes a few seconds: only a heartbeat that changes proves a life."""
    attempt = run.newest_attempt()
    if attempt is None:
        return [f"run {run.root.name} has not been started"]
    limits, names = _limits(run), _names(attempt)
    state, owner = state_of(run, attempt.epoch)
    lives = state in ALIVE and not owner.is_gone()
    told = attempt.stall.read_text(encoding="utf-8").splitlines() if attempt.stall.is_file() else []
    about = None if told else (read_if_listed(attempt.state) or {}).get("about")  # the watchdog has told more
    head = f"run {run.root.name}, attempt {attempt.epoch}: {_state_text(state, lives, about)}"
    observer = Observer(attempt, silent_s=SILENT_S, start_s=limits.start_s, at_once=True, clock=clock)
    seen = _observe(observer, names, sleep, clock) if lives else _last_words(attempt, names)
    if not lives:
        return [head, *told, *(_explained(seen, limits.quiet_s) if seen else ["no process was cut off in a wait"])]
    if not seen:
        return [head, "no process has been started yet"]
    lonely = alone(attempt)
    engines = [f"no engine for {duration(time.time() - lonely.since)}: {lonely.text()}"] if lonely else []
    return [head, *engines, *_explained(seen, limits.quiet_s), *asyncio.run(_answers(run, attempt, names))]


def _explained(seen: Sequence[Seen], quiet_s: float) -> list[str]:
    explanation = explain(seen, quiet_s)
    trouble = f"stand still: {', '.join(explanation.trouble)}" if explanation.trouble else "nobody stands still"
    root = f"{trouble}; the chain ends with {explanation.root}"
    waits = [sentence(one.name, wait) for one in seen for wait in one.waits]
    return [*explanation.text().splitlines(), root, "all waits:", *(f"  {line}" for line in waits or ["none"])]


def _state_text(state: str, lives: bool, about: str | None) -> str:
    """``about``: what a launcher does while nobody else is there, or why an attempt failed."""
    text = ": ".join(filter(None, (state if lives or state not in ALIVE else "its launcher is gone", about)))
    return text if lives else f"{text}; this is what was last said"


def _names(attempt: AttemptDir) -> list[str]:
    """Every process that was started, by its log, without engines that had joined and have left."""
    listed = os.listdir(attempt.logs) if attempt.logs.is_dir() else []
    names = {name.removesuffix(".log") for name in listed if name.endswith(".log")}
    return sorted({name for name in names if name.rpartition("-")[0] in PROCESSES} - vacant(attempt))


def _limits(run: RunDir) -> LimitsConfig:
    """As the run has them; what it does not know yet has its default."""
    stated = configuration(run).get("limits", {})
    return LimitsConfig(**{field.name: stated[field.name] for field in fields(LimitsConfig) if field.name in stated})


def _observe(
    observer: Observer, names: Sequence[str], sleep: Callable[[float], None], clock: Callable[[], float]
) -> list[Seen]:
    """What all say, once their hearts were seen to beat; one whose heart was not by then is silent for certain."""
    seen = observer.look(names)
    deadline = clock() + SILENT_S
    while not all(map(observer.has_proof, seen)) and clock() < deadline:
        sleep(POLL_S)
        seen = observer.look(names)
    return seen


def _last_words(attempt: AttemptDir, names: Sequence[str]) -> list[Seen]:
    """Of those that did not end by themselves."""
    beats = read_heartbeats(attempt, names).items()
    return [last_words(name, beat) for name, beat in beats if beat is not None and not beat["ended"]]


async def _answers(run: RunDir, attempt: AttemptDir, names: Sequence[str]) -> list[str]:
    """What each engine says when it is asked itself: a heartbeat alone does not prove that requests are answered."""
    from areal_hpc.generation.client import EngineClient, Limits

    if run.token.exists() and not os.access(run.token, os.R_OK):
        return [f"engines are not asked themselves: {run.token} is the secret of {owner_of(run.token)}"]
    limits = Limits(connect_s=ASK_S, admin_s=ASK_S)

    async def ask(name: str, endpoint: Mapping[str, Any]) -> str:
        secret = read_key(run.token)
        token = engine_token(secret, attempt.epoch, int(name.rpartition("-")[2]), endpoint["incarnation"])
        client = EngineClient(name, endpoint["url"], token=token, limits=limits)
        try:
            return f"{name} answers requests and serves version {await client.probe()}"
        except GenerationError as error:
            return str(error)
        finally:
            await client.close()

    endpoints = {name: read_if_listed(attempt.endpoints / f"{name}.json") or {} for name in names}
    return list(await asyncio.gather(*(ask(name, one) for name, one in endpoints.items() if "url" in one)))
