"""Tokenizers: a text survives the round trip, and is split only where that changes no token."""

import json
import os

import numpy as np
import pytest

from meshtrain.data import split_points, tokenizer
from meshtrain.errors import ConfigError
from tests.lib.prepare import TEXTS, hugging_face, prose, run, sentence_piece, texts, write_jsonl

# ---- tokenizers ----


LLAMA = min(split_points.SAFE_PATTERNS, key=len)


@pytest.mark.parametrize("kind", ["bytes", "huggingface", "sentencepiece"])
def test_a_text_survives_a_round_trip_and_token_bytes_add_up_to_its_size(tmp_path, kind):
    make = {"huggingface": hugging_face, "sentencepiece": sentence_piece}.get(kind)
    loaded = tokenizer.load(make(tmp_path / "t") if make else "bytes")
    sizes = loaded.token_bytes()
    assert loaded.kind == kind and sizes.shape == (loaded.vocab_size,)
    assert sizes[loaded.eos] == 0
    for text in [
        *TEXTS,
        prose(7, 500),
        "🙂 \u0001\t x",
        "</s><|endoftext|><s><unk>",
        " two  spaces ",
    ]:
        ids = loaded.encode(text)
        assert ids.dtype == np.int32 and ids.max() < loaded.vocab_size
        assert loaded.eos not in ids and loaded.bos not in ids.tolist()
        # SentencePiece adds a space before the text.
        assert sizes[ids].sum() == len(text.encode()) + (kind == "sentencepiece")
        assert loaded.decode(ids) == text
        assert loaded.decode([*ids, loaded.eos]) == text
    assert loaded.encode("").shape == (0,) and loaded.decode([]) == ""
    batch = loaded.encode_batch(TEXTS)
    assert [one.tolist() for one in batch] == [loaded.encode(text).tolist() for text in TEXTS]


def test_the_bytes_tokenizer_rejects_nul_and_marks_invalid_utf_8():
    loaded = tokenizer.load("bytes")
    with pytest.raises(ConfigError, match="NUL"):
        loaded.encode("a\0b")
    assert loaded.decode([0xE4, 0xB8, 65]) == "\N{REPLACEMENT CHARACTER}A"


@pytest.mark.parametrize(
    ("eos", "flag"),
    [
        ("<|endoftext|>", ""),
        ("</s>", ""),
        ("<|end_of_text|>", ""),
        ("<eos>", ""),
        ("<END>", "<END>"),
    ],
)
def test_the_eos_token_is_detected_or_given(tmp_path, capsys, eos, flag):
    file = hugging_face(tmp_path / "t", eos=eos)
    flags = [
        write_jsonl(tmp_path / "in"),
        f"--output={tmp_path / 'out'}",
        f"--tokenizer={file.parent}",
    ]
    if flag:
        assert run(*flags) == 2 and "--eos=TEXT" in capsys.readouterr().err
        assert run(*flags, "--eos=nope") == 2 and "no such token" in capsys.readouterr().err
        flags.append(f"--eos={flag}")
    assert run(*flags) == 0 and texts(tmp_path / "out") == TEXTS
    loaded = tokenizer.load(tmp_path / "out")
    assert loaded.decode([loaded.eos]) == "" and loaded.eos == 0
    flags = [flags[0], f"--output={tmp_path / 'two'}", f"--tokenizer={tmp_path / 'out'}"]
    # The EOS token of a prepared folder is reused.
    assert run(*flags) == 0 and texts(tmp_path / "two") == TEXTS
    other = next(token for token in range(1, 99) if loaded.decode([token]).isalpha())
    spelled = loaded.decode([other])
    assert tokenizer.load(tmp_path / "out", eos=spelled).eos == other  # `eos` overrides it
    assert run(flags[0], f"--output={tmp_path / 'bytes'}") == 0
    with pytest.raises(ConfigError, match="no such token"):
        tokenizer.load(tmp_path / "bytes", eos="<s>")


def test_truncation_and_padding_of_a_tokenizer_file_are_disabled(tmp_path):
    file = hugging_face(tmp_path / "t")
    described = json.loads(file.read_text())
    described["truncation"] = {
        "max_length": 5,
        "stride": 0,
        "strategy": "LongestFirst",
        "direction": "Right",
    }
    described["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
    }
    described["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    expected = tokenizer.load(file).encode(TEXTS[1])
    file.write_text(json.dumps(described))
    assert tokenizer.load(file).encode(TEXTS[1]).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(pre_tokenizer=None),
        lambda d: d.update(pre_tokenizer=sequence(["[^a]+"], d)),
        lambda d: d.update(pre_tokenizer=sequence(LLAMA, d, behavior="MergedWithNext")),
        lambda d: d.update(pre_tokenizer=sequence(LLAMA, d, invert=True)),
        lambda d: d.update(pre_tokenizer=sequence(LLAMA * 2, d)),
        lambda d: d["pre_tokenizer"].update(add_prefix_space=True),
        lambda d: d["pre_tokenizer"].update(use_regex=False),
        lambda d: d.update(normalizer={"type": "Lowercase"}),
        lambda d: d.update(pre_tokenizer={"type": "Whitespace"}),
        lambda d: d["model"].update(dropout=0.1),
        lambda d: d["added_tokens"].append(
            {**d["added_tokens"][0], "content": "a\nb", "special": False}
        ),
        lambda d: d["added_tokens"].append(
            {**d["added_tokens"][0], "content": "ab", "special": False, "rstrip": True}
        ),
    ],
)
def test_a_text_is_not_split_if_that_could_change_its_tokens(tmp_path, change):
    file = hugging_face(tmp_path / "t")
    described = json.loads(file.read_text())
    assert split_points.can_split(described)
    change(described)
    assert not split_points.can_split(described)


