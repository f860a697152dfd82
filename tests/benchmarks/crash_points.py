"""Every crash point of several runs, with several power cuts each: how many, and how many did harm.

    PYTHONPATH=.:tests:tests/benchmarks python tests/benchmarks/crash_points.py --seeds 3 --cuts 4

Writes ``crash_points.json`` beside this file and prints its table. The short form of it is a test:
``tests/integration/test_crash_points.py``.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from pathlib import Path

from faults.crashes import record, recover, states
from machine import describe


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs, each with other interleavings")
    parser.add_argument("--cuts", type=int, default=4, help="power cuts at each crash point")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    machine = describe()
    began, operations = time.monotonic(), Counter[str]()
    crashes, failures = Counter[str](), []
    for seed in range(options.seeds):
        points, promises = record(seed)
        operations.update(point.call.name for point in points)
        for state in states(points, promises, options.cuts, seed):
            crashes[state.kind] += 1
            try:
                recover(state, seed + 100)
            except Exception as error:
                failures.append(f"run {seed}, {state.kind} operation {state.point.number}: {error!r}")
        print(
            f"run {seed}: {len(points)} operations, {crashes.total()} crashes so far, {len(failures)} did harm",
            flush=True,
        )
    figures = {
        "machine": machine,
        "runs": options.seeds,
        "power_cuts_per_point": options.cuts,
        "operations": dict(operations),
        "different_crashes": dict(crashes),
        "crashes": crashes.total(),
        "harmful": failures,
        "seconds": round(time.monotonic() - began),
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    for kind, count in crashes.items():
        print(f"{kind:20s} {count:6d}")
    print(*failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
