"""How new weights come into vLLM: whole or not at all.

    join(address, rank)
    begin()
    load_bucket(...)   any number    every worker receives and proves it, and samples on meanwhile
    end()                            every weight of the checkpoint has come: the model is made of them

    load_directory(path)             the same from safetensors on disk; names and shapes are checked before

For the last step generation must be paused: in between the model is in parts. After an update that fails the trainer
has newer weights, and the model perhaps none that are worth anything, so the engine is quarantined: it serves nothing
until a whole update has been loaded.

Every step has a time limit. What the workers do in a thread may be late: it is given up, and sampling goes on. Workers
that do not answer hang, and vLLM ends, to be started anew. Of a load they tell how far it is, so that one that is slow
is told from one that hangs: starting anew would make it no faster. It is let go on to its end, though the trainer has
given it up. After ``LATE_LOADS`` of those in a row vLLM ends for good, with what to do.
"""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from areal_hpc.errors import WeightUpdateError
from areal_hpc.generation.served.merging import lora_of
from areal_hpc.generation.served.session import Session, opened, require_fresh, require_joined
from areal_hpc.generation.vllm.engine import VllmEngine
from areal_hpc.pretrained.files import HEAD, check_shapes, read_shapes, trainable
from areal_hpc.pretrained.lora import travelling_shapes
from areal_hpc.transfer import GroupAddress, TensorSpec
from areal_hpc.waits import LEADER, waiting
from areal_hpc.weight_files import shapes_in

POLL_S = 0.01
"""Between two looks at what workers wait for in a thread."""
LOOK_S = 0.5
"""Between two looks at how far a load is."""
LATE_LOADS = 3
"""Loads in a row that may be late before vLLM ends for good, with advice."""
GRACE_S = 1.0
"""By how much longer than a thread's own limit the thread is waited for: its own error says more than ours would."""

T = TypeVar("T")
HowFar = Callable[[], object]
"""Returns another value whenever there has been progress."""