@pytest.mark.parametrize("patterns", sorted(split_points.SAFE_PATTERNS))
def test_texts_are_split_for_well_known_tokenizers(tmp_path, monkeypatch, patterns):
    file = hugging_face(tmp_path / "t")
    described = json.loads(file.read_text())
    described["pre_tokenizer"] = sequence(patterns, described)
    file.write_text(json.dumps(described))
    loaded, text = tokenizer.load(file), prose(4, 10_000)
    expected = loaded.encode_batch([text])[0].tolist()
    monkeypatch.setattr(tokenizer, "PIECE_CHARS", 100)
    assert len(loaded.pieces(text)) > 100 and loaded.encode(text).tolist() == expected


def sequence(patterns, described, **changes):
    split = {"type": "Split", "behavior": "Isolated", "invert": False, **changes}
    splits = [{**split, "pattern": {"Regex": one}} for one in patterns]
    level = {**described["pre_tokenizer"], "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, level]}


def test_a_text_of_one_line_is_not_split(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "PIECE_CHARS", 100)
    loaded = tokenizer.load(hugging_face(tmp_path / "t"))
    assert loaded.pieces("no newline " * 500) == ["no newline " * 500]
    assert [len(one) for one in tokenizer.load("bytes").pieces("x" * 250)] == [100, 100, 50]


# ---- reading a prepared folder ----


def test_an_empty_tokenizer_json_is_not_read_as_a_sentencepiece_model(tmp_path):
    (tmp_path / "tokenizer.json").touch()
    pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    with pytest.raises(ConfigError, match="tokenizer.json is not a tokenizer.json"):
        tokenizer.load(tmp_path)


def split_at(pattern):
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


DOUBLINGS = [replace({"String": "a"}, "aa")] * 40
BPE = {"type": "BPE", "vocab": {}, "merges": []}
HOSTILE = {
    "a pattern that backtracks for ever": (
        {"pre_tokenizer": split_at("(a+)+$")},
        "fails: Onig: Regex search error: retry-limit-in-match over",
    ),
    "a table of characters that is none": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "is not a tokenizer.json: Precompiled",
    ),
    "pieces of no characters": (
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        "fails: chunk size must be non-zero",
    ),
    "a replacement of nothing": (
        {"normalizer": replace({"Regex": ""}, "xxxx")},
        "fails: index out of bounds",
    ),
    "stripping of more than there is": (
        {"decoder": {"type": "Strip", "content": "a", "start": 10**6, "stop": 10**6}},
        "fails: index out of bounds",
    ),
    "no token for unknown characters": (
        {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]}},
        "fails: Encountered an unknown token",
    ),
    "replacements that double": (
        {"normalizer": {"type": "Sequence", "normalizers": DOUBLINGS}},
        "may make 1,099,511,627,776 characters of one",
    ),
    "an id of gigabytes": (
        {"model": {**BPE, "vocab": {"a": 2**32 - 1}}, "added_tokens": []},
        "its largest token id is 4294967295, in a file of",
    ),
    "no token": ({"model": BPE, "added_tokens": []}, "its largest token id is -1"),
    "deep nesting": ("[" * 10**5, "is not a tokenizer.json"),
    "invalid UTF-8": (b"{\xff", "is not a tokenizer.json"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_tokenizer_is_one_line(tmp_path, capfd, case):
    """The package panics, which is no Exception, and prints a page to stderr."""
    change, fault = HOSTILE[case]
    path = hugging_face(tmp_path / "t")
    if isinstance(change, dict):
        change = json.dumps(json.loads(path.read_text()) | change)
    path.write_bytes(change if isinstance(change, bytes) else change.encode())
    with pytest.raises(ConfigError) as caught:
        loaded = tokenizer.load(path)
        loaded.decode(loaded.encode("a" * 5000 + "b"))
    assert str(caught.value).startswith(f"tokenizer {path}") and fault in str(caught.value)
    assert capfd.readouterr().err == ""


def test_what_others_print_while_a_tokenizer_is_read_arrives(tmp_path, capfd):
    with tokenizer.reporting_faults(tmp_path, "fails"):
        os.write(2, b"of another thread")
    assert capfd.readouterr().err == "of another thread"
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match="a pipe, not a file|is a pipe"):
        tokenizer.load(tmp_path / "tokenizer.json")
