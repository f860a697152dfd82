"""SGLang's ``/generate`` in and out: requests parsed and held against what this engine does, answers in their shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from areal_hpc.dialogue.text import Text, first_stop
from areal_hpc.errors import DataError
from areal_hpc.generation.embedded.sequence import SamplingParams, Sequence
from areal_hpc.types import TokenLogprob

FIELDS = {
    "text",
    "input_ids",
    "rid",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
    "stream",
    "routing_key",  # for routers in front of engines
    "priority",  # lower is earlier
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A checked ``/generate`` body. ``single`` is answered by one object, anything else by a list."""

    prompts: tuple[tuple[int, ...], ...]
    request_ids: tuple[str, ...]
    params: tuple[SamplingParams, ...]
    return_logprob: bool
    logprob_start: int | None
    num_top: int
    text_in_logprobs: bool
    stream: bool
    single: bool
    priority: int


def parse_generate(body: Mapping[str, Any], text: Text | None) -> GenerateRequest:
    """Raises DataError naming what is wrong or what this engine does not do."""
    refused = sorted(key for key, value in body.items() if key not in FIELDS and value not in (None, False))
    if refused:
        raise DataError(f"fields {refused} are not supported here; leave them out")
    prompts, batched = _prompts(body, text)
    params = _for_each(body.get("sampling_params") or {}, len(prompts), dict, "sampling_params")
    parsed = tuple(SamplingParams.parse(given) for given in params)
    start, num_top = _integer(body, "logprob_start_len", -1), _integer(body, "top_logprobs_num", 0)
    return_logprob = bool(body.get("return_logprob", False))
    return GenerateRequest(
        prompts=prompts,
        request_ids=_request_ids(body.get("rid"), len(prompts), batched),
        params=parsed,
        return_logprob=return_logprob,
        logprob_start=start if return_logprob and start != -1 else None,
        num_top=num_top if return_logprob else 0,
        text_in_logprobs=bool(body.get("return_text_in_logprobs", False)),
        stream=bool(body.get("stream", False)),
        single=not batched and parsed[0].n == 1,
        priority=_integer(body, "priority", 0),
    )


def _integer(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    if value is not None and not isinstance(value, int):
        raise DataError(f"{name} must be an integer")
    return default if value is None else value


def _prompts(body: Mapping[str, Any], text: Text | None) -> tuple[tuple[tuple[int, ...], ...], bool]:
    given = body.get("input_ids")
    if (given is None) == (body.get("text") is None):
        raise DataError("send either input_ids or text")
    if given is None:
        if text is None:
            raise DataError("this model has no tokenizer; send input_ids")
        batched = not isinstance(body["text"], str)
        given = [text.encode(one) for one in (body["text"] if batched else [body["text"]])]
    else:
        batched = isinstance(given, list) and bool(given) and isinstance(given[0], list)
        given = given if batched else [given]
    if not all(isinstance(prompt, list) and all(isinstance(token_id, int) for token_id in prompt) for prompt in given):
        raise DataError("input_ids must be a list of integers or a list of such lists")
    return tuple(tuple(prompt) for prompt in given), batched


def _for_each(value: Any, num: int, single: type, name: str) -> list[Any]:
    values = value if isinstance(value, list) else [value] * num
    if len(values) != num or not all(isinstance(one, single) for one in values):
        raise DataError(f"{name} must be one for all or one for each of the {num} prompts")
    return values


def _request_ids(given: Any, num: int, batched: bool) -> tuple[str, ...]:
    if given is None:
        return ("",) * num
    if isinstance(given, str) and batched:
        return tuple(f"{given}_{index}" for index in range(num))
    return tuple(_for_each(given, num, str, "rid"))


def answer(sequence: Sequence, request: GenerateRequest, text: Text | None) -> dict[str, Any]:
    """SGLang's answer for a finished sequence."""
    whole = final_text(sequence, text)
    told = answer_so_far(sequence, request, text, shown=whole, num_tokens=len(sequence.token_ids))
    told["meta_info"]["finish_reason"] = sequence.finish_reason
    told["meta_info"]["e2e_latency"] = sequence.finished - sequence.born
    return told


def answer_so_far(
    sequence: Sequence, request: GenerateRequest, text: Text | None, *, shown: str, num_tokens: int
) -> dict[str, Any]:
    """SGLang's answer for the first ``num_tokens`` tokens of a sequence, whose text is ``shown``."""
    spans = sequence.spans(num_tokens)
    meta: dict[str, Any] = {
        "id": sequence.request_id,
        "finish_reason": None,
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": num_tokens,
        "cached_tokens": sequence.num_cached,
        "weight_version": spans[-1]["version"] if spans else sequence.version,
        "weight_versions": spans,
        "num_retractions": sequence.num_retractions,
        "e2e_latency": None,
    }
    if request.return_logprob:
        meta.update(_logprobs(sequence, request, text, num_tokens))
    return {"text": shown, "output_ids": sequence.token_ids[:num_tokens], "meta_info": meta}


def _logprobs(sequence: Sequence, request: GenerateRequest, text: Text | None, num: int) -> dict[str, Any]:
    def told(logprob: float | None, token_id: int) -> list[Any]:
        return [logprob, token_id, text.decode([token_id]) if text and request.text_in_logprobs else None]

    def told_top(rows: list[list[TokenLogprob]]) -> list[list[list[Any]]]:
        return [[told(*entry) for entry in row] for row in rows]

    scored = sequence.logprob_start is not None and bool(sequence.starts)
    prompt = sequence.prompt[sequence.logprob_start :] if scored else ()
    given = [None] if scored else []  # the first of the prompt's tokens is given, not predicted
    output = zip(sequence.logprobs[:num], sequence.token_ids[:num], strict=True)
    fields: dict[str, Any] = {
        "input_token_logprobs": [
            told(*entry) for entry in zip([*given, *sequence.input_logprobs], prompt, strict=True)
        ],
        "output_token_logprobs": [told(*entry) for entry in output],
    }
    if request.num_top:
        fields["input_top_logprobs"] = [*given, *told_top(sequence.input_top_logprobs)]
        fields["output_top_logprobs"] = told_top(sequence.top_logprobs[:num])
    return fields


class Ended(Protocol):
    """A sequence that has finished, whichever engine sampled it."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def params(self) -> SamplingParams: ...

    @property
    def finish_reason(self) -> Mapping[str, Any] | None: ...


def final_text(sequence: Ended, text: Text | None) -> str:
    """The text of all tokens, without the stop string or token that ended it unless ``no_stop_trim``."""
    if text is None:
        return ""
    token_ids, params = list(sequence.token_ids), sequence.params
    matched = (sequence.finish_reason or {}).get("matched")
    if isinstance(matched, int) and not params.no_stop_trim:
        token_ids.pop()
    whole = text.decode(token_ids, skip_special_tokens=params.skip_special_tokens)
    if isinstance(matched, str) and not params.no_stop_trim:
        before = text.decode(token_ids[:-1], skip_special_tokens=params.skip_special_tokens).rstrip("\ufffd")
        hit = first_stop(whole, [matched], len(before))
        return whole if hit is None else whole[: hit[0]]
    return whole
