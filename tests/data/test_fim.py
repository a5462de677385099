"""Filling in the middle: nothing is lost, the choices are shares, and rows stay what they were."""

import numpy as np
import pytest

from meshtrain.data import fim, tokenizer, tokens
from meshtrain.errors import ConfigError
from tests.lib import prepare
from tests.lib.documents import build, documents, write

PREFIX, SUFFIX, MIDDLE = 20_001, 20_002, 20_003
KEYS = dict(fim_tokens=(PREFIX, SUFFIX, MIDDLE), vocab_size=20_004)


def parts_of(document):
    """Returns prefix, middle and suffix of a document that was written for filling, and its way."""
    document = [*document]
    at = [document.index(token) for token in (PREFIX, SUFFIX, MIDDLE)]
    assert at[0] == 0 and at[1] < at[2]
    before, after = document[1 : at[1]], document[at[1] + 1 : at[2]]
    rest = document[at[2] + 1 :]
    return before, after, rest


def documents_of(batch, row):
    """Returns the documents of a row, each with its last target, without padding."""
    found = []
    for number in np.unique(batch.segments[row]):
        own = batch.segments[row] == number
        assert batch.positions[row][own].tolist() == [*range(own.sum())]
        weights = batch.weights[row][own]
        if own.sum() > 1 and not weights.any():
            continue
        document = batch.tokens[row][own]
        assert batch.targets[row][own][:-1].tolist() == document[1:].tolist()
        assert weights[:-1].all()
        if weights[-1]:
            document = np.append(document, batch.targets[row][own][-1])
        found.append(document)
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("fim") / "a", documents([5, 9, 2, 12, 30, 1, 4] * 20))


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_a_document_is_written_in_another_order_and_nothing_is_lost(path, packing, spm_rate):
    keys = dict(seq_len=40, packing=packing, **KEYS)
    plain = build(path, **keys)
    filled = build(path, **keys, fim_rate=1.0, fim_spm_rate=spm_rate)
    indices = np.arange(plain.size)
    before, after = plain.read(indices), filled.read(indices)
    num_filled = 0
    for row in indices:
        old, new = documents_of(before, row), documents_of(after, row)
        for number, document in enumerate(new):
            original = old[number].tolist()
            is_last = number == len(new) - 1  # cut where the row ends
            if len(original) < 2:
                assert document.tolist() == original
                continue
            if is_last and after.segments[row, -1] == number:
                continue
            num_filled += 1
            first, second, rest = parts_of(document)
            if spm_rate:
                assert first == []
                middle_starts = len(original) - len(second)
                assert rest == original[:middle_starts] and second == original[middle_starts:]
            else:
                middle = original[len(first) : len(original) - len(second)]
                assert first == original[: len(first)] and rest == middle
    assert num_filled > 30
    assert filled.size == plain.size and after.tokens.shape == before.tokens.shape


def test_shares_and_places_are_uniform(tmp_path):
    path = write(tmp_path / "a", documents([11] * 1800))
    source = build(path, seq_len=16, packing="best_fit", fim_rate=0.5, fim_spm_rate=0.25, **KEYS)
    batch = source.read(np.arange(source.size))
    filled = [row for row in range(source.size) if batch.tokens[row, 0] == PREFIX]
    assert abs(len(filled) / source.size - 0.5) < 4 * 0.5 / np.sqrt(source.size)
    as_spm = [row for row in filled if batch.tokens[row, 1] == SUFFIX]
    # PSM with an empty prefix looks the same: one of 12 places, twice.
    expected = 0.25 + 0.75 * (1 - (11 / 12) ** 2)
    assert abs(len(as_spm) / len(filled) - expected) < 4 * 0.5 / np.sqrt(len(filled))
    lengths = [len(parts_of(documents_of(batch, row)[0])[0]) for row in filled]
    places = np.bincount([one for one in lengths if one], minlength=12)
    assert places[1] > places[10] > 0  # the smaller of two uniform places


def test_a_row_depends_on_seed_and_index_alone(path):
    keys = dict(seq_len=24, fim_rate=0.5, **KEYS)
    source = build(path, **keys)
    order = np.random.default_rng(0).permutation(200)
    one, other = source.read(np.arange(200)), source.read(order)
    for name, array in one._asdict().items():
        if array is not None:
            assert np.array_equal(array[order], getattr(other, name)), name
    again = build(path, **keys, seed=1).read(np.arange(200))
    assert (again.tokens != one.tokens).any()
    # Another epoch, another place.
    epochs = build(path, **keys).read(np.arange(2 * source.size))
    rows = {tuple(row) for row in epochs.tokens.tolist()}
    assert len(rows) > source.size


