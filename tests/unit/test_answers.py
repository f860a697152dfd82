from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.generation.answers import (
    Answer,
    BadAnswer,
    Refusal,
    join_answers,
    narrowed_body,
    new_tokens,
    parse_answer,
    reason_of,
    request_body,
    sampling_params,
    version_number,
)
from areal_hpc.generation.capabilities import Narrowed
from areal_hpc.types import GenerationRequest, Sampling, StopReason


def body(num: int = 3, **meta: Any) -> dict[str, Any]:
    tokens = list(range(10, 10 + num))
    told = {
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "weight_version": "4",
        **meta,
    }
    return {"text": "abc", "output_ids": tokens, "meta_info": told}


def parse(answer: Any, *, budget: int = 8, pinned: int = 4, in_place: bool = True) -> Answer:
    return parse_answer(answer, budget=budget, pinned=pinned, initial=0, in_place=in_place)


def spans(*triples: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in triples]


def test_a_whole_answer() -> None:
    assert parse(body()) == Answer(
        token_ids=(10, 11, 12), logprobs=(-0.5,) * 3, versions=(4, 4, 4), stop=StopReason.STOP, text="abc"
    )


def test_spans_say_which_weights_sampled_each_token() -> None:
    assert parse(body(weight_versions=spans(("4", 0, 1), ("5", 1, 3)), weight_version="5")).versions == (4, 5, 5)


def test_an_empty_answer_is_legal() -> None:
    answer = parse(body(0, finish_reason={"type": "abort", "message": "paused"}, weight_versions=[]))
    assert (answer.token_ids, answer.stop) == ((), StopReason.ABORT)


def test_without_spans_an_interrupting_engine_has_one_version_for_each_answer() -> None:
    assert parse(body(weight_version="6"), in_place=False).versions == (6, 6, 6)


def test_without_spans_an_update_in_place_leaves_the_versions_unknown() -> None:
    with pytest.raises(BadAnswer, match="which tokens came before"):
        parse(body(weight_version="6"), in_place=True)


def test_D9_a_token_older_than_the_pin_is_an_error() -> None:
    for answer in (body(weight_versions=spans(("3", 0, 1), ("4", 1, 3))), body(weight_version="3")):
        with pytest.raises(BadAnswer, match="version 3 after it had served version 4"):
            parse(answer, in_place=False)


def test_D23_log_probs_that_are_no_finite_numbers_are_refused() -> None:
    for wrong in (math.nan, -math.inf, None, "-0.5", -1e300):
        rows = [[-0.5, 10, None], [wrong, 11, None], [-0.5, 12, None]]
        with pytest.raises(BadAnswer, match="log-prob of token 1"):
            parse(body(output_token_logprobs=rows))


def test_F5_tokens_without_log_probs_are_refused() -> None:
    for rows in (None, [], [[-0.5, 10, None]], [[-0.5, 10, None], [-0.5, 12, None], [-0.5, 11, None]]):
        with pytest.raises(BadAnswer, match="log-probs"):
            parse(body(output_token_logprobs=rows))


@pytest.mark.parametrize(
    "wrong",
    [
        spans(("4", 0, 2)),
        spans(("4", 0, 4)),
        spans(("4", 1, 3)),
        spans(("4", 0, 1), ("4", 2, 3)),
        spans(("4", 0, 2), ("5", 1, 3)),
    ],
)
def test_spans_must_cover_the_tokens(wrong: Any) -> None:
    with pytest.raises(BadAnswer, match="version spans"):
        parse(body(weight_versions=wrong))


def test_more_tokens_than_asked_for_are_refused() -> None:
    with pytest.raises(BadAnswer, match="3 tokens where 2"):
        parse(body(), budget=2)


@pytest.mark.parametrize(
    "wrong",
    [None, "busy", 7, [], {}, {"meta_info": None}, {"meta_info": {}}, body(weight_versions=[{"version": "4"}])],
)
def test_another_shape_is_refused(wrong: Any) -> None:
    with pytest.raises(BadAnswer):
        parse(wrong)


