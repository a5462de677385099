"""Windows that overlap: `eval.stride`, and the windows in the documentation of transformers."""

import jax
import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.config.build import build_model
from meshtrain.config.parse import parse
from meshtrain.data import tokens
from meshtrain.data.source import with_stride
from meshtrain.errors import ConfigError
from meshtrain.train import train
from tests.lib import hf
from tests.lib.configs import tiny_config


def source(path, stride, *, seq_len=8, split="train", heldout=0.0, separator=-1, **settings):
    built = tokens.build(
        path=str(path),
        dtype="uint8",
        pattern="*.txt",
        exclude=(),
        seq_len=seq_len,
        vocab_size=256,
        separator=separator,
        heldout=heldout,
        seed=0,
        split=split,
        **settings,
    )
    return with_stride(built, stride)


def windows_of_transformers(num_tokens, max_length, stride):
    """Yields (begin, end, first target) as `perplexity.md` of transformers has its loop."""
    previous_end = 0
    for begin in range(0, num_tokens, stride):
        end = min(begin + max_length, num_tokens)
        # The labels are shifted: the first token of the text has none before it.
        yield begin, end, max(previous_end, 1)
        previous_end = end
        if end == num_tokens:
            break


@pytest.mark.parametrize(
    ("num_tokens", "stride"),
    [(9, 3), (9, 7), (10, 1), (29, 3), (30, 7), (31, 1), (40, 4)],
)
def test_the_windows_are_those_of_transformers(num_tokens, stride, tmp_path):
    stream = np.arange(1, num_tokens + 1, dtype=np.uint8)
    stream.tofile(tmp_path / "text.bin")
    data = source(tmp_path / "text.bin", stride)
    found = []
    rows = data.read(np.arange(data.size))
    for row in range(data.size):
        counted = np.flatnonzero(rows.weights[row])
        targets = rows.targets[row][counted].tolist()
        seen = rows.tokens[row][: counted[-1] + 1].tolist()
        found.append((seen, targets))
    expected = []
    for begin, end, first in windows_of_transformers(num_tokens, 8, stride):
        # The last token of a window is a target only.
        expected.append((stream[begin : end - 1].tolist(), stream[first:end].tolist()))
    assert sorted(found) == sorted(expected)


def test_no_token_of_another_split_is_counted(tmp_path):
    stream = np.arange(1, 101, dtype=np.uint8)
    stream.tofile(tmp_path / "text.bin")
    for split, expected in (("train", stream[1:75]), ("heldout", stream[76:])):
        data = source(tmp_path / "text.bin", 5, split=split, heldout=0.25)
        rows = data.read(np.arange(data.size))
        assert sorted(rows.targets[rows.weights > 0]) == expected.tolist()


def test_documents_are_segments(tmp_path):
    texts = ["abcdefghijk", "lmn", "opqrstuvwxyzABCDEF"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    texts = [text + "\0" for text in texts]  # the end of a document
    data = source(tmp_path, 3)
    rows = data.read(np.arange(data.size))
    counted = "".join(map(chr, rows.targets[rows.weights > 0]))
    # All but the first of each document.
    assert sorted(counted) == sorted("".join(text[1:] for text in texts))
    for row in range(data.size):
        for column in np.flatnonzero(rows.weights[row]):
            seen = rows.segments[row] == rows.segments[row, column]
            seen[column + 1 :] = False
            context = "".join(map(chr, rows.tokens[row][seen]))
            target = chr(rows.targets[row, column])
            assert any(context + target in text for text in texts)


def test_a_separator_splits_windows_too(tmp_path):
    np.frombuffer(b"abc\0defgh\0ijklmnop", np.uint8).tofile(tmp_path / "text.bin")
    data = source(tmp_path / "text.bin", 2, separator=0)
    rows = data.read(np.arange(data.size))
    counted = bytes(rows.targets[rows.weights > 0].astype(np.uint8).tolist())
    assert sorted(counted) == sorted(b"bc\0efgh\0jklmnop")


@pytest.mark.parametrize("stride", [8, 9])
def test_windows_without_overlap_are_a_fault(stride, tmp_path):
    np.arange(1, 60, dtype=np.uint8).tofile(tmp_path / "text.bin")
    with pytest.raises(ConfigError, match=f"eval.stride={stride}: .*seq_len=8.* use 1 to 7"):
        source(tmp_path / "text.bin", stride)


def test_rows_of_complete_documents_have_no_stride(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghijk")
    with pytest.raises(ConfigError, match="eval.stride=3: this data is no stream"):
        source(tmp_path, 3, packing="best_fit")


def test_the_evaluation_is_the_perplexity_of_sliding_windows(tmp_path, capsys):
    """Of the verb, of a run, and of a loop with plain logits."""
    text = np.random.default_rng(0).integers(1, 64, 300).astype(np.uint8)
    text.tofile(tmp_path / "text.bin")
    c = tiny_config()
    c.train.steps = 0
    c.data.build = "meshtrain.data.tokens:build"
    c.data.update(path=str(tmp_path / "text.bin"), dtype="uint8", heldout=0.3)
    c.eval.update(batches=100, stride=5)
    result = train(c, workdir=tmp_path / "run")

    heldout = text[-90:].astype(np.int32)
    model, params = build_model(parse(c)), jax.device_get(result.state.params)
    compiled = jax.jit(lambda tokens: jax.nn.log_softmax(hf.logits(model, params, tokens)))
    nats = []
    for begin, end, first in windows_of_transformers(len(heldout), 16, 5):
        window = np.zeros((1, 16), np.int32)
        window[0, : end - begin] = heldout[begin:end]
        logprobs = np.asarray(compiled(window))[0]
        for position in range(first, end):
            nats.append(-logprobs[position - begin - 1, heldout[position]])
    assert len(nats) == 89
    assert result.eval_loss == pytest.approx(np.mean(nats), rel=1e-5)

    capsys.readouterr()
    assert app.main("evaluate", [f"--workdir={tmp_path / 'run'}", "--stride=5"]) == 0
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert printed["tokens"] == "89"
    assert float(printed["loss"].split()[0]) == pytest.approx(np.mean(nats), abs=1e-5)
