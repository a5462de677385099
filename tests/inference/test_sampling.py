"""Cached sampling draws the same tokens as a full forward pass over the text for each token."""

import dataclasses
import importlib.util
import itertools

import jax
import numpy as np
import pytest

from meshtrain import ConfigError
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.data.source import Batch
from meshtrain.inference import sampling
from meshtrain.inference.sampling import Sampling, generate
from meshtrain.models import transformer
from meshtrain.program import assemble
from meshtrain.tools.verify.reference import step as reference_step
from tests.lib.configs import tiny_config
from tests.lib.families import FAMILIES

PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [60, 3, 60, 3]]
GREEDY = Sampling(temperature=0.0)
MIXED = FAMILIES["gemma 2"]


def build_program(model, **layout):
    """Returns a program on a mesh, and parameters so large that its logits are far from uniform."""
    c = tiny_config()
    c.model.update({"max_seq_len": 64, **model})
    c.mesh.update({"data": 1, **layout})
    num_devices = int(np.prod(list(layout.values()) or [1]))
    cfg = parse(c, num_devices=num_devices)
    parts = build(cfg)
    program = assemble(cfg, parts, devices=jax.devices()[:num_devices])
    with program.active():
        params = program.initial_state(0).params
        shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
        grow = jax.jit(lambda p: jax.tree.map(lambda leaf: 4 * leaf, p), out_shardings=shardings)
        return program, grow(params)


def sampled_rows(
    program, params, prompts=PROMPTS, *, length=12, context=64, sampling=GREEDY, stop=()
):
    options = dict(length=length, context=context, dtype="float32", sampling=sampling, stop=stop)
    steps = generate(program, params, prompts, **options)
    return [list(row) for row in zip(*steps, strict=True)]


