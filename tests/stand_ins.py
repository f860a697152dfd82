"""Stand-ins for what costs time in a run and has no part in exactly-once: mathematics, engines, reward processes.

    install()     in the process that the launcher and all roles are forked from

Everything else stays: launcher, roles, epochs, ring, prompts, runner, workflow, loop, commits, checkpoints, journal.
The trainer's "weights" are the prompts that they were trained on, step by step, and live in its checkpoints: what they
hold in the end is what really was trained, whatever any bookkeeping says.
"""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import areal_hpc.roles.generator
import areal_hpc.roles.launcher
import areal_hpc.roles.trainer
import areal_hpc.roles.wiring.episodes
import areal_hpc.roles.wiring.training
from areal_hpc.config.schema import Config
from areal_hpc.errors import RewardError
from areal_hpc.exits import EXIT_STOPPED
from areal_hpc.fs import publish
from areal_hpc.generation.scripted import ScriptedGenerator
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.dotted import dotted
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import Batch, Float32Array, Message, Prompt
from areal_hpc.weights.membership import Membership

ROWS = "rows.json"


class Rows:
    """A ``TrainerBackend`` whose weights are the rows of the data set that each step was trained on."""

    data_ranks = Ranks()

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def logprobs(self, batch: Batch) -> Float32Array:
        return batch.behaviour

    def train_step(self, minibatches: Sequence[Batch]) -> Mapping[str, float]:
        """A sequence begins with its row (see ``Renderer``); every group has two."""
        starts = [(batch, start) for batch in minibatches for start in batch.boundaries[:-1]]
        self.steps.append(sorted(int(batch.token_ids[start]) for batch, start in starts)[::2])
        return {"loss": 0.0}

    def weights(self) -> Iterator[tuple[str, Any]]:
        yield ROWS, json.dumps(self.steps)

    def snapshot(self) -> Callable[[Path], None]:
        text = json.dumps(self.steps)

        def write(directory: Path) -> None:
            publish(directory / ROWS, text.encode())

        return write

    def complete(self, directory: str) -> None: ...

    def load(self, directory: str) -> None:
        self.steps = json.loads(Path(directory, ROWS).read_bytes())


class Nobody:
    """The one engine that takes part in an update; nothing is ever asked of it."""

    name = "nobody"


class Transport:
    """A ``WeightTransport`` to nobody that takes a moment."""

    route = "nowhere"

    def __init__(self) -> None:
        self.membership = Membership([Nobody()], timeout_s=1.0)

    async def publish(self, version: int, weights: Iterable[tuple[str, Any]]) -> Mapping[str, float]:
        sent = repr(list(weights)).encode()
        seconds = random.uniform(0.0, 0.03)
        await asyncio.sleep(seconds)
        return {
            "seconds": seconds,
            "seconds_paused": seconds,
            "bytes": float(len(sent)),
            "fingerprint": float(zlib.crc32(sent)),
        }

    async def close(self) -> None: ...


class Renderer:
    """A prompt's only token is its row in ``tiny_task.Numbers``."""

    def __init__(self, model_path: str) -> None: ...

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return (int(messages[-1]["content"].split()[1]),)

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode()


class Router(ScriptedGenerator):
    """Engines that answer after a moment, the two samples of a prompt differently, by the version pinned last."""

    def __init__(self, process: RoleProcess) -> None:
        super().__init__(lambda request: "ab" if ".s1." in request.request_id else "aaaa", token_s=0.005)

    async def expect(self, version: int) -> None:
        self.version = version

    def out(self) -> dict[str, str]:
        return {}

    def outstanding(self) -> dict[str, int]:
        return {}


class Roster:
    """No engines, ever."""

    def __init__(self, process: RoleProcess) -> None: ...

    def first(self) -> list[Any]:
        return []

    def look(self) -> tuple[list[Any], set[str]]:
        return [], set()


class RewardPool:
    """Scores in this process."""

    def __init__(self, config: Config) -> None:
        self._reward = dotted(config.rollout.reward, "rollout.reward")

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def score(self, text: str, prompt: Prompt) -> float:
        try:
            return float(self._reward(text, prompt.answer, prompt))
        except RuntimeError as error:
            raise RewardError(str(error)) from error


def _idle(process: RoleProcess) -> int:
    process.stop_flag.wait()
    return EXIT_STOPPED


def install() -> None:
    """Put all of them where the roles look for the real ones."""
    areal_hpc.roles.generator.main = _idle
    areal_hpc.roles.launcher.prepare = lambda config: None
    areal_hpc.roles.launcher.report_run = lambda run: None  # figures by matplotlib take a second
    areal_hpc.roles.trainer.make_backend = lambda process, ranks: Rows()
    training, episodes = areal_hpc.roles.wiring.training, areal_hpc.roles.wiring.episodes
    training.Roster = Roster
    training.make_transport = lambda process, clients: Transport()
    episodes.make_reward_pool = RewardPool
    episodes.make_router = Router
    episodes.ChatRenderer = Renderer
