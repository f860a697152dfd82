"""The trainer's end of the ring on a shared file system: no locks, no server, one writer for every file.

    RingWriter (one a rollout process)                RingReader (the trainer's rank 0)
    ----------------------------------                ---------------------------------
    chain: RESERVE, DATA, DROP, COMMIT, SEAL  ----->  polls every live chain, feeds the Ledger
    reg/<slot>.json: my chain's name          ----->  finds new chains; the slot's old one is retired
    share, version, positions to run again    <-----  CONTROL.json

The rules are the Ledger's. Here they meet files: which chains are followed, what CONTROL says, what may be deleted.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from areal_hpc.buffer.account import Account, Limit, Shortage, chain_of
from areal_hpc.buffer.chain import ChainName, segment_name
from areal_hpc.buffer.control import Control, ControlPublisher, SlotControl, read_replaced
from areal_hpc.buffer.epochs import StartRecord, lineage, write_start
from areal_hpc.buffer.ledger import Key, Ledger
from areal_hpc.buffer.order import FixedOrder
from areal_hpc.buffer.pace import Pace, poll_pause_s
from areal_hpc.buffer.quota import Quota
from areal_hpc.buffer.records import RecordType, newest_weights
from areal_hpc.buffer.scan import ChainReader, Found, GroupFetcher
from areal_hpc.config.schema import BufferConfig
from areal_hpc.fs import make_private_directory, names_in
from areal_hpc.mount import is_served, low_space
from areal_hpc.patience import PASSING
from areal_hpc.run_dir import RunDir
from areal_hpc.types import Drop, Dropped, GroupRef, Ticket, TrajectoryGroup, WeightVersion
from areal_hpc.watermark import Watermark

LONGEST_DISCOVERY_S = 5.0
"""A writer that takes another's place needs about as long to start."""


