"""Any text, whatever its characters: read, split, tokenized, packed and written again unchanged.

The texts are drawn from all of Unicode's categories, and from the fragments that readers get wrong.
"""

import itertools
import json
import tempfile
from pathlib import Path
from unittest import mock

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from meshtrain.data import corpus, packing, split_points, tokenizer
from meshtrain.data.prepare import inputs, streams
from meshtrain.data.prepare.records import text_of
from meshtrain.data.source import to_batch
from meshtrain.inference.generate import TextStream

EXAMPLES = hypothesis.settings(
    derandomize=True, deadline=None, max_examples=60, database=None, print_blob=False
)

# All categories but Cs, the surrogates, which no UTF-8 holds.
CATEGORIES = (
    "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co Cn"
).split()
FRAGMENTS = (
    # str.splitlines ends a line at each of these, a file only at \n.
    *("\n", "\r\n", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"),
    *(
        "a\n",
        "b\r\n",
        "\ufeff",
        "\ufffd",
        "\ufffe",
        "\0",
        "\u00a0",
        "\u3000",
        "\u200b",
        " ",
        "\t",
        '"',
        "\\",
    ),
    *("e\u0301", "\u0301", "\u1112\u1161\u11ab", "👩\u200d👩\u200d👧", "🇩🇪", "👍🏽", "\U0010ffff"),
    *("שלום", "مرحبا", "\u202eabc\u202c", "İ", "ß", "ﬁ", "日本語", "<|endoftext|>", "\\ud83d"),
)
LETTERS = st.one_of(*(st.characters(categories=[category]) for category in CATEGORIES))
TEXTS = st.lists(st.one_of(LETTERS, st.sampled_from(FRAGMENTS), st.text(max_size=5)), max_size=12)
TEXTS = TEXTS.map("".join).filter(lambda text: not any("\ud800" <= x <= "\udfff" for x in text))
CHUNKS = st.integers(1, 9)
BOM = "\ufeff"


def records_of(name, content, *, chunk, separator="", split=len):
    """Returns the records of a file, and checks that reading resumes after each document."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(streams, "CHUNK", chunk):
        path = Path(folder) / name
        path.write_bytes(content)
        options = inputs.ReadOptions("text", separator, forbidden="")
        records = list(inputs.read_records([path], options, split))
        for number, record in enumerate(records):
            if record.ends_document:
                rest = list(inputs.read_records([path], options, split, record.next_position))
                assert [one.data for one in rest] == [one.data for one in records[number + 1 :]]
        return records, options


@EXAMPLES
@hypothesis.example("uvwxya\nbcdef\r\nghijk", 4, split_points.last_split_point)
@hypothesis.given(
    TEXTS, CHUNKS, st.sampled_from([len, split_points.last_split_point, lambda text: 0])
)
def test_a_text_file_is_one_document_with_all_of_its_characters(text, chunk, split):
    records, options = records_of("a.txt", text.encode(), chunk=chunk, split=split)
    assert "".join(text_of(one, options) for one in records) == text.removeprefix(BOM)
    if records:
        assert [one.starts_document for one in records] == [True] + [False] * (len(records) - 1)
        assert [one.ends_document for one in records] == [False] * (len(records) - 1) + [True]
    if split is split_points.last_split_point:
        for piece, following in itertools.pairwise(records):
            assert piece.data[-1].isalpha() and following.data[0] in "\r\n"


@EXAMPLES
@hypothesis.given(st.lists(TEXTS, max_size=5), TEXTS.filter(bool), st.integers(0, 9))
def test_documents_between_separators_are_those_of_a_plain_split(texts, separator, extra):
    content = separator.join(texts).encode()
    records, options = records_of(
        # A chunk holds a separator.
        *("a.txt", content),
        chunk=len(separator.encode()) + extra,
        separator=separator,
    )
    documents = content.removeprefix(BOM.encode()).split(separator.encode())
    expected = [one.decode() for one in documents if one.strip()]
    assert [text_of(one, options) for one in records] == expected


@EXAMPLES
@hypothesis.given(
    st.lists(TEXTS.filter(bool), max_size=5),
    st.booleans(),
    st.sampled_from(["\n", "\r\n", "\n \n", "\n\n"]),
    st.booleans(),
)
def test_a_field_of_json_lines_is_the_text(texts, ascii_only, end, with_bom):
    """Other fields before and after it, escapes of 4-byte characters, both ends of lines."""
    lines = []
    for number, text in enumerate(texts):
        row = {"id": number, "text": text, "texts": [text]}
        lines.append(json.dumps(row, ensure_ascii=ascii_only) + end)
    content = (BOM * with_bom + "".join(lines)).encode()
    records, options = records_of("a.jsonl", content, chunk=1)
    assert [text_of(one, options) for one in records] == texts


@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00", "\\ude00\\ud83d", "a\\ud83d\\\\ude00"])
def test_half_of_a_surrogate_pair_is_a_fault_of_its_line(half):
    records, options = records_of("a.jsonl", f'{{"text": "{half}"}}\n'.encode(), chunk=1)
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        text_of(records[0], options)


INVALID = (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80")


@EXAMPLES
@hypothesis.given(TEXTS, TEXTS, st.sampled_from(INVALID), CHUNKS)
def test_a_byte_that_is_no_utf_8_is_named_whatever_chunk_it_is_in(before, after, wrong, chunk):
    content = before.encode() + wrong + b"." + after.encode()
    try:
        content.decode()
    except UnicodeDecodeError as error:
        expected = f"invalid UTF-8 at byte {error.start}"
    for name, separator in (("a.txt", ""), ("b.txt", "\0never\0")):
        if separator.encode() and separator.encode() in content:
            continue
        (record,), options = records_of(
            name, content, chunk=max(chunk, len(separator)), separator=separator
        )
        with pytest.raises(ValueError) as fault:
            text_of(record, options)
        assert str(fault.value) == expected


@EXAMPLES
@hypothesis.given(TEXTS, TEXTS)
def test_generated_text_is_written_once_token_by_token(prompt, text):
    bytes_tokenizer = tokenizer.load("bytes")
    prompt, text = prompt.replace("\0", ""), text.replace("\0", "")
    tokens = bytes_tokenizer.encode(text).tolist()
    assert bytes_tokenizer.decode(tokens) == text
    stream = TextStream(bytes_tokenizer, bytes_tokenizer.encode(prompt).tolist())
    parts = [stream.add(token) for token in tokens]
    assert "".join([*parts, stream.end()]) == text


# ---- packing ----


@EXAMPLES
@hypothesis.given(
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=1, max_size=3),
    st.integers(1, 12),
    st.data(),
)
def test_packed_rows_hold_each_token_once_with_its_target(files, seq_len, data):
    """Any lengths of documents in one to three files, from any token to any other."""
    sizes = [np.array(lengths) for lengths in files]
    offsets = np.cumsum([0, *[one.sum() for one in sizes]])
    total = int(offsets[-1])
    # A token is its place in the stream, from 1: padding is 0.
    stream = np.arange(1, total + 1)
    made = corpus.Corpus(
        "made",
        files=[str(number) for number in range(len(files))],
        file_tokens=np.split(stream, offsets[1:-1]),
        file_offsets=offsets,
        document_starts=np.cumsum([0, *np.concatenate(sizes)]),
    )
    first = data.draw(st.integers(0, total - 1))
    last = data.draw(st.integers(first + 1, total))
    packed = packing.pack(made, first, last, seq_len)
    num_rows = len(packed.rows) - 1
    order = np.array(data.draw(st.permutations(range(num_rows))))
    batch = packing.read_rows(made, packed, order, seq_len, total + 1)

    is_token = batch.tokens > 0
    assert sorted(batch.tokens[is_token].tolist()) == list(range(first + 1, last + 1))
    document_of = np.searchsorted(made.document_starts, np.arange(total + 1), side="right")
    for row in range(num_rows):
        tokens, segments = batch.tokens[row], batch.segments[row]
        num_tokens = int(is_token[row].sum())
        assert num_tokens and is_token[row, :num_tokens].all()
        assert not batch.weights[row, num_tokens:].any()
        for at in range(seq_len):
            starts = not at or segments[at] != segments[at - 1]
            assert batch.positions[row, at] == (0 if starts else batch.positions[row, at - 1] + 1)
            if at and is_token[row, at]:
                # Within a segment, tokens follow each other in their document.
                follows = tokens[at] == tokens[at - 1] + 1
                same = document_of[tokens[at] - 1] == document_of[tokens[at - 1] - 1]
                assert starts or (follows and same)
            if at == num_tokens:
                assert starts
        for token, target, weight in zip(
            tokens[:num_tokens], batch.targets[row], batch.weights[row], strict=False
        ):
            # Its target is the next token of the document, if the split holds it.
            has_target = token < last and document_of[token] == document_of[token - 1]
            assert weight == has_target
            assert target == (token + 1 if has_target else 0)


@EXAMPLES
@hypothesis.given(st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1))
def test_a_separator_ends_a_document_wherever_it_is(rows):
    """At the start and end of a row, and several times in succession."""
    batch = to_batch(np.array(rows, np.int32), separator=2)
    for row, tokens in enumerate(rows):
        segment = position = 0
        for at, token in enumerate(tokens[:-1]):
            assert (batch.tokens[row, at], batch.targets[row, at]) == (token, tokens[at + 1])
            assert (batch.segments[row, at], batch.positions[row, at]) == (segment, position)
            assert batch.weights[row, at] == (token != 2)
            segment, position = (segment + 1, 0) if token == 2 else (segment, position + 1)
