"""Prompts: four forms of data set, and a stream whose every position is consumed exactly once."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.config.schema import PromptsConfig
from areal_hpc.errors import ConfigError, DataError
from areal_hpc.prompts import (
    Dataset,
    PromptStream,
    check_identity,
    check_rows,
    first_prompts,
    open_dataset,
    prompt_of,
    stream_identity,
)
from areal_hpc.watermark import Watermark

ROWS = [{"prompt": f"{n} + {n} = ?", "answer": 2 * n, "level": n % 3} for n in range(5)]


class Doubles(Sequence[Mapping[str, Any]]):
    """A procedural task, as a user would write one."""

    def __init__(self, *, split: str, seed: int, size: int = 4) -> None:
        self.start = 1000 * (split == "eval") + seed
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: Any) -> Any:
        return {"prompt": f"double {self.start + row}", "answer": 2 * (self.start + row)}


class Countless:
    def __init__(self, *, split: str, seed: int) -> None: ...


TASK = f"{__name__}:Doubles"


def write_json(path: Path, rows: Sequence[Any]) -> Path:
    path.write_bytes(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
    return path


def write_form(form: str, directory: Path, rows: list[dict[str, Any]]) -> str:
    if form == "jsonl":
        return str(write_json(directory / "rows.jsonl", rows))
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), directory / "rows.parquet", row_group_size=2)
        return str(directory / "rows.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(directory / "rows"), num_shards=min(2, len(rows)))
    return str(directory / "rows")


def config_of(train: str | Path, **options: Any) -> PromptsConfig:
    return PromptsConfig(train=str(train), **options)


def stream_of(
    dataset: Dataset, config: PromptsConfig, consumed: Watermark | None = None, **options: int
) -> PromptStream:
    return PromptStream(dataset, config, consumed=consumed, **{"seed": 1} | options)


def refused(config: PromptsConfig) -> str:
    with pytest.raises(DataError) as caught:
        open_dataset(config, "train", 1)
    return str(caught.value)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "directory"])
def test_every_form_of_file_gives_the_same_prompts(tmp_path: Path, form: str) -> None:
    name = write_form(form, tmp_path, ROWS)
    config = config_of(name)
    prompts = first_prompts(open_dataset(config, "train", 1), config, 100)
    assert [p.messages for p in prompts] == [({"role": "user", "content": r["prompt"]},) for r in ROWS]
    assert [p.answer for p in prompts] == [r["answer"] for r in ROWS]
    assert [p.metadata for p in prompts] == [{"level": r["level"]} for r in ROWS]
    assert [p.id for p in prompts] == [f"{name}/{row}" for row in range(5)]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "directory"])
def test_a_fingerprint_follows_the_content(tmp_path: Path, form: str) -> None:
    prints = []
    for number, rows in enumerate([ROWS, ROWS, [*ROWS[:4], ROWS[4] | {"answer": 9}]]):
        directory = tmp_path / str(number)
        directory.mkdir()
        prints.append(open_dataset(config_of(write_form(form, directory, rows)), "train", 1).fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_a_task_is_a_sequence_made_from_split_seed_and_arguments() -> None:
    config = config_of(TASK, eval=TASK, task_args={"size": 3})
    train, evaluation = open_dataset(config, "train", 7), open_dataset(config, "eval", 7)
    assert [p.answer for p in first_prompts(train, config, 2)] == [14, 16]
    assert [p.answer for p in first_prompts(evaluation, config, 10)] == [2014, 2016, 2018]
    assert train.fingerprint == open_dataset(config, "train", 7).fingerprint
    others = [open_dataset(config, "train", 8), evaluation, open_dataset(config_of(TASK), "train", 7)]
    assert train.fingerprint not in [other.fingerprint for other in others]


def test_E21_ids_tell_data_sets_and_splits_apart(tmp_path: Path) -> None:
    names = [write_json(tmp_path / f"{name}.jsonl", ROWS) for name in ("gsm8k", "math")]
    config = config_of(TASK, eval=TASK)
    opened = [open_dataset(config_of(name), "train", 1) for name in names]
    opened += [open_dataset(config, "train", 1), open_dataset(config, "eval", 1)]
    ids = [p.id for dataset in opened for p in first_prompts(dataset, config, 4)]
    assert len(ids) == len(set(ids)) == 16


@pytest.mark.parametrize("inside", ["\x85", "\u2028", "\u2029", "\x0b", "\x0c", "\r"])
def test_B11_only_a_newline_ends_a_row(tmp_path: Path, inside: str) -> None:
    path = tmp_path / "rows.jsonl"
    line = json.dumps({"prompt": f"a{inside}b", "answer": inside}, ensure_ascii=False)
    path.write_bytes(line.encode() + b"\r\n\n  \n" + line.encode())
    config = config_of(path)
    prompts = first_prompts(open_dataset(config, "train", 1), config, 10)
    assert [p.messages[0]["content"] for p in prompts] == [f"a{inside}b"] * 2


@pytest.mark.parametrize("form", ["jsonl", "parquet", "directory"])
def test_E20_a_chat_history_keeps_its_messages(tmp_path: Path, form: str) -> None:
    """Columnar files give each message the keys of all the others, as null; a chat template must not see them."""
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4", "name": "solver"},
        {"role": "user", "content": "And squared?"},
    ]
    config = config_of(write_form(form, tmp_path, [{"prompt": chat, "answer": "16"}]), system="not for chats")
    (prompt,) = first_prompts(open_dataset(config, "train", 1), config, 1)
    assert list(prompt.messages) == chat


def test_a_tool_call_without_content_is_a_message(tmp_path: Path) -> None:
    chat = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "x"}]
    config = config_of(write_json(tmp_path / "a.jsonl", [{"prompt": chat, "answer": None}]))
    (prompt,) = first_prompts(open_dataset(config, "train", 1), config, 1)
    assert list(prompt.messages) == chat


def test_a_system_message_goes_before_a_plain_text(tmp_path: Path) -> None:
    config = config_of(write_json(tmp_path / "a.jsonl", ROWS), system="Be brief.")
    (prompt,) = first_prompts(open_dataset(config, "train", 1), config, 1)
    assert prompt.messages[0] == {"role": "system", "content": "Be brief."}
    assert prompt.messages[1] == {"role": "user", "content": "0 + 0 = ?"}


def test_a_file_as_editors_on_windows_write_it_is_read(tmp_path: Path) -> None:
    """RFC 8259, section 8.1: a byte order mark may be ignored."""
    row = b'{"prompt": "a", "answer": 1}\r\n'
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + row + row)
    config = config_of(tmp_path / "rows.jsonl")
    dataset = open_dataset(config, "train", 1)
    assert [dataset[number] for number in range(len(dataset))] == [{"prompt": "a", "answer": 1}] * 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "rows.jsonl:2: not JSON"),
        (b"\xff", "rows.jsonl:2: not JSON"),
        (b'"text"', "rows.jsonl:2: a row must be a JSON object, not str"),
        (b"[" * 100_000, "rows.jsonl:2: not JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "a", "answer": 1}\n' + line)
    assert message in refused(config_of(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "a", "answer": 1},
            "row 0: no column 'prompt', there are question, answer; set prompts.prompt_key",
        ),
        (
            {"prompt": "a", "solution": 1},
            "row 0: no column 'answer', there are prompt, solution; set prompts.answer_key",
        ),
        ({"prompt": 3, "answer": 1}, "row 0, column 'prompt': a prompt is a text or a list of messages and not empty"),
        ({"prompt": " ", "answer": 1}, "not ' '"),
        ({"prompt": [], "answer": 1}, "not []"),
        ({"prompt": ["a"], "answer": 1}, "message 0: a message is a mapping with a role, not 'a'"),
        ({"prompt": [{"content": "a"}], "answer": 1}, "message 0: a message is a mapping with a role"),
        ({"prompt": [{"role": "user"}], "answer": 1}, "message 0: content must be a text or a list of parts, not None"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    assert message in refused(config_of(write_json(tmp_path / "rows.jsonl", [row])))


def test_half_of_a_character_is_named(tmp_path: Path) -> None:
    """RFC 8259, section 8.2: JSON can say a lone surrogate, which no UTF-8 can."""
    (tmp_path / "text.jsonl").write_text('{"prompt": "a\\ud83d", "answer": 1}')
    told = refused(config_of(tmp_path / "text.jsonl"))
    assert r"row 0, column 'prompt': \ud83d is half of a character (a surrogate); mend the row" in told
    (tmp_path / "chat.jsonl").write_text('{"prompt": [{"role": "user", "content": "\\udc00"}], "answer": 1}')
    assert r"message 0: \udc00 is half of a character" in refused(config_of(tmp_path / "chat.jsonl"))
    (tmp_path / "pair.jsonl").write_text('{"prompt": "\\ud83d\\ude00", "answer": 1}')
    config = config_of(tmp_path / "pair.jsonl")
    assert prompt_of(open_dataset(config, "train", 1), config, 0, 0).messages[0]["content"] == "\U0001f600"


def test_a_bad_row_is_found_before_the_run(tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": None, "answer": 1}]
    config = config_of(write_json(tmp_path / "a.jsonl", rows))
    dataset = open_dataset(config, "train", 1)
    with pytest.raises(DataError, match="row 5"):
        check_rows(dataset, config)
    check_rows(dataset, config_of(config.train, limit=5))


def test_what_is_no_data_set_says_which_forms_there_are(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer\n")
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 but not really")
    both = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": both, "test": both}).save_to_disk(str(tmp_path / "dict"))
    forms = "a .jsonl or .parquet file, a directory written by `save_to_disk`, or a task module:Class"
    missing = refused(config_of(tmp_path / "no.jsonl"))
    assert re.search(rf"no\.jsonl does not exist \(.*\); set prompts\.train to {re.escape(forms)}", missing)
    assert f"has no form that is known; set prompts.train to {forms}" in refused(config_of(tmp_path / "rows.csv"))
    assert "is empty; check prompts.train" in refused(config_of(tmp_path / "empty.jsonl"))
    assert "cannot be read as Parquet" in refused(config_of(tmp_path / "rows.parquet"))
    assert "was not written by `save_to_disk`" in refused(config_of(tmp_path))
    assert "holds several splits (test, train); name one of them" in refused(config_of(tmp_path / "dict"))
    assert len(open_dataset(config_of(tmp_path / "dict" / "train"), "train", 1)) == 5


def test_a_task_that_cannot_be_made_is_named() -> None:
    assert "there is no module nowhere" in refused(config_of("nowhere.at_all:Task"))
    assert "module json has no Task" in refused(config_of("json:Task"))
    assert "does not take split, seed and prompts.task_args" in refused(config_of(TASK, task_args={"sise": 3}))
    assert "has no length or no rows" in refused(config_of(f"{__name__}:Countless"))
    assert "is empty" in refused(config_of(TASK, task_args={"size": 0}))


def test_a_task_whose_own_import_is_missing_shows_that_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy_task.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        open_dataset(config_of("needy_task:Task"), "train", 1)


def test_a_missing_extra_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = write_form("parquet", tmp_path, ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"a Parquet data set needs the package pyarrow.*areal-hpc\[data\]"):
        open_dataset(config_of(name), "train", 1)


def test_without_shuffle_the_order_is_the_files(tmp_path: Path) -> None:
    config = config_of(write_json(tmp_path / "a.jsonl", ROWS), shuffle=False)
    stream = stream_of(open_dataset(config, "train", 1), config)
    assert [stream.next().answer for _ in range(7)] == [0, 2, 4, 6, 8, 0, 2]


def test_F11_long_and_short_prompts_of_every_kind_stay_in_their_order_and_none_is_left_out(tmp_path: Path) -> None:
    """Nothing filters by length: a prompt that leaves no room for an answer fails by name when its turn comes."""
    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    kinds = ["short", "long " * 20_000, history, history * 3_000]
    rows = [{"prompt": kinds[row % len(kinds)], "answer": row} for row in range(10)]
    config = config_of(write_json(tmp_path / "a.jsonl", rows), shuffle=False)
    stream = stream_of(open_dataset(config, "train", 1), config)
    prompts = [stream.next() for _ in range(20)]
    assert [prompt.answer for prompt in prompts] == [*range(10)] * 2
    assert [len(prompt.messages) for prompt in prompts[:4]] == [1, 1, 3, 9000]


def test_each_data_epoch_holds_every_row_once_in_an_order_of_its_own() -> None:
    config = config_of(TASK, task_args={"size": 50})
    dataset = open_dataset(config, "train", 1)
    stream = stream_of(dataset, config)
    prompts = [stream.next() for _ in range(100)]
    first, second = ([p.id for p in part] for part in (prompts[:50], prompts[50:]))
    assert sorted(first) == sorted(second) == sorted(f"{TASK}/train/{row}" for row in range(50))
    assert first != second
    assert [p.position for p in prompts] == list(range(100))
    other = stream_of(dataset, config, seed=2)
    assert [other.next().id for _ in range(50)] != first


def test_the_order_can_be_computed_without_numpy() -> None:
    """MT19937 seeded by [seed, epoch], Fisher-Yates from the end; CPython's own generator takes the same seed as one
    number. Another order after an upgrade would repeat some prompts of a resumed run and skip others."""
    seed, epoch, size = 7, 2, 10
    twister, expected = random.Random(seed + (epoch << 32)), list(range(size))
    for last in range(size - 1, 0, -1):
        while (chosen := twister.getrandbits(32) & ((1 << last.bit_length()) - 1)) > last:
            pass
        expected[last], expected[chosen] = expected[chosen], expected[last]
    config = config_of(TASK, task_args={"size": size})
    stream = stream_of(open_dataset(config, "train", 1), config, seed=seed)
    rows = [int(stream.at(epoch * size + index).id.rpartition("/")[2]) for index in range(size)]
    assert rows == expected


def test_J5_the_limit_holds_for_every_epoch() -> None:
    config = config_of(TASK, task_args={"size": 9}, limit=4)
    stream = stream_of(open_dataset(config, "train", 1), config)
    counts = Counter(int(stream.next().id.rpartition("/")[2]) for _ in range(12))
    assert counts == dict.fromkeys(range(4), 3)
    unlimited = config_of(TASK, task_args={"size": 9}, limit=100)
    assert stream_identity(open_dataset(unlimited, "train", 1), unlimited, 1)["rows"] == 9


def test_C27_a_resume_inside_the_second_epoch_goes_on_at_the_next_prompt() -> None:
    """1,000 prompts in batches of 128: after 8 updates 1,024 are consumed and the next is number 24 of epoch 2."""
    config = config_of(TASK, task_args={"size": 1000})
    dataset = open_dataset(config, "train", 1)
    whole = stream_of(dataset, config)
    expected = [whole.next() for _ in range(1100)]
    resumed = stream_of(dataset, config, Watermark(1024))
    assert [resumed.next() for _ in range(76)] == expected[1024:]


def test_C26_what_was_in_flight_is_issued_again() -> None:
    """Batches of 2 of 8 prompts: 6 were generated and 2 trained when the run was saved."""
    config = config_of(TASK, task_args={"size": 8}, shuffle=False)
    dataset = open_dataset(config, "train", 1)
    stream_of(dataset, config).next()
    resumed = stream_of(dataset, config, Watermark(0, [1, 4]))
    assert [resumed.next().position for _ in range(7)] == [0, 2, 3, 5, 6, 7, 8]


@settings(max_examples=80)
@given(data=st.data(), size=st.integers(1, 12), limit=st.integers(0, 12), shuffle=st.booleans())
def test_C3_C30_every_position_is_consumed_once_over_any_resharding_and_any_stop(
    data: st.DataObject, size: int, limit: int, shuffle: bool
) -> None:
    """Each attempt has its own number of workers; each worker issues some prompts, of which some are consumed."""
    config = config_of(TASK, task_args={"size": size}, limit=limit, shuffle=shuffle)
    dataset = open_dataset(config, "train", 3)
    whole = stream_of(dataset, config)
    consumed, done = Watermark(), Counter[int]()
    for _ in range(data.draw(st.integers(1, 5), label="attempts")):
        num_shards = data.draw(st.integers(1, 4), label="workers")
        before = consumed.copy()
        for shard in range(num_shards):
            stream = stream_of(dataset, config, before, shard=shard, num_shards=num_shards)
            issued = [stream.next() for _ in range(data.draw(st.integers(0, 10), label="issued"))]
            due = [p for p in range(300) if p % num_shards == shard and p not in before]
            assert [p.position for p in issued] == due[: len(issued)]
            assert issued == [whole.at(p.position) for p in issued]
            for prompt in issued:
                if data.draw(st.booleans(), label="consumed"):
                    assert consumed.add(prompt.position)
                    done[prompt.position] += 1
    last = stream_of(dataset, config, consumed)
    while consumed.low < max([60, *done]):
        position = last.next().position
        assert consumed.add(position)
        done[position] += 1
    assert set(done.values()) == {1}
    assert set(range(60)) <= done.keys()


def test_a_stream_does_not_share_its_callers_set() -> None:
    config = config_of(TASK)
    consumed = Watermark()
    stream = stream_of(open_dataset(config, "train", 1), config, consumed)
    consumed.add(0)
    assert stream.next().position == 0


def test_a_changed_data_set_is_noticed_on_resume(tmp_path: Path) -> None:
    config = config_of(write_json(tmp_path / "a.jsonl", ROWS))
    saved = stream_identity(open_dataset(config, "train", 1), config, 1)
    check_identity(json.loads(json.dumps(saved)), saved)
    shorter = config_of(config.train, limit=3, shuffle=False)
    with pytest.raises(DataError, match=r"rows was 5 and is 3, shuffle was True and is False; restore them"):
        check_identity(saved, stream_identity(open_dataset(shorter, "train", 1), shorter, 1))
    write_json(tmp_path / "a.jsonl", ROWS[::-1])
    with pytest.raises(DataError, match="fingerprint was"):
        check_identity(saved, stream_identity(open_dataset(config, "train", 1), config, 1))
    with pytest.raises(DataError, match="seed was 1 and is 2"):
        check_identity(saved, saved | {"seed": 2})


def test_the_module_loads_without_the_heavy_ones() -> None:
    code = "import sys, areal_hpc.prompts; sys.exit(bool({'torch', 'pyarrow', 'datasets'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
