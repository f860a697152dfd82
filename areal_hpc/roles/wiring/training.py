"""What a trainer rank works with: the other ranks, the backend; on rank 0 also the ring and the transport."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from areal_hpc.accelerator import compute_deterministically
from areal_hpc.buckets import dtype_named
from areal_hpc.buffer.archiver import Archiver
from areal_hpc.buffer.offline import OfflineReader
from areal_hpc.buffer.order import fixed_order
from areal_hpc.buffer.quota import Quota
from areal_hpc.buffer.reader import RingReader
from areal_hpc.buffer.replay import ReplayReader
from areal_hpc.buffer.scan import GroupFetcher, one_by_one
from areal_hpc.checkpoint import Checkpoint
from areal_hpc.cluster.rendezvous import torchrun_variables
from areal_hpc.config.cluster import Shape
from areal_hpc.config.derived import (
    awaits_satellites,
    collective_s,
    largest_group_bytes,
    ring_capacity,
    takes_satellites,
    takes_whole,
)
from areal_hpc.config.recipes import recipe_of
from areal_hpc.config.schema import Config, EngineName, TrainerBackendName, TransportName
from areal_hpc.journal import Journal
from areal_hpc.liveness.alone import alone
from areal_hpc.liveness.given_up import give_up
from areal_hpc.mount import MIB
from areal_hpc.pretrained.files import read_shapes, trainable
from areal_hpc.prompts import check_identity, open_dataset, stream_identity
from areal_hpc.protocols import Fetch, TrainerBackend, WeightTarget, WeightTransport
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.dotted import dotted
from areal_hpc.roles.wiring.engines import Roster
from areal_hpc.roles.wiring.fleet import Fleet, NoEngines, RunCoroutine, Satellites
from areal_hpc.run_dir import RunDir
from areal_hpc.training.ranks import Ranks
from areal_hpc.transfer import GroupAddress
from areal_hpc.types import WeightVersion
from areal_hpc.waits import waiting
from areal_hpc.weights.baseline import DeltaBaseline
from areal_hpc.weights.broadcast import BroadcastTransport
from areal_hpc.weights.disk import DiskTransport

RANKS_GROUP = "trainer"


def make_fetch(process: RoleProcess) -> Fetch:
    """How a trainer rank reads the groups of its share."""
    source = process.config.replay.run
    return one_by_one(ReplayReader(RunDir.open(Path(source))).read) if source else GroupFetcher(process.run).read_all


def join_ranks(process: RoleProcess) -> Ranks:
    """The trainer's ranks as one, found by the address that rank 0 publishes; each on a device of its own."""
    from areal_hpc import accelerator
    from areal_hpc.collective import host_store, join_group, name_at, remember_operations

    config = process.config
    # On a cluster the device was bound before Python started; on one machine all ranks see all of them.
    here = config.cluster.shape is Shape.LOCAL
    local = (process.index, config.trainer.ranks) if here else (0, 1)
    if not here:
        accelerator.require_bound(1)
    device = accelerator.take_device(local[0])
    card = accelerator.card_here()
    if config.trainer.ranks == 1 and not config.trainer.torchrun_variables:
        process.publish_endpoint({})
        return Ranks(device=device)
    timeout_s = collective_s(config)
    accelerator.let_wait(timeout_s)
    remember_operations(process.attempt.stacks / "collectives-")
    store = host_store(process.host, timeout_s=timeout_s) if process.index == 0 else None
    meet = {} if store is None else {"port": store.port, "group": name_at(store, f"{RANKS_GROUP}-{process.epoch}")}
    process.publish_endpoint(meet)
    # Entering the group names nobody and cannot be interrupted, so that is done when all are there.
    endpoint, *_ = [process.endpoint_of("trainer", rank) for rank in range(config.trainer.ranks)]
    if config.trainer.torchrun_variables:
        where = (endpoint["host"], endpoint["port"])
        os.environ.update(torchrun_variables(process.index, config.trainer.ranks, local, *where))
    if config.trainer.ranks == 1:
        return Ranks(device=device, store=store)
    address = GroupAddress(
        host=endpoint["host"],
        port=endpoint["port"],
        name=endpoint["group"],
        world_size=config.trainer.ranks,
        backend=accelerator.detect().collective,
    )
    others = [f"trainer-{rank}" for rank in range(config.trainer.ranks) if rank != process.index]
    with waiting("the ranks' group to form", *others, limit_s=timeout_s):
        return Ranks(join_group(address, process.index, timeout_s, store, vital=True, card=card), device)


