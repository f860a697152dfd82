"""Throughput of the embedded engine over HTTP against one-request-at-a-time ``transformers`` generation.

    PYTHONPATH=.:tests python tests/benchmarks/embedded_engine.py [--shapes tiny 135m] [--threads 2]

Both sides sample the same number of tokens from the same random weights in the same process, one after the other, so
the ratio means something on a busy machine. Writes ``embedded_engine.json`` beside this file and prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from tiny_models import make_model

from areal_hpc.generation.embedded.engine import EmbeddedEngine
from areal_hpc.generation.embedded.server import start_server

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "tie_word_embeddings": True},
    "135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    },
}
PROMPT_TOKENS = 64


def prompts(num: int, vocab_size: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, min(vocab_size, 256), (num, PROMPT_TOKENS)).tolist()


def one_at_a_time(model: Any, num_requests: int, new_tokens: int) -> float:
    """Tokens per second of ``model.generate``, a request after the other."""
    started = time.perf_counter()
    for prompt in prompts(num_requests, model.config.vocab_size):
        ids = torch.tensor([prompt])
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
            do_sample=True, top_k=0, pad_token_id=0,
        )  # fmt: skip
    return num_requests * new_tokens / (time.perf_counter() - started)


async def over_http(url: str, concurrency: int, new_tokens: int, vocab_size: int) -> float:
    """Tokens per second with ``concurrency`` requests at once."""
    sampling = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 1.0}

    async def ask(session: aiohttp.ClientSession, prompt: list[int]) -> int:
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        async with session.post(f"{url}/generate", json=body) as response:
            answer = await response.json()
        assert response.status == 200, answer
        return len(answer["output_ids"])

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        started = time.perf_counter()
        counts = await asyncio.gather(*(ask(session, prompt) for prompt in prompts(concurrency, vocab_size)))
    assert sum(counts) == concurrency * new_tokens
    return sum(counts) / (time.perf_counter() - started)


def measure(shape: str, threads: int, concurrencies: list[int], new_tokens: int, num_single: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory), "llama", 0, **SHAPES[shape])
        engine = EmbeddedEngine(directory, max_running=max(concurrencies), max_tokens=1024, threads=threads)
    engine.start()
    vocab_size = model.config.vocab_size

    async def serve() -> dict[int, float]:
        url, runner = await start_server(engine, token="")
        await over_http(url, 2, 8, vocab_size)
        rates = {c: await over_http(url, c, new_tokens, vocab_size) for c in concurrencies}
        await runner.cleanup()
        return rates

    one_at_a_time(model, 1, 8)
    single = one_at_a_time(model, num_single, new_tokens)
    rates = asyncio.run(serve())
    engine.close()
    return {
        "shape": shape,
        "threads": threads,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": new_tokens,
        "transformers_one_at_a_time_tok_s": round(single, 1),
        "engine_tok_s": {str(c): round(rate, 1) for c, rate in rates.items()},
        "ratio": {str(c): round(rate / single, 2) for c, rate in rates.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["tiny"], choices=sorted(SHAPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--single", type=int, default=4, help="requests that transformers answers")
    arguments = parser.parse_args()
    rows = [
        measure(shape, arguments.threads, arguments.concurrency, arguments.new_tokens, arguments.single)
        for shape in arguments.shapes
    ]
    result = {"torch": torch.__version__, "machine": platform.machine(), "rows": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{'shape':8} {'concurrent':>10} {'engine tok/s':>13} {'one at a time':>14} {'ratio':>6}")
    for row in rows:
        for concurrency, rate in row["engine_tok_s"].items():
            single, ratio = row["transformers_one_at_a_time_tok_s"], row["ratio"][concurrency]
            print(f"{row['shape']:8} {concurrency:>10} {rate:>13} {single:>14} {ratio:>6}")


if __name__ == "__main__":
    main()