def greedy_uncached(program, params, prompt, length, width=64):
    """Returns the most likely tokens, each from a full forward pass over the text so far."""
    params = jax.device_get(params)

    @jax.jit
    def logits(params, tokens, last):
        batch = Batch(tokens, tokens, np.ones(tokens.shape, np.float32))
        x = reference_step.apply_blocks(program.model, params, batch)
        return program.model.logits(params, x)[0, last]

    text = list(prompt)
    for _ in range(length):
        row = np.zeros((1, width), np.int32)
        row[0, : len(text)] = text
        text.append(int(np.argmax(logits(params, row, len(text) - 1))))
    return text[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama 3", "gemma 3", "gpt-2", "mistral"])
@pytest.mark.parametrize("attention_impl", ["xla", "blockwise"])
def test_cached_sampling_matches_full_forward_passes(family, attention_impl):
    program, params = build_program({**FAMILIES[family], "attention_impl": attention_impl})
    expected = [greedy_uncached(program, params, prompt, 12) for prompt in PROMPTS]
    assert sampled_rows(program, params) == expected
    assert (
        len({*expected[0], *expected[1], *expected[2]}) > 4
    )  # the model does not repeat a single token


def test_prefill_uses_the_configured_attention_and_decoding_uses_xla(monkeypatch):
    program, params = build_program({"attention_impl": "blockwise"})
    calls, real = set(), transformer.attention

    def recorded(q_BSHK, *args, implementation="xla", **options):
        calls.add((q_BSHK.shape[1] > 1, implementation))
        return real(q_BSHK, *args, implementation=implementation, **options)

    monkeypatch.setattr(transformer, "attention", recorded)
    sampled_rows(program, params, length=2)
    assert calls == {(True, "blockwise"), (False, "xla")}


@pytest.mark.parametrize(
    ("layout", "sampling"),
    [
        pytest.param({"tensor": 2}, GREEDY, marks=pytest.mark.slow),
        # three rows on four devices
        pytest.param({"fsdp": 4}, GREEDY, marks=pytest.mark.slow),
        ({"data": 2, "fsdp": 2, "tensor": 2}, Sampling(1.5, top_k=20, top_p=0.9, seed=3)),
    ],
    ids=str,
)
@pytest.mark.slow
def test_every_mesh_samples_the_same_tokens(layout, sampling):
    program, params = build_program(MIXED)
    alone = sampled_rows(program, params, sampling=sampling)
    if sampling == GREEDY:
        assert alone == [greedy_uncached(program, params, prompt, 12) for prompt in PROMPTS]
    assert sampled_rows(*build_program(MIXED, **layout), sampling=sampling) == alone


@pytest.mark.slow
def test_a_full_context_is_replaced_by_its_newer_half():
    program, params = build_program({}, tensor=2)
    prompt = list(range(20))
    first = greedy_uncached(program, params, prompt, 13)  # 20 + 12 fill a context of 32
    second = greedy_uncached(program, params, [*prompt, *first][-16:], 17)
    third = greedy_uncached(program, params, [*prompt, *first, *second][-16:], 4)
    (row,) = sampled_rows(program, params, [prompt], length=34, context=32)
    assert row == [*first, *second, *third]
    (long,) = sampled_rows(program, params, [list(range(50))], length=1, context=32)
    assert long == greedy_uncached(program, params, list(range(50))[-32:], 1)


CAPPED = {"num_experts": 8, "d_expert": 24, "capacity_factor": 0.5}


def test_padding_of_a_shorter_prompt_takes_no_capacity_of_experts():
    program, params = build_program(CAPPED)
    _, long, short = PROMPTS
    (alone,) = sampled_rows(program, params, [short])
    assert alone[:1] == greedy_uncached(program, params, short, 1, width=len(short))
    assert sampled_rows(program, params, [short, long])[0] == alone


@pytest.mark.slow
def test_an_expert_accepts_the_same_tokens_if_the_mesh_has_a_context():
    prompts = [list(range(16)), [7, 1, 5]]
    alone = sampled_rows(*build_program(CAPPED), prompts)
    assert sampled_rows(*build_program(CAPPED, context=2), prompts) == alone


def test_a_long_row_does_not_shorten_the_context_of_others():
    program, params = build_program({})
    prompts = [list(range(50)), [7, 1, 5], list(range(30, 10, -1))]
    alone = [
        sampled_rows(program, params, [prompt], length=40, context=32)[0] for prompt in prompts
    ]
    assert sampled_rows(program, params, prompts, length=40, context=32) == alone
    # The same if the row that fills the cache first has ended.
    prompts[0] = prompts[0][:26]
    (first,) = sampled_rows(program, params, prompts[:1], length=5, context=32)
    stop = next(token for token in first if token not in alone[1])
    found = sampled_rows(program, params, prompts[:2], length=40, context=32, stop=[stop])
    assert found[0][-1] is None and found[1] == alone[1]


def test_a_stop_token_ends_its_row_only():
    program, params = build_program(MIXED)
    unstopped = sampled_rows(program, params)
    stop = next(token for token in unstopped[1] if token not in unstopped[0])
    rows = sampled_rows(program, params, stop=[stop])
    end = unstopped[1].index(stop)
    assert rows[0] == unstopped[0]
    assert rows[1] == unstopped[1][:end] + [None] * (12 - end)
    (alone,) = sampled_rows(program, params, PROMPTS[1:2], stop=[stop])
    assert alone == unstopped[1][:end] + [None]


def test_a_row_depends_on_the_seed_but_not_on_other_rows():
    program, params = build_program({})
    settings = Sampling(temperature=3.0, seed=1)
    (alone,) = sampled_rows(program, params, PROMPTS[:1], sampling=settings)
    assert sampled_rows(program, params, sampling=settings)[0] == alone
    assert sampled_rows(program, params, PROMPTS[:1], sampling=Sampling(3.0, seed=2)) != [alone]


# ---- the sampling distribution ----


LOGITS = np.log([[0.5, 0.3, 0.15, 0.05]]).astype(np.float32)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(top_k=2), [0.625, 0.375, 0, 0]),
        (Sampling(top_k=9), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(top_p=0.79), [0.625, 0.375, 0, 0]),
        (Sampling(top_p=0.81), [10 / 19, 6 / 19, 3 / 19, 0]),
        (Sampling(top_p=0.01), [1, 0, 0, 0]),
        (Sampling(top_k=3, top_p=0.5), [1, 0, 0, 0]),  # 0.526 of the probability after top_k
        (Sampling(temperature=0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        (Sampling(temperature=0), [1, 0, 0, 0]),
        (Sampling(temperature=1e-40), [1, 0, 0, 0]),
        (Sampling(vocab_size=2), [0.625, 0.375, 0, 0]),
        (Sampling(min_p=0.55), [0.625, 0.375, 0, 0]),
        (Sampling(min_p=0.2), [10 / 19, 6 / 19, 3 / 19, 0]),
        (Sampling(min_p=0.2, top_p=0.7), [0.625, 0.375, 0, 0]),
        (Sampling(min_p=1.0), [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_token_frequencies_match_the_probabilities(sampling, expected):
    draw = jax.jit(jax.vmap(lambda number: sampling.draw(LOGITS, number)[0]))
    drawn = np.bincount(draw(np.arange(20_000)), minlength=4) / 20_000
    np.testing.assert_allclose(drawn, expected, atol=0.02)
    assert not drawn[np.array(expected) == 0].any()


def kept_by_transformers(logits, top_k, top_p):
    """Returns which tokens its TopKLogitsWarper and then its TopPLogitsWarper keep, in float64."""
    logits = logits.astype(np.float64)
    if top_k:
        logits[logits < np.sort(logits)[-top_k]] = -np.inf
    order = np.argsort(logits, kind="stable")
    probs = np.exp(logits[order] - logits.max())
    is_removed = np.round(np.cumsum(probs / probs.sum()), 9) <= round(1 - top_p, 9)
    is_removed[-1] = False
    kept = logits > -np.inf
    kept[order[is_removed]] = False
    return kept


@pytest.mark.parametrize("top_k", [0, 3, 7])
@pytest.mark.parametrize("top_p", [0.001, 0.25, 0.5, 0.9, 1.0])
def test_of_equally_likely_tokens_those_of_transformers_are_kept(top_k, top_p):
    rows = np.zeros((3, 200), np.float32)
    rows[1] = np.random.default_rng(0).integers(0, 3, 200)
    rows[2] = -np.inf
    rows[2, 90:110] = np.log(np.tile([0.02, 0.08], 10))
    masked = Sampling(top_k=top_k, top_p=top_p)._mask_unlikely(rows)
    for row, found in zip(rows, masked, strict=True):
        kept = np.flatnonzero(kept_by_transformers(row, top_k, top_p))
        assert np.flatnonzero(found > -np.inf).tolist() == kept.tolist()


def probabilities(logits, *, temperature, top_k, top_p, vocab_size, min_p=0.0):
    """Returns the distribution of a row in float64.

    First vocabulary and temperature, then top_k, top_p and min_p.
    """
    logits = logits.astype(np.float64)
    if vocab_size:
        logits[vocab_size:] = -np.inf
    if not temperature:
        return (np.arange(len(logits)) == np.argmax(logits)).astype(float)
    with np.errstate(all="ignore"):
        logits = np.where(logits == logits.max(), 0, (logits - logits.max()) / temperature)
        logits = logits.astype(np.float32)  # in which some are equal
    kept = kept_by_transformers(logits, min(top_k, len(logits)), top_p)
    weights = np.where(kept, np.exp(logits), 0)
    weights = np.where(weights >= min_p * weights.max(), weights, 0)
    return weights / weights.sum()


def test_the_distribution_is_that_of_a_plain_formula_at_all_extremes(monkeypatch):
    """Rows of a batch: typical, tied, huge, tiny, one token alone, masked by the model."""
    V = 12
    random = np.random.default_rng(0)
    rows = np.stack(
        [
            random.normal(size=V),
            random.integers(0, 3, V),
            1e30 * random.normal(size=V),
            1e-30 * random.normal(size=V),
            np.where(np.arange(V) == 7, -5.0, -np.inf),
            np.where(np.arange(V) % 3 == 1, 2.0 * random.normal(size=V), -np.inf),
            np.linspace(-60, 60, V),
        ]
    ).astype(np.float32)
    # The logits from which a token is drawn.
    monkeypatch.setattr(jax.random, "categorical", lambda key, logits: logits)
    settings = itertools.product(
        (5e-324, 0.05, 1.0, 1e30), (0, 4, V + 5), (1e-9, 0.37, 0.91, 1.0), (0, 9)
    )
    for temperature, top_k, top_p, vocab_size in settings:
        options = dict(temperature=temperature, top_k=top_k, top_p=top_p, vocab_size=vocab_size)
        masked = np.asarray(Sampling(**options).draw(rows, 0), np.float64)
        found = np.exp(masked - masked.max(-1, keepdims=True))
        found /= found.sum(-1, keepdims=True)
        expected = np.stack([probabilities(row, **options) for row in rows])
        np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=str(options))


def test_draws_of_steps_rows_and_seeds_are_independent_and_of_the_distribution():
    logits = np.tile(np.log([[0.4, 0.3, 0.2, 0.1]]).astype(np.float32), (8, 1))
    draw = jax.jit(jax.vmap(lambda number: Sampling(seed=5).draw(logits, number)))
    drawn = np.asarray(draw(np.arange(4_000)))  # (steps, rows)
    shares = np.array([0.4, 0.3, 0.2, 0.1])
    for row in drawn.T:
        counts = np.bincount(row, minlength=4)
        chi_square = ((counts - 4_000 * shares) ** 2 / (4_000 * shares)).sum()
        assert chi_square < 25  # of 3 degrees of freedom: 1 in 65,000 is larger
    same = (shares**2).sum()
    limit = 4.5 * np.sqrt(same * (1 - same) / 4_000)
    for a, b in itertools.combinations(range(8), 2):
        assert abs((drawn[:, a] == drawn[:, b]).mean() - same) < limit
        assert abs((drawn[1:, a] == drawn[:-1, b]).mean() - same) < limit
    other = jax.jit(jax.vmap(lambda number: Sampling(seed=6).draw(logits, number)))
    assert abs((np.asarray(other(np.arange(4_000))) == drawn).mean() - same) < limit


def test_top_p_keeps_half_of_200_equally_likely_tokens():
    draw = jax.jit(jax.vmap(lambda number: Sampling(top_p=0.5).draw(np.zeros((1, 200)), number)[0]))
    assert len(np.unique(draw(np.arange(5_000)))) == 100


# ---- penalties for the tokens so far ----


def penalized_by_transformers(logits_V, prompt, new, settings):
    """Returns the logits after its RepetitionPenalty- and NoRepeatNGramLogitsProcessor, in float64.

    Between them the penalties of OpenAI's API: mu -= count * frequency + (count > 0) * presence.
    """
    logits_V = logits_V.astype(np.float64)
    tokens = [*prompt, *new]
    for token in set(tokens):
        factor = settings.repetition_penalty
        logits_V[token] = (
            logits_V[token] * factor if logits_V[token] < 0 else logits_V[token] / factor
        )
    for token in set(new):
        logits_V[token] -= new.count(token) * settings.frequency_penalty
        logits_V[token] -= settings.presence_penalty
    size = settings.no_repeat_ngram_size
    if size and len(tokens) >= size:
        beginning = tokens[len(tokens) - size + 1 :]
        for start in range(len(tokens) - size + 1):
            ngram = tokens[start : start + size]
            if ngram[:-1] == beginning:
                logits_V[ngram[-1]] = -np.inf
    return logits_V


PENALTIES = [
    dict(repetition_penalty=1.7),
    dict(repetition_penalty=0.6),
    dict(presence_penalty=0.8),
    dict(frequency_penalty=-0.5),
    dict(no_repeat_ngram_size=1),
    dict(no_repeat_ngram_size=2),
    dict(no_repeat_ngram_size=3),
    dict(no_repeat_ngram_size=9),
    dict(
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        no_repeat_ngram_size=2,
        temperature=0.8,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        vocab_size=11,
    ),
]


@pytest.mark.parametrize("options", PENALTIES, ids=str)
def test_penalties_are_those_of_a_plain_formula_for_rows_of_any_length(options, monkeypatch):
    V, width = 12, 14
    random = np.random.default_rng(1)
    settings = Sampling(**options)
    number = 4
    prompts = [random.integers(0, 6, size).tolist() for size in (1, 3, 10)]
    news = [random.integers(0, 6, number).tolist() for _ in prompts]
    logits_BV = (3 * random.normal(size=(len(prompts), V))).astype(np.float32)
    rows_BH = np.full((len(prompts), width), sampling.NO_TOKEN, np.int32)
    for row, prompt, new in zip(rows_BH, prompts, news, strict=True):
        row[width - len(prompt) - number :] = [*prompt, *new]
    monkeypatch.setattr(jax.random, "categorical", lambda key, logits: logits)
    masked = np.asarray(settings.draw(logits_BV, number, rows_BH), np.float64)
    found = np.exp(masked - masked.max(-1, keepdims=True))
    found /= found.sum(-1, keepdims=True)
    for logits, prompt, new, probs in zip(logits_BV, prompts, news, found, strict=True):
        penalized = penalized_by_transformers(logits, prompt, new, settings)
        expected = probabilities(
            penalized,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            vocab_size=settings.vocab_size,
            min_p=settings.min_p,
        )
        np.testing.assert_allclose(probs, expected, atol=1e-5)


@pytest.mark.skipif(
    not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")),
    reason="needs torch and transformers",
)
@pytest.mark.parametrize("seed", range(4))
def test_distributions_are_those_of_the_processors_of_transformers(seed, monkeypatch):
    import torch
    from transformers.generation import logits_process as hf

    monkeypatch.setattr(jax.random, "categorical", lambda key, logits: logits)
    random = np.random.default_rng(seed)
    for _ in range(25):
        V, size = int(random.integers(5, 60)), int(random.integers(1, 30))
        tokens = random.integers(0, max(2, V // 3), (2, size))
        logits_BV = (5 * random.normal(size=(2, V))).astype(np.float32)
        if random.random() < 0.3:
            logits_BV = np.round(logits_BV)  # with ties
        settings = Sampling(
            temperature=float(random.choice([0.3, 1.0, 2.5])),
            top_k=int(random.choice([0, 1, 4, 70])),
            top_p=float(random.choice([0.3, 0.95, 1.0])),
            min_p=float(random.choice([0.0, 0.05, 0.5])),
            repetition_penalty=float(random.choice([0.8, 1.0, 1.4])),
            no_repeat_ngram_size=int(random.choice([0, 2, 3])),
        )
        ids, scores = torch.tensor(tokens), torch.tensor(logits_BV)
        steps = []
        if settings.repetition_penalty != 1:
            steps.append(hf.RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
        if settings.no_repeat_ngram_size:
            steps.append(hf.NoRepeatNGramLogitsProcessor(settings.no_repeat_ngram_size))
        steps.append(hf.TemperatureLogitsWarper(settings.temperature))
        if settings.top_k:
            steps.append(hf.TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1:
            steps.append(hf.TopPLogitsWarper(settings.top_p))
        if settings.min_p:
            steps.append(hf.MinPLogitsWarper(settings.min_p))
        for step in steps:
            scores = step(ids, scores)
        expected = torch.softmax(scores.double(), -1).numpy()
        masked = settings.draw(logits_BV, 0, np.asarray(tokens, np.int32))
        found = np.asarray(jax.nn.softmax(masked, axis=-1))
        np.testing.assert_allclose(found, expected, atol=2e-5, err_msg=str(settings))


def test_a_vocabulary_that_is_used_up_may_repeat():
    rows = np.arange(4, dtype=np.int32)[None]
    greedy = Sampling(temperature=0.0, no_repeat_ngram_size=1)
    assert int(greedy.draw(LOGITS, 4, rows)[0]) == 0
    assert int(greedy.draw(LOGITS, 4, rows[:, :3])[0]) == 3


@pytest.mark.slow
def test_penalties_see_the_prompt_and_each_new_token_on_every_mesh():
    settings = Sampling(temperature=0.0, no_repeat_ngram_size=1)
    program, params = build_program({})
    rows = sampled_rows(program, params, length=8, sampling=settings)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        assert len({*prompt, *row}) == len({*prompt}) + len(row)
    sharded = build_program({}, data=2, fsdp=2, tensor=2)
    assert sampled_rows(*sharded, length=8, sampling=settings) == rows


@pytest.mark.slow
def test_calls_with_few_shapes_share_programs_and_generate_the_same():
    program, params = build_program({})
    options = dict(context=32, dtype="float32", sampling=GREEDY)
    run = sampling.generator(program, params, **options, few_shapes=True)
    exact = sampling.generator(program, params, **options)
    for prompts in ([[5] * 9], [[1] * 12], [list(range(3)), list(range(13))], [list(range(40))]):
        expected = list(exact(prompts, length=30))
        assert list(run(prompts, length=30)) == expected


def test_a_row_that_the_caller_ends_is_generated_no_further():
    program, params = build_program({})
    ended = set()
    options = dict(context=64, dtype="float32", sampling=GREEDY)
    steps = sampling.generator(program, params, **options)(PROMPTS, length=5, ended=ended)
    rows = [next(steps)]
    ended.update((0, 2))
    rows.append(next(steps))
    assert None not in rows[0]
    assert rows[1][0] is None and rows[1][1] is not None and rows[1][2] is None
    ended.add(1)
    assert list(steps) == []


# ---- invalid settings ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=-1.0), "--temperature=-1.0"),
        (dict(temperature=np.inf), "--temperature=inf"),
        (dict(top_k=-1), "--top_k=-1"),
        (dict(top_p=0.0), "--top_p=0.0"),
        (dict(top_p=1.1), "--top_p=1.1"),
        (dict(min_p=-0.1), "--min_p=-0.1"),
        (dict(min_p=1.5), "--min_p=1.5"),
        (dict(repetition_penalty=0.0), "--repetition_penalty=0.0"),
        (dict(repetition_penalty=np.nan), "--repetition_penalty=nan"),
        (dict(presence_penalty=np.inf), "--presence_penalty=inf"),
        (dict(frequency_penalty=np.nan), "--frequency_penalty=nan"),
        (dict(no_repeat_ngram_size=-1), "--no_repeat_ngram_size=-1"),
    ],
)
def test_invalid_sampling_options_are_rejected(options, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)


@pytest.mark.parametrize("name", ["cached_embed", "cached_block"])
def test_a_model_without_a_cache_is_rejected_in_a_line(name):
    program, params = build_program({})
    program = dataclasses.replace(program, model=dataclasses.replace(program.model, **{name: None}))
    with pytest.raises(ConfigError, match=f"model: has no {name}, which generation needs"):
        sampled_rows(program, params, [[1]], length=1)


def test_each_stream_has_other_random_numbers():
    logits = np.zeros((64, 50), np.float32)
    drawn = Sampling(seed=3).draw
    first = np.asarray(drawn(logits, 5))
    np.testing.assert_array_equal(np.asarray(drawn(logits, 5, stream=0)), first)
    streams = [np.asarray(jax.jit(drawn)(logits, 5, None, n)) for n in range(3)]
    np.testing.assert_array_equal(streams[0], first)
    assert (streams[1] != first).mean() > 0.8 and (streams[2] != streams[1]).mean() > 0.8
