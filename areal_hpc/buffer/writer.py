"""A rollout worker's end of the ring on a shared file system. ``reader.py`` draws both ends.

    ticket = writer.try_reserve(position)     RESERVE     None while the share is used up: back-pressure
    writer.seal(ticket, group)                DATA        or drop(ticket, reason): DROP

No call waits for the disk: records are handed to the thread that commits them. A writer reserves nothing before CONTROL
names its chain: by then the reader has read its predecessor to the end, so what that one left behind is counted, and
no slot is used twice.
"""

from __future__ import annotations

import logging
import time

from areal_hpc.buffer.chain import ChainName, ChainWriter, GroupCommit
from areal_hpc.buffer.control import Control, SlotControl, read_control
from areal_hpc.buffer.epochs import check_fence
from areal_hpc.buffer.ledger import share, unshard
from areal_hpc.buffer.order import FixedOrder
from areal_hpc.buffer.pace import Pace, poll_pause_s
from areal_hpc.buffer.quota import segment_bytes
from areal_hpc.buffer.records import RecordType, encode_group
from areal_hpc.config.schema import BufferConfig
from areal_hpc.errors import ConfigError, Fenced
from areal_hpc.fs import make_private_directory, publish_json, read_if_listed
from areal_hpc.mount import MIB, is_served, low_space
from areal_hpc.run_dir import RunDir
from areal_hpc.types import Drop, Ticket, TrajectoryGroup, WeightVersion
from areal_hpc.watermark import Watermark

log = logging.getLogger(__name__)

SPACE = "space on the disk"
"""What a writer waits for where the disk is nearly full. A checkpoint may let the ring delete something; else a person
must free some."""


