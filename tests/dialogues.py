"""Byte-level tokenizers with chat templates in the manner of several model families, made on the spot.

The templates are short ones of our own that have the habits that matter: how turns end, what wraps results of tools,
what happens to reasoning of past turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_hpc.dialogue.renderer import ChatRenderer

TOOLS_FIRST = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    '<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
)
CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
WRAPPED_RESULTS = (
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
OTHERS = "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}" + CALLS + "<|im_end|>\n{% endif %}"
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HERMES = TOOLS_FIRST + "{% for m in messages %}" + WRAPPED_RESULTS + OTHERS + "{% endfor %}" + HEADER
THINKING = (  # reasoning is shown only after the last user's turn
    TOOLS_FIRST + "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}" + WRAPPED_RESULTS + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}"
    + CALLS
    + "<|im_end|>\n"
    + OTHERS
    + "{% endfor %}"
    + HEADER
)
LLAMA = (
    "<|begin|>{% if tools %}<|head|>system<|/head|>\n\n{% for t in tools %}{{ t | tojson }}{% endfor %}"
    '{"name": ..., "parameters": ...}<|eot|>{% endif %}'
    "{% for m in messages %}<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/head|>\n\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}{"name": "{{ c.function.name }}", '
    '"parameters": {{ c.function.arguments | tojson }}}{% endfor %}<|eot|>{% endfor %}'
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
FORGETFUL = LLAMA.replace("m.tool_calls or []", "[]")  # drops the calls of past turns
GLM = (  # what ends a turn is the next one's header
    "[gMASK]{% if tools %}<|system|>\n{% for t in tools %}{{ t | tojson }}{% endfor %}<arg_key>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "{{ '\n' }}<tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %}{{ '\n' }}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>"
    "{% endfor %}{{ '\n' }}</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
FAMILIES: dict[str, tuple[str, list[str]]] = {
    "hermes": (HERMES, ["<|im_end|>"]),
    "thinking": (THINKING, ["<|im_end|>"]),
    "llama": (LLAMA, ["<|eot|>"]),
    "forgetful": (FORGETFUL, ["<|eot|>"]),
    "glm": (GLM, ["<|user|>", "<|observation|>"]),
    "sentencepiece": (LLAMA, ["<|eot|>"]),  # whose tokens depend on whether a text begins or goes on
}
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)


def _bytes() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece() -> Tokenizer:
    """A space becomes part of the next token, one is put before the text and taken away again; bytes where need be."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "<unk>", "\u2581", *"abcdefghij", "\u2581a", "\u2581b"]
    merges = [("\u2581", "a"), ("\u2581", "b")]
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def make_dialogue(path: Path, family: str) -> ChatRenderer:
    """A renderer of the family; its tokens are bytes and ``SPECIAL``, but for one family."""
    template, ends = FAMILIES[family]
    backend = _sentencepiece() if family == "sentencepiece" else _bytes()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=ends[0], pad_token=ends[0])
    tokenizer.add_special_tokens({"additional_special_tokens": [s for s in SPECIAL if s != ends[0]]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": tokenizer.convert_tokens_to_ids(ends)}), encoding="utf-8"
    )
    return ChatRenderer(str(path))


def said(dialogue: ChatRenderer, text: str, end: int = 0) -> Sequence[int]:
    """The ids of an answer that ends its turn, by the family's end token of that number."""
    return (*dialogue.encode(text), dialogue.eos_token_ids[end])
