"""How the server around vLLM, and its workers, take weights, with a fake in vLLM's place."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import ClientSession
from fake_vllm import KEY, PROMPT, Drive, asked, driver
from safetensors.torch import save_file
from tiny_models import make_model

from areal_hpc.delta import Weight, bits, difference
from areal_hpc.errors import GenerationError, WeightUpdateError
from areal_hpc.exits import EXIT_USER_ERROR
from areal_hpc.generation.client import EngineClient
from areal_hpc.generation.connection import EngineLost
from areal_hpc.generation.served.arrivals import Arrivals
from areal_hpc.generation.vllm.worker import prepare_tied
from areal_hpc.weights.disk import DiskTransport


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    directory = tmp_path_factory.mktemp("model")
    state = make_model(directory, "qwen3", seed=3).state_dict()
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # of an old checkpoint
    save_file(buffers, directory / "buffers.safetensors")
    return directory, {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}  # it is tied


@pytest.fixture
def drive(model: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> Drive:
    return driver(model[0], monkeypatch)


def specs_of(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtypes": ["float32"] * len(tensors),
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "checksums": [0] * len(tensors),
        "group_name": "w",
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }


async def post(client: EngineClient, path: str, body: dict[str, Any]) -> tuple[int, str]:
    status, answer = await client._http.call("POST", path, body, 10)
    return status, answer["message"]


async def begun(client: EngineClient) -> None:
    address = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "w"}
    assert (await post(client, "/init_weights_update_group", address))[0] == 200
    await client.pause()
    assert (await post(client, "/begin_weight_update", {}))[0] == 200


async def steps_of_an_update(client: EngineClient, weights: dict[str, torch.Tensor]) -> list[tuple[int, str]]:
    """Status and message of each."""
    return [
        await post(client, "/begin_weight_update", {}),
        await post(client, "/update_weights_from_distributed", specs_of(weights)),
        await post(client, "/end_weight_update", {}),
    ]


def test_weights_arrive_whole_or_the_engine_serves_nothing(
    drive: Drive, model: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    weights = model[1]
    some = dict(list(weights.items())[:-1])

    async def scenario(client: EngineClient, engine: Any) -> None:
        await begun(client)
        assert (await post(client, "/update_weights_from_distributed", specs_of(some)))[0] == 200
        status, message = await post(client, "/end_weight_update", {})
        assert (status, next(iter(weights.keys() - some.keys())) in message) == (400, True)
        with pytest.raises(GenerationError, match="quarantined"):
            await client.generate(asked(3))
        assert (await post(client, "/continue_generation", {}))[0] == 400
        with pytest.raises(GenerationError, match="quarantined"):
            await client.probe()

        assert (await post(client, "/begin_weight_update", {}))[0] == 200
        assert (await post(client, "/update_weights_from_distributed", specs_of(weights)))[0] == 200
        assert (await post(client, "/end_weight_update", {}))[0] == 200
        await client.resume(9)
        assert await client.probe() == 9
        assert (await client.generate(asked(3, "healed"))).versions.tolist() == [9] * 3
        taken = [method for method, _ in engine.llm.called]
        update = ["areal_idle", "areal_begin", "areal_receive", "areal_come"]
        assert taken == ["areal_join", "areal_entered", *update * 2, "areal_ready", "areal_load"]

    drive(scenario)


@pytest.mark.parametrize("fate", ["late", "failed"])
def test_D24_a_group_that_did_not_form_is_left_by_the_workers_that_have_entered_it_or_will(
    drive: Drive, fate: str
) -> None:
    async def scenario(client: EngineClient, engine: Any) -> None:
        if fate == "late":
            engine.llm.answers = {"areal_entered": False}
        else:
            engine.llm.failing = "areal_entered"
        address = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "w"}
        status, message = await post(client, "/init_weights_update_group", address)
        assert (status, "did not join in 0.2 s" in message or "no route to host" in message) == (400, True)
        assert engine.llm.called[-1] == ("areal_leave", ("w",))
        engine.llm.answers, engine.llm.failing = {}, ""
        assert (await post(client, "/init_weights_update_group", address))[0] == 200
        assert (await post(client, "/destroy_weights_update_group", {"group_name": "w"}))[0] == 200

    drive(scenario, update_timeout_s=0.2)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"names": ["stranger"]}, "'stranger' has shape"),
        ({"shapes": [[1]]}, "has shape .*, the model's is"),
        ({"nums_changed": [3]}, "comes as a delta, and nothing is kept"),
        ({"load_format": None}, "flattened buckets only"),
        ({"group_name": "other"}, "group 'other' does not exist"),
    ],
)
def test_a_bucket_that_the_model_cannot_take_is_refused_before_anybody_waits_for_it(
    drive: Drive, model: tuple[Path, dict[str, torch.Tensor]], change: dict[str, Any], complaint: str
) -> None:
    async def scenario(client: EngineClient, engine: Any) -> None:
        await begun(client)
        body = specs_of(dict([next(iter(model[1].items()))])) | change
        status, message = await post(client, "/update_weights_from_distributed", body)
        assert status == 400
        assert re.search(complaint, message)
        assert "areal_receive" not in [method for method, _ in engine.llm.called]

    drive(scenario)


def test_weights_are_put_into_place_in_a_pause_only(drive: Drive, model: tuple[Path, dict[str, torch.Tensor]]) -> None:
    async def scenario(client: EngineClient, _: Any) -> None:
        assert (await post(client, "/begin_weight_update", {}))[0] == 200
        for path, body in (("/end_weight_update", {}), ("/update_weights_from_disk", {"model_path": str(model[0])})):
            status, message = await post(client, path, body)
            assert (status, "not paused" in message) == (400, True)
        assert await client.probe() == 0  # nothing has happened to it

    drive(scenario)


@pytest.mark.parametrize("method", ["areal_idle", "areal_begin", "areal_receive", "areal_come", "areal_load"])
def test_a_worker_that_fails_half_way_quarantines_the_engine(
    drive: Drive, model: tuple[Path, dict[str, torch.Tensor]], method: str
) -> None:
    async def scenario(client: EngineClient, engine: Any) -> None:
        await begun(client)
        engine.llm.failing = method
        answers = await steps_of_an_update(client, model[1])
        assert any("no route to host" in message for status, message in answers if status == 400)
        with pytest.raises(GenerationError, match="quarantined"):
            await client.generate(asked(3))

    drive(scenario)


@pytest.mark.parametrize("method", ["areal_begin", "areal_load"])
def test_D24_a_worker_that_hangs_in_an_update_ends_the_server_so_that_it_is_started_anew(
    drive: Drive, model: tuple[Path, dict[str, torch.Tensor]], method: str
) -> None:
    async def scenario(client: EngineClient, engine: Any) -> None:
        await begun(client)
        engine.llm.hanging = method
        answers = await steps_of_an_update(client, model[1])
        assert any("vLLM's engine has not answered for 0.2 s; it ends" in message for _, message in answers)
        async with asyncio.timeout(20):
            with pytest.raises(EngineLost):
                while True:  # nobody closes the engine here: the server ends by itself
                    await client._http.call("GET", "/health", None, 1)
        assert not engine.llm.errored

    drive(scenario, update_timeout_s=0.2)


async def update(client: EngineClient, weights: dict[str, torch.Tensor]) -> list[str]:
    """One update in a pause; what was said to each of its steps that failed."""
    await client.pause()
    answers = await steps_of_an_update(client, weights)
    return [message for status, message in answers if status != 200]


def tell_time_by(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a load take as long as it says that it does."""
    from areal_hpc.generation.vllm import updates

    monkeypatch.setattr(updates, "time", SimpleNamespace(monotonic=lambda: engine.llm.now, sleep=time.sleep))


