"""The HTTP routes by which weights come in, of every engine that we serve, and by which the embedded one's are read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from aiohttp import web

from areal_hpc.buckets import dtype_named
from areal_hpc.errors import WeightUpdateError
from areal_hpc.generation.served.exchange import list_field, need, number_field, outcome, read_body, text_field
from areal_hpc.generation.served.request import LARGEST
from areal_hpc.transfer import GroupAddress, TensorSpec

DEFAULT_GROUP = "weight_update_group"
FLATTENED = "flattened_bucket"
MAX_RANKS = 1 << 20
DIGITS = re.compile(r"[0-9]{1,9}")

T = TypeVar("T")


class Updates(Protocol):
    """What an engine does with new weights; ``embedded/updates.py`` explains it. Calls block, and are made in threads.

    Every method raises WeightUpdateError when the weights could not be taken as asked.
    """

    def join(self, address: GroupAddress, rank: int) -> None: ...

    def leave(self, name: str) -> None: ...

    def begin(self) -> None: ...

    def load_bucket(
        self,
        group: str,
        specs: Sequence[TensorSpec],
        *,
        flattened: bool,
        checked: bool,
        version: str | None,
        flush_cache: bool,
        abort_all: bool,
    ) -> None: ...

    def end(self) -> None: ...

    def load_directory(self, directory: Path, version: str | None, *, flush_cache: bool, abort_all: bool) -> int: ...

    def name_version(self, version: str, *, abort_all: bool) -> None: ...


class Readable(Protocol):
    """An engine that tells what it holds."""

    def checksums(self) -> dict[str, int]: ...

    def first_values(self, name: str, num: int) -> list[list[float]]: ...


async def _run(action: Callable[[], T]) -> T:
    """Run ``action`` in a thread that may block on the trainer."""
    return await asyncio.shield(asyncio.to_thread(action))


class WeightRoutes:
    """One method for each route. Each runs to its end even when the client hangs up: half an update helps nobody."""

    def __init__(self, updates: Updates) -> None:
        self._updates = updates

    def table(self) -> list[web.RouteDef]:
        return [
            web.post("/init_weights_update_group", self.init_group),
            web.post("/destroy_weights_update_group", self.destroy_group),
            web.post("/begin_weight_update", self.begin),
            web.post("/update_weights_from_distributed", self.from_distributed),
            web.post("/end_weight_update", self.end),
            web.post("/update_weights_from_disk", self.from_disk),
            web.post("/update_weight_version", self.name_version),
        ]

    async def init_group(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        world_size = number_field(body, "world_size", 1, MAX_RANKS)
        rank = number_field(body, "rank_offset", 0, world_size - 1)
        address = GroupAddress(
            host=text_field(body, "master_address"),
            port=number_field(body, "master_port", 1, 65535),
            name=text_field(body, "group_name", DEFAULT_GROUP),
            world_size=world_size,
            backend=text_field(body, "backend", "gloo"),
        )
        await _run(lambda: self._updates.join(address, rank))
        return outcome(True, f"Joined group {address.name} as rank {rank} of {world_size}.")

    async def destroy_group(self, request: web.Request) -> web.Response:
        name = text_field(await read_body(request), "group_name", DEFAULT_GROUP)
        await _run(lambda: self._updates.leave(name))
        return outcome(True, f"Left group {name}.")

    async def begin(self, _: web.Request) -> web.Response:
        await _run(self._updates.begin)
        return outcome(True, "Weight update begun.")

    async def from_distributed(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        load_format = body.get("load_format")
        if load_format not in (None, FLATTENED):
            raise WeightUpdateError(f"load_format {load_format!r} is not known; use null or {FLATTENED}")
        if load_format is None and body.get("nums_changed") is not None:
            raise WeightUpdateError(f"deltas come packed; send load_format {FLATTENED}")
        specs, group = _specs_of(body), text_field(body, "group_name", DEFAULT_GROUP)
        await _run(
            lambda: self._updates.load_bucket(
                group,
                specs,
                flattened=load_format == FLATTENED,
                checked=body.get("checksums") is not None,
                **_options(body),
            )
        )
        return outcome(True, f"Loaded {len(specs)} tensors.")

    async def end(self, _: web.Request) -> web.Response:
        await _run(self._updates.end)
        return outcome(True, "Weight update ended.")

    async def from_disk(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        directory = Path(text_field(body, "model_path"))
        num_paused = await _run(lambda: self._updates.load_directory(directory, **_options(body)))
        return outcome(True, f"Loaded {directory}.", num_paused_requests=num_paused)

    async def name_version(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        version = str(need(body, "new_version")[0])
        abort_all = body.get("abort_all_requests", True)
        await _run(lambda: self._updates.name_version(version, abort_all=abort_all))
        return outcome(True, f"Weight version is {version}.", new_version=version)


class ParameterRoutes:
    """What the engine holds, to be compared."""

    def __init__(self, updates: Readable) -> None:
        self._updates = updates

    def table(self) -> list[web.RouteDef]:
        return [
            web.post("/weights_checker", self.check),
            web.get("/get_weights_by_name", self.first_values),
            web.post("/get_weights_by_name", self.first_values),
        ]

    async def check(self, request: web.Request) -> web.Response:
        """CRC-32C of every parameter: ``ranks`` has one entry, for this engine has one rank."""
        action = (await read_body(request)).get("action", "checksum")
        if action != "checksum":
            raise WeightUpdateError(f"action {action!r} is not supported; use checksum")
        checksums = await _run(self._updates.checksums)
        return outcome(True, f"Checksums of {len(checksums)} tensors.", ranks=[{"checksums": checksums}])

    async def first_values(self, request: web.Request) -> web.Response:
        body = {**request.query, **await read_body(request)}
        if isinstance(size := body.get("truncate_size"), str):  # of a query
            body["truncate_size"] = int(size) if DIGITS.fullmatch(size) else size
        name, num = text_field(body, "name"), number_field(body, "truncate_size", 0, default=100)
        return web.json_response(await _run(lambda: self._updates.first_values(name, num)))


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    """The options that both ways of loading share, with SGLang's defaults."""
    version = body.get("weight_version")
    return {
        "version": None if version is None else str(version),
        "flush_cache": bool(body.get("flush_cache", True)),
        "abort_all": bool(body.get("abort_all_requests", False)),
    }


