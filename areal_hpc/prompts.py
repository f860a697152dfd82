"""Prompts: data sets in four forms, and the endless, seeded, sharded stream that a run draws from them.

    dataset = open_dataset(config, "train", seed)
    stream = PromptStream(dataset, config, seed=seed, shard=worker, num_shards=workers, consumed=consumed)
    prompt = stream.next()          the next one that this worker has to run
    prompt = stream.at(position)    any one again

A position is a prompt's identity in the whole run: ``position = data_epoch * num_rows + index``. Which row it means
depends on the data and the seed, so the state of a stream is the set of consumed positions alone: a resumed run, with
as many workers as it likes, issues exactly the positions that are not in it, in order. A saved cursor would be less
than that: it skips what was in flight when it was saved.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import os
import re
import typing
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from areal_hpc.config.paths import FROM_HERE, TASK
from areal_hpc.config.schema import PromptsConfig
from areal_hpc.errors import DataError
from areal_hpc.extras import optional
from areal_hpc.types import Message, Prompt
from areal_hpc.watermark import Watermark

if TYPE_CHECKING:
    from numpy.typing import NDArray

Row = Mapping[str, Any]
Split = Literal["train", "eval"]

HALF_A_PAIR = re.compile("[\ud800-\udfff]")
FORMS = "a .jsonl or .parquet file, a directory written by `save_to_disk`, or a task module:Class"


class Dataset(Protocol):
    """Rows by number. ``name`` tells data sets apart in prompt ids; ``fingerprint`` tells contents apart."""

    name: str
    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Row: ...


def open_dataset(config: PromptsConfig, split: Split, seed: int) -> Dataset:
    """The data set that ``prompts.train`` or ``prompts.eval`` names.

    Raises:
        DataError: it is not there, is none of the four forms, is empty, or its rows are not prompts.
        ConfigError: its form needs a package that is not installed.
    """
    name = config.train if split == "train" else config.eval
    dataset = _open(name, config, split, seed)
    if not len(dataset):
        raise DataError(f"data set {name} is empty; check prompts.{split}")
    prompt_of(dataset, config, 0, 0)
    return dataset


def _open(name: str, config: PromptsConfig, split: Split, seed: int) -> Dataset:
    path = Path(name)
    if TASK.fullmatch(name):
        return TaskRows(name, split, seed, config.task_args)
    if not path.exists():
        raise DataError(f"data set {path.absolute()} does not exist ({FROM_HERE}); set prompts.{split} to {FORMS}")
    if path.is_dir():
        return DirectoryRows(path)
    if path.suffix == ".parquet":
        return ParquetRows(path)
    if path.suffix == ".jsonl":
        return JsonRows(path)
    raise DataError(f"data set {name} has no form that is known; set prompts.{split} to {FORMS}")


class JsonRows:
    """A JSON object on each line. Every line is parsed once, when the file is opened; later reads seek."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._file = path.open("rb")
        self._index = array("q")  # offset, length and line number of row 0, then of row 1, ...
        digest, offset = hashlib.blake2b(digest_size=16), 0
        # Iterating over bytes splits on b"\n" alone; str.splitlines would also split inside a text, at U+2028 say.
        for number, line in enumerate(self._file, start=1):
            digest.update(line)
            if line.strip():
                self._parsed(line, number)
                self._index.extend((offset, len(line), number))
            offset += len(line)
        self.fingerprint = digest.hexdigest()

    def _parsed(self, line: bytes, number: int) -> Row:
        try:
            row = json.loads(line.decode("utf-8-sig"))  # with the mark that editors on Windows put in front
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.name}:{number}: not JSON: {error}; mend or remove the line") from error
        if not isinstance(row, dict):
            raise DataError(
                f"{self.name}:{number}: a row must be a JSON object, not {type(row).__name__}; mend the line"
            )
        return row

    def __len__(self) -> int:
        return len(self._index) // 3

    def __getitem__(self, row: int) -> Row:
        offset, length, number = self._index[3 * row : 3 * row + 3]
        return self._parsed(os.pread(self._file.fileno(), length, offset), number)


