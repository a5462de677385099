"""Workers that tokenize, long texts in pieces, and tokenizers that `meshtrain prepare` trains."""

import hashlib
import os
import subprocess
import sys

import pytest

from meshtrain.data import prepared, tokenizer
from meshtrain.data.prepare import inputs, streams, tokenize
from tests.lib.prepare import (
    TEXTS,
    content,
    documents,
    hugging_face,
    prose,
    run,
    sentence_piece,
    texts,
    write_jsonl,
)

# ---- the same output after any interruption ----


@pytest.mark.multiprocess
def test_workers_block_ctrl_c():
    """In a new process, in which Python has not yet started its process that tracks semaphores."""
    code = """
from functools import partial
from signal import SIG_BLOCK, SIGINT, pthread_sigmask
from meshtrain.data.prepare.tokenize import map_in_order

masks = list(map_in_order(partial(pthread_sigmask, SIG_BLOCK), [[], []], num_workers=2))
assert masks == [{SIGINT}] * 2, masks
assert pthread_sigmask(SIG_BLOCK, []) == set()"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_trained_tokenizer_is_not_reused_for_other_settings(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    flags = [write_jsonl(tmp_path / "in", [prose(0, 3000)]), f"--output={tmp_path / 'out'}"]
    with monkeypatch.context() as patched:
        patched.setattr(tokenize, "tokenize_unit", None)
        with pytest.raises(TypeError):
            run(*flags, "--train_bpe=300")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert run(*flags, "--train_bpe=310") == 0
    assert tokenizer.load(tmp_path / "out").vocab_size == 310


# ---- tokenizers ----


def test_a_long_text_in_pieces_has_the_same_tokens(tmp_path, monkeypatch):
    loaded = tokenizer.load(hugging_face(tmp_path / "t"))
    text = prose(3, 30_000)
    expected = loaded.encode_batch([text])[0].tolist()
    for size in (50, 777, 20_000):
        monkeypatch.setattr(tokenizer, "PIECE_CHARS", size)
        assert len(loaded.pieces(text)) > len(text) // (4 * size)
        assert "".join(loaded.pieces(text)) == text
        assert loaded.encode(text).tolist() == expected
    monkeypatch.setattr(streams, "CHUNK", 1000)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "long.txt").write_text(text, newline="")
    flags = [f"--output={tmp_path / 'out'}", f"--tokenizer={tmp_path / 't'}"]
    assert run(tmp_path / "in", *flags) == 0
    assert documents(tmp_path / "out") == [expected]


def test_a_trained_tokenizer_is_stored_used_and_reproducible(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    path = write_jsonl(tmp_path / "in", [prose(seed, 300) for seed in range(40)])
    for name in ("a", "b"):
        assert run(path, f"--output={tmp_path / name}", "--train_bpe=360") == 0
    assert content(tmp_path / "a") == content(tmp_path / "b")
    loaded = tokenizer.load(tmp_path / "a")
    assert loaded.vocab_size == 360 and loaded.eos == 0
    assert texts(tmp_path / "a") == [prose(seed, 300) for seed in range(40)]
    found = prepared.read_manifest(tmp_path / "a")
    assert found["dtype"] == "uint16"
    digest = hashlib.sha256((tmp_path / "a" / "tokenizer.json").read_bytes()).hexdigest()
    assert found["tokenizer"]["sha256"] == digest


def test_a_text_too_short_for_the_vocabulary_is_rejected(tmp_path, capsys):
    pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    path = write_jsonl(tmp_path / "in")
    assert run(path, f"--output={tmp_path / 'out'}", "--train_bpe=5000") == 2
    assert "--train_bpe=5000: the text is enough for only" in capsys.readouterr().err


def test_documents_begin_with_bos_if_requested(tmp_path):
    file = sentence_piece(tmp_path / "t")
    for name, flags in (("without", []), ("with", ["--bos"])):
        path = write_jsonl(tmp_path / "in")
        assert run(path, f"--output={tmp_path / name}", f"--tokenizer={file}", *flags) == 0
    bos = tokenizer.load(file).bos
    assert [[bos, *doc] for doc in documents(tmp_path / "without")] == documents(tmp_path / "with")
    for name in ("with", "without"):
        assert tokenizer.load(tmp_path / name).bos == bos
        assert tokenizer.has_bos(tmp_path / name) == (name == "with")
    assert texts(tmp_path / "with") == TEXTS


# ---- reading a prepared folder ----


def test_work_units_have_a_limited_size():
    record = inputs.Record("x" * (tokenize.UNIT_BYTES // 4), inputs.Position(), 0)
    assert [len(unit) for unit in tokenize.work_units([record] * 9)] == [4, 4, 1]
    assert os.environ.get("TOKENIZERS_PARALLELISM") in (None, "false")
