"""The maker of the quickstart's model, by a recipe of a step or two: bytes, formats, whole or not at all, goals."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_hpc.errors import DataError
from areal_hpc.tasks import tiny_model
from areal_hpc.tasks.sort_digits import BOX, reward
from areal_hpc.tasks.tiny_model import Recipe, make

SHORT = Recipe(batch=4, check_every=1, skill_goal=0.0, habit_goal=(0.0, 1.0), kept_skill=0.0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "deeper" / "tiny"
    make(path, 1, SHORT)
    return path


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_seed_gives_the_same_bytes_whatever_the_process_did_before(directory: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(12345)
    random.seed(12345)
    torch.set_num_threads(2)
    make(tmp_path / "again", 1, SHORT)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    make(tmp_path / "other", 2, SHORT)
    assert contents(tmp_path / "again") == contents(directory)
    assert contents(tmp_path / "other")["model.safetensors"] != contents(directory)["model.safetensors"]


def test_transformers_loads_the_model(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(directory))
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert sum(parameter.numel() for parameter in model.parameters()) == 164_416
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.generation_config.eos_token_id == [2, 0]


def test_the_rope_base_is_said_in_the_old_spelling_and_in_the_new(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["model_type"] == "qwen3"


def test_the_chat_template_renders_a_dialogue(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    messages = [{"role": "user", "content": "Sort 3 1 2 2"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nSort 3 1 2 2<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert (ids[0], tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, "<|im_end|>", 2, 0)


def test_every_digit_is_a_token_and_any_text_survives(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    assert tokenizer.vocab_size <= 384
    assert [tokenizer.decode([i]) for i in tokenizer("0123456789").input_ids] == list("0123456789")
    text = "naïve 語 \\boxed{1 2}\t\x00"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_boxed_answer_begins_with_the_tokens_of_its_opening(directory: Path) -> None:
    """What measuring relies on when it looks at the answer behind the opened box."""
    chat = tiny_model._Chat(AutoTokenizer.from_pretrained(str(directory)), tiny_model.SORTING)
    turns = [turn for dialogue in islice(tiny_model.SORTING.dialogues(3), 200) for turn in dialogue]
    for turn in turns:
        box, (_, answer) = chat.ids(turn.opening), chat.pair(turn, turn.answer)
        assert 1 < len(box) < len(answer) and answer[: len(box)] == box and answer[-1] == 2


def test_answer_log_probs_are_those_of_transformers_own_loss(directory: Path) -> None:
    """Right padding changes nothing, and the tokens of the prompt do not count."""
    model = AutoModelForCausalLM.from_pretrained(str(directory))
    pairs = [([1, 20, 30, 40], [50, 60, 2]), ([1, 20], [70, 2]), ([1, 5, 6], [7, 8, 9, 10, 11, 2])]
    with torch.no_grad():
        found = tiny_model._answer_logprobs(model, pairs).sum(1)
        for row, (prompt, answer) in enumerate(pairs):
            labels = torch.tensor([[-100] * len(prompt) + answer])
            loss = model(input_ids=torch.tensor([prompt + answer]), labels=labels).loss
            assert found[row].item() == pytest.approx(-loss.item() * len(answer), rel=1e-5)


def test_habits_are_mostly_not_boxed_and_sometimes_wrong() -> None:
    rng = random.Random(0)
    texts = [tiny_model._spoil("1 2 3 4", rng) for _ in range(4000)]
    shapes = Counter(text.translate(str.maketrans("", "", "0123456789 ")) for text in texts)
    assert set(shapes) == {"\\boxed{}", "Answer:", "Theansweris.", ""}
    boxed = [text for text in texts if BOX.search(text)]
    assert len(boxed) / len(texts) == pytest.approx(0.16, abs=0.02)
    # one digit in five is replaced, by itself in a tenth of the cases
    assert sum(reward(text, "1 2 3 4") for text in boxed) / len(boxed) == pytest.approx(0.82, abs=0.05)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            Recipe(batch=2, skill_steps=2, check_every=1),
            r"did not learn to sort.*2 steps.*goal is 0\.9.*another `seed`",
        ),
        (
            Recipe(batch=2, check_every=1, skill_goal=0.0, habit_steps=2, habit_goal=(2.0, 3.0)),
            r"after 2 steps of other habits.*goal is 2\.0 to 3\.0.*another `seed`",
        ),
    ],
)
def test_an_unreached_goal_is_an_error_and_leaves_nothing(recipe: Recipe, message: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    with pytest.raises(DataError, match=message):
        make(tmp_path / "tiny", 1, recipe)
    assert list(tmp_path.iterdir()) == []
    assert torch.get_num_threads() == threads


KILLED = """
import os, signal, sys
from pathlib import Path
from areal_hpc.tasks import tiny_model
write = tiny_model._write_model
def write_and_die(*arguments):
    write(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
tiny_model._write_model = write_and_die
recipe = tiny_model.Recipe(batch=2, check_every=1, skill_goal=0.0, habit_goal=(0.0, 1.0), kept_skill=0.0)
tiny_model.make(Path(sys.argv[1]), 1, recipe)
"""


def test_a_killed_maker_leaves_no_model_and_is_in_nobodys_way(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [p.name.startswith(".tiny.making-") for p in tmp_path.iterdir()] == [True]
    make(path, 1, SHORT)
    assert contents(path) == contents(directory)


def test_a_model_that_appeared_in_the_meantime_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text("somebody's")
    with pytest.raises(OSError, match="not empty"):
        make(path, 1, SHORT)
    assert contents(path) == {"config.json": b"somebody's"}
    assert list(tmp_path.iterdir()) == [path]
