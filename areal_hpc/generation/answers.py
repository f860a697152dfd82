"""What goes to an engine and what comes back, as pure functions: requests to JSON, JSON to checked tokens.

The shapes are those of SGLang's native ``/generate``. Nothing an engine says is believed: counts must agree, log-probs
be finite, version spans cover the tokens without a gap, and no token be older than the weights that the engine was
known to serve before the request was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from areal_hpc.generation.capabilities import FIRST_VERSION_THAT_TELLS_ITS_SUPPORT, Narrowed
from areal_hpc.routing import ExpertRecord
from areal_hpc.types import Completion, GenerationRequest, Sampling, StopReason, TokenLogprob

MAX_FLOAT32 = float(np.finfo(np.float32).max)
NUMBERS = (int, float)  # `int | float` would be made anew for each token
LONGEST_REASON = 300
SAMPLED_FROM = "output_token_sampling_logprobs"
"""Where SGLang puts log-probs within the part of the distribution that it samples from."""
NARROWED_TOP_K = 2048
"""Most tokens from which SGLang samples where its log-probs are to be those of a part of the distribution: half of what
it then tells of at most (``sampling_mask_max_tokens``), since equally likely tokens at the edge are all told."""


class BadAnswer(Exception):
    """An engine's answer cannot be used; the client turns this into a GenerationError that names the engine."""


class Refusal(BadAnswer):
    """The engine says that something is wrong with the request; the client turns this into a RequestRefused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One HTTP answer: a whole completion, or the part of one up to an interruption."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stop: StopReason
    text: str
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    experts: ExpertRecord | None = None  # of the tokens that were asked for but the last, where any were asked for


def request_body(request: GenerationRequest, rid: str, so_far: Sequence[int]) -> dict[str, Any]:
    """The body that asks for what is still missing after the tokens ``so_far``; the budget left is exact.

    Raises:
        BadAnswer: an engine would hold the rest alone to the request's grammar.
    """
    if so_far and request.sampling.is_forced:
        raise BadAnswer("it was interrupted, and cannot go on in the middle of a grammar; ask again")
    tops = {"top_logprobs_num": request.num_top} if request.num_top else {}
    return {
        "rid": rid,
        "input_ids": [*request.token_ids, *so_far],
        "sampling_params": sampling_params(request.sampling, request.sampling.max_new_tokens - len(so_far)),
        "return_logprob": True,
        "logprob_start_len": -1,
        **tops,
        "stream": request.on_tokens is not None,
    }


def narrowed_body(body: Mapping[str, Any], narrowed: Narrowed) -> dict[str, Any]:
    """``body`` of a request with top-k, top-p or min-p, so that the log-probs in the answer are those of the truncated
    and renormalised distribution that tokens are sampled from.

    Raises:
        BadAnswer: the engine cannot report them.
    """
    if narrowed is Narrowed.NEVER:
        raise BadAnswer(
            "it would tell log-probs of the whole distribution where top_p, top_k or min_p leave a part of it; leave "
            f"those out, or install SGLang {'.'.join(map(str, FIRST_VERSION_THAT_TELLS_ITS_SUPPORT))} or newer"
        )
    if narrowed is Narrowed.ALWAYS:
        return dict(body)
    params = body["sampling_params"]
    top_k = params["top_k"] if 0 < params["top_k"] < NARROWED_TOP_K else NARROWED_TOP_K
    return {**body, "return_sampling_mask": True, "sampling_params": {**params, "top_k": top_k}}


def new_tokens(on_tokens: Callable[[Sequence[int]], None]) -> Callable[[Any], None]:
    """A callback for the events of a streamed answer. Each event repeats all tokens so far; ``on_tokens`` gets the new
    ones."""
    told = 0

    def tell(event: Any) -> None:
        nonlocal told
        token_ids = event.get("output_ids") if isinstance(event, Mapping) and not _is_given_up(event) else None
        if isinstance(token_ids, list) and len(token_ids) > told:
            on_tokens(token_ids[told:])
            told = len(token_ids)

    return tell


def _is_given_up(answer: Mapping[str, Any]) -> bool:
    """Whether the engine never worked on the request; SGLang puts a token there all the same."""
    meta = answer.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, Mapping) else None
    return isinstance(reason, Mapping) and reason.get("type") == StopReason.ABORT and bool(reason.get("status_code"))


def sampling_params(sampling: Sampling, max_new_tokens: int) -> dict[str, Any]:
    """Every field of ``sampling`` under the name that SGLang gives it."""
    params: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
    }
    for grammar in ("json_schema", "structural_tag"):
        if getattr(sampling, grammar):
            params[grammar] = getattr(sampling, grammar)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return params


def version_number(label: Any, default: int) -> int:
    """The optimizer step that an engine's version label stands for; an engine never updated says "default".

    Raises:
        BadAnswer: the label is no number; somebody else updates this engine.
    """
    if label in (None, "default"):
        return default
    try:
        return int(label)
    except (TypeError, ValueError) as error:
        raise BadAnswer(f"its weight version is {label!r}, where a step number was expected") from error


def parse_answer(
    body: Any, *, budget: int, pinned: int, initial: int, in_place: bool, num_top: int = 0, narrowed: bool = False
) -> Answer:
    """One answer of ``/generate``, checked.

    Args:
        budget: most tokens that were asked for.
        pinned: version the engine was known to serve before the request was sent.
        initial: version that the label "default" stands for.
        in_place: updates freeze running requests, so that one answer may span versions; else they interrupt them.
        num_top: how many of the likeliest tokens were asked for at each place.
        narrowed: log-probs within the part of the distribution that is sampled from were asked for.

    Raises:
        Refusal: it is none, but what is wrong with the request.
        BadAnswer: anything does not add up.
    """
    try:
        if "meta_info" not in body and "error" in body:  # how a streamed request is refused
            raise Refusal(reason_of(body))
        if _is_given_up(body):
            raise _given_up(body["meta_info"]["finish_reason"])
        if narrowed and body.get("output_ids") and body["meta_info"].get(SAMPLED_FROM) is None:
            raise BadAnswer("it tells log-probs of the whole distribution, where those of a part of it were asked for")
        parsed = _parsed(body, budget, pinned, initial, in_place)
        return replace(parsed, top_logprobs=_tops(body)) if num_top else parsed
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise BadAnswer(f"its answer has another shape than expected ({type(error).__name__}: {error})") from error


def reason_of(refusal: Any) -> str:
    """What a refused request's answer says of it."""
    error = refusal.get("error") if isinstance(refusal, Mapping) else None
    return str(error.get("message") if isinstance(error, Mapping) else refusal)[:LONGEST_REASON]


