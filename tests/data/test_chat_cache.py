"""Conversations are tokenized once, into files that are mapped: by processes, resumed, and again
after a change.
"""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from meshtrain.data import chat, chat_tokenizer, index_cache
from meshtrain.errors import ConfigError
from tests.lib import row_files

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")
GOLDEN = Path(__file__).parent / "chat"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"


def put_template(folder, template=TEMPLATE):
    folder.mkdir(exist_ok=True)
    shutil.copy(GOLDEN / "tokenizer.json", folder)
    settings = {"eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write(folder):
    """Writes conversations into three files, one of them compressed, with blank lines."""
    folder.mkdir()
    lines = [
        json.dumps({"prompt": f"count {n}", "completion": " ".join(map(str, range(n % 40 + 1)))})
        for n in range(300)
    ]
    (folder / "a.jsonl").write_text("\n".join(lines[:120]) + "\n\n")
    (folder / "b.json").write_text("\n\n" + "\n".join(lines[120:180]))
    with gzip.open(folder / "c.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(lines[180:]) + "\n")
    return folder


def build(path, folder, **changes):
    settings = dict(path=str(path), tokenizer_path=str(folder), seq_len=64, vocab_size=300)
    settings |= dict(heldout=0.1, seed=0, split="train", packing="best_fit")
    return chat.build(**{**settings, **changes})


def samples(source):
    return [np.asarray(field).tolist() for field in source.read(np.arange(source.size))]


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(chat, "GROUP", 25)
    chat._load.cache_clear()


def test_processes_and_groups_change_no_sample(small_groups, tmp_path, monkeypatch):
    data, folder = write(tmp_path / "in"), put_template(tmp_path / "t")
    found = build(data, folder, num_workers=3, index_path=str(tmp_path / "first"))
    monkeypatch.setattr(chat, "GROUP", 1000)
    expected = build(data, folder, index_path=str(tmp_path / "second"))
    assert samples(found) == samples(expected)
    assert found.identity == expected.identity and found.baseline == expected.baseline


def test_tokens_are_mapped_and_made_once(small_groups, tmp_path, monkeypatch):
    data, folder = write(tmp_path / "in"), put_template(tmp_path / "t")
    first = build(data, folder)
    for array in (*chat.load(str(data), str(folder), vocab_size=300).corpus.file_tokens,):
        while array.base is not None and not isinstance(array, np.memmap):
            array = array.base
        assert isinstance(array, np.memmap)
    made = []
    original = chat_tokenizer.ConversationTokenizer.__call__
    monkeypatch.setattr(
        chat_tokenizer.ConversationTokenizer,
        "__call__",
        lambda self, lines: made.append(1) or original(self, lines),
    )

    def again(folder=folder):
        chat._load.cache_clear()
        return build(data, folder)

    assert samples(again()) == samples(first) and not made
    (tokens,) = data.glob(".meshtrain/chat-*/tokens")
    content = bytearray(tokens.read_bytes())
    content[8] ^= 1
    tokens.write_bytes(content)
    assert samples(again()) == samples(first) and len(made) == 12
    # Another template writes another text.
    put_template(folder, TEMPLATE.replace(": ", "> "))
    assert samples(again()) != samples(first) and len(made) == 24
    # And so do other lines.
    put_template(folder)
    (data / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert again().identity != first.identity


def test_a_killed_process_resumes_after_its_last_commit(small_groups, tmp_path, monkeypatch):
    data, folder = write(tmp_path / "in"), put_template(tmp_path / "t")
    expected = build(data, folder, index_path=str(tmp_path / "first"))
    monkeypatch.setattr(index_cache, "COMMIT_SECONDS", 0.0)
    original = chat_tokenizer.ConversationTokenizer.__call__
    made = []

    def end_at_the_tenth(self, lines):
        made.append(len(lines.arrays[1]))
        if len(made) == 10:
            raise KeyboardInterrupt
        return original(self, lines)

    monkeypatch.setattr(chat_tokenizer.ConversationTokenizer, "__call__", end_at_the_tenth)
    with pytest.raises(KeyboardInterrupt):
        build(data, folder)
    (parts,) = data.glob(".meshtrain/chat-*")
    with open(parts / "tokens.part", "ab") as file:
        file.write(b"torn")
    made.clear()
    found = build(data, folder)  # nine groups are not made again
    assert made == [25] * 3
    assert samples(found) == samples(expected) and found.identity == expected.identity
    assert {file.name for file in parts.iterdir() if "best_fit" not in file.name} == {
        *("index.json", "learned", "lock", "starts.npy", "tokens")
    }


@pytest.mark.parametrize("num_workers", [0, 2])
def test_faulty_lines_are_named_and_after_some_no_more_are_read(
    small_groups, num_workers, tmp_path
):
    data, folder = write(tmp_path / "in"), put_template(tmp_path / "t")
    lines = (data / "a.jsonl").read_text().split("\n")
    for number in (3, 30, 31, 60, 90, 100, 110):
        lines[number - 1] = '{"prompt": 1, "completion": ""}'
    (data / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError) as error:
        build(data, folder, num_workers=num_workers)
    fault = "prompt is int, not a list of messages"
    expected = [f"{data / 'a.jsonl'}:{number}: {fault}" for number in (3, 30, 31, 60, 90)]
    more = "perhaps more: after 5 faulty lines no others are read"
    assert list(error.value.faults) == [*expected, more]
    # Once it is repaired, nothing is left.
    lines = [line.replace("1,", '"1",') if '"prompt": 1' in line else line for line in lines]
    (data / "a.jsonl").write_text("\n".join(lines))
    assert ": 270 conversations, " in build(data, folder, num_workers=num_workers).description


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow", "a.array_record"])
def test_rows_of_a_table_are_conversations(name, small_groups, tmp_path, monkeypatch):
    folder = put_template(tmp_path / "t")
    messages = []
    for number in range(120):
        one = [{"role": "user", "content": f"count {number}"}]
        one.append({"role": "assistant", "content": "so " * (number % 9), "weight": number % 2})
        one.append({"role": "assistant", "content": "done"})
        messages.append(one)
    (tmp_path / "lines.jsonl").write_text(
        "\n".join(json.dumps({"messages": one}) for one in messages)
    )
    expected = build(tmp_path / "lines.jsonl", folder)
    table = {"messages": messages}
    if not name.endswith("record"):
        table |= {"prompt": ["not read"] * 120, "id": [*range(120)]}
    path = row_files.write(tmp_path / "in", name, table)
    found = build(path, folder, num_workers=1)
    assert samples(found) == samples(expected) and found.identity == expected.identity
    # A measurement that is killed resumes at a row.
    monkeypatch.setattr(index_cache, "COMMIT_SECONDS", 0.0)
    chat._load.cache_clear()
    original = chat_tokenizer.ConversationTokenizer.__call__
    made = []

    def end_at_the_third(self, lines):
        made.append(len(lines.arrays[1]))
        if len(made) == 3:
            raise KeyboardInterrupt
        return original(self, lines)

    monkeypatch.setattr(chat_tokenizer.ConversationTokenizer, "__call__", end_at_the_third)
    again = dict(index_path=str(tmp_path / "again"))
    with pytest.raises(KeyboardInterrupt):
        build(path, folder, **again)
    assert samples(build(path, folder, **again)) == samples(expected)
    assert made == [25] * 5 + [20]


def test_prompts_and_completions_may_be_columns(tmp_path):
    folder = put_template(tmp_path / "t")
    table = {"prompt": [f"count {n}" for n in range(50)], "completion": ["done"] * 50}
    lines = [
        json.dumps(dict(zip(table, row, strict=True))) for row in zip(*table.values(), strict=True)
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    path = row_files.write(tmp_path / "in", "a.parquet", table)
    assert samples(build(path, folder)) == samples(build(tmp_path / "lines.jsonl", folder))
    bad = row_files.write(tmp_path, "bad.parquet", {**table, "prompt": [*["a"] * 48, None, "b"]})
    with pytest.raises(ConfigError, match="bad.parquet:49: has neither `messages` nor `prompt`"):
        build(bad, folder)
    other = row_files.write(tmp_path, "other.parquet", {"text": ["a"]})
    with pytest.raises(ConfigError, match="other.parquet: has no column messages, nor prompt and"):
        build(other, folder)


def test_a_vocabulary_that_is_too_small_is_reported_before_anything_is_tokenized(tmp_path):
    data, folder = write(tmp_path / "in"), put_template(tmp_path / "t")
    with pytest.raises(ConfigError, match="set model.vocab_size=300"):
        build(data, folder, vocab_size=200)
    assert not [*data.glob(".meshtrain/*/*.part")] and not [*data.glob(".meshtrain/*/tokens")]


def test_the_splits_of_a_cache_are_not_mixed(small_groups, tmp_path):
    folder = put_template(tmp_path / "t")
    for name in ("train", "test"):
        table = {"prompt": [f"count in {name}"] * 40, "completion": ["1 2 3"] * 40}
        row_files.write(tmp_path / "in", f"json-{name}-00000-of-00001.arrow", table)
    (tmp_path / "in" / "dataset_info.json").write_text('{"splits": {"train": {}, "test": {}}}')
    with pytest.raises(ConfigError) as error:
        build(tmp_path / "in", folder)
    (line,) = error.value.faults
    assert "has the splits test, train; set data.path to one: " in line
    assert ": 36 conversations, " in build(line.split(", ")[-1], folder).description


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow"])
def test_a_table_without_conversations_is_named_before_any_is_read(
    name, small_groups, tmp_path, monkeypatch
):
    folder = put_template(tmp_path / "t")
    write(tmp_path / "in")
    path = row_files.write(tmp_path / "in", f"z-{name}", {"chat": ["a"] * 60, "prompt": ["b"] * 60})
    monkeypatch.setattr(chat, "_groups", lambda *arguments: pytest.fail("a line is read"))
    with pytest.raises(ConfigError) as error:
        build(tmp_path / "in", folder)
    fault = (
        "has no column messages, nor prompt and completion, nor conversations, nor instruction and "
        "output; rename its columns, or leave it out"
    )
    assert list(error.value.faults) == [f"{path}: {fault}: chat, prompt"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_after_some_faulty_lines_the_rest_is_not_read(
    num_workers, small_groups, tmp_path, monkeypatch
):
    folder = put_template(tmp_path / "t")
    (tmp_path / "a.jsonl").write_text('{"prompt": 1, "completion": ""}\n' * 1000)
    read = []
    original = chat._position
    monkeypatch.setattr(chat, "_position", lambda record: read.append(1) or original(record))
    with pytest.raises(ConfigError) as error:
        build(tmp_path / "a.jsonl", folder, num_workers=num_workers)
    assert len(error.value.faults) == 6 and len(read) <= 4 * chat.GROUP
