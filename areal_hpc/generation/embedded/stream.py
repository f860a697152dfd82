"""Server-sent events of sequences that are being sampled.

engine's thread                       event loop
sequence.listener(num_tokens)  --->   an event with all text and tokens so far
sequence.done                  --->   the sequence's last event, with its finish reason
                                      after the last sequence: [DONE]
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from collections.abc import Sequence as Many
from typing import Any

from areal_hpc.dialogue.text import IncrementalText, Text, without_partial_stop
from areal_hpc.generation.embedded.sequence import Sequence
from areal_hpc.generation.embedded.wire import answer, answer_so_far
from areal_hpc.generation.served.exchange import DONE
from areal_hpc.generation.served.request import GenerateRequest


class ShownText:
    """The text of a running sequence as it may be shown: whole characters, nothing that may become a stop string."""

    def __init__(self, sequence: Sequence, text: Text | None) -> None:
        skip = sequence.params.skip_special_tokens
        self._sequence = sequence
        self._text = IncrementalText(lambda ids: text.decode(ids, skip_special_tokens=skip) if text else "")
        self._num = 0

    def at(self, num_tokens: int) -> str:
        """The text of the first ``num_tokens`` tokens; never called with fewer than before."""
        certain = self._text.extend(self._sequence.token_ids[self._num : num_tokens])
        self._num = num_tokens
        return without_partial_stop(certain, self._sequence.params.stop)


class Stream:
    """Events of some sequences. Make it before they are submitted, then ``async for event in stream``."""

    def __init__(self, sequences: Many[Sequence], request: GenerateRequest, text: Text | None) -> None:
        self._sequences, self._request, self._text = sequences, request, text
        self._shown = [ShownText(sequence, text) for sequence in sequences]
        self._progress: asyncio.Queue[tuple[int, int | None]] = asyncio.Queue()  # None: it has ended
        self._loop = asyncio.get_running_loop()
        for index, sequence in enumerate(sequences):
            self._follow(index, sequence)

    def _follow(self, index: int, sequence: Sequence) -> None:
        def tell(num_tokens: int | None) -> None:
            self._loop.call_soon_threadsafe(self._progress.put_nowait, (index, num_tokens))

        sequence.listener = tell
        sequence.done.add_done_callback(lambda _: tell(None))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        unfinished = len(self._sequences)
        while unfinished:
            index, num_tokens = await self._progress.get()
            unfinished -= num_tokens is None
            event = self._event(index, num_tokens)
            if not self._request.single:
                event["index"] = index
            yield f"data: {json.dumps(event)}\n\n".encode()
        yield DONE

    def _event(self, index: int, num_tokens: int | None) -> dict[str, Any]:
        sequence = self._sequences[index]
        if num_tokens is not None:
            shown = self._shown[index].at(num_tokens)
            return answer_so_far(sequence, self._request, self._text, shown=shown, num_tokens=num_tokens)
        failure = sequence.done.exception()
        if failure is not None:
            return {"error": {"message": str(failure)}}
        return answer(sequence, self._request, self._text)