LATE = "vLLM took 40.0 s to load them, longer than limits.weight_update_s = 30 allows"


def test_a_load_that_is_late_now_and_then_starts_nothing_anew(
    drive: Drive, model: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be as slow in its next life. What it loads after all is worth nothing: the trainer has gone on."""

    async def scenario(client: EngineClient, engine: Any) -> None:
        tell_time_by(engine, monkeypatch)
        await begun(client)
        for late in (True, True, False, True, True):
            engine.llm.slow = {"areal_load": 40.0} if late else {"areal_load": 20.0}
            failed = await update(client, model[1])
            assert [LATE in message for message in failed] == [True] * late
            assert bool(engine.quarantined) is late
        assert engine.alive()

    drive(scenario)


def test_a_load_that_gets_on_is_waited_for_however_long_it_takes(
    drive: Drive, model: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers touch a file for each tensor. Here it gets on ten times, at intervals of most of the limit."""
    from areal_hpc.generation.vllm import updates

    monkeypatch.setattr(updates, "LOOK_S", 0.001)

    async def scenario(client: EngineClient, engine: Any) -> None:
        tell_time_by(engine, monkeypatch)
        await begun(client)
        steps, loop = iter(range(1, 11)), asyncio.get_running_loop()

        def further(_: Any) -> int:
            if (step := next(steps, None)) is None:
                loop.call_soon_threadsafe(engine.llm.returns.set)
                return 10
            engine.llm.now += 20.0
            return step

        monkeypatch.setattr(updates.WeightUpdates, "how_far", further)
        engine.llm.hanging = "areal_load"
        [message] = await update(client, model[1])
        assert "vLLM took 200.0 s to load them, longer than limits.weight_update_s = 30 allows" in message
        assert engine.alive()

    drive(scenario)


def test_loads_that_are_always_late_end_it_for_good_with_what_to_do(
    drive: Drive, model: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(client: EngineClient, engine: Any) -> None:
        tell_time_by(engine, monkeypatch)
        await begun(client)
        engine.llm.slow = {"areal_load": 40.0}
        for _ in range(3):
            assert engine.alive()
            await update(client, model[1])
        assert not engine.alive()
        assert engine.unfit == f"{LATE}, 3 times in a row; raise it to 80"

    drive(scenario)


def test_what_a_person_has_to_change_is_its_last_word_and_its_exit_code(
    drive: Drive, model: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from areal_hpc.generation.vllm import server

    async def serve(engine: Any, ours: Any) -> None:
        engine.unfit = ours["key"]

    monkeypatch.setattr(server, "serve", serve)
    words = ["--model", str(model[0]), "--max-model-len", "300", "--max-num-seqs", "2"]
    monkeypatch.setattr(sys, "argv", ["server", json.dumps({"version": "0", "key": "raise the limit"}), *words])
    with pytest.raises(SystemExit) as ended:
        server.main()
    assert ended.value.code == EXIT_USER_ERROR
    assert capsys.readouterr().err == "areal_hpc: raise the limit\n"


@pytest.mark.parametrize(
    ("method", "complaint"), [("areal_come", "did not receive in 0.2 s"), ("areal_idle", "coming")]
)
def test_D24_what_never_comes_is_given_up_in_time_while_the_engine_samples_on(
    drive: Drive,
    model: tuple[Path, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    complaint: str,
) -> None:
    """The network is cut where a thread of the worker waits: that is no reason to end the engine."""
    from areal_hpc.generation.vllm import updates

    monkeypatch.setattr(updates, "GRACE_S", 0.0)

    async def scenario(client: EngineClient, engine: Any) -> None:
        await begun(client)
        engine.llm.answers = {method: False}
        began = time.monotonic()
        failed = await update(client, model[1])
        assert time.monotonic() - began < 10
        assert any(complaint in message for message in failed), failed
        assert engine.alive()
        engine.llm.answers = {}
        assert await update(client, model[1]) == []

    drive(scenario, update_timeout_s=0.2)


def test_a_request_whose_body_was_on_its_way_when_the_engine_was_quarantined_is_not_served(drive: Drive) -> None:
    body = json.dumps({"input_ids": list(PROMPT), "return_logprob": True}).encode()

    async def scenario(client: EngineClient, engine: Any) -> None:
        arrived = asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield body[:9]
            await arrived.wait()
            yield body[9:]

        async with ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http:
            asking = asyncio.create_task(http.post(f"{client._http.url}/generate", data=slowly()))
            await client.probe()  # the server has begun to read by then
            engine.quarantined = "an update of its weights failed half-way"
            arrived.set()
            assert (await asking).status == 503
        assert engine.llm.asked == []

    drive(scenario)


def test_weights_come_from_disk_and_a_directory_of_another_model_changes_nothing(
    drive: Drive, model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    async def scenario(client: EngineClient, engine: Any) -> None:
        transport = DiskTransport(tmp_path / "weights", [client], epoch=1)
        await transport.publish(3, model[1].items())
        assert await client.probe() == 3
        assert [method for method, _ in engine.llm.called] == ["areal_idle", "areal_begin", "areal_ready", "areal_read"]
        with pytest.raises(WeightUpdateError, match="does not fit"):
            await transport.publish(4, list(model[1].items())[:-1])
        assert not engine.quarantined

    drive(scenario)


def test_a_tied_head_is_made_ready_again_and_nothing_else() -> None:
    prepared: list[Any] = []

    class Layer(torch.nn.Module):
        def __init__(self, weight: torch.nn.Parameter) -> None:
            super().__init__()
            self.weight = weight
            self.quant_method = self

        def process_weights_after_loading(self, layer: Any) -> None:
            prepared.append(layer)

    shared = torch.nn.Parameter(torch.zeros(2, 2))
    model = torch.nn.ModuleList([Layer(shared), Layer(torch.nn.Parameter(torch.ones(2, 2))), Layer(shared)])
    prepare_tied(model)
    assert [id(layer) for layer in prepared] == [id(model[2])]


WHOLE = {"a": torch.arange(6.0), "b": torch.ones(3, dtype=torch.bfloat16)}


def changed() -> dict[str, torch.Tensor]:
    now = {name: tensor.clone() for name, tensor in WHOLE.items()}
    now["a"][2] = float("nan")
    now["b"][0] = -0.0
    return now


def taken(arrivals: Arrivals, weights: Iterable[tuple[str, Weight]], *, loaded: bool = True) -> dict[str, torch.Tensor]:
    arrivals.begin(keeps=True)
    arrivals.new.update(arrivals.taken(weights))
    new = arrivals.new
    if loaded:
        arrivals.settle()
    return new


def test_changes_are_applied_to_what_the_worker_has_and_to_nothing_else() -> None:
    now = changed()
    deltas = [(name, difference(WHOLE[name], now[name])) for name in now]
    arrivals = Arrivals()
    with pytest.raises(WeightUpdateError, match="'a', of which nothing is held; send it whole"):
        taken(arrivals, deltas)
    taken(arrivals, [(name, tensor.clone()) for name, tensor in WHOLE.items()])
    for name, tensor in taken(arrivals, deltas).items():
        assert torch.equal(bits(tensor), bits(now[name]))
    with pytest.raises(WeightUpdateError, match="made against other weights"):
        taken(arrivals, [(name, difference(now[name], WHOLE[name] + 1)) for name in ("b",)] + deltas)


def test_after_a_failed_update_changes_alone_are_refused() -> None:
    """They were applied to the only copy that there is, so that it is worth nothing."""
    now = changed()
    deltas = [(name, difference(WHOLE[name], now[name])) for name in now]
    arrivals = Arrivals()
    taken(arrivals, [(name, tensor.clone()) for name, tensor in WHOLE.items()])
    taken(arrivals, deltas, loaded=False)
    with pytest.raises(WeightUpdateError, match="nothing is held"):
        taken(arrivals, deltas)
    assert taken(arrivals, WHOLE.items()).keys() == WHOLE.keys()


def test_without_need_the_worker_keeps_nothing() -> None:
    arrivals = Arrivals()
    arrivals.begin(keeps=False)
    arrivals.new.update(arrivals.taken(WHOLE.items()))
    arrivals.settle()
    assert arrivals.held == arrivals.base == arrivals.new == {}
