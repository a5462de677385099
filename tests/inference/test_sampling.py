"""Tokens drawn with keys and values kept are those of the whole text run anew for each."""

import jax
import numpy as np
import pytest
from conftest import tiny_config
from test_families import FAMILIES

from meshtrain import ConfigError
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.data.source import Batch
from meshtrain.inference.sampling import Sampling, generate
from meshtrain.models import transformer
from meshtrain.program import assemble
from meshtrain.verify import reference_step as reference

PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [60, 3, 60, 3]]
GREEDY = Sampling(temperature=0.0)
MIXED = FAMILIES["gemma 2"]


def made(model, **layout):
    """A program on a mesh, and parameters so large that its logits are far from flat."""
    c = tiny_config()
    c.model.update({"max_seq_len": 64, **model})
    c.mesh.update({"data": 1, **layout})
    num_devices = int(np.prod(list(layout.values()) or [1]))
    cfg = parse(c, num_devices=num_devices)
    parts = build(cfg)
    program = assemble(cfg, parts, devices=jax.devices()[:num_devices])
    with program.active():
        params = program.start(0).params
        places = jax.tree.map(lambda leaf: leaf.sharding, params)
        grow = jax.jit(lambda p: jax.tree.map(lambda leaf: 4 * leaf, p), out_shardings=places)
        return program, grow(params)


def rows_of(program, params, prompts=PROMPTS, *, length=12, context=64, sampling=GREEDY, stop=()):
    options = dict(length=length, context=context, dtype="float32", sampling=sampling, stop=stop)
    steps = generate(program, params, prompts, **options)
    return [list(row) for row in zip(*steps, strict=True)]


def recomputed(program, params, prompt, length, width=64):
    """The likeliest tokens one after the other, each of a full run over the text so far."""
    params = jax.device_get(params)

    @jax.jit
    def logits(params, tokens, last):
        batch = Batch(tokens, tokens, np.ones(tokens.shape, np.float32))
        x = reference.blocks(program.model, params, batch)
        return program.model.logits(params, x)[0, last]

    text = list(prompt)
    for _ in range(length):
        row = np.zeros((1, width), np.int32)
        row[0, : len(text)] = text
        text.append(int(np.argmax(logits(params, row, len(text) - 1))))
    return text[len(prompt) :]


@pytest.mark.parametrize("family", ["llama 3", "gemma 3", "gpt-2", "mistral"])
@pytest.mark.parametrize("attention_impl", ["xla", "blockwise"])
def test_cached_tokens_are_those_of_the_whole_text_run_anew(family, attention_impl):
    program, params = made({**FAMILIES[family], "attention_impl": attention_impl})
    due = [recomputed(program, params, prompt, 12) for prompt in PROMPTS]
    assert rows_of(program, params) == due
    assert len({*due[0], *due[1], *due[2]}) > 4  # no model that says one thing alone


def test_a_prompt_is_read_by_the_attention_of_the_config_and_tokens_by_the_plain_one(monkeypatch):
    program, params = made({"attention_impl": "blockwise"})
    taken, real = set(), transformer.attention

    def recorded(q_BSHK, *args, implementation="xla", **options):
        taken.add((q_BSHK.shape[1] > 1, implementation))
        return real(q_BSHK, *args, implementation=implementation, **options)

    monkeypatch.setattr(transformer, "attention", recorded)
    rows_of(program, params, length=2)
    assert taken == {(True, "blockwise"), (False, "xla")}


@pytest.mark.parametrize(
    ("layout", "sampling"),
    [
        ({"tensor": 2}, GREEDY),
        ({"fsdp": 4}, GREEDY),  # three rows on four devices
        ({"data": 2, "fsdp": 2, "tensor": 2}, Sampling(1.5, top_k=20, top_p=0.9, seed=3)),
    ],
    ids=str,
)
def test_any_mesh_draws_the_same_tokens(layout, sampling):
    program, params = made(MIXED)
    alone = rows_of(program, params, sampling=sampling)
    if sampling == GREEDY:
        assert alone == [recomputed(program, params, prompt, 12) for prompt in PROMPTS]
    assert rows_of(*made(MIXED, **layout), sampling=sampling) == alone


def test_where_the_context_is_used_up_the_newer_half_is_read_anew():
    program, params = made({}, tensor=2)
    prompt = list(range(20))
    first = recomputed(program, params, prompt, 13)  # 20 + 12 fill a context of 32
    second = recomputed(program, params, [*prompt, *first][-16:], 17)
    third = recomputed(program, params, [*prompt, *first, *second][-16:], 4)
    (row,) = rows_of(program, params, [prompt], length=34, context=32)
    assert row == [*first, *second, *third]
    (long,) = rows_of(program, params, [list(range(50))], length=1, context=32)
    assert long == recomputed(program, params, list(range(50))[-32:], 1)


def test_a_row_ends_with_a_stop_token_and_the_others_go_on():
    program, params = made(MIXED)
    free = rows_of(program, params)
    stop = next(token for token in free[1] if token not in free[0])
    rows = rows_of(program, params, stop=[stop])
    end = free[1].index(stop)
    assert rows[0] == free[0]
    assert rows[1] == free[1][:end] + [None] * (12 - end)
    (alone,) = rows_of(program, params, PROMPTS[1:2], stop=[stop])
    assert alone == free[1][:end] + [None]


def test_a_row_draws_the_same_whatever_stands_beside_it_and_a_seed_changes_it():
    program, params = made({})
    hot = Sampling(temperature=3.0, seed=1)
    (alone,) = rows_of(program, params, PROMPTS[:1], sampling=hot)
    assert rows_of(program, params, sampling=hot)[0] == alone
    assert rows_of(program, params, PROMPTS[:1], sampling=Sampling(3.0, seed=2)) != [alone]


# ---- what is drawn ----


LOGITS = np.log([[0.5, 0.3, 0.15, 0.05]]).astype(np.float32)


@pytest.mark.parametrize(
    ("sampling", "due"),
    [
        (Sampling(), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(top_k=2), [0.625, 0.375, 0, 0]),
        (Sampling(top_k=9), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(top_p=0.79), [0.625, 0.375, 0, 0]),
        (Sampling(top_p=0.81), [10 / 19, 6 / 19, 3 / 19, 0]),
        (Sampling(top_p=0.01), [1, 0, 0, 0]),
        (Sampling(top_k=3, top_p=0.5), [1, 0, 0, 0]),  # 0.526 of what top_k leaves
        (Sampling(temperature=0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        (Sampling(temperature=0), [1, 0, 0, 0]),
        (Sampling(temperature=1e-40), [1, 0, 0, 0]),
        (Sampling(vocab_size=2), [0.625, 0.375, 0, 0]),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_they_should(sampling, due):
    draw = jax.jit(jax.vmap(lambda number: sampling.draw(LOGITS, number)[0]))
    drawn = np.bincount(draw(np.arange(20_000)), minlength=4) / 20_000
    np.testing.assert_allclose(drawn, due, atol=0.02)
    assert not drawn[np.array(due) == 0].any()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (dict(temperature=-1.0), "--temperature=-1.0"),
        (dict(temperature=np.inf), "--temperature=inf"),
        (dict(top_k=-1), "--top_k=-1"),
        (dict(top_p=0.0), "--top_p=0.0"),
        (dict(top_p=1.1), "--top_p=1.1"),
    ],
)
def test_what_cannot_be_drawn_by_is_told(options, told):
    with pytest.raises(ConfigError, match=told):
        Sampling(**options)
