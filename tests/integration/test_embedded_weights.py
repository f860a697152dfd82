"""Weights reach the embedded engine from a trainer in another process, whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from embedded_api import ENDLESS, GREEDY, LIMIT_S, PROMPT, Api, run, serving
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from areal_hpc.buckets import plan_buckets
from areal_hpc.collective import host_store, join_group, leave_group
from areal_hpc.delta import checksum
from areal_hpc.transfer import GroupAddress


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {name: tmp_path_factory.mktemp(name) for name in ("old", "new")}
    for seed, directory in enumerate(directories.values()):
        make_model(directory, "llama", seed)
    return directories


def trainer_process(pipe: Connection) -> None:
    """Rank 0 in a process of its own: does what it is told until it is killed."""
    group: Any = None
    store: Any = None
    while True:
        order, *arguments = pipe.recv()
        if order == "host":
            store = host_store(timeout_s=LIMIT_S)
            pipe.send(store.port)
        elif order == "join":
            group = join_group(*arguments, rank=0, timeout_s=LIMIT_S, store=store)
            pipe.send("joined")
        elif order == "broadcast":
            for tensor in arguments:
                dist.broadcast(tensor, group=group, group_src=0)
            pipe.send("sent")
        elif order == "leave":
            leave_group(group)
            pipe.send("left")


class Trainer:
    """That process, and what an engine has to be told while it broadcasts."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=trainer_process, args=(end,), daemon=True)
        self._process.start()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(LIMIT_S)

    async def _do(self, *order: Any) -> Any:
        self._pipe.send(order)
        assert await asyncio.to_thread(self._pipe.poll, LIMIT_S), f"the trainer did not {order[0]}"
        return self._pipe.recv()

    async def join(self, api: Api) -> None:
        port = await self._do("host")
        self.name = f"weights-{port}"
        address = GroupAddress(host="127.0.0.1", port=port, name=self.name, world_size=2, backend="gloo")
        order = {
            "master_address": address.host,
            "master_port": address.port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": address.name,
            "backend": "gloo",
        }
        _, (status, answer) = await asyncio.gather(
            self._do("join", address), api.post("/init_weights_update_group", **order)
        )
        assert (status, answer["success"]) == (200, True), answer
        assert (await api.post("/init_weights_update_group", **order))[0] == 400  # the name is taken

    async def leave(self, api: Api) -> None:
        status, answer = await api.post("/destroy_weights_update_group", group_name=self.name)
        assert (status, answer["success"]) == (200, True)
        await self._do("leave")

    async def send(
        self,
        api: Api,
        weights: dict[str, torch.Tensor],
        *,
        flattened: bool = True,
        damaged: bool = False,
        **fields: Any,
    ) -> list[tuple[int, Any]]:
        """Broadcast ``weights`` in buckets, while the engine is told to receive each; its answers."""
        answers = []
        for bucket in plan_buckets(weights.items(), 64 * 1024):
            if damaged:
                bucket.buffer[-1] ^= 1
            order = {
                "names": [spec.name for spec in bucket.specs],
                "dtypes": [spec.dtype for spec in bucket.specs],
                "shapes": [list(spec.shape) for spec in bucket.specs],
                "group_name": self.name,
                "flush_cache": False,
                "checksums": [spec.checksum for spec in bucket.specs],
                "load_format": "flattened_bucket" if flattened else None,
                **fields,
            }
            tensors = [bucket.buffer] if flattened else [weights[spec.name] for spec in bucket.specs]
            answer, _ = await asyncio.gather(
                api.post("/update_weights_from_distributed", **order), self._do("broadcast", *tensors)
            )
            answers.append(answer)
        return answers


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.kill()


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def run_with(trainer: Trainer, directory: Path, use: Callable[[Api], Awaitable[None]]) -> None:
    async def within(api: Api) -> None:
        await trainer.join(api)
        await use(api)
        await trainer.leave(api)

    run(directory, within)


async def fresh_answer(directory: Path) -> Any:
    async with serving(directory) as api:
        return await api.generate(sampling_params=GREEDY)


def same_logprobs(answer: Any, expected: Any) -> bool:
    pairs = zip(*(a["meta_info"]["output_token_logprobs"] for a in (answer, expected)), strict=True)
    return all(abs(a[0] - b[0]) < 1e-4 and a[1] == b[1] for a, b in pairs)


