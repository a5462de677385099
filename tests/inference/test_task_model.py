"""Requests of tasks as rows for the model, and its answers; without the harness."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from meshtrain.config.build import RunParts, build_model, optimizer_builder
from meshtrain.config.parse import parse
from meshtrain.data import tokenizer as tokenizers
from meshtrain.errors import ConfigError
from meshtrain.inference import answers
from meshtrain.inference.answers import Answers
from meshtrain.inference.scores import NUM_CHOICES, Interrupted, Row, Scorer, Scores
from meshtrain.inference.task_model import TaskModel, rolling_windows
from meshtrain.inference.task_text import TaskText
from meshtrain.program import assemble
from tests.lib import hf
from tests.lib import tasks as lib


def logprob(before, token):
    """Returns the log-probability that the model below gives a token after others."""
    return -1.0 - 0.01 * (sum(before) + 7 * len(before)) - 0.001 * token


def score(rows, *, name, asked=None):
    for number, row in enumerate(rows):
        if asked is not None:
            asked.append(row)
        targets = [logprob(row.tokens[:i], row.tokens[i]) for i in range(1, len(row.tokens))]
        choices = [logprob(row.tokens, token) for token in row.choices]
        yield (
            number,
            Scores(
                logprobs=np.array(targets),
                is_best=np.array([token % 2 == 0 for token in row.tokens[1:]], bool),
                choice_logprobs=np.array(choices),
                choice_is_best=np.array([token % 2 == 0 for token in row.choices], bool),
            ),
        )


def model(asked=None, **fields):
    given = TaskModel(
        text=TaskText(tokenizers.load("bytes")),
        score=lambda rows, name: score(rows, name=name, asked=asked),
        generator=lambda sampling: None,
        context=8,
        batch=2,
        stop=frozenset({0}),
        sampling={},
        template=None,
        answers=Answers(),
        stop_requested=lambda: False,
    )
    return dataclasses.replace(given, **fields)


def plain(before, after, context):
    ids = [*before, *after][-(context + 1) :]
    start = len(ids) - len(after)
    total = sum(logprob(ids[:i], ids[i]) for i in range(start, len(ids)))
    return pytest.approx(total), all(token % 2 == 0 for token in after)


REQUESTS = [
    ([1, 2, 3], [4]),
    ([1, 2, 3], [5]),
    ([1, 2], [3, 4]),  # the same tokens, of which more are scored
    ([1, 2, 3], [4]),  # again
    ([9], [2, 4, 6]),
    ([1, 2, 3, 4, 5, 6, 7, 8, 9], [10]),  # one token more than the context
    ([1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 12]),
    ([1] * 20, [2] * 8),  # as many as the model sees
    ([3], []),
    *(([4, 4], [token]) for token in range(30)),
]


def test_requests_have_the_log_likelihoods_of_their_own():
    asked = []
    found = model(asked).log_likelihoods(REQUESTS, "")
    for (before, after), scored in zip(REQUESTS, found, strict=True):
        if after:
            assert (scored.logprob, scored.is_greedy) == plain(before, after, 8)
    assert tuple(found[8]) == (0.0, True)
    # Requests with the same tokens before the last share a row.
    rows = [row.tokens for row in asked]
    assert rows.count((1, 2, 3)) == 1 and rows.count((4, 4)) == -(-30 // NUM_CHOICES)
    assert all(len(row.choices) <= NUM_CHOICES for row in asked)


def test_an_answer_longer_than_the_context_is_a_fault():
    with pytest.raises(ConfigError, match="has 9 tokens, and the model sees 8; use --context=9"):
        model().log_likelihoods([([1], [2] * 9)], "")


@pytest.mark.parametrize("stride", [1, 3, 8])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 17, 30])
def test_each_token_of_a_text_is_scored_once(size, stride):
    tokens = list(range(1, size + 1))
    windows = list(rolling_windows(tokens, 0, 8, stride))
    assert [token for _, after in windows for token in after] == tokens
    for number, (before, after) in enumerate(windows):
        assert len(before) + len(after) <= 9 and before
        if number:
            assert len(before) + len(after) == 9 and len(after) <= stride
    (found,) = model().rolling_log_likelihoods([tokens], stride, "")
    expected = sum(
        logprob([*before, *after[:i]], after[i])
        for before, after in windows
        for i in range(len(after))
    )
    assert found == pytest.approx(expected)


def test_windows_are_those_of_the_harness():
    utils = pytest.importorskip("lm_eval.utils", reason="needs the extra `evals`")
    for size in range(1, 40):
        tokens = list(range(1, size + 1))
        theirs = utils.get_rolling_token_windows(tokens, 99, 8, 1)
        expected = [utils.make_disjoint_window(pair) for pair in theirs]
        assert list(rolling_windows(tokens, 99, 8, 8)) == expected


# ---- generation ----


def writer(texts, prompts_seen, streams=None):
    """Returns a generator that writes these texts, one per prompt, in the bytes tokenizer."""
    streams = [] if streams is None else streams

    def run(prompts, *, length, stop, ended, stream):
        streams.append(stream)
        prompts_seen.append([bytes(prompt).decode() for prompt in prompts])
        rows = [texts[bytes(prompt).decode()].encode() for prompt in prompts]
        for step in range(length):
            newest = []
            for number, row in enumerate(rows):
                is_over = number in ended or 0 in row[: min(step, len(row))]
                newest.append(None if is_over else row[step] if step < len(row) else 46)
            if all(token is None for token in newest):
                return
            yield newest

    return lambda sampling: run


TEXTS = {"a": "xyzSTOPuvw", "b": "12\x00345", "c": "", "d": "SSTOP"}


def test_texts_end_before_a_stop_text_and_at_the_end_of_a_document():
    seen = []
    given = model(generator=writer(TEXTS, seen), context=20)
    ask = dict(length=12, stop_texts=["STOP", "uv"], settings={"do_sample": False}, name="")
    found = given.generate(["a", "b", "c", "a", "d"], **ask)
    assert found == ["xyz", "12", "." * 12, "xyz", "S"]
    # The same prompt is continued once; the last batch is filled.
    assert [len(prompts) for prompts in seen] == [2, 2]


def test_a_prompt_loses_its_beginning():
    seen = []
    given = model(generator=writer({"fgh": "ok"}, seen), context=5)
    ask = dict(length=2, stop_texts=[], settings={}, name="")
    assert given.generate(["abcdefgh"], **ask) == ["ok"]
    with pytest.raises(ConfigError, match="max_gen_toks=5 leaves no room"):
        given.generate(["a"], **{**ask, "length": 5})


def test_sampled_texts_are_not_shared():
    seen, streams = [], []
    given = model(generator=writer(TEXTS, seen, streams), context=20)
    settings = {"do_sample": True, "temperature": 0.5}
    given.generate(["a"] * 4, length=12, stop_texts=[], settings=settings, name="")
    assert seen == [["a", "a"]] * 2
    # Otherwise the first texts of both batches would be the same.
    assert len({*streams}) == 2


@pytest.mark.parametrize("settings", [{"num_beams": 4}, {"typical_p": 0.9}])
def test_settings_that_would_be_ignored_are_a_fault(settings):
    with pytest.raises(ConfigError, match=f"generation_kwargs has {[*settings][0]}="):
        model(context=20).generate(["a"], length=2, stop_texts=[], settings=settings, name="")


def test_sampling_is_that_of_the_task_then_of_the_model():
    used = []

    def generator(sampling):
        used.append(sampling)
        return writer(TEXTS, [])(sampling)

    own = {"repetition_penalty": 1.3, "temperature": 0.8, "top_k": 5}
    given = model(generator=generator, context=20, sampling=own)
    for settings in ({}, {"do_sample": True, "temperature": 0.4, "top_k": 7}):
        given.generate(["a"], length=2, stop_texts=[], settings=settings, name="")
    assert [(one.temperature, one.top_k, one.repetition_penalty) for one in used] == [
        (0.0, 5, 1.3),
        (0.4, 7, 1.3),
    ]


def test_a_stop_is_asked_for_between_batches():
    seen = []
    given = model(generator=writer(TEXTS, seen), context=20, stop_requested=lambda: True)
    with pytest.raises(Interrupted):
        given.generate(["a", "b", "c"], length=2, stop_texts=[], settings={}, name="")
    assert len(seen) == 1


# ---- answers in a file ----


def test_answers_are_kept_for_the_same_model(tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "LINES_AT_ONCE", 2)
    file = tmp_path / "folder" / "answers"
    asked = []
    first = model(asked, answers=Answers(file, identity="one")).log_likelihoods(REQUESTS, "")
    num_asked = len(asked)
    with open(file, "ab") as opened:
        opened.write(b'{"key": "half')  # of a process that was killed
    again = model(asked, answers=Answers(file, identity="one")).log_likelihoods(REQUESTS, "")
    assert again == first and len(asked) == num_asked
    more = [*REQUESTS, ([5, 5], [6])]
    model(asked, answers=Answers(file, identity="one")).log_likelihoods(more, "")
    assert len(asked) == num_asked + 1
    assert model(asked, answers=Answers(file, identity="one")).log_likelihoods(more, "")
    assert len(asked) == num_asked + 1
    model(asked, answers=Answers(file, identity="other")).log_likelihoods(REQUESTS, "")
    assert len(asked) == 2 * num_asked + 1


def test_a_file_that_cannot_be_written_is_a_fault(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--cache=.*: File exists; use another file"):
        Answers(tmp_path / "file" / "answers")


# ---- scores ----


def rows_of_all_lengths():
    random = np.random.default_rng(0)
    rows = []
    for length, num_choices in ((1, 3), (5, 0), (64, 1), (65, 8), (70, 2), (100, 4), (99, 0)):
        tokens = random.integers(lib.VOCAB_SIZE, size=length)
        choices = random.integers(lib.VOCAB_SIZE, size=num_choices)
        rows.append(Row(tuple(tokens.tolist()), tuple(choices.tolist())))
    return rows * 3


LAYOUTS = [
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"pipeline": 2, "data": 4},
    pytest.param({"context": 4, "data": 2}, marks=pytest.mark.slow),
    pytest.param({"data": 8}, marks=pytest.mark.slow),
    pytest.param({"pipeline": 2, "tensor": 2, "fsdp": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_plain_logits_on_every_mesh(layout):
    c = lib.config(model={"max_seq_len": 128, "loss_chunk_mib": 0.4}, data={"seq_len": 128})
    c.mesh.update({"data": 1, **layout})
    c.train.num_microbatches = 2
    c.train.global_batch = 16
    cfg = parse(c, num_devices=8)
    built = build_model(cfg)
    program = assemble(cfg, RunParts(built, optimizer_builder(cfg, built)))
    params = program.initial_state(0).params
    on_host = jax.device_get(params)
    plain_logits = jax.jit(lambda tokens: hf.logits(built, on_host, tokens))
    rows = rows_of_all_lengths()
    # A row whose tokens are the most likely ones.
    tokens = np.zeros((1, 128), np.int32)
    for position in range(8):
        tokens[0, position + 1] = plain_logits(tokens)[0, position].argmax()
    greedy = tokens[0, :9].tolist()
    rows.append(Row(tuple(greedy[:-1]), (greedy[-1], 5)))
    scorer = Scorer(cfg, program, context=100, batch=16)
    found = dict(scorer.score(params, rows, name=""))
    assert [*sorted(found)] == [*range(len(rows))]
    # Rows of 1 to 64 tokens, and longer ones, of which fewer fit at a time.
    assert len(scorer._compiled) == 2

    assert found[len(rows) - 1].is_best.all()
    assert found[len(rows) - 1].choice_is_best.tolist() == [True, False]
    for number, row in enumerate(rows):
        tokens = np.zeros((1, 128), np.int32)
        tokens[0, : len(row.tokens)] = row.tokens
        logits = np.asarray(plain_logits(tokens), np.float64)[0, : len(row.tokens)]
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        best = logits.argmax(-1)
        scores = found[number]
        targets = list(row.tokens[1:])
        expected = logprobs[np.arange(len(targets)), targets]
        np.testing.assert_allclose(scores.logprobs, expected, atol=1e-5)
        np.testing.assert_array_equal(scores.is_best, best[:-1] == targets)
        np.testing.assert_allclose(
            scores.choice_logprobs, logprobs[-1, list(row.choices)], atol=1e-5
        )
        np.testing.assert_array_equal(scores.choice_is_best, best[-1] == list(row.choices))


@pytest.mark.parametrize("family", ["llama3", "gpt2", "gemma2", "mixtral"])
def test_scores_are_those_of_transformers(family):
    """The logits of the golden folders are of transformers."""
    folder = hf.GOLDEN / family
    golden = np.load(folder / "logits.npz")
    logits = golden["logits"].astype(np.float64)
    built, params = hf.load(folder)
    c = lib.config()
    c.mesh.update(data=1, fsdp=8)
    c.model.vocab_size = logits.shape[-1]
    cfg = parse(c, num_devices=8)
    program = assemble(cfg, RunParts(built, optimizer_builder(cfg, built)))
    rows = [Row(tuple(tokens.tolist()), (1, 2, 3)) for tokens in golden["tokens"]]
    with jax.default_matmul_precision("highest"):
        scorer = Scorer(cfg, program, context=golden["tokens"].shape[1], batch=8)
        found = dict(scorer.score(params, rows, name=""))
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    for number, row in enumerate(rows):
        positions = np.arange(len(row.tokens) - 1)
        expected = logits[number, positions, row.tokens[1:]] - log_z[number, :-1]
        np.testing.assert_allclose(found[number].logprobs, expected, atol=1e-4)
        last = logits[number, -1, [1, 2, 3]] - log_z[number, -1]
        np.testing.assert_allclose(found[number].choice_logprobs, last, atol=1e-4)


def test_text_begins_as_its_tokenizer_says(tmp_path):
    folder = lib.tokenizer(tmp_path / "tokenizer")
    text = TaskText(tokenizers.load(folder))
    plain_ids = tokenizers.load(folder).encode("the sun").tolist()
    bos = text.prefix
    assert text.encode("the sun") == [bos, *plain_ids]
    assert text.encode("the sun", special=False) == plain_ids
    # A text that is a chat already begins with it.
    assert text.encode("<s>the sun") == [bos, *plain_ids]
    assert text.decode([bos, *plain_ids, text.end]) == "the sun"
    assert TaskText(tokenizers.load(folder), bos=False).encode("the sun") == plain_ids
    # As in transformers 5, the key of tokenizer_config.json changes nothing.
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["add_bos_token"] = False
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert TaskText(tokenizers.load(folder)).encode("the sun") == [bos, *plain_ids]
    with pytest.raises(ConfigError, match="--bos: tokenizer bytes has no begin-of-document"):
        TaskText(tokenizers.load("bytes"), bos=True)


def test_a_text_without_context_follows_the_token_that_transformers_takes(tmp_path):
    folder = lib.tokenizer(tmp_path / "tokenizer")
    bos, eos = tokenizers.load(folder).bos, tokenizers.load(folder).eos
    file = folder / "tokenizer_config.json"
    named = json.loads(file.read_text())

    def prefix(settings, **options):
        file.write_text(json.dumps(settings))
        return TaskText(tokenizers.load(folder), **options).prefix

    unnamed = {key: value for key, value in named.items() if key != "bos_token"}
    assert prefix(named) == bos
    # The vocabulary has <s>, but nothing says that it begins documents.
    assert prefix(unnamed) == eos
    assert prefix({**unnamed, "bos_token": None}) == eos
    assert prefix(unnamed, bos=True) == bos
    # A chat does not begin with it either.
    text = TaskText(tokenizers.load(folder))
    assert text.encode("<s>sun") == [bos, bos, *text.encode("sun", special=False)]
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    assert prefix(unnamed) == bos
    (folder / "special_tokens_map.json").unlink()
    file.unlink()
    assert TaskText(tokenizers.load(folder)).prefix == bos
