"""SGLang's ``/generate`` out: what has been sampled, in the shape of its answers."""

from __future__ import annotations

from typing import Any

from areal_hpc.dialogue.text import Text
from areal_hpc.generation.embedded.sequence import Sequence
from areal_hpc.generation.served.request import GenerateRequest
from areal_hpc.generation.served.text import final_text
from areal_hpc.types import TokenLogprob


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
