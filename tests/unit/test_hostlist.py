"""Host lists; what they mean is what ``scontrol show hostnames`` of Slurm 22.05 printed for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.cluster.hostlist import expand
from areal_hpc.errors import UserError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[01-03,07]", ["n01", "n02", "n03", "n07"]),
        ("a1,b[2-3]", ["a1", "b2", "b3"]),
        ("x[001-002]y[3-4]", ["x001y3", "x001y4", "x002y3", "x002y4"]),
        ("nid[0998-1001]", ["nid0998", "nid0999", "nid1000", "nid1001"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("rack[1,3]-gpu[2]", ["rack1-gpu2", "rack3-gpu2"]),
        ("c[1-2].cluster.example", ["c1.cluster.example", "c2.cluster.example"]),
        ("n4,n[1-2]", ["n4", "n1", "n2"]),
        ("n1\nn2\n", ["n1", "n2"]),
        ("", []),
    ],
)
def test_A26_every_form_of_brackets(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["n[1-2", "n1-2]", "n[[1]]", "n[3-1]", "n[]", "n[1,,2]", "n[a-b]", "n[1-2-3]"])
def test_what_is_no_host_list_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(UserError) as caught:
        expand(text)
    assert repr(text) in str(caught.value)


@given(st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 30)), min_size=1, max_size=5), st.integers(1, 5))
def test_ranges_keep_their_zeros_and_their_number(ranges: list[tuple[int, int]], width: int) -> None:
    inside = ",".join(f"{first:0{width}d}-{first + more:0{width}d}" for first, more in ranges)
    expected = [f"n{number:0{width}d}" for first, more in ranges for number in range(first, first + more + 1)]
    assert expand(f"n[{inside}]") == expected
