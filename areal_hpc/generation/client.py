"""One engine, as a rollout worker (``Generator``) and a trainer (``WeightTarget``) see it, over SGLang's native API.

    rollout worker                                   trainer
    answer = await client.generate(request)          await client.prepare()
      interrupted? ask again for what is missing     await client.join(group, rank)          each membership
      updated meanwhile? each token has its version  await client.load_bucket(name, specs)   each bucket
                                                     await client.pause()                    or before the first
                                                     await client.resume(version)

How running requests live through an update depends on what the engine can do (``PauseMode``). SGLang from 0.5.21 on
takes them back into its queue and computes their prefixes anew, so that every token comes from the weights it is said
to come from. Engines that report version spans and cannot do that freeze them in place, with their cache. Others end
them: what they have so far comes back, and the client asks for the rest. So an answer without spans has one version.
A stop string that straddles such an interruption is not seen by the engine; stop token ids always are.

One client belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from areal_hpc.collective import bracketed
from areal_hpc.errors import GenerationError, RequestRefused, WeightUpdateError
from areal_hpc.generation import manifest
from areal_hpc.generation.answers import (
    Answer,
    BadAnswer,
    Refusal,
    join_answers,
    narrowed_body,
    new_tokens,
    parse_answer,
    reason_of,
    request_body,
    version_number,
)
from areal_hpc.generation.capabilities import Capabilities, PauseMode
from areal_hpc.generation.connection import Address, Connection, EngineLost, excerpt
from areal_hpc.generation.routed import asking_for_experts, told_experts
from areal_hpc.routing import ExpertRecord, Routing
from areal_hpc.transfer import GroupAddress, Reception, TensorSpec
from areal_hpc.types import Completion, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Longest times of one call, in seconds."""

    connect_s: float = 10.0
    generate_s: float = 1800.0
    """A whole completion, with its interruptions and the pauses it sits through."""
    probe_s: float = 10.0
    """Health and self-description: an engine that is alive answers at once, whatever it does."""
    admin_s: float = 30.0
    """Pause, continue, abort, version."""
    load_s: float = 120.0
    """Joining a group, and taking one bucket or one directory of weights."""


@dataclass(slots=True)
class _InFlight:
    """A request that has not been answered to the caller yet."""

    rid: str
    aborted: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)


