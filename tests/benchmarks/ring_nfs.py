"""The ring between two genuine NFS clients: how soon a group is seen, what it costs the server, that none is lost.

    PYTHONPATH=.:tests/nfs:tests/benchmarks python tests/benchmarks/ring_nfs.py [--versions 3 4.1] [--directory DIR]

Writers on client a, the trainer on client b, default mount options, and the ring as it is configured by default (a
commit each 0.2 s); each of two writers makes two groups of eight trajectories of 39 KB a second (what a look costs does
not depend on what it finds). ``tests/nfs/lab.py`` says what the clients are and what they need. Two parts for each
version of NFS: undisturbed, for the figures; and with writers killed at random, the server killed for some seconds, and
the trainer killed and started again on the other client, after which every prompt must have been trained exactly once.
Writes ring_nfs.json. Clocks of the clients are compared with the host's before and after; the disagreement is stated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import machine
from lab import Client, Command, Lab, missing
from ring_ends import GROUP_SIZE, GROUPS_PER_STEP

from areal_hpc.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]
ENDS = str(ROOT / "tests" / "nfs" / "ring_ends.py")
GROUPS_PER_S, STEPS, KILLS, OUTAGE_S, LIMIT_S = 2.0, 40, 12, 5.0, 900.0
NUM_WRITERS = 2
DATA_RPCS = {"NULL", "READ", "WRITE", "COMMIT"}
"""All other requests are about names, attributes and opening."""


class Run:
    """One run directory on the server, its trainer and its writers."""

    def __init__(self, lab: Lab, name: str, clients: dict[str, Client]) -> None:
        RunDir.create(lab.export / name)
        self.place, self.clients = f"/mnt/nfs/{name}", clients
        self.writers: dict[int, tuple[str, Command]] = {}
        self.trained: dict[int, list[int]] = {}
        self.saved = self.epoch = 0

    def start(self, client: str, *words: object) -> Command:
        argv = [sys.executable, "-B", ENDS, *map(str, words)]
        return self.clients[client].run(argv, {"PYTHONPATH": str(ROOT)})

    def attempt(self, client: str, steps: int) -> Command:
        trainer = self.start(client, "trainer", self.place, NUM_WRITERS, steps)
        self.epoch = int(said(trainer, "epoch", 1)[0][0])
        return trainer

    def write(self, slot: int, client: str) -> None:
        words = (self.place, self.epoch, slot, NUM_WRITERS, STEPS, GROUPS_PER_S)
        self.writers[slot] = (client, self.start(client, "writer", *words))

    def kill(self, slot: int) -> str:
        client, command = self.writers.pop(slot)
        command.kill()
        assert command.over.wait(LIMIT_S), f"writer {slot} survives its kill"
        return client

    def take(self, trainer: Command) -> None:
        """What that attempt has trained; what a later one goes on from is its last checkpoint."""
        self.trained.update({int(words[0]): list(map(int, words[1:])) for words in lines(trainer, "trained")})
        self.saved = max([self.saved, *(int(words[0]) for words in lines(trainer, "saved"))])

    def roll_back(self) -> None:
        self.trained = {step: positions for step, positions in self.trained.items() if step <= self.saved}


def lines(command: Command, word: str) -> list[list[str]]:
    return [line.split()[1:] for line in list(command.lines) if line.startswith(word + " ")]


def said(command: Command, word: str, times: int) -> list[list[str]]:
    """Wait until it has said so ``times`` times."""
    deadline = time.monotonic() + LIMIT_S
    while len(found := lines(command, word)) < times:
        if command.returned is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{word!r} {len(found)} of {times} times:\n" + "\n".join(command.lines[-15:]))
        time.sleep(0.1)
    return found


def undisturbed(lab: Lab, version: str, clients: dict[str, Client]) -> dict[str, Any]:
    run = Run(lab, f"undisturbed-{version}", clients)
    offsets = {name: client.clock_offset_s() for name, client in clients.items()}
    before = {name: client.rpcs() for name, client in clients.items()}
    trainer = run.attempt("b", STEPS)
    for slot in range(NUM_WRITERS):
        run.write(slot, "a")
    trainer.wait(LIMIT_S)
    asked = {name: Counter(client.rpcs()) - Counter(before[name]) for name, client in clients.items()}
    drift = {name: client.clock_offset_s() - offsets[name] for name, client in clients.items()}
    sealed = {int(position): float(at) for _, one in run.writers.values() for position, at in lines(one, "sealed")}
    seen = [(int(position), float(at)) for position, at in lines(trainer, "seen")]
    delays = sorted(at + offsets["b"] - sealed[position] - offsets["a"] for position, at in seen if position in sealed)
    first, last = min(at for _, at in seen), max(at for _, at in seen)
    for slot in list(run.writers):
        run.kill(slot)
    both = asked["a"] + asked["b"]
    metadata = {name: count for name, count in both.items() if name not in DATA_RPCS}
    return {
        "groups": len(seen),
        "trajectories_a_group": GROUP_SIZE,
        "trajectories_per_s": round(GROUP_SIZE * len(seen) / (last - first), 1),
        "visible_s": {"p50": round(median(delays), 3), "p99": round(delays[int(0.99 * len(delays))], 3)},
        "clock_disagreement_s": round(max(map(abs, drift.values())), 3),
        "metadata_rpcs_a_trajectory": round(sum(metadata.values()) / (GROUP_SIZE * len(seen)), 2),
        "rpcs": {name: dict(sorted(counts.items())) for name, counts in asked.items()},
    }


def disturbed(lab: Lab, version: str, clients: dict[str, Client], seed: int) -> dict[str, Any]:
    """Kills of writers, a server that goes away, and a trainer that comes back on the other client."""
    run, dice = Run(lab, f"disturbed-{version}", clients), random.Random(seed)
    trainer = run.attempt("b", STEPS)
    for slot, client in enumerate("ab"):
        run.write(slot, client)
    for kill in range(KILLS):
        said(trainer, "trained", 1 + kill)
        time.sleep(dice.random() * 2.0)
        slot = dice.randrange(NUM_WRITERS)
        run.write(slot, run.kill(slot))
    lab.stop_server()
    time.sleep(OUTAGE_S)
    lab.start_server()
    said(trainer, "trained", KILLS + 5)
    trainer.kill()
    assert trainer.over.wait(LIMIT_S), "the trainer survives its kill"
    run.take(trainer)
    writers = [run.kill(slot) for slot in list(run.writers)]
    taken_back = len(run.trained)
    run.roll_back()
    taken_back -= len(run.trained)
    trainer = run.attempt("a", STEPS)
    for slot, client in enumerate(writers):
        run.write(slot, client)
    trainer.wait(LIMIT_S)
    run.take(trainer)
    for slot in list(run.writers):
        run.kill(slot)
    positions = Counter(position for of_step in run.trained.values() for position in of_step)
    return {
        "kills": {"writers": KILLS, "server": 1, "trainer": 1},
        "steps": len(run.trained),
        "steps_taken_back": taken_back,
        "trained_once": sum(count == 1 for count in positions.values()),
        "trained_twice": sum(count > 1 for count in positions.values()),
        "lost": STEPS * GROUPS_PER_STEP - len(positions),
    }


def table(results: dict[str, Any]) -> list[str]:
    head = f"{'NFS':<5}{'visible p50':>12}{'p99':>8}{'metadata a trajectory':>23}{'kills':>7}{'lost':>6}{'twice':>7}"
    rows = [head]
    for version, (calm, storm) in results.items():
        visible = calm["visible_s"]
        figures = f"{visible['p50']:>10.2f} s{visible['p99']:>6.2f} s{calm['metadata_rpcs_a_trajectory']:>23.2f}"
        rows.append(
            f"{version:<5}{figures}{sum(storm['kills'].values()):>7}{storm['lost']:>6}{storm['trained_twice']:>7}"
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", nargs="+", default=["3", "4.1"], choices=["3", "4.1"])
    parser.add_argument("--directory", type=Path, help="where the kernel and the exported files are kept")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if problem := missing():
        parser.error(problem)
    described, results = machine.describe(), dict[str, Any]()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="nfs-"))
    for version in options.versions:
        shutil.rmtree(directory / "export", ignore_errors=True)
        with Lab(directory) as lab:
            clients = {name: lab.client(name, version) for name in "ab"}
            calm = undisturbed(lab, version, clients)
            print(version, calm, flush=True)
            results[version] = (calm, disturbed(lab, version, clients, options.seed))
            print(version, results[version][1], flush=True)
    told = {version: {"undisturbed": calm, "disturbed": storm} for version, (calm, storm) in results.items()}
    facts = {"machine": described, "load_at_end": round(os.getloadavg()[0], 2), "versions": told}
    Path(__file__).with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(results)))
    return 1 if any(storm["lost"] or storm["trained_twice"] for _, storm in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
