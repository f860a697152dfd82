"""Text while tokens arrive: characters spread over tokens, stop strings spread over tokens."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tokenizer

from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.dialogue.text import IncrementalText, Text, first_stop, load_text, whole_text, without_partial_stop
from areal_hpc.generation.served.request import SamplingParams
from areal_hpc.generation.served.text import final_text
from areal_hpc.proxy.chronicle import pieces

TOKENIZER = make_tokenizer()
TEXT = Text(TOKENIZER)


def byte_ids(raw: bytes) -> list[int]:
    """Token ids of single bytes, also of bytes that are no character, by GPT-2's map from bytes to printable signs."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    signs = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    ids: list[int] = TOKENIZER.convert_tokens_to_ids([signs[byte] for byte in raw])
    return ids


@pytest.mark.parametrize("text", ["ď", "今日", "🙂", "a🙂b今ďc", "👩‍👩‍👧"])
def test_H15_every_split_of_a_character_is_held_back_until_it_is_whole(text: str) -> None:
    token_ids = TEXT.encode(text)
    assert len(token_ids) == len(text.encode())
    for cut in range(len(token_ids) + 1):
        stream = IncrementalText(TEXT.decode)
        shown = stream.extend(token_ids[:cut])
        assert text.startswith(shown) and "\ufffd" not in shown
        assert stream.extend(token_ids[cut:]) == text


@given(st.binary(max_size=40) | st.text(max_size=12).map(str.encode), st.data())
@settings(max_examples=150)
def test_H15_each_text_begins_the_next_and_the_whole(raw: bytes, data: st.DataObject) -> None:
    token_ids = byte_ids(raw)
    stream, shown, at = IncrementalText(TEXT.decode), "", 0
    while at < len(token_ids):
        step = data.draw(st.integers(1, 5))
        now = stream.extend(token_ids[at : at + step])
        assert now.startswith(shown)
        shown, at = now, at + step
    whole = raw.decode(errors="replace")
    assert TEXT.decode(token_ids) == whole
    assert whole.startswith(shown) and not whole[len(shown) :].strip("\ufffd")


def test_H15_a_byte_that_is_never_valid_is_shown_once_something_follows() -> None:
    stream = IncrementalText(TEXT.decode)
    lonely = byte_ids(b"\xf0")
    assert stream.extend(lonely) == ""
    assert stream.extend(TEXT.encode("a")) == "\ufffda"


@given(st.lists(st.sampled_from(["é", "🙂", "\n", "a", b"\xff", b"\xe4\xbd", b"\xf0"]), max_size=8), st.data())
@settings(max_examples=150)
def test_nothing_is_taken_back_where_tokens_fall_back_on_bytes(
    dialogues: dict[str, ChatRenderer], pieces: list[str | bytes], data: st.DataObject
) -> None:
    """Such a tokenizer shows a run of bytes as nothing but replacement characters if one of them is wrong."""
    spelled = dialogues["sentencepiece"].spelled
    ids = [byte for piece in pieces for byte in (piece if isinstance(piece, bytes) else piece.encode())]
    assert spelled(list("é\n".encode())) == "é\n" and spelled([*"é\n".encode(), 255]) == "\ufffd" * 4
    whole, stream, shown, at = whole_text(ids, spelled), IncrementalText(spelled), "", 0
    while at < len(ids):
        step = data.draw(st.integers(1, 5))
        now = stream.extend(ids[at : at + step])
        assert now.startswith(shown)
        shown, at = now, at + step
    assert whole.startswith(shown) and not whole[len(shown) :].strip("\ufffd") and stream.whole == whole
    if all(isinstance(piece, str) for piece in pieces):
        assert whole == "".join(map(str, pieces))


def test_the_good_bytes_before_a_wrong_one_are_kept(dialogues: dict[str, ChatRenderer]) -> None:
    spelled = dialogues["sentencepiece"].spelled
    cut = [*"\n🙂".encode(), *"🙂".encode()[:2]]
    assert spelled(cut) == "\ufffd" * len(cut)
    assert whole_text(cut, spelled) == "\n🙂\ufffd\ufffd"
    assert "".join(pieces(cut, spelled)) == "\n🙂\ufffd\ufffd"
    text = cast(Text, SimpleNamespace(decode=lambda ids, skip_special_tokens: spelled(ids)))
    params = SamplingParams()
    assert final_text(SimpleNamespace(token_ids=cut, params=params, finish_reason=None), text) == whole_text(
        cut, spelled
    )


def test_stop_strings_are_found_where_they_first_end() -> None:
    assert first_stop("abcd", ["bcd", "ab"], 0) == (0, "ab")
    assert first_stop("abcd", ["abcd", "b"], 0) == (1, "b")  # before the longer one was whole
    assert first_stop("abc", ["c", "bc"], 0) == (1, "bc")
    assert first_stop("one two three", ["two", "three"], 0) == (4, "two")
    assert first_stop("aXb", ["X"], 2) is None  # searched before
    assert first_stop("ab##", ["##"], 3) == (2, "##")  # began before, ends now
    assert first_stop("abc", [], 0) is None


@given(st.text(alphabet="ab", max_size=12), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_what_is_shown_can_never_have_to_be_taken_back(text: str, stops: list[str]) -> None:
    shown = without_partial_stop(text, stops)
    assert text.startswith(shown)
    rest = text[len(shown) :]
    assert rest == "" or any(stop.startswith(rest) and stop != rest for stop in stops)
    for stop in stops:  # no later beginning of a stop string was overlooked
        for length in range(1, len(stop)):
            assert not (text.endswith(stop[:length]) and length > len(rest))


def test_F8_one_tokenizer_serves_32_threads() -> None:
    samples = [f"thread {index} says 今日🙂 " * 20 for index in range(32)]
    failures: list[BaseException] = []

    def work(sample: str) -> None:
        try:
            for _ in range(20):
                assert TEXT.decode(TEXT.encode(sample)) == sample
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=work, args=(sample,)) for sample in samples]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_F7_nothing_is_truncated_whatever_the_tokenizer_says_of_its_length(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 10
    tokenizer.save_pretrained(tmp_path)
    text = load_text(tmp_path)
    assert text is not None
    assert len(text.encode("x" * 50)) == 50


def test_a_directory_without_a_tokenizer_has_no_text(tmp_path: Path) -> None:
    assert load_text(tmp_path) is None
