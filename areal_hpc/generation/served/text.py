"""The text of an answer, as SGLang shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from areal_hpc.dialogue.text import Text, first_stop
from areal_hpc.generation.served.request import SamplingParams


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