class EngineClient:
    """A client of the engine replica at ``url``.

    Args:
        name: what errors and reports call the engine.
        num_ranks: its tensor-parallel ranks, each a member of a weight group.
        token: what its server asks for, or the file that holds it; empty for none.
        version: weights it was started with, for engines that call them "default".
        incarnation: which of the processes that have been this engine answers at ``url``.
        yields_s: lowers the priority of this client's requests, where the engine orders its queue: one is served as if
            it had arrived so many seconds later, rounded up to the queue's resolution (``Capabilities.queue_s``).
        locate: where the engine is now, for one that is started again elsewhere after its death; asked by ``reach``.
        routing: of its model, if every answer is to come with the experts that computed it.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        num_ranks: int = 1,
        token: str | Path = "",
        version: int = 0,
        limits: Limits | None = None,
        incarnation: int = 0,
        yields_s: float = 0.0,
        locate: Callable[[], Address | None] | None = None,
        routing: Routing | None = None,
    ) -> None:
        self.name = name
        self.num_ranks = num_ranks
        self.limits = limits or Limits()
        self._initial = version
        self.incarnation = incarnation
        self._locate, self._yields_s, self._routing = locate, yields_s, routing
        self._http = Connection(name, url, token=token, connect_s=self.limits.connect_s)
        self._probing = asyncio.Lock()
        self._in_flight: dict[str, _InFlight] = {}
        self._know_nothing()

    def _know_nothing(self) -> None:
        """Reset all that is known of the engine's process, or was told to it: for a new process none of it holds."""
        self.version = self._initial
        self._capabilities: Capabilities | None = None
        self._has_sessions = True  # /begin_weight_update exists, until it answers 404
        self._in_session = False
        self._broken = False  # a call of the update at hand failed
        self._outdated = ""  # why it must serve nothing

    def __repr__(self) -> str:
        return str(self._http)

    async def close(self) -> None:
        """Close the connections; the engine runs on."""
        await self._http.close()

    async def probe(self) -> int:
        """The version that the engine serves, asked now.

        Raises:
            GenerationError: it is not healthy.
        """
        await self.reach()
        if (await self._probed()).quarantined:
            raise GenerationError(f"{self!r} is quarantined: an update of its weights failed half-way")
        return self.version

    def moved(self) -> Address | None:
        """Where the engine is now, if that is another process than the one this client talks to."""
        address = self._locate() if self._locate is not None else None
        return None if address is None or address.incarnation == self.incarnation else address

    async def reach(self) -> None:
        """Find the engine where it is now, alive; whether it may serve is another question.

        Raises:
            GenerationError: it does not answer, or it is not healthy.
        """
        if (address := self.moved()) is not None:
            self.incarnation = address.incarnation
            self._know_nothing()  # before anything is awaited: whoever is cancelled there leaves nothing half done
            await self._http.move(address.url, address.token)
        status, answer = await self._http.call("GET", "/health", None, self.limits.probe_s)
        self._http.accepted("/health", status, answer)
        self._capabilities = None  # it may be another process by now

    async def _probed(self) -> Capabilities:
        """The engine's capabilities, asked once for each life of it."""
        async with self._probing:
            if self._capabilities is None:
                self._capabilities = await self._describe()
            return self._capabilities

    async def _describe(self) -> Capabilities:
        info = await self._described("/server_info", "/get_server_info")
        model = await self._described("/model_info", "/get_model_info")
        try:
            self.version = version_number(model.get("weight_version"), self._initial)
        except BadAnswer as error:
            raise GenerationError(f"{self!r} cannot be used: {error}") from error
        return Capabilities.read(info)

    async def _described(self, path: str, old_path: str) -> Mapping[str, Any]:
        status, answer = await self._http.call("GET", path, None, self.limits.probe_s)
        if status == 404:
            status, answer = await self._http.call("GET", old_path, None, self.limits.probe_s)
        answer = self._http.accepted(path, status, answer)
        if not isinstance(answer, Mapping):
            raise GenerationError(f"{self!r} does not describe itself at {path}: {excerpt(answer)}")
        return answer

    # Generator

    async def generate(self, request: GenerationRequest) -> Completion:
        """One completion; an answer that the engine cut short is continued until it is whole or ``abort`` is called.

        Raises:
            EngineRefused: nothing was sent.
            EngineLost: it broke off, or did not finish in time.
            RequestRefused: it says what is wrong with the request.
            GenerationError: it answered with an error or with garbage, or it missed a weight update.
        """
        if self._outdated:
            raise GenerationError(f"{self!r} serves nothing: {self._outdated}")
        assert request.request_id not in self._in_flight, f"request {request.request_id} is in flight"
        flight = self._in_flight[request.request_id] = _InFlight(request.request_id)
        try:
            async with asyncio.timeout(self.limits.generate_s):
                return await self._complete(request, flight)
        except TimeoutError as error:
            raise EngineLost(f"{self!r} did not finish a request in {self.limits.generate_s:g} s") from error
        except Refusal as error:
            raise RequestRefused(f"{self!r} refuses the request: {error}") from error
        except BadAnswer as error:
            raise GenerationError(f"{self!r} gave an answer that cannot be used: {error}") from error
        finally:
            del self._in_flight[request.request_id]
            flight.done.set()

    async def _complete(self, request: GenerationRequest, flight: _InFlight) -> Completion:
        budget = request.sampling.max_new_tokens
        answers: list[Answer] = []
        so_far: list[int] = []
        records: list[ExpertRecord] = []
        idle = 0
        while not flight.aborted:
            flight.rid = f"{request.request_id}#{len(answers)}" if answers else request.request_id
            body = request_body(request, flight.rid, so_far)
            if self._routing is not None:
                body = asking_for_experts(body, request.experts_from + sum(map(len, records)))
            answer = await self._ask(request, body, budget - len(so_far))
            answers.append(answer)
            so_far.extend(answer.token_ids)
            records += [] if answer.experts is None else [answer.experts]
            if answer.stop.is_complete() or len(so_far) == budget:
                break
            idle = 0 if answer.token_ids else idle + 1
            await asyncio.sleep(min(1.0, 0.05 * idle))  # interrupted before its first token: still being updated
        completion = join_answers(answers, budget)
        if self._routing is None:
            return completion
        num_tokens = len(request.token_ids) - request.experts_from + len(so_far)
        return replace(completion, experts=self._routing.whole(records, num_tokens))

    async def _ask(self, request: GenerationRequest, body: dict[str, Any], budget: int) -> Answer:
        capabilities = self._capabilities or await self._probed()
        if request.sampling.is_narrowed:
            body = narrowed_body(body, capabilities.narrowed)
        if (unit_s := capabilities.queue_s) is not None:
            body = {**body, "priority": int(time.time() / unit_s) + math.ceil(self._yields_s / unit_s)}
        pinned, incarnation = self.version, self.incarnation
        each = None if request.on_tokens is None else new_tokens(request.on_tokens)
        status, answer = await self._http.call("POST", "/generate", body, self.limits.generate_s, each=each)
        if status != 200:
            raise Refusal(reason_of(answer)) if status == 400 else BadAnswer(f"status {status}, {excerpt(answer)}")
        parsed = parse_answer(
            answer,
            budget=budget,
            pinned=pinned,
            initial=self._initial,
            in_place=capabilities.spans,
            num_top=request.num_top,
            narrowed="return_sampling_mask" in body,
        )
        if self._routing is not None:
            parsed = replace(parsed, experts=told_experts(answer, body, len(parsed.token_ids), self._routing))
        if incarnation == self.incarnation:
            self.version = max(self.version, *parsed.versions[-1:], pinned)
        return parsed

    async def abort(self, request_id: str) -> None:
        """End a request; its ``generate`` then returns what there is, with stop reason ``ABORT``.

        SGLang 0.5.21 loses an abort of a request that came during a pause, before the pause is over, and heeds no
        second one: such a request runs to its end.

        Raises:
            GenerationError: the engine took the order and went on with the request.
        """
        flight = self._in_flight.get(request_id)
        if flight is None:
            return
        flight.aborted = True
        limit_s = self.limits.admin_s
        try:
            async with asyncio.timeout(limit_s):
                while not flight.done.is_set():  # again, since the order may have crossed a continuation on its way
                    await self._http.order("/abort_request", {"rid": flight.rid}, limit_s)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(flight.done.wait(), 1.0)
        except TimeoutError as error:
            raise GenerationError(f"{self!r} runs request {request_id} {limit_s:g} s after its abort") from error

    # WeightTarget

    async def join(self, group: GroupAddress, rank_offset: int) -> None:
        """Enter a weight group as ranks ``rank_offset`` and the following; returns when the group is complete."""
        body = {
            "master_address": bracketed(group.host),
            "master_port": group.port,
            "rank_offset": rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._once("/init_weights_update_group", body)

    async def leave(self, group_name: str) -> None:
        """Drop a weight group. An engine that knows no group of that name has left it just as well."""
        await self._order("/destroy_weights_update_group", {"group_name": group_name}, also=400)

    async def prepare(self) -> Reception:
        """Clear what a failed update has left, before the next one; returns how this engine takes buckets."""
        try:
            capabilities = await self._probed()
            if self._in_session and not capabilities.stages:  # either answer leaves none open; who stages drops it
                await self._http.call("POST", "/end_weight_update", {}, self.limits.admin_s)
            self._in_session = False
        except GenerationError as error:
            raise WeightUpdateError(f"{self!r} cannot take new weights: {error}") from error
        self._broken = False
        proves = capabilities.checksums or capabilities.manifests
        return Reception(stages=capabilities.stages, proves=proves)

    async def pause(self) -> None:
        """Stop sampling. Running requests freeze, or come back as far as they are where updates interrupt."""
        try:
            mode = (await self._probed()).pause_mode()
            await self._http.order("/pause_generation", {"mode": mode}, self.limits.admin_s)
        except GenerationError as error:
            raise WeightUpdateError(f"{self!r} cannot be paused: {error}") from error

    async def load_bucket(self, group_name: str, specs: Sequence[TensorSpec]) -> None:
        """Receive one bucket that rank 0 broadcasts at the same time."""
        await self._begin_session()
        capabilities = self._capabilities
        if any(spec.num_changed is not None for spec in specs) and not (capabilities and capabilities.deltas):
            raise WeightUpdateError(f"{self!r} takes whole tensors only; set weights.delta=false")
        body = manifest.bucket_body(group_name, specs, capabilities)
        await self._once("/update_weights_from_distributed", body)

    async def _begin_session(self) -> None:
        """Engines from SGLang 0.5.21 on load weights between a begin and an end; older ones know neither."""
        if self._in_session or not self._has_sessions:
            return
        self._in_session = True  # whatever comes back: a lost answer may have opened it
        self._in_session = self._has_sessions = await self._once("/begin_weight_update", {}, may_lack=True)

    async def load_directory(self, path: str, version: int) -> None:
        """Load the safetensors files in ``path``, which the engine's machine must see."""
        body = {"model_path": path, "weight_version": str(version), "flush_cache": False, "abort_all_requests": False}
        await self._once("/update_weights_from_disk", body)

    async def resume(self, version: int) -> None:
        """Sample on, under the name ``version``. What was cached for finished requests is forgotten where possible.

        Raises:
            WeightUpdateError: the engine refuses, or it did not take the weights whole since the last pause.
        """
        if self._broken:
            raise WeightUpdateError(f"{self!r} is not resumed: {self._outdated}")
        if self._in_session:
            await self._once("/end_weight_update", {})
            self._in_session = False
        await self._order("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        # Prefixes computed by old weights go. Frozen requests need theirs: an engine that has any refuses, with 400.
        frozen = self._capabilities is not None and self._capabilities.pause_mode() is PauseMode.IN_PLACE
        await self._order("/flush_cache", {}, also=400 if frozen else 200)
        await self._order("/continue_generation", {})
        self.version = version
        self._outdated = ""

    async def _once(self, path: str, body: dict[str, Any], *, may_lack: bool = False) -> bool:
        """A call that must not be repeated: when it fails, nobody knows what the engine holds.

        Returns:
            False where the engine lacks the call, which ``may_lack`` allows.
        """
        taken = False
        try:
            status, answer = await self._http.call("POST", path, body, self.limits.load_s)
            if status != 404 or not may_lack:
                self._http.accepted(path, status, answer)
            taken = True
        except GenerationError as error:
            raise WeightUpdateError(str(error)) from error
        finally:
            if not taken:  # a cancelled call, too, leaves weights that nobody knows
                self._broken, self._outdated = True, f"it missed a weight update, at {path}"
        return status != 404

    async def _order(self, path: str, body: dict[str, Any], *, also: int = 200) -> None:
        """A weight-update call that may be repeated; ``also`` is another status that means success."""
        try:
            await self._http.order(path, body, self.limits.admin_s, also=also)
        except GenerationError as error:
            raise WeightUpdateError(str(error)) from error
