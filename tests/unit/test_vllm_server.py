"""The server around vLLM, with a fake in vLLM's place; the real one is asked by the contract and integration tests."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
from fake_vllm import KEY, PROMPT, Drive, asked, driver
from tiny_models import make_model

from areal_hpc.accelerator import CPU, CUDA
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.dialogue.grammar import LAYOUT
from areal_hpc.dialogue.tag_grammar import lark_of
from areal_hpc.errors import ConfigError, GenerationError, RequestRefused
from areal_hpc.generation.client import EngineClient
from areal_hpc.generation.connection import Connection
from areal_hpc.generation.external.spec import ServerSpec
from areal_hpc.generation.vllm.arguments import engine_arguments, server_environment
from areal_hpc.generation.vllm.process import load as load_of
from areal_hpc.generation.vllm.process import serving
from areal_hpc.roles.wiring import servers as wiring
from areal_hpc.types import StopReason

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
SPEC = ServerSpec(
    model_path="/m", dtype="float32", host="127.0.0.1", key=KEY, accelerator=CPU, max_running=4, max_tokens=100
)


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
        told = {{"weight_version": "7", "num_running": 2, "num_waiting": 3, "num_generated_tokens": 40,
            "paused": True, "loaded": 1.5}}
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
            told = {"version": 7, "running": 2, "queued": 3, "tokens": 40, "held": True, "loading": 1.5}
            assert await load_of(started) == told

    asyncio.run(within())
    assert "areal_hpc.generation.vllm.server" in (tmp_path / "vllm-0.log").read_text()


# -- what it answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory, "qwen3", seed=3)
    return directory


@pytest.fixture
def drive(model: Path, monkeypatch: pytest.MonkeyPatch) -> Drive:
    return driver(model, monkeypatch)


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