class ParquetRows:
    """A Parquet file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        parquet, pyarrow = (
            optional(name, extra="data", what="a Parquet data set") for name in ("pyarrow.parquet", "pyarrow")
        )
        self.name = str(path)
        try:
            self._table = parquet.ParquetFile(path, memory_map=True).read()
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"data set {path} cannot be read as Parquet: {error}; write it anew") from error
        self.fingerprint = _digest([path])

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, row: int) -> Row:
        (content,) = self._table.slice(row, 1).to_pylist()
        return typing.cast("Row", content)


class DirectoryRows:
    """One split that Hugging Face `datasets` wrote with `save_to_disk`."""

    def __init__(self, path: Path) -> None:
        datasets = optional("datasets", extra="data", what="a data set directory")
        self.name = str(path)
        if splits := sorted(str(found.parent.relative_to(path)) for found in path.glob("*/state.json")):
            names = ", ".join(splits)
            raise DataError(
                f"data set {path} holds several splits ({names}); name one of them, such as {path / splits[0]}"
            )
        if not (path / "state.json").is_file():
            raise DataError(f"directory {path} was not written by `save_to_disk`; give {FORMS}")
        self._rows = datasets.load_from_disk(str(path))
        self.fingerprint = _digest(sorted(path.glob("*.arrow")))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Row:
        return typing.cast("Row", self._rows[row])


class TaskRows:
    """Rows that a class makes: ``Class(split=..., seed=..., **task_args)`` is a sequence of mappings."""

    def __init__(self, path: str, split: Split, seed: int, arguments: Mapping[str, Any]) -> None:
        self.name = f"{path}/{split}"
        make = _imported(path)
        try:
            inspect.signature(make).bind(split=split, seed=seed, **arguments)
        except TypeError as error:
            raise DataError(
                f"task {path} does not take split, seed and prompts.task_args: {error}; mend either"
            ) from error
        self._rows = make(split=split, seed=seed, **arguments)
        if not (hasattr(self._rows, "__len__") and hasattr(self._rows, "__getitem__")):
            raise DataError(f"task {path} has no length or no rows; give it __len__ and __getitem__")
        ends = [self._rows[row] for row in (0, len(self) - 1)] if len(self) else []
        told = [self.name, seed, arguments, len(self), ends]
        text = json.dumps(told, sort_keys=True, default=lambda value: type(value).__name__)
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Row:
        return typing.cast("Row", self._rows[row])


def _imported(path: str) -> Any:
    name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # the task is there, and what it imports is not
        raise DataError(f"task {path}: there is no module {error.name}; check the name and PYTHONPATH") from error
    if not hasattr(module, attribute):
        raise DataError(f"task {path}: module {name} has no {attribute}; check the name")
    return getattr(module, attribute)


def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def prompt_of(dataset: Dataset, config: PromptsConfig, row: int, position: int) -> Prompt:
    """A row as a prompt. Columns that are neither prompt nor answer become its metadata.

    Raises:
        DataError: a column is missing or is no text and no chat; names the data set, the row and the columns.
    """
    where = f"data set {dataset.name} row {row}"
    content = dataset[row]
    if not isinstance(content, Mapping):
        raise DataError(f"{where}: a row must be a mapping, not {type(content).__name__}; mend the data set")
    for option in ("prompt_key", "answer_key"):
        key = getattr(config, option)
        if key not in content and (key or option == "prompt_key"):
            raise DataError(f"{where}: no column {key!r}, there are {', '.join(content)}; set prompts.{option}")
    return Prompt(
        position=position,
        id=f"{dataset.name}/{row}",
        messages=_messages(content[config.prompt_key], config.system, f"{where}, column {config.prompt_key!r}"),
        answer=content[config.answer_key] if config.answer_key else None,
        metadata={key: value for key, value in content.items() if key not in (config.prompt_key, config.answer_key)},
    )


def _messages(prompt: Any, system: str, where: str) -> tuple[Message, ...]:
    if isinstance(prompt, str) and prompt.strip():
        _require_text(prompt, where)
        before = ({"role": "system", "content": system},) if system else ()
        return (*before, {"role": "user", "content": prompt})
    if isinstance(prompt, list | tuple) and prompt:
        return tuple(_message(message, f"{where}, message {index}") for index, message in enumerate(prompt))
    raise DataError(
        f"{where}: a prompt is a text or a list of messages and not empty, not {prompt!r:.80}; mend the row"
    )


def _message(message: Any, where: str) -> Message:
    """The message without keys that are null: columnar files fill with null what other messages have."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f"{where}: a message is a mapping with a role, not {message!r:.80}; mend the row")
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(content, str | list) and not (content is None and calls):
        raise DataError(f"{where}: content must be a text or a list of parts, not {content!r:.80}; mend the row")
    if isinstance(content, str):
        _require_text(content, where)
    return {"content": content, **{key: value for key, value in message.items() if value is not None}}


