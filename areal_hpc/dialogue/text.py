"""From token ids to text while they arrive: no half characters, no half stop strings, one lock around the tokenizer.

A character may be spread over several tokens. While its bytes are incomplete, decoding shows U+FFFD at the end, and
that tail is held back: every text given out is a beginning of the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from areal_hpc.dialogue.grammar import Grammars
from areal_hpc.dialogue.renderer import load_tokenizer

INCOMPLETE = "\ufffd"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

Decode = Callable[[Sequence[int]], str]


class Text:
    """A checkpoint's tokenizer for many threads. Fast tokenizers refuse concurrent use ("Already borrowed")."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text, with the special tokens that the tokenizer adds; never truncated."""
        with self._lock:
            ids: list[int] = self._tokenizer.encode(text, truncation=False)
        return ids

    def token_id(self, text: str) -> int | None:
        """The token that is spelled so; None where there is none."""
        found = self._tokenizer.get_added_vocab().get(text)
        return None if found is None else int(found)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        with self._lock:
            text: str = self._tokenizer.decode(
                token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return text

    def grammars(self, eos_token_ids: Sequence[int], vocab_size: int) -> Grammars:
        """What forces JSON of a schema in its tokens."""
        return Grammars(self._tokenizer, eos_token_ids, vocab_size)


def load_text(directory: Path) -> Text | None:
    """The tokenizer of a checkpoint directory, or None where it has none: such an engine speaks ids only."""
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return None
    return Text(load_tokenizer(directory))


class IncrementalText:
    """The text of a growing token list, at a cost that does not grow with it.

    Only a window is decoded anew: the tokens not settled yet, behind a few settled ones, since a tokenizer may treat
    the first token of what it decodes in its own way (a leading space dropped). It is the same however the tokens are
    handed over, and ``whole`` is the text of the answer, where one decoding of all tokens may take back what was shown:
    tokenizers that fall back on bytes show a whole run of them as replacement characters if one of them is wrong.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._settled = ""  # text of the tokens before _pending
        self._context: list[int] = []
        self._known = ""  # text of _context
        self._pending: list[int] = []
        self.whole = ""
        """All of the text; what is no character, or not yet, as replacement characters."""

    def extend(self, token_ids: Sequence[int]) -> str:
        """The whole text that is certain after ``token_ids`` more."""
        for token in token_ids:
            self._take(token)
        return self.whole.rstrip(INCOMPLETE) if self._pending else self.whole

    def _take(self, token: int) -> None:
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        is_spoilt = not text.startswith(self._known)  # by a wrong byte, which takes the good ones before it along
        self.whole = self._settled + (self._decode(self._pending) if is_spoilt else text[len(self._known) :])
        if not self.whole.endswith(INCOMPLETE):
            self._settled, self._context, self._pending = self.whole, self._pending, []
            self._known = self._decode(self._context)


def whole_text(token_ids: Sequence[int], decode: Decode) -> str:
    """The text of all tokens, which begins with whatever ``IncrementalText`` shows of it."""
    text = decode(token_ids)
    if INCOMPLETE not in text:
        return text
    growing = IncrementalText(decode)
    growing.extend(token_ids)
    return growing.whole


def first_stop(text: str, stops: Sequence[str], start: int) -> tuple[int, str] | None:
    """Where the stop string begins that is whole first, and which; one that lies before ``start`` was seen before.

    Not the one that begins first: a longer one around it may become whole later, and would take back what was shown.

    Args:
        start: length of the text that had been searched; a stop string may begin before it.
    """
    found = ((text.find(stop, max(0, start - len(stop) + 1)), stop) for stop in stops)
    return min((hit for hit in found if hit[0] >= 0), key=lambda hit: (hit[0] + len(hit[1]), hit), default=None)


def without_partial_stop(text: str, stops: Sequence[str]) -> str:
    """``text`` without an end that may yet become a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(stop.startswith(tail) and len(stop) > length for stop in stops):
            return text[:-length]
    return text
