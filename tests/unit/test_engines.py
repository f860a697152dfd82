"""Clients of engines as they come and go."""

from __future__ import annotations

from pathlib import Path

from areal_hpc.config.load import load
from areal_hpc.fs import publish_json
from areal_hpc.liveness import seats
from areal_hpc.liveness.seats import Seat
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.engines import Roster
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Recorder

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


def test_clients_are_made_of_engines_that_are_up_and_those_that_left_are_named(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    attempt = run.attempt(1).create()
    config = load([QUICKSTART], ["generation.replicas=0"])
    recorder = Recorder(attempt.records("trainer", 0), role="trainer", index=0, epoch=1)
    process = RoleProcess(role="trainer", index=0, run=run, epoch=1, config=config, token="t", recorder=recorder)
    process.stop_flag.set()  # nothing here waits, so a stop request ends nothing in the middle
    roster = Roster(process)
    assert roster.first() == []

    def come_up(port: int) -> Seat:
        seat = seats.take(attempt, 0, {})
        seat.come_up()
        endpoint = {"url": f"http://10.0.0.1:{port}", "incarnation": seat.incarnation}
        publish_json(attempt.endpoint("generator", seat.index), endpoint)
        return seat

    unseen = seats.take(attempt, 0, {})
    unseen.come_up()
    assert roster.look() == ([], set()), "on a network file system its address may come a moment later"
    unseen.leave()
    seat = come_up(1)
    ((client,), away) = roster.look()
    assert (client.name, client.incarnation, away) == ("generator-0", seat.incarnation, set())
    assert roster.look() == ([], set())
    seat.leave()
    assert roster.look() == ([], {"generator-0"})
    come_up(2)
    assert roster.look() == ([client], set()), "the same client finds who has the seat now"
    assert roster.look() == ([], set())
    moved = client.moved()
    assert moved is not None
    assert (moved.url, moved.incarnation) == ("http://10.0.0.1:2", seat.incarnation + 1)
