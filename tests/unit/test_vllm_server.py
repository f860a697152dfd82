"""The server around vLLM, with a fake in vLLM's place; the real one is asked by the contract and integration tests."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
import torch
from aiohttp import ClientSession
from safetensors.torch import save_file
from tiny_models import make_model

from areal_hpc.accelerator import CPU, CUDA
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.delta import Weight, bits, difference
from areal_hpc.dialogue.grammar import LAYOUT
from areal_hpc.dialogue.tag_grammar import lark_of
from areal_hpc.errors import ConfigError, GenerationError, RequestRefused, WeightUpdateError
from areal_hpc.generation.client import EngineClient
from areal_hpc.generation.connection import Connection, EngineLost
from areal_hpc.generation.external.process import reserved_port, url_of
from areal_hpc.generation.external.spec import ServerSpec
from areal_hpc.generation.served.arrivals import Arrivals
from areal_hpc.generation.vllm.arguments import engine_arguments, server_environment
from areal_hpc.generation.vllm.process import load as load_of
from areal_hpc.generation.vllm.process import serving
from areal_hpc.generation.vllm.worker import prepare_tied
from areal_hpc.roles.wiring import servers as wiring
from areal_hpc.types import GenerationRequest, Sampling, StopReason
from areal_hpc.weights.disk import DiskTransport

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
KEY = "a-key-that-must-not-leak"
SPEC = ServerSpec(
    model_path="/m", dtype="float32", host="127.0.0.1", key=KEY, accelerator=CPU, max_running=4, max_tokens=100
)
PROMPT = (65, 66, 67)


# -- what it is started with


def test_its_log_probs_are_those_of_what_is_sampled_and_its_key_is_no_argument_of_vllms() -> None:
    words = engine_arguments(replace(SPEC, extra={"block-size": 32, "enforce_eager": False}))
    options = dict(zip(words[::2], words[1::2], strict=False))
    assert options["--logprobs-mode"] == "processed_logprobs"
    assert (options["--max-model-len"], options["--max-num-seqs"]) == ("100", "4")
    assert "--block-size" in words
    assert "--enforce-eager" not in words
    assert KEY not in words
    assert "--enforce-eager" in engine_arguments(SPEC)
    assert "--enforce-eager" not in engine_arguments(replace(SPEC, accelerator=CUDA))


def test_who_sets_a_variable_of_vllms_means_it() -> None:
    made = server_environment({"VLLM_CPU_KVCACHE_SPACE": "7", "HTTP_PROXY": "p"}, CPU, Path("/t"))
    assert (made["VLLM_CPU_KVCACHE_SPACE"], made["VLLM_NO_USAGE_STATS"]) == ("7", "1")
    assert "HTTP_PROXY" not in made
    assert "VLLM_CPU_KVCACHE_SPACE" not in server_environment({}, CUDA, Path("/t"))


def test_its_sockets_are_in_a_directory_of_its_own_wherever_the_sites_temporary_files_are() -> None:
    made = server_environment({"TMPDIR": "/scratch/of/the/job"}, CPU, Path("/t"))
    assert made["TMPDIR"] == "/t"


def test_arguments_that_the_run_gives_itself_are_refused_by_their_names() -> None:
    words = ["generation.backend=vllm", "generation.server_args={max-model-len: 1, logprobs_mode: raw, block_size: 32}"]
    with pytest.raises(ConfigError) as refusal:
        resolve(load([QUICKSTART], words))
    assert "generation.server_args.max-model-len: remove it; set model.max_tokens" in str(refusal.value)
    assert "generation.server_args.logprobs_mode: remove it" in str(refusal.value)
    assert "block_size" not in str(refusal.value)


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("echo No package metadata was found for vllm >&2; exit 1", "has no vLLM .No package metadata"),
        ("echo 0.31.2 True", r"vLLM 0\.31\.2 of .* is older than 0\.32"),
        (
            "echo 0.32.0 False",
            r"vLLM 0\.32\.0 of .* cannot serve here without this package and google-crc32c",
        ),
        ("echo 0.33.0rc1 True", ""),
    ],
)
def test_an_environment_that_cannot_serve_is_refused_at_once(tmp_path: Path, program: str, complaint: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o700)
    config = load([QUICKSTART], ["generation.backend=vllm", f"generation.python={python}"])
    if not complaint:
        wiring.check_server(config)
        return
    with pytest.raises(ConfigError, match=rf"generation\.python: .*{complaint}(.|\n)*examples/vllm_environment"):
        wiring.check_server(config)


PROGRAM = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
order = json.load(sys.stdin)
ours = json.loads(order["arguments"][0])
print("module:", order["module"], "arguments:", order["arguments"], flush=True)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        told = {{"weight_version": "7", "num_running": 2, "num_waiting": 3, "num_generated_tokens": 40}}
        data = json.dumps(told).encode()
        self.send_response(200 if self.headers["Authorization"] == "Bearer " + ours["key"] else 401)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
HTTPServer((ours["host"], ours["port"]), Handler).serve_forever()
"""


