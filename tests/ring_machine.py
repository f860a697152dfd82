"""What state machines over the ring have in common: workers on a store, that come, go, and finish what they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine
from rollout_stores import Worker

from areal_hpc.types import Ticket, WeightVersion


class RingMachine(RuleBasedStateMachine):
    """A machine says what may happen, in rules; ``train`` makes a step if there is enough for one."""

    store: Any
    """Of a kind that the class of the test names; made by the machine's first rule."""
    step: int
    workers: list[Worker]
    num_slots: int

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.store.epoch, self.step)

    def new_worker(self, slot: int) -> Worker:
        return Worker(self.store.writer(slot), slot, self.num_slots)

    def has_open(self) -> bool:
        return any(worker.open for worker in self.workers)

    def pick(self, data: st.DataObject, *, with_open: bool = False) -> Worker:
        return data.draw(st.sampled_from([worker for worker in self.workers if worker.open or not with_open]))

    def pop_open(self, data: st.DataObject) -> tuple[Worker, Ticket]:
        """A ticket that some worker holds no longer."""
        worker = self.pick(data, with_open=True)
        return worker, worker.open.pop(data.draw(st.integers(0, len(worker.open) - 1)))

    def kill_workers(self) -> None:
        for worker in self.workers:
            self.store.kill(worker.writer)

    def train(self) -> object:
        raise NotImplementedError

    def work_off(self, *, until: Callable[[], bool], times: int, end: Callable[[Worker, Ticket], None]) -> None:
        """Let everybody work without faults: the ring must come to ``until``, or it is stuck.

        Args:
            end: seals or drops a ticket that a worker holds.
        """
        for _ in range(times):
            if until():
                return
            self.train()
            for worker in self.workers:
                while worker.reserve():
                    pass
                for ticket in worker.open:
                    end(worker, ticket)
                worker.open.clear()
                self.store.flush(worker.writer)
        raise AssertionError(f"stuck: {self.store.reader.waiting_for()}")

    def drain(self) -> None:
        raise NotImplementedError

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.drain()
            self.store.close()


def cases(machine: type[RingMachine], *, max_examples: int, steps: int) -> Any:
    """The test case of a machine."""
    made = machine.TestCase
    made.settings = settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        suppress_health_check=[HealthCheck.too_slow],
    )
    return made
