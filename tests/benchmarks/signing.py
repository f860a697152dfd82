"""What it costs that a connection is signed: broadcasts of gloo over loopback, signed and not, in turns.

    PYTHONPATH=.:tests:tests/benchmarks python tests/benchmarks/signing.py [--mb 64] [--rounds 10] [--turns 5]

Two processes of their own for each turn, as a trainer and an engine are. Writes ``signing.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import describe

from areal_hpc.config.cluster import SignSockets
from areal_hpc.signing import provide, signing_variables

LIMIT_S = 300.0
MEMBER = """
import os, sys, time, torch
from areal_hpc.collective import broadcast, host_store, join_group, leave_group, name_at
from areal_hpc.transfer import GroupAddress
rank, mb, rounds = map(int, sys.argv[1:])
store = host_store(timeout_s=60) if rank == 0 else None
if store is not None:
    print(store.port, name_at(store, "w"), flush=True)
port, name = sys.stdin.readline().split()
address = GroupAddress(host="127.0.0.1", port=int(port), name=name, world_size=2, backend="gloo")
group = join_group(address, rank, 60, store)
tensor = torch.zeros(mb << 20, dtype=torch.uint8)
broadcast(tensor, group)
began = time.perf_counter()
for _ in range(rounds):
    broadcast(tensor, group)
broadcast(tensor[:1], group)
print(mb * rounds / (time.perf_counter() - began), flush=True)
leave_group(group)
os._exit(0)
"""


def speed(variables: dict[str, str], mb: int, rounds: int) -> float:
    """MiB a second that the second member has received."""
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(rank), str(mb), str(rounds)],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert members[0].stdout is not None
    place = members[0].stdout.readline()
    for member in members:
        assert member.stdin is not None
        member.stdin.write(place)
        member.stdin.flush()
    told = [member.communicate(timeout=LIMIT_S)[0] for member in members]
    return float(told[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="areal-signing-") as scratch:
        library, key = Path(scratch) / "signing.so", Path(scratch) / "key"
        provide(library, SignSockets.ALWAYS)
        key.write_text("of this benchmark", encoding="ascii")
        ways: dict[str, dict[str, str]] = {"unsigned": {}, "signed": signing_variables(library, key, {})}
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(chosen.turns):
            for name, variables in ways.items():
                taken[name].append(speed(variables, chosen.mb, chosen.rounds))
    medians = {name: round(statistics.median(speeds)) for name, speeds in taken.items()}
    ratio = round(medians["signed"] / medians["unsigned"], 3)
    for name, median in medians.items():
        print(f"{name:9} {median:6,} MiB/s (of {', '.join(f'{one:,.0f}' for one in taken[name])})")
    print(f"signed connections carry {ratio} of unsigned ones")
    result = {"machine": describe(), "mb": chosen.mb, "mib_per_s": medians, "signed_of_unsigned": ratio}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
