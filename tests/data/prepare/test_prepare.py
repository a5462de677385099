"""`meshtrain prepare`: wrong flags and missing packages are one line."""

import sys

import pytest

from tests.lib.prepare import run, write_jsonl


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["missing.txt", "--output=o"], ["missing.txt: no such file or folder"]),
        (["--output=o"], ["no input; give files"]),
        (["x.txt"], ["--output is missing"]),
        (["x.txt", "--output=o", "--shard_tokens=0"], ["--shard_tokens=0: use 1 or more"]),
        (["x.txt", "--output=o", "--num_workers=0"], ["--num_workers=0"]),
        (["x.txt", "--output=o", "--train_bpe=10"], ["--train_bpe=10: use 257 or more"]),
        (["x.txt", "--output=o", "--tokenizer=nope.json"], ["tokenizer nope.json: no such file"]),
        (["x.txt", "--output=o", "--train_bpe=300", "--tokenizer=t"], ["give one of them"]),
        (["x.txt", "--output=o", "--eos=<s>"], ["--eos=<s>: tokenizer bytes has no such token"]),
        (["x.txt", "--output=o", "--bos"], ["--bos: --tokenizer=bytes has no token"]),
        (["empty.txt", "--output=o"], ["the inputs contain no document"]),
        (["empty", "--output=o"], ["empty: no files in it end in .txt"]),
        (["empty", "--output=o", "--pattern=*.x"], ["match --pattern=*.x"]),
        (["x.txt", "--output=x.txt"], ["--output=x.txt: "]),
        (
            ["x.txt", "--output=o", "--tokenizer=x.txt"],
            ["tokenizer x.txt is not a SentencePiece model"],
        ),
        (
            ["x.txt", "--output=o", "--tokenizer=bad.json"],
            ["tokenizer bad.json is not a tokenizer.json"],
        ),
        (["x.txt", "--output=o", "--what=1"], ["--what: unknown argument"]),
        (["--verify=empty"], ["--verify=empty: no manifest.json there"]),
    ],
)
def test_the_error_for_a_wrong_flag_names_it(tmp_path, capsys, monkeypatch, flags, expected):
    if "x.txt is not" in expected[0] or "bad.json" in expected[0]:
        pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
        pytest.importorskip("sentencepiece", reason="needs the extra `tokenizers`")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("hello")
    (tmp_path / "bad.json").write_text('{"a": 1}')
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty").mkdir()
    assert run(*flags) == 2
    error = capsys.readouterr().err
    assert [part for part in expected if part not in error] == [] and "Traceback" not in error


def test_the_error_for_a_missing_package_has_the_install_command(tmp_path, capsys, monkeypatch):
    path = write_jsonl(tmp_path / "in")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert run(path, f"--output={tmp_path / 'out'}", "--train_bpe=300") == 2
    error = capsys.readouterr().err
    assert "tokenizers is missing; in a checkout: bash launch/setup.sh tokenizers; " in error
    assert "elsewhere: pip install 'PATH_OR_URL[tokenizers]'" in error
