"""SGLang's ``/generate`` in: requests parsed and held against what our servers do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from areal_hpc.dialogue.text import Text
from areal_hpc.errors import DataError, GenerationError

NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "spaces_between_special_tokens": True,
    "regex": None,
    "ebnf": None,
    "logit_bias": None,
    "custom_params": None,
    "stop_regex": None,
}
"""SGLang's sampling fields that our servers lack, with the value that asks for nothing; any other is refused."""
NUMBERS = ("temperature", "top_p", "min_p")
MAX_SAMPLES = 1024
HOTTEST = 1e38
"""Highest temperature that engines can keep, in float32."""
LARGEST = 2**63 - 1
"""Largest integer that other programs can be told."""
FLAGS = ("ignore_eos", "skip_special_tokens", "no_stop_trim")
TEXTS = ("json_schema", "structural_tag")
LISTS = {"stop": str, "stop_token_ids": int}
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


class Quarantined(GenerationError):
    """No request is served, since a weight update failed half-way, until whole weights have come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """SGLang's ``sampling_params``, checked. Raises DataError naming the field that is wrong."""

    n: int = 1
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    json_schema: str = ""
    structural_tag: str = ""

    def __post_init__(self) -> None:
        for holds, rule in (
            (1 <= self.n <= MAX_SAMPLES, f"n must be in [1, {MAX_SAMPLES}]"),
            (self.max_new_tokens >= 1, "max_new_tokens must be at least 1"),
            (0 <= self.min_new_tokens <= self.max_new_tokens, "min_new_tokens must be in [0, max_new_tokens]"),
            (0 <= self.temperature <= HOTTEST, "temperature must be at least 0 and finite"),
            (0 < self.top_p <= 1, "top_p must be in (0, 1]"),
            (self.top_k == -1 or self.top_k >= 1, "top_k must be -1 (off) or at least 1"),
            (0 <= self.min_p <= 1, "min_p must be in [0, 1]"),
            (all(self.stop), "stop strings must not be empty"),
            (
                not (self.json_schema and self.structural_tag),
                "json_schema and structural_tag exclude each other",
            ),
            (self.sampling_seed is None or 0 <= self.sampling_seed < 2**64, "sampling_seed must fit 64 bits"),
        ):
            if not holds:
                raise DataError(f"sampling_params: {rule}")

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> SamplingParams:
        known = {f.name for f in fields(cls)}
        refused = [k for k, v in given.items() if k not in known and not (k in NEUTRAL and v in (None, NEUTRAL[k]))]
        if refused:
            raise DataError(f"sampling_params {sorted(refused)} are not supported here; leave them out")
        values = {key: value for key, value in given.items() if key in known and value is not None}
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        for key, value in values.items():
            _check_kind(key, value)
        values["stop"] = tuple(values.get("stop", ()))
        values["stop_token_ids"] = frozenset(values.get("stop_token_ids", ()))
        return cls(**values)


def _check_kind(key: str, value: Any) -> None:
    if key in LISTS:
        fits = isinstance(value, list) and all(isinstance(item, LISTS[key]) for item in value)
        kind = f"a list of {LISTS[key].__name__}"
    elif key in FLAGS:
        fits, kind = isinstance(value, bool), "true or false"
    elif key in TEXTS:
        fits, kind = isinstance(value, str), "a text"
    elif key in NUMBERS:
        fits, kind = isinstance(value, int | float), "a number"
    else:
        fits, kind = isinstance(value, int), "an integer"
    if not fits:
        raise DataError(f"sampling_params: {key} must be {kind}")


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
    if num_top < 0:
        raise DataError("top_logprobs_num must be at least 0")
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
    if value is not None and not (isinstance(value, int) and abs(value) <= LARGEST):
        raise DataError(f"{name} must be an integer of 64 bits")
    return default if value is None else value


def _prompts(body: Mapping[str, Any], text: Text | None) -> tuple[tuple[tuple[int, ...], ...], bool]:
    given = body.get("input_ids")
    if (given is None) == (body.get("text") is None):
        raise DataError("send either input_ids or text")
    if given is None:
        if text is None:
            raise DataError("this model has no tokenizer; send input_ids")
        batched = not isinstance(body["text"], str)
        texts = body["text"] if batched else [body["text"]]
        if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
            raise DataError("text must be a text or a list of texts")
        given = [text.encode(one) for one in texts]
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