@pytest.mark.parametrize("flattened", [True, False])
def test_D20_an_update_arrives_whole_and_both_sides_agree_on_it(
    models: dict[str, Path], trainer: Trainer, flattened: bool
) -> None:
    weights = weights_of(models["new"])
    expected = asyncio.run(fresh_answer(models["new"]))

    async def use(api: Api) -> None:
        running = asyncio.create_task(api.generate(sampling_params={**ENDLESS, "sampling_seed": 3}))
        await api.until(lambda info: info["num_running"] == 1)
        await api.post("/pause_generation", mode="in_place")
        assert (await api.post("/begin_weight_update"))[0] == 200
        answers = await trainer.send(api, weights, flattened=flattened, weight_version="2")
        assert len(answers) > 1
        assert all(status == 200 and answer["success"] for status, answer in answers)
        for _ in range(2):  # D12: a repeated end is no error
            assert (await api.post("/end_weight_update"))[0] == 200
        await api.post("/continue_generation")

        [first, second] = (await running)["meta_info"]["weight_versions"]
        assert (first["version"], first["start"], second["version"], second["end"]) == ("1", 0, "2", 1900)
        assert 0 < first["end"] == second["start"] < 1900
        answer = await api.generate(sampling_params=GREEDY)
        assert same_logprobs(answer, expected)
        assert answer["meta_info"]["weight_version"] == "2"
        status, told = await api.post("/weights_checker", action="checksum")
        assert (status, told["ranks"][0]["checksums"]) == (200, {name: checksum(w) for name, w in weights.items()})
        name = "model.layers.1.self_attn.k_proj.weight"
        status, rows = await api.post("/get_weights_by_name", name=name, truncate_size=2)
        assert (status, rows) == (200, weights[name][:2].tolist())

    run_with(trainer, models["old"], use)


def test_an_unpaused_engine_samples_on_while_an_update_is_open_and_takes_it_at_its_end(
    models: dict[str, Path], trainer: Trainer
) -> None:
    async def use(api: Api) -> None:
        running = asyncio.create_task(api.generate(sampling_params=ENDLESS))
        await api.until(lambda info: info["num_running"] == 1)
        await api.post("/begin_weight_update")
        answers = await trainer.send(api, weights_of(models["new"]), weight_version="2")
        assert all(status == 200 for status, _ in answers)
        info = (await api.get("/server_info"))[1]
        assert (info["updating"], info["held_by"], info["weight_version"]) == (True, [], "1")
        await api.until(lambda later: later["num_generated_tokens"] > info["num_generated_tokens"])
        sums = await api.post("/weights_checker", action="checksum")
        old = {name: checksum(tensor) for name, tensor in weights_of(models["old"]).items()}
        assert sums[1]["ranks"][0]["checksums"] == old
        await api.post("/end_weight_update")
        assert [span["version"] for span in (await running)["meta_info"]["weight_versions"]] == ["1", "2"]

    run_with(trainer, models["old"], use)


def test_a_damaged_bucket_quarantines_the_engine_until_a_whole_reload(
    models: dict[str, Path], trainer: Trainer
) -> None:
    expected = asyncio.run(fresh_answer(models["new"]))

    async def use(api: Api) -> None:
        running = asyncio.create_task(api.generate(sampling_params=ENDLESS))
        await api.until(lambda info: info["num_running"] == 1)
        await api.post("/begin_weight_update")
        name = "model.norm.weight"
        await trainer.send(api, {name: weights_of(models["new"])[name]}, damaged=True)
        status, answer = await api.post("/end_weight_update")  # it is looked at while the next one would come
        assert (status, answer["success"]) == (400, False)
        assert name in answer["message"]
        meta = (await running)["meta_info"]  # what it had is valid; it does not go on under a mixture
        assert meta["finish_reason"]["type"] == "abort"
        assert [span["version"] for span in meta["weight_versions"]] == ["1"]

        async def refused() -> None:
            status, answer = await api.post("/generate", input_ids=PROMPT, sampling_params=GREEDY)
            assert status == 503
            assert "reloaded" in answer["error"]["message"]
            assert (await api.get("/health_generate"))[0] == 503

        await refused()
        await api.post("/end_weight_update")  # nothing came: that makes nothing whole
        await api.post("/continue_generation")
        await refused()
        status, _ = await api.post("/update_weights_from_disk", model_path=str(models["old"] / "absent"))
        assert status == 400
        await refused()
        status, answer = await api.post("/update_weights_from_disk", model_path=str(models["new"]), weight_version="2")
        assert (status, answer["success"], answer["num_paused_requests"]) == (200, True, 0)
        answer = await api.generate(sampling_params=GREEDY)
        assert same_logprobs(answer, expected)
        assert answer["meta_info"]["weight_version"] == "2"

    run_with(trainer, models["old"], use)


def test_an_update_that_lacks_a_parameter_is_refused_and_a_whole_one_heals(
    models: dict[str, Path], trainer: Trainer
) -> None:
    weights = weights_of(models["new"])
    part = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}

    async def use(api: Api) -> None:
        await api.post("/begin_weight_update")
        await trainer.send(api, part, weight_version="2")
        status, answer = await api.post("/end_weight_update")
        assert (status, answer["success"]) == (400, False)
        assert "lm_head.weight" in answer["message"]
        assert (await api.get("/model_info"))[1]["weight_version"] == "1"
        assert (await api.post("/generate", input_ids=PROMPT, sampling_params=GREEDY))[0] == 503
        await api.post("/begin_weight_update")
        await trainer.send(api, weights, weight_version="2")
        assert (await api.post("/end_weight_update"))[0] == 200
        assert (await api.generate(sampling_params=GREEDY))["meta_info"]["weight_version"] == "2"

    run_with(trainer, models["old"], use)


