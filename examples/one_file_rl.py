"""Asynchronous reinforcement learning of a language model: the whole loop in one file and one process.

    python examples/one_file_rl.py                  about a minute on two cores, no GPU

Three things go on at once. A slow answer holds up its own group, and training only when the bound on staleness says so:

    rollout, 48 times    ticket -> prompt -> 8 answers -> 8 rewards -> group sealed into the ring
    engine, a thread     samples for all of them in one batch, under the weights that it has at the moment
    train                claim the 16 oldest groups -> advantages -> 2 updates -> publish weights -> tickets are free

Read `loss`, `advantages`, `episode`, `rollout` and `train`, in this order: they are the algorithm, and yours to change.
Each says in a numbered note what it leaves out; `areal-hpc run` has it.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from areal_hpc.algorithms.objective import LossInputs, LossOutput
from areal_hpc.algorithms.stats import fraction_of
from areal_hpc.buffer.memory import MemoryRing, MemoryWriter
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.schema import OptimizerConfig, PromptsConfig, TrainerConfig
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.generation.client import EngineClient
from areal_hpc.generation.embedded.engine import EmbeddedEngine
from areal_hpc.generation.embedded.server import start_server
from areal_hpc.prompts import PromptStream, first_prompts, open_dataset
from areal_hpc.rollout.workflows import check, trajectory
from areal_hpc.tasks import sort_digits, tiny_model
from areal_hpc.training.batching import pack
from areal_hpc.training.reference import ReferenceBackend
from areal_hpc.types import GenerationRequest, Prompt, Sampling, Trajectory, TrajectoryGroup, WeightVersion
from areal_hpc.weights.disk import DiskTransport

TASK = PromptsConfig(train="areal_hpc.tasks.sort_digits:SortDigits", eval="areal_hpc.tasks.sort_digits:SortDigits")
SAMPLING, GROUP_SIZE = Sampling(max_new_tokens=16), 8
ALGORITHM = AlgorithmConfig(groups_per_step=16, minibatches=2, clip_low=0.2, clip_high=0.28)


def loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutput:
    """Decoupled PPO (arXiv:2110.00641), token by token; all tensors are [T].

    Three policies: *behaviour* sampled the token, maybe with older weights; *proximal* is that of the weights at the
    start of this step; *current* is being trained. Clipping keeps current near proximal; the weight makes up for what
    behaviour sampled more or less often than proximal would have.

    1. Left out: other kinds of rejection (whole sequences, KL, IcePop), dual clip, ratios that are not finite.
    """
    assert inputs.proximal is not None
    ratio = (inputs.current - inputs.proximal).exp()
    free = -inputs.advantages * ratio
    bounded = -inputs.advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    weight = (inputs.proximal - inputs.behaviour).exp()
    weight = torch.where(inputs.mask & (weight <= 5.0), weight, 0.0)
    clipped = fraction_of(bounded > free, inputs.mask)
    return LossOutput(per_token=weight * torch.maximum(free, bounded), stats={"clipped": clipped})


def advantages(groups: Sequence[TrajectoryGroup]) -> np.typing.NDArray[np.float64]:
    """GRPO (arXiv:2402.03300): how much better than the other answers to the same prompt. [N], one for a trajectory.

    2. Left out: its relatives (Dr. GRPO, RLOO, Lite PPO), length penalties, normalisation over the batch.
    """
    return np.concatenate([(g.rewards - g.rewards.mean()) / (g.rewards.std(ddof=1) + 1e-5) for g in groups])


async def episode(client: EngineClient, renderer: ChatRenderer, prompt: Prompt, name: str, seed: int) -> Trajectory:
    """One prompt, one answer, one reward.

    3. Left out: rewards behind a time limit in processes of their own, failed samples tried again, several turns.
    """
    context = renderer.render(prompt.messages)
    request = GenerationRequest(request_id=name, token_ids=context, sampling=replace(SAMPLING, seed=seed))
    completion = await client.generate(request)  # each token with its log-prob and the weight version it came from
    check(request, completion)
    reward = sort_digits.reward(renderer.decode(completion.token_ids.tolist()), prompt.answer)
    return trajectory(context, completion, reward)


async def rollout(client: EngineClient, renderer: ChatRenderer, stream: PromptStream, writer: MemoryWriter) -> None:
    """Groups without end. No ticket, no episode: that is back-pressure and the bound on staleness in one.

    4. Left out: group filters (as DAPO's), many rollout processes and engines, a watch that says who waits for whom.
    """
    while True:
        prompt = stream.next()
        while (ticket := writer.try_reserve(prompt.position)) is None:
            await asyncio.sleep(0.01)
        seeds = range(prompt.position * GROUP_SIZE, (prompt.position + 1) * GROUP_SIZE)
        answers = await asyncio.gather(*(episode(client, renderer, prompt, f"train-{seed}", seed) for seed in seeds))
        writer.seal(ticket, TrajectoryGroup(position=prompt.position, prompt_id=prompt.id, trajectories=tuple(answers)))


async def train(ring: MemoryRing, backend: ReferenceBackend, transport: DiskTransport, steps: int) -> None:
    """Claim, update, publish, release. A step's tickets are free once its weights are in the engine: with tickets for
    (max_staleness + 1) steps, no token is older than max_staleness when it is claimed.

    5. Left out: many ranks, models too large for one, checkpoints by which a killed run loses and repeats no group.
    """
    for step in range(steps):
        while (refs := ring.reader.claim(ALGORITHM.groups_per_step, WeightVersion(ring.epoch, step))) is None:
            await asyncio.sleep(0.01)
        groups = [ring.reader.read(ref) for ref in refs]
        stats = await asyncio.to_thread(update, backend, groups, step)  # the engine samples on meanwhile
        await transport.publish(step + 1, backend.weights())  # answers freeze, and go on under the new weights
        ring.reader.release(WeightVersion(ring.epoch, step + 1))
        report(step, groups, stats)


def update(backend: ReferenceBackend, groups: Sequence[TrajectoryGroup], step: int) -> Mapping[str, float]:
    """An optimizer update for each minibatch; the proximal log-probs are from before the first."""
    batch = pack([answer for group in groups for answer in group.trajectories], advantages(groups))
    batch = batch.with_proximal(backend.logprobs(batch))
    order = np.random.default_rng(step).permutation(batch.num_sequences)
    return backend.train_step([batch.select(part.tolist()) for part in np.array_split(order, ALGORITHM.minibatches)])


def report(step: int, groups: Sequence[TrajectoryGroup], stats: Mapping[str, float]) -> None:
    """6. Left out: everything that is written to disk, curves, where the time went."""
    versions = [answer.versions[answer.loss_mask] for group in groups for answer in group.trajectories]
    oldest = step - min(v.min() for v in versions)
    mixed = np.mean([v.min() < v.max() for v in versions])  # new weights came in the middle of the answer
    age = f"oldest token {oldest} versions behind, {mixed:.0%} of answers by several versions"
    numbers = f"entropy {stats['entropy']:.2f}  clipped {stats['clipped']:.1%}  {age}"
    print(f"step {step + 1:3d}  reward {np.mean([group.rewards for group in groups]):.3f}  {numbers}")


async def evaluate(client: EngineClient, renderer: ChatRenderer, prompts: Sequence[Prompt], name: str) -> None:
    """Mean reward on held-out prompts, each time with the same seeds."""
    episodes = (episode(client, renderer, prompt, f"{name}-{n}", seed=n) for n, prompt in enumerate(prompts))
    print(f"held-out reward {name}: {np.mean([answer.reward for answer in await asyncio.gather(*episodes)]):.3f}")


@asynccontextmanager
async def serve(model: str) -> AsyncIterator[EngineClient]:
    """The CPU engine behind SGLang's HTTP surface, on a loopback port that the kernel chose, and its client.

    7. Left out: engines in processes of their own, GPUs, a router that sends each request to the least loaded one.
    """
    engine = EmbeddedEngine(model, max_running=16, max_tokens=64)  # few rows, so that sampling takes a while
    engine.start()
    url, server = await start_server(engine, token=(token := secrets.token_urlsafe()))
    client = EngineClient("engine-0", url, token=token)
    try:
        yield client
    finally:
        await client.close()
        await server.cleanup()
        engine.close()


async def main(options: argparse.Namespace) -> None:
    """8. Left out: weights that are broadcast between processes, not written to a directory."""
    torch.set_num_threads(1)  # a core for the trainer, and one for the engine
    held_out = first_prompts(open_dataset(TASK, "eval", options.seed), TASK, 256)
    stream = PromptStream(open_dataset(TASK, "train", options.seed), TASK, seed=options.seed)
    renderer = ChatRenderer(options.model)
    trainer = TrainerConfig(total_steps=options.steps, optimizer=OptimizerConfig(lr=options.lr))
    backend = ReferenceBackend(
        model_path=options.model, algorithm=ALGORITHM, trainer=trainer, temperature=SAMPLING.temperature, loss=loss
    )
    num_tickets = (options.max_staleness + 1) * ALGORITHM.groups_per_step
    ring = MemoryRing(num_tickets, options.max_staleness)
    with tempfile.TemporaryDirectory() as directory:
        async with serve(options.model) as client, asyncio.TaskGroup() as tasks:
            transport = DiskTransport(Path(directory), [client], epoch=ring.epoch)
            await transport.publish(0, backend.weights())  # proves the way before the first token
            await evaluate(client, renderer, held_out, "before")
            ring.reader.release(WeightVersion(ring.epoch, 0))  # the ring is open
            writer = ring.writer(0)
            workers = [tasks.create_task(rollout(client, renderer, stream, writer)) for _ in range(num_tickets)]
            await train(ring, backend, transport, options.steps)
            for worker in workers:
                worker.cancel()
            await evaluate(client, renderer, held_out, "after")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tiny", help="checkpoint directory; a tiny model is made if missing")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--max-staleness", type=int, default=2, help="in optimizer steps; 0 is synchronous training")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    if not Path(chosen.model).is_dir():
        print(f"making the model {chosen.model}, once")
        tiny_model.make(Path(chosen.model), chosen.seed)
    asyncio.run(main(chosen))
