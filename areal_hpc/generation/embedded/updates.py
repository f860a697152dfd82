"""How new weights come in: whole or not at all, beside what the engine computes with.

    join(address, rank)
    begin()
    load_bucket(...)   any number    received, while the one before it is checked and copied into the spare weights
    end()                            every parameter has come: spare and serving weights change places, at once

    load_directory(path)             the same from safetensors on disk: shapes are checked before the first byte is
                                     copied, the checksums of a trainer's update as its tensors come

Sampling goes on until ``end`` unless somebody pauses it. An update that fails changes nothing; yet the trainer has
newer weights by then, so the engine is quarantined: it serves nothing until a whole update or directory has been
loaded. What a failed bucket has met is told by the call after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from areal_hpc.buckets import BucketMemory, dtype_named, num_bytes, unpack, verify
from areal_hpc.collective import broadcast, join_group, leave_group
from areal_hpc.delta import Weight, checksum
from areal_hpc.errors import WeightUpdateError
from areal_hpc.generation.embedded.model import Model
from areal_hpc.generation.embedded.scheduler import QUARANTINE, Scheduler
from areal_hpc.generation.served.session import Session, not_formed, opened, require_fresh, require_joined
from areal_hpc.pretrained.files import check_shapes
from areal_hpc.transfer import GroupAddress, TensorSpec
from areal_hpc.waits import LEADER, waiting
from areal_hpc.weight_files import read_update, shapes_in

T = TypeVar("T")

Arrived = Callable[[], Sequence[tuple[str, Weight]]]
"""A bucket as it came; asked for its tensors, it proves them first."""


@dataclass(slots=True)
class _Session(Session):
    loading: Future[None] | None = None
    """The loading of the newest bucket."""

    def settle(self) -> None:
        """Wait until the newest bucket is loaded.

        Raises:
            WeightUpdateError: it could not be.
        """
        if self.loading is not None:
            with waiting("a bucket of weights to be copied", limit_s=None):
                self.loading.result()


class WeightUpdates:
    """Blocking calls, made from worker threads, one after the other.

    Every method raises WeightUpdateError when the weights could not be taken as asked.
    """

    def __init__(self, model: Model, scheduler: Scheduler, *, timeout_s: float) -> None:
        self._model = model
        self._scheduler = scheduler
        self._timeout_s = timeout_s
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._session: _Session | None = None
        self._turn = threading.Lock()
        self._memory = BucketMemory("cpu", reuse=2)  # of the bucket that comes and of the one before it
        self._loader = ThreadPoolExecutor(1, "loading", initializer=lambda: torch.set_num_threads(1))

    # -- groups

    def join(self, address: GroupAddress, rank: int) -> None:
        """Enter the trainer's group; returns when all its ranks are there."""
        with self._turn:
            require_fresh(address.name, self._groups)
            try:
                with waiting(f"group {address.name} to form", LEADER, limit_s=self._timeout_s):
                    self._groups[address.name] = join_group(address, rank, self._timeout_s)
            except (RuntimeError, ValueError) as error:
                raise WeightUpdateError(not_formed(address, self._timeout_s, error)) from error

    def leave(self, name: str) -> None:
        with self._turn:
            require_joined(name, self._groups)
            leave_group(self._groups.pop(name))

    def close(self) -> None:
        for name in list(self._groups):
            self.leave(name)
        self._loader.shutdown()

    # -- an update in buckets

    def begin(self) -> None:
        """Open an update. One that was open is given up: none of it has been put into place."""
        with self._turn:
            self._give_up()
            self._session = _Session()

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
        """Receive the tensors of ``specs`` from rank 0 of ``group``; they are loaded while the next ones come.

        Args:
            flattened: one uint8 broadcast of all tensors back to back, else one broadcast a tensor.
            checked: ``specs`` carry the sender's checksums.
            version: what the weights are called once the update ends; None leaves it to another bucket.
            flush_cache: at the end, recompute the cache of sequences that are running.
            abort_all: end all sequences before.
        """
        with self._turn:
            session = opened(self._session)
            require_joined(group, self._groups)
            if abort_all:
                self._call(lambda: self._scheduler.abort(None, "aborted by a weight update"))
            receive = self._receive_flattened if flattened else _receive_each
            with waiting("a bucket of weights", LEADER, limit_s=self._timeout_s):
                arrived = self._or_quarantine(lambda: receive(self._groups[group], specs, checked))
            session.settle()
            session.loading = self._loader.submit(self._or_quarantine, lambda: self._load(session, arrived))
            session.note_options(version, flush_cache=flush_cache)

    def _receive_flattened(self, group: dist.ProcessGroup, specs: Sequence[TensorSpec], checked: bool) -> Arrived:
        buffer = self._memory.take(sum(map(num_bytes, specs)))
        broadcast(buffer, group)
        return lambda: unpack(buffer, specs, checked=checked)

    def _load(self, session: _Session, arrived: Arrived) -> None:
        weights = arrived()
        session.take(name for name, _ in weights)
        self._model.spare.load(weights, held=self._model.serving)

    def end(self) -> None:
        """Close the update: all parameters have come, or none. Closing twice is closing once."""
        with self._turn:
            session, self._session = self._session, None
            if session is None:
                return
            session.settle()
            missing = self._model.spare.missing(session.names) if session.names else []
            if missing:
                self._quarantine()
                raise WeightUpdateError(
                    f"the update lacks {len(missing)} parameters, among them {missing[:3]}; send the whole model"
                )
            self._serve(session.version, flush_cache=session.flush_cache, whole=bool(session.names))

    def _give_up(self) -> None:
        """End an open update, if there is one, and see to it that nobody writes into the spare weights any more."""
        session, self._session = self._session, None
        if session is not None and session.loading is not None:
            wait([session.loading])  # if it failed, that was dealt with

    # -- an update from disk

    def load_directory(self, directory: Path, version: str | None, *, flush_cache: bool, abort_all: bool) -> int:
        """Load all weights from safetensors in ``directory``; how many sequences went on under them.

        Raises:
            DataError: the directory does not hold this model; nothing has changed.
        """
        with self._turn:
            check_shapes(directory, self._model.spare.shapes, shapes_in(directory))
            if abort_all:
                self._call(lambda: self._scheduler.abort(None, "aborted by a weight update"))
            num_unfinished = self._call(lambda: len(self._scheduler.unfinished))
            self._give_up()
            self._or_quarantine(lambda: self._model.spare.load(read_update(directory), held=self._model.serving))
            self._serve(version, flush_cache=flush_cache, whole=True)
            return num_unfinished

    def name_version(self, version: str, *, abort_all: bool) -> None:
        """Call the weights that the engine has ``version``."""
        with self._turn:
            if abort_all:
                self._call(lambda: self._scheduler.abort(None, "aborted by a new weight version"))
            self._call(lambda: self._scheduler.set_version(version))

    @property
    def is_open(self) -> bool:
        """Whether an update has begun and not ended."""
        return self._session is not None

    # -- reading back

    def checksums(self) -> dict[str, int]:
        """CRC-32C of every parameter by Hugging Face name, as ``TensorSpec.checksum`` has it."""
        return self._call(lambda: {name: checksum(tensor) for name, tensor in self._model.serving.by_name.items()})

    def first_values(self, name: str, num: int) -> list[list[float]]:
        """The first ``num`` rows of a parameter, as floats; a vector is a column."""
        if name not in self._model.serving.shapes:
            raise WeightUpdateError(f"the model has no parameter {name!r}")

        def read() -> list[list[float]]:
            parameter = self._model.serving.by_name[name]
            values: list[list[float]] = parameter.view(len(parameter), -1)[:num].float().tolist()
            return values

        return self._call(read)

    # -- with the scheduler

    def _call(self, action: Callable[[], T]) -> T:
        """What ``action`` returns, in the engine's thread.

        Raises:
            WeightUpdateError: it was not its turn in time, and it never will be: by then it might meet another update.
        """
        future = self._scheduler.call(action, revocable=True)
        if not self._waited_for(future):
            future.cancel()
            raise WeightUpdateError(
                f"the engine's thread was busy for {self._timeout_s:g} s with one step; raise "
                "limits.weight_update_s if its steps may take so long"
            )
        return future.result()

    def _waited_for(self, future: Future[Any]) -> bool:
        """Whether it is done in time."""
        with waiting("the engine's thread to take weights", limit_s=self._timeout_s):
            return bool(wait([future], self._timeout_s).done)

    def _serve(self, version: str | None, *, flush_cache: bool, whole: bool) -> None:
        def go_on() -> None:
            if whole:
                self._model.swap()
                self._scheduler.weights_changed(flush_cache=flush_cache)
                self._scheduler.holds.discard(QUARANTINE)
            if version is not None and QUARANTINE not in self._scheduler.holds:
                self._scheduler.set_version(version)

        try:
            self._call(go_on)
        except WeightUpdateError:  # its thread hangs; when it comes back, the trainer has newer weights
            self._scheduler.call(self._scheduler.quarantine)
            raise

    def _quarantine(self) -> None:
        """At once, or as soon as the engine's thread is through with its step: no caller takes that back."""
        future = self._scheduler.call(self._scheduler.quarantine)
        if self._waited_for(future):
            future.result()

    def _or_quarantine(self, take: Callable[[], T]) -> T:
        try:
            return take()
        except (WeightUpdateError, RuntimeError, OSError) as error:
            self._quarantine()
            raise WeightUpdateError(f"the weights were not taken; the engine is quarantined: {error}") from error


def _receive_each(group: dist.ProcessGroup, specs: Sequence[TensorSpec], checked: bool) -> Arrived:
    """Each into memory of its own: in whatever order they come, they cannot lie back to back."""
    weights = [(spec.name, torch.empty(spec.shape, dtype=dtype_named(spec.dtype))) for spec in specs]
    for _, tensor in weights:
        broadcast(tensor, group)

    def proven() -> Sequence[tuple[str, Weight]]:
        for (name, tensor), spec in zip(weights, specs, strict=True) if checked else ():
            verify(name, tensor, spec.checksum)
        return weights

    return proven
