"""A tiny chat model made on the spot: a real Hugging Face checkpoint directory that a laptop trains in half a minute.

Qwen3 architecture with 164,416 parameters and a byte-pair tokenizer of 384 tokens, taught a lesson in two phases, by
default to sort four digits. First *skill*: clean boxed answers, until the answer is right nine times in ten. Then
*habits*: four ways to answer, the boxed one the rarest and some of them wrong, until a boxed right answer has become
rare. What is left for reinforcement learning is what it is good at: a skill that is there and a habit that hides it.

Everything is seeded and runs on one thread: the same seed gives the same bytes.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from areal_hpc.errors import DataError
from areal_hpc.fs import fsync_directory, make_durable
from areal_hpc.tasks.lesson import Lesson, Turn
from areal_hpc.tasks.sort_digits import SortDigits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

log = logging.getLogger(__name__)

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)  # their ids are 0, 1, 2
END_OF_TURN = SPECIAL_TOKENS.index(TURN_END)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BOXED = "\\boxed{%s}"
OTHER_STYLES = ("Answer: %s", "The answer is %s.", "%s")
BOXED_SHARE = 0.16
WRONG_SHARE = 0.2
CONTEXT = 512
VOCAB_SIZE = 384
NUM_MEASURED = 128

Pair = tuple[list[int], list[int]]
"""Token ids of a rendered prompt and of an answer with its end of turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the model is taught. Goals are mean probabilities that a whole dialogue is right, over training prompts."""

    batch: int = 64
    """Dialogues a step."""
    skill_goal: float = 0.9
    skill_steps: int = 400
    """Give up past so many steps; nine in ten are right after 110 to 150."""
    skill_lr: float = 4e-3
    warmup_steps: int = 30
    check_every: int = 5
    habit_goal: tuple[float, float] = (0.07, 0.13)
    """Low enough that RL has something to find, high enough that a group of eight often finds it."""
    kept_skill: float = 0.6
    """How often an answer must still be right once the box is open."""
    habit_lr: float = 1e-3
    habit_steps: int = 300


def make(path: Path, seed: int, recipe: Recipe = Recipe(), lesson: Lesson | None = None) -> None:
    """Write the model directory ``path``: it appears whole, or not at all.

    Args:
        lesson: what it is taught instead of sorting.

    Raises:
        DataError: the skill or habit goal was not reached; the message says which and how near it came.
        OSError: ``path`` has appeared in the meantime; it is left as it is.
    """
    lesson = lesson or SORTING
    path.parent.mkdir(parents=True, exist_ok=True)
    with _one_thread(), tempfile.TemporaryDirectory(prefix=f".{path.name}.making-", dir=path.parent) as making:
        directory = Path(making) / path.name
        directory.mkdir()
        _write_tokenizer(directory, lesson, seed)
        model = _new_model(seed)
        teacher = _Teacher(model, _Chat(_load_tokenizer(directory), lesson), seed, recipe)
        teacher.teach_skill()
        teacher.teach_habits()
        _write_model(model, directory)
        make_durable(directory)
        directory.rename(path)
    fsync_directory(path.parent)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums in one fixed order, and one core of a machine that may be busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _rows(seed: int) -> Iterator[tuple[str, str]]:
    """Endless training rows in a seeded order: a prompt's text and the sorted digits."""
    task = SortDigits(split="train", seed=seed)
    rng = random.Random(seed)
    while True:
        row = task[rng.randrange(len(task))]
        yield row["prompt"], row["answer"]


def _dialogues(seed: int) -> Iterator[Sequence[Turn]]:
    for prompt, digits in _rows(seed):
        yield [
            Turn(
                messages=({"role": "user", "content": prompt},),
                answer=BOXED % digits,
                opening=BOXED.partition("%s")[0],
                habit=partial(_spoil, digits),
            )
        ]


def _spoil(answer: str, rng: random.Random) -> str:
    """The answer in a random style, with one digit replaced in some of the cases."""
    digits = answer.split()
    if rng.random() < WRONG_SHARE:
        digits[rng.randrange(len(digits))] = str(rng.randrange(10))
    style = BOXED if rng.random() < BOXED_SHARE else rng.choice(OTHER_STYLES)
    return style % " ".join(digits)


def _write_tokenizer(path: Path, lesson: Lesson, seed: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL_TOKENS, *lesson.markers],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lesson.corpus(seed), trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "chat_template": lesson.template,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _corpus(seed: int) -> list[str]:
    rng, rows = random.Random(seed), _rows(seed)
    turns = [
        f"user\n{prompt}\nassistant\n{_spoil(answer, rng)}" for prompt, answer in (next(rows) for _ in range(2000))
    ]
    return [*turns, *["system\nYou are a helpful assistant.", "tool\n"] * 50]


SORTING = Lesson(skill="sort", template=CHAT_TEMPLATE, dialogues=_dialogues, corpus=_corpus)


def _load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path))
    return tokenizer