def _parsed(body: Any, budget: int, pinned: int, initial: int, in_place: bool) -> Answer:
    meta = body["meta_info"]
    narrowed = meta.get(SAMPLED_FROM)
    token_ids, logprobs = _tokens(body.get("output_ids"), meta.get("output_token_logprobs"), narrowed)
    if len(token_ids) > budget:
        raise BadAnswer(f"it sampled {len(token_ids)} tokens where {budget} were asked for")
    versions = _versions(meta, len(token_ids), pinned, initial, in_place)
    if versions and min(versions) < pinned:
        raise BadAnswer(f"it sampled with version {min(versions)} after it had served version {pinned}")
    return Answer(
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        stop=_stop(meta.get("finish_reason")),
        text=str(body.get("text") or ""),
    )


def _tokens(output_ids: Any, rows: Any, narrowed: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Token ids and log-probs.

    Args:
        rows: [log-prob, token id, text or null] of each.
        narrowed: log-probs within the part of the distribution that was sampled from, where they were asked for.
    """
    if not isinstance(output_ids, Sequence) or not isinstance(rows, Sequence):
        raise BadAnswer("its answer lacks token ids or their log-probs")
    if [row[1] for row in rows] != list(output_ids):
        raise BadAnswer(f"its {len(output_ids)} tokens and {len(rows)} log-probs are not of the same tokens")
    logprobs = tuple(row[0] for row in rows) if narrowed is None else tuple(narrowed)
    if len(logprobs) != len(output_ids):
        raise BadAnswer(f"its {len(output_ids)} tokens have {len(logprobs)} log-probs of what was sampled from")
    for position, logprob in enumerate(logprobs):
        if not isinstance(logprob, NUMBERS) or not abs(logprob) <= MAX_FLOAT32:  # not (>): NaN must fail
            raise BadAnswer(f"the log-prob of token {position} is {logprob}")
    return tuple(output_ids), logprobs


def _tops(body: Any) -> tuple[tuple[TokenLogprob, ...], ...]:
    """The likeliest tokens at each place; rows are as ``_tokens`` has them."""
    places = body["meta_info"]["output_top_logprobs"]
    if len(places) != len(body["output_ids"]):
        raise BadAnswer(f"it tells the likeliest tokens of {len(places)} places for {len(body['output_ids'])} tokens")
    return tuple(tuple((float(row[0]), int(row[1])) for row in rows or ()) for rows in places)


def _versions(meta: Mapping[str, Any], num_tokens: int, pinned: int, initial: int, in_place: bool) -> tuple[int, ...]:
    """Which weights sampled each token.

    The engine's own spans say it. Without spans there is one version, that at the end: true if updates interrupt, and
    also if it is the version known at the start.
    """
    spans = meta.get("weight_versions")
    if not spans:
        version = version_number(meta.get("weight_version"), initial)
        if in_place and version != pinned and num_tokens:
            raise BadAnswer("it was updated meanwhile and does not say which tokens came before the update")
        return (version,) * num_tokens
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions) or span["end"] < span["start"]:
            raise BadAnswer(f"its version spans {spans} leave a gap")
        versions += [version_number(span["version"], initial)] * (span["end"] - span["start"])
    if len(versions) != num_tokens:
        raise BadAnswer(f"its version spans {spans} cover {len(versions)} of {num_tokens} tokens")
    return tuple(versions)


def _stop(reason: Any) -> StopReason:
    if not isinstance(reason, Mapping) or reason.get("type") not in tuple(StopReason):
        raise BadAnswer(f"its finish reason is {reason!r}")
    return StopReason(reason["type"])


def _given_up(reason: Mapping[str, Any]) -> BadAnswer:
    message, status = reason.get("message"), reason["status_code"]
    return Refusal(str(message)) if status == 400 else BadAnswer(f"it gave the request up: {message} (status {status})")


def join_answers(answers: Sequence[Answer], budget: int) -> Completion:
    """The completion that an answer and its continuations make; without any, one that was aborted at once.

    An interruption at the last token of the budget interrupts nothing: that answer is complete.
    """
    token_ids = [token for answer in answers for token in answer.token_ids]
    stop = answers[-1].stop if answers else StopReason.ABORT
    if stop is StopReason.ABORT and len(token_ids) == budget:
        stop = StopReason.LENGTH
    return Completion(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.array([logprob for answer in answers for logprob in answer.logprobs], dtype=np.float32),
        versions=np.array([version for answer in answers for version in answer.versions], dtype=np.int32),
        stop=stop,
        text="".join(answer.text for answer in answers),
        top_logprobs=tuple(place for answer in answers for place in answer.top_logprobs),
    )