class RingReader:
    """The trainer's end. Its construction reads everything that earlier attempts left in the ring.

        reader = RingReader(run, epoch, ..., state=checkpoint's, parent=checkpoint's version)
        reader.write_start(version, fingerprint, carried) once
        reader.release(version)                           the engines have their weights: writers may begin
        ... claim, read, release, covered ...

    Args:
        order: the fixed order of deterministic training; None for the oldest first.
        state: ``state_dict`` of the checkpoint that the attempt goes on from; None for a fresh start.
        parent: that checkpoint's version; None for a fresh start.
        quota: of bytes, which ``config.max_mb`` stands for; None for no limit.
        poll_s: how often a chain is looked at, at most; None for ``config.commit_s``, since its writer adds to it no
            more often.
        discover_s: how often new chains are looked for at most.

    Raises:
        RunDirError: in a fixed order, groups that the checkpoint relies on are not in the ring.
    """

    def __init__(
        self,
        run: RunDir,
        epoch: int,
        *,
        num_slots: int,
        config: BufferConfig,
        capacity: int,
        order: FixedOrder | None = None,
        state: Mapping[str, Any] | None = None,
        parent: WeightVersion | None = None,
        quota: Quota | None = None,
        poll_s: float | None = None,
        discover_s: float = 0.5,
    ) -> None:
        assert (state is None) == (parent is None), "a checkpoint has both a state and a version"
        self._run, self._epoch, self._num_slots = run, epoch, num_slots
        self._poll_s = poll_pause_s(config.commit_s, is_served(run.root)) if poll_s is None else poll_s
        self._discovery = Pace(discover_s, LONGEST_DISCOVERY_S)
        self._parent, self._min_free_mb = parent, config.min_free_mb
        self._registry = make_private_directory(run.ring / "reg")
        self._chains = make_private_directory(run.ring / "chains")
        self._fetcher = GroupFetcher(run)
        self._ledger = Ledger(capacity, config.max_staleness, num_slots, lineage(run, epoch, parent), order)
        self._version: WeightVersion | None = None
        self._published: Control | None = None
        self._control = ControlPublisher(run)
        self._covered: Mapping[str, Any] | None = state
        self._reclaim: dict[str, int] = {}  # chain -> tickets below are in two checkpoints
        self._newest: dict[int, ChainName] = {}  # slot -> the last chain followed
        self._live: dict[int, ChainReader] = {}  # slot -> chain that still grows
        self._paces: dict[int, Pace] = {}  # slot -> when that chain is looked at
        self._retired: list[ChainReader] = []  # chains with files that nobody writes any more
        assert (quota is None) == (config.max_mb is None), "writers go by the key, and wait for what a quota allows"
        self._account = Account(self._ledger, quota, self._live, self._retired)
        self._done = self._resume(state)

    def _resume(self, state: Mapping[str, Any] | None) -> Watermark:
        if state is not None:
            self._ledger.load_state_dict(state)
        earlier = [name for name in self._known() if name.epoch < self._epoch]
        for name in sorted(earlier, key=lambda name: (name.epoch, name)):
            self._retire(ChainReader(self._chains, name), slot=0)
        for chain in set(self._ledger.finished) - {str(name) for name in earlier}:
            del self._ledger.finished[chain]  # its files are gone, and so are its tickets
        return self._ledger.begin(self._parent.step if self._parent else 0)

    def write_start(self, version: WeightVersion, fingerprint: str, carried: Mapping[str, Any]) -> StartRecord:
        """Say once how this attempt begins.

        Args:
            carried: plain JSON data for the attempt's other processes.

        Raises:
            RunDirError: it has been said already: two trainers believe that they own this epoch.
        """
        record = StartRecord(
            parent=self._parent, version=version, consumed=self._done, fingerprint=fingerprint, carried=carried
        )
        write_start(self._run, self._epoch, record)
        return record

    def claim(self, num_groups: int, version: WeightVersion) -> list[GroupRef] | None:
        """The oldest ``num_groups`` sealed groups, or None while they are not there (``waiting_for`` says why).

        Raises:
            Fenced: a newer attempt owns the run.
        """
        self._take_in()
        refs = self._ledger.claim(num_groups, version)
        self._publish(only_if_changed=True)
        return refs

    def poll(self) -> None:
        """Let new writers begin while nothing is claimed; ``claim`` does the same on its way.

        Raises:
            Fenced: a newer attempt owns the run.
        """
        self._take_in()
        self._publish(only_if_changed=True)

    def may_publish(self, version: WeightVersion) -> bool:
        """Whether every group that older weights sample is durable in the ring; always true without a fixed order.

        Raises:
            Fenced: a newer attempt owns the run.
        """
        if self._ledger.order is not None:
            self.poll()
        return self._ledger.may_publish(version)

    def _take_in(self) -> None:
        self._discover()
        for slot, chain in list(self._live.items()):
            if self._paces[slot].due():
                self._paces[slot].looked(news=self._feed(chain))
                chain.forget_deleted(self._reclaim.get(str(chain.name), 0))
            if chain.ended:
                self._retire(self._live.pop(slot), slot)

    def read(self, ref: GroupRef) -> TrajectoryGroup:
        """The group at ``ref``.

        Raises:
            CorruptRecord: its bytes are damaged; discard it as such.
        """
        return self._fetcher.read(ref)

    def discard(self, ref: GroupRef, reason: Drop) -> None:
        """Leave a claimed group out; its slot is free, its position consumed or run again as ``reason`` says.

        Raises:
            CorruptRecord: in a fixed order, for a damaged one.
        """
        self._ledger.discard(ref, reason)

    def take_dropped(self) -> list[Dropped]:
        """What was dropped since the last call, also by workers, in the order in which it was seen."""
        return self._ledger.take_dropped()

    def release(self, version: WeightVersion) -> None:
        """``version`` is on every engine: what was claimed is consumed, its slots are free.

        While the disk refuses, writers learn of it later.

        Raises:
            Fenced: a newer attempt owns the run; nothing was published.
        """
        self._ledger.release()
        self._version = version
        self._publish()

    def covered(self, state: Mapping[str, Any]) -> None:
        """A checkpoint with ``state`` is durable: what the one *before* it covers may be deleted, so that the run can
        fall back by one checkpoint and still find everything.

        Raises:
            Fenced: a newer attempt owns the run; nothing was published or deleted.
        """
        before, self._covered = self._covered, state
        if before is not None:
            self._reclaim = lows(before)
        self._publish()

    def waiting_for(self) -> str:
        """A sentence on what the last claim, or the last ``may_publish``, waits for."""
        absent = [slot for slot in range(self._num_slots) if slot not in self._live]
        text = self._ledger.waiting_for() + (f"; writers {absent} have not registered" if absent else "")
        problem = low_space(self._run.ring, self._min_free_mb)
        text += f"; no new prompt is begun, since {problem}: free space there" if problem else ""
        return text + self._account.text()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold of the ring."""
        return self._ledger.state_dict()

    def stats(self) -> Mapping[str, float]:
        """Gauges: see Ledger.stats and Account.stats."""
        return {**self._ledger.stats(), **self._account.stats()}

    def is_crowded(self, begun: Mapping[str, Any] | None) -> bool:
        """Whether a checkpoint should begin before the next step, so that the ring stays within its quota.

        Args:
            begun: ``state_dict`` in the newest checkpoint that was begun; None before the first.
        """
        return self._account.is_crowded(lows(begun))

    def shortage(self) -> Shortage | None:
        """Why no group can come any more under the quota, for who had no answer to the last ``claim`` or
        ``may_publish``; None while one can."""
        return None if self._version is None else self._account.shortage(self._version, self._reclaim)

    # Chains

    def _known(self) -> set[ChainName]:
        """Chains by listing, and by the registry, whose files are fresh when opened: a listing may be a minute old."""
        listed = (ChainName.parse(text) for text in names_in(self._chains))
        entries = [name for name in names_in(self._registry) if re.fullmatch(r"\d{5}\.json", name)]
        registered = (read_replaced(self._registry / entry) for entry in entries)
        named = {ChainName(*entry["chain"]) for entry in registered if entry is not None}
        return {name for name in listed if name is not None} | named

    def _discover(self) -> None:
        """Find new chains of this attempt; more rarely once every slot has had one for a while."""
        if not self._discovery.due():
            return
        mine = (name for name in sorted(self._known()) if name.epoch == self._epoch and name.slot < self._num_slots)
        new = [name for name in mine if name.slot not in self._newest or name > self._newest[name.slot]]
        for name in new:
            self._follow(name)
        self._discovery.looked(news=bool(new) or len(self._live) < self._num_slots)

    def _follow(self, name: ChainName) -> None:
        if name.slot in self._live:
            self._retire(self._live.pop(name.slot), name.slot)
        self._newest[name.slot] = name
        self._live[name.slot], self._paces[name.slot] = ChainReader(self._chains, name), Pace(self._poll_s)

    def _retire(self, chain: ChainReader, slot: int) -> None:
        """One last poll, then never again: what a zombie writes later is not seen, and its prompts run again."""
        self._feed(chain, last=True)
        self._ledger.retired(str(chain.name), slot)
        self._account.retired(str(chain.name))
        self._retired.append(chain)

    def _feed(self, chain: ChainReader, *, last: bool = False) -> bool:
        """Whether there was anything new."""
        records = chain.poll(last=last)
        for record in records:
            _APPLY[record.type](self._ledger, chain.name, record)
            if record.type is RecordType.DATA:
                self._account.saw(record.header.record_bytes)
        return bool(records)

    # CONTROL

    def _publish(self, *, only_if_changed: bool = False) -> None:
        if self._version is None:
            return
        limits, held = self._account.limits(self._version)
        slots = tuple(self._slot_control(slot, limit) for slot, limit in enumerate(limits))
        control = Control(epoch=self._epoch, version=self._version, slots=slots, held=held)
        if only_if_changed and self._published is not None and _news(control) == _news(self._published):
            return
        if not self._control.publish(control):
            return  # `_published` stays what it was, so the next claim or poll tries again
        self._published = control
        self._delete_retired()

    def _slot_control(self, slot: int, limit: Limit) -> SlotControl:
        ledger, chain = self._ledger, chain_of(self._live, slot)
        mine = sorted(item for item in ledger.reissues.items() if item[0] % self._num_slots == slot)
        return SlotControl(
            chain=chain,
            limit=limit.num_tickets,
            short=limit.short,
            reclaim=self._reclaim.get(chain, 0),
            issued=ledger.issued[slot].copy(),
            reissues=tuple(mine),
        )

    def _delete_retired(self) -> None:
        """Delete segments of ended chains by the rule that writers follow; call it only behind the fence."""
        for chain in list(self._retired):
            low = self._reclaim.get(str(chain.name), 0)
            for segment, newest_ticket in sorted(chain.newest_tickets.items()):
                if newest_ticket >= low:
                    break
                if not _removed((chain.directory / segment_name(segment)).unlink):
                    break
                chain.forget(segment)
            if not chain.newest_tickets and _removed(chain.directory.rmdir):
                self._retired.remove(chain)
                self._ledger.finished.pop(str(chain.name), None)


def _removed(remove: Callable[[], None]) -> bool:
    """Whether ``remove`` worked. On NFS a file that is deleted while another process on this host reads it stays there
    under a hidden name ("silly rename"), and so does its directory: the next call tries again."""
    try:
        remove()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, *PASSING):
            raise
        return False
    return True


def _news(control: Control) -> Control:
    """``control`` without the fields that only a new writer or a person reads: their change alone is not published."""
    return replace(control, slots=tuple(replace(slot, issued=Watermark()) for slot in control.slots), held=0)


def lows(state: Mapping[str, Any] | None) -> dict[str, int]:
    """For each chain the number below which a checkpoint with this ``state`` of the ring covers every ticket."""
    return {} if state is None else {chain: int(numbers["low"]) for chain, numbers in state["finished"].items()}


def _reserved(ledger: Ledger, chain: ChainName, record: Found) -> None:
    meta = record.meta
    version = WeightVersion(*meta["version"])
    ledger.reserved(Ticket(chain=str(chain), number=meta["ticket"], position=meta["position"], version=version))


def _sealed(ledger: Ledger, chain: ChainName, record: Found) -> None:
    ledger.sealed(record.ref(str(chain)), newest_weights(chain.epoch, record.meta))


def _dropped(ledger: Ledger, chain: ChainName, record: Found) -> None:
    ledger.dropped(Key(str(chain), record.meta["ticket"]), Drop(record.meta["reason"]))


_APPLY: dict[RecordType, Callable[[Ledger, ChainName, Found], None]] = {
    RecordType.RESERVE: _reserved,
    RecordType.DATA: _sealed,
    RecordType.DROP: _dropped,
}
