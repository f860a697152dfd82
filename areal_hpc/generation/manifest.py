"""How an engine is told what a bucket holds, checksums and deltas: a server of our own in fields of its request, an
SGLang with our plugin in its workers in the name of the load format, which it hands on to them:

    areal_hpc:{"checksums": [...], "nums_changed": [...]}

Names, dtypes and shapes have fields of their own in SGLang's request. What it does not know it drops, but of a load
format it takes any text, and hands it on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from areal_hpc.generation.capabilities import Capabilities
from areal_hpc.transfer import TensorSpec

PREFIX = "areal_hpc:"


def bucket_body(group: str, specs: Sequence[TensorSpec], capabilities: Capabilities | None) -> dict[str, Any]:
    """The body of SGLang's ``/update_weights_from_distributed``, with what this engine takes besides."""
    body: dict[str, Any] = {
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
        "group_name": group,
        "load_format": "flattened_bucket",
        "flush_cache": False,
        "abort_all_requests": False,
    }
    if capabilities is not None and capabilities.manifests:
        return body | {"load_format": written(specs)}
    if capabilities is not None and capabilities.checksums:
        body["checksums"] = [spec.checksum for spec in specs]
    if any(spec.num_changed is not None for spec in specs):
        body["nums_changed"] = [spec.num_changed for spec in specs]
    return body


def written(specs: Sequence[TensorSpec]) -> str:
    """The load format of a bucket."""
    told = {"checksums": [spec.checksum for spec in specs], "nums_changed": [spec.num_changed for spec in specs]}
    return PREFIX + json.dumps(told)


def read(
    load_format: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> tuple[TensorSpec, ...]:
    """The bucket's specs, of that and of the request's own fields."""
    told = json.loads(load_format.removeprefix(PREFIX))
    each = zip(names, dtypes, shapes, told["checksums"], told["nums_changed"], strict=True)
    return tuple(
        TensorSpec(name=name, dtype=dtype, shape=tuple(shape), checksum=checksum, num_changed=num_changed)
        for name, dtype, shape, checksum, num_changed in each
    )