class RingWriter:
    """Writer ``slot`` of ``num_slots``. Used by one thread; a second one of its own commits.

    Args:
        capacity: tickets that all writers together may have outstanding, (max_staleness + 1) * groups a step.
        order: the fixed order of deterministic training, which then decides what may begin instead of a share.
        poll_s: how often CONTROL.json is read at most; None follows from ``config.commit_s``.
        fence_s: how often the epochs are listed and free space is looked at, at most. Between two looks CONTROL.json
            tells of a newer attempt, once that has published its own.
        patience_s: how long writes may fail (disk full, server away) before a call raises.

    Raises:
        ConfigError: there are more writers than tickets.
    """

    def __init__(
        self,
        run: RunDir,
        epoch: int,
        *,
        slot: int,
        num_slots: int,
        config: BufferConfig,
        capacity: int,
        order: FixedOrder | None = None,
        poll_s: float | None = None,
        fence_s: float = 5.0,
        patience_s: float = 60.0,
    ) -> None:
        self._run, self._epoch, self._slot, self._num_slots = run, epoch, slot, num_slots
        self._order, self._fence_s, self._max_mb = order, fence_s, config.max_mb
        if share(capacity, slot, num_slots) < 1:
            raise ConfigError(f"{num_slots} writers share {capacity} tickets: lower rollout.workers to {capacity}")
        self._control: Control | None = None
        self._reading = Pace(poll_pause_s(config.commit_s, is_served(run.root)) if poll_s is None else poll_s)
        self._next_fence_s = 0.0  # on the monotonic clock
        self._min_free_mb, self._low_space = config.min_free_mb, ""
        self._reserved = self._dropped = self._serial = 0
        self._open: set[int] = set()
        check_fence(run, epoch)
        self._chain = self._register(config)
        self.chain = str(self._chain.name)
        self._commits = GroupCommit(self._chain, config.commit_s, patience_s)

    def _register(self, config: BufferConfig) -> ChainWriter:
        registry = make_private_directory(self._run.ring / "reg") / f"{self._slot:05d}.json"
        chains = make_private_directory(self._run.ring / "chains")
        entry = read_if_listed(registry)
        before = ChainName(*entry["chain"]) if entry else None
        incarnation = before.incarnation + 1 if before and before.epoch == self._epoch else 0
        name = ChainName.new(self._slot, self._epoch, incarnation)
        chain = ChainWriter(chains, name, segment_bytes(config, self._num_slots))
        publish_json(registry, {"chain": name})
        return chain

    @property
    def version(self) -> WeightVersion:
        """The newest published weights; step -1 before the trainer's first release."""
        self._refresh()
        return self._control.version if self._control else WeightVersion(self._epoch, -1)

    def try_reserve(self, position: int, oldest: int | None = None) -> Ticket | None:
        """A ticket, no newer than the weights of step ``oldest``; or None.

        None while this writer's share or the ring's room is used up (in a fixed order: while other weights are
        published), while the trainer does not follow it yet, while its chain cannot be written, and while there is
        less space on the disk than what is under way may need.
        """
        self._refresh()
        mine = self._mine()
        if self._control is None or mine is None or self._commits.failing or self._low_space:
            return None
        if self._counted() >= mine.limit:
            return None
        if self._order is not None and not self._order.admits(position, self._control.version):
            return None
        version = self._control.version.no_newer_than(oldest)
        ticket = Ticket(chain=self.chain, number=self._reserved, position=position, version=version)
        self._chain.append(RecordType.RESERVE, ticket.number, {"position": position, "version": list(ticket.version)})
        self._open.add(ticket.number)
        self._reserved += 1
        return ticket

    def lacks(self) -> tuple[str, str]:
        """See RolloutWriter."""
        mine = self._mine()
        if self._low_space and mine is not None and self._counted() < mine.limit:
            return SPACE, self._low_space
        if self._max_mb is None or mine is None or not mine.short or self._counted() < mine.limit:
            return "a free ticket", ""
        held = self._control.held / MIB if self._control else 0.0
        return f"room in the ring, of buffer.max_mb = {self._max_mb:g} MiB", f"{held:.3g} MiB are held or on their way"

    def seal(self, ticket: Ticket, group: TrajectoryGroup) -> None:
        """Hand the group over; durable and visible after the next commit.

        Raises:
            DataError: the group is larger than a record may be; the ticket stays open.
            GenerationError: in a fixed order, other weights sampled it than must; the ticket stays open.
        """
        self._refresh()
        assert group.position == ticket.position, (group.position, ticket)
        if self._order is not None:
            self._order.check(group)
        meta, body = encode_group(group)
        self._finish(ticket)
        self._chain.append(RecordType.DATA, ticket.number, {**meta, "version": list(ticket.version)}, body)

    def drop(self, ticket: Ticket, reason: Drop) -> None:
        """Give the ticket back without a group; its slot is free at once."""
        self._refresh()
        self._finish(ticket)
        self._dropped += 1
        self._chain.append(RecordType.DROP, ticket.number, {"reason": reason.value})

    def reissues(self) -> list[int]:
        """Positions to run again, each once."""
        self._refresh()
        mine = self._mine()
        fresh = [(serial, position) for position, serial in mine.reissues if serial > self._serial] if mine else []
        self._serial = max([self._serial, *(serial for serial, _ in fresh)])
        return [position for _, position in sorted(fresh)]

    def issued(self) -> Watermark | None:
        """Positions that this writer need not begin by itself: consumed, in the ring, or handed out by ``reissues``.
        None until the trainer follows this writer. Of other writers' positions it says nothing."""
        self._refresh()
        mine = self._mine()
        return unshard(mine.issued, self._slot, self._num_slots) if mine else None

    def flush(self) -> None:
        """Commit now.

        Raises:
            OSError: the file system refused; the records stay in memory and are tried again.
        """
        self._chain.commit()

    def close(self) -> None:
        """Commit, and end the chain; tickets still open are run again by another writer.

        Raises:
            OSError: the file system refused, so the last records may be lost (their prompts are run again).
            WaitTimeout: the file system does not answer.
        """
        self._commits.stop()
        self._chain.end()

    def _refresh(self) -> None:
        self._commits.check()
        if not self._reading.due():
            return
        control = read_control(self._run, known=self._control is not None)
        if control is not None and control.epoch > self._epoch:
            raise Fenced(f"attempt {self._epoch} was replaced by {control.epoch}; writer {self._slot} must stop")
        if (now := time.monotonic()) >= self._next_fence_s:
            check_fence(self._run, self._epoch)
            self._look_at_space()
            self._next_fence_s = now + self._fence_s
        self._reading.looked(news=control != self._control)
        if control is not None and control.epoch == self._epoch:
            self._control = control
            mine = self._mine()
            if mine is not None:
                self._commits.reclaim(mine.reclaim)

    def _look_at_space(self) -> None:
        problem = low_space(self._run.ring, self._min_free_mb) or ""
        if problem and not self._low_space:
            log.warning("writer %d begins no new prompt: %s", self._slot, problem)
        self._low_space = problem

    def _counted(self) -> int:
        """Tickets that count against the limit: in a fixed order no other takes the place of one that was dropped."""
        return self._reserved - (self._dropped if self._order is None else 0)

    def _mine(self) -> SlotControl | None:
        mine = self._control.slots[self._slot] if self._control else None
        return mine if mine is not None and mine.chain == self.chain else None

    def _finish(self, ticket: Ticket) -> None:
        assert ticket.chain == self.chain and ticket.number in self._open, f"{ticket} is not open here"
        self._open.remove(ticket.number)
