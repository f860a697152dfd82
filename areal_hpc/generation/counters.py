"""What a server has counted, from the text that it shows to Prometheus."""

from __future__ import annotations

import re

SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?$")
LABEL = re.compile(r'(?P<name>\w+)="(?P<value>(?:[^"\\]|\\.)*)"')


def counted(exposition: str, name: str, **labels: str) -> float:
    """The sum of all samples of ``name`` with these labels, whatever other labels they have; 0 before the first one.

    Args:
        exposition: Prometheus' text format 0.0.4, a sample a line.
    """
    total = 0.0
    for line in exposition.splitlines():
        sample = SAMPLE.match(line)
        if sample is None or sample["name"] != name:
            continue
        if (
            labels.items()
            <= {found["name"]: found["value"] for found in LABEL.finditer(sample["labels"] or "")}.items()
        ):
            total += float(sample["value"])
    return total
