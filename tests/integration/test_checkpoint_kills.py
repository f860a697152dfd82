"""A trainer that only saves and prunes is killed at random instants: what it reported as saved is never lost."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from areal_hpc.checkpoint import newest, sweep
from areal_hpc.run_dir import RunDir

SAVER = """
import sys
from pathlib import Path
from areal_hpc.checkpoint import Keep, newest, prune, sweep, write
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion

run, epoch = RunDir(Path(sys.argv[1])), int(sys.argv[2])
lineage = dict.fromkeys(range(1, epoch + 1))
sweep(run, epoch)
found = newest(run, lineage)
step = found.version.step if found else 0
while True:
    step += 1
    save = lambda d: [(d / f"shard-{i}").write_bytes(bytes([step % 256]) * 4096) for i in range(4)]
    write(run, WeightVersion(epoch=epoch, step=step), save, {"step": step})
    print(step, flush=True)
    prune(run, lineage, Keep(newest=1))
"""


def test_C12_kill_9_at_any_instant_loses_no_reported_checkpoint(tmp_path: Path) -> None:
    run, chance, reported = RunDir.create(tmp_path / "run"), random.Random(1), 0
    for epoch in range(1, 13):
        command = [sys.executable, "-c", SAVER, str(run.root), str(epoch)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as saver:
            assert saver.stdout is not None
            first = saver.stdout.readline()  # it is past its start
            time.sleep(chance.uniform(0, 0.05))
            saver.kill()
            lines = [first, *saver.stdout]
        assert int(first) > reported
        reported = max(int(line) for line in lines)
        found = newest(run, dict.fromkeys(range(1, epoch + 1)))
        assert found is not None
        assert found.state == {"step": found.version.step}
        assert found.version.step in (reported, reported + 1)  # the last one may be durable and not yet reported
    sweep(run, epoch=13)
    assert all(path.name.startswith("step-") for path in run.checkpoints.iterdir())
