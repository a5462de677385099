"""A prepared folder as a source."""

import json

import numpy as np
import pytest

from meshtrain.data import prepared
from meshtrain.errors import ConfigError
from tests.lib.prepare import TEXTS, build, hugging_face, prose, run, write_jsonl


def test_a_prepared_folder_is_a_source_with_token_bytes(tmp_path):
    path = write_jsonl(tmp_path / "in")
    assert run(path, f"--output={tmp_path / 'out'}", "--shard_tokens=20") == 0
    source = build(tmp_path / "out")
    assert len(prepared.read_manifest(tmp_path / "out")["shards"]) > 2
    assert source.token_bytes.tolist() == [0] + [1] * 255 and "6 documents" in source.description
    rows = source.read(np.arange(source.size))
    stream = b"".join(text.encode() + b"\0" for text in TEXTS)
    assert sorted(bytes(row.astype(np.uint8)) for row in rows.tokens) == sorted(
        stream[at : at + 4] for at in range(0, 4 * source.size, 4)
    )


def test_a_small_vocabulary_and_different_tokenizers_are_rejected_at_once(tmp_path):
    path = write_jsonl(tmp_path / "in", [prose(1, 2000)])
    assert run(path, f"--output={tmp_path / 'a'}") == 0
    file = hugging_face(tmp_path / "t")
    assert run(path, f"--output={tmp_path / 'b'}", f"--tokenizer={file}") == 0
    with pytest.raises(
        ConfigError, match="data.vocab_size=256 is less than the 320.*model.vocab_size=320"
    ):
        build(tmp_path / "b")
    pairs = ((str(tmp_path / "a"), 1), (str(tmp_path / "b"), 1))
    with pytest.raises(ConfigError, match="data.mixture: .*b has another tokenizer than .*a"):
        build("", mixture=pairs, vocab_size=320)


@pytest.mark.parametrize("damage", ["truncated", "wrong shape", "missing"])
def test_a_corrupt_token_bytes_file_is_rejected(tmp_path, capsys, damage):
    out = tmp_path / "out"
    assert run(write_jsonl(tmp_path / "in"), f"--output={out}") == 0
    path = out / "token_bytes.npy"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "missing":
        path.unlink()
    else:
        np.save(path, np.ones(255, np.int32))
    with pytest.raises(ConfigError, match="token_bytes.npy: cannot be read: .*; copy it again"):
        build(out)
    assert run(f"--verify={out}") == 2 and "token_bytes.npy: cannot" in capsys.readouterr().err


def test_an_empty_path_does_not_read_the_manifest_of_the_working_directory(tmp_path, monkeypatch):
    assert run(write_jsonl(tmp_path / "in"), f"--output={tmp_path / 'out'}") == 0
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(ConfigError, match="data.path=: no such file"):
        build("")


@pytest.mark.parametrize("text", ["", "{}", '{"version": 9}', '{"version": 1}', "[]", "\0"])
def test_a_corrupt_manifest_is_rejected(tmp_path, text):
    assert run(write_jsonl(tmp_path / "in"), f"--output={tmp_path / 'out'}") == 0
    (tmp_path / "out" / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match="manifest.json"):
        build(tmp_path / "out")


HOSTILE = {
    "a path out of the folder": lambda m: m["shards"][0].update(name="../out/00000"),
    "an absolute path": lambda m: m["shards"][0].update(name="/etc/passwd"),
    "a NUL": lambda m: m["shards"][0].update(name="0\0"),
    "a tokenizer elsewhere": lambda m: m["tokenizer"].update(file="../tokenizer.json"),
    "no vocabulary": lambda m: m["tokenizer"].update(vocab_size=0),
    "a vocabulary of gigabytes": lambda m: m["tokenizer"].update(vocab_size=2**40),
    "a token outside the vocabulary": lambda m: m["tokenizer"].update(eos=256),
    "a text as bos": lambda m: m["tokenizer"].update(bos="<s>"),
    "a list as the tokenizer": lambda m: m.update(tokenizer=[1]),
    "a negative count": lambda m: m["shards"][0].update(tokens=-1),
    "a size of no number": lambda m: m["shards"][0]["files"]["bin"].update(size=None),
    "no shards": lambda m: m.update(shards=None),
    "numbers as shards": lambda m: m.update(shards=[1]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_one_line(tmp_path, capsys, case):
    out = tmp_path / "out"
    assert run(write_jsonl(tmp_path / "in"), f"--output={out}") == 0
    manifest = json.loads((out / prepared.MANIFEST).read_text())
    HOSTILE[case](manifest)
    (out / prepared.MANIFEST).write_text(json.dumps(manifest))
    capsys.readouterr()
    with pytest.raises(ConfigError, match="manifest.json: is corrupt: "):
        build(out)
    assert run(f"--verify={out}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "manifest.json: is corrupt: " in line


def test_an_array_of_token_bytes_that_claims_gigabytes_is_rejected(tmp_path):
    """Its header says 2^40 tokens, and nothing follows."""
    out = tmp_path / "out"
    assert run(write_jsonl(tmp_path / "in"), f"--output={out}") == 0
    path = out / prepared.TOKEN_BYTES
    headers = {
        "shape": "{'descr': '<i4', 'fortran_order': False, 'shape': (1099511627776,)}",
        "nesting": "(" * 5000,
        "signs": "-" * 5000 + "1",
        "objects": "{'descr': '|O', 'fortran_order': False, 'shape': (256,)}",
        "floats": "{'descr': '<f4', 'fortran_order': False, 'shape': (256,)}",
    }
    for header in headers.values():
        size = len(header).to_bytes(2, "little")
        path.write_bytes(b"\x93NUMPY\x01\x00" + size + header.encode() + bytes(1024))
        with pytest.raises(ConfigError, match="token_bytes.npy: cannot be read: ") as caught:
            build(out)
        assert len(str(caught.value)) < 500