def _specs_of(body: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """The specs in a request. Raises DataError for fields of other types, WeightUpdateError as ``specs_from``."""
    texts = {name: list_field(body, name, lambda one: isinstance(one, str), "texts") for name in ("names", "dtypes")}
    shapes = list_field(body, "shapes", _is_shape, "shapes")
    numbers: dict[str, list[Any] | None] = {
        name: None if body.get(name) is None else list_field(body, name, fits, "integers")
        for name, fits in (("checksums", _is_size), ("nums_changed", lambda one: one is None or _is_size(one)))
    }
    return specs_from(texts["names"], texts["dtypes"], shapes, numbers["checksums"], numbers["nums_changed"])


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_size, value))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= LARGEST


def specs_from(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    checksums: Sequence[int] | None,
    nums_changed: Sequence[int | None] | None = None,
) -> tuple[TensorSpec, ...]:
    """One spec for each tensor of a request; without ``checksums`` their field means nothing.

    Raises:
        WeightUpdateError: the lists differ in length, a dtype is unknown, or there are deltas without checksums.
    """
    if nums_changed is not None and checksums is None:
        raise WeightUpdateError("a delta needs the checksum of what it makes; send checksums, or whole tensors")
    nums_changed = [None] * len(names) if nums_changed is None else nums_changed
    checksums = [0] * len(names) if checksums is None else checksums
    if not len(names) == len(dtypes) == len(shapes) == len(checksums) == len(nums_changed):
        raise WeightUpdateError("names, dtypes, shapes, checksums and nums_changed must have one entry for each tensor")
    specs = tuple(
        TensorSpec(
            name=name, dtype=dtype.removeprefix("torch."), shape=tuple(shape), checksum=crc, num_changed=num_changed
        )
        for name, dtype, shape, crc, num_changed in zip(names, dtypes, shapes, checksums, nums_changed, strict=True)
    )
    for spec in specs:
        dtype_named(spec.dtype)
    return specs