def test_a_server_is_up_when_it_generates_and_tells_its_load(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o700)

    async def within() -> None:
        async with serving(SPEC, python=str(program), log=tmp_path / "vllm-0.log", start_s=60) as started:
            assert started.alive()
            assert await load_of(started) == {"version": 7, "running": 2, "queued": 3, "tokens": 40}

    asyncio.run(within())
    assert "areal_hpc.generation.vllm.server" in (tmp_path / "vllm-0.log").read_text()


# -- what it answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    directory = tmp_path_factory.mktemp("model")
    state = make_model(directory, "qwen3", seed=3).state_dict()
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # of an old checkpoint
    save_file(buffers, directory / "buffers.safetensors")
    return directory, {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}  # it is tied


Scenario = Callable[[EngineClient, Any], Awaitable[None]]
Drive = Callable[..., None]
"""Takes a scenario, and the longest time of a step of an update."""


@pytest.fixture
def drive(model: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> Drive:
    """Runs a scenario with a client of a server, and the engine behind it."""
    fake_vllm.install(monkeypatch)
    for name in ("engine", "updates", "server"):  # so that they are imported with this fake, and not kept
        monkeypatch.delitem(sys.modules, f"areal_hpc.generation.vllm.{name}", raising=False)
    from areal_hpc.generation.vllm.engine import VllmEngine
    from areal_hpc.generation.vllm.server import serve

    @asynccontextmanager
    async def served(update_timeout_s: float) -> Any:
        engine = VllmEngine(["--model", str(model[0]), "--max-model-len", "300", "--max-num-seqs", "2"], "0")
        with reserved_port("127.0.0.1") as port:
            ours = {"host": "127.0.0.1", "port": port, "key": KEY, "keeps_weights": False}
            ours["update_timeout_s"] = update_timeout_s
            serving_it = asyncio.create_task(serve(engine, ours))
            client = EngineClient("engine-0", url_of("127.0.0.1", port), token=KEY)
            try:
                while True:
                    try:
                        await client.probe()
                        break
                    except EngineLost:
                        assert not serving_it.done(), serving_it.result()
                yield client, engine
            finally:
                await client.close()
                engine.close()  # as if it had died: the server ends by itself
                await asyncio.wait_for(serving_it, 30)

    def run(scenario: Scenario, update_timeout_s: float = 30.0) -> None:
        async def within() -> None:
            async with served(update_timeout_s) as (client, engine):
                await scenario(client, engine)

        asyncio.run(within())

    return run


def asked(num: int, name: str = "r", **sampling: Any) -> GenerationRequest:
    return GenerationRequest(request_id=name, token_ids=PROMPT, sampling=Sampling(max_new_tokens=num, **sampling))


def test_an_answer_has_the_tokens_their_log_probs_and_their_versions(drive: Drive) -> None:
    async def scenario(client: EngineClient, _: Any) -> None:
        told: list[int] = []
        whole = await client.generate(replace(asked(5), on_tokens=told.extend))
        assert whole.token_ids.tolist() == told == [68, 69, 70, 71, 72]
        assert whole.logprobs.tolist() == [fake_vllm.LOGPROB] * 5
        assert whole.versions.tolist() == [0] * 5
        assert whole.stop is StopReason.LENGTH
        stopped = await client.generate(asked(50, stop_token_ids=(70,)))
        assert (stopped.token_ids.tolist(), stopped.stop) == ([68, 69, 70], StopReason.STOP)

    drive(scenario)


def test_the_likeliest_tokens_are_told_in_their_order_and_none_that_could_not_be_sampled(drive: Drive) -> None:
    async def scenario(client: EngineClient, _: Any) -> None:
        for num, places in ((2, ((-0.9, 8), (-1.0, 7))), (4, ((-0.9, 8), (-1.0, 7), (fake_vllm.LOGPROB, 68)))):
            completion = await client.generate(replace(asked(1), num_top=num))
            assert completion.top_logprobs == (places,)

    drive(scenario)


def test_grammars_are_those_of_the_other_engines_but_for_tokens_that_vllm_reads_as_no_text(drive: Drive) -> None:
    content = {"type": "json_schema", "json_schema": {"type": "object"}}
    tag = {"format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}

    async def scenario(client: EngineClient, engine: Any) -> None:
        await client.generate(asked(1, json_schema='{"type": "object"}'))
        assert engine.llm.asked[-1].structured_outputs.json == {"type": "object", "x-guidance": LAYOUT}
        await client.generate(asked(1, structural_tag=json.dumps(tag)))
        assert engine.llm.asked[-1].structured_outputs.grammar == lark_of(json.dumps(tag), LAYOUT)
        with pytest.raises(RequestRefused, match="the schema cannot be forced"):
            await client.generate(asked(1, json_schema='{"type": "nonsense"}'))
        engine.text.token_id = {"<tool_call>": 5}.get  # as of a tokenizer that has this text as one token
        called = json.dumps(tag).replace("<a>", "<tool_call>")
        await client.generate(asked(1, structural_tag=called))
        assert engine.llm.asked[-1].structured_outputs.grammar == lark_of(called, LAYOUT, {"<tool_call>": 5})

    drive(scenario)


def test_a_pause_holds_requests_and_they_are_computed_anew_under_the_next_version(drive: Drive) -> None:
    async def scenario(client: EngineClient, engine: Any) -> None:
        begun = asyncio.Event()
        asking = asyncio.create_task(client.generate(replace(asked(200), on_tokens=lambda _: begun.set())))
        await begun.wait()
        await client.pause()
        after = asyncio.create_task(client.generate(asked(5, "after")))
        await asyncio.sleep(0.01)
        assert not asking.done()
        await client.resume(4)
        assert engine.llm.recomputed == [True]
        completion = await asking
        assert completion.versions.tolist() == sorted(completion.versions.tolist())
        assert set(completion.versions) == {0, 4}
        assert (await after).versions.tolist() == [4] * 5

    drive(scenario)


def test_an_aborted_request_keeps_what_it_has(drive: Drive) -> None:
    async def scenario(client: EngineClient, engine: Any) -> None:
        await client.pause()
        asking = asyncio.create_task(client.generate(asked(200)))
        while not engine.load()["num_running"]:
            await asyncio.sleep(0)
        aborting = asyncio.create_task(client.abort("r"))
        while not engine.llm.aborted:
            await asyncio.sleep(0)
        await client.resume(1)
        await aborting
        assert ((await asking).stop, len((await asking).token_ids)) == (StopReason.ABORT, 0)

    drive(scenario)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"sampling_params": {"max_new_tokens": 298}}, "nothing is truncated"),
        ({"sampling_params": {"n": 2}}, "one prompt a request"),
        ({"sampling_params": {"temperature": 101.0}}, "that is too hot"),
        ({"sampling_params": {"stop_token_ids": [272]}}, r"token ids must be in \[0, 272\)"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"return_logprob": True, "logprob_start_len": 0}, "not served here"),
        ({"return_hidden_states": True}, "not supported here"),
    ],
)
def test_what_it_does_not_serve_is_refused(drive: Drive, changed: dict[str, Any], complaint: str) -> None:
    async def scenario(client: EngineClient, _: Any) -> None:
        body = {"input_ids": list(PROMPT), "return_logprob": True, "sampling_params": {}} | changed
        for stream in (False, True):
            status, answer = await client._http.call("POST", "/generate", {**body, "stream": stream}, 10)
            assert status == 400
            assert re.search(complaint, answer["error"]["message"])

    drive(scenario)


