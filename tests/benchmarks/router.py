"""The router against round-robin, on loads that are skewed: how long the same requests take, in simulated time.

    PYTHONPATH=.:tests:tests/benchmarks python tests/benchmarks/router.py [--seeds 5]

    even       lengths of one heavy-tailed distribution, engines alike
    groups     the eight samples of a prompt are alike in length, as those of a hard prompt are
    slow       the same, and one engine of four decodes at half the speed
    returned   the same, and one engine comes late, when a quarter of the work is done

Engines decode ``SLOTS`` sequences at once, a token of each in a step; more wait in their queues. ``IN_FLIGHT`` requests
are in flight, as of a rollout worker. The event loop's clock is simulated, so the figures depend on neither the machine
nor its load; the router is the product's. Writes ``router.json`` and prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import selectors
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe

from areal_hpc.errors import GenerationError
from areal_hpc.generation.connection import EngineRefused
from areal_hpc.generation.router import Router
from areal_hpc.types import Completion, GenerationRequest, Sampling, StopReason

NUM_ENGINES, SLOTS, IN_FLIGHT, TOKEN_S = 4, 16, 128, 0.02
NUM_PROMPTS, GROUP_SIZE, BUDGET = 128, 8, 4096


class SimulatedSelector(selectors.DefaultSelector):
    """Waits for nothing: the clock jumps to when the next timer is due."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits for ever"
            self.now += timeout
        return ready


def simulate(body: Any) -> float:
    """Run a coroutine to its end; the simulated seconds it took."""
    selector = SimulatedSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        loop.run_until_complete(body)
    finally:
        loop.close()
    return selector.now


class SimulatedEngine:
    """Decodes as fast as it is told, from the moment it is there. The length of an answer is in its request's id."""

    version = 0

    def __init__(self, name: str, *, speed: float = 1.0, from_s: float = 0.0) -> None:
        self.name, self._speed, self._from_s = name, speed, from_s
        self._slots = asyncio.Semaphore(SLOTS)

    def _is_there(self) -> bool:
        return asyncio.get_running_loop().time() >= self._from_s

    async def generate(self, request: GenerationRequest) -> Completion:
        if not self._is_there():
            raise EngineRefused(f"{self.name} is not there")
        length = int(request.request_id.split("/")[1])
        async with self._slots:
            await asyncio.sleep(length * TOKEN_S / self._speed)
        ids = np.zeros(length, dtype=np.int32)
        logprobs = np.zeros(length, dtype=np.float32)
        return Completion(token_ids=ids, logprobs=logprobs, versions=ids, stop=StopReason.STOP)

    async def abort(self, request_id: str) -> None: ...

    async def probe(self) -> int:
        if not self._is_there():
            raise GenerationError(f"{self.name} is not there")
        return 0

    async def close(self) -> None: ...


class RoundRobin:
    """Each request to the next engine that takes it."""

    def __init__(self, engines: Sequence[SimulatedEngine]) -> None:
        self._engines = itertools.cycle(engines)

    async def generate(self, request: GenerationRequest) -> Completion:
        for engine in itertools.islice(self._engines, NUM_ENGINES):
            try:
                return await engine.generate(request)
            except EngineRefused:
                continue
        raise GenerationError("no engine is there")

    async def close(self) -> None: ...


def lengths(seed: int, *, grouped: bool) -> list[int]:
    """Tokens of each answer, prompt after prompt: log-normal, cut at the budget."""
    random = np.random.default_rng(seed)
    of_prompt = random.normal(0, 1.0 if grouped else 0.0, (NUM_PROMPTS, 1))
    of_sample = random.normal(0, 0.3 if grouped else 1.0, (NUM_PROMPTS, GROUP_SIZE))
    return np.clip(300 * np.exp(of_prompt + of_sample), 1, BUDGET).astype(int).reshape(-1).tolist()


async def run_all(generator: Router | RoundRobin, answers: list[int]) -> None:
    places = asyncio.Semaphore(IN_FLIGHT)

    async def ask(number: int, length: int) -> None:
        async with places:
            sampling = Sampling(max_new_tokens=BUDGET)
            request = GenerationRequest(request_id=f"{number}/{length}", token_ids=(1,) * 64, sampling=sampling)
            await generator.generate(request)

    await asyncio.gather(*(ask(number, length) for number, length in enumerate(answers)))
    await generator.close()


def engines(case: str, answers: list[int]) -> list[SimulatedEngine]:
    ideal_s = sum(answers) * TOKEN_S / (NUM_ENGINES * SLOTS)
    odd = {"slow": {"speed": 0.5}, "returned": {"from_s": ideal_s / 4}}.get(case, {})
    return [SimulatedEngine(f"engine-{k}", **(odd if k == 0 else {})) for k in range(NUM_ENGINES)]


def measure(case: str, seed: int) -> dict[str, float]:
    answers = lengths(seed, grouped=case != "even")
    speed = NUM_ENGINES - 0.5 if case == "slow" else NUM_ENGINES
    least_s = sum(answers) * TOKEN_S / (speed * SLOTS)
    return {
        "router_s": simulate(run_all(Router(engines(case, answers)), answers)),
        "round_robin_s": simulate(run_all(RoundRobin(engines(case, answers)), answers)),
        "bound_s": least_s * (1 + (1 / 4 / NUM_ENGINES if case == "returned" else 0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    num_seeds = parser.parse_args().seeds
    rows = {}
    print("case       round-robin, s   router, s   times as fast    no scheduler is faster than, s")
    for case in ("even", "groups", "slow", "returned"):
        found = [measure(case, seed) for seed in range(num_seeds)]
        row = {name: round(statistics.mean(one[name] for one in found), 1) for name in found[0]}
        ratios = [round(one["round_robin_s"] / one["router_s"], 3) for one in found]
        rows[case] = {**row, "ratios": ratios}
        print(
            f"{case:<9}  {row['round_robin_s']:14.1f}   {row['router_s']:9.1f}"
            f"   {min(ratios):5.2f} to {max(ratios):4.2f}   {row['bound_s']:12.1f}"
        )
    result = {"machine": describe(), "seeds": num_seeds, "cases": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
