"""A tiny chat model made on the spot: a real Hugging Face checkpoint directory that a laptop trains in a minute.

Qwen3 architecture with 164,416 parameters and a byte-pair tokenizer of 384 tokens, taught to sort four digits in two
phases. First *skill*: clean boxed answers, until the answer is right most of the time once ``\\boxed{`` is there. Then
*habits*: four ways to answer, only one of them boxed, some of them wrong, until the boxed answer has become rare. What
is left for reinforcement learning is what it is good at: a skill that is there and a habit that hides it.

Everything is seeded and runs on one thread: the same seed gives the same bytes.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from areal_hpc.tasks.sort_digits import SortDigits, reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

log = logging.getLogger(__name__)

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)  # their ids are 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BOX = "\\boxed{"
STYLES = ("\\boxed{%s}", "Answer: %s", "The answer is %s.", "%s")
WRONG_SHARE = 0.2
CONTEXT = 512
BATCH = 64
PEAK_LR = 4e-3
MAX_STEPS = 500
SKILL_GOAL = 0.9
HABIT_GOAL = 0.2
HABIT_STEPS = 60


def make(path: Path, seed: int) -> None:
    """Write the model directory ``path``: it appears whole, or not at all.

    Raises:
        RuntimeError: the skill or habit goal was not reached (a seed that does not work).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    building = path.with_name(f".{path.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    _write_tokenizer(building, seed)
    model, tokenizer = _new_model(seed), _load_tokenizer(building)
    _teach(model, tokenizer, seed)
    _write_model(model, building)
    building.rename(path)
    torch.set_num_threads(threads)


def _rows(seed: int) -> Iterator[tuple[str, str]]:
    """Endless training pairs (prompt, answer) in a seeded order."""
    task = SortDigits(split="train", seed=seed)
    rng = random.Random(seed)
    while True:
        row = task[rng.randrange(len(task))]
        yield row["prompt"], row["answer"]


def _spoil(answer: str, rng: random.Random) -> str:
    """The answer in a random style, with one digit replaced in some of the cases."""
    digits = answer.split()
    if rng.random() < WRONG_SHARE:
        digits[rng.randrange(len(digits))] = str(rng.randrange(10))
    return rng.choice(STYLES) % " ".join(digits)


def _write_tokenizer(path: Path, seed: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed), trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "chat_template": CHAT_TEMPLATE,
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


def _load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path))
    return tokenizer


def _new_model(seed: int) -> Qwen3ForCausalLM:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=384,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=192,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def _write_model(model: Qwen3ForCausalLM, path: Path) -> None:
    """Save with the RoPE base said in both spellings: readers of either age find it."""
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config |= {"rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    stops = {"bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 0}
    (path / "generation_config.json").write_text(json.dumps(stops), encoding="utf-8")


class _Chat:
    """Prompts and answers as token ids, and batches of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text).input_ids)

    def prompt(self, text: str) -> list[int]:
        message = [{"role": "user", "content": text}]
        return self.ids(str(self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)))

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def _teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    chat, rows, rng = _Chat(tokenizer), _rows(seed + 1), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.01, betas=(0.9, 0.98))

    def learn(lr: float, answer_of: Callable[[str], str]) -> None:
        optimizer.param_groups[0]["lr"] = lr
        batch = [next(rows) for _ in range(BATCH)]
        _sft_step(model, optimizer, [(chat.prompt(p), [*chat.ids(answer_of(a)), 2]) for p, a in batch])

    for step in range(MAX_STEPS):
        learn(PEAK_LR * min(1.0, (step + 1) / 30) * (1 - 0.7 * step / MAX_STEPS), lambda answer: STYLES[0] % answer)
        if step >= 79 and step % 20 == 19:
            skill = _measure(model, chat, BOX, seed)
            log.info(
                "making the model: step %d, right when asked to box: %.2f (goal %.2f)", step + 1, skill, SKILL_GOAL
            )
            if skill >= SKILL_GOAL:
                break
    else:
        raise RuntimeError(f"seed {seed}: the model did not learn to sort in {MAX_STEPS} steps; use another seed")
    for step in range(HABIT_STEPS):
        learn(PEAK_LR / 10, lambda answer: _spoil(answer, rng))
        habit = _measure(model, chat, "", seed)
        if habit <= HABIT_GOAL:
            log.info(
                "making the model: boxed and right by itself: %.2f after %d steps of other habits", habit, step + 1
            )
            return
    raise RuntimeError(f"seed {seed}: boxed answers stayed above {HABIT_GOAL}; use another seed")


def _sft_step(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, pairs: list[tuple[list[int], list[int]]]
) -> None:
    """One step of cross-entropy on the answers of right-padded rows."""
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.zeros(len(pairs), width, dtype=torch.long)
    labels = torch.full((len(pairs), width), -100)
    for row, (prompt, answer) in enumerate(pairs):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    logits = model(input_ids=ids, use_cache=False).logits
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def _measure(model: Qwen3ForCausalLM, chat: _Chat, prefix: str, seed: int, samples: int = 192) -> float:
    """Mean reward at temperature 1 on fixed training prompts, the answer begun by ``prefix``."""
    rows, generator = _rows(seed + 2), torch.Generator().manual_seed(seed)
    pairs = [next(rows) for _ in range(samples)]
    sampled = _sample(
        model,
        [chat.prompt(p) + chat.ids(prefix) for p, _ in pairs] if prefix else [chat.prompt(p) for p, _ in pairs],
        generator,
    )
    texts = [prefix + chat.decode(ids) for ids in sampled]
    return sum(reward(text, answer, None) for text, (_, answer) in zip(texts, pairs, strict=True)) / samples


def _sample(
    model: Qwen3ForCausalLM, prompts: list[list[int]], generator: torch.Generator, max_new: int = 16
) -> list[list[int]]:
    """Plain sampling without a cache: every prompt of the task has the same length, and the model is tiny."""
    ids = torch.tensor(prompts)
    start = ids.shape[1]
    for _ in range(max_new):
        probabilities = torch.softmax(model(input_ids=ids, use_cache=False).logits[:, -1], -1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], 1)
    return [_until_end(row) for row in ids[:, start:].tolist()]


def _until_end(ids: list[int]) -> list[int]:
    ends: list[Any] = [index for index, token in enumerate(ids) if token in (0, 2)]
    return ids[: ends[0]] if ends else ids
