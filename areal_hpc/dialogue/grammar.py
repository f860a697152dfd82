"""Which tokens may come next in JSON of a schema, or in calls of strict tools: what forces them, token by token.

    grammars = Grammars(tokenizer, eos_token_ids, vocab_size)
    matcher = grammars.matcher(schema=schema)       one for each answer; or structural_tag=...
    allowed = matcher.allowed()                     bool [V]; before each token
    matcher.take(token)

The only door of llguidance, an extra. Whoever samples renormalises over what is allowed, and **the log-prob that goes
with a token is that of this distribution**, since it is the one that was sampled (SGLang does the same). A token that
the schema left no choice about has log-prob 0 whatever the model thinks of it. So the ratio of the policy to the
behaviour policy is small where the schema overruled the model, and such tokens teach it little, while its choices
inside the schema teach it as they do elsewhere. Nothing is left out of training for having been forced, unless
``algorithm.rejection_sampling`` leaves it out for that ratio; and ``trainer.gap_alarm`` may take such tokens for a
difference between trainer and engines.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_hpc.dialogue.tag_grammar import TEXT_TOKENS, lark_of
from areal_hpc.errors import ConfigError, DataError
from areal_hpc.extras import optional

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How forced JSON is laid out: as ``json.dumps`` writes it, and as most of what models have read; a model that is free
to choose blanks can go on with them for ever."""


def _llguidance() -> Any:
    return optional("llguidance", extra="models", what="JSON of a schema")


@functools.lru_cache(maxsize=256)
def grammar_of(schema: str) -> str:
    """What llguidance makes of a JSON schema, which is given as JSON.

    Raises:
        DataError: it is no schema, or asks for what cannot be forced.
        ConfigError: the package is not installed.
    """
    matcher = _llguidance().LLMatcher
    try:
        grammar: str = matcher.grammar_from_json_schema(schema, overrides=LAYOUT)
    except ValueError as error:
        raise DataError(f"the schema cannot be forced: {error}; simplify it") from error
    return _valid(grammar, "the schema")


@functools.lru_cache(maxsize=256)
def grammar_of_tag(structural_tag: str) -> str:
    """What llguidance makes of a structural tag. Raises as ``grammar_of``."""
    return _valid(_llguidance().LLMatcher.grammar_from_lark(lark_of(structural_tag, LAYOUT)), "the structural_tag")


def _valid(grammar: str, what: str) -> str:
    failed, told = _llguidance().LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise DataError(f"{what} cannot be forced: {told[0].partition(chr(10))[0]}; simplify it")
    return grammar


def trouble_with(schema: str) -> str:
    """Why answers cannot be held to a schema here; empty if they can."""
    try:
        grammar_of(schema)
    except (DataError, ConfigError) as error:
        return str(error)
    return ""


class Grammars:
    """Makes matchers over one tokenizer.

    Args:
        tokenizer: of transformers, backed by a tokenizer.json.
        vocab_size: of the model's logits, which may be more than the tokenizer has.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer, self._eos, self._vocab_size = tokenizer, list(eos_token_ids), vocab_size
        self._at_start = functools.lru_cache(maxsize=256)(self._made)

    def _made(self, grammar: str) -> Any:
        """A matcher that has taken nothing: copies cost next to nothing, and share what any of them has computed."""
        return _llguidance().LLMatcher(self._tokens, grammar, log_level=0)

    @functools.cached_property
    def _tokens(self) -> Any:
        """Made at the first use: a second for a vocabulary of a hundred thousand tokens."""
        size = max(self._vocab_size, len(self._tokenizer))
        read = _llguidance().LLTokenizer(self._tokenizer.backend_tokenizer.to_str(), n_vocab=size, eos_token=self._eos)
        return _llguidance().LLTokenizer(
            _llguidance().TokenizerWrapper(_Vocabulary(read, self._tokenizer)), eos_token=self._eos
        )

    def matcher(self, *, schema: str = "", structural_tag: str = "") -> Matcher:
        """For one of the two, which are JSON. Raises DataError and ConfigError as ``grammar_of``."""
        assert bool(schema) != bool(structural_tag), "an answer is held to a schema or to a tag"
        grammar = grammar_of(schema) if schema else grammar_of_tag(structural_tag)
        return Matcher(self._at_start(grammar).deep_copy(), self._eos, self._vocab_size)


class _Vocabulary:
    """A tokenizer as llguidance reads it, but for ``TEXT_TOKENS``: it takes whatever is written <so> for special.

    Args:
        read: llguidance's reading.
    """

    def __init__(self, read: Any, tokenizer: Any) -> None:
        self.eos_token_id, self.bos_token_id = read.eos_token, None
        self.tokens = [read.decode_bytes([token]) for token in range(read.vocab_size)]
        words = {word.encode() for word in TEXT_TOKENS}
        self.special_token_ids = [
            token for token, spelled in enumerate(self.tokens) if read.is_special_token(token) and spelled not in words
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


class Matcher:
    """Follows one answer."""

    def __init__(self, matcher: Any, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher, self._eos, self._vocab_size = matcher, list(eos_token_ids), vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """The tokens that may come next [V]; once the JSON is whole, those that end a turn."""
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        if self._matcher.is_stopped():
            allowed[self._eos] = True
            return allowed
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        known = min(self._vocab_size, bits.size)
        allowed[:known] = bits[:known]
        return allowed

    def take(self, token: int) -> None:
        """Go on by a token that was allowed."""
        if not self._matcher.is_stopped():
            taken = self._matcher.consume_token(token)
            assert taken, f"token {token} was not allowed: {self._matcher.get_error()}"


def as_schema(value: Any) -> str:
    """A JSON schema as JSON; the order of properties is kept, since answers have it as well."""
    return json.dumps(value, ensure_ascii=False)
