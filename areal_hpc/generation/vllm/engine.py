"""Requests to vLLM's engine, and its outputs as answers of SGLang's shape.

Runs in the environment that vLLM is installed in. Everything here belongs to one event loop; the model computes in
processes that vLLM starts.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from areal_hpc.dialogue.grammar import LAYOUT, grammar_of, grammar_of_tag
from areal_hpc.dialogue.tag_grammar import TEXT_TOKENS, lark_of
from areal_hpc.dialogue.text import Text, load_text
from areal_hpc.errors import DataError, GenerationError
from areal_hpc.generation.served.request import SamplingParams
from areal_hpc.generation.served.text import final_text

LARGEST_SEED = 2**63
"""vLLM keeps seeds as signed integers of 64 bits."""
END_S = 1.0
"""How long vLLM's processes may take to end before they are killed."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """What there is of one answer."""

    request_id: str
    num_prompt: int
    params: SamplingParams
    num_top: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[list[Any]]] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    spans: list[dict[str, Any]] = field(default_factory=list)
    num_cached: int = 0

    def take(self, output: Any) -> None:
        """Take in vLLM's next output, which holds what has come since the last one."""
        [part] = output.outputs
        self.num_cached = output.num_cached_tokens or self.num_cached
        for token_id, row in zip(part.token_ids, part.logprobs or (), strict=True):
            self.token_ids.append(token_id)
            self.logprobs.append(row[token_id].logprob)
            if self.num_top:
                self.tops.append(_likeliest(row, self.num_top))
        if part.finish_reason is not None:
            self.finish_reason = _finish_reason(part.finish_reason, part.stop_reason, self.token_ids)
            spans = part.weight_versions or ()
            self.spans = [{"version": span.version, "start": span.start, "end": span.end} for span in spans]

    def answer(self, version: str, text: Text | None) -> dict[str, Any]:
        """SGLang's answer, with all tokens so far; the text comes with the last one.

        Args:
            version: of the engine, for an answer without tokens.
            text: spells tokens, where the model has a tokenizer. What vLLM spells begins with what the prompt left of
                its last character.
        """
        shown = final_text(self, text) if self.finish_reason is not None else ""
        rows = [[logprob, token_id, None] for logprob, token_id in zip(self.logprobs, self.token_ids, strict=True)]
        meta: dict[str, Any] = {
            "id": self.request_id,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.num_prompt,
            "completion_tokens": len(self.token_ids),
            "cached_tokens": self.num_cached,
            "weight_version": self.spans[-1]["version"] if self.spans else version,
            "weight_versions": self.spans,
            "output_token_logprobs": rows,
        }
        if self.num_top:
            meta["output_top_logprobs"] = self.tops
        return {"text": shown, "output_ids": self.token_ids, "meta_info": meta}


def _likeliest(row: Mapping[int, Any], num: int) -> list[list[Any]]:
    """What vLLM tells of one place, as SGLang has it, the likeliest first; without what could not be sampled."""
    ranked = sorted((told.rank, told.logprob, token_id) for token_id, told in row.items() if told.rank <= num)
    return [[logprob, token_id, None] for _, logprob, token_id in ranked if math.isfinite(logprob)]


def _finish_reason(kind: str, matched: int | str | None, token_ids: list[int]) -> dict[str, Any]:
    """vLLM's reason as SGLang has it. Raises GenerationError where vLLM says that it has failed."""
    if kind == "stop":  # of the end of a turn vLLM does not say which token it was
        return {"type": "stop", "matched": token_ids[-1] if matched is None else matched}
    if kind == "length":
        return {"type": "length", "length": len(token_ids)}
    if kind == "abort":
        return {"type": "abort", "message": "aborted"}
    raise GenerationError(f"vLLM gave the request up: {kind}")


