"""Who writes the model directory, when several runs want it at once; clients of engines as they come and go."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_hpc.config.load import load
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError
from areal_hpc.fs import publish_json
from areal_hpc.roles import seats
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.seats import Seat
from areal_hpc.roles.wiring import engines
from areal_hpc.roles.wiring.engines import Roster, check_model_path, make_model
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Recorder

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


def config_of(path: Path, seed: int) -> Config:
    return load([QUICKSTART], [f"model.path={path}", f"seed={seed}", "model.maker=test:make"])


def test_B3_of_runs_that_make_one_model_at_once_one_writes_it_and_all_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "models" / "tiny"
    all_are_making, seen = threading.Barrier(3), list[bool]()

    def make(target: Path, seed: int) -> None:
        target.mkdir()
        (target / "config.json").write_text(str(seed))
        all_are_making.wait(timeout=30)
        seen.append(path.exists())  # half a model has no name that anybody looks for
        all_are_making.wait(timeout=30)
        (target / "model.safetensors").write_text(str(seed))

    monkeypatch.setattr(engines, "dotted", lambda *_: make)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(make_model, [config_of(path, seed) for seed in (1, 2, 3)]))
    assert seen == [False] * 3
    assert (path / "config.json").read_text() == (path / "model.safetensors").read_text()
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
    assert [one.name for one in path.parent.iterdir()] == ["tiny"]


def test_B3_a_model_that_is_there_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "dotted", lambda *_: pytest.fail("it was made"))
    make_model(config_of(tmp_path, 1))


def test_a_model_that_is_there_needs_no_maker_any_more(tmp_path: Path) -> None:
    check_model_path(config_of(tmp_path, 1))
    with pytest.raises(ConfigError, match=r"model\.maker = 'test:make' cannot be imported"):
        check_model_path(config_of(tmp_path / "missing", 1))


def test_a_file_in_the_models_place_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").write_text("")
    monkeypatch.setattr(engines, "dotted", lambda *_: lambda target, _: target.mkdir())
    with pytest.raises(NotADirectoryError):
        make_model(config_of(tmp_path / "model", 1))
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


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
