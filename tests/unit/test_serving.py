"""How fast an engine samples, as its generator records it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from areal_hpc.roles.wiring.serving import Meter


def test_the_rate_is_that_since_the_last_look() -> None:
    counts, moments = iter([100, 100, 350]), iter([0.0, 10.0, 12.0, 17.0])

    async def look() -> Mapping[str, Any]:
        return {"version": 3, "tokens": next(counts)}

    meter = Meter(look, clock=lambda: next(moments))
    told = [asyncio.run(meter.load()) for _ in range(3)]
    assert [one["tokens_per_s"] for one in told] == pytest.approx([100 / 10, 0.0, 250 / 5])
    assert [(one["version"], one["tokens"]) for one in told] == [(3, 100), (3, 100), (3, 350)]
