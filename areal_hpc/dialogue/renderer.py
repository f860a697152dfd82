"""Messages to token ids and back, by the model's own chat template and tokenizer.

Nothing is ever cut: a prompt that is too long is the caller's to refuse. Texts and ids go straight to the library
behind a fast tokenizer, which takes many threads; what goes through transformers is shared under a lock, since that may
not be used by two threads at once ("Already borrowed").
"""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from areal_hpc.errors import DataError
from areal_hpc.types import Message

KNOWN_TEXTS = 64
"""Texts whose ids are kept: the attempts at one prompt begin alike, often with thousands of tokens of instructions."""


class ChatRenderer:
    """A ``Renderer`` for the checkpoint directory ``model_path``.

    ``eos_token_ids`` are the tokens that end a turn: those of generation_config.json, config.json and the tokenizer.

    Raises:
        DataError: the directory holds no tokenizer, or one without a chat template.
    """

    def __init__(self, model_path: str) -> None:
        self._path = Path(model_path)
        self._tokenizer = load_tokenizer(self._path)
        self._backend = backend_of(self._tokenizer)
        self._known = lru_cache(maxsize=KNOWN_TEXTS)(self._encoded)
        if not self._tokenizer.chat_template:
            raise DataError(f"{model_path} has no chat template; add chat_template.jinja, or use a chat model")
        self._lock = threading.Lock()
        self._own_arguments = set(inspect.signature(self._tokenizer.apply_chat_template).parameters)
        self.eos_token_ids = _eos_token_ids(self._path, self._tokenizer)

    @property
    def template(self) -> str:
        """The chat template's text; of several named ones, all."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else "\n".join(map(str, template.values()))

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids of the conversation and of the header that begins the assistant's next turn.

        Raises:
            DataError: the template refuses the messages.
        """
        return self.conversation(messages)

    def conversation(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        header: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """The ids of the conversation, with tools.

        Args:
            tools: function schemas as the client sent them; the template decides how they are shown.
            header: whether the header of the assistant's next turn follows.
            options: the template's own arguments, such as ``enable_thinking``.

        Raises:
            DataError: the template refuses the messages.
        """
        return self.encode(self.text(messages, tools=tools, header=header, options=options))

    def text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        header: bool,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the template writes it; what is given and raised is as for ``conversation``."""
        if taken := self._own_arguments & set(options or {}):  # "tokenize", "chat_template" and their like
            raise DataError(f"template arguments {sorted(taken)} are not the template's own; leave them out")
        how = {**(options or {}), "tools": list(tools) or None, "add_generation_prompt": header}
        return self._templated(messages, **how)

    def _templated(self, messages: Sequence[Message], **options: Any) -> str:
        """The conversation as text, which is tokenized by itself: that is faster than to have the template do both,
        and the same whether transformers would give a list or (from version 5) a mapping."""
        from jinja2 import TemplateError

        conversation = [dict(message) for message in messages]
        try:
            with self._lock:
                text = self._tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        except (TemplateError, TypeError) as error:  # a template that adds None to a text raises the latter
            roles = [message.get("role") for message in conversation]
            raise DataError(
                f"the chat template of {self._path} refuses messages with roles {roles}: {error}"
            ) from error
        assert isinstance(text, str)
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a plain text; special tokens that it spells are those tokens.

        Raises:
            DataError: it is no text, such as half of a surrogate pair, which JSON allows.
        """
        try:
            return self._known(text)
        except TypeError as error:
            raise DataError(f"the text cannot be encoded: {error}") from error

    def _encoded(self, text: str) -> tuple[int, ...]:
        if self._backend is not None:
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=False)  # "fast": without offsets
            return tuple(encoded.ids)
        with self._lock:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False, truncation=False))

    def spelled(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids`` with its special tokens, since some models write tool calls with them."""
        return self._decoded(token_ids, skip_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids`` without special tokens, its spaces as they are."""
        return self._decoded(token_ids, skip_special_tokens=True)

    def _decoded(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        ids = [int(token) for token in token_ids]
        if self._backend is not None:
            text = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        else:
            with self._lock:
                text = self._tokenizer.decode(
                    ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
                )
        assert isinstance(text, str)
        return text


def backend_of(tokenizer: Any) -> Any | None:
    """The ``tokenizers.Tokenizer`` behind a fast tokenizer, which cuts and pads nothing, for many threads at once.

    None where there is none, as behind those that are written in Python.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()  # whatever tokenizer.json says
        backend.no_padding()
        backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a checkpoint directory, as transformers has it.

    Raises:
        DataError: the directory holds none that can be loaded.
    """
    if not path.is_dir():
        raise DataError(f"{path} is not a directory; set `model.path` to a Hugging Face checkpoint on disk")
    try:
        return _tokenizer_class(path).from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:  # what transformers raises for missing and for unreadable files
        why = " ".join(str(error).split())
        raise DataError(f"{path} holds no tokenizer that can be loaded ({why}); copy tokenizer.json to it") from error


def _tokenizer_class(path: Path) -> Any:
    """tokenizer.json says everything; what reads it alone loads in a quarter of the time, and without torch."""
    if (path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _eos_token_ids(path: Path, tokenizer: Any) -> tuple[int, ...]:
    """Every end-of-turn token, in order, once; each source may hold one id, a list of them, or nothing."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if (path / name).is_file():
            found += _as_list(json.loads((path / name).read_bytes()).get("eos_token_id"))
    found += _as_list(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(found))


def _as_list(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