def _require_text(content: str, where: str) -> None:
    """JSON can name half of a surrogate pair, which stands for no character: no tokenizer takes it."""
    if found := HALF_A_PAIR.search(content):
        raise DataError(f"{where}: \\u{ord(found[0]):x} is half of a character (a surrogate); mend the row")


def check_rows(dataset: Dataset, config: PromptsConfig) -> None:
    """Make every training prompt once, so that a bad row is found before the run and not in its third week.

    Raises:
        DataError: as ``prompt_of``, for the first bad row.
    """
    for row in range(_num_rows(dataset, config)):
        prompt_of(dataset, config, row, row)


def first_prompts(dataset: Dataset, config: PromptsConfig, num_prompts: int) -> list[Prompt]:
    """The first prompts of a data set, in its order, for evaluation; all if it has fewer."""
    return [prompt_of(dataset, config, row, row) for row in range(min(num_prompts, len(dataset)))]


def _num_rows(dataset: Dataset, config: PromptsConfig) -> int:
    return min(config.limit, len(dataset)) if config.limit else len(dataset)


def stream_identity(dataset: Dataset, config: PromptsConfig, seed: int) -> dict[str, Any]:
    """All that decides which row a position means; kept in a checkpoint beside the consumed positions."""
    rows = _num_rows(dataset, config)
    return {"fingerprint": dataset.fingerprint, "rows": rows, "seed": seed, "shuffle": config.shuffle}


def check_identity(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Nothing if positions still mean what they meant.

    Raises:
        DataError: they do not; names what changed.
    """
    changed = [f"{key} was {saved.get(key)!r} and is {now[key]!r}" for key in now if saved.get(key) != now[key]]
    if changed:
        raise DataError(
            f"the training prompts are not those that this run began with: {', '.join(changed)}; "
            "restore them, or begin a new run under another `name`"
        )


class PromptStream:
    """One shard of the endless stream: positions p with ``p % num_shards == shard``, ascending, without the consumed.

    Shards together issue each position once, however many there are; after a restart, what was issued and not consumed
    is issued again.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: PromptsConfig,
        *,
        seed: int,
        shard: int = 0,
        num_shards: int = 1,
        consumed: Watermark | None = None,
    ) -> None:
        assert 0 <= shard < num_shards, (shard, num_shards)
        self._dataset = dataset
        self._config = config
        self._seed = seed
        self._num_rows = _num_rows(dataset, config)
        self._num_shards = num_shards
        self._consumed = Watermark() if consumed is None else consumed.copy()
        low = self._consumed.low
        self._next = low + (shard - low) % num_shards

    def next(self) -> Prompt:
        """The shard's next prompt that has not been consumed."""
        while self._next in self._consumed:
            self._next += self._num_shards
        position = self._next
        self._next += self._num_shards
        return self.at(position)

    def at(self, position: int) -> Prompt:
        """The prompt at any position of the stream, of this shard or another."""
        epoch, index = divmod(position, self._num_rows)
        row = int(_order(self._num_rows, self._seed, epoch)[index]) if self._config.shuffle else index
        return prompt_of(self._dataset, self._config, row, position)


@functools.lru_cache(maxsize=2)
def _order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of the rows in one data epoch. NumPy promises never to change this generator's stream (NEP 19)."""
    return np.random.RandomState([seed, epoch]).permutation(num_rows)
