"""Has SGLang report whether it is paused, which otherwise only its tokenizer's process knows.

While it is paused its schedulers publish no loads, so that the last ones from before are read over and over; and one
that does not begin what it has queued looks the same, but for the queue. Who looks at loads must tell them apart: the
one waits for new weights, the other hangs.

Imported by SGLang alone, in the environment that SGLang is installed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


async def tell_pauses(original: Callable[..., Any], self: Any, *given: Any, **named: Any) -> Any:
    """In the tokenizer's process: the loads of all schedulers, where ``queues.paused`` says whether SGLang is paused.
    SGLang itself has a number there that is always 0."""
    loads = await original(self, *given, **named)
    for load in loads:
        load.queues.paused = bool(self.is_pause)
    return loads
