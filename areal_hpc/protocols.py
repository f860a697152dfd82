"""The theory of the system on one page: small protocols, each with the loop that it lives in.

    rollout worker                                trainer
    --------------                                -------
    ticket = writer.try_reserve(position)         refs = reader.claim(groups, version)
    episodes = workflow.run(prompt, ...)          batch = pack(advantages(read each ref))
      -> generator.generate(request)              batch.proximal = backend.logprobs(batch)
      -> reward(text, answer, prompt)             backend.train_step(minibatches)
    writer.seal(ticket, group)                    transport.publish(version + 1, backend.weights())
                                                  reader.release(version + 1)

Every protocol has a real implementation and one that runs in a laptop's single process; the contract tests run the same
cases on both. No torch here: annotations only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from areal_hpc.errors import CorruptRecord
from areal_hpc.transfer import GroupAddress, Reception, TensorSpec
from areal_hpc.types import (
    Batch,
    Completion,
    Drop,
    Dropped,
    Float32Array,
    GenerationRequest,
    GroupRef,
    Message,
    Prompt,
    Sampling,
    Ticket,
    Trajectory,
    TrajectoryGroup,
    WeightVersion,
)

if TYPE_CHECKING:
    import torch


class Generator(Protocol):
    """Tokens in, tokens out. ``completion = await generator.generate(request)``

    Raises:
        GenerationError: the engine failed, answered garbage, or did not answer in time.
    """

    async def generate(self, request: GenerationRequest) -> Completion: ...

    async def close(self) -> None: ...


class WeightTarget(Protocol):
    """One engine replica as a weight transport sees it.

        reception = await target.prepare()                        how it takes buckets
        await target.join(group, rank_offset)                     once for each membership
        await target.load_bucket(group.name, specs)               while rank 0 broadcasts the same bucket; a spec with
                                                                  ``num_changed`` is a delta against what it serves
        await target.pause()                                      running requests freeze and keep their tokens: before
                                                                  the first bucket, or where it stages after the last
        await target.resume(version)                              running requests go on under the new version

    Each call raises WeightUpdateError naming the engine when the engine refuses or does not answer in time.
    """

    name: str
    num_ranks: int

    async def prepare(self) -> Reception: ...

    async def join(self, group: GroupAddress, rank_offset: int) -> None: ...

    async def leave(self, group_name: str) -> None: ...

    async def pause(self) -> None: ...

    async def load_bucket(self, group_name: str, specs: Sequence[TensorSpec]) -> None: ...

    async def load_directory(self, path: str, version: int) -> None: ...

    async def resume(self, version: int) -> None: ...


class Members(Protocol):
    """Which engines take part in a transport's updates: ``lost`` are those that failed one, with the reason."""

    @property
    def members(self) -> Sequence[WeightTarget]: ...

    @property
    def lost(self) -> Mapping[str, str]: ...

    def admit(self, target: WeightTarget) -> None: ...

    def dismiss(self, name: str, why: str) -> None: ...


class WeightTransport(Protocol):
    """``told = await transport.publish(version, backend.weights())``; then every member serves ``version``.

        await transport.catch_up(version, backend.weights(), targets)  newcomers at once, while the members sample on

    ``told`` holds ``seconds``, ``seconds_paused``, the ``bytes`` that each engine was sent, the ``fingerprint`` of the
    weights where somebody proves them, and ``bytes_saved`` where only what has changed is sent, or adapters alone.

    Raises:
        WeightUpdateError: a target could not be brought to the version whole; names it. It is lost then.
    """

    @property
    def membership(self) -> Members: ...

    @property
    def route(self) -> str:
        """Which way the weights take, for messages."""

    async def publish(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, float]: ...

    async def catch_up(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], targets: Sequence[WeightTarget]
    ) -> Mapping[str, float]: ...

    async def close(self) -> None: ...


Reward = Callable[[str, Any, Prompt], float]
"""``reward(completion text, expected answer, prompt)``; may raise or hang, it runs behind a time limit."""


