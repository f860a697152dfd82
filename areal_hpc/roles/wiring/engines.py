"""Clients of all engines of an attempt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_hpc.buffer.control import read_replaced
from areal_hpc.config.derived import engine_ranks, takes_satellites, without_engines_s
from areal_hpc.config.schema import Config
from areal_hpc.fs import read_if_listed
from areal_hpc.generation.client import EngineClient, Limits
from areal_hpc.generation.connection import Address
from areal_hpc.generation.router import Capacity, Router
from areal_hpc.keys import engine_token
from areal_hpc.liveness import seats
from areal_hpc.pretrained.architecture import read_architecture
from areal_hpc.roles.process import RoleProcess
from areal_hpc.routing import Routing
from areal_hpc.telemetry import add_secret

EVALUATION_YIELDS_S = 60.0
"""What training asks for goes before an evaluation's request that came so much earlier, and no later: where engines
always have more to do than they can, an evaluation would never end else."""


def token_of(process: RoleProcess, index: int, incarnation: int) -> str:
    """The ``engine_token`` of an engine of this attempt; kept out of this process's log."""
    token = engine_token(process.token, process.epoch, index, incarnation)
    add_secret(token)
    return token


class Roster:
    """Clients of the attempt's engines: of the run's own at once, of those that join when they have come up."""

    def __init__(self, process: RoleProcess) -> None:
        self._process = process
        self._joined = dict[int, EngineClient]()
        self._here = set[int]()

    def first(self) -> list[EngineClient]:
        """A client for every engine of the run's own, once they are up. Each follows its engine to where it is
        replaced."""
        process = self._process
        indices = range(process.config.generation.replicas)
        return [_client(process, index, process.endpoint_of("generator", index)) for index in indices]

    def look(self) -> tuple[list[EngineClient], set[str]]:
        """Clients of engines that have come since the last look, and the names of all that have left since they did. A
        seat that is taken again has the client that it had: it finds who sits there now."""
        attempt = self._process.attempt
        here = seats.present(attempt)
        for index in sorted(here.keys() - self._joined.keys()):
            if (endpoint := read_if_listed(attempt.endpoint("generator", index))) is not None:  # else: the next time
                self._joined[index] = _client(self._process, index, endpoint)
        before, self._here = self._here, here.keys() & self._joined.keys()
        come = [self._joined[index] for index in sorted(self._here - before)]
        return come, {client.name for index, client in self._joined.items() if index not in here}


def _client(process: RoleProcess, index: int, endpoint: Mapping[str, Any]) -> EngineClient:
    """A client of the engine that ``endpoint`` tells of."""
    config = process.config
    limits = Limits(
        generate_s=config.rollout.timeout_s, admin_s=config.limits.weight_update_s, load_s=config.limits.weight_update_s
    )

    def address(told: Mapping[str, Any]) -> Address:
        incarnation = int(told["incarnation"])
        return Address(url=told["url"], token=token_of(process, index, incarnation), incarnation=incarnation)

    def locate() -> Address | None:
        told = read_replaced(process.attempt.endpoint("generator", index))
        return None if told is None else address(told)

    first = address(endpoint)
    return EngineClient(
        f"generator-{index}",
        first.url,
        num_ranks=engine_ranks(config),
        token=first.token,
        limits=limits,
        incarnation=first.incarnation,
        yields_s=EVALUATION_YIELDS_S if process.role == "evaluator" else 0.0,
        locate=locate,
        routing=_routing(config) if config.model.routing_replay and process.role != "evaluator" else None,
    )


def _routing(config: Config) -> Routing:
    routing = read_architecture(Path(config.model.path)).routing
    assert routing is not None, "a model without experts was not refused"
    return routing


def make_router(process: RoleProcess) -> Router:
    """All engines of the attempt as one. A request waits for a replacement as long as that may take to come up, or for
    a satellite as long as that may take to join."""
    config, roster = process.config, Roster(process)
    generation = config.generation
    return Router(
        roster.first(),
        wait_s=without_engines_s(config),
        capacity=Capacity(max_requests=generation.max_requests, max_tokens=generation.max_outstanding_tokens),
        look=roster.look if takes_satellites(config) else None,
    )
