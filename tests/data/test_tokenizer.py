"""Tokenizers: a text survives the round trip, and is split only where that changes no token."""

import json
import os

import numpy as np
import pytest

from meshtrain.data import prepared, split_points, tokenizer
from meshtrain.data.conversations import reply_encoder
from meshtrain.errors import ConfigError
from tests.lib.prepare import (
    TEXTS,
    documents,
    hugging_face,
    prose,
    run,
    sentence_piece,
    texts,
    write_jsonl,
)

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


def with_config(folder, config, *, name="tokenizer_config.json"):
    """Writes a tokenizer with the special tokens <|endoftext|>, <END> and <START>, and a config.

    Returns their ids.
    """
    file = hugging_face(folder)
    described = json.loads(file.read_text())
    for number, content in ((320, "<END>"), (321, "<START>")):
        token = {**described["added_tokens"][0], "id": number, "content": content}
        described["added_tokens"].append(token)
    described["pre_tokenizer"]["add_prefix_space"] = True
    file.write_text(json.dumps(described))
    (folder / name).write_text(json.dumps(config))
    return {"<|endoftext|>": 0, "<END>": 320, "<START>": 321, None: None}


@pytest.mark.parametrize(
    ("config", "eos", "bos", "adds_bos"),
    [
        ({}, "<|endoftext|>", None, False),
        ({"eos_token": "<END>"}, "<END>", None, False),
        ({"eos_token": {"content": "<END>", "special": True}}, "<END>", None, False),
        ({"eos_token": None, "bos_token": "<START>"}, "<|endoftext|>", "<START>", False),
        ({"eos_token": "of another vocabulary"}, "<|endoftext|>", None, False),
        ({"bos_token": "<START>", "add_bos_token": True}, "<|endoftext|>", "<START>", True),
        ({"bos_token": "<START>", "add_bos_token": False}, "<|endoftext|>", "<START>", False),
        ({"add_bos_token": True}, "<|endoftext|>", None, False),
    ],
    ids=str,
)
def test_documents_end_and_begin_with_the_tokens_of_tokenizer_config(
    config, eos, bos, adds_bos, tmp_path, capsys
):
    ids = with_config(tmp_path / "t", config)
    out = tmp_path / "out"
    flags = [write_jsonl(tmp_path / "in"), f"--output={out}", f"--tokenizer={tmp_path / 't'}"]
    assert run(*flags) == 0
    if adds_bos:
        assert "each document begins with its token 321" in capsys.readouterr().out
    entry = prepared.read_manifest(out)["tokenizer"]
    assert entry["eos"] == ids[eos]
    assert entry["bos"] == (ids[bos] if adds_bos else None)
    begin = [entry["bos"]] if adds_bos else []
    loaded = tokenizer.load(tmp_path / "t")
    assert documents(out) == [[*begin, *loaded.encode(text).tolist()] for text in TEXTS]
    assert (loaded.eos, loaded.bos, loaded.adds_bos) == (ids[eos], ids[bos], adds_bos)
    added = tokenizer.added_bytes(tmp_path / "t" / "tokenizer.json")
    np.testing.assert_array_equal(added, tokenizer.added_bytes(out))
    assert added[begin].tolist() == [len(" ")] * len(begin) and added.sum() == len(begin)
    # The prepared folder knows what it was prepared with.
    stored = tokenizer.load(out)
    assert (stored.eos, stored.adds_bos) == (ids[eos], adds_bos)
    assert not adds_bos or stored.bos == ids[bos]


def test_flags_replace_what_tokenizer_config_says(tmp_path):
    config = {"eos_token": "<END>", "bos_token": "<START>", "add_bos_token": True}
    with_config(tmp_path / "t", config, name="special_tokens_map.json")
    flags = [write_jsonl(tmp_path / "in"), f"--tokenizer={tmp_path / 't' / 'tokenizer.json'}"]
    assert run(*flags, f"--output={tmp_path / 'a'}", "--no-bos", "--eos=<|endoftext|>") == 0
    entry = prepared.read_manifest(tmp_path / "a")["tokenizer"]
    assert (entry["eos"], entry["bos"]) == (0, None)


def test_a_folder_is_not_resumed_with_other_ends(tmp_path, capsys):
    with_config(tmp_path / "t", {})
    out = tmp_path / "out"
    flags = [write_jsonl(tmp_path / "in"), f"--output={out}", f"--tokenizer={tmp_path / 't'}"]
    assert run(*flags) == 0
    # The token of the old spelling is no change.
    (tmp_path / "t" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert run(*flags) == 0 and "already prepared" in capsys.readouterr().out
    (tmp_path / "t" / "tokenizer_config.json").write_text('{"eos_token": "<END>"}')
    assert run(*flags) == 2
    assert "different settings: eos was '', now '<END>'" in capsys.readouterr().err


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


def test_dropout_of_a_tokenizer_file_is_switched_off_and_named(tmp_path, capsys):
    file = hugging_face(tmp_path / "t")
    flags = [write_jsonl(tmp_path / "in", [prose(1, 300)]), f"--tokenizer={file}"]
    expected = tokenizer.load(file).encode(prose(1, 300)).tolist()
    assert run(*flags, f"--output={tmp_path / 'plain'}") == 0
    assert "sets dropout" not in capsys.readouterr().out
    described = json.loads(file.read_text())
    described["model"]["dropout"] = 0.5
    file.write_text(json.dumps(described))

    loaded = tokenizer.load(file)
    assert loaded.encode(prose(1, 300)).tolist() == expected
    ((of_chat, _),) = reply_encoder(file)([prose(1, 300)])
    assert of_chat.tolist() == expected
    assert run(*flags, f"--output={tmp_path / 'dropout'}") == 0
    assert f"tokenizer {file}: sets dropout=0.5, which makes tokens" in capsys.readouterr().out
    assert documents(tmp_path / "dropout") == documents(tmp_path / "plain") == [expected]


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


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "a"])
def test_an_empty_file_is_no_tokenizer(name, tmp_path, capfd):
    """SentencePiece takes one for a model, and writes errors of its own."""
    (tmp_path / name).touch()
    for path in [tmp_path / name] if name == "a" else [tmp_path / name, tmp_path]:
        with pytest.raises(ConfigError, match=f"^tokenizer .*{name}: is empty; use bytes, a"):
            tokenizer.load(path)
    assert capfd.readouterr().err == ""


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