class WeightUpdates:
    """Blocking calls, made from worker threads, one after the other.

    Every method raises WeightUpdateError when the weights could not be taken as asked.

    Args:
        loop: the engine's.
        timeout_s: longest time of one step.
        keeps: whether the workers keep a copy in host memory, so that changes alone may come.
        adapters: what ``merging.order`` says, where adapters come alone.
    """

    def __init__(
        self,
        engine: VllmEngine,
        loop: asyncio.AbstractEventLoop,
        *,
        timeout_s: float,
        keeps: bool = False,
        adapters: Mapping[str, Any] | None = None,
    ) -> None:
        self.keeps = keeps
        self._engine, self._loop = engine, loop
        self._timeout_s, self._adapters = timeout_s, adapters
        self._groups: set[str] = set()
        self._session: Session | None = None
        self._turn = threading.Lock()
        self._num_late = 0  # loads in a row
        self._loaded = Path(tempfile.gettempdir()) / f"loaded-{os.getpid()}"
        stored = read_shapes(engine.model_path)
        trained = {name: stored[name] for name in trainable(stored, engine.model_path)}
        self._shapes = trained if adapters is None else travelling_shapes(trained, lora_of(adapters))
        """Names and shapes of the tensors that an update must hold."""
        self._optional = {HEAD} - trained.keys() if adapters is None else set()
        """Names that it may hold besides: the output head of a model that ties it to the embedding."""

    @property
    def is_open(self) -> bool:
        """Whether an update has begun and not ended."""
        return self._session is not None

    def how_far(self) -> float | None:
        """Changes whenever a worker has loaded another tensor; None before the first."""
        return self._loaded.stat().st_mtime if self._loaded.exists() else None

    # -- groups

    def join(self, address: GroupAddress, rank: int) -> None:
        """Enter the trainer's group with all workers, the first as ``rank``; returns when all its ranks are there."""
        with self._turn:
            require_fresh(address.name, self._groups)
            try:
                with waiting(f"group {address.name} to form", LEADER, limit_s=self._timeout_s):
                    self._workers("areal_join", asdict(address), rank, self._timeout_s)
                    late = f"vLLM's workers did not join in {self._timeout_s:g} s"
                    self._until(lambda: all(self._workers("areal_entered", address.name)), late)
            except WeightUpdateError:
                if self._engine.alive():
                    self._workers("areal_leave", address.name)  # also those that have entered, or will
                raise
            self._groups.add(address.name)

    def leave(self, name: str) -> None:
        with self._turn:
            require_joined(name, self._groups)
            self._groups.discard(name)
            self._workers("areal_leave", name)

    # -- an update in buckets

    def begin(self) -> None:
        """Open an update. One that was open is given up.

        Raises:
            WeightUpdateError: a bucket of it is still coming.
        """
        with self._turn:
            self._taking(self._begun)
            self._session = Session()

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
    ) -> None:
        """Receive the tensors of ``specs`` from rank 0 of ``group``; arguments as for the embedded engine."""
        with self._turn:
            session = opened(self._session)
            require_joined(group, self._groups)
            if not flattened:
                raise WeightUpdateError("vLLM takes flattened buckets only; send load_format flattened_bucket")
            self._known(specs)
            session.take(spec.name for spec in specs)
            if abort_all:
                self._await(self._engine.abort(None))
            told = [asdict(spec) for spec in specs]
            with waiting("a bucket of weights", LEADER, limit_s=self._timeout_s):
                self._taking(lambda: self._come(group, told, checked=checked))
            session.note_options(version, flush_cache=flush_cache)

    def end(self) -> None:
        """Close the update: all parameters have come. Closing twice is closing once."""
        with self._turn:
            if self._session is None:
                return
            self._paused()
            session, self._session = self._session, None
            if missing := sorted(self._shapes.keys() - session.names):
                self._quarantine("an update of its weights lacked parameters")
                raise WeightUpdateError(
                    f"{len(missing)} parameters did not come, such as {missing[:3]}; the engine is quarantined until "
                    "a whole update comes"
                )
            self._taking(lambda: self._loading("areal_load"))
            self._serve(session.version, flush_cache=session.flush_cache)

    # -- an update from disk

    def load_directory(self, directory: Path, version: str | None, *, flush_cache: bool, abort_all: bool) -> int:
        """Load all weights from safetensors in ``directory``; how many requests went on under them.

        Raises:
            DataError: the directory does not hold this model; nothing has changed.
        """
        with self._turn:
            self._paused()
            check_shapes(directory, self._shapes, shapes_in(directory))
            if abort_all:
                self._await(self._engine.abort(None))
            self._session = None
            self._taking(self._begun)
            self._taking(lambda: self._loading("areal_read", str(directory)))
            self._serve(version, flush_cache=flush_cache)
            return sum(self._engine.load()[name] for name in ("num_running", "num_waiting"))

    def name_version(self, version: str, *, abort_all: bool) -> None:
        """Call the weights that the engine has ``version``."""
        with self._turn:
            if abort_all:
                self._await(self._engine.abort(None))
            self._await(self._engine.name_version(version))

    # -- with the engine

    def _paused(self) -> None:
        if not self._engine.paused:
            raise WeightUpdateError("generation is not paused, and vLLM takes weights apart to load new ones; pause it")

    def _quarantine(self, why: str) -> None:
        self._engine.quarantined = why
        self._await(self._engine.abort(None))

    def _known(self, specs: Sequence[TensorSpec]) -> None:
        """Raises WeightUpdateError unless the model that the engine was started with has, or is given, such tensors."""
        for spec in specs:
            if spec.num_changed is not None and not self.keeps:
                raise WeightUpdateError(
                    f"weight {spec.name!r} comes as a delta, and nothing is kept; set weights.delta"
                )
            expected = self._shapes.get(spec.name, spec.shape if spec.name in self._optional else None)
            if expected != spec.shape:
                raise WeightUpdateError(f"weight {spec.name!r} has shape {spec.shape}, the model's is {expected}")

    def _serve(self, version: str | None, *, flush_cache: bool) -> None:
        if flush_cache:
            self._await(self._engine.forget_cache())
        if version is not None:
            self._await(self._engine.name_version(version))
        self._engine.quarantined = ""

    # -- with the workers

    def _begun(self) -> None:
        """Have them begin, once nothing of an earlier update comes any more: its group is gone, so it ends soon."""
        self._until(lambda: all(self._workers("areal_idle")), "a bucket of an earlier update is still coming")
        self._workers("areal_begin", self.keeps, self._adapters)

    def _come(self, group: str, specs: Sequence[Mapping[str, Any]], *, checked: bool) -> None:
        """Have them begin to take a bucket, and return when it has come to all; they compute on."""
        self._workers("areal_receive", group, specs, checked)
        late = f"vLLM's workers did not receive in {self._timeout_s:g} s"
        self._until(lambda: all(self._workers("areal_come")), late)

    def _until(self, done: Callable[[], bool], late: str) -> None:
        """Return once it is so. Raises WeightUpdateError if that is ``late``."""
        deadline = time.monotonic() + self._timeout_s + GRACE_S
        while not done():
            if time.monotonic() > deadline:
                raise WeightUpdateError(late)
            time.sleep(POLL_S)

    def _loading(self, method: str, *arguments: Any) -> None:
        """Have them make the model of what has come.

        Raises:
            WeightUpdateError: they cannot, or were too late for the trainer.
        """
        began = time.monotonic()
        self._until(lambda: all(self._workers("areal_ready")), "what adapters are merged into is still being read")
        self._workers(method, *arguments, str(self._loaded), how_far=self.how_far)
        if (took := time.monotonic() - began) <= self._timeout_s:
            self._num_late = 0
            return
        self._num_late += 1
        late = f"vLLM took {took:.1f} s to load them, longer than limits.weight_update_s = {self._timeout_s:g} allows"
        if self._num_late == LATE_LOADS:
            self._engine.unfit = f"{late}, {LATE_LOADS} times in a row; raise it to {math.ceil(2 * took)}"
        raise WeightUpdateError(late)

    def _taking(self, step: Callable[[], None]) -> None:
        """A step after whose failure nobody knows what the model holds."""
        try:
            step()
        except WeightUpdateError as error:
            self._session = None
            self._quarantine("an update of its weights failed half-way")
            raise WeightUpdateError(f"the weights were not taken; the engine is quarantined: {error}") from error

    def _workers(self, method: str, *arguments: Any, how_far: HowFar = lambda: None) -> list[Any]:
        """What each worker says to one call, made on all at once between two steps.

        Raises:
            WeightUpdateError: it failed on one of them. vLLM tells only that failure's text.
        """
        try:
            return self._await(self._engine.llm.collective_rpc(method, args=arguments), how_far)
        except WeightUpdateError:
            raise
        except Exception as error:  # whatever a worker raised: vLLM hands it on as a bare Exception
            raise WeightUpdateError(f"vLLM's workers could not {method.removeprefix('areal_')}: {error}") from error

    def _await(self, action: Coroutine[Any, Any, T], how_far: HowFar = lambda: None) -> T:
        """What the engine answers. One that neither does nor gets on for so long never will, and ends, so that it is
        started anew.

        Raises:
            WeightUpdateError: it does not.
        """
        answer = asyncio.run_coroutine_threadsafe(action, self._loop)
        seen, deadline = how_far(), time.monotonic() + self._timeout_s
        while not wait([answer], min(LOOK_S, self._timeout_s)).done:
            if (now := how_far()) != seen:
                seen, deadline = now, time.monotonic() + self._timeout_s
            elif time.monotonic() >= deadline:
                answer.cancel()
                self._engine.hangs = f"vLLM's engine has not answered for {self._timeout_s:g} s"
                raise WeightUpdateError(f"{self._engine.hangs}; it ends, to be started anew")
        return answer.result()
