"""A run under a quota in bytes for its ring: given too little, then more, killed, and looked at all the time."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from launched import GROUPS, Launched, command, launched, num_consumed, resumed, until

from areal_hpc.run_dir import RunDir

TOO_LITTLE, LITTLE = 0.007, 0.055
"""MiB; a group of the run has 5.4 KiB at most and 1.5 at least, and with seven times two of them nothing would wait."""
STEPS = 12


@pytest.mark.long
def test_fault_39_40_a_ring_stays_within_its_quota_and_the_run_goes_on(model: Path, tmp_path: Path) -> None:
    words = (f"trainer.total_steps={STEPS}", "checkpoint.every_steps=100", f"buffer.max_mb={TOO_LITTLE}")
    with launched(tmp_path, model, *words) as refused:
        assert refused.wait() == 1, refused.text
    assert "buffer.max_mb: quota too small: of buffer.max_mb = 0.007 MiB" in refused.text
    assert "are held (rollout-0 " in refused.text and " at least, and go on with --resume" in refused.text
    assert "trainer-0 ended with exit code 2" in refused.text
    assert refused.run.all_attempts()[-1].epoch == 1, "another attempt would end as this one did"
    largest = [disk(refused.run)]
    with resumed(refused.run, f"buffer.max_mb={LITTLE}") as started:
        for step, victim in ((3, "rollout-0"), (7, "trainer-0")):
            watch_until(started, step, largest)
            started.roles()[victim].send_signal(signal.SIGKILL)
        watch_until(started, STEPS, largest)
        until("its end", lambda: started.process.poll() is not None or largest.append(disk(started.run)))
        assert started.wait() == 0, started.text
    assert max(largest) <= LITTLE * (1 << 20), "more than the quota"
    assert max(largest) > LITTLE * (1 << 20) / 4, "the quota was never near"
    assert len(started.records("checkpoint")) >= 2, "what is consumed is let go of only after two, and none else is due"
    assert num_consumed(started.run) >= STEPS * GROUPS
    told = command("ledger", started.run.root)
    assert told.returncode == 0, told.stdout
    assert re.search(r"ring +at most \d+\.\d KiB of 56\.3 KiB", command("report", started.run.root).stdout)


def watch_until(started: Launched, step: int, sizes: list[int]) -> None:
    """Until it has done ``step``; ``sizes`` get what the ring holds meanwhile."""

    def reached() -> bool:
        sizes.append(disk(started.run))
        assert started.process.poll() is None or step == STEPS, started.text
        return any(record.number("step") >= step for record in started.records("step"))

    until(f"step {step}", reached)


def disk(run: RunDir) -> int:
    """Bytes in the ring; what is deleted while one looks counts for nothing."""
    total = 0
    for path in run.ring.glob("chains/*/*.seg"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total
