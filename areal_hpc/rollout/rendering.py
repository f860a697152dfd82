"""The prompt of a group is rendered once, whoever of its episodes asks first."""

from __future__ import annotations

from collections.abc import Sequence

from areal_hpc.protocols import Renderer
from areal_hpc.types import Message


class RenderedOnce:
    """A ``Renderer`` for the episodes of one prompt: ``messages`` themselves are rendered once, others each time."""

    def __init__(self, renderer: Renderer, messages: Sequence[Message]) -> None:
        self._renderer, self._messages = renderer, messages
        self._token_ids: tuple[int, ...] | None = None

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        if messages is not self._messages:
            return self._renderer.render(messages)
        if self._token_ids is None:
            self._token_ids = self._renderer.render(messages)
        return self._token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._renderer.decode(token_ids)
