"""`meshtrain prepare --verify`: what it finds in a prepared folder."""

import json

import pytest

from meshtrain.errors import ConfigError
from tests.lib.prepare import build, hugging_face, run, write_jsonl


@pytest.mark.parametrize("file", ["00000.bin", "00001.idx"])
def test_verify_finds_a_changed_byte_and_loading_a_changed_size(tmp_path, capsys, file):
    out = tmp_path / "out"
    assert run(write_jsonl(tmp_path / "in"), f"--output={out}", "--shard_tokens=20") == 0
    assert run(f"--verify={out}") == 0 and "all 362 tokens are valid" in capsys.readouterr().out
    valid = (out / file).read_bytes()
    (out / file).write_bytes(valid[:-1] + bytes([valid[-1] ^ 1]))
    assert run(f"--verify={out}") == 2 and f"{file}: was changed" in capsys.readouterr().err
    (out / file).write_bytes(valid + b"x")
    with pytest.raises(ConfigError, match=f"{file} has {len(valid) + 1} bytes"):
        build(out)
    (out / file).unlink()
    with pytest.raises(ConfigError, match=f"{file} is missing"):
        build(out)


def test_verify_finds_another_tokenizer(tmp_path, capsys):
    out = tmp_path / "out"
    path, file = write_jsonl(tmp_path / "in"), hugging_face(tmp_path / "t")
    assert run(path, f"--output={out}", f"--tokenizer={file}") == 0
    assert run(f"--verify={out}") == 0
    (out / "tokenizer.json").write_text((out / "tokenizer.json").read_text() + " ")
    assert run(f"--verify={out}") == 2 and "tokenizer.json: was changed" in capsys.readouterr().err


def test_verify_checks_tokens_and_the_ends_of_documents(tmp_path, capsys):
    out = tmp_path / "out"
    assert run(write_jsonl(tmp_path / "in"), f"--output={out}") == 0
    found = json.loads((out / "manifest.json").read_text())
    found["tokenizer"] |= {"vocab_size": 200, "eos": 3}
    found["tokens"] += 1
    (out / "manifest.json").write_text(json.dumps(found))
    assert run(f"--verify={out}") == 2
    error = capsys.readouterr().err
    for part in (
        "00000.bin: at byte 37: token 230",
        "vocab_size 200",
        "document 0 ends with 0, not 3",
        "tokens=",
    ):
        assert part in error