class Renderer(Protocol):
    """Messages to token ids and back, by the model's own chat template."""

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What a workflow may use: an engine, a tokenizer, a scorer, and how to sample. ``id`` is unique in the run."""

    id: str
    generator: Generator
    renderer: Renderer
    score: Callable[[str, Prompt], Awaitable[float]]
    sampling: Sampling
    max_tokens: int


class Workflow(Protocol):
    """How one episode runs. An empty answer means that there is nothing to train on.

    Raises:
        GenerationError, RewardError: the sample is failed; the runner tries the group again or drops it.
    """

    async def run(self, prompt: Prompt, episode: Episode) -> Sequence[Trajectory]: ...


class RolloutWriter(Protocol):
    """A rollout worker's end of the ring; never blocks.

        while (ticket := writer.try_reserve(position)) is None: wait, bounded
        ... run the episodes ...
        writer.seal(ticket, group)      or      writer.drop(ticket, reason)

    ``version`` is the newest published weight version; ``reissues`` are positions that this worker must run again.
    An episode that began before its ticket (of an agent in daily use, who cannot be asked to wait) names the ``oldest``
    weights behind it, in steps, and the ticket is of those: the bound on staleness then holds for it as well.
    ``lacks`` tells what a writer that gets no ticket now waits for, always in the same words, and how that stands.
    Every call raises Fenced once a newer attempt owns the run.
    """

    @property
    def version(self) -> WeightVersion: ...

    def try_reserve(self, position: int, oldest: int | None = None) -> Ticket | None: ...

    def lacks(self) -> tuple[str, str]: ...

    def seal(self, ticket: Ticket, group: TrajectoryGroup) -> None: ...

    def drop(self, ticket: Ticket, reason: Drop) -> None: ...

    def reissues(self) -> list[int]: ...

    def close(self) -> None: ...


class RolloutReader(Protocol):
    """The trainer's end of the ring; only rank 0 claims and releases, every rank may read.

        while (refs := reader.claim(groups_per_step, version)) is None: wait; reader.waiting_for() says for whom
        groups = [reader.read(ref) for ref in refs]
        ... train; wait until reader.may_publish(new_version); publish the weights ...
        reader.release(new_version)         the slots are free: workers may reserve again
        ... every k steps, once a checkpoint that holds state_dict() is durable ...
        reader.covered(state)               what an older checkpoint covers may be deleted

    ``claim`` gives oldest first and never a group older than ``max_staleness``; ``read`` raises CorruptRecord. In the
    fixed order of deterministic training it gives the step's own positions, less those that were dropped: perhaps none.
    ``take_dropped`` tells what ended without training since it was last asked: for the step journal.
    """

    def claim(self, num_groups: int, version: WeightVersion) -> list[GroupRef] | None: ...

    def read(self, ref: GroupRef) -> TrajectoryGroup: ...

    def may_publish(self, version: WeightVersion) -> bool: ...

    def discard(self, ref: GroupRef, reason: Drop) -> None: ...

    def take_dropped(self) -> list[Dropped]: ...

    def release(self, version: WeightVersion) -> None: ...

    def waiting_for(self) -> str: ...

    def state_dict(self) -> dict[str, Any]: ...

    def covered(self, state: Mapping[str, Any]) -> None: ...

    def stats(self) -> Mapping[str, float]: ...


Fetch: TypeAlias = Callable[[Sequence[GroupRef]], list[TrajectoryGroup | CorruptRecord]]
"""How a trainer rank reads the groups of its share: in the order of their references, an error in place of a damaged
one."""


class Peers(Protocol):
    """Ranks that may tell each other something."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, which is JSON data, by rank."""

    def gather_floats(self, values: Float32Array) -> list[Float32Array]:
        """Every rank's ``values`` [N], by rank; each has its own N."""


class TrainerBackend(Protocol):
    """Owns model and optimizer on one rank; every call is collective over the trainer's ranks.

    A rank's share of a minibatch may be empty; the loss is a mean over the trainable tokens of all ranks.

    share = plan[backend.data_ranks.rank]           # those among which sequences are dealt; ranks that hold parts of
                                                    # one copy of the model are one of them, and get the same share

    proximal = backend.logprobs(batch)              # float32 [T], aligned with batch.token_ids
    backend.reference_logprobs(batch)               # of the frozen model; only where the algorithm has one
    values, bootstrap = backend.values(batch)       # [T] before tokens, [S] after sequences; only where it has a critic
    backend.kl_coef                                 # of the next step: it adapts, and is checkpointed
    stats = backend.evaluate(batch)                 # the loss on held-out data; only where nothing is generated
    stats = backend.train_step(minibatches)         # one optimizer update each; stats are reduced over ranks
    for name, tensor in backend.weights(): ...      # full tensors, Hugging Face names, a fixed order; of a model that
                                                    # is frozen its adapters alone (``pretrained.lora``)
    backend.export(directory)                       # the same weights as a Hugging Face directory with its tokenizer
    write = backend.snapshot()                      # this rank's state in host memory; training may go on
    write(directory)                                # later, in any thread, durable when it returns; then the next one
    backend.complete(directory)                     # on rank 0, in any thread, once all ranks have written theirs
    backend.load(directory)                         # what all ranks wrote, random streams last
    """

    @property
    def kl_coef(self) -> float: ...

    @property
    def data_ranks(self) -> Peers: ...

    def logprobs(self, batch: Batch) -> Float32Array: ...

    def reference_logprobs(self, batch: Batch) -> Float32Array: ...

    def values(self, batch: Batch) -> tuple[Float32Array, Float32Array]: ...

    def evaluate(self, batch: Batch) -> Mapping[str, float]: ...

    def train_step(self, minibatches: Sequence[Batch]) -> Mapping[str, float]: ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def snapshot(self) -> Callable[[Path], None]: ...

    def complete(self, directory: str) -> None: ...

    def load(self, directory: str) -> None: ...

    def export(self, directory: str) -> None: ...


@runtime_checkable
class Ended(Protocol):
    """A process of the run that is no more; ``code`` is negative for a signal."""

    @property
    def name(self) -> str: ...

    @property
    def code(self) -> int: ...


class Launcher(Protocol):
    """Starts the processes of a run, tells which have ended, ends exactly those that it started."""

    def start(self, role: str, index: int) -> None: ...

    def died(self) -> Sequence[Ended]: ...

    def last_lines(self, role: str, index: int) -> str: ...

    def stop(self, timeout_s: float) -> Sequence[Ended]: ...
