"""`meshtrain prepare` on small texts: inputs of every kind, small tokenizers, and what it wrote."""

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.data import indexed, prepared, tokenizer, tokens
from meshtrain.data.prepare import inputs, tokenize

TEXTS = ["first\n", "zweitens: äöü\n\n  x", "third 3", "日本語\n", "a" * 300, "last\r\nline\r\n"]
WORDS = "the of and to in is it that was for über straße naïve 東京 123 4567 don't I'll (x) # -- \t"
WORDS = WORDS.split(" ")


def run(*arguments):
    """Returns the exit code of `meshtrain prepare`, in this process, with one worker by default."""
    return app.main("prepare", [*("--num_workers=1",), *map(str, arguments)])


def write_jsonl(folder, texts=TEXTS):
    """Writes a file of JSON lines with these texts, and returns its path."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"text": text, "other": 1}) for text in texts]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "a.jsonl"


def prose(seed, size):
    """Returns random text with lines, numbers, punctuation and several alphabets."""
    chosen = random.Random(seed)
    words = chosen.choices(WORDS, k=size)
    return "".join(
        word + chosen.choice([" ", " ", " ", "\n", "\n\n", "\r\n", ". "]) for word in words
    )


def documents(folder):
    """Returns the documents of a prepared folder as lists of ids, without their EOS."""
    found = prepared.read_manifest(Path(folder))
    loaded = [indexed.load(str(Path(folder) / entry["name"])) for entry in found["shards"]]
    split = [np.split(shard.tokens, shard.starts[1:-1]) for shard in loaded]
    assert all(doc[-1] == found["tokenizer"]["eos"] for docs in split for doc in docs)
    return [doc[:-1].tolist() for docs in split for doc in docs]


def texts(folder):
    loaded = tokenizer.load(folder)
    return [loaded.decode(document) for document in documents(folder)]


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def hugging_face(path, text=None, eos="<|endoftext|>"):
    """Writes a small byte-level tokenizer.json."""
    pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    write_jsonl(path, [text or prose(0, 3000)])
    files = [path / "a.jsonl"]
    tokenize.train_bpe(files, inputs.ReadOptions("text", "", ""), 320, path / "tokenizer.json")
    if eos != tokenize.BPE_EOS:
        content = (path / "tokenizer.json").read_text().replace(tokenize.BPE_EOS, eos)
        (path / "tokenizer.json").write_text(content)
    return path / "tokenizer.json"


def sentence_piece(path, **options):
    """Writes a small SentencePiece model with a byte fallback and without normalization."""
    spm = pytest.importorskip("sentencepiece", reason="needs the extra `tokenizers`")
    path.mkdir(exist_ok=True)
    with open(path / "tokenizer.model", "wb") as file:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(prose(0, 3000).split("\n")),
            model_writer=file,
            vocab_size=310,
            byte_fallback=True,
            minloglevel=2,
            **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False, **options},
        )
    return path / "tokenizer.model"


# ---- kinds of input ----


def write_parquet(path, texts):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `parquet`")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra `parquet`")
    parquet.write_table(
        pyarrow.table({"n": range(len(texts)), "text": texts}), path, row_group_size=4
    )


KINDS = ["jsonl", "jsonl.gz", "crlf", "blank", "parquet", "separator", "files", "gz", "bom"]


def inputs_of(kind, folder):
    """Writes TEXTS as one kind of input, and returns the flags to read them."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    folder.mkdir()
    if kind == "jsonl":
        (folder / "a.jsonl").write_bytes(lines)
    elif kind == "jsonl.gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    elif kind == "crlf":
        (folder / "a.jsonl").write_bytes(lines.replace(b"\n", b"\r\n"))
    elif kind == "blank":  # blank lines are ignored
        (folder / "a.jsonl").write_bytes(b"\n" + lines.replace(b"\n", b"\n \t\r\n\n"))
    elif kind == "bom":
        (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.rstrip())
    elif kind == "parquet":
        write_parquet(folder / "a.parquet", TEXTS)
    elif kind == "separator":
        (folder / "a.txt").write_text("<|end|>".join(["", *TEXTS, "\n"]), newline="")
        return [str(folder), "--separator=<|end|>"]
    elif kind == "files":
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt").write_text(text, newline="")
        (folder / "empty.txt").touch()
    elif kind == "gz":
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt.gz").write_bytes(gzip.compress(text.encode()))
    return [str(folder)]


# ---- the same output after any interruption ----


def build(path, **changes):
    settings = {"dtype": "", "pattern": "*", "exclude": (), "seq_len": 4, "vocab_size": 256}
    settings |= {"separator": -1, "heldout": 0.0, "seed": 0, "split": "train"}
    return tokens.build(path=str(path), **{**settings, **changes})
