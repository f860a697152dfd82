"""JSON goes out and comes in alike with orjson and without."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc import json_bytes
from areal_hpc.dialogue.messages import refuse_constant
from areal_hpc.json_bytes import from_json, to_json

FINITE = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 53), 1 << 53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(params=["orjson", "the standard library"], autouse=True, scope="module")
def written_by(request: pytest.FixtureRequest) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "orjson":
            patch.setattr(json_bytes, "orjson", None)
        else:
            assert json_bytes.orjson is not None
        yield


@given(VALUES)
def test_values_come_back_and_others_read_them(value: Any) -> None:
    assert from_json(to_json(value)) == value == json.loads(to_json(value))
    assert from_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("value", [{"ids": (1, 2), "stop": ["今"]}, {"stop": ["\ud83d"]}, {"ids": [1 << 70]}])
def test_what_one_of_them_is_strict_about_is_written_all_the_same(value: Any) -> None:
    assert json.loads(to_json(value)) == json.loads(json.dumps(value))


def test_what_is_no_json_is_taken_or_refused_as_the_caller_says() -> None:
    (nan,) = from_json(b"[NaN]")
    assert math.isnan(nan)
    for data in (b"[NaN]", b"[-Infinity]", b"[1e", b"\xff", b""):
        with pytest.raises(ValueError, match=r".+"):
            from_json(data, constant=refuse_constant)
