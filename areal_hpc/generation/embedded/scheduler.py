"""Continuous batching in a thread of its own: who runs, who waits, and when nobody may.

    while open:
        run what other threads asked for (submit, abort, pause, load weights): between two steps, never within one
        nothing to do, or held: wait for the next such call
        admit waiting sequences to free rows, by priority, and of one priority the oldest first
        decode one token for every running sequence

Generation is *held* for named reasons: ``pause`` (asked for), ``quarantine`` (a weight update failed). While one of
them stands, no token is sampled.

The thread ends by ``close`` or by an exception. In both cases every sequence that has not finished is resolved, and
every later call is refused with the cause: nobody waits for an engine that is gone.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, TypeVar

import torch

from areal_hpc.errors import GenerationError
from areal_hpc.generation.embedded.runner import BatchRunner
from areal_hpc.generation.embedded.sequence import Sequence
from areal_hpc.generation.served.request import Quarantined
from areal_hpc.waits import ANYBODY, LEADER, waiting

log = logging.getLogger(__name__)

PREFILL_TOKENS = 4096
"""Padded prompt tokens computed between two decode steps; a longer prompt goes alone."""
PAUSE, QUARANTINE = "pause", "quarantine"

T = TypeVar("T")


class Scheduler:
    """``call`` may be used from any thread; every other method runs in the engine's thread, through ``call``."""

    def __init__(self, runner: BatchRunner, *, threads: int, version: str) -> None:
        self.version = version
        self.holds: set[str] = set()
        self.failure: BaseException | None = None
        self._runner = runner
        self._threads = threads
        self._waiting: deque[Sequence] = deque()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._gate = threading.Lock()  # between putting into the inbox and closing it
        self._open = True
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)

    # -- from any thread

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; sequences that have not finished are aborted with the tokens they have."""
        if self.alive:
            with waiting("the engine's thread to end", limit_s=None):
                self.call(self._stop).result()
                self._thread.join()

    @property
    def alive(self) -> bool:
        return self._open and self._thread.is_alive()

    def call(self, action: Callable[[], T], *, revocable: bool = False) -> Future[T]:
        """Run ``action`` in the engine's thread between two steps; the future holds its result or exception.

        Args:
            revocable: whether the future can be cancelled until it is this action's turn.

        Raises:
            GenerationError: the engine has ended; the cause is chained.
        """
        future: Future[T] = Future()
        if not revocable:
            future.set_running_or_notify_cancel()  # from here on nobody who gives up waiting can cancel it

        def perform() -> None:
            if revocable and not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action())
            except Exception as error:  # it belongs to the caller, who gets it from the future
                future.set_exception(error)

        with self._gate:
            if not self._open:
                raise GenerationError(f"the engine has ended: {self.failure or 'closed'}") from self.failure
            self._inbox.put(perform)
        return future

    def stats(self) -> dict[str, Any]:
        return {
            "num_running": len(self._runner.running),
            "num_waiting": len(self._waiting),
            "num_generated_tokens": self._runner.num_tokens,
            "held_by": sorted(self.holds),
        }

    # -- in the engine's thread

    @property
    def unfinished(self) -> list[Sequence]:
        return [*self._runner.running, *self._waiting]

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences.

        Raises:
            Quarantined: a weight update failed half-way.
            GenerationError: the engine has ended since this call was made.
        """
        if not self._open:
            raise GenerationError("the engine has ended")
        if QUARANTINE in self.holds:
            raise Quarantined("the engine missed part of a weight update; it serves nothing until it is reloaded whole")
        for sequence in sequences:
            place = len(self._waiting)
            while place and self._goes_before(sequence, self._waiting[place - 1]):
                place -= 1
            self._waiting.insert(place, sequence)

    def _goes_before(self, newcomer: Sequence, other: Sequence) -> bool:
        """What has begun and was put back goes before all that has not."""
        return newcomer.priority < other.priority and not other.token_ids

    def abort(self, request_id: str | None, message: str = "aborted by request") -> int:
        """End the sequences of ``request_id`` (None: all) with the tokens they have; how many there were."""
        hit = [s for s in self.unfinished if request_id in (None, s.request_id, s.parent_id)]
        self.drop(hit, message)
        return len(hit)

    def drop(self, sequences: Iterable[Sequence], message: str = "nobody waits for it") -> None:
        """End ``sequences`` with the tokens they have; those that have finished meanwhile stay as they are."""
        dropped = set(sequences)
        unfinished = [sequence for sequence in self.unfinished if sequence in dropped]
        for sequence in unfinished:
            sequence.finish("abort", message=message, status_code=None, err_type=None)
        self._retire(unfinished)

    def pause(self, mode: str) -> None:
        """Sample nothing more: ``abort`` ends every sequence, ``retract`` queues them anew, ``in_place`` keeps rows."""
        self.holds.add(PAUSE)
        if mode == "abort":
            self.abort(None, "aborted by pause")
        elif mode == "retract":
            self.retract()

    def retract(self) -> None:
        """Put running sequences back to the head of the queue, in their order; their cache is computed again."""
        running = list(self._runner.running)
        for sequence in reversed(running):
            self._runner.remove(sequence)
            sequence.num_retractions += 1
        self._waiting.extendleft(reversed(running))

    def quarantine(self) -> None:
        """Serve nothing: what runs would go on under a mixture of weights."""
        self.holds.add(QUARANTINE)
        self.abort(None, "the weight update failed; the engine is quarantined")

    def set_version(self, version: str) -> None:
        self.version = version
        for sequence in self._runner.running:
            sequence.begin_version(version)

    def weights_changed(self, *, flush_cache: bool) -> None:
        """Rows computed by the old weights are not given to new sequences; with ``flush_cache`` to nobody."""
        self._runner.forget_prefixes()
        if flush_cache:
            self.retract()

    def _retire(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if sequence.row >= 0:
                self._runner.remove(sequence)
            else:
                self._waiting.remove(sequence)
            sequence.resolve()

    def _stop(self) -> None:
        self._shut(None)
        self.abort(None, "the engine is closing")

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP keeps this number for each thread separately
        try:
            while self._open:
                self._perform_calls()
                if self._open and not self.holds:
                    self._step()
        except BaseException as error:  # whoever waits must learn of it, whatever it was
            self._fail(error)
        finally:
            while not self._inbox.empty():
                self._inbox.get()()

    def _perform_calls(self) -> None:
        """Run what has been asked for; with nothing to generate, wait for it."""
        idle = bool(self.holds) or not (self._runner.running or self._waiting)
        if idle:
            with self._idle():
                call = self._inbox.get()
            call()
        while self._open and not self._inbox.empty():
            self._inbox.get()()

    def _idle(self) -> AbstractContextManager[object]:
        """Names what a thread without work waits for."""
        if self.holds:
            return waiting(f"weights; held by {', '.join(sorted(self.holds))}", LEADER, limit_s=None)
        return waiting("requests", ANYBODY, limit_s=None)

    def _step(self) -> None:
        admitted = self._next_waiting()
        if admitted:
            for sequence in admitted:
                sequence.begin_version(self.version)
            finished = self._runner.admit(admitted)
            for _ in admitted:  # only now: had the model failed, they would still be among the unfinished
                self._waiting.popleft()
            self._settle(finished, admitted)
        running = list(self._runner.running)
        if running:
            self._settle(self._runner.decode(), running)

    def _next_waiting(self) -> list[Sequence]:
        """The first of those that wait, for free rows, within the prefill budget."""
        chosen: list[Sequence] = []
        longest = 0
        for sequence in islice(self._waiting, self._runner.max_running - len(self._runner.running)):
            longest = max(longest, len(sequence.prompt) + len(sequence.token_ids))
            if chosen and longest * (len(chosen) + 1) > PREFILL_TOKENS:
                break
            chosen.append(sequence)
        return chosen

    def _settle(self, finished: list[Sequence], advanced: list[Sequence]) -> None:
        self._retire(finished)
        for sequence in advanced:
            if sequence.listener is not None and sequence.finish_reason is None:
                sequence.listener(len(sequence.token_ids))

    def _shut(self, failure: BaseException | None) -> None:
        with self._gate:
            self.failure = failure
            self._open = False

    def _fail(self, error: BaseException) -> None:
        log.critical("the engine's thread has ended", exc_info=error)
        self._shut(error)
        for sequence in self.unfinished:
            sequence.resolve(GenerationError(f"the engine died: {type(error).__name__}: {error}"))
        self._waiting.clear()
        self._runner.running.clear()
