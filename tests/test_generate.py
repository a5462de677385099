"""Text from a checkpoint."""

import jax
import numpy as np
import pytest
from conftest import tiny_config

import meshtrain
from meshtrain import generate


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run that learned to count: each row of the data is 0, 1, 2, ... modulo 64."""
    folder = tmp_path_factory.mktemp("count")
    c = tiny_config()
    c.train.steps, c.optim.learning_rate, c.eval.batches = 150, 1e-2, 0
    rows = (np.arange(17)[None, :] + np.arange(48)[:, None]) % 64

    def read(indices):
        return meshtrain.data.tokens.to_batch(rows[indices % 48].astype(np.int32))

    meshtrain.train(c, workdir=folder, data=meshtrain.Source(read))
    return folder


def test_the_likeliest_tokens_go_on_past_the_window(workdir):
    cfg, params = generate.restore(workdir)
    options = dict(seq_len=16, length=30, temperature=0.0)
    tokens = generate.generate(cfg.model, params, np.array([3, 4, 5]), **options)
    assert tokens.tolist() == list(range(6, 36))
    one = generate.generate(cfg.model, params, np.arange(40), **options)  # the last 16 count
    assert one.tolist()[:10] == list(range(40, 50))


def test_a_seed_draws_the_same_and_another_differs(workdir):
    cfg, params = generate.restore(workdir)
    options = dict(seq_len=16, length=20, temperature=3.0)
    a, b, c = (
        generate.generate(cfg.model, params, np.array([3]), seed=seed, **options).tolist()
        for seed in (1, 1, 2)
    )
    assert a == b != c
    assert jax.tree.leaves(params)[0].sharding.num_devices == 1


def test_the_command_prints_the_prompt_and_tells_what_is_missing(workdir, tmp_path, capsys):
    assert (
        generate.main([f"--workdir={workdir}", "--prompt=!", "--length=3", "--temperature=0"]) == 0
    )
    assert capsys.readouterr().out == '!"#$\n'
    assert generate.main([f"--workdir={tmp_path}"]) == 2
    assert "no run there" in capsys.readouterr().err
