"""What a sampled text says: reasoning, content and tool calls; also while it is still being sampled.

Read in the middle of an answer, only what is certain is told: no half marker, no blanks that a call may follow. Each
reading's reasoning and content begin with the earlier one's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_hpc.dialogue.text import without_partial_stop
from areal_hpc.dialogue.tool_calls import Kinds, ToolCall
from areal_hpc.dialogue.tool_formats import ToolFormat

THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """An answer, taken apart."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the answers to one request are read.

    Args:
        format: how the model writes calls; None where it was offered no tools.
        thinking: the context ends inside the model's reasoning, so the answer begins there.
        kinds: parameter types of the tools.
        prefix: what the context already says of the answer (a forced call's beginning).
    """

    format: ToolFormat | None = None
    thinking: bool = False
    kinds: Kinds = field(default_factory=dict)
    prefix: str = ""

    def read(self, text: str, *, final: bool) -> Parts:
        """The parts of ``text``; before the ``final`` reading those that cannot change any more, without calls."""
        reasoning, said = self._reasoning(self.prefix + text, final)
        if said is None:
            return Parts(reasoning=reasoning)
        head, written = self._at_marker(said)
        if not final:
            held = head if written else without_partial_stop(head, self.format.markers if self.format else ())
            return Parts(reasoning=reasoning, content=held.rstrip())
        if not written or self.format is None:
            return Parts(reasoning=reasoning, content=said)
        calls, rest = self.format.parse(written, self.kinds)
        if not calls:
            return Parts(reasoning=reasoning, content=said)
        return Parts(reasoning=reasoning, content=(head.rstrip() + rest.rstrip()), calls=tuple(calls))

    def _reasoning(self, text: str, final: bool) -> tuple[str, str | None]:
        """Reasoning, and what follows it; None while it is not known that anything does."""
        begun = text.lstrip()
        if not final and THINK.startswith(begun) and begun != THINK:
            return "", None  # nothing yet, or the beginning of the marker
        if begun.startswith(THINK):
            inside = begun.removeprefix(THINK)
        elif self.thinking:
            inside = text
        else:
            return "", text
        thought, closed, said = inside.partition(THOUGHT)
        if closed:
            return thought.strip(), said.lstrip("\n")
        return (thought if final else without_partial_stop(thought, (THOUGHT,))).strip(), None

    def _at_marker(self, text: str) -> tuple[str, str]:
        """The text before the first call, and from there on."""
        if self.format is None:
            return text, ""
        if text.lstrip()[:1] in self.format.bare:
            return "", text
        at = min((place for marker in self.format.markers if (place := text.find(marker)) >= 0), default=len(text))
        return text[:at], text[at:]
