"""Rendering with real tokenizers made on the spot; transformers itself is the reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from areal_hpc.dialogue.renderer import KNOWN_TEXTS, ChatRenderer
from areal_hpc.errors import DataError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the user begins') }}{% endif %}" + CHATML
ACCENTED = "«Größe»" + CHATML
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = [
    {"role": "system", "content": "Sé breve."},
    {"role": "user", "content": "What  is 2 + 3 ? 🙂"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "今日 , ok"},
]


def make_model(
    path: Path, *, template: str | None = CHATML, config: Any = None, generation_config: Any = None, cut: bool = False
) -> str:
    """A checkpoint directory with a byte-level tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if cut:
        backend.enable_truncation(max_length=4)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>", model_max_length=4 if cut else 10**6
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS[:2]})
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    for name, content in (("config.json", config), ("generation_config.json", generation_config)):
        if content is not None:
            (path / name).write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def test_rendering_is_the_templates_text_tokenised_once(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    reference = AutoTokenizer.from_pretrained(path)
    text = reference.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    renderer = ChatRenderer(path)
    assert renderer.render(CHAT) == tuple(reference(text, add_special_tokens=False).input_ids)
    assert all(type(token) is int for token in renderer.render(CHAT))


@pytest.mark.parametrize("text", ["don ' t , no . \n\n  Yes ?", " leading", "今日 🙂 ď", "", "a<b"])
def test_decoding_is_exact_and_skips_special_tokens(tmp_path: Path, text: str) -> None:
    path = make_model(tmp_path)
    reference, renderer = AutoTokenizer.from_pretrained(path), ChatRenderer(path)
    ids = reference(text, add_special_tokens=False).input_ids
    assert renderer.decode(ids) == text
    assert renderer.decode([*ids, reference.eos_token_id]) == text


def test_F7_nothing_is_cut_whatever_the_tokenizer_file_says(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "word " * 500}]
    (tmp_path / "cut").mkdir()
    (tmp_path / "whole").mkdir()
    cut, whole = make_model(tmp_path / "cut", cut=True), make_model(tmp_path / "whole")
    assert json.loads((tmp_path / "cut" / "tokenizer.json").read_bytes())["truncation"]["max_length"] == 4
    assert ChatRenderer(cut).render(long) == ChatRenderer(whole).render(long)
    assert len(ChatRenderer(cut).render(long)) > 2500


def test_F8_many_threads_share_a_renderer(tmp_path: Path) -> None:
    renderer = ChatRenderer(make_model(tmp_path))
    chats = [[{"role": "user", "content": f"{n} " * (n + 1)}] for n in range(64)]
    wanted = [renderer.render(chat) for chat in chats]
    with ThreadPoolExecutor(32) as threads:
        assert list(threads.map(renderer.render, chats * 4)) == wanted * 4
        decoded = list(threads.map(renderer.decode, wanted * 4))
    assert decoded == [renderer.decode(ids) for ids in wanted] * 4


@pytest.mark.parametrize(
    ("config", "generation_config", "wanted"),
    [
        (None, None, (256,)),
        ({"eos_token_id": 7}, None, (7, 256)),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": [9, 7]}, (9, 7, 8, 256)),
        ({"eos_token_id": None}, {"eos_token_id": 256}, (256,)),
        ({}, {}, (256,)),
    ],
)
def test_G12_end_of_turn_tokens_come_as_a_number_a_list_or_not_at_all(
    tmp_path: Path, config: Any, generation_config: Any, wanted: tuple[int, ...]
) -> None:
    path = make_model(tmp_path, config=config, generation_config=generation_config)
    assert AutoTokenizer.from_pretrained(path).eos_token_id == 256  # after the 256 bytes
    assert ChatRenderer(path).eos_token_ids == wanted


def test_G14_ids_are_those_that_transformers_gives_as_a_mapping_or_a_list(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    reference, rendered = AutoTokenizer.from_pretrained(path), ChatRenderer(path).render(CHAT)
    mapping = reference.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)
    assert rendered == tuple(mapping["input_ids"])
    assert rendered == tuple(reference.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False))


def test_G11_a_prompt_may_contain_the_padding_token(tmp_path: Path) -> None:
    renderer = ChatRenderer(make_model(tmp_path))
    ids = renderer.render([{"role": "user", "content": "<|im_end|>x<|im_end|>"}])
    assert ids.count(renderer.eos_token_ids[0]) == 3


def test_the_tokenizer_file_alone_renders_as_the_automatic_class_does(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    reference = AutoTokenizer.from_pretrained(path)
    rendered = ChatRenderer(path).render(CHAT)
    assert rendered == tuple(reference.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"])
    assert ChatRenderer(path).decode(rendered) == reference.decode(list(rendered), skip_special_tokens=True)


def test_a_renderer_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from areal_hpc.dialogue.renderer import ChatRenderer\n"
        "ChatRenderer(sys.argv[1]).render([{'role': 'user', 'content': 'hi'}]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, make_model(tmp_path)], check=False).returncode == 0


def test_J14_templates_are_utf8_in_any_locale(tmp_path: Path) -> None:
    path = make_model(tmp_path, template=ACCENTED)
    assert "«Größe»" in (tmp_path / "chat_template.jinja").read_text(encoding="utf-8")
    code = (
        "import sys; from areal_hpc.dialogue.renderer import ChatRenderer\n"
        "print(*ChatRenderer(sys.argv[1]).render([{'role': 'user', 'content': 'hi'}]))"
    )
    plain = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, path], env={**os.environ, **plain}, capture_output=True, check=True, text=True
    )
    wanted = ChatRenderer(path).render([{"role": "user", "content": "hi"}])
    assert tuple(int(token) for token in done.stdout.split()) == wanted


def test_a_refused_conversation_names_its_roles(tmp_path: Path) -> None:
    renderer = ChatRenderer(make_model(tmp_path, template=STRICT))
    with pytest.raises(DataError, match=r"\['system'\].*the user begins"):
        renderer.render([{"role": "system", "content": "x"}])


def test_what_cannot_render_says_so_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere is not a directory.*model\.path"):
        ChatRenderer(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no tokenizer.*tokenizer\.json"):
        ChatRenderer(str(tmp_path / "empty"))
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match="no chat template"):
        ChatRenderer(make_model(tmp_path / "bare", template=None))


def test_a_text_that_is_known_has_the_same_ids_and_few_are_kept(tmp_path: Path) -> None:
    renderer = ChatRenderer(make_model(tmp_path))
    texts = [f"text {number}" for number in range(KNOWN_TEXTS + 8)]
    assert [renderer.encode(text) for text in texts] == [renderer.encode(text) for text in texts]
    assert renderer.encode(texts[-1]) is renderer.encode(texts[-1])
    assert renderer._known.cache_info().currsize == KNOWN_TEXTS