def make_backend(config: Config, ranks: Ranks, *, whole: bool = False) -> TrainerBackend:
    """The configured trainer.

    Args:
        whole: adapters leave it merged into the model, as they always do for engines that take nothing else.
    """
    if config.deterministic:
        compute_deterministically()
    loss = dotted(config.algorithm.loss, "algorithm.loss") if config.algorithm.loss else None
    if config.trainer.backend is TrainerBackendName.MEGATRON:
        from areal_hpc.training.megatron.backend import MegatronBackend

        return MegatronBackend(
            model_path=config.model.path,
            dtype=config.model.dtype,
            algorithm=config.algorithm,
            trainer=config.trainer,
            temperature=config.rollout.sampling.temperature,
            ranks=ranks,
            seed=config.seed,
            loss=loss,
            lora=config.model.lora,
            whole=whole or takes_whole(config),
        )
    from areal_hpc.training.preference import PreferenceBackend, RewardModelBackend
    from areal_hpc.training.reference import ReferenceBackend

    of_pairs = {"dpo": PreferenceBackend, "reward_model": RewardModelBackend}
    return of_pairs.get(config.algorithm.name, ReferenceBackend)(
        model_path=config.model.path,
        dtype=config.model.dtype,
        algorithm=config.algorithm,
        trainer=config.trainer,
        temperature=config.rollout.sampling.temperature,
        seed=config.seed,
        group=ranks.group,
        device=ranks.device,
        loss=loss,
        lora=config.model.lora,
        whole=whole or takes_whole(config),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSide:
    """What only rank 0 has."""

    reader: RingReader | ReplayReader | OfflineReader
    fleet: Fleet | NoEngines
    """The engines that get the weights, as they come and go."""
    identity: Mapping[str, Any]
    """What decides which prompt a position means; a checkpoint carries it."""
    journal: Journal
    begin: Callable[[WeightVersion, Mapping[str, Any]], object]
    """Says once, when everything is loaded, with which version the attempt begins, and what others go on with."""
    archiver: Archiver | None
    """Where trained groups are kept; None where they are not."""
    ring: RingReader | None = None
    """The reader of a ring that workers write; None elsewhere."""


def make_trainer_side(process: RoleProcess, parent: Checkpoint | None, run: RunCoroutine) -> TrainerSide:
    """Rank 0's ring and transport; the ring has read what earlier attempts left."""
    config = process.config
    identity = stream_identity(open_dataset(config.prompts, "train", config.seed), config.prompts, config.seed)
    if parent is not None:
        check_identity(parent.state["prompts"], identity)
    reader = RingReader(
        process.run,
        process.epoch,
        num_slots=config.rollout.workers,
        config=config.buffer,
        capacity=ring_capacity(config),
        order=fixed_order(config),
        state=None if parent is None else parent.state["ring"],
        parent=None if parent is None else parent.version,
        quota=_make_quota(config),
    )
    journal = Journal(process.run, process.epoch)
    roster = Roster(process)
    clients = roster.first()
    transport = make_transport(process, clients)
    fleet = Fleet(
        clients,
        transport,
        run=run,
        satellites=_satellites(process, roster),
        wait_s=config.limits.start_s,
        min_mb_per_s=config.weights.min_mb_per_s,
        stopping=process.stopping,
        record=process.recorder.record,
        give_up=partial(give_up, process.attempt),
    )
    return TrainerSide(
        reader=reader,
        fleet=fleet,
        identity=identity,
        journal=journal,
        begin=lambda version, carried: reader.write_start(version, identity["fingerprint"], carried),
        archiver=_make_archiver(process),
        ring=reader,
    )


def _satellites(process: RoleProcess, roster: Roster) -> Satellites:
    if not takes_satellites(process.config):
        return Satellites()
    return Satellites(
        look=roster.look,
        desert_s=process.config.limits.join_s if awaits_satellites(process.config) else None,
        in_the_queue=lambda: (told := alone(process.attempt)) is not None and told.is_in_the_queue(),
    )


def _make_quota(config: Config) -> Quota | None:
    if config.buffer.max_mb is None:
        return None
    return Quota(
        max_bytes=int(config.buffer.max_mb * MIB),
        group_bytes=largest_group_bytes(config),
        capacity=ring_capacity(config),
        num_writers=config.rollout.workers,
        groups_per_step=config.algorithm.groups_per_step,
    )


def _make_archiver(process: RoleProcess) -> Archiver | None:
    config = process.config
    if not config.archive.every_steps:
        return None
    return Archiver(
        process.run,
        process.epoch,
        every_steps=config.archive.every_steps,
        fetch=make_fetch(process),
        timeout_s=config.limits.starve_s,
    )


def make_transport(process: RoleProcess, targets: Sequence[WeightTarget]) -> WeightTransport:
    config = process.config
    baseline = DeltaBaseline(config.weights.whole_every) if config.weights.delta else None
    stands_for = _frozen_bytes(config)
    if config.weights.transport is TransportName.DISK:
        return DiskTransport(
            process.run.weights,
            targets,
            epoch=process.epoch,
            timeout_s=config.limits.weight_update_s,
            baseline=baseline,
            stands_for=stands_for,
        )
    from areal_hpc import accelerator

    # The embedded engine's tensors are on the CPU, wherever the trainer's are.
    embedded = config.generation.backend is EngineName.EMBEDDED
    return BroadcastTransport(
        targets,
        epoch=process.epoch,
        backend=(accelerator.CPU if embedded else accelerator.detect()).collective,
        bucket_bytes=int(config.weights.bucket_mb * MIB),
        timeout_s=config.limits.weight_update_s,
        host=process.host,
        baseline=baseline,
        stands_for=stands_for,
    )


def _frozen_bytes(config: Config) -> int | None:
    """Size in bytes of the model's weights, where adapters are sent in their place; None where the model is sent."""
    if config.model.lora.rank == 0 or takes_whole(config):
        return None
    return _num_parameters(config) * dtype_named(config.model.dtype).itemsize


def first_checkpoint_bytes(config: Config) -> int:
    """What a checkpoint takes at most, for where there is none yet to go by: model and both moments in float32, and as
    much again for a critic."""
    return 3 * 4 * _num_parameters(config) * (2 if recipe_of(config.algorithm.name).critic else 1)


def _num_parameters(config: Config) -> int:
    directory = Path(config.model.path)
    shapes = read_shapes(directory)
    return sum(math.prod(shapes[name]) for name in trainable(shapes, directory))