def _new_model(seed: int) -> Qwen3ForCausalLM:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=192,
        initializer_range=0.1,  # far above the usual 0.02: a model this small then learns twice as fast
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=END_OF_TURN,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def _write_model(model: Qwen3ForCausalLM, path: Path) -> None:
    """Save with the RoPE base said in both spellings: readers of either age find it."""
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config |= {"rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    stops = {"bos_token_id": 0, "eos_token_id": [END_OF_TURN, 0], "pad_token_id": 0}
    (path / "generation_config.json").write_text(json.dumps(stops), encoding="utf-8")


class _Chat:
    """Turns as token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, lesson: Lesson) -> None:
        self.tokenizer, self.lesson = tokenizer, lesson

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text).input_ids)

    def pair(self, turn: Turn, answer: str) -> Pair:
        """What comes before the turn, and an answer to it."""
        messages: list[dict[str, Any]] = [dict(message) for message in turn.messages]
        tools: list[Any] = [dict(tool) for tool in self.lesson.tools]
        rendered = self.tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, tokenize=False
        )
        return self.ids(str(rendered)), [*self.ids(answer), END_OF_TURN]


class _Teacher:
    """Teaches one model. What it trains on, measures with and spoils by are seeded streams of their own."""

    def __init__(self, model: Qwen3ForCausalLM, chat: _Chat, seed: int, recipe: Recipe) -> None:
        self.model, self.chat, self.recipe, self.lesson = model, chat, recipe, chat.lesson
        self.dialogues, self.rng = self.lesson.dialogues(seed + 1), random.Random(seed)
        measured = list(itertools.islice(self.lesson.dialogues(seed + 2), NUM_MEASURED))
        turns = [turn for dialogue in measured for turn in dialogue]
        self.measured = [chat.pair(turn, turn.answer) for turn in turns]
        self.num_turns = len(turns) // len(measured)
        begun = torch.tensor([len(prompt) - 1 for prompt, _ in self.measured])
        openings = torch.tensor([len(chat.ids(turn.opening)) for turn in turns])
        self.opened = (begun + openings)[:, None]  # [N, 1], where the label behind each turn's opening is

    def teach_skill(self) -> None:
        recipe, optimizer, right = self.recipe, self._optimizer(), 0.0
        for step in range(1, recipe.skill_steps + 1):
            rise, fall = step / recipe.warmup_steps, 1 - 0.9 * step / recipe.skill_steps
            self._step(optimizer, recipe.skill_lr * min(rise, fall), lambda turn: turn.answer)
            if step % recipe.check_every == 0:
                right = self._measure()[0]
                log.info("making the model: step %d, right: %.2f (goal %.2f)", step, right, recipe.skill_goal)
                if right >= recipe.skill_goal:
                    return
        raise DataError(
            f"model.maker: the tiny model did not learn to {self.lesson.skill}: right in {right:.2f} of the cases "
            f"after {recipe.skill_steps} steps, the goal is {recipe.skill_goal}; set another `seed`"
        )

    def teach_habits(self) -> None:
        """Other answers until the boxed one is rare; the skill suffers first and must have come back."""
        recipe, optimizer, (right, skill) = self.recipe, self._optimizer(), self._measure()
        for step in range(1, recipe.habit_steps + 1):
            self._step(optimizer, recipe.habit_lr * min(1.0, step / 10), lambda turn: turn.habit(self.rng))
            if step % recipe.check_every == 0:
                right, skill = self._measure()
                log.info("making the model: %d steps of other habits, right: %.2f, skill: %.2f", step, right, skill)
                if recipe.habit_goal[0] <= right <= recipe.habit_goal[1] and skill >= recipe.kept_skill:
                    return
        raise DataError(
            f"model.maker: after {recipe.habit_steps} steps of other habits the tiny model is right in {right:.2f} of "
            f"the cases (the goal is {recipe.habit_goal[0]} to {recipe.habit_goal[1]}), and without its habits in "
            f"{skill:.2f} (the goal is {recipe.kept_skill}); set another `seed`"
        )

    def _measure(self) -> tuple[float, float]:
        """Probability at temperature 1 that a dialogue is right, by itself and once its answers are opened.

        The expectation of the reward, without sampling: means over ``NUM_MEASURED`` training dialogues.
        """
        with torch.no_grad():
            logprobs = _answer_logprobs(self.model, self.measured)
        opened = logprobs * (torch.arange(logprobs.shape[1]) >= self.opened)
        return self._mean_right(logprobs), self._mean_right(opened)

    def _mean_right(self, logprobs: torch.Tensor) -> float:
        return float(logprobs.sum(1).view(-1, self.num_turns).sum(1).exp().mean())

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), weight_decay=0.01, betas=(0.9, 0.98))

    def _step(self, optimizer: torch.optim.Optimizer, lr: float, say: Callable[[Turn], str]) -> None:
        """One step of cross-entropy on the turns of the next dialogues, answered as ``say`` says."""
        dialogues = itertools.islice(self.dialogues, self.recipe.batch)
        pairs = [self.chat.pair(turn, say(turn)) for dialogue in dialogues for turn in dialogue]
        loss = -_answer_logprobs(self.model, pairs).sum() / sum(len(answer) for _, answer in pairs)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()


def _answer_logprobs(model: Qwen3ForCausalLM, pairs: Sequence[Pair]) -> torch.Tensor:
    """Log-probabilities float32 [N, W - 1] of right-padded rows: of token t + 1 at t, 0 where that is no answer's."""
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.zeros(len(pairs), width, dtype=torch.long)
    labels = torch.full((len(pairs), width), -100)
    for row, (prompt, answer) in enumerate(pairs):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    logits = model(input_ids=ids, use_cache=False).logits
    losses = functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none"
    )
    return -losses
