"""The same cases for every weight transport, against real embedded engines in their own processes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded_process import embedded
from tiny_models import make_model

from areal_hpc.buckets import fingerprint, plan_buckets
from areal_hpc.delta import checksum
from areal_hpc.errors import WeightUpdateError
from areal_hpc.generation.client import EngineClient
from areal_hpc.generation.router import Router
from areal_hpc.protocols import WeightTransport
from areal_hpc.types import GenerationRequest, Sampling
from areal_hpc.weights.baseline import DeltaBaseline
from areal_hpc.weights.broadcast import BroadcastTransport
from areal_hpc.weights.disk import DiskTransport

Weights = dict[str, torch.Tensor]
MakeTransport = Callable[[list[EngineClient]], WeightTransport]
PROMPT = (65, 66, 67)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[list[str], Weights]]:
    """Two engines and the weights they started with."""
    directory = tmp_path_factory.mktemp(request.param)
    model = make_model(directory, "qwen3", seed=3)
    names = set(model.state_dict()) - {"lm_head.weight"}  # tied to the embedding
    dtype = getattr(torch, request.param)
    with embedded(directory, 2, dtype=request.param) as urls:
        yield urls, {name: model.state_dict()[name].to(dtype) for name in sorted(names)}


@pytest.fixture(params=["broadcast", "disk", "broadcast of changes", "disk of changes"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> MakeTransport:
    changes = request.param.endswith("of changes")

    def baseline() -> DeltaBaseline | None:
        return DeltaBaseline(whole_every=3) if changes else None

    if request.param.startswith("broadcast"):
        epochs.append(len(epochs))
        return lambda targets: BroadcastTransport(
            targets, epoch=epochs[-1], bucket_bytes=20_000, timeout_s=30, baseline=baseline()
        )
    return lambda targets: DiskTransport(
        tmp_path / "weights", targets, epoch=1, file_bytes=50_000, timeout_s=30, baseline=baseline()
    )


epochs: list[int] = []


def scaled(weights: Weights, factor: float) -> Weights:
    return {name: value * factor for name, value in weights.items()}


def run(urls: list[str], scenario: Callable[[list[EngineClient]], Any]) -> Any:
    async def body() -> Any:
        clients = [EngineClient(f"engine-{k}", url, token="secret") for k, url in enumerate(urls)]
        try:
            return await scenario(clients)
        finally:
            for client in clients:
                await client.close()

    return asyncio.run(body())


async def held(client: EngineClient) -> dict[str, int]:
    """CRC-32C of what the engine holds, by its own account."""
    _, answer = await client._http.call("POST", "/weights_checker", {"action": "checksum"}, 30)
    sums: dict[str, int] = answer["ranks"][0]["checksums"]
    return sums


def test_every_engine_holds_what_was_sent_bit_for_bit(fleet: tuple[list[str], Weights], make: MakeTransport) -> None:
    urls, weights = fleet

    async def scenario(clients: list[EngineClient]) -> None:
        transport = make(clients)
        for version, factor in ((1, 1.25), (2, 0.5), (3, 1.0)):
            sent = scaled(weights, factor)
            told = await transport.publish(version, sent.items())
            for client in clients:
                sums = await held(client)
                assert {name: sums[name] for name in sent} == {name: checksum(value) for name, value in sent.items()}
                assert client.version == version
                request = GenerationRequest(
                    request_id=f"v{version}", token_ids=PROMPT, sampling=Sampling(max_new_tokens=4)
                )
                assert set((await client.generate(request)).versions) == {version}
            assert re.search(r"gloo from 127\.0\.0\.1; host .*interfaces|files in /.*/weights", transport.route)
            assert 0 < told["seconds_paused"] <= told["seconds"]
            assert told["bytes"] + told.get("bytes_saved", 0) == sum(value.nbytes for value in sent.values())
            (whole,) = plan_buckets(sent.items(), 1 << 40)
            assert told["fingerprint"] == fingerprint(whole.specs)
        await transport.close()

    run(urls, scenario)


def test_every_engine_holds_what_was_sent_when_little_of_it_has_changed(
    fleet: tuple[list[str], Weights], make: MakeTransport
) -> None:
    """A few elements a step, infinities, NaNs and negative zeros among them; also after one engine was caught up."""
    urls, weights = fleet
    special = torch.tensor([float("nan"), -0.0, float("inf"), 1e-40])
    now = {name: value.clone() for name, value in weights.items()}
    before = dict(weights)

    async def scenario(clients: list[EngineClient]) -> list[float]:
        transport = make(clients)
        saved = []
        for version in range(60, 66):
            for value in now.values():
                place = (7 * version) % value.numel()
                value.view(-1)[place : place + 4] = special[: value.numel() - place].to(value.dtype)
            if version == 63:
                await transport.catch_up(62, before.items(), clients[:1])
            told = await transport.publish(version, now.items())
            saved.append(told.get("bytes_saved", 0.0))
            before.update((name, value.clone()) for name, value in now.items())
            for client in clients:
                sums = await held(client)
                assert {name: sums[name] for name in now} == {name: checksum(value) for name, value in now.items()}
        await transport.publish(66, weights.items())
        await transport.close()
        return saved

    saved = run(urls, scenario)
    total = sum(value.nbytes for value in weights.values())
    whole = [60, 63, 66] if any(saved) else range(60, 67)  # the first, the one after the newcomer, every third
    for version, one in enumerate(saved, start=60):
        assert one == 0 if version in whole else one > 0.9 * total


def test_a_member_that_does_not_hold_what_the_trainer_believes_is_found_out(
    fleet: tuple[list[str], Weights], make: MakeTransport, tmp_path: Path
) -> None:
    """Somebody else gave it other weights: a missed update is an error, and never silently wrong."""
    urls, weights = fleet
    other = scaled(weights, 3.0)
    now = {name: value.clone() for name, value in weights.items()}

    async def scenario(clients: list[EngineClient]) -> None:
        transport = make(clients)
        await transport.publish(70, now.items())
        await DiskTransport(tmp_path / "other", clients[:1], epoch=1).publish(70, other.items())
        for value in now.values():
            value.view(-1)[:2] += 1
        try:
            told = await transport.publish(71, now.items())
        except WeightUpdateError as error:
            assert re.search("engine-0.*made against other weights", str(error))
            assert (await stats(clients[0]))["quarantined"]
            transport.membership.admit(clients[0])
            told = await transport.publish(71, now.items())
            assert told["bytes_saved"] == 0
        assert told["bytes"] == sum(value.nbytes for value in now.values())
        for client in clients:
            sums = await held(client)
            assert {name: sums[name] for name in now} == {name: checksum(value) for name, value in now.items()}
        await transport.close()

    run(urls, scenario)


def test_an_answer_under_way_keeps_its_tokens_and_carries_both_versions(
    fleet: tuple[list[str], Weights], make: MakeTransport
) -> None:
    urls, weights = fleet

    async def scenario(clients: list[EngineClient]) -> None:
        transport = make(clients)
        await transport.publish(10, weights.items())
        sampling = Sampling(max_new_tokens=300, temperature=0.0, ignore_eos=True)
        alone = await clients[1].generate(GenerationRequest(request_id="alone", token_ids=PROMPT, sampling=sampling))
        under_way = asyncio.create_task(
            clients[0].generate(GenerationRequest(request_id="under way", token_ids=PROMPT, sampling=sampling))
        )
        newest = 10
        while not under_way.done():
            newest += 1
            await transport.publish(newest, scaled(weights, 1 + newest / 100).items())
        completion = await under_way
        versions = completion.versions.tolist()
        assert len(versions) == 300
        assert versions == sorted(versions)
        assert len(set(versions)) > 1
        assert set(versions) <= set(range(10, newest + 1))
        undisturbed = versions.count(10)
        assert completion.token_ids.tolist()[:undisturbed] == alone.token_ids.tolist()[:undisturbed]
        await transport.close()

    run(urls, scenario)


def test_D11_no_way_to_a_paused_engine_gets_tokens_of_old_weights_and_none_is_lost(
    fleet: tuple[list[str], Weights], make: MakeTransport
) -> None:
    """Neither by the router of a rollout worker, who knows nothing of the pause, nor by plain HTTP."""
    urls, weights = fleet

    async def scenario(clients: list[EngineClient]) -> None:
        transport = make(clients)
        await transport.publish(40, weights.items())
        for client in clients:
            await client.pause()
        before = [await stats(client) for client in clients]
        sampling = Sampling(max_new_tokens=8, ignore_eos=True)
        router = Router([EngineClient(f"engine-{k}", url, token="secret") for k, url in enumerate(urls)])
        typed = [GenerationRequest(request_id=f"r{k}", token_ids=PROMPT, sampling=sampling) for k in range(4)]
        asked = [asyncio.create_task(router.generate(request)) for request in typed]
        body = {"input_ids": list(PROMPT), "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        raw = [asyncio.create_task(client._http.call("POST", "/generate", body, 60)) for client in clients]
        async with asyncio.timeout(30):
            while sum([(await stats(client))["num_waiting"] for client in clients]) < 6:
                await asyncio.sleep(0.01)
        assert [(await stats(client))["num_generated_tokens"] for client in clients] == [
            one["num_generated_tokens"] for one in before
        ]
        assert not any(task.done() for task in (*asked, *raw))
        await transport.publish(41, weights.items())
        completions = await asyncio.gather(*asked)
        assert [completion.versions.tolist() for completion in completions] == [[41] * 8] * 4
        for status, answer in await asyncio.gather(*raw):
            assert (status, len(answer["output_ids"])) == (200, 8)
            assert answer["meta_info"]["weight_version"] == "41"
        await router.close()
        await transport.close()

    run(urls, scenario)


async def stats(client: EngineClient) -> dict[str, Any]:
    _, answer = await client._http.call("GET", "/server_info", None, 30)
    assert isinstance(answer, dict)
    return answer


def test_D2_the_order_of_the_weights_is_the_senders_business(
    fleet: tuple[list[str], Weights], make: MakeTransport
) -> None:
    urls, weights = fleet

    async def scenario(clients: list[EngineClient]) -> None:
        transport = make(clients)
        for version, names in ((20, list(weights)), (21, list(reversed(weights)))):
            await transport.publish(version, ((name, weights[name]) for name in names))
            sums = await held(clients[0])
            assert {name: sums[name] for name in weights} == {name: checksum(value) for name, value in weights.items()}
        await transport.close()

    run(urls, scenario)


def test_an_update_that_lacks_a_parameter_is_refused_and_the_next_whole_one_heals(
    fleet: tuple[list[str], Weights], make: MakeTransport
) -> None:
    urls, weights = fleet
    some = dict(list(weights.items())[:-1])

    async def scenario(clients: list[EngineClient]) -> None:
        transport = make(clients)
        read: list[str] = []

        def produced() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in some.items():
                read.append(name)
                yield name, value

        with pytest.raises(WeightUpdateError, match="engine-0"):
            await transport.publish(30, produced())
        assert read == list(some)
        for client in clients:
            transport.membership.admit(client)
        await transport.publish(31, weights.items())
        assert [await client.probe() for client in clients] == [31, 31]
        await transport.close()

    run(urls, scenario)


def test_an_engine_that_comes_later_is_caught_up_alone_while_the_others_sample_on(
    fleet: tuple[list[str], Weights], make: MakeTransport
) -> None:
    urls, weights = fleet

    async def scenario(clients: list[EngineClient]) -> None:
        old, new = clients
        transport = make([old])
        await transport.publish(40, weights.items())
        sampling = Sampling(max_new_tokens=200, temperature=0.0, ignore_eos=True)
        request = GenerationRequest(request_id="under way", token_ids=PROMPT, sampling=sampling)
        under_way = asyncio.create_task(old.generate(request))
        told = await transport.catch_up(40, weights.items(), [new])
        assert told["bytes"] >= sum(value.nbytes for value in weights.values())
        assert [target.name for target in transport.membership.members] == ["engine-0", "engine-1"]
        assert set((await under_way).versions) == {40}
        assert await held(old) == await held(new)
        assert await new.probe() == 40
        await transport.publish(41, scaled(weights, 1.5).items())
        assert [await client.probe() for client in clients] == [41, 41]
        assert await held(old) == await held(new)
        await transport.close()

    run(urls, scenario)


def test_a_newcomer_that_fails_is_named_and_harms_nobody(fleet: tuple[list[str], Weights], make: MakeTransport) -> None:
    urls, weights = fleet
    read: list[str] = []

    def lacking() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in list(weights.items())[:-1]:
            read.append(name)
            yield name, value

    async def scenario(clients: list[EngineClient]) -> None:
        old, new = clients
        transport = make([old])
        await transport.publish(50, weights.items())
        with pytest.raises(WeightUpdateError, match="engine-1"):
            await transport.catch_up(50, lacking(), [new])
        assert read == list(weights)[:-1]
        assert [target.name for target in transport.membership.members] == ["engine-0"]
        assert "engine-1" in transport.membership.lost["engine-1"]
        request = GenerationRequest(request_id="r", token_ids=PROMPT, sampling=Sampling(max_new_tokens=2))
        assert set((await old.generate(request)).versions) == {50}
        await transport.catch_up(50, weights.items(), [new])
        assert (await new.probe(), dict(transport.membership.lost)) == (50, {})
        await transport.close()

    run(urls, scenario)


def test_without_engines_there_is_nothing_to_publish_to(make: MakeTransport) -> None:
    read: list[str] = []

    def produced() -> Iterator[tuple[str, torch.Tensor]]:
        read.append("w")
        yield "w", torch.ones(1)

    with pytest.raises(WeightUpdateError, match="no engine"):
        asyncio.run(make([]).publish(1, produced()))
    assert read == ["w"]  # the weights are read to their end all the same
