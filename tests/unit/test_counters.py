"""Counters read from the text that servers show to Prometheus."""

from __future__ import annotations

import pytest

from areal_hpc.generation.counters import counted

EXPOSITION = """\
# HELP sglang:realtime_tokens_total Total number of tokens processed. mode: decode.
# TYPE sglang:realtime_tokens_total counter
sglang:realtime_tokens_total{engine_type="unified",mode="decode",model_name="/m \\"x\\", {y}",tp_rank="0"} 120.0
sglang:realtime_tokens_total{engine_type="unified",mode="decode",model_name="/m",tp_rank="1"} 1.5e+06
sglang:realtime_tokens_total{engine_type="unified",mode="prefill_compute",model_name="/m",tp_rank="0"} 64.0
sglang:realtime_tokens_created{mode="decode"} 1.7e+09
up 1 1700000000000
"""


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("sglang:realtime_tokens_total", {"mode": "decode"}, 1_500_120.0),
        ("sglang:realtime_tokens_total", {"mode": "decode", "tp_rank": "0"}, 120.0),
        ("sglang:realtime_tokens_total", {"model_name": '/m \\"x\\", {y}'}, 120.0),
        ("sglang:realtime_tokens_total", {}, 1_500_184.0),
        ("sglang:realtime_tokens", {}, 0.0),
        ("up", {}, 1.0),
        ("up", {"mode": "decode"}, 0.0),
    ],
)
def test_samples_of_one_name_are_added_up_by_their_labels(name: str, labels: dict[str, str], value: float) -> None:
    assert counted(EXPOSITION, name, **labels) == value
