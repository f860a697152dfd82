"""Whatever JSON can hold, in whatever place of a body, for tests of what is read over HTTP."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5)
)  # JSON as Python reads it: 1e400 becomes infinite
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a body something could be something else."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def spoilt(body: Any, path: Sequence[Any], value: Any) -> Any:
    whole = inner = copy.deepcopy(body)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return whole


DEEP = {"list": ("[", "]"), "object": ('{"a":', "}")}


def nested(kind: str, depth: int) -> str:
    """A value of so many levels, of which a reader of JSON takes some hundreds; only ``written`` makes it one."""
    return f"{kind} {depth} deep"


def written(body: Any) -> str:
    """A body as JSON."""

    def expanded(match: re.Match[str]) -> str:
        opening, closing = DEEP[match[1]]
        return opening * int(match[2]) + "1" + closing * int(match[2])

    return re.sub(r'"(list|object) (\d+) deep"', expanded, json.dumps(body))


ANYTHING = VALUES | st.just("\ud800") | st.builds(nested, st.sampled_from(list(DEEP)), st.sampled_from([100, 260, 900]))
NUMBERS = st.integers().map(str) | st.sampled_from(
    ["9" * 4301, "\u0663", "\u00b2", "1_0", " 3", "+3", "0x1", "1e2", "-1"]
)
"""What somebody may take for one, as text."""