class VllmEngine:
    """vLLM's engine; ``args`` are the words of its own arguments.

    Args:
        version: of the weights that it starts with.
    """

    def __init__(self, args: list[str], version: str) -> None:
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="generation.server_args"))
        self.args = AsyncEngineArgs.from_cli_args(parser.parse_args(args))
        self.llm = AsyncLLM.from_engine_args(self.args)
        self.version = version
        self.model_path = Path(self.args.model)
        self.text = load_text(self.model_path)
        self.max_tokens: int = self.llm.model_config.max_model_len
        self.vocab_size: int = self.llm.model_config.get_vocab_size()
        self.paused = False
        self.hangs = ""
        """Why it is to end, and start anew; empty while nothing is known of that kind."""
        self.unfit = ""
        """Why it is to end for good: what a person has to change."""
        self.quarantined = ""
        """Why it serves nothing until whole weights have come; empty if it serves."""
        self.num_generated = 0
        self._in_flight: dict[str, Progress] = {}

    async def start(self) -> None:
        """What needs the loop that it runs in."""
        await self.llm.update_weight_version(self.version)

    def close(self) -> None:
        """End vLLM's processes. They do not hear the SIGTERM that they are asked by first, see ``launch.py``."""
        self.llm.shutdown(timeout=END_S)

    def alive(self) -> bool:
        return not (self.llm.errored or self.hangs or self.unfit)

    def load(self) -> dict[str, int]:
        """``max_num_seqs`` run at once, the rest waits."""
        in_flight, most = len(self._in_flight), int(self.args.max_num_seqs)
        return {
            "num_running": min(in_flight, most),
            "num_waiting": max(0, in_flight - most),
            "num_generated_tokens": self.num_generated,
        }

    # -- requests

    async def generate(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        request_id: str = "",
        *,
        priority: int = 0,
        num_top: int = 0,
    ) -> AsyncGenerator[Progress]:
        """The same object over and over, whenever more of the answer is there; the last time it is whole.

        Raises:
            DataError: the request cannot be served; nothing is ever truncated.
            GenerationError: vLLM gave it up.
        """
        self._check(prompt, params)
        name = request_id or uuid.uuid4().hex
        if name in self._in_flight:
            raise DataError(f"a request of the id {name!r} is running; give each an id of its own")
        progress = self._in_flight[name] = Progress(
            request_id=name, num_prompt=len(prompt), params=params, num_top=num_top
        )
        try:
            with _refusals():
                wanted = _sampling(params, num_top, self._special() if params.structural_tag else {})
                outputs = self.llm.generate(tokens_input(list(prompt)), wanted, name, priority=priority)
            async with aclosing(outputs):
                while True:
                    with _refusals():
                        output = await anext(outputs, None)
                    if output is None:
                        return
                    before = len(progress.token_ids)
                    progress.take(output)
                    self.num_generated += len(progress.token_ids) - before
                    yield progress
        finally:
            del self._in_flight[name]

    def _check(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        if params.n != 1:
            raise DataError("n must be 1 here; send as many requests")
        if not prompt:
            raise DataError("the prompt is empty; send at least one token")
        forced = bool(params.json_schema or params.structural_tag)
        if (params.stop or forced) and self.text is None:
            raise DataError(f"stop strings, schemas and tags need a tokenizer, and {self.model_path} has none")
        if not all(0 <= token_id < self.vocab_size for token_id in (*prompt, *params.stop_token_ids)):
            raise DataError(f"token ids must be in [0, {self.vocab_size})")
        if len(prompt) + params.max_new_tokens > self.max_tokens:
            raise DataError(
                f"a prompt of {len(prompt)} tokens and max_new_tokens {params.max_new_tokens} exceed the context of "
                f"{self.max_tokens} tokens; nothing is truncated, so send less or ask for less"
            )

    def _special(self) -> dict[str, int]:
        """Tokens of the tokenizer that are written <so>, which vLLM's grammars take for special whatever they are."""
        assert self.text is not None
        found = {token: self.text.token_id(token) for token in TEXT_TOKENS}
        return {token: token_id for token, token_id in found.items() if token_id is not None}

    async def abort(self, request_id: str | None) -> None:
        """End a request, or all; what there is of it becomes its answer."""
        await self.llm.abort([request_id] if request_id is not None else list(self._in_flight))

    # -- pauses

    async def pause(self) -> None:
        """Stop sampling, at the edge of a step. Running requests wait."""
        await self.llm.pause_generation(mode="keep", clear_cache=False)
        self.paused = True

    async def resume(self) -> None:
        await self.llm.resume_generation()
        self.paused = False

    async def forget_cache(self) -> bool:
        """Drop all that was computed of prompts and answers; whether that could be done.

        While it is paused running requests go back into the queue and are computed anew; else only an idle engine can.
        """
        return bool(await self.llm.reset_prefix_cache(reset_running_requests=self.paused))

    async def name_version(self, version: str) -> None:
        """Call the weights that it has ``version``."""
        await self.llm.update_weight_version(version)
        self.version = version


@contextmanager
def _refusals() -> Iterator[None]:
    """vLLM's refusals of a request, which come before its first output, as ours."""
    try:
        yield
    except VLLMClientError as error:
        raise DataError(str(error)) from error


def _grammar(params: SamplingParams, special: Mapping[str, int]) -> StructuredOutputsParams | None:
    """What forces an answer, as llguidance takes it from us everywhere. Raises DataError if nothing can."""
    if params.json_schema:
        grammar_of(params.json_schema)
        schema = json.loads(params.json_schema)  # true and false are schemas, too
        laid_out = {**schema, "x-guidance": LAYOUT} if isinstance(schema, dict) else params.json_schema
        return StructuredOutputsParams(json=laid_out)
    if params.structural_tag:
        grammar_of_tag(params.structural_tag)
        return StructuredOutputsParams(grammar=lark_of(params.structural_tag, LAYOUT, special))
    return None


def _sampling(params: SamplingParams, num_top: int, special: Mapping[str, int]) -> VllmParams:
    """The sampling parameters under vLLM's names. The sampled token's log-prob comes with it, and outputs hold what is
    new."""
    return VllmParams(
        max_tokens=params.max_new_tokens,
        min_tokens=params.min_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        stop=list(params.stop),
        stop_token_ids=sorted(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens,
        detokenize=bool(params.stop),
        seed=None if params.sampling_seed is None else params.sampling_seed % LARGEST_SEED,
        structured_outputs=_grammar(params, special),
        logprobs=num_top,
        output_kind=RequestOutputKind.DELTA,
    )
