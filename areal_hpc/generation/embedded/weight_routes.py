"""The HTTP routes by which weights come in and are read back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from areal_hpc.errors import WeightUpdateError
from areal_hpc.generation.embedded.engine import EmbeddedEngine
from areal_hpc.generation.embedded.exchange import need, outcome, read_body
from areal_hpc.generation.embedded.updates import specs_from
from areal_hpc.types import GroupAddress

DEFAULT_GROUP = "weight_update_group"
FLATTENED = "flattened_bucket"

T = TypeVar("T")


class WeightRoutes:
    """One method for each route. Each runs to its end even when the client hangs up: half an update helps nobody."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._updates = engine.updates

    def table(self) -> list[web.RouteDef]:
        return [
            web.post("/init_weights_update_group", self.init_group),
            web.post("/destroy_weights_update_group", self.destroy_group),
            web.post("/begin_weight_update", self.begin),
            web.post("/update_weights_from_distributed", self.from_distributed),
            web.post("/end_weight_update", self.end),
            web.post("/update_weights_from_disk", self.from_disk),
            web.post("/update_weight_version", self.name_version),
            web.post("/weights_checker", self.check),
            web.get("/get_weights_by_name", self.first_values),
            web.post("/get_weights_by_name", self.first_values),
        ]

    async def _run(self, action: Callable[[], T]) -> T:
        """Run ``action`` in a thread that may block on the trainer."""
        return await asyncio.shield(asyncio.to_thread(action))

    async def init_group(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        host, port, rank, world_size = need(body, "master_address", "master_port", "rank_offset", "world_size")
        address = GroupAddress(
            host=host,
            port=int(port),
            name=body.get("group_name", DEFAULT_GROUP),
            world_size=int(world_size),
            backend=body.get("backend", "gloo"),
        )
        await self._run(lambda: self._updates.join(address, int(rank)))
        return outcome(True, f"Joined group {address.name} as rank {rank} of {world_size}.")

    async def destroy_group(self, request: web.Request) -> web.Response:
        name = (await read_body(request)).get("group_name", DEFAULT_GROUP)
        await self._run(lambda: self._updates.leave(name))
        return outcome(True, f"Left group {name}.")

    async def begin(self, _: web.Request) -> web.Response:
        await self._run(self._updates.begin)
        return outcome(True, "Weight update begun.")

    async def from_distributed(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        names, dtypes, shapes = need(body, "names", "dtypes", "shapes")
        load_format = body.get("load_format")
        if load_format not in (None, FLATTENED):
            raise WeightUpdateError(f"load_format {load_format!r} is not known; use null or {FLATTENED}")
        if load_format is None and body.get("nums_changed") is not None:
            raise WeightUpdateError(f"deltas come packed; send load_format {FLATTENED}")
        specs = specs_from(names, dtypes, shapes, body.get("checksums"), body.get("nums_changed"))
        await self._run(
            lambda: self._updates.load_bucket(
                body.get("group_name", DEFAULT_GROUP),
                specs,
                flattened=load_format == FLATTENED,
                checked=body.get("checksums") is not None,
                **_manner(body),
            )
        )
        return outcome(True, f"Loaded {len(specs)} tensors.")

    async def end(self, _: web.Request) -> web.Response:
        await self._run(self._updates.end)
        return outcome(True, "Weight update ended.")

    async def from_disk(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        directory = Path(need(body, "model_path")[0])
        num_paused = await self._run(lambda: self._updates.load_directory(directory, **_manner(body)))
        return outcome(True, f"Loaded {directory}.", num_paused_requests=num_paused)

    async def name_version(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        version = str(need(body, "new_version")[0])
        abort_all = body.get("abort_all_requests", True)
        await self._run(lambda: self._updates.name_version(version, abort_all=abort_all))
        return outcome(True, f"Weight version is {version}.", new_version=version)

    async def check(self, request: web.Request) -> web.Response:
        """CRC-32C of every parameter: ``ranks`` has one entry, for this engine has one rank."""
        action = (await read_body(request)).get("action", "checksum")
        if action != "checksum":
            raise WeightUpdateError(f"action {action!r} is not supported; use checksum")
        checksums = await self._run(self._updates.checksums)
        return outcome(True, f"Checksums of {len(checksums)} tensors.", ranks=[{"checksums": checksums}])

    async def first_values(self, request: web.Request) -> web.Response:
        body = {**request.query, **await read_body(request)}
        name, num = need(body, "name")[0], int(body.get("truncate_size", 100))
        return web.json_response(await self._run(lambda: self._updates.first_values(name, num)))


def _manner(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the two ways of loading have in common, with SGLang's defaults."""
    version = body.get("weight_version")
    return {
        "version": None if version is None else str(version),
        "flush_cache": bool(body.get("flush_cache", True)),
        "abort_all": bool(body.get("abort_all_requests", False)),
    }