@pytest.mark.parametrize("reason", [None, {}, {"type": "tired"}, "stop", {"type": "abort", "status_code": 500}])
def test_an_unknown_end_is_refused_and_so_is_a_failed_one(reason: Any) -> None:
    with pytest.raises(BadAnswer):
        parse(body(finish_reason=reason))


def test_version_labels() -> None:
    assert version_number("default", 7) == version_number(None, 7) == 7
    assert version_number("12", 7) == 12
    with pytest.raises(BadAnswer, match="'v12'"):
        version_number("v12", 7)


def test_E3_every_sampling_field_reaches_the_engine() -> None:
    """Each field is changed alone and must change what is sent."""
    changes: dict[str, Any] = {
        "max_new_tokens": 17,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "stop": ("\n\n",),
        "stop_token_ids": (2, 5),
        "ignore_eos": True,
        "seed": 3,
        "json_schema": '{"type": "object"}',
        "structural_tag": '{"structures": []}',
    }
    assert set(changes) == {field.name for field in fields(Sampling)}
    plain = Sampling(max_new_tokens=16)
    for name, value in changes.items():
        changed = replace(plain, **{name: value})
        before, after = sampling_params(plain, plain.max_new_tokens), sampling_params(changed, changed.max_new_tokens)
        sent = {key for key in after if after[key] != before.get(key)}
        assert sent == {"sampling_seed" if name == "seed" else name}
        assert after[sent.pop()] in (value, list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize(
    ("limit", "top_k"), [({"top_p": 0.9}, 2048), ({"min_p": 0.1}, 2048), ({"top_k": 5}, 5), ({"top_k": 4096}, 2048)]
)
def test_E2_sglang_is_asked_for_the_log_probs_of_what_a_narrowed_distribution_leaves(
    limit: dict[str, Any], top_k: int
) -> None:
    sampling = Sampling(max_new_tokens=8, **limit)
    assert sampling.is_narrowed
    plain = request_body(GenerationRequest(request_id="r", token_ids=(1,), sampling=sampling), "r", [])
    asked = narrowed_body(plain, Narrowed.ASKED)
    assert (asked["return_sampling_mask"], asked["sampling_params"]["top_k"]) == (True, top_k)
    assert narrowed_body(plain, Narrowed.ALWAYS) == plain
    with pytest.raises(BadAnswer, match=r"log-probs of the whole distribution.*install SGLang 0\.5\.21"):
        narrowed_body(plain, Narrowed.NEVER)


def test_what_is_not_narrowed_is_asked_for_as_ever() -> None:
    assert not Sampling(max_new_tokens=8, temperature=0.7).is_narrowed
    assert not Sampling(max_new_tokens=8, temperature=0.0, top_p=0.5).is_narrowed  # the likeliest is in every part


def test_E2_log_probs_of_the_narrowed_distribution_go_before_those_of_the_whole_one() -> None:
    assert parse(body(output_token_sampling_logprobs=[-0.1, -0.2, 0.0])).logprobs == (-0.1, -0.2, 0.0)
    with pytest.raises(BadAnswer, match="3 tokens have 2 log-probs"):
        parse(body(output_token_sampling_logprobs=[-0.1, -0.2]))


@pytest.mark.parametrize("told", [{}, {"output_token_sampling_logprobs": None}])
def test_E2_an_answer_that_lacks_the_log_probs_of_the_narrowed_distribution_is_none(told: dict[str, Any]) -> None:
    with pytest.raises(BadAnswer, match="log-probs of the whole distribution, where those of a part"):
        parse_answer(body(**told), budget=8, pinned=4, initial=0, in_place=True, narrowed=True)
    ended = body(0, finish_reason={"type": "abort", "message": "paused"}, weight_versions=[], **told)
    assert parse_answer(ended, budget=8, pinned=4, initial=0, in_place=True, narrowed=True).logprobs == ()


def test_F2_prompt_10_limit_8_abort_after_5_asks_for_3_more() -> None:
    request = GenerationRequest(
        request_id="r", token_ids=tuple(range(10)), sampling=Sampling(max_new_tokens=8), session=""
    )
    sent = request_body(request, "r#1", [90, 91, 92, 93, 94])
    assert sent["input_ids"] == [*range(10), 90, 91, 92, 93, 94]
    assert sent["sampling_params"]["max_new_tokens"] == 3


def test_the_likeliest_tokens_are_asked_for_and_told_for_every_token() -> None:
    plain = GenerationRequest(request_id="r", token_ids=(1,), sampling=Sampling(max_new_tokens=8))
    assert "top_logprobs_num" not in request_body(plain, "r", [])
    assert request_body(replace(plain, num_top=3), "r", [])["top_logprobs_num"] == 3
    rows = [[-0.5, 7, None], [-1.5, 8, None]]
    meta = {
        "output_token_logprobs": rows,
        "output_top_logprobs": [[[-0.5, 7, "a"], [-2.0, 9, "b"]], None],
        "weight_version": "1",
        "finish_reason": {"type": "length"},
    }
    how = {"budget": 2, "pinned": 1, "initial": 0, "in_place": True}
    body = {"output_ids": [7, 8], "meta_info": meta, "text": ""}
    answer = parse_answer(body, num_top=2, **how)  # type: ignore[arg-type]
    assert answer.top_logprobs == (((-0.5, 7), (-2.0, 9)), ())
    assert join_answers([answer, answer], 4).top_logprobs == answer.top_logprobs * 2
    assert parse_answer(body, **how).top_logprobs == ()  # type: ignore[arg-type]
    for spoilt in ([], None):
        meta["output_top_logprobs"] = spoilt
        with pytest.raises(BadAnswer):
            parse_answer(body, num_top=2, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "no such grammar"}},
        {
            "output_ids": [0],  # SGLang tells a token that it has not sampled
            "meta_info": {
                "output_token_logprobs": [],
                "weight_version": "1",
                "finish_reason": {"type": "abort", "message": "no such grammar", "status_code": 400},
            },
        },
    ],
)
def test_a_stream_that_says_what_is_wrong_with_its_request_is_a_refusal(body: Any) -> None:
    told: list[int] = []
    new_tokens(told.extend)(body)
    assert told == []
    with pytest.raises(Refusal, match=r"^no such grammar$"):
        parse_answer(body, budget=2, pinned=1, initial=0, in_place=True)


