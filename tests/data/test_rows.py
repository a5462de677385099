"""Training on rows as they lie: samples are those of prepared data, whatever the format."""

import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.data import index_cache, row_tokenizer, rows, tokens
from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.source import Timeline
from meshtrain.errors import ConfigError
from meshtrain.train import train
from tests.lib import row_files
from tests.lib.configs import tiny_config
from tests.lib.paths import ROOT

pyarrow = row_files.pyarrow
pytest.importorskip("array_record", reason="needs the extra rows: array-record")
pytest.importorskip("tokenizers")

SETTINGS = dict(seq_len=64, heldout=0.1, seed=3, vocab_size=512)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Files of the same rows in all formats, and a prepared folder with its tokenizer."""
    folder = tmp_path_factory.mktemp("rows")
    table = {"n": list(range(400)), "text": row_files.texts()}
    for name in row_files.FORMATS:
        row_files.write(folder / "in", name, table)
    source = folder / "in" / "rows.parquet"
    flags = [f"--output={folder / 'prepared'}", "--train_bpe=280", "--num_workers=1"]
    assert app.main("prepare", [str(source), *flags]) == 0
    (folder / "tokenizer").mkdir()
    shutil.copy(folder / "prepared" / "tokenizer.json", folder / "tokenizer")
    return folder


def build(path, made, **changes):
    settings = dict(tokenizer_path=str(made / "tokenizer"), split="train", num_workers=0)
    settings.update(path=str(path), index_path=str(made / "index"), **SETTINGS)
    return rows.build(**{**settings, **changes})


def prepared(made, **changes):
    settings = dict(dtype="", pattern="*.txt", exclude=(), separator=-1, split="train", **SETTINGS)
    return tokens.build(**{"path": str(made / "prepared"), **settings, **changes})


def assert_same_samples(one, other, count):
    assert one.size == other.size
    for a, b in zip(one.read(np.arange(count)), other.read(np.arange(count)), strict=True):
        if a is None:
            assert b is None
            continue
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("packing", "split", "separator"),
    [("windows", "train", -1), ("best_fit", "train", -1), ("windows", "heldout", 40)],
)
@pytest.mark.parametrize("name", row_files.FORMATS)
def test_samples_are_those_of_prepared_data(name, packing, split, separator, made):
    settings = dict(packing=packing, split=split, separator=separator)
    source = build(made / "in" / name, made, **settings)
    assert_same_samples(source, prepared(made, **settings), 2 * source.size + 5)
    assert (
        source.identity["data"] == build(made / "in" / row_files.FORMATS[0], made).identity["data"]
    )
    assert source.identity["tokenizer"] == prepared(made).identity["tokenizer"]
    assert source.token_bytes.tolist() == prepared(made).token_bytes.tolist()


@pytest.mark.parametrize("name", ["rows.parquet", "stream.arrow"])
def test_the_number_of_processes_changes_no_sample_and_no_digest(name, made, tmp_path):
    expected = build(made / "in" / name, made)
    found = build(made / "in" / name, made, num_workers=3, index_path=str(tmp_path))
    assert_same_samples(found, expected, 50)
    assert found.identity == expected.identity and found.baseline == expected.baseline
    index = next(tmp_path.glob("rows-*/index.json"))
    first = next((made / "index").glob(f"{index.parent.name}/index.json"))
    assert json.loads(index.read_text()) == json.loads(first.read_text())


def test_a_sample_depends_on_its_index_alone(made):
    source = build(made / "in" / "stream.arrow", made, packing="best_fit")
    together = source.read(np.arange(40))
    for index in (39, 0, 17):
        rows._load.cache_clear()
        alone = build(made / "in" / "stream.arrow", made, packing="best_fit").read(
            np.array([index])
        )
        for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_array_equal(a[0], b[index])


def test_the_loss_without_context_is_that_of_all_rows(made):
    everything = prepared(made, heldout=0.0)
    assert build(made / "in" / "rows.parquet", made).baseline == pytest.approx(everything.baseline)


def test_many_files_are_in_the_order_of_prepare(made, tmp_path):
    parts = row_files.texts(90, seed=1)
    for number, name in enumerate(["a.parquet", "b.parquet", "c.parquet"]):
        part = parts[30 * number : 30 * number + 30]
        row_files.write(tmp_path / "in", name, {"text": part})
    out = tmp_path / "out"
    tokenizer = f"--tokenizer={made / 'tokenizer'}"
    assert app.main("prepare", [str(tmp_path / "in"), f"--output={out}", tokenizer]) == 0
    settings = dict(dtype="", pattern="*.txt", exclude=(), separator=-1, split="train", **SETTINGS)
    expected = tokens.build(path=str(out), **settings)
    for path in (tmp_path / "in", tmp_path / "in" / "*.parquet"):
        assert_same_samples(build(path, made), expected, 2 * expected.size)
    # The index is next to the data, and hidden from it.
    build(tmp_path / "in", made, index_path="")
    assert [*(tmp_path / "in" / ".meshtrain").glob("rows-*/index.json")]
    assert_same_samples(build(tmp_path / "in", made), expected, 2 * expected.size)


def test_a_template_joins_columns_and_other_columns_are_not_read(made, tmp_path):
    table = {
        "q": [f"question {n}" for n in range(50)],
        "a": [{"text": f"answer {n}", "score": n / 2} for n in range(50)],
        "odd": [[n] for n in range(50)],
    }
    joined = [f"question {n}\nanswer {n} ({n / 2})" for n in range(50)]
    expected = build(row_files.write(tmp_path, "joined.parquet", {"text": joined}), made)
    for name in ("rows.parquet", "stream.arrow", "rows.array_record"):
        path = row_files.write(tmp_path, name, table)
        found = build(path, made, template=r"{q}\n{a.text} ({a.score})")
        assert_same_samples(found, expected, found.size)
    nested = build(tmp_path / "stream.arrow", made, field="a.text")
    only = [f"answer {n}" for n in range(50)]
    plain = build(row_files.write(tmp_path, "plain.parquet", {"text": only}), made)
    assert_same_samples(nested, plain, plain.size)


@pytest.mark.parametrize("name", ["rows.parquet", "stream.arrow"])
def test_a_template_writes_numbers_and_bytes_as_prepare_does(name, made, tmp_path):
    numbers = [n / 10 for n in range(1, 61)]
    singles = pyarrow.array(numbers, pyarrow.float32())
    table = pyarrow.table(
        {
            "f": singles,
            "d": singles.dictionary_encode(),
            "s": pyarrow.StructArray.from_arrays([singles], ["f"]),
            "h": pyarrow.array([np.float16(n) for n in numbers], pyarrow.float16()),
            "m": pyarrow.array([f"{n:.2f}" for n in numbers]).cast(pyarrow.decimal128(10, 2)),
            "b": pyarrow.array([f"é{n}".encode() for n in numbers], pyarrow.binary()),
        }
    )
    path = row_files.write(tmp_path, name, table)
    template = "{f} {d} {s.f} {h} {m} {b}"
    expected = prepare(path, made, tmp_path / "out", template=template)
    assert_same_samples(build(path, made, template=template), expected, expected.size)
    written = [f"{n} {n} {n} {n} {n:.2f} é{n}" for n in numbers]
    plain = build(row_files.write(tmp_path, "plain.parquet", {"text": written}), made)
    assert_same_samples(plain, expected, expected.size)


ODD_TEXTS = {
    "binary": lambda texts: pyarrow.array([text.encode() for text in texts], pyarrow.binary()),
    "dictionary": lambda texts: pyarrow.array(texts).dictionary_encode(),
    "large": lambda texts: pyarrow.array(texts, pyarrow.large_string()),
    "view": lambda texts: pyarrow.array(texts, pyarrow.string_view()),
    "chunked": lambda texts: pyarrow.chunked_array([texts[:7], [], texts[7:]]),
}


@pytest.mark.parametrize("kind", ODD_TEXTS)
@pytest.mark.parametrize("name", ["rows.parquet", "stream.arrow", "file.arrow"])
def test_any_column_of_text_has_the_same_tokens(name, kind, made, tmp_path):
    column = ODD_TEXTS[kind](row_files.texts())
    table = pyarrow.table({"text": column})
    if kind == "view" and name == "rows.parquet":
        pytest.skip("pyarrow does not write views to Parquet")
    path = row_files.write(tmp_path, name, table)
    assert_same_samples(build(path, made), build(made / "in" / name, made), 20)


def test_records_that_are_texts_have_no_fields(made, tmp_path):
    from array_record.python import array_record_module

    path = tmp_path / "texts.array_record-00000-of-00001"
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for text in row_files.texts():
        writer.write(text.encode())
    writer.close()
    expected = build(made / "in" / "rows.array_record", made)
    assert_same_samples(build(path, made), expected, 20)
    with pytest.raises(ConfigError, match="records are no objects in JSON, so they have no fields"):
        build(path, made, template="{text}")


def test_records_of_tensorflow_are_no_texts(made, tmp_path):
    from array_record.python import array_record_module

    path = tmp_path / "a.array_record"
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    writer.write(b"\n\x0e\n\x0c\n\x04text\x12\x04\n\x02\n\x00")
    writer.close()
    with pytest.raises(
        ConfigError, match="its records are tf.train.Example, which need TensorFlow"
    ):
        build(path, made)


def test_a_folder_that_datasets_saved_has_its_files_in_order(made, tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    table = {"text": row_files.texts(), "n": list(range(400))}
    saved = datasets.Dataset.from_dict(table)
    saved.save_to_disk(tmp_path / "one", num_shards=1)
    assert_same_samples(
        build(tmp_path / "one", made), build(made / "in" / "stream.arrow", made), 30
    )
    # Several files follow each other in its order, not in a random one.
    saved.save_to_disk(tmp_path / "parts", num_shards=5)
    assert_same_samples(build(tmp_path / "parts", made), build(tmp_path / "one", made), 30)
    # What it caches next to the data is no data.
    shutil.copy(tmp_path / "one" / "data-00000-of-00001.arrow", tmp_path / "one" / "cache-1.arrow")
    assert build(tmp_path / "one", made).size == build(made / "in" / "stream.arrow", made).size
    split = saved.train_test_split(0.25, seed=0)
    split.save_to_disk(tmp_path / "two")
    with pytest.raises(ConfigError, match=r"has the splits test, train; set data.path to one: "):
        build(tmp_path / "two", made)
    assert build(tmp_path / "two" / "test", made, heldout=0.0).description.count(" 100 rows,") == 1


def prepare(path, made, out, **changes):
    """Returns the samples of a folder that `meshtrain prepare` makes."""
    flags = [f"--{key}={value}" for key, value in changes.items()]
    flags += [f"--output={out}", f"--tokenizer={made / 'tokenizer'}", "--num_workers=1"]
    assert app.main("prepare", [str(path), *flags]) == 0
    settings = dict(dtype="", pattern="*.txt", exclude=(), separator=-1, split="train", **SETTINGS)
    return tokens.build(path=str(out), **settings)


def write_cache(folder):
    """Writes what the cache of `datasets` holds of two splits."""
    for name, seed in [("train", 4), ("test", 5)]:
        row_files.write(folder, f"json-{name}.arrow", {"text": row_files.texts(90, seed=seed)})
    row_files.write(folder, "cache-1.arrow", {"text": ["filtered"] * 90})
    (folder / "dataset_info.json").write_text('{"splits": {"train": {}, "test": {}}}')


def test_the_splits_of_a_cache_are_not_mixed(made, tmp_path):
    write_cache(tmp_path / "in")
    with pytest.raises(ConfigError) as error:
        build(tmp_path / "in", made)
    (line,) = error.value.faults
    named = (
        "has the splits test, train; set data.path to one: {0}/*-test*.arrow, {0}/*-train*.arrow"
    )
    assert line == f"{tmp_path / 'in'}: {named.format(tmp_path / 'in')}"
    expected = prepare(tmp_path / "in", made, tmp_path / "out", split="train")
    assert_same_samples(build(line.split(", ")[-1], made), expected, expected.size)


def test_saved_rows_in_another_order_are_an_error(made, tmp_path):
    path = row_files.write(tmp_path, "data-1.arrow", {"text": row_files.texts(90)})
    state = {"_data_files": [{"filename": path.name}], "_indices_files": [{"filename": "a"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(ConfigError, match="save it again with flatten_indices"):
        build(tmp_path, made)
    state = {"_data_files": [{"filename": "data-2.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"state.json lists 'data-2.arrow', which is missing"):
        build(tmp_path, made)


def test_files_around_saved_datasets_are_in_the_order_of_prepare(made, tmp_path):
    source = tmp_path / "in"
    for number, name in enumerate(["a/1.parquet", "b.parquet", "c/2.ipc", "d.arrow", "e.parquet"]):
        path = source / name
        row_files.write(path.parent, path.name, {"text": row_files.texts(20, seed=number)})
    (source / "empty.arrow").write_bytes(b"")
    for number in range(3):
        folder = source / "b-saved"
        row_files.write(folder, f"{number}.arrow", {"text": row_files.texts(20, seed=9 + number)})
    state = {"_data_files": [{"filename": f"{number}.arrow"} for number in (2, 0, 1)]}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    row_files.write(folder, "cache-1.arrow", {"text": ["filtered"] * 20})
    expected = prepare(source, made, tmp_path / "out")
    assert_same_samples(build(source, made), expected, expected.size)


def test_rows_longer_than_a_sample_are_read_and_their_cost_is_logged(made, tmp_path):
    long = [" ".join(row_files.texts(60, seed=n)) for n in range(8)]
    path = row_files.write(tmp_path, "rows.parquet", {"text": long})
    source = build(path, made)
    (line,) = source.warnings
    starts = rows.load(
        str(path),
        str(made / "tokenizer"),
        rows.TextOf("text"),
        vocab_size=512,
        num_workers=0,
        index_path=str(made / "index"),
    ).corpus.document_starts
    # Counted window by window: what each tokenizes, and what it holds.
    tokenized = 0
    for start in range(0, starts[-1] - 64, 64):
        inside = (starts[:-1] < start + 65) & (starts[1:] > start)
        tokenized += np.diff(starts)[inside].sum()
    assert f": {tokenized / starts[-1]:.0f} times what it needs" in line
    for packing in tokens.PACKINGS:
        assert not build(made / "in" / "rows.parquet", made, seq_len=128, packing=packing).warnings
        long_rows = build(path, made, packing=packing, seq_len=16).warnings
        assert len(long_rows) == 1
    tokenizer = tokenizers.load(made / "tokenizer")
    expected = np.concatenate([np.append(tokenizer.encode(text), tokenizer.eos) for text in long])
    everything = build(path, made, heldout=0.0, seq_len=len(expected) - 1)
    np.testing.assert_array_equal(everything.read(np.arange(1)).tokens[0], expected[:-1])


# ---- the index of lengths ----


def test_the_index_is_computed_once_and_again_after_damage(made, tmp_path, monkeypatch):
    path = row_files.write(tmp_path, "stream.arrow", {"text": row_files.texts(100)})
    measured = []
    original = row_tokenizer.RowTokenizer.measure
    monkeypatch.setattr(
        row_tokenizer.RowTokenizer,
        "measure",
        lambda self, first, last: measured.append(first) or original(self, first, last),
    )

    def identity():
        rows._load.cache_clear()
        return build(path, made, index_path="").identity["data"]

    first = identity()
    assert measured == [0]
    assert identity() == first and measured == [0]
    (starts,) = tmp_path.glob(".meshtrain/rows-*/starts.npy")
    content = bytearray(starts.read_bytes())
    content[-5] ^= 1
    starts.write_bytes(content)
    assert identity() == first and measured == [0, 0]
    (starts.parent / "index.json").write_text("{")
    assert identity() == first and measured == [0, 0, 0]
    # Changed rows have another index.
    row_files.write(tmp_path, "stream.arrow", {"text": row_files.texts(100, seed=9)})
    assert identity() != first and measured == [0] * 4
    # And so has another template, or field.
    rows._load.cache_clear()
    build(path, made, index_path="", template="{text}")
    assert measured == [0] * 5


def test_a_killed_measurement_resumes_after_what_it_has_committed(made, tmp_path, monkeypatch):
    path = row_files.write(tmp_path, "rows.parquet", {"text": row_files.texts()})
    expected = build(made / "in" / "rows.parquet", made).identity["data"]
    monkeypatch.setattr(index_cache, "COMMIT_SECONDS", 0.0)
    original = row_tokenizer.RowTokenizer.measure
    measured = []

    def fail_at_210(self, first, last):
        measured.append(first)
        if first == 210:
            raise KeyboardInterrupt
        return original(self, first, last)

    monkeypatch.setattr(row_tokenizer.RowTokenizer, "measure", fail_at_210)
    rows._load.cache_clear()
    with pytest.raises(KeyboardInterrupt):
        build(path, made, index_path="")
    assert measured == [0, 70, 140, 210]
    (progress,) = tmp_path.glob(".meshtrain/rows-*/progress.json")
    # What follows the last commit is dropped.
    with open(progress.parent / "lengths", "ab") as file:
        file.write(b"torn")
    measured.clear()
    monkeypatch.setattr(
        row_tokenizer.RowTokenizer,
        "measure",
        lambda self, first, last: measured.append(first) or original(self, first, last),
    )
    assert build(path, made, index_path="").identity["data"] == expected
    assert measured == [210, 280, 350]
    assert not progress.exists() and not (progress.parent / "lengths").exists()


def test_a_file_that_changed_since_it_was_measured_is_named(made, tmp_path):
    path = row_files.write(tmp_path, "rows.parquet", {"text": row_files.texts(100)})
    build(path, made, index_path=str(tmp_path / "index"))
    rows._load.cache_clear()
    source = build(path, made, index_path=str(tmp_path / "index"))  # has opened no file for reading
    row_files.write(tmp_path, "rows.parquet", {"text": row_files.texts(100, seed=4)})
    with pytest.raises(
        ConfigError, match=r"rows.parquet:\d+: has \d+ tokens, .* has changed; star"
    ):
        source.read(np.arange(source.size))


def test_processes_measure_once_together(made, tmp_path):
    path = row_files.write(tmp_path, "rows.parquet", {"text": row_files.texts()})
    program = (
        "import sys; from meshtrain.data import rows; "
        "source = rows.build(path=sys.argv[1], tokenizer_path=sys.argv[2], seq_len=64, "
        "vocab_size=512, heldout=0.1, seed=3, split='train', num_workers=1); "
        "print(source.identity['data'])"
    )
    command = [sys.executable, "-c", program, str(path), str(made / "tokenizer")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    found = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    digests = {process.communicate(timeout=120)[0].strip() for process in found}
    assert digests == {build(made / "in" / "rows.parquet", made).identity["data"]}
    assert len([*tmp_path.glob(".meshtrain/rows-*")]) == 1


# ---- faults ----

FAULTS = {
    "null": (["a", None], {}, r"rows.parquet:2: text is NoneType, not a string"),
    "empty text": (["a", ""], {}, r"rows.parquet:2: text is empty"),
    "numbers": ([1, 2], {}, r"column 'text' holds int64, not strings; set data.field"),
    "lists": ([["a"], ["b"]], {}, r"column 'text' holds list<.*>, not strings"),
    "bad UTF-8 in bytes": (
        pyarrow.array([b"fine", b"\xff"], pyarrow.binary()),
        {},
        r"rows.parquet:2: invalid UTF-8 at byte 0",
    ),
    "nothing": ([None, None], {}, r"column 'text' holds null, not strings"),
    "no rows": (pyarrow.array([], pyarrow.string()), {}, r"holds no rows"),
    "bad UTF-8": (
        pyarrow.array([b"fine", b"\xff"]).cast(pyarrow.binary()).view(pyarrow.string()),
        {},
        r"rows.parquet:2: invalid UTF-8 at byte 0",
    ),
    "a NUL": (["a\0b"], {"tokenizer_path": "bytes"}, r"rows.parquet:1: holds '\\0', which ends"),
    "no column": (["a"], {"field": "body"}, r"no column 'body'; set data.field or .*: text"),
    "no part": ([{"a": "b"}], {"field": "text.c"}, r"column 'text' holds struct<.*has no 'c'"),
    "a list in a template": ([["a"]], {"template": "{text}"}, r"not texts or numbers"),
    "a null in a template": ([None, "a"], {"template": "{text}"}, r"rows.parquet:1: text is None"),
    "a faulty template": (["a"], {"template": "{text"}, r"^data.template '{text': has a { without"),
    "both": (["a"], {"template": "{text}", "field": "b"}, r"data.template=.* give one of them"),
    "mixture": (["a"], {"path": "", "mixture": (("/no", 1),)}, r"^data.path=/no: no such file"),
    "no path": (["a"], {"path": ""}, r"data.path is empty: give files of"),
    "path and mixture": (
        ["a"],
        {"mixture": (("a", 1.0),)},
        r"data.path=.* and data.mixture=.* one",
    ),
    "packing": (["a"], {"packing": "none"}, r"data.packing='none'"),
    "workers": (["a"], {"num_workers": -1}, r"data.num_workers=-1: use 0 or more"),
    "no tokenizer": (["a"], {"tokenizer_path": ""}, r"data.tokenizer_path is empty"),
    "vocabulary": (["a"], {"vocab_size": 20}, r"set model.vocab_size=280"),
    "too few tokens": (["a"], {}, r"has \d tokens, too few for one window"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_in_one_line(name, made, tmp_path):
    column, changes, fault = FAULTS[name]
    path = row_files.write(tmp_path, "rows.parquet", pyarrow.table({"text": column}))
    with pytest.raises(ConfigError, match=fault) as error:
        build(**{"path": path, "made": made, **changes})
    assert all("\n" not in line for line in error.value.faults)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.arrow", b"", "is empty; leave it out"),
        ("a.arrow", b"ARROW1\0\0 and no more", "not a complete Arrow file"),
        ("a.arrow", b"nonsense " * 9, "not a complete Arrow file"),
        (
            "a.feather",
            b"FEA1\0\0 and no more",
            "is a Feather file of version 1; .* as version 2 with",
        ),
        ("a.parquet", b"PAR1 and no more", "not a complete Parquet file"),
        ("a.array_record", b"", "is empty; leave it out"),
        ("a.array_record", b"nonsense " * 9, "not a complete ArrayRecord file"),
        ("a.jsonl", b'{"text": "a"}\n', "is no file of Arrow .* with `meshtrain prepare`"),
        ("a.txt", b"text", "is no file of Arrow"),
    ],
)
def test_files_that_cannot_be_read_are_named(name, content, fault, made, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=fault) as error:
        build(path, made)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_paths_without_rows_are_named(made, tmp_path):
    for path, fault in [
        (tmp_path, "no file in it is Arrow"),
        (tmp_path / "*.parquet", "no files match this pattern"),
        (tmp_path / "none.parquet", "no such file"),
    ]:
        with pytest.raises(ConfigError, match=fault):
            build(path, made)


def test_a_compressed_stream_is_not_random_access(made, tmp_path):
    path = row_files.write(tmp_path, "compressed-stream.arrow", {"text": ["a b c d " * 99] * 999})
    with pytest.raises(ConfigError, match="is a compressed stream, which would be decompressed"):
        build(path, made)


def test_large_groups_of_rows_are_logged(made, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_GROUP_BYTES", 1000)
    source = build(made / "in" / "rows.parquet", made)
    assert any("Parquet decompresses a group of rows" in line for line in source.warnings)
    source = build(made / "in" / "stream.arrow", made)
    assert not any("decompresses" in line for line in source.warnings)


def test_a_folder_that_cannot_be_written_has_its_index_in_the_cache_of_the_user(
    made, tmp_path, monkeypatch
):
    path = row_files.write(tmp_path / "in", "rows.parquet", {"text": row_files.texts(50)})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "in" / ".meshtrain").write_text("a file in the way")
    build(path, made, index_path="")
    assert [*(tmp_path / "cache" / "meshtrain").glob("rows-*/index.json")]
    rows._load.cache_clear()
    with pytest.raises(ConfigError, match="data.index_path=.*set it to a folder for the index"):
        build(path, made, index_path=str(tmp_path / "in" / ".meshtrain"))


def test_keys_of_rows_are_errors_with_other_builds(made):
    with pytest.raises(ConfigError, match="only data.build=meshtrain.data.rows:build reads them"):
        prepared(made, template="{text}")


# ---- runs ----


def config(made, path):
    c = tiny_config()
    c.model.vocab_size = 512
    c.train.steps, c.eval.batches = 4, 1
    c.optim.update(schedule="constant", learning_rate=1e-2)
    c.data.build = "meshtrain.data.rows:build"
    c.data.update(path=str(path), tokenizer_path=str(made / "tokenizer"), seq_len=64, heldout=0.1)
    c.data.update(index_path=str(made / "index"), num_workers=1)
    return c


def losses(c, **options):
    found = []
    train(c, on_metrics=found.append, **options)
    return [row["loss"] for row in found if "loss" in row]


def test_a_run_on_rows_is_one_on_prepared_data_and_resumes_on_another_mesh(made, tmp_path):
    c = config(made, made / "in" / "stream.arrow")
    expected = losses(c)
    same = config(made, made / "prepared")
    same.data.update(build="meshtrain.data.tokens:build", tokenizer_path="")
    assert losses(same) == expected
    c.train.steps = 2
    first = losses(c, workdir=tmp_path)
    c.train.steps = 4
    c.mesh.update(data=2, tensor=2, fsdp=2)
    c.data.num_workers = 0
    c.data.path = str(made / "in" / "rows.parquet")  # the same rows in another format
    np.testing.assert_allclose([*first, *losses(c, workdir=tmp_path)], expected, rtol=1e-4)
    # The run keeps the tokenizer, with which `generate` writes text.
    assert (tmp_path / "tokenizer" / "tokenizer.json").is_file()


@pytest.mark.slow
def test_the_command_line_trains_on_rows_with_a_template(made, tmp_path, capsys):
    path = row_files.write(tmp_path, "rows.parquet", {"q": ["why"] * 99, "a": ["so be it"] * 99})
    flags = ["build=meshtrain.data.rows:build", "tokenizer_path=bytes", f"path={path}"]
    flags += [r"template={q}\n{a}", "seq_len=16", "num_workers=1"]
    arguments = [f"--config.data.{flag}" for flag in flags]
    arguments += ["--config.model.vocab_size=256", "--config.train.steps=2", "--config=default"]
    assert app.command(["train", *arguments]) == 0, capsys.readouterr().err
    assert "rows, " in capsys.readouterr().out
    wrong = [flag for flag in arguments if "template" not in flag]
    assert app.command(["train", *wrong]) == 2
    assert "no column 'text'; set data.field or data.template to columns that it has: q, a" in (
        capsys.readouterr().err
    )


# ---- mixtures, phases, and documents written for filling in the middle ----

TWO = (("0", 2.0), ("1", 1.0))


@pytest.fixture(scope="module")
def two(made, tmp_path_factory):
    """Two data sets, as rows and prepared with the same tokenizer."""
    folder = tmp_path_factory.mktemp("two")
    for number, name in enumerate(("rows.parquet", "stream.arrow")):
        texts = row_files.texts(200 + 50 * number, seed=7 + number)
        path = row_files.write(folder / "rows" / str(number), name, {"text": texts})
        flags = [f"--output={folder / 'prepared' / str(number)}", "--num_workers=1"]
        flags += [f"--tokenizer={made / 'tokenizer'}"]
        assert app.main("prepare", [str(path), *flags]) == 0
    return folder


def with_paths(mixture, folder):
    return tuple((str(folder / name), weight) for name, weight in mixture)


@pytest.mark.parametrize(
    "changes",
    [
        dict(mixture=TWO),
        dict(mixture=TWO, weights="documents", packing="best_fit"),
        dict(mixture=TWO, split="heldout"),
        dict(path="1", shuffle_documents=True),
        dict(mixture=TWO, fim_rate=0.5, fim_tokens=(509, 510, 511)),
        dict(phases=((0.5, TWO), (0.5, "1"))),
    ],
    ids=lambda changes: " ".join(changes),
)
def test_rows_are_mixed_and_written_as_prepared_data_is(changes, made, two):
    def opened(kind, build):
        settings = {"path": "", **changes}
        if settings["path"]:
            settings["path"] = str(two / kind / settings["path"])
        if "mixture" in changes:
            settings["mixture"] = with_paths(TWO, two / kind)
        if "phases" in changes:
            first, last = with_paths(TWO, two / kind), str(two / kind / "1")
            settings["phases"] = ((0.5, first), (0.5, last))
        source = build(settings.pop("path"), made, **settings)
        run = Timeline(num_steps=20, global_batch=8)
        return source.in_run(run) if source.in_run else source

    def of_prepared(path, made, **settings):
        return prepared(made, path=path, **settings)

    ours = opened("rows", build)
    theirs = opened("prepared", of_prepared)
    indices = np.arange(160)
    for one, other in zip(ours.read(indices), theirs.read(indices), strict=True):
        np.testing.assert_array_equal(one, other)
    ours_parts, their_parts = (
        [part[1:] for part in source.parts(0, 160)] for source in (ours, theirs)
    )
    assert ours_parts == their_parts
    assert [phase.sample for phase in ours.phases] == [phase.sample for phase in theirs.phases]


def test_epochs_of_each_part_of_rows_have_a_limit(made, two):
    source = build("", made, mixture=with_paths(TWO, two / "rows"), max_epochs=1.0)
    with pytest.raises(ConfigError, match=r"data.max_epochs=1: .*rows/0 .* times; lower"):
        source.in_run(Timeline(num_steps=1000, global_batch=8))


def test_keys_of_other_data_are_rejected(made):
    for key, value, build_of_key in (("cache_gb", 5.0, "tokens"), ("learned", "all", "chat")):
        line = f"data.{key}=.*: only data.build=meshtrain.data.{build_of_key}:build reads it"
        with pytest.raises(ConfigError, match=line):
            build(made / "in" / "rows.parquet", made, **{key: value})


def test_other_rows_may_be_held_out(made):
    path = made / "in" / "rows.parquet"
    other = next(file for file in sorted((made / "in").iterdir()) if file.suffix != ".parquet")
    train_rows = build(path, made, heldout_path=str(other))
    assert_same_samples(train_rows, build(path, made, heldout=0.0), 20)
    heldout = build(path, made, heldout_path=str(other), split="heldout")
    assert_same_samples(heldout, build(other, made, heldout=0.0), 20)
