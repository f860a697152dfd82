"""What a tiny model is taught before it is trained: questions, the right answers, and habits that hide them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_hpc.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer of the model, and what comes before it."""

    messages: tuple[Message, ...]
    answer: str
    """The right one, in the form that is rewarded."""
    opening: str = ""
    """How ``answer`` begins where habit would say something else: what follows shows the skill by itself."""
    habit: Callable[[random.Random], str]
    """What is said instead, in many ways; now and then the right answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Dialogues of one kind. All streams are endless, and a seed gives the same one again."""

    skill: str
    """What is learned, for messages: "sort"."""
    template: str
    """The chat template, Jinja."""
    markers: Sequence[str] = ()
    """Texts that are one token each."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Function schemas that are offered in every turn."""
    dialogues: Callable[[int], Iterator[Sequence[Turn]]]
    """Seed to an endless stream of dialogues; all turns of one must be right for its reward."""
    corpus: Callable[[int], list[str]]
    """Seed to the texts that the tokenizer is made from."""