def test_held_out_rows_and_rows_of_rate_0_are_as_they_were(path):
    keys = dict(seq_len=24, **KEYS, heldout=0.3)
    for changes in (dict(fim_rate=0.0), dict(fim_rate=1.0, split="heldout")):
        plain = build(path, **(keys | changes | {"fim_rate": 0.0}))
        source = build(path, **(keys | changes))
        indices = np.arange(plain.size)
        assert np.array_equal(source.read(indices).tokens, plain.read(indices).tokens)


def test_tokens_without_documents_are_a_document_a_row(tmp_path):
    np.arange(1, 2001, dtype=np.uint16).tofile(tmp_path / "raw.bin")
    keys = dict(seq_len=20, dtype="uint16", fim_rate=1.0, fim_spm_rate=0.0, **KEYS)
    batch = build(tmp_path / "raw.bin", **keys).read(np.arange(50))
    assert batch.segments is None and batch.weights.all()
    assert (batch.tokens[:, 0] == PREFIX).all()
    assert (batch.targets[:, :-1] == batch.tokens[:, 1:]).all()


# ---- text ----


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    texts = [prepare.prose(seed, 60) for seed in range(60)]
    file = prepare.write_jsonl(folder / "texts", texts)
    assert prepare.run(file, f"--output={folder / 'out'}", "--train_bpe=340") == 0
    return folder / "out", set(texts)


def test_texts_are_cut_between_characters_and_each_part_is_tokenized(prepared):
    path, texts = prepared
    loaded = tokenizer.load(path)
    size = loaded.vocab_size
    ids = (size, size + 1, size + 2)
    keys = dict(seq_len=700, packing="best_fit", vocab_size=size + 3)
    source = build(path, **keys, fim_rate=1.0, fim_spm_rate=0.0, fim_tokens=ids)
    batch = source.read(np.arange(source.size))
    seen = within_token = 0
    for row in range(source.size):
        for document in documents_of(batch, row):
            if document[0] != ids[0] or document[-1] != loaded.eos:
                continue
            document = document[:-1].tolist()
            prefix, rest = document[1 : document.index(ids[1])], document[document.index(ids[1]) :]
            suffix, middle = rest[1 : rest.index(ids[2])], rest[rest.index(ids[2]) + 1 :]
            parts = [loaded.decode(part) for part in (prefix, middle, suffix)]
            assert "".join(parts) in texts
            for part, part_ids in zip(parts, (prefix, middle, suffix), strict=True):
                assert loaded.encode(part).tolist() == part_ids
            whole = loaded.encode("".join(parts)).tolist()
            within_token += whole != [*prefix, *middle, *suffix]
            seen += 1
    assert seen > 40 and within_token > seen / 4


def test_part_of_a_character_and_special_tokens_are_cut_between_tokens():
    loaded = tokenizer.load(tokenizer.BYTES)
    filling = fim.Filling(1.0, 0.0, 300, 301, 302, 0, loaded, loaded.token_bytes())
    for text, content in (("a\xe9b", True), ("a", True)):
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        assert (fim._text_of(ids, filling) == text) is content
        assert fim._text_of(np.append(ids, 0xC3).astype(np.int32), filling) is None
    assert fim._text_of(np.array([97, 0, 98]), filling) is None


# ---- tokens and mistakes ----


@pytest.mark.parametrize("names", fim.SPELLINGS)
def test_the_tokens_of_well_known_tokenizers_are_found(names, monkeypatch):
    spelled = ["a", *names, "b"]
    loaded = tokenizer.load(tokenizer.BYTES)
    monkeypatch.setattr(
        fim.tokenizers,
        "load",
        lambda path: loaded.__class__(
            **{**loaded.__dict__, "vocab_size": 5, "spelling": spelled.__getitem__}
        ),
    )
    corpus = tokens.load_corpus.__globals__["Corpus"]("x", [], [], np.zeros(1), tokenizer="bytes")
    found = fim.load(0.5, 0.5, (), corpus, separator=-1, vocab_size=9)
    assert (found.prefix, found.suffix, found.middle) == (1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(fim_rate=1.5), "data.fim_rate=1.5: use a share"),
        (dict(fim_rate=float("nan")), "data.fim_rate=nan: use a share"),
        (dict(fim_rate=0.5, fim_spm_rate=-0.1), "data.fim_spm_rate=-0.1: use a share"),
        (dict(fim_rate=0.5, fim_tokens=()), "it has no tokenizer; set data.fim_tokens"),
        (dict(fim_rate=0.5, fim_tokens=(1, 2)), r"data.fim_tokens=\(1, 2\): are 2, not three"),
        (dict(fim_rate=0.5, fim_tokens=(1, 2, 2)), "two are the same"),
        (dict(fim_rate=0.5, fim_tokens=(1, 2, 99_999)), "99999 is no token below"),
        (dict(fim_rate=0.5, fim_tokens=(1, 2, "<x>")), "'<x>' is no token below"),
    ],
)
def test_a_mistake_is_reported(path, changes, expected):
    with pytest.raises(ConfigError, match=expected):
        build(path, **(KEYS | changes))