def test_whoever_has_no_key_gets_nothing(drive: Drive) -> None:
    async def scenario(client: EngineClient, _: Any) -> None:
        stranger = Connection("engine-0", client._http.url, token="another", connect_s=5)
        for path in ("/health", "/server_info"):
            with pytest.raises(GenerationError, match="401"):
                await stranger.call("GET", path, None, 5)
        await stranger.close()

    drive(scenario)


# -- how it takes weights


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
        assert taken == ["areal_join", "areal_come", *["areal_begin", "areal_receive", "areal_come"] * 2, "areal_load"]

    drive(scenario)


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


@pytest.mark.parametrize("method", ["areal_begin", "areal_receive", "areal_come", "areal_load"])
def test_a_worker_that_fails_half_way_quarantines_the_engine(
    drive: Drive, model: tuple[Path, dict[str, torch.Tensor]], method: str
) -> None:
    async def scenario(client: EngineClient, engine: Any) -> None:
        await begun(client)
        engine.llm.failing = method
        answers = [
            await post(client, "/begin_weight_update", {}),
            await post(client, "/update_weights_from_distributed", specs_of(model[1])),
            await post(client, "/end_weight_update", {}),
        ]
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
        answers = [
            await post(client, "/begin_weight_update", {}),
            await post(client, "/update_weights_from_distributed", specs_of(model[1])),
            await post(client, "/end_weight_update", {}),
        ]
        assert any("vLLM's engine has not answered for 0.2 s; it ends" in message for _, message in answers)
        async with asyncio.timeout(20):
            with pytest.raises(EngineLost):
                while True:  # nobody closes the engine here: the server ends by itself
                    await client._http.call("GET", "/health", None, 1)
        assert not engine.llm.errored

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
        assert [method for method, _ in engine.llm.called] == ["areal_read"]
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
        arrivals.settle(new)
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
    arrivals.settle(arrivals.new)
    assert arrivals.held == arrivals.base == arrivals.new == {}
