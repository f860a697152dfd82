"""The text of an answer, as SGLang shows it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from areal_hpc.dialogue.text import Text, first_stop, whole_text
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
    decode = partial(text.decode, skip_special_tokens=params.skip_special_tokens)
    matched = (sequence.finish_reason or {}).get("matched")
    if isinstance(matched, int) and not params.no_stop_trim:
        token_ids.pop()
    whole = whole_text(token_ids, decode)
    if isinstance(matched, str) and not params.no_stop_trim:
        before = whole_text(token_ids[:-1], decode).rstrip("\ufffd")
        hit = first_stop(whole, [matched], len(before))
        return whole if hit is None else whole[: hit[0]]
    return whole