def test_what_a_refusal_says_is_found_and_never_long() -> None:
    assert reason_of({"error": {"message": "no"}}) == "no"
    assert reason_of("plain") == "plain"
    assert len(reason_of({"error": "x" * 1000})) == 300


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=6), budget=st.integers(1, 30))
def test_joined_answers_keep_every_token_with_its_log_prob_and_version(sizes: list[int], budget: int) -> None:
    answers = [
        Answer(token_ids=(k,) * n, logprobs=(-float(k),) * n, versions=(k,) * n, stop=StopReason.ABORT, text=str(k) * n)
        for k, n in enumerate(sizes)
    ]
    whole = join_answers(answers, budget)
    expected = [k for k, n in enumerate(sizes) for _ in range(n)]
    assert whole.token_ids.tolist() == whole.versions.tolist() == (-whole.logprobs).tolist() == expected
    assert whole.text == "".join(map(str, expected))
    assert whole.stop is (StopReason.LENGTH if len(expected) == budget else StopReason.ABORT)


def test_new_tokens_are_told_once_and_what_is_no_answer_tells_nothing() -> None:
    told: list[list[int]] = []
    tell = new_tokens(lambda ids: told.append(list(ids)))
    for token_ids in ([], [1, 2], [1, 2], "no list", [1, 2, 3]):
        tell({"output_ids": token_ids})
    tell({"error": "x"})
    assert told == [[1, 2], [3]]
