"""JSON of a schema, token by token: nothing else, all of it, and with the log-probs of what was really sampled."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from embedded_engines import FREE, PROMPT, MakeEngine, Models, at_token, complete, one
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB_SIZE, make_tokenizer

from areal_hpc.dialogue.grammar import Grammars, as_schema, grammar_of, trouble_with
from areal_hpc.errors import ConfigError, DataError

TOKENIZER = make_tokenizer()
EOS = TOKENIZER.eos_token_id
GRAMMARS = Grammars(TOKENIZER, [EOS], VOCAB_SIZE + 5)  # a model may have more logits than its tokenizer has tokens
WORDS = ("aa", "ab", "b")
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
        "note": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "note"],
    "additionalProperties": False,
}


def is_person(value: Any) -> bool:
    """Whether PERSON, read by a person, allows it."""
    return (
        list(value) == ["name", "age", "tags", "note"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and len(value["tags"]) <= 3
        and set(value["tags"]) <= {"x", "y"}
        and value["note"] in (None, True, False)
    )


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1))
def test_whatever_is_sampled_is_json_of_the_schema_and_then_the_turn_ends(seed: int) -> None:
    matcher, rng, sampled = GRAMMARS.matcher(schema=as_schema(PERSON)), np.random.default_rng(seed), []
    while EOS not in sampled:
        allowed = matcher.allowed()
        assert allowed.shape == (VOCAB_SIZE + 5,) and allowed.any()
        sampled.append(int(rng.choice(np.flatnonzero(allowed))))
        matcher.take(sampled[-1])
    assert sampled.index(EOS) == len(sampled) - 1
    assert is_person(json.loads(TOKENIZER.decode(sampled[:-1])))


people = st.fixed_dictionaries(
    {
        "name": st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), max_size=8),
        "age": st.integers(0, 150),
        "tags": st.lists(st.sampled_from(["x", "y"]), max_size=3),
        "note": st.none() | st.booleans(),
    }
)


@settings(max_examples=25)
@given(people)
def test_whatever_the_schema_allows_can_be_sampled(person: dict[str, Any]) -> None:
    text = json.dumps({name: person[name] for name in PERSON["properties"]}, ensure_ascii=False)
    matcher = GRAMMARS.matcher(schema=as_schema(PERSON))
    for token in [*TOKENIZER.encode(text), EOS]:
        assert matcher.allowed()[token], (text, token)
        matcher.take(token)


def allowed_by_hand(so_far: list[int]) -> list[int]:
    """What may come next of the three words in quotes, one token a byte."""
    texts = [[*TOKENIZER.encode(json.dumps(word)), EOS] for word in WORDS]
    return sorted({text[len(so_far)] for text in texts if text[: len(so_far)] == so_far})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("interrupted", [False, True])
def test_E2_the_log_prob_is_that_of_the_distribution_that_was_sampled(
    models: Models, make_engine: MakeEngine, temperature: float, interrupted: bool
) -> None:
    """The model's own log-probs, renormalised over what may come next by hand; beside a sequence that is free."""
    engine, (_, model) = make_engine(), models["old"]
    schema = as_schema({"enum": list(WORDS)})
    params = replace(FREE, temperature=temperature, json_schema=schema, ignore_eos=False)
    forced = [one(engine, PROMPT[: 3 + seed], replace(params, sampling_seed=seed)) for seed in range(6)]
    free = one(engine, PROMPT, FREE)
    if interrupted:
        at_token(forced[0], 2, engine.scheduler.retract)
    complete(engine, *forced, free)
    assert {json.loads(TOKENIZER.decode(sequence.token_ids[:-1])) for sequence in forced} <= set(WORDS)
    for sequence in forced:
        assert sequence.finish_reason == {"type": "stop", "matched": EOS}
        with torch.no_grad():
            logits = model(torch.tensor([sequence.history])).logits[0].float() / temperature
        for t, (token, logprob) in enumerate(zip(sequence.token_ids, sequence.logprobs, strict=True)):
            allowed = allowed_by_hand(sequence.token_ids[:t])
            of_allowed = torch.log_softmax(logits[len(sequence.prompt) + t - 1][allowed], -1)
            assert logprob == pytest.approx(of_allowed[allowed.index(token)].item(), abs=1e-4)
    alone = make_engine()
    assert complete(alone, one(alone, PROMPT, FREE))[0].token_ids == free.token_ids


@pytest.mark.parametrize("schema", ['{"type": "nonsense"}', "no JSON", "[1]"])
def test_what_cannot_be_forced_is_refused_with_a_reason(make_engine: MakeEngine, schema: str) -> None:
    assert trouble_with(schema).startswith("the schema cannot be forced")
    engine = make_engine()
    with pytest.raises(DataError, match="cannot be forced"):
        one(engine, PROMPT, replace(FREE, json_schema=schema))


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar_of.cache_clear()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match="pip install"):
        grammar_of("{}")
    assert "llguidance" in trouble_with("{}")


def test_the_order_of_properties_is_kept() -> None:
    assert as_schema(PERSON).index("name") < as_schema(PERSON).index("age")


FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
OF_OPENAI: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "pattern": "^[a-z]+$"},
        **{name: {"type": "string", "format": name} for name in FORMATS},
        "number": {"type": "number", "multipleOf": 5, "minimum": 0, "exclusiveMaximum": 100},
        "list": {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 1, "maxItems": 3},
        "either": {"anyOf": [{"type": "null"}, {"enum": ["a", 1]}]},
        "maybe": {"type": ["string", "null"]},
    },
    "required": ["text"],
    "additionalProperties": False,
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
}


def test_whatever_openai_takes_in_a_strict_schema_can_be_forced() -> None:
    """By its guide to structured outputs; what else JSON schema has is refused there as well."""
    assert trouble_with(as_schema(OF_OPENAI)) == ""
    assert "uniqueItems" in trouble_with(as_schema({"type": "array", "uniqueItems": True}))