def test_an_update_that_is_given_up_by_beginning_another_has_changed_nothing(
    models: dict[str, Path], trainer: Trainer
) -> None:
    old = {name: checksum(tensor) for name, tensor in weights_of(models["old"]).items()}

    async def use(api: Api) -> None:
        await api.post("/begin_weight_update")
        await trainer.send(api, weights_of(models["new"]), weight_version="2")
        await api.post("/begin_weight_update")
        assert (await api.post("/end_weight_update"))[0] == 200
        _, told = await api.post("/weights_checker", action="checksum")
        assert told["ranks"][0]["checksums"] == old
        answer = await api.generate(sampling_params=GREEDY)
        assert answer["meta_info"]["weight_version"] == "1"

    run_with(trainer, models["old"], use)


def test_a_trainer_that_is_killed_during_a_bucket_quarantines_the_engine(models: dict[str, Path]) -> None:
    trainer = Trainer()

    async def use(api: Api) -> None:
        await trainer.join(api)
        await api.post("/begin_weight_update")
        order = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], "group_name": trainer.name}
        received = asyncio.create_task(api.post("/update_weights_from_distributed", **order))
        await api.get("/health")  # the order is on its way; whether it is being received makes no difference
        trainer.kill()
        status, answer = await received
        assert (status, answer["success"]) == (400, False)
        assert (await api.post("/generate", input_ids=PROMPT, sampling_params=GREEDY))[0] == 503

    run(models["old"], use)


def test_weight_orders_that_make_no_sense_change_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    one = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]}
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")

    async def use(api: Api) -> None:
        before = await api.generate(sampling_params=GREEDY)
        status, answer = await api.post("/update_weights_from_distributed", **one)
        assert (status, answer["success"]) == (400, False)
        assert "must run between begin_weight_update() and end_weight_update()" in answer["message"]
        await api.post("/begin_weight_update")
        for path, body in (
            ("/update_weights_from_distributed", {**one, "group_name": "nobody"}),
            ("/update_weights_from_distributed", {**one, "load_format": "direct"}),
            ("/update_weights_from_distributed", {**one, "dtypes": ["float33"]}),
            ("/update_weights_from_distributed", {**one, "shapes": []}),
            ("/update_weights_from_distributed", {"names": []}),
            ("/update_weights_from_disk", {}),
            ("/update_weights_from_disk", {"model_path": str(tmp_path)}),
            ("/destroy_weights_update_group", {"group_name": "nobody"}),
            ("/init_weights_update_group", {"master_address": "127.0.0.1"}),
            ("/weights_checker", {"action": "reset"}),
            ("/get_weights_by_name", {"name": "nobody"}),
            ("/update_weight_version", {}),
        ):
            status, answer = await api.post(path, **body)
            assert (status, answer["success"]) == (400, False), (path, body)
            assert answer["message"]
        await api.post("/end_weight_update")
        assert same_logprobs(await api.generate(sampling_params=GREEDY), before)

    run(models["old"], use)


def test_a_group_that_does_not_form_is_given_up_in_time(models: dict[str, Path]) -> None:
    async def use(api: Api) -> None:
        store = host_store(timeout_s=1.0)  # a trainer that never enters its own group
        status, answer = await api.post(
            "/init_weights_update_group",
            master_address="127.0.0.1",
            master_port=store.port,
            rank_offset=1,
            world_size=2,
            group_name="lonely",
            backend="gloo",
        )
        assert (status, answer["success"]) == (400, False)
        assert "did not form within 1 s, seen from host " in answer["message"]
        assert "lo" in answer["message"].partition(", interfaces ")[2]  # D24: each side says what it can be reached by

    run(models["old"], use, update_timeout_s=1.0)


def test_naming_a_version_aborts_unless_told_not_to(models: dict[str, Path]) -> None:
    async def use(api: Api) -> None:
        for abort_all, kind in ((False, "length"), (None, "abort")):
            request = asyncio.create_task(api.generate(sampling_params=ENDLESS))
            await api.until(lambda info: info["num_running"] == 1)
            body = {} if abort_all is None else {"abort_all_requests": abort_all}
            status, answer = await api.post("/update_weight_version", new_version=7, **body)
            assert (status, answer["new_version"]) == (200, "7")
            assert (await request)["meta_info"]["finish_reason"]["type"] == kind

    run(models["old"], use)
